"""Many searches at once over one engine: each continues as soon as its own questions are answered.

step   consumes       moves that the engine has drawn
       waits for      Transitions, which answer all questions since the last step in one batch
       unblocked by   nothing: while one search waits for its moves, the engine draws those of the others
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

from posttrain.base.chat import Chat
from posttrain.engines.protocol import Engine
from posttrain.search.engine_requests import EngineQuestions, as_move, values_of
from posttrain.search.protocol import Apply, Budget, Question, Refused, State, StateValue, Transitions
from posttrain.search.tree import Search, Tree
from posttrain.types import Completion, Request, RunError, Sampling, Task, UserError

_MOVES_A_STEP = 128
StartSearch = Callable[[State, Budget], Search]
ScoreStates = Callable[[Sequence[State]], Sequence[float]]


@dataclass(eq=False)
class _Running:
    """A search and its pending questions."""

    key: str
    """Identifies the search in the seeds of its draws."""
    generator: Search
    sampling: Sampling
    questions: tuple[Question, ...] = ()
    answers: list[Any] = field(default_factory=list)
    missing: int = 0
    model_s: float = 0.0
    prover_s: float = 0.0


class _Place(NamedTuple):
    """Where a draw belongs: the numbers of its search, its question and its move."""

    number: int
    question: int
    move: int


class SearchDriver:
    """Run searches concurrently. The draws in a state depend on the seed, the task and the state alone.

    context: largest number of tokens of a prompt with its move; sketch_tokens: of a sketch. score: values
    of states; without it the policy predicts them.
    """

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        transitions: Transitions,
        *,
        context: int,
        seed: int = 0,
        score: ScoreStates | None = None,
        sketch_tokens: int = 256,
    ) -> None:
        self.engine, self.transitions = engine, transitions
        self.score = score
        self.questions = EngineQuestions(chat, context, seed, sketch_tokens, by_policy=score is None)
        self.steps = 0
        """Number of steps of the engine."""
        self._running: dict[int, _Running] = {}
        self._places: dict[int, _Place] = {}
        self._parked: list[tuple[_Place, Request]] = []
        self._count = 0
        self._done: list[tuple[int, Tree | Refused]] = []

    @property
    def busy(self) -> bool:
        """Return True if a search is running or a tree was not collected."""
        return bool(self._running or self._done)

    def begin(self, task: Task, make: StartSearch, budget: Budget, sampling: Sampling, key: str = "") -> int:
        """Start a search about this task and return its number; key: of its draws, or the task's id."""
        number, self._count = self._count, self._count + 1
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
        """Return the initial state of a task; an error ends this task's search alone."""
        try:
            return self.transitions.begin([task])[0]
        except UserError as error:
            return Refused("bad_task", str(error))
        except RunError as error:
            return Refused("died", str(error))

    def step(self) -> list[tuple[int, Tree | Refused]]:
        """Take one more step of the engine and return the searches that ended, with their numbers."""
        if self.engine.busy:
            self.steps += 1
            start = time.monotonic()
            answers = self.engine.poll()
            counts = {search: search.missing for search in self._running.values()}
            for search, share in _shares(time.monotonic() - start, counts):
                search.model_s += share
            self.receive(answers)
        else:
            self._advance()
        trees, self._done = self._done, []
        return trees

    def receive(self, answers: Sequence[tuple[int, Completion]]) -> None:
        """Pass completions of the engine to the searches, as moves."""
        for ticket, answer in answers:
            place = self._places.pop(ticket)
            running = self._running[place.number]
            question = running.questions[place.question]
            running.answers[place.question][place.move] = as_move(answer, question)
            running.missing -= 1
        self._advance()

    def pause(self) -> None:
        """Withdraw all pending requests from the engine, with their tokens so far."""
        for ticket, request in self.engine.withdraw():
            self._parked.append((self._places.pop(ticket), request))

    def unpause(self) -> None:
        """Submit the withdrawn requests again."""
        parked, self._parked = self._parked, []
        for place, request in sorted(parked, key=lambda pair: pair[0]):
            self._places[self.engine.submit(request)] = place

    # ------------------------------------------------------------------ questions

    def _advance(self) -> None:
        """Send searches their answers and apply moves, until all searches wait for the engine or are over.

        At most _MOVES_A_STEP moves are applied in a step; the others wait for the next one, so that a sampler
        can report in between that it is alive.
        """
        applied = 0
        while applied < _MOVES_A_STEP and (ready := self._ready(_MOVES_A_STEP - applied)):
            searches = [self._running[number] for number in ready]
            questions = [(search, n, q) for search in searches for n, q in enumerate(search.questions)]
            applies = [(search, n, q.asked) for search, n, q in questions if isinstance(q, Apply)]
            pairs = [pair for _, _, moves in applies for pair in moves]
            applied += len(pairs)
            start = time.monotonic()
            states = iter(self._apply(pairs))
            counts = Counter(search for search, _, moves in applies for _ in moves)
            for search, share in _shares(time.monotonic() - start, counts):
                search.prover_s += share
            for search, n, moves in applies:
                search.answers[n] = list(islice(states, len(moves)))
            for search, n, q in questions:
                if isinstance(q, StateValue):
                    scores = self.score(q.states) if self.score else values_of(search.answers[n])
                    search.answers[n] = list(scores)
            for number in ready:
                self._send(number, self._running[number].answers)

    def _ready(self, room: int) -> list[int]:
        """Return the searches without pending moves, as far as the moves that they want applied fit."""
        ready: list[int] = []
        for number, running in self._running.items():
            if running.missing:
                continue
            room -= sum(len(q.asked) for q in running.questions if isinstance(q, Apply))
            if room < 0 and ready:
                break
            ready.append(number)
        return ready

    def _apply(self, pairs: Sequence[tuple[State, str]]) -> list[State | Refused]:
        try:
            return self.transitions.apply(pairs) if pairs else []
        except RunError as error:
            return [Refused("died", str(error))] * len(pairs)

    def _send(self, number: int, answers: list[Any] | None) -> None:
        """Send a search its answers, and submit its next questions to the engine."""
        running = self._running[number]
        try:
            questions = running.generator.send(answers) if answers is not None else next(running.generator)
        except StopIteration as end:
            del self._running[number]
            tree: Tree = end.value
            tree.model_s, tree.prover_s = running.model_s, running.prover_s
            if tree.end:
                tree.trim(self.transitions.trim(tree.end))
            self._done.append((number, tree))
            return
        running.questions, running.missing = questions, 0
        running.answers = [None] * len(questions)
        for n, question in enumerate(questions):
            requests = self.questions.requests(running.key, running.sampling, question)
            running.answers[n] = [None] * len(requests)
            for move, request in enumerate(requests):
                if request:
                    running.missing += 1
                    self._places[self.engine.submit(request)] = _Place(number, n, move)


def _shares(seconds: float, counts: Mapping[_Running, int]) -> list[tuple[_Running, float]]:
    """Split a time among searches in proportion to these counts."""
    total = sum(counts.values())
    return [(search, seconds * count / total) for search, count in counts.items()] if total else []
