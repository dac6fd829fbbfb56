"""One engine with its rollouts, which takes groups and weights between two steps of the engine.

    turn    consumes       groups in the order in which they came, and the newest weights offered
            waits for      nothing that has no deadline of its own
            unblocked by   a group, weights, or a question: without any it has nothing to do

Everything that decides what is drawn is done here, so it is the same in the loop's thread, in another
process and on another machine.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from posttrain.recipe.asynchrony import Cache, Swap
from posttrain.samplers.episode_runner import EpisodeRunner
from posttrain.samplers.protocol import FinishedGroup, GroupRequest, Work
from posttrain.samplers.snapshots import Snapshot, load_snapshot
from posttrain.types import Episode, RunError


class RolloutWorker:
    """Plays groups on an engine of its own.

    swap = "between": rounds of groups that were admitted together are played one after another, and weights
    are taken when nothing is being played. "within": between any two steps; with cache = "recompute" running
    answers are then computed again under the new weights, so that each later token is drawn from what these
    say of all that stands before it. With "keep" they go on over keys and values of the old ones.
    in_order: rounds and weight updates are processed in FIFO order, so which weights sample a round does not
    depend on timing.
    """

    def __init__(
        self,
        rollouts: EpisodeRunner,
        *,
        swap: Swap = "between",
        cache: Cache = "recompute",
        in_order: bool = True,
    ) -> None:
        self.rollouts, self.swap, self.cache, self.in_order = rollouts, swap, cache, in_order
        self.live = -1
        self._run = ""
        self._inbox: deque[GroupRequest | Snapshot] = deque()
        self._playing: dict[int, GroupRequest] = {}
        """By the number that the rollouts have given them."""
        self._examined: dict[int, int] = {}
        """Groups of an evaluation, likewise."""
        self._asked: list[GroupRequest] = []
        self._seen: dict[int, list[Episode]] = {}
        self._began = time.monotonic()
        self._busy_s = self._take_s = 0.0

    # ------------------------------------------------------------------ what it is told

    def admit(self, requests: Sequence[GroupRequest]) -> None:
        self._inbox += requests

    def offer(self, snapshot: Snapshot) -> None:
        """Takes these weights at the next boundary; of several the newest.

        RunError for weights of another process of the learner than the first: one that has ended may have
        left them.
        """
        if self._run not in ("", snapshot.run):
            raise RunError(
                "weight sync",
                f"version {snapshot.version} is of another run of the learner, and was not taken",
            )
        self._run = snapshot.run
        older = [each for each in self._inbox if isinstance(each, Snapshot)]
        for each in older:
            self._inbox.remove(each)
        self._inbox.append(snapshot)

    def evaluate(self, requests: Sequence[GroupRequest]) -> None:
        """Plays these at the next boundary, and nothing beside; `pop_evaluated` has what they come to."""
        self._asked += requests

    def pop_evaluated(self) -> dict[int, list[Episode]]:
        """The groups of the evaluation that are complete, by number; each is handed out once."""
        seen, self._seen = self._seen, {}
        return seen

    # ------------------------------------------------------------------ what it does

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until it is told something."""
        return not (self._inbox or self._playing or self._examined or self._asked)

    @property
    def playing(self) -> bool:
        """Whether a group is being played, or waits for its turn."""
        return bool(self._playing) or any(isinstance(each, GroupRequest) for each in self._inbox)

    @property
    def offered(self) -> int:
        """The version of the weights that wait to be taken; -1 if none do."""
        return next((each.version for each in self._inbox if isinstance(each, Snapshot)), -1)

    def work(self) -> Work:
        return Work(
            busy_s=self._busy_s,
            judge_s=self.rollouts.judged_s,
            take_s=self._take_s,
            alive_s=time.monotonic() - self._began,
        )

    def turn(self, *, swaps: bool = True) -> list[FinishedGroup]:
        """The groups that are complete after one more step; or none, after new weights were taken instead.

        swaps: whether this is a boundary at which weights may be taken.
        """
        if self.idle:
            return []
        begin = time.monotonic()
        done = self._turned(swaps)
        self._busy_s += time.monotonic() - begin
        return done

    def _turned(self, swaps: bool) -> list[FinishedGroup]:
        between = self.swap == "between"
        # What cannot be put aside is played to its end before an evaluation, and nothing is begun meanwhile.
        ends = bool(self._asked) and not self.rollouts.puts_aside
        if not self._examined and not (between and self._playing):
            if swaps and self._takes_weights():
                return []
            if self._asked and self.offered < 0 and not (ends and self._playing):
                self.examine(self._asked)
                self._asked = []
        if not self._examined and not (ends and self._playing) and (starting := self._starting()):
            self.open(starting)
        return self.step()

    # ------------------------------------------------------------------ each of its acts

    def step(self) -> list[FinishedGroup]:
        """The groups that are complete after one more step of the engine."""
        if not self._examined:
            self.rollouts.run_all()
            self.rollouts.unpause()
        done = []
        for number, episodes in self.rollouts.step():
            if number in self._examined:
                self._seen[self._examined.pop(number)] = episodes
            else:
                done.append(FinishedGroup(number=self._playing.pop(number).number, episodes=episodes))
        return done

    def load_snapshot(self, snapshot: Snapshot) -> None:
        """Draws from these weights from now on. What runs is put aside until the next step."""
        begin = time.monotonic()
        keep = self.cache == "keep" and self.rollouts.engine.busy
        if not keep:
            self.rollouts.pause()
        self.rollouts.receive(load_snapshot(self.rollouts.engine, snapshot, keep=keep))
        self.live = snapshot.version
        self._take_s += time.monotonic() - begin

    def examine(self, requests: Sequence[GroupRequest]) -> None:
        """Begins an evaluation. What runs is put aside until it is over."""
        self.rollouts.pause()
        for each in requests:
            self._examined[self.rollouts.open(each)] = each.number
        self.rollouts.run_only(set(self._examined))

    def open(self, requests: Sequence[GroupRequest]) -> None:
        """Begins groups, or goes on with those that have begun elsewhere, behind what runs."""
        self.rollouts.run_all()
        self.rollouts.unpause()
        for each in requests:
            if not each.begun:
                self.rollouts.unpause()  # what has begun elsewhere stands before it
            self._playing[self.rollouts.open(each)] = each

    def _takes_weights(self) -> bool:
        """Takes the newest weights, if it is their turn."""
        found = next((each for each in self._inbox if isinstance(each, Snapshot)), None)
        if found is None or (self.swap == "between" and self.in_order and self._inbox[0] is not found):
            return False
        self.load_snapshot(found)
        self._inbox.remove(found)
        return True

    def _starting(self) -> list[GroupRequest]:
        """The groups whose turn it is, which leave the inbox."""
        if self.swap == "within":  # nobody waits behind weights that are taken at the next boundary
            starting = [each for each in self._inbox if isinstance(each, GroupRequest)]
            self._inbox = deque(each for each in self._inbox if isinstance(each, Snapshot))
            return starting
        starting = []
        while not self._playing and self._inbox and isinstance(first := self._inbox[0], GroupRequest):
            if starting and first.round != starting[0].round:
                break
            starting.append(first)
            self._inbox.popleft()
        return starting

    def unfinished(self) -> list[GroupRequest]:
        """What it was given and has not finished, with every token drawn so far, as it was admitted."""
        parts = self.rollouts.parts()
        playing = [replace(each, begun=parts[n]) for n, each in self._playing.items()]
        return [*playing, *(each for each in self._inbox if isinstance(each, GroupRequest))]
