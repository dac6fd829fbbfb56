"""Environments: pure functions from the state of an episode and a response to what follows.

A question with one answer needs no environment: the sampler shows the task's messages, and the verifier of
the task judges the response. An environment is for episodes of several turns.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from posttrain.base.usercode import cause
from posttrain.base.value_digest import value_digest
from posttrain.base.verdict import number, sound
from posttrain.types import Message, Task, Verdict
from posttrain.verifiers.protocol import Verifier

_ROLE = re.compile(r"[A-Za-z][\w-]{0,63}")
"""Chat templates write roles between marks, so other characters could spell a mark."""
SEATS = 64
"""Maximum seats of a game."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The beginning of an episode: a state that can be pickled, and the first messages to the policy."""

    state: Any
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of tools for the chat template, in the form of transformers."""
    seats: int = 1
    """Number of seats of a game that the policy plays against itself or with itself, each with its own
    conversation."""
    seat: int = 0
    """The seat whose turn it is, and which sees the messages."""
    key: int = 0
    """Key of the state; set by `guarded_start` for methods that compare states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The environment's part of a turn: the next state with messages to append, or the end with a verdict.

    >>> Turn(state=3, messages=({"role": "user", "content": "higher"},)).done
    False
    """

    state: Any
    messages: tuple[Message, ...] = ()
    """Appended to the conversation; empty at the end of the episode."""
    reward: float | None = None
    """The reward of the last token of the response; None adds nothing."""
    done: bool = False
    """Whether the episode ends with this turn."""
    verdict: Verdict | tuple[Verdict, ...] | None = None
    """The verdict on the episode, at its end only. With several seats one for each, which earns its score."""
    seat: int = 0
    """With several seats, whose turn it is: the messages are appended to its conversation, or begin it."""
    key: int = 0
    """Key of the state; set by `guarded_reply` for methods that compare states."""

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The verdict of each seat; empty before the end."""
        if isinstance(self.verdict, tuple):
            return self.verdict
        return () if self.verdict is None else (self.verdict,)


@dataclass(frozen=True)
class Player:
    """What a source of tasks is judged or played by: a verifier of single answers, or an environment."""

    verifier: Verifier | None = None
    env: "Env | None" = None


class Env(Protocol):
    """Episodes of several turns, as pure functions, so that an episode can be replayed from its responses.

    Neither function changes its arguments, draws a random number that they do not fix, or stores anything:
    the state is complete. States and environments can be pickled.

    An environment may also have `max_turns`, the most responses of an episode; `reply_s`, the seconds that a
    reply may take in addition to rollout.deadline_s; `suited(chat)`, the environment for a chat template; and
    `state_key(state)`, the part of a state that must be equal for `method.turn_weight` to compare two turns
    (default: the whole state), or None if the conversation is the state.
    """

    @property
    def trusted(self) -> bool:
        """Whether it may run in the process of the run: it has no code of users, and cannot hang or crash."""
        ...

    def start(self, task: Task) -> Start:
        """Return the beginning of an episode for this task."""
        ...

    def reply(self, state: Any, response: str) -> Turn:
        """Return what follows this response in this state."""
        ...


def for_template(env: Any, chat: Any) -> Any:
    """Return the environment for the template of this chat; `env` itself if templates do not matter."""
    return env.suited(chat) if hasattr(env, "suited") else env


def key_of(env: Any, state: Any) -> int:
    """Return the key of a state, equal for equal states; 0 if the conversation is the state."""
    part = env.state_key(state) if hasattr(env, "state_key") else state
    return 0 if part is None else value_digest(part)


def guarded_start(env: Env, task: Task, keyed: bool = False) -> Start | Verdict:
    """Return the start of an episode, or a failed verdict if the environment fails.

    Like `guarded_reply` it can be called in a worker process. keyed: set the key of the state.
    """
    try:
        start: Any = env.start(task)
        if keyed and isinstance(start, Start):
            start = replace(start, key=key_of(env, start.state))
    except Exception as error:
        return Verdict(score=None, label="raised", reason=cause(error))
    fault = f"start returned {type(start).__name__}, not a Start" if not isinstance(start, Start) else ""
    fault = fault or _message_fault(start.messages)
    if not fault and not (
        isinstance(start.seats, int) and 1 <= start.seats <= SEATS and start.seat in range(start.seats)
    ):
        fault = f"there is no seat {start.seat!r} of {start.seats!r}; a game has 1 to {SEATS}"
    return Verdict(score=None, label="bad_turn", reason=fault) if fault else start


def guarded_reply(env: Env, state: Any, response: str, keyed: bool = False) -> Turn:
    """Return what follows a response, or the end with a failed verdict if the environment fails.

    keyed: set the key of the next state.

    >>> guarded_reply(None, 0, "5").verdict.label
    'raised'
    """
    try:
        turn = env.reply(state, response)
        fault = _turn_fault(turn)
        if fault:
            return broken_turn(state, "bad_turn", fault)
        reward = number(turn.reward)
        if reward is None and turn.reward is not None:
            return broken_turn(state, "not_a_number", f"the reward is {turn.reward}")
        verdicts = tuple(sound(verdict) for verdict in turn.verdicts)
        verdict = verdicts if isinstance(turn.verdict, tuple) else next(iter(verdicts), None)
        key = key_of(env, turn.state) if keyed and not turn.done else 0
        return replace(turn, reward=reward, verdict=verdict, key=key)
    except Exception as error:
        return broken_turn(state, "raised", cause(error))


def broken_turn(state: Any, label: str, reason: str) -> Turn:
    """Return the end of an episode whose environment failed: without a score."""
    return Turn(state=state, done=True, verdict=Verdict(score=None, label=label, reason=reason))


def _turn_fault(turn: Any) -> str:
    if not isinstance(turn, Turn):
        return f"reply returned {type(turn).__name__}, not a Turn"
    if turn.done != (turn.verdict is not None):
        return "a turn has a verdict when, and only when, it is the last"
    if strange := [type(v).__name__ for v in turn.verdicts if not isinstance(v, Verdict)]:
        return f"the verdict is {strange[0]}, not a Verdict"
    if turn.done:
        return "the last turn has messages, which are never read" if turn.messages else ""
    return _message_fault(turn.messages)


def seat_fault(turn: Turn, seats: int) -> str:
    """Return what is wrong with a turn of a game of this many seats, or ""."""
    if turn.done:
        count, per_seat = len(turn.verdicts), isinstance(turn.verdict, tuple)
        if any(verdict.failed for verdict in turn.verdicts) and not per_seat:
            return ""
        if per_seat != (seats > 1) or count != seats:
            return f"there are {seats} seats and {count} verdicts"
        return "a seat earns the score of its verdict and no other reward" if per_seat and turn.reward else ""
    return "" if turn.seat in range(seats) else f"there is no seat {turn.seat!r} of {seats}"


def _message_fault(messages: Any) -> str:
    if not isinstance(messages, (tuple, list)) or not messages:
        return "there are no messages for the policy to answer"
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            return "a message has no role or no content"
        if not all(isinstance(value, str) for value in message.values()):
            return "a message holds something that is not text"
        if not _ROLE.fullmatch(message["role"]):
            return f"the role of a message is {message['role']!r}, not a word"
    return "the last message is the policy's own" if messages[-1]["role"] == "assistant" else ""
