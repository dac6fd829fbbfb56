"""A tiny Llama with a tokenizer of its own, recipes over it, and the command line in this process."""

import base64
import contextlib
import fcntl
import fnmatch
import gc
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from posttrain import cli
from posttrain.base.toml import dump
from posttrain.learner import varlen
from posttrain.learner.varlen import SpanKeys
from posttrain.models.loading import quiet
from posttrain.models.pretrained import save_pretrained

settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")  # a test may take as long as the machine needs

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background work so, and the commands that tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

collect_ignore = [
    *("posttrain_envs/openenv_server.py", "posttrain_envs/verifiers_taskset.py", "envs/mcp_http_server.py")
]
"""Programs that tests start, with libraries that are not here or take long to import."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>")
LETTERS = "\n" + "".join(chr(c) for c in range(32, 127))
"""One token each: digits, letters and signs."""
TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

LONGEST = (
    "verifiers/test_workers_torture.py",
    "api/test_api.py",
    "loop/test_resume.py",
    "loop/test_ranks_runs.py",
    "learner/test_learner_splits.py",
    "loop/test_asynchrony.py",
    "learner/test_ranks.py",
    "report/test_browser.py",
    "loop/test_sampler_failures.py",
    "pipeline/test_pipeline.py",
    "verifiers/test_code_adversarial.py",
)
"""Files that take a minute: they begin first, so that no worker has one alone at the end."""

SHAPES = (
    *("src/", "tests/math/", "tests/engines/test_native_draw.py", "tests/methods/test_methods_gradients.py"),
    *("tests/methods/test_methods_filters.py", "tests/methods/test_methods_turns.py"),
    *("tests/methods/test_methods_promises.py::test_every_method_learns_something_from_this_update",),
    *("tests/methods/test_methods_promises.py::test_what_is_watched_reads_no_garbage_either",),
    *("tests/learner/test_learner_splits.py::test_garbage_in_masked_slots_changes_no_bit",),
    *("tests/learner/test_learner_critic.py", "tests/learner/test_learner_filters.py"),
    *("tests/learner/test_learner_evolution.py", "tests/learner/test_learner_trust_region.py"),
)
"""Tests in which `make test` checks the shapes of the mathematics' arguments: of every function, and of every
method's through the learner. To check them takes five times what the functions take."""

Tables = dict[str, Any]
MakeModel = Callable[..., Path]
Write = Callable[..., Path]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Leave what is imported and collected, millions of objects, to no garbage collection, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Iterator[object]:
    """Look for no doctests in the tests: those are in src."""
    collectors: list[pytest.Collector] = yield
    return [each for each in collectors if not isinstance(each, DoctestModule)]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check shapes in the tests of SHAPES; without `-m "not full"`, in all."""
    checked = "not full" not in item.config.getoption("markexpr") or item.nodeid.startswith(SHAPES)
    jaxtyping.config.update("jaxtyping_disable", not checked)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, and mark as `full` what a parametrised test leaves out of its `sample`.

    Raises UsageError for a pattern that matches none of a test's ids: it would quietly sample nothing.
    """
    items.sort(key=lambda item: not item.nodeid.split("::")[0].endswith(LONGEST))
    sampled: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sample"):
            sampled.setdefault(item.nodeid.split("[")[0], []).append(item)
    for name, variants in sampled.items():
        mark = variants[0].get_closest_marker("sample")
        assert mark is not None
        ids = [item.callspec.id for item in variants]
        every = mark.kwargs.get("every")
        kept = set(ids[::every]) if every else {i for p in mark.args for i in fnmatch.filter(ids, p)}
        unmatched = [p for p in mark.args if not fnmatch.filter(ids, p)]
        if unmatched and len(ids) > len(kept):
            raise pytest.UsageError(f"{name}: no variant is called {', '.join(unmatched)}")
        for item in variants:
            if item.callspec.id not in kept:
                item.add_marker("full")


@pytest.fixture(scope="session", autouse=True)
def no_fsync() -> Iterator[None]:
    """Wait for no disk in this process: its power is not cut, and a killed process loses nothing written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@dataclass(frozen=True)
class Said:
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its last line of standard output, as JSON."""
        return json.loads(self.out.splitlines()[-1])


def tiny_tokenizer(**special: Any) -> PreTrainedTokenizerFast:
    """One token a character of ASCII, and ChatML's marks."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *LETTERS))}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    plain.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    plain.decoder = decoders.Fuse()
    marks = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": "<unk>"} | special
    made = PreTrainedTokenizerFast(tokenizer_object=plain, **marks)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """make_model(tied=..., **shape) -> a directory with a random Llama of about 50 000 parameters."""

    def make(*, tied: bool = False, seed: int = 0, **shape: Any) -> Path:
        sizes = {
            "vocab_size": len(SPECIAL) + len(LETTERS),
            "hidden_size": 32,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "tie_word_embeddings": tied,
        }
        torch.manual_seed(seed)
        with quiet():
            model = LlamaForCausalLM(LlamaConfig(**sizes | shape))
        out = tmp_path_factory.mktemp("model")
        save_pretrained(model, tiny_tokenizer(), out)
        return out

    return make


@pytest.fixture(scope="session")
def tiny(make_model: MakeModel) -> Path:
    """The directory of the model that most tests train; they leave it as it is."""
    return make_model()


@pytest.fixture(scope="session")
def able(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt to answer sums with one digit, not always the right one."""
    place = tmp_path_factory.mktemp("able")
    sums = {"low": 2, "high": 4, "held_out": 2, "template": "{a}+{b}="}
    tables = {
        "model": {"path": str(tiny), "dtype": "float32", "device": "cpu"},
        "method": {"name": "sft"},
        "task": {"arithmetic": sums},
        "optim": {"lr": 0.01},
        "run": {"updates": 25, "threads": 1},
        "batch": {"batch_size": 7},
    }
    (place / "recipe.toml").write_text(dump(tables))
    words = ["train", str(place / "recipe.toml"), "--run-dir", str(place / "run"), "--quiet"]
    with contextlib.redirect_stdout(io.StringIO()):
        code = cli.run(words)
    assert code == 0
    return place / "run" / "checkpoints" / "step_000025" / "model"


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tables:
    """The tables of `base` with those of `over` in them; None takes a key out."""
    out = dict(base)
    for key, value in over.items():
        if value is None:
            out.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(out.get(key), Mapping):
            out[key] = merged(out[key], value)
        else:
            out[key] = value
    return out


@pytest.fixture
def online(tiny: Path) -> Tables:
    """A small recipe of the online loop: sums of two digits, four updates of 3 × 4 episodes."""
    return {
        "model": {"path": str(tiny), "dtype": "float32", "device": "cpu"},
        "method": {"name": "grpo"},
        "task": {"arithmetic": {"low": 2, "high": 9, "held_out": 6, "template": "{a}+{b}="}},
        "verifier": {"number": {"where": "last"}},
        "sampling": {"max_new_tokens": 3},
        "rollout": {"groups": 3, "group_size": 4},
        "optim": {"lr": 0.003},
        "run": {"updates": 4, "threads": 1},
        "checkpoint": {"every": 1},
    }


@pytest.fixture
def offline(online: Tables) -> Tables:
    """The same sums for the offline loop."""
    without = {"verifier": None, "sampling": None, "rollout": None}
    return merged(online, without | {"method": {"name": "sft"}, "batch": {"batch_size": 8}})


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(tables, over, name=...) -> a recipe file of these tables with those of `over` in them."""

    def make(tables: Mapping[str, Any], over: Mapping[str, Any] | None = None, name: str = "recipe") -> Path:
        path = tmp_path / f"{name}.toml"
        path.write_text(dump(merged(tables, over or {})))
        return path

    return make


@pytest.fixture
def recorded(online: Tables, tmp_path: Path) -> Callable[..., Path]:
    """recorded(over, file=[row, ...]) -> a run of `online` with `over` in it, with these files of samples.

    A row is (task, text of the answer, other keys of the line).
    """

    def make(over: Mapping[str, Any], **files: list[tuple[str, str, Mapping[str, Any]]]) -> Path:
        run = tmp_path / "run"
        (run / "samples").mkdir(parents=True)
        (run / "config.toml").write_text(dump(merged(online, over)))
        for stem, rows in files.items():
            lines = []
            for number, (task, text, others) in enumerate(rows):
                line = {"task": task, "group": number, "sample": 0, "prompt": "?", "turns": 1}
                line |= {"pieces": [text, "<|im_end|>"], "sampled": [True, True], "stop": "eos"}
                lines.append(json.dumps(line | {"label": "right", "score": 1.0, **others}) + "\n")
            (run / "samples" / f"{stem.replace('update_', '')}.jsonl").write_text("".join(lines))
        return run

    return make


@pytest.fixture
def run_cli(capfd: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """run_cli("train", recipe, ...) -> what the command line does with these words, in this process."""

    def call(*words: object) -> Said:
        capfd.readouterr()
        code = cli.run([str(w) for w in words])
        captured = capfd.readouterr()
        return Said(code, captured.out, captured.err)

    return call


def chromium_program() -> str:
    """Return the path of Chromium; without one the test is skipped."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip(
            "NO CHROMIUM ON PATH: a page is not checked as its reader sees it. "
            "Install it with: apt-get install --no-install-recommends chromium fonts-dejavu"
        )
    return program


@pytest.fixture(scope="session")
def chromium() -> Callable[..., str]:
    """chromium(profile, *arguments) -> what headless Chromium prints. Without one the test is skipped."""
    program = chromium_program()
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    flags += ["--hide-scrollbars", "--no-first-run", "--disable-background-networking"]
    flags += ["--virtual-time-budget=3000"]

    def run(profile: Path, *arguments: str) -> str:
        command = [program, *flags, f"--user-data-dir={profile}", *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", timeout=120, check=True
        )
        return done.stdout

    return run


KEY_CODES = {
    "Enter": 13,
    "Tab": 9,
    " ": 32,
    "Backspace": 8,
    "ArrowLeft": 37,
    "ArrowRight": 39,
    "ArrowUp": 38,
    "ArrowDown": 40,
}
START = (
    "import os, sys; r, w = map(int, sys.argv[1:3]); os.dup2(r, 3); os.dup2(w, 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)
"""Chromium reads commands from descriptor 3 and writes to 4."""
DRAWN = "'done' in (document.body?.dataset ?? {}) || document.documentElement?.dataset.ready"
ENDED = "['ready', 'error', 'answer'].some((name) => name in (document.documentElement?.dataset ?? {}))"


class Browser:
    """Headless Chromium, driven over the DevTools protocol through a pipe; one page at a time."""

    def __init__(self, program: str, profile: Path) -> None:
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for pair in (os.pipe(), os.pipe()) for end in pair]
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ]
        flags += ["--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={profile}"]
        command = [sys.executable, "-c", START, str(ends[0]), str(ends[3]), program]
        self.process = subprocess.Popen(
            [*command, *flags, "--remote-debugging-pipe", "about:blank"],
            pass_fds=(ends[0], ends[3]),
            stderr=subprocess.DEVNULL,
        )
        os.close(ends[0])
        os.close(ends[3])
        self.reader, self.writer = os.fdopen(ends[2], "rb"), os.fdopen(ends[1], "wb", buffering=0)
        self.count, self.session, self.context, self.pending = 0, "", "", b""

    def renew(self) -> None:
        """Leave the page, and begin one in a profile of its own: nothing of another test is in it."""
        self.session = ""
        if self.context:
            self.call("Target.disposeBrowserContext", browserContextId=self.context)
        self.context = self.call("Target.createBrowserContext")["browserContextId"]
        page = self.call("Target.createTarget", url="about:blank", browserContextId=self.context)
        self.session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)[
            "sessionId"
        ]
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        self.writer.write(json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.pending:
                chunk = os.read(self.reader.fileno(), 1 << 16)
                assert chunk, "the browser ended"
                self.pending += chunk
            line, _, self.pending = self.pending.partition(b"\0")
            reply = json.loads(line)
            if reply.get("id") == self.count:
                assert "error" not in reply, reply
                return dict(reply["result"])

    def value(self, expression: str) -> Any:
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def wait(self, expression: str) -> Any:
        end = time.monotonic() + 60.0
        while not (value := self.value(expression)):
            assert time.monotonic() < end, expression
            time.sleep(0.01)
        return value

    def open(
        self, url: str, width: int = 1280, height: int = 800, scheme: str = "light", until: str = DRAWN
    ) -> None:
        """Open a page, and wait until this holds: it says in `data-done` or `data-ready` that it is drawn."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)
        self.wait(until)

    def key(self, name: str) -> None:
        """Press and release a key, as a keyboard does."""
        press = {"key": name, "windowsVirtualKeyCode": KEY_CODES.get(name, ord(name[0].upper()))}
        text = {"text": "\r" if name == "Enter" else name} if len(name) == 1 or name == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **press, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **press)

    def picture(self, out: Path) -> None:
        out.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self.writer.close()
        self.process.kill()
        self.process.wait()
        self.reader.close()


@pytest.fixture(scope="module")
def started_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Chromium without a page, started once a file."""
    started = Browser(chromium_program(), tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture
def browser(started_browser: Browser) -> Browser:
    """A page of Chromium; without one the test is skipped."""
    started_browser.renew()
    return started_browser


@pytest.fixture
def dom(started_browser: Browser) -> Callable[[str], str]:
    """dom(url) -> the document once a script of the page has said what it came to, and the page is loaded."""

    def read(url: str) -> str:
        if not started_browser.session:
            started_browser.renew()
        started_browser.open("about:blank", until="true")  # else another fragment would load nothing
        started_browser.open(url, until=f"document.readyState === 'complete' && {ENDED}")
        return str(started_browser.value("document.documentElement.outerHTML"))

    return read


# ---------------------------------------------------------------------- flash attention by loops


@pytest.fixture
def attend_by_spans(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """attend_by_spans() makes packs attend as on a GPU, by loops in place of its kernels."""

    def install() -> None:
        monkeypatch.setattr("posttrain.learner.packed_attention.suits", lambda *heads: False)
        monkeypatch.setattr(varlen, "suits", lambda query, value, softcap: softcap is None)
        monkeypatch.setattr(varlen, "flash_forward", flash_forward)
        monkeypatch.setattr(varlen, "flash_backward", flash_backward)

    return install


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: SpanKeys,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A masked softmax for each span and head; scores and sums in float32 or wider, as the kernel's are."""
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, value))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    for queries, keys, head, shared in products(spans, q, k):
        scores = scale * q[queries, head] @ k[keys, shared].T + mask(queries, keys, window, q)
        lse[head, queries] = scores.logsumexp(-1)
        out[queries, head] = scores.softmax(-1) @ v[keys, shared]
    return out.to(query), lse, torch.zeros(2)


def flash_backward(
    grad: torch.Tensor, saved: Sequence[torch.Tensor], spans: SpanKeys, scale: float, window: int | None
) -> tuple[torch.Tensor, ...]:
    """The gradients by hand, from o and lse as they are given."""
    tensors = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in (grad, *saved[:5])]
    do, q, k, v, out, lse = tensors
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for queries, keys, head, shared in products(spans, q, k):
        rows, columns = (queries, head), (keys, shared)
        scores = scale * q[rows] @ k[columns].T + mask(queries, keys, window, q)
        P = (scores - lse[head, queries, None]).exp()
        dS = P * (do[rows] @ v[columns].T - (do[rows] * out[rows]).sum(-1, keepdim=True))
        dq[rows] += scale * dS @ k[columns]
        dk[columns] += scale * dS.T @ q[rows]
        dv[columns] += P.T @ do[rows]
    return tuple(x.to(saved[0]) for x in (dq, dk, dv))


def products(
    spans: SpanKeys, query: torch.Tensor, key: torch.Tensor
) -> Iterator[tuple[slice, slice, int, int]]:
    """Yield the queries, the keys, the query head and the key head of every product."""
    ends = (pairwise(x.tolist()) for x in (spans.query_ends, spans.key_ends))
    group = query.shape[1] // key.shape[1]
    for queries, keys in zip(*ends, strict=True):
        assert queries[1] - queries[0] <= spans.most_queries
        assert keys[1] - keys[0] <= spans.most_keys
        for head in range(query.shape[1]):
            yield slice(*queries), slice(*keys), head, head // group


def mask(queries: slice, keys: slice, window: int | None, like: torch.Tensor) -> torch.Tensor:
    n, m = queries.stop - queries.start, keys.stop - keys.start
    behind = torch.arange(n)[:, None] + (m - n) - torch.arange(m)
    sees = (behind >= 0) & (behind < (m if window is None else window))
    return torch.zeros(n, m, dtype=like.dtype).masked_fill(~sees, -torch.inf)
