"""Proofs sampled whole in the world of sequents.py, and a Llama that a method trains on them.

An attempt works on the newest open goal, one rule at a time, chosen among all rules. A rule that does not
apply, or whose premises are too large, is refused and ends the attempt, as an error ends a script. Nothing is
taken back. A premise that closes by itself needs no rule. The Llama begins with proofs of easy theorems.
"""

import copy
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from posttrain.search.choice import SearchChoice
from posttrain.types import Method
from posttrain_prove.tasks.drawn import Split
from posttrain_prove.tasks.propositional import Propositional, propositional
from posttrain_study.claims.sequents import (
    HYPOTHESES,
    MOST_HYPOTHESES,
    MOST_TOKENS,
    RULES,
    VOCABULARY,
    Guide,
    Sequent,
    TreeLearner,
    is_closed,
    moves_of,
    new_llama,
    premises_of,
    rows_of,
    search_all,
    spelt,
    theorem_of,
)
from posttrain_study.claims.table_policy import TablePolicy, TableRollouts

ACTIONS = (*RULES, *HYPOTHESES)
TOKENS = [VOCABULARY[rule] for rule in ACTIONS]
LONGEST = 24
"""Rules of an attempt, at most."""
EASY, EASY_PROOFS, FORM_STEPS = Propositional(low=4, high=8), 256, 200
"""Theorems whose proofs the start has seen, their number, and steps of training on their moves."""
SEARCH = SearchChoice(strategy="hypertree", moves=256, width=4, depth=48)
LARGEST = 40
"""Tokens of a theorem, at most."""


def start_of(seed: int) -> TreeLearner:
    """Return a Llama that has learnt from proofs of easy theorems, which an unguided search finds."""
    tasks = propositional("train", replace(EASY, seed=seed, train=EASY_PROOFS))
    learner = TreeLearner(new_llama(seed), seed)
    for tree in search_all(tasks, Guide(learner.model, seed, prior=False), replace(SEARCH, moves=128)):
        learner.add(rows_of(tree, SEARCH))
    learner.train(FORM_STEPS)
    return learner


@dataclass(frozen=True)
class Gold:
    """A proof of a theorem: the rule of each of its sequents."""

    theorem: Sequent
    rules: dict[Sequent, str]

    @property
    def whole(self) -> tuple[int, Sequent]:
        return self.length, self.theorem

    @cached_property
    def length(self) -> int:
        """Return the number of its rules."""
        return self._size(self.theorem)

    @cached_property
    def parts(self) -> list[tuple[int, Sequent]]:
        """Goals of the proof, each with the rules that it takes from there, the theorem last."""
        parts = [(self._size(sequent), sequent) for sequent in self.rules]
        return sorted(parts, key=lambda part: part[0])

    def _size(self, sequent: Sequent) -> int:
        premises, _ = premises_of(sequent, self.rules[sequent])
        return 1 + sum(self._size(premise) for premise in premises if not is_closed(premise))


def gold_proofs(split: Split, spec: Propositional, guide: Guide) -> list[Gold]:
    """Return the proofs that a search finds for theorems of a split, not necessarily the shortest."""
    tasks = [t for t in propositional(split, spec) if len(spelt(theorem_of(t))) <= LARGEST]
    trees = search_all(tasks, guide, SEARCH)
    return [
        Gold(theorem_of(tree.root.task), {e.source.state.env_state: e.move.text for e in tree.found})
        for tree in trees
        if tree.solved
    ]


@dataclass
class ProofAttempt:
    """A proof that is sampled from a sequent, with what each of its rules did."""

    start: Sequent
    goals: list[Sequent] = field(default_factory=list)
    """Open goals, the next one last."""
    sequents: list[Sequent] = field(default_factory=list)
    rules: list[int] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    """Premises of each rule that close by themselves."""
    opened: list[int] = field(default_factory=list)
    """Goals that each rule left open."""
    refused: bool = False

    @property
    def proved(self) -> bool:
        return not self.goals

    @property
    def pending(self) -> bool:
        return bool(self.goals) and not self.refused and len(self.rules) < LONGEST

    def apply(self, rule: int) -> None:
        """Apply a rule to the next goal."""
        sequent = self.goals[-1]
        self.sequents.append(sequent)
        self.rules.append(rule)
        premises = accepted(sequent, rule)
        self.refused = premises is None
        if premises is not None:
            self.goals.pop()
        open_goals = [premise for premise in premises or () if not is_closed(premise)]
        self.goals += reversed(open_goals)
        self.closed.append(len(premises or ()) - len(open_goals))
        self.opened.append(len(open_goals))


def accepted(sequent: Sequent, rule: int) -> list[Sequent] | None:
    """Return the premises of a rule; None if it is refused."""
    if ACTIONS[rule] not in moves_of(sequent):
        return None
    premises, _ = premises_of(sequent, ACTIONS[rule])
    fits = all(len(p[0]) <= MOST_HYPOTHESES and len(spelt(p)) <= MOST_TOKENS for p in premises)
    return premises if fits else None


class ProofPolicy(TablePolicy):
    """Train a copy of a Llama by a method on attempts; its table has a row for each sequent of an update."""

    def __init__(self, start: TreeLearner, method: Method, lr: float) -> None:
        super().__init__(torch.zeros(0, len(ACTIONS)), method, lr)
        self.model = copy.deepcopy(start.model)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0, fused=True)
        self.rows: dict[Sequent, int] = {}

    def attempts(self, starts: Sequence[Sequent], draw: torch.Generator) -> list[ProofAttempt]:
        """Sample an attempt from each sequent."""
        guide = Guide(self.model, 0)
        attempts = [ProofAttempt(start, [start]) for start in starts]
        while pending := [attempt for attempt in attempts if attempt.pending]:
            sequents = [attempt.goals[-1] for attempt in pending]
            guide.read(sequents)
            logp = torch.stack([torch.from_numpy(guide.memory[s][0][TOKENS]) for s in sequents])
            rules = torch.multinomial(logp.softmax(-1), 1, generator=draw)[:, 0]
            for attempt, rule in zip(pending, rules.tolist(), strict=True):
                attempt.apply(rule)
        return attempts

    def learn_from(
        self, attempts: Sequence[ProofAttempt], rewards: Sequence[Sequence[float]], size: int
    ) -> None:
        """Make a step on attempts in groups of `size`, with a reward for each of their rules."""
        self.rows = {}
        for attempt in attempts:
            for sequent in attempt.sequents:
                self.rows.setdefault(sequent, len(self.rows))
        longest = max(len(attempt.rules) for attempt in attempts)
        state, action = torch.zeros(2, len(attempts), longest, dtype=torch.long)
        reward, mask = torch.zeros(len(attempts), longest), torch.zeros(len(attempts), longest) > 0
        for n, (attempt, paid) in enumerate(zip(attempts, rewards, strict=True)):
            length = len(attempt.rules)
            state[n, :length] = torch.tensor([self.rows[sequent] for sequent in attempt.sequents])
            action[n, :length] = torch.tensor(attempt.rules)
            reward[n, :length] = torch.tensor(paid)
            mask[n, :length] = True
        self.learn(TableRollouts(state, action, reward, torch.arange(len(attempts)) // size, mask=mask))

    def log_table(self) -> torch.Tensor:
        """Return log π of all rules in each sequent of the update."""
        sequents = list(self.rows)
        order = sorted(range(len(sequents)), key=lambda n: len(spelt(sequents[n])))
        parts = [
            self._logits([sequents[n] for n in order[start : start + 128]])
            for start in range(0, len(order), 128)
        ]
        place = torch.tensor(order).argsort()
        return torch.cat(parts).log_softmax(-1)[place]

    def _logits(self, sequents: Sequence[Sequent]) -> torch.Tensor:
        rows = [spelt(sequent) for sequent in sequents]
        longest = max(map(len, rows))
        tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
        states = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
        ends = torch.tensor([len(row) - 1 for row in rows])
        logits: torch.Tensor = self.model.lm_head(states[torch.arange(len(rows)), ends])[:, TOKENS]
        return logits


def outcome(attempt: ProofAttempt) -> list[float]:
    """Return the reward of each rule: 1 for the last one of a proof."""
    return [0.0] * (len(attempt.rules) - 1) + [float(attempt.proved)]


def pass_rates(policy: ProofPolicy, theorems: Sequence[Sequent], samples: int, seed: int) -> list[float]:
    """Return the share of sampled attempts at each theorem that prove it."""
    draw = torch.Generator().manual_seed(seed)
    attempts = policy.attempts([theorem for theorem in theorems for _ in range(samples)], draw)
    return [
        statistics.fmean(attempt.proved for attempt in attempts[start : start + samples])
        for start in range(0, len(attempts), samples)
    ]
