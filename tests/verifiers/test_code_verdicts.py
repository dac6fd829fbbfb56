"""The verifier of programs on tasks of every kind: solutions pass, and mutations of them do not."""

import ast
import runpy
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.types import Task, UserError
from posttrain.verifiers.code import grade, talk
from posttrain.verifiers.code.compare import OutputComparison, close, equal_text, same
from posttrain.verifiers.code.decoding import Garbled, Unplain, decode, shown
from posttrain.verifiers.code.problem import asserts, read_problem, sources
from posttrain.verifiers.code.verifier import Code
from posttrain.verifiers.code.wire import dump
from posttrain.verifiers.fences import program
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.sandbox import LEVELS, available, host

BENCHMARK = runpy.run_path(
    str(Path(__file__).parents[2] / "benchmarks" / "code_verifier.py"), run_name="benchmark"
)
LEVEL = next(level for level in LEVELS if not available()[level])
CODE = Code(level=LEVEL)


def task(**fields: Any) -> Task:
    """A task of these fields."""
    return Task(id="t", messages=(), source="tasks.jsonl:3", fields=fields)


# ---------------------------------------------------------------------- tasks in HumanEval's form

SHAPES: list[tuple[str, str, str, str]] = runpy.run_path(
    str(Path(__file__).parent / "adversarial" / "shapes.py")
)["SHAPES"]


def shaped(name: str, prompt: str, test: str) -> dict[str, Any]:
    """The fields of such a task."""
    return {
        "prompt": prompt,
        "entry_point": name,
        "test": f"METADATA = {{}}\n\n\ndef check(candidate):\n    {test}\n",
    }


@pytest.mark.parametrize(("name", "prompt", "body", "test"), SHAPES, ids=[s[0] for s in SHAPES])
@pytest.mark.sample(every=4)
def test_a_solution_passes_and_five_mutations_of_it_do_not(
    name: str, prompt: str, body: str, test: str
) -> None:
    row = shaped(name, prompt, test)
    assert CODE(task(**row), body).label == "PASS"
    assert CODE(task(**row), f"```python\n{prompt}{body}```").label == "PASS"
    rejected = BENCHMARK["rejected"]({**row, "canonical_solution": body, "task_id": name})
    assert len(rejected) == 5
    for mutant in rejected:
        found = CODE(task(**row, time_limit_s=1.0), mutant)
        assert (found.score, found.label != "PASS") == (0.0, True), mutant


def test_mutations_are_the_same_each_time_and_all_differ() -> None:
    first, again = (list(BENCHMARK["mutations"]("def f(a):\n    return a + 1\n", "seed")) for _ in range(2))
    assert first == again
    assert len(set(first)) == len(first) > 3
    for mutant in first:
        assert ast.parse(mutant)


# ---------------------------------------------------------------------- kinds and options


def test_every_case_must_pass_unless_a_part_is_wanted() -> None:
    cases = [{"args": [n], "expected": n % 2} for n in range(4)]
    found = task(kind="call", entry_point="f", cases=cases)
    half = "def f(n): return 0"
    assert (CODE(found, half).score, CODE(found, half).label) == (0.0, "WRONG")
    assert Code(level=LEVEL, partial=True)(found, half).score == 0.5
    assert Code(level=LEVEL, partial=True)(found, "def f(n): return n % 2").score == 1.0


def test_a_part_of_a_test_counts_the_asserts_that_were_never_reached() -> None:
    test = "".join(f"    x = candidate({n})\n    assert x == {n}\n" for n in range(4))
    found = task(prompt="", entry_point="f", test=f"def check(candidate):\n{test}")
    partial = Code(level=LEVEL, partial=True)
    assert partial(found, "def f(n): return n if n < 2 else 0").score == 0.5
    stops = partial(found, "def f(n):\n    if n: raise ValueError\n    return n")
    assert (stops.score, stops.label) == (0.25, "RUNTIME_ERROR")


def test_what_attacks_gets_no_part() -> None:
    cases = [{"args": [n], "expected": n} for n in range(2)]
    found = task(kind="call", entry_point="f", cases=cases)
    attack = "import os\ndef f(n):\n    if n: open('/etc/x', 'w')\n    return n"
    verdict = Code(level=LEVEL, partial=True)(found, attack)
    assert (verdict.score, verdict.label) == (0.0, "FORBIDDEN")


def test_a_list_of_asserts_is_a_test() -> None:
    found = task(
        test_list=["assert set(shared((3, 4), (4, 5))) == {4}", "assert shared((1,), (2,)) == ()"],
        test_setup_code="import math",
    )
    assert read_problem(found, "python").entry_point == "shared"
    assert CODE(found, "def shared(a, b): return tuple(set(a) & set(b))").label == "PASS"
    assert CODE(found, "def shared(a, b): return a").label == "WRONG"


def test_a_caught_exception_is_not_the_reason_of_a_later_failure() -> None:
    test = (
        "def check(candidate):\n    try:\n        candidate(0)\n    except ZeroDivisionError:\n        pass\n"
        "    assert candidate(1) == 5"
    )
    found = task(prompt="", entry_point="f", test=test)
    verdict = CODE(found, "def f(x): return 1 / x")
    assert (verdict.label, "line 6" in verdict.reason) == ("WRONG", True)


def test_a_slow_program_does_not_hold_a_test_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grade, "TEST_LIMITS", 0.2)
    test = "def check(candidate):\n    for n in range(1000):\n        assert candidate(n) == n"
    found = task(prompt="", entry_point="f", test=test, time_limit_s=5.0)
    verdict = CODE(found, "import time\ndef f(n):\n    time.sleep(0.05)\n    return n")
    assert verdict.label == "TIMEOUT"
    assert "together" in verdict.reason


def test_the_names_of_a_test_mean_what_they_meant() -> None:
    test = (
        "import asyncio\nasync def later(x): return x\n"
        "async def go(candidate):\n    assert (y := candidate(1)) == 1\n"
        "    assert await later(y) == 1\ndef check(candidate):\n    asyncio.run(go(candidate))\n"
    )
    assert CODE(task(prompt="", entry_point="f", test=test), "def f(x): return x").label == "PASS"


@pytest.mark.parametrize(
    ("language", "source"),
    [
        (
            "c",
            '#include <stdio.h>\nint main(void) { int a, b; scanf("%d %d", &a, &b);'
            ' printf("%d\\n", a + b); }',
        ),
        ("cpp", "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }"),
        ("bash", "read a b; echo $((a + b))"),
    ],
)
def test_other_languages(language: str, source: str) -> None:
    if language != "bash" and subprocess.run(["which", "g++"], capture_output=True, check=False).returncode:
        pytest.skip("there is no compiler")
    cases = [{"stdin": "3 4\n", "stdout": "7\n"}, {"stdin": "1 1\n", "stdout": "2\n"}]
    found = task(kind="stdio", language=language, cases=cases, time_limit_s=5.0)
    assert CODE(found, source).label == "PASS"
    assert CODE(found, source.replace("a + b", "a - b")).label == "WRONG"
    if language != "bash":
        assert CODE(found, "}").label == "COMPILE_ERROR"


def test_a_worker_judges_as_we_do_and_the_self_test_responses_hold() -> None:
    found = task(**shaped(*SHAPES[0][:2], SHAPES[0][3]), canonical_solution=SHAPES[0][2])
    with Pool(workers=1, deadline_s=120.0) as pool:
        golds = pool.judge(CODE, [(found, gold) for gold in CODE.golds(found)])
        fakes = pool.judge(CODE, [(found, fake) for fake in CODE.fakes(found)])
    assert [v.score for v in golds] == [1.0, 1.0]
    assert {v.score for v in fakes} == {0.0}


# ---------------------------------------------------------------------- whose fault it is


def test_a_test_that_cannot_run_is_not_the_programs_fault() -> None:
    broken = task(prompt="", entry_point="f", test="import no_such_module\nassert f(1) == 1")
    assert CODE(broken, "def f(x): return x").label == "INFRA_ERROR"
    never = task(prompt="", entry_point="f", test="assert 1 == 1")
    assert CODE(never, "def f(x): return x").score is None
    odd = task(prompt="", entry_point="f", test="assert f(print) == 1")
    assert CODE(odd, "def f(x): return x").score is None


def test_a_test_may_name_modules_that_programs_import_and_use_numpy() -> None:
    odd = task(prompt="", entry_point="f", test="assert math.isclose(f(9), 3)")
    assert CODE(odd, "from math import sqrt\ndef f(x): return sqrt(x)").label == "PASS"
    assert CODE(odd, "def f(x): return x").label == "WRONG"
    lost = CODE(
        task(prompt="", entry_point="f", test="import torch_\nassert f(1) == 1"), "def f(x): return x"
    )
    assert "No module named 'torch_'" in lost.reason
    if not host.packages("numpy"):
        pytest.skip("boxes have another Python than this one, or may not read its packages: no numpy in them")
    near = task(
        prompt="", entry_point="f", test="import numpy as np\nassert np.allclose(f([1, 2]), [1, 2.0])"
    )
    assert CODE(near, "def f(x): return x").label == "PASS"
    assert CODE(near, "def f(x): return x[::-1]").label == "WRONG"


def test_tasks_with_many_limits_do_not_leave_many_interpreters_waiting() -> None:
    for n in range(10):
        cases = [{"args": [1], "expected": 1}]
        found = task(kind="call", entry_point="f", cases=cases, time_limit_s=2 + n / 10)
        assert CODE(found, "def f(x): return x").label == "PASS"
    waiting = [live for lives in talk._warm.values() for live in lives]
    assert len(waiting) <= 2 * 6
    talk.end_all()
    assert all(live.process.returncode is not None for live in waiting)


def test_a_box_that_does_not_come_up_is_not_the_programs_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    talk.end_all()
    monkeypatch.setattr("posttrain.verifiers.sandbox.host.interpreter", lambda: "/bin/false")
    found = task(kind="call", entry_point="f", cases=[{"args": [1], "expected": 1}])
    verdict = CODE(found, "def f(x): return x")
    talk.end_all()
    assert (verdict.score, verdict.label) == (None, "INFRA_ERROR")


def test_a_compiler_that_is_not_there_is_not_the_programs_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grade.RUNNERS, "c", replace(grade.RUNNERS["c"], build=("no-such-compiler", "main.c")))
    verdict = CODE(task(kind="stdio", language="c", cases=[{"stdout": "7\n"}]), "int main(void) {}")
    assert (verdict.score, verdict.label) == (None, "INFRA_ERROR")
    assert "cannot start no-such-compiler" in verdict.reason


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "stdio"}, "cases"),
        ({"kind": "stdio", "cases": [{"stdin": "x"}]}, "stdout"),
        ({"kind": "stdio", "cases": [{"stdout": "x", "stdn": "y"}]}, "stdn"),
        ({"kind": "stdio", "cases": [{"stdout": 7}]}, "strings"),
        ({"kind": "call", "cases": [{"expected": 1}]}, "entry_point"),
        ({"kind": "call", "entry_point": "f", "cases": [{"expected": 1, "args": 3}]}, "args"),
        ({"kind": "asert"}, "kind"),
        ({"kind": "assert", "test": "def"}, "not Python"),
        ({"kind": "assert", "test": "x = 1", "entry_point": "f"}, "asserts nothing"),
        ({"test": "assert f(1)", "time_limit_s": 0}, "time_limit_s"),
        ({"test": "assert f(1)", "memory_limit_mb": True}, "memory_limit_mb"),
        ({"test": "assert f(1)", "memory_limit_mb": 8}, "at least 16"),
        ({"test": "assert f(1)", "output_limit_bytes": 0.5}, "output_limit_bytes"),
        ({"test": "assert f(1)", "compare": "float:x"}, "compare"),
        ({"kind": "stdio", "cases": [{"stdout": ""}], "language": "cobol"}, "cobol"),
    ],
)
def test_a_task_that_states_no_problem_is_a_data_error(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        CODE.check(task(**fields))
    assert "tasks.jsonl:3" in str(caught.value)


@pytest.mark.parametrize("options", [{"level": "strong"}, {"language": "cobol"}])
def test_bad_options_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="one of"):
        Code(**options)


# ---------------------------------------------------------------------- the parts


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("x = 1", "x = 1"),
        ("```\na\n```", "a\n"),
        ("```py\na\n```\n~~~\nb\n~~~\n", "b\n"),
        ("```\na\n```\nand\n```python\nb", "a\n"),
        ("````\n```\na\n```\n````\n", "```\na\n```\n"),
        ("use `x`\n```python\na\n```  \nend", "a\n"),
        ("```\r\na\r\n```\r\n", "a\r\n"),
        ("1. So:\n   ```\n   a:\n     b\n  c\n   ```\n", "a:\n  b\nc\n"),
        # in lists and quotes
        ("10. So:\n    ```py\n    a:\n        b\n    ```\n", "a:\n    b\n"),
        ("- 1. So\nis it:\n\n     ```py\n     a:\n       b\n     ```\n", "a:\n  b\n"),
        ("- So:\n\t```py\n\ta:\n\t\tb\n\t```", "a:\n\tb\n"),
        ("1. ```py\n   a:\n     b\n   ```", "a:\n  b\n"),
        ("1. a\n\n   ~~~~\n   ```\n   ~~~\n   ~~~~", "```\n~~~\n"),
        ("> ```py\n> a:\n>   b\n>\n> c\n> ```\nend", "a:\n  b\n\nc\n"),
        ("> - So:\n>   ```\r\n>   a\r\n>   ```\r\n", "a\r\n"),
        ("> ```py\n> a\n\n```\nb\n```", "b\n"),
        ("1. a\n\nb:\n    ```\n    c\n    ```\n```\nd\n```", "d\n"),
        # fences that stand alone
        ("a\n```", "a\n"),
        ("a\r\n```\r\n", "a\r\n"),
        ("a\n~~~~\n \n", "a\n"),
        ("So:\n```python\na", "a"),
        ("So:\n```\na\n~~~\n", "a\n~~~\n"),
        ("1. So:\n   ```py\n   a:\n     b\n", "a:\n  b\n"),
        ("So:\n```python\n", ""),
    ],
)
def test_the_program_is_the_last_complete_block(response: str, found: str) -> None:
    assert program(response) == found


DEFINED = "def f(a):\n    return a + 1\n"


@pytest.mark.parametrize(
    ("response", "found"),
    [
        (f"{DEFINED}```\nIt adds one.", DEFINED),
        (f"{DEFINED}```\nFor example:\n```python\nprint(f(1))\n```\n", DEFINED),
        (f"It writes\n```\n7\n```\nwith\n```python\n{DEFINED}", DEFINED),
        (f"Code:\n```\n{DEFINED}", DEFINED),
        (f"{DEFINED}\nTEXT = '''\n```\na\n```\n'''\n", None),
        (f"```python\n{DEFINED}TEXT = '''\n    ```\n'''\n```\n", f"{DEFINED}TEXT = '''\n    ```\n'''\n"),
        ("    '''- a\n      ```\n      b\n      ```\n    '''\n    return 1\n", None),
    ],
)
def test_a_lone_fence_is_not_part_of_the_program(response: str, found: str | None) -> None:
    assert program(response, "python", accepts=lambda text: "def f" in text) == (found or response)


@pytest.mark.parametrize("mark", ["```", "- ", "> ", "- ```\n", "1. a\n", "> ```\n", "\t", "   ```x\n"])
def test_blocks_are_found_in_linear_time(mark: str) -> None:
    begin = time.process_time()
    program(mark * 50_000)
    assert time.process_time() - begin < 10.0, "of a second or two"


def test_a_program_in_a_list_or_behind_a_prefilled_fence_passes() -> None:
    found = task(kind="call", entry_point="f", cases=[{"args": [1], "expected": 2}])
    inset = "".join(f"    {line}" for line in DEFINED.splitlines(keepends=True))
    for response in (f"{DEFINED}```", f"10. Here:\n    ```python\n{inset}    ```\n"):
        assert CODE(found, response).label == "PASS"


@pytest.mark.parametrize(
    "more",
    [
        "It writes\n```\n7\n```",
        "Run it:\n```bash\npython main.py\n```",
        "First I thought of\n```js\nadd(3, 4)\n```\n",
    ],
)
def test_a_block_of_another_language_is_not_the_program(more: str) -> None:
    cases = [{"stdin": "3 4\n", "stdout": "7\n"}]
    fenced = "```Python3\nprint(sum(map(int, input().split())))\n```\n"
    assert CODE(task(kind="stdio", cases=cases), fenced + more).label == "PASS"


@pytest.mark.parametrize("start", ["", "from typing import List\n", "List = list\n"])
def test_a_called_function_needs_no_import_of_list(start: str) -> None:
    found = task(kind="call", entry_point="Solution.f", cases=[{"args": [[3, 4]], "expected": 7}])
    program = f"{start}class Solution:\n    def f(self, x: List[int]) -> int:\n        return sum(x)\n"
    assert CODE(found, f"```python\n{program}```").label == "PASS"
    wrong = CODE(found, f"```python\n{program.replace('List[int]', 'Lists[int]')}```")
    assert (wrong.label, wrong.reason) == ("RUNTIME_ERROR", "case 1: NameError: name 'Lists' is not defined")


def test_a_block_that_only_uses_the_function_is_not_the_program() -> None:
    found = task(kind="call", entry_point="add", cases=[{"args": [3, 4], "expected": 7}])
    first, right = (f"```python\ndef add(a, b):\n    return a {sign} b\n```\n" for sign in "-+")
    used = "For example:\n```python\nprint(add(3, 4))  # 7\n```\n"
    assert CODE(found, right + used).label == "PASS"
    assert CODE(found, first + right + used).label == "PASS"
    assert CODE(found, right + first + used).label == "WRONG"
    assert CODE(found, right + "In JavaScript:\n```js\nadd = (a, b) => a + b\n```\n").label == "PASS"


@pytest.mark.parametrize(
    "value",
    [
        0, -1, 10**400, 0.1, float("inf"), 1j, "ż\ud800", b"\0", [1, [2]], (1, (2,)), {1, 2},
        {frozenset({1})},
        {1: "a", (1, 2): None}, True, None, [], {},
    ],
    ids=str,
)  # fmt: skip
def test_plain_values_come_back_as_they_are(value: Any) -> None:
    import json

    back = decode(json.loads(dump(value)))
    assert (back, type(back)) == (value, type(value))


def test_what_is_no_plain_value_does_not_come_back() -> None:
    import json

    for thing in (object(), print, iter([])):
        with pytest.raises(Unplain):
            decode(json.loads(dump([thing])))
    for text in (
        '["i"]',
        '["i",[]]',
        '["d",["i","1"]]',
        '["S",["l"]]',
        "7",
        '["q"]',
        '[["i","1"]]',
        '["s","f"]',
    ):
        with pytest.raises(Garbled):
            decode(json.loads(text))


def test_values_are_compared_by_their_exact_types() -> None:
    assert same([1, (2, "a")], [1, [2, "a"]])
    for got, expected in (
        (True, 1),
        (1, True),
        (1.0, 1),
        (1, 1.0),
        ("1", 1),
        (None, 0),
        ({1}, [1]),
        ([1], {"1": 1}),
    ):
        assert not same(got, expected)
    assert not same({1: 1, "1": 2}, {"1": 2})
    assert not same({10**5000: 1}, {"1": 1})
    assert shown(10**5000) == "a value with a number too long to show"


def test_tolerances_are_exact() -> None:
    assert close(1.0 + 1e-7, 1.0, 1e-6)
    assert not close(1.0 + 2e-6, 1.0, 1e-6)
    assert close(1e12 + 1e5, 1e12, 1e-6)
    assert not close(float("inf"), 1e300, 1.0)
    assert close(10**400, 10**400, 0.0)
    assert not same(True, 1, tolerance=1e-6)


@pytest.mark.parametrize(
    ("output", "expected", "how", "equal"),
    [
        ("7\n", "7", "exact", False), ("7\n", "7\n", "exact", True), ("7 \r\n\n", "7\n", "lines", True),
        (" 7", "7", "lines", False), ("7\n\n8", "7\n8", "lines", False), ("7\n\n8", "7 8", "tokens", True),
        ("0.30000001", "0.3", "float:1e-6", True), ("0.31", "0.3", "float:1e-6", False),
        ("x 1", "x 1.0", "float:1e-6", True), ("1_0", "10", "float:1e-6", False),
        ("1", "1 1", "float:1", False),
        ("2" + "0" * 400, "1" + "0" * 400, "float:1e-6", False), ("1" + "0" * 400, "1e400", "float:1", False),
        ("1e999", "inf", "float:1", False), ("-inf", "-Infinity", "float:1", True),
        ("３.５", "3.5", "float:1", False),
        ("nan", "0", "float:1e-6", False), ("nan", "NaN", "float:1e-6", True), ("-0", "0", "float:0", True),
    ],
)  # fmt: skip
def test_outputs_are_compared_as_the_task_says(output: str, expected: str, how: str, equal: bool) -> None:
    assert equal_text(output, expected, OutputComparison.parsed(how)) is equal


def test_the_asserts_of_a_test_are_counted_once_for_all_answers() -> None:
    found = read_problem(task(prompt="", entry_point="f", test="assert f(1)"), "python")
    asserts.cache_clear()
    for answer in ("def f(x): return 0", "def f(x): return x - 1"):
        assert grade.grade_program(found, answer, LEVEL, every=False).label == "WRONG"
    assert asserts.cache_info().misses == 1


def test_a_submission_goes_on_from_its_prompt_or_follows_it() -> None:
    found = read_problem(
        task(prompt="import math\n\ndef f(x):\n", entry_point="f", test="assert f(1)"), "python"
    )
    assert asserts(found.test) == 1
    for code in ("    return math.pi + x", "def f(x):\n    return math.pi + x"):
        space: dict[str, Any] = {}
        for source in sources(found, code):
            try:
                exec(compile(source, "x", "exec"), space)
            except SyntaxError:
                continue
            break
        assert space["f"](0) == pytest.approx(3.14159, abs=1e-4)


def test_what_is_sent_into_a_box_needs_nothing_of_ours() -> None:
    parts = Path(talk.__file__).parent
    for path in [
        *(parts / f"{n}.py" for n in ("wire", "harness", "examiner")),
        parts.parent / "sandbox" / "inside.py",
    ]:
        names = {n.module for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)}
        names |= {
            a.name
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Import)
            for a in n.names
        }
        names.discard("posttrain.verifiers.code.wire")  # sent along
        assert names <= sys.stdlib_module_names
        ast.parse(path.read_text(), feature_version=(3, 9))
