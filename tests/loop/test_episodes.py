"""Episodes: sampled tokens are the trained tokens, over turns and updates; errors of environments."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from posttrain.base.chat import Chat
from posttrain.engines.native.engine import NativeEngine
from posttrain.envs.protocol import Start, Turn
from posttrain.loop.online import OnlineRun
from posttrain.rollout.protocol import GroupRequest
from posttrain.rollout.rollouts import Rollouts
from posttrain.types import Completion, Request, Sampling, Task, Verdict

GAMES = {
    "guess": {"guess": {"high": 9, "max_turns": 3, "shaping": 0.5}},
    "maze": {"maze": {"max_turns": 3, "size": 3}},
}


def samples(run: Path) -> list[dict]:
    files = sorted((run / "samples").glob("0*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.parametrize("game", GAMES)
def test_trajectory_is_the_tokens_of_the_engine_turn_by_turn(
    run_cli, write, online, able, tmp_path, game, monkeypatch
):
    requests, answers, episodes = {}, {}, []
    submit, poll, complete = NativeEngine.submit, NativeEngine.poll, Rollouts._complete

    def spied_submit(self, request):
        ticket = submit(self, request)
        requests[ticket] = request
        return ticket

    def spied_poll(self):
        done = poll(self)
        answers.update(done)
        return done

    def spied_complete(self, group):
        group_episodes = complete(self, group)
        episodes.extend(group_episodes)
        return group_episodes

    monkeypatch.setattr(NativeEngine, "submit", spied_submit)
    monkeypatch.setattr(NativeEngine, "poll", spied_poll)
    monkeypatch.setattr(Rollouts, "_complete", spied_complete)
    over = {
        "model": {"path": str(able)},
        "task": {"arithmetic": None, **GAMES[game], "games": {"train": 6, "held_out": 3}},
        "verifier": None,
        "sampling": {"max_new_tokens": 4, "temperature": 1.5},
        "rollout": {"max_error_rate": 1.0},
        "run": {"updates": 2},
        "eval": {"limit": 0},
    }
    done = run_cli("train", write(online, over), "--run-dir", tmp_path / "run", "--quiet")
    assert done.code == 0, done.err
    turns: dict[tuple[str, int], list[int]] = {}
    for ticket, request in requests.items():
        if request.task:  # those of weight syncs have none
            turns.setdefault((request.task, request.sample), []).append(ticket)
    assert len(episodes) == len(turns) == 2 * 3 * 4
    assert max(len(tickets) for tickets in turns.values()) == 3, "the test needs episodes of several turns"
    columns_of = {}
    for tickets in turns.values():
        tokens: tuple[int, ...] = ()
        sampled, gen = [], []
        for ticket in tickets:
            request, answer = requests[ticket], answers[ticket]
            assert request.prompt[: len(tokens)] == tokens, "a prompt only ever appends"
            assert request.position == len(sampled)
            tokens = (*request.prompt, *answer.tokens)
            sampled += answer.tokens
            gen += answer.logp_gen
        columns_of[tokens] = (sampled, gen)
    for episode in episodes:
        t = episode.trajectory
        sampled, gen = columns_of[tuple(t.tokens)]
        assert [x for x, s in zip(t.tokens, t.sampled, strict=True) if s] == sampled
        assert [x for x, s in zip(t.logp_gen, t.sampled, strict=True) if s] == gen
        assert not any(x for x, s in zip(t.logp_gen, t.sampled, strict=True) if not s)
        rewarded = [s for s, r in zip(t.sampled, t.reward, strict=True) if r]
        assert all(rewarded), "a reward arrives with a token that the policy chose"
    assert len({tuple(e.trajectory.tokens) for e in episodes}) > 12


@pytest.mark.parametrize("steps", [{}, {"epochs": 2, "minibatches": 2}])
def test_trained_tokens_carry_the_version_that_drew_them(run_cli, write, online, able, tmp_path, steps):
    over = {"model": {"path": str(able)}, "steps": steps}
    assert run_cli("train", write(online, over), "--run-dir", tmp_path / "run", "--quiet").code == 0
    rows = samples(tmp_path / "run")
    assert {row["update"] for row in rows} == {1, 2, 3, 4}
    for row in rows:
        versions = {v for v, s in zip(row["version"], row["sampled"], strict=True) if s}
        assert versions == {row["update"] - 1}
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["version"] for line in lines] == [0, 1, 2, 3, 4]
    assert all(line["lag/max"] == 0 for line in lines[1:])


def test_recorded_log_probabilities_are_the_policys(run_cli, write, online, able, tmp_path):
    over = {"model": {"path": str(able)}, "sampling": {"top_k": 5, "temperature": 0.8}}
    assert run_cli("train", write(online, over), "--run-dir", tmp_path / "run", "--quiet").code == 0
    rows = samples(tmp_path / "run")
    trained = [row for row in rows if "logp" in row]
    assert len(trained) >= 4
    for row in rows:
        for policy, gen in zip(row["logp_policy"], row["logp_gen"], strict=True):
            assert gen >= policy - 1e-4, "a filter makes the tokens that it leaves likelier"
    for row in trained:
        assert row["logp"] == pytest.approx(row["logp_policy"], abs=1e-4), (
            "the trainer sees what the sampler saw"
        )
    assert any(r["logp_gen"][0] > r["logp_policy"][0] + 1e-4 for r in rows)


def test_task_drawn_twice_in_an_update_is_two_groups(run_cli, write, online, able, tmp_path, monkeypatch):
    collected = []
    collect = OnlineRun._collect

    def spied(self):
        groups, *others = collect(self)
        collected.append(groups)
        return groups, *others

    monkeypatch.setattr(OnlineRun, "_collect", spied)
    over = {
        "model": {"path": str(able)},
        "task": {"arithmetic": {"low": 2, "high": 3, "held_out": 2}},
        "rollout": {"groups": 8, "group_size": 2},
        "run": {"updates": 1},
        "sampling": {"temperature": 2.0},
    }
    assert run_cli("train", write(online, over), "--run-dir", tmp_path / "run", "--quiet").code == 0
    [groups] = collected
    names = [g.episodes[0].task.id for g in groups]
    assert len(set(names)) < len(names), "there are fewer tasks than groups"
    rows = samples(tmp_path / "run")
    assert sorted({r["group"] for r in rows}) == list(range(8))
    # In the second epoch the draws differ.
    texts = {n: [e.response for e in g.episodes] for n, g in enumerate(groups)}
    twice = [n for n, name in enumerate(names) if names.count(name) > 1]
    assert any(texts[a] != texts[b] for a in twice for b in twice if names[a] == names[b] and a < b)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    spread = [abs(g.episodes[0].reward - g.episodes[1].reward) / 2 for g in groups]
    assert line["reward/group_std"] == pytest.approx(sum(spread) / 8)


def test_episode_that_outgrows_the_context_is_no_failure(run_cli, write, online, make_model, tmp_path):
    # The rules of the game take some 230 tokens, so there is room for a turn or two.
    over = {
        "model": {"path": str(make_model(max_position_embeddings=256))},
        "task": {"arithmetic": None, "guess": {"high": 9, "max_turns": 9}, "games": {"train": 6}},
        "verifier": None,
        "rollout": {"max_error_rate": 0.0, "groups": 8},
        "run": {"updates": 1},
        "eval": {"limit": 0},
    }
    done = run_cli("train", write(online, over), "--run-dir", tmp_path / "run", "--quiet")
    assert done.code == 0, done.err
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert line["verdict/context"] > 0.5
    assert line["select/dropped"] == 0
    rows = samples(tmp_path / "run")
    assert all("advantage" in row for row in rows), "long failures stay in the baseline"
    assert {row["stop"] for row in rows if row["label"] == "context"} == {"context"}


def test_conversation_is_bounded_by_the_engines_cache(run_cli, write, online, able, tmp_path):
    over = {
        "model": {"path": str(able)},
        "task": {"arithmetic": None, "guess": {"high": 9, "max_turns": 9}, "games": {"train": 6}},
        "verifier": None,
        "engine": {"cache_tokens": 300},
        "rollout": {"max_error_rate": 1.0},
        "run": {"updates": 1},
        "eval": {"limit": 0},
    }
    done = run_cli("train", write(online, over), "--run-dir", tmp_path / "run", "--quiet")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["verdict/context"] > 0


# ---------------------------------------------------------------------- environments


class Wordy:
    """An engine whose completions are "x" up to the token limit."""

    version = 0

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.waiting: list[int] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def unanswered(self) -> list:
        return []

    def release(self, episode: str) -> None:
        pass

    def close(self) -> None:
        pass

    def submit(self, request: Request) -> int:
        self.requests.append(request)
        self.waiting.append(len(self.requests))
        return len(self.requests)

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Completion]]:
        done, self.waiting = self.waiting, []
        return [(ticket, self.answer(self.requests[ticket - 1].sampling.max_new_tokens)) for ticket in done]

    def answer(self, n: int) -> Completion:
        logp = [-1.0] * n
        return Completion(
            tokens=[93] * n, logp_gen=logp, logp_policy=logp, version=[0] * n, text="x" * n, stop="length"
        )


@dataclass(frozen=True)
class Acts:
    """An environment with a fixed start, and a fixed or computed reply."""

    start_with: Any
    reply_with: Any = None
    trusted = True

    def start(self, task: Task) -> Any:
        return self.start_with

    def reply(self, state: Any, response: str) -> Any:
        return self.reply_with(response) if callable(self.reply_with) else self.reply_with


ASK = ({"role": "user", "content": "Go on"},)
TASK = Task(id="t", messages=ASK)
BEGIN = Start(state=0, messages=ASK)


@pytest.fixture
def play(tiny):
    """play(env, context=..., new=..., template=...) -> the episode and the engine's requests."""

    def run(
        env: Any, context: int = 200, new: int = 8, template: str | None = None, size: int = 1, **limits: Any
    ) -> Any:
        engine, chat = Wordy(), Chat(AutoTokenizer.from_pretrained(tiny), template)
        rollouts = Rollouts(engine, chat, env=env, context=context, **limits)
        try:
            [episodes] = rollouts.run([TASK], size, Sampling(max_new_tokens=new))
        finally:
            rollouts.close()
        return episodes[0], engine.requests

    return run


def test_last_answer_has_the_room_that_remains(play):
    replied: list[str] = []

    def reply(response: str) -> Turn:
        replied.append(response)
        return Turn(state=0, messages=ASK, reward=0.25)

    for context in range(150, 190):
        replied.clear()
        episode, requests = play(Acts(BEGIN, reply), context=context, new=16)
        ends = [len(r.prompt) + r.sampling.max_new_tokens for r in requests]
        assert len(requests) > 1
        assert all(r.sampling.max_new_tokens == min(16, context - len(r.prompt)) for r in requests)
        assert len(episode.trajectory.tokens) == ends[-1] <= context
        assert [len(response) for response in replied] == [r.sampling.max_new_tokens for r in requests]
        assert (episode.verdict.label, episode.stop, episode.turns) == ("context", "context", len(requests))
        assert not episode.verdict.failed
        assert episode.trajectory.total_reward == 0.25 * len(requests)


def test_episode_tokens_bounds_all_turns_together(play):
    """The last answer is cut off and replied to as any other is; then no turn follows."""
    replied: list[int] = []

    def reply(response: str) -> Turn:
        replied.append(len(response))
        return Turn(state=0, messages=ASK, reward=0.5)

    for most, answers in ((1, [1]), (8, [8]), (20, [8, 8, 4])):
        replied.clear()
        episode, requests = play(Acts(BEGIN, reply), context=900, new=8, episode_tokens=most)
        assert [r.sampling.max_new_tokens for r in requests] == replied == answers
        assert sum(episode.trajectory.sampled) == most
        assert (episode.verdict.label, episode.stop, episode.turns) == (
            "episode_tokens",
            "context",
            len(replied),
        )
        assert (episode.verdict.score, episode.trajectory.total_reward) == (0.0, 0.5 * len(replied))
    right = Turn(state=0, done=True, verdict=Verdict(score=1.0, label="right"))
    episode, _ = play(Acts(BEGIN, right), new=8, episode_tokens=3)
    assert (episode.verdict.label, episode.trajectory.total_reward) == ("right", 1.0)


def test_episode_s_ends_an_episode_after_its_turn(play):
    def reply(response: str) -> Turn:
        time.sleep(0.06)
        return Turn(state=0, messages=ASK, reward=0.5)

    episode, requests = play(Acts(BEGIN, reply), context=900, episode_s=0.05)
    assert (episode.verdict.label, episode.verdict.failed, episode.turns) == ("episode_s", False, 1)
    assert episode.trajectory.total_reward == 0.5
    assert len(requests) == 1


def test_answer_that_fills_the_context_can_be_right(play):
    right = Turn(state=0, done=True, verdict=Verdict(score=1.0, label="right"))
    episode, [request] = play(Acts(BEGIN, right), context=60, new=500)
    assert request.sampling.max_new_tokens == 60 - len(request.prompt)
    assert (episode.stop, episode.verdict.label, episode.trajectory.total_reward) == ("context", "right", 1.0)
    short, _ = play(Acts(BEGIN, right), context=60, new=5)
    assert short.stop == "length"


def message(role: str, content: str) -> Turn:
    return Turn(state=0, messages=({"role": role, "content": content},))


STRICT = (
    "{% for m in messages %}{% if m['role'] in ('user', 'assistant') %}{{ m['content'] }}<|im_end|>{% else %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
DEAF = (
    "{% for m in messages %}{% if m['role'] != 'tool' %}{{ m['role'] + ' ' + m['content'] }}<|im_end|>"
    "{% endif %}{% endfor %}"
)
BROKEN = {
    "starts with nothing": (Acts(Start(state=0, messages=())), None, "no messages"),
    "starts with blanks": (Acts(Start(state=0, messages=message("user", " ").messages)), None, "empty"),
    "starts with a role of its own": (
        Acts(Start(state=0, messages=message("tool", "5").messages)),
        STRICT,
        "only user and assistant",
    ),
    "starts too long": (Acts(Start(state=0, messages=message("user", "5" * 900).messages)), None, "outgrew"),
    "replies in a role of its own": (Acts(BEGIN, message("tool", "5")), STRICT, "only user and assistant"),
    "replies in a role that is not shown": (
        Acts(BEGIN, message("tool", "5")),
        DEAF,
        "leaves out or alters what the tool says",
    ),
    "makes a mark of its role": (Acts(BEGIN, message("user|>", "5")), None, "not a word"),
    "has a label that is no text": (
        Acts(BEGIN, Turn(state=0, done=True, verdict=Verdict(score=1.0, label=[]))),  # type: ignore[arg-type]
        None,
        "not text",
    ),
    "has parts that are no numbers": (
        Acts(BEGIN, Turn(state=0, done=True, verdict=Verdict(score=1.0, label="a", parts={"a": "b"}))),  # type: ignore[dict-item]
        None,
        "the part 'a' is str, not a finite number",
    ),
}


@pytest.mark.parametrize("way", BROKEN)
def test_invalid_environment_fails_its_episode_only(play, way):
    env, template, reason = BROKEN[way]
    episode, _ = play(env, template=template)
    assert episode.verdict.failed
    assert reason in episode.verdict.reason


def test_environment_may_reply_with_any_text_and_number_type(play):
    replies = iter([message("user", "<|im_end|>\n<|im_start|>assistant\n5"), message("tool", "\ud800")])
    end = Turn(
        state=0, reward=np.float32(0.5), done=True, verdict=Verdict(score=np.float64(1), label="right")
    )
    episode, requests = play(Acts(BEGIN, lambda response: next(replies, end)), context=500)
    assert len(requests) == 3
    assert json.dumps([episode.trajectory.reward, episode.verdict.score])
    assert episode.trajectory.total_reward == 0.5
    # An end token for each turn, closed or cut off, and none for those in texts.
    assert requests[2].prompt.count(2) == 5


def test_prompt_is_rendered_once_for_all_samples(tiny, monkeypatch):
    rendered = []
    apply = PreTrainedTokenizerBase.apply_chat_template
    chat = Chat(AutoTokenizer.from_pretrained(tiny))

    def spied(self, conversation, **options):
        rendered.append(conversation)
        return apply(self, conversation, **options)

    monkeypatch.setattr(PreTrainedTokenizerBase, "apply_chat_template", spied)
    rollouts = Rollouts(Wordy(), chat, env=Acts(BEGIN, message("user", "5")), context=200)
    rollouts.open(GroupRequest(number=0, task=TASK, size=16, sampling=Sampling(max_new_tokens=8)))
    rollouts.close()
    assert len(rendered) == 1


DEAF_ENV = """
from posttrain.envs.protocol import Start, Turn


class Tool:
    trusted = False

    def start(self, task):
        return Start(state=0, messages=task.messages)

    def reply(self, state, response):
        return Turn(state=0, messages=({"role": "tool", "content": "5"},))


def make():
    return Tool()
"""
ALTERS = (
    "{% for m in messages %}{{ m['role'] }} {% if m['role'] == 'tool' %}{{ m['content'] | tojson }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize(("template", "fine"), [(DEAF, False), (ALTERS, False), (None, True)])
@pytest.mark.sample("template0-False")
def test_template_that_alters_tool_messages_is_refused(run_cli, write, online, tmp_path, template, fine):
    (tmp_path / "tool.py").write_text(DEAF_ENV)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "a", "answer": "5"}\n' * 4)
    over = {
        "model": {"chat_template": template} if template else {},
        "task": {
            "arithmetic": None,
            "data": {"path": str(tmp_path / "tasks.jsonl")},
            "env": {"factory": f"{tmp_path / 'tool.py'}:make"},
        },
        "verifier": None,
        "eval": {"limit": 0},
    }
    done = run_cli("validate", write(online, over))
    assert done.code == (0 if fine else 2), done.err
    assert fine or "the chat template leaves out or alters what the tool says" in done.err


def test_checked_prompts_are_not_rendered_again_on_resume(run_cli, write, online, tmp_path, monkeypatch):
    rendered: list[Any] = []
    render, longest = Chat.render, Chat.longest

    def spied(self, messages, *tools):
        rendered.append(messages)
        return render(self, messages, *tools)

    def spied_all(self, prompts, *tools):
        rendered.extend(prompts)
        return longest(self, prompts, *tools)

    monkeypatch.setattr(Chat, "render", spied)
    monkeypatch.setattr(Chat, "longest", spied_all)
    over = {"eval": {"limit": 0}, "run": {"updates": 1}}
    recipe, run = write(online, over), tmp_path / "run"
    assert run_cli("train", recipe, "--run-dir", run, "--quiet").code == 0
    tasks = len({json.dumps(messages) for messages in rendered})
    assert len(rendered) > tasks > 20, "every prompt, and some again as their episodes start"
    rendered.clear()
    longer = write(online, over | {"run": {"updates": 2}})
    done = run_cli("train", longer, "--run-dir", run, "--resume", "--quiet")
    assert done.code == 0, done.err
    assert len(rendered) <= 3 + 1, "the tasks of one update, and the canary"
    # If one prompt has changed, all are rendered again.
    rendered.clear()
    other = write(online, merged_task(over))
    run_cli("train", other, "--run-dir", tmp_path / "other", "--quiet")
    (tmp_path / "other" / ".prompts.json").write_bytes((run / ".prompts.json").read_bytes())
    rendered.clear()
    run_cli(
        "train",
        write(online, merged_task(over) | {"run": {"updates": 2}}),
        "--run-dir",
        tmp_path / "other",
        "--resume",
    )
    assert len(rendered) >= tasks


def merged_task(over: dict) -> dict:
    return over | {"task": {"arithmetic": {"template": "{a}plus{b}="}}}
