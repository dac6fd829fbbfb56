"""Both loops learn, say what they do under documented names, and are fixed by their seed."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.base.kinds import kinds
from posttrain.methods.table import METHODS
from posttrain.testing import repeatable

OTHERS = {name for name, line in METHODS.items() if line.method.asks & {"teacher", "states"}}
ONLINE = [name for name, line in METHODS.items() if line.loop == "online" and name not in {*OTHERS, "es"}]
DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_clock(run: Path) -> list[dict]:
    return repeatable(run / "metrics.jsonl")


OWN: dict[str, dict] = {
    "expert_iteration": {"optim": {"lr": 0.01}, "run": {"updates": 20}},
    "ppo_penalty": {"steps": {"epochs": 2}, "optim": {"lr": 0.02}},
    "trpo_penalty": {"steps": {"epochs": 2}},
    "trpo": {"optim": None, "trust": {"max_kl": 0.1}, "run": {"updates": 18}},
    "trpo_gae": {"optim": None, "trust": {"max_kl": 0.1}, "run": {"updates": 18}},
    "klq": {"optim": {"lr": 0.02}, "critic": {"lr": 0.02}, "run": {"updates": 20}},
    "remax": {"run": {"updates": 18}},
}
"""What a method needs besides: another rate, or more updates."""


@pytest.fixture
def digits(online, write, shallow, tmp_path):
    """digits(method, ...) -> a recipe whose one right answer is a digit that is drawn now and then."""

    def make(method: str, **over):
        (tmp_path / "ask.jsonl").write_text(
            "".join(json.dumps({"prompt": f"{n}?", "answer": "0"}) + "\n" for n in range(8))
        )
        tables = {
            "model": {"path": str(shallow)},
            "method": {"name": method},
            "task": {"arithmetic": None, "data": {"path": str(tmp_path / "ask.jsonl")}},
            "verifier": {"number": {"where": "last"}},
            "sampling": {"max_new_tokens": 2},
            "rollout": {"groups": 4, "group_size": 16},
            "optim": {"lr": 0.025},
            "run": {"updates": 12},
            "eval": {"limit": 0},
            "checkpoint": {"every": 0},
        }
        return write(online, tables | over | OWN.get(method, {}))

    return make


@pytest.mark.parametrize("method", ONLINE)
@pytest.mark.sample("ppo", "grpo", "expert_iteration", "online_dpo")
def test_every_online_method_learns_to_give_the_one_right_answer(run_cli, digits, tmp_path, method):
    said = run_cli("train", digits(method), "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 0, said.err
    rewards = [line["reward/mean"] for line in lines(tmp_path / "run")]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    print(method, [round(r, 2) for r in rewards])
    assert first < 0.1
    assert last > 0.6
    assert all(line["lag/max"] == 0 for line in lines(tmp_path / "run"))


def test_supervised_loss_falls_on_what_is_learnt_and_on_what_is_held_out(run_cli, offline, write, tmp_path):
    over = {"run": {"updates": 40}, "eval": {"every": 10}, "optim": {"lr": 0.01}, "checkpoint": {"every": 0}}
    said = run_cli("train", write(offline, over), "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 0, said.err
    out = lines(tmp_path / "run")
    assert [line["update"] for line in out if "eval/loss" in line] == [0, 10, 20, 30, 40]
    loss = [line["loss"] for line in out[1:]]
    assert loss[0] > 4.0
    assert sum(loss[-5:]) / 5 < 1.2
    held_out = [line["eval/loss"] for line in out if "eval/loss" in line]
    assert held_out[-1] < held_out[0] / 2
    for line in out:
        if "eval/loss" in line:
            assert line["eval/perplexity"] == pytest.approx(2.718281828 ** line["eval/loss"])


def test_the_seed_fixes_every_number_and_another_seed_changes_them(run_cli, online, write, able, tmp_path):
    runs = {}
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        recipe = write(online, {"model": {"path": str(able)}, "run": {"seed": seed}})
        assert run_cli("train", recipe, "--run-dir", tmp_path / name, "--quiet").code == 0
        runs[name] = without_clock(tmp_path / name)
    assert runs["one"] == runs["again"]
    assert runs["one"] != runs["other"]
    one, again = (tmp_path / n / "checkpoints" / "step_000004" for n in ("one", "again"))
    for file in ("model/model.safetensors", "resume/optimizer.safetensors"):
        assert (one / file).read_bytes() == (again / file).read_bytes()


def test_evaluation_is_greedy_on_tasks_that_are_never_trained(run_cli, online, write, able, tmp_path):
    recipe = write(online, {"model": {"path": str(able)}, "eval": {"every": 2}})
    run = tmp_path / "run"
    assert run_cli("train", recipe, "--run-dir", run, "--quiet").code == 0
    assert [line["update"] for line in lines(run) if "eval/accuracy" in line] == [0, 2, 4]
    tasks = {}
    for file in (run / "samples").glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        tasks.setdefault(file.stem.startswith("eval"), set()).update(row["task"] for row in rows)
        if file.stem.startswith("eval"):
            right = sum(row["label"] == "right" for row in rows) / len(rows)
            [line] = [x for x in lines(run) if x["update"] == int(file.stem[-6:])]
            assert line["eval/accuracy"] == right
            assert len(rows) == 6
    assert not tasks[True] & tasks[False]


@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 2}}], ids=["whole", "lora"])
@pytest.mark.sample("whole")
def test_a_policy_may_be_held_to_another_model_than_its_start(
    run_cli, online, write, able, make_model, tmp_path, lora
):
    """In the first update the KL is that of the start from the model that is named."""
    plain = {"model": {"path": str(able)}, "method": {"kl_in_loss": 0.1}, "run": {"updates": 1}} | lora
    found = {}
    for name, path in (("itself", able), ("another", make_model(seed=5)), ("unsaid", None)):
        recipe = write(online, plain | ({"reference": {"path": str(path)}} if path else {}), name)
        assert run_cli("train", recipe, "--run-dir", tmp_path / name, "--quiet").code == 0
        found[name] = lines(tmp_path / name)[-1]["kl/ref"]
    assert found["itself"] == found["unsaid"] == pytest.approx(0, abs=1e-6)
    assert found["another"] > 0.1


def documented() -> dict[str, str]:
    """Names of the table in docs/metrics.md, with their units."""
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+?) \|", DOCS.read_text(), re.MULTILINE)
    return {name: unit for name, unit in rows if name not in kinds("trackers")}


def page_name(metric: str) -> str:
    """Under which the page on metrics has it: what is counted, bounded or held out is told once."""
    name = re.sub("^verdict/.*", "verdict/<label>", metric)
    name = re.sub(r"^pass@\d+", "pass@<k>", name)
    name = re.sub("^eval/search/.*", "eval/search/<metric>", name)
    name = re.sub(r"^lag/\d+", "lag/<n>", name)
    name = re.sub(r"^samplers/\d+/", "samplers/<n>/", name)
    name = re.sub(r"^curriculum/bucket_\d+", "curriculum/bucket_<n>", name)
    name = re.sub("accuracy_margin_.*", "accuracy_margin_<bounds>", name)
    return re.sub("^eval/(?=rewards/|logp/|score/|entropy)", "", name)


@pytest.fixture
def judged(offline, write, tmp_path):
    """judged(method) -> a recipe of that method, on answers that were compared, or judged one by one."""
    asked = [{"prompt": f"{n} + 1?", "id": str(n)} for n in range(6)]
    sides = [{"chosen": "7", "rejected": "4 or 5"}, {"chosen": "6 or 7", "rejected": "3"}]
    records = {
        "rankings": [a | sides[int(a["id"]) % 2] for a in asked],
        "labels": [a | {"completion": a["id"], "label": int(a["id"]) % 2} for a in asked],
    }

    def make(method: str):
        data = tmp_path / f"{method}.jsonl"
        rows = records[METHODS[method].learns]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        over = {
            "method": {"name": method},
            "task": {"arithmetic": None, "data": {"path": str(data)}, "held_out": {"path": str(data)}},
            "batch": {"batch_size": 4},
            "run": {"updates": 2},
        }
        return write(offline, over, method)

    return make


def test_every_metric_is_documented_and_every_documented_one_exists(
    run_cli, online, offline, write, able, judged, tmp_path, monkeypatch
):
    monkeypatch.setattr("posttrain.loop.loop.peak_tflops", lambda device: 1e3)  # as of a known GPU
    everything = {
        "model": {"path": str(able)},
        "method": {"kl_in_loss": 0.1},
        "steps": {"epochs": 2, "minibatches": 2},
        "rollout": {"select": "varied"},
        "eval": {"every": 1},
        "track": {"sinks": ["tensorboard"]},
    }
    plain = {"model": {"path": str(able)}, "run": {"updates": 2}, "checkpoint": {"every": 0}}
    others = {
        "critic": {
            "method": {"name": "ppo", "correction": "token_truncated", "running_scale": 0.5},
            "rollout": {"replay": 1},
            "critic": {"warmup": 1},
        },
        "masked": {"method": {"name": "grpo", "off_policy_mask": 0.1}},
        "filtered": {"method": {"name": "grpo", "filter": "top_entropy", "entropy_target": 1.0}},
        "controlled": {"method": {"name": "ppo_penalty"}, "steps": {"epochs": 2}},
        "running": {"method": {"name": "reinforce_running"}},
        "band": {"curriculum": {"kind": "band"}},
        "bandit": {
            "curriculum": {"kind": "bandit"},
            "task": {"arithmetic": {"high": 12}},
        },
        "trees": {
            "method": {"name": "expert_iteration"},
            "search": {"moves": 4, "width": 2},
            "rollout": {"select": "all"},
        },
        "natural": {"method": {"name": "trpo"}, "optim": None},
        "ahead": {"async": {"max_lag": 1, "place": "here"}, "method": {"correction": "token_truncated"}},
    }
    runs = [("online", write(online, everything, "online")), ("offline", write(offline, {}, "offline"))]
    runs += [(name, write(online, plain | over, name)) for name, over in others.items()]
    runs += [(m, judged(m)) for m in ("dpo", "kto", "reward", "reward_regression", "reward_classification")]
    (tmp_path / "text.jsonl").write_text('{"text": "1 + 2 = 3"}\n' * 4)
    text = {"path": [str(tmp_path / "text.jsonl")]}
    task = {"arithmetic": None, "text": text, "held_out_text": text}
    runs.append(("text", write(offline, {"method": {"name": "pretrain"}, "task": task}, "text")))
    seen = set()
    for name, recipe in runs:
        said = run_cli("train", recipe, "--run-dir", tmp_path / name, "--quiet")
        assert said.code == 0, said.err
        for line in lines(tmp_path / name):
            seen |= set(line)
            for key, value in line.items():
                unit = documented().get(page_name(key), "")
                if unit == "0–1":
                    assert 0 <= value <= 1.0001, key
    names = {page_name(name) for name in seen}
    assert sorted(names - set(documented())) == []
    # Those of ranks are in tests/loop/test_ranks_runs.py, those of tools in tests/envs/test_chat_tools.py,
    # those of parts and probes in tests/loop/test_hacking_metrics.py, of populations in test_evolution.py,
    # of greedy answers in test_greedy.py, of turns in test_turn_states.py, of answers that were cut in
    # test_truncated.py, and of observations in tests/learner/test_learner_observations.py.
    elsewhere = ("seat/", "ranks/", "tools/", "eval/tools/", "agent/", "eval/agent/")
    elsewhere += ("part/", "audit/", "agreement/", "evolution/", "greedy/", "turns/", "observation/")
    elsewhere += ("select/truncated", "probe/")
    assert sorted(name for name in set(documented()) - names if not name.startswith(elsewhere)) == []


def test_rollouts_hold_what_a_critic_expected_where_there_is_one(run_cli, online, write, able, tmp_path):
    for method in ("ppo", "grpo"):
        over = {"model": {"path": str(able)}, "method": {"name": method}, "run": {"updates": 2}}
        run = tmp_path / method
        assert run_cli("train", write(online, over, method), "--run-dir", run, "--quiet").code == 0
        rows = {
            file.stem: [json.loads(line) for line in file.read_text().splitlines()]
            for file in (run / "samples").glob("*.jsonl")
        }
        trained = [row for name in ("000001", "000002") for row in rows[name]]
        if method == "grpo":
            assert not any("value" in row for row in trained)
            continue
        assert all(len(row["value"]) == len(row["pieces"]) for row in trained)
        assert len({v for row in rows["000002"] for v in row["value"]}) > 1, "the head has learnt something"
        assert not any("value" in row for row in rows["eval_000000"])


def test_time_is_accounted_for(run_cli, online, write, tmp_path):
    """Without a known GPU there is no share of its peak."""
    assert run_cli("train", write(online), "--run-dir", tmp_path / "run", "--quiet").code == 0
    out = lines(tmp_path / "run")
    for line in out:
        phases = sum(v for k, v in line.items() if k.startswith("time/") and k != "time/total")
        assert line["time/total"] == pytest.approx(phases)
    seconds = [line["seconds"] for line in out]
    assert seconds == sorted(seconds)
    assert sum(line["time/total"] for line in out) <= seconds[-1] + 0.01
    for line in out[1:]:
        assert "speed/mfu" not in line
        drawn = line["length/mean"] * 12
        assert line["speed/sample_tokens"] == pytest.approx(drawn / line["time/sample"])


def test_offline_q_learning_prefers_what_was_worth_more(run_cli, offline, write, shallow, tmp_path):
    """Every answer is in the data as often as the others; only their rewards differ."""
    rows = [
        {"prompt": f"{n}?", "completion": str(d), "reward": float(d == 7)}
        for n in range(4)
        for d in range(10)
    ]
    (tmp_path / "paid.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    over = {
        "model": {"path": str(shallow)},
        "method": {"name": "klq_offline", "beta": 0.2},
        "task": {"arithmetic": None, "data": {"path": str(tmp_path / "paid.jsonl")}},
        "batch": {"batch_size": 40},
        "run": {"updates": 60},
        "optim": {"lr": 0.01},
        "critic": {"lr": 0.01},
        "eval": {"limit": 0},
        "checkpoint": {"every": 0},
    }
    said = run_cli("train", write(offline, over), "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 0, said.err
    trained = tmp_path / "run" / "checkpoints" / "step_000060" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(trained), AutoTokenizer.from_pretrained(trained)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2?"}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    logp = model(**asked).logits[0, -1].detach().log_softmax(-1)
    digits = [float(logp[tokenizer.convert_tokens_to_ids(str(d))]) for d in range(10)]
    better = digits.pop(7) - sum(digits) / 9
    # π* lies at reward / beta = 5 nats from the reference, which thinks all digits about as likely.
    assert 3 < better < 7
    rows[3].pop("reward")
    (tmp_path / "paid.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = run_cli("train", write(offline, over), "--run-dir", tmp_path / "other", "--quiet")
    assert said.code == 2
    assert "paid.jsonl:4: klq_offline learns from rewards, and the answer of" in said.err
