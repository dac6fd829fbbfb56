"""Which verifiers judge, and how their scores become one: the table `[verifier]` of a recipe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.base.kinds import chosen, kinds, table_of_kinds
from posttrain.base.nearest import did_you_mean
from posttrain.base.reader import Where, parsed
from posttrain.errors import ADD_VERIFIER
from posttrain.recipe.document import document, override, put
from posttrain.types import UserError
from posttrain.verifiers.combine.combined import Combined, Normalise, Part
from posttrain.verifiers.combine.formula import How
from posttrain.verifiers.combine.length import Length
from posttrain.verifiers.protocol import Verifier


@dataclass(frozen=True, kw_only=True)
class VerifierChoice:
    """Who judges: one of these, or several, whose scores are then combined."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """Of each verifier by its name; 1 where none is given, 0 only records it."""
    combine: How = "sum"
    """sum, product, gate (the first that is not at its best decides), mean, min or mean_minus_std."""
    order: tuple[str, ...] = ()
    """In which a gate asks them. Not given: exact, number, math, code, coq, lean, json, sql, grammar, regex,
    format, instructions, reasoning_gym, judge, model, function, then plugins."""
    k: float | None = None
    """Standard deviations that mean_minus_std takes off; 1 where it is not given."""
    length: Length | None = None
    normalise: Normalise | None = None
    clip: tuple[float, float] | None = None
    """The least and the greatest score, as [-1, 1]."""

    @classmethod
    def of(cls, **tables: Any) -> "VerifierChoice":
        """Return the table of these kinds and options."""
        return cls(**tables)

    def named(self) -> list[Verifier]:
        """Return the verifiers that the table names, in the order of their `place`."""
        given = [kind if isinstance(kind, tuple) else (kind,) for kind in chosen(self).values()]
        tables = [each for several in given for each in several]
        made: list[Verifier] = [table.build() if hasattr(table, "build") else table for table in tables]
        return sorted(made, key=lambda verifier: verifier.place)

    def build(self) -> Verifier | None:
        """The verifier, or None if none is named. UserError for a weight or place of something else."""
        given = self.named()
        names = [v.name for v in given]
        for key, mentioned in (("weights", self.weights), ("order", self.order)):
            for name in sorted(set(mentioned) - set(names)):
                raise UserError(
                    f"verifier.{key}", f"{name!r} is not among the verifiers", did_you_mean(name, names)
                )
        if self.order and (self.combine != "gate" or len(set(self.order)) != len(given)):
            problem = "is read by a gate only" if self.combine != "gate" else "must name each verifier once"
            raise UserError("verifier.order", problem)
        given.sort(key=lambda v: self.order.index(v.name) if self.order else 0)
        alone = len(given) == 1 and not self.weights and self.combine == "sum"
        if not given:
            return None
        if alone and self.k is None and not (self.length or self.normalise or self.clip):
            return given[0]
        try:
            return Combined(
                parts=tuple(Part(verifier=v, weight=self.weights.get(v.name, 1.0)) for v in given),
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
class _Judging:
    """A recipe's verifiers and nothing else."""

    verifier: VerifierChoice


def read_verifier(name: str, overrides: Sequence[str] = ()) -> Verifier:
    """A verifier by its name, with `option=value` overrides; or that of a recipe; or a module:function.

    Raises UserError for an unknown name or option, and for what the verifier itself refuses.
    """
    path, text, tables = Path(name).expanduser(), "", {}
    if name.endswith(".toml"):
        found, text = document(path)
        tables = {"verifier": found.get("verifier", {})}
        prefix = "verifier"
    elif name in kinds("verifiers"):
        tables, prefix = {"verifier": {name: {}}}, f"verifier.{name}"
    elif ":" in name:
        tables, prefix = {"verifier": {"function": {"function": name}}}, "verifier.function"
    else:
        known = kinds("verifiers")
        others = f"there are {', '.join(known)}; or name a recipe or a function"
        raise UserError("", f"there is no verifier {name!r}", did_you_mean(name, known) or others)
    given: dict[str, str] = {}
    for each in overrides:
        place = f"--set {each}"
        key, value = override(each, place)
        key = key if key.startswith("verifier.") else f"{prefix}.{key}"
        put(tables, key, value, place)
        given[key] = place
    verifier: Verifier | None = parsed(_Judging, tables, Where(path, text, given)).verifier.build()
    if verifier is None:
        raise UserError(name, "it names no verifier", str(ADD_VERIFIER))
    return verifier
