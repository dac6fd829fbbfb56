"""Are right steps blamed for wrong answers? The expected step of an outcome reward, by state.

Chains of additions as in gae_lambda.py, of 3 and 12 steps; an answer is rewarded if its last sum is right. In
a state with the sum so far s, a right step adds the next digit to s, whether s itself is right or not. With a
baseline b for the answer, the policy gradient moves the logit of step a by p_a (Q_a - V): by b p_a (Q_a - V)
through answers that end wrong, and by (1 - b) p_a (Q_a - V) through those that end right. Q and V, the
chances to end right, and how often each state is visited are exact.
"""

from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import one_hot

from posttrain_study.claims.experiment import (
    Experiment,
    Figures,
    Report,
    Results,
    VerdictRule,
    markdown,
    spread,
)
from posttrain_study.claims.gae_lambda import SKILL, Chains

QUESTIONS = 400
PLACES = ("before an error", "after an error")


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Return the shares of right steps that are blamed, by length, and where."""
    noise = torch.randn(100, 10, generator=torch.Generator().manual_seed(seed))
    right = one_hot((torch.arange(10)[:, None] + torch.arange(10)).flatten() % 10, 10)
    figures: Figures = {}
    for length, skill in SKILL.items():
        report(f"blame_of_right_tokens, seed {seed}, {length} steps")
        chains = Chains(QUESTIONS, length, torch.Generator().manual_seed(seed + 2000))
        figures[str(length)] = shares((noise + skill * right).softmax(-1).double(), chains)
    return figures


def shares(p: torch.Tensor, chains: Chains) -> dict[str, float]:
    """Return the share of right steps that the expected update lowers, in all and by place.

    A step counts as often as the policy, [10 · sum so far + digit, next sum], makes it.
    """
    end = one_hot(chains.sums[:, -1], 10).double()
    values = [*[value.double() for value in chains.values(p.float())][::-1], end]
    table, sums = p.view(10, 10, 10), torch.arange(10)
    visits, path = one_hot(chains.digits[:, 0], 10).double(), chains.digits[:, :1]
    counts, lowered = torch.zeros(2).double(), torch.zeros(2).double()
    for step in range(chains.sums.shape[1]):
        chances = table[:, chains.digits[:, step + 1]].transpose(0, 1)  # [rows, sum so far, next sum]
        right = (sums + chains.digits[:, step + 1, None]) % 10
        often = visits * chances.gather(2, right[..., None])[..., 0]
        gain = values[step + 1].gather(1, right) - values[step]
        for n, where in enumerate((sums == path, sums != path)):
            counts[n] += (often * where).sum()
            lowered[n] += (often * (where & (gain < -1e-6))).sum()
        visits = torch.einsum("bs,bst->bt", visits, chances)
        path = chains.sums[:, step : step + 1]
    by_place = dict(zip(PLACES, (lowered / counts).tolist(), strict=True))
    return {
        "all": float(lowered.sum() / counts.sum()),
        **by_place,
        "made after": float(counts[1] / counts.sum()),
    }


RULES = {
    "blame_of_right_tokens": VerdictRule(
        "share of right steps whose expected update is negative, over all answers, 12 steps",
        lambda figures: float(figures["12"]["all"]),
        0.05,
    ),
}


def table(results: Results) -> str:
    """Return the shares for both lengths."""
    rows = []
    for length in SKILL:
        runs = [run[str(length)] for run in results.runs]
        rows.append([f"{length}", *(spread([run[k] for run in runs], ".1%") for k in ("all", *PLACES))])
        rows[-1].append(spread([run["made after"] for run in runs], ".0%"))
    head = ("steps", "right steps that are lowered", *PLACES, "right steps made after an error")
    return markdown(head, rows)


def draw(results: Results, figure: Any) -> None:
    """Draw the share of lowered right steps by place, a bar for each length."""
    axes = figure.subplots()
    for n, length in enumerate(SKILL):
        for x, key in enumerate(("all", *PLACES)):
            values = [run[str(length)][key] for run in results.runs]
            place = x + 0.36 * (n - 0.5)
            label = f"{length} steps" if not x else None
            axes.bar(place, sum(values) / len(values), width=0.34, color=f"C{n}", label=label)
            axes.plot([place] * 2, [min(values), max(values)], color="black", lw=1)
    axes.set_xticks(range(3), ("all right steps", *PLACES))
    axes.set(title="right steps that the expected update lowers", ylim=(0, 1))
    axes.legend(frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(7.0, 4.0))
