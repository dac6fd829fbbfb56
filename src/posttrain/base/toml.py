"""Write tables as TOML, which the standard library only reads, and list their dotted keys."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any


def dump(tables: Mapping[str, Any]) -> str:
    """Return tables as TOML text, from which a parser reads the same tables.

    >>> print(dump({"run": {"seed": 1}, "method": {"name": "grpo"}}), end="")
    [run]
    seed = 1
    <BLANKLINE>
    [method]
    name = "grpo"
    """
    return "\n".join(
        _table(name, entry, listed=isinstance(table, list))
        for name, table in tables.items()
        for entry in (table if isinstance(table, list) else [table])
    )


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by their dotted keys.

    >>> flat({"model": {"path": "m"}, "run.seed": 1})
    {'model.path': 'm', 'run.seed': 1}
    """
    out: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping) and value:
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out


def _table(name: str, table: Mapping[str, Any], *, listed: bool = False) -> str:
    """Return the text of a table, or of one of several that have this name."""
    plain = {k: v for k, v in table.items() if not isinstance(v, Mapping)}
    nested = {k: v for k, v in table.items() if isinstance(v, Mapping)}
    lines = [f"{_key(k)} = {inline(v)}" for k, v in plain.items()]
    head = f"[{name}]\n" if plain or not nested else ""
    head = f"[[{name}]]\n" if listed else head
    parts = ([head + "".join(f"{line}\n" for line in lines)] if head else []) + [
        _table(f"{name}.{_key(k)}", v) for k, v in nested.items()
    ]
    return "\n".join(parts)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _string(name)


def inline(value: Any) -> str:
    """Return a value as TOML writes it within a line.

    >>> inline({"a": [1, "x"]})
    '{a = [1, "x"]}'
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, list):
        return "[" + ", ".join(inline(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {inline(v)}" for k, v in value.items()) + "}"
    return _string(value) if isinstance(value, str) else str(value)


def _string(text: str) -> str:
    # JSON's escapes are TOML's; a lone DEL is the one character that JSON leaves and TOML refuses.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
