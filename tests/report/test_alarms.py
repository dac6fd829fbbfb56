"""Each alarm at its threshold: just inside it is silent, just outside it speaks."""

from typing import Any

import pytest

from posttrain.report.alarms import RULES, Evidence, findings
from posttrain.report.headline import headline
from posttrain.report.record import Metrics, Record, metrics
from posttrain.report.rollouts import Step


def curve(name: str, values: list[float | None]) -> list[dict[str, Any]]:
    return [{"update": u, name: v} for u, v in enumerate(values, start=1)]


def alarms(rows: list[dict[str, Any]], steps: list[Step] | None = None) -> list[str]:
    return [rule.name for rule, _ in findings(Evidence(metrics(rows)[0], steps or []))]


def step(groups: int, equal: int, failed: int = 0, kind: str = "train") -> Step:
    return Step(kind=kind, update=4, packed="[]", shown=8, total=8, groups=groups, equal=equal, failed=failed)


CASES: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = [
    ("Not a number", curve("loss", [1, 2]), curve("loss", [1, None])),
    ("Verifier failed", curve("verdict/timeout", [0, 0]), curve("verdict/timeout", [0, 0.01])),
    ("No signal", curve("reward/group_std", [0.1, 0.2]), curve("reward/group_std", [0.1, 0.0])),
    ("Entropy collapse", curve("entropy", [1.0] * 5 + [0.11] * 5), curve("entropy", [1.0] * 5 + [0.09] * 5)),
    ("KL blow-up", curve("kl/ref", [0.5, 0.1]), curve("kl/ref", [0.51, 0.1])),
    ("Sampler and trainer disagree", curve("kl/mismatch", [0.05]), curve("kl/mismatch", [0.06])),
    (
        "Cut by the limit",
        curve("length/clipped", [0.9] + [0.2] * 5),
        curve("length/clipped", [0.0] + [0.21] * 5),
    ),
    ("Much clipping", curve("clip/fraction", [0.3] * 5), curve("clip/fraction", [0.31] * 5)),
    ("Gradient spike", curve("grad_norm", [1.0] * 9 + [10.0]), curve("grad_norm", [1.0] * 9 + [10.1])),
    ("Few effective samples", curve("ess", [0.3] * 5), curve("ess", [0.29] * 5)),
]


@pytest.mark.parametrize(("name", "quiet", "loud"), CASES, ids=[c[0] for c in CASES])
def test_a_rule_speaks_beyond_its_threshold_only(
    name: str, quiet: list[dict[str, Any]], loud: list[dict[str, Any]]
) -> None:
    assert alarms(quiet) == []
    assert alarms(loud) == [name]


def test_reward_up_while_held_out_accuracy_falls() -> None:
    def run(reward_now: float, accuracy_now: float) -> list[dict[str, Any]]:
        early = {"reward/mean": 0.5, "eval/accuracy": 0.6}
        return [
            {"update": 1, **early},
            {"update": 9, "reward/mean": reward_now, "eval/accuracy": accuracy_now},
        ]

    assert alarms(run(0.9, 0.5)) == ["Reward without skill"]
    assert alarms(run(0.9, 0.58)) == []
    assert alarms(run(0.4, 0.5)) == []


def test_groups_of_the_last_update_with_equal_rewards() -> None:
    assert alarms([], [step(8, 5)]) == ["Little signal"]
    assert alarms([], [step(8, 4)]) == []
    assert alarms([], [step(8, 8), step(8, 0)]) == []
    assert alarms([], [step(8, 8, kind="eval")]) == []


def test_a_rollout_without_a_score_is_an_alarm_even_if_no_metric_says_so() -> None:
    assert alarms([], [step(8, 0, failed=2)]) == ["Verifier failed"]


def test_an_empty_run_breaks_no_rule() -> None:
    assert alarms([]) == []
    assert len({rule.name for rule in RULES}) == len(RULES)


def summary(rows: list[dict[str, Any]]) -> Any:
    curves: Metrics = metrics(rows)[0]
    return headline(Record("run", "run", [], "", "", curves, [], []))


def test_the_headline_is_held_out_accuracy_before_and_after() -> None:
    head = summary(
        [{"update": 0, "eval/accuracy": 0.185}, {"update": 5}, {"update": 40, "eval/accuracy": 0.865}]
    )
    assert (head.label, head.before, head.after, head.change) == (
        "Held-out accuracy", "18.5%", "86.5%", "+68.0 points",
    )  # fmt: skip
    assert head.note == "update 0 → update 40"


def test_one_evaluation_has_no_before() -> None:
    head = summary([{"update": 0, "eval/accuracy": 0.2}])
    assert (head.before, head.after, head.change) == ("", "20.0%", "")


def test_without_evaluations_the_headline_says_what_it_shows() -> None:
    head = summary(curve("reward/mean", [0.0] * 5 + [1.0] * 5))
    assert (head.label, head.before, head.after) == ("Reward while training", "0", "1")
    assert "never evaluated" in head.note
    assert summary([]).after == "—"


def test_tiles_hold_the_last_time_and_tokens() -> None:
    head = summary(
        [{"update": 1, "seconds": 1, "tokens": 5}, {"update": 2, "seconds": 192, "tokens": 12_345}]
    )
    assert [(name, value) for name, value, _ in head.tiles] == [
        ("Updates", "2"), ("Time", "3 min 12 s"), ("Tokens trained", "12.3k"),
    ]  # fmt: skip
