"""A teacher behind a server: request its likeliest tokens at each trained token over HTTP.

The server is one of vLLM or `posttrain serve`: POST /v1/completions takes token ids, and returns
`prompt_logprobs`; POST /tokenize returns the ids of a text, by which its tokenizer is compared.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int

from posttrain.errors import RESUME
from posttrain.learner.reference import Reference
from posttrain.types import Batch, RunError, UserError
from posttrain.verifiers.judge.connection import HttpConnection
from posttrain.verifiers.judge.replies import RequestError

PROBE = "The quick brown fox, 3.14 × 2 = 6.28\n\tif x != y: naïve 你好 🙂"
"""A text that tokenizers divide differently: digits, blanks, accents and signs of several bytes."""
CONCURRENT = 16
"""Requests that are sent at once; servers run them in one batch."""
CHECK_S = 60.0
"""Seconds within which the server must answer a check."""
T = TypeVar("T")
Likeliest = tuple[Int[torch.Tensor, "N k"], Float[torch.Tensor, "N k"]]
"""The likeliest tokens after each of N beginnings, and their log-probabilities."""


@dataclass(frozen=True)
class TeacherServer:
    """The server that [reference] names, with a model that reads the policy's tokens."""

    settings: Reference
    vocabulary: int
    """Number of the policy's tokens."""

    def check(self, tokenize: Callable[[str], list[int]], longest: int) -> None:
        """Raise UserError unless the server can teach this policy on rows of up to `longest` tokens.

        tokenize: makes the policy's tokens of a text, without special ones before it.
        """
        url, key = self.settings.url, self.settings.api_key_env
        if key and not os.environ.get(key):
            problem = f"the environment variable {key} is not set, and the key of {url} is read from it"
            raise UserError("reference.api_key_env", problem, f"export {key}=...")
        answer = self._checked("/tokenize", {"prompt": PROBE, "add_special_tokens": False}, _tokenized)
        (tokens, context), expected = answer, tokenize(PROBE)
        if tokens != expected:
            pairs = zip([*tokens, None], [*expected, None], strict=False)
            place, pair = next((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
            problem = f"the model at {url} has another tokenizer: token {place} of a text is {pair[0]} there"
            fix = "serve a model with the policy's tokenizer"
            raise UserError("reference.url", f"{problem}, and {pair[1]} here", fix)
        if longest >= context:  # a server draws a token more
            problem = f"the server at {url} reads up to {context} tokens, and a row has up to {longest}"
            raise UserError("reference.url", problem, f"start it with --max-model-len {longest + 1}")
        self._checked("/v1/completions", self._body(expected), self._likeliest)

    def add(self, batch: Batch) -> Batch:
        """Return the batch with the likeliest tokens at each trained token.

        Raises RunError if a request fails in the end.
        """
        shape = (*batch.tokens.shape, self.settings.top_k)
        top, logp = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=batch.logp_gen.dtype)
        last = [int(mask.nonzero().max()) if mask.any() else 0 for mask in batch.mask]
        rows = [n for n, end in enumerate(last) if end]
        bodies = [self._body(batch.tokens[n, : last[n] + 1].tolist()) for n in rows]
        answers = self._post("/v1/completions", bodies, self._likeliest, self.settings.deadline_s)
        for n, answer in zip(rows, answers, strict=True):
            if isinstance(answer, RequestError) or len(answer[0]) != last[n]:
                problem = answer if isinstance(answer, RequestError) else "it answers other tokens"
                fix = f"once it answers, continue with {RESUME}"
                raise RunError(f"the teacher at {self.settings.url}", f"{problem}; {fix}")
            places = batch.mask[n].nonzero().flatten()
            places = places[places > 0]
            top[n, places], logp[n, places] = answer[0][places - 1], answer[1][places - 1].to(logp)
        return replace(batch, teacher_top=top, teacher_logp=logp)

    def _body(self, tokens: Sequence[int]) -> dict[str, Any]:
        return {"prompt": tokens, "prompt_logprobs": self.settings.top_k, "max_tokens": 1, "temperature": 0.0}

    def _likeliest(self, answer: Any) -> Likeliest:
        """Read the likeliest tokens of an answer. Raises RequestError for one without them."""
        k = self.settings.top_k
        tokens, values = list[list[int]](), list[list[float]]()
        for entries in answer["choices"][0]["prompt_logprobs"][1:]:  # nothing precedes the first token
            pairs = [(float(entry["logprob"]), int(token)) for token, entry in entries.items()]
            # The prompt's own token is there too, however unlikely.
            pairs = sorted((pair for pair in pairs if pair[1] < self.vocabulary), reverse=True)[:k]
            if len(pairs) < k:
                raise RequestError(f"it gives {len(pairs)} tokens of the {k} likeliest", passing=False)
            tokens.append([token for _, token in pairs])
            values.append([value for value, _ in pairs])
        return torch.tensor(tokens).view(-1, k), torch.tensor(values, dtype=torch.float64).view(-1, k)

    def _checked(self, path: str, body: Mapping[str, Any], parse: Callable[[Any], T]) -> T:
        """Return the answer to one request. Raises UserError if it fails."""
        [answer] = self._post(path, [body], parse, CHECK_S, retries=1)
        if isinstance(answer, RequestError):
            fix = "start it as vllm serve MODEL, with --max-logprobs top_k, or as posttrain serve"
            raise UserError("reference.url", f"the server at {self.settings.url}: {path}: {answer}", fix)
        return answer

    def _post(
        self,
        path: str,
        bodies: Sequence[Mapping[str, Any]],
        parse: Callable[[Any], T],
        deadline_s: float,
        retries: int = 30,  # pauses double, so the deadline ends them
    ) -> list[T | RequestError]:
        settings = self.settings
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if settings.api_key_env:
            headers["Authorization"] = f"Bearer {os.environ.get(settings.api_key_env, '').strip()}"
        requests = [{**body, **({"model": settings.path} if settings.path else {})} for body in bodies]
        connection = HttpConnection(
            concurrency=CONCURRENT, deadline_s=deadline_s, timeout_s=deadline_s, retries=retries
        )
        return connection.post_all(
            settings.url.rstrip("/").removesuffix("/v1") + path,
            [json.dumps(body).encode() for body in requests],
            headers=headers,
            parse=lambda post: _parsed(post(), parse),
            limited=settings.url,
        )


def _parsed(content: bytes, parse: Callable[[Any], T]) -> T:
    """Return what `parse` finds in JSON. Raises RequestError if it is not there."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        raise RequestError("the answer is not JSON", status=200) from None
    try:
        return parse(answer)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise RequestError("the answer is not that of vLLM", status=200, passing=False) from None


def _tokenized(answer: Any) -> tuple[list[int], int]:
    return [int(token) for token in answer["tokens"]], int(answer["max_model_len"])
