"""Decoding steps of fixed shape, captured once on a GPU as CUDA graphs and then replayed as one launch.

A step of a small model is hundreds of kernels of a few microseconds each, which Python launches more slowly
than the GPU runs them. A CUDA graph fixes the addresses that it reads and writes. So rows and columns are
rounded up to a few shapes, all shapes share one buffer of inputs, and graphs are discarded when the cache is
reallocated. Where it is divided into other rows, they are kept for when it is divided so again.
"""

import threading
import warnings
from collections.abc import Callable
from functools import cache

import torch
from jaxtyping import Float

from posttrain.engines.native.cache import Cache
from posttrain.models.loading import on_device

COLUMNS = 256
"""Columns are rounded up to a multiple of this: attention over them is cheap compared to reading the weights.
Beyond 4096 the multiple grows, to add at most an eighth: answers of 33k tokens would need 129 shapes."""

Step = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(tokens [R], lengths [R], columns) -> logits [R, V]; must not read a value back from the device."""
Replay = Callable[[], None]
"""Runs a captured step on the current contents of its inputs."""
Record = Callable[[Replay], Replay]
_ALONE = threading.Lock()
"""Locked while a step is captured: a capture waits for the device, which breaks one of another thread."""


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which steps of this device are captured, after one ordinary run.

    There is one for all steps, since cuBLAS keeps a work space for each stream (32 MiB on Hopper). It is not
    the capture stream of torch, which belongs to the GPU of the first capture: kernels of another GPU are not
    captured there, and their replay does nothing.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class CudaGraphs:
    """Capture steps as CUDA graphs.

    The graphs share one pool of memory: a graph may overwrite what another one computed, so a step copies its
    results elsewhere. A pool ends with its last graph, so new graphs need a new object.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Replay) -> Replay:
        """Return the replay of a step. Raise RuntimeError if the step waits for the device."""
        with _ALONE, torch.cuda.device(self.device):
            current, capturing = torch.cuda.current_stream(), _stream(self.device)
            # A capture that fails may leave its own stream as the current one.
            with torch.cuda.stream(current):
                # A capture needs a run on its stream before: it chooses kernels and allocates work spaces.
                capturing.wait_stream(current)
                with torch.cuda.stream(capturing):
                    step()
                current.wait_stream(capturing)
                graph = torch.cuda.CUDAGraph()
                # Other threads, as the learner's, may use the device in the meantime.
                mode = "thread_local"
                with torch.cuda.graph(graph, self.pool, capturing, capture_error_mode=mode):
                    step()

        def replay() -> None:
            with torch.cuda.device(self.device):
                graph.replay()

        return replay


class Recordings:
    """Replays of steps by their shapes; once a step cannot be captured, all run as they are."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.replays: dict[tuple[int, ...], Replay] = {}
        self._is_refused = False

    def renew(self, record: Record) -> None:
        """Discard all replays; `record` captures the next ones."""
        self.record, self.replays = record, {}

    def replay(self, shape: tuple[int, ...], step: Replay) -> Replay:
        """Return the replay of a step of this shape, or the step itself."""
        if not self._is_refused and shape not in self.replays:
            try:
                self.replays[shape] = self.record(step)
            except RuntimeError as error:
                self._is_refused = True
                self.replays.clear()  # memory may be the reason
                warnings.warn(f"decoding is not recorded from here on, and slower: {error}", stacklevel=3)
        return self.replays.get(shape, step)


class CapturedStep:
    """A step that is captured for each shape it meets; replays return the same numbers as the step."""

    def __init__(
        self, step: Step, cache: Cache, device: torch.device, recorder: Callable[[], Record]
    ) -> None:
        """recorder: returns an object that captures steps; called again after each reallocation."""
        self.step, self.cache, self.recorder = step, cache, recorder
        self.recordings = Recordings(recorder())
        # All shapes share these buffers: a graph of R rows reads the first R tokens and lengths, and writes
        # the first R rows of logits. Separate logits for each shape would take gigabytes.
        self.inputs = torch.zeros(2, min(cache.max_rows, cache.tokens), dtype=torch.long, device=device)
        self.logits: torch.Tensor | None = None
        self._reallocations = cache.reallocations

    def __call__(self, tokens: list[int], lengths: list[int]) -> Float[torch.Tensor, "B V"]:
        """Return the step's logits for these rows; the next call overwrites them."""
        rows, columns = self._shape(len(tokens), max(lengths) + 1)
        spare = [0] * (rows - len(tokens))
        # A spare row writes to its own first column, which is not read: a prompt is copied to a row before
        # the row is used.
        self.inputs[:, :rows] = on_device([tokens + spare, lengths + spare], self.inputs.device)
        self._replay(rows, columns)()
        assert self.logits is not None
        return self.logits[: len(tokens)]

    def _shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the rows and columns to run: few different numbers, within those of the cache."""
        unit = max(COLUMNS, (1 << columns.bit_length()) // 16)
        return (
            min(1 << (rows - 1).bit_length(), self.cache.rows),
            min(-(-columns // unit) * unit, self.cache.columns),
        )

    def _replay(self, rows: int, columns: int) -> Replay:
        if self._reallocations != self.cache.reallocations:
            self.recordings.renew(self.recorder())
            self._reallocations, self.logits = self.cache.reallocations, None

        def step() -> None:
            logits = self.step(self.inputs[0, :rows], self.inputs[1, :rows], columns)
            if self.logits is None:  # at the very first step, which is not captured
                self.logits = logits.new_empty(self.inputs.shape[1], logits.shape[-1])
            self.logits[:rows] = logits

        if self.logits is None:
            step()
        return self.recordings.replay((rows, columns, self.cache.columns), step)
