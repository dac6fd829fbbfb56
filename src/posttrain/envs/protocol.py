"""What an environment is: a pure function from what has happened and a response to what happens next.

A question with one answer needs no environment: the sampler shows the task's messages, and its
verifier judges the response. An environment is for episodes of several turns.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from posttrain.base.usercode import cause
from posttrain.base.verdict import number, sound
from posttrain.types import Message, Task, Verdict

_ROLE = re.compile(r"[A-Za-z][\w-]{0,63}")
"""A template writes it between its marks, where anything else could make one."""
SEATS = 64
"""Most seats of a game."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The beginning of an episode: a picklable state, and the first messages shown to the policy."""

    state: Any
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas that the chat template is given besides, as transformers writes them."""
    seats: int = 1
    """Of a game that the policy plays against itself, or with itself: how many seats it takes, each with a
    conversation of its own."""
    seat: int = 0
    """Whose turn it is, and whom the messages are for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What follows one response: the next state with messages to append, or the end with its verdict.

    >>> Turn(state=3, messages=({"role": "user", "content": "higher"},)).done
    False
    """

    state: Any
    messages: tuple[Message, ...] = ()
    """Appended to the conversation; empty when it is over."""
    reward: float | None = None
    """Arrives with the last token of the response; None is none."""
    done: bool = False
    verdict: Verdict | tuple[Verdict, ...] | None = None
    """What is said of the whole episode; there when, and only when, it is over. Of several seats one for
    each, which earns its score."""
    seat: int = 0
    """Of several seats, whose turn it is: the messages go on with its conversation, or begin it."""

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """That of each seat; none while the episode goes on."""
        if isinstance(self.verdict, tuple):
            return self.verdict
        return () if self.verdict is None else (self.verdict,)


class Env(Protocol):
    """Episodes of several turns, as pure functions, so that one can be replayed from its responses.

    Neither function changes what it is given, draws a number that its arguments do not fix, or keeps
    anything: the state holds all there is. States, like environments, can be pickled.

    An environment may also say how many responses it takes (`max_turns`), how many seconds a reply may take
    beyond rollout.deadline_s (`reply_s`), and how it is played with a chat template (`suited(chat)`).
    """

    @property
    def trusted(self) -> bool:
        """Whether it may run in our own process: no user code, no way to hang or die."""
        ...

    def start(self, task: Task) -> Start:
        """The beginning of an episode about this task."""
        ...

    def reply(self, state: Any, response: str) -> Turn:
        """What follows this response in this state."""
        ...


def suited(env: Any, chat: Any) -> Any:
    """The environment as it is played with this chat's template; itself where it does not care."""
    return env.suited(chat) if hasattr(env, "suited") else env


def guarded_start(env: Env, task: Task) -> Start | Verdict:
    """The start of an episode; a failed verdict if the environment breaks.

    Like `guarded_reply` it can be called in a worker process.
    """
    try:
        start: Any = env.start(task)
    except Exception as error:
        return Verdict(score=None, label="raised", reason=cause(error))
    wrong = f"start returned {type(start).__name__}, not a Start" if not isinstance(start, Start) else ""
    wrong = wrong or _bad_messages(start.messages)
    if not wrong and not (
        isinstance(start.seats, int) and 1 <= start.seats <= SEATS and start.seat in range(start.seats)
    ):
        wrong = f"seat {start.seat!r} of {start.seats!r} is none; a game has 1 to {SEATS}"
    return Verdict(score=None, label="bad_turn", reason=wrong) if wrong else start


def guarded_reply(env: Env, state: Any, response: str) -> Turn:
    """What follows a response; the end with a failed verdict if the environment breaks.

    >>> guarded_reply(None, 0, "5").verdict.label
    'raised'
    """
    try:
        turn = env.reply(state, response)
        wrong = _bad_turn(turn)
        if wrong:
            return broken_turn(state, "bad_turn", wrong)
        reward = number(turn.reward)
        if reward is None and turn.reward is not None:
            return broken_turn(state, "not_a_number", f"the reward is {turn.reward}")
        said = tuple(sound(verdict) for verdict in turn.verdicts)
        return replace(
            turn, reward=reward, verdict=said if isinstance(turn.verdict, tuple) else (*said, None)[0]
        )
    except Exception as error:
        return broken_turn(state, "raised", cause(error))


def broken_turn(state: Any, label: str, reason: str) -> Turn:
    """The end of an episode whose environment broke: never a reward."""
    return Turn(state=state, done=True, verdict=Verdict(score=None, label=label, reason=reason))


def _bad_turn(turn: Any) -> str:
    if not isinstance(turn, Turn):
        return f"reply returned {type(turn).__name__}, not a Turn"
    if turn.done != (turn.verdict is not None):
        return "a turn has a verdict when, and only when, it is the last"
    if strange := [type(v).__name__ for v in turn.verdicts if not isinstance(v, Verdict)]:
        return f"the verdict is {strange[0]}, not a Verdict"
    if turn.done:
        return "the last turn has messages that nobody will read" if turn.messages else ""
    return _bad_messages(turn.messages)


def unfit(turn: Turn, seats: int) -> str:
    """What is wrong with a turn of a game of so many seats; empty if nothing is."""
    if turn.done:
        there, each = len(turn.verdicts), isinstance(turn.verdict, tuple)
        if any(verdict.failed for verdict in turn.verdicts) and not each:
            return ""
        if each != (seats > 1) or there != seats:
            return f"there are {seats} seats and {there} verdicts"
        return (
            "a seat earns the score of its verdict, and no reward beside it" if each and turn.reward else ""
        )
    return "" if turn.seat in range(seats) else f"seat {turn.seat!r} is none of {seats}"


def _bad_messages(messages: Any) -> str:
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
