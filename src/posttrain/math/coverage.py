"""pass@k, estimated from counts of right answers."""

from math import comb


def coverage(right: int, sampled: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the probability that k of n answers include one of the c right ones.

    Unbiased for pass@k, the probability that at least one of k fresh answers is right.

    Raises ValueError for k > n.

    Source: arXiv:2107.03374, eq. 1.

    >>> coverage(1, 4, 1), coverage(1, 4, 2), coverage(1, 4, 4)
    (0.25, 0.5, 1.0)
    """
    if not 0 <= right <= sampled or not 1 <= k <= sampled:
        raise ValueError(f"there is no pass@{k} of {right} right answers of {sampled}")
    return 1 - comb(sampled - right, k) / comb(sampled, k)
