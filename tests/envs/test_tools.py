"""Tools: whatever one does, the policy is told in a line; the next call and episode are untouched."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from mathcheck.plugin.calculator import calculator
from mathcheck.plugin.number import Number
from posttrain.envs.protocol import guarded_reply, guarded_start
from posttrain.envs.tools.call import Bounds
from posttrain.envs.tools.cells import Cells
from posttrain.envs.tools.functions import ToolFunction, describe_function
from posttrain.envs.tools.search import search
from posttrain.envs.tools.settings import Tools
from posttrain.envs.tools.template_support import Shown
from posttrain.envs.tools.tool_use import ToolUse
from posttrain.plan.prompts import check_stops
from posttrain.process.tree import below
from posttrain.process.workers import Workers
from posttrain.types import Task, UserError
from posttrain.verifiers.sandbox import available

FILE = Path(__file__).with_name("tool_functions.py")
TASK = Task(id="sum", messages=({"role": "user", "content": "3 + 4?"},), answer="7")
LEVEL = next((level for level, why in available().items() if not why), None)
boxed = pytest.mark.skipif(LEVEL is None, reason="this host holds no programs")


@pytest.fixture(scope="module")
def workers():
    with Workers(1, deadline_s=300.0) as made:
        yield made


def made(workers, call, *given):
    """What a call returns in a worker process."""
    workers.submit(call, *given)
    [(_, outcome)] = workers.poll(300.0)
    return outcome.value


def use(**tools):
    """An environment with these tools."""
    settings = Tools(**{"builtin": ("calculator",), **tools})
    return ToolUse(judge=Number(), runners=settings.runners(), settings=settings)


def played(workers, env, *responses):
    """What is said after each response, and the last turn."""
    state, said = made(workers, guarded_start, env, TASK).state, []
    for response in responses:
        turn = made(workers, guarded_reply, env, state, response)
        state = turn.state
        said.append([message["content"] for message in turn.messages])
    return said, turn


# ---------------------------------------------------------------------- functions


@pytest.mark.full
def test_a_tool_that_misbehaves_is_a_line_and_no_more(workers):
    tool = ToolFunction(describe_function(f"{FILE}:misbehave"), f"{FILE}:misbehave")
    bounds = Bounds(deadline_s=2.0, memory_mb=256, max_chars=100)

    def told(how):
        result, kept = made(workers, tool, {"how": how}, None, bounds, "seed")
        assert kept is None
        assert "\n" not in result.text
        return result.label, result.text

    well = told("well")
    assert well[0] == "ok"
    assert told("raise") == ("raised", "raised: ValueError: no such")
    assert told("hang") == ("timeout", "timeout: no result within 2 s")
    assert told("exit") == ("died", "died: the tool ended its process (exit status 3)")
    assert told("kill") == ("died", "died: the tool ended its process (SIGKILL)")
    assert told("write") == ("cut", "x" * 100 + " … (cut after 100 characters)")
    assert told("memory") == ("raised", "raised: MemoryError")
    assert told("fork")[0] in ("timeout", "died")
    assert told("away")[0] == "ok"
    assert told("leave") == well, "it has gone to no other directory, and what it leaves is ended"
    assert made(workers, _below) == [], "nothing of it is left"


def _below():
    return below(os.getpid())[1:]


def test_a_function_says_what_it_takes(workers):
    told = made(workers, describe_function, f"{FILE}:add")
    assert (told.name, told.description) == ("add", "Adds two numbers.")
    assert told.parameters["required"] == ["a"]
    assert told.parameters["properties"]["b"]["type"] == "number"
    assert set(made(workers, describe_function, f"{FILE}:misbehave").properties["how"]["enum"]) >= {
        "well",
        "hang",
    }
    for name, why in (
        ("nameless", "'*numbers: int' has no name that a call could give"),
        ("silent", "its schema cannot be derived"),
        ("later", "it is an async function"),
    ):
        workers.submit(describe_function, f"{FILE}:{name}")
        [(_, failed)] = workers.poll(300.0)
        assert failed.reason.startswith("UserError: ")
        assert why in failed.reason


# ---------------------------------------------------------------------- ours


@pytest.mark.parametrize(
    ("expression", "value"),
    [("624 * 700", "436800"), ("0.1 + 0.2", "0.3"), ("-1/8", "-0.125"), ("2**10", "1024"), ("7 × 8", "56"),
     ("1/3", "1/3 = 0.333333333333333..."), ("sqrt(2)", "1.4142135623731...")],
)  # fmt: skip
def test_the_calculator_is_exact(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression", ["", "9**9**9", "1/0", "7 % 3", "x + 1", "__import__('os')", "(" * 3000, "9!!!!"]
)
def test_the_calculator_refuses_at_once(expression, workers):
    tool = Tools(builtin=("calculator",)).runners()[0]
    result, _ = made(workers, tool, {"expression": expression}, None, Bounds(deadline_s=60.0), "")
    assert result.label == "raised", result
    assert "\n" not in result.text


def test_search_finds_what_shares_words(tmp_path, workers):
    pytest.importorskip("bm25s")
    texts = ["The capital of France is Paris.", "Berlin is the capital of Germany.", "Apples are red."]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = str(tmp_path / "corpus.jsonl")
    assert search("capital of France", corpus).splitlines() == [f"1. {texts[0]}", f"2. {texts[1]}"]
    assert search("zebra", corpus) == search("", corpus) == "nothing is found"
    env = use(builtin=(), corpus=corpus)
    said, _ = played(workers, env, "<call search>red apples</call>")
    assert said == [["search: 1. Apples are red."]]


@boxed
def test_python_remembers_and_is_not_hurt():
    python, kept = Cells("python", LEVEL), None
    bounds = Bounds(deadline_s=2.0, max_chars=60)

    def told(cell):
        nonlocal kept
        result, kept = python({"code": cell}, kept, bounds, "seed")
        return result.label, result.text

    assert told("x = 5\nprint('set')") == ("ok", "set")
    assert told("x + 1") == ("ok", "6")
    assert told("import random; random.random()") != told("random.random()")
    assert told("1 / 0") == ("raised", "ZeroDivisionError: division by zero (line 1)")
    assert told("y =") == ("raised", "SyntaxError: invalid syntax (line 1)")
    assert told("open('f', 'w').write('hi')") == ("ok", "2")
    held = kept
    assert told("while True: pass") == ("timeout", "timeout: no end within 2 s")
    assert told("x = 9\nprint('a' * 50_000_000)") == ("cut", "a" * 60 + " … (cut after 60 characters)")
    assert told("import os; os._exit(3)") == ("died", "died: it ended its process (3)")
    assert kept == held, "what does not end is forgotten"
    told("import os, shutil; shutil.rmtree('/box', ignore_errors=True); os.fork()")
    assert told("x, open('f').read() if os.path.exists('f') else 'gone'")[1].startswith("(5, ")
    again = Cells("python", LEVEL)({"code": "x"}, held, bounds, "seed")[0]
    assert again.text == "5"


@boxed
def test_files_of_the_shell_stay():
    shell, kept = Cells("shell", LEVEL), None
    bounds = Bounds(deadline_s=5.0)
    first, kept = shell({"command": "echo hello > a; cat a"}, kept, bounds, "")
    second, kept = shell({"command": "cat a; cd /; false"}, kept, bounds, "")
    third, kept = shell({"command": "ls"}, kept, bounds, "")
    assert (first.label, first.text) == ("ok", "hello")
    assert (second.label, second.text) == ("raised", "hello\n(exit status 1)")
    assert third.text == "a"


# ---------------------------------------------------------------------- episodes


def test_calls_are_answered_and_the_answer_is_judged(workers):
    env = use(max_calls=2, call_reward=-0.1)
    said, turn = played(
        workers, env, "<call calculator>3 + 4</call> and <call calculator>2 * 3</call>", "It is 7."
    )
    assert said == [["calculator: 7\ncalculator: 6"], []]
    assert (turn.done, turn.reward, turn.verdict.label) == (True, 1.0, "right")
    assert turn.verdict.parts == {"tools/calls": 2.0}
    first = made(workers, guarded_reply, env, env.start(TASK).state, "<call calculator>3</call>")
    assert first.reward == pytest.approx(-0.1)


def test_an_episode_has_so_many_calls(workers):
    env, call = use(episode_calls=3), "<call calculator>7</call>"
    said, turn = played(workers, env, 2 * call, 2 * call, call, "7")
    assert [text.count("calculator: 7") for [text] in said[:2]] == [2, 1]
    assert "of 2 calls the first 1 were made" in said[1][0]
    assert "of 1 calls the first 0 were made" in said[2][0]
    assert turn.verdict.parts == {"tools/calls": 5.0, "tools/too_many": 2.0}


def test_calls_that_were_never_made_take_none_of_an_episodes(workers):
    env, call = use(max_calls=1, episode_calls=3), "<call calculator>7</call>"
    said, _ = played(workers, env, 3 * call, "<call oracle>7</call>", call, call, "7")
    assert [text.count("calculator: 7") for [text] in said[:4]] == [1, 0, 1, 1]


def test_a_function_says_what_each_call_earns(workers):
    env = use(call_reward=f"{FILE}:careful")
    state = env.start(TASK).state
    calls = "<call calculator>3</call><call calculator>1/0</call><call oracle>7</call>"
    turn = made(workers, guarded_reply, env, state, calls)
    assert turn.reward == pytest.approx(0.25 - 1), "a call that no tool was asked earns nothing"
    assert [m["content"].count("\n") for m in turn.messages] == [2]
    broken = made(workers, guarded_reply, env, state, "<call calculator>2 + 2</call>")
    assert broken.verdict.failed
    assert (broken.verdict.label, broken.reward) == ("not_a_number", None)
    assert "call_reward" in broken.verdict.reason
    raised = made(workers, guarded_reply, env, state, "<call calculator>99</call>")
    assert raised.verdict.failed
    assert raised.verdict.label == "raised"
    with pytest.raises(UserError, match="judged alone"):
        use(call_reward=f"{FILE}:of_a_group")


def test_every_fault_is_told_and_counted(workers):
    env = use(max_calls=3)
    said, turn = played(
        workers,
        env,
        "<call calculator>1/0</call><call oracle>7</call><call calculator>7",
        "<call calculator>1</call>" * 10,
        "7",
    )
    assert said[0][0].splitlines() == [
        "calculator: raised: UndefinedError: a division by 0",
        "oracle: unknown: there is no tool 'oracle'; there are calculator",
        "tool: malformed: the call is not closed by </call>",
    ]
    assert said[1][0].splitlines()[3:] == [
        "tool: too_many: of 10 calls the first 3 were made, the rest was not"
    ]
    counts = {"calls": 13, "raised": 1, "unknown": 1, "malformed": 1, "too_many": 7}
    assert turn.verdict.parts == {f"tools/{name}": n for name, n in counts.items()}


def test_a_call_in_another_form_is_told_and_counted(workers):
    env = use(max_turns=3)
    call = '{"name": "calculator", "arguments": {"expression": "3 + 4"}}'
    said, turn = played(workers, env, call, f"<tool_call>{call}</tool_call>", f"7 {call}")
    assert said[0] == [
        "tool: malformed: 'calculator' is called in the form 'openai'; "
        "write <call calculator>(12 - 5) * 3</call>"
    ]
    assert "the form 'hermes'" in said[1][0]
    assert turn.verdict.parts == {"tools/calls": 2.0, "tools/malformed": 2.0}, "JSON in an answer is words"


def test_at_the_last_turn_the_words_are_the_answer(workers):
    env = use(max_turns=2)
    call = "<call calculator>7</call>"
    _, turn = played(workers, env, call, f"5 {call}")
    assert turn.verdict.label == "wrong", "what a call holds is no answer"
    assert turn.verdict.parts == {"tools/calls": 2.0, "tools/too_many": 1.0}
    _, turn = played(workers, env, call, "7")
    assert turn.verdict.label == "right"


@boxed
def test_what_is_ours_is_no_fault_of_the_policy(workers):
    env = use(builtin=("python",), level=LEVEL, memory_mb=1)  # in which no interpreter comes up
    turn = made(workers, guarded_reply, env, env.start(TASK).state, "<call python>1</call>")
    assert turn.done
    assert turn.verdict.failed
    assert turn.verdict.label == "INFRA_ERROR"


def test_results_are_messages_of_tools_where_they_show(workers):
    env = replace(use(), shown=Shown("hermes", tools=True, results=True))
    start = env.start(TASK)
    assert start.messages == TASK.messages
    assert [tool["function"]["name"] for tool in start.tools] == ["calculator"]
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "3 + 4"}}</tool_call>'
    turn = made(workers, guarded_reply, env, start.state, call * 2)
    assert [(m["role"], m["name"], m["content"]) for m in turn.messages] == [("tool", "calculator", "7")] * 2
    assert len({m["tool_call_id"] for m in turn.messages}) == 2


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({"builtin": []}, "there is no tool"),
        ({"max_turns": 0}, "max_turns and max_calls must be 1 or more"),
        ({"deadline_s": 0}, "deadline_s, memory_mb and max_chars must be positive"),
        ({"builtin": ["calculator", "calculator"]}, "two tools are called 'calculator'"),
        ({"functions": [f"{FILE}:foreign"]}, "which JSON does not have"),
        ({"corpus": "no/such/corpus"}, "no/such/corpus"),
    ],
)
def test_mistakes_of_the_table_are_one_line(online, write, run_cli, tables, why):
    if "corpus" in tables:
        pytest.importorskip("bm25s")
    done = run_cli("validate", write(online, {"task": {"tools": {"builtin": ["calculator"], **tables}}}))
    assert done.code == 2
    assert why in done.err.replace("\n", " ")


def test_a_stop_string_that_cuts_calls_is_refused(online, write, run_cli):
    tools = {"task": {"tools": {"builtin": ["calculator"]}}, "sampling": {"stop": ["</call>"]}}
    done = run_cli("validate", write(online, tools))
    assert done.code == 2
    assert "sampling.stop: a call that holds '</call>'" in " ".join(done.err.split())
    check_stops(["</tool_call>", "\n</call>", "User:"], Shown("plain"))
    check_stops(["</tool_call>"], Shown("hermes"))  # cut JSON is malformed


def test_tools_are_for_questions_that_a_verifier_judges(online, write, run_cli):
    game = {"task": {"arithmetic": None, "guess": {}, "tools": {"builtin": ["calculator"]}}, "verifier": None}
    done = run_cli("validate", write(online, game))
    assert done.code == 2
    assert "tools are for questions that a verifier judges" in done.err.replace("\n", " ")
    done = run_cli("validate", write(online, {"task": {"tools": {"builtin": ["calculator"]}}, "search": {}}))
    assert done.code == 2
    assert "a search calls no tools" in done.err.replace("\n", " ")
