"""A thread that steps an engine, and the answers that wait for it.

    step     consumes     requests, in the order in which they came
             waits for    a request, when no answer is pending
             unblocked by close

A client that disconnects takes its answers with it. The tokens of other clients do not change, since each
draw depends only on the seed and the position of its token.
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
"""Seconds that one poll of the engine may wait."""

News = Sequence[int] | Completion | RefusedError
"""Of one answer: its new tokens, the completion, or the error in its place."""
Tell = Callable[[int, News], None]
"""Takes news of the answer with this index, from any thread."""


@dataclass(eq=False)
class PendingAnswers:
    """The answers to one request, while they are drawn."""

    question: Question
    requests: list[Request]
    tell: Tell
    streamed: Counter[int] = field(default_factory=Counter)
    """Number of tokens of each answer that were streamed."""
    gone: bool = False
    """Whether the client has disconnected."""
    prompt_field: str = "messages"
    """Field of the request that has the prompt."""

    def stream(self, n: int, tokens: Sequence[int]) -> None:
        """Pass on the new ones of these tokens: repeated in full, a long answer would fill the queue."""
        if fresh := list(tokens[self.streamed[n] :]):
            self.streamed[n] += len(fresh)
            self.tell(n, fresh)


class Stepper:
    """Step an engine in a thread of its own while requests are pending."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: queue.SimpleQueue[PendingAnswers | None] = queue.SimpleQueue()
        self._pending: dict[int, tuple[PendingAnswers, int]] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of answers that are pending."""
        return len(self._pending)

    def ask(self, pending: PendingAnswers) -> None:
        """Submit the requests; their news go to `pending`."""
        self._inbox.put(pending)

    def close(self) -> None:
        """End the thread; pending answers get an error."""
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
        except Exception as error:  # pending and later requests get this error
            why = f"the engine failed: {error}"
        self._fail(why)

    def _fail(self, why: str) -> None:
        error = RefusedError(why, status=503)
        for pending, n in self._pending.values():
            pending.tell(n, error)
        self._pending.clear()
        while not self._closed or not self._inbox.empty():
            late = self._inbox.get()
            if late is not None:
                late.tell(0, error)

    def _take(self, wait: bool) -> None:
        while wait or not self._inbox.empty():
            pending = self._inbox.get()
            wait = False
            if pending is None:
                continue
            for n, request in enumerate(pending.requests):
                try:
                    self._pending[self.engine.submit(request)] = (pending, n)
                except ValueError as error:  # it can never be served
                    pending.tell(n, RefusedError(str(error), field=pending.prompt_field))

    def _drop(self) -> None:
        """Forget the requests of disconnected clients; the others continue after their tokens."""
        if not any(pending.gone for pending, _ in self._pending.values()):
            return
        before, self._pending = self._pending, {}
        for ticket, request in self.engine.withdraw():
            pending, n = before[ticket]
            if not pending.gone:
                self._pending[self.engine.submit(request)] = (pending, n)

    def _step(self) -> None:
        for ticket, answer in self.engine.poll(_POLL_S):
            pending, n = self._pending.pop(ticket)
            pending.tell(n, answer)
        stream(self.engine, {ticket: [entry] for ticket, entry in self._pending.items()})


def stream(engine: Engine, waiting: Mapping[int, Sequence[tuple[PendingAnswers, int]]]) -> None:
    """Stream the tokens that were drawn since the last call; waiting: by ticket."""
    if not any(pending.question.stream for answers in waiting.values() for pending, _ in answers):
        return
    for ticket, request in engine.unanswered():
        for pending, n in waiting[ticket]:
            if pending.question.stream and request.begun is not None:
                pending.stream(n, request.begun.tokens)
