"""The table `[async]`: how far sampling may run ahead of training, and where the samplers run."""

from dataclasses import dataclass
from typing import Literal

from posttrain.errors import counted

Swap = Literal["between", "within"]
Cache = Literal["recompute", "keep"]


@dataclass(frozen=True, kw_only=True)
class Asynchrony:
    """How far sampling may run ahead of training, and where the samplers run."""

    max_lag: int = 0
    """The most updates that a trained token may be behind the newest weights. 0: sampling and training take
    turns. 1: one-step-off, groups of the next update are sampled while the present one trains."""
    window: int = 1
    """window - 1 later groups may overtake an unfinished group; 1: updates take groups strictly in order.
    A window adds (window - 1) / rollout.groups updates, rounded up, to the bound max_lag."""
    swap: Swap = "between"
    """When a sampler loads new weights: between rounds of groups, or within running answers."""
    cache: Cache = "recompute"
    """What becomes of the KV cache of running answers at a swap. recompute: it is computed again under the
    new weights, so one policy draws each further token given all before it. keep: the old cache stays, which
    is quicker, but the recorded log-probabilities then belong to no single policy."""
    pace: Literal["clock", "steps"] = "clock"
    """clock: samplers load new weights as soon as they can. steps: after exactly steps_per_update steps of
    the engine, in the loop's own thread; slower, but every run gives the same result."""
    steps_per_update: int = 16
    """Engine steps per update, with pace = "steps"."""
    samplers: int = 1
    """Number of samplers; several have a copy of the model each, and groups are dealt among them."""
    place: Literal["auto", "here", "thread", "process", "ray"] = "auto"
    """Where samplers run. here: in the loop's own thread; thread: in another thread; process: in processes of
    their own; ray: as actors of a Ray cluster. auto: here if one sampler takes turns with training or pace is
    "steps", else process."""
    address: str = ""
    """Address of the Ray cluster; auto: the cluster that runs on this machine; empty: the run starts a
    cluster and stops it at its end."""
    cpus: float = 0.0
    """CPUs that Ray reserves for each sampler; 0: as many as the sampler has threads."""
    gpus: float = 0.0
    """GPUs that Ray reserves for each sampler; with 0.5 two samplers share one. 0 reserves none, and a
    sampler sees every GPU that its machine shows."""
    devices: tuple[str, ...] = ()
    """Devices of the samplers, assigned in turn, as ["cuda:1", "cuda:2"]; empty: the learner's device."""
    threads: int = 0
    """CPU threads of each sampler; 0: an equal share of run.threads. With max_lag above 0 the learner counts
    as one more sampler in the division, but itself uses all of run.threads."""
    deadline_s: float = 600.0
    """Seconds without a sign of life after which a sampler is killed and started again."""
    max_restarts: int = 2
    """Most restarts of samplers in a run, counted over all samplers."""

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
        """Return `place`, with auto resolved."""
        if self.place != "auto":
            return self.place
        one_thread = self.samplers == 1 and (self.max_lag == 0 or self.pace == "steps")
        return "here" if one_thread else "process"

    @property
    def one_step_off(self) -> bool:
        """Return whether each round of groups is sampled by one version, which does not depend on timing."""
        return self.max_lag == 1 and self.pace == "clock" and self.swap == "between" and self.window == 1

    @property
    def timed_by(self) -> str:
        """Return the key by which timing decides which weights sample a token, or "".

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
        """Return whether the learner publishes copies of its weights, which samplers load when they can."""
        return self.max_lag > 0 or self.where != "here"

    def described(self, all_threads: int) -> str:
        """Return the settings in words; `all_threads` is the number of threads of the run.

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
        """Return the number of threads of each sampler; `all_threads` is that of the run."""
        if self.where in ("here", "thread"):  # samplers in the learner's process share its threads
            return all_threads
        return self.threads or max(1, all_threads // (self.samplers + (self.max_lag > 0)))
