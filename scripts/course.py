"""Draw the pictures of docs/course/ with the functions that the pages explain.

    python scripts/course.py [NAME ...] [--out DIR]

Nothing is sampled, so the pictures are the same each time: losses come from posttrain.math, values from
the decision problems of posttrain_study.classic, bias and variance from the models of posttrain_study.truth,
whose answers can all be enumerated. A test compares the files with what this program draws.
"""

import argparse
import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from posttrain.learner.learner import Learner, Steps
from posttrain.learner.optim import Optim
from posttrain.math import advantages, kl, pass_at_k, preference, returns, surrogate
from posttrain.methods.build import build
from posttrain.methods.table import LEARNED, METHODS, RLOO
from posttrain_study.claims.picture import save
from posttrain_study.classic import mdp
from posttrain_study.classic.maze import LAYOUT, MOVES, maze
from posttrain_study.truth import baselines, exact, table
from posttrain_study.truth.world import World, short, uneven

OUT = Path(__file__).resolve().parent.parent / "docs" / "course"
EIGHT = (0, 0, 0, 3, 3, 5, 8, 8)
"""Answers of `uneven` that the picture of an update is trained on: one draw of its policy."""
MEASURED = (
    *("reinforce", "reinforce_critic", "rloo", "remax", "opo", "reinforce_pp", "a2c", "trpo_gae", "ppo"),
    *("grpo", "dr_grpo", "dapo", "max_rl", "pass_at_k", "expert_iteration"),
)
"""Methods in the picture of bias and variance."""
BLUE, ORANGE, GREEN, RED, GREY = "tab:blue", "tab:orange", "tab:green", "tab:red", "0.6"
FAMILIES = {
    "PolicyGradient": ("policy gradient", BLUE),
    "ActorCritic": ("actor-critic", ORANGE),
    "SoftQ": ("Q-learning", RED),
    "Evolution": ("evolution", "tab:cyan"),
    "Imitation": ("imitation", GREEN),
    "WeightedImitation": ("imitation", GREEN),
    "ExpertIteration": ("imitation", GREEN),
    "Distillation": ("distillation", "#7a7a00"),
    "Preference": ("preferences", "tab:purple"),
    "Unpaired": ("preferences", "tab:purple"),
    "PairwiseReward": ("reward model", "tab:brown"),
    "ListwiseReward": ("reward model", "tab:brown"),
    "PointwiseReward": ("reward model", "tab:brown"),
}
"""Name and colour of a method's family by its class."""


def draw_maze(figure: Any) -> None:
    """V and the policy in the 2×3 maze: a uniform policy, 40 steps along the exact gradient, the optimum."""
    problem, logits = maze(), np.zeros((6, 4))
    policies = {"uniform": mdp.softmax(logits)}
    for _ in range(40):
        logits = logits + 0.5 * mdp.objective_gradient(problem, logits)
    policies["40 steps along ∇J"] = mdp.softmax(logits)
    policies["the optimum"] = mdp.deterministic(mdp.policy_iteration(problem).action, problem.actions)
    columns = len(LAYOUT[0])
    for panel, (name, policy) in enumerate(policies.items()):
        axes, value = figure.add_subplot(1, 3, panel + 1), mdp.value(problem, policy)
        shown = np.where(problem.terminal, np.nan, value).reshape(-1, columns)
        axes.imshow(shown, cmap="RdYlGn", vmin=-10, vmax=10)
        axes.set(
            title=f"{name}: J = {mdp.objective(problem, policy):.2f}".replace("-", "−"), xticks=[], yticks=[]
        )
        for s, cell in enumerate("".join(LAYOUT)):
            row, column = divmod(s, columns)
            if cell in "GX":
                axes.text(column, row, {"G": "goal\n+10", "X": "trap\n−10"}[cell], ha="center", va="center")
                continue
            axes.text(
                column, row + 0.4, f"V = {value[s]:.1f}".replace("-", "−"), ha="center", va="center", size=8
            )
            for (down, right), share in zip(MOVES.values(), policy[s], strict=True):
                if share > 0.02:
                    end = {"width": 0.012, "head_width": 0.08, "head_length": 0.07, "color": "black"}
                    axes.arrow(column, row - 0.08, 0.24 * share * right, 0.24 * share * down, **end)


def draw_baselines(figure: Any) -> None:
    """The variance of one answer's gradient by baseline, for two policies; the mean is ∇J in every bar."""
    world = short()
    panels = {
        "four answers, all likely": baselines.baselines(world),
        "right 9 times in 10": baselines.certain(world),
    }
    for panel, (title, rows) in enumerate(panels.items()):
        axes, variances = figure.add_subplot(1, 2, panel + 1), {row.name: row.number for row in rows}
        names = list(variances)[::-1]
        colors = [GREY if name == "none" else BLUE for name in names]
        axes.barh(names, [variances[name] for name in names], color=colors)
        axes.set(title=title, xlabel="variance")
        if panel:
            axes.set(xscale="log")


def draw_estimators(figure: Any) -> None:
    """Direction lost and variance of methods on fresh samples, in groups of four, from `posttrain truth`."""
    numbers: dict[str, dict[str, float]] = {name: {} for name in MEASURED}
    horizon = short().length
    for row in table.measure_methods({name: build(METHODS[name], {}, horizon=horizon) for name in MEASURED}):
        numbers[row.name][row.quantity] = row.number
    axes, places = figure.add_subplot(), dict[tuple[float, float], list[str]]()
    for name in MEASURED:
        place = round(numbers[name]["sine"], 3), round(numbers[name]["variance"], 1)
        places.setdefault(place, []).append(name)
        axes.plot(*place, "o", color=FAMILIES[type(METHODS[name].method).__name__][1])
    for place, together in places.items():
        near = [y for x, y in places if abs(x - place[0]) < 0.005 and 0 < abs(y - place[1]) < 2]
        side = 1 if place[0] < 0.06 else -1
        axes.annotate(
            ", ".join(together),
            place,
            (6 * side, 4 * sum(1 if y < place[1] else -1 for y in near)),  # away from the names nearby
            textcoords="offset points",
            size=8,
            va="center",
            ha="left" if side > 0 else "right",
        )
    axes.set(
        xlabel="bias that no learning rate mends: sine of the angle between E[g] and ∇J",
        ylabel="variance of one answer, scaled to ∇J",
        ylim=(0, None),
    )


def draw_gae(figure: Any) -> None:
    """Bias and noise of GAE by λ with the true V and another policy's, and what a reward at the end pays."""
    world = short()
    J = exact.gradient(world)
    critics = {"the true V": (exact.state_values(world), GREEN)}
    critics["another policy's V"] = (exact.state_values(world.with_policy(world.old)), ORANGE)
    lams = [i / 20 for i in range(21)]
    left, middle, right = (figure.add_subplot(1, 3, i) for i in (1, 2, 3))
    for name, (V, color) in critics.items():
        methods = [replace(LEARNED, estimator=partial(returns.gae, lam=lam)) for lam in lams]
        estimates = [world.estimate(method, 1, value=V) for method in methods]
        left.plot(lams, [float((e.mean - J).norm() / J.norm()) for e in estimates], color=color, label=name)
        middle.plot(lams, [e.variance for e in estimates], color=color, label=name)
    left.set(xlabel="λ", title="bias: ‖E[g] − ∇J‖ / ‖∇J‖")
    middle.set(xlabel="λ", title="variance", ylim=(0, None))
    left.legend()
    T = 20
    reward = torch.zeros(1, T)
    reward[0, -1] = 1.0
    path = returns.Path(reward, torch.ones(1, T, dtype=torch.bool), torch.zeros(1, T))
    for lam, color in ((1.0, BLUE), (0.95, GREEN), (0.8, ORANGE), (0.0, RED)):
        right.plot(
            range(1, T + 1), returns.gae(path, lam=lam)[0][0], color=color, label=f"λ = {lam:g}", marker="."
        )
    right.set(xlabel="token", title="A of a reward 1 at the end, V = 0")
    right.legend(loc=(0.03, 0.58), fontsize=8)


def draw_clip(figure: Any) -> None:
    """The clipped surrogate as a function of the ratio, for a good and a bad token."""
    ratio = torch.linspace(0.0, 2.0, 51)[None].clamp(min=1e-6)
    for panel, (A, name) in enumerate(((1.0, "A = +1: a good token"), (-1.0, "A = −1: a bad token"))):
        axes, advantage = figure.add_subplot(1, 2, panel + 1), torch.full_like(ratio, A)
        axes.axvspan(0.8, 1.2, color="0.93", lw=0)
        axes.plot(ratio[0], -surrogate.unclipped(ratio.log(), advantage)[0], color=GREY, ls="--", label="r A")
        bounded = -surrogate.clipped(ratio.log(), advantage)[0]
        axes.plot(ratio[0], bounded, color=BLUE, lw=2, label="min(r A, clip(r) A)")
        axes.plot(1.0, A, "o", color=RED, label="where the update begins")
        axes.set(title=name, xlabel="ratio r = π/π_old", ylabel="objective" if not panel else "")
        axes.legend(loc="lower right" if A > 0 else "lower left", fontsize=8)


def clipped_update(world: World) -> torch.Tensor:
    """Run one update of eight clipped steps by the learner on EIGHT; return the change of the parameters."""
    method = replace(RLOO, surrogate=surrogate.clipped)
    model = copy.deepcopy(world.policy.model)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optim, steps = Optim(lr=0.01), Steps(epochs=8)
    learner = Learner(
        model, method, optim=optim, steps=steps, temperature=world.temperature, total_steps=steps.epochs
    )
    learner.update(world.batch(EIGHT))
    return nn.utils.parameters_to_vector(model.parameters()).detach() - before


def draw_update(figure: Any) -> None:
    """Objectives on the sampled answers along the line from θ_old through an update, and the gain of J."""
    world, rows = uneven(), torch.tensor(EIGHT)
    step, old, mask = clipped_update(world), world.cached_logp(world.policy), world.mask[rows]
    credit = advantages.leave_one_out(world.returns[rows], torch.zeros(len(EIGHT), dtype=torch.long))
    A, J = credit[:, None].expand(mask.shape), float(exact.objective(world).detach())

    def objective(loss: Callable[..., torch.Tensor], log_ratio: torch.Tensor) -> float:
        return float((mask * -loss(log_ratio, A)).sum() - (mask * A).sum()) / len(EIGHT)

    shares = [i / 20 for i in range(61)]
    lines: dict[str, list[float]] = {"unclipped": [], "clipped": [], "penalised": [], "J": [], "KL": []}
    for share in shares:
        after = world.with_policy(world.policy.shifted(step * share))
        log_ratio = (after.cached_logp(after.policy) - old)[rows]
        distance = float(exact.state_divergence(after, after.old, after.old, after.policy).detach())
        lines["unclipped"].append(objective(surrogate.unclipped, log_ratio))
        lines["clipped"].append(objective(surrogate.clipped, log_ratio))
        lines["penalised"].append(lines["unclipped"][-1] - distance)
        lines["J"].append(float(exact.objective(after).detach()) - J)
        lines["KL"].append(distance)
    axes = figure.add_subplot()
    for name, label, color, width in (
        ("unclipped", "r A, unclipped", GREY, 2),
        ("clipped", "r A, clipped at 0.8 and 1.2", BLUE, 2),
        ("penalised", "r A − 1 · KL(π_old ‖ π)", ORANGE, 2),
        ("J", "J(θ) − J(θ_old), over all answers", GREEN, 3),
        ("KL", "KL(π_old ‖ π)", RED, 1),
    ):
        axes.plot(shares, lines[name], color=color, lw=width, label=label, ls=":" if name == "KL" else "-")
    axes.axvline(1.0, color="black", lw=0.8, ls="--")
    axes.set(xlabel="share of the update: 0 is θ_old, 1 where the update ended", ylabel="gain, or nats")
    axes.legend(fontsize=8)


def draw_kl(figure: Any) -> None:
    """k1, k2 and k3 of one token, and their mean and deviation over all tokens as the policy moves away."""
    left, middle, right = (figure.add_subplot(1, 3, i) for i in (1, 2, 3))
    estimators = {"k1": (kl.k1, BLUE), "k2": (kl.k2, ORANGE), "k3": (kl.k3, GREEN)}
    delta = torch.linspace(-2.5, 2.5, 51)[None]
    for name, (function, color) in estimators.items():
        left.plot(delta[0], function(delta, torch.zeros_like(delta))[0], color=color, label=name)
    left.set(xlabel="log π − log π_ref of the token", title="value", ylim=(-2.5, 5))
    left.legend()
    scores = torch.tensor([2.0, 1.0, 0.5, 0.2, 0.0, 0.0, -0.5, -1.0], dtype=torch.float64)
    reference = torch.zeros(8, dtype=torch.float64).log_softmax(0)
    scales = torch.linspace(0.05, 2.5, 40, dtype=torch.float64)
    truth = [float(kl.exact((s * scores).log_softmax(0), reference)) for s in scales]
    middle.plot(truth, truth, color="black", lw=1, ls="--", label="KL")
    for name, (function, color) in estimators.items():
        means, deviations = [], []
        for scale in scales:
            logp = (scale * scores).log_softmax(0)
            values, p = function(logp[None], reference[None])[0], logp.exp()
            means.append(float(p @ values))
            deviations.append(float(p @ (values - p @ values).square()) ** 0.5)
        middle.plot(truth, means, color=color, label=name, alpha=0.8)
        right.plot(truth, deviations, color=color, label=name)
    middle.set(xlabel="KL(π ‖ π_ref) in nats", title="mean over tokens of π")
    right.set(xlabel="KL(π ‖ π_ref) in nats", title="standard deviation", ylim=(0, 4))
    middle.legend()


def draw_margin(figure: Any) -> None:
    """Losses of a pair by its margin, and how hard each pushes: DPO, IPO, SLiC's hinge, conservative DPO."""
    beta = 0.1
    losses: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
        "DPO": (preference.logistic, BLUE),
        "IPO": (preference.squared, ORANGE),
        "SLiC": (preference.hinge, GREEN),
        "conservative DPO": (preference.smoothed, RED),
    }
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    for name, (loss, color) in losses.items():
        h = torch.linspace(-20, 40, 61, requires_grad=True)
        values = loss(h, beta)
        [slope] = torch.autograd.grad(values.sum(), h)
        start = loss(torch.zeros(1), beta)
        unit = -torch.autograd.grad(loss(zero := torch.zeros(1, requires_grad=True), beta).sum(), zero)[0]
        left.plot(h.detach(), (values / start).detach(), color=color, label=name)
        right.plot(h.detach(), -slope / unit, color=color, label=name)
    left.set(
        xlabel="margin h in nats, β = 0.1", title="loss, as a share of the loss at h = 0", ylim=(-0.1, 3)
    )
    right.set(xlabel="margin h in nats, β = 0.1", title="push on h, as a share of that at h = 0")
    right.axhline(0, color="black", lw=0.8)
    left.legend()


def draw_credit(figure: Any) -> None:
    """By the chance p of success: an answer's push on log p/(1 − p), and a success's A, in groups of 8."""
    K = 8
    group = torch.zeros(K, dtype=torch.long)
    functions: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
        "REINFORCE": (advantages.raw, GREY),
        "RLOO": (advantages.leave_one_out, BLUE),
        "GRPO": (advantages.normalised, ORANGE),
        "MaxRL": (advantages.over_mean, GREEN),
        "pass@4": (partial(pass_at_k.pass_at_k, k=4), RED),
    }
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    chances = [0.01, 0.02, *(i / 40 for i in range(1, 40)), 0.98, 0.99]
    success = torch.arange(K)[None, :] < torch.arange(K + 1)[:, None]  # [n, i]: n of the group are right
    for name, (credit, color) in functions.items():
        A = torch.stack([credit(row.double(), group) for row in success])
        pushes, weights = [], []
        for p in chances:
            binomial = [math.comb(K, n) * p**n * (1 - p) ** (K - n) for n in range(K + 1)]
            share = torch.tensor(binomial, dtype=torch.float64)
            pushes.append(float(share @ (A * (success.double() - p)).sum(1)) / K)
            weights.append(float(share @ (A * success).sum(1)) / (K * p))
        for axes, heights in ((left, pushes), (right, weights)):
            axes.plot(chances, heights, color=color, label=name, lw=4 if credit is advantages.raw else 1.6)
    left.set(xlabel="p, the chance of success", title="expected push on log p/(1 − p), an answer")
    right.set(xlabel="p, the chance of success", title="mean A of a success", ylim=(0, 5))
    left.legend()


def draw_map(figure: Any) -> None:
    """Every line of the table of methods by what it learns from and which models it keeps."""
    edges = [0.0, 1.0, 2.05, 3.35, 7.35, 8.3]
    kinds = [
        "text, answers",
        "pairs, rankings",
        "labels, steps",
        "its own answers, and a verifier",
        "a teacher",
    ]
    of_data = {"text": 0, "answers": 0, "rankings": 1, "labels": 2, "steps": 2}
    models = ["policy", "policy, reference", "policy, critic", "policy, critic, reference", "a reward head"]
    cells: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for name, line in METHODS.items():
        needs = line.method.needs
        row = 4 if "head" in needs else ("logp_ref" in needs) + 2 * ("value" in needs)
        column = 4 if "teacher" in line.method.asks else 3 if line.loop == "online" else of_data[line.learns]
        cells.setdefault((row, column), []).append((name, FAMILIES[type(line.method).__name__][1]))
    axes, top = figure.add_subplot(), 0.0
    for row, title in enumerate(models):
        height = max(
            math.ceil(len(names) / (3 if c == 3 else 1)) for (r, c), names in cells.items() if r == row
        )
        axes.text(-0.08, top + height / 2, title, ha="right", va="center", size=9, weight="bold")
        for column in range(5):
            width = (edges[column + 1] - edges[column]) / (3 if column == 3 else 1)
            for i, (name, color) in enumerate(cells.get((row, column), [])):
                across, down = (i % 3, i // 3) if column == 3 else (0, i)
                axes.text(
                    edges[column] + 0.05 + across * width,
                    top + down + 0.5,
                    name,
                    color=color,
                    size=8,
                    va="center",
                )
        top += height
        axes.axhline(top, color="0.8", lw=0.8)
        top += 0.1
    for column, title in enumerate(kinds):
        axes.text(edges[column] + 0.05, -0.6, title, size=9, weight="bold", va="center")
        axes.axvline(edges[column], color="0.8", lw=0.8)
    for color, name in dict.fromkeys((color, name) for name, color in FAMILIES.values()):
        axes.plot([], [], "s", color=color, label=name)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.45, 0.0),
        ncol=9,
        fontsize=8,
        frameon=False,
        columnspacing=1,
        handletextpad=0.2,
    )
    axes.set(xlim=(0, edges[-1]), ylim=(top, -1.2))
    axes.axis("off")


PICTURES: dict[str, tuple[Callable[[Any], None], tuple[float, float]]] = {
    "maze": (draw_maze, (9.5, 2.6)),
    "baselines": (draw_baselines, (9.5, 3.2)),
    "estimators": (draw_estimators, (8, 4)),
    "gae": (draw_gae, (11, 3.2)),
    "clip": (draw_clip, (9, 3.2)),
    "update": (draw_update, (8, 3.8)),
    "kl": (draw_kl, (11, 3.2)),
    "margin": (draw_margin, (9.5, 3.2)),
    "credit": (draw_credit, (9.5, 3.2)),
    "map": (draw_map, (11, 6)),
}
"""How each picture is drawn, and its size in inches."""


def draw(name: str, folder: Path) -> None:
    """Draw one picture into a file of its name."""
    save(*PICTURES[name], folder / f"{name}.svg")


def main() -> None:
    """Draw all pictures, or those that are named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PICTURES)}; all without one")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    for name in options.names or PICTURES:
        draw(name, options.out)


if __name__ == "__main__":
    main()
