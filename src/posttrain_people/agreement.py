"""Agreement of raters beyond chance: Cohen's kappa of two, Krippendorff's alpha of any number.

Both are computed in exact fractions, on nominal categories. 1 is complete agreement, 0 that of raters who
draw their labels independently from the observed frequencies.

Source: Cohen 1960, "A coefficient of agreement for nominal scales"; Krippendorff 2011, "Computing
Krippendorff's alpha-reliability".
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from fractions import Fraction


def cohen_kappa(pairs: Sequence[tuple[Hashable, Hashable]]) -> Fraction | None:
    """Return κ = (p_o - p_e) / (1 - p_e) of two raters' labels of the same units.

    p_o is the share of equal labels, p_e = Σ_c p_1(c) p_2(c). None without pairs, and for p_e = 1.

    >>> cohen_kappa([("yes", "yes")] * 20 + [("yes", "no")] * 5 + [("no", "yes")] * 10 + [("no", "no")] * 15)
    Fraction(2, 5)
    """
    if not pairs:
        return None
    first, second = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    observed = Fraction(sum(a == b for a, b in pairs), len(pairs))
    expected = Fraction(sum(first[c] * second[c] for c in first), len(pairs) ** 2)
    return None if expected == 1 else (observed - expected) / (1 - expected)


def krippendorff_alpha(units: Iterable[Sequence[Hashable]]) -> Fraction | None:
    """Return α = 1 - D_o / D_e of the labels that each unit received, from any number of raters.

    D_o is the share of unequal labels among the ordered pairs within units, each unit of m labels weighted by
    1 / (m - 1); D_e that among all pairs of labels. Units with fewer than two labels are left out. None if
    there are no others, or if all labels are equal.

    >>> krippendorff_alpha([(0, 0), (1, 1), (0, 1), (0, 0)])
    Fraction(8, 15)
    """
    totals: Counter[Hashable] = Counter()
    unequal = Fraction(0)
    for labels in units:
        if len(labels) < 2:
            continue
        counts = Counter(labels)
        totals.update(counts)
        ordered = len(labels) ** 2 - sum(count**2 for count in counts.values())
        unequal += Fraction(ordered, len(labels) - 1)
    n = totals.total()
    expected = Fraction(n * n - sum(count**2 for count in totals.values()), n * (n - 1)) if n else Fraction(0)
    if expected == 0:
        return None
    return 1 - unequal / n / expected
