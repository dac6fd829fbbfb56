"""Join a Ray cluster, or start one on this machine and end it with the run.

A cluster that was started here leaves no process and no file; one that was joined is left as it was.
"""

import logging
import math
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.types import RunError, UserError

SPARE = 256 << 20
"""Bytes of a started cluster's object store for everything but weights."""
_MOST_ON_DISK = 10**10
"""Size of an object store up to which Ray takes its temporary folder if shared memory has no room."""
NAMESPACE = "posttrain"
"""Ray namespace of the names of actors."""
_REACH_S = 10.0
"""Seconds within which a cluster must accept a connection."""


def address_of(address: str) -> str:
    """Return the address in the recipe, else $RAY_ADDRESS, which Ray sets in its own jobs, else ""."""
    return address or os.environ.get("RAY_ADDRESS", "")


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Delay the first SIGINT or SIGTERM until the block ends; a second one interrupts it.

    An interpreter that exits while Ray starts crashes with a memory fault. The handlers of before are
    restored afterwards, as Ray installs its own.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def record(number: int, frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    handlers = {kind: signal.signal(kind, record) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for kind, handler in handlers.items():
            signal.signal(kind, handler)
        for number in received:
            signal.raise_signal(number)


def _is_of(key: str, kind: str) -> bool:
    """Return whether a recipe key counts resources of this kind, as async.cpus does for CPU."""
    return key.endswith(f"{kind.lower()}s")


def _total(needs: Mapping[str, float], kind: str) -> float:
    return sum(count for key, count in needs.items() if _is_of(key, kind))


def check_store(memory: int) -> None:
    """Raise UserError if Ray would refuse an object store of this size here, for lack of shared memory.

    Ray keeps smaller ones in its temporary folder.
    """
    folder = Path("/dev/shm")
    if memory <= _MOST_ON_DISK or "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE" in os.environ or not folder.is_dir():
        return
    if (free := shutil.disk_usage(folder).free) <= memory:
        gib = 1 << 30
        sizes = f"{memory / gib:.1f} GiB of shared memory, and {folder} has {free / gib:.1f} GiB"
        fix = "give the container more (docker run --shm-size), or join a cluster with async.address"
        raise UserError("async.place", f"a cluster of the run's own needs {sizes}", fix)


class Cluster:
    """The cluster that this process has joined, or has started and ends with `close`.

    address: the cluster's; if neither it nor $RAY_ADDRESS is set, start a cluster on this machine.
    needs: CPUs and GPUs that the run will reserve, by recipe key, as async.cpus or train.gpus.
    memory: bytes of the object store of a cluster started here.

    Raises UserError if the cluster cannot be joined or has too few CPUs or GPUs.
    """

    def __init__(self, address: str, needs: Mapping[str, float], memory: int = SPARE) -> None:
        import ray

        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._joined = not ray.is_initialized()
        try:
            if self._joined:
                self._join(address_of(address), needs, memory)
            resources = ray.cluster_resources()
            for kind in ("CPU", "GPU"):
                needed, available = _total(needs, kind), resources.get(kind, 0.0)
                if needed > available:
                    raise UserError(
                        max((key for key in needs if _is_of(key, kind)), key=needs.__getitem__),
                        f"{needed:g} {kind}s are asked for, and the cluster has {available:g}",
                        "set it lower, or take fewer samplers or ranks",
                    )
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """Address at which other processes of this machine join it."""
        import ray

        return str(ray.get_runtime_context().gcs_address)

    def _join(self, address: str, needs: Mapping[str, float], memory: int) -> None:
        import ray

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # Ray reports workers that end on standard output, with addresses; posttrain reports them itself.
        vars(ray._private.worker)["_worker_logs_enabled"] = False
        settings: dict[str, Any] = {"address": address}
        if not address:
            check_store(memory)
            # Ray writes a token to the home directory if none is set.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            # By default Ray hides all GPUs from actors that reserve none; sampler and learner may share one.
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            # Ray frees unreferenced objects in batches, once a second, and a version may be large.
            os.environ.setdefault("RAY_free_objects_batch_size", "1")
            # Paths of sockets in this folder are limited to some hundred characters, so its path is short.
            self._folder = tempfile.TemporaryDirectory(
                prefix="ray-", dir=os.environ.get("RAY_TMPDIR", "/tmp"), ignore_cleanup_errors=True
            )
            settings = {
                "address": "local",
                "num_cpus": max(1, math.ceil(_total(needs, "CPU"))),
                "object_store_memory": memory,
                "include_dashboard": False,
                "_temp_dir": self._folder.name,
            }
        host, _, port = address.rpartition(":")
        try:
            if port.isdecimal() and "://" not in host:  # Ray retries for minutes and prints it
                socket.create_connection((host, int(port)), _REACH_S).close()
            with _signals_deferred():
                ray.init(log_to_driver=False, logging_level=logging.CRITICAL, namespace=NAMESPACE, **settings)
        except (OSError, RuntimeError, ValueError) as error:
            fix = "ray start --head starts one here; leave async.address out for one of the run's own"
            message = " ".join(str(error).split())[:300]
            if address:
                raise UserError("async.address", f"cannot join {address!r}: {message}", fix) from error
            raise RunError("start Ray", f"no cluster can be started here: {message}") from error

    def close(self) -> None:
        """Leave the cluster; end it if it was started here."""
        import ray

        if self._joined:
            ray.shutdown()
        if self._folder:
            self._folder.cleanup()
