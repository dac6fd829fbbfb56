"""What is told of verdicts: classes as a table, reward by length, and why some could not be judged."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from posttrain.report.record import Samples, metrics
from posttrain.report.rollouts import UpdateRollouts, pack_file
from posttrain.report.verdicts import BINS, LEAST, by_length, classes


def step(update: int, paid: list[tuple[int, float]], kind: str = "train") -> UpdateRollouts:
    return UpdateRollouts(kind, update, "[]", 1, 1, failed=0, paid=tuple(paid))


def packed(tmp_path: Path, rows: list[dict[str, Any]]) -> UpdateRollouts:
    path = tmp_path / "000001.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return pack_file(Samples(path, "train", 1, path.stat().st_size))[0]


def test_an_update_without_a_class_counts_as_none_of_it() -> None:
    rows: list[dict[str, Any]] = [{"update": 0, "eval/accuracy": 0.5}]
    rows += [{"update": u, "verdict/PASS": 1.0} for u in range(1, 12)]
    rows += [{"update": 12, "verdict/PASS": 0.5, "verdict/FORBIDDEN": 0.5}]
    forbidden, passed = classes(metrics(rows)[0])
    assert forbidden == {"label": "FORBIDDEN", "early": 0.0, "late": 0.1, "most": 0.5, "at": 12}
    assert (passed["label"], passed["early"], passed["late"], passed["at"]) == ("PASS", 1.0, 0.9, 1)
    assert classes(metrics([{"update": 1, "loss": 1.0}])[0]) == []


def test_what_an_answer_was_paid_is_read_from_its_tokens(tmp_path: Path) -> None:
    rows = [
        {"pieces": ["a", "b", "c"], "sampled": [True, False, True], "reward": [0.25, 0, 0.5], "score": 0.5},
        {"pieces": ["a", "b"], "score": 1.0},
        {
            "pieces": ["a"] * 9,
            "score": None,
            "label": "raised",
            "reason": "KeyError: 'unit'",
            "reward": [0] * 9,
        },
        {"pieces": ["a"] * 9, "score": None, "label": "died", "reason": "by signal 9"},
    ]
    found = packed(tmp_path, rows)
    assert found.paid == ((2, 0.75), (2, 1.0)), "what could not be judged is not an answer paid 0"
    assert (found.failed, found.cause) == (2, "raised: KeyError: 'unit'")


@pytest.mark.parametrize("seed", range(10))
def test_dots_hold_every_answer_once_and_their_means(seed: int) -> None:
    draw = random.Random(seed)
    paid = [(draw.choice([3, draw.randrange(1, 60)]), draw.random()) for _ in range(draw.randrange(17, 300))]
    for line in by_length([step(1, paid)]):
        dots = line["dots"]
        assert 2 <= len(dots) <= BINS
        assert sum(count for _, _, count in dots) == len(paid)
        assert min(count for _, _, count in dots) >= LEAST
        left = sorted(paid)
        for length, reward, count in dots:
            mine, left = left[:count], left[count:]
            assert length == pytest.approx(sum(n for n, _ in mine) / count)
            assert reward == pytest.approx(sum(r for _, r in mine) / count)
            assert not left or mine[-1][0] < left[0][0], "answers of one length lie in one dot"


def test_the_first_third_is_set_against_the_last() -> None:
    short, long = [(n, 0.0) for n in range(1, 33)], [(n, 1.0) for n in range(101, 133)]
    evaluated = step(9, [(1, 5.0)] * 99, kind="eval")
    first, last = by_length([*(step(u, short if u < 4 else long) for u in range(1, 10)), evaluated])
    assert (first["from"], first["to"], last["from"], last["to"]) == (1, 3, 7, 9)
    assert {reward for _, reward, _ in first["dots"]} == {0.0}
    assert {reward for _, reward, _ in last["dots"]} == {1.0}


def test_answers_of_one_length_and_none_at_all_have_no_picture() -> None:
    assert by_length([]) == []
    assert by_length([step(1, []), step(2, [(5, 1.0)] * 64)]) == []
