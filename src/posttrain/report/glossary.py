"""The meaning of each metric, from metrics.toml in this folder; docs/metrics.md is generated from it too."""

import re
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import resources

from posttrain.base.name_hints import did_you_mean
from posttrain.errors import UserError


@cache
def sections() -> dict[str, dict[str, list[str]]]:
    """Return for each section a table from names, separated by ", ", to [unit, meaning, formula]."""
    return tomllib.loads(resources.files(__package__).joinpath("metrics.toml").read_text(encoding="utf-8"))


def words(names: Iterable[str]) -> dict[str, list[str]]:
    """Return [unit, meaning, how it is computed, anchor on docs/metrics.md] for each metric of the glossary.

    A held-out metric without an entry has that of the same metric of an update, and one of a source of tasks,
    as task/NAME/accuracy and eval/NAME/accuracy, that of all.

    >>> words(["verdict/right", "mine"])["verdict/right"][::3]
    ['0–1', 'verdict-label']
    """
    entries = {name: next(filter(None, map(_entry, _general(name))), None) for name in names}
    return {name: entry for name, entry in entries.items() if entry}


def unknown_metric(key: str, text: str) -> UserError:
    """Return the error for a text whose last word does not name a metric; its fix is the nearest name.

    >>> unknown_metric("--metric", "min eval/los").fix
    "did you mean 'eval/loss'?"
    """
    names = [name for section in sections().values() for keys in section for name in keys.split(", ")]
    fix = did_you_mean(text.rpartition(" ")[2], names) or "docs/metrics.md lists the metrics"
    return UserError(key, f"there is no metric {text!r}", fix)


def source_in(name: str) -> str:
    """Return the source of tasks that a metric is of; "" for a metric of all.

    >>> source_in("eval/sums/accuracy"), source_in("eval/accuracy"), source_in("eval/score/accuracy")
    ('sums', '', '')
    """
    part = _OF_SOURCE.match(name)
    is_shared = any(map(_entry, (name, name.removeprefix("eval/"))))
    return part[2] if part and not is_shared else ""


_OF_SOURCE = re.compile(r"(task|eval)/([^/]+)/")


def _general(name: str) -> list[str]:
    """Return the names under which the glossary may have a metric, the most special first."""
    shared = _OF_SOURCE.sub(lambda m: "eval/" * (m[1] == "eval"), name, count=1)
    return [name, name.removeprefix("eval/"), shared, shared.removeprefix("eval/")]


def anchor(name: str) -> str:
    """Return the anchor of a metric on docs/metrics.md.

    >>> anchor("pass@<k>"), anchor("kl/ref")
    ('pass-k', 'kl-ref')
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _entry(name: str) -> list[str] | None:
    for pattern, first, texts in _patterns():
        if pattern.fullmatch(name):
            return [*(text.replace("`", "") for text in texts), anchor(first)]
    return None


@cache
def _patterns() -> list[tuple[re.Pattern[str], str, list[str]]]:
    patterns = []
    for section in sections().values():
        for names, texts in section.items():
            for name in names.split(", "):
                parts = [re.escape(part) for part in re.split(r"<\w+>", name)]
                patterns.append((re.compile(".+".join(parts)), names.split(", ")[0], texts))
    return patterns
