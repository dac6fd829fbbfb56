"""DPO against RLHF, a reward model and then reinforcement learning, by the number of pairs.

A judge compares answers of the reference by Bradley and Terry's model on gold: P(a preferred to b) is
σ(2 (gold of a - gold of b)). The optimum of both is then π* ∝ π_ref exp(2 gold/β), and KL(π ‖ π*) is, in
units of β, what a policy lacks of the objective E[2 gold] - β KL(π ‖ π_ref). From the same pairs and the same
reference:

    DPO           the policy itself is fitted to the pairs
    RLHF, exact   a reward model r is fitted to them; the policy is its exact optimum π_ref exp(r/β)/Z
    RLHF          RLOO on the same reward model, with the KL in the reward: 160 updates of 128 answers, for
                  the larger number of pairs

Rates were chosen on seed 100. Every KL is exact.
"""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

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
from posttrain_study.claims.fitting import SURE, implicit_reward, judged, reward_model
from posttrain_study.claims.tiny import (
    LONGEST,
    Table,
    Trainee,
    gold_of,
    kl_of,
    likelihoods,
    mean_of,
    reference_model,
    sample_pairs,
    sampled_batch,
)

PAIRS, OPTIMISED = (128, 1024), 1024
"""Sizes of the sets of pairs, and the one on whose reward model RLOO runs too."""
BETA = 1.0
"""Weight of the KL in both objectives."""
DPO_LR, REWARD_LR, RL_LR, UPDATES, ANSWERS = 3e-3, 3e-3, 4e-3, 160, 16
EXACT = "RLHF, exact"
ARMS = ("DPO", EXACT, "RLHF")


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train every arm on growing sets of the same pairs."""
    model, gold = reference_model(seed), SURE * gold_of(seed)
    logp_ref, draw = likelihoods(model), torch.Generator().manual_seed(7000 + seed)
    best = (logp_ref + gold / BETA).log_softmax(1)
    pairs = judged(sample_pairs(logp_ref, PAIRS[-1], draw), gold, draw)
    fresh = sample_pairs(logp_ref, 4096, draw)
    fresh = fresh.turned(fresh.gap(gold) < 0)

    def figures(logp: Table, reward: Table) -> dict[str, float]:
        right = (fresh.gap(reward) > 0).double().mean()
        means = {"gold": mean_of(gold, logp) / SURE, "kl": kl_of(logp, logp_ref), "lacks": kl_of(logp, best)}
        return means | {"right": float(right)}

    arms: dict[str, dict[str, dict[str, float]]] = {arm: {} for arm in ARMS}
    for number in PAIRS:
        report(f"dpo_or_rlhf_by_pairs, seed {seed}, {number} pairs")
        part = pairs.at(torch.arange(number))
        dpo, learnt = (
            implicit_reward(model, part, BETA, DPO_LR, seed),
            reward_model(model, part, REWARD_LR, seed),
        )
        arms["DPO"][str(number)] = figures(logp_ref + dpo.reward / BETA, dpo.reward)
        arms[EXACT][str(number)] = figures((logp_ref + learnt.reward / BETA).log_softmax(1), learnt.reward)
        if number == OPTIMISED:
            arms["RLHF"][str(number)] = figures(optimise(model, learnt.reward, BETA, seed), learnt.reward)
    return {"arms": arms, "best": figures(best, gold), "start": figures(logp_ref, torch.zeros_like(gold))}


def optimise(model: LlamaForCausalLM, reward: Table, beta: float, seed: int, lr: float = RL_LR) -> Table:
    """Return log π after RLOO on a reward, with the KL to the model in the reward."""
    trainee = Trainee(model, build("rloo", {"kl_in_reward": beta}, horizon=LONGEST), lr)
    reference, draw = Trainee(model, trainee.method, lr), torch.Generator().manual_seed(seed)
    for _ in range(UPDATES):
        samples = torch.multinomial(
            likelihoods(trainee.model).exp(), ANSWERS, replacement=True, generator=draw
        )
        batch = sampled_batch(samples, reward)
        with torch.no_grad():
            logp = trainee.outputs(batch).logp
            logp_ref = reference.outputs(batch).logp
        batch = replace(batch, logp_gen=logp, logp_policy=logp, logp_old=logp, logp_ref=logp_ref)
        trainee.step(trainee.method.prepare(batch))
    return likelihoods(trainee.model)


def lacks(figures: Figures, arm: str) -> float:
    """Return KL(π ‖ π*), the mean over the numbers of pairs."""
    return statistics.fmean(figures["arms"][arm][str(number)]["lacks"] for number in PAIRS)


RULES = {
    "dpo_or_rlhf_by_pairs": VerdictRule(
        "KL(π ‖ π*), DPO minus the exact optimum of a reward model, mean over 128 and 1024 pairs",
        lambda figures: lacks(figures, "DPO") - lacks(figures, EXACT),
        0.1,
    ),
}


# ---------------------------------------------------------------------- table and picture


def table(results: Results) -> str:
    """Return mean and range over seeds for each arm and number of pairs."""
    rows = []
    for name in ("start", "best"):
        rows.append(
            [{"start": "the reference", "best": "π*"}[name], "", *cells([run[name] for run in results.runs])]
        )
    for number in PAIRS:
        for arm in ARMS:
            if str(number) in results.runs[0]["arms"][arm]:
                rows.append(
                    [arm, f"{number}", *cells([run["arms"][arm][str(number)] for run in results.runs])]
                )
    return markdown(("policy", "pairs", "KL(π ‖ π*)", "gold", "KL(π ‖ π_ref)", "fresh pairs right"), rows)


def cells(runs: list[dict[str, float]]) -> list[str]:
    """Return the cells of a policy."""
    forms = {"lacks": ".2f", "gold": ".2f", "kl": ".2f", "right": ".1%"}
    return [spread([run[key] for run in runs], form) for key, form in forms.items()]


def draw(results: Results, figure: Any) -> None:
    """Draw KL(π ‖ π*) and gold by the number of pairs."""
    titles = {"lacks": "KL(π ‖ π*), nats an answer", "gold": "expected gold"}
    for axes, (key, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for n, arm in enumerate(ARMS):
            numbers = [number for number in PAIRS if str(number) in results.runs[0]["arms"][arm]]
            runs = [[run["arms"][arm][str(number)][key] for number in numbers] for run in results.runs]
            if len(numbers) > 1:
                curve(axes, numbers, runs, arm, f"C{n}")
            else:
                axes.plot(numbers * len(runs), [run[0] for run in runs], "o", ms=4, color=f"C{n}", label=arm)
        for name, style in (("start", ":"), ("best", "--")):
            height = statistics.fmean(run[name][key] for run in results.runs)
            axes.axhline(height, color="grey", ls=style, label={"start": "reference", "best": "π*"}[name])
        axes.set(xlabel="pairs", xscale="log", title=title)
        axes.set_xticks(PAIRS, [str(number) for number in PAIRS])
        axes.minorticks_off()
    axes.legend(frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(10.0, 4.0))
