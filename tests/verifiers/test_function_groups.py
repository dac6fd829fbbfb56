"""Functions in TRL's form: a group as lists, None where one does not apply, several with weights."""

import json

import pytest

from posttrain.data import Data, load_tasks
from posttrain.recipe.verifier import read_verifier
from posttrain.run.hacking_metrics import hacking_metrics
from posttrain.types import Episode, Task, Trajectory, UserError, Verdict
from posttrain.verifiers.combine.combined import Combined, Part
from posttrain.verifiers.function import Function
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import NOT_APPLICABLE, Group, TrainerState

ASKED = Task(
    id="q1",
    messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 4?"}),
    answer="7",
    fields={"difficulty": 2},
)
SAID = ("7", "it is 7", "8")
GROUP = Group(
    task=ASKED, responses=SAID, tokens=((5, 1), (6, 6, 5, 1), (9, 1)), state=TrainerState(global_step=3)
)
LONGEST = "def f(completions, **columns):\n    most = max(map(len, completions))\n"
LONGEST += "    return [float(len(c) == most) for c in completions]"


@pytest.fixture
def told(user):
    """What a function of these parameters is given for a group, by name."""

    def ask(parameters: str, group: Group) -> dict:
        names = ", ".join(f"{name!r}: {name}" for name in parameters.replace("*", "").split(", "))
        text = "import json\ntold = {}\n" + f"def f({parameters}):\n    told.update({{{names}}})\n"
        verifier = Function(function=user(text + f"    return [1.0] * {len(group.responses)}"))
        assert [v.score for v in verifier.judge_group(group)] == [1.0] * len(group.responses)
        from posttrain.base.usercode import load_named

        return load_named(verifier.function.replace(":f", ":told"))

    return ask


def test_a_text_prompt_gives_texts_and_a_list_gives_messages(told):
    names = "prompts, completions, answer, difficulty, completion_ids, trainer_state"
    given = told(names, GROUP)
    assert given["prompts"] == ["3 + 4?"] * 3
    assert given["completions"] == list(SAID)
    assert (given["answer"], given["difficulty"]) == (["7"] * 3, [2] * 3)
    assert given["completion_ids"] == [[5, 1], [6, 6, 5, 1], [9, 1]]
    assert given["trainer_state"].global_step == 3
    spoken = Task(id="q1", messages=ASKED.messages, answer="7", conversational=True)
    given = told("prompts, completions", Group(task=spoken, responses=SAID))
    assert given["completions"] == [[{"role": "assistant", "content": said}] for said in SAID]
    assert given["prompts"] == [[dict(message) for message in ASKED.messages]] * 3
    given["prompts"][0].clear()
    assert given["prompts"][1], "each response has a conversation of its own"


def test_a_column_of_the_data_comes_before_what_is_called_the_same_here(told):
    mixed = Task(id="q", messages=ASKED.messages, fields={"task": "math", "messages": "none"})
    given = told("completions, task, messages", Group(task=mixed, responses=("a", "b")))
    assert (given["task"], given["messages"]) == (["math"] * 2, ["none"] * 2)


@pytest.mark.parametrize(
    ("record", "conversational"),
    [
        ({"prompt": "3 + 4?"}, False),
        ({"question": "3 + 4?", "tags": ["a"]}, False),
        ({"prompt": [{"role": "user", "content": "3 + 4?"}]}, True),
        ({"messages": [{"role": "user", "content": "3 + 4?"}]}, True),
        ({"conversations": [{"from": "human", "value": "3 + 4?"}]}, True),
    ],
)
def test_whether_data_are_conversations_is_told_from_the_records(tmp_path, record, conversational):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(record))
    [task] = load_tasks(Data(path=str(path)))
    assert task.conversational is conversational


@pytest.mark.parametrize(
    "body",
    [
        "def f(prompts, **columns): return [1.0] * len(columns['completions'])",
        "def f(completion_ids, **columns): return [1.0 for ids in completion_ids]",
        "def f(trainer_state, completions): return [1.0] * len(completions)",
    ],
)
def test_any_of_trls_names_makes_it_a_function_of_a_group(user, body):
    verifier = Function(function=user(body))
    assert verifier.grouped
    assert [v.score for v in verifier.judge_group(GROUP)] == [1.0] * 3


def test_tokens_that_nobody_knows_are_an_error_of_whoever_names_them(user):
    group = Group(task=ASKED, responses=SAID)
    named = Function(
        function=user("def f(completion_ids, **columns): return [len(i) for i in completion_ids]")
    )
    with pytest.raises(ValueError, match="completion_ids"):
        named.judge_group(group)
    assert [v.score for v in named.judge_group(Group(task=ASKED, responses=("",)))] == [0.0]
    other = Function(function=user("def f(completions, **c): return ['completion_ids' in c] * 3"))
    assert [v.score for v in other.judge_group(group)] == [0.0] * 3


def test_a_group_is_judged_together_wherever_it_is_judged(user):
    verifier = Function(function=user(LONGEST))
    alone = Function(function=user("def f(response): return len(response)"))
    for workers in (1, 3):
        with Pool(workers=workers, deadline_s=20.0) as pool:
            assert [v.score for v in pool.judge(verifier, [(ASKED, said) for said in SAID])] == [0, 1, 0]
            tickets = pool.submit_group(verifier, GROUP), pool.submit_group(alone, GROUP)
            arrived: dict[int, Verdict] = {}
            while len(arrived) < 6:
                arrived.update(pool.poll(5.0))
            assert [arrived[t].score for t in tickets[0]] == [0.0, 1.0, 0.0]
            assert [arrived[t].score for t in tickets[1]] == [1.0, 7.0, 1.0]


def test_responses_to_other_tasks_are_not_of_the_group_and_equal_ones_are_all_there(user):
    verifier = Function(
        function=user("def f(completions, **columns): return [len(completions)] * len(completions)")
    )
    other = Task(id="q2", messages=())
    pairs = [(ASKED, "a"), (other, "a"), (ASKED, "a"), (ASKED, "b")]
    with Pool(workers=2, deadline_s=20.0) as pool:
        assert [v.score for v in pool.judge(verifier, pairs)] == [3.0, 1.0, 3.0, 3.0]


def test_a_verdict_on_a_group_is_not_remembered(user):
    """The same response in another group, or at another step, may be worth another reward."""
    verifier = Function(
        function=user(
            "def f(completions, trainer_state): return [trainer_state.global_step] * len(completions)"
        )
    )
    with Pool(workers=1, deadline_s=20.0) as pool:
        for step in (0, 5):
            state = TrainerState(global_step=step)
            tickets = pool.submit_group(verifier, Group(task=ASKED, responses=("a",), state=state))
            arrived: dict[int, Verdict] = {}
            while len(arrived) < 1:
                arrived.update(pool.poll(5.0))
            assert arrived[tickets[0]].score == step


def test_what_it_draws_depends_on_the_group_and_not_on_the_worker(user):
    verifier = Function(
        function=user("import random\ndef f(completions, **c): return [random.random() for _ in completions]")
    )
    tasks = [Task(id=str(n), messages=()) for n in range(6)]
    drawn = []
    for workers, order in ((1, tasks), (3, tasks[::-1])):
        with Pool(workers=workers, deadline_s=20.0) as pool:
            verdicts = pool.judge(verifier, [(task, said) for task in order for said in SAID])
        scores = [verdict.score for verdict in verdicts]
        drawn.append({task.id: scores[3 * n : 3 * n + 3] for n, task in enumerate(order)})
    assert drawn[0] == drawn[1]
    assert len({score for scores in drawn[0].values() for score in scores}) == 18


@pytest.mark.parametrize(
    ("body", "label", "says"),
    [
        ("raise KeyError('unit')", "raised", "unit"),
        ("return [1.0]", "wrong_length", "1 scores were returned for 3 responses"),
        ("return 1.0", "not_a_number", "a list"),
        ("return None", "not_a_number", "a list"),
        ("import os; os._exit(7)", "died", "7"),
    ],
)
def test_a_function_that_breaks_on_a_group_fails_on_all_of_it(user, body, label, says):
    verifier = Function(function=user(f"def f(completions, **columns):\n    {body}"))
    with Pool(workers=1, deadline_s=20.0) as pool:
        verdicts = pool.judge(verifier, [(ASKED, said) for said in SAID])
    assert [(v.score, v.label) for v in verdicts] == [(None, label)] * 3
    assert all(says in v.reason for v in verdicts)


def test_one_entry_that_is_no_number_fails_alone(user):
    verifier = Function(function=user("def f(completions, **c): return [1.0, float('nan'), None]"))
    found = verifier.judge_group(GROUP)
    assert [(v.score, v.label) for v in found] == [
        (1.0, "scored"),
        (None, "not_a_number"),
        (None, NOT_APPLICABLE),
    ]


def test_one_response_has_a_form_of_its_own_for_which_none_is_no_score(user):
    verifier = Function(function=user("def f(response): return None"))
    assert not verifier.grouped
    assert verifier(ASKED, "x").label == "not_a_number"


# ---------------------------------------------------------------------- several


def several(user, *bodies: str, weights=None, how="sum") -> Combined:
    names = "abc"
    parts = tuple(
        Part(
            verifier=Function(function=user(f"def f(completions, **c): return {body}"), name=names[n]),
            weight=(weights or [1.0] * len(bodies))[n],
        )
        for n, body in enumerate(bodies)
    )
    return Combined(parts=parts, how=how)


def test_a_function_that_does_not_apply_is_left_out_of_its_sum(user):
    both = several(user, "[1.0, None, None]", "[2.0, 4.0, None]", weights=[1.0, 0.5])
    first, second, third = both.judge_group(GROUP)
    assert (first.score, dict(first.parts), first.label) == (2.0, {"a": 1.0, "b": 2.0}, "scored")
    assert (second.score, dict(second.parts)) == (2.0, {"b": 4.0})
    assert (third.score, third.label) == (None, NOT_APPLICABLE)
    assert "a: the function returned None; b: the function returned None" in third.reason


def test_a_part_that_only_records_does_not_make_the_whole_apply(user):
    both = several(user, "[None] * 3", "[2.0] * 3", weights=[1.0, 0.0])
    assert [(v.score, v.label) for v in both.judge_group(GROUP)] == [(None, NOT_APPLICABLE)] * 3


@pytest.mark.parametrize(("how", "score"), [("mean", 4.0), ("min", 4.0), ("product", 4.0), ("sum", 4.0)])
def test_what_is_left_out_is_not_there_in_any_formula(user, how, score):
    assert several(user, "[None] * 3", "[4.0] * 3", how=how).judge_group(GROUP)[0].score == score


def test_a_part_that_breaks_fails_the_whole_though_another_does_not_apply(user):
    both = several(user, "[None] * 3", "[float('nan'), 1.0, 1.0]")
    assert [(v.score, v.label) for v in both.judge_group(GROUP)] == [
        (None, "not_a_number"),
        (1.0, "scored"),
        (1.0, "scored"),
    ]


def test_each_function_sees_the_whole_group_beside_verifiers_of_one_response(user):
    one = Part(
        verifier=Function(function=user("def f(response): return len(response)"), name="one"), weight=0.1
    )
    both = Combined(parts=(one, Part(verifier=Function(function=user(LONGEST), name="longest"))))
    assert both.grouped
    with Pool(workers=2, deadline_s=20.0) as pool:
        verdicts = pool.judge(both, [(ASKED, said) for said in SAID])
    assert [v.score for v in verdicts] == pytest.approx([0.1, 1.7, 0.1])
    assert [dict(v.parts) for v in verdicts] == [
        {"one": 1.0, "longest": 0.0},
        {"one": 7.0, "longest": 1.0},
        {"one": 1.0, "longest": 0.0},
    ]


def test_metrics_of_a_part_are_about_those_it_applies_to(user):
    both = several(user, "[1.0, None, 3.0]", "[0.0, 1.0, 2.0]")
    episodes = [
        Episode(
            task=ASKED,
            sample=n,
            trajectory=Trajectory(
                tokens=[1, 2],
                sampled=[False, True],
                logp_gen=[0.0, -1.0],
                logp_policy=[0.0, -1.0],
                version=[0, 0],
                reward=[0.0, verdict.score or 0.0],
            ),
            verdict=verdict,
            response=SAID[n],
            stop="eos",
        )
        for n, verdict in enumerate(both.judge_group(GROUP))
    ]
    metrics = hacking_metrics([episodes])
    assert (metrics["part/a"], metrics["part/b"]) == (2.0, 1.0)


# ---------------------------------------------------------------------- recipes


def verifier_of(tmp_path, text: str):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return read_verifier(str(path))


def test_a_recipe_names_several_functions_and_weighs_them_by_name(user, tmp_path):
    names = user("def right(completions, **c): return [1.0] * len(completions)\n", "right"), user(LONGEST)
    text = "".join(f'[[verifier.function]]\nfunction = "{name}"\n' for name in names)
    found = verifier_of(tmp_path, f"{text}[verifier.weights]\nright = 2.0\nf = 0.5\n")
    assert [(part.verifier.name, part.weight) for part in found.parts] == [("right", 2.0), ("f", 0.5)]
    assert [v.score for v in found.judge_group(GROUP)] == [2.0, 2.5, 2.0]


def test_one_table_is_one_function_called_by_its_own_name_or_another(user, tmp_path):
    name = user("class Box:\n    @staticmethod\n    def inside(response): return 1\n", "Box.inside")
    assert verifier_of(tmp_path, f'[verifier.function]\nfunction = "{name}"\n').name == "inside"
    assert verifier_of(tmp_path, f'[verifier.function]\nfunction = "{name}"\nname = "mine"\n').name == "mine"


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ("[verifier.function]\nfunctoin = '{f}'\n", "recipe.toml:2: verifier.function.functoin: unknown key"),
        ("[[verifier.function]]\nfunction = '{f}'\n[[verifier.function]]\nfunction = '{f}'\n", "called 'f'"),
        (
            "[[verifier.function]]\nfunction = '{f}'\n[[verifier.function]]\nfunctoin = '{f}'\n",
            "recipe.toml:4: verifier.function.1.functoin: unknown key",
        ),
        (
            "[[verifier.function]]\nfunction = '{f}'\n\n[[verifier.function]]\nfunction = 'nothing.py:g'\n",
            "recipe.toml:5: verifier.function.1.function: nothing.py:g: there is no file",
        ),
        ("[verifier]\nfunction = '{f}'\n", "recipe.toml:2: verifier.function: "),
        ("[[verifier.function]]\nfunction = '{f}'\n[verifier.weights]\ng = 1.0\n", "'g' is not among"),
    ],
)
def test_a_mistake_among_several_is_named_with_its_line(user, tmp_path, tables, says):
    with pytest.raises(UserError) as error:
        verifier_of(tmp_path, tables.replace("{f}", user(LONGEST)))
    assert says in str(error.value)
