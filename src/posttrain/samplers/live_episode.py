"""An episode that is going on, and what is kept of it to go on elsewhere."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from posttrain.base.chat import Chat
from posttrain.types import Completion, Episode, Sampling, Task, Trajectory, Verdict

_COLUMNS = [column.name for column in fields(Trajectory)]


@dataclass(frozen=True)
class Limits:
    """How long an episode may be; 0 is no bound."""

    context: int
    """Tokens of the conversation."""
    tokens: int = 0
    """Those that the policy says in all turns."""
    seconds: float = 0.0

    def room(self, live: "RunningEpisode") -> int:
        """Tokens that the next answer may have."""
        left = self.context - len(live.tokens)
        return min(left, self.tokens - sum(live.sampled)) if self.tokens else left

    def exceeded(self, live: "RunningEpisode", added: int, lasted: float) -> tuple[str, str]:
        """Which limit leaves no further turn behind so many more tokens, and why; empty: none."""
        if self.context - len(live.tokens) - added < 1:
            return "context", f"the conversation outgrew the context of {self.context} tokens"
        if self.tokens and sum(live.sampled) >= self.tokens:
            return "episode_tokens", f"all of its {self.tokens} tokens have been said"
        if self.seconds and lasted > self.seconds:
            return "episode_s", f"it has lasted {lasted:.1f} s"
        return "", ""


@dataclass
class RunningEpisode:
    """An episode that is still going on."""

    task: Task
    sample: int
    key: str
    """Of its random draws: the epoch and the task."""
    sampling: Sampling
    tokens: list[int]
    sampled: list[bool] = field(default_factory=list)
    logp_gen: list[float] = field(default_factory=list)
    logp_policy: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    state: Any = None
    stop: str = ""
    tools: Sequence[Any] = ()
    """That its first prompt was rendered with."""
    seats: int = 1
    """Of its game. Samples are then numbered game by game, and within a game by seat."""

    @property
    def seat(self) -> int:
        """Its own in its game."""
        return self.sample % self.seats

    def __post_init__(self) -> None:
        tokens, self.tokens = self.tokens, []
        self.append(tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Appends tokens that the policy did not choose."""
        self._extend(tokens, [0.0] * len(tokens), [0.0] * len(tokens), [0] * len(tokens), False)

    def chose(self, answer: Completion) -> None:
        """Appends an answer of the policy."""
        self._extend(answer.tokens, answer.logp_gen, answer.logp_policy, answer.version, True)
        self.said.append(answer.text)
        cut = answer.stop == "length" and len(answer.tokens) < self.sampling.max_new_tokens
        self.stop = "context" if cut else answer.stop

    def _extend(
        self,
        tokens: Sequence[int],
        gen: Sequence[float],
        policy: Sequence[float],
        version: Sequence[int],
        sampled: bool,
    ) -> None:
        self.tokens += tokens
        self.logp_gen += gen
        self.logp_policy += policy
        self.version += version
        self.sampled += [sampled] * len(tokens)
        self.reward += [0.0] * len(tokens)

    def pay(self, reward: float) -> None:
        """Adds a reward that arrives with the last token the policy chose."""
        self.reward[len(self.sampled) - 1 - self.sampled[::-1].index(True)] += reward

    def pay_score(self, score: float, progress: Sequence[tuple[int, float]], chat: Chat) -> None:
        """Adds the score of the last answer: what each step gains to its last token, the rest at the end.

        The potentials cancel in the sum of rewards. With γ < 1 a credit discounts them first
        (math/returns.py: shaped).
        """
        first = len(self.sampled) - self.sampled[::-1].index(False)
        answer, reached = self.tokens[first:], 0.0
        for characters, potential in progress:
            place = bisect_left(
                range(len(answer) - 1), characters, key=lambda n: len(chat.tokenizer.decode(answer[: n + 1]))
            )
            self.reward[first + place] += potential - reached
            reached = potential
        self.pay(score - reached)

    def truncate(self, length: int) -> None:
        """Takes back all tokens but the first ones, which nothing that was said is among."""
        for name in _COLUMNS:
            del getattr(self, name)[length:]

    def trajectory(self) -> Trajectory:
        """Its tokens, and what is known of each."""
        return Trajectory(**{name: getattr(self, name) for name in _COLUMNS})

    def episode(self, verdict: Verdict) -> Episode:
        """The episode, once it is over and judged."""
        return Episode(
            task=self.task,
            sample=self.sample,
            trajectory=self.trajectory(),
            verdict=verdict,
            response="\n".join(self.said),
            stop=self.stop,
            turns=len(self.said),
            seat=self.seat,
        )


@dataclass(frozen=True, kw_only=True)
class PartialEpisode:
    """An unfinished episode, token for token: what a resume or another sampler goes on from."""

    sample: int
    live: RunningEpisode | None = None
    """None of an episode that is over."""
    drawn: Completion | None = None
    """Of the answer running; None of one that has not begun."""
    answered: bool = False
    """Whether the answer is complete and waits for a reply or a verdict."""
    due: int | None = None
    """Steps of the engine after which a reply is to be taken."""
    waits: bool = False
    """Whether it is the turn of another seat of its game."""
    episode: Episode | None = None
    """It is over, and others of its group are not."""
