"""Labels for the steps of answers, by rolling out from each: how often what was begun so ends well.

The label of the first k steps is an estimate of the policy's value of that state,

    V(x, y_1 ... y_k) ≈ (1/n) Σ_i [the verifier accepts the i-th of n continuations],

unbiased, with variance V (1 - V)/n; or whether any of them does, which is 1 for n large wherever V > 0. The
continuations begin with the tokens of the steps, so that the state which is valued is the one that a process
model is shown (plan/dataset_rows.py).

Source: Math-Shepherd, arXiv:2312.08935, section 3.2 (soft and hard estimation).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.base.chat import Chat
from posttrain.engines.protocol import Engine
from posttrain.evaluation.suites.likelihood import drawn
from posttrain.types import Request, Sampling, Task
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import Verifier


def soft(successes: Sequence[float]) -> float:
    """The share of continuations that end right.

    >>> soft([1.0, 0.0, 0.0, 0.0])
    0.25
    """
    return sum(successes) / len(successes)


def hard(successes: Sequence[float]) -> float:
    """1 if any continuation ends right, else 0: whether a right answer can still be reached.

    >>> hard([1.0, 0.0, 0.0, 0.0])
    1.0
    """
    return max(successes)


@dataclass(frozen=True, kw_only=True)
class Labelling:
    """How steps are labelled."""

    solutions: int = 1
    """Answers drawn to each task, whose steps are then labelled."""
    rollouts: int = 8
    """Continuations of each prefix."""
    budget: int = 0
    """Continuations in all, after which no further task is begun; 0: no bound."""
    separator: str = "\n\n"
    """Between steps."""
    right: float = 1.0
    """The reward from which a continuation counts as a success."""
    estimate: Callable[[Sequence[float]], float] = soft
    """From the successes of a step's continuations, each 0 or 1, to its label."""

    def __post_init__(self) -> None:
        if min(self.solutions, self.rollouts) < 1 or self.budget < 0:
            raise ValueError("solutions and rollouts must be 1 or more, and budget 0 or more")
        if not self.separator:
            raise ValueError("separator must not be empty")


@dataclass(frozen=True)
class Prefix:
    """The first steps of an answer, as tokens that follow the prompt."""

    number: int
    tokens: tuple[int, ...]
    """Prompt included."""
    text: str
    """What the policy has said so far."""


def split_steps(text: str, separator: str) -> list[str]:
    """The steps of an answer; blank ones are left out.

    >>> split_steps("2 + 2 = 4\\n\\n\\n\\nso 4\\n\\n", "\\n\\n")
    ['2 + 2 = 4', 'so 4']
    """
    return [step for step in text.split(separator) if step.strip()]


def prefixes(task: Task, steps: Sequence[str], chat: Chat, separator: str) -> list[Prefix]:
    """Each beginning of the answer that is not all of it, its tokens those of a process model's row."""
    tokens, ends = chat.render_steps(task.messages, steps[:-1], separator)
    out = []
    for number, end in enumerate(ends):
        text = "".join(said + separator for said in steps[: number + 1])
        out.append(Prefix(number, tuple(tokens[:end]), text))
    return out


def step_labels(
    tasks: Iterable[Task],
    engine: Engine,
    chat: Chat,
    verifier: Verifier,
    pool: Pool,
    sampling: Sampling,
    how: Labelling,
    *,
    context: int,
    seed: int = 0,
    on_progress: Callable[[int], None] = lambda rollouts: None,
) -> Iterator[dict[str, Any]]:
    """One record a labelled answer: prompt, steps, labels, and how many continuations each label rests on.

    The last step's label is the verdict on the answer itself. A prefix whose continuations could none of them
    be judged, or for which the context has no room, gets null. `on_progress` gets the continuations so far.
    """
    spent = 0
    for task in tasks:
        if how.budget and spent >= how.budget:
            return
        prompt = tuple(chat.render(task.messages))
        answers = _sample(
            engine, [(prompt, f"{task.id}/solve", n) for n in range(how.solutions)], sampling, seed
        )
        for number, answer in enumerate(answers):
            steps = split_steps(answer, how.separator)
            if not steps:
                continue
            begun, room = prefixes(task, steps, chat, how.separator), context - sampling.max_new_tokens
            found = [p for p in begun if len(p.tokens) <= room]
            asks = [
                (p.tokens, f"{task.id}/{number}/{p.number}", n) for p in found for n in range(how.rollouts)
            ]
            ends = _sample(engine, asks, sampling, seed)
            spent += len(asks)
            on_progress(spent)
            said = [found[i // how.rollouts].text + end for i, end in enumerate(ends)]
            verdicts = pool.judge(verifier, [(task, text) for text in [*said, answer]])
            scores = [None if v.score is None else float(v.score >= how.right) for v in verdicts]
            labels: list[float | None] = [None] * len(steps)
            counts = [0] * len(steps)
            for place, prefix in enumerate(found):
                judged = [
                    s for s in scores[place * how.rollouts : (place + 1) * how.rollouts] if s is not None
                ]
                counts[prefix.number] = len(judged)
                labels[prefix.number] = how.estimate(judged) if judged else None
            labels[-1], counts[-1] = scores[-1], int(scores[-1] is not None)
            if any(label is not None for label in labels):
                yield {
                    "id": f"{task.id}/{number}",
                    "prompt": [dict(message) for message in task.messages],
                    "steps": steps,
                    "labels": labels,
                    "rollouts": counts,
                }


def _sample(
    engine: Engine, asks: Sequence[tuple[tuple[int, ...], str, int]], sampling: Sampling, seed: int
) -> list[str]:
    """The texts of one answer each, in order; those of one prompt share its prefill."""
    asked = [
        Request(prompt=tokens, sampling=sampling, seed=seed, task=key, sample=sample)
        for tokens, key, sample in asks
    ]
    return [answer.text for answer in drawn(engine, asked)]
