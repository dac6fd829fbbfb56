"""The OpenAI chat API over HTTP, on this machine, for concurrent clients."""

import asyncio
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from posttrain.base.chat import Chat
from posttrain.base.loopback import LoopbackServer
from posttrain.engines.protocol import Engine
from posttrain.errors import UserError
from posttrain.serving.answers import (
    AnswerBodies,
    StreamedText,
    before_stop,
    event,
    logprobs,
    prompt_logprobs,
    reason,
)
from posttrain.serving.feedback import FeedbackLog, chat_page
from posttrain.serving.speech import Speech
from posttrain.serving.stepper import News, PendingAnswers, Stepper, Tell
from posttrain.serving.wire import (
    ChatMessage,
    Question,
    RefusedError,
    TokenPrompt,
    answer_room,
    parse_feedback,
    parse_question,
    parse_text,
    parse_token_prompt,
    template_refusal,
)
from posttrain.types import Completion, Request, Sampling

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

    @property
    def models(self) -> Mapping[str, "Desk"]:
        """The desk of each model that is served, by its name."""
        return {self.name: self}

    def desk_of(self, model: Any) -> "Desk":
        """Return the desk that answers requests to this model; None is the first. Raise RefusedError."""
        return self

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
        self.desk_of(question.model)
        return self.ask_question(question, tell)

    def desk_of(self, model: Any) -> "ModelDesk":
        """Return this desk. Raise RefusedError for the name of another model."""
        if model not in (None, self.name):
            raise _unknown(model, self.models)
        return self

    def ask_question(self, question: Question, tell: Tell) -> PendingAnswers:
        """Return the pending answers to a parsed request."""
        pending = PendingAnswers(question, self.requests_of(question), tell)
        self.stepper.ask(pending)
        return pending

    def ask_tokens(self, query: TokenPrompt, tell: Tell) -> PendingAnswers:
        """Return the pending answers to a prompt of tokens: how likely these are, then what follows them."""
        prompt, requests = tuple(query.tokens), list[Request]()
        room = answer_room(prompt, self.context, "prompt", min(1, query.max_tokens))
        if query.prompt_logprobs is not None:
            forced, scoring = prompt[1:], Sampling(max_new_tokens=max(len(prompt) - 1, 1))
            if not forced:
                raise RefusedError("nothing precedes the only token of the prompt", field="prompt")
            requests.append(
                Request(
                    prompt=prompt[:1], forced=forced, sampling=scoring, alternatives=query.prompt_logprobs
                )
            )
        if query.max_tokens:
            sampling = Sampling(temperature=query.temperature, max_new_tokens=min(query.max_tokens, room))
            seed, task = (self.seed, f"request {next(self.numbers)}")
            if query.seed is not None:
                seed, task = query.seed, ""
            requests.append(Request(prompt=prompt, sampling=sampling, seed=seed, task=task))
        if not requests:
            raise RefusedError("it requests neither tokens nor prompt_logprobs", field="max_tokens")
        self._check_waiting(len(requests))
        # Nothing is streamed, and nothing else of a question is read.
        pending = PendingAnswers(
            Question.model_construct(stream=False), requests, tell, prompt_field="prompt"
        )
        self.stepper.ask(pending)
        return pending

    def _check_waiting(self, count: int) -> None:
        """Raise RefusedError if too many answers are pending already."""
        if self.stepper.waiting + count > MOST_WAITING:
            raise RefusedError("too many requests wait for an answer", status=503)

    def requests_of(self, question: Question) -> list[Request]:
        """Return the requests to the engine. Raise RefusedError for a prompt that leaves no room."""
        number = next(self.numbers)
        try:
            speech = self.speech
            if question.template_args:
                speech = speech.with_template_args(question.template_args)
            prompt = tuple(speech.prompt(question.messages, question.tools))
        except UserError as error:
            raise template_refusal(error) from None
        room = answer_room(prompt, self.context)
        self._check_waiting(question.count)
        seed, task = (self.seed, f"request {number}") if question.seed is None else (question.seed, "")
        first = Request(
            prompt=prompt,
            sampling=question.sampling(room),
            seed=seed,
            task=task,
            alternatives=question.top_logprobs,
        )
        return [replace(first, sample=n) for n in range(question.count)]


class ModelsDesk(Desk):
    """Pass each request to the desk of the model that it names, of one or more; the first is the default.

    feedback: takes what the reader of the chat page thinks of answers; None without a log.
    """

    def __init__(self, desks: Sequence[ModelDesk], feedback: FeedbackLog | None = None) -> None:
        super().__init__(desks[0].speech, desks[0].name)
        self._desks = {desk.name: desk for desk in desks}
        self._feedback = feedback
        self.routes = [
            Route("/", self._page),
            Route("/feedback", self._keep, methods=["POST"]),
            Route(f"{self.base}/completions", self._continue, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
        ]

    @property
    def models(self) -> Mapping[str, ModelDesk]:
        """The desk of each model, by its name."""
        return self._desks

    def close(self) -> None:
        for desk in self._desks.values():
            desk.close()

    def desk_of(self, model: Any) -> ModelDesk:
        """Return the desk of a model. Raise RefusedError for an unknown name."""
        model = self.name if model is None else model
        if isinstance(model, str) and model in self._desks:
            return self._desks[model]
        raise _unknown(model, self._desks)

    def ask(self, body: bytes, tell: Tell, tries: int, **place: str) -> PendingAnswers:
        """Return the pending answers of the model that the request names."""
        question = parse_question(body)
        return self.desk_of(question.model).ask_question(question, tell)

    async def _continue(self, request: HttpRequest) -> Response:
        """Continue a prompt of tokens, or say how likely its tokens are (`prompt_logprobs`)."""
        query = parse_token_prompt(await read_body(request))
        desk = self.desk_of(query.model)
        pending, news = await _pending_news(request, partial(desk.ask_tokens, query))
        completions = {n: answer async for n, answer in news if isinstance(answer, Completion)}
        answer = completions[len(pending.requests) - 1] if query.max_tokens else None
        likeliest = None
        if query.prompt_logprobs is not None:
            likeliest = prompt_logprobs(query.tokens, completions[0], desk.speech.chat)
        bodies = AnswerBodies(id=f"cmpl-{next(self.numbers)}", model=desk.name)
        return reply(bodies.continuation(answer, query.tokens, likeliest))

    async def _tokenize(self, request: HttpRequest) -> Response:
        """Return the tokens of a text, without special ones before it."""
        query = parse_text(await read_body(request))
        desk = self.desk_of(query.model)
        tokens = desk.speech.chat.spell(query.text)
        return reply({"count": len(tokens), "max_model_len": desk.context, "tokens": tokens})

    def _page(self, request: HttpRequest) -> Response:
        return HTMLResponse(chat_page([*self._desks], logs=self._feedback is not None))

    async def _keep(self, request: HttpRequest) -> Response:
        """Append a line of feedback to the log."""
        if self._feedback is None:
            raise RefusedError("no feedback is kept: start posttrain serve with --log FILE.jsonl", status=404)
        # A page of another site can send JSON only after a question that is refused here (CORS).
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise RefusedError("feedback is application/json", status=415)
        feedback = parse_feedback(await read_body(request))
        await run_in_threadpool(self._feedback.append, feedback)
        return reply({"kept": True})


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
        models = {
            name: {"id": name, "object": "model", "created": 0, "owned_by": "posttrain"}
            for name in self.desk.models
        }
        name = request.path_params.get("name")
        if name is not None and name not in models:
            raise HTTPException(404)
        return reply(models[name] if name else {"object": "list", "data": [*models.values()]})

    async def _answer(self, request: HttpRequest) -> Response:
        """Answer at once, or stream tokens as they are drawn."""
        tries = request.headers.get("x-stainless-retry-count", "")
        body, count = await read_body(request), int(tries) if tries.isdecimal() else 0
        pending, news = await _pending_news(
            request, lambda tell: self.desk.ask(body, tell, count, **request.path_params)
        )
        desk = self.desk.desk_of(pending.question.model)
        bodies = AnswerBodies(id=f"chatcmpl-{next(self.desk.numbers)}", model=desk.name)
        if pending.question.stream:
            first = await anext(news)  # what cannot be served is refused before a stream begins
            events = _events(desk.speech, pending, bodies, first, news)
            return StreamingResponse(events, media_type="text/event-stream")
        completions = {n: answer async for n, answer in news if isinstance(answer, Completion)}
        answers = [completions[n] for n in range(len(pending.requests))]
        tokens = partial(logprobs, chat=desk.speech.chat) if pending.question.logprobs else None
        prompt = len(pending.requests[0].prompt)
        read_answer = partial(_read, desk.speech, question=pending.question)
        return reply(bodies.complete(answers, prompt, read_answer, tokens))


def _read(speech: Speech, answer: Completion, question: Question) -> ChatMessage:
    text = before_stop(answer.text, question.stop)
    return speech.read(text, question.tools) if question.tools else ChatMessage("assistant", text)


async def _events(
    speech: Speech,
    pending: PendingAnswers,
    bodies: AnswerBodies,
    item: Item | None,
    news: AsyncGenerator[Item],
) -> AsyncIterator[bytes]:
    question, decode = pending.question, speech.chat.tokenizer.decode
    texts = [StreamedText(decode, pending.requests[0].sampling.stop) for _ in pending.requests]
    completions: list[Completion] = []
    yield b"".join(event(bodies.chunk(n, first=True)) for n in range(len(texts)))
    try:
        while item:
            n, part = item
            if isinstance(part, Completion):
                completions.append(part)
                message = _read(speech, part, question)
                if text := texts[n].rest(message.content):
                    yield event(bodies.chunk(n, text))
                if message.calls:
                    yield event(bodies.chunk(n, message=message))
                # Log-probabilities come with the end: a piece of text is not always complete tokens.
                logp = logprobs(part, speech.chat) if question.logprobs else None
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


def _unknown(model: Any, names: Iterable[str]) -> RefusedError:
    problem = f"there is no model {model!r} here, but {', '.join(map(repr, names))}"
    return RefusedError(problem, field="model", code="model_not_found", status=404)


def _gone() -> RefusedError:
    return RefusedError("the client has gone", status=499)


async def _pending_news(
    request: HttpRequest, ask: Callable[[Tell], PendingAnswers]
) -> tuple[PendingAnswers, AsyncGenerator[Item]]:
    """Return the pending answers to a request, and their news until they end; `ask` runs in a thread."""
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[tuple[int, News]] = asyncio.Queue()

    def tell(n: int, news: News) -> None:
        with suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(inbox.put_nowait, (n, news))

    async def watch() -> None:
        await request.receive()  # nothing follows a body but the end of its connection
        inbox.put_nowait((0, _gone()))

    pending = await run_in_threadpool(ask, tell)
    return pending, _news_until_end(pending, inbox, asyncio.create_task(watch()))


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
