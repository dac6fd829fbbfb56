"""An endpoint answers, is slow, lies, refuses and falls over: an answer comes back, or why there is none."""

import json
import pickle
import subprocess
import sys
import time
from email.utils import formatdate
from pathlib import Path

import httpx
import pytest

from posttrain.base.usercode import load_named
from posttrain.types import UserError
from posttrain.verifiers.judge import connection as connection_module
from posttrain.verifiers.judge.endpoint import Endpoint
from posttrain.verifiers.judge.rate import turn
from posttrain.verifiers.judge.usage import Usage, spent

SERVER = Path(__file__).parent / "openai_server.py"
serving, scripted, completion, Status, Raw, Slow, Drop = (
    load_named(f"{SERVER}:{name}")
    for name in ("serving", "scripted", "completion", "Status", "Raw", "Slow", "Drop")
)
HELLO = [{"role": "user", "content": "Grade this: é 🙂"}]


def made(server, **options):
    given = {"timeout_s": 5.0, "retries": 2, "backoff_s": 0.01, "deadline_s": 20.0}
    return Endpoint(base_url=server.url, model="judge-1", **(given | options))


def say(endpoint, conversations=(HELLO,), **options):
    given = {"max_tokens": 9, "temperature": 0.0, "seed": 3} | options
    return endpoint.write(list(conversations), **given)


def test_what_is_sent_and_what_comes_back(monkeypatch):
    monkeypatch.setenv("POSTTRAIN_TEST_KEY", "secret-key-1")
    with serving(scripted("Score: 7")) as server:
        extra = {"top_p": 0.5}
        [written] = say(made(server, api_key_env="POSTTRAIN_TEST_KEY", body=extra))
    assert (written.text, written.prompt_tokens, written.completion_tokens) == ("Score: 7", 100, 10)
    [asked] = server.asked
    assert asked.path == "/v1/chat/completions"
    assert asked.headers["Authorization"] == "Bearer secret-key-1"
    wanted = {
        "model": "judge-1",
        "messages": HELLO,
        "max_tokens": 9,
        "temperature": 0.0,
        "seed": 3,
        "top_p": 0.5,
    }
    assert asked.body == wanted


def test_what_a_server_refuses_is_left_out():
    with serving(scripted("x")) as server:
        say(made(server, omit=("seed",), body={"random_seed": 1}))
    assert "seed" not in server.asked[0].body
    assert server.asked[0].body["random_seed"] == 1


def test_the_other_name_of_the_limit_and_half_a_surrogate_pair():
    with serving(scripted("x")) as server:
        odd = [{"role": "user", "content": "a\ud800b"}]
        say(made(server, limit_field="max_completion_tokens"), [odd])
    assert server.asked[0].body["max_completion_tokens"] == 9
    assert "max_tokens" not in server.asked[0].body
    assert server.asked[0].text == "a?b"


def test_the_key_is_in_no_error_no_log_and_no_pickle(monkeypatch, tmp_path):
    monkeypatch.setenv("POSTTRAIN_TEST_KEY", "secret-key-1")
    log = str(tmp_path / "log.jsonl")
    with serving(scripted(Status(401, "bad key"))) as server:
        endpoint = made(server, api_key_env="POSTTRAIN_TEST_KEY", log=log)
        [written] = say(endpoint)
    assert written.failed
    for place in (written.error, Path(log).read_text(), repr(endpoint), str(pickle.dumps(endpoint))):
        assert "secret-key-1" not in place


def test_a_missing_key_is_the_users_error_and_asks_nobody(monkeypatch):
    monkeypatch.delenv("POSTTRAIN_TEST_KEY", raising=False)
    with serving(scripted("x")) as server:
        endpoint = made(server, api_key_env="POSTTRAIN_TEST_KEY")
        with pytest.raises(UserError, match=r"^api_key_env: "):
            endpoint.require()
        with pytest.raises(UserError, match=r"^api_key_env: "):
            say(endpoint)
    assert not server.asked


PASSING = {
    "429": Status(429),
    "408": Status(408),
    "500": Status(500, "boom"),
    "503": Status(503),
    "529": Status(529),
    "dropped": Drop(),
    "not JSON": Raw(b"<html>gateway</html>"),
    "no choices": Raw(b'{"choices": []}'),
    "a list": Raw(b"[]"),
    "deep": Raw(b"[" * 100_000),
    "cut off": Raw(completion("Score: 7"), length=10_000),
    "content is a number": Raw(completion(7)),
    "content is a list of no parts": Raw(completion([{"text": "Score: 7"}])),
    "empty": Raw(b""),
    "invalid gzip": Raw(b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("failure", PASSING.values(), ids=PASSING)
def test_what_may_pass_is_tried_again(failure):
    with serving(scripted(failure, "Score: 7")) as server:
        [written] = say(made(server))
    assert written.text == "Score: 7"
    assert len(server.asked) == 2


@pytest.mark.parametrize("failure", PASSING.values(), ids=PASSING)
def test_what_does_not_pass_is_an_error_and_no_empty_answer(failure):
    with serving(scripted(failure)) as server:
        [written] = say(made(server))
    assert written.failed
    assert "(3 tries)" in written.error
    assert not written.text
    assert len(server.asked) == 3


@pytest.mark.parametrize("code", [301, 400, 401, 403, 404, 422])
def test_a_refusal_is_not_tried_again(code):
    with serving(scripted(Status(code, "no such model"), "Score: 7")) as server:
        [written] = say(made(server))
    assert f"status {code} (no such model)" in written.error
    assert len(server.asked) == 1


PAID = {
    "thought alone": (completion(None, finish="length"), "", True),
    "parts": (completion([{"type": "thinking", "thinking": []}, {"type": "text", "text": "a"}]), "a", False),
    "refusal": (
        completion(None).replace(b'"content": null', b'"content": null, "refusal": "No."'),
        "No.",
        False,
    ),
}


@pytest.mark.parametrize(("body", "text", "cut"), PAID.values(), ids=PAID)
def test_what_was_written_and_paid_for_is_an_answer_whatever_its_form(body, text, cut, tmp_path):
    log = str(tmp_path / "log.jsonl")
    with serving(scripted(Raw(body))) as server:
        [written] = say(made(server, log=log))
    assert (written.failed, written.text, written.cut) == (False, text, cut)
    assert spent(log) == Usage(requests=1, prompt_tokens=100, completion_tokens=10)


@pytest.mark.parametrize("concurrency", [3, 256])
def test_every_request_under_way_has_a_connection(concurrency, monkeypatch):
    limits = []

    class Client(httpx.Client):
        def __init__(self, **options):
            limits.append(options["limits"].max_connections)
            super().__init__(**options)

    monkeypatch.setattr(connection_module.httpx, "Client", Client)
    with serving(scripted("Score: 7")) as server:
        say(made(server, concurrency=concurrency), [HELLO] * 4)
    assert limits == [min(concurrency, 4)]


def test_what_a_server_complains_of_is_told():
    for body in (b'{"detail": "no seed, please"}', b'[{"error": {"message": "no seed, please"}}]'):
        with serving(scripted(Raw(body, status=422))) as server:
            [written] = say(made(server))
        assert "status 422 (no seed, please)" in written.error


def test_an_empty_text_is_an_answer():
    with serving(scripted("")) as server:
        [written] = say(made(server))
    assert not written.failed
    assert written.text == ""


@pytest.mark.parametrize("date", [False, True])
def test_retry_after_is_kept_to(date):
    after = formatdate(time.time() + 2, usegmt=True) if date else "0.6"
    with serving(scripted(Status(429, retry_after=after), "Score: 7")) as server:
        [written] = say(made(server))
    assert written.text == "Score: 7"
    assert server.asked[1].at - server.asked[0].at >= 0.55


def test_a_retry_after_beyond_the_deadline_ends_it_at_once():
    with serving(scripted(Status(429, retry_after="3600"))) as server:
        [written] = say(made(server))
    assert "status 429" in written.error
    assert len(server.asked) == 1


def test_pauses_double_and_are_jittered(monkeypatch):
    pauses = []
    monkeypatch.setattr(connection_module.time, "sleep", lambda s: pauses.append(s))
    with serving(scripted(Status(500))) as server:
        say(made(server, retries=5, backoff_s=1.0, deadline_s=1000.0))
    between = [p for p in pauses if p > 0]
    assert len(between) == 5
    for n, pause in enumerate(between):
        assert 0.5 * 2**n <= pause <= 2**n
    assert len({p / 2**n for n, p in enumerate(between)}) == 5


@pytest.mark.parametrize("slow", [Slow(wait_s=1.2), Slow(drip_s=0.05)], ids=["late", "byte by byte"])
def test_a_request_is_given_up_in_time_however_it_is_slow(slow):
    with serving(scripted(slow)) as server:
        [written] = say(made(server, timeout_s=0.4, retries=0))
    assert "no answer within 0.4 s" in written.error


def test_nobody_there():
    with serving(scripted("x")) as server:
        pass
    [written] = say(made(server, retries=1))
    assert "ConnectError" in written.error


def test_a_body_without_end_is_not_read_to_it(monkeypatch):
    monkeypatch.setattr(connection_module, "_MOST_BYTES", 1 << 16)
    with serving(scripted(Raw(b"x" * (1 << 20)))) as server:
        [written] = say(made(server, retries=0))
    assert "more than" in written.error


def test_answers_keep_the_order_of_the_questions_and_one_failure_is_one_failure():
    def behave(asked):
        time.sleep(0.02 * (7 - int(asked.text) % 7))
        return Status(400) if asked.text == "5" else f"Score: {asked.text}"

    with serving(behave) as server:
        questions = [[{"role": "user", "content": str(n)}] for n in range(12)]
        written = say(made(server, concurrency=4), questions)
    assert [w.text for w in written] == [f"Score: {n}" if n != 5 else "" for n in range(12)]
    assert [n for n, w in enumerate(written) if w.failed] == [5]
    assert 2 <= server.most_at_once <= 4


def test_the_log_has_every_request_and_spent_adds_it_up(tmp_path):
    log = str(tmp_path / "log.jsonl")
    assert spent(log) == Usage()
    with serving(scripted(Status(500), "a", "b")) as server:
        endpoint = made(server, log=log, price_in=2.0, price_out=10.0, concurrency=1)
        say(endpoint, [HELLO, HELLO])
    cost = 2 * (100 * 2.0 + 10 * 10.0) / 1e6
    total = spent(log)
    assert (total.requests, total.failures) == (3, 1)
    assert (total.prompt_tokens, total.completion_tokens) == (200, 20)
    assert total.cost == pytest.approx(cost, rel=1e-12)
    assert [json.loads(line)["status"] for line in Path(log).read_text().splitlines()] == [500, 200, 200]


def test_a_log_that_is_none_is_named_by_its_line(tmp_path):
    (tmp_path / "log").write_text(
        '{"error": "", "prompt_tokens": 1, "completion_tokens": 1, "cost": 0}\n{}\n'
    )
    with pytest.raises(UserError, match=r"log:2: "):
        spent(str(tmp_path / "log"))


@pytest.mark.parametrize(
    "counts", [{"prompt_tokens": None}, {"prompt_tokens": -5}, {"prompt_tokens": True}, 7, None]
)
def test_counts_that_make_no_sense_are_0(counts):
    body = json.loads(completion("x")) | {"usage": counts}
    with serving(scripted(Raw(json.dumps(body).encode()))) as server:
        [written] = say(made(server))
    assert (written.text, written.prompt_tokens, written.completion_tokens) == ("x", 0, 0)


TURNS = """
import sys, tempfile, time
from posttrain.verifiers.judge.rate import turn
tempfile.tempdir = sys.argv[1]
time.sleep(max(0.0, float(sys.argv[2]) - time.time()))
for _ in range(5):
    wait = turn("one key", 600.0, 60.0)
    print(time.time() + wait)
"""


def test_the_rate_holds_over_processes(tmp_path):
    start = time.time() + 1.5
    command = [sys.executable, "-c", TURNS, str(tmp_path), str(start)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    times = [float(t) for process in running for t in process.communicate(timeout=60)[0].split()]
    assert len(times) == 15
    assert max(times) >= start + 14 * 0.1 - 0.01  # alone, each process would be done after 0.4 s


def test_a_turn_that_is_too_far_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert turn("k", 1.0, 0.0) == 0.0
    assert turn("k", 1.0, 30.0) is None
    assert turn("k", 1.0, 90.0) == pytest.approx(60.0, abs=1.0)
    assert turn("another", 1.0, 0.0) == 0.0


@pytest.mark.parametrize("junk", ["", "soon", "nan", "1e300", "inf"])
def test_a_damaged_file_of_turns_starts_anew(junk, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    turn("k", 600.0, 1.0)
    [file] = tmp_path.iterdir()
    file.write_text(junk)
    assert turn("k", 600.0, 1.0) == 0.0


def test_requests_are_spaced(tmp_path, monkeypatch):
    """By a clock that stands still, each of four waits for those before it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pauses, now = [], time.time()
    monkeypatch.setattr(connection_module.time, "time", lambda: now)
    monkeypatch.setattr(connection_module.time, "sleep", pauses.append)
    with serving(scripted("x")) as server:
        written = say(made(server, requests_per_minute=300.0), [HELLO] * 4)
    assert not any(w.failed for w in written)
    assert sorted(p for p in pauses if p > 0) == pytest.approx([0.2, 0.4, 0.6], abs=1e-4)


def test_a_rate_that_the_deadline_does_not_allow_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with serving(scripted("x")) as server:
        written = say(made(server, requests_per_minute=1.0, deadline_s=30.0), [HELLO, HELLO])
    assert sorted(w.failed for w in written) == [False, True]
    assert any("turn" in w.error for w in written)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"base_url": "localhost:8000"}, "http"),
        ({"base_url": "http://x/v1/chat/completions"}, "must end before"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"retries": -1}, "retries"),
        ({"concurrency": 0}, "concurrency"),
        ({"price_in": -1.0, "log": "x"}, "price_in"),
        ({"price_out": 1.0}, "for the log only"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        Endpoint(**({"base_url": "http://x/v1", "model": "m"} | options))
