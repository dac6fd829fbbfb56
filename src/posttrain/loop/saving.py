"""Save and restore checkpoints of a learner and its loop.

model/ or adapter/      for transformers or peft; model/ holds the float32 masters, under the names of the
                        model's own files. A reward model is in model/ with its head, with or without an
                        adapter
trained.safetensors     the weights of an adapter
state.json              counts of the learner and of the loop
resume/                 read only when a run is resumed:
  optimizer.safetensors   AdamW's moments
  critic.safetensors, critic_optimizer.safetensors   a critic's weights and moments
  reference.safetensors   the reference policy, if it is refreshed
  replay.safetensors      episodes to train on again
  flight.pickle           groups that were admitted and not trained on yet, with all tokens and the states of
                          environments, which are any objects that can be pickled
"""

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from posttrain.base.usercode import cause
from posttrain.curriculum.replay_buffer import ReplayBuffer
from posttrain.learner.learner import Learner
from posttrain.learner.lora import base, save_adapter
from posttrain.learner.shards import whole
from posttrain.models import checkpoint, heads
from posttrain.models.file_names import FromFiles, to_files
from posttrain.models.loading import stored_buffers
from posttrain.models.tensor_files import LazyTensors, read_tensors, write_tensors
from posttrain.recipe.recipe import Checkpoints
from posttrain.report.headline import best as best_evaluation
from posttrain.report.record import Curves, iterate_lines, metrics
from posttrain.run.rundir import kept
from posttrain.types import RunError, UserError

REPLAY = "replay"
FLIGHT = "flight.pickle"


def save(
    root: Path,
    learner: Learner,
    tokenizer: Any,
    settings: Checkpoints,
    state: Mapping[str, Any],
    flight: Mapping[str, Any],
    *,
    head: type | None,
    replay: ReplayBuffer | None,
) -> Path:
    """Write a checkpoint of this state and return its folder; `head`: the class of a reward model's files.

    All ranks gather the tensors, one after the other, and rank 0 writes them, as a single process would.
    """
    tensors, model_tensors = _gather_shards(learner, head=head is not None)
    if replay is not None:
        tensors[REPLAY] = replay.tensors()
    if learner.ranks.rank:
        learner.ranks.follow("the checkpoint")
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
            tokenizer.save_pretrained(folder / "adapter")  # with its chat template
            if head is None:
                return
        config, saved_tokenizer = model.config, tokenizer
        if head is not None:
            saved_tokenizer = heads.padded(tokenizer, _ends(model, tokenizer))
            config = heads.head_config(config, head, saved_tokenizer.pad_token_id)
        write_tensors(folder / "model" / "model.safetensors", to_files(model, model_tensors))
        config.save_pretrained(folder / "model")
        model.generation_config.save_pretrained(folder / "model")
        saved_tokenizer.save_pretrained(folder / "model")

    saved, update = {**state, "learner": learner.state()}, state["progress"]["update"]
    best = None
    if settings.best:
        curves, metric = _curves(root), settings.best_metric
        best = _best_update(curves, root, metric, update)
        if best is not None and (unsaved := _unsaved_best(curves, metric, best)):
            saved[checkpoint.UNSAVED] = unsaved
    try:
        folder = checkpoint.save(
            root, update, write, saved, keep=settings.keep, keep_weights=settings.keep_weights, best=best
        )
    except RunError as error:
        raise RunError(error.operation, error.cause, kept(root.parent)) from error
    learner.ranks.follow("the checkpoint")
    return learner.ranks.tell(folder, "the checkpoint")


def best_update(root: Path, metric: str = "") -> int | None:
    """Return which of a run's checkpoints has the best evaluation by this metric."""
    return _best_update(_curves(root), root, metric)


def _best_update(curves: Curves, root: Path, metric: str, *more: int) -> int | None:
    """Return which of a run's checkpoints, or of `more` updates, has the best evaluation by this metric."""
    best = best_evaluation(curves, {*more, *dict(checkpoint.numbered(root))}, metric)
    return best[1] if best else None


def _unsaved_best(curves: Curves, metric: str, saved: int) -> tuple[int, float, float] | None:
    """Return (update, value, value at `saved`) of the best evaluation; None if that at `saved` is as good."""
    top, best = best_evaluation(curves, by=metric), best_evaluation(curves, {saved}, metric)
    return (top[1], top[2], best[2]) if top and best and top[2] != best[2] else None


def _curves(root: Path) -> Curves:
    return metrics(iterate_lines(root.parent / "metrics.jsonl", []))[0]


Tensors = dict[str, torch.Tensor]


def _gather_shards(learner: Learner, *, head: bool) -> tuple[dict[str, Tensors], Tensors]:
    """Return (tensors by file, tensors of the model that is saved whole, with its head), on rank 0.

    Shards are gathered, and masters made, one tensor at a time, so that no device ever holds the whole model,
    and no GPU more than it does in training.
    """

    def gather(tensors: Iterable[tuple[str, torch.Tensor]], *, stays: bool = False) -> Tensors:
        # stays: the learner's own tensors remain where they are until they are written.
        gathered = {}
        for name, tensor in tensors:
            full = whole(tensor)
            if learner.ranks.rank == 0:
                gathered[name] = (full if full is tensor and stays else full.cpu()).detach()
        return gathered

    adapter, model_tensors = bool(learner.lora.rank), Tensors()
    with learner.ranks.waiting("the checkpoint"):
        tensors = {
            file: gather(pairs, stays=file.endswith("optimizer"))
            for file, pairs in learner.named_tensors().items()
        }
        if head and adapter:  # a verifier loads a reward model whole
            model_tensors = gather(learner.weights())
        elif not adapter:
            frozen = dict(base(learner.model).named_parameters())
            for master in learner.masters.masters:
                del frozen[master.name]
            model_tensors = gather(frozen.items(), stays=True) | tensors["trained"]
        if model_tensors:
            model_tensors |= gather(stored_buffers(base(learner.model)))
        if head and learner.critic is not None:
            model_tensors |= heads.head_tensors(gather(learner.critic.head.state_dict().items()))
    return tensors, model_tensors


def _ends(model: Any, tokenizer: Any) -> set[int]:
    """Return the tokens that end an answer, and so may be the last of a conversation."""
    ids = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])} - {None}


def restore(
    folder: Path, learner: Learner, state: Mapping[str, Any], replay: ReplayBuffer | None = None
) -> None:
    """Restore a checkpoint into the recipe's learner; raise UserError if it is of another model."""
    trained = "trained.safetensors" if learner.lora.rank else "model/model.safetensors"
    try:
        resume = folder / checkpoint.RESUME
        # Read one at a time, since ranks that share a machine may not have memory for all at once.
        files = (file for file in checkpoint.listed(folder) if file.parent == resume)
        tensors: dict[str, Mapping[str, torch.Tensor]]
        tensors = {file.stem: LazyTensors(file) for file in files if file.suffix == ".safetensors"}
        tensors["trained"] = LazyTensors(folder / trained)
        if not learner.lora.rank:
            tensors["trained"] = FromFiles(base(learner.model), tensors["trained"])
        learner.restore(tensors, state["learner"])
        if replay is not None:
            replay.restore(read_tensors(resume / f"{REPLAY}.safetensors"))
    except (KeyError, RuntimeError, FileNotFoundError) as error:
        raise UserError(
            str(folder),
            f"this checkpoint is of another model or adapter: {error}",
            "resume with the recipe that it was made with",
        ) from error


def load_flight(folder: Path | None) -> Mapping[str, Any]:
    """Return the groups that were running at this checkpoint; raise UserError if they are unreadable."""
    file = (folder or Path()) / checkpoint.RESUME / FLIGHT
    if folder is None or not file.exists():
        return {}
    try:
        groups: Mapping[str, Any] = pickle.loads(file.read_bytes())
    except Exception as error:  # the code of an environment may have changed
        raise UserError(str(file), f"what was running cannot be read: {cause(error)}") from None
    return groups
