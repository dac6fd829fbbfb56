"""A running episode, and the form in which it is saved and continued elsewhere."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy

from posttrain.base.chat import Chat
from posttrain.base.value_digest import value_digest
from posttrain.run.probes import measure_probes
from posttrain.types import OF_A_ROW, Completion, Episode, Routes, Sampling, Task, Trajectory, Verdict

_COLUMNS = [column.name for column in fields(Trajectory) if column.name not in OF_A_ROW]


@dataclass(frozen=True)
class EpisodeLimits:
    """Bounds on the length of an episode; 0: unbounded."""

    context: int
    """Tokens of the conversation, the prompt included."""
    tokens: int = 0
    """Tokens that the policy samples, over all turns."""
    seconds: float = 0.0

    def room(self, live: "RunningEpisode") -> int:
        """Return how many tokens the next answer may have."""
        room = self.context - len(live.tokens)
        return min(room, self.tokens - sum(live.sampled)) if self.tokens else room

    def exceeded(self, live: "RunningEpisode", added: int, lasted: float) -> tuple[str, str]:
        """Return (label, reason) of the limit that forbids another turn, ("", "") if none does.

        added: tokens that would come before the answer. lasted: seconds since the episode began.
        """
        if self.context - len(live.tokens) - added < 1:
            return "context", f"the conversation outgrew the context of {self.context} tokens"
        if self.tokens and sum(live.sampled) >= self.tokens:
            return "episode_tokens", f"all of its {self.tokens} tokens have been said"
        if self.seconds and lasted > self.seconds:
            return "episode_s", f"it has lasted {lasted:.1f} s"
        return "", ""


@dataclass
class RunningEpisode:
    """An episode that is not over, with the columns of its `Trajectory` so far."""

    task: Task
    sample: int
    key: str
    """Key of its random draws: epoch:task (see GroupRequest.key)."""
    sampling: Sampling
    tokens: list[int]
    sampled: list[bool] = field(default_factory=list)
    logp_gen: list[float] = field(default_factory=list)
    logp_policy: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """Text of each answer of the policy."""
    state: Any = None
    """State of the environment, which `Env.reply` receives with the next answer."""
    stop: str = ""
    """Why the last answer ended, as in `Episode.stop`."""
    tools: Sequence[Any] = ()
    """Tools with which the first prompt was rendered."""
    seats: int = 1
    """Number of seats of the game. Samples are numbered by game, then by seat: game * seats + seat."""
    state_key: int = 0
    """Key of the state that the next answer is given in; 0 unless the method compares states."""
    turn_state: dict[int, int] = field(default_factory=dict)
    """Keys of the earlier turns' states, as in `Trajectory.turn_state`."""
    routes: Routes | None = None
    """Experts of the first tokens, as in `Trajectory.routes`."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the fields; checkpoints from before they were there lack `turn_state` and `routes`."""
        vars(self).update({"turn_state": {}, "routes": None} | state)

    @property
    def seat(self) -> int:
        """Number of the seat that this episode plays."""
        return self.sample % self.seats

    def __post_init__(self) -> None:
        tokens, self.tokens = self.tokens, []
        self.append(tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens that the policy did not sample."""
        self._extend(tokens, [0.0] * len(tokens), [0.0] * len(tokens), [0] * len(tokens), False)

    def begin_turn(self, key: int) -> None:
        """Set the key of the state that the next answer is given in; 0: that of the conversation so far."""
        self.state_key = key or value_digest(numpy.asarray(self.tokens, numpy.int32).tobytes())

    def append_answer(self, answer: Completion) -> None:
        """Append an answer of the policy."""
        if self.state_key and answer.tokens:
            self.turn_state[len(self.tokens)] = self.state_key
        if (more := answer.routes) is not None:
            # Those of an earlier answer stay: its tokens were drawn with them.
            self.routes = (
                more if self.routes is None else numpy.concatenate([self.routes, more[len(self.routes) :]])
            )
        self._extend(answer.tokens, answer.logp_gen, answer.logp_policy, answer.version, True)
        self.said.append(answer.text)
        # Shorter than sampling allows: `Limits.room` was what cut it off.
        outgrown = answer.stop == "length" and len(answer.tokens) < self.sampling.max_new_tokens
        self.stop = "context" if outgrown else answer.stop

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
        """Add a reward to the last sampled token."""
        self.reward[len(self.sampled) - 1 - self.sampled[::-1].index(True)] += reward

    def pay_score(self, score: float, progress: Sequence[tuple[int, float]], chat: Chat) -> None:
        """Add r_k = Φ_k − Φ_{k−1} at the last token of each step of the last answer, score − Φ_K at its end.

        progress: (characters, Φ) of each step: where it ends in the answer's text, and its potential.
        The rewards sum to the score. With γ < 1 a credit discounts the potentials first
        (math/returns.py: shaped).
        """
        first = len(self.sampled) - self.sampled[::-1].index(False)
        answer, previous = self.tokens[first:], 0.0
        for characters, potential in progress:
            index = bisect_left(
                range(len(answer) - 1), characters, key=lambda n: len(chat.tokenizer.decode(answer[: n + 1]))
            )
            self.reward[first + index] += potential - previous
            previous = potential
        self.pay(score - previous)

    def truncate(self, length: int) -> None:
        """Truncate all columns to the first `length` tokens; no answer may lie behind them."""
        for name in _COLUMNS:
            del getattr(self, name)[length:]
        self.routes = None if self.routes is None else self.routes[:length]

    def trajectory(self) -> Trajectory:
        columns = {name: getattr(self, name) for name in _COLUMNS}
        return Trajectory(**columns, turn_state=self.turn_state, routes=self.routes)

    def episode(self, verdict: Verdict) -> Episode:
        """Return the finished episode with this verdict."""
        response = "\n".join(self.said)
        return Episode(
            task=self.task,
            sample=self.sample,
            trajectory=self.trajectory(),
            verdict=verdict,
            response=response,
            stop=self.stop,
            turns=len(self.said),
            seat=self.seat,
            probes=measure_probes(self.task, response),
        )


@dataclass(frozen=True, kw_only=True)
class PartialEpisode:
    """One episode of an unfinished group, from which a resumed run or another sampler continues it."""

    sample: int
    live: RunningEpisode | None = None
    """The running episode; None if it is over."""
    drawn: Completion | None = None
    """Tokens of the pending answer sampled so far; None before the first."""
    answered: bool = False
    """Whether the last answer is complete, and a reply or a verdict is pending."""
    due: int | None = None
    """Steps of the engine until a pending reply is applied."""
    waits: bool = False
    """Whether another seat of the game is to move."""
    episode: Episode | None = None
    """The finished episode, whose group still has running ones."""
