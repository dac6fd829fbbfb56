"""Run one read-only query on an SQLite database in memory, within limits, and compare two results.

The database is restored from an image for each query, so that no query affects the next. A query first goes
through EXPLAIN, which compiles it without running it, and must be one SELECT statement. It may read tables
and call functions. SQLite's authorizer denies everything else (writes, ATTACH, PRAGMA, transactions,
extensions), and `random` too, because a verdict must be deterministic. Limits are steps of SQLite's virtual
machine and CPU seconds, so that the verdict does not depend on the load of the machine; and memory, rows
and bytes. Nothing is written to a disk.
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
"""CPU seconds for making a database."""
_STEPS_BETWEEN_LOOKS = 50
"""Steps between two looks at the clock. One step may take a tenth of a second."""

_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_DENIED = {"random", "randomblob", "load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}
_ELSEWHERE = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH}
_LIMITS = ("interrupted", "too big", "too large", "too many", "too complex", "stack overflow", "is full")
"""Parts of SQLite's messages about its limits."""


class QueryError(Exception):
    """A query failed; with the label and the reason of the verdict."""

    def __init__(self, label: str, reason: str) -> None:
        super().__init__(reason)
        self.label = label
        self.reason = reason


@lru_cache(maxsize=16)
def image(script: str) -> bytes:
    """Run a script of CREATE and INSERT and return the serialized database. Raises sqlite3.Error if it fails.

    The script comes from the task and not from a response; still it may not open other files.
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
    """Run one query; return its number of columns and its rows. Raises QueryError.

    columns: if given, any other number is an error before a row is read. rows: most rows. memory: whether to
    limit SQLite's memory; the limit stays for the life of this process.
    """
    if len(query) > MOST_CHARACTERS:
        raise QueryError("over_limit", f"{len(query)} characters are more than {MOST_CHARACTERS}")
    denied: list[str] = []
    actions: set[int] = set()

    def allow(action: int, one: str | None, two: str | None, *_: object) -> int:
        actions.add(action)
        if action in _READING and not (action == sqlite3.SQLITE_FUNCTION and (two or "").lower() in _DENIED):
            return sqlite3.SQLITE_OK
        denied.append(" ".join(name for name in (_ACTIONS.get(action, str(action)), one, two) if name))
        return sqlite3.SQLITE_DENY

    with _open_database(database, steps, seconds, memory) as opened:
        opened.set_authorizer(allow)
        with _refusing("unreadable", denied):
            opened.execute(f"EXPLAIN {query}").close()
        if sqlite3.SQLITE_SELECT not in actions:
            raise QueryError("forbidden", "it is not a query that selects")
        with _refusing("wrong", denied):
            cursor = opened.execute(query)
            width = len(cursor.description)
            if columns is not None and width != columns:
                raise QueryError("wrong", f"the result has {width} columns, not {columns}")
            return width, _fetched(cursor, rows)


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
    """Run SQLite's printf. Raises ValueError for wide fields: a width of 10^9 takes minutes in one step."""
    if re.search(r"%[-+ #!,.0-9]*(\*|[0-9]{4})", str(form)):
        raise ValueError("a width of four digits or of *")
    return other.execute(f"SELECT printf(?{', ?' * len(values)})", (form, *values)).fetchone()[0]


@contextmanager
def _refusing(label: str, denied: Sequence[str]) -> Iterator[None]:
    """Turn SQLite's exceptions into QueryError."""
    try:
        yield
    except MemoryError:
        raise QueryError("over_limit", f"it needs more than {MEMORY_BYTES >> 20} MiB") from None
    except (UnicodeEncodeError, ValueError) as error:
        raise QueryError("unreadable", f"it is not text: {error}"[:200]) from None
    except (sqlite3.Error, sqlite3.Warning) as error:
        message = str(error)
        if denied:
            raise QueryError("forbidden", f"it may only read: {denied[0]} is denied"[:200]) from None
        if any(limit in message for limit in _LIMITS):
            message = "it takes too many steps or too long" if message == "interrupted" else message
            raise QueryError("over_limit", message[:200]) from None
        raise QueryError(label, message[:200]) from None


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
    """Return the first difference between a result and the gold's; "" if they are equal.

    Cells are equal if they have the same type and value; floats also if they differ by at most `tolerance`,
    absolutely or relatively. Without an order, rows are matched one to one.

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
    """Return the row with the types of its cells, because 1 equals 1.0 in Python."""
    return tuple((type(cell), cell) for cell in row)


def _frame(row: Row) -> Row:
    """Return the typed row without the values of its floats."""
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
"""Names of the authorizer's actions, for reasons."""
