"""How long a run is and what an update is made of: [run], [rollout], [batch], [curriculum] and [eval]."""

from dataclasses import dataclass

from posttrain.envs.tools.formats import FormatName
from posttrain.report.condition import Condition

SELECT = ("all", "varied", "accepted")
"""Selections of groups that are ours (see runtime/tasks/select.py)."""


MOST_THREADS = 1024
"""More than a machine has cores; OpenMP ends the process where it cannot have as many as asked."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """How long, and from which seed."""

    updates: int = 100
    """Updates in all; one is rollout.groups × rollout.group_size episodes, or batch.batch_size records."""
    stop_when: str = ""
    """End the run after the first update whose line of metrics satisfies this, such as
    "eval/accuracy >= 0.8" or "kl/ref > 0.2": it is saved and reported as after its last update."""
    seed: int = 0
    """Of the order of tasks, every draw and the start of adapters."""
    threads: int = 0
    """Of the processor; 0: as many as this process may use, by its affinity mask, its container's quota and
    OMP_NUM_THREADS."""

    def __post_init__(self) -> None:
        if self.updates < 1:
            raise ValueError(f"updates must be 1 or more, not {self.updates}")
        if self.threads < 0:
            raise ValueError(f"threads must be 0 (one for each core) or more, not {self.threads}")
        if self.threads > MOST_THREADS:
            raise ValueError(f"threads must be {MOST_THREADS} or fewer, not {self.threads}")
        if self.stop_when:
            try:
                object.__setattr__(self, "stop_when", str(Condition.parse(self.stop_when)))
            except ValueError as error:
                raise ValueError(f"stop_when: {error}") from None

    @property
    def condition(self) -> Condition | None:
        """`stop_when`, parsed; None if it is not set."""
        return Condition.parse(self.stop_when) if self.stop_when else None


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What one update is made of, and how its episodes are run and judged."""

    groups: int = 8
    """Tasks an update learns from."""
    group_size: int = 8
    """Episodes of each task (K, or G)."""
    select: str = "all"
    """all; varied: only groups whose rewards differ; accepted: only those with an answer worth imitating; or
    "file.py:function" of yours, from a group's episodes to whether to keep it. New tasks are drawn for groups
    that are dropped."""
    max_rounds: int = 4
    """Rounds of sampling in an update, the first included, before it goes on with the groups it has."""
    replay: int = 0
    """Groups of earlier updates that each update is trained on again, besides its own."""
    replay_lag: int = 4
    """Updates after which a group is not drawn again."""
    workers: int = 2
    """Processes for verifiers and environments that are not ours."""
    deadline_s: float = 10.0
    """Seconds after which a verifier or an environment is killed; the episode is then masked."""
    memory_mb: int = 4096
    """What one such process may take; a judge or reward model of billions of parameters needs more."""
    episode_tokens: int = 0
    """Tokens that the policy may say in all turns of an episode; 0: what the context holds."""
    episode_s: float = 0.0
    """Seconds after which an episode has no further turn, by the clock, so that runs differ; 0: no bound."""
    max_error_rate: float = 0.2
    """The run stops when more than this share of the last 512 episodes could not be judged."""

    def __post_init__(self) -> None:
        if self.replay < 0:
            raise ValueError(f"replay must be 0 (none) or more, not {self.replay}")
        for name in ("groups", "group_size", "max_rounds", "replay_lag", "workers", "memory_mb"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if self.select not in SELECT and ":" not in self.select:
            raise ValueError(f"select must be one of {', '.join(SELECT)}, or your own, not {self.select!r}")
        if min(self.episode_tokens, self.episode_s) < 0:
            raise ValueError("episode_tokens and episode_s must be 0 (no bound) or more")
        if self.deadline_s <= 0:
            raise ValueError(f"deadline_s must be above 0, not {self.deadline_s}")
        if not 0 <= self.max_error_rate <= 1:
            raise ValueError(f"max_error_rate must lie in [0, 1], not {self.max_error_rate}")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out tasks, answered before, during and after training."""

    every: int = 0
    """Updates between evaluations; 0: only before the first and after the last."""
    limit: int = 200
    """Tasks; 0 leaves evaluation out."""
    temperature: float = 0.0
    """0 takes the most likely token."""
    right: float = 1.0
    """An answer whose verdict is neither "right" nor "wrong" counts as right from this reward on."""

    def __post_init__(self) -> None:
        if min(self.every, self.limit, self.temperature) < 0:
            raise ValueError("every, limit and temperature must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """What one update of the offline loop is made of."""

    batch_size: int = 32
    """Conversations, rankings or answers in an update."""
    max_length: int = 0
    """Tokens after which a conversation, or an answer of a preference method, is cut; 0: the model's context.
    What reward models learn from is not cut: an answer that is longer is left out, with the others to the
    same question, and of judged steps those beyond."""
    separator: str = "\n\n"
    """What stands behind each step of an answer, for methods that learn steps."""
    tool_format: FormatName = "auto"
    """How the calls in conversations are written; auto: by the chat template if it shows them, or else as
    [task.tools] would write them."""

    def __post_init__(self) -> None:
        if self.max_length < 0:
            raise ValueError(f"max_length must be 0 (the model's context) or more, not {self.max_length}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, not {self.batch_size}")
        if not self.separator:
            raise ValueError("separator must not be empty")


CURRICULA = ("none", "order", "band", "bandit")


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Which task is asked next."""

    kind: str = "none"
    """none: in random order. order: easiest first. band: those that are sometimes solved. bandit: from the
    bucket that teaches most. Or "file.py:name" of yours, called with the tasks and seed=..., which gives a
    supply of tasks (see runtime/tasks/curriculum.py: Supply)."""
    field: str = "difficulty"
    """The field of a task that order and bandit go by."""
    low: float = 0.1
    """The lowest success rate within the band."""
    high: float = 0.8
    """The highest success rate within the band."""
    keep: float = 0.0
    """How much of a task's earlier success rate stays in it when it is asked again; 0 forgets it."""
    explore: float = 0.2
    """Share of the tasks that are taken from all alike; with a bandit also how fast it learns."""
    sweep: bool = True
    """Whether a band asks every task once before it asks any again; false: new ones come with chance
    explore."""
    buckets: int = 4
    """How many buckets, of about as many tasks each; a field of no more values makes a bucket of each."""
    share: float = 0.005
    """What every bucket is given of the others' weight with each group, so that none is ever given up."""

    def __post_init__(self) -> None:
        if self.kind not in CURRICULA and ":" not in self.kind:
            raise ValueError(f"kind must be one of {', '.join(CURRICULA)}, or your own, not {self.kind!r}")
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"low and high must lie in [0, 1] in this order, not {self.low} and {self.high}")
        if not 0 <= self.keep < 1:
            raise ValueError(f"keep must lie in [0, 1), not {self.keep}")
        if not 0 <= self.explore <= 1:
            raise ValueError(f"explore must lie in [0, 1], not {self.explore}")
        if self.kind == "bandit" and not self.explore:
            raise ValueError("explore must be above 0 for a bandit, which would never learn")
        if self.buckets < 2:
            raise ValueError(f"buckets must be 2 or more, not {self.buckets}")
        if not 0 <= self.share <= 0.1:
            raise ValueError(f"share must lie in [0, 0.1], not {self.share}")
