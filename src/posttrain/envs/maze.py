"""A maze in text: the policy is told where it is and which ways are open, and names a direction."""

import hashlib
import random
import re
from collections import deque
from dataclasses import dataclass, replace
from typing import ClassVar

from posttrain.envs.protocol import Start, Turn
from posttrain.types import Task, UserError, Verdict

Cell = tuple[int, int]
"""Column and row, counted from the upper left."""

MOVES: dict[str, Cell] = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
_WORD = re.compile(r"\b(up|down|left|right)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Walk:
    """Where the policy is, in which maze."""

    open: frozenset[tuple[Cell, Cell]]
    """Pairs of neighbours without a wall, in both directions."""
    size: int
    at: Cell = (0, 0)
    steps: int = 0


def carve(size: int, seed: str) -> frozenset[tuple[Cell, Cell]]:
    """The passages of a maze of size x size cells in which exactly one path joins any two.

    >>> len(carve(4, "a")) // 2
    15
    """
    # Only random() is the same in every version of Python.
    draw = random.Random(seed).random
    path: list[Cell] = [(0, 0)]
    seen = {(0, 0)}
    passages: set[tuple[Cell, Cell]] = set()
    while path:
        x, y = path[-1]
        beside = [(x + dx, y + dy) for dx, dy in MOVES.values()]
        new = [c for c in beside if 0 <= c[0] < size and 0 <= c[1] < size and c not in seen]
        if not new:
            path.pop()
            continue
        cell = new[int(draw() * len(new))]
        passages |= {((x, y), cell), (cell, (x, y))}
        seen.add(cell)
        path.append(cell)
    return frozenset(passages)


def shortest(passages: frozenset[tuple[Cell, Cell]], size: int) -> list[str]:
    """The moves from the upper left to the lower right."""
    ways: dict[Cell, list[str]] = {(0, 0): []}
    queue: deque[Cell] = deque([(0, 0)])
    while (size - 1, size - 1) not in ways:
        here = queue.popleft()
        for name, (dx, dy) in MOVES.items():
            there = (here[0] + dx, here[1] + dy)
            if (here, there) in passages and there not in ways:
                ways[there] = [*ways[here], name]
                queue.append(there)
    return ways[(size - 1, size - 1)]


@dataclass(frozen=True, kw_only=True)
class Maze:
    """Reward 1 for reaching the lower right corner in at most `max_turns` moves; otherwise 0.

    The move is the last of the words up, down, left and right in the response; one that leads into
    a wall, or none, costs a turn. The maze is fixed by the task's fields `maze` and `size`.

    Labels: right, wrong (turns used up), no_answer (the last response named no direction).

    >>> env, task = Maze(), maze_tasks(1, size=3)[0]
    >>> turn = env.reply(env.start(task).state, "left")
    >>> turn.messages[0]["content"].splitlines()[0]
    'There is a wall to the left.'
    """

    max_turns: int = 20
    trusted: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be 1 or more, not {self.max_turns}")

    def start(self, task: Task) -> Start:
        """The policy in the upper left corner; UserError if the task describes no maze."""
        size, seed = task.fields.get("size"), task.fields.get("maze")
        if not isinstance(size, int) or not 2 <= size <= 50 or seed is None:
            raise UserError(
                f"task {task.id!r} describes no maze",
                where=task.source,
                mend="it needs 'maze' and 'size' (2-50)",
            )
        walk = Walk(carve(size, str(seed)), size)
        first = {**task.messages[-1], "content": f"{task.messages[-1]['content']}\n{_view(walk)}"}
        return Start(state=walk, messages=(*task.messages[:-1], first))

    def reply(self, state: Walk, response: str) -> Turn:
        """What the policy sees after its move, or the end."""
        words = _WORD.findall(response[-1000:])
        move = words[-1].lower() if words else None
        dx, dy = MOVES[move] if move else (0, 0)
        there = (state.at[0] + dx, state.at[1] + dy)
        moved = (state.at, there) in state.open
        after = replace(state, at=there if moved else state.at, steps=state.steps + 1)
        if after.at == (state.size - 1, state.size - 1):
            return _over(after, 1.0, "right", f"out after {after.steps} moves")
        if after.steps >= self.max_turns:
            return _over(after, 0.0, "wrong" if move else "no_answer", f"not out after {after.steps} moves")
        if move is None:
            seen = f"Please answer with up, down, left or right.\n{_view(after)}"
        elif not moved:
            seen = f"There is a wall {_towards(move)}.\n{_view(after)}"
        else:
            seen = _view(after)
        return Turn(state=after, messages=({"role": "user", "content": seen},))


def maze_tasks(count: int, *, size: int = 4, seed: int = 0) -> list[Task]:
    """Mazes fixed by the seed and their position; the answer is the shortest way out."""
    tasks = []
    for i in range(count):
        key = hashlib.blake2b(f"{seed}/{size}/{i}".encode(), digest_size=8).hexdigest()
        text = (
            f"You are in a maze of {size} columns and {size} rows. Find the way from column 1, row 1 to "
            f"column {size}, row {size}. Each time, reply with just one of: up, down, left, right."
        )
        tasks.append(
            Task(
                id=f"maze-{size}-{seed}-{i}",
                messages=({"role": "user", "content": text},),
                answer=" ".join(shortest(carve(size, key), size)),
                fields={"maze": key, "size": size},
            )
        )
    return tasks


def _view(walk: Walk) -> str:
    x, y = walk.at
    ways = [name for name, (dx, dy) in MOVES.items() if ((x, y), (x + dx, y + dy)) in walk.open]
    return f"You are at column {x + 1}, row {y + 1}. Open: {', '.join(ways)}."


def _towards(move: str) -> str:
    return {"up": "above", "down": "below"}.get(move, f"to the {move}")


def _over(walk: Walk, score: float, label: str, reason: str) -> Turn:
    verdict = Verdict(score=score, label=label, reason=reason)
    return Turn(state=walk, reward=score, done=True, verdict=verdict)
