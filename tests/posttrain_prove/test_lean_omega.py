"""lean: the decision procedure `omega` of prelude "tactics" decides linear arithmetic, and opens no hole."""

import itertools
import random

import pytest

from posttrain.search.protocol import State
from posttrain.types import Task
from posttrain_prove.lean.moves import LeanTransitions
from posttrain_prove.lean.verifier import Lean

LEAN = Lean(toolchain="wheel", budget=20.0)
pytestmark = pytest.mark.usefixtures("lean_wheel")

TRUE = {
    "sums": "∀ a b : Nat, a + b = b + a",
    "premises": "(a b c : Nat) (h : a ≤ b) (k : 2 * b + 1 ≤ c) : 2 * a < c",
    "a chain": "(a b c d : Nat) (h : a < b) (i : b < c) (j : c < d) : a + 3 ≤ d",
    "parity": "(a b : Nat) : ¬ 2 * a = 2 * b + 1",
    "rounding": "(a : Nat) (h : 3 * a ≤ 5) : a ≤ 1",
    "a number is not negative": "(a b : Nat) : a ≤ a + b * 2",
    "subtraction": "(a b c : Nat) (h : a ≤ b) : a - c ≤ b - c",
    "subtraction stops at 0": "(a b : Nat) (h : a - b = 0) : a ≤ b",
    "connectives": "(a b : Nat) : a ≤ b ↔ ¬ (b < a ∧ True) ∨ a = b",
    "premises of another kind": (
        "(p : Prop) (f : Nat → Nat) (x : p) (a : Nat) (h : f a > 3) : f a ≥ 2 ∨ False"
    ),
    "a contradiction proves anything": "(p : Prop) (a b : Nat) (h : a < b) (k : b < a) : p",
    "products are atoms": "(x y : Nat) (h : x * y < 4) : x * y + 1 ≠ 6",
    "an implication as premise": "(a b : Nat) (h : a ≤ 3 → b ≤ 2) (k : a < 2) : b < 5",
    "different numbers": (
        "(x y z : Nat) (h : x ≠ y) (k : y ≠ z) (l : x ≠ z) (u : x + y + z < 4) : x + y + z = 3"
    ),
    "large numerals": "(x y : Nat) (h : x < 100000) (k : y ≤ 500) : x + 2 * y < 101000",
    "successors": "(n : Nat) : Nat.succ n = n + 1 ∧ 0 < Nat.succ n",
}
NOT_DECIDED = {
    "false": "(a b : Nat) : a ≤ b",
    "false for one value": "(a : Nat) : a ≠ 7",
    "nonlinear": "(x y : Nat) : x * y = y * x",
    "not about numbers": "(p : Prop) (h : p) : p",
    "a quantified premise": "(h : ∀ n : Nat, n ≤ 3) : False",
    "whole numbers between rational ones": "(x y : Nat) : 2 * x + 3 * y ≠ 1",
}


def goal(statement):
    return Task(id="t", messages=(), fields={"name": "t", "statement": statement, "prelude": "tactics"})


def decide(statements):
    """Return which of these statements `omega` proves."""
    steps = LeanTransitions(lean=LEAN, heartbeats=100_000)
    states = steps.begin([goal(statement) for statement in statements])
    assert all(isinstance(state, State) for state in states), states
    answers = steps.apply([(state, "omega") for state in states])
    assert all(isinstance(answer, State) or answer.label == "error" for answer in answers), answers
    return [isinstance(answer, State) and answer.done for answer in answers]


def test_omega_decides_linear_arithmetic():
    decided = decide([*TRUE.values(), *NOT_DECIDED.values()])
    assert dict(zip([*TRUE, *NOT_DECIDED], decided, strict=True)) == {
        **dict.fromkeys(TRUE, True),
        **dict.fromkeys(NOT_DECIDED, False),
    }


def draw_sum(rng):
    coefficients = [rng.randrange(4) for _ in "xyz"]
    text = " + ".join(
        [f"{c} * {v}" for c, v in zip(coefficients, "xyz", strict=True)] + [str(rng.randrange(6))]
    )
    return f"({text})"


@pytest.mark.full
def test_omega_agrees_with_enumeration():
    """Of random formulas over three numbers of at most 3, it proves no false one and most that are true."""
    rng = random.Random(0)
    statements, truths = [], []
    for _ in range(40):
        *premises, conclusion = [
            f"{draw_sum(rng)} {rng.choice(['≤', '<', '=', '≠'])} {draw_sum(rng)}" for _ in range(3)
        ]
        connective = rng.choice(["∧", "∨", "→"])
        statement = f"({premises[0]} {connective} {premises[1]}) → {conclusion}"
        statements.append(f"∀ x y z : Nat, x ≤ 3 → y ≤ 3 → z ≤ 3 → {statement}")
        python = statement.replace("=", "==").replace("≠", "!=").replace("≤", "<=")
        python = python.replace("∧", "and").replace("∨", "or")
        first, last = python.rsplit("→", 1)
        if connective == "→":
            left, right = first.strip()[1:-1].split("→")
            first = f"(not ({left}) or ({right}))"
        truths.append(
            all(
                not eval(first, {}, values) or eval(last, {}, values)
                for point in itertools.product(range(4), repeat=3)
                for values in [dict(zip("xyz", point, strict=True))]
            )
        )
    decided = decide(statements)
    assert 8 <= sum(truths) <= 32
    assert [s for s, d, t in zip(statements, decided, truths, strict=True) if d and not t] == []
    assert sum(decided) >= 0.9 * sum(truths), (sum(decided), sum(truths))


def test_the_notes_example_is_accepted():
    """`theorem add_comm : ∀ a b : ℕ, a + b = b + a := by omega`, by the kernel and from no axiom."""
    task = goal("∀ a b : ℕ, a + b = b + a")
    for response in ("by omega", "theorem t : ∀ a b : ℕ, a + b = b + a := by omega"):
        verdict = LEAN(task, response)
        assert (verdict.score, verdict.label) == (1.0, "proved"), verdict
        assert verdict.reason == "t is proved, without axioms"


def test_omega_tells_why_it_fails():
    verdict = LEAN(goal("(a b : Nat) : a ≤ b"), "omega")
    assert (verdict.score, verdict.label) == (0.0, "error")
    assert "omega: the goal does not follow by linear arithmetic" in verdict.reason


CHEATS = {
    "native_decide": ("2 + 2 = 5", "native_decide", "error"),
    "omega redefined": (
        "False",
        'macro "omega" : tactic => `(tactic| skip)\ntheorem t : False := by omega',
        "forbidden",
    ),
    "another meaning by attribute": (
        "False",
        "attribute [tactic Lean.Arith.omega] Lean.Arith.failure",
        "forbidden",
    ),
    "False by a notation": ("False", 'notation "False" => True\ntheorem t : False := trivial', "forbidden"),
    "another order on numbers": (
        "2 ≤ 1",
        "instance : LE Nat := LE.mk (fun _ _ => True)\ntheorem t : 2 ≤ 1 := trivial",
        "wrong_statement",
    ),
    "omega under another order": (
        "2 ≤ 1",
        "instance : LE Nat := LE.mk (fun a b => Nat.le b a)\ntheorem t : 2 ≤ 1 := by omega",
        "error",
    ),
    "a certificate that is none": (
        "False",
        "exact Lean.Arith.sound 0 Lean.Arith.Formula.no List.nil rfl",
        "error",
    ),
    "validity redefined": (
        "False",
        "def Lean.Arith.valid (n : Nat) (f : Lean.Arith.Formula) : Bool := Bool.true\n"
        "theorem t : False := Lean.Arith.sound 0 Lean.Arith.Formula.no List.nil rfl",
        "error",
    ),
    "soundness assumed": (
        "False",
        "axiom Lean.Arith.holds (f : Lean.Arith.Formula) : f.denote List.nil\n"
        "theorem t : False := Lean.Arith.holds Lean.Arith.Formula.no",
        "assumes",
    ),
    "a compiled function as a proof": ("False", "exact Lean.Arith.evalOmega", "error"),
}


@pytest.mark.parametrize("case", CHEATS)
def test_omega_opens_no_hole(case):
    statement, response, label = CHEATS[case]
    verdict = LEAN(goal(statement), response)
    assert (verdict.label, verdict.score) == (label, 0.0), verdict
