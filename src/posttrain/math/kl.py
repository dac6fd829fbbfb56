"""Estimates of the KL between π and π_ref from one sampled token, and the exact value over a vocabulary.

With y ~ π and Δ = log π(y) - log π_ref(y):

| function | value | E[value] | gradient coefficient c (∇ = c ∇log π) | E[gradient] |
|---|---|---|---|---|
| k1 | Δ | KL | 1 | 0: useless in a loss, right in a reward |
| k2 | Δ²/2 | not KL | Δ | ∇KL |
| k3 | e^{-Δ} - 1 + Δ | KL | 1 - e^{-Δ} | ∇KL(π_ref ‖ π), the other direction |

The expectations are over tokens of π at one state. On samples of an older policy all three are biased.
The others weigh a token by the policy π_old that drew it. With y ~ π_old, r = π/π_old and ω = π_ref/π_old:

| function | value | E[value] | gradient coefficient c | E[gradient] |
|---|---|---|---|---|
| unbiased_k1 | r Δ | KL | r (Δ + 1) | ∇KL |
| unbiased_k3 | r k3 | KL | r Δ | ∇KL |
| forward_k1 | -ω Δ | KL(π_ref ‖ π) | -ω | ∇KL(π_ref ‖ π) |
| forward_k3 | r - ω - ω Δ | KL(π_ref ‖ π) | r - ω | ∇KL(π_ref ‖ π) |

These hold for every π_old that may draw every token. Those with k3 vanish where π = π_ref: near it they vary
less. On samples of π itself unbiased_k3 has the gradient of k2, and forward_k3 that of k3. A square is not
needed: r k2 has the gradient of unbiased_k3 if r is held fixed, and a biased one if it is not. π_old is the
policy when the update began: tokens that a still older policy drew are off by π_old/π_gen, which a method's
`correction` weighs in its surrogate alone.

In a sequence no estimate from one token accounts for its effect on later states.

Source: Schulman, "Approximating KL Divergence", 2020. Notes A print k3 with the ratio
upside down; see docs/errata.md. The four with weights: RPG, arXiv:2505.17508, where those with k1 are the
normalised and those with k3 the unnormalised divergences.
"""

import torch
from jaxtyping import Float

from posttrain.math.masked import PerToken


def k1(logp: PerToken, logp_ref: PerToken) -> PerToken:
    """log π - log π_ref: unbiased, of either sign.    ∇ = 1 · ∇log π

    >>> k1(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    tensor([[0.5000]])
    """
    return logp - logp_ref


def k2(logp: PerToken, logp_ref: PerToken) -> PerToken:
    """(log π - log π_ref)² / 2: biased as a value; its gradient is unbiased.    ∇ = Δ ∇log π

    >>> k2(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    tensor([[0.1250]])
    """
    return (logp - logp_ref).square() / 2


def k3(logp: PerToken, logp_ref: PerToken) -> PerToken:
    """π_ref/π - 1 - log(π_ref/π): unbiased and never negative.    ∇ = (1 - π_ref/π) ∇log π

    Source: GRPO, arXiv:2402.03300, eq. 4. Nothing is clamped here; verl clamps to ±10.

    >>> k3(torch.tensor([[0.1, -0.5, 0.1, 1.2]]), torch.zeros(1, 4))
    tensor([[0.0048, 0.1487, 0.0048, 0.5012]])
    """
    delta = logp_ref - logp
    return torch.expm1(delta) - delta


def unbiased_k1(logp: PerToken, logp_ref: PerToken, logp_old: PerToken) -> PerToken:
    """π/π_old k1: KL(π ‖ π_ref) from tokens of an older policy.    ∇ = r (Δ + 1) ∇log π

    Source: RPG, arXiv:2505.17508, reverse KL, normalised.

    >>> unbiased_k1(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[-1.2]]))
    tensor([[0.6107]])
    """
    return (logp - logp_old).exp() * k1(logp, logp_ref)


def unbiased_k3(logp: PerToken, logp_ref: PerToken, logp_old: PerToken) -> PerToken:
    """π/π_old k3: KL(π ‖ π_ref) from tokens of an older policy, never negative.    ∇ = r Δ ∇log π

    Source: DeepSeek-V3.2, arXiv:2512.02556, section 3.1; RPG, arXiv:2505.17508, reverse KL, unnormalised.

    >>> unbiased_k3(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[-1.2]]))
    tensor([[0.1301]])
    """
    return (logp - logp_old).exp() * k3(logp, logp_ref)


def forward_k1(logp: PerToken, logp_ref: PerToken, logp_old: PerToken) -> PerToken:
    """π_ref/π_old (log π_ref - log π): KL(π_ref ‖ π) from tokens of an older policy.    ∇ = -ω ∇log π

    Source: RPG, arXiv:2505.17508, forward KL, normalised.

    >>> forward_k1(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[-1.2]]))
    tensor([[-0.3704]])
    """
    return (logp_ref - logp_old).exp() * k1(logp_ref, logp)


def forward_k3(logp: PerToken, logp_ref: PerToken, logp_old: PerToken) -> PerToken:
    """π_ref/π_old (π/π_ref - 1 - log π/π_ref): as forward_k1, never negative.    ∇ = (r - ω) ∇log π

    Source: RPG, arXiv:2505.17508, forward KL, unnormalised.

    >>> forward_k3(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[-1.2]]))
    tensor([[0.1102]])
    """
    return (logp_ref - logp_old).exp() * k3(logp_ref, logp)


def of_event(logp: PerToken, other: PerToken) -> PerToken:
    """p log p/q + (1 - p) log (1 - p)/(1 - q): the KL of the events that a token is drawn and that it is not.

    logp and other are log p and log q. Probabilities above 1 - eps count as 1 - eps, eps that of their type:
    rounding may leave nothing of 1 - q, and the divergence would be infinite. It is at most the KL of the two
    policies.

    >>> of_event(torch.tensor([[0.5, 1.0]]).log(), torch.tensor([[0.25, 1.0]]).log())
    tensor([[0.1438, 0.0000]])
    """
    most = -torch.finfo(logp.dtype).eps
    logp, other = logp.clamp(max=most), other.clamp(max=most)
    rest, rest_other = -torch.expm1(logp), -torch.expm1(other)
    return logp.exp() * (logp - other) + rest * (rest.log() - rest_other.log())


def exact(
    log_probs: Float[torch.Tensor, "*S V"], log_probs_ref: Float[torch.Tensor, "*S V"]
) -> Float[torch.Tensor, "*S"]:
    """Σ_v π(v) (log π(v) - log π_ref(v)) over the last axis. Tokens with π(v) = 0 count 0.

    As the estimator of a penalty it has no variance and a right gradient at each state, also on
    tokens of another policy. It costs a second output head, and a pass of the reference in each step.

    >>> p = torch.tensor([0.5, 0.5]).log()
    >>> exact(p, torch.tensor([0.25, 0.75]).log())
    tensor(0.1438)
    """
    p = log_probs.exp()
    difference = torch.where(p > 0, log_probs - log_probs_ref, torch.zeros_like(p))
    return (p * difference).sum(-1)
