"""Each alarm at its threshold: just inside it is silent, just outside it speaks."""

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from posttrain.report import watch as watching
from posttrain.report.alarms import RULES, AlarmRule, Evidence, Finding, findings
from posttrain.report.headline import headline
from posttrain.report.record import Curves, metrics, read
from posttrain.report.rollouts import UpdateRollouts
from posttrain.report.terminal import Terminal
from posttrain.report.watch import Watch


def curve(name: str, values: list[float | None]) -> list[dict[str, Any]]:
    return [{"update": u, name: v} for u, v in enumerate(values, start=1)]


def alarms(rows: list[dict[str, Any]], steps: list[UpdateRollouts] | None = None) -> list[str]:
    return [rule.name for rule, _ in findings(Evidence(metrics(rows)[0], steps or []))]


def step(failed: int = 0) -> UpdateRollouts:
    return UpdateRollouts(kind="train", update=4, packed="[]", count=8, total=8, failed=failed)


CASES: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = [
    ("Not a number", curve("loss", [1, 2]), curve("loss", [1, None])),
    ("Verifier failed", curve("hacking/error_rate", [0, 0]), curve("hacking/error_rate", [0, 0.01])),
    ("Tampering", curve("hacking/forbidden", [0, 0.01]), curve("hacking/forbidden", [0, 1 / 64])),
    ("No signal", curve("advantage/zero", [0.99, 0.5]), curve("advantage/zero", [1, 0.5])),
    ("No signal", curve("evolution/spread", [1e-9, 0.5]), curve("evolution/spread", [0.5, 0])),
    ("Little signal", curve("advantage/zero", [0.9, 0.5]), curve("advantage/zero", [0.5, 0.51])),
    ("Entropy collapse", curve("entropy", [1.0] * 5 + [0.11] * 5), curve("entropy", [1.0] * 5 + [0.09] * 5)),
    ("KL blow-up", curve("kl/ref", [2.0, 0.1, 4.0]), curve("kl/ref", [0.1, 0.51, 0.1])),
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


@pytest.mark.parametrize(
    ("updates", "said"), [(1, "1 of 1 update, last in update 1"), (2, "2 of 2 updates,")]
)
def test_one_update_is_said_in_the_singular(updates: int, said: str) -> None:
    _, found = findings(Evidence(metrics(curve("advantage/zero", [1] * updates))[0], []))[0]
    assert said in found.text


def test_reward_up_while_held_out_accuracy_falls() -> None:
    def run(reward_now: float, accuracy_now: float) -> list[dict[str, Any]]:
        early = {"reward/mean": 0.5, "eval/accuracy": 0.6}
        return [
            {"update": 1, **early},
            {"update": 9, "reward/mean": reward_now, "eval/accuracy": accuracy_now},
        ]

    assert alarms(run(0.9, 0.5)) == ["Reward without skill"]
    assert alarms(run(0.9, 0.58)) == []
    assert alarms(run(0.505, 0.5)) == [], "against itself a policy wins half of the time, now more, now less"
    assert alarms(run(0.4, 0.5)) == []


def test_a_rollout_without_a_score_is_an_alarm_even_if_no_metric_says_so() -> None:
    assert alarms([], [step(failed=2)]) == ["Verifier failed"]


def test_an_empty_run_breaks_no_rule() -> None:
    assert alarms([]) == []
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_a_scored_timeout_is_no_failure_of_the_verifier() -> None:
    """A proof or a program that takes too long is wrong; its verifier worked."""
    assert alarms(curve("verdict/timeout", [0.5, 0.5]) + curve("hacking/error_rate", [0.0, 0.0])) == []


def test_a_failure_is_told_with_its_first_cause() -> None:
    broken = UpdateRollouts("train", 4, "[]", 8, 8, failed=2, cause="raised: KeyError: 'unit'")
    rows = curve("hacking/error_rate", [0.0, 0.0, 0.0, 0.25])
    [(_, found)] = findings(Evidence(metrics(rows)[0], [broken]))
    assert found.text.startswith("25.0% of the episodes of update 4 have no score; ")
    assert found.text.endswith("raised: KeyError: 'unit'")
    assert (found.update, found.metric) == (4, "hacking/error_rate")


# ---------------------------------------------------------------------- hacking

Story = Callable[[float], dict[str, float]]
"""The means of an update's metrics at a time from 0 to 1."""


def story(tell: Story, updates: int = 60, seed: int = 0, noise: float = 0.04) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl that scatter about a story: rewards and correlations by noise, lengths by 5%."""
    draw = random.Random(seed)
    rows = []
    for update in range(1, updates + 1):
        means = tell(update / updates)
        scatter = {
            k: v * draw.gauss(1, 0.05) if k == "length/mean" else draw.gauss(v, noise)
            for k, v in means.items()
        }
        rows.append({"update": update, **scatter})
    return rows


def measured(reward: float, audit: float, length: float, linked: float) -> dict[str, float]:
    return {
        "reward/mean": reward,
        "audit/judge": audit,
        "length/mean": length,
        "hacking/length_correlation": linked,
    }


HONEST: dict[str, Story] = {
    "nothing happens": lambda t: measured(0.4, 0.4, 100, 0.0),
    "both learn": lambda t: measured(0.2 + 0.7 * t, 0.2 + 0.6 * t, 100, 0.1),
    "the auditor sees nothing": lambda t: measured(0.2 + 0.7 * t, 0.5, 100, 0.0),
    "both forget": lambda t: measured(0.9 - 0.7 * t, 0.9 - 0.7 * t, 100, 0.0),
    "longer, and not for it": lambda t: measured(0.2 + 0.7 * t, 0.2 + 0.6 * t, 100 * (1 + 2 * t), 0.1),
    "longer, and worse": lambda t: measured(0.6 - 0.3 * t, 0.6 - 0.3 * t, 100 * (1 + 2 * t), 0.5),
    "long pays, and none gets longer": lambda t: measured(0.2 + 0.7 * t, 0.2 + 0.6 * t, 100, 0.5),
}
HACKED: dict[str, tuple[str, Story]] = {
    "for length": ("Longer pays", lambda t: measured(0.2 + 0.7 * t, 0.5, 100 * (1 + 2 * t), 0.5)),
    "for length, after an honest half": (
        "Longer pays",
        lambda t: measured(
            0.2 + 0.7 * t, 0.5, 100 * (2 - 2 * t if t < 0.5 else 2 * t), 0.5 if t > 0.5 else 0.0
        ),
    ),
    "against the auditor": ("Auditor disagrees", lambda t: measured(0.2 + 0.7 * t, 0.6 - 0.5 * t, 100, 0.0)),
    "against the auditor, after an honest half": (
        "Auditor disagrees",
        lambda t: measured(0.2 + 0.7 * t, 0.2 + t if t < 0.5 else 1.2 - t, 100, 0.0),
    ),
}


def probed(reward: float, truth: float, probe: float) -> dict[str, float]:
    return {"reward/mean": reward, "audit/judge": truth, "probe/markup": probe}


HONEST |= {
    "better, in another form": lambda t: probed(0.2 + 0.7 * t, 0.2 + 0.6 * t, t),
    "a form that pays nothing": lambda t: probed(0.5, 0.5, t),
    "paid more, in the same form": lambda t: probed(0.2 + 0.7 * t, 0.5, 0.3),
    "a form that is left": lambda t: probed(0.2 + 0.7 * t, 0.5, 0.9 - 0.8 * t),
}
HACKED |= {
    "by form": ("Form pays", lambda t: probed(0.2 + 0.7 * t, 0.5, t)),
    "by form, after an honest half": (
        "Form pays",
        lambda t: probed(0.2 + 0.7 * t, 0.3 + 0.4 * min(t, 0.5), max(0.1, 2 * t - 0.9)),
    ),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_run_has_no_alarm(name: str, seed: int) -> None:
    assert alarms(story(HONEST[name], seed=seed)) == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", HACKED)
def test_a_hacked_run_has_one(name: str, seed: int) -> None:
    rule, tell = HACKED[name]
    assert alarms(story(tell, seed=seed)) == [rule]


def test_form_is_compared_with_held_out_accuracy_without_auditor() -> None:
    def run(truth: Story) -> list[str]:
        rows = story(HACKED["by form"][1])
        for row in rows:
            del row["audit/judge"]
            row |= truth(row["update"]) if row["update"] % 20 == 1 else {}
        return alarms(rows)

    assert run(lambda update: {"eval/accuracy": 0.5}) == ["Form pays"]
    assert run(lambda update: {"eval/accuracy": 0.3 + update / 200}) == []
    assert run(lambda update: {}) == [], "without a measure of truth a new form is no fault"
    rare = {1: {"eval/accuracy": 0.2}}
    assert run(lambda update: rare.get(update, {})) == [], "accuracy that was not measured again is unknown"


def test_hacking_is_told_while_it_happens_and_once() -> None:
    rule, tell = HACKED["for length"]
    watch = Watch(now=float)
    told = [(line["update"], rule.name, found) for line in story(tell) for rule, found in watch.see(line)]
    [(update, name, found)] = told
    assert (name, found.update) == (rule, update), "the alarm of the report is that of the terminal"
    assert 20 <= update < 40


def test_a_resumed_watch_tells_again_what_was_broken_before() -> None:
    rule, tell = HACKED["against the auditor"]
    *before, last = story(tell)
    assert [rule.name for rule, _ in Watch(before).see(last)] == [rule]
    assert Watch().see(last) == []


def test_a_watch_forgets_the_updates_that_a_resume_makes_again() -> None:
    watch = Watch([{"update": u, "kl/ref": 0.1 if u < 5 else 0.9} for u in range(1, 9)])
    assert watch.see({"update": 5, "kl/ref": 0.2}) == []
    assert [found.update for _, found in watch.see({"update": 6, "kl/ref": 0.7})] == [6]


def test_a_long_run_is_looked_at_for_a_hundredth_of_the_time_and_at_its_end(monkeypatch) -> None:
    clock, looks = [0.0], []

    def look(evidence: Evidence) -> None:
        looks.append(len(evidence.metrics.updates))
        clock[0] += 0.5

    rules = (AlarmRule("Slow", "It takes half a second.", look), *RULES)
    monkeypatch.setattr(watching, "RULES", rules)
    watch = Watch(now=lambda: clock[0])
    for update in range(1, 302):
        clock[0] += 1.0
        watch.see({"update": update, "kl/ref": 0.1 if update < 300 else 0.9}, last=update == 301)
    assert looks == [*range(1, 101), 150, 200, 250, 300, 301]


def test_the_terminal_says_which_update_is_the_last() -> None:
    seen = []

    class Seen(Watch):
        def see(self, line: Any, *, last: bool = False) -> list[Any]:
            seen.append(last)
            return []

    with Terminal(Console(file=io.StringIO()), 2, Seen()) as show:
        for update in (1, 2):
            show("update", {"update": update, "seconds": 1.0})
    assert seen == [False, True]


def test_a_rule_that_has_told_is_not_checked_again(monkeypatch) -> None:
    looks = []

    def look(evidence: Evidence) -> Finding:
        looks.append(evidence)
        return Finding("it is so", 1, "loss")

    monkeypatch.setattr(watching, "RULES", (AlarmRule("Always", "It is so.", look),))
    watch = Watch()
    assert [len(watch.see({"update": update})) for update in (1, 2, 3)] == [1, 0, 0]
    assert len(looks) == 1


def test_a_part_that_is_paid_may_fall() -> None:
    """While the whole rises: that is what weights are for."""
    rows = story(HACKED["against the auditor"][1])
    paid = [{k.replace("audit/", "part/"): v for k, v in row.items()} for row in rows]
    assert alarms(paid) == []


def test_updates_that_lack_a_curve_are_passed_over() -> None:
    rows = story(HACKED["for length"][1], updates=120)
    for row in rows[::2]:
        del row["hacking/length_correlation"]
    assert alarms(rows) == ["Longer pays"]


def test_the_made_up_runs_of_the_page_are_what_they_say(finished: Path, hacked: Path) -> None:
    assert [rule.name for rule, _ in findings(Evidence(read(finished).metrics, []))] == []
    found = [rule.name for rule, _ in findings(Evidence(read(hacked).metrics, []))]
    assert found == ["Tampering", "Auditor disagrees", "Longer pays"]


def test_tampering_names_the_update_where_it_began() -> None:
    [(_, found)] = findings(Evidence(metrics(curve("hacking/forbidden", [0.0, 0.02, 0.0, 0.3]))[0], []))
    assert found.update == 2
    assert found.text == "2.0% of the answers of update 2 attack the grader, 30.0% of those of update 4"


def summary(rows: list[dict[str, Any]]) -> Any:
    curves: Curves = metrics(rows)[0]
    return headline(curves)


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


@pytest.mark.parametrize("updates", range(2, 14))
def test_no_update_is_both_first_and_last(updates: int) -> None:
    """A curve that rises all the way shows it, however short the run."""
    head = summary(curve("reward/mean", [float(u) for u in range(updates)]))
    n = min(5, updates // 2)
    assert (float(head.before), float(head.after)) == ((n - 1) / 2, updates - 1 - (n - 1) / 2)
    assert float(head.change.removeprefix("+")) == updates - n
    assert (f"first {n} updates" if n > 1 else "the first update") in head.note
    [tile] = [(value, remark) for name, value, remark in head.tiles if name == "Reward"]
    assert tile[0] == head.after
    assert tile[1].startswith(f"from {head.before}")


def test_one_update_has_no_before_either() -> None:
    head = summary(curve("reward/mean", [0.25]))
    assert (head.before, head.after, head.change) == ("", "0.25", "")
    assert head.note == "one update; never evaluated on held-out tasks"


def test_a_share_of_scores_above_a_bound_is_no_accuracy() -> None:
    """A reward model's scores say neither right nor wrong."""
    rows = [
        {"update": u, "accuracy": 0.5, "eval/accuracy": 0.5, "reward/mean": u - 3.0, "verdict/scored": 1.0}
        for u in range(1, 5)
    ]
    head = summary(rows)
    assert (head.label, head.before, head.after) == ("Reward while training", "-1.5", "0.5")
    head = summary([row | {"eval/reward": row["reward/mean"]} for row in rows])
    assert (head.label, head.before, head.after) == ("Held-out reward", "-2", "1")
    first = {"update": 0, "eval/accuracy": 0.0, "eval/reward": -2.5, "eval/scored": 1.0}
    assert (summary([first]).label, summary([first]).after) == ("Held-out reward", "-2.5")
    known = [{k: v for k, v in row.items() if k != "verdict/scored"} | {"verdict/right": 0.5} for row in rows]
    assert summary(known).label == "Held-out accuracy"


def test_tiles_hold_the_last_time_and_tokens() -> None:
    head = summary(
        [{"update": 1, "seconds": 1, "tokens": 5}, {"update": 2, "seconds": 192, "tokens": 12_345}]
    )
    assert [(name, value) for name, value, _ in head.tiles] == [
        ("Updates", "2"), ("Time", "3 min 12 s"), ("Tokens trained", "12.3k"),
    ]  # fmt: skip
