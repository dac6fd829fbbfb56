"""The verifier of SQL: what is right, and forty ways to get past it."""

import os
import pickle
import sqlite3
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.types import Task, UserError
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.self_test import self_test
from posttrain.verifiers.structure.query import MOST_ROWS, QueryError, difference, image, result
from posttrain.verifiers.structure.sql import Sql

SCHEMA = """
CREATE TABLE t(a INTEGER, b TEXT);
INSERT INTO t VALUES (1, 'x'), (2, 'y'), (2, 'y'), (3, NULL);
CREATE TABLE price(item TEXT, cost REAL);
INSERT INTO price VALUES ('tea', 0.1), ('milk', 0.2), ('bread', 0.3);
"""
ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)"


def task(gold: str = "SELECT a, b FROM t", schema: Any = SCHEMA, **fields: Any) -> Task:
    return Task(id="q", messages=(), answer=gold, fields={"schema": schema, **fields}, source="d.jsonl:3")


RIGHT = [
    "SELECT a, b FROM t",
    "select B.a, B.b from t as B ;",
    "SELECT a, b FROM t -- all of it",
    "SELECT a, b FROM t; ;\n;",
    "SELECT a, b FROM t ORDER BY b DESC",
    "SELECT a AS other, b AS name FROM main.t",
    "WITH c AS (SELECT * FROM t) SELECT a, b FROM c",
    "SELECT a, b FROM t WHERE a < 3 UNION ALL SELECT a, b FROM t WHERE a = 3",
    "```sql\nSELECT a FROM t\n```\nNo, rather\n```sql\nSELECT a, b FROM t\n```\nwhich is it. ```",
    "```\nSELECT a, b FROM t\n```",
    "```sql\nSELECT a, b FROM t;\n```\nIt finds\n```\n| a | b |\n```",
    "SELECT a, b FROM t WHERE b <> '; DROP TABLE t' OR b IS NULL",
    "<think>\n```sql\nSELECT a FROM t\n```\nno</think>SELECT a, b FROM t",
]


@pytest.mark.parametrize("response", RIGHT)
def test_a_query_that_finds_the_same_is_right(response: str) -> None:
    verdict = Sql()(task(), response)
    assert (verdict.score, verdict.label) == (1.0, "right"), verdict.reason


def test_partial_scores_the_share_of_databases() -> None:
    schemas = [
        f"CREATE TABLE t(a); INSERT INTO t VALUES {values}" for values in ("(1)", "(2)", "(2), (3)", "(4)")
    ]
    scored = {
        "SELECT a FROM t": 1.0,
        "SELECT 2": 0.25,
        "SELECT max(a) FROM t": 0.75,
        "SELECT a FROM t UNION ALL SELECT 5": 0.0,
        "SELECT a, a FROM t": 0.0,
        "DROP TABLE t": 0.0,
        f"{ENDLESS} SELECT a FROM t UNION ALL SELECT x FROM n WHERE (SELECT count(*) FROM t) > 1": 0.0,
    }
    share, all_or_nothing = Sql(partial=True, max_steps=100_000), Sql(max_steps=100_000)
    for query, score in scored.items():
        asked = task("SELECT a FROM t", schemas)
        assert share(asked, query).score == score
        assert all_or_nothing(asked, query).score == float(score == 1.0)
    assert share(task("SELECT a FROM t", schemas), "SELECT 2").label == "wrong"
    with pytest.raises(ValueError, match="result = true"):
        Sql(partial=True, result=False)


REFUSED = [
    # (response, label)
    ("", "no_answer"),
    ("  \n", "no_answer"),
    ("```sql\n```", "no_answer"),
    ("<think>\n```sql\nSELECT a, b FROM t\n```\n", "no_answer"),
    ("The query is SELECT a, b FROM t", "unreadable"),
    ("SELECT a, b FROM t WHERE", "unreadable"),
    ("SELECT a, nope FROM t", "unreadable"),
    ("SELECT a, b FROM nope", "unreadable"),
    ("SELECT a, b FROM t; SELECT a, b FROM t", "unreadable"),
    ("SELECT a, b FROM t; DROP TABLE t", "unreadable"),
    ("-- nothing", "unreadable"),
    ("SELECT ?, ?", "unreadable"),
    ("SELECT :a, :b", "unreadable"),
    ("SELECT a, b FROM t\0", "unreadable"),
    ("SELECT a, '\ud800' FROM t", "unreadable"),
    ("EXPLAIN SELECT a, b FROM t", "unreadable"),
    ("SELECT writefile('stolen', 'x'), 1", "unreadable"),
    ("SELECT readfile('/etc/passwd'), 1", "unreadable"),
    ("SELECT a FROM t", "wrong"),
    ("SELECT a, b, 1 FROM t", "wrong"),
    ("SELECT DISTINCT a, b FROM t", "wrong"),
    ("SELECT a, b FROM t UNION ALL SELECT 1, 'x'", "wrong"),
    ("SELECT a, coalesce(b, '') FROM t", "wrong"),
    ("SELECT CAST(a AS REAL), b FROM t", "wrong"),
    ("SELECT CAST(a AS TEXT), b FROM t", "wrong"),
    ("SELECT a, CAST(b AS BLOB) FROM t", "wrong"),
    ("SELECT abs(-9223372036854775807 - 1), 1", "wrong"),
    (f"{ENDLESS} SELECT x, x FROM n", "wrong"),
    ("INSERT INTO t VALUES (4, 'z')", "forbidden"),
    ("REPLACE INTO t VALUES (4, 'z')", "forbidden"),
    ("UPDATE t SET a = 1", "forbidden"),
    ("DELETE FROM t", "forbidden"),
    ("WITH x AS (SELECT 1) DELETE FROM t", "forbidden"),
    ("CREATE TABLE u(a)", "forbidden"),
    ("CREATE TEMP TABLE u AS SELECT 1", "forbidden"),
    ("CREATE VIRTUAL TABLE u USING fts5(a)", "forbidden"),
    ("CREATE TRIGGER u AFTER INSERT ON t BEGIN SELECT 1; END", "forbidden"),
    ("ALTER TABLE t ADD c", "forbidden"),
    ("DROP TABLE t", "forbidden"),
    ("ATTACH 'stolen' AS u", "forbidden"),
    ("DETACH main", "forbidden"),
    ("VACUUM", "forbidden"),
    ("VACUUM INTO 'stolen'", "forbidden"),
    ("REINDEX", "forbidden"),
    ("ANALYZE", "forbidden"),
    ("PRAGMA query_only = OFF", "forbidden"),
    ("PRAGMA table_info(t)", "forbidden"),
    ("SELECT * FROM pragma_table_info('t')", "forbidden"),
    ("BEGIN", "forbidden"),
    ("SAVEPOINT u", "forbidden"),
    ("SELECT load_extension('stolen'), 1", "forbidden"),
    ("SELECT RANDOM(), 1", "forbidden"),
    ("SELECT hex(randomblob(9)), 1", "forbidden"),
    ("SELECT fts3_tokenizer('simple'), 1", "forbidden"),
    (f"{ENDLESS} SELECT sum(x), 1 FROM n", "over_limit"),
    ("WITH RECURSIVE n(x) AS (SELECT 1 UNION SELECT x + 1 FROM n) SELECT max(x), 1 FROM n", "over_limit"),
    (f"{ENDLESS} SELECT hex(zeroblob(45000)) || x AS y, x FROM n ORDER BY y", "over_limit"),
    ("SELECT count(*), 1 FROM " + ", ".join(f"t t{i}" for i in range(40)), "over_limit"),
    ("SELECT zeroblob(1000000000), 1", "over_limit"),
    ("SELECT replace(hex(zeroblob(49000)), '0', 'aaaaaaaaa'), 1", "over_limit"),
    ("SELECT group_concat(hex(zeroblob(40000))), 1 FROM t", "over_limit"),
    ("SELECT a, b FROM t WHERE b LIKE '" + "%a" * 3000 + "'", "over_limit"),
    ("SELECT " + "(" * 3000 + "1" + ")" * 3000 + ", 1", "over_limit"),
    ("SELECT 1, 2 " + "UNION SELECT 1, 2 " * 1000, "over_limit"),
    ("SELECT a, b FROM t" + " " * 30_000 + "-- long", "over_limit"),
]


@pytest.mark.parametrize(
    ("response", "label"), REFUSED, ids=lambda text: text[:50].encode("ascii", "replace")
)
def test_anything_else_is_refused_and_touches_nothing(
    response: str, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begin = time.thread_time()
    verdict = Sql(max_steps=2_000_000)(task(), response)
    assert time.thread_time() - begin < 10
    assert (verdict.score, verdict.label) == (0.0, label), verdict.reason
    assert verdict.reason
    assert len(verdict.reason) < 300
    assert os.listdir(tmp_path) == []
    assert Sql()(task(), "SELECT a, b FROM t").label == "right"


def test_the_limit_of_steps_does_not_depend_on_the_clock() -> None:
    database = image(SCHEMA)
    counted = f"{ENDLESS} SELECT count(*) FROM (SELECT x FROM n LIMIT 1000)"
    assert result(database, counted, steps=100_000, seconds=60.0)[1] == [(1000,)]
    with pytest.raises(QueryError) as error:
        result(database, counted, steps=1_000, seconds=60.0)
    assert error.value.label == "over_limit"


def test_slow_steps_end_by_the_clock() -> None:
    """One step of this takes as long as thousands of others."""
    same = "replace(hex(zeroblob(49500)), '0', char(97 + x % 3))"
    slow = f"{ENDLESS} SELECT sum(instr({same}, substr({same}, 50000) || 'b')), 1 FROM n"
    begin = time.thread_time()
    assert Sql(time_limit_s=0.5)(task(), slow).label == "over_limit"
    assert time.thread_time() - begin < 20


def test_order_counts_where_the_gold_has_one() -> None:
    asked = task("SELECT a FROM t ORDER BY a")
    assert Sql()(asked, "SELECT a FROM t ORDER BY a ASC").label == "right"
    assert Sql()(asked, "SELECT a FROM t ORDER BY a DESC").label == "wrong"
    inner = task("SELECT * FROM (SELECT a FROM t ORDER BY a)")
    assert Sql()(inner, "SELECT a FROM t ORDER BY a DESC").label == "right"
    said = task("SELECT a FROM t", ordered=True)
    assert Sql()(said, "SELECT a FROM t ORDER BY a DESC").label == "wrong"


def test_floats_have_a_tolerance_and_nothing_else_has() -> None:
    asked = task("SELECT sum(cost) FROM price")
    assert Sql()(asked, "SELECT 0.1 + 0.2 + 0.3").label == "right"
    assert Sql()(asked, "SELECT 0.6000001").label == "wrong"
    assert Sql(tolerance=0.0)(asked, "SELECT 0.60000000000001").label == "wrong"
    assert Sql(tolerance=0.5)(task("SELECT 1"), "SELECT 1.0").label == "wrong"
    assert Sql(tolerance=0.5)(task("SELECT 1"), "SELECT 2").label == "wrong"


def test_several_databases_tell_a_query_from_a_copy_of_its_result() -> None:
    one, other = SCHEMA, SCHEMA + "INSERT INTO t VALUES (9, 'z');"
    copied = "SELECT 8"
    gold = "SELECT sum(a) FROM t"
    assert Sql()(task(gold), copied).label == "right"
    assert Sql()(task(gold, [one, other]), copied).label == "wrong"
    assert Sql()(task(gold, [one, other]), "SELECT total(a) FROM t").label == "wrong"
    assert Sql()(task(gold, [one, other]), "SELECT sum(a + 0) FROM t").label == "right"
    with pytest.raises(UserError, match=r"^d\.jsonl:3: "):
        Sql().check(task(gold, [one, one]))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (Task(id="q", messages=(), answer="SELECT 1", source="d.jsonl:3"), "no script"),
        (task(schema=7), "no script"),
        (task(schema=[]), "no script"),
        (task(schema=""), "makes no table"),
        (task(schema="CREATE TABLE"), "incomplete input"),
        (task(schema="CREATE TABLE t(a, b); ATTACH 'x' AS y"), "not authorized"),
        (task("SELECT nope FROM t"), "no such column"),
        (task("DELETE FROM t"), "more than read"),
        (task("SELECT a FROM t WHERE a > 9"), "finds no rows"),
        (task(f"{ENDLESS} SELECT x FROM n LIMIT {MOST_ROWS + 1}"), "more than 10000 rows"),
        (task(gold=""), "is empty"),
        (Task(id="q", messages=(), fields={"schema": SCHEMA, "gold": 3}, source="d.jsonl:3"), "not a query"),
    ],
)
def test_a_task_that_cannot_be_judged_is_an_error_of_the_data(asked: Task, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        Sql().check(asked)
    assert str(error.value).startswith("d.jsonl:3")


PARSES = [
    # (dialect, response, label)
    ("postgres", "SELECT a::int FROM t", "right"),
    ("postgres", "WITH c AS (SELECT 1) SELECT * FROM c ORDER BY 1 LIMIT 3", "right"),
    ("postgres", "VALUES (1), (2)", "right"),
    ("duckdb", "SELECT [1, 2][1]", "right"),
    ("mysql", "SELECT `a` FROM `t`", "right"),
    ("postgres", "SELECT", "unreadable"),
    ("postgres", "SELECT a FROM", "unreadable"),
    ("postgres", "hello world", "unreadable"),
    ("postgres", "1 + 1", "unreadable"),
    ("postgres", "SELECT 1; SELECT 2", "unreadable"),
    ("postgres", "SELECT 'a", "unreadable"),
    ("postgres", "-- nothing", "no_answer"),
    ("postgres", ";", "no_answer"),
    ("postgres", "DELETE FROM t", "forbidden"),
    ("postgres", "SELECT 1; DROP TABLE t", "forbidden"),
    ("postgres", "WITH x AS (DELETE FROM t RETURNING a) SELECT * FROM x", "forbidden"),
    ("postgres", "SELECT a INTO b FROM c", "forbidden"),
    ("postgres", "SELECT * FROM t FOR UPDATE", "forbidden"),
    ("postgres", "COPY t TO '/tmp/x'", "forbidden"),
    ("postgres", "CALL f()", "forbidden"),
    ("postgres", "GRANT ALL ON t TO u", "forbidden"),
    ("postgres", "TRUNCATE TABLE t", "forbidden"),
    ("postgres", "SET x = 1", "forbidden"),
    ("postgres", "SELECT " + "(" * 3000 + "1" + ")" * 3000, "over_limit"),
    ("postgres", "SELECT " + "NOT " * 4000 + "1", "over_limit"),
    ("postgres", "SELECT 1 -- " + "x" * 30_000, "over_limit"),
]


@pytest.mark.parametrize(("dialect", "response", "label"), PARSES, ids=lambda text: text[:40])
def test_without_a_result_a_query_must_parse(dialect: str, response: str, label: str) -> None:
    verifier = Sql(result=False, dialect=dialect)
    bare = Task(id="q", messages=())
    verifier.require()
    verifier.check(bare)
    assert verifier.golds(bare) == []
    assert verifier(bare, response).label == label


@pytest.mark.parametrize("form", ["%.1000000000c'", "%-,*c', 1000000000", "%99999d" * 2000 + "'"])
def test_a_wide_printf_takes_no_time(form: str) -> None:
    begin = time.thread_time()
    verdict = Sql()(task(), f"SELECT printf('{form}), 1")
    assert (verdict.label, time.thread_time() - begin < 1.0) == ("wrong", True)


def test_a_narrow_printf_is_sqlites_own() -> None:
    same = "format('%03d * %s, 200000 %%', 7, 'x') = '007 * x, 200000 %' AND printf() IS NULL"
    assert Sql()(task(), f"SELECT a, b FROM t WHERE {same}").label == "right"


def test_impossible_options_are_refused() -> None:
    for options in ({"tolerance": -1.0}, {"max_steps": 0}, {"time_limit_s": 0.0}, {"dialect": "mysql"}):
        with pytest.raises(ValueError):
            Sql(**options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^verifier\.sql: "):
        Sql(result=False, dialect="klingon").require()


@pytest.mark.parametrize("unit", ["a", "SELECT ", "(", "'", "```\n", "-- ", "a,", "\n", "\ud800", "/*"])
def test_a_million_characters_are_judged_at_once(unit: str) -> None:
    response = unit * (10**6 // len(unit))
    for verifier in (Sql(), Sql(result=False)):
        begin = time.thread_time()
        assert verifier(task(), response).score == 0.0
        assert time.thread_time() - begin < 3


def test_the_self_test_passes_in_workers_and_a_worker_gives_the_same_verdicts() -> None:
    verifier = Sql(max_steps=1_000_000)
    assert pickle.loads(pickle.dumps(verifier)) == verifier
    some = [(response, label) for response, label in REFUSED if "\ud800" not in response][::5]
    with Pool(workers=2, deadline_s=20.0) as pool:
        self_test(verifier, [task(), task("SELECT a FROM t ORDER BY a")], pool)
        verdicts = pool.judge(verifier, [(task(), response) for response, _ in some])
    assert [v.label for v in verdicts] == [label for _, label in some]


CELLS = st.one_of(
    st.none(),
    st.integers(-3, 3),
    st.sampled_from([-1.0, 0.0, 1.0, 2.5, float("inf")]),
    st.sampled_from(["", "1", "a"]),
    st.sampled_from([b"", b"1"]),
)
ROWS = st.lists(st.tuples(CELLS, CELLS), max_size=6)


@settings(max_examples=100, deadline=None)
@given(ROWS, ROWS, st.randoms())
def test_rows_are_compared_as_multisets_of_typed_cells(gold: Any, rows: Any, random: Any) -> None:
    def slow(one: Any) -> Counter[str]:
        return Counter(repr([(type(c).__name__, c) for c in row]) for row in one)

    assert (difference(gold, rows, ordered=False, tolerance=0.0) == "") == (slow(gold) == slow(rows))
    assert (difference(gold, rows, ordered=True, tolerance=0.0) == "") == (repr(gold) == repr(rows))
    mixed = random.sample(gold, len(gold))
    assert difference(gold, mixed, ordered=False, tolerance=0.0) == ""


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.floats(-9, 9)), max_size=6), st.randoms())
def test_noise_within_the_tolerance_changes_nothing(gold: Any, random: Any) -> None:
    spread = {n: sorted(x for m, x in gold if m == n) for n in range(3)}
    far = all(b - a > 1e-3 or a == b for xs in spread.values() for a, b in pairwise(xs))
    noisy = [(n, x + random.uniform(-1e-7, 1e-7)) for n, x in random.sample(gold, len(gold))]
    if far:
        assert difference(gold, noisy, ordered=False, tolerance=1e-5) == ""
    off = [(n, x + 1.0) for n, x in gold]
    assert not gold or difference(gold, off, ordered=False, tolerance=1e-5) != ""


def test_a_result_as_large_as_may_be_is_compared_in_seconds() -> None:
    gold = [(i % 7, i / 7) for i in range(MOST_ROWS)]
    begin = time.thread_time()
    noisy = [(a, b + 1e-12) for a, b in reversed(gold)]
    assert difference(gold, noisy, ordered=False, tolerance=1e-9) == ""
    assert time.thread_time() - begin < 5


def test_the_database_is_made_anew_for_each_query() -> None:
    assert image(SCHEMA) is image(SCHEMA)
    with pytest.raises(sqlite3.Error):
        image("CREATE TABLE t(a); INSERT INTO nope VALUES (1)")
    [first], [second] = (
        result(image(SCHEMA), "SELECT count(*) FROM t", steps=10**6, seconds=5.0)[1] for _ in "ab"
    )
    assert first == second == (4,)
