"""One answer in the making."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from posttrain.base.spelling import REPLACEMENT
from posttrain.engines.native.draw import stream
from posttrain.types import Completion, Request

CHARACTER = 4
"""The most tokens, of a byte each, that one character takes."""
MARGIN = 16
"""Letters at the beginning of a part of a text that may be others than in the whole: a blank left out."""


@dataclass
class Sequence:
    """A request, what has been drawn for it, and where it sits in the cache."""

    ticket: int
    request: Request
    tokens: list[int] = field(default_factory=list)
    logp_gen: list[float] = field(default_factory=list)
    logp_policy: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    key: int = 0
    prompt: tuple[int, ...] = ()
    """What runs before its next token is drawn: the request's prompt, and what was drawn of it before."""

    def __post_init__(self) -> None:
        self.key = stream(self.request.seed, self.request.task, self.request.sample)
        self.prompt = self.request.prompt
        if begun := self.request.begun:
            self.tokens, self.version = list(begun.tokens), list(begun.version)
            self.logp_gen, self.logp_policy = list(begun.logp_gen), list(begun.logp_policy)
            self.prompt += tuple(begun.tokens)

    @property
    def longest(self) -> int:
        """The most tokens that it can come to, prompt included."""
        return len(self.request.prompt) + self.request.sampling.max_new_tokens

    def append(self, token: int, logp_gen: float, logp_policy: float, version: int) -> None:
        """Takes the next drawn token."""
        self.tokens.append(token)
        self.logp_gen.append(logp_gen)
        self.logp_policy.append(logp_policy)
        self.version.append(version)

    @property
    def excluded(self) -> dict[int, float]:
        """What excluded answers take of the probability of each next token, as shares of all.

        A draw from what is left of each token is one of the answers that are left, each as likely as it is
        among them. Source: incremental sampling without replacement, Shi et al. 2020, arXiv:2002.09067.
        """
        taken: dict[int, float] = {}
        n = len(self.tokens)
        for tokens, logp in self.request.excluded:
            if len(tokens) > n and list(tokens[:n]) == self.tokens:
                taken[tokens[n]] = taken.get(tokens[n], 0.0) + math.exp(sum(logp[n:]))
        return taken

    def rest(self) -> Request:
        """The request that goes on from here."""
        return replace(self.request, begun=self.completion("", "")) if self.tokens else self.request

    def ended(self, decode: Callable[[list[int]], str], stop_tokens: Collection[int]) -> Completion | None:
        """The answer, if its newest token ended it."""
        sampling, forced = self.request.sampling, self.request.forced
        if forced:
            over = len(self.tokens) == len(forced)
            return self.completion(decode(self.tokens), "length") if over else None
        if self.tokens[-1] in stop_tokens:
            return self.completion(decode(self.tokens[:-1]), "eos")
        if sampling.stop:
            end = tail(decode, self.tokens, max(map(len, sampling.stop)))
            if any(s in end for s in sampling.stop):
                text = decode(self.tokens)
                found = [text.index(s) + len(s) for s in sampling.stop if s in text]
                if found:
                    return self.completion(text[: min(found)], "stop")
        if len(self.tokens) >= sampling.max_new_tokens:
            return self.completion(decode(self.tokens), "length")
        return None

    def completion(self, text: str, stop: str) -> Completion:
        """The answer as far as it is drawn; what is appended later does not reach it."""
        return Completion(
            tokens=list(self.tokens),
            logp_gen=list(self.logp_gen),
            logp_policy=list(self.logp_policy),
            version=list(self.version),
            text=text,
            stop=stop,
        )


def new_sequence(ticket: int, request: Request, vocabulary: int, bound: int) -> Sequence:
    """The answer that is to be drawn.

    Raises ValueError for an empty prompt, a token outside the vocabulary, or a prompt that leaves no room for
    the answer in so many tokens.
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
    """The end of the text of these tokens: whatever of this length has a letter of the newest token is in it.

    What is decoded is as long as that, not as the answer.

    >>> tail(lambda tokens: "".join(map(str, tokens)), [7] * 1000 + [8], longest=2)
    '7777777777777777777778'
    """
    needed = len(decode(tokens[-CHARACTER:])) + longest + MARGIN
    n = CHARACTER + needed // 3  # a usual token has as many letters
    while n < len(tokens) and len(decode(tokens[-n:])) < needed:
        n *= 2
    # A part that begins in the middle of a character may be unreadable up to the end of its bytes.
    parts = (decode(tokens[-n - more :]) for more in range(CHARACTER))
    return next((text for text in parts if not text.startswith(REPLACEMENT)), decode(tokens[-n:]))
