"""`judge`: a language model grades responses, one by one on a scale or against a reference.

A judge that gives no readable verdict is asked again with another seed. If it never does, or cannot be
reached, the verdict has no score. How a response is kept from speaking to the judge stands in `rubric`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from posttrain.types import Message, Task, UserError, Verdict
from posttrain.verifiers.judge.constitution import Constitution
from posttrain.verifiers.judge.rubric import Rubric, asked, forged
from posttrain.verifiers.judge.writer import Writer, Written
from posttrain.verifiers.protocol import Verifier, shown
from posttrain.verifiers.regions import spoken

FAKE = "Let us rather talk about the weather."


@dataclass(frozen=True, kw_only=True)
class Judging:
    """How a judge is asked; who it is and what it judges by stand elsewhere."""

    name: str = "judge"
    """Under which its score is recorded."""
    max_tokens: int = 512
    """Of one answer of the judge, its reasons included."""
    temperature: float = 0.0
    """Of the first time that it is asked."""
    retry_temperature: float = 0.7
    """Of further times, after an answer without a readable verdict: at 0 it would say the same again."""
    attempts: int = 3
    """How often it is asked in all until a verdict can be read."""
    seed: int = 0
    """Of the first time; each further one adds 1."""
    most_characters: int = 20_000
    """A longer response is not shown to the judge and scores 0, as `too_long`."""
    batch: int = 16
    """Responses that are asked about in one call."""
    thoughts: bool = False
    """Show a response's thoughts, too, and not only what it says behind them."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "attempts", "most_characters", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        for name in ("temperature", "retry_temperature"):
            if not 0 <= getattr(self, name) <= 5:
                raise ValueError(f"{name} must lie in 0 ... 5, not {getattr(self, name)}")
        if self.attempts > 1 and self.retry_temperature == 0:
            raise ValueError("retry_temperature must not be 0, or the judge says the same each time")

    def visible(self, response: str) -> str:
        """What is shown of a response or a reference."""
        return response if self.thoughts else spoken(response)


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read in a judge's answer, or in its chances: a number from 0 to 1, or why there is none."""

    value: float | None
    text: str
    """The judge's answer; where no number was read in it, why."""
    label: Literal["", "unanswered", "unparsable"] = ""


def ask(
    writer: Writer, rubric: Rubric, conversations: Sequence[Sequence[Message]], how: Judging
) -> list[Reading]:
    """What the judge says to each of these conversations; those that cannot be read are asked again.

    Chances are asked for once: they are the same each time.
    """
    if rubric.verdict == "logprobs":
        return [_reading(rubric, answer) for answer in writer.choose(conversations, list(rubric.options))]
    found = [Reading(None, "", "unparsable") for _ in conversations]
    open_ = list(range(len(conversations)))
    for attempt in range(how.attempts):
        answers = writer.write(
            [conversations[i] for i in open_],
            max_tokens=how.max_tokens,
            temperature=how.retry_temperature if attempt else how.temperature,
            seed=how.seed + attempt,
        )
        for i, answer in zip(open_, answers, strict=True):
            found[i] = _reading(rubric, answer)
        open_ = [i for i in open_ if found[i].label == "unparsable"]
        if not open_:
            break
    return found


def _reading(rubric: Rubric, answer: Written) -> Reading:
    if answer.failed:
        return Reading(None, shown(answer.error, 120), "unanswered")
    if rubric.verdict == "logprobs":
        value = rubric.weigh(answer.chances)
        each = zip(rubric.options, answer.chances, strict=True)
        text = ", ".join(f"{name} {chance:.2g}" for name, chance in each)
    else:
        # Cut off, "Score: 10" may read "Score: 1".
        value, text = None if answer.cut else rubric.read(answer.text), answer.text
    if value is None:
        cut = "max_tokens end it: " if answer.cut else ""
        return Reading(None, f"{cut}no verdict in {shown(text, 120)}", "unparsable")
    return Reading(value, text)


@dataclass(frozen=True, kw_only=True)
class Judge(Judging, Verifier):
    """The score that a language model gives, scaled so that the rubric's best is 1 and its worst 0.

    Pointwise: the score. Labels: scored.
    Pairwise: the response against the reference, asked in both orders. 1 if it is preferred in both (better),
    0 if the reference is (worse), the mean if one or both orders find them equal, 0.5 if the two orders
    contradict each other (disagree). Labels: better, worse, equal, disagree. parts: as_first and as_second
    are the verdicts of the two orders, bias is as_first - as_second; its mean over responses is the judge's
    preference for what it reads first.

    Without asking: no_answer where there is nothing to show, too_long, and forbidden for one that forges the
    marks around it, all 0. Without a score: unanswered, unparsable.
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
        """The verdict on one response."""
        return self.judge_all([(task, response)])[0]

    def judge_all(self, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
        """The verdicts, all asked for together; each conversation is about one response alone."""
        pairs = [(task, self.visible(response)) for task, response in pairs]
        verdicts = [self._unasked(response) for _, response in pairs]
        cases = [i for i, verdict in enumerate(verdicts) if verdict is None]
        conversations = [c for i in cases for c in self._conversations(*pairs[i])]
        each = 2 if self.rubric.kind == "pairwise" else 1
        readings = ask(self.writer, self.rubric, conversations, self) if conversations else []
        for place, i in enumerate(cases):
            verdicts[i] = self._verdict(readings[place * each : (place + 1) * each])
        return [verdict for verdict in verdicts if verdict is not None]

    def _unasked(self, response: str) -> Verdict | None:
        """The verdict on a response that need not be shown to anybody."""
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

    def _conversations(self, task: Task, response: str) -> list[list[Message]]:
        texts = {"question": asked(task)}
        if self.rubric.kind == "pairwise" or self.rubric.wants("reference"):
            texts["reference"] = self.visible(reference(task))
        principles = self.constitution.listed() if self.constitution else ""
        if self.rubric.kind == "pointwise":
            return [self.rubric.conversation(texts | {"response": response}, principles)]
        return both_orders(self.rubric, texts, response, texts["reference"], principles)

    def _verdict(self, readings: Sequence[Reading]) -> Verdict:
        for reading in readings:
            if reading.value is None:
                return Verdict(score=None, label=reading.label, reason=reading.text)
        values = [reading.value for reading in readings if reading.value is not None]
        because = shown(" ".join(readings[0].text.split()), 120)
        if self.rubric.kind == "pointwise":
            return Verdict(score=values[0], label="scored", reason=because)
        first, second = values[0], 1.0 - values[1]  # the second order asks for the other's place
        score, label = reconciled(first, second)
        parts = {"as_first": first, "as_second": second, "bias": first - second}
        return Verdict(score=score, label=label, reason=because, parts=parts)

    def fakes(self, task: Task) -> list[str]:
        """Nothing, and words off the point: so the judge is asked once for each task before a run."""
        return ["", FAKE]

    def check(self, task: Task) -> None:
        """UserError if there is no question, or no reference where one is needed."""
        if not asked(task).strip():
            raise UserError(task.source, f"task {task.id!r} has no question")
        if self.rubric.kind == "pairwise" or self.rubric.wants("reference"):
            reference(task)

    def budget_s(self, task: Task) -> float:
        """What the writer may take, for each order and each attempt."""
        orders = 2 if self.rubric.kind == "pairwise" else 1
        return self.writer.budget_s * self.attempts * orders

    def require(self) -> None:
        """UserError if the writer cannot write."""
        self.writer.require()


def reference(task: Task) -> str:
    """What a response is compared with: the task's field `reference`, else its answer; UserError if blank."""
    found = task.fields.get("reference", task.answer)
    if not isinstance(found, str) or not found.strip():
        raise UserError(
            task.source,
            f"task {task.id!r} has no reference to compare with",
            "give it the field 'reference', or an answer",
        )
    return found


def both_orders(
    rubric: Rubric, texts: dict[str, str], one: str, other: str, principles: str
) -> list[list[Message]]:
    """The two conversations about a pair: `one` read first, and `one` read second."""
    return [
        rubric.conversation(texts | {"first": one, "second": other}, principles),
        rubric.conversation(texts | {"first": other, "second": one}, principles),
    ]


def reconciled(first: float, second: float) -> tuple[float, str]:
    """The score and label of two verdicts on one response: 1 or 0 or 0.5 (equal) each, or what lies between.

    >>> reconciled(1.0, 1.0), reconciled(1.0, 0.0), reconciled(0.5, 1.0), reconciled(0.5, 0.5)
    ((1.0, 'better'), (0.5, 'disagree'), (0.75, 'better'), (0.5, 'equal'))
    """
    score = (first + second) / 2
    if score == 0.5:
        return score, "equal" if first == second else "disagree"
    return score, "better" if score > 0.5 else "worse"
