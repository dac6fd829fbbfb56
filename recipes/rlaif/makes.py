"""What the stages of rlaif.toml write: prompts, revised answers, two answers to each prompt, preferences."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.data import Data, load_tasks, read_records
from posttrain.recipe.verifier import read_verifier
from posttrain.recipe.writers import NativeWriter
from posttrain.types import UserError
from posttrain.verifiers.judge.judge import Judge, Judging
from posttrain.verifiers.judge.preferences import write_preferences
from posttrain.verifiers.judge.revisions import Revising, write_revisions

LEAST = 10
"""Records without which a stage is not worth training."""


def prompts(directory: Path, path: str, count: int, held_out: int) -> None:
    """The first prompts of one turn in a file or data set; two thirds for SFT, the rest for RL."""
    tasks = load_tasks(Data(path=path, bad="skip"))
    asked = list(dict.fromkeys(t.messages[0]["content"] for t in tasks if len(t.messages) == 1))[:count]
    if len(asked) < held_out + 3:
        raise ValueError(f"{path} has {len(asked)} prompts of one turn, and {held_out + 3} are the least")
    cut = held_out + 2 * (len(asked) - held_out) // 3
    for name, part in (("held_out", asked[:held_out]), ("sft", asked[held_out:cut]), ("rl", asked[cut:])):
        _write(directory / f"{name}.jsonl", ({"prompt": prompt} for prompt in part))


def revised(directory: Path, judge: str, prompts: str, rounds: int = 1, model: str = "") -> None:
    """Answers of the judge's model, criticised and revised by the constitution; the last round of each."""
    found, every = _judge(judge, model), directory / "rounds.jsonl"
    assert found.constitution is not None
    how = Revising(rounds=rounds, max_tokens=found.max_tokens, temperature=found.temperature, seed=found.seed)
    _check(write_revisions(found.writer, found.constitution, _records(prompts), every, how), "revised")
    last = {record["prompt"]: record for record in _records(str(every))}
    answered = ({"prompt": p, "completion": record["revision"]} for p, record in last.items())
    _write(directory / "revised.jsonl", answered)


def answers(directory: Path, model: str, prompts: str, max_tokens: int = 64) -> None:
    """Two answers of the model to each prompt, drawn at temperature 1."""
    writer, asked = NativeWriter(path=model, rows=32), [r["prompt"] for r in _records(prompts)]
    talks = [[{"role": "user", "content": prompt}] for prompt in asked]
    both = [writer.write(talks, max_tokens=max_tokens, temperature=1.0, seed=seed) for seed in (0, 1)]
    lines = ({"prompt": p, "responses": [a.text, b.text]} for p, a, b in zip(asked, *both, strict=True))
    _write(directory / "answers.jsonl", (line for line in lines if all(t.strip() for t in line["responses"])))


def preferred(directory: Path, judge: str, answers: str, model: str = "") -> None:
    """Which of two answers the judge prefers, in both orders; a fifth of the pairs is held out."""
    found, whole = _judge(judge, model), directory / "preferred.jsonl"
    how = Judging(**{name: getattr(found, name) for name in Judging.__dataclass_fields__})
    counts = write_preferences(
        found.writer, found.rubric, _records(answers), whole, constitution=found.constitution, how=how
    )
    _check(counts, "better")
    pairs = _records(str(whole))
    cut = len(pairs) // 5
    _write(directory / "held_out.jsonl", pairs[:cut])
    _write(directory / "train.jsonl", pairs[cut:])


def _check(counts: Mapping[str, int], useful: str) -> None:
    """UserError if too little came of it to go on, with what came of the rest."""
    if counts[useful] < LEAST:
        rest = ", ".join(f"{count} {label}" for label, count in counts.items())
        raise UserError(
            "",
            f"the judge left {counts[useful]} of use, and {LEAST} are the least: {rest}",
            "take a better judge, verdict = 'logprobs', a larger verifier.judge.max_tokens, or more",
        )


def _judge(path: str, model: str) -> Judge:
    """The judge of a file in this folder, or of another one; with this model in place of its own, if given."""
    file = Path(__file__).parent / path
    found = read_verifier(str(file if file.is_file() else path))
    if not isinstance(found, Judge):
        raise UserError(path, "it names no judge alone", "give it [verifier.judge]")
    if model and isinstance(found.writer, NativeWriter):
        found = replace(found, writer=replace(found.writer, path=model))
    found.require()
    return found


def _records(path: str) -> list[dict[str, Any]]:
    return [record.fields for record in read_records(path)]


def _write(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
