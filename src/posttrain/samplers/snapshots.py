"""Published weights: immutable, numbered, and proven where they arrive.

A learner puts each version where samplers can find it, and samplers pull it when they are ready to. So a
sampler that dies or hangs holds nobody up, and nobody ever reads weights that are being written: memory is
written again only when no sampler may still read it.
"""

import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from posttrain.engines.protocol import Engine
from posttrain.models.fingerprint import Named, combined, digest, fingerprint
from posttrain.types import Completion, Request, RunError, Sampling

CANARY = 8
"""Tokens of a prompt that a weight sync reads: both sides compute each of them at every weight sync."""
DRAWN = 4
"""Tokens behind them that go through what draws: the first off the prompt, the second off the cache."""
LIKELY = 4.0
"""Nats below which a token counts as likely: the tolerance is for those, and grows with the log-probability
of others."""
_ALIGNED = 64
"""Bytes at whose multiples a tensor begins."""


class StoredWeights(Protocol):
    """Where the weights of one version lie. Wherever it is sent, it opens there."""

    def open(self) -> Named:
        """The tensors; valid until the next call of the store's `put`, or as long as they are pinned."""
        ...

    @property
    def digest(self) -> str:
        """Of the tensors as they were put there."""
        ...


class WeightStore(Protocol):
    """Where a learner puts its versions."""

    def put(self, version: int, weights: Callable[[], Named]) -> StoredWeights:
        """A copy of these weights, which may be gone through twice."""
        ...

    def retain(self, versions: set[int]) -> None:
        """Gives up all other versions."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One published version, and what proves that it arrived."""

    version: int
    run: str
    """Of which process of the learner: versions of one that has ended are not taken."""
    place: StoredWeights
    canary: tuple[int, ...]
    """A row of tokens; the last DRAWN of them are to go through what draws."""
    logps: tuple[float, ...]
    """log π of its second token, its third ... as the learner finds them."""
    tolerance: float
    """How far the two sides may lie apart, in nats of a likely token."""


def load_snapshot(engine: Engine, snapshot: Snapshot, *, keep: bool = False) -> list[tuple[int, Completion]]:
    """Gives the engine these weights and proves that it draws from them.

    Three proofs: the engine says that it holds this version, the digest that it made of what it received
    is that of what was sent, and the log-probabilities of the canary, the last of them through the kernels
    that draw, are the learner's. What is in a store is looked at before any of it replaces what the engine
    holds.

    Returns answers of others that ended meanwhile (keep: see Engine.load). Raises RunError that names what
    is wrong.
    """
    version, place = snapshot.version, snapshot.place
    if not isinstance(place, LearnerWeights) and (found := digest(place.open())) != place.digest:
        raise RunError(
            "weight sync",
            f"the weights of version {version} are damaged where they lie: "
            f"digest {found}, not {place.digest}; version {engine.version} is kept",
        )
    try:
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
    row, drawn = snapshot.canary, min(DRAWN, len(snapshot.canary) - 1)
    by_decoding, others = _score_by_decoding(engine, row, drawn)
    sides = (snapshot.logps, engine.score(list(row)), by_decoding)
    ours, read, drew = (torch.tensor(each, dtype=torch.float64) for each in sides)
    # A logit is rounded relative to its size, so an improbable token's log-probability is by more.
    scale = (ours.abs() / LIKELY).clamp(min=1)
    # Other weights move most of the tokens that are read; rounding moves one far now and then, as where a
    # text begins and activations are huge. Those that are drawn are likely ones: none of them lies far apart.
    read_apart, drawn_apart = ((ours - read) / scale).abs(), ((ours[-drawn:] - drew) / scale[-drawn:]).abs()
    # torch's maximum, unlike Python's, does not lose a NaN.
    gap = float(torch.stack([read_apart.median(), drawn_apart.max()]).max())
    if not gap <= snapshot.tolerance:
        raise RunError(
            "weight sync",
            f"after version {version} the sampler's log-probabilities differ "
            f"from the learner's by {gap:.3g} on the canary, more than {snapshot.tolerance:g}",
        )
    return others


def _score_by_decoding(
    engine: Engine, row: Sequence[int], drawn: int
) -> tuple[list[float], list[tuple[int, Completion]]]:
    """log π of the last tokens of the row as they are drawn, and answers of others that ended meanwhile."""
    sampling = Sampling(max_new_tokens=drawn)
    ticket = engine.submit(Request(prompt=tuple(row[:-drawn]), sampling=sampling, forced=tuple(row[-drawn:])))
    others: list[tuple[int, Completion]] = []
    while True:
        others += engine.poll()
        if mine := next((each for each in others if each[0] == ticket), None):
            others.remove(mine)  # what ended in the same step stays
            return mine[1].logp_policy, others


# ---------------------------------------------------------------------- where they lie


@dataclass
class LearnerWeights:
    """The learner's own tensors, one at a time, for an engine in the same thread that takes them at once."""

    weights: Callable[[], Named]
    _prints: list[str] = field(default_factory=list)

    def open(self) -> Named:
        """The tensors as they are now."""
        self._prints.clear()
        for name, tensor in self.weights():
            self._prints.append(fingerprint(name, tensor))
            yield name, tensor

    @property
    def digest(self) -> str:
        """Of what was opened, once it has been read to its end."""
        return combined(self._prints)


Index = tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]
"""Of each tensor its name, type, shape, and the byte at which it begins."""


def indexed(weights: Named) -> tuple[Index, int]:
    """Where each tensor is to begin in one piece of memory, and of how many bytes."""
    found, size, end = [], 0, 0
    for name, tensor in weights:
        found.append((name, tensor.dtype, tuple(tensor.shape), end))
        size = end + tensor.numel() * tensor.element_size()
        end = -(-size // _ALIGNED) * _ALIGNED
    return tuple(found), size


def views(whole: torch.Tensor, index: Index) -> Named:
    """The tensors that lie so in these bytes."""
    for name, dtype, shape, start in index:
        count = torch.Size(shape).numel() * dtype.itemsize
        yield name, whole[start : start + count].view(dtype).view(shape)


def write(weights: Named, whole: torch.Tensor, index: Index) -> str:
    """The digest of these tensors, which are copied into the bytes.

    One at a time: an adapter's merged matrices together would be a second model.
    """
    prints = []
    for (name, source), (_, target) in zip(weights, views(whole, index), strict=True):
        target.copy_(source)
        prints.append(fingerprint(name, source))
    return combined(prints)


@dataclass(frozen=True, slots=True)
class SharedMemoryWeights:
    """A piece of memory that processes of this machine share."""

    path: str
    size: int
    index: Index
    digest: str

    def open(self) -> Named:
        """The tensors, which are read where they lie."""
        if not os.path.exists(self.path):
            raise RunError("weight sync", f"the weights are no longer at {self.path}: the learner has ended")
        yield from views(torch.from_file(self.path, size=self.size, dtype=torch.uint8), self.index)


class SharedMemoryStore:
    """Weights in memory that processes share, two versions at a time and more only while somebody is slow."""

    def __init__(self) -> None:
        self._free: list[str] = []
        self._used: dict[int, list[str]] = {}
        self._index: Index = ()
        self._size = 0
        self._open: list[int] = []
        self._files: list[Path] = []
        self.bytes = 0
        """Copied so far."""

    def put(self, version: int, weights: Callable[[], Named]) -> SharedMemoryWeights:
        """A copy of these weights."""
        if not self._index:
            self._index, self._size = indexed(weights())
        path = self._memory(self._size)
        whole = torch.from_file(path, shared=True, size=self._size, dtype=torch.uint8)
        found = write(weights(), whole, self._index)
        self._used.setdefault(version, []).append(path)
        self.bytes += self._size
        return SharedMemoryWeights(path, self._size, self._index, found)

    def _memory(self, size: int) -> str:
        if self._free:
            return self._free.pop()
        if hasattr(os, "memfd_create"):  # nothing is left of it when the last process has ended
            number = os.memfd_create("posttrain-weights")
            self._open.append(number)
            os.truncate(number, size)
            return f"/proc/{os.getpid()}/fd/{number}"
        number, path = tempfile.mkstemp(prefix="posttrain-weights-")
        os.close(number)
        os.truncate(path, size)
        self._files.append(Path(path))
        return path

    def retain(self, versions: set[int]) -> None:
        """Lets the memory of all other versions be written again."""
        for version in self._used.keys() - versions:
            self._free += self._used.pop(version)

    def close(self) -> None:
        for number in self._open:
            with suppress(OSError):
                os.close(number)
        for path in self._files:
            path.unlink(missing_ok=True)


class GatherOnlyStore:
    """The versions of a rank whose weights another one publishes: only shares are gathered with it."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close
        self._known = False

    def put(self, version: int, weights: Callable[[], Named]) -> LearnerWeights:
        """Goes through the weights as often as the other does."""
        for _ in range(1 if self._known else 2):
            for _ in weights():
                pass
        self._known = True
        return LearnerWeights(weights)

    def retain(self, versions: set[int]) -> None: ...


def incarnation() -> str:
    """A name for this process of the learner, which no other has."""
    return secrets.token_hex(8)
