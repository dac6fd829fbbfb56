"""Attention of a pack, by the compiled kernel and by PyTorch's, forward and backward, in turns.

SmolLM2's heads in bfloat16; packs as GRPO makes them (a prompt, then eight answers to each), and rows alone
as SFT does. Medians in milliseconds. gpu_quarter.py times `lower_right`, another way for GPUs.

    python benchmarks/attention.py --threads 2
"""

import argparse
import time
from collections.abc import Iterator
from statistics import median

# isort: off
import posttrain  # noqa: F401 - before torch, so that its threads wait as those of a run do

# isort: on
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from posttrain.learner.pack import Pack, pack
from posttrain.learner.prompt_group import PromptGroup
from posttrain.types import Batch, Trajectory

HEADS, SHARED, SIZE = 9, 3, 64
PACKS = {
    "7 groups, 46 + 8 × 22 tokens": [(46, 22, 8)] * 7,
    "2 groups, 100 + 8 × 100 tokens": [(100, 100, 8)] * 2,
    "4 rows of 512": [(1, 511, 1)] * 4,
    "one row of 2048": [(1, 2047, 1)],
}


def packed(groups: list[tuple[int, int, int]], *, compiled: bool) -> Pack:
    """Groups of a prompt and so many answers of so many tokens, of which no two begin alike."""
    rows, group = [], []
    for number, (prompt, answer, count) in enumerate(groups):
        for k in range(count):
            tokens = [number] * prompt + [100 + k] * (answer + 1)
            rows.append(Trajectory.given(tokens, prompt))
            group.append(number)
    return pack(Batch.of(rows, group), compiled=compiled)


def measured(layout: Pack, repeat: int) -> tuple[float, float]:
    """Medians of the seconds forward and backward."""
    N = len(layout.tokens) + layout.spare
    drawn = (torch.randn(1, N, h, SIZE).bfloat16() for h in (HEADS, SHARED, SHARED))
    heads = [x.transpose(1, 2).requires_grad_() for x in drawn]
    times = []
    for _ in range(repeat + 1):
        begin = time.perf_counter()
        out = layout.attend(*heads, scale=SIZE**-0.5, window=None, softcap=None)
        middle = time.perf_counter()
        torch.autograd.grad(out, heads, torch.ones_like(out))
        times.append((middle - begin, time.perf_counter() - middle))
    return median(t for t, _ in times[1:]), median(t for _, t in times[1:])


def lower_right(packed: Pack, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend from each prompt, and from each branch to its prompt and itself, in a call of its own."""
    parts = []
    for group in packed.prompt_groups:
        prompt = slice(group.start, group.start + group.prefix)
        if group.prefix:
            qkv = (x[:, :, prompt] for x in (query, key, value))
            parts.append(scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True))
        for start, stop in spans(group):
            keys, values = (torch.cat([x[:, :, prompt], x[:, :, start:stop]], 2) for x in (key, value))
            bias: torch.Tensor = causal_lower_right(stop - start, keys.shape[2])
            branch = query[:, :, start:stop]
            parts.append(scaled_dot_product_attention(branch, keys, values, attn_mask=bias, enable_gqa=True))
    return torch.cat(parts, 2)


def spans(group: PromptGroup) -> Iterator[tuple[int, int]]:
    """Yield where each branch of a group starts and stops."""
    start = group.start + group.prefix
    for length in group.branches:
        yield start, start + length
        start += length


def main() -> None:
    """Prints a table."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| pack | PyTorch, forward / backward | compiled | ratio |\n|---|---|---|---|")
    for name, groups in PACKS.items():
        found = [measured(packed(groups, compiled=compiled), options.repeat) for compiled in (False, True)]
        told = [" / ".join(f"{1000 * t:.2f}" for t in each) for each in found]
        print(f"| {name} | {told[0]} | {told[1]} | {sum(found[0]) / sum(found[1]):.1f}× |", flush=True)


if __name__ == "__main__":
    main()
