"""Several sources of tasks in one run: how draws are dealt, and that each source stays what it is alone."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.curriculum.mixture import Mixture, WeightedSource
from posttrain.curriculum.stream import Stream
from posttrain.errors import UserError
from posttrain.models import checkpoint
from posttrain.plan.resolve import resolve_recipe
from posttrain.recipe import config
from posttrain.report.alarms import Evidence, findings
from posttrain.report.glossary import words
from posttrain.report.record import Curves, read

SUMS = {"arithmetic": {"low": 2, "high": 9, "held_out": 4, "template": "{a}+{b}="}}
MINUS = {"arithmetic": {"operators": ["-"], "low": 2, "high": 9, "held_out": 3, "template": "{a}-{b}="}}
Run = Callable[..., Path]


def mixture_of(weights: list[float], draws: list[int | None] | None = None) -> Mixture[int]:
    ends = draws or [None] * len(weights)
    streams = [Stream(range(place, 1000, len(weights)), seed=0) for place in range(len(weights))]
    parts = zip(weights, streams, ends, strict=True)
    return Mixture([WeightedSource(str(n), *part) for n, part in enumerate(parts)])


@pytest.mark.parametrize("seed", range(20))
def test_draws_follow_the_weights_from_the_start_and_over_any_window(seed):
    print(f"seed {seed}")
    dice = random.Random(seed)
    weights = [dice.choice([dice.random(), float(dice.randint(1, 9))]) for _ in range(dice.randint(2, 6))]
    mixture, total, steps = mixture_of(weights), sum(weights), 400
    counts = [[0] * len(weights)]
    for _ in range(steps):
        mixture.take()
        counts.append(list(mixture.counts))
    shares = [weight / total for weight in weights]
    errors = [[c - n * w for c, w in zip(row, shares, strict=True)] for n, row in enumerate(counts)]
    assert max(abs(error) for row in errors for error in row) < 1
    windows = [max(column) - min(column) for column in zip(*errors, strict=True)]
    assert max(windows) < (1 + 1e-9 if len(weights) == 2 else 2)


def test_a_source_that_ends_hands_its_share_on():
    mixture = mixture_of([2.0, 1.0, 1.0], [4, None, None])
    places = [mixture.take()[1] % 3 for _ in range(60)]
    assert places.count(0) == 4
    last = max(n for n, place in enumerate(places) if place == 0)
    rest = places[last + 1 :]
    assert abs(rest.count(1) - rest.count(2)) <= 1


def test_a_mixture_continues_from_its_state():
    whole, first = mixture_of([3.0, 1.5, 0.0], [7, None, None]), mixture_of([3.0, 1.5, 0.0], [7, None, None])
    expected = [whole.take() for _ in range(40)]
    taken = [first.take() for _ in range(17)]
    again = mixture_of([3.0, 1.5, 0.0], [7, None, None])
    again.restore(json.loads(json.dumps(first.state())))
    assert again.taken == 17
    assert taken + [again.take() for _ in range(23)] == expected


@pytest.fixture
def train(run_cli: Callable[..., Any], write: Callable[..., Path], tmp_path: Path) -> Run:
    """train(tables, name, words...) -> the run directory."""

    def run(tables: dict[str, Any], name: str, *words: object) -> Path:
        said = run_cli(
            "train", write(tables, name=name), "--run-dir", tmp_path / f"{name}-run", "--quiet", *words
        )
        assert said.code == 0, said.err
        return tmp_path / f"{name}-run"

    return run


def weights(run: Path) -> bytes:
    last, _ = checkpoint.newest(run / "checkpoints")
    assert last is not None
    return (last / "model" / "model.safetensors").read_bytes()


def test_with_weight_0_for_the_others_a_source_trains_as_it_does_alone(online, train):
    alone = online | {"task": {**SUMS, "name": "sums"}}
    both = online | {"task": [{**SUMS, "name": "sums"}, {**MINUS, "name": "minus", "weight": 0.0}]}
    one, mixed = train(alone, "one"), train(both, "mixed")
    assert weights(one) == weights(mixed)
    unnamed = online | {"task": SUMS}
    assert weights(train(unnamed, "unnamed")) == weights(one)
    series, single = read(mixed).metrics.series, read(one).metrics.series
    of_source = {name for name in series if name.startswith("task/sums/")} - {"task/sums/groups"}
    assert len(of_source) > 10
    for name in of_source:
        assert series[name] == series[name.removeprefix("task/sums/")] == single[name]
    assert set(series["eval/minus/accuracy"]) == {0, 4}
    assert series["eval/sums/accuracy"] == single["eval/accuracy"]
    assert set(words(series)) >= set(of_source) | {"eval/minus/accuracy"}


def test_sources_have_their_verifier_environment_and_limits_and_resume_exactly(online, train, tmp_path):
    tables = online | {
        "task": [
            {**SUMS, "name": "sums", "weight": 2.0, "max_new_tokens": 2, "verifier": {"number": {}}},
            {"guess": {"high": 4}, "games": {"train": 8, "held_out": 2}, "name": "game"},
        ],
        "verifier": {"regex": {"pattern": "x"}},
        "rollout": {"groups": 3, "group_size": 2},
        "run": {"updates": 4, "threads": 1},
    }
    whole = train(tables, "whole")
    series = read(whole).metrics.series
    assert list(series["task/sums/groups"].values()) == [2.0] * 4
    assert list(series["task/game/groups"].values()) == [1.0] * 4
    assert max(series["task/sums/length/max"].values()) <= 2
    assert {"eval/sums/accuracy", "eval/game/accuracy", "task/game/reward/mean"} <= series.keys()
    cut = tables | {"run": {"updates": 2, "threads": 1}}
    train(cut, "cut")
    (tmp_path / "cut.toml").unlink()
    assert weights(train(tables, "cut", "--resume")) == weights(whole)


@pytest.mark.full
@pytest.mark.parametrize("ahead", [{"place": "process"}, {"max_lag": 1, "pace": "steps"}], ids=str)
def test_samplers_elsewhere_and_ahead_play_a_mixture(ahead, online, train):
    tables = online | {
        "task": [{**SUMS, "name": "sums"}, {"guess": {}, "games": {"train": 8}, "name": "game"}],
        "rollout": {"groups": 2, "group_size": 2},
        "async": ahead,
        "method": {"name": "grpo", "correction": "token_truncated"},
    }
    series = read(train(tables, "run")).metrics.series
    assert list(series["task/sums/groups"].values()) == [1.0] * 4


@pytest.fixture
def two_files(tmp_path: Path) -> list[dict[str, Any]]:
    """Return two sources of preferences, of six and of four records."""
    sources = []
    for name, count in (("short", 6), ("long", 4)):
        file = tmp_path / f"{name}.jsonl"
        file.write_text(
            "".join(
                json.dumps(
                    {"prompt": f"{n}+1=", "chosen": str(n + 1) * (1 + (name == "long")), "rejected": "9"}
                )
                + "\n"
                for n in range(count)
            )
        )
        data = {"path": str(file)}
        sources.append({"name": name, "data": data, "held_out": data, "weight": float(count)})
    return sources


@pytest.mark.parametrize("method", ["sft", "dpo"])
@pytest.mark.sample("dpo")
def test_records_are_mixed_and_measured_by_name(method, offline, train, two_files):
    tables = offline | {"method": {"name": method}, "batch": {"batch_size": 5}, "eval": {"every": 1}}
    mixed = read(train(tables | {"task": two_files}, "mixed")).metrics.series
    metric = "loss" if method == "sft" else "rewards/accuracy"
    short, long = (mixed[f"eval/{name}/{metric}"] for name in ("short", "long"))
    assert short.keys() == long.keys() == mixed[f"eval/{metric}"].keys()
    if method == "dpo":  # a mean over pairs, of which 6 are short and 4 are long
        for update, value in mixed[f"eval/{metric}"].items():
            assert value == pytest.approx(0.6 * short[update] + 0.4 * long[update])
    off = [two_files[0], two_files[1] | {"weight": 0.0}]
    alone = train(tables | {"task": two_files[0]}, "alone")
    assert weights(train(tables | {"task": off}, "off")) == weights(alone)


def test_a_mixture_of_records_resumes_exactly(offline, train, two_files, tmp_path):
    tables = offline | {"task": two_files, "batch": {"batch_size": 3}, "checkpoint": {"every": 1}}
    whole = train(tables | {"run": {"updates": 4, "threads": 1}}, "whole")
    train(tables | {"run": {"updates": 2, "threads": 1}}, "cut")
    (tmp_path / "cut.toml").unlink()
    assert weights(train(tables | {"run": {"updates": 4, "threads": 1}}, "cut", "--resume")) == weights(whole)


def test_ids_that_two_sources_share_get_the_name_of_their_source(offline, online, two_files, tmp_path):
    same = [{"name": name, "data": {"path": str(tmp_path / "tasks.jsonl")}} for name in "ab"]
    (tmp_path / "tasks.jsonl").write_text('{"id": "x", "prompt": "1+1=", "answer": "2"}\n')
    resolved = resolve_recipe(config.from_tables(online | {"task": same}).recipe)
    assert [task.id for task in resolved.train] == ["a/x", "b/x"]
    assert [task.dataset for task in resolved.train] == ["a", "b"]


def test_a_fault_of_a_source_is_named_by_its_line_and_overrides_name_a_source(
    online, write, run_cli, tmp_path
):
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    mine = {"name": "mine", "data": {"path": str(file)}, "games": {"train": 3}}
    recipe = write(online | {"task": [{**SUMS, "name": "sums"}, mine]})
    line = recipe.read_text().splitlines().index("train = 3") + 1
    said = run_cli("validate", recipe)
    assert said.code == 2
    assert f"recipe.toml:{line - 1}: task.1.games: is never read" in said.err
    loaded = config.read(recipe, ["task.mine.games=", "task.mine.weight=2", "task.0.weight=0"])
    assert [source.weight for source in loaded.recipe.task] == [0.0, 2.0]
    for wrong in ("task.2.weight=1", "task.other.weight=1", "task.weight=1"):
        with pytest.raises(UserError, match=r"\[\[task\]\] has the tables sums, mine"):
            config.read(recipe, [wrong])


def test_an_alarm_that_only_one_source_rings_names_it():
    def curves(clipped: float) -> dict[int, float | None]:
        return dict.fromkeys(range(1, 12), clipped)

    series = {"length/clipped": curves(0.15), "task/a/length/clipped": curves(0.0)}
    broken = findings(Evidence(Curves(tuple(range(12)), series | {"task/b/length/clipped": curves(0.3)}), []))
    assert [(rule.name, finding.metric) for rule, finding in broken] == [
        ("Cut by the limit (b)", "task/b/length/clipped")
    ]


def test_a_program_gives_sources_as_a_list(tiny, tmp_path):
    sources = [{**SUMS, "name": "sums"}, {**MINUS, "name": "minus"}]
    run = posttrain.train(
        str(tiny),
        method="grpo",
        task=sources,
        reward="number",
        dir=str(tmp_path / "run"),
        updates=1,
        rollout={"groups": 2, "group_size": 2},
        sampling={"max_new_tokens": 2},
    )
    assert run.metrics[-1]["task/minus/groups"] == 1.0


def test_a_source_of_a_program_has_its_records_and_its_reward(tiny, tmp_path):
    def shouts(completions: list[str]) -> list[float]:
        return [float("!" in text) for text in completions]

    mine = {
        "name": "mine",
        "data": [{"prompt": "say:", "answer": "!"}],
        "verifier": {"function": [{"name": "shouts", "function": shouts}]},
    }
    recipe = posttrain.Recipe(str(tiny), task=[{**SUMS, "name": "sums"}, mine], reward="number")
    names = [part.verifier.name for part in resolve_recipe(recipe.settings).parts if part.verifier]
    assert names == ["number", "shouts"]
    with pytest.raises(UserError, match="give each source a held_out of its own"):
        recipe.with_held_out([{"prompt": "x", "answer": "y"}])


def test_a_source_is_found_by_its_name_before_its_number_and_by_the_keys_of_its_table(online, write):
    sums = {key: value for key, value in SUMS.items() if key != "name"}
    recipe = write(online | {"task": [{**sums, "name": "1"}, {**sums, "name": "0"}]})
    loaded = config.read(recipe, ["task.0.weight=3"]).recipe
    assert [(source.name, source.weight) for source in loaded.task] == [("1", 1.0), ("0", 3.0)]
    asked = write(online | {"eval": {"task": [{**SUMS, "name": "e"}]}})
    with pytest.raises(
        UserError, match=r"\[\[eval.task\]\] has the tables e; name one, as eval.task.e.limit"
    ):
        config.read(asked, ["eval.task.f.limit=2"])
    data = write(online | {"task": [{"name": "s", "data": {"path": "s.jsonl"}}]}, name="data")
    for key in ("task.data.path", "task.f.data.path"):
        with pytest.raises(UserError, match=r"name one, as task\.s\.data\.path$"):
            config.read(data, [f"{key}=x.jsonl"])
    empty = write(online | {"eval": {"task": []}}, name="empty")
    with pytest.raises(UserError, match=r"\[\[eval.task\]\] has no tables"):
        config.read(empty, ["eval.task.e.limit=2"])


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("checkpoint.best", "eval/acuracy", "did you mean 'eval/accuracy'"),
        ("checkpoint.best", "min eval/smus/accuracy", "did you mean 'sums'"),
        ("checkpoint.best", "reward/mean", "did you mean 'eval/reward/mean'|not measured by evaluations"),
        ("run.stop_when", "eval/smus/accuracy > 0.5", "did you mean 'sums'"),
        ("run.stop_when", "task/smus/reward/mean > 0.5", "did you mean 'sums'"),
    ],
)
def test_metrics_that_do_not_exist_are_refused(key, value, why, online, write, run_cli):
    tables = online | {"task": [{**SUMS, "name": "sums"}, {**SUMS, "name": "more"}]}
    said = run_cli("validate", write(tables), "--set", f"{key}={value}", "--set", "eval.every=1")
    assert said.code == 2
    assert re.search(why, said.err), said.err
    right = value.replace("acuracy", "accuracy").replace("smus", "sums").replace("reward/mean", "eval/reward")
    if "task/" not in value:
        right = right.replace("eval/eval", "eval")
    valid = run_cli("validate", write(tables), "--set", f"{key}={right}", "--set", "eval.every=1")
    assert (valid.code == 0) or "task/" in value, valid.err


def test_paths_of_a_recipe_are_of_its_folder_first_and_those_of_set_of_the_working_one(
    offline, write, tmp_path, monkeypatch
):
    folder = tmp_path / "recipes"
    folder.mkdir()
    for place, name in ((folder, "near"), (tmp_path, "far")):
        (place / "data.jsonl").write_text(f'{{"prompt": "{name}", "completion": "1"}}\n')
    (tmp_path / "other.jsonl").write_text("")
    recipe = write(offline | {"task": {"data": {"path": "data.jsonl"}}}).rename(folder / "recipe.toml")
    monkeypatch.chdir(tmp_path)
    assert config.read(recipe).recipe.source.data.path == str((folder / "data.jsonl").resolve())
    given = config.read(recipe, ["task.data.path=data.jsonl"]).recipe
    assert given.source.data.path == "data.jsonl"
    monkeypatch.chdir(folder)
    assert config.read(Path("recipe.toml")).recipe.source.data.path == "data.jsonl", "one and the same file"
