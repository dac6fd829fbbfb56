"""Enumerate every answer of a small vocabulary, with the probabilities of groups of answers."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import torch
from jaxtyping import Float

EOS = 1
Group = tuple[int, ...]
"""Indices of answers that were drawn together, in rising order."""


def group_chances(p: Float[torch.Tensor, "N"], groups: Sequence[Group]) -> Float[torch.Tensor, "G"]:
    """Probability of each group, of answers drawn independently with these probabilities, in any order.

    >>> group_chances(torch.tensor([0.5, 0.5]), [(0, 0), (0, 1), (1, 1)])
    tensor([0.2500, 0.5000, 0.2500])
    """
    orders = [math.factorial(len(g)) // math.prod(map(math.factorial, Counter(g).values())) for g in groups]
    return torch.tensor(orders).to(p) * p[torch.tensor(groups)].prod(1)


def fixed_length(vocabulary: int, length: int) -> list[list[int]]:
    """Return all answers of this many tokens.

    >>> fixed_length(2, 2)
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    return [list(a) for a in itertools.product(range(vocabulary), repeat=length)]


def bounded_length(vocabulary: int, length: int) -> list[list[int]]:
    """Return all answers that stop at the end token, 1, or after this many tokens.

    >>> bounded_length(2, 2)
    [[0, 0], [0, 1], [1]]
    """
    cut = {tuple(a[: a.index(EOS) + 1] if EOS in a else a) for a in fixed_length(vocabulary, length)}
    return [list(a) for a in sorted(cut)]
