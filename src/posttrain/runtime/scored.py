"""A reference policy's log-probabilities of a run's rows, computed once and kept in the run directory.

An offline method meets the same rows in every epoch and its reference never moves, so nobody needs to hold
two models in memory, or to ask the second one twice.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from numpy.typing import NDArray
from safetensors import SafetensorError

from posttrain.learner.checkpoint import read_tensors, write_tensors
from posttrain.runtime.rows import Group, numbered
from posttrain.types import Batch, PerToken, Trajectory

AT_ONCE = 64
"""Groups that are scored in one call."""
KEEP_S = 60.0
"""Seconds after which what has been scored is written, so that a kill loses no more."""
DIGEST = 16
"""Bytes of a row's digest."""


class Scored:
    """log π_ref of rows, found by what is in them.

    Three columns, whatever the number of rows: 4 bytes a trained token, and a digest and a length a row.
    """

    def __init__(
        self,
        digests: UInt8[torch.Tensor, "n D"],
        lengths: Int[torch.Tensor, "n"],
        logp: Float[torch.Tensor, "t"],
    ) -> None:
        """ValueError if the columns do not fit each other."""
        if digests.shape != (len(lengths), DIGEST) or int(lengths.sum()) != len(logp):
            raise ValueError("these are not the columns of one table")
        self.digests, self.lengths, self.logp = digests, lengths, logp
        raw = digests.numpy().tobytes()
        self._place = {raw[i * DIGEST : (i + 1) * DIGEST]: i for i in range(len(lengths))}
        self._end = lengths.cumsum(0)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._place

    def column(self, batch: Batch) -> PerToken:
        """The batch's logp_ref; KeyError for a row that was not scored."""
        out = torch.zeros_like(batch.logp_gen)
        for i, length in enumerate(batch.length.tolist()):
            row = self._place[_digest(batch.tokens[i, :length].numpy(), batch.mask[i, :length].numpy())]
            end = int(self._end[row])
            out[i, batch.mask[i]] = self.logp[end - int(self.lengths[row]) : end].to(out)
        return out


def scored(
    file: Path,
    groups: Sequence[Group],
    score: Callable[[Batch], PerToken],
    show: Callable[[int, int], None] = lambda done, total: None,
    *,
    writes: bool = True,
) -> Scored:
    """The rows' log-probabilities: read from the file; what it lacks is asked of `score` and added to it.

    `show` is told how many groups of how many that were lacking are done. Of ranks that score the same rows
    together one `writes`. Whoever goes on after a kill
    scores the same groups in one call, so what they get is the same to the last bit.
    """
    held = _held(file)
    lacking, known = list[Group](), set[bytes]()
    for group in groups:
        own = {_digest_of(row) for row in group}
        if any(digest not in held and digest not in known for digest in own):
            lacking.append(group)
            known |= own
    if not lacking:
        return held
    digests, lengths, values = list[bytes](), [held.lengths], [held.logp]
    known, kept = set(), time.monotonic()
    for start in range(0, len(lacking), AT_ONCE):
        part = lacking[start : start + AT_ONCE]
        rows, numbers = numbered(part)
        batch = Batch.of(rows, numbers)
        logp = score(batch)
        fresh = []
        for i, digest in enumerate(map(_digest_of, rows)):
            # What is held stays, bit for bit: among other rows it would be rounded otherwise.
            if digest not in held and digest not in known:
                known.add(digest)
                digests.append(digest)
                fresh.append(i)
        mask = batch.mask[fresh]
        lengths.append(mask.sum(-1))
        values.append(logp[fresh][mask].float().cpu())
        show(start + len(part), len(lacking))
        if writes and time.monotonic() - kept >= KEEP_S:
            _keep(file, _joined(held, digests, lengths, values))
            kept = time.monotonic()
    out = _joined(held, digests, lengths, values)
    if writes:
        _keep(file, out)
    return out


def _joined(
    held: Scored,
    digests: Sequence[bytes],
    lengths: list[torch.Tensor],
    values: list[torch.Tensor],
) -> Scored:
    """What is held, and what was added to it."""
    added = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).view(-1, DIGEST)
    return Scored(torch.cat([held.digests, added]), torch.cat(lengths), torch.cat(values))


def _keep(file: Path, table: Scored) -> None:
    working = file.with_suffix(".tmp")
    write_tensors(working, {"digests": table.digests, "lengths": table.lengths, "logp": table.logp})
    working.replace(file)


def _held(file: Path) -> Scored:
    """What the file has; nothing if it is not there, was cut off with the machine, or is no such table."""
    try:
        return Scored(**read_tensors(file))
    except (FileNotFoundError, SafetensorError, TypeError, ValueError):
        nothing = torch.zeros(0)
        return Scored(nothing.byte().view(0, DIGEST), nothing.long(), nothing)


def _digest_of(row: Trajectory) -> bytes:
    return _digest(np.array(row.tokens, dtype=np.int64), np.array(row.sampled, dtype=bool))


def _digest(tokens: NDArray[np.int64], mask: NDArray[np.bool_]) -> bytes:
    """Of a row's tokens and of which of them are trained."""
    found = hashlib.blake2b(tokens.tobytes(), digest_size=DIGEST)
    found.update(mask.tobytes())
    return found.digest()
