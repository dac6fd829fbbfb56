"""Sampling at a temperature from 0.5 to 1.5, where the loss sees the same temperature.

RLOO learns gold. Logits are divided by the temperature when answers are sampled and in the loss, as the
learner does it, so the trained policy is the one that samples. It is judged at its own temperature, at 1, and
by its likeliest answer. The rate is that of the other experiments with RLOO and gold.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.methods.build import build
from posttrain_study.claims.experiment import (
    Experiment,
    Figures,
    Report,
    Results,
    VerdictRule,
    curve,
    markdown,
    spread,
)
from posttrain_study.claims.online import Routine, entropy_of, improve, log_probs, reference
from posttrain_study.claims.tiny import LONGEST, Table, gold_of, mean_of

TEMPERATURES = (0.5, 0.7, 1.0, 1.2, 1.5)
PLAN = Routine(updates=60, lr=1e-2)


class Divided(nn.Module):
    """Divide logits by a temperature."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits at the temperature."""
        return logits / self.temperature


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train at every temperature from the same reference."""
    start, gold, method, cases = reference(seed), gold_of(seed), build("rloo", {}, horizon=LONGEST), {}
    for temperature in TEMPERATURES:
        report(f"temperature, seed {seed}, {temperature:g}")
        path: list[float] = []
        policy = improve(
            nn.Sequential(start, Divided(temperature)), method, gold, PLAN, seed, note(path, gold)
        )
        assert isinstance(policy.network, nn.Sequential)
        plain = log_probs(policy.network[0])
        cases[f"{temperature:g}"] = {
            "path": path,
            "plain": mean_of(gold, plain),
            "greedy": float(gold.gather(1, plain.argmax(1)[:, None]).mean()),
            "entropy": entropy_of(log_probs(policy.network)),
        }
    return {"cases": cases}


def note(path: list[float], gold: Table) -> Any:
    """Return a function that appends the expected gold at the sampling temperature to the path."""
    return lambda update, logp: path.append(mean_of(gold, logp))


def final(figures: Figures, temperature: float) -> float:
    """Return the gold at the end, at the temperature that was sampled at."""
    return float(figures["cases"][f"{temperature:g}"]["path"][-1])


RULES = {
    "temperature": VerdictRule(
        "gold at the end, sampling and training at 0.7 minus at 1",
        lambda figures: final(figures, 0.7) - final(figures, 1.0),
        margin=0.05,
        equal=True,
    ),
}


def table(results: Results) -> str:
    """Return the table of all temperatures: means, and ranges over seeds."""
    head = (
        "temperature",
        "gold at the start",
        "at the end",
        "at 1",
        "of the likeliest answer",
        "entropy, nats",
    )
    rows = []
    for temperature in TEMPERATURES:
        runs = [run["cases"][f"{temperature:g}"] for run in results.runs]
        paths = [spread([run["path"][n] for run in runs]) for n in (0, -1)]
        rows.append(
            [
                f"{temperature:g}",
                *paths,
                *(spread([run[key] for run in runs]) for key in ("plain", "greedy", "entropy")),
            ]
        )
    return markdown(head, rows)


def draw(results: Results, figure: Any) -> None:
    """Draw gold by update at each sampling temperature, and gold by temperature as it is judged."""
    first, second = figure.subplots(1, 2)
    viridis = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151")
    for temperature, color in zip(TEMPERATURES, viridis, strict=True):
        paths = [run["cases"][f"{temperature:g}"]["path"] for run in results.runs]
        curve(first, range(PLAN.updates + 1), paths, f"{temperature:g}", color)
    first.set(xlabel="update", ylabel="expected gold at the sampling temperature")
    first.legend(frameon=False, title="temperature")
    for key, name, color in (("plain", "at 1", "#c44e52"), ("greedy", "likeliest answer", "#55a868")):
        heights = [[run["cases"][f"{t:g}"][key] for t in TEMPERATURES] for run in results.runs]
        curve(second, TEMPERATURES, heights, name, color)
    heights = [[final(run, t) for t in TEMPERATURES] for run in results.runs]
    curve(second, TEMPERATURES, heights, "at its own temperature", "#4c72b0")
    second.set(xlabel="temperature of sampling and training", ylabel="gold at the end")
    second.legend(frameon=False, loc="upper left")


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(10.0, 4.0))
