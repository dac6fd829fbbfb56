"""The JSON Schema of a recipe, plugins included, for editors that complete and check keys."""

import ast
import dataclasses
import inspect
import textwrap
import typing
from functools import cache
from typing import Any

from posttrain.base.kinds import OneOf, kinds
from posttrain.base.table_reader import json_schema, key_of
from posttrain.math.choice import kind_of
from posttrain.methods.build import CHOICES, readable
from posttrain.methods.table import METHODS
from posttrain.recipe.recipe import Recipe


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass and of its bases, in one line."""
    docs: dict[str, str] = {}
    for base in cls.__bases__:
        docs |= field_docs(base) if dataclasses.is_dataclass(base) else {}
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):  # a class that the registry made has no source of its own
        return docs
    tree = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(tree, ast.ClassDef)
    for one, following in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(one, ast.AnnAssign)
            and isinstance(one.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            docs[one.target.id] = " ".join(str(following.value.value).split())
    return docs


def recipe_schema() -> dict[str, Any]:
    """Return the schema of a recipe's file: every table and key with its type, default and meaning."""
    schema = json_schema(Recipe)
    classes = {cls.__name__: cls for cls in _tables(Recipe)}
    for name, table in [("Recipe", schema), *schema["$defs"].items()]:
        _describe(table, classes[name])
    schema["properties"]["method"] = _method_schema()
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema, "title": "A recipe of posttrain"}


def _tables(cls: type) -> set[type]:
    """Return a configuration and those that its fields hold."""
    tables = {cls}
    for hint in typing.get_type_hints(cls).values():
        for kind in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(kind) and isinstance(kind, type):
                tables |= _tables(kind)
    return tables


def _describe(table: dict[str, Any], cls: type) -> None:
    """Add to a table's schema what its keys mean, the names of kinds, and single tables in place of lists."""
    docs, hints = field_docs(cls), typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        key = table["properties"][key_of(field.name)]
        if field.name in docs:
            key["description"] = docs[field.name]
        for mark in getattr(hints[field.name], "__metadata__", ()):
            if isinstance(mark, OneOf):
                key["enum"] = list(kinds(mark.group))
        if key.get("type") == "array" and "$ref" in key.get("items", {}):
            either = [key["items"], {"type": "array", "items": key.pop("items")}]
            del key["type"]
            key["anyOf"] = either
        if "$ref" in key:
            key.pop("default", None)  # keys of the table have their own


def _method_schema() -> dict[str, Any]:
    """Return the schema of [method]: its name, and the options of all methods."""
    anything = {"type": ["string", "number", "boolean", "object"]}
    own = {option for line in METHODS.values() for option in readable(line.method)}
    choices = [function for functions in CHOICES.values() for function in functions.values()]
    of_choices = {field.name for choice in choices for field in dataclasses.fields(kind_of(choice))}
    options = sorted({*CHOICES, *own, *of_choices} - {"horizon"})
    name = {"enum": list(METHODS), "description": "A method of `posttrain methods`."}
    return {
        "type": "object",
        "description": field_docs(Recipe)["method"],
        "properties": {"name": name, **dict.fromkeys(options, anything)},
        "required": ["name"],
        "additionalProperties": False,
    }
