"""Writes what a model needs to speak of theorems from nothing: goals as Coq shows them, and moves.

    moves        of propositional theorems
    proofs       propositional theorems with proofs that are whole
    equations    of equations of natural numbers, and sketches: a lemma each, which is as likely as any other

    text.txt     goals with moves                        (to learn a tokenizer from)
    sft.jsonl    goals, each with a move drawn at random (to fine-tune on)

A model that has learnt this says moves of the right form, each as likely as any other: it knows what a move
is, and nothing of which one helps. What it learns of that it learns from proofs that a search finds.
"""

import json
import random
import re
from pathlib import Path

from posttrain.envs.tasks.peano import Peano, peano
from posttrain.envs.tasks.propositional import Propositional, propositional
from posttrain.search.asking import SKETCH

SEPARATOR = "<|endoftext|>"
NAMES = ("H", *(f"H{n}" for n in range(5)))
"""Of hypotheses, in the order in which Coq gives them."""
PLAIN = ("intro.", "split.", "left.", "right.", "exfalso.", "assumption.")
NUMBERS = ("intro.", "intros.", "simpl.", "reflexivity.", "symmetry.", "f_equal.")


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
    _write(directory, rows)


def proofs(directory: Path) -> None:
    """Writes text.txt alone: propositional theorems with proofs, whole."""
    tasks = propositional("train", Propositional(low=4, high=8, train=2000))
    told = [f"{task.messages[0]['content']}\n{task.fields['gold']}" for task in tasks]
    (directory / "text.txt").write_text(f"\n{SEPARATOR}\n".join(told), encoding="utf-8")


def equations(directory: Path, *, goals: int = 8000, sketches: bool = True, seed: int = 0) -> None:
    """Writes the two files; without sketches there are moves alone."""
    dice = random.Random(seed)
    theorems = [
        str(task.fields["statement"])
        for low, train in ((1, 50), (2, 400), (3, 400), (4, 400))
        for task in peano("train", Peano(low=low, high=low, train=train))
    ]
    lemmas = [_plain(each) for each in theorems[:450]]
    rows = []
    for _ in range(goals):
        variables = "abc"[: dice.randrange(4)]
        known = [f"{name} : {dice.choice(lemmas)}" for name in ("H", "H0")[: dice.choice((0, 0, 1, 2))]]
        hypotheses = [f"IH{name} : {_equation(theorems, dice)}" for name in variables if dice.random() < 0.3]
        context = [*known, *([f"{', '.join(variables)} : nat"] if variables else []), *hypotheses]
        goal = _equation(theorems, dice) if variables else dice.choice(theorems)
        shown = "\n".join([*context, "======", goal])
        if sketches and not variables and dice.random() < 0.5:
            rows.append({"prompt": f"{shown}\n{SKETCH}", "answer": f"assert ({dice.choice(lemmas)})."})
            continue
        names = [each.partition(" :")[0] for each in (*known, *hypotheses)] or ["H"]
        say = f"rewrite {dice.choice(('', '<- '))}{dice.choice(names)}."
        move = dice.choice((*NUMBERS, say, say, say, *[f"induction {dice.choice(variables or 'a')}."] * 2))
        rows.append({"prompt": shown, "answer": move})
    _write(directory, rows)


def _equation(theorems: list[str], dice: random.Random) -> str:
    """Two sides of theorems, which need not be equal."""
    left, right = (dice.choice(theorems).partition(", ")[2].split(" = ") for _ in range(2))
    return f"{left[0]} = {right[1]}"


def _plain(theorem: str) -> str:
    """The same with a, b, c for its variables, in the order in which they come."""
    equation = theorem.partition(", ")[2]
    names = dict(zip(dict.fromkeys(re.findall("[abc]", equation)), "abc", strict=False))
    equation = re.sub("[abc]", lambda found: names[found.group()], equation)
    return f"forall {' '.join(names.values())} : nat, {equation}"


def _write(directory: Path, rows: list[dict[str, str]]) -> None:
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
