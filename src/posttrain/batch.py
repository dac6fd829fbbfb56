"""The nouns that hold tensors: a batch of rows, the model's outputs, and a method.

posttrain.types offers them next to the nouns without tensors, and loads this module at their first use.
Sizes are B rows, T positions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from jaxtyping import Float, Int

from posttrain.math.choice import least_group
from posttrain.math.everywhere import HERE, Everywhere
from posttrain.math.masked import Mask as Mask
from posttrain.math.masked import PerRow as PerRow
from posttrain.math.masked import PerToken as PerToken
from posttrain.types import Trajectory

Divergence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of log π and log π_ref, [S, V] each: one number a state, [S] (math/divergences.py)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one update as rectangular columns, padded on the right.

    Padding and prompts hold arbitrary numbers: only entries where `mask` is True may be read.

    A row is one conversation. An agent's episode may be several rows, which share a number in `episode`; the
    last token of each is paid the episode's total reward. What counts as one answer:

    | an episode | a row |
    |---|---|
    | the return, its baseline and statistics | the steps of to_go, of estimators and of a critic; turns |
    | overlong_buffer; the means behind running_baseline, running_scale | ratios of a sequence or trajectory |
    | KL in the reward, and kl_target then | corrections of a sequence, off_policy_mask |
    | pairs and their margins | per_sequence |
    | imitated answers, by_task | supervised fine-tuning, KTO, reward models |
    | the mean over answers of per_row, per_horizon | ess |
    | selection of groups, rollout metrics | microbatches, select/trained |

    Means over tokens (per_token, per_group_token, credits of tokens) are the same for both.

    >>> rows = [Trajectory(tokens=[7, 3], sampled=[False, True], logp_gen=[0, -0.1],
    ...                    logp_policy=[0, -0.1], version=[0, 1], reward=[0, 1.0])]
    >>> batch = Batch.of(rows, group=[0])
    >>> batch.mask, batch.reward
    (tensor([[False,  True]]), tensor([[0., 1.]], dtype=torch.float64))
    """

    tokens: Int[torch.Tensor, "B T"]
    mask: Mask
    """True where the policy sampled the token: the tokens that are trained."""
    length: Int[torch.Tensor, "B"]
    """Number of tokens in each row, prompt included."""
    group: Int[torch.Tensor, "B"]
    """Rows of one task share a number."""
    reward: PerToken
    """In float64 and unrounded; only sums of rewards are rounded (math/returns.py: worth)."""
    logp_gen: PerToken
    logp_policy: PerToken
    version: Int[torch.Tensor, "B T"]
    logp_old: PerToken | None = None
    """Anchor of the ratio; None: the training policy itself, as in the only pass over the rows."""
    logp_ref: PerToken | None = None
    value: PerToken | None = None
    """The critic's V of the state before each token, computed before the update."""
    entropy: PerToken | None = None
    """Entropy of the policy before each token at the start of the update, in nats, for filters."""
    score_norm: PerToken | None = None
    """Squared norm of the gradient of log π(token) in the logits, at the start of the update."""
    uniform: PerToken | None = None
    """A number drawn from [0, 1) for each token, the same however rows are ordered or dealt, for filters."""
    advantage: PerToken | None = None
    """0 where `filter_mask` is False."""
    filter_mask: Mask | None = None
    """True where a filter keeps the advantage; None: everywhere."""
    penalty_mask: Mask | None = None
    """True where the penalty on KL(π_old ‖ π) applies; None: everywhere."""
    target: PerToken | None = None
    """Target of a critic, or of a Q on tokens."""
    observed: Mask | None = None
    """True at tokens of the environment that the loss learns to predict; set by the method's `prepare`."""
    episode: Int[torch.Tensor, "B"] | None = None
    """Rows of one episode share a number; None: each row is an episode."""
    teacher: Int[torch.Tensor, "B"] | None = None
    """Number of the reference that a row is compared with, of those of the learner; None: the first."""
    teacher_prompt: Int[torch.Tensor, "B P"] | None = None
    """Prompts that the reference reads in place of the rows' own, padded on the right; None: those."""
    teacher_prompt_length: Int[torch.Tensor, "B"] | None = None
    """Tokens of `teacher_prompt`; 0 for a row that the reference has nothing to tell about."""
    teacher_top: Int[torch.Tensor, "B T k"] | None = None
    """The likeliest tokens at each trained token by a served reference (`reference.url`); None: no such."""
    teacher_logp: Float[torch.Tensor, "B T k"] | None = None
    """The log-probability of each of these tokens, in nats."""
    turn_state: Int[torch.Tensor, "B T"] | None = None
    """Number of the state that a turn begins in, at the turn's first token; 0 elsewhere. Turns of a group
    with one number began in the same state. None unless the method compares states."""
    routes: Int[torch.Tensor, "B T L k"] | None = None
    """Experts of each token in each layer that has some, as the sampler's routers chose them, int16; -1 where
    they are not known. The policy's passes choose the same. None: its routers choose."""
    parts: Float[torch.Tensor, "B N"] | None = None
    """Score of each part of the reward, unweighted, for a credit that compares them one by one; NaN where a
    part does not apply. None: the reward is the only part."""
    greedy: PerToken | None = None
    """Reward of the greedy answer to the row's task, at each token, for a credit that compares with it; NaN
    where it has no verdict."""
    member: Int[torch.Tensor, "B"] | None = None
    """Number of the perturbed weights that drew each row (evolution strategies); None: no weights were."""
    state: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the method carries from update to update: a running baseline, the β of a KL."""
    everywhere: Everywhere = HERE
    """Sums and maxima over the ranks that hold the other rows of the update."""

    @staticmethod
    def of(rows: Sequence[Trajectory], group: Sequence[int], episode: Sequence[int] | None = None) -> "Batch":
        """Return the batch of these trajectories; T is the length of the longest, or 1 if there are none."""
        T = max((len(r.tokens) for r in rows), default=1)

        def column(name: str, dtype: torch.dtype) -> torch.Tensor:
            out = torch.zeros(len(rows), T, dtype=dtype)
            for i, row in enumerate(rows):
                values = getattr(row, name)
                out[i, : len(values)] = torch.tensor(values, dtype=dtype)
            return out

        return Batch(
            tokens=column("tokens", torch.long),
            mask=column("sampled", torch.bool),
            length=torch.tensor([len(r.tokens) for r in rows], dtype=torch.long),
            group=torch.tensor(group, dtype=torch.long),
            reward=column("reward", torch.float64),
            logp_gen=column("logp_gen", torch.float32),
            logp_policy=column("logp_policy", torch.float32),
            version=column("version", torch.long),
            episode=None if episode is None else torch.tensor(episode, dtype=torch.long),
            turn_state=_number_states(rows, T),
            teacher=torch.tensor([r.teacher for r in rows], dtype=torch.long),
            routes=_join_routes(rows, T),
        )

    @property
    def predicted(self) -> Mask:
        """True at tokens whose probability a pass computes: trained ones, and those that are `observed`."""
        return self.mask if self.observed is None else self.mask | self.observed

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        rows, columns = self.tokens.shape
        trained, groups = int(self.mask.sum()), len(set(self.group.tolist()))
        return f"Batch({rows} rows of up to {columns} tokens, {trained} trained, in {groups} groups)"

    def rows(self, index: Int[torch.Tensor, "n"]) -> "Batch":
        """Return the batch of the rows at `index`."""
        columns: dict[str, Any] = {
            name: value[index]
            for name in self.__slots__
            if isinstance(value := getattr(self, name), torch.Tensor)
        }
        return replace(self, **columns)


def _number_states(rows: Sequence[Trajectory], T: int) -> Int[torch.Tensor, "B T"] | None:
    """Return the column `turn_state`, with states numbered from 1; None if no row has states."""
    if not any(row.turn_state for row in rows):
        return None
    numbers, out = dict[int, int](), torch.zeros(len(rows), T, dtype=torch.long)
    for i, row in enumerate(rows):
        for t, key in row.turn_state.items():
            out[i, t] = numbers.setdefault(key, 1 + len(numbers))
    return out


def _join_routes(rows: Sequence[Trajectory], T: int) -> Int[torch.Tensor, "B T L k"] | None:
    """Return the column `routes`; None if no row has any."""
    routes = {i: torch.from_numpy(row.routes) for i, row in enumerate(rows) if row.routes is not None}
    if not routes:
        return None
    first = next(iter(routes.values()))
    out = first.new_full((len(rows), T, *first.shape[1:]), -1)
    for i, noted in routes.items():
        out[i, : len(noted)] = noted
    return out


@dataclass(frozen=True, slots=True)
class Outputs:
    """The model's outputs for one microbatch, as columns like those of its Batch.

    `logp` carries the gradient. Entries where the batch's `predicted` is False are 0.
    """

    logp: PerToken
    """log π(token t | tokens before t) at the sampling temperature."""
    entropy: PerToken
    """Entropy of the distribution that token t was drawn from, in nats; with gradient, if a loss uses it."""
    value: PerToken | None = None
    """The critic's V of the state before token t, with gradient. None without a critic, and where a trust
    region measures how much a step lowers the policy's own loss."""
    divergence: PerToken | None = None
    """`Method.compare` of the distributions of the policy and the reference that token t was drawn from, with
    gradient; None unless the method compares them."""

    def detached(self) -> "Outputs":
        """Return the same columns without gradients."""
        columns = (self.logp, self.entropy, self.value, self.divergence)
        return Outputs(*(None if column is None else column.detach() for column in columns))  # type: ignore[arg-type]


class Method(Protocol):
    """A post-training method: three functions that differ in what they may see.

    | function | sees | returns | gradient |
    |---|---|---|---|
    | prepare | all rows of the update | the batch with its targets | no |
    | weight | the rows of one optimiser step | weight of each token's loss in the sum | no |
    | loss | the rows of one microbatch | unreduced losses | yes |

    The learner minimises Σ weight · loss and sums gradients over microbatches and ranks, so
    a quantity that depends on how the step was cut cannot be written down. All but `weight` and `loss` have
    defaults.
    """

    unit: ClassVar[str] = "token"
    """What one loss belongs to: a token, a row, or a group. The loss of a row or group stands at each of its
    tokens, metrics are then means over rows or groups, and a group always lies in one microbatch."""
    anchored: ClassVar[bool] = False
    """True if the loss compares with the policy at the start of an update that takes several steps."""
    probes: ClassVar[bool] = False
    """True if rows must be followed by probes: their prompts with answers to other prompts."""
    measures_kl: ClassVar[bool] = False
    """True if `watch` returns "kl/old", by which an update can end early."""

    @property
    def needs(self) -> frozenset[str]:
        """Columns that the learner must fill before `prepare`: logp_old, logp_ref, value, entropy, uniform,
        score_norm.

        "head" instead of "value" if the loss reads a head's output, but no value from before the update.
        """
        return frozenset()

    @property
    def compare(self) -> Divergence | None:
        """Divergence of the policy from the reference over the vocabulary that `loss` reads; None: none."""
        return None

    @property
    def least_group(self) -> int:
        """The fewest judged answers to a task that the method can learn from; fewer are refused."""
        functions = (x for x in vars(self).values() if callable(x))
        return max([1 + (self.unit == "group"), *map(least_group, functions)])

    @property
    def corrects(self) -> bool:
        """True if the method corrects for tokens that an older policy drew."""
        return False

    @property
    def asks(self) -> frozenset[str]:
        """Requirements on the data: margins, probabilities (as labels), both signs; or a teacher.

        "states" if the method reads `batch.turn_state`: samplers then record the state of each turn.
        """
        return frozenset()

    @property
    def start(self) -> Mapping[str, float]:
        """`batch.state` of the first update."""
        return {}

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch with advantages or other targets."""
        return batch

    def weight(self, batch: Batch) -> PerToken:
        """Return the weight of each token's loss; 0 outside of the mask and of `observed`."""
        ...

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """Return the loss of each token; entries outside of the mask and of `observed` are never read."""
        ...

    def watch(self, out: Outputs, batch: Batch) -> dict[str, PerToken]:
        """Return per-token quantities by metric name; their means over the step are logged."""
        return {}

    def update_state(self, batch: Batch, last: Mapping[str, float]) -> Mapping[str, float]:
        """Return `batch.state` of the next update, from this update and the metrics of its last step."""
        return batch.state
