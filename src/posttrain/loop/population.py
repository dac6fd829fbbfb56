"""The groups of evolution strategies: every member of the population answers the tasks of an update once.

collect   consumes       the next tasks, the same for all members and dealt among the samplers
          waits for      one member's answers after another's
          unblocked by   the last answer of a member, when the weights of the next are published
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from posttrain.loop.group_source import HEAR_S, GroupSource
from posttrain.rollout.protocol import FinishedGroup
from posttrain.types import Episode


class PopulationSource(GroupSource):
    """A source whose group has one answer of each member: answer i is drawn by the weights of member i.

    publish: offers a member's weights to the samplers, or those of the learner for None, and returns their
    number (see Snapshot). A draw depends on the task and not on the member: members differ in weights alone.
    """

    def __init__(self, *args: Any, publish: Callable[[int | None], int], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._publish = publish

    def _wait_for_groups(self, count: int, before: int, version: int) -> list[FinishedGroup]:
        """Have each member answer the next tasks; return the groups once the learner's weights are back."""
        self.hear(0.0)  # frees the slots of the update before
        requests = [replace(r, size=1) for r in self._next_requests(self.left() * self.count - before)]
        episodes: dict[int, list[Episode]] = {request.number: [] for request in requests}
        for member in range(self.size):
            number = self._publish(member)
            while self.sampler.oldest_version < number:  # a sampler that is behind would draw as another
                self.hear()
            self.sampler.admit(requests)
            playing = len(requests)
            while playing:
                groups = self.sampler.poll(HEAR_S)
                playing -= len(groups)
                for group in groups:
                    episodes[group.number] += [replace(e, sample=member) for e in group.episodes]
                progress = {
                    "done": (member + 1) * len(requests) - playing,
                    "total": self.size * len(requests),
                }
                self.journal.show("sample", progress)
        self._publish(None)
        for number, members in episodes.items():
            self.arrive(FinishedGroup(number=number, episodes=members))
        return [group for _, group in self.admission.take(count) or ()]
