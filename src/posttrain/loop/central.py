"""Samplers that rank 0 drives for all ranks: it receives summaries of groups, and deals them to ranks.

Episodes stay with the sampler that played them, and the rank that trains on a group fetches them there. Those
that a checkpoint held are on rank 0, which sends them.
"""

import pickle
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from posttrain.loop.group_source import GroupSource, Keep
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.protocol import FinishedGroup, GroupRequest
from posttrain.rollout.ray import fetch
from posttrain.types import Episode, RunError

T = TypeVar("T")


class CentralSource(GroupSource):
    """The source of a run on several ranks of which the first has all samplers."""

    sampler: SamplerPool

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._again: dict[int, FinishedGroup] = {}
        """Groups that were played again after they had been taken."""

    def arrive(self, group: FinishedGroup) -> None:
        """Takes in one group; of one that was lost after it had been taken, what it now is."""
        if not group.lost and group.number not in self.admission.queue:
            self._again[group.number] = group
        super().arrive(group)

    def is_own(self, number: int) -> bool:
        """Whether the group of this number is one of this rank."""
        return self.ranks.rank == 0

    def share(self, own: list[T], called: str) -> list[T]:
        """What rank 0 says of what it has played."""
        return self.ranks.tell(own, called)

    def collect(
        self, keep: Keep, rounds: int, version: int
    ) -> tuple[list[FinishedGroup], list[FinishedGroup]]:
        """(kept, dropped) groups; those kept with their episodes on the rank that trains on them."""
        kept, dropped = super().collect(keep, rounds, version)
        owner = owners([sum(e.length for e in group.members) for group in kept], self.ranks.size)
        groups = {group.number: group for group in kept}
        mine = {group.number for group, rank in zip(kept, owner, strict=True) if rank == self.ranks.rank}
        found: dict[int, Sequence[Episode]] = {}
        while True:
            found |= fetch(groups[n] for n in mine - found.keys() if groups[n].place)
            found |= self._send_episodes(list(groups.values()), owner)
            lost = sorted(n for part in self.ranks.gather(mine - found.keys(), "lost groups") for n in part)
            if not lost:
                break
            again = [] if self.ranks.rank else [replace(g, episodes=()) for g in self._wait_for_lost(lost)]
            groups |= {g.number: g for g in self.ranks.tell(again, "groups played again")}
        self._again.clear()
        self.sampler.release([group.number for group in (*kept, *dropped)])
        return [replace(g, episodes=found.get(g.number, ()), place="") for g in groups.values()], dropped

    def _send_episodes(
        self, groups: Sequence[FinishedGroup], owner: Sequence[int]
    ) -> dict[int, Sequence[Episode]]:
        """Return this rank's share of the episodes that rank 0 has from a checkpoint."""
        parts: list[dict[int, Sequence[Episode]]] = [{} for _ in range(self.ranks.size)]
        for group, rank in zip(groups, owner, strict=True):
            if group.episodes:
                parts[rank][group.number] = group.episodes
        found: dict[int, Sequence[Episode]] = pickle.loads(
            self.ranks.exchange([*map(pickle.dumps, parts)])[0]
        )
        return found

    def _wait_for_lost(self, numbers: Sequence[int]) -> list[FinishedGroup]:
        """These groups, which were lost with their samplers, once they have been played again.

        RunError if they are not within async.deadline_s.
        """
        end = time.monotonic() + self.ahead.deadline_s
        while missing := [n for n in numbers if n not in self._again]:
            if time.monotonic() > end:
                what = f"group {missing[0]} was lost with its sampler, and is not played again"
                raise RunError("resume", f"{what} within {self.ahead.deadline_s:g} s")
            self.hear()
        return [self._again.pop(n) for n in numbers]

    def _own(self) -> tuple[dict[int, GroupRequest], dict[int, FinishedGroup | None]]:
        """As for any rank, with the episodes of finished groups, which are then here."""
        while True:
            requests, own = super()._own()
            there = [group for group in own.values() if group and group.place]
            found = fetch(there)
            for group in there:
                self.admission.replay(group.number)
                if group.number in found:
                    self.admission.finish(
                        group.number, FinishedGroup(number=group.number, episodes=found[group.number])
                    )
            self.sampler.release(list(found))
            if len(found) == len(there):
                return requests, {number: self.admission.queue[number] for number in own}


def owners(lengths: Sequence[int], ranks: int) -> list[int]:
    """The rank of each group, the longest dealt first to the rank that has least.

    >>> owners([5, 9, 4, 1], 2)
    [1, 0, 1, 0]
    """
    out, has = [0] * len(lengths), [0] * ranks
    for n in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        out[n] = min(range(ranks), key=has.__getitem__)
        has[out[n]] += lengths[n]
    return out
