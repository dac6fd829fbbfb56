"""Make problems from the records of each data set, with the exact words of their prompts."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from posttrain.data.load import task_of
from posttrain.data.records import Record
from posttrain.evaluation.suites.suite import SuiteProblem
from posttrain.types import Task, UserError
from posttrain.verifiers.code.problem import called

LETTERS = "ABCD"


def _text(record: Record, *names: str) -> str:
    """Return the first of these fields that is text or a number, as text; UserError without one."""
    for name in names:
        value = record.cells.get(name, record.fields.get(name))
        if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
            return str(value)
    fields = ", ".join(record.fields) or "no fields"
    raise UserError(record.source, f"there is no text {names[0]!r}; it has {fields}")


def _list(record: Record, name: str, least: int = 1) -> list[Any]:
    value = record.fields.get(name)
    if not isinstance(value, list) or len(value) < least:
        raise UserError(record.source, f"{name!r} must be a list of {least} or more")
    return value


def _problem(
    record: Record, name: str, prompt: str, question: str, answer: str | None = None, /, **fields: Any
) -> SuiteProblem:
    task = Task(
        id=name,
        messages=({"role": "user", "content": prompt},),
        answer=answer,
        fields=fields,
        source=record.source,
    )
    return SuiteProblem(task=task, question=question)


def _choice_problem(
    record: Record, name: str, prompt: str, question: str, choices: Sequence[str], gold: int
) -> SuiteProblem:
    if not 0 <= gold < len(choices):
        raise UserError(record.source, f"the right choice is number {gold} of {len(choices)}")
    if blank := [number for number, choice in enumerate(choices) if not str(choice).strip()]:
        raise UserError(record.source, f"choice number {blank[0]} is empty")
    task = _problem(record, name, prompt, question).task
    return SuiteProblem(task=task, question=question, choices=tuple(f" {c}" for c in choices), gold=gold)


# ---------------------------------------------------------------------- mathematics


def _gold_number(record: Record) -> str:
    _, mark, number = _text(record, "answer").rpartition("####")
    if not mark:
        raise UserError(record.source, "the answer has no '####' with the number behind it")
    return number.strip()


def gsm8k(record: Record, name: str, shots: Sequence[Record]) -> SuiteProblem:
    """Ask a grade-school problem, with free reasoning."""
    question = _text(record, "question")
    prompt = f"{question}\nThink step by step, and end with '#### ' and the number."
    return _problem(record, name, prompt, question, _gold_number(record))


def gsm8k_shots(record: Record, name: str, shots: Sequence[Record]) -> SuiteProblem:
    """Ask a grade-school problem after solved examples, in the format of lm-evaluation-harness."""
    solved = "".join(
        f"Question: {_text(shot, 'question')}\nAnswer: {_text(shot, 'answer')}\n\n" for shot in shots
    )
    question = _text(record, "question")
    return _problem(record, name, f"{solved}Question: {question}\nAnswer:", question, _gold_number(record))


def boxed(record: Record, name: str, shots: Sequence[Record]) -> SuiteProblem:
    """Ask a competition problem, with the answer in a box."""
    question = _text(record, "problem", "question", "Problem")
    prompt = f"{question}\nThink step by step, and put the final answer within \\boxed{{}}."
    return _problem(record, name, prompt, question, _text(record, "answer", "Answer"))


# ---------------------------------------------------------------------- programs


def humaneval(record: Record, name: str, shots: Sequence[Record]) -> SuiteProblem:
    """Ask to complete a function, with instructions."""
    start = _text(record, "prompt")
    prompt = (
        f"Complete this function. Answer with all of it in one block of Python code.\n```python\n{start}```"
    )
    return _problem(record, name, prompt, start, **_test_fields(record))


def humaneval_text(record: Record, name: str, shots: Sequence[Record]) -> SuiteProblem:
    """Ask to continue the beginning of a function, as plain text."""
    start = _text(record, "prompt")
    return _problem(record, name, start, start, **_test_fields(record))


def _test_fields(record: Record) -> dict[str, str]:
    return {name: _text(record, name) for name in ("prompt", "entry_point", "test")}


def mbpp(record: Record, name: str, shots: Sequence[Record]) -> SuiteProblem:
    """Ask for a function described in a sentence, with asserts that it must pass."""
    question, asserts = _text(record, "text", "prompt"), [str(line) for line in _list(record, "test_list")]
    tests = "\n".join(asserts)
    prompt = (
        f"{question}\nYour code should pass these tests:\n```python\n{tests}\n```\n"
        "Answer with one block of Python code."
    )
    imports = record.fields.get("test_imports") or []
    if not isinstance(imports, list):
        raise UserError(record.source, "'test_imports' must be a list of lines")
    setup = record.fields.get("test_setup_code") or "\n".join(map(str, imports))
    test = record.fields.get("test") or tests
    fields = {"test": test, "test_setup_code": setup, "entry_point": called(tests)}
    return _problem(record, name, prompt, question, **fields)


def stdio(record: Record, name: str, shots: Sequence[Record]) -> SuiteProblem:
    """Ask for a program with input and output; tests are the verifier's `cases` or LiveCodeBench's."""
    question = _text(record, "question_content", "question", "prompt")
    prompt = (
        f"{question}\nRead from standard input and write to standard output. "
        "Answer with one block of Python code."
    )
    if "cases" in record.fields:
        cases = _list(record, "cases")
    else:
        cases = [*_tests(record, "public_test_cases"), *_tests(record, "private_test_cases")]
    limits = {key: record.fields[key] for key in ("time_limit_s", "memory_limit_mb") if key in record.fields}
    return _problem(record, name, prompt, question, kind="stdio", cases=cases, **limits)


def _tests(record: Record, name: str) -> list[dict[str, str]]:
    try:
        tests = json.loads(str(record.fields.get(name) or "[]"))
        if any(test["testtype"] != "stdin" for test in tests):
            raise UserError(record.source, f"{name} calls a function", "leave such problems out")
        return [{"stdin": test["input"], "stdout": test["output"]} for test in tests]
    except (ValueError, TypeError, KeyError):
        fix = "write its tests as 'cases', a list of {stdin, stdout}"
        raise UserError(record.source, f"{name} is not a list of tests as JSON", fix) from None


# ---------------------------------------------------------------------- instructions, choices


def ifeval(record: Record, name: str, shots: Sequence[Record]) -> SuiteProblem:
    """Ask for a text under instructions that a program can check."""
    prompt = _text(record, "prompt")
    names, numbers = _list(record, "instruction_id_list"), _list(record, "kwargs")
    problem = _problem(record, name, prompt, prompt, instruction_id_list=names, kwargs=numbers)
    return replace(problem, counts={"instructions": len(names)})


def arc(record: Record, name: str, shots: Sequence[Record]) -> SuiteProblem:
    """Ask a question of school science; the choices are complete answers."""
    question, choices = _text(record, "question"), record.fields.get("choices")
    texts, labels = (choices.get(key) if isinstance(choices, dict) else None for key in ("text", "label"))
    if not isinstance(texts, list) or not isinstance(labels, list) or len(texts) != len(labels):
        raise UserError(record.source, "'choices' must have text and label, two lists as long")
    right = _text(record, "answerKey")
    gold = labels.index(right) if right in labels else -1
    return _choice_problem(record, name, f"Question: {question}\nAnswer:", question, texts, gold)


def hellaswag(record: Record, name: str, shots: Sequence[Record]) -> SuiteProblem:
    """Ask for the ending of a scene; the choices are complete endings."""
    scene = f"{_text(record, 'ctx_a')} {_text(record, 'ctx_b').capitalize()}"
    prompt = _without_brackets(f"{_text(record, 'activity_label')}: {scene}")
    endings = [_without_brackets(str(ending)) for ending in _list(record, "endings", 2)]
    label = _text(record, "label")
    return _choice_problem(record, name, prompt, prompt, endings, int(label) if label.isdecimal() else -1)


def _without_brackets(text: str) -> str:
    """Remove WikiHow's headings and notes in brackets."""
    return re.sub(r"\[[^\]\n]*\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def mmlu(record: Record, name: str, shots: Sequence[Record]) -> SuiteProblem:
    """Ask a question with four lettered choices; the answer is a letter."""
    subject = _text(record, "subject").replace("_", " ")
    head = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
    solved = "".join(f"{_lettered(shot)} {LETTERS[_right(shot)]}\n\n" for shot in shots)
    question = _lettered(record)
    return _choice_problem(record, name, f"{head}{solved}{question}", question, LETTERS, _right(record))


def _lettered(record: Record) -> str:
    choices = _list(record, "choices", len(LETTERS))
    if len(choices) > len(LETTERS):
        problem = f"'choices' must be {len(LETTERS)}, one a letter, and there are {len(choices)}"
        raise UserError(record.source, problem)
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True)]
    return "\n".join([_text(record, "question").strip(), *lines, "Answer:"])


def _right(record: Record) -> int:
    right = record.fields.get("answer")
    if not isinstance(right, int) or not 0 <= right < len(LETTERS):
        raise UserError(record.source, "'answer' must be the number of a choice, 0 to 3")
    return right


def own(record: Record, name: str, shots: Sequence[Record]) -> SuiteProblem:
    """Ask the prompt of a user's record, in any form that training reads."""
    task = task_of(record)
    question = "\n".join(message["content"] for message in task.messages)
    return SuiteProblem(task=replace(task, id=name), question=question)
