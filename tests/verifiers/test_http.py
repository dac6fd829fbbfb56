"""A reward by HTTP: what is sent and read, and services that are slow, broken, down or wrong."""

import json
import pickle
from pathlib import Path

import pytest

from posttrain.base.usercode import load_named
from posttrain.recipe.verifier import read_verifier
from posttrain.types import Task, UserError
from posttrain.verifiers.http import Http
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import Group

SERVER = Path(__file__).parent / "openai_server.py"
serving, scripted, Raw, Status, Slow, Drop = (
    load_named(f"{SERVER}:{name}") for name in ("serving", "scripted", "Raw", "Status", "Slow", "Drop")
)
TASK = Task(
    id="t1",
    messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}),
    answer="4",
    answer_value=4,
    fields={"topic": "sums", "response": "a field of this name gives way"},
)


def sends(value):
    return Raw(json.dumps(value).encode())


def over(server, **options):
    given = {"timeout_s": 5.0, "retries": 2, "backoff_s": 0.01, "deadline_s": 20.0} | options
    return Http(url=f"{server.url}/reward", **given)


def test_what_is_sent_and_what_comes_back(monkeypatch):
    monkeypatch.setenv("POSTTRAIN_TEST_TOKEN", "Bearer secret-1")
    with serving(scripted(sends({"score": 0.25, "reason": "too\nlong"}))) as server:
        verifier = over(server, headers={"X-Run": "a"}, headers_env={"Authorization": "POSTTRAIN_TEST_TOKEN"})
        verdict = verifier(TASK, "It is 4 \ud800.")
    assert (verdict.score, verdict.label, verdict.reason) == (0.25, "scored", "too long")
    [asked] = server.asked
    assert asked.path.endswith("/reward")
    assert (asked.headers["X-Run"], asked.headers["Authorization"]) == ("a", "Bearer secret-1")
    messages = [dict(message) for message in TASK.messages]
    fixed = {"id": "t1", "prompt": "2 + 2?", "messages": messages, "answer": 4}
    assert asked.body == fixed | {"topic": "sums", "response": "It is 4 \ud800."}
    assert b"secret" not in pickle.dumps(verifier)


def test_a_group_is_one_request_and_a_list():
    answers = [{"score": 1}, 0.5, {"score": None, "reason": "offline"}]
    with serving(scripted(sends(answers))) as server, Pool(workers=1, deadline_s=30.0) as pool:
        verifier = over(server, grouped=True)
        verdicts = pool.judge(verifier, [(TASK, text) for text in ("a", "b", "c")])
    assert [v.score for v in verdicts] == [1.0, 0.5, None]
    assert (verdicts[2].label, verdicts[2].reason) == ("unanswered", "offline")
    [asked] = server.asked
    assert asked.body["responses"] == ["a", "b", "c"]


def test_responses_are_sent_at_the_same_time_and_keep_their_order():
    with serving(lambda asked: sends(len(asked.body["response"]))) as server:
        verdicts = over(server).judge_all([(TASK, "x" * n) for n in range(12)])
    assert [v.score for v in verdicts] == list(range(12))


MALFORMED = {
    "not JSON": (Raw(b"<html>"), "unparsable"),
    "cut off": (Raw(b'{"score": 1', length=40), "unanswered"),
    "no score": (sends({"reward": 1}), "unparsable"),
    "a list": (sends([1]), "unparsable"),
    "text": (sends("1"), "unparsable"),
    "a score of text": (sends({"score": "1"}), "not_a_number"),
    "NaN": (Raw(b'{"score": NaN}'), "not_a_number"),
    "infinity": (Raw(b"1e999"), "not_a_number"),
    "a reason that is not text": (sends({"score": 1, "reason": 3}), "unparsable"),
    "null": (sends(None), "unparsable"),
    "no score by its own word": (sends({"score": None}), "unanswered"),
    "refused": (Status(401, "bad token"), "unanswered"),
    "down": (Status(503), "unanswered"),
    "dropped": (Drop(), "unanswered"),
}


def test_a_reason_of_null_is_no_reason():
    with serving(scripted(sends({"score": 1, "reason": None}))) as server:
        verdict = over(server)(TASK, "4")
    assert (verdict.score, verdict.label, verdict.reason) == (1.0, "scored", "")


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_malformed_or_fails_is_no_score(name):
    answer, label = MALFORMED[name]
    with serving(scripted(answer)) as server:
        verdict = over(server)(TASK, "4")
    assert (verdict.score, verdict.label) == (None, label), verdict.reason


@pytest.mark.parametrize(
    ("answer", "label"), [([1.0], "wrong_length"), ({"score": 1}, "unparsable"), ([1.0, "x"], "scored")]
)
def test_a_group_with_a_wrong_list_fails_as_a_whole(answer, label):
    with serving(scripted(sends(answer))) as server:
        first, second = over(server, grouped=True).judge_group(Group(task=TASK, responses=("a", "b")))
    assert first.label == label
    assert second.score is None


def test_failures_that_pass_are_sent_again_after_what_the_server_asks():
    with serving(scripted(Status(503), Status(429, retry_after="0.3"), Raw(b"{"), sends(1))) as server:
        assert over(server, retries=3)(TASK, "4").score == 1.0
    times = [asked.at for asked in server.asked]
    assert len(times) == 4
    assert times[2] - times[1] >= 0.3


def test_a_slow_service_is_given_up_within_the_timeout():
    with serving(scripted(Slow(wait_s=1.5))) as server:
        verdict = over(server, timeout_s=0.2, retries=0)(TASK, "4")
    assert (verdict.score, verdict.label) == (None, "unanswered")
    assert "0.2 s" in verdict.reason


def test_a_missing_secret_is_an_error_before_anything_is_sent():
    verifier = Http(url="http://localhost:1", headers_env={"X-Key": "POSTTRAIN_TEST_NOT_SET"})
    with pytest.raises(UserError, match="POSTTRAIN_TEST_NOT_SET"):
        verifier.require()


@pytest.mark.parametrize("option", ["url=ftp://x", "timeout_s=0", "batch=0", "concurrency=0", "retries=-1"])
def test_wrong_options_are_refused(option):
    with pytest.raises(UserError):
        read_verifier("http", ["url=http://localhost:1", option])
