"""Every offline method learns, is fixed by its seed, goes on exactly; and a reference is asked once."""

import importlib.util
import json
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from posttrain.loop.build import build_critic
from posttrain.methods.table import METHODS
from posttrain.models import pretrained
from posttrain.models.loading import quiet
from posttrain.plan.model_info import load_weights
from posttrain.plan.plan import plan_run
from posttrain.recipe import config
from posttrain.testing import repeatable
from posttrain.verifiers.model.scorer import Scorer

LEARNT, HELD_OUT = "abcdefgh", "ijkl"
"""Questions."""
OFFLINE = [name for name, line in METHODS.items() if line.loop == "offline"]

RECORDS: dict[str, Callable[[str], list[dict[str, Any]]]] = {
    "text": lambda q: [{"text": f"{q}?7"}],
    "answers": lambda q: [
        {"prompt": f"{q}?", "completion": "7", "reward": 1.0},
        {"prompt": f"{q}?", "completion": "3", "reward": 0.0},
    ],
    "rankings": lambda q: [{"prompt": f"{q}?", "chosen": "7", "rejected": "3"}],
    "labels": lambda q: [{"prompt": f"{q}?", "chosen": "7", "rejected": "3"}],
    "steps": lambda q: [
        {"prompt": f"{q}?", "steps": ["7", "3"], "labels": [1, 0]},
        {"prompt": f"{q}?", "steps": ["3", "7"], "labels": [0, None]},
        {"prompt": f"{q}?", "steps": ["7"], "labels": [True]},
    ],
}
"""One question of each kind of data: 7 is the better answer, or the right step."""

OWN: dict[str, dict[str, Any]] = {
    "pretrain": {"optim": {"lr": 0.02}},
    "sft": {"optim": {"lr": 0.02}},
    "ipo": {"run": {"updates": 25}},
    "reward_regression": {"run": {"updates": 35}},
    "klq_offline": {"method": {"beta": 0.2}, "critic": {"lr": 0.02}, "run": {"updates": 25}},
}
"""What a method needs besides."""


def write_lines(file: Path, records: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


@pytest.fixture
def family(offline, shallow, write, tmp_path) -> Callable[..., Path]:
    """family(method, over) -> the recipe with which a method learns that 7 is better than 3."""

    def make(method: str, over: dict[str, Any] | None = None, name: str = "recipe") -> Path:
        learns = METHODS[method].learns
        files = [
            write_lines(tmp_path / f"{learns}-{asked}.jsonl", [r for q in asked for r in RECORDS[learns](q)])
            for asked in (LEARNT, HELD_OUT)
        ]
        if method == "reward_ranking":
            three = [{"prompt": f"{q}?", "responses": ["5", "7", "3"], "scores": [1, 2, 0]} for q in LEARNT]
            write_lines(Path(files[0]), three)
        if method == "reward_margin":
            for file, asked in zip(files, (LEARNT, HELD_OUT), strict=True):
                write_lines(Path(file), [r | {"margin": 1.0} for q in asked for r in RECORDS[learns](q)])
        if method in ("sft", "dft"):
            write_lines(Path(files[0]), [RECORDS["answers"](q)[0] for q in LEARNT])
        kinds = ("text", "held_out_text") if learns == "text" else ("data", "held_out")
        tables = {
            "model": {"path": str(shallow)},
            "method": {"name": method},
            "task": {"arithmetic": None} | {k: {"path": f} for k, f in zip(kinds, files, strict=True)},
            "optim": {"lr": 0.006},
            "run": {"updates": 14},
            "checkpoint": {"every": 0},
        }
        if "head" in METHODS[method].method.needs:
            tables |= {"critic": {"lr": 0.05}, "run": {"updates": 25}}
        recipe = write(offline, tables, name)
        for more in (OWN.get(method, {}), over or {}):
            recipe = write(config.read(recipe).tables, more, name)
        return recipe

    return make


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def numbers(run: Path) -> list[dict[str, Any]]:
    """The lines without what a clock says."""
    return repeatable(run / "metrics.jsonl")


def ended(run: Path) -> Path:
    """The newest checkpoint."""
    return max((run / "checkpoints").glob("step_*"))


def train(run_cli, recipe: Path, run: Path, *more: str) -> Path:
    said = run_cli("train", recipe, "--run-dir", run, "--quiet", *more)
    assert said.code == 0, said.err
    return run


# ---------------------------------------------------------------- what is learnt


def prompt(words: Any, question: str, learns: str) -> list[int]:
    if learns == "text":
        return [words.eos_token_id, *words(f"{question}?")["input_ids"]]
    asked = [{"role": "user", "content": f"{question}?"}]
    return list(words.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"])


@torch.no_grad()
def preferences(folder: Path, learns: str) -> list[float]:
    """log π(7) - log π(3) after each question that was held out."""
    words = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    seven, three = words.convert_tokens_to_ids(["7", "3"])
    rows = torch.tensor([prompt(words, q, learns) for q in HELD_OUT])
    last = model(rows).logits[:, -1]
    return (last[:, seven] - last[:, three]).tolist()


@torch.no_grad()
def scores(folder: Path, learns: str) -> list[list[float]]:
    """What a reward model gives 7, 5 and 3 as answers, or 7 and 3 as steps, to what was held out."""
    words = AutoTokenizer.from_pretrained(folder)
    if learns == "steps":
        with quiet():
            process = AutoModelForTokenClassification.from_pretrained(folder).eval()
        rows = [
            [*prompt(words, q, learns), *words(f"{step}\n\n")["input_ids"]] for q in HELD_OUT for step in "73"
        ]
        said = process(torch.tensor(rows)).logits[:, -1, 0].sigmoid()
        return said.view(len(HELD_OUT), 2).tolist()
    with quiet():
        model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    talks = [
        [{"role": "user", "content": f"{q}?"}, {"role": "assistant", "content": answer}]
        for q in HELD_OUT
        for answer in "753"
    ]
    rows = [words.apply_chat_template(talk, return_dict=True)["input_ids"] for talk in talks]
    return model(torch.tensor(rows)).logits[:, 0].view(len(HELD_OUT), 3).tolist()


@pytest.mark.parametrize("method", OFFLINE)
@pytest.mark.sample("sft", "klq_offline", "dpo", "kto", "reward")
def test_every_offline_method_learns_which_answer_is_better(run_cli, family, shallow, tmp_path, method):
    run = train(run_cli, family(method), tmp_path / "run")
    line, last = METHODS[method], lines(run)[-1]
    trained = ended(run) / "model"
    print(method, {k: round(v, 3) for k, v in last.items() if k.startswith("eval/")})
    if "head" not in line.method.needs:
        before, after = preferences(shallow, line.learns), preferences(trained, line.learns)
        gained = [b - a for a, b in zip(before, after, strict=True)]
        print([round(x, 2) for x in gained])
        assert min(gained) > 1.0
        if line.learns in ("rankings", "labels"):
            assert last["eval/rewards/accuracy"] == 1.0
            assert last["eval/rewards/margin"] > 0.0
        return
    said = scores(trained, line.learns)
    print([[round(x, 2) for x in each] for each in said])
    assert all(each[0] > each[-1] + 0.3 for each in said)
    if line.learns == "rankings":
        assert last["eval/accuracy"] == 1.0
        assert last["eval/pairs"] == len(HELD_OUT)
    elif method == "reward_regression":
        assert last["eval/score/error"] < 0.1
    else:
        assert last["eval/score/accuracy"] == 1.0
    if method == "reward_ranking":
        assert all(seven > five > three for seven, five, three in said)


def test_another_seed_is_another_run(run_cli, family, tmp_path):
    """That the same one is the same run is what an exact resume rests on; see below."""
    over = {"run": {"updates": 3}}
    one = train(run_cli, family("dpo", over | {"batch": {"batch_size": 3}}), tmp_path / "one")
    other = train(
        run_cli,
        family("dpo", {"run": {"updates": 3, "seed": 1}, "batch": {"batch_size": 3}}),
        tmp_path / "other",
    )
    assert numbers(one) != numbers(other)
    assert numbers(one)[0] == numbers(other)[0], "neither has learnt anything"


def test_what_an_update_is_about_is_counted(run_cli, family, tiny, tmp_path):
    """Answers of one character and their end; of a reward model whole conversations; never a probe."""
    question = len(prompt(AutoTokenizer.from_pretrained(tiny), "a", "rankings"))
    for method, length in (("dpo", 2), ("kto", 2), ("reward", question + 3), ("process_reward", None)):
        run = train(run_cli, family(method, {"run": {"updates": 1}}), tmp_path / method)
        line = lines(run)[-1]
        if length is not None:
            assert line["length/mean"] == length, method
        rows = 16 if METHODS[method].learns == "rankings" else 8
        assert line["tokens"] == round(line["length/mean"] * rows), method


# ---------------------------------------------------------------- going on

RESUMED: dict[str, dict[str, Any]] = {
    "dpo": {"lora": {"rank": 2}, "optim": {"lr": 0.02, "schedule": "linear"}},
    "orpo": {"steps": {"epochs": 2}, "checkpoint": {"every": 2}},
    "kto": {"steps": {"minibatches": 2}},
    "reward": {"steps": {"minibatches": 2}, "eval": {"every": 1}, "critic": {"lr": 0.01}},
    "process_reward": {"lora": {"rank": 2}},
}


@pytest.mark.parametrize("method", RESUMED)
@pytest.mark.sample("dpo", "process_reward")
def test_a_run_that_was_killed_ends_bit_for_bit_as_if_it_had_not_been(launcher, family, tmp_path, method):
    over = {"run": {"updates": 5}, "checkpoint": {"every": 1}, "batch": {"batch_size": 3}}
    recipe = family(method, over)
    recipe = family(method, config.read(recipe).tables | RESUMED[method])
    output, never, run = tmp_path / "out.txt", tmp_path / "never", tmp_path / "run"
    words = ["train", recipe, "--quiet", "--run-dir"]
    assert launcher.run(*words, never, output=output) == 0, output.read_text()
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    least = random.Random(seed).randint(0, 3)
    started = launcher.start(*words, run, output=output)
    started.until(lambda: (run / "metrics.jsonl").exists() and len(lines_there(run)) > least)
    started.kill()
    assert started.wait() == -signal.SIGKILL, "it was over before it could be killed"
    assert launcher.run(*words, run, "--resume", output=output) == 0, output.read_text()
    assert_same(run, never)


def lines_there(run: Path) -> list[str]:
    """The lines of metrics.jsonl that are whole."""
    return (run / "metrics.jsonl").read_text().split("\n")[:-1]


def assert_same(run: Path, other: Path) -> None:
    """Both ended with the same weights, moments and numbers."""
    files = {f.relative_to(ended(other)) for f in ended(other).rglob("*.safetensors")}
    assert len(files) >= 2
    for file in files:
        assert (ended(run) / file).read_bytes() == (ended(other) / file).read_bytes(), file
    assert numbers(run) == numbers(other)


# ---------------------------------------------------------------- the reference

REFERENCE = "reference.safetensors"
SHORT = {"run": {"updates": 4}, "batch": {"batch_size": 2}, "checkpoint": {"every": 1, "keep": 0}}
"""Two of the eight pairs are met in each update."""


@pytest.fixture
def loaded(monkeypatch) -> list[Path]:
    """The models whose weights were read, in order."""
    seen: list[Path] = []
    original = pretrained.load_model

    def load(path: Path, **options: Any) -> Any:
        seen.append(path)
        return original(path, **options)

    monkeypatch.setattr(pretrained, "load_model", load)
    return seen


def test_a_reference_that_stays_is_no_second_model_and_changes_nothing(run_cli, family, loaded, tmp_path):
    once = train(run_cli, family("dpo", SHORT), tmp_path / "once")
    assert len(loaded) == 1
    # A copy that would follow after more updates than there are is a copy that stays.
    live = SHORT | {"reference": {"refresh_every": 1000}}
    beside = train(run_cli, family("dpo", live), tmp_path / "beside")
    assert len(loaded) == 3
    assert (once / REFERENCE).exists()
    assert not (beside / REFERENCE).exists()
    ours, theirs = (load_file(ended(r) / "model" / "model.safetensors") for r in (once, beside))
    for name, weight in ours.items():
        # The two packed the reference's rows otherwise, and sums in another order round otherwise; AdamW
        # makes a step of its own size of any difference where a gradient is next to nothing.
        assert float((weight - theirs[name]).abs().mean()) < 1e-5, name
    for one, other in zip(numbers(once), numbers(beside), strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    assert numbers(once)[-1]["rewards/margin"] > 0.01


def test_it_is_scored_once_for_the_rows_that_the_run_meets_and_those_held_out(run_cli, family, tmp_path):
    short = SHORT | {"run": {"updates": 3}, "eval": {"limit": 3}}
    run = train(run_cli, family("dpo", short), tmp_path / "run")
    assert len(load_file(run / REFERENCE)["lengths"]) == 2 * (3 * 2 + 3)
    assert [line["time/reference"] > 0 for line in lines(run) if "time/reference" in line] == [True]
    assert "time/reference" in lines(run)[0]


@pytest.mark.parametrize("more", [{}, {"lora": {"rank": 2}, "optim": {"lr": 0.05}}], ids=["whole", "lora"])
@pytest.mark.sample("whole")
def test_a_resumed_run_finds_it_and_makes_it_anew_of_the_model_that_it_began_with(
    run_cli, family, tmp_path, more
):
    # As many tokens at once in either case, so that they are packed alike.
    recipe = family("dpo", SHORT | more | {"steps": {"microbatch_tokens": 4096}})
    whole = train(run_cli, recipe, tmp_path / "whole")
    held = load_file(whole / REFERENCE)
    for name, delete in (("found", False), ("again", True)):
        run = tmp_path / name
        shutil.copytree(whole, run)
        for step in (3, 4):
            shutil.rmtree(run / "checkpoints" / f"step_{step:06d}")
        before = (run / REFERENCE).stat().st_mtime_ns
        if delete:
            (run / REFERENCE).unlink()
        train(run_cli, recipe, run, "--resume")
        assert ((run / REFERENCE).stat().st_mtime_ns != before) == delete
        again = load_file(run / REFERENCE)
        assert again.keys() == held.keys()
        assert all(torch.equal(again[key], held[key]) for key in held), name
        assert_same(run, whole)


def test_a_reference_that_follows_every_update_leaves_no_margin(run_cli, family, tmp_path):
    follows = SHORT | {"reference": {"refresh_every": 1}}
    moved = lines(train(run_cli, family("dpo", follows), tmp_path / "follows"))[1:]
    stays = lines(train(run_cli, family("dpo", SHORT), tmp_path / "stays"))[1:]
    assert [line["rewards/margin"] for line in moved] == pytest.approx([0.0] * 4, abs=1e-6)
    assert stays[-1]["rewards/margin"] > 0.01
    assert [line["loss"] for line in moved] == pytest.approx([0.6931] * 4, abs=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 2}, "optim": {"lr": 0.05}}], ids=["whole", "lora"])
@pytest.mark.sample("lora-bfloat16")
def test_a_reference_may_be_another_model(run_cli, family, make_model, tmp_path, lora, dtype):
    """Its margin is there before the first step, is that of `posttrain data score`, and outlives a resume."""
    other, over = make_model(seed=5), SHORT | lora | {"method": {"beta": 0.5}, "model": {"dtype": dtype}}
    own = train(run_cli, family("dpo", over), tmp_path / "own")
    recipe = family("dpo", over | {"reference": {"path": str(other)}})
    run = train(run_cli, recipe, tmp_path / "run")
    assert lines(own)[1]["rewards/margin"] == pytest.approx(0, abs=1e-5)
    assert abs(lines(run)[1]["rewards/margin"]) > 0.01
    begun, data = config.read(recipe).tables["model"]["path"], config.read(recipe).tables["task"]["data"]
    named = run_cli("data", "score", begun, data["path"], "--reference", other, "--beta", "0.5", "--json")
    met = load_file(run / REFERENCE)
    theirs = [json.loads(line)["implicit"] for line in named.out.splitlines()]
    gaps = [a - b for a, b in zip(theirs[::2], theirs[1::2], strict=True)]
    assert min(gaps) < lines(run)[1]["rewards/margin"] < max(gaps)
    # Scoring the run takes its recipe's reference, not its start.
    known, told = (
        run_cli("data", "score", run, data["path"], *more, "--json").out
        for more in ((), ("--reference", other))
    )
    assert known == told != run_cli("data", "score", run, data["path"], "--reference", begun, "--json").out
    named, unsaid = (
        run_cli("data", "score", own, data["path"], *more, "--json").out
        for more in (("--reference", begun), ())
    )
    assert named == unsaid
    whole = shutil.copytree(run, tmp_path / "whole")
    for step in (3, 4):
        shutil.rmtree(run / "checkpoints" / f"step_{step:06d}")
    (run / REFERENCE).unlink()
    train(run_cli, recipe, run, "--resume")
    assert all(torch.equal(load_file(run / REFERENCE)[key], met[key]) for key in met)
    assert_same(run, whole)


# ---------------------------------------------------------------- what comes after a reward model


@pytest.mark.full
def test_a_policy_is_paid_by_the_least_of_several_reward_models(run_cli, family, online, write, tmp_path):
    names = ("judge-3", "judge-5")
    judges = [
        train(run_cli, family("reward", {"run": {"updates": int(name[-1])}}, name), tmp_path / name)
        for name in names
    ]
    paths = [str(ended(judge) / "model") for judge in judges]
    paid = {
        "verifier": {"number": None, "model": {"paths": paths, "ensemble": "min"}},
        "rollout": {"workers": 1},
    }
    run = train(run_cli, write(online, paid | {"run": {"updates": 1}}, "grpo"), tmp_path / "grpo")
    parts = {key: value for key, value in lines(run)[-1].items() if key.startswith("part/")}
    assert parts.keys() == {"part/model_1", "part/model_2", "part/std"}
    assert lines(run)[-1]["reward/mean"] <= min(parts[f"part/model_{k}"] for k in (1, 2)) + 1e-6


@pytest.mark.full
def test_the_curves_of_the_rlhf_recipe_are_drawn(run_cli, family, online, write, tmp_path):
    judge = train(run_cli, family("reward", {"run": {"updates": 1}}), tmp_path / "judge")
    asked = write_lines(tmp_path / "asked.jsonl", [{"prompt": f"{q}?"} for q in LEARNT])
    paid = {
        "verifier": {"number": None, "model": {"paths": [str(ended(judge) / "model")]}},
        "rollout": {"workers": 1},
    }
    task = {"task": {"arithmetic": None, "data": {"path": asked}}}
    run = train(run_cli, write(online, paid | task | {"run": {"updates": 2}}, "grpo"), tmp_path / "grpo")
    file = Path(__file__).parents[2] / "recipes" / "rlhf" / "curves.py"
    spec = importlib.util.spec_from_file_location("curves", file)
    curves = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(curves)
    found = curves.curve(run, Scorer(str(ended(judge) / "model"), "outcome", dtype="float32", device="cpu"))
    assert found["gold"] == pytest.approx(found["proxy"], abs=1e-5), "one model was both"
    assert len(found["gold"]) == 2


def test_a_critic_of_a_recipe_begins_with_the_head_of_its_reward_model(
    run_cli, family, online, write, tmp_path
):
    judge = ended(train(run_cli, family("reward"), tmp_path / "judge")) / "model"
    over = {"method": {"name": "ppo"}, "critic": {"kind": "own", "path": str(judge)}, "run": {"updates": 1}}
    recipe = write(online, over, "ppo")
    chosen = plan_run(config.read(recipe).recipe, lambda text: None)
    critic = build_critic(chosen.resolved, chosen.policy, load_weights(chosen.resolved.recipe, chosen.policy))
    held = load_file(judge / "model.safetensors")
    assert torch.equal(critic.head.weight, held["score.weight"])
    assert bool(critic.head.weight.any())
    body = dict(critic.body.named_parameters())
    assert torch.equal(body["model.layers.0.mlp.up_proj.weight"], held["model.layers.0.mlp.up_proj.weight"])
    train(run_cli, recipe, tmp_path / "ppo")
    on = family("reward", {"model": {"path": str(judge)}, "run": {"updates": 1}}, "on")
    assert lines(train(run_cli, on, tmp_path / "on"))[0]["eval/accuracy"] == 1.0, "it goes on from its head"
