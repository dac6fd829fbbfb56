"""The known name that a misspelt one, or one of another trainer, was probably meant to be."""

from collections.abc import Container, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

ELSEWHERE = {
    "beta": "method.kl_in_loss, or method.kl_in_reward",
    "kl_coef": "method.kl_in_reward",
    "kl_loss_coef": "method.kl_in_loss",
    "epsilon": "method.clip_low and method.clip_high",
    "cliprange": "method.clip_low and method.clip_high",
    "loss_type": "method.reduction, or another method.name",
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
    "gradient_accumulation_steps": "batch.batch_size (a whole step; microbatches: steps.microbatch_tokens)",
    "micro_batch_size_per_gpu": "steps.microbatch_tokens",
    "per_device_train_batch_size": "batch.batch_size, or rollout.groups",
    "train_batch_size": "batch.batch_size, or rollout.groups",
    "learning_rate": "optim.lr",
    "lr": "optim.lr",
    "lr_scheduler_type": "optim.schedule",
    "warmup_ratio": "optim.warmup_steps (a number of steps)",
    "max_steps": "run.updates",
    "num_train_epochs": "run.updates (epochs × records / batch.batch_size, or rollout.groups)",
    "save_steps": "checkpoint.every",
    "eval_steps": "eval.every",
    "report_to": "track.sinks",
    "ref_model": "reference.path",
    "r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "target_modules": "lora.targets",
    "epsilon_high": "method.clip_high",
    "clip_ratio": "method.clip_low and method.clip_high",
    "clip_ratio_low": "method.clip_low",
    "clip_ratio_high": "method.clip_high",
    "scale_rewards": "method.credit ('centred' does not divide, 'normalised_sample' does)",
    "norm_adv_by_std_in_grpo": "method.credit ('centred' does not divide, 'normalised_sample' does)",
    "importance_sampling_level": "method.ratio",
    "loss_agg_mode": "method.reduction",
    "kl_loss_type": "method.kl",
    "kl_estimator": "method.kl",
    "use_kl_loss": "method.kl_in_loss",
    "use_kl_in_reward": "method.kl_in_reward",
    "entropy_coeff": "method.entropy_bonus",
    "vf_coef": "method.value_weight",
    "cliprange_value": "method.value_clip",
    "rpo_alpha": "method.sft_weight",
    "f_divergence_type": "method.divergence",
    "use_score_norm": "verifier.normalise",
    "reward_model_path": "verifier.model.paths",
    "torch_dtype": "model.dtype",
    "fp16": "model.dtype",
    "dataset_split": "task.data.split",
    "eval_dataset": "task.held_out.path (held_out= from Python)",
    "dataset_text_field": "task.data.columns",
    "n_samples_per_prompt": "rollout.group_size",
    "rollout_batch_size": "rollout.groups",
    "generation_batch_size": "rollout.groups",
    "max_tokens": "sampling.max_new_tokens",
    "max_response_length": "sampling.max_new_tokens",
    "stop_token": "sampling.stop",
    "ppo_epochs": "steps.epochs",
    "ppo_mini_batch_size": "steps.minibatches",
    "steps_per_generation": "steps.minibatches",
    "ppo_micro_batch_size_per_gpu": "steps.microbatch_tokens",
    "ppo_max_token_len_per_gpu": "steps.microbatch_tokens",
    "enable_gradient_checkpointing": "steps.gradient_checkpointing",
    "adam_beta1": "optim.betas",
    "adam_beta2": "optim.betas",
    "adam_epsilon": "optim.eps",
    "warmup_steps": "optim.warmup_steps",
    "lr_warmup_steps": "optim.warmup_steps",
    "max_norm": "optim.max_grad_norm",
    "grad_clip": "optim.max_grad_norm",
    "total_epochs": "run.updates (epochs × records / batch.batch_size, or rollout.groups)",
    "total_training_steps": "run.updates",
    "save_freq": "checkpoint.every",
    "test_freq": "eval.every",
    "save_total_limit": "checkpoint.keep",
    "max_ckpt_to_keep": "checkpoint.keep",
    "project_name": "track.project",
    "experiment_name": "track.name",
    "run_name": "track.name",
    "output_dir": "the option --run-dir",
    "resume_from_checkpoint": "the option --resume",
    "sync_ref_model": "reference.refresh_every",
    "ref_model_sync_steps": "reference.refresh_every",
    "ref_model_mixup_alpha": "reference.keep",
    "lora_rank": "lora.rank",
    "lora_r": "lora.rank",
    "use_rslora": "lora.rslora",
    "use_dora": "lora.dora",
    "init_lora_weights": "lora.init",
    "model": "model.path",
    "dtype": "model.dtype",
    "train_dataset": "task.data.path (data= from Python)",
    "dataset_train_split": "task.data.split",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "weight_decay": "optim.weight_decay",
    "max_grad_norm": "optim.max_grad_norm",
    "min_lr_ratio": "optim.min_lr_ratio",
    "gradient_checkpointing": "steps.gradient_checkpointing",
    "delta": "method.cap, of the surrogate dual_clipped",
    "clip_ratio_c": "method.cap, of the surrogate dual_clipped",
    "vllm_importance_sampling_correction": "method.correction",
    "vllm_importance_sampling_mode": "method.correction",
    "vllm_importance_sampling_clip_max": "method.weight_cap",
    "rollout_is": "method.correction",
    "rollout_rs": "method.correction",
    "rollout_is_threshold": "method.weight_cap",
    "off_policy_mask_threshold": "method.off_policy_mask",
    "entropy_coef": "method.entropy_bonus",
    "tools": "task.tools.functions",
    "center_rewards_coefficient": "method.centre",
    "use_vllm": "engine.name",
    "rollout.name": "engine.name",
    "log_completions": "record.tokens",
    "seed": "run.seed",
    "batch_size": "batch.batch_size, or rollout.groups",
    "lora_target_modules": "lora.targets",
    "peft_config": "lora.rank, and others of lora",
    "gamma": "method.gamma",
    "lam": "method.lam",
    "kl_ctrl.type": "method.control",
    "target_kl": "method.kl_target",
    "filter_groups.enable": "rollout.select",
    "max_num_gen_batches": "rollout.max_rounds",
    "model.path": "model.path",
    "custom_reward_function.path": "verifier.function",
    "model_path": "verifier.model.paths",
    "loss_mode": "method.name",
    "train_files": "task.data.path",
    "val_files": "task.held_out.path",
    "prompt_key": "task.data.columns",
    "max_actor_ckpt_to_keep": "checkpoint.keep",
    "logger": "track.sinks",
    "n_gpus_per_node": "train.ranks, or torchrun",
    "nnodes": "train.ranks, or torchrun",
    "lr_warmup_steps_ratio": "optim.warmup_steps (a number of steps)",
}
"""What TRL, verl and peft call things, and the keys of a recipe."""


NOWHERE = {
    "logging_steps": "leave it out: every update is logged",
    "packing": "leave it out: rows are always packed",
    "padding_free": "leave it out: rows are always packed",
    "assistant_only_loss": "leave it out: only answers are learnt from, always",
    "completion_only_loss": "leave it out: only answers are learnt from, always",
    "mask_truncated_completions": "take method.overlong_buffer, which makes answers that are cut off cost",
    "top_entropy_quantile": "leave it out: every token that was sampled is trained",
    "repetition_penalty": "leave it out: answers are the policy's own; [verifier.repetition] judges them",
    "lora_dropout": "leave it out: adapters have no dropout",
    "bias": "leave it out: biases are not trained beside an adapter",
}
"""What other trainers have a key for, and there is none here."""


def elsewhere(name: str, known: Container[str] = ()) -> str:
    """What a name of another trainer is called in a recipe, or among these keys; empty if it is none.

    Of a dotted name the longest end that is known counts.

    >>> elsewhere("num_generations"), elsewhere("learning_rate", ["lr"]), elsewhere("colour")
    ('it is rollout.group_size here', "did you mean 'lr'?", '')
    """
    ends = [name.split(".", n)[-1] for n in range(name.count(".") + 1)]
    if nowhere := next((NOWHERE[end] for end in ends if end in NOWHERE), ""):
        return nowhere
    found = next((ELSEWHERE[end] for end in ends if end in ELSEWHERE), "")
    key = found.rpartition(".")[2]
    if key in known:
        return f"did you mean {key!r}?"
    return f"it is {found} here" if found else ""


def dotted(name: str, value: Any) -> str:
    """A name with those of its first value within tables, as verl's have it.

    >>> dotted("actor", {"optim": {"lr": 1e-6}})
    'actor.optim.lr'
    """
    while isinstance(value, Mapping) and value:
        key, value = next(iter(value.items()))
        name = f"{name}.{key}"
    return name


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the nearest known name; empty if none is near.

    >>> did_you_mean("anwser", ["question", "answer"])
    "did you mean 'answer'?"
    >>> did_you_mean("x", ["question", "answer"])
    ''
    """
    found = nearest(name, known)
    return f"did you mean {found!r}?" if found else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is nearest, in any case of letters; empty if none is near."""
    lower = {k.lower(): k for k in known}
    # As near as others, letters in another order are the likelier slip: gpro is grpo, not gspo.
    found = get_close_matches(name.lower(), lower, n=3, cutoff=0.7)
    swapped = [each for each in found if sorted(each) == sorted(name.lower())]
    return lower[[*swapped, *found][0]] if found else ""
