"""A constitution: principles in one file, drawn by a seed.

    [[principle]]
    name = "truth"
    text = "..."        # what an answer should be; for a judge
    critique = "..."    # the request to criticise its own answer
    revision = "..."    # the request to rewrite it

Source: Constitutional AI, Bai et al. 2022, arXiv:2212.08073.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from posttrain.base.name_hints import did_you_mean
from posttrain.types import UserError
from posttrain.verifiers.judge.rubric import read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Principle:
    """A requirement on answers, with the requests that use it."""

    name: str
    text: str
    critique: str
    revision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Constitution:
    """A set of principles with distinct names."""

    principles: tuple[Principle, ...]

    def __post_init__(self) -> None:
        names = [principle.name for principle in self.principles]
        if not names:
            raise ValueError("a constitution needs at least one principle")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two principles are called {twice[0]!r}")

    def listed(self) -> str:
        """Return all principles, one per line."""
        return "\n".join(f"- {principle.text}" for principle in self.principles)

    def drawn(self, count: int, *, seed: int, key: str) -> list[Principle]:
        """Draw `count` principles in random order, each once before any repeats.

        They depend on the seed and on the key (for example the prompt) alone.

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
    """Read a constitution from a TOML file; without a path, the one of this package.

    Raises UserError with the file and the number of the principle that is wrong.
    """
    file = Path(path).expanduser() if path else Path(__file__).parent / "constitution.toml"
    tables = read_table(file, {"principle"}).get("principle")
    if not isinstance(tables, list) or not tables:
        raise UserError(str(file), "has no [[principle]]")
    principles = tuple(_principle(table, f"{file}: principle {n}") for n, table in enumerate(tables, start=1))
    try:
        return Constitution(principles=principles)
    except ValueError as error:
        raise UserError(str(file), str(error)) from None


def _principle(table: object, where: str) -> Principle:
    keys: Sequence[str] = [field.name for field in fields(Principle)]
    if not isinstance(table, dict):
        raise UserError(where, "is not a table", "write [[principle]] above it")
    for key in table:
        if key not in keys:
            raise UserError(where, f"unknown key {key!r}", did_you_mean(key, keys))
    for key in keys:
        if not isinstance(table.get(key), str) or not table[key].strip():
            raise UserError(where, f"{key} must be a text that says something")
    return Principle(**{key: table[key].strip() for key in keys})
