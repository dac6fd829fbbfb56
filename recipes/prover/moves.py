"""Writes what a model needs to speak of propositional theorems from nothing: goals as Coq shows them, and moves.

    text.txt     goals with moves                        (to learn a tokenizer from)
    sft.jsonl    goals, each with a move drawn at random (to fine-tune on)

A model that has learnt this says moves of the right form, each as likely as any other: it knows what a move
is, and nothing of which one helps. What it learns of that it learns from proofs that a search finds.
"""

import json
import random
from pathlib import Path

from posttrain.envs.tasks.propositional import Propositional, propositional

SEPARATOR = "<|endoftext|>"
NAMES = ("H", *(f"H{n}" for n in range(5)))
"""Of hypotheses, in the order in which Coq gives them."""
PLAIN = ("intro.", "split.", "left.", "right.", "exfalso.", "assumption.")


def moves(directory: Path, *, goals: int = 8000, seed: int = 0) -> None:
    """Writes the two files."""
    dice = random.Random(seed)
    tasks = propositional("train", Propositional(train=2000))
    formulas = [str(task.messages[0]["content"]).partition("======\n")[2] for task in tasks]
    # What stands in them stands alone in later states.
    formulas += [
        part for each in formulas for part in (*each.split(" -> "), *each.split(" /\\ ")) if _whole(part)
    ]
    rows = []
    for _ in range(goals):
        held = dice.randrange(len(NAMES) + 1)
        hypotheses = "".join(f"{name} : {dice.choice(formulas)}\n" for name in NAMES[:held])
        waiting = "".join(f"\nthen: {dice.choice(formulas)}" for _ in range(dice.choice((0, 0, 1, 2))))
        move = dice.choice(
            (*PLAIN, *(f"{verb} {dice.choice(NAMES[: max(1, held)])}." for verb in ("apply", "destruct")))
        )
        rows.append({"prompt": f"{hypotheses}======\n{dice.choice(formulas)}{waiting}", "answer": move})
    with (directory / "sft.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    with (directory / "text.txt").open("w", encoding="utf-8") as file:
        file.write(f"\n{SEPARATOR}\n".join(f"{row['prompt']}\n{row['answer']}" for row in rows[:2000]))


def _whole(formula: str) -> bool:
    """Whether a piece of a formula is one: its parentheses match."""
    depth = 0
    for sign in formula:
        depth += (sign == "(") - (sign == ")")
        if depth < 0:
            return False
    return depth == 0
