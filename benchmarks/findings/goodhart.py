"""What happens to gold when GRPO is paid by a reward model, and what an ensemble or a KL penalty changes.

The reference answers 8 questions (tiny.py). A judge compares 384 pairs of its answers: P(a preferred to b) is
σ(2 (gold of a - gold of b) + 0.4 (letters of a - letters of b)), so longer answers win more often than they
should. `reward` learns one model from all pairs, and five from bootstraps of them. GRPO then learns from one,
from the least of the five models, from one with a KL penalty, or from one that is trained again three times:
on 192 pairs at first, and each time on 64 more, of the policy as it then is, 384 in all. More runs have a
judge who is blind to length. Gold, proxy and KL(π ‖ π_ref) are exact. A proxy has mean 0 and deviation 1 over
answers of the reference.

    python benchmarks/findings/goodhart.py --seeds 5 --out runs/goodhart
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from posttrain.methods.build import build
from posttrain.plan.dataset_rows import marked
from posttrain.process.machine import configure
from posttrain.run.agreement import correlation
from posttrain.types import Batch
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
    sampled_batch,
)

PAIRS, FRESH, MEMBERS, RM_EPOCHS, RM_LR = 384, 4096, 5, 4, 3e-3
SURE, LONGER = 2.0, 0.4
"""How much the judge's log-odds rise with a unit of gold, and with a letter."""
UPDATES, ANSWERS, LR, KL_WEIGHT = 160, 16, 1e-3, 0.2
EVERY_UPDATES, FIRST, LATER = 40, 192, 64
"""When a reward model is trained again, the pairs that it begins with, and those that are added each time."""
Proxies = Callable[[Table], Table]
"""The proxy from an update on, by what the policy is then."""
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


def main() -> None:
    """Makes the seeds that are missing, then the tables and the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    configure(1)
    options.out.mkdir(parents=True, exist_ok=True)
    found = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        file = options.out / f"seed-{seed}.json"
        if not file.exists():
            file.write_text(json.dumps(run(seed)))
        found.append(json.loads(file.read_text()))
    print("| fresh pairs, ordered by | right | if the longer is better | if the shorter is | length bias |")
    print("|---|---|---|---|---|")
    for name in found[0]["judges"]:
        print(f"| {name} | {over([one['judges'][name] for one in found])} |")
    for name in found[0]["apart"]:
        print(f"five {name} are apart by {over([{name: one['apart'][name]} for one in found])} deviations")
    print("\n| paid by | best gold | KL there | gold at KL 1.5 | gold at the end | proxy | KL | letters |")
    print("|---|---|---|---|---|---|---|---|")
    for name in CASES:
        print(f"| {name} | {over([end_of(one['paths'][name]) for one in found])} |")
    draw(found, options.out / "goodhart.svg")


def over(numbers: list[dict[str, float]]) -> str:
    """The mean over seeds of each number, and its range."""
    columns = [[one[key] for one in numbers] for key in numbers[0]]
    return " | ".join(
        f"{statistics.fmean(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in columns
    )


def run(seed: int) -> dict[str, Any]:
    """Everything that one seed comes to."""
    model, gold = reference_model(seed), gold_of(seed)
    logp_ref, chance = likelihoods(model), torch.Generator().manual_seed(4000 + seed)
    pairs, fresh = sample_pairs(logp_ref, PAIRS, chance), sample_pairs(logp_ref, FRESH, chance)
    fresh = fresh.turned(fresh.gap(gold) < 0)
    lots = torch.rand(PAIRS + FRESH, generator=chance, dtype=torch.float64)
    proxies: dict[tuple[str, str], Proxies] = {}
    judges, apart = {"gold": compared(gold, fresh)}, dict[str, float]()
    for judge, longer in (("length", LONGER), ("blind", 0.0)):
        taste, tag = SURE * gold + longer * LETTERS_OF, {"length": "", "blind": ", blind to length"}[judge]
        learnt = pairs.turned(lots[:PAIRS] > pairs.gap(taste).sigmoid())
        said = torch.where(lots[PAIRS:] < fresh.gap(taste).sigmoid(), 1.0, -1.0).double()
        judges[f"judge{tag}"] = agreed(said, fresh)
        draws = [torch.arange(PAIRS)]
        draws += [torch.randint(PAIRS, (PAIRS,), generator=chance) for _ in range(MEMBERS)]
        scores = [scaled(reward_model(model, learnt.at(each), seed), logp_ref) for each in draws]
        least = scaled(torch.stack(scores[1:]).amin(0), logp_ref)
        apart[f"models{tag}"] = mean_of(torch.stack(scores[1:]).std(0, correction=0), logp_ref)
        proxies[judge, "one"], proxies[judge, "least"] = always(scores[0]), always(least)
        proxies[judge, "again"] = again(model, learnt.at(torch.arange(FIRST)), taste, logp_ref, seed)
        judges[f"one reward model{tag}"] = compared(scores[0], fresh)
        judges[f"least of five{tag}"] = compared(least, fresh)
    paths = {}
    for name, (judge, which, weight) in CASES.items():
        paths[name] = optimised(model, proxies[judge, which], gold, logp_ref, weight, seed)
        end = paths[name][-1]
        print(f"seed {seed}, {name}: gold {end['gold']:.2f}, KL {end['kl']:.2f}", flush=True)
    best = [point for point in frontier(logp_ref, gold) if point[0] < 9]
    return {"judges": judges, "apart": apart, "paths": paths, "best": best}


def always(score: Table) -> Proxies:
    """A reward model that is never trained again."""
    return lambda logp: score


def again(model: LlamaForCausalLM, first: Pairs, taste: Table, logp_ref: Table, seed: int) -> Proxies:
    """A reward model of these pairs, and each time after that of more, which the policy of then gave."""
    known: list[Pairs] = []
    chance = torch.Generator().manual_seed(6000 + seed)

    def learnt(logp: Table) -> Table:
        if known:
            fresh = sample_pairs(logp, LATER, chance)
            lots = torch.rand(LATER, generator=chance, dtype=torch.float64)
            known.append(fresh.turned(lots > fresh.gap(taste).sigmoid()))
        else:
            known.append(first)
        return scaled(reward_model(model, joined(known), seed), logp_ref)

    return learnt


def reward_model(model: LlamaForCausalLM, pairs: Pairs, seed: int) -> Table:
    """The score of every answer, by a reward model that starts from the reference."""
    trainee = Trainee(model, build("reward", {}, horizon=LONGEST), RM_LR)
    batch, dealt = pairs.batch(marks=True), torch.Generator().manual_seed(seed)
    for _ in range(RM_EPOCHS):
        trainee.epoch(batch, 32, dealt)
    with torch.no_grad():
        out = trainee.outputs(EVERY)
    assert out.value is not None
    return out.value[EVERY.mask].double().view(QUESTIONS, COUNT)


def every_answer() -> Batch:
    """Every answer to every question, as a reward model reads it."""
    whole = [[*question(x), *said] for x in range(QUESTIONS) for said in SPELT]
    return Batch.of([marked(tokens, {len(tokens): 0.0}) for tokens in whole], list(range(len(whole))))


EVERY = every_answer()


def scaled(score: Table, logp_ref: Table) -> Table:
    """The score with mean 0 and deviation 1 over the reference's answers."""
    score = score - mean_of(score, logp_ref)
    return score / math.sqrt(mean_of(score.square(), logp_ref))


def compared(score: Table, fresh: Pairs) -> dict[str, float]:
    """How a score orders fresh pairs."""
    return agreed(fresh.gap(score), fresh)


def agreed(margin: torch.Tensor, fresh: Pairs) -> dict[str, float]:
    """The share of pairs in gold's order, by which is longer, and the correlation of margin and length."""
    right, longer = (margin > 0).double(), fresh.gap(LETTERS_OF)
    return {
        "right": float(right.mean()),
        "right_longer": float(right[longer > 0].mean()),
        "right_shorter": float(right[longer < 0].mean()),
        "length_bias": correlation(margin, longer),
    }


def optimised(
    model: LlamaForCausalLM, proxies: Proxies, gold: Table, logp_ref: Table, weight: float, seed: int
) -> list[dict[str, float]]:
    """What the policy is before each update of GRPO, and at the end."""
    trainee = Trainee(model, build("grpo", {"kl_in_loss": weight}, horizon=LONGEST), LR)
    reference, draw, path = Trainee(model, trainee.method, LR), torch.Generator().manual_seed(5000 + seed), []
    for update in range(UPDATES + 1):
        logp = likelihoods(trainee.model)
        if update % EVERY_UPDATES == 0 and update < UPDATES:
            proxy = proxies(logp)
        at = {"gold": gold, "proxy": proxy, "letters": LETTERS_OF}
        path.append({key: mean_of(table, logp) for key, table in at.items()} | {"kl": kl_of(logp, logp_ref)})
        if update < UPDATES:
            drawn = torch.multinomial(logp.exp(), ANSWERS, replacement=True, generator=draw)
            batch = sampled_batch(drawn, proxy)
            if weight:
                with torch.no_grad():
                    batch = replace(batch, logp_ref=reference.outputs(batch).logp)
            trainee.step(trainee.method.prepare(batch))
    return path


def end_of(path: list[dict[str, float]]) -> dict[str, float]:
    """The best gold and the KL at which it was, gold when KL was first 1.5, and the end."""
    best, passed = max(path, key=lambda at: at["gold"]), next(at for at in path if at["kl"] >= 1.5)
    early = {"best": best["gold"], "best_kl": best["kl"], "passed": passed["gold"]}
    return early | {key: path[-1][key] for key in ("gold", "proxy", "kl", "letters")}


def draw(found: list[dict[str, Any]], out: Path) -> None:
    """Gold and proxy over √KL for each proxy, and the length of answers; each seed thin, the mean thick."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 5, figsize=(17.5, 4.2))
    names, colours = list(CASES), pyplot.colormaps["tab10"]
    shown = [(names[0], names[4]), (names[1], names[5]), (names[2],), (names[3], names[6])]
    for place, cases in zip(axes[:4], shown, strict=True):
        for n, name in enumerate(cases):
            for key, style in (("gold", "-"), ("proxy", "--")):
                lines(place, found, name, key, style, colours(3 * n), f"{key}{', blind judge' * n}")
        for one in found:
            best = one["best"][::8]
            place.plot([math.sqrt(kl) for kl, _ in best], [g for _, g in best], color="grey", lw=0.5)
        place.plot([], [], color="grey", lw=0.5, label="best possible gold")
        place.set(title=cases[0], xlabel="√KL(π ‖ π_ref)", xlim=(0, 3), ylim=(-1.4, 3))
        place.legend(frameon=False, fontsize="small", loc="upper left")
    for n, name in enumerate(names):
        lines(axes[4], found, name, "letters", "-", colours(n), name)
    axes[4].set(title="letters of an answer", xlabel="√KL(π ‖ π_ref)", xlim=(0, 3), ylim=(2, 8.5))
    axes[4].legend(frameon=False, fontsize="small", loc="upper left")
    for place in axes:
        place.grid(alpha=0.25)
        place.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out)


def lines(
    place: Any, found: list[dict[str, Any]], name: str, key: str, style: str, colour: Any, label: str
) -> None:
    """One line a seed, thin, and their mean over the same update; every eighth update is shown."""
    paths = [one["paths"][name][::8] for one in found]
    across = [[math.sqrt(max(at["kl"], 0.0)) for at in path] for path in paths]
    up = [[at[key] for at in path] for path in paths]
    for x, y in zip(across, up, strict=True):
        place.plot(x, y, style, color=colour, linewidth=0.5, alpha=0.4)
    mean = [[statistics.fmean(column) for column in zip(*each, strict=True)] for each in (across, up)]
    place.plot(*mean, style, color=colour, linewidth=1.8, label=label)


if __name__ == "__main__":
    main()
