"""Games that the policy plays against itself: a conversation, a reward and a group for each seat."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from posttrain.base.chat import Chat
from posttrain.base.usercode import load_named
from posttrain.curriculum.select import by_seat
from posttrain.envs.protocol import Start, Turn, guarded_reply, guarded_start, seat_fault
from posttrain.loop.transcript import ScriptedEngine
from posttrain.rollout.protocol import GroupRequest
from posttrain.rollout.rollouts import Rollouts
from posttrain.types import Episode, Request, Sampling, Task, Verdict

ROOT = Path(__file__).resolve().parents[2]
NIM = ROOT / "recipes" / "agents" / "nim" / "nim.py"


class Says(ScriptedEngine):
    """An engine that says what it is told to, one after the other, whoever asks."""

    def __init__(self, texts: Sequence[str], chat: Chat) -> None:
        super().__init__(chat, texts)
        self.asked: list[Request] = []

    def submit(self, request: Request) -> int:
        self.asked.append(request)
        return super().submit(request)

    def next_text(self, request: Request) -> str:
        return self.texts[self.answers.total()]


class Here:
    """Nim, in this process."""

    trusted = True

    def __init__(self) -> None:
        self.nim = load_named(f"{NIM}:nim")()

    def start(self, task: Task) -> Start:
        return self.nim.start(task)

    def reply(self, state: Any, response: str) -> Turn:
        return self.nim.reply(state, response)


def pile(count: int, against: str = "self") -> Task:
    return Task(
        id=f"pile-{count}",
        messages=({"role": "user", "content": "nim"},),
        fields={"pile": count, "against": against},
    )


@pytest.fixture
def play(tiny: Path) -> Any:
    """play(env, task, what is said, context=..., size=...) -> episodes, requests, and the chat."""

    def run(env: Any, task: Task, said: Sequence[str], context: int = 500, size: int = 1) -> Any:
        chat = Chat(AutoTokenizer.from_pretrained(tiny))
        engine = Says(said, chat)
        rollouts: Any = Rollouts(engine, chat, env=env, context=context)  # type: ignore[arg-type]
        try:
            [episodes] = rollouts.run([task], size, Sampling(max_new_tokens=8))
        finally:
            rollouts.close()
        return episodes, engine.asked, chat

    return run


def text(chat: Chat, episode: Episode) -> str:
    return "".join(chat.pieces(episode.trajectory.tokens))


def test_each_seat_has_a_conversation_of_its_own_and_what_it_earned(play):
    episodes, asked, chat = play(Here(), pile(7), ["3", "1", "3"])
    assert [(e.seat, e.sample, e.reward, e.verdict.label) for e in episodes] == [
        (0, 0, 1.0, "won"),
        (1, 1, 0.0, "lost"),
    ]
    first, second = (text(chat, e) for e in episodes)
    assert first.index("7 left") < first.index("3 left")
    assert "4 left" not in first
    assert "4 left" in second
    assert "7 left" not in second
    assert [e.response for e in episodes] == ["3\n3", "1"]
    for episode in episodes:
        own = [r for r in asked if r.sample == episode.sample]
        tokens = episode.trajectory.tokens
        assert all(tuple(tokens[: len(r.prompt)]) == r.prompt for r in own), "a conversation only grows"
        rewards = [r for r, s in zip(episode.trajectory.reward, episode.trajectory.sampled, strict=True) if s]
        assert rewards[-1] == episode.reward
        assert not any(rewards[:-1])


def test_a_seat_that_never_had_a_turn_is_in_no_group_and_no_failure(play):
    episodes, _, _ = play(Here(), pile(9), ["all"])
    assert [(e.seat, e.reward, e.verdict.label) for e in episodes] == [(0, 0.0, "illegal")]


def test_games_of_a_group_are_told_apart_and_groups_are_seats(play):
    # Both begin; the first breaks the rules at once, the second is played to its end.
    episodes, _, _ = play(Here(), pile(5), ["9", "2", "3"], size=2)
    assert [(e.sample, e.seat, e.reward) for e in episodes] == [(0, 0, 0.0), (2, 0, 0.0), (3, 1, 1.0)]
    assert [[e.sample for e in seat] for seat in by_seat(episodes)] == [[0, 2], [3]]
    assert by_seat([]) == [[]]


def test_a_seat_is_told_what_its_own_earned_in_the_greedy_game(tiny):
    """The greedy game ends at its first move, so its second seat has nothing to compare with."""
    chat = Chat(AutoTokenizer.from_pretrained(tiny))
    engine = Says(["2", "9", "3"], chat)
    rollouts: Any = Rollouts(engine, chat, env=Here(), context=500)  # type: ignore[arg-type]
    sampling = Sampling(max_new_tokens=8, top_k=3)
    rollouts.open(GroupRequest(number=0, task=pile(5), size=1, greedy=True, sampling=sampling))
    while not (groups := rollouts.step()):
        pass
    rollouts.close()
    [(_, episodes)] = groups
    assert [(e.sample, e.seat, e.reward) for e in episodes] == [(0, 0, 0.0), (1, 1, 1.0)]
    assert episodes[0].verdict.parts == {"greedy/reward": 0.0, "greedy/tokens": 2.0}
    assert episodes[1].verdict.parts == {}
    drawn = [(r.sample, r.sampling.temperature, r.sampling.top_k) for r in engine.asked]
    assert drawn == [(0, 1.0, 3), (-2, 0.0, 0), (1, 1.0, 3)]


def test_a_game_that_outgrows_the_context_ends_at_both_seats(play):
    episodes, asked, _ = play(Here(), pile(24), ["1"] * 24, context=60)
    assert len(asked) < 24
    assert [(e.seat, e.verdict.label, e.reward) for e in episodes] == [
        (0, "context", 0.0),
        (1, "context", 0.0),
    ]


def test_against_another_player_there_is_one_seat(play):
    episodes, _, _ = play(Here(), pile(7, "perfect"), ["2", "1"])  # 5 left, 4, 3, none
    assert [(e.seat, e.reward, e.verdict.label, e.turns) for e in episodes] == [(0, 0.0, "lost", 2)]
    won, _, _ = play(Here(), pile(3, "perfect"), ["3"])
    assert [(e.reward, e.verdict.label) for e in won] == [(1.0, "won")]


def over(*verdicts: Verdict, **other: Any) -> Turn:
    return Turn(state=0, done=True, verdict=verdicts[0] if len(verdicts) == 1 else verdicts, **other)


WON = Verdict(score=1.0, label="won")


@pytest.mark.parametrize(
    ("turn", "seats", "wrong"),
    [
        (over(WON, WON), 2, ""),
        (over(WON), 1, ""),
        (over(WON), 2, "there are 2 seats and 1 verdicts"),
        (over(WON, WON), 1, "there are 1 seats and 2 verdicts"),
        (over(WON, WON, WON), 2, "there are 2 seats and 3 verdicts"),
        (over(WON, WON, reward=1.0), 2, "no other reward"),
        (over(Verdict(score=None, label="raised")), 2, ""),
        (Turn(state=0, seat=2), 2, "no seat 2 of 2"),
        (Turn(state=0, seat=1), 1, "no seat 1 of 1"),
    ],
)
def test_what_does_not_fit_the_seats_is_named(turn, seats, wrong):
    assert wrong in seat_fault(turn, seats)
    assert bool(seat_fault(turn, seats)) == bool(wrong)


class Bad(Here):
    """Nim with something wrong."""

    def __init__(self, seats: Any = 2, reply: Any = None) -> None:
        super().__init__()
        self.seats, self.said = seats, reply

    def start(self, task: Task) -> Start:
        return Start(state=0, messages=task.messages, seats=self.seats)

    def reply(self, state: Any, response: str) -> Turn:
        return self.said


@pytest.mark.parametrize("seats", [0, 65, "2"])
def test_a_number_of_seats_that_is_none_fails_the_start(seats):
    found = guarded_start(Bad(seats), pile(3))
    assert isinstance(found, Verdict)
    assert found.failed


def test_a_broken_verdict_of_one_seat_fails_the_game(play):
    bad: Any = over(WON, Verdict(score=1.0, label=[]))  # type: ignore[arg-type]
    turn = guarded_reply(Bad(reply=bad), 0, "x")
    assert turn.verdicts[0].failed or turn.verdicts[1].failed
    episodes, _, _ = play(Bad(reply=over(WON)), pile(3), ["x"])
    assert [e.verdict.label for e in episodes] == ["bad_turn"]


def test_a_run_compares_each_seat_with_its_own(run_cli, write, online, able, tmp_path):
    rows = [{"id": f"p{n}", "prompt": "nim", "pile": n, "against": "self"} for n in range(1, 7)]
    (tmp_path / "piles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Any answer is a move here: its length picks how many are taken.
    (tmp_path / "loose.py").write_text(
        f"from posttrain.base.usercode import load_named\n"
        f"Nim, legal = load_named({str(NIM)!r} + ':Nim'), load_named({str(NIM)!r} + ':legal')\n"
        "class Loose(Nim):\n"
        "    def reply(self, game, response):\n"
        "        return super().reply(game, legal(game.pile)[len(set(response)) % len(legal(game.pile))])\n"
        "def make():\n    return Loose()\n"
    )
    over = {
        "model": {"path": str(able)},
        "task": {
            "arithmetic": None,
            "data": {"path": str(tmp_path / "piles.jsonl")},
            "env": {"factory": f"{tmp_path / 'loose.py'}:make"},
        },
        "verifier": None,
        "sampling": {"max_new_tokens": 4, "temperature": 1.5},
        "run": {"updates": 2},
        "eval": {"limit": 0},
    }
    said = run_cli("train", write(online, over), "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 0, said.err
    groups = defaultdict(list)
    for file in sorted((tmp_path / "run" / "samples").glob("0*.jsonl")):
        for row in map(json.loads, file.read_text().splitlines()):
            groups[row["update"], row["group"]].append(row)
    assert {len({row["seat"] for row in group}) for group in groups.values()} == {1}
    assert {row["seat"] for group in groups.values() for row in group} == {0, 1}
    for group in groups.values():
        rewards = [row["score"] for row in group]
        mean = sum(rewards) / len(rewards)
        for row in group:
            advantage = next((a for a in row.get("advantage", []) if a), 0.0)
            assert (advantage > 0) == (row["score"] > mean), "against the mean of its own seat"
    for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()):
        assert 0 <= line["seat/0/reward"] <= 1
        assert 0 <= line["seat/1/reward"] <= 1


@pytest.mark.full
def test_validate_shows_a_game_of_two_seats_and_an_agents_calls(run_cli, write, online, tmp_path):
    (tmp_path / "pass.py").write_text(
        "from posttrain.envs.protocol import Start, Turn\n"
        "class Pass:\n"
        "    def start(self, task):\n"
        "        return Start(state=0, messages=({'role': 'user', 'content': 'first'},), seats=2)\n"
        "    def reply(self, state, response):\n"
        "        told = ({'role': 'user', 'content': f'{1 - state % 2} after {response}'},)\n"
        "        return Turn(state=state + 1, messages=told, seat=1 - state % 2)\n"
        "def make():\n    return Pass()\n"
        "def play(task, base_url):\n"
        "    import json, urllib.request\n"
        "    body = json.dumps({'model': 'policy', 'messages': [{'role': 'user', 'content': 'What now?'}]})\n"
        "    asked = urllib.request.Request(base_url + '/chat/completions', body.encode())\n"
        "    said = json.load(urllib.request.urlopen(asked))['choices'][0]['message']['content']\n"
        "    return float(said == task['answer'])\n"
        "def fails(task, base_url):\n    raise RuntimeError('no keys')\n"
    )
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "a", "answer": "7"}\n')
    data = {"arithmetic": None, "data": {"path": str(tmp_path / "tasks.jsonl")}}
    none = {"verifier": None, "eval": {"limit": 0}}

    def said(**how: Any) -> Any:
        return run_cli("validate", write(online, {"task": data | how, **none}))

    game = said(env={"factory": f"{tmp_path / 'pass.py'}:make"})
    assert game.code == 0, game.err
    shown = " ".join(game.out.split())
    first, second = shown.index("user first<|im_end|>"), shown.index("user 1 after 5<|im_end|>")
    assert first < shown.index("⟦5<|im_end|>⟧") < shown.index("and so on") < second
    assert shown.count("and so on") == 2
    assert shown.count("⟦7<|im_end|>⟧") == 4, (
        "what is known to be right, from the second turn of each seat on"
    )
    agent = said(agent={"function": f"{tmp_path / 'pass.py'}:play"})
    assert agent.code == 0, agent.err
    assert "user What now?<|im_end|> <|im_start|>assistant ⟦7<|im_end|>⟧ scored" in " ".join(
        agent.out.split()
    )
    broken = said(agent={"function": f"{tmp_path / 'pass.py'}:fails"})
    assert (broken.code, broken.out) == (2, "")
    assert "task.agent: an episode fails: raised: RuntimeError: no keys" in broken.err
