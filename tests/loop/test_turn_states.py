"""Keys of states: from environments to trajectories, over workers and resumed groups."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from transformers import AutoTokenizer

from posttrain.base.chat import Chat
from posttrain.base.value_digest import value_digest
from posttrain.envs.protocol import Start, Turn, guarded_reply, guarded_start
from posttrain.envs.tools.settings import Tools
from posttrain.envs.tools.tool_use import ToolUse
from posttrain.envs.user import here, load_env
from posttrain.rollout.protocol import GroupRequest
from posttrain.rollout.rollouts import Rollouts
from posttrain.types import Completion, Episode, Sampling, Task, Verdict
from posttrain_envs.maze import TWO_BY_THREE, Maze, layout_tasks

WALKS = ["right right down", "right left right right down", "down right", "right right left right down"]


class Walking:
    """An engine whose sample n answers with the moves of WALKS[n], one a step."""

    steps = 0

    def __init__(self) -> None:
        self.requests: dict[int, Any] = {}
        self.opened = 0

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    def submit(self, request: Any) -> int:
        self.opened += 1
        self.requests[self.opened] = request
        return self.opened

    def poll(self) -> list[tuple[int, Completion]]:
        ticket = next(iter(self.requests))
        return [(ticket, self.answer(self.requests.pop(ticket)))]

    def answer(self, request: Any) -> Completion:
        text = WALKS[request.sample].split()[request.position]
        logp = [-1.0]
        number = 40 + ["up", "down", "left", "right"].index(text)
        return Completion(
            tokens=[number], logp_gen=logp, logp_policy=logp, version=[3], text=text, stop="eos"
        )

    def withdraw(self) -> list[tuple[int, Any]]:
        requests, self.requests = list(self.requests.items()), {}
        return requests

    def unanswered(self) -> list[tuple[int, Any]]:
        return list(self.requests.items())

    def release(self, name: str) -> None: ...

    def close(self) -> None: ...


Play = Callable[..., Rollouts]


@pytest.fixture
def play(tiny: Any) -> Play:
    """play(env, keyed=True) -> rollouts of this environment."""
    chat = Chat(AutoTokenizer.from_pretrained(tiny))
    return lambda env, **options: Rollouts(
        Walking(),
        chat,
        env=env,
        **{"context": 4000, "keyed": True, **options},  # type: ignore[arg-type]
    )


[TASK] = layout_tasks(1, layout=TWO_BY_THREE)
MAZE = Maze(layout=TWO_BY_THREE, max_turns=6)
REQUEST = GroupRequest(number=0, task=TASK, size=len(WALKS), sampling=Sampling(max_new_tokens=4))


def played(rollouts: Rollouts, request: GroupRequest = REQUEST) -> list[Episode]:
    rollouts.open(request)
    rollouts.unpause()
    groups: list[tuple[int, list[Episode]]] = []
    while rollouts.busy:
        groups += rollouts.step()
    rollouts.close()
    return groups[0][1]


def keys_of(episodes: list[Episode]) -> list[list[int]]:
    for e in episodes:
        starts = [t for t, s in enumerate(e.trajectory.sampled) if s]  # answers of a token
        assert [*e.trajectory.turn_state] in ([], starts)
    return [[*e.trajectory.turn_state.values()] for e in episodes]


def test_keys_are_those_of_the_states_before_each_turn(play: Play) -> None:
    keys = keys_of(played(play(MAZE)))
    for walk, found in zip(WALKS, keys, strict=True):
        state: Any = MAZE.start(TASK).state
        for move, key in zip(walk.split(), found, strict=True):
            assert key == value_digest(state)
            state = MAZE.reply(state, move).state
    assert keys[0][0] == keys[1][0] == keys[2][0] == keys[3][0]
    assert keys[0][:3] == keys[3][:3]
    assert keys[1][2] not in (keys[0][0], keys[0][2]), "with another number of moves left it is another state"


def test_without_a_method_that_asks_nothing_is_recorded(play: Play) -> None:
    with_keys, without = played(play(MAZE)), played(play(MAZE, keyed=False))
    assert keys_of(without) == [[]] * len(WALKS)
    plain = [replace(e.trajectory, turn_state={}) for e in with_keys]
    assert plain == [e.trajectory for e in without]


@pytest.mark.parametrize("steps", range(0, 14, 3))
def test_a_group_that_is_stopped_and_resumed_has_the_same_keys(play: Play, steps: int) -> None:
    """In a process that unpickles its states, as a resumed run or a restarted sampler does."""
    uninterrupted = played(play(MAZE))
    first = play(MAZE)
    first.open(REQUEST)
    for _ in range(steps):
        first.step()
    first.pause()
    parts = pickle.loads(pickle.dumps(first.parts()[0]))
    first.close()
    resumed = played(play(MAZE), replace(REQUEST, begun=parts))
    assert [e.trajectory for e in resumed] == [e.trajectory for e in uninterrupted]


OWN = """
from dataclasses import dataclass
from posttrain.envs.protocol import Start, Turn
from posttrain.types import Verdict

@dataclass(frozen=True)
class Walk:
    at: int
    steps: int

class Line:
    def start(self, task): return Start(state=Walk(0, 0), messages=task.messages)
    def reply(self, state, response):
        at = state.at + {"right": 1, "left": -1}.get(response, 0)
        if state.steps == 2:
            return Turn(state=state, done=True, verdict=Verdict(score=1.0 * at, label="there"), reward=1.0)
        return Turn(state=Walk(at, state.steps + 1), messages=({"role": "user", "content": "go"},))

class Cells(Line):
    def state_key(self, state): return state.at

class Talk(Line):
    def state_key(self, state): return None
"""


@pytest.mark.parametrize(("factory", "shared"), [("Line", 3), ("Cells", 2), ("Talk", 3)])
@pytest.mark.sample("Cells-2")
def test_an_environment_of_the_users_says_what_counts_in_a_worker(
    play: Play, tmp_path: Any, factory: str, shared: int
) -> None:
    """Of right, left, right three states; the first and third are one if steps do not count."""
    (tmp_path / "line.py").write_text(OWN)
    env = load_env(f"{tmp_path / 'line.py'}:{factory}")
    episodes = played(play(env, workers=1), replace(REQUEST, size=2))
    keys = keys_of(episodes)
    assert len(set(keys[1])) == shared
    assert keys[0][:2] == keys[1][:2]
    assert len(episodes[0].trajectory.turn_state) == 3


@dataclass(frozen=True)
class Silent:
    """An environment whose state is the conversation, which may end in a key that cannot be made."""

    key: Any = None

    def start(self, task: Task) -> Start:
        return Start(state=None, messages=task.messages)

    def reply(self, state: Any, response: str) -> Turn:
        if response == "down":
            return Turn(state=None, done=True, verdict=Verdict(score=1.0, label="right"))
        return Turn(state=self.key, messages=({"role": "user", "content": "on"},))


def test_a_state_of_none_is_the_conversation(play: Play) -> None:
    keys = keys_of(played(play(here(Silent()))))
    assert keys[0][:2] == keys[1][:2], "they have said the same so far"
    assert keys[0][2] != keys[1][2]
    assert keys[0] == [*keys[3][:2], keys[0][2]]
    assert keys[2][0] == keys[0][0]


def test_a_state_without_a_digest_ends_the_episode_alone() -> None:
    env = here(Silent(key=(n for n in [1])))
    turn = guarded_reply(env, None, "up", keyed=True)
    assert (turn.done, turn.verdict and turn.verdict.label) == (True, "raised")  # type: ignore[union-attr]
    assert not guarded_reply(env, None, "up").done
    start = guarded_start(here(Silent()), TASK, keyed=True)
    assert isinstance(start, Start)
    assert start.key == 0


def test_tools_leave_their_results_in_the_conversation_alone() -> None:
    env = partial(ToolUse, runners=(), settings=Tools(builtin=("calculator",)))(judge=None)  # type: ignore[arg-type]
    start = guarded_start(env, TASK, keyed=True)
    assert isinstance(start, Start)
    assert start.key == 0
