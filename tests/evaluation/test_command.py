"""posttrain eval --suite, compare and contamination: what is left, what goes on, and what is refused."""

import io
import json
import shutil
import unicodedata

import pytest
from rich.console import Console

from posttrain.commands import evaluate
from posttrain.evaluation.suites.likelihood import Continuation, encode_pair, log_likelihoods
from posttrain.evaluation.suites.model import EvaluatedModel, resolve_target
from posttrain.evaluation.suites.results import read_lines
from posttrain.evaluation.suites.table import SUITES
from posttrain.models.pretrained import silent
from posttrain.recipe.recipe import EngineChoice
from posttrain.types import UserError

from .conftest import SUMS

OWN = ("--suite", "own", "--verifier", "number")
SCHOOL = [{"question": f"What is {n} plus {n}?", "answer": f"Add.\n#### {2 * n}"} for n in range(9)]


@pytest.fixture
def evaluated(run_cli, able, sums, tmp_path):
    """evaluated(name, *options) -> the directory of an evaluation on the nine sums, and what it printed."""

    def run(name, *options, model=None):
        words = (
            "eval",
            model or able,
            *OWN,
            "--data",
            sums,
            "--out",
            tmp_path / name,
            "--dtype",
            "float32",
            "--json",
        )
        said = run_cli(*words, *options)
        return tmp_path / name, said

    return run


def test_every_answer_is_written_down_and_counted(evaluated, run_cli, able, sums):
    where, said = evaluated("one")
    assert said.code == 0, said.err
    lines = {line["id"]: line for line in read_lines(where / "own.jsonl")}
    assert set(lines) == {row["id"] for row in SUMS}
    assert lines["2+3"]["prompt"] == "<|im_start|>user\n2+3=<|im_end|>\n<|im_start|>assistant\n"
    right = [line["label"] == "right" for line in lines.values()]
    assert any(right)
    for line in lines.values():
        a, b = line["id"].split("+")
        assert (line["label"] == "right") == (line["answer"].strip() == str(int(a) + int(b)))
    [own] = said.json["suites"].values()
    assert own["metrics"]["accuracy"]["value"] == sum(right) / 9
    assert own["fingerprint"]["decoding"]["samples"] == 1
    assert json.loads((where / "results.json").read_text()) == said.json
    table = run_cli("eval", able, *OWN, "--data", sums, "--out", where, "--dtype", "float32")
    assert f"{100 * sum(right) / 9:.1f} ±" in table.out


def test_an_interrupted_evaluation_goes_on_to_the_same_end(evaluated, tmp_path):
    drawn = ("--temperature", 1, "-n", 3)
    where, whole = evaluated("one", *drawn)
    file, before = where / "own.jsonl", (where / "own.jsonl").read_text().splitlines(keepends=True)
    assert len(before) == 27
    broken = json.dumps(json.loads(before[2]) | {"score": None, "label": "died"}) + "\n"
    file.write_text("".join(before[:2]) + broken + before[9][:20])
    _, again = evaluated("one", *drawn)
    after = file.read_text().splitlines(keepends=True)
    assert after[:2] == before[:2], "what was answered stays"
    assert sorted(after) == sorted(before), "the rest is drawn as it was, and what broke is judged again"
    assert again.json == whole.json
    found = whole.json["suites"]["own"]["metrics"]
    assert set(found) == {"accuracy", "pass@2", "pass@3", "majority@3"}
    assert found["accuracy"]["value"] <= found["pass@2"]["value"] <= found["pass@3"]["value"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--temperature", 1), "its answers to own have other decoding"),
        (("--limit", 3), "its answers to own have other problems, prompts"),
        (("--seed", 1), "another seed: 0, not 1"),
        (("--verifier", "exact"), "its answers to own have other judge"),
    ],
)
def test_a_directory_is_gone_on_with_by_the_same_evaluation_only(evaluated, options, message):
    evaluated("one")
    _, said = evaluated("one", *options)
    assert said.code == 2
    assert message in said.err


def rewritten(where, change):
    """results.json as another evaluation would have left it."""
    found = json.loads((where / "results.json").read_text())
    (where / "results.json").write_text(json.dumps(change(found)))


def test_answers_of_other_weights_are_not_gone_on_with(evaluated, able, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(able, copy)
    where, said = evaluated("one", model=copy)
    assert said.code == 0, said.err
    assert evaluated("one", model=copy)[1].json == said.json
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    _, said = evaluated("one", model=copy)
    assert said.code == 2
    assert said.err.rstrip().endswith(
        f"{where}: the model's weights have changed since its first answers; name another --out"
    )


def test_answers_of_which_nothing_says_whose_they_are_are_refused(evaluated, tiny):
    where, _ = evaluated("one")
    rewritten(where, lambda found: found | {"suites": {}})
    _, unnamed = evaluated("one")
    (where / "results.json").unlink()
    _, alone = evaluated("one", model=tiny)
    for said in (unnamed, alone):
        assert said.code == 2
        assert "it has own.jsonl, but results.json does not say which model gave these answers" in said.err


def test_another_engine_does_not_go_on(evaluated):
    where, _ = evaluated("one")
    rewritten(where, lambda found: found | {"engine": "vllm"})
    _, said = evaluated("one")
    assert (said.code, "it holds answers with another engine: vllm, not native" in said.err) == (2, True)


def test_a_function_of_one_s_own_judges_and_its_text_is_in_the_fingerprint(run_cli, able, sums, tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text("def score(task, response):\n    return float(response.strip() == task.answer)\n")
    words = ("eval", able, "--suite", "own", "--data", sums, "--verifier", f"{file}:score", "--json")
    said = run_cli(*words, "--out", tmp_path / "one")
    assert said.code == 0, said.err
    assert 0 < said.json["suites"]["own"]["metrics"]["accuracy"]["value"] < 1
    file.write_text(file.read_text().replace("response.strip()", "response"))
    said = run_cli(*words, "--out", tmp_path / "one")
    assert (said.code, "its answers to own have other judge" in said.err) == (2, True)


def test_results_are_compared_problem_by_problem(evaluated, run_cli, tiny):
    able, _ = evaluated("able")
    poor, _ = evaluated("poor", model=tiny)
    [row] = run_cli("run", "compare", poor, able, "--json").json
    mine, theirs = ({a["id"]: a["score"] for a in read_lines(w / "own.jsonl")} for w in (able, poor))
    better = sum(mine[name] > theirs[name] for name in mine)
    worse = sum(mine[name] < theirs[name] for name in mine)
    assert (row["better"], row["worse"], row["problems"]) == (better, worse, 9)
    assert row["difference"] == pytest.approx((better - worse) / 9)
    assert row["low"] <= row["difference"] <= row["high"]
    assert row["p"] == row["p_holm"]
    said = run_cli("run", "compare", poor, able).out
    assert ("is ahead" in said) == row["clear"]
    [same] = run_cli("run", "compare", able, able, "--json").json
    assert (same["difference"], same["p"], same["clear"]) == (0.0, 1.0, False)
    assert "no difference is shown" in run_cli("run", "compare", able, able).out


def test_own_data_is_judged_by_the_recipe(run_cli, able, sums, write, online, tmp_path):
    recipe = write(online, {"model": {"path": str(able), "dtype": "float32"}})
    told = ("--data", sums, "--json", "--out")
    by_name = run_cli("eval", able, *OWN, "--dtype", "float32", *told, tmp_path / "one").json
    by_recipe = run_cli("eval", recipe, *told, tmp_path / "two").json
    assert by_recipe["suites"]["own"]["metrics"] == by_name["suites"]["own"]["metrics"]
    said = run_cli("eval", able, *told, tmp_path / "three")
    assert (said.code, "error: --verifier: who judges?" in said.err) == (2, True)


def test_runs_are_compared_by_their_latest_evaluation(evaluated, run_cli, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (one, _), (other, _) = evaluated("able"), evaluated("tiny", model=tiny)
    runs = tmp_path / "runs" / "one", tmp_path / "runs" / "other"
    for run in runs:
        run.mkdir(parents=True)
        (run / "config.toml").touch()
    said = run_cli("run", "compare", *runs)
    assert said.code == 2
    assert f"posttrain eval {runs[0]} --suite SUITE" in said.err
    shutil.copytree(one, runs[0] / "evals")  # as eval was given --out in the run
    results = json.loads((other / "results.json").read_text())
    path = str(runs[1] / "checkpoints" / "step_000004" / "model")
    (other / "results.json").write_text(json.dumps(results | {"model": path}))
    shutil.copytree(other, tmp_path / "evals" / "other-001")  # as eval takes by itself
    found = run_cli("run", "compare", *runs, "--json")
    assert found.code == 0, found.err
    assert found.out == run_cli("run", "compare", one, other, "--json").out


def test_what_was_not_asked_alike_is_not_compared(evaluated, run_cli, able, write, online, tmp_path):
    one, _ = evaluated("one")
    recipe = write(online, {"model": {"path": str(able)}})
    plain, _ = evaluated("plain", "--set", "model.chat_template='none'", model=recipe)
    fewer, _ = evaluated("fewer", "--limit", 4)
    warm, _ = evaluated("warm", "--temperature", 1)
    for other, parts in ((plain, "template"), (fewer, "problems, prompts"), (warm, "decoding")):
        said = run_cli("run", "compare", one, other)
        assert said.code == 2
        assert f"these differ in {parts};" in said.err
    file = warm / "own.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))
    said = run_cli("run", "compare", warm, evaluated("warm2", "--temperature", 1)[0])
    assert said.code == 2
    assert "1 problems were answered by one of them only" in said.err
    said = run_cli("run", "compare", one, tmp_path)
    assert (said.code, "it has no results.json" in said.err) == (2, True)


def test_choices_are_taken_by_their_likelihood(run_cli, able, records, tmp_path):
    rows = [
        {"question": f"{a}+{b}=?", "answerKey": "A"}
        | {"choices": {"text": [str(a + b), "seven or so"], "label": ["A", "B"]}}
        for a in (2, 3) for b in (2, 3)
    ]  # fmt: skip
    words = ("--suite", "arc_easy", "--data", records(*rows), "--dtype", "float32", "--out", tmp_path / "out")
    said = run_cli("eval", able, *words, "--json")
    assert said.code == 0, said.err
    engine = build_native_engine(able)
    lines = {line["id"]: line for line in read_lines(tmp_path / "out" / "arc_easy.jsonl")}
    for number, row in enumerate(rows):
        line = lines[str(number)]
        assert line["prompt"] == f"Question: {row['question']}\nAnswer:"
        pairs = [encode_pair(engine.tok, line["prompt"], f" {text}") for text in row["choices"]["text"]]
        whole = [sum(engine.score([*p.context, *p.rest])[-len(p.rest) :]) for p in pairs]
        assert line["logps"] == pytest.approx(whole, abs=1e-4)
        assert line["parts"]["acc"] == (whole[0] >= whole[1])
        by_letter = [whole[0] / len(row["choices"]["text"][0]), whole[1] / len("seven or so")]
        assert line["parts"]["acc_norm"] == (by_letter[0] >= by_letter[1])
    again = run_cli("eval", able, *words, "--json")
    assert again.json == said.json


def build_native_engine(path):
    model = EvaluatedModel(*resolve_target(str(path), (), None, "float32", silent), 0, silent)
    tokenizer, engine = model.policy.tokenizer, model.engine
    engine.tok = lambda text: tokenizer(text)["input_ids"]  # type: ignore[attr-defined]
    return engine


def test_a_likelihood_is_that_of_the_whole_text(able):
    engine = build_native_engine(able)
    pairs = [encode_pair(engine.tok, "2+2= ", text) for text in ("4", " 5", "44444")]
    assert pairs[0] == Continuation(tuple(engine.tok("2+2=")), tuple(engine.tok(" 4")))
    for pair, logp in zip(pairs, log_likelihoods(engine, pairs), strict=True):
        assert logp == pytest.approx(
            sum(engine.score([*pair.context, *pair.rest])[-len(pair.rest) :]), abs=1e-4
        )


def test_a_model_without_a_chat_template_is_asked_as_text_only(run_cli, able, records, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(able, base)
    (base / "chat_template.jinja").unlink()
    program = {"prompt": "def f():\n", "entry_point": "f", "test": "def check(f):\n    assert f() == 1\n"}
    words = ("--data", records(program), "--out", tmp_path / "out", "--json")
    said = run_cli("eval", base, "--suite", "humaneval", *words)
    assert (said.code, "the model has no chat template" in said.err) == (2, True)
    said = run_cli("eval", base, "--suite", "humaneval_text", *words)
    assert said.code == 0, said.err
    [line] = read_lines(tmp_path / "out" / "humaneval_text.jsonl")
    assert line["prompt"] == program["prompt"]
    assert line["label"] != "PASS"


def test_a_prompt_without_room_is_an_answer_that_was_cut_off(run_cli, able, records, tmp_path):
    file = records({"prompt": "2+2=", "answer": "4"}, {"prompt": "2+2=" * 200, "answer": "4"})
    said = run_cli("eval", able, *OWN, "--data", file, "--out", tmp_path / "out", "--json")
    assert said.code == 0, said.err
    found = said.json["suites"]["own"]
    assert (found["answers"], found["errors"], found["cut_off"]) == (2, 0, 1)


def test_problems_that_were_trained_on_are_named(run_cli, records, write, online):
    asked = records(*SCHOOL, {"question": " ".join("abcdefghijklmno"), "answer": "#### 1"}, name="asked")
    train = records(
        {
            "prompt": "Nothing of the kind, but long enough to hold a run of words for all of it",
            "answer": "1",
        },
        {"prompt": "So: A, b - c d e f g... H i j k l m! and more", "answer": "2"},
        {"prompt": "what IS 3 plus 3", "answer": "6"},
        name="train",
    )
    words = ("data", "contamination", train, "--suite", "gsm8k", "--data", asked, "--json")
    found = run_cli(*words).json
    assert found["hits"] == [{"problem": "9", "place": "train.jsonl:2", "words": "a b c d e f g h i j k l m"}]
    assert (found["problems"], found["short"], found["texts"]) == (10, 9, 3)
    found = run_cli(*words, "--words", 5).json
    assert [hit["problem"] for hit in found["hits"]] == ["3", "9"]
    last = "problems with 5 words in a row of training data: 2 of 10; texts: 3"
    assert run_cli(*words[:-1], "--words", 5).out.splitlines()[-1] == last
    recipe = write(online, {"task": {"arithmetic": None, "data": {"path": str(train)}}})
    assert run_cli("data", "contamination", recipe, *words[3:], "--words", 5).json == found
    split = records({"prompt": "Well, what is 3", "note": "plus 3?"}, name="split")
    found = run_cli("data", "contamination", split, *words[3:], "--words", 5).json
    assert (found["hits"], found["texts"]) == ([], 1), "no run goes from one field into the next"
    said = run_cli("data", "contamination", write(online, name="sums"), *words[3:])
    assert (said.code, "its tasks are generated" in said.err) == (2, True)


def test_a_text_is_found_however_its_characters_are_composed(run_cli, records):
    asked = "Où est né l'élève à la fenêtre\N{LATIN SMALL LIGATURE FI}xe?"
    problems = records({"id": "a", "prompt": asked, "answer": "1"}, name="asked")
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        train = records({"prompt": unicodedata.normalize(form, asked.upper())}, name=form)
        words = ("--suite", "own", "--data", problems, "--words", 5, "--json")
        assert [hit["problem"] for hit in run_cli("data", "contamination", train, *words).json["hits"]] == [
            "a"
        ]


def test_without_a_name_each_evaluation_has_a_directory_of_its_own(
    run_cli, able, sums, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    words = ("eval", able, *OWN, "--data", sums, "--limit", 1)
    for number in (1, 2):
        said = run_cli(*words)
        assert f"evals/{able.name}-{number:03d}" in said.out
        assert (tmp_path / "evals" / f"{able.name}-{number:03d}" / "results.json").exists()


def test_mistakes_are_one_line(run_cli, able, sums, records, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "base"
    for words, message in (
        (("eval", able, "--suite", "gms8k"), "there is no suite 'gms8k'; did you mean 'gsm8k'?"),
        (("eval", able, "--suite", "own", "--data", sums), "who judges?"),
        (("eval", able, "--suite", "stdio"), "this suite has no data of its own"),
        (("eval", able, "--suite", "gsm8k,own", "--data", sums), "write gsm8k="),
        (("eval", able, "--suite", "gsm8k", "--data", f"own={sums}"), "this suite is not asked for"),
        (("eval", able, "--suite", "gsm8k", "--verifier", "math"), "the other suites have a judge"),
        (("eval", able, *OWN, "--data", sums, "-n", 4), "greedy answers are all the same"),
        (("eval", able, *OWN, "--data", sums, "--dtype", "int8"), "unknown dtype"),
        (("eval", able, *OWN, "--data", sums, "--engine", "vlm"), "--engine: unknown engine 'vlm'"),
        (("eval", able, "--engine", "vllm"), "--engine: is for suites"),
        (("serve", able, "--engine", "vlm"), "--engine: unknown engine 'vlm'"),
        (("eval", able, *OWN, "--data", sums, "--set", "run.seed=1"), "a model has no keys"),
        (("eval", able, "--limit", 3), "--limit: is for suites"),
        (("eval", base, "--suite", "gsm8k", "--data", records(*SCHOOL)), "no model at"),
    ):
        said = run_cli(*words)
        assert (said.code, said.err.count("\n")) == (2, 1), said.err
        assert message in said.err
    assert not (tmp_path / "evals").exists()


@pytest.mark.parametrize(
    ("name", "message"), [("arc_easy", "needs the likelihood of answers"), ("aime24", "of a filtered draw")]
)
def test_a_suite_that_vllm_cannot_be_asked_is_refused_before_it_is_begun(able, name, message):
    recipe, adapter = resolve_target(str(able), (), None, "float32", silent, EngineChoice(name="vllm"))
    with pytest.raises(UserError, match=message) as refused:
        EvaluatedModel(recipe, adapter, 0, silent).asking(SUITES[name], None, None)
    assert refused.value.key == "--engine"


def test_the_table_is_whole_in_eighty_columns():
    metric = {"value": 0.123, "error": 0.031, "low": 0.08, "high": 0.1556}
    suite = {"fingerprint": {"problems": 1319}, "answers": 1319, "errors": 0, "cut_off": 146}
    told = Console(width=80, file=io.StringIO())
    found = {"suites": {"gsm8k_5shot": suite | {"metrics": {"strict": metric}}}}
    told.print(evaluate._table(found, ["gsm8k_5shot"]))
    shown = told.file.getvalue()
    assert "8.0 – 15.6" in shown
    assert "…" not in shown
