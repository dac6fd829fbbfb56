"""Several models behind one address, and the log of what the reader of their page thinks of the answers."""

import http.client
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.api.answering import load_policy
from posttrain.commands.serve import _adapted
from posttrain.data.gather import Data
from posttrain.data.rankings import load_labelled, load_rankings
from posttrain.learner import lora
from posttrain.plan.model_info import NO_TASK
from posttrain.recipe.recipe import Model, Recipe
from posttrain.serving import server as serving
from posttrain.serving.feedback import FeedbackLog, chat_page
from posttrain.serving.server import ChatServer, ModelDesk, ModelsDesk

ASKED = [{"role": "user", "content": "2+3"}]
NAMES = ("base", "one", "two")


@pytest.fixture(scope="module")
def adapters(tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters that change the answers."""
    folders = {}
    for seed, name in enumerate(("one", "two")):
        model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
        adapted = lora.add_adapter(model, lora.Lora(rank=2), seed)
        generator = torch.Generator().manual_seed(seed)
        for key, weight in adapted.named_parameters():
            if "lora_B" in key:
                weight.data.normal_(0.0, 0.3, generator=generator)
        folders[name] = tmp_path_factory.mktemp("adapters") / name
        lora.save_adapter(adapted, folders[name])
    return folders


def desk_of(tiny: Path, adapter: Path | None, name: str) -> ModelDesk:
    recipe = Recipe(
        model=Model(path=str(tiny), dtype="float32", device="cpu"), method={"name": "grpo"}, task=NO_TASK
    )
    if adapter is not None:
        recipe, adapter = _adapted(recipe, str(adapter))
    policy, engine = load_policy(recipe, adapter, lambda text: None)
    return ModelDesk(engine, policy.chat, name=name, context=policy.context)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> FeedbackLog:
    return FeedbackLog(tmp_path_factory.mktemp("log") / "seen.jsonl")


@pytest.fixture(scope="module")
def several(tiny, adapters, log) -> Iterator[ChatServer]:
    desk = ModelsDesk([desk_of(tiny, adapters.get(name), name) for name in NAMES], log)
    with closing(ChatServer(desk)) as server, closing(desk):
        yield server


def ask(server: ChatServer, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as wire:
        sent = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | headers
        wire.request("GET" if body is None else "POST", path, sent, headers)
        answer = wire.getresponse()
        text = answer.read().decode()
        return answer.status, text if path == "/" else json.loads(text)


def test_the_model_of_a_request_answers_as_when_it_is_served_alone(tiny, adapters, several) -> None:
    body = {"messages": ASKED, "max_tokens": 24, "seed": 5, "logprobs": True}
    together = [ask(several, "/v1/chat/completions", body | {"model": name})[1] for name in NAMES]
    answers = []
    for name, told in zip(NAMES, together, strict=True):
        desk = desk_of(tiny, adapters.get(name), name)
        with closing(ChatServer(desk)) as server, closing(desk):
            alone = ask(server, "/v1/chat/completions", body)[1]
        assert told["choices"] == alone["choices"], name
        assert told["model"] == name
        answers.append(told["choices"][0]["message"]["content"])
    assert len(set(answers)) == 3, "each adapter changes the answer"
    assert ask(several, "/v1/chat/completions", body)[1]["choices"] == together[0]["choices"], "the first"


def test_models_are_listed_and_an_unknown_name_is_404(several) -> None:
    assert [model["id"] for model in ask(several, "/v1/models")[1]["data"]] == list(NAMES)
    assert ask(several, "/v1/models/two")[1]["id"] == "two"
    for name in ("three", ["base"], 7):
        status, told = ask(several, "/v1/chat/completions", {"messages": ASKED, "model": name})
        assert (status, told["error"]["code"], told["error"]["param"]) == (404, "model_not_found", "model")
    assert ask(several, "/v1/models/three")[0] == 404


def test_feedback_is_read_by_the_loaders_as_it_stands(several, log, write, tiny, run_cli) -> None:
    prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+3\u2028?"}]
    label = {"prompt": prompt, "completion": "5", "label": True, "model": "one"}
    pair = {
        "prompt": prompt,
        "chosen": "5",
        "rejected": "six",
        "chosen_model": "one",
        "rejected_model": "two",
    }
    log.labels.write_text('{"prompt": "cut", "completion": "x", "label": false}')  # as a kill leaves it
    for line in (label, label | {"completion": "6", "label": False}, pair):
        assert ask(several, "/feedback", line) == (200, {"kept": True})
    labelled = load_labelled(Data(path=str(log.labels)))
    assert [(r.answers, r.scores) for r in labelled[1:]] == [(("5",), (1.0,)), (("6",), (0.0,))]
    [ranking] = load_rankings(Data(path=str(log.pairs)))
    assert (list(ranking.messages), ranking.answers) == (prompt, ("5", "six"))
    before = log.labels.read_bytes(), log.pairs.read_bytes()
    for bad in (
        label | {"completion": " "},
        pair | {"rejected": "5 "},
        label | {"prompt": []},
        label | {"prompt": [*prompt, {"role": "assistant", "content": "5"}]},
        label | {"prompt": [*prompt, prompt[0], prompt[1]]},
        {"prompt": prompt, "label": True},
    ):
        assert ask(several, "/feedback", bad)[0] == 400, bad
    assert ask(several, "/feedback", label, **{"Content-Type": "text/plain"})[0] == 415, "another site's form"
    assert ask(several, "/feedback", label, Host="evil.example")[0] == 403
    assert (log.labels.read_bytes(), log.pairs.read_bytes()) == before


@pytest.mark.parametrize(("method", "file"), [("kto", "labels"), ("dpo", "pairs"), ("reward", "pairs")])
def test_a_log_is_data_of_a_recipe(tmp_path: Path, method: str, file: str, tiny, run_cli) -> None:
    log = FeedbackLog(tmp_path / "seen.jsonl")
    for n in range(4):
        prompt = [{"role": "user", "content": f"{n}+1"}]
        log.append(feedback({"prompt": prompt, "completion": str(n + 1), "label": n % 2 == 0}))
        log.append(feedback({"prompt": prompt, "chosen": str(n + 1), "rejected": "0"}))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[model]\npath = "{tiny}"\ndevice = "cpu"\n[method]\nname = "{method}"\n[task.data]\n'
        f'path = "{getattr(log, file)}"\n[batch]\nbatch_size = 2\n[eval]\nlimit = 0\n[run]\nupdates = 1\n'
    )
    said = run_cli("validate", recipe)
    assert said.code == 0, said.err


def feedback(body: dict[str, Any]) -> Any:
    from posttrain.serving.wire import parse_feedback

    return parse_feedback(json.dumps(body).encode())


def test_names_of_models_are_data_of_the_page(several) -> None:
    status, page = ask(several, "/")
    assert (status, "connect-src 'self'" in page) == (200, True)
    page = chat_page(["</script><b>", "b"], logs=True)
    assert "</script><b>" not in page
    assert "<title>Chat with &lt;/script&gt;&lt;b&gt;, b" in page


def test_mistakes_of_adapters_are_one_line(tiny, tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    for words, key in (
        (("--adapter", "one"), "--adapter one"),
        (("--adapter", f"{tiny.name}={tiny}"), "already the name"),
        (("--log", tmp_path), "--log"),
    ):
        said = run_cli("serve", tiny, "--port", "0", *words)
        assert (said.code, len(said.err.splitlines())) == (2, 1), said.err
        assert key in said.err


@pytest.mark.full
def test_the_command_serves_a_model_and_an_adapter(tiny, adapters) -> None:
    words = [
        sys.executable,
        "-m",
        "posttrain",
        "serve",
        str(tiny),
        "--port",
        "0",
        "--adapter",
        f"new={adapters['one']}",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.match(r"http://127\.0\.0\.1:(\d+)/v1 serves ", process.stdout.readline())
        assert found
        with closing(http.client.HTTPConnection("127.0.0.1", int(found[1]))) as wire:
            wire.request("GET", "/v1/models")
            names = [model["id"] for model in json.loads(wire.getresponse().read())["data"]]
        process.terminate()
        process.communicate()
    assert names == [tiny.name, "new"]
    assert process.returncode == 0


USER = """<script>
(async () => {
  const until = async (ready) => { while (!ready()) await new Promise((r) => setTimeout(r, 20)); };
  const all = (selector) => [...document.querySelectorAll(selector)];
  const key = (node, name) =>
    node.dispatchEvent(new KeyboardEvent('keydown', { key: name, bubbles: true, cancelable: true }));
  const report = {};
  const question = document.getElementById('question');
  report.focused = document.activeElement === question;
  document.getElementById('max_tokens').value = '6';
  document.getElementById('seed').value = '3';
  question.value = '<b>2+3</b>';
  key(question, 'Enter');
  await until(() => document.documentElement.dataset.answers === '2');
  await until(() => !document.getElementById('send').disabled);
  report.asked = all('.asked').map((node) => node.innerHTML);
  report.texts = all('.answers .tokens').map((node) => node.textContent);
  const token = document.querySelector('.tok');
  token.focus();
  report.tip = document.getElementById('tip').textContent;
  key(token, 'ArrowRight');
  report.moved = document.activeElement.dataset.t;
  document.querySelector('.up').click();
  document.querySelectorAll('.down')[1].click();
  document.querySelectorAll('.verdicts button')[1].click();
  await until(() => all('[aria-pressed=true]').length === 3);
  question.value = 'again';
  key(question, 'Enter');
  await until(() => document.documentElement.dataset.answers === '2 2');
  document.documentElement.dataset.answer = JSON.stringify(report);
})();
</script></body>"""


@pytest.mark.full
def test_the_page_is_used_by_keyboard_and_keeps_what_its_reader_thinks(
    several, log, tmp_path: Path, chromium, monkeypatch
) -> None:
    def page(*args: Any, **options: Any) -> str:
        content = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", chat_page(*args, **options))
        return content.replace("</body>", USER)

    monkeypatch.setattr(serving, "chat_page", page)
    for file in (log.labels, log.pairs):
        file.write_text("")
    dom = chromium(tmp_path / "profile", "--dump-dom", f"http://127.0.0.1:{several.port}/")
    root = re.search(r"<html[^>]*>", dom)
    assert root
    told = {name: unescape(value) for name, value in re.findall(r'data-([\w-]+)="([^"]*)"', root[0])}
    assert "error" not in told, told["error"]
    report = json.loads(told["answer"])
    assert report["focused"]
    assert report["asked"] == ["&lt;b&gt;2+3&lt;/b&gt;"]
    assert "%" in report["tip"]
    assert report["moved"] == "1"
    labels = sorted(map(json.loads, log.labels.read_text().splitlines()), key=lambda line: line["model"])
    [pair] = [json.loads(line) for line in log.pairs.read_text().splitlines()]
    assert [(line["model"], line["label"]) for line in labels] == [("base", True), ("one", False)]
    assert (pair["chosen_model"], pair["rejected_model"]) == ("one", "base")
    body = {"messages": pair["prompt"], "seed": 3, "max_tokens": 6, "model": "one"}
    answer = ask(several, "/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]
    assert pair["chosen"] == answer == labels[1]["completion"]


@pytest.mark.full
def test_a_rating_that_was_not_kept_can_be_given_again(several, log, browser: Any, monkeypatch) -> None:
    log.labels.write_text("")
    browser.open(f"http://127.0.0.1:{several.port}/")
    browser.value("document.getElementById('max_tokens').value = '4'")
    for character in "hi":
        browser.key(character)
    browser.key("Enter")
    browser.wait("document.querySelector('.up')?.disabled === false")
    with monkeypatch.context() as broken:
        broken.setattr(log, "append", lambda feedback: log.labels.joinpath("below").open())
        browser.value("document.querySelector('.up').click()")
        browser.wait("document.getElementById('problem').textContent")
    browser.wait("document.querySelector('.up').disabled === false")
    browser.value("document.querySelector('.up').click()")
    browser.wait("document.querySelector('.up').getAttribute('aria-pressed') === 'true'")
    assert len(log.labels.read_text().splitlines()) == 1
    assert browser.value("document.documentElement.dataset.error ?? null") is None


# ---------------------------------------------------------------------- tokens instead of messages


def test_a_prompt_of_tokens_is_told_its_probabilities_and_continued(several, tiny) -> None:
    """By a plain forward pass of transformers, at temperature 1."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    prompt = [1, 17, 23, 5, 40, 23, 9]
    logp = model(torch.tensor([prompt])).logits[0].detach().log_softmax(-1)
    body = {"model": "base", "prompt": prompt, "prompt_logprobs": 5, "max_tokens": 3, "temperature": 0}
    code, found = ask(several, "/v1/completions", body)
    assert code == 200
    [choice] = found["choices"]
    nothing, *known = choice["prompt_logprobs"]
    assert nothing is None
    assert len(known) == len(prompt) - 1
    for n, entries in enumerate(known):
        values = {int(token): entry["logprob"] for token, entry in entries.items()}
        assert set(logp[n].topk(5).indices.tolist()) | {prompt[n + 1]} == set(values)
        for token, value in values.items():
            assert value == pytest.approx(float(logp[n, token]), abs=1e-4)
    drawn = list(prompt)
    for _ in range(3):
        drawn.append(int(model(torch.tensor([drawn])).logits[0, -1].argmax()))
    chat = several.desk.speech.chat
    assert choice["text"] == chat.tokenizer.decode(drawn[len(prompt) :])
    assert found["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


def test_a_text_is_tokenized_without_what_templates_add(several) -> None:
    code, found = ask(several, "/tokenize", {"prompt": "2+3=", "add_special_tokens": False})
    assert code == 200
    assert found["tokens"] == several.desk.speech.chat.spell("2+3=")
    assert found["count"] == 4
    assert found["max_model_len"] == 512


def test_values_without_effect_are_taken_beside_tokens(several) -> None:
    plain = {"model": "base", "prompt": [1, 17, 23], "max_tokens": 3, "seed": 2}
    neutral = {"n": 1, "best_of": 1, "top_p": 1, "top_k": -1, "min_p": 0, "stop": [], "echo": False}
    texts = [ask(several, "/v1/completions", body)[1]["choices"] for body in (plain, plain | neutral)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "text"}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, -2]}, "prompt[1]"),
        ({"prompt": [1], "prompt_logprobs": 1}, "prompt"),
        ({"prompt": [1, 2], "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt": [1, 2], "max_tokens": 0}, "max_tokens"),
        ({"prompt": [1, 2], "echo": True}, "echo"),
        ({"prompt": [1, 2], "stream": True}, "stream"),
        ({"prompt": [1] * 513}, "prompt"),
        ({"prompt": [1, 9999]}, "prompt"),
        ({"prompt": [1, 2], "top_p": 0.9}, "top_p"),
        ({"prompt": [1, 2], "n": 2}, "n"),
        ({"prompt": [1, 2], "model": "unknown"}, "model"),
    ],
)
def test_a_prompt_of_tokens_that_cannot_be_served_is_refused(several, body, field) -> None:
    code, found = ask(several, "/v1/completions", body)
    assert code == (404 if field == "model" else 400)
    assert found["error"]["param"] == field
