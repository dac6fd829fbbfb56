"""What a checkpoint of a learner holds, and how it goes back.

model/ or adapter/      what transformers or peft loads; model/ holds the float32 masters. A reward
                        model is in model/ with its head, adapter or not
trained.safetensors     the adapter's weights, where there is one
state.json              counts of the learner and of the loop
resume/                 what nothing but a resume reads:
  optimizer.safetensors   AdamW's moments
  critic.safetensors, critic_optimizer.safetensors   the same of a critic, where there is one
  reference.safetensors   the reference policy, where it is refreshed
  replay.safetensors      episodes to be trained on again, where there are
  flight.pickle           groups that were admitted and not trained on yet, token for token: with states of
                          environments, which are any objects that can be pickled
"""

import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.base.usercode import cause
from posttrain.curriculum.replay_buffer import ReplayBuffer
from posttrain.learner.learner import Learner
from posttrain.learner.lora import base, save_adapter
from posttrain.learner.shards import whole
from posttrain.models import checkpoint, heads
from posttrain.models.tensor_files import Stored, read_tensors, write_tensors
from posttrain.recipe.recipe import Checkpoints
from posttrain.report.headline import best as best_evaluation
from posttrain.report.record import each_line, metrics
from posttrain.run.rundir import kept as what_is_kept
from posttrain.types import RunError, UserError

REPLAY = "replay"
FLIGHT = "flight.pickle"


def save(
    root: Path,
    learner: Learner,
    tokenizer: Any,
    kept: Checkpoints,
    state: Mapping[str, Any],
    flight: Mapping[str, Any],
    *,
    head: type | None,
    replay: ReplayBuffer | None,
) -> Path:
    """The committed checkpoint of this state; `head` is the class under which a reward model is saved.

    All ranks gather it, one tensor after the other, and rank 0 writes it, as one process would.
    """
    tensors, held = _gather_shards(learner, head=head is not None)
    if replay is not None:
        tensors[REPLAY] = replay.tensors()
    if learner.ranks.rank:
        return learner.ranks.tell(root, "the checkpoint")

    def write(folder: Path) -> None:
        for name in tensors.keys() - {"trained"}:
            write_tensors(folder / checkpoint.RESUME / f"{name}.safetensors", tensors[name])
        if flight:
            (folder / checkpoint.RESUME).mkdir(exist_ok=True)
            (folder / checkpoint.RESUME / FLIGHT).write_bytes(pickle.dumps(flight))
        model = base(learner.model)
        if learner.lora.rank:
            write_tensors(folder / "trained.safetensors", tensors["trained"])
            save_adapter(learner.model, folder / "adapter")
            tokenizer.save_pretrained(folder / "adapter")  # with the template that it was trained under
            if head is None:
                return
        config, words = model.config, tokenizer
        if head is not None:
            words = heads.padded(tokenizer, _ends(model, tokenizer))
            config = heads.head_config(config, head, words.pad_token_id)
        write_tensors(folder / "model" / "model.safetensors", held)
        config.save_pretrained(folder / "model")
        model.generation_config.save_pretrained(folder / "model")
        words.save_pretrained(folder / "model")

    saved, update = {**state, "learner": learner.state()}, state["progress"]["update"]
    best = best_update(root, update) if kept.best else None
    try:
        made = checkpoint.save(
            root, update, write, saved, keep=kept.keep, keep_weights=kept.keep_weights, best=best
        )
    except RunError as error:
        raise RunError(error.operation, error.cause, what_is_kept(root.parent)) from error
    return learner.ranks.tell(made, "the checkpoint")


def best_update(root: Path, *more: int) -> int | None:
    """Return which of a run's checkpoints, or of `more` updates, has the best evaluation."""
    curves, _ = metrics(each_line(root.parent / "metrics.jsonl", []))
    found = best_evaluation(curves, {*more, *dict(checkpoint.numbered(root))})
    return found[1] if found else None


Tensors = dict[str, torch.Tensor]


def _gather_shards(learner: Learner, *, head: bool) -> tuple[dict[str, Tensors], Tensors]:
    """(what a checkpoint holds, by file, the model that is saved whole, with its head), on rank 0.

    Of shares the whole is gathered, one tensor at a time, so that no device ever holds the model.
    """

    def kept(tensors: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
        found = {}
        for name, tensor in tensors:
            one = whole(tensor)
            if learner.ranks.rank == 0:
                found[name] = (one if one is tensor else one.cpu()).detach()
        return found

    adapter, held = bool(learner.lora.rank), Tensors()
    with learner.ranks.waiting("the checkpoint"):
        tensors = {file: kept(each.items()) for file, each in learner.tensors().items()}
        if head and adapter:  # a verifier loads a reward model whole
            held = kept(learner.weights())
        elif not adapter:
            frozen = dict(base(learner.model).named_parameters())
            for master in learner.masters.masters:
                del frozen[master.name]
            held = kept(frozen.items()) | tensors["trained"]
        if held:
            held |= kept(_stored_buffers(base(learner.model)))
        if head and learner.critic is not None:
            held |= heads.head_tensors(kept(learner.critic.head.state_dict().items()))
    return tensors, held


def _stored_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What a model's files hold besides its parameters, such as the biases by which experts are chosen."""
    stored = model.state_dict().keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in stored)


def _ends(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end an answer, and so may be a conversation's last."""
    named = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])} - {None}


def restore(
    folder: Path, learner: Learner, state: Mapping[str, Any], replay: ReplayBuffer | None = None
) -> None:
    """Puts a checkpoint back into what the same recipe made; UserError if it is of another."""
    trained = "trained.safetensors" if learner.lora.rank else "model/model.safetensors"
    try:
        resume = folder / checkpoint.RESUME
        # One at a time, as ranks that share a machine may have no room for all of them at once.
        files = (file for file in checkpoint.listed(folder) if file.parent == resume)
        tensors = {file.stem: Stored(file) for file in files if file.suffix == ".safetensors"}
        tensors["trained"] = Stored(folder / trained)
        learner.restore(tensors, state["learner"])
        if replay is not None:
            replay.restore(read_tensors(resume / f"{REPLAY}.safetensors"))
    except (KeyError, RuntimeError, FileNotFoundError) as error:
        raise UserError(
            str(folder),
            f"this checkpoint is of another model or adapter: {error}",
            "resume with the recipe that it was made with",
        ) from error


def flight(folder: Path | None) -> Mapping[str, Any]:
    """What was running at this checkpoint; empty if nothing was. UserError for what cannot be read here."""
    file = (folder or Path()) / checkpoint.RESUME / FLIGHT
    if folder is None or not file.exists():
        return {}
    try:
        found: Mapping[str, Any] = pickle.loads(file.read_bytes())
    except Exception as error:  # code of an environment that has changed, say
        raise UserError(str(file), f"what was running cannot be read: {cause(error)}") from None
    return found
