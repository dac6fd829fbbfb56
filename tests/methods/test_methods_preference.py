"""Preferences and reward models: loss and gradient of each line against its paper's, in plain Python."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch

from posttrain.math import masked
from posttrain.methods.build import build
from posttrain.methods.preference import Preference, Unpaired
from posttrain.methods.reward_model import ListwiseReward, PairwiseReward, PointwiseReward
from posttrain.methods.table import METHODS
from posttrain.types import PROBE, Batch, Method, Outputs

SEEDS = range(4)
Update = Callable[..., tuple[Batch, Outputs]]
Gradients = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
Slopes = dict[tuple[int, int], float]
Found = tuple[float, Slopes]
"""The loss of a step, and its derivative by each trained token's log-probability or value."""


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def trained(batch: Batch) -> dict[int, list[int]]:
    """Positions of each row's trained tokens, of the rows that have any."""
    found = {i: [t for t, on in enumerate(m) if on] for i, m in enumerate(batch.mask.tolist())}
    return {i: chosen for i, chosen in found.items() if chosen}


def worths(batch: Batch) -> dict[int, float]:
    return {i: math.fsum(batch.reward[i, t].item() for t in chosen) for i, chosen in trained(batch).items()}


def groups(batch: Batch) -> list[list[tuple[int, int]]]:
    """(preferred, other) of each group that has such pairs."""
    R, found = worths(batch), []
    for g in sorted(set(batch.group.tolist())):
        rows = [i for i in R if int(batch.group[i]) == g]
        pairs = [(w, o) for w, o in product(rows, rows) if R[w] > R[o]]
        found += [pairs] if pairs else []
    return found


# ---------------------------------------------------------------- pairs


@dataclass(frozen=True)
class Paper:
    """A method of pairs as its paper states it: what an answer is worth, and what a margin costs."""

    worth: Callable[[list[float], list[float]], tuple[float, float]]
    """(log π, log π_ref) of an answer's tokens -> (u, ∂u/∂ log π of each token)."""
    loss: Callable[[float], float]
    slope: Callable[[float], float]
    imitate: float = 0.0
    """How much the mean negative log-likelihood of the preferred answer counts."""


def ratio(p: list[float], q: list[float]) -> tuple[float, float]:
    return math.fsum(p) - math.fsum(q), 1.0


def mean_ratio(p: list[float], q: list[float]) -> tuple[float, float]:
    return mean(p) - mean(q), 1 / len(p)


def likelihood(p: list[float], q: list[float]) -> tuple[float, float]:
    return mean(p), 1 / len(p)


def odds(p: list[float], q: list[float]) -> tuple[float, float]:
    """log P/(1 - P), P the geometric mean; 1/(1 - P) of the mean's own slope."""
    P = math.exp(mean(p))
    return math.log(P / (1 - P)), 1 / (1 - P) / len(p)


def jensen_shannon(p: list[float], q: list[float]) -> tuple[float, float]:
    """log 2u/(1 + u) of u = π/π_ref, and 1/(1 + u)."""
    u = math.exp(ratio(p, q)[0])
    return math.log(2 * u / (1 + u)), 1 / (1 + u)


def dpo(worth: Callable[..., tuple[float, float]] = ratio, beta: float = 0.1, imitate: float = 0.0) -> Paper:
    """-log σ(β h); arXiv:2305.18290, eq. 7."""
    return Paper(worth, lambda h: softplus(-beta * h), lambda h: -beta * sigma(-beta * h), imitate)


PAIRED: Mapping[str, Paper] = {
    "dpo": dpo(),
    "online_dpo": dpo(),
    "dpo_sft": dpo(imitate=1.0),
    "dpo_length": dpo(mean_ratio, 5.0),
    "f_dpo": dpo(jensen_shannon),
    # Mitchell 2023, eq. 3: one label in ten is held to be the other way round.
    "cdpo": Paper(
        ratio,
        lambda h: 0.9 * softplus(-0.1 * h) + 0.1 * softplus(0.1 * h),
        lambda h: -0.1 * 0.9 * sigma(-0.1 * h) + 0.1 * 0.1 * sigma(0.1 * h),
    ),
    # arXiv:2403.00409, eq. 12
    "rdpo": Paper(
        ratio,
        lambda h: (0.9 * softplus(-0.1 * h) - 0.1 * softplus(0.1 * h)) / 0.8,
        lambda h: (-0.1 * 0.9 * sigma(-0.1 * h) - 0.1 * 0.1 * sigma(0.1 * h)) / 0.8,
    ),
    # arXiv:2310.12036, eq. 17: 1/(2 τ) with τ = 0.1
    "ipo": Paper(ratio, lambda h: (h - 5) ** 2, lambda h: 2 * (h - 5)),
    # arXiv:2309.06657, eq. 9
    "slic": Paper(ratio, lambda h: max(0.0, 1 - 0.1 * h), lambda h: -0.1 if 0.1 * h < 1 else 0.0),
    # arXiv:2405.14734, eq. 6
    "simpo": Paper(likelihood, lambda h: softplus(1 - 2 * h), lambda h: -2 * sigma(1 - 2 * h)),
    # arXiv:2403.07691, eqs. 6 and 7, λ = 0.1
    "orpo": Paper(odds, lambda h: 0.1 * softplus(-h), lambda h: -0.1 * sigma(-h), 1.0),
}


def paired(name: str, batch: Batch, out: Outputs) -> Found:
    """The mean over groups of the mean over their pairs."""
    assert batch.logp_ref is not None
    paper, rows, total = PAIRED[name], trained(batch), 0.0
    slopes: Slopes = {}
    each: dict[int, tuple[float, float]] = {}
    for i, chosen in rows.items():
        p, q = ([float(x[i, t]) for t in chosen] for x in (out.logp, batch.logp_ref))
        each[i] = paper.worth(p, q)
    for pairs in (found := groups(batch)):
        for w, o in pairs:
            h, share = each[w][0] - each[o][0], 1 / len(found) / len(pairs)
            nll = -mean([float(out.logp[w, t]) for t in rows[w]])
            total += share * (paper.loss(h) + paper.imitate * nll)
            for i, sign in ((w, 1), (o, -1)):
                for t in rows[i]:
                    own = sign * paper.slope(h) * each[i][1]
                    own -= paper.imitate / len(rows[w]) if i == w else 0.0
                    slopes[i, t] = slopes.get((i, t), 0.0) + share * own
    return total, slopes


# ---------------------------------------------------------------- answers that stand alone


def measured(batch: Batch) -> float:
    """The mean log-ratio of the probes before the update, as a KL: not below 0."""
    assert batch.logp_old is not None
    assert batch.logp_ref is not None
    gaps = [
        math.fsum(float(batch.logp_old[i, t] - batch.logp_ref[i, t]) for t in chosen)
        for i, chosen in trained(batch).items()
        if int(batch.version[i, chosen[0]]) == PROBE
    ]
    return max(0.0, mean(gaps))


def kto(batch: Batch, out: Outputs) -> Found:
    """Mean over answers of 1 - σ(β r - β z), or of 1 - σ(β z - β r); arXiv:2402.01306, eqs. 7 and 8."""
    assert batch.logp_ref is not None
    z, R, total, slopes = measured(batch), worths(batch), 0.0, dict[tuple[int, int], float]()
    answers = {i: c for i, c in trained(batch).items() if int(batch.version[i, c[0]]) != PROBE}
    for i, chosen in answers.items():
        r = math.fsum(float(out.logp[i, t] - batch.logp_ref[i, t]) for t in chosen)
        sign = 1 if R[i] > 0 else -1
        v = sigma(sign * 0.1 * (r - z))
        total += (1 - v) / len(answers)
        slopes |= dict.fromkeys(((i, t) for t in chosen), -0.1 * sign * v * (1 - v) / len(answers))
    return total, slopes


# ---------------------------------------------------------------- reward models


def scores(batch: Batch, out: Outputs) -> dict[int, float]:
    assert out.value is not None
    return {i: math.fsum(float(out.value[i, t]) for t in c) for i, c in trained(batch).items()}


def at_marks(batch: Batch, by_row: dict[int, float]) -> Slopes:
    return {(i, t): x for i, x in by_row.items() for t in trained(batch)[i]}


def compared(batch: Batch, out: Outputs, margin: float, smoothed: float, centre: float = 0.0) -> Found:
    """-(1 - ε) log σ(h) - ε log σ(-h) of h = s_w - s_o - m (R_w - R_o), and the centring beside."""
    s, R, total, slopes = scores(batch, out), worths(batch), 0.0, dict[int, float]()
    for pairs in (found := groups(batch)):
        for w, o in pairs:
            h, share = s[w] - s[o] - margin * (R[w] - R[o]), 1 / len(found) / len(pairs)
            off = centre * (s[w] + s[o]) ** 2
            total += share * ((1 - smoothed) * softplus(-h) + smoothed * softplus(h) + off)
            slope = -(1 - smoothed) * sigma(-h) + smoothed * sigma(h)
            for i, sign in ((w, 1), (o, -1)):
                slopes[i] = slopes.get(i, 0.0) + share * (sign * slope + 2 * centre * (s[w] + s[o]))
    return total, at_marks(batch, slopes)


def ranked(batch: Batch, out: Outputs) -> Found:
    """-log of the chance that each answer is drawn before all that are worth less."""
    s, total, slopes = scores(batch, out), 0.0, dict[int, float]()
    for pairs in (found := groups(batch)):
        for first in {w for w, _ in pairs}:
            field = [first, *(o for w, o in pairs if w == first)]
            Z = math.fsum(math.exp(s[j]) for j in field)
            total += (math.log(Z) - s[first]) / len(found)
            for j in field:
                pull = math.exp(s[j]) / Z - (j == first)
                slopes[j] = slopes.get(j, 0.0) + pull / len(found)
    return total, at_marks(batch, slopes)


def pointwise(batch: Batch, out: Outputs, *, classified: bool, by_token: bool) -> Found:
    """Each mark against its own label, in the mean over answers (or over marks)."""
    assert out.value is not None
    rows = trained(batch)
    count = sum(map(len, rows.values())) if by_token else len(rows)
    total, slopes = 0.0, dict[tuple[int, int], float]()
    for i, chosen in rows.items():
        for t in chosen:
            s, y = float(out.value[i, t]), float(batch.reward[i, t])
            cross = y * softplus(-s) + (1 - y) * softplus(s)
            total += (cross if classified else (s - y) ** 2 / 2) / count
            slopes[i, t] = ((sigma(s) if classified else s) - y) / count
    return total, slopes


SCORED: Mapping[str, Callable[[Batch, Outputs], Found]] = {
    "reward": lambda b, o: compared(b, o, margin=0.0, smoothed=0.0),
    "reward_smoothed": lambda b, o: compared(b, o, margin=0.0, smoothed=0.1),
    "reward_margin": lambda b, o: compared(b, o, margin=1.0, smoothed=0.0),
    "reward_ranking": ranked,
    "reward_regression": lambda b, o: pointwise(b, o, classified=False, by_token=False),
    "reward_classification": lambda b, o: pointwise(b, o, classified=True, by_token=False),
    "process_reward": lambda b, o: pointwise(b, o, classified=True, by_token=True),
}
LINES = [*PAIRED, "kto", *SCORED]


def test_every_line_of_the_table_has_a_formula_here() -> None:
    family = (Preference, Unpaired, PairwiseReward, ListwiseReward, PointwiseReward)
    assert set(LINES) == {n for n, row in METHODS.items() if isinstance(row.method, family)}


def formula(name: str, batch: Batch, out: Outputs) -> Found:
    if name in PAIRED:
        return paired(name, batch, out)
    return kto(batch, out) if name == "kto" else SCORED[name](batch, out)


def with_a_failed_row(made: tuple[Batch, Outputs]) -> tuple[Batch, Outputs]:
    """A row that no formula may count, though its group is otherwise of two kinds."""
    batch, out = made
    batch.mask[3] = False
    return batch, out


def agree(method: Method, found: Found, batch: Batch, out: Outputs, gradients: Gradients) -> None:
    total, d_logp, d_entropy, d_value, *_ = gradients(method, batch, out)
    assert total.item() == pytest.approx(found[0], rel=1e-6)
    wanted = torch.zeros_like(out.logp)
    for (i, t), slope in found[1].items():
        wanted[i, t] = slope
    assert bool(wanted.any())
    moved, still = (d_value, d_logp) if "head" in method.needs else (d_logp, d_value)
    torch.testing.assert_close(moved, wanted, rtol=1e-5, atol=1e-9)
    assert not still.any()
    assert not d_entropy.any()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("K", [2, 4])
@pytest.mark.parametrize("name", LINES)
def test_loss_and_gradient_are_the_papers(
    name: str, K: int, seed: int, update: Update, gradients: Gradients
) -> None:
    batch, out = with_a_failed_row(update(seed, K=max(K, 4)))
    if K == 2:  # a failed row leaves one group without a pair
        batch, out = two_of_each(batch, out)
    agree(build(name, {}, horizon=16), formula(name, batch, out), batch, out, gradients)


def two_of_each(batch: Batch, out: Outputs) -> tuple[Batch, Outputs]:
    """Of each group the first row of the highest reward and the first of the lowest, and the probes."""
    total = masked.row_sum(batch.reward, batch.mask)
    rows = [i for i in range(len(batch)) if int(batch.version[i, 1]) == PROBE]
    for g in batch.group.unique():
        own = (batch.group == g).nonzero().flatten()
        rows += [int(own[total[own].argmax()]), int(own[total[own].argmin()])]
    index = torch.tensor(list(dict.fromkeys(rows)))
    assert out.value is not None
    return batch.rows(index), Outputs(out.logp[index], out.entropy[index], out.value[index])


def test_the_updates_tried_have_what_the_formulas_tell_apart(update: Update) -> None:
    """Ties within groups that have pairs, groups of several pairs, hinges on both sides, z at 0 and above."""
    kinds, hinges, tied, sizes = set(), set(), 0, set()
    for seed in SEEDS:
        batch, out = with_a_failed_row(update(seed))
        assert batch.logp_ref is not None
        kinds.add(measured(batch) > 0)
        R = worths(batch)
        sizes |= {len(pairs) for pairs in groups(batch)}
        tied += sum(R[i] == R[j] and i < j for i, j in product(R, R) if batch.group[i] == batch.group[j])
        wide = masked.row_sum(5 * (out.logp - batch.logp_ref), batch.mask)
        hinges |= {float(wide[w] - wide[o]) * 0.1 < 1 for pairs in groups(batch) for w, o in pairs}
    assert kinds == {True, False}
    assert hinges == {True, False}
    assert tied > 3
    assert len(sizes) > 1


@pytest.mark.parametrize("seed", SEEDS)
def test_the_hinge_lets_go_of_pairs_that_are_far_apart(
    seed: int, update: Update, gradients: Gradients
) -> None:
    batch, out = update(seed)
    assert batch.logp_ref is not None
    far = replace(out, logp=batch.logp_ref + 5 * (out.logp - batch.logp_ref))
    agree(build("slic", {}, horizon=16), formula("slic", batch, far), batch, far, gradients)


@pytest.mark.parametrize("seed", SEEDS)
def test_centring_adds_its_square_at_both_sides(seed: int, update: Update, gradients: Gradients) -> None:
    batch, out = with_a_failed_row(update(seed))
    found = compared(batch, out, margin=0.3, smoothed=0.0, centre=0.2)
    agree(build("reward", {"margin": 0.3, "centre": 0.2}, horizon=16), found, batch, out, gradients)


# ---------------------------------------------------------------- probes


def test_what_the_probes_measure_is_carried(update: Update) -> None:
    """The mean of their log-ratios in nats an answer, at least 0; whatever the other rows say."""
    method = build("kto", {}, horizon=16)
    signs = set()
    for seed in SEEDS:
        batch, _ = update(seed)
        assert batch.logp_old is not None
        found = method.prepare(replace(batch, state=method.start)).state
        assert found == {"kl": pytest.approx(measured(batch), abs=1e-9)}
        signs.add(found["kl"] > 0)
        probes = (batch.version == PROBE).any(-1)
        other = torch.where(probes[:, None], batch.logp_old, batch.logp_old - 3)
        again = method.prepare(replace(batch, logp_old=other, state=method.start)).state
        assert again == found
        lower = replace(batch, logp_old=batch.logp_old - 30, state=method.start)
        assert method.prepare(lower).state == {"kl": 0.0}
    assert signs == {True, False}


def test_probes_are_measured_and_not_learnt(update: Update, gradients: Gradients) -> None:
    batch, out = update(1)
    method = build("kto", {}, horizon=16)
    probes = (batch.version == PROBE).any(-1)
    assert not method.weight(batch)[probes].any()
    assert bool(method.weight(batch)[~probes].any(-1).all())
    _, d_logp, *_ = gradients(method, batch, out)
    assert not d_logp[probes].any()
    turned = replace(batch, reward=torch.where(probes[:, None], 1 - batch.reward, batch.reward))
    assert torch.equal(gradients(method, turned, out)[1], d_logp), "nobody judged them"


def test_without_a_probe_the_origin_is_0(update: Update) -> None:
    batch, _ = update(1)
    method = build("kto", {}, horizon=16)
    plain = replace(batch, version=torch.zeros_like(batch.version), state=method.start)
    assert method.prepare(plain).state == {"kl": 0.0}
    failed = replace(batch, mask=batch.mask & (batch.version != PROBE), state=method.start)
    assert method.prepare(failed).state == {"kl": 0.0}
    later = method.prepare(replace(plain, state={"kl": 0.7}))
    assert later.state == {"kl": 0.7}, "a batch of one prompt has none: what was measured last stays"


def test_a_step_of_probes_alone_weighs_nothing(update: Update, gradients: Gradients) -> None:
    batch, out = update(1)
    method = build("kto", {}, horizon=16)
    only = replace(batch, version=torch.full_like(batch.version, PROBE))
    assert not method.weight(only).any()
    total, *slopes = gradients(method, only, out)
    assert total == 0
    assert not any(g.any() for g in slopes)


def test_both_kinds_of_answers_have_their_own_weight(update: Update, gradients: Gradients) -> None:
    batch, out = update(2)
    wanted = torch.tensor([worths(batch)[i] > 0 for i in range(len(batch))])
    once = gradients(build("kto", {}, horizon=16), batch, out)[1]
    options = {"desirable_weight": 3.0, "undesirable_weight": 0.5}
    weighed = gradients(build("kto", options, horizon=16), batch, out)[1]
    torch.testing.assert_close(weighed, once * torch.where(wanted, 3.0, 0.5)[:, None].double())
    assert bool(once[wanted].any())
    assert bool(once[~wanted].any())


# ---------------------------------------------------------------- groups without a pair


@pytest.mark.parametrize("name", [n for n in LINES if METHODS[n].method.unit == "group"])
def test_a_group_without_a_pair_weighs_nothing_and_takes_nothing_from_the_others(
    name: str, update: Update, gradients: Gradients
) -> None:
    batch, out = update(3)
    assert out.value is not None
    method, tied = build(name, {}, horizon=16), batch.group == 7
    some = replace(batch, reward=torch.where(tied[:, None], 0.0, batch.reward))
    weight = method.weight(some)
    assert not weight[tied].any()
    assert float(weight.sum()) == pytest.approx(1, rel=1e-6)
    left = (~tied).nonzero().flatten()
    alone = gradients(method, some.rows(left), Outputs(out.logp[left], out.entropy[left], out.value[left]))
    whole = gradients(method, some, out)
    torch.testing.assert_close(whole[0], alone[0])
    for a, b in zip(whole[1:], alone[1:], strict=True):
        torch.testing.assert_close(a[left], b)
        assert not a[tied].any()


@pytest.mark.parametrize("name", [n for n in LINES if METHODS[n].method.unit == "group"])
def test_an_update_of_such_groups_only_is_no_error(name: str, update: Update, gradients: Gradients) -> None:
    batch, out = update(3)
    total, *slopes = gradients(
        build(name, {}, horizon=16), replace(batch, reward=torch.zeros_like(batch.reward)), out
    )
    assert total == 0
    assert not any(g.any() for g in slopes)


# ---------------------------------------------------------------- what is watched


def seen(name: str, batch: Batch, out: Outputs) -> dict[str, float]:
    """What the learner would show: means under the method's own weights."""
    method = build(name, {}, horizon=16)
    batch = method.prepare(replace(batch, state=method.start))
    weight = masked.fill(method.weight(batch).double(), batch.mask)
    watched = method.watch(out, batch)
    return {
        key: float((masked.fill(x, batch.mask) * weight).sum() / weight.sum()) for key, x in watched.items()
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_implicit_rewards_are_means_over_pairs(seed: int, update: Update) -> None:
    batch, out = with_a_failed_row(update(seed))
    assert batch.logp_ref is not None
    u = 0.1 * masked.row_sum(out.logp - batch.logp_ref, batch.mask)
    logp = masked.row_mean(out.logp, batch.mask)
    by = {"rewards/chosen": [], "rewards/rejected": [], "rewards/margin": [], "rewards/accuracy": []}
    by |= {"logp/chosen": [], "logp/rejected": []}
    for pairs in groups(batch):
        each = {key: [] for key in by}
        for w, o in pairs:
            for key, side in (("chosen", w), ("rejected", o)):
                each[f"rewards/{key}"].append(float(u[side]))
                each[f"logp/{key}"].append(float(logp[side]))
            each["rewards/margin"].append(float(u[w] - u[o]))
            each["rewards/accuracy"].append(float(u[w] > u[o]))
        for key, values in each.items():
            by[key].append(mean(values))
    found = seen("dpo", batch, out)
    assert found.keys() == by.keys()
    for key, values in by.items():
        assert found[key] == pytest.approx(mean(values), rel=1e-6, abs=1e-9), key


def test_a_model_that_says_the_same_of_every_answer_is_right_half_the_time(update: Update) -> None:
    batch, out = update(2)
    same = replace(out, value=torch.zeros_like(out.logp))
    for name in ("reward", "reward_ranking"):
        assert seen(name, batch, same)["score/accuracy"] == pytest.approx(0.5)


def test_a_model_that_scores_as_the_judge_did_is_always_right(update: Update) -> None:
    batch, out = update(2)
    told = replace(out, value=batch.reward)
    assert seen("reward", batch, told)["score/accuracy"] == pytest.approx(1)
    assert seen("reward", batch, replace(out, value=-batch.reward))["score/accuracy"] == pytest.approx(0)
    assert seen("reward_regression", batch, told)["score/error"] == pytest.approx(0)
    sure = replace(out, value=batch.reward - 0.5)
    assert seen("process_reward", batch, sure)["score/accuracy"] == pytest.approx(1)


def test_unpaired_answers_are_right_on_their_own_side_of_the_origin(update: Update) -> None:
    batch, out = update(1)
    assert batch.logp_ref is not None
    sign = torch.tensor([1.0 if worths(batch)[i] > 0 else -1.0 for i in range(len(batch))]).double()
    far = replace(out, logp=batch.logp_ref + 20 * sign[:, None])
    assert seen("kto", batch, far)["rewards/accuracy"] == pytest.approx(1)
    far = replace(out, logp=batch.logp_ref - 20 * sign[:, None])
    assert seen("kto", batch, far)["rewards/accuracy"] == pytest.approx(0)
    assert seen("kto", batch, far)["rewards/margin"] < 0
