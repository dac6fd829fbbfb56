"""A small update in float64 that has everything in it, for the tests of methods."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from posttrain.math import reduce
from posttrain.types import Batch, Method, Outputs

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="session")
def update() -> Callable[..., tuple[Batch, Outputs]]:
    """update(seed) -> rows of three tasks and what a model says of them.

    Group numbers are far apart and rows of a group do not lie together; masks have holes; row 0 is
    full. `spread` is how far the policy has moved from its anchor.
    """

    def make(seed: int, spread: float = 0.3, K: int = 4, T: int = 7) -> tuple[Batch, Outputs]:
        g = torch.Generator().manual_seed(seed)
        group = torch.tensor([40, -2, 7]).repeat(K)[torch.randperm(3 * K, generator=g)]
        B = len(group)
        mask = torch.rand(B, T, generator=g) < 0.6
        mask[:, 0], mask[:, 1], mask[0, 1:] = False, True, True

        def normal() -> torch.Tensor:
            return torch.randn(B, T, generator=g, dtype=torch.float64)

        logp = -normal().abs() - 0.1
        batch = Batch(
            tokens=torch.randint(50, (B, T), generator=g),
            mask=mask,
            length=torch.full((B,), T),
            group=group,
            reward=(torch.rand(B, T, generator=g) < 0.4).double() * mask,
            logp_gen=logp,
            logp_policy=logp,
            version=torch.zeros(B, T, dtype=torch.long),
            logp_old=logp + spread * normal(),
            logp_ref=logp + 0.5 * normal(),
        )
        return batch, Outputs(logp=logp, entropy=normal().abs())

    return make


@pytest.fixture(scope="session")
def gradients() -> Callable[..., Gradients]:
    """gradients(method, batch, out, parts) -> Σ weight · loss and its gradients, summed over microbatches.

    This is all that a learner does: prepare the update, weigh the step, cut it, add up.
    """

    def run(
        method: Method,
        batch: Batch,
        out: Outputs,
        parts: list[list[int]] | None = None,
        spoil: float | None = None,
    ) -> Gradients:
        batch = method.prepare(batch)
        if spoil is not None and batch.advantage is not None:
            batch = replace(batch, advantage=torch.where(batch.mask, batch.advantage, spoil))
        weight = method.weight(batch)
        logp, entropy = out.logp.clone().requires_grad_(), out.entropy.clone().requires_grad_()
        total = torch.zeros((), dtype=logp.dtype)
        for part in parts or [list(range(len(batch)))]:
            rows = torch.tensor(part)
            piece = batch.rows(rows)
            loss = method.loss(Outputs(logp=logp[rows], entropy=entropy[rows]), piece)
            value = reduce.weighted_sum(loss, weight[rows], piece.mask)
            value.backward()
            total += value.detach()
        assert logp.grad is not None
        return total, logp.grad, torch.zeros_like(logp) if entropy.grad is None else entropy.grad

    return run
