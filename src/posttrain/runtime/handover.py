"""New weights from the learner to the sampler, and proof that they arrived."""

from collections.abc import Iterator

import torch

from posttrain.engines.protocol import Engine
from posttrain.learner.learner import Learner
from posttrain.types import RunError
from posttrain.weights import combined, fingerprint

TOLERANCE = {torch.bfloat16: 0.5, torch.float16: 0.1, torch.float32: 0.01, torch.float64: 0.01}
"""How far the two sides' log-probabilities of one token may lie apart, in nats: rounding of their type
through different kernels. A wrong or stale tensor moves them by far more."""


def hand_over(learner: Learner, engine: Engine, version: int, canary: list[int]) -> str:
    """The digest of the weights that the engine now draws from; RunError if they are not the learner's.

    Three proofs: the engine says that it holds this version, the digest that it made of what it received
    equals the one made of what was sent, and the log-probabilities of the canary's tokens through the
    engine's own kernels equal the learner's.
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
    ours, theirs = learner.canary(canary), engine.score(canary)
    # torch's maximum, unlike Python's, does not lose a NaN.
    worst = float((torch.tensor(ours) - torch.tensor(theirs)).abs().max())
    if not worst <= TOLERANCE[dtype]:
        raise RunError(
            f"after hand-over of version {version} the sampler's log-probabilities differ from the learner's "
            f"by {worst:.3g} on the canary, more than {TOLERANCE[dtype]:g}"
        )
    return received
