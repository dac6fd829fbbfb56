"""Workers as actors of a Ray cluster, and weights in its object store.

    told      hands the worker a message, while it is busy too
    heard     waits for what the worker tells, at most a second at a time; the learner has one such call open
              for each actor
    stack     says what the worker is doing

The worker itself is served by a thread of the actor, so it goes on while the learner is busy and asks nobody
anything, and its signs of life come from the loop that steps its engine.
"""

import importlib.util
import logging
import math
import os
import pickle
import re
import secrets
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from posttrain.samplers.remote import BEAT_S, END_S, Make, Message, serve
from posttrain.samplers.snapshots import Index, indexed, views, written
from posttrain.types import RunError, UserError
from posttrain.usercode import cause
from posttrain.weights import Named

_SPARE = 256 << 20
"""Bytes of a store of our own for all that is not weights."""
_VERSIONS = 3
"""How many versions it has room for; of more, while a reader is slow, Ray moves some to the disk."""
_REACH_S = 10.0
"""In which a cluster that is joined must answer."""
_FETCH_S = 300.0
"""In which weights of another machine must have come."""


def check_ray() -> None:
    """Nothing; UserError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("ray is not installed", where="async.place", mend="pip install 'posttrain[ray]'")


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

    def __init__(self, make: Make, folder: str, log: str) -> None:
        """folder: the learner's, in which paths of the recipe begin. log: where what it prints goes.

        On a machine that does not share the learner's files both are left as Ray makes them.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the learner, which ends this
        with suppress(OSError):
            os.chdir(folder)
        with suppress(OSError), open(log, "ab") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        self._mailbox = _Mailbox()
        self._thread = threading.Thread(target=serve, args=(self._mailbox, make), daemon=True)
        self._thread.start()

    def told(self, message: Message) -> None:
        """Hands the worker a message."""
        self._mailbox.put(message)

    def heard(self, timeout_s: float) -> bytes:
        """What it has to tell, pickled, so that nothing in it stays in the object store."""
        return pickle.dumps(self._mailbox.collect(timeout_s))

    def stack(self) -> str:
        """Where its thread is, the last call first."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(reversed(traceback.format_stack(frame))) if frame else ""

    def end(self) -> None:
        """Tells it to end, and waits a little for it to do so."""
        self._mailbox.put(("close",))
        self._thread.join(END_S)


# ---------------------------------------------------------------------- the learner's side


class RayChannel:
    """A worker in an actor of the cluster that this process has joined (see remote.Channel)."""

    def __init__(self, make: Make, log: Path, *, cpus: float, gpus: float) -> None:
        """log: where what it prints goes. cpus, gpus: what is set aside for it."""
        import ray

        log.parent.mkdir(parents=True, exist_ok=True)
        # A thread for each method, so that none waits for another; what one is told keeps its order.
        groups = dict.fromkeys(("told", "heard", "stack", "end"), 1)
        kind = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0, concurrency_groups=groups)(_Actor)
        self._actor = kind.remote(make, os.getcwd(), str(log.absolute()))
        self._told: list[Any] = []
        self._heard = self._call("heard", BEAT_S)
        self._how = "its actor ended"

    def _call(self, method: str, *given: object) -> Any:
        return getattr(self._actor, method).options(concurrency_group=method).remote(*given)

    def send(self, message: Message) -> None:
        """Sends it. An actor that is not there is found dead when it is heard next."""
        self._told.append(self._call("told", message))

    def receive(self) -> list[Message]:
        """What has arrived; EOFError once nothing more can."""
        import ray

        try:
            if self._told:
                done, self._told = ray.wait(self._told, num_returns=len(self._told), timeout=0)
                ray.get(done)
            if not ray.wait([self._heard], timeout=0)[0]:
                return []
            found: list[Message] | None = pickle.loads(ray.get(self._heard))
        except ray.exceptions.RayError as error:
            self._how = _ended(error)
            raise EOFError from error
        if found is None:
            raise EOFError
        self._heard = self._call("heard", BEAT_S)
        return found

    def wait(self, others: Sequence["RayChannel"], timeout_s: float) -> None:
        """Until this one or another has something, or so long."""
        import ray

        ray.wait([self._heard, *(other._heard for other in others)], timeout=timeout_s)

    def stack(self) -> str:
        """What it is doing, the last call first; empty if it cannot tell."""
        import ray

        with suppress(ray.exceptions.RayError):
            return str(ray.get(self._call("stack"), timeout=END_S))
        return ""

    def end(self) -> str:
        """Ends it, by force if it does not do so when told to; how it ended."""
        import ray

        with suppress(ray.exceptions.RayError):
            ray.wait([self._call("end")], timeout=END_S)
            ray.kill(self._actor)
        return self._how


def _ended(error: Exception) -> str:
    """How an actor ended, of what Ray says in many lines and with addresses: the sentence that tells."""
    said = re.sub(r"\x1b\[\d*m", "", str(error)).strip() or type(error).__name__
    _, there, detail = said.partition("Worker exit detail: ")
    sentence = (detail if there else said.splitlines()[-1]).split(". ")[0]
    return f"its actor ended: {sentence[:300]}"


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
            raise RunError(f"the weights cannot be had from the object store: {cause(error)}") from error
        yield from views(from_dlpack(whole), self.index)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """What happens inside is cut short by no signal but a second one; the first is sent again afterwards.

    An interpreter that ends with Ray half begun ends in a fault of memory. And Ray sets a handler of its own.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def keep(number: int, frame: object) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)

    before = {each: signal.signal(each, keep) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for number in came:
            signal.raise_signal(number)


class ObjectStore:
    """Weights in the object store of a Ray cluster (see snapshots.Store), which this process joins by it.

    address: of the cluster; without one a cluster is started on this machine, which ends when this is closed.
    A process that has joined one stays there. needs: what all samplers together ask for, by the recipe's keys
    async.cpus and async.gpus. size: bytes of a version, about.

    Raises UserError where there is no such cluster, or where it has not so much.
    """

    def __init__(self, address: str, needs: Mapping[str, float], size: int) -> None:
        import ray

        self.bytes = 0
        """Copied so far."""
        self._index: Index = ()
        self._size = 0
        self._refs: dict[int, Any] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._joined = not ray.is_initialized()
        try:
            if self._joined:
                self._join(address, needs, size)
            there = ray.cluster_resources()
            for key, kind in (("async.cpus", "CPU"), ("async.gpus", "GPU")):
                if needs[key] > (found := there.get(kind, 0.0)):
                    raise UserError(
                        f"the samplers ask for {needs[key]:g} {kind}s, and the cluster has {found:g}",
                        where=key,
                        mend="set async.samplers, or this, lower",
                    )
        except BaseException:
            self.close()
            raise

    def _join(self, address: str, needs: Mapping[str, float], size: int) -> None:
        import ray

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # Ray prints of workers that end, addresses included, on standard output; we say it in our own words.
        vars(ray._private.worker)["_worker_logs_enabled"] = False
        settings: dict[str, Any] = {"address": address}
        if not address:
            # Without a token of its own Ray would leave one in the home directory.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            # What is not set aside is not hidden: sampler and learner may share a GPU.
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            # Ray frees what nobody refers to once a second, and versions may be large.
            os.environ.setdefault("RAY_free_objects_batch_size", "1")
            # Names of sockets may have a hundred characters, and are made of it.
            self._folder = tempfile.TemporaryDirectory(
                prefix="ray-", dir=os.environ.get("RAY_TMPDIR", "/tmp"), ignore_cleanup_errors=True
            )
            settings = {
                "address": "local",
                "num_cpus": max(1, math.ceil(needs["async.cpus"])),
                "object_store_memory": _VERSIONS * size + _SPARE,
                "include_dashboard": False,
                "_temp_dir": self._folder.name,
            }
        host, _, port = address.rpartition(":")
        try:
            if port.isdecimal() and "://" not in host:  # Ray would try for minutes, and say so
                socket.create_connection((host, int(port)), _REACH_S).close()
            with _undisturbed():
                ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **settings)
        except (OSError, RuntimeError, ValueError) as error:
            mend = "ray start --head starts one here; leave async.address out for one of the run's own"
            said = " ".join(str(error).split())[:300]
            if address:
                raise UserError(
                    f"cannot join {address!r}: {said}", where="async.address", mend=mend
                ) from error
            raise RunError(f"no Ray cluster can be started here: {said}") from error

    def put(self, version: int, weights: Callable[[], Named]) -> RayObject:
        """A copy of these weights."""
        import ray

        if not self._index:
            self._index, self._size = indexed(weights())
        whole = torch.empty(self._size, dtype=torch.uint8)
        found = written(weights(), whole, self._index)
        try:
            self._refs[version] = ray.put(whole.numpy())
        except ray.exceptions.RayError as error:
            raise RunError(f"version {version} does not go into the object store: {cause(error)}") from error
        self.bytes += self._size
        return RayObject(self._refs[version], self._index, found)

    def retain(self, versions: set[int]) -> None:
        """Gives up all other versions; Ray frees them when nobody reads them any more."""
        self._refs = {version: ref for version, ref in self._refs.items() if version in versions}

    def close(self) -> None:
        """Leaves the cluster; one that was started here ends, and leaves nothing behind."""
        import ray

        self._refs.clear()
        if self._joined:
            ray.shutdown()
        if self._folder:
            self._folder.cleanup()
