"""What the benchmarks of SFT and DPO share: the data, the command line, and how a run is repeated.

Measured are the optimiser steps of supervised fine-tuning (tokens a second) and of DPO (pairs a second),
and the peak of resident memory meanwhile, on data of mixed lengths: --data is the harmless half of HH
(conversations of one to many turns, 10 to 800 tokens) or GSM8K (a question and its worked answer, 100 to
400). Both sides get the same conversations in the same order, tokens counted in the same way:

- a row is a conversation in the model's chat template, cut after LIMIT tokens, and ends with the last
  token that is trained on; trained are the assistant's words and the end of its turn: in SFT every turn
  of it, in DPO the last, of which the pair has two;
- the tokens of an SFT step are those of its rows, prompts included and padding not; a pair is a pair;
- the first step grows memory and warms caches: it is not timed, but its peak counts.

Both sides run in environments of their own, so this file imports the standard library alone.
"""

import argparse
import gzip
import hashlib
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prompts import chat, peak_resident_mib

LIMIT = 512
"""Tokens of a row."""
WARM_UP = 1
"""Steps that are not timed."""
LONGEST_PROMPT = 1600
"""Characters before the first trained answer; more could leave nothing to train within LIMIT."""

Messages = list[dict[str, str]]
TURN = re.compile(r"\n\n(Human|Assistant):")
ROLES = {"Human": "user", "Assistant": "assistant"}


class Pair(NamedTuple):
    """A conversation up to where the assistant speaks, and two things that it might say."""

    prompt: Messages
    chosen: str
    rejected: str


# ---------------------------------------------------------------------- the data


def conversations(data: Path, n: int, seed: int) -> list[Messages]:
    """n conversations that end with the assistant, drawn from a file of HH or GSM8K."""
    found = []
    for record in _records(data):
        if "chosen" in record:
            messages = _turns(record["chosen"])
        else:
            messages = [*chat(record["question"]), {"role": "assistant", "content": record["answer"]}]
        if len(messages) > 1 and len(messages[0]["content"]) <= LONGEST_PROMPT:
            found.append(messages)
    return _drawn(found, n, seed, data)


def pairs(data: Path, n: int, seed: int) -> list[Pair]:
    """n pairs drawn from a file of HH: those with one prompt and two different answers."""
    found = []
    for record in _records(data):
        chosen, rejected = _turns(record["chosen"]), _turns(record["rejected"])
        if not chosen or not rejected or chosen[:-1] != rejected[:-1] or chosen == rejected:
            continue
        if sum(len(m["content"]) for m in chosen[:-1]) <= LONGEST_PROMPT:
            found.append(Pair(chosen[:-1], chosen[-1]["content"], rejected[-1]["content"]))
    return _drawn(found, n, seed, data)


def _records(data: Path) -> Iterator[dict[str, Any]]:
    with (gzip.open if data.suffix == ".gz" else open)(data, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _drawn(found: list[Any], n: int, seed: int, data: Path) -> list[Any]:
    if len(found) < n:
        sys.exit(f"{data}: {len(found)} usable records, and {n} are asked for")
    return random.Random(seed).sample(found, n)


def _turns(text: str) -> Messages:
    r"""The messages of one of HH's texts; none if an empty turn, or one out of turn, is among them.

    >>> _turns("\n\nHuman: Hello\n\nAssistant: Hi!")
    [{'role': 'user', 'content': 'Hello'}, {'role': 'assistant', 'content': 'Hi!'}]
    """
    _, *parts = TURN.split(text)
    messages = [
        {"role": ROLES[who], "content": said.strip()}
        for who, said in zip(parts[::2], parts[1::2], strict=True)
    ]
    alternate = all(m["role"] == ("user", "assistant")[i % 2] for i, m in enumerate(messages))
    return messages if alternate and len(messages) % 2 == 0 and all(m["content"] for m in messages) else []


# ---------------------------------------------------------------------- as tokens


def pieces(tokenizer: Any, messages: Messages) -> Iterator[tuple[str, bool]]:
    """The conversation as text, cut where the assistant begins and ends, and whether each piece is trained.

    The template must end an assistant's turn with the tokenizer's eos, as SmolLM2's does.
    """
    text = ""
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
            yield before[len(text) :], False
            said = message["content"] + tokenizer.eos_token
            yield said, True
            text = before + said


def row(tokenizer: Any, messages: Messages) -> tuple[list[int], list[bool]]:
    """The tokens of a conversation and whether each is trained, cut as both sides must."""
    return _row(tokenizer, pieces(tokenizer, messages))


def pair_rows(tokenizer: Any, pair: Pair) -> list[tuple[list[int], list[bool]]]:
    """The same of a pair's two sides, of which the last answer alone is trained."""
    found = []
    for answer in (pair.chosen, pair.rejected):
        *before, last = pieces(tokenizer, [*pair.prompt, {"role": "assistant", "content": answer}])
        found.append(_row(tokenizer, [*((text, False) for text, _ in before), last]))
    return found


def _row(tokenizer: Any, parts: Iterable[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
    tokens: list[int] = []
    trained: list[bool] = []
    for text, is_trained in parts:
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens += found
        trained += [is_trained] * len(found)
    return cut(tokens, trained)


def cut(tokens: Sequence[int], trained: Sequence[bool]) -> tuple[list[int], list[bool]]:
    """A row within LIMIT tokens and without what follows its last trained one.

    >>> cut([7, 8, 9], [False, True, False])
    ([7, 8], [False, True])
    """
    n = max((t for t, is_trained in enumerate(trained[:LIMIT]) if is_trained), default=-1) + 1
    return list(tokens[:n]), list(trained[:n])


def digest(rows: Iterable[tuple[list[int], list[bool]]]) -> str:
    """Equal for both sides if they train on the same tokens in the same order."""
    found = hashlib.blake2b(digest_size=8)
    for tokens, trained in rows:
        found.update(json.dumps([tokens, [int(t) for t in trained]]).encode())
    return found.hexdigest()


# ---------------------------------------------------------------------- the runs


def command_line(about: str | None) -> argparse.ArgumentParser:
    """What every script of the comparison reads."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory that from_pretrained reads")
    parser.add_argument("--data", type=Path, required=True, help="HH or GSM8K, JSON lines, also gzipped")
    parser.add_argument("--steps", type=int, default=5, help="timed optimiser steps, after one that is not")
    parser.add_argument("--rows", type=int, default=16, help="of an optimiser step; a pair has two")
    parser.add_argument(
        "--microbatch", type=int, default=4, help=f"rows of up to {LIMIT} tokens in one forward and backward"
    )
    parser.add_argument("--seed", type=int, default=0, help="of which records are drawn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of products")
    parser.add_argument("--repeat", type=int, default=3, help="runs, each in a process of its own")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--one", action="store_true", help="measure in this very process, once")
    return parser


def repeated(options: argparse.Namespace) -> None:
    """Runs this script --repeat times in processes of their own; writes every run, the means and ranges."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder, "run.json")
        for _ in range(options.repeat):
            subprocess.run([sys.executable, *sys.argv, "--one", "--out", str(part)], check=True)
            runs.append(json.loads(part.read_text()))
    settings = runs[0].pop("settings")
    for run in runs[1:]:
        if run.pop("settings") != settings:
            sys.exit("the repeats did not measure the same")
    numbers = [key for key, value in runs[0].items() if isinstance(value, float)]
    summary = {
        key: {"mean": statistics.fmean(v), "low": min(v), "high": max(v)}
        for key in numbers
        for v in ([run[key] for run in runs],)
    }
    options.out.write_text(json.dumps({"settings": settings, **summary, "repeats": runs}, indent=1) + "\n")
    for key, value in summary.items():
        print(f"{key:24} {value['mean']:.4g} ({value['low']:.4g}–{value['high']:.4g})")


def memory(start: float, loaded: float) -> dict[str, float]:
    """The peak of resident memory since restart_peak, and over what was there before, in MiB.

    `start` is what the process held before it read weights, `loaded` what it held when all was ready to
    train. What one side takes while loading, as copies of the weights, another takes in its first step:
    compare over the start.
    """
    peak = peak_resident_mib()
    return {
        "peak_mib": peak,
        "peak_mib_over_start": peak - start,
        "peak_mib_over_loaded": peak - loaded,
    }
