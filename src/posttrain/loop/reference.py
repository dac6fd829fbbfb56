"""Where a reference policy comes from: the start of the run or another model; held, or asked beforehand.

An offline method meets the same rows in every epoch and its reference never moves, so nobody needs to hold
two models in memory, or to ask the second one twice: its log-probabilities are kept in the run directory.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from numpy.typing import NDArray
from safetensors import SafetensorError

from posttrain.base.atomic_files import replacing
from posttrain.curriculum.stream import Stream
from posttrain.learner import forward
from posttrain.learner.learner import Learner
from posttrain.learner.recompute import keep_less
from posttrain.models import pretrained
from posttrain.models.tensor_files import read_tensors, write_tensors
from posttrain.plan.companions import keeps_reference, scores_once
from posttrain.plan.dataset_rows import Group, numbered
from posttrain.plan.model_info import ModelInfo, load_weights, with_layouts
from posttrain.plan.resolve import Resolved
from posttrain.recipe.recipe import Recipe
from posttrain.run.journal import Journal
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
        self.score: Callable[[Batch], PerToken] | None = None
        """Of rows that were not scored before, such as a program's own."""

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._place

    def column(self, batch: Batch) -> PerToken:
        """The batch's logp_ref; KeyError for a row that was not scored, where nobody can."""
        out, lacking = torch.zeros_like(batch.logp_gen), list[int]()
        for i, length in enumerate(batch.length.tolist()):
            digest = _digest(batch.tokens[i, :length].numpy(), batch.mask[i, :length].numpy())
            if digest not in self._place and self.score:
                lacking.append(i)
                continue
            row = self._place[digest]
            end = int(self._end[row])
            out[i, batch.mask[i]] = self.logp[end - int(self.lengths[row]) : end].to(out)
        if lacking and self.score:
            out[lacking] = self.score(batch.rows(torch.tensor(lacking))).to(out)
        return out


def load_or_score(
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
    held = _read_table(file)
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
            _write_table(file, _concatenate(held, digests, lengths, values))
            kept = time.monotonic()
    out = _concatenate(held, digests, lengths, values)
    if writes:
        _write_table(file, out)
    return out


def _concatenate(
    held: Scored,
    digests: Sequence[bytes],
    lengths: list[torch.Tensor],
    values: list[torch.Tensor],
) -> Scored:
    """What is held, and what was added to it."""
    added = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).view(-1, DIGEST)
    return Scored(torch.cat([held.digests, added]), torch.cat(lengths), torch.cat(values))


def _write_table(file: Path, table: Scored) -> None:
    with replacing(file) as working:
        write_tensors(working, {"digests": table.digests, "lengths": table.lengths, "logp": table.logp})


def _read_table(file: Path) -> Scored:
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


def load_reference(resolved: Resolved, policy: ModelInfo) -> Any:
    """The reference policy, where a frozen model is held."""
    return _weights(resolved.recipe, policy) if keeps_reference(resolved) else None


def _weights(recipe: Recipe, policy: ModelInfo) -> Any:
    """The model that the recipe names as the reference, or the one that the run starts from."""
    if not recipe.reference.path:
        return load_weights(recipe, policy)
    model = pretrained.load_model(policy.others["reference.path"], dtype=policy.dtype, device=policy.device)
    return policy.masked(with_layouts(model, "reference.path"))


def build_reference_scores(
    resolved: Resolved,
    policy: ModelInfo,
    groups: Sequence[Group],
    held_out: Sequence[Group],
    *,
    file: Path,
    learner: Learner,
    journal: Journal,
) -> Scored | None:
    """The reference's log-probabilities of every row that the run will meet, if they are computed once."""
    recipe = resolved.recipe
    if not scores_once(resolved):
        return None
    order = Stream(range(len(groups)), seed=recipe.run.seed)
    met = {order.take()[1] for _ in range(recipe.run.updates * recipe.batch.batch_size)}
    wanted = [groups[i] for i in sorted(met)] + list(held_out)

    fresh: Any = None
    ranks = learner.ranks
    ranks.gather(None, "the reference's answers")  # what one has written, all read alike

    def score(batch: Batch) -> PerToken:
        nonlocal fresh
        elsewhere = bool(recipe.reference.path)
        if recipe.lora.rank and not elsewhere:
            return learner.score_reference(batch).logp
        if not learner.step_count and not elsewhere:
            # Before the first step the policy is its own reference; a resumed one is not any more.
            return learner.score(batch).logp
        if fresh is None:
            fresh = _weights(recipe, policy)
            if not recipe.steps.gradient_checkpointing:
                keep_less(fresh)  # as the policy does, so that both say the same of the same weights
        return forward.score_batch(forward.Net(fresh), batch, 1.0, learner.microbatch_tokens).logp

    def shared(batch: Batch) -> PerToken:
        """Each rank scores its share of the groups, and all are told."""
        mine = batch.group % ranks.size == ranks.rank
        out = torch.zeros_like(batch.logp_gen)
        own = score(batch.rows(mine.nonzero().flatten())) if ranks.size > 1 else score(batch)
        for rank, told in enumerate(ranks.gather(own.numpy(), "scores")):
            out[batch.group % ranks.size == rank] = torch.from_numpy(told)
        return out

    with journal.timed("reference"):
        found = load_or_score(
            file,
            wanted,
            shared,
            lambda done, total: journal.show("reference", {"done": done, "total": total}),
            writes=ranks.rank == 0,
        )
    fresh = None  # until a program brings rows that nobody foresaw
    found.score = score if ranks.size == 1 else None  # of several ranks all would have to score
    return found
