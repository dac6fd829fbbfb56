"""The learner: a method's losses in, new weights out. It does not know which method it serves.

    score    log-probabilities and entropies of given rows              (no gradient)
    update   fill the columns that the method needs, prepare, then the steps
    step     weight once, cut into microbatches, sum gradients, clip, move

A step's gradient is Σ weight · ∇loss over all its tokens, whatever the microbatches.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import nn
from transformers import PreTrainedModel

from posttrain.attention import use_layouts
from posttrain.learner.critic import CriticModel
from posttrain.learner.ensemble import each_head
from posttrain.learner.forward import Recompute, compute_again, forward, give_back, scored, valued
from posttrain.learner.lora import Lora, add_adapter, base, merged, without_adapter
from posttrain.learner.neftune import of_step
from posttrain.learner.optim import Optim, Trained, learning_rate
from posttrain.learner.pack import microbatches
from posttrain.learner.reference import Follower, Reference
from posttrain.learner.trust_region import Region, Trust, flat, natural_step
from posttrain.math import diagnose, kl, masked, reduce
from posttrain.types import PROBE, Batch, Method, Outputs, PerToken, RunError, Trajectory
from posttrain.weights import Named


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How an update becomes optimiser steps. Only epochs and minibatches change the mathematics."""

    epochs: int = 1
    """Passes over the rows of an update."""
    minibatches: int = 1
    """Optimiser steps in a pass; groups of rows are dealt to them at random."""
    microbatch_tokens: int = 0
    """Packed tokens in a forward and backward pass; 0: what memory allows, at most 2048, on a GPU 16384."""
    target_kl: float = 0.0
    """Nats a token: an update takes no further step once KL(π_old ‖ π) is above it; 0 takes them all."""
    gradient_checkpointing: Recompute = "none"
    """What the backward pass computes again: `"full"` all activations of a layer, a third slower and far less
    memory; `"selective"` those between products of matrices, which are half of them, and a tenth slower."""
    neftune_alpha: float = 0.0
    """Uniform noise of this size on the embeddings of what is learnt from (NEFTune, 5 is usual); 0: none."""

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if self.neftune_alpha < 0:
            raise ValueError(f"neftune_alpha must be 0 (off) or more, not {self.neftune_alpha}")
        if self.target_kl < 0:
            raise ValueError(f"target_kl must be 0 (off) or more, not {self.target_kl}")
        if self.microbatch_tokens < 0:
            raise ValueError(f"microbatch_tokens must be 0 (automatic) or more, not {self.microbatch_tokens}")


@dataclass(frozen=True)
class Update:
    """What one update did: the prepared batch, what the model said of it at first sight, and metrics."""

    batch: Batch
    """With its advantages, and logp_old and logp_ref where the method needed them."""
    logp: PerToken
    """Under the weights before each row's first step."""
    entropy: PerToken
    computed: Bool[torch.Tensor, "B"]
    """Rows of which the model said anything: those whose loss has a weight."""
    metrics: dict[str, float]


class Learner:
    """A model, a method and an optimiser.

    The reference policy, where the method needs one, is `reference`, or the model without its
    adapter, or nobody here if batches bring what it says (`brings_reference`). With `trust` a step is
    the natural gradient within a bound of the KL, and AdamW moves nothing. Nothing here draws random
    numbers but the dealing of groups to minibatches, which depends on (seed, update, epoch) alone.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        *,
        optim: Optim = Optim(),  # noqa: B008 - frozen
        steps: Steps = Steps(),
        lora: Lora = Lora(),  # noqa: B008 - frozen
        reference: PreTrainedModel | None = None,
        brings_reference: bool = False,
        refresh: Reference = Reference(),  # noqa: B008 - frozen
        critic: CriticModel | None = None,
        critic_optim: Optim = Optim(),  # noqa: B008 - frozen
        trust: Trust | None = None,
        temperature: float = 1.0,
        total_steps: int = 1,
        microbatch_tokens: int = 4096,
        seed: int = 0,
    ) -> None:
        for each in (model, *([reference] if reference is not None else [])):
            use_layouts(each)
            each.eval()  # dropout would make the trained policy another one than the sampled
        if steps.gradient_checkpointing != "none":
            compute_again(model, steps.gradient_checkpointing, adapter=bool(lora.rank))
            if critic is not None and critic.body is not None:
                compute_again(critic.body, steps.gradient_checkpointing)
        self.model: nn.Module = add_adapter(model, lora, seed) if lora.rank else model
        self.reference, self.lora, self._brings_reference = reference, lora, brings_reference
        self.method, self.steps = method, steps
        self.temperature, self.total_steps, self.seed = temperature, total_steps, seed
        self.microbatch_tokens = steps.microbatch_tokens or microbatch_tokens
        self.step_count = 0
        self.update_count = 0
        trained = ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)
        self.policy = Trained(trained, optim)
        self.masters = self.policy.masters
        self.critic, self.trust = critic, trust
        values = () if critic is None else critic.named_parameters()
        self.values = (
            Trained(((n, p) for n, p in values if p.requires_grad), critic_optim) if critic else None
        )
        follows = reference is not None and refresh.refresh_every
        self.follower = Follower(reference, refresh) if reference is not None and follows else None
        self.carry = dict(method.start)
        self._check()

    def _check(self) -> None:
        """ValueError for parts that do not fit one another."""
        needs = self.method.needs
        held = self.reference is not None or self.lora.rank or self._brings_reference
        if "logp_ref" in needs and not held:
            raise ValueError("the method compares with a reference policy and none was given")
        if bool(needs & {"value", "head"}) != (self.critic is not None):
            raise ValueError("a method that needs values or a head is given a critic, and no other method is")
        if self.trust and self.critic is not None:
            raise ValueError("a trust region moves the policy alone, and takes no critic")
        if self.trust and (
            self.steps.gradient_checkpointing != "none" or self.compute_dtype == torch.bfloat16
        ):
            raise ValueError("a trust region computes in float32, without gradient checkpointing")

    # ------------------------------------------------------------------ reading

    def score(self, batch: Batch) -> Outputs:
        """The model's log-probability and entropy, and the critic's value, at every trained token."""
        return scored(base(self.model), batch, self.temperature, self.microbatch_tokens, self.critic)

    def score_reference(self, batch: Batch) -> Outputs:
        """The same under the reference policy."""
        if self.reference is not None:
            return scored(self.reference, batch, self.temperature, self.microbatch_tokens)
        with without_adapter(self.model):
            return scored(base(self.model), batch, self.temperature, self.microbatch_tokens)

    def read(self, batch: Batch) -> PerToken:
        """The head's number at every trained token, without a gradient and without the output head."""
        assert self.critic is not None
        return valued(base(self.model), batch, self.microbatch_tokens, self.critic)

    def weights(self) -> Named:
        """The weights as a sampler wants them: adapters merged, names as in the plain model."""
        return merged(self.model)

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the model computes in, and a sampler should."""
        dtype: torch.dtype = base(self.model).get_input_embeddings().weight.dtype
        return dtype

    def canary(self, row: list[int]) -> list[float]:
        """log π(token t | tokens before t) for t ≥ 1, at temperature 1, as a sampler must find it too."""
        n = len(row)
        trajectory = Trajectory(
            tokens=row,
            sampled=[t > 0 for t in range(n)],
            logp_gen=[0.0] * n,
            logp_policy=[0.0] * n,
            version=[0] * n,
            reward=[0.0] * n,
        )
        with torch.no_grad():
            out = forward(base(self.model), Batch.of([trajectory], [0]), temperature=1.0)
        logp: list[float] = out.logp[0, 1:].tolist()
        return logp

    # ------------------------------------------------------------------ learning

    def update(self, batch: Batch) -> Update:
        """Trains on these rows: epochs × minibatches optimiser steps.

        Raises RunError when a loss or gradient is not finite (nothing has moved in that step), and
        ValueError when no token is trained.
        """
        several, steps = self.steps.epochs * self.steps.minibatches > 1, list(self._minibatches(batch))
        batch = self._filled(batch, steps[0][1])
        batch = self.method.prepare(replace(batch, carry=self.carry))
        seen = Outputs(logp=torch.zeros_like(batch.logp_gen), entropy=torch.zeros_like(batch.logp_gen))
        computed = torch.zeros(len(batch), dtype=torch.bool)
        logs: list[dict[str, float]] = []
        for epoch, rows in steps:
            if self.steps.target_kl and logs and logs[-1].get("kl/old", 0.0) > self.steps.target_kl:
                break
            part = batch.rows(rows)
            if unscored := not logs and self._skips_first(batch):
                part = replace(part, logp_old=None)
            out, done, metrics = self.step(part)
            logs.append(metrics)
            if unscored and batch.logp_old is not None:
                batch.logp_old[rows] = out.logp
            if epoch == 0:
                seen.logp[rows], seen.entropy[rows], computed[rows] = out.logp, out.entropy, done
        self.carry = dict(self.method.settle(batch, logs[-1]))
        self.update_count += 1
        by_key: dict[str, list[float]] = {}
        for key, value in (pair for log in logs for pair in log.items()):
            by_key.setdefault(key, []).append(value)
        metrics = {key: sum(v) / len(v) for key, v in by_key.items()}
        metrics |= {f"carry/{key}": value for key, value in self.carry.items()}
        if several:
            metrics["steps"] = float(len(logs))
        if batch.value is not None and batch.target is not None:
            explained = diagnose.explained_variance(batch.target, batch.value, batch.mask)
            metrics["value/explained"] = float(explained)
        if self.follower:
            self.follower.after(self.update_count, self.masters.tensors())
        fresh = computed & ((batch.version == self.update_count - 1) | ~batch.mask).all(-1)
        metrics |= _mismatch(batch.rows(fresh), seen.logp[fresh])
        return Update(batch, seen.logp, seen.entropy, computed, metrics)

    def _filled(self, batch: Batch, first: Int[torch.Tensor, "n"]) -> Batch:
        """The batch with the columns that the method needs and that it does not bring with it."""
        needs = self.method.needs
        if self._skips_first(batch):
            # The first step starts at the anchor: what it finds is the anchor of its rows.
            others = torch.ones(len(batch), dtype=torch.bool)
            others[first] = False
            old = torch.full_like(batch.logp_gen, torch.nan)
            if bool(batch.mask[others].any()):
                old[others] = self.score(batch.rows(others.nonzero().flatten())).logp.to(old)
            batch = replace(batch, logp_old=old)
        elif self._anchors or "logp_old" in needs:
            scored = self.score(batch)
            batch = replace(batch, logp_old=scored.logp, value=scored.value)
        elif "value" in needs and self.critic is not None:
            batch = replace(batch, value=self.read(batch))
        if "logp_ref" in needs and batch.logp_ref is None:
            batch = replace(batch, logp_ref=self.score_reference(batch).logp)
        return batch

    @property
    def _anchors(self) -> bool:
        """Whether an update has steps that start away from its anchor, and losses that ask for it."""
        return self.method.anchored and self.steps.epochs * self.steps.minibatches > 1

    def _skips_first(self, batch: Batch) -> bool:
        """Whether the rows of an update's first step go without being scored before it."""
        return self._anchors and not self.method.needs & {"logp_old", "value"}

    def step(self, batch: Batch) -> tuple[Outputs, Bool[torch.Tensor, "B"], dict[str, float]]:
        """One optimiser step on these rows: (what the model said before it, of which rows, metrics).

        Rows whose every weight is 0 are not computed; a step without any other leaves the weights alone.
        """
        weight = self.method.weight(batch)
        out, weighs, metrics = self._seen(batch, weight, learns=True)
        old = batch if batch.logp_old is not None else replace(batch, logp_old=out.logp)
        total = metrics["loss"]
        metrics |= self._move_within(old, weight, total) if self.trust else self._move(total)
        return out, weighs, metrics

    def assess(self, batch: Batch) -> dict[str, float]:
        """The method's loss and metrics on rows that it does not learn from, as one step's would be."""
        if "logp_old" in self.method.needs and batch.logp_old is None:
            batch = replace(batch, logp_old=self.score(batch).logp)
        if "logp_ref" in self.method.needs and batch.logp_ref is None:
            batch = replace(batch, logp_ref=self.score_reference(batch).logp)
        batch = self.method.prepare(replace(batch, carry=self.carry))
        with torch.no_grad():
            return self._seen(batch, self.method.weight(batch), learns=False)[2]

    def _seen(
        self, batch: Batch, weight: PerToken, *, learns: bool
    ) -> tuple[Outputs, Bool[torch.Tensor, "B"], dict[str, float]]:
        """What the model says of these rows, of which, and metrics; if it learns, gradients are summed."""
        weighs = (weight != 0).any(-1)
        weighed = replace(batch, mask=batch.mask & weighs[:, None])
        logp, entropy = torch.zeros_like(batch.logp_gen), torch.zeros_like(batch.logp_gen)
        total, sums = 0.0, dict[str, float]()
        # Where a loss is one number for several tokens, a mean over tokens would count long answers more.
        share = masked.fill(weight if self.method.unit != "token" else weighed.mask.float(), weighed.mask)
        count = float(share.sum())
        # Before the rows are cut: the length that the noise is scaled by is that of a whole group.
        alpha = self.steps.neftune_alpha if learns else 0.0
        noise = of_step(batch, alpha, seed=self.seed, step=self.step_count)
        for rows in microbatches(weighed, self.microbatch_tokens, whole=self.method.unit == "group"):
            part = batch.rows(torch.tensor(rows))
            self._give_back()
            out = forward(base(self.model), part, self.temperature, self.critic, noise)
            self._give_back()
            losses = each_head(self.method, out, part, self.seed) if learns else self.method.loss(out, part)
            loss = reduce.weighted_sum(losses, weight[rows].to(out.logp), part.mask)
            if learns:
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            out = out.detached()
            logp[rows], entropy[rows] = out.logp.to(logp), out.entropy.to(entropy)
            seen = {} if "head" in self.method.needs else {"entropy": out.entropy}
            if out.heads is not None:
                seen["score/std"] = out.heads.std(0, correction=0)
            for key, value in (seen | self.method.watch(out, part)).items():
                by = share[rows].to(value)
                sums[key] = sums.get(key, 0.0) + float(masked.row_sum(by * value, part.mask).sum())
        metrics = {key: value / count for key, value in sums.items()} | {"loss": total}
        return Outputs(logp=logp, entropy=entropy), weighs, metrics

    def _give_back(self) -> None:
        if self.steps.gradient_checkpointing != "none":
            give_back(base(self.model).device)

    def _move(self, loss: float) -> dict[str, float]:
        """Clips, steps and publishes; the rate, and the gradient's norm before clipping."""
        parts = {"": self.policy} | ({"value/": self.values} if self.values else {})
        metrics: dict[str, float] = {}
        for prefix, part in parts.items():
            metrics[f"{prefix}lr"] = learning_rate(part.config, self.step_count, self.total_steps)
            metrics[f"{prefix}grad_norm"] = part.clip()
        self._check_finite(loss, sum(metrics.values()))
        for prefix, part in parts.items():
            part.step(metrics[f"{prefix}lr"])
        self.step_count += 1
        return metrics

    def _move_within(self, batch: Batch, weight: PerToken, loss: float) -> dict[str, float]:
        """The natural step within the trust region; what came of it."""
        assert self.trust is not None
        norm = self.masters.clip(0.0)
        self._check_finite(loss, norm)
        region = Region(
            base(self.model),
            batch,
            temperature=self.temperature,
            microbatch_tokens=self.microbatch_tokens,
            fisher_every=self.trust.fisher_every,
        )
        gradient = flat([p.grad for p in region.parameters], region.parameters)
        self.masters.zero_grad()
        metrics = natural_step(region, self.method, weight, gradient, self.trust)
        self.step_count += 1
        return metrics | {"grad_norm": norm}

    def _check_finite(self, loss: float, norm: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            for part in (self.policy, *([self.values] if self.values else [])):
                part.masters.zero_grad()
            raise RunError(
                f"optimiser step {self.step_count + 1}: the loss is {loss} and the gradient's norm {norm}; "
                "the weights were left as they were. A lower optim.lr or float32 usually mends it"
            )

    def _minibatches(self, batch: Batch) -> Iterator[tuple[int, Int[torch.Tensor, "n"]]]:
        """(epoch, row numbers) of each step: whole groups, dealt at random when there are several."""
        # A group that trains nothing is dealt to nobody: a step of such groups alone would be an error.
        # And a probe is measured before the first step.
        trains = batch.mask.any(-1) & (batch.version != PROBE).all(-1)
        groups = torch.unique(batch.group[trains])
        for epoch in range(self.steps.epochs):
            if self.steps.minibatches == 1:
                yield epoch, torch.arange(len(batch))
                continue
            generator = torch.Generator().manual_seed(hash((self.seed, self.update_count, epoch)) % 2**63)
            order = torch.randperm(len(groups), generator=generator)
            for part in order.tensor_split(max(1, min(self.steps.minibatches, len(groups)))):
                yield epoch, (torch.isin(batch.group, groups[part]) & trains).nonzero().flatten()

    # ------------------------------------------------------------------ keeping

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """What a checkpoint must hold, by file: trained weights in full precision, optimiser moments.

        And the critic's, and the reference where it is no longer the start of the run.
        """
        out: dict[str, dict[str, torch.Tensor]] = {}
        out["trained"], out["optimizer"] = self.policy.tensors()
        if self.values:
            out["critic"], out["critic_optimizer"] = self.values.tensors()
        if self.follower:
            out["reference"] = self.follower.average
        return out

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold besides tensors."""
        return {"step": self.step_count, "update": self.update_count, "carry": self.carry}

    def restore(self, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: Mapping[str, Any]) -> None:
        """Puts back what tensors() and state() gave; KeyError if it is of another model or adapter."""
        self.policy.restore(tensors["trained"], tensors["optimizer"])
        if self.values:
            self.values.restore(tensors["critic"], tensors["critic_optimizer"])
        if self.follower:
            self.follower.restore(tensors["reference"])
        self.step_count, self.update_count = state["step"], state["update"]
        self.carry = {name: state["carry"][name] for name in self.method.start}


def _mismatch(batch: Batch, logp: PerToken) -> dict[str, float]:
    """How far the sampler's policy was from the trainer's, on the tokens it drew."""
    if not bool((batch.logp_policy[batch.mask] != 0).any()):
        return {}
    return {
        "kl/mismatch": float(masked.mean(kl.k3(batch.logp_policy, logp), batch.mask)),
        "ess": float(diagnose.effective_sample_size(logp, batch.logp_gen, batch.mask)),
    }
