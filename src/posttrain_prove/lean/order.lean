/- Order on natural numbers, subtraction, and the lemmas that proofs by hand need, all proved here.

Joined to tactics.lean, as are linear.lean and omega.lean. -/
set_option genCtorIdx false
inductive Nat.le (n : Nat) : Nat → Prop where
  | refl : Nat.le n n
  | step {m : Nat} (h : Nat.le n m) : Nat.le n (Nat.succ m)
def Nat.lt (n m : Nat) : Prop := Nat.le (n + 1) m
class LE (α : Type u) where
  le : α → α → Prop
class LT (α : Type u) where
  lt : α → α → Prop
@[reducible] def GE.ge {α : Type u} [LE α] (a b : α) : Prop := LE.le b a
@[reducible] def GT.gt {α : Type u} [LT α] (a b : α) : Prop := LT.lt b a
@[reducible] instance instLENat : LE Nat := LE.mk Nat.le
@[reducible] instance instLTNat : LT Nat := LT.mk Nat.lt
@[extern "x", term_parser 1000] def «term_≤_» : Lean.TrailingParserDescr := Lean.TrailingParserDescr.x
@[extern "x", term_parser 1000] def «term_<_» : Lean.TrailingParserDescr := Lean.TrailingParserDescr.x
@[extern "x", term_parser 1000] def «term_≥_» : Lean.TrailingParserDescr := Lean.TrailingParserDescr.x
@[extern "x", term_parser 1000] def «term_>_» : Lean.TrailingParserDescr := Lean.TrailingParserDescr.x
@[extern "x", term_parser 1000] def «term_<=_» : Lean.TrailingParserDescr := Lean.TrailingParserDescr.x
@[extern "x", term_parser 1000] def «term_>=_» : Lean.TrailingParserDescr := Lean.TrailingParserDescr.x
@[extern "x", macro «term_<=_»] def «_aux_Init_Notation___macroRules_term_<=__1» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro «term_<=_»] def «_aux_Init_Notation___macroRules_term_<=__2» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro «term_>=_»] def «_aux_Init_Notation___macroRules_term_>=__1» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro «term_>=_»] def «_aux_Init_Notation___macroRules_term_>=__2» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro «term_≤_»] def «_aux_Init_Notation___macroRules_term_≤__1» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro «term_≤_»] def «_aux_Init_Notation___macroRules_term_≤__2» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro «term_<_»] def «_aux_Init_Notation___macroRules_term_<__1» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro «term_<_»] def «_aux_Init_Notation___macroRules_term_<__2» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro «term_≥_»] def «_aux_Init_Notation___macroRules_term_≥__1» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro «term_≥_»] def «_aux_Init_Notation___macroRules_term_≥__2» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro «term_>_»] def «_aux_Init_Notation___macroRules_term_>__1» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro «term_>_»] def «_aux_Init_Notation___macroRules_term_>__2» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", app_unexpander LE.le] def _aux_Init_Notation___unexpand_LE_le_2 : Lean.PrettyPrinter.Unexpander := fun _ _ _ => Lean.Told.x
@[extern "x", app_unexpander LT.lt] def _aux_Init_Notation___unexpand_LT_lt_1 : Lean.PrettyPrinter.Unexpander := fun _ _ _ => Lean.Told.x
@[extern "x", app_unexpander GE.ge] def _aux_Init_Notation___unexpand_GE_ge_2 : Lean.PrettyPrinter.Unexpander := fun _ _ _ => Lean.Told.x
@[extern "x", app_unexpander GT.gt] def _aux_Init_Notation___unexpand_GT_gt_1 : Lean.PrettyPrinter.Unexpander := fun _ _ _ => Lean.Told.x

class HSub (α : Type u) (β : Type v) (γ : outParam (Type w)) where
  hSub : α → β → γ
class Sub (α : Type u) where
  sub : α → α → α
@[default_instance, reducible] instance instHSub {α : Type u} [Sub α] : HSub α α α := HSub.mk Sub.sub
@[extern "lean_nat_sub"] def Nat.sub (a b : Nat) : Nat := @Nat.rec (fun _ => Nat) a (fun _ r => Nat.pred r) b
@[reducible] noncomputable instance instSubNat : Sub Nat := Sub.mk Nat.sub
@[extern "x", term_parser 1000] def «term_-_» : Lean.TrailingParserDescr := Lean.TrailingParserDescr.x
@[extern "x", macro «term_-_»] def «_aux_Init_Notation___macroRules_term_-__1» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro «term_-_»] def «_aux_Init_Notation___macroRules_term_-__2» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", app_unexpander HSub.hSub] def _aux_Init_Notation___unexpand_HSub_hSub_1 : Lean.PrettyPrinter.Unexpander := fun _ _ _ => Lean.Told.x
noncomputable section
theorem Bool.false_ne_true (h : Bool.false = Bool.true) : False :=
  @Eq.ndrec Bool Bool.false (fun b => @Bool.rec (fun _ => Prop) True False b) trivial _ h
namespace Nat
theorem zero_add (n : Nat) : 0 + n = n := by
  induction n with
  | zero => rfl
  | succ n ih => exact congrArg Nat.succ ih
theorem succ_add (a b : Nat) : Nat.succ a + b = Nat.succ (a + b) := by
  induction b with
  | zero => rfl
  | succ b ih => exact congrArg Nat.succ ih
theorem add_comm (a b : Nat) : a + b = b + a := by
  induction b with
  | zero => exact (zero_add a).symm
  | succ b ih => exact Eq.trans (congrArg Nat.succ ih) (succ_add b a).symm
theorem add_assoc (a b c : Nat) : a + b + c = a + (b + c) := by
  induction c with
  | zero => rfl
  | succ c ih => exact congrArg Nat.succ ih
theorem add_left_comm (a b c : Nat) : a + (b + c) = b + (a + c) := by
  rw [← add_assoc, add_comm a b, add_assoc]
theorem zero_mul (n : Nat) : 0 * n = 0 := by
  induction n with
  | zero => rfl
  | succ n ih => exact ih
theorem succ_mul (a b : Nat) : Nat.succ a * b = a * b + b := by
  induction b with
  | zero => rfl
  | succ b ih =>
    show Nat.succ a * b + Nat.succ a = a * b + a + Nat.succ b
    rw [ih]
    show Nat.succ (a * b + b + a) = Nat.succ (a * b + a + b)
    rw [add_assoc, add_comm b a, add_assoc]
theorem mul_comm (a b : Nat) : a * b = b * a := by
  induction b with
  | zero => exact (zero_mul a).symm
  | succ b ih =>
    rw [succ_mul]
    show a * b + a = _
    rw [ih]
theorem mul_add (a b c : Nat) : a * (b + c) = a * b + a * c := by
  induction c with
  | zero => rfl
  | succ c ih =>
    show a * (b + c) + a = a * b + (a * c + a)
    rw [ih, add_assoc]
theorem add_mul (a b c : Nat) : (a + b) * c = a * c + b * c := by
  rw [mul_comm, mul_add, mul_comm c a, mul_comm c b]
theorem mul_assoc (a b c : Nat) : a * b * c = a * (b * c) := by
  induction c with
  | zero => rfl
  | succ c ih =>
    show a * b * c + a * b = a * (b * c + b)
    rw [ih, mul_add]
theorem one_mul (n : Nat) : 1 * n = n := by
  rw [succ_mul 0 n, zero_mul, zero_add]
theorem mul_one (n : Nat) : n * 1 = n := zero_add n
theorem add_right_cancel {a b c : Nat} (h : a + c = b + c) : a = b := by
  induction c with
  | zero => exact h
  | succ c ih => exact ih (Nat.succ.inj h)
theorem le_refl (n : Nat) : n ≤ n := Nat.le.refl
theorem le_trans {a b c : Nat} (h : a ≤ b) (k : b ≤ c) : a ≤ c := by
  induction k with
  | refl => exact h
  | step _ ih => exact Nat.le.step ih
theorem le_succ (n : Nat) : n ≤ n + 1 := Nat.le.step Nat.le.refl
theorem zero_le (n : Nat) : 0 ≤ n := by
  induction n with
  | zero => exact Nat.le.refl
  | succ n ih => exact Nat.le.step ih
theorem succ_le_succ {a b : Nat} (h : a ≤ b) : a + 1 ≤ b + 1 := by
  induction h with
  | refl => exact Nat.le.refl
  | step _ ih => exact Nat.le.step ih
theorem pred_le_pred {a b : Nat} (h : a ≤ b) : Nat.pred a ≤ Nat.pred b := by
  induction h with
  | refl => exact Nat.le.refl
  | @step m h ih =>
    cases m with
    | zero => exact ih
    | succ m => exact Nat.le.step ih
theorem le_of_succ_le_succ {a b : Nat} (h : a + 1 ≤ b + 1) : a ≤ b := pred_le_pred h
theorem not_succ_le_zero (n : Nat) : ¬ n + 1 ≤ 0 := by
  intro h
  cases h
theorem not_succ_le_self (n : Nat) : ¬ n + 1 ≤ n := by
  induction n with
  | zero => exact not_succ_le_zero 0
  | succ n ih => exact fun h => ih (le_of_succ_le_succ h)
theorem lt_irrefl (n : Nat) : ¬ n < n := not_succ_le_self n
theorem le_of_lt {a b : Nat} (h : a < b) : a ≤ b := le_trans (le_succ a) h
theorem lt_of_lt_of_le {a b c : Nat} (h : a < b) (k : b ≤ c) : a < c := le_trans h k
theorem lt_of_le_of_lt {a b c : Nat} (h : a ≤ b) (k : b < c) : a < c := le_trans (succ_le_succ h) k
theorem lt_trans {a b c : Nat} (h : a < b) (k : b < c) : a < c := lt_of_lt_of_le h (le_of_lt k)
theorem not_le_of_lt {a b : Nat} (h : a < b) : ¬ b ≤ a := fun k => lt_irrefl a (lt_of_lt_of_le h k)
theorem lt_or_ge (a b : Nat) : a < b ∨ b ≤ a := by
  induction b with
  | zero => exact Or.inr (zero_le a)
  | succ b ih =>
    cases ih with
    | inl h => exact Or.inl (Nat.le.step h)
    | inr h =>
      cases h with
      | refl => exact Or.inl Nat.le.refl
      | step h => exact Or.inr (succ_le_succ h)
theorem le_total (a b : Nat) : a ≤ b ∨ b ≤ a := by
  cases lt_or_ge a b with
  | inl h => exact Or.inl (le_of_lt h)
  | inr h => exact Or.inr h
theorem lt_of_not_le {a b : Nat} (h : ¬ b ≤ a) : a < b := by
  cases lt_or_ge a b with
  | inl k => exact k
  | inr k => exact absurd k h
theorem le_of_not_lt {a b : Nat} (h : ¬ a < b) : b ≤ a := by
  cases lt_or_ge a b with
  | inl k => exact absurd k h
  | inr k => exact k
theorem le_antisymm {a b : Nat} (h : a ≤ b) (k : b ≤ a) : a = b := by
  cases h with
  | refl => rfl
  | step h => exact absurd (lt_of_lt_of_le (succ_le_succ h) k) (lt_irrefl _)
theorem le_of_eq {a b : Nat} (h : a = b) : a ≤ b := h ▸ le_refl a
theorem le_add_right (a b : Nat) : a ≤ a + b := by
  induction b with
  | zero => exact Nat.le.refl
  | succ b ih => exact Nat.le.step ih
theorem le_add_left (a b : Nat) : a ≤ b + a := by
  rw [add_comm]
  exact le_add_right a b
theorem add_le_add_right {a b : Nat} (h : a ≤ b) (c : Nat) : a + c ≤ b + c := by
  induction c with
  | zero => exact h
  | succ c ih => exact succ_le_succ ih
theorem add_le_add_left {a b : Nat} (h : a ≤ b) (c : Nat) : c + a ≤ c + b := by
  rw [add_comm c a, add_comm c b]
  exact add_le_add_right h c
theorem add_le_add {a b c d : Nat} (h : a ≤ b) (k : c ≤ d) : a + c ≤ b + d :=
  le_trans (add_le_add_right h c) (add_le_add_left k b)
theorem le_of_add_le_add_right {a b c : Nat} (h : a + c ≤ b + c) : a ≤ b := by
  induction c with
  | zero => exact h
  | succ c ih => exact ih (le_of_succ_le_succ h)
theorem mul_le_mul_left {a b : Nat} (c : Nat) (h : a ≤ b) : c * a ≤ c * b := by
  induction c with
  | zero =>
    rw [zero_mul, zero_mul]
    exact Nat.le.refl
  | succ c ih =>
    rw [succ_mul, succ_mul]
    exact add_le_add ih h
theorem exists_eq_add_of_le {a b : Nat} (h : a ≤ b) : ∃ k : Nat, b = a + k := by
  induction h with
  | refl => exact ⟨0, rfl⟩
  | step _ ih =>
    cases ih with
    | intro k e => exact ⟨k + 1, congrArg Nat.succ e⟩
theorem eq_of_beq {a : Nat} : ∀ {b : Nat}, Nat.beq a b = Bool.true → a = b := by
  induction a with
  | zero =>
    intro b h
    cases b with
    | zero => rfl
    | succ b => exact False.elim (Bool.false_ne_true h)
  | succ a ih =>
    intro b h
    cases b with
    | zero => exact False.elim (Bool.false_ne_true h)
    | succ b => exact congrArg Nat.succ (ih h)
theorem le_of_ble {a : Nat} : ∀ {b : Nat}, Nat.ble a b = Bool.true → a ≤ b := by
  induction a with
  | zero => exact fun {b} _ => zero_le b
  | succ a ih =>
    intro b h
    cases b with
    | zero => exact False.elim (Bool.false_ne_true h)
    | succ b => exact succ_le_succ (ih h)
theorem ble_of_le {a b : Nat} (h : a ≤ b) : Nat.ble a b = Bool.true := by
  revert b
  induction a with
  | zero => exact fun _ => rfl
  | succ a ih =>
    intro b h
    cases b with
    | zero => exact absurd h (not_succ_le_zero a)
    | succ b => exact ih (le_of_succ_le_succ h)
end Nat
@[reducible] instance Nat.decLe (a b : Nat) : Decidable (a ≤ b) :=
  @Bool.rec (fun c => Nat.ble a b = c → Decidable (a ≤ b))
    (fun e => Decidable.isFalse (fun h => Bool.false_ne_true (Eq.trans e.symm (Nat.ble_of_le h))))
    (fun e => Decidable.isTrue (Nat.le_of_ble e)) (Nat.ble a b) rfl
@[reducible] instance Nat.decLt (a b : Nat) : Decidable (a < b) := Nat.decLe (a + 1) b
theorem Nat.sub_eq_zero_of_le {a b : Nat} (h : a ≤ b) : a - b = 0 := by
  induction h with
  | refl =>
    induction a with
    | zero => rfl
    | succ a ih => 
      have k : ∀ b : Nat, Nat.pred (Nat.succ a - b) = a - b := by
        intro b
        induction b with
        | zero => rfl
        | succ b ih => exact congrArg Nat.pred ih
      exact (k a).trans ih
  | step _ ih => exact congrArg Nat.pred ih
theorem Nat.sub_add_cancel {a b : Nat} (h : b ≤ a) : a - b + b = a := by
  induction b with
  | zero => rfl
  | succ b ih =>
    have ih := ih (Nat.le_of_lt h)
    show Nat.pred (a - b) + Nat.succ b = a
    generalize a - b = d at ih
    cases d with
    | zero =>
      rw [Nat.zero_add] at ih
      rw [ih] at h
      exact absurd h (Nat.lt_irrefl a)
    | succ d =>
      rw [Nat.succ_add] at ih
      exact ih
/- Quotients by subtraction, n times at most. The kernel divides numerals by itself; the two theorems say that this
definition gives the same. -/
def Nat.quotient (n : Nat) (b : Nat) : Nat → Nat :=
  @Nat.rec (fun _ => Nat → Nat) (fun _ => 0)
    (fun _ ih a => @Bool.rec (fun _ => Nat) 0 (ih (a - b) + 1) (Nat.ble b a)) n
def Nat.div (a b : Nat) : Nat := @Nat.rec (fun _ => Nat) 0 (fun _ _ => Nat.quotient a b a) b
theorem Nat.quotient_spec {b : Nat} (p : 0 < b) (n : Nat) :
    ∀ a : Nat, a ≤ n → b * Nat.quotient n b a ≤ a ∧ a < b * Nat.quotient n b a + b := by
  induction n with
  | zero =>
    intro a h
    rw [Nat.le_antisymm h (Nat.zero_le a)]
    refine ⟨Nat.le_refl 0, ?_⟩
    show 0 < 0 + b
    rw [Nat.zero_add]
    exact p
  | succ n ih =>
    intro a h
    show b * @Bool.rec (fun _ => Nat) 0 (Nat.quotient n b (a - b) + 1) (Nat.ble b a) ≤ a ∧
      a < b * @Bool.rec (fun _ => Nat) 0 (Nat.quotient n b (a - b) + 1) (Nat.ble b a) + b
    generalize e : Nat.ble b a = c
    cases c with
    | false =>
      refine ⟨Nat.zero_le a, ?_⟩
      show a < 0 + b
      rw [Nat.zero_add]
      cases Nat.lt_or_ge a b with
      | inl l => exact l
      | inr g => exact False.elim (Bool.false_ne_true (e.symm.trans (Nat.ble_of_le g)))
    | true =>
      have k := Nat.sub_add_cancel (Nat.le_of_ble e)
      have l : a - b + 1 ≤ n + 1 := Nat.le_trans (Nat.add_le_add_left p (a - b)) (Nat.le_trans (Nat.le_of_eq k) h)
      have q := ih (a - b) (Nat.le_of_succ_le_succ l)
      show b * Nat.quotient n b (a - b) + b ≤ a ∧ a < b * Nat.quotient n b (a - b) + b + b
      generalize b * Nat.quotient n b (a - b) = m at q
      have x : m + b ≤ a - b + b := Nat.add_le_add_right q.1 b
      have y : a - b + 1 + b ≤ m + b + b := Nat.add_le_add_right q.2 b
      rw [Nat.succ_add] at y
      rw [k] at x y
      exact ⟨x, y⟩
theorem Nat.div_zero (a : Nat) : Nat.div a 0 = 0 := rfl
theorem Nat.div_spec (a : Nat) {b : Nat} (p : 0 < b) : b * Nat.div a b ≤ a ∧ a < b * Nat.div a b + b := by
  cases b with
  | zero => exact absurd p (Nat.lt_irrefl 0)
  | succ b => exact Nat.quotient_spec p a a (Nat.le_refl a)
abbrev ℕ : Type := Nat
end
