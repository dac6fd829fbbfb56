"""The nouns that all layers share: a task, a trajectory, a verdict, a batch.

Each is a frozen dataclass with a worked example. Nothing here computes anything that a
method could do differently. The nouns that hold tensors are defined in batch.py.

Lists are per token ("entry t belongs to token t"); sizes are B rows, T positions,
K samples of one task (a group), V vocabulary.
"""

import importlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from operator import not_
from typing import TYPE_CHECKING, Any, Literal

import numpy
import numpy.typing

from posttrain.errors import RunError as RunError
from posttrain.errors import UserError as UserError

if TYPE_CHECKING:
    from posttrain.batch import Batch as Batch
    from posttrain.batch import Mask as Mask
    from posttrain.batch import Method as Method
    from posttrain.batch import Outputs as Outputs
    from posttrain.batch import PerRow as PerRow
    from posttrain.batch import PerToken as PerToken

OF_TENSORS = ("Batch", "Mask", "Method", "Outputs", "PerRow", "PerToken")
"""Names that this module offers and batch.py defines."""


def __getattr__(name: str) -> Any:
    """Load a noun of batch.py at its first use, because it needs PyTorch and a task or a verdict does not."""
    if name in OF_TENSORS:
        return getattr(importlib.import_module("posttrain.batch"), name)
    raise AttributeError(f"module 'posttrain.types' has no attribute {name!r}")


Message = Mapping[str, Any]
"""One turn of a conversation: {"role": "user", "content": "What is 2 + 3?"}; texts except `tool_calls`."""

Dtype = Literal["auto", "bfloat16", "float32", "float64"]
"""Name of the dtype that a model computes in; auto depends on the device (models/loading.py: dtype_of)."""

PROBE = -1
"""Version of a row that is measured and not trained: a prompt with an answer to another prompt."""

GIVEN = -2
"""Version of a row of data among answers of the policy (`rollout.given_answers`)."""


TRUNCATED = ("length", "context")
"""Reasons for the end of an episode (`Episode.stop`) that cut it off."""


def worth(rewards: Sequence[float]) -> float:
    """Σ r, rounded to float32 and read from its fewest decimals: the number by which episodes are compared.

    Rewards may be paid in parts, and the parts of equal returns need not add up to equal floats; after
    rounding they do. Near 0 relative rounding does not help: a sum below the rounding error of its n parts,
    n 2⁻⁵² Σ|r|, counts as 0. math/returns.py: worth is the same rule for a batch.

    >>> sum([0.1] * 15), worth([0.1] * 15)
    (1.5000000000000002, 1.5)
    >>> worth([0.1, 0.6, -0.7])
    0.0
    """
    total, parts = math.fsum(rewards), len(rewards) - rewards.count(0.0)
    if abs(total) < parts * 2.0**-52 * math.fsum(map(abs, rewards)):
        return 0.0
    with numpy.errstate(over="ignore"):
        return float(str(numpy.float32(total)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A question without its answers.

    >>> task = Task(id="add-3-4", messages=({"role": "user", "content": "What is 3 + 4?"},), answer="7")
    >>> task.answer
    '7'
    """

    id: str
    """Unique in its set; also the key of the random numbers that draw its samples."""
    messages: tuple[Message, ...]
    """The conversation at the start of an episode, as the policy sees it."""
    answer: str | None = None
    """Reference answer for verifiers; the policy never sees it."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """All other fields of the record, for verifiers and environments."""
    source: str = ""
    """Origin of the record as "file:line", for error messages."""
    conversational: bool = False
    """True if the record holds the question as messages and not as a text."""
    answer_value: Any = None
    """The answer in the record's own type where that is not text: the number 7 for "7". A list or an object
    has no text, so that `answer` is None."""
    dataset: str = ""
    """Name of its source among those of a recipe with several [[task]] tables."""

    @property
    def typed_answer(self) -> Any:
        """The answer in the record's own type, for functions that compute; verifiers compare texts."""
        return self.answer if self.answer_value is None else self.answer_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A verifier's result for one response: a score with its reason, or no score if the verifier failed.

    A verdict without a score is never a reward: the trajectory is masked and counted.

    >>> Verdict(score=1.0, label="right", reason="7 = 7").failed
    False
    >>> Verdict(score=None, label="timeout", reason="no verdict within 1 s").failed
    True
    """

    score: float | None
    """The reward, finite; None when the verifier itself failed."""
    label: str
    """Class for counts: right, wrong, no_answer ...; for a failure raised, timeout, died or not_a_number."""
    reason: str = ""
    """One line for a person."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The components of a combined score, by name."""
    progress: tuple[tuple[int, float], ...] = ()
    """(characters read, potential Φ) after each judgement. A step earns the gain in Φ, the end score − Φ."""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.score is not None and not math.isfinite(self.score):
            raise ValueError(f"a score is finite or None, not {self.score}")

    @property
    def failed(self) -> bool:
        """True if the verifier could not judge."""
        return self.score is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to draw tokens: temperature first, then top-k, top-p and min-p on the remaining tokens.

    >>> Sampling(temperature=0.0).greedy
    True
    """

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches p."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one."""
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    """Strings that end the answer; their tokens stay in it."""

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be 0 or more, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all) or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1], not {self.min_p}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be 1 or more, not {self.max_new_tokens}")
        stop: Any = self.stop
        if isinstance(stop, str) or not all(stop):
            raise ValueError(f"stop is a list of texts, none of them empty, not {stop!r}")

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """True if some tokens of the vocabulary cannot be drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for one answer, sent to an engine.

    A draw depends on (seed, task, sample, position) and on nothing else, so the same request
    gives the same answer whatever else is in the batch, up to float rounding.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int = 0
    task: str = ""
    """Key of the draws; usually Task.id with the epoch."""
    sample: int = 0
    """0 ... K-1 within the task."""
    position: int = 0
    """Number of tokens of this episode that earlier turns drew."""
    episode: str = ""
    """Requests of one name are turns of one conversation: the engine keeps a turn's KV cache for the next
    turn, until it is released."""
    begun: "Completion | None" = None
    """First part of the answer, drawn by an earlier request; the engine continues after it."""
    forced: tuple[int, ...] = ()
    """The complete answer if none is to be drawn; the engine then only computes its log-probabilities."""
    excluded: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...] = ()
    """Answers not to draw again: their tokens and the logp_policy of each; only some engines support it."""
    again: bool = False
    """True if the prompt may be requested again while others run; an engine may then keep its KV cache."""
    alternatives: int = 0
    """How many of the likeliest tokens to return for each drawn one; only some engines support it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An engine's answer: the tokens it drew and how likely each was.

    >>> c = Completion(tokens=[9, 2], logp_gen=[-0.7, -0.1], logp_policy=[-0.9, -0.1],
    ...                version=[5, 5], text="7", stop="eos")
    >>> len(c.tokens) == len(c.logp_gen) == len(c.version)
    True
    """

    tokens: list[int]
    """Drawn tokens, including the end token if it stopped the answer."""
    logp_gen: list[float]
    """Log-probability under the distribution that drew the token (after temperature and filters)."""
    logp_policy: list[float]
    """Log-probability under the policy at this temperature, before top-k, top-p and min-p."""
    version: list[int]
    """Version of the weights that drew each token."""
    text: str
    """The tokens as text, without the end token and without characters after a stop string."""
    stop: str
    """Reason for the end: eos, stop (a stop string) or length."""
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each drawn token the likeliest ones there with their logp_policy; empty unless requested."""
    routes: "Routes | None" = None
    """Experts of each token of the prompt and the answer but the last; None unless the engine notes them."""


Routes = numpy.typing.NDArray[numpy.int16]
"""Numbers of the experts that each token was sent to, [tokens, layers with experts, experts of a token]; -1
where it is not known."""


OF_A_ROW = ("turn_state", "teacher", "routes")
"""Fields of a trajectory that are not lists with an entry per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One episode as the model saw it. Every list has one entry per token.

        tokens       7     8     3     4     9     2     question, answer, tool's reply, answer
        sampled      -     -     yes   yes   -     yes   the policy chose this token
        logp_gen     0     0    -0.1  -0.7   0    -0.2   under the weights that chose it
        logp_policy  0     0    -0.2  -0.7   0    -0.2   the same before top-k, top-p, min-p
        version      0     0     5     5     0     6     of those weights
        reward       0     0     0     0     0     1     arriving with this token

    Outcome rewards, process rewards, tools, several turns and weights that change in the
    middle of an episode are the same lists.

    >>> t = Trajectory(tokens=[7, 8, 3], sampled=[False, False, True], logp_gen=[0, 0, -0.1],
    ...                logp_policy=[0, 0, -0.1], version=[0, 0, 5], reward=[0, 0, 1.0])
    >>> t.prompt_length, t.total_reward
    (2, 1.0)
    """

    tokens: list[int]
    sampled: list[bool]
    logp_gen: list[float]
    logp_policy: list[float]
    version: list[int]
    reward: list[float]
    turn_state: Mapping[int, int] = field(default_factory=dict)
    """By the index of each turn's first token: key of the state that the turn begins in. Equal keys in a
    group are equal states. Empty unless the method compares states (batch.py: Method.asks)."""
    teacher: int = 0
    """Number of the reference that the row is compared with, in a run with several."""
    routes: Routes | None = None
    """Experts of each of the first tokens, as the sampler's routers chose them; None unless noted."""

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in self.__slots__ if name not in OF_A_ROW}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"a trajectory's lists differ in length: {lengths}")
        if self.sampled[:1] == [True]:
            raise ValueError("the first token cannot be a sampled one: nothing comes before it")
        if any(compress(self.reward, map(not_, self.sampled))):
            place = next(t for t, r in enumerate(self.reward) if r and not self.sampled[t])
            raise ValueError(
                f"token {place} has a reward of {self.reward[place]} and is no choice of the policy"
            )
        if others := [t for t in self.turn_state if t >= len(self.sampled) or not self.sampled[t]]:
            raise ValueError(f"a turn begins at token {others[0]}, which is no choice of the policy")

    @classmethod
    def given(
        cls, tokens: list[int], start: int = 1, trained: list[bool] | None = None, **others: Any
    ) -> "Trajectory":
        """Return the trajectory of tokens that were not sampled, such as a dataset's.

        Tokens from `start` on are trained, or those where `trained` is True. Columns that `others` does not
        hold are 0.
        """
        sampled = [t >= start for t in range(len(tokens))] if trained is None else trained
        floats: dict[str, Any] = {n: [0.0] * len(tokens) for n in ("logp_gen", "logp_policy", "reward")}
        zeros = floats | {"version": [0] * len(tokens)}
        return cls(tokens=tokens, sampled=sampled, **(zeros | others))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the lists as arrays: about 14 bytes a token, where lists of Python numbers take 33."""
        n, tokens = len(self.tokens), numpy.asarray(self.tokens, numpy.int32)
        version = numpy.asarray(self.version, numpy.int32)
        starts = numpy.flatnonzero(numpy.diff(version, prepend=version[:1] - 1)).astype(numpy.int32)
        rewards = {t: r for t, r in enumerate(self.reward) if r}
        floats = [_narrow(self.logp_gen), _narrow(self.logp_policy)]
        sampled = numpy.packbits(numpy.asarray(self.sampled, bool))
        others: list[Any] = [self.turn_state, self.teacher] if self.turn_state or self.teacher else []
        if self.routes is not None:
            others = [self.turn_state, self.teacher, self.routes]
        return _unpacked, (n, tokens, sampled, *floats, starts, version[starts], rewards, *others)

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first sampled one."""
        return self.sampled.index(True) if True in self.sampled else len(self.tokens)

    @property
    def total_reward(self) -> float:
        """The undiscounted sum of the rewards (see `worth`)."""
        return worth(self.reward)


def _narrow(values: Sequence[float]) -> "numpy.typing.NDArray[Any]":
    """Return the numbers in float32 if that is exact, otherwise in float64."""
    wide = numpy.asarray(values, numpy.float64)
    with numpy.errstate(over="ignore"):
        narrow = wide.astype(numpy.float32)
    return narrow if numpy.array_equal(narrow, wide, equal_nan=True) else wide


def _unpacked(
    n: int,
    tokens: Any,
    sampled: Any,
    gen: Any,
    policy: Any,
    starts: Any,
    versions: Any,
    rewards: Any,
    states: Mapping[int, int] | None = None,
    teacher: int = 0,
    routes: Routes | None = None,
) -> Trajectory:
    return Trajectory(
        tokens=tokens.tolist(),
        sampled=numpy.unpackbits(sampled, count=n).astype(bool).tolist(),
        logp_gen=gen.tolist(),
        logp_policy=policy.tolist(),
        version=numpy.repeat(versions, numpy.diff(starts, append=n)).tolist(),
        reward=[rewards.get(t, 0.0) for t in range(n)],
        turn_state=states or {},
        teacher=teacher,
        routes=routes,
    )


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A trajectory with its task and its verdict.

    A failed episode (its environment or verifier broke) is data, not a crash: its verdict
    has no score, and it is masked out of the update and counted.
    """

    task: Task
    sample: int
    trajectory: Trajectory = field(repr=False)
    verdict: Verdict
    response: str
    """Text of all turns of the policy, joined by newlines."""
    stop: str
    """Reason for the end of the last turn: eos, stop, length, or context (the context was full)."""
    turns: int = 1
    search: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Results and costs of the search for its task, on the first episode of the group (search/record.py)."""
    branches: tuple[Trajectory, ...] = field(default=(), repr=False)
    """Further conversations of an agent, each paid the episode's total reward. A drawn token is `sampled` in
    one conversation and context in the others."""
    seat: int = 0
    """Player number in a game that the policy plays against itself; rewards are compared within a seat."""
    probes: Mapping[str, float] = field(default_factory=dict, repr=False)
    """What each probe says of the response (run/probes.py), by name."""

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The trajectory and its branches: the episode's rows in a batch."""
        return (self.trajectory, *self.branches)

    @property
    def reward(self) -> float:
        """Return the sum of the rewards of its tokens."""
        return self.trajectory.total_reward

    @property
    def length(self) -> int:
        """Number of sampled tokens in all rows."""
        return sum(sum(row.sampled) for row in self.trajectories)

    @property
    def response_hash(self) -> int:
        """Hash of the sampled tokens."""
        return hash(tuple(tuple(compress(row.tokens, row.sampled)) for row in self.trajectories))

    @property
    def versions(self) -> Mapping[int, int]:
        """Number of tokens that each version of the weights drew, by version."""
        return Counter(v for row in self.trajectories for v in compress(row.version, row.sampled))

    @property
    def spent(self) -> Mapping[str, float]:
        """The entries of `search` that are numbers."""
        return {name: value for name, value in self.search.items() if isinstance(value, int | float)}

    def summary(self) -> "EpisodeSummary":
        """Return the episode without its tokens, for metrics and for other ranks."""
        reason = self.verdict.reason if self.verdict.failed else ""
        verdict = replace(self.verdict, progress=(), reason=reason)
        return EpisodeSummary(
            task=Task(id=self.task.id, messages=(), dataset=self.task.dataset),
            verdict=verdict,
            reward=self.reward,
            length=self.length,
            response_hash=self.response_hash,
            versions=dict(self.versions),
            stop=self.stop,
            spent=self.spent,
            seat=self.seat,
            probes=self.probes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSummary:
    """An episode without its tokens: the facts that metrics and decisions of the run need, on any rank."""

    task: Task
    """The task's id and dataset; all other fields are empty."""
    verdict: Verdict
    reward: float
    length: int
    response_hash: int
    versions: Mapping[int, int]
    stop: str
    spent: Mapping[str, float] = field(default_factory=dict)
    """The entries of `Episode.search` that are numbers."""
    seat: int = 0
    probes: Mapping[str, float] = field(default_factory=dict)


AnyEpisode = Episode | EpisodeSummary
"""What metrics are computed from: an episode of this process, or the summary of another rank's."""
