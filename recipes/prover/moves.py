"""Writes what a model needs to speak of theorems from nothing: goals as Coq shows them, and moves.

    moves        of propositional theorems
    proofs       propositional theorems with proofs that are whole
    harvested    of proofs that a prover finds

    text.txt     goals with moves                        (to learn a tokenizer from)
    sft.jsonl    goals, each with a move drawn at random (to fine-tune on)

A model that has learnt this says moves of the right form, each as likely as any other: it knows what a move
is, and nothing of which one helps. What it learns of that it learns from proofs that a search finds.
"""

import json
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from posttrain_prove.tasks.formula import ProverName
from posttrain_prove.tasks.propositional import Propositional, propositional

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
    write_lines(directory / "sft.jsonl", rows)
    _write_text(directory, (f"{row['prompt']}\n{row['answer']}" for row in rows[:2000]))


def proofs(directory: Path, *, prover: ProverName = "coq", low: int = 4, high: int = 8) -> None:
    """Writes text.txt alone: propositional theorems with proofs, whole."""
    tasks = propositional("train", Propositional(low=low, high=high, train=2000, prover=prover))
    _write_text(directory, (f"{task.messages[0]['content']}\n{task.fields['gold']}" for task in tasks))


def harvested(directory: Path, *, model: str, limit: int = 600) -> None:
    """Writes the moves of the proofs that a prover finds: sft.jsonl alone, each state with its move once."""
    found = searched(directory, model, "--split", "train", "--limit", str(limit))
    rows = {
        state["shown"]: move["text"]
        for line in found
        if line["solved"]
        for state in line["states"]
        for move in state["moves"]
        if move.get("found")
    }
    if not rows:
        raise ValueError(f"{model} proves none of {len(found)} theorems, so there is no move to learn")
    told = ({"prompt": shown, "answer": move} for shown, move in rows.items())
    write_lines(directory / "sft.jsonl", told)
    proved = sum(line["solved"] for line in found)
    print(f"{proved} of {len(found)} theorems proved, {len(rows)} states with a move that helped")


def searched(directory: Path, model: str, *how: str) -> list[dict[str, Any]]:
    """The lines of trees/ that `posttrain search` of prove.toml leaves in a new folder of the directory."""
    recipe, found = str(Path(__file__).with_name("prove.toml")), directory / "found"
    command = [sys.executable, "-m", "posttrain", "search", recipe, "--model", model, *how]
    # A line a theorem, and a path that is another once the stage is finished, are of no use to anybody.
    if subprocess.run([*command, "--out", str(found)], check=False, stdout=subprocess.DEVNULL).returncode:
        raise ValueError(f"posttrain search of {model} failed, as is said above")
    [path] = (found / "trees").iterdir()
    return read_lines(path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Its records, a line each."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Records, a line each."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _write_text(directory: Path, told: Iterable[str]) -> None:
    (directory / "text.txt").write_text(f"\n{SEPARATOR}\n".join(told), encoding="utf-8")


def _whole(formula: str) -> bool:
    """Whether a piece of a formula is one: its parentheses match."""
    depth = 0
    for sign in formula:
        depth += (sign == "(") - (sign == ")")
        if depth < 0:
            return False
    return depth == 0
