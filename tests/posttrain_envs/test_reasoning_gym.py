"""reasoning-gym: problems that are held out in truth, and scorers that are not believed.

Those of every generator are slow, some two minutes in all.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.curriculum.curriculum import build_supply
from posttrain.recipe.settings import Curriculum
from posttrain.types import Task, UserError
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.self_test import self_test
from posttrain_envs.reasoning_gym.rules import refusal
from posttrain_envs.reasoning_gym.tasks import ReasoningGym, is_held_out, problems
from posttrain_envs.reasoning_gym.verifier import ReasoningGymScorer

if importlib.util.find_spec("reasoning_gym") is None:
    pytest.skip("reasoning-gym is not installed", allow_module_level=True)

NAMES = json.loads(
    subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-c"),
            "import json, reasoning_gym.factory as f; print(); print(json.dumps(sorted(f.DATASETS)))",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()[-1]
)
NAMES.remove("composite")
WITHOUT_GOLD = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
scorer = ReasoningGymScorer()


def small(*names: str, **others: object) -> ReasoningGym:
    return ReasoningGym(names=names, **{"train": 12, "held_out": 6, **others})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(workers=2, deadline_s=60.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def drawn() -> dict[str, list[Task]]:
    """Problems of every generator."""
    n = len(NAMES)
    train, _ = problems(ReasoningGym(names=tuple(NAMES), train=2 * n, held_out=0))
    found: dict[str, list[Task]] = {}
    for task in train:
        found.setdefault(task.fields["generator"], []).append(task)
    return found


# ---------------------------------------------------------------------- problems


@pytest.fixture(scope="module")
def neighbours() -> list[tuple[list[Task], list[Task]]]:
    """What every generator makes under two seeds beside each other."""
    n = len(NAMES)
    spec = ReasoningGym(names=tuple(NAMES), train=4 * n, held_out=2 * n)
    return [problems(dataclasses.replace(spec, seed=seed)) for seed in (0, 1)]


@pytest.mark.slow
def test_every_generator_shares_no_question_between_training_and_held_out(
    neighbours: list[tuple[list[Task], list[Task]]],
) -> None:
    trained = {task.fields["question"] for train, _ in neighbours for task in train}
    kept = {task.fields["question"] for _, held in neighbours for task in held}
    assert not trained & kept
    assert all(is_held_out(question) for question in kept)
    assert not any(is_held_out(question) for question in trained)
    for train, held in neighbours:
        ids = [task.id for task in (*train, *held)]
        assert len(set(ids)) == len(ids) == 6 * len(NAMES)
        assert Counter(task.fields["generator"] for task in train) == dict.fromkeys(NAMES, 4)


def test_a_recipe_makes_the_same_problems_again_and_the_gold_is_never_shown() -> None:
    spec = small("word_ladder", "knight_swap", "chain_sum")  # the first two depend on the order of sets
    first, again = problems(spec), problems(spec)
    assert first == again
    assert problems(dataclasses.replace(spec, seed=1)) != first
    for task in first[0]:
        if task.fields["generator"] == "chain_sum":
            assert task.fields["question"] in task.messages[0]["content"]
            assert str(task.answer) not in task.messages[0]["content"].split()


def test_nothing_of_this_process_moves_when_problems_are_made_or_scored(pool: Pool) -> None:
    random.seed(7)
    before = random.getstate()
    train, held = problems(small("pool_matrix"))
    pool.judge(scorer, [(task, f"<answer>{task.answer}</answer>") for task in (*train, *held)])
    assert random.getstate() == before
    assert "reasoning_gym" not in sys.modules


def test_importing_the_library_moves_nothing() -> None:
    program = """
import os, random, sys, threading, warnings
import numpy, torch
from posttrain.base.libraries import library
random.seed(1); numpy.random.seed(1); warnings.simplefilter("error")
def state():
    kept = numpy.random.get_state()
    return [random.getstate(), kept[1].tolist(), kept[2:], dict(os.environ), warnings.filters[:],
            threading.active_count(), torch.get_num_threads(), sys.getrecursionlimit()]
before = state()
library(sys.argv[1])
for was, now in zip(before, state(), strict=True):
    assert was == now, (was, now)
"""
    for name in ("reasoning_gym", "gymnasium", "textarena"):
        if importlib.util.find_spec(name):
            subprocess.run([sys.executable, "-c", program, name], check=True, stdout=subprocess.DEVNULL)


def test_a_generator_that_repeats_itself_is_refused_with_its_numbers() -> None:
    with pytest.raises(UserError) as error:
        problems(ReasoningGym(names=("coin_flip",)))
    assert "coin_flip has too few different questions: in " in error.value.problem
    assert "to hold out, of 200" in error.value.problem


def test_levels_are_difficulties_that_a_curriculum_reads() -> None:
    train, held = problems(
        small("chain_sum", levels=(0, 1, 3), options={"chain_sum": {"allow_negation": True}})
    )
    assert Counter(task.fields["difficulty"] for task in train) == {0: 4, 1: 4, 3: 4}
    assert Counter(task.fields["difficulty"] for task in held) == {0: 2, 1: 2, 3: 2}
    first = build_supply(Curriculum(kind="order"), train, seed=0)
    assert [first.take()[1].fields["difficulty"] for _ in range(12)] == [0] * 4 + [1] * 4 + [3] * 4


def test_weights_divide_the_tasks() -> None:
    train, held = problems(small("chain_sum", "leg_counting", weights={"chain_sum": 2.0}))
    assert Counter(task.fields["generator"] for task in train) == {"chain_sum": 8, "leg_counting": 4}
    assert Counter(task.fields["generator"] for task in held) == {"chain_sum": 4, "leg_counting": 2}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"names": ("chain_summ",)}, "did you mean 'chain_sum'"),
        ({"names": ("composite",)}, "name its parts, with weights"),
        ({"names": ("chain_sum",), "options": {"chain_sum": {"max_term": 3}}}, "did you mean 'max_terms'"),
        ({"names": ("chain_sum",), "options": {"chain_sum": {"seed": 3}}}, "no option 'seed'"),
        ({"names": ("chain_sum",), "options": {"chain_sum": {"min_terms": 9}}}, "refuses it: AssertionError"),
        ({"names": ("chain_sum",), "levels": (99,)}, "chain_sum has levels 0 to "),
    ],
)
def test_what_the_library_does_not_know_is_one_line(spec: dict[str, object], said: str) -> None:
    with pytest.raises(UserError) as error:
        problems(ReasoningGym(**spec))  # type: ignore[arg-type]
    assert said in str(error.value)
    assert error.value.key.startswith("task.reasoning_gym")


# ---------------------------------------------------------------------- scores

FAKES = [
    *("nan", "hello", "[print(1)]", "9**9**9", "(" * 3000, "[" * 3000, "entry['answer']", "[NaN, NaN]", "{}"),
    *("6+6+6+6", "9" * 10_000, "-" * 100_000 + "1", "1/0", "Integral(x, x)", "O(x)"),
]


def spoilt(gold: str) -> list[str]:
    """The gold within other text."""
    return [
        f"{gold} or hello",
        f"The answer is {gold}",
        f"{gold}, or 5",
        f"hello\n{gold}",
        f"not {gold}",
        f"{gold} {gold}",
    ]


@pytest.mark.slow
def test_every_generator_gives_its_gold_full_marks(drawn: dict[str, list[Task]], pool: Pool) -> None:
    assert {name for name in NAMES if drawn[name][0].answer is None} == WITHOUT_GOLD
    golds = [task for tasks in drawn.values() for task in tasks if task.answer is not None]
    verdicts = pool.judge(scorer, [(task, scorer.golds(task)[0]) for task in golds])
    assert not [(task.id, v) for task, v in zip(golds, verdicts, strict=True) if v.score != 1.0]


@pytest.mark.slow
def test_every_generator_pays_nothing_for_what_is_no_answer(
    drawn: dict[str, list[Task]], pool: Pool, tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    program = f"__import__('os').system('touch {mark}')"
    pairs = [(tasks[0], fake) for tasks in drawn.values() for fake in (*FAKES, program)]
    pairs += [(t[0], fake) for t in drawn.values() if t[0].answer is not None for fake in spoilt(t[0].answer)]
    verdicts = pool.judge(scorer, [(task, f"<answer>{fake}</answer>") for task, fake in pairs])
    paid = [
        (task.id, fake[:50], v) for (task, fake), v in zip(pairs, verdicts, strict=True) if v.score != 0.0
    ]
    assert not paid
    assert not mark.exists()


@pytest.mark.slow
def test_every_generator_passes_the_checks_before_a_run(drawn: dict[str, list[Task]], pool: Pool) -> None:
    self_test(scorer, [tasks[1] for tasks in drawn.values()], pool, limit=len(NAMES))


def test_what_the_answer_breaks_is_wrong_and_what_the_scorer_breaks_has_no_score(pool: Pool) -> None:
    [task] = problems(small("prime_factorization", train=1, held_out=0))[0]
    [verdict] = pool.judge(scorer, [(task, "<answer>seven</answer>")])
    assert (verdict.score, verdict.label) == (0.0, "wrong")
    assert "the scorer breaks on 'seven': ValueError" in verdict.reason
    broken = dataclasses.replace(task, answer="x", fields={**task.fields, "metadata": {}})
    [verdict] = pool.judge(scorer, [(broken, "<answer>seven</answer>")])
    assert (verdict.score, verdict.label) == (None, "raised")


def test_a_hang_of_the_answer_is_wrong(pool: Pool) -> None:
    [task] = problems(small("coin_flip", train=1, held_out=0))[0]
    [verdict] = pool.judge(scorer, [(task, "<answer>1e9999999999</answer>")])
    assert (verdict.score, verdict.label) == (0.0, "wrong")


def test_another_right_answer_than_the_gold_is_right(pool: Pool) -> None:
    task = Task(
        id="q",
        messages=(),
        answer="4*8 - 6 - 2",
        fields={
            "generator": "puzzle24",
            "options": {},
            "question": "?",
            "metadata": {"numbers": [4, 8, 6, 2], "difficulty": {}},
        },
    )
    said = {"8*4 - (6 + 2)": 1.0, "4*8-6-2": 1.0, "6*(8/2)": 0.0, "6+6+6+6": 0.0, "8*4-6-2+0.5": 0.0}
    verdicts = pool.judge(scorer, [(task, f"So: <answer>{text}</answer>") for text in said])
    assert [verdict.score for verdict in verdicts] == list(said.values())


def test_partial_credit_is_paid_where_it_is_asked_for_and_never_in_full(pool: Pool) -> None:
    [task] = problems(ReasoningGym(names=("spell_backward",), train=1, held_out=0))[0]
    assert task.answer is not None
    near = f"<answer>{task.answer}x</answer>"
    paid, unpaid = (
        pool.judge(ReasoningGymScorer(partial=True), [(task, near)]),
        pool.judge(scorer, [(task, near)]),
    )
    assert paid[0].label == "partial"
    assert paid[0].score is not None
    assert 0.5 < paid[0].score < 1
    assert (unpaid[0].score, unpaid[0].label) == (0.0, "wrong")


def test_where_the_answer_stands() -> None:
    said = "<answer>6</answer>, no\n<answer> 7 </answer>"
    assert [ReasoningGymScorer(where=where)._part(said) for where in ("tag", "last_line", "all")] == [
        "7",
        "<answer> 7 </answer>",
        said,
    ]
    assert ReasoningGymScorer()._part("7") == ""
    assert ReasoningGymScorer()._part("<think>so <answer>7</answer>, or") == ""
    assert ReasoningGymScorer(where="all")._part("<think>6?</think>\n7") == "7"
    grid = Task(
        id="q",
        messages=(),
        answer="1\n2",
        fields={"generator": "x", "options": {}, "question": "?", "metadata": {}},
    )
    with pytest.raises(UserError, match="has several lines"):
        ReasoningGymScorer(where="last_line").check(grid)
    with pytest.raises(UserError, match="not from reasoning-gym"):
        scorer.check(Task(id="q", messages=(), answer="7"))


def test_forms_that_are_right_pass_the_rules() -> None:
    known = "Ann is a knight, and Bo is a knave."
    good = {
        ("knights_knaves", known): ["Bo is a knave and Ann is a knight", "ann is a knight, bo is a knave"],
        ("gsm_symbolic", "1200"): ["1,200", "$1200", "1200.", "1200.0"],
        ("complex_arithmetic", "3.0 + 4.0i"): ["3+4i", "(3 + 4j)"],
        ("time_intervals", "1 days"): ["1 day", "1 days", "2 days"],
        ("quantum_lock", "A → B"): ["A → B", "A -> B", "AB", "a, b"],
        ("number_sorting", "['1.0', '2.5']"): ["[1, 2.5]", "['1.0', '2.50']", '["1", "2.5"]'],
        ("polynomial_equations", "1.0, 2.0"): ["1.0,2.0", "1, 2"],
    }
    for (name, gold), answers in good.items():
        assert [refusal(name, answer, gold, {}) for answer in answers] == [""] * len(answers), name
    bad = {
        "gsm_symbolic": "-1200",
        "number_sorting": "[1.9, 2.5]",
        "knights_knaves": known + " Ann is a knave.",
    }
    for name, answer in bad.items():
        gold = next(gold for (of, gold) in good if of == name)
        assert refusal(name, answer, gold, {})


# ---------------------------------------------------------------------- recipes


def test_a_recipe_needs_no_verifier_and_refuses_another(tiny: Path, write, run_cli) -> None:  # type: ignore[no-untyped-def]
    tables = {
        "model": {"path": str(tiny), "dtype": "float32", "device": "cpu"},
        "method": {"name": "grpo"},
        "task": {"reasoning_gym": {"names": ["chain_sum"], "train": 8, "held_out": 4}},
        "sampling": {"max_new_tokens": 4},
        "rollout": {"groups": 2, "group_size": 2},
        "run": {"updates": 2, "threads": 1},
        "eval": {"limit": 2},
    }
    recipe = write(tables)
    assert run_cli("train", recipe, "--run-dir", recipe.parent / "run", "--quiet").code == 0
    lines = [json.loads(line) for line in (recipe.parent / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines
    other = run_cli("validate", write(tables, {"verifier": {"number": {}}}))
    assert other.code == 2
    assert "leave it out, or add [verifier.reasoning_gym]" in other.err
    both = {"verifier": {"reasoning_gym": {"partial": True}, "format": {}}}
    assert run_cli("validate", write(tables, both)).code == 0
    imitated = {"method": {"name": "sft"}, "sampling": None, "rollout": None, "batch": {"batch_size": 2}}
    assert run_cli("validate", write(tables, imitated)).code == 0


def test_without_the_library_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.base.libraries.is_installed", lambda name: False)
    for ask in (lambda: problems(small("chain_sum")), scorer.require):
        with pytest.raises(UserError, match=r"pip install 'posttrain\[reasoning-gym\]'"):
            ask()
