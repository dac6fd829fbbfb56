"""The native engine on the sampling workload: the other side of hf_generate.py.

python benchmarks/native_generate.py --model DIR --dtype bfloat16 --repeat 3 --out X.json
python benchmarks/native_generate.py --model DIR --fixed --max-new-tokens 64 --out X.json
"""

import argparse
import json
import resource
import time
from pathlib import Path

# isort: off
import posttrain  # noqa: F401 - before torch, so that its threads wait as those of a run do

# isort: on
import torch
from prompts import sampling_prompts

from posttrain.base.chat import Chat
from posttrain.engines.native.engine import NativeConfig, NativeEngine
from posttrain.models.pretrained import load_model, load_tokenizer
from posttrain.process.machine import configure
from posttrain.types import Request, Sampling

SAMPLES = 8


def main() -> None:
    """Measures and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--fixed", action="store_true", help="no answer ends before its last token")
    parser.add_argument("--no-kernel", action="store_true", help="PyTorch's attention in decoding steps")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    configure(options.threads)
    tokenizer = load_tokenizer(options.model)
    chat = Chat(tokenizer)
    engine = NativeEngine(
        load_model(options.model, dtype=getattr(torch, options.dtype)),
        decode=lambda tokens: str(tokenizer.decode(tokens)),
        stop_tokens=[] if options.fixed else sorted(chat.stops),
        config=NativeConfig(decode_kernel=not options.no_kernel),
    )
    prompts = [tuple(chat.render(p)) for p in sampling_prompts()]
    run(engine, prompts, 16, seed=1000)  # warm-up
    repeats = [run(engine, prompts, options.max_new_tokens, seed) for seed in range(options.repeat)]
    result = {
        "what": "posttrain's native engine",
        "dtype": options.dtype,
        "threads": options.threads,
        "repeats": repeats,
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for r in repeats:
        print({k: round(v, 2) for k, v in r.items()})


def run(engine: NativeEngine, prompts: list[tuple[int, ...]], most: int, seed: int) -> dict[str, float]:
    """Samples every prompt SAMPLES times; tokens count up to and with the end token."""
    begin = time.perf_counter()
    for number, prompt in enumerate(prompts):
        for k in range(SAMPLES):
            sampling = Sampling(max_new_tokens=most)
            engine.submit(Request(prompt=prompt, sampling=sampling, seed=seed, task=str(number), sample=k))
    lengths = []
    while engine.busy:
        lengths += [len(answer.tokens) for _, answer in engine.poll()]
    seconds = time.perf_counter() - begin
    tokens = sum(lengths)
    return {
        "seed": seed,
        "seconds": seconds,
        "new_tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "mean_length": tokens / len(lengths),
    }


if __name__ == "__main__":
    main()
