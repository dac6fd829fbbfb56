"""Ranks as processes that torch.distributed joins, and what is told of one that is lost."""

import os
import pickle
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from posttrain.learner.ranks import ALONE, Parallel, Ranks, launched, told_number
from posttrain.types import RunError, UserError

T = TypeVar("T")
BUCKET = 1 << 24
"""Numbers that are added up in one message: 64 MiB of float32."""
BEAT_S = 1.0
"""Seconds between two signs of life of a rank."""


class ProcessRanks:
    """Processes that torch.distributed joins: gloo between processors, NCCL between GPUs.

    What it says of itself goes into torch's store, where survivors read who was lost: how many messages each
    rank began, a sign of life every second, and why it ended if it could say so.
    """

    def __init__(self, deadline_s: float) -> None:
        """Joins the others, as the environment of torchrun names them; UserError where they do not come."""
        self.deadline_s, cuda = deadline_s, torch.cuda.is_available()
        told = map(told_number, ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_WORLD_SIZE"))
        place, rank, size, *_ = told
        if not 0 <= rank < size:
            raise UserError("torchrun", f"RANK is {rank} of WORLD_SIZE {size}", "count from 0")
        if cuda and place < torch.cuda.device_count():
            torch.cuda.set_device(place)
        # NCCL is to give up and let this process say who was lost, not to end it without a word.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        limit = timedelta(seconds=deadline_s)
        try:
            found, self.rank, self.size = next(rendezvous("env://", timeout=limit))
            # The store of torchrun outlives ranks: one that is started again would find where dead ones were.
            store: Any = PrefixStore(_meet(found, self.rank, self.size, deadline_s), found)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=limit,
            )
        except (dist.DistError, RuntimeError, ValueError) as error:
            problem = f"the ranks did not find one another: {str(error).splitlines()[0]}"
            raise UserError("torchrun", problem) from error
        self.store = store
        self._sent: Counter[str] = Counter()
        self._began = 0
        self._ended = threading.Event()
        own = store.clone()  # a client is for one thread
        self._beats = threading.Thread(target=self._beat, args=(own,), daemon=True)
        self._beats.start()

    # ------------------------------------------------------------------ together

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Σ over ranks, entry by entry."""
        return self._from_all(x).sum(0, dtype=x.dtype).to(x.device)

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """The largest over ranks, entry by entry; NaN where one has NaN."""
        return self._from_all(x).amax(0).to(x.device)

    def _from_all(self, x: torch.Tensor) -> torch.Tensor:
        # Each rank adds up the same numbers in the same order, so no two find different bits.
        own = x.detach().cpu().contiguous()
        found = [torch.empty_like(own) for _ in range(self.size)]
        with self.waiting("numbers"):
            dist.all_gather(found, own)
        return torch.stack(found)

    def gather(self, what: T, called: str = "numbers") -> list[T]:
        """What each rank gives, in their order."""
        with self.waiting(called):
            return [pickle.loads(each) for each in self._all_to_all([pickle.dumps(what)] * self.size, called)]

    def tell(self, what: T, called: str = "numbers") -> T:
        """What rank 0 gives, on all."""
        text = pickle.dumps(what) if self.rank == 0 else b""
        with self.waiting(called):
            size = torch.tensor([len(text)])
            dist.broadcast(size, 0)
            given = torch.empty(int(size), dtype=torch.uint8)
            if self.rank == 0:
                given = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            dist.broadcast(given, 0)
            # Down a tree: rank 0 sends it to as many as the tree has levels.
            self._sent["words"] += len(text) * (self.size - 1).bit_length()
            found: T = pickle.loads(given.numpy().tobytes())
            return found

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """Gives part r to rank r."""
        with self.waiting("rows"):
            return self._all_to_all(parts, "rows")

    def _all_to_all(self, parts: Sequence[bytes], called: str) -> list[bytes]:
        self._sent["rows" if called == "rows" else "words"] += sum(
            len(part) for rank, part in enumerate(parts) if rank != self.rank
        )
        sizes = torch.tensor([len(part) for part in parts])
        theirs = torch.empty_like(sizes)
        dist.all_to_all_single(theirs, sizes)
        sent = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
        found = torch.empty(int(theirs.sum()), dtype=torch.uint8)
        dist.all_to_all_single(found, sent, theirs.tolist(), sizes.tolist())
        return [part.numpy().tobytes() for part in torch.split(found, theirs.tolist())]

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Σ over ranks of each tensor, in place, many in one message."""
        with self.waiting("gradients"):
            for bucket in _buckets(tensors):
                flat = torch.cat([x.reshape(-1) for x in bucket])
                dist.all_reduce(flat)
                self._sent["gradients"] += flat.numel() * flat.element_size()
                for x, part in zip(bucket, torch.split(flat, [x.numel() for x in bucket]), strict=True):
                    x.copy_(part.view_as(x))
            if any(x.is_cuda for x in tensors):
                # NCCL only queues the sum, and says of a rank that is gone neither now nor later.
                self._from_all(torch.zeros(()))

    def sent(self) -> dict[str, float]:
        """Bytes given to others since it was last asked: gradients, rows, and what all must know."""
        found = {f"ranks/{name}_bytes": float(self._sent[name]) for name in ("gradients", "rows", "words")}
        self._sent.clear()
        return found

    def agree(self, what: str, value: str) -> None:
        """RunError that names the ranks which have another value than rank 0."""
        values = self.gather(value, what)
        if others := [f"rank {n}" for n, each in enumerate(values) if each != values[0]]:
            raise RunError("start ranks", f"{', '.join(others)} of {self.size} {what} other than rank 0")

    # ------------------------------------------------------------------ when one is lost

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Within it ranks wait for one another; RunError that names who was lost."""
        self._began += 1
        try:
            self.store.set(f"at/{self.rank}", f"{self._began} {what}")
            yield
        except (dist.DistError, RuntimeError) as error:
            text = str(error)
            if not isinstance(error, dist.DistError) and not any(x in text for x in ("gloo", "NCCL")):
                raise
            raise RunError(f"wait for {what}", self._lost(what, text.splitlines()[0])) from error

    def _lost(self, what: str, first: str) -> str:
        """Which rank is to blame, as far as the store tells."""
        try:
            before = self._read("alive")
            time.sleep(2.5 * BEAT_S)
            alive, at, ended = self._read("alive"), self._read("at"), self._read("ended")
        except (dist.DistError, RuntimeError):
            return f"the ranks lost one another while they waited for {what}, rank 0 among them: {first}"
        others = [n for n in range(self.size) if n != self.rank]
        if said := [(n, ended[n]) for n in others if n in ended]:
            first_to_end, why = said[0]  # which may itself say who was lost
            return why if why.startswith("rank ") else f"rank {first_to_end} ended: {why}"
        if dead := [n for n in others if alive.get(n) == before.get(n)]:
            return f"rank {dead[0]} of {self.size} was killed or stopped while the others waited for {what}"
        behind = [n for n in others if int(at.get(n, "0").split()[0]) < self._began]
        if behind:
            last = at.get(behind[0], "0 nothing").partition(" ")[2]
            return (
                f"rank {behind[0]} of {self.size} did not come to {what} within {self.deadline_s:g} s; "
                f"the last that it shared was {last}. train.deadline_s may be longer"
            )
        return f"the ranks lost one another while they waited for {what}: {first}"

    def _read(self, key: str) -> dict[int, str]:
        names = {n: f"{key}/{n}" for n in range(self.size)}
        return {n: self.store.get(name).decode() for n, name in names.items() if self.store.check([name])}

    def _beat(self, store: Any) -> None:
        count = 0
        with suppress(dist.DistError, RuntimeError):  # the store ends with whoever holds it
            while not self._ended.wait(BEAT_S):
                count += 1
                store.set(f"alive/{self.rank}", str(count))

    def close(self, why: str = "") -> None:
        """Leaves the others, who are told why if it is before the end."""
        with suppress(dist.DistError, RuntimeError):
            if why:
                self.store.set(f"ended/{self.rank}", why)
        self._ended.set()
        self._beats.join(5 * BEAT_S)
        dist.destroy_process_group()
        if why and self.rank == 0:
            self._wait_for_readers()
        self._wait_for_gloo()

    def _wait_for_readers(self) -> None:
        """Returns when the others have read why: without torchrun the store ends with rank 0."""
        end = time.monotonic() + 5 * BEAT_S
        with suppress(dist.DistError, RuntimeError):
            while len(self._read("ended")) < self.size and time.monotonic() < end:
                time.sleep(0.05)

    def _wait_for_gloo(self) -> None:
        """Returns when gloo's threads have let go of the last message, after deadline_s at the latest.

        They outlive the group where something keeps it, as FSDP2's mesh does, and take Python's lock to
        free a tensor: one that asks for it while Python ends aborts the process. One that slept all the while
        that this thread slept does not want the lock: to wait for it would wake it every few milliseconds.
        """
        seen, end = None, time.monotonic() + self.deadline_s
        while (now := _gloo_threads()) != seen or any("State:\tS" not in each for each in now):
            if time.monotonic() > end:
                return
            seen = now
            time.sleep(0.02)


def _gloo_threads() -> list[str]:
    """State and context switches of each thread that carries messages; none where the kernel is not Linux."""
    found = []
    for thread in Path("/proc/self/task").glob("*/status"):
        with suppress(OSError):  # it ended
            text = thread.read_text()
            if text.startswith("Name:\tpt_gloo_runloop"):
                lines = text.splitlines()
                found.append("\n".join(x for x in lines if x.startswith("State:") or "ctxt_switches" in x))
    return found


def _meet(store: Any, rank: int, size: int, limit_s: float) -> str:
    """A name for this meeting of the ranks, which no earlier one has had; RuntimeError if some do not come.

    Rank 0 writes down who said hello, and that is the meeting once each one has found itself in it. What
    ranks of an earlier one left in the store thus counts for nothing, however often any was started again.
    """

    def read(key: str) -> str:
        return str(store.get(key).decode()) if store.check([key]) else ""

    own, end = uuid.uuid4().hex, time.monotonic() + limit_s
    store.set(f"hello/{rank}", own)
    while time.monotonic() < end:
        if rank == 0:
            meeting = " ".join(read(f"hello/{n}") for n in range(size))
            store.set("meeting", meeting)
            if all(read(f"found/{n}") == meeting for n in range(1, size)):
                store.set("met", meeting)
                return own
        else:
            meeting = read("meeting")
            if own in meeting.split(" "):
                store.set(f"found/{rank}", meeting)
                if read("met") == meeting:
                    return meeting.split(" ")[0]
        time.sleep(0.02)
    raise RuntimeError(f"not all {size} were there within {limit_s:g} s")


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors in their order, in lists of one type and of about BUCKET numbers."""
    found: list[torch.Tensor] = []
    for x in tensors:
        if found and (x.dtype != found[0].dtype or sum(y.numel() for y in found) + x.numel() > BUCKET):
            yield found
            found = []
        found.append(x)
    if found:
        yield found


@contextmanager
def join_ranks(settings: Parallel) -> Iterator[Ranks]:
    """The ranks that torchrun started, this process among them; or this process alone."""
    if not launched():
        yield ALONE
        return
    ranks = ProcessRanks(settings.deadline_s)
    try:
        yield ranks
    except BaseException as error:
        why = f"interrupted; {error}" if isinstance(error, KeyboardInterrupt) and str(error) else str(error)
        ranks.close(why or type(error).__name__)
        raise
    ranks.close()
