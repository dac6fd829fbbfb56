"""The model card of an exported run: README.md, with the header that the Hub reads."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.methods.table import line
from posttrain.models.pretrained import HUB_ID
from posttrain.recipe.document import DIRECTORY
from posttrain.recipe.recipe import Recipe
from posttrain.report import record
from posttrain.report.headline import BEST, best, figure

MARKS = "|\\`*_<>[]"
"""Characters of a text that Markdown would read as marks."""
USAGE = {
    "": """\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(PLACE)
model = AutoModelForCausalLM.from_pretrained(PLACE)
messages = [{"role": "user", "content": "..."}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
output = model.generate(**inputs, max_new_tokens=256)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))""",
    "text": """\
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(PLACE)
model = AutoModelForSequenceClassification.from_pretrained(PLACE)
messages = [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]
inputs = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")
score = model(**inputs).logits[0, 0]
print(score.item())  # of the answer""",
    "token": """\
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(PLACE)
model = AutoModelForTokenClassification.from_pretrained(PLACE)
messages = [{"role": "user", "content": "..."}]
text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
tokens, ends = tokenizer.encode(text, add_special_tokens=False), []
for step in ["...", "..."]:
    for part in (step, SEPARATOR):
        tokens += tokenizer.encode(part, add_special_tokens=False)
    ends.append(len(tokens) - 1)
score = model(torch.tensor([tokens])).logits[0, ends, 0].sigmoid()
print(score.tolist())  # the probability that each step is right""",
}
"""Code by what the model scores: nothing, whole answers, or steps."""


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
    method = line(recipe.method["name"])
    kind = "" if "head" not in method.method.needs else "token" if method.learns == "steps" else "text"
    lines = [
        *_header(recipe, f"{kind}-classification" if kind else "text-generation"),
        f"# {name}",
        "",
        f"{_plain(recipe.model.path)} trained with posttrain by {_plain(recipe.method['name'])}: "
        f"{_plain(title)}. These are the weights after update {update}, in {dtype}.",
        "",
        *_usage(repository or ".", kind, recipe.batch.separator, gguf),
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
    # A published card names no folder of its author.
    config = re.sub(rf"(?m)^# {DIRECTORY}: .*\n+", "", contents.config)
    config = re.sub(r"(?m)^# /.*/([^/\n]+: BLAKE2b \w+)$", r"# \1", config)
    lines += _fenced(config.strip(), "toml")
    return "\n".join(lines).rstrip() + "\n"


def _header(recipe: Recipe, tag: str) -> list[str]:
    """Return the YAML header; JSON strings are YAML strings."""
    lines = ["---", "library_name: transformers", f"pipeline_tag: {tag}"]
    if HUB_ID.fullmatch(recipe.model.path) and not Path(recipe.model.path).exists():
        lines.append(f"base_model: {json.dumps(recipe.model.path.partition('@')[0])}")
    return [*lines, "tags:", "- posttrain", f"- {json.dumps(recipe.method['name'])}", "---", ""]


def _usage(place: str, kind: str, separator: str, gguf: str | None) -> list[str]:
    """Return how transformers loads and runs the model.

    kind: "text" for a model that scores answers, "token" for one that scores steps, "" for a policy.
    """
    code = USAGE[kind].replace("PLACE", repr(place)).replace("SEPARATOR", json.dumps(separator))
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
    for text in (*contents.config.splitlines(), *contents.code.splitlines()):
        if text.startswith("# data: "):
            yield "digest", text.removeprefix("# data: ")


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
