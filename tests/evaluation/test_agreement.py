"""Agreement with gold labels: slow formulas, intervals that hold the truth, and labels that are missing."""

import json
import math
import random

import pytest

from posttrain.evaluation.agreement import auc, kappa, measure_agreement, read_gold
from posttrain.evaluation.verdicts import Response
from posttrain.types import Task, UserError, Verdict


def case(n, score, gold, **parts):
    task = Task(id=f"t{n}", messages=())
    verdict = Verdict(score=score, label="disagree" if parts else "scored", parts=parts)
    return Response(task, "x", "", gold, f"said.jsonl:{n}"), verdict


def test_auc_is_the_share_of_pairs_in_order():
    seed = random.randrange(10**6)
    dice = random.Random(seed)
    for _ in range(50):
        pairs = [(dice.randrange(5) / 4, dice.random() < 0.4) for _ in range(30)]
        right, wrong = [s for s, g in pairs if g], [s for s, g in pairs if not g]
        slow = [(a > b) + (a == b) / 2 for a in right for b in wrong]
        assert not slow or auc(pairs) == pytest.approx(sum(slow) / len(slow)), seed
    assert math.isnan(auc([(0.5, True)]))


def test_a_judge_that_guesses_has_a_kappa_near_0_and_its_interval_holds_it():
    dice = random.Random(1)
    cases = [case(n // 2, dice.random(), dice.random() < 0.5) for n in range(300)]
    found = measure_agreement(*zip(*cases, strict=True))
    assert found.kappa.low < 0 < found.kappa.high
    assert found.auc.low < 0.5 < found.auc.high
    assert (found.judged, found.failed) == (300, 0)
    assert sum(part.count for part in found.bins) == 300
    assert all(part.low <= part.score <= part.high for part in found.bins)


def test_a_perfect_judge_agrees_and_what_failed_is_left_out():
    cases = [case(n, float(n % 2), bool(n % 2)) for n in range(20)] + [case(20, None, True)]
    found = measure_agreement(*zip(*cases, strict=True))
    assert (found.accuracy.value, found.kappa.value, found.auc.value) == (1.0, 1.0, 1.0)
    assert found.accuracy.low == pytest.approx(0.8389, abs=1e-4)  # Wilson's of 20 in 20
    assert (found.judged, found.failed) == (20, 1)
    assert math.isnan(kappa([(True, True)]))


def test_order_sensitivity_is_that_of_the_comparisons():
    cases = [case(n, 0.5, n > 1, bias=1.0) for n in range(3)] + [case(3, 1.0, True)]
    found = measure_agreement(*zip(*cases, strict=True))
    assert (found.disagree, found.bias) == (1.0, 1.0)


@pytest.mark.parametrize("gold", [None, "yes", float("nan")])
def test_a_label_that_is_missing_or_text_is_an_error_at_its_line(gold):
    with pytest.raises(UserError) as caught:
        read_gold(case(3, 1.0, gold)[0])
    assert caught.value.key == "said.jsonl:3"


def test_the_command_prints_agreement(run_cli, tmp_path):
    tasks, said = tmp_path / "tasks.jsonl", tmp_path / "said.jsonl"
    tasks.write_text("".join(json.dumps({"id": n, "answer": str(n)}) + "\n" for n in range(8)))
    lines = [{"id": n, "response": str(n if n % 2 else 99), "label": n % 2} for n in range(8)]
    said.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run_cli("verify", "number", tasks, said, "--gold")
    assert done.code == 0, done.err
    assert "accuracy" in done.err
    assert "1.000" in done.err
    said.write_text(json.dumps({"id": 1, "response": "1"}) + "\n")
    missing = run_cli("verify", "number", tasks, said, "--gold")
    assert missing.code == 2
    assert "said.jsonl:1" in missing.err
