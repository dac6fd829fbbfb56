"""Which verifiers judge, and how their scores become one: the table `[verifier]` of a recipe."""

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.base.nearest import did_you_mean
from posttrain.base.reader import Where, parsed
from posttrain.errors import ADD_VERIFIER
from posttrain.recipe.document import document, override, put
from posttrain.recipe.writers import JudgeChoice
from posttrain.types import UserError
from posttrain.verifiers.answers import Exact, Number
from posttrain.verifiers.code.verifier import Code
from posttrain.verifiers.combine.combined import Combined, Normalise, Part
from posttrain.verifiers.combine.formula import How
from posttrain.verifiers.combine.length import Length
from posttrain.verifiers.combine.penalties import Language, Repetition
from posttrain.verifiers.function import Function
from posttrain.verifiers.instructions.verifier import Instructions
from posttrain.verifiers.math import Math
from posttrain.verifiers.model.verifier import RewardModel
from posttrain.verifiers.proof.coq.verifier import Coq
from posttrain.verifiers.proof.lean.verifier import Lean
from posttrain.verifiers.protocol import Verifier
from posttrain.verifiers.reasoning_gym.verifier import ReasoningGymScorer
from posttrain.verifiers.structure.grammar import Grammar
from posttrain.verifiers.structure.json_schema import Json
from posttrain.verifiers.structure.patterns import Format, Regex
from posttrain.verifiers.structure.sql import Sql


@dataclass(frozen=True, kw_only=True)
class VerifierChoice:
    """Who judges: one of these, or several, whose scores are then combined."""

    exact: Exact | None = None
    number: Number | None = None
    math: Math | None = None
    code: Code | None = None
    coq: Coq | None = None
    lean: Lean | None = None
    json: Json | None = None
    sql: Sql | None = None
    grammar: Grammar | None = None
    regex: Regex | None = None
    format: Format | None = None
    instructions: Instructions | None = None
    reasoning_gym: ReasoningGymScorer | None = None
    judge: JudgeChoice | None = None
    model: RewardModel | None = None
    function: tuple[Function, ...] = ()
    repetition: Repetition | None = None
    language: Language | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of each verifier by its name; 1 where none is given, 0 only records it."""
    combine: How = "sum"
    """sum, product, gate (the first that is not at its best decides), mean, min or mean_minus_std."""
    order: tuple[str, ...] = ()
    """In which a gate asks them; not given: the order of this table."""
    k: float | None = None
    """Standard deviations that mean_minus_std takes off; 1 where it is not given."""
    length: Length | None = None
    normalise: Normalise | None = None
    clip: tuple[float, float] | None = None
    """The least and the greatest score, as [-1, 1]."""

    def build(self) -> Verifier | None:
        """The verifier, or None if none is named. UserError for a weight or place of something else."""
        named = [v for n in VERIFIERS if (v := getattr(self, n)) is not None]
        chosen: list[Any] = [each for v in named for each in (v if isinstance(v, tuple) else (v,))]
        given: list[Verifier] = [v.build() if hasattr(v, "build") else v for v in chosen]
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


VERIFIERS = (
    *("exact", "number", "math", "code", "coq", "lean", "json", "sql", "grammar", "regex", "format"),
    *("instructions", "reasoning_gym", "judge", "model", "function", "repetition", "language"),
)
"""Keys of the table that name a verifier."""


def kinds_of_verifiers() -> dict[type, str]:
    """Return which verifier of a recipe each class is the configuration of."""
    hints = typing.get_type_hints(VerifierChoice)
    named = {cls: name for name in VERIFIERS for cls in typing.get_args(hints[name]) if isinstance(cls, type)}
    return {cls: name for cls, name in named.items() if cls not in (Function, type(None))}


@dataclass(frozen=True, kw_only=True)
class _Judging:
    """A recipe's verifiers and nothing else."""

    verifier: VerifierChoice


def read_verifier(chosen: str, overrides: Sequence[str] = ()) -> Verifier:
    """A verifier by its name, with `option=value` overrides; or that of a recipe; or a module:function.

    Raises UserError for an unknown name or option, and for what the verifier itself refuses.
    """
    path, text, tables = Path(chosen).expanduser(), "", {}
    if chosen.endswith(".toml"):
        found, text = document(path)
        tables = {"verifier": found.get("verifier", {})}
        prefix = "verifier"
    elif chosen in VERIFIERS:
        tables, prefix = {"verifier": {chosen: {}}}, f"verifier.{chosen}"
    elif ":" in chosen:
        tables, prefix = {"verifier": {"function": {"function": chosen}}}, "verifier.function"
    else:
        others = f"there are {', '.join(VERIFIERS)}; or name a recipe or a function"
        raise UserError("", f"there is no verifier {chosen!r}", did_you_mean(chosen, VERIFIERS) or others)
    given: dict[str, str] = {}
    for each in overrides:
        place = f"--set {each}"
        key, value = override(each, place)
        key = key if key.startswith("verifier.") else f"{prefix}.{key}"
        put(tables, key, value, place)
        given[key] = place
    verifier: Verifier | None = parsed(_Judging, tables, Where(path, text, given)).verifier.build()
    if verifier is None:
        raise UserError(chosen, "it names no verifier", str(ADD_VERIFIER))
    return verifier
