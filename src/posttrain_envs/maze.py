"""A maze in text: the policy sees where it is and which ways are open, and names a direction."""

import hashlib
import math
import random
import re
from collections import deque
from dataclasses import dataclass, replace
from typing import ClassVar

from posttrain.data.protocol import Games
from posttrain.envs.protocol import Start, Turn
from posttrain.types import Task, UserError, Verdict

Cell = tuple[int, int]
"""Column and row, counted from the upper left."""

MOVES: dict[str, Cell] = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
TWO_BY_THREE = "S../.XG"
"""The maze of notes E (with Maze(reward=10)); the same as posttrain_study/classic/maze.py."""
_WORD = re.compile(r"\b(up|down|left|right)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class MazeState:
    """The position of the policy in a maze."""

    open: frozenset[tuple[Cell, Cell]]
    """Pairs of neighbours without a wall, in both directions."""
    goal: Cell
    traps: frozenset[Cell] = frozenset()
    at: Cell = (0, 0)
    steps: int = 0


def parse_layout(layout: str) -> MazeState:
    """Return the start of a grid without inner walls, given as rows of S (start), G (goal), X (trap), '.'.

    Raises ValueError for any other text, or if every way to the goal leads through a trap.

    >>> parse_layout("S../.XG").goal
    (2, 1)
    """
    rows = layout.split("/")
    cells = {(x, y): cell for y, row in enumerate(rows) for x, cell in enumerate(row)}
    symbols = list(cells.values())
    if set(symbols) - set("SGX.") or len(symbols) > 2500 or len({len(row) for row in rows}) > 1:
        raise ValueError(
            "a layout is rows of equal length of S, G, X and '.', at most 2500 cells, joined by '/'"
        )
    if symbols.count("S") != 1 or symbols.count("G") != 1:
        raise ValueError("a layout has one S and one G")
    passages = {
        ((x, y), (x + dx, y + dy)) for x, y in cells for dx, dy in MOVES.values() if (x + dx, y + dy) in cells
    }
    place = {cell: at for at, cell in cells.items()}
    traps = frozenset(at for at, cell in cells.items() if cell == "X")
    walk = MazeState(frozenset(passages), place["G"], traps, at=place["S"])
    if shortest(walk) is None:
        raise ValueError("no way to G avoids every X")
    return walk


def carve(size: int, seed: str) -> frozenset[tuple[Cell, Cell]]:
    """Return the passages of a maze of size x size cells in which exactly one path joins any two cells.

    >>> len(carve(4, "a")) // 2
    15
    """
    # Only random() is the same in every version of Python.
    draw = random.Random(seed).random
    path: list[Cell] = [(0, 0)]
    visited = {(0, 0)}
    passages: set[tuple[Cell, Cell]] = set()
    while path:
        x, y = path[-1]
        neighbours = [(x + dx, y + dy) for dx, dy in MOVES.values()]
        new = [c for c in neighbours if 0 <= c[0] < size and 0 <= c[1] < size and c not in visited]
        if not new:
            path.pop()
            continue
        cell = new[int(draw() * len(new))]
        passages |= {((x, y), cell), (cell, (x, y))}
        visited.add(cell)
        path.append(cell)
    return frozenset(passages)


def shortest(walk: MazeState) -> list[str] | None:
    """Return the fewest moves to the goal past every trap; None if every way leads through a trap."""
    ways: dict[Cell, list[str]] = {walk.at: []}
    queue: deque[Cell] = deque([walk.at])
    while queue and walk.goal not in ways:
        here = queue.popleft()
        for name, (dx, dy) in MOVES.items():
            there = (here[0] + dx, here[1] + dy)
            if (here, there) in walk.open and there not in ways and there not in walk.traps:
                ways[there] = [*ways[here], name]
                queue.append(there)
    return ways.get(walk.goal)


@dataclass(frozen=True, kw_only=True)
class Maze:
    """`reward` for reaching the goal in at most `max_turns` moves, −`reward` in a trap; otherwise 0.

    The move is the last of the words up, down, left and right in the response; one that leads into
    a wall, or none, costs a turn. The maze is fixed by the task: by its fields `maze` and `size` (from
    the upper left corner to the lower right one, without traps), or by `layout` (see parse_layout).

    Labels: right, wrong (a trap, or turns used up), no_answer (the last response named no direction).

    >>> env, task = Maze(), maze_tasks(1, size=3)[0]
    >>> turn = env.reply(env.start(task).state, "left")
    >>> turn.messages[0]["content"].splitlines()[0]
    'There is a wall to the left.'
    """

    max_turns: int = 20
    reward: float = 1.0
    """Reward for reaching the goal; a trap costs as much."""
    size: int = 0
    """Columns and rows of each maze; 0: 4."""
    layout: str = ""
    """A maze of your own in place of random ones, rows joined by "/": "S../.XG" is start, trap and goal."""
    trusted: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be 1 or more, not {self.max_turns}")
        if not (self.reward > 0 and math.isfinite(self.reward)):
            raise ValueError(f"reward must be positive, not {self.reward}")
        if self.layout:
            parse_layout(self.layout)
        if self.layout and self.size:
            raise ValueError("size has no effect: layout determines the size of the maze")

    def start(self, task: Task) -> Start:
        """Put the policy at the maze's start. Raises UserError if the task does not describe one."""
        walk = _maze_of_task(task)
        first = {**task.messages[-1], "content": f"{task.messages[-1]['content']}\n{_view(walk)}"}
        return Start(state=walk, messages=(*task.messages[:-1], first))

    def reply(self, state: MazeState, response: str) -> Turn:
        """Move the policy, and return its view or the end."""
        words = _WORD.findall(response[-1000:])
        move = words[-1].lower() if words else None
        dx, dy = MOVES[move] if move else (0, 0)
        there = (state.at[0] + dx, state.at[1] + dy)
        moved = (state.at, there) in state.open
        after = replace(state, at=there if moved else state.at, steps=state.steps + 1)
        if after.at == after.goal:
            return _over(after, self.reward, "right", f"out after {after.steps} moves")
        if after.at in after.traps:
            return _over(after, -self.reward, "wrong", f"in a trap after {after.steps} moves")
        if after.steps >= self.max_turns:
            return _over(after, 0.0, "wrong" if move else "no_answer", f"not out after {after.steps} moves")
        if move is None:
            text = f"Please answer with up, down, left or right.\n{_view(after)}"
        elif not moved:
            text = f"There is a wall {_towards(move)}.\n{_view(after)}"
        else:
            text = _view(after)
        return Turn(state=after, messages=({"role": "user", "content": text},))

    def make(self, limit: int, seed: int, games: Games) -> tuple[list[Task], list[Task]]:
        """Return the tasks to train on, and at most `limit` that are only evaluated on."""
        count = games.train + games.held_out
        if self.layout:
            tasks = layout_tasks(count, layout=self.layout)
        else:
            tasks = maze_tasks(count, size=self.size or 4, seed=seed)
        return tasks[: games.train], tasks[games.train :][:limit]


def maze_tasks(count: int, *, size: int = 4, seed: int = 0) -> list[Task]:
    """Return mazes determined by the seed and their position; the answer is the shortest way out."""
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
                answer=" ".join(shortest(_carved_maze(size, key)) or ()),
                fields={"maze": key, "size": size},
            )
        )
    return tasks


def layout_tasks(count: int, *, layout: str = TWO_BY_THREE) -> list[Task]:
    """Return the same maze `count` times; the answer is the shortest way past its traps.

    Raises ValueError for a wrong layout (see parse_layout).

    >>> [task] = layout_tasks(1)
    >>> task.answer
    'right right down'
    """
    walk, rows = parse_layout(layout), layout.split("/")
    here, goal = _cell_name(walk.at), _cell_name(walk.goal)
    traps = " and ".join(_cell_name(trap) for trap in sorted(walk.traps))
    text = (
        f"You are in a maze of {len(rows[0])} columns and {len(rows)} rows. Find the way from {here} to "
        f"{goal}{f' past the traps at {traps}' if traps else ''}. "
        "Each time, reply with just one of: up, down, left, right."
    )
    return [
        Task(
            id=f"maze-{layout}-{i}",
            messages=({"role": "user", "content": text},),
            answer=" ".join(shortest(walk) or ()),
            fields={"layout": layout},
        )
        for i in range(count)
    ]


def _maze_of_task(task: Task) -> MazeState:
    """Return the start of the maze that a task's fields describe."""
    layout, size, seed = (task.fields.get(name) for name in ("layout", "size", "maze"))
    if layout is not None:
        try:
            return parse_layout(str(layout))
        except ValueError as error:
            raise UserError(
                task.source,
                f"task {task.id!r} describes no maze: {error}",
                f"write 'layout' like {TWO_BY_THREE!r}",
            ) from error
    if not isinstance(size, int) or not 2 <= size <= 50 or seed is None:
        raise UserError(
            task.source,
            f"task {task.id!r} describes no maze",
            "it needs 'maze' and 'size' (2-50), or 'layout'",
        )
    return _carved_maze(size, str(seed))


def _carved_maze(size: int, seed: str) -> MazeState:
    return MazeState(carve(size, seed), goal=(size - 1, size - 1))


def _cell_name(cell: Cell) -> str:
    return f"column {cell[0] + 1}, row {cell[1] + 1}"


def _view(walk: MazeState) -> str:
    x, y = walk.at
    ways = [name for name, (dx, dy) in MOVES.items() if ((x, y), (x + dx, y + dy)) in walk.open]
    return f"You are at {_cell_name(walk.at)}. Open: {', '.join(ways)}."


def _towards(move: str) -> str:
    return {"up": "above", "down": "below"}.get(move, f"to the {move}")


def _over(walk: MazeState, score: float, label: str, reason: str) -> Turn:
    verdict = Verdict(score=score, label=label, reason=reason)
    return Turn(state=walk, reward=score, done=True, verdict=verdict)
