"""Writes what a model needs to speak of Horn theorems from nothing: goals as Coq shows them, and moves.

    text.txt     goals with moves                        (to learn a tokenizer from)
    sft.jsonl    goals, each with a move drawn at random (to fine-tune on)

A model that has learnt this says moves of the right form, each as likely as any other: it knows what a move
is, and nothing of which one helps. What it learns of that it learns from proofs that a search finds.
"""

import json
import random
from pathlib import Path

from posttrain.envs.tasks.horn import Horn, horn

SEPARATOR = "<|endoftext|>"


def moves(directory: Path, *, goals: int = 6000, hypotheses: int = 15, seed: int = 0) -> None:
    """Writes the two files."""
    dice = random.Random(seed)
    tasks = horn("train", Horn(train=min(goals, 2000), hypotheses=hypotheses, low=1, high=8))
    rows = []
    for n in range(goals):
        hypothesis_lines, _, _ = str(tasks[n % len(tasks)].messages[0]["content"]).partition("======")
        # Goals of later states are other variables, and some have others waiting behind them.
        letters = sorted({c for c in hypothesis_lines if c.isupper()})
        waiting = "".join(f"\nthen: {dice.choice(letters)}" for _ in range(dice.choice((0, 0, 1, 2))))
        goal = f"{hypothesis_lines}======\n{dice.choice(letters)}{waiting}"
        rows.append({"prompt": goal, "answer": f"apply h{dice.randint(1, hypotheses)}."})
    with (directory / "sft.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    with (directory / "text.txt").open("w", encoding="utf-8") as file:
        file.write(f"\n{SEPARATOR}\n".join(f"{row['prompt']}\n{row['answer']}" for row in rows[:1000]))
