"""A thread that steps an engine, and what waits for its answers.

    step     consumes     requests, in the order in which they came
             waits for    a request, when nothing is being answered
             unblocked by close

A client that goes away takes its answers with it; nobody else's tokens change, since each draw depends on the
seed and the place of its token alone.
"""

import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.engines.protocol import Engine
from posttrain.serving.wire import Question, RefusedError
from posttrain.types import Completion, Request

_POLL_S = 0.5
"""How long one poll of the engine may wait."""

News = Sequence[int] | Completion | RefusedError
"""Of one answer: its new tokens, or the whole, or why there is none."""
Tell = Callable[[int, News], None]
"""Takes news of the answer of this index, from any thread."""


@dataclass(eq=False)
class PendingAnswers:
    """The answers to one request, as they come."""

    question: Question
    requests: list[Request]
    tell: Tell
    streamed: Counter[int] = field(default_factory=Counter)
    """How many tokens of each were news."""
    gone: bool = False
    """Whether nobody waits for them any more."""

    def stream(self, n: int, tokens: Sequence[int]) -> None:
        """Tell what is new of these tokens: all over again, a long answer would fill the queue."""
        if fresh := list(tokens[self.streamed[n] :]):
            self.streamed[n] += len(fresh)
            self.tell(n, fresh)


class Stepper:
    """Steps an engine in a thread of its own while anything is asked of it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: queue.SimpleQueue[PendingAnswers | None] = queue.SimpleQueue()
        self._of: dict[int, tuple[PendingAnswers, int]] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Answers that are running."""
        return len(self._of)

    def ask(self, asked: PendingAnswers) -> None:
        """Has the requests answered, whose news come to `asked`."""
        self._inbox.put(asked)

    def close(self) -> None:
        """Ends the thread; who still waits is told so."""
        self._closed = True
        self._inbox.put(None)
        self._thread.join()
        self.engine.close()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._take(wait=not self.engine.busy)
                self._drop()
                if self.engine.busy:
                    self._step()
            why = "the server ends"
        except Exception as error:  # whoever waits must hear of it, and so must the next ones
            why = f"the engine failed: {error}"
        self._fail(why)

    def _fail(self, why: str) -> None:
        error = RefusedError(why, status=503)
        for asked, n in self._of.values():
            asked.tell(n, error)
        self._of.clear()
        while not self._closed or not self._inbox.empty():
            late = self._inbox.get()
            if late is not None:
                late.tell(0, error)

    def _take(self, wait: bool) -> None:
        while wait or not self._inbox.empty():
            asked = self._inbox.get()
            wait = False
            for n, request in enumerate(asked.requests if asked else ()):
                try:
                    self._of[self.engine.submit(request)] = (asked, n)  # type: ignore[assignment]
                except ValueError as error:  # it can never be served
                    asked.tell(n, RefusedError(str(error), field="messages"))  # type: ignore[union-attr]

    def _drop(self) -> None:
        """Forgets what clients that are gone have asked; the others go on behind their tokens."""
        if not any(asked.gone for asked, _ in self._of.values()):
            return
        before, self._of = self._of, {}
        for ticket, request in self.engine.withdraw():
            asked, n = before[ticket]
            if not asked.gone:
                self._of[self.engine.submit(request)] = (asked, n)

    def _step(self) -> None:
        for ticket, answer in self.engine.poll(_POLL_S):
            asked, n = self._of.pop(ticket)
            asked.tell(n, answer)
        stream(self.engine, {ticket: [each] for ticket, each in self._of.items()})


def stream(engine: Engine, waiting: Mapping[int, Sequence[tuple[PendingAnswers, int]]]) -> None:
    """Tells those who wait for an answer as a stream what has been drawn of it; waiting: by the ticket."""
    if not any(asked.question.stream for each in waiting.values() for asked, _ in each):
        return
    for ticket, request in engine.unanswered():
        for asked, n in waiting[ticket]:
            if asked.question.stream and request.begun is not None:
                asked.stream(n, request.begun.tokens)
