"""Decoding steps of fixed shape, recorded once on a GPU and then replayed as one launch.

A step of a small model is hundreds of kernels of a few microseconds each, which Python launches
more slowly than the GPU runs them. A recording (a CUDA graph) keeps the addresses that it reads
and writes, so rows and columns are rounded up to a few shapes, the inputs lie at one place, and
recordings end when the cache moves.
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
"""Columns are rounded up to a multiple of this: attention over them is cheap beside the weights. Beyond 4096
to so large a multiple that at most an eighth is added: answers of 33k tokens would meet 129 shapes."""

Step = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(tokens [R], lengths [R], columns) -> logits [R, V]; must not read a value back from the device."""
Replay = Callable[[], None]
"""Runs a recorded step on what its inputs hold now."""
Record = Callable[[Replay], Replay]
_ALONE = threading.Lock()
"""Held while a step is recorded: a recording waits for the device, which breaks one of another thread."""


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Where steps of this device are recorded, and run once before. One for all, as for each cuBLAS keeps a
    work space (32 MiB on Hopper); and our own, as torch's is of the GPU on which it first recorded anything:
    what runs on another is not recorded, and its replay does nothing."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class CudaGraphs:
    """Records steps as CUDA graphs.

    They share one pool of memory: what one of them computes with, the next may overwrite, so a step leaves
    what is wanted of it elsewhere. A pool ends with the last of its graphs, so that new graphs need a new
    object.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Replay) -> Replay:
        """A replay of this step; RuntimeError for one that waits for the device."""
        with _ALONE, torch.cuda.device(self.device):
            now, beside = torch.cuda.current_stream(), _stream(self.device)
            # A recording that fails may leave its own stream behind as the current one.
            with torch.cuda.stream(now):
                # It asks for a first run on its stream: kernels are chosen and work spaces made there.
                beside.wait_stream(now)
                with torch.cuda.stream(beside):
                    step()
                now.wait_stream(beside)
                graph = torch.cuda.CUDAGraph()
                # Of other threads, as the learner's, nothing is forbidden meanwhile.
                mode = "thread_local"
                with torch.cuda.graph(graph, self.pool, beside, capture_error_mode=mode):
                    step()

        def replay() -> None:
            with torch.cuda.device(self.device):
                graph.replay()

        return replay


class CapturedStep:
    """A step that is recorded for each shape it meets; replays give the step's own numbers."""

    def __init__(
        self, step: Step, cache: Cache, device: torch.device, recorder: Callable[[], Record]
    ) -> None:
        """recorder: makes what records, again whenever the cache has moved."""
        self.step, self.cache, self.recorder, self.record = step, cache, recorder, recorder()
        # One place for all shapes: a recording of R rows reads the first R of tokens and of lengths, and
        # writes the first R of logits. Each with logits of its own would hold gigabytes.
        self.inputs = torch.zeros(2, min(cache.most_rows, cache.tokens), dtype=torch.long, device=device)
        self.logits: torch.Tensor | None = None
        self._replays: dict[tuple[int, int], Replay] = {}
        self._moves = cache.moves
        self._refused = False

    def __call__(self, tokens: list[int], lengths: list[int]) -> Float[torch.Tensor, "B V"]:
        """The step's logits for these rows; they are overwritten by the next call."""
        rows, columns = self._shape(len(tokens), max(lengths) + 1)
        spare = [0] * (rows - len(tokens))
        # A row beyond the running ones writes to its own first column, which nobody reads: whoever takes the
        # row puts a prompt there first.
        self.inputs[:, :rows] = on_device([tokens + spare, lengths + spare], self.inputs.device)
        self._replay(rows, columns)()
        assert self.logits is not None
        return self.logits[: len(tokens)]

    def _shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The rows and columns to run: few different ones, and none that the cache does not have."""
        unit = max(COLUMNS, (1 << columns.bit_length()) // 16)
        return (
            min(1 << (rows - 1).bit_length(), self.cache.rows),
            min(-(-columns // unit) * unit, self.cache.columns),
        )

    def _replay(self, rows: int, columns: int) -> Replay:
        if self._moves != self.cache.moves:
            self._replays.clear()
            self.record, self._moves, self.logits = self.recorder(), self.cache.moves, None

        def step() -> None:
            logits = self.step(self.inputs[0, :rows], self.inputs[1, :rows], columns)
            if self.logits is None:  # at the first step of all, which is not being recorded
                self.logits = logits.new_empty(self.cache.rows, logits.shape[-1])
            self.logits[:rows] = logits

        if self.logits is None:
            step()
        if self._refused:
            return step
        if (rows, columns) not in self._replays:
            try:
                self._replays[rows, columns] = self.record(step)
            except RuntimeError as error:
                self._refused = True
                self._replays.clear()  # it may be memory that is lacking
                warnings.warn(f"decoding is not recorded from here on, and slower: {error}", stacklevel=2)
                return step
        return self._replays[rows, columns]
