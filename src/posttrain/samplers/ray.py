"""Workers as actors of a Ray cluster, and weights in its object store.

    handle       hands the worker a message, while it is busy too
    heard        waits for what the worker tells, at most a second at a time; the learner has one such
                 call open for each actor
    episodes_of  gives the episodes of groups that stay with the actor, to whatever rank trains on them
    stack        says what the worker is doing

The worker itself is served by a thread of the actor, so it goes on while the learner is busy and asks nobody
anything, and its signs of life come from the loop that steps its engine.
"""

import os
import pickle
import re
import signal
import sys
import threading
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from posttrain.base.usercode import cause
from posttrain.models.fingerprint import Named
from posttrain.samplers.cluster import NAMESPACE, Cluster
from posttrain.samplers.protocol import FinishedGroup
from posttrain.samplers.remote import BEAT_S, END_S, Make, Message, serve
from posttrain.samplers.snapshots import Index, indexed, views, write
from posttrain.types import Episode, RunError

VERSIONS = 3
"""How many versions a store of our own has room for; of more Ray moves some to the disk."""
_FETCH_S = 300.0
"""In which weights of another machine must have come."""


# ---------------------------------------------------------------------- in the actor


class _Mailbox:
    """The connection between the thread that serves a worker and the actor's methods, in one process.

    It hands messages over as they are: a reference to weights that went through pickle would no longer be
    counted.
    """

    def __init__(self) -> None:
        self._inward: deque[Message] = deque()
        self._outward: list[Message] = []
        self._news = threading.Condition()
        self._closed = False

    def put(self, message: Message) -> None:
        """Leaves a message for the worker."""
        with self._news:
            self._inward.append(message)
            self._news.notify_all()

    def collect(self, timeout_s: float) -> list[Message] | None:
        """What the worker has to tell, waiting so long for the first; None once it will tell no more."""
        with self._news:
            self._news.wait_for(lambda: self._outward or self._closed, timeout_s)
            found, self._outward = self._outward, []
            return found or (None if self._closed else [])

    # ------------------------------------------------------------------ see remote.Line

    def send(self, message: Message) -> None:
        """Leaves a message of the worker's."""
        with self._news:
            self._outward.append(message)
            self._news.notify_all()

    def poll(self, timeout_s: float) -> bool:
        """Whether there is a message for the worker; waits so long for one."""
        with self._news:
            return bool(self._news.wait_for(lambda: self._inward, timeout_s))

    def recv(self) -> Message:
        """The next message for the worker."""
        with self._news:
            return self._inward.popleft()

    def close(self) -> None:
        """The worker will tell no more."""
        with self._news:
            self._closed = True
            self._news.notify_all()


class _Actor:
    """A worker on a cluster."""

    def __init__(self, make: Make, folder: str, log: str, name: str) -> None:
        """folder: the learner's, in which paths of the recipe begin. log: where what it prints goes.
        name: the actor's; without one it keeps no episodes.

        On a machine that does not share the learner's files both are left as Ray makes them.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the learner, which ends this
        with suppress(OSError):
            os.chdir(folder)
        with suppress(OSError), open(log, "ab") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        self._name = name
        self._kept: dict[int, Sequence[Episode]] = {}
        self._mailbox = _Mailbox()
        self._thread = threading.Thread(target=serve, args=(self._mailbox, make), daemon=True)
        self._thread.start()

    def handle(self, message: Message) -> None:
        """Hands the worker a message."""
        if message[0] == "release":
            for number in message[1]:
                self._kept.pop(number, None)
        else:
            self._mailbox.put(message)

    def heard(self, timeout_s: float) -> bytes:
        """What it has to tell, pickled, so that nothing in it stays in the object store."""
        found = self._mailbox.collect(timeout_s)
        if found and self._name:
            found = [(m[0], [self._keep(f) for f in m[1]]) if m[0] == "finished" else m for m in found]
        return pickle.dumps(found)

    def _keep(self, group: FinishedGroup) -> FinishedGroup:
        """What is told of a group whose episodes stay here until they are released."""
        self._kept[group.number] = group.episodes
        return replace(group, episodes=(), summaries=[e.summary() for e in group.episodes], place=self._name)

    def episodes_of(self, numbers: Sequence[int]) -> bytes:
        """The episodes of these groups that are here, by number, pickled."""
        return pickle.dumps({n: self._kept[n] for n in numbers if n in self._kept})

    def stack(self) -> str:
        """Where its thread is, the last call first."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(reversed(traceback.format_stack(frame))) if frame else ""

    def end(self) -> None:
        """Tells it to end, and waits a little for it to do so."""
        self._mailbox.put(("close",))
        self._thread.join(END_S)


# ---------------------------------------------------------------------- the learner's side


def call(actor: Any, method: str, *given: object) -> Any:
    """Calls an actor's method, in the thread that the actor has for it."""
    return getattr(actor, method).options(concurrency_group=method).remote(*given)


class RayChannel:
    """A worker in an actor of the cluster that this process has joined (see remote.Channel)."""

    def __init__(self, make: Make, log: Path, *, cpus: float, gpus: float, keeps: bool = False) -> None:
        """log: where what it prints goes. cpus, gpus: what is set aside for it.

        keeps: whether episodes stay with the actor, and only what is said of them comes.
        """
        import ray

        log.parent.mkdir(parents=True, exist_ok=True)
        # A thread for each method, so that none waits for another; what one is told keeps its order.
        groups = dict.fromkeys(("handle", "heard", "episodes_of", "stack", "end"), 1)
        kind = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0, concurrency_groups=groups)(_Actor)
        name = f"sampler-{uuid.uuid4().hex}" if keeps else ""
        named = {"name": name, "namespace": NAMESPACE} if keeps else {}
        self._actor = kind.options(**named).remote(make, os.getcwd(), str(log.absolute()), name)
        self._told: list[Any] = []
        self.bytes = 0
        """Sent and received, weights aside."""
        self._heard = call(self._actor, "heard", BEAT_S)
        self._how = "its actor ended"

    def send(self, message: Message) -> None:
        """Sends it. An actor that is not there is found dead when it is heard next."""
        if message[0] != "offer":
            self.bytes += len(pickle.dumps(message))
        self._told.append(call(self._actor, "handle", message))

    def receive(self) -> list[Message]:
        """What has arrived; EOFError once nothing more can."""
        import ray

        try:
            if self._told:
                done, self._told = ray.wait(self._told, num_returns=len(self._told), timeout=0)
                ray.get(done)
            if not ray.wait([self._heard], timeout=0)[0]:
                return []
            came: bytes = ray.get(self._heard)
        except ray.exceptions.RayError as error:
            self._how = how_ended(error)
            raise EOFError from error
        self.bytes += len(came)
        found: list[Message] | None = pickle.loads(came)
        if found is None:
            raise EOFError
        self._heard = call(self._actor, "heard", BEAT_S)
        return found

    def wait(self, others: Sequence["RayChannel"], timeout_s: float) -> None:
        """Until this one or another has something, or so long."""
        import ray

        ray.wait([self._heard, *(other._heard for other in others)], timeout=timeout_s)

    def stack(self) -> str:
        """What it is doing, the last call first; empty if it cannot tell."""
        import ray

        with suppress(ray.exceptions.RayError):
            return str(ray.get(call(self._actor, "stack"), timeout=END_S))
        return ""

    def end(self) -> str:
        """Ends it, by force if it does not do so when told to; how it ended."""
        import ray

        with suppress(ray.exceptions.RayError):
            ray.wait([call(self._actor, "end")], timeout=END_S)
            ray.kill(self._actor)
        return self._how


def how_ended(error: Exception) -> str:
    """How an actor ended, of what Ray says in many lines and with addresses: the sentence that tells."""
    said = re.sub(r"\x1b\[\d*m", "", str(error)).strip() or type(error).__name__
    _, there, detail = said.partition("Worker exit detail: ")
    sentence = (detail if there else said.splitlines()[-1]).split(". ")[0]
    return f"its actor ended: {sentence[:300]}"


def fetch(groups: Iterable[FinishedGroup]) -> dict[int, Sequence[Episode]]:
    """The episodes of these groups, by number, from the actors that keep them; not of actors that ended.

    RunError for episodes that did not come in _FETCH_S.
    """
    import ray

    e = ray.exceptions
    gone = (e.RayActorError, e.OutOfMemoryError, e.NodeDiedError, e.WorkerCrashedError)
    asked: dict[str, list[int]] = {}
    for group in groups:
        asked.setdefault(group.place, []).append(group.number)
    found: dict[int, Sequence[Episode]] = {}
    calls = []
    for place, numbers in asked.items():
        with suppress(ValueError):  # there is no actor of this name any more
            actor = ray.get_actor(place, namespace=NAMESPACE)
            calls.append(call(actor, "episodes_of", numbers))
    for answer in calls:
        try:
            found |= pickle.loads(ray.get(answer, timeout=_FETCH_S))
        except gone:
            continue
        except ray.exceptions.RayError as error:
            raise RunError(
                "checkpoint", f"a sampler does not give the episodes that it keeps: {cause(error)}"
            ) from error
    return found


# ---------------------------------------------------------------------- weights


@dataclass(frozen=True, slots=True)
class RayObject:
    """One version in the object store of a cluster."""

    ref: Any
    index: Index
    digest: str

    def open(self) -> Named:
        """The tensors, which are read where they lie: on each machine there is one copy for all."""
        import ray

        try:
            whole = ray.get(self.ref, timeout=_FETCH_S)
        except ray.exceptions.RayError as error:
            raise RunError(
                "weight sync", f"the weights cannot be read from the object store: {cause(error)}"
            ) from error
        yield from views(from_dlpack(whole), self.index)


class ObjectStore:
    """Weights in the object store of a cluster (see snapshots.Store), which this leaves when it is closed."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.bytes = cluster, 0
        self._index: Index = ()
        self._size = 0
        self._refs: dict[int, Any] = {}

    def put(self, version: int, weights: Callable[[], Named]) -> RayObject:
        """A copy of these weights."""
        import ray

        if not self._index:
            self._index, self._size = indexed(weights())
        whole = torch.empty(self._size, dtype=torch.uint8)
        found = write(weights(), whole, self._index)
        try:
            self._refs[version] = ray.put(whole.numpy())
        except ray.exceptions.RayError as error:
            raise RunError(
                "weight sync", f"version {version} does not go into the object store: {cause(error)}"
            ) from error
        self.bytes += self._size
        return RayObject(self._refs[version], self._index, found)

    def retain(self, versions: set[int]) -> None:
        """Gives up all other versions; Ray frees them when nobody reads them any more."""
        self._refs = {version: ref for version, ref in self._refs.items() if version in versions}

    def close(self) -> None:
        self._refs.clear()
        self.cluster.close()
