"""Log-likelihoods of continuations of a context, for suites of choices and lm-evaluation-harness."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from posttrain.engines.protocol import Engine
from posttrain.types import Completion, Request, Sampling

Tokens = tuple[int, ...]
AT_ONCE = 512
"""Number of pairs submitted to the engine together, so that shared prefixes are computed once."""


class Continuation(NamedTuple):
    """Tokens of a context, and tokens that may follow it."""

    context: Tokens
    rest: Tokens


def encode_pair(encode: Callable[[str], Sequence[int]], context: str, continuation: str) -> Continuation:
    """Encode a context, and the continuation as the tokens of both together behind those of the context.

    Blanks at the end of the context belong to the continuation, which often begins with one. Source:
    lm-evaluation-harness, `TemplateLM._encode_pair`.

    >>> encode_pair(lambda text: [ord(c) for c in text], "a ", "b")
    Continuation(context=(97,), rest=(32, 98))
    """
    prefix, tokens = tuple(encode(context.rstrip())), tuple(encode(context + continuation))
    return Continuation(prefix, tokens[len(prefix) :])


def log_likelihoods(engine: Engine, pairs: Sequence[Continuation]) -> Iterator[float]:
    """Yield Σ log π(token | all before it) over each continuation, at temperature 1, in order.

    A context runs once for all its continuations. Raises ValueError for a pair that does not fit into the
    engine's context, or whose continuation is empty.
    """
    for start in range(0, len(pairs), AT_ONCE):
        part = pairs[start : start + AT_ONCE]
        if any(not pair.rest for pair in part):
            raise ValueError("a continuation has no token")
        requests = [
            Request(prompt=context, forced=rest, sampling=Sampling(max_new_tokens=len(rest)))
            for context, rest in part
        ]
        for answer in complete(engine, requests):
            yield sum(answer.logp_policy)


def complete(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Run the requests and return their completions in order."""
    tickets = [engine.submit(request) for request in requests]
    completions: dict[int, Completion] = {}
    while engine.busy:
        completions.update(engine.poll())
    return [completions[ticket] for ticket in tickets]
