"""How far sampling may run ahead of training, and where it is done: `[async]`."""

from dataclasses import dataclass
from typing import Literal

from posttrain.errors import counted

Swap = Literal["between", "within"]
Cache = Literal["recompute", "keep"]


@dataclass(frozen=True, kw_only=True)
class Asynchrony:
    """How far sampling may run ahead of training, and where it is done."""

    max_lag: int = 0
    """Updates by which a token may be older than the weights that are trained on it, at most. 0: sampling and
    training take turns; 1: one-step-off, the next update's groups are drawn while these are trained on."""
    window: int = 1
    """One less than the groups that may pass one that was admitted before them; 1: first in, first out.
    Each rollout.groups of them add an update to the lag."""
    swap: Swap = "between"
    """When a sampler takes new weights: between rounds of groups, or within running answers."""
    cache: Cache = "recompute"
    """After a swap within answers: recompute their keys and values under the new weights, so that each token
    is drawn from one policy's view of all before it; or keep the old ones: quicker, and nobody's policy."""
    pace: Literal["clock", "steps"] = "clock"
    """clock: as fast as the parts are. steps: weights are taken after exactly steps_per_update steps of the
    engine, in the loop's own thread: slower, and the same in every run."""
    steps_per_update: int = 16
    """Steps of the engine that an update takes, with pace = "steps"."""
    samplers: int = 1
    """How many there are, each with a copy of the model; groups are dealt among them."""
    place: Literal["auto", "here", "thread", "process", "ray"] = "auto"
    """Where they are: here, in the loop's own thread; in another thread; in processes; or as actors of a Ray
    cluster. auto: here where one sampler takes turns with training, else in processes."""
    address: str = ""
    """Of the Ray cluster; auto: the one that runs on this machine. Without one the run starts its own, which
    ends with it."""
    cpus: float = 0.0
    """Processors that Ray sets aside for each sampler; 0: as many as it has threads."""
    gpus: float = 0.0
    """GPUs that Ray sets aside for each sampler; two with 0.5 share one. 0: none is set aside, and a sampler
    sees what the machine that it is on shows it."""
    devices: tuple[str, ...] = ()
    """Where samplers compute, dealt out in turn, as ["cuda:1", "cuda:2"]; empty: where the learner does."""
    threads: int = 0
    """Of each sampler; 0: an equal share of run.threads among samplers and, with max_lag, the learner, which
    keeps all of them."""
    deadline_s: float = 600.0
    """Seconds without a sign of life after which a sampler is ended and started again."""
    max_restarts: int = 2
    """How often samplers may be started again in one run."""

    def __post_init__(self) -> None:
        for name, least in (("max_lag", 0), ("window", 1), ("samplers", 1), ("steps_per_update", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more, not {getattr(self, name)}")
        if min(self.threads, self.max_restarts, self.cpus, self.gpus) < 0:
            raise ValueError("threads, max_restarts, cpus and gpus must be 0 or more")
        if self.deadline_s <= 0:
            raise ValueError(f"deadline_s must be above 0, not {self.deadline_s}")
        if self.pace == "steps" and self.where != "here":
            raise ValueError("pace = 'steps' is kept in the loop's thread: set place = 'here', samplers = 1")
        if self.place in ("here", "thread") and self.samplers > 1:
            raise ValueError(f"place = {self.place!r} has room for one sampler: set place = 'process'")

    @property
    def where(self) -> str:
        """The place that auto comes to."""
        if self.place != "auto":
            return self.place
        alone = self.samplers == 1 and (self.max_lag == 0 or self.pace == "steps")
        return "here" if alone else "process"

    @property
    def one_step_off(self) -> bool:
        """True if each round of groups is sampled whole by one version, which does not depend on timing."""
        return self.max_lag == 1 and self.pace == "clock" and self.swap == "between" and self.window == 1

    @property
    def timed_by(self) -> str:
        """Return the key that lets timing decide which weights sample a token; "" if none does.

        >>> [Asynchrony(max_lag=n).timed_by for n in (0, 1, 2)], Asynchrony(max_lag=1, window=2).timed_by
        (['', '', 'async.max_lag'], 'async.window')
        """
        if not self.max_lag or self.pace == "steps" or self.one_step_off:
            return ""
        if self.max_lag > 1:
            return "async.max_lag"
        return "async.swap" if self.swap == "within" else "async.window"

    @property
    def publishes(self) -> bool:
        """Whether weights are copied for samplers to take when they can, and not taken at once."""
        return self.max_lag > 0 or self.where != "here"

    def described(self, all_threads: int) -> str:
        """Return it in words, where the run has so many threads.

        >>> Asynchrony(max_lag=4, samplers=2, swap="within").described(8)
        '2 in processes of 2 threads, at most 4 updates ahead, new weights within answers'
        """
        if self.where == "here":
            where = "in the loop's thread"
        elif self.where == "thread":
            where = "in a thread"
        else:
            place = "a process" if self.samplers == 1 else "processes"
            where = f"in {place} of {counted(self.threads_of(all_threads), 'thread')}"
        if not self.max_lag:
            return f"{self.samplers} {where}, taking turns with training"
        bound = f"at most {counted(self.max_lag, 'update')} ahead"
        swap = "within answers" if self.swap == "within" else "between rounds"
        return f"{self.samplers} {where}, {bound}, new weights {swap}"

    def threads_of(self, all_threads: int) -> int:
        """Of each sampler, where the run has so many."""
        if self.where in ("here", "thread"):  # threads of one process share what there is
            return all_threads
        return self.threads or max(1, all_threads // (self.samplers + (self.max_lag > 0)))
