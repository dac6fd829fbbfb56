"""The learner: a method's losses in, new weights out, for any method.

    score    log-probabilities and entropies of rows, without a gradient
    update   fill the columns that the method needs, prepare, then take the steps
    step     weight once, cut into microbatches, sum gradients, clip, move
    forward_backward, optim_step   the halves of a step, for a user's own loop

A step's gradient is Σ weight · ∇loss over all its tokens, whatever the microbatches and ranks: each rank has
some rows of an update, in whole groups, and all ranks take the same steps.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import nn
from transformers import PreTrainedModel

from posttrain.learner.critic import CriticModel
from posttrain.learner.evolution import Population
from posttrain.learner.forward import with_advantage
from posttrain.learner.loan import WeightLoan
from posttrain.learner.lora import Lora, add_adapter, base, merged, without_adapter
from posttrain.learner.optim import Optim, OptimizedWeights, learning_rate
from posttrain.learner.passes import Passes
from posttrain.learner.rank_balance import imbalance
from posttrain.learner.ranks import ALONE, Parallel, Ranks
from posttrain.learner.recompute import give_back, prepare
from posttrain.learner.reference import Follower, Reference
from posttrain.learner.shards import local, whole
from posttrain.learner.trust_region import Trust, TrustRegion, flat, natural_step
from posttrain.math import diagnose, filters, kl, masked, reduce, tokens
from posttrain.math.divergences import of_top
from posttrain.methods.evolution import Evolution
from posttrain.models.fingerprint import NamedTensors, digest
from posttrain.models.loading import computing
from posttrain.types import PROBE, Batch, Method, Outputs, PerToken, RunError

Loss = Callable[[Outputs, Batch], PerToken]
"""Signature of a method's `loss`: one number a token for the rows of a microbatch, not reduced."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The optimiser steps of an update. Only epochs and minibatches change the mathematics."""

    epochs: int = 1
    """Passes over the rows of an update."""
    minibatches: int = 1
    """Optimiser steps in a pass; groups of rows are dealt to them at random."""
    microbatch_tokens: int = 0
    """Packed tokens in a forward and backward pass; 0: as many as fit, at most 2048, on a GPU 16384."""
    target_kl: float = 0.0
    """Nats a token: an update takes no further step once KL(π_old ‖ π) is above it; 0: no bound."""
    gradient_checkpointing: bool = False
    """Recompute all activations of a layer in the backward pass, not only norms and gates: a third slower,
    with far less memory."""
    compile: bool = False
    """Let torch.compile fuse norms, gates, rotations and what is read of logits; a run starts later."""

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
    """The result of one update: the prepared batch, the model's outputs in the first epoch, and metrics."""

    batch: Batch = field(repr=False)
    """With its advantages, and logp_old and logp_ref if the method needs them."""
    logp: PerToken = field(repr=False)
    """Under the weights before each row's first step."""
    entropy: PerToken = field(repr=False)
    computed: Bool[torch.Tensor, "B"] = field(repr=False)
    """True for rows whose loss has a weight at a trained token; others went through the model, if at all, for
    their observations."""
    metrics: dict[str, float]


@dataclass(frozen=True)
class Losses:
    """The result of one forward and backward pass."""

    logp: PerToken = field(repr=False)
    """At every trained token, under the policy at the temperature of sampling."""
    entropy: PerToken = field(repr=False)
    metrics: dict[str, float]
    """The loss Σ weight · loss, and the method's own metrics."""
    norms: dict[str, float] = field(repr=False)
    """The 2-norm of the sum of gradients since the last step, by parameter."""


class Learner:
    """A model, a method and an optimiser.

    The reference policy, if the method needs one, is `reference`, or the model without its adapter. With
    `brings_reference` batches already hold its log-probabilities. `teachers` are the references 1, 2 ... of
    rows that name them (`Batch.teacher`). With `trust` a step is the natural gradient within a bound of the
    KL, and AdamW moves the critic alone. In the first `critic_warmup` updates only the critic learns. With an
    `Evolution` the members of `population` draw the rows, and a step is along their noise, without gradients.
    The only random numbers here are that noise, those that deal groups to minibatches, by (seed, update,
    epoch), and a filter's, by (seed, update, row). With several `ranks` each has such a learner, and all make
    the same calls. `loan`: its loan of weights to a sampler.
    """

    _pending: tuple[Batch, dict[str, float]] | None = None
    """The last batch of `forward_backward` and its metrics, until `optim_step`."""

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
        teachers: Sequence[PreTrainedModel | None] = (),
        brings_reference: bool = False,
        refresh: Reference = Reference(),  # noqa: B008 - frozen
        critic: CriticModel | None = None,
        critic_optim: Optim = Optim(),  # noqa: B008 - frozen
        critic_warmup: int = 0,
        trust: Trust | None = None,
        temperature: float = 1.0,
        total_steps: int = 1,
        microbatch_tokens: int = 4096,
        seed: int = 0,
        ranks: Ranks = ALONE,
        parallel: Parallel = Parallel(),  # noqa: B008 - frozen
        loan: WeightLoan | None = None,
    ) -> None:
        bodies = [critic.body] if critic is not None and critic.body is not None else []
        references = [reference, *teachers]
        again, compiles = steps.gradient_checkpointing, steps.compile
        prepare(model, bodies, references, checkpointing=again, compiles=compiles, twice=bool(trust))
        self.model: nn.Module = add_adapter(model, lora, seed) if lora.rank else model
        self.reference, self.lora, self._brings_reference = reference, lora, brings_reference
        self.method, self.steps, self.critic_warmup = method, steps, critic_warmup
        self.temperature, self.total_steps, self.seed = temperature, total_steps, seed
        self.step_count = self.update_count = self.critic_steps = 0
        self.critic, self.trust, self.ranks, self.parallel, self.loan = critic, trust, ranks, parallel, loan
        self.compute_dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        """The dtype that the model computes in; samplers should use the same."""
        self._check()
        if critic is not None:
            critic.detached = trust is not None
        with ranks.waiting("shares of weights"):
            self.passes = Passes(
                base(self.model),
                critic,
                references,
                ranks=ranks,
                parallel=parallel,
                adapter=bool(lora.rank),
                temperature=temperature,
                budget=steps.microbatch_tokens or microbatch_tokens,
                keep_groups=method.unit == "group",
                compiles=compiles,
                divergence=method.compare and of_top(method.compare, refresh.top_k),
                without_adapter=partial(without_adapter, self.model),
            )
        self.net = self.passes.net
        self.policy = OptimizedWeights.of(self.model, optim, ranks)
        self.masters = masters = self.policy.masters
        self.population = Population(method, masters.masters, seed) if isinstance(method, Evolution) else None
        self.values = OptimizedWeights.of(critic, critic_optim, ranks) if critic else None
        self.follower = Follower(reference, refresh) if reference and refresh.refresh_every else None
        self.method_state, self.flops = dict(method.start), 0.0

    def _check(self) -> None:
        """Raise ValueError for parts that do not fit one another."""
        needs = self.method.needs
        has_reference = self.reference is not None or self.lora.rank or self._brings_reference
        if ("logp_ref" in needs or self.method.compare) and not has_reference:
            raise ValueError("the method compares with a reference policy and none was given")
        if bool(needs & {"value", "head"}) != (self.critic is not None):
            raise ValueError("a method that needs values or a head is given a critic, and no other method is")
        if self.critic_warmup and "value" not in needs:
            raise ValueError("critic_warmup is for a method that needs values")
        if self.trust and "head" in needs:
            raise ValueError("a trust region bounds a policy, and a model that scores answers is none")
        again = self.steps.gradient_checkpointing or self.steps.compile
        if self.trust and (again or self.compute_dtype == torch.bfloat16):
            raise ValueError("a trust region computes in float32, neither checkpointed nor compiled")
        if self.method.compare and self.trust:
            raise ValueError("a trust region compares with no reference over the vocabulary")
        if self.trust and (self.parallel.shard or self.parallel.context > 1):
            raise ValueError("a trust region needs the whole Fisher matrix: no shards and no context")

    # ------------------------------------------------------------------ reading

    @property
    def is_warming_up(self) -> bool:
        """True in the updates in which the critic alone learns."""
        return self.update_count < self.critic_warmup

    @property
    def microbatch_tokens(self) -> int:
        """The most packed tokens of a microbatch."""
        return self.passes.budget

    def score(self, batch: Batch) -> Outputs:
        """Return the model's log-probability and entropy, and the critic's value, at every trained token."""
        return self.passes.score(self.net, batch)

    def score_reference(self, batch: Batch) -> Outputs:
        """Return the reference policy's log-probability and entropy at every trained token."""
        return self.passes.score_references(batch)

    @computing()
    def read(self, batch: Batch) -> PerToken:
        """Return the critic's value at every trained token, without gradients and without the output head."""
        return self.passes.read(batch)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights for a sampler: adapters merged, names as in the model without an adapter."""
        with self.ranks.waiting("weights"):
            yield from merged(self.model)

    @computing()
    def canary(self, row: list[int]) -> list[float]:
        """Return log π(token t | tokens before t) for t ≥ 1, at temperature 1, to compare a sampler with."""
        return self.passes.canary(row)

    # ------------------------------------------------------------------ learning

    @computing()
    def update(self, batch: Batch) -> Update:
        """Train on these rows with epochs × minibatches optimiser steps.

        An `advantage` or `logp_old` in the batch stays. Raises RunError if a loss or gradient is not finite
        (that step moves no weight), and ValueError if no token on any rank is trained, or an advantage is not
        finite.
        """
        batch = replace(batch, everywhere=self.ranks)
        if self.population:
            return self._evolve(self.population, batch)
        several, steps = self.steps.epochs * self.steps.minibatches > 1, list(self._minibatches(batch))
        skips_first = self._skips_first(batch)
        batch = self._prepare(self._fill_columns(batch, steps[0][1]))
        first = Outputs(logp=torch.zeros_like(batch.logp_gen), entropy=torch.zeros_like(batch.logp_gen))
        computed = torch.zeros(len(batch), dtype=torch.bool)
        logs: list[dict[str, float]] = []
        for epoch, rows in steps:
            if self.steps.target_kl and logs and logs[-1].get("kl/old", 0.0) > self.steps.target_kl:
                break
            part = batch.rows(rows)
            if unscored := not logs and skips_first:
                part = replace(part, logp_old=None)
            out, weighs, metrics = self.step(part)
            logs.append(metrics)
            if unscored and batch.logp_old is not None:
                batch.logp_old[rows] = out.logp
            if epoch == 0:
                first.logp[rows], first.entropy[rows], computed[rows] = out.logp, out.entropy, weighs
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
        if batch.turn_state is not None:
            shared = diagnose.share_of_shared_turns(batch.turn_state, batch.mask, batch.group, self.ranks)
            metrics["turns/shared"] = float(shared)
        if batch.filter_mask is not None:
            metrics["filter/kept"] = float(masked.mean(batch.filter_mask.double(), batch.mask, self.ranks))
        # Only rows of the first step went through the weights that sampled them; later steps had moved them.
        fresh = torch.zeros_like(computed).index_fill_(0, steps[0][1], True) & computed
        fresh &= ((batch.version == self.update_count - 1) | ~batch.mask).all(-1)
        metrics |= _mismatch(batch.rows(fresh), first.logp[fresh])
        self._compare_ranks()
        return Update(batch, first.logp, first.entropy, computed, metrics)

    def _evolve(self, population: Population, batch: Batch) -> Update:
        """Make one step along the noise of the members that drew these rows."""
        batch = self._prepare(batch)
        metrics = {"lr": learning_rate(self.policy.config, self.step_count, self.total_steps)}
        metrics |= population.step(self.update_count, batch, metrics["lr"])
        self.step_count += 1
        self._finish_update(batch, metrics)
        none = torch.zeros_like(batch.logp_gen)
        return Update(batch, none, none, torch.zeros(len(batch), dtype=torch.bool), metrics)

    def _prepare(self, batch: Batch) -> Batch:
        """Return the batch with the method's targets and advantages; an advantage in the batch stays."""
        return with_advantage(self.method.prepare(replace(batch, state=self.method_state)), batch.advantage)

    def _finish_update(self, batch: Batch, metrics: Mapping[str, float]) -> None:
        self.method_state = dict(self.method.update_state(batch, metrics))
        self.update_count += 1
        if self.follower:
            self.follower.after(self.update_count, self.masters.named_masters())

    @computing()
    def forward_backward(self, batch: Batch, loss: Loss | None = None) -> Losses:
        """Add the gradient of Σ weight · loss over the batch's tokens to the present sum; move no weight.

        The batch is first prepared as for an update, so weights and targets are the method's, except for an
        `advantage` in the batch; `loss`, one number a token, replaces the method's. Without a `logp_old` in
        the batch this policy is the anchor of ratios, as in an update's first step; for
        several steps on one batch, set `logp_old` to `score(batch).logp` before the first.

        Raises ValueError with a trust region or evolution, whose steps are not along a gradient.
        """
        if self.trust or self.population:
            raise ValueError("a step within a trust region or of evolution has no halves: call update")
        if not (loss is None or callable(loss)):
            raise TypeError(f"a loss is a function (batch, outputs) -> one number a token, not {loss!r:.60}")
        skips_first = self._skips_first(batch)
        batch = self._fill_columns(replace(batch, everywhere=self.ranks), torch.arange(len(batch)))
        batch = self._prepare(replace(batch, logp_old=None) if skips_first else batch)
        weigh = self.method.weight
        if loss is not None:  # it need not be 0 where the method's own loss is, and knows no observations
            weigh = getattr(self.method, "weight_of_any_loss", weigh)
            batch = replace(batch, observed=None)
        try:
            out, _, metrics = self._run_microbatches(batch, weigh(batch), learns=True, loss=loss)
        except Exception:
            self.forget_gradients()  # the sum has only some of the microbatches
            raise
        self._pending = batch, metrics
        return Losses(out.logp, out.entropy, metrics, self._norms())

    @computing()
    def optim_step(self, lr: float | None = None) -> dict[str, float]:
        """Clip the sum of gradients and make one step, which counts as an update.

        Return the learning rate (lr, or the schedule's) and the gradient's 2-norm before clipping.

        Raises ValueError without gradients or for a rate below 0; RunError, with the weights unchanged, if
        the loss or the norm is not finite.
        """
        if self._pending is None:
            raise ValueError("there are no gradients: call forward_backward")
        fixed = None if lr is None else Optim(lr=lr)
        (batch, losses), self._pending = self._pending, None
        metrics = self._move(losses["loss"], fixed)
        self._finish_update(batch, losses | metrics)
        self._compare_ranks()
        return metrics

    def forget_gradients(self) -> None:
        """Discard the gradients that were added since the last step."""
        self._pending = None
        for part in self._trained:
            part.masters.zero_grad()

    @property
    def _trained(self) -> list[OptimizedWeights]:
        return [self.policy, *([self.values] if self.values else [])]

    def _norms(self) -> dict[str, float]:
        masters = [m for part in self._trained for m in part.masters.masters]
        norms = {m.name: whole(m.grad).norm() for m in masters if m.grad is not None}
        return dict(zip(norms, torch.stack([*norms.values()]).tolist(), strict=True)) if norms else {}

    def _fill_columns(self, batch: Batch, first: Int[torch.Tensor, "n"]) -> Batch:
        """Return the batch with the missing columns that the method's steps need; `first`: the first rows."""
        self.passes.take_flops()  # of evaluations, which are no part of an update
        if self._skips_first(batch):
            # The first step starts at the anchor, so its own forward pass computes its rows' logp_old.
            others = torch.ones(len(batch), dtype=torch.bool)
            others[first] = False
            old = torch.full_like(batch.logp_gen, torch.nan)
            if self.ranks.sum(batch.mask[others].sum()):
                old[others] = self.score(batch.rows(others.nonzero().flatten())).logp.to(old)
            batch = replace(batch, logp_old=old)
        return self._complete(batch, anchored=self._anchors)

    def _complete(self, batch: Batch, *, anchored: bool = False) -> Batch:
        """Return the batch with the columns that the method needs and the batch lacks."""
        needs = self.method.needs
        scores = {"logp_old"} if anchored or "logp_old" in needs else set()
        scores |= needs & {"entropy", "score_norm"}
        if missing := [name for name in scores if getattr(batch, name) is None]:
            scored = self.score(batch)
            columns: dict[str, Any] = {"logp_old": scored.logp, "entropy": scored.entropy}
            if "score_norm" in missing:
                at_half = self.passes.score(self.net, batch, self.temperature / 2).logp
                columns["score_norm"] = tokens.score_norm(scored.logp, at_half)
            batch = replace(batch, value=scored.value, **{name: columns[name] for name in missing})
        elif "value" in needs and self.critic is not None:
            batch = replace(batch, value=self.read(batch))
        if "logp_ref" in needs and batch.logp_ref is None:
            batch = replace(batch, logp_ref=self.score_reference(batch).logp)
        if "uniform" in needs and batch.uniform is None:
            seed = (self.seed, self.update_count)
            uniform = filters.uniform_draws(batch.tokens, batch.mask, batch.group, seed)
            batch = replace(batch, uniform=uniform)
        return batch

    @property
    def _anchors(self) -> bool:
        """True if an update has steps that start away from its anchor, and the method's loss needs it."""
        return self.method.anchored and self.steps.epochs * self.steps.minibatches > 1

    def _skips_first(self, batch: Batch) -> bool:
        """Return whether the rows of an update's first step need not be scored before it."""
        scored = {"logp_old", "value", "entropy", "score_norm"}
        return self._anchors and batch.logp_old is None and not self.method.needs & scored

    def step(self, batch: Batch) -> tuple[Outputs, Bool[torch.Tensor, "B"], dict[str, float]]:
        """Make one optimiser step; return (the outputs before it, True for computed rows, metrics).

        Rows whose weights are all 0 are not computed; a step of such rows alone moves no weight.
        """
        weight = self.method.weight(batch)
        out, weighs, metrics = self._run_microbatches(batch, weight, learns=True)
        old = batch if batch.logp_old is not None else replace(batch, logp_old=out.logp)
        natural, total = self.trust and not self.is_warming_up, metrics["loss"]
        metrics |= self._move_within(old, weight, total) if natural else self._move(total)
        return out, weighs, metrics

    @computing()
    def assess(self, batch: Batch) -> dict[str, float]:
        """Return the method's loss and metrics on rows as in a step, without learning from them."""
        batch = self._complete(replace(batch, everywhere=self.ranks))
        batch = self.method.prepare(replace(batch, state=self.method_state))
        with torch.no_grad():
            return self._run_microbatches(batch, self.method.weight(batch), learns=False)[2]

    def _run_microbatches(
        self, batch: Batch, weight: PerToken, *, learns: bool, loss: Loss | None = None
    ) -> tuple[Outputs, Bool[torch.Tensor, "B"], dict[str, float]]:
        """Return (outputs, True for computed rows, metrics); if `learns`, sum gradients."""
        weighs = ((weight != 0) & batch.mask).any(-1)
        weighed = replace(batch, mask=batch.mask & weighs[:, None])
        # If a loss is one number for several tokens, a mean over tokens would weigh long answers more.
        share = masked.fill(weight if self.method.unit != "token" else weighed.mask.float(), weighed.mask)
        work = self.passes.deal(weighed, {"weight": weight, "share": share})
        logp, entropy = (torch.zeros_like(work.batch.logp_gen) for _ in range(2))
        sums = {"loss": 0.0}
        with self.ranks.waiting("a step"):
            for rows, part in self.passes.learn(work):
                if not rows:
                    self._pass_idly(part, learns=learns)
                    continue
                extra = {name: column[rows] for name, column in work.extra.items()}
                out, terms = self._pass(part, extra, learns=learns, loss_of=loss)
                for key, value in terms.items():
                    sums[key] = sums.get(key, 0.0) + value
                logp[rows] = masked.fill(out.logp, part.mask).to(logp)
                entropy[rows] = masked.fill(out.entropy, part.mask).to(entropy)
        metrics = self._reduce_metrics(sums if work.leads else {}, float(share.sum()), learns=learns)
        if learns and any(work.tokens):
            metrics["ranks/imbalance"] = imbalance(work.tokens)
        return Outputs(**work.back({"logp": logp, "entropy": entropy})), weighs, metrics

    def _pass(
        self, part: Batch, extra: Mapping[str, PerToken], *, learns: bool, loss_of: Loss | None
    ) -> tuple[Outputs, dict[str, float]]:
        """Run one microbatch; return its outputs and its terms in the step's sums."""
        self._give_back()
        out = self.passes.outputs(part, critic_alone=self.is_warming_up)
        self._give_back()
        losses = _losses(loss_of or self.method.loss, out, part)
        loss = reduce.weighted_sum(losses, extra["weight"].to(out.logp), part.predicted)
        if learns:
            loss.backward()  # type: ignore[no-untyped-call]
        out, sums = out.detached(), {"loss": loss.item()}
        quantities = {} if "head" in self.method.needs else {"entropy": out.entropy}
        for key, value in (quantities | self.method.watch(out, part)).items():
            sums[key] = float(masked.row_sum(extra["share"].to(value) * value, part.mask).sum())
        if part.observed is not None:
            sums["observation/tokens"] = float(part.observed.sum())
            sums["observation/loss"] = -float(masked.row_sum(out.logp, part.observed).sum())
        return out, sums

    def _pass_idly(self, part: Batch, *, learns: bool) -> None:
        """Run a pass with gradients of 0 for all weights, for ranks that have more rows and gather weights.

        The method's loss is not called, because outputs at tokens that were not sampled may be any number.
        """
        out = self.passes.outputs(part, critic_alone=self.is_warming_up)
        columns = [out.logp, out.entropy] if "head" not in self.method.needs else []
        if learns:
            idle = sum(x.sum() for x in (*columns, out.value, out.divergence) if x is not None)
            idle = idle * torch.zeros(())
            idle.backward()  # type: ignore[no-untyped-call]

    def _reduce_metrics(self, sums: Mapping[str, float], count: float, *, learns: bool) -> dict[str, float]:
        """Return a step's metrics from every rank's sums and weight; add its FLOPs if it learns."""
        total, counts = dict[str, float](), 0.0
        for terms, share, flops in self.ranks.gather((sums, count, self.passes.take_flops())):
            counts += share
            self.flops += flops if learns else 0.0
            for key, value in terms.items():
                total[key] = total.get(key, 0.0) + value
        # A step without a trained token that weighs may still have observations.
        divisors = {"loss": 1.0, "observation/loss": total.pop("observation/tokens", 0.0)}
        return {k: v / divisors.get(k, counts) for k, v in total.items() if divisors.get(k, counts)}

    def _give_back(self) -> None:
        if self.steps.gradient_checkpointing:
            give_back(self.net.policy.device)

    def _move(self, loss: float, fixed: Optim | None = None) -> dict[str, float]:
        """Clip and step what AdamW moves; return the rates and the gradients' norms before clipping."""
        parts = {} if self.trust or self.is_warming_up else {"": self.policy}
        parts |= {"value/": self.values} if self.values else {}
        metrics = {"value/warmup": float(self.is_warming_up)} if self.critic_warmup else {}
        for prefix, part in parts.items():
            config = part.config if prefix else fixed or part.config
            past = 0 if prefix else self.critic_steps  # a schedule begins with the first step of its part
            rate = learning_rate(config, self.step_count - past, self.total_steps - past)
            metrics |= {f"{prefix}lr": rate, f"{prefix}grad_norm": part.clip()}
        self._check_finite(loss, sum(metrics.values()))
        if self.loan:
            self.loan.before_step()
        for prefix, part in parts.items():
            part.step(metrics[f"{prefix}lr"])
        self.step_count += 1
        self.critic_steps += self.is_warming_up
        return metrics

    def _move_within(self, batch: Batch, weight: PerToken, loss: float) -> dict[str, float]:
        """Make the natural step within the trust region, and the critic's own; return their metrics."""
        assert self.trust is not None
        self.masters.add_up()
        norm = self.masters.clip(0.0)
        self._check_finite(loss, norm)
        metrics = {"grad_norm": norm} | self._move(loss)
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
        return metrics | natural_step(region, self.method, weight, gradient, self.trust)

    def _check_finite(self, loss: float, norm: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.forget_gradients()
            raise RunError(
                f"optimiser step {self.step_count + 1}",
                f"the loss is {loss} and the gradient's norm {norm}; "
                "the weights were left as they were. A lower optim.lr or float32 usually mends it",
            )

    def _minibatches(self, batch: Batch) -> Iterator[tuple[int, Int[torch.Tensor, "n"]]]:
        """Yield (epoch, row numbers) of each step: whole groups, dealt at random to several minibatches."""
        # Groups that train nothing are not dealt, because a step of such groups alone would be an error.
        # Probes are measured before the first step.
        trains = batch.mask.any(-1) & (batch.version != PROBE).all(-1)
        numbers = torch.unique(batch.group[trains]).tolist()
        groups = torch.tensor(sorted(n for rank in self.ranks.gather(numbers) for n in rank))
        for epoch in range(self.steps.epochs):
            if self.steps.minibatches == 1:
                yield epoch, torch.arange(len(batch))
                continue
            generator = torch.Generator().manual_seed(hash((self.seed, self.update_count, epoch)) % 2**63)
            order = torch.randperm(len(groups), generator=generator)
            for part in order.tensor_split(max(1, min(self.steps.minibatches, len(groups)))):
                yield epoch, (torch.isin(batch.group, groups[part]) & trains).nonzero().flatten()

    def _compare_ranks(self) -> None:
        """Every `check_every` updates, raise RunError naming the ranks whose weights differ from rank 0's."""
        every = self.parallel.check_every
        if self.ranks.size > 1 and every and self.update_count % every == 0:
            # Shares of sharded weights differ between ranks, so they are left out.
            masters = [part.masters.named_masters() for part in self._trained]
            weights = ((f"{n} {name}", x) for n, pairs in enumerate(masters) for name, x in pairs)
            hashed = digest((name, x) for name, x in weights if local(x) is x)
            self.ranks.agree("hold weights", f"{hashed} {self.step_count} {self.method_state}")

    # ------------------------------------------------------------------ checkpoints

    def named_tensors(self) -> dict[str, NamedTensors]:
        """Return a checkpoint's (name, tensor) by file; masters of bfloat16 weights one at a time."""
        out = dict(zip(("trained", "optimizer"), self.policy.named_tensors(), strict=True))
        if self.values:
            out |= zip(("critic", "critic_optimizer"), self.values.named_tensors(), strict=True)
        return out | ({"reference": self.follower.average.items()} if self.follower else {})

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return named_tensors() by name, all at once."""
        return {file: dict(tensors) for file, tensors in self.named_tensors().items()}

    def state(self) -> dict[str, Any]:
        """Return a checkpoint's state besides tensors."""
        counts = {"step": self.step_count, "critic_steps": self.critic_steps, "update": self.update_count}
        return counts | {"method": self.method_state}

    def restore(self, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: Mapping[str, Any]) -> None:
        """Restore tensors() and state(); KeyError if they are of another model or adapter."""
        self.policy.restore(tensors["trained"], tensors["optimizer"])
        if self.values:
            self.values.restore(tensors["critic"], tensors["critic_optimizer"])
        if self.follower:
            self.follower.restore(tensors["reference"])
        self.step_count, self.update_count = state["step"], state["update"]
        self.critic_steps = state.get("critic_steps", 0)  # older checkpoints have no warm-up
        self.method_state = {name: state["method"][name] for name in self.method.start}


def _losses(loss: Loss, out: Outputs, batch: Batch) -> PerToken:
    """Return the losses of a microbatch.

    Raises RunError unless they are one number a token, because a mean over a microbatch would depend on how
    the step is cut, and if they have no gradient.
    """
    losses = loss(out, batch)
    shape = getattr(losses, "shape", None)
    if shape != batch.mask.shape:
        kind = type(losses).__name__ if shape is None else f"a tensor of shape {list(shape)}"
        raise RunError(
            "loss",
            f"a loss is one number a token, {list(batch.mask.shape)}, "
            f"and not {kind}: leave the mean to the method's reduction",
        )
    learns = any(x is not None and x.requires_grad for x in (out.logp, out.value))
    if learns and not losses.requires_grad:
        outputs = "out.logp or out.entropy, and from out.value while a critic warms up"
        raise RunError("loss", f"it does not depend on the model: compute it from {outputs}")
    return losses


def _mismatch(batch: Batch, logp: PerToken) -> dict[str, float]:
    """Return the KL and the effective sample size of the sampler's policy against the trainer's."""
    ranks = batch.everywhere
    if not ranks.sum((batch.logp_policy[batch.mask] != 0).sum()):
        return {}
    return {
        "kl/mismatch": float(masked.mean(kl.k3(batch.logp_policy, logp), batch.mask, ranks)),
        "ess": float(diagnose.effective_sample_size(logp, batch.logp_gen, batch.mask, ranks)),
    }
