"""The ranks that train one model together, as torchrun or Ray starts them. One process is a group of one.

Between ranks go sums of gradients, rows that are dealt, and small things that all must decide alike. Every
rank makes the same calls in the same order; so whatever decides what happens next is first made the same on
all of them. A rank that dies, hangs or differs ends the run on every other one, which say which it was.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from posttrain.math.everywhere import Everywhere, Here
from posttrain.types import UserError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How several ranks train one model; one process reads none of it."""

    shard: bool = False
    """Each rank holds a share of masters and moments (FSDP2), where else it holds all of them."""
    reshard_after_forward: bool = False
    """With shard: a layer's weights are gathered for each pass and given up behind it, and its gradient is
    scattered at once (ZeRO-3). Else both stay whole until a step's last pass: faster, and more memory."""
    cpu_offload: bool = False
    """With shard: shares and moments are kept in the processor's memory, where AdamW then runs."""
    balance: bool = True
    """Rows are dealt to ranks so that each computes about as many tokens; if not, each trains on its own."""
    deadline_s: float = 600.0
    """Seconds for which ranks wait for one another before the run ends: more than one may sample longer than
    another."""
    check_every: int = 10
    """Updates after which ranks compare the digests of their weights; 0: never."""
    ranks: int = 0
    """Ranks that Ray starts, in one placement group of the cluster at async.address; 0: as many as torchrun
    has started, or one."""
    cpus: float = 1.0
    """Processors that Ray sets aside for each of them."""
    gpus: float = 0.0
    """GPUs likewise."""

    def __post_init__(self) -> None:
        if self.deadline_s <= 0:
            raise ValueError(f"deadline_s must be above 0, not {self.deadline_s}")
        if min(self.ranks, self.gpus) < 0 or self.cpus <= 0:
            raise ValueError("ranks and gpus must be 0 or more, and cpus above 0")
        if self.check_every < 0:
            raise ValueError(f"check_every must be 0 (never) or more, not {self.check_every}")
        for name in ("reshard_after_forward", "cpu_offload"):
            if getattr(self, name) and not self.shard:
                raise ValueError(f"{name} is of weights that are sharded: set shard = true beside it")


class Ranks(Everywhere, Protocol):
    """The ranks that train together."""

    rank: int
    size: int

    def gather(self, what: T, called: str = "numbers") -> list[T]:
        """What each rank gives, in their order; small things that can be pickled."""
        ...

    def tell(self, what: T, called: str = "numbers") -> T:
        """What rank 0 gives, on all; what others give is not looked at. Ranks pass it on to one another."""
        ...

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """Gives part r to rank r; what each rank gave to this one, in their order."""
        ...

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Σ over ranks of each tensor, in place."""
        ...

    def waiting(self, what: str) -> Any:
        """A context for messages that others send (FSDP2's), so that a lost rank is named in them too."""
        ...

    def agree(self, what: str, value: str) -> None:
        """RunError that names the ranks which have another value than rank 0."""
        ...

    def sent(self) -> dict[str, float]:
        """Bytes that this rank has given others since it was last asked, by what they were, as metrics."""
        ...


class Alone(Here):
    rank, size = 0, 1

    def gather(self, what: T, called: str = "numbers") -> list[T]:
        """What it is given, alone."""
        return [what]

    def tell(self, what: T, called: str = "numbers") -> T:
        return what

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        return list(parts)

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leaves them as they are."""

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        yield

    def agree(self, what: str, value: str) -> None: ...

    def sent(self) -> dict[str, float]:
        return {}


ALONE: Ranks = Alone()


def launched() -> bool:
    """Whether this process is a rank that torchrun or Ray started."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def restarts() -> int:
    """How often torchrun has started it again, after a rank was lost."""
    return told_number("TORCHELASTIC_RESTART_COUNT")


def told_number(name: str) -> int:
    """What torchrun leaves in the environment, 0 if nothing; UserError if it is no whole number."""
    given = os.environ.get(name) or "0"
    try:
        return int(given)
    except ValueError:
        fix = "torchrun sets it, unset it where there is none"
        raise UserError(name, f"{given!r} is no whole number", fix) from None
