"""vLLM for processors on the sampling workload, in the environment of `make test-vllm`.

    .venv-vllm/bin/python benchmarks/vllm_generate.py --model DIR --repeat 3 --out X.json

The eight samples of a prompt are asked for with n, as its users ask; prompts are given as tokens, and its
cache of prefixes is on. Its threads are bound to the first processors, as it does by itself.
"""

import argparse
import json
import os
import time
from pathlib import Path

SAMPLES = 8


def main() -> None:
    """Measures and writes the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--fixed", action="store_true", help="no answer ends before its last token")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}", "VLLM_CPU_KVCACHE_SPACE": "2"}
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from prompts import sampling_prompts
    from vllm import LLM, SamplingParams

    llm = LLM(model=str(options.model), dtype=options.dtype, max_model_len=1024, max_num_seqs=64)
    template = llm.get_tokenizer().apply_chat_template
    prompts = [
        {"prompt_token_ids": list(template(each, add_generation_prompt=True, return_dict=False))}
        for each in sampling_prompts()
    ]
    repeats = []
    for seed, most in ((1000, 16), *((seed, options.max_new_tokens) for seed in range(options.repeat))):
        asked = SamplingParams(n=SAMPLES, max_tokens=most, seed=seed, ignore_eos=options.fixed)
        begin = time.perf_counter()
        answers = llm.generate(prompts, asked, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = sum(len(each.token_ids) for answer in answers for each in answer.outputs)
        repeats.append(
            {"seed": seed, "seconds": seconds, "new_tokens": tokens, "tokens_per_second": tokens / seconds}
        )
    result = {"what": "vLLM", "dtype": options.dtype, "repeats": repeats[1:]}
    options.out.write_text(json.dumps(result) + "\n")
    for each in repeats[1:]:
        print({k: round(v, 2) for k, v in each.items()})


if __name__ == "__main__":
    main()
