"""A request with the tokens drawn for it so far."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import numpy

from posttrain.base.spelling import REPLACEMENT
from posttrain.engines.native.draw import stream_key
from posttrain.types import Completion, Request, Routes

CHARACTER = 4
"""Largest number of tokens, of one byte each, that one character takes."""
MARGIN = 16
"""Letters at the start of a decoded part that may differ from the whole text, as a dropped blank."""


@dataclass
class Sequence:
    """A request, the tokens drawn for it, and the key of its draws."""

    ticket: int
    request: Request
    tokens: list[int] = field(default_factory=list)
    logp_gen: list[float] = field(default_factory=list)
    logp_policy: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)
    routes: Routes | None = None
    """Experts of the first tokens, prompt included, as `Completion.routes`."""
    _room: Routes | None = None
    """Memory of `routes`, for all tokens."""
    key: int = 0
    prompt: tuple[int, ...] = ()
    """Tokens that run before the next one is drawn: the prompt and the tokens drawn by an earlier request."""

    def __post_init__(self) -> None:
        self.key = stream_key(self.request.seed, self.request.task, self.request.sample)
        self.prompt = self.request.prompt
        if start := self.request.begun:
            self.tokens, self.version = list(start.tokens), list(start.version)
            self.logp_gen, self.logp_policy = list(start.logp_gen), list(start.logp_policy)
            self.alternatives = list(start.alternatives)
            self.routes = getattr(start, "routes", None)  # not in checkpoints of earlier versions
            self.prompt += tuple(start.tokens)

    @property
    def longest(self) -> int:
        """Largest number of tokens that it can have, the prompt included."""
        return len(self.request.prompt) + self.request.sampling.max_new_tokens

    @property
    def length(self) -> int:
        """Number of its tokens so far, the prompt included."""
        return len(self.request.prompt) + len(self.tokens)

    def note_routes(self, routes: Routes) -> None:
        """Append the experts of the tokens after those that have some."""
        start = 0 if self.routes is None else len(self.routes)
        if self._room is None:
            self._room = numpy.empty((self.longest, *routes.shape[1:]), routes.dtype)
            if self.routes is not None:
                self._room[:start] = self.routes
        self._room[start : start + len(routes)] = routes
        self.routes = self._room[: start + len(routes)]

    def append(self, token: int, logp_gen: float, logp_policy: float, version: int) -> None:
        self.tokens.append(token)
        self.logp_gen.append(logp_gen)
        self.logp_policy.append(logp_policy)
        self.version.append(version)

    @property
    def excluded(self) -> dict[int, float]:
        """Share of the probability of each next token that belongs to excluded answers.

        Drawing each token from the remaining probability draws one of the remaining answers, with its
        probability renormalised among them. Source: incremental sampling without replacement, Shi et al.
        2020, arXiv:2002.09067.
        """
        shares: dict[int, float] = {}
        n = len(self.tokens)
        for tokens, logp in self.request.excluded:
            if len(tokens) > n and list(tokens[:n]) == self.tokens:
                shares[tokens[n]] = shares.get(tokens[n], 0.0) + math.exp(sum(logp[n:]))
        return shares

    def continuation(self) -> Request:
        """Return the request that continues after the tokens drawn so far."""
        return replace(self.request, begun=self.completion("", "")) if self.tokens else self.request

    def check_end(
        self, decode: Callable[[list[int]], str], stop_tokens: Collection[int]
    ) -> Completion | None:
        """Return the completion if the newest token ends it, otherwise None."""
        sampling, forced = self.request.sampling, self.request.forced
        if forced:
            complete = len(self.tokens) == len(forced)
            return self.completion(decode(self.tokens), "length") if complete else None
        if self.tokens[-1] in stop_tokens:
            return self.completion(decode(self.tokens[:-1]), "eos")
        if sampling.stop:
            end = tail(decode, self.tokens, max(map(len, sampling.stop)))
            if any(s in end for s in sampling.stop):
                text = decode(self.tokens)
                if ends := [text.index(s) + len(s) for s in sampling.stop if s in text]:
                    return self.completion(text[: min(ends)], "stop")
        if len(self.tokens) >= sampling.max_new_tokens:
            return self.completion(decode(self.tokens), "length")
        return None

    def completion(self, text: str, stop: str) -> Completion:
        """Return a copy of the tokens drawn so far as a completion."""
        return Completion(
            tokens=list(self.tokens),
            logp_gen=list(self.logp_gen),
            logp_policy=list(self.logp_policy),
            version=list(self.version),
            text=text,
            stop=stop,
            alternatives=list(self.alternatives),
            routes=self.routes,
        )


def new_sequence(ticket: int, request: Request, vocabulary: int, bound: int) -> Sequence:
    """Return the sequence of a request.

    Raise ValueError for an empty prompt, a token outside the vocabulary, or a prompt and answer of more than
    `bound` tokens together.
    """
    if not request.prompt:
        raise ValueError("an empty prompt has no token to continue from")
    if not 0 <= min(request.prompt) <= max(request.prompt) < vocabulary:
        raise ValueError(f"the prompt has a token outside the vocabulary of {vocabulary}")
    sequence = Sequence(ticket, request)
    if sequence.longest > bound:
        raise ValueError(
            f"a prompt of {len(request.prompt)} tokens and up to {request.sampling.max_new_tokens} "
            f"new ones exceed the {bound} that fit"
        )
    return sequence


def tail(decode: Callable[[list[int]], str], tokens: list[int], longest: int) -> str:
    """Return the end of the decoded text, without decoding all tokens.

    It contains every substring of at most `longest` letters that includes a letter of the newest token.

    >>> tail(lambda tokens: "".join(map(str, tokens)), [7] * 1000 + [8], longest=2)
    '7777777777777777777778'
    """
    needed = len(decode(tokens[-CHARACTER:])) + longest + MARGIN
    n = CHARACTER + needed // 3  # a usual token has as many letters
    while n < len(tokens) and len(decode(tokens[-n:])) < needed:
        n *= 2
    # A part that starts inside a character may be unreadable up to that character's end.
    parts = (decode(tokens[-n - more :]) for more in range(CHARACTER))
    return next((text for text in parts if not text.startswith(REPLACEMENT)), decode(tokens[-n:]))
