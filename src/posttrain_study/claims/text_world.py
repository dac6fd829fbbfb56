"""Texts that a policy can answer to tasks, what verifiers give for them, and a table that learns them.

A policy chooses a manner, which all tasks share, and then a text of the manner for the task. It is a table
(table_policy.py), so shares are sums and not estimates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from posttrain.methods.build import build
from posttrain.types import Task, Verdict
from posttrain.verifiers.protocol import Verifier
from posttrain_study.claims.table_policy import TablePolicy, TableRollouts

ANSWERS = 16
"""To each task, in an update."""
Verdicts = list[list[list[Verdict]]]
Scores = torch.Tensor
"""A number for each text of a world, [tasks, manners, contents] in float64."""
Observe = Callable[[int, Mapping[str, float], torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Receives the update, the expectations before it, and the task, manner and content of each answer."""


@dataclass(frozen=True)
class TextWorld:
    """Texts that a policy can answer, [tasks][manners][contents], and how likely it does at the start."""

    tasks: Sequence[Task]
    texts: Sequence[Sequence[Sequence[str]]]
    manners: torch.Tensor
    """[manners]: the start's chances, equal for all tasks."""
    contents: torch.Tensor
    """[tasks, manners, contents]: the start's chances within a manner."""

    def judge(
        self, verifier: Verifier, tasks: Sequence[Task] | None = None, passed: Verdicts | None = None
    ) -> Verdicts:
        """Return the verdict on each text; equal texts to a task are judged once.

        passed: verdicts by fewer cases; a text that failed there fails here.
        """
        out = []
        for n, (task, manners) in enumerate(zip(tasks or self.tasks, self.texts, strict=True)):
            verdicts: dict[str, Verdict] = {}
            for m, row in enumerate(manners):
                for c, text in enumerate(row):
                    if text not in verdicts:
                        earlier = passed[n][m][c] if passed else None
                        verdicts[text] = earlier if earlier and not earlier.score else verifier(task, text)
            out.append([[verdicts[text] for text in row] for row in manners])
        return out

    def policy(self, lr: float) -> TablePolicy:
        """Return the start as a table: a row for the manner, and one for each task and manner."""
        rows = [self.manners, *self.contents.flatten(0, 1)]
        logits = torch.full((len(rows), max(map(len, rows))), -torch.inf, dtype=torch.float64)
        for row, chances in zip(logits, rows, strict=True):
            row[: len(chances)] = chances.log()
        return TablePolicy(logits, build("grpo", {}, horizon=2), lr)

    @torch.no_grad()
    def chances(self, policy: TablePolicy) -> Scores:
        """Return how likely the policy gives each text of a manner, to each task."""
        p = policy.logits.softmax(-1)
        manners = p[0, : len(self.manners)]
        return manners[:, None] * p[1:, : self.contents.shape[2]].view(self.contents.shape)


def scores_of(verdicts: Verdicts) -> Scores:
    """Return the scores of verdicts. Raises RuntimeError if one has none."""
    failed = [v.reason for rows in verdicts for row in rows for v in row if v.score is None]
    if failed:
        raise RuntimeError(f"the verifier failed: {failed[0]}")
    scores = [[[v.score or 0.0 for v in row] for row in rows] for rows in verdicts]
    return torch.tensor(scores, dtype=torch.float64)


def follow_texts(
    world: TextWorld,
    rewards: Scores,
    tables: Mapping[str, Scores],
    *,
    seed: int,
    updates: int,
    lr: float,
    observe: Observe = lambda *answers: None,
) -> dict[str, list[float]]:
    """Train with GRPO, and return the expectation of each table before each update and at the end."""
    policy, draw = world.policy(lr), torch.Generator().manual_seed(5000 + seed)
    path = {name: list[float]() for name in tables}
    task = torch.arange(len(world.tasks)).repeat_interleave(ANSWERS)
    for update in range(updates + 1):
        chances = world.chances(policy)
        for name, values in tables.items():
            path[name].append(float((chances * values).sum((1, 2)).mean()))
        if update == updates:
            break
        manner = policy.sample(torch.zeros_like(task), draw)
        state = 1 + task * len(world.manners) + manner
        content = policy.sample(state, draw)
        expected = {name: values[-1] for name, values in path.items()}
        observe(update + 1, expected, task, manner, content)
        paid = rewards[task, manner, content]
        policy.learn(
            TableRollouts(
                state=torch.stack([torch.zeros_like(task), state], 1),
                action=torch.stack([manner, content], 1),
                reward=torch.stack([torch.zeros_like(paid), paid], 1),
                group=task,
            )
        )
    return path
