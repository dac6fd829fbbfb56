"""The potential of unfinished proofs: what does nothing earns nothing, and a proof beats all that is less."""

import random

import pytest

from posttrain.types import Task
from posttrain.verifiers.sandbox import LEVELS, available
from posttrain_prove.coq.progress import MOST, WORST, potential
from posttrain_prove.coq.session import end_waiting
from posttrain_prove.coq.verifier import Coq

needs_coq = pytest.mark.usefixtures("coqc")
LEVEL = next((level for level in LEVELS if not available()[level]), "strict")
COQ = Coq(level=LEVEL)
COMMUTES = "forall n m : nat, n + m = m + n"
EXISTS = "forall n m : nat, n <= m -> exists k, m = n + k"
LIA = "Require Import Lia."
PROOFS = {
    COMMUTES: (
        "",
        ["induction n as [|n IH].", "-", "intro m.", "apply plus_n_O.", "-", "intro m.", "simpl.",
         "rewrite IH.", "apply plus_n_Sm."],
    ),
    EXISTS: (LIA, ["intros n m H.", "exists (m - n).", "lia."]),
    "forall P Q : Prop, (exists n : nat, n * n = 49) /\\ (P -> Q -> P)": (
        "",
        ["intros P Q.", "split.", "{", "exists 7.", "reflexivity.", "}", "{", "intros p _.", "exact p.", "}"],
    ),
}  # fmt: skip
NOTHING = [
    "idtac.",
    "repeat idtac.",
    "try fail.",
    'let x := fresh "nothing" in assert (x : True) by exact I.',
    "assert (0 = 0) as _ by reflexivity.",
    'let x := fresh "nothing" in assert (x : True); [exact I|].',
    "pose proof I as gone; clear gone.",
    "cut True; [intros _ | exact I].",
    "generalize I; intros _.",
    "do 3 (assert (1 <= 2) as _ by auto).",
    "match goal with |- ?G => change G end.",
    "set (zero := 0) in |- *; subst zero.",
    "destruct (conj I I) as [_ _].",
    "Show.",
    "Fail fail.",
]


@pytest.fixture(scope="module", autouse=True)
def ended():
    yield
    end_waiting()


def task(statement: str, header: str = "") -> Task:
    return Task(id="q", messages=(), fields={"name": "t", "statement": statement, "header": header})


def potentials(statement: str, header: str, sentences: list[str]) -> dict[int, float]:
    """Φ by how many of the sentences have been read; those of structure have none."""
    text, ends = "", {}
    for number, sentence in enumerate(sentences, 1):
        text += f"{sentence} "
        ends[len(text) - 1] = number
    found = COQ.diagnose(task(statement, header), f"{text}foo.")
    assert found.label == "error", found.reason
    assert found.at == len(sentences), found.reason
    return {ends[at]: phi for at, phi in found.progress if at in ends}


def test_the_potential_falls_with_the_rank_and_never_reaches_a_proof():
    for first in range(1, WORST + 1):
        values = [potential(rank, first) for rank in range(WORST + 1)]
        assert values == sorted(values, reverse=True)
        assert values[0] == MOST < 1
        assert all(value == 0 for value in values[first:])


@needs_coq
@pytest.mark.parametrize("statement", PROOFS)
def test_what_does_nothing_earns_nothing(statement):
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    header, proof = PROOFS[statement]
    plain = potentials(statement, header, proof[:-1])
    assert plain
    for _ in range(3):
        mixed, is_nothing = [], []
        for sentence in proof[:-1]:
            nothing = draw.choices(NOTHING, k=draw.randrange(3)) if sentence[-1] == "." else []
            mixed += [*nothing, sentence]
            is_nothing += [True] * len(nothing) + [False]
        values = potentials(statement, header, mixed)
        last = 0.0
        for number, nothing in enumerate(is_nothing, 1):
            if nothing:
                assert values[number] <= last, mixed[number - 1]
            last = values.get(number, last)
        assert max(values.values()) <= max(plain.values())


@needs_coq
def test_undoing_gives_back_what_was_earned():
    values = potentials(
        EXISTS, LIA, ["intros n m H.", "exists (m - n).", "Undo.", "exists (m - n).", "Undo."]
    )
    assert [values[n] for n in (1, 2, 3, 4, 5)] == [0.0, 0.125, 0.0, 0.125, 0.0]


@needs_coq
def test_splitting_into_easy_goals_and_closing_them_earns_nothing():
    farm = ["assert (a1 : 1 = 1).", "{", "reflexivity.", "}", "assert (a2 : forall n, n + 0 = n).", "{",
            "auto.", "}", "destruct (Nat.eq_dec 0 0).", "2:{", "contradiction.", "}"]  # fmt: skip
    values = potentials("exists f : nat -> nat, forall n, f (f n) = n + 2", "Require Import Arith.", farm)
    assert max(values.values()) == 0.0
    cases = ["destruct n as [|n].", "-", "intros m.", "simpl.", "auto."]
    assert max(potentials("forall n m : nat, n * m = m * n", "", cases).values()) == 0.0


@needs_coq
def test_a_lemma_that_makes_the_rest_routine_earns():
    proof = ["intros a b c.", "rewrite (Nat.add_comm a b).", "rewrite (Nat.add_comm (b + a)).",
             "rewrite Nat.add_assoc."]  # fmt: skip
    values = potentials("forall a b c : nat, a + b + c = c + b + a", "Require Import Arith.", proof)
    assert values[1] == 0.0
    assert values[4] > 0.0


@needs_coq
@pytest.mark.parametrize("end", ["admit.", "give_up.", "Admitted.", "foo.", "Abort."])
def test_giving_up_is_an_error_where_it_stands(end):
    found = COQ.diagnose(task(EXISTS, LIA), f"intros n m H. exists (m - n). {end}")
    assert (found.at, found.score, found.progress[-1][1]) == (2, 0.0, 0.125), found.reason
    assert len(found.progress) == 2


@pytest.mark.full
@needs_coq
def test_a_partial_score_is_below_any_proof_and_only_given_where_it_is_asked_for():
    given = task(EXISTS, LIA)
    partial, whole = Coq(level=LEVEL, partial=True), COQ
    response = "Proof.\nintros n m H.\nexists (m - n).\n"
    assert whole(given, response).score == 0.0
    verdict = partial(given, response)
    assert (verdict.score, verdict.label) == (0.125, "incomplete")
    at, phi = verdict.progress[-1]
    assert (response[:at], phi) == (response[:-1], 0.125)
    done = partial(given, f"{response}lia.\n")
    assert (done.score, done.progress[-1]) == (1.0, (len(response) + 4, MOST))
    finished = partial(task("forall n : nat, n + 0 = n"), "Theorem t : forall n : nat, n + 0 = n. { auto. }")
    assert (finished.score, finished.label) == (MOST, "incomplete")


@needs_coq
@pytest.mark.parametrize(
    "response",
    ["Theorem t : 0 = 0. idtac.", "Section S. Variable h : False. Theorem t : 0 = 1. destruct h.",
     "Theorem t : forall n, n = n. intro n. reflexivity. Qed."],
)  # fmt: skip
def test_another_statement_makes_no_progress(response):
    verdict = Coq(level=LEVEL, partial=True)(task("0 = 1"), response)
    assert (verdict.score, verdict.progress) == (0.0, ())


@needs_coq
def test_a_theorem_with_arguments_is_the_statement():
    found = COQ.diagnose(
        task(EXISTS, LIA), "Theorem t n m (H : n <= m) : exists k, m = n + k. exists (m - n)."
    )
    assert found.progress[-1][1] == 0.125
