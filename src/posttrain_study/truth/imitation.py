"""Rows on expert iteration: the policy after a round, and the limit of many rounds.

In a round answers are drawn in groups, the method selects some, and these are imitated until the loss is at
its minimum. That minimum has a closed form for a policy with separate logits in each state: each token gets
the share of the weights of the answers that continue with it.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float

from posttrain.math import reduce, selection
from posttrain.methods.imitation import ExpertIteration
from posttrain.methods.table import EXPERT
from posttrain_study.truth import exact
from posttrain_study.truth.answers import group_chances
from posttrain_study.truth.comparison import TruthRow, error
from posttrain_study.truth.world import World

SIZE = 4
"""Number of answers in a group."""


def weights(world: World, method: ExpertIteration) -> Float[torch.Tensor, "G N L"]:
    """Return the method's weight of each token of each answer, for every possible group of answers."""
    groups = world.groups(SIZE)
    result = torch.zeros(len(groups), *world.reward.shape, dtype=torch.float64)
    for out, group in zip(result, groups, strict=True):
        batch = method.prepare(replace(world.batch(group), state=method.start))
        weight = method.weight(batch).double()[:, len(world.prompt) :]
        out.index_add_(0, torch.tensor(group), weight)
    return result


def iterate(world: World, method: ExpertIteration, p: exact.Answers, rounds: int = 1) -> exact.Answers:
    """Return the policy after n rounds, each with answers of the one before, the first drawn from p.

    A round ends at the least E[Σ weight · (-log π)]: π(a | s) = Σ weight of the tokens a after s / Σ weight
    of all tokens after s.
    """
    of_groups, groups = weights(world, method), world.groups(SIZE)
    prefixes = [alike.double() for alike in exact.shared_prefixes(world)]
    for _ in range(rounds):
        weight = torch.einsum("g,gnt->nt", group_chances(p, groups), of_groups)
        before, behind = (torch.einsum("nmt,mt->nt", alike, weight) for alike in prefixes)
        # A state without a selected answer is never met, so its distribution does not matter.
        step = torch.where(before > 0, behind / before.where(before > 0, 1.0), 0.0)
        p = torch.where(world.mask, step, 1.0).prod(1)
    return p


def fixed_points(world: World) -> Iterator[TruthRow]:
    """Yield the distance of each selection rule from its limit, and the chance of the shortest answer."""
    section = f"Expert iteration, each round imitated to the end: groups of {SIZE}, three right answers"
    p, right = exact.chances(world), torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    judged = world.with_rewards(right)
    alike, conditioned = right / right.sum(), right * p / (right @ p)
    shortest = int(world.mask.sum(1).argmin())
    top = torch.zeros_like(p).index_fill(0, world.returns.argmax(), 1.0)
    counted = replace(EXPERT, repeats=selection.counted)
    counted_mean, distinct_mean = (replace(m, reduction=reduce.per_sequence) for m in (counted, EXPERT))
    first = "the first policy, given that it is right, in one round"
    tend = "whatever is drawn at all is kept once: all tend to alike"
    mean = "1/length makes a token of a short answer weigh more, and each round adds to it"
    cases = (
        ("counted", counted, judged, conditioned, (1, 16), first),
        ("distinct", EXPERT, judged, alike, (1, 4, 16), tend),
        ("counted, per_sequence", counted_mean, judged, conditioned, (1, 4, 16), mean),
        ("distinct, per_sequence", distinct_mean, judged, alike, (1, 4, 16), mean),
        (
            "best of 4, rewards 1, 0.2, 0.5, 0",
            replace(EXPERT, keep=selection.best, accept=0.0),
            world,
            top,
            (1, 2, 4),
            "the best of 4 of the best of 4: soon the best there is, alone",
        ),
    )
    for name, method, task, goal, stops, why in cases:
        policy, finished = p, 0
        for rounds in stops:
            policy, finished = iterate(task, method, policy, rounds - finished), rounds
            label = f"{name}: {rounds} round{'s' * (rounds > 1)}"
            yield TruthRow(section, label, "off", error(policy, goal), "-", why)
            if task is judged:
                yield TruthRow(section, label, "shortest", float(policy[shortest]), "-", why)
