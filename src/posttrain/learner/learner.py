"""The learner: a method's losses in, new weights out. It does not know which method it serves.

    score    log-probabilities and entropies of given rows              (no gradient)
    update   fill the columns that the method needs, prepare, then the steps
    step     weight once, cut into microbatches, sum gradients, clip, move

A step's gradient is Σ weight · ∇loss over all its tokens, whatever the microbatches.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import nn
from transformers import PreTrainedModel

from posttrain.attention import hidden_states, output_head, use_layouts
from posttrain.learner.lora import Lora, add_adapter, base, merged, without_adapter
from posttrain.learner.optim import (
    MasterWeights,
    Optim,
    adamw,
    learning_rate,
    optimizer_tensors,
    restore_optimizer,
)
from posttrain.learner.pack import microbatches, pack
from posttrain.math import diagnose, kl, masked, reduce, tokens
from posttrain.types import Batch, Method, Outputs, PerToken, RunError, Trajectory
from posttrain.weights import Named


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How an update becomes optimiser steps. Only epochs and minibatches change the mathematics."""

    epochs: int = 1
    """Passes over the rows of an update."""
    minibatches: int = 1
    """Optimiser steps in a pass; groups of rows are dealt to them at random."""
    microbatch_tokens: int = 0
    """Packed tokens in one forward and backward pass; 0 chooses from the memory there is."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: about a third slower, far less memory."""

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
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
    adapter. Nothing here draws random numbers but the dealing of groups to minibatches, which
    depends on (seed, update, epoch) alone.
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
        temperature: float = 1.0,
        total_steps: int = 1,
        microbatch_tokens: int = 4096,
        seed: int = 0,
    ) -> None:
        for each in (model, *([reference] if reference is not None else [])):
            use_layouts(each)
            each.eval()  # dropout would make the trained policy another one than the sampled
        if steps.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
            model.train()  # transformers checkpoints in training mode only
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        self.model: nn.Module = add_adapter(model, lora, seed) if lora.rank else model
        self.reference, self.lora = reference, lora
        self.method, self.optim, self.steps = method, optim, steps
        self.temperature, self.total_steps, self.seed = temperature, total_steps, seed
        self.microbatch_tokens = steps.microbatch_tokens or microbatch_tokens
        self.step_count = 0
        self.update_count = 0
        self.masters = MasterWeights((n, p) for n, p in self.model.named_parameters() if p.requires_grad)
        self.optimizer = adamw(optim, self.masters)
        if "logp_ref" in method.needs and reference is None and not lora.rank:
            raise ValueError("the method compares with a reference policy and none was given")

    # ------------------------------------------------------------------ reading

    def score(self, batch: Batch) -> Outputs:
        """The model's log-probability and entropy at every trained token, without gradients."""
        return self._score(base(self.model), batch)

    def score_reference(self, batch: Batch) -> Outputs:
        """The same under the reference policy."""
        if self.reference is not None:
            return self._score(self.reference, batch)
        with without_adapter(self.model):
            return self._score(base(self.model), batch)

    def _score(self, model: PreTrainedModel, batch: Batch) -> Outputs:
        logp, entropy = torch.zeros_like(batch.reward), torch.zeros_like(batch.reward)
        with torch.no_grad():
            for rows in microbatches(batch, self.microbatch_tokens):
                out = forward(model, batch.rows(torch.tensor(rows)), self.temperature)
                logp[rows], entropy[rows] = out.logp.to(logp), out.entropy.to(entropy)
        return Outputs(logp=logp, entropy=entropy)

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
        several = self.steps.epochs * self.steps.minibatches > 1
        if several or "logp_old" in self.method.needs:
            batch = replace(batch, logp_old=self.score(batch).logp)
        if "logp_ref" in self.method.needs:
            batch = replace(batch, logp_ref=self.score_reference(batch).logp)
        batch = self.method.prepare(batch)
        seen = Outputs(logp=torch.zeros_like(batch.reward), entropy=torch.zeros_like(batch.reward))
        computed = torch.zeros(len(batch), dtype=torch.bool)
        logs = []
        for epoch in range(self.steps.epochs):
            for rows in self._minibatches(batch, epoch):
                out, done, metrics = self.step(batch.rows(rows))
                logs.append(metrics)
                if epoch == 0:
                    seen.logp[rows], seen.entropy[rows], computed[rows] = out.logp, out.entropy, done
        self.update_count += 1
        values: dict[str, list[float]] = {}
        for key, value in (pair for log in logs for pair in log.items()):
            values.setdefault(key, []).append(value)
        metrics = {key: sum(v) / len(v) for key, v in values.items()}
        metrics |= _mismatch(batch.rows(computed), seen.logp[computed])
        return Update(batch, seen.logp, seen.entropy, computed, metrics)

    def step(self, batch: Batch) -> tuple[Outputs, Bool[torch.Tensor, "B"], dict[str, float]]:
        """One optimiser step on these rows: (what the model said before it, of which rows, metrics).

        Rows whose every weight is 0 are not computed; a step without any other leaves the weights alone.
        """
        weight = self.method.weight(batch)
        weighs = (weight != 0).any(-1)
        weighed = replace(batch, mask=batch.mask & weighs[:, None])
        logp, entropy = torch.zeros_like(batch.reward), torch.zeros_like(batch.reward)
        total, count = 0.0, int(weighed.mask.sum())
        sums: dict[str, float] = {}
        for rows in microbatches(weighed, self.microbatch_tokens):
            part = batch.rows(torch.tensor(rows))
            out = forward(base(self.model), part, self.temperature)
            loss = reduce.weighted_sum(self.method.loss(out, part), weight[rows].to(out.logp), part.mask)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            out = Outputs(logp=out.logp.detach(), entropy=out.entropy.detach())
            logp[rows], entropy[rows] = out.logp.to(logp), out.entropy.to(entropy)
            for key, value in {"entropy": out.entropy, **self.method.watch(out, part)}.items():
                sums[key] = sums.get(key, 0.0) + float(masked.row_sum(value, part.mask).sum())
        metrics = {key: value / count for key, value in sums.items()}
        metrics |= {"loss": total, "lr": self._rate(), "grad_norm": self._move(total)}
        return Outputs(logp=logp, entropy=entropy), weighs, metrics

    def _rate(self) -> float:
        return learning_rate(self.optim, self.step_count, self.total_steps)

    def _move(self, loss: float) -> float:
        """Clips, steps and publishes; the gradient's norm before clipping."""
        norm = self.masters.clip(self.optim.max_grad_norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.masters.zero_grad()
            raise RunError(
                f"optimiser step {self.step_count + 1}: the loss is {loss} and the gradient's norm {norm}; "
                "the weights were left as they were. A lower optim.lr or float32 usually mends it"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        self.optimizer.step()
        self.masters.publish()
        self.masters.zero_grad()
        self.step_count += 1
        return norm

    def _minibatches(self, batch: Batch, epoch: int) -> Iterator[Int[torch.Tensor, "n"]]:
        """Row numbers of each optimiser step: whole groups, dealt at random when there are several."""
        if self.steps.minibatches == 1:
            yield torch.arange(len(batch))
            return
        # A group that trains nothing is dealt to nobody: a step of such groups alone would be an error.
        trains = batch.mask.any(-1)
        groups = torch.unique(batch.group[trains])
        generator = torch.Generator().manual_seed(hash((self.seed, self.update_count, epoch)) % 2**63)
        order = torch.randperm(len(groups), generator=generator)
        for part in order.tensor_split(min(self.steps.minibatches, len(groups))):
            yield (torch.isin(batch.group, groups[part]) & trains).nonzero().flatten()

    # ------------------------------------------------------------------ keeping

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """What a checkpoint must hold, by file: trained weights in full precision, optimiser moments."""
        masters = dict(zip(self.masters.names, self.masters.masters, strict=True))
        return {
            "trained": {name: m.detach() for name, m in masters.items()},
            "optimizer": optimizer_tensors(self.optimizer, self.masters),
        }

    def counts(self) -> dict[str, int]:
        """What a checkpoint must hold besides tensors."""
        return {"step": self.step_count, "update": self.update_count}

    def restore(self, tensors: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, int]) -> None:
        """Puts back what tensors() and counts() gave; KeyError if it is of another model or adapter."""
        with torch.no_grad():
            for name, master in zip(self.masters.names, self.masters.masters, strict=True):
                master.copy_(tensors["trained"][name])
        restore_optimizer(self.optimizer, self.masters, tensors["optimizer"])
        self.masters.publish()
        self.step_count, self.update_count = counts["step"], counts["update"]


def forward(model: PreTrainedModel, batch: Batch, temperature: float) -> Outputs:
    """log π and entropy at every trained token of these rows, with gradients where they are on.

    Rows are packed, the output head runs only where a token is trained, and [B, T, V] never exists.
    """
    packed = pack(batch)
    device = next(model.parameters()).device
    hidden = hidden_states(model, packed.tokens[None].to(device), packed.positions[None].to(device), packed)
    picked, entropies = tokens.pick_from_hidden(
        hidden[0, packed.source.to(device)],
        output_head(model),
        packed.target.to(device),
        temperature,
        vocabulary=model.get_output_embeddings().weight.shape[0],
    )
    where = (packed.row, packed.column)

    def column(values: Float[torch.Tensor, "M"]) -> PerToken:
        values = values.cpu()
        return values.new_zeros(batch.mask.shape).index_put(where, values)

    return Outputs(logp=column(picked), entropy=column(entropies))


def _mismatch(batch: Batch, logp: PerToken) -> dict[str, float]:
    """How far the sampler's policy was from the trainer's, on the tokens it drew."""
    if not bool((batch.logp_policy[batch.mask] != 0).any()):
        return {}
    return {
        "kl/mismatch": float(masked.mean(kl.k3(batch.logp_policy, logp), batch.mask)),
        "ess": float(diagnose.effective_sample_size(logp, batch.logp_gen, batch.mask)),
    }
