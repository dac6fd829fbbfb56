"""The rows of `posttrain truth`: that they are all there, and that each says what it says."""

import io
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from rich.console import Console

from posttrain.math import pass_at_k
from posttrain.methods.build import CHOICES, build
from posttrain.methods.policy_gradient import PolicyGradient
from posttrain.methods.table import METHODS, REINFORCE
from posttrain.types import Batch, UserError
from posttrain_study import truth
from posttrain_study.truth import TruthRow, estimators, exact
from posttrain_study.truth.comparison import EXACT
from posttrain_study.truth.other_policies import step_along_gradient
from posttrain_study.truth.printed import MEANING, number, sections
from posttrain_study.truth.table import BECAUSE, JOINT, REASONS, SECTION, target
from posttrain_study.truth.world import World

pytestmark = (
    pytest.mark.full
)  # the table takes half a minute, and test_no_generated_part_is_stale makes it too

ONLINE = [name for name, line in METHODS.items() if line.loop == "online" and line.has_loss]


@pytest.fixture(scope="module")
def table() -> list[TruthRow]:
    """The whole table, computed once."""
    return truth.rows()


def found(table: list[TruthRow], section: str) -> dict[tuple[str, str], TruthRow]:
    """(name, quantity) -> row, of the section that begins so."""
    return {(r.name, r.quantity): r for r in table if r.section.startswith(section)}


def test_every_method_that_samples_has_its_rows(table: list[TruthRow]) -> None:
    names = [r.name for r in table if r.section == SECTION]
    assert names == [name for name in ONLINE for _ in range(3)]
    assert all(r.sentence for r in table)
    assert {r.quantity for r in table} == set(MEANING)


@pytest.mark.parametrize(
    "begins",
    [
        *("Expert iteration", "Pairs of Bradley", "DPO's gradient", "A judge", "DPO, by who", "KLQ", "TRPO"),
        *("Bradley and Terry's likelihood", "The best of n", "A policy that is right", "PPO's second"),
        *("V-trace", "Shaping", "DRO", "Where a KL enters"),
    ],
)
def test_what_other_files_look_at_is_in_it(table: list[TruthRow], begins: str) -> None:
    assert any(row.section.startswith(begins) for row in table)


def test_all_rows_of_a_name_have_one_verdict_and_one_sentence(table: list[TruthRow]) -> None:
    """Which are shown once, beside the numbers."""
    said = {(r.section, r.name, r.verdict, r.sentence) for r in table}
    assert len(said) == len({(r.section, r.name) for r in table})


def test_reasons_are_given_for_choices_that_exist() -> None:
    known = {name for functions in CHOICES.values() for name in functions}
    assert {*REASONS, *BECAUSE} <= known | {"turn_weight"}


def test_no_row_is_there_twice(table: list[TruthRow]) -> None:
    keys = [(r.section, r.name, r.quantity) for r in table]
    assert len(keys) == len(set(keys))


def test_verdicts_are_what_the_numbers_say(table: list[TruthRow]) -> None:
    methods = found(table, "Methods")
    for name in ONLINE:
        off, angle = methods[name, "error"].number, methods[name, "sine"].number
        wanted = "unbiased" if off < EXACT else "scaled" if angle < EXACT else "biased"
        assert methods[name, "error"].verdict == wanted, name


def test_who_is_unbiased(table: list[TruthRow]) -> None:
    verdicts = {r.name: r.verdict for r in table if r.section == SECTION}
    known = {
        "unbiased": {"reinforce", "rloo"},
        "scaled": {"dr_grpo"},
        "biased": {"grpo", "dapo", "gspo", "cispo"},
    }
    for verdict, names in known.items():
        assert {verdicts[name] for name in names} == {verdict}


def test_the_sentence_names_the_choice_that_bends(table: list[TruthRow]) -> None:
    why = {r.name: r.sentence for r in table if r.section == SECTION}
    assert "deviation" in why["grpo"]
    assert "1/length" in why["grpo"]
    assert "1/length" not in why["dapo"]
    assert "tokens that it divides by" in why["dapo"]
    assert "constant" in why["dr_grpo"]
    assert "deviation" not in why["dr_grpo"]


def test_the_target_of_a_penalised_method_is_the_penalised_objective(short: World) -> None:
    method = replace(REINFORCE, kl_in_reward=0.3)
    gap = short.cached_logp(short.policy) - short.cached_logp(short.reference)
    paid = short.with_rewards(short.reward - 0.3 * gap)
    torch.testing.assert_close(target(short, method), exact.gradient(paid), rtol=1e-10, atol=1e-10)


def test_the_order_of_the_baselines(table: list[TruthRow]) -> None:
    v = {name: r.number for (name, _), r in found(table, "Baselines").items()}
    assert v["constant, optimal"] < v["constant E[R]"] < v["none"]
    assert v["constant E[R]"] < v["running mean of 3"] < v["none"]
    assert v["constant E[R]"] < v["leave one out, K = 4"] < v["leave one out, K = 2"]
    assert v["group mean, K = 4"] == pytest.approx(v["leave one out, K = 4"], rel=1e-12)
    assert v["V of each state"] < v["constant E[R]"]
    assert v["optimal for each state"] < v["optimal for each token"] < v["V of each state"]


def test_a_running_mean_costs_its_own_variance(short: World, table: list[TruthRow]) -> None:
    """Var = that of the constant E[R], and Var(b) E|∇log π|²: b has no part in the answer."""
    p, R = exact.chances(short), short.returns
    mean = float(p @ R)
    weights = torch.tensor([0.9**2, 0.9, 1.0], dtype=torch.float64) * 0.1
    weights = weights / weights.sum()
    noise = float(weights.square().sum() * (p @ (R - mean).square()))
    fixed = exact.trace_of_covariance(short, (R - mean)[:, None] * short.mask)
    more = noise * float(p @ exact.answer_scores(short).square().sum(1))
    measured = found(table, "Baselines")["running mean of 3", "variance"].number
    assert measured == pytest.approx(fixed + more, rel=1e-9)


def test_a_wrong_critic_bends_gae_less_and_less_up_to_lambda_1(table: list[TruthRow]) -> None:
    rows = found(table, "GAE")
    lams = (0, 0.5, 0.95, 1)
    wrong = [rows[f"another policy's V, λ = {lam}", "error"] for lam in lams]
    assert wrong[0].number > wrong[1].number > wrong[2].number > 0.01
    assert [r.verdict for r in wrong] == ["biased"] * 3 + ["unbiased"]
    right = [rows[f"true V, λ = {lam}", "error"].verdict for lam in lams]
    assert right == ["unbiased"] * 4
    spread = [rows[f"true V, λ = {lam}", "variance"].number for lam in lams]
    assert spread == sorted(spread)


def test_normalisation_over_a_batch_comes_right_in_direction_alone(
    table: list[TruthRow], short: World
) -> None:
    rows = found(table, "Dividing by the batch's")
    sines = [r.number for (_, q), r in rows.items() if q == "sine"]
    lengths = [r.number for (_, q), r in rows.items() if q == "length · σ"]
    assert sines == sorted(sines, reverse=True)
    assert sines[-1] < sines[0] / 2
    assert abs(lengths[-1] - 1) < 0.1 < abs(lengths[0] - 1)


def test_the_weight_of_a_task_tends_to_one_over_the_deviation() -> None:
    for p in (0.1, 0.5, 0.8):
        many = estimators.task_weight(p, 400)
        assert many == pytest.approx((p * (1 - p)) ** -0.5, rel=0.05)
    assert estimators.task_weight(0.02, 8) < 0.02**-0.5 / 2


def test_a_cap_trades_bias_for_variance(table: list[TruthRow]) -> None:
    rows = found(table, "A sampler")
    caps = ("1", "2", "3", "inf")
    off = [rows[f"answer's weight, cap {cap}", "error"].number for cap in caps]
    spread = [rows[f"answer's weight, cap {cap}", "variance"].number for cap in caps]
    assert off == sorted(off, reverse=True)
    assert off[-1] < EXACT < off[-2]
    assert spread == sorted(spread)
    assert rows["token's weight, cap inf", "error"].number > 0.1


def test_after_an_epoch_only_the_whole_answers_weight_is_right(table: list[TruthRow], short: World) -> None:
    after = step_along_gradient(short)
    nats = float(exact.divergence(after, after.old, after.policy).detach())
    assert nats == pytest.approx(0.02, rel=1e-5)
    rows = found(table, "The second epoch")
    right = {name for (name, _), r in rows.items() if r.verdict == "unbiased"}
    assert right == {"ratio of the answer"}
    assert rows["ratio by token", "error"].number < rows["no ratio", "error"].number
    assert rows["ratio by token, clipped", "variance"].number < rows["ratio by token", "variance"].number


def test_estimators_of_the_divergence(table: list[TruthRow]) -> None:
    rows = found(table, "Estimators")
    names = ("k1", "k2", "k3")
    fresh = [rows[f"{k} on fresh samples", "value / KL"].verdict for k in names]
    assert fresh == ["unbiased", "biased", "unbiased"]
    assert all(rows[f"{k} on another policy's", "value / KL"].verdict == "biased" for k in names)
    assert rows["k1 in the loss", "gradient error"].number == pytest.approx(1, abs=1e-10)
    assert rows["k1 in the reward", "gradient error"].verdict == "unbiased"


def test_where_a_kl_enters(table: list[TruthRow]) -> None:
    rows = found(table, "Where a KL enters")
    right = {
        samples: {name for (name, q), row in rows.items() if q == samples and row.number < EXACT}
        for samples in ("fresh", "older")
    }
    weighed = {name for name, _ in rows if "unbiased" in name or "forward" in name}
    assert len(weighed) == 4
    assert right["older"] == weighed | {"kl_from_old: KL(π_old ‖ π)"}
    of_loss = {"in the loss, k2: KL(π ‖ π_ref)", "in the loss, k3: KL(π_ref ‖ π)"}
    assert right["fresh"] == weighed | of_loss | {"in the reward, k1: KL(π ‖ π_ref)"}
    noise = {name: row.number for (name, q), row in rows.items() if q == "noise"}
    for direction, divergence in (("unbiased", "KL(π ‖ π_ref)"), ("forward", "KL(π_ref ‖ π)")):
        quiet, loud = (noise[f"in the loss, {direction}_{k}: {divergence}"] for k in ("k3", "k1"))
        assert quiet * 10 < loud
    passes = {name: row.number for (name, q), row in rows.items() if q == "passes"}
    assert passes["kl_from_old: KL(π_old ‖ π)"] == 0
    assert passes["in the reward, k1: KL(π ‖ π_ref)"] == 2
    assert all(passes[name] == 1 for name in weighed | of_loss)


def test_the_best_of_two_is_estimated_by_pass_at_k_alone(table: list[TruthRow]) -> None:
    rows = found(table, "The best of two")
    assert rows["pass_at_k, k = 2", "error"].verdict == "unbiased"
    assert rows["leave one out", "error"].verdict == "biased"


def test_a_credit_that_is_new_is_measured_and_named(short: World) -> None:
    """The table needs to know nothing of a choice to blame it."""

    def squared(returns: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
        return returns.square()

    rows = list(truth.table.measure_methods({"new": replace(REINFORCE, credit=squared)}))
    assert {r.verdict for r in rows} == {"biased"}
    assert "squared" in rows[0].sentence


def test_no_bias_is_explained_by_what_makes_a_method_unbiased() -> None:
    """Whatever bends it: a surrogate, a penalty, or what a class of one's own does with its choices."""

    def doubled(log_ratio: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        return -2 * advantage * log_ratio

    class Worse(PolicyGradient):
        def prepare(self, batch: Batch) -> Batch:
            return super().prepare(replace(batch, reward=-batch.reward))

    chosen = {f.name: getattr(REINFORCE, f.name) for f in fields(PolicyGradient)}
    named = {
        "surrogate": replace(REINFORCE, surrogate=doubled),
        "penalty": replace(REINFORCE, kl_in_loss=0.1),
        "class": Worse(**chosen),
        "none": REINFORCE,
    }
    why = {r.name: (r.verdict, r.sentence) for r in truth.table.measure_methods(named)}
    assert why["surrogate"] == ("scaled", "doubled weighs tokens otherwise")
    assert why["penalty"] == ("biased", REASONS["k3"])
    assert why["class"] == ("biased", JOINT)
    assert why["none"] == ("unbiased", BECAUSE["raw"])


def test_one_method_has_its_own_rows_alone() -> None:
    rows = truth.rows("grpo")
    assert [(r.name, r.quantity) for r in rows] == [("grpo", q) for q in ("error", "sine", "variance")]


def test_the_page_and_the_terminal_show_every_row(table: list[TruthRow]) -> None:
    page, out = truth.page(table), io.StringIO()
    truth.show(table, Console(file=out, width=400))
    for row in table:
        for text in (row.section, row.name, number(row.number), row.verdict):
            assert text in page
            assert text in out.getvalue()
        assert row.sentence in out.getvalue()
    widths = {len(line.split("|")) for line in page.splitlines() if line.startswith("| none ")}
    assert widths == {6}
    assert len(sections(table)) == page.count("### ")


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("grpoo", "did you mean 'grpo'?"),
        ("sft", "one of reinforce"),
        ("es", "one of reinforce"),
        ("zzz", f"one of {next(iter(METHODS))}"),
    ],
)
def test_an_unknown_method_is_answered_with_the_nearest(name: str, mend: str) -> None:
    with pytest.raises(UserError, match=r"method|samples") as raised:
        truth.command(name)
    assert raised.value.fix.startswith(mend)


def test_the_command_prints_one_method(capsys: pytest.CaptureFixture[str]) -> None:
    truth.command("rloo")
    assert "rloo" in capsys.readouterr().out


def test_pass_at_k_needs_no_more_than_the_groups_of_the_table() -> None:
    """Or the line could not be measured."""
    method = build("pass_at_k", {}, horizon=3)
    four = torch.zeros(4, dtype=torch.long)
    assert method.credit(torch.ones(4), four).shape == (4,)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="needs at least"):
        partial(pass_at_k.pass_at_k, k=4)(torch.ones(4), four)
