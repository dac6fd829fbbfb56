"""samplers: episodes that programs play which know nothing of posttrain, over the wire."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from mathcheck.plugin.number import Number
from posttrain.api.answering import load_policy
from posttrain.base.chat import Chat
from posttrain.base.value_digest import value_digest
from posttrain.engines.native.engine import NativeEngine
from posttrain.envs.agent import Agent, _run
from posttrain.plan.model_info import NO_TASK
from posttrain.recipe.recipe import Model, Recipe
from posttrain.rollout.agents import AgentRunner
from posttrain.rollout.conversations import Conversations
from posttrain.rollout.live_episode import RunningEpisode
from posttrain.serving.speech import Speech
from posttrain.serving.wire import ChatMessage, RefusedError
from posttrain.types import Batch, Completion, Episode, Sampling, Task

PLAYING = Path(__file__).with_name("playing.py")
TASK = Task(id="q", messages=({"role": "user", "content": "2+3="},), answer="5")


def tokens_of(text: str) -> list[int]:
    return list(text.encode())


def drawn(text: str, stop: str = "eos") -> Completion:
    tokens = tokens_of(text)
    zeros = [-0.5] * len(tokens)
    versions = [3] * len(tokens)
    return Completion(
        tokens=tokens, logp_gen=zeros, logp_policy=zeros, version=versions, text=text, stop=stop
    )


# ---------------------------------------------------------------------- conversations, without any engine


class Talker:
    """Conversations that are answered by hand."""

    def __init__(self, tiny: Path) -> None:
        self.chat = Chat(AutoTokenizer.from_pretrained(tiny))
        sampling = Sampling(max_new_tokens=8)
        self.all = Conversations(
            Speech.of(self.chat), lambda tokens: RunningEpisode(TASK, 0, "0:q", sampling, list(tokens))
        )

    def answer(self, *texts: str) -> list[int]:
        """Asks with these messages in turn, user's and assistant's; the tokens that were drawn."""
        roles = ("user", "assistant")
        talk = self.all.ask([ChatMessage(roles[n % 2], text) for n, text in enumerate(texts)], (), 512)
        tokens = [*self.chat.spell(f"a{len(self.drawn)}"), self.chat.end()]
        zeros = [-0.5] * len(tokens)
        done = Completion(
            tokens=tokens,
            logp_gen=zeros,
            logp_policy=zeros,
            version=[3] * len(tokens),
            text=f"a{len(self.drawn)}",
            stop="eos",
        )
        self.drawn.append(tokens)
        talk.answer(done, ChatMessage("assistant", done.text))
        return tokens

    drawn: list[list[int]]


@pytest.fixture
def talker(tiny: Path) -> Talker:
    made = Talker(tiny)
    made.drawn = []
    return made


def test_a_conversation_that_goes_on_is_one_row_of_what_was_sampled(talker: Talker) -> None:
    first = talker.answer("x")
    second = talker.answer("x", "a0", "y")
    [row] = talker.all.rows(1.0)
    prompt = talker.chat.render([{"role": "user", "content": "x"}])
    between = talker.chat.extend(first, [{"role": "user", "content": "y"}])
    assert row.tokens == [*prompt, *first, *between, *second]
    assert row.reward == [*[0.0] * (len(row.tokens) - 1), 1.0]
    assert sum(row.sampled) == len(first) + len(second)


def test_over_all_branches_each_token_that_was_drawn_is_trained_once(talker: Talker) -> None:
    talker.answer("x")
    talker.answer("x", "a0", "y")
    talker.answer("x", "a0", "z")  # behind the same answer
    talker.answer("x", "a0", "z", "a2", "U")  # which goes on
    talker.answer("x", "edited", "y")  # behind what was never said
    talker.answer("w")
    talker.answer("x")  # the same question again
    rows = talker.all.rows(0.25)
    sampled = [t for row in rows for t, own in zip(row.tokens, row.sampled, strict=True) if own]
    assert sorted(sampled) == sorted(t for tokens in talker.drawn for t in tokens)
    assert [row.total_reward for row in rows] == [0.25] * 5
    # The branch holds the answer that it goes on behind, as context.
    text = talker.chat.tokenizer.decode(rows[1].tokens)
    assert [text.count(each) for each in ("a0", "a2", "a3", "y", "U")] == [1, 1, 1, 0, 1]


def test_a_request_that_is_given_up_leaves_nothing(talker: Talker) -> None:
    talker.answer("x")
    talk = talker.all.ask(
        [ChatMessage("user", "x"), ChatMessage("assistant", "a0"), ChatMessage("user", "y")], (), 512
    )
    talk.take_back()
    again = talker.answer("x", "a0", "y")
    [row] = talker.all.rows(0.0)
    assert row.tokens[-len(again) :] == again
    lost = talker.all.ask([ChatMessage("user", "never answered")], (), 512)
    assert lost.is_pending
    assert len(talker.all.rows(0.0)) == 1


def test_a_prompt_beyond_the_context_changes_nothing(talker: Talker) -> None:
    talker.answer("x")
    with pytest.raises(RefusedError, match="the model reads 20"):
        talker.all.ask(
            [ChatMessage("user", "x"), ChatMessage("assistant", "a0"), ChatMessage("user", "y" * 40)], (), 20
        )
    talker.answer("x", "a0", "y")
    assert len(talker.all.rows(0.0)) == 1


# ---------------------------------------------------------------------- episodes, over the wire


@contextmanager
def play_of(path: Path, agent: str | Agent, **options: Any) -> Iterator[AgentRunner]:
    model = Model(path=str(path), dtype="float32", device="cpu")
    recipe = Recipe(model=model, method={"name": "grpo"}, task=NO_TASK)
    policy, engine = load_policy(recipe, None, lambda text: None)
    made = agent if isinstance(agent, Agent) else named(agent)
    play = AgentRunner(engine, policy.chat, made, **{"verifier": Number(), "context": 200, **options})
    try:
        yield play
    finally:
        play.close()


def named(name: str, **others: Any) -> Agent:
    return Agent(function=f"{PLAYING}:{name}", **{"at_once": 2, "deadline_s": 60.0, **others})


def played(path: Path, agent: str | Agent, size: int = 2, **options: Any) -> list[Episode]:
    with play_of(path, agent, **options) as play:
        return run_by(play, TASK, size)


def run_by(play: AgentRunner, task: Task, size: int) -> list[Episode]:
    [group] = play.run([task], size, Sampling(max_new_tokens=6, temperature=1.3))
    return group


@pytest.fixture(scope="module")
def judged(able: Path) -> Iterator[Callable[[str], list[Episode]]]:
    """Two episodes of the agent of this name, which a verifier judges."""
    with play_of(able, "any_of_these") as play:
        yield lambda name: run_by(play, replace(TASK, fields={"agent": name}), 2)


@pytest.fixture(scope="module")
def scored(able: Path) -> Iterator[Callable[..., list[Episode]]]:
    """Episodes of the agent of this name, which says for itself what they are worth."""
    with play_of(able, "any_of_these", verifier=None) as play:
        yield lambda name, size=2: run_by(play, replace(TASK, fields={"agent": name}), size)


def test_an_answer_is_the_row_and_what_it_returns_the_reward(able: Path, judged: Any) -> None:
    for name in ("plain_sums", "spoken", "streaming"):
        group = judged(name)
        for episode in group:
            [row] = episode.trajectories
            assert row.tokens[: row.prompt_length] == Chat(AutoTokenizer.from_pretrained(able)).render(
                TASK.messages
            )
            assert not episode.verdict.failed
            assert episode.reward == row.reward[-1]
            if name != "plain_sums":
                assert episode.verdict.label in ("right", "wrong", "no_answer")
            else:
                assert episode.reward == float("5" in episode.response)


def test_draws_hang_on_the_prompt_and_not_on_the_clock(able: Path) -> None:
    """By one agent at a time or by three, the same answers."""
    said = [
        [e.response for e in played(able, named("three_turns", at_once=n), 3, verifier=None)] for n in (1, 3)
    ]
    assert said[0] == said[1]
    assert len(set(said[0])) > 1


def test_turns_are_one_row_and_a_reward_is_posted_once(scored: Any) -> None:
    for episode in scored("three_turns"):
        [row] = episode.trajectories
        assert (episode.turns, episode.reward, episode.verdict.label) == (3, 0.5, "scored")
        assert row.reward[-1] == 0.5
        assert episode.verdict.parts["agent/calls"] == 3


def test_branches_are_rows_of_one_episode(scored: Any) -> None:
    for episode in scored("branches"):
        assert len(episode.trajectories) == 4
        assert {row.total_reward for row in episode.trajectories} == {1.0}
        assert episode.turns == 5
        assert episode.length == sum(sum(row.sampled) for row in episode.trajectories)


def test_the_state_of_a_turn_is_the_conversation_so_far(able: Path) -> None:
    one, other = played(able, "branches", keyed=True, verifier=None)
    for episode in (one, other):
        for row in episode.trajectories:
            starts = [t for t, own in enumerate(row.sampled) if own and not row.sampled[t - 1]]
            keys = [value_digest(np.asarray(row.tokens[:t], np.int32).tobytes()) for t in starts]
            assert row.turn_state == dict(zip(starts, keys, strict=True))
    first, again = ([*e.trajectory.turn_state.values()] for e in (one, other))
    assert first[0] == again[0], "both begin with the question"
    assert sum(len(row.turn_state) for row in one.trajectories) == one.turns == 5


@pytest.mark.parametrize(
    ("agent", "label", "why"),
    [
        ("raising", "raised", "KeyError: 'unit'"),
        (named("sleeping", deadline_s=2.0), "timeout", "within 2 s"),
        ("dying", "died", "3"),
        ("silent", "no_call", "asked the model nothing"),
        ("strange", "raised", "returned dict"),
        (named("endless", max_calls=3), "truncated", "3 calls"),
    ],
)
def test_what_an_agent_does_wrong_ends_its_episode_alone(
    able: Path, scored: Any, agent: Any, label: str, why: str
) -> None:
    group = scored(agent) if isinstance(agent, str) else played(able, agent, verifier=None)
    for episode in group:
        assert (episode.verdict.label, why in episode.verdict.reason) == (label, True), episode.verdict
        assert episode.verdict.failed == (label != "truncated")
        assert episode.reward == 0.0


def test_what_outgrows_the_context_is_judged_as_far_as_it_came(judged: Any) -> None:
    for episode in judged("too_long"):
        assert episode.stop == "context"
        assert episode.verdict.label in ("right", "wrong", "no_answer")
        assert episode.verdict.parts["agent/truncated"] == 1.0
        # The refused request was made once, and is none of the calls.
        assert episode.verdict.parts["agent/calls"] == episode.turns >= 2


def test_foreign_keys_and_wrong_bodies_are_refused(scored: Any) -> None:
    assert [e.reward for e in scored("foreign")] == [1.0, 1.0]


def test_a_client_that_tries_again_is_told_the_same(scored: Any) -> None:
    for episode in scored("twice", 3):
        assert episode.verdict.label == "scored"
        assert len(episode.trajectories) == 2
        assert episode.verdict.parts["agent/tried_again"] == 1.0


def always_says(text: str, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    poll = NativeEngine.poll

    def saying(self: NativeEngine, timeout_s: float = 0.0) -> list[tuple[int, Completion]]:
        done = []
        for ticket, answer in poll(self, timeout_s):
            tokens = [*chat.spell(text), chat.end()]
            columns: dict[str, Any] = {n: [-0.1] * len(tokens) for n in ("logp_gen", "logp_policy")}
            done.append(
                (
                    ticket,
                    Completion(
                        tokens=tokens, version=[0] * len(tokens), text=text, stop=answer.stop, **columns
                    ),
                )
            )
        return done

    monkeypatch.setattr(NativeEngine, "poll", saying)


def test_a_stop_string_is_not_told_and_the_conversation_goes_on(
    able: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Chat(AutoTokenizer.from_pretrained(able))
    always_says("5+7", chat, monkeypatch)
    for episode in played(able, "stopped"):
        assert (episode.verdict.label, episode.turns) == ("right", 2), episode.verdict
        [row] = episode.trajectories
        assert chat.tokenizer.decode(row.tokens).count("5+7") == 2


def test_calls_of_tools_go_there_and_back(able: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that calls: the client is told the call, and its result goes on in the same row."""
    text = '<call add>{"a": 3}</call>'
    chat = Chat(AutoTokenizer.from_pretrained(able))
    always_says(text, chat, monkeypatch)
    for episode in played(able, "tools", verifier=None, context=400):
        assert episode.reward == 2.0
        [row] = episode.trajectories
        whole = chat.tokenizer.decode(row.tokens)
        assert whole.count(text) == 2
        assert "You can call tools" in whole
        assert "7" in whole.split(text)[1]


def test_a_program_is_told_its_task_and_where_to_ask(able: Path) -> None:
    code = (
        "import json, os, sys, urllib.request as u\n"
        "task = json.load(sys.stdin)\n"
        "url = os.environ['OPENAI_BASE_URL']\n"
        "def post(path, body):\n"
        "    u.urlopen(u.Request(url + path, json.dumps(body).encode()))\n"
        "post('/chat/completions', {'messages': task['messages']})\n"
        "post('/reward', {'score': len(task['answer'])})\n"
    )
    program = Agent(command=(sys.executable, "-c", code), at_once=2)
    assert [e.reward for e in played(able, program, verifier=None)] == [1.0, 1.0]
    failing = Agent(command=(sys.executable, "-c", "raise SystemExit('no luck')"), at_once=2)
    for episode in played(able, failing):
        assert (episode.verdict.label, "no luck" in episode.verdict.reason) == ("raised", True)


def test_of_what_a_program_writes_the_end_is_kept_and_nothing_on_the_disk(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))  # where nothing can be written
    code = "import sys; sys.stderr.write('x\\n' * 5_000_000); raise SystemExit('no luck')"
    with pytest.raises(RuntimeError, match="exit status 1: no luck"):
        _run((sys.executable, "-c", code), "{}", {})
    behind = "import subprocess; subprocess.Popen(['sleep', '5']); raise SystemExit('no luck')"
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="no luck"):
        _run((sys.executable, "-c", behind), "{}", {})
    assert time.monotonic() - begin < 4


# ---------------------------------------------------------------------- learning


def test_an_episode_counts_once_in_the_credit_of_its_group() -> None:
    from posttrain.methods.build import build
    from posttrain.types import Trajectory

    def row(reward: float) -> Trajectory:
        columns: dict[str, Any] = {"logp_gen": [0.0, -1.0], "logp_policy": [0.0, -1.0], "version": [0, 0]}
        return Trajectory(tokens=[1, 2], sampled=[False, True], reward=[0.0, reward], **columns)

    method = build("rloo", {}, horizon=2, potentials=False)
    rows, episodes = [row(1.0), row(1.0), row(1.0), row(0.0), row(0.0)], [0, 0, 0, 1, 2]
    advantage = method.prepare(Batch.of(rows, [0] * 5, episodes)).advantage
    assert advantage is not None
    # Without its branches: 1 - mean(0, 0), and 0 - mean(1, 0).
    assert advantage[:, 1].tolist() == pytest.approx([1.0, 1.0, 1.0, -0.5, -0.5])


def recipe_of(online: dict[str, Any], tmp_path: Path, write: Any, over: dict[str, Any]) -> Path:
    data = tmp_path / "sums.jsonl"
    sums = [(a, b) for a in range(2, 6) for b in range(2, 4)]
    data.write_text(
        "".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in sums)
    )
    table = {
        "task": {
            "arithmetic": None,
            "data": {"path": str(data)},
            "agent": {"function": f"{PLAYING}:sums", "at_once": 2},
        },
        "verifier": None,
        "run": {"updates": 2},
    }
    for key, value in over.items():
        table[key] = {**table.get(key, {}), **value} if isinstance(value, dict) else value
    return Path(write(online, table))


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("ahead", [{}, {"max_lag": 2, "samplers": 1, "place": "process"}])
@pytest.mark.sample(every=2)
def test_a_run_trains_an_agent_that_is_written_with_the_clients_package_alone(
    run_cli: Callable[..., Any], write: Any, online: Any, able: Path, tmp_path: Path, ahead: dict[str, Any]
) -> None:
    over: dict[str, Any] = {"model": {"path": str(able)}}
    if ahead:
        over |= {"async": ahead, "method": {"correction": "token_truncated"}}
        over["task"] = {"agent": {"function": f"{PLAYING}:plain_sums", "at_once": 2}}
    recipe = recipe_of(online, tmp_path, write, over)
    loaded = "openai" in sys.modules
    said = run_cli("train", recipe, "--run-dir", tmp_path / "run")
    assert said.code == 0, said.err
    lines = metrics(tmp_path / "run")
    assert [line["agent/calls"] for line in lines if "agent/calls" in line] == [1.0, 1.0]
    assert ("openai" in sys.modules) == loaded  # it is the worker processes' alone


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        ({"function": "nowhere.py:f"}, "nowhere.py"),
        ({"function": f"{PLAYING}:user"}, "is called with (task, base_url)"),
        ({"function": None, "command": ["no-such-program"]}, "there is no program 'no-such-program'"),
        ({"command": ["true"]}, "give either function or command"),
        ({"at_once": 0}, "must be 1 or more"),
    ],
)
def test_mistakes_are_one_line(
    run_cli: Any, write: Any, online: Any, tiny: Path, tmp_path: Path, agent: dict[str, Any], why: str
) -> None:
    table = {"data": {"path": str(tmp_path / "sums.jsonl")}, "arithmetic": None}
    recipe = recipe_of(online, tmp_path, write, {})
    text = recipe.read_text()
    made = {"function": f"{PLAYING}:sums", "at_once": 2, **agent}
    import tomllib

    from posttrain.base.toml import dump

    tables = tomllib.loads(text)
    tables["task"] = {k: v for k, v in {**tables["task"], **table}.items() if v is not None}
    tables["task"]["agent"] = {k: v for k, v in made.items() if v is not None}
    recipe.write_text(dump(tables))
    said = run_cli("validate", recipe)
    assert said.code == 2
    assert why in said.err
    assert "Traceback" not in said.err
