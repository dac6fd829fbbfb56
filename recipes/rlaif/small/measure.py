"""RLAIF in small against the truth: labels by rule, how right the judge was, and what policies do."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from world import CONSTITUTION, Asked, harmless_help, lines, read

from posttrain.recipe.writers import NativeWriter
from posttrain.types import Task


def labelled(directory: Path, answers: str, judged: str) -> None:
    """Pairs as somebody labels them who makes no mistake: by the judge's principles, as many as it left."""
    pairs = []
    for record in read(answers):
        (one, other), asked = record["responses"], Asked.read(record["prompt"])
        if (better := asked.better(_principle(record["prompt"]), one, other)) != 0.5:
            chosen, rejected = (one, other) if better else (other, one)
            pairs.append({"prompt": record["prompt"], "chosen": chosen, "rejected": rejected})
    pairs = pairs[: len(read(judged))]
    cut = len(pairs) // 5
    lines(directory / "held_out.jsonl", pairs[:cut])
    lines(directory / "train.jsonl", pairs[cut:])


def measured(directory: Path, prompts: str, judged: str, **policies: str) -> None:
    """Writes results.json: of the judge's pairs, and of each policy's answers to prompts at temperature 1."""
    found: dict[str, Any] = {"judge": judge(read(judged))}
    tasks = [
        Task(id=str(n), messages=({"role": "user", "content": record["prompt"]},))
        for n, record in enumerate(read(prompts))
    ]
    for name, path in policies.items():
        writer = NativeWriter(path=path, rows=64)
        said = writer.write([t.messages for t in tasks], max_tokens=32, temperature=1.0, seed=1)
        told = [harmless_help(task, each.text) for task, each in zip(tasks, said, strict=True)]
        found[name] = {"right": fmean(v.score or 0.0 for v in told)}
        found[name] |= {part: fmean(v.parts[part] for v in told) for part in told[0].parts}
        both = zip(tasks, said, strict=True)
        answers = ({"prompt": t.messages[0]["content"], "answer": each.text} for t, each in both)
        lines(directory / f"{name}.jsonl", answers)
    (directory / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


def judge(pairs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By principle, of the pairs that it left: how often it was right, told alike apart, took the shorter."""
    found = {}
    for principle in CONSTITUTION.principles:
        own = [pair for pair in pairs if _principle(pair["prompt"]) == principle.name]
        truth = [Asked.read(p["prompt"]).better(principle.name, p["chosen"], p["rejected"]) for p in own]
        apart = [t for t in truth if t != 0.5]
        lengths = [(len(p["chosen"].split()), len(p["rejected"].split())) for p in own]
        found[principle.name] = {
            "pairs": len(own),
            "right": fmean(apart),
            "alike": 1 - len(apart) / len(own),
            "shorter": fmean(chosen < rejected for chosen, rejected in lengths),
        }
    return found


def _principle(prompt: str) -> str:
    """The name of that by which the judge was asked about a prompt."""
    return CONSTITUTION.drawn(1, seed=0, key=prompt)[0].name
