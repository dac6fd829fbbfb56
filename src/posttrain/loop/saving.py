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

Ranks with shares of the weights write together. They gather one tensor after the other, and each keeps some
and writes them to files of its own: model/model-00002-of-00004.safetensors is that of rank 1. A tensor is
whole in its file, so transformers loads model/, and any number of ranks resumes.
"""

import json
import pickle
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from threading import Event
from typing import Any

import torch

from posttrain.base.usercode import cause
from posttrain.curriculum.replay_buffer import ReplayBuffer
from posttrain.learner.learner import Learner
from posttrain.learner.lora import base, save_adapter
from posttrain.learner.ranks import Ranks
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
_LABEL = "the checkpoint"
_PART = re.compile(r"-\d{5}-of-\d{5}$")
"""End of the name of a file that one of several ranks wrote."""
_LAYER = re.compile(r".*?\.\d+\.")
"""Start of the names of a layer's tensors."""

Tensors = dict[str, torch.Tensor]


class CheckpointWriter:
    """Writes checkpoints in the call that saves them, or in a thread, one after the other.

    An asynchronous writer reports a checkpoint, or the error, when it is asked for it (`written`, `wait`).
    """

    def __init__(self, ranks: Ranks, *, asynchronous: bool = False) -> None:
        self.ranks, self.asynchronous = ranks, asynchronous
        self.given_up = Event()
        """Set once the checkpoint that is being written will not be completed."""
        self._seconds, self._start_time = 0.0, 0.0
        self._job: Future[Path] | None = None
        self._follows = False
        """True until all ranks have waited for the newest checkpoint."""
        self._written: list[Path] = []

    def begin(self) -> None:
        """Begin a checkpoint; the one before must be complete."""
        assert self._job is None
        self._start_time = time.monotonic()

    def start(self, write: Callable[[], Path]) -> None:
        """Write the files of the checkpoint that was begun; `write` returns its path."""

        def run() -> Path:
            path = write()
            self._seconds = time.monotonic() - self._start_time
            return path

        self.given_up.clear()
        self._follows = self.ranks.size > 1
        if self.asynchronous:
            pool = ThreadPoolExecutor(1, "checkpoint")
            self._job = pool.submit(run)
            pool.shutdown(wait=False)  # the thread ends after this job
        else:
            self._written.append(run())
            self.wait()

    @property
    def seconds(self) -> float:
        """The seconds that the newest checkpoint took until it was complete, or has taken so far."""
        busy = self._job is not None and not self._job.done()
        return max(self._seconds, time.monotonic() - self._start_time if busy else 0.0)

    def written(self) -> list[Path]:
        """Return the checkpoints completed since the last call; raise the RunError of one that failed."""
        if self._job is not None and self._job.done():
            self._finish()
        paths, self._written = self._written, []
        return paths

    def wait(self) -> None:
        """Wait until the newest checkpoint is complete; all ranks call this. Raises RunError if it failed."""
        self._finish()
        if self._follows:
            self.ranks.follow(_LABEL)
            self._follows = False

    def stop(self, error: BaseException | None) -> None:
        """Complete the checkpoint that is being written, at the end of a session that this error ended.

        It is given up at the end of a file after a KeyboardInterrupt, and on several ranks, where others may
        be lost. A failure is noted on the error.
        """
        if isinstance(error, KeyboardInterrupt) or self.ranks.size > 1:
            self.given_up.set()
        try:
            self._finish()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(str(failure))

    def _finish(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            self._written.append(job.result())


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
    writer: CheckpointWriter | None = None,
) -> Path:
    """Write a checkpoint of this state and return its path; `head`: the class of a reward model's files.

    With an asynchronous `writer` this returns once all tensors are copied to host memory; the one before must
    be complete. Ranks without shares hold the same tensors, which rank 0 writes alone.
    """
    ranks, update = learner.ranks, int(state["progress"]["update"])
    writer = writer or CheckpointWriter(ranks)
    writer.begin()
    tensors, model_tensors = _gather_shards(learner, head=head is not None, copies=writer.asynchronous)
    if replay is not None:
        tensors[REPLAY] = replay.tensors()
    if model_tensors:
        model_tensors = to_files(base(learner.model), model_tensors)
    files, index = _files(learner, tensors, model_tensors)
    flight_bytes = pickle.dumps(flight) if flight and not ranks.rank else b""
    draft, saved, best = root, dict(state), None
    if not ranks.rank:
        saved |= {"learner": learner.state()}
        saved = deepcopy(saved) if writer.asynchronous else saved
        best = _add_best(saved, root, settings) if settings.best else None
        with _naming_kept(root):
            draft = checkpoint.begin(root, update)
            with checkpoint.writing(draft):
                _write_descriptions(draft, learner, tokenizer, head, index)
    ranks.follow(_LABEL)
    draft = ranks.tell(draft, _LABEL)

    def write(folder: Path) -> checkpoint.Entries:
        names = [*files]
        for name in names:
            if writer.given_up.is_set():
                raise RunError(f"write {checkpoint.named_by(folder)}", "the run ended before it was complete")
            write_tensors(folder / name, files.pop(name))
        if flight_bytes:
            (folder / checkpoint.RESUME).mkdir(exist_ok=True)
            (folder / checkpoint.RESUME / FLIGHT).write_bytes(flight_bytes)
        if not _writes_parts(learner):
            return {}
        entries = checkpoint.seal(folder, [folder / name for name in names])
        parts = ranks.collect(entries, _LABEL, writer.given_up)
        return {name: entry for part in parts for name, entry in part.items()}

    def commit() -> Path:
        with _naming_kept(root):
            if ranks.rank:
                with checkpoint.writing(draft, shared=True):
                    write(draft)
                return checkpoint.named_by(draft)
            return checkpoint.save(
                root,
                update,
                write,
                saved,
                keep=settings.keep,
                keep_weights=settings.keep_weights,
                best=best,
                draft=draft,
            )

    del tensors, model_tensors
    writer.start(commit)
    return checkpoint.named_by(draft)


@contextmanager
def _naming_kept(root: Path) -> Iterator[None]:
    """Add the newest checkpoint, and how to resume, to a RunError of the block."""
    try:
        yield
    except RunError as error:
        raise RunError(error.operation, error.cause, kept(root.parent)) from error


def _writes_parts(learner: Learner) -> bool:
    """Return whether each rank writes a part of the tensors."""
    return learner.parallel.shard and learner.ranks.size > 1


def _files(
    learner: Learner, tensors: Mapping[str, Tensors], model_tensors: Tensors
) -> tuple[dict[str, Tensors], dict[str, Any]]:
    """Return the tensors that this rank writes by file, and the index of model/, empty for a single file."""
    ranks, part, index = learner.ranks, "", dict[str, Any]()
    model_file = "model.safetensors"
    if _writes_parts(learner):
        part = f"-{ranks.rank + 1:05d}-of-{ranks.size:05d}"
        model_file = f"model{part}.safetensors"
        places = dict.fromkeys(model_tensors, model_file)
        size = sum(x.numel() * x.element_size() for x in model_tensors.values())
        parts = ranks.gather((places, size), _LABEL)
        weight_map = {name: file for names, _ in parts for name, file in sorted(names.items())}
        index = {"metadata": {"total_size": sum(n for _, n in parts)}, "weight_map": weight_map}
    files = {f"{checkpoint.RESUME}/{name}{part}.safetensors": x for name, x in tensors.items()}
    trained = files.pop(f"{checkpoint.RESUME}/trained{part}.safetensors")
    if learner.lora.rank:
        files["trained.safetensors"] = trained
    if model_tensors:
        files[f"model/{model_file}"] = model_tensors
    return {name: x for name, x in files.items() if x or not ranks.rank}, index


def _write_descriptions(
    folder: Path, learner: Learner, tokenizer: Any, head: type | None, index: Mapping[str, Any]
) -> None:
    """Write the small files of model/ and adapter/, and an adapter's weights."""
    model = base(learner.model)
    if learner.lora.rank:
        save_adapter(learner.model, folder / "adapter")
        tokenizer.save_pretrained(folder / "adapter")  # with its chat template
        if head is None:
            return
    config, saved_tokenizer = model.config, tokenizer
    if head is not None:
        saved_tokenizer = heads.padded(tokenizer, _ends(model, tokenizer))
        config = heads.head_config(config, head, saved_tokenizer.pad_token_id)
    config.save_pretrained(folder / "model")
    model.generation_config.save_pretrained(folder / "model")
    saved_tokenizer.save_pretrained(folder / "model")
    if index:
        (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _add_best(saved: dict[str, Any], root: Path, settings: Checkpoints) -> int | None:
    """Return the update with the best evaluation; add a better one without a checkpoint to the state."""
    curves, metric = _curves(root), settings.best_metric
    best = _best_update(curves, root, metric, saved["progress"]["update"])
    if best is not None and (unsaved := _unsaved_best(curves, metric, best)):
        saved[checkpoint.UNSAVED] = unsaved
    return best


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


def _gather_shards(
    learner: Learner, *, head: bool, copies: bool = False
) -> tuple[dict[str, Tensors], Tensors]:
    """Return what this rank writes: tensors by file, and those of a model saved whole, with its head.

    Shards are gathered, and masters made, one tensor at a time, so that no device ever holds the whole model,
    and no GPU more than it does in training. Ranks with shares deal the tensors by bytes, the tensors of a
    layer in a file together, since those in model/ may be made of several. All others are rank 0's. copies:
    no later update changes the tensors.
    """
    adapter, model_tensors = bool(learner.lora.rank), Tensors()
    sizes, owners = [0] * learner.ranks.size, dict[tuple[str, str], int]()

    def writes(file: str, name: str, x: torch.Tensor) -> bool:
        owner = 0
        if _writes_parts(learner) and not (adapter and file in ("trained", "optimizer")):
            layer = _LAYER.match(name)
            owner = owners.setdefault((file, layer[0] if layer else name), sizes.index(min(sizes)))
            sizes[owner] += x.numel() * x.element_size()
        return learner.ranks.rank == owner

    def gather(file: str, tensors: Iterable[tuple[str, torch.Tensor]], *, stays: bool = False) -> Tensors:
        # stays: the learner's own tensors remain where they are until they are written.
        gathered = {}
        for name, tensor in tensors:
            full = whole(tensor)
            if writes(file, name, full):
                full, shared = full.detach(), full is tensor and stays and not copies
                gathered[name] = full if shared else full.to("cpu", copy=copies)
        return gathered

    with learner.ranks.waiting(_LABEL):
        tensors = {
            file: gather(file, pairs, stays=file.endswith("optimizer"))
            for file, pairs in learner.named_tensors().items()
        }
        if head and adapter:  # a verifier loads a reward model whole
            model_tensors = gather("trained model", learner.weights())
        elif not adapter:
            frozen = dict(base(learner.model).named_parameters())
            for master in learner.masters.masters:
                del frozen[master.name]
            model_tensors = gather("trained", frozen.items(), stays=True) | tensors["trained"]
        if head or not adapter:
            model_tensors |= gather("buffers", stored_buffers(base(learner.model)))
        if head and learner.critic is not None:
            model_tensors |= heads.head_tensors(gather("head", learner.critic.head.state_dict().items()))
    return tensors, model_tensors


def _ends(model: Any, tokenizer: Any) -> set[int]:
    """Return the tokens that end an answer, and so may be the last of a conversation."""
    ids = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])} - {None}


def restore(
    folder: Path, learner: Learner, state: Mapping[str, Any], replay: ReplayBuffer | None = None
) -> None:
    """Restore a checkpoint into the recipe's learner; raise UserError if it is of another model."""
    trained = folder / ("trained.safetensors" if learner.lora.rank else "model/model.safetensors")
    resume = folder / checkpoint.RESUME
    files: dict[str, list[Path]] = {}
    for file in checkpoint.listed(folder):
        if file.suffix == ".safetensors" and file.parent in (resume, trained.parent):
            name = _PART.sub("", file.stem) if file.parent == resume else "trained"
            files.setdefault(name, []).append(file)
    try:
        # Read one at a time, since ranks that share a machine may not have memory for all at once.
        tensors: dict[str, Mapping[str, torch.Tensor]]
        tensors = {name: LazyTensors(*parts) for name, parts in {"trained": [trained], **files}.items()}
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
