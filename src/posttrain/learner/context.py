"""Context parallelism: several ranks compute one microbatch together, each some of its tokens.

Each rank of a *context* has the same packed rows, and embeds, projects and predicts an equal share of their
tokens. For attention it exchanges shares of tokens for shares of heads, attends as a rank alone would with a
part of the heads, and exchanges back. So prompts stay shared, and every mask is the one of a rank alone.

    tokens of rank c, all heads   → all-to-all →   all tokens, heads of rank c   → attend → all-to-all → back

All ranks of a context compute the same loss of all tokens; the gradient on a rank is that through its own
tokens, and the sum over ranks is the gradient.

Source: DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from jaxtyping import Int

from posttrain.learner.pack import Pack
from posttrain.learner.prompt_group import EVEN
from posttrain.learner.ranks import Ranks
from posttrain.math.tokens import Against
from posttrain.models.attention import RECURRENT, Heads, Sinks
from posttrain.models.experts import fill_routes
from posttrain.types import UserError


def check_context(size: int, ranks: int, configs: Sequence[Any]) -> None:
    """Raise UserError if `size` of the ranks cannot share the tokens of a microbatch of these models.

    configs: transformers' configurations of the models. A single rank ignores the size.
    """
    if 1 in (size, ranks):
        return
    if ranks % size:
        problem = f"{ranks} ranks are not a multiple of {size}"
        raise UserError("train.context", problem, "set it to a divisor of the number of ranks")
    for config in configs:
        text = config.get_text_config()
        heads, kind = text.num_attention_heads, text.model_type
        if heads % size:
            problem = f"the {heads} attention heads of {kind} are not a multiple of {size}"
            raise UserError("train.context", problem, f"set it to a divisor of {heads}")
        if RECURRENT in (getattr(text, "layer_types", None) or ()):
            problem = f"{kind} has layers that carry a state from token to token"
            raise UserError("train.context", problem, "leave it out")


@dataclass(frozen=True)
class ContextRanks:
    """The ranks that compute microbatches together, this one among them."""

    size: int
    place: int
    """This rank's number among them."""
    group: Any

    @staticmethod
    def of(ranks: Ranks, size: int, deadline_s: float) -> "ContextRanks | None":
        """Return this rank's context of `size` consecutive ranks, or None if each computes alone.

        deadline_s: seconds for which they wait for one another.
        """
        if 1 in (size, ranks.size):
            return None
        limit = timedelta(seconds=deadline_s)
        groups = [dist.new_group([*range(n, n + size)], timeout=limit) for n in range(0, ranks.size, size)]
        return ContextRanks(size, ranks.rank % size, groups[ranks.rank // size])

    def swap(self, x: torch.Tensor) -> torch.Tensor:
        """Send x[c] to rank c; return what each rank sent. x: [size, ...], of one shape on all."""
        x = x.contiguous()
        out = torch.empty_like(x)
        # As bytes: gloo has no all-to-all of every dtype.
        dist.all_to_all_single(out.view(torch.uint8), x.view(torch.uint8), group=self.group)
        return out

    def collect(self, x: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
        """Return `count` rows, of which each rank has those at its own `places`."""
        out = x.new_zeros(count, *x.shape[1:])
        out[places] = x
        dist.all_reduce(out.view(torch.uint8), group=self.group)  # the bytes of other ranks are 0
        return out


class TokenShare:
    """One rank's share of a pack's tokens; a layout for the model's pass over them (attention.Layout)."""

    spare = 0

    def __init__(self, packed: Pack, context: ContextRanks, *, half: bool, more: int = 1) -> None:
        """Cut the pack; half: in 16 bits a share has a multiple of EVEN tokens. more: see `own`."""
        self.packed, self.context = packed, context
        count = len(packed.tokens) + (packed.spare if half else 0)
        n = -(-count // (context.size * (EVEN if half else 1))) * (EVEN if half else 1)
        start = context.place * n
        fill = (0, context.size * n - len(packed.tokens))
        self.tokens: Int[torch.Tensor, "n"]
        self.positions: Int[torch.Tensor, "n"]
        self.tokens, self.positions = (
            torch.nn.functional.pad(x, fill)[start : start + n] for x in (packed.tokens, packed.positions)
        )
        self.routes = (
            None if packed.routes is None else fill_routes(packed.routes, fill[1])[:, start : start + n]
        )
        places = ((packed.source >= start) & (packed.source < start + n)).nonzero().flatten()
        self.count = len(places)
        """Number of trained tokens that this rank predicts."""
        # Without any, this rank's pass would have no gradient, and the others would wait for it.
        self.own: Int[torch.Tensor, "m"] = torch.cat([places, places.new_zeros(more)])
        """Which of the pack's trained tokens those are, and `more` others whose results are not read."""
        self.source = (packed.source[self.own] - start).clamp(0, n - 1)
        self.target = packed.target[self.own]

    def attend(
        self,
        query: Heads,
        key: Heads,
        value: Heads,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Sinks | None = None,
    ) -> Heads:
        """Attend to the tokens of all ranks with this rank's heads (see attention.Layout)."""
        H, K, size = query.shape[1], key.shape[1], self.context.size
        if K % size:  # fewer key heads than ranks: each is sent to several
            key, value = (x.repeat_interleave(H // K, dim=1) for x in (key, value))
        if sinks is not None:
            sinks = sinks.view(size, -1)[self.context.place]
        heads = self._heads_for_tokens(query, key, value)
        out = self.packed.attend(*heads, scale=scale, window=window, softcap=softcap, sinks=sinks)
        tokens = out.view(out.shape[1], size, -1, out.shape[3]).transpose(0, 1)
        parts: torch.Tensor = _Swap.apply(tokens, self.context)  # type: ignore[no-untyped-call]
        return parts.reshape(1, H, -1, out.shape[3])

    def _heads_for_tokens(self, *tensors: Heads) -> list[Heads]:
        """Return [1, H/size, N, D] of all tokens from each [1, H, n, D] of this rank's, in one message."""
        size = self.context.size
        parts = [x[0].reshape(size, x.shape[1] // size, *x.shape[2:]) for x in tensors]
        shapes = [part.shape for part in parts]
        joined = torch.cat([part.flatten(1) for part in parts], dim=1)
        joined = _Swap.apply(joined, self.context)  # type: ignore[no-untyped-call]
        received = torch.split(joined, [shape[1:].numel() for shape in shapes], dim=1)
        out = []
        for part, (_, heads, n, D) in zip(received, shapes, strict=True):
            out.append(part.view(size, heads, n, D).transpose(0, 1).reshape(1, heads, size * n, D))
        return out

    def read(self, layer: Any, hidden: torch.Tensor) -> NoReturn:
        """Raise NotImplementedError: check_context refuses layers with a state."""
        raise NotImplementedError

    def against(self, references: Sequence[Against]) -> list[Against]:
        """Return the references at the trained tokens `own`; each of several has one of the unread ones."""
        if len(references) == 1:
            [only] = references
            return [replace(only, hidden=only.hidden[self.own.to(only.hidden.device)])]
        place_of = torch.full((len(self.packed.target),), -1)
        place_of[self.own[: self.count]] = torch.arange(self.count)
        out = []
        for number, reference in enumerate(references):
            assert reference.places is not None
            places = place_of[reference.places]
            states = torch.cat([(places >= 0).nonzero().flatten(), torch.zeros(1, dtype=torch.long)])
            places = torch.cat([places[places >= 0], torch.tensor([self.count + number])])
            out.append(
                replace(reference, hidden=reference.hidden[states.to(reference.hidden.device)], places=places)
            )
        return out

    def join(self, column: torch.Tensor | None) -> Any:
        """Return a column of all trained tokens of the pack, of which this rank's have a gradient here."""
        if column is None:
            return None
        return _Join.apply(column, self)  # type: ignore[no-untyped-call]


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, context: ContextRanks) -> torch.Tensor:
        ctx.context = context
        return context.swap(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.context.swap(grad), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, column: torch.Tensor, share: TokenShare) -> torch.Tensor:
        ctx.places = places = share.own[: share.count].to(column.device)
        ctx.unread = len(share.own) - share.count
        return share.context.collect(column[: share.count], places, len(share.packed.target))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        unread = grad.new_zeros(ctx.unread, *grad.shape[1:])
        return torch.cat([grad[ctx.places], unread]), None
