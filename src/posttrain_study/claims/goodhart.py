"""GRPO on a learnt reward model: gold and proxy, with one model, an ensemble, a KL penalty, and retraining.

The reference answers 8 questions (tiny.py). A judge compares 384 pairs of its answers: P(a preferred to b) is
σ(2 (gold of a - gold of b) + 0.4 (letters of a - letters of b)), so longer answers win more often than they
should. `reward` learns one model from all pairs, and five from bootstraps. GRPO then learns from one,
from the least of the five models, from one with a KL penalty, or from one that is trained again three times:
on 192 pairs at first, and each time on 64 more, of the policy as it then is, 384 in all. More runs have a
judge that is blind to length. Gold, proxy and KL(π ‖ π_ref) are exact. A proxy has mean 0 and deviation 1
over answers of the reference.
"""

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from posttrain.methods.build import build
from posttrain.plan.dataset_rows import marked
from posttrain.run.agreement import correlation
from posttrain.types import Batch
from posttrain_study.claims.experiment import (
    Experiment,
    Figures,
    Report,
    Results,
    VerdictRule,
    markdown,
    spread,
)
from posttrain_study.claims.policy_path import improve
from posttrain_study.claims.tiny import (
    COUNT,
    LENGTH,
    LONGEST,
    QUESTIONS,
    SPELT,
    Pairs,
    Table,
    Trainee,
    frontier,
    gold_of,
    joined,
    kl_of,
    likelihoods,
    mean_of,
    question,
    reference_model,
    sample_pairs,
)

PAIRS, FRESH, MEMBERS, RM_EPOCHS, RM_LR = 384, 4096, 5, 4, 3e-3
SURE, LONGER = 2.0, 0.4
"""How much the judge's log-odds rise with a unit of gold, and with a letter."""
UPDATES, LR, KL_WEIGHT = 160, 1e-3, 0.2
RETRAIN_EVERY, FIRST, LATER = 40, 192, 64
"""Updates between trainings of a reward model, its pairs at first, and those that each training adds."""
Proxies = Callable[[Table], Table]
"""Return the proxy for the next updates, from log π of the present policy."""
LETTERS_OF = LENGTH.double().expand(QUESTIONS, COUNT)
CASES: dict[str, tuple[str, str, float]] = {
    "one reward model": ("length", "one", 0.0),
    "least of five": ("length", "least", 0.0),
    f"one, KL penalty {KL_WEIGHT:g}": ("length", "one", KL_WEIGHT),
    "one, trained again": ("length", "again", 0.0),
    "judge blind to length: one": ("blind", "one", 0.0),
    "judge blind to length: least of five": ("blind", "least", 0.0),
    "judge blind to length: one, trained again": ("blind", "again", 0.0),
}
"""Case: (judge, which proxy, weight of the KL penalty)."""
ONE, LEAST_OF_FIVE, PENALTY, AGAIN = list(CASES)[:4]


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train the reward models of both judges, and a policy for each case."""
    model, gold = reference_model(seed), gold_of(seed)
    logp_ref, chance = likelihoods(model), torch.Generator().manual_seed(4000 + seed)
    pairs, fresh = sample_pairs(logp_ref, PAIRS, chance), sample_pairs(logp_ref, FRESH, chance)
    fresh = fresh.turned(fresh.gap(gold) < 0)
    lots = torch.rand(PAIRS + FRESH, generator=chance, dtype=torch.float64)
    proxies: dict[tuple[str, str], Proxies] = {}
    judges, distances = {"gold": compare(gold, fresh)}, dict[str, float]()
    for judge, longer in (("length", LONGER), ("blind", 0.0)):
        report(f"goodhart, seed {seed}, reward models of the judge {judge}")
        taste, tag = SURE * gold + longer * LETTERS_OF, {"length": "", "blind": ", blind to length"}[judge]
        labelled = pairs.turned(lots[:PAIRS] > pairs.gap(taste).sigmoid())
        verdicts = torch.where(lots[PAIRS:] < fresh.gap(taste).sigmoid(), 1.0, -1.0).double()
        judges[f"judge{tag}"] = agreement(verdicts, fresh)
        draws = [torch.arange(PAIRS)]
        draws += [torch.randint(PAIRS, (PAIRS,), generator=chance) for _ in range(MEMBERS)]
        scores = [scaled(reward_model(model, labelled.at(draw), seed), logp_ref) for draw in draws]
        least = scaled(torch.stack(scores[1:]).amin(0), logp_ref)
        distances[f"models{tag}"] = mean_of(torch.stack(scores[1:]).std(0, correction=0), logp_ref)
        proxies[judge, "one"], proxies[judge, "least"] = constant(scores[0]), constant(least)
        proxies[judge, "again"] = retrained(model, labelled.at(torch.arange(FIRST)), taste, logp_ref, seed)
        judges[f"one reward model{tag}"] = compare(scores[0], fresh)
        judges[f"least of five{tag}"] = compare(least, fresh)
    paths = {}
    for name, (judge, proxy, weight) in CASES.items():
        report(f"goodhart, seed {seed}, {name}")
        paths[name] = optimise(model, proxies[judge, proxy], gold, logp_ref, weight, seed)
    best = [point for point in frontier(logp_ref, gold) if point[0] < 9]
    return {"judges": judges, "distances": distances, "paths": paths, "frontier": best}


def constant(score: Table) -> Proxies:
    """Return a reward model that is not trained again."""
    return lambda logp: score


def retrained(model: LlamaForCausalLM, first: Pairs, taste: Table, logp_ref: Table, seed: int) -> Proxies:
    """Return a reward model that is trained on these pairs, and later on pairs of the policy too."""
    pairs: list[Pairs] = []
    chance = torch.Generator().manual_seed(6000 + seed)

    def proxy(logp: Table) -> Table:
        if pairs:
            fresh = sample_pairs(logp, LATER, chance)
            lots = torch.rand(LATER, generator=chance, dtype=torch.float64)
            pairs.append(fresh.turned(lots > fresh.gap(taste).sigmoid()))
        else:
            pairs.append(first)
        return scaled(reward_model(model, joined(pairs), seed), logp_ref)

    return proxy


def reward_model(model: LlamaForCausalLM, pairs: Pairs, seed: int) -> Table:
    """Return the score of every answer by a reward model that is trained from the reference."""
    trainee = Trainee(model, build("reward", {}, horizon=LONGEST), RM_LR)
    batch, draw = pairs.batch(marks=True), torch.Generator().manual_seed(seed)
    for _ in range(RM_EPOCHS):
        trainee.epoch(batch, 32, draw)
    with torch.no_grad():
        out = trainee.outputs(EVERY)
    assert out.value is not None
    return out.value[EVERY.mask].double().view(QUESTIONS, COUNT)


def every_answer() -> Batch:
    """Return every answer to every question, as a reward model reads it."""
    rows = [[*question(x), *answer] for x in range(QUESTIONS) for answer in SPELT]
    return Batch.of([marked(tokens, {len(tokens): 0.0}) for tokens in rows], list(range(len(rows))))


EVERY = every_answer()


def scaled(score: Table, logp_ref: Table) -> Table:
    """Return the score with mean 0 and deviation 1 over the reference's answers."""
    score = score - mean_of(score, logp_ref)
    return score / math.sqrt(mean_of(score.square(), logp_ref))


def compare(score: Table, fresh: Pairs) -> dict[str, float]:
    """Return how a score orders fresh pairs."""
    return agreement(fresh.gap(score), fresh)


def agreement(margin: torch.Tensor, fresh: Pairs) -> dict[str, float]:
    """Return the share of pairs in gold's order, by which is longer, and correlation of margin and length."""
    right, longer = (margin > 0).double(), fresh.gap(LETTERS_OF)
    return {
        "right": float(right.mean()),
        "right_longer": float(right[longer > 0].mean()),
        "right_shorter": float(right[longer < 0].mean()),
        "length_bias": correlation(margin, longer),
    }


def optimise(
    model: LlamaForCausalLM, proxies: Proxies, gold: Table, logp_ref: Table, weight: float, seed: int
) -> list[dict[str, float]]:
    """Train with GRPO, and return gold, proxy, letters and KL before each update and at the end."""
    trainee = Trainee(model, build("grpo", {"kl_in_loss": weight}, horizon=LONGEST), LR)
    reference, draw, path = Trainee(model, trainee.method, LR), torch.Generator().manual_seed(5000 + seed), []
    for update in range(UPDATES + 1):
        logp = likelihoods(trainee.model)
        if update % RETRAIN_EVERY == 0 and update < UPDATES:
            proxy = proxies(logp)
        tables = {"gold": gold, "proxy": proxy, "letters": LETTERS_OF}
        means = {key: mean_of(table, logp) for key, table in tables.items()}
        path.append(means | {"kl": kl_of(logp, logp_ref)})
        if update < UPDATES:
            improve(trainee, reference if weight else None, logp, proxy, draw)
    return path


# ---------------------------------------------------------------------- the rules


def rise(figures: Figures, case: str, key: str = "gold") -> float:
    """Return how much more of something the policy has at the end than the reference."""
    path = figures["paths"][case]
    return float(path[-1][key] - path[0][key])


RULES = {
    "goodhart": VerdictRule(
        "rise of the proxy minus rise of gold, in standard deviations, one reward model",
        lambda figures: rise(figures, ONE, "proxy") - rise(figures, ONE),
    ),
    "goodhart_below_start": VerdictRule(
        "gold of the reference minus gold at the end, one reward model", lambda figures: -rise(figures, ONE)
    ),
    "goodhart_kl": VerdictRule(
        "gold at the end minus gold of the reference, one reward model with a KL penalty of 0.2",
        lambda figures: rise(figures, PENALTY),
    ),
    "goodhart_ensemble": VerdictRule(
        "gold at the end, least of five reward models minus one",
        lambda figures: rise(figures, LEAST_OF_FIVE) - rise(figures, ONE),
    ),
    "goodhart_retrained": VerdictRule(
        "gold at the end minus gold of the reference, reward model trained again three times",
        lambda figures: rise(figures, AGAIN),
    ),
}


# ---------------------------------------------------------------------- tables and picture


def table(results: Results) -> str:
    """Return how judges and reward models order fresh pairs, and where each policy ends."""
    runs = results.runs
    orders = [[name, *cells([run["judges"][name] for run in runs])] for name in runs[0]["judges"]]
    head = ("fresh pairs, ordered by", "right", "longer is better", "shorter is better", "length bias")
    ends = [[name, *cells([summary(run["paths"][name]) for run in runs])] for name in CASES]
    columns = (
        "reward",
        "best gold",
        "KL there",
        "gold at KL 1.5",
        "gold at the end",
        "proxy",
        "KL",
        "letters",
    )
    distances = [
        f"five {name} differ by {spread([run['distances'][name] for run in runs])} standard deviations"
        for name in runs[0]["distances"]
    ]
    return "\n\n".join([markdown(head, orders), "\n".join(distances), markdown(columns, ends)])


def cells(numbers: list[dict[str, float]]) -> list[str]:
    """Return mean and range over seeds of each number."""
    return [spread([seed[key] for seed in numbers]) for key in numbers[0]]


def summary(path: list[dict[str, float]]) -> dict[str, float]:
    """Return the best gold and the KL there, gold where KL first reaches 1.5, and the end of a path."""
    best = max(path, key=lambda point: point["gold"])
    early = next((point for point in path if point["kl"] >= 1.5), path[-1])
    start = {"best": best["gold"], "best_kl": best["kl"], "early": early["gold"]}
    return start | {key: path[-1][key] for key in ("gold", "proxy", "kl", "letters")}


def draw(results: Results, figure: Any) -> None:
    """Draw gold and proxy over √KL for each proxy, and the length of answers; seeds thin, means thick."""
    *axes, letters, blank = figure.subplots(2, 3).flat
    blank.set_axis_off()
    names = list(CASES)
    panels = [(names[0], names[4]), (names[1], names[5]), (names[2],), (names[3], names[6])]
    for panel, cases in zip(axes, panels, strict=True):
        for n, name in enumerate(cases):
            for key, style in (("gold", "-"), ("proxy", "--")):
                lines(panel, results, name, key, style, f"C{3 * n}", f"{key}{', blind judge' * n}")
        for run in results.runs:
            best = run["frontier"][::8]
            panel.plot([math.sqrt(kl) for kl, _ in best], [gold for _, gold in best], color="grey", lw=0.5)
        panel.plot([], [], color="grey", lw=0.5, label="best possible gold")
        panel.set(title=cases[0], xlabel="√KL(π ‖ π_ref)", xlim=(0, 3), ylim=(-1.4, 3))
        panel.legend(frameon=False, fontsize="small", loc="upper left")
    for n, name in enumerate(names):
        lines(letters, results, name, "letters", "-", f"C{n}", name)
    letters.set(title="letters of an answer", xlabel="√KL(π ‖ π_ref)", xlim=(0, 3), ylim=(2, 8.5))
    letters.legend(frameon=False, fontsize="small", loc="upper left")


def lines(axes: Any, results: Results, name: str, key: str, style: str, color: str, label: str) -> None:
    """Draw a thin line for each seed and their thick mean at the same update; every eighth is shown."""
    paths = [run["paths"][name][::8] for run in results.runs]
    across = [[math.sqrt(max(point["kl"], 0.0)) for point in path] for path in paths]
    heights = [[point[key] for point in path] for path in paths]
    for x, y in zip(across, heights, strict=True):
        axes.plot(x, y, style, color=color, linewidth=0.5, alpha=0.4)
    mean = [[statistics.fmean(column) for column in zip(*rows, strict=True)] for rows in (across, heights)]
    axes.plot(*mean, style, color=color, linewidth=1.8, label=label)


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(12.0, 7.5))
