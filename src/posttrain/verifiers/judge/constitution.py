"""A constitution: principles in one file, and what is drawn from it with a seed.

    [[principle]]
    name = "truth"
    text = "..."        # what an answer should be: for a judge
    critique = "..."    # what the model is asked about its own answer
    revision = "..."    # how it is asked to put it right

Source: Constitutional AI, Bai et al. 2022, arXiv:2212.08073.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from posttrain.base.nearest import did_you_mean
from posttrain.types import UserError
from posttrain.verifiers.judge.rubric import read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Principle:
    """One thing that an answer should be."""

    name: str
    text: str
    critique: str
    revision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Constitution:
    """Principles with names of their own."""

    principles: tuple[Principle, ...]

    def __post_init__(self) -> None:
        names = [principle.name for principle in self.principles]
        if not names:
            raise ValueError("a constitution needs at least one principle")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two principles are called {twice[0]!r}")

    def listed(self) -> str:
        """All principles, one a line."""
        return "\n".join(f"- {principle.text}" for principle in self.principles)

    def drawn(self, count: int, *, seed: int, key: str) -> list[Principle]:
        """`count` principles in random order, each once before any comes again.

        They depend on the seed, on the key (what they are drawn for) and on nothing else.

        >>> ours = read_constitution()
        >>> ours.drawn(3, seed=0, key="What is 2 + 2?") == ours.drawn(3, seed=0, key="What is 2 + 2?")
        True
        """
        digest = hashlib.blake2b(f"{seed}\0{key}".encode("utf-8", "replace"), digest_size=16).digest()
        dice = random.Random(int.from_bytes(digest))
        out: list[Principle] = []
        while len(out) < count:
            out += dice.sample(self.principles, len(self.principles))
        return out[:count]


def read_constitution(path: Path | str = "") -> Constitution:
    """The constitution in a TOML file; ours if none is named.

    Raises UserError with the file, and the number of the principle, for whatever is wrong with it.
    """
    file = Path(path).expanduser() if path else Path(__file__).parent / "constitution.toml"
    found = read_table(file, {"principle"}).get("principle")
    if not isinstance(found, list) or not found:
        raise UserError(str(file), "has no [[principle]]")
    principles = tuple(_principle(table, f"{file}: principle {n}") for n, table in enumerate(found, start=1))
    try:
        return Constitution(principles=principles)
    except ValueError as error:
        raise UserError(str(file), str(error)) from None


def _principle(table: object, where: str) -> Principle:
    known: Sequence[str] = [field.name for field in fields(Principle)]
    if not isinstance(table, dict):
        raise UserError(where, "is not a table", "write [[principle]] above it")
    for key in table:
        if key not in known:
            raise UserError(where, f"unknown key {key!r}", did_you_mean(key, known))
    for key in known:
        if not isinstance(table.get(key), str) or not table[key].strip():
            raise UserError(where, f"{key} must be a text that says something")
    return Principle(**{key: table[key].strip() for key in known})
