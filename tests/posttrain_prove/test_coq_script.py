"""Coq's text is cut as Coq cuts it, and attacks are named by their words."""

import random

import pytest

from posttrain_prove.coq.screen import find_refusal
from posttrain_prove.coq.script import declares, find_submission, split_sentences


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("", []),
        ("  (* only. a (* nested. *) comment. *) ", []),
        ("auto.", ["auto."]),
        ("auto. simpl.\n\tlia.", ["auto.", "simpl.", "lia."]),
        ("- auto.\n-- + simpl. ** { lia. }", ["-", "auto.", "--", "+", "simpl.", "**", "{", "lia.", "}"]),
        ("2:{ auto. } [H]: { lia. } all: lia.", ["2:{", "auto.", "}", "[H]:{", "lia.", "}", "all: lia."]),
        ("apply Nat.add_comm. exact x.(f).", ["apply Nat.add_comm.", "exact x.(f)."]),
        ('idtac "a. b". idtac "(*". lia.', ['idtac "".', 'idtac "".', "lia."]),
        ('idtac "say ""no"". ". lia.', ['idtac """""".', "lia."]),
        ('(* "*)" still. *) lia.', ["lia."]),
        ("intros (* a. *) n. (* b *) lia.", ["intros n.", "lia."]),
        ('Notation "[ x ; .. ; y ]" := (cons x .. (cons y nil) ..). lia.', None),
        ("auto with arith... lia.", ["auto with arith...", "lia."]),
        ("Unset (* x *) Guard\n  Checking.", ["Unset Guard Checking."]),
    ],
)
def test_sentences_end_where_coq_ends_them(text, codes):
    found, wrong = split_sentences(text)
    assert not wrong
    if codes is None:
        assert len(found) == 2
    else:
        assert [sentence.code for sentence in found] == codes
    assert [sentence.text for sentence in found] == [text[s.start : s.end] for s in found]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("auto", "the last sentence has no full stop"),
        ("auto. (* open", "a comment is not closed"),
        ('auto. (* "*)', "a comment is not closed"),
        ('idtac "x.', "a string is not closed"),
        ("auto. -- lia", "the last sentence has no full stop"),
    ],
)
def test_a_text_that_breaks_off_says_so(text, wrong):
    assert split_sentences(text)[1] == wrong


def test_cutting_takes_linear_time_and_loses_nothing():
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    pieces = ["(*", "*)", '"', ".", " ", "\n", "-", "{", "}", "a", "..", "0", "S n", ":=", "é", "\u2200"]
    for _ in range(300):
        text = "".join(draw.choices(pieces, k=draw.randrange(40)))
        found, _ = split_sentences(text)
        ends = [0, *(s.end for s in found)]
        assert all(a <= s.start < s.end for a, s in zip(ends, found, strict=False)), text
    for text in (
        "(*" * 200_000,
        "(*" * 100_000 + "*)" * 100_000,
        '"' * 300_000,
        "{" * 200_000,
        "." * 400_000,
    ):
        split_sentences(text)


def test_the_last_whole_block_counts_and_its_place_is_known():
    response = "try\n```coq\nauto.\n```\nor\n```coq\nlia.\n```\nnot lia.\n"
    text, at = find_submission(response)
    assert (text, response[at : at + len(text)]) == ("lia.\n", "lia.\n")
    assert response[at - 7 : at] == "```coq\n"
    assert find_submission("auto.\n") == ("auto.\n", 0)
    assert find_submission("<think>\n```coq\nlia.\n```\nno</think>auto.\n") == ("auto.\n", 34)


@pytest.mark.parametrize(
    "text",
    ["Lemma t : True.", "#[local] Program Definition t := I.", "Fixpoint t (n : nat) := n.", "Fact t: True."],
)
def test_a_declaration_is_seen(text):
    [sentence] = split_sentences(text)[0]
    assert declares(sentence, "t")
    assert not declares(sentence, "tt")


@pytest.mark.parametrize("text", ["Lemma t' : True.", "apply t.", "Print t.", "Lemma u : t."])
def test_what_declares_another_name_does_not_declare_this_one(text):
    assert not declares(split_sentences(text)[0][0], "t")


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ('Redirect "x" Print nat.', "forbidden"),
        ('Time Redirect "x" Print nat.', "forbidden"),
        ("Fail Quit.", "forbidden"),
        ('Extraction "x" nat.', "forbidden"),
        ("Recursive Extraction nat.", "forbidden"),
        ('Load "x".', "forbidden"),
        ('Cd "/".', "forbidden"),
        ('Add LoadPath "/".', "forbidden"),
        ('Add Rec LoadPath "/" as X.', "forbidden"),
        ('Declare ML Module "x".', "forbidden"),
        ("Drop.", "forbidden"),
        ("BackTo 1.", "forbidden"),
        ("Unset Guard Checking.", "forbidden"),
        ("#[export] Unset Universe Checking.", "forbidden"),
        ("Local Unset Positivity Checking.", "forbidden"),
        ("#[bypass_check(guard)] Fixpoint f (n : nat) : False := f n.", "forbidden"),
        ("#[local, bypass_check(positivity)] Inductive a := b.", "forbidden"),
        ('Print Sorted Universes "x".', "forbidden"),
        ("From Evil Require Import X.", "forbidden"),
        ("Axiom a : False.", "assumes"),
        ("#[local] Axioms a b : False.", "assumes"),
        ("Polymorphic Parameter a : False.", "assumes"),
        ("Variable a : False.", "assumes"),
        ("Section S. End S. Hypothesis a : False.", "assumes"),
        ("Section S. Module M. Context (a : False).", "assumes"),
        ("Declare Module M : T.", "assumes"),
        ("Primitive a := #int63_type.", "assumes"),
        ("intros. admit.", "incomplete"),
        ("Ltac a := give_up.", "incomplete"),
        ("Admitted.", "incomplete"),
        ("Admit Obligations.", "incomplete"),
    ],
)
def test_an_attack_is_named(text, label):
    refused = find_refusal(split_sentences(text)[0])
    assert refused is not None
    assert refused.label == label


@pytest.mark.parametrize(
    "text",
    [
        "(* Axiom a. admit. *) auto.",
        'idtac "Axiom a : False. admit.".',
        "Section S. Variable n : nat. Hypothesis H : n = n. Context (m : nat). End S.",
        "From Coq Require Import Lia. Require Import Arith.",
        "Lemma admit_one : True. exact admitted'.",
        "Set Printing All. Unset Printing Notations.",
        "Module Type T. Parameter x : nat. End T.",
        "exact (x.admit).",
        "Module M := N. Lemma Redirected : True.",
    ],
)
def test_honest_words_are_not_refused(text):
    assert find_refusal(split_sentences(text)[0]) is None
