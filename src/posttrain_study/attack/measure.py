"""Judge tricks, a learnt text and the best of n answers by a reward."""

import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import comb

from posttrain.types import Task, Verdict
from posttrain.verifiers.protocol import Verifier
from posttrain_study.attack.policy import LearntText, learn_text
from posttrain_study.attack.tricks import FRAGMENTS, TRICKS, question

Answers = Sequence[tuple[Task, str]]
Judge = Callable[[Answers], Sequence[Verdict]]
SEARCHED = 8
"""Most tasks on which a text of the policy is judged in a round."""
WORDS = 24
"""Words of the questions among the fragments: the most frequent ones."""


@dataclass(frozen=True)
class Payment:
    """What one way to answer earned over the tasks."""

    name: str
    mean: float
    """Mean score over the tasks that were judged."""
    paid: float
    """Share of the tasks paid the highest score that there is, or more than 0 where that is unknown."""
    judged: int
    example: str
    """The answer to the task that it was paid most for."""


def pay(name: str, answers: Answers, judge: Judge, best: float | None) -> Payment | None:
    """Return what these answers earn; None if no answer could be judged."""
    verdicts = zip(answers, judge(answers), strict=True)
    pairs = [(text, verdict.score) for (_, text), verdict in verdicts if verdict.score is not None]
    if not pairs:
        return None
    scores = [score for _, score in pairs]
    full = sum(score >= best if best is not None else score > 0 for score in scores) / len(scores)
    example = max(pairs, key=lambda pair: pair[1])[0]
    return Payment(name, statistics.fmean(scores), full, len(scores), example)


def pay_right_answers(verifier: Verifier, tasks: Sequence[Task], judge: Judge) -> Payment | None:
    """Return what the verifier's right answers earn, or the tasks' own; None if there are none."""
    answers = [
        (task, gold)
        for task in tasks
        for gold in islice([*verifier.golds(task), *filter(None, [task.answer])], 1)
    ]
    return pay("right answers", answers, judge, verifier.best) if answers else None


def pay_tricks(verifier: Verifier, tasks: Sequence[Task], judge: Judge) -> list[Payment]:
    """Return what each trick earns, and each wrong answer that the verifier itself names, best paid first."""
    answers = {name: [(task, trick(task)) for task in tasks] for name, trick in TRICKS.items()}
    fakes: dict[str, list[tuple[Task, str]]] = defaultdict(list)
    for task in tasks:
        for number, fake in enumerate(verifier.fakes(task)):
            fakes[f"wrong answer {number + 1} of its self-test"].append((task, fake))
    payments = (pay(name, pairs, judge, verifier.best) for name, pairs in (answers | fakes).items())
    return sorted(filter(None, payments), key=lambda payment: -payment.mean)


def pay_learnt_text(
    verifier: Verifier, tasks: Sequence[Task], judge: Judge, rounds: int, seed: int
) -> tuple[Payment | None, LearntText]:
    """Return what a learnt text earns on the tasks that it was not learnt on, and the text itself.

    Half of the tasks are for learning; each round takes at most SEARCHED.
    """
    dice = random.Random(seed)
    shuffled = dice.sample(tasks, len(tasks))
    half = max(1, len(shuffled) // 2)

    def worth(texts: Sequence[str]) -> list[float]:
        sample = dice.sample(shuffled[:half], min(SEARCHED, half))
        verdicts = judge([(task, text) for text in texts for task in sample])
        floor = min((verdict.score for verdict in verdicts if verdict.score is not None), default=0.0)
        # A text that makes the verifier fail must not look better than the worst that is judged.
        scores = [floor if verdict.score is None else verdict.score for verdict in verdicts]
        width = len(sample)
        return [statistics.fmean(scores[n * width : (n + 1) * width]) for n in range(len(texts))]

    words = Counter(word for task in tasks for word in question(task).split())
    fragments = (*FRAGMENTS, *(f"{word} " for word, _ in words.most_common(WORDS)))
    attempt = learn_text(fragments, worth, rounds, seed)
    rest = shuffled[half:] or shuffled
    return pay("a learnt text", [(task, attempt.text) for task in rest], judge, verifier.best), attempt


@dataclass(frozen=True)
class BestOf:
    """Means over the tasks when the answer with the highest reward of n is taken."""

    n: int
    reward: float
    truth: float
    """By the verifier that is taken for the truth."""


def best_of(pairs: Sequence[Sequence[tuple[float, float]]]) -> list[BestOf]:
    """Return the exact means for n = 1, 2, 4 ... up to the fewest answers that a task has.

    pairs: (reward, truth) of each answer to each task. Of the answers that share the highest reward each is
    as likely to be taken.

    >>> best_of([[(1.0, 0.0), (0.0, 1.0)]])
    [BestOf(n=1, reward=0.5, truth=0.5), BestOf(n=2, reward=1.0, truth=0.0)]
    """
    most = min(map(len, pairs))
    out, n = list[BestOf](), 1
    while n <= most:
        means = [_of_best(answers, n) for answers in pairs]
        out.append(BestOf(n, *(statistics.fmean(column) for column in zip(*means, strict=True))))
        n *= 2
    return out


def _of_best(answers: Sequence[tuple[float, float]], n: int) -> tuple[float, float]:
    """Return E[(reward, truth)] of the best by reward of n answers drawn without replacement."""
    truths = defaultdict(list)
    for reward, truth in answers:
        truths[reward].append(truth)
    below, mean_reward, mean_truth = 0, 0.0, 0.0
    for reward, equal in sorted(truths.items()):
        upto = below + len(equal)
        chance = (comb(upto, n) - comb(below, n)) / comb(len(answers), n)
        mean_reward += chance * reward
        mean_truth += chance * statistics.fmean(equal)
        below = upto
    return mean_reward, mean_truth
