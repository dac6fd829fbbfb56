"""The known name that a misspelt one was probably meant to be."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the nearest known name; empty if none is near.

    >>> did_you_mean("anwser", ["question", "answer"])
    "did you mean 'answer'?"
    >>> did_you_mean("x", ["question", "answer"])
    ''
    """
    lower = {k.lower(): k for k in known}
    found = get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    return f"did you mean {lower[found[0]]!r}?" if found else ""
