"""MCP servers as tools: a real server in a process of its own, whatever it does."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from mathcheck.plugin.number import Number
from posttrain.envs.protocol import guarded_reply, guarded_start
from posttrain.envs.tools.call import Bounds
from posttrain.envs.tools.mcp import McpServer, tools_of_server
from posttrain.envs.tools.settings import Tools
from posttrain.envs.tools.tool_use import ToolUse
from posttrain.process.workers import Workers
from posttrain.types import RunError, Task, UserError

pytest.importorskip("mcp", reason="NOT RUN: pip install 'posttrain[mcp]'")

FILE = Path(__file__).with_name("mcp_server.py")
TASK = Task(id="sum", messages=({"role": "user", "content": "3 + 4?"},), answer="7")
BOUNDS = Bounds(deadline_s=60.0, max_chars=100)


def server(*words, **options):
    """The server of these tests, with words that change how it behaves."""
    return McpServer(name="own", command=sys.executable, args=(str(FILE), *map(str, words)), **options)


@pytest.fixture(scope="module")
def workers():
    with Workers(1, deadline_s=300.0) as made:
        yield made


def made(workers, call, *given):
    """What a call returns in a worker process."""
    workers.submit(call, *given)
    [(_, outcome)] = workers.poll(300.0)
    return outcome.value


def tool(name, *words, **options):
    """A tool of the server."""
    return next(each for each in tools_of_server(server(*words, **options), []) if each.tool.name == name)


def told(workers, runner, bounds=BOUNDS, **given):
    """The class and text of a call's result, in a worker."""
    result, _ = made(workers, runner, given, None, bounds, "")
    return result.label, result.text


def calling(*words):
    """Episodes that call the tools of the server."""
    settings = Tools(mcp=(server(*words),), deadline_s=60.0)
    return ToolUse(judge=Number(), runners=settings.runners(), settings=settings)


def gone(pid):
    """Whether a process ends, or has ended."""
    for _ in range(6000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_what_a_server_offers_is_told_in_its_order():
    found = server().tools()
    assert [each.name for each in found] == ["zadd", "misbehave", "count", "pid"], "over pages of two"
    assert found == server().tools()
    assert found[0].parameters["required"] == ["a", "b"]
    assert [each.description for each in found[:2]] == ["Adds two whole numbers.", "Misbehaves."]
    assert found[2].properties == {}
    assert [each.name for each in server(only=("pid", "zadd")).tools()] == ["zadd", "pid"]
    named = [each.tool.name for each in tools_of_server(server(), ["count"])]
    assert named == ["zadd", "misbehave", "own_count", "pid"]
    settings = Tools(
        builtin=("calculator",), mcp=(server(only=("pid",)), replace(server(only=("pid",)), name="b"))
    )
    assert [each.tool.name for each in settings.runners()] == ["calculator", "pid", "b_pid"]


def test_a_connection_ends_with_its_server():
    connection = server().start()
    assert connection.alive
    pid = int(connection.call("pid", {}, BOUNDS).text)
    connection.close(1.0)
    assert not connection.alive
    assert gone(pid)


def test_whatever_a_server_does_is_a_result(workers):
    runner = tool("misbehave")

    def says(how, bounds=BOUNDS):
        return told(workers, runner, bounds, how=how)

    assert says("well") == ("ok", "well")
    assert told(workers, tool("zadd"), a=2, b=3) == ("ok", "5"), "beside NaN that is not asked for"
    assert says("error") == ("raised", "raised: ValueError: no such\nplace")
    assert told(workers, replace(runner, name_at_server="oracle"), how="well") == (
        "raised",
        "raised: nothing is known of oracle",
    )
    assert says("long") == ("cut", "x" * 100 + " … (cut after 100 characters)")
    assert says("large") == ("cut", "cut: a result of more than 4 MiB, of which nothing is read")
    assert says("asks") == ("ok", "[{}, -32600]"), "a ping is answered, and what is not done is refused"
    assert says("kinds") == ("ok", "one\n[image, image/png]\nheld\n[resource_link, file:///b]")
    assert says("structured") == ("ok", '{"sum": 5}')
    assert says("half") == ("ok", "? half")
    for how in ("garbage", "stderr"):
        assert says(how) == ("ok", "well"), how


def test_what_ends_a_server_ends_one_call(workers):
    runner, number = tool("misbehave"), tool("pid")
    before = told(workers, number)
    assert told(workers, number) == before, "calls share a process"
    assert told(workers, runner, how="die") == ("died", "died: the server ended (exit status 3)")
    second = told(workers, number)
    assert (second[0], second != before) == ("ok", True)
    late = told(workers, runner, replace(BOUNDS, deadline_s=0.3), how="hang")
    assert late == ("timeout", "timeout: no result within 0.3 s")
    assert gone(int(second[1])), "a server that hangs is ended"
    assert told(workers, runner, how="well") == ("ok", "well")


def test_what_a_server_remembers_is_shared_unless_it_is_fresh(workers):
    shared, fresh = tool("count"), tool("count", fresh=True)
    first = int(told(workers, shared)[1])
    assert told(workers, shared) == ("ok", str(first + 1))
    kept = None
    for number in ("1", "2", "3"):
        result, kept = made(workers, fresh, {}, kept, BOUNDS, "")
        assert result.text == number, "the calls of this episode alone"
    assert made(workers, fresh, {}, None, BOUNDS, "")[0].text == "1"
    died = tool("misbehave", fresh=True)
    assert fresh.state_key == died.state_key
    assert made(workers, died, {"how": "die"}, kept, BOUNDS, "")[1] == kept, "what ends it is forgotten"


def test_no_server_outlives_its_worker():
    number = tool("pid", "deaf")
    with Workers(1, deadline_s=300.0) as workers:
        pid = int(told(workers, number)[1])
        assert told(workers, number) == ("ok", str(pid))
        workers.submit(os._exit, 3)
        assert workers.poll(300.0)[0][1].label == "died"
        assert gone(pid)
        pid = int(told(workers, number)[1])
    assert gone(pid)


def test_a_server_below_a_shell_ends_with_it(workers):
    line = f"{sys.executable} {FILE} deaf; true"
    shell = McpServer(name="own", command="/bin/sh", args=("-c", line))
    runners = {each.tool.name: each for each in tools_of_server(shell, [])}
    pid = int(told(workers, runners["pid"])[1])
    assert told(workers, runners["misbehave"], replace(BOUNDS, deadline_s=0.3), how="hang")[0] == "timeout"
    assert gone(pid)


def test_a_function_beside_a_server_leaves_it_alone(workers):
    number = tool("pid")
    pid = told(workers, number)
    calculator = Tools(builtin=("calculator",)).runners()[0]
    assert told(workers, calculator, expression="6 * 7") == ("ok", "42")
    assert told(workers, number) == pid


def test_episodes_call_servers(workers):
    env = calling()
    state, said = made(workers, guarded_start, env, TASK).state, []
    for response in (
        '<call zadd>{"a": 3, "b": 4}</call><call misbehave>die</call><call misbehave>well</call>',
        "<call zadd>3</call><call count></call>",
        "It is 7.",
    ):
        turn = made(workers, guarded_reply, env, state, response)
        state = turn.state
        said += [message["content"] for message in turn.messages]
    assert said[0].splitlines() == [
        "zadd: 7",
        "misbehave: died: the server ended (exit status 3)",
        "misbehave: well",
    ]
    assert said[1].startswith("zadd: arguments: ")
    assert turn.verdict.label == "right"
    assert turn.verdict.parts == {"tools/calls": 5.0, "tools/died": 1.0, "tools/arguments": 1.0}


def test_a_server_that_cannot_be_started_again_is_no_fault_of_the_policy(workers, tmp_path):
    env = calling("once", tmp_path / "seen")
    state = made(workers, guarded_start, env, TASK).state
    turn = made(workers, guarded_reply, env, state, "<call count></call>")
    assert turn.verdict.failed
    assert turn.verdict.label == "INFRA_ERROR"
    assert "start the MCP server" in turn.verdict.reason


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (server("fails"), "mcp_server.py fails': the server ended (exit status 1): there is no database"),
        (server("old"), "Unsupported protocol version from the server: 1999-01-01"),
        (server("none"), "offers no tools"),
        (server(only=("sub",)), "has no tool 'sub'; it has zadd, misbehave, count, pid"),
        (replace(server(), command="no-such-program"), "by 'no-such-program "),
        (McpServer(name="own", command="sleep", args=("1000",), start_s=0.3), "no result within 0.3 s"),
    ],
)
def test_what_offers_nothing_is_refused(given, why):
    with pytest.raises(UserError) as error:
        given.tools()
    assert why in str(error.value)
    with pytest.raises(RunError):
        replace(server("fails"), name="own").start()


@contextmanager
def listening(answers, port=0):
    """A server over HTTP in a process of its own, and its port."""
    line = [sys.executable, str(FILE.with_name("mcp_http_server.py")), str(port), answers, "secret"]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@pytest.fixture
def token(monkeypatch):
    """The variable that holds the token of these servers."""
    monkeypatch.setenv("MCP_TEST_TOKEN", "secret")
    return "MCP_TEST_TOKEN"


def at(port, **options):
    """The server that listens at a port."""
    return McpServer(name="own", url=f"http://127.0.0.1:{port}/mcp", **options)


@pytest.mark.parametrize("answers", ["json", "events"])
@pytest.mark.sample("json")
def test_a_server_over_http_is_called_as_a_process_is(token, answers):
    with listening(answers) as port, Workers(1, deadline_s=300.0) as workers:
        runners = {each.tool.name: each for each in tools_of_server(at(port, token_env=token), ["zadd"])}
        assert list(runners) == ["own_zadd", "misbehave"]
        assert runners["own_zadd"].tool.parameters["required"] == ["a", "b"]
        assert told(workers, runners["own_zadd"], a=2, b=3) == ("ok", "5")

        def says(how, bounds=BOUNDS):
            return told(workers, runners["misbehave"], bounds, how=how)

        assert says("error") == ("raised", "raised: Error executing tool misbehave")
        assert says("long") == ("cut", "x" * 100 + " … (cut after 100 characters)")
        assert says("large") == ("cut", "cut: a result of more than 4 MiB, of which nothing is read")
        late = says("hang", replace(BOUNDS, deadline_s=0.3))
        assert late == ("timeout", "timeout: no result within 0.3 s")
        assert says("well") == ("ok", "well")
        assert says("die")[0] == "died"
        env = replace(calling(), runners=(runners["misbehave"],))
        state = made(workers, guarded_start, env, TASK).state
        turn = made(workers, guarded_reply, env, state, "<call misbehave>well</call>")
        assert turn.verdict.label == "INFRA_ERROR"
        assert "reach the MCP server 'own' by 'http://127.0.0.1:" in turn.verdict.reason
        with listening(answers, port):
            assert says("well") == ("ok", "well")


def test_a_server_that_has_forgotten_a_session_is_asked_for_another(token):
    with Workers(1, deadline_s=300.0) as workers:
        with listening("events") as port:
            runner = tools_of_server(at(port, token_env=token), [])[0]
            assert told(workers, runner, a=2, b=3) == ("ok", "5")
        with listening("events", port):
            label, text = told(workers, runner, a=2, b=3)
            assert (label, "404" in text) == ("died", True)
            assert told(workers, runner, a=2, b=3) == ("ok", "5")


def test_a_token_is_read_from_the_environment_and_never_shown(token, monkeypatch):
    with listening("json") as port:
        with pytest.raises(UserError, match="401") as error:
            at(port).tools()
        monkeypatch.setenv(token, "another")
        with pytest.raises(UserError, match="401") as other:
            at(port, token_env=token).tools()
        assert str(other.value) == str(error.value)
        assert "another" not in repr(at(port, token_env=token))
        monkeypatch.delenv(token)
        with pytest.raises(UserError, match="MCP_TEST_TOKEN is not set"):
            at(port, token_env=token).tools()


def test_the_library_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setattr("posttrain.base.libraries.is_installed", lambda name: False)
    with pytest.raises(UserError, match=r"pip install 'posttrain\[mcp\]'"):
        server().tools()


def test_validate_shows_what_a_server_offers(online, write, run_cli):
    given = {"name": "own", "command": sys.executable, "args": [str(FILE)], "only": ["zadd"]}
    done = run_cli("validate", write(online, {"task": {"tools": {"mcp": given, "deadline_s": 60.0}}}))
    assert done.code == 0, done.err
    assert "Adds two whole numbers." in done.out
    assert "<|im_start|>tool\n2<|im_end|>" in done.out


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"name": "a", "command": "no-such-program"}, "by 'no-such-program'"),
        ({"name": "a b", "command": "x"}, "the name of a server has letters"),
        ({"name": "a", "command": " "}, "must have either a command or a url"),
        ({"name": "a", "command": "x", "url": "http://localhost"}, "must have either a command or a url"),
        ({"name": "a", "url": "localhost:8000"}, "url must begin with http"),
        ({"name": "a", "url": "http://localhost", "args": ["x"]}, "has a url, which args does nothing for"),
        ({"name": "a", "command": "x", "token_env": "T"}, "has a command, which token_env does nothing for"),
        ({"name": "a", "command": "x", "start_s": 0}, "start_s must be positive"),
        ([{"name": "a", "command": "x"}] * 2, "two servers are called 'a'"),
        ({"command": "x"}, "is missing"),
        ({"name": "a", "command": "x", "arg": []}, "did you mean 'args'"),
    ],
)
def test_mistakes_of_the_table_are_one_line(online, write, run_cli, given, why):
    done = run_cli("validate", write(online, {"task": {"tools": {"mcp": given}}}))
    assert done.code == 2
    assert why in done.err.replace("\n", " ")
