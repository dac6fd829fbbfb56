"""Writes what a model needs to speak of Horn theorems from nothing: goals as Coq shows them, and moves.

    text.txt     goals with moves                                          (to learn a tokenizer from)
    sft.jsonl    goals, each with a move that Coq accepts, drawn at random (to fine-tune on)

No proof is among them. A model that has learnt this says moves that lead somewhere, in chains and dead ends
and loops alike; which of them lead to the end it learns from proofs that a search finds.
"""

import json
import random
from pathlib import Path

from posttrain.envs.tasks.horn import Horn, horn

SEPARATOR = "<|endoftext|>"


def moves(directory: Path, *, goals: int = 30000, hypotheses: int = 15, seed: int = 0) -> None:
    """Writes the two files."""
    dice = random.Random(seed)
    tasks = horn("train", Horn(train=goals, hypotheses=hypotheses, low=1, high=8, seed=seed + 1))
    rows = []
    for task in tasks:
        lines = str(task.messages[0]["content"]).partition("======")[0]
        # In later states another variable is to be proved, and some have others waiting behind it.
        concludes = [line.rpartition(" ")[2] for line in lines.splitlines()]
        goal = dice.choice(concludes)
        fits = [n + 1 for n, conclusion in enumerate(concludes) if conclusion == goal]
        waiting = "".join(f"\nthen: {dice.choice(concludes)}" for _ in range(dice.choice((0, 0, 1, 2))))
        rows.append({"prompt": f"{lines}======\n{goal}{waiting}", "answer": f"apply h{dice.choice(fits)}."})
    with (directory / "sft.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    with (directory / "text.txt").open("w", encoding="utf-8") as file:
        file.write(f"\n{SEPARATOR}\n".join(f"{row['prompt']}\n{row['answer']}" for row in rows[:1000]))
