"""Workers as actors of a Ray cluster, and weights in its object store.

Methods of an actor, each of which Ray runs in a thread of its own:

    handle       pass a message to the worker
    collect      return the worker's messages, waiting up to a second; the learner keeps one such call
                 pending for each actor
    episodes_of  return the episodes of groups that stay with the actor, to the rank that trains on them
    stack        return the worker's stack
    end          end the worker

The worker is served by another thread of the actor, so it continues while the learner is busy, and its `work`
messages come from the loop that steps its engine (see remote.py).
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
from posttrain.models.fingerprint import NamedTensors
from posttrain.rollout.cluster import NAMESPACE, Cluster
from posttrain.rollout.protocol import FinishedGroup
from posttrain.rollout.remote import BEAT_S, END_S, MakeWorker, Message, serve
from posttrain.rollout.snapshots import Index, build_index, copy_into, views
from posttrain.types import Episode, RunError

VERSIONS = 3
"""Versions for which the object store of a started cluster has room; Ray spills further ones to disk."""
_FETCH_S = 300.0
"""Seconds within which weights or episodes must arrive from another machine."""


# ---------------------------------------------------------------------- in the actor


class _Mailbox:
    """Pass messages between the actor's methods and the thread that serves the worker.

    Messages are passed without pickling: Ray does not count a pickled reference to weights, and would free
    them.
    """

    def __init__(self) -> None:
        self._inward: deque[Message] = deque()
        self._outward: list[Message] = []
        self._news = threading.Condition()
        self._closed = False

    def put(self, message: Message) -> None:
        """Add a message for the worker."""
        with self._news:
            self._inward.append(message)
            self._news.notify_all()

    def collect(self, timeout_s: float) -> list[Message] | None:
        """Return the worker's messages, waiting up to `timeout_s` for the first; None once it has closed."""
        with self._news:
            self._news.wait_for(lambda: self._outward or self._closed, timeout_s)
            messages, self._outward = self._outward, []
            return messages or (None if self._closed else [])

    # ------------------------------------------------------------------ see remote.WorkerConnection

    def send(self, message: Message) -> None:
        """Add a message of the worker."""
        with self._news:
            self._outward.append(message)
            self._news.notify_all()

    def poll(self, timeout_s: float) -> bool:
        """Return whether there is a message for the worker, waiting up to `timeout_s` for one."""
        with self._news:
            return bool(self._news.wait_for(lambda: self._inward, timeout_s))

    def recv(self) -> Message:
        """Return the next message for the worker."""
        with self._news:
            return self._inward.popleft()

    def close(self) -> None:
        """Mark that the worker will send no more."""
        with self._news:
            self._closed = True
            self._news.notify_all()


class _Actor:
    """A Ray actor with one worker."""

    def __init__(self, make: MakeWorker, folder: str, log: str, name: str) -> None:
        """folder: the learner's working directory, to which paths of the recipe are relative. log: file that
        receives the worker's output. name: of the actor; "" if episodes are sent to the learner, not stored.

        A folder or log that this machine does not have is ignored, and Ray's own stays.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the learner, which ends the actor
        with suppress(OSError):
            os.chdir(folder)
        with suppress(OSError), open(log, "ab") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        self._name = name
        self._stored: dict[int, Sequence[Episode]] = {}
        """Episodes of groups that are not released."""
        self._mailbox = _Mailbox()
        self._thread = threading.Thread(target=serve, args=(self._mailbox, make), daemon=True)
        self._thread.start()

    def handle(self, message: Message) -> None:
        """Pass a message to the worker; drop the stored episodes of groups in ("release", numbers)."""
        if message[0] == "release":
            for number in message[1]:
                self._stored.pop(number, None)
        else:
            self._mailbox.put(message)

    def collect(self, timeout_s: float) -> bytes:
        """Return the worker's messages, pickled here so that Ray does not keep them in the object store."""
        messages = self._mailbox.collect(timeout_s)
        if messages and self._name:
            messages = [
                (m[0], [self._store(group) for group in m[1]]) if m[0] == "finished" else m for m in messages
            ]
        return pickle.dumps(messages)

    def _store(self, group: FinishedGroup) -> FinishedGroup:
        """Store the episodes of a group until it is released, and return it with their summaries."""
        self._stored[group.number] = group.episodes
        return replace(group, episodes=(), summaries=[e.summary() for e in group.episodes], place=self._name)

    def episodes_of(self, numbers: Sequence[int]) -> bytes:
        """Return the stored episodes of these groups by number, pickled; groups not stored are left out."""
        return pickle.dumps({n: self._stored[n] for n in numbers if n in self._stored})

    def stack(self) -> str:
        """Return the stack of the worker's thread, the last call first."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(reversed(traceback.format_stack(frame))) if frame else ""

    def end(self) -> None:
        """Ask the worker to end, and wait up to END_S for it."""
        self._mailbox.put(("close",))
        self._thread.join(END_S)


# ---------------------------------------------------------------------- the learner's side


def call(actor: Any, method: str, *arguments: object) -> Any:
    """Call an actor's method in the concurrency group of the same name, and return the reference."""
    return getattr(actor, method).options(concurrency_group=method).remote(*arguments)


class RayChannel:
    """A worker in a Ray actor (see remote.Channel); this process must have joined a cluster."""

    def __init__(self, make: MakeWorker, log: Path, *, cpus: float, gpus: float, keeps: bool = False) -> None:
        """log: file that receives the worker's output. cpus, gpus: what Ray reserves for the actor.

        keeps: store episodes in the actor and send only their summaries (see `fetch`).
        """
        import ray

        log.parent.mkdir(parents=True, exist_ok=True)
        # One thread for each method: none waits for another, and messages to `handle` keep their order.
        groups = dict.fromkeys(("handle", "collect", "episodes_of", "stack", "end"), 1)
        kind = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0, concurrency_groups=groups)(_Actor)
        name = f"sampler-{uuid.uuid4().hex}" if keeps else ""
        options = {"name": name, "namespace": NAMESPACE} if keeps else {}
        self._actor = kind.options(**options).remote(make, os.getcwd(), str(log.absolute()), name)
        self._sends: list[Any] = []
        """References of calls of `handle` that are not known to have succeeded."""
        self.bytes = 0
        """Bytes sent and received, without weights."""
        self._news = call(self._actor, "collect", BEAT_S)
        """Reference of the pending call of `collect`."""
        self._end_reason = "its actor ended"

    def send(self, message: Message) -> None:
        """Send a message; that the actor has died shows in the next `receive`."""
        if message[0] != "offer":
            self.bytes += len(pickle.dumps(message))
        self._sends.append(call(self._actor, "handle", message))

    def receive(self) -> list[Message]:
        """Return the messages that have arrived. Raises EOFError once no more can."""
        import ray

        try:
            if self._sends:
                delivered, self._sends = ray.wait(self._sends, num_returns=len(self._sends), timeout=0)
                ray.get(delivered)
            if not ray.wait([self._news], timeout=0)[0]:
                return []
            data: bytes = ray.get(self._news)
        except ray.exceptions.RayError as error:
            self._end_reason = how_ended(error)
            raise EOFError from error
        self.bytes += len(data)
        messages: list[Message] | None = pickle.loads(data)
        if messages is None:
            raise EOFError
        self._news = call(self._actor, "collect", BEAT_S)
        return messages

    def wait(self, others: Sequence["RayChannel"], timeout_s: float) -> None:
        """Wait up to `timeout_s` until this channel or one of `others` has a message."""
        import ray

        ray.wait([self._news, *(other._news for other in others)], timeout=timeout_s)

    def stack(self) -> str:
        """Return the worker's stack, the last call first; "" if the actor does not answer."""
        import ray

        with suppress(ray.exceptions.RayError):
            return str(ray.get(call(self._actor, "stack"), timeout=END_S))
        return ""

    def end(self) -> str:
        """End the actor, by force after END_S, and return how it ended."""
        import ray

        with suppress(ray.exceptions.RayError):
            ray.wait([call(self._actor, "end")], timeout=END_S)
            ray.kill(self._actor)
        return self._end_reason


def how_ended(error: Exception) -> str:
    """Return the one sentence of Ray's message that says how an actor ended."""
    message = re.sub(r"\x1b\[\d*m", "", str(error)).strip() or type(error).__name__
    _, separator, detail = message.partition("Worker exit detail: ")
    sentence = (detail if separator else message.splitlines()[-1]).split(". ")[0]
    return f"its actor ended: {sentence[:300]}"


def fetch(groups: Iterable[FinishedGroup]) -> dict[int, Sequence[Episode]]:
    """Return the episodes of these groups by number, from the actors that store them.

    Groups of actors that have ended are left out. Raises RunError if an actor does not answer in _FETCH_S.
    """
    numbers_of: dict[str, list[int]] = {}
    for group in groups:
        numbers_of.setdefault(group.place, []).append(group.number)
    if not numbers_of:
        return {}
    import ray

    e = ray.exceptions
    actor_ended = (e.RayActorError, e.OutOfMemoryError, e.NodeDiedError, e.WorkerCrashedError)
    episodes: dict[int, Sequence[Episode]] = {}
    calls = []
    for place, numbers in numbers_of.items():
        with suppress(ValueError):  # the actor of this name has ended
            actor = ray.get_actor(place, namespace=NAMESPACE)
            calls.append(call(actor, "episodes_of", numbers))
    for reference in calls:
        try:
            episodes |= pickle.loads(ray.get(reference, timeout=_FETCH_S))
        except actor_ended:
            continue
        except ray.exceptions.RayError as error:
            raise RunError(
                "checkpoint", f"a sampler does not give the episodes that it keeps: {cause(error)}"
            ) from error
    return episodes


# ---------------------------------------------------------------------- weights


@dataclass(frozen=True, slots=True)
class RayObject:
    """A snapshots.StoredWeights in the object store of a cluster."""

    ref: Any
    index: Index
    digest: str

    def open(self) -> NamedTensors:
        """Yield the tensors without copying; the processes of a machine share one copy."""
        import ray

        try:
            data = ray.get(self.ref, timeout=_FETCH_S)
        except ray.exceptions.RayError as error:
            raise RunError(
                "weight sync", f"the weights cannot be read from the object store: {cause(error)}"
            ) from error
        yield from views(from_dlpack(data), self.index)


class ObjectStore:
    """A snapshots.WeightStore in the object store of a cluster; `close` leaves the cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.bytes = cluster, 0
        self._index: Index = ()
        self._size = 0
        self._refs: dict[int, Any] = {}

    def put(self, number: int, weights: Callable[[], NamedTensors]) -> RayObject:
        """Copy these weights to the object store. Raises RunError if Ray cannot store them."""
        import ray

        if not self._index:
            self._index, self._size = build_index(weights())
        buffer = torch.empty(self._size, dtype=torch.uint8)
        digest = copy_into(buffer, weights(), self._index)
        try:
            self._refs[number] = ray.put(buffer.numpy())
        except ray.exceptions.RayError as error:
            raise RunError(
                "weight sync", f"weights {number} do not go into the object store: {cause(error)}"
            ) from error
        self.bytes += self._size
        return RayObject(self._refs[number], self._index, digest)

    def retain(self, numbers: set[int]) -> None:
        """Drop the references to all others; Ray frees each after its last reader."""
        self._refs = {number: ref for number, ref in self._refs.items() if number in numbers}

    def close(self) -> None:
        self._refs.clear()
        self.cluster.close()
