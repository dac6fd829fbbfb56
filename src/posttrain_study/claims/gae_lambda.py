"""GAE's λ by the length of an answer and the error of the critic, on chains of additions.

A question is T + 1 digits, T being 3 or 12, an answer their T running sums, of which only the last digit is
kept; an answer is rewarded if its last sum is right. The policy is a softmax over the next sum for each sum
so far and digit, and begins right in one answer of five at either T. The critic is a table by the steps that
are left and the error of the sum so far. It is learnt from zero, or known: the exact chance to end right, or
that chance with a fixed error of 0.3 (one deviation) in each state. 100 updates of 32 answers; the objective
is exact. Rates were chosen for each case on seeds from 100 on.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import one_hot, pad

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
from posttrain_study.claims.table_policy import TablePolicy, TableRollouts

LAMBDAS = (0.0, 0.5, 0.8, 0.95, 1.0)
SKILL = {3: 2.8, 12: 4.8}
"""What the logits of right sums have more than others at the start, by T."""
ROWS, UPDATES, EVERY, HELD_OUT, ERROR = 32, 100, 5, 300, 0.3
RATES: dict[tuple[str, int], tuple[tuple[float, float], ...]] = {
    ("learnt", 3): ((0.3, 0.03),) * len(LAMBDAS),
    ("learnt", 12): ((0.3, 0.03), (1.0, 0.03), (1.0, 0.1), (0.3, 0.03), (0.3, 0.03)),
    ("exact", 12): ((0.3, 0.0),) * len(LAMBDAS),
    ("wrong", 12): ((0.1, 0.0), (0.1, 0.0), (0.3, 0.0), (0.3, 0.0), (0.3, 0.0)),
}
"""Of Adam for the policy and for the critic, for each λ."""


class Chains:
    """Questions of T additions: digits [rows, T + 1], and the right sums after each, [rows, T]."""

    def __init__(self, rows: int, length: int, draw: torch.Generator) -> None:
        self.digits = torch.randint(10, (rows, length + 1), generator=draw)
        self.sums = self.digits.cumsum(1)[:, 1:] % 10

    def states(self, answers: torch.Tensor) -> torch.Tensor:
        """Return the state before each step, 10 · sum so far + digit, [rows, T]."""
        return 10 * torch.cat([self.digits[:, :1], answers[:, :-1]], 1) + self.digits[:, 1:]

    def errors(self, answers: torch.Tensor) -> torch.Tensor:
        """Return the state of the critic before each step: 10 · steps left + error of the sum so far."""
        error = pad((answers - self.sums)[:, :-1] % 10, (1, 0))
        return 10 * torch.arange(answers.shape[1]).flip(0) + error

    def sample(self, policy: TablePolicy, draw: torch.Generator) -> torch.Tensor:
        """Sample the sums of an answer to each question, [rows, T]."""
        before, answers = self.digits[:, 0], []
        for digit in self.digits[:, 1:].T:
            before = policy.sample(10 * before + digit, draw)
            answers.append(before)
        return torch.stack(answers, 1)

    def values(self, p: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the chance to end right by the sum so far, [rows, 10], from the last step to the first."""
        value = one_hot(self.sums[:, -1], 10).float()
        for digit in self.digits[:, 1:].T.flip(0):
            value = torch.einsum("sbt,bt->bs", p.view(10, 10, 10)[:, digit], value)
            yield value


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Return the objective by update for every critic, length and λ."""
    figures: Figures = {}
    for (critic, length), rates in RATES.items():
        for lam, pair in zip(LAMBDAS, rates, strict=True):
            name = key(critic, length, lam)
            report(f"gae_lambda, seed {seed}, {name}")
            figures[name] = train(critic, length, lam, pair, seed)
    return figures


def key(critic: str, length: int, lam: float) -> str:
    """Return the key of a case in the figures."""
    return f"{critic} {length} {lam:g}"


def train(
    critic: str,
    length: int,
    lam: float,
    rates: tuple[float, float],
    seed: int,
    *,
    name: str = "reinforce_critic",
    warmup: int = 0,
) -> list[float]:
    """Train, and return the chance that a held-out chain ends right, each EVERY updates.

    warmup: of the updates, those at the start in which the critic alone learns.
    """
    method = build(name, {"estimator": {"name": "gae", "lam": lam}}, horizon=length)
    draw = torch.Generator().manual_seed(seed + 1000)
    noise = torch.randn(100, 10, generator=torch.Generator().manual_seed(seed))
    right = one_hot((torch.arange(10)[:, None] + torch.arange(10)).flatten() % 10, 10)
    learnt = (10 * length, rates[1]) if critic == "learnt" else None
    policy = TablePolicy(noise + SKILL[length] * right, method, rates[0], critic=learnt)
    held_out = Chains(HELD_OUT, length, torch.Generator().manual_seed(seed + 2000))
    wrong = ERROR * torch.randn(10 * length, generator=torch.Generator().manual_seed(seed + 3000))
    objective = []
    for update in range(UPDATES + 1):
        p = policy.logits.detach().softmax(-1)
        if update % EVERY == 0:
            *_, start = held_out.values(p)
            objective.append(float(start.gather(1, held_out.digits[:, :1]).mean()))
        if update == UPDATES:
            break
        chains = Chains(ROWS, length, draw)
        answers = chains.sample(policy, draw)
        states, errors = chains.states(answers), chains.errors(answers)
        value = None
        if critic != "learnt":
            exact = torch.stack([*chains.values(p)][::-1], 1)
            value = exact.gather(2, states[..., None] // 10)[..., 0]
            value = value + wrong[errors] if critic == "wrong" else value
        reward = pad((answers == chains.sums).float()[:, -1:], (length - 1, 0))
        policy.logits.requires_grad_(update >= warmup)
        policy.learn(
            TableRollouts(
                states,
                answers,
                reward,
                group=torch.arange(ROWS),
                critic_state=errors if critic == "learnt" else None,
                value=value,
            )
        )
    return objective


# ---------------------------------------------------------------------- rules, table and picture


def score(figures: Figures, critic: str, length: int, lam: float) -> float:
    """Return the mean objective over the run, which rises with the speed of learning."""
    objective = figures[key(critic, length, lam)]
    return float(sum(objective) / len(objective))


def of_high(figures: Figures, critic: str, length: int) -> float:
    """Return the gain of λ = 0.95 over λ = 0.5."""
    return score(figures, critic, length, 0.95) - score(figures, critic, length, 0.5)


RULES = {
    "gae_lambda": VerdictRule(
        "mean chance to end right over the run, 12 steps, learnt critic, λ = 0.95 minus λ = 0.5",
        lambda figures: of_high(figures, "learnt", 12),
        0.02,
    ),
    "gae_length": VerdictRule(
        "gain of λ = 0.95 over λ = 0.5 with a learnt critic, 12 steps minus 3 steps",
        lambda figures: of_high(figures, "learnt", 12) - of_high(figures, "learnt", 3),
        0.02,
    ),
    "gae_critic_error": VerdictRule(
        "gain of λ = 0.95 over λ = 0.5 at 12 steps, learnt critic minus exact critic",
        lambda figures: of_high(figures, "learnt", 12) - of_high(figures, "exact", 12),
        0.02,
    ),
}


def table(results: Results) -> str:
    """Return the mean objective over the run for each critic and length, by λ."""
    rows = []
    for critic, length in RATES:
        scores = [[score(run, critic, length, lam) for run in results.runs] for lam in LAMBDAS]
        rows.append([critic, str(length), *(spread(values, ".1%") for values in scores)])
    return markdown(("critic", "steps", *(f"λ = {lam:g}" for lam in LAMBDAS)), rows)


def draw(results: Results, figure: Any) -> None:
    """Draw the mean objective by λ for each critic, a line for each length."""
    axes = figure.subplots()
    for n, (critic, length) in enumerate(RATES):
        runs = [[score(run, critic, length, lam) for lam in LAMBDAS] for run in results.runs]
        curve(axes, LAMBDAS, runs, f"{critic} critic, {length} steps", f"C{n}")
    axes.set(xlabel="λ", ylabel="chance to end right, mean over the run")
    axes.legend(frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(7.0, 4.2))
