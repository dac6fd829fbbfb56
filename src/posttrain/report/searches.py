"""Pack the searches of a run, or of several strategies: their results, and some of their trees.

A file of trees/ holds the searches of an update, of an evaluation, or of a strategy. The page holds the
result of every search in a file, and as many complete trees as fit, at even distances.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.report.headline import Headline
from posttrain.report.record import Row, Samples, integer, number, read_json_lines, text
from posttrain.report.rollouts import fitting, json_text, short

READ_BYTES = 60_000_000
"""Maximum bytes of trees/ that are read."""
ROW_BYTES = 1_500_000
"""Maximum bytes of the results of searches in a page."""
TREE_BYTES = 4_000_000
"""Maximum bytes of trees in a page."""
SET_BYTES = 150_000
"""Share of TREE_BYTES that each file has at least."""
CHARACTERS = {"shown": 4000, "text": 600, "reason": 160, "answer": 6000}
"""Maximum number of characters of each text."""
COUNTS = ("moves", "followed", "merged", "refusals")


@dataclass(frozen=True, slots=True)
class SearchLog:
    id: str
    kind: str
    """train, eval or strategy."""
    update: int
    name: str
    """Name of the strategy."""
    budget: int
    rows: list[Row]
    trees: str
    """JSON of the trees that fit, by the index of their row."""

    def summary(self) -> Row:
        """Return everything but the trees."""
        names = ("id", "kind", "update", "name", "budget", "rows")
        return {name: getattr(self, name) for name in names}


def searches(files: Sequence[Samples]) -> tuple[list[SearchLog], list[str]]:
    """Return the searches of the files that fit into a page, and notes on what was left out."""
    readable = fitting(files, lambda file: file.size, READ_BYTES)
    logs, notes = [], []
    share = max(SET_BYTES, TREE_BYTES // max(len(readable), 1))
    for file in readable:
        log, remarks = _pack(file, share)
        logs += [log] if log.rows else []
        notes += remarks
    in_page = fitting(logs, lambda log: len(log.trees), TREE_BYTES)
    in_page = fitting(in_page, lambda log: len(json_text(log.rows)), ROW_BYTES)
    if omitted := len(files) - len(readable) + len(logs) - len(in_page):
        notes.append(
            f"The page holds the searches of {len(in_page)} of {len(in_page) + omitted} files, evenly spaced."
        )
    return in_page, notes


def _pack(file: Samples, most: int) -> tuple[SearchLog, list[str]]:
    lines, notes = read_json_lines(file.path)
    trees = [(n, _tree(line)) for n, line in enumerate(lines) if isinstance(line.get("states"), list)]
    trees = fitting(trees, lambda tree: len(json_text(tree[1])), most)
    first = lines[0] if lines else {}
    return SearchLog(
        id="trees-" + file.path.stem.replace("_", "-"),
        kind=file.kind,
        update=file.update,
        name=_cut(first, "strategy", 60),
        budget=max((integer(line.get("budget")) or 0 for line in lines), default=0),
        rows=[_row(line) for line in lines],
        trees=json_text(dict(trees)),
    ), notes


def _row(line: Row) -> Row:
    fields, refused = (_numbers(line.get(name)) for name in ("fields", "refused"))
    seconds = {name: number(line.get(name)) or 0.0 for name in ("model_s", "prover_s")}
    return {
        "task": _cut(line, "task", 200),
        "label": _cut(line, "label", 60) or "unlabelled",
        "solved": line.get("solved") is True,
        **{name: integer(line.get(name)) or 0 for name in COUNTS},
        **seconds,
        "fields": fields,
        "refused": refused,
    }


def _tree(line: Row) -> Row:
    return {
        "reason": _cut(line, "reason", CHARACTERS["answer"]),
        "answer": _cut(line, "answer", CHARACTERS["answer"]),
        "asked": _integers(line.get("asked")),
        "states": [_state(state) for state in line["states"] if isinstance(state, dict)],
    }


def _state(state: Row) -> Row:
    moves, parts = state.get("moves"), state.get("parts")
    goals = {"parts": _integers(parts)} if isinstance(parts, list) else {}
    return goals | {
        "number": integer(state.get("number")) or 0,
        "depth": integer(state.get("depth")) or 0,
        "visits": integer(state.get("visits")) or 0,
        "value": _short(state.get("value")),
        "done": state.get("done") is True,
        "shown": _cut(state, "shown", CHARACTERS["shown"]),
        "moves": [_move(move) for move in moves if isinstance(move, dict)] if isinstance(moves, list) else [],
    }


def _move(move: Row) -> Row:
    out: Row = {"text": _cut(move, "text", CHARACTERS["text"]), "logp": _short(move.get("logp"))}
    out |= {name: n for name in ("said", "visits", "to") if (n := integer(move.get(name))) is not None}
    if (value := _short(move.get("value"))) is not None:
        out["value"] = value
    if "refused" in move:
        out |= {"refused": _cut(move, "refused", 60), "reason": _ends(move)}
    return out | ({"found": True} if move.get("found") is True else {})


def _integers(values: object) -> list[int]:
    entries = values if isinstance(values, list) else []
    return [n for value in entries if (n := integer(value)) is not None]


def _numbers(values: object) -> dict[str, float]:
    entries: dict[Any, Any] = values if isinstance(values, dict) else {}
    return {str(name)[:60]: n for name, value in entries.items() if (n := number(value)) is not None}


def _short(value: object) -> float | None:
    x = number(value)
    return None if x is None else float(f"{x:.4g}")


def _ends(move: Row) -> str:
    """Return why a move was refused, without the middle: a prover may print the complete state first."""
    reason, most = text(move.get("reason")), CHARACTERS["reason"]
    return reason if len(reason) <= most else f"{reason[: most // 4]} … {reason[-most * 3 // 4 :]}"


def _cut(row: Row, name: str, most: int) -> str:
    return short(text(row.get(name)), most)


def side_by_side(logs: Sequence[SearchLog]) -> Headline | None:
    """Return a headline of what each strategy solved, the first one large; None without strategies."""
    strategies = [log for log in logs if log.kind == "strategy"]
    if not strategies:
        return None
    solved = [f"{sum(row['solved'] for row in log.rows)} of {len(log.rows)}" for log in strategies]
    first, *others = strategies
    tiles = [(log.name, count, "solved") for log, count in zip(others, solved[1:], strict=True)]
    tiles.append(("Budget", str(max(log.budget for log in strategies)), "moves a search"))
    return Headline(f"Solved by {first.name}", "", solved[0], "", f"at most {first.budget} moves each", tiles)
