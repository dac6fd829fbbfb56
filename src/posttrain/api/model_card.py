"""The model card of an exported run: README.md, with the header that the Hub reads."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.models.pretrained import HUB_ID
from posttrain.recipe.recipe import Recipe
from posttrain.report import record
from posttrain.report.headline import BEST, best, figure

MARKS = "|\\`*_<>[]"
"""Characters of a text that Markdown would read as marks."""


def model_card(
    run: Path, recipe: Recipe, update: int, dtype: str, gguf: str | None = None, repository: str | None = None
) -> str:
    """Return the model card of the checkpoint of an update, in Markdown, from what the run directory holds.

    repository: the Hub's name of the model, for the examples; without one they name this directory.
    """
    contents = record.read(run)
    plan = dict(contents.sections)
    title = dict(plan.get("Method", ())).get("title", contents.title)
    name = (repository or run.resolve().name).rpartition("/")[2]
    lines = [
        *_header(recipe),
        f"# {name}",
        "",
        f"{_plain(recipe.model.path)} trained with posttrain by {_plain(recipe.method['name'])}: "
        f"{_plain(title)}. These are the weights after update {update}, in {dtype}.",
        "",
        *_usage(repository or ".", gguf),
        "## Training",
        "",
        *_table(
            ("", ""),
            [("base model", recipe.model.path), ("updates", str(update)), ("seed", str(recipe.run.seed))],
        ),
    ]
    for section in ("Method", "Batch plan"):
        if rows := plan.get(section):
            lines += [f"### {section}", "", *_table(("", ""), rows)]
    lines += _evaluations(contents)
    if data := [*_data(contents)]:
        lines += ["## Data", "", *_table(("key", "value"), data)]
    lines += ["## Versions", "", *_fenced(contents.code.strip(), "text")]
    lines += ["## Recipe", "", "`posttrain train recipe.toml` with this recipe runs the training again.", ""]
    lines += _fenced(contents.config.strip(), "toml")
    return "\n".join(lines).rstrip() + "\n"


def _header(recipe: Recipe) -> list[str]:
    """Return the YAML header; JSON strings are YAML strings."""
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if HUB_ID.fullmatch(recipe.model.path) and not Path(recipe.model.path).exists():
        lines.append(f"base_model: {json.dumps(recipe.model.path.partition('@')[0])}")
    return [*lines, "tags:", "- posttrain", f"- {json.dumps(recipe.method['name'])}", "---", ""]


def _usage(place: str, gguf: str | None) -> list[str]:
    code = f"""\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({place!r})
model = AutoModelForCausalLM.from_pretrained({place!r})
messages = [{{"role": "user", "content": "..."}}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
output = model.generate(**inputs, max_new_tokens=256)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))"""
    lines = ["## Use", "", *_fenced(code, "python")]
    if gguf:
        lines += [
            f"`model-{gguf}.gguf` is the same model for llama.cpp: `llama-cli -m model-{gguf}.gguf`.",
            "",
        ]
    return lines


def _evaluations(contents: record.RunRecord) -> list[str]:
    """Return the first, best and last value of each curve on held-out tasks."""
    rows = []
    for name in sorted(contents.metrics.series):
        points = contents.metrics.points(name)
        if not name.startswith("eval/") or not points:
            continue
        top = best(contents.metrics, by=name) if name in BEST else None
        cells = [(points[0]), (points[-1])]
        first, last = (f"{figure(y)} (update {at})" for at, y in cells)
        rows.append((name, first, f"{figure(top[2])} (update {top[1]})" if top else "", last))
    if not rows:
        return ["## Evaluation", "", "The run was not evaluated on held-out tasks.", ""]
    return ["## Evaluation", "", *_table(("held-out metric", "first", "best", "last"), rows)]


def _data(contents: record.RunRecord) -> Iterator[tuple[str, str]]:
    """Yield the keys of the recipe that name data, and the digest of the data that were read."""

    def paths(key: str, value: Any) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict):
            for name, item in value.items():
                yield from paths(f"{key}.{name}" if key else name, item)
        elif isinstance(value, list):
            for number, item in enumerate(value):
                yield from paths(f"{key}[{number}]", item)
        elif key.rpartition(".")[2] == "path" and not key.startswith(("model.", "reference.", "critic.")):
            yield key, str(value)

    yield from paths("", tomllib.loads(contents.config))
    for line in (*contents.config.splitlines(), *contents.code.splitlines()):
        if line.startswith("# data: "):
            yield "digest", line.removeprefix("# data: ")


def _table(head: tuple[str, ...], rows: Any) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return [*lines, *(f"| {' | '.join(map(_plain, row))} |" for row in rows), ""]


def _fenced(text: str, language: str) -> list[str]:
    """Return a block of code, fenced with more backticks than it has in a row."""
    fence = "`" * 3
    while fence in text:
        fence += "`"
    return [f"{fence}{language}", text, fence, ""]


def _plain(text: str) -> str:
    """Return a text on one line without what Markdown reads as marks."""
    return "".join(f"\\{c}" if c in MARKS else c for c in " ".join(text.split()))
