"""TRL's GRPOTrainer on the additions: seconds, reward and length of every step, and its memory.

Eight prompts x eight samples a step, at most 32 new tokens, fp32 weights with bf16 autocast, no
KL; the prompts come in the order of `addition_tasks("train", 8 * steps, seed)`. The samples of a
step are always drawn in one batch of 64; `--microbatch` is per_device_train_batch_size, the rows
of one forward and backward pass, and gradient_accumulation_steps is what is left of the 64.

    python benchmarks/trl_grpo.py --model DIR --steps 30 --seed 0 --out X.json
    python benchmarks/trl_grpo.py --model DIR --steps 3 --seed 0 --microbatch 8 --memory --out Y.json

Without --memory nothing but clocks is added to TRL's own step. With it freed memory is handed
back between sampling and training, so that the peak of the training part can be told from what
sampling left behind; take no times from such a run.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from prompts import addition_tasks, chat, peak_resident_mib, resident_mib, restart_peak, reward
from transformers import (
    AutoTokenizer,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer

PROMPTS, SAMPLES = 8, 8


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    recorder = Recorder(memory=options.memory)
    with tempfile.TemporaryDirectory() as output:
        trainer = TimedTrainer(
            model=str(options.model),
            reward_funcs=last_number,
            args=settings(options, output),
            train_dataset=tasks(options.steps, options.seed),
            processing_class=tokenizer,
            callbacks=[recorder],
            recorder=recorder,
        )
        trainer.remove_callback(PrinterCallback)  # the recorder prints a line a step itself
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    result = {
        "what": "trl.GRPOTrainer",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
        },
        "settings": {
            "prompts": PROMPTS,
            "samples": SAMPLES,
            "microbatch": options.microbatch,
            "seed": options.seed,
            "threads": options.threads,
            "weights": str(next(trainer.model.parameters()).dtype),
            "compute": options.compute,
            "loss_type": trainer.args.loss_type,
            "optimizer": trainer.args.optim.value,
            "attention": trainer.model.config._attn_implementation,
        },
        "seconds": seconds,
        "steps": recorder.steps,
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="directory that from_pretrained reads")
    parser.add_argument("--steps", type=int, required=True, help="optimiser steps")
    parser.add_argument("--seed", type=int, required=True, help="of the prompts' order and of the samples")
    parser.add_argument("--microbatch", type=int, default=64, help="rows of one forward and backward pass")
    parser.add_argument("--compute", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    if (PROMPTS * SAMPLES) % options.microbatch:
        parser.error(f"--microbatch must divide {PROMPTS * SAMPLES}, not {options.microbatch}")
    return options


def settings(options: argparse.Namespace, output: str) -> GRPOConfig:
    """The hyper-parameters of the comparison, in TRL's names; what is not named is TRL's default."""
    return GRPOConfig(
        output_dir=output,
        max_steps=options.steps,
        seed=options.seed,
        per_device_train_batch_size=options.microbatch,
        gradient_accumulation_steps=PROMPTS * SAMPLES // options.microbatch,
        num_generations=SAMPLES,
        shuffle_dataset=False,  # the other side trains on the same prompts in the same order
        max_completion_length=32,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        loss_type="grpo",
        scale_rewards="group",
        epsilon=0.2,
        num_iterations=1,
        learning_rate=2e-5,
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=options.compute == "bfloat16",
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        use_cpu=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def tasks(steps: int, seed: int) -> Dataset:
    """Eight new additions for every step, as the conversations that TRL renders with the chat template."""
    drawn = addition_tasks("train", PROMPTS * steps, seed)
    return Dataset.from_list([{"prompt": chat(t.question), "answer": t.answer} for t in drawn])


def last_number(completions: list[list[dict[str, str]]], answer: list[int], **_: Any) -> list[float]:
    """The reward of each completion, in the form that TRL calls."""
    return [reward(c[0]["content"], a) for c, a in zip(completions, answer, strict=True)]


class Recorder(TrainerCallback):
    """What every step cost and gained.

    A step runs from before the sampling to after the optimiser; logging is not in it.
    """

    def __init__(self, memory: bool) -> None:
        self.memory = memory
        self.steps: list[dict[str, float]] = []
        self.begun = self.sampled = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.steps.append({"step": state.global_step + 1})
        self.begun = time.perf_counter()

    def on_sampled(self) -> None:
        """Called by the trainer when the samples of a step have been drawn and judged."""
        self.sampled = time.perf_counter()
        if self.memory:
            restart_peak()
            self.steps[-1]["resident_mib_before_training"] = resident_mib()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        ended = time.perf_counter()
        step = self.steps[-1]
        step["seconds"] = ended - self.begun
        step["seconds_sampling"] = self.sampled - self.begun
        step["seconds_training"] = ended - self.sampled
        if self.memory:
            step["peak_resident_mib_in_training"] = peak_resident_mib()
            step["peak_mib_over_before"] = peak_resident_mib() - step["resident_mib_before_training"]

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if not logs or "reward" not in logs:  # the last log of a run sums it up
            return
        self.steps[-1] |= {
            "reward": logs["reward"],
            "mean_length": logs["completions/mean_length"],
            "cut_fraction": logs["completions/clipped_ratio"],
            "entropy": logs["entropy"],
            "grad_norm": logs["grad_norm"],
            "learning_rate": logs["learning_rate"],
        }
        print(json.dumps(self.steps[-1]), flush=True)


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that tells when it is done with sampling, and is otherwise TRL's own."""

    def __init__(self, *args: Any, recorder: Recorder, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recorder = recorder

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        self.recorder.on_sampled()
        return batch


if __name__ == "__main__":
    main()
