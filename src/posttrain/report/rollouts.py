"""Pack the rollouts of a run and thin them evenly to what a page can hold.

Most columns of a rollout are nearly constant (the advantage of GRPO is one number per response, the
version one per rollout), so a column whose entries are equal is written once. If the page is full,
groups and updates are left out at even distances, first and last excepted, and the page says how many.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from posttrain.report.record import Row, Samples, integer, number, read_json_lines, text

Item = TypeVar("Item")

PAGE_BYTES = {"train": 5_000_000, "eval": 3_000_000}
"""Maximum bytes of rollouts in a page, by kind."""
STEP_BYTES = 400_000
"""Maximum bytes of rollouts of one update."""
READ_BYTES = 30_000_000
"""Maximum bytes of sample files that are read, by kind; packing shrinks them a few times."""
TOKENS = 4096
"""Maximum number of tokens of a rollout."""
CHARACTERS = 20_000
"""Maximum number of characters of a text."""
CAUSE = 300
"""Maximum number of characters of the cause of a failure."""

OF_THE_POLICY = ("logp_gen", "logp_policy", "logp", "logp_ref", "advantage", "entropy", "value", "version")
"""Columns with a meaning only for tokens that the policy chose."""
DIGITS = 5
"""Decimals of a per-token number."""


@dataclass(frozen=True, slots=True)
class UpdateRollouts:
    """The rollouts of one update, packed."""

    kind: str
    update: int
    packed: str
    """JSON of the groups."""
    count: int
    """Number of rollouts in `packed`."""
    total: int
    """Number of rollouts in the file."""
    failed: int
    """Number of rollouts that the verifier could not judge."""
    recorded: int = 0
    """Number of groups in the file, of any size."""
    cause: str = ""
    """Label and reason of the first failed rollout."""
    paid: tuple[tuple[int, float], ...] = ()
    """(tokens that the policy chose, reward) of each rollout with a score."""

    @property
    def id(self) -> str:
        """Name in the page and in its address: train-7, eval-10."""
        return f"{self.kind}-{self.update}"


def evenly(items: Sequence[Item], n: int) -> list[Item]:
    """Return n items at even distances, with the first and the last; for n = 1 the last.

    >>> evenly("abcdefg", 3), evenly("abc", 5), evenly("abc", 1)
    (['a', 'd', 'g'], ['a', 'b', 'c'], ['c'])
    """
    if n >= len(items):
        return list(items)
    if n <= 1:
        return list(items[-1:])
    return [items[round(i * (len(items) - 1) / (n - 1))] for i in range(n)]


def fitting(items: Sequence[Item], size: Callable[[Item], int], budget: int) -> list[Item]:
    """Return as many evenly spaced items as fit into the budget, at least one.

    >>> fitting([4, 4, 4, 4, 4], lambda x: x, 12)
    [4, 4, 4]
    """
    subset = list(items)
    while len(subset) > 1 and (total := sum(map(size, subset))) > budget:
        subset = evenly(items, min(len(subset) - 1, len(subset) * budget // total))
    return subset


def steps(samples: list[Samples]) -> tuple[list[UpdateRollouts], list[str]]:
    """Return the packed updates of a run that fit into a page, and notes on what was left out."""
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
        in_page = fitting(packed, lambda s: len(s.packed), budget)
        if omitted := len(files) - len(readable) + len(packed) - len(in_page):
            noun = "updates" if kind == "train" else "evaluations"
            notes.append(
                f"The page holds the rollouts of {len(in_page)} of {len(in_page) + omitted} {noun}, at even "
                f"distances, to stay below {budget / 1e6:.3g} MB."
            )
        if cut := sum(s.count < s.total for s in in_page):
            notes.append(
                f"{cut} of the steps in the browser hold only some of their rollouts, "
                f"to stay below {STEP_BYTES / 1e6:.3g} MB a step."
            )
        result += in_page
    return sorted(result, key=lambda s: (s.update, s.kind)), notes


def pack_file(file: Samples) -> tuple[UpdateRollouts, list[str]]:
    """Pack the rollouts in a file of samples; return them with notes on what could not be read."""
    rows, notes = read_json_lines(file.path)
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    misfits: set[str] = set()
    for row in rows:
        packed, odd = pack_row(row)
        misfits |= odd
        dataset, task = text(row.get("dataset") or ""), text(row.get("task"))
        task = f"{dataset}: {task}" if dataset else task
        key = (text(row.get("group")) or task, task, text(row.get("prompt")), text(row.get("answer")))
        groups.setdefault(key, []).append(packed)
    if misfits:
        names = ", ".join(sorted(misfits))
        notes.append(f"{file.path.name}: lists that do not match their tokens were left out ({names}).")
    scores = [[r["score"] for r in members] for members in groups.values()]
    contents = fitting([_group(*item) for item in groups.items()], lambda group: len(group[0]), STEP_BYTES)
    return UpdateRollouts(
        kind=file.kind,
        update=file.update,
        packed="[" + ",".join(content for content, _ in contents) + "]",
        count=sum(size for _, size in contents),
        total=len(rows),
        failed=sum(s.count(None) for s in scores),
        recorded=len(groups),
        cause=next((_cause(row) for row in rows if number(row.get("score")) is None), ""),
        paid=tuple(_paid(row) for row in rows if number(row.get("score")) is not None),
    ), notes


def _cause(row: Row) -> str:
    return ": ".join(filter(None, (text(row.get("label")), text(row.get("reason")))))[:CAUSE]


def _paid(row: Row) -> tuple[int, float]:
    """Return the number of tokens that the policy chose in a rollout, and its reward (or else its score)."""
    pieces, sampled, rewards = (row.get(name) for name in ("pieces", "sampled", "reward"))
    flags = sampled if isinstance(sampled, list) else pieces if isinstance(pieces, list) else []
    values = [number(r) for r in rewards] if isinstance(rewards, list) else [None]
    paid = number(row.get("score")) if None in values else math.fsum(r or 0.0 for r in values)
    return sum(map(bool, flags)), paid or 0.0


def _group(key: tuple[str, str, str, str], members: list[Row]) -> tuple[str, int]:
    """Return the JSON of a group, and its number of rollouts."""
    group, task, prompt, answer = (short(part) for part in key)
    members = fitting(members, lambda m: len(json_text(m)), STEP_BYTES)
    packed = {"group": group, "task": task, "prompt": prompt, "answer": answer, "rows": members}
    return json_text(packed), len(members)


def pack_row(row: Row) -> tuple[Row, set[str]]:
    """Pack the columns of a rollout; return it with the names of columns that do not match its tokens.

    A column is a list, or one number if all its entries at sampled tokens are equal, or "logp_gen" if
    it repeats that column.

    >>> row, odd = pack_row({"pieces": ["7", "!"], "advantage": [0.5, 0.5], "entropy": [0.1]})
    >>> row["advantage"], sorted(odd)
    (0.5, ['entropy'])
    """
    pieces: list[Any] = row["pieces"] if isinstance(row.get("pieces"), list) else []
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
        "sample": integer(row.get("sample")) or 0,
        "pieces": [short(text(p)) for p in pieces[:TOKENS]],
        "sampled": _constant([int(s) for s in sampled], [True] * len(sampled)),
        "score": number(row.get("score")),
        "label": short(text(row.get("label"))) or "unlabelled",
        "reason": short(text(row.get("reason"))),
        "stop": short(text(row.get("stop"))),
        "turns": integer(row.get("turns")) or 1,
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
    distinct = {v for v, s in zip(values, sampled, strict=True) if s}
    if len(distinct) == 1:
        return distinct.pop()
    return [v if s else 0 for v, s in zip(values, sampled, strict=True)]


def _rounded(value: object) -> float | int | None:
    x = number(value)
    if x is None:
        return None
    x = round(x, DIGITS)
    return int(x) if x.is_integer() else x


def short(value: str, most: int = CHARACTERS) -> str:
    """Truncate a text to `most` characters, and say how many were cut."""
    return value if len(value) <= most else f"{value[:most]} … ({len(value) - most} more characters)"


def json_text(value: object) -> str:
    """Write JSON that is safe in an HTML script element: ASCII, without < and without NaN.

    >>> json_text("</script>")
    '"\\\\u003c/script>"'
    """
    dumped = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return dumped.replace("<", "\\u003c")
