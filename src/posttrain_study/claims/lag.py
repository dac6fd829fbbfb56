"""Answers of older policies: what five methods learn from them, by the number of updates that they are old.

The policy is that of online.py: expected gold is exact at every update. An update is trained on answers of
the policy `bound` updates before. Samplers make answers for three updates while one is trained: the lag grows
by two in three updates until it reaches the bound, and without a bound to the end.

    naive          GRPO, whose clipped ratio is π/π_gen, with the policy that sampled the token
    truncated IS   GRPO, clipped from π_old, the policy at the start of the update; π_old/π_gen, at most 2,
                   weighs a token
    masked         the same, and a token whose weight is outside 0.5 to 2 counts nothing
    decoupled PPO  PPO with a critic and weights π_old/π_gen of at most 5 (arXiv:2505.24298)
    V-trace        IMPALA's actor-critic, one step an update; the others make four

Each method has a rate of its own at every bound, chosen on seeds that are not reported. The start of a seed
has the same bits on every machine: it is trained in float64 and rounded.
"""

import copy
import statistics
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from posttrain.methods.build import build
from posttrain.methods.policy_gradient import PolicyGradient
from posttrain.models.fingerprint import digest
from posttrain.types import Batch, Method, Outputs, PerToken
from posttrain_study.claims.digit_sums import on_grid
from posttrain_study.claims.experiment import (
    Experiment,
    Figures,
    Report,
    Results,
    VerdictRule,
    markdown,
    spread,
)
from posttrain_study.claims.online import (
    FEATURES,
    PrefixPolicy,
    Routine,
    of_answers,
    prepared,
    reference,
    sample,
    states,
)
from posttrain_study.claims.tiny import LONGEST, QUESTIONS, gold_of, mean_of

UPDATES, LATE, AHEAD = 60, 10, 3
"""LATE: updates at the end, whose mean a run is judged by. AHEAD: updates sampled while one is trained."""
UNBOUNDED = UPDATES
SHARE = 0.8
"""Of the gain of GRPO without lag: the level to which updates are counted."""
BOUNDS = (0, 1, 2, 4, 8, 16, UNBOUNDED)


@dataclass(frozen=True)
class Arm:
    """A method, its options, and its rate at each bound."""

    method: str
    options: dict[str, Any]
    rates: dict[int, float]
    minibatches: int = 4


NAIVE, TRUNCATED, MASKED, DECOUPLED, VTRACE = "naive", "truncated IS", "masked", "decoupled PPO", "V-trace"
COMMON = dict.fromkeys(BOUNDS, 1e-2)
ARMS = {
    NAIVE: Arm("grpo", {}, {**COMMON, 16: 3e-2, UNBOUNDED: 3e-2}),
    TRUNCATED: Arm("grpo", {"correction": "token_truncated"}, COMMON),
    MASKED: Arm("grpo", {"correction": "token_rejected"}, COMMON),
    DECOUPLED: Arm("decoupled_ppo", {}, {**COMMON, 0: 3e-2, 8: 3e-3}),
    VTRACE: Arm("impala", {}, {**COMMON, 0: 3e-2, 4: 3e-3}, minibatches=1),
}
"""Rates are the best of steps of three from 1e-3 to 1e-1, by the gain in gold on seeds 100 and 101."""


class Naive(PolicyGradient):
    """A policy gradient whose ratio is over the policy that sampled each token, however old."""

    def _old(self, out: Outputs, batch: Batch) -> PerToken:
        return batch.logp_gen


def version(update: int, bound: int) -> int:
    """Return how many updates had been made by the policy that sampled the answers of this update.

    >>> [update - version(update, 4) for update in range(9)]
    [0, 1, 2, 2, 3, 4, 4, 4, 4]
    """
    return max(update // AHEAD, update - bound)


def method_of(name: str) -> Method:
    """Return the method of an arm."""
    method = build(ARMS[name].method, ARMS[name].options, horizon=LONGEST)
    if name != NAIVE:
        return method
    assert isinstance(method, PolicyGradient)
    return Naive(**{f.name: getattr(method, f.name) for f in fields(method)})


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train every method at every bound from the same start."""
    figures: Figures = {"start": digest(sorted(start(seed).state_dict().items()))}
    for name, arm in ARMS.items():
        for bound in BOUNDS:
            report(f"lag, seed {seed}, {name}, {bound}")
            figures[key(name, bound)] = train(name, bound, arm.rates[bound], seed)
    return figures


def start(seed: int) -> nn.Module:
    """Return the network that every run of a seed begins from."""
    network = copy.deepcopy(reference(seed, torch.float64))
    network.load_state_dict({name: on_grid(weight) for name, weight in network.state_dict().items()})
    return network.float()  # exact: the weights are multiples of 2^-10 below 2^13


def key(name: str, bound: int) -> str:
    """Return the key of a case in the figures."""
    return f"{name}, {bound if bound < UNBOUNDED else 'unbounded'}"


def train(name: str, bound: int, lr: float, seed: int) -> dict[str, Any]:
    """Return expected gold before each update and after the last, and the share of answers that count."""
    gold, chance = gold_of(seed), torch.Generator().manual_seed(5000 + seed)
    plan = Routine(UPDATES, lr=lr, minibatches=ARMS[name].minibatches)
    torch.manual_seed(seed)  # of the critic
    policy = PrefixPolicy(start(seed), method_of(name), lr)
    tables, path, shares = list[torch.Tensor](), list[float](), list[float]()
    for update in range(UPDATES + 1):
        with torch.no_grad():
            tables.append(policy.network(FEATURES).double().log_softmax(-1))
        path.append(mean_of(gold, of_answers(tables[-1])))
        if update < UPDATES:
            table = tables[version(update, bound)]
            rows = drawn_by(table, sample(of_answers(table), gold, plan, chance))
            batch = prepared(policy, policy, rows, plan)
            if update >= UPDATES - LATE:
                shares.append(effective_share(policy, batch))
            policy.epoch(batch, -(-QUESTIONS // plan.minibatches), chance)
    return {"gold": path, "ess": statistics.fmean(shares)}


def drawn_by(table: torch.Tensor, batch: Batch) -> Batch:
    """Return the batch with the log-probabilities that its tokens had where they were sampled."""
    logp = table[states(batch)].gather(-1, batch.tokens[:, 2:, None])[..., 0]
    logp = pad(logp, (2, 0)).float() * batch.mask
    return replace(batch, logp_gen=logp, logp_policy=logp)


@torch.no_grad()
def effective_share(policy: PrefixPolicy, batch: Batch) -> float:
    """Return (Σ w)² / (n Σ w²) over answers, w being π/π_gen of a whole answer."""
    gap = (policy.outputs(batch).logp - batch.logp_gen) * batch.mask
    weight = gap.sum(1).double().exp()
    return float(weight.sum() ** 2 / weight.square().sum() / len(weight))


# ---------------------------------------------------------------------- what the claims say


def gain(figures: Figures, name: str, bound: int) -> float:
    """Return the expected gold late in a run, less that of the start."""
    path = figures[key(name, bound)]["gold"]
    return statistics.fmean(path[-LATE:]) - float(path[0])


def lost(figures: Figures, name: str, bound: int) -> float:
    """Return the share of what a method gains without lag that it does not gain with this bound."""
    return 1 - gain(figures, name, bound) / gain(figures, name, 0)


def updates_to(figures: Figures, name: str, bound: int) -> int:
    """Return the updates until gold has risen by SHARE of what GRPO gains without lag; UPDATES at most."""
    path = figures[key(name, bound)]["gold"]
    level = path[0] + SHARE * gain(figures, NAIVE, 0)
    return next((n for n, gold in enumerate(path) if gold >= level), UPDATES)


RULES = {
    "lag_harms": VerdictRule(
        "share of the gain in gold that naive clipping loses at a lag of 4",
        lambda figures: lost(figures, NAIVE, 4),
        0.05,
    ),
    "lag_decoupled": VerdictRule(
        "share of the gain in gold that decoupled PPO loses at a lag of 4",
        lambda figures: lost(figures, DECOUPLED, 4),
        0.05,
        equal=True,
    ),
    "lag_vtrace": VerdictRule(
        "share of the gain in gold that V-trace loses at a lag of 16",
        lambda figures: lost(figures, VTRACE, 16),
        0.05,
        equal=True,
    ),
    "lag_time": VerdictRule(
        "updates to 80 % of what GRPO gains without lag: truncated IS at a lag of 8 over without, less 1",
        lambda figures: updates_to(figures, TRUNCATED, 8) / updates_to(figures, TRUNCATED, 0) - 1,
        0.1,
        equal=True,
    ),
}


# ---------------------------------------------------------------------- table and picture


def words(bound: int) -> str:
    """Return the bound as text."""
    return str(bound) if bound < UNBOUNDED else "none"


def table(results: Results) -> str:
    """Return mean and range over seeds of the gain in gold and of the updates to equal gold."""
    gains, updates = [], []
    for bound in BOUNDS:
        cells = [spread([gain(run, name, bound) for run in results.runs]) for name in ARMS]
        share = statistics.fmean(run[key(NAIVE, bound)]["ess"] for run in results.runs)
        gains.append([words(bound), *cells, f"{share:.0%}"])
        updates.append([words(bound), *(counted(results, name, bound) for name in ARMS)])
    starts = ", ".join(run["start"] for run in results.runs)
    parts = (
        markdown(("gain, by bound of the lag", *ARMS, "ESS, naive"), gains),
        markdown(("updates, by bound of the lag", *ARMS), updates),
        f"Digests of the starts: {starts}.",
    )
    return "\n\n".join(parts)


def counted(results: Results, name: str, bound: int) -> str:
    """Return mean and range of the updates to equal gold; UPDATES where it is not reached."""
    counts = [updates_to(run, name, bound) for run in results.runs]
    missed = counts.count(UPDATES)
    return spread(counts, ".0f") + (f", {missed} not" if missed else "")


def draw(results: Results, figure: Any) -> None:
    """Draw the gain by the bound of the lag, and naive clipping along the run."""
    by_bound, along = figure.subplots(1, 2)
    for n, name in enumerate(ARMS):
        gains = [[gain(run, name, bound) for run in results.runs] for bound in BOUNDS]
        by_bound.plot(range(len(BOUNDS)), list(map(statistics.fmean, gains)), f"C{n}-", label=name)
        places = [x + 0.08 * (n - 2) for x in range(len(BOUNDS))]
        by_bound.vlines(places, list(map(min, gains)), list(map(max, gains)), f"C{n}", alpha=0.4)
    by_bound.set_xticks(range(len(BOUNDS)), list(map(words, BOUNDS)))
    by_bound.set(xlabel="bound of the lag, in updates", ylabel="gain in expected gold", ylim=(0, None))
    for n, bound in enumerate((0, 4, 16)):
        for name, style in ((NAIVE, "-"), (TRUNCATED, "--")):
            paths = zip(*(run[key(name, bound)]["gold"] for run in results.runs), strict=True)
            label = f"naive, {words(bound)}" if name == NAIVE else None
            means = list(map(statistics.fmean, paths))
            along.plot(range(0, UPDATES + 1, 4), means[::4], f"C{n}{style}", label=label)
    along.plot([], [], "k--", label="truncated IS")
    along.set(xlabel="updates", ylabel="expected gold")
    along.locator_params(nbins=4)
    for axes in (by_bound, along):
        axes.legend(frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(11.0, 4.4))
