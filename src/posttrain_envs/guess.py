"""A guessing game: find a number between 1 and N; each guess is answered "higher" or "lower"."""

import hashlib
import math
import re
from dataclasses import dataclass, replace
from typing import ClassVar

from posttrain.data.protocol import Games
from posttrain.envs.protocol import Start, Turn
from posttrain.types import Task, UserError, Verdict

_WHOLE = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class GuessState:
    """State of a guessing game."""

    secret: int
    low: int
    """Lowest number that is still possible."""
    high: int
    guesses: int = 0


@dataclass(frozen=True, kw_only=True)
class Guess:
    """Reward 1 for finding the number in at most `max_turns` guesses; otherwise 0.

    The guess is the last whole number of the response. Each turn also brings
    shaping · log(width before / width after) / log N, where the width counts the numbers that are
    still possible: over an episode at most `shaping`, whatever the policy does.

    Labels: right, wrong (turns used up), no_answer (the last response had no number either).

    >>> env = Guess(high=100, max_turns=7)
    >>> start = env.start(guess_tasks(1, high=100)[0])
    >>> start.state.secret
    45
    >>> env.reply(start.state, "Perhaps 50?").messages[0]["content"]
    'lower'
    >>> env.reply(start.state, "45").reward
    1.0
    """

    high: int = 100
    max_turns: int = 10
    shaping: float = 0.0
    trusted: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.high < 2:
            raise ValueError(f"high must be 2 or more, not {self.high}")
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be 1 or more, not {self.max_turns}")
        if not 0 <= self.shaping < math.inf:
            raise ValueError(f"shaping must be 0 or more, not {self.shaping}")

    def start(self, task: Task) -> Start:
        """Start a game about the task's answer. Raises UserError unless that is a number from 1 to `high`."""
        answer = (task.answer or "").strip()
        if not _WHOLE.fullmatch(answer) or len(answer) > 18 or not 1 <= int(answer) <= self.high:
            raise UserError(
                task.source, f"the answer of task {task.id!r} is not a number from 1 to {self.high}"
            )
        return Start(state=GuessState(int(answer), 1, self.high), messages=task.messages)

    def reply(self, state: GuessState, response: str) -> Turn:
        """Answer "higher" or "lower", ask for a number, or end the game."""
        numbers = _WHOLE.findall(response[-1000:])
        guess = int(numbers[-1]) if numbers and len(numbers[-1]) < 18 else None
        after = replace(state, guesses=state.guesses + 1)
        if guess == state.secret:
            after = replace(after, low=guess, high=guess)
            return self._over(state, after, 1.0, "right", f"found {guess} with guess {after.guesses}")
        if guess is not None and guess < state.secret:
            after = replace(after, low=max(state.low, guess + 1))
        elif guess is not None:
            after = replace(after, high=min(state.high, guess - 1))
        if after.guesses >= self.max_turns:
            label = "wrong" if guess is not None else "no_answer"
            return self._over(state, after, 0.0, label, f"not found in {after.guesses} guesses")
        if guess is None:
            hint = f"Please answer with a number between 1 and {self.high}."
        else:
            hint = "higher" if guess < state.secret else "lower"
        reward = self._progress(state, after) if self.shaping else None
        return Turn(state=after, messages=({"role": "user", "content": hint},), reward=reward)

    def _over(self, before: GuessState, after: GuessState, score: float, label: str, reason: str) -> Turn:
        verdict = Verdict(score=score, label=label, reason=reason)
        return Turn(state=after, reward=score + self._progress(before, after), done=True, verdict=verdict)

    def _progress(self, before: GuessState, after: GuessState) -> float:
        """Return shaping · the share of log N by which this turn reduced the log of the width."""
        widths = [math.log(game.high - game.low + 1) for game in (before, after)]
        return self.shaping * (widths[0] - widths[1]) / math.log(self.high)

    def make(self, limit: int, seed: int, games: Games) -> tuple[list[Task], list[Task]]:
        """Return the tasks to train on, and at most `limit` that are only evaluated on."""
        tasks = guess_tasks(games.train + games.held_out, high=self.high, seed=seed)
        return tasks[: games.train], tasks[games.train :][:limit]


def guess_tasks(count: int, *, high: int = 100, seed: int = 0) -> list[Task]:
    """Return games whose numbers are determined by the seed and their position."""
    tasks = []
    for i in range(count):
        digest = hashlib.blake2b(f"{seed}/{high}/{i}".encode(), digest_size=8).digest()
        secret = 1 + int.from_bytes(digest, "big") % high
        text = (
            f"I am thinking of a whole number between 1 and {high}. Guess it. "
            "I will answer 'higher' or 'lower'. Reply with just one number."
        )
        messages = ({"role": "user", "content": text},)
        tasks.append(Task(id=f"guess-{high}-{seed}-{i}", messages=messages, answer=str(secret)))
    return tasks
