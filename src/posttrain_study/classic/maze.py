"""The 2×3 maze of notes E: +10 at the goal, −10 in the trap, 0 elsewhere.

The notes give size, moves and rewards, and leave the cells to a picture. Here they are

    S . .        the start is state (0, 0), where moving right is better than moving down;
    . X G        the shortest way is right, right, down, past the trap

States are the cells row by row, (row, column). A step into a wall leaves the state unchanged. The same maze
in words, for a language model, is `posttrain_envs/maze.py`; a test plays both.
"""

from typing import Any

import gymnasium
import numpy as np

from posttrain_study.classic.environment import MdpEnv
from posttrain_study.classic.mdp import Mdp

LAYOUT = ("S..", ".XG")
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
"""Row and column offsets of each action; action a is the a-th of these."""
NAME = "posttrain/Maze2x3-v0"
"""Name for gymnasium.make, once this module is imported."""
HORIZON = 20
"""Steps after which gymnasium.make's environment truncates an episode."""


def maze(layout: tuple[str, ...] = LAYOUT, *, reward: float = 10.0, gamma: float = 0.9) -> Mdp:
    """Build the problem of a grid with a start S, goals G (reward), traps X (−reward) and free cells.

    Goals and traps are terminal. Raises ValueError for any other cell, or unless there is exactly one start.

    >>> problem = maze()
    >>> problem.states, problem.actions, problem.reward.max(), problem.reward.min()
    (6, 4, np.float64(10.0), np.float64(-10.0))
    """
    cells = "".join(layout)
    columns = len(layout[0])
    if len(cells) != columns * len(layout) or set(cells) - set("S.GX") or cells.count("S") != 1:
        raise ValueError(f"rows of equal length with one S, and G, X and '.', not {layout}")
    S, gain = len(cells), {"G": reward, "X": -reward}
    P, R = np.zeros((S, len(MOVES), S)), np.zeros((S, len(MOVES)))
    for s, cell in enumerate(cells):
        for a, (down, right) in enumerate(MOVES.values()):
            row, column = s // columns + down, s % columns + right
            inside = 0 <= row < len(layout) and 0 <= column < columns
            after = row * columns + column if inside and cell not in gain else s
            P[s, a, after] = 1
            R[s, a] = gain.get(cells[after], 0.0) if cell not in gain else 0.0
    terminal = np.array([cell in gain for cell in cells])
    start = np.array([float(cell == "S") for cell in cells])
    return Mdp(transition=P, reward=R, gamma=gamma, terminal=terminal, start=start)


class MazeEnv(MdpEnv):
    """The maze in Gymnasium: gymnasium.make("posttrain_study.classic.maze:posttrain/Maze2x3-v0").

    >>> env = gymnasium.make(NAME, render_mode="ansi")
    >>> _ = env.reset(seed=0)
    >>> print(env.render())
    @..
    .XG
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012 - as Gymnasium has it

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(maze())
        self.render_mode = render_mode

    def render(self) -> str | None:
        """Return the cells with @ at the agent; None without a render mode."""
        if self.render_mode is None:
            return None
        cells = "".join(LAYOUT).replace("S", ".")
        picture = cells[: self.state] + "@" + cells[self.state + 1 :]
        columns = len(LAYOUT[0])
        return "\n".join(picture[i : i + columns] for i in range(0, len(picture), columns))


gymnasium.register(NAME, entry_point="posttrain_study.classic.maze:MazeEnv", max_episode_steps=HORIZON)
