"""Pairs of a policy's own answers, for a reward model that is to be right about what the policy says now."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.data import Data, load_rankings, load_tasks
from posttrain.recipe.writers import NativeWriter
from posttrain.types import Message, Task
from posttrain.verifiers.model.verifier import RewardModel

Pair = dict[str, Any]
LEAST = 10
"""Pairs without which a reward model is not worth training again."""


def pairs(
    directory: Path,
    model: str,
    prompts: str,
    judge: str,
    earlier: str = "",
    count: int = 256,
    skip: int = 0,
    samples: int = 2,
    max_tokens: int = 48,
    seed: int = 0,
) -> None:
    """Writes train.jsonl: of the model's answers to each prompt the best and worst, and as many old pairs.

    `judge` is a reward model that stands in for people, and `samples` answers are drawn at temperature 1. A
    tenth of the new pairs goes to held_out.jsonl instead, and no earlier pair has a prompt of those. `skip`
    prompts are left to other rounds. Raises ValueError if hardly any two answers differ.
    """
    tasks = load_tasks(Data(path=prompts, bad="skip"))[skip : skip + count]
    made = list(_compared(tasks, model, judge, samples, max_tokens, seed))
    if len(made) < LEAST:
        raise ValueError(
            f"{len(made)} of {len(tasks)} prompts have two answers that differ, and {LEAST} are the least"
        )
    held_out, fresh = made[: len(made) // 10], made[len(made) // 10 :]
    old: list[Pair] = []
    if earlier:
        found = load_rankings(Data(path=earlier, bad="skip", seed=seed))
        old = [_pair(r.messages, dict(zip(r.answers, r.scores, strict=True))) for r in found]
        unseen = [pair["prompt"] for pair in held_out]
        old = [pair for pair in old if pair["prompt"] not in unseen][: len(fresh)]
    for name, part in (("held_out", held_out), ("train", [*old, *fresh])):
        text = "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in part)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


def _compared(
    tasks: Sequence[Task], model: str, judge: str, samples: int, max_tokens: int, seed: int
) -> Iterator[Pair]:
    """The best and the worst of the model's answers to each prompt, where the judge prefers one."""
    writer, says = NativeWriter(path=model, rows=32), RewardModel(paths=(judge,), dtype="auto")
    talks = [task.messages for task in tasks]
    seeds = range(samples * seed, samples * (seed + 1))
    drawn = [writer.write(talks, max_tokens=max_tokens, temperature=1.0, seed=s) for s in seeds]
    for task, answers in zip(tasks, zip(*drawn, strict=True), strict=True):
        texts = list(dict.fromkeys(a.text for a in answers if a.text.strip()))
        verdicts = says.judge_all([(task, text) for text in texts])
        scores = {t: v.score for t, v in zip(texts, verdicts, strict=True) if v.score is not None}
        if len(set(scores.values())) > 1:
            yield _pair(task.messages, scores)


def _pair(messages: Sequence[Message], scores: Mapping[str, float]) -> Pair:
    best, worst = max(scores, key=scores.__getitem__), min(scores, key=scores.__getitem__)
    return {"prompt": list(messages), "chosen": best, "rejected": worst}
