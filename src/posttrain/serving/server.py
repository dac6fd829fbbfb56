"""The OpenAI chat API over HTTP, on this machine, for concurrent clients."""

import asyncio
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from posttrain.base.chat import Chat
from posttrain.base.loopback import LoopbackServer
from posttrain.engines.protocol import Engine
from posttrain.errors import UserError
from posttrain.serving.answers import AnswerBodies, StreamedText, before_stop, event, logprobs, reason
from posttrain.serving.speech import Speech
from posttrain.serving.stepper import News, PendingAnswers, Stepper, Tell
from posttrain.serving.wire import (
    ChatMessage,
    Question,
    RefusedError,
    answer_room,
    parse_question,
    template_refusal,
)
from posttrain.types import Completion, Request

MOST_BYTES = 8 << 20
MOST_WAITING = 1024
"""Largest number of pending answers of all clients together."""

Item = tuple[int, Sequence[int] | Completion]
"""News of the answer with this index."""


class Desk(ABC):
    """Take requests that arrive over HTTP."""

    base: ClassVar[str] = "/v1"
    """Path under which the API is served."""
    routes: Sequence[BaseRoute] = ()
    """What is served in addition to the API."""

    def __init__(self, speech: Speech, name: str) -> None:
        self.speech, self.name = speech, name
        self.numbers = itertools.count()
        """Numbers of requests; may be advanced in any thread."""

    def close(self) -> None:  # noqa: B027 - a desk may have nothing to end
        """End what the desk has started."""

    @abstractmethod
    def ask(self, body: bytes, tell: Tell, tries: int, **place: str) -> PendingAnswers:
        """Return the pending answers to a request. Called in a thread of its own. Raise RefusedError.

        tries: number of earlier tries of the same request; place: the parameters in `base`.
        """


class ModelDesk(Desk):
    """Pass requests to an engine in a thread of its own; each request is a separate conversation."""

    def __init__(self, engine: Engine, chat: Chat, *, name: str, context: int, seed: int = 0) -> None:
        super().__init__(Speech.of(chat), name)
        self.context, self.seed = context, seed
        self.stepper = Stepper(engine)

    def close(self) -> None:
        """End the engine; pending answers get an error."""
        self.stepper.close()

    def ask(self, body: bytes, tell: Tell, tries: int, **place: str) -> PendingAnswers:
        """Return the pending answers to a request."""
        question = parse_question(body)
        if question.model not in (None, self.name):
            problem = f"there is no model {question.model!r} here, but {self.name!r}"
            raise RefusedError(problem, field="model", code="model_not_found", status=404)
        pending = PendingAnswers(question, self.requests_of(question), tell)
        self.stepper.ask(pending)
        return pending

    def requests_of(self, question: Question) -> list[Request]:
        """Return the requests to the engine. Raise RefusedError for a prompt that leaves no room."""
        number = next(self.numbers)
        try:
            prompt = tuple(self.speech.prompt(question.messages, question.tools))
        except UserError as error:
            raise template_refusal(error) from None
        room = answer_room(prompt, self.context)
        if self.stepper.waiting + question.count > MOST_WAITING:
            raise RefusedError("too many requests wait for an answer", status=503)
        seed, task = (self.seed, f"request {number}") if question.seed is None else (question.seed, "")
        first = Request(prompt=prompt, sampling=question.sampling(room), seed=seed, task=task)
        return [replace(first, sample=n) for n in range(question.count)]


class ChatServer(LoopbackServer):
    """Serve a desk over the OpenAI chat API until it is closed; `address` is the base URL for a client."""

    def __init__(self, desk: Desk, port: int = 0) -> None:
        """Open the port, or a free one for 0. Raise UserError for a port that is not available."""
        self.desk = desk
        routes = [
            Route("/health", self._health),
            Route(f"{desk.base}/models", self._models),
            Route(f"{desk.base}/models/{{name:path}}", self._models),
            Route(f"{desk.base}/chat/completions", self._answer, methods=["POST"]),
            *desk.routes,
        ]
        super().__init__(routes, port, {HTTPException: _refuse})

    @property
    def address(self) -> str:
        return f"{super().address}v1"

    async def _health(self, request: HttpRequest) -> Response:
        return reply({"status": "ok"})

    async def _models(self, request: HttpRequest) -> Response:
        model = {"id": self.desk.name, "object": "model", "created": 0, "owned_by": "posttrain"}
        name = request.path_params.get("name")
        if name not in (None, self.desk.name):
            raise HTTPException(404)
        return reply(model if name else {"object": "list", "data": [model]})

    async def _answer(self, request: HttpRequest) -> Response:
        """Answer at once, or stream tokens as they are drawn."""
        tries = request.headers.get("x-stainless-retry-count", "")
        body, loop = await read_body(request), asyncio.get_running_loop()
        inbox: asyncio.Queue[tuple[int, News]] = asyncio.Queue()

        def tell(n: int, news: News) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(inbox.put_nowait, (n, news))

        async def watch() -> None:
            await request.receive()  # nothing follows a body but the end of its connection
            inbox.put_nowait((0, _gone()))

        pending = await run_in_threadpool(
            self.desk.ask, body, tell, int(tries) if tries.isdecimal() else 0, **request.path_params
        )
        bodies = AnswerBodies(id=f"chatcmpl-{next(self.desk.numbers)}", model=self.desk.name)
        news = _news_until_end(pending, inbox, asyncio.create_task(watch()))
        if pending.question.stream:
            first = await anext(news)  # what cannot be served is refused before a stream begins
            events = self._events(pending, bodies, first, news)
            return StreamingResponse(events, media_type="text/event-stream")
        completions = {n: answer async for n, answer in news if isinstance(answer, Completion)}
        answers = [completions[n] for n in range(len(pending.requests))]
        tokens = self._logprobs if pending.question.logprobs else None
        prompt = len(pending.requests[0].prompt)
        return reply(bodies.complete(answers, prompt, lambda answer: self._read(answer, pending), tokens))

    def _read(self, answer: Completion, pending: PendingAnswers) -> ChatMessage:
        text = before_stop(answer.text, pending.question.stop)
        if pending.question.tools:
            return self.desk.speech.read(text, pending.question.tools)
        return ChatMessage("assistant", text)

    def _logprobs(self, answer: Completion) -> dict[str, Any]:
        return logprobs(self.desk.speech.chat.pieces(answer.tokens), answer.logp_policy)

    async def _events(
        self, pending: PendingAnswers, bodies: AnswerBodies, item: Item | None, news: AsyncGenerator[Item]
    ) -> AsyncIterator[bytes]:
        question, decode = pending.question, self.desk.speech.chat.tokenizer.decode
        texts = [StreamedText(decode, pending.requests[0].sampling.stop) for _ in pending.requests]
        completions: list[Completion] = []
        yield b"".join(event(bodies.chunk(n, first=True)) for n in range(len(texts)))
        try:
            while item:
                n, part = item
                if isinstance(part, Completion):
                    completions.append(part)
                    message = self._read(part, pending)
                    if text := texts[n].rest(message.content):
                        yield event(bodies.chunk(n, text))
                    if message.calls:
                        yield event(bodies.chunk(n, message=message))
                    # Log-probabilities come with the end: a piece of text is not always complete tokens.
                    logp = self._logprobs(part) if question.logprobs else None
                    yield event(bodies.chunk(n, "", reason(part, message), logp))
                # Only the end of an answer shows whether it is text or calls a tool.
                elif not question.tools and (text := texts[n].more(part)):
                    yield event(bodies.chunk(n, text))
                item = await anext(news, None)
            if question.usage:
                yield event(bodies.usage_chunk(len(pending.requests[0].prompt), completions))
            yield b"data: [DONE]\n\n"
        except RefusedError as error:
            yield event(error.body())
        finally:
            await news.aclose()


def _gone() -> RefusedError:
    return RefusedError("the client has gone", status=499)


async def _news_until_end(
    pending: PendingAnswers, inbox: "asyncio.Queue[tuple[int, News]]", watch: "asyncio.Task[None]"
) -> AsyncGenerator[Item]:
    """Yield news of the answers until all have ended or the client has disconnected."""
    remaining = len(pending.requests)
    try:
        while remaining:
            n, news = await inbox.get()
            await asyncio.sleep(0)  # otherwise a full inbox would be sent before a lost connection is noticed
            if isinstance(news, RefusedError):
                raise news
            remaining -= isinstance(news, Completion)
            yield n, news
    finally:
        pending.gone = remaining > 0
        watch.cancel()


async def read_body(request: HttpRequest) -> bytes:
    """Read the body of a request. Raise RefusedError for one that is too long."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                raise RefusedError(f"a body has at most {MOST_BYTES} bytes", status=413)
    except ClientDisconnect:
        raise _gone() from None
    return bytes(body)


def reply(body: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with JSON in ASCII, which holds half a surrogate pair, too."""
    return Response(json.dumps(body), status, headers, "application/json")


async def _refuse(request: HttpRequest, error: Exception) -> Response:
    """Send an error in the form of the API, and read nothing more from the connection."""
    assert isinstance(error, HTTPException)
    headers = {**(error.headers or {}), "Connection": "close"}
    if not isinstance(error, RefusedError):
        problems = {404: "there is nothing here", 405: f"{request.method} is not served here"}
        problem = problems.get(error.status_code, error.detail)
        error = RefusedError(problem, status=error.status_code)
    return reply(error.body(), error.status_code, headers)
