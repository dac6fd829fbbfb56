"""Rejection sampling for r1.toml: sample answers of a policy, and keep those that a verifier accepts."""

import json
from pathlib import Path

from posttrain.data import Data, load_tasks
from posttrain.recipe.verifier import read_verifier
from posttrain.recipe.writers import NativeWriter

LEAST = 10
"""Accepted answers without which there is nothing to train on."""


def accepted(
    directory: Path, *, model: str, tasks: str, count: int = 1280, samples: int = 2, seed: int = 0
) -> None:
    """Write accepted.jsonl: answers to the first `count` tasks that accept.toml scores 1, each once a task.

    Each task has `samples` answers, drawn at temperature 1. Raises ValueError if hardly any is accepted.
    """
    verifier = read_verifier(str(Path(__file__).with_name("accept.toml")))
    asked = load_tasks(Data(path=tasks))[:count]
    writer = NativeWriter(path=model, dtype="float32", rows=256)
    talks = [task.messages for task in asked]
    draws = [
        writer.write(talks, max_tokens=20, temperature=1.0, seed=samples * seed + n) for n in range(samples)
    ]
    lines = []
    for task, answers in zip(asked, zip(*draws, strict=True), strict=True):
        for text in dict.fromkeys(answer.text for answer in answers):
            if verifier(task, text).score == 1.0:
                lines.append({"prompt": list(task.messages), "completion": text})
    if len(lines) < LEAST:
        raise ValueError(
            f"{len(lines)} of {samples * len(asked)} answers are accepted, and {LEAST} are the least"
        )
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (directory / "accepted.jsonl").write_text(text, encoding="utf-8")
