"""The ranks that train one model together, started by torchrun or Ray. A single process is one rank.

Ranks exchange sums of gradients, dealt rows, and small values for decisions that all must make alike. Every
rank makes the same calls in the same order, so any value that decides on the next call must first be made
equal on all ranks. If a rank dies, hangs or differs, the others end the run and name it.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Any, Protocol, TypeVar

import torch

from posttrain.math.everywhere import Everywhere, Here
from posttrain.types import UserError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Training of one model on several ranks; a single process ignores it."""

    shard: bool = False
    """Each rank holds a share of masters and moments (FSDP2); otherwise each rank holds all."""
    reshard_after_forward: bool = False
    """With shard: gather a layer's weights for each pass, free them afterwards, and scatter its gradient at
    once (ZeRO-3). Otherwise both stay in memory until a step's last pass: faster, with more memory."""
    replicas: int = 1
    """With shard: number of sharded models, each on an equal number of consecutive ranks (HSDP). Weights are
    gathered within a model, and shares of gradients summed over all models: take the number of machines."""
    cpu_offload: bool = False
    """With shard: shares and moments are kept in the CPU's memory, where AdamW then runs."""
    experts: int = 1
    """With shard: consecutive ranks that hold different experts of each layer, and send their tokens to one
    another (expert parallelism). A divisor of the number of ranks and of a layer's experts; ranks that hold
    the same experts shard them."""
    context: int = 1
    """Consecutive ranks that compute each microbatch together, each an equal share of its tokens (Ulysses):
    for rows too long for one. A divisor of the number of ranks and of the model's attention heads; a
    microbatch then has steps.microbatch_tokens for each. Rows are dealt whatever `balance` is."""
    balance: bool = True
    """Deal rows to ranks so that each computes about as many tokens; otherwise a rank trains on its own."""
    deadline_s: float = 600.0
    """Seconds for which ranks wait for one another before the run ends; it must exceed the difference between
    the ranks' sampling times."""
    check_every: int = 10
    """Updates between comparisons of the digests of the ranks' weights; 0: never."""
    ranks: int = 0
    """Ranks that Ray starts, in one placement group of the cluster at async.address; 0: as many as torchrun
    has started, or one."""
    cpus: float = 1.0
    """CPUs that Ray reserves for each rank."""
    gpus: float = 0.0
    """GPUs that Ray reserves for each rank."""

    def __post_init__(self) -> None:
        if self.deadline_s <= 0:
            raise ValueError(f"deadline_s must be above 0, not {self.deadline_s}")
        if min(self.ranks, self.gpus) < 0 or self.cpus <= 0:
            raise ValueError("ranks and gpus must be 0 or more, and cpus above 0")
        if self.context < 1:
            raise ValueError(f"context must be 1 (each rank alone) or more, not {self.context}")
        if self.experts < 1:
            raise ValueError(f"experts must be 1 (each rank gathers all) or more, not {self.experts}")
        if self.check_every < 0:
            raise ValueError(f"check_every must be 0 (never) or more, not {self.check_every}")
        if self.replicas < 1:
            raise ValueError(f"replicas must be 1 or more, not {self.replicas}")
        for name in ("reshard_after_forward", "replicas", "cpu_offload", "experts"):
            if getattr(self, name) != getattr(Parallel, name) and not self.shard:
                raise ValueError(f"{name} applies to sharded weights only: set shard = true too")


class Ranks(Everywhere, Protocol):
    """The ranks that train together. Labels name a message in errors."""

    rank: int
    size: int

    def gather(self, value: T, label: str = "numbers") -> list[T]:
        """Return each rank's value, in the order of ranks; for small values that can be pickled."""
        ...

    def tell(self, value: T, label: str = "numbers") -> T:
        """Return rank 0's value on all ranks, broadcast along a tree; other ranks' values are ignored."""
        ...

    def follow(self, label: str) -> None:
        """Return once rank 0 calls this too, without a deadline while it is alive."""
        ...

    def collect(self, value: T, label: str, stop: Event) -> list[T]:
        """Return each rank's value on rank 0, and this rank's alone on others, which do not wait.

        May be called in another thread than the other messages. Rank 0 waits without a deadline while ranks
        are alive, and until `stop` is set.
        """
        ...

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send part r to rank r; return the parts from each rank, in the order of ranks."""
        ...

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its sum over ranks, in place."""
        ...

    def waiting(self, label: str) -> Any:
        """Return a context for messages of other senders (FSDP2), whose errors then name a lost rank too."""
        ...

    def agree(self, verb: str, value: str) -> None:
        """Raise RunError naming the ranks whose value differs from rank 0's."""
        ...

    def sent(self) -> dict[str, float]:
        """Return the bytes that this rank has sent since the last call, by kind, as metrics."""
        ...


class Alone(Here):
    rank, size = 0, 1

    def gather(self, value: T, label: str = "numbers") -> list[T]:
        return [value]

    def tell(self, value: T, label: str = "numbers") -> T:
        return value

    def follow(self, label: str) -> None: ...

    def collect(self, value: T, label: str, stop: Event) -> list[T]:
        return [value]

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        return list(parts)

    def add(self, tensors: Sequence[torch.Tensor]) -> None: ...

    @contextmanager
    def waiting(self, label: str) -> Iterator[None]:
        yield

    def agree(self, verb: str, value: str) -> None: ...

    def sent(self) -> dict[str, float]:
        return {}


ALONE: Ranks = Alone()


def launched() -> bool:
    """Return whether this process is a rank that torchrun or Ray started."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def restarts() -> int:
    """Return how often torchrun has restarted this rank after the loss of a rank."""
    return environment_number("TORCHELASTIC_RESTART_COUNT")


def environment_number(name: str) -> int:
    """Return a number that torchrun put into the environment, 0 without it; UserError if not an integer."""
    text = os.environ.get(name) or "0"
    try:
        return int(text)
    except ValueError:
        fix = "torchrun sets it; unset it if you do not use torchrun"
        raise UserError(name, f"{text!r} is not a whole number", fix) from None
