"""[task.palindromes]: words to begin a palindrome with."""

import random
from dataclasses import dataclass

from posttrain import Games, Task

LETTERS = "abcdefgh"


@dataclass(frozen=True, kw_only=True)
class Palindromes:
    """Beginnings of palindromes, of `length` letters."""

    length: int = 3
    """Letters that the palindrome begins with."""
    train: int = 200
    """Tasks to train on."""
    held_out: int = 50
    """Tasks that are only evaluated on."""

    def __post_init__(self) -> None:
        if not 2 <= self.length <= 8:
            raise ValueError(f"length must be 2 to 8, not {self.length}")
        if self.train + self.held_out > len(LETTERS) ** self.length:
            raise ValueError(f"there are {len(LETTERS) ** self.length} beginnings of {self.length} letters")

    def make(self, limit: int, seed: int, games: Games) -> tuple[list[Task], list[Task]]:
        """Return the tasks to train on, and at most `limit` that are only evaluated on."""
        draw, words = random.Random(seed), dict[str, None]()
        while len(words) < self.train + self.held_out:
            words["".join(draw.choices(LETTERS, k=self.length))] = None
        tasks = [
            Task(
                id=word,
                messages=({"role": "user", "content": f"Say a palindrome that begins with {word}."},),
                answer=word,
            )
            for word in words
        ]
        return tasks[: self.train], tasks[self.train :][:limit]
