"""The oracle: the quantities to estimate, by plain enumeration and autograd, in float64.

Nothing here calls a function of math/ or a method: probabilities come from transformers' own forward pass,
and every expectation is a sum over all answers. Values are laid along the answers: entry (n, t) belongs to
the state before token t of answer n, which is the same state in every answer that begins with these tokens.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float

from posttrain_study.truth.policy import Policy
from posttrain_study.truth.world import World

Answers = Float[torch.Tensor, "N"]
Places = Float[torch.Tensor, "N L"]
Gradient = Float[torch.Tensor, "P"]
Matrix = Float[torch.Tensor, "P P"]


def chances(world: World, policy: Policy | None = None) -> Answers:
    """π(y) of each answer, without a gradient."""
    return world.cached_logp(policy or world.policy).sum(1).exp()


def objective(world: World, discount: float = 1.0) -> torch.Tensor:
    """J = Σ_y π(y) Σ_t γ^t r_t."""
    return (world.logp(world.policy).exp() * returns_to_go(world, discount)[:, 0]).sum()


def gradient(world: World, discount: float = 1.0) -> Gradient:
    """∇J, over all parameters of the policy."""
    return world.policy.gradient(objective(world, discount))


def divergence(world: World, p: Policy | None = None, q: Policy | None = None) -> torch.Tensor:
    """KL(p ‖ q) = Σ_y p(y) log p(y)/q(y) over whole answers; default: of the policy and the reference."""
    ours, theirs = world.logp(p or world.policy), world.logp(q or world.reference)
    return (ours.exp() * (ours - theirs)).sum()


def state_divergence(world: World, sampler: Policy | None, p: Policy, q: Policy) -> torch.Tensor:
    """Σ_s d(s) KL(p(· | s) ‖ q(· | s)), d the visits of the sampler (None: the policy), held fixed."""
    ours, theirs = world.step_log_probs(p), world.step_log_probs(q)
    return (visits(world, sampler) * (ours.exp() * (ours - theirs)).sum(-1)).sum()


def entropy(world: World) -> torch.Tensor:
    """Σ_s d(s) H(π(· | s)): the entropy at each state, weighted by visits, which carry no gradient."""
    step = world.step_log_probs(world.policy)
    return (visits(world) * -(step.exp() * step).sum(-1)).sum()


def regularised_gradient(
    world: World, beta: float = 0.0, bonus: float = 0.0, weight: float = 1.0
) -> Gradient:
    """∇(w J - β KL(π ‖ π_ref) + α entropy)."""
    value = weight * objective(world)
    if beta:
        value = value - beta * divergence(world)
    return world.policy.gradient(value + bonus * entropy(world) if bonus else value)


def best_of_two(world: World) -> torch.Tensor:
    """E[max(R(y), R(y'))] of two independent answers."""
    p, R = world.logp(world.policy).exp(), world.returns
    return (p[:, None] * p * torch.maximum(R[:, None], R)).sum()


def visits(world: World, policy: Policy | None = None) -> Places:
    """Weights under which a sum over answers and places is the sum over visited states.

    A state occurs in every answer that passes through it, and their probabilities add up to its own.
    """
    return chances(world, policy)[:, None] * world.mask


def distance(world: World, divergence: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Σ_s d(s) D(π(· | s), π_ref(· | s)), D this divergence of two tables of log-probabilities.

    The chance d(s) of a state is taken as it is, without a gradient.
    """
    ours, theirs = world.step_log_probs(world.policy), world.step_log_probs(world.reference).detach()
    return (visits(world) * divergence(ours, theirs)).sum()


def returns_to_go(world: World, discount: float = 1.0) -> Places:
    """G = Σ_{k ≥ t} γ^{k-t} r_k: the return of each answer from each of its places."""
    out = torch.zeros_like(world.reward)
    after = torch.zeros_like(world.reward[:, 0])
    for t in reversed(range(world.length)):
        out[:, t] = after = world.reward[:, t] + discount * after
    return out


def shared_prefixes(world: World) -> tuple[Bool[torch.Tensor, "N N L"], Bool[torch.Tensor, "N N L"]]:
    """Return whether answers n and m share the state before token t, and whether they share the one after."""
    padded = torch.tensor([a + [-1] * (world.length - len(a)) for a in world.answers])
    alike = (padded[:, None] == padded[None]).long().cumprod(-1).bool()
    before = torch.cat([torch.ones_like(alike[..., :1]), alike[..., :-1]], -1)
    there = world.mask[:, None] & world.mask[None]
    return before & there, alike & there


def state_values(world: World, discount: float = 1.0) -> Places:
    """V(s) = E[G | s] over all answers that pass through the state."""
    return mean_given_state(world, returns_to_go(world, discount))


def action_values(world: World, discount: float = 1.0) -> Places:
    """Q(s, a) = E[G | s, a] of the token that the answer has there."""
    return mean_given_token(world, returns_to_go(world, discount))


def advantages(world: World, discount: float = 1.0) -> Places:
    """A(s, a) = Q(s, a) - V(s)."""
    return action_values(world, discount) - state_values(world, discount)


def mean_given_state(world: World, x: Places, policy: Policy | None = None) -> Places:
    """E[x | s] over answers of a policy; default: the trained one."""
    return _weighted_mean(shared_prefixes(world)[0], chances(world, policy), x)


def mean_given_token(world: World, x: Places, policy: Policy | None = None) -> Places:
    """E[x | s, a] over answers of a policy; default: the trained one."""
    return _weighted_mean(shared_prefixes(world)[1], chances(world, policy), x)


def clipped_values(world: World, sampler: Policy, cap: float) -> Places:
    """V of the policy that draws tokens in proportion to min(cap · μ, π), μ being the sampler.

    Source: the fixed point of V-trace, IMPALA, arXiv:1802.01561, section 4.1.
    """
    with torch.no_grad():
        ours, theirs = (world.step_log_probs(p).exp() for p in (world.policy, sampler))
        least = torch.minimum(cap * theirs, ours)
        tokens = world.pick_tokens(least.log() - least.sum(-1, keepdim=True).log())
    return _weighted_mean(shared_prefixes(world)[0], tokens.sum(1).exp(), returns_to_go(world))


def surrogate_gain(world: World, after: Policy) -> float:
    """L(π') = Σ_s d(s) Σ_a π'(a | s) A(s, a): the gain of π' if it visited the states that π visits."""
    ratio = (world.cached_logp(after) - world.cached_logp(world.policy)).exp()
    return float((visits(world) * ratio * advantages(world)).sum())


def worst_divergence(world: World, after: Policy) -> float:
    """max_s KL(π(· | s) ‖ π'(· | s))."""
    with torch.no_grad():
        ours, theirs = (world.step_log_probs(p) for p in (world.policy, after))
    return float((ours.exp() * (ours - theirs)).sum(-1)[world.mask].max())


def guaranteed_gain(world: World, after: Policy) -> float:
    """L(π') - T (T - 1) ε max_s KL(π ‖ π'), a lower bound of J(π') - J(π); ε = max |A|, T the horizon.

    J(π') - J(π) is L(π') with the states that π' meets. Call α the largest total variation of a state's
    two distributions: after t tokens the visited states differ by at most 2 (1 - (1 - α)^t) ≤ 2 α t in
    1-norm, and Σ_a π' A is at most 2 α ε. That is 4 α² ε Σ_{t<T} t = 2 α² ε T (T - 1) in all, and
    α² ≤ KL/2 by Pinsker's inequality.

    Source: TRPO, arXiv:1502.05477, theorem 1, with Σ_{t<T} t for its Σ_t t γ^t = γ/(1 - γ)², and with
    Pinsker's ½.
    """
    T, most = world.length, float(advantages(world)[world.mask].abs().max())
    return surrogate_gain(world, after) - T * (T - 1) * most * worst_divergence(world, after)


def conditionals(world: World, distribution: Answers) -> Places:
    """log q(token t | tokens before it) of a distribution over answers."""
    before, behind = (
        torch.einsum("nmt,m->nt", x.double(), distribution).clamp(min=torch.finfo(torch.float64).tiny)
        for x in shared_prefixes(world)
    )
    return torch.where(world.mask, behind.log() - before.log(), 0.0)


def optimal_policy(world: World, beta: float) -> Answers:
    """π*(y) = π_ref(y) exp(R(y)/β) / Z, the maximiser of J - β KL(π ‖ π_ref) over all policies."""
    return (world.cached_logp(world.reference).sum(1) + world.returns / beta).softmax(0)


def optimal_value(world: World, beta: float) -> torch.Tensor:
    """β log Z = max of J - β KL(π ‖ π_ref)."""
    return beta * (world.cached_logp(world.reference).sum(1) + world.returns / beta).logsumexp(0)


def soft_values(world: World, beta: float) -> Places:
    """V*(s) = β log Σ_y π_ref(y | s) exp(G/β): the best return still available, less its KL."""
    before, _ = shared_prefixes(world)
    p = chances(world, world.reference)
    weighted = p * (returns_to_go(world) / beta).exp().T[:, None]  # [L, 1, N]
    above = torch.einsum("nmt,tm->nt", before.double(), weighted[:, 0])
    below = torch.einsum("nmt,m->nt", before.double(), p)
    return torch.where(world.mask, beta * (above / below).log(), 0.0)


def score(world: World, weights: Places, sampler: Policy | None = None) -> Gradient:
    """Σ_y π(y) Σ_t w_t ∇log π(y_t | y_<t): the expected step of an estimator with token weights w.

    With `sampler` another policy draws the answers.
    """
    weighted = (visits(world, sampler) * weights * world.token_logp(world.policy)).sum()
    return world.policy.gradient(weighted)


def answer_scores(world: World) -> Float[torch.Tensor, "N P"]:
    """∇log π(y) of each answer."""
    return torch.stack([world.policy.gradient(v, keep=True) for v in world.logp(world.policy)])


def token_scores(world: World) -> Float[torch.Tensor, "N L P"]:
    """∇log π(y_t | y_<t) of each token; 0 after the answer's end."""
    logp = world.token_logp(world.policy)
    return torch.stack([torch.stack([world.policy.gradient(v, keep=True) for v in row]) for row in logp])


def fisher(world: World) -> Matrix:
    """F = Σ_y π(y) ∇log π(y) ∇log π(y)ᵀ, over all parameters of the policy."""
    scores = answer_scores(world)
    return (chances(world)[:, None] * scores).T @ scores


def constant_baseline(world: World) -> float:
    """b* = E[|g|² R] / E[|g|²], g = ∇log π(y): the constant that leaves the least variance."""
    weight = chances(world) * answer_scores(world).square().sum(1)
    return float((weight * world.returns).sum() / weight.sum())


def token_baselines(world: World) -> Places:
    """b*(s) = E[|g|² G] / E[|g|²], g = ∇log π(a | s): of least variance for each token by itself."""
    weight = token_scores(world).square().sum(-1)
    above, below = mean_given_state(world, weight * returns_to_go(world)), mean_given_state(world, weight)
    return torch.where(world.mask, above / below.clamp(min=torch.finfo(torch.float64).tiny), 0.0)


def sum_baselines(world: World) -> Places:
    """b°(s) = E[g_t · Σ_k G_k g_k | s] / E[|g_t|²| s]: of least variance for the sum over an answer's tokens.

    The derivative of E|Σ_k (G_k - b(s_k)) g_k|² in b(s) is 0 there: by E[g_k | s_k] = 0, all products of
    two baselines vanish except b(s)² |g_t|².
    """
    g = token_scores(world)
    total = torch.einsum("nt,ntp->np", returns_to_go(world), g)
    above = mean_given_state(world, torch.einsum("ntp,np->nt", g, total))
    below = mean_given_state(world, g.square().sum(-1)).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(world.mask, above / below, 0.0)


def trace_of_covariance(world: World, weights: Places) -> float:
    """Trace of the covariance of Σ_t w_t ∇log π(y_t | y_<t) over answers of the policy."""
    p, g = chances(world), torch.einsum("nt,ntp->np", weights, token_scores(world))
    return float(p @ (g - p @ g).square().sum(1))


def _weighted_mean(alike: Bool[torch.Tensor, "N N L"], p: Answers, G: Places) -> Places:
    """Σ_m p(m) G(m) / Σ_m p(m) over the answers m that are alike; 0 where answer n has no token."""
    weight = alike.double() * p[None, :, None]
    return (weight * G[None]).sum(1) / weight.sum(1).clamp(min=torch.finfo(torch.float64).tiny)
