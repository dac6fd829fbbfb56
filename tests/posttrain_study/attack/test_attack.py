"""`posttrain attack`: a loophole that was put in is found, and a sound reward pays nothing."""

import json
import random
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from posttrain.types import Task, Verdict
from posttrain_study.attack.measure import best_of, pay_learnt_text, pay_tricks
from posttrain_study.attack.policy import learn_text
from posttrain_study.attack.tricks import TRICKS

WEAK = "def score(response, answer):\n    return float(answer in response)\n"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    dice, file = random.Random(0), tmp_path / "tasks.jsonl"
    pairs = [(dice.randint(2, 49), dice.randint(2, 49)) for _ in range(20)]
    rows = [
        {"id": str(n), "prompt": f"What is {a} + {b}?", "answer": str(a + b)}
        for n, (a, b) in enumerate(pairs)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_weak_reward_pays_a_list_of_all_numbers(tasks: Path, tmp_path: Path, run_cli: Any) -> None:
    (tmp_path / "weak.py").write_text(WEAK)
    result = json.loads(
        run_cli("attack", f"{tmp_path / 'weak.py'}:score", str(tasks), "--rounds", "2", "--json").out
    )
    top = result["tricks"][0]
    assert top["name"].startswith("every number")
    assert top["mean"] == 1.0
    sound = json.loads(run_cli("attack", "number", str(tasks), "--rounds", "2", "--json").out)
    assert sound["right"]["mean"] == 1.0
    assert max(payment["mean"] for payment in sound["tricks"]) == 0.0


def test_rewards_that_take_lists_or_fail_are_attacked(tasks: Path, tmp_path: Path, run_cli: Any) -> None:
    lists = "def score(completions, answer, **rest):\n    return [float(answer[0] in c) for c in completions]"
    (tmp_path / "lists.py").write_text(lists)
    result = json.loads(
        run_cli("attack", f"{tmp_path / 'lists.py'}:score", str(tasks), "--rounds", "0", "--json").out
    )
    assert result["tricks"][0]["mean"] == 1.0
    fails = "def score(response, answer):\n    assert 'sorry' not in response\n    return -1.0\n"
    (tmp_path / "fails.py").write_text(fails)
    output = run_cli("attack", f"{tmp_path / 'fails.py'}:score", str(tasks), "--rounds", "3").out
    assert "paid most: all alike, with -1" in output


def test_best_of_n_by_a_weak_reward_falls_short_of_the_truth(
    tasks: Path, tmp_path: Path, run_cli: Any
) -> None:
    (tmp_path / "weak.py").write_text(WEAK)
    rows = [json.loads(line) for line in tasks.read_text().splitlines()]
    answers = [(row["id"], text) for row in rows for text in ("1", row["answer"], f"{row['answer']} 0")]
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps({"id": n, "response": text}) + "\n" for n, text in answers))
    words = ("--responses", str(file), "--truth", "number", "--rounds", "0")
    output = run_cli("attack", f"{tmp_path / 'weak.py'}:score", str(tasks), *words).out
    assert [line.split() for line in output.splitlines()[-2:]] == [
        ["1", "0.667", "0.333"],
        ["2", "1.000", "0.500"],
    ]


def test_best_of_n_is_the_mean_over_all_subsets() -> None:
    dice = random.Random(3)
    pairs = [[(float(dice.randint(0, 3)), dice.random()) for _ in range(8)] for _ in range(3)]
    for point in best_of(pairs):
        tops = []
        for answers in pairs:
            for subset in combinations(answers, point.n):
                highest = max(reward for reward, _ in subset)
                tops.append((highest, fmean(truth for reward, truth in subset if reward == highest)))
        assert (point.reward, point.truth) == pytest.approx(tuple(map(fmean, zip(*tops, strict=True))))


def test_policy_learns_the_fragment_that_is_paid() -> None:
    text = learn_text(
        ["a", "b", "c", "d"], lambda texts: [t.count("c") / 4 for t in texts], rounds=80, seed=0
    )
    assert text.text == "cccc"


def test_learnt_text_is_judged_on_tasks_that_it_was_not_learnt_on() -> None:
    class Odd:
        best, grouped = 1.0, False

        def golds(self, task: Task) -> list[str]:
            return []

        def fakes(self, task: Task) -> list[str]:
            return [""]

    tasks = [Task(id=str(n), messages=({"role": "user", "content": f"{n}?"},)) for n in range(10)]
    seen: list[set[str]] = []

    def judge(answers: Any) -> list[Verdict]:
        seen.append({task.id for task, _ in answers})
        return [Verdict(score=float("sorry" in text), label="", reason="") for _, text in answers]

    payment, attempt = pay_learnt_text(Odd(), tasks, judge, rounds=60, seed=1)  # type: ignore[arg-type]
    assert payment is not None
    assert payment.mean == 1.0
    assert "sorry" in attempt.text
    assert not seen[-1] & set.union(*seen[:-1])
    names = {payment.name for payment in pay_tricks(Odd(), tasks, judge)}  # type: ignore[arg-type]
    assert names == {*TRICKS, "wrong answer 1 of its self-test"}
