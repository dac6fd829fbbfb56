"""A language small enough to list every answer: its models, its gold reward, exact expectations, comparisons.

A question is one of 8, spelt with two letters; an answer is at most 6 of 3 letters, ended by a mark unless it
has all 6. That is 1093 answers a question, and a Llama of 11 000 weights says how likely each one is, so the
expected gold reward and KL(π ‖ π_ref) are sums and not estimates.

A step is the method's own prepare, weight and loss. The forward pass is a rectangle here: rows of nine tokens
are quicker padded than packed.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.math import reduce
from posttrain.methods.build import build
from posttrain.plan.dataset_rows import marked, numbered, row
from posttrain.types import Batch, Method, Outputs, Trajectory

LETTERS, LONGEST, QUESTIONS = 3, 6, 8
END = LETTERS
BEST_LENGTH = 3
"""Letters that an answer should have; more and fewer cost gold, by the square of the difference."""
COUNT = sum(LETTERS**n for n in range(LONGEST + 1))
LENGTH = torch.cat([torch.full((LETTERS**n,), n) for n in range(LONGEST + 1)])
"""Letters of each answer; answers are in the order of their lengths, and then of the alphabet."""
Table = torch.Tensor
"""[QUESTIONS, COUNT]: a number for each answer to each question, in float64."""


def question(number: int) -> list[int]:
    """The two letters of a question."""
    return [number // LETTERS, number % LETTERS]


def spelt(answer: int) -> list[int]:
    """The tokens of an answer, with the mark that ends it.

    >>> spelt(0), spelt(4), spelt(COUNT - 1)
    ([3], [0, 0, 3], [2, 2, 2, 2, 2, 2])
    """
    n = int(LENGTH[answer])
    code = answer - (LETTERS**n - 1) // (LETTERS - 1)
    letters = [code // LETTERS**place % LETTERS for place in reversed(range(n))]
    return letters if n == LONGEST else [*letters, END]


SPELT = [spelt(answer) for answer in range(COUNT)]


# ---------------------------------------------------------------------- what is right


def gold_of(seed: int) -> Table:
    """What each answer is worth: the mean worth of its steps from letter to letter, and a cost of length.

    The worth of a step is drawn from N(0, 1) for each question. Over the answers to a question, with each
    length counting alike, gold has mean 0 and deviation 1.
    """
    draw = torch.Generator().manual_seed(1000 + seed)
    worth = torch.randn(QUESTIONS, LETTERS + 1, LETTERS, generator=draw, dtype=torch.float64)
    found = torch.zeros(QUESTIONS, COUNT, dtype=torch.float64)
    for answer, n in enumerate(LENGTH.tolist()):
        letters = [END, *SPELT[answer][:n]]
        found[:, answer] = worth[:, letters[:-1], letters[1:]].sum(1) / max(n, 1)
    found -= 0.15 * (LENGTH - BEST_LENGTH) ** 2
    alike = 1 / (LONGEST + 1) / LETTERS ** LENGTH.double()
    found -= (found * alike).sum(1, keepdim=True)
    return found / (found.square() * alike).sum(1, keepdim=True).sqrt()


def mean_of(table: Table, logp: Table) -> float:
    """E[table] of a policy's answers, the mean over questions."""
    return float((logp.exp() * table).sum(1).mean())


def kl_of(logp: Table, logp_ref: Table) -> float:
    """KL(π ‖ π_ref) over whole answers, the mean over questions."""
    return mean_of(logp - logp_ref, logp)


def frontier(logp_ref: Table, gold: Table) -> list[tuple[float, float]]:
    """(KL, the highest expected gold that a policy within it can have): that of π_ref exp(gold/β)/Z."""
    betas = torch.logspace(3, -2, 120, dtype=torch.float64).tolist()
    policies = [(logp_ref + gold / beta).log_softmax(1) for beta in betas]
    return [(kl_of(logp, logp_ref), mean_of(gold, logp)) for logp in policies]


# ---------------------------------------------------------------------- models


def new_model(seed: int) -> LlamaForCausalLM:
    """A random Llama of one layer over the letters and the end mark."""
    torch.manual_seed(seed)
    hidden = 32
    config = LlamaConfig(
        vocab_size=LETTERS + 1,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=16,
        initializer_range=hidden**-0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


class Trainee:
    """A copy of a model with a method, AdamW, and a head if the method reads one."""

    def __init__(self, model: LlamaForCausalLM, method: Method, lr: float) -> None:
        self.model, self.method = copy.deepcopy(model), method
        self.head = nn.Linear(model.config.hidden_size, 1) if "head" in method.needs else None
        parts = [self.model.model, self.head or self.model.lm_head]
        if self.head is not None:
            nn.init.zeros_(self.head.weight)
        self.weights = [p for part in parts for p in part.parameters()]
        self.optimiser = torch.optim.AdamW(self.weights, lr=lr, weight_decay=0.0, fused=True)

    def says(self, batch: Batch) -> Outputs:
        """What the model says of each token, and the head of the state before it."""
        states = self.model.model(input_ids=batch.tokens[:, :-1], use_cache=False).last_hidden_state
        nothing = torch.zeros_like(batch.reward)
        if self.head is not None:
            return Outputs(nothing, nothing, pad(self.head(states)[..., 0], (1, 0)))
        logp = self.model.lm_head(states).log_softmax(-1).gather(-1, batch.tokens[:, 1:, None])[..., 0]
        return Outputs(logp=pad(logp, (1, 0)), entropy=nothing)

    def step(self, batch: Batch) -> None:
        """One optimiser step on rows that are prepared."""
        losses = self.method.loss(self.says(batch), batch)
        loss = reduce.weighted_sum(losses, self.method.weight(batch), batch.mask)
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimiser.step()

    def epoch(self, batch: Batch, groups: int, draw: torch.Generator) -> None:
        """A step for every so many groups, dealt at random; rows of a group stand beside one another."""
        size = int((batch.group == 0).sum())
        order = torch.randperm(len(batch) // size, generator=draw)
        for start in range(0, len(order), groups):
            part = order[start : start + groups]
            self.step(batch.rows((part[:, None] * size + torch.arange(size)).flatten()))


def build_reference_scores(seed: int) -> LlamaForCausalLM:
    """A model that SFT taught to answer with letters of each question's own mixture, at any length."""
    draw, rows = torch.Generator().manual_seed(2000 + seed), []
    mixture = torch.randn(QUESTIONS, LETTERS, generator=draw).softmax(-1)
    for n in range(4096):
        said = torch.multinomial(mixture[n % QUESTIONS], LONGEST, replacement=True, generator=draw)
        size = int(torch.randint(LONGEST + 1, (), generator=draw))
        rows.append(_row(n % QUESTIONS, [*said.tolist()[:size], END][:LONGEST], 0.0))
    trainee = Trainee(new_model(seed), build("sft", {}, horizon=LONGEST), lr=0.01)
    trainee.epoch(Batch.of(rows, list(range(len(rows)))), 64, draw)
    return trainee.model


def _row(asked: int, answer: list[int], worth: float) -> Trajectory:
    return row([*question(asked), *answer], [False] * 2 + [True] * len(answer), worth)


def _tree() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, positions, who sees whom) of every beginning of an answer, each after the one it goes on."""
    begun = [SPELT[answer][:n] for answer, n in enumerate(LENGTH.tolist()) if n < LONGEST]
    place = {tuple(letters): n + 1 for n, letters in enumerate(begun)}
    sees = torch.zeros(len(begun) + 1, len(begun) + 1, dtype=torch.bool)
    sees[:, 0] = True
    for letters in begun:
        for n in range(len(letters) + 1):
            sees[place[tuple(letters)], place[tuple(letters[:n])]] = True
    tokens = [question(x) + [letters[-1] for letters in begun[1:]] for x in range(QUESTIONS)]
    return torch.tensor(tokens), torch.tensor([0, *(1 + len(letters) for letters in begun)]), sees


TREE, DEPTH, SEES = _tree()


@torch.no_grad()
def likelihoods(model: LlamaForCausalLM) -> Table:
    """log π of every answer to every question: one pass over the tree of their beginnings."""
    said = model(
        input_ids=TREE,
        position_ids=DEPTH[None],
        attention_mask=SEES.expand(QUESTIONS, 1, *SEES.shape),
        use_cache=False,
    ).logits[:, 1:]
    said = said.double().log_softmax(-1)
    begun, found, start = torch.zeros(QUESTIONS, 1, dtype=torch.float64), [], 0
    for n in range(LONGEST):
        after = said[:, start : start + LETTERS**n]
        found.append(begun + after[..., END])
        begun, start = (begun[..., None] + after[..., :END]).flatten(1), start + LETTERS**n
    return torch.cat([*found, begun], 1)


# ---------------------------------------------------------------------- comparisons


@dataclass(frozen=True)
class Pairs:
    """Comparisons: a question, the answer preferred, the other."""

    asked: torch.Tensor
    won: torch.Tensor
    lost: torch.Tensor

    def __len__(self) -> int:
        return len(self.asked)

    def gap(self, table: Table) -> torch.Tensor:
        """By how much the preferred answer of each has more of something."""
        return table[self.asked, self.won] - table[self.asked, self.lost]

    def turned(self, where: torch.Tensor) -> "Pairs":
        """The comparisons, turned round there."""
        won, lost = torch.where(where, self.lost, self.won), torch.where(where, self.won, self.lost)
        return Pairs(self.asked, won, lost)

    def at(self, index: torch.Tensor) -> "Pairs":
        """Those comparisons."""
        return Pairs(self.asked[index], self.won[index], self.lost[index])

    def batch(self, *, marks: bool = False) -> Batch:
        """Groups of two rows; with marks as a reward model reads them, behind the end."""
        groups = []
        for x, w, l in zip(self.asked.tolist(), self.won.tolist(), self.lost.tolist(), strict=True):  # noqa: E741
            sides = ((SPELT[w], 1.0), (SPELT[l], 0.0))
            if marks:
                whole = [([*question(x), *said], worth) for said, worth in sides]
                groups.append(tuple(marked(tokens, {len(tokens): worth}) for tokens, worth in whole))
            else:
                groups.append(tuple(_row(x, said, worth) for said, worth in sides))
        return Batch.of(*numbered(groups))


def joined(parts: Sequence[Pairs]) -> Pairs:
    """All of these comparisons."""
    return Pairs(*(torch.cat([getattr(part, name) for part in parts]) for name in ("asked", "won", "lost")))


def drawn_pairs(logp: Table, number: int, draw: torch.Generator) -> Pairs:
    """So many pairs of different answers that a policy gave, with nobody's opinion yet."""
    asked = torch.arange(number) % QUESTIONS
    p = logp.exp()[asked]
    first = torch.multinomial(p, 1, generator=draw)
    second = torch.multinomial(p.scatter(1, first, 0.0), 1, generator=draw)
    return Pairs(asked, first[:, 0], second[:, 0])


def answered(drawn: torch.Tensor, worth: Table) -> Batch:
    """[questions, K] answers, a group for each question, with what they are worth as rewards."""
    rows, groups = [], []
    for x, answers in enumerate(drawn.tolist()):
        for answer in answers:
            rows.append(_row(x, SPELT[answer], float(worth[x, answer])))
            groups.append(x)
    return Batch.of(rows, groups)
