"""A sampler that takes turns with the learner reads its tensors: the same run in the memory of one model."""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from posttrain.api.opening import prepare
from posttrain.engines.native.runner import PackedLinear
from posttrain.loop import build
from posttrain.loop.session import LoopSession
from posttrain.models.pretrained import silent
from posttrain.plan.companions import lends_weights
from posttrain.plan.memory import Shape, estimate
from posttrain.plan.plan import plan_run
from posttrain.recipe import config
from posttrain.rollout.protocol import GroupRequest
from posttrain.run.rundir import RunDir
from posttrain.types import RunError

CPU = torch.device("cpu")


@pytest.fixture
def open_run(online, able, write, tmp_path, monkeypatch):
    """open_run(tables, lends=...) -> a session of three updates."""
    sessions: list[LoopSession] = []

    def make(over: dict[str, Any], *, lends: bool = True, base: Any = None) -> LoopSession:
        over = over | {"model": {"path": str(able)} | over.get("model", {})}
        over = over | {"run": {"updates": 3, "threads": 1}, "checkpoint": None}
        directory = RunDir(tmp_path / str(len(sessions)), resume=False)
        loaded = config.read(write(base or online, over))
        recipe, plan = prepare(loaded, directory, title="test", resume=False, say=silent)
        parts = {"resume": False, "config": recipe.tables, "show": lambda phase, numbers: None, "say": silent}
        with monkeypatch.context() as patch:
            if not lends:
                patch.setattr(build, "lends_weights", lambda *of: False)
            session = LoopSession(build.build_session_parts(plan, directory, **parts))
        session._open_parts.closing.callback(directory.close)
        sessions.append(session)
        return session

    yield make
    for session in sessions:
        session.close()


def runner_of(session: LoopSession) -> Any:
    return session._open.sampler.worker.rollouts.engine.runner  # type: ignore[attr-defined]


def train(session: LoopSession) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Make three updates; return the learner's numbers and all that was sampled."""
    sampled: list[Any] = []
    for update in range(3):
        if update == 1:
            sampled.append(session.evaluate())
        groups = session.sample()
        sampled += [(e.trajectory, e.response) for group in groups for e in group]
        session.update(groups)
        session.publish()
    sampled.append(session.evaluate())
    tensors = {
        f"{file} {n}": x.clone() for file, part in session.learner.tensors().items() for n, x in part.items()
    }
    return tensors, sampled


RUNS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float64": {
        "model": {"dtype": "float64"},
        "reference": {"refresh_every": 2},
        "method": {"kl_in_loss": 0.1},
    },
    "bfloat16": {"model": {"dtype": "bfloat16"}, "eval": {"every": 1}},
    "adapter": {"lora": {"rank": 4}, "model": {"dtype": "bfloat16"}},
    "adapter on one matrix": {"lora": {"rank": 4, "targets": ["q_proj"], "dora": True}},
    "muon": {"optim": {"name": "muon"}, "model": {"dtype": "bfloat16"}},
    "8 bits": {"optim": {"name": "adamw_8bit"}},
    "shared critic": {"method": {"name": "ppo"}, "critic": {"lr": 0.01}},
    "own critic": {"method": {"name": "ppo"}, "critic": {"kind": "own", "warmup": 1}},
    "trust region": {"method": {"name": "trpo"}, "optim": None},
    "several steps": {"steps": {"epochs": 2, "minibatches": 2}, "model": {"dtype": "float64"}},
}


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.sample("bfloat16")
def test_loan_trains_what_a_copied_sampler_trains(open_run, kind: str) -> None:
    with open_run(RUNS[kind]) as session:
        learner, runner = session.learner, runner_of(session)
        lent = dict(runner._lent)
        assert lent, "nothing is lent, so nothing is tested"
        tensors, sampled = train(session)
        assert runner._lent.keys() == lent.keys()
        places = {name: p for name, p in runner._parameters.items() if name in lent}
        places |= {} if learner.lora.rank else dict(learner.model.named_parameters())
        assert all(x.data_ptr() == lent[name].data_ptr() for name, x in places.items()), "a step moved one"
        assert learner.lora.rank or lent.keys() == places.keys()
    with open_run(RUNS[kind], lends=False) as session:
        assert not runner_of(session)._lent
        expected, expected_samples = train(session)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(x, expected[name]) for name, x in tensors.items())
    assert sampled == expected_samples


def test_evaluated_tasks_of_a_run_on_data_are_answered_on_loan(open_run, offline) -> None:
    task = {"arithmetic": {"low": 2, "high": 9, "held_out": 6, "template": "{a}+{b}="}}
    over = {"eval": {"task": [task | {"name": "sums", "verifier": {"number": {"where": "last"}}}]}}
    runs = []
    for lends in (True, False):
        with open_run(over, lends=lends, base=offline) as session:
            runner = session._open.evaluator.sampler.worker.rollouts.engine.runner
            assert bool(runner._lent) == lends
            lines = [session.evaluate()]
            for _ in range(2):
                session.update(session.sample())
                lines.append(session.evaluate())
            tensors, folder = session.learner.tensors()["trained"], session.run_dir.path / "samples"
        # Another thread writes them, until the session is closed.
        runs.append((lines, [file.read_text() for file in sorted(folder.glob("eval*"))], tensors))
    assert runs[0][0] == runs[1][0]
    rows = [[json.loads(row) for text in answers for row in text.splitlines()] for _, answers, _ in runs]
    for row, expected in zip(*rows, strict=True):
        assert row == expected
    assert all(torch.equal(x, runs[1][2][name]) for name, x in runs[0][2].items())
    assert len({json.dumps(line) for line in lines}) == 3, "evaluations of equal weights show nothing"


def live_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors' memory, common memory once."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


@pytest.mark.parametrize("matrices", [(), ("q_proj", "up_proj")])
@pytest.mark.sample("matrices1")
def test_learner_and_sampler_have_the_parameters_of_one_model(open_run, matrices: tuple[str, ...]) -> None:
    """In float64 the engine packs no matrices, as on a GPU; matrices that an adapter changes are copies."""
    lora = {"lora": {"rank": 4, "targets": [*matrices]}} if matrices else {}
    sizes = []
    for lends in (True, False):
        with open_run({"model": {"dtype": "float64"}, **lora}, lends=lends) as session:
            session.update(session.sample())
            session.publish()
            model = runner_of(session).model
            sizes.append(live_bytes([*session.learner.model.parameters(), *model.parameters()]))
            adapter = live_bytes(
                p for p in session.learner.model.parameters() if p.requires_grad and matrices
            )
    n = live_bytes(model.parameters())
    changed = live_bytes(p for name, p in model.named_parameters() if any(m in name for m in matrices))
    assert n == 8 * sum(p.numel() for p in model.parameters())
    assert [size - adapter for size in sizes] == [n + changed, 2 * n]


def requests_of(session: LoopSession, count: int) -> list[GroupRequest]:
    """Return requests of groups that no update takes."""
    loop = session._open
    tasks = [loop.stream.take() for _ in range(count)]
    sampling = loop.samplings[""]
    return [
        GroupRequest(number=100 + n, round=100, size=4, task=task, epoch=epoch, sampling=sampling)
        for n, (epoch, task) in enumerate(tasks)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.sample("float32")
def test_pending_answers_end_under_the_weights_that_began_them(open_run, tiny, dtype: str) -> None:
    """As after a sample() that failed: the learner steps on other rows while answers are running."""
    ends = []
    for lends in (True, False):
        model = {"path": str(tiny), "dtype": dtype}  # its answers are long
        over = {"model": model, "sampling": {"max_new_tokens": 8}, "optim": {"lr": 0.1}}
        with open_run(over, lends=lends) as session:
            groups = session.sample()
            sampler = session._open.sampler
            sampler.admit(requests_of(session, 3))
            finished = [*sampler.poll(1.0), *sampler.poll(1.0)]
            engine, loan = sampler.worker.rollouts.engine, session.learner.loan
            assert engine.busy
            assert (loan is not None and loan.moves) == lends
            session.update(groups)
            assert not (loan and (loan.moves or loan.tensors))
            session.publish()
            assert sampler.oldest_version == 0, "weights are loaded between rounds"
            while sampler.worker.playing:
                finished += sampler.poll(1.0)
            trajectories = [e.trajectory for group in finished for e in group.episodes]
            session.publish()
            assert sampler.oldest_version == engine.version == 1
            row = trajectories[0].tokens
            ends.append((trajectories, engine.score(row), session.learner.canary(row)))
    (trajectories, scored, own), expected = ends
    assert (trajectories, scored, own) == expected
    sampled = [v for t in trajectories for v, chosen in zip(t.version, t.sampled, strict=True) if chosen]
    assert set(sampled) == {0}


def test_evaluation_before_publishing_is_of_the_newest_weights(open_run) -> None:
    """A sampler of its own answers with those of the last publish()."""
    rewards = {}
    for lends in (True, False):
        with open_run({"optim": {"lr": 0.1}}, lends=lends) as session:
            start = session.evaluate()
            session.update(session.sample())
            early = session.evaluate()
            session.publish()
            late = session.evaluate()
            rewards[lends] = [start, early, late]
    assert rewards[True] == [rewards[False][0], rewards[False][2], rewards[False][2]]
    assert rewards[False][0] == rewards[False][1] != rewards[False][2]


def test_weights_that_are_not_the_learners_are_refused(open_run, monkeypatch) -> None:
    with open_run({"optim": {"lr": 0.3}}) as session:
        loop, learner = session._open, session.learner
        session.update(session.sample())
        before = {name: tensor.clone() for name, tensor in learner.weights()}
        with pytest.raises(ValueError, match="is not the learner's tensor"):
            loop.sampler.worker.rollouts.engine.load([(n, x + 1) for n, x in before.items()], 7)
        assert all(torch.equal(tensor, before[name]) for name, tensor in learner.weights())
        if runner_of(session)._packed:
            with monkeypatch.context() as patch:
                patch.setattr(PackedLinear, "pack", lambda self, weight: None)
                with pytest.raises(RunError, match="differ from the learner's by"):
                    loop.publisher.publish(loop.sampler)
        session.publish()
        norm = dict(learner.model.named_parameters())["model.norm.weight"]
        norm.data = norm.detach().clone()
        with pytest.raises(RunError, match=r"did not take version 1: model\.norm\.weight is not the learner"):
            loop.publisher.publish(loop.sampler)


ELSEWHERE: dict[str, dict[str, Any]] = {
    "thread": {"async": {"place": "thread"}},
    "ahead": {
        "async": {"max_lag": 1, "pace": "steps"},
        "method": {"name": "grpo", "correction": "token_truncated"},
    },
    "4 bits": {"lora": {"rank": 4}, "model": {"quantize": "nf4"}},
    "shares": {"train": {"shard": True}},
    "perturbed": {"method": {"name": "es"}, "optim": {"lr": 0.01}},
}


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_samplers_that_cannot_share_have_weights_of_their_own(online, write, kind: str) -> None:
    here, other = (
        plan_run(config.read(write(online, over)).recipe, silent) for over in ({}, ELSEWHERE[kind])
    )
    assert lends_weights(here.resolved, CPU)
    recipe = here.resolved.recipe
    elsewhere = replace(recipe, async_=replace(recipe.async_, devices=("cpu",)))
    assert lends_weights(replace(here.resolved, recipe=elsewhere), CPU)
    assert not lends_weights(replace(here.resolved, recipe=elsewhere), torch.device("cuda:1"))
    assert not lends_weights(other.resolved, CPU)
    name = "sampler's weights"
    assert here.memory.parts[name] < here.memory.parts["weights"] < other.memory.parts[name]


def test_a_run_without_a_sampler_has_no_second_model(offline, write) -> None:
    plan = plan_run(config.read(write(offline)).recipe, silent)
    assert build.build_learner(plan, {}).loan is None


def test_estimate_counts_the_copies_beside_lent_weights() -> None:
    sizes = {"parameters": 1000, "trained": 1000, "layers": 2, "hidden": 4, "intermediate": 8, "heads": 1}
    shape = Shape(**sizes, key_heads=1, head_size=4, vocabulary=50, linear=600)
    adapter = replace(shape, trained=90)

    def copies(shape: Shape, device: str, **how: Any) -> int:
        needs = {"dtype": torch.bfloat16, "microbatch_tokens": 1, "sampler_tokens": 9, "device": device}
        return estimate(shape, **needs, **how).parts["sampler's weights"]

    assert [copies(s, d) for s in (shape, adapter) for d in ("cpu", "cuda")] == [2 * 1200] * 4
    lent = [copies(s, d, lends=True) for s in (shape, adapter) for d in ("cpu", "cuda")]
    assert lent == [2 * 800, 0, 2 * 800, 2 * 600]
    assert copies(shape, "cuda", lends=True, shares=2) == copies(
        replace(shape, packed=True), "cuda", lends=True
    )
