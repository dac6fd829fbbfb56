"""The schedules of asynchronous training with an engine and a learner that sleep; everything else is real.

The loop, the line of groups, the samplers' processes, their pool, the weights in shared memory and their
proofs are those of a run. A step of n rows sleeps a + b n seconds, an update a fixed time. It stands for
AReaL's 1.5B run (arXiv:2505.24298, Table 1) with answers 100 times shorter and 32 times fewer devices:
synchronous, four devices sample and then train; ahead, three sample and one trains. Sleeping takes no cores,
so a small machine can show what the loop makes of a schedule; it shows nothing of any engine's speed.

    python benchmarks/async/sleep.py --updates 24 --repeat 3
    python benchmarks/async/sleep.py --samplers 1 2 4 8 16

The second is weak scaling: 4 groups of 16 an update and sampler, lag 4, swaps within.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from math import exp, log
from pathlib import Path
from typing import Any, cast

import torch

from mathcheck.plugin.number import Number
from posttrain.base.chat import Chat
from posttrain.curriculum.replay_buffer import ReplayBuffer
from posttrain.curriculum.stream import Stream, dice
from posttrain.learner.learner import Learner, Update
from posttrain.learner.ranks import ALONE
from posttrain.loop.loop import Parts
from posttrain.loop.online import OnlineRun
from posttrain.loop.session import LoopSession
from posttrain.loop.weight_sync import Publisher
from posttrain.methods.table import METHODS
from posttrain.models.fingerprint import NamedTensors, digest
from posttrain.recipe.asynchrony import Asynchrony
from posttrain.recipe.recipe import SampleLog
from posttrain.recipe.settings import Evaluation, Rollout
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.remote import ProcessChannel
from posttrain.rollout.rollouts import Rollouts
from posttrain.rollout.snapshots import SharedMemoryStore
from posttrain.rollout.worker import RolloutWorker
from posttrain.run.journal import Journal, Progress
from posttrain.run.rundir import RunDir
from posttrain.run.track import Track
from posttrain.types import Batch, Completion, Request, Sampling, Task

A, B, PREFILL, LOAD = 4.3e-3, 42e-6, 1e-5, 0.02
"""Seconds of a step, of each row in it, of each token that is run again after a swap, of taking weights."""
MEAN, SIGMA, LONGEST = 60, 0.9, 276
TRAIN = 0.12
"""Seconds of an update on all four devices; one alone takes four times as long."""
GROUPS, SIZE = 16, 16
MODES = {
    "synchronous": Asynchrony(samplers=4, place="process"),
    "one-step-off": Asynchrony(samplers=3, max_lag=1),
    "lag 4, swaps between": Asynchrony(samplers=3, max_lag=4),
    "lag 4, swaps within": Asynchrony(samplers=3, max_lag=4, swap="within"),
    "lag 8, swaps within": Asynchrony(samplers=3, max_lag=8, swap="within"),
}


@dataclass
class SleepEngine:
    """An engine (engines/protocol.py) whose tokens say nothing and take their time."""

    version: int = 0
    steps: int = 0
    rows: dict[int, tuple[Request, int]] = field(default_factory=dict)
    """Of each ticket its request, and the step before its first."""
    ends: list[tuple[int, int]] = field(default_factory=list)
    """(step, ticket) of its last token, the first first."""
    tickets: int = 0
    due: float = 0.0
    """When the step under way ends: sleeping until then makes up for waking late."""

    @property
    def busy(self) -> bool:
        """Whether any answer is under way."""
        return bool(self.rows)

    def submit(self, request: Request) -> int:
        """A ticket; how long the answer will be hangs on the task and the sample alone."""
        normal = dice(f"{request.task}/{request.sample}").gauss(0, 1)
        length = max(1, min(LONGEST, round(exp(log(MEAN) - SIGMA**2 / 2 + SIGMA * normal))))
        begun = len(request.begun.tokens) if request.begun else 0
        if not self.rows:
            self.due = max(self.due, time.monotonic())
        self.due += PREFILL * begun
        self.tickets += 1
        self.rows[self.tickets] = request, self.steps
        heappush(self.ends, (self.steps + (len(request.forced) or length) - begun, self.tickets))
        return self.tickets

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Completion]]:
        """The answers that end with this step."""
        self.steps += 1
        self.due += A + B * len(self.rows)
        time.sleep(max(0.0, self.due - time.monotonic()))
        ended = []
        while self.ends and self.ends[0][0] <= self.steps:
            _, ticket = heappop(self.ends)
            ended.append((ticket, self.drawn(*self.rows.pop(ticket))))
        return ended

    def drawn(self, request: Request, before: int) -> Completion:
        """What there is of an answer. Since it was asked for the weights have been the same."""
        old, n = request.begun, self.steps - before
        new: dict[str, list[Any]] = {"tokens": [1] * n, "version": [self.version] * n}
        new |= {"logp_gen": [-1.0] * n, "logp_policy": [-1.0] * n}
        whole = {name: (getattr(old, name) if old else []) + column for name, column in new.items()}
        return Completion(**whole, text="", stop="eos")

    def withdraw(self) -> list[tuple[int, Request]]:
        """All that is under way, as far as it has come."""
        rows, self.rows, self.ends = self.rows, {}, []
        return [(ticket, replace(row[0], begun=self.drawn(*row))) for ticket, row in rows.items()]

    def release(self, episode: str) -> None:
        """Nothing was kept."""

    def close(self) -> None:
        """Nothing was begun."""

    def load(self, weights: NamedTensors, version: int, *, keep: bool = False) -> str:
        """The digest of the weights, which it then forgets."""
        time.sleep(LOAD)
        self.version = version
        return digest(weights)

    def score(self, tokens: list[int]) -> list[float]:
        """What the sleeping learner says too."""
        return [-1.0] * (len(tokens) - 1)


class SleepLearner:
    """What the loop asks of a learner, asleep."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.update_count, self.step_count, self.microbatch_tokens = seconds, 0, 0, 0
        self.compute_dtype, self.ranks, self.method = torch.float32, ALONE, METHODS["reinforce"].method
        self.population = None

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """4 MB that change with every update."""
        yield "weights", torch.full((1 << 20,), float(self.update_count))

    def canary(self, row: list[int]) -> list[float]:
        """What the sleeping engine says too."""
        return [-1.0] * (len(row) - 1)

    def update(self, batch: Batch) -> Update:
        """Nothing, after a while."""
        time.sleep(self.seconds)
        self.update_count, self.step_count = self.update_count + 1, self.step_count + 1
        nothing = torch.zeros_like(batch.logp_gen)
        return Update(batch, nothing, nothing, torch.ones(len(batch), dtype=torch.bool), {})


class OneToken:
    """What rollouts ask of a chat."""

    def render(self, messages: object, tools: object = ()) -> list[int]:
        """A prompt."""
        return [0, 1]


@dataclass
class Lines:
    """The metrics, in memory."""

    found: list[dict[str, float]] = field(default_factory=list)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keeps a line."""
        self.found.append(dict(metrics))


@dataclass(frozen=True)
class WorkerFactory:
    """Makes a worker in its process."""

    ahead: Asynchrony

    def __call__(self) -> RolloutWorker:
        """The worker."""
        torch.set_num_threads(1)
        rollouts = Rollouts(
            SleepEngine(), cast(Chat, OneToken()), verifier=Number(), context=1 << 20, exact=False
        )
        return RolloutWorker(rollouts, swap=self.ahead.swap, in_order=self.ahead.max_lag <= 1)


def measured(ahead: Asynchrony, updates: int, groups: int = GROUPS) -> dict[str, float]:
    """Seconds of an update, how busy samplers were, and how old tokens were, in a real run of sleepers."""
    tasks = [Task(id=str(n), messages=({"role": "user", "content": ""},), answer="1") for n in range(4096)]
    learner = cast(Learner, SleepLearner(TRAIN if not ahead.max_lag else 4 * TRAIN))
    lines = Lines()
    with tempfile.TemporaryDirectory() as place:
        path = Path(place)
        run_dir = RunDir(path / "run", resume=False)
        publisher = Publisher(learner, [0, 1, 2, 3], SharedMemoryStore())
        sampler = SamplerPool(partial(started, ahead, path), ahead.samplers)
        try:
            loop = OnlineRun(
                learner=learner,
                sampler=sampler,
                publisher=publisher,
                auditors={"": frozenset()},
                stream=Stream(tasks, seed=0),
                samplings={"": Sampling(max_new_tokens=LONGEST)},
                settings=Rollout(groups=groups, group_size=SIZE, max_error_rate=1.0),
                ahead=ahead,
                evaluation=Evaluation(limit=0),
                held_out=[],
                separate=frozenset(),
                run_dir=run_dir,
                journal=Journal(cast(Track, lines), Progress(), lambda kind, data: None),
                pieces=lambda tokens: [""] * len(tokens),
                updates=updates,
                replay=ReplayBuffer(max_lag=1, seed=0),
                tasks=len(tasks),
                record=SampleLog(tokens=1),
            )
            parts = Parts(loop=loop, run_dir=run_dir, checkpoint=lambda state, flight: path)
            with run_dir.recording(), LoopSession(parts) as session:
                session.finish()
        finally:
            sampler.close()
            publisher.close()
            run_dir.close()
    # The first third fills the line; the last updates admit no more.
    shown = lines.found[updates // 3 : updates - ahead.max_lag]
    told = {key: statistics.fmean(x[key] for x in shown) for key in ("samplers/busy", "lag/mean", "lag/max")}
    return told | {"seconds": (shown[-1]["seconds"] - shown[0]["seconds"]) / (len(shown) - 1)}


def started(ahead: Asynchrony, logs: Path, number: int) -> ProcessChannel:
    """A sampler's process."""
    return ProcessChannel(WorkerFactory(ahead), logs / f"{number}.log")


def scaling(samplers: list[int], updates: int) -> None:
    """Prints what an update takes with so many processes, each with as much to do; one run each."""
    print("| samplers | s an update | answers/s a sampler | busy | CPU s an update of the loop's process |")
    print("|---|---|---|---|---|")
    for count in samplers:
        begin = time.process_time()
        ahead = Asynchrony(samplers=count, max_lag=4, swap="within")
        found = measured(ahead, updates, groups=4 * count)
        own = (time.process_time() - begin) / updates
        rate = 4 * SIZE / found["seconds"]
        print(
            f"| {count} | {found['seconds']:.2f} | {rate:.0f} | {found['samplers/busy']:.0%} | {own:.2f} |",
            flush=True,
        )


def main() -> None:
    """Measures each mode so many times, in turn, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--samplers", type=int, nargs="+", help="weak scaling over so many, instead")
    options = parser.parse_args()
    if options.samplers:
        scaling(options.samplers, options.updates)
        return
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for _ in range(options.repeat):
        for mode, ahead in MODES.items():
            found[mode].append(measured(ahead, options.updates))
            print(mode, found[mode][-1], file=sys.stderr, flush=True)
    print("| schedule | s an update | of synchronous | samplers busy | lag (mean of each batch's most) |")
    print("|---|---|---|---|---|")
    sync = statistics.median(run["seconds"] for run in found["synchronous"])
    for mode, runs in found.items():
        seconds = sorted(run["seconds"] for run in runs)
        busy = sorted(run["samplers/busy"] for run in runs)
        middle = statistics.median(seconds)
        old, most = statistics.fmean(run["lag/mean"] for run in runs), max(run["lag/max"] for run in runs)
        print(
            f"| {mode} | {middle:.2f} ({seconds[0]:.2f}–{seconds[-1]:.2f}) | {sync / middle:.2f}× "
            f"| {busy[0]:.0%}–{busy[-1]:.0%} | {old:.1f} ({most:.1f}) |"
        )


if __name__ == "__main__":
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    from sleep import main as of_module  # what processes are sent must have a name that they can import

    of_module()
