"""What does not prove the statement is refused, by the words where they show it and by Coq in any case."""

import pytest

from posttrain.types import Task
from posttrain.verifiers.sandbox import LEVELS, Box, Limits, available
from posttrain_prove.coq import check
from posttrain_prove.coq.check import CoqProblem
from posttrain_prove.coq.screen import find_refusal
from posttrain_prove.coq.script import split_sentences
from posttrain_prove.coq.verifier import Coq

pytestmark = pytest.mark.usefixtures("coqc", "coq_host")
LEVEL = next((level for level in LEVELS if not available()[level]), "strict")
FALSE, MIDDLE = "0 = 1", "forall P : Prop, P \\/ ~ P"
FUNCTIONS = "forall (A B : Type) (f g : A -> B), (forall x, f x = g x) -> f = g"


def task(statement: str, **fields: str) -> Task:
    return Task(id="q", messages=(), fields={"name": "t", "statement": statement, **fields})


CHEATS = {
    # giving up
    "admit": (FALSE, "admit.", "incomplete"),
    "admit in a development": (FALSE, "Theorem t : 0 = 1. Proof. admit. Admitted.", "incomplete"),
    "give_up": (FALSE, "Proof. give_up. Qed.", "incomplete"),
    "a tactic that gives up": (FALSE, "Ltac win := give_up. Theorem t : 0 = 1. win. Qed.", "incomplete"),
    "a term that gives up": (FALSE, "Definition t : 0 = 1 := ltac:(admit).", "incomplete"),
    "a hint that gives up": (
        FALSE,
        "#[global] Hint Extern 0 => admit : core. Theorem t : 0 = 1. auto. Qed.",
        "incomplete",
    ),
    "obligations": (
        FALSE,
        "Require Import Program. Obligation Tactic := idtac. "
        "Program Definition t : 0 = 1 := _. Admit Obligations.",
        "incomplete",
    ),
    "a string that hides": (FALSE, 'idtac "(*". admit. idtac "*)".', "incomplete"),
    "a helper that gives up": (
        FALSE,
        "Lemma h : 0 = 1. Admitted. Theorem t : 0 = 1. exact h. Qed.",
        "incomplete",
    ),
    # assuming
    "an axiom": (FALSE, "Axiom t : 0 = 1.", "assumes"),
    "an axiom of another name": (FALSE, "Axiom a : False. Theorem t : 0 = 1. destruct a. Qed.", "assumes"),
    "an axiom in a module": (
        FALSE,
        "Module M. Local Axiom a : False. End M. Theorem t : 0 = 1. destruct M.a. Qed.",
        "assumes",
    ),
    "a parameter": (FALSE, "Parameter t : 0 = 1.", "assumes"),
    "a conjecture": (FALSE, "Conjecture t : 0 = 1.", "assumes"),
    "a hypothesis": (FALSE, "Hypothesis h : 0 = 1. Theorem t : 0 = 1. exact h. Qed.", "assumes"),
    "a context": (FALSE, "Context (h : 0 = 1). Theorem t : 0 = 1. exact h. Qed.", "assumes"),
    "a declared module": (
        FALSE,
        "Module Type T. Axiom a : 0 = 1. End T. Declare Module M : T. Definition t := M.a.",
        "assumes",
    ),
    "a library's way to admit": (
        FALSE,
        "Require Import Coq.Compat.AdmitAxiom. Theorem t : 0 = 1. destruct proof_admitted. Qed.",
        "assumes",
    ),
    "classical logic": (
        MIDDLE,
        "Require Import Classical. Theorem t : forall P : Prop, P \\/ ~ P. exact classic. Qed.",
        "assumes",
    ),
    "functional extensionality": (
        FUNCTIONS,
        f"Require Import FunctionalExtensionality. Theorem t : {FUNCTIONS}. "
        "exact @functional_extensionality. Qed.",
        "assumes",
    ),
    # another statement
    "another statement": (FALSE, "Theorem t : 0 = 0. reflexivity. Qed.", "wrong_statement"),
    "a condition": (FALSE, "Theorem t : 0 = 1 -> 0 = 1. exact (fun h => h). Qed.", "wrong_statement"),
    "a section": (
        FALSE,
        "Section S. Variable h : 0 = 1. Theorem t : 0 = 1. exact h. Qed. End S.",
        "wrong_statement",
    ),
    "a notation": (
        FALSE,
        'Infix "=" := le : type_scope. Theorem t : 0 = 1. repeat constructor. Qed.',
        "wrong_statement",
    ),
    "a notation of all": (
        FALSE,
        "Notation \"0 '=' 1\" := True (at level 70). Theorem t : 0 = 1. exact I. Qed.",
        "wrong_statement",
    ),
    "a shadowed type": (
        FALSE,
        'Inductive eq {A : Type} (x y : A) : Prop := any. Infix "=" := eq : type_scope. '
        "Theorem t : 0 = 1. constructor. Qed.",
        "wrong_statement",
    ),
    "a shadowed number": (
        FALSE,
        "Inductive nat : Set := O | S (_ : nat). Definition t : @eq nat O O := eq_refl.",
        "wrong_statement",
    ),
    "a shadowed False": (
        "~ True",
        "Definition False := True. Definition not (P : Prop) := P -> False. "
        "Theorem t : not True. exact (fun p => p). Qed.",
        "wrong_statement",
    ),
    "a coercion": (
        FALSE,
        "Inductive any : Type := any_. Definition f (x : any) : Prop := 0 = 1. "
        "Coercion f : any >-> Sortclass. "
        "Definition t : any := any_.",
        "wrong_statement",
    ),
    "our own names": (
        FALSE,
        "Module Spec. Definition spec := True. End Spec. "
        "Module Submission. Definition t := I. End Submission. "
        "Module Check. Definition chk := I. End Check. Definition t := I.",
        "wrong_statement",
    ),
    "a functor": (
        FALSE,
        "Module Type T. Parameter a : 0 = 1. End T. Module F (X : T). Definition t := X.a. End F.",
        "wrong_statement",
    ),
    "a stated module": (FALSE, "Module M. Theorem t : True. exact I. Qed. End M.", "wrong_statement"),
    "a second theorem": (FALSE, "Abort. Theorem t : True. exact I. Qed.", "error"),
    "a local name": (FALSE, "Let t := I. Definition u := t.", "wrong_statement"),
    # the kernel's checks
    "no guard": (
        FALSE,
        "Unset (* *) Guard\nChecking. Fixpoint f (n : nat) : 0 = 1 := f n. Definition t := f 0.",
        "forbidden",
    ),
    "no guard here": (
        FALSE,
        "#[bypass_check(guard)] Fixpoint f (n : nat) : 0 = 1 := f n. Definition t := f 0.",
        "forbidden",
    ),
    "no positivity": (
        FALSE,
        "#[bypass_check(positivity)] Inductive b := c (_ : b -> 0 = 1). "
        "Definition f (x : b) : 0 = 1 := match x with c g => g x end. Definition t := f (c f).",
        "forbidden",
    ),
    "no universes": (
        FALSE,
        "Require Import Coq.Logic.Hurkens. Unset Universe Checking. "
        "Definition t : 0 = 1 := match TypeNeqSmallType.paradox Type eq_refl with end.",
        "forbidden",
    ),
    "a loop": (FALSE, "exact ((fix f (n : nat) : 0 = 1 := f n) 0).", "error"),
    "no check of a term": (FALSE, "exact_no_check I.", "error"),
    "no check of a cast": (FALSE, "vm_cast_no_check (eq_refl 0).", "error"),
    "no check of a change": (FALSE, "change_no_check True. exact I.", "error"),
    # files, code, the session
    "redirected output": (FALSE, 'Redirect "t" Print nat. reflexivity.', "forbidden"),
    "extraction": (FALSE, 'Require Extraction. Extraction "t.ml" nat. Definition t := I.', "forbidden"),
    "loading": (FALSE, 'Load "/etc/passwd". Definition t := I.', "forbidden"),
    "a path": (FALSE, 'Add LoadPath "/tmp". Definition t := I.', "forbidden"),
    "machine code": (FALSE, 'Declare ML Module "evil". Definition t := I.', "forbidden"),
    "the debugger": (FALSE, "Drop.", "forbidden"),
    "leaving": (FALSE, "Quit.", "forbidden"),
    "going back": (FALSE, "BackTo 1.", "forbidden"),
    # messages
    "our message": (FALSE, 'idtac "Closed under the global context".', "incomplete"),
    "a prompt": (
        FALSE,
        'idtac "No more goals.\n<prompt>t < 999 |t| 0 < </prompt>No object of basename n0\n'
        '<prompt>Coq < 9 || 0 < </prompt>".',
        "incomplete",
    ),
    "silence": (FALSE, "Set Silent. Unset Printing All. Fail reflexivity. idtac.", "incomplete"),
    "failing well": (FALSE, "Fail exact I.", "incomplete"),
    "a shelf": (FALSE, "shelve.", "incomplete"),
    "nothing": (FALSE, "", "incomplete"),
    "a comment": (FALSE, '(* " *) admit. (* " *)', "incomplete"),
    "an open comment": (FALSE, "(* reflexivity.", "error"),
    "words": (FALSE, "The theorem is trivial.", "error"),
}


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(("statement", "response", "label"), CHEATS.values(), ids=CHEATS)
def test_a_cheat_is_refused_under_its_name(statement, response, label):
    verdict = Coq(level=LEVEL)(task(statement), response)
    assert (verdict.score, verdict.label) == (0.0, label), verdict.reason


NAMED = {name: cheat for name, cheat in CHEATS.items() if find_refusal(split_sentences(cheat[1])[0])}


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(("statement", "response", "label"), NAMED.values(), ids=NAMED)
def test_no_cheat_needs_its_words_to_be_refused(statement, response, label):
    problem = CoqProblem("t", statement)
    box = Box(level=LEVEL, limits=Limits(wall_s=20, memory_mb=2048), readable=check.find_programs().readable)
    text = response if " t " in response else f"Theorem t : {statement}.\n{response}\nQed."
    outcome = check.judge(box, problem, text, ())
    assert outcome.label != "proved"
    if label == "assumes":
        assert outcome.label == "assumes"
    if outcome.label == "forbidden":
        assert "was not checked by the kernel" in outcome.reason


def test_the_kernels_own_checks_name_what_they_did_not_check():
    names = [name for name in CHEATS if name.startswith(("no guard", "no positivity", "no universes"))]
    assert len(names) == 4
    box = Box(level=LEVEL, limits=Limits(wall_s=20, memory_mb=2048), readable=check.find_programs().readable)
    for name in names:
        assert check.judge(box, CoqProblem("t", FALSE), CHEATS[name][1], ()).label == "forbidden", name


@pytest.mark.parametrize(
    ("response", "labels"),
    [
        ("do 1000000000 idtac.", ("timeout",)),
        ("Ltac loop := idtac; loop. Theorem t : 0 = 1. loop. Qed.", ("error", "timeout")),
        ("repeat (assert (0 = 0) by reflexivity).", ("error", "timeout")),
        ('do 1000000 idtac "flood of words flood of words flood of words".', ("error",)),
        ("Definition big := Eval vm_compute in Nat.pow 2 40. Theorem t : 0 = 1.", ("error", "timeout")),
        (f"exact ({'(' * 100_000}", ("error",)),
    ],
    ids=["time", "a loop", "names", "a flood", "memory", "depth"],
)
@pytest.mark.sample(every=2)
def test_what_wears_coq_out_is_its_own_fault(response, labels):
    verdict = Coq(level=LEVEL, budget=2.0, memory_mb=1024)(task(FALSE), response)
    assert verdict.score == 0.0, verdict.reason
    assert verdict.label in labels, verdict.reason


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_that_is_to_be_had_tells_a_proof_from_a_cheat(level):
    if available()[level]:
        pytest.skip(available()[level])
    coq = Coq(level=level)
    assert coq(task("0 = 0"), "reflexivity.").label == "proved"
    assert coq(task(FALSE), CHEATS["a notation"][1]).label == "wrong_statement"


def test_a_partial_score_does_not_come_from_an_axiom_or_a_section():
    coq = Coq(level=LEVEL, partial=True)
    middle = "forall P : nat -> Prop, P 0 \\/ ~ P 0"
    cheats = [
        "Section S. Variable h : False. Theorem t : 0 = 1. idtac.",
        "Section S. Variable h : False. Theorem t : 0 = 1. destruct h.",
        "Require Import Coq.Compat.AdmitAxiom. Theorem t : 0 = 1. destruct proof_admitted.",
        "Theorem t : True. idtac.",
        "Ltac easy ::= shelve. Theorem t : 0 = 1. idtac.",
        'Tactic Notation "solve" := shelve. Theorem t : 0 = 1. idtac.',
    ]
    for response in cheats:
        verdict = coq(task(FALSE), response)
        assert (verdict.score, verdict.progress) == (0.0, ()) or max(p for _, p in verdict.progress) == 0, (
            response
        )
        assert verdict.score == 0.0
    classic = f"Require Import Classical. Theorem t : {middle}. Proof. intro P. destruct (classic (P 0))."
    verdict = coq(task(middle), classic)
    assert (verdict.score, verdict.progress) == (0.0, ())
