"""A language small enough to enumerate: every answer, its gold reward, exact expectations, comparisons.

A question is one of 8, spelt with two letters; an answer is at most 6 of 3 letters, ended by a mark unless it
has all 6. That is 1093 answers a question, and a Llama of 11,000 weights says how likely each one is, so the
expected gold reward and KL(π ‖ π_ref) are sums and not estimates.

A step is the method's own prepare, weight and loss. The forward pass is rectangular: rows of nine tokens are
quicker padded than packed. A trainee's step agrees with the learner's packed one to 1e-5.
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
"""Letters of the best answers; a difference costs gold by its square."""
COUNT = sum(LETTERS**n for n in range(LONGEST + 1))
LENGTH = torch.cat([torch.full((LETTERS**n,), n) for n in range(LONGEST + 1)])
"""Letters of each answer; answers are ordered by length, and then by the alphabet."""
Table = torch.Tensor
"""A number for each answer to each question, [QUESTIONS, COUNT] in float64."""


def question(number: int) -> list[int]:
    """Return the two letters of a question."""
    return [number // LETTERS, number % LETTERS]


def spelt(answer: int) -> list[int]:
    """Return the tokens of an answer, with the mark that ends it.

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
    """Return the gold of each answer: the mean worth of its steps between letters, less a cost of length.

    The worth of a step is drawn from N(0, 1) for each question. Over the answers to a question, with each
    length counting alike, gold has mean 0 and deviation 1.
    """
    draw = torch.Generator().manual_seed(1000 + seed)
    worth = torch.randn(QUESTIONS, LETTERS + 1, LETTERS, generator=draw, dtype=torch.float64)
    gold = torch.zeros(QUESTIONS, COUNT, dtype=torch.float64)
    for answer, n in enumerate(LENGTH.tolist()):
        letters = [END, *SPELT[answer][:n]]
        gold[:, answer] = worth[:, letters[:-1], letters[1:]].sum(1) / max(n, 1)
    gold -= 0.15 * (LENGTH - BEST_LENGTH) ** 2
    uniform = 1 / (LONGEST + 1) / LETTERS ** LENGTH.double()
    gold -= (gold * uniform).sum(1, keepdim=True)
    return gold / (gold.square() * uniform).sum(1, keepdim=True).sqrt()


def mean_of(table: Table, logp: Table) -> float:
    """Return E[table] over a policy's answers, the mean over questions."""
    return float((logp.exp() * table).sum(1).mean())


def kl_of(logp: Table, logp_ref: Table) -> float:
    """Return KL(π ‖ π_ref) over whole answers, in nats, the mean over questions."""
    return mean_of(logp - logp_ref, logp)


def frontier(logp_ref: Table, gold: Table) -> list[tuple[float, float]]:
    """Return (KL, highest expected gold of a policy within that KL), which π_ref exp(gold/β)/Z has."""
    betas = torch.logspace(3, -2, 120, dtype=torch.float64).tolist()
    policies = [(logp_ref + gold / beta).log_softmax(1) for beta in betas]
    return [(kl_of(logp, logp_ref), mean_of(gold, logp)) for logp in policies]


# ---------------------------------------------------------------------- models


def new_model(seed: int) -> LlamaForCausalLM:
    """Return a random Llama of one layer over the letters and the end mark."""
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
    """Train a copy of a model by a method with AdamW; it has a head if the method reads one."""

    def __init__(self, model: LlamaForCausalLM, method: Method, lr: float) -> None:
        self.model, self.method = copy.deepcopy(model), method
        self.head = nn.Linear(model.config.hidden_size, 1) if "head" in method.needs else None
        parts = [self.model.model, self.head or self.model.lm_head]
        if self.head is not None:
            nn.init.zeros_(self.head.weight)
        self.weights = [p for part in parts for p in part.parameters()]
        self.optimiser = torch.optim.AdamW(self.weights, lr=lr, weight_decay=0.0, fused=True)

    def outputs(self, batch: Batch) -> Outputs:
        """Return log π of each token, or the head's value of the state before it if the method reads one."""
        states = self.model.model(input_ids=batch.tokens[:, :-1], use_cache=False).last_hidden_state
        zeros = torch.zeros_like(batch.reward)
        if self.head is not None:
            return Outputs(zeros, zeros, pad(self.head(states)[..., 0], (1, 0)))
        logp = self.model.lm_head(states).log_softmax(-1).gather(-1, batch.tokens[:, 1:, None])[..., 0]
        return Outputs(logp=pad(logp, (1, 0)), entropy=zeros)

    def step(self, batch: Batch) -> None:
        """Make one optimiser step on prepared rows."""
        losses = self.method.loss(self.outputs(batch), batch)
        loss = reduce.weighted_sum(losses, self.method.weight(batch), batch.mask)
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimiser.step()

    def epoch(self, batch: Batch, groups: int, draw: torch.Generator) -> None:
        """Make a step for each `groups` groups in random order; rows of a group are next to each other."""
        size = int((batch.group == 0).sum())
        order = torch.randperm(len(batch) // size, generator=draw)
        for start in range(0, len(order), groups):
            part = order[start : start + groups]
            self.step(batch.rows((part[:, None] * size + torch.arange(size)).flatten()))


def reference_model(seed: int) -> LlamaForCausalLM:
    """Return a model that SFT taught to answer with letters of each question's own mixture, at any length."""
    draw, rows = torch.Generator().manual_seed(2000 + seed), []
    mixture = torch.randn(QUESTIONS, LETTERS, generator=draw).softmax(-1)
    for n in range(4096):
        letters = torch.multinomial(mixture[n % QUESTIONS], LONGEST, replacement=True, generator=draw)
        size = int(torch.randint(LONGEST + 1, (), generator=draw))
        rows.append(_row(n % QUESTIONS, [*letters.tolist()[:size], END][:LONGEST], 0.0))
    trainee = Trainee(new_model(seed), build("sft", {}, horizon=LONGEST), lr=0.01)
    trainee.epoch(Batch.of(rows, list(range(len(rows)))), 64, draw)
    return trainee.model


def _row(number: int, answer: list[int], worth: float) -> Trajectory:
    return row([*question(number), *answer], [False] * 2 + [True] * len(answer), worth)


def _tree() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (tokens, positions, attention mask) of every prefix of an answer, shorter ones first."""
    prefixes = [SPELT[answer][:n] for answer, n in enumerate(LENGTH.tolist()) if n < LONGEST]
    place = {tuple(letters): n + 1 for n, letters in enumerate(prefixes)}
    sees = torch.zeros(len(prefixes) + 1, len(prefixes) + 1, dtype=torch.bool)
    sees[:, 0] = True
    for letters in prefixes:
        for n in range(len(letters) + 1):
            sees[place[tuple(letters)], place[tuple(letters[:n])]] = True
    tokens = [question(x) + [letters[-1] for letters in prefixes[1:]] for x in range(QUESTIONS)]
    return torch.tensor(tokens), torch.tensor([0, *(1 + len(letters) for letters in prefixes)]), sees


TREE, DEPTH, SEES = _tree()


@torch.no_grad()
def likelihoods(model: LlamaForCausalLM) -> Table:
    """Return log π of every answer to every question, by one pass over the tree of their prefixes."""
    logits = model(
        input_ids=TREE,
        position_ids=DEPTH[None],
        attention_mask=SEES.expand(QUESTIONS, 1, *SEES.shape),
        use_cache=False,
    ).logits[:, 1:]
    logp = logits.double().log_softmax(-1)
    prefix, answers, start = torch.zeros(QUESTIONS, 1, dtype=torch.float64), [], 0
    for n in range(LONGEST):
        after = logp[:, start : start + LETTERS**n]
        answers.append(prefix + after[..., END])
        prefix, start = (prefix[..., None] + after[..., :END]).flatten(1), start + LETTERS**n
    return torch.cat([*answers, prefix], 1)


# ---------------------------------------------------------------------- comparisons


@dataclass(frozen=True)
class Pairs:
    """Comparisons: a question, the preferred answer and the other, each [pairs]."""

    question: torch.Tensor
    won: torch.Tensor
    lost: torch.Tensor

    def __len__(self) -> int:
        return len(self.question)

    def gap(self, table: Table) -> torch.Tensor:
        """Return by how much more the preferred answer of each pair has in a table."""
        return table[self.question, self.won] - table[self.question, self.lost]

    def turned(self, where: torch.Tensor) -> "Pairs":
        """Return the pairs with winner and loser exchanged where the mask is true."""
        won, lost = torch.where(where, self.lost, self.won), torch.where(where, self.won, self.lost)
        return Pairs(self.question, won, lost)

    def at(self, index: torch.Tensor) -> "Pairs":
        """Return the pairs of these indices."""
        return Pairs(self.question[index], self.won[index], self.lost[index])

    def batch(self, *, marks: bool = False) -> Batch:
        """Return groups of two rows; with marks as a reward model reads them, after the end."""
        groups = []
        for x, w, l in zip(self.question.tolist(), self.won.tolist(), self.lost.tolist(), strict=True):  # noqa: E741
            sides = ((SPELT[w], 1.0), (SPELT[l], 0.0))
            if marks:
                rows = [([*question(x), *answer], worth) for answer, worth in sides]
                groups.append(tuple(marked(tokens, {len(tokens): worth}) for tokens, worth in rows))
            else:
                groups.append(tuple(_row(x, answer, worth) for answer, worth in sides))
        return Batch.of(*numbered(groups))


def joined(parts: Sequence[Pairs]) -> Pairs:
    """Concatenate several sets of comparisons."""
    return Pairs(
        *(torch.cat([getattr(part, name) for part in parts]) for name in ("question", "won", "lost"))
    )


def sample_pairs(logp: Table, number: int, draw: torch.Generator) -> Pairs:
    """Sample pairs of different answers of a policy, which are not labelled yet."""
    questions = torch.arange(number) % QUESTIONS
    p = logp.exp()[questions]
    first = torch.multinomial(p, 1, generator=draw)
    second = torch.multinomial(p.scatter(1, first, 0.0), 1, generator=draw)
    return Pairs(questions, first[:, 0], second[:, 0])


def sampled_batch(samples: torch.Tensor, worth: Table) -> Batch:
    """Return [questions, K] answers as a batch, a group for each question, with their worth as rewards."""
    rows, groups = [], []
    for x, answers in enumerate(samples.tolist()):
        for answer in answers:
            rows.append(_row(x, SPELT[answer], float(worth[x, answer])))
            groups.append(x)
    return Batch.of(rows, groups)
