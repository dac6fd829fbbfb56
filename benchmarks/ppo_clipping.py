"""PPO with many steps an update: without a bound, with clipping, with a fixed and an adaptive KL penalty.

The table of the PPO paper (arXiv:1707.06347, section 6.1) in kind, on a task small enough for ten seeds: a
Llama of 12 000 weights is shown one of 8 letters and is to answer with the 4 letters that belong to it. The
reward is the share of letters that are right; chance is 1/24, as the vocabulary has 16 letters and 8 tasks.
Every update draws 64 answers and takes 10 epochs of 4 steps.

    python benchmarks/ppo_clipping.py --seeds 10 --out X.json
"""

import argparse
import copy
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.learner.critic import CriticModel
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.optim import Optim
from posttrain.methods.build import build
from posttrain.process.machine import configure
from posttrain.types import Batch, Trajectory

LETTERS, TASKS, LENGTH, ROWS, UPDATES = 16, 8, 4, 64, 40
NONE = {"surrogate": "unclipped"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "no clipping, no penalty": ("ppo", NONE),
    "clipping, ε = 0.1": ("ppo", {"clip_low": 0.1, "clip_high": 0.1}),
    "clipping, ε = 0.2": ("ppo", {"clip_low": 0.2, "clip_high": 0.2}),
    "clipping, ε = 0.3": ("ppo", {"clip_low": 0.3, "clip_high": 0.3}),
    "adaptive KL, target 0.003": ("ppo_penalty", {"kl_target": 0.003}),
    "adaptive KL, target 0.01": ("ppo_penalty", {"kl_target": 0.01}),
    "adaptive KL, target 0.03": ("ppo_penalty", {"kl_target": 0.03}),
    "fixed KL, β = 0.3": ("ppo_penalty", {"kl_target": 0.0, "kl_from_old": 0.3}),
    "fixed KL, β = 1": ("ppo_penalty", {"kl_target": 0.0, "kl_from_old": 1.0}),
    "fixed KL, β = 3": ("ppo_penalty", {"kl_target": 0.0, "kl_from_old": 3.0}),
    "fixed KL, β = 10": ("ppo_penalty", {"kl_target": 0.0, "kl_from_old": 10.0}),
}


def main() -> None:
    """Runs every case with every seed and writes the rewards of every update."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    configure(1)
    found: dict[str, list[list[float]]] = {}
    print("| bound | reward of the last 10 updates (range over seeds) | of all updates |\n|---|---|---|")
    for name, (method, numbers) in CASES.items():
        found[name] = [run(method, numbers, seed, options.lr) for seed in range(options.seeds)]
        last = [statistics.fmean(rewards[-10:]) for rewards in found[name]]
        whole = statistics.fmean(statistics.fmean(rewards) for rewards in found[name])
        spread = f"{statistics.fmean(last):.3f} ({min(last):.3f}–{max(last):.3f})"
        print(f"| {name} | {spread} | {whole:.3f} |", flush=True)
    options.out.write_text(json.dumps({"lr": options.lr, "rewards": found}, indent=1) + "\n")


def run(method: str, numbers: dict[str, Any], seed: int, lr: float) -> list[float]:
    """The mean reward of each update."""
    model = tiny(seed)
    draw = torch.Generator().manual_seed(seed)
    target = torch.randint(LETTERS, (TASKS, LENGTH), generator=torch.Generator().manual_seed(1000 + seed))
    learner = Learner(
        model,
        build(method, numbers, horizon=LENGTH),
        critic=CriticModel(model),
        optim=Optim(lr=lr),
        critic_optim=Optim(lr=lr),
        steps=Steps(epochs=10, minibatches=4),
        seed=seed,
    )
    rewards = []
    for _ in range(UPDATES):
        asked = torch.arange(ROWS) % TASKS
        answers, logp = sampled(model, asked, draw)
        right = (answers == target[asked]).float() / LENGTH
        rewards.append(float(right.sum(1).mean()))
        learner.update(as_batch(asked, answers, logp, right))
    return rewards


def tiny(seed: int) -> LlamaForCausalLM:
    """A random Llama over the letters and the tasks' own tokens."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=LETTERS + TASKS,
            hidden_size=24,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=16,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )


@torch.no_grad()
def sampled(
    model: LlamaForCausalLM, asked: torch.Tensor, draw: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """([rows, LENGTH] tokens drawn one by one, their log-probabilities); without `draw` the likeliest."""
    # A model that the learner packs attends through a layout; drawing goes through a plain copy.
    # Its configuration is a copy as well: a shared one would change the model's attention too.
    plain = LlamaForCausalLM(copy.deepcopy(model.config))
    plain.load_state_dict(model.state_dict())
    plain.set_attn_implementation("sdpa")
    tokens = (LETTERS + asked)[:, None].repeat(1, 2)
    logp = []
    for _ in range(LENGTH):
        p = plain(input_ids=tokens, use_cache=False).logits[:, -1].log_softmax(-1)
        chosen = p.argmax(-1, True) if draw is None else torch.multinomial(p.exp(), 1, generator=draw)
        logp.append(p.gather(1, chosen))
        tokens = torch.cat([tokens, chosen], 1)
    return tokens[:, 2:], torch.cat(logp, 1)


def as_batch(asked: torch.Tensor, answers: torch.Tensor, logp: torch.Tensor, right: torch.Tensor) -> Batch:
    """The rows of an update; each letter that is right is paid at once."""
    rows = []
    for task, answer, p, paid in zip(
        asked.tolist(), answers.tolist(), logp.tolist(), right.tolist(), strict=True
    ):
        both = [0.0, 0.0, *p]
        rows.append(
            Trajectory(
                tokens=[LETTERS + task] * 2 + answer,
                sampled=[False] * 2 + [True] * LENGTH,
                logp_gen=both,
                logp_policy=both,
                version=[0] * (2 + LENGTH),
                reward=[0.0, 0.0, *paid],
            )
        )
    return Batch.of(rows, list(range(ROWS)))


if __name__ == "__main__":
    main()
