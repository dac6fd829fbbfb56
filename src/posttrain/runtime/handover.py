"""New weights from the learner to the sampler, and proof that they arrived."""

from collections.abc import Iterator

import torch

from posttrain.engines.protocol import Engine
from posttrain.learner.learner import Learner
from posttrain.types import Completion, Request, RunError, Sampling
from posttrain.weights import combined, fingerprint

TOLERANCE = {torch.bfloat16: 0.5, torch.float16: 0.1, torch.float32: 0.01, torch.float64: 0.01}
"""How far the two sides' log-probabilities of one token may lie apart, in nats: rounding of their type
through different kernels. A wrong or stale tensor moves them by far more."""


CANARY = 16
"""Tokens of a prompt that a hand-over reads: both sides compute each of them at every hand-over."""
DRAWN = 3
"""Tokens that it draws behind them: the first off the prompt, the others off the cache."""


def hand_over(learner: Learner, engine: Engine, version: int, canary: list[int], drawn: int = DRAWN) -> str:
    """The digest of the weights that the engine now draws from; RunError if they are not the learner's.

    Three proofs: the engine says that it holds this version, the digest that it made of what it received
    equals the one made of what was sent, and the log-probabilities of the canary's tokens, and of `drawn`
    tokens that the engine draws greedily behind it, equal the learner's through the engine's own kernels.
    The engine has nothing else to answer.
    """
    sent: list[str] = []
    dtype = learner.compute_dtype

    def parcel() -> Iterator[tuple[str, torch.Tensor]]:
        # One at a time: an adapter's merged matrices together would be a second model.
        for name, tensor in learner.weights():
            value = tensor.detach().to(dtype)
            sent.append(fingerprint(name, value))
            yield name, value

    try:
        received = engine.load(parcel(), version)
    except (KeyError, ValueError) as error:
        raise RunError(f"the sampler did not take version {version}: {error.args[0]}") from error
    if engine.version != version:
        raise RunError(f"the sampler says that it holds version {engine.version}, and was sent {version}")
    if received != combined(sent):
        raise RunError(
            f"the sampler holds other weights than the learner sent as version {version}: "
            f"digest {received}, not {combined(sent)}"
        )
    row, answer = _answered(engine, canary, drawn)
    ours, read = learner.canary(row), engine.score(row)
    # The last of them once more, as they were drawn.
    n = len(answer.tokens)
    found, drew = torch.tensor(ours), torch.tensor(answer.logp_policy)
    # torch's maximum, unlike Python's, does not lose a NaN.
    worst = float(torch.cat([found - torch.tensor(read), found[-n:] - drew]).abs().max())
    if not worst <= TOLERANCE[dtype]:
        raise RunError(
            f"after hand-over of version {version} the sampler's log-probabilities differ from the learner's "
            f"by {worst:.3g} on the canary, more than {TOLERANCE[dtype]:g}"
        )
    return received


def _answered(engine: Engine, canary: list[int], drawn: int) -> tuple[list[int], Completion]:
    """The engine's most likely answer to the canary, or to a shorter one where that ends at once.

    Only what follows an answer's first token has gone through the cache.
    """
    sampling = Sampling(temperature=0.0, max_new_tokens=drawn)
    for end in range(len(canary), max(len(canary) - 4, 0), -1):
        ticket = engine.submit(Request(prompt=tuple(canary[:end]), sampling=sampling))
        done: dict[int, Completion] = {}
        while ticket not in done:
            done.update(engine.step())
        answer = done[ticket]
        if len(answer.tokens) >= min(2, drawn):
            break
    return [*canary[:end], *answer.tokens], answer
