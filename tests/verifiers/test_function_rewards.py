"""Python functions as rewards: what they are given, what they may return, and what is refused at once."""

import asyncio
import copy
import gc
import math
import pickle
import subprocess
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from posttrain.process.coroutines import close_loops
from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.answers import Exact
from posttrain.verifiers.combine.combined import Combined, Part
from posttrain.verifiers.function import Function, to_verdict
from posttrain.verifiers.pool import Pool, judge_group_safely, judge_safely
from posttrain.verifiers.protocol import Group
from posttrain.verifiers.self_test import self_test
from posttrain.verifiers.structure.patterns import Format

QUESTION = Task(
    id="q1",
    messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 4?"}),
    answer="7",
    fields={"difficulty": 2, "unit": "apples"},
    source="d.jsonl:1",
)


@pytest.mark.parametrize(
    ("body", "score"),
    [
        ("def f(response): return len(response)", 3.0),
        ("def f(prompt, response, answer): return (prompt, response, answer) == ('3 + 4?', 'abc', '7')", 1.0),
        ("def f(prompt, response, answer, **fields): return fields['difficulty']", 2.0),
        ("def f(prompt, answer, **fields): return len(fields['response'])", 3.0),
        ("def f(response, difficulty, unit='x'): return difficulty * (unit == 'apples')", 2.0),
        ("def f(**everything): return len(everything)", 7.0),
        ("def f(response, messages, task): return len(messages) + (task.id == 'q1')", 3.0),
        ("def f(*, response, missing=5): return missing", 5.0),
        ("def f(completions, **columns): return [len(c) for c in completions]", 3.0),
        ("def f(prompts, completions, difficulty): return [d for d in difficulty]", 2.0),
        ("def f(completions, answer): return [a == '7' for a in answer]", 1.0),
        ("def f(completions, task): return [t.answer == '7' for t in task]", 1.0),
        ("import numpy\ndef f(completions, **c): return numpy.array([0.5])", 0.5),
        ("import torch\ndef f(completions, **c): return torch.tensor([0.5])", 0.5),
        ("f = lambda response: True", 1.0),
        ("class Scorer:\n    def __call__(self, response): return 0.5\nf = Scorer()", 0.5),
        ("import functools\ndef g(scale, response): return scale\nf = functools.partial(g, 4)", 4.0),
        ("class Inner:\n    @staticmethod\n    def f(response): return 6", 6.0),
    ],
)
def test_a_function_is_given_what_it_names(user, body, score):
    name = "Inner.f" if "Inner" in body else "f"
    assert Function(function=user(body, name))(QUESTION, "abc").score == score


@pytest.mark.parametrize("takes", ["response", "completions"])
def test_a_function_that_changes_its_arguments_does_not_change_the_task(takes):
    asked = replace(QUESTION, fields={"tests": [[1], [2]]})
    before = copy.deepcopy(asked)

    def single(response, tests, messages, task):
        tests.pop()[0] += 1
        messages[-1]["content"] = task.fields["tests"][0].append(3)
        return len(tests)

    def several(completions, tests, messages, task):
        return [single(*each) for each in zip(completions, tests, messages, task, strict=True)]

    verifier = Function(function=single if takes == "response" else several)
    group = Group(task=asked, responses=("a", "b"))
    assert [v.score for v in judge_group_safely(verifier, group) * 2] == [1.0] * 4
    assert asked == before


def test_an_answer_has_the_type_of_the_data_and_text_in_its_task():
    asked = replace(QUESTION, answer="42", answer_value=42)
    single = Function(function=lambda response, answer, task: answer == 42 and task.answer == "42")
    several = Function(function=lambda completions, answer: [a == 42 for a in answer])
    assert judge_safely(single, asked, "a").score == judge_safely(several, asked, "a").score == 1.0
    assert judge_safely(Exact(), asked, "42").score == 1.0


def test_a_function_that_exits_fails_and_ends_nothing():
    verdict = judge_safely(Function(function=lambda response: sys.exit(0)), QUESTION, "a")
    assert (verdict.score, verdict.label) == (None, "raised")


def test_an_async_function_is_awaited_where_a_loop_runs_and_where_none_does(user):
    async def judge(completions, **columns):
        await asyncio.sleep(0)
        return [float(len(text)) for text in completions]

    async def in_a_notebook():
        return Function(function=judge)(QUESTION, "abc")

    assert Function(function=judge)(QUESTION, "abc").score == 3.0
    assert asyncio.run(in_a_notebook()).score == 3.0
    assert (
        Function(function=user("async def f(response): return len(response)"))(QUESTION, "abc").score == 3.0
    )


LIMITED = """
import asyncio, os
LIMIT, LOCK = asyncio.Semaphore(1), asyncio.Lock()

class Client:  # as those that keep a pool of connections
    loop = None
    async def ask(self, text):
        self.loop = self.loop or asyncio.get_running_loop()
        assert self.loop is asyncio.get_running_loop(), "bound to a different event loop"
        await asyncio.sleep(0)
        return float(len(text))

CLIENT = Client()

async def one(text):
    async with LIMIT, LOCK:
        return await CLIENT.ask(text)

async def f(response):
    if response == "late":
        async with LIMIT:
            await asyncio.wait_for(asyncio.gather(asyncio.sleep(60), one(response)), 0.01)
    if response == "exit":
        async with LIMIT:
            raise SystemExit
    if response == "hang":
        await asyncio.sleep(60)
    return {"sum": sum(await asyncio.gather(*(one(response) for _ in range(3)))), "pid": os.getpid()}
"""


def test_an_async_client_of_a_module_serves_all_calls(user):
    reward = Function(function=user(LIMITED))
    for text in ("a", "bb", "ccc"):
        assert reward(QUESTION, text).parts["sum"] == 3 * len(text)
    for broken in ("late", "exit"):
        assert judge_safely(reward, QUESTION, broken).label == "raised"
        assert reward(QUESTION, "bb").parts["sum"] == 6, "what is cancelled holds nothing"


def test_an_async_client_serves_all_calls_of_a_worker(user):
    reward = Function(function=user(LIMITED))
    with Pool(workers=1, deadline_s=3.0) as pool:
        verdicts = []
        for text in ("a", "bb", "late", "ccc", "hang", "d", "ee"):
            pool.submit(reward, QUESTION, text)
            verdicts += [verdict for _, verdict in pool.poll(60.0)]
    found = [verdict.label if verdict.failed else verdict.parts["sum"] for verdict in verdicts]
    assert found == [3, 6, "raised", 9, "timeout", 3, 6]
    pids = [verdict.parts["pid"] for verdict in verdicts if not verdict.failed]
    assert pids == [pids[0]] * 3 + [pids[-1]] * 2, "a worker that hangs is replaced"
    assert pids[0] != pids[-1]


def test_an_async_client_serves_all_calls_of_a_notebook(user):
    reward = Function(function=user(LIMITED))

    async def cells():
        return [reward(QUESTION, text).parts["sum"] for text in ("a", "bb", "ccc")]

    assert asyncio.run(cells()) == [3, 6, 9]


def test_event_loops_are_closed_without_a_warning():
    """Also with a task and a thread that a call has left; a later call has another loop."""
    loops, ended = [], []

    async def endless():
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(1)

    async def reward(response):
        loops.append(asyncio.get_running_loop())
        loops.append(asyncio.create_task(endless()))
        await asyncio.to_thread(len, response)
        return 1.0

    async def in_a_notebook():
        return Function(function=reward)(QUESTION, "abc").score

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert Function(function=reward)(QUESTION, "abc").score == 1.0
            assert asyncio.run(in_a_notebook()) == 1.0
            close_loops()
        gc.collect()
    assert len(set(loops[::2])) == 4
    assert all(loop.is_closed() for loop in loops[::2])
    assert len(ended) == 4


def test_a_program_with_async_rewards_ends_in_silence():
    program = (
        "import asyncio; from posttrain.process.coroutines import run_coroutine\n"
        "print(run_coroutine(asyncio.sleep(0, 'well')), run_coroutine(asyncio.to_thread(len, 'ab')))"
    )
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("well 2\n", "", 0)


def test_what_a_function_logs_is_recorded_beside_its_scores_and_changes_none():
    def reward(completions, log_metric, log_extra=None, **columns):
        log_metric("limit", 9)
        log_extra("length", [len(text) for text in completions])
        log_extra("read", [f"<{text}>\n" for text in completions])
        return [0.5, None, 1.0]

    group = Group(task=QUESTION, responses=("a", "bb", "ccc"))
    verdicts = Function(function=reward).judge_group(group)
    assert [v.score for v in verdicts] == [0.5, None, 1.0]
    assert [v.parts for v in verdicts] == [{"limit": 9.0, "length": 1.0}, {}, {"limit": 9.0, "length": 3.0}]
    assert verdicts[2].reason == "read: <ccc>"
    with_format = Combined(parts=(Part(verifier=Function(function=reward)), Part(verifier=Format())))
    assert with_format.judge_group(group)[2].parts == {
        "reward": 1.0, "reward/limit": 9.0, "reward/length": 3.0, "format": 0.0
    }  # fmt: skip


@pytest.mark.parametrize(
    "value", [0.5, 1, True, np.float32(0.5), np.array(2.0), torch.tensor(1.5), np.int64(3)]
)
def test_numbers_of_any_kind_are_scores(value):
    verdict = to_verdict(value)
    assert (verdict.score, verdict.label) == (float(value), "scored")


@pytest.mark.parametrize(
    "value",
    [
        None, "1", "", b"1", [], [1.0], (1.0,), {}, {"a": None}, {"a": "1"}, {"a": math.nan},
        {"a": 1e308, "b": 1e308},
        math.nan, math.inf, -math.inf, 1j, object(), int, 10**400, np.array([1.0]), torch.tensor([1.0, 2.0]),
        np.float64("nan"), np.array("x"), torch.tensor(math.nan), lambda: 1.0, Ellipsis,
    ],
)  # fmt: skip
def test_anything_else_is_not_a_number(value):
    verdict = to_verdict(value)
    assert (verdict.score, verdict.label) == (None, "not_a_number")
    assert len(verdict.reason) < 200


def test_named_parts_add_up_and_a_verdict_is_taken_as_it_is():
    parts = to_verdict({"right": 1, "short": 0.25})
    assert (parts.score, parts.parts) == (1.25, {"right": 1.0, "short": 0.25})
    own = Verdict(score=0.5, label="half")
    assert to_verdict(own) == own


@pytest.mark.parametrize(
    ("returned", "label"),
    [
        ("[]", "wrong_length"),
        ("[1.0, 2.0]", "wrong_length"),
        ("(1.0, 2.0)", "wrong_length"),
        ("__import__('numpy').zeros(3)", "wrong_length"),
        ("1.0", "not_a_number"),
        ("None", "not_a_number"),
        ("'1'", "not_a_number"),
        ("{0: 1.0}", "not_a_number"),
        ("[None]", "not_applicable"),
        ("[float('nan')]", "not_a_number"),
        ("[[1.0]]", "not_a_number"),
    ],
)
def test_lists_must_hold_one_number_for_each_response(user, returned, label):
    verdict = Function(function=user(f"def f(completions, **columns): return {returned}"))(QUESTION, "x")
    assert (verdict.score, verdict.label) == (None, label)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def reward_f(response): return 1", "has no 'f'"),
        ("f = 3", "not a function but int"),
        ("def f(): return 1", "it takes (nothing)"),
        ("def f(x, y): return 1", "it takes (x, y)"),
        ("def f(prompts, answer): return 1", "no place for a response"),
        ("def f(response, /): return 1", "no place for a response"),
        ("def f(*response): return 1", "no place for a response"),
        ("class f:\n    def __call__(self, response): return 1", "make one, 'judge = f(...)', and name that"),
        ("def f(response) return 1", "SyntaxError"),
        ("import nosuchmodule\ndef f(response): return 1", "nosuchmodule"),
        ("raise RuntimeError('not today')", ":1: RuntimeError: not today"),
        ("import sys\nsys.exit(0)", ":2: SystemExit: 0"),
        ("\n\nx = 1 / 0", ":3: ZeroDivisionError"),
    ],
)
def test_an_unusable_function_is_refused_before_the_run(user, body, says):
    with pytest.raises(UserError) as error:
        Function(function=user(body))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "names nothing"),
        ("math", "names nothing"),
        (":f", "names nothing"),
        ("math:", "names nothing"),
        ("no_such_module_anywhere:f", "there is no module"),
        ("posttrain.no_such:f", "there is no module"),
        ("./no_such_file.py:f", "there is no file"),
        ("math:pi", "not a function"),
        ("math:sqrtt", "did you mean 'sqrt'"),
        ("math:sqrt", "no place for a response"),
        ("builtins:dict", "cannot be read"),
    ],
)
def test_an_unusable_name_is_refused_before_the_run(name, says):
    with pytest.raises(UserError, match=says):
        Function(function=name)


def test_a_field_that_the_data_lack_is_found_before_the_run(user):
    verifier = Function(function=user("def f(response, dificulty): return 1"))
    with pytest.raises(UserError, match=r"^d\.jsonl:1: "):
        verifier.check(QUESTION)


def test_a_function_is_sent_by_name(user):
    verifier = Function(function=user("def f(response): return 1"), name="mine")
    assert pickle.loads(pickle.dumps(verifier)) == verifier
    assert not verifier.trusted


def test_the_self_test_finds_a_function_that_fails_on_the_empty_response(user):
    verifier = Function(function=user("def f(response): return 1 / len(response)"))
    with Pool(workers=1, deadline_s=5.0) as pool, pytest.raises(UserError, match=r"^d\.jsonl:1: "):
        self_test(verifier, [QUESTION], pool)
