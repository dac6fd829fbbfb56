"""A session: one run, stepped by the command line's loop or by a program of the user's.

    verb               does                                                           may be called in
    sample             get the next groups: judged episodes, or rows of the data      NEW, READY, SAMPLED
    batch              turn groups into the columns that the method sees              every phase
    update             make the optimiser steps of one update                         all but GRADIENTS
    forward_backward   add gradients                                                  every phase
    optim_step         move the learner by the gradients                              GRADIENTS
    publish            give the sampler the weights, and have it prove that it has    all but GRADIENTS
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

Everything that decides what happens next is in the learner, the journal's progress and what samplers have in
hand. So a run that is killed and resumed from a checkpoint makes the very numbers of one that was not, unless
a clock decides some.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy

from posttrain.errors import RESUME
from posttrain.learner.learner import Learner, Loss, Losses, Update
from posttrain.loop.loop import Loop, LoopState, Parts
from posttrain.report.record import ON_REQUEST, json_lines
from posttrain.run.rundir import kept
from posttrain.run.tables import Groups, Metrics, check_groups
from posttrain.run.track import METRICS
from posttrain.types import Batch, RunError


class Phase(Enum):
    """What a session has done last, so far as it decides what it may do next."""

    NEW = auto()
    READY = auto()
    SAMPLED = auto()
    PARTIAL = auto()
    UPDATED = auto()
    GRADIENTS = auto()
    CUT = auto()
    CLOSED = auto()


class Verb(NamedTuple):
    """When a verb may be called."""

    phases: frozenset[Phase]
    otherwise: str = ""
    """What is wrong in all other phases; by default what the phase itself asks for first."""


_ALWAYS = frozenset(Phase) - {Phase.CUT, Phase.CLOSED}
_BETWEEN = frozenset({Phase.NEW, Phase.READY})
_WITHOUT_GRADIENTS = _ALWAYS - {Phase.GRADIENTS}
_VERBS = {
    "sample": Verb(_BETWEEN | {Phase.SAMPLED}),
    "batch": Verb(_ALWAYS),
    "update": Verb(_WITHOUT_GRADIENTS),
    "forward_backward": Verb(_ALWAYS),
    "optim_step": Verb(frozenset({Phase.GRADIENTS}), "there are no gradients: call forward_backward() first"),
    "publish": Verb(_WITHOUT_GRADIENTS),
    "evaluate": Verb(_ALWAYS),
    "save": Verb(_BETWEEN),
    "step": Verb(_ALWAYS),
    "finish": Verb(_ALWAYS),
}
_MOVED = "the weights have moved since the sampler took them: call publish() first"
_FIRST = {
    Phase.SAMPLED: "an update is running: save after update() and publish(), or give it up with sample()",
    Phase.PARTIAL: _MOVED,
    Phase.UPDATED: _MOVED,
    Phase.GRADIENTS: "gradients were added and no step was made of them: call optim_step() first",
}
"""What each phase asks for first."""


def _due(every: int, update: int) -> bool:
    return bool(every) and update % every == 0


class LoopSession:
    """One run, step by step; use it in a `with`, or close it, so that what it holds is given back.

    `update` needs what `sample` gave, or a batch of one's own, and the next `sample` needs `publish`.
    Sampling again without an update goes on to the next tasks or rows. One line of metrics is written for
    each update, when the next one begins, by `save`, or at the end; so evaluate before you save.
    """

    def __init__(self, parts: Parts, callbacks: Sequence[object] = ()) -> None:
        self._parts: Parts | None = parts
        self.run_dir, self._callbacks = parts.run_dir, callbacks
        self._stop_asked: Callable[[], bool] = lambda: False
        self._phase = self._settled = Phase.NEW
        """The phase, and the last one that was neither GRADIENTS nor CUT."""
        self._cut = ""
        """CUT: the operation that was interrupted."""
        self._logged = parts.loop.progress.update or -1
        """The newest update whose line is written; -1 before the first line."""
        self._made: tuple[object, Batch] | None = None
        """The groups that were made a batch of last."""
        self._before: LoopState | None = None
        """The state before the newest update, if that is all that it depends on."""
        self._saved_steps = parts.loop.learner.step_count
        """Of the newest checkpoint."""
        self._ended = False
        """Whether callbacks were told of the end."""
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
        """The lines of metrics so far, and that of the update running."""
        lines = json_lines(self.run_dir.path / METRICS)[0]
        noted = self._parts.loop.journal.noted if self._parts else {}
        now = [{"update": self.update_count, **noted}] if noted else []
        return Metrics(lines + now)

    @property
    def update_count(self) -> int:
        """Updates begun, this one included."""
        return self._open.progress.update

    @property
    def done(self) -> bool:
        """Whether all updates are made, or a callback has stopped the run."""
        return self.stopped is not None or (self.update_count >= self._open.updates and not self._begun)

    @property
    def _begun(self) -> bool:
        """Whether an update has begun that is not trained on, or not to its end."""
        return self._settled in (Phase.SAMPLED, Phase.PARTIAL)

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
        loop = self._ready("sample")
        if self._phase is Phase.SAMPLED:
            loop.abandon()
            loop.journal.noted.clear()
            self._enter(Phase.READY)
        else:
            self._flush()
        if self.update_count >= loop.updates:
            why = f"all updates are made, {loop.updates}: ask for more when the session is opened"
            raise RunError("sample()", why)
        self._before = loop.before()
        with self._whole("sample()"):
            groups = loop.sample()
        self._made = None
        self._enter(Phase.SAMPLED if groups else Phase.READY)
        return groups

    def batch(self, groups: Sequence[Sequence[Any]]) -> Batch:
        """These groups as the columns that the method will see; episodes without a verdict are left out."""
        self._made = (groups, self._ready("batch").batch(groups))
        return self._made[1]

    def update(self, given: Sequence[Sequence[Any]] | Batch) -> Update:
        """One update of the learner: epochs × minibatches optimiser steps on groups, or on a batch.

        Raises RunError when a loss or gradient is not finite, and ValueError when no token is trained.
        """
        loop = self._ready("update")
        batch = given if isinstance(given, Batch) else self._batch_of(given)
        self._begin_update()
        with self._whole("update()"):
            if self._settled is Phase.SAMPLED:
                loop.feed()
            with loop.journal.timed("train"):
                update = loop.learner.update(batch)
            loop.count(update)
        loop.journal.noted |= update.metrics
        self._enter(Phase.UPDATED if loop.publishes else Phase.READY)
        return update

    def forward_backward(self, given: Sequence[Sequence[Any]] | Batch, loss: Loss | None = None) -> Losses:
        """Adds the gradient of the method's loss, or of this one, and moves nothing (see Learner)."""
        loop = self._ready("forward_backward")
        batch = given if isinstance(given, Batch) else self._batch_of(given)
        self._begin_update()
        with self._whole("forward_backward()"), loop.journal.timed("train"):
            losses = loop.learner.forward_backward(batch, loss)
        loop.journal.noted |= losses.metrics
        self._phase = Phase.GRADIENTS
        return losses

    def optim_step(self, lr: float | None = None) -> dict[str, float]:
        """One optimiser step on all gradients added so far: its rate, and their norm before clipping.

        lr: the rate of this step, in place of the schedule's.
        """
        loop = self._ready("optim_step")
        with self._whole("optim_step()"):
            metrics = loop.learner.optim_step(lr)
            loop.count(None)
        loop.journal.noted |= metrics
        self._enter(Phase.UPDATED if loop.publishes else Phase.READY)
        return metrics

    def publish(self) -> None:
        """Gives the sampler the weights; RunError unless it can prove that it has them."""
        loop = self._ready("publish")
        with self._whole("publish()"):
            loop.publish()
        self._made = None
        self._enter(Phase.SAMPLED if self._begun else Phase.READY)

    def evaluate(self) -> dict[str, float]:
        """Metrics of the held-out tasks or rows; empty if there are none."""
        loop = self._ready("evaluate")
        metrics = loop.evaluate()
        if not metrics:
            return {}
        self.evaluated = metrics
        if self._logged != self.update_count:
            loop.journal.noted |= metrics
        self._tell("on_evaluate", self.evaluated)
        return self.evaluated

    def save(self) -> Path:
        """Writes a checkpoint, from which the same recipe goes on; where it lies.

        After a sample() that was cut off it is one of what came before, if that was not saved yet.
        """
        if self._cut == "sample()" and (whole := self.save_whole()):
            return whole
        loop = self._ready("save")
        self._flush()
        state = loop.state()
        if not self.done:
            loop.feed()  # samplers go on while the checkpoint is written
        with loop.journal.timed("checkpoint"):
            return self._write(state)

    def save_whole(self) -> Path | None:
        """Saves what was trained since the last checkpoint; None if that is nothing, or cannot be relied on.

        Of an update that has begun nothing is kept: the run goes on with the same tasks once more.
        """
        loop = self._open
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
        path = self._open_parts.checkpoint(*state)
        self._saved_steps = self._open.learner.step_count
        self._tell("on_save", path)
        return path

    # ------------------------------------------------------------------ all of them

    def step(self) -> dict[str, float]:
        """One update, with an evaluation and a checkpoint where they are due; its line of metrics.

        Before the first update the held-out tasks are evaluated.
        """
        loop = self._ready("step")
        progress = loop.progress
        if progress.update == 0 and not self.evaluated and self.evaluate():
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
            self._ready("finish")
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
            if self._phase is not Phase.CUT and error is None:
                self._flush()
            self._end(error)
        finally:
            self._parts = self._made = None
            self._phase = Phase.CLOSED
            closing.__exit__(kind, error, trace)

    # ------------------------------------------------------------------ between them

    def _ready(self, verb: str) -> Loop:
        """Return the loop, begun; raise RunError if the verb may not be called now."""
        loop, rule = self._open, _VERBS[verb]
        if self._phase is Phase.CUT:
            whole = "save() keeps what came before; " if self._cut == "sample()" and self._before else ""
            cause = f"{self._cut} was cut off in the middle"
            raise RunError(f"{verb}()", cause, f"{whole}{kept(self.run_dir.path)}")
        if self._phase not in rule.phases:
            raise RunError(f"{verb}()", rule.otherwise or _FIRST[self._phase])
        if self._phase is Phase.NEW:
            with self._whole("the start"):
                loop.begin()
            self._enter(Phase.READY)
        return loop

    def _enter(self, phase: Phase) -> None:
        self._phase = self._settled = phase

    @contextmanager
    def _whole(self, operation: str) -> Iterator[None]:
        """Leave the session CUT if what is inside does not end, as by Ctrl-C: nothing is relied on after it.

        A step of the learner that raises leaves nothing but the steps that were made before.
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
                if learner.step_count != steps:  # these are other weights
                    learner.update_count = version + 1
                    self._before = None
                    if self._open.publishes:
                        self._settled = Phase.PARTIAL if self._begun else Phase.UPDATED
                self._phase, self._cut = self._settled, ""
                learner.forget_gradients()
            raise
        self._phase, self._cut = phase, ""

    def _batch_of(self, groups: Sequence[Sequence[Any]]) -> Batch:
        check_groups(groups)
        made = self._made
        return made[1] if made is not None and made[0] is groups else self.batch(groups)

    def _begin_update(self) -> None:
        """Begin an update of rows that were not sampled here, if none has begun."""
        if self._phase is Phase.READY:
            self._flush()
            self._before = self._open.before()
            self._open.progress.update += 1
            self._enter(Phase.SAMPLED)

    def _flush(self) -> None:
        """Write the line of an update that is over."""
        if self._open.journal.noted and not self._begun:
            self._log()

    def _log(self) -> dict[str, float]:
        loop = self._open
        metrics, loop.journal.noted = loop.line(loop.journal.noted), {}
        line = loop.journal.log(loop.learner.step_count, loop.learner.update_count, metrics)
        self._logged = self.update_count
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
