"""Prompts made from the fields of a record: "What is {a} + {b}?"."""

import string

from posttrain.base.name_hints import did_you_mean
from posttrain.data.records import Record
from posttrain.types import UserError


def fill_template(template: str, record: Record) -> str:
    """Return the template with the record's fields in place. Raises UserError if one is missing or null.

    >>> fill_template("What is {a} + {b}?", Record({"a": 1, "b": 2}, "d.jsonl:1"))
    'What is 1 + 2?'
    """
    for name in placeholders(template):
        if name not in record.fields:
            hint = did_you_mean(name, record.fields) or f"it has {', '.join(record.fields) or 'none'}"
            raise UserError(record.source, f"there is no field {name!r} for the template", hint)
        if record.fields[name] is None:
            raise UserError(record.source, f"{name!r}, which the template wants, is null")
        value = record.fields[name]
        if any(isinstance(item, dict) for item in (value if isinstance(value, list) else [value])):
            kind = "a list of objects" if isinstance(value, list) else "an object"
            raise UserError(record.source, f"{name!r}, which the template wants, is {kind}, not text")
    try:
        prompt = template.format_map(record.fields)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(record.source, f"the template cannot be filled in: {error}") from None
    if not prompt.strip():
        raise UserError(record.source, "the prompt is empty")
    return prompt


def placeholders(template: str) -> list[str]:
    """Return the names in the braces of a template. Raises ValueError unless it has plain names."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"the template {template!r} cannot be filled in: {error}") from None
    if not names:
        raise ValueError(f"the template {template!r} has no {{field}}, so every prompt would be the same")
    for name in names:
        if not name or name.isdigit() or any(c in name for c in ".["):
            raise ValueError(f"the template names {{{name}}}, where the name of a field belongs")
    return names
