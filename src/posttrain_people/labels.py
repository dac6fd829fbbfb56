"""The log of labels, and the training data made from it.

labels.log.jsonl has a line for each label and each undo, appended at once, and is never rewritten.
labels.jsonl is made from it: a record for each question with a majority, for DPO, reward models or process
reward models.
"""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from posttrain.base.atomic_files import put
from posttrain.data.messages import answer_messages
from posttrain.errors import UserError
from posttrain_people.questions import MODES, LabelQuestion, Mode

Entry = dict[str, Any]
"""A line of the log."""
TIE, BAD = "tie", "bad"
"""Labels of a pair or a ranking without a preferred answer: equal, or none is acceptable."""


def log_of(path: Path) -> Path:
    """Return the log that belongs to a file of labels; a log is its own.

    >>> str(log_of(Path("a/labels.jsonl"))), str(log_of(Path("labels.log.jsonl")))
    ('a/labels.log.jsonl', 'labels.log.jsonl')
    """
    return path if path.name.endswith(".log.jsonl") else path.with_name(f"{path.stem}.log.jsonl")


class LabelLog:
    """The labels that stand, by rater and question; other processes may append to the same file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.standing: dict[tuple[str, str], Entry] = {}
        """By rater and key of the question, the newest label last."""
        self.faulty = 0
        """Number of lines that are not an entry, as a killed write leaves."""
        self._offset = 0

    def read(self) -> None:
        """Read the lines that were appended since the last call."""
        try:
            with self.file.open("rb") as opened:
                opened.seek(self._offset)
                content = opened.read()
        except FileNotFoundError:
            return
        end = content.rfind(b"\n") + 1
        self._offset += end
        for line in content[:end].splitlines():
            try:
                self._apply(json.loads(line))
            except (ValueError, KeyError, TypeError):
                self.faulty += bool(line.strip())

    def _apply(self, entry: Entry) -> None:
        place = (str(entry["rater"]), str(entry["question"]))
        if not entry.get("undo"):
            check_label(entry["mode"], entry["label"], len(entry.get("steps") or entry["answers"]))
        self.standing.pop(place, None)
        if not entry.get("undo"):
            self.standing[place] = entry

    def append(self, entry: Entry) -> None:
        """Write a line in one call, on disk before it returns. Raises OSError if that fails."""
        line = json.dumps(entry, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        with self.file.open("ab+", buffering=0) as opened:
            if opened.tell():
                opened.seek(-1, os.SEEK_END)
                # What a killed write left gets a line of its own.
                line = line if opened.read(1) == b"\n" else b"\n" + line
            if opened.write(line) != len(line):
                raise OSError(28, "No space left on device")
            os.fsync(opened.fileno())
        self.read()

    def of_rater(self, rater: str) -> list[str]:
        """Return the keys of the questions that a rater has labelled, the newest last."""
        return [key for name, key in self.standing if name == rater]


def check_label(mode: Mode, label: Any, count: int) -> None:
    """Raise ValueError for what is not a label of `count` answers or steps."""
    if mode == "pairs":
        valid = label in (TIE, BAD) or (type(label) is int and 0 <= label < 2)
    elif mode == "rank":
        valid = label in (TIE, BAD) or (isinstance(label, list) and sorted(label) == [*range(1, count + 1)])
    else:
        # null is a step that was not judged.
        judged = [type(x) is int and x in (0, 1) for x in label if x is not None]
        valid = mode in MODES and len(label) == count and bool(judged) and all(judged)
    if not valid:
        raise ValueError(f"{label!r} is not a label with --mode {mode}")


def entry_of(question: LabelQuestion, mode: Mode, rater: str, order: Sequence[int], label: Any) -> Entry:
    """Return the line of a label; `order` has the indices of the answers as they stood on the page."""
    return {
        "rater": rater,
        "question": question.key,
        "mode": mode,
        "label": label,
        "order": [*order],
        "id": question.id,
        "prompt": [*question.messages],
        **({"steps": [*question.steps]} if mode == "steps" else {"answers": [*question.answers]}),
        "sources": [*question.sources],
        **({"tools": [*question.tools]} if question.tools else {}),
    }


def write_training(entries: Iterable[Entry], out: Path) -> int:
    """Write the records of the questions with a majority; return their number."""
    grouped: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        grouped[entry["question"]].append(entry)
    records = [record for votes in grouped.values() if (record := training_record(votes))]
    put(out, "".join(json.dumps(record) + "\n" for record in records))
    return len(records)


def training_record(votes: Sequence[Entry]) -> dict[str, Any] | None:
    """Return the record of one question for task.data, or None if no answer is preferred.

    A pair goes to the side with more votes, a ranking by mean ranks, a step by its mean label. Ties and bad
    answers do not vote.
    """
    first = votes[0]
    record = {"id": first["question"], "record": first["id"], "prompt": first["prompt"]}
    record |= {"tools": first["tools"]} if first.get("tools") else {}
    labels = [vote["label"] for vote in votes]
    if first["mode"] == "steps":
        columns = [[x for x in column if x is not None] for column in zip(*labels, strict=True)]
        means = [sum(column) / len(column) if column else None for column in columns]
        return record | {"steps": first["steps"], "labels": means}
    answers = _alike(first["answers"])
    if first["mode"] == "rank":
        ranks = [label for label in labels if isinstance(label, list)]
        means = [sum(column) / len(column) for column in zip(*ranks, strict=True)]
        return record | {"responses": answers, "ranks": means} if len(set(means)) > 1 else None
    counts = Counter(labels)
    if counts[0] == counts[1]:
        return None
    better = int(counts[1] > counts[0])
    counted = {"votes": [counts[better], counts[1 - better]]}
    return record | {"chosen": answers[better], "rejected": answers[1 - better]} | counted


def _alike(answers: Sequence[Any]) -> list[Any]:
    """Return the answers as texts, or all as messages if one has messages."""
    if all(isinstance(answer, str) for answer in answers):
        return [*answers]
    return [[*answer_messages(a if isinstance(a, str) else tuple(a))] for a in answers]


def open_log(out: Path, mode: Mode) -> LabelLog:
    """Return the log of a file of labels, new or to be continued.

    Raises UserError if the file is there without a log, or has labels of another mode.
    """
    log = LabelLog(log_of(out))
    if out.exists() and out.stat().st_size and not log.file.exists():
        raise UserError(
            str(out), f"is there already, without {log.file.name}", "name another file with --out"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    log.read()
    others = {entry["mode"] for entry in log.standing.values()} - {mode}
    if others:
        raise UserError(
            str(out), f"has labels of --mode {others.pop()}, not {mode}", "name another file with --out"
        )
    return log


def read_log(path: Path) -> list[Entry]:
    """Return the labels that stand in a file or its log. Raises UserError if there are none."""
    log = LabelLog(log_of(path))
    if not log.file.exists():
        raise UserError(str(path), f"there is no {log.file.name}", "name the --out of posttrain label")
    log.read()
    if not log.standing:
        raise UserError(str(log.file), "holds no labels", "label first: posttrain label FILE.jsonl")
    return [*log.standing.values()]
