"""What a metric is, in words: metrics.toml beside this file, which docs/metrics.md shows as tables too."""

import re
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import resources


@cache
def sections() -> dict[str, dict[str, list[str]]]:
    """By section, for each name, or several with commas between, [unit, meaning, how it is computed]."""
    return tomllib.loads(resources.files(__package__).joinpath("metrics.toml").read_text(encoding="utf-8"))


def words(names: Iterable[str]) -> dict[str, list[str]]:
    """[unit, meaning, how it is computed, anchor on docs/metrics.md] of those that are known.

    A held-out metric that has no words of its own has those of the same metric of an update.

    >>> words(["verdict/right", "mine"])["verdict/right"][::3]
    ['0–1', 'verdict-label']
    """
    found = {}
    for name in names:
        known = _entry(name) or _entry(name.removeprefix("eval/"))
        if known:
            found[name] = known
    return found


def anchor(name: str) -> str:
    """Of a metric on docs/metrics.md.

    >>> anchor("pass@<k>"), anchor("kl/ref")
    ('pass-k', 'kl-ref')
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _entry(name: str) -> list[str] | None:
    for pattern, first, told in _patterns():
        if pattern.fullmatch(name):
            return [*(_plain(each) for each in told), anchor(first)]
    return None


@cache
def _patterns() -> list[tuple[re.Pattern[str], str, list[str]]]:
    found = []
    for section in sections().values():
        for names, told in section.items():
            for name in names.split(", "):
                parts = [re.escape(part) for part in re.split(r"<\w+>", name)]
                found.append((re.compile(".+".join(parts)), names.split(", ")[0], told))
    return found


def _plain(text: str) -> str:
    return text.replace("`", "")
