"""lean: scripts judged together get the verdicts of single runs, and Coq judges the same theorems alike."""

from dataclasses import replace

import pytest

from posttrain.types import Task
from posttrain.verifiers.sandbox import Box
from posttrain_prove.coq.verifier import Coq
from posttrain_prove.lean.verifier import Lean
from posttrain_prove.tasks.propositional import Propositional, propositional

LEAN = Lean(toolchain="wheel", budget=20.0, batch=64)
pytestmark = pytest.mark.usefixtures("lean_wheel")
SWAP = "(p q : Prop) : p ∧ q → q ∧ p"


def task(statement, prelude="tactics", **fields):
    fields = {"name": "t", "statement": statement, "prelude": prelude, **fields}
    return Task(id="t", messages=(), fields=fields)


PAIRS = [
    (task(SWAP), "intro h\nexact ⟨h.2, h.1⟩", "proved"),
    (task("∀ a b : Nat, a + b = b + a", name="comm"), "omega", "proved"),
    (task(SWAP), "intro h\nconstructor\nexact h.2", "incomplete"),
    (task(SWAP), "intro h\nexact h", "error"),
    (task(SWAP), "intro h)", "error"),
    (task("False"), "have h : False := by", "incomplete"),
    (task("2 + 2 = 5"), "omega", "error"),
    (task(SWAP), "sorry", "incomplete"),
    (task(SWAP), "", "incomplete"),
    (task("no such thing"), "trivial", "bad_task"),
    (task("True"), "theorem t : True := by trivial", "proved"),
    (task("False"), "exact False.elim (by\nend\ntheorem x : False := x)", "error"),
    (task("False"), 'macro "x" : tactic => `(tactic| skip)', "forbidden"),
    (task("True", prelude=True, header="inductive True : Prop where | intro"), "True.intro", "proved"),
]


@pytest.mark.full
@pytest.mark.parametrize("partial", [False, True])
def test_a_batch_gives_the_verdicts_of_single_runs(partial):
    pairs = PAIRS[:-1] if partial else PAIRS  # a header's own prelude has no progress
    lean = replace(LEAN, partial=partial)
    together = lean.judge_all([(task, response) for task, response, _ in pairs])
    alone = [lean(task, response) for task, response, _ in pairs]
    assert together == alone
    assert [verdict.label for verdict in together] == [label for _, _, label in pairs]


def test_a_batch_runs_lean_a_few_times(monkeypatch):
    """12 responses, 4 of them wrong: statements (as types, with binders), proofs twice, and the rest once."""
    runs = []
    run = Box.run
    monkeypatch.setattr(
        Box, "run", lambda box, *args, **options: (runs.append(args), run(box, *args, **options))[1]
    )
    pairs = [
        (task(SWAP, name=f"t{n}"), ["intro h\nexact ⟨h.2, h.1⟩", "intro h\nexact h"][n % 3 == 2])
        for n in range(12)
    ]
    LEAN.judge_all(pairs[:2])  # the prelude is compiled once
    runs.clear()
    verdicts = LEAN.judge_all(pairs)
    assert [verdict.label for verdict in verdicts] == ["proved", "proved", "error"] * 4
    assert verdicts[2].reason.startswith("line 2: Type mismatch")
    assert len(runs) == 7


def test_a_broken_lean_is_not_judged(monkeypatch):
    """A Lean that ends without output gives no score, together and alone."""
    from posttrain_prove.lean.toolchain import LeanOutcome, Toolchain

    pairs = [(task(SWAP, name=f"b{n}"), "intro h\nexact ⟨h.2, h.1⟩") for n in range(2)]
    LEAN.judge_all([(task("True", name="c"), "trivial")] * 2)
    broken = LeanOutcome((), None, "crash", "killed")
    monkeypatch.setattr(Toolchain, "compile", lambda *args, **options: broken)
    for verdict in LEAN.judge_all(pairs):
        assert verdict.score is None, verdict


def test_partial_credit_follows_leans_own_diagnosis():
    """The tactic that fails is named, and what it leaves counts only if Lean accepts the finished script."""
    lean = replace(LEAN, partial=True)
    statement = "(p q r : Prop) (f : p ∧ q → r) (a : p) (b : q) : r ∧ r"
    pairs = [
        (task(statement), "constructor\nexact f ⟨a, b⟩\nexact a"),  # one goal is left, which no rung closes
        (task(statement), "have c := f ⟨a, b⟩\nconstructor\nexact a"),  # both goals left are hypotheses
        (task(statement), "have c := f ⟨a, b⟩\nexact ⟨c, c⟩"),
        (task(statement), "skip\nskip"),
        (task("(p : Prop) : p"), "have h : p := by assumption\nexact h"),
    ]
    nothing, near, proved, idle, wrong = lean.judge_all(pairs)
    assert (nothing.score, nothing.label) == (0.0, "error")
    assert nothing.reason.startswith("tactic 3: ")
    assert nothing.reason.endswith("; 1 goal is left")
    assert (near.score, near.label) == (0.25, "error")  # the statement has rank 2, by simp_all
    assert near.reason.startswith("tactic 3: ")
    assert near.reason.endswith("; 2 goals are left")
    assert [value for _, value in near.progress] == [0.0, 0.25, 0.25]
    assert (proved.score, proved.progress[-1][1]) == (1.0, 0.5)
    assert (idle.score, wrong.score) == (0.0, 0.0)


@pytest.mark.usefixtures("coqc")
def test_coq_and_lean_judge_the_same_theorems_alike():
    """Gold proofs, proofs cut short, and each theorem's proof for the next theorem."""
    sizes = {"low": 2, "high": 7, "train": 12}
    labels = {}
    for prover, verifier in (("coq", Coq(batch=64)), ("lean", LEAN)):
        tasks = propositional("train", Propositional(prover=prover, **sizes))
        golds = [task.fields["gold"] for task in tasks]
        cut = [gold.rsplit("\n", 1)[0] if "\n" in gold else "" for gold in golds]
        shifted = golds[1:] + golds[:1]
        responses = [*golds, *cut, *shifted]
        verdicts = verifier.judge_all([*zip(tasks * 3, responses, strict=True)])
        labels[prover] = [(verdict.score, verdict.label == "incomplete") for verdict in verdicts]
    assert [score for score, _ in labels["lean"][:12]] == [1.0] * 12
    assert labels["lean"][:24] == labels["coq"][:24]
    assert [score for score, _ in labels["lean"][24:]] == [score for score, _ in labels["coq"][24:]]
