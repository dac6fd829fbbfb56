"""Questions from a real run, and their order by real reward models."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from posttrain.report.record import read_json_lines
from posttrain.types import Task, UserError
from posttrain.verifiers.model.verifier import RewardModel
from posttrain_people.ensemble import by_disagreement, largest_spread
from posttrain_people.questions import LabelQuestion, read_questions

from .conftest import write_lines


def test_a_run_gives_its_tasks_with_their_samples(
    tmp_path: Path, run_cli: Callable[..., Any], write: Callable[..., Path], online: Any
) -> None:
    run = tmp_path / "run"
    over = {"run": {"updates": 1}, "eval": {"every": 1}, "checkpoint": {"every": 0}}
    done = run_cli("train", write(online, over), "--run-dir", run, "--quiet")
    assert done.code == 0, done.err
    questions = {q.id: q for q in read_questions(run, "pairs", "\n\n", lambda line: None)}
    rows = [row for file in sorted((run / "samples").glob("*.jsonl")) for row in read_json_lines(file)[0]]
    several = [row["task"] for row in rows if row["update"] == 1 and row["sample"] == 3]
    assert questions.keys() & set(several)
    for row in rows:
        if (question := questions.get(row["task"])) is None:
            continue
        assert question.messages[-1]["content"] in row["prompt"], "the messages, and not the rendered prompt"
        text = "".join(row["pieces"])
        answer = text.removesuffix("<|im_end|>") if row["stop"] == "eos" else text
        assert (
            answer in question.answers
            or not answer.strip()
            or answer.strip() in map(str.strip, question.answers)
        )
    assert {name.split()[0] for q in questions.values() for name in q.sources} <= {"eval", "update"}
    (run / "samples").rename(run / "gone")
    with pytest.raises(UserError, match="samples"):
        read_questions(run, "pairs", "\n\n", lambda line: None)


def test_tasks_with_one_id_are_asked_with_their_own_answers(
    tmp_path: Path, recorded: Callable[..., Path]
) -> None:
    """Sources may share ids, and so may training and evaluation."""
    sources = []
    for name in ("a", "b"):
        train = write_lines(tmp_path / f"{name}.jsonl", [{"id": 1, "prompt": f"{name}?", "answer": "1"}])
        held_out = write_lines(tmp_path / f"{name}2.jsonl", [{"id": 1, "prompt": f"{name}2?", "answer": "1"}])
        sources.append({"name": name, "data": {"path": str(train)}, "held_out": {"path": str(held_out)}})
    rows = [(f"{name}/1", f"{name}{n}", {"dataset": name}) for name in ("a", "b") for n in (1, 2)]
    run = recorded(
        {"task": sources},
        update_000001=rows,
        eval_000001=[(task, f"{text} held out", others) for task, text, others in rows],
    )
    questions = read_questions(run, "pairs", "\n\n", lambda line: None)
    assert {(str(q.messages[-1]["content"]), q.answers) for q in questions} == {
        ("a?", ("a1", "a2")),
        ("b?", ("b1", "b2")),
        ("a2?", ("a1 held out", "a2 held out")),
        ("b2?", ("b1 held out", "b2 held out")),
    }


@pytest.fixture
def judges(tiny: Path, tmp_path: Path) -> list[str]:
    """Two reward models with random weights."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    paths = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=len(tokenizer), num_labels=1, pad_token_id=0, **sizes)
        model = LlamaForSequenceClassification(config)
        with torch.no_grad():
            model.score.weight.mul_(50)
        path = tmp_path / f"judge{seed}"
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        paths.append(str(path))
    return paths


def test_the_pair_that_models_dispute_most_comes_first(judges: list[str]) -> None:
    questions = [
        LabelQuestion(
            id=str(n),
            messages=({"role": "user", "content": f"{n}?"},),
            answers=(f"{n} a", f"b {n * n}"),
            sources=("x", "y"),
        )
        for n in range(40)
    ]
    steps: list[int] = []
    ordered = by_disagreement(questions, judges, steps.append)
    assert steps == [32, 40]

    def gap(path: str, question: LabelQuestion) -> float:
        task = Task(id="t", messages=question.messages, source="")
        one, other = RewardModel(paths=(path,)).judge_all([(task, str(a)) for a in question.answers])
        assert one.score is not None
        assert other.score is not None
        return one.score - other.score

    spreads = [abs(gap(judges[0], q) - gap(judges[1], q)) / 2 for q in ordered]
    assert max(spreads) > 1.01 * min(spreads) > 0
    assert all(a >= b - 1e-5 for a, b in pairwise(spreads)), spreads
    assert {q.key for q in ordered} == {q.key for q in questions}


def test_the_spread_ignores_what_a_model_adds_to_all_scores() -> None:
    scores = np.random.default_rng(0).normal(size=(4, 3))
    assert largest_spread(scores + np.array([5.0, -2.0, 9.0])) == pytest.approx(largest_spread(scores))
    assert largest_spread(np.array([[1.0, 1.0], [np.nan, 0.0]])) == -1.0


def test_answers_of_several_messages_have_no_score(judges: list[str]) -> None:
    turns = ({"role": "assistant", "content": "a"}, {"role": "user", "content": "b"})
    question = LabelQuestion(
        id="1", messages=turns[1:], answers=(turns, "c"), sources=("x", "y"), source="d:1"
    )
    with pytest.raises(UserError, match="d:1"):
        by_disagreement([question], judges, lambda count: None)
