"""`posttrain profile`: parts that sum up, work that is a formula's, and a run that is none the wiser."""

import json
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.commands.profile import unseen
from posttrain.engines.native.cache import PADDING
from posttrain.engines.native.engine import NativeConfig, NativeEngine
from posttrain.models.fingerprint import digest
from posttrain.recipe import config
from posttrain.report import write as write_report
from posttrain.runtime import build, profile, profile_parts, session
from posttrain.runtime.profile import Clock, Part, Peak
from posttrain.runtime.record.rundir import RunDir
from posttrain.types import Request, Sampling

KEYS = {"name", "seconds", "share", "rest", "calls", "tokens", "flop", "bytes", "parts"}
KEYS |= {"flop_of_peak", "bytes_of_peak"}
TOP = {"recipe", "method", "model", "device", "dtype", "threads", "updates", "trained", "seconds"}
TOP |= {"same_weights", "peak", "whole", "notes"}
LAYERS, HIDDEN, HEADS, KEY_HEADS, SIZE, VOCABULARY = 3, 32, 4, 2, 8, 100
WEIGHTS = LAYERS * HIDDEN * (2 * HIDDEN + 2 * KEY_HEADS * SIZE + 3 * 96)
"""Of the matrices of conftest's tiny Llama, without the head."""
PAIR = LAYERS * HEADS * 4 * SIZE
"""FLOP of one query at one key: two products."""


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path) -> None:
    """The machine is measured shortly, and directories that are thrown away can be counted."""
    monkeypatch.setattr(profile, "MEASURE_S", 0.0)
    monkeypatch.setattr(profile, "READ", 1 << 20)
    (tmp_path / "thrown").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "thrown"))


def parts(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield part
    for each in part["parts"]:
        yield from parts(each)


def at(part: dict[str, Any], *names: str) -> dict[str, Any]:
    for name in names:
        [part] = [each for each in part["parts"] if each["name"] == name]
    return part


def check(found: dict[str, Any]) -> None:
    """What holds of every profile."""
    assert set(found) == TOP
    for part in parts(found["whole"]):
        assert set(part) == KEYS
        assert part["seconds"] == pytest.approx(part["rest"] + sum(e["seconds"] for e in part["parts"]))
        assert part["rest"] >= 0
        assert part["share"] == pytest.approx(part["seconds"] / found["whole"]["seconds"])
        for work in ("flop", "bytes"):
            assert part[work] >= sum(each[work] for each in part["parts"]) * (1 - 1e-9)
            assert (part[f"{work}_of_peak"] is None) == (not part[work])
    assert found["same_weights"]


def test_time_counts_for_the_innermost_open_part(monkeypatch):
    clock = Clock(torch.device("cpu"))
    now = iter(range(100))
    monkeypatch.setattr(clock, "_now", lambda: float(next(now)))
    clock.reset()
    outer = clock.enter("a")
    again = clock.enter("a")  # is open already
    inner = clock.enter("b")
    clock.enter("left open")
    clock.leave(inner)
    clock.leave(again)
    clock.leave(outer)
    canary = clock.enter("canary")
    clock.leave(clock.enter("not looked at"))
    clock.add(flop=5.0)
    clock.leave(canary)
    clock.stop()
    whole = clock.whole
    assert (whole.rest, whole.parts["a"].rest, whole.parts["a"].parts["b"].rest) == (3, 2, 1)
    assert whole.parts["a"].calls == 1
    assert whole.parts["canary"] == Part("canary", rest=1.0, calls=1)
    told = whole.told(2, Peak(1.0, 1.0))
    assert (told["seconds"], told["rest"], at(told, "a")["seconds"]) == (4.0, 1.5, 2.0)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_engines_work_is_the_formulas(tiny, compiled):
    clock = Clock(torch.device("cpu"))
    with profile_parts.timed_parts(clock):
        model, config = AutoModelForCausalLM.from_pretrained(tiny), NativeConfig(decode_kernel=compiled)
        engine = NativeEngine(model, decode=lambda _: "", stop_tokens=[], config=config)
        if compiled and engine.runner.compiled_step is None:
            pytest.skip("NOT RUN: no kernel is compiled here, which wants Linux and g++")
        clock.reset()
        engine.submit(Request(prompt=tuple(range(5, 12)), sampling=Sampling(max_new_tokens=4)))
        while engine.busy:
            engine.poll()
        clock.stop()
    told = at(clock.whole.told(1, Peak(1.0, 1.0)), "engine")
    prefill, decoding = at(told, "prefill"), at(told, "decoding")
    assert (prefill["tokens"], decoding["tokens"], at(told, "drawing")["tokens"]) == (7, 3, 4)
    assert at(prefill, "linear layers")["flop"] == 2 * 7 * WEIGHTS
    assert at(prefill, "head")["flop"] == 2 * HIDDEN * VOCABULARY  # of the last token alone
    attention = at(prefill, "attention") if compiled else at(prefill, "cache", "attention")
    seen = 7 if compiled else PADDING
    assert attention["flop"] == PAIR * seen * (seen + 1) / 2
    assert at(decoding, "linear layers")["flop"] == 2 * 3 * WEIGHTS
    assert at(decoding, "linear layers")["bytes"] == 3 * 4 * WEIGHTS
    assert at(decoding, "head")["bytes"] == 3 * 4 * HIDDEN * VOCABULARY
    columns = 8 + 9 + 10
    attention = at(decoding, "attention") if compiled else at(decoding, "cache", "attention")
    assert attention["flop"] == PAIR * columns
    assert attention["bytes"] == columns * 4 * LAYERS * 2 * KEY_HEADS * SIZE


def test_the_learners_work_is_the_formulas(run_cli, offline, write, tmp_path):
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": "a?", "completion": "7"}) + "\n")
    over = {"task": {"arithmetic": None, "data": {"path": str(tmp_path / "one.jsonl")}}}
    recipe = write(offline, over | {"batch": {"batch_size": 1}})
    found = run_cli("profile", recipe, "--updates", 2, "--json").json
    check(found)
    forward, backward = (at(found["whole"], "training", name) for name in ("forward", "backward"))
    fed, trained = 22, 2  # <|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n and 7; then 7 and the end
    assert (forward["tokens"], at(forward, "head")["tokens"]) == (fed, trained)
    head, pairs = 2 * trained * HIDDEN * VOCABULARY, fed * (fed + 1) / 2
    assert at(forward, "linear layers")["flop"] == 2 * fed * WEIGHTS
    assert at(forward, "attention")["flop"] == PAIR * pairs
    assert at(forward, "head")["flop"] == head
    assert at(backward, "linear layers")["flop"] == 2 * 2 * fed * WEIGHTS
    assert at(backward, "attention")["flop"] == 2.5 * PAIR * pairs
    assert at(backward, "head")["flop"] == 3 * head  # computed again, and two products


@pytest.mark.parametrize("over", [{}, {"model": {"dtype": "bfloat16"}, "steps": {"minibatches": 2}}])
def test_an_online_recipe(run_cli, online, write, able, tmp_path, over):
    recipe = write(online, over | {"model": {"path": str(able)} | over.get("model", {})})
    kept = tmp_path / "profile.json"
    said = run_cli("profile", recipe, "--json", "--out", kept, "--set", "track.sinks=['tensorboard']")
    assert said.code == 0, said.err
    found = said.json
    check(found)
    assert json.loads(kept.read_text()) == found
    assert (found["method"], found["updates"], found["device"], found["threads"]) == ("grpo", 3, "cpu", 1)
    assert found["dtype"] == over.get("model", {}).get("dtype", "float32")
    names = {each["name"] for each in found["whole"]["parts"]}
    assert names >= {"sampling", "training", "handing over", "record"}
    handed = {each["name"] for each in at(found["whole"], "handing over")["parts"]}
    assert {"canary", "digest"} <= handed <= {"canary", "digest", "repacking"}
    assert at(found["whole"], "sampling", "engine", "prefill", "head")["flop"] > 0
    assert at(found["whole"], "sampling", "verdicts and replies")["calls"] > 0
    assert found["notes"] == []
    assert list((tmp_path / "thrown").iterdir()) == []


@pytest.mark.parametrize("method", ["dpo", "reward"])
def test_other_offline_recipes(run_cli, offline, write, tmp_path, method):
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({"prompt": q, "chosen": "7", "rejected": "3"}) + "\n" for q in "abc"))
    over = {"method": {"name": method}, "task": {"arithmetic": None, "data": {"path": str(file)}}}
    recipe = write(offline, over | {"batch": {"batch_size": 2}, "critic": {} if method == "reward" else None})
    found = run_cli("profile", recipe, "--updates", 1, "--json").json
    check(found)
    assert at(found["whole"], "training", "backward", "linear layers")["flop"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_under_the_clock_a_run_comes_to_the_same_bits(online, write, able, tmp_path, dtype):
    found = config.read(write(online, {"model": {"path": str(able), "dtype": dtype}}))
    weights = []
    before = {(id(owner), name): getattr(owner, name) for owner, name, _ in profile_parts._table(Clock(CPU))}
    for clock in (None, Clock(CPU)):
        directory = RunDir(tmp_path / f"run-{clock is None}", resume=False)
        chosen = build.plan(found.recipe, lambda _: None, directory.path)
        how = {"config": found.tables, "show": lambda *_: None, "say": lambda _: None}
        with profile_parts.timed_parts(clock) if clock else tempfile.TemporaryDirectory():
            parts = build.build_session_parts(chosen, directory, resume=False, **how)
            with session.Session(parts) as one:
                one.step(), one.step()
                weights.append(digest(one.learner.weights()))
        directory.close()
    assert weights[0] == weights[1]
    lines = [(tmp_path / f"run-{n}" / "samples" / "000002.jsonl").read_text() for n in (True, False)]
    assert lines[0] == lines[1]
    after = {(id(owner), name): getattr(owner, name) for owner, name, _ in profile_parts._table(Clock(CPU))}
    assert before == after


CPU = torch.device("cpu")


def test_the_table_says_what_it_cost_and_what_the_machine_can(run_cli, online, write):
    said = run_cli("profile", write(online), "--updates", 1)
    assert said.code == 0
    assert said.out.splitlines()[0].split()[:3] == ["part", "seconds", "share"]
    assert "\n  sampling " in said.out
    assert "\n      prefill " in said.out
    text = " ".join(said.out.split())
    assert "of 1 updates after the first" in text
    assert "s under the profile and" in text
    assert "the weights were then the same bits." in text
    assert "FLOP/s of products in float32" in text


@pytest.mark.parametrize(
    ("words", "over", "says"),
    [
        (["--updates", 4], {}, "run.updates"),
        (["--updates", 0], {}, "--updates"),
        (["--set", "async.place=thread"], {}, "another thread"),
        (["--set", "train.ranks=2"], {}, "several ranks"),
        (["--set", "optim.lr=fast"], {}, "optim.lr"),
        (["--out", "nowhere/at/all.json"], {}, "no such directory"),
        ([], {"stage": {"recipe": "x"}}, "pipeline"),
    ],
)
def test_mistakes_are_one_line(run_cli, online, write, tmp_path, words, over, says):
    said = run_cli("profile", write(online, over), *words)
    assert (said.code, said.out, len(said.err.splitlines())) == (2, "", 1)
    assert said.err.startswith("error: ")
    assert says in said.err
    assert list((tmp_path / "thrown").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_directory(run_cli, online, write, tmp_path, monkeypatch, number):
    monkeypatch.setattr(session.Session, "sample", lambda _: signal.raise_signal(number))
    said = run_cli("profile", write(online), "--json")
    assert (said.code, said.out) == (130, "")
    assert list((tmp_path / "thrown").iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_is_not_seen_is_said(online, write, tmp_path):
    here, there = (
        build.plan(config.read(write(online, over)).recipe, lambda _: None, tmp_path)
        for over in ({}, {"async": {"place": "process"}})
    )
    assert unseen(here, recorded=False) == []
    assert "are in processes of their own: what they do is not seen" in unseen(there, recorded=False)[0]
    assert "one recording on the GPU" in unseen(here, recorded=True)[0]


def test_the_report_shows_it(run_cli, online, write, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    assert data(write_report(run))["profile"] == {}
    said = run_cli("profile", write(online), "--updates", 1, "--json", "--out", run / "profile.json")
    shown = data(write_report(run))["profile"]
    assert len(shown["rows"]) == sum(1 + bool(part["parts"]) for part in parts(said.json["whole"]))
    assert shown["rows"][0][0] == "an update"
    for broken in ("", "[]", '{"whole": {"name": []}}', "[" * 100_000):
        (run / "profile.json").write_text(broken)
        found = data(write_report(run))
        assert found["profile"] == {}
        assert any("profile.json is no profile" in note for note in found["notes"])


def data(page: Path) -> dict[str, Any]:
    text = page.read_text()
    begin = text.index('id="run">') + len('id="run">')
    found: dict[str, Any] = json.loads(text[begin : text.index("</script>", begin)])
    return found
