"""The rollouts of a run, packed small and thinned evenly to what a page can hold.

A rollout's columns are nearly constant (the advantage of GRPO is one number a response, the
version one a rollout), so a column whose entries are equal is written once. Where everything does
not fit, whole groups and whole updates are left out at even distances, first and last kept, and
the page says how many.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from posttrain.report.record import Row, Samples, json_lines, number, text, whole

Item = TypeVar("Item")

PAGE_BYTES = {"train": 5_000_000, "eval": 3_000_000}
"""Most bytes of rollouts in a page, by kind."""
STEP_BYTES = 400_000
"""Most bytes of rollouts of one update."""
READ_BYTES = 30_000_000
"""Most bytes of sample files that are read, by kind; packing shrinks them a few times."""
TOKENS = 4096
"""Most tokens shown of one rollout."""
CHARACTERS = 20_000
"""Most characters shown of one text."""

CAUSE = 300
"""Most characters of the cause of a failure."""

OF_THE_POLICY = ("logp_gen", "logp_policy", "logp", "logp_ref", "advantage", "entropy", "value", "version")
"""Columns that mean something only where the policy chose the token."""
DIGITS = 5
"""Decimals kept of a per-token number."""


@dataclass(frozen=True, slots=True)
class UpdateRollouts:
    """The rollouts of one update, packed."""

    kind: str
    update: int
    packed: str
    """JSON."""
    shown: int
    total: int
    failed: int
    """Rollouts that the verifier could not judge."""
    recorded: int = 0
    """Groups that the file holds, of whatever size."""
    cause: str = ""
    """Of the first of them: its label and reason."""
    paid: tuple[tuple[int, float], ...] = ()
    """(tokens that the policy chose, reward) of each rollout with a score."""

    @property
    def id(self) -> str:
        """train-7 or eval-10: its name in the page and in the address."""
        return f"{self.kind}-{self.update}"


def evenly(items: Sequence[Item], n: int) -> list[Item]:
    """n items at even distances, with the first and the last; the last alone if n is 1.

    >>> evenly("abcdefg", 3), evenly("abc", 5), evenly("abc", 1)
    (['a', 'd', 'g'], ['a', 'b', 'c'], ['c'])
    """
    if n >= len(items):
        return list(items)
    if n <= 1:
        return list(items[-1:])
    return [items[round(i * (len(items) - 1) / (n - 1))] for i in range(n)]


def fitting(items: Sequence[Item], size: Callable[[Item], int], budget: int) -> list[Item]:
    """As many evenly spaced items as stay within the budget, one at least.

    >>> fitting([4, 4, 4, 4, 4], lambda x: x, 12)
    [4, 4, 4]
    """
    kept = list(items)
    while len(kept) > 1 and (total := sum(map(size, kept))) > budget:
        kept = evenly(items, min(len(kept) - 1, len(kept) * budget // total))
    return kept


def steps(samples: list[Samples]) -> tuple[list[UpdateRollouts], list[str]]:
    """The packed steps of a run that fit into a page, and notes on what was left out."""
    result: list[UpdateRollouts] = []
    notes: list[str] = []
    for kind, budget in PAGE_BYTES.items():
        files = [s for s in samples if s.kind == kind]
        readable = fitting(files, lambda s: s.size, READ_BYTES)
        packed: list[UpdateRollouts] = []
        for file in readable:
            step, remarks = pack_file(file)
            notes += remarks
            packed += [step] if step.total else []
        shown = fitting(packed, lambda s: len(s.packed), budget)
        if omitted := len(files) - len(readable) + len(packed) - len(shown):
            what = "updates" if kind == "train" else "evaluations"
            notes.append(
                f"The page holds the rollouts of {len(shown)} of {len(shown) + omitted} {what}, at even "
                f"distances, to stay below {budget / 1e6:.3g} MB."
            )
        if cut := sum(s.shown < s.total for s in shown):
            notes.append(
                f"{cut} of the steps in the browser hold only some of their rollouts, "
                f"to stay below {STEP_BYTES / 1e6:.3g} MB a step."
            )
        result += shown
    return sorted(result, key=lambda s: (s.update, s.kind)), notes


def pack_file(file: Samples) -> tuple[UpdateRollouts, list[str]]:
    """The rollouts in a file of samples as a step, and notes on what could not be read."""
    rows, notes = json_lines(file.path)
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    misfits: set[str] = set()
    for row in rows:
        packed, odd = pack_row(row)
        misfits |= odd
        task = text(row.get("task"))
        key = (text(row.get("group")) or task, task, text(row.get("prompt")), text(row.get("answer")))
        groups.setdefault(key, []).append(packed)
    if misfits:
        names = ", ".join(sorted(misfits))
        notes.append(f"{file.path.name}: lists that do not match their tokens were left out ({names}).")
    scores = [[r["score"] for r in members] for members in groups.values()]
    kept = fitting([_group(*item) for item in groups.items()], lambda group: len(group[0]), STEP_BYTES)
    return UpdateRollouts(
        kind=file.kind,
        update=file.update,
        packed="[" + ",".join(packed for packed, _ in kept) + "]",
        shown=sum(size for _, size in kept),
        total=len(rows),
        failed=sum(s.count(None) for s in scores),
        recorded=len(groups),
        cause=next((_cause(row) for row in rows if number(row.get("score")) is None), ""),
        paid=tuple(_paid(row) for row in rows if number(row.get("score")) is not None),
    ), notes


def _cause(row: Row) -> str:
    return ": ".join(filter(None, (text(row.get("label")), text(row.get("reason")))))[:CAUSE]


def _paid(row: Row) -> tuple[int, float]:
    """How much the policy said in a rollout, and what it was paid for it."""
    pieces, sampled, rewards = (row.get(name) for name in ("pieces", "sampled", "reward"))
    said = sampled if isinstance(sampled, list) else pieces if isinstance(pieces, list) else []
    known = [number(r) for r in rewards] if isinstance(rewards, list) else [None]
    paid = number(row.get("score")) if None in known else math.fsum(r or 0.0 for r in known)
    return sum(map(bool, said)), paid or 0.0


def _group(key: tuple[str, str, str, str], members: list[Row]) -> tuple[str, int]:
    """JSON of a group, and how many rollouts it holds."""
    group, task, prompt, answer = (short(part) for part in key)
    members = fitting(members, lambda m: len(json_text(m)), STEP_BYTES)
    packed = {"group": group, "task": task, "prompt": prompt, "answer": answer, "rows": members}
    return json_text(packed), len(members)


def pack_row(row: Row) -> tuple[Row, set[str]]:
    """One rollout with its columns packed, and the names of columns that do not fit its tokens.

    A column is a list, or one number if every entry that counts is equal, or "logp_gen" if it
    repeats that column.

    >>> row, odd = pack_row({"pieces": ["7", "!"], "advantage": [0.5, 0.5], "entropy": [0.1]})
    >>> row["advantage"], sorted(odd)
    (0.5, ['entropy'])
    """
    found = row.get("pieces")
    pieces: list[Any] = found if isinstance(found, list) else []
    n = len(pieces)
    odd: set[str] = set()

    def column(name: str) -> list[Any] | None:
        values = row.get(name)
        if isinstance(values, list) and len(values) == n:
            return values[:TOKENS]
        odd.update([name] if values is not None else [])
        return None

    sampled = [bool(s) for s in column("sampled") or [True] * min(n, TOKENS)]
    out: Row = {
        "sample": whole(row.get("sample")) or 0,
        "pieces": [short(text(p)) for p in pieces[:TOKENS]],
        "sampled": _constant([int(s) for s in sampled], [True] * len(sampled)),
        "score": number(row.get("score")),
        "label": short(text(row.get("label"))) or "unlabelled",
        "reason": short(text(row.get("reason"))),
        "stop": short(text(row.get("stop"))),
        "turns": whole(row.get("turns")) or 1,
    }
    parts = row.get("parts")
    if isinstance(parts, dict) and parts:
        out["parts"] = {short(str(k)): number(v) for k, v in parts.items()}
    if n > TOKENS:
        out["tokens"] = n
    for name in OF_THE_POLICY:
        if (values := column(name)) is not None:
            out[name] = _constant([_rounded(v) for v in values], sampled)
    if (rewards := column("reward")) is not None:
        out["reward"] = _constant([_rounded(v) for v in rewards], [True] * len(rewards))
    if "logp_policy" in out and out["logp_policy"] == out.get("logp_gen"):
        out["logp_policy"] = "logp_gen"
    return out, odd


def _constant(values: list[Any], sampled: list[bool]) -> Any:
    counted = {v for v, s in zip(values, sampled, strict=True) if s}
    if len(counted) == 1:
        return counted.pop()
    return [v if s else 0 for v, s in zip(values, sampled, strict=True)]


def _rounded(value: object) -> float | int | None:
    x = number(value)
    if x is None:
        return None
    x = round(x, DIGITS)
    return int(x) if x.is_integer() else x


def short(value: str, most: int = CHARACTERS) -> str:
    """A text, cut behind so many characters."""
    return value if len(value) <= most else f"{value[:most]} … ({len(value) - most} more characters)"


def json_text(value: object) -> str:
    """JSON that no HTML parser can leave: ASCII, without < and without NaN.

    >>> json_text("</script>")
    '"\\\\u003c/script>"'
    """
    dumped = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return dumped.replace("<", "\\u003c")
