"""Honest proofs are accepted, however odd; and no submission meets what another left."""

import shutil

import pytest

from posttrain.types import Task, UserError
from posttrain.verifiers.sandbox import LEVELS, available
from posttrain_prove.coq import check, session
from posttrain_prove.coq.session import end_waiting
from posttrain_prove.coq.verifier import Coq

pytestmark = pytest.mark.usefixtures("coq_host")
needs_coq = pytest.mark.usefixtures("coqc")
LEVEL = next((level for level in LEVELS if not available()[level]), "strict")
ZERO, SWAP = "forall n : nat, n + 0 = n", "forall P Q : Prop, P /\\ Q -> Q /\\ P"
ADDUP = "Fixpoint addup (n a : nat) : nat := match n with 0 => a | S m => addup m (S a) end."
EVEN = "Inductive ev : nat -> Prop := ev0 : ev 0 | evSS : forall n, ev n -> ev (S (S n))."


def task(statement: str, **fields: str) -> Task:
    fields = {"name": "t", "statement": statement, **fields}
    return Task(id="q", messages=(), fields=fields, source="d.jsonl:3")


INDUCTION = "induction n as [|n IH].\n- reflexivity.\n- simpl. rewrite IH. reflexivity."
HONEST = {
    "a script": (ZERO, INDUCTION),
    "a script with Proof and Qed": (ZERO, f"Proof.\n{INDUCTION}\nQed."),
    "a script with Defined": (ZERO, f"{INDUCTION}\nDefined."),
    "a block among words": (ZERO, f"By induction:\n```coq\n{INDUCTION}\n```\nThat proves it."),
    "the last of two blocks": (ZERO, f"```\nauto.\nfoo.\n```\nNo:\n```coq\n{INDUCTION}\n```\n"),
    "comments": (ZERO, "(* induction. (* nested. *) *) induction n; (* why. *) simpl; auto. (* done *)"),
    "a comment about admit": (ZERO, "(* no admit. needed *) auto."),
    "braces": (SWAP, "intros P Q [p q]. split. { exact q. } { exact p. }"),
    "nested bullets": (
        "forall P Q R : Prop, P /\\ Q /\\ R -> (R /\\ Q) /\\ P",
        "intros P Q R [p [q r]]. split.\n- split.\n  + exact r.\n  + exact q.\n- exact p.",
    ),
    "goal selectors": (SWAP, "intros P Q [p q]. split. 2: exact p. 1: { exact q. }"),
    "all at once": (SWAP, "intros P Q [p q]; split; [exact q | exact p]."),
    "a term": (SWAP, "exact (fun P Q h => match h with conj p q => conj q p end)."),
    "a definition": (
        SWAP,
        "Definition t : forall P Q : Prop, P /\\ Q -> Q /\\ P := fun P Q h => conj (proj2 h) (proj1 h).",
    ),
    "a Lemma with arguments": (ZERO, f"Lemma t (n : nat) : n + 0 = n.\nProof. {INDUCTION} Qed."),
    "a Fact with implicit arguments": (
        ZERO,
        "Set Implicit Arguments.\nFact t : forall n, n + 0 = n. auto. Qed.",
    ),
    "an equal statement": ("~ False", "Theorem t : False -> False. exact (fun f => f). Qed."),
    "a helper lemma": (
        "forall n m : nat, n + m = m + n",
        "Lemma zero n : n = n + 0. Proof. induction n; simpl; auto. Qed.\n"
        "Theorem t : forall n m : nat, n + m = m + n.\nProof. intros n m. induction n as [|n IH]; simpl.\n"
        "- apply zero.\n- rewrite IH. auto. Qed.",
    ),
    "a strengthened helper": (
        "forall n : nat, addup n 0 = n",
        "Lemma h : forall n a, addup n a = n + a.\n"
        "Proof. induction n as [|n IH]; intro a; simpl; [reflexivity|]. rewrite IH. auto. Qed.\n"
        "Theorem t : forall n : nat, addup n 0 = n. intro n. rewrite h. auto. Qed.",
    ),
    "tactics of its own": (
        SWAP,
        "Ltac both := match goal with |- _ /\\ _ => split end.\n"
        "Theorem t : forall P Q : Prop, P /\\ Q -> Q /\\ P. intros P Q [p q]. both; assumption. Qed.",
    ),
    "notations of its own": (
        ZERO,
        'Notation "a ⊕ b" := (plus a b) (at level 50).\n'
        "Theorem t : forall n : nat, n ⊕ 0 = n. induction n; auto. Qed.",
    ),
    "Unicode": ("forall α β : Prop, α -> β -> α", "intros α β a _. exact a."),
    "Unicode of the library": (
        ZERO,
        "Require Import Utf8.\nTheorem t : ∀ n : nat, n + 0 = n. induction n; auto. Qed.",
    ),
    "a library of Coq's": (
        "forall a b : nat, 2 * a <> 2 * b + 1",
        "From Coq Require Import Lia.\nTheorem t : forall a b : nat, 2 * a <> 2 * b + 1. lia. Qed.",
    ),
    "a section that closes": (
        SWAP,
        "Section S. Variables P Q : Prop. Hypothesis h : P /\\ Q.\n"
        "Theorem t : Q /\\ P. destruct h. split; assumption. Qed. End S.",
    ),
    "a module": (ZERO, "Module M. Lemma h n : n + 0 = n. auto. Qed. End M.\nDefinition t := M.h."),
    "a fixpoint": (
        ZERO,
        "Fixpoint t (n : nat) : n + 0 = n := match n with 0 => eq_refl | S m => f_equal S (t m) end.",
    ),
    "an abandoned try": (
        SWAP,
        "Lemma x : False. Abort.\nTheorem t : forall P Q : Prop, P /\\ Q -> Q /\\ P. tauto. Qed.",
    ),
    "questions and messages": (SWAP, 'Show. idtac "admit. Axiom". Check nat. Fail exact I. tauto.'),
    "an eval": ("Nat.pow 2 10 = 1024", "vm_compute. exact (eq_refl 1024)."),
    "an option": (SWAP, "Set Printing All. Set Printing Width 9. Show. tauto."),
    "a keyword of ours": (
        SWAP,
        "Notation \"'Locate' x\" := x (at level 9).\n"
        "Lemma t : forall P Q : Prop, P /\\ Q -> Q /\\ P. tauto. Qed.",
    ),
    "Save": (SWAP, "tauto. Save t."),
    "what is said after it": (
        SWAP,
        "Theorem t : forall P Q : Prop, P /\\ Q -> Q /\\ P. tauto. Qed. Print Assumptions t.",
    ),
}


@needs_coq
@pytest.mark.parametrize(("statement", "response"), HONEST.values(), ids=HONEST)
@pytest.mark.sample(every=3)
def test_an_honest_proof_is_accepted(statement, response):
    verdict = Coq(level=LEVEL)(task(statement, definitions=ADDUP if "addup" in statement else ""), response)
    assert (verdict.score, verdict.label) == (1.0, "proved"), verdict.reason


@needs_coq
def test_definitions_of_the_task_are_the_same_in_statement_and_proof():
    given = task("ev 4", definitions=EVEN)
    coq = Coq(level=LEVEL)
    assert coq(given, "repeat constructor.").label == "proved"
    own = f"{EVEN.replace('ev0 : ev 0', 'ev0 : forall n, ev n')} Theorem t : ev 4. constructor. Qed."
    assert coq(given, own).label == "wrong_statement"


@needs_coq
def test_the_header_opens_what_the_statement_is_read_in():
    header = "Require Import ZArith.\nOpen Scope Z_scope."
    given, proof = task("forall a : Z, a - a = 0", header=header), "intros. apply Z.sub_diag."
    assert Coq(level=LEVEL)(given, proof).label == "proved"


INTEGERS = "Require Import ZArith. Open Scope Z_scope."


@needs_coq
@pytest.mark.parametrize(
    ("statement", "header", "proof", "other"),
    [
        ("{n : nat | n < 0} -> False", "", "intros [n H]. inversion H.", "intros [n H]. auto."),
        ("{n : nat & n < 0} -> False", "", "intros [n H]. inversion H.", "intros [n H]. auto."),
        ("{n : nat | n = 3}", "", "exists 3. reflexivity.", "exists 4. reflexivity."),
        ("{True} + {False}", "", "left. exact I.", "right. exact I."),
        ("(exists n : nat, n < 0) -> False", "", "intros [n H]. inversion H.", "intros H. exact H."),
        ("- 1 + 1 = 0", INTEGERS, "reflexivity.", "discriminate."),
        (
            "forall P : Type, (P -> False) -> P -> False",
            "",
            "intros P H p. exact (H p).",
            "intros P H p. exact p.",
        ),
        (
            "forall (A : Type) (P : A -> Prop), ~ (exists x, P x) -> forall x, ~ P x",
            "",
            "intros A P H x p. apply H. exists x. exact p.",
            "intros A P H x p. exact p.",
        ),
    ],
)
@pytest.mark.sample(every=3)
def test_a_statement_may_begin_and_end_with_any_type(statement, header, proof, other):
    asked, coq = task(statement, header=header), Coq(level=LEVEL)
    coq.check(asked)
    whole = f"Theorem t : {statement}.\nProof. {proof} Qed."
    assert [coq(asked, said).label for said in (proof, whole)] == ["proved", "proved"]
    assert coq(asked, other).score == 0.0
    assert coq(asked, f"Theorem t : True. Proof. exact I. Qed. (* {proof} *)").label == "wrong_statement"


@pytest.mark.parametrize(
    "statement",
    [
        "True) . Axiom x : (False",
        "True. True",
        "True := I) . Definition y : (True",
        "True -> (* False",
        "{True. }",
    ],
)
def test_a_statement_that_is_more_than_one_sentence_is_refused(statement):
    with pytest.raises(UserError, match=r"^d\.jsonl:3: "):
        Coq(level=LEVEL).check(task(statement))


@needs_coq
@pytest.mark.parametrize(
    "statement", ["True) (False", "True := I", "(True", "True)", "fun n : nat => n", "{}"]
)
def test_a_statement_that_is_no_type_proves_nothing(statement):
    assert Coq(level=LEVEL)(task(statement), "exact I.").label == "bad_task"


@needs_coq
def test_an_axiom_on_the_list_may_be_used_and_no_other():
    coq = Coq(level=LEVEL, axioms=("Coq.Logic.Classical_Prop.classic",))
    middle = task("forall P : Prop, P \\/ ~ P", header="Require Import Classical.")
    verdict = coq(middle, "exact classic.")
    assert (verdict.label, verdict.score) == ("proved", 1.0), verdict.reason
    assert (
        coq(task("0 = 1"), "Axiom classic : False. Theorem t : 0 = 1. destruct classic. Qed.").label
        == "assumes"
    )
    other = task("forall (P : Prop) (p q : P), p = q", header="Require Import ProofIrrelevance.")
    assert coq(other, "exact proof_irrelevance.").label == "assumes"


@needs_coq
@pytest.mark.parametrize("warm", [0, 1])
def test_no_submission_meets_what_another_left(warm):
    coq = Coq(level=LEVEL, warm=warm)
    leave = "Ltac win := auto. Lemma h n : n + 0 = n. auto. Qed. Hint Resolve h : core. Lemma t : foo."
    assert "foo" in coq(task(ZERO), leave).reason
    for response in ("win.", "intro n. apply h.", "exact h."):
        verdict = coq(task(ZERO), response)
        assert (verdict.label, verdict.score) == ("error", 0.0)
        assert "not found" in verdict.reason
    assert coq(task(ZERO), "Set Nested Proofs Allowed. Lemma h : True.").label == "incomplete"
    assert "Nested" not in coq(task(ZERO), "auto. Qed. Lemma h : True. exact I. Qed.").reason


@needs_coq
def test_a_process_serves_once_and_another_waits():
    coq, served = Coq(level=LEVEL, warm=1), []
    original = session.take

    def noted(opening, keep):
        session = original(opening, keep)
        served.append(session._live.process)
        return session

    end_waiting()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("posttrain_prove.coq.verifier.take", noted)
        for _ in range(3):
            coq(task(ZERO), "foo.")
    assert len({process.pid for process in served}) == 3
    assert all(process.poll() is not None for process in served)
    assert len([s for waiting in session._waiting.values() for s in waiting]) == 1
    end_waiting()


@needs_coq
def test_a_waiting_process_that_was_killed_is_replaced():
    coq = Coq(level=LEVEL)
    coq(task(ZERO), "foo.")
    for waiting in session._waiting.values():
        for each in waiting:
            each._live.process.kill()
            each._live.process.wait()
    assert coq(task(ZERO), "auto.").label == "proved"


@needs_coq
def test_a_task_that_is_not_coq_is_not_the_responses_fault():
    verdict = Coq(level=LEVEL)(task("forall n, n + 0 = 0 1"), "auto.")
    assert (verdict.score, verdict.label) == (None, "bad_task")
    verdict = Coq(level=LEVEL)(task("x", definitions="Definition x := ."), "auto.")
    assert (verdict.score, verdict.label) == (None, "bad_task")


@needs_coq
def test_the_first_failing_sentence_and_the_goals_are_told():
    found = Coq(level=LEVEL).diagnose(task(SWAP), "intros P Q [p q].\nsplit.\n- exact q.\n- exact q.\n")
    assert (found.label, found.at, found.goals) == ("error", 5, (1, 1, 2, 2, 1, 1))
    assert found.reason.startswith("sentence 6, 'exact q.': In environment")
    assert found.reason.endswith("; 1 goal is left")
    late = Coq(level=LEVEL).diagnose(task("0 = 1"), "Theorem t : 0 = 0. auto. Qed.\nLemma u : True. foo.")
    assert (late.label, late.at) == ("error", 4), late.reason


@pytest.mark.parametrize(
    "wrong",
    [
        {"statement": ""},
        {"name": ""},
        {"name": "a b"},
        {"name": 7},
        {"statement": "True. Axiom a : False"},
        {"statement": "True (*"},
        {"header": "Axiom a : False."},
        {"header": "Unset Guard Checking."},
        {"header": "Require Import Lia"},
        {"definitions": '"'},
        {"gold": ["auto."]},
    ],
    ids=str,
)
def test_what_a_task_must_have_is_asked_for_at_its_line(wrong):
    with pytest.raises(UserError, match=r"^d\.jsonl:3: "):
        Coq().check(task(**{"statement": "True", **wrong}))


def test_a_task_with_all_its_fields_is_in_order():
    header = "From Coq Require Import Lia. Local Open Scope nat_scope. Set Implicit Arguments."
    Coq().check(task("True", header=header, definitions=EVEN, gold="exact I."))
    assert Coq().golds(task("True", gold="exact I.")) == ["exact I."]


def test_options_that_make_no_sense_are_refused():
    for options in (
        {"level": "none"},
        {"budget": 0},
        {"memory_mb": 1},
        {"warm": -1},
        {"axioms": ("classic",)},
    ):
        with pytest.raises(ValueError, match=str(next(iter(options)))):
            Coq(**options)


def test_without_coq_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    check.find_programs.cache_clear()
    with pytest.raises(UserError, match="apt-get install --no-install-recommends coq"):
        Coq(level="rlimits").require()
    check.find_programs.cache_clear()


@needs_coq
def test_a_box_that_does_not_work_is_not_the_responses_fault(monkeypatch):
    check.find_programs()
    broken = check.Programs("/bin/false", "/bin/false", "/bin/false", ())
    end_waiting()
    monkeypatch.setattr(check, "find_programs", lambda: broken)
    verdict = Coq(level=LEVEL, budget=2.0)(task("1 = 1 + 0"), "auto.")
    assert (verdict.score, verdict.label) == (None, "raised")
    end_waiting()
