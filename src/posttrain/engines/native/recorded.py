"""Decoding steps of fixed shape, recorded once on a GPU and then replayed as one launch.

A step of a small model is hundreds of kernels of a few microseconds each, which Python launches
more slowly than the GPU runs them. A recording (a CUDA graph) keeps the addresses that it reads
and writes, so rows and columns are rounded up to a few shapes, the inputs lie at one place, and
recordings end when the cache moves.
"""

import warnings
from collections.abc import Callable

import torch
from jaxtyping import Float

from posttrain.engines.native.cache import Cache

COLUMNS = 256
"""Columns are rounded up to a multiple of this: attention over them is cheap beside the weights."""

Step = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(tokens [R], lengths [R], columns) -> logits [R, V]; must not read a value back from the device."""
Replay = Callable[[], torch.Tensor]
"""Runs a recorded step on what its inputs hold now."""
Record = Callable[[Callable[[], torch.Tensor]], Replay]


class CudaGraphs:
    """Records steps as CUDA graphs.

    They share one pool of memory: a replay may overwrite what another left there, and nothing of it is
    still wanted by then. A pool ends with the last of its graphs, so that new graphs need a new object.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], torch.Tensor]) -> Replay:
        """A replay of this step; RuntimeError for one that waits for the device."""
        with torch.cuda.device(self.device):
            now = torch.cuda.current_stream()
            # A recording that fails may leave its own stream behind as the current one.
            with torch.cuda.stream(now):
                # It asks for a first run on another stream: kernels are chosen and work spaces made there.
                beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                beside.wait_stream(now)
                with torch.cuda.stream(beside):
                    step()
                now.wait_stream(beside)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self.pool):
                    logits = step()

        def replay() -> torch.Tensor:
            with torch.cuda.device(self.device):
                graph.replay()
            return logits

        return replay


class Recorded:
    """A step that is recorded for each shape it meets; replays give the step's own numbers."""

    def __init__(
        self, step: Step, cache: Cache, device: torch.device, recorder: Callable[[], Record]
    ) -> None:
        """recorder: makes what records, anew whenever the cache has moved."""
        self.step, self.cache, self.recorder, self.record = step, cache, recorder, recorder()
        # One pair of inputs for all shapes: a recording of R rows reads the first R.
        self.tokens = torch.zeros(cache.most_rows, dtype=torch.long, device=device)
        self.lengths = torch.zeros(cache.most_rows, dtype=torch.long, device=device)
        self._replays: dict[tuple[int, int], Replay] = {}
        self._moves = cache.moves
        self._refused = False

    def __call__(self, tokens: list[int], lengths: list[int]) -> Float[torch.Tensor, "B V"]:
        """The step's logits for these rows; they are overwritten by the next call."""
        rows, columns = self._shape(len(tokens), max(lengths) + 1)
        spare = [0] * (rows - len(tokens))
        # A row beyond the running ones writes to its own first column, which nobody reads: whoever takes the
        # row puts a prompt there first.
        self.tokens[:rows] = torch.tensor(tokens + spare)
        self.lengths[:rows] = torch.tensor(lengths + spare)
        return self._replay(rows, columns)()[: len(tokens)]

    def _shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The rows and columns to run: few different ones, and none that the cache does not have."""
        return (
            min(1 << (rows - 1).bit_length(), self.cache.rows),
            min(-(-columns // COLUMNS) * COLUMNS, self.cache.columns),
        )

    def _replay(self, rows: int, columns: int) -> Replay:
        if self._moves != self.cache.moves:
            self._replays.clear()
            self.record, self._moves = self.recorder(), self.cache.moves

        def step() -> Float[torch.Tensor, "R V"]:
            return self.step(self.tokens[:rows], self.lengths[:rows], columns)

        if self._refused:
            return step
        if (rows, columns) not in self._replays:
            try:
                self._replays[rows, columns] = self.record(step)
            except RuntimeError as error:
                self._refused = True
                warnings.warn(f"decoding is not recorded from here on, and slower: {error}", stacklevel=2)
                return step
        return self._replays[rows, columns]
