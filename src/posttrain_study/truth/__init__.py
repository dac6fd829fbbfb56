"""The exact expectation of every estimator, compared with the quantity that it estimates.

    policy   a Llama of two or three tokens, in float64
    world    all answers to one prompt; the real forward, prepare, weight and loss
    exact    the oracle: J, ∇J, V, Q, A, KL, Fisher matrix and π*, by enumeration and autograd alone
    comparison   a row of the table: error, sine, variance and verdict
    table    each on-policy line of the methods table, and why it is biased or not
    estimators   one question each: divisions, capped weights, KL estimators; and all the sections
    baselines, values, trust, soft   what is subtracted, V-trace and shaping, clipping and TRPO, KLQ
    answers  all answers of a small vocabulary, and the probabilities of groups of answers
    imitation   the fixed points of expert iteration
    preferences, rewards   DPO and IPO against π*, Bradley and Terry's likelihood, the best of n
    other_policies  the same world with another policy
    printed  the table on a terminal, and as docs/truth.md

`posttrain truth` prints every row, `posttrain truth grpo` one method. Expectations are sums over all groups
of answers, so a number that is not 0 is a bias and not noise.
"""

from posttrain_study.truth.comparison import TruthRow
from posttrain_study.truth.printed import command, page, show
from posttrain_study.truth.table import rows

__all__ = ["TruthRow", "command", "page", "rows", "show"]
