"""A reference's log-probabilities: computed once, found again by what a row is, and never for another row."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from posttrain.runtime.rows import Group, numbered, row
from posttrain.runtime.scored import AT_ONCE, scored
from posttrain.types import Batch, PerToken


class Reference:
    """Says of each token a number that depends on it and on where it is; counts what it is asked."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, batch: Batch) -> PerToken:
        self.rows += len(batch)
        places = torch.arange(batch.tokens.shape[1]) + 1
        # What stands outside the mask is nobody's to read.
        return torch.where(batch.mask, -(batch.tokens * places).float() / 7, torch.nan)


def pair(*tokens: int) -> Group:
    """A question of two tokens, and two answers that begin with these."""
    return tuple(
        row([1, 2, *tokens, end], [False, False, *[True] * (len(tokens) + 1)], end) for end in (8, 9)
    )


PAIRS = [pair(n, *range(n % 4)) for n in range(AT_ONCE + 9)]


def test_they_are_computed_once_and_then_read(tmp_path: Path) -> None:
    file, reference, seen = tmp_path / "reference.safetensors", Reference(), list[tuple[int, int]]()
    first = scored(file, PAIRS, reference, lambda done, total: seen.append((done, total)))
    assert reference.rows == 2 * len(PAIRS)
    assert seen == [(AT_ONCE, len(PAIRS)), (len(PAIRS), len(PAIRS))]
    again = scored(file, PAIRS[3:5], reference)
    assert reference.rows == 2 * len(PAIRS), "nobody is asked twice"
    part = Batch.of(*numbered([PAIRS[4], PAIRS[3]]))
    wanted = Reference()(part)
    for each in (first, again):
        column = each.column(part)
        assert torch.equal(column[part.mask], wanted[part.mask])
        assert not column[~part.mask].any()
    assert not list(tmp_path.glob("*.tmp"))
    sizes = {name: t.numel() for name, t in load_file(file).items()}
    assert sum(sizes.values()) == sum(sum(r.sampled) for p in PAIRS for r in p), "trained tokens alone"
    assert len(sizes) == 2 * len(PAIRS)


def test_what_the_file_lacks_is_computed(tmp_path: Path) -> None:
    file, reference = tmp_path / "reference.safetensors", Reference()
    scored(file, PAIRS[:4], reference)
    scored(file, PAIRS[:5], reference)
    assert reference.rows == 2 * (4 + 5)
    scored(file, PAIRS[:5], reference)
    assert reference.rows == 2 * (4 + 5)


@pytest.mark.parametrize("left", [0, 100])
def test_a_file_that_was_cut_off_is_computed_again(tmp_path: Path, left: int) -> None:
    file, reference = tmp_path / "reference.safetensors", Reference()
    whole = scored(file, PAIRS[:2], reference)
    with file.open("r+b") as opened:
        opened.truncate(left)
    again = scored(file, PAIRS[:2], reference)
    batch = Batch.of(*numbered(PAIRS[:2]))
    assert torch.equal(again.column(batch), whole.column(batch))
    assert reference.rows == 8


def test_another_row_is_not_taken_for_one_that_was_scored(tmp_path: Path) -> None:
    held = scored(tmp_path / "reference.safetensors", [pair(5, 6)], Reference())
    other = row([1, 2, 5, 6, 8], [False, False, True, True, False], 0.0)  # another mask over the same tokens
    for each in (other, *pair(5, 7)):
        with pytest.raises(KeyError):
            held.column(Batch.of([each], [0]))
