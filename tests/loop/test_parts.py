"""Parts of the loops: the stream, selection, replay, errors, the journal, the plan and the run directory."""

import fcntl
import json
import math
import os
import random
import signal
import tracemalloc
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from posttrain.curriculum.replay_buffer import ReplayBuffer
from posttrain.curriculum.select import SELECTIONS, WHY_NOT, accepted, every, selection, varied
from posttrain.curriculum.stream import Stream
from posttrain.learner.learner import Learner
from posttrain.learner.lora import Lora, parameters
from posttrain.loop import saving
from posttrain.math import tokens
from posttrain.methods.build import build
from posttrain.models.attention import use_layouts
from posttrain.models.pretrained import load_model, parameter_count, skeleton
from posttrain.models.tensor_files import read_tensors, write_tensors
from posttrain.plan.memory import (
    MOST_ELSEWHERE,
    MOST_MICROBATCH,
    Shape,
    activation_bytes,
    estimate,
    free_memory,
    mask_bytes,
    microbatch,
)
from posttrain.recipe.recipe import Checkpoints
from posttrain.recipe.settings import SELECT, Evaluation
from posttrain.run.error_rate import WINDOW, ErrorRate
from posttrain.run.journal import Journal, Progress, stop_requested
from posttrain.run.metrics import evaluation_metrics, is_right, rollout_metrics
from posttrain.run.rundir import RunDir
from posttrain.types import Batch, Episode, RunError, Task, Trajectory, UserError, Verdict
from posttrain_envs.guess import Guess, guess_tasks

from ..conftest import tiny_tokenizer


def paid(rewards: list[float]) -> Episode:
    """An episode that was paid in parts, one with each of its tokens."""
    made = episode(0.0, tokens=len(rewards))
    return replace(made, trajectory=replace(made.trajectory, reward=[0.0, *rewards]))


def episode(
    score: float | None, *, label: str = "", task: str = "t", tokens: int = 2, stop: str = "eos"
) -> Episode:
    reward = [0.0] * tokens + [score or 0.0]
    trajectory = Trajectory(
        tokens=[1] * (tokens + 1),
        sampled=[False] + [True] * tokens,
        logp_gen=[0.0] * (tokens + 1),
        logp_policy=[0.0] * (tokens + 1),
        version=[0] + [3] * tokens,
        reward=reward,
    )
    verdict = Verdict(score=score, label=label or ("raised" if score is None else "scored"), reason="because")
    asked = Task(id=task, messages=())
    return Episode(task=asked, sample=0, trajectory=trajectory, verdict=verdict, response="x", stop=stop)


# ---------------------------------------------------------------- stream


@given(n=st.integers(1, 40), seed=st.integers(0, 2**63), start=st.integers(0, 200))
def test_every_item_comes_once_an_epoch_and_the_count_is_the_whole_state(n, seed, start):
    stream = Stream(range(n), seed=seed)
    taken = [stream.take() for _ in range(3 * n)]
    for epoch in range(3):
        part = taken[epoch * n : (epoch + 1) * n]
        assert {e for e, _ in part} == {epoch}
        assert sorted(item for _, item in part) == list(range(n))
    resumed, whole = Stream(range(n), seed=seed), Stream(range(n), seed=seed)
    resumed.taken = start
    for _ in range(start):
        whole.take()
    assert [resumed.take() for _ in range(n)] == [whole.take() for _ in range(n)]


def test_orders_differ_between_epochs_and_seeds():
    def order(seed: int, epoch: int) -> list[int]:
        stream = Stream(range(30), seed=seed)
        stream.taken = 30 * epoch
        return [stream.take()[1] for _ in range(30)]

    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_nothing_cannot_be_taken_from():
    with pytest.raises(ValueError, match="nothing to take"):
        Stream([], seed=0)


# ---------------------------------------------------------------- selection and errors


def test_selection():
    failed = episode(None)
    assert set(SELECT) == set(WHY_NOT) == {"all", "varied", "accepted"}
    assert every([failed, episode(0.0)])
    assert not every([failed, failed])
    assert varied([episode(0.0), episode(1.0)])
    assert not varied([episode(1.0), episode(1.0)])
    assert not varied([episode(0.5), failed]), "a failure is no reward of 0"
    assert not varied([failed, failed])
    assert accepted([failed, episode(0.0), paid([0.1] * 10)]), "whose sum in floats is 0.9999999999999999"
    assert accepted([paid([0.7])], least=0.7), "which float32 rounds down"
    assert not accepted([failed, episode(0.9)])
    few, failing = [episode(0.0), episode(0.5)], [failed]
    assert [selection("accepted", least)(few) for least in (0.5, 0.6)] == [True, False]
    assert not selection("accepted", -1.0)(failing), "a failure is no answer"
    assert all(selection(name, 9.0) is SELECTIONS[name] for name in ("all", "varied"))


WAYS = [[0.1] * 15, [1.5], [0.7, 0.8], [1 / 7, 1 / 3 - 1 / 7, 0.9 - 1 / 3, 1.5 - 0.9]]
NOTHING = [[0.0], [0.1, 0.6, -0.7], [1 / 7, 5 / 7 - 1 / 7, -5 / 7], [-0.3, 0.1, 0.1, 0.1]]


@pytest.mark.parametrize(("ways", "worth"), [(WAYS, 1.5), (NOTHING, 0.0)])
def test_episodes_of_one_worth_are_equal_however_they_were_paid(ways, worth):
    assert len({sum(rewards) for rewards in ways}) > 1, "in floats they are not"
    group = [paid(rewards) for rewards in ways]
    assert {e.trajectory.total_reward for e in group} == {worth}
    assert not varied(group)
    assert accepted(group, least=worth)
    metrics = rollout_metrics([group], version=3, right=worth)
    assert metrics["reward/std"] == metrics["reward/group_std"] == 0.0
    assert metrics["accuracy"] == 1.0
    assert varied([*group, paid([worth + 1e-4])])


def test_a_game_that_is_won_is_worth_the_same_whatever_was_guessed_on_the_way():
    """Shaping pays by how much each guess has told, in all what the game is worth."""
    env, [task] = Guess(high=100, max_turns=50, shaping=0.5), guess_tasks(1, high=100)
    group, dice = [], random.Random(0)
    for _ in range(200):
        state, rewards, turn = env.start(task).state, [], None
        while turn is None or turn.verdict is None:
            turn = env.reply(state, str(dice.randint(state.low, state.high)))
            state = turn.state
            rewards.append(turn.reward)
        group.append(paid(rewards))
    assert len({sum(e.trajectory.reward) for e in group}) > 1, "in floats it is not"
    assert {e.trajectory.total_reward for e in group} == {1.5}
    assert not varied(group)
    batch = Batch.of([e.trajectory for e in group], [0] * len(group))
    advantage = build("grpo", {}, horizon=50).prepare(batch).advantage
    assert advantage is not None
    assert not advantage.any()


def test_the_error_rate_keeps_the_first_cause():
    rate = ErrorRate(0.25)
    rate.see([episode(None, label="raised")] * 4 + [episode(1.0)] * 11)
    assert (rate.recent.count("."), rate.recent.count("x"), rate.first) == (11, 4, "raised: because")
    rate.see([episode(1.0)])
    with pytest.raises(RunError, match=r"^judge: "):
        rate.see([episode(None, label="timeout")])


def test_what_went_well_long_ago_makes_up_for_nothing():
    rate = ErrorRate(0.2)
    rate.see([episode(1.0)] * 500 * 64)
    half = [episode(None), episode(1.0)] * 32
    for _ in range(math.ceil((0.2 * WINDOW + 1) / 32) - 1):
        rate.see(half)
    with pytest.raises(RunError, match=f"of the last {WINDOW} episodes"):
        rate.see(half)
    again = ErrorRate(0.2, recent="x" * 15)
    with pytest.raises(RunError, match=r"^judge: "):
        again.see([episode(None)])


def test_few_episodes_stop_nothing():
    rate = ErrorRate(0.0)
    rate.see([episode(None)] * 15)
    with pytest.raises(RunError, match=r"^judge: "):
        rate.see([episode(None)])
    never = ErrorRate(1.0)
    never.see([episode(None)] * 100)


# ---------------------------------------------------------------- replay


def group(number: int, size: int = 2) -> list[tuple[Trajectory, tuple[float, ...]]]:
    """A group that can be told from any other by its first token."""
    rows = [
        Trajectory(
            tokens=[number, k + 1],
            sampled=[False, True],
            logp_gen=[0.0, -1 / 3],
            logp_policy=[0.0, -0.1],
            version=[0, number],
            reward=[0.0, k / 7],
        )
        for k in range(size)
    ]
    return [(row, ()) for row in rows]


def numbers(drawn: list[list[tuple[Trajectory, tuple[float, ...]]]]) -> list[int]:
    return [each[0][0].tokens[0] for each in drawn]


def filled(updates: int, *, seed: int, max_lag: int = 4) -> ReplayBuffer:
    """A memory in which update u has left the groups 10 u, 10 u + 1 and 10 u + 2."""
    replay = ReplayBuffer(max_lag=max_lag, seed=seed)
    for update in range(1, updates + 1):
        replay.add(update, [group(10 * update + n) for n in range(3)])
    return replay


@given(seed=st.integers(0, 2**63), updates=st.integers(0, 9), count=st.integers(0, 20), lag=st.integers(1, 5))
def test_replay_draws_distinct_groups_within_its_lag_and_in_their_order(seed, updates, count, lag):
    update = updates + 1
    drawn = numbers(filled(updates, seed=seed, max_lag=lag).draw(count, update))
    held = [10 * u + n for u in range(max(1, update - lag), update) for n in range(3)]
    assert len(drawn) == min(count, len(held))
    assert drawn == sorted(set(drawn))
    assert set(drawn) <= set(held)


def test_what_is_drawn_again_depends_on_the_seed_and_the_update_alone():
    def drawn(seed: int, update: int) -> tuple[int, ...]:
        return tuple(numbers(filled(6, seed=seed, max_lag=9).draw(4, update)))

    first = drawn(0, 7)
    torch.manual_seed(99)
    assert drawn(0, 7) == first
    again = filled(6, seed=0, max_lag=9)
    for _ in range(3):
        assert tuple(numbers(again.draw(4, 7))) == first, "however often it was asked before"
    assert len({drawn(seed, update) for seed in range(3) for update in (7, 8, 9)}) == 9
    assert first == (21, 22, 40, 61), "in every process, and in every version of Python"


def test_every_group_within_the_lag_is_as_likely():
    counts = Counter(n for seed in range(400) for n in numbers(filled(4, seed=seed).draw(3, 5)))
    assert len(counts) == 12
    assert min(counts.values()) > 60, "100 each are expected"
    assert max(counts.values()) < 140


def test_a_memory_goes_through_a_file_and_goes_on_as_it_was(tmp_path):
    one, two = filled(5, seed=3), ReplayBuffer(max_lag=4, seed=3)
    # None of these is a float32.
    exact = {"logp_gen": [0, -1 / 3], "logp_policy": [0, -0.1], "reward": [0, 2 / 3]}
    row = Trajectory(tokens=[1 << 20, 7], sampled=[False, True], version=[0, 4], **exact)
    one.add(5, [[(row, ()), (row, ())]])
    two.add(1, [group(999)])
    one.draw(2, 5)
    kept = one.tensors()
    assert len(kept) == 10, "however much it holds"
    write_tensors(tmp_path / "replay.safetensors", kept)
    two.restore(read_tensors(tmp_path / "replay.safetensors"))
    assert two.draw(99, 6)[-1] == [(row, ()), (row, ())]
    assert len(two.draw(99, 6)) == 4 * 3 + 1, "what is too old is forgotten when next it draws"
    for update in (6, 7, 8, 9):
        assert two.draw(4, update) == one.draw(4, update)
        for replay in (one, two):
            replay.add(update, [group(10 * update)])
    two.restore(ReplayBuffer(max_lag=1, seed=0).tensors())
    assert two.draw(99, 2) == []


@pytest.mark.parametrize("lag", [1, 3])
def test_a_run_with_replay_trains_on_older_versions_within_its_bound(run_cli, online, write, tmp_path, lag):
    over = {
        "method": {"name": "impala"},
        "rollout": {"replay": 2, "replay_lag": lag},
        "run": {"updates": 6},
        "checkpoint": {"every": 0},
        "eval": {"limit": 0},
    }
    said = run_cli("train", write(online, over), "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 0, said.err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["update"]]
    assert [line["replay/groups"] for line in lines] == [0, 2, 2, 2, 2, 2]
    lags = [line["lag/max"] for line in lines]
    assert lags[:2] == [0, 1]
    assert all(1 <= found <= lag for found in lags[1:])
    assert max(lags) == lag
    for line in lines[1:]:
        # 3 groups of its own, 2 older ones: the mean lag is that of the older tokens by their share.
        assert 0 < line["lag/mean"] < line["lag/max"]
    samples = [
        json.loads(row)
        for file in sorted((tmp_path / "run" / "samples").glob("0*.jsonl"))
        for row in file.read_text().splitlines()
    ]
    assert len(samples) == 6 * 3 * 4, "what is drawn again is not written again"


def test_a_run_starts_its_critic_from_the_model_that_is_named(run_cli, online, write, make_model, tmp_path):
    """At a rate of 0 the critic's backbone is that of the other model to the last bit."""
    other = make_model(seed=5, num_hidden_layers=1)
    critic = {"kind": "own", "path": str(other), "lr": 0.0}
    over = {"method": {"name": "ppo"}, "critic": critic, "run": {"updates": 1}, "eval": {"limit": 0}}
    said = run_cli("train", write(online, over), "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 0, said.err
    [file] = (tmp_path / "run").glob("checkpoints/*/resume/critic.safetensors")
    kept, start = load_file(file), load_file(other / "model.safetensors")
    wanted = {f"body.{name}": x for name, x in start.items() if "lm_head" not in name}
    assert kept.keys() == wanted.keys() | {"head.weight", "head.bias"}
    assert all(torch.equal(kept[name], x) for name, x in wanted.items())


def test_what_is_stored_beside_weights_is_saved_with_them(tmp_path):
    """Scales and biases that no gradient moves, of Gemma 4, GLM, DeepSeek and others: buffers in torch."""
    sizes = {"vocab_size": 16, "vocab_size_per_layer_input": 16, "hidden_size": 16, "intermediate_size": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    config = CONFIG_MAPPING["gemma4_text"](**sizes, **heads, layer_types=["full_attention"] * 2)
    model = AutoModelForCausalLM.from_config(config)
    use_layouts(model)
    for layer in model.model.layers:
        layer.layer_scalar.fill_(0.5)
    learner = Learner(model, build("sft", {}, horizon=1))
    state, beside = {"progress": {"update": 0}}, {"head": None, "replay": None}
    saved = saving.save(tmp_path, learner, tiny_tokenizer(), Checkpoints(), state, {}, **beside)
    held = load_model(saved / "model", dtype=torch.float32).state_dict()
    assert all(torch.equal(held[name], x) for name, x in model.state_dict().items())
    assert held["model.layers.1.layer_scalar"] == 0.5


# ---------------------------------------------------------------- what is said of episodes


def test_metrics_of_an_update():
    groups = [
        [episode(1.0, label="right"), episode(0.0, label="wrong", tokens=4, stop="length")],
        [episode(None, label="timeout"), episode(3.0, label="right")],
        [episode(None, label="raised")],
    ]
    out = rollout_metrics(groups, version=5, right=1.0)
    assert {k: v for k, v in out.items() if k.startswith("verdict/")} == {
        "verdict/right": 0.4,
        "verdict/wrong": 0.2,
        "verdict/timeout": 0.2,
        "verdict/raised": 0.2,
    }
    assert out["reward/mean"] == pytest.approx(4 / 3)
    assert out["reward/std"] == pytest.approx(torch.tensor([1.0, 0.0, 3.0]).std(correction=0).item())
    assert out["reward/group_std"] == 0.5, "over groups with several verdicts"
    assert out["accuracy"] == pytest.approx(2 / 3)
    assert (out["length/mean"], out["length/max"], out["length/clipped"]) == (pytest.approx(8 / 3), 4, 1 / 3)
    assert (out["lag/mean"], out["lag/max"]) == (2, 2)


def test_groups_of_one_task_are_two_groups():
    groups = [[episode(0.0), episode(0.0)], [episode(1.0), episode(1.0)]]
    assert rollout_metrics(groups, 3, 1.0)["reward/group_std"] == 0.0


def test_a_single_answer_has_no_spread():
    """Or every run with groups of one would be told that it has no signal."""
    assert "reward/group_std" not in rollout_metrics([[episode(0.0)], [episode(1.0)]], 3, 1.0)


def test_nothing_judged_has_no_mean():
    assert rollout_metrics([[episode(None)]], 0, 1.0) == {"verdict/raised": 1.0}
    out = evaluation_metrics([episode(None), episode(None)], 1.0)
    assert out["eval/errors"] == 1.0
    assert out["eval/accuracy"] != out["eval/accuracy"], "not a number, rather than 0"
    graded = [episode(0.5), episode(1.0, label="right"), episode(None), episode(2.0), episode(0.0)]
    assert evaluation_metrics(graded, 1.0)["eval/scored"] == 0.75


def test_what_counts_as_right():
    assert is_right(episode(0.1, label="right"), 1.0)
    assert not is_right(episode(5.0, label="wrong"), 1.0)
    assert is_right(episode(1.0, label="scored"), 1.0)
    assert not is_right(episode(0.9, label="scored"), 1.0)
    assert Evaluation().right == 1.0


# ---------------------------------------------------------------- journal


class Lines:
    def __init__(self):
        self.lines = []

    def log(self, step, metrics):
        self.lines.append((step, dict(metrics)))


def test_a_line_has_the_phases_since_the_last_one_and_seconds_go_on_after_a_resume():
    track, shown = Lines(), []
    journal = Journal(track, Progress(update=7, tokens=11, seconds=100.0), lambda *news: shown.append(news))
    with journal.timed("sample"):
        pass
    with journal.timed("sample"):
        pass
    with journal.timed("train"):
        pass
    journal.log(3, 2, {"loss": 0.5})
    journal.log(4, 3, {})
    (step, first), (_, second) = track.lines
    assert (step, first["update"], first["version"], first["tokens"], first["loss"]) == (3, 7, 2, 11, 0.5)
    assert {k for k in first if k.startswith("time/")} == {"time/sample", "time/train", "time/total"}
    assert 100.0 <= first["seconds"] <= second["seconds"] < 101.0
    assert second["time/total"] == 0.0
    assert [name for name, _ in shown] == ["sample", "sample", "train", "update", "update"]


def test_the_first_signal_asks_and_the_second_ends():
    before = signal.getsignal(signal.SIGTERM)
    with stop_requested() as stopped:
        assert not stopped()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopped()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


# ---------------------------------------------------------------- plan

SHAPES = [
    {},
    {"tied": True},
    {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2},
    {"num_key_value_heads": 4, "num_hidden_layers": 1},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parameters_are_counted_without_building_them_and_by_a_closed_form(make_model, shape):
    path = make_model(**shape)
    config = AutoConfig.from_pretrained(path)
    real = AutoModelForCausalLM.from_pretrained(path)
    count = parameter_count(config)
    assert count == sum(p.numel() for p in real.parameters())
    D, M, V, L = config.hidden_size, config.intermediate_size, config.vocab_size, config.num_hidden_layers
    kv = D * config.num_key_value_heads // config.num_attention_heads
    layer = 2 * D * D + 2 * D * kv + 3 * D * M + 2 * D
    assert count == V * D * (1 if shape.get("tied") else 2) + L * layer + D
    r = 4
    adapter = L * r * ((D + D) + 2 * (D + kv) + (D + D) + 2 * (D + M) + (M + D))
    assert parameters(config, Lora(rank=r)) == adapter


def test_the_estimate_is_the_sum_of_what_is_held(make_model):
    path = make_model()
    config = AutoConfig.from_pretrained(path)
    model, n = skeleton(config), parameter_count(config)
    shape = Shape.of(model)
    float32 = estimate(shape, dtype=torch.float32, microbatch_tokens=100).parts
    assert (float32["weights"], float32["gradients"], float32["AdamW moments"]) == (4 * n, 4 * n, 8 * n)
    assert "masters beside weights" not in float32
    half = estimate(shape, dtype=torch.bfloat16, microbatch_tokens=100, reference=n).parts
    assert (half["weights"], half["masters beside weights"]) == (2 * n, 2 * n)
    assert half["reference policy"] == 2 * n
    adapter = estimate(Shape.of(model, 500), dtype=torch.bfloat16, microbatch_tokens=100).parts
    assert (adapter["gradients"], adapter["AdamW moments"]) == (2000, 4000)
    sampler = estimate(shape, dtype=torch.float32, microbatch_tokens=1, sampler_tokens=3 * 50).parts
    heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    assert sampler["key-value cache"] == 3 * 50 * 2 * config.num_hidden_layers * heads * size * 4
    one, two = (
        estimate(shape, dtype=torch.float32, microbatch_tokens=t).parts["activations"] for t in (1, 2)
    )
    assert two == 2 * one > 0
    deep = replace(shape, layers=30)
    assert activation_bytes(deep, 4, True) < activation_bytes(deep, 4, False)
    logits = [
        estimate(shape, dtype=torch.float32, microbatch_tokens=1, device=d).parts["one chunk of logits"]
        for d in ("cpu", "cuda")
    ]
    assert logits == [3 * tokens.CHUNK_BYTES, 5 * tokens.CHUNK_BYTES_ELSEWHERE]


def test_a_sampler_that_sleeps_and_microbatches_share_memory(make_model):
    model = skeleton(AutoConfig.from_pretrained(make_model()))
    shape, dtype, own = Shape.of(model), torch.float32, {"sampler_tokens": 1 << 12}
    for length in (1, 1 << 20):
        parts = estimate(shape, dtype=dtype, microbatch_tokens=length, **own).parts
        sampler = parts["sampler's weights"] + parts["key-value cache"]
        passes = parts["activations"] + parts["one chunk of logits"]
        asleep = estimate(shape, dtype=dtype, microbatch_tokens=length, sleeps=True, **own)
        assert asleep.total == sum(parts.values()) - min(sampler, passes)
    fixed, one = (estimate(shape, dtype=dtype, microbatch_tokens=length).total for length in (0, 1))
    free = int((fixed + 1000 * (one - fixed)) / 0.8) + 1
    assert microbatch(shape, free=free, dtype=dtype, sleeps=True, **own) == 1000
    assert 256 < microbatch(shape, free=free, dtype=dtype, **own) < 1000


def test_the_microbatch_follows_from_the_memory():
    shape = Shape(
        parameters=10**6,
        trained=10**6,
        layers=2,
        hidden=64,
        intermediate=128,
        heads=4,
        key_heads=2,
        head_size=16,
        vocabulary=1000,
    )
    token = activation_bytes(shape, 4, False) + mask_bytes(shape, 4)
    fixed = estimate(shape, dtype=torch.float32, microbatch_tokens=0).total
    chosen = microbatch(shape, free=int((fixed + 1000 * token) / 0.8) + 1, dtype=torch.float32)
    assert chosen == 1000
    assert microbatch(shape, free=0, dtype=torch.float32) == 256
    assert microbatch(shape, free=1 << 50, dtype=torch.float32) == MOST_MICROBATCH["cpu"]
    assert microbatch(shape, free=1 << 50, device="cuda", dtype=torch.float32) == MOST_ELSEWHERE
    larger = estimate(shape, dtype=torch.float32, microbatch_tokens=0, device="cuda").total
    assert larger > fixed
    free = int((larger + 1000 * token) / 0.8) + 1
    assert microbatch(shape, free=free, device="cuda", dtype=torch.float32) == 1000
    # Before they are packed these weights take more memory than a pass of any length later.
    packed = replace(shape, parameters=10**9, trained=0, linear=10**9, largest=10**6, packed=True)
    needs = [estimate(packed, dtype=torch.float32, microbatch_tokens=n).total for n in (0, 1, 2048)]
    assert needs == [4 * 10**9] * 3
    chosen = [microbatch(packed, free=n * 10**9, dtype=torch.float32) for n in (4, 6)]
    assert chosen == [256, MOST_MICROBATCH["cpu"]]


def test_where_scores_are_capped_a_longer_row_leaves_room_for_fewer_tokens():
    sizes = {"parameters": 10**6, "trained": 10**6, "layers": 2, "hidden": 64, "intermediate": 128}
    shape = Shape(**sizes, heads=4, key_heads=2, head_size=16, vocabulary=1000)
    fixed = estimate(shape, dtype=torch.float32, microbatch_tokens=0).total
    free = 10 * fixed
    for each, less in ((shape, False), (replace(shape, keeps_scores=True), True)):
        short, long = (microbatch(each, free=free, dtype=torch.float32, longest=n) for n in (600, 6000))
        assert (long < short) == less
        need = estimate(each, dtype=torch.float32, microbatch_tokens=long, longest=6000).total
        assert need <= free


def test_layers_with_a_state_cache_no_tokens_and_a_state_of_each_row():
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 8, "intermediate_size": 48, "vocab_size": 64, "linear_conv_kernel_dim": 4}
    sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    config = CONFIG_MAPPING["qwen3_5_text"](
        **sizes, linear_key_head_dim=8, linear_value_head_dim=6, layer_types=kinds
    )
    needs = {"dtype": torch.bfloat16, "microbatch_tokens": 1, "sampler_tokens": 100, "sampler_rows": 5}
    parts = estimate(Shape.of(skeleton(config)), **needs).parts
    assert parts["key-value cache"] == 100 * 2 * 2 * 8 * 2
    # 4 heads of sums, 8 × 6, and the inputs of a convolution of width 4 over 2 × 16 + 24 channels.
    assert parts["states of rows"] == 2 * 5 * 3 * 4 * (4 * 8 * 6 + 4 * (2 * 16 + 24))


def test_free_memory_is_something():
    assert 1 << 20 < free_memory(torch.device("cpu")) < 1 << 50


# ---------------------------------------------------------------- run directory


def test_a_directory_is_one_runs_at_a_time_and_free_when_it_is_closed(tmp_path):
    run = RunDir(tmp_path / "a" / "run", resume=False)
    with pytest.raises(UserError, match="a session of this program is using this directory; close it first"):
        RunDir(tmp_path / "a" / "run", resume=False)
    run.close()
    RunDir(tmp_path / "a" / "run", resume=False).close()


def test_what_a_kill_left_before_there_was_a_run_does_not_block_the_next(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.toml.tmp").write_text("[mod")
    run = RunDir(tmp_path / "run", resume=False)
    run.describe("[run]\n", "title", {"Method": {"name": "grpo"}})
    assert (tmp_path / "run" / "config.toml").read_text() == "[run]\n"
    assert not list((tmp_path / "run").glob(".*.tmp"))
    run.close()
    with pytest.raises(UserError, match="already holds a run"):
        RunDir(tmp_path / "run", resume=False)
    with (tmp_path / "run" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the refusal let go of it


def test_rollouts_are_written_line_by_line_however_many_they_are(tmp_path):
    run = RunDir(tmp_path, resume=False)
    with run.recording():
        tracemalloc.start()
        run.samples("000001", ({"prompt": str(n % 10) * 500_000} for n in range(40)))
        run.wait()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    run.close()
    assert (tmp_path / "samples" / "000001.jsonl").stat().st_size > 20_000_000
    assert most < 8_000_000


def test_a_discarded_directory_is_gone_but_for_what_is_not_ours(tmp_path):
    for name, keeps in (("empty", ""), ("metrics", "metrics.jsonl"), ("theirs", ".notes")):
        run = RunDir(tmp_path / name, resume=False)
        run.describe("", "", {})
        if keeps:
            (run.path / keeps).write_text("{}\n")
        run.discard()
        run.close()
        assert run.path.exists() == bool(keeps)
        if keeps:
            assert (run.path / keeps).read_text() == "{}\n"
    assert (tmp_path / "metrics" / "config.toml").exists()
    assert not (tmp_path / "theirs" / "config.toml").exists()


def test_rollouts_after_a_checkpoint_are_forgotten(tmp_path):
    run = RunDir(tmp_path / "run", resume=False)
    with run.recording():
        for name in ("000001", "000002", "eval_000000", "eval_000002"):
            run.samples(name, [{"a": 1}])
    run.forget_after(1)
    kept = Counter(f.stem for f in (tmp_path / "run" / "samples").iterdir())
    assert kept == Counter(["000001", "eval_000000"])
    run.forget_after(-1)
    assert not list((tmp_path / "run" / "samples").iterdir())
    run.close()
