"""The searches of a run, or of strategies side by side: what each came to, and the trees that are kept.

A set is a file of trees/: the searches of an update, of an evaluation, or of a strategy. Of each search the
page holds what it spent; of whole trees as many as fit, at even distances.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.report.headline import Headline
from posttrain.report.record import Row, Samples, json_lines, number, text, whole
from posttrain.report.rollouts import fitting, json_text, short

READ_BYTES = 60_000_000
"""Most bytes of trees/ that are read."""
ROW_BYTES = 1_500_000
"""Most bytes of what searches came to."""
TREE_BYTES = 4_000_000
"""Most bytes of whole trees in a page."""
SET_BYTES = 150_000
"""What each set has of them at least, while there are sets."""
CHARACTERS = {"shown": 4000, "text": 600, "reason": 160, "answer": 6000}
"""Most that is shown of each."""
COUNTS = ("moves", "followed", "merged", "refusals")


@dataclass(frozen=True, slots=True)
class SearchLog:
    """The searches of one file."""

    id: str
    kind: str
    """train, eval or strategy."""
    update: int
    name: str
    """Of the strategy."""
    budget: int
    rows: list[Row]
    trees: str
    """JSON: the whole trees that are kept, by the number of their row."""

    def summary(self) -> Row:
        """What the page's scripts read at once."""
        told = {"id": self.id, "kind": self.kind, "update": self.update, "name": self.name}
        return told | {"budget": self.budget, "rows": self.rows}


def searches(found: Sequence[Samples]) -> tuple[list[SearchLog], list[str]]:
    """The sets that fit into a page, and notes on what was left out."""
    read = fitting(found, lambda file: file.size, READ_BYTES)
    made, notes = [], []
    share = max(SET_BYTES, TREE_BYTES // max(len(read), 1))
    for file in read:
        each, remarks = _packed(file, share)
        made += [each] if each.rows else []
        notes += remarks
    kept = fitting(made, lambda each: len(each.trees), TREE_BYTES)
    kept = fitting(kept, lambda each: len(json_text(each.rows)), ROW_BYTES)
    if omitted := len(found) - len(read) + len(made) - len(kept):
        notes.append(
            f"The page holds the searches of {len(kept)} of {len(kept) + omitted} files, evenly spaced."
        )
    return kept, notes


def _packed(file: Samples, most: int) -> tuple[SearchLog, list[str]]:
    lines, notes = json_lines(file.path)
    trees = [(n, _tree(line)) for n, line in enumerate(lines) if isinstance(line.get("states"), list)]
    held = fitting(trees, lambda each: len(json_text(each[1])), most) if trees else []
    first = lines[0] if lines else {}
    return SearchLog(
        id="trees-" + file.path.stem.replace("_", "-"),
        kind=file.kind,
        update=file.update,
        name=_cut(first, "strategy", 60),
        budget=max((whole(line.get("budget")) or 0 for line in lines), default=0),
        rows=[_row(line) for line in lines],
        trees=json_text(dict(held)),
    ), notes


def _row(line: Row) -> Row:
    """What a search came to and spent."""
    fields, refused = (_numbers(line.get(name)) for name in ("fields", "refused"))
    seconds = {name: number(line.get(name)) or 0.0 for name in ("model_s", "prover_s")}
    return {
        "task": _cut(line, "task", 200),
        "label": _cut(line, "label", 60) or "unlabelled",
        "solved": line.get("solved") is True,
        **{name: whole(line.get(name)) or 0 for name in COUNTS},
        **seconds,
        "fields": fields,
        "refused": refused,
    }


def _tree(line: Row) -> Row:
    asked = line.get("asked")
    return {
        "reason": _cut(line, "reason", CHARACTERS["answer"]),
        "answer": _cut(line, "answer", CHARACTERS["answer"]),
        "asked": [n for each in asked if (n := whole(each)) is not None] if isinstance(asked, list) else [],
        "states": [_state(state) for state in line["states"] if isinstance(state, dict)],
    }


def _state(state: Row) -> Row:
    moves, parts = state.get("moves"), state.get("parts")
    told = (
        {"parts": [n for each in parts if (n := whole(each)) is not None]} if isinstance(parts, list) else {}
    )
    return told | {
        "number": whole(state.get("number")) or 0,
        "depth": whole(state.get("depth")) or 0,
        "visits": whole(state.get("visits")) or 0,
        "value": _short(state.get("value")),
        "done": state.get("done") is True,
        "shown": _cut(state, "shown", CHARACTERS["shown"]),
        "moves": [_move(move) for move in moves if isinstance(move, dict)] if isinstance(moves, list) else [],
    }


def _move(move: Row) -> Row:
    out: Row = {"text": _cut(move, "text", CHARACTERS["text"]), "logp": _short(move.get("logp"))}
    out |= {name: n for name in ("said", "visits", "to") if (n := whole(move.get(name))) is not None}
    if (value := _short(move.get("value"))) is not None:
        out["value"] = value
    if "refused" in move:
        out |= {"refused": _cut(move, "refused", 60), "reason": _ends(move)}
    return out | ({"found": True} if move.get("found") is True else {})


def _numbers(values: object) -> dict[str, float]:
    given: dict[Any, Any] = values if isinstance(values, dict) else {}
    return {str(name)[:60]: n for name, value in given.items() if (n := number(value)) is not None}


def _short(value: object) -> float | None:
    known = number(value)
    return None if known is None else float(f"{known:.4g}")


def _ends(move: Row) -> str:
    """Why a move was refused, without the middle: a prover may tell of the whole state first."""
    reason, most = text(move.get("reason")), CHARACTERS["reason"]
    return reason if len(reason) <= most else f"{reason[: most // 4]} … {reason[-most * 3 // 4 :]}"


def _cut(row: Row, name: str, most: int) -> str:
    return short(text(row.get(name)), most)


def side_by_side(found: Sequence[SearchLog]) -> Headline | None:
    """What strategies solved, each a tile and the first one large; None of a run that trains."""
    told = [each for each in found if each.kind == "strategy"]
    if not told:
        return None
    solved = [f"{sum(row['solved'] for row in each.rows)} of {len(each.rows)}" for each in told]
    first = told[0]
    tiles = [(each.name, count, "solved") for each, count in zip(told[1:], solved[1:], strict=True)]
    tiles.append(("Budget", str(max(each.budget for each in told)), "moves a search"))
    return Headline(f"Solved by {first.name}", "", solved[0], "", f"at most {first.budget} moves each", tiles)
