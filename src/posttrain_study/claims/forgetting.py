"""What is forgotten of one task while another is learnt: SFT, GRPO, GRPO with a KL penalty, and LoRA.

One start (tiny.py's Llama) answers three kinds of questions: TRAINED ones at random, FACTS with the one right
answer of each, and TEXT with letters of a mixture. Every arm is then trained on the TRAINED questions alone,
by gold: GRPO on its own answers, SFT on answers of a teacher. The outside teacher knows gold and not the
start; the nearest one is the policy of as much gold that is nearest to the start. Arms are compared where
they have equal gold. All figures are exact expectations. Rates, and weights of penalties, were chosen on
seeds 100 and 101, for each arm by its accuracy on the facts at equal gold.
"""

import copy
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import one_hot
from transformers import LlamaForCausalLM

from posttrain.learner.lora import Lora, add_adapter
from posttrain.methods.build import build
from posttrain_study.claims.experiment import (
    Experiment,
    Figures,
    Report,
    Results,
    VerdictRule,
    markdown,
    spread,
)
from posttrain_study.claims.online import Routine, batch_of, of_mixtures, prepared
from posttrain_study.claims.tiny import (
    COUNT,
    LENGTH,
    LETTERS,
    LONGEST,
    QUESTIONS,
    SPELT,
    Table,
    Trainee,
    gold_of,
    kl_of,
    likelihoods,
    mean_of,
    new_model,
)

TRAINED, FACTS, TEXT = torch.tensor([0, 4, 5]), torch.tensor([1, 3, 7]), torch.tensor([2, 6])
"""Questions of each kind; each letter begins or ends questions of several kinds."""
SIZE, UPDATES, EVERY, START_STEPS = 16, 160, 4, 400
TARGET = 0.5
"""Gold at which arms are compared, or the highest gold that both reach."""
SHARPNESS = 0.35
"""Temperature of the outside teacher over gold."""


@dataclass(frozen=True)
class TrainingArm:
    """How the start is trained. teacher: whose answers SFT reads; empty: GRPO on its own answers."""

    lr: float
    teacher: str = ""
    rank: int = 0
    numbers: dict[str, float] = field(default_factory=dict)


ARMS = {
    "SFT": TrainingArm(3e-4, "outside"),
    "SFT, nearest teacher": TrainingArm(1e-3, "nearest"),
    "SFT, LoRA": TrainingArm(3e-4, "outside", rank=2),
    "GRPO": TrainingArm(3e-4),
    "GRPO, KL in the loss": TrainingArm(3e-4, numbers={"kl_in_loss": 0.3}),
    "GRPO, KL in the reward": TrainingArm(3e-4, numbers={"kl_in_reward": 0.3}),
    "GRPO, LoRA": TrainingArm(3e-4, rank=2),
}
COLORS = ("#c44e52", "#dd8452", "#e7a3a5", "#4c72b0", "#55a868", "#8172b3", "#8fb4e3")


# ---------------------------------------------------------------------- the start and the teachers


def taught(seed: int) -> Table:
    """Return log-probabilities of the answers that the start is taught."""
    draw = torch.Generator().manual_seed(2000 + seed)
    table = of_mixtures(draw)
    orders = [answer for answer in range(COUNT) if sorted(SPELT[answer]) == list(range(LETTERS + 1))]
    for x in FACTS:
        right = orders[int(torch.randint(len(orders), (), generator=draw))]
        table[x] = one_hot(torch.tensor(right), COUNT).double().log()
    return table


def start_model(seed: int, answers: Table) -> LlamaForCausalLM:
    """Return a model that SFT taught these answers."""
    draw = torch.Generator().manual_seed(seed)
    trainee = Trainee(new_model(seed), build("sft", {}, horizon=LONGEST), lr=0.01)
    for _ in range(START_STEPS):
        samples = torch.multinomial(answers.exp(), SIZE, replacement=True, generator=draw)
        trainee.step(batch_of(torch.arange(QUESTIONS), samples, torch.zeros(samples.shape)))
    return trainee.model


def teachers(logp_start: Table, gold: Table) -> dict[str, Table]:
    """Return policies of equal gold: one that does not know the start, and the nearest one to it."""
    uniform = -LENGTH.double() * torch.log(torch.tensor(float(LETTERS)))
    outside = (uniform + gold / SHARPNESS).log_softmax(1)
    betas = torch.logspace(1, -2, 400, dtype=torch.float64)
    near = [(logp_start + gold / beta).log_softmax(1) for beta in betas]
    level = mean_of(gold[TRAINED], outside[TRAINED])
    nearest = min(near, key=lambda logp: abs(mean_of(gold[TRAINED], logp[TRAINED]) - level))
    return {"outside": outside, "nearest": nearest}


# ---------------------------------------------------------------------- training


def trainee_of(start: LlamaForCausalLM, arm: TrainingArm, seed: int) -> Trainee:
    """Return a trainee of the start by the arm's method, whose adapter alone is trained if it has one."""
    method = build("sft" if arm.teacher else "grpo", arm.numbers, horizon=LONGEST)
    trainee = Trainee(start, method, arm.lr)
    if arm.rank:
        add_adapter(trainee.model, Lora(rank=arm.rank), seed)
        trainee.weights = [p for p in trainee.model.parameters() if p.requires_grad]
        trainee.optimiser = torch.optim.AdamW(trainee.weights, lr=arm.lr, weight_decay=0.0, fused=True)
    return trainee


def train(
    start: LlamaForCausalLM,
    arm: TrainingArm,
    gold: Table,
    answers: Table,
    sources: dict[str, Table],
    seed: int,
) -> list[dict[str, float]]:
    """Train on the TRAINED questions, and return what the policy is each EVERY updates."""
    trainee, ref = trainee_of(start, arm, seed), Trainee(start, build("sft", {}, horizon=LONGEST), 0.0)
    draw, logp_start, path = torch.Generator().manual_seed(5000 + seed), likelihoods(start), []
    for update in range(UPDATES + 1):
        logp = likelihoods(trainee.model) if update % EVERY == 0 or not arm.teacher else logp_start
        if update % EVERY == 0:
            path.append(point(logp, logp_start, gold, answers))
        if update < UPDATES:
            source = (sources[arm.teacher] if arm.teacher else logp)[TRAINED]
            samples = torch.multinomial(source.exp(), SIZE, replacement=True, generator=draw)
            batch = batch_of(TRAINED, samples, gold[TRAINED[:, None], samples])
            trainee.step(prepared(trainee, ref, batch, Routine(UPDATES)))
    return path


def point(logp: Table, logp_start: Table, gold: Table, answers: Table) -> dict[str, float]:
    """Return gold and KL on the trained questions, accuracy on the facts, and the loss on text added."""
    right = answers[FACTS].exp()
    return {
        "gold": mean_of(gold[TRAINED], logp[TRAINED]),
        "kl": kl_of(logp[TRAINED], logp_start[TRAINED]),
        "facts": mean_of(right, logp[FACTS]),
        "text": mean_of((logp_start - logp)[TEXT], answers[TEXT]),
    }


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train every arm from the same start."""
    gold, answers, paths = gold_of(seed), taught(seed), {}
    report(f"forgetting, seed {seed}, the start")
    start = start_model(seed, answers)
    sources = teachers(likelihoods(start), gold)
    for name, arm in ARMS.items():
        report(f"forgetting, seed {seed}, {name}")
        paths[name] = train(copy.deepcopy(start), arm, gold, answers, sources, seed)
    return {"paths": paths}


# ---------------------------------------------------------------------- what the claims say


def reading(path: list[dict[str, float]], level: float, by: str = "gold") -> dict[str, float]:
    """Return a path where its gold, or its KL, first reaches a level, interpolated between two evaluations.

    >>> reading([{"gold": 0.0, "kl": 0.0}, {"gold": 2.0, "kl": 1.0}], 0.5)
    {'gold': 0.5, 'kl': 0.25}
    """
    after = next(n for n, entry in enumerate(path) if entry[by] >= level)
    late, early = path[after], path[max(after - 1, 0)]
    rise = late[by] - early[by]
    share = (level - early[by]) / rise if rise else 0.0
    return {key: early[key] + share * (late[key] - early[key]) for key in late}


def difference(figures: Figures, one: str, other: str) -> float:
    """Return the accuracy on the facts of one arm minus that of another at equal gold."""
    paths = [figures["paths"][name] for name in (one, other)]
    level = min(TARGET, *(max(entry["gold"] for entry in path) for path in paths))
    first, second = (reading(path, level)["facts"] for path in paths)
    return float(first - second)


def explained(figures: Figures) -> float:
    """Return R² of a quadratic in KL for the accuracy on the facts, over all arms and evaluations."""
    points = [entry for path in figures["paths"].values() for entry in path]
    kl, facts = (torch.tensor([entry[key] for entry in points]).double() for key in ("kl", "facts"))
    powers = torch.stack([kl**n for n in range(3)], 1)
    residual = facts - powers @ torch.linalg.lstsq(powers, facts[:, None]).solution[:, 0]
    return float(1 - residual.square().mean() / facts.var(unbiased=False))


RULES = {
    "forgetting_rl": VerdictRule(
        "accuracy on the other task at equal gold, GRPO minus SFT on an outside teacher",
        lambda figures: difference(figures, "GRPO", "SFT"),
        margin=0.05,
    ),
    "forgetting_kl": VerdictRule(
        "accuracy on the other task at equal gold, GRPO with KL in the loss minus GRPO without",
        lambda figures: difference(figures, "GRPO, KL in the loss", "GRPO"),
        margin=0.05,
    ),
    "forgetting_lora": VerdictRule(
        "accuracy on the other task at equal gold, SFT of an adapter of rank 2 minus SFT of all weights",
        lambda figures: difference(figures, "SFT, LoRA", "SFT"),
        margin=0.05,
    ),
    "forgetting_by_kl": VerdictRule(
        "R² of a quadratic in KL for accuracy on the other task, over all arms and updates, minus 0.9",
        lambda figures: explained(figures) - 0.9,
    ),
}


# ---------------------------------------------------------------------- table and picture


def table(results: Results) -> str:
    """Return each arm where gold reaches TARGET, or is highest, and at the end."""
    head = (
        *(
            "arm",
            "rate",
            f"updates to gold {TARGET:g}",
            "KL",
            "facts right",
            "loss on text added",
        ),
        *("gold at the end", "KL", "facts right", "loss on text added"),
    )
    rows = []
    for name, arm in ARMS.items():
        paths = [run["paths"][name] for run in results.runs]
        tops = [max(entry["gold"] for entry in path) for path in paths]
        there = [reading(path, min(TARGET, top)) for path, top in zip(paths, tops, strict=True)]
        steps = [
            next((EVERY * n for n, entry in enumerate(path) if entry["gold"] >= TARGET), None)
            for path in paths
        ]
        reached = [step for step in steps if step is not None]
        cells = [f"{arm.lr:g}", f"{statistics.median(reached):g}" if reached else "–"]
        if len(reached) < len(steps):
            cells[-1] += f" ({len(reached)} of {len(steps)} seeds)"
        for points in (there, [path[-1] for path in paths]):
            cells += [spread([entry["gold"] for entry in points])] if points is not there else []
            cells += [f"{statistics.fmean(entry['kl'] for entry in points):.1f}"]
            cells += [spread([entry["facts"] for entry in points], ".0%")]
            cells += [spread([entry["text"] for entry in points])]
        rows.append([name, *cells])
    return markdown(head, rows)


def draw(results: Results, figure: Any) -> None:
    """Draw means over seeds at equal gold, or equal KL, and each seed's accuracy at TARGET.

    A line begins where the last seed begins, and ends where the first one ends.
    """
    axes = figure.subplots(1, 4, width_ratios=(3, 3, 3, 2))
    for n, ((name, arm), color) in enumerate(zip(ARMS.items(), COLORS, strict=True)):
        paths = [run["paths"][name] for run in results.runs]
        style = "--" if arm.rank else "-"
        for panel, (x, y) in zip(axes, (("gold", "facts"), ("gold", "text"), ("kl", "facts")), strict=False):
            low = max(path[0][x] for path in paths)
            high = min(max(entry[x] for entry in path) for path in paths)
            levels = [low + (high - low) * step / 16 for step in range(16)]
            means = [statistics.fmean(reading(path, level, x)[y] for path in paths) for level in levels]
            panel.plot(levels, means, style, color=color, lw=1.6, label=name)
        facts = [reading(path, min(TARGET, max(e["gold"] for e in path)))["facts"] for path in paths]
        axes[3].plot(facts, [n] * len(facts), "o", color=color, alpha=0.7, ms=5)
        axes[3].plot(statistics.fmean(facts), n, "|", color="black", ms=14, mew=2)
    axes[0].set(xlabel="gold on the trained task", ylabel="accuracy on the other task")
    axes[1].set(xlabel="gold on the trained task", ylabel="loss on other text added, nats an answer")
    axes[2].set(xlabel="KL(π ‖ start) on the trained task", ylabel="accuracy on the other task")
    axes[3].set(xlabel="accuracy on the other task", title=f"seeds at gold {TARGET:g}")
    axes[3].set_yticks(range(len(ARMS)), list(ARMS))
    axes[3].set(xlim=(-0.05, 1.05), ylim=(len(ARMS) - 0.5, -0.5))
    for panel in axes[:3]:
        panel.locator_params(nbins=4)
    axes[0].axvline(TARGET, color="black", lw=0.8, ls=":")
    axes[1].legend(frameon=False, fontsize="small")


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(16.0, 4.2))
