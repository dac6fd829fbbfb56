"""A policy without eyes: a table of logits that learns which fixed text a reward pays.

It puts together LENGTH fragments, each drawn by itself, and never reads a task: whatever it earns above a
sound reward's floor is overpaid. It learns by REINFORCE with the mean of the other draws as baseline.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from posttrain.math.advantages import leave_one_out

LENGTH = 4
DRAWS = 32
"""Texts that are judged in a round."""
RATE = 2.0
"""Step of the logits, in units of the round's deviation of rewards."""


@dataclass(frozen=True)
class LearntText:
    """A text with its mean reward over the tasks on which it was found."""

    text: str
    reward: float


def learn_text(
    fragments: Sequence[str], worth: Callable[[Sequence[str]], Sequence[float]], rounds: int, seed: int
) -> LearntText:
    """Return the text that earned most in the last round.

    worth: the mean reward of each of these texts; called once a round, with DRAWS texts. One fragment is the
    empty text, so texts may be shorter than LENGTH.
    """
    vocabulary = ["", *dict.fromkeys(fragments)]
    logits = torch.zeros(LENGTH, len(vocabulary), dtype=torch.float64)
    generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(63))
    best = LearntText("", 0.0)
    for _ in range(rounds):
        probabilities = logits.softmax(-1)
        tokens = torch.multinomial(probabilities, DRAWS, replacement=True, generator=generator).T
        texts = ["".join(vocabulary[token] for token in row) for row in tokens.tolist()]
        rewards = torch.tensor(list(worth(texts)), dtype=torch.float64)
        advantage = leave_one_out(rewards, torch.zeros(DRAWS, dtype=torch.long))
        scale = float(rewards.std()) or 1.0
        score = torch.nn.functional.one_hot(tokens, len(vocabulary)) - probabilities
        logits += RATE * torch.einsum("n,nlv->lv", advantage, score.double()) / (DRAWS * scale)
        place = int(rewards.argmax())
        best = LearntText(texts[place], float(rewards[place]))
    return best
