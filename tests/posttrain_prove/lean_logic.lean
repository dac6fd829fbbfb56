prelude
-- What a task brings along where Lean's own library is not there: logic, numbers, lists.
set_option genCtorIdx false
set_option autoImplicit false
universe u v w
unsafe axiom lcErased : Type
unsafe axiom lcAny : Type
unsafe axiom lcProof {α : Prop} : α
noncomputable section
inductive True : Prop where | intro : True
inductive False : Prop
inductive Eq {α : Sort u} : α → α → Prop where | refl (a : α) : Eq a a
inductive And (a b : Prop) : Prop where | intro (left : a) (right : b) : And a b
inductive Or (a b : Prop) : Prop where | inl (h : a) : Or a b | inr (h : b) : Or a b
inductive Iff (a b : Prop) : Prop where | intro (mp : a → b) (mpr : b → a) : Iff a b
inductive Exists {α : Sort u} (p : α → Prop) : Prop where | intro (w : α) (h : p w) : Exists p
def Not (a : Prop) : Prop := a → False
inductive Nat : Type where | zero : Nat | succ (n : Nat) : Nat
inductive List (α : Type u) : Type u where | nil : List α | cons (head : α) (tail : List α) : List α
def add (a b : Nat) : Nat := @Nat.rec (fun _ => Nat) a (fun _ r => Nat.succ r) b
def mul (a b : Nat) : Nat := @Nat.rec (fun _ => Nat) Nat.zero (fun _ r => add r a) b
def power (a b : Nat) : Nat := @Nat.rec (fun _ => Nat) (Nat.succ Nat.zero) (fun _ r => mul r a) b
def append {α : Type u} (a b : List α) : List α := @List.rec α (fun _ => List α) b (fun x _ r => List.cons x r) a
inductive Le (a : Nat) : Nat → Prop where | refl : Le a a | step (b : Nat) (h : Le a b) : Le a (Nat.succ b)
axiom propext {a b : Prop} : Iff a b → Eq a b
axiom em (a : Prop) : Or a (Not a)
namespace Hidden
theorem secret : True := True.intro
end Hidden
open Hidden
