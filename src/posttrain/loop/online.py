"""Training online: tasks → episodes → update → new weights, as a session steps through it.

    admit     consumes a slot for each group; there are (max_lag + 1) slots for each group of an update
              (staleness.py), so with max_lag 0 the weights that sample a group are those that it trains
    update    waits for the groups that selection keeps; their slots are free once samplers have these weights
    publish   offers the weights to the samplers, which prove that they have them before a slot is free

Synchronous, one-step-off, asynchronous and interruptible training differ in the numbers of `[async]` alone.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress

import torch

from posttrain.curriculum.curriculum import Supply
from posttrain.curriculum.replay_buffer import ReplayBuffer, Row
from posttrain.curriculum.select import WHY_NOT, by_seat, selection
from posttrain.envs.tools.call import GREEDY
from posttrain.errors import counted
from posttrain.learner.learner import Learner, Update
from posttrain.loop.central import CentralSource
from posttrain.loop.evaluator import Evaluator
from posttrain.loop.group_source import GroupSource
from posttrain.loop.loop import Loop, LoopState
from posttrain.loop.population import PopulationSource
from posttrain.loop.teacher_prompts import TeacherPrompts
from posttrain.loop.weight_sync import Publisher
from posttrain.methods.policy_gradient import RewardPart
from posttrain.plan.dataset_rows import Group, numbered
from posttrain.plan.teacher_server import TeacherServer
from posttrain.recipe.asynchrony import Asynchrony
from posttrain.recipe.recipe import SampleLog
from posttrain.recipe.settings import Evaluation, Rollout
from posttrain.rollout.protocol import FinishedGroup, Sampler
from posttrain.run import samples
from posttrain.run.error_rate import ErrorRate
from posttrain.run.hacking_metrics import hacking_metrics
from posttrain.run.journal import Journal
from posttrain.run.metrics import lag_metrics, rollout_metrics, success_rate
from posttrain.run.probes import rare_tokens
from posttrain.run.rundir import RunDir
from posttrain.run.tables import Groups
from posttrain.types import GIVEN, TRUNCATED, AnyEpisode, Batch, Episode, RunError, Sampling, Task
from posttrain.verifiers.protocol import TrainerState

Rows = Sequence[tuple[int, Episode]]
"""Judged episodes, each with the number of its group."""


@dataclass
class OnlineRun(Loop):
    """The loop of a session that trains on tasks (see loop.py), and its parts; built by build.py."""

    learner: Learner
    sampler: Sampler
    publisher: Publisher
    auditors: Mapping[str, frozenset[str]]
    """By the name of a source: the parts of its verifier that only record."""
    stream: Supply
    samplings: Mapping[str, Sampling]
    """By the name of a source."""
    settings: Rollout
    ahead: Asynchrony
    evaluation: Evaluation
    held_out: Sequence[Task]
    separate: frozenset[str]
    """Names of the sources that are evaluated alone ([[eval.task]])."""
    run_dir: RunDir
    journal: Journal
    pieces: Callable[[Sequence[int]], list[str]]
    """Splits tokens into their texts, for the samples."""
    updates: int
    replay: ReplayBuffer
    tasks: int
    """Number of training tasks."""
    teacher_prompts: TeacherPrompts | None = None
    teachers: Mapping[str, int] = field(default_factory=dict)
    """By the name of a source: the number of the reference that its rows are compared with."""
    answers_of_data: Callable[[int], Sequence[Group]] | None = None
    """Returns `rollout.given_answers` answers for an update, counted from 1; None: there are none."""
    record: SampleLog = field(default_factory=SampleLog)
    teacher: TeacherServer | None = None
    publishes: bool = True
    sleeps: bool = False
    is_central: bool = False
    """True if the samplers of rank 0 draw for several ranks."""

    def __post_init__(self) -> None:
        self._groups, self._sampled = Groups(), list[Sequence[AnyEpisode]]()
        self._selected = 0, 0, 0
        """Groups of the latest `sample()`: kept, dropped, and returned."""
        self._last_batch: tuple[Batch, Rows, Sequence[Sequence[Episode]]] | None = None
        """The latest batch, with the rows and groups from which it was made."""
        self._write_samples: Callable[[], None] | None = None
        """Writes the samples of the update that is not published yet."""
        self._errors = ErrorRate(self.settings.max_error_rate, recent=self.progress.recent)
        self.stream.taken = self.progress.taken
        kind: Callable[..., GroupSource] = CentralSource if self.is_central else GroupSource
        if self.learner.population:
            kind = partial(PopulationSource, publish=self._publish_member)
        self.source = kind(
            self.sampler,
            self.stream,
            self.samplings,
            self.ahead,
            self.journal,
            self.learner.ranks,
            count=self.settings.groups,
            size=self.settings.group_size,
            greedy=self._asks_greedy,
            state=self._state_of,
            left=lambda: self.updates - self.progress.update,
        )
        self.evaluator = Evaluator(
            sampler=self.sampler,
            tasks=self.held_out,
            samplings=self.samplings,
            auditors=self.auditors,
            separate=self.separate,
            settings=self.evaluation,
            run_dir=self.run_dir,
            journal=self.journal,
            pieces=self.pieces,
            record=self.record,
            is_own=self.source.is_own,
            share=self.source.share,
        )

    @property
    def _trainer_state(self) -> TrainerState:
        """The trainer state that reward functions see now."""
        return TrainerState(
            global_step=self.progress.update,
            max_steps=self.updates,
            epoch=self.progress.taken / self.tasks,
        )

    def _state_of(self, number: int) -> TrainerState:
        """Return the trainer state that reward functions see with this group: equal for all of an update.

        For groups that are admitted ahead it follows from their number, so it does not depend on timing.
        """
        if not self.ahead.max_lag:
            return self._trainer_state
        update = min(number // self.settings.groups, self.updates)
        epoch = update * self.settings.groups / self.tasks
        return TrainerState(global_step=update, max_steps=self.updates, epoch=epoch)

    # ------------------------------------------------------------------ an update

    def begin(self) -> None:
        """Publish the first weights; continue the groups of a checkpoint."""
        self._publish()
        self.source.begin(self.learner.update_count)

    def sample(self) -> Groups:
        """Return the groups of the next update, once they are judged; raise RunError if there are none."""
        if self.sampler.oldest_version < 0 or self.publisher.is_overtaken:  # asleep, as after a failure
            self._publish()
        with self.journal.timed("sample"):
            kept, dropped = self._collect()
        self.progress.update += 1
        self._count_taken()
        played = [group.members for group in (*kept, *dropped)]
        sampled = self._sampled = [seat for group in played for seat in by_seat(group)]
        metrics = self._rollout_metrics(sampled)
        metrics |= rare_tokens(sampled, self.progress.update, self.progress.common_tokens)
        metrics |= {"select/kept": float(len(kept)), "select/dropped": float(len(dropped))}
        if self.settings.mask_truncated:
            metrics["select/truncated"] = float(sum(self._is_masked(e) for g in sampled for e in g))
        metrics |= self.stream.observe([(g[0].task, success_rate(g, self.evaluation.right)) for g in played])
        self.journal.pending |= metrics
        with self._logged(metrics):
            self._count_failures([e for g in sampled for e in g])
            episodes = [g.episodes for g in (*kept, *dropped)]
            self._record_searches(f"{self.progress.update:06d}", episodes, self.record.trees)
            self.progress.empty = 0 if kept else self.progress.empty + 1
            if not kept:
                self.source.drop()
            if self.progress.empty >= 3:
                raise RunError(
                    f"update {self.progress.update}",
                    f"no group was kept in {self.progress.empty} updates in a row: {self._why_nothing()}",
                )
        # All ranks have the same number of groups, since the place of a group is its number.
        several = self.learner.ranks.size > 1
        self._groups = Groups(seat for group in kept for seat in self._seats(group) if seat or several)
        self._selected = len(kept), len(dropped), len(self._groups)
        return self._groups

    def abandon(self) -> None:
        """Free the slots of the groups that are not trained on."""
        self.source.drop()
        super().abandon()

    def batch(self, groups: Sequence[Sequence[Episode]]) -> Batch:
        """Return the rows of their judged episodes, then replayed groups, then given answers.

        With rollout.mask_truncated those that were cut off are left out too.
        """
        judged = [[e for e in g if not (e.verdict.failed or self._is_masked(e))] for g in groups]
        if 0 < (most := max(map(len, judged), default=0)) < self.learner.method.least_group:
            problem = f"the method compares the answers of a group, and each has {most} that was judged"
            raise ValueError(f"{problem}: leave out whole groups, not answers")
        rows = [(n, e) for n, g in enumerate(judged) for e in g]
        if groups is not self._groups:
            self.journal.pending |= self._metrics_of_others(groups)
        batch, again = self._batch(rows, len(judged))
        if "states" in self.learner.method.asks and not len(batch):  # ranks exchange equal columns
            batch = replace(batch, turn_state=torch.zeros_like(batch.tokens))
        batch = self.add_teacher(batch)
        self.journal.pending |= again | self._check_ages(batch, sum(len(e.trajectories) for _, e in rows))
        self._last_batch = batch, rows, groups
        return batch

    def _metrics_of_others(self, groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
        """Return the metrics of groups that a program chose or made, in place of those of `sample`.

        They cover all sampled groups, as after selection; or the program's alone, if it changed rewards.
        """
        episodes = (e for g in self._sampled for e in g if isinstance(e, Episode))
        rewards = {id(e.trajectory.tokens): e.reward for e in episodes}
        as_sampled = all(rewards.get(id(e.trajectory.tokens)) == e.reward for g in groups for e in g)
        kept, dropped, count = self._selected
        removed = count - sum(map(bool, groups))
        metrics = {"select/kept": float(kept - removed), "select/dropped": float(dropped + max(0, removed))}
        return metrics | self._rollout_metrics(self._sampled if as_sampled else groups)

    def _rollout_metrics(self, groups: Sequence[Sequence[AnyEpisode]]) -> dict[str, float]:
        """Return the metrics of groups; those of a source with a name are also under task/NAME/."""

        def measure(groups: Sequence[Sequence[AnyEpisode]], auditors: frozenset[str]) -> dict[str, float]:
            metrics = rollout_metrics(groups, self.learner.update_count, self.evaluation.right)
            return metrics | hacking_metrics(groups, auditors)

        own_auditors = {name: parts for name, parts in self.auditors.items() if name not in self.separate}
        metrics = measure(groups, frozenset().union(*own_auditors.values()))
        for name, auditors in own_auditors.items():
            if name and (groups_of_source := [g for g in groups if g and g[0].task.dataset == name]):
                own_metrics = measure(groups_of_source, auditors) | {"groups": float(len(groups_of_source))}
                own_metrics.pop("length/total", None)  # for the speed of the whole update
                metrics |= {f"task/{name}/{key}": value for key, value in own_metrics.items()}
        return metrics

    def feed(self) -> None:
        with self.journal.timed("feed"):
            self.source.feed(self.learner.update_count)

    def make_room(self) -> None:
        if self.sleeps and self.sampler.oldest_version >= 0:
            with self.journal.timed("publish"):
                self.sampler.sleep()
                self.learner.ranks.gather(None, "memory")  # that of several ranks may be one server's

    def count(self, update: Update | None) -> None:
        """Count an update; its slots are free once samplers have its weights."""
        self.source.hold(self.learner.update_count)
        if update is None:
            return
        counts = [update.computed.sum(), torch.tensor(len(update.computed)), update.batch.mask.sum()]
        computed, total, tokens = self.learner.ranks.sum(torch.stack(counts)).tolist()
        if not self.learner.population:  # whose rows go through no model after they are sampled
            self.journal.pending["select/trained"] = computed / total
        self.progress.tokens += tokens
        if self._last_batch and self._last_batch[0].tokens is update.batch.tokens:
            _, rows, groups = self._last_batch
            self._add_to_replay(rows)
            self._write_samples = partial(self._record, rows, groups, update)

    def publish(self) -> None:
        """Offer the weights to the samplers; then write the samples of this update."""
        with self.journal.timed("publish"):
            self._publish()
        if self._write_samples:
            self._write_samples()
        self._write_samples = self._last_batch = None
        self._groups, self._sampled = Groups(), []

    def state(self) -> LoopState:
        """Return the progress and the groups of samplers, after all samples are written."""
        with self.journal.timed("checkpoint"):
            self.run_dir.wait()
        with self.journal.timed("feed"):
            flight = self.source.flight(self.learner.update_count)
        self._count_taken()  # including running groups
        return self._state(), flight

    def before(self) -> LoopState | None:
        """Return the progress; None if samplers run ahead."""
        return None if self.ahead.max_lag else super().before()

    def check_end(self) -> None:
        """Wait until all samples are written; raise RunError if the run has trained on nothing."""
        self.run_dir.wait()
        if self.updates and not self.learner.update_count:
            operation = f"train {counted(self.updates, 'update')}"
            raise RunError(operation, f"nothing was trained: {self._why_nothing()}")

    def _record(self, rows: Rows, groups: Sequence[Sequence[Episode]], update: Update) -> None:
        number, recorded = self.progress.update, [list(g) for g in groups if g]
        places = samples.draw_groups(recorded, self.record.tokens, str(number))
        trained = samples.columns([t for _, e in rows for t in e.trajectories], update)
        self.run_dir.samples(f"{number:06d}", samples.lines(number, recorded, places, self.pieces, trained))

    def _record_searches(self, name: str, groups: Sequence[Sequence[Episode]], most: int) -> None:
        if rows := samples.searches(name, groups, most, self.evaluation.right):
            self.run_dir.samples(name, rows, "trees")

    def _batch(self, rows: Rows, count: int) -> tuple[Batch, dict[str, float]]:
        """Return the rows of `count` groups, then replayed and given ones, and metrics of the replay."""
        new = [row for _, e in rows for row in self._rows_of(e)]
        if not self.settings.replay:
            groups = [n for n, e in rows for _ in e.trajectories]
            episodes = [place for place, (_, e) in enumerate(rows) for _ in e.trajectories]
            answers, numbers = self._given_rows(count)
            several = len(new) > len(rows)
            batch = self._batch_of([*new, *answers], [*groups, *numbers], episodes if several else None)
            if self.learner.population:
                members = [e.sample for _, e in rows for _ in e.trajectories]
                batch = replace(batch, member=torch.tensor(members, dtype=torch.long))
            return self.teacher_prompts.add(batch, rows) if self.teacher_prompts else batch, {}
        again = self.replay.draw(self.settings.replay, self.progress.update)
        old = [(count + n, row) for n, group in enumerate(again) for row in group]
        answers, numbers = self._given_rows(count + len(again))
        groups = [*(n for n, _ in rows), *(n for n, _ in old), *numbers]
        joined = [*new, *(row for _, row in old), *answers]
        return self._batch_of(joined, groups), {"replay/groups": float(len(again))}

    def _given_rows(self, first: int) -> tuple[list[Row], list[int]]:
        """Return this rank's given answers of the update, and their groups' numbers, counted from `first`."""
        if self.answers_of_data is None:
            return [], []
        rows, numbers = numbered(self.answers_of_data(self.progress.update))
        is_own = [(first + n) % self.learner.ranks.size == self.learner.ranks.rank for n in numbers]
        rows = [replace(row, version=[GIVEN] * len(row.tokens)) for row in compress(rows, is_own)]
        return [(row, ()) for row in rows], [first + n for n in compress(numbers, is_own)]

    def _rows_of(self, episode: Episode) -> list[Row]:
        """Return an episode's trajectories, with the number of their reference, and its facts."""
        facts, teacher = self._facts(episode), self.teachers.get(episode.task.dataset, 0)
        return [(replace(t, teacher=teacher) if teacher else t, facts) for t in episode.trajectories]

    def _batch_of(self, rows: Sequence[Row], groups: list[int], episodes: list[int] | None = None) -> Batch:
        """Return the batch of these rows, with its columns parts and greedy if the method reads them."""
        batch = Batch.of([row for row, _ in rows], groups, episodes)
        count, width = len(self._reward_parts), len(self._reward_parts) + self._asks_greedy
        facts = torch.tensor([facts for _, facts in rows], dtype=torch.float64).view(len(rows), width)
        greedy = facts[:, count:].expand(batch.mask.shape) if self._asks_greedy else None
        return replace(batch, parts=facts[:, :count] if count else None, greedy=greedy)

    @property
    def _reward_parts(self) -> Sequence[RewardPart]:
        return getattr(self.learner.method, "reward_parts", ())

    @property
    def _asks_greedy(self) -> bool:
        return getattr(self.learner.method, "asks_greedy", False)

    def _facts(self, episode: Episode) -> tuple[float, ...]:
        """Return the score of each part of an episode's reward, then the reward of the greedy answer.

        Either is left out unless the method reads it, and NaN where the episode lacks it. An episode that
        ended with score 0 before it was judged has 0 in each part of its source. Raises RunError if the parts
        do not add up to the reward.
        """
        columns = [part for part in self._reward_parts if part.source == episode.task.dataset]
        by_name = {"": episode.reward, **episode.verdict.parts}
        scores = {part: by_name[part.name] for part in columns if part.name in by_name}
        scores = scores or dict.fromkeys(columns, 0.0)
        addends = [part.weight * score for part, score in scores.items()]
        total, scale = math.fsum(addends), math.fsum(map(abs, addends))
        if self._reward_parts and not abs(total - episode.reward) <= 1e-6 * scale:
            task, sum_of_parts = episode.task.id, f"the parts of its score make {total:g}"
            problem = f"the reward of an answer to {task!r} is {episode.reward:g}, and {sum_of_parts}"
            raise RunError("update", f"{problem}: the method compares parts that add up to the reward")
        facts = [scores.get(part, math.nan) for part in self._reward_parts]
        greedy = episode.verdict.parts.get(f"{GREEDY}reward", math.nan)
        return (*facts, greedy) if self._asks_greedy else tuple(facts)

    def _add_to_replay(self, rows: Rows) -> None:
        groups: dict[int, list[Row]] = {}
        for number, episode in rows if self.settings.replay else ():
            groups.setdefault(number, []).append(self._rows_of(episode)[0])
        self.replay.add(self.progress.update, list(groups.values()))

    def _check_ages(self, batch: Batch, new_rows: int) -> dict[str, float]:
        """Return the ages of all tokens as metrics; raise RunError if a new token is older than the bound."""
        lag = self.learner.update_count - batch.version
        ages, bound = lag[:new_rows][batch.mask[:new_rows]], self.source.admission.bound
        oldest = int(ages.max()) if len(ages) else 0
        if oldest > bound:
            age = counted(oldest, "update")
            raise RunError("update", f"a token is {age} old and may be {bound}: call sample() for new ones")
        sampled = batch.mask & (batch.version != GIVEN)
        return lag_metrics(Counter(lag[sampled].tolist())) if self.settings.replay else {}

    def _count_taken(self) -> None:
        self.progress.taken, self.progress.admitted = self.stream.taken, self.source.admission.admitted

    def _collect(self) -> tuple[list[FinishedGroup], list[FinishedGroup]]:
        """Return (kept, dropped) groups, each in order of admission."""
        self._select = selection(
            self.settings.select, getattr(self.learner.method, "accept", self.evaluation.right)
        )

        def keep(group: Sequence[AnyEpisode]) -> bool:
            return bool(group) and any(map(self._keeps, by_seat(group)))

        rounds = self.settings.max_rounds if self.settings.select != "all" else 1
        return self.source.collect(keep, rounds, self.learner.update_count)

    def _seats(self, group: FinishedGroup) -> list[list[Episode]]:
        """Return a group's seats; a seat is empty if selection drops it, or if it is on another rank."""
        seats = sorted({e.seat for e in group.members})
        parts = [[e for e in group.episodes if e.seat == seat] for seat in seats]
        return [episodes if self._keeps(episodes) else [] for episodes in parts]

    def _keeps(self, group: Sequence[AnyEpisode]) -> bool:
        """Return True if selection keeps a group or seat; always True for one that is on another rank."""
        remaining = [e for e in group if not self._is_masked(e)]
        judged = sum(not e.verdict.failed for e in remaining)
        return not group or (judged >= self.learner.method.least_group and self._select(remaining))

    def _is_masked(self, episode: AnyEpisode) -> bool:
        """Return True if the episode was cut off, and such episodes are left out."""
        return self.settings.mask_truncated and episode.stop in TRUNCATED

    @contextmanager
    def _logged(self, metrics: Mapping[str, float]) -> Iterator[None]:
        """Before a RunError from the block, write the line of metrics that explains it."""
        try:
            yield
        except RunError:
            line = self.line({**self.journal.pending, **metrics})
            self.journal.log(self.learner.step_count, self.learner.update_count, line)
            raise

    def _count_failures(self, episodes: Sequence[AnyEpisode]) -> None:
        self._errors.see(episodes)
        self.progress.recent = self._errors.recent

    def _why_nothing(self) -> str:
        recent, select = self.progress.recent, self.settings.select
        if set(recent) == {"x"}:
            return (
                f"none of the last {len(recent)} episodes could be judged; first cause: {self._errors.first}"
            )
        why = WHY_NOT.get(select, "no group was kept")
        if self.settings.mask_truncated:
            why += ", or too few answers ended before they were cut off (sampling.max_new_tokens)"
        other = ", or set rollout.select to 'all' and leave rollout.max_rounds out" if select != "all" else ""
        return (
            f"with rollout.select {select!r} {why}, or none could be judged; "
            f"make the tasks easier or harder{other}"
        )

    def _publish(self) -> None:
        self.publisher.publish(self.sampler)
        while self.ahead.pace == "steps" and self.sampler.oldest_version < self.learner.update_count:
            self.source.hear()

    def _publish_member(self, member: int | None) -> int:
        """Offer a member's weights, or the learner's own for None, to the samplers; return their number."""
        population, update = self.learner.population, self.learner.update_count
        assert population is not None
        with nullcontext() if member is None else population.member(update, member):
            self.publisher.publish(self.sampler)
        return self.publisher.newest

    # ------------------------------------------------------------------ metrics

    def evaluate(self) -> dict[str, float]:
        """Return metrics on the held-out tasks; write the answers to samples/eval_*.jsonl."""
        if not self.held_out:
            return {}
        if self.sampler.oldest_version < 0 or self.publisher.is_overtaken:  # asleep, or before publish()
            self._publish()
        episodes, metrics = self.evaluator.play(self._trainer_state)
        with self._logged(metrics):
            self._count_failures(episodes)
        return metrics

    def line(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of an update with its speeds and the work of samplers."""
        metrics, spent = dict(metrics), self.journal.phases
        tokens = metrics.pop("length/total", 0.0)
        if tokens:
            # Samplers that are ahead sample during all phases of the learner.
            seconds = sum(spent.values()) if self.ahead.max_lag else spent["sample"]
            metrics["speed/sample_tokens"] = tokens / seconds
        if tokens and spent["train"]:
            metrics["speed/train_tokens"] = tokens / spent["train"]
        return super().line(metrics | self.source.work())
