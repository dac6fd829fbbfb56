"""The tables [run], [rollout], [batch], [curriculum] and [eval]: length of a run and data of its updates."""

import re
from dataclasses import dataclass
from typing import Literal

from posttrain.envs.tools.formats import FormatName
from posttrain.recipe.tasks import TaskChoice
from posttrain.report.condition import Condition

SELECT = ("all", "varied", "accepted")
"""Names of the built-in selections of groups (curriculum/select.py)."""


MOST_THREADS = 1024
"""More than any machine has cores. OpenMP aborts the process if it cannot start the requested threads."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Length, seed and CPU threads of the run."""

    updates: int = 100
    """Number of updates. An update trains on rollout.groups × rollout.group_size episodes if the method is
    online, else on batch.batch_size records."""
    epochs: float = 0.0
    """Passes over the tasks or records, instead of run.updates: as many updates as draw each this often,
    rounded up. 0: run.updates counts."""
    max_time: str = ""
    """Time after which the run is saved and ended, to be continued with --resume, as "90m", "2h" or "1d12h".
    Counted from the start of this process; no update is begun that would end later if it took as long as the
    slowest one so far."""
    stop_when: str = ""
    """End the run after the first update whose metrics satisfy this condition, such as "eval/accuracy >= 0.8"
    or "kl/ref > 0.2". The run is then saved and reported as after its last update."""
    patience: int = 0
    """Number of evaluations after which the run ends if none is better than the best one before them, by
    checkpoint.best's metric. It is then saved and reported as after its last update. 0: no such end."""
    seed: int = 0
    """Seed of the order of tasks, of everything that is sampled, and of new adapters."""
    threads: int = 0
    """CPU threads; 0: as many as this process may use by its affinity mask, its container's quota and
    OMP_NUM_THREADS."""

    def __post_init__(self) -> None:
        if self.updates < 1:
            raise ValueError(f"updates must be 1 or more, not {self.updates}")
        if self.epochs < 0:
            raise ValueError(f"epochs must be above 0, or 0 for run.updates, not {self.epochs}")
        if self.max_time and not re.fullmatch(r"(\d+d)?(\d+h)?(\d+m)?(\d+s)?", self.max_time):
            raise ValueError(f'max_time is a time such as "90m", "2h" or "1d12h", not {self.max_time!r}')
        if self.patience < 0:
            raise ValueError(f"patience must be 0 (no end) or more evaluations, not {self.patience}")
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
    def max_seconds(self) -> float | None:
        """Return `max_time` in seconds; None if it is empty."""
        units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
        parts = re.findall(r"(\d+)([dhms])", self.max_time)
        return float(sum(int(count) * units[unit] for count, unit in parts)) if parts else None

    @property
    def condition(self) -> Condition | None:
        """Return `stop_when`, parsed; None if it is empty."""
        return Condition.parse(self.stop_when) if self.stop_when else None


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The groups of episodes of an update, and how they are sampled and judged."""

    groups: int = 8
    """Number of groups per update. A group is all episodes of one task."""
    group_size: int = 8
    """Episodes per group (K or G in papers); of `es` the members of the population."""
    select: str = "all"
    """Groups to train on. all; varied: those whose rewards differ; accepted: those with a reward of at least
    method.accept, or eval.right where the method has no accept; or "file.py:function", your function that
    takes a group's episodes and returns whether to keep it. New tasks replace groups that are dropped."""
    max_rounds: int = 4
    """Most rounds of sampling per update, the first included. After them the update trains on the groups that
    it has, even if they are fewer than rollout.groups."""
    replay: int = 0
    """Number of groups of earlier updates that each update trains on again, in addition to its new ones."""
    replay_lag: int = 4
    """Age in updates up to which a group can be replayed."""
    given_answers: int = 0
    """Number of answers of the data that each update trains on in addition to the policy's own, in the order
    in which `kd` would take them; each is a group. GKD's λ, the share of own answers, is groups × group_size
    over that plus given_answers. For λ = 0 take `kd`. Source: arXiv:2306.13649, algorithm 1."""
    workers: int = 2
    """Number of worker processes for verifiers and environments that are not built in."""
    deadline_s: float = 10.0
    """Seconds after which a verifier or an environment is killed; its episode is then masked."""
    memory_mb: int = 4096
    """Memory limit of each worker process; a native judge of billions of parameters needs more. The process
    with the reward models has no limit."""
    episode_tokens: int = 0
    """Most tokens that the policy may generate in all turns of an episode; 0: what the context holds."""
    episode_s: float = 0.0
    """Seconds after which an episode gets no further turn; 0: no limit. With a limit episodes depend on the
    clock, so two runs differ."""
    mask_truncated: bool = False
    """Leave answers out that were cut off, by sampling.max_new_tokens or the end of the context, as if they
    had not been drawn: they count neither in the loss nor in its mean nor in their group's. Metrics of
    rewards and lengths count them. Overlong filtering, DAPO, arXiv:2503.14476, section 3.4. It does not
    teach a policy whose answers grow to end them, which method.overlong_buffer does."""
    router_replay: bool = False
    """Of a model of experts: train each token with the experts to which the sampler sent it, not with those
    that the learner's routers would choose. Their kernels differ, and so do some choices, by which the two
    policies differ by more than rounding (kl/mismatch). References choose by themselves. Rollout routing
    replay (R3), arXiv:2510.11370."""
    max_error_rate: float = 0.2
    """Stop the run when more than this share of the last 512 episodes could not be judged."""

    def __post_init__(self) -> None:
        if self.replay < 0:
            raise ValueError(f"replay must be 0 (none) or more, not {self.replay}")
        if self.given_answers < 0:
            raise ValueError(f"given_answers must be 0 (none) or more, not {self.given_answers}")
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
    """Evaluation on held-out tasks before, during and after training."""

    every: int = 0
    """Updates between evaluations; 0: evaluate only before the first update and after the last."""
    limit: int = 200
    """Most tasks to evaluate on; 0 turns evaluation off."""
    temperature: float = 0.0
    """Sampling temperature; 0 takes the most likely token."""
    samples: int = 1
    """Answers to each task: accuracy is their mean (avg@k); pass@1, pass@2, pass@4 ... are measured too."""
    task: tuple[TaskChoice, ...] = ()
    """[[eval.task]]: further sources to evaluate on, by name, in a run of any method, also one that learns
    from data. Their metrics are under eval/NAME/. Of data the held_out is asked, else the data itself."""
    right: float = 1.0
    """Least reward of an answer that counts as right, where the verdict itself is neither right nor wrong."""

    def __post_init__(self) -> None:
        if min(self.every, self.limit, self.temperature) < 0:
            raise ValueError("every, limit and temperature must be 0 or more")
        if self.samples < 1:
            raise ValueError(f"samples must be 1 or more, not {self.samples}")
        if any(source.weight != 1 or source.epochs or source.reference_path for source in self.task):
            keys = "weight, epochs and reference_path"
            raise ValueError(f"eval.task is not trained on, so its {keys} are never read")


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The records of an update of an offline method."""

    batch_size: int = 32
    """Number of conversations, rankings or answers per update."""
    max_length: int = 0
    """Most tokens of a conversation, or of an answer of a preference method; what is longer is cut. 0: the
    model's context. Data of reward models is not cut: a longer answer is left out together with the other
    answers to its question, and so are the judged steps that lie beyond the limit."""
    train_on: Literal["all", "last"] = "all"
    """Turns of a conversation to train on. all: each message of the assistant. last: what the assistant says
    behind the last message of the user, calls of tools included; the rest is rendered as a prompt, in which
    many templates drop earlier reasoning. A message of weight 0 is never trained."""
    separator: str = "\n\n"
    """Text after each step of an answer, for methods that learn from steps."""
    tool_format: FormatName = "auto"
    """Format of tool calls in conversations. auto: as the chat template writes them, or else as [task.tools]
    would."""

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
    """Order in which tasks are sampled."""

    kind: str = "none"
    """none: random order. order: easiest first. band: tasks that the policy sometimes solves. bandit: tasks
    of the bucket that teaches most. Or "file.py:name", your function or class; called with the tasks and
    seed=..., it returns a supply of tasks (curriculum/curriculum.py: Supply)."""
    field: str = "difficulty"
    """Field of a task that order sorts by, and that bandit makes buckets from."""
    low: float = 0.1
    """Lowest success rate of a task in the band."""
    high: float = 0.8
    """Highest success rate of a task in the band."""
    keep: float = 0.0
    """Weight of a task's previous success rate when it is sampled again (an exponential moving average); 0
    uses the newest rate alone."""
    explore: float = 0.2
    """Share of tasks that are chosen from all tasks (band) or buckets (bandit) alike; of a bandit also its
    learning rate."""
    sweep: bool = True
    """Sample each task once before a band repeats any. If false, new ones come with probability explore."""
    buckets: int = 4
    """Number of buckets, each of about equally many tasks. If the field has fewer values, each value is a
    bucket."""
    share: float = 0.005
    """Share of the total weight that each group spreads over all buckets, so that the bandit returns to every
    bucket sooner or later."""

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
