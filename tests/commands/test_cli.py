"""Commands, as they are typed, on a tiny model."""

import io
import itertools
import json
import math
import os
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import posttrain
from posttrain.methods.table import METHODS
from posttrain.report import terminal
from posttrain.report.condition import Condition
from posttrain.verifiers.structure.grammar import Grammar
from posttrain.verifiers.structure.json_schema import Json


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A place for the run that `trained` copies."""
    return tmp_path_factory.mktemp("finished") / "run"


@pytest.fixture
def trained(run_cli, online, write, able, finished, tmp_path):
    """A run of recipe.toml that has ended, trained once for all tests."""
    recipe = write(online, {"model": {"path": str(able)}, "eval": {"every": 2}})
    if not finished.exists():
        assert run_cli("train", recipe, "--run-dir", finished, "--quiet").code == 0
    return shutil.copytree(finished, tmp_path / "run")


def test_quiet_prints_the_result_alone(run_cli, online, write, tmp_path):
    said = run_cli("train", write(online), "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 0
    assert said.err == ""
    [line] = said.out.splitlines()
    assert line.startswith("done: eval/accuracy ")
    run = tmp_path / "run"
    model = run / "checkpoints" / "step_000004" / "model"
    assert line.endswith(f"model {model}  report {run / 'report.html'}")
    assert (model / "model.safetensors").is_file()


def test_json_prints_a_line_an_update_and_nothing_else(run_cli, online, write, tmp_path):
    said = run_cli("train", write(online), "--run-dir", tmp_path / "run", "--json")
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert said.err == ""
    assert [line["update"] for line in lines] == [0, 1, 2, 3, 4]
    kept = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == kept


def test_talking_it_shows_the_plan_every_update_and_where_it_lies(run_cli, online, write, tmp_path):
    said = run_cli("train", write(online, {"run": {"updates": 2}}), "--run-dir", tmp_path / "run")
    shown = " ".join(said.err.split())
    for fragment in (
        "episodes an update 3 tasks × 4 = 12",
        "optimiser steps 2 updates × 1 epoch × 1 minibatch = 2",
        "Memory estimate",
        "float32 on cpu",
        "loading the model",
        "update 2 reward",
        "held-out accuracy",
    ):
        assert fragment in shown
    assert str(tmp_path / "run") in said.err.replace("\n", "")


def test_the_terminal_tells_an_alarm_when_it_comes_and_once():
    console = Console(file=io.StringIO(), width=200)
    with terminal.Terminal(console, 3) as shown_on:
        for update, kl in ((1, 0.1), (2, 0.75), (3, 0.8)):
            shown_on("update", {"update": update, "kl/ref": kl})
    said = [line.strip() for line in console.file.getvalue().splitlines()]
    told = [line for line in said if line.startswith(("update  ", "alarm"))]
    assert told == [
        "update    1  kl 0.1000",
        "update    2  kl 0.7500",
        "alarm KL blow-up: kl/ref reached 0.75 at update 2",
        "update    3  kl 0.8000",
    ]


def test_the_run_directory_says_what_ran(trained):
    names = {p.name for p in trained.iterdir()}
    assert names >= {
        "config.toml",
        "code.txt",
        "plan.json",
        "metrics.jsonl",
        "samples",
        "checkpoints",
        "report.html",
    }
    plan = json.loads((trained / "plan.json").read_text())
    assert plan["title"] == "recipe: group-relative policy optimisation"
    sections = {s["title"]: dict(s["rows"]) for s in plan["sections"]}
    assert sections["Method"]["surrogate"] == "clipped(clip_low=0.2, clip_high=0.2)"
    assert sections["Batch plan"]["episodes an update"] == "3 tasks × 4 = 12"
    assert "torch" in (trained / "code.txt").read_text()


def test_a_checkpoint_loads_in_transformers(trained):
    newest = trained / "checkpoints" / "step_000004" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(newest), AutoTokenizer.from_pretrained(newest)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+2="}], tokenize=False, add_generation_prompt=True
    )
    tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    assert model.generate(**tokens, max_new_tokens=2, do_sample=False).shape[1] > tokens["input_ids"].shape[1]


def test_an_adapter_is_saved_as_peft_has_it_and_evaluated_merged(run_cli, online, write, able, tmp_path):
    run = tmp_path / "run"
    over = {"model": {"path": str(able)}, "lora": {"rank": 4}, "optim": {"lr": 0.02}}
    assert run_cli("train", write(online, over), "--run-dir", run, "--quiet").code == 0
    adapter = run / "checkpoints" / "step_000004" / "adapter"
    assert {p.name for p in adapter.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    after = run_cli("eval", run, "--json").json
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    assert after == {k: last[k] for k in after}
    assert run_cli("sample", run, "2+2=", "--temperature", "0", "--dtype", "float32").code == 0


@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 4}}], ids=["whole", "adapter"])
def test_a_run_that_began_with_new_weights_is_evaluated_and_asked_as_it_ended(
    run_cli, online, write, able, tmp_path, lora
):
    run = tmp_path / "run"
    over = {"model": {"path": str(able), "random_init": True, "chat_template": "none"}, "optim": {"lr": 0.02}}
    assert run_cli("train", write(online, over | lora), "--run-dir", run, "--quiet").code == 0
    after = run_cli("eval", run, "--json").json
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    assert after == {k: last[k] for k in after}
    if lora:  # whole weights are saved with the template; an adapter's is the recipe's
        words = ("sample", run, "2+2=", "--temperature", 1, "--dtype", "float32", "--json")
        plainly, settings = run_cli(*words).out, run / "config.toml"
        settings.write_text(settings.read_text().replace('chat_template = "none"', ""))
        assert run_cli(*words).out != plainly


def test_eval_of_a_run_is_its_last_evaluation_and_of_a_recipe_its_first(run_cli, trained, tmp_path):
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    after = run_cli("eval", trained, "--json").json
    assert set(after) == {"eval/accuracy", "eval/reward", "eval/length", "eval/scored", "eval/errors"}
    assert after == {k: lines[-1][k] for k in after}
    before = run_cli("eval", tmp_path / "recipe.toml", "--json").json
    assert before == {k: lines[0][k] for k in before}
    assert run_cli("eval", f"{trained}@4", "--json").json == after
    shown = run_cli("eval", trained)
    assert f"eval/accuracy    {after['eval/accuracy']:.4f}" in shown.out
    other = run_cli("eval", trained, "--model", tmp_path / "nowhere")
    assert other.code == 2
    assert other.err.startswith(f"error: --model {tmp_path / 'nowhere'}: model.path: no model at")


def test_sample(run_cli, able, trained):
    words = ("2+2=", "-n", 3, "--max-new-tokens", 4, "--dtype", "float32", "--seed", 5, "--json")
    said = run_cli("sample", able, *words)
    answers = [json.loads(line) for line in said.out.splitlines()]
    assert len(answers) == 3
    for answer in answers:
        assert len(answer["tokens"]) == len(answer["logp_gen"]) <= 4
        assert answer["stop"] in ("eos", "length")
        assert all(p <= 0 for p in answer["logp_gen"])
    assert run_cli("sample", able, *words).out == said.out
    assert run_cli("sample", able, *words, "--seed", 6).out != said.out
    words = ("2+2=", "--temperature", 2, "--json")
    of_the_run, wide, narrow = (
        run_cli("sample", trained, *words, *more).out
        for more in ((), ("--dtype", "float32"), ("--dtype", "bfloat16"))
    )
    assert of_the_run == wide != narrow, "asked in what it was trained in"
    plain = run_cli("sample", trained, "2+2=", "--temperature", 0)
    assert plain.code == 0
    assert "tokens, " in plain.out
    missing = run_cli("sample", f"{trained}-none@best", "2+2=")
    assert (missing.code, missing.err) == (
        2,
        f"error: {trained}-none: there is no such run; check its path\n",
    )
    for command in ("sample", "eval"):
        assert "RUN_DIR@best" in "".join(run_cli(command, "--help").out.split())
    assert (
        "1 token, length" in run_cli("sample", trained, "2+2=", "--max-new-tokens", 1, "--temperature", 0).out
    )


def test_a_model_without_a_chat_template_goes_on_with_the_prompt(run_cli, able, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(able, base)
    (base / "chat_template.jinja").unlink()
    words = ("--temperature", 0, "--max-new-tokens", 3, "--dtype", "float32")
    said = run_cli("sample", base, "2+2=", *words)
    assert said.code == 0, said.err
    assert "plain text" in said.err
    assert "3 tokens, " in said.out or "tokens, eos" in said.out
    assert run_cli("sample", able, "2+2=", *words).out != ""
    quietly = run_cli("sample", base, "2+2=", "--json", *words)
    assert quietly.err == ""


def test_a_run_is_a_model_wherever_one_is_named(run_cli, online, write, trained, tmp_path):
    newest = trained / "checkpoints" / "step_000004" / "model"
    recipe = write(online, {"model": {"path": str(trained)}, "run": {"updates": 1}}, "more")
    said = run_cli("train", recipe, "--run-dir", tmp_path / "more", "-q")
    assert said.code == 0, said.err
    assert tomllib.loads((tmp_path / "more" / "config.toml").read_text())["model"]["path"] == str(newest)
    assert run_cli("train", recipe, "--run-dir", tmp_path / "more", "-q", "--resume").code == 0
    after = run_cli("eval", recipe, "--model", trained, "--json")
    assert after.json == run_cli("eval", recipe, "--model", newest, "--json").json

    adapter = {"run": {"updates": 1}, "lora": {"rank": 2}}
    assert run_cli("train", write(online, adapter, "lora"), "--run-dir", tmp_path / "lora", "-q").code == 0
    refused = run_cli("validate", write(online, {"model": {"path": str(tmp_path / "lora")}}, "onlora"))
    assert refused.code == 2
    assert f"posttrain model export {tmp_path / 'lora'} DIR" in refused.err


def test_a_link_to_nothing_is_said_to_be_one(run_cli, online, write, tmp_path):
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    data = {"task": {"arithmetic": None, "data": {"path": str(tmp_path / "gone")}}}
    for said in (
        run_cli("sample", tmp_path / "gone", "2+2="),
        run_cli("validate", tmp_path / "gone"),
        run_cli("validate", write(online, data)),
    ):
        assert said.code == 2
        [line] = said.err.splitlines()
        assert f"is a link to {tmp_path / 'nowhere'}, which is not there" in line


def test_validate(run_cli, online, write, tiny, tmp_path):
    said = run_cli("validate", write(online), "--json")
    assert said.code == 0
    assert said.json["valid"] is True
    assert said.json["plan"]["Model"]["path"] == str(tiny)
    assert set(said.json) == {"valid", "plan", "notes"}
    plain = run_cli("validate", write(online))
    assert plain.out.replace("\n", "") == f"{tmp_path / 'recipe.toml'}: valid"
    assert "Batch plan" in plain.err


def test_validate_reads_no_weights(run_cli, online, write, tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"not weights")
    over = {"model": {"path": str(tmp_path / "model")}}
    assert run_cli("validate", write(online, over)).code == 0
    assert run_cli("train", write(online, over), "--run-dir", tmp_path / "run").code == 2


def test_report_is_a_pure_function_of_the_directory(run_cli, trained):
    page = trained / "report.html"
    before = page.read_text()
    page.unlink()
    said = run_cli("report", trained)
    assert said.out.strip() == str(page)
    assert page.read_text() == before
    assert "http://" not in before.replace("http://www.w3.org", "")


def test_methods(run_cli):
    rows = json.loads(run_cli("methods", "--json").out)
    assert list(rows) == list(METHODS)
    assert rows["dapo"]["surrogate"] == "clipped(clip_low=0.2, clip_high=0.28)"
    assert (rows["sft"]["loop"], rows["sft"]["learns"]) == ("offline", "answers")
    assert rows["simpo"]["pair_loss"] == "logistic(target_margin=1)"
    assert rows["process_reward"]["needs"] == ["head"]
    assert rows["ppo"]["estimator"] == "gae(gamma=1, lam=0.95)"
    assert rows["klq"]["needs"] == ["logp_old", "logp_ref", "value"]
    assert rows["trpo"]["step"] == "trust_region"
    assert rows["pass_at_k"]["group"] == 3


def test_the_tables_of_methods_have_a_whole_line_for_each_within_120_columns(run_cli):
    shown = run_cli("methods").out.splitlines()
    assert max(map(len, shown)) <= 120
    first, second, titles = itertools.islice(build_session_parts(shown), 3)
    lines = {line.split()[0]: line for line in (*first[1:], *second[1:])}
    assert {*lines} == {*METHODS}
    assert len(first) + len(second) == 2 + len(METHODS), "a cell was folded"
    assert [title.split()[0] for title in titles] == [*METHODS]
    for found in ("gae batch_normalised", "by_token", "clipped(0.2, 0.2)", "per_token", "yes", "AdamW"):
        assert found in lines["ppo"]
    assert "clipped(0.0003, 0.0004)" in lines["gspo"]
    assert lines["trpo"].split()[-2:] == ["-", "natural"]
    assert lines["gkd"].split()[3] == "jensen_shannon(0.5)"
    assert lines["kd"].split()[3] == "forward_kl"
    cells = [lines[name].partition(" by_token")[0].split()[1:] for name in ("grpo", "gigpo", "m2po")]
    assert cells == [["normalised"], ["normalised", "turn_weight=1"], ["normalised", "filtered"]]
    assert lines["klq"].split() == ["klq", "-", "-", "-", "per_token", "yes", "AdamW"]


def test_the_table_of_preferences_says_what_is_compared_and_what_it_costs(run_cli):
    _, second, *_ = build_session_parts(run_cli("methods").out.splitlines())
    assert second[0].split() == ["method", "learns", "from", "worth", "loss", "beta", "reference"]
    lines = {line.split()[0]: line.split()[1:] for line in second[1:]}
    assert lines["dpo"] == ["rankings", "log_ratio", "logistic(0)", "0.1", "yes"]
    assert lines["f_dpo"] == ["rankings", "jensen_shannon", "of", "log_ratio", "logistic(0)", "0.1", "yes"]
    assert lines["simpo"] == ["rankings", "mean_logp", "logistic(1)", "2", "-"]
    assert lines["kto"][:2] == ["labels", "log_ratio"]
    assert lines["online_dpo"][:3] == ["its", "own", "answers"]
    assert lines["process_reward"] == ["steps", "a", "head", "classification", "-", "-"]


def build_session_parts(lines: list[str]) -> Iterator[list[str]]:
    """The lines between empty ones."""
    return (list(part) for empty, part in itertools.groupby(lines, lambda line: not line) if not empty)


def test_without_a_compiler_the_doctor_says_what_that_costs(run_cli, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    facts = {f["name"]: f for f in json.loads(run_cli("doctor", "--json").out)}
    [fact] = [f for name, f in facts.items() if name == "compiled kernels"]
    assert not fact["good"]
    assert fact["mend"] in ("apt-get install g++", "run it on Linux")


@pytest.mark.skipif(os.getuid() != 0, reason="only root's boxes run as another user")
def test_doctor_names_a_folder_that_boxes_cannot_enter(run_cli, monkeypatch, tmp_path):
    (tmp_path / "posttrain" / "commands").mkdir(parents=True)
    tmp_path.chmod(0o700)
    monkeypatch.setattr("posttrain.commands.doctor.__file__", f"{tmp_path}/posttrain/commands/doctor.py")
    facts = {f["name"]: f for f in json.loads(run_cli("doctor", "--json").out)}
    assert "can be read by root only" in facts["sandbox folder"]["found"]
    assert "every user" in facts["sandbox folder"]["mend"]


def test_doctor(run_cli):
    facts = {f["name"]: f for f in json.loads(run_cli("doctor", "--json").out)}
    assert facts.keys() >= {
        "python",
        "torch",
        "cores",
        "memory free",
        "bfloat16",
        "compiled kernels",
        "GPU",
        "model cache",
        "wandb",
    }
    assert facts["python"]["good"]
    assert all(f["good"] or f["mend"] or f["name"] == "memory free" for f in facts.values())
    shown = run_cli("doctor").out
    assert "torch" in shown


def test_pull_prints_the_directory(run_cli, tiny):
    assert run_cli("model", "pull", tiny).out.strip() == str(tiny)


def test_help_names_every_command(run_cli):
    out = run_cli("--help").out
    for command in (
        "train",
        "validate",
        "eval",
        "sample",
        "report",
        "methods",
        "doctor",
        "run",
        "model",
        "data",
    ):
        assert command in out


# ---------------------------------------------------------------- what is shown


def test_the_sparkline_is_between_the_least_and_the_greatest():
    assert terminal.sparkline([]) == ""
    assert terminal.sparkline([3.0]) == "▁"
    assert terminal.sparkline([0.0, 1.0, 0.0]) == "▁█▁"
    assert terminal.sparkline([-1.0, 0.0, 1.0]) == "▁▄█"
    assert terminal.sparkline([float(i) for i in range(100)], width=4) == "▁▃▅█"


def test_the_line_of_an_update_shows_what_there_is():
    assert (
        terminal.line({"update": 3, "loss": -0.25, "entropy": 1.5})
        == "update    3  loss -0.2500  entropy 1.50"
    )
    assert "held-out accuracy 87.5%" in terminal.line({"update": 3, "eval/accuracy": 0.875})
    assert terminal.line({"update": 0}).strip() == "update    0"
    scored = {"update": 3, "eval/accuracy": 0.0, "eval/reward": 0.2, "eval/scored": 1.0, "eval/length": 7.0}
    assert terminal.line(scored).split("  ")[-1:] == ["held-out reward 0.200"]
    judged = terminal.line(scored, {"eval/accuracy", "eval/length"}).split("  ")[-3:]
    assert judged == ["held-out accuracy 0.0%", "held-out reward 0.200", "eval/length 7"]
    for warmup, told in ((1.0, "update    3  the critic warms up"), (0.0, "update    3  ")):
        assert terminal.line({"update": 3, "value/warmup": warmup}) == told
    # What a reward model says is neither right nor wrong.
    graded = {"update": 3, "accuracy": 0.0, "eval/accuracy": 0.0, "eval/reward": -1.5}
    for share in ("verdict/scored", "eval/scored"):
        assert terminal.line(graded | {share: 1.0}) == "update    3  held-out reward -1.500"
    assert terminal.summary({"loss": 1.0, "reward/mean": 0.5}) == "reward 0.500"


def test_json_has_null_for_what_is_no_number(capsys):
    terminal.as_json("sample", {"done": 1})
    terminal.as_json("update", {"a": math.nan, "b": math.inf, "c": 1.5})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": None, "c": 1.5}


def test_the_terminal_follows_a_run(tmp_path):
    with Path(tmp_path / "out").open("w") as file:
        console = Console(file=file, force_terminal=True, width=200)
        with terminal.Terminal(console, 3) as shown_on:
            for update in range(4):
                shown_on("sample", {"done": 1, "total": 3})
                shown_on.progress.refresh()
                shown_on("train", {})
                shown_on("update", {"update": update, "reward/mean": update / 3, "time/total": 1.0})
                shown_on.progress.refresh()
        assert shown_on.rewards == [0.0, 1 / 3, 2 / 3, 1.0]
    shown = (tmp_path / "out").read_text()
    assert "sampling" in shown
    assert "▁▃▅█" in shown


@pytest.mark.parametrize("words", [["--run-dir=~/run"], ["--run-dir", "~/run"]], ids=["=", "apart"])
def test_home_in_a_path_option_is_expanded(words, run_cli, offline, write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    recipe = write(offline, {"run": {"updates": 1}})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    said = run_cli("train", f"~/{recipe.relative_to(tmp_path)}", *words)
    assert str(tmp_path / "run") in said.err
    assert not (tmp_path / "~").exists()


def test_home_in_paths_of_the_api_and_of_recipes_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    (tmp_path / "rules.lark").write_text('start: "a"')
    assert Json(schema="~/schema.json").schema == {"type": "integer"}
    assert Grammar(grammar="~/rules.lark").grammar == 'start: "a"'
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "sums.jsonl").write_text('{"prompt": "2", "answer": "2"}\n')
    recipe = posttrain.Recipe("org/name", data={"path": "~/sums.jsonl"}, reward="number", updates=1)
    recipe.write("~/run/config.toml")
    assert posttrain.Recipe.read("~/run/config.toml").tables == recipe.tables
    assert posttrain.load("~/run").path == run


def test_terminal_says_how_long_until_stop_when() -> None:
    """At the mean pace so far, and at most until the last update."""
    told = io.StringIO()
    view = terminal.Terminal(
        Console(file=told, width=200), 20, stop_when=Condition.parse("eval/accuracy > 0.8")
    )
    for update, seconds, accuracy in (
        (0, 10.0, 0.2),
        (1, 20.0, None),
        (2, 30.0, 0.4),
        (3, 40.0, None),
        (4, 50.0, 0.9),
    ):
        line = {"update": update, "seconds": seconds}
        view("update", line if accuracy is None else {**line, "eval/accuracy": accuracy})
    outlooks = [text.strip() for text in told.getvalue().splitlines() if "ends at" in text]
    assert outlooks[0].endswith("ends at eval/accuracy > 0.8")
    assert outlooks[1].endswith("ends at eval/accuracy > 0.8; about 40.0 s, at most 3 min 0 s left")
    assert len(outlooks) == 2, "none once it has ended"
