"""A reference policy's log-probabilities of a run's rows, computed once and kept in the run directory.

An offline method meets the same rows in every epoch and its reference never moves, so nobody needs to hold
two models in memory, or to ask the second one twice.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError

from posttrain.learner.checkpoint import read_tensors, write_tensors
from posttrain.runtime.rows import Group, numbered
from posttrain.types import Batch, PerToken

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
        out = torch.zeros_like(batch.reward)
        for i, key in enumerate(_keys(batch)):
            out[i, batch.mask[i]] = self._values[key].to(out)
        return out


def scored(
    file: Path,
    groups: Sequence[Group],
    score: Callable[[Batch], PerToken],
    show: Callable[[int, int], None] = lambda done, total: None,
) -> Scored:
    """The rows' log-probabilities: read from the file if all are in it, else asked of `score` and written.

    `show` is told how many groups of how many are done.
    """
    wanted = {key for part in _parts(groups) for key in _keys(_batch(part))}
    if wanted <= (held := _held(file)).keys():
        return Scored(held)
    values: dict[str, torch.Tensor] = {}
    done = 0
    for part in _parts(groups):
        batch = _batch(part)
        logp = score(batch)
        for i, key in enumerate(_keys(batch)):
            values[key] = logp[i, batch.mask[i]].float()
        done += len(part)
        show(done, len(groups))
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


def _parts(groups: Sequence[Group]) -> Iterable[Sequence[Group]]:
    return (groups[start : start + AT_ONCE] for start in range(0, len(groups), AT_ONCE))


def _batch(groups: Sequence[Group]) -> Batch:
    return Batch.of(*numbered(groups))


def _keys(batch: Batch) -> list[str]:
    """A digest of each row's tokens and of which of them are trained."""
    out = []
    for i, length in enumerate(batch.length.tolist()):
        row = torch.stack([batch.tokens[i, :length], batch.mask[i, :length].long()])
        out.append(hashlib.blake2b(row.numpy().tobytes(), digest_size=16).hexdigest())
    return out
