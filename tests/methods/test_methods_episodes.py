"""Episodes of several conversations: what is of an episode and what of a row, by enumeration.

An agent asks for one of three answers. After answer 0 it stops, or asks in a second conversation for one of
three answers whose chances depend on the first: nine episodes, or seven of which one is a single row.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from posttrain.math import advantages, masked, ratios, reduce, returns, selection
from posttrain.methods.build import build
from posttrain.methods.policy_gradient import PolicyGradient
from posttrain.methods.preference import Preference
from posttrain.methods.table import DPO, DR_GRPO, EXPERT, GRPO, KLQ, LEARNED, METHODS, REINFORCE, RLOO, TO_GO
from posttrain.types import Batch, Method, Outputs, Task, Trajectory, Verdict
from posttrain.types import Episode as EpisodeOfSampler

Episode = tuple[int, ...]
BETA = 0.3


@dataclass(frozen=True)
class Agent:
    """Logits of the first answer, and of the second one given the first; what each episode is worth."""

    first: torch.Tensor
    second: torch.Tensor
    stops: bool
    """Whether an episode that begins with answer 0 is one conversation."""
    worth: Mapping[Episode, float]

    @staticmethod
    def drawn(seed: int, stops: bool = False) -> "Agent":
        g = torch.Generator().manual_seed(seed)
        first, second = (torch.randn(n, 3, generator=g, dtype=torch.float64) for n in (1, 3))
        found = Agent(first.requires_grad_(), second.requires_grad_(), stops, {})
        worth = torch.randn(9, generator=g, dtype=torch.float64).tolist()
        return replace(found, worth=dict(zip(found.episodes, worth, strict=False)))

    @property
    def episodes(self) -> list[Episode]:
        alone: list[Episode] = [(0,)] if self.stops else []
        return alone + [e for e in itertools.product(range(3), repeat=2) if e[0] or not self.stops]

    def logp(self, episode: Episode) -> list[torch.Tensor]:
        """log π of each conversation's answer."""
        one, two = self.first.log_softmax(-1), self.second.log_softmax(-1)
        return [one[0, episode[0]], *(two[episode[0], y] for y in episode[1:])]

    def chance(self, episode: Episode) -> torch.Tensor:
        return torch.stack(self.logp(episode)).sum().exp()

    def gradient(self, value: torch.Tensor) -> torch.Tensor:
        leaves = self.first, self.second
        found = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
        return torch.cat([g.flatten() for g in found])


def objective(agent: Agent, reference: Agent, beta: float) -> torch.Tensor:
    """E[R] - β KL(π ‖ π_ref) of whole episodes."""
    total = torch.zeros((), dtype=torch.float64)
    for e in agent.episodes:
        p, q = agent.chance(e), reference.chance(e).detach()
        total = total + p * agent.worth[e] - beta * p * (p / q).log()
    return total


def batch_of(agent: Agent, reference: Agent, *groups: Sequence[Episode]) -> Batch:
    """These groups of episodes, a row for each conversation."""
    rows, group, number = [], [], []
    for place, (n, e) in enumerate((n, e) for n, episodes in enumerate(groups) for e in episodes):
        for answer in e:
            rows.append(Trajectory.given([9, answer], reward=[0.0, agent.worth[e]]))
            group.append(n)
            number.append(place)
    drawn = column(agent, *groups).detach()
    return replace(
        Batch.of(rows, group, number),
        logp_gen=drawn,
        logp_policy=drawn,
        logp_old=drawn,
        logp_ref=column(reference, *groups).detach(),
        value=torch.zeros_like(drawn),
    )


def column(agent: Agent, *groups: Sequence[Episode]) -> torch.Tensor:
    """log π at each row's answer."""
    known = {e: agent.logp(e) for e in agent.episodes}
    each = torch.stack([logp for episodes in groups for e in episodes for logp in known[e]])
    return torch.stack([torch.zeros_like(each), each], 1)


def expected_step(method: Method, agent: Agent, reference: Agent, size: int = 2) -> torch.Tensor:
    """E[-∇loss] over groups of episodes that are drawn apart, each group a step by itself."""
    groups = list(itertools.combinations_with_replacement(agent.episodes, size))
    batch = batch_of(agent, reference, *groups)
    batch = method.prepare(replace(batch, state=method.start))
    logp, chances = column(agent, *groups), {e: float(agent.chance(e).detach()) for e in agent.episodes}
    weights = []
    for n, group in enumerate(groups):
        orders = len(set(itertools.permutations(group)))
        chance = orders * math.prod(chances[e] for e in group)
        weights.append(chance * method.weight(batch.rows((batch.group == n).nonzero().flatten())))
    out = Outputs(logp=logp, entropy=torch.zeros_like(logp), value=batch.value)
    loss = masked.fill(method.loss(out, batch), batch.mask)
    return -agent.gradient((loss * torch.cat(weights)).sum())


CENTRED = replace(RLOO, credit=advantages.centred)
HORIZON = 6


@pytest.mark.parametrize("stops", [False, True], ids=["two", "one_or_two"])
@pytest.mark.parametrize(
    ("method", "scale"),
    [
        (REINFORCE, 1.0),
        (RLOO, 1.0),
        (TO_GO, 1.0),
        (replace(LEARNED, estimator=partial(returns.gae, lam=1.0)), 1.0),
        (replace(LEARNED, estimator=partial(returns.n_step, n=4)), 1.0),
        (replace(LEARNED, estimator=returns.td), 1.0),
        (CENTRED, 0.5),
        (replace(DR_GRPO, reduction=partial(reduce.per_horizon, horizon=HORIZON)), 0.5 / HORIZON),
    ],
    ids=["reinforce", "rloo", "to_go", "gae", "n_step", "td", "centred", "dr_grpo"],
)
def test_kl_in_reward_is_of_the_whole_episode(method: PolicyGradient, scale: float, stops: bool) -> None:
    """E[step] = ∇(E[R] - β KL) of episodes, also where what is said decides how many rows there are."""
    agent, reference = Agent.drawn(1, stops), Agent.drawn(2, stops)
    wanted = scale * agent.gradient(objective(agent, reference, BETA))
    found = expected_step(replace(method, kl_in_reward=BETA), agent, reference)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_a_discount_of_0_sees_no_other_conversation() -> None:
    """In on-policy distillation the teacher judges each token by itself."""
    agent, reference = Agent.drawn(1), Agent.drawn(2)
    batch = batch_of(agent, reference, [(0, 1), (2, 2)])
    prepared = METHODS["distill"].method.prepare(batch)
    assert batch.logp_old is not None
    assert batch.logp_ref is not None
    torch.testing.assert_close(prepared.advantage, masked.fill(batch.logp_ref - batch.logp_old, batch.mask))


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_what_lies_beyond_takes_the_place_of_a_value(gamma: float) -> None:
    """Of a row that goes on, all that is still to come may be summed into what lies beyond its cut."""
    longer = torch.tensor([[True, False, True, True]])
    cut = torch.tensor([[True, False, True, False]])
    paid = torch.tensor([[0.3, 9.0, -1.0, 2.0]], dtype=torch.float64)
    value = torch.tensor([[0.1, 0.0, 0.7, 2.0]], dtype=torch.float64)  # of the last state, what it pays
    full = returns.Path(paid, longer, value, torch.zeros_like(paid))
    short = full._replace(mask=cut, beyond=paid[:, 3])
    torch.testing.assert_close(returns.to_go(short, gamma)[cut], returns.to_go(full, gamma)[cut])
    torch.testing.assert_close(returns.total(short)[cut], returns.total(full)[cut])
    n_step = partial(returns.n_step, n=2)
    for estimator in (returns.monte_carlo, returns.gae, returns.td, n_step, returns.vtrace):
        for got, wanted in zip(estimator(short, gamma=gamma), estimator(full, gamma=gamma), strict=True):
            torch.testing.assert_close(got[cut], wanted[cut])


@pytest.mark.parametrize("stops", [False, True], ids=["two", "one_or_two"])
def test_soft_q_rests_at_the_optimum_of_episodes(stops: bool) -> None:
    """At π* ∝ π_ref exp(R/β) every episode gives the first state the value β log Z."""
    reference = Agent.drawn(2, stops)
    best, method = optimum(reference, BETA), replace(KLQ, beta=BETA, lam=1.0)
    targets = []
    for e in reference.episodes:
        target = method.prepare(batch_of(best, reference, [e])).target
        assert target is not None
        targets.append(float(target[0, 1]))
    Z = sum(
        float(reference.chance(e).detach()) * math.exp(reference.worth[e] / BETA) for e in reference.episodes
    )
    assert targets == pytest.approx([BETA * math.log(Z)] * len(targets), abs=1e-12)


def optimum(reference: Agent, beta: float) -> Agent:
    """The agent whose episodes have π_ref exp(R/β)/Z."""
    mass = {
        e: float(reference.chance(e).detach()) * math.exp(reference.worth[e] / beta)
        for e in reference.episodes
    }
    first, second = torch.zeros(1, 3).double(), torch.zeros(3, 3).double()
    for e, m in mass.items():
        first[0, e[0]] += m
        if len(e) > 1:
            second[e] = math.log(m)
    return Agent(first.log(), second, reference.stops, reference.worth)


# ---------------------------------------------------------------------- what else is of an episode

TWO = [[2, 3], [4], [5], [6, 7, 8]]
"""The trained tokens of four conversations: the first two are of one episode, and so are the others."""


def rows_of(answers: Sequence[Sequence[int]], worth: Sequence[float], episode: Sequence[int]) -> Batch:
    """One group; each conversation is paid what its episode is worth."""
    rows = [
        Trajectory.given([9, *a], reward=[0.0] * len(a) + [worth[e]])
        for a, e in zip(answers, episode, strict=True)
    ]
    return Batch.of(rows, [0] * len(rows), list(episode))


def test_overlong_answers_are_whole_episodes() -> None:
    """3 and 4 of at most 4 tokens: half a point of the buffer of 2, and all of it, in every conversation."""
    method = build("reinforce", {"overlong_buffer": 2.0}, horizon=4)
    prepared = method.prepare(rows_of(TWO, [1.0, 1.0], [0, 0, 1, 1]))
    assert prepared.advantage is not None
    assert prepared.advantage.amax(-1).tolist() == [0.5, 0.5, 0.0, 0.0]


def test_running_numbers_are_means_over_episodes() -> None:
    """An episode counts once in β's KL, the mean return and its variance, however many rows it has."""
    options = {"kl_in_reward": 0.5, "kl_target": 1.0, "running_baseline": 0.5, "running_scale": 0.5}
    method = build("reinforce", options, horizon=4)
    episodes = [[2], [3], [4], [5]]
    batch = rows_of(episodes, [1.0, 5.0], [0, 0, 0, 1])
    gap = torch.tensor([0.5, 0.25, 0.25, 2.0])[:, None] * batch.mask
    batch = replace(batch, logp_old=gap, logp_ref=torch.zeros_like(gap), state=method.start)
    state = method.update_state(batch, {})
    whole = replace(rows_of([[2], [5]], [1.0, 5.0], [0, 1]), episode=None, state=method.start)
    gap = torch.tensor([1.0, 2.0])[:, None] * whole.mask
    wanted = method.update_state(replace(whole, logp_old=gap, logp_ref=torch.zeros_like(gap)), {})
    assert state == pytest.approx(wanted)
    assert state["mean"] == pytest.approx(0.5 * (1.0 - 0.5 * 1.0 + 5.0 - 0.5 * 2.0) / 2)


@pytest.mark.parametrize(
    ("reduction", "wanted"),
    [
        (reduce.per_row, [1 / 2] * 4),
        (partial(reduce.per_horizon, horizon=5), [1 / 10] * 4),
        (reduce.per_sequence, [1 / 8, 1 / 4, 1 / 4, 1 / 12]),
        (reduce.per_token, [1 / 7] * 4),
        (reduce.per_group_token, [1 / 7] * 4),
    ],
    ids=["per_row", "per_horizon", "per_sequence", "per_token", "per_group_token"],
)
def test_answers_are_episodes_and_sequences_rows(
    reduction: Callable[..., torch.Tensor], wanted: list[float]
) -> None:
    batch = rows_of(TWO, [1.0, 0.0], [0, 0, 1, 1])
    weight = replace(GRPO, reduction=reduction, entropy_bonus=0.1).prepare(batch)
    found = replace(GRPO, reduction=reduction, entropy_bonus=0.1).weight(weight)
    torch.testing.assert_close(found, torch.tensor(wanted).double()[:, None] * batch.mask)


def laid_out(seed: int) -> tuple[Batch, Outputs, Batch, Outputs, torch.Tensor]:
    """Episodes of two conversations each; the same, each conversation one row; and where tokens went."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 4, (6, 2), generator=g).tolist()
    worth = torch.randint(3, (6,), generator=g).double().tolist()
    one, two = [], []
    for n, (a, b) in enumerate(lengths):
        tokens = torch.randint(9, (a + b,), generator=g).tolist()
        one.append(Trajectory.given([9, *tokens], reward=[0.0] * (a + b) + [worth[n]]))
        two.append(Trajectory.given([9, *tokens[:a]], reward=[0.0] * a + [worth[n]]))
        two.append(Trajectory.given([9, *tokens[a:]], reward=[0.0] * b + [worth[n]]))
    whole = Batch.of(one, [0, 0, 0, 1, 1, 1])
    apart = Batch.of(two, [0] * 6 + [1] * 6, [n for n in range(6) for _ in range(2)])
    columns: dict[str, torch.Tensor] = {}
    for name in ("logp", "logp_ref", "value"):
        columns[name] = -torch.rand(whole.mask.shape, generator=g, dtype=torch.float64)
    parts = {name: torch.zeros(apart.mask.shape, dtype=torch.float64) for name in columns}
    for name, part in parts.items():
        part[apart.mask] = columns[name][whole.mask]  # both in the order of episodes
    batches = []
    for batch, each in ((whole, columns), (apart, parts)):
        logp = each["logp"]
        drawn = {"logp_gen": logp, "logp_policy": logp, "greedy": torch.full_like(logp, 0.25)}
        batch = replace(batch, **drawn, logp_ref=each["logp_ref"], value=each["value"])
        batches += [batch, Outputs(logp=logp, entropy=torch.zeros_like(logp), value=each["value"])]
    return (*batches, whole.mask)  # type: ignore[return-value]


def lines() -> list[str]:
    """Methods that credit, compare or choose whole answers, but for a ratio and the turns of a row."""
    found = {n: each.method for n, each in METHODS.items()}
    whole = [
        n
        for n, m in found.items()
        if type(m) is PolicyGradient and m.returns is returns.total and m.ratio is not ratios.by_trajectory
        if not m.turn_weight
    ]
    return [*whole, "expert_iteration", *(n for n, m in found.items() if isinstance(m, Preference))]


@pytest.mark.parametrize("name", lines())
def test_an_episode_in_rows_is_learnt_as_in_one(name: str, gradients: Callable[..., Any]) -> None:
    """How conversations are laid out changes no gradient of a first step, but by the length of a row."""
    sequence = getattr(METHODS[name].method, "reduction", None) is reduce.per_sequence
    method = build(name, {"reduction": "per_token"} if sequence else {}, horizon=6)
    for seed in range(3):
        whole, said, apart, said_apart, mask = laid_out(seed)
        if "logp_old" in method.needs:
            whole, apart = (replace(batch, logp_old=batch.logp_gen) for batch in (whole, apart))
        wanted = gradients(method, whole, said)
        found = gradients(method, apart, said_apart)
        torch.testing.assert_close(found.total, wanted.total)
        torch.testing.assert_close(found.logp[apart.mask], wanted.logp[mask])


# ---------------------------------------------------------------------- pairs


def pulls(agent: Agent, reference: Agent, method: Preference) -> torch.Tensor:
    """E[∇loss] over pairs of the agent's episodes, of which Bradley and Terry's judge prefers one."""
    pairs = list(itertools.permutations(agent.episodes, 2))
    batch = batch_of(agent, reference, *pairs)
    winners = torch.tensor([float(n == 0) for pair in pairs for n, e in enumerate(pair) for _ in e])
    batch = replace(batch, reward=winners.double()[:, None] * batch.mask)
    chance = torch.stack(
        [
            agent.chance(a) * agent.chance(b) / (1 + math.exp(agent.worth[b] - agent.worth[a]))
            for a, b in pairs
        ]
    ).detach()
    logp = column(agent, *pairs)
    loss = method.loss(Outputs(logp=logp, entropy=torch.zeros_like(logp)), batch)
    weight = method.weight(batch) * len(pairs) * (chance / chance.sum())[batch.group][:, None]
    return agent.gradient((masked.fill(loss, batch.mask) * weight).sum())


@pytest.mark.parametrize("stops", [False, True], ids=["two", "one_or_two"])
def test_pairs_of_episodes_rest_at_the_optimum(stops: bool) -> None:
    """DPO's gradient is 0 at π* ∝ π_ref exp(R/β), and nowhere near it elsewhere."""
    reference, method = Agent.drawn(2, stops), replace(DPO, beta=BETA)
    best = optimum(reference, BETA)
    best = replace(best, first=best.first.requires_grad_(), second=best.second.requires_grad_())
    assert float(pulls(best, reference, method).norm()) < 1e-14
    other = replace(Agent.drawn(3, stops), worth=reference.worth)
    assert float(pulls(other, reference, method).norm()) > 1e-3


# ---------------------------------------------------------------------- imitation


def imitated(method: Method, batch: Batch) -> list[bool]:
    prepared = method.prepare(batch)
    assert prepared.advantage is not None
    kept = (prepared.advantage > 0).any(-1)
    assert torch.equal(prepared.advantage > 0, kept[:, None] & batch.mask)
    assert torch.equal(method.weight(prepared) > 0, kept[:, None] & batch.mask)
    return kept.tolist()


def test_imitation_is_of_whole_episodes_or_none() -> None:
    """Equal are episodes whose conversations are equal, in their order; they may share some."""
    answers = [[1], [1], [1], [2], [2], [1], [1], [2], [1], [2, 3], [1, 2], [3], [4], [5]]
    episode = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    batch = rows_of(answers, [1.0] * 6 + [0.0], episode)
    assert imitated(EXPERT, batch) == [True] * 6 + [False] * 2 + [True] * 4 + [False] * 2
    counted = replace(EXPERT, repeats=selection.counted)
    assert imitated(counted, batch) == [True] * 12 + [False] * 2


def test_imitated_tasks_weigh_alike_by_episodes() -> None:
    """Two answers to one task, of two rows and of one, and an answer of one row to another task."""
    batch = rows_of([[1], [2], [3], [4]], [1.0] * 3, [0, 0, 1, 2])
    batch = replace(batch, group=torch.tensor([0, 0, 0, 1]))
    weight = EXPERT.weight(EXPERT.prepare(batch))
    assert weight.amax(-1).tolist() == pytest.approx([1 / 4, 1 / 4, 1 / 4, 1 / 2])


@pytest.mark.parametrize("keep", [selection.every, selection.best], ids=["every", "best"])
def test_order_of_equal_answers_does_not_choose(keep: Callable[..., torch.Tensor]) -> None:
    """A judge of two minds: of equal answers the best verdict counts, in whatever order they come."""
    method, found = replace(EXPERT, keep=keep), set()
    answers = [([1], 1.0), ([1], 2.0), ([2], 1.5), ([2], 0.0), ([3], 1.75)]
    for order in itertools.permutations(answers):
        batch = rows_of([a for a, _ in order], [r for _, r in order], range(5))
        kept = imitated(method, replace(batch, episode=None))
        found.add(tuple(sorted((*a, r) for (a, r), on in zip(order, kept, strict=True) if on)))
    everything = ((1, 2.0), (2, 1.5), (3, 1.75))
    assert found == {everything if keep is selection.every else ((1, 2.0),)}


# ---------------------------------------------------------------------- episodes of samplers


def test_response_hash_tells_conversations_apart() -> None:
    def hashed(*answers: list[int]) -> int:
        first, *others = (Trajectory.given([9, *a]) for a in answers)
        verdict = Verdict(score=1.0, label="right")
        task = Task(id="a", messages=())
        episode = EpisodeOfSampler(
            task=task,
            sample=0,
            trajectory=first,
            branches=tuple(others),
            verdict=verdict,
            response="",
            stop="eos",
        )
        return episode.response_hash

    assert hashed([1], [2, 3]) == hashed([1], [2, 3])
    assert len({hashed([1], [2, 3]), hashed([1, 2], [3]), hashed([2, 3], [1]), hashed([1, 2, 3])}) == 4
