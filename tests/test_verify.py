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


@pytest.mark.parametrize(
    ("words", "tasks", "responses", "what"),
    [
        (["numbr"], TASKS, SAID, "there is no verifier 'numbr'; did you mean 'number'?"),
        (["number", "--set", "tolerence=1"], TASKS, SAID, "did you mean 'tolerance'?"),
        (["number", "--set", "tolerance=-1"], TASKS, SAID, "tolerance must be 0 or more"),
        (["number"], [*TASKS, TASKS[0]], SAID, "tasks.jsonl:3: a second task is called 'a'"),
        (["number"], [{"answer": "7"}], SAID, "tasks.jsonl:1: there is no id"),
        (["number"], TASKS, [{"id": "b", "response": "7"}], "responses.jsonl:1: there is no task 'b'"),
        (["number"], TASKS, [{"id": "a", "reponse": "7"}], "did you mean 'reponse'?"),
        (["number"], TASKS, [{"id": "a", "response": 7}], "it must be text"),
        (["number"], [{"id": "a", "answer": [7]}], SAID, "the answer is not text or a number"),
        (["number"], TASKS, [], "the file has no records"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(run_cli, files, words, tasks, responses, what):
    said = run_cli("verify", words[0], *files(tasks, responses), *words[1:])
    assert said.code == 2
    assert what in said.err
    assert len(said.err.strip().splitlines()) == 1
