"""Proofs that are checked together get the verdicts that they get alone."""

import pytest

from posttrain.types import Task, Verdict
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.sandbox import LEVELS, Box, available
from posttrain_prove.coq import batch
from posttrain_prove.coq.check import CoqProblem
from posttrain_prove.coq.verifier import Coq

pytestmark = pytest.mark.usefixtures("coqc", "coq_host")
LEVEL = next((level for level in LEVELS if not available()[level]), "strict")
SWAP = "forall P Q : Prop, P /\\ Q -> Q /\\ P"
CLASSIC = "From Coq Require Import Classical."


def task(statement: str, **fields: str) -> Task:
    return Task(id="q", messages=(), fields={"name": "t", "statement": statement, **fields})


PAIRS = [
    (task(SWAP), "intros P Q [p q]. split; assumption."),
    (task(SWAP), "Proof.\nintros P Q [p q]. split.\n- exact q.\n- exact p.\nQed."),
    (task("1 + 1 = 2"), "abstract reflexivity."),
    (task("2 + 2 = 4"), "abstract reflexivity."),
    (task("0 = 1"), "reflexivity."),
    (task("0 = 1"), "admit."),
    (task("0 = 1"), "intros."),
    (task("0 = 0"), "End P1. Axiom a : False. exact eq_refl."),
    (task("0 = 0"), "Lemma t : 0 = 0. Proof. reflexivity. Qed."),
    (task("forall P : Prop, P \\/ ~ P", header=CLASSIC), "exact classic."),
    (task("~ ~ True", header=CLASSIC), "intros h. apply h. exact I."),
    (task("zero = 0", definitions="Definition zero := 0."), "reflexivity."),
    (task("no such thing"), "auto."),
]


def said(verdict: Verdict) -> tuple[float | None, str]:
    return verdict.score, verdict.label


def started(monkeypatch: pytest.MonkeyPatch, way: str) -> list[str]:
    """The programs that boxes are given from now on, by `run` or by `start`."""
    programs: list[str] = []
    given = getattr(Box, way)

    def counted(self: Box, argv: list[str], **options: object) -> object:
        programs.append(argv[0].rsplit("/", 1)[-1])
        return given(self, argv, **options)

    monkeypatch.setattr(Box, way, counted)
    return programs


@pytest.mark.full
def test_a_batch_says_what_each_is_told_alone() -> None:
    """Whatever stands beside it: wrong and unfinished proofs, an axiom, other headers, no statements."""
    alone = [Coq(level=LEVEL)(*pair) for pair in PAIRS]
    together = Coq(level=LEVEL, batch=len(PAIRS)).judge_all(PAIRS)
    assert [said(v) for v in together] == [said(v) for v in alone]
    assert [v.score for v in together].count(1.0) == 7


def test_good_proofs_are_checked_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two specs, two proofs of one name, one compilation of each file; the pool gathers what is waiting."""
    starts = started(monkeypatch, "run")
    verdicts = Coq(level=LEVEL, batch=4).judge_all(PAIRS[:4])
    assert [v.label for v in verdicts] == ["proved"] * 4
    assert starts == ["coqc", "coqc", "coqc", "coqchk"]
    with Pool(workers=2, deadline_s=60.0) as pool:
        assert [v.label for v in pool.judge(Coq(level=LEVEL, batch=4), PAIRS[:6])[:4]] == ["proved"] * 4


def test_nothing_is_proved_that_rests_on_what_is_open() -> None:
    """Even where the words are let through: a module that is left, an axiom among the tactics."""
    box, problem = Coq(level=LEVEL)._box(), CoqProblem("t", "0 = 1")
    honest = (CoqProblem("t", "0 = 0"), "reflexivity.")
    for text in (
        "Abort. Axiom t : 0 = 1. Lemma u : True. exact I.",
        "admit. Admitted. Lemma u : True. exact I.",
    ):
        assert batch.judge_batch(box, [(problem, text), honest, honest]) == [False, True, True]


@pytest.mark.full
def test_progress_in_a_batch_is_that_alone() -> None:
    """What each tactic gained, and what an unfinished proof is worth; no batch is empty."""
    halves = ("intros P Q [p q]. split.", "Proof. intros P Q [p q]. split. - exact q. - exact q.")
    pairs = [*PAIRS[1:6], *((task(SWAP), half) for half in halves), PAIRS[-1]]
    alone = [Coq(level=LEVEL, partial=True)(*pair) for pair in pairs]
    together = Coq(level=LEVEL, partial=True, batch=len(pairs)).judge_all(pairs)
    assert [(said(v), v.progress) for v in together] == [(said(v), v.progress) for v in alone]
    assert [v.reason for v in together] == [v.reason for v in alone]
    assert sum(0 < (v.score or 0) < 1 for v in together) == 2
    with pytest.raises(ValueError, match="at least 1"):
        Coq(batch=0)


def test_wrong_proofs_take_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler runs for what fails in a session; one that ends it is judged alone, and others are not."""
    wrong = [(task(SWAP), "intros P Q h. exact h."), (task(SWAP), "left."), (task("0 = 1"), "auto.")] * 4
    floods = (task("0 = 0"), 'do 40000 idtac "0123456789012345678901234567890123456789". reflexivity.')
    starts = started(monkeypatch, "start")
    verifier = Coq(level=LEVEL, batch=16, budget=19.0)  # no session of another test waits for it
    assert [v.label for v in verifier.judge_all(wrong)] == ["error", "error", "incomplete"] * 4
    assert starts == ["coqtop"]
    starts.clear()
    verdicts = verifier.judge_all([wrong[0], floods, *wrong[1:]])
    assert [v.label for v in verdicts] == ["error", "error", *(["error", "incomplete", "error"] * 4)][:13]
    assert starts == ["coqtop"] * 4  # two for all, one for what flooded, one that waits for the next
