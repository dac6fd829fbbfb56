"""A verifier of JSON: that it is JSON, that it fits a schema, and that it is the answer."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from posttrain.base.foreign import require
from posttrain.process.cpu_limit import OverTimeError, within
from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.fences import last_block
from posttrain.verifiers.protocol import Verifier, gold_answer, shown
from posttrain.verifiers.regions import spoken
from posttrain.verifiers.structure.strict_json import NotJsonError, identity, read

_ESCAPED = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\$", re.DOTALL)
"""What a pattern has escaped, its classes, and its ends."""
_SPACE = r" \t-\r\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
"""What \\s is in ECMA-262; Python's is other characters, with re.ASCII and without."""
TIME_LIMIT_S = 5.0
"""Seconds of the processor for checking one value against a schema, whose patterns can be slow."""


@dataclass(frozen=True, kw_only=True)
class Json(Verifier):
    """1 if the response is JSON that fits a JSON Schema and, if asked, is the task's answer; otherwise 0.

    What is read is the whole response (`all`), the last complete block that is fenced as json (`fenced`), or
    that block, or else the last of all, or else all that is said behind the thought (`auto`). It is read by
    the strict rules of `strict_json`. The schema is the task's field `schema`, or else the option; its draft
    is the one that its "$schema" names, or 2020-12. Nothing is fetched: a "$ref" must lead to a place in the
    schema. Equal are values, not texts: 1 is 1.0, names have no order.

    Labels: right, wrong (it does not fit, or is not the answer), unreadable (not JSON, or not strictly),
    over_limit (a pattern of the schema takes too long on it), no_answer (there is nothing to read).

    >>> json, task = Json(schema={"type": "object", "required": ["age"]}), Task(id="q", messages=())
    >>> json(task, 'So:\\n```json\\n{"age": 7}\\n```').label, json(task, "{}").reason
    ('right', "at $: 'age' is a required property")
    """

    schema: Mapping[str, Any] | str | None = None
    """A JSON Schema, or the path of a file that holds one; a task's own field `schema` goes before it."""
    where: Literal["auto", "all", "fenced"] = "auto"
    """What is read: all of the response; the last block fenced as json; or that, or else the last block of
    all, or else all that is said behind the thought."""
    equals: bool = False
    """Whether it must also be the task's answer, read as JSON."""
    place: ClassVar[int] = 7
    name: str = "json"
    best: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.schema, str):
            # The content and not the path: verdicts are remembered by what the verifier holds.
            object.__setattr__(self, "schema", _load_schema(Path(self.schema).expanduser()))

    def __call__(self, task: Task, response: str) -> Verdict:
        """Right where it is read, fits and is what the task wants."""
        text = self._read_from(response)
        if text is None or not text.strip(" \t\r\n"):
            return Verdict(score=0.0, label="no_answer", reason="there is no JSON to read")
        try:
            value = read(text)
        except NotJsonError as error:
            return Verdict(score=0.0, label="unreadable", reason=str(error))
        schema = self._schema(task)
        try:
            with within(TIME_LIMIT_S):
                wrong = "" if schema is None else _misfit(schema, value)
        except OverTimeError as error:
            return Verdict(score=0.0, label="over_limit", reason=str(error))
        if not wrong and self.equals and identity(value) != identity(read(gold_answer(task))):
            wrong = f"{shown(text.strip())} is not {shown(gold_answer(task).strip())}"
        if wrong:
            return Verdict(score=0.0, label="wrong", reason=wrong)
        return Verdict(score=1.0, label="right", reason="it is what was asked for")

    def _read_from(self, response: str) -> str | None:
        if self.where == "all":
            return response
        block = last_block(response, "json")
        if block is None or (self.where == "fenced" and block.language != "json"):
            return spoken(response) if self.where == "auto" else None
        return block.text(response)

    def _schema(self, task: Task) -> Mapping[str, Any] | None:
        """The schema that a response to this task must fit; UserError if the task's own is none."""
        schema: Any = task.fields.get("schema", self.schema)
        if isinstance(schema, str):
            try:
                schema = read(schema)
            except NotJsonError as error:
                raise UserError(task.source, f"the schema of task {task.id!r}: {error}") from None
        if schema is not None and not isinstance(schema, Mapping):
            raise UserError(task.source, f"the schema of task {task.id!r} is not an object")
        return schema

    def _placed(self, text: str) -> str:
        return text if self.where == "all" else f"```json\n{text}\n```"

    def golds(self, task: Task) -> list[str]:
        """The task's answer, if it is JSON that fits, and the schema's own examples."""
        schema = self._schema(task)
        examples = [] if schema is None or self.equals else schema.get("examples", [])
        texts = [json.dumps(example) for example in examples]
        try:
            value = read(task.answer or "")
            texts += [task.answer or ""] if self.equals or not schema or not _misfit(schema, value) else []
        except NotJsonError:
            pass
        return [self._placed(text) for text in texts]

    def fakes(self, task: Task) -> list[str]:
        """Nothing, what is nearly JSON, and the answer among words or inside a list."""
        nearly = ["{", "[1,]", "{'a': 1}", '{"a": 1, "a": 1}', "NaN", "[" * 1000]
        fakes = ["", *(self._placed(text) for text in nearly)]
        if task.answer and task.answer.strip():
            fakes.append(f"Here it is: {task.answer}")
            fakes += [self._placed(f"[{task.answer}]")] if self.equals else []
        return fakes

    def check(self, task: Task) -> None:
        """UserError if there is nothing to fit, the schema is none, or the answer does not fit it."""
        schema = self._schema(task)
        if schema is None and not self.equals:
            raise UserError(
                task.source,
                f"nothing says what the JSON of task {task.id!r} must be",
                "give a schema ({} takes any JSON), or set equals = true",
            )
        if schema is not None:
            try:
                _check_schema(schema)
            except ValueError as error:
                raise UserError(task.source, f"the schema of task {task.id!r}: {error}") from None
        if self.equals:
            try:
                value = read(gold_answer(task))
            except NotJsonError as error:
                raise UserError(task.source, f"the answer of task {task.id!r}: {error}") from None
            wrong = "" if schema is None else _misfit(schema, value)
            if wrong:
                raise UserError(task.source, f"the answer of task {task.id!r} does not fit: {wrong}")

    def budget_s(self, task: Task) -> float | None:
        """The time limit on a busy computer."""
        return 30.0 + 4 * TIME_LIMIT_S

    def require(self) -> None:
        """UserError if the library jsonschema is not installed."""
        require("jsonschema", "verifier.json")


def _load_schema(path: Path) -> Mapping[str, Any]:
    try:
        schema = read(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, NotJsonError) as error:
        raise ValueError(f"schema: {path} cannot be read: {error}") from None
    if not isinstance(schema, Mapping):
        raise ValueError(f"schema: {path} does not hold an object")
    return schema


def _misfit(schema: Mapping[str, Any], value: Any) -> str:
    """The first thing that does not fit, and where; empty if all does."""
    error = next(iter(_validator(json.dumps(schema)).iter_errors(value)), None)
    if error is None:
        return ""
    message = error.message if len(error.message) <= 200 else f"{error.message[:200]}..."
    return f"at {error.json_path[:100]}: {message}"


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    """What checks values against a schema, given as its text; it fetches nothing. ValueError for no draft."""
    from jsonschema import Draft202012Validator, validators
    from referencing import Registry
    from referencing.jsonschema import specification_with

    contents: Any = json.loads(schema)
    named = contents.get("$schema", Draft202012Validator.META_SCHEMA["$schema"])
    draft: Any = validators.validator_for({"$schema": str(named)}, default=None)  # type: ignore[arg-type]
    if draft is None:
        raise ValueError(f"its draft {named!r} is unknown")
    rules = {"uniqueItems": _unique_items, "multipleOf": _multiple_of, "pattern": _pattern}
    if "divisibleBy" in draft.VALIDATORS:  # draft 3
        rules["divisibleBy"] = _multiple_of
    checker: Any = validators.extend(draft, rules)  # type: ignore[no-untyped-call]
    todo = [specification_with(draft.META_SCHEMA["$schema"]).create_resource(contents)]
    while todo:
        here = todo.pop()
        todo += here.subresources()
        names = here.contents.get("patternProperties") if isinstance(here.contents, dict) else None
        # Several of the library's rules search for these. A reference may lead by way of one.
        if isinstance(names, dict) and "/patternProperties/" not in schema:
            here.contents["patternProperties"] = {_ecma(each): names[each] for each in names}
    return checker(contents, registry=Registry())


def _unique_items(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[Exception]:
    """The library's own rule, in linear time: its own is quadratic where items cannot be sorted."""
    from jsonschema import ValidationError

    if wanted and isinstance(value, list) and len({identity(item) for item in value}) < len(value):
        yield ValidationError("two items are the same")


def _multiple_of(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[Exception]:
    """The library's own rule, in the decimals that were written: 19.99 is a multiple of 0.01."""
    from jsonschema import ValidationError

    if validator.is_type(value, "number") and Fraction(str(value)) % Fraction(str(wanted)):
        yield ValidationError(f"{value} is not a multiple of {wanted}")


def _pattern(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[Exception]:
    """The library's own rule, as ECMA-262 reads patterns: digits are 0 to 9, and $ is the very end."""
    from jsonschema import ValidationError

    if isinstance(value, str) and not re.search(_ecma(wanted), value):
        yield ValidationError(f"{value!r} does not match {wanted!r}")


def _ecma(pattern: str) -> str:
    """A pattern for Python whose letters, digits, white space and end are those of ECMA-262."""
    flags = re.findall(r"^(?:\(\?[a-zA-Z]+\))?", pattern)[0]
    meant = {"$": r"\Z", r"\s": f"[{_SPACE}]", r"\S": f"[^{_SPACE}]"}

    def plain(found: re.Match[str]) -> str:
        text = found.group()
        inner = re.sub(r"\\.", lambda each: _SPACE if each[0] == r"\s" else each[0], text, flags=re.DOTALL)
        return meant.get(text, inner)

    return f"{flags}(?a:{_ESCAPED.sub(plain, pattern[len(flags) :])})"


def _check_schema(schema: Mapping[str, Any]) -> None:
    """ValueError if it is not a schema, or refers to something outside itself."""
    from jsonschema import SchemaError

    validator = _validator(json.dumps(schema))
    try:
        validator.check_schema(schema)
        _check_references(schema, validator)
    except SchemaError as error:
        raise ValueError(f"at {error.json_path}: {error.message[:200]}") from None
    except RecursionError:
        raise ValueError("it refers to itself without end") from None


def _check_references(schema: Mapping[str, Any], validator: Any) -> None:
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import specification_with

    resource = specification_with(validator.META_SCHEMA["$schema"]).create_resource(schema)
    registry = Registry().with_resource(resource.id() or "", resource).crawl()
    stack, places = [(resource, registry.resolver_with_root(resource))], []
    while stack:
        here, resolver = stack.pop()
        contents = here.contents if isinstance(here.contents, Mapping) else {}
        for reference in (contents.get("$ref"), contents.get("$dynamicRef")):
            try:
                if isinstance(reference, str):
                    resolver.lookup(reference)
            except Unresolvable:
                raise ValueError(f"{reference!r} leads outside it, and nothing is fetched") from None
        places.append((contents, resolver))
        stack += [(inner, resolver.in_subresource(inner)) for inner in here.subresources()]
    for contents, resolver in places:  # what is defined by itself never ends, whatever the value
        validator.evolve(schema=contents, _resolver=resolver).is_valid(None)
