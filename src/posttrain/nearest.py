"""The known name that a misspelt one, or one of another trainer, was probably meant to be."""

from collections.abc import Container, Iterable
from difflib import get_close_matches

ELSEWHERE = {
    "beta": "method.kl_in_loss, or method.kl_in_reward",
    "kl_coef": "method.kl_in_reward",
    "kl_loss_coef": "method.kl_in_loss",
    "epsilon": "method.clip_low and method.clip_high",
    "cliprange": "method.clip_low and method.clip_high",
    "loss_type": "method.name",
    "adv_estimator": "method.name",
    "label_smoothing": "method.flipped (of cdpo, rdpo and reward_smoothed)",
    "model_name_or_path": "model.path",
    "bf16": "model.dtype",
    "dataset_name": "task.data.path",
    "dataset_config": "task.data.subset",
    "max_length": "batch.max_length",
    "max_seq_length": "batch.max_length",
    "num_generations": "rollout.group_size",
    "n": "rollout.group_size",
    "max_completion_length": "sampling.max_new_tokens",
    "response_length": "sampling.max_new_tokens",
    "max_prompt_length": "task.data, whose prompts are never cut",
    "reward_funcs": "verifier.function",
    "reward_weights": "verifier.weights",
    "num_iterations": "steps.epochs",
    "num_ppo_epochs": "steps.epochs",
    "num_mini_batches": "steps.minibatches",
    "gradient_accumulation_steps": "steps.microbatch_tokens",
    "micro_batch_size_per_gpu": "steps.microbatch_tokens",
    "per_device_train_batch_size": "batch.batch_size, or rollout.groups",
    "train_batch_size": "batch.batch_size, or rollout.groups",
    "learning_rate": "optim.lr",
    "lr": "optim.lr",
    "lr_scheduler_type": "optim.schedule",
    "warmup_ratio": "optim.warmup_steps (a number of steps)",
    "max_steps": "run.updates",
    "num_train_epochs": "run.updates (epochs × records / batch.batch_size)",
    "save_steps": "checkpoint.every",
    "eval_steps": "eval.every",
    "report_to": "track.sinks",
    "ref_model": "reference.path",
    "r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "target_modules": "lora.targets",
}
"""What TRL, verl and peft call things, and the keys of a recipe."""


def elsewhere(name: str, known: Container[str] = ()) -> str:
    """What a name of another trainer is called in a recipe, or among these keys; empty if it is none.

    >>> elsewhere("num_generations"), elsewhere("learning_rate", ["lr"]), elsewhere("colour")
    ('it is rollout.group_size here', "did you mean 'lr'?", '')
    """
    found = ELSEWHERE.get(name, "")
    key = found.rpartition(".")[2]
    if key in known:
        return f"did you mean {key!r}?"
    return f"it is {found} here" if found else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the nearest known name; empty if none is near.

    >>> did_you_mean("anwser", ["question", "answer"])
    "did you mean 'answer'?"
    >>> did_you_mean("x", ["question", "answer"])
    ''
    """
    lower = {k.lower(): k for k in known}
    found = get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    return f"did you mean {lower[found[0]]!r}?" if found else ""
