"""Decoding steps of the native engine with a cache too small for all answers at their longest.

160 answers of a random model end at random after about 450 tokens, and may have 2,000. The number of steps
does not depend on the machine; a GPU's step takes about as long for few rows as for many.

    python benchmarks/small_cache.py --cache-tokens 32768
"""

import argparse
import time

# isort: off
import posttrain  # noqa: F401 - before torch, so that its threads wait as those of a run do

# isort: on
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.engines.native.engine import NativeConfig, NativeEngine
from posttrain.types import Request, Sampling

VOCABULARY, ENDS, ANSWERS, LONGEST = 2000, 5, 160, 2000


def main() -> None:
    """Print the tokens, the steps, the seconds and how many answers were withdrawn."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--cache-tokens", type=int, default=1 << 15)
    parser.add_argument("--rows", type=int, default=64)
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "max_position_embeddings": 4096, "vocab_size": VOCABULARY}
    config = LlamaConfig(**sizes, **more, bos_token_id=None, eos_token_id=None)
    engine = NativeEngine(
        LlamaForCausalLM(config).bfloat16(),
        decode=lambda tokens: "x" * len(tokens),
        stop_tokens=range(0, VOCABULARY, VOCABULARY // ENDS),
        config=NativeConfig(rows=options.rows, cache_tokens=options.cache_tokens),
    )
    for i in range(ANSWERS):
        sampling = Sampling(max_new_tokens=LONGEST)
        engine.submit(Request(prompt=(1 + i, 2, 3, 4) * 8, sampling=sampling, task=str(i)))
    begin, steps, tokens = time.perf_counter(), 0, 0
    while engine.busy:
        tokens += sum(len(answer.tokens) for _, answer in engine.poll())
        steps += 1
    seconds = time.perf_counter() - begin
    print(f"{tokens} tokens, {steps} steps, {seconds:.1f} s, {engine.withdrawals} withdrawn")


if __name__ == "__main__":
    main()
