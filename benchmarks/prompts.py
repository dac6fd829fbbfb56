"""The workload that every benchmark shares, and the meter that each reads its memory with.

Both sides of a comparison run in environments of their own, so this file imports the standard
library alone: eight chat questions for sampling, additions for GRPO, and the reward of an answer.
"""

import ctypes
import random
import re
from pathlib import Path
from typing import Literal, NamedTuple

SMALLEST, LARGEST = 2, 49
HELD_OUT_PAIRS = 150
"""Unordered pairs {a, b} kept from training; most of them make two questions."""

SAMPLING_QUESTIONS = (
    "What is the capital of France?",
    "What is 17 + 25? Answer with just the number.",
    "Is the Earth flat? Answer with yes or no.",
    "Name three primary colours.",
    "Translate 'good morning' into Spanish.",
    "Explain in one sentence why the sky is blue.",
    "Write a short poem about the sea.",
    "Explain step by step how a bill becomes a law in the United States.",
)

NUMBER = re.compile(r"(?<!\d)-?\d+(?:\.\d+)?")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


class Addition(NamedTuple):
    """One question of the GRPO benchmark with its answer."""

    question: str
    answer: int


def sampling_prompts() -> list[list[dict[str, str]]]:
    """The eight conversations of the sampling benchmark, each a list of one user message.

    With SmolLM2-135M-Instruct at temperature 1 some are answered in a few tokens and some are cut
    at 128, so an engine that drops finished rows has something to gain and one that cannot has
    something to lose, as in real training.
    """
    return [chat(question) for question in SAMPLING_QUESTIONS]


def chat(question: str) -> list[dict[str, str]]:
    """The conversation in which this question is the only message.

    >>> chat("What is 2 + 3?")
    [{'role': 'user', 'content': 'What is 2 + 3?'}]
    """
    return [{"role": "user", "content": question}]


def addition_tasks(split: Literal["train", "held-out"], n: int, seed: int) -> list[Addition]:
    """n different additions of two operands 2-49, in the order of this seed.

    No question of one split is in the other, also not with its operands swapped; which pairs are
    held out does not depend on the seed. Raises ValueError where the split has fewer than n.

    >>> addition_tasks("train", 1, seed=0)
    [Addition(question='What is 43 + 11? Answer with just the number.', answer=54)]
    """
    pairs = [(a, b) for a in range(SMALLEST, LARGEST + 1) for b in range(a, LARGEST + 1)]
    random.Random("held-out").shuffle(pairs)
    chosen = pairs[:HELD_OUT_PAIRS] if split == "held-out" else pairs[HELD_OUT_PAIRS:]
    ordered = sorted({pair for a, b in chosen for pair in ((a, b), (b, a))})
    return [
        Addition(f"What is {a} + {b}? Answer with just the number.", a + b)
        for a, b in random.Random(seed).sample(ordered, n)
    ]


def reward(text: str, answer: int) -> float:
    """1.0 if the last number in the text equals the answer, else 0.0.

    >>> [reward(text, 12) for text in ("5 + 7 = 12.", "12, not 13", "no idea")]
    [1.0, 0.0, 0.0]
    """
    numbers = NUMBER.findall(THOUSANDS.sub("", text))
    return float(bool(numbers) and float(numbers[-1]) == answer)


def resident_mib() -> float:
    """Memory of this process that is resident now, in MiB."""
    return _status_mib("VmRSS")


def peak_resident_mib() -> float:
    """The most memory that was resident since the start or the last `restart_peak`, in MiB."""
    return _status_mib("VmHWM")


def restart_peak() -> None:
    """Gives freed memory back to the system and makes the peak start anew from what is left.

    Without the first, what an earlier phase freed would hide what the next one takes.
    """
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # 5: reset the high-water mark, and nothing else


def _status_mib(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    if match is None:
        raise OSError(f"the kernel tells no {field} in /proc/self/status")
    return int(match[1]) / 1024
