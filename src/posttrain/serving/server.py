"""Answers over HTTP, on this machine, to as many clients at once as wait for them."""

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
from posttrain.serving.answers import Growing, Spoken, before_stop, event, logprobs, reason
from posttrain.serving.speech import Speech
from posttrain.serving.stepper import News, PendingAnswers, Stepper, Tell
from posttrain.serving.wire import ChatMessage, Question, RefusedError, question, room_behind, unshown
from posttrain.types import Completion, Request

MOST_BYTES = 8 << 20
MOST_WAITING = 1024
"""Answers that are asked for and not given, of all clients."""

Item = tuple[int, Sequence[int] | Completion]
"""News of the answer of this index."""


class Desk(ABC):
    """Where requests are taken that came over the wire."""

    base: ClassVar[str] = "/v1"
    """Path of the API."""
    routes: Sequence[BaseRoute] = ()
    """What is served in addition to the API."""

    def __init__(self, speech: Speech, name: str) -> None:
        self.speech, self.name = speech, name
        self.numbers = itertools.count()
        """Of requests; may be advanced in any thread."""

    def close(self) -> None:  # noqa: B027 - a desk may have nothing to end
        """End what it has begun."""

    @abstractmethod
    def ask(self, body: bytes, tell: Tell, tries: int, **place: str) -> PendingAnswers:
        """Return the answers that will come. Called in a thread of its own. Raises RefusedError.

        tries: how often the client has asked the same before; place: the parameters in `base`.
        """


class ModelDesk(Desk):
    """Asks an engine that steps in a thread of its own; each request is a conversation by itself."""

    def __init__(self, engine: Engine, chat: Chat, *, name: str, context: int, seed: int = 0) -> None:
        super().__init__(Speech.of(chat), name)
        self.context, self.seed = context, seed
        self.stepper = Stepper(engine)

    def close(self) -> None:
        """End the engine; clients that still wait are told so."""
        self.stepper.close()

    def ask(self, body: bytes, tell: Tell, tries: int, **place: str) -> PendingAnswers:
        """Return the answers to a request."""
        asked = question(body)
        if asked.model not in (None, self.name):
            what = f"there is no model {asked.model!r} here, but {self.name!r}"
            raise RefusedError(what, field="model", code="model_not_found", status=404)
        asks = PendingAnswers(asked, self.requests_of(asked), tell)
        self.stepper.ask(asks)
        return asks

    def requests_of(self, asked: Question) -> list[Request]:
        """Return what the engine is asked. Raises RefusedError for a prompt that leaves no room."""
        number = next(self.numbers)
        try:
            prompt = tuple(self.speech.prompt(asked.messages, asked.tools))
        except UserError as error:
            raise unshown(error) from None
        room = room_behind(prompt, self.context)
        if self.stepper.waiting + asked.count > MOST_WAITING:
            raise RefusedError("too many requests wait for an answer", status=503)
        one = Request(prompt=prompt, sampling=asked.sampling(room), seed=self.seed, task=f"request {number}")
        if asked.seed is not None:
            one = replace(one, seed=asked.seed, task="")
        return [replace(one, sample=n) for n in range(asked.count)]


class ChatServer(LoopbackServer):
    """Serves a desk over the OpenAI chat API until it is closed; `address` is the base URL for a client."""

    def __init__(self, desk: Desk, port: int = 0) -> None:
        """Open the port, or a free one for 0. Raises UserError for a port that is not available."""
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
        """Answer at once, or as tokens are drawn."""
        tries = request.headers.get("x-stainless-retry-count", "")
        body, loop = await read_body(request), asyncio.get_running_loop()
        inbox: asyncio.Queue[tuple[int, News]] = asyncio.Queue()

        def tell(n: int, news: News) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(inbox.put_nowait, (n, news))

        async def watch() -> None:
            await request.receive()  # nothing follows a body but the end of its connection
            inbox.put_nowait((0, _gone()))

        waits = await run_in_threadpool(
            self.desk.ask, body, tell, int(tries) if tries.isdecimal() else 0, **request.path_params
        )
        spoken = Spoken(id=f"chatcmpl-{next(self.desk.numbers)}", model=self.desk.name)
        news = _take(waits, inbox, asyncio.create_task(watch()))
        if waits.question.stream:
            first = await anext(news)  # what cannot be served is refused before a stream begins
            return StreamingResponse(self._events(waits, spoken, first, news), media_type="text/event-stream")
        done = {n: said async for n, said in news if isinstance(said, Completion)}
        answers = [done[n] for n in range(len(waits.requests))]
        tokens = self._logprobs if waits.question.logprobs else None
        prompt = len(waits.requests[0].prompt)
        return reply(spoken.whole(answers, prompt, lambda answer: self._read(answer, waits), tokens))

    def _read(self, answer: Completion, waits: PendingAnswers) -> ChatMessage:
        text = before_stop(answer.text, waits.question.stop)
        if waits.question.tools:
            return self.desk.speech.read(text, waits.question.tools)
        return ChatMessage("assistant", text)

    def _logprobs(self, answer: Completion) -> dict[str, Any]:
        return logprobs(self.desk.speech.chat.pieces(answer.tokens), answer.logp_policy)

    async def _events(
        self, waits: PendingAnswers, spoken: Spoken, item: Item | None, news: AsyncGenerator[Item]
    ) -> AsyncIterator[bytes]:
        asked, decode = waits.question, self.desk.speech.chat.tokenizer.decode
        growing = [Growing(decode, waits.requests[0].sampling.stop) for _ in waits.requests]
        ended: list[Completion] = []
        yield b"".join(event(spoken.chunk(n, first=True)) for n in range(len(growing)))
        try:
            while item:
                n, told = item
                if isinstance(told, Completion):
                    ended.append(told)
                    said = self._read(told, waits)
                    if text := growing[n].rest(said.content):
                        yield event(spoken.chunk(n, text))
                    if said.calls:
                        yield event(spoken.chunk(n, said=said))
                    # Log-probabilities come with the end: a piece of text is not always whole tokens.
                    logp = self._logprobs(told) if asked.logprobs else None
                    yield event(spoken.chunk(n, "", reason(told, said), logp))
                # What calls a tool is no text, and only its end shows what it is.
                elif not asked.tools and (text := growing[n].more(told)):
                    yield event(spoken.chunk(n, text))
                item = await anext(news, None)
            if asked.usage:
                yield event(spoken.cost(len(waits.requests[0].prompt), ended))
            yield b"data: [DONE]\n\n"
        except RefusedError as error:
            yield event(error.body())
        finally:
            await news.aclose()


def _gone() -> RefusedError:
    return RefusedError("the client has gone", status=499)


async def _take(
    waits: PendingAnswers, inbox: "asyncio.Queue[tuple[int, News]]", watch: "asyncio.Task[None]"
) -> AsyncGenerator[Item]:
    """Yield what comes of the answers, until all have ended or the client has gone."""
    left = len(waits.requests)
    try:
        while left:
            n, news = await inbox.get()
            await asyncio.sleep(0)  # a full inbox would else be sent on before a lost connection is noticed
            if isinstance(news, RefusedError):
                raise news
            left -= isinstance(news, Completion)
            yield n, news
    finally:
        waits.gone = left > 0
        watch.cancel()


async def read_body(request: HttpRequest) -> bytes:
    """Read the body of a request. Raises RefusedError for one that is too long."""
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
    """Say what is wrong as the API says it, and read nothing more of the connection."""
    assert isinstance(error, HTTPException)
    headers = {**(error.headers or {}), "Connection": "close"}
    if not isinstance(error, RefusedError):
        problems = {404: "there is nothing here", 405: f"{request.method} is not served here"}
        problem = problems.get(error.status_code, error.detail)
        error = RefusedError(problem, status=error.status_code)
    return reply(error.body(), error.status_code, headers)
