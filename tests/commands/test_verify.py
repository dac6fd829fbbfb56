"""The command `posttrain verify`."""

import json

import pytest


@pytest.fixture
def files(tmp_path):
    def make(tasks: list[dict], responses: list[dict]):
        paths = tmp_path / "tasks.jsonl", tmp_path / "responses.jsonl"
        for path, records in zip(paths, (tasks, responses), strict=True):
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return paths

    return make


TASKS = [{"id": "a", "answer": "7"}, {"id": 2, "answer": 8.5}]
SAID = [
    {"id": "a", "response": "It is 7."},
    {"id": 2, "response": "8.5"},
    {"id": "a", "response": "8"},
    {"id": "a", "response": "no idea"},
]


def test_verdicts_come_in_the_order_of_the_responses_as_json_lines(run_cli, files):
    said = run_cli("verify", "number", *files(TASKS, SAID), "--json")
    assert said.code == 0, said.err
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert [set(line) for line in lines] == [{"id", "class", "score", "reason", "seconds"}] * 4
    assert [(x["id"], x["class"], x["score"]) for x in lines] == [
        ("a", "right", 1.0),
        ("2", "right", 1.0),
        ("a", "wrong", 0.0),
        ("a", "no_answer", 0.0),
    ]


def test_an_answer_is_the_text_that_training_makes_of_it(run_cli, files):
    tasks = [{"id": "a", "answer": 5.0}, {"id": "b", "answer": True}, {"id": "c", "answer": 0.5}]
    said = [{"id": "a", "response": "5"}, {"id": "b", "response": "true"}, {"id": "c", "response": "0.5"}]
    done = run_cli("verify", "exact", *files(tasks, said), "--json")
    assert done.code == 0, done.err
    assert [json.loads(line)["class"] for line in done.out.splitlines()] == ["right"] * 3


def test_a_table_is_judged_as_it_is_spelt(run_cli, tmp_path):
    tasks, said = tmp_path / "tasks.csv", tmp_path / "said.csv"
    tasks.write_text("id,answer\n1,4.50\n2,3\n")
    said.write_text("id,response\n1,4.50\n2,3\n")
    done = run_cli("verify", "exact", tasks, said, "--json")
    assert done.code == 0, done.err
    assert [json.loads(line)["class"] for line in done.out.splitlines()] == ["right"] * 2


def test_options_and_summary(run_cli, files):
    said = run_cli("verify", "number", *files(TASKS, SAID), "--set", "tolerance=2")
    assert said.code == 0, said.err
    assert said.out.splitlines()[2].startswith("a\tright\t1\t8 ≈ 7")
    assert "mean score 0.75" in said.err


def test_a_recipe_names_its_verifiers(run_cli, files, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[verifier.number]\nwhere = "tag"\n[verifier.format]\n[verifier.weights]\nformat = 0.5\n'
    )
    given = [{"id": "a", "response": "<think>x</think><answer>7</answer>"}]
    said = run_cli("verify", recipe, *files(TASKS, given), "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out)["score"] == 1.5


def test_a_function_judges_in_a_worker(run_cli, files, tmp_path):
    (tmp_path / "mine.py").write_text("def reward(response, answer):\n    return 1 / (len(response) - 8)\n")
    said = run_cli("verify", f"{tmp_path / 'mine.py'}:reward", *files(TASKS, SAID[:2]), "--json")
    assert said.code == 0, said.err
    first, second = (json.loads(line) for line in said.out.splitlines())
    assert (first["class"], first["score"]) == ("raised", None)
    assert second["score"] == pytest.approx(-0.2)


def test_a_task_that_cannot_be_judged_spares_the_others(run_cli, files):
    tasks = [{"id": "a", "answer": "seven"}, TASKS[1]]
    said = run_cli("verify", "number", *files(tasks, SAID), "--json")
    assert said.code == 0, said.err
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert [x["class"] for x in lines] == ["data_error", "right", "data_error", "data_error"]
    assert lines[0]["score"] is None
    assert "is not a number" in lines[0]["reason"]


def test_a_response_that_cannot_be_read_spares_the_others(run_cli, files):
    tasks, responses = files(TASKS, SAID)
    bad = [{"id": "a", "response": said} for said in ("7 \ud800", 7, None, ["7"])]
    with responses.open("ab") as file:
        file.write("".join(json.dumps(record) + "\n" for record in bad).encode())
        file.write(b'{"id": "a", "response": "7 \xff"}\n{"id": "a", "response": "7 \\ud83d\\ude00"}\n')
    said = run_cli("verify", "number", tasks, responses, "--json")
    assert said.code == 0, said.err
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert [x["class"] for x in lines[:4]] == ["right", "right", "wrong", "no_answer"]
    assert [(x["class"], x["score"]) for x in lines[4:9]] == [("unreadable", 0.0)] * 5
    assert [x["reason"] for x in lines[4:9]] == [
        "\\ud800 is half a character",
        "it is a number, not text",
        "it is null, not text",
        "it is a list, not text",
        "byte 0xff is not UTF-8",
    ]
    assert lines[9]["class"] == "right", "a whole pair is a character"


@pytest.mark.parametrize(
    ("task", "what"),
    [
        (b'{"id": "c", "answer": "7 \\ud800"}', "tasks.jsonl:3: \\ud800 is half of a surrogate pair"),
        (b'{"id": "c", "answer": "7 \xff"}', "tasks.jsonl:3: it is not UTF-8"),
    ],
)
def test_a_task_that_cannot_be_read_is_an_error(run_cli, files, task, what):
    tasks, responses = files(TASKS, SAID)
    with tasks.open("ab") as file:
        file.write(task)
    said = run_cli("verify", "number", tasks, responses)
    assert (said.code, what in said.err) == (2, True), said.err


def test_the_name_of_a_task_must_be_readable_in_a_response(run_cli, files):
    said = run_cli("verify", "number", *files(TASKS, [{"id": "a\ud800", "response": "7"}]))
    assert said.code == 2
    assert "responses.jsonl:1" in said.err
    assert len(said.err.strip().splitlines()) == 1


def test_the_responses_to_a_task_are_the_group_of_a_function(run_cli, files, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def longest(prompts, completions, **columns):\n"
        "    said = [c[0]['content'] if p != '1?' else c for p, c in zip(prompts, completions)]\n"
        "    return [len(s) == max(map(len, said)) for s in said]\n"
    )
    tasks = [{"id": "a", "prompt": [{"role": "user", "content": "7?"}]}, {"id": 2, "prompt": "1?"}]
    said = run_cli("verify", f"{tmp_path / 'mine.py'}:longest", *files(tasks, SAID), "--json")
    assert said.code == 0, said.err
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert [(x["id"], x["score"]) for x in lines] == [("a", 1.0), ("2", 1.0), ("a", 0.0), ("a", 0.0)]


@pytest.mark.parametrize(
    ("words", "tasks", "responses", "what"),
    [
        (["numbr"], TASKS, SAID, "there is no verifier 'numbr'; did you mean 'number'?"),
        (["gone/mine.py"], TASKS, SAID, "name the function: gone/mine.py:NAME"),
        (["number", "--source", "a"], TASKS, SAID, "--source: is of a run"),
        (["number", "--set", "tolerence=1"], TASKS, SAID, "did you mean 'tolerance'?"),
        (["number", "--set", "tolerance=-1"], TASKS, SAID, "tolerance must be 0 or more"),
        (["number"], [*TASKS, TASKS[0]], SAID, "tasks.jsonl:3: a second task is called 'a'"),
        (["number"], [{"answer": "7"}], SAID, "tasks.jsonl:1: there is no id"),
        (["number"], TASKS, [{"id": "b", "response": "7"}], "responses.jsonl:1: there is no task 'b'"),
        (["number"], TASKS, [{"id": "a", "reponse": "7"}], "did you mean 'reponse'?"),
        (["number"], TASKS, [], "the file has no records"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(run_cli, files, words, tasks, responses, what):
    said = run_cli("verify", words[0], *files(tasks, responses), *words[1:])
    assert said.code == 2
    assert what in said.err
    assert len(said.err.strip().splitlines()) == 1


# ---------------------------------------------------------------------- of a run


def test_a_run_is_judged_again_as_it_was_and_otherwise(run_cli, online, write, able, tmp_path) -> None:
    over = {"model": {"path": str(able)}, "run": {"updates": 2}, "eval": {"every": 2}}
    run = tmp_path / "run"
    assert run_cli("train", write(online, over), "--run-dir", run, "--quiet").code == 0
    same = run_cli("verify", run, run, "--json").json
    assert (same["changed"], same["changes"]) == (0, [])
    lines = [
        json.loads(line) for file in (run / "samples").iterdir() for line in file.read_text().splitlines()
    ]
    assert same["answers"] == len(lines)
    assert {line["score"] for line in lines} == {0.0, 1.0}, "both must be there for the test to see anything"
    assert same["mean_now"] == pytest.approx(sum(line["score"] for line in lines) / len(lines))

    verifier = tmp_path / "mine.py"
    verifier.write_text("def refuse(response):\n    return 0.0\n")
    other = run_cli("verify", f"{verifier}:refuse", run, "--update", 2, "--json").json
    of_update = [line for line in lines if line["update"] == 2]
    assert other["answers"] == len(of_update)
    right = [line for line in of_update if line["score"] == 1.0]
    lost = [change for change in other["changes"] if change["score_before"] == 1.0]
    assert len(lost) == len(right)
    assert sum(row["answers"] for row in other["classes"]) == len(of_update)
    responses = {"".join(line["pieces"]).replace("<|im_end|>", "") for line in right}
    assert {change["response"] for change in lost} == responses

    printed = run_cli("verify", f"{verifier}:refuse", run)
    assert f"of {len(lines)} verdicts changed" in printed.out
    assert run_cli("verify", "number", run, "--update", 7).code == 2
    assert run_cli("verify", "number", tmp_path / "nothing").code == 2


def test_a_run_without_its_data_is_judged_by_what_it_recorded(run_cli, online, write, able, tmp_path) -> None:
    data = tmp_path / "tasks.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in (2, 3, 4))
    )
    over = {
        "model": {"path": str(able)},
        "task": {"arithmetic": None, "data": {"path": str(data)}},
        "run": {"updates": 1},
        "eval": {"every": 0},
    }
    run = tmp_path / "run"
    made = run_cli("train", write(online, over), "--run-dir", run, "--quiet")
    assert made.code == 0, made.err
    data.unlink()
    again = run_cli("verify", "number", run, "--set", "where=last")
    assert again.code == 0, again.err
    assert "3 tasks known only by prompt and answer" in again.err
    assert "0 of 12 verdicts changed" in again.out
