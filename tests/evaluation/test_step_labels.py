"""Steps labelled by where they lead: unbiased estimates of the policy's value, in the form that is learnt."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.data import Data, SteppedSolution, load_steps
from posttrain.evaluation.step_labels import (
    Labelling,
    _sample,
    hard,
    prefixes,
    soft,
    split_steps,
    step_labels,
)
from posttrain.loop.sampling import build_native_engine
from posttrain.plan.dataset_rows import Shaper
from posttrain.plan.model_info import NO_TASK, ModelInfo, read_model_info
from posttrain.recipe.recipe import Model, Recipe
from posttrain.types import Sampling, Task
from posttrain.verifiers.answers import Exact
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.structure.patterns import Regex

TASK = Task(id="t", messages=({"role": "user", "content": "say"},), answer="a;b")
ROLLOUTS = 400


@pytest.fixture
def policy(tiny: Path) -> tuple[Recipe, ModelInfo]:
    recipe = Recipe(
        model=Model(path=str(tiny), dtype="float32", device="cpu"), method={"name": "grpo"}, task=NO_TASK
    )
    return recipe, read_model_info(recipe, lambda text: None)


def test_the_label_of_a_step_converges_to_the_exact_value(
    policy: tuple[Recipe, ModelInfo], tiny: Path
) -> None:
    """One token is left to be drawn after "a;": V is the chance that the policy draws the right one."""
    recipe, made = policy
    engine = build_native_engine(recipe, made)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    [prefix] = prefixes(TASK, ["a", "b"], made.chat, ";")
    with torch.no_grad():
        logits = model(torch.tensor([prefix.tokens])).logits[0, -1]
    # Colder, so that one answer is worth looking for: the tiny model spreads over a hundred tokens.
    cold = 0.02
    best = int(logits.argmax())
    answer = f"a;{made.chat.tokenizer.decode([best])}"
    task = Task(id="t", messages=TASK.messages, answer=answer)
    chance = float((logits / cold).softmax(-1)[best])
    labels = rolled(made, engine, task, "a", Sampling(max_new_tokens=1, temperature=cold))
    spread = math.sqrt(chance * (1 - chance) / ROLLOUTS)
    assert 0.02 < chance < 0.999, chance
    assert abs(labels - chance) < 4 * spread + 1e-9, (labels, chance)


def rolled(made: ModelInfo, engine: Any, task: Task, said: str, sampling: Sampling) -> float:
    """The success rate of continuations of `said`, through the labeller's own parts."""
    [prefix] = prefixes(task, [said, "?"], made.chat, ";")
    ends = _sample(engine, [(prefix.tokens, "key", n) for n in range(ROLLOUTS)], sampling, 0)
    return sum(prefix.text + end == task.answer for end in ends) / ROLLOUTS


def test_records_are_what_process_reward_learns(
    policy: tuple[Recipe, ModelInfo], able: Path, tmp_path: Path
) -> None:
    recipe = Recipe(
        model=Model(path=str(able), dtype="float32", device="cpu"), method={"name": "grpo"}, task=NO_TASK
    )
    made = read_model_info(recipe, lambda text: None)
    engine = build_native_engine(recipe, made)
    tasks = [
        Task(id=str(n), messages=({"role": "user", "content": f"{n}+2="},), answer=str(n + 2)) for n in (2, 3)
    ]
    spent: list[int] = []
    with Pool(workers=1, deadline_s=10) as pool:
        found = list(
            step_labels(
                tasks,
                engine,
                made.chat,
                Exact(),
                pool,
                Sampling(max_new_tokens=4),
                Labelling(solutions=3, rollouts=2, separator="1"),
                context=200,
                on_progress=spent.append,
            )
        )
    assert found
    file = tmp_path / "steps.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in found))
    loaded = load_steps(Data(path=str(file)))
    assert [list(r.steps) for r in loaded] == [r["steps"] for r in found]
    assert [list(r.labels) for r in loaded] == [r["labels"] for r in found]
    assert all(label is None or 0 <= label <= 1 for r in found for label in r["labels"])
    assert spent == sorted(spent)


def test_hard_labels_say_whether_any_continuation_was_right(policy: tuple[Recipe, ModelInfo]) -> None:
    """The same continuations, so a hard label is 1 exactly where the soft one is above 0."""
    recipe, made = policy
    engine = build_native_engine(recipe, made)
    tasks = [replace(TASK, id=str(n)) for n in range(3)]
    labels: dict[str, list[float | None]] = {}
    for estimate in (soft, hard):
        with Pool(workers=1, deadline_s=10) as pool:
            how = Labelling(solutions=6, rollouts=4, separator="e", estimate=estimate)
            sampling = Sampling(max_new_tokens=12)
            judge = Regex(pattern="[a-m]$")
            records = step_labels(tasks, engine, made.chat, judge, pool, sampling, how, context=200)
            labels[estimate.__name__] = [label for r in records for label in r["labels"]]
    told = [(a, b) for a, b in zip(labels["soft"], labels["hard"], strict=True) if a is not None]
    assert all(b == float(a > 0) for a, b in told)
    assert any(0 < a < 1 for a, _ in told), told


def test_the_budget_ends_it_between_tasks(policy: tuple[Recipe, ModelInfo]) -> None:
    recipe, made = policy
    engine = build_native_engine(recipe, made)
    tasks = [Task(id=str(n), messages=({"role": "user", "content": "say"},), answer="a") for n in range(50)]
    spent: list[int] = []
    with Pool(workers=1, deadline_s=10) as pool:
        found = list(
            step_labels(
                tasks,
                engine,
                made.chat,
                Exact(),
                pool,
                Sampling(max_new_tokens=12),
                Labelling(rollouts=2, budget=6, separator="e"),
                context=200,
                on_progress=spent.append,
            )
        )
    assert len(found) < 50
    assert spent[-1] >= 6
    assert all(count < 6 for count in spent[:-1])


def test_prefixes_are_the_rows_of_a_process_model(policy: tuple[Recipe, ModelInfo]) -> None:
    _, made = policy
    steps = ["one", "two", "three"]
    record = SteppedSolution(
        id="x", messages=TASK.messages, steps=tuple(steps), labels=(1.0, 0.0, 1.0), source="x:1"
    )
    [[row]] = Shaper(made.chat, 500, marks=True, separator="\n\n").groups(
        [record], "steps", lambda text: None
    )
    marks = [t for t, marked in enumerate(row.sampled) if marked]
    found = prefixes(TASK, steps, made.chat, "\n\n")
    assert [list(p.tokens) for p in found] == [row.tokens[:mark] for mark in marks[:-1]]


def test_blank_steps_are_none() -> None:
    assert split_steps("\n\n one \n\n\n\ntwo", "\n\n") == [" one ", "two"]
    assert split_steps("  ", "\n\n") == []


def test_the_command_writes_a_file_that_trains(
    run_cli: Callable[..., Any],
    online: dict[str, Any],
    offline: dict[str, Any],
    write: Callable[..., Path],
    able: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "steps.jsonl"
    recipe = write(online, {"model": {"path": str(able)}})
    words = (
        "data",
        "steps",
        recipe,
        "--out",
        out,
        "--limit",
        "2",
        "--solutions",
        "2",
        "--rollouts",
        "2",
        "--separator",
        "1",
    )
    said = run_cli(*words)
    assert said.code == 0, said.err
    over = {
        "method": {"name": "process_reward"},
        "task": {"arithmetic": None, "data": {"path": str(out)}},
        "batch": {"batch_size": 2, "separator": "1"},
        "run": {"updates": 1},
    }
    said = run_cli("train", write(offline, over, "prm"), "--run-dir", tmp_path / "prm", "--quiet")
    assert said.code == 0, said.err
    said = run_cli(*words)
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "is there already" in said.err


def test_a_prompt_without_room_for_its_answer_is_refused_before_anything_is_drawn(
    run_cli: Callable[..., Any], online: dict[str, Any], write: Callable[..., Path], tmp_path: Path
) -> None:
    asked, out = tmp_path / "asked.jsonl", tmp_path / "steps.jsonl"
    asked.write_text(
        "".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in ("1=", "1" * 600, "2=")),
    )
    over = {"task": {"arithmetic": None, "data": {"path": str(asked)}, "held_out": {"path": str(asked)}}}
    recipe = write(online, over)
    words = ("data", "steps", recipe, "--out", out, "--rollouts", "1")
    said = run_cli(*words)
    assert (said.code, said.err.count("\n")) == (2, 1), said.err
    assert "asked.jsonl:2" in said.err
    assert "with 3 new ones that is more than the model's context of 512" in said.err
    assert not list(tmp_path.glob("steps.jsonl*"))
    assert run_cli(*words, "--limit", "1").code == 0, "the long prompt is not asked"


def test_an_interrupt_keeps_the_answers_that_are_labelled(
    run_cli: Callable[..., Any],
    online: dict[str, Any],
    write: Callable[..., Path],
    able: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken_off(*given: Any, **named: Any) -> Iterator[dict[str, Any]]:
        yield next(step_labels(*given, **named))
        raise KeyboardInterrupt

    monkeypatch.setattr("posttrain.api.steps.step_labels", broken_off)
    out, recipe = tmp_path / "steps.jsonl", write(online, {"model": {"path": str(able)}})
    said = run_cli("data", "steps", recipe, "--out", out, "--rollouts", "2", "--separator", "1")
    assert (said.code, said.err.count("\n")) == (130, 1), said.err
    assert said.err.startswith(f"error: interrupted; kept in {out}: answers 1, steps ")
    assert len(load_steps(Data(path=str(out)))) == 1
    assert [path.name for path in tmp_path.glob("steps.jsonl*")] == ["steps.jsonl"]
