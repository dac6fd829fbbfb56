"""Values separated by commas or tabs, as records.

A file of this kind knows nothing but text. What JSON would write as a number in every row of a column is
one, and what is true or false in every row; 007 stays a text, and an empty cell is missing.
"""

import csv
import io
import json
import re
from collections.abc import Iterator
from typing import Any

from posttrain.types import UserError

_NUMBER = re.compile(r"-?(0|[1-9]\d{0,17})(\.\d+)?")
"""Such as JSON writes them, so that 007 stays a text."""
_BOOLEAN = re.compile(r"true|false|True|False")
_MOST_CELL = 1 << 27
"""Characters of a cell, as of a line of JSON; Python's own limit is a page of a book."""
Row = tuple[dict[str, Any], str, dict[str, str]]
"""Fields, "file:line", and the cells of those fields that are numbers or booleans."""


def separated(text: str, name: str, separator: str) -> Iterator[Row]:
    r"""Each row below the first, which names the columns.

    Raises UserError for a row of another length, a name that is missing or given twice, and bad quotes.

    >>> list(separated('prompt,answer\n"1, 2?",3\n', "a.csv", ","))
    [({'prompt': '1, 2?', 'answer': 3}, 'a.csv:2', {'answer': '3'})]
    """
    csv.field_size_limit(_MOST_CELL)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    rows: list[tuple[int, list[str]]] = []
    begin = 1
    try:
        for row in reader:
            rows.append((begin, row))
            begin = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{name}:{reader.line_num}", f"it is not CSV: {error}") from None
    (_, head), *rows = [(line, row) for line, row in rows if row] or [(1, [])]
    if len(set(head)) < len(head) or not all(head):
        raise UserError(f"{name}:1", "the first row must name each column, and none twice")
    if len(head) == 1 and (
        other := next((mark for mark in ";\t,|" if mark in head[0] and mark != separator), "")
    ):
        problem = f"its columns seem to be separated by {other!r}, not {separator!r}"
        fix = f"write it with {separator!r}" + (", or call it .tsv" if other == "\t" else "")
        raise UserError(f"{name}:1", problem, fix)
    for line, row in rows:
        if len(row) != len(head):
            raise UserError(f"{name}:{line}", f"{len(row)} columns, and {len(head)} have names")
    columns = [_typed([row[n] for _, row in rows]) for n in range(len(head))]
    for n, (line, row) in enumerate(rows):
        fields = {key: column[n] for key, column in zip(head, columns, strict=True)}
        cells = zip(head, row, strict=True)
        spelt = {key: cell for key, cell in cells if not isinstance(fields[key], str | None)}
        yield fields, f"{name}:{line}", spelt


def _typed(cells: list[str]) -> list[Any]:
    """The cells of a column: numbers or booleans where all are such as JSON writes them, None where empty."""
    for pattern, read in ((_NUMBER, json.loads), (_BOOLEAN, lambda cell: cell.lower() == "true")):
        if all(cell == "" or pattern.fullmatch(cell) for cell in cells):
            return [None if cell == "" else read(cell) for cell in cells]
    return [None if cell == "" else cell for cell in cells]
