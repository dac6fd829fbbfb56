"""Rows on expert iteration: which policy a round ends in, and which one round after round tends to.

In a round answers are drawn in groups, the method chooses, and what it kept is imitated until the loss is at
its minimum. That minimum has a closed form for a policy with logits of its own in each state: each token as
often as the weights of the answers that go on with it.
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
from posttrain_study.truth.row import TruthRow, error
from posttrain_study.truth.world import World

SIZE = 4
"""Answers in a group."""


def weights(world: World, method: ExpertIteration) -> Float[torch.Tensor, "G N L"]:
    """What the method weighs each token of each answer, for every group of answers that may be drawn."""
    groups = world.groups(SIZE)
    found = torch.zeros(len(groups), *world.reward.shape, dtype=torch.float64)
    for out, group in zip(found, groups, strict=True):
        batch = method.prepare(replace(world.batch(group), state=method.start))
        weight = method.weight(batch).double()[:, len(world.prompt) :]
        out.index_add_(0, torch.tensor(group), weight)
    return found


def iterated(world: World, method: ExpertIteration, p: exact.Answers, rounds: int = 1) -> exact.Answers:
    """The policy after so many rounds, each with the answers of the one before, the first drawn from p.

    A round ends at the least E[Σ weight · (-log π)]: π(a | s) = Σ weight of the tokens a behind s / Σ weight
    of all tokens behind s.
    """
    of_groups, groups = weights(world, method), world.groups(SIZE)
    together = [alike.double() for alike in exact.together(world)]
    for _ in range(rounds):
        weight = torch.einsum("g,gnt->nt", group_chances(p, groups), of_groups)
        before, behind = (torch.einsum("nmt,mt->nt", alike, weight) for alike in together)
        # A state that nothing kept runs through is never met, whatever is done there.
        step = torch.where(before > 0, behind / before.where(before > 0, 1.0), 0.0)
        p = torch.where(world.spoken, step, 1.0).prod(1)
    return p


def fixed_points(world: World) -> Iterator[TruthRow]:
    """How far each way of choosing is from where it tends to, and what becomes of the shortest answer."""
    section = f"Expert iteration, each round imitated to the end: groups of {SIZE}, three right answers"
    p, right = exact.chances(world), torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    judged = world.rewarded(right)
    alike, own = right / right.sum(), right * p / (right @ p)
    shortest = int(world.spoken.sum(1).argmin())
    top = torch.zeros_like(p).index_fill(0, world.returns.argmax(), 1.0)
    counted = replace(EXPERT, repeats=selection.counted)
    counted_mean, distinct_mean = (replace(m, reduction=reduce.per_sequence) for m in (counted, EXPERT))
    tend = "whatever is drawn at all is kept once: all tend to alike"
    mean = "1/length makes a token of a short answer weigh more, and each round adds to it"
    cases = (
        ("counted", counted, judged, own, (1, 16), "the first policy, given that it is right, in one round"),
        ("distinct", EXPERT, judged, alike, (1, 4, 16), tend),
        ("counted, per_sequence", counted_mean, judged, own, (1, 4, 16), mean),
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
    for name, method, of, goal, stops, why in cases:
        found, done = p, 0
        for rounds in stops:
            found, done = iterated(of, method, found, rounds - done), rounds
            called = f"{name}: {rounds} round{'s' * (rounds > 1)}"
            yield TruthRow(section, called, "off", error(found, goal), "-", why)
            if of is judged:
                yield TruthRow(section, called, "shortest", float(found[shortest]), "-", why)
