"""The source of an update's groups: tasks are admitted when slots are free, and taken in order when finished.

collect   consumes       finished groups, the oldest first, until selection has kept enough
          waits for      samplers; each must give signs of life within a deadline
          unblocked by   a free slot, which admits the next task
"""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from posttrain.curriculum.curriculum import Supply
from posttrain.curriculum.staleness import Admission
from posttrain.learner.ranks import ALONE, Ranks
from posttrain.recipe.asynchrony import Asynchrony
from posttrain.rollout.protocol import FinishedGroup, GroupRequest, Sampler, Work
from posttrain.run.journal import Journal
from posttrain.types import AnyEpisode, Sampling
from posttrain.verifiers.protocol import TrainerState

T = TypeVar("T")
HEAR_S = 0.5
Keep = Callable[[Sequence[AnyEpisode]], bool]
"""Returns True if an update trains on the group."""


class GroupSource:
    """The samplers, and the queue of groups that they play and updates take.

    samplings: by `Task.dataset`. count: groups per update. size: episodes per group. greedy: play one more,
    greedily. state: the trainer state that reward functions see, by group number. left: updates still to be
    made, this one included.

    With several ranks each has a source of the same queue: all take the same tasks in the same order, each
    plays the groups whose number modulo the number of ranks is its rank, and they select together (central.py
    has the other design).
    """

    def __init__(
        self,
        sampler: Sampler,
        stream: Supply,
        samplings: Mapping[str, Sampling],
        ahead: Asynchrony,
        journal: Journal,
        ranks: Ranks = ALONE,
        *,
        count: int,
        size: int,
        greedy: bool = False,
        state: Callable[[int], TrainerState],
        left: Callable[[], int],
    ) -> None:
        self.sampler, self.stream, self.samplings, self.ahead = sampler, stream, samplings, ahead
        self.journal, self.count, self.size, self.state, self.left = journal, count, size, state, left
        self.greedy = greedy
        self.ranks = ranks
        self.admission: Admission[FinishedGroup] = Admission(
            count, ahead.max_lag, ahead.window, admitted=journal.progress.admitted
        )
        self._before: list[Work] = []
        self._resumed: list[GroupRequest] = []
        self._in_update: list[int] = []

    def begin(self, version: int) -> None:
        """Continue the groups of a checkpoint, now that samplers have the weights of this version."""
        self.admission.release(version)
        if self._resumed:
            self.sampler.admit(self._resumed)

    def collect(
        self, keep: Keep, rounds: int, version: int
    ) -> tuple[list[FinishedGroup], list[FinishedGroup]]:
        """Return (kept, dropped) groups, each in order of admission.

        Dropped groups are replaced in whole rounds, at most `rounds`, so that an engine's batches do not
        depend on how fast a verifier was. version: of the newest published weights. One-step-off, no group is
        admitted or dropped before samplers have these, so rounds and tasks do not depend on timing.
        """
        selected: list[FinishedGroup] = []
        dropped: list[FinishedGroup] = []
        latest: list[FinishedGroup] = []
        for _ in range(rounds):
            self.admission.drop(group.number for group in latest)
            latest = []
            groups = self._wait_for_groups(self.count - len(selected), len(selected), version)
            for keeps, group in self._select_groups(keep, groups):
                (selected if keeps else latest).append(group)
            dropped += latest
            if len(selected) >= self.count:
                break
        self._in_update = [group.number for group in (*selected, *latest)]
        return selected, dropped

    def hold(self, version: int) -> None:
        """Record that the groups of the last `collect()` were trained on; the result is this version.

        An update with too few groups keeps the slots of the groups that it dropped last: if others were
        admitted in them, more than max_lag updates could be made before the last group of the queue is taken.
        """
        self.admission.hold(self._in_update, version)
        self._in_update = []

    def drop(self) -> None:
        """Free the slots of the groups of the last `collect()`, which are not trained on."""
        self.admission.drop(self._in_update)
        self._in_update = []

    def _select_groups(
        self, keep: Keep, groups: Sequence[FinishedGroup]
    ) -> Iterator[tuple[bool, FinishedGroup]]:
        """Yield (is kept, group) for each group; the rank that played a group decides."""
        if self.ranks.size == 1:
            yield from ((keep(group.members), group) for group in groups)
            return
        decisions = [(keep(g.members), _without_episodes(g)) for g in groups if self.is_own(g.number)]
        by_number = {g.number: (keeps, g) for keeps, g in self.share(decisions, "groups")}
        for group in groups:
            keeps, summary = by_number[group.number]
            yield keeps, replace(summary, episodes=group.episodes)

    def follow(self, called: str) -> None:
        """Wait for the rank whose samplers draw for all; do nothing where each rank has its own."""

    def share(self, items: list[T], called: str) -> list[T]:
        """Return the items of all ranks that have samplers, on every rank."""
        return [item for part in self.ranks.gather(items, called) for item in part]

    def is_own(self, number: int) -> bool:
        """Return True if this rank plays the group of this number."""
        return number % self.ranks.size == self.ranks.rank

    def _wait_for_groups(self, count: int, before: int, version: int) -> list[FinishedGroup]:
        """Wait until the next groups in the queue are finished, and return them; meanwhile admit others.

        before: groups that the update has already. version: see collect().
        """
        since = version if self.ahead.one_step_off else -1
        while True:
            if self.sampler.oldest_version >= since:
                self._admit(self.left() * self.count - before)
                if (pairs := self.admission.take(count)) is not None:
                    return [group for _, group in pairs]
            self.hear()
            finished = len(self.admission.queue) - self.admission.playing
            progress = {"done": before + min(finished, count), "total": before + count}
            self.journal.show("sample", progress | ({"ahead": finished} if self.admission.max_lag else {}))

    def _admit(self, needed: int) -> None:
        """Admit as many groups as there are free slots, at most `needed`."""
        if requests := self._next_requests(needed):
            self.sampler.admit(requests)

    def _next_requests(self, needed: int) -> list[GroupRequest]:
        """Give free slots to the next tasks, at most `needed`; return the requests of those on this rank."""
        first, requests = self.admission.admitted, list[GroupRequest]()
        for _ in range(self.admission.room(needed)):
            epoch, task = self.stream.take()
            number = self.admission.admit()
            if not self.is_own(number):
                self.admission.finish(number, FinishedGroup(number=number))  # another rank waits for it
                continue
            requests.append(
                GroupRequest(
                    number=number,
                    task=task,
                    size=self.size,
                    greedy=self.greedy,
                    sampling=self.samplings[task.dataset],
                    epoch=epoch,
                    state=self.state(number),
                    round=first,
                )
            )
        return requests

    def feed(self, version: int) -> None:
        """Admit the next groups before the learner is busy, so that samplers do not run out of work.

        Their slots are freed when samplers have the weights of this version; wait for that if samplers idle.
        """
        if not self.admission.max_lag:
            return
        self.hear(0.0)
        while not self.admission.playing and self.sampler.oldest_version < version:
            self.hear()
        self._admit(self.left() * self.count)

    def hear(self, timeout_s: float = HEAR_S) -> None:
        """Take in finished groups from samplers, and the versions that they have."""
        for group in self.sampler.poll(timeout_s):
            self.arrive(group)
        self.admission.release(self.sampler.oldest_version)

    def arrive(self, group: FinishedGroup) -> None:
        if group.lost:
            self.admission.replay(group.number)
        else:
            self.admission.finish(group.number, group)

    # ------------------------------------------------------------------ checkpoints

    def flight(self, version: int) -> dict[str, Any]:
        """Return the groups that are admitted and not trained on, for a checkpoint; empty if there are none.

        One-step-off, running groups are finished first: older weights sample them, and the checkpoint has
        this version alone. With several ranks, rank 0 returns the groups of all. First, each rank waits until
        its samplers have this version: then all ranks have admitted the same groups.
        """
        if self.ahead.one_step_off:
            while self.sampler.oldest_version < version or self.admission.playing:
                self.hear()
        elif self.ranks.size > 1 and self.admission.max_lag:
            while self.sampler.oldest_version < version:
                self.hear()
            self._admit(self.left() * self.count)
        if not self.admission.queue:
            return {}
        unfinished, queue = self._rank_state()
        finished = {number: list(group.episodes) for number, group in queue.items() if group is not None}
        requests = [unfinished[number] for number in queue if number not in finished]
        if self.ranks.size > 1:
            parts = [pickle.dumps((finished, requests)), *[pickle.dumps(({}, []))] * (self.ranks.size - 1)]
            self.follow("groups")
            received = [pickle.loads(part) for part in self.ranks.exchange(parts)]
            finished = {number: group for groups, _ in received for number, group in groups.items()}
            requests = sorted((r for _, part in received for r in part), key=lambda r: r.number)
        return {"line": self.admission.state(), "finished": finished, "requests": requests}

    def _rank_state(self) -> tuple[dict[int, GroupRequest], dict[int, FinishedGroup | None]]:
        """Return the unfinished requests of this rank by number, and its part of the queue."""
        requests = {request.number: request for request in self.sampler.unfinished()}
        self.hear(0.0)
        return requests, {
            number: group for number, group in self.admission.queue.items() if self.is_own(number)
        }

    def resume(self, flight: Mapping[str, Any]) -> None:
        """Restore what flight() returned; `begin` continues it."""
        if not flight:
            return
        self.admission.restore(flight["line"])
        for number in list(self.admission.queue):
            if not self.is_own(number):
                self.admission.finish(number, FinishedGroup(number=number))
        for number, group in flight["finished"].items():
            if self.is_own(number):
                self.admission.finish(number, FinishedGroup(number=number, episodes=group))
        self._resumed = [request for request in flight["requests"] if self.is_own(request.number)]

    def work(self) -> dict[str, float]:
        """Return the work of samplers since the last call; of a sampler in this thread its seconds alone."""
        now = self.sampler.work()
        before = self._before if len(self._before) == len(now) else [Work()] * len(now)
        self._before = now
        metrics: dict[str, float] = {}
        for n, (work, earlier) in enumerate(zip(now, before, strict=True)):
            metrics |= {f"samplers/{n}/{name}": seconds for name, seconds in work.since(earlier).items()}
        if not self.admission.max_lag and self.ahead.where == "here":
            return metrics
        shares = [
            (n.busy_s - b.busy_s) / (n.alive_s - b.alive_s)
            for n, b in zip(now, before, strict=True)
            if n.alive_s > b.alive_s and n.busy_s >= b.busy_s  # a restarted sampler begins at 0
        ]
        return metrics | {
            "samplers/busy": sum(shares) / len(shares) if shares else 0.0,
            "samplers/waiting": float(len(self.admission.queue) - self.admission.playing),
            "samplers/playing": float(self.admission.playing),
            "samplers/restarts": float(self.sampler.restarted),
            "samplers/bytes": float(sum(max(n.bytes - b.bytes, 0) for n, b in zip(now, before, strict=True))),
        }


def _without_episodes(group: FinishedGroup) -> FinishedGroup:
    """Return the group with summaries in place of episodes, for other ranks."""
    summaries = group.summaries or [episode.summary() for episode in group.episodes]
    return replace(group, episodes=(), summaries=summaries)
