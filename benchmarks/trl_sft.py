"""TRL's SFTTrainer on conversations of mixed lengths: tokens a second and peak memory.

SmolLM2 with fp32 weights and bf16 autocast, AdamW, the mean over the step's trained tokens, no gradient
checkpointing. What is measured on which data: see offline_data.py. TRL has several forms, and the
comparison is with its best:

    padded         --microbatch rows at a time, padded to the longest of them
    padding_free   the same rows laid end to end, under a mask that keeps them apart
    packed         its packing (best fit, decreasing) into rows of LIMIT tokens, laid end to end; a step
                   is as many of those as come nearest to --rows conversations

    python benchmarks/trl_sft.py --model DIR --data hh_harmless_test.jsonl.gz --form packed --out X.json
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from offline_data import LIMIT, WARM_UP, command_line, conversations, digest, memory, repeated, row
from prompts import resident_mib, restart_peak
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

FORMS = ("padded", "padding_free", "packed")


def main() -> None:
    """Repeats the measurement, or is one of its runs."""
    parser = command_line(__doc__)
    parser.add_argument("--form", choices=FORMS, default="packed")
    options = parser.parse_args()
    if not options.one:
        return repeated(options)
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    n = options.rows * (WARM_UP + options.steps)
    rows = [row(tokenizer, m) for m in conversations(options.data, n, options.seed)]
    start = resident_mib()
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as output:
        trainer = SFTTrainer(
            model=load(options.model),
            args=settings(options, output, tokens=sum(len(tokens) for tokens, _ in rows)),
            train_dataset=Dataset.from_dict(
                {
                    "input_ids": [tokens for tokens, _ in rows],
                    "labels": [labels(*each) for each in rows],
                }
            ),
            processing_class=tokenizer,
            callbacks=[recorder],
        )
        train(trainer)
    timed = recorder.steps[WARM_UP:]
    result = {
        "settings": described(options, trainer, "trl.SFTTrainer") | {"form": options.form},
        "tokens_per_second": sum(s["tokens"] for s in timed) / sum(s["seconds"] for s in timed),
        **memory(start, recorder.loaded),
        "digest": digest(rows),
        "steps": recorder.steps,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return None


def load(path: Path) -> Any:
    """The model with float32 weights, which autocast rounds as it computes."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")


def labels(tokens: list[int], trained: list[bool]) -> list[int]:
    """A row's trained tokens, and -100 for the others."""
    return [token if is_trained else -100 for token, is_trained in zip(tokens, trained, strict=True)]


def settings(options: argparse.Namespace, output: str, tokens: int) -> SFTConfig:
    """The hyper-parameters of the comparison, in TRL's names; what is not named is TRL's default."""
    steps = WARM_UP + options.steps
    passes = options.rows // options.microbatch
    if options.form == "packed":
        passes = max(1, round(tokens / steps / (LIMIT * options.microbatch)))
    elif passes * options.microbatch != options.rows:
        raise SystemExit(f"--microbatch must divide {options.rows}, not {options.microbatch}")
    return SFTConfig(
        per_device_train_batch_size=options.microbatch,
        gradient_accumulation_steps=passes,
        packing=options.form == "packed",
        padding_free=options.form == "padding_free",
        # TRL cuts no row where it does not pad; none is longer.
        max_length=None if options.form == "padding_free" else LIMIT,
        learning_rate=2e-5,
        **shared(options, output),
    )


def shared(options: argparse.Namespace, output: str) -> dict[str, Any]:
    """What SFT and DPO are given alike."""
    return {
        "output_dir": output,
        "max_steps": WARM_UP + options.steps,
        "train_sampling_strategy": "sequential",  # the other side trains on the same rows in this order
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": options.dtype == "bfloat16",
        "use_cpu": True,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def train(trainer: Any) -> None:
    """Trains, telling nobody but the recorder."""
    trainer.remove_callback(PrinterCallback)  # the recorder prints a line a step itself
    trainer.train()


def described(options: argparse.Namespace, trainer: Any, what: str) -> dict[str, Any]:
    """What was measured with what."""
    return {
        "what": what,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
        },
        "data": options.data.name,
        "rows": options.rows,
        "microbatch": options.microbatch,
        "passes": trainer.args.gradient_accumulation_steps,
        "steps": options.steps,
        "seed": options.seed,
        "threads": options.threads,
        "weights": str(next(trainer.model.parameters()).dtype),
        "dtype": options.dtype,
        "optimizer": trainer.args.optim.value,
        "attention": trainer.model.config._attn_implementation,
    }


class Recorder(TrainerCallback):
    """What every step took, and the memory before the first; logging is not in a step's seconds."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.begun = self.loaded = self.seen = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        restart_peak()
        self.loaded = resident_mib()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.begun = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.steps.append({"step": state.global_step, "seconds": time.perf_counter() - self.begun})

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if not logs or "loss" not in logs:  # the last log of a run sums it up
            return
        tokens = logs["num_tokens"] - self.seen
        self.seen = logs["num_tokens"]
        self.steps[-1] |= {"tokens": tokens, "loss": logs["loss"], "grad_norm": logs["grad_norm"]}
        print(json.dumps(self.steps[-1]), flush=True)


if __name__ == "__main__":
    main()
