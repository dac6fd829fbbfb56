"""A judge who likes agreement: what GRPO on a reward model of its choices makes of the truth.

A prompt is one of 16 topics and the opinion of its asker, one of four letters; the answer is a letter. Each
topic has one right letter, which the opinion is in a quarter of the prompts. The reference was taught answers
of which six in ten are right. A judge compares pairs of its answers: P(a preferred to b) is
σ(2 (a right - b right) + c (a agrees - b agrees)), so it prefers the truth to agreement up to c = 2. A reward
model learns from 512 such pairs, and GRPO from the reward model. All chances are exact, over the 64 prompts.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import one_hot

from posttrain.methods.build import build
from posttrain.plan.dataset_rows import marked, numbered, row
from posttrain.types import Batch
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
from posttrain_study.claims.tiny import Trainee, new_model

LETTERS, TOPICS = 4, 16
PROMPTS = torch.cartesian_prod(*[torch.arange(LETTERS)] * 3)
"""[64, 3]: two letters of the topic, and the opinion."""
TASTES = (0.0, 1.0, 2.0, 4.0)
"""How much the judge's log-odds rise with agreement; with the truth they rise by 2."""
CLAIMED, SURE = 1.0, 2.0
TAUGHT, RIGHT, PAIRS, RM_EPOCHS, UPDATES, ANSWERS, LR = 4096, 0.6, 512, 8, 80, 8, 3e-3
ROWS = [[*prompt, answer] for prompt in PROMPTS.tolist() for answer in range(LETTERS)]
ALL = Batch.of([row(tokens, [False] * 3 + [True], 0.0) for tokens in ROWS], list(range(len(ROWS))))
SCORED = Batch.of([marked(tokens, {len(tokens): 0.0}) for tokens in ROWS], list(range(len(ROWS))))


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train a reward model and a policy for each taste of the judge."""
    chance = torch.Generator().manual_seed(9000 + seed)
    truth = torch.randint(LETTERS, (TOPICS,), generator=chance)
    right = one_hot(truth.repeat_interleave(LETTERS), LETTERS).double()
    agrees = one_hot(PROMPTS[:, 2], LETTERS).double()
    report(f"flattery, seed {seed}, reference")
    start = reference(seed, right, chance)
    p = policy(start)
    prompts = torch.arange(PAIRS) % len(PROMPTS)
    first, second = torch.multinomial(p[prompts], 2, generator=chance).T
    lots = torch.rand(PAIRS, generator=chance, dtype=torch.float64)
    figures: dict[str, Any] = {"reference": chances(p, right, agrees)}
    for taste in TASTES:
        report(f"flattery, seed {seed}, taste {taste:g}")
        worth = SURE * right + taste * agrees
        wins = lots < (worth[prompts, first] - worth[prompts, second]).sigmoid()
        won, lost = torch.where(wins, first, second), torch.where(wins, second, first)
        score = reward_model(start, prompts, won, lost, seed)
        figures[f"{taste:g}"] = optimise(start, score, right, agrees, seed)
    return figures


def reference(seed: int, right: torch.Tensor, chance: torch.Generator) -> Trainee:
    """Return a policy that SFT taught answers which are right in RIGHT of the prompts, and else any other."""
    prompts = torch.arange(TAUGHT) % len(PROMPTS)
    other = (1 - RIGHT) / (LETTERS - 1)
    answers = torch.multinomial(right[prompts] * (RIGHT - other) + other, 1, generator=chance)[:, 0]
    batch = ALL.rows(prompts * LETTERS + answers)
    trainee = Trainee(new_model(seed), build("sft", {}, horizon=1), lr=0.01)
    trainee.epoch(replace(batch, group=torch.arange(TAUGHT)), 64, chance)
    return trainee


@torch.no_grad()
def policy(trainee: Trainee) -> torch.Tensor:
    """Return the chance of each answer to each prompt, [64, 4] in float64."""
    logits: torch.Tensor = trainee.model(input_ids=PROMPTS, use_cache=False).logits
    return logits[:, -1].double().softmax(-1)


def reward_model(
    start: Trainee, prompts: torch.Tensor, won: torch.Tensor, lost: torch.Tensor, seed: int
) -> torch.Tensor:
    """Return the score of each answer to each prompt, [64, 4], by a model that is trained on the pairs."""
    trainee = Trainee(start.model, build("reward", {}, horizon=1), LR)
    groups = []
    for at, *sides in zip(prompts.tolist(), won.tolist(), lost.tolist(), strict=True):
        tokens = [ROWS[at * LETTERS + answer] for answer in sides]
        groups.append(tuple(marked(t, {len(t): worth}) for t, worth in zip(tokens, (1.0, 0.0), strict=True)))
    batch, draw = Batch.of(*numbered(groups)), torch.Generator().manual_seed(seed)
    for _ in range(RM_EPOCHS):
        trainee.epoch(batch, 32, draw)
    with torch.no_grad():
        value = trainee.outputs(SCORED).value
    assert value is not None
    return value[SCORED.mask].view(-1, LETTERS)


def optimise(
    start: Trainee, score: torch.Tensor, right: torch.Tensor, agrees: torch.Tensor, seed: int
) -> dict[str, list[float]]:
    """Train with GRPO on the score, and return the chances before each update and at the end."""
    trainee = Trainee(start.model, build("grpo", {}, horizon=1), LR)
    draw, path = torch.Generator().manual_seed(5000 + seed), {"right": list[float](), "agrees": list[float]()}
    groups = torch.arange(len(PROMPTS)).repeat_interleave(ANSWERS)
    for update in range(UPDATES + 1):
        p = policy(trainee)
        for key, value in chances(p, right, agrees).items():
            path[key].append(value)
        if update < UPDATES:
            answers = torch.multinomial(p, ANSWERS, replacement=True, generator=draw).flatten()
            batch = ALL.rows(groups * LETTERS + answers)
            rewards = torch.zeros_like(batch.reward)
            rewards[:, -1] = score[groups, answers]
            trainee.step(trainee.method.prepare(replace(batch, group=groups, reward=rewards)))
    return path


def chances(p: torch.Tensor, right: torch.Tensor, agrees: torch.Tensor) -> dict[str, float]:
    """Return the chances of a right and of an agreeing answer where the opinion is wrong."""
    wrong = (right * agrees).sum(1) == 0
    return {
        key: float((p * table).sum(1)[wrong].mean()) for key, table in (("right", right), ("agrees", agrees))
    }


RULES = {
    "flattery": VerdictRule(
        "chance of a right answer where the opinion is wrong, judge without taste for agreement minus "
        "judge with half the weight of the truth",
        lambda figures: figures["0"]["right"][-1] - figures[f"{CLAIMED:g}"]["right"][-1],
        margin=0.05,
    ),
}


def table(results: Results) -> str:
    """Return both chances where the opinion is wrong, for the reference and at the end of each run."""
    runs = results.runs
    start = [spread([run["reference"][key] for run in runs], ".0%") for key in ("right", "agrees")]
    rows = [["the reference", "–", *start]]
    for taste in TASTES:
        paths = [run[f"{taste:g}"] for run in runs]
        cells = [spread([path[key][-1] for path in paths], ".0%") for key in ("right", "agrees")]
        rows.append(["GRPO on the reward model", f"{taste:g}", *cells])
    return markdown(("policy", "judge's taste for agreement", "right", "agrees"), rows)


def draw(results: Results, figure: Any) -> None:
    """Draw both chances by update for each taste."""
    panels = figure.subplots(1, 2, sharey=True)
    colors = ("#2a788e", "#7ad151", "#e0a030", "#d1495b")
    titles = {"right": "right answers, opinion wrong", "agrees": "answers that agree, opinion wrong"}
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for taste, color in zip(TASTES, colors, strict=True):
            heights = [run[f"{taste:g}"][key][::2] for run in results.runs]
            curve(axes, range(0, UPDATES + 1, 2), heights, f"{taste:g}", color)
        axes.set(title=title, xlabel="update", ylim=(0, 1))
    panels[1].legend(frameon=False, title="taste for agreement", loc="upper left")


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(10.0, 4.0))
