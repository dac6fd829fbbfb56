"""The pool: verdicts are remembered by content, batches are cut as told, budgets are kept."""

import sys
from pathlib import Path

import pytest

from posttrain.types import Task
from posttrain.verifiers.function import Function
from posttrain.verifiers.pool import Pool, judge_all_safely

TASK = Task(id="q", messages=(), answer="7")
MODULE = '''
import os, time
from dataclasses import dataclass
from typing import ClassVar
from posttrain.types import Verdict
from posttrain.verifiers.protocol import Verifier

@dataclass(frozen=True, kw_only=True)
class Batched(Verifier):
    """Scores the length; writes the size of each batch it is given to a file."""
    log: str
    name: str = "batched"
    batch: int = 4
    trusted: ClassVar[bool] = False

    def __call__(self, task, response):
        return Verdict(score=float(len(response)), label="scored")

    def judge_all(self, pairs):
        with open(self.log, "a") as file:
            file.write(f"{len(pairs)}\\n")
        time.sleep(0.05)
        if any(response == "short" for _, response in pairs):
            return []
        return [self(task, response) for task, response in pairs]

@dataclass(frozen=True, kw_only=True)
class Slow(Verifier):
    """Sleeps; says how long it may."""
    budget: float
    name: str = "slow"
    trusted: ClassVar[bool] = False

    def __call__(self, task, response):
        time.sleep(0.4)
        return Verdict(score=1.0, label="right")

    def budget_s(self, task):
        return self.budget

@dataclass(frozen=True, kw_only=True)
class Stepwise(Verifier):
    """A potential that is no number."""
    name: str = "stepwise"
    trusted: ClassVar[bool] = False

    def __call__(self, task, response):
        return Verdict(score=1.0, label="right", progress=((1, float("nan")),))
'''


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    (folder / "made_verifiers.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        import made_verifiers

        yield made_verifiers
        del sys.modules["made_verifiers"]


@pytest.fixture(scope="module")
def pool(made):
    with Pool(workers=2, deadline_s=30.0) as pool:
        yield pool


def counted(tmp_path: Path, body: str) -> Function:
    (tmp_path / "rewards.py").write_text(
        f"def reward(response):\n    open({str(tmp_path / 'calls')!r}, 'a').write('x')\n    {body}\n"
    )
    return Function(function=f"{tmp_path / 'rewards.py'}:reward")


def calls(tmp_path: Path) -> int:
    path = tmp_path / "calls"
    return len(path.read_text()) if path.exists() else 0


def test_the_same_response_to_the_same_task_is_judged_once(pool, tmp_path):
    verifier = counted(tmp_path, "return len(response)")
    first = pool.judge(verifier, [(TASK, "abc")] * 6 + [(TASK, "de")])
    again = pool.judge(verifier, [(TASK, "de"), (TASK, "abc")])
    assert [v.score for v in first] == [3.0] * 6 + [2.0]
    assert [v.score for v in again] == [2.0, 3.0]
    assert calls(tmp_path) == 2


def test_another_field_of_the_task_is_another_content(pool, tmp_path):
    verifier = counted(tmp_path, "return len(response)")
    tasks = [Task(id="q", messages=(), answer="7", fields={"x": x}) for x in (1, 2, 1)]
    pool.judge(verifier, [(task, "abc") for task in tasks])
    assert calls(tmp_path) == 2


def test_failed_verdicts_are_not_remembered(pool, tmp_path):
    verifier = counted(tmp_path, "raise ValueError('no')")
    assert pool.judge(verifier, [(TASK, "abc")])[0].label == "raised"
    assert pool.judge(verifier, [(TASK, "abc")])[0].label == "raised"
    assert calls(tmp_path) == 2


def test_batches_are_at_most_as_large_as_the_verifier_says_and_verdicts_stay_in_order(pool, made, tmp_path):
    verifier = made.Batched(log=str(tmp_path / "log"))
    responses = ["x" * n for n in range(1, 12)]
    verdicts = pool.judge(verifier, [(TASK, r) for r in responses])
    assert [v.score for v in verdicts] == [float(len(r)) for r in responses]
    sizes = [int(line) for line in (tmp_path / "log").read_text().split()]
    assert max(sizes) == 4
    assert sum(sizes) == len(responses)


def test_a_batch_with_too_few_verdicts_fails_as_a_whole(made, tmp_path):
    verifier = made.Batched(log=str(tmp_path / "log"))
    verdicts = judge_all_safely(verifier, [(TASK, "short"), (TASK, "a")])
    assert [v.score for v in verdicts] == [None, None]
    assert "0 verdicts were returned for 2 responses" in verdicts[0].reason


def test_a_verifiers_own_budget_is_in_place_of_the_pools_deadline(pool, made):
    [late] = pool.judge(made.Slow(budget=0.1), [(TASK, "x")])
    assert late.label == "timeout"
    with Pool(workers=1, deadline_s=0.2) as strict:
        [right] = strict.judge(made.Slow(budget=30.0), [(TASK, "x")])
    assert right.label == "right"


def test_a_step_without_a_finite_potential_fails_the_verdict(pool, made):
    [verdict] = pool.judge(made.Stepwise(), [(TASK, "x")])
    assert (verdict.score, verdict.label) == (None, "not_a_number")
    assert verdict.reason == "a potential is nan, not a finite number"
