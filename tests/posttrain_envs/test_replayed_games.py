"""Games of other libraries: pure functions of a seed and what was said."""

import importlib.util
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.envs.protocol import Env, Turn, guarded_reply, guarded_start
from posttrain.process.workers import Failed, Workers
from posttrain.types import Task, UserError, Verdict
from posttrain_envs.gymnasium import Gymnasium, gymnasium_tasks
from posttrain_envs.replayed import Game, Moved, Replayed
from posttrain_envs.textarena import TextArena, textarena_tasks

LAKE = Gymnasium(id="FrozenLake-v1", actions=("left", "down", "right", "up"), options={"is_slippery": False})
ASKED = ({"role": "user", "content": "throw"},)
OXO = TextArena(id="TicTacToe-v0-raw", opponent="random")

with_gymnasium = pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="no gymnasium")
with_textarena = pytest.mark.skipif(importlib.util.find_spec("textarena") is None, reason="no textarena")


def called(workers: Workers, *call: Any) -> Any:
    """What a worker process returns, where the libraries are imported."""
    workers.submit(*call)
    while not (found := workers.poll(1.0)):
        pass
    assert not isinstance(found[0][1], Failed), found
    return found[0][1].value


@pytest.fixture(scope="module")
def workers() -> Any:
    with Workers(1, deadline_s=60.0) as workers:
        yield workers


def played(workers: Workers, env: Env, task: Task, said: list[str]) -> tuple[list[str], Turn | None]:
    """What the policy is shown, and the last turn."""
    start = called(workers, guarded_start, env, task)
    shown, state, turn = [start.messages[-1]["content"]], start.state, None
    for response in said:
        turn = called(workers, guarded_reply, env, state, response)
        state = pickle.loads(pickle.dumps(turn.state))
        shown += [message["content"] for message in turn.messages]
        if turn.done:
            break
    return shown, turn


@with_gymnasium
def test_a_lake_is_crossed_in_words_and_shows_where_one_stands(workers: Workers) -> None:
    [task] = gymnasium_tasks(LAKE, 1, seed=0)
    said = ["I go down", "Down!", "hm", "left? right", "right", "DOWN", "right"]
    shown, end = played(workers, LAKE, task, said)
    assert "one of: left, down, right, up" in shown[0]
    assert shown[0].endswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    assert shown[3] == "Please answer with one of: left, down, right, up."
    assert "\x1b" not in "".join(shown)
    assert end is not None
    assert end.verdict is not None
    assert (end.reward, end.verdict.score, end.verdict.label) == (1.0, 1.0, "ended")


@with_gymnasium
def test_a_hole_ends_a_game_and_a_limit_cuts_it_off(workers: Workers) -> None:
    [task] = gymnasium_tasks(LAKE, 1, seed=0)
    _, hole = played(workers, LAKE, task, ["down", "right"])
    assert hole is not None
    assert hole.verdict is not None
    assert (hole.verdict.score, hole.verdict.label) == (0.0, "ended")
    for options, turns in (({"max_episode_steps": 2}, 50), ({}, 2)):
        env = Gymnasium(
            id=LAKE.id, actions=LAKE.actions, options={**LAKE.options, **options}, max_turns=turns
        )
        _, cut = played(workers, env, task, ["left", "left"])
        assert cut is not None
        assert cut.verdict is not None
        assert (cut.verdict.score, cut.verdict.label) == (0.0, "truncated")


class Dice(Replayed):
    """A game of three throws, which asks for dice of its own: `of` makes them of a seed."""

    max_turns, asks = 9, "Throw."

    def __init__(self, of: Callable[[int], random.Random]) -> None:
        self.of = of

    def open_game(self, seed: int, who: Any) -> Game:
        dice, throws = self.of(seed), []

        class Live(Game):
            def shown(self) -> str:
                return "dice"

            def play(self, move: str) -> Moved:
                throws.append(dice.randrange(10**6))
                return Moved(shown=str(throws[-1]), label="ended" if len(throws) == 3 else "")

        return Live()


def test_a_game_that_its_seed_does_not_fix_has_no_score() -> None:
    def end(env: Replayed, said: list[str]) -> Verdict:
        state = guarded_start(env, Task(id="t", messages=ASKED, fields={"seed": 3})).state
        for response in said:
            turn = guarded_reply(env, state, response)
            state = turn.state
        return turn.verdict

    assert end(Dice(random.Random), ["a", "", "b", "c"]).label == "ended"
    drifting = end(Dice(lambda seed: random.Random()), ["a", "b"])
    assert (drifting.failed, "its seed does not determine" in drifting.reason) == (True, True)


@with_gymnasium
def test_chance_is_the_games_own_and_the_same_in_any_process(workers: Workers) -> None:
    env = Gymnasium(id="FrozenLake-v1", actions=LAKE.actions)  # slippery
    tasks, same, others_seed = (called(workers, gymnasium_tasks, env, 8, seed) for seed in (3, 3, 4))
    said = ["down", "right", "down", "right"]
    first = [played(workers, env, task, said)[0] for task in tasks]
    with Workers(1, deadline_s=60.0) as others:
        assert [played(others, env, task, said)[0] for task in tasks] == first
    assert len({tuple(shown) for shown in first}) > 1
    assert tasks == same
    assert len({task.fields["seed"] for task in (*tasks, *others_seed)}) == 16


@with_gymnasium
@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"id": "NoSuch-v0"}, "NoSuch-v0 cannot be made"),
        ({"id": "CartPole-v1", "actions": ("l", "r")}, "shows Box, which is not text"),
        ({"id": "FrozenLake-v1", "actions": ("l", "r")}, "has 4 actions, and 2 words are listed"),
        ({"id": "FrozenLake-v1", "options": {"size": 3}}, "unexpected keyword argument 'size'"),
    ],
)
def test_what_cannot_be_played_in_words_is_one_line(workers: Workers, env: dict[str, Any], said: str) -> None:
    workers.submit(gymnasium_tasks, Gymnasium(**env), 1, 0)
    [(_, failed)] = workers.poll(60.0)
    assert isinstance(failed, Failed)
    assert failed.reason.startswith("UserError: task.gymnasium.")
    assert said in failed.reason


@with_textarena
def test_a_game_for_one(workers: Workers) -> None:
    env = TextArena(id="TowerOfHanoi-v0-raw")
    [task] = textarena_tasks(env, 1, seed=0)
    shown, won = played(workers, env, task, ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"])
    assert shown[0].startswith("You play a game.")
    assert shown[1].startswith("You moved disk 1 from A to C.")
    assert won is not None
    assert won.verdict is not None
    assert (won.verdict.score, won.verdict.label) == (1.0, "ended")


@with_textarena
def test_an_end_by_invalid_moves_is_no_win(workers: Workers) -> None:
    for env in (TextArena(id="TowerOfHanoi-v0-raw"), OXO):
        [task] = textarena_tasks(env, 1, seed=0)
        _, end = played(workers, env, task, ["[zz]", "[zz]"])
        assert end is not None
        assert end.verdict is not None
        assert end.verdict.label == "invalid"
        assert end.verdict.score is not None
        assert end.verdict.score <= 0


@with_textarena
def test_an_opponent_that_plays_at_random_plays_the_same_again_and_loses_now_and_then(
    workers: Workers,
) -> None:
    tasks = textarena_tasks(OXO, 12, seed=5)
    draw = random.Random(0)
    print("seed 0")
    scores = []
    for task in tasks:
        said, shown, end = list[str](), ["", ""], None
        while end is None or not end.done:
            start_shown, end = (
                played(workers, OXO, task, said) if said else (["Available Moves: '[4]'"], None)
            )
            shown = start_shown
            if end is None or not end.done:
                said.append(draw.choice(re.findall(r"\[\d\]", shown[-1].rsplit("Available", 1)[1])))
        assert played(workers, OXO, task, said)[1] == end
        assert end.verdict is not None
        assert end.verdict.label == "ended"
        scores.append(end.verdict.score)
    assert len(set(scores)) > 1


@with_textarena
def test_an_opponent_of_ones_own_and_the_second_seat(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "foe.py").write_text(
        "def first(seen):\n    return '[8]' if '[8]' in seen.rsplit('Available')[-1] else 'x'\n"
    )
    env = TextArena(id="TicTacToe-v0-raw", opponent=f"{tmp_path / 'foe.py'}:first", seat=1)
    [task] = textarena_tasks(env, 1, seed=0)
    shown, end = played(workers, env, task, ["[0]", "[1]"])
    assert "Player 0 placed their symbol (O) in cell 8." in shown[0]
    assert "You are Player 1" in shown[0]
    assert end is not None
    assert end.verdict is not None
    assert (end.verdict.score, end.verdict.label) == (
        None,
        "raised",
    )  # the opponent broke the rules: nobody won
    assert "made an invalid move" in end.verdict.reason


@with_textarena
def test_both_seats_are_the_policys_and_held_out_games_are_against_another(workers: Workers) -> None:
    env = TextArena(id="TicTacToe-v0-raw", opponent="self")
    tasks = textarena_tasks(env, 5, seed=0, held_out=2)
    start = called(workers, guarded_start, env, tasks[0])
    assert (start.seats, start.seat) == (2, 0)
    state, seen = start.state, {0: start.messages[-1]["content"]}
    turn, turns = None, []
    for response in ("[0]", "[3]", "[1]", "[4]", "[2]"):  # the first row is the first player's
        turn = called(workers, guarded_reply, env, state, response)
        state = pickle.loads(pickle.dumps(turn.state))
        turns.append(turn.seat)
        if turn.messages:
            seen.setdefault(turn.seat, turn.messages[-1]["content"])
    assert turns[:4] == [1, 0, 1, 0]
    assert turn is not None
    assert turn.done
    assert [(v.score, v.label) for v in turn.verdicts] == [(1.0, "ended"), (-1.0, "ended")]
    assert all(text.startswith("You play a game.") for text in seen.values())
    assert ["You are Player 0" in seen[0], "You are Player 1" in seen[1]] == [True, True]
    assert "in cell 0" in seen[1]
    invalid = called(workers, guarded_reply, env, start.state, "[zz]")
    for _ in range(3):
        if not invalid.done:
            invalid = called(workers, guarded_reply, env, invalid.state, "[zz]")
    assert invalid.verdicts[0].label == "invalid"
    assert [task.fields.get("opponent") for task in tasks] == [None] * 3 + ["random"] * 2
    assert [called(workers, guarded_start, env, task).seats for task in tasks] == [2, 2, 2, 1, 1]
    assert "You are Player 1" in called(workers, guarded_start, env, tasks[4]).messages[-1]["content"]


@with_textarena
@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"id": "Nope-v0"}, "Nope-v0 cannot be played"),
        ({"id": "TicTacToe-v0-raw"}, "cannot be played"),
        ({"id": "ConnectFour-v0-raw", "opponent": "random"}, "does not list its moves in brackets"),
    ],
)
def test_a_game_that_cannot_be_played_is_one_line(env: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        textarena_tasks(TextArena(**env), 1, seed=0)
    assert said in str(error.value)


@with_gymnasium
@with_textarena
def test_recipes_train_on_games(tiny: Path, write: Any, run_cli: Any) -> None:
    tables = {
        "model": {"path": str(tiny), "dtype": "float32", "device": "cpu"},
        "method": {"name": "grpo"},
        "task": {
            "gymnasium": {"id": LAKE.id, "actions": list(LAKE.actions), "max_turns": 2},
            "games": {"train": 4, "held_out": 2},
        },
        "sampling": {"max_new_tokens": 3},
        "rollout": {"groups": 2, "group_size": 2},
        "run": {"updates": 1, "threads": 1},
    }
    assert run_cli("train", write(tables), "--run-dir", write(tables).parent / "lake", "--quiet").code == 0
    oxo = {"task": {"gymnasium": None, "textarena": {"id": "TowerOfHanoi-v0-raw", "max_turns": 2}}}
    assert run_cli("validate", write(tables, oxo)).code == 0
    judged = run_cli("validate", write(tables, {"verifier": {"number": {}}}))
    assert judged.code == 2
    assert "leave [verifier] out" in judged.err


def test_without_the_library_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.base.libraries.is_installed", lambda name: False)
    with pytest.raises(UserError, match=r"^task\.gymnasium: "):
        gymnasium_tasks(LAKE, 1, seed=0)
    with pytest.raises(UserError, match=r"^task\.textarena: "):
        textarena_tasks(OXO, 1, seed=0)
