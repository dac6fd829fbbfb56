"""The line of groups: nothing is lost, nothing is too old, whoever is slow."""

import random
import sys
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from posttrain.curriculum.staleness import Admission


class Training(RuleBasedStateMachine):
    """A learner, samplers that are late with groups and with weights, selection, and a kill now and then."""

    @initialize(
        groups=st.integers(1, 4), lag=st.integers(0, 3), window=st.integers(1, 6), updates=st.integers(1, 9)
    )
    def begin(self, groups: int, lag: int, window: int, updates: int) -> None:
        self.line: Admission[str] = Admission(groups, lag, window)
        self.version = self.live = 0
        self.updates = updates
        self.born: dict[int, int] = {}
        self.kept: list[int] = []
        self.over: dict[int, str] = {}
        self.by_passed: dict[int, int] = {}

    @property
    def needed(self) -> int:
        return (self.updates - self.version) * self.line.groups - len(self.kept)

    @rule()
    def admit(self) -> None:
        for _ in range(self.line.room(self.needed)):
            number = self.line.admit()
            assert number not in self.born
            self.born[number] = self.live

    @rule(data=st.data())
    def arrive(self, data: Any) -> None:
        playing = [n for n, group in self.line.queue.items() if group is None]
        if playing:
            number = data.draw(st.sampled_from(playing))
            assert self.line.finish(number, f"group {number}")
            assert not self.line.finish(number, "again"), "a sampler thought dead has no say"

    @rule(data=st.data())
    def take(self, data: Any) -> None:
        want = self.line.groups - len(self.kept)
        before = list(self.line.queue)
        taken = self.line.take(want) if self.version < self.updates else None
        if taken is None:
            return
        numbers = [n for n, _ in taken]
        assert numbers == sorted(numbers)
        assert all(group == f"group {n}" for n, group in taken)
        for n in before:  # who is passed by those that were admitted later
            if n not in numbers:
                self.by_passed[n] = self.by_passed.get(n, 0) + sum(m > n for m in numbers)
                assert self.by_passed[n] <= self.line.window - 1
        dropped = [n for n in numbers if data.draw(st.booleans())]
        last = data.draw(st.booleans())  # an update then goes on with the groups it has
        if not last:
            self.line.drop(dropped)
        for n in numbers:
            assert n not in self.over
            self.over[n] = "dropped" if n in dropped else "trained"
        self.kept += [n for n in numbers if n not in dropped]
        if len(self.kept) == self.line.groups or (last and self.kept):
            for n in self.kept:
                assert self.version - self.born[n] <= self.line.bound, "too old"
            self.version += 1
            self.line.hold([*self.kept, *(dropped if last else [])], self.version)
            self.kept = []
        elif last:
            self.line.drop(dropped)

    @rule(data=st.data())
    def swap(self, data: Any) -> None:
        self.live = data.draw(st.integers(self.live, self.version))
        self.line.release(self.live)

    @rule()
    def killed_and_resumed(self) -> None:
        if self.kept:
            return  # a checkpoint is made between updates
        state = self.line.state()
        other: Admission[str] = Admission(self.line.groups, self.line.max_lag, self.line.window)
        other.restore(state)
        assert list(other.queue) == list(self.line.queue)
        self.line, self.live = other, self.version

    @invariant()
    def nobody_is_lost(self) -> None:
        if hasattr(self, "line"):
            assert self.born.keys() == self.over.keys() | self.line.queue.keys()
            assert not self.over.keys() & self.line.queue.keys()
            slots = (self.line.max_lag + 1) * self.line.groups
            assert len(self.line.queue) + len(self.line.slots) <= slots

    def teardown(self) -> None:
        """However it stands, it comes to its end: nothing waits for something that waits for it."""
        if not hasattr(self, "line"):
            return
        for _ in range(20 * self.updates):
            if self.version == self.updates:
                return
            self.live = self.version
            self.line.release(self.live)
            self.admit()
            for number in list(self.line.queue):
                self.line.finish(number, f"group {number}")
            if taken := self.line.take(self.line.groups - len(self.kept)):
                self.kept += [n for n, _ in taken]
            if len(self.kept) == self.line.groups:
                self.version += 1
                self.line.hold(self.kept, self.version)
                self.kept = []
        raise AssertionError("it hangs")


TestTraining = Training.TestCase
TestTraining.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def oldest(groups: int, lag: int, window: int, updates: int, seed: int, *, short: bool = False) -> int:
    """The greatest lag in a run whose samplers are as slow with weights as they may be.

    short: updates go on with fewer groups now and then, as when selection has dropped some to the last round.
    """
    dice = random.Random(seed)
    line: Admission[int] = Admission(groups, lag, window)
    version = live = found = 0
    born = {}
    while version < updates:
        for _ in range(line.room()):
            born[line.admit()] = live
        playing = [n for n, group in line.queue.items() if group is None]
        slow = playing[:1] if dice.random() < 0.9 else []
        if ready := [n for n in playing if n not in slow] or playing:
            line.finish(dice.choice(ready), 0)
        if taken := line.take(groups):
            found = max(found, *(version - born[n] for n, _ in taken))
            left = [n for n, _ in taken[1:]] if short and dice.random() < 0.8 else []
            version += 1
            line.hold([n for n, _ in taken if n not in left], version)
            held(line, left, version)
        if not line.room() and (dice.random() < 0.5 or not playing):
            live = version
            line.release(live)
    return found


def held(line: Admission[int], left: list[int], version: int) -> None:
    """What an update that had to go on without these groups does with their slots."""
    line.hold(left, version)


def test_the_bound_holds_where_updates_go_on_with_fewer_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given back at once, their slots would let more updates be made before the last in line is reached."""
    assert max(oldest(5, 1, 1, 60, seed, short=True) for seed in range(40)) == 1
    monkeypatch.setattr(sys.modules[__name__], "held", lambda line, left, version: line.drop(left))
    assert max(oldest(5, 1, 1, 60, seed, short=True) for seed in range(40)) > 1


def test_the_bound_is_reached_and_never_passed() -> None:
    for groups, lag, window in ((1, 0, 1), (3, 0, 1), (1, 1, 1), (4, 2, 1), (2, 4, 1), (2, 1, 3), (2, 2, 6)):
        bound = Admission[int](groups, lag, window).bound
        assert max(oldest(groups, lag, window, 60, seed) for seed in range(40)) == bound
