"""The verifier `sql`: a query parses, or has the same result as the task's own query (the gold)."""

import importlib
import logging
import math
import sqlite3
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from posttrain.base.libraries import require
from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.fences import program
from posttrain.verifiers.protocol import Verifier, gold_answer, quote
from posttrain.verifiers.structure.query import MOST_CHARACTERS, QueryError, Row, difference, image, result

_TAGS = ("sql", "sqlite", "postgresql", "mysql")
"""Languages that models name on a fenced block of SQL."""


@dataclass(frozen=True, kw_only=True)
class Sql(Verifier):
    """1 if the query has the gold's result on each database of the task, or if it parses; otherwise 0.

    The query is the last complete block fenced as sql after the thought; otherwise the last block, or all
    text after the thought. It must be one statement that only reads.

    With `result` it runs in SQLite on each database that the task's field `schema` makes (a script of CREATE
    and INSERT, or a list of scripts). Its result must be that of the task's field `gold`, or of its answer:
    the same number of columns and the same rows, in the same order if the gold ends in ORDER BY or the field
    `ordered` is true. Without `result` the query must parse in `dialect`, and nothing runs.

    Labels: right, wrong, unreadable (does not parse, or names a missing table or column), forbidden (does
    more than read), over_limit (steps, time, memory, size), no_answer.

    >>> make = "CREATE TABLE t(a); INSERT INTO t VALUES (1), (2)"
    >>> task = Task(id="q", messages=(), answer="SELECT sum(a) FROM t", fields={"schema": make})
    >>> [Sql()(task, query).label for query in ("SELECT 2 + 1;", "SELECT max(a) FROM t", "DROP TABLE t")]
    ['right', 'wrong', 'forbidden']
    """

    result: bool = True
    """Whether to run the query and compare its result; otherwise it only has to parse."""
    dialect: str = "sqlite"
    """For result = false: a dialect of sqlglot, such as postgres or duckdb."""
    tolerance: float = 1e-9
    """Largest difference, absolute or relative, of two floats that count as equal."""
    max_steps: int = 20_000_000
    """Steps of SQLite's virtual machine after which a query is given up."""
    time_limit_s: float = 5.0
    """CPU seconds after which a query is given up, on each database."""
    partial: bool = False
    """With `result`, whether to score the share of databases on which it finds what the gold finds."""
    place: ClassVar[int] = 8
    name: str = "sql"
    best: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < math.inf:
            raise ValueError(f"tolerance must be 0 or more, not {self.tolerance}")
        if self.max_steps < 1 or not 0 < self.time_limit_s < math.inf:
            raise ValueError("max_steps and time_limit_s must be above 0")
        if self.result and self.dialect != "sqlite":
            raise ValueError("queries run in SQLite; another dialect needs result = false")
        if self.partial and not self.result:
            raise ValueError(
                "partial needs result = true: a query that only has to parse runs on no database"
            )

    def __call__(self, task: Task, response: str) -> Verdict:
        """Run the query and compare its result with the gold's, or parse it."""
        query = program(response, *_TAGS, self.dialect).strip().rstrip("; \t\r\n")
        if not query:
            return Verdict(score=0.0, label="no_answer", reason="there is no query")
        try:
            if self.result:
                return self._compare(task, query)
            _parse(query, self.dialect)
        except QueryError as error:
            return Verdict(score=0.0, label=error.label, reason=error.reason)
        return Verdict(score=1.0, label="right", reason=f"{quote(query)} parses")

    def _compare(self, task: Task, query: str) -> Verdict:
        """Compare the query's results with the gold's. Raises QueryError if refused or over a limit."""
        ordered, differences = self._ordered(task), list[str]()
        databases = self._databases(task)
        for database, (columns, gold) in zip(databases, self._golds(task), strict=True):
            limits: dict[str, Any] = {"steps": self.max_steps, "seconds": self.time_limit_s}
            try:
                _, rows = result(database, query, columns=columns, rows=len(gold), **limits)
                wrong = difference(gold, rows, ordered=ordered, tolerance=self.tolerance)
            except QueryError as error:
                if error.label != "wrong":
                    raise
                wrong = error.reason
            if wrong:
                differences.append(wrong)
                if not self.partial:
                    break
        if not differences:
            return Verdict(score=1.0, label="right", reason="it finds what the gold finds")
        share = 1 - len(differences) / len(databases) if self.partial else 0.0
        return Verdict(score=share, label="wrong", reason=differences[0])

    def _databases(self, task: Task) -> list[bytes]:
        """Return an image of each database. Raises UserError if the task describes none."""
        scripts: Any = task.fields.get("schema")
        scripts = [scripts] if isinstance(scripts, str) else scripts
        if not isinstance(scripts, list) or not scripts or not all(isinstance(s, str) for s in scripts):
            raise UserError(
                task.source,
                f"task {task.id!r} has no script that makes its database",
                "give it a field 'schema' of CREATE and INSERT, or a list of such scripts",
            )
        try:
            return [image(script) for script in scripts]
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise UserError(task.source, f"the schema of task {task.id!r}: {error}") from None

    def _golds(self, task: Task) -> list[tuple[int, list[Row]]]:
        """Return the gold's result (columns, rows) on each database. Raises UserError if it fails."""
        query = _gold(task)
        try:
            return [
                _cached_result(database, query, self.max_steps, self.time_limit_s)
                for database in self._databases(task)
            ]
        except QueryError as error:
            raise UserError(task.source, f"the gold of task {task.id!r}: {error.reason}") from None

    def _ordered(self, task: Task) -> bool:
        ordered = task.fields.get("ordered")
        if isinstance(ordered, bool):
            return ordered
        try:
            return _parse(_gold(task), "sqlite").args.get("order") is not None
        except QueryError as error:
            raise UserError(
                task.source,
                f"whether the gold of task {task.id!r} has an order cannot be read: {error.reason}",
                "say so in a field 'ordered', true or false",
            ) from None

    def golds(self, task: Task) -> list[str]:
        """Return the task's own query, plain and fenced. Without `result` a task need not have one."""
        if not self.result and "gold" not in task.fields and not task.answer:
            return []
        query = _gold(task)
        return [query, f"I would ask:\n```sql\n{query}\n```\n"]

    def fakes(self, task: Task) -> list[str]:
        """Return the empty response, words, half a query, two statements, writes, and an empty result."""
        fakes = ["", "SELECT", "I would ask for everything.", "SELECT 1; SELECT 1", "DROP TABLE t"]
        if self.result:
            fakes += ["SELECT 1 WHERE 0", f"{_gold(task).rstrip(' ;')}; DELETE FROM sqlite_master"]
        return fakes

    def check(self, task: Task) -> None:
        """Raise UserError if the task's databases or gold fail, or if the gold's result proves nothing."""
        if not self.result:
            return
        self._ordered(task)
        results = self._golds(task)
        if not any(rows for _, rows in results):
            raise UserError(
                task.source,
                f"the gold of task {task.id!r} finds no rows, as any query could",
                "give its database rows to find",
            )
        if len(results) > 1 and all(result == results[0] for result in results):
            raise UserError(
                task.source,
                f"the gold of task {task.id!r} finds the same in every database",
                "several databases are there to tell a query from a copy of its result",
            )

    def budget_s(self, task: Task) -> float | None:
        """Return the time to make each database and run both queries on it, with a margin."""
        scripts = task.fields.get("schema")
        return 30.0 + 4 * self.time_limit_s * (len(scripts) if isinstance(scripts, list) else 1)

    def require(self) -> None:
        """Raise UserError if the library sqlglot is not installed, or does not know the dialect."""
        require("sqlglot", "verifier.sql")
        if not hasattr(sqlite3.Connection, "deserialize"):
            raise UserError("verifier.sql", "Python's SQLite cannot copy a database in memory")
        dialects = importlib.import_module("sqlglot").Dialects
        names = sorted(dialect.value for dialect in dialects if dialect.value)
        if self.dialect not in names:
            raise UserError(
                "verifier.sql", f"the dialect {self.dialect!r} is unknown", f"it is one of {', '.join(names)}"
            )


def _gold(task: Task) -> str:
    gold = task.fields.get("gold")
    if gold is None:
        return gold_answer(task).strip()
    if not isinstance(gold, str) or not gold.strip():
        raise UserError(task.source, f"the gold of task {task.id!r} is not a query")
    return gold.strip()


@lru_cache(maxsize=64)
def _cached_result(database: bytes, query: str, steps: int, seconds: float) -> tuple[int, list[Row]]:
    return result(database, query, steps=steps, seconds=seconds, memory=False)


def _parse(query: str, dialect: str) -> Any:
    """Return the syntax tree of a query; QueryError unless it is one query that only reads.

    >>> _parse("SELECT a FROM b", "postgres").key
    'select'
    >>> _parse("SELECT a INTO b FROM c", "postgres")
    Traceback (most recent call last):
    posttrain.verifiers.structure.query.QueryError: it does more than read: INTO
    """
    import sqlglot
    from sqlglot import exp

    if len(query) > MOST_CHARACTERS:
        raise QueryError("over_limit", f"{len(query)} characters are more than {MOST_CHARACTERS}")
    doing = (
        exp.DML, exp.DDL, exp.Command, exp.Into, exp.Lock, exp.Drop, exp.Alter, exp.Pragma, exp.Set,
        exp.Transaction, exp.Commit, exp.Rollback, exp.Use, exp.Grant, exp.TruncateTable, exp.Attach,
        exp.Detach, exp.Kill, exp.Analyze,
    )  # fmt: skip
    # Queries that sqlglot cannot parse are refused here, so its warnings about them are not needed.
    logging.getLogger("sqlglot").setLevel(logging.ERROR)
    try:
        statements: list[Any] = [tree for tree in sqlglot.parse(query, read=dialect) if tree is not None]
        nodes = (node for tree in statements for node in tree.walk())
        more = next((node.key for node in nodes if isinstance(node, doing)), "")
    except sqlglot.errors.SqlglotError as error:
        raise QueryError("unreadable", str(error).split("\n")[0][:200]) from None
    except RecursionError:
        raise QueryError("over_limit", "it is nested too deeply") from None
    if more:
        raise QueryError("forbidden", f"it does more than read: {more.upper()}")
    if len(statements) != 1:
        label = "unreadable" if statements else "no_answer"
        raise QueryError(label, f"there are {len(statements)} statements, not one")
    [statement] = statements
    empty = isinstance(statement, exp.Select) and not statement.expressions
    if empty or not isinstance(statement, exp.Query | exp.Values):
        raise QueryError("unreadable", "it is not a query")
    return statement
