"""The learner: a method's losses in, new weights out. It does not know which method it serves.

    score    log-probabilities and entropies of given rows              (no gradient)
    update   fill the columns that the method needs, prepare, then the steps
    step     weight once, cut into microbatches, sum gradients, clip, move
    forward_backward, optim_step   the halves of a step, for a loop of one's own

A step's gradient is Σ weight · ∇loss over all its tokens, whatever the microbatches, and whichever rank they
are on: each is given some rows of an update, whole groups, and all take the same steps.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import nn
from transformers import PreTrainedModel

from posttrain.learner.critic import CriticModel
from posttrain.learner.forward import forward, with_advantage
from posttrain.learner.lora import Lora, add_adapter, base, merged, without_adapter
from posttrain.learner.optim import Optim, OptimizedWeights, learning_rate
from posttrain.learner.passes import Passes
from posttrain.learner.rank_balance import imbalance
from posttrain.learner.ranks import ALONE, Parallel, Ranks
from posttrain.learner.recompute import give_back, prepare
from posttrain.learner.reference import Follower, Reference
from posttrain.learner.shards import local, whole
from posttrain.learner.trust_region import Trust, TrustRegion, flat, natural_step
from posttrain.math import diagnose, kl, masked, reduce
from posttrain.models.fingerprint import digest
from posttrain.models.loading import computing
from posttrain.types import PROBE, Batch, Method, Outputs, PerToken, RunError

Loss = Callable[[Outputs, Batch], PerToken]
"""What a method's `loss` is: of the rows of a microbatch one number a token, not reduced."""


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
    gradient_checkpointing: bool = False
    """The backward pass computes all activations of a layer again, and not norms and gates alone: a third
    slower, and far less memory."""

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if self.target_kl < 0:
            raise ValueError(f"target_kl must be 0 (off) or more, not {self.target_kl}")
        if self.microbatch_tokens < 0:
            raise ValueError(f"microbatch_tokens must be 0 (automatic) or more, not {self.microbatch_tokens}")


@dataclass(frozen=True)
class Update:
    """What one update did: the prepared batch, what the model said of it at first sight, and metrics."""

    batch: Batch = field(repr=False)
    """With its advantages, and logp_old and logp_ref where the method needed them."""
    logp: PerToken = field(repr=False)
    """Under the weights before each row's first step."""
    entropy: PerToken = field(repr=False)
    computed: Bool[torch.Tensor, "B"] = field(repr=False)
    """Rows of which the model said anything: those whose loss has a weight."""
    metrics: dict[str, float]


@dataclass(frozen=True)
class Losses:
    """What one pass forward and backward found."""

    logp: PerToken = field(repr=False)
    """At every trained token, under the policy at the temperature of sampling."""
    entropy: PerToken = field(repr=False)
    metrics: dict[str, float]
    """The loss Σ weight · loss, and what the method watches."""
    norms: dict[str, float] = field(repr=False)
    """By parameter, the 2-norm of all gradients added since the last step."""


class Learner:
    """A model, a method and an optimiser.

    The reference policy, where the method needs one, is `reference`, or the model without its
    adapter, or nobody here if batches bring what it says (`brings_reference`). With `trust` a step is
    the natural gradient within a bound of the KL, and AdamW moves nothing. Nothing here draws random
    numbers but the dealing of groups to minibatches, which depends on (seed, update, epoch) alone.
    With several `ranks` every one has such a learner, and all make the same calls.
    """

    _added: tuple[Batch, dict[str, float]] | None = None
    """The batch whose gradients were added last, and its metrics."""

    @computing()
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
        ranks: Ranks = ALONE,
        parallel: Parallel = Parallel(),  # noqa: B008 - frozen
    ) -> None:
        bodies = [critic.body] if critic is not None and critic.body is not None else []
        prepare(model, bodies, reference, checkpointing=steps.gradient_checkpointing, twice=bool(trust))
        self.model: nn.Module = add_adapter(model, lora, seed) if lora.rank else model
        self.reference, self.lora, self._brings_reference = reference, lora, brings_reference
        self.method, self.steps = method, steps
        self.temperature, self.total_steps, self.seed = temperature, total_steps, seed
        self.step_count = self.update_count = 0
        self.critic, self.trust, self.ranks, self.parallel = critic, trust, ranks, parallel
        self.compute_dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        """What the model computes in, and a sampler should."""
        self._check()
        with ranks.waiting("shares of weights"):
            self.passes = Passes(
                base(self.model),
                critic,
                reference,
                ranks=ranks,
                parallel=parallel,
                adapter=bool(lora.rank),
                temperature=temperature,
                budget=steps.microbatch_tokens or microbatch_tokens,
                whole=method.unit == "group",
            )
        self.net = self.passes.net
        trained = ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)
        self.policy = OptimizedWeights(trained, optim, ranks)
        self.masters = self.policy.masters
        own = () if critic is None else critic.named_parameters()
        self.values = (
            OptimizedWeights(((n, p) for n, p in own if p.requires_grad), critic_optim, ranks)
            if critic
            else None
        )
        self.follower = Follower(reference, refresh) if reference and refresh.refresh_every else None
        self.method_state = dict(method.start)

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
        if self.trust and (self.steps.gradient_checkpointing or self.compute_dtype == torch.bfloat16):
            raise ValueError("a trust region computes in float32, without gradient checkpointing")
        if self.trust and self.parallel.shard:
            raise ValueError(
                "a trust region multiplies by the whole model's Fisher matrix, and takes no shards"
            )

    # ------------------------------------------------------------------ reading

    @property
    def microbatch_tokens(self) -> int:
        """Packed tokens of a microbatch, at most."""
        return self.passes.budget

    def score(self, batch: Batch) -> Outputs:
        """The model's log-probability and entropy, and the critic's value, at every trained token."""
        return self.passes.score(self.net, batch)

    def score_reference(self, batch: Batch) -> Outputs:
        """The same under the reference policy."""
        if self.passes.reference is not None:
            return self.passes.score(self.passes.reference, batch)
        with without_adapter(self.model):
            return self.passes.score(self.net, batch)

    @computing()
    def read(self, batch: Batch) -> PerToken:
        """The head's number at every trained token, without a gradient and without the output head."""
        return self.passes.read(batch)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as a sampler wants them: adapters merged, names as in the plain model."""
        with self.ranks.waiting("weights"):
            yield from merged(self.model)

    @computing()
    def canary(self, row: list[int]) -> list[float]:
        """log π(token t | tokens before t) for t ≥ 1, at temperature 1, as a sampler must find it too."""
        return self.passes.canary(row)

    # ------------------------------------------------------------------ learning

    @computing()
    def update(self, batch: Batch) -> Update:
        """Trains on these rows: epochs × minibatches optimiser steps.

        An `advantage` or `logp_old` that the batch brings stays. Raises RunError when a loss or gradient is
        not finite (nothing has moved in that step), and ValueError when no token is trained, on any rank, or
        an advantage is not finite.
        """
        batch = replace(batch, everywhere=self.ranks)
        several, steps = self.steps.epochs * self.steps.minibatches > 1, list(self._minibatches(batch))
        skips_first = self._skips_first(batch)
        batch = self._prepare(self._fill_columns(batch, steps[0][1]))
        seen = Outputs(logp=torch.zeros_like(batch.logp_gen), entropy=torch.zeros_like(batch.logp_gen))
        computed = torch.zeros(len(batch), dtype=torch.bool)
        logs: list[dict[str, float]] = []
        for epoch, rows in steps:
            if self.steps.target_kl and logs and logs[-1].get("kl/old", 0.0) > self.steps.target_kl:
                break
            part = batch.rows(rows)
            if unscored := not logs and skips_first:
                part = replace(part, logp_old=None)
            out, done, metrics = self.step(part)
            logs.append(metrics)
            if unscored and batch.logp_old is not None:
                batch.logp_old[rows] = out.logp
            if epoch == 0:
                seen.logp[rows], seen.entropy[rows], computed[rows] = out.logp, out.entropy, done
        self._finish_update(batch, logs[-1])
        by_key: dict[str, list[float]] = {}
        for key, value in (pair for log in logs for pair in log.items()):
            by_key.setdefault(key, []).append(value)
        metrics = {key: sum(v) / len(v) for key, v in by_key.items()}
        metrics |= {f"state/{key}": value for key, value in self.method_state.items()}
        if several:
            metrics["steps"] = float(len(logs))
        if batch.value is not None and batch.target is not None:
            explained = diagnose.explained_variance(batch.target, batch.value, batch.mask, self.ranks)
            metrics["value/explained"] = float(explained)
        if batch.advantage is not None:
            zero = diagnose.share_of_zero_groups(batch.advantage, batch.mask, batch.group, self.ranks)
            metrics["advantage/zero"] = float(zero)
        # What the first step saw was computed on the weights that had drawn it; later steps had moved them.
        fresh = torch.zeros_like(computed).index_fill_(0, steps[0][1], True) & computed
        fresh &= ((batch.version == self.update_count - 1) | ~batch.mask).all(-1)
        metrics |= _mismatch(batch.rows(fresh), seen.logp[fresh])
        self._compare_ranks()
        return Update(batch, seen.logp, seen.entropy, computed, metrics)

    def _prepare(self, batch: Batch) -> Batch:
        """With the method's weights, targets and advantages; an advantage that the batch brings stays."""
        given = batch.advantage
        return with_advantage(self.method.prepare(replace(batch, state=self.method_state)), given)

    def _finish_update(self, batch: Batch, metrics: Mapping[str, float]) -> None:
        self.method_state = dict(self.method.update_state(batch, metrics))
        self.update_count += 1
        if self.follower:
            self.follower.after(self.update_count, self.masters.named())

    @computing()
    def forward_backward(self, batch: Batch, loss: Loss | None = None) -> Losses:
        """Adds the gradient of Σ weight · loss over the batch's tokens to what is there; moves nothing.

        The batch is first prepared as for an update, so weights and targets are the method's, but for an
        `advantage` that the batch brings; `loss`, one number a token, takes the place of the method's. Where
        the batch brings no `logp_old` this policy is the anchor of ratios, as in an update's first step; for
        several steps on one batch, put `score(batch).logp` there before the first. ValueError with a trust
        region, whose step is no gradient's.
        """
        if self.trust:
            raise ValueError("a step within a trust region has no halves: call update")
        if not (loss is None or callable(loss)):
            raise TypeError(f"a loss is a function (batch, outputs) -> one number a token, not {loss!r:.60}")
        skips_first = self._skips_first(batch)
        batch = self._fill_columns(replace(batch, everywhere=self.ranks), torch.arange(len(batch)))
        batch = self._prepare(replace(batch, logp_old=None) if skips_first else batch)
        weigh = self.method.weight
        if loss is not None:  # it need not be 0 where the method's own would be
            weigh = getattr(self.method, "weight_of_any_loss", weigh)
        try:
            out, _, metrics = self._run_microbatches(batch, weigh(batch), learns=True, loss=loss)
        except Exception:
            self.forget_gradients()  # of some microbatches and not of others
            raise
        self._added = batch, metrics
        return Losses(out.logp, out.entropy, metrics, self._norms())

    @computing()
    def optim_step(self, lr: float | None = None) -> dict[str, float]:
        """Clips the gradients that were added and makes one step of them, which counts as an update.

        The learning rate, the schedule's unless it is given, and the gradient's 2-norm before clipping.
        ValueError if there are none, or for a rate below 0; RunError, with the weights left as they were, if
        loss or norm is not finite.
        """
        if self._added is None:
            raise ValueError("there are no gradients: call forward_backward")
        fixed = None if lr is None else Optim(lr=lr)
        (batch, seen), self._added = self._added, None
        metrics = self._move(seen["loss"], fixed)
        self._finish_update(batch, seen | metrics)
        self._compare_ranks()
        return metrics

    def forget_gradients(self) -> None:
        """Gives up the gradients that were added since the last step."""
        self._added = None
        for part in self._trained:
            part.masters.zero_grad()

    @property
    def _trained(self) -> list[OptimizedWeights]:
        return [self.policy, *([self.values] if self.values else [])]

    def _norms(self) -> dict[str, float]:
        masters = [m for part in self._trained for m in part.masters.masters]
        found = {m.name: whole(m.grad).norm() for m in masters if m.grad is not None}
        return dict(zip(found, torch.stack([*found.values()]).tolist(), strict=True)) if found else {}

    def _fill_columns(self, batch: Batch, first: Int[torch.Tensor, "n"]) -> Batch:
        """The batch with the columns that the method's steps need and that it does not bring with it."""
        if self._skips_first(batch):
            # The first step starts at the anchor: what it finds is the anchor of its rows.
            others = torch.ones(len(batch), dtype=torch.bool)
            others[first] = False
            old = torch.full_like(batch.logp_gen, torch.nan)
            if self.ranks.sum(batch.mask[others].sum()):
                old[others] = self.score(batch.rows(others.nonzero().flatten())).logp.to(old)
            batch = replace(batch, logp_old=old)
        return self._complete(batch, anchored=self._anchors)

    def _complete(self, batch: Batch, *, anchored: bool = False) -> Batch:
        """With what this policy, its critic and the reference say of it, where the method needs that."""
        needs = self.method.needs
        if batch.logp_old is None and (anchored or "logp_old" in needs):
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
        return self._anchors and batch.logp_old is None and not self.method.needs & {"logp_old", "value"}

    def step(self, batch: Batch) -> tuple[Outputs, Bool[torch.Tensor, "B"], dict[str, float]]:
        """One optimiser step on these rows: (what the model said before it, of which rows, metrics).

        Rows whose every weight is 0 are not computed; a step without any other leaves the weights alone.
        """
        weight = self.method.weight(batch)
        out, weighs, metrics = self._run_microbatches(batch, weight, learns=True)
        old = batch if batch.logp_old is not None else replace(batch, logp_old=out.logp)
        total = metrics["loss"]
        metrics |= self._move_within(old, weight, total) if self.trust else self._move(total)
        return out, weighs, metrics

    @computing()
    def assess(self, batch: Batch) -> dict[str, float]:
        """The method's loss and metrics on rows that it does not learn from, as one step's would be."""
        batch = self._complete(replace(batch, everywhere=self.ranks))
        batch = self.method.prepare(replace(batch, state=self.method_state))
        with torch.no_grad():
            return self._run_microbatches(batch, self.method.weight(batch), learns=False)[2]

    def _run_microbatches(
        self, batch: Batch, weight: PerToken, *, learns: bool, loss: Loss | None = None
    ) -> tuple[Outputs, Bool[torch.Tensor, "B"], dict[str, float]]:
        """What the model says of these rows, of which, and metrics; if it learns, gradients are summed."""
        weighs = (weight != 0).any(-1)
        weighed = replace(batch, mask=batch.mask & weighs[:, None])
        # Where a loss is one number for several tokens, a mean over tokens would count long answers more.
        share = masked.fill(weight if self.method.unit != "token" else weighed.mask.float(), weighed.mask)
        work = self.passes.deal(weighed, {"weight": weight, "share": share})
        logp, entropy = (torch.zeros_like(work.batch.logp_gen) for _ in range(2))
        sums = {"loss": 0.0}
        with self.ranks.waiting("a step"):
            for rows, part in self.passes.learn(work):
                if not rows:
                    self._pass_idly(part, learns=learns)
                    continue
                by = {name: column[rows] for name, column in work.extra.items()}
                out, found = self._pass(part, by, learns=learns, loss_of=loss)
                for key, value in found.items():
                    sums[key] = sums.get(key, 0.0) + value
                logp[rows], entropy[rows] = out.logp.to(logp), out.entropy.to(entropy)
        metrics = self._reduce_metrics(sums, float(share.sum()))
        if learns and any(work.tokens):
            metrics["ranks/imbalance"] = imbalance(work.tokens)
        return Outputs(**work.back({"logp": logp, "entropy": entropy})), weighs, metrics

    def _pass(
        self, part: Batch, by: Mapping[str, PerToken], *, learns: bool, loss_of: Loss | None
    ) -> tuple[Outputs, dict[str, float]]:
        """One microbatch: what the model says of it, and what it adds to the step's sums."""
        self._give_back()
        out = forward(self.net, part, self.temperature)
        self._give_back()
        losses = _losses(loss_of or self.method.loss, out, part)
        loss = reduce.weighted_sum(losses, by["weight"].to(out.logp), part.mask)
        if learns:
            loss.backward()  # type: ignore[no-untyped-call]
        out, sums = out.detached(), {"loss": loss.item()}
        seen = {} if "head" in self.method.needs else {"entropy": out.entropy}
        for key, value in (seen | self.method.watch(out, part)).items():
            sums[key] = float(masked.row_sum(by["share"].to(value) * value, part.mask).sum())
        return out, sums

    def _pass_idly(self, part: Batch, *, learns: bool) -> None:
        """A pass that another rank needs and this one has no rows for: gradients of 0, of the same weights.

        The loss does not see it, as what is said of tokens that nobody chose may be anything.
        """
        out = forward(self.net, part, self.temperature)
        said = [out.logp, out.entropy] if "head" not in self.method.needs else []
        if learns:
            idle = sum(x.sum() for x in (*said, out.value) if x is not None) * torch.zeros(())
            idle.backward()  # type: ignore[no-untyped-call]

    def _reduce_metrics(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """A step's metrics, from the sums and the weight in them of every rank."""
        total, counts = dict[str, float](), 0.0
        for each, part in self.ranks.gather((sums, count)):
            counts += part
            for key, value in each.items():
                total[key] = total.get(key, 0.0) + value
        return {k: v if k == "loss" else v / counts for k, v in total.items()}

    def _give_back(self) -> None:
        if self.steps.gradient_checkpointing:
            give_back(self.net.policy.device)

    def _move(self, loss: float, fixed: Optim | None = None) -> dict[str, float]:
        """Clips and steps; the rate, and the gradient's norm before clipping."""
        parts = dict(zip(("", "value/"), self._trained, strict=False))
        metrics: dict[str, float] = {}
        for prefix, part in parts.items():
            config = part.config if prefix else fixed or part.config
            metrics[f"{prefix}lr"] = learning_rate(config, self.step_count, self.total_steps)
            metrics[f"{prefix}grad_norm"] = part.clip()
        self._check_finite(loss, sum(metrics.values()))
        for prefix, part in parts.items():
            part.step(metrics[f"{prefix}lr"])
        self.step_count += 1
        return metrics

    def _move_within(self, batch: Batch, weight: PerToken, loss: float) -> dict[str, float]:
        """The natural step within the trust region; what came of it."""
        assert self.trust is not None
        self.masters.add_up()
        norm = self.masters.clip(0.0)
        self._check_finite(loss, norm)
        region = TrustRegion(
            base(self.model),
            batch,
            temperature=self.temperature,
            microbatch_tokens=self.microbatch_tokens,
            fisher_every=self.trust.fisher_every,
            ranks=self.ranks,
        )
        gradient = flat([p.grad for p in region.parameters], region.parameters)
        self.masters.zero_grad()
        metrics = natural_step(region, self.method, weight, gradient, self.trust)
        self.step_count += 1
        return metrics | {"grad_norm": norm}

    def _check_finite(self, loss: float, norm: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.forget_gradients()
            raise RunError(
                f"optimiser step {self.step_count + 1}",
                f"the loss is {loss} and the gradient's norm {norm}; "
                "the weights were left as they were. A lower optim.lr or float32 usually mends it",
            )

    def _minibatches(self, batch: Batch) -> Iterator[tuple[int, Int[torch.Tensor, "n"]]]:
        """(epoch, row numbers) of each step: whole groups, dealt at random when there are several."""
        # A group that trains nothing is dealt to nobody: a step of such groups alone would be an error.
        # And a probe is measured before the first step.
        trains = batch.mask.any(-1) & (batch.version != PROBE).all(-1)
        own = torch.unique(batch.group[trains]).tolist()
        groups = torch.tensor(sorted(number for each in self.ranks.gather(own) for number in each))
        for epoch in range(self.steps.epochs):
            if self.steps.minibatches == 1:
                yield epoch, torch.arange(len(batch))
                continue
            generator = torch.Generator().manual_seed(hash((self.seed, self.update_count, epoch)) % 2**63)
            order = torch.randperm(len(groups), generator=generator)
            for part in order.tensor_split(max(1, min(self.steps.minibatches, len(groups)))):
                yield epoch, (torch.isin(batch.group, groups[part]) & trains).nonzero().flatten()

    def _compare_ranks(self) -> None:
        """RunError that names the ranks whose weights have become others, if it is time to look."""
        every = self.parallel.check_every
        if self.ranks.size > 1 and every and self.update_count % every == 0:
            # Shares differ, and what is gathered from them does not.
            both = [part.masters.named() for part in self._trained]
            alike = ((f"{n} {name}", x) for n, each in enumerate(both) for name, x in each)
            held = digest((name, x) for name, x in alike if local(x) is x)
            self.ranks.agree("hold weights", f"{held} {self.step_count} {self.method_state}")

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
        return {"step": self.step_count, "update": self.update_count, "method": self.method_state}

    def restore(self, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: Mapping[str, Any]) -> None:
        """Puts back what tensors() and state() gave; KeyError if it is of another model or adapter."""
        self.policy.restore(tensors["trained"], tensors["optimizer"])
        if self.values:
            self.values.restore(tensors["critic"], tensors["critic_optimizer"])
        if self.follower:
            self.follower.restore(tensors["reference"])
        self.step_count, self.update_count = state["step"], state["update"]
        self.method_state = {name: state["method"][name] for name in self.method.start}


def _losses(loss: Loss, out: Outputs, batch: Batch) -> PerToken:
    """Return the losses of a microbatch.

    RunError for what is not one number a token, as a mean over a microbatch would depend on how a step is
    cut, and for what has no gradient.
    """
    losses = loss(out, batch)
    shape = getattr(losses, "shape", None)
    if shape != batch.mask.shape:
        what = type(losses).__name__ if shape is None else f"a tensor of shape {list(shape)}"
        raise RunError(
            "loss",
            f"a loss is one number a token, {list(batch.mask.shape)}, "
            f"and not {what}: leave the mean to the method's reduction",
        )
    if out.logp.requires_grad and not losses.requires_grad:
        raise RunError("loss", "it does not depend on the model: compute it from out.logp or out.entropy")
    return losses


def _mismatch(batch: Batch, logp: PerToken) -> dict[str, float]:
    """How far the sampler's policy was from the trainer's, on the tokens it drew."""
    ranks = batch.everywhere
    if not ranks.sum((batch.logp_policy[batch.mask] != 0).sum()):
        return {}
    return {
        "kl/mismatch": float(masked.mean(kl.k3(batch.logp_policy, logp), batch.mask, ranks)),
        "ess": float(diagnose.effective_sample_size(logp, batch.logp_gen, batch.mask, ranks)),
    }
