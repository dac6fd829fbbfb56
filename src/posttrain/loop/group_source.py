"""Where an update's groups come from: tasks are admitted as slots are free, and taken in line when finished.

collect   consumes       finished groups, the oldest first, until selection has kept enough
          waits for      samplers, each of which has a deadline for its signs of life
          unblocked by   a slot: admits the next task as soon as there is one
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
"""Whether an update learns from a group."""


class GroupSource:
    """The samplers, with the line of groups that they are given and that updates take from.

    count: how many groups an update wants. size: episodes of a group. state: what a reward function
    may know with the group of this number. left: how many updates are still to be made, this one included.

    With several ranks each has such a source, of one line: all take the same tasks in the same order, each
    plays the groups whose number is its own modulo their count, and what is kept is decided together
    (central.py has the other design).
    """

    def __init__(
        self,
        sampler: Sampler,
        stream: Supply,
        sampling: Sampling,
        ahead: Asynchrony,
        journal: Journal,
        ranks: Ranks = ALONE,
        *,
        count: int,
        size: int,
        state: Callable[[int], TrainerState],
        left: Callable[[], int],
    ) -> None:
        self.sampler, self.stream, self.sampling, self.ahead = sampler, stream, sampling, ahead
        self.journal, self.count, self.size, self.state, self.left = journal, count, size, state, left
        self.ranks = ranks
        self.admission: Admission[FinishedGroup] = Admission(
            count, ahead.max_lag, ahead.window, admitted=journal.progress.admitted
        )
        self._before: list[Work] = []
        self._resumed: list[GroupRequest] = []
        self._of_update: list[int] = []

    def begin(self, version: int) -> None:
        """Weights of this version are out: goes on with what was running."""
        self.admission.release(version)
        if self._resumed:
            self.sampler.admit(self._resumed)

    def collect(
        self, keep: Keep, rounds: int, version: int
    ) -> tuple[list[FinishedGroup], list[FinishedGroup]]:
        """(kept, dropped) groups, each in the order in which they were admitted.

        What is dropped is replaced in whole rounds, at most so many, so that what an engine computes together
        does not depend on how fast a verifier was. version: of the newest published weights. One-step-off,
        nothing is admitted or dropped before samplers hold them, so rounds and tasks do not depend on timing.
        """
        since = version if self.ahead.one_step_off else -1
        kept: list[FinishedGroup] = []
        dropped: list[FinishedGroup] = []
        left: list[FinishedGroup] = []
        for _ in range(rounds):
            self.admission.drop(group.number for group in left)
            left = []
            for keeps, group in self._select_groups(
                keep, self._wait_for_groups(self.count - len(kept), len(kept), since)
            ):
                (kept if keeps else left).append(group)
            dropped += left
            if len(kept) >= self.count:
                break
        self._of_update = [group.number for group in (*kept, *left)]
        return kept, dropped

    def hold(self, version: int) -> None:
        """What was collected last has been trained on, to this version.

        An update that had to go on with fewer groups has the slots of a whole one all the same: were others
        admitted in them, more updates than max_lag could be made before the last of the line is reached.
        """
        self.admission.hold(self._of_update, version)
        self._of_update = []

    def drop(self) -> None:
        """Nothing of what was collected last is trained on."""
        self.admission.drop(self._of_update)
        self._of_update = []

    def _select_groups(
        self, keep: Keep, taken: Sequence[FinishedGroup]
    ) -> Iterator[tuple[bool, FinishedGroup]]:
        """Whether each group is kept, as the rank says that has played it."""
        if self.ranks.size == 1:
            yield from ((keep(group.members), group) for group in taken)
            return
        own = [(keep(g.members), _summary(g)) for g in taken if self.is_own(g.number)]
        told = {g.number: (keeps, g) for keeps, g in self.share(own, "groups")}
        for group in taken:
            keeps, said = told[group.number]
            yield keeps, replace(said, episodes=group.episodes)

    def share(self, own: list[T], called: str) -> list[T]:
        """What all ranks say of what they have played."""
        return [each for part in self.ranks.gather(own, called) for each in part]

    def is_own(self, number: int) -> bool:
        """Whether the group of this number is one of this rank."""
        return number % self.ranks.size == self.ranks.rank

    def _wait_for_groups(self, count: int, kept: int, since: int) -> list[FinishedGroup]:
        """Return the next groups in line, once they are finished; meanwhile others are admitted.

        since: groups are admitted and taken once all samplers hold this version, or a newer one.
        """
        while True:
            if self.sampler.oldest_version >= since:
                self._admit(self.left() * self.count - kept)
                if (taken := self.admission.take(count)) is not None:
                    return [group for _, group in taken]
            self.hear()
            done = len(self.admission.queue) - self.admission.playing
            told = {"done": kept + min(done, count), "total": kept + count}
            self.journal.show("sample", told | ({"ahead": done} if self.admission.max_lag else {}))

    def _admit(self, needed: int) -> None:
        """Admits as many groups as there are slots for, and as will still be trained on."""
        first, requests = self.admission.admitted, list[GroupRequest]()
        for _ in range(self.admission.room(needed)):
            epoch, task = self.stream.take()
            number = self.admission.admit()
            if not self.is_own(number):
                self.admission.finish(number, FinishedGroup(number=number))  # it is not waited for here
                continue
            requests.append(
                GroupRequest(
                    number=number,
                    task=task,
                    size=self.size,
                    sampling=self.sampling,
                    epoch=epoch,
                    state=self.state(number),
                    round=first,
                )
            )
        if requests:
            self.sampler.admit(requests)

    def feed(self, version: int) -> None:
        """Gives samplers that will soon have nothing to play their next groups, before the learner is busy.

        They are then taking the weights, of this version, that the slots of these groups wait for.
        """
        if not self.admission.max_lag:
            return
        self.hear(0.0)
        while not self.admission.playing and self.sampler.oldest_version < version:
            self.hear()
        self._admit(self.left() * self.count)

    def hear(self, timeout_s: float = HEAR_S) -> None:
        """Takes in what samplers have finished, and which weights they hold."""
        for each in self.sampler.poll(timeout_s):
            self.arrive(each)
        self.admission.release(self.sampler.oldest_version)

    def arrive(self, group: FinishedGroup) -> None:
        if group.lost:
            self.admission.replay(group.number)
        else:
            self.admission.finish(group.number, group)

    # ------------------------------------------------------------------ what is running

    def flight(self, version: int) -> dict[str, Any]:
        """What has been admitted and not trained on, as a checkpoint holds it; empty if there is nothing.

        One-step-off, what is being played is finished first: older weights sample it, and the checkpoint
        holds this version alone.
        Of all ranks together, on rank 0: they first come to have admitted the same groups, which they do once
        each one's sampler draws from the weights of this version.
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
        requests, own = self._own()
        finished = {number: list(group.episodes) for number, group in own.items() if group is not None}
        left = [requests[number] for number in own if number not in finished]
        if self.ranks.size > 1:
            parts = [pickle.dumps((finished, left)), *[pickle.dumps(({}, []))] * (self.ranks.size - 1)]
            told = [pickle.loads(part) for part in self.ranks.exchange(parts)]
            finished = {number: group for each, _ in told for number, group in each.items()}
            left = sorted((request for _, each in told for request in each), key=lambda r: r.number)
        return {"line": self.admission.state(), "finished": finished, "requests": left}

    def _own(self) -> tuple[dict[int, GroupRequest], dict[int, FinishedGroup | None]]:
        """What is played for this rank, as far as it has come, and this rank's part of the line."""
        requests = {each.number: each for each in self.sampler.unfinished()}
        self.hear(0.0)
        return requests, {
            number: group for number, group in self.admission.queue.items() if self.is_own(number)
        }

    def resume(self, flight: Mapping[str, Any]) -> None:
        """Goes on with what flight() gave, once the first weights are out."""
        if not flight:
            return
        self.admission.restore(flight["line"])
        for number in list(self.admission.queue):
            if not self.is_own(number):
                self.admission.finish(number, FinishedGroup(number=number))
        for number, group in flight["finished"].items():
            if self.is_own(number):
                self.admission.finish(number, FinishedGroup(number=number, episodes=group))
        self._resumed = [each for each in flight["requests"] if self.is_own(each.number)]

    def work(self) -> dict[str, float]:
        """What the samplers did since this was last asked; of one that takes turns here its time alone."""
        now = self.sampler.work()
        before = self._before if len(self._before) == len(now) else [Work()] * len(now)
        self._before = now
        spent: dict[str, float] = {}
        for n, (mine, then) in enumerate(zip(now, before, strict=True)):
            spent |= {f"samplers/{n}/{what}": seconds for what, seconds in mine.since(then).items()}
        if not self.admission.max_lag and self.ahead.where == "here":
            return spent
        shares = [
            (n.busy_s - b.busy_s) / (n.alive_s - b.alive_s)
            for n, b in zip(now, before, strict=True)
            if n.alive_s > b.alive_s and n.busy_s >= b.busy_s  # one that was started again begins at 0
        ]
        return spent | {
            "samplers/busy": sum(shares) / len(shares) if shares else 0.0,
            "samplers/waiting": float(len(self.admission.queue) - self.admission.playing),
            "samplers/playing": float(self.admission.playing),
            "samplers/restarts": float(self.sampler.restarted),
            "samplers/bytes": float(sum(max(n.bytes - b.bytes, 0) for n, b in zip(now, before, strict=True))),
        }


def _summary(group: FinishedGroup) -> FinishedGroup:
    """What other ranks are told of it."""
    said = group.summaries or [episode.summary() for episode in group.episodes]
    return replace(group, episodes=(), summaries=said)
