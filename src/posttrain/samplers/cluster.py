"""The Ray cluster that a process joins, or starts on this machine for as long as it needs one.

A cluster of one's own leaves nothing behind; one that is joined stays as it is.
"""

import logging
import math
import os
import secrets
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from posttrain.types import RunError, UserError

SPARE = 256 << 20
"""Bytes of a store of our own for all that is not weights."""
NAMESPACE = "posttrain"
"""In which actors have their names."""
_REACH_S = 10.0
"""In which a cluster that is joined must answer."""


def address_of(address: str) -> str:
    """Of the cluster that a recipe names, or that the environment does, as in a job that Ray has started."""
    return address or os.environ.get("RAY_ADDRESS", "")


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


def _is(key: str, kind: str) -> bool:
    return key.endswith(f"{kind.lower()}s")


def _sum(needs: Mapping[str, float], kind: str) -> float:
    return sum(count for key, count in needs.items() if _is(key, kind))


class Cluster:
    """The cluster that this process has joined.

    address: of the cluster; without one a cluster is started on this machine, which ends when this is closed.
    needs: what will be asked of it, by the recipe's keys, as async.cpus or train.gpus.
    memory: bytes of the object store of a cluster of our own.

    Raises UserError where there is no such cluster, or where it has not so much.
    """

    def __init__(self, address: str, needs: Mapping[str, float], memory: int = SPARE) -> None:
        import ray

        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._joined = not ray.is_initialized()
        try:
            if self._joined:
                self._join(address_of(address), needs, memory)
            there = ray.cluster_resources()
            for kind in ("CPU", "GPU"):
                asked, found = _sum(needs, kind), there.get(kind, 0.0)
                if asked > found:
                    raise UserError(
                        max((key for key in needs if _is(key, kind)), key=needs.__getitem__),
                        f"{asked:g} {kind}s are asked for, and the cluster has {found:g}",
                        "set it lower, or take fewer samplers or ranks",
                    )
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """By which another process of this machine joins it."""
        import ray

        return str(ray.get_runtime_context().gcs_address)

    def _join(self, address: str, needs: Mapping[str, float], memory: int) -> None:
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
                "num_cpus": max(1, math.ceil(_sum(needs, "CPU"))),
                "object_store_memory": memory,
                "include_dashboard": False,
                "_temp_dir": self._folder.name,
            }
        host, _, port = address.rpartition(":")
        try:
            if port.isdecimal() and "://" not in host:  # Ray would try for minutes, and say so
                socket.create_connection((host, int(port)), _REACH_S).close()
            with _undisturbed():
                ray.init(log_to_driver=False, logging_level=logging.CRITICAL, namespace=NAMESPACE, **settings)
        except (OSError, RuntimeError, ValueError) as error:
            fix = "ray start --head starts one here; leave async.address out for one of the run's own"
            said = " ".join(str(error).split())[:300]
            if address:
                raise UserError("async.address", f"cannot join {address!r}: {said}", fix) from error
            raise RunError("start Ray", f"no cluster can be started here: {said}") from error

    def close(self) -> None:
        """Leaves it; one that was started here ends."""
        import ray

        if self._joined:
            ray.shutdown()
        if self._folder:
            self._folder.cleanup()
