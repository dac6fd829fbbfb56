"""Groups of earlier updates that are trained on again, with their age corrected and without.

GRPO learns gold from few new answers: 4 groups of 8 an update. Arms add groups of the last updates, drawn by
the product's buffer, to the same single step. The correction is the ratio of the policy to the one that
sampled each token, at most 5. Rates were chosen for each arm on seeds 100 and 101, by the mean of gold.
"""

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from posttrain.curriculum.replay_buffer import Group, ReplayBuffer
from posttrain.methods.build import build
from posttrain.types import Batch, Trajectory
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
from posttrain_study.claims.online import PrefixPolicy, Routine, log_probs, reference, sample
from posttrain_study.claims.tiny import LONGEST, gold_of, mean_of

UPDATES, EVERY, GROUPS, SIZE = 60, 2, 4, 8
WIDTH = 2 + LONGEST
CORRECTION = {"correction": {"name": "token_truncated", "weight_cap": 5.0}}


@dataclass(frozen=True)
class ReplayArm:
    """Groups that are replayed in an update, their age at most, and whether it is corrected."""

    replayed: int
    max_lag: int
    corrected: bool
    lr: float

    @property
    def name(self) -> str:
        """Key of the arm in the figures."""
        if not self.replayed:
            return "no replay"
        kind = "corrected" if self.corrected else "as they are"
        return f"{self.replayed} groups of {self.max_lag} updates, {kind}"


NONE = ReplayArm(0, 1, corrected=True, lr=3e-2)
FEW, MANY = ReplayArm(4, 4, corrected=True, lr=3e-2), ReplayArm(12, 16, corrected=True, lr=3e-2)
RAW_FEW, RAW_MANY = ReplayArm(4, 4, corrected=False, lr=1e-2), ReplayArm(12, 16, corrected=False, lr=1e-2)
ARMS = (NONE, FEW, MANY, RAW_FEW, RAW_MANY)
COLORS = ("black", "#8fb4e3", "#1f3a68", "#e7a3a5", "#7d1f22")


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train every arm from the same reference."""
    paths = {}
    for arm in ARMS:
        report(f"replay, seed {seed}, {arm.name}")
        paths[arm.name] = train(arm, seed)
    return {"paths": paths}


def train(arm: ReplayArm, seed: int) -> list[float]:
    """Return the expected gold each EVERY updates."""
    method = build("grpo", CORRECTION if arm.corrected else {}, horizon=LONGEST)
    gold, policy = gold_of(seed), PrefixPolicy(reference(seed), method, arm.lr)
    buffer, chance = ReplayBuffer(max_lag=arm.max_lag, seed=seed), torch.Generator().manual_seed(5000 + seed)
    path = []
    for update in range(UPDATES + 1):
        logp = log_probs(policy.network)
        if update % EVERY == 0:
            path.append(mean_of(gold, logp))
        if update < UPDATES:
            new = groups_of(policy, sample(logp, gold, Routine(0, GROUPS, SIZE), chance), update)
            rows = joined([*new, *buffer.draw(arm.replayed, update)])
            buffer.add(update, new)
            with torch.no_grad():
                rows = replace(rows, logp_old=policy.outputs(rows).logp) if arm.corrected else rows
            policy.step(method.prepare(rows))
    return path


@torch.no_grad()
def groups_of(policy: PrefixPolicy, batch: Batch, update: int) -> list[Group]:
    """Return sampled rows as groups, with the log-probabilities of the policy that sampled them."""
    logp, groups = policy.outputs(batch).logp.double(), dict[int, Group]()
    for n, (group, end) in enumerate(zip(batch.group.tolist(), batch.length.tolist(), strict=True)):
        drawn_logp = logp[n, :end].tolist()
        trajectory = Trajectory(
            tokens=batch.tokens[n, :end].tolist(),
            sampled=batch.mask[n, :end].tolist(),
            logp_gen=drawn_logp,
            logp_policy=drawn_logp,
            version=[update] * end,
            reward=batch.reward[n, :end].tolist(),
        )
        groups.setdefault(group, []).append((trajectory, ()))
    return list(groups.values())


def joined(groups: list[Group]) -> Batch:
    """Return the rows of groups as a batch, as wide as the policy reads."""
    numbers = [n for n, group in enumerate(groups) for _ in group]
    batch = Batch.of([row for group in groups for row, _ in group], numbers)
    missing = (0, WIDTH - batch.tokens.shape[1])
    return replace(
        batch,
        tokens=pad(batch.tokens, missing),
        mask=pad(batch.mask, missing),
        reward=pad(batch.reward, missing),
        logp_gen=pad(batch.logp_gen, missing),
        logp_policy=pad(batch.logp_policy, missing),
        version=pad(batch.version, missing),
    )


# ---------------------------------------------------------------------- rules, table and picture


def mean_gold(figures: Figures, arm: ReplayArm) -> float:
    """Return the mean of gold over the run, which is higher the sooner it rises."""
    return statistics.fmean(figures["paths"][arm.name][1:])


RULES = {
    "replay": VerdictRule(
        "gold, the mean over all updates, 4 corrected groups replayed an update minus none",
        lambda figures: mean_gold(figures, FEW) - mean_gold(figures, NONE),
        margin=0.03,
    ),
    "replay_correction": VerdictRule(
        "gold, the mean over all updates, 12 groups of 16 updates corrected minus the same as they are",
        lambda figures: mean_gold(figures, MANY) - mean_gold(figures, RAW_MANY),
        margin=0.03,
    ),
}


def table(results: Results) -> str:
    """Return the table of all arms: means, and ranges over seeds."""
    rows = []
    for arm in ARMS:
        ends = [run["paths"][arm.name][-1] for run in results.runs]
        means = spread([mean_gold(run, arm) for run in results.runs])
        rows.append([arm.name, f"{arm.lr:g}", means, spread(ends)])
    return markdown(("replayed an update", "rate", "gold, mean over updates", "gold at the end"), rows)


def draw(results: Results, figure: Any) -> None:
    """Draw gold by update: without replay, and with corrected groups or groups as they are."""
    panels = figure.subplots(1, 2, sharey=True)
    parts = {"corrected": (NONE, FEW, MANY), "as they are": (NONE, RAW_FEW, RAW_MANY)}
    for panel, (title, arms) in zip(panels, parts.items(), strict=True):
        for arm in arms:
            label, color = arm.name.rpartition(",")[0] or arm.name, COLORS[ARMS.index(arm)]
            runs = [run["paths"][arm.name] for run in results.runs]
            curve(panel, range(0, UPDATES + 1, EVERY), runs, label, color)
        panel.set(title=title, xlabel="update")
        panel.legend(frameon=False)
    panels[0].set_ylabel("expected gold")


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(10.0, 4.0))
