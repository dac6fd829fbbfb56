"""One read-only query on an SQLite database in memory, within limits; and whether two results are the same.

The database is made again for each query, from an image of it, so that nothing can be left behind. A query is
first explained, which compiles it and runs nothing, and must turn out to be one statement that selects. It
may read tables and call functions; whatever else it asks leave for (writes, ATTACH, PRAGMA, transactions,
extensions) is denied, `random` too, since a verdict must not depend on luck. It ends after a number
of steps of SQLite's machine, or seconds of the processor for steps that take long, so that the verdict
does not depend on how busy the computer is. It is bounded in memory, rows and bytes. Nothing is written
to a disk.
"""

import math
import re
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache, partial
from typing import Any

Row = tuple[Any, ...]

MOST_CHARACTERS = 20_000
MOST_ROWS = 10_000
MOST_BYTES = 16 * 2**20
MOST_CELL_BYTES = 100_000
MEMORY_BYTES = 256 * 2**20
SCRIPT_S = 60.0
"""Seconds of the processor for making a database."""
_STEPS_BETWEEN_LOOKS = 50
"""Between two looks at the clock; one step may take a tenth of a second."""

_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_DENIED = {"random", "randomblob", "load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}
_ELSEWHERE = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH}
_LIMITS = ("interrupted", "too big", "too large", "too many", "too complex", "stack overflow", "is full")
"""In what SQLite says where one of its limits is reached."""


class QueryError(Exception):
    """Why there is no result: the label of the verdict, and the reason."""

    def __init__(self, label: str, reason: str) -> None:
        super().__init__(reason)
        self.label = label
        self.reason = reason


@lru_cache(maxsize=16)
def image(script: str) -> bytes:
    """The database that a script of CREATE and INSERT makes; sqlite3.Error if it fails or makes none.

    The script comes from the task, not from a response; still it may not reach for other files.
    """
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("PRAGMA temp_store = MEMORY")
        database.set_authorizer(
            lambda action, one, two, *_: (
                sqlite3.SQLITE_DENY
                if action in _ELSEWHERE or (action == sqlite3.SQLITE_FUNCTION and two == "load_extension")
                else sqlite3.SQLITE_OK
            )
        )
        end = time.thread_time() + SCRIPT_S
        database.set_progress_handler(lambda: time.thread_time() > end, 1000)
        database.executescript(script)
        database.set_authorizer(None)
        database.commit()
        if not database.execute("SELECT 1 FROM sqlite_master WHERE type = 'table'").fetchone():
            raise sqlite3.DataError("it makes no table")
        return database.serialize()


def result(
    database: bytes,
    query: str,
    *,
    steps: int,
    seconds: float,
    columns: int | None = None,
    rows: int = MOST_ROWS,
    memory: bool = True,
) -> tuple[int, list[Row]]:
    """The number of columns and the rows of one query; QueryError where there are none to have.

    With a number of columns given, another one is refused before a row is read; so are more rows than `rows`.
    `memory` bounds what SQLite may take, for as long as this process lives.
    """
    if len(query) > MOST_CHARACTERS:
        raise QueryError("over_limit", f"{len(query)} characters are more than {MOST_CHARACTERS}")
    denied: list[str] = []
    asked: set[int] = set()

    def allow(action: int, one: str | None, two: str | None, *_: object) -> int:
        asked.add(action)
        if action in _READING and not (action == sqlite3.SQLITE_FUNCTION and (two or "").lower() in _DENIED):
            return sqlite3.SQLITE_OK
        denied.append(" ".join(name for name in (_ACTIONS.get(action, str(action)), one, two) if name))
        return sqlite3.SQLITE_DENY

    with _open_database(database, steps, seconds, memory) as opened:
        opened.set_authorizer(allow)
        with _refusing("unreadable", denied):
            opened.execute(f"EXPLAIN {query}").close()
        if sqlite3.SQLITE_SELECT not in asked:
            raise QueryError("forbidden", "it is not a query that selects")
        with _refusing("wrong", denied):
            cursor = opened.execute(query)
            found = len(cursor.description)
            if columns is not None and found != columns:
                raise QueryError("wrong", f"the result has {found} columns, not {columns}")
            return found, _fetched(cursor, rows)


@contextmanager
def _open_database(database: bytes, steps: int, seconds: float, memory: bool) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:")) as opened, closing(sqlite3.connect(":memory:")) as other:
        opened.deserialize(database)
        for setting in ("temp_store = MEMORY", "query_only = ON"):
            opened.execute(f"PRAGMA {setting}").close()
        if memory:
            opened.execute(f"PRAGMA hard_heap_limit = {MEMORY_BYTES}").close()
        opened.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
        for limit, most in (
            (sqlite3.SQLITE_LIMIT_LENGTH, MOST_CELL_BYTES),
            (sqlite3.SQLITE_LIMIT_SQL_LENGTH, MOST_CELL_BYTES),
            (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
            (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1000),
            (sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0),
        ):
            opened.setlimit(limit, most)
        for name in ("printf", "format"):
            opened.create_function(name, -1, partial(_formatted, other), deterministic=True)
        looks, end = 0, time.thread_time() + seconds

        def over() -> bool:
            nonlocal looks
            looks += 1
            return looks * _STEPS_BETWEEN_LOOKS > steps or time.thread_time() > end

        opened.set_progress_handler(over, _STEPS_BETWEEN_LOOKS)
        yield opened


def _formatted(other: sqlite3.Connection, form: Any = None, *values: Any) -> Any:
    """SQLite's printf, whose own takes minutes in one step for a width of 10^9; ValueError for a wide one."""
    if re.search(r"%[-+ #!,.0-9]*(\*|[0-9]{4})", str(form)):
        raise ValueError("a width of four digits or of *")
    return other.execute(f"SELECT printf(?{', ?' * len(values)})", (form, *values)).fetchone()[0]


@contextmanager
def _refusing(label: str, denied: Sequence[str]) -> Iterator[None]:
    """Turns what SQLite raises into a QueryError."""
    try:
        yield
    except MemoryError:
        raise QueryError("over_limit", f"it needs more than {MEMORY_BYTES >> 20} MiB") from None
    except (UnicodeEncodeError, ValueError) as error:
        raise QueryError("unreadable", f"it is not text: {error}"[:200]) from None
    except (sqlite3.Error, sqlite3.Warning) as error:
        said = str(error)
        if denied:
            raise QueryError("forbidden", f"it may only read: {denied[0]} is denied"[:200]) from None
        if any(limit in said for limit in _LIMITS):
            said = "it takes too many steps or too long" if said == "interrupted" else said
            raise QueryError("over_limit", said[:200]) from None
        raise QueryError(label, said[:200]) from None


def _fetched(cursor: sqlite3.Cursor, most: int) -> list[Row]:
    rows: list[Row] = []
    size = 0
    for row in cursor:
        size += sum(len(cell) for cell in row if isinstance(cell, str | bytes))
        if len(rows) == most:
            label = "over_limit" if most == MOST_ROWS else "wrong"
            raise QueryError(label, f"there are more than {most} rows")
        if size > MOST_BYTES:
            raise QueryError("over_limit", f"the result has more than {MOST_BYTES >> 20} MiB")
        rows.append(row)
    return rows


def difference(gold: Sequence[Row], rows: Sequence[Row], *, ordered: bool, tolerance: float) -> str:
    """What tells a result from the gold's; empty if nothing does.

    Cells are the same if they have the same type and value; floats also if they differ by no more than
    `tolerance`, absolutely or as a share. Without an order each row is used up by one row of the other side.

    >>> difference([(1, 0.5), (2, None)], [(2, None), (1, 0.5)], ordered=False, tolerance=0.0)
    ''
    >>> difference([(1,)], [(1.0,)], ordered=False, tolerance=0.0)
    'the row (1.0,) is not in the result'
    """
    if len(rows) != len(gold):
        return f"the result has {len(rows)} rows, not {len(gold)}"
    if ordered:
        for number, (one, other) in enumerate(zip(gold, rows, strict=True), 1):
            if not _same(one, other, tolerance):
                return f"row {number} is {_shown(other)}, not {_shown(one)}"
        return ""
    gold_counts, row_counts = (Counter(map(_typed, side)) for side in (gold, rows))
    alike: dict[Row, list[Row]] = defaultdict(list)
    for row in _surplus(gold_counts, row_counts):
        alike[_frame(row)].append(row)
    for row in _surplus(row_counts, gold_counts):
        near = alike.get(_frame(row), [])
        at = next((i for i, one in enumerate(near) if _same(one, row, tolerance)), None)
        if at is None:
            return f"the row {_shown(row)} is not in the result"
        del near[at]
    return ""


def _surplus(rows: Counter[Row], others: Counter[Row]) -> list[Row]:
    """Return the typed rows that the others lack, without the types and in the order of their floats."""
    return sorted((tuple(cell for _, cell in row) for row in (rows - others).elements()), key=_floats)


def _typed(row: Row) -> Row:
    """The row with the types of its cells, since 1 equals 1.0 in Python."""
    return tuple((type(cell), cell) for cell in row)


def _frame(row: Row) -> Row:
    """The row without the values of its floats."""
    return tuple((float, None) if isinstance(cell, float) else (type(cell), cell) for cell in row)


def _floats(row: Row) -> list[float]:
    return [cell for cell in row if isinstance(cell, float)]


def _same(one: Row, other: Row, tolerance: float) -> bool:
    return len(one) == len(other) and all(
        type(a) is type(b)
        and (a == b or (isinstance(a, float) and math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)))
        for a, b in zip(one, other, strict=True)
    )


def _shown(row: Row) -> str:
    text = repr(row)
    return text if len(text) <= 80 else f"{text[:80]}..."


_ACTIONS = {
    getattr(sqlite3, f"SQLITE_{name.replace(' ', '_')}"): name
    for name in (
        "INSERT", "UPDATE", "DELETE", "PRAGMA", "ATTACH", "DETACH", "TRANSACTION", "FUNCTION",
        "CREATE TABLE", "DROP TABLE", "ALTER TABLE", "REINDEX", "SAVEPOINT", "ANALYZE",
    )
}  # fmt: skip
"""Names of the actions that a query may ask leave for."""
