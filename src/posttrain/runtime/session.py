"""A session: one run, stepped by the command line's loop or by a program of the user's.

    sample     the next groups: episodes with their verdicts, or rows of the data
    update     the learner moves; or forward_backward and optim_step, its halves
    publish    the sampler takes the new weights, and proves that it has them
    evaluate   held-out tasks or rows
    save       a checkpoint; the line of the update is written before it

`step` is these in order, and `finish` is steps until the last. Everything that decides what happens next
is in the learner, the journal's progress and what samplers have in hand. So a run that is killed and resumed
from a checkpoint makes the very numbers of one that was not, wherever these hang on no clock.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy

from posttrain.errors import RESUME
from posttrain.learner.learner import Learner, Loss, Losses, Update
from posttrain.report.record import ON_REQUEST, json_lines
from posttrain.runtime.loop import Loop, Parts
from posttrain.runtime.record.rundir import kept
from posttrain.runtime.record.tables import Groups, Metrics, check_groups
from posttrain.runtime.record.track import METRICS
from posttrain.types import Batch, RunError

_STEPS = ("update()", "optim_step()", "forward_backward()")


def _due(every: int, update: int) -> bool:
    return bool(every) and update % every == 0


class Session:
    """One run, step by step; use it in a `with`, or close it, so that what it holds is given back.

    `update` needs what `sample` gave, or a batch of one's own, and the next `sample` needs `publish`.
    Sampling again without an update goes on to the next tasks or rows. One line of metrics is written for
    each update, when the next one begins, by `save`, or at the end; so evaluate before you save.
    """

    def __init__(self, parts: Parts, callbacks: Sequence[object] = ()) -> None:
        self._parts: Parts | None = parts
        self.run_dir, self._callbacks = parts.run_dir, callbacks
        self._stop_asked: Callable[[], bool] = bool  # which says False
        self._begun = self._ended = False
        self._logged = parts.loop.journal.progress.update > 0
        """Whether the line of the newest update is written."""
        self._sampled = False
        """Whether an update has begun that nothing was trained on yet."""
        self._unpublished = False
        self._gradients = False
        self._made: tuple[object, Batch] | None = None
        """The groups that were made a batch of last."""
        self._cut = ""
        """What was under way when something ended it in the middle."""
        self._before: Mapping[str, Any] | None = None
        """How far the loop was before the update under way, where that is all there is to know."""
        self._saved_steps = parts.loop.learner.step_count
        """Of the newest checkpoint."""
        self.stopped: str | None = None
        """What ended the run before its last update: a callback, or `run.stop_when`."""
        self.reached = False
        """Whether it was `run.stop_when`."""
        if parts.stop_when:  # what was resumed may have ended so
            self._stop_where(self.metrics)
        self.evaluated = dict[str, float]()
        """The metrics of the last evaluation."""

    # ------------------------------------------------------------------ looking

    @property
    def learner(self) -> Learner:
        """The model, its method and its optimiser; RunError once the session is closed."""
        return self._open.learner

    @property
    def metrics(self) -> Metrics:
        """The lines of metrics so far, and that of the update under way."""
        lines = json_lines(self.run_dir.path / METRICS)[0]
        noted = self._parts.loop.journal.noted if self._parts else {}
        now = [{"update": self.update_count, **noted}] if noted else []
        return Metrics(lines + now)

    @property
    def update_count(self) -> int:
        """Updates begun, this one included."""
        return self._open.journal.progress.update

    @property
    def done(self) -> bool:
        """Whether all updates are made, or a callback has stopped the run."""
        return self.stopped is not None or (self.update_count >= self._open.updates and not self._sampled)

    @property
    def _open(self) -> Loop:
        return self._open_parts.loop

    @property
    def _open_parts(self) -> Parts:
        if self._parts is None:
            raise RunError("session", f"it is closed; open another one with {RESUME} to continue")
        return self._parts

    # ------------------------------------------------------------------ the verbs

    def sample(self) -> Groups:
        """The next groups: episodes with verdicts, selected as the recipe says; offline the next rows.

        Empty where selection keeps none: then this update trains nothing. RunError if weights that have moved
        were not published, once all updates are made (`done`), and for whatever ends sampling.
        """
        loop = self._ready()
        self._refuse_gradients()
        if self._unpublished:
            self._refuse("the weights have moved since the sampler took them", "call publish() first")
        if self._sampled:
            loop.abandon()
            loop.journal.noted.clear()
        self._flush()
        if self.update_count >= loop.updates:
            self._refuse(f"all updates are made, {loop.updates}", "ask for more when the session is opened")
        self._before = self._open_parts.before()
        with self._whole("sample()"):
            groups = loop.sample()
        self._sampled, self._made, self._logged = bool(groups), None, False
        return groups

    def batch(self, groups: Sequence[Sequence[Any]]) -> Batch:
        """These groups as the columns that the method will see; episodes without a verdict are left out."""
        self._made = (groups, self._ready().batch(groups))
        return self._made[1]

    def update(self, given: Sequence[Sequence[Any]] | Batch) -> Update:
        """One update of the learner: epochs × minibatches optimiser steps on groups, or on a batch.

        Raises RunError when a loss or gradient is not finite, and ValueError when no token is trained.
        """
        loop = self._ready()
        self._refuse_gradients()
        batch = given if isinstance(given, Batch) else self._batch_of(given)
        self._flush_own()
        with self._whole("update()"):
            if not self._unpublished:
                loop.feed()
            with loop.journal.timed("train"):
                update = loop.learner.update(batch)
            loop.count(update)
        loop.journal.noted |= update.metrics
        self._sampled, self._unpublished = False, loop.publishes
        return update

    def forward_backward(self, given: Sequence[Sequence[Any]] | Batch, loss: Loss | None = None) -> Losses:
        """Adds the gradient of the method's loss, or of this one, and moves nothing (see Learner)."""
        loop = self._ready()
        batch = given if isinstance(given, Batch) else self._batch_of(given)
        self._flush_own()
        with self._whole("forward_backward()"), loop.journal.timed("train"):
            found = loop.learner.forward_backward(batch, loss)
        loop.journal.noted |= found.metrics
        self._gradients = True
        return found

    def optim_step(self, lr: float | None = None) -> dict[str, float]:
        """One optimiser step on all gradients added so far: its rate, and their norm before clipping.

        lr: the rate of this step, in place of the schedule's.
        """
        loop = self._ready()
        if not self._gradients:
            self._refuse("there are no gradients", "call forward_backward() first")
        with self._whole("optim_step()"):
            metrics = loop.learner.optim_step(lr)
            loop.count(None)
        loop.journal.noted |= metrics
        self._sampled, self._unpublished, self._gradients = False, loop.publishes, False
        return metrics

    def publish(self) -> None:
        """Gives the sampler the weights; RunError unless it can prove that it has them."""
        loop = self._ready()
        self._refuse_gradients()
        with self._whole("publish()"):
            loop.publish()
        self._unpublished, self._made = False, None

    def evaluate(self) -> dict[str, float]:
        """Metrics of the held-out tasks or rows; empty if there are none."""
        loop = self._ready()
        if not loop.held_out:
            return {}
        self.evaluated = loop.evaluate()
        if not self._logged:
            loop.journal.noted |= self.evaluated
        self._tell("on_evaluate", self.evaluated)
        return self.evaluated

    def save(self) -> Path:
        """Writes a checkpoint, from which the same recipe goes on; where it lies.

        After a sample() that was cut off it is one of what came before, if that was not saved yet.
        """
        if self._cut == "sample()" and (whole := self.save_whole()):
            return whole
        loop = self._ready()
        if self._sampled or self._unpublished or self._gradients:
            fix = "save after update() and publish(), or give it up with sample()"
            self._refuse("an update is under way", fix)
        self._flush()
        flight, state = loop.flight(), self._open_parts.state()
        if not self.done:
            loop.feed()  # samplers go on while the checkpoint is written
        with loop.journal.timed("checkpoint"):
            return self._write(flight, state)

    def save_whole(self) -> Path | None:
        """Saves what was trained since the last checkpoint; None if that is nothing, or cannot be relied on.

        Of an update that has begun nothing is kept: the run goes on with the same tasks once more.
        """
        loop = self._open
        reliable = self._cut in ("", "sample()", "forward_backward()")  # none of which moves a weight
        if self._saved_steps == loop.learner.step_count or not reliable:
            return None
        loop.learner.forget_gradients()
        self._gradients = False
        if self._unpublished:
            self.publish()
        if not (self._sampled or self._cut):
            return self.save()
        return None if self._before is None else self._write({}, self._before)

    def _write(self, flight: Mapping[str, Any], state: Mapping[str, Any]) -> Path:
        path = self._open_parts.checkpoint(state, flight)
        self._saved_steps = self._open.learner.step_count
        self._tell("on_save", path)
        return path

    # ------------------------------------------------------------------ all of them

    def step(self) -> dict[str, float]:
        """One update, with an evaluation and a checkpoint where they are due; its line of metrics.

        Before the first update the held-out tasks are evaluated.
        """
        loop = self._ready()
        progress = loop.journal.progress
        if progress.update == 0 and loop.held_out and not self.evaluated:
            self.evaluate()
            line = self._log()
            if self.stopped:
                self.save()
                return line
        groups = self.sample()
        if groups:
            self.update(groups)
            self.publish()
        update, final = progress.update, progress.update >= loop.updates
        condition = self._open_parts.stop_when
        line = {**loop.journal.noted, "step": loop.learner.step_count, "tokens": progress.tokens}
        reached = condition is not None and any(loop.learner.ranks.gather(condition.holds(line)))
        if final or reached or _due(self._open_parts.evaluate_every, update):
            self.evaluate()
        line = self._log()
        stops = any(loop.learner.ranks.gather(self._stop_asked())) or self.stopped is not None
        if final or stops or _due(self._open_parts.save_every, update):
            self.save()
        if stops and not final and self.stopped is None:
            operation = f"{ON_REQUEST} after update {update} of {loop.updates}"
            raise RunError(operation, "all of it is saved", f"go on with {RESUME}")
        return line

    def finish(self, stop_asked: Callable[[], bool] = bool) -> dict[str, float]:
        """Steps until all is done; the metrics of the last evaluation.

        Raises RunError after saving when `stop_asked` says so, and at the end of a run that trained nothing.
        """
        self._stop_asked = stop_asked
        try:
            self._ready()
            while not self.done:
                self.step()
            if self.stopped is None:
                self._open.check_end()
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)
        return self.evaluated

    def close(self) -> None:
        """Gives back what the session holds: model, sampler, worker processes, files."""
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
            if not self._cut and error is None:
                self._flush()
            self._end(error)
        finally:
            self._parts = self._made = None
            closing.__exit__(kind, error, trace)

    # ------------------------------------------------------------------ between them

    def _ready(self) -> Loop:
        """The loop, begun; RunError if it cannot go on."""
        loop = self._open
        if self._cut:
            whole = "save() keeps what came before; " if self._cut == "sample()" and self._before else ""
            raise RunError(self._cut, "it was cut off in the middle", f"{whole}{kept(self.run_dir.path)}")
        if not self._begun:
            with self._whole("the start"):
                loop.begin()
            self._begun = True
        return loop

    @contextmanager
    def _whole(self, what: str) -> Iterator[None]:
        """Remembers if what is inside was cut off, as by Ctrl-C: nothing could be relied on after it."""
        learner = self._open.learner
        self._cut, steps, version = what, learner.step_count, learner.update_count
        try:
            yield
        except Exception as error:
            if what in _STEPS:  # nothing of one that failed is left
                if self._gradients:
                    error.add_note("the gradients that were added are given up")
                self._cut, self._gradients = "", False
                if learner.step_count != steps:  # some of its steps were made: these are other weights
                    learner.update_count = version + 1
                    self._before, self._unpublished = None, self._open.publishes
                learner.forget_gradients()
            raise
        self._cut = ""

    def _refuse(self, state: str, fix: str) -> None:
        raise RunError(state, fix)

    def _refuse_gradients(self) -> None:
        if self._gradients:
            self._refuse("gradients were added and no step was made of them", "call optim_step() first")

    def _batch_of(self, groups: Sequence[Sequence[Any]]) -> Batch:
        check_groups(groups)
        made = self._made
        return made[1] if made is not None and made[0] is groups else self.batch(groups)

    def _flush_own(self) -> None:
        """Begins an update of rows that were not sampled here, if none has begun."""
        if not self._sampled and not self._gradients and not self._unpublished:
            self._flush()
            self._before = self._open_parts.before()
            self._open.journal.progress.update += 1
            self._sampled, self._logged = True, False

    def _flush(self) -> None:
        """Writes the line of an update that is over."""
        if self._open.journal.noted and not self._sampled:
            self._log()

    def _log(self) -> dict[str, float]:
        loop = self._open
        metrics, loop.journal.noted = loop.line(loop.journal.noted), {}
        line = loop.journal.log(loop.learner.step_count, loop.learner.update_count, metrics)
        self._logged = True
        self._stop_where([line])
        if line["update"]:
            self._tell("on_update", line)
        return line

    def _stop_where(self, lines: Sequence[Mapping[str, object]]) -> None:
        """Stop the run if one of these lines of metrics, on any rank, satisfies `run.stop_when`."""
        condition, loop = self._open_parts.stop_when, self._open
        if condition is None:
            return
        update = max(loop.learner.ranks.gather(condition.first_update(lines) or 0))
        if 0 < update < loop.updates and self.stopped is None:
            self.reached = True
            self.stopped = f"{condition} after update {update} of {loop.updates}"

    def _tell(self, name: str, news: Any) -> None:
        for each in self._callbacks:
            said: object = call(self, news) if (call := getattr(each, name, None)) else None
            no = name != "on_end" and isinstance(said, bool | numpy.bool_) and not said
            if no and self.stopped is None and self.update_count < self._open.updates:
                self.stopped = f"{name} of a callback stopped the run after update {self.update_count}"

    def _end(self, error: BaseException | None) -> None:
        if not self._ended:
            self._ended = True
            self._tell("on_end", error)
