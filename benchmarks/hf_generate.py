"""Useful tokens per second of transformers' `generate`: 8 chat prompts x 8 samples, at most 128 new tokens.

Every form of the call that gives the same answers is tried once, and the fastest is measured:
dynamic or static cache, the eight samples asked for by `num_return_sequences` or by repeating
the prompt. Useful tokens are those up to and including the end token; the padding behind it,
which the batch goes on computing until its last row ends, is not counted.

    python benchmarks/hf_generate.py --model DIR --dtype bfloat16 --repeat 3 --out X.json

A shorter --max-new-tokens is for trying the script out; the figures to report have 128.
"""

import argparse
import json
import resource
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from prompts import peak_resident_mib, resident_mib, restart_peak, sampling_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

SAMPLES = 8


class Form(NamedTuple):
    """One way to ask `generate` for the same samples."""

    cache: str
    """dynamic or static."""
    samples_by: str
    """num_return_sequences or repeated_prompts."""


FORMS = tuple(
    Form(*pair) for pair in product(("dynamic", "static"), ("num_return_sequences", "repeated_prompts"))
)


class Measured(NamedTuple):
    """One call of `generate`."""

    seed: int
    seconds: float
    useful_tokens: int
    tokens_per_second: float
    mean_length: float
    shortest: int
    longest: int


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
    ).eval()
    forms = [form for form in FORMS if options.cache in (None, form.cache)]
    warm_up(model, tokenizer, forms)
    longest = options.max_new_tokens
    if options.fixed:
        model.generation_config.min_new_tokens = longest
    trials = {form: measure(model, tokenizer, form, options.seed, longest) for form in forms}
    fastest = max(trials, key=lambda form: trials[form].tokens_per_second)
    restart_peak()
    before = resident_mib()
    seeds = range(options.seed + 1, options.seed + 1 + options.repeat)
    repeats = [measure(model, tokenizer, fastest, seed, longest) for seed in seeds]
    result = {
        "what": "transformers.generate",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "dtype": options.dtype,
        "threads": options.threads,
        "prompts": len(sampling_prompts()),
        "samples": SAMPLES,
        "max_new_tokens": longest,
        "form": fastest._asdict(),
        "trials": [{**form._asdict(), **trial._asdict()} for form, trial in trials.items()],
        "repeats": [repeat._asdict() for repeat in repeats],
        "resident_mib_before": before,
        "peak_resident_mib": peak_resident_mib(),
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for line in summary(result):
        print(line)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="directory that from_pretrained reads")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeat", type=int, default=3, help="measured calls of the fastest form")
    parser.add_argument("--seed", type=int, default=0, help="of the trials; repeat i has seed + 1 + i")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--cache", choices=("dynamic", "static"), help="forms with this one alone")
    parser.add_argument("--fixed", action="store_true", help="no answer ends before its last token")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    return parser.parse_args()


def warm_up(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, forms: list[Form]) -> None:
    """Eight tokens by each form, so that no trial pays for first-call set-up."""
    for form in forms:
        sample(model, tokenizer, form, max_new_tokens=8)


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, form: Form, seed: int, max_new_tokens: int
) -> Measured:
    """One timed call; the prompts are rendered and tokenised within the time."""
    torch.manual_seed(seed)
    start = time.perf_counter()
    answers = sample(model, tokenizer, form, max_new_tokens)
    seconds = time.perf_counter() - start
    lengths = useful_lengths(answers, tokenizer.eos_token_id)
    return Measured(
        seed=seed,
        seconds=seconds,
        useful_tokens=sum(lengths),
        tokens_per_second=sum(lengths) / seconds,
        mean_length=sum(lengths) / len(lengths),
        shortest=min(lengths),
        longest=max(lengths),
    )


@torch.inference_mode()
def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, form: Form, max_new_tokens: int
) -> torch.Tensor:
    """New tokens of every sample, one row each, padded behind the end token."""
    conversations = sampling_prompts()
    if form.samples_by == "repeated_prompts":
        conversations = [c for c in conversations for _ in range(SAMPLES)]
    inputs = tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    static: dict[str, Any] = {"cache_implementation": "static"} if form.cache == "static" else {}
    rows = model.generate(
        **inputs,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        num_return_sequences=SAMPLES if form.samples_by == "num_return_sequences" else 1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **static,
    )
    return rows[:, inputs["input_ids"].shape[1] :]


def useful_lengths(answers: torch.Tensor, eos: int) -> list[int]:
    """Tokens of each row up to and including its first end token, or all of them.

    >>> useful_lengths(torch.tensor([[5, 2, 2], [5, 6, 7]]), eos=2)
    [2, 3]
    """
    return [row.index(eos) + 1 if eos in row else len(row) for row in answers.tolist()]


def summary(result: dict[str, Any]) -> Iterator[str]:
    """What a person wants to read of the result."""
    for trial in result["trials"]:
        form = f"{trial['cache']} cache, {trial['samples_by']}"
        yield f"tried {form:<40} {trial['tokens_per_second']:7.1f} tokens/s"
    for repeat in result["repeats"]:
        yield (
            f"measured seed {repeat['seed']}: {repeat['tokens_per_second']:7.1f} useful tokens/s, "
            f"{repeat['seconds']:.1f} s, mean length {repeat['mean_length']:.1f} "
            f"({repeat['shortest']}-{repeat['longest']})"
        )
    yield f"peak resident memory {result['peak_resident_mib']:.0f} MiB"


if __name__ == "__main__":
    main()
