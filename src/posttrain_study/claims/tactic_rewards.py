"""A reward for each tactic that a prover accepts against one for the proof alone, and what it overpays.

The world is that of sequents.py, and an attempt is a proof sampled whole (proof_attempts.py): a rule is a
tactic. From the same start, on the same number of attempts, tactics are paid in several ways:

    proof                  1 for the last tactic of a proof
    tactics                1 for each accepted tactic, -1 for a refused one, summed over the attempt
    tactics one by one     the same, each credited with its own reward alone (γ = 0)
    closed goals           1 for each goal that closes, summed
    fewer goals            the fall in the number of open goals, summed: 1 for a proof, else 1 - open goals
    still provable         1 if all goals that a tactic leaves are provable, else -1, one by one; exact

Rows whose rewards are summed are compared within the group of a theorem (GRPO), tactics that are credited one
by one over the whole update (REINFORCE++ without a KL).
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from posttrain.methods.build import build
from posttrain.types import Method
from posttrain_prove.tasks.drawn import Split
from posttrain_prove.tasks.propositional import Propositional, propositional
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
from posttrain_study.claims.proof_attempts import (
    LARGEST,
    LONGEST,
    ProofAttempt,
    ProofPolicy,
    accepted,
    outcome,
    start_of,
)
from posttrain_study.claims.sequents import Sequent, TreeLearner, is_provable, spelt, theorem_of

GROUPS, SIZE, UPDATES, EVERY, SAMPLES = 16, 8, 40, 10, 4
THEOREMS = Propositional(low=6, high=14, train=256, held_out=96)
Pay = Callable[[ProofAttempt], list[float]]
"""Return the reward of each tactic of an attempt."""


def tactics(attempt: ProofAttempt) -> list[float]:
    return [1.0] * (len(attempt.rules) - attempt.refused) + [-1.0] * attempt.refused


def closed_goals(attempt: ProofAttempt) -> list[float]:
    return list(map(float, attempt.closed))


def fewer_goals(attempt: ProofAttempt) -> list[float]:
    falls = [1.0 - opened for opened in attempt.opened]
    return [*falls[:-1], 0.0] if attempt.refused else falls


def still_provable(attempt: ProofAttempt) -> list[float]:
    pairs = zip(attempt.sequents, attempt.rules, strict=True)
    premises = [accepted(sequent, rule) for sequent, rule in pairs]
    return [1.0 if goals is not None and all(map(is_provable, goals)) else -1.0 for goals in premises]


@dataclass(frozen=True)
class RewardArm:
    """How tactics are paid; lr: of AdamW."""

    pay: Pay
    lr: float
    one_by_one: bool = False

    @property
    def method(self) -> Method:
        if self.one_by_one:
            return build("reinforce_pp", {"gamma": 0.0, "kl_in_reward": 0.0}, horizon=LONGEST)
        return build("grpo", {}, horizon=LONGEST)


ARMS = {
    "proof": RewardArm(outcome, 1e-3),
    "tactics": RewardArm(tactics, 1e-3),
    "tactics one by one": RewardArm(tactics, 1e-3, one_by_one=True),
    "closed goals": RewardArm(closed_goals, 1e-3),
    "fewer goals": RewardArm(fewer_goals, 1e-3),
    "still provable": RewardArm(still_provable, 1e-3, one_by_one=True),
}


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train every arm from the same start."""
    start, tasks, held_out = start_of(seed), theorems("train", seed), theorems("held_out", seed)
    figures: Figures = {}
    for name, arm in ARMS.items():
        report(f"tactic_rewards, seed {seed}, {name}")
        figures[name] = train(arm, seed, start, tasks, held_out)
    return figures


def theorems(split: Split, seed: int) -> list[Sequent]:
    """Return the theorems of a split that are not too large."""
    sequents = map(theorem_of, propositional(split, replace(THEOREMS, seed=1000 + seed)))
    return [sequent for sequent in sequents if len(spelt(sequent)) <= LARGEST]


def train(
    arm: RewardArm, seed: int, start: TreeLearner, tasks: Sequence[Sequent], held_out: Sequence[Sequent]
) -> dict[str, Any]:
    """Train, and return what held-out attempts are like by the number of attempts trained on."""
    draw = torch.Generator().manual_seed(seed)
    policy = ProofPolicy(start, arm.method, arm.lr)
    curves: dict[str, list[float]] = {}
    for update in range(UPDATES + 1):
        if update % EVERY == 0:
            sampler = torch.Generator().manual_seed(seed)
            attempts = policy.attempts([theorem for theorem in held_out for _ in range(SAMPLES)], sampler)
            for key, value in quality(attempts, arm.pay).items():
                curves.setdefault(key, []).append(value)
        if update < UPDATES:
            picked = torch.randint(len(tasks), (GROUPS,), generator=draw).tolist()
            attempts = policy.attempts([tasks[n] for n in picked for _ in range(SIZE)], draw)
            policy.learn_from(attempts, list(map(arm.pay, attempts)), SIZE)
    return curves


def quality(attempts: Sequence[ProofAttempt], pay: Pay) -> dict[str, float]:
    """Return the share that is proved, refused or unfinished, and what proofs and other attempts are paid."""
    paid = [sum(pay(attempt)) for attempt in attempts]
    by_end = [
        [x for x, attempt in zip(paid, attempts, strict=True) if attempt.proved is proved]
        for proved in (True, False)
    ]
    repeated = sum(len(attempt.sequents) - len(set(attempt.sequents)) for attempt in attempts)
    return {
        "proved": statistics.fmean(attempt.proved for attempt in attempts),
        "refused": statistics.fmean(attempt.refused for attempt in attempts),
        "rules": statistics.fmean(len(attempt.rules) for attempt in attempts),
        "repeated": repeated / sum(len(attempt.rules) for attempt in attempts),
        "paid": statistics.fmean(paid),
        "paid to proofs": statistics.fmean(by_end[0] or [0.0]),
        "paid to others": statistics.fmean(by_end[1] or [0.0]),
    }


# ---------------------------------------------------------------------- rules, table and picture


TRAINED = UPDATES * GROUPS * SIZE
RULES = {
    "tactic_rewards": VerdictRule(
        f"share of held-out attempts that prove, after {TRAINED:,} attempts, tactics one by one minus proof",
        lambda figures: float(figures["tactics one by one"]["proved"][-1] - figures["proof"]["proved"][-1]),
        0.05,
    ),
    "tactic_hacking": VerdictRule(
        f"share of held-out attempts that prove, paid for tactics, {TRAINED:,} attempts on minus the start",
        lambda figures: float(figures["tactics"]["proved"][-1] - figures["tactics"]["proved"][0]),
        0.05,
    ),
}


def table(results: Results) -> str:
    """Return what attempts are like at the start and at the end of each arm."""
    kinds = {"proved": ".0%", "refused": ".0%", "rules": ".1f", "repeated": ".0%"}
    rows = []
    for place, arms in ((0, ["proof"]), (-1, list(ARMS))):
        for arm in arms:
            runs = [run[arm] for run in results.runs]
            cells = [spread([run[key][place] for run in runs], form) for key, form in kinds.items()]
            pays = [
                statistics.fmean(run[f"paid to {who}"][place] for run in runs) for who in ("proofs", "others")
            ]
            rows.append(
                [arm if place else "the start", *cells, *(f"{paid:.1f}" if place else "" for paid in pays)]
            )
    head = ("paid", "proved", "ended by an error", "tactics of an attempt", "of them on a goal met before")
    return markdown((*head, "pay of a proof", "of another attempt"), rows)


def draw(results: Results, figure: Any) -> None:
    """Draw the gain in the share proved by attempts, and the tactics of an attempt."""
    gains, lengths = figure.subplots(1, 2)
    grid = [n * EVERY * GROUPS * SIZE for n in range(UPDATES // EVERY + 1)]
    for n, arm in enumerate(ARMS):
        runs = [run[arm] for run in results.runs]
        curve(
            gains, grid, [[100 * (x - run["proved"][0]) for x in run["proved"]] for run in runs], arm, f"C{n}"
        )
        curve(lengths, grid, [run["rules"] for run in runs], arm, f"C{n}")
    gains.set(xlabel="attempts trained on", ylabel="held-out attempts that prove, points gained")
    lengths.set(
        xlabel="attempts trained on",
        ylabel=f"tactics of an attempt ({LONGEST} at most)",
        ylim=(0, LONGEST + 0.5),
    )
    lengths.legend(frameon=False, loc="center gains", bbox_to_anchor=(1.0, 0.5))


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(12.0, 4.2))
