"""A finite decision problem as a Gymnasium environment, so that its learners can be checked exactly."""

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from posttrain_study.classic.mdp import Array, Mdp

Observation = NDArray[np.float32]


class MdpEnv(gymnasium.Env[Observation, np.int64]):
    """States as one-hot vectors [S], actions 0 ... A−1; terminated in a terminal state, never truncated.

    A problem without an end is cut by gymnasium.wrappers.TimeLimit. The learner applies the discount.

    >>> chain = Mdp(transition=[[[0.0, 1.0]], [[0.0, 1.0]]], reward=[[2.0], [0.0]], gamma=0.9,
    ...             terminal=[False, True], start=[1.0, 0.0])
    >>> env = MdpEnv(chain)
    >>> env.reset(seed=0)[0].tolist(), env.step(np.int64(0))[0].tolist()
    ([1.0, 0.0], [0.0, 1.0])
    """

    def __init__(self, mdp: Mdp) -> None:
        self.mdp = mdp
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (mdp.states,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(mdp.actions)
        self.state = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw a state from the problem's start."""
        super().reset(seed=seed)
        self.state = self._draw_state(self.mdp.start)
        return self._observe(), {"state": self.state}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Draw the next state; the reward is the expected reward of the action."""
        reward = float(self.mdp.reward[self.state, action])
        self.state = self._draw_state(self.mdp.transition[self.state, action])
        return self._observe(), reward, bool(self.mdp.terminal[self.state]), False, {"state": self.state}

    def _draw_state(self, likely: Array) -> int:
        return int(self.np_random.choice(self.mdp.states, p=likely))

    def _observe(self) -> Observation:
        return np.asarray(np.eye(self.mdp.states, dtype=np.float32)[self.state])
