"""Evidence cards: a claim, where it stands, and the verdict of an experiment.

A card is a page of docs/claims whose YAML head states the claim and its verdict. Nothing here needs torch.
"""

import datetime
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from posttrain.base.name_hints import did_you_mean
from posttrain.errors import UserError

HOLDS, FAILS, UNDECIDED = "holds here", "does not hold here", "undecided"
VERDICTS = (HOLDS, FAILS, UNDECIDED)
_TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("claim", "source", "changes", "verdict"), (str, "a text")),
    "experiment": (str, "the name of a module"),
    "recipe": (str, "the name of a recipe"),
    "minutes": (int | float, "a number"),
    "seeds": (int, "a whole number"),
    "first_seed": (int, "a whole number"),
    "date": (datetime.date, "a day as 2026-01-31"),
    "values": (list, "a number for each seed"),
}
"""Type and description of each key of a head."""
_PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Card:
    """A claim with its verdict: the head of a page of docs/claims."""

    name: str
    """Stem of the page's file."""
    file: Path
    claim: str
    """One sentence, as the source states it."""
    source: str
    """Course notes with their section (docs/errata.md names them A to E), or a paper."""
    seeds: int
    date: datetime.date
    """Day on which it was measured."""
    verdict: str
    changes: str
    """What would change the verdict."""
    minutes: float = 0.0
    """Time that all seeds take on one core; 0 if it was not measured, which only a recipe may leave open."""
    experiment: str = ""
    """Module of posttrain_study.claims that measures the claim."""
    recipe: str = ""
    """Pipeline of `posttrain recipes` whose runs the page reports, in place of an experiment."""
    first_seed: int | None = None
    """The first of its seeds; None: that of the experiment."""
    values: tuple[float, ...] = ()
    """What the experiment's rule for this card measured, one number for each seed."""

    @property
    def command(self) -> str:
        """The command that measures the claim."""
        return f"posttrain claims {self.name} --run" if self.experiment else f"posttrain train {self.recipe}"

    @property
    def head(self) -> dict[str, Any]:
        """The head and the name, as JSON holds them."""
        every = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "file"}
        return {key: str(value) if key == "date" else value for key, value in every.items() if value}

    @property
    def answer(self) -> str:
        """The page up to its first section: claim, verdict and answer, without comments and pictures."""
        page = self.file.read_text(encoding="utf-8").split("---\n", 2)[2].partition("\n## ")[0]
        text = "\n".join(line for line in page.splitlines() if not line.startswith(("<!--", "![")))
        return re.sub(r"\n{3,}", "\n\n", text).strip()


def cards_dir() -> Path:
    """Return the folder of the cards: in the installed package, or in the repository of an editable one."""
    installed = _PACKAGE / "pages"
    return installed if installed.is_dir() else _PACKAGE.parents[2] / "docs" / "claims"


def read(file: Path) -> Card:
    """Return the card of a page. Raises UserError for a head that lacks something or says it wrongly."""
    start, _, rest = file.read_text(encoding="utf-8").partition("---\n")
    try:
        head = None if start else yaml.safe_load(rest.partition("\n---\n")[0])
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise UserError(
            str(file), f"its head is not YAML: {problem}", "quote a text with ': ' in it"
        ) from None
    if not isinstance(head, dict):
        raise UserError(str(file), "it has no head", "begin with --- and end the head with ---")
    _check(file, head)
    return Card(**{**head, "values": tuple(map(float, head.get("values", ())))}, name=file.stem, file=file)


def _check(file: Path, head: Mapping[str, Any]) -> None:
    optional = {item.name for item in fields(Card) if item.default is not MISSING}
    for key in head.keys() - _TYPES.keys():
        raise UserError(f"{file}: {key}", "unknown key", did_you_mean(str(key), _TYPES))
    for key in _TYPES.keys() - optional - head.keys():
        raise UserError(f"{file}: {key}", "the head lacks it", f"add it: {_TYPES[key][1]}")
    for key, value in head.items():
        if not isinstance(value, _TYPES[key][0]) or value in ("", []):
            raise UserError(f"{file}: {key}", f"unexpected {value!r}", f"give {_TYPES[key][1]}")
    if head["verdict"] not in VERDICTS:
        raise UserError(f"{file}: verdict", f"unexpected {head['verdict']!r}", " or ".join(VERDICTS))
    if "experiment" in head and "minutes" not in head:
        raise UserError(f"{file}: minutes", "the head lacks it", "posttrain claims NAME --run prints it")
    if ("experiment" in head) == ("recipe" in head):
        raise UserError(
            str(file), "it needs an experiment or a recipe", "name the one that measures the claim"
        )
    values = head.get("values", [])
    if not all(isinstance(value, int | float) for value in values) or len(values) not in (0, head["seeds"]):
        fix = f"give a number for each of the {head['seeds']} seeds"
        raise UserError(f"{file}: values", f"unexpected {values}", fix)


def cards() -> dict[str, Card]:
    """Return the cards by name, sorted."""
    return {file.stem: read(file) for file in sorted(cards_dir().glob("*.md"))}


def find_card(name: str) -> Card:
    """Return the card of this name. Raises UserError for an unknown name."""
    file = cards_dir() / f"{name}.md"
    names = sorted(path.stem for path in cards_dir().glob("*.md"))
    if name not in names:
        raise UserError(
            "NAME", f"there is no claim {name!r}", did_you_mean(name, names) or "posttrain claims lists them"
        )
    return read(file)
