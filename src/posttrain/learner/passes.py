"""Passes of rows through a model: deal rows to ranks, cut microbatches, put the results back in order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from posttrain.batch import Divergence
from posttrain.learner.context import ContextRanks, check_context
from posttrain.learner.critic import CriticModel
from posttrain.learner.experts import check_experts
from posttrain.learner.forward import IDLE, Net, forward, parts, score_batch, states_of_teacher, values
from posttrain.learner.pack import Pack, pack
from posttrain.learner.rank_balance import Deal, deal
from posttrain.learner.ranks import ALONE, Parallel, Ranks
from posttrain.learner.shards import shard, sharded_modules
from posttrain.math import tokens
from posttrain.math.everywhere import HERE, Everywhere
from posttrain.math.tokens import Against
from posttrain.models.attention import output_head
from posttrain.types import Batch, Outputs, PerToken, Trajectory, UserError


class Passes:
    """Passes of the policy with its critic, and of the references, on one rank or several.

    `budget` is the most packed tokens of a microbatch, for each rank that computes it; with `keep_groups` the
    rows of a group lie on one rank and in one microbatch; `compiles` is for their nets. With a `divergence`
    each pass that learns compares the policy with the reference of each row; one that is None is the policy
    without its adapter.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        critic: CriticModel | None,
        references: Sequence[PreTrainedModel | None],
        *,
        ranks: Ranks,
        parallel: Parallel,
        adapter: bool,
        temperature: float,
        budget: int,
        keep_groups: bool,
        compiles: bool = False,
        divergence: Divergence | None = None,
        without_adapter: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        models = [policy, *(r for r in references if r is not None)]
        if critic is not None and critic.body is not None:
            models.append(critic.body)
        check_context(parallel.context, ranks.size, [model.config for model in models])
        check_experts(parallel.experts, ranks.size, models[0], models[1:])
        self.context = ContextRanks.of(ranks, parallel.context, parallel.deadline_s)
        shared: dict[str, Any] = {"context": self.context, "compiles": compiles}
        self.net = Net(policy, critic, **shared)
        self.references = [None if r is None else Net(r.requires_grad_(False), **shared) for r in references]
        self.ranks, self.parallel, self.keep_groups = ranks, parallel, keep_groups
        self.temperature, self.budget = temperature, budget
        self._divergence, self._without_adapter, self._adapter = divergence, without_adapter, adapter
        nets = [net for net in (self.net, *self.references) if net is not None]
        if parallel.cpu_offload and ranks is ALONE:
            raise UserError(
                "train.cpu_offload",
                "FSDP2 keeps the shares, and no rank was started",
                "start one with torchrun --nproc-per-node 1, or leave it out",
            )
        shards = parallel.shard and ranks is not ALONE  # a process that is not a rank holds all weights
        if shards:
            shard(nets, parallel, ranks.size, adapter=adapter)
        self._shares = [module for net in nets for module in sharded_modules(net)]
        self._most = budget * (self.context.size if self.context else 1)
        # Sharded weights are gathered for a pass, so all ranks must run the same number of passes.
        self._together: Everywhere = ranks if shards else HERE

    def outputs(self, part: Batch, *, critic_alone: bool = False) -> Outputs:
        """Return the policy's outputs on a microbatch, with gradients if they are enabled.

        With `critic_alone` only V has one, in the critic's own weights.
        """
        compare = self._compare if self._divergence else None
        return forward(self.net, part, self.temperature, compare, critic_alone=critic_alone)

    def _compare(self, packed: Pack, batch: Batch) -> list[Against]:
        """Return the distributions of the references at the trained tokens of a pack, each at its rows'."""
        if len(self.references) == 1 or batch.teacher is None:
            return [self._against(0, packed, batch)]
        teacher_of = batch.teacher[packed.row]
        index = torch.zeros_like(batch.tokens)
        index[packed.row, packed.column] = packed.asks
        out = []
        for n in range(len(self.references)):
            is_taught = teacher_of == n
            if is_taught.all():
                out.append(self._against(n, packed, batch))
            elif is_taught.any():
                rows = torch.tensor(sorted(set(packed.row[is_taught].tolist())))
                part = batch.rows(rows)
                some = pack(part)
                places = torch.empty_like(some.target)
                places[some.asks] = index[rows[some.row], some.column]
                out.append(replace(self._against(n, some, part), places=places))
            elif self._together is not HERE:  # all ranks gather its weights together
                self._against(n, pack(IDLE), IDLE)
        return out

    def _against(self, number: int, packed: Pack, batch: Batch) -> Against:
        """Return the distributions of one reference at the trained tokens of a pack."""
        assert self._divergence is not None
        if batch.teacher_top is not None and batch.teacher_logp is not None:
            row, column = (torch.empty_like(packed.target) for _ in range(2))
            row[packed.asks], column[packed.asks] = packed.row, packed.column
            vocabulary = self.net.policy.get_output_embeddings().weight.shape[0]
            return tokens.against_top(
                batch.teacher_top[row, column],
                batch.teacher_logp[row, column],
                self._divergence,
                vocabulary,
                self.net.policy.device,
            )
        reference = self.references[number]
        if reference is None and not self._adapter:
            raise ValueError("the batch lacks a served teacher's tokens: make it with session.batch(groups)")
        net = reference or self.net
        within = nullcontext if reference else self._without_adapter
        logits = output_head(net.policy)
        with within():
            hidden = states_of_teacher(net, packed, batch)
        net.count_logits(len(hidden) // (self.context.size if self.context else 1))
        if isinstance(net, FSDPModule) and net is reference:
            net.unshard()  # the head runs outside its passes, until the shares are given up

        def head(hidden: torch.Tensor) -> torch.Tensor:
            with within():
                return logits(hidden)

        return Against(hidden, head, self._divergence)

    def deal(self, batch: Batch, extra: Mapping[str, PerToken] = MappingProxyType({})) -> Deal:
        """Return the rows that this rank computes, with their columns of `extra`."""
        size = self.context.size if self.context else 1
        balance = self.parallel.balance or size > 1
        return deal(self.ranks, batch, extra, keep_groups=self.keep_groups, balance=balance, context=size)

    def learn(self, work: Deal) -> Iterator[tuple[list[int], Batch]]:
        """Yield (row numbers, rows) of each microbatch of a step; the caller computes gradients in between.

        Unless reshard_after_forward is set, weights are gathered and gradients summed over ranks once a step.
        """
        cut = parts(work.batch, self._most, keep_groups=self.keep_groups, together=self._together)
        for rows, part, last in cut:
            if isinstance(self.net, FSDPModule):
                once = not (last or self.parallel.reshard_after_forward)
                self.net.set_requires_gradient_sync(not once)
                self.net.set_reshard_after_backward(not once)
            yield rows, part
        self.give_up_shares()

    def score(self, net: Net, batch: Batch, temperature: float | None = None) -> Outputs:
        """Return a net's outputs at every trained token, without gradients; temperature: of the sampler."""
        work = self.deal(batch)
        with self.ranks.waiting("scores"):
            at = self.temperature if temperature is None else temperature
            out = score_batch(net, work.batch, at, self._most, self._together)
        self.give_up_shares()
        columns = {"logp": out.logp, "entropy": out.entropy, "value": out.value}
        return Outputs(**work.back({k: v for k, v in columns.items() if v is not None}))

    def score_references(self, batch: Batch) -> Outputs:
        """Return the log-probability and entropy at every trained token under the reference of its row."""
        batch = replace(batch, routes=None)  # a reference is a policy of its own, whose routers choose
        logp, entropy = torch.zeros_like(batch.logp_gen), torch.zeros_like(batch.logp_gen)
        for n, net in enumerate(self.references):
            part = batch
            if len(self.references) > 1 and batch.teacher is not None:
                part = replace(batch, mask=batch.mask & (batch.teacher == n)[:, None])
            with nullcontext() if net else self._without_adapter():
                out = self.score(net or self.net, part)
            logp, entropy = logp + out.logp, entropy + out.entropy
        return Outputs(logp=logp, entropy=entropy)

    def read(self, batch: Batch) -> PerToken:
        """Return V at every trained token, without the output head."""
        work = self.deal(batch)
        value = torch.zeros_like(work.batch.logp_gen)
        with torch.no_grad(), self.ranks.waiting("values"):
            for rows, part, _ in parts(work.batch, self._most, together=self._together):
                V = values(self.net, part)
                if rows:
                    value[rows] = V.to(value)
        self.give_up_shares()
        return work.back({"value": value})["value"]

    def canary(self, row: list[int]) -> list[float]:
        """Return log π(token t | tokens before t) for t ≥ 1, at temperature 1; ranks pass the same row."""
        with torch.no_grad(), self.ranks.waiting("the canary"):
            out = forward(self.net, Batch.of([Trajectory.given(row)], [0]), temperature=1.0)
        self.give_up_shares()
        logp: list[float] = out.logp[0, 1:].tolist()
        return logp

    def take_flops(self) -> float:
        """Return the floating-point operations of this rank's passes since the last call."""
        nets = [net for net in (self.net, *self.references) if net is not None]
        flops = sum(net.flops for net in nets)
        for net in nets:
            net.flops = 0.0
        return flops

    def give_up_shares(self) -> None:
        """Free the gathered weights, except this rank's shares."""
        for module in self._shares:
            module.reshard()
