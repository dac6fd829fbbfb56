"""The group through which weights pass to the workers of a vLLM server from GPU to GPU.

    broadcast  consumes      bytes on this process's GPU
               waits for     each worker of the server, without a deadline
               unblocked by  a worker that takes them; a caller that must end sooner calls it in a thread

Rank 0 of the group makes NCCL's id, which the server gets in a request (`nccl_unique_id_b64`). So the sides
need neither a store to meet nor vLLM in this process, but the same version of NCCL. The calls and their order
are those of vLLM 0.32's workers, whose source was read; they have never been run.
"""

from typing import Protocol

import torch
from torch.cuda import nccl


class BroadcastGroup(Protocol):
    """This process as rank 0 of a group whose other ranks get its bytes."""

    device: torch.device
    """Where the tensors that it sends must be."""

    @property
    def identity(self) -> bytes:
        """128 bytes by which the other ranks find this one; the same at each access."""
        ...

    def join(self, size: int) -> None:
        """Return once all `size` ranks have joined, this one included; once, before any broadcast."""
        ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor to all other ranks, and return once its memory may be changed."""
        ...


class NcclGroup:
    """A group over NCCL, by the calls below torch's process groups (torch.cuda.nccl)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.identity = bytes(nccl.unique_id())  # type: ignore[no-untyped-call]

    @staticmethod
    def obstacle(device: torch.device) -> str:
        """Return why a process that computes on this device cannot be in such a group, "" if it can."""
        if device.type != "cuda":
            return f"it needs a GPU of the sampler, whose device is {device}"
        return "" if torch.distributed.is_nccl_available() else "this PyTorch was built without it"

    def join(self, size: int) -> None:
        # One of its own, so that the learner's kernels need not wait for a server.
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._communicators = [nccl.init_rank(size, self.identity, 0)]  # type: ignore[no-untyped-call]
            # Each of vLLM's workers adds one number when it has joined.
            one = torch.zeros(1, dtype=torch.float32, device=self.device)
            nccl.all_reduce([one], comms=self._communicators)  # type: ignore[no-untyped-call]
            self._stream.synchronize()

    def broadcast(self, tensor: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            nccl.broadcast([tensor], comms=self._communicators)
            self._stream.synchronize()
