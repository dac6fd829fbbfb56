"""Guessing and mazes: their rules, and that an episode can be replayed from its responses."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.envs.protocol import Start, Turn, guarded_reply, guarded_start
from posttrain.types import Task, UserError
from posttrain_envs.guess import Guess, guess_tasks
from posttrain_envs.maze import MOVES, TWO_BY_THREE, Maze, carve, layout_tasks, maze_tasks, parse_layout


def play(env, task, responses) -> list[Turn]:
    state, turns = env.start(task).state, []
    for response in responses:
        turns.append(env.reply(state, response))
        state = turns[-1].state
        if turns[-1].done:
            break
    return turns


def secret(number: int) -> Task:
    return Task(id="g", messages=({"role": "user", "content": "Guess."},), answer=str(number))


def test_halving_finds_every_number_of_a_hundred_in_seven():
    env = Guess(high=100, max_turns=7)
    for number in range(1, 101):
        low, high, state = 1, 100, env.start(secret(number)).state
        for _ in range(7):
            guess = (low + high) // 2
            turn = env.reply(state, f"I say {guess}.")
            if turn.done:
                break
            state = turn.state
            low, high = (guess + 1, high) if turn.messages[0]["content"] == "higher" else (low, guess - 1)
        assert (turn.reward, turn.verdict.label, turn.verdict.score) == (1.0, "right", 1.0)


def test_a_game_that_runs_out_of_turns_is_lost():
    turns = play(Guess(high=10, max_turns=3), secret(7), ["1", "10", "8", "7"])
    assert [t.done for t in turns] == [False, False, True]
    assert [t.messages[0]["content"] for t in turns[:2]] == ["higher", "lower"]
    assert (turns[-1].reward, turns[-1].verdict.label) == (0.0, "wrong")
    assert turns[-1].messages == ()


@pytest.mark.parametrize(
    ("response", "says"),
    [
        ("", "Please"),
        ("seven", "Please"),
        ("6 then 8", "lower"),
        ("-8", "lower"),
        ("9" * 5000, "Please"),
        ("0", "higher"),
    ],
)
def test_the_last_whole_number_is_the_guess(response, says):
    [turn] = play(Guess(high=10, max_turns=3), secret(7), [response])
    assert turn.messages[0]["content"].startswith(says)


def test_a_game_without_a_number_in_its_last_response_has_no_answer():
    assert play(Guess(max_turns=1), secret(7), ["?"])[-1].verdict.label == "no_answer"


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 50), st.lists(st.integers(0, 60), min_size=1, max_size=20))
def test_shaping_adds_up_to_what_was_learnt_and_never_more_than_its_weight(number, guesses):
    env = Guess(high=50, max_turns=20, shaping=0.5)
    turns = play(env, secret(number), map(str, guesses))
    shaped = sum(turn.reward for turn in turns) - (turns[-1].verdict.score if turns[-1].done else 0.0)
    assert -1e-9 <= shaped <= 0.5 + 1e-9
    if number in guesses:
        assert turns[-1].verdict.score == 1.0
        assert shaped == pytest.approx(0.5)


def test_games_without_shaping_reward_only_the_end():
    assert [t.reward for t in play(Guess(high=10), secret(7), ["1", "8", "7"])] == [None, None, 1.0]


@pytest.mark.parametrize("answer", [None, "", "0", "101", "seven", "7.5", "9" * 30])
def test_a_task_without_a_number_is_an_error_of_the_data(answer):
    with pytest.raises(UserError, match="not a number from 1 to 100"):
        Guess(high=100).start(Task(id="g", messages=(), answer=answer))


@pytest.mark.parametrize("size", [2, 3, 5, 9])
def test_a_maze_joins_every_two_cells_by_one_path(size):
    passages = carve(size, "seed")
    assert len(passages) == 2 * (size * size - 1)  # a tree
    reached, queue = {(0, 0)}, [(0, 0)]
    while queue:
        here = queue.pop()
        new = [b for a, b in passages if a == here and b not in reached]
        reached |= set(new)
        queue += new
    assert len(reached) == size * size


def test_the_shortest_way_leads_out_of_every_maze():
    for task in maze_tasks(20, size=4, seed=1):
        ways = task.answer.split()
        turns = play(Maze(max_turns=len(ways)), task, [f"I go {way.upper()}." for way in ways])
        assert (turns[-1].done, turns[-1].reward, turns[-1].verdict.label) == (True, 1.0, "right")
        assert len(turns) == len(ways)
        late = play(Maze(max_turns=len(ways) - 1), task, ways)
        assert (late[-1].reward, late[-1].verdict.label) == (0.0, "wrong")


def test_what_a_maze_says_is_open_is_open():
    [task] = maze_tasks(1, size=5)
    env = Maze(max_turns=200)
    state, seen = env.start(task).state, env.start(task).messages[-1]["content"]
    for step in range(60):
        said = seen.rpartition("Open: ")[2].rstrip(".").split(", ")
        for move in MOVES:
            turn = env.reply(state, move)
            assert turn.done or ("wall" in turn.messages[0]["content"]) == (move not in said)
        turn = env.reply(state, said[step % len(said)])
        if turn.done:
            return
        state, seen = turn.state, turn.messages[0]["content"]


def test_the_maze_of_two_by_three_pays_ten_and_its_trap_costs_ten():
    [task] = layout_tasks(1)
    env = Maze(reward=10.0)
    out = play(env, task, task.answer.split())
    assert [(t.reward, t.done) for t in out] == [(None, False), (None, False), (10.0, True)]
    assert (out[-1].verdict.score, out[-1].verdict.label) == (10.0, "right")
    caught = play(env, task, ["down", "I step right.", "up"])
    assert [(t.reward, t.done) for t in caught] == [(None, False), (-10.0, True)]
    assert (caught[-1].verdict.label, caught[-1].verdict.reason) == ("wrong", "in a trap after 2 moves")
    lost = play(Maze(max_turns=2, reward=10.0), task, ["up", "up"])
    assert (lost[-1].reward, lost[-1].verdict.label) == (0.0, "wrong")


def test_a_layout_is_told_as_it_is():
    [task] = layout_tasks(1)
    told = Maze().start(task).messages[-1]["content"]
    assert "3 columns and 2 rows" in told
    assert "from column 1, row 1 to column 3, row 2 past the traps at column 2, row 2." in told
    assert told.endswith("You are at column 1, row 1. Open: down, right.")
    assert "trap" not in layout_tasks(1, layout="S./.G")[0].messages[-1]["content"]


def test_the_shortest_way_through_a_layout_avoids_its_traps():
    assert layout_tasks(1, layout="SXG/...")[0].answer == "down right right up"
    assert layout_tasks(1, layout="G.S")[0].answer == "left left"


def test_the_tasks_of_a_layout_differ_in_nothing_but_their_names():
    tasks = layout_tasks(5)
    assert len({t.id for t in tasks}) == 5
    assert len({(t.messages[0]["content"], t.answer, t.fields["layout"]) for t in tasks}) == 1
    assert tasks[0].fields == {"layout": TWO_BY_THREE}


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("S.G/..", "equal length"),
        ("S#G", "equal length"),
        ("", "one S and one G"),
        ("...", "one S and one G"),
        ("SGG", "one S and one G"),
        ("SXG", "avoids every X"),
        ("S" + "." * 2500 + "G", "equal length"),
    ],
)
def test_a_layout_without_a_way_is_refused(layout, says):
    with pytest.raises(ValueError, match=says):
        parse_layout(layout)
    with pytest.raises(ValueError, match=says):
        layout_tasks(1, layout=layout)
    task = Task(id="m", messages=({"role": "user", "content": "?"},), fields={"layout": layout}, source="a:1")
    with pytest.raises(UserError, match=rf"^a:1: .*describes no maze.*{says}.*S\.\./\.XG"):
        Maze().start(task)


def test_no_direction_costs_a_turn_and_is_asked_for():
    [task] = maze_tasks(1)
    turns = play(Maze(max_turns=2), task, ["I am updating my downloads", ""])
    assert turns[0].messages[0]["content"].startswith("Please answer with up, down, left or right.")
    assert turns[1].verdict.label == "no_answer"


@pytest.mark.parametrize(
    "fields", [{}, {"maze": "a"}, {"size": 4}, {"maze": "a", "size": 1}, {"maze": "a", "size": "4"}]
)
def test_a_task_without_a_maze_is_an_error_of_the_data(fields):
    with pytest.raises(UserError, match="describes no maze"):
        Maze().start(Task(id="m", messages=({"role": "user", "content": "?"},), fields=fields))


def test_tasks_are_fixed_by_their_seed_and_differ():
    for make in (guess_tasks, maze_tasks):
        assert make(30, seed=1) == make(30, seed=1)
        assert make(10, seed=1) == make(30, seed=1)[:10]
        assert [t.answer for t in make(30, seed=1)] != [t.answer for t in make(30, seed=2)]
        assert len({t.id for t in make(30)}) == 30
    assert {int(t.answer) for t in guess_tasks(500, high=10)} == set(range(1, 11))
    # The way out of this maze on every machine and in every version.
    assert maze_tasks(1, size=3)[0].answer == "right down down right"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text() | st.sampled_from(["up", "down", "left", "right", "50", "25", "75", "7"]), max_size=25)
)
def test_episodes_replay_from_their_responses(responses):
    games = ((Guess(shaping=0.1), secret(7)), (Maze(), maze_tasks(1)[0]), (Maze(), layout_tasks(1)[0]))
    for env, task in games:
        start = guarded_start(env, task)
        assert isinstance(start, Start)
        states, turns = [start.state], []
        for response in responses:
            turns.append(guarded_reply(env, states[-1], response))
            states.append(turns[-1].state)
            assert turns[-1].verdict is None or not turns[-1].verdict.failed
            if turns[-1].done:
                break
        # From pickled states, in the opposite order: nothing is kept anywhere but in the state.
        for state, response, turn in reversed(list(zip(states, responses, turns, strict=False))):
            assert pickle.loads(pickle.dumps(env)).reply(pickle.loads(pickle.dumps(state)), response) == turn


@pytest.mark.parametrize(
    "make",
    [
        lambda: Guess(high=1),
        lambda: Guess(max_turns=0),
        lambda: Guess(shaping=-1.0),
        lambda: Guess(shaping=float("nan")),
        lambda: Maze(max_turns=0),
        lambda: Maze(reward=0.0),
        lambda: Maze(reward=float("inf")),
    ],
)
def test_impossible_games_are_refused(make):
    with pytest.raises(ValueError):
        make()
