"""Samplers that rank 0 drives for all ranks: it receives summaries of groups, and assigns groups to ranks.

Episodes of samplers on Ray stay there, and the rank that trains on a group fetches them. Rank 0 has those of
other samplers, and of a checkpoint, and sends them.
"""

import pickle
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from posttrain.learner.ranks import Ranks
from posttrain.loop.group_source import GroupSource, Keep
from posttrain.rollout.protocol import FinishedGroup, GroupRequest
from posttrain.rollout.ray import fetch
from posttrain.types import Episode, RunError

T = TypeVar("T")


class CentralSource(GroupSource):
    """The source of groups of a run on several ranks if rank 0 has all samplers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._again: dict[int, FinishedGroup] = {}
        """Groups that were played again after they had been taken."""

    def arrive(self, group: FinishedGroup) -> None:
        """Take in one group; store it if it replaces a lost group that had been taken."""
        if not group.lost and group.number not in self.admission.queue:
            self._again[group.number] = group
        super().arrive(group)

    def is_own(self, number: int) -> bool:
        return self.ranks.rank == 0

    def follow(self, called: str) -> None:
        self.ranks.follow(called)

    def share(self, items: list[T], called: str) -> list[T]:
        return tell_all(self.ranks, items, called)

    def collect(
        self, keep: Keep, rounds: int, version: int
    ) -> tuple[list[FinishedGroup], list[FinishedGroup]]:
        """Return (kept, dropped) groups; kept groups have their episodes on the rank that trains on them."""
        selected, dropped = super().collect(keep, rounds, version)
        owner = owners([sum(e.length for e in group.members) for group in selected], self.ranks.size)
        groups = {group.number: group for group in selected}
        numbers = {
            group.number for group, rank in zip(selected, owner, strict=True) if rank == self.ranks.rank
        }
        episodes: dict[int, Sequence[Episode]] = {}
        while True:
            episodes |= fetch(groups[n] for n in numbers - episodes.keys() if groups[n].place)
            episodes |= self._send_episodes(list(groups.values()), owner)
            missing = self.ranks.gather(numbers - episodes.keys(), "lost groups")
            if not (lost := sorted(n for part in missing for n in part)):
                break
            again = [] if self.ranks.rank else [replace(g, episodes=()) for g in self._wait_for_lost(lost)]
            groups |= {g.number: g for g in self.ranks.tell(again, "groups played again")}
        self._again.clear()
        self.sampler.release([group.number for group in (*selected, *dropped)])
        return [replace(g, episodes=episodes.get(g.number, ()), place="") for g in groups.values()], dropped

    def _send_episodes(
        self, groups: Sequence[FinishedGroup], owner: Sequence[int]
    ) -> dict[int, Sequence[Episode]]:
        """Return this rank's share of the episodes that rank 0 has."""
        parts: list[dict[int, Sequence[Episode]]] = [{} for _ in range(self.ranks.size)]
        for group, rank in zip(groups, owner, strict=True):
            if group.episodes:
                parts[rank][group.number] = group.episodes
        received = self.ranks.exchange([*map(pickle.dumps, parts)])[0]
        episodes: dict[int, Sequence[Episode]] = pickle.loads(received)
        return episodes

    def _wait_for_lost(self, numbers: Sequence[int]) -> list[FinishedGroup]:
        """Return these groups, lost with their samplers, once they have been played again.

        Raises RunError if that takes longer than async.deadline_s.
        """
        end = time.monotonic() + self.ahead.deadline_s
        while missing := [n for n in numbers if n not in self._again]:
            if time.monotonic() > end:
                problem = f"group {missing[0]} was lost with its sampler, and is not played again"
                raise RunError("resume", f"{problem} within {self.ahead.deadline_s:g} s")
            self.hear()
        return [self._again.pop(n) for n in numbers]

    def _rank_state(self) -> tuple[dict[int, GroupRequest], dict[int, FinishedGroup | None]]:
        """Return the same as for any rank, after fetching the episodes of finished groups from samplers."""
        while True:
            requests, queue = super()._rank_state()
            remote = [group for group in queue.values() if group and group.place]
            episodes = fetch(remote)
            for group in remote:
                self.admission.replay(group.number)
                if group.number in episodes:
                    self.admission.finish(
                        group.number, FinishedGroup(number=group.number, episodes=episodes[group.number])
                    )
            self.sampler.release(list(episodes))
            if len(episodes) == len(remote):
                return requests, {number: self.admission.queue[number] for number in queue}


def tell_all(ranks: Ranks, items: list[T], called: str) -> list[T]:
    """Return rank 0's items on every rank, which wait without a deadline: its samplers have some."""
    ranks.follow(called)
    return ranks.tell(items, called)


def owners(lengths: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each group: the longest first, to the rank with the least total.

    >>> owners([5, 9, 4, 1], 2)
    [1, 0, 1, 0]
    """
    out, totals = [0] * len(lengths), [0] * ranks
    for n in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        out[n] = min(range(ranks), key=totals.__getitem__)
        totals[out[n]] += lengths[n]
    return out
