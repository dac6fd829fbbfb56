"""Order questions by the disagreement of an ensemble of reward models.

The spread of a pair is the standard deviation, over the models, of the difference of its two scores: where
they disagree which answer is better, or by how much, a person's label tells most.

Source: Christiano et al. 2017, arXiv:1706.03741, section 2.2.4; Gleave and Irving 2022, arXiv:2203.07472.
"""

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from posttrain.types import Task, UserError
from posttrain.verifiers.model.verifier import RewardModel
from posttrain_people.questions import LabelQuestion

AT_ONCE = 32
"""Questions between two calls of `on_progress`."""


def by_disagreement(
    questions: Sequence[LabelQuestion], paths: Sequence[str], on_progress: Callable[[int], None]
) -> list[LabelQuestion]:
    """Return the questions by their largest spread over pairs of answers, largest first.

    Questions with an answer that a model cannot score come last. Raises UserError for answers of several
    messages.
    """
    judge = RewardModel(paths=tuple(paths))
    judge.require()
    spreads: list[float] = []
    for start in range(0, len(questions), AT_ONCE):
        part = questions[start : start + AT_ONCE]
        answers = [(_task(question), _text(question, a)) for question in part for a in question.answers]
        verdicts = iter(judge.judge_all(answers))
        for question in part:
            parts = [next(verdicts).parts for _ in question.answers]
            scores = [[p.get(f"model_{n}", np.nan) for n in range(1, len(paths) + 1)] for p in parts]
            spreads.append(largest_spread(np.array(scores, dtype=np.float64)))
        on_progress(start + len(part))
    order = sorted(range(len(questions)), key=lambda i: -spreads[i])
    return [questions[i] for i in order]


def largest_spread(scores: npt.NDArray[np.float64]) -> float:
    """Return max over pairs (i, j) of the deviation over models m of s_im - s_jm; -1 if a score is missing.

    scores: [answers, models].

    >>> largest_spread(np.array([[1.0, 3.0], [0.0, 0.0]]))  # one model finds the pair 1 apart, the other 3
    1.0
    """
    if not np.isfinite(scores).all():
        return -1.0
    return max(float(np.std(one - other)) for one, other in combinations(scores, 2))


def _task(question: LabelQuestion) -> Task:
    return Task(id=question.key, messages=question.messages, source=question.source)


def _text(question: LabelQuestion, answer: object) -> str:
    if not isinstance(answer, str):
        raise UserError(
            question.source,
            "an answer has several messages, and a reward model judges one text",
            "leave --ensemble out",
        )
    return answer
