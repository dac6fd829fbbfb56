"""Choose one of n answers by a model of steps or of outcomes, on chains of additions (process_outcome.py).

The policy is a table that is not trained here; by its skill it makes most steps rightly (4) or half (3), each
after the one before. An answer is right if its last sum is. Models learn from its labelled answers:

    PRM          a logit for each step (sum so far, digit, next sum), from labels of steps
    ORM          the same table, from the outcome alone: the chance that an answer is right is the product of
                 its steps' chances
    plain ORM    a network of all digits and sums of an answer, from the outcome
    soft, hard   the same table, from the share of k continuations of the policy after each step that end
                 right, or from whether any does. Such a label is about all steps so far, and is predicted by
                 the product of their chances, times a chance to end well from this place

A step that no labelled answer has keeps the mean chance, which all begin with. An answer's score is the
product of its steps' chances, or their least. 512 answers are labelled, or for an ORM 2560 too, as many
labels as the PRM has. Outcomes of rollouts are drawn with the policy's exact chance.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy, one_hot

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
from posttrain_study.claims.process_outcome import LONGEST, ChainPolicy, chains, places, steps, sums, values

STEPS, LABELLED, QUESTIONS, SIZES = LONGEST - 1, 512, 500, (1, 2, 4, 8, 16, 32, 64)
SKILLS, ROLLOUTS, PASSES, RATE = (4.0, 3.0), (1, 4, 16, 64), 300, 0.1
STRONG = "4"
Judge = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Return a score for each answer, [rows], from (questions, answers)."""


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train the models on answers of each policy, and choose among fresh answers."""
    figures: dict[str, Any] = {}
    for skill in SKILLS:
        report(f"rerank, seed {seed}, skill {skill:g}")
        policy = ChainPolicy(seed, build("reinforce_pp", {}, horizon=STEPS), 0.1, skill)
        chance = torch.Generator().manual_seed(11000 + seed)
        questions = chains(STEPS * LABELLED, chance)
        answers = policy.answers(questions, chance)
        judges = train(policy, questions, answers, chance, seed)
        fresh = chains(QUESTIONS, chance).repeat_interleave(SIZES[-1], 0)
        responses = policy.answers(fresh, chance)
        right = (responses == sums(fresh))[:, -1].view(QUESTIONS, -1)
        scores = {name: judge(fresh, responses).view(QUESTIONS, -1) for name, judge in judges.items()}
        shares = {
            name: [accuracy(score[:, :n], right[:, :n]) for n in SIZES] for name, score in scores.items()
        }
        last = responses[:, -1].view(QUESTIONS, -1)
        shares["majority"] = [accuracy(votes(last[:, :n]), right[:, :n]) for n in SIZES]
        shares["any"] = [float(right[:, :n].any(1).double().mean()) for n in SIZES]
        figures[f"{skill:g}"] = shares | {
            "labels": agreement(policy, fresh[:20000], responses[:20000], chance)
        }
    return figures


def train(
    policy: ChainPolicy, questions: torch.Tensor, answers: torch.Tensor, chance: torch.Generator, seed: int
) -> dict[str, Judge]:
    """Return the judges, each trained on as many of the answers as its name says."""
    few_questions, few = questions[:LABELLED], answers[:LABELLED]
    prm = table_of_steps(few_questions, few, (steps(few_questions, few) > 0).float())
    judges = {"PRM": product(prm), "PRM, least step": least(prm)}
    for name, (q, a) in {"": (few_questions, few), ", as many labels": (questions, answers)}.items():
        right = (a == sums(q))[:, -1].float()
        judges["ORM" + name] = product(table_of_outcomes(q, a, right))
        judges["plain ORM" + name] = network(q, a, right, seed)
    for k in ROLLOUTS:
        share = rollouts(policy, few_questions, few, k, chance)
        judges[f"soft, {k}"] = product(table_of_prefixes(few_questions, few, share))
        judges[f"hard, {k}"] = product(table_of_prefixes(few_questions, few, (share > 0).float()))
    return judges


def rollouts(
    policy: ChainPolicy, questions: torch.Tensor, answers: torch.Tensor, k: int, chance: torch.Generator
) -> torch.Tensor:
    """Return the share of k continuations after each step that end right, [rows, steps]."""
    value = values(questions, answers, policy.logits.detach()).cumsum(1).clamp(0, 1)
    return torch.binomial(torch.full_like(value, float(k)), value, generator=chance) / k


def agreement(
    policy: ChainPolicy, questions: torch.Tensor, answers: torch.Tensor, chance: torch.Generator
) -> dict[str, float]:
    """Return how often a hard label is the truth, every step so far right, and how often it is positive."""
    sound = (answers == sums(questions)).cumprod(1) > 0
    positive = {k: rollouts(policy, questions, answers, k, chance) > 0 for k in ROLLOUTS}
    shares = {f"right, {k}": float((label == sound).double().mean()) for k, label in positive.items()}
    return shares | {"sound": float(sound.double().mean())}


# ---------------------------------------------------------------------- models


def fitted(weights: list[torch.Tensor], loss: Callable[[], torch.Tensor], rate: float) -> None:
    """Take PASSES steps of Adam on all answers at once."""
    optimiser = torch.optim.Adam(weights, lr=rate)
    for _ in range(PASSES):
        optimiser.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        optimiser.step()


def table_of_steps(questions: torch.Tensor, answers: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return the chance of each step, [10, 10, 10], from a label for each step."""
    logits, cells = constant_logits(label.mean()), places(questions, answers)
    fitted([logits], lambda: binary_cross_entropy(logits[cells].sigmoid(), label), RATE)
    return logits.detach().sigmoid()


def table_of_outcomes(questions: torch.Tensor, answers: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the chance of each step, [10, 10, 10], from a label for each answer."""
    logits, cells = constant_logits(right.mean() ** (1 / STEPS)), places(questions, answers)
    fitted([logits], lambda: binary_cross_entropy(logits[cells].sigmoid().prod(1), right), RATE)
    return logits.detach().sigmoid()


def table_of_prefixes(questions: torch.Tensor, answers: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return the chance of each step, [10, 10, 10], from a label after each step for all steps so far."""
    logits, cells = constant_logits(label[:, -1].mean() ** (1 / STEPS)), places(questions, answers)
    rest = nn.Parameter(torch.full((STEPS,), 2.0))

    def loss() -> torch.Tensor:
        return binary_cross_entropy(logits[cells].sigmoid().cumprod(1) * rest.sigmoid(), label)

    fitted([logits, rest], loss, RATE)
    return logits.detach().sigmoid()


def constant_logits(chance: torch.Tensor) -> nn.Parameter:
    """Return logits [10, 10, 10] that all have this chance."""
    return nn.Parameter(chance.logit().expand(10, 10, 10).clone())


def network(questions: torch.Tensor, answers: torch.Tensor, right: torch.Tensor, seed: int) -> Judge:
    """Return the score by a network of one hidden layer that learns whether an answer is right."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10 * (LONGEST + STEPS), 64), nn.ReLU(), nn.Linear(64, 1))

    def score(questions: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        digits = torch.cat([questions[:, :LONGEST], answers], 1)
        logits: torch.Tensor = model(one_hot(digits, 10).flatten(1).float())
        return logits[:, 0]

    fitted(
        list(model.parameters()),
        lambda: binary_cross_entropy(score(questions, answers).sigmoid(), right),
        RATE / 30,
    )
    return torch.no_grad()(score)


def product(chance: torch.Tensor) -> Judge:
    """Return the score that is the product of the steps' chances."""
    return lambda questions, answers: chance[places(questions, answers)].prod(1)


def least(chance: torch.Tensor) -> Judge:
    """Return the score that is the least of the steps' chances."""
    return lambda questions, answers: chance[places(questions, answers)].amin(1)


def votes(last: torch.Tensor) -> torch.Tensor:
    """Return for each answer how many answers end in the same sum. last: [questions, n]."""
    return one_hot(last, 10).sum(1).gather(1, last).float()


def accuracy(score: torch.Tensor, right: torch.Tensor) -> float:
    """Return how often the answer of the highest score is right; both [questions, n]."""
    return float(right.gather(1, score.argmax(1, keepdim=True)).double().mean())


# ---------------------------------------------------------------------- the rules


def at_64(figures: Figures, name: str) -> float:
    """Return how often the best of 64 answers by a score is right, for the strong policy."""
    return float(figures[STRONG][name][-1])


def lead(figures: Figures, labels: str) -> float:
    """Return the lead of the PRM over the better ORM, which has as many answers, or as many labels."""
    return at_64(figures, "PRM") - max(at_64(figures, kind + labels) for kind in ("ORM", "plain ORM"))


def surplus(figures: Figures, name: str, share: float = 0.9) -> float:
    """Return the gain by a score over a single answer, less a share of the gain by the PRM."""
    one = float(figures[STRONG]["PRM"][0])
    return at_64(figures, name) - one - share * (at_64(figures, "PRM") - one)


RULES = {
    "rerank": VerdictRule(
        "right answers of the best of 64, PRM minus the better ORM, 512 labelled answers each",
        lambda figures: lead(figures, ""),
        margin=0.03,
    ),
    "rerank_labels": VerdictRule(
        "right answers of the best of 64, PRM minus the better ORM, 2560 labels each",
        lambda figures: lead(figures, ", as many labels"),
        margin=0.03,
    ),
    "monte_carlo_labels": VerdictRule(
        "right answers gained by the best of 64, soft labels of 16 rollouts minus 0.9 of what the PRM gains",
        lambda figures: surplus(figures, "soft, 16"),
    ),
}


# ---------------------------------------------------------------------- table and picture


def table(results: Results) -> str:
    """Return the share of right answers among the best of 64 and of 8, and how right hard labels are."""
    runs, rows = results.runs, []
    for name in runs[0][STRONG]:
        if name != "labels":
            cells = [spread([run[STRONG][name][SIZES.index(n)] for run in runs], ".1%") for n in (1, 8, 64)]
            weaker = [spread([run[f"{skill:g}"][name][-1] for run in runs], ".1%") for skill in SKILLS[1:]]
            rows.append([name, *cells, *weaker])
    head = ("chosen by", "of 1", "of 8", "of 64", "of 64, skill 3")
    labels = []
    for k in ROLLOUTS:
        columns = [[run[f"{skill:g}"]["labels"][f"right, {k}"] for run in runs] for skill in SKILLS]
        labels.append([str(k), *(spread(column, ".1%") for column in columns)])
    sound = [spread([run[f"{skill:g}"]["labels"]["sound"] for run in runs], ".1%") for skill in SKILLS]
    labels.append(["prefixes that are right", *sound])
    return f"{markdown(head, rows)}\n\n{markdown(('rollouts', 'skill 4', 'skill 3'), labels)}"


def draw(results: Results, figure: Any) -> None:
    """Draw the share of right answers by n for three families of scores."""
    panels = figure.subplots(1, 3, sharey=True)
    families = {
        "512 labelled answers": ("any", "PRM", "PRM, least step", "ORM", "plain ORM", "majority"),
        "2560 labels": ("any", "PRM", "ORM, as many labels", "plain ORM, as many labels", "majority"),
        "labels by rollouts": ("any", "PRM", "soft, 1", "soft, 16", "hard, 4", "hard, 64"),
    }
    colors = {name: f"C{n}" for n, name in enumerate(("PRM", "PRM, least step", "ORM", "plain ORM"))}
    colors |= {"any": "#888888", "majority": "C4", "soft, 1": "C5", "soft, 16": "C6", "hard, 4": "C8"}
    for axes, (title, names) in zip(panels, families.items(), strict=True):
        for name in names:
            color = colors.get(name.removesuffix(", as many labels"), "C9")
            curve(axes, SIZES, [run[STRONG][name] for run in results.runs], name, color)
        axes.set(title=title, xlabel="answers to choose from", xscale="log", ylim=(0, 1))
        axes.set_xticks(SIZES, [str(n) for n in SIZES], minor=False)
        axes.legend(frameon=False, loc="upper left", fontsize="small")
    panels[0].set_ylabel("right answers")


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(13.5, 4.2))
