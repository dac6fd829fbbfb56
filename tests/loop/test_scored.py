"""A reference's log-probabilities: computed once, found again by what a row is, and never for another row."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain.loop.reference import AT_ONCE, load_or_score
from posttrain.plan.dataset_rows import Group, numbered, row
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
    first = load_or_score(file, PAIRS, reference, lambda done, total: seen.append((done, total)))
    assert reference.rows == 2 * len(PAIRS)
    assert seen == [(AT_ONCE, len(PAIRS)), (len(PAIRS), len(PAIRS))]
    again = load_or_score(file, PAIRS[3:5], reference)
    assert reference.rows == 2 * len(PAIRS), "nobody is asked twice"
    part = Batch.of(*numbered([PAIRS[4], PAIRS[3]]))
    wanted = Reference()(part)
    for each in (first, again):
        column = each.column(part)
        assert torch.equal(column[part.mask], wanted[part.mask])
        assert not column[~part.mask].any()
    assert not list(tmp_path.glob("*.tmp"))
    held = load_file(file)
    assert held.keys() == {"digests", "lengths", "logp"}, "however many rows there are"
    assert len(held["logp"]) == sum(sum(r.sampled) for p in PAIRS for r in p), "trained tokens alone"
    assert len(held["digests"]) == len(held["lengths"]) == 2 * len(PAIRS)


@pytest.mark.parametrize("killed", [1, 2])
def test_what_was_scored_before_a_kill_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: int
) -> None:
    """Answers that depend on what else is asked for at once come out as if there had been no kill."""
    monkeypatch.setattr("posttrain.loop.reference.KEEP_S", 0.0)
    groups = [pair(n % 100, *range(n % 7)) for n in range(3 * AT_ONCE + 5)]
    groups[40:40] = [PAIRS[0]] * 3

    def together(batch: Batch) -> PerToken:
        return torch.where(batch.mask, batch.tokens.float().sum() / 7 + batch.tokens, torch.nan)

    asked: list[int] = []

    def dies(batch: Batch) -> PerToken:
        if len(asked) == killed:
            raise KeyboardInterrupt
        asked.append(len(batch))
        return together(batch)

    whole = load_or_score(tmp_path / "whole.safetensors", groups, together)
    file, rows = tmp_path / "reference.safetensors", Reference()
    with pytest.raises(KeyboardInterrupt):
        load_or_score(file, groups, dies)
    again = load_or_score(file, groups, lambda batch: (rows(batch), together(batch))[1])
    assert rows.rows + sum(asked) == 2 * len({tuple(good.tokens) for good, _ in groups})
    batch = Batch.of(*numbered(groups))
    assert torch.equal(again.column(batch), whole.column(batch))


def test_what_the_file_lacks_is_computed_and_the_rest_stays_bit_for_bit(tmp_path: Path) -> None:
    """Among other rows a reference rounds otherwise: here it says another number each time it is asked."""
    file, reference = tmp_path / "reference.safetensors", Reference()
    load_or_score(file, PAIRS[:4], reference)
    before = load_file(file)
    seen: list[tuple[int, int]] = []
    again = load_or_score(
        file,
        PAIRS[2:9],
        lambda batch: reference(batch) + 1,
        lambda done, total: seen.append((done, total)),
    )
    assert reference.rows == 2 * 9, "those that are held are not asked for"
    assert seen == [(5, 5)]
    after = load_file(file)
    assert len(after["lengths"]) == 2 * 9
    assert all(torch.equal(after[key][: len(before[key])], before[key]) for key in before)
    held, fresh = (Batch.of(*numbered(part)) for part in (PAIRS[2:4], PAIRS[4:9]))
    assert torch.equal(again.column(held)[held.mask], Reference()(held)[held.mask])
    assert torch.equal(again.column(fresh)[fresh.mask], Reference()(fresh)[fresh.mask] + 1)
    load_or_score(file, PAIRS[:9], reference)
    assert reference.rows == 2 * 9


def test_a_row_of_two_groups_is_held_once_and_keeps_what_was_said_first(tmp_path: Path) -> None:
    file, (good, bad) = tmp_path / "reference.safetensors", PAIRS[0]
    load_or_score(file, [(good,)], Reference())
    before = load_file(file)["logp"]
    load_or_score(file, [(good, bad), (good, bad)], lambda batch: Reference()(batch) + 1)
    after = load_file(file)
    assert len(after["lengths"]) == 2
    assert torch.equal(after["logp"][: len(before)], before)


@pytest.mark.parametrize("left", [0, 100])
def test_a_file_that_was_cut_off_is_computed_again(tmp_path: Path, left: int) -> None:
    file, reference = tmp_path / "reference.safetensors", Reference()
    whole = load_or_score(file, PAIRS[:2], reference)
    with file.open("r+b") as opened:
        opened.truncate(left)
    again = load_or_score(file, PAIRS[:2], reference)
    batch = Batch.of(*numbered(PAIRS[:2]))
    assert torch.equal(again.column(batch), whole.column(batch))
    assert reference.rows == 8


@pytest.mark.parametrize("other", ["a tensor for each row", "columns of another table"])
def test_a_file_that_holds_something_else_is_computed_again(tmp_path: Path, other: str) -> None:
    file, reference = tmp_path / "reference.safetensors", Reference()
    whole = load_or_score(file, PAIRS[:2], reference)
    held = load_file(file)
    columns = {"5f" * 16: torch.ones(3)} if "row" in other else held | {"lengths": held["lengths"][1:]}
    save_file(columns, file)
    again = load_or_score(file, PAIRS[:2], reference)
    batch = Batch.of(*numbered(PAIRS[:2]))
    assert torch.equal(again.column(batch), whole.column(batch))
    assert reference.rows == 8


def test_another_row_is_not_taken_for_one_that_was_load_or_score(tmp_path: Path) -> None:
    held = load_or_score(tmp_path / "reference.safetensors", [pair(5, 6)], Reference())
    other = row([1, 2, 5, 6, 8], [False, False, True, True, False], 0.0)  # another mask over the same tokens
    for each in (other, *pair(5, 7)):
        with pytest.raises(KeyError):
            held.column(Batch.of([each], [0]))
