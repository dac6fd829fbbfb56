"""Ranks as processes joined by torch.distributed, and errors that name a lost rank."""

import os
import pickle
import socket
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

from posttrain.learner.ranks import ALONE, Parallel, Ranks, environment_number, launched
from posttrain.types import RunError, UserError

T = TypeVar("T")
BUCKET = 1 << 24
"""Numbers that are summed in one message: 64 MiB of float32."""
BEAT_S = 1.0
"""Seconds between two heartbeats of a rank."""
SILENT_S = 60.0
"""Seconds without a heartbeat after which a rank that others follow is lost: it may write to a slow disk."""

_POLL_S = 0.05


class ProcessRanks:
    """Processes joined by torch.distributed: gloo between CPUs, NCCL between GPUs.

    Each rank writes into torch's store the number of its messages, a heartbeat every second, and the reason
    for its end if it can. The other ranks read there which rank was lost.
    """

    def __init__(self, deadline_s: float) -> None:
        """Join the ranks named by torchrun's environment; UserError if they do not come in time."""
        self.deadline_s, cuda = deadline_s, torch.cuda.is_available()
        names = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_WORLD_SIZE")
        place, rank, size, *_ = map(environment_number, names)
        if not 0 <= rank < size:
            raise UserError("torchrun", f"RANK is {rank} of WORLD_SIZE {size}", "count from 0")
        if cuda and place < torch.cuda.device_count():
            torch.cuda.set_device(place)
        # 2: NCCL aborts its own communication but not the process, which can then name the lost rank.
        # torchrun sets 1, the default.
        if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1") == "1":
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
        limit = timedelta(seconds=deadline_s)
        try:
            shared, self.rank, self.size = next(rendezvous("env://", timeout=limit))
            # torchrun's store outlives ranks: a prefix hides the keys of an earlier start.
            store: Any = PrefixStore(_meet(shared, self.rank, self.size, deadline_s), shared)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=limit,
            )
        except (dist.DistError, RuntimeError, ValueError) as error:
            problem = f"the ranks did not find one another: {str(error).splitlines()[0]}"
            local = environment_number("LOCAL_WORLD_SIZE") or size
            raise UserError("torchrun", problem, _network_hint() if size > local else "") from error
        self.store = store
        self._sent: Counter[str] = Counter()
        self._message_count = self._collect_count = 0
        self._ended = threading.Event()
        client = store.clone()  # a client is for one thread
        self._heartbeat = threading.Thread(target=self._beat, args=(client,), daemon=True)
        self._heartbeat.start()

    # ------------------------------------------------------------------ messages

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return Σ over ranks, entry by entry."""
        return self._from_all(x).sum(0, dtype=x.dtype).to(x.device)

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """Return the maximum over ranks, entry by entry; NaN where a rank has NaN."""
        return self._from_all(x).amax(0).to(x.device)

    def _from_all(self, x: torch.Tensor) -> torch.Tensor:
        # Each rank adds the same numbers in the same order, so all have the same bits.
        x = x.detach().cpu().contiguous()
        gathered = [torch.empty_like(x) for _ in range(self.size)]
        with self.waiting("numbers"):
            dist.all_gather(gathered, x)
        return torch.stack(gathered)

    def gather(self, value: T, label: str = "numbers") -> list[T]:
        """Return each rank's value, in the order of ranks."""
        with self.waiting(label):
            parts = self._all_to_all([pickle.dumps(value)] * self.size, label)
            return [pickle.loads(part) for part in parts]

    def tell(self, value: T, label: str = "numbers") -> T:
        """Return rank 0's value, on all ranks."""
        text = pickle.dumps(value) if self.rank == 0 else b""
        with self.waiting(label):
            size = torch.tensor([len(text)])
            dist.broadcast(size, 0)
            data = torch.empty(int(size), dtype=torch.uint8)
            if self.rank == 0:
                data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            dist.broadcast(data, 0)
            # Broadcast goes down a tree: rank 0 sends as many copies as the tree has levels.
            self._sent["words"] += len(text) * (self.size - 1).bit_length()
            received: T = pickle.loads(data.numpy().tobytes())
            return received

    def follow(self, label: str) -> None:
        """Return once rank 0 calls this too, however long that takes, while it has heartbeats.

        Raises RunError if rank 0 is lost.
        """
        with self.waiting(label):
            key = f"follow/{self._message_count}"
            if self.rank == 0:
                self.store.set(key, label)
                return
            if not self._comes(self.store, key, 0):
                raise RunError(f"wait for {label}", self._describe_loss(label, "it is silent"))

    def collect(self, value: T, label: str, stop: threading.Event) -> list[T]:
        """Return each rank's value on rank 0, once each has called this; on others their own, at once.

        It uses a client of the store of its own, so another thread may call it, one call at a time. Rank 0
        waits without a deadline while ranks have heartbeats, and until `stop` is set.
        """
        store: Any = self.store.clone()
        self._collect_count += 1
        keys = [f"collect/{self._collect_count}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], pickle.dumps(value))
        if self.rank:
            return [value]
        for rank, key in enumerate(keys):
            if not self._comes(store, key, rank, stop):
                why = store.get(f"ended/{rank}").decode() if store.check([f"ended/{rank}"]) else ""
                cause = why if why.startswith("rank ") else f"rank {rank} ended: {why}"
                if not why:
                    cause = f"rank {rank} of {self.size} was killed or stopped before it was done"
                raise RunError(f"wait for {label}", cause)
        return [pickle.loads(store.get(key)) for key in keys]

    def _comes(self, store: Any, key: str, rank: int, stop: threading.Event | None = None) -> bool:
        """Return True once a rank has set this key; False if it ends, is silent, or `stop` is set before."""
        beat, since, alive, end = b"", time.monotonic(), f"alive/{rank}", f"ended/{rank}"
        while not store.check([key]):
            now = store.get(alive) if store.check([alive]) else b""
            if now != beat:
                beat, since = now, time.monotonic()
            silent = time.monotonic() - since > min(SILENT_S, self.deadline_s)
            if silent or store.check([end]) or (stop is not None and stop.is_set()):
                return bool(store.check([key]))
            time.sleep(_POLL_S)
        return True

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send part r to rank r; return the parts from each rank, in the order of ranks."""
        with self.waiting("rows"):
            return self._all_to_all(parts, "rows")

    def _all_to_all(self, parts: Sequence[bytes], label: str) -> list[bytes]:
        self._sent["rows" if label == "rows" else "words"] += sum(
            len(part) for rank, part in enumerate(parts) if rank != self.rank
        )
        sizes = torch.tensor([len(part) for part in parts])
        theirs = torch.empty_like(sizes)
        dist.all_to_all_single(theirs, sizes)
        joined = bytearray(b"".join(parts))
        sent = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
        received = torch.empty(int(theirs.sum()), dtype=torch.uint8)
        dist.all_to_all_single(received, sent, theirs.tolist(), sizes.tolist())
        return [part.numpy().tobytes() for part in torch.split(received, theirs.tolist())]

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its sum over ranks, many in one message."""
        with self.waiting("gradients"):
            for bucket in _buckets(tensors):
                flat = torch.cat([x.reshape(-1) for x in bucket])
                dist.all_reduce(flat)
                self._sent["gradients"] += flat.numel() * flat.element_size()
                for x, part in zip(bucket, torch.split(flat, [x.numel() for x in bucket]), strict=True):
                    x.copy_(part.view_as(x))
            if any(x.is_cuda for x in tensors):
                # NCCL only queues the sum and never reports a lost rank; this message by gloo does.
                self._from_all(torch.zeros(()))

    def sent(self) -> dict[str, float]:
        """Return the bytes sent since the last call: gradients, rows, and other messages ("words")."""
        names = ("gradients", "rows", "words")
        counts = {f"ranks/{name}_bytes": float(self._sent[name]) for name in names}
        self._sent.clear()
        return counts

    def agree(self, verb: str, value: str) -> None:
        """Raise RunError naming the ranks whose value differs from rank 0's."""
        values = self.gather(value, verb)
        if others := [f"rank {n}" for n, other in enumerate(values) if other != values[0]]:
            raise RunError("start ranks", f"{', '.join(others)} of {self.size} {verb} other than rank 0")

    # ------------------------------------------------------------------ lost ranks

    @contextmanager
    def waiting(self, label: str) -> Iterator[None]:
        """Return a context in which ranks wait for one another; it raises RunError naming a lost rank."""
        self._message_count += 1
        try:
            self.store.set(f"at/{self.rank}", f"{self._message_count} {label}")
            yield
        except (dist.DistError, RuntimeError) as error:
            text = str(error)
            if not isinstance(error, dist.DistError) and not any(x in text for x in ("gloo", "NCCL")):
                raise
            raise RunError(f"wait for {label}", self._describe_loss(label, text.splitlines()[0])) from error

    def _describe_loss(self, label: str, first: str) -> str:
        """Return which rank was lost, as far as the store shows it."""
        try:
            before = self._from_store("alive")
            time.sleep(2.5 * BEAT_S)
            alive, at, ended = (self._from_store(key) for key in ("alive", "at", "ended"))
        except (dist.DistError, RuntimeError):
            return f"the ranks lost one another while they waited for {label}, rank 0 among them: {first}"
        others = [n for n in range(self.size) if n != self.rank]
        if reasons := [(n, ended[n]) for n in others if n in ended]:
            first_to_end, why = reasons[0]  # the reason may itself name a lost rank
            return why if why.startswith("rank ") else f"rank {first_to_end} ended: {why}"
        if dead := [n for n in others if alive.get(n) == before.get(n)]:
            return f"rank {dead[0]} of {self.size} was killed or stopped while the others waited for {label}"
        behind = [n for n in others if int(at.get(n, "0").split()[0]) < self._message_count]
        if behind:
            last = at.get(behind[0], "0 nothing").partition(" ")[2]
            return (
                f"rank {behind[0]} of {self.size} did not come to {label} within {self.deadline_s:g} s; "
                f"the last that it shared was {last}. train.deadline_s may be longer"
            )
        return f"the ranks lost one another while they waited for {label}: {first}"

    def _from_store(self, key: str) -> dict[int, str]:
        """Return the value under a key by rank, for the ranks that have one."""
        names = {n: f"{key}/{n}" for n in range(self.size)}
        return {n: self.store.get(name).decode() for n, name in names.items() if self.store.check([name])}

    def _beat(self, store: Any) -> None:
        count = 0
        with suppress(dist.DistError, RuntimeError):  # the store ends with the process that holds it
            while not self._ended.wait(BEAT_S):
                count += 1
                store.set(f"alive/{self.rank}", str(count))

    def close(self, why: str = "") -> None:
        """Leave the other ranks; `why` is the reason for them if the run has failed."""
        with suppress(dist.DistError, RuntimeError):
            if why:
                self.store.set(f"ended/{self.rank}", why)
        self._ended.set()
        self._heartbeat.join(5 * BEAT_S)
        dist.destroy_process_group()
        if why and self.rank == 0:
            self._wait_for_readers()
        self._wait_for_gloo()

    def _wait_for_readers(self) -> None:
        """Wait until the other ranks have ended too: without torchrun the store ends with rank 0."""
        end = time.monotonic() + 5 * BEAT_S
        with suppress(dist.DistError, RuntimeError):
            while len(self._from_store("ended")) < self.size and time.monotonic() < end:
                time.sleep(0.05)

    def _wait_for_gloo(self) -> None:
        """Wait until gloo's threads have released the last message, at most deadline_s.

        FSDP2's mesh keeps the group, and so its threads, alive. They take the GIL to free a tensor, and a
        thread that takes it while Python shuts down aborts the process. A thread that slept throughout
        this thread's sleep does not need the GIL: a thread that waits for it wakes every few milliseconds.
        """
        before, end = None, time.monotonic() + self.deadline_s
        while (now := _gloo_threads()) != before or any("State:\tS" not in thread for thread in now):
            if time.monotonic() > end:
                return
            before = now
            time.sleep(0.02)


def _network_hint() -> str:
    """Return what to set where ranks of several machines do not reach one another."""
    name, address = socket.gethostname(), ""
    with suppress(OSError):
        address = socket.gethostbyname(name)
    hint = "set GLOO_SOCKET_IFNAME, and NCCL_SOCKET_IFNAME for GPUs, to the interface between the machines"
    if address.startswith("127."):
        return f"{hint}: {name} is {address} here, where no other machine reaches it"
    return f"{hint}, and check MASTER_ADDR and the firewall"


def _gloo_threads() -> list[str]:
    """Return the state and context switches of each of gloo's threads; none on systems other than Linux."""
    states = []
    for thread in Path("/proc/self/task").glob("*/status"):
        with suppress(OSError):  # the thread has ended
            text = thread.read_text()
            if text.startswith("Name:\tpt_gloo_runloop"):
                lines = text.splitlines()
                states.append("\n".join(x for x in lines if x.startswith("State:") or "ctxt_switches" in x))
    return states


def _meet(store: Any, rank: int, size: int, limit_s: float) -> str:
    """Return a name for this start of the ranks that no earlier start had; RuntimeError if a rank is missing.

    Each rank writes a random name. Rank 0 writes the list of these names, and the start is complete once
    every rank has confirmed a list with its own name. Keys that ranks of an earlier start left in the store
    cannot be confirmed, however often ranks were started again.
    """

    def get(key: str) -> str:
        return str(store.get(key).decode()) if store.check([key]) else ""

    name, end = uuid.uuid4().hex, time.monotonic() + limit_s
    store.set(f"hello/{rank}", name)
    while time.monotonic() < end:
        if rank == 0:
            meeting = " ".join(get(f"hello/{n}") for n in range(size))
            store.set("meeting", meeting)
            if all(get(f"found/{n}") == meeting for n in range(1, size)):
                store.set("met", meeting)
                return name
        else:
            meeting = get("meeting")
            if name in meeting.split(" "):
                store.set(f"found/{rank}", meeting)
                if get("met") == meeting:
                    return meeting.split(" ")[0]
        time.sleep(0.02)
    raise RuntimeError(f"not all {size} were there within {limit_s:g} s")


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors in order, in lists of one dtype and at most BUCKET numbers (or one tensor)."""
    bucket: list[torch.Tensor] = []
    for x in tensors:
        if bucket and (x.dtype != bucket[0].dtype or sum(y.numel() for y in bucket) + x.numel() > BUCKET):
            yield bucket
            bucket = []
        bucket.append(x)
    if bucket:
        yield bucket


@contextmanager
def join_ranks(settings: Parallel) -> Iterator[Ranks]:
    """Return a context with the ranks that torchrun started, this process among them, or with ALONE."""
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
