"""The table `[verifier]`: which verifiers judge an answer, and how their scores are combined."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.base.kinds import chosen_kinds, kinds, table_of_kinds
from posttrain.base.name_hints import did_you_mean
from posttrain.base.table_reader import Where, parse
from posttrain.base.usercode import how_to_name_function
from posttrain.errors import ADD_VERIFIER
from posttrain.models.checkpoint import split_run
from posttrain.recipe.catalogue import find_recipe
from posttrain.recipe.document import is_run, parse_override, put, read_toml, with_nearby_files
from posttrain.types import UserError
from posttrain.verifiers.combine.combined import Combined, Normalise, Part
from posttrain.verifiers.combine.formula import How
from posttrain.verifiers.combine.length import Length
from posttrain.verifiers.protocol import Verifier


@dataclass(frozen=True, kw_only=True)
class VerifierChoice:
    """The verifiers that judge an answer: one, or several whose scores are combined."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each verifier's score, by its name; 1 if not given. 0 only records a score, but pays 0 in a
    gate."""
    combine: How = "sum"
    """How weighted scores become one: sum, product, gate (the score of the first verifier that gives less
    than its best), mean, min or mean_minus_std."""
    order: tuple[str, ...] = ()
    """Names of the verifiers in the order in which a gate asks them. Not given: exact, number, math, code,
    coq, lean, json, sql, grammar, regex, format, instructions, reasoning_gym, judge, model, function, rubric,
    http, then plugins."""
    k: float | None = None
    """Number of standard deviations that mean_minus_std subtracts; 1 if not given."""
    length: Length | None = None
    """How the length of an answer changes its score; see the page on combining."""
    normalise: Normalise | None = None
    """Replace the combined score by (score − mean) / std, as {mean = 0.4, std = 0.2}."""
    clip: tuple[float, float] | None = None
    """Least and greatest final score, as [-1, 1]."""

    @classmethod
    def of(cls, **tables: Any) -> "VerifierChoice":
        """Return the table with these verifiers and options, whose names type checkers do not know."""
        return cls(**tables)

    def build_parts(self) -> list[Verifier]:
        """Return each verifier of the table, in the order of their `place`."""
        values = [kind if isinstance(kind, tuple) else (kind,) for kind in chosen_kinds(self).values()]
        tables = [table for several in values for table in several]
        parts: list[Verifier] = [table.build() if hasattr(table, "build") else table for table in tables]
        return sorted(parts, key=lambda verifier: verifier.place)

    def build(self) -> Verifier | None:
        """Return the combined verifier, or None for an empty table.

        Raises UserError for `weights` and `order` that name other verifiers.
        """
        parts = self.build_parts()
        names = [verifier.name for verifier in parts]
        for key, mentions in (("weights", self.weights), ("order", self.order)):
            for name in sorted(set(mentions) - set(names)):
                raise UserError(
                    f"verifier.{key}", f"{name!r} is not among the verifiers", did_you_mean(name, names)
                )
        if self.order and (self.combine != "gate" or len(set(self.order)) != len(parts)):
            problem = "is read by a gate only" if self.combine != "gate" else "must name each verifier once"
            raise UserError("verifier.order", problem)
        parts.sort(key=lambda v: self.order.index(v.name) if self.order else 0)
        single = len(parts) == 1 and not self.weights and self.combine == "sum"
        if not parts:
            return None
        if single and self.k is None and not (self.length or self.normalise or self.clip):
            return parts[0]
        try:
            return Combined(
                parts=tuple(Part(verifier=v, weight=self.weights.get(v.name, 1.0)) for v in parts),
                how=self.combine,
                k=self.k,
                length=self.length,
                normalise=self.normalise,
                clip=self.clip,
            )
        except ValueError as error:
            raise UserError("verifier", str(error)) from None


if not TYPE_CHECKING:
    VerifierChoice = table_of_kinds(VerifierChoice, "verifiers", __name__)


@dataclass(frozen=True, kw_only=True)
class _VerifierOnly:
    """The table [verifier] of a recipe without the others."""

    verifier: VerifierChoice


def verifier_file(name: str) -> Path | None:
    """Return the recipe that a verifier's name names: a .toml file, or that of a run or of its checkpoint."""
    path = Path(name).expanduser()
    if is_run(path):
        return split_run(path)[0] / "config.toml"
    return find_recipe(path) if name.endswith(".toml") else None


def read_verifier(name: str, overrides: Sequence[str] = ()) -> Verifier:
    """Return the verifier of a registered name, of a recipe file, of a run, or of a "module:function".

    overrides: "option=value", for the verifier named, or "verifier.table.option=value". Raises UserError for
    an unknown name or option, and for a value that the verifier refuses.
    """
    path, text, tables = verifier_file(name), "", {}
    if path is not None:
        recipe, text = read_toml(path)
        tables = with_nearby_files({"verifier": recipe.get("verifier", {})}, path.parent)
        prefix = "verifier"
    elif name in kinds("verifiers"):
        tables, prefix = {"verifier": {name: {}}}, f"verifier.{name}"
    elif ":" in name:
        tables, prefix = {"verifier": {"function": {"function": name}}}, "verifier.function"
    else:
        known = kinds("verifiers")
        others = f"there are {', '.join(known)}; or name a recipe, a run or a function"
        if name.endswith(".py"):
            others = how_to_name_function(Path(name))
        raise UserError("", f"there is no verifier {name!r}", did_you_mean(name, known) or others)
    places: dict[str, str] = {}
    for assignment in overrides:
        place = f"--set {assignment}"
        key, value = parse_override(assignment, place)
        key = key if key.startswith("verifier.") else f"{prefix}.{key}"
        put(tables, key, value, place)
        places[key] = place
    verifier: Verifier | None = parse(
        _VerifierOnly, tables, Where(path or Path(name), text, places)
    ).verifier.build()
    if verifier is None:
        raise UserError(name, "it names no verifier", str(ADD_VERIFIER))
    return verifier
