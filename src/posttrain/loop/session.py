"""A session: one run, stepped by the command line's loop or by a program of the user's.

    verb               does                                                           may be called in
    sample             get the next groups: judged episodes, or rows of the data      NEW, READY, SAMPLED
    batch              turn groups into the columns that the method sees              every phase
    update             make the optimiser steps of one update                         all but GRADIENTS
    forward_backward   add gradients                                                  every phase
    optim_step         move the learner by the gradients                              GRADIENTS
    publish            send the sampler the weights, and check that they arrived      all but GRADIENTS
    evaluate           measure on held-out tasks or rows                              every phase
    save               write the line of the update, then a checkpoint                NEW, READY

    phase       entered by                                                  to call first
    NEW         opening: samplers have no weights yet
    READY       publish; sample, if it keeps no group; offline, update
    SAMPLED     sample; the first verb that trains other rows               update
    PARTIAL     an update that fails after some of its optimiser steps      publish
    UPDATED     update, optim_step                                          publish
    GRADIENTS   forward_backward                                            optim_step
    CUT         an interruption inside a verb                               save, if that verb was sample
    CLOSED      close

`step` calls the verbs in their order, and `finish` calls `step` until the last update.

The state of a run is in the learner, the journal's progress and the groups of samplers. So a run that is
killed and resumed from a checkpoint computes the same numbers as an uninterrupted one, unless they depend on
a clock.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy

from posttrain.errors import RESUME
from posttrain.learner.learner import Learner, Loss, Losses, Update
from posttrain.loop.loop import Loop, LoopState, Parts
from posttrain.loop.phases import FIRST, VERBS, Phase
from posttrain.report.headline import progress_ended
from posttrain.report.record import OUT_OF_TIME, STOPPED_ON_REQUEST, iterate_lines, read_json_lines
from posttrain.report.record import metrics as curves_of
from posttrain.run.rundir import kept
from posttrain.run.tables import Groups, Metrics, check_groups
from posttrain.run.track import METRICS
from posttrain.types import Batch, RunError


def _due(every: int, update: int) -> bool:
    return bool(every) and update % every == 0


class LoopSession:
    """One run, step by step; use it in a `with`, or close it, to free its resources.

    `update` needs the groups of `sample`, or a batch of the program, and the next `sample` needs `publish`.
    Sampling again without an update continues with the next tasks or rows. One line of metrics is written for
    each update, when the next one begins, by `save`, or at the end; so evaluate before you save.
    """

    def __init__(self, parts: Parts, callbacks: Sequence[object] = ()) -> None:
        self._parts: Parts | None = parts
        self.run_dir, self._callbacks = parts.run_dir, callbacks
        self._stop_asked: Callable[[], bool] = lambda: False
        self._phase = self._settled = Phase.NEW
        """The phase, and the latest one that was neither GRADIENTS nor CUT."""
        self._cut = ""
        """In phase CUT, the verb that was interrupted."""
        self._logged = parts.loop.progress.update or -1
        """The newest update whose line is written; -1 before the first line."""
        self._last_batch: tuple[object, Batch] | None = None
        """The latest groups that were made a batch, and the batch."""
        self._before: LoopState | None = None
        """The state before the newest update, if a checkpoint there would be complete."""
        self._saved_steps = self._written_steps = parts.loop.learner.step_count
        """The optimiser steps of the newest complete checkpoint, and of the one that was started last."""
        self._began, self._slowest = time.monotonic(), 0.0
        """Start of this process's session, and seconds of its slowest update."""
        self._ended = False
        """True once callbacks were notified of the end."""
        self.stopped: str | None = None
        """What stopped the run before its last update: a callback, or a key of [run]."""
        self.reached = False
        """True if `run.stop_when` or `run.patience` stopped the run."""
        self._stop_where(self.metrics if parts.stop_when else ())  # a resumed run may have reached its end
        self.evaluated = dict[str, float]()
        """The metrics of the latest evaluation."""

    # ------------------------------------------------------------------ properties

    @property
    def learner(self) -> Learner:
        """The model, its method and its optimiser; raises RunError once the session is closed."""
        return self._open.learner

    @property
    def metrics(self) -> Metrics:
        """The lines of metrics so far, and that of the pending update."""
        lines = read_json_lines(self.run_dir.path / METRICS)[0]
        pending = self._parts.loop.journal.pending if self._parts else {}
        now = [{"update": self.update_count, **pending}] if pending else []
        return Metrics(lines + now)

    @property
    def update_count(self) -> int:
        """The number of updates begun."""
        return self._open.progress.update

    @property
    def done(self) -> bool:
        """True if all updates are made, or if the run was stopped."""
        return self.stopped is not None or (self.update_count >= self._open.updates and not self._pending)

    @property
    def _pending(self) -> bool:
        """True if an update has begun and is not trained on, or only in part."""
        return self._settled in (Phase.SAMPLED, Phase.PARTIAL)

    @property
    def _open(self) -> Loop:
        return self._open_parts.loop

    @property
    def _open_parts(self) -> Parts:
        if self._parts is None:
            raise RunError("session", f"it is closed; open another one with {RESUME} to continue")
        return self._parts

    # ------------------------------------------------------------------ verbs

    def sample(self) -> Groups:
        """Return the next groups: episodes with verdicts, selected as the recipe says; offline the next rows.

        Empty if selection keeps none: then this update trains on nothing. Raises RunError if changed weights
        were not published, if all updates are made (`done`), and for errors that end sampling.
        """
        loop = self._ready("sample")
        self._note_written()
        if self._phase is Phase.SAMPLED:
            loop.abandon()
            loop.journal.pending.clear()
            self._enter(Phase.READY)
        else:
            self._flush()
        if self.update_count >= loop.updates:
            why = f"all updates are made, {loop.updates}: ask for more when the session is opened"
            raise RunError("sample()", why)
        self._before = loop.before()
        with self._interruptible("sample()"):
            groups = loop.sample()
        self._last_batch = None
        self._enter(Phase.SAMPLED if groups else Phase.READY)
        return groups

    def batch(self, groups: Sequence[Sequence[Any]]) -> Batch:
        """Return the columns of these groups that the method will see, without unjudged episodes."""
        batch = self._ready("batch").batch(groups)
        self._last_batch = groups, batch
        return batch

    def update(self, groups: Sequence[Sequence[Any]] | Batch) -> Update:
        """Make one update: epochs × minibatches optimiser steps on groups, or on a batch.

        Raises RunError if a loss or gradient is not finite, and ValueError if no token is trained.
        """
        loop = self._ready("update")
        batch = groups if isinstance(groups, Batch) else self._batch_of(groups)
        self._begin_update()
        with self._interruptible("update()"):
            if self._settled is Phase.SAMPLED:
                loop.feed()
            loop.make_room()
            with loop.journal.timed("train"):
                update = loop.learner.update(batch)
            loop.count(update)
        loop.journal.pending |= update.metrics
        self._enter(Phase.UPDATED if loop.publishes else Phase.READY)
        return update

    def forward_backward(self, groups: Sequence[Sequence[Any]] | Batch, loss: Loss | None = None) -> Losses:
        """Add the gradient of the method's loss, or of this one, without a step (see Learner)."""
        loop = self._ready("forward_backward")
        batch = groups if isinstance(groups, Batch) else self._batch_of(groups)
        self._begin_update()
        with self._interruptible("forward_backward()"):
            loop.make_room()
            with loop.journal.timed("train"):
                losses = loop.learner.forward_backward(batch, loss)
        loop.journal.pending |= losses.metrics
        self._phase = Phase.GRADIENTS
        return losses

    def optim_step(self, lr: float | None = None) -> dict[str, float]:
        """Make one optimiser step on all gradients added so far; return its rate and the gradient norm.

        The norm is that before clipping. lr: the rate of this step, instead of the schedule's.
        """
        loop = self._ready("optim_step")
        with self._interruptible("optim_step()"):
            with loop.journal.timed("train"):
                metrics = loop.learner.optim_step(lr)
            loop.count(None)
        loop.journal.pending |= metrics
        self._enter(Phase.UPDATED if loop.publishes else Phase.READY)
        return metrics

    def publish(self) -> None:
        """Send the weights to the sampler; raise RunError unless it proves that it has them."""
        loop = self._ready("publish")
        with self._interruptible("publish()"):
            loop.publish()
        self._last_batch = None
        self._enter(Phase.SAMPLED if self._pending else Phase.READY)

    def evaluate(self) -> dict[str, float]:
        """Return metrics of the held-out tasks or rows; empty if there are none."""
        loop = self._ready("evaluate")
        metrics = loop.evaluate()
        if not metrics:
            return {}
        self.evaluated = metrics
        if self._logged != self.update_count:
            loop.journal.pending |= metrics
        self._notify("on_evaluate", self.evaluated)
        return self.evaluated

    def save(self) -> Path:
        """Write a checkpoint, from which the same recipe resumes; return its folder.

        After an interrupted sample() it has the state before that, unless this was saved already. With
        `checkpoint.async_save` it is complete before the next one is begun, and when the session is closed.
        """
        if self._cut == "sample()" and (path := self.save_whole()):
            return path
        loop = self._ready("save")
        self._flush()
        state = loop.state()
        if not self.done:
            loop.feed()  # samplers work while the checkpoint is written
        with loop.journal.timed("checkpoint"):
            return self._write(state)

    def save_whole(self) -> Path | None:
        """Save what was trained since the last checkpoint; return None if that is nothing, or is unreliable.

        The groups of a pending update are not saved: a resumed run samples the same tasks again.
        """
        loop = self._open
        self._wait_for_writer()
        reliable = self._cut in ("", "sample()", "forward_backward()")  # none of which moves a weight
        if self._saved_steps == loop.learner.step_count or not reliable:
            return None
        loop.learner.forget_gradients()
        if self._phase is Phase.GRADIENTS:
            self._phase = self._settled
        if self._settled in (Phase.PARTIAL, Phase.UPDATED):
            self.publish()
        if self._phase is Phase.READY:
            return self.save()
        return None if self._before is None else self._write(self._before)

    def _write(self, state: LoopState) -> Path:
        self._wait_for_writer()
        self._written_steps = self._open.learner.step_count
        path = self._open_parts.checkpoint(*state)
        self._note_written()
        return path

    def _wait_for_writer(self) -> None:
        """Wait until the newest checkpoint is complete on all ranks; raise RunError if it is not."""
        self._open_parts.writer.wait()
        self._note_written()

    def _note_written(self) -> None:
        """Notify callbacks of complete checkpoints; raise RunError if one could not be written."""
        for path in self._open_parts.writer.written():
            self._saved_steps = self._written_steps
            self._notify("on_save", path)

    # ------------------------------------------------------------------ whole updates

    def step(self) -> dict[str, float]:
        """Make one update, with an evaluation and a checkpoint if they are due; return its line of metrics.

        Before the first update the held-out tasks are evaluated.
        """
        loop = self._ready("step")
        progress = loop.progress
        if progress.update == 0 and not self.evaluated and self.evaluate():
            line = self._log()
            if self.stopped:
                self.save()
                return line
        start = time.monotonic()
        groups = self.sample()
        if groups:
            self.update(groups)
            self.publish()
        update, final = progress.update, progress.update >= loop.updates
        condition = self._open_parts.stop_when
        line = {**loop.journal.pending, "step": loop.learner.step_count, "tokens": progress.tokens}
        reached = condition is not None and any(loop.learner.ranks.gather(condition.holds(line)))
        if final or reached or _due(self._open_parts.evaluate_every, update):
            self.evaluate()
        line = self._log()
        self._stop_at_time(start)
        stops = any(loop.learner.ranks.gather(self._stop_asked())) or self.stopped is not None
        if final or stops or _due(self._open_parts.save_every, update):
            self.save()
        if stops and not final and self.stopped is None:
            self._wait_for_writer()
            operation = f"{STOPPED_ON_REQUEST} after update {update} of {loop.updates}"
            raise RunError(operation, "all of it is saved", f"go on with {RESUME}")
        return line

    def finish(self, stop_asked: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Step until all updates are made; return the metrics of the last evaluation.

        Raises RunError, after saving, once `stop_asked` returns True, and at the end of a run that trained on
        nothing.
        """
        self._stop_asked = stop_asked
        try:
            self._ready("finish")
            while not self.done:
                self.step()
            self._wait_for_writer()
            if self.stopped is None:
                self._open.check_end()
        except BaseException as error:
            self._open_parts.writer.stop(error)
            self._end(error)
            raise
        self._end(None)
        return self.evaluated

    def close(self) -> None:
        """Free the resources of the session: model, sampler, worker processes, files."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._parts is None:
            return
        closing = self._parts.closing
        try:
            if self._phase is not Phase.CUT and error is None:
                self._flush()
                self._wait_for_writer()
            else:
                self._parts.writer.stop(error)
            self._end(error)
        finally:
            self._parts = self._last_batch = None
            self._phase = Phase.CLOSED
            closing.__exit__(kind, error, trace)

    # ------------------------------------------------------------------ phases and callbacks

    def _ready(self, verb: str) -> Loop:
        """Return the loop, begun; raise RunError if the verb may not be called now."""
        loop, rule = self._open, VERBS[verb]
        if self._phase is Phase.CUT:
            fix = "save() keeps what came before; " if self._cut == "sample()" and self._before else ""
            cause = f"{self._cut} was cut off in the middle"
            raise RunError(f"{verb}()", cause, f"{fix}{kept(self.run_dir.path)}")
        if self._phase not in rule.phases:
            raise RunError(f"{verb}()", rule.otherwise or FIRST[self._phase])
        if self._phase is Phase.NEW:
            with self._interruptible("the start"):
                loop.begin()
            self._enter(Phase.READY)
        return loop

    def _enter(self, phase: Phase) -> None:
        self._phase = self._settled = phase

    @contextmanager
    def _interruptible(self, operation: str) -> Iterator[None]:
        """Leave the session CUT if the block is interrupted, as by Ctrl-C, since its state is then unknown.

        If a verb of the learner raises an Exception, only the optimiser steps before it remain.
        """
        learner, phase = self._open.learner, self._phase
        steps, version = learner.step_count, learner.update_count
        self._phase, self._cut = Phase.CUT, operation
        try:
            yield
        except Exception as error:
            if operation in ("update()", "optim_step()", "forward_backward()"):
                if phase is Phase.GRADIENTS:
                    error.add_note("the gradients that were added are given up")
                if learner.step_count != steps:  # the weights have changed
                    learner.update_count = version + 1
                    self._before = None
                    if self._open.publishes:
                        self._settled = Phase.PARTIAL if self._pending else Phase.UPDATED
                self._phase, self._cut = self._settled, ""
                learner.forget_gradients()
            raise
        self._phase, self._cut = phase, ""

    def _batch_of(self, groups: Sequence[Sequence[Any]]) -> Batch:
        check_groups(groups)
        last = self._last_batch
        return last[1] if last is not None and last[0] is groups else self.batch(groups)

    def _begin_update(self) -> None:
        """Begin an update of rows that were not sampled here, unless one is pending."""
        self._note_written()
        if self._phase is Phase.READY:
            self._flush()
            self._before = self._open.before()
            self._open.progress.update += 1
            self._enter(Phase.SAMPLED)

    def _flush(self) -> None:
        """Write the line of a finished update."""
        if self._open.journal.pending and not self._pending:
            self._log()

    def _log(self) -> dict[str, float]:
        loop = self._open
        metrics, loop.journal.pending = loop.line(loop.journal.pending), {}
        line = loop.journal.log(loop.learner.step_count, loop.learner.update_count, metrics)
        self._logged = self.update_count
        self._stop_where([line])
        if line["update"]:
            self._notify("on_update", line)
        return line

    def _stop_where(self, lines: Sequence[Mapping[str, object]]) -> None:
        """Stop the run if one of these lines satisfies `run.stop_when`, or by `run.patience`, on any rank."""
        parts, loop, text = self._open_parts, self._open, ""
        if parts.stop_when:
            update = max(loop.learner.ranks.gather(parts.stop_when.first_update(lines) or 0))
            text = f"{parts.stop_when} after update {update}" if 0 < update < loop.updates else ""
        is_evaluated = not lines or any(key.startswith("eval/") for line in lines for key in line)
        if parts.patience and not text and any(loop.learner.ranks.gather(is_evaluated)):
            curves, _ = curves_of(iterate_lines(self.run_dir.path / METRICS, []))
            text = max(loop.learner.ranks.gather(progress_ended(curves, parts.patience, parts.best)))
            is_last = self.update_count >= loop.updates
            text = f"{text}, after update {self.update_count}" if text and not is_last else ""
        if text and self.stopped is None:
            self.reached, self.stopped = True, f"{text} of {loop.updates}"

    def _stop_at_time(self, start: float) -> None:
        """Stop the run if another update, saved, might end after `run.max_time`. start: of this update."""
        now, limit, loop = time.monotonic(), self._open_parts.max_seconds, self._open
        if limit is None:
            return
        self._slowest = max(self._slowest, now - start)
        seconds = now - self._began + self._slowest + self._open_parts.writer.seconds
        late = any(loop.learner.ranks.gather(seconds > limit))
        if late and self.stopped is None and self.update_count < loop.updates:
            self.stopped = f"{OUT_OF_TIME} after update {self.update_count} of {loop.updates}"

    def _notify(self, name: str, news: Any) -> None:
        for callback in self._callbacks:
            result: object = call(self, news) if (call := getattr(callback, name, None)) else None
            stops = name != "on_end" and isinstance(result, bool | numpy.bool_) and not result
            if stops and self.stopped is None and self.update_count < self._open.updates:
                self.stopped = f"{name} of a callback stopped the run after update {self.update_count}"

    def _end(self, error: BaseException | None) -> None:
        if not self._ended:
            self._ended = True
            self._notify("on_end", error)
