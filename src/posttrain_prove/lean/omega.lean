/- The tactic `omega`: it writes the goal and its hypotheses about natural numbers as a formula of linear.lean,
and proves it by `sound`, whose premise `valid n f = true` the kernel computes.

Functions marked extern are Lean's own, in machine code. Objects are opaque here. Result, Maybe, CoreState and
the like have the layout of Lean's types. -/
set_option linter.all false
namespace Lean
inductive Object : Type where | x | y (s : String)
inductive Result (α : Type) : Type where | ok (a : α) | error (e : Object)
inductive Outcome (α : Type) : Type where | error (e : Object) | ok (a : α)
inductive Maybe (α : Type) : Type where | none | some (a : α)
inductive BinderInfo : Type where | default | implicit | strictImplicit | instImplicit
inductive SourceInfo : Type where | original (s : String) | synthetic (s : String) | none
inductive Void : Type where | x
structure CoreState where
  environment : Object
  more : Object
abbrev Expr : Type := Object
abbrev Level : Type := Object
def Elab.Tactic.Tactic : Type :=
  Syntax → Object → Object → Object → Object → Object → Object → Object → Object → Void → Result Object
@[extern "x"] def _root_.String.toName (s : String) : Name := Name.anonymous
@[extern "x"] def mkAtom (s : String) : Syntax := Syntax.x
@[extern "x"] def Syntax.mkStrLit (s : String) (i : SourceInfo) : Syntax := Syntax.x
@[extern "x"] def Syntax.node1 (i : SourceInfo) (k : Name) (a : Syntax) : Syntax := Syntax.x
@[extern "x"] def Syntax.node2 (i : SourceInfo) (k : Name) (a b : Syntax) : Syntax := Syntax.x
@[extern "x"] def levelZero : Level := Object.x
@[extern "x"] def levelOne : Level := Object.x
@[extern "x"] def LocalContext.empty : Object := Object.x
@[extern "x"] def mkConst (n : Name) (l : List Level) : Expr := Object.x
@[extern "x"] def mkRawNatLit (n : Nat) : Expr := Object.x
@[extern "x"] def mkBVar (n : Nat) : Expr := Object.x
@[extern "x"] def mkMVar (g : Object) : Expr := Object.x
@[extern "x"] def mkApp (f a : Expr) : Expr := Object.x
@[extern "x"] def mkApp2 (f a b : Expr) : Expr := Object.x
@[extern "x"] def mkApp3 (f a b c : Expr) : Expr := Object.x
@[extern "x"] def mkApp4 (f a b c d : Expr) : Expr := Object.x
@[extern "x"] def mkLambda (n : Name) (k : BinderInfo) (t b : Expr) : Expr := Object.x
@[extern "x"] def Expr.isAppOfArity (e : Expr) (n : Name) (k : Nat) : Bool := Bool.true
@[extern "x"] def Expr.isConstOf (e : Expr) (n : Name) : Bool := Bool.true
@[extern "x"] def Expr.isForall (e : Expr) : Bool := Bool.true
@[extern "x"] def Expr.hasLooseBVar (e : Expr) (n : Nat) : Bool := Bool.true
@[extern "x"] def Expr.eqv (a b : Expr) : Bool := Bool.true
@[extern "x"] def Expr.appArg! (e : Expr) : Expr := e
@[extern "x"] def Expr.appFn! (e : Expr) : Expr := e
@[extern "x"] def Expr.bindingDomain! (e : Expr) : Expr := e
@[extern "x"] def Expr.bindingBody! (e : Expr) : Expr := e
@[extern "x"] def Expr.bindingName! (e : Expr) : Name := Name.anonymous
@[extern "x"] def Expr.liftLooseBVars (e : Expr) (s d : Nat) : Expr := e
@[extern "x"] def Expr.lowerLooseBVars (e : Expr) (s d : Nat) : Expr := e
@[extern "x"] def Expr.nat? (e : Expr) : Maybe Nat := Maybe.none
@[extern "x"] def Expr.rawNatLit? (e : Expr) : Maybe Nat := Maybe.none
@[extern "x"] def Kernel.whnf (env context : Object) (e : Expr) : Outcome Expr := Outcome.ok env
@[extern "x"] def _root_.ST.Prim.Ref.get (s t : Object) (r : Object) (_ : Void) : CoreState := CoreState.mk r r
@[extern "x"] def Elab.Tactic.closeMainGoal (name : Name) (proof : Expr) (check : Bool) (a b c d e f g h : Object) (_ : Void) : Result Object := Result.ok a
@[extern "x"] def Elab.Tactic.evalTactic : Elab.Tactic.Tactic := fun _ a _ _ _ _ _ _ _ _ => Result.ok a
@[extern "x"] def Elab.Tactic.getMainGoal (a b c d e f g h : Object) (_ : Void) : Result Object := Result.ok a
@[extern "x"] def Elab.Tactic.getMainTarget (a b c d e f g h : Object) (_ : Void) : Result Expr := Result.ok a
@[extern "x"] def Elab.Tactic.replaceMainGoal (l : List Object) (a b c d e f g h : Object) (_ : Void) : Result Object := Result.ok a
@[extern "x"] def MVarId.revertAll (goal : Object) (a b c d : Object) (_ : Void) : Result Object := Result.ok a
@[extern "x"] def Meta.isExprDefEq (x y : Expr) (a b c d : Object) (_ : Void) : Result Bool := Result.ok Bool.true
namespace Arith
structure State where
  atoms : List Expr
  facts : List Expr
  proofs : List Expr
structure Code where
  code : Expr
  state : State
structure Claim where
  goal : Code
  proofs : List Expr
structure Binder where
  name : Name
  type : Expr
def const (s : String) : Expr := mkConst (String.toName s) List.nil
unsafe def place (e : Expr) (atoms : List Expr) (n : Nat) : Nat :=
  match atoms with
  | List.nil => n
  | List.cons a rest => match Expr.eqv e a with
    | Bool.true => n
    | Bool.false => place e rest (Nat.add n 1)
unsafe def join (l m : List Expr) : List Expr :=
  match l with
  | List.nil => m
  | List.cons a r => List.cons a (join r m)
unsafe def size (l : List Expr) : Nat :=
  match l with
  | List.nil => 0
  | List.cons _ r => Nat.add (size r) 1
def first (e : Expr) : Expr := Expr.appArg! (Expr.appFn! e)
def numeral (e : Expr) : Maybe Nat :=
  match Expr.nat? e with
  | Maybe.some n => Maybe.some n
  | Maybe.none => Expr.rawNatLit? e
unsafe def isOperation (e : Expr) (h : String) (class_ : String) (plain : String) : Bool :=
  match Expr.isAppOfArity e (String.toName h) 6 with
  | Bool.true => Bool.true
  | Bool.false => match Expr.isAppOfArity e (String.toName class_) 4 with
    | Bool.true => Bool.true
    | Bool.false => Expr.isAppOfArity e (String.toName plain) 2
def atomCode (i : Nat) : Expr := mkApp (const "Lean.Arith.Term.atom") (mkRawNatLit i)
def litCode (n : Nat) : Expr := mkApp (const "Lean.Arith.Term.lit") (mkRawNatLit n)
unsafe def codeTerm (e : Expr) (s : State) : Code :=
  match numeral e with
  | Maybe.some n => Code.mk (litCode n) s
  | Maybe.none => match isOperation e "HAdd.hAdd" "Add.add" "Nat.add" with
    | Bool.true =>
      let a := codeTerm (first e) s
      let b := codeTerm (Expr.appArg! e) a.state
      Code.mk (mkApp2 (const "Lean.Arith.Term.add") a.code b.code) b.state
    | Bool.false => match isOperation e "HMul.hMul" "Mul.mul" "Nat.mul" with
      | Bool.true => match numeral (first e) with
        | Maybe.some k =>
          let b := codeTerm (Expr.appArg! e) s
          Code.mk (mkApp2 (const "Lean.Arith.Term.times") (mkRawNatLit k) b.code) b.state
        | Maybe.none => match numeral (Expr.appArg! e) with
          | Maybe.some k =>
            let a := codeTerm (first e) s
            Code.mk (mkApp2 (const "Lean.Arith.Term.scaled") a.code (mkRawNatLit k)) a.state
          | Maybe.none => codeAtom e s
      | Bool.false => match Expr.isAppOfArity e (String.toName "Nat.succ") 1 with
        | Bool.true =>
          let a := codeTerm (Expr.appArg! e) s
          Code.mk (mkApp2 (const "Lean.Arith.Term.add") a.code (litCode 1)) a.state
        | Bool.false => match Expr.isConstOf e (String.toName "Nat.zero") with
          | Bool.true => Code.mk (litCode 0) s
          | Bool.false => codeAtom e s
where
  codeAtom (e : Expr) (s : State) : Code :=
    let n := size s.atoms
    let i := place e s.atoms 0
    match Nat.beq i n with
    | Bool.false => Code.mk (atomCode i) s
    | Bool.true =>
      let s := State.mk (join s.atoms (List.cons e List.nil)) s.facts s.proofs
      match isOperation e "HSub.hSub" "Sub.sub" "Nat.sub" with
      | Bool.false => Code.mk (atomCode i) s
      | Bool.true =>
        let a := codeTerm (first e) s
        let b := codeTerm (Expr.appArg! e) a.state
        let fact := mkApp3 (const "Lean.Arith.Formula.minus") a.code b.code (atomCode i)
        let proof := mkApp2 (const "Lean.Arith.minus_cases") (first e) (Expr.appArg! e)
        Code.mk (atomCode i)
          (State.mk b.state.atoms (List.cons fact b.state.facts) (List.cons proof b.state.proofs))
def isNat (e : Expr) : Bool :=
  match Expr.isConstOf e (String.toName "Nat") with
  | Bool.true => Bool.true
  | Bool.false => Expr.isConstOf e (String.toName "ℕ")
/- Whether e is such a relation of two numbers. -/
unsafe def isRelation (e : Expr) (name : String) (arity : Nat) (plain : String) : Bool :=
  match Expr.isAppOfArity e (String.toName name) arity with
  | Bool.true => match Nat.beq arity 3 with
    | Bool.true => isNat (Expr.appArg! (Expr.appFn! (Expr.appFn! e)))
    | Bool.false => isNat (Expr.appArg! (Expr.appFn! (Expr.appFn! (Expr.appFn! e))))
  | Bool.false => Expr.isAppOfArity e (String.toName plain) 2
def relate (name : String) (a : Code) (b : Code) : Maybe Code :=
  Maybe.some (Code.mk (mkApp2 (const name) a.code b.code) b.state)
unsafe def compare (name : String) (a b : Expr) (s : State) : Maybe Code :=
  let x := codeTerm a s
  let y := codeTerm b x.state
  Maybe.some (Code.mk (mkApp2 (const name) x.code y.code) y.state)
def refusal (c : Maybe Code) : Maybe Code :=
  match c with
  | Maybe.none => Maybe.none
  | Maybe.some c => Maybe.some
    (Code.mk (mkApp2 (const "Lean.Arith.Formula.imp") c.code (const "Lean.Arith.Formula.no")) c.state)
/- The code of a proposition, if it is about numbers alone. -/
unsafe def codeFormula (e : Expr) (s : State) : Maybe Code :=
  match isRelation e "LE.le" 4 "Nat.le" with
  | Bool.true => compare "Lean.Arith.Formula.le" (first e) (Expr.appArg! e) s
  | Bool.false => match isRelation e "LT.lt" 4 "Nat.lt" with
    | Bool.true => compare "Lean.Arith.Formula.lt" (first e) (Expr.appArg! e) s
    | Bool.false => match isRelation e "GE.ge" 4 "" with
      | Bool.true => compare "Lean.Arith.Formula.le" (Expr.appArg! e) (first e) s
      | Bool.false => match isRelation e "GT.gt" 4 "" with
        | Bool.true => compare "Lean.Arith.Formula.lt" (Expr.appArg! e) (first e) s
        | Bool.false => match isRelation e "Eq" 3 "" with
          | Bool.true => compare "Lean.Arith.Formula.eq" (first e) (Expr.appArg! e) s
          | Bool.false => match isRelation e "Ne" 3 "" with
            | Bool.true => refusal (compare "Lean.Arith.Formula.eq" (first e) (Expr.appArg! e) s)
            | Bool.false => match Expr.isAppOfArity e (String.toName "Not") 1 with
              | Bool.true => refusal (codeFormula (Expr.appArg! e) s)
              | Bool.false => codeOthers e s
where
  codeOthers (e : Expr) (s : State) : Maybe Code :=
    match Expr.isAppOfArity e (String.toName "And") 2 with
    | Bool.true => codeBoth "Lean.Arith.Formula.and" (first e) (Expr.appArg! e) s
    | Bool.false => match Expr.isAppOfArity e (String.toName "Or") 2 with
      | Bool.true => codeBoth "Lean.Arith.Formula.or" (first e) (Expr.appArg! e) s
      | Bool.false => match Expr.isAppOfArity e (String.toName "Iff") 2 with
        | Bool.true => codeBoth "Lean.Arith.Formula.iff" (first e) (Expr.appArg! e) s
        | Bool.false => match Expr.isConstOf e (String.toName "True") with
          | Bool.true => Maybe.some (Code.mk (const "Lean.Arith.Formula.yes") s)
          | Bool.false => match Expr.isConstOf e (String.toName "False") with
            | Bool.true => Maybe.some (Code.mk (const "Lean.Arith.Formula.no") s)
            | Bool.false => match Expr.isForall e with
              | Bool.false => Maybe.none
              | Bool.true => match Expr.hasLooseBVar (Expr.bindingBody! e) 0 with
                | Bool.true => Maybe.none
                | Bool.false => codeBoth "Lean.Arith.Formula.imp" (Expr.bindingDomain! e)
                  (Expr.lowerLooseBVars (Expr.bindingBody! e) 1 1) s
  codeBoth (name : String) (p q : Expr) (s : State) : Maybe Code :=
    match codeFormula p s with
    | Maybe.none => Maybe.none
    | Maybe.some a => match codeFormula q a.state with
      | Maybe.none => Maybe.none
      | Maybe.some b => relate name a b
/- The binders of a goal, the last one first, and what stands behind them. -/
structure Goal where
  binders : List Binder
  body : Expr
unsafe def open_ (e : Expr) (binders : List Binder) : Goal :=
  match Expr.isForall e with
  | Bool.false => Goal.mk binders e
  | Bool.true => open_ (Expr.bindingBody! e) (List.cons (Binder.mk (Expr.bindingName! e) (Expr.bindingDomain! e)) binders)
/- Those hypotheses that are about numbers, as premises of the goal's code; and the proofs of them. -/
unsafe def premises (binders : List Binder) (i : Nat) (goal : Code) (proofs : List Expr) : Claim :=
  match binders with
  | List.nil => Claim.mk goal proofs
  | List.cons b rest =>
    match codeFormula (Expr.liftLooseBVars b.type 0 (Nat.add i 1)) goal.state with
    | Maybe.none => premises rest (Nat.add i 1) goal proofs
    | Maybe.some c => premises rest (Nat.add i 1)
      (Code.mk (mkApp2 (const "Lean.Arith.Formula.imp") c.code goal.code) c.state) (List.cons (mkBVar i) proofs)
unsafe def supply (facts proofs : List Expr) (claim : Claim) : Claim :=
  match facts with
  | List.nil => claim
  | List.cons f more => match proofs with
    | List.nil => claim
    | List.cons p rest => supply more rest (Claim.mk
      (Code.mk (mkApp2 (const "Lean.Arith.Formula.imp") f claim.goal.code) claim.goal.state) (List.cons p claim.proofs))
unsafe def apply (f : Expr) (l : List Expr) : Expr :=
  match l with
  | List.nil => f
  | List.cons a r => apply (mkApp f a) r
unsafe def listCode (l : List Expr) : Expr :=
  let nat := const "Nat"
  match l with
  | List.nil => mkApp (mkConst (String.toName "List.nil") (List.cons levelZero List.nil)) nat
  | List.cons a r => mkApp3 (mkConst (String.toName "List.cons") (List.cons levelZero List.nil)) nat a (listCode r)
unsafe def close_ (binders : List Binder) (e : Expr) : Expr :=
  match binders with
  | List.nil => e
  | List.cons b r => close_ r (mkLambda b.name BinderInfo.default b.type e)
unsafe def claim (goal : Goal) : Claim :=
  let start := State.mk List.nil List.nil List.nil
  let code := match codeFormula goal.body start with
    | Maybe.some c => c
    | Maybe.none => Code.mk (const "Lean.Arith.Formula.no") start
  let c := premises goal.binders 0 code List.nil
  supply c.goal.state.facts c.goal.state.proofs c
unsafe def atomCount (c : Claim) : Expr := mkRawNatLit (size c.goal.state.atoms)
unsafe def prove (goal : Goal) (c : Claim) : Expr :=
  let yes := mkApp2 (mkConst (String.toName "Eq.refl") (List.cons levelOne List.nil)) (const "Bool") (const "Bool.true")
  let e := apply (mkApp4 (const "Lean.Arith.sound") (atomCount c) c.goal.code (listCode c.goal.state.atoms) yes) c.proofs
  close_ goal.binders (match codeFormula goal.body (State.mk List.nil List.nil List.nil) with
    | Maybe.some _ => e
    | Maybe.none => mkApp2 (mkConst (String.toName "False.elim") (List.cons levelZero List.nil)) goal.body e)
/- Whether `valid` computes to true for it. The kernel computes it again when it checks the proof. -/
unsafe def isValid (environment : Object) (c : Claim) : Bool :=
  match Kernel.whnf environment LocalContext.empty
      (mkApp2 (const "Lean.Arith.valid") (atomCount c) c.goal.code) with
  | Outcome.ok e => Expr.isConstOf e (String.toName "Bool.true")
  | Outcome.error _ => Bool.false
def leaf (s : String) : Syntax := mkAtom s
def failure : Syntax :=
  Syntax.node2 SourceInfo.none (String.toName "Lean.Parser.Tactic.fail") (mkAtom "fail")
    (Syntax.node1 SourceInfo.none (String.toName "null")
      (Syntax.mkStrLit "omega: the goal does not follow by linear arithmetic from the hypotheses about natural numbers" SourceInfo.none))
def omega : ParserDescr :=
  ParserDescr.node (String.toName "Lean.Arith.omega") 1024 (ParserDescr.nonReservedSymbol "omega" Bool.false)
attribute [tactic_parser 1000] omega
@[tactic Lean.Arith.omega] unsafe def evalOmega : Elab.Tactic.Tactic := fun _ a b c d e f g h w =>
  match Elab.Tactic.getMainGoal a b c d e f g h w with
  | Result.error x => Result.error x
  | Result.ok first => match MVarId.revertAll first e f g h w with
    | Result.error x => Result.error x
    | Result.ok id => match Elab.Tactic.replaceMainGoal (List.cons id List.nil) a b c d e f g h w with
      | Result.error x => Result.error x
      | Result.ok _ => match Elab.Tactic.getMainTarget a b c d e f g h w with
        | Result.error x => Result.error x
        | Result.ok target =>
          let goal := open_ target List.nil
          let c' := claim goal
          let state := ST.Prim.Ref.get Object.x Object.x h w
          match isValid state.environment c' with
          | Bool.false => Elab.Tactic.evalTactic failure a b c d e f g h w
          | Bool.true => match Meta.isExprDefEq (mkMVar id) (prove goal c') e f g h w with
            | Result.error x => Result.error x
            | Result.ok Bool.false => Elab.Tactic.evalTactic failure a b c d e f g h w
            | Result.ok Bool.true =>
              Elab.Tactic.closeMainGoal (String.toName "omega") (prove goal c') Bool.true a b c d e f g h w
end Arith
end Lean
