"""The reference policy: the first weights of the run or another model, kept in memory or scored in advance.

An offline method trains on the same rows in every epoch, and its reference is fixed. So its log-probabilities
are computed once, before the first update, and stored in the run directory; no second model stays in memory.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from numpy.typing import NDArray
from safetensors import SafetensorError

from posttrain.base.atomic_files import replace_atomically
from posttrain.curriculum.mixture import mix_records
from posttrain.learner import forward
from posttrain.learner.learner import Learner
from posttrain.learner.recompute import compile_pieces, keep_less
from posttrain.models import pretrained, slices
from posttrain.models.tensor_files import read_tensors, write_tensors
from posttrain.plan.companions import kept_references, scores_once
from posttrain.plan.dataset_rows import Group, numbered
from posttrain.plan.model_info import ModelInfo, load_weights, with_layouts
from posttrain.plan.resolve import Resolved
from posttrain.recipe.recipe import Recipe
from posttrain.run.journal import Journal
from posttrain.types import Batch, PerToken, Trajectory

AT_ONCE = 64
"""Number of groups that are scored in one call."""
KEEP_S = 60.0
"""Seconds between writes of new scores; a kill loses at most these."""
DIGEST = 16
"""Bytes of a row's digest."""


class Scored:
    """A table of log π_ref by the content of a row.

    It has three columns: 4 bytes per trained token, and a digest and a length per row.
    """

    def __init__(
        self,
        digests: UInt8[torch.Tensor, "n D"],
        lengths: Int[torch.Tensor, "n"],
        logp: Float[torch.Tensor, "t"],
    ) -> None:
        """Raise ValueError if the columns do not fit together."""
        if digests.shape != (len(lengths), DIGEST) or int(lengths.sum()) != len(logp):
            raise ValueError("these are not the columns of one table")
        self.digests, self.lengths, self.logp = digests, lengths, logp
        raw = digests.numpy().tobytes()
        self._place = {raw[i * DIGEST : (i + 1) * DIGEST]: i for i in range(len(lengths))}
        self._end = lengths.cumsum(0)
        self.score: Callable[[Batch], PerToken] | None = None
        """Scores rows that the table lacks, such as a program's own."""

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._place

    def column(self, batch: Batch) -> PerToken:
        """Return the batch's logp_ref; raise KeyError for a missing row, unless `score` is set."""
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
    show: Callable[[int, int], None] = lambda count, total: None,
    *,
    writes: bool = True,
) -> Scored:
    """Return the rows' log-probabilities from the file; compute missing ones with `score` and add them.

    `show` receives the number of missing groups that are done, and of all that were missing. Of ranks that
    score the same rows together, one `writes`. After a kill the same groups are scored in one call, so the
    scores are the same to the last bit.
    """
    table = _read_table(file)
    missing, pending = list[Group](), set[bytes]()
    for group in groups:
        group_digests = {_digest_of(row) for row in group}
        if any(digest not in table and digest not in pending for digest in group_digests):
            missing.append(group)
            pending |= group_digests
    if not missing:
        return table
    digests, lengths, values = dict[bytes, None](), [table.lengths], [table.logp]
    written_at = time.monotonic()
    for start in range(0, len(missing), AT_ONCE):
        part = missing[start : start + AT_ONCE]
        rows, numbers = numbered(part)
        batch = Batch.of(rows, numbers)
        logp = score(batch)
        fresh = []
        for i, digest in enumerate(map(_digest_of, rows)):
            # Scores in the table stay, bit for bit: in another batch they would be rounded differently.
            if digest not in table and digest not in digests:
                digests[digest] = None
                fresh.append(i)
        mask = batch.mask[fresh]
        lengths.append(mask.sum(-1))
        values.append(logp[fresh][mask].float().cpu())
        show(start + len(part), len(missing))
        if writes and time.monotonic() - written_at >= KEEP_S:
            _write_table(file, _concatenate(table, digests, lengths, values))
            written_at = time.monotonic()
    out = _concatenate(table, digests, lengths, values)
    if writes:
        _write_table(file, out)
    return out


def _concatenate(
    table: Scored,
    digests: Iterable[bytes],
    lengths: list[torch.Tensor],
    values: list[torch.Tensor],
) -> Scored:
    """Return the table with rows of these digests; lengths and values include those of the table."""
    added = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).view(-1, DIGEST)
    return Scored(torch.cat([table.digests, added]), torch.cat(lengths), torch.cat(values))


def _write_table(file: Path, table: Scored) -> None:
    with replace_atomically(file) as working:
        write_tensors(working, {"digests": table.digests, "lengths": table.lengths, "logp": table.logp})


def _read_table(file: Path) -> Scored:
    """Read the table; return an empty one if the file is missing, was cut off, or is not a table."""
    try:
        return Scored(**read_tensors(file))
    except (FileNotFoundError, SafetensorError, TypeError, ValueError):
        empty = torch.zeros(0)
        return Scored(empty.byte().view(0, DIGEST), empty.long(), empty)


def _digest_of(row: Trajectory) -> bytes:
    return _digest(np.array(row.tokens, dtype=np.int64), np.array(row.sampled, dtype=bool))


def _digest(tokens: NDArray[np.int64], mask: NDArray[np.bool_]) -> bytes:
    """Return the digest of a row's tokens and its mask of trained tokens."""
    digest = hashlib.blake2b(tokens.tobytes(), digest_size=DIGEST)
    digest.update(mask.tobytes())
    return digest.digest()


def load_references(resolved: Resolved, policy: ModelInfo, *, sliced: bool = False) -> list[Any]:
    """Return the references that are kept during training; None for the policy without its adapter.

    sliced: leave their weights in their files until they are sharded.
    """
    recipe = resolved.recipe
    return [
        _load_model(recipe, policy, path, sliced=sliced) if path or not recipe.lora.rank else None
        for path in kept_references(resolved)
    ]


def _load_model(recipe: Recipe, policy: ModelInfo, path: str, *, sliced: bool = False) -> Any:
    """Load the reference that the recipe names by this path; "": the model that the run starts from."""
    if not path:
        return load_weights(recipe, policy, sliced=sliced)
    load = slices.load_model if sliced else pretrained.load_model
    model = load(policy.others[path], dtype=policy.dtype, device=policy.device)
    return policy.masked(with_layouts(model, "reference.path"))


def build_reference_scores(
    resolved: Resolved,
    policy: ModelInfo,
    groups: Sequence[Group],
    held_out: Sequence[Group],
    *,
    sizes: Sequence[int],
    file: Path,
    learner: Learner,
    journal: Journal,
) -> Scored | None:
    """Compute the reference's log-probabilities of all rows of the run; None unless done in advance.

    sizes: numbers of training groups by source.
    """
    recipe = resolved.recipe
    if not scores_once(resolved):
        return None
    order = mix_records(range(len(groups)), recipe.task, sizes, recipe.run.seed)
    places = {order.take()[1] for _ in range(recipe.run.updates * recipe.batch.batch_size)}
    scored_groups = [groups[i] for i in sorted(places)] + list(held_out)

    fresh: Any = None
    ranks = learner.ranks
    ranks.gather(None, "the reference's answers")  # a barrier: all ranks read the same file

    def score(batch: Batch) -> PerToken:
        nonlocal fresh
        elsewhere = bool(recipe.reference.path)
        if recipe.lora.rank and not elsewhere:
            return learner.score_reference(batch).logp
        if not learner.step_count and not elsewhere:
            # Before the first step the policy is its own reference; a resumed one has moved.
            return learner.score(batch).logp
        if fresh is None:
            fresh = _load_model(recipe, policy, recipe.reference.path)
            # As the policy does, so that equal weights give equal scores.
            if recipe.steps.compile:
                compile_pieces(fresh)
            elif not recipe.steps.gradient_checkpointing:
                keep_less(fresh)
        net = forward.Net(fresh, compiles=recipe.steps.compile)
        return forward.score_batch(net, batch, 1.0, learner.microbatch_tokens).logp

    def score_on_ranks(batch: Batch) -> PerToken:
        """Score this rank's share of the groups, and gather the scores of all."""
        rank_of = batch.group % ranks.size
        out = torch.zeros_like(batch.logp_gen)
        rows = batch.rows((rank_of == ranks.rank).nonzero().flatten()) if ranks.size > 1 else batch
        for rank, part in enumerate(ranks.gather(score(rows).numpy(), "scores")):
            out[rank_of == rank] = torch.from_numpy(part)
        return out

    with journal.timed("reference"):
        table = load_or_score(
            file,
            scored_groups,
            score_on_ranks,
            lambda count, total: journal.show("reference", {"done": count, "total": total}),
            writes=ranks.rank == 0,
        )
    fresh = None  # loaded again for rows that a program adds later
    table.score = score if ranks.size == 1 else None  # all of several ranks would have to score together
    return table
