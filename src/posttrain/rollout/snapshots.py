"""Published weights: immutable, numbered, and verified by the sampler that loads them.

The learner copies each version into a store, and samplers load it when they are ready. A sampler that dies or
hangs therefore delays neither the learner nor other samplers. The memory of a version is reused only once no
sampler may still read it, so no sampler reads weights while they are written.
"""

import os
import secrets
import tempfile
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

import torch

from posttrain.engines.protocol import AdapterEngine, Engine, PeftAdapter
from posttrain.learner.ranks import Ranks
from posttrain.models.fingerprint import NamedTensors, combined, digest, fingerprint, location
from posttrain.process import machine
from posttrain.types import Completion, Request, RunError, Sampling

CANARY = 8
"""Tokens of a prompt whose log-probabilities learner and sampler compute at every weight sync."""
DRAWN = 4
"""Further canary tokens, which the sampler also scores by decoding: the first after the prefill, the others
with the KV cache."""
LIKELY = 4.0
"""A token counts as likely if -log π is at most this many nats. The tolerance is that of likely tokens; for
others it grows in proportion to -log π."""
_ALIGNED = 64
"""Alignment in bytes of each tensor in a store."""


class StoredWeights(Protocol):
    """The weights of one snapshot in a store; can be pickled and opened by another process."""

    def open(self) -> NamedTensors:
        """Yield (name, tensor). They are valid while the store retains their number."""
        ...

    @property
    def digest(self) -> str:
        """Digest of the tensors when they were stored."""
        ...


class WeightStore(Protocol):
    """Memory into which the learner copies each version, and from which samplers load it."""

    def put(self, number: int, weights: Callable[[], NamedTensors]) -> StoredWeights:
        """Copy the weights and return the copy; `weights()` may be called twice."""
        ...

    def retain(self, numbers: set[int]) -> None:
        """Let the memory of all others be reused."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A published version, with the digest and log-probabilities that verify its arrival."""

    version: int
    """Number of updates; samplers record it with each token."""
    number: int
    """By which the learner and samplers tell weights apart: the version, but for a population, whose members
    are of one version and are numbered as they are published."""
    run: str
    """Identity of the learner process (see `incarnation`): workers refuse versions of another one."""
    place: StoredWeights
    canary: tuple[int, ...]
    """Tokens to score; the last DRAWN tokens by decoding as well."""
    logps: tuple[float, ...]
    """log π of the second canary token, the third ..., by the learner."""
    adapter: PeftAdapter | None = None
    """With it the weights are the tensors of this adapter, and a digest is of these alone: the weights that
    it changes are verified when an engine loads them, once."""
    tolerance: float
    """Largest accepted gap between the two sides' log-probabilities of a likely token, in nats."""


def load_snapshot(engine: Engine, snapshot: Snapshot, *, keep: bool = False) -> list[tuple[int, Completion]]:
    """Load weights into the engine and verify that it samples with them.

    Verified are the version that the engine reports, the digest of the weights that it received, and its
    log-probabilities of the canary, the last DRAWN through the decoding kernels too. Weights in a store are
    verified before they replace those of the engine.

    Return the (ticket, completion) of other requests that finished meanwhile (keep: see Engine.load). Raises
    RunError that names what differs.
    """
    version, place = snapshot.version, snapshot.place
    if not isinstance(place, LearnerWeights) and (stored := digest(place.open())) != place.digest:
        raise RunError(
            "weight sync",
            f"the weights of version {version} are damaged where they lie: "
            f"digest {stored}, not {place.digest}; version {engine.version} is kept",
        )
    try:
        if snapshot.adapter:
            received = cast(AdapterEngine, engine).load_adapter(place.open(), version, snapshot.adapter)
        else:
            received = engine.load(place.open(), version, keep=keep)
    except (KeyError, ValueError) as error:
        raise RunError(
            "weight sync", f"the sampler did not take version {version}: {error.args[0]}"
        ) from error
    if engine.version != version:
        raise RunError(
            "weight sync", f"the sampler says that it holds version {engine.version}, and was sent {version}"
        )
    if received != place.digest:
        raise RunError(
            "weight sync",
            f"the sampler holds other weights than the learner sent as version {version}: "
            f"digest {received}, not {place.digest}",
        )
    row, count = snapshot.canary, min(DRAWN, len(snapshot.canary) - 1)
    by_decoding, others = _score_by_decoding(engine, row, count)
    sides = (snapshot.logps, engine.score(list(row)), by_decoding)
    learner, scored, decoded = (torch.tensor(logps, dtype=torch.float64) for logps in sides)
    # Rounding of a logit is relative to its size, so improbable tokens have larger errors.
    scale = (learner.abs() / LIKELY).clamp(min=1)
    # Wrong weights move most of the scored tokens; rounding moves a few of them far, as at the start of a
    # text, where activations are huge. Of the four that are decoded, which are the likeliest of their kind,
    # rounding moves one by 0.7 now and then in a model that is sure of other tokens, and a wrong cache most.
    scored_gap = ((learner - scored) / scale).abs()
    decoded_gap = ((learner[-count:] - decoded) / scale[-count:]).abs()
    # torch's maximum, unlike Python's, keeps a NaN.
    gap = float(torch.stack([scored_gap.median(), decoded_gap.mean()]).max())
    if not gap <= snapshot.tolerance:
        raise RunError(
            "weight sync",
            f"after version {version} the sampler's log-probabilities differ "
            f"from the learner's by {gap:.3g} on the canary, more than {snapshot.tolerance:g}",
        )
    return others


def _score_by_decoding(
    engine: Engine, row: Sequence[int], count: int
) -> tuple[list[float], list[tuple[int, Completion]]]:
    """Return log π of the last `count` tokens by forced decoding, and completions of other requests."""
    sampling = Sampling(max_new_tokens=count)
    ticket = engine.submit(Request(prompt=tuple(row[:-count]), sampling=sampling, forced=tuple(row[-count:])))
    others: list[tuple[int, Completion]] = []
    while True:
        others += engine.poll()
        if forced := next((pair for pair in others if pair[0] == ticket), None):
            others.remove(forced)
            return forced[1].logp_policy, others


# ---------------------------------------------------------------------- stores


@dataclass
class LearnerWeights:
    """The learner's own tensors, not a copy: for an engine in the same thread, which loads them at once."""

    weights: Callable[[], NamedTensors]
    lent: Container[str] = ()
    """Names of the tensors that the engine reads where they are (learner/loan.py)."""
    _fingerprints: list[str] = field(default_factory=list)

    def open(self) -> NamedTensors:
        """Yield the current tensors, one at a time."""
        self._fingerprints.clear()
        for name, tensor in self.weights():
            self._fingerprints.append((location if name in self.lent else fingerprint)(name, tensor))
            yield name, tensor

    @property
    def digest(self) -> str:
        """Digest of the tensors that the last `open` yielded, of lent ones their places.

        Valid once `open` is exhausted.
        """
        return combined(self._fingerprints)


Index = tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]
"""(name, dtype, shape, offset in bytes) of each tensor in a buffer."""


def build_index(weights: NamedTensors) -> tuple[Index, int]:
    """Return the index that lays these tensors out in one buffer, and the buffer's size in bytes."""
    index, size, start = [], 0, 0
    for name, tensor in weights:
        index.append((name, tensor.dtype, tuple(tensor.shape), start))
        size = start + tensor.numel() * tensor.element_size()
        start = -(-size // _ALIGNED) * _ALIGNED
    return tuple(index), size


def views(buffer: torch.Tensor, index: Index) -> NamedTensors:
    """Yield the tensors of a buffer of bytes, as views."""
    for name, dtype, shape, start in index:
        count = torch.Size(shape).numel() * dtype.itemsize
        yield name, buffer[start : start + count].view(dtype).view(shape)


def copy_into(buffer: torch.Tensor, weights: NamedTensors, index: Index) -> str:
    """Copy tensors into a buffer of bytes and return their digest.

    One at a time: all merged matrices of an adapter together would take the memory of a second model.
    """
    fingerprints = []
    for (name, source), (_, target) in zip(weights, views(buffer, index), strict=True):
        target.copy_(source)
        fingerprints.append(fingerprint(name, source))
    return combined(fingerprints)


@dataclass(frozen=True, slots=True)
class SharedMemoryWeights:
    """One version in memory that processes of this machine share.

    path: a file, or /proc/PID/fd/N of the learner.
    """

    path: str
    size: int
    index: Index
    digest: str

    def open(self) -> NamedTensors:
        """Yield the tensors without copying. Raises RunError if the learner has ended."""
        if not os.path.exists(self.path):
            raise RunError("weight sync", f"the weights are no longer at {self.path}: the learner has ended")
        yield from views(torch.from_file(self.path, size=self.size, dtype=torch.uint8), self.index)


class SharedMemoryStore:
    """Store weights in shared memory: two versions, and more only while a sampler is slow to load one."""

    def __init__(self) -> None:
        self._free: list[str] = []
        """Paths of memory that may be overwritten."""
        self._used: dict[int, list[str]] = {}
        """By number: paths of the memory that holds the retained weights."""
        self._index: Index = ()
        self._size = 0
        self._open: list[int] = []
        self._files: list[Path] = []
        self.bytes = 0
        """Bytes copied since the start, of all versions."""

    def put(self, number: int, weights: Callable[[], NamedTensors]) -> SharedMemoryWeights:
        """Copy these weights into free or new memory."""
        if not self._index:
            self._index, self._size = build_index(weights())
        path = self._allocate(self._size)
        buffer = torch.from_file(path, shared=True, size=self._size, dtype=torch.uint8)
        digest = copy_into(buffer, weights(), self._index)
        self._used.setdefault(number, []).append(path)
        self.bytes += self._size
        return SharedMemoryWeights(path, self._size, self._index, digest)

    def _allocate(self, size: int) -> str:
        """Return the path of memory of this size, free or new."""
        if self._free:
            return self._free.pop()
        if hasattr(os, "memfd_create"):  # the kernel frees it with the last process that holds it
            descriptor = os.memfd_create("posttrain-weights")
            self._open.append(descriptor)
            os.truncate(descriptor, size)
            return f"/proc/{os.getpid()}/fd/{descriptor}"
        descriptor, path = tempfile.mkstemp(prefix="posttrain-weights-")
        os.close(descriptor)
        os.truncate(path, size)
        self._files.append(Path(path))
        return path

    def retain(self, numbers: set[int]) -> None:
        """Let the memory of all others be overwritten."""
        for number in self._used.keys() - numbers:
            self._free += self._used.pop(number)

    def close(self) -> None:
        for descriptor in self._open:
            with suppress(OSError):
                os.close(descriptor)
        for path in self._files:
            path.unlink(missing_ok=True)


class GatherOnlyStore:
    """The store of a rank if another one publishes: it helps to gather shards, and copies nothing."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close
        self._is_indexed = False

    def put(self, number: int, weights: Callable[[], NamedTensors]) -> LearnerWeights:
        """Iterate over the weights as often as `put` of the other does: gathering is collective.

        Return no weights, as nothing here is to load any.
        """
        for _ in range(1 if self._is_indexed else 2):
            for _ in weights():
                pass
        self._is_indexed = True
        return LearnerWeights(lambda: ())

    def retain(self, numbers: set[int]) -> None: ...


class MachineStore:
    """Share one `SharedMemoryStore` among the ranks of a machine: the first rank writes each version.

    `put` is a message of all ranks, which so publish the same versions in the same order.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, machines = ranks, ranks.gather(machine.identity(), "the machines")
        self._here = [n for n, name in enumerate(machines) if name == machines[ranks.rank]]
        self._retained: set[int] = set()
        self._store: SharedMemoryStore | GatherOnlyStore
        self._store = GatherOnlyStore(lambda: None) if self._here[0] != ranks.rank else SharedMemoryStore()

    def put(self, number: int, weights: Callable[[], NamedTensors]) -> StoredWeights:
        """Copy the weights if this rank is the first of its machine; return the copy of the first."""
        retained = self._ranks.gather(self._retained, "the weights in use")
        self._store.retain(set().union(*(retained[n] for n in self._here)))
        copy: StoredWeights = self._store.put(number, weights)
        place = copy if isinstance(copy, SharedMemoryWeights) else None
        first = self._ranks.gather(place, "the weights")[self._here[0]]
        assert first is not None
        return first

    def retain(self, numbers: set[int]) -> None:
        """Let the memory of all others be overwritten, once no rank of the machine retains it."""
        self._retained = set(numbers)

    def close(self) -> None:
        self._store.close()


def incarnation() -> str:
    """Return a random name for this learner process."""
    return secrets.token_hex(8)
