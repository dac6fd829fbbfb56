"""One engine with its rollouts, which starts groups and loads weights between two steps of the engine.

    turn    consumes       admitted groups in FIFO order, the newest weights offered, and evaluations
            waits for      only what has a deadline of its own
            unblocked by   `admit`, `offer` or `evaluate`; until then it returns at once (see `idle`)

All decisions on which weights sample which tokens are made here, so a sampler makes the same ones in the
loop's thread, in another process and on another machine.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from posttrain.recipe.asynchrony import Cache, Swap
from posttrain.rollout.episode_runner import EpisodeRunner
from posttrain.rollout.protocol import FinishedGroup, GroupRequest, Work
from posttrain.rollout.snapshots import Snapshot, load_snapshot
from posttrain.types import Episode, RunError


class RolloutWorker:
    """Play groups on an engine of its own.

    swap: when weights are loaded. "between": rounds (groups admitted together) are played one after another,
    and weights are loaded when nothing is being played. "within": between any two steps of the engine.
    cache: what becomes of running answers, with "within". "recompute": their KV cache is computed again, so
    the new weights alone decide each later token. "keep": they continue on the KV cache of the old weights.
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
        """Number of the weights that it samples with (see Snapshot)."""
        self._run = ""
        self._inbox: deque[GroupRequest | Snapshot] = deque()
        self._playing: dict[int, GroupRequest] = {}
        """Requests by the number that `rollouts.open` returned."""
        self._evaluating: dict[int, int] = {}
        """`GroupRequest.number` of the groups of a running evaluation, by the same number."""
        self._evaluation: list[GroupRequest] = []
        """Requests of an evaluation that has not started."""
        self._evaluated: dict[int, list[Episode]] = {}
        self._started_at = time.monotonic()
        self._busy_s = self._take_s = 0.0

    # ------------------------------------------------------------------ messages of the learner

    def admit(self, requests: Sequence[GroupRequest]) -> None:
        self._inbox += requests

    def offer(self, snapshot: Snapshot) -> None:
        """Load these weights at the next boundary; they replace older ones that are not loaded yet.

        Raises RunError for weights of another learner process than the first: they may be of one that has
        ended.
        """
        if self._run not in ("", snapshot.run):
            raise RunError(
                "weight sync",
                f"version {snapshot.version} is of another run of the learner, and was not taken",
            )
        self._run = snapshot.run
        superseded = [item for item in self._inbox if isinstance(item, Snapshot)]
        for older in superseded:
            self._inbox.remove(older)
        self._inbox.append(snapshot)

    def evaluate(self, requests: Sequence[GroupRequest]) -> None:
        """Play these groups at the next boundary, and no others meanwhile; `pop_evaluated` returns them."""
        self._evaluation += requests

    def sleep(self) -> None:
        """Let the engine free its memory until weights are loaded; nothing may be playing."""
        self.rollouts.pause()  # an agent may still ask after its episode has ended
        self.rollouts.engine.sleep()
        self.live = -1

    def pop_evaluated(self) -> dict[int, list[Episode]]:
        """Return the episodes of complete groups of the evaluation by number, each group once."""
        groups, self._evaluated = self._evaluated, {}
        return groups

    # ------------------------------------------------------------------ turns

    @property
    def idle(self) -> bool:
        """Return whether there is nothing to do until the next message."""
        return not (self._inbox or self._playing or self._evaluating or self._evaluation)

    @property
    def playing(self) -> bool:
        """Return whether an admitted group is not finished."""
        return bool(self._playing) or any(isinstance(item, GroupRequest) for item in self._inbox)

    @property
    def offered(self) -> int:
        """Number of the weights that are offered and not loaded; -1 if there are none."""
        return next((item.number for item in self._inbox if isinstance(item, Snapshot)), -1)

    def work(self) -> Work:
        return Work(
            busy_s=self._busy_s,
            judge_s=self.rollouts.judged_s,
            take_s=self._take_s,
            alive_s=time.monotonic() - self._started_at,
        )

    def turn(self, *, swaps: bool = True) -> list[FinishedGroup]:
        """Make one step, or load weights instead, and return the groups that are complete.

        swaps: whether weights may be loaded in this turn.
        """
        if self.idle:
            return []
        begin = time.monotonic()
        groups = self._do_turn(swaps)
        self._busy_s += time.monotonic() - begin
        return groups

    def _do_turn(self, swaps: bool) -> list[FinishedGroup]:
        between = self.swap == "between"
        # Groups that cannot pause end before an evaluation starts, and no others are started meanwhile.
        drains = bool(self._evaluation) and not self.rollouts.can_pause
        if not self._evaluating and not (between and self._playing):
            if swaps and self._load_offered():
                return []
            if self._evaluation and self.offered < 0 and not (drains and self._playing):
                self.start_evaluation(self._evaluation)
                self._evaluation = []
        if not self._evaluating and not (drains and self._playing) and (requests := self._pop_startable()):
            self.open(requests)
        return self.step()

    # ------------------------------------------------------------------ parts of a turn

    def step(self) -> list[FinishedGroup]:
        """Make one step of the engine and return the groups that are complete."""
        if not self._evaluating:
            self.rollouts.run_all()
            self.rollouts.unpause()
        groups = []
        for number, episodes in self.rollouts.step():
            if number in self._evaluating:
                # Nothing is trained on them, and experts take more memory than all else.
                self._evaluated[self._evaluating.pop(number)] = [_without_routes(e) for e in episodes]
            else:
                groups.append(FinishedGroup(number=self._playing.pop(number).number, episodes=episodes))
        return groups

    def load_snapshot(self, snapshot: Snapshot) -> None:
        """Load weights and verify them; running answers pause until the next step, except with "keep"."""
        begin = time.monotonic()
        keep = self.cache == "keep" and self.rollouts.engine.busy
        if not keep:
            self.rollouts.pause()
        self.rollouts.receive(load_snapshot(self.rollouts.engine, snapshot, keep=keep))
        self.live = snapshot.number
        self._take_s += time.monotonic() - begin

    def start_evaluation(self, requests: Sequence[GroupRequest]) -> None:
        """Start the groups of an evaluation, and pause all others until it is over."""
        self.rollouts.pause()
        for request in requests:
            self._evaluating[self.rollouts.open(request)] = request.number
        self.rollouts.run_only(set(self._evaluating))

    def open(self, requests: Sequence[GroupRequest]) -> None:
        """Start or resume groups; requests reach the engine in the order of running, then these groups."""
        self.rollouts.run_all()
        self.rollouts.unpause()
        for request in requests:
            if not request.begun:
                self.rollouts.unpause()  # submits resumed groups that come before this one
            self._playing[self.rollouts.open(request)] = request

    def _load_offered(self) -> bool:
        """Load the offered weights if it is their turn, and return whether it was."""
        snapshot = next((item for item in self._inbox if isinstance(item, Snapshot)), None)
        if snapshot is None or (self.swap == "between" and self.in_order and self._inbox[0] is not snapshot):
            return False
        self.load_snapshot(snapshot)
        self._inbox.remove(snapshot)
        return True

    def _pop_startable(self) -> list[GroupRequest]:
        """Remove from the inbox the groups that may start now, and return them."""
        if self.swap == "within":  # weights are loaded between any two steps, so no group waits for them
            requests = [item for item in self._inbox if isinstance(item, GroupRequest)]
            self._inbox = deque(item for item in self._inbox if isinstance(item, Snapshot))
            return requests
        requests = []
        while not self._playing and self._inbox and isinstance(first := self._inbox[0], GroupRequest):
            if requests and first.round != requests[0].round:
                break
            requests.append(first)
            self._inbox.popleft()
        return requests

    def unfinished(self) -> list[GroupRequest]:
        """Return the admitted groups that are not finished, with the tokens sampled so far, in FIFO order."""
        parts = self.rollouts.parts()
        playing = [replace(request, begun=parts[n]) for n, request in self._playing.items()]
        return [*playing, *(item for item in self._inbox if isinstance(item, GroupRequest))]


def _without_routes(episode: Episode) -> Episode:
    """Return the episode without the experts of its tokens."""
    if all(row.routes is None for row in episode.trajectories):
        return episode
    trajectory, *branches = (replace(row, routes=None) for row in episode.trajectories)
    return replace(episode, trajectory=trajectory, branches=tuple(branches))
