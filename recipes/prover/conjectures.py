"""What the stages of conjectures.toml write: a corpus; what a prover conjectures in a round, and can prove.

    corpus         text.txt and sft.jsonl, as moves.py writes them, with conjectures among them: formulas
                   drawn at random, most of which can be neither proved nor refuted
                   held_out.jsonl, theorems to be judged by
    conjectured    paid.jsonl, conjectures that it could barely prove, or refute, to make more like them
                   proved.jsonl, all that it could prove, or whose negation it could, to learn to prove
                   counts.json, how many there were of each kind

A conjecture is paid if its search took more than a part of its budget, as in STP (arXiv:2502.00212): what is
easy is worth nothing, and what fails cannot be told from what is false. Nobody says which ones hold.
"""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

from moves import moves, read_lines, searched, write_lines

from posttrain.recipe.writers import NativeWriter
from posttrain_prove.tasks.drawn import held_out
from posttrain_prove.tasks.formula import Formula, parse_formula
from posttrain_prove.tasks.intuitionistic import by_introductions
from posttrain_prove.tasks.propositional import Propositional, atoms_of, form, propositional

SIGNS = ("->", "->", "/\\", "\\/", "~")


def corpus(directory: Path, *, held: int = 128, seed: int = 0) -> None:
    """Writes the files that a model begins with."""
    moves(directory, seed=seed)
    dice = random.Random(seed)
    drawn = [{"prompt": _ask(dice.randrange(9999)), "answer": str(_drawn(dice))} for _ in range(3000)]
    rows = [*read_lines(directory / "sft.jsonl"), *drawn]
    write_lines(directory / "sft.jsonl", dice.sample(rows, len(rows)))
    tasks = propositional("held_out", Propositional(held_out=held))
    write_lines(directory / "held_out.jsonl", (_record(task.id, dict(task.fields)) for task in tasks))


def conjectured(
    directory: Path,
    *,
    model: str,
    number: int,
    before: str = "",
    count: int = 800,
    budget: int = 64,
    barely: int = 8,
) -> None:
    """Writes what the model conjectures and proves; conjectures of one form are one.

    before: the directory of the round before, whose proofs are kept. barely: moves that a search must take
    for its conjecture to be paid.
    """
    writer = NativeWriter(path=model, rows=128)
    asked = [[{"role": "user", "content": _ask(n)}] for n in range(count)]
    said = [each.text for each in writer.write(asked, max_tokens=48, temperature=1.0, seed=number)]
    counts, made = Counter(said=len(said)), dict[str, Formula]()
    for text in said:
        formula = parse_formula(text)
        if formula is None or not atoms_of(formula) <= set("ABCDE") or not atoms_of(formula):
            counts["no formula"] += 1
        elif by_introductions(formula):
            counts["trivial"] += 1
        elif held_out(form(formula)):
            counts["held out"] += 1
        else:
            made.setdefault(form(formula), formula)
    counts["new"] = len(made)
    if not made:
        raise ValueError(f"none of {count} conjectures is new: {dict(counts)}")
    tried = {f"{number}-{n}": (each, each) for n, each in enumerate(made.values())}
    tried |= {f"{name}-not": (Formula("~", (each,)), each) for name, (each, _) in tried.items()}
    told = [_record(name, _fields(each)) for name, (each, _) in tried.items() if not held_out(form(each))]
    write_lines(directory / "tried.jsonl", told)
    how = ["--set", "task.propositional=", "--set", f"task.data.path={directory / 'tried.jsonl'}"]
    how += ["--split", "train", "--limit", str(len(told)), "--budget", str(budget)]
    found = searched(directory, model, *how)
    proved = [(row, line["moves"]) for row, line in zip(told, found, strict=True) if line["solved"]]
    counts["proved"] = sum(not row["id"].endswith("-not") for row, _ in proved)
    counts["refuted"] = len(proved) - counts["proved"]
    paid = [str(tried[row["id"]][1]) for row, spent in proved if spent > barely]
    counts["paid"] = len(paid)
    known = read_lines(Path(before) / "proved.jsonl") if before else []
    kept = {form(_read(row)): row for row in (*known, *(row for row, _ in proved))}
    if not kept:
        raise ValueError(f"no conjecture is proved or refuted, so there is nothing to learn: {dict(counts)}")
    write_lines(directory / "proved.jsonl", kept.values())
    write_lines(
        directory / "paid.jsonl", ({"prompt": _ask(n), "answer": each} for n, each in enumerate(paid))
    )
    (directory / "counts.json").write_text(json.dumps(counts) + "\n", encoding="utf-8")
    print(", ".join(f"{what} {n}" for what, n in counts.items()))


def _ask(number: int) -> str:
    """A model is asked the same again and again; the number makes each draw another one."""
    return f"Conjecture {number}"


def _drawn(dice: random.Random, size: int | None = None) -> Formula:
    """A formula over four atoms, provable or not."""
    size = dice.randrange(3, 11) if size is None else size
    if not size:
        return Formula(dice.choice("ABCD")) if dice.random() > 0.05 else Formula("False")
    sign, left = dice.choice(SIGNS), dice.randrange(size)
    parts = (size - 1,) if sign == "~" else (left, size - 1 - left)
    return Formula(sign, tuple(_drawn(dice, each) for each in parts))


def _fields(formula: Formula) -> dict[str, Any]:
    atoms = " ".join(sorted(atoms_of(formula)))
    return {"statement": f"forall {atoms} : Prop, {formula}", "opening": [f"intros {atoms}."]}


def _record(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A theorem as [task.data] reads it."""
    shown = str(fields["statement"]).partition(": Prop, ")[2]
    kept = {key: fields[key] for key in ("statement", "opening", "difficulty") if key in fields}
    return {"id": name, "prompt": f"======\n{shown}", "name": "goal", **kept}


def _read(row: dict[str, Any]) -> Formula:
    """The formula of a record."""
    formula = parse_formula(str(row["statement"]).partition(", ")[2])
    assert formula
    return formula
