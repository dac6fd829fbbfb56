"""Packing rollouts: nothing changes but the size, and what is left out is said."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.report import rollouts
from posttrain.report.record import Samples, read
from posttrain.report.rollouts import evenly, fitting, json_text, pack_file, pack_row, steps


def saved(path: Path, rows: list[Any]) -> Samples:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Samples(path, "train", 1, path.stat().st_size)


def row(**fields: Any) -> dict[str, Any]:
    return {
        "group": 0,
        "task": "t",
        "prompt": "p",
        "answer": "a",
        "pieces": ["x", "y"],
        "score": 1.0,
    } | fields


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 40))
def test_evenly_keeps_order_and_both_ends(items: list[int], n: int) -> None:
    indices = evenly(range(len(items)), n)
    assert len(indices) == min(n, len(items))
    assert indices == sorted(set(indices))
    assert indices[-1] == len(items) - 1
    assert n == 1 or indices[0] == 0


@given(st.lists(st.integers(1, 100), min_size=1, max_size=50), st.integers(1, 2000))
def test_fitting_stays_within_the_budget_or_keeps_one(sizes: list[int], budget: int) -> None:
    kept = fitting(sizes, lambda s: s, budget)
    assert sum(kept) <= budget or len(kept) == 1


@given(st.recursive(st.text() | st.sampled_from(["</script>", "<!--", "\ud800"]), st.lists))
def test_json_of_any_text_is_ascii_without_markup_and_reads_back(value: Any) -> None:
    dumped = json_text(value)
    assert dumped.isascii()
    assert "<" not in dumped
    assert json.loads(dumped) == value


def test_a_column_is_written_once_where_its_counted_entries_are_equal() -> None:
    packed, odd = pack_row(
        row(
            sampled=[True, False],
            advantage=[0.5, 9.0],
            entropy=[None, 0.0],
            logp_gen=[-0.1, 0],
            reward=[0, 1],
        )
    )
    assert (packed["advantage"], packed["entropy"], packed["logp_gen"]) == (0.5, None, -0.1)
    assert packed["sampled"] == [1, 0]
    assert packed["reward"] == [0, 1]
    assert odd == set()


def test_a_column_that_differs_keeps_every_counted_entry() -> None:
    packed, _ = pack_row(
        row(pieces=["x", "y", "z"], sampled=[True, False, True], logp=[-0.123456, -7, float("nan")])
    )
    assert packed["logp"] == [-0.12346, 0, None]


def test_logp_policy_that_repeats_logp_gen_is_named_not_repeated() -> None:
    packed, _ = pack_row(row(logp_gen=[-1, -2], logp_policy=[-1, -2]))
    assert packed["logp_policy"] == "logp_gen"
    packed, _ = pack_row(row(logp_gen=[-1, -2], logp_policy=[-1, -3]))
    assert packed["logp_policy"] == [-1, -3]


def test_columns_that_do_not_fit_their_tokens_are_left_out_and_said(tmp_path: Path) -> None:
    step, notes = pack_file(saved(tmp_path / "000001.jsonl", [row(entropy=[1.0]), row(logp=3)]))
    assert notes == ["000001.jsonl: lists that do not match their tokens were left out (entropy, logp)."]
    assert step.total == 2


@pytest.mark.parametrize(
    "odd",
    [{}, {"pieces": None}, {"pieces": [1, None, {}]}, {"parts": [1]}, {"score": "1"}, {"group": {"a": 1}},
     {"sample": -1}, {"sampled": "yes"}, {"label": 5, "reason": None, "turns": "x"}, {"parts": {"a": None}}],
)  # fmt: skip
def test_rows_of_any_shape_are_packed(tmp_path: Path, odd: dict[str, Any]) -> None:
    step, _ = pack_file(saved(tmp_path / "000001.jsonl", [odd]))
    assert step.total == step.count == 1
    assert json.loads(step.packed)[0]["rows"][0]["turns"] == 1


def test_a_group_is_the_rollouts_of_one_question(tmp_path: Path) -> None:
    scores = {0: [1, 1], 1: [0, 1], 2: [1, None], 3: [0]}
    rows = [row(group=g, score=s) for g, members in scores.items() for s in members]
    step, _ = pack_file(saved(tmp_path / "000001.jsonl", rows))
    assert (step.recorded, step.failed) == (4, 1)
    assert [len(g["rows"]) for g in json.loads(step.packed)] == [2, 2, 2, 1]


def test_a_long_rollout_is_cut_and_keeps_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "TOKENS", 3)
    packed, odd = pack_row(row(pieces=list("abcde"), logp=[-1, -2, -3, -4, -5]))
    assert (packed["pieces"], packed["logp"], packed["tokens"]) == (["a", "b", "c"], [-1, -2, -3], 5)
    assert odd == set()


def test_everything_is_shown_where_it_fits(short: Path) -> None:
    held, notes = steps(read(short).samples)
    assert [s.id for s in held] == ["eval-0", *(f"train-{u}" for u in range(1, 7))]
    assert all(s.count == s.total for s in held)
    assert notes == []


def test_updates_are_thinned_evenly_and_the_page_says_so(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, _ = steps(read(short).samples)
    largest = max(len(s.packed) for s in held)
    monkeypatch.setattr(rollouts, "PAGE_BYTES", {"train": 3 * largest, "eval": largest})
    thinned, notes = steps(read(short).samples)
    assert [s.id for s in thinned] == ["eval-0", "train-1", "train-3", "train-6"]
    assert len(notes) == 1
    assert "the rollouts of 3 of 6 updates" in notes[0]


def test_files_beyond_what_is_read_are_thinned_before_reading(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "READ_BYTES", 1)
    held, notes = steps(read(short).samples)
    assert [s.id for s in held] == ["eval-0", "train-6"]
    assert "the rollouts of 1 of 6 updates" in notes[0]


def test_a_step_too_large_keeps_whole_groups(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, _ = steps(read(short).samples)
    monkeypatch.setattr(rollouts, "STEP_BYTES", max(len(s.packed) for s in held) // 2)
    thinned, notes = steps(read(short).samples)
    train = next(s for s in thinned if s.kind == "train")
    assert 0 < train.count < train.total == 64
    assert train.count % 8 == 0
    assert "hold only some of their rollouts" in notes[0]
