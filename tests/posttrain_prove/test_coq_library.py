"""Coq's library as tasks: each theorem at its own place, split by file, or counted as left out."""

import re
from collections import Counter

import pytest

from posttrain.recipe.tasks import TaskChoice, make_tasks
from posttrain.types import UserError
from posttrain.verifiers.sandbox import LEVELS, available
from posttrain_prove.coq import library as module
from posttrain_prove.coq.library import CoqLibrary, coq_library, find_library, proofs, read_statements
from posttrain_prove.coq.verifier import Coq

pytestmark = pytest.mark.usefixtures("coqc")
LEVEL = next((level for level in LEVELS if not available()[level]), "strict")

FILE = """
Require Import Arith. (* a. comment. *)
Local Open Scope nat_scope.
Definition two := 2.
Lemma first n (m : nat) {k : nat} : n + m + k * 0 = n + m. (* why. *)
Proof.
  rewrite Nat.mul_0_r.
  - now rewrite Nat.add_0_r.
Qed.
Section S.
  Variable n : nat.
  Lemma inside : n = n. Proof. reflexivity. Qed.
End S.
Module M.
  Lemma deep : True. exact I. Qed.
End M.
Lemma term : True. Proof I.
Qed.
Lemma given_up : False. Proof. Admitted.
#[local] Definition hidden := two.
Theorem second : two = 1 + 1.
reflexivity.
Defined.
Theorem of_hidden : hidden = 2. Proof. reflexivity. Qed.
Lemma text : "a"%string = "a"%string. Proof. reflexivity. Qed.
Require Import Bool.
Fact third : two = 2. Proof. reflexivity. Qed.
Local Hint Resolve third : core.
Fact fourth : two = 2. Proof. auto. Qed.
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A library of three files."""
    (tmp_path / "A").mkdir()
    (tmp_path / "A" / "One.v").write_text(FILE)
    (tmp_path / "A" / "Two.v").write_text(
        "Lemma other : 1 = 1.\nProof. reflexivity. Qed.\nLemma one : 2  =\n 2. trivial. Qed."
    )
    (tmp_path / "A" / "Three.v").write_text("Lemma again : 2 = 2. trivial. Qed.")
    monkeypatch.setattr(module, "find_library", lambda: tmp_path)


@pytest.mark.usefixtures("made")
def test_each_theorem_is_cut_out_with_what_stands_before_it_or_counted():
    found, left_out = read_statements("A/One.v")
    assert [each.name for each in found] == ["first", "second", "third"]
    assert left_out == Counter(section=1, module=1, proof=2, local=2, statement=1)
    first, second, third = found
    assert first.statement == "forall n (m : nat) {k : nat}, n + m + k * 0 = n + m"
    assert first.opening == "intros n m k."
    assert first.proof == ("rewrite Nat.mul_0_r.", "-", "now rewrite Nat.add_0_r.")
    assert first.header == "Require Import Arith.\nLocal Open Scope nat_scope."
    assert first.before == ("Definition two := 2.",)
    assert FILE.splitlines()[first.line - 1].startswith("Lemma first")
    assert (second.opening, second.proof) == ("", ("reflexivity.",))
    assert second.before[-1] == "#[local] Definition hidden := two."
    assert third.header.endswith("Require Import Bool.")


@pytest.mark.usefixtures("made")
def test_files_are_split_and_what_a_held_out_file_states_is_not_trained_on():
    spec = CoqLibrary(files=("A/*.v",), held_out_files=("A/Three.v",))
    held_out, train = coq_library("held_out", spec), coq_library("train", spec)
    assert [task.id for task in held_out] == ["A/Three.v:again"]
    assert [task.id for task in train] == [f"A/One.v:{n}" for n in ("first", "second", "third")] + [
        "A/Two.v:other"
    ]
    assert train[0].fields["gold"].startswith("intros n m k.\nrewrite")
    assert (train[0].fields["tactics"], train[0].fields["opening"]) == (3, ["intros n m k."])
    few = CoqLibrary(files=("A/One.v",), most=1, leave_out=("A/One.v:second",), shown=1)
    [task] = coq_library("train", few)
    assert "Definition two" not in task.messages[0]["content"]
    assert "Theorem third : two = 2." in task.messages[0]["content"]
    assert proofs(["A/Three.v"]) == [("Theorem again : 2 = 2.", ("trivial.",))]
    choice = TaskChoice(coq_library=spec)
    assert [len(split) for split in make_tasks(choice, limit=5, seed=0)] == [4, 1]


@pytest.mark.usefixtures("made")
def test_files_and_theorems_that_are_not_there_are_named():
    with pytest.raises(UserError, match="has no file"):
        coq_library("train", CoqLibrary(files=("A/Four.v",)))
    with pytest.raises(UserError, match="has no file"):
        read_statements("A/Four.v")
    with pytest.raises(UserError, match="no theorem of Coq's library is in 'train'"):
        coq_library("train", CoqLibrary(files=("A/*.v",), held_out_files=("A/*.v",)))


def test_no_theorem_of_the_installed_library_is_lost():
    for file in ("Bool/Bool.v", "Arith/Compare_dec.v", "Lists/List.v", "Sets/Constructive_sets.v"):
        found, left_out = read_statements(file)
        text = (find_library() / file).read_text(encoding="utf-8")
        kinds = "Theorem|Lemma|Fact|Remark|Corollary|Proposition|Property"
        there = re.findall(rf"^[ \t]*(?:#\[[^\]]*\]\s*)?(?:Local |Global )?(?:{kinds})\s", text, re.MULTILINE)
        assert len(found) + sum(left_out.values()) == len(there)
        assert len({each.name for each in found}) == len(found)
        assert not left_out.keys() - set(module.REASONS)


def test_the_verifier_takes_golds_of_the_installed_library():
    coq = Coq(level=LEVEL)
    for name in ("Bool/Bool.v:andb_comm", "Arith/Compare_dec.v:dec_le"):
        [task] = [t for t in coq_library("train", CoqLibrary(files=(name.split(":")[0],))) if t.id == name]
        assert coq(task, task.fields["gold"]).label == "proved"
        assert coq(task, "idtac.").score == 0


@pytest.mark.parametrize("options", [{"files": ()}, {"most": -1}, {"shown": -1}, {"template": "x"}], ids=str)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError):
        CoqLibrary(**options)
