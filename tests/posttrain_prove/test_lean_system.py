"""lean, where it is installed with its library and its tactics. Elsewhere these tests say so."""

import shutil
from pathlib import Path

import pytest

from posttrain.types import Task, UserError
from posttrain_prove.lean.verifier import Lean

LEAN = Lean(toolchain="system", budget=120.0)
STATEMENT = "∀ n : Nat, 0 + n = n"

HONEST = {
    "simp": "intro n\nsimp",
    "omega": "intro n\nomega",
    "induction": "intro n\ninduction n with\n| zero => rfl\n| succ n ih => simp",
    "a term": "fun n => Nat.zero_add n",
    "by": "by\n  intro n\n  exact Nat.zero_add n",
    "a development": "theorem s (n : Nat) : 0 + n = n := Nat.zero_add n\ntheorem t : ∀ n, 0 + n = n := s",
}
CHEATS = {
    "sorry": (STATEMENT, "intro n\nsorry", "incomplete"),
    "stop": (STATEMENT, "intro n\nstop\nrfl", "incomplete"),
    "a goal left": (STATEMENT, "intro n", "incomplete"),
    "an error": (STATEMENT, "intro n\nrw [nothing]", "error"),
    "an axiom": ("False", "axiom a : False\ntheorem t : False := a", "assumes"),
    "native_decide": ("10 < 20", "native_decide", "assumes"),
    "decide +native": ("10 < 20", "decide +native", "assumes"),
    "another statement": ("False", "theorem t : True := trivial", "wrong_statement"),
    "local notation": ("1 = 2", 'local notation "2" => 1\ntheorem t : 1 = 2 := rfl', "forbidden"),
    "an instance of numbers": (
        "(1 : Nat) = 2",
        "instance (priority := high) bad : OfNat Nat 2 := ⟨1⟩\ntheorem t : (1 : Nat) = 2 := rfl",
        "wrong_statement",
    ),
    "a macro for theorem": (
        "False",
        "macro_rules | `(command| theorem $x : $y := $z) => `(#check 1)",
        "forbidden",
    ),
    "no check": ("False", "set_option debug.skipKernelTC true in\ntheorem t : False := trivial", "forbidden"),
    "modifyEnv": ("False", "run_cmd Lean.modifyEnv fun e => e", "forbidden"),
    "a file": ("True", '#eval IO.FS.writeFile "x" "y"\ntheorem t : True := trivial', "forbidden"),
}


@pytest.fixture(scope="module", autouse=True)
def _installed():
    if shutil.which("lean") is None and not (Path.home() / ".elan" / "bin" / "lean").exists():
        pytest.skip("LEAN'S TACTICS ARE NOT TESTED HERE: lean is not on PATH")
    try:
        LEAN.require()
    except UserError as error:
        pytest.skip(f"LEAN'S TACTICS ARE NOT TESTED HERE: {error}")


def task(statement):
    return Task(id="t", messages=(), fields={"name": "t", "statement": statement})


@pytest.mark.parametrize("case", HONEST)
def test_an_honest_proof_is_accepted(case):
    verdict = LEAN(task(STATEMENT), HONEST[case])
    assert (verdict.label, verdict.score) == ("proved", 1.0), verdict


@pytest.mark.parametrize("case", CHEATS)
def test_a_cheat_is_refused_with_its_class(case):
    statement, response, label = CHEATS[case]
    verdict = LEAN(task(statement), response)
    assert (verdict.label, verdict.score) == (label, 0.0), verdict
