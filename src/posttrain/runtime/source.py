"""Where an update's groups come from: tasks are admitted as slots are free, and taken in line when finished.

collect   consumes       finished groups, the oldest first, until selection has kept enough
          waits for      samplers, each of which has a deadline for its signs of life
          unblocked by   a slot: admits the next task as soon as there is one
"""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from posttrain.learner.ranks import ALONE, Ranks
from posttrain.runtime.admission import Admission
from posttrain.runtime.asynchrony import Asynchrony
from posttrain.runtime.curriculum import Supply
from posttrain.runtime.journal import Journal
from posttrain.runtime.schedule import Recorded, Recorder
from posttrain.samplers.protocol import GroupRequest, Sampler, Work
from posttrain.types import Episode, Played, Sampling
from posttrain.verifiers.protocol import TrainerState

_HEAR_S = 0.5


class Group(NamedTuple):
    """A finished group."""

    number: int
    """Under which it was admitted."""
    episodes: Sequence[Episode]
    """Empty if another rank has played them."""
    seen: Sequence[Played]
    """They themselves, or what that rank says of them."""


class GroupSource:
    """The samplers, with the line of groups that they are given and that updates take from.

    schedule: where what is admitted is written down, or, in a run that is made again, read.
    count: how many groups an update wants. size: episodes of a group. state: what a reward function
    may know with the group of this number. left: how many updates are still to be made, this one included.

    With several ranks each has such a source, of one line: all take the same tasks in the same order, each
    plays the groups whose number is its own modulo their count, and what is kept is decided together.
    """

    def __init__(
        self,
        sampler: Sampler,
        stream: Supply,
        sampling: Sampling,
        ahead: Asynchrony,
        journal: Journal,
        schedule: Recorder | Recorded | None = None,
        ranks: Ranks = ALONE,
        *,
        count: int,
        size: int,
        state: Callable[[int], TrainerState],
        left: Callable[[], int],
    ) -> None:
        self.sampler, self.stream, self.sampling, self.ahead = sampler, stream, sampling, ahead
        self.journal, self.count, self.size, self.state, self.left = journal, count, size, state, left
        self.schedule, self.ranks = schedule, ranks
        self.line: Admission[list[Episode]] = Admission(
            count, ahead.max_lag, ahead.window, admitted=journal.progress.admitted
        )
        self._before: list[Work] = []
        self._resumed: list[GroupRequest] = []

    def begin(self, version: int) -> None:
        """Weights of this version are out: goes on with what was under way."""
        self.line.live(version)
        if self._resumed:
            self.sampler.admit(self._resumed)

    def collect(
        self, keep: Callable[[Sequence[Episode]], bool], rounds: int
    ) -> tuple[list[Group], list[Group]]:
        """(kept, dropped) groups, each in the order in which they were admitted.

        What is dropped is replaced in whole rounds, at most so many, so that what an engine computes together
        does not depend on how fast a verifier was.
        """
        kept: list[Group] = []
        dropped: list[Group] = []
        for _ in range(rounds):
            left: list[Group] = []
            for keeps, group in self._judged(keep, self._taken(self.count - len(kept), len(kept))):
                (kept if keeps else left).append(group)
            self.line.dropped(group.number for group in left)
            dropped += left
            if len(kept) >= self.count:
                break
        return kept, dropped

    def _judged(
        self, keep: Callable[[Sequence[Episode]], bool], taken: Sequence[tuple[int, list[Episode]]]
    ) -> Iterator[tuple[bool, Group]]:
        """Whether each group is kept, as the rank says that has played it."""
        if self.ranks.size == 1:
            yield from ((keep(group), Group(number, group, group)) for number, group in taken)
            return
        own = {n: (keep(group), [e.seen() for e in group]) for n, group in taken if self.plays(n)}
        told = {n: each for part in self.ranks.gather(own, "groups") for n, each in part.items()}
        yield from ((told[n][0], Group(n, group, told[n][1])) for n, group in taken)

    def plays(self, number: int) -> bool:
        """Whether the group of this number is one of this rank."""
        return number % self.ranks.size == self.ranks.rank

    def _taken(self, count: int, kept: int) -> list[tuple[int, list[Episode]]]:
        """The next groups in line, once they are finished; meanwhile others are admitted."""
        while True:
            self._admit(self.left() * self.count - kept)
            if (taken := self.line.take(count)) is not None:
                return taken
            self.hear()
            done = len(self.line.line) - self.line.playing
            told = {"done": kept + min(done, count), "total": kept + count}
            self.journal.show("sample", told | ({"ahead": done} if self.line.max_lag else {}))

    def _admit(self, needed: int) -> None:
        """Admits as many groups as there are slots for, and as will still be trained on."""
        first, requests = self.line.admitted, list[GroupRequest]()
        update, room = self.journal.progress.update, self.line.room(needed)
        if isinstance(self.schedule, Recorded):
            room = self.schedule.room(update)
        elif self.schedule and room:
            self.schedule.admitted(update, room)
        for _ in range(room):
            epoch, task = self.stream.take()
            number = self.line.admit()
            if not self.plays(number):
                self.line.arrived(number, [])  # it is not waited for here
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
        if not self.line.max_lag:
            return
        self.hear(0.0)
        while not self.line.playing and self.sampler.live < version:
            self.hear()
        self._admit(self.left() * self.count)

    def hear(self, timeout_s: float = _HEAR_S) -> None:
        """Takes in what samplers have finished, and which weights they hold."""
        for each in self.sampler.poll(timeout_s):
            self.line.arrived(each.number, each.episodes)
        self.line.live(self.sampler.live)

    # ------------------------------------------------------------------ what is under way

    def flight(self, version: int) -> dict[str, Any]:
        """What has been admitted and not trained on, as a checkpoint holds it; empty if there is nothing.

        Of all ranks together, on rank 0: they first come to have admitted the same groups, which they do once
        each one's sampler draws from the weights of this version.
        """
        if self.ranks.size > 1 and self.line.max_lag:
            while self.sampler.live < version:
                self.hear()
            self._admit(self.left() * self.count)
        if not self.line.line:
            return {}
        requests = {each.number: each for each in self.sampler.unfinished()}
        self.hear(0.0)
        own = {number: group for number, group in self.line.line.items() if self.plays(number)}
        finished = {number: group for number, group in own.items() if group is not None}
        left = [requests[number] for number in own if number not in finished]
        if self.ranks.size > 1:
            parts = [pickle.dumps((finished, left)), *[pickle.dumps(({}, []))] * (self.ranks.size - 1)]
            told = [pickle.loads(part) for part in self.ranks.exchange(parts)]
            finished = {number: group for each, _ in told for number, group in each.items()}
            left = sorted((request for _, each in told for request in each), key=lambda r: r.number)
        return {"line": self.line.state(), "finished": finished, "requests": left}

    def resume(self, flight: Mapping[str, Any]) -> None:
        """Goes on with what flight() gave, once the first weights are out."""
        if not flight:
            return
        self.line.restore(flight["line"])
        for number in list(self.line.line):
            if not self.plays(number):
                self.line.arrived(number, [])
        for number, group in flight["finished"].items():
            if self.plays(number):
                self.line.arrived(number, group)
        self._resumed = [each for each in flight["requests"] if self.plays(each.number)]

    def work(self) -> dict[str, float]:
        """What the samplers did since this was last asked; nothing to tell of one that takes turns here."""
        if not self.line.max_lag and self.ahead.where == "here":
            return {}
        now = self.sampler.work()
        before = self._before if len(self._before) == len(now) else [Work()] * len(now)
        self._before = now
        shares = [
            (n.busy_s - b.busy_s) / (n.alive_s - b.alive_s)
            for n, b in zip(now, before, strict=True)
            if n.alive_s > b.alive_s and n.busy_s >= b.busy_s  # one that was started again begins at 0
        ]
        return {
            "samplers/busy": sum(shares) / len(shares) if shares else 0.0,
            "samplers/waiting": float(len(self.line.line) - self.line.playing),
            "samplers/playing": float(self.line.playing),
            "samplers/restarts": float(self.sampler.restarted),
        }
