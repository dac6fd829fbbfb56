"""The command `posttrain data score`: a policy's implicit rewards."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.learner import forward

PAIRS = [
    {"id": "a", "prompt": "1+1=", "chosen": "2", "rejected": "30"},
    {"id": "b", "prompt": "2+2=", "chosen": "4", "rejected": "5"},
]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return file


def by_transformers(path: Path, prompt: str, answer: str) -> float:
    """log π(answer and its end | prompt), by a plain forward pass of transformers."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    before = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    first, said = (
        tokenizer(t, add_special_tokens=False)["input_ids"] for t in (before, f"{answer}<|im_end|>")
    )
    with torch.no_grad():
        logp = model(torch.tensor([first + said])).logits[0].log_softmax(-1)
    return float(sum(logp[len(first) - 1 + t, token] for t, token in enumerate(said)))


def test_it_is_beta_times_the_log_ratio(
    run_cli: Callable[..., Any], pairs: Path, tiny: Path, make_model: Callable[..., Path]
) -> None:
    other = make_model(seed=5)
    said = run_cli("data", "score", tiny, pairs, "--reference", other, "--beta", "0.3", "--json")
    assert said.code == 0, said.err
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert [(x["id"], x["answer"], x["worth"]) for x in lines] == [
        ("a", 0, 1.0),
        ("a", 1, 0.0),
        ("b", 0, 1.0),
        ("b", 1, 0.0),
    ]
    for line, pair in zip(lines, [p for p in PAIRS for _ in range(2)], strict=True):
        answer = pair["chosen"] if line["answer"] == 0 else pair["rejected"]
        gap = by_transformers(tiny, pair["prompt"], answer) - by_transformers(other, pair["prompt"], answer)
        assert line["implicit"] == pytest.approx(0.3 * gap, abs=1e-4)


@pytest.mark.parametrize("killed", [1, 3])
@pytest.mark.sample("1")
def test_after_a_kill_it_goes_on_where_it_was(
    run_cli: Callable[..., Any],
    tiny: Path,
    make_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    killed: int,
) -> None:
    """Neither of the two models is asked twice for what it has said, and nothing is left behind."""
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("posttrain.loop.reference.KEEP_S", 0.0)
    many = tmp_path / "many.jsonl"
    records = [{"prompt": f"{n}+1=", "chosen": "2", "rejected": "30"} for n in range(100)]
    many.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = ("data", "score", tiny, many, "--reference", make_model(seed=5), "--json")
    calls, asks = [], forward.score_batch

    def counted(*args: Any) -> Any:
        if len(calls) == killed:
            raise KeyboardInterrupt
        calls.append(len(args[1]))
        return asks(*args)

    whole = run_cli(*command)
    assert (whole.code, len(whole.out.splitlines())) == (0, 200), whole.err
    monkeypatch.setattr(forward, "score_batch", counted)
    assert run_cli(*command).code != 0
    before, killed = sum(calls), -1
    again = run_cli(*command)
    assert (again.code, again.out) == (0, whole.out), again.err
    assert before > 0
    assert sum(calls) == 2 * 200
    assert not list((tmp_path / "cache").iterdir())


def test_a_run_knows_its_reference_and_its_beta(
    run_cli: Callable[..., Any],
    pairs: Path,
    offline: dict[str, Any],
    write: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Before any step the policy is its reference; after training on the pairs their order is right."""
    over = {
        "method": {"name": "dpo", "beta": 0.5},
        "task": {"arithmetic": None, "data": {"path": str(pairs)}},
        "batch": {"batch_size": 2},
        "run": {"updates": 6},
        "optim": {"lr": 0.01},
    }
    run = tmp_path / "run"
    said = run_cli("train", write(offline, over), "--run-dir", run, "--quiet")
    assert said.code == 0, said.err
    said = run_cli("data", "score", run, pairs, "--json")
    assert said.code == 0, said.err
    found = [json.loads(line)["implicit"] for line in said.out.splitlines()]
    assert found[0] > found[1]
    assert found[2] > found[3]
    said = run_cli(
        "data", "score", run, pairs, "--reference", run / "checkpoints" / "step_000006" / "model", "--json"
    )
    assert all(json.loads(line)["implicit"] == 0 for line in said.out.splitlines())
    said = run_cli("data", "score", run, pairs)
    assert "implicit/accuracy" in said.out
    assert "1.0000" in said.out


def test_a_run_is_scored_under_its_own_template_args(
    run_cli: Callable[..., Any],
    pairs: Path,
    offline: dict[str, Any],
    write: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """A variable of the template gives the scores of a template that spells its value."""
    template = "{% for m in messages %}VALUE{{ m['content'] }}<|im_end|>{% endfor %}"
    over = {
        "method": {"name": "dpo"},
        "task": {"arithmetic": None, "data": {"path": str(pairs)}},
        "batch": {"batch_size": 2},
        "run": {"updates": 2},
        "optim": {"lr": 0.01},
    }
    scores = []
    for name, model in {
        "variable": {
            "chat_template": template.replace("VALUE", "{{ mark }}"),
            "template_args": {"mark": "7"},
        },
        "spelled": {"chat_template": template.replace("VALUE", "7")},
    }.items():
        run = tmp_path / name
        said = run_cli("train", write(offline, over | {"model": model}), "--run-dir", run, "--quiet")
        assert said.code == 0, said.err
        said = run_cli("data", "score", run, pairs, "--json")
        assert said.code == 0, said.err
        scores.append([json.loads(line)["implicit"] for line in said.out.splitlines()])
    assert scores[0] == scores[1]
    assert any(scores[0])


def test_a_model_needs_a_reference_to_be_compared_with(
    run_cli: Callable[..., Any], pairs: Path, tiny: Path
) -> None:
    said = run_cli("data", "score", tiny, pairs)
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "--reference" in said.err


def test_data_without_answers_is_one_line(run_cli: Callable[..., Any], tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "none.jsonl"
    file.write_text('{"prompt": "1+1="}\n')
    said = run_cli("data", "score", tiny, file, "--reference", tiny)
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "none.jsonl:1" in said.err


START: dict[str, dict[str, Any]] = {
    "rounded": {"model": {"dtype": "bfloat16"}},
    "an adapter": {"model": {"dtype": "bfloat16"}, "lora": {"rank": 2}},
    "drawn at random": {
        "model": {"dtype": "bfloat16", "random_init": True},
        "run": {"updates": 1, "seed": 3},
    },
    "in full": {"model": {"dtype": "float32"}},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("start", START)
@pytest.mark.sample("*-float32", "an adapter-bfloat16")
def test_a_policy_that_learnt_nothing_has_an_implicit_reward_of_exactly_0(
    run_cli: Callable[..., Any],
    pairs: Path,
    offline: dict[str, Any],
    write: Callable[..., Path],
    tmp_path: Path,
    start: str,
    dtype: str,
) -> None:
    """Training in bfloat16 begins with rounded weights, and so does the reference that is scored against."""
    over = {
        "method": {"name": "dpo"},
        "task": {"arithmetic": None, "data": {"path": str(pairs)}},
        "batch": {"batch_size": 2},
        "run": {"updates": 1},
        "optim": {"lr": 0.0},
    }
    run = tmp_path / "run"
    said = run_cli("train", write(offline, over | START[start]), "--run-dir", run, "--quiet")
    assert said.code == 0, said.err
    said = run_cli("data", "score", run, pairs, "--json", "--dtype", dtype)
    assert said.code == 0, said.err
    assert [json.loads(line)["implicit"] for line in said.out.splitlines()] == [0.0] * 4


def test_a_reference_of_another_tokenizer_is_refused_and_a_narrow_one_bounds_answers(
    run_cli: Callable[..., Any], pairs: Path, tiny: Path, make_model: Callable[..., Path]
) -> None:
    said = run_cli("data", "score", tiny, pairs, "--reference", make_model(vocab_size=60))
    assert said.code == 2
    assert "--reference" in said.err
    assert "smaller vocabulary" in said.err
    narrow = make_model(max_position_embeddings=20, seed=3)
    said = run_cli("data", "score", tiny, pairs, "--reference", narrow)
    assert said.code == 2
    assert "20 tokens" in said.err
