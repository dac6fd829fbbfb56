"""Deep Q-learning: the table becomes a network, trained on replayed steps towards a frozen copy of itself.

    y = r + γ (1 − terminated) max_a Q⁻(s', a)          L = huber(Q(s, a) − y)

A step on which time ran out (truncated) bootstraps like any other: only a terminal state is worth 0.

Huber's loss pulls with a gradient of at most its threshold. Where r + γ max Q⁻ scatters by more than
that, its minimum is not the mean of the targets and the fixed point is not Q*.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import nn

from posttrain.types import UserError

PerRow = Float[torch.Tensor, "B"]
PerAction = Float[torch.Tensor, "B A"]
Target = Callable[[PerRow, Bool[torch.Tensor, "B"], PerAction, PerAction, float], PerRow]


def td_target(
    reward: PerRow, terminated: Bool[torch.Tensor, "B"], online: PerAction, frozen: PerAction, gamma: float
) -> PerRow:
    """r + γ (1 − terminated) max_a Q⁻(s', a), Q⁻ = `frozen`; `online` is not read.

    Source: DQN, Mnih et al. 2015, algorithm 1; notes E, section 3.2.

    >>> online, frozen = torch.tensor([[1.0, 2.0]]), torch.tensor([[5.0, 3.0]])
    >>> td_target(torch.tensor([1.0]), torch.tensor([False]), online, frozen, 0.5)
    tensor([3.5000])
    """
    return reward + gamma * torch.where(terminated, 0.0, frozen.max(dim=1).values)


def double_td_target(
    reward: PerRow, terminated: Bool[torch.Tensor, "B"], online: PerAction, frozen: PerAction, gamma: float
) -> PerRow:
    """r + γ (1 − terminated) Q⁻(s', argmax_a Q(s', a)): never more than `td_target`.

    Source: double DQN, arXiv:1509.06461, eq. 4.

    >>> online, frozen = torch.tensor([[1.0, 2.0]]), torch.tensor([[5.0, 3.0]])
    >>> double_td_target(torch.tensor([1.0]), torch.tensor([False]), online, frozen, 0.5)
    tensor([2.5000])
    """
    values = frozen.gather(1, online.argmax(dim=1, keepdim=True)).squeeze(1)
    return reward + gamma * torch.where(terminated, 0.0, values)


@dataclass(frozen=True)
class Copy:
    """Q⁻ ← Q after every `every` updates."""

    every: int = 50

    def refresh(self, frozen: nn.Module, online: nn.Module, update: int) -> None:
        """Copy the weights if this update is due."""
        if update % self.every == 0:
            frozen.load_state_dict(online.state_dict())


@dataclass(frozen=True)
class Polyak:
    """Q⁻ ← (1 − rate) Q⁻ + rate Q after each update.

    Source: DDPG, arXiv:1509.02971, algorithm 1.
    """

    rate: float = 0.02

    def refresh(self, frozen: nn.Module, online: nn.Module, update: int) -> None:
        """Move every weight of the copy by `rate`."""
        with torch.no_grad():
            for old, new in zip(frozen.parameters(), online.parameters(), strict=True):
                old.lerp_(new, self.rate)


@dataclass(frozen=True, kw_only=True)
class DqnSettings:
    """Settings of a run of DQN."""

    steps: int = 1500
    """Steps of the environment; from `warmup` on each is followed by one update."""
    warmup: int = 100
    gamma: float = 0.9
    lr: float = 4e-3
    """Adam's learning rate; falls linearly to 0, so that the noise of the last batches averages out."""
    batch: int = 64
    memory: int = 10_000
    """Steps that are replayed, each equally likely; a new step replaces the oldest."""
    explore: float = 0.5
    """ε after a linear fall from 1 in the first quarter of the steps."""
    target: Target = td_target
    frozen: Copy | Polyak = Copy()
    huber: float = 10.0
    """Errors beyond this have a gradient of constant size."""
    hidden: tuple[int, ...] = (64,)

    def epsilon(self, step: int) -> float:
        """Return the probability of a random action at this step.

        >>> [DqnSettings(steps=400).epsilon(t) for t in (0, 50, 399)]
        [1.0, 0.75, 0.5]
        """
        return max(self.explore, 1 - (1 - self.explore) * 4 * step / self.steps)


class Replay:
    """The last `memory` steps, sampled uniformly with replacement."""

    def __init__(self, memory: int, width: int) -> None:
        self.size, self._at = 0, 0
        self.state = torch.zeros(memory, width)
        self.after = torch.zeros(memory, width)
        self.action = torch.zeros(memory, dtype=torch.long)
        self.reward = torch.zeros(memory)
        self.terminated = torch.zeros(memory, dtype=torch.bool)

    def add(self, state: Any, action: int, reward: float, after: Any, terminated: bool) -> None:
        """Store one step; replace the oldest if the memory is full."""
        i = self._at
        self.state[i], self.after[i] = torch.as_tensor(state), torch.as_tensor(after)
        self.action[i], self.reward[i], self.terminated[i] = action, reward, terminated
        self._at = (i + 1) % len(self.state)
        self.size = max(self.size, i + 1)

    def draw(self, count: int, generator: torch.Generator) -> Int[torch.Tensor, "B"]:
        """Draw the indices of `count` stored steps."""
        return torch.randint(self.size, (count,), generator=generator)


@dataclass(frozen=True, eq=False)
class Trained:
    """The network, the return of each finished episode, and the loss of each update."""

    network: nn.Module
    returns: list[float]
    losses: list[float]


def network(inputs: int, hidden: tuple[int, ...], actions: int, *, seed: int) -> nn.Module:
    """Build linear layers with ReLU between them, initialised by the seed alone."""
    widths = (inputs, *hidden)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [m for i, o in zip(widths, hidden, strict=False) for m in (nn.Linear(i, o), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(widths[-1], actions))


def train(env: gymnasium.Env[Any, Any], settings: DqnSettings, *, seed: int) -> Trained:
    """Train a Q-network. Raises UserError unless observations are vectors and actions discrete.

    Source: Mnih et al. 2015, algorithm 1, with Adam and one update a step.
    """
    if not isinstance(env.action_space, gymnasium.spaces.Discrete) or env.action_space.start != 0:
        raise UserError("", f"DQN needs actions 0 ... n−1, not {env.action_space}", "use another method")
    if not isinstance(env.observation_space, gymnasium.spaces.Box) or len(env.observation_space.shape) != 1:
        raise UserError("", f"DQN reads vectors, not {env.observation_space}", "flatten the observations")
    width, actions = env.observation_space.shape[0], int(env.action_space.n)
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    online = network(width, settings.hidden, actions, seed=seed)
    frozen = copy.deepcopy(online)
    optimiser = torch.optim.Adam(online.parameters(), lr=settings.lr)
    replay, returns, losses, total = Replay(settings.memory, width), [], [], 0.0
    state, _ = env.reset(seed=seed)
    for t in range(settings.steps):
        action = int(rng.integers(actions))
        if rng.random() >= settings.epsilon(t):
            with torch.no_grad():
                action = int(online(torch.as_tensor(state, dtype=torch.float32)).argmax())
        after, reward, terminated, truncated, _ = env.step(action)
        replay.add(state, action, float(reward), after, terminated)
        total += float(reward)
        state = after
        if terminated or truncated:
            returns.append(total)
            total, (state, _) = 0.0, env.reset()
        if replay.size >= settings.warmup:
            optimiser.param_groups[0]["lr"] = settings.lr * (1 - t / settings.steps)
            rows = replay.draw(settings.batch, generator)
            losses.append(update(online, frozen, optimiser, replay, rows, settings))
            settings.frozen.refresh(frozen, online, len(losses))
    return Trained(online, returns, losses)


def update(
    online: nn.Module,
    frozen: nn.Module,
    optimiser: torch.optim.Optimizer,
    replay: Replay,
    rows: Int[torch.Tensor, "B"],
    settings: DqnSettings,
) -> float:
    """Take one optimiser step on the loss of these replayed steps, and return that loss."""
    reward, after, terminated = replay.reward[rows], replay.after[rows], replay.terminated[rows]
    with torch.no_grad():
        target = settings.target(reward, terminated, online(after), frozen(after), settings.gamma)
    predicted = online(replay.state[rows]).gather(1, replay.action[rows, None]).squeeze(1)
    loss = nn.functional.huber_loss(predicted, target, delta=settings.huber)
    optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimiser.step()
    return float(loss.detach())
