"""The verifier of JSON: strict reading, exact extraction, schemas that fetch nothing."""

import json
import pickle
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.types import Task, UserError
from posttrain.verifiers.fences import last_fenced
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.self_test import self_test
from posttrain.verifiers.structure.json_schema import Json
from posttrain.verifiers.structure.strict_json import NotJsonError, identity, read

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/tag"}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"tag": {"enum": [0, 1, "a", {"a": 1}, {"a": True}]}},
}
GOOD = '{"name": "Ann", "age": 7}'


def task(answer: str | None = None, **fields: Any) -> Task:
    return Task(id="q", messages=(), answer=answer, fields=fields, source="d.jsonl:3")


RIGHT = [
    GOOD,
    f" \r\n\t{GOOD}\n",
    '{"age": 7.0, "name": "Ann", "tags": []}',
    '{"name": "\\u00e4\\ud83d\\ude00", "age": 0}',
    '{"name": "A", "age": 1, "tags": [1, {"a": true}, {"a": 1}]}',
    f"It is\n```json\n{GOOD}\n```\nas asked.",
    f"```json\n{{}}\n```\n```JSON\n{GOOD}\n```\n```python\n{{}}\n```\n```json\n{{",
    f"~~~json \r\n{GOOD}\r\n~~~\r\n",
    f"It is\n```\n{GOOD}\n```\nas asked.",
    f"```jsonc\n{GOOD}\n```",
]


@pytest.mark.parametrize("response", RIGHT)
def test_json_that_fits_is_right(response: str) -> None:
    verdict = Json(schema=PERSON)(task(), response)
    assert (verdict.score, verdict.label) == (1.0, "right"), verdict.reason


REFUSED = [
    # (response, label)
    ("", "no_answer"),
    (" \n\t", "no_answer"),
    ("```json\n```", "no_answer"),
    ("```json\n  \n```", "no_answer"),
    (f"Here it is: {GOOD}", "unreadable"),
    (f"{GOOD} as asked", "unreadable"),
    (f"{GOOD}{GOOD}", "unreadable"),
    (f"```json\n{{]\n```\n```\n{GOOD}\n```", "unreadable"),
    (f"```json {GOOD}```", "unreadable"),
    (f"    ```json\n{GOOD}\n```", "unreadable"),
    (f"```json\n{GOOD}", "unreadable"),
    (f"```json\n{GOOD}\n```\n```json\n{{]\n```", "unreadable"),
    (f"\ufeff{GOOD}", "unreadable"),
    (f"\u00a0{GOOD}", "unreadable"),
    ('{"name": "Ann", "age": 7,}', "unreadable"),
    ("{'name': 'Ann', 'age': 7}", "unreadable"),
    ('{name: "Ann", "age": 7}', "unreadable"),
    ('{"name": "Ann", "age": 7} // comment', "unreadable"),
    ('{"name": "Bob", "name": "Ann", "age": 7}', "unreadable"),
    ('{"name": "Ann", "age": -1, "age": 7}', "unreadable"),
    ('{"name": "Ann", "n\\u0061me": "Ann", "age": 7}', "unreadable"),
    ('{"name": "Ann", "age": NaN}', "unreadable"),
    ('{"name": "Ann", "age": Infinity}', "unreadable"),
    ('{"name": "Ann", "age": -Infinity}', "unreadable"),
    ('{"name": "Ann", "age": 1e999}', "unreadable"),
    ('{"name": "Ann", "age": 1' + "0" * 400 + "}", "unreadable"),
    ('{"name": "Ann", "age": 1' + "0" * 10_000 + "}", "unreadable"),
    ('{"name": "Ann", "age": 07}', "unreadable"),
    ('{"name": "Ann", "age": +7}', "unreadable"),
    ('{"name": "Ann", "age": .7e1}', "unreadable"),
    ('{"name": "Ann", "age": 0x7}', "unreadable"),
    ('{"name": "Ann", "age": \u0667}', "unreadable"),
    ('{"name": "\\ud800", "age": 7}', "unreadable"),
    ('{"name": "\ud800", "age": 7}', "unreadable"),
    ('{"name": "A\nB", "age": 7}', "unreadable"),
    ('{"name": "A\\x41", "age": 7}', "unreadable"),
    ("[" * 65 + "]" * 65, "unreadable"),
    ("[" * 100_000, "unreadable"),
    ("[" + "1," * 10_000 + "1]", "unreadable"),
    ("[" * 64 + "]" * 64, "wrong"),
    ("null", "wrong"),
    ("[]", "wrong"),
    ("{}", "wrong"),
    ('"' + GOOD.replace('"', '\\"') + '"', "wrong"),
    ('{"name": "Ann", "age": "7"}', "wrong"),
    ('{"name": "Ann", "age": 7.5}', "wrong"),
    ('{"name": "Ann", "age": true}', "wrong"),
    ('{"name": "Ann", "age": -1}', "wrong"),
    ('{"name": "Ann", "age": 7, "more": 1}', "wrong"),
    ('{"name": "Ann", "age": 7, "__proto__": {}}', "wrong"),
    ('{"name": "Ann", "age": 7, "tags": [1, 1.0]}', "wrong"),
    ('{"name": "Ann", "age": 7, "tags": [{"a": 1}, {"a": 1.0}]}', "wrong"),
    ('{"name": "Ann", "age": 7, "tags": [true]}', "wrong"),
]


@pytest.mark.parametrize(("response", "label"), REFUSED, ids=lambda text: ascii(text[:40]))
def test_anything_else_is_refused(response: str, label: str) -> None:
    verdict = Json(schema=PERSON)(task(), response)
    assert (verdict.score, verdict.label) == (0.0, label), verdict.reason
    assert verdict.reason
    assert len(verdict.reason) < 400


@pytest.mark.parametrize(
    ("where", "whole", "fenced", "both"),
    [
        ("all", "right", "unreadable", "unreadable"),
        ("fenced", "no_answer", "right", "right"),
        ("auto", *["right"] * 3),
    ],
)
def test_where_says_what_is_read(where: Any, whole: str, fenced: str, both: str) -> None:
    verifier = Json(schema={}, where=where)
    assert verifier(task(), "[1]").label == whole
    assert verifier(task(), "```json\n[1]\n```").label == fenced
    assert verifier(task(), "so\n```json\n[1]\n```\nthen").label == both
    assert verifier(task(), "so\n```json\n[1]\n```\nof\n```\nx\n```").label == both
    untagged = {"all": "unreadable", "fenced": "no_answer", "auto": "right"}
    assert verifier(task(), "so\n```\n[1]\n```\nthen").label == untagged[where]


def test_what_stands_in_a_thought_is_no_json() -> None:
    verifier = Json(schema={"type": "array"})
    assert verifier(task(), "<think>\n```json\n{}\n```\nno</think>\n[1]").label == "right"
    assert verifier(task(), "<think>\n```json\n[1]\n```\nno</think>{}").label == "wrong"
    assert verifier(task(), "<think>\n```json\n[1]\n```\nor").label == "no_answer"


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ('{"b": [1.0, 2], "a": null}', "right"),
        ('{"a": null, "b": [1, 2e0]}', "right"),
        ('{"a": null, "b": [2, 1]}', "wrong"),
        ('{"a": null, "b": [true, 2]}', "wrong"),
        ('{"a": false, "b": [1, 2]}', "wrong"),
        ('{"a": null, "b": ["1", 2]}', "wrong"),
        ('{"b": [1, 2]}', "wrong"),
        ('{"a": null, "b": [1, 2], "c": 0}', "wrong"),
    ],
)
def test_equal_are_values_and_not_texts(response: str, label: str) -> None:
    verifier, asked = Json(equals=True), task('{"a": null, "b": [1, 2]}')
    verifier.check(asked)
    assert verifier(asked, response).label == label


def test_the_tasks_own_schema_goes_first_and_may_be_text() -> None:
    verifier = Json(schema={"type": "string"})
    assert verifier(task(schema={"type": "integer"}), "7").label == "right"
    assert verifier(task(schema='{"type": "integer"}'), "7").label == "right"
    assert verifier(task(), "7").label == "wrong"


def test_a_schema_in_a_file_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(PERSON))
    verifier = Json(schema=str(file))
    file.unlink()
    assert verifier == Json(schema=PERSON)
    assert pickle.loads(pickle.dumps(verifier)) == verifier
    for text in ("[", "[]", '{"a": 1, "a": 1}'):
        file.write_text(text)
        with pytest.raises(ValueError, match="schema"):
            Json(schema=str(file))
    with pytest.raises(ValueError, match="cannot be read"):
        Json(schema=str(tmp_path / "nothing.json"))


OUTSIDE = "leads outside"


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"$ref": "http://127.0.0.1:9/schema"}, OUTSIDE),
        ({"$ref": "file:///etc/passwd"}, OUTSIDE),
        ({"properties": {"a": {"items": {"$ref": "other.json"}}}}, OUTSIDE),
        ({"anyOf": [{"$dynamicRef": "http://127.0.0.1:9/x"}]}, OUTSIDE),
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, OUTSIDE),
        ({"$ref": "#/$defs/nothing"}, OUTSIDE),
        ({"$ref": "#"}, "without end"),
        ({"allOf": [{"$ref": "#/allOf/0"}]}, "without end"),
        ({"properties": {"next": {"$ref": "#/properties/next"}}}, "without end"),
        ({"type": "strin"}, r"at \$\.type"),
        ({"required": "name"}, r"at \$\.required"),
        ({"pattern": "("}, r"at \$\.pattern"),
        ({"$schema": "http://127.0.0.1:9/draft"}, "is unknown"),
        ({"$schema": 7}, "is unknown"),
        ("[", "line 1"),
        ([], "not an object"),
        (7, "not an object"),
    ],
)
def test_a_schema_that_is_none_or_leads_outside_is_an_error_of_the_data(schema: Any, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        Json().check(task(schema=schema))
    assert str(error.value).startswith("d.jsonl:3: the schema")


@pytest.mark.parametrize(
    "schema",
    [
        {},
        PERSON,
        {"$id": "http://x.test/a", "$defs": {"b": {"$id": "b", "type": "integer"}}, "$ref": "b"},
        {"$anchor": "top", "items": {"$ref": "#top"}},
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "definitions": {"n": {"type": "integer", "minimum": 0, "exclusiveMinimum": True}},
            "$ref": "#/definitions/n",
        },
        {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "integer"}]},
    ],
)
def test_a_schema_that_refers_to_itself_is_fine(schema: Any) -> None:
    Json().check(task(schema=schema))
    assert Json()(task(schema=schema), "[").label == "unreadable"


@pytest.mark.parametrize(
    ("verifier", "asked", "says"),
    [
        (Json(), task(), "nothing says what"),
        (Json(equals=True), task(), "has no answer"),
        (Json(equals=True), task("{"), "the answer of task 'q': "),
        (Json(equals=True), task('{"a": 1, "a": 1}'), "twice"),
        (Json(equals=True, schema={"type": "string"}), task("7"), "does not fit"),
    ],
)
def test_a_task_that_cannot_be_judged_is_an_error_of_the_data(verifier: Json, asked: Task, says: str) -> None:
    with pytest.raises(UserError, match=says):
        verifier.check(asked)


def test_a_slow_pattern_is_judged_and_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.verifiers.structure.json_schema.TIME_LIMIT_S", 0.2)
    verdict = Json(schema={"pattern": "^(a|aa)+$"})(task(), f'"{"a" * 60}b"')
    assert (verdict.score, verdict.label) == (0.0, "over_limit")


@pytest.mark.parametrize("where", ["all", "fenced", "auto"])
@pytest.mark.parametrize("equals", [True, False])
def test_own_golds_are_accepted_and_own_fakes_refused(where: Any, equals: bool) -> None:
    verifier = Json(schema=PERSON | {"examples": [json.loads(GOOD)]}, where=where, equals=equals)
    asked = task('{"name": "Bo", "age": 1}')
    verifier.require()
    assert len(verifier.golds(asked)) == (1 if equals else 2)
    assert all(verifier(asked, gold).score == 1.0 for gold in verifier.golds(asked))
    assert "" in verifier.fakes(asked)
    assert all(verifier(asked, fake).score == 0.0 for fake in verifier.fakes(asked))


def test_the_self_test_passes_in_workers() -> None:
    with Pool(workers=1, deadline_s=20.0) as pool:
        self_test(Json(schema=PERSON, equals=True), [task(GOOD)], pool)
        [verdict] = pool.judge(Json(), [(task(schema=PERSON), GOOD)])
    assert verdict.label == "right"


UNITS = [
    "[",
    '{"a":',
    '"',
    '"\\"',
    " ",
    "1",
    "-",
    "[1,",
    "```json\n",
    "```json\n1\n```\n",
    "`",
    "~",
    "```" + " " * 99,
    "\\",
]


@pytest.mark.parametrize("unit", UNITS)
def test_a_million_characters_take_linear_time(unit: str) -> None:
    response = unit * (10**6 // len(unit))
    for where in ("all", "fenced", "auto"):
        begin = time.thread_time()
        assert Json(schema={}, where=where)(task(), response).label != ""  # type: ignore[arg-type]
        assert time.thread_time() - begin < 4


@pytest.mark.parametrize(
    ("schema", "response", "label"),
    [
        ({"multipleOf": 0.01}, "19.99", "right"),
        ({"multipleOf": 0.1}, "0.3", "right"),
        ({"multipleOf": 0.01}, "19.995", "wrong"),
        ({"multipleOf": 3}, "1e2", "wrong"),
        ({"multipleOf": 3}, '"x"', "right"),
        ({"pattern": "^[0-9]+$"}, '"12\\n"', "wrong"),
        ({"pattern": r"^\d+$"}, '"١٢"', "wrong"),
        ({"pattern": r"^\w+$"}, '"é"', "wrong"),
        ({"pattern": r"^\w+$"}, '"e_1"', "right"),
        ({"pattern": r"^\s[a\s]$"}, r'"\u00a0\ufeff"', "right"),
        ({"pattern": r"^\s$"}, r'"\u001c"', "wrong"),
        ({"pattern": r"^\S+$"}, r'"a\u2003b"', "wrong"),
        ({"pattern": r"[$]\$$"}, '"$$"', "right"),
        ({"pattern": "a"}, "7", "right"),
        ({"pattern": "(?i)^A$"}, '"a"', "right"),
        ({"patternProperties": {"^a$": {}}, "additionalProperties": False}, '{"a": 1}', "right"),
        ({"patternProperties": {"^a$": {}}, "additionalProperties": False}, '{"a\\n": 1}', "wrong"),
        ({"allOf": [{"patternProperties": {"^a$": False}}]}, '{"a\\n": 1}', "right"),
        ({"patternProperties": {"^a$": {}}, "unevaluatedProperties": False}, '{"a\\n": 1}', "wrong"),
        ({"patternProperties": {r"^\d$": {}}, "additionalProperties": False}, '{"٣": 1}', "wrong"),
        ({"patternProperties": {r"^\w$": False}}, '{"é": 1}', "right"),
        ({"patternProperties": {"(?i)^a": False}}, '{"A": 1}', "wrong"),
        ({"properties": {"patternProperties": {"$ref": "#/$defs/$"}}, "$defs": {"$": False}}, "{}", "right"),
        ({"patternProperties": {"^a$": False}, "$ref": "#/patternProperties/^a$"}, "{}", "wrong"),
        ({"$schema": "http://json-schema.org/draft-03/schema#", "divisibleBy": 0.01}, "19.99", "right"),
    ],
)
def test_decimals_are_what_was_written_and_patterns_are_ecmas(
    schema: dict[str, Any], response: str, label: str
) -> None:
    assert Json(schema=schema)(task(), response).label == label


def test_a_large_array_is_checked_in_linear_time() -> None:
    """The library compares items that cannot be sorted each with each."""
    items = ",".join(f'{{"a": {i}}}' for i in range(4_000))
    begin = time.thread_time()
    assert Json(schema={"uniqueItems": True})(task(), f"[{items}]").label == "right"
    assert Json(schema={"uniqueItems": True})(task(), f'[{items}, {{"a": 7}}]').label == "wrong"
    assert time.thread_time() - begin < 2


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


@settings(max_examples=200, deadline=None)
@given(VALUES, VALUES)
def test_what_is_written_is_read_and_equality_is_that_of_values(one: Any, other: Any) -> None:
    assert equal(read(json.dumps(one)), one)
    assert read(json.dumps(one, ensure_ascii=False)) == one
    assert (identity(one) == identity(other)) == equal(one, other)
    assert identity(read(json.dumps(one, sort_keys=True))) == identity(one)


@settings(max_examples=200, deadline=None)
@given(st.text() | st.text(alphabet='[]{}",:01eE+-.truefalsn \n`\\u'))
def test_any_text_gets_a_score(response: str) -> None:
    verdict = Json(schema=PERSON)(task(), response)
    assert verdict.score in (0.0, 1.0)
    with suppress(NotJsonError):
        assert isinstance(read(response), (dict, list, str, int, float, type(None)))


def test_fences_are_markdowns() -> None:
    assert last_fenced("````\n```\ninner\n```\n````") == "```\ninner\n```"
    assert last_fenced("```\na\n````") == "a"
    assert last_fenced("````\na\n```") is None
    assert last_fenced("```\na\n``` b\n```") == "a\n``` b"
    assert last_fenced("``` a`b\nc\n```") is None
    assert last_fenced("~~~ a`b\nc\n~~~") == "c"
    assert last_fenced("```\n```") == ""
    assert last_fenced("  ```\n  a\n    b\n```") == "a\n  b"
