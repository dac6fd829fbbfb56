"""The verifier `judge`: a language model grades responses on a scale, or against a reference.

If no verdict can be read in the judge's answer, it is asked again with another seed. If all attempts fail, or
the judge cannot be reached, the verdict has no score. `rubric` protects the judge from instructions in a
response.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

from posttrain.types import Message, Task, UserError, Verdict
from posttrain.verifiers.judge.constitution import Constitution
from posttrain.verifiers.judge.rubric import Rubric, forged, question_of
from posttrain.verifiers.judge.rubric import Verdict as How
from posttrain.verifiers.judge.writer import Writer, Written
from posttrain.verifiers.protocol import Verifier, quote
from posttrain.verifiers.regions import remove_thought

FAKE = "Let us rather talk about the weather."


@dataclass(frozen=True, kw_only=True)
class Judging:
    """Options of the requests to a judge, whatever its model and its rubric."""

    name: str = "judge"
    """Name under which the score is recorded."""
    max_tokens: int = 512
    """Longest answer of the judge, with its reasons."""
    temperature: float = 0.0
    """Temperature of the first attempt."""
    retry_temperature: float = 0.7
    """Temperature of further attempts, after an answer without a readable verdict; 0 would repeat it."""
    attempts: int = 3
    """Most attempts until a verdict can be read."""
    seed: int = 0
    """Seed of the first attempt; each further one adds 1."""
    most_characters: int = 20_000
    """Longest response that the judge is shown; longer ones score 0 as `too_long`."""
    batch: int = 16
    """Responses per call of the judge."""
    most_responses: int = 16
    """Most responses that a listwise rubric shows together; a larger group is an error."""
    thoughts: bool = False
    """Whether the judge also sees a response's thoughts, and not only the text after them."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "attempts", "most_characters", "batch", "most_responses"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        for name in ("temperature", "retry_temperature"):
            if not 0 <= getattr(self, name) <= 5:
                raise ValueError(f"{name} must lie in 0 ... 5, not {getattr(self, name)}")
        if self.attempts > 1 and self.retry_temperature == 0:
            raise ValueError("retry_temperature must not be 0, or the judge says the same each time")

    def visible(self, response: str) -> str:
        """Return the part of a response or a reference that the judge is shown."""
        return response if self.thoughts else remove_thought(response)

    def judge_unseen(self, response: str) -> Verdict | None:
        """Return the verdict on a response that the judge need not see; None for any other."""
        if not response.strip():
            return Verdict(score=0.0, label="no_answer", reason="it says nothing that could be judged")
        if len(response) > self.most_characters:
            reason = f"{len(response)} characters, more than {self.most_characters}"
            return Verdict(score=0.0, label="too_long", reason=reason)
        if forged(response):
            return Verdict(
                score=0.0, label="forbidden", reason="it forges the marks between which it is shown"
            )
        return None


T = TypeVar("T")
S = TypeVar("S", covariant=True)


class AnswerForm(Protocol[S]):
    """The form of a judge's answer: how to read a value in it. A `Rubric` reads a number from 0 to 1."""

    @property
    def verdict(self) -> How: ...

    @property
    def options(self) -> Mapping[str, float]: ...

    def read(self, answer: str) -> S | None: ...

    def weigh(self, chances: Sequence[float]) -> S | None: ...


@dataclass(frozen=True)
class Reading(Generic[T]):
    """Verdict read in a judge's answer or in its probabilities; None without one."""

    value: T | None
    text: str
    """The judge's answer; if `value` is None, the reason for that."""
    label: Literal["", "unanswered", "unparsable"] = ""


def ask(
    writer: Writer, rubric: AnswerForm[T], conversations: Sequence[Sequence[Message]], how: Judging
) -> list[Reading[T]]:
    """Ask the judge each conversation, and again those without a readable verdict.

    Probabilities are asked for once, because they are the same each time.
    """
    if rubric.verdict == "logprobs":
        return [_read_answer(rubric, answer) for answer in writer.choose(conversations, list(rubric.options))]
    readings = [Reading[T](None, "", "unparsable") for _ in conversations]
    unread = list(range(len(conversations)))
    for attempt in range(how.attempts):
        answers = writer.write(
            [conversations[i] for i in unread],
            max_tokens=how.max_tokens,
            temperature=how.retry_temperature if attempt else how.temperature,
            seed=how.seed + attempt,
        )
        for i, answer in zip(unread, answers, strict=True):
            readings[i] = _read_answer(rubric, answer)
        unread = [i for i in unread if readings[i].label == "unparsable"]
        if not unread:
            break
    return readings


def _read_answer(rubric: AnswerForm[T], answer: Written) -> Reading[T]:
    if answer.failed:
        return Reading(None, quote(answer.error, 120), "unanswered")
    if rubric.verdict == "logprobs":
        value = rubric.weigh(answer.chances)
        pairs = zip(rubric.options, answer.chances, strict=True)
        text = ", ".join(f"{name} {chance:.2g}" for name, chance in pairs)
    else:
        # "Score: 10", cut off, may read "Score: 1".
        value, text = None if answer.cut else rubric.read(answer.text), answer.text
    if value is None:
        prefix = "max_tokens end it: " if answer.cut else ""
        return Reading(None, f"{prefix}no verdict in {quote(text, 120)}", "unparsable")
    return Reading(value, text)


@dataclass(frozen=True, kw_only=True)
class Judge(Judging, Verifier):
    """Score responses by a language model, scaled so that the rubric's best is 1 and its worst 0.

    Pointwise: the score. Label: scored.
    Pairwise: the response is compared with the reference in both orders. The score is 1 if both orders prefer
    the response (better), 0 if both prefer the reference (worse), 0.5 if they contradict each other
    (disagree), and the mean if an order finds them equal. Labels: better, worse, equal, disagree.
    Verdict.parts: as_first and as_second are the verdicts of the two orders; bias = as_first - as_second,
    whose mean over responses is the judge's preference for the text that it reads first.

    Without asking the judge, with score 0: no_answer (nothing to show), too_long, forbidden (the response
    forges the marks around it). Without a score: unanswered, unparsable.
    """

    place: ClassVar[int] = 14
    writer: Writer
    rubric: Rubric
    constitution: Constitution | None = None
    best: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rubric.wants("principles") != (self.constitution is not None):
            has = "has no place for" if self.constitution else "has a place for"
            raise ValueError(f"the rubric {has} {{principles}}, which come from a constitution")

    def __call__(self, task: Task, response: str) -> Verdict:
        return self.judge_all([(task, response)])[0]

    def judge_all(self, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
        """Judge all responses in one request to the writer; each conversation shows one response alone."""
        pairs = [(task, self.visible(response)) for task, response in pairs]
        verdicts = [self.judge_unseen(response) for _, response in pairs]
        cases = [i for i, verdict in enumerate(verdicts) if verdict is None]
        conversations = [c for i in cases for c in self._conversations(*pairs[i])]
        orders = 2 if self.rubric.kind == "pairwise" else 1
        readings = ask(self.writer, self.rubric, conversations, self) if conversations else []
        for n, i in enumerate(cases):
            verdicts[i] = self._verdict(readings[n * orders : (n + 1) * orders])
        return [verdict for verdict in verdicts if verdict is not None]

    def _conversations(self, task: Task, response: str) -> list[list[Message]]:
        texts = {"question": question_of(task)}
        if self.rubric.kind == "pairwise" or self.rubric.wants("reference"):
            texts["reference"] = self.visible(reference(task))
        principles = self.constitution.listed() if self.constitution else ""
        if self.rubric.kind == "pointwise":
            return [self.rubric.conversation(texts | {"response": response}, principles)]
        return both_orders(self.rubric, texts, response, texts["reference"], principles)

    def _verdict(self, readings: Sequence[Reading[float]]) -> Verdict:
        for reading in readings:
            if reading.value is None:
                return Verdict(score=None, label=reading.label, reason=reading.text)
        values = [reading.value for reading in readings if reading.value is not None]
        because = quote(" ".join(readings[0].text.split()), 120)
        if self.rubric.kind == "pointwise":
            return Verdict(score=values[0], label="scored", reason=because)
        first, second = values[0], 1.0 - values[1]  # in the second order the other text is first
        score, label = combine_orders(first, second)
        parts = {"as_first": first, "as_second": second, "bias": first - second}
        return Verdict(score=score, label=label, reason=because, parts=parts)

    def fakes(self, task: Task) -> list[str]:
        """Return the empty response and one off topic, which asks the judge once per task before a run."""
        return ["", FAKE]

    def check(self, task: Task) -> None:
        """Raise UserError if the task has no question, or lacks a reference that the rubric needs."""
        if not question_of(task).strip():
            raise UserError(task.source, f"task {task.id!r} has no question")
        if self.rubric.kind == "pairwise" or self.rubric.wants("reference"):
            reference(task)

    def budget_s(self, task: Task) -> float:
        """Return the writer's budget for all orders and attempts."""
        orders = 2 if self.rubric.kind == "pairwise" else 1
        return self.writer.budget_s * self.attempts * orders

    def require(self) -> None:
        """Raise UserError if the writer is not available."""
        self.writer.require()


def reference(task: Task) -> str:
    """Return the task's field `reference`, else its answer. Raises UserError if it is missing or blank."""
    text = task.fields.get("reference", task.answer)
    if not isinstance(text, str) or not text.strip():
        raise UserError(
            task.source,
            f"task {task.id!r} has no reference to compare with",
            "give it the field 'reference', or an answer",
        )
    return text


def both_orders(
    rubric: Rubric, texts: dict[str, str], one: str, other: str, principles: str
) -> list[list[Message]]:
    """Return the conversations about a pair in both orders: with `one` first, and with `one` second."""
    return [
        rubric.conversation(texts | {"first": one, "second": other}, principles),
        rubric.conversation(texts | {"first": other, "second": one}, principles),
    ]


def combine_orders(first: float, second: float) -> tuple[float, str]:
    """Combine the verdicts of both orders on one response, each from 0 to 1, into a score and a label.

    >>> [combine_orders(*pair) for pair in [(1.0, 1.0), (1.0, 0.0)]]
    [(1.0, 'better'), (0.5, 'disagree')]
    >>> [combine_orders(*pair) for pair in [(0.5, 1.0), (0.5, 0.5)]]
    [(0.75, 'better'), (0.5, 'equal')]
    """
    score = (first + second) / 2
    if score == 0.5:
        return score, "equal" if first == second else "disagree"
    return score, "better" if score > 0.5 else "worse"
