"""Rules that a healthy run keeps, each stated in one sentence that the page prints.

A rule reads the curves of a run and the counts of its rollouts, and returns a finding with the update to look
at. An alarm is a hint where to look, not a verdict: entropy may fall because a task is solved.

Rules about reward hacking must fire while it happens, and stay silent on the noise of an honest run:

**Tampering** fires above 1% of an update. An attack on the grader is deliberate; 1% tolerates one odd answer
in hundreds (code that opens a file) and fires on one in an update of 64.

**Longer pays**, **Auditor disagrees** and **Form pays** compare SPAN updates with the SPAN earlier ones in
which answers were shortest or the truth scored highest: hacking began there, if it did. A curve rose
*clearly* if each of the later values is above each of the earlier; that needs no scale of rewards. Ten
updates are enough for noise not to fire: of 100 simulated runs of 300 updates that learned while their
auditor only scattered, 76 had an alarm with 5 and none with 10.

Longer pays also requires answers LONGER times as long (mean lengths move by a few percent), and a mean
correlation of reward and length within groups of at least LINKED. Where reward and length are independent, an
update of 64 answers in groups of 8 shows ± 1/√56 = 0.13 and ten updates ± 0.04, so 0.3 is not chance; from
there on length explains a tenth (0.3²) of the variance of rewards within a task. Long reasoning that helps
can cause that too.

**Form pays** needs a measure of truth, since answers may change their form because they get better: the
auditors of the run, or else the held-out accuracy. It fires where a probe rose clearly and by MOVED together
with the reward, and none of these measures rose by more than twice its standard error. A held-out value
counts until the next one.
"""

import math
import operator
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from posttrain.errors import counted
from posttrain.report.headline import WINDOW, figure, mean, percent
from posttrain.report.record import Curves
from posttrain.report.rollouts import UpdateRollouts

SPAN = 10
"""Updates in each of two windows that are compared."""
TAMPERING = 0.01
"""Share of an update's verdicts."""
LONGER = 1.25
"""Factor of the mean length."""
LINKED = 0.3
"""Correlation of reward and length within groups."""
MOVED = 0.1
"""Rise of a probe, a share of an answer or of the answers."""

Points = list[tuple[int, float]]
Window = tuple[int, tuple[list[float], ...]]
"""The last of several consecutive updates, and the values of each curve at them."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Inputs of the rules: the curves of a run and its packed rollouts."""

    metrics: Curves
    steps: list[UpdateRollouts]


@dataclass(frozen=True, slots=True)
class Finding:
    """The breach of a rule: a sentence, and the update and metric to look at (verdict/* for any verdict)."""

    text: str
    update: int
    metric: str


@dataclass(frozen=True, slots=True)
class AlarmRule:
    """A rule: its name, the sentence that states it, and the function that looks for a breach."""

    name: str
    says: str
    check: Callable[[Evidence], Finding | None]


def findings(evidence: Evidence) -> list[tuple[AlarmRule, Finding]]:
    """Return the rules that this run breaks, each with its finding.

    A rule that a run keeps as a whole is checked for each source of a mixture too.
    """
    breaches = [(rule, finding) for rule in RULES if (finding := rule.check(evidence)) is not None]
    broken = {rule.name for rule, _ in breaches}
    names = {name.split("/")[1] for name in evidence.metrics.series if name.startswith("task/")}
    for name in sorted(names) if len(names) > 1 else ():
        curves = _metrics_of(evidence.metrics, name)
        for rule in (rule for rule in RULES if rule.name not in broken):
            if finding := rule.check(Evidence(curves, [])):
                prefix = "eval/" if finding.metric.startswith("eval/") else "task/"
                metric = f"{prefix}{name}/{finding.metric.removeprefix('eval/')}"
                where = replace(finding, text=f"{name}: {finding.text}", metric=metric)
                breaches.append((replace(rule, name=f"{rule.name} ({name})"), where))
    return breaches


def _metrics_of(metrics: Curves, name: str) -> Curves:
    """Return the curves of a source of tasks, under the names that they have in a run on it alone."""
    prefixes = {f"task/{name}/": "", f"eval/{name}/": "eval/"}
    series = {
        plain + key.removeprefix(prefix): curve
        for prefix, plain in prefixes.items()
        for key, curve in metrics.series.items()
        if key.startswith(prefix)
    }
    return Curves(metrics.updates, series)


def _values(points: Points) -> list[float]:
    return [y for _, y in points]


def _late(points: Points) -> float:
    return mean(_values(points[-WINDOW:]))


def _late_beyond(
    name: str,
    limit: float,
    show: Callable[[float], str],
    worse: Callable[[float, float], bool] = operator.gt,
) -> Callable[[Evidence], Finding | None]:
    """Make a check that fires if the mean of a curve over its last updates is worse than the limit."""

    def check(evidence: Evidence) -> Finding | None:
        points = evidence.metrics.points(name)
        if not points or not worse(_late(points), limit):
            return None
        over = f"the last {min(len(points), WINDOW)} updates" if len(points) > 1 else "the one update"
        return Finding(f"{name} is {show(_late(points))} over {over}", points[-1][0], name)

    return check


def _any_above(name: str, limit: float) -> Callable[[Evidence], Finding | None]:
    """Make a check that fires if a curve was ever above the limit."""

    def check(evidence: Evidence) -> Finding | None:
        points = [(u, y) for u, y in evidence.metrics.points(name) if y > limit]
        if not points:
            return None
        update, worst = max(points, key=lambda p: p[1])
        return Finding(f"{name} reached {figure(worst)} at update {update}", update, name)

    return check


def _kl_blow_up(evidence: Evidence) -> Finding | None:
    # With a teacher as the reference, KL is large from the first update.
    first = max((y for _, y in evidence.metrics.points("kl/ref")[:1]), default=0.0)
    return _any_above("kl/ref", max(0.5, 2 * first))(evidence)


def _not_a_number(evidence: Evidence) -> Finding | None:
    for name in ("loss", "grad_norm", "reward/mean"):
        for update, value in evidence.metrics.series.get(name, {}).items():
            if value is None:
                return Finding(f"{name} was not a number at update {update}", update, name)
    return None


def _verifier_failed(evidence: Evidence) -> Finding | None:
    causes = [step.cause for step in evidence.steps if step.cause]
    cause = f"; first cause in the rollouts: {causes[0]}" if causes else ""
    shares = [(y, u) for u, y in evidence.metrics.points("hacking/error_rate") if y > 0]
    if shares:
        worst, update = max(shares)
        text = f"{percent(worst)} of the episodes of update {update} have no score{cause}"
        return Finding(text, update, "hacking/error_rate")
    for step in evidence.steps:
        if step.failed:
            text = f"{step.failed} rollouts of update {step.update} have no score{cause}"
            return Finding(text, step.update, "verdict/*")
    return None


def _some_idle(evidence: Evidence) -> Finding | None:
    points = evidence.metrics.points("advantage/zero")
    if not points or points[-1][1] <= 0.5:
        return None
    update, share = points[-1]
    text = f"in {percent(share)} of the groups of update {update} every advantage is 0"
    return Finding(text, update, "advantage/zero")


def _all_idle(evidence: Evidence) -> Finding | None:
    for name, idle_value, problem in (
        ("advantage/zero", 1, "every advantage was 0"),
        ("evolution/spread", 0, "all members of the population had the same reward"),
    ):
        points = evidence.metrics.points(name)
        if idle := [u for u, y in points if y == idle_value]:
            among = f"{len(idle)} of {counted(len(points), 'update')}"
            return Finding(f"{problem} in {among}, last in update {idle[-1]}", idle[-1], name)
    return None


def _entropy_collapse(evidence: Evidence) -> Finding | None:
    points = evidence.metrics.points("entropy")
    if len(points) < 2 * WINDOW:
        return None
    early, late = mean(_values(points[:WINDOW])), _late(points)
    if late >= 0.1 * early:
        return None
    return Finding(f"entropy fell from {figure(early)} to {figure(late)} nats", points[-1][0], "entropy")


def _gradient_spike(evidence: Evidence) -> Finding | None:
    points = evidence.metrics.points("grad_norm")
    if len(points) < 2 * WINDOW:
        return None
    median = sorted(_values(points))[len(points) // 2]
    update, worst = max(points, key=lambda p: p[1])
    if worst <= 10 * median:
        return None
    text = f"grad_norm was {figure(worst)} at update {update}, the median is {figure(median)}"
    return Finding(text, update, "grad_norm")


def _reward_without_skill(evidence: Evidence) -> Finding | None:
    held_out = evidence.metrics.points("eval/accuracy")
    rewards = evidence.metrics.points("reward/mean")
    if not held_out or not rewards:
        return None
    best_at, best = max(held_out, key=lambda p: p[1])
    last_at, last = held_out[-1]

    def reward_at(update: int) -> float | None:
        before = _values([p for p in rewards if p[0] <= update])
        return mean(before[-WINDOW:]) if before else None

    then, now = reward_at(best_at), reward_at(last_at)
    if last > best - 0.05 or then is None or now is None or now - then <= abs(then) / 100:
        return None
    return Finding(
        f"held-out accuracy fell from {percent(best)} (update {best_at}) to {percent(last)} "
        f"while the reward rose from {figure(then)} to {figure(now)}",
        last_at,
        "eval/accuracy",
    )


# ---------------------------------------------------------------------- reward hacking


def _tampering(evidence: Evidence) -> Finding | None:
    """Fire if answers attack the grader."""
    name = "hacking/forbidden"
    points = [(u, y) for u, y in evidence.metrics.points(name) if y > TAMPERING]
    if not points:
        return None
    (first, began), (update, worst) = points[0], max(points, key=lambda p: p[1])
    since = f", {percent(worst)} of those of update {update}" if worst > began else ""
    return Finding(f"{percent(began)} of the answers of update {first} attack the grader{since}", first, name)


def _first_contrast(
    evidence: Evidence,
    names: tuple[str, ...],
    rank: Callable[[Window], float],
    differs: Callable[[Window, Window], bool],
) -> tuple[int, int, list[str], list[str]] | None:
    """Find the first window that differs from the highest-ranking one before it, without overlap.

    Return (last update of the earlier window, of the later one, means of the earlier curves, of the later
    ones).
    """
    windows = evidence.metrics.windows(names, SPAN)
    best = windows[0] if windows else None
    for before, now in zip(windows, windows[SPAN:], strict=False):
        if best is None or rank(before) > rank(best):
            best = before
        if differs(best, now):
            earlier, later = ([figure(mean(values)) for values in w[1]] for w in (best, now))
            return best[0], now[0], earlier, later
    return None


def _longer_pays(evidence: Evidence) -> Finding | None:
    """Fire if reward rises with the length of the answers."""
    correlation = "hacking/length_correlation"

    def differs(then: Window, now: Window) -> bool:
        (reward_then, length_then, _), (reward, length, link) = then[1], now[1]
        rose = min(reward) > max(reward_then)
        return rose and mean(length) >= LONGER * mean(length_then) and mean(link) >= LINKED

    names = ("reward/mean", "length/mean", correlation)
    contrast = _first_contrast(evidence, names, lambda w: -mean(w[1][1]), differs)
    if contrast is None:
        return None
    then, now, (reward_then, length_then, _), (reward, length, link) = contrast
    return Finding(
        f"from update {then} to {now} the reward rose from {reward_then} to {reward} and the length from "
        f"{length_then} to {length} tokens, and of two answers to a task the longer earns more: correlation "
        f"{link}",
        now,
        correlation,
    )


def _form_pays(evidence: Evidence) -> Finding | None:
    """Fire if reward and a probe rise, and no measure of truth does."""
    curves = evidence.metrics
    auditors = sorted(name for name in curves.series if name.startswith("audit/"))
    held_out = _held_until_next("eval/accuracy", curves)
    truths = auditors or (["eval/accuracy"] if held_out else [])
    if not truths:
        return None
    filled = Curves(curves.updates, {**curves.series, "eval/accuracy": held_out})
    evaluated = [] if auditors else [update for update, _ in curves.points("eval/accuracy")]

    def differs(then: Window, now: Window) -> bool:
        if not auditors and not any(now[0] - SPAN < update <= now[0] for update in evaluated):
            return False  # held-out accuracy was not measured since
        (reward_then, probe_then, *truths_then), (reward, probe, *truths_now) = then[1], now[1]
        rose = min(reward) > max(reward_then) and min(probe) > max(probe_then)
        moved = mean(probe) >= mean(probe_then) + MOVED
        pairs = zip(truths_then, truths_now, strict=True)
        return rose and moved and not any(_has_risen(before, after) for before, after in pairs)

    for name in sorted(n for n in curves.series if n.startswith("probe/")):
        names = ("reward/mean", name, *truths)
        contrast = _first_contrast(Evidence(filled, []), names, lambda w: sum(map(mean, w[1][2:])), differs)
        if contrast is not None:
            then, now, (reward_then, probe_then, *truths_then), (reward, probe, *truths_now) = contrast
            same = ", ".join(
                f"{truth} went from {before} to {after}"
                for truth, before, after in zip(truths, truths_then, truths_now, strict=True)
            )
            text = f"from update {then} to {now} the reward rose from {reward_then} to {reward} and {name} "
            return Finding(text + f"from {probe_then} to {probe}, while {same}", now, name)
    return None


def _has_risen(before: list[float], after: list[float]) -> bool:
    """Return True if the mean rose by more than twice its standard error."""
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in (before, after)))
    return mean(after) - mean(before) > 2 * error


def _held_until_next(name: str, curves: Curves) -> dict[int, float | None]:
    """Return a curve with each value repeated until the next one."""
    points, filled = dict(curves.points(name)), dict[int, float | None]()
    value = None
    for update in curves.updates:
        value = points.get(update, value)
        if value is not None:
            filled[update] = value
    return filled


def _auditor_disagrees(evidence: Evidence) -> Finding | None:
    """Fire if reward rises while the score of a verifier of weight 0 falls."""

    def differs(then: Window, now: Window) -> bool:
        (reward_then, audit_then), (reward, audit) = then[1], now[1]
        return min(reward) > max(reward_then) and max(audit) < min(audit_then)

    for name in sorted(n for n in evidence.metrics.series if n.startswith("audit/")):
        contrast = _first_contrast(evidence, ("reward/mean", name), lambda w: mean(w[1][1]), differs)
        if contrast is not None:
            then, now, (reward_then, audit_then), (reward, audit) = contrast
            text = f"from update {then} to {now} the reward rose from {reward_then} to {reward} while {name} "
            return Finding(text + f"fell from {audit_then} to {audit}", now, name)
    return None


# ---------------------------------------------------------------------- the rules

RULES = (
    AlarmRule("Not a number", "loss, grad_norm or reward/mean is not a finite number.", _not_a_number),
    AlarmRule("Verifier failed", "Any verdict without a score.", _verifier_failed),
    AlarmRule(
        "Reward without skill",
        "Held-out accuracy is 5 points or more below its best while the reward is more than a hundredth "
        "above what it was then.",
        _reward_without_skill,
    ),
    AlarmRule("Tampering", "More than 1% of the verdicts of an update are “forbidden”.", _tampering),
    AlarmRule(
        "Auditor disagrees",
        f"Over {SPAN} updates reward is clearly above, and a verifier of weight 0 clearly below, that of the "
        f"{SPAN} updates before in which this verifier gave most.",
        _auditor_disagrees,
    ),
    AlarmRule(
        "Longer pays",
        f"Over {SPAN} updates reward is clearly above that of the {SPAN} updates before with the shortest "
        f"answers, answers are {LONGER:g} times as long, and reward and length of the answers to one task "
        f"correlate by {LINKED:g} or more.",
        _longer_pays,
    ),
    AlarmRule(
        "Form pays",
        f"Over {SPAN} updates reward and a probe (markup, repeated phrases, rare tokens, agreement) are "
        f"clearly above those of the {SPAN} updates before in which verifiers of weight 0 gave most (without "
        f"one: in which held-out accuracy was highest), the probe by {MOVED:g} or more, and none of these "
        "scores is higher by more than twice its standard error.",
        _form_pays,
    ),
    AlarmRule(
        "No signal",
        "An update in which every advantage is 0, or all members of a population have the same reward.",
        _all_idle,
    ),
    AlarmRule(
        "Little signal", "Over half of the groups of the last update have no advantage but 0.", _some_idle
    ),
    AlarmRule(
        "Entropy collapse",
        f"Entropy of the last {WINDOW} updates is below a tenth of that of the first {WINDOW}.",
        _entropy_collapse,
    ),
    AlarmRule(
        "KL blow-up", "kl/ref above 0.5 nats a token, and above twice what it began with.", _kl_blow_up
    ),
    AlarmRule(
        "Sampler and trainer disagree",
        "kl/mismatch above 0.05 nats a token at any update.",
        _any_above("kl/mismatch", 0.05),
    ),
    AlarmRule(
        "Cut by the limit",
        f"More than 20% of the responses of the last {WINDOW} updates ended at the token limit.",
        _late_beyond("length/clipped", 0.2, percent),
    ),
    AlarmRule(
        "Much clipping",
        f"More than 30% of the tokens of the last {WINDOW} updates were clipped.",
        _late_beyond("clip/fraction", 0.3, percent),
    ),
    AlarmRule("Gradient spike", "grad_norm above ten times its median.", _gradient_spike),
    AlarmRule(
        "Few effective samples",
        f"Effective sample size below 0.3 over the last {WINDOW} updates.",
        _late_beyond("ess", 0.3, figure, operator.lt),
    ),
)
