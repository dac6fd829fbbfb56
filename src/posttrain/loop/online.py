"""Learning online: tasks → episodes → update → new weights, as a session steps through it.

    admit     consumes a slot for each group (staleness.py), (max_lag + 1) for each group of an update: with
              max_lag 0 everything is drawn by the weights that are then trained
    update    waits for the groups that selection keeps; their slots are free when the new weights are live
    publish   offers the weights to the samplers, which prove that they hold them before a slot is free

Synchronous, one-step-off, asynchronous and interruptible training are this with other numbers of `[async]`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from posttrain.curriculum.curriculum import Supply
from posttrain.curriculum.replay_buffer import ReplayBuffer
from posttrain.curriculum.select import WHY_NOT, by_seat, selection
from posttrain.errors import counted
from posttrain.learner.learner import Learner, Update
from posttrain.loop.central import CentralSource
from posttrain.loop.group_source import GroupSource
from posttrain.loop.loop import Loop, LoopState
from posttrain.loop.weight_sync import Publisher
from posttrain.recipe.asynchrony import Asynchrony
from posttrain.recipe.recipe import SampleLog
from posttrain.recipe.settings import Evaluation, Rollout
from posttrain.rollout.protocol import FinishedGroup, GroupRequest, Sampler
from posttrain.run import samples
from posttrain.run.error_rate import ErrorRate
from posttrain.run.hacking_metrics import auditors_of, hacking_metrics
from posttrain.run.journal import Journal
from posttrain.run.metrics import evaluation_metrics, lag_metrics, rollout_metrics, success_rate
from posttrain.run.rundir import RunDir
from posttrain.run.tables import Groups
from posttrain.types import AnyEpisode, Batch, Episode, RunError, Sampling, Task, Trajectory
from posttrain.verifiers.protocol import TrainerState, Verifier


@dataclass
class OnlineRun(Loop):
    """What a session does with tasks (see loop.py), and the parts for it; made by build.py."""

    learner: Learner
    sampler: Sampler
    publisher: Publisher
    verifier: Verifier | None
    stream: Supply
    sampling: Sampling
    settings: Rollout
    ahead: Asynchrony
    evaluation: Evaluation
    held_out: Sequence[Task]
    run_dir: RunDir
    journal: Journal
    pieces: Callable[[Sequence[int]], list[str]]
    """Each token as text, for the samples."""
    updates: int
    replay: ReplayBuffer
    tasks: int
    """How many there are to learn from."""
    record: SampleLog = field(default_factory=SampleLog)
    publishes: bool = True

    def __post_init__(self) -> None:
        self._groups, self._everyone = Groups(), list[Sequence[AnyEpisode]]()
        self._selected = 0, 0, 0
        self._made: tuple[Batch, Sequence[tuple[int, Episode]], Sequence[Sequence[Episode]]] | None = None
        """The rows that were made of groups last."""
        self._told: Callable[[], None] | None = None
        """Writes the samples of the update that is not published yet."""
        self._errors = ErrorRate(self.settings.max_error_rate, recent=self.progress.recent)
        self.stream.taken = self.progress.taken
        self._auditors = auditors_of(self.verifier)
        self.source = (
            CentralSource if self.learner.ranks.size > 1 and self.ahead.where == "ray" else GroupSource
        )(
            self.sampler,
            self.stream,
            self.sampling,
            self.ahead,
            self.journal,
            self.learner.ranks,
            count=self.settings.groups,
            size=self.settings.group_size,
            state=self._state_of,
            left=lambda: self.updates - self.progress.update,
        )

    @property
    def _trainer_state(self) -> TrainerState:
        """What a reward function may know of the run as it is now."""
        return TrainerState(
            global_step=self.progress.update,
            max_steps=self.updates,
            epoch=self.progress.taken / self.tasks,
        )

    def _state_of(self, number: int) -> TrainerState:
        """What a reward function is told with a group: the same for all groups of an update.

        Of groups that are admitted ahead it follows from their place in line, and so depends on no clock.
        """
        if not self.ahead.max_lag:
            return self._trainer_state
        update = min(number // self.settings.groups, self.updates)
        epoch = update * self.settings.groups / self.tasks
        return TrainerState(global_step=update, max_steps=self.updates, epoch=epoch)

    # ------------------------------------------------------------------ an update

    def begin(self) -> None:
        """The first weights go out, and what was running goes on."""
        self._publish()
        self.source.begin(self.learner.update_count)

    def sample(self) -> Groups:
        """The groups of the next update, once they are judged; RunError if none can be had."""
        with self.journal.timed("sample"):
            kept, dropped = self._collect()
        self.progress.update += 1
        self._count_taken()
        played = [group.members for group in (*kept, *dropped)]
        everyone = self._everyone = [seat for group in played for seat in by_seat(group)]
        metrics = rollout_metrics(everyone, self.learner.update_count, self.evaluation.right)
        metrics |= hacking_metrics(everyone, self._auditors)
        metrics |= {"select/kept": float(len(kept)), "select/dropped": float(len(dropped))}
        metrics |= self.stream.observe([(g[0].task, success_rate(g, self.evaluation.right)) for g in played])
        self.journal.noted |= metrics
        with self._logged(metrics):
            self._count_failures([e for g in everyone for e in g])
            there = [g.episodes for g in (*kept, *dropped)]
            self._record_searches(f"{self.progress.update:06d}", there, self.record.trees)
            if kept:
                self.progress.empty = 0
            else:
                self._nothing_kept()
        # With several ranks as many on each, as a place among them is the number of a group.
        everywhere = self.learner.ranks.size > 1
        self._groups = Groups(seat for group in kept for seat in self._seats(group) if seat or everywhere)
        self._selected = len(kept), len(dropped), len(self._groups)
        return self._groups

    def abandon(self) -> None:
        """Frees the slots of groups that nothing is trained on."""
        self.source.drop()
        super().abandon()

    def batch(self, groups: Sequence[Sequence[Episode]]) -> Batch:
        """Their episodes that were judged, and behind them groups of earlier updates."""
        judged = [[e for e in g if not e.verdict.failed] for g in groups]
        if 0 < (most := max(map(len, judged), default=0)) < self.learner.method.least_group:
            what = f"the method compares the answers of a group, and each has {most} that was judged"
            raise ValueError(f"{what}: leave out whole groups, not answers")
        rows = [(n, e) for n, g in enumerate(judged) for e in g]
        if groups is not self._groups:
            self.journal.noted |= self._metrics_of_others(groups)
        batch, again = self._batch(rows)
        self.journal.noted |= again | self._ages(batch, sum(len(e.trajectories) for _, e in rows))
        self._made = batch, rows, groups
        return batch

    def _metrics_of_others(self, groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
        """Metrics of a program's own choice from the groups that were sampled.

        Of all that were sampled, as selection's are; of the choice alone if it has other rewards.
        """
        known = {
            id(e.trajectory.tokens): e.reward for g in self._everyone for e in g if isinstance(e, Episode)
        }
        as_sampled = all(known.get(id(e.trajectory.tokens)) == e.reward for g in groups for e in g)
        kept, dropped, given = self._selected
        gone = given - sum(map(bool, groups))
        metrics = {"select/kept": float(kept - gone), "select/dropped": float(dropped + max(0, gone))}
        of = self._everyone if as_sampled else groups
        return metrics | rollout_metrics(of, self.learner.update_count, self.evaluation.right)

    def feed(self) -> None:
        """Has samplers go on while the learner is busy."""
        with self.journal.timed("feed"):
            self.source.feed(self.learner.update_count)

    def count(self, update: Update | None) -> None:
        """Counts an update, whose slots are free once its weights are live."""
        self.source.hold(self.learner.update_count)
        if update is None:
            return
        counts = [update.computed.sum(), torch.tensor(len(update.computed)), update.batch.mask.sum()]
        computed, drawn, tokens = self.learner.ranks.sum(torch.stack(counts)).tolist()
        self.journal.noted["select/trained"] = computed / drawn
        self.progress.tokens += tokens
        if self._made and self._made[0].tokens is update.batch.tokens:
            _, rows, groups = self._made
            self._keep_groups(rows)
            self._told = partial(self._record, rows, groups, update)

    def publish(self) -> None:
        """Offers the weights to the samplers; then what they drew for this update is written down."""
        with self.journal.timed("publish"):
            self._publish()
        if self._told:
            self._told()
        self._told = self._made = None
        self._groups, self._everyone = Groups(), []

    def state(self) -> LoopState:
        """How far it is, and what samplers have in hand; all samples are then written."""
        with self.journal.timed("checkpoint"):
            self.run_dir.wait()
        with self.journal.timed("feed"):
            flight = self.source.flight(self.learner.update_count)
        self._count_taken()  # what is running has been taken too
        return self._state(), flight

    def before(self) -> LoopState | None:
        """How far it is; None where samplers are ahead of it."""
        return None if self.ahead.max_lag else super().before()

    def check_end(self) -> None:
        """RunError if nothing was trained; all samples are then written."""
        self.run_dir.wait()
        if self.updates and not self.learner.update_count:
            made = counted(self.updates, "update")
            raise RunError(f"train {made}", f"nothing was trained: {self._why_nothing()}")

    def _record(
        self, rows: Sequence[tuple[int, Episode]], groups: Sequence[Sequence[Episode]], update: Update
    ) -> None:
        number, here = self.progress.update, [list(g) for g in groups if g]
        share = samples.draw_groups(here, self.record.tokens, str(number))
        trained = samples.columns([t for _, e in rows for t in e.trajectories], update)
        self.run_dir.samples(f"{number:06d}", samples.lines(number, here, share, self.pieces, trained))

    def _record_searches(self, name: str, groups: Sequence[Sequence[Episode]], most: int) -> None:
        if rows := samples.searches(name, groups, most, self.evaluation.right):
            self.run_dir.samples(name, rows, "trees")

    def _batch(self, rows: Sequence[tuple[int, Episode]]) -> tuple[Batch, dict[str, float]]:
        """These rows, and behind them those drawn again from earlier updates; how old the batch then is."""
        own = [t for _, e in rows for t in e.trajectories]
        if not self.settings.replay:
            groups = [n for n, e in rows for _ in e.trajectories]
            episodes = [place for place, (_, e) in enumerate(rows) for _ in e.trajectories]
            return Batch.of(own, groups, episodes if len(own) > len(rows) else None), {}
        again = self.replay.draw(self.settings.replay, self.progress.update)
        first = 1 + max((n for n, _ in rows), default=-1)
        old = [(first + n, t) for n, group in enumerate(again) for t in group]
        batch = Batch.of([*own, *(t for _, t in old)], [*(n for n, _ in rows), *(n for n, _ in old)])
        return batch, {"replay/groups": float(len(again))}

    def _keep_groups(self, rows: Sequence[tuple[int, Episode]]) -> None:
        """What later updates may draw again."""
        groups: dict[int, list[Trajectory]] = {}
        for number, episode in rows if self.settings.replay else ():
            groups.setdefault(number, []).append(episode.trajectory)
        self.replay.add(self.progress.update, list(groups.values()))

    def _ages(self, batch: Batch, own: int) -> dict[str, float]:
        """How old the tokens are, replayed ones included; RunError for one of its own beyond the bound."""
        lag = self.learner.update_count - batch.version
        ages, bound = lag[:own][batch.mask[:own]], self.source.admission.bound
        oldest = int(ages.max()) if len(ages) else 0
        if oldest > bound:
            age = counted(oldest, "update")
            raise RunError("update", f"a token is {age} old and may be {bound}: call sample() for new ones")
        return lag_metrics(Counter(lag[batch.mask].tolist())) if self.settings.replay else {}

    def _count_taken(self) -> None:
        self.progress.taken, self.progress.admitted = self.stream.taken, self.source.admission.admitted

    def _collect(self) -> tuple[list[FinishedGroup], list[FinishedGroup]]:
        """(kept, dropped) groups, each in the order in which they were admitted."""
        self._chosen = selection(
            self.settings.select, getattr(self.learner.method, "accept", self.evaluation.right)
        )

        def keep(group: Sequence[AnyEpisode]) -> bool:
            return bool(group) and any(map(self._learns, by_seat(group)))

        rounds = self.settings.max_rounds if self.settings.select != "all" else 1
        return self.source.collect(keep, rounds, self.learner.update_count)

    def _seats(self, group: FinishedGroup) -> list[list[Episode]]:
        """A group's seats; empty what selection drops, and what lies on another rank."""
        here = {
            seat: [e for e in group.episodes if e.seat == seat] for seat in {e.seat for e in group.members}
        }
        return [found if self._learns(found) else [] for _, found in sorted(here.items())]

    def _learns(self, group: Sequence[AnyEpisode]) -> bool:
        """Whether selection keeps a group, or a seat of it; True of one that is on another rank."""
        judged = sum(not e.verdict.failed for e in group)
        return not group or (judged >= self.learner.method.least_group and self._chosen(group))

    @contextmanager
    def _logged(self, metrics: Mapping[str, float]) -> Iterator[None]:
        """What ends the run within comes after the line that shows why."""
        try:
            yield
        except RunError:
            line = self.line({**self.journal.noted, **metrics})
            self.journal.log(self.learner.step_count, self.learner.update_count, line)
            raise

    def _count_failures(self, episodes: Sequence[AnyEpisode]) -> None:
        self._errors.see(episodes)
        self.progress.recent = self._errors.recent

    def _nothing_kept(self) -> None:
        self.source.drop()
        self.progress.empty += 1
        if self.progress.empty >= 3:
            raise RunError(
                f"update {self.progress.update}",
                f"no group was kept in {self.progress.empty} updates in a row: {self._why_nothing()}",
            )

    def _why_nothing(self) -> str:
        recent, select = self.progress.recent, self.settings.select
        if set(recent) == {"x"}:
            return (
                f"none of the last {len(recent)} episodes could be judged; first cause: {self._errors.first}"
            )
        why = WHY_NOT.get(select, "no group was kept")
        other = ", or set rollout.select to 'all' and leave rollout.max_rounds out" if select != "all" else ""
        return (
            f"with rollout.select {select!r} {why}, or none could be judged; "
            f"make the tasks easier or harder{other}"
        )

    def _publish(self) -> None:
        self.publisher.publish(self.sampler)
        while self.ahead.pace == "steps" and self.sampler.oldest_version < self.learner.update_count:
            self.source.hear()

    # ------------------------------------------------------------------ looking

    def evaluate(self) -> dict[str, float]:
        """Metrics on the held-out tasks; the answers go to samples/eval_*.jsonl."""
        if not self.held_out:
            return {}
        sampling = replace(self.sampling, temperature=self.evaluation.temperature)
        requests = [
            GroupRequest(number=n, task=task, size=1, sampling=sampling, state=self._trainer_state)
            for n, task in enumerate(self.held_out)
            if self.source.is_own(n)
        ]
        with self.journal.timed("eval"):
            found = self.sampler.evaluate(
                requests, lambda done: self.journal.show("eval", {"done": done, "total": len(requests)})
            )
        groups = [found[each.number] for each in requests]
        told = [(r.number, [e.summary() for e in found[r.number]]) for r in requests]
        seen = dict(self.source.share(told, "evaluations"))
        episodes = [e for n in sorted(seen) for e in seen[n]]
        update, share = self.progress.update, samples.draw_groups(groups, self.record.tokens, "eval")
        self.run_dir.samples(f"eval_{update:06d}", samples.lines(update, groups, share, self.pieces))
        self._record_searches(f"eval_{update:06d}", groups, 8 * self.record.trees)
        metrics = evaluation_metrics(episodes, self.evaluation.right, self._auditors)
        with self._logged(metrics):
            self._count_failures(episodes)
        return metrics

    def line(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics of an update with those of how fast it was, and what samplers did."""
        metrics, spent = dict(metrics), self.journal.phases
        tokens = metrics.pop("length/total", 0.0)
        if tokens:
            # Ahead of the learner they were drawn while it did anything.
            seconds = sum(spent.values()) if self.ahead.max_lag else spent["sample"]
            metrics["speed/sample_tokens"] = tokens / seconds
        if tokens and spent["train"]:
            metrics["speed/train_tokens"] = tokens / spent["train"]
        return super().line(metrics | self.source.work())
