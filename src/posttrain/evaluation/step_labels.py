"""Label the steps of answers by rollouts from each step: how often a continuation ends right.

The label of the first k steps is an estimate of the policy's value of that state,

    V(x, y_1 ... y_k) ≈ (1/n) Σ_i [the verifier accepts the i-th of n continuations],

unbiased, with variance V (1 - V)/n; or whether the verifier accepts any, which tends to 1 for large n where
V > 0. The continuations begin with the tokens of the steps, so that the valued state is the one in the rows
of a process model (plan/dataset_rows.py).

Source: Math-Shepherd, arXiv:2312.08935, section 3.2 (soft and hard estimation).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.base.chat import Chat
from posttrain.engines.protocol import Engine
from posttrain.evaluation.suites.likelihood import complete
from posttrain.types import Request, Sampling, Task
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import Verifier


def soft(successes: Sequence[float]) -> float:
    """Return the share of continuations that end right.

    >>> soft([1.0, 0.0, 0.0, 0.0])
    0.25
    """
    return sum(successes) / len(successes)


def hard(successes: Sequence[float]) -> float:
    """Return 1 if any continuation ends right, else 0: whether a right answer can still be reached.

    >>> hard([1.0, 0.0, 0.0, 0.0])
    1.0
    """
    return max(successes)


@dataclass(frozen=True, kw_only=True)
class Labelling:
    """Settings of the labelling of steps."""

    solutions: int = 1
    """Number of answers drawn to each task, whose steps are labelled."""
    rollouts: int = 8
    """Number of continuations of each prefix."""
    budget: int = 0
    """Total number of continuations after which no further task begins; 0: no bound."""
    separator: str = "\n\n"
    """Text between steps."""
    right: float = 1.0
    """Minimum reward of a successful continuation."""
    estimate: Callable[[Sequence[float]], float] = soft
    """Function from the successes of a step's continuations, each 0 or 1, to its label."""

    def __post_init__(self) -> None:
        if min(self.solutions, self.rollouts) < 1 or self.budget < 0:
            raise ValueError("solutions and rollouts must be 1 or more, and budget 0 or more")
        if not self.separator:
            raise ValueError("separator must not be empty")


@dataclass(frozen=True)
class Prefix:
    """The first steps of an answer, with the prompt before them."""

    number: int
    tokens: tuple[int, ...]
    """Tokens of prompt and steps."""
    text: str
    """Text of the steps, without the prompt."""


def split_steps(text: str, separator: str) -> list[str]:
    """Split an answer into its steps, without blank ones.

    >>> split_steps("2 + 2 = 4\\n\\n\\n\\nso 4\\n\\n", "\\n\\n")
    ['2 + 2 = 4', 'so 4']
    """
    return [step for step in text.split(separator) if step.strip()]


def prefixes(task: Task, steps: Sequence[str], chat: Chat, separator: str) -> list[Prefix]:
    """Return each proper prefix of the answer, with the tokens of a process model's row."""
    tokens, ends = chat.render_steps(task.messages, steps[:-1], separator)
    out = []
    for number, end in enumerate(ends):
        text = "".join(step + separator for step in steps[: number + 1])
        out.append(Prefix(number, tuple(tokens[:end]), text))
    return out


def step_labels(
    tasks: Iterable[Task],
    engine: Engine,
    chat: Chat,
    verifier: Verifier,
    pool: Pool,
    sampling: Sampling,
    labelling: Labelling,
    *,
    context: int,
    seed: int = 0,
    on_progress: Callable[[int], None] = lambda rollouts: None,
) -> Iterator[dict[str, Any]]:
    """Yield a record for each labelled answer: prompt, steps, labels, and the continuations of each.

    The last step's label is the verdict on the answer itself. A prefix is labelled None if none of its
    continuations could be judged, or if the context has no room for one. `on_progress` receives the number of
    continuations so far.
    """
    spent = 0
    for task in tasks:
        if labelling.budget and spent >= labelling.budget:
            return
        prompt = tuple(chat.render(task.messages))
        answers = _sample(
            engine, [(prompt, f"{task.id}/solve", n) for n in range(labelling.solutions)], sampling, seed
        )
        for number, answer in enumerate(answers):
            steps = split_steps(answer, labelling.separator)
            if not steps:
                continue
            room = context - sampling.max_new_tokens
            begins = [p for p in prefixes(task, steps, chat, labelling.separator) if len(p.tokens) <= room]
            asks = [
                (p.tokens, f"{task.id}/{number}/{p.number}", n)
                for p in begins
                for n in range(labelling.rollouts)
            ]
            ends = _sample(engine, asks, sampling, seed)
            spent += len(asks)
            on_progress(spent)
            texts = [begins[i // labelling.rollouts].text + end for i, end in enumerate(ends)]
            verdicts = pool.judge(verifier, [(task, text) for text in [*texts, answer]])
            scores = [None if v.score is None else float(v.score >= labelling.right) for v in verdicts]
            labels: list[float | None] = [None] * len(steps)
            counts = [0] * len(steps)
            for place, prefix in enumerate(begins):
                group = scores[place * labelling.rollouts : (place + 1) * labelling.rollouts]
                judged = [score for score in group if score is not None]
                counts[prefix.number] = len(judged)
                labels[prefix.number] = labelling.estimate(judged) if judged else None
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
    """Return the text of one answer to each request, in order; requests of one prompt share its prefill."""
    requests = [
        Request(prompt=tokens, sampling=sampling, seed=seed, task=key, sample=sample)
        for tokens, key, sample in asks
    ]
    return [answer.text for answer in complete(engine, requests)]
