"""Writes games of somebody who half listens, for a model that is to learn their form from nothing.

    text.txt         the same as text        (to learn a tokenizer from)
    sft.jsonl        games                   (to fine-tune on)
    train.jsonl      numbers to be guessed   (for an agent)
    held_out.jsonl   each number eight times

The prompt is the same in all games, so that nothing of a number can be known before the first hint.
"""

import json
import random
from pathlib import Path

PROMPT = "I think of a number from 1 to 15."


def games(
    directory: Path, *, count: int = 4000, listening: float = 0.5, guesses: int = 4, seed: int = 0
) -> None:
    """Writes the files; `listening` is the share of guesses that heed all hints, the others heed none."""
    dice = random.Random(seed)
    told = [game(dice.randint(1, 15), listening, guesses, dice) for _ in range(count)]
    _write(directory / "sft.jsonl", [{"messages": messages} for messages in told])
    texts = ("\n".join(f"{m['role']}\n{m['content']}" for m in messages) for messages in told)
    (directory / "text.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    numbers = range(1, 16)
    _write(directory / "held_out.jsonl", [{"prompt": PROMPT, "answer": str(n)} for n in numbers] * 8)
    drawn = [dice.choice(numbers) for _ in range(2000)]
    _write(directory / "train.jsonl", [{"prompt": PROMPT, "answer": str(n)} for n in drawn])


def game(secret: int, listening: float, guesses: int, dice: random.Random) -> list[dict[str, str]]:
    """A game as messages; its last one is a guess."""
    messages = [{"role": "user", "content": PROMPT}]
    low, high = 1, 15
    for _ in range(guesses):
        guess = dice.randint(low, high) if dice.random() < listening else dice.randint(1, 15)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == secret:
            break
        messages.append({"role": "user", "content": "higher" if guess < secret else "lower"})
        low = max(low, guess + 1) if guess < secret else low
        high = min(high, guess - 1) if guess > secret else high
    return messages if messages[-1]["role"] == "assistant" else messages[:-1]


def _write(path: Path, records: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
