"""How likely continuations of a context are: what suites of choices and the harness ask."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from posttrain.engines.protocol import Engine
from posttrain.types import Completion, Request, Sampling

Tokens = tuple[int, ...]
AT_ONCE = 512
"""Pairs that are handed to the engine together, so that what they share is computed once."""


class Continuation(NamedTuple):
    """Tokens that are given, and tokens that may follow them."""

    context: Tokens
    rest: Tokens


def paired(encode: Callable[[str], Sequence[int]], context: str, continuation: str) -> Continuation:
    """The tokens of both: what the whole has behind as many tokens as the context alone.

    Blanks at the end of the context belong to the continuation, which often begins with one. Source:
    lm-evaluation-harness, `TemplateLM._encode_pair`.

    >>> paired(lambda text: [ord(c) for c in text], "a ", "b")
    Pair(context=(97,), rest=(32, 98))
    """
    bare = context.rstrip()
    known, whole = tuple(encode(bare)), tuple(encode(context + continuation))
    return Continuation(known, whole[len(known) :])


def log_likelihoods(engine: Engine, pairs: Sequence[Continuation]) -> Iterator[float]:
    """Σ log π(token | all before it) over each continuation, at temperature 1, in the order of the pairs.

    A context runs once for all its continuations. ValueError for a pair that the engine has no room for, or
    whose continuation is empty.
    """
    for start in range(0, len(pairs), AT_ONCE):
        part = pairs[start : start + AT_ONCE]
        if any(not pair.rest for pair in part):
            raise ValueError("a continuation has no token of its own")
        asked = [
            Request(prompt=context, forced=rest, sampling=Sampling(max_new_tokens=len(rest)))
            for context, rest in part
        ]
        for answer in drawn(engine, asked):
            yield sum(answer.logp_policy)


def drawn(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """The engine's answers in the order of the requests."""
    tickets = [engine.submit(request) for request in requests]
    done: dict[int, Completion] = {}
    while engine.busy:
        done.update(engine.poll())
    return [done[ticket] for ticket in tickets]
