r"""A regular expression pays for the format of answers, alone or with correctness: what a policy learns.

A task is a sum. A policy chooses a manner, which all tasks share, and then a number: the number alone; a
thought and an answer between tags; a blank thought before the answer; tags with nothing between them; tags
around dots, as a prompt shows them. A number after a thought is right in half of the answers of the start,
any other in a fifth; or thoughts are of no use, and it is right in a fifth too. The rewards are the
product's: `regex` with (?s)<think>.*</think>\s*<answer>.*</answer>, `number`, the mean of both, the mean of
`format` and `number`, and a regular expression with the answer in it.
"""

import random
from pathlib import Path
from typing import Any

import torch

from mathcheck.plugin.number import Number
from posttrain.types import Task
from posttrain.verifiers.combine.combined import Combined, Part
from posttrain.verifiers.protocol import Verifier
from posttrain.verifiers.structure.patterns import Format, Regex
from posttrain_study.claims.experiment import (
    Experiment,
    Figures,
    Report,
    Results,
    VerdictRule,
    curve,
    markdown,
    spread,
)
from posttrain_study.claims.text_world import Scores, TextWorld, follow_texts, scores_of
from posttrain_study.claims.weak_tests import LR, TASKS, UPDATES

NUMBERS, THOUGHT_RIGHT, OTHER_RIGHT = 10, 0.5, 0.2
PATTERN = r"(?s)<think>.*</think>\s*<answer>.*</answer>"
WITH_ANSWER = r"(?s)<think>.*</think>\s*<answer>\s*(?P<answer>\d+)\s*</answer>"
MANNERS = ("number alone", "thought", "blank thought", "empty tags", "dots between tags")
START = (0.5, 0.25, 0.15, 0.05, 0.05)
THOUGHT = 1
REGEX, RIGHT, BOTH = "regex", "right", "regex and right"
STRICT, GROUP = "format and right", "regex with answer"
USELESS = "; thoughts of no use"


def rewards() -> dict[str, Verifier]:
    """Return the reward of each arm."""
    regex, right = Regex(pattern=PATTERN), Number(where="last")

    def mean(*verifiers: Verifier) -> Combined:
        return Combined(parts=tuple(Part(verifier=verifier, weight=0.5) for verifier in verifiers))

    both, strict = mean(regex, right), mean(Format(), right)
    return {REGEX: regex, RIGHT: right, BOTH: both, STRICT: strict, GROUP: Regex(pattern=WITH_ANSWER)}


def sums(seed: int, thought_right: float = THOUGHT_RIGHT) -> TextWorld:
    """Make tasks, and how a policy answers them at the start."""
    dice, tasks, texts, contents = random.Random(seed), [], [], []
    for a, b in dice.sample([(a, b) for a in range(2, 10) for b in range(2, 10)], TASKS):
        tasks.append(Task(id=f"{a} + {b}", messages=(), answer=str(a + b)))
        near = dice.sample([n for n in range(20) if n != a + b], NUMBERS - 1)
        texts.append([_texts(a, b, number) for number in (a + b, *near)])
        worth = torch.tensor([dice.gauss(0, 1) for _ in near], dtype=torch.float64).softmax(0)
        shares = [thought_right if n == THOUGHT else OTHER_RIGHT for n in range(len(MANNERS))]
        contents.append(torch.stack([torch.cat([torch.tensor([p]), (1 - p) * worth]) for p in shares]))
    manners = torch.tensor([p * dice.lognormvariate(0, 0.3) for p in START], dtype=torch.float64)
    by_manner = [[list(row) for row in zip(*rows, strict=True)] for rows in texts]
    return TextWorld(tasks, by_manner, manners / manners.sum(), torch.stack(contents))


def _texts(a: int, b: int, number: int) -> tuple[str, ...]:
    """Return the answer with this number in each manner."""
    return (
        f"{number}",
        f"<think>{a} + {b} = {number}</think>\n<answer>{number}</answer>",
        f"<think></think>\n<answer>{number}</answer>",
        "<think></think>\n<answer></answer>",
        "<think>...</think>\n<answer>...</answer>",
    )


def tables_of(world: TextWorld) -> dict[str, Scores]:
    """Return whether the regular expression matches, the number is right, and there is a thought."""
    by_name, thought = rewards(), torch.zeros_like(world.contents)
    thought[:, THOUGHT] = 1.0
    matches = scores_of(world.judge(by_name[REGEX]))
    right = scores_of(world.judge(by_name[RIGHT]))
    return {"matches": matches, "right": right, "thought": thought, "sham": matches * (1 - thought)}


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train with each reward, and with three where thoughts are of no use."""
    figures = dict[str, Any]()
    for useful in (True, False):
        world = sums(seed, THOUGHT_RIGHT if useful else OTHER_RIGHT)
        tables = tables_of(world)
        for name, verifier in rewards().items():
            if useful or name in (RIGHT, BOTH, STRICT):
                report(f"format_regex, seed {seed}, {name}")
                paid = scores_of(world.judge(verifier))
                path = follow_texts(world, paid, tables, seed=seed, updates=UPDATES, lr=LR)
                figures[name if useful else f"{name}{USELESS}"] = path
    return figures


RULES = {
    "format_regex": VerdictRule(
        "share of answers that match and have no thought, at the end minus at the start, paid by the regular "
        "expression alone",
        lambda figures: figures[REGEX]["sham"][-1] - figures[REGEX]["sham"][0],
        margin=0.05,
        equal=True,
    ),
    "format_reward": VerdictRule(
        "share of answers with a thought at the end, paid by the regular expression and correctness minus by "
        "correctness alone",
        lambda figures: figures[BOTH]["thought"][-1] - figures[RIGHT]["thought"][-1],
        margin=0.05,
    ),
}


def table(results: Results) -> str:
    """Return the start, and where each reward leads."""
    head = ("paid by", "match the regular expression", "right", "with a thought", "match without a thought")
    runs = results.runs
    start = [spread([run[REGEX][key][0] for run in runs]) for key in runs[0][REGEX]]
    rows = [["(the start)", *start]]
    for name in runs[0]:
        rows.append([name, *(spread([run[name][key][-1] for run in runs]) for key in runs[0][name])])
    return markdown(head, rows)


def draw(results: Results, figure: Any) -> None:
    """Draw matches, right answers and matches without a thought by update, for two rewards."""
    panels = figure.subplots(1, 2, sharey=True)
    colors = {"matches": "#888888", "right": "#2a788e", "sham": "#d1495b"}
    labels = {"matches": "match", "right": "right", "sham": "match, no thought"}
    for axes, name in zip(panels, (REGEX, BOTH), strict=True):
        for key, color in colors.items():
            heights = [run[name][key][::10] for run in results.runs]
            curve(axes, range(0, UPDATES + 1, 10), heights, labels[key], color)
        axes.set(title=f"paid by {name}", xlabel="update", ylim=(0, 1))
    panels[0].set_ylabel("share of answers")
    panels[0].legend(frameon=False, fontsize="small")


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(10.0, 4.0))
