"""A reference policy's log-probabilities of a run's rows, computed once and kept in the run directory.

An offline method meets the same rows in every epoch and its reference never moves, so nobody needs to hold
two models in memory, or to ask the second one twice.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError

from posttrain.learner.checkpoint import read_tensors, write_tensors
from posttrain.runtime.rows import Group, numbered
from posttrain.types import Batch, PerToken, Trajectory

AT_ONCE = 64
"""Groups that are scored in one call."""


class Scored:
    """log π_ref of rows, found by what is in them.

    The rows of a run are few enough for this to be small: 4 bytes a trained token.
    """

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self._values = values

    def column(self, batch: Batch) -> PerToken:
        """The batch's logp_ref; KeyError for a row that was not scored."""
        out = torch.zeros_like(batch.logp_gen)
        for i, length in enumerate(batch.length.tolist()):
            key = _key(batch.tokens[i, :length], batch.mask[i, :length])
            out[i, batch.mask[i]] = self._values[key].to(out)
        return out


def scored(
    file: Path,
    groups: Sequence[Group],
    score: Callable[[Batch], PerToken],
    show: Callable[[int, int], None] = lambda done, total: None,
) -> Scored:
    """The rows' log-probabilities: read from the file; what it lacks is asked of `score` and added to it.

    `show` is told how many groups of how many that were lacking are done.
    """
    values = _held(file)
    lacking = [group for group in groups if any(_key_of(row) not in values for row in group)]
    if not lacking:
        return Scored(values)
    for start in range(0, len(lacking), AT_ONCE):
        part = lacking[start : start + AT_ONCE]
        rows, numbers = numbered(part)
        batch = Batch.of(rows, numbers)
        logp = score(batch)
        for i, row in enumerate(rows):
            # What is held stays, bit for bit: among other rows it would be rounded otherwise.
            values.setdefault(_key_of(row), logp[i, batch.mask[i]].float())
        show(start + len(part), len(lacking))
    fresh = file.with_suffix(".tmp")
    write_tensors(fresh, values)
    fresh.replace(file)
    return Scored(values)


def _held(file: Path) -> dict[str, torch.Tensor]:
    """What the file has; nothing if it is not there, or was cut off when the machine went down."""
    try:
        return read_tensors(file)
    except (FileNotFoundError, SafetensorError):
        return {}


def _key_of(row: Trajectory) -> str:
    return _key(torch.tensor(row.tokens), torch.tensor(row.sampled))


def _key(tokens: torch.Tensor, mask: torch.Tensor) -> str:
    """A digest of a row's tokens and of which of them are trained."""
    row = torch.stack([tokens, mask.long()])
    return hashlib.blake2b(row.numpy().tobytes(), digest_size=16).hexdigest()
