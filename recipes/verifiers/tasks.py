"""Write requests in words, each with what its verifier judges an answer by.

    text.txt         requests with an answer                     (to learn a tokenizer from)
    shown.jsonl      the same, `repeat` times                    (for SFT)
    tasks.jsonl      other requests                              (for rewards)
    held_out.jsonl   others again                                (to evaluate on)

    math      The sum of twice x and the square of y.         2x + y^2
    sql       The names of people from Rome.                  SELECT name FROM people WHERE city = 'Rome'
    json      An object of name, a text and age, a number.    {"name": "ada", "age": 7}
    grammar   a word in brackets and then 3 digits.           (cat) 123

Most requests have many right answers, and `answer` is one of them. No request is in two of the files but
text.txt. The same options write the same files.
"""

import json
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
WORDS = ("ada", "bo", "cat", "dog", "elm", "fox", "ink", "sun")


def tasks(
    directory: Path,
    *,
    of: str,
    shown: int = 128,
    repeat: int = 4,
    tasks: int = 400,
    held_out: int = 128,
    seed: int = 0,
) -> None:
    """Write the four files. of: a verifier's name."""
    dice, rows, count = random.Random(seed), dict[str, Row](), shown + tasks + held_out
    for _ in range(50 * count):
        row = REQUESTS[of](dice)
        rows.setdefault(row["prompt"], row)
        if len(rows) == count:
            break
    else:
        raise ValueError(f"there are only about {len(rows)} requests, and {count} are asked for")
    every = list(rows.values())
    pairs = [{"prompt": row["prompt"], "completion": row["answer"]} for row in every[:shown]]
    write(directory / "shown.jsonl", pairs * repeat)
    write(directory / "tasks.jsonl", every[shown : shown + tasks])
    write(directory / "held_out.jsonl", every[shown + tasks :])
    text = "<|endoftext|>\n".join(f"{pair['prompt']}\n{pair['completion']}\n" for pair in pairs)
    (directory / "text.txt").write_text(text, encoding="utf-8")


def write(path: Path, rows: list[Row]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# ---------------------------------------------------------------------- math


TERMS = {
    "{x}": "{x}",
    "twice {x}": "2{x}",
    "half of {x}": "{x}/2",
    "the square of {x}": "{x}^2",
    "{k} times {x}": "{k}{x}",
    "{x} plus {k}": "({x} + {k})",
}
JOINED = {
    "The sum of {a} and {b}.": "{a} + {b}",
    "The difference of {a} and {b}.": "{a} - {b}",
    "The product of {a} and {b}.": "{a} * {b}",
    "The quotient of {a} and {b}.": "({a}) / ({b})",
}


def formula(dice: random.Random) -> Row:
    """Request a formula of two terms; an answer may write it in any form."""
    terms = []
    for _ in "ab":
        values = {"x": dice.choice("xyz"), "k": dice.randint(3, 9)}
        terms.append([text.format(**values) for text in dice.choice(list(TERMS.items()))])
    words, text = dice.choice(list(JOINED.items()))
    (a, first), (b, second) = terms
    return {"prompt": words.format(a=a, b=b), "answer": text.format(a=first, b=second)}


# ---------------------------------------------------------------------- sql

DATABASES, PEOPLE = 4, 8
CITIES = ("Rome", "Oslo", "Lima", "Cairo")
FOUND = {
    "The names": "name",
    "The cities": "city",
    "The names and ages": "name, age",
    "The distinct cities": "DISTINCT city",
    "The number": "COUNT(*)",
    "The mean age": "AVG(age)",
    "The highest pay": "MAX(pay)",
    "The lowest pay": "MIN(pay)",
    "The sum of the pay": "SUM(pay)",
}
WHERE = {
    "age": {"above {k}": "age > {k}", "below {k}": "age < {k}"},
    "city": {"from {city}": "city = '{city}'", "not from {city}": "city <> '{city}'"},
    "pay": {"paid over {k}": "pay > {k}", "paid under {k}": "pay < {k}"},
}


def query(dice: random.Random) -> Row:
    """Request what a query finds in a table of people; several databases tell a query from its result."""
    found, columns = dice.choice(list(FOUND)), dice.sample(list(WHERE), dice.randint(1, 2))
    words, conditions = [], []
    for column in columns:
        value = {"k": dice.randrange(30, 71, 5), "city": dice.choice(CITIES)}
        said, condition = dice.choice(list(WHERE[column].items()))
        words.append(said.format(**value))
        conditions.append(condition.format(**value))
    answer = f"SELECT {FOUND[found]} FROM people WHERE {' AND '.join(conditions)}"
    schema = [people(dice) for _ in range(DATABASES)]
    results = [result(script, answer) for script in schema]
    if results.count(results[0]) == DATABASES or [(None,)] in results:
        return query(dice)
    return {"prompt": f"{found} of people {' and '.join(words)}.", "answer": answer, "schema": schema}


def people(dice: random.Random) -> str:
    """Return the script of a table of people."""
    rows = ", ".join(
        f"('{dice.choice(WORDS)}', {dice.randint(20, 80)}, '{dice.choice(CITIES)}', {dice.randint(20, 80)})"
        for _ in range(PEOPLE)
    )
    return f"CREATE TABLE people (name TEXT, age INT, city TEXT, pay INT); INSERT INTO people VALUES {rows};"


def result(script: str, answer: str) -> list[tuple[Any, ...]]:
    """Return what a query finds in the database of a script, sorted."""
    with sqlite3.connect(":memory:") as database:
        database.executescript(script)
        return sorted(database.execute(answer).fetchall())


# ---------------------------------------------------------------------- json

KEYS = ("name", "age", "size", "tags", "open")
TEXT, NUMBER = {"type": "string", "minLength": 1}, {"type": "number"}


def document(dice: random.Random) -> Row:
    """Request an object of two keys, whose values fit a schema."""
    parts = {key: value(dice) for key in dice.sample(KEYS, 2)}
    schema = {
        "type": "object",
        "properties": {key: schema for key, (_, schema, _) in parts.items()},
        "required": list(parts),
        "additionalProperties": False,
    }
    request = "An object of " + " and ".join(f"{key}, {words}" for key, (words, _, _) in parts.items())
    answer = json.dumps({key: example for key, (_, _, example) in parts.items()})
    return {"prompt": f"{request}.", "answer": answer, "schema": schema}


def value(dice: random.Random) -> tuple[str, Row, Any]:
    """Return a kind of value in words, its schema and an example."""
    count, low, number = dice.randint(2, 3), dice.choice((20, 50, 80)), dice.randint(1, 9)
    sizes = {"minItems": count, "maxItems": count}
    return dice.choice(
        [
            ("a text", TEXT, dice.choice(WORDS)),
            ("a number", NUMBER, number),
            (f"a number above {low}", NUMBER | {"exclusiveMinimum": low}, low + number),
            ("true or false", {"type": "boolean"}, dice.choice((True, False))),
            (f"{count} texts", {"type": "array", "items": TEXT, **sizes}, dice.sample(WORDS, count)),
            (f"{count} numbers", {"type": "array", "items": NUMBER, **sizes}, dice.sample(range(10), count)),
        ]
    )


# ---------------------------------------------------------------------- grammar

AROUND = {"": ("", ""), " in brackets": ("(", ")"), " in quotes": ("'", "'"), " in angles": ("<", ">")}


def line(dice: random.Random) -> Row:
    """Request a line of two parts, which a grammar describes."""
    words, rules, texts = [], [], []
    for _ in range(2):
        said, rule, text = part(dice)
        name, (start, end) = dice.choice(list(AROUND.items()))
        words.append(said + name)
        rules.append(f'"{start}" {rule} "{end}"' if start else rule)
        texts.append(start + text + end)
    grammar = "start: " + ' " " '.join(rules) + "\nWORD: /[a-z]+/\nDIGIT: /[0-9]/\n"
    return {"prompt": f"{' and then '.join(words)}.", "answer": " ".join(texts), "grammar": grammar}


def part(dice: random.Random) -> tuple[str, str, str]:
    """Return a kind of part in words, its rule and an example."""
    count, words = dice.randint(2, 4), dice.sample(WORDS, 4)
    digits = [str(dice.randrange(10)) for _ in range(4)]
    return dice.choice(
        [
            ("a word", "WORD", words[0]),
            (f"{count} digits", " ".join(["DIGIT"] * count), "".join(digits[:count])),
            (f"{count} words", ' "," '.join(["WORD"] * count), ",".join(words[:count])),
            ("a sum", 'DIGIT "+" DIGIT', "+".join(digits[:2])),
            ("a setting", 'WORD "=" DIGIT', f"{words[0]}={digits[0]}"),
        ]
    )


REQUESTS: dict[str, Callable[[random.Random], Row]] = {
    "math": formula,
    "sql": query,
    "json": document,
    "grammar": line,
}
