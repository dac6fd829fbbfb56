"""The verifier `json`: the response is JSON, fits a schema, and equals the answer."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from posttrain.base.libraries import require
from posttrain.process.cpu_limit import OverTimeError, within
from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.fences import last_block
from posttrain.verifiers.protocol import Verifier, gold_answer, quote
from posttrain.verifiers.regions import remove_thought
from posttrain.verifiers.structure.strict_json import NotJsonError, identity, read

_ESCAPED = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\$", re.DOTALL)
"""Finds the escapes, the character classes and the `$` of a regular expression."""
_SPACE = r" \t-\r\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
"""Characters of \\s in ECMA-262; Python's \\s differs, with re.ASCII and without."""
TIME_LIMIT_S = 5.0
"""CPU seconds for checking one value against a schema, whose patterns can be slow."""


@dataclass(frozen=True, kw_only=True)
class Json(Verifier):
    """1 if the response is JSON that fits a schema and, with `equals`, is the task's answer; otherwise 0.

    `where` selects the text, and `strict_json` parses it. The JSON Schema is the task's field `schema`, or
    else the option; its "$schema" names the draft, by default 2020-12. Nothing is fetched: a "$ref" must
    point into the schema. `equals` compares values and not texts: 1 equals 1.0, and names have no order.

    Labels: right, wrong (does not fit, or is not the answer), unreadable (not strict JSON), over_limit (a
    pattern of the schema takes too long), no_answer (nothing to read).

    >>> json, task = Json(schema={"type": "object", "required": ["age"]}), Task(id="q", messages=())
    >>> json(task, 'So:\\n```json\\n{"age": 7}\\n```').label, json(task, "{}").reason
    ('right', "at $: 'age' is a required property")
    """

    schema: Mapping[str, Any] | str | None = None
    """A JSON Schema, or the path of a file with one; a task's field `schema` overrides it."""
    where: Literal["auto", "all", "fenced"] = "auto"
    """Text to read: the whole response (all); the last block fenced as json (fenced); or that block, else the
    last block, else the text after the thought (auto)."""
    equals: bool = False
    """Whether the value must also equal the task's answer, read as JSON."""
    place: ClassVar[int] = 7
    name: str = "json"
    best: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.schema, str):
            # The content replaces the path, because the pool caches verdicts by the fields of the verifier.
            object.__setattr__(self, "schema", _load_schema(Path(self.schema).expanduser()))

    def __call__(self, task: Task, response: str) -> Verdict:
        """Read, validate and compare the response."""
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
            wrong = f"{quote(text.strip())} is not {quote(gold_answer(task).strip())}"
        if wrong:
            return Verdict(score=0.0, label="wrong", reason=wrong)
        return Verdict(score=1.0, label="right", reason="it is what was asked for")

    def _read_from(self, response: str) -> str | None:
        if self.where == "all":
            return response
        block = last_block(response, "json")
        if block is None or (self.where == "fenced" and block.language != "json"):
            return remove_thought(response) if self.where == "auto" else None
        return block.text(response)

    def _schema(self, task: Task) -> Mapping[str, Any] | None:
        """Return the schema for this task; None without one. Raises UserError if it is not a JSON object."""
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
        """Return the schema's examples, and the task's answer if it is JSON that fits."""
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
        """Return the empty response, texts that are almost JSON, and the answer after words or in a list."""
        nearly = ["{", "[1,]", "{'a': 1}", '{"a": 1, "a": 1}', "NaN", "[" * 1000]
        fakes = ["", *(self._placed(text) for text in nearly)]
        if task.answer and task.answer.strip():
            fakes.append(f"Here it is: {task.answer}")
            fakes += [self._placed(f"[{task.answer}]")] if self.equals else []
        return fakes

    def check(self, task: Task) -> None:
        """Raise UserError if there is neither schema nor answer to compare, or if one is invalid."""
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
        """Return the time limit with a margin for a loaded machine."""
        return 30.0 + 4 * TIME_LIMIT_S

    def require(self) -> None:
        """Raise UserError if the library jsonschema is not installed."""
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
    """Return the first violation of the schema and its place; "" if the value fits."""
    error = next(iter(_validator(json.dumps(schema)).iter_errors(value)), None)
    if error is None:
        return ""
    message = error.message if len(error.message) <= 200 else f"{error.message[:200]}..."
    return f"at {error.json_path[:100]}: {message}"


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    """Build the validator of a schema, given as JSON text. Raises ValueError if the draft is unknown."""
    from jsonschema import Draft202012Validator, validators
    from referencing import Registry
    from referencing.jsonschema import specification_with

    contents: Any = json.loads(schema)
    draft_id = contents.get("$schema", Draft202012Validator.META_SCHEMA["$schema"])
    draft: Any = validators.validator_for({"$schema": str(draft_id)}, default=None)  # type: ignore[arg-type]
    if draft is None:
        raise ValueError(f"its draft {draft_id!r} is unknown")
    rules = {"uniqueItems": _unique_items, "multipleOf": _multiple_of, "pattern": _pattern}
    if "divisibleBy" in draft.VALIDATORS:  # draft 3
        rules["divisibleBy"] = _multiple_of
    checker: Any = validators.extend(draft, rules)  # type: ignore[no-untyped-call]
    todo = [specification_with(draft.META_SCHEMA["$schema"]).create_resource(contents)]
    while todo:
        resource = todo.pop()
        todo += resource.subresources()
        names = resource.contents.get("patternProperties") if isinstance(resource.contents, dict) else None
        # Several of the library's rules search these patterns. A reference may name one, as it is written.
        if isinstance(names, dict) and "/patternProperties/" not in schema:
            resource.contents["patternProperties"] = {_ecma(pattern): names[pattern] for pattern in names}
    return checker(contents, registry=Registry())


def _unique_items(validator: Any, unique: Any, value: Any, schema: Any) -> Iterator[Exception]:
    """Check uniqueItems in linear time; the library's rule is quadratic if items cannot be sorted."""
    from jsonschema import ValidationError

    if unique and isinstance(value, list) and len({identity(item) for item in value}) < len(value):
        yield ValidationError("two items are the same")


def _multiple_of(validator: Any, divisor: Any, value: Any, schema: Any) -> Iterator[Exception]:
    """Check multipleOf on the decimals as written: 19.99 is a multiple of 0.01."""
    from jsonschema import ValidationError

    if validator.is_type(value, "number") and Fraction(str(value)) % Fraction(str(divisor)):
        yield ValidationError(f"{value} is not a multiple of {divisor}")


def _pattern(validator: Any, pattern: Any, value: Any, schema: Any) -> Iterator[Exception]:
    """Check pattern by the rules of ECMA-262: digits are 0 to 9, and $ is the end of the text."""
    from jsonschema import ValidationError

    if isinstance(value, str) and not re.search(_ecma(pattern), value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _ecma(pattern: str) -> str:
    """Translate a pattern of ECMA-262 to Python: its letters, digits, white space and end."""
    flags = re.findall(r"^(?:\(\?[a-zA-Z]+\))?", pattern)[0]
    replacements = {"$": r"\Z", r"\s": f"[{_SPACE}]", r"\S": f"[^{_SPACE}]"}

    def plain(match: re.Match[str]) -> str:
        text = match.group()
        inner = re.sub(
            r"\\.", lambda escape: _SPACE if escape[0] == r"\s" else escape[0], text, flags=re.DOTALL
        )
        return replacements.get(text, inner)

    return f"{flags}(?a:{_ESCAPED.sub(plain, pattern[len(flags) :])})"


def _check_schema(schema: Mapping[str, Any]) -> None:
    """Raise ValueError if this is not a valid schema, or refers to something outside itself."""
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
    for (
        contents,
        resolver,
    ) in places:  # a definition that refers to itself recurses without end, for any value
        validator.evolve(schema=contents, _resolver=resolver).is_valid(None)
