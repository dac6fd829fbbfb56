"""Prompts that a teacher reads in place of the policy's: the task, and a hint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from posttrain.plan.hints import fields_of
from posttrain.recipe.recipe import Recipe
from posttrain.types import Batch, Episode, Message


@dataclass(frozen=True)
class TeacherPrompts:
    """Write the prompts of a batch's rows for `Batch.teacher_prompt`."""

    hint: str
    """Text with fields in braces (`reference.hint`)."""
    fields: frozenset[str]
    render: Callable[[Sequence[Message]], list[int]]
    """Renders messages up to where the model begins to speak."""
    right: float
    """The least reward of an answer that is shown as a sibling."""
    context: int
    """The most tokens of a row; a prompt that would make one longer with its answer is left out."""

    @staticmethod
    def of(
        recipe: Recipe, render: Callable[[Sequence[Message]], list[int]], context: int
    ) -> "TeacherPrompts | None":
        """Return the prompts of a recipe; None if it has no hint."""
        hint, right = recipe.reference.hint, recipe.eval.right
        names = frozenset(recipe.reference.hint_fields)
        return TeacherPrompts(hint, names, render, right, context) if hint else None

    def add(self, batch: Batch, rows: Sequence[tuple[int, Episode]]) -> Batch:
        """Return the batch of these rows, (group, episode) each, with the teacher's prompts."""
        groups: dict[int, list[Episode]] = {}
        for number, episode in rows:
            groups.setdefault(number, []).append(episode)
        prompts = [self._prompt(episode, groups[number]) for number, episode in rows]
        longest = max(map(len, prompts), default=0)
        padded = [prompt + [0] * (longest - len(prompt)) for prompt in prompts]
        return replace(
            batch,
            teacher_prompt=torch.tensor(padded, dtype=torch.long).view(len(rows), longest),
            teacher_prompt_length=torch.tensor([len(prompt) for prompt in prompts], dtype=torch.long),
        )

    def _prompt(self, episode: Episode, group: Sequence[Episode]) -> list[int]:
        """Return the tokens of the prompt with its hint; empty if it lacks a field, or is too long."""
        fields = fields_of(episode.task) | {
            "reason": episode.verdict.reason,
            "sibling": self._sibling(episode, group),
        }
        if any(fields.get(name) in (None, "") for name in self.fields):
            return []
        prompt = self.render(with_hint(episode.task.messages, self.hint.format_map(fields)))
        answer = len(episode.trajectory.tokens) - episode.trajectory.prompt_length
        return prompt if len(prompt) + answer <= self.context else []

    def _sibling(self, episode: Episode, group: Sequence[Episode]) -> str:
        others = [e for e in group if e is not episode and not e.verdict.failed and e.reward >= self.right]
        return max(others, key=lambda e: e.reward).response if others else ""


def with_hint(messages: Sequence[Message], hint: str) -> list[Mapping[str, Any]]:
    """Return the messages with a paragraph more in the last one."""
    *first, last = messages
    return [*first, {**last, "content": f"{last['content']}\n\n{hint}"}]
