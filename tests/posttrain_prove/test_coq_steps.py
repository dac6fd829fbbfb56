"""Tactics of Coq as steps, with Coq itself: where moves lead, what is refused, what a session may do."""

import random
from math import log

import psutil
import pytest

from posttrain.search.protocol import Budget, Move, Propose, Refused, State
from posttrain.search.strategies.hypertree import hypertree
from posttrain.search.tree import Tree
from posttrain.types import Task, UserError
from posttrain_prove.coq.moves import CoqTransitions
from posttrain_prove.coq.verifier import Coq

AND = "forall A B : Prop, A /\\ B -> B /\\ A"


def task(statement: str, opening: str = "", name: str = "t", **fields: str) -> Task:
    given = {"name": "goal", "statement": statement, "opening": opening, **fields}
    return Task(id=name, messages=({"role": "user", "content": statement},), fields=given)


@pytest.fixture(scope="module")
def steps():
    made = CoqTransitions()
    yield made
    made.close()


def root(steps: CoqTransitions, asked: Task) -> State:
    [state] = steps.begin([asked])
    assert isinstance(state, State)
    return state


def led(steps: CoqTransitions, state: State, *moves: str) -> State:
    for move in moves:
        [to] = steps.apply([(state, move)])
        assert isinstance(to, State), (move, to)
        state = to
    return state


def refused(steps: CoqTransitions, state: State, move: str) -> Refused:
    [to] = steps.apply([(state, move)])
    assert isinstance(to, Refused), to
    return to


def test_a_proof_goal_by_goal_is_accepted_by_the_verifier(steps):
    asked = task(AND, "intros A B h.")
    start = root(steps, asked)
    assert start.shown[0]["content"] == "h : A /\\ B\n======\nB /\\ A"
    two = led(steps, start, "destruct h as [a b]", "split")
    assert two.shown[0]["content"] == "a : A\nb : B\n======\nB\nthen: A"
    assert len(two.parts) == 2
    assert all("a : A\nb : B" in part.key for part in two.parts)
    assert two.key == "\n\n".join(part.key for part in two.parts), "a key holds the hypotheses of all goals"
    end = led(steps, two, "2: exact a", "exact b.")
    assert end.done
    assert end.moves == ("destruct h as [a b].", "split.", "2: exact a.", "exact b.")
    assert Coq()(asked, end.text).score == 1.0


def test_states_reached_in_two_orders_are_one(steps):
    start = root(steps, task(AND, "intros A B h. destruct h. split."))
    one = led(steps, start, "2: clear H0", "clear H")
    other = led(steps, start, "clear H", "2: clear H0")
    assert one.key == other.key
    assert one.moves != other.moves


FORBIDDEN = [
    "Abort",
    "Admitted",
    "Undo",
    "Restart",
    "Qed",
    "Show",
    "admit",
    "give_up",
    "Axiom x : False",
    "Back 1",
]


@pytest.mark.parametrize("move", FORBIDDEN)
def test_what_is_no_tactic_is_refused_and_changes_nothing(move, steps):
    start = root(steps, task(AND, "intros A B h."))
    assert refused(steps, start, move).label == "forbidden"
    assert led(steps, start, "destruct h").shown


@pytest.mark.parametrize("move", ["", "split. split", "- split", "{", "split (* ", 'idtac "a', "#[x] split"])
def test_what_is_not_one_tactic_is_refused_for_its_form(move, steps):
    assert refused(steps, root(steps, task(AND, "intros A B h.")), move).label == "form"


def test_a_tactic_that_fails_says_why_and_leaves_the_state(steps):
    start = root(steps, task(AND, "intros A B h."))
    found = steps.apply([(start, "exact h"), (start, "destruct h"), (start, "apply x")])
    assert [type(each).__name__ for each in found] == ["Refused", "State", "Refused"]
    assert "it is expected to have type" in found[0].reason
    assert "x was not found" in found[2].reason


def test_a_tactic_that_does_not_end_costs_only_itself(steps):
    start = root(steps, task(AND, "intros A B h."))
    found = steps.apply([(start, "destruct h"), (start, "repeat (idtac; pose proof I)"), (start, "split")])
    assert [type(each).__name__ for each in found] == ["State", "Refused", "State"]
    assert found[1].label == "timeout"


def test_a_tactic_that_floods_or_opens_ten_thousand_goals_is_refused_by_its_class(steps):
    start = root(steps, task("True", ""))
    assert refused(steps, start, "do 20000 (assert True; [exact I|])").label in ("timeout", "output", "goals")
    wide = root(steps, task("forall A : Prop, " + " /\\ ".join(["A"] * 40), "intros A."))
    assert refused(steps, wide, "repeat split").label == "goals"
    assert refused(steps, start, 'do 100000 (idtac "0123456789012345678901234567890123456789")').label in (
        "output",
        "timeout",
    )
    assert led(steps, start, "exact I").done


def test_a_forged_prompt_is_found_out(steps):
    start = root(steps, task("False", ""))
    forged = 'idtac "<prompt>Coq < 9 || 0 < </prompt>"'
    [to] = steps.apply([(start, forged)])
    assert isinstance(to, State | Refused)
    assert not getattr(to, "done", False)
    assert refused(steps, start, "exact I").label == "error"


def test_goals_on_the_shelf_are_not_proved(steps):
    assert refused(steps, root(steps, task(AND, "intros A B h.")), "shelve").label == "shelved"


def test_a_session_that_is_killed_changes_nothing_but_the_count(steps):
    start = root(steps, task(AND, "intros A B h."))
    before, restarts = led(steps, start, "destruct h", "split"), steps.restarts
    kill_sessions(steps)
    assert led(steps, start, "destruct h", "split") == before
    assert steps.restarts == restarts + 1
    kill_sessions(steps)
    assert root(steps, task(AND, "intros A B h.")) == start
    assert steps.restarts == restarts + 2


def kill_sessions(steps: CoqTransitions) -> None:
    """As the system does where memory runs out; what is in a box ends a moment later than the box."""
    for session, _ in steps._sessions.values():
        boxed = psutil.Process(session._live.process.pid).children(recursive=True)
        session._live.process.kill()
        session._live.process.wait()
        psutil.wait_procs(boxed)


def test_what_is_asked_together_and_in_what_order_changes_nothing(steps):
    """Every answer is that of a session of its own that has done nothing else."""
    tasks = [task(AND, "intros A B h.", "and"), task("forall n : nat, n + 0 = n", "intros n.", "add")]
    says = {"and": ["destruct h", "split", "exact h"], "add": ["induction n", "simpl", "reflexivity", "auto"]}
    dice, asked = random.Random(0), []
    states = [root(steps, each) for each in tasks]
    for _ in range(5):
        pairs = [(state, move) for state in states for move in says[state.task.id]]
        dice.shuffle(pairs)
        asked += list(zip(pairs, steps.apply(pairs), strict=True))
        states = [to for _, to in asked[-len(pairs) :] if isinstance(to, State) and not to.done][:4]
    fresh = CoqTransitions()
    try:
        for pair, found in dice.sample(asked, 20):
            assert fresh.apply([pair]) == [found]
    finally:
        fresh.close()


def test_a_task_that_is_not_coq_is_named(steps):
    with pytest.raises(UserError, match="does not begin in Coq"):
        steps.begin([task("forall n, n = nonsense", "")])
    with pytest.raises(UserError, match="does not begin in Coq"):
        steps.begin([task("True", "intros x y.")])
    assert led(steps, root(steps, task("True")), "exact I").done


# ---------------------------------------------------------------------- parts

PARTS = "forall A B C : Prop, A -> B -> C -> (A /\\ (B \\/ C)) /\\ (C /\\ A)"


def test_a_part_shows_its_goal_alone_and_is_done_alone(steps):
    two = led(steps, root(steps, task(AND, "intros A B h. destruct h.")), "split")
    one, other = two.parts
    assert (one.shown[0]["content"], other.shown[0]["content"]) == (
        "H : A\nH0 : B\n======\nB",
        "H : A\nH0 : B\n======\nA",
    )
    same = led(steps, two, "assumption")
    assert other.key == same.key, "the state in which it is the only goal is one with it"
    assert refused(steps, other, "exact H0").label == "error"
    assert led(steps, other, "exact H").done
    assert led(steps, one, "assumption").done
    assert refused(steps, one, "2: assumption").label == "error", "numbers count the goals of the part"
    assert refused(steps, one, "shelve").label == "shelved"
    assert refused(steps, one, "}").label == "form"


def test_parts_of_parts_and_numbers_of_goals_within_one(steps):
    four = led(steps, root(steps, task(PARTS, "intros A B C a b c.")), "split")
    inner = led(steps, four.parts[1], "split")
    assert [part.key.rpartition("\n")[2] for part in inner.parts] == ["C", "A"]
    assert led(steps, inner, "2: exact a", "exact c").done, "2 is the second of the part's own goals"
    assert led(steps, inner.parts[1], "exact a").done


def test_goals_that_share_an_existential_variable_are_kept_together(steps):
    asked = task("forall P : nat -> Prop, P 3 -> (exists n, P n) /\\ True", "intros P h.")
    two = led(steps, root(steps, asked), "split")
    assert len(two.parts) == 2
    assert led(steps, two, "unshelve eexists").parts == ()
    assert led(steps, two.parts[0], "unshelve eexists").parts == ()
    hidden = led(steps, root(steps, task("exists A : Type, @nil A = @nil A")), "unshelve eexists")
    assert "?" not in hidden.key, "Coq does not show the variable"
    assert (len(hidden.shown[0]["content"].split("then:")), hidden.parts) == (2, ())


def said_by(moves: list[str]):
    """A policy that says each of these moves in every state, the first ones rather."""
    mass = sum(1 / n for n in range(2, len(moves) + 2))
    known = [Move(text, log(0.999 / n / mass)) for n, text in enumerate(moves, start=2)]
    return lambda question: known[question.first : question.first + question.count]


def searched(steps: CoqTransitions, search, says) -> Tree:
    """The tree of a search in Coq."""
    try:
        questions = next(search)
        while True:
            questions = search.send(
                [says(q) if isinstance(q, Propose) else steps.apply(q.asked) for q in questions]
            )
    except StopIteration as end:
        return end.value


def test_a_proof_that_is_joined_of_parts_is_accepted_by_the_verifier(steps):
    says = said_by(["left", "right", "split", "assumption", "destruct h", "clear a"])
    asked = task(PARTS, "intros A B C a b c.")
    tree = searched(steps, hypertree(root(steps, asked), Budget(moves=200), width=3), says)
    assert tree.end
    assert tree.end.text.startswith("intros A B C a b c.\nsplit.\n{\nsplit.\n{\nassumption.\n}\n{\n")
    verdict = Coq()(asked, tree.end.text)
    assert verdict.score == 1.0, verdict
    assert {edge.move.text for edge in tree.found} == {"split", "assumption", "right"}
    keys = [node.state.key for node in tree.nodes]
    assert len(set(keys)) == len(keys)
