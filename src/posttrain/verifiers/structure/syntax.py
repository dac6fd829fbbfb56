"""What a query is made of, by the parser of sqlglot; nothing runs."""

import logging
from typing import Any

from posttrain.verifiers.structure.query import MOST_CHARACTERS, QueryError


def parsed(query: str, dialect: str) -> Any:
    """The syntax tree of one query; QueryError if it is none, is several, or does more than read.

    >>> parsed("SELECT a FROM b", "postgres").key
    'select'
    >>> parsed("SELECT a INTO b FROM c", "postgres")
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
    # It warns of what it cannot parse, which is refused here.
    logging.getLogger("sqlglot").setLevel(logging.ERROR)
    try:
        statements: list[Any] = [found for found in sqlglot.parse(query, read=dialect) if found is not None]
        nodes = (node for found in statements for node in found.walk())
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


def ends_in_order(query: str) -> bool:
    """Whether the rows of a query in SQLite's dialect have an order of their own.

    >>> ends_in_order("SELECT a FROM t ORDER BY a"), ends_in_order("SELECT * FROM (SELECT 1 ORDER BY 1)")
    (True, False)
    """
    return parsed(query, "sqlite").args.get("order") is not None
