"""posttrain from Python: whole programs on a tiny model, and what they must leave as it was."""

import gc
import inspect
import json
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import posttrain
from mathcheck.plugin.number import Number
from posttrain import Callback, Recipe, RunError, Sampling, Start, Task, Turn, UserError, Verdict
from posttrain.models.loading import quiet
from posttrain.report.terminal import NotebookTable

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
SMALL = {"sampling": {"max_new_tokens": 3}, "rollout": {"groups": 3, "group_size": 4, "workers": 1}}
EXACT = {"dtype": "float32", "device": "cpu"}


def digits(completions, **columns):
    """The share of digits, as TRL calls it."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def has_digit(response: str) -> float:
    """As posttrain calls it."""
    return float(any(c.isdigit() for c in response))


def turn(role, content):
    return {"role": role, "content": content}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Runs are left in the test's own directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(tiny):
    """The tiny model, computing in float32."""
    return {"path": str(tiny), **EXACT}


# ---------------------------------------------------------------------- programs


def test_grpo_with_a_function_and_a_dataset(model):
    threads = torch.get_num_threads()
    run = posttrain.train(
        model,
        method="grpo",
        data=datasets.Dataset.from_list(SUMS),
        reward=digits,
        updates=12,
        lr=0.01,
        sampling={"max_new_tokens": 4},
        rollout={"groups": 4, "group_size": 8},
    )
    rewards = run.metrics["reward/mean"]
    assert len(rewards) == 12
    assert sum(rewards[-3:]) / 3 > 0.2 + sum(rewards[:3]) / 3
    answers = run.sample("1+2=", n=2, max_new_tokens=5)
    assert len(answers) == 2
    assert answers != run.sample("1+2=", n=2, max_new_tokens=5, seed=1)
    assert run.path == Path("runs/grpo-001")
    assert list(run.metrics.to_pandas()["reward/mean"]) == rewards
    assert len(run.episodes()) == len(run.episodes(1)) == 32
    assert run.evaluate(data=SUMS[:4])["eval/accuracy"] >= 0
    page = run._repr_html_()
    assert page.startswith("<iframe srcdoc=")
    assert run.report().stat().st_size > 1000
    assert posttrain.load("runs/grpo-001").metrics == run.metrics
    assert torch.get_num_threads() == threads


@pytest.mark.full
def test_sft_then_dpo_then_a_reward_model_that_pays_ppo(model):
    chats = [{"messages": [turn("user", r["prompt"]), turn("assistant", r["answer"])]} for r in SUMS]
    pairs = [
        {"prompt": r["prompt"], "chosen": r["answer"], "rejected": str(int(r["answer"]) + 1)} for r in SUMS
    ]
    sft = posttrain.train(model, method="sft", data=chats, updates=20, lr=0.01, batch={"batch_size": 8})
    losses = sft.metrics["loss"]
    assert losses[-1] < losses[0] / 2
    dpo = posttrain.train(
        {"path": sft, **EXACT}, method="dpo", data=pairs, updates=8, lr=1e-3, batch={"batch_size": 8}
    )
    assert dpo.metrics["rewards/accuracy"][-1] > 0.5
    assert posttrain.load(dpo.path).recipe.settings.model.path == str(sft.model)
    judge = posttrain.train(
        {"path": sft, **EXACT}, method="reward", data=pairs, updates=2, lr=1e-3, batch={"batch_size": 8}
    )
    ppo = posttrain.train(
        {"path": sft, **EXACT},
        method="ppo",
        data=SUMS,
        reward=judge,
        updates=2,
        lr=1e-4,
        critic={"lr": 1e-3},
        verifier={"model": {"device": "cpu"}},
        **SMALL,
    )
    assert len(ppo.metrics["value/explained"]) == 2
    assert ppo.recipe.settings.verifier.model.paths == (str(judge.model),)

    def length(response):
        return len(response)

    parts = Recipe(sft.model, data=SUMS, reward=[digits, (length, 0.1)]).settings.verifier.build().parts
    assert [(p.verifier.name, p.weight) for p in parts] == [("digits", 1.0), ("length_2", 0.1)]
    named = Recipe(sft.model, method="ppo", data=SUMS, reward=str(judge.path))
    assert named.settings.verifier.model.paths == (str(judge.model),)


def test_a_reward_model_with_an_adapter_is_loaded_with_its_head(model):
    pairs = [{"prompt": r["prompt"], "chosen": r["answer"], "rejected": "x"} for r in SUMS]
    asked = {"updates": 1, "lora": {"rank": 2}, "batch": {"batch_size": 8}}
    run = posttrain.train(model, method="reward", data=pairs, **asked)
    heads = [AutoModelForSequenceClassification.from_pretrained(run.model).score.weight for _ in range(2)]
    assert torch.equal(*heads)  # one that is not in the files would be drawn each time
    assert heads[0].any()


class HigherLower:
    """A game of three turns."""

    trusted, max_turns = True, 3

    def start(self, task):
        return Start(state=(int(task.answer), 1), messages=task.messages)

    def reply(self, state, response):
        secret, turn = state
        said = "".join(c for c in response if c.isdigit())
        if said == str(secret) or turn == self.max_turns:
            score = float(said == str(secret))
            return Turn(
                state=state, done=True, verdict=Verdict(score=score, label="right" if score else "wrong")
            )
        hint = "higher" if said and int(said) < secret else "lower"
        return Turn(state=(secret, turn + 1), messages=({"role": "user", "content": hint},))


def test_an_environment_of_ones_own_stopped_by_a_callback(model):
    games = [{"prompt": "Guess.", "answer": str(n)} for n in range(10)]
    stop = Callback(on_update=lambda session, line: line["update"] < 2)
    run = posttrain.train(
        model, method="rloo", data=games, env=HigherLower(), updates=10, callbacks=[stop], **SMALL
    )
    assert len(run.metrics) == 2
    assert run.stopped == "on_update of a callback stopped the run after update 2"
    assert max(row["turns"] for row in run.episodes()) == 3
    again = posttrain.train(
        model, method="rloo", data=games, env=HigherLower(), updates=3, dir=run.path, resume=True, **SMALL
    )
    assert again.stopped is None
    assert [line["update"] for line in again.metrics] == [1, 2, 3]


def test_a_session_is_stepped_and_its_end_is_the_run_of_one_call(model):
    asked = {"data": SUMS, "reward": digits, "updates": 3, "lr": 0.01, **SMALL}
    with posttrain.Session(model, method="dr_grpo", dir="stepped", **asked) as s:
        while not s.done:
            groups = s.sample()
            assert len(groups) == 3
            s.update(groups)
            s.publish()
        s.save()
        curve = s.metrics["reward/mean"]
    run = posttrain.train(model, method="dr_grpo", dir="whole", show="none", **asked)
    assert run.metrics["reward/mean"] == curve
    one, other = (posttrain.load(name).model / "model.safetensors" for name in ("stepped", "whole"))
    assert one.read_bytes() == other.read_bytes()


# ---------------------------------------------------------------------- what may be given


def test_a_step_that_was_interrupted_is_told_of_with_keywords(model, monkeypatch):
    with posttrain.Session(model, data=SUMS, reward=digits, updates=2, dir="run", **SMALL) as s:
        s.step()
        s.save()

        def interrupted(batch):
            raise KeyboardInterrupt

        monkeypatch.setattr(s.learner, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            s.update(s.sample())
        with pytest.raises(RunError, match=r"^sample\(\): "):
            s.sample()


def bytes_of(run):
    return (posttrain.load(run).model / "model.safetensors").read_bytes()


def leave_while_sampling(s, monkeypatch):
    """Interrupts the session where its sampler waits."""

    def interrupted(timeout_s):
        raise KeyboardInterrupt

    monkeypatch.setattr(s._open.sampler, "poll", interrupted)
    s.sample()


def leave_with_groups(s, monkeypatch):
    s.sample()
    raise ZeroDivisionError


def leave_unpublished(s, monkeypatch):
    s.update(s.sample())


def leave_with_gradients(s, monkeypatch):
    s.forward_backward(s.sample())


FOUR = {"data": SUMS, "reward": digits, "updates": 4, "lr": 0.01, **SMALL}


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """The directory of a run of FOUR that nobody left."""
    place = tmp_path_factory.mktemp("whole")
    posttrain.train({"path": str(tiny), **EXACT}, dir=place, show="none", **FOUR)
    return place


@pytest.mark.parametrize(
    ("leave", "error", "kept"),
    [
        (leave_while_sampling, KeyboardInterrupt, 2),
        (leave_with_groups, ZeroDivisionError, 2),
        (leave_unpublished, None, 3),
        (leave_with_gradients, None, 2),
    ],
)
@pytest.mark.sample("leave_unpublished-*", "leave_with_gradients-*")
def test_a_session_that_is_left_saves_what_it_trained_and_goes_on_exactly(
    model, whole, monkeypatch, leave, error, kept
):
    def left():
        with posttrain.Session(model, dir="left", **FOUR) as s:
            for _ in range(2):
                s.update(s.sample())
                s.publish()
            leave(s, monkeypatch)
            raise error or RuntimeError

    with pytest.raises(error or RuntimeError) as ended:
        left()
    assert any(f"step_{kept:06d} is kept, go on with dir='left'" in note for note in ended.value.__notes__)
    with posttrain.Session(model, dir="left", resume=True, **FOUR) as s:
        assert s.update_count == kept
        s.run()
    assert posttrain.load("left").metrics["loss"] == posttrain.load(whole).metrics["loss"]
    assert bytes_of("left") == bytes_of(whole)


@pytest.mark.full
def test_a_session_that_nobody_closes_ends_with_its_program_in_silence(model):
    program = (
        "import posttrain\n"
        f"s = posttrain.Session({model!r}, data={SUMS!r}, reward='number', updates=2, **{SMALL!r})\n"
        "s.sample()\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stderr == ""


@pytest.mark.full
def test_a_session_saves_nothing_twice_and_nothing_that_was_cut(model, monkeypatch):
    with posttrain.Session(model, data=SUMS, reward=digits, updates=4, dir="one", **SMALL) as s:
        s.step()
        first = s.save()
        s.sample()
    assert [*first.parent.iterdir()] == [first]
    lost = pytest.warns(UserWarning, match="not saved, optimiser steps since the last checkpoint: 1;")
    with lost, posttrain.Session(model, data=SUMS, reward=digits, updates=4, dir="two", **SMALL) as s:
        s.step()

        def interrupted(batch):
            raise KeyboardInterrupt

        monkeypatch.setattr(s.learner, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            s.update(s.sample())
    assert not [*Path("two/checkpoints").glob("step_*")]
    asked = {"data": SUMS, "reward": digits, "updates": 4, "steps": {"minibatches": 2}, "lr": 0.01, **SMALL}
    lost = pytest.warns(UserWarning, match="since the last checkpoint: 3;")
    with lost, posttrain.Session(model, dir="three", **asked) as s:
        s.step()
        move, moves = s.learner._move, []

        def fails_second(*given):
            moves.append(given)
            if len(moves) == 2:
                raise RunError("sample", "no")
            return move(*given)

        s.learner._move = fails_second
        with pytest.raises(RunError, match=r"^sample: "):
            s.update(s.sample())
        assert len(moves) == 2
    assert not [*Path("three/checkpoints").glob("step_*")]


def test_save_after_a_sample_that_was_interrupted_keeps_what_came_before(model, monkeypatch):
    with posttrain.Session(model, data=SUMS, reward=digits, updates=4, dir="one", **SMALL) as s:
        s.step()
        with pytest.raises(KeyboardInterrupt):
            leave_while_sampling(s, monkeypatch)
        with pytest.raises(RunError, match=r"^sample\(\): "):
            s.sample()
        assert s.save().name == "step_000001"
        with pytest.raises(RunError, match=r"^save\(\): "):
            s.save()


def test_a_step_is_made_at_the_rate_that_is_asked_for(model):
    asked = {"data": SUMS, "reward": digits, "updates": 3, **SMALL}
    ends = []
    for lr, rate in ((0.02, None), (0.5, 0.02)):
        with posttrain.Session(model, method="rloo", lr=lr, dir=f"at-{lr}", **asked) as s:
            s.forward_backward(s.sample())
            with pytest.raises(ValueError, match="lr must be 0 or more"):
                s.optim_step(lr=-1.0)
            s.forward_backward(s.sample())
            assert s.optim_step(lr=rate)["lr"] == 0.02
            ends.append([p.detach().clone() for p in s.learner.model.parameters()])
    assert all(map(torch.equal, *ends))


def test_a_reward_of_two_functions_is_evaluated_with_its_parts(model):
    def long(response):
        return len(response) / 10

    run = posttrain.train(
        model, data=SUMS, held_out=SUMS[:5], reward=[(digits, 1.0), (long, 0.5)], updates=1, **SMALL
    )
    last = run.metrics.last
    whole = last["eval/part/digits"] + 0.5 * last["eval/part/long"]
    assert last["eval/reward"] == pytest.approx(whole)
    assert run.evaluate()["eval/part/long"] == pytest.approx(last["eval/part/long"])


def test_what_a_notebook_shows_is_short(model):
    with posttrain.Session(model, data=SUMS, reward=digits, updates=1, **SMALL) as s:
        groups = s.sample()
        assert repr(groups).startswith("<Groups of 4, 4, 4; rewards [[")
        assert groups[:2].rewards == groups.rewards[:2]
        update = s.update(groups)
        assert "tensor" not in repr(update) + repr(groups[0][0])
        s.publish()
        assert repr(s.metrics[:1]).startswith("<Metrics of 1 lines; .last: {'")


def test_runs_are_called_after_the_method_that_made_them(model):
    changed = posttrain.method("grpo", clip_low=0.1)
    own = replace(changed, title="a method of mine")
    for method, name in ((changed, "grpo-001"), (own, "own-001"), ("rloo", "rloo-001")):
        assert (
            posttrain.train(model, method=method, data=SUMS, reward=digits, updates=1, **SMALL).path.name
            == name
        )


def test_an_advantage_and_a_loss_of_ones_own_need_no_file(model):
    @posttrain.choice(compares="group")
    def quantile(returns, group, *, q: posttrain.Between(0, 1) = 0.75):
        out = torch.empty_like(returns)
        for g in group.unique():
            out[group == g] = returns[group == g] - returns[group == g].quantile(q)
        return out

    def soft_clip(log_ratio, advantage, *, width: posttrain.AtLeast(1e-3) = 0.2):
        return -(1 + width * torch.tanh((log_ratio.exp() - 1) / width)) * advantage

    mine = posttrain.method("grpo", credit=quantile, surrogate=soft_clip, q=0.5)
    asked = {"data": SUMS, "reward": digits, **SMALL}
    run = posttrain.train(model, method=mine, updates=2, dir="mine", show="none", **asked)
    assert len(run.metrics) == 2
    assert 'name = "memory:' in (run.path / "config.toml").read_text()
    same = posttrain.train(model, method=mine, updates=3, dir="mine", resume=True, show="none", **asked)
    whole = posttrain.train(model, method=mine, updates=3, dir="whole", show="none", **asked)
    assert same.metrics["loss"] == whole.metrics["loss"]
    other = posttrain.train(model, method="grpo", updates=2, dir="other", show="none", **asked)
    assert other.metrics["loss"] != run.metrics["loss"]
    with pytest.raises(UserError, match=r"^no\.toml: "):
        run.recipe.write("no.toml")
    with pytest.raises(UserError, match=r"^method\.q: "):
        posttrain.method("grpo", credit=quantile, q=2.0)


@pytest.mark.full
def test_a_method_of_a_file_goes_with_what_the_program_holds_and_is_resumed(model):
    Path("mine.py").write_text(
        "import posttrain\n"
        "def soft(log_ratio, advantage):\n    return -log_ratio.exp() * advantage\n"
        "METHOD = posttrain.method('rloo')\n"
    )
    asked = {"data": SUMS, "reward": has_digit, **SMALL}
    for method in ({"name": "grpo", "surrogate": "mine.py:soft"}, "mine.py:METHOD"):
        asked["dir"] = Path(f"own-{len(str(method))}")
        run = posttrain.train(model, method=method, updates=1, **asked)
        assert (run.path / "code" / "mine.py").is_file()
        again = posttrain.train(model, method=method, updates=2, resume=True, **asked)
        assert again.metrics["update"] == [0, 1, 2][-len(again.metrics["update"]) :]
        assert again.metrics.last["update"] == 2


def test_a_loss_that_is_no_number_a_token_is_refused(model):
    with posttrain.Session(model, data=SUMS, reward=has_digit, updates=2, **SMALL) as s:
        batch = s.batch(s.sample())
        with pytest.raises(RunError, match=r"^loss: "):
            s.forward_backward(batch, lambda out, b: -out.logp.mean())
        with pytest.raises(RunError, match=r"^loss: "):
            s.forward_backward(s.batch(s.sample()), lambda out, b: -b.logp_gen)


def test_a_loss_of_ones_own_sees_every_token_and_the_advantages_that_it_is_given(model):
    """A group whose rewards are all equal has advantages of 0: its method skips it, another loss must not."""
    with posttrain.Session(
        model, method="rloo", data=SUMS, reward=lambda response: 1.0, updates=2, **SMALL
    ) as s:
        batch = s.batch(s.sample())
        assert s.forward_backward(batch).metrics["loss"] == 0
        s.learner.forget_gradients()
        found = s.forward_backward(batch, lambda out, b: -out.logp)
        expected = -(found.logp * batch.mask).sum() / len(batch)  # rloo's mean is over answers
        assert found.metrics["loss"] == pytest.approx(float(expected), rel=1e-5)
        own = replace(batch, advantage=torch.full_like(batch.logp_gen, 5.0))
        seen = []
        s.forward_backward(own, lambda out, b: seen.append(b.advantage[b.mask]) or -out.logp * b.advantage)
        assert all((each == 5).all() for each in seen)
        assert seen
        s.optim_step()
        s.publish()


def test_a_session_says_what_is_wrong_with_how_it_is_driven(model):
    with posttrain.Session(model, data=SUMS, reward=has_digit, updates=3, dir="one", **SMALL) as s:
        with pytest.raises(UserError, match=r"^one: "):
            posttrain.Session(model, data=SUMS, reward=has_digit, updates=3, dir="one", resume=True, **SMALL)
        groups = s.sample()
        s.update(groups)
        s.publish()
        with pytest.raises(RunError, match=r"^update: "):
            s.update(groups)
    pairs = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}] * 4
    with posttrain.Session(model, method="dpo", data=pairs, updates=1) as s:
        rows = s.sample()
        for looked in (rows.to_pandas, lambda: rows.reward(lambda episode: 1.0)):
            with pytest.raises(TypeError, match="rows of data, not episodes"):
                looked()


def test_a_model_is_evaluated_without_a_run(model):
    found = posttrain.evaluate(model, data=SUMS[:6], reward=has_digit, sampling={"max_new_tokens": 2})
    assert found["eval/reward"] == found["eval/accuracy"] >= 0
    assert not Path("runs").exists()
    loaded = AutoModelForCausalLM.from_pretrained(model["path"]), AutoTokenizer.from_pretrained(model["path"])
    with pytest.raises(UserError, match=r"^model: "):
        posttrain.evaluate(loaded, data=SUMS, reward=digits)


def test_a_loaded_model_is_copied_and_left_as_it_was(tiny):
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    with pytest.raises(UserError, match=r"^model: "):
        Recipe((tokenizer, loaded), data=SUMS, reward=digits)
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    config = json.dumps(loaded.config.to_dict(), sort_keys=True)
    asked = {"data": SUMS, "reward": has_digit, "lr": 0.01, **SMALL}
    run = posttrain.train((loaded, tokenizer), updates=1, dir="run", **asked)
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.state_dict().items())
    assert json.dumps(loaded.config.to_dict(), sort_keys=True) == config
    assert loaded.config._attn_implementation != "posttrain"
    assert run.recipe.settings.model.dtype == "float32"
    trained = AutoModelForCausalLM.from_pretrained(run.model).state_dict()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trained.items())
    more = posttrain.train((loaded, tokenizer), updates=2, dir="run", resume=True, **asked)
    assert len(more.metrics["reward/mean"]) == 2
    with pytest.raises(UserError, match=r"^model: "):
        Recipe(loaded, data=SUMS, reward=has_digit)


@pytest.mark.full
def test_tasks_frames_and_several_weighted_rewards(model):
    tasks = [Task(id=str(n), messages=({"role": "user", "content": f"{n}?"},), answer="0") for n in range(4)]
    run = posttrain.train(
        model,
        data=tasks,
        held_out=datasets.Dataset.from_list(SUMS[:3]).to_pandas(),
        reward=[digits, (lambda response: 1.0, 0.5), (Number(where="last"), 0.0)],
        updates=1,
        **SMALL,
    )
    row = run.episodes()[0]
    assert set(row["parts"]) == {"digits", "reward", "number"}
    assert row["score"] == pytest.approx(row["parts"]["digits"] + 0.5)
    assert {r["task"] for r in run.episodes()} <= {"0", "1", "2", "3"}
    assert len(posttrain.train(model, method="sft", data=tasks, updates=1, batch={"batch_size": 2}).metrics)


def test_a_function_that_fails_shows_its_first_traceback_and_is_counted(model, capfd):
    def picky(response):
        return 1 / response.count("7") if response else 0.0

    with pytest.raises(posttrain.RunError, match=r"^judge: "):
        posttrain.train(
            model, data=SUMS, reward=lambda response: picky(response) if response else 0.0, **SMALL
        )
    said = capfd.readouterr().err
    assert said.count("Traceback") == 1
    assert 'return 1 / response.count("7")' in said


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"data": SUMS},
            r"verifier: no verifier or environment is configured; give reward=, as a function",
        ),
        ({"data": SUMS, "reward": lambda: 0}, r"has no place for a response"),
        ({"data": SUMS, "reward": 3}, r"reward: a int judges nothing"),
        ({"data": SUMS, "reward": [(digits, "1")]}, r"reward: a tuple .* or as \(reward, number\)"),
        ({"data": SUMS, "reward": digits, "method": "sft"}, r"reward= is never read: sft runs in"),
        ({"data": SUMS, "reward": digits, "show": "bar"}, r"^show: 'bar' is not one of auto, table"),
        ({"model": "sums.toml"}, r"^model: a recipe is not a model; posttrain.Session\(RECIPE\).run\(\)"),
        ({"data": [], "reward": digits}, r"data: there are no records"),
        ({"data": ["a"], "reward": digits}, r"data: an entry is of str"),
        ({"data": {"train": datasets.Dataset.from_list(SUMS)}, "reward": digits}, r"it has splits; take one"),
        ({"data": SUMS, "reward": digits, "optim": {"lrr": 1}}, r"^optim.lrr: unknown key 'lrr'; did you"),
        ({"data": SUMS, "reward": digits, "optimm": {}}, r"^optimm: unknown key 'optimm'"),
        ({"data": SUMS, "reward": digits, "optim": 3}, r"^optim: 3 is not a table"),
        ({"data": SUMS, "reward": digits, "upates": 3}, r"unknown keyword 'upates'; did you mean 'updates'"),
        ({"data": SUMS, "reward": digits, "learning_rate": 1e-3}, r"it is lr= here"),
        (
            {"data": SUMS, "reward": digits, "train_dataset": SUMS},
            r"it is task.data.path \(data= from Python\)",
        ),
        ({"data": SUMS, "reward": digits, "resume": "step_000002"}, r"resume: it continues from the newest"),
        (
            {"data": SUMS, "reward": digits, "callbacks": [type("T", (), {"on_step_end": print})()]},
            r"callbacks: a callback of transformers' Trainer has other arguments; posttrain.Callback",
        ),
        ({"data": SUMS, "reward": digits, "model": ("a", "b")}, r"^model: a str is not a model that can be"),
        ({"data": SUMS, "reward": "owner/"}, r"^verifier.model.paths: there is no directory 'owner/'"),
        (
            {"data": SUMS, "reward": digits, "task": {"tools": {"functions": [digits]}}},
            r"^task.tools.functions: a function is not plain data; name it as 'file.py:NAME'",
        ),
        ({"data": SUMS, "env": object()}, r"env: it is a object, which has no start\(task\)"),
        (
            {"data": SUMS, "reward": digits, "async_": {"place": "process"}},
            r"^async.place: samplers in .*; set it to 'thread', or put them into a file",
        ),
        ({"data": SUMS, "reward": digits, "updates": 0}, r"^run"),
        (
            {"data": SUMS, "reward": digits, "callbacks": print},
            r"a builtin_function_or_method is not a callback",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_keyword(model, asked, said):
    with pytest.raises(UserError, match=said):
        posttrain.train(**{"model": model, "show": "none"} | asked)
    assert not list(Path("runs").glob("*")) if Path("runs").exists() else True


# ---------------------------------------------------------------------- recipes


def test_a_recipe_goes_through_toml_without_loss(online, offline, write, tiny):
    for file in (write(online, name="a"), write(offline, {"lora": {"rank": 2}}, name="b")):
        read = Recipe.read(file)
        read.write("again.toml")
        assert Recipe.read("again.toml") == read
        assert Recipe.read("again.toml").settings == read.settings
    made = Recipe(
        tiny,
        data={"path": str(write(online, name="c").with_suffix(".jsonl")), "limit": 3},
        reward=["number", (Number, 1.0)][:1],
        updates=np.int64(7),
        seed=3,
        lr=np.float64(1e-5),
        sampling=Sampling(max_new_tokens=9, stop=("\n",)),
        rollout={"group_size": 5},
    )
    made.write("made.toml")
    assert Recipe.read("made.toml") == made
    changed = made.replace(lr=2e-5, **{"rollout.group_size": None})
    assert (changed.settings.optim.lr, changed.settings.rollout.group_size) == (2e-5, 8)
    assert made.settings.optim.lr == 1e-5
    with pytest.raises(UserError, match=r"^optim\.lr: "):
        made.replace(**{"optim.lr": "fast"})


def test_what_only_the_program_holds_is_not_written_and_how_to_save_it_is_said(model):
    recipe = Recipe(model, data=SUMS, reward=lambda response: 0.0)
    with pytest.raises(UserError, match=r"^no\.toml: "):
        recipe.write("no.toml")
    assert not Path("no.toml").exists()
    Path("mine.py").write_text("def brief(response):\n    return float(len(response) < 3)\n")
    sys.path.insert(0, str(Path.cwd()))
    try:
        import mine

        Path("data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in SUMS))
        Recipe(model, data="data.jsonl", reward=mine.brief).write("yes.toml")
    finally:
        sys.path.remove(str(Path.cwd()))
        sys.modules.pop("mine", None)
    [function] = Recipe.read("yes.toml").tables["verifier"]["function"]
    assert function == {"function": f"{Path.cwd() / 'mine.py'}:brief", "name": "brief"}


def test_a_run_is_resumed_with_the_records_it_began_with_and_no_others(model):
    asked = {"reward": digits, "dir": "run", "show": "none", **SMALL}
    run = posttrain.train(model, data=SUMS, updates=1, **asked)
    text = (run.path / "config.toml").read_text()
    assert 'path = "memory:25 records, ' in text
    assert 'function = "memory:digits"' in text
    with pytest.raises(UserError, match=r"^task: "):
        posttrain.train(model, data=SUMS[:-1], updates=2, resume=True, **asked)
    with pytest.raises(UserError, match=r"^run: "):
        posttrain.train(model, data=SUMS, updates=2, **asked)
    assert len(posttrain.train(model, data=SUMS, updates=2, resume=True, **asked).metrics) == 2
    with pytest.raises(UserError, match="'digits' was an object of the program that started the run"):
        posttrain.load("run").evaluate()
    assert len(posttrain.load("run").sample("1+1=", max_new_tokens=2)) == 1


# ---------------------------------------------------------------------- the process it runs in


def test_it_runs_in_a_thread_and_leaves_signals_threads_and_memory_as_they_were(model):
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    threads, found = torch.get_num_threads(), []

    def work(name):
        with posttrain.Session(model, data=SUMS, reward=digits, updates=1, dir=name, **SMALL) as s:
            found.append((weakref.ref(s.learner), s.run().metrics["reward/mean"], torch.get_num_threads()))

    each = [threading.Thread(target=partial(work, name)) for name in ("a", "b")]
    for thread in each:
        thread.start()
        thread.join(120)
    work("c")
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert {n for *_, n in found} == {threads}
    assert len({tuple(rewards) for _, rewards, _ in found}) == 1, "the same run three times"
    gc.collect()
    assert all(learner() is None for learner, *_ in found)


@pytest.mark.full
def test_a_run_is_the_same_while_another_thread_loads_models(model):
    """While transformers loads one, the process's default dtype is the model's: nobody may compute then."""
    done = threading.Event()

    def load():
        while not done.wait(0.001):
            with quiet():
                torch.set_default_dtype(torch.bfloat16)
                time.sleep(0.01)
                torch.set_default_dtype(torch.float32)

    def metrics(name):
        with posttrain.Session(model, data=SUMS, reward=digits, updates=2, dir=name, **SMALL) as s:
            lines = s.run().metrics
        return [
            {k: v for k, v in line.items() if k.split("/")[0] in ("reward", "loss", "kl")} for line in lines
        ]

    alone, beside = metrics("alone"), threading.Thread(target=load)
    beside.start()
    try:
        assert metrics("beside") == alone
    finally:
        done.set()
        beside.join()


def test_threads_that_are_asked_for_are_given_back(model):
    before = torch.get_num_threads()
    with posttrain.Session(
        model, data=SUMS, reward=digits, updates=1, run={"threads": before + 1}, **SMALL
    ) as s:
        assert torch.get_num_threads() == before + 1
        s.step()
    assert torch.get_num_threads() == before


def test_importing_it_costs_nothing_and_every_public_name_is_there_and_says_what_it_is():
    program = "import posttrain, sys; print('torch' in sys.modules, 'transformers' in sys.modules); "
    program += "import random as r; s = r.getstate(); posttrain.train; print(s == r.getstate())"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False", "False", "True"]
    for name in posttrain.__all__:
        thing = getattr(posttrain, name)
        assert thing.__doc__, name
        for own, member in vars(thing).items() if isinstance(thing, type) else ():
            if not own.startswith("_") and (callable(member) or isinstance(member, property | staticmethod)):
                assert inspect.getdoc(getattr(thing, own)) or member.__doc__, f"{name}.{own}"
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = posttrain.trian  # type: ignore[attr-defined]
    stub = (Path(posttrain.__file__).with_suffix(".pyi")).read_text()
    for name in posttrain.__all__:
        assert f"import {name} as {name}\n" in stub
        assert f'    "{name}",\n' in stub
    assert Path(posttrain.__file__).with_name("py.typed").exists()


# ---------------------------------------------------------------------- its page


@pytest.mark.full
def test_the_page_on_python_is_a_program_that_runs(tiny, capfd):
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 8
    Path("sums.jsonl").write_text("".join(json.dumps(r) + "\n" for r in SUMS))
    space: dict = {"__name__": "page"}
    for block in blocks:
        small = block.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(tiny))
        short = "" if "sampling=" in block else ", sampling={'max_new_tokens': 8}"
        small = re.sub(r"updates=\d+", f"updates=2{short}", small)
        exec(compile(small, "python.md", "exec"), space)
    assert len(space["curve"]) == len(space["both"].metrics["reward/mean"]) == 2
    assert space["stopped"].stopped is None
    assert "saved" in capfd.readouterr().out


def test_a_notebook_s_table_is_drawn_once_a_second_and_at_the_end():
    clock, drawn = [0.0], []
    table = NotebookTable(30, drawn.append, now=lambda: clock[0])
    for update in range(1, 31):
        table("sample", {"done": 1})
        table("update", {"update": update, "reward/mean": update / 30, "eval/accuracy": 0.5})
        clock[0] += 0.1
    assert len(drawn) == 3
    table.finish()
    assert "30 of 30 updates" in drawn[-1]
    assert "<td>1</td>" in drawn[-1]
    assert drawn[-1].count("<tr>") == 6, "a head and five lines"
    assert drawn[-1].count("<polyline") == 2


# ---------------------------------------------------------------------- what newcomers tried


def test_a_session_whose_updates_are_all_made_samples_no_more(model):
    with posttrain.Session(model, data=SUMS, reward=digits, updates=1, **SMALL) as s:
        s.step()
        assert s.done
        with pytest.raises(posttrain.RunError, match=r"^sample\(\): "):
            s.sample()
        s.evaluate()
        s.save()


def test_an_update_is_made_of_the_advantages_that_a_batch_brings(model):
    with posttrain.Session(model, data=SUMS, reward=lambda response: 1.0, updates=9, **SMALL) as s:
        batch = s.batch(s.sample())  # all rewards alike: of its own the method learns nothing
        mine = torch.where(batch.mask, 5.0, 0.0)
        for wrong, says in (
            (torch.ones(3), r"advantage has shape \[3\], and the columns of the batch have \[12, "),
            ([1.0], r"advantage has shape \[\]"),
            (mine / 0, r"an advantage of row \d+ that the batch brings is not finite"),
        ):
            with pytest.raises(ValueError, match=says):
                s.update(replace(batch, advantage=wrong))
        update = s.update(replace(batch, advantage=mine))
        assert update.batch.advantage.equal(mine)
        assert update.metrics["grad_norm"] > 0


def test_a_credit_that_is_not_finite_is_named(model):
    mine = posttrain.method("grpo", credit=lambda returns, group: returns / 0)
    with pytest.raises(posttrain.RunError, match=r"^advantages: "):
        posttrain.train(model, method=mine, data=SUMS, reward=has_digit, updates=1, show="none", **SMALL)


def test_gradients_beside_one_that_failed_are_given_up(model):
    with posttrain.Session(model, data=SUMS, reward=digits, updates=9, **SMALL) as s:
        groups = s.sample()
        s.forward_backward(groups)
        with pytest.raises(TypeError, match="a loss is a function") as failed:
            s.forward_backward(groups, "importance_sampling")
        assert failed.value.__notes__ == ["the gradients that were added are given up"]
        with pytest.raises(posttrain.RunError, match=r"^optim_step\(\): "):
            s.optim_step()
        with pytest.raises(posttrain.RunError, match=r"^save\(\): "):
            s.save()
        s.forward_backward(s.sample())
        s.optim_step()


def test_a_callback_that_raises_loses_no_update(model):
    def bad(session, line):
        raise KeyError("mine")

    told = posttrain.Callback(on_update=bad)
    asked = {"data": SUMS, "reward": digits, "updates": 3, "lr": 0.01, "dir": "run", **SMALL}
    with pytest.raises(posttrain.RunError, match=r"^unforeseen: "):
        posttrain.train(model, callbacks=told, show="none", **asked)
    run = posttrain.train(model, resume=True, show="none", **asked)
    whole = posttrain.train(model, show="none", **asked | {"dir": "whole"})
    assert run.metrics["loss"] == whole.metrics["loss"]


def test_a_run_that_goes_on_with_another_function_says_so(model):
    def worth(response):
        return 1.0

    asked = {"data": SUMS, "dir": "run", "show": "none", **SMALL}
    posttrain.train(model, reward=worth, updates=1, **asked)
    posttrain.train(model, reward=worth, updates=2, resume=True, **asked)

    def worth(response):
        return -1.0

    with pytest.warns(UserWarning, match="worth has changed since the run began"):
        posttrain.train(model, reward=worth, updates=3, resume=True, **asked)


def test_groups_that_a_program_changed_are_counted_as_they_are(model):
    with posttrain.Session(model, data=SUMS, reward=digits, updates=9, **SMALL) as s:
        groups = s.sample()
        mean = sum(map(sum, groups.rewards)) / 12
        s.update([groups[1], groups[2]])
        s.publish()
        now = s.metrics.last
        assert now["reward/mean"] == pytest.approx(mean, abs=1e-6), "of all that was sampled"
        assert (now["select/kept"], now["select/dropped"]) == (2, 1)
        with pytest.raises(ValueError, match="each has 1 that was judged: leave out whole groups"):
            s.update([group[:1] for group in s.sample()])


def test_what_is_no_reward_and_no_group_is_refused_in_words(model):
    with posttrain.Session(model, data=SUMS, reward=digits, updates=9, **SMALL) as s:
        groups = s.sample()
        for wrong, error, says in (
            ([1.0] * 12, TypeError, "takes a function of an episode"),
            (
                lambda episode: None,
                TypeError,
                "of at most 1e.15, and the function gave None",
            ),
            (
                lambda episode: "1",
                TypeError,
                "of at most 1e.15, and the function gave '1'",
            ),
            (lambda episode: float("nan"), ValueError, "the function gave nan"),
        ):
            with pytest.raises(error, match=says):
                groups.reward(wrong)
        for wrong, says in (("abc", "and not a str"), (groups[0], "and not a Episode in a list")):
            with pytest.raises(TypeError, match=says):
                s.update(wrong)
        with pytest.raises(AttributeError, match="cannot assign"):
            groups[0][0].reward = 1.0


def test_a_table_of_the_method_holds_no_functions(model):
    asked = {"data": SUMS, "reward": digits, "updates": 1, **SMALL}
    with pytest.raises(posttrain.UserError, match=r"^method\.surrogate: "):
        posttrain.Session(model, method={"name": "grpo", "surrogate": lambda r, a: -r * a}, **asked)
    with pytest.raises(posttrain.UserError, match=r"^method\.name: "):
        posttrain.Session(model, method="gpro", **asked)


def test_a_column_that_the_reward_waits_for_is_missed(model):
    def same(response, answer):
        return float(response == answer)

    asked = {"data": [{"prompt": "2+2=", "gold": "4"}] * 4, "reward": same, "updates": 1, **SMALL}
    with pytest.raises(posttrain.UserError, match=r"^data:1: "):
        posttrain.Session(model, **asked)
    with posttrain.Session(model, **asked, task={"data": {"columns": {"answer": "gold"}}}) as s:
        s.step()


def test_other_data_evaluate_a_run_whose_own_are_not_here(model):
    data = datasets.Dataset.from_list(SUMS)
    path = posttrain.train(model, data=data, reward="number", updates=1, dir="run", show="none", **SMALL).path
    assert posttrain.load(path).evaluate(data=SUMS[:3])["eval/length"] > 0
    with pytest.raises(posttrain.UserError, match=r"^optim: "):
        posttrain.train(model, data=data, reward="number", updates=2, dir=path, resume=True, lr=0.5, **SMALL)
    with pytest.raises(posttrain.UserError, match=r"^run: "):
        posttrain.train(model, data=data, reward="number", updates=2, dir=path, resume=True, seed=5, **SMALL)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"learning_rate": 1e-5}, "it is lr= here"),
        ({"reward_funcs": [digits]}, "it is reward= here"),
        ({"output_dir": "out"}, "it is dir= here"),
        ({"logging_steps": 1}, "leave it out: every update is logged"),
        ({"lora": {"lora_dropout": 0.1}}, "leave it out: adapters have no dropout"),
    ],
)
def test_keys_of_other_trainers_are_told_in_pythons_words(keys, says):
    with pytest.raises(posttrain.UserError, match=says):
        posttrain.Recipe("a", data=SUMS, **keys)
