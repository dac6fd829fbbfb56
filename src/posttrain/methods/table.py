"""Every method as the difference to its neighbour, and the table that `posttrain methods` prints.

METHODS is the registry: to add a method, add a line.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any

from posttrain.base.name_hints import did_you_mean, names_of_other_trainers
from posttrain.base.usercode import MEMORY, file_of, load_edited
from posttrain.math import (
    advantages,
    control,
    corrections,
    divergences,
    evolution,
    filters,
    kl,
    pass_at_k,
    preference,
    ratios,
    reduce,
    returns,
    reward,
    selection,
    surrogate,
    value,
)
from posttrain.methods.actor_critic import ActorCritic
from posttrain.methods.distillation import Distillation
from posttrain.methods.evolution import Evolution
from posttrain.methods.imitation import ExpertIteration, Imitation, WeightedImitation
from posttrain.methods.policy_gradient import PolicyGradient
from posttrain.methods.preference import Preference, Unpaired
from posttrain.methods.q_learning import SoftQ
from posttrain.methods.reward_model import ListwiseReward, PairwiseReward, PointwiseReward
from posttrain.types import Method, UserError

GRPO = PolicyGradient(advantages.normalised, ratios.by_token, surrogate.clipped, reduce.per_sequence)
REINFORCE = replace(GRPO, credit=advantages.raw, surrogate=surrogate.score, reduction=reduce.per_row)
TO_GO = replace(REINFORCE, returns=returns.to_go)
RUNNING = replace(REINFORCE, running_baseline=0.9)
OPO = replace(REINFORCE, returns=returns.total_by_token, credit=advantages.centred)
OTB = replace(REINFORCE, returns=returns.to_go, credit=advantages.optimal_by_token)
REMAX = replace(REINFORCE, credit=advantages.against_greedy)
RLOO = replace(REINFORCE, credit=advantages.leave_one_out)
REINFORCE_PP = replace(
    GRPO,
    returns=returns.to_go,
    credit=advantages.batch_normalised,
    reduction=reduce.per_token,
    kl_in_reward=0.01,
)
REINFORCE_PP_BASELINE = replace(
    REINFORCE_PP,
    returns=returns.total,
    credit=advantages.centred_batch_normalised,
    kl=kl.k2,
    kl_in_loss=0.01,
    kl_in_reward=0.0,
)
DISTILL = replace(
    TO_GO,
    returns=partial(returns.to_go, gamma=0.0),
    reduction=reduce.per_token,
    kl_in_reward=1.0,
    reward_weight=0.0,
)
GKD = Distillation(divergences.jensen_shannon, reduce.per_token)
KD = replace(GKD, token_divergence=divergences.forward_kl)
GRPO_TRAJECTORY = replace(GRPO, ratio=ratios.by_trajectory)
DR_GRPO = replace(GRPO, credit=advantages.centred, reduction=reduce.per_horizon)
DAPO = replace(GRPO, surrogate=partial(surrogate.clipped, clip_high=0.28), reduction=reduce.per_token)
GSPO = replace(
    GRPO,
    ratio=ratios.by_sequence,
    surrogate=partial(surrogate.clipped, clip_low=3e-4, clip_high=4e-4),
)
GSPO_TOKEN = replace(GSPO, ratio=ratios.by_sequence_token)
LUSPO = replace(GSPO, reduction=reduce.per_token)
GMPO = replace(GRPO, ratio=ratios.by_bounded_sequence, surrogate=surrogate.unclipped)
CISPO = replace(DAPO, surrogate=surrogate.truncated)
SAPO = replace(GRPO, surrogate=surrogate.soft_gated)
VESPO = replace(GRPO_TRAJECTORY, surrogate=surrogate.gamma_gated)
DPPO_TV = replace(DAPO, surrogate=surrogate.tv_masked)
DPPO_KL = replace(DAPO, surrogate=surrogate.kl_masked)
KPOP = replace(DPPO_KL, surrogate=surrogate.kl_bounded, correction=corrections.kl_rejected)
DRO = replace(GRPO_TRAJECTORY, credit=advantages.centred, surrogate=surrogate.regressed)
AIPO = replace(
    RLOO,
    surrogate=partial(surrogate.truncated, cap=5.0),
    correction=partial(corrections.token_truncated, weight_cap=5.0),
)
M2PO = replace(
    DAPO,
    surrogate=surrogate.unclipped,
    correction=partial(corrections.token_truncated, weight_cap=100.0),
    filter=filters.low_second_moment,
)
TOPR = replace(RLOO, ratio=ratios.by_trajectory, surrogate=surrogate.tapered, reduction=reduce.per_sequence)
GIGPO = replace(GRPO, turn_weight=1.0)
GDPO = replace(GRPO, credit=advantages.normalised_by_part)
MAX_RL = replace(GRPO, credit=advantages.over_mean)
PASS_AT_K = replace(RLOO, credit=pass_at_k.pass_at_k)
PASS_AT_K_TRAINING = replace(GRPO, credit=pass_at_k.pass_at_k_normalised)

LEARNED = ActorCritic(
    advantages.raw, ratios.by_token, surrogate.score, reduce.per_row, estimator=returns.monte_carlo
)
A2C = replace(LEARNED, estimator=returns.n_step)
IMPALA = replace(A2C, estimator=returns.vtrace)
PPO = replace(
    LEARNED,
    estimator=returns.gae,
    credit=advantages.batch_normalised,
    surrogate=surrogate.clipped,
    reduction=reduce.per_token,
    value_loss=value.clipped,
)
PPO_TRAJECTORY = replace(PPO, ratio=ratios.by_trajectory, reduction=reduce.per_sequence)
PPO_PENALTY = replace(
    PPO, surrogate=surrogate.unclipped, kl_from_old=1.0, kl_target=0.01, control=control.doubling
)
DECOUPLED = replace(PPO, correction=partial(corrections.token_truncated, weight_cap=5.0))
TRPO = replace(RLOO, surrogate=surrogate.unclipped)
TRPO_GAE = replace(LEARNED, estimator=returns.gae, surrogate=surrogate.unclipped)
TRPO_PENALTY = replace(TRPO, kl_from_old=1.0)

ES = Evolution(evolution.standardised, evolution.mirrored)

KLQ = SoftQ(reduce.per_token)
KLQ_OFFLINE = replace(KLQ, lam=0.0)
SFT = Imitation(reduce.per_token)
DFT = WeightedImitation(reduce.per_token)
EXPERT = ExpertIteration(reduce.per_row, selection.every, selection.by_task)

DPO = Preference(preference.log_ratio, preference.logistic)
DPO_SFT = replace(DPO, sft_weight=1.0)
DPO_LENGTH = replace(DPO, implicit=preference.mean_log_ratio, beta=5.0)
CDPO = replace(DPO, pair_loss=preference.smoothed)
RDPO = replace(DPO, pair_loss=preference.robust)
F_DPO = replace(DPO, divergence=preference.jensen_shannon)
IPO = replace(DPO, pair_loss=preference.squared)
SLIC = replace(DPO, pair_loss=preference.hinge)
SIMPO = replace(
    DPO,
    implicit=preference.mean_logp,
    pair_loss=partial(preference.logistic, target_margin=1.0),
    beta=2.0,
)
ORPO = replace(DPO, implicit=preference.log_odds, beta=1.0, pair_weight=0.1, sft_weight=1.0)
KTO = Unpaired()

REWARD = PairwiseReward(preference.logistic)
REWARD_SMOOTHED = replace(REWARD, pair_loss=preference.smoothed)
REWARD_MARGIN = replace(REWARD, margin=1.0)
REWARD_REGRESSION = PointwiseReward(reward.regression, reduce.per_row)
REWARD_CLASSIFICATION = replace(REWARD_REGRESSION, item_loss=reward.classification)
PROCESS_REWARD = replace(REWARD_CLASSIFICATION, reduction=reduce.per_token)


@dataclass(frozen=True)
class Line:
    """One line of the table: a method, its source, and the data and steps that it needs."""

    method: Method
    title: str
    source: str
    loop: str = "online"
    """online (samples from the policy) or offline (learns from a dataset)."""
    learns: str = "answers"
    """Data of an offline method: text, answers, rankings, labels, steps."""
    step: str = "adamw"
    """adamw; trust_region: the natural gradient under a bound of the KL; evolution: no gradient at all."""

    @property
    def has_loss(self) -> bool:
        """True if tokens have a loss; False if the weights move along noise."""
        return self.step != "evolution"


METHODS: Mapping[str, Line] = {
    "pretrain": Line(SFT, "next-token prediction on text", "course notes A", "offline", "text"),
    "sft": Line(SFT, "supervised fine-tuning", "course notes A", loop="offline"),
    "dft": Line(
        DFT, "fine-tuning that weighs a token by its probability", "arXiv:2508.05629", loop="offline"
    ),
    "reinforce": Line(REINFORCE, "REINFORCE, no baseline", "Williams 1992"),
    "reinforce_to_go": Line(TO_GO, "REINFORCE, a token earns what comes after it", "course notes E"),
    "reinforce_running": Line(RUNNING, "REINFORCE, running average as baseline", "Williams 1992"),
    "reinforce_critic": Line(LEARNED, "REINFORCE, learned baseline", "Sutton et al. 2000"),
    "opo": Line(OPO, "REINFORCE, baseline of least variance by length", "arXiv:2505.23585"),
    "otb": Line(OTB, "REINFORCE, baseline of least variance at each token", "arXiv:2602.07078"),
    "remax": Line(REMAX, "REINFORCE, the reward of the greedy answer as baseline", "arXiv:2310.10505"),
    "rloo": Line(RLOO, "REINFORCE, leave one out", "arXiv:2402.14740"),
    "reinforce_pp": Line(
        REINFORCE_PP, "REINFORCE++: whitened over the batch, KL in the reward", "arXiv:2501.03262"
    ),
    "reinforce_pp_baseline": Line(
        REINFORCE_PP_BASELINE, "REINFORCE++ with the group's mean as baseline", "arXiv:2501.03262"
    ),
    "a2c": Line(A2C, "advantage actor-critic, n steps", "arXiv:1602.01783"),
    "impala": Line(IMPALA, "actor-critic with V-trace, for older samples", "arXiv:1802.01561"),
    "ppo": Line(PPO, "proximal policy optimisation, GAE", "arXiv:1707.06347"),
    "ppo_trajectory": Line(PPO_TRAJECTORY, "PPO with one ratio an answer", "course notes A"),
    "ppo_penalty": Line(
        PPO_PENALTY, "PPO with an adaptive KL penalty for clipping", "arXiv:1707.06347, section 4"
    ),
    "decoupled_ppo": Line(DECOUPLED, "PPO: behaviour, proximal and current policy", "arXiv:2505.24298"),
    "trpo": Line(TRPO, "trust region, natural gradient", "arXiv:1502.05477", step="trust_region"),
    "trpo_gae": Line(TRPO_GAE, "trust region with a critic, GAE", "arXiv:1506.02438", step="trust_region"),
    "trpo_penalty": Line(TRPO_PENALTY, "trust region as a fixed penalty", "arXiv:1502.05477"),
    "grpo": Line(GRPO, "group-relative policy optimisation", "arXiv:2402.03300"),
    "grpo_trajectory": Line(GRPO_TRAJECTORY, "GRPO with one ratio an answer", "course notes A"),
    "dr_grpo": Line(DR_GRPO, "GRPO without its two divisions", "arXiv:2503.20783"),
    "dapo": Line(DAPO, "GRPO by token, clipped higher", "arXiv:2503.14476"),
    "gspo": Line(GSPO, "GRPO with a length-normalised ratio a sequence", "arXiv:2507.18071"),
    "gspo_token": Line(GSPO_TOKEN, "GSPO, gradient token by token", "arXiv:2507.18071, eq. 14"),
    "luspo": Line(LUSPO, "GSPO that long answers do not weigh less in", "arXiv:2602.05261"),
    "gmpo": Line(GMPO, "GRPO with the geometric mean of bounded ratios", "arXiv:2507.20673"),
    "cispo": Line(CISPO, "truncated ratios, no token dropped", "arXiv:2506.13585"),
    "sapo": Line(SAPO, "GRPO with soft gates for clipping", "arXiv:2511.20347"),
    "vespo": Line(
        VESPO, "GRPO whose answers are gated by a soft function of their ratio", "arXiv:2602.10693"
    ),
    "dppo_tv": Line(DPPO_TV, "trust region by total variation in place of clipping", "arXiv:2602.04879"),
    "dppo_kl": Line(DPPO_KL, "trust region by KL, token by token, in place of clipping", "arXiv:2602.04879"),
    "kpop": Line(KPOP, "DPPO by KL in both directions, also against the sampler", "Guo et al. 2026"),
    "dro": Line(DRO, "regression of an answer's log-ratio on its advantage", "arXiv:2501.12599"),
    "aipo": Line(AIPO, "REINFORCE weighed by truncated ratios to the sampler", "arXiv:2505.24034"),
    "m2po": Line(
        M2PO, "GRPO by token without the few that are furthest from their sampler", "arXiv:2510.01161"
    ),
    "topr": Line(TOPR, "tapered off-policy REINFORCE", "arXiv:2503.14286"),
    "gigpo": Line(GIGPO, "GRPO that also compares turns which began in the same state", "arXiv:2505.10978"),
    "gdpo": Line(GDPO, "GRPO that normalises each part of the reward by itself", "arXiv:2601.05242"),
    "max_rl": Line(MAX_RL, "GRPO over the mean: towards the likelihood of success", "arXiv:2602.02710"),
    "pass_at_k": Line(PASS_AT_K, "gradient of pass@k, leave one out", "arXiv:2505.15201"),
    "pass_at_k_training": Line(
        PASS_AT_K_TRAINING, "GRPO whose answers are credited for the best of k", "arXiv:2508.10751"
    ),
    "expert_iteration": Line(
        EXPERT, "imitation of the policy's own answers that were accepted", "arXiv:2308.08998"
    ),
    "es": Line(
        ES, "evolution strategies: perturbed weights, no gradients", "arXiv:2509.24372", step="evolution"
    ),
    "distill": Line(DISTILL, "on-policy distillation: a teacher judges each token", "arXiv:2306.13649"),
    "gkd": Line(GKD, "distillation of whole distributions on its own answers", "arXiv:2306.13649"),
    "kd": Line(KD, "distillation of whole distributions on given answers", "arXiv:1503.02531", "offline"),
    "klq": Line(KLQ, "KL-regularised Q-learning on tokens", "arXiv:2508.17000"),
    "klq_offline": Line(
        KLQ_OFFLINE, "the same from answers that have a reward", "arXiv:1702.08892", "offline"
    ),
    "dpo": Line(DPO, "direct preference optimisation", "arXiv:2305.18290", "offline", "rankings"),
    "dpo_sft": Line(
        DPO_SFT, "DPO that also imitates the preferred answer", "arXiv:2404.19733", "offline", "rankings"
    ),
    "dpo_length": Line(
        DPO_LENGTH, "DPO by token, so that length pays nothing", "arXiv:2411.15124", "offline", "rankings"
    ),
    "cdpo": Line(CDPO, "conservative DPO: some labels are wrong", "Mitchell 2023", "offline", "rankings"),
    "rdpo": Line(RDPO, "robust DPO: unbiased under wrong labels", "arXiv:2403.00409", "offline", "rankings"),
    "f_dpo": Line(F_DPO, "DPO under another divergence", "arXiv:2309.16240", "offline", "rankings"),
    "ipo": Line(IPO, "DPO with a finite best margin", "arXiv:2310.12036", "offline", "rankings"),
    "slic": Line(SLIC, "DPO with a hinge", "arXiv:2305.10425", "offline", "rankings"),
    "simpo": Line(SIMPO, "mean likelihoods, no reference", "arXiv:2405.14734", "offline", "rankings"),
    "orpo": Line(ORPO, "SFT with an odds ratio, no reference", "arXiv:2403.07691", "offline", "rankings"),
    "kto": Line(KTO, "answers labelled good or bad, unpaired", "arXiv:2402.01306", "offline", "labels"),
    "online_dpo": Line(DPO, "DPO on pairs of the policy's own answers", "arXiv:2402.04792"),
    "reward": Line(REWARD, "reward model, Bradley-Terry", "arXiv:2203.02155", "offline", "rankings"),
    "reward_smoothed": Line(
        REWARD_SMOOTHED, "reward model, some labels are wrong", "arXiv:2203.02155", "offline", "rankings"
    ),
    "reward_margin": Line(
        REWARD_MARGIN, "reward model that learns how much better", "arXiv:2307.09288", "offline", "rankings"
    ),
    "reward_ranking": Line(
        ListwiseReward(),
        "reward model of whole rankings, Plackett-Luce",
        "Plackett 1975",
        "offline",
        "rankings",
    ),
    "reward_regression": Line(
        REWARD_REGRESSION, "reward model of scores", "arXiv:2406.08673", "offline", "labels"
    ),
    "reward_classification": Line(
        REWARD_CLASSIFICATION, "reward model of right and wrong", "arXiv:2110.14168", "offline", "labels"
    ),
    "process_reward": Line(
        PROCESS_REWARD, "reward model of each step", "arXiv:2305.20050", "offline", "steps"
    ),
}


Named = str | Line | Method
"""A name of the table, "file.py:NAME" in a user's file, or the line or method itself."""


def line(spec: Named) -> Line:
    """Return the line of a method; UserError for an unknown name, or for an object that is not a method."""
    if isinstance(spec, str) and spec.startswith(MEMORY):
        spec = spec.removeprefix(MEMORY)  # a method that was in a program's memory: the line it is like
    if isinstance(spec, str) and ":" in spec:
        return line(load_edited(spec, "method.name"))
    if isinstance(spec, str) and spec in METHODS:
        return METHODS[spec]
    if isinstance(spec, str):
        plain = spec.lower().removesuffix("trainer")
        other = names_of_other_trainers("other_methods").get(plain, "")
        near = other or did_you_mean(names_of_other_trainers("methods").get(plain, plain), METHODS)
        fix = near or f"one of {', '.join(METHODS)}"
        raise UserError("method.name", f"unknown method {spec!r}", fix)
    if isinstance(spec, Line):
        return spec
    instance: Any = spec  # a user's file may hold any object under that name
    if not is_dataclass(instance) or isinstance(instance, type) or not hasattr(instance, "prepare"):
        fix = "name a Line, or an instance of a frozen dataclass that inherits Method"
        raise UserError("method.name", f"{instance!r:.60} is not a method", fix)
    title = (inspect.getdoc(spec) or label(spec)).split("\n")[0]
    step = "evolution" if isinstance(spec, Evolution) else "adamw"
    return Line(spec, title, type(spec).__module__, step=step)


def like(other: Line) -> str:
    """Return the name of the line of the table with the same title, or of the first that learns the same way.

    >>> like(METHODS["dr_grpo"]), like(Line(METHODS["dr_grpo"].method, "mine", ""))
    ('dr_grpo', 'reinforce')
    """
    if same_title := [name for name, line in METHODS.items() if line.title == other.title]:
        return same_title[0]
    way = (other.loop, other.learns, other.step)
    names = [name for name, line in METHODS.items() if (line.loop, line.learns, line.step) == way]
    return next((name for name in names if type(METHODS[name].method) is type(other.method)), names[0])


def label(spec: Named) -> str:
    """Return a method's name in messages: its name in the table, its title or its class."""
    if isinstance(spec, str):
        return f"{file.name}:{spec.rpartition(':')[2]}" if (file := file_of(spec)) else spec
    return spec.title if isinstance(spec, Line) else type(spec).__name__
