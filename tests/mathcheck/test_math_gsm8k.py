"""The verifier math on solutions of GSM8K's shape: each is right, and wrong once its answer is changed.

With POSTTRAIN_DATA set to a directory that holds gsm8k_test.jsonl, on all of them; otherwise on a
few made here.
"""

import json
import os
from fractions import Fraction
from pathlib import Path

from mathcheck.plugin.math import Math
from posttrain.types import Task

OWN = [
    ("Tom has 3 bags of 4 marbles, 3*4=<<3*4=12>>12.\nHe loses 2: 12-2=<<12-2=10>>10.", "10"),
    ("Each ticket costs $15, so 6 cost 6*15=$<<6*15=90>>90.", "90"),
    ("She reads 20 pages a day, 7*20=<<7*20=140>>140 a week.", "140"),
    ("The house costs 250,000+30,000=$<<250000+30000=280000>>280,000.", "280,000"),
    ("Half of 9 litres is 9/2=<<9/2=4.5>>4.5 litres.", "4.5"),
    ("He owes 5 and has 3, 3-5=<<3-5=-2>>-2.", "-2"),
    ("A quarter of 100% is 100%/4=<<100/4=25>>25%.\nSo it is 25 of 100.", "25"),
    ("1 hour is 60 minutes, 60*3=<<60*3=180>>180 minutes.", "180"),
    ("There are 12 eggs and 5 break: 12-5=<<12-5=7>>7 eggs.\nNot 12.", "7"),
    ("Nobody came, 0*8=<<0*8=0>>0 guests.", "0"),
    ("They drive 1,200 km in all, 600*2=<<600*2=1200>>1200 km.", "1200"),
    ("The price falls by $.50 to $3-.5=$<<3-.5=2.5>>2.50.", "2.5"),
]


def solutions() -> list[tuple[str, str]]:
    """The working and the answer of each."""
    directory = os.environ.get("POSTTRAIN_DATA")
    if not directory:
        return OWN
    text = (Path(directory) / "gsm8k_test.jsonl").read_text(encoding="utf-8")
    parts = [json.loads(line)["answer"].rpartition("####") for line in text.splitlines()]
    return [(working, answer.strip()) for working, _, answer in parts]


def mutations(answer: str) -> list[str]:
    """Five answers that are wrong: next to it, negated, ten times as large, two at once, another unit."""
    value = Fraction(answer.replace(",", ""))
    return [
        str(value + 1),
        str(-value or 2),
        str(10 * value or 10),
        f"{answer} or {value + 1}",
        f"{answer}%" if value else "1%",
    ]


def test_every_solution_is_right_and_its_mutations_are_wrong() -> None:
    math, refused, accepted = Math(), [], []
    for working, answer in solutions():
        task = Task(id="q", messages=(), answer=answer)
        if math(task, f"{working}\n#### {answer}").score != 1.0:
            refused.append(answer)
        assert len(set(mutations(answer))) == 5
        accepted += [
            (answer, w) for w in mutations(answer) if math(task, f"{working}\n#### {w}").score != 0.0
        ]
    assert not refused
    assert not accepted
