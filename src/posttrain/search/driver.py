"""Many searches at once over one engine: each goes on as soon as its own question is answered.

step   consumes       moves that the engine has drawn
       waits for      Steps, which answer all that was asked since the last step in one batch
       unblocked by   nothing: while one search waits for its moves the others' are drawn
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from posttrain.base.chat import Chat
from posttrain.engines.protocol import Engine
from posttrain.search.engine_requests import EngineQuestions, move_of, values
from posttrain.search.protocol import (
    Apply,
    Budget,
    Propose,
    Question,
    Refused,
    State,
    StateValue,
    Transitions,
)
from posttrain.search.tree import Search, Tree
from posttrain.types import Completion, Request, RunError, Sampling, Task, UserError

_MOST = 128
Make = Callable[[State, Budget], Search]
Valued = Callable[[Sequence[State]], Sequence[float]]


@dataclass(eq=False)
class _Running:
    """One search, and what it waits for."""

    key: str
    """Of its draws."""
    search: Search
    sampling: Sampling
    questions: tuple[Question, ...] = ()
    answers: list[Any] = field(default_factory=list)
    missing: int = 0
    model_s: float = 0.0
    prover_s: float = 0.0


class _Place(NamedTuple):
    """Whose draw it is: of a search, a question, and a move."""

    number: int
    question: int
    move: int


class SearchDriver:
    """Searches side by side. What is drawn in a state depends on the seed, the task and the state alone.

    context: tokens that prompt and move may have together; sketch_tokens: a sketch. value: of states; without
    it the policy says it.
    """

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        steps: Transitions,
        *,
        context: int,
        seed: int = 0,
        value: Valued | None = None,
        sketch_tokens: int = 256,
    ) -> None:
        self.engine, self.world = engine, steps
        self.value = value
        self.asking = EngineQuestions(chat, context, seed, sketch_tokens, by_policy=value is None)
        self.steps = 0
        """Of the engine."""
        self._running: dict[int, _Running] = {}
        self._places: dict[int, _Place] = {}
        self._parked: list[tuple[_Place, Request]] = []
        self._begun = 0
        self._done: list[tuple[int, Tree | Refused]] = []

    @property
    def busy(self) -> bool:
        """Whether a search is going on."""
        return bool(self._running or self._done)

    def begin(self, task: Task, make: Make, budget: Budget, sampling: Sampling, key: str = "") -> int:
        """The number of a new search about this task; key: of its draws, the task's id without one."""
        number, self._begun = self._begun, self._begun + 1
        start = time.monotonic()
        if budget.seconds:
            budget = replace(budget, late=lambda: time.monotonic() - start > budget.seconds)
        root = self._root(task)
        spent = time.monotonic() - start
        if isinstance(root, Refused):
            self._done.append((number, root))
        else:
            self._running[number] = _Running(key or task.id, make(root, budget), sampling, prover_s=spent)
            self._send(number, None)
            self._advance()
        return number

    def _root(self, task: Task) -> State | Refused:
        """Where a task begins; a task that cannot begin ends its own search alone."""
        try:
            return self.world.begin([task])[0]
        except UserError as error:
            return Refused("bad_task", str(error))
        except RunError as error:
            return Refused("died", str(error))

    def step(self) -> list[tuple[int, Tree | Refused]]:
        """The searches that have ended after one more step of the engine, with their numbers."""
        if self.engine.busy:
            self.steps += 1
            start = time.monotonic()
            answers = self.engine.poll()
            waiting = {number: each.missing for number, each in self._running.items()}
            for number, share in _shares(time.monotonic() - start, waiting):
                self._running[number].model_s += share
            self.receive(answers)
        else:
            self._advance()
        done, self._done = self._done, []
        return done

    def receive(self, answers: Sequence[tuple[int, Completion]]) -> None:
        """Takes moves of the engine."""
        for ticket, answer in answers:
            place = self._places.pop(ticket)
            running = self._running[place.number]
            asked = running.questions[place.question]
            running.answers[place.question][place.move] = move_of(answer, asked)
            running.missing -= 1
        self._advance()

    def pause(self) -> None:
        """Takes back from the engine all that it has not answered, as far as it has come."""
        for ticket, request in self.engine.withdraw():
            self._parked.append((self._places.pop(ticket), request))

    def unpause(self) -> None:
        """Asks the engine to go on with what was taken back."""
        parked, self._parked = self._parked, []
        for place, request in sorted(parked, key=lambda each: each[0]):
            self._places[self.engine.submit(request)] = place

    # ------------------------------------------------------------------ questions

    def _advance(self) -> None:
        """Sends searches their answers, and has moves applied, until all wait for the engine or are over.

        Of moves no more than _MOST at a time: others wait for the next step, between which a sampler gives
        its sign of life.
        """
        applied = 0
        while applied < _MOST and (ready := self._ready(_MOST - applied)):
            asked = [
                (number, n, question)
                for number in ready
                for n, question in enumerate(self._running[number].questions)
                if not isinstance(question, Propose)
            ]
            applies = [(number, n, q.asked) for number, n, q in asked if isinstance(q, Apply)]
            pairs = [pair for _, _, given in applies for pair in given]
            applied += len(pairs)
            start = time.monotonic()
            led = self._led(pairs)
            wanted = Counter(number for number, _, given in applies for _ in given)
            for number, share in _shares(time.monotonic() - start, wanted):
                self._running[number].prover_s += share
            for number, n, given in applies:
                self._running[number].answers[n], led = led[: len(given)], led[len(given) :]
            for number, n, question in asked:
                if isinstance(question, StateValue):
                    said = self._running[number].answers[n]
                    worth = self.value(question.states) if self.value else values(said)
                    self._running[number].answers[n] = list(worth)
            for number in ready:
                self._send(number, self._running[number].answers)

    def _ready(self, room: int) -> list[int]:
        """The searches that wait for no move, as far as the moves that they want applied go into the room."""
        ready: list[int] = []
        for number, each in self._running.items():
            if each.missing:
                continue
            room -= sum(len(q.asked) for q in each.questions if isinstance(q, Apply))
            if room < 0 and ready:
                break
            ready.append(number)
        return ready

    def _led(self, pairs: Sequence[tuple[State, str]]) -> list[State | Refused]:
        try:
            return self.world.apply(pairs) if pairs else []
        except RunError as error:
            return [Refused("died", str(error))] * len(pairs)

    def _send(self, number: int, answers: list[Any] | None) -> None:
        """Gives a search its answers, and asks the engine for what it wants next."""
        running = self._running[number]
        try:
            questions = running.search.send(answers) if answers is not None else next(running.search)
        except StopIteration as end:
            del self._running[number]
            tree: Tree = end.value
            tree.model_s, tree.prover_s = running.model_s, running.prover_s
            if tree.end:
                tree.trim(self.world.trim(tree.end))
            self._done.append((number, tree))
            return
        running.questions, running.missing = questions, 0
        running.answers = [None] * len(questions)
        for n, question in enumerate(questions):
            requests = self.asking.requests(running.key, running.sampling, question)
            running.answers[n] = [None] * len(requests)
            for move, request in enumerate(requests):
                if request:
                    running.missing += 1
                    self._places[self.engine.submit(request)] = _Place(number, n, move)


def _shares(seconds: float, parts: Mapping[int, int]) -> list[tuple[int, float]]:
    """What of a time belongs to each, in proportion to their parts."""
    whole = sum(parts.values())
    return [(number, seconds * part / whole) for number, part in parts.items()] if whole else []
