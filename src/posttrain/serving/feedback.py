"""The chat page of served models, and the log of what its reader thinks of their answers."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path

from posttrain.errors import UserError
from posttrain.report.page import assembled, block
from posttrain.report.rollouts import json_text
from posttrain.serving.wire import Feedback

SCRIPTS = ("dom.js", "tokens.js", "chat.js")
STYLES = ("style.css", "chat.css")


class FeedbackLog:
    """Append feedback to two files that training reads as they are.

    labels: FILE.jsonl, with prompt, completion and label, for KTO and reward models on single answers;
    pairs: FILE.pairs.jsonl, with prompt, chosen and rejected, for DPO and reward models. Two files, since a
    loader of pairs refuses a line without one. Each line is flushed as it is written.

    Raises UserError if `file` cannot be written.
    """

    def __init__(self, file: Path) -> None:
        self.labels, self.pairs = file, file.with_name(f"{file.stem}.pairs{file.suffix}")
        self._lock = threading.Lock()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.open("a").close()
        except OSError as error:
            problem = f"cannot be written: {error.strerror}"
            raise UserError(f"--log {file}", problem, "name a file in a folder of yours") from None

    def append(self, feedback: Feedback) -> None:
        """Append a line, behind a line that a kill has cut off too."""
        path = self.pairs if feedback.label is None else self.labels
        line = json.dumps(feedback.record(), ensure_ascii=False) + "\n"
        with self._lock, path.open("a+b") as file:
            if file.tell():
                file.seek(-1, 2)
                line = line if file.read(1) == b"\n" else f"\n{line}"
            file.write(line.encode("utf-8", "replace"))


def chat_page(models: Sequence[str], *, logs: bool) -> str:
    """Return the HTML of the chat page; logs: it offers to rate answers."""
    summary = {"models": models, "logs": logs}
    title = f"Chat with {', '.join(models)}"
    return assembled("chat.html", SCRIPTS, STYLES, title, block("chat", json_text(summary)), asks=True)
