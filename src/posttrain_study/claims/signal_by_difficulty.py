"""How much a group of answers teaches, by the chance p that an answer is right.

The exact part: the expected step of the log-odds of a right answer for each answer that was sampled, under
GRPO, RLOO, MaxRL and pass@k, summed over all numbers of right answers in a group.

The trained part: prompts differ in difficulty d and share one skill θ, p = σ(θ - d), so that a step of the
log-odds on one prompt is a step on all. 60 updates of 16 groups of 8, on prompts of one difficulty, on all
difficulties alike, or on those that are nearest to a wanted p at the time; θ begins at 0.
"""

from collections.abc import Callable
from functools import partial
from math import comb, log
from pathlib import Path
from typing import Any

import torch

from posttrain.math import advantages, pass_at_k
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

CREDITS: dict[str, Callable[..., torch.Tensor]] = {
    "GRPO": advantages.normalised,
    "RLOO": advantages.leave_one_out,
    "MaxRL": advantages.over_mean,
    "pass@4": partial(pass_at_k.pass_at_k, k=4),
}
SIZE = 8
BELOW = (1e-4, 1e-3, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45)
CHANCES = (*BELOW, 0.5, *(round(1 - p, 6) for p in reversed(BELOW)))
HARD, MIDDLE = 0.02, 0.5
GROUPS, UPDATES, RATE = 16, 60, 0.3
GRID = torch.linspace(-6, 6, 49)
"""Difficulties that there are; the test is the mean of p over them."""
STARTS = (0.005, 0.02, 0.1, 0.5, 0.9, 0.98)
ADAPTIVE = (0.1, 0.3, 0.5, 0.7)


def gain(credit: Callable[..., torch.Tensor], p: float, size: int = SIZE) -> float:
    """Return E[1/K Σ A_i ∂log π(y_i)/∂θ], θ the log-odds: 1 - p for a right answer, -p for a wrong one.

    >>> round(gain(advantages.leave_one_out, 0.3), 6)  # the gradient of p, p (1 - p)
    0.21
    """
    group, total = torch.zeros(size, dtype=torch.long), 0.0
    for right in range(size + 1):
        reward = (torch.arange(size) < right).double()
        step = float((credit(reward, group) * (reward - p)).mean())
        total += comb(size, right) * p**right * (1 - p) ** (size - right) * step
    return total


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Return exact gains by chance, and the curves of the trained skill and its test."""
    report(f"signal_by_difficulty, seed {seed}, exact")
    exact = {name: [gain(credit, p) for p in CHANCES] for name, credit in CREDITS.items()}
    figures: Figures = {"exact": exact, "groups": [1 - p**SIZE - (1 - p) ** SIZE for p in CHANCES]}
    choices: dict[str, Callable[[float], torch.Tensor]] = {
        "all alike": lambda skill: GRID,
        **{f"{p:g} at the start": partial(fixed, p) for p in STARTS},
        **{f"{p:g} all along": partial(adapted, p) for p in ADAPTIVE},
    }
    figures["trained"] = {}
    for name, choice in choices.items():
        report(f"signal_by_difficulty, seed {seed}, {name}")
        figures["trained"][name] = train(choice, seed)
    return figures


def fixed(p: float, _: float) -> torch.Tensor:
    """Return the difficulty at which an answer of the start is right with this chance."""
    return torch.tensor([-log(p / (1 - p))])


def adapted(p: float, skill: float) -> torch.Tensor:
    """Return the difficulty whose chance is nearest to p at this skill."""
    return GRID[((skill - GRID).sigmoid() - p).abs().argmin()][None]


def train(choice: Callable[[float], torch.Tensor], seed: int) -> dict[str, list[float]]:
    """Train the skill by GRPO on difficulties of this choice; return the skill and the test by update."""
    draw, skill = torch.Generator().manual_seed(seed), torch.zeros(())
    group = torch.arange(GROUPS).repeat_interleave(SIZE)
    curves: dict[str, list[float]] = {"skill": [], "test": []}
    for _ in range(UPDATES + 1):
        curves["skill"].append(float(skill))
        curves["test"].append(float((skill - GRID).sigmoid().mean()))
        offered = choice(float(skill))
        difficulty = offered[torch.randint(len(offered), (GROUPS,), generator=draw)].repeat_interleave(SIZE)
        p = (skill - difficulty).sigmoid()
        reward = (torch.rand(len(p), generator=draw) < p).float()
        skill = skill + RATE * (advantages.normalised(reward, group) * (reward - p)).mean()
    return curves


def at(figures: Figures, name: str, p: float) -> float:
    """Return the exact gain of an estimator at a chance."""
    return float(figures["exact"][name][CHANCES.index(p)])


def last(figures: Figures, name: str) -> float:
    """Return the test after the last update."""
    return float(figures["trained"][name]["test"][-1])


RULES = {
    "signal_by_difficulty": VerdictRule(
        "expected step of the log-odds for each sampled answer under GRPO, p = 0.02 minus p = 0.5",
        lambda figures: at(figures, "GRPO", HARD) - at(figures, "GRPO", MIDDLE),
        0.01,
        exact=True,
    ),
    "signal_reachable": VerdictRule(
        "right answers in the test after 60 updates, p kept at 0.5 minus all difficulties alike",
        lambda figures: last(figures, "0.5 all along") - last(figures, "all alike"),
        0.02,
    ),
}


def table(results: Results) -> str:
    """Return the exact gains at some chances with each estimator's peak, and the trained tests."""
    run, columns = results.runs[0], (1e-3, 0.02, 0.1, 0.3, 0.5, 0.9, 0.98)
    rows = []
    for name in CREDITS:
        gains = run["exact"][name]
        best = max(range(len(gains)), key=gains.__getitem__)
        rows.append([name, *(f"{at(run, name, p):.3f}" for p in columns), f"{CHANCES[best]:g}"])
    rows.append(
        ["groups with right and wrong", *(f"{run['groups'][CHANCES.index(p)]:.0%}" for p in columns), "0.5"]
    )
    exact = markdown(("step of the log-odds", *(f"p = {p:g}" for p in columns), "largest at p ="), rows)
    trained = []
    for name in run["trained"]:
        skills = [one["trained"][name]["skill"][-1] for one in results.runs]
        tests = [last(one, name) for one in results.runs]
        trained.append([name, spread(skills), spread(tests, ".1%")])
    return f"{exact}\n\n{markdown(('prompts of p', 'skill at the end', 'right in the test'), trained)}"


def draw(results: Results, figure: Any) -> None:
    """Draw the gain by chance of each estimator, over its largest, and the skill by update."""
    exact, trained = figure.subplots(1, 2)
    run = results.runs[0]
    for name in CREDITS:
        gains = run["exact"][name]
        exact.plot(CHANCES, [x / max(gains) for x in gains], label=name, lw=1.8)
    exact.set(xscale="logit", xlabel="p, chance of a right answer")
    exact.set_title("step of the log-odds, over its largest")
    exact.set_xticks(ticks := [1e-4, 1e-3, 0.02, 0.1, 0.5, 0.9, 0.98], [f"{p:g}" for p in ticks])
    exact.minorticks_off()
    exact.legend(frameon=False)
    names = ("all alike", "0.005 at the start", "0.1 at the start", "0.5 at the start", "0.98 at the start")
    for n, name in enumerate((*names, "0.5 all along")):
        runs = [one["trained"][name]["skill"] for one in results.runs]
        curve(trained, range(UPDATES + 1), runs, name, f"C{n}")
    trained.set(xlabel="updates of 128 answers", title="skill θ trained on prompts of p")
    trained.legend(frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES)
