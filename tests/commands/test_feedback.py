"""posttrain data revise and prefer, against a server that speaks the protocol."""

import json
from pathlib import Path

import pytest

from posttrain.base.usercode import load_named

SERVER = Path(__file__).parents[1] / "verifiers" / "openai_server.py"
serving, Likely = (load_named(f"{SERVER}:{name}") for name in ("serving", "Likely"))


@pytest.fixture
def judge(tmp_path):
    def make(server, **options: str) -> Path:
        path = tmp_path / "judge.toml"
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in options.items())
        path.write_text(
            f'[verifier.judge]\n{lines}[verifier.judge.endpoint]\nbase_url = "{server.url}"\nmodel = "m"\n'
        )
        return path

    return make


def lines(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_answers_are_revised_by_the_constitution(run_cli, judge, tmp_path):
    with serving(lambda asked: f"text {len(asked.body['messages'])}") as server:
        prompts = lines(tmp_path / "prompts.jsonl", [{"prompt": "How?"}, {"prompt": "Why?"}])
        found = judge(server, rubric="principled", constitution="ours")
        said = run_cli("data", "revise", found, prompts, "--out", tmp_path / "out.jsonl", "--rounds", "2")
    assert said.code == 0, said.err
    assert said.out.startswith("4 revised")
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [r["prompt"] for r in records] == ["How?", "How?", "Why?", "Why?"]
    assert (records[0]["initial"], records[0]["critique"], records[0]["revision"]) == (
        "text 1",
        "text 3",
        "text 5",
    )
    assert records[1]["initial"] == records[0]["revision"]
    assert records[0]["principle"] != records[1]["principle"]


def test_preferences_are_asked_in_both_orders(run_cli, judge, tmp_path):
    def prefers_the_longer(asked):
        text = asked.body["messages"][-1]["content"]
        first, second = text.find("a long answer"), text.find("short")
        return "Better: A" if first < second else "Better: B"

    with serving(prefers_the_longer) as server:
        pairs = lines(tmp_path / "pairs.jsonl", [{"prompt": "How?", "responses": ["short", "a long answer"]}])
        said = run_cli(
            "data", "prefer", judge(server, rubric="pairwise"), pairs, "-o", tmp_path / "out.jsonl"
        )
    assert said.code == 0, said.err
    [record] = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert (record["chosen"], record["rejected"]) == ("a long answer", "short")
    assert (record["margin"], record["agree"]) == (1.0, True)


def test_a_judge_that_cannot_keep_to_the_form_is_asked_for_its_chances(run_cli, judge, tmp_path):
    def babbles(asked):
        first = asked.body["messages"][-1]["content"].find("a long answer")
        right, wrong = (
            ("A", "B") if first < asked.body["messages"][-1]["content"].find("short") else ("B", "A")
        )
        return Likely({right: 0.2, wrong: 0.1}) if "logprobs" in asked.body else "I think that it depends."

    with serving(babbles) as server:
        pairs = lines(tmp_path / "pairs.jsonl", [{"prompt": "How?", "responses": ["short", "a long answer"]}])
        found = judge(server, rubric="pairwise")
        said = run_cli("data", "prefer", found, pairs, "-o", tmp_path / "words.jsonl")
        again = ["--set", "verifier.judge.verdict=logprobs"]
        chances = run_cli("data", "prefer", found, pairs, "-o", tmp_path / "chances.jsonl", *again)
    assert said.code == 0
    assert said.out.startswith("1 unparsable")
    assert " ".join(again) in said.out
    assert chances.code == 0, chances.err
    assert "note" not in chances.out
    [record] = [json.loads(line) for line in (tmp_path / "chances.jsonl").read_text().splitlines()]
    assert record["chosen"] == "a long answer"
    assert record["margin"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("command", "options", "record", "what"),
    [
        ("revise", {"rubric": "pairwise"}, {"prompt": "How?"}, "there is no constitution"),
        ("prefer", {"rubric": "pointwise"}, {"prompt": "How?", "responses": ["a", "b"]}, "pairwise rubric"),
        ("prefer", {"rubric": "pairwise"}, {"prompt": "How?", "responses": ["a"]}, "responses"),
        ("prefer", {"rubric": "pairwse"}, {"prompt": "How?", "responses": ["a", "b"]}, "pairwse"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(run_cli, judge, tmp_path, command, options, record, what):
    with serving(lambda asked: "A") as server:
        data = lines(tmp_path / "data.jsonl", [record])
        said = run_cli("data", command, judge(server, **options), data, "--out", tmp_path / "out.jsonl")
    assert said.code == 2
    assert what in said.err
    assert len(said.err.strip().splitlines()) == 1


def test_a_file_that_is_there_is_not_overwritten(run_cli, judge, tmp_path):
    with serving(lambda asked: "A") as server:
        data = lines(tmp_path / "data.jsonl", [{"prompt": "How?", "responses": ["a", "b"]}])
        (tmp_path / "out.jsonl").write_text("mine\n")
        found = judge(server, rubric="pairwise")
        said = run_cli("data", "prefer", found, data, "--out", tmp_path / "out.jsonl")
    assert said.code == 2
    assert (tmp_path / "out.jsonl").read_text() == "mine\n"
