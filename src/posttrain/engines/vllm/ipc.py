"""Memory of this process's GPU that the worker of a vLLM server on the same GPU opens (CUDA IPC).

The form of a handle is that of vLLM 0.32, whose source was read: the arguments by which torch opens a tensor
of another process, by the GPU's UUID. Both sides need the same version of torch. It has never been run.
"""

from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import reduce_tensor


class LentMemory(Protocol):
    """Memory that another process can open."""

    device: torch.device
    """Device of the memory that it lends."""

    def empty(self, size: int) -> torch.Tensor:
        """Return bytes that can be lent, [size]."""
        ...

    def handles(self, tensor: torch.Tensor) -> dict[str, tuple[Any, ...]]:
        """Return by the UUID of the GPU what opens this tensor while it exists; once for each tensor."""
        ...

    def free(self) -> None:
        """Release the memory of deleted tensors that the other process has closed."""
        ...


class CudaIpc:
    """Memory of a GPU, lent by torch's part for tensors in queues between processes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @staticmethod
    def obstacle(device: torch.device) -> str:
        """Return why a process that computes on this device can lend none, "" if it can."""
        return "" if device.type == "cuda" else f"it needs a GPU of the sampler, whose device is {device}"

    def empty(self, size: int) -> torch.Tensor:
        # Segments that grow pass to another process by pidfd_getfd, which Linux often permits no sibling.
        settings = torch._C._accelerator_getAllocatorSettings()
        torch._C._accelerator_setAllocatorSettings(f"{settings},expandable_segments:False".lstrip(","))
        try:
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        finally:
            torch._C._accelerator_setAllocatorSettings(settings)

    def handles(self, tensor: torch.Tensor) -> dict[str, tuple[Any, ...]]:
        _, arguments = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
        return {str(torch.cuda.get_device_properties(self.device).uuid): arguments}

    def free(self) -> None:
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()  # a server that wakes up cannot take what PyTorch keeps for itself
