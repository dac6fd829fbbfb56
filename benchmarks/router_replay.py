"""How far sampler and learner are apart in a model of experts, with and without router replay.

A random Qwen3-MoE in bfloat16 (8 layers, 32 experts, 4 a token) answers 8 prompts, 8 times each, with the
native engine. The learner computes the probabilities of the same tokens with the same weights in packed rows.
What is printed does not depend on the machine's speed, but on its kernels.

    python benchmarks/router_replay.py --seeds 5
"""

import argparse
from dataclasses import replace

# isort: off
import posttrain  # noqa: F401 - before torch, so that its threads wait as those of a run do

# isort: on
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from posttrain.engines.native.engine import NativeConfig, NativeEngine
from posttrain.learner.forward import Net, forward
from posttrain.learner.pack import pack
from posttrain.math.kl import k3
from posttrain.models.attention import use_layouts
from posttrain.models.experts import Routers
from posttrain.types import Batch, Request, Sampling, Trajectory

VOCABULARY, PROMPTS, ANSWERS, LONGEST = 500, 8, 8, 64


def new_model(seed: int) -> Qwen3MoeForCausalLM:
    """Return a random model whose routers and heads are not flat."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        initializer_range=0.1,
    )
    return Qwen3MoeForCausalLM(config).bfloat16().eval()


def sample(model: Qwen3MoeForCausalLM, seed: int) -> Batch:
    """Return answers with their log-probabilities and experts, as a batch."""
    engine = NativeEngine(model, decode=str, stop_tokens=[], config=NativeConfig(rows=64), routes=True)
    dice = torch.Generator().manual_seed(seed)
    prompts, asked = torch.randint(VOCABULARY, (PROMPTS, 24), generator=dice).tolist(), dict[int, int]()
    for n, prompt in enumerate(prompts):
        for sample in range(ANSWERS):
            request = Request(
                prompt=tuple(prompt),
                sampling=Sampling(max_new_tokens=LONGEST),
                seed=seed,
                task=str(n),
                sample=sample,
            )
            asked[engine.submit(request)] = n
    rows, groups = [], []
    while engine.busy:
        for ticket, answer in engine.poll():
            zeros = [0.0] * len(prompts[0])
            row = Trajectory.given(
                [*prompts[asked[ticket]], *answer.tokens],
                start=len(zeros),
                logp_policy=[*zeros, *answer.logp_policy],
            )
            rows.append(replace(row, routes=answer.routes))
            groups.append(asked[ticket])
    return Batch.of(rows, groups)


def main() -> None:
    """Print a line for each seed, without and with replay."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--seeds", type=int, default=5)
    print("seed | tokens sent elsewhere in a layer | KL without replay | with | most nats without | with")
    for seed in range(parser.parse_args().seeds):
        batch = sample(new_model(seed), seed)
        model = new_model(seed)
        use_layouts(model)
        routers = Routers(model, notes=True)
        with torch.no_grad():
            apart = []
            for rows in (batch, replace(batch, routes=None)):
                gap = (forward(Net(model), rows, 1.0).logp - batch.logp_policy)[batch.mask]
                logp = batch.logp_policy[batch.mask]
                apart.append((float(k3(logp, logp + gap).mean()), float(gap.abs().max())))
        (replayed, most_replayed), (plain, most) = apart
        sampled = pack(batch, trees=True).routes
        assert sampled is not None
        known = sampled[:, :, 0] >= 0
        own = routers.taken()[:, : sampled.shape[1]].sort(-1).values
        moved = (own != sampled.sort(-1).values).any(-1)[known].float().mean()
        print(f"{seed} | {moved:.1%} | {plain:.2e} | {replayed:.2e} | {most:.2f} | {most_replayed:.2f}")


if __name__ == "__main__":
    main()
