/- A decision procedure for linear arithmetic over natural numbers, and the proof that it is sound.

`sound` below: if `valid n f` computes to true, the formula f holds for all values of its n atoms. -/
noncomputable section
namespace Lean.Arith
/- Booleans. -/
def both (a b : Bool) : Bool := @Bool.rec (fun _ => Bool) Bool.false b a
theorem both_left {a b : Bool} (h : both a b = Bool.true) : a = Bool.true := by
  cases a with
  | false => exact False.elim (Bool.false_ne_true h)
  | true => rfl
theorem both_right {a b : Bool} (h : both a b = Bool.true) : b = Bool.true := by
  cases a with
  | false => exact False.elim (Bool.false_ne_true h)
  | true => exact h
def pick {α : Type} (c : Bool) (x y : α) : α := @Bool.rec (fun _ => α) y x c

/- Sums of atoms: the coefficient of each, in order. -/
def head (l : List Nat) : Nat := @List.rec Nat (fun _ => Nat) 0 (fun a _ _ => a) l
def tail (l : List Nat) : List Nat := @List.rec Nat (fun _ => List Nat) List.nil (fun _ r _ => r) l
def dot (l : List Nat) : List Nat → Nat :=
  @List.rec Nat (fun _ => List Nat → Nat) (fun _ => 0) (fun a _ ih v => a * head v + ih (tail v)) l
def sum (l : List Nat) : List Nat → List Nat :=
  @List.rec Nat (fun _ => List Nat → List Nat) (fun m => m)
    (fun a _ ih m => List.cons (a + head m) (ih (tail m))) l
def scale (k : Nat) (l : List Nat) : List Nat :=
  @List.rec Nat (fun _ => List Nat) List.nil (fun a _ ih => List.cons (k * a) ih) l
def isZero (l : List Nat) : Bool :=
  @List.rec Nat (fun _ => Bool) Bool.true (fun a _ ih => both (Nat.beq a 0) ih) l
def same (l : List Nat) : List Nat → Bool :=
  @List.rec Nat (fun _ => List Nat → Bool) isZero (fun a _ ih m => both (Nat.beq a (head m)) (ih (tail m))) l
theorem dot_split (l v : List Nat) : dot l v = head l * head v + dot (tail l) (tail v) := by
  cases l with
  | nil => exact (Nat.zero_mul (head v)).symm
  | cons a l => rfl
theorem swap (a b c d : Nat) : a + b + (c + d) = a + c + (b + d) := by
  rw [Nat.add_assoc, Nat.add_left_comm b c d, ← Nat.add_assoc]
theorem dot_sum (l : List Nat) : ∀ m v : List Nat, dot (sum l m) v = dot l v + dot m v := by
  induction l with
  | nil => exact fun m v => (Nat.zero_add _).symm
  | cons a l ih =>
    intro m v
    show (a + head m) * head v + dot (sum l (tail m)) (tail v) = a * head v + dot l (tail v) + dot m v
    rw [ih, dot_split m v, Nat.add_mul, swap]
theorem dot_scale (k : Nat) (l : List Nat) : ∀ v : List Nat, dot (scale k l) v = k * dot l v := by
  induction l with
  | nil => exact fun v => rfl
  | cons a l ih =>
    intro v
    show k * a * head v + dot (scale k l) (tail v) = k * (a * head v + dot l (tail v))
    rw [ih, Nat.mul_assoc, Nat.mul_add]
theorem dot_zero (l : List Nat) : ∀ v : List Nat, isZero l = Bool.true → dot l v = 0 := by
  induction l with
  | nil => exact fun v _ => rfl
  | cons a l ih =>
    intro v h
    show a * head v + dot l (tail v) = 0
    rw [ih _ (both_right h), Nat.eq_of_beq (both_left h), Nat.zero_mul]
theorem dot_same (l : List Nat) : ∀ m v : List Nat, same l m = Bool.true → dot l v = dot m v := by
  induction l with
  | nil => exact fun m v h => (dot_zero m v h).symm
  | cons a l ih =>
    intro m v h
    show a * head v + dot l (tail v) = dot m v
    rw [dot_split m v, ih _ _ (both_right h), Nat.eq_of_beq (both_left h)]

/- A row c, l, d, r is the inequality c + l ≤ d + r. -/
inductive Row : Type where | mk (c : Nat) (l : List Nat) (d : Nat) (r : List Nat)
def Row.holds (w : Row) (v : List Nat) : Prop :=
  @Row.rec (fun _ => Prop) (fun c l d r => c + dot l v ≤ d + dot r v) w
def Row.left (w : Row) : List Nat := @Row.rec (fun _ => List Nat) (fun _ l _ _ => l) w
def Row.right (w : Row) : List Nat := @Row.rec (fun _ => List Nat) (fun _ _ _ r => r) w
def weigh (p q : Nat) (w : Row) : Row → Row :=
  @Row.rec (fun _ => Row → Row)
    (fun c l d r => @Row.rec (fun _ => Row) (fun e m f s =>
      Row.mk (p * c + q * e) (sum (scale p l) (scale q m)) (p * d + q * f) (sum (scale p r) (scale q s)))) w
theorem weigh_side (p q c e : Nat) (l m v : List Nat) :
    p * c + q * e + dot (sum (scale p l) (scale q m)) v = p * (c + dot l v) + q * (e + dot m v) := by
  rw [dot_sum, dot_scale, dot_scale, Nat.mul_add, Nat.mul_add, swap]
theorem weigh_holds (p q : Nat) (w x : Row) (v : List Nat) (h : Row.holds w v) (k : Row.holds x v) :
    Row.holds (weigh p q w x) v := by
  cases w with
  | mk c l d r =>
    cases x with
    | mk e m f s =>
      show p * c + q * e + dot (sum (scale p l) (scale q m)) v ≤ p * d + q * f + dot (sum (scale p r) (scale q s)) v
      rw [weigh_side, weigh_side]
      exact Nat.add_le_add (Nat.mul_le_mul_left p h) (Nat.mul_le_mul_left q k)
def always : Row := Row.mk 0 List.nil 0 List.nil
theorem always_holds (v : List Nat) : Row.holds always v := Nat.le.refl
/- What is left of a row whose first coefficients are equal. -/
def drop (w : Row) : Row :=
  @Row.rec (fun _ => Row) (fun c l d r =>
    pick (Nat.beq (head l) (head r)) (Row.mk c (tail l) d (tail r)) always) w
theorem drop_holds (w : Row) (v : List Nat) (h : Row.holds w v) : Row.holds (drop w) (tail v) := by
  cases w with
  | mk c l d r =>
    have h : c + dot l v ≤ d + dot r v := h
    show Row.holds (pick (Nat.beq (head l) (head r)) (Row.mk c (tail l) d (tail r)) always) (tail v)
    generalize e : Nat.beq (head l) (head r) = b
    cases b with
    | false => exact always_holds _
    | true =>
      show c + dot (tail l) (tail v) ≤ d + dot (tail r) (tail v)
      rw [dot_split l v, dot_split r v, Nat.eq_of_beq e, Nat.add_left_comm c, Nat.add_left_comm d,
        Nat.add_comm (head r * head v), Nat.add_comm (head r * head v)] at h
      exact Nat.le_of_add_le_add_right h

/- A row divided by g, and rounded: the test compares it with the row that it came from. -/
def follows (g : Nat) (w : Row) : Row → Bool :=
  @Row.rec (fun _ => Row → Bool)
    (fun c l d r => @Row.rec (fun _ => Bool) (fun e m f s =>
      both (same (sum l (scale g s)) (sum r (scale g m))) (Nat.ble (g * e + d + 1) (g * f + g + c)))) w
theorem follows_holds (g : Nat) (w x : Row) (v : List Nat) (t : follows g w x = Bool.true) (h : Row.holds w v) :
    Row.holds x v := by
  cases w with
  | mk c l d r =>
    cases x with
    | mk e m f s =>
      have h : c + dot l v ≤ d + dot r v := h
      show e + dot m v ≤ f + dot s v
      have t1 := dot_same _ _ v (both_left t)
      have t2 := Nat.le_of_ble (both_right t)
      rw [dot_sum, dot_sum, dot_scale, dot_scale] at t1
      cases Nat.lt_or_ge (f + dot s v) (e + dot m v) with
      | inr k => exact k
      | inl k =>
        have k := Nat.add_le_add (Nat.mul_le_mul_left g k) h
        apply False.elim
        apply Nat.not_le_of_lt t2
        apply @Nat.le_of_add_le_add_right _ _ (g * dot m v + dot r v)
        have e1 : g * f + g + c + (g * dot m v + dot r v) = g * (f + dot s v + 1) + (c + dot l v) := by
          rw [Nat.add_comm (g * dot m v), ← t1, Nat.mul_add, Nat.mul_add, Nat.mul_one, Nat.add_comm (dot l v), swap,
            Nat.add_assoc (g * f) g, Nat.add_comm g, ← Nat.add_assoc (g * f)]
        have e2 : g * e + d + (g * dot m v + dot r v) = g * (e + dot m v) + (d + dot r v) := by
          rw [swap, Nat.mul_add]
        rw [e1, e2]
        exact k
/- Nothing is proved about gcd: what it leads to is tested by `follows`. -/
def gcd (a b : Nat) : Nat :=
  @Nat.rec (fun _ => Nat → Nat → Nat) (fun _ b => b)
    (fun _ ih a b => pick (Nat.beq a 0) b (ih (Nat.sub b (a * Nat.div b a)) a)) (a + 1) a b
def minus (l : List Nat) : List Nat → List Nat :=
  @List.rec Nat (fun _ => List Nat → List Nat) (fun _ => List.nil)
    (fun a _ ih m => List.cons (Nat.sub a (head m)) (ih (tail m))) l
def divide (g : Nat) (l : List Nat) : List Nat :=
  @List.rec Nat (fun _ => List Nat) List.nil (fun a _ ih => List.cons (Nat.div a g) ih) l
def common (l : List Nat) (n : Nat) : Nat := @List.rec Nat (fun _ => Nat) n (fun a _ ih => gcd a ih) l
/- What is on both sides of a row is taken away, and the rest divided by what the coefficients have in common. -/
def cancel (w : Row) : Row :=
  @Row.rec (fun _ => Row) (fun c l d r => Row.mk (Nat.sub c d) (minus l r) (Nat.sub d c) (minus r l)) w
def factor (w : Row) : Nat := @Row.rec (fun _ => Nat) (fun _ l _ r => common l (common r 0)) w
def reduce (g : Nat) (w : Row) : Row :=
  @Row.rec (fun _ => Row) (fun c l d r =>
    Row.mk (Nat.div (c + Nat.pred g) g) (divide g l) (Nat.div d g) (divide g r)) w
def accept (g : Nat) (w x : Row) : Row := pick (follows g w x) x w
def shorten (g : Nat) (w x : Row) : Row := pick (Nat.ble g 1) (accept 1 w x) (accept g w (reduce g x))
def tidy (w : Row) : Row := shorten (factor (cancel w)) w (cancel w)
theorem accept_holds (g : Nat) (w x : Row) (v : List Nat) (h : Row.holds w v) : Row.holds (accept g w x) v := by
  show Row.holds (pick (follows g w x) x w) v
  generalize e : follows g w x = b
  cases b with
  | false => exact h
  | true => exact follows_holds g w x v e h
theorem tidy_holds (w : Row) (v : List Nat) (h : Row.holds w v) : Row.holds (tidy w) v := by
  show Row.holds (pick (Nat.ble (factor (cancel w)) 1) _ _) v
  generalize Nat.ble (factor (cancel w)) 1 = b
  cases b with
  | false => exact accept_holds _ _ _ v h
  | true => exact accept_holds _ _ _ v h

/- Elimination of the first atom. -/
def holdAll (rows : List Row) (v : List Nat) : Prop :=
  @List.rec Row (fun _ => Prop) True (fun w _ ih => And (Row.holds w v) ih) rows
def isUseless (w : Row) : Bool := @Row.rec (fun _ => Bool) (fun c l d _ => both (Nat.ble c d) (isZero l)) w
def push (w : Row) (rows : List Row) : List Row := pick (isUseless w) rows (List.cons w rows)
theorem push_holds (w : Row) (rows : List Row) (v : List Nat) (h : Row.holds w v) (k : holdAll rows v) :
    holdAll (push w rows) v := by
  show holdAll (pick (isUseless w) rows (List.cons w rows)) v
  generalize isUseless w = b
  cases b with
  | false => exact ⟨h, k⟩
  | true => exact k
def above (w : Row) : Nat := Nat.sub (head (Row.left w)) (head (Row.right w))
def below (w : Row) : Nat := Nat.sub (head (Row.right w)) (head (Row.left w))
def meet (w x : Row) : Row := tidy (drop (weigh (below x) (above w) w x))
def meetAll (w : Row) (rows : List Row) (acc : List Row) : List Row :=
  @List.rec Row (fun _ => List Row) acc
    (fun x _ ih => pick (Nat.beq (below x) 0) ih (push (meet w x) ih)) rows
theorem meetAll_holds (w : Row) (rows acc : List Row) (v : List Nat) (h : Row.holds w v)
    (k : holdAll acc (tail v)) (a : holdAll rows v) : holdAll (meetAll w rows acc) (tail v) := by
  induction rows with
  | nil => exact k
  | cons x rows ih =>
    show holdAll (pick (Nat.beq (below x) 0) (meetAll w rows acc) (push (meet w x) (meetAll w rows acc))) (tail v)
    generalize Nat.beq (below x) 0 = b
    cases b with
    | true => exact ih a.2
    | false =>
      exact push_holds _ _ _ (tidy_holds _ _ (drop_holds _ _ (weigh_holds _ _ w x v h a.1))) (ih a.2)
def sift (all rows : List Row) : List Row :=
  @List.rec Row (fun _ => List Row) List.nil
    (fun w _ ih => pick (Nat.beq (above w) 0) (pick (Nat.beq (below w) 0) (push (drop w) ih) ih) (meetAll w all ih))
    rows
theorem sift_holds (all rows : List Row) (v : List Nat) (h : holdAll all v) (k : holdAll rows v) :
    holdAll (sift all rows) (tail v) := by
  induction rows with
  | nil => exact True.intro
  | cons w rows ih =>
    show holdAll (pick (Nat.beq (above w) 0) (pick (Nat.beq (below w) 0) (push (drop w) (sift all rows)) (sift all rows))
      (meetAll w all (sift all rows))) (tail v)
    generalize Nat.beq (above w) 0 = b
    cases b with
    | false => exact meetAll_holds w all _ v k.1 (ih k.2) h
    | true =>
      generalize Nat.beq (below w) 0 = b
      cases b with
      | false => exact ih k.2
      | true => exact push_holds _ _ _ (drop_holds w v k.1) (ih k.2)
def isFalse (w : Row) : Bool := @Row.rec (fun _ => Bool) (fun c _ d r => both (isZero r) (Nat.ble (d + 1) c)) w
theorem isFalse_fails (w : Row) (v : List Nat) (t : isFalse w = Bool.true) (h : Row.holds w v) : False := by
  cases w with
  | mk c l d r =>
    have h : c + dot l v ≤ d + dot r v := h
    rw [dot_zero r v (both_left t)] at h
    exact Nat.lt_irrefl d (Nat.le_trans (Nat.le_of_ble (both_right t)) (Nat.le_trans (Nat.le_add_right c _) h))
def anyFalse (rows : List Row) (other : Bool) : Bool :=
  @List.rec Row (fun _ => Bool) other (fun w _ ih => pick (isFalse w) Bool.true ih) rows
theorem anyFalse_fails (rows : List Row) (other : Bool) (v : List Nat) (h : holdAll rows v)
    (t : anyFalse rows other = Bool.true) (k : other = Bool.true → False) : False := by
  induction rows with
  | nil => exact k t
  | cons w rows ih =>
    have t : pick (isFalse w) Bool.true (anyFalse rows other) = Bool.true := t
    generalize e : isFalse w = b at t
    cases b with
    | true => exact isFalse_fails w v e h.1
    | false => exact ih h.2 t
def natural : Row := Row.mk 0 List.nil 0 (List.cons 1 List.nil)
theorem natural_holds (v : List Nat) : Row.holds natural v := Nat.zero_le _
/- Whether no values of n atoms make all rows true: each atom in turn is eliminated, by Fourier and Motzkin. -/
def refute (n : Nat) : List Row → Bool :=
  @Nat.rec (fun _ => List Row → Bool) (fun rows => anyFalse rows Bool.false)
    (fun _ ih rows => anyFalse rows (ih (sift (List.cons natural rows) (List.cons natural rows)))) n
theorem refute_fails (n : Nat) : ∀ (rows : List Row) (v : List Nat),
    refute n rows = Bool.true → holdAll rows v → False := by
  induction n with
  | zero => exact fun rows v t h => anyFalse_fails rows _ v h t Bool.false_ne_true
  | succ n ih =>
    intro rows v t h
    have k : holdAll (List.cons natural rows) v := ⟨natural_holds v, h⟩
    exact anyFalse_fails rows _ v h t (fun t => ih _ (tail v) t (sift_holds _ _ v k k))

/- Terms and formulas. -/
inductive Term : Type where
  | lit (n : Nat)
  | atom (i : Nat)
  | add (a b : Term)
  | times (k : Nat) (a : Term)
  | scaled (a : Term) (k : Nat)
def get (i : Nat) : List Nat → Nat := @Nat.rec (fun _ => List Nat → Nat) head (fun _ ih v => ih (tail v)) i
def Term.denote (t : Term) (v : List Nat) : Nat :=
  @Term.rec (fun _ => Nat) (fun n => n) (fun i => get i v) (fun _ _ x y => x + y) (fun k _ x => k * x) (fun _ k x => x * k) t
def unit (i : Nat) : List Nat :=
  @Nat.rec (fun _ => List Nat) (List.cons 1 List.nil) (fun _ ih => List.cons 0 ih) i
def Term.fixed (t : Term) : Nat :=
  @Term.rec (fun _ => Nat) (fun n => n) (fun _ => 0) (fun _ _ x y => x + y) (fun k _ x => k * x) (fun _ k x => k * x) t
def Term.linear (t : Term) : List Nat :=
  @Term.rec (fun _ => List Nat) (fun _ => List.nil) unit (fun _ _ x y => sum x y) (fun k _ x => scale k x)
    (fun _ k x => scale k x) t
theorem dot_unit (i : Nat) : ∀ v : List Nat, dot (unit i) v = get i v := by
  induction i with
  | zero => exact fun v => Nat.one_mul (head v)
  | succ i ih =>
    intro v
    show 0 * head v + dot (unit i) (tail v) = get i (tail v)
    rw [ih, Nat.zero_mul, Nat.zero_add]
theorem denote_eq (t : Term) (v : List Nat) : Term.denote t v = Term.fixed t + dot (Term.linear t) v := by
  induction t with
  | lit n => rfl
  | atom i => exact ((Nat.zero_add _).trans (dot_unit i v)).symm
  | add a b iha ihb =>
    show Term.denote a v + Term.denote b v = Term.fixed a + Term.fixed b + dot (sum (Term.linear a) (Term.linear b)) v
    rw [iha, ihb, dot_sum, swap]
  | times k a ih =>
    show k * Term.denote a v = k * Term.fixed a + dot (scale k (Term.linear a)) v
    rw [ih, dot_scale, Nat.mul_add]
  | scaled a k ih =>
    show Term.denote a v * k = k * Term.fixed a + dot (scale k (Term.linear a)) v
    rw [ih, dot_scale, Nat.mul_comm, Nat.mul_add]
inductive Formula : Type where
  | yes
  | no
  | le (a b : Term)
  | lt (a b : Term)
  | eq (a b : Term)
  | and (f g : Formula)
  | or (f g : Formula)
  | imp (f g : Formula)
  | iff (f g : Formula)
def Formula.denote (f : Formula) (v : List Nat) : Prop :=
  @Formula.rec (fun _ => Prop) True False
    (fun a b => Term.denote a v ≤ Term.denote b v) (fun a b => Term.denote a v < Term.denote b v)
    (fun a b => Term.denote a v = Term.denote b v)
    (fun _ _ p q => p ∧ q) (fun _ _ p q => p ∨ q) (fun _ _ p q => p → q) (fun _ _ p q => p ↔ q) f
def leq (k : Nat) (a b : Term) : Row := tidy (Row.mk (Term.fixed a + k) (Term.linear a) (Term.fixed b) (Term.linear b))
theorem leq_holds (k : Nat) (a b : Term) (v : List Nat) (h : Term.denote a v + k ≤ Term.denote b v) :
    Row.holds (leq k a b) v := by
  apply tidy_holds
  show Term.fixed a + k + dot (Term.linear a) v ≤ Term.fixed b + dot (Term.linear b) v
  rw [denote_eq, denote_eq, Nat.add_assoc, Nat.add_comm (dot _ _), ← Nat.add_assoc] at h
  exact h
/- Whether the continuation refutes the rows together with a formula, or (`no`) with its negation. -/
def assume (f : Formula) : Bool → List Row → (List Row → Bool) → Bool :=
  @Formula.rec (fun _ => Bool → List Row → (List Row → Bool) → Bool)
    (fun s rows k => pick s (k rows) Bool.true)
    (fun s rows k => pick s Bool.true (k rows))
    (fun a b s rows k => k (List.cons (pick s (leq 0 a b) (leq 1 b a)) rows))
    (fun a b s rows k => k (List.cons (pick s (leq 1 a b) (leq 0 b a)) rows))
    (fun a b s rows k => pick s (k (List.cons (leq 0 a b) (List.cons (leq 0 b a) rows)))
      (both (k (List.cons (leq 1 a b) rows)) (k (List.cons (leq 1 b a) rows))))
    (fun _ _ p q s rows k => pick s (p s rows (fun r => q s r k)) (both (p s rows k) (q s rows k)))
    (fun _ _ p q s rows k => pick s (both (p s rows k) (q s rows k)) (p s rows (fun r => q s r k)))
    (fun _ _ p q s rows k => pick s (both (p Bool.false rows k) (q s rows k)) (p Bool.true rows (fun r => q s r k)))
    (fun _ _ p q s rows k => both (p Bool.true rows (fun r => q s r k))
      (p Bool.false rows (fun r => q (pick s Bool.false Bool.true) r k))) f
def side (s : Bool) (p : Prop) : Prop := @Bool.rec (fun _ => Prop) (p → False) p s
def Refutes (k : List Row → Bool) (v : List Nat) : Prop :=
  ∀ rows : List Row, k rows = Bool.true → holdAll rows v → False
theorem assume_fails (f : Formula) (v : List Nat) : ∀ (s : Bool) (rows : List Row) (k : List Row → Bool),
    Refutes k v → assume f s rows k = Bool.true → holdAll rows v → side s (Formula.denote f v) → False := by
  induction f with
  | yes =>
    intro s rows k r t h
    cases s with
    | true => exact fun _ => r rows t h
    | false => exact fun n => n True.intro
  | no =>
    intro s rows k r t h
    cases s with
    | true => exact fun n => n
    | false => exact fun _ => r rows t h
  | le a b =>
    intro s rows k r t h
    cases s with
    | true => exact fun p => r _ t ⟨leq_holds 0 a b v p, h⟩
    | false => exact fun n => r _ t ⟨leq_holds 1 b a v (Nat.lt_of_not_le n), h⟩
  | lt a b =>
    intro s rows k r t h
    cases s with
    | true => exact fun p => r _ t ⟨leq_holds 1 a b v p, h⟩
    | false => exact fun n => r _ t ⟨leq_holds 0 b a v (Nat.le_of_not_lt n), h⟩
  | eq a b =>
    intro s rows k r t h
    cases s with
    | true =>
      exact fun p => r _ t ⟨leq_holds 0 a b v (Nat.le_of_eq p), leq_holds 0 b a v (Nat.le_of_eq p.symm), h⟩
    | false =>
      intro n
      cases Nat.lt_or_ge (Term.denote a v) (Term.denote b v) with
      | inl l => exact r _ (both_left t) ⟨leq_holds 1 a b v l, h⟩
      | inr g =>
        cases Nat.lt_or_ge (Term.denote b v) (Term.denote a v) with
        | inl l => exact r _ (both_right t) ⟨leq_holds 1 b a v l, h⟩
        | inr l => exact n (Nat.le_antisymm l g)
  | and f g ihf ihg =>
    intro s rows k r t h
    cases s with
    | true => exact fun p => ihf Bool.true rows _ (fun rows t h => ihg Bool.true rows k r t h p.2) t h p.1
    | false =>
      exact fun n => ihf Bool.false rows k r (both_left t) h
        (fun p => ihg Bool.false rows k r (both_right t) h (fun q => n ⟨p, q⟩))
  | or f g ihf ihg =>
    intro s rows k r t h
    cases s with
    | true =>
      exact fun p => Or.elim p (ihf Bool.true rows k r (both_left t) h) (ihg Bool.true rows k r (both_right t) h)
    | false =>
      exact fun n => ihf Bool.false rows _ (fun rows t h => ihg Bool.false rows k r t h (fun q => n (Or.inr q))) t h
        (fun p => n (Or.inl p))
  | imp f g ihf ihg =>
    intro s rows k r t h
    cases s with
    | true =>
      exact fun p => ihf Bool.false rows k r (both_left t) h (fun x => ihg Bool.true rows k r (both_right t) h (p x))
    | false =>
      exact fun n => n (fun x => False.elim (ihf Bool.true rows _
        (fun rows t h => ihg Bool.false rows k r t h (fun y => n (fun _ => y))) t h x))
  | iff f g ihf ihg =>
    intro s rows k r t h
    cases s with
    | true =>
      intro p
      have a : Formula.denote f v → False := fun x => ihf Bool.true rows _
        (fun rows t h => ihg Bool.true rows k r t h (p.1 x)) (both_left t) h x
      exact ihf Bool.false rows _ (fun rows t h => ihg Bool.false rows k r t h (fun y => a (p.2 y))) (both_right t) h a
    | false =>
      intro n
      have a : Formula.denote f v → False := fun x => ihf Bool.true rows _
        (fun rows t h => ihg Bool.false rows k r t h (fun y => n ⟨fun _ => y, fun _ => x⟩)) (both_left t) h x
      exact ihf Bool.false rows _ (fun rows t h => n ⟨fun x => False.elim (a x),
        fun y => False.elim (ihg Bool.true rows k r t h y)⟩) (both_right t) h a
theorem decided (f : Formula) (v : List Nat) : Formula.denote f v ∨ (Formula.denote f v → False) := by
  induction f with
  | yes => exact Or.inl True.intro
  | no => exact Or.inr id
  | le a b =>
    exact Or.elim (Nat.lt_or_ge (Term.denote b v) (Term.denote a v))
      (fun h => Or.inr (Nat.not_le_of_lt h)) Or.inl
  | lt a b =>
    exact Or.elim (Nat.lt_or_ge (Term.denote a v) (Term.denote b v))
      Or.inl (fun h => Or.inr (fun k => Nat.not_le_of_lt k h))
  | eq a b =>
    cases Nat.decEq (Term.denote a v) (Term.denote b v) with
    | isTrue h => exact Or.inl h
    | isFalse h => exact Or.inr h
  | and f g ihf ihg =>
    exact Or.elim ihf (fun x => Or.elim ihg (fun y => Or.inl ⟨x, y⟩) (fun n => Or.inr (fun p => n p.2)))
      (fun n => Or.inr (fun p => n p.1))
  | or f g ihf ihg =>
    exact Or.elim ihf (fun x => Or.inl (Or.inl x))
      (fun n => Or.elim ihg (fun y => Or.inl (Or.inr y)) (fun m => Or.inr (fun p => Or.elim p n m)))
  | imp f g ihf ihg =>
    exact Or.elim ihg (fun y => Or.inl (fun _ => y))
      (fun n => Or.elim ihf (fun x => Or.inr (fun p => n (p x))) (fun m => Or.inl (fun x => False.elim (m x))))
  | iff f g ihf ihg =>
    exact Or.elim ihf
      (fun x => Or.elim ihg (fun y => Or.inl ⟨fun _ => y, fun _ => x⟩) (fun n => Or.inr (fun p => n (p.1 x))))
      (fun m => Or.elim ihg (fun y => Or.inr (fun p => m (p.2 y)))
        (fun n => Or.inl ⟨fun x => False.elim (m x), fun y => False.elim (n y)⟩))
def valid (n : Nat) (f : Formula) : Bool := assume f Bool.false List.nil (refute n)
theorem sound (n : Nat) (f : Formula) (v : List Nat) (t : valid n f = Bool.true) : Formula.denote f v :=
  Or.elim (decided f v) id
    (fun m => False.elim (assume_fails f v Bool.false List.nil (refute n) (fun rows t h => refute_fails n rows v t h) t
      True.intro m))
theorem minus_cases (a b : Nat) : (a ≤ b ∧ a - b = 0) ∨ (b ≤ a ∧ a - b + b = a) := by
  cases Nat.le_total a b with
  | inl h => exact Or.inl ⟨h, Nat.sub_eq_zero_of_le h⟩
  | inr h => exact Or.inr ⟨h, Nat.sub_add_cancel h⟩
/- What minus_cases says, t in place of a - b. -/
def Formula.minus (a b t : Term) : Formula :=
  Formula.or (Formula.and (Formula.le a b) (Formula.eq t (Term.lit 0)))
    (Formula.and (Formula.le b a) (Formula.eq (Term.add t b) a))
end Lean.Arith
end
