"""A small update in float64 that has everything in it, for the tests of methods."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from posttrain.math import reduce
from posttrain.types import PROBE, Batch, Method, Outputs

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="session")
def update() -> Callable[..., tuple[Batch, Outputs]]:
    """update(seed) -> rows of three tasks and what a model says of them.

    Group numbers are far apart and rows of a group do not lie together; masks have holes; row 0 is
    full. Rows 4 and 9 are probes, which methods without probes cannot tell from the others. `spread` is how
    far the policy has moved from its anchor.
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
        version = torch.zeros(B, T, dtype=torch.long)
        version[[4, 9]] = PROBE
        batch = Batch(
            tokens=torch.randint(50, (B, T), generator=g),
            mask=mask,
            length=torch.full((B,), T),
            group=group,
            reward=(torch.rand(B, T, generator=g) < 0.4).double() * mask,
            logp_gen=logp + 0.2 * normal(),
            logp_policy=logp,
            version=version,
            logp_old=logp + spread * normal(),
            logp_ref=logp + 0.5 * normal(),
            value=normal(),
        )
        assert batch.value is not None
        moved = batch.value + 0.3 * normal()
        return batch, Outputs(logp=logp, entropy=normal().abs(), value=moved)

    return make


@pytest.fixture(scope="session")
def gradients() -> Callable[..., Gradients]:
    """gradients(method, batch, out, parts) -> Σ weight · loss and its gradients by logp, entropy and value.

    This is all that a learner does: prepare the update, weigh the step, cut it, add up.
    """

    def run(
        method: Method,
        batch: Batch,
        out: Outputs,
        parts: list[list[int]] | None = None,
        spoil: float | None = None,
    ) -> Gradients:
        batch = method.prepare(replace(batch, carry={**method.start, **batch.carry}))
        if spoil is not None:
            made = {"advantage": batch.advantage, "target": batch.target}
            batch = replace(
                batch, **{k: torch.where(batch.mask, v, spoil) for k, v in made.items() if v is not None}
            )
        weight = method.weight(batch)
        assert out.value is not None
        leaves = [x.clone().requires_grad_() for x in (out.logp, out.entropy, out.value)]
        total = torch.zeros((), dtype=out.logp.dtype)
        for part in parts or [list(range(len(batch)))]:
            rows = torch.tensor(part)
            piece = batch.rows(rows)
            logp, entropy, value = (x[rows] for x in leaves)
            loss = method.loss(Outputs(logp=logp, entropy=entropy, value=value), piece)
            summed = reduce.weighted_sum(loss, weight[rows], piece.mask)
            summed.backward()
            total += summed.detach()
        d_logp, d_entropy, d_value = (torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)
        return total, d_logp, d_entropy, d_value

    return run
