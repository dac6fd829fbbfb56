"""The verifier `http`: a service returns the reward.

For each response, or with `grouped` for all responses to a task at once, it is sent a JSON object by POST:

    {"id": ..., "prompt": the last message, "messages": [...], "answer": ..., FIELD: ..., "response": "..."}
    {"id": ..., "prompt": the last message, "messages": [...], "answer": ..., FIELD: ..., "responses": [...]}

with all fields of the task. It answers with {"score": 0.5, "reason": "..."}, or with a list of these, one for
each response. A reason is optional, and a number stands for {"score": number}. A score of null says that the
service could not judge.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from posttrain.base.verdict import number
from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.judge.connection import HttpConnection
from posttrain.verifiers.judge.replies import RequestError
from posttrain.verifiers.protocol import Group, Verifier, quote


@dataclass(frozen=True, kw_only=True)
class Http(HttpConnection, Verifier):
    """A reward by HTTP. A service that fails gives a verdict without a score, never a reward of 0.

    Labels: scored. Without a score: unanswered (no answer after all retries, or the service gave null),
    unparsable (the answer is not of the form above), not_a_number, wrong_length.
    """

    place: ClassVar[int] = 18
    url: str
    """Where responses are sent by POST, for example http://localhost:9000/reward."""
    name: str = "http"
    """Name under which the score is recorded."""
    grouped: bool = False
    """Send all responses to a task in one request, as `responses`; the answer is then a list."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of each request, without secrets."""
    headers_env: Mapping[str, str] = field(default_factory=dict)
    """Headers whose values are read from environment variables and stored nowhere, by header:
    {Authorization = "REWARD_TOKEN"}, with REWARD_TOKEN="Bearer ..."."""
    batch: int = 16
    """Responses per call of a worker, whose requests are sent `concurrency` at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, not {self.url[:40]!r}")
        if self.batch < 1:
            raise ValueError(f"batch must be 1 or more, not {self.batch}")
        if twice := {h.casefold() for h in self.headers} & {h.casefold() for h in self.headers_env}:
            raise ValueError(f"the header {min(twice)!r} stands in headers and in headers_env")

    def __call__(self, task: Task, response: str) -> Verdict:
        return self.judge_all([(task, response)])[0]

    def judge_all(self, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
        """Judge each response, in a request of its own unless responses are sent as groups."""
        if self.grouped:
            return [self.judge_group(Group(task=task, responses=(text,)))[0] for task, text in pairs]
        answers = self._send([_columns(task) | {"response": text} for task, text in pairs])
        return [
            _failed(answer) if isinstance(answer, RequestError) else to_verdict(answer.value)
            for answer in answers
        ]

    def judge_group(self, group: Group) -> list[Verdict]:
        """Judge the responses to a task, in one request if `grouped`. If that fails, all responses fail."""
        if not self.grouped:
            return super().judge_group(group)
        size = len(group.responses)
        [answer] = self._send([_columns(group.task) | {"responses": list(group.responses)}])
        if isinstance(answer, RequestError):
            return [_failed(answer)] * size
        if not isinstance(answer.value, list):
            reason = f"the service answered {quote(json.dumps(answer.value))}, not a list"
            return [Verdict(score=None, label="unparsable", reason=reason)] * size
        if len(answer.value) != size:
            reason = f"the service gave {len(answer.value)} scores for {size} responses"
            return [Verdict(score=None, label="wrong_length", reason=reason)] * size
        return [to_verdict(value) for value in answer.value]

    def _send(self, contents: Sequence[Mapping[str, Any]]) -> "list[_Answer | RequestError]":
        self.require()
        headers = {"Content-Type": "application/json", "Accept": "application/json", **self.headers}
        headers |= {header: os.environ[name].strip() for header, name in self.headers_env.items()}
        bodies = [json.dumps(content, default=str).encode() for content in contents]
        return self.post_all(self.url, bodies, headers=headers, parse=_read, limited=self.url)

    def budget_s(self, task: Task) -> float:
        """Return the seconds that one request may take, with all retries."""
        return self.longest_s

    def require(self) -> None:
        """Raise UserError if a variable that should hold a header is not set."""
        for header, name in self.headers_env.items():
            if not os.environ.get(name):
                problem = (
                    f"the environment variable {name} is not set, and the header {header} is read from it"
                )
                raise UserError("verifier.http.headers_env", problem, f"export {name}=...")


@dataclass(frozen=True, slots=True)
class _Answer:
    """A JSON value, which may be null."""

    value: Any


def _read(post: Callable[[], bytes]) -> _Answer:
    body = post()
    try:
        return _Answer(json.loads(body))
    except (ValueError, RecursionError):  # it may have been cut off, so another try may help
        text = quote(body[:60].decode(errors="replace"))
        raise RequestError(f"the answer is not JSON: {text}", status=200) from None


def _columns(task: Task) -> dict[str, Any]:
    """Return the task as a JSON object; its fields give way to the fixed names."""
    prompt = task.messages[-1]["content"] if task.messages else ""
    fixed = {"id": task.id, "prompt": prompt, "messages": [dict(message) for message in task.messages]}
    return {**task.fields, **fixed, "answer": task.typed_answer}


def _failed(error: RequestError) -> Verdict:
    label = "unparsable" if error.status == 200 else "unanswered"
    return Verdict(score=None, label=label, reason=str(error))


def to_verdict(value: Any) -> Verdict:
    """Return the verdict that a service gave on one response; without a score if it is not of the form.

    >>> to_verdict({"score": 0.5, "reason": "short"}).score, to_verdict(1).score, to_verdict({}).label
    (0.5, 1.0, 'unparsable')
    """
    table = {"score": value} if isinstance(value, (int, float)) else value
    if not isinstance(table, dict) or "score" not in table or not isinstance(table.get("reason"), str | None):
        reason = f'the service answered {quote(json.dumps(value))}, not {{"score": number, "reason": text}}'
        return Verdict(score=None, label="unparsable", reason=reason)
    reason = " ".join((table.get("reason") or "").split())
    if table["score"] is None:
        return Verdict(score=None, label="unanswered", reason=reason or "the service gave no score")
    score = number(table["score"]) if isinstance(table["score"], (int, float)) else None
    if score is None:
        reason = f"the score is {quote(json.dumps(table['score']))}, not a finite number"
        return Verdict(score=None, label="not_a_number", reason=reason)
    return Verdict(score=score, label="scored", reason=reason)
