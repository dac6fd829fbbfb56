"""HH-RLHF as three files of pairs without a common prompt: train, held_out, and gold for a second judge."""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from posttrain.data import read_records

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


def pairs(
    directory: Path, path: str, folder: str, longest: int, held_out: int, gold: float = 0.4, shown: int = 300
) -> None:
    """Writes the pairs of a file, or of a `folder` of a data set of the Hub, whose answers have no more than
    `longest` characters.

    Of a conversation the last turns are kept, as many as fit in `shown` characters; a pair of whose prompt
    not even the last question fits is left out, and so is one whose sides were asked different things.
    `gold` is the share of those that are not held out which the second reward model learns from.
    """
    by_prompt: dict[str, dict[str, str]] = {}
    for row in _rows(path, folder):
        asked, _, chosen = str(row["chosen"]).rpartition(ASSISTANT)
        also, _, rejected = str(row["rejected"]).rpartition(ASSISTANT)
        prompt = last_turns(asked, shown)
        if prompt and asked == also and max(len(chosen), len(rejected)) <= longest:
            start = prompt + ASSISTANT
            by_prompt.setdefault(prompt, {"chosen": start + chosen, "rejected": start + rejected})
    found = [by_prompt[prompt] for prompt in sorted(by_prompt)]
    random.Random(0).shuffle(found)
    if len(found) <= 2 * held_out:
        raise ValueError(
            f"{len(found)} pairs of at most {longest} characters are too few to hold {held_out} out"
        )
    cut = held_out + round(gold * (len(found) - held_out))
    for name, part in (("held_out", found[:held_out]), ("gold", found[held_out:cut]), ("train", found[cut:])):
        text = "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in part)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


def last_turns(conversation: str, shown: int) -> str:
    """The end of a conversation from a question of the human's on, of at most `shown` characters; or nothing.

    >>> last_turns("\\n\\nHuman: Hello\\n\\nAssistant: Hi\\n\\nHuman: Who?", 20)
    '\\n\\nHuman: Who?'
    """
    at = conversation.find(HUMAN, max(0, len(conversation) - shown))
    return "" if at < 0 else conversation[at:]


def _rows(path: str, folder: str) -> Iterable[Mapping[str, Any]]:
    if Path(path).expanduser().exists():
        return (record.fields for record in read_records(path))
    import datasets  # takes a second, and only the Hub needs it

    # Its parts are folders of one data set.
    return datasets.load_dataset(path, data_dir=folder, split="train")  # type: ignore[no-any-return]
