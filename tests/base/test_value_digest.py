"""A digest of a value: equal for equal values, in any process and order of sets."""

import cmath
import math
import pickle
import re
import subprocess
import sys
from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy
import pytest

from posttrain.base.value_digest import value_digest


class Door(Enum):
    OPEN = 1
    SHUT = 2


@dataclass(frozen=True, slots=True)
class Room:
    name: str
    last: str
    door: Door = Door.SHUT
    seen: frozenset[str] = frozenset()


class Plain:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def test_equal_values_have_equal_digests() -> None:
    kitchen = "".join(["kit", "chen"])
    pairs: list[tuple[Any, Any]] = [
        (Room("kitchen", "kitchen"), Room(kitchen, "kitchen")),  # one text twice, and two equal ones
        (Room("a", "b", seen=frozenset("abcdef")), Room("a", "b", seen=frozenset("fedcba"))),
        ({"a": 1, "b": [2, 3]}, {"b": [2, 3], "a": 1}),
        (Plain(x=1, y=(2,)), Plain(y=(2,), x=1)),
        (Counter("aab"), Counter("baa")),
        (numpy.arange(5), numpy.arange(9)[:5]),
        (re.compile("x+"), re.compile("x+")),
        (10**5000, 10**4999 * 10),
        (Door.OPEN, Door.OPEN),
        (None, None),
    ]
    for a, b in pairs:
        assert value_digest(a) == value_digest(b) == value_digest(pickle.loads(pickle.dumps(a))), a
        assert 0 < value_digest(a) < 2**63
    assert pickle.dumps(pairs[0][0]) != pickle.dumps(pairs[0][1]), (
        "which a digest of the pickle would not see"
    )


def test_other_values_have_other_digests() -> None:
    room = Room("a", "b")
    values: list[Any] = [
        *(room, replace(room, door=Door.OPEN), replace(room, name="b"), Room("b", "a")),
        *(0, 0.0, False, None, "", b"", (), [], {}, set(), frozenset()),
        *(1, 1.0, True, "1", b"1", (1,), [1], {1}, {1: 1}, numpy.float64(1), numpy.ones(1)),
        *((1, 2), (2, 1), ((1,), 2), (1, (2,)), "ab", ("a", "b"), -1, "\ud800"),
        *(OrderedDict(a=1, b=2), OrderedDict(b=2, a=1), Plain(x=1), Plain(y=1), int, len, Plain),
        *(math.log, cmath.log, [1].index, [2].index, Room, replace, Door, Room("a", "b").__eq__),
    ]
    assert len({value_digest(value) for value in values}) == len(values)


def test_another_process_finds_the_same_digest() -> None:
    value = "{'seen': {'up', 'down', 'left'}, 'at': (1, 2.5)}"
    code = f"from posttrain.base.value_digest import value_digest; print(value_digest({value}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"})
    assert int(done.stdout) == value_digest({"at": (1, 2.5), "seen": {"left", "up", "down"}})


def test_what_cannot_be_pickled_has_no_digest() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError):
        value_digest(iter_of := (n for n in [1]))
    for number in (1, 2):  # two functions of one name
        with pytest.raises(TypeError, match="cannot be pickled"):
            value_digest(lambda number=number: number)
    with pytest.raises(RecursionError):
        value_digest(loop)
    assert iter_of
