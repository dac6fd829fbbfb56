"""Training offline: groups of rows of a dataset → update, as a session steps through it.

sample    consumes the next groups of the epoch's order; waits for nothing
update    consumes `batch_size` groups; the learner splits them into microbatches that fit its memory

A group is a single row, or the answers to one question that a method compares.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

import torch
from jaxtyping import Int

from posttrain.curriculum.mixture import Mixture
from posttrain.curriculum.stream import Stream
from posttrain.data.corpus import bits_per_byte
from posttrain.learner.learner import Learner, Update
from posttrain.loop.evaluator import Evaluator
from posttrain.loop.loop import Loop
from posttrain.loop.reference import Scored
from posttrain.math import masked
from posttrain.plan.dataset_rows import Group, numbered, with_probes
from posttrain.plan.teacher_server import TeacherServer
from posttrain.recipe.settings import Dataset
from posttrain.run.agreement import agreement
from posttrain.run.journal import Journal
from posttrain.run.tables import Groups
from posttrain.types import PROBE, Batch
from posttrain.verifiers.protocol import TrainerState


@dataclass
class OfflineRun(Loop):
    """The loop of a session that trains on rows of data (see loop.py); built by build.py."""

    learner: Learner
    stream: Stream[Group] | Mixture[Group]
    settings: Dataset
    held_out: Sequence[Group]
    journal: Journal
    updates: int
    records: int
    """Number of groups of rows to train on."""
    bound: int
    """The most tokens of a row, probes included."""
    by_name: Mapping[str, Sequence[Group]] = field(default_factory=dict)
    """The held-out groups by the name of their source, where it has one."""
    reference: Scored | None = None
    """The reference's log-probabilities, if they were computed once, before the first update."""
    teacher: TeacherServer | None = None
    compares: bool = False
    """True if held-out rows are judged by the method's own loss (rewards, preferences), not by likelihood."""
    evaluator: Evaluator | None = None
    """Answers the tasks of [[eval.task]]."""
    sleeps: bool = False
    held_out_bytes: float = 0.0
    """Bytes of the text that the held-out rows predict; 0 if they are not text."""

    def __post_init__(self) -> None:
        self.stream.taken = self.progress.taken

    def sample(self) -> Groups:
        """Return the next groups of the epoch's order."""
        groups = Groups(self.stream.take()[1] for _ in range(self.settings.batch_size))
        self.progress.update, self.progress.taken = self.progress.update + 1, self.stream.taken
        return groups

    def batch(self, groups: Sequence[Group]) -> Batch:
        """Return this rank's rows of these groups, numbered alike on every rank, with the probes."""
        return self.add_teacher(self._columns(groups))

    def _columns(self, groups: Sequence[Group]) -> Batch:
        rows, group = numbered(with_probes(groups, self.bound) if self.learner.method.probes else groups)
        is_own = [n % self.learner.ranks.size == self.learner.ranks.rank for n in group]
        batch = Batch.of(list(compress(rows, is_own)), list(compress(group, is_own)))
        return replace(batch, logp_ref=self.reference.column(batch)) if self.reference else batch

    def make_room(self) -> None:
        if self.sleeps and self.evaluator:
            self.evaluator.sampler.sleep()
            self.learner.ranks.gather(None, "memory")  # that of several ranks may be one server's

    def count(self, update: Update | None) -> None:
        if update is None:
            return
        lengths = self._lengths(update.batch)
        tokens, count = self.learner.ranks.sum(
            torch.stack([lengths.sum(), torch.tensor(len(lengths))])
        ).tolist()
        self.progress.tokens += tokens
        self.journal.pending |= {
            "length/mean": tokens / count,
            "speed/train_tokens": tokens / self.journal.phases["train"],
        }

    def _lengths(self, batch: Batch) -> Int[torch.Tensor, "n"]:
        """Return the trained tokens of each row, or all tokens if a head is read, without probes."""
        rows = ~(batch.version == PROBE).any(-1)
        reads_head = "head" in self.learner.method.needs
        return (batch.length - 1 if reads_head else batch.mask.sum(-1))[rows]

    def evaluate(self) -> dict[str, float]:
        """Return the likelihood of held-out rows, or the agreement of the method's judgements with them.

        Those of a source with a name are under eval/NAME/, in addition to those of all rows; those of answers
        to [[eval.task]] under its name.
        """
        self.make_room()
        return self._evaluate_rows() | self._evaluate_answers()

    def _evaluate_answers(self) -> dict[str, float]:
        if self.evaluator is None:
            return {}
        progress = self.progress
        epoch = progress.taken / max(1, self.records)
        state = TrainerState(global_step=progress.update, max_steps=self.updates, epoch=epoch)
        return self.evaluator.play(state)[1]

    def _evaluate_rows(self) -> dict[str, float]:
        if not self.held_out:
            return {}
        with self.journal.timed("eval"):
            metrics = {f"eval/{key}": value for key, value in self._measure(self.held_out).items()}
            for name, groups in self.by_name.items():
                metrics |= {f"eval/{name}/{key}": value for key, value in self._measure(groups).items()}
        return metrics

    def _measure(self, groups: Sequence[Group]) -> dict[str, float]:
        batch = self._columns(groups)
        if self.compares:
            metrics = dict(self.learner.assess(batch))
            if "head" in self.learner.method.needs:
                metrics |= self._agreement(batch, groups)
            return metrics
        logp = self.learner.score(batch).logp
        loss = -float(masked.mean(logp, batch.mask, self.learner.ranks))
        predicted = int(self.learner.ranks.sum(batch.mask.sum()))
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        if self.held_out_bytes:
            metrics["bits_per_byte"] = bits_per_byte(loss * predicted, self.held_out_bytes)
        return metrics

    def _agreement(self, batch: Batch, groups: Sequence[Group]) -> dict[str, float]:
        """Return how the scores of these groups agree with their judge; `batch`: this rank's rows."""
        ranks, all_rows = self.learner.ranks, Batch.of(*numbered(groups))
        scores = torch.zeros_like(all_rows.logp_gen)
        for rank, part in enumerate(ranks.gather(self.learner.read(batch).numpy(), "scores")):
            rows = (all_rows.group % ranks.size == rank).nonzero().flatten()
            width = min(part.shape[1], scores.shape[1])
            scores[rows, :width] = torch.from_numpy(part)[: len(rows), :width]
        return agreement(all_rows, scores, all_rows.length.tolist())
