"""A run of evolution strategies: who drew which answer, what the sampler holds, and an exact resume."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import posttrain
from posttrain.errors import RunError
from posttrain.learner.evolution import Population
from posttrain.loop.population import PopulationSource
from posttrain.models import checkpoint
from posttrain.recipe.asynchrony import Asynchrony
from posttrain.rollout.protocol import FinishedGroup, GroupRequest
from posttrain.testing import repeatable
from posttrain.types import Sampling, Task
from posttrain.verifiers.protocol import TrainerState

ES: dict[str, Any] = {
    "method": {"name": "es", "sigma": 0.1},
    "sampling": {"max_new_tokens": 3, "temperature": 0.0},
    "rollout": {"groups": 5, "group_size": 6},
    "optim": {"lr": 0.002, "schedule": "linear"},
    "eval": {"every": 2},
}


@pytest.fixture
def recipe(online, write, able):
    """recipe(over) -> a recipe of evolution on a model that knows a few sums."""
    tables = online | {"model": online["model"] | {"path": str(able)}}
    return lambda **over: write(tables, ES | over)


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(session: posttrain.Session) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in session.learner.weights()}


@pytest.mark.parametrize("over", [{}, {"lora": {"rank": 2}}], ids=["all weights", "adapter"])
@pytest.mark.sample("adapter")
def test_answer_i_is_drawn_by_the_weights_of_member_i(recipe, tmp_path, over):
    with posttrain.Session(recipe(**over), dir=tmp_path / "run") as s:
        before, population = weights(s), s.learner.population
        groups = s.sample()
        assert population is not None
        assert len({group[0].task.id for group in groups}) == 5
        for group in groups:
            assert [e.sample for e in group] == list(range(6))
        after = weights(s)
        assert all(torch.equal(x, after[name]) for name, x in before.items())
        gaps = []
        for weigh in (lambda member: member, lambda member: member + 1):
            gap = 0.0
            for e in (e for group in groups for e in group):
                with population.member(0, weigh(e.sample)):
                    row = e.trajectory
                    logp = [0.0, *s.learner.canary(row.tokens)]
                chosen = [t for t, sampled in enumerate(row.sampled) if sampled]
                gap = max(gap, *(abs(logp[t] - row.logp_policy[t]) for t in chosen))
            gaps.append(gap)
        print("greatest difference of log-probabilities, as drawn and of the next member:", gaps)
        assert gaps[0] < 1e-4 < 0.01 < gaps[1]
        s.update(groups)
        s.publish()


def assert_recorded(run: Path) -> None:
    """Metrics, evaluations, samples and the report of a run of four updates."""
    first, *rest = lines(run)
    assert "eval/accuracy" in first
    assert [line["update"] for line in rest if "eval/accuracy" in line] == [2, 4]
    for line in rest:
        assert (line["evolution/step"] > 0) == (line["evolution/spread"] > 0)
        assert not line.keys() & {"select/trained", "grad_norm", "loss"}
        assert line["lag/max"] == 0
    assert any(line["evolution/step"] > 0 for line in rest)
    assert rest[-1]["lr"] < rest[0]["lr"]
    rows = [json.loads(line) for line in (run / "samples/000001.jsonl").read_text().splitlines()]
    assert {row["sample"] for row in rows} == set(range(6))
    assert all("advantage" in row and "logp" not in row for row in rows)
    assert "evolution" in (run / "report.html").read_text()


def test_a_run_is_recorded_and_a_resumed_one_ends_with_the_same_bits(run_cli, recipe, tmp_path):
    path = recipe(sampling={"max_new_tokens": 3, "temperature": 0.7}, model={"dtype": "bfloat16"})
    assert run_cli("train", path, "--run-dir", tmp_path / "whole", "--quiet").code == 0
    assert_recorded(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="cut off"):
        cut(path, tmp_path / "cut")
    assert run_cli("train", path, "--run-dir", tmp_path / "cut", "--resume", "--quiet").code == 0
    assert repeatable(tmp_path / "whole/metrics.jsonl") == repeatable(tmp_path / "cut/metrics.jsonl")
    ends = [checkpoint.newest(tmp_path / name / "checkpoints")[0] for name in ("whole", "cut")]
    one, other = (load_file(end / "model" / "model.safetensors") for end in ends)
    assert all(torch.equal(x, other[name]) for name, x in one.items())
    for file in (tmp_path / "whole" / "samples").glob("*.jsonl"):
        assert file.read_bytes() == (tmp_path / "cut" / "samples" / file.name).read_bytes()


@contextmanager
def before_member(number: int, do: Callable[[], None]) -> Iterator[None]:
    """Call `do` once, just before the weights of this member are published."""
    member, waiting = Population.member, [do]

    def observed(self: Population, update: int, which: int) -> Any:
        if which == number and waiting:
            waiting.pop()()
        return member(self, update, which)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Population, "member", observed)
        yield


def cut(path: Path, run: Path) -> None:
    """Train two updates and sample a third, in whose population the run is cut off."""

    def stop() -> None:
        raise RuntimeError("cut off")

    with posttrain.Session(path, dir=run) as s:
        s.step()
        s.step()
        with before_member(3, stop):
            s.step()


@pytest.mark.full  # starts three processes
def test_two_samplers_make_the_run_of_one_also_if_one_is_killed(recipe, tmp_path):
    """Each member's tasks are dealt among the samplers; a new sampler takes the weights of that member."""
    over: dict[str, Any] = {"run": {"updates": 3, "threads": 1}, "sampling": {"max_new_tokens": 3}}
    ends = []
    for samplers in (1, 2):
        path = recipe(**over, **{"async": {"samplers": samplers}} if samplers > 1 else {})
        with posttrain.Session(path, dir=tmp_path / str(samplers)) as s:
            s.step()
            pool: Any = s._open.sampler
            kill = partial(os.kill, pool.workers[1].channel.pid, signal.SIGKILL) if samplers > 1 else int
            with before_member(3, kill):
                s.step()
            s.step()
            ends.append(weights(s))
            if samplers > 1:
                assert pool.restarted == 1
                assert pool.oldest_version > s.learner.update_count == 3
    one, two = ends
    assert all(torch.equal(x, two[name]) for name, x in one.items())
    files = sorted((tmp_path / "1" / "samples").glob("*.jsonl"))
    assert len(files) == 6
    for file in files:
        assert file.read_bytes() == (tmp_path / "2" / "samples" / file.name).read_bytes()


class LateSampler:
    """Finish all groups at a poll, and take published weights `late` polls after that."""

    def __init__(self, late: int) -> None:
        self.late, self.oldest_version, self.newest, self.polls = late, 0, 0, 0
        self.played: list[tuple[int, int]] = []
        """The newest weights, and those that sampled, when groups were admitted."""
        self._playing: list[GroupRequest] = []

    def publish(self, member: int | None) -> int:
        self.newest, self.polls = self.newest + 1, 0
        return self.newest

    def admit(self, requests: list[GroupRequest]) -> None:
        self.played.append((self.newest, self.oldest_version))
        self._playing = list(requests)

    def poll(self, timeout_s: float) -> list[FinishedGroup]:
        self.polls += 1
        if self.polls > self.late:
            self.oldest_version = self.newest
        groups, self._playing = [FinishedGroup(number=r.number) for r in self._playing], []
        return groups


def test_a_member_is_asked_only_once_all_samplers_have_its_weights(tmp_path):
    sampler = LateSampler(late=3)
    task = Task(id="0", messages=[{"role": "user", "content": "1+1="}], answer="2")
    source = PopulationSource(
        sampler,
        SimpleNamespace(take=lambda: (0, task)),
        {"": Sampling()},
        Asynchrony(),
        SimpleNamespace(progress=SimpleNamespace(admitted=0), show=lambda *_: None),
        count=1,
        size=4,
        state=lambda number: TrainerState(),
        left=lambda: 1,
        publish=sampler.publish,
    )
    [group], _ = source.collect(lambda group: True, 1, 0)
    assert group.number == 0
    assert sampler.played == [(n, n) for n in (1, 2, 3, 4)]


def test_groups_of_a_program_keep_their_members(recipe, tmp_path):
    """Rewards may be changed, and answers left out; the step is that of what is left."""
    with posttrain.Session(recipe(), dir=tmp_path / "run") as s:
        groups = s.sample()
        batch = s.batch([group[1:5] for group in groups])
        assert batch.member is not None
        assert batch.member.tolist() == [1, 2, 3, 4] * 5
        with pytest.raises(RunError, match="no gradients"):
            s.optim_step()
        with pytest.raises(ValueError, match="no halves"):
            s.forward_backward(batch)
        s.update(batch)
        s.publish()


def test_a_plan_counts_no_gradients_and_no_moments(run_cli, recipe):
    other = ("--set", "method.name=rloo", "--set", "method.sigma=", "--set", "sampling.temperature=1.0")
    plans = [json.loads(run_cli("validate", recipe(), "--json", *words).out)["plan"] for words in ((), other)]
    memory, usual = (plan["Memory estimate"] for plan in plans)
    assert {"gradients", "AdamW moments", "activations"} <= usual.keys()
    assert not {"gradients", "AdamW moments", "activations"} & memory.keys()
    assert "weights before a perturbation" in memory
    assert plans[0]["Batch plan"]["learning rate"] == "0.002, linear"


SHARE = """
def share(response, answer):
    return sum(c.isdigit() for c in response) / 8
"""


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")  # peft, of an adapter of the head
def test_a_tiny_model_learns_to_say_digits(online, write, shallow, tmp_path):
    """132 weights: an adapter of rank 1 on the head. Seed 0, that of the recipe."""
    (tmp_path / "ask.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}?", "answer": "0"}) + "\n" for n in range(8))
    )
    (tmp_path / "reward.py").write_text(SHARE)
    over = {
        "model": {"path": str(shallow)},
        "method": {"name": "es", "sigma": 0.5},
        "lora": {"rank": 1, "alpha": 1.0, "targets": ["lm_head"]},
        "task": {"arithmetic": None, "data": {"path": str(tmp_path / "ask.jsonl")}},
        "verifier": {"number": None, "function": {"function": f"{tmp_path / 'reward.py'}:share"}},
        "sampling": {"max_new_tokens": 8},
        "rollout": {"groups": 8, "group_size": 16},
        "optim": {"lr": 0.2},
        "run": {"updates": 20},
        "eval": {"limit": 0},
        "checkpoint": {"every": 0},
    }
    with posttrain.Session(write(online, over), dir=tmp_path / "run") as s:
        s.run()
        rewards = s.metrics["reward/mean"]
    print([round(reward, 2) for reward in rewards])
    assert sum(rewards[:3]) / 3 < 0.2
    assert sum(rewards[-3:]) / 3 > 0.7
