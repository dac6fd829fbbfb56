"""The online loop: tasks → episodes → update → new weights, until the last update.

    sample    consumes a slot for each group; slots = groups of one update, so that everything is
              drawn by the weights that are then trained (max_lag 0)
              waits for the engine, environments and verifiers, each of which has a deadline
    update    waits for the groups that selection keeps; frees their slots when the new weights are live
    publish   hands the weights to the engine and proves that they arrived

Everything that decides what happens next is in `Progress` and the learner, so a run that is
killed and resumed from a checkpoint makes the very numbers of one that was not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from posttrain.engines.protocol import Engine
from posttrain.learner.learner import Learner, Update
from posttrain.runtime.curriculum import Supply
from posttrain.runtime.error_rate import ErrorRate
from posttrain.runtime.hacking import auditors_of, hacking_metrics
from posttrain.runtime.handover import DRAWN, hand_over
from posttrain.runtime.journal import Journal, Progress, stop_requested
from posttrain.runtime.metrics import evaluation_metrics, rollout_metrics, success_rate
from posttrain.runtime.replay import Replay
from posttrain.runtime.rollout import Rollouts
from posttrain.runtime.rundir import RunDir
from posttrain.runtime.select import SELECT, WHY_NOT, selection
from posttrain.runtime.stream import dice
from posttrain.types import Batch, Episode, RunError, Sampling, Task, Trajectory
from posttrain.verifiers.protocol import TrainerState

COMPUTED = ("logp", "entropy")
"""Columns of samples that are there where the update computed the row."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What one update is made of, and how its episodes are run and judged."""

    groups: int = 8
    """Tasks an update learns from."""
    group_size: int = 8
    """Episodes of each task (K, or G)."""
    select: str = "all"
    """all; varied: only groups whose rewards differ; or accepted: only those with an answer worth imitating.
    New tasks are drawn for groups that are dropped."""
    max_rounds: int = 4
    """How often new tasks are drawn before an update goes on with the groups it has."""
    replay: int = 0
    """Groups of earlier updates that each update is trained on again, besides its own."""
    replay_lag: int = 4
    """Updates after which a group is not drawn again."""
    workers: int = 2
    """Processes for verifiers and environments that are not ours."""
    deadline_s: float = 10.0
    """Seconds after which a verifier or an environment is killed; the episode is then masked."""
    memory_mb: int = 4096
    """What one such process may take; a judge or reward model of billions of parameters needs more."""
    max_error_rate: float = 0.2
    """The run stops when more than this share of the last 512 episodes could not be judged."""

    def __post_init__(self) -> None:
        if self.replay < 0:
            raise ValueError(f"replay must be 0 (none) or more, not {self.replay}")
        for name in ("groups", "group_size", "max_rounds", "replay_lag", "workers", "memory_mb"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if self.select not in SELECT:
            raise ValueError(f"select must be one of {', '.join(SELECT)}, not {self.select!r}")
        if self.deadline_s <= 0:
            raise ValueError(f"deadline_s must be above 0, not {self.deadline_s}")
        if not 0 <= self.max_error_rate <= 1:
            raise ValueError(f"max_error_rate must lie in [0, 1], not {self.max_error_rate}")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out tasks, answered before, during and after training."""

    every: int = 0
    """Updates between evaluations; 0: only before the first and after the last."""
    limit: int = 200
    """Tasks; 0 leaves evaluation out."""
    temperature: float = 0.0
    """0 takes the most likely token."""
    right: float = 1.0
    """An answer whose verdict is neither "right" nor "wrong" counts as right from this reward on."""

    def __post_init__(self) -> None:
        if min(self.every, self.limit, self.temperature) < 0:
            raise ValueError("every, limit and temperature must be 0 or more")


@dataclass
class OnlineRun:
    """The parts that a loop drives; made by runtime.local."""

    learner: Learner
    engine: Engine
    rollouts: Rollouts
    stream: Supply
    sampling: Sampling
    settings: Rollout
    evaluation: Evaluation
    held_out: Sequence[Task]
    run_dir: RunDir
    journal: Journal
    pieces: Callable[[Sequence[int]], list[str]]
    """Each token as text, for the samples."""
    save: Callable[[], None]
    updates: int
    save_every: int
    canary: list[int]
    replay: Replay
    tasks: int
    """How many there are to learn from."""
    least_group: int = 1
    """Judged episodes that a group must have for its credit to be defined."""
    accept: float = 1.0
    """The least reward of an answer worth imitating, for settings.select = "accepted"."""
    recorded: int = 0
    """Tokens of an update, or of an evaluation, that samples/ is to hold, about; 0: all."""

    def __post_init__(self) -> None:
        self._errors = ErrorRate(self.settings.max_error_rate, recent=self.progress.recent)
        self.stream.taken = self.progress.taken
        self._auditors = auditors_of(self.rollouts.verifier)

    @property
    def progress(self) -> Progress:
        """How far the loop is."""
        return self.journal.progress

    @property
    def _state(self) -> TrainerState:
        """What a reward function may know of it: the same for all groups of an update."""
        return TrainerState(
            global_step=self.progress.update,
            max_steps=self.updates,
            epoch=self.progress.taken / self.tasks,
        )

    # ------------------------------------------------------------------ the loop

    def run(self) -> dict[str, float]:
        """Trains to the last update; the metrics of the last evaluation.

        Raises RunError after saving when SIGTERM or Ctrl-C asks it to stop, and at the end of a run that
        trained nothing.
        """
        last: dict[str, float] = {}
        with stop_requested() as stopped, self.run_dir.recording():
            self._publish()
            if self.progress.update == 0 and self.held_out:
                last = self._evaluate()
                self._log(last)
            while self.progress.update < self.updates:
                metrics = self._one_update()
                update, final = self.progress.update, self.progress.update == self.updates
                if self.held_out and (
                    final or (self.evaluation.every and update % self.evaluation.every == 0)
                ):
                    last = self._evaluate()
                    metrics |= last
                self._log(metrics)
                if final or stopped() or (self.save_every and update % self.save_every == 0):
                    with self.journal.timed("checkpoint"):
                        self.run_dir.settle()
                        self.save()
                if stopped() and not final:
                    raise RunError(
                        f"stopped on request after update {update} of {self.updates}; "
                        "all of it is saved, go on with --resume"
                    )
        if self.updates and not self.learner.update_count:
            raise RunError(f"nothing was trained in {self.updates} updates: {self._why_nothing()}")
        return last

    def _one_update(self) -> dict[str, float]:
        with self.journal.timed("sample"):
            kept, dropped = self._collect()
        self.progress.update += 1
        self.progress.taken = self.stream.taken
        metrics = rollout_metrics([*kept, *dropped], self.learner.update_count, self.evaluation.right)
        metrics |= hacking_metrics([*kept, *dropped], self._auditors)
        metrics |= {"select/kept": float(len(kept)), "select/dropped": float(len(dropped))}
        metrics |= self.stream.observe(
            [(g[0].task, success_rate(g, self.evaluation.right)) for g in (*kept, *dropped)]
        )
        self._count_failures([e for g in (*kept, *dropped) for e in g], metrics)
        if not kept:
            self._nothing_kept()
            return metrics
        self.progress.empty = 0
        rows = [(n, e) for n, g in enumerate(kept) for e in g if not e.verdict.failed]
        batch, again = self._batch(rows)
        metrics |= again
        with self.journal.timed("train"):
            update = self.learner.update(batch)
        metrics["select/trained"] = float(update.computed.double().mean())
        self.progress.tokens += int(update.batch.mask.sum())
        with self.journal.timed("publish"):
            self._publish()
        self._record(kept, rows, update)
        return metrics | update.metrics

    def _batch(self, rows: Sequence[tuple[int, Episode]]) -> tuple[Batch, dict[str, float]]:
        """These rows, and behind them those drawn again from earlier updates; how old the batch then is."""
        own = [e.trajectory for _, e in rows]
        if not self.settings.replay:
            return Batch.of(own, [n for n, _ in rows]), {}
        again = self.replay.draw(self.settings.replay, self.progress.update)
        groups: dict[int, list[Trajectory]] = {}
        for number, episode in rows:
            groups.setdefault(number, []).append(episode.trajectory)
        self.replay.add(self.progress.update, list(groups.values()))
        old = [(1 + max(groups) + n, t) for n, group in enumerate(again) for t in group]
        batch = Batch.of([*own, *(t for _, t in old)], [*(n for n, _ in rows), *(n for n, _ in old)])
        lag = self.learner.update_count - batch.version[batch.mask]
        return batch, {
            "replay/groups": float(len(again)),
            "lag/mean": float(lag.float().mean()),
            "lag/max": float(lag.max()),
        }

    def _collect(self) -> tuple[list[list[Episode]], list[list[Episode]]]:
        """(kept, dropped) groups, each in the order in which they were admitted."""
        keep, wanted = selection(self.settings.select, self.accept), self.settings.groups
        kept: list[list[Episode]] = []
        dropped: list[list[Episode]] = []
        for _ in range(self.settings.max_rounds if self.settings.select != "all" else 1):
            # A round is admitted whole and finished whole, so that what the engine computes together
            # does not depend on how fast a verifier was.
            numbers = []
            for _ in range(wanted - len(kept)):
                epoch, task = self.stream.take()
                size = self.settings.group_size
                numbers.append(self.rollouts.open(task, size, self.sampling, epoch=epoch, state=self._state))
            complete: dict[int, list[Episode]] = {}
            while self.rollouts.busy:
                complete.update(self.rollouts.step())
                self.journal.show("sample", {"done": len(kept) + len(complete), "total": wanted})
            for group in (complete[n] for n in numbers):
                judged = sum(not e.verdict.failed for e in group)
                (kept if judged >= self.least_group and keep(group) else dropped).append(group)
            if len(kept) >= wanted:
                break
        return kept, dropped

    def _count_failures(self, episodes: Sequence[Episode], metrics: Mapping[str, float]) -> None:
        try:
            self._errors.see(episodes)
        except RunError:
            self._log(metrics)  # the line that shows why
            raise
        self.progress.recent = self._errors.recent

    def _nothing_kept(self) -> None:
        self.progress.empty += 1
        if self.progress.empty >= 3:
            raise RunError(
                f"no group was kept in {self.progress.empty} updates in a row: {self._why_nothing()}"
            )

    def _why_nothing(self) -> str:
        recent, select = self.progress.recent, self.settings.select
        if set(recent) == {"x"}:
            return (
                f"none of the last {len(recent)} episodes could be judged; first cause: {self._errors.first}"
            )
        return (
            f"with rollout.select {select!r} {WHY_NOT[select]}, or none could be judged; "
            "make the tasks easier or harder, or set rollout.select to 'all'"
        )

    def _publish(self) -> None:
        drawn = min(DRAWN, self.sampling.max_new_tokens)
        hand_over(self.learner, self.engine, self.learner.update_count, self.canary, drawn)

    # ------------------------------------------------------------------ looking

    def _evaluate(self) -> dict[str, float]:
        """Metrics on the held-out tasks; the answers go to samples/eval_*.jsonl."""
        sampling = replace(self.sampling, temperature=self.evaluation.temperature)
        with self.journal.timed("eval"):
            groups = self.rollouts.run(
                self.held_out,
                1,
                sampling,
                lambda done: self.journal.show("eval", {"done": done, "total": len(self.held_out)}),
                self._state,
            )
        episodes = [e for g in groups for e in g]
        update, chosen = self.progress.update, drawn(groups, self.recorded, "eval")
        self.run_dir.samples(
            f"eval_{update:06d}", lambda: [self._row(update, n, e) for n in chosen for e in groups[n]]
        )
        metrics = evaluation_metrics(episodes, self.evaluation.right)
        self._count_failures(episodes, metrics)
        return metrics

    def _log(self, metrics: Mapping[str, float]) -> None:
        metrics, spent = dict(metrics), self.journal.phases
        tokens = metrics.pop("length/total", 0.0)
        if tokens:
            metrics["speed/sample_tokens"] = tokens / spent["sample"]
        if tokens and spent["train"]:
            metrics["speed/train_tokens"] = tokens / spent["train"]
        self.journal.log(self.learner.step_count, self.learner.update_count, metrics)

    def _record(
        self, kept: Sequence[Sequence[Episode]], rows: Sequence[tuple[int, Episode]], trained: Update
    ) -> None:
        """Has samples/ written of an update, in whole groups."""
        update, place = self.progress.update, {id(e): i for i, (_, e) in enumerate(rows)}
        chosen = drawn(kept, self.recorded, f"samples/{update}")
        batch = trained.batch
        columns = {
            "logp": trained.logp,
            "entropy": trained.entropy,
            "advantage": batch.advantage,
            "logp_ref": batch.logp_ref,
        }
        held = {name: column.cpu() for name, column in columns.items() if column is not None}
        said = trained.computed.tolist()

        def lines() -> Iterator[dict[str, Any]]:
            for number in chosen:
                for episode in kept[number]:
                    row, i = self._row(update, number, episode), place.get(id(episode))
                    if i is not None:
                        start, stop = episode.trajectory.prompt_length, len(episode.trajectory.tokens)
                        own = held if said[i] else {k: c for k, c in held.items() if k not in COMPUTED}
                        row |= {name: _rounded(column[i, start:stop]) for name, column in own.items()}
                    yield row

        self.run_dir.samples(f"{update:06d}", lines)

    def _row(self, update: int, group: int, episode: Episode) -> dict[str, Any]:
        t, v = episode.trajectory, episode.verdict
        start = t.prompt_length
        return {
            "update": update,
            "task": episode.task.id,
            "group": group,
            "sample": episode.sample,
            "prompt": "".join(self.pieces(t.tokens[:start])),
            "answer": episode.task.answer,
            "pieces": self.pieces(t.tokens[start:]),
            "sampled": t.sampled[start:],
            "logp_gen": _rounded(t.logp_gen[start:]),
            "logp_policy": _rounded(t.logp_policy[start:]),
            "reward": _rounded(t.reward[start:]),
            "version": t.version[start:],
            "score": v.score,
            "label": v.label,
            "reason": v.reason,
            "parts": dict(v.parts),
            "stop": episode.stop,
            "turns": episode.turns,
        }


def _rounded(values: Sequence[float] | torch.Tensor) -> list[float]:
    # Of a double that is a whole number over 1e5 the shortest decimal has five places.
    return ((torch.as_tensor(values, dtype=torch.float64) * 1e5).round() / 1e5).tolist()


def drawn(groups: Sequence[Sequence[Episode]], tokens: int, key: str) -> list[int]:
    """The groups that are recorded, in their order: all, or a random share of about so many tokens.

    Each group is as likely, however long it is, and one is there in any case. Which ones depends on the key
    and on the sizes alone, and of two shares by one key the larger holds the smaller.
    """
    size = sum(len(e.trajectory.tokens) for group in groups for e in group)
    if not tokens or size <= tokens:
        return list(range(len(groups)))
    draw = dice(key).random
    order = sorted((draw(), place) for place in range(len(groups)))
    return sorted(place for _, place in order[: max(1, len(groups) * tokens // size)])
