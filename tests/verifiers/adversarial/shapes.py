"""Tasks in HumanEval's form: name, prompt, body of a solution, and what `check(candidate)` does."""

# ruff: noqa: E501  a line of a program is a line

LOOPED = """
def running_max(xs):
    '''The greatest so far at each place.'''
"""
SHAPES: list[tuple[str, str, str, str]] = [
    ("running_max", LOOPED,
     "    out = []\n    best = None\n    for x in xs:\n        if best is None or x > best:\n            best = x\n"
     "        out.append(best)\n    return out\n",
     "assert candidate([]) == []\n    assert candidate([3, 1, 4, 1, 5]) == [3, 3, 4, 4, 5]"),
    ("close_pair", "from typing import List\n\n\ndef close_pair(xs: List[float], d: float) -> bool:\n    '''x'''\n",
     "    for i, x in enumerate(xs):\n        for j, y in enumerate(xs):\n            if i != j and abs(x - y) < d:\n"
     "                return True\n    return False\n",
     "assert candidate([1.0, 2.0, 2.2], 0.3) == True\n    assert candidate([1.0, 2.0], 0.5) == False"),
    ("cube_root", "def cube_root(x):\n    '''x'''\n",
     "    low, high = 0.0, max(1.0, x)\n    for _ in range(100):\n        middle = (low + high) / 2\n"
     "        if middle ** 3 < x:\n            low = middle\n        else:\n            high = middle\n    return low\n",
     "assert abs(candidate(27.0) - 3) < 1e-6\n    assert abs(candidate(0.001) - 0.1) < 1e-6"),
    ("decode", "def encode(s):\n    return s[::-1] + '!'\n\n\ndef decode(s):\n    '''x'''\n",
     "    if s.endswith('!'):\n        s = s[:-1]\n    return s[::-1]\n",
     "from random import choice, randint\n    import string\n    for _ in range(100):\n"
     "        s = ''.join(choice(string.ascii_letters) for _ in range(randint(1, 20)))\n"
     "        assert candidate(encode(s)) == s"),
    ("positive", "def positive(x):\n    '''x'''\n",
     "    if not isinstance(x, int):\n        raise TypeError('not an integer')\n    if x <= 0:\n"
     "        raise ValueError('too small')\n    return x * 2\n",
     "assert candidate(3) == 6\n    for bad, kind in ((0, ValueError), (-1, ValueError), ('a', TypeError)):\n"
     "        try:\n            candidate(bad)\n        except kind as error:\n            assert str(error) in"
     " ('too small', 'not an integer')\n        else:\n            assert False"),
    ("primes", "def primes(n):\n    '''x'''\n",
     "    found = []\n    for k in range(2, n):\n        if all(k % p != 0 for p in found):\n            found.append(k)\n"
     "    return found\n", "assert candidate(20) == [2, 3, 5, 7, 11, 13, 17, 19], 'small'\n    assert len(candidate(200)) == 46"),
    ("words", "import collections\n\n\ndef words(text):\n    '''x'''\n",
     "    counts = collections.Counter(text.lower().split())\n    most = max(counts.values(), default=0)\n"
     "    return {w: n for w, n in counts.items() if n == most}\n",
     "assert candidate('a b A') == {'a': 2}\n    assert candidate('') == {}\n    assert candidate('x y') == {'x': 1, 'y': 1}"),
    ("split_at", "def split_at(xs, n):\n    '''x'''\n", "    left, right = [], []\n    for i, x in enumerate(xs):\n        if i < n:\n            left.append(x)\n"
     "        else:\n            right.append(x)\n    return left, right\n",
     "assert candidate([1, 2, 3], 1) == ([1], [2, 3])\n    assert candidate([], 4) == ([], [])"),
    ("common", "def common(a, b):\n    '''x'''\n", "    found = set()\n    for x in a:\n        if x in b and x not in found:\n            found.add(x)\n    return found\n",
     "assert candidate([1, 2], [2, 3]) == {2}\n    assert candidate('', 'x') == set()"),
    ("power_mod", "def power_mod(b, e, m):\n    '''x'''\n",
     "    result = 1\n    while e > 0:\n        if e % 2 == 1:\n            result = result * b % m\n        b = b * b % m\n"
     "        e = e // 2\n    return result\n",
     "import random\n    for _ in range(100):\n        b, e, m = (random.randint(2, 50) for _ in range(3))\n"
     "        assert candidate(b, e, m) == pow(b, e, m)"),
    ("depth", "def depth(text):\n    '''x'''\n",
     "    now = most = 0\n    for c in text:\n        if c == '(':\n            now += 1\n            most = max(most, now)\n"
     "        elif c == ')':\n            now -= 1\n    return most if now == 0 else None\n",
     "assert candidate('(())()') == 2\n    assert candidate('(') is None\n    assert candidate('') == 0"),
    ("digits", "def digits(n: int, base: int = 10):\n    '''x'''\n",
     "    if n < base:\n        return [n]\n    return digits(n // base, base) + [n % base]\n",
     "assert candidate(305) == [3, 0, 5]\n    assert candidate(6, base=2) == [1, 1, 0]\n    assert candidate(0) == [0]"),
]  # fmt: skip
