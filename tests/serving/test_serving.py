"""serving: a model behind the OpenAI chat API, asked over the wire."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from uvicorn.protocols.http.h11_impl import H11Protocol

from posttrain.api.answering import load_policy, recipe_of
from posttrain.base.chat import Chat
from posttrain.engines.native.engine import NativeEngine
from posttrain.engines.protocol import Engine
from posttrain.plan.model_info import NO_TASK, ModelInfo
from posttrain.recipe.recipe import EngineChoice, Model, Recipe
from posttrain.serving import server as serving
from posttrain.serving.answers import StreamedText
from posttrain.serving.server import ChatServer, ModelDesk
from posttrain.serving.speech import Speech
from posttrain.serving.stepper import PendingAnswers, stream
from posttrain.serving.wire import RefusedError, canonical_json, parse_question
from posttrain.types import Completion, Request, Sampling, UserError

ASKED = [{"role": "user", "content": "2+3"}]


def loaded(path: Path) -> tuple[ModelInfo, Engine]:
    model = Model(path=str(path), dtype="float32", device="cpu")
    recipe = Recipe(model=model, method={"name": "grpo"}, task=NO_TASK)
    return load_policy(recipe, None, lambda text: None)


@contextmanager
def serving_of(path: Path) -> Iterator[ChatServer]:
    policy, engine = loaded(path)
    desk = ModelDesk(engine, policy.chat, name="tiny", context=policy.context)
    with closing(ChatServer(desk)) as server, closing(desk):
        yield server


@pytest.fixture(scope="module")
def served(tiny) -> Iterator[ChatServer]:
    with serving_of(tiny) as server:
        yield server


def post(
    server: ChatServer, body: Any, path: str = "/v1/chat/completions", **headers: str
) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as wire:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        wire.request("POST", path, sent, headers)
        got = wire.getresponse()
        return got.status, json.loads(got.read())


def streamed(server: ChatServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as wire:
        wire.request("POST", "/v1/chat/completions", json.dumps(body | {"stream": True}))
        events = wire.getresponse().read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


@pytest.fixture(scope="module")
def alone(tiny) -> Iterator[tuple[ModelInfo, Engine]]:
    policy, engine = loaded(tiny)
    with closing(engine):
        yield policy, engine


def drawn(alone: tuple[ModelInfo, Engine], **sampling: Any) -> Any:
    """What an engine answers that nobody else asks."""
    policy, engine = alone
    prompt = tuple(policy.chat.render(ASKED))
    engine.submit(Request(prompt=prompt, sampling=Sampling(**sampling), seed=7))
    while True:
        if done := engine.poll():
            return done[0][1]


def test_an_answer_is_what_the_engine_draws_with_its_log_probabilities(served, alone) -> None:
    wanted = drawn(alone, max_new_tokens=12)
    body = {"model": "tiny", "messages": ASKED, "max_tokens": 12, "seed": 7, "logprobs": True}
    code, got = post(served, body)
    assert code == 200
    [choice] = got["choices"]
    assert choice["message"] == {"role": "assistant", "content": wanted.text, "refusal": None}
    told = choice["logprobs"]["content"]
    assert [each["logprob"] for each in told] == pytest.approx(wanted.logp_policy, abs=1e-5)
    assert choice["finish_reason"] == ("length" if wanted.stop == "length" else "stop")
    prompt = len(served.desk.speech.chat.render(ASKED))
    assert got["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": len(wanted.tokens),
        "total_tokens": prompt + len(wanted.tokens),
    }


@pytest.mark.parametrize("stop", [None, "a", ["e", "xyz"]])
def test_a_stream_says_what_is_said_at_once(served, stop) -> None:
    body = {"messages": ASKED, "max_tokens": 40, "seed": 3, "n": 3, "stop": stop, "logprobs": True}
    _, whole = post(served, body)
    chunks = streamed(served, body | {"stream_options": {"include_usage": True}})
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        assert mine[-1]["logprobs"] == choice["logprobs"]
        assert ["role" in c["delta"] for c in mine] == [True] + [False] * (len(mine) - 1)
        ends = [stop] if isinstance(stop, str) else stop or []
        assert not any(end in choice["message"]["content"] for end in ends)
    assert len(chunks) > 3 * 4, "it comes in pieces"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_is_none_of_it(served, alone, stream) -> None:
    whole = drawn(alone, max_new_tokens=40).text
    ends = [whole[5:8], whole[6:9]]
    body = {"messages": ASKED, "max_tokens": 40, "seed": 7, "stop": ends}
    if stream:
        said = "".join(c["choices"][0]["delta"].get("content", "") for c in streamed(served, body))
    else:
        said = post(served, body)[1]["choices"][0]["message"]["content"]
    assert said == whole[: min(whole.index(end) for end in ends)]


def test_equal_seeds_give_equal_answers_whatever_is_asked_beside(served) -> None:
    body = {"messages": ASKED, "max_tokens": 16, "seed": 11}
    alone = post(served, body)[1]["choices"][0]["message"]
    found: list[Any] = []
    others = [{"messages": [{"role": "user", "content": "x" * n}], "max_tokens": 30} for n in range(1, 9)]
    threads = [
        threading.Thread(target=lambda b=b: found.append(post(served, b))) for b in [*others, body, body]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [code for code, _ in found] == [200] * 10
    assert sum(got["choices"][0]["message"] == alone for _, got in found) >= 2
    free = {"messages": ASKED, "max_tokens": 16}
    assert len({post(served, free)[1]["choices"][0]["message"]["content"] for _ in range(4)}) > 1


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        (b"{", 400, None),
        (b"[" * 100_000, 400, None),
        (b'{"messages": [], "temperature": NaN}', 400, None),
        ([], 400, None),
        ({}, 400, "messages"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ({"messages": ["2+3"]}, 400, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "  "}]}, 400, "messages"),
        ({"messages": [{"role": "a<|im_end|>", "content": "x"}]}, 400, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]},
            400,
            "messages[0].tool_calls",
        ),
        (
            {"messages": [*ASKED, {"role": "assistant", "tool_calls": [{"id": "a"}]}, *ASKED]},
            400,
            "messages[1].tool_calls[0].function",
        ),
        ({"messages": [*ASKED, {"role": "assistant", "content": "5"}]}, 400, "messages"),
        ({"messages": ASKED, "temperature": True}, 400, "temperature"),
        ({"messages": ASKED, "seed": 2**63}, 400, "seed"),
        ({"messages": ASKED, "stop": "x", "top_k": -2}, 400, "top_k"),
        ({"messages": ASKED, "top_k": 2**63}, 400, "top_k"),
        ({"messages": ASKED, "stop": ["x"] * 17}, 400, "stop"),
        ({"messages": ASKED, "tool_choice": "required"}, 400, "tool_choice"),
        ({"messages": ASKED, "temperature": -1}, 400, "temperature"),
        ({"messages": ASKED, "temperature": "hot"}, 400, "temperature"),
        ({"messages": ASKED, "temperature": 10**400}, 400, "temperature"),
        ({"messages": ASKED, "top_p": -0.1}, 400, "top_p"),
        ({"messages": ASKED, "echo": True}, 400, "echo"),
        ({"messages": ASKED, "best_of": 2}, 400, "best_of"),
        ({"messages": ASKED, "repetition_penalty": 1.1}, 400, "repetition_penalty"),
        ({"messages": ASKED, "ignore_eos": True}, 400, "ignore_eos"),
        ({"messages": ASKED, "function_call": {"name": "f"}}, 400, "function_call"),
        (
            {"messages": [*ASKED, {"role": "assistant", "content": "5", "reasoning_content": "so"}, *ASKED]},
            400,
            "messages[1].reasoning_content",
        ),
        (
            {"messages": [*ASKED, {"role": "assistant", "content": "", "refusal": "no"}, *ASKED]},
            400,
            "messages[1].refusal",
        ),
        ({"messages": ASKED, "n": 0}, 400, "n"),
        ({"messages": ASKED, "n": 10**9}, 400, "n"),
        ({"messages": ASKED, "max_tokens": 0}, 400, "max_tokens"),
        ({"messages": ASKED, "stop": [""]}, 400, "stop"),
        ({"messages": ASKED, "stream": "yes"}, 400, "stream"),
        ({"messages": ASKED, "logit_bias": {"5": 100}}, 400, "logit_bias"),
        ({"messages": ASKED, "tools": [{"type": "function"}]}, 400, "tools[0].function"),
        ({"messages": ASKED, "response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"messages": ASKED, "model": "another"}, 404, "model"),
        ({"messages": ASKED, "model": ["tiny"]}, 404, "model"),
        ({"messages": ASKED, "guided_regex": "a+"}, 400, "guided_regex"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "messages"),
    ],
)
def test_what_is_not_served_is_refused_in_the_words_of_the_api(served, body, code, field) -> None:
    got, told = post(served, body)
    assert (got, told["error"]["param"]) == (code, field)
    assert told["error"]["message"]
    assert post(served, {"messages": ASKED, "max_tokens": 2})[0] == 200, "and it goes on"


def test_a_prompt_beyond_the_context_has_the_code_that_clients_know(served) -> None:
    _, told = post(served, {"messages": [{"role": "user", "content": "x" * 5000}]})
    assert told["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "neutral",
    [
        {"frequency_penalty": 0, "tools": [], "tool_choice": None, "user": "me", "max_tokens": None},
        {"best_of": 1, "repetition_penalty": 1.0, "echo": False, "length_penalty": 1.0, "min_tokens": 0},
        {"best_of": 3, "n": 3, "suffix": None, "logit_bias": {}, "stop_token_ids": [], "ignore_eos": False},
        {"functions": [], "function_call": "auto", "chat_template_kwargs": {}, "skip_special_tokens": True},
        {"messages": [*ASKED, {"role": "assistant", "content": "5", "refusal": None, "audio": None,
                               "annotations": [], "function_call": None, "tool_calls": None}, *ASKED]},
    ],
)  # fmt: skip
def test_fields_that_ask_for_nothing_are_no_fault(neutral) -> None:
    asked = parse_question(json.dumps({"messages": ASKED} | neutral).encode())
    assert asked.count == neutral.get("n", 1)
    assert all(message.others == {} for message in asked.messages)


def test_a_top_p_of_nothing_draws_the_most_likely_token(served, alone) -> None:
    wanted = drawn(alone, temperature=0.0, max_new_tokens=12).text
    body = {"messages": ASKED, "max_tokens": 12, "top_p": 0, "seed": 1}
    assert post(served, body)[1]["choices"][0]["message"]["content"] == wanted


def test_fields_of_a_message_are_given_to_the_template(tiny) -> None:
    reasons = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content %}"
        "{{ 'so ' + m.reasoning_content + '. ' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    chat = Chat(AutoTokenizer.from_pretrained(tiny), template=reasons)
    said = {"role": "assistant", "content": "5", "reasoning_content": "2+3<|im_end|>"}
    messages = parse_question(json.dumps({"messages": [*ASKED, said, *ASKED]}).encode()).messages
    tokens = Speech.of(chat).prompt(messages, ())
    assert "so 2+3<|im_end|>. 5<|im_end|>" in chat.tokenizer.decode(tokens)
    assert tokens.count(chat.end()) == 3, "text of a field forges no end of a turn"
    other = replace(messages[1], others={"audio": {"id": "a"}})
    with pytest.raises(UserError, match=r"^messages\[3\]\.audio: ") as refused:
        Speech.of(chat).added(tokens, [*messages, other, messages[0]], 3, ())
    assert refused.value.key == "messages[3].audio"


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        ("plain", '<call add>{"a": 1</call>'),
        ("hermes", '{"name": "add", "arguments": "{\\"a\\": 1"}'),
        ("llama3", '{"name": "add", "parameters": "{\\"a\\": 1"}'),
        ("qwen_xml", '<function=add>\n{"a": 1\n</function>'),
        ("deepseek", '"{\\"a\\": 1"'),
    ],
)
def test_broken_arguments_of_earlier_calls_stay_as_text(tiny, form, shown) -> None:
    chat = Chat(AutoTokenizer.from_pretrained(tiny))
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1'}}
    result = {"role": "tool", "tool_call_id": "a", "content": "no JSON"}
    body = {"messages": [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, result]}
    messages = parse_question(json.dumps(body).encode()).messages
    assert shown in chat.tokenizer.decode(Speech.of(chat, form).prompt(messages, ()))


def test_a_page_of_another_site_a_foreign_path_and_a_flood_of_bytes_are_refused(served, monkeypatch) -> None:
    assert post(served, {"messages": ASKED}, Host="evil.example")[0] == 403
    with closing(http.client.HTTPConnection("127.0.0.1", served.port)) as wire:
        wire.request("GET", "/v1/models", headers={"Host": "evil.example"})
        assert wire.getresponse().status == 403
    assert post(served, {"messages": ASKED}, "/v1/completions")[0] == 404
    monkeypatch.setattr(serving, "MOST_BYTES", 100)
    assert post(served, {"messages": ASKED, "user": "x" * 200})[0] == 413
    monkeypatch.setattr(serving, "MOST_WAITING", 3)
    assert post(served, {"messages": ASKED, "n": 4})[0] == 503


@pytest.mark.parametrize("method", ["PUT", "OPTIONS", "DELETE", "HEAD"])
def test_a_method_that_is_not_served_is_refused_in_the_words_of_the_api(served, method) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", served.port)) as wire:
        wire.request(method, "/v1/chat/completions", b"{}")
        got = wire.getresponse()
        said = got.read()
    assert (got.status, got.headers["Allow"], got.headers["Connection"]) == (405, "POST", "close")
    if method == "HEAD":
        assert said == b""
    else:
        assert json.loads(said)["error"]["message"] == f"{method} is not served here"


def test_the_body_of_what_is_refused_is_no_request(served) -> None:
    inner = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: evil.example\r\nContent-Length: {len(inner)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port)) as wire, wire.makefile("rb") as answers:
        wire.sendall(head.encode() + inner)
        answers.readline()
        said = b""
        with suppress(ConnectionResetError):  # by a server that has not read all
            while more := answers.readline():
                said += more
    assert b"HTTP/1.1" not in said


def test_an_answer_does_not_wait_for_the_client_to_have_seen_its_beginning(served, monkeypatch) -> None:
    found, made = [], H11Protocol.connection_made

    def look(self: Any, transport: Any) -> None:
        made(self, transport)
        wire = transport.get_extra_info("socket")
        found.append(wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(H11Protocol, "connection_made", look)
    assert post(served, {"messages": ASKED, "max_tokens": 2})[0] == 200
    assert found[0]


def test_a_model_is_found_by_its_name_however_it_is_spelled(served, monkeypatch) -> None:
    monkeypatch.setattr(served.desk, "name", "a run/é")
    for name in ("a%20run/%C3%A9", "a%20run%2F%C3%A9"):
        with closing(http.client.HTTPConnection("127.0.0.1", served.port)) as wire:
            wire.request("GET", f"/v1/models/{name}")
            assert json.loads(wire.getresponse().read())["id"] == "a run/é"


def test_each_token_of_a_stream_is_news_once() -> None:
    asked = parse_question(json.dumps({"messages": ASKED, "stream": True}).encode())
    request = Request(prompt=(1,), sampling=Sampling(), seed=7)
    news: list[list[Any]] = [[], []]
    waits, late = (
        PendingAnswers(asked, [request], lambda n, told, each=each: each.append(told)) for each in news
    )
    tokens = list(range(20))

    class Drawing:
        drawn = 0

        def unanswered(self) -> list[tuple[int, Request]]:
            zeros = [0.0] * self.drawn
            columns = {"logp_gen": zeros, "logp_policy": zeros, "version": [0] * self.drawn}
            begun = Completion(tokens=tokens[: self.drawn], text="", stop="", **columns)
            return [(5, replace(request, begun=begun))]

    engine = Drawing()
    for engine.drawn in (1, 2, 2, 5, 20):
        stream(engine, {5: [(waits, 0)] + [(late, 0)] * (engine.drawn > 2)})
    for told, pieces in zip(news, ([1, 1, 3, 15], [5, 15]), strict=True):
        assert [len(each) for each in told] == pieces
        assert [token for each in told for token in each] == tokens


@pytest.mark.parametrize("given", ['{"x":NaN}', '{"x":1e999}', '{"x":-Infinity}', {"x": float("inf")}])
def test_arguments_that_are_no_json_stay_as_they_stand(given) -> None:
    assert canonical_json(given) == str(given)


@pytest.mark.parametrize(
    "form",
    [{}, {"stream": True}, {"stream": True, "tools": [{"function": {"name": "add"}}]}],
    ids=["whole", "stream", "tools"],
)
def test_who_goes_away_takes_the_answer_along_and_nobody_elses(served, form) -> None:
    """The engine is left with nothing to do: answers that nobody waits for are not drawn to their end.

    Of a stream with tools, nothing is told before its end.
    """
    body = {"messages": ASKED, "max_tokens": 60, "seed": 5}
    wanted = post(served, body)[1]["choices"]
    long = {"messages": ASKED, "n": 100, "stop": "\u2603"} | form
    sent = json.dumps(long).encode()
    gone = socket.create_connection(("127.0.0.1", served.port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}\r\n\r\n"
    gone.sendall(head.encode() + sent)
    while not served.desk.stepper.waiting:
        time.sleep(0.01)
    gone.close()
    assert post(served, body)[1]["choices"] == wanted
    while served.desk.stepper.waiting:
        time.sleep(0.01)
    assert not served.desk.stepper.engine.busy


def test_an_engine_that_fails_is_told_to_who_waits_and_to_who_comes_later(tiny, monkeypatch) -> None:
    with serving_of(tiny) as server:

        def poll(timeout_s: float = 0.0) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(server.desk.stepper.engine, "poll", poll)
        for _ in range(2):
            code, told = post(server, {"messages": ASKED})
            assert (code, told["error"]["message"]) == (503, "the engine failed: out of memory")


def test_a_growing_text_holds_back_what_may_yet_change() -> None:
    """Characters of several tokens, and strings that may end it."""
    bytes_of = {0: b"a", 1: b"\xe2", 2: b"\x98", 3: b"\x83", 4: b"<", 5: b"/s", 6: b"b"}

    def decode(tokens: list[int]) -> str:
        return b"".join(bytes_of[t] for t in tokens).decode("utf-8", "replace")

    growing = StreamedText(decode, ["</s>"])
    tokens = [0, 1, 2, 3, 4, 6, 0, 0, 4, 5]
    said = [growing.more([token]) for token in tokens]
    assert "".join(said) == "a☃<baa"
    assert all("\ufffd" not in each for each in said)
    assert growing.rest("a☃<baa") == ""


def test_the_client_of_the_api_is_answered(served, alone) -> None:
    openai = pytest.importorskip(
        "openai", reason="the client of the API is not installed: pip install openai"
    )
    with openai.OpenAI(base_url=served.address, api_key="any", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "tiny", "messages": ASKED, "max_tokens": 12, "seed": 7}
        whole = client.chat.completions.create(**asked).choices[0].message.content
        assert whole == drawn(alone, max_new_tokens=12).text
        parts = [
            c.choices[0].delta.content or "" for c in client.chat.completions.create(**asked, stream=True)
        ]
        assert "".join(parts) == whole
        assert [model.id for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            client.chat.completions.create(**asked, logit_bias={"5": 1})


def test_a_port_that_is_taken_is_one_line(served, run_cli, tiny) -> None:
    said = run_cli("serve", tiny, "--port", served.port)
    assert said.code == 2
    assert "is not available" in said.err


def test_it_is_served_until_it_is_interrupted(tiny, tmp_path) -> None:
    words = [sys.executable, "-m", "posttrain", "serve", str(tiny), "--port", "0", "--name", "mine"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    host, port = line.split("http://")[1].split("/")[0].split(":")
    with closing(http.client.HTTPConnection(host, int(port))) as wire:
        wire.request("GET", "/v1/models")
        assert json.loads(wire.getresponse().read())["data"][0]["id"] == "mine"
        wire.request(
            "POST", "/v1/chat/completions", json.dumps({"messages": ASKED, "n": 100, "stream": True})
        )
        waits = wire.getresponse()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        assert b"the server ends" in waits.read().splitlines()[-2], "who waits is told so"
    assert (process.returncode, err) == (0, "")
    assert "no longer serving" in out


def test_a_refusal_says_its_field() -> None:
    with pytest.raises(RefusedError, match="integer") as found:
        parse_question(json.dumps({"messages": ASKED, "n": 2.5}).encode())
    assert found.value.body()["error"]["param"] == "n"


def test_template_args_of_a_request_are_variables_of_the_template(tiny) -> None:
    thinks = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% if enable_thinking is false %}{{ '<think></think>' }}{% endif %}{% endif %}"
    )
    chat = Chat(AutoTokenizer.from_pretrained(tiny), template=thinks)
    speech = Speech.of(chat)
    body = {"messages": ASKED, "chat_template_kwargs": {"enable_thinking": False}}
    question = parse_question(json.dumps(body).encode())
    silent = speech.with_template_args(question.template_args)
    plain, changed = (chat.tokenizer.decode(s.prompt(question.messages, ())) for s in (speech, silent))
    assert changed == plain + "<think></think>"
    for name in ("enable_thinkin", "messages"):
        with pytest.raises(UserError, match="has no variable"):
            speech.with_template_args({name: True})


def test_the_likeliest_tokens_come_with_each_token(served, alone) -> None:
    body = {"messages": ASKED, "max_tokens": 8, "seed": 7, "logprobs": True, "temperature": 0.7}
    _, plain = post(served, body)
    _, told = post(served, body | {"top_logprobs": 3})
    assert told["choices"][0]["message"] == plain["choices"][0]["message"]
    policy, engine = alone
    before = policy.chat.render(ASKED)
    tokens = drawn(alone, max_new_tokens=8, temperature=0.7).tokens
    entries = told["choices"][0]["logprobs"]["content"]
    assert len(entries) == len(tokens)
    for t, entry in enumerate(entries):
        [logits] = engine.first([(*before, *tokens[:t])])
        wanted = (logits / 0.7).log_softmax(-1).topk(3)
        pieces = [policy.chat.pieces([token])[0] for token in wanted.indices.tolist()]
        assert [each["token"] for each in entry["top_logprobs"]] == pieces
        assert [e["logprob"] for e in entry["top_logprobs"]] == pytest.approx(
            wanted.values.tolist(), abs=1e-4
        )
        assert entry["logprob"] <= entry["top_logprobs"][0]["logprob"] + 1e-6
    assert post(served, {"messages": ASKED, "top_logprobs": 3})[1]["error"]["param"] == "top_logprobs"


def test_what_drew_in_a_run_is_not_what_answers_for_it(tiny) -> None:
    """A recipe that names a vLLM server is sampled from by the native engine, unless told otherwise."""
    recipe, _ = recipe_of(str(tiny), print)
    engine = EngineChoice(name="vllm", url="http://127.0.0.1:9")
    assert isinstance(load_policy(replace(recipe, engine=engine), None, print)[1], NativeEngine)
