"""TRL's DPOTrainer on pairs of mixed lengths: pairs a second and peak memory.

SmolLM2 with fp32 weights and bf16 autocast, AdamW, β = 0.1, the sigmoid loss, no gradient checkpointing.
What is measured on which data: see offline_data.py. TRL pads, and --microbatch counts rows, two a pair. The
reference's pass is counted, in either of TRL's forms; the comparison is with its better one:

    precomputed    before training, once a pair, in batches of --microbatch rows: a timed pair is charged its
                   share of that pass (its peak of memory is not counted, being below that of training)
    inline         by a second model, in every step

    python benchmarks/trl_dpo.py --model DIR --data hh_harmless_test.jsonl.gz --reference inline --out X.json
"""

import argparse
import json
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from offline_data import LIMIT, WARM_UP, Pair, command_line, cut, digest, memory, pairs, pieces, repeated
from prompts import resident_mib
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer
from trl_sft import Recorder, described, load, shared, train

FORMS = ("precomputed", "inline")


def main() -> None:
    """Repeats the measurement, or is one of its runs."""
    parser = command_line(__doc__)
    parser.add_argument("--reference", choices=FORMS, default="precomputed")
    options = parser.parse_args()
    if not options.one:
        return repeated(options)
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    n = options.rows // 2 * (WARM_UP + options.steps)
    found = pairs(options.data, n, options.seed)
    start = resident_mib()
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as output:
        trainer = TimedTrainer(
            model=load(options.model),
            args=settings(options, output),
            train_dataset=Dataset.from_list([texts(tokenizer, pair) for pair in found]),
            processing_class=tokenizer,
            callbacks=[recorder],
        )
        prepared = list(trainer.train_dataset)
        train(trainer)
    timed = recorder.steps[WARM_UP:]
    seconds = sum(s["seconds"] for s in timed)
    seconds += trainer.reference_seconds * options.steps / (WARM_UP + options.steps)
    result = {
        "settings": described(options, trainer, "trl.DPOTrainer") | {"reference": options.reference},
        "pairs_per_second": options.steps * (options.rows // 2) / seconds,
        "reference_seconds": trainer.reference_seconds,
        **memory(start, recorder.loaded),
        "digest": digest(side for each in prepared for side in sides(each)),
        "steps": recorder.steps,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return None


def settings(options: argparse.Namespace, output: str) -> DPOConfig:
    """The hyper-parameters of the comparison, in TRL's names; what is not named is TRL's default."""
    if options.microbatch % 2 or options.rows % options.microbatch:
        raise SystemExit(f"--microbatch must be even and divide {options.rows}, not {options.microbatch}")
    return DPOConfig(
        per_device_train_batch_size=options.microbatch // 2,
        gradient_accumulation_steps=options.rows // options.microbatch,
        max_length=LIMIT,
        beta=0.1,
        loss_type=["sigmoid"],
        precompute_ref_log_probs=options.reference == "precomputed",
        learning_rate=1e-6,
        **shared(options, output),
    )


def texts(tokenizer: Any, pair: Pair) -> dict[str, str]:
    """The pair as TRL's texts: the prompt up to where the assistant speaks, and two ends."""
    sides = [
        list(pieces(tokenizer, [*pair.prompt, {"role": "assistant", "content": said}]))
        for said in (pair.chosen, pair.rejected)
    ]
    prompt = "".join(text for text, _ in sides[0][:-1])
    return {"prompt": prompt, "chosen": sides[0][-1][0], "rejected": sides[1][-1][0]}


def sides(each: dict[str, Any]) -> list[tuple[list[int], list[bool]]]:
    """The two rows that TRL makes of a pair."""
    prompt = each["prompt_ids"]
    return [
        cut([*prompt, *each[name]], [False] * len(prompt) + [True] * len(each[name]))
        for name in ("chosen_ids", "rejected_ids")
    ]


class TimedTrainer(DPOTrainer):
    """DPOTrainer that tells how long the reference took, and is otherwise TRL's own."""

    reference_seconds = 0.0

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        begin = time.perf_counter()
        found = super()._precompute_ref_logps(dataset, name, batch_size)
        self.reference_seconds += time.perf_counter() - begin
        return found


if __name__ == "__main__":
    main()
