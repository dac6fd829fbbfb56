"""Groups of earlier updates, in a bounded memory, to train on again."""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy
import torch

from posttrain.curriculum.stream import dice
from posttrain.types import Trajectory

Row = tuple[Trajectory, tuple[float, ...]]
"""A trajectory with its row of `Batch.parts` and its `Batch.greedy`, as far as the method reads them."""
Group = list[Row]
COLUMNS = {
    "tokens": torch.int32,
    "sampled": torch.bool,
    "logp_gen": torch.float64,
    "logp_policy": torch.float64,
    "version": torch.int32,
    "reward": torch.float64,
}
"""The dtype of each list of a trajectory in a checkpoint; none rounds a value."""
TOKEN_BYTES = sum(dtype.itemsize for dtype in COLUMNS.values())


class ReplayBuffer:
    """Hold the groups of the last `max_lag` updates, from which each update draws some again.

    The choice depends on (seed, update) alone. A group may be drawn in several updates, once in each.

    >>> row = Trajectory(tokens=[7, 3], sampled=[False, True], logp_gen=[0, -0.1], logp_policy=[0, -0.1],
    ...                  version=[0, 1], reward=[0, 1.0])
    >>> replay = ReplayBuffer(max_lag=2, seed=0)
    >>> replay.add(1, [[(row, ())], [(row, ())]])
    >>> len(replay.draw(1, update=2)), len(replay.draw(5, update=3)), len(replay.draw(5, update=4))
    (1, 2, 0)
    """

    def __init__(self, *, max_lag: int, seed: int) -> None:
        self.max_lag, self.seed = max_lag, seed
        self._groups: deque[tuple[int, Group]] = deque()

    def add(self, update: int, groups: Sequence[Group]) -> None:
        """Add the groups that this update trained on for the first time."""
        self._groups += [(update, group) for group in groups]

    def draw(self, count: int, update: int) -> list[Group]:
        """Return at most `count` groups of the last max_lag updates before this one, in order of arrival."""
        while self._groups and update - self._groups[0][0] > self.max_lag:
            self._groups.popleft()
        if count >= len(self._groups):
            return [group for _, group in self._groups]
        draw = dice(f"replay/{self.seed}/{update}").random
        # Only random() is the same in every version of Python.
        order = sorted((draw(), place) for place in range(len(self._groups)))
        return [self._groups[place][1] for place in sorted(place for _, place in order[:count])]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state for a checkpoint: columns of all tokens, and the sizes of rows and groups."""
        rows = [row for _, group in self._groups for row, _ in group]
        out = {
            name: torch.tensor([x for row in rows for x in getattr(row, name)], dtype=dtype)
            for name, dtype in COLUMNS.items()
        }
        if any(row.turn_state for row in rows):
            keys = [row.turn_state.get(t, 0) for row in rows for t in range(len(row.tokens))]
            out["turn_state"] = torch.tensor(keys, dtype=torch.int64)
        if any(row.teacher for row in rows):
            out["teacher"] = torch.tensor([row.teacher for row in rows], dtype=torch.int64)
        if routed := [row.routes for row in rows if row.routes is not None]:
            out["routes"] = torch.from_numpy(numpy.concatenate(routed))
            counts = [0 if row.routes is None else len(row.routes) for row in rows]
            out["routed_tokens"] = torch.tensor(counts, dtype=torch.int64)
        parts = [scores for _, group in self._groups for _, scores in group]
        out["parts"] = torch.tensor(parts, dtype=torch.float64)
        out["row_tokens"] = torch.tensor([len(row.tokens) for row in rows], dtype=torch.int64)
        out["group_rows"] = torch.tensor([len(group) for _, group in self._groups], dtype=torch.int64)
        out["group_update"] = torch.tensor([update for update, _ in self._groups], dtype=torch.int64)
        return out

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore columns that tensors() returned; raise KeyError if one is missing.

        Only `parts` may be missing: older checkpoints have none.
        """
        columns = {name: tensors[name].tolist() for name in COLUMNS}
        keys = tensors["turn_state"].tolist() if "turn_state" in tensors else []
        spans = _spans(tensors["row_tokens"])
        teachers = tensors["teacher"].tolist() if "teacher" in tensors else [0] * len(spans)
        routed = _spans(tensors["routed_tokens"]) if "routes" in tensors else [(0, 0)] * len(spans)
        rows = [
            Trajectory(
                **{name: column[start:end] for name, column in columns.items()},
                turn_state={t: key for t, key in enumerate(keys[start:end]) if key},
                teacher=teacher,
                routes=tensors["routes"][slice(*places)].numpy() if places[0] < places[1] else None,
            )
            for (start, end), teacher, places in zip(spans, teachers, routed, strict=True)
        ]
        parts = tensors["parts"].tolist() if "parts" in tensors else [()] * len(rows)
        pairs = [(row, tuple(scores)) for row, scores in zip(rows, parts, strict=True)]
        groups = [pairs[start:end] for start, end in _spans(tensors["group_rows"])]
        self._groups = deque(zip(tensors["group_update"].tolist(), groups, strict=True))


def _spans(sizes: torch.Tensor) -> list[tuple[int, int]]:
    """Return (start, end) of consecutive parts of these sizes."""
    return list(pairwise(accumulate(sizes.tolist(), initial=0)))
