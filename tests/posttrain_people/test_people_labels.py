"""`posttrain label`: blind questions, labels that survive, data that the kernel reads, and the summary."""

import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from posttrain.data import Data, load_rankings, load_steps
from posttrain.types import UserError
from posttrain_people.labels import LabelLog, log_of, open_log, training_record
from posttrain_people.questions import ask, read_questions, share_of
from posttrain_people.server import LabelServer
from posttrain_people.summary import summarise

_spec = importlib.util.spec_from_file_location("people_conftest", Path(__file__).with_name("conftest.py"))
assert _spec
assert _spec.loader
_shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_shared)
answer, request, write_lines, RECORDS = _shared.answer, _shared.request, _shared.write_lines, _shared.RECORDS

Serve = Callable[..., LabelServer]
STEPPED = [
    {"prompt": "2 + 3 + 4?", "response": "2 + 3 = 5\n\n5 + 4 = 8\n\nSo 8."},
    {"prompt": "1 + 1?", "steps": ["1 + 1 = 2", "So 2."]},
]
RANKED = [{"prompt": f"{n}?", "answers": ["one", "two", "three", "one"]} for n in range(3)]


def label_all(server: LabelServer, choose: Callable[[dict[str, Any]], Any]) -> None:
    state = answer(server, "/state")
    while question := state["question"]:
        body = {"question": question["key"], "label": choose(question), "seconds": 1.5}
        state = answer(server, "/label", body)


def prefer_short(question: dict[str, Any]) -> int:
    lengths = [len(turns[0]["text"]) for turns in question["answers"]]
    return lengths.index(min(lengths))


# ------------------------------------------------------------------ questions


def test_pairs_of_a_prompt_come_in_rounds(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "data.jsonl", RANKED)
    questions = read_questions(source, "pairs", "\n\n", lambda line: None)
    assert [len(q.answers) for q in questions] == [3, 3, 3], "equal answers are one"
    asked = ask(questions, "pairs", seed=5)
    for start in (0, 3, 6):
        assert {q.messages[0]["content"] for q in asked[start : start + 3]} == {"0?", "1?", "2?"}
    assert len({q.key for q in asked}) == 9
    assert ask(questions, "pairs", seed=5) == asked
    assert ask(questions, "pairs", seed=6) != asked


def test_raters_share_questions_with_overlap(tmp_path: Path) -> None:
    records = [{"prompt": f"{n}?", "chosen": "a", "rejected": "b"} for n in range(600)]
    source = write_lines(tmp_path / "data.jsonl", records)
    questions = ask(read_questions(source, "pairs", "\n\n", lambda line: None), "pairs", 0)
    names = ["ann", "bob", "cid"]
    shares = {name: {q.key for q in share_of(questions, name, names, 2, 0)} for name in names}
    counts = Counter(key for keys in shares.values() for key in keys)
    assert set(counts.values()) == {2}
    assert len(counts) == 600
    for one, other in combinations(names, 2):
        assert 150 < len(shares[one] & shares[other]) < 250, "200 expected, deviation 11.5"


def test_nothing_to_judge_is_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "data.jsonl", [{"prompt": "a", "answers": ["b", " b "]}])
    with pytest.raises(UserError, match="nothing to judge with --mode pairs"):
        read_questions(source, "pairs", "\n\n", lambda line: None)
    with pytest.raises(UserError, match=r"data\.jsonl:1"):
        read_questions(write_lines(source, [{"prompt": "a"}]), "pairs", "\n\n", lambda line: None)


# ------------------------------------------------------------------ server and log


def test_the_page_does_not_learn_who_wrote_an_answer(answers: Path, serve: Serve) -> None:
    server = serve(answers)
    status, page = request(server, "/")
    assert status == 200
    assert "connect-src 'self'" in page
    _, state = request(server, "/state")
    for name in ("large", "small", '"order"', '"id"'):
        assert name not in page.split("<body")[1].split("<script")[0]
        assert name not in state


def test_positions_are_random_recorded_and_equal_after_a_restart(answers: Path, serve: Serve) -> None:
    first, again, other = serve(answers), serve(answers), serve(answers, rater="bob")
    orders = [tuple(first.order(q)) for q in first.questions.values()]
    assert {(0, 1), (1, 0)} == set(orders)
    assert orders == [tuple(again.order(q)) for q in again.questions.values()]
    assert orders != [tuple(other.order(q)) for q in other.questions.values()]
    label_all(first, prefer_short)
    first.log.read()
    for entry in first.log.standing.values():
        assert entry["sources"][entry["label"]] == "large", "whatever the position"
        assert entry["order"] == first.order(first.questions[entry["question"]])


def test_a_second_start_continues_and_undo_reaches_back(answers: Path, serve: Serve) -> None:
    first = serve(answers)
    state = answer(first, "/state")
    for _ in range(3):
        last = state["question"]["key"]
        state = answer(first, "/label", {"question": last, "label": "tie"})
    assert (state["done"], state["total"]) == (3, 10)
    first.close()
    second = serve(answers)
    assert answer(second, "/state") == state
    state = answer(second, "/undo", {})
    assert (state["done"], state["question"]["key"]) == (2, last)
    lines = [json.loads(line) for line in second.log.file.read_text().splitlines()]
    assert [line.get("undo", False) for line in lines] == [False, False, False, True]
    for _ in range(3):
        state = answer(second, "/undo", {})
    assert state["done"] == 0, "an undo without a label changes nothing"


def test_a_file_without_a_label_is_begun_again_and_one_with_text_is_not(tmp_path: Path) -> None:
    out = tmp_path / "labels.jsonl"
    out.touch()
    assert not open_log(out, "pairs").standing
    out.write_text("{}\n")
    log_of(out).unlink(missing_ok=True)
    with pytest.raises(UserError, match="is there already, without"):
        open_log(out, "pairs")


def test_a_torn_line_costs_itself_alone(answers: Path, serve: Serve) -> None:
    first = serve(answers)
    state = answer(first, "/state")
    state = answer(first, "/label", {"question": state["question"]["key"], "label": 0})
    with first.log.file.open("a") as file:
        file.write('{"rater": "ann", "quest')
    second = serve(answers)
    state = answer(second, "/label", {"question": answer(second, "/state")["question"]["key"], "label": 1})
    assert state["done"] == 2
    log = LabelLog(second.log.file)
    log.read()
    assert (len(log.standing), log.faulty) == (2, 1)


def test_two_raters_write_the_same_log_at_once(answers: Path, serve: Serve) -> None:
    ann, bob = serve(answers), serve(answers, rater="bob")
    label_all(ann, prefer_short)
    label_all(bob, prefer_short)
    bob.log.read()
    assert Counter(rater for rater, _ in bob.log.standing) == {"ann": 10, "bob": 10}
    assert [r["votes"] for r in map(json.loads, bob.out.read_text().splitlines())] == [[2, 0]] * 10


def test_other_sites_and_false_labels_are_refused(answers: Path, serve: Serve) -> None:
    server = serve(answers)
    key = answer(server, "/state")["question"]["key"]
    good = {"question": key, "label": 0}
    assert request(server, "/label", good, kind="text/plain")[0] == 415
    assert request(server, "/undo", {}, kind="application/x-www-form-urlencoded")[0] == 415
    assert request(server, "/label", good, host="example.org")[0] == 403
    assert request(server, "/state", host="example.org")[0] == 403
    for wrong in (2, -1, True, None, "x", [0], 0.5, {}):
        assert request(server, "/label", {"question": key, "label": wrong})[0] == 400, wrong
    assert request(server, "/label", {"question": "no such", "label": 0})[0] == 400
    assert request(server, "/label", [])[0] == 400
    assert not server.log.file.exists()
    assert request(server, "/label", good)[0] == 200


def test_a_label_that_is_not_on_disk_is_not_counted(answers: Path, serve: Serve) -> None:
    server = serve(answers)
    state = answer(server, "/state")
    server.log.file.mkdir()
    status, text = request(server, "/label", {"question": state["question"]["key"], "label": 0})
    assert status == 507
    assert "not saved" in text
    server.log.file.rmdir()
    assert answer(server, "/state") == state


# ------------------------------------------------------------------ training data


def validate(
    run_cli: Callable[..., Any], write: Callable[..., Path], offline: Any, method: str, data: Path
) -> None:
    over = {"method": {"name": method}, "task": {"arithmetic": None, "data": {"path": str(data)}}}
    result = run_cli("validate", write(offline, over))
    assert result.code == 0, result.err


def test_pairs_are_data_for_dpo_and_reward(answers: Path, serve: Serve, run_cli, write, offline) -> None:
    server = serve(answers)
    label_all(server, prefer_short)
    rankings = load_rankings(Data(path=str(server.out)))
    assert {r.answers[0] for r in rankings} == {str(2 * n) for n in range(10)}
    assert {tuple(r.messages[0].items()) for r in rankings} == {
        (("role", "user"), ("content", record["prompt"])) for record in RECORDS
    }
    for method in ("dpo", "reward"):
        validate(run_cli, write, offline, method, server.out)


def test_rankings_are_data_for_reward(tmp_path: Path, serve: Serve, run_cli, write, offline) -> None:
    server = serve(write_lines(tmp_path / "data.jsonl", RANKED), "rank")

    def alphabetical(question: dict[str, Any]) -> list[int]:
        texts = [turns[0]["text"] for turns in question["answers"]]
        return [sorted(texts).index(text) + 1 for text in texts]

    label_all(server, alphabetical)
    for ranking in load_rankings(Data(path=str(server.out))):
        order = sorted(zip(ranking.scores, ranking.answers, strict=True), reverse=True)
        assert [text for _, text in order] == ["one", "three", "two"]
    validate(run_cli, write, offline, "reward", server.out)


def test_steps_are_data_for_process_reward(tmp_path: Path, serve: Serve, run_cli, write, offline) -> None:
    server = serve(write_lines(tmp_path / "data.jsonl", STEPPED), "steps")
    label_all(server, lambda question: [1, *[0] * (len(question["steps"]) - 2), None])
    solutions = {s.messages[0]["content"]: s for s in load_steps(Data(path=str(server.out)))}
    assert solutions["2 + 3 + 4?"].steps == ("2 + 3 = 5", "5 + 4 = 8", "So 8.")
    assert solutions["2 + 3 + 4?"].labels == (1.0, 0.0, None)
    assert solutions["1 + 1?"].labels == (1.0, None)
    validate(run_cli, write, offline, "process_reward", server.out)


def test_votes_decide_and_ties_are_none(answers: Path) -> None:
    entry = {"question": "k", "id": "7", "mode": "pairs", "prompt": [], "answers": ["a", "b"]}

    def record(*labels: object) -> dict[str, Any] | None:
        return training_record([entry | {"label": label} for label in labels])

    for labels in ((0, 1), ("tie",), ("bad", "bad"), ("tie", 0, 1)):
        assert record(*labels) is None, labels
    majority = record(1, 1, 0, "tie")
    assert majority is not None
    assert (majority["chosen"], majority["rejected"], majority["votes"]) == ("b", "a", [2, 1])
    ranking = {**entry, "mode": "rank", "answers": ["a", "b", "c"]}
    labels = [[1, 2, 3], [2, 1, 3], "bad"]
    assert (training_record([ranking | {"label": x} for x in labels]) or {})["ranks"] == [1.5, 1.5, 3]
    assert training_record([ranking | {"label": "tie"}]) is None


# ------------------------------------------------------------------ summary and command


def test_the_summary_counts_habits_and_agreement(answers: Path, serve: Serve, run_cli) -> None:
    ann, bob = serve(answers), serve(answers, rater="bob")
    label_all(ann, prefer_short)
    assert run_cli("label", "--summary", ann.out).out.startswith("10 labels of 10 questions by 1 rater\n")
    keys = iter(range(100))
    # Bob takes the long answer twice, and always what stands first otherwise has no say.
    label_all(bob, lambda q: 1 - prefer_short(q) if next(keys) < 2 else prefer_short(q))
    bob.log.read()
    summary = summarise([*bob.log.standing.values()])
    assert (summary.labels, summary.questions, summary.measure, summary.shared) == (20, 10, "kappa", 10)
    assert summary.agreement is not None
    assert 0.2 < summary.agreement < 0.8
    assert summary.raters["ann"].seconds == 1.5
    printed = run_cli("label", "--summary", bob.out)
    assert printed.code == 0, printed.err
    assert f"Cohen's kappa {summary.agreement:.3f}, from 10 shared" in printed.out
    assert re.search(r"large\s+\d\.\d\d\s+\d\.\d\d", printed.out), printed.out
    as_json = json.loads(run_cli("label", "--summary", log_of(bob.out), "--json").out)
    assert as_json["strengths"]["reliability"]["ann"] == "inf", "no label of hers contradicts the order"


def test_the_side_that_stands_first_in_the_data_is_no_agreement_by_chance() -> None:
    # Both raters prefer `chosen` 38 times of 40: kappa on the sides as written would be near 0.
    entries = [
        {
            "rater": rater,
            "question": str(n),
            "mode": "pairs",
            "label": int(n == flipped),
            "order": [0, 1],
            "answers": [f"good {n}", f"bad {n}"],
            "sources": ["chosen", "rejected"],
        }
        for rater, flipped in (("ann", 3), ("bob", 4))
        for n in range(40)
    ]
    summary = summarise(entries)
    assert summary.agreement is not None
    assert summary.agreement > 0.85


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("--mode", "best"), "--mode"),
        (("--ratings", "2"), "--ratings"),
        (("--of", "bob", "--of", "cid"), "--of"),
        (("--of", "me", "--ratings", "2"), "--ratings"),
        (("--ensemble", "runs/one"), "--ensemble"),
        (("--mode", "steps", "--separator", ""), "--separator"),
    ],
)
def test_bad_options_are_one_line(words: tuple[str, ...], key: str, answers: Path, run_cli) -> None:
    result = run_cli("label", answers, "--out", answers.with_name("labels.jsonl"), *words)
    assert result.code == 2
    assert result.err.startswith(f"error: {key}"), result.err


def test_other_labels_are_not_overwritten(answers: Path, serve: Serve, run_cli) -> None:
    out = answers.with_name("other.jsonl")
    out.write_text("mine\n")
    assert run_cli("label", answers, "--out", out).code == 2
    assert out.read_text() == "mine\n"
    server = serve(answers)
    label_all(server, lambda question: "tie")
    result = run_cli("label", answers, "--out", server.out, "--mode", "rank")
    assert result.code == 2
    assert "has labels of --mode pairs" in result.err
    assert run_cli("label", "--summary", answers).code == 2


@pytest.mark.full
def test_the_command_serves_until_ctrl_c(answers: Path) -> None:
    out = answers.with_name("labels.jsonl")
    words = [sys.executable, "-m", "posttrain", "label", str(answers), "--out", str(out), "--rater", "ann"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as labelling:
        assert labelling.stdout is not None
        first = labelling.stdout.readline()
        assert re.match(r"http://127\.0\.0\.1:\d+/ asks ann, 0 of 10 labelled; Ctrl-C ends it", first), first
        labelling.send_signal(signal.SIGINT)
        rest, err = labelling.communicate(timeout=60)
    assert (labelling.returncode, rest) == (0, f"{out}: 0 of 10 labelled by ann, 0 records to train on\n"), (
        err
    )
