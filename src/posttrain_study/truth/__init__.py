"""The truth: every estimator's exact expectation against what it estimates.

    policy   a Llama of two or three tokens, in float64
    world    so few answers that all can be listed; the real forward, prepare, weight and loss
    exact    the oracle: J, ∇J, V, Q, A, KL, Fisher matrix and π*, by enumeration and autograd alone
    table    each on-policy line of the methods table: error, angle, variance, and why
    facts    one question each: divisions, capped weights, KL estimators; and all the sections
    baselines, values, trust, soft   what is subtracted, V-trace and shaping, clipping and TRPO, KLQ
    answers  all answers of a small vocabulary, and how likely groups of them are
    imitation   the fixed points of expert iteration
    preferences, rewards   DPO and IPO against π*, Bradley and Terry's likelihood, the best of n
    elsewhere  the same world with another policy
    printed  the table on a terminal, and as docs/truth.md

`posttrain truth` prints it all, `posttrain truth grpo` one method. Expectations are sums over all groups of
answers, so a number that is not 0 is a bias and not noise.
"""

from posttrain_study.truth.printed import command, page, show
from posttrain_study.truth.row import TruthRow
from posttrain_study.truth.table import rows

__all__ = ["TruthRow", "command", "page", "rows", "show"]
