"""Play held-out tasks with the newest weights and measure the answers, in runs of any method."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.loop.weight_sync import Publisher
from posttrain.recipe.recipe import SampleLog
from posttrain.recipe.settings import Evaluation
from posttrain.rollout.protocol import GroupRequest, Sampler
from posttrain.run import samples
from posttrain.run.journal import Journal
from posttrain.run.metrics import named_evaluation_metrics
from posttrain.run.rundir import RunDir
from posttrain.types import EpisodeSummary, Sampling, Task
from posttrain.verifiers.protocol import TrainerState


@dataclass
class Evaluator:
    """Answer the held-out tasks of a run, `settings.samples` times each."""

    sampler: Sampler
    tasks: Sequence[Task]
    samplings: Mapping[str, Sampling]
    """By the name of a source."""
    auditors: Mapping[str, frozenset[str]]
    """By the name of a source: the parts of its verifier that only record."""
    separate: frozenset[str]
    """Names of the sources of [[eval.task]], which are measured by name alone."""
    settings: Evaluation
    run_dir: RunDir
    journal: Journal
    pieces: Callable[[Sequence[int]], list[str]]
    """Splits tokens into their texts, for the samples."""
    record: SampleLog
    is_own: Callable[[int], bool]
    """Returns whether this rank plays the task of this number."""
    share: Callable[[list[Any], str], list[Any]]
    """Returns the items of all ranks."""
    publisher: Publisher | None = None
    """Sends the weights before each evaluation, where no update does."""

    def play(self, state: TrainerState) -> tuple[list[EpisodeSummary], dict[str, float]]:
        """Return the episodes of all ranks, and their metrics; write the answers to samples/eval_*.jsonl.

        state: the trainer state that reward functions see.
        """
        if self.publisher:
            self.publisher.publish(self.sampler)
        temperature, size = self.settings.temperature, self.settings.samples
        samplings = {name: replace(s, temperature=temperature) for name, s in self.samplings.items()}
        requests = [
            GroupRequest(number=n, task=task, size=size, sampling=samplings[task.dataset], state=state)
            for n, task in enumerate(self.tasks)
            if self.is_own(n)
        ]
        with self.journal.timed("eval"):
            played = self.sampler.evaluate(
                requests, lambda count: self.journal.show("eval", {"done": count, "total": len(requests)})
            )
        groups = [played[request.number] for request in requests]
        update, places = state.global_step, samples.draw_groups(groups, self.record.tokens, "eval")
        name = f"eval_{update:06d}"
        self.run_dir.samples(name, samples.lines(update, groups, places, self.pieces))
        if searches := samples.searches(name, groups, 8 * self.record.trees, self.settings.right):
            self.run_dir.samples(name, searches, "trees")
        summaries = [(r.number, [e.summary() for e in played[r.number]]) for r in requests]
        by_number = dict(self.share(summaries, "evaluations"))
        all_groups = [by_number[n] for n in sorted(by_number)]
        metrics = named_evaluation_metrics(all_groups, self.settings.right, self.auditors, self.separate)
        return [episode for group in all_groups for episode in group], metrics
