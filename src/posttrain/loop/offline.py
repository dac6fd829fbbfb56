"""Learning offline: groups of rows of a dataset → update, as a session steps through it.

sample    consumes the next groups of the epoch's order; waits for nothing
update    one update is `batch_size` groups; the learner cuts it as its memory asks

A group is a row by itself, or the answers to one question that a method compares.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

import torch
from jaxtyping import Int

from posttrain.curriculum.stream import Stream
from posttrain.data.corpus import bits_per_byte
from posttrain.learner.learner import Learner, Update
from posttrain.loop.loop import Loop
from posttrain.loop.reference import Scored
from posttrain.math import masked
from posttrain.plan.dataset_rows import Group, numbered, with_probes
from posttrain.recipe.settings import Dataset
from posttrain.run.agreement import agreement
from posttrain.run.journal import Journal
from posttrain.run.tables import Groups
from posttrain.types import PROBE, Batch


@dataclass
class OfflineRun(Loop):
    """What a session does with rows of data (see loop.py); made by build.py."""

    learner: Learner
    stream: Stream[Group]
    settings: Dataset
    held_out: Sequence[Group]
    journal: Journal
    updates: int
    bound: int
    """The most tokens of a row, probes included."""
    reference: Scored | None = None
    """The reference's log-probabilities, where they were computed once and for all."""
    compares: bool = False
    """Whether held-out rows are judged by the method's own loss: rewards and preferences, not likelihoods."""
    held_out_bytes: float = 0.0
    """Of the text that the held-out rows predict; 0 where they are no text."""

    def __post_init__(self) -> None:
        self.stream.taken = self.progress.taken

    def sample(self) -> Groups:
        """The next groups of the epoch's order."""
        groups = Groups(self.stream.take()[1] for _ in range(self.settings.batch_size))
        self.progress.update, self.progress.taken = self.progress.update + 1, self.stream.taken
        return groups

    def batch(self, groups: Sequence[Group]) -> Batch:
        """This rank's rows of these groups, numbered alike on every rank, with those that only measure."""
        rows, group = numbered(with_probes(groups, self.bound) if self.learner.method.probes else groups)
        mine = [n % self.learner.ranks.size == self.learner.ranks.rank for n in group]
        batch = Batch.of(list(compress(rows, mine)), list(compress(group, mine)))
        return replace(batch, logp_ref=self.reference.column(batch)) if self.reference else batch

    def count(self, update: Update | None) -> None:
        """Counts the rows of an update."""
        if update is None:
            return
        lengths = self._lengths(update.batch)
        tokens, count = self.learner.ranks.sum(
            torch.stack([lengths.sum(), torch.tensor(len(lengths))])
        ).tolist()
        self.progress.tokens += tokens
        self.journal.noted |= {
            "length/mean": tokens / count,
            "speed/train_tokens": tokens / self.journal.phases["train"],
        }

    def _lengths(self, batch: Batch) -> Int[torch.Tensor, "n"]:
        """Trained tokens of each row, or all of them where a head is read; probes are not counted."""
        rows = ~(batch.version == PROBE).any(-1)
        reads_head = "head" in self.learner.method.needs
        return (batch.length - 1 if reads_head else batch.mask.sum(-1))[rows]

    def evaluate(self) -> dict[str, float]:
        """On held-out rows: their likelihood, or how well the method's own judgements agree with theirs."""
        if not self.held_out:
            return {}
        with self.journal.timed("eval"):
            batch = self.batch(self.held_out)
            if self.compares:
                found = {f"eval/{key}": value for key, value in self.learner.assess(batch).items()}
                if "head" in self.learner.method.needs:
                    found |= {f"eval/{key}": value for key, value in self._agreement(batch).items()}
                return found
            logp = self.learner.score(batch).logp
            loss = -float(masked.mean(logp, batch.mask, self.learner.ranks))
            predicted = int(self.learner.ranks.sum(batch.mask.sum()))
        found = {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}
        if self.held_out_bytes:
            found["eval/bits_per_byte"] = bits_per_byte(loss * predicted, self.held_out_bytes)
        return found

    def _agreement(self, batch: Batch) -> dict[str, float]:
        """How the scores of all held-out groups agree with their judge; `batch` are this rank's own."""
        rows, group = numbered(self.held_out)
        whole = Batch.of(rows, group)
        scores, score = self.learner.read(batch), torch.zeros_like(whole.logp_gen)
        for rank, told in enumerate(self.learner.ranks.gather(scores.numpy(), "scores")):
            mine = (whole.group % self.learner.ranks.size == rank).nonzero().flatten()
            width = min(told.shape[1], score.shape[1])
            score[mine, :width] = torch.from_numpy(told)[: len(mine), :width]
        return agreement(whole, score, whole.length.tolist())
