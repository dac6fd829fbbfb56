"""Rows of a batch through a model: dealt over ranks, cut into microbatches, and put back in their places."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from posttrain.learner.critic import CriticModel
from posttrain.learner.forward import Net, forward, parts, score_batch, values
from posttrain.learner.rank_balance import Deal, deal
from posttrain.learner.ranks import ALONE, Parallel, Ranks
from posttrain.learner.shards import shard, sharded_modules
from posttrain.math.everywhere import HERE, Everywhere
from posttrain.types import Batch, Outputs, PerToken, Trajectory, UserError


class Passes:
    """The policy with its critic, and the reference, as several ranks compute them together.

    `budget` are the packed tokens of a microbatch; `whole` keeps the rows of a group on one rank, and in one.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        critic: CriticModel | None,
        reference: PreTrainedModel | None,
        *,
        ranks: Ranks,
        parallel: Parallel,
        adapter: bool,
        temperature: float,
        budget: int,
        whole: bool,
    ) -> None:
        self.net = Net(policy, critic)
        frozen = None if reference is None else reference.requires_grad_(False)
        self.reference = None if frozen is None else Net(frozen)
        self.ranks, self.parallel, self.whole = ranks, parallel, whole
        self.temperature, self.budget = temperature, budget
        nets = [net for net in (self.net, self.reference) if net is not None]
        if parallel.cpu_offload and ranks is ALONE:
            raise UserError(
                "train.cpu_offload",
                "FSDP2 keeps the shares, and no rank was started",
                "start one with torchrun --nproc-per-node 1, or leave it out",
            )
        # A process that nobody started as a rank has nobody to share with.
        shards = parallel.shard and ranks is not ALONE
        for net in nets if shards else ():
            shard(net, parallel, ranks.size, adapter=adapter)
        self._shares = [module for net in nets for module in sharded_modules(net)]
        # Whoever gathers shares for a pass needs all ranks in it.
        self._together: Everywhere = ranks if shards else HERE

    def deal(self, batch: Batch, extra: Mapping[str, PerToken] = MappingProxyType({})) -> Deal:
        """The rows that this rank computes, with columns that go with them."""
        return deal(self.ranks, batch, extra, whole=self.whole, balance=self.parallel.balance)

    def learn(self, work: Deal) -> Iterator[tuple[list[int], Batch]]:
        """(row numbers, rows) of each microbatch of a step; between them a gradient is asked for.

        Weights are gathered, and gradients added up over ranks, once a step where there is memory for that.
        """
        cut = parts(work.batch, self.budget, whole=self.whole, together=self._together)
        for rows, part, last in cut:
            if isinstance(self.net, FSDPModule):
                once = not (last or self.parallel.reshard_after_forward)
                self.net.set_requires_gradient_sync(not once)
                self.net.set_reshard_after_backward(not once)
            yield rows, part
        self.give_up_shares()

    def score(self, net: Net, batch: Batch) -> Outputs:
        """What a net says of every trained token, without gradients."""
        work = self.deal(batch)
        with self.ranks.waiting("scores"):
            out = score_batch(net, work.batch, self.temperature, self.budget, self._together)
        self.give_up_shares()
        columns = {"logp": out.logp, "entropy": out.entropy, "value": out.value}
        return Outputs(**work.back({k: v for k, v in columns.items() if v is not None}))

    def read(self, batch: Batch) -> PerToken:
        """V at every trained token, without the output head."""
        work = self.deal(batch)
        value = torch.zeros_like(work.batch.logp_gen)
        with torch.no_grad(), self.ranks.waiting("values"):
            for rows, part, _ in parts(work.batch, self.budget, together=self._together):
                found = values(self.net, part)
                if rows:
                    value[rows] = found.to(value)
        self.give_up_shares()
        return work.back({"value": value})["value"]

    def canary(self, row: list[int]) -> list[float]:
        """log π(token t | tokens before t) for t ≥ 1, at temperature 1; every rank asks for the same row."""
        with torch.no_grad(), self.ranks.waiting("the canary"):
            out = forward(self.net, Batch.of([Trajectory.given(row)], [0]), temperature=1.0)
        self.give_up_shares()
        logp: list[float] = out.logp[0, 1:].tolist()
        return logp

    def give_up_shares(self) -> None:
        """Leaves of weights that were gathered for passes this rank's share."""
        for module in self._shares:
            module.reshard()
