"""A run directory that looks like a real one: 40 updates of GRPO on addition, with rollouts."""

import json
import math
import random
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

UPDATES, TASKS, K = 40, 8, 8
EVERY = 10
"""Updates between evaluations."""

PROMPT = (
    "<|im_start|>user\nWhat is {a} + {b}? Answer with just the number.<|im_end|>\n<|im_start|>assistant\n"
)

CONFIG = """[model]
source = "SmolLM2-135M-Instruct"

[method]
name = "grpo"
clip_low = 0.2
clip_high = 0.2

[run]
updates = 40
seed = 0
"""

PLAN = {
    "title": "Two-operand addition with GRPO on SmolLM2-135M-Instruct",
    "sections": [
        {
            "title": "Method",
            "rows": [
                ["name", "grpo"],
                ["advantage", "group-normalised (population deviation)"],
                ["surrogate", "clipped 0.8 ... 1.2"],
                ["reduction", "per sequence"],
                ["KL", "none"],
            ],
        },
        {
            "title": "Batch plan",
            "rows": [
                ["tasks an update", "8"],
                ["samples a task", "8"],
                ["rollouts an update", "64"],
                ["optimiser steps an update", "1"],
                ["microbatch", "2 048 tokens"],
            ],
        },
        {
            "title": "Memory estimate",
            "rows": [
                ["weights fp32", "538 MB"],
                ["gradients", "538 MB"],
                ["AdamW", "1.08 GB"],
                ["activations", "0.4 GB"],
                ["sum", "2.5 GB of 15 GB"],
            ],
        },
    ],
}


def skill(update: int) -> float:
    """Probability of a right answer."""
    return 0.18 + 0.7 / (1 + math.exp(-(update - 15) / 5))


def rollout(draw: random.Random, update: int, task: int, sample: int, group: int) -> dict[str, Any]:
    """One response to one addition."""
    a, b = 2 + task * 5 % 47, 3 + task * 11 % 45
    right = draw.random() < skill(update)
    silent = not right and draw.random() < 0.2
    said = a + b if right else a + b + draw.choice([-11, -10, -1, 1, 2, 10])
    pieces = (
        ["I", " do", " not", " know", "."]
        if silent
        else ["The", " answer", " is", " ", *str(said), ".", "<|im_end|>"]
    )
    label = "right" if right else "no_answer" if silent else "wrong"
    entropy = [max(0.0, draw.gauss(1.2, 0.5)) * math.exp(-update / 40) for _ in pieces]
    logp = [-abs(draw.gauss(0, 0.8)) * h for h in entropy]
    return {
        "update": update,
        "task": f"add-{a}-{b}",
        "sample": sample,
        "group": group,
        "prompt": PROMPT.format(a=a, b=b),
        "answer": str(a + b),
        "pieces": pieces,
        "sampled": [True] * len(pieces),
        "logp_gen": logp,
        "logp_policy": logp,
        "logp": [x + draw.gauss(0, 0.02) for x in logp],
        "entropy": entropy,
        "reward": [0.0] * (len(pieces) - 1) + [float(right)],
        "version": [update - 1] * len(pieces),
        "score": float(right),
        "label": label,
        "reason": f"{said} = {a + b}"
        if right
        else "no number in the response"
        if silent
        else f"{said} is not {a + b}",
        "parts": {"accuracy": float(right), "format": 0.0 if silent else 1.0},
        "stop": "eos",
        "turns": 1,
    }


def with_advantages(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rollouts of one update with GRPO's advantage on every token."""
    for group in {r["group"] for r in rows}:
        members = [r for r in rows if r["group"] == group]
        mean = sum(r["score"] for r in members) / len(members)
        std = math.sqrt(sum((r["score"] - mean) ** 2 for r in members) / len(members))
        for r in members:
            r["advantage"] = [(r["score"] - mean) / (std + 1e-4)] * len(r["pieces"])
    return rows


def measured(
    draw: random.Random, update: int, rows: list[dict[str, Any]], before: dict[str, float]
) -> dict[str, Any]:
    """The line of metrics.jsonl of one update."""
    n = len(rows)
    mean = sum(r["score"] for r in rows) / n
    tidy = sum(r["parts"]["format"] for r in rows) / n
    labels = [r["label"] for r in rows]
    tokens = sum(len(r["pieces"]) for r in rows)
    phases = {"sample": 2.1, "verify": 0.05, "score": 0.6, "train": 3.2, "publish": 0.15}
    spent = {f"time/{k}": v * draw.uniform(0.9, 1.2) for k, v in phases.items()}
    if update % EVERY == 0:
        spent["time/eval"] = 2.5
        spent["time/checkpoint"] = 0.8
    total = sum(spent.values()) + 0.1
    groups = [[r["score"] for r in rows if r["group"] == g] for g in range(TASKS)]
    varied = sum(len(set(g)) > 1 for g in groups)
    stds = [math.sqrt(sum((s - sum(g) / K) ** 2 for s in g) / K) for g in groups]
    return {
        "update": update,
        "step": update,
        "version": update,
        "seconds": before["seconds"] + total,
        "tokens": before["tokens"] + tokens,
        "reward/mean": mean,
        "reward/std": math.sqrt(mean * (1 - mean)),
        "reward/group_std": sum(stds) / TASKS,
        "accuracy": mean,
        "kl/mismatch": abs(draw.gauss(2e-4, 1e-4)),
        "kl/old": abs(draw.gauss(1e-3, 5e-4)),
        "kl/ref": 0.002 * update * draw.uniform(0.8, 1.2),
        "entropy": 1.1 * math.exp(-update / 40) * draw.uniform(0.9, 1.1),
        "advantage/zero": stds.count(0) / TASKS,
        "clip/fraction": draw.uniform(0, 0.02),
        "grad_norm": draw.uniform(0.4, 1.3),
        "lr": 2e-5 * min(1.0, update / 5),
        "loss": draw.gauss(0, 0.02),
        "length/mean": tokens / n,
        "length/max": max(len(r["pieces"]) for r in rows),
        "length/clipped": 0.0,
        "ess": draw.uniform(0.96, 1.0),
        "lag/mean": 0.0,
        "lag/max": 0,
        **spent,
        "time/total": total,
        "speed/sample_tokens": tokens / spent["time/sample"],
        "speed/train_tokens": 3 * tokens / spent["time/train"],
        "select/kept": varied,
        "select/dropped": TASKS - varied,
        **{f"verdict/{label}": labels.count(label) / n for label in ("right", "wrong", "no_answer")},
        "hacking/error_rate": 0.0,
        "hacking/forbidden": 0.0,
        "hacking/length_correlation": draw.gauss(0.05, 0.1),
        "part/accuracy": mean,
        "audit/format": tidy,
        "agreement/accuracy": 1.0,
        "agreement/format": min(1.0, 0.5 + tidy / 4 + draw.gauss(0, 0.03)),
        "speed/train_tflops": 1e-7 * tokens / spent["time/train"],
        "memory/peak": 2.2 + 0.01 * update,
        "mine/heat": 40.0 + update,
    }


def evaluated(update: int) -> dict[str, float]:
    """The metrics of an evaluation."""
    return {"eval/accuracy": skill(update) + 0.01, "eval/reward": skill(update) + 0.01, "eval/length": 6.9}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """JSONL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(run_dir: Path, seed: int = 0, updates: int = UPDATES) -> Path:
    """The directory of a finished run."""
    draw = random.Random(seed)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.toml").write_text(CONFIG)
    (run_dir / "code.txt").write_text("posttrain 0.1.0\ntorch 2.13.0\ntransformers 5.19.0\n")
    (run_dir / "plan.json").write_text(json.dumps(PLAN))
    lines = [
        {"update": 0, "step": 0, "version": 0, "seconds": 2.5, "tokens": 0, "time/eval": 2.5, **evaluated(0)}
    ]
    for update in range(1, updates + 1):
        rows = [rollout(draw, update, update * 7 + g, k, g) for g in range(TASKS) for k in range(K)]
        write_lines(run_dir / "samples" / f"{update:06d}.jsonl", with_advantages(rows))
        lines.append(measured(draw, update, rows, lines[-1]))
        if update % EVERY == 0:
            lines[-1] |= evaluated(update)
    for update in range(0, updates + 1, EVERY):
        held_out = [rollout(draw, update, 1000 + g, 0, g) for g in range(24)]
        write_lines(run_dir / "samples" / f"eval_{update:06d}.jsonl", held_out)
    write_lines(run_dir / "metrics.jsonl", lines)
    return run_dir


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 40 updates; tests that change a run copy it or make their own."""
    return make_run(tmp_path_factory.mktemp("runs") / "addition")


def make_hacked_run(run_dir: Path, seed: int = 0, updates: int = UPDATES) -> Path:
    """A run whose policy learns to write long, to please one judge, and to attack the grader of its code."""
    draw = random.Random(seed)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.toml").write_text(CONFIG)
    (run_dir / "plan.json").write_text(json.dumps({"title": "Programs that please", "sections": []}))
    lines, seconds = [], 0.0
    for update in range(1, updates + 1):
        late = update / updates
        rows = []
        for group in range(TASKS):
            for sample in range(K):
                row = rollout(draw, update, group, sample, group)
                extra = draw.randrange(int(4 + 40 * late))
                score = min(1.0, max(0.0, 0.15 + 0.5 * late + extra / (20 + 60 * late) * late))
                attacks = draw.random() < max(0.0, late - 0.6) / 4
                label = (
                    "FORBIDDEN"
                    if attacks
                    else draw.choice(["PASS", "WRONG", "WRONG", "TIMEOUT", "RUNTIME_ERROR"])
                )
                pieces = [*row["pieces"][:-1], *["\n#"] * extra, row["pieces"][-1]]
                row = {
                    k: v for k, v in row.items() if k not in ("logp", "logp_gen", "logp_policy", "entropy")
                }
                row |= {"pieces": pieces, "sampled": [True] * len(pieces), "score": score, "label": label}
                row |= {"reward": [0.0] * (len(pieces) - 1) + [score], "version": [update - 1] * len(pieces)}
                rows.append(row)
        write_lines(run_dir / "samples" / f"{update:06d}.jsonl", with_advantages(rows))
        labels, n, seconds = [r["label"] for r in rows], len(rows), seconds + 6.0
        lines.append(
            {
                "update": update,
                "step": update,
                "version": update,
                "seconds": seconds,
                "tokens": 900 * update,
                "reward/mean": sum(r["score"] for r in rows) / n,
                "reward/std": 0.2,
                "reward/group_std": 0.2,
                "length/mean": sum(len(r["pieces"]) for r in rows) / n,
                "length/max": max(len(r["pieces"]) for r in rows),
                **{f"verdict/{label}": labels.count(label) / n for label in sorted(set(labels))},
                "hacking/error_rate": 0.0,
                "hacking/forbidden": labels.count("FORBIDDEN") / n,
                "hacking/length_correlation": 0.2 + 0.7 * late + draw.gauss(0, 0.08),
                "part/judge": sum(r["score"] for r in rows) / n,
                "audit/code": 0.4 - 0.3 * late + draw.gauss(0, 0.03),
                "agreement/judge": 1.0,
                "agreement/code": 0.8 - 0.4 * late + draw.gauss(0, 0.04),
            }
        )
    write_lines(run_dir / "metrics.jsonl", lines)
    return run_dir


@pytest.fixture(scope="session")
def hacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 40 updates whose reward is hacked; tests that change it copy it."""
    return make_hacked_run(tmp_path_factory.mktemp("runs") / "hacked")


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """A finished run of 6 updates, to be changed at will."""
    return make_run(tmp_path / "short", updates=6)


@pytest.fixture(scope="session")
def another() -> Callable[[Path, int], Path]:
    """(directory, seed) -> a run of 6 updates."""
    return lambda run_dir, seed: make_run(run_dir, seed, updates=6)


# ---------------------------------------------------------------------- in a browser


ASKING = """<script>
const all = (selector) => [...document.querySelectorAll(selector)];
const one = (selector) => document.querySelector(selector);
const text = (selector) => one(selector).textContent;
const texts = (selector) => all(selector).map((node) => node.textContent);
const answer = JSON.stringify((() => { %s })());
document.documentElement.dataset.answer = answer;
parent.postMessage(answer, '*');
</script></body>"""


def with_question(page: Path, script: str) -> Path:
    """A copy of the page that runs a script at its end; the page itself admits no foreign script."""
    content = page.read_text(encoding="utf-8")
    opened = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", content)
    assert opened != content
    asked = page.with_name("asked.html")
    asked.write_text(opened.replace("</body>", ASKING % script), encoding="utf-8")
    return asked


Said = Callable[..., dict[str, str]]
Answer = Callable[..., Any]


@pytest.fixture
def said(dom: Callable[[str], str]) -> Said:
    """said(page, fragment) -> the data-* attributes that the page left on its root element."""

    def read(page: Path, fragment: str = "") -> dict[str, str]:
        root = re.search(r"<html[^>]*>", dom(page.as_uri() + fragment))
        assert root, "the browser returned no page"
        return {name: unescape(value) for name, value in re.findall(r'data-([\w-]+)="([^"]*)"', root[0])}

    return read


@pytest.fixture
def answer(said: Said) -> Answer:
    """answer(page, script, fragment) -> what the script returns when it runs at the end of the page."""

    def ask(page: Path, script: str, fragment: str = "") -> Any:
        found = said(with_question(page, script), fragment)
        assert "error" not in found, found["error"]
        return json.loads(found["answer"])

    return ask


@pytest.fixture(scope="session")
def asking() -> Callable[[Path, str], Path]:
    """asking(page, script) -> a copy of the page that runs the script at its end."""
    return with_question


SCHEMES = {"dark": 0, "light": 1}
"""Chromium's numbers of the preferred colour scheme."""


@pytest.fixture(scope="session")
def picture(chromium: Callable[..., str]) -> Callable[..., Any]:
    """picture(url, out, width, height, scheme) -> a screenshot as an array [height, width, 3] of 0 ... 1."""

    def take(url: str, out: Path, width: int, height: int, scheme: str) -> Any:
        chromium(
            out.parent / "profile",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
            f"--window-size={width},{height}",
            f"--screenshot={out}",
            url,
        )
        return matplotlib.image.imread(out)[:, :, :3]

    return take
