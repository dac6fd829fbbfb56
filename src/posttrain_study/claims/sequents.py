r"""A prover's world without a prover: sequents of intuitionistic logic, a tiny Llama, searches side by side.

A state is a sequent Γ ⊢ G whose rule is to be chosen, a move is a rule, read upwards:

    intro  Γ, A ⊢ B          for A → B     left, right  Γ ⊢ A, or Γ ⊢ B       for A ∨ B
    split  Γ ⊢ A and Γ ⊢ B   for A ∧ B     use i        by the connective of hypothesis i:
           Γ, A, B ⊢ G                     ∧
           Γ, A ⊢ G and Γ, B ⊢ G           ∨
           Γ, A → B ⊢ A and Γ, B ⊢ G       →

A sequent closes by itself if Γ holds G or False. ¬A is A → False. The rules are complete (G3ip; Troelstra and
Schwichtenberg, Basic Proof Theory, section 3.5), and as → stays in its first premise, searches may run in
circles. Names of hypotheses are digests, so a solution is a script that Coq checks. Searches, their training
rows and losses are the product's; exact values are those of a decision procedure (intuitionistic.py).
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.methods.build import build
from posttrain.plan.dataset_rows import row
from posttrain.search.choice import SearchChoice
from posttrain.search.protocol import (
    HOLE,
    Apply,
    Move,
    Propose,
    Refused,
    State,
    StateValue,
    Transitions,
    ValueTarget,
)
from posttrain.search.training_rows import SearchRow, select_training_rows
from posttrain.search.tree import Tree
from posttrain.search.values import with_lessons
from posttrain.types import Batch, Task, Verdict
from posttrain_prove.tasks.formula import FALSE, Formula, parse_formula
from posttrain_prove.tasks.intuitionistic import Prover, implies
from posttrain_study.claims.tiny import Trainee

Sequent = tuple[tuple[Formula, ...], Formula]
"""Hypotheses in the order of their texts, and the goal."""
MOST_HYPOTHESES, MOST_TOKENS = 12, 96
SYMBOLS = ("A", "B", "C", "D", "False", "->", "~", "/\\", "\\/", "|-")
RULES = ("intro", "split", "left", "right")
HYPOTHESES = tuple(f"use {n}" for n in range(MOST_HYPOTHESES))
VOCABULARY = {word: n for n, word in enumerate((*SYMBOLS, *RULES, *HYPOTHESES, "ask", "0", "1"))}
PROVED = Verdict(score=1.0, label="right")


# ---------------------------------------------------------------------- sequents and rules


def sequent_of(hypotheses: Sequence[Formula], goal: Formula) -> Sequent:
    """Return a sequent with each hypothesis once, in order."""
    return tuple(sorted(set(hypotheses), key=str)), goal


def sides(formula: Formula) -> tuple[Formula, ...]:
    """Return the two formulas that a formula joins: for ¬A these are A and False; none for an atom."""
    return (formula.parts[0], FALSE) if formula.sign == "~" else formula.parts


def is_closed(sequent: Sequent) -> bool:
    return sequent[1] in sequent[0] or FALSE in sequent[0]


@cache
def moves_of(sequent: Sequent) -> tuple[str, ...]:
    """Return the rules that apply."""
    hypotheses, goal = sequent
    rules = {"->": ("intro",), "~": ("intro",), "/\\": ("split",), "\\/": ("left", "right")}
    used = [
        name
        for name, formula in zip(HYPOTHESES, hypotheses, strict=False)
        if formula.parts and not (formula.sign in ("->", "~") and sides(formula)[1] in hypotheses)
    ]
    return (*rules.get(goal.sign, ()), *used)


def premises_of(sequent: Sequent, move: str) -> tuple[list[Sequent], str]:
    """Return the sequents that a rule leaves, and its tactic in Coq."""
    hypotheses, goal = sequent
    if move == "intro":
        first, second = sides(goal)
        is_known = first in hypotheses
        return [
            sequent_of((*hypotheses, first), second)
        ], "intros _." if is_known else f"intro {name(first)}."
    if move == "split":
        return [(hypotheses, part) for part in goal.parts], "split."
    if move in ("left", "right"):
        return [(hypotheses, goal.parts[move == "right"])], f"{move}."
    formula = hypotheses[HYPOTHESES.index(move)]
    others = [other for other in hypotheses if other != formula]
    first, second = sides(formula)
    if formula.sign == "/\\":
        names = [name(first, others), name(second, [*others, first])]
        return [
            sequent_of((*others, first, second), goal)
        ], f"destruct {name(formula)} as [{' '.join(names)}]."
    if formula.sign == "\\/":
        names = [name(part, others) for part in formula.parts]
        cases = [sequent_of((*others, part), goal) for part in formula.parts]
        return cases, f"destruct {name(formula)} as [{'|'.join(names)}]."
    uses = f"[refine ({name(formula)} _) | clear {name(formula)}]"
    return [
        (hypotheses, first),
        sequent_of((*others, second), goal),
    ], f"assert ({name(second)} : {second}); {uses}."


def name(formula: Formula, hypotheses: Sequence[Formula] = ()) -> str:
    """Return the name of a hypothesis; _ if it is known already."""
    return (
        "_"
        if formula in hypotheses
        else f"h{hashlib.blake2b(str(formula).encode(), digest_size=5).hexdigest()}"
    )


class Sequents(Transitions):
    """Where rules lead; premises that are independent goals are parts of a state."""

    def begin(self, tasks: Sequence[Task]) -> list[State | Refused]:
        return [self._state(task, (), [theorem_of(task)]) for task in tasks]

    def apply(self, pairs: Sequence[tuple[State, str]]) -> list[State | Refused]:
        return [self._apply(state, move) for state, move in pairs]

    def _apply(self, state: State, move: str) -> State | Refused:
        premises, tactic = premises_of(state.env_state, move)
        return self._state(state.task, (*state.moves, move), premises, tactic)

    def _state(
        self, task: Task, moves: tuple[str, ...], premises: Sequence[Sequent], tactic: str = ""
    ) -> State | Refused:
        """Return the state of these sequents; closed ones are proved in the text of the move."""
        if any(len(p[0]) > MOST_HYPOTHESES or len(spelt(p)) > MOST_TOKENS for p in premises):
            return Refused("output", "the sequent is too large")
        pieces = [f"{{ {closing(p)} }}" if is_closed(p) else HOLE for p in premises]
        opened = [p for p in premises if not is_closed(p)]
        spelling = "\n".join([tactic, *pieces]).replace(f"\n{HOLE}", HOLE) if tactic else ""
        goals = [
            State(task=task, moves=(*moves, f"{n}"), key=text_of(p), env_state=p, around=("{", "}"))
            for n, p in enumerate(opened)
        ]
        return State(
            task=task,
            moves=moves,
            key="; ".join(part.key for part in goals) or "proved",
            parts=tuple(goals) if len(goals) > 1 else (),
            around=("{", "}"),
            taken=spelling,
            done=not goals,
            env_state=opened[0] if len(opened) == 1 else None,
        )


def closing(sequent: Sequent) -> str:
    hypotheses, goal = sequent
    return f"exact {name(goal)}." if goal in hypotheses else f"destruct {name(FALSE)}."


def theorem_of(task: Task) -> Sequent:
    """Return the sequent of a task of [task.propositional]."""
    formula = parse_formula(task.fields["statement"].partition(" : Prop, ")[2])
    assert formula is not None
    return (), formula


@cache
def text_of(sequent: Sequent) -> str:
    return f"{', '.join(map(str, sequent[0]))} |- {sequent[1]}"


@cache
def spelt(sequent: Sequent) -> tuple[int, ...]:
    """Return the tokens of a sequent: formulas in Polish notation, hypotheses with their numbers.

    >>> A = Formula("A")
    >>> words = {number: word for word, number in VOCABULARY.items()}
    >>> [words[token] for token in spelt(((A,), Formula("~", (A,))))]
    ['use 0', 'A', '|-', '~', 'A']
    """
    tokens: list[int] = []
    for number, hypothesis in enumerate(sequent[0][:MOST_HYPOTHESES]):
        tokens += [VOCABULARY[HYPOTHESES[number]], *_polish(hypothesis)]
    return (*tokens, VOCABULARY["|-"], *_polish(sequent[1]))


@cache
def _polish(formula: Formula) -> tuple[int, ...]:
    return (VOCABULARY[formula.sign], *(token for part in formula.parts for token in _polish(part)))


_PROVE = Prover()


@cache
def is_provable(sequent: Sequent) -> bool:
    """Decide a sequent by the calculus without contraction."""
    formula = sequent[1]
    for hypothesis in sequent[0]:
        formula = implies(hypothesis, formula)
    return _PROVE(formula) is not None


# ---------------------------------------------------------------------- the model


@dataclass
class Guide:
    """Answer the questions of searches: a prior over rules, and values, by a Llama or without one.

    prior: whether the model's probabilities are used, else all rules are equally likely. value: model, exact
    (1 if the sequent is provable, else 0), or none (1/2 for all). Draws depend on the seed and the state.
    """

    model: LlamaForCausalLM
    seed: int
    prior: bool = True
    value: str = "none"
    memory: dict[Sequent, tuple[np.ndarray, float]] = field(default_factory=dict)
    """Log-probabilities of all words, and the value, of sequents that the model has read."""

    def read(self, sequents: Sequence[Sequent]) -> None:
        """Read those that are not in the memory, in one batch of a bounded size at a time."""
        fresh = [s for s in dict.fromkeys(sequents) if s not in self.memory]
        fresh.sort(key=lambda s: len(spelt(s)))
        for start in range(0, len(fresh), 64):
            self._read(fresh[start : start + 64])

    @torch.no_grad()
    def _read(self, sequents: Sequence[Sequent]) -> None:
        rows = [[*spelt(s), VOCABULARY["ask"]] for s in sequents]
        longest = max(map(len, rows))
        ends = torch.tensor([len(r) - 1 for r in rows])
        tokens = torch.tensor([r + [0] * (longest - len(r)) for r in rows])
        states = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
        places = torch.arange(len(rows))
        moves = self.model.lm_head(states[places, ends - 1]).log_softmax(-1).double().numpy()
        sure = self.model.lm_head(states[places, ends])[:, [VOCABULARY["0"], VOCABULARY["1"]]].softmax(-1)
        for sequent, logp, value in zip(sequents, moves, sure[:, 1].tolist(), strict=True):
            self.memory[sequent] = (logp, value)

    def moves(self, question: Propose) -> list[Move]:
        """Return the next moves of a state, sampled without replacement (Gumbel top k)."""
        sequent: Sequent = question.state.env_state
        rules = moves_of(sequent)
        if not rules:
            return []
        tokens = [VOCABULARY[rule] for rule in rules]
        scores = self.memory[sequent][0][tokens] if self.prior else np.zeros(len(rules))
        logp = scores - np.logaddexp.reduce(scores)
        dice = random.Random(f"{self.seed}/{question.state.key}")
        noise = [-np.log(-np.log(dice.random())) for _ in rules]
        order = np.argsort(-(logp + noise), kind="stable")[question.first : question.first + question.count]
        return [Move(rules[n], float(logp[n]), (tokens[n],)) for n in order]

    def values(self, states: Sequence[State]) -> list[float]:
        """Return the values of states of one sequent each."""
        if self.value == "model":
            return [self.memory[state.env_state][1] for state in states]
        return [float(is_provable(s.env_state)) if self.value == "exact" else 0.5 for s in states]

    def answers(self, questions: Sequence[Sequence[Any]], world: Transitions) -> list[list[Any]]:
        """Answer the questions of several searches."""
        reads: list[Sequent] = []
        for question in (q for batch in questions for q in batch):
            if isinstance(question, Propose) and self.prior:
                reads.append(question.state.env_state)
            if isinstance(question, StateValue) and self.value == "model":
                reads += [state.env_state for state in question.states]
        self.read(reads)
        return [[self._answer(question, world) for question in batch] for batch in questions]

    def _answer(self, question: Any, world: Transitions) -> Any:
        if isinstance(question, Propose):
            return self.moves(question)
        if isinstance(question, Apply):
            return world.apply(question.asked)
        if isinstance(question, ValueTarget):
            return [Move(word := str(int(ends)), 0.0, (VOCABULARY[word],)) for ends in question.ends]
        return self.values(question.states)


def search_all(
    tasks: Sequence[Task], guide: Guide, choice: SearchChoice, lessons: int = 0, side_by_side: int = 64
) -> list[Tree]:
    """Search each task by the product's strategy, several at a time, so that the model reads in batches."""
    world, trees, start = Sequents(), dict[int, Tree](), choice.make()
    waiting = list(enumerate(tasks))[::-1]
    running: dict[int, Any] = {}
    pending: dict[int, Sequence[Any]] = {}
    answers: Mapping[int, Any] = {}
    while waiting or running:
        while waiting and len(running) < side_by_side:
            number, task = waiting.pop()
            [root] = world.begin([task])
            assert isinstance(root, State)
            search = start(root, choice.budget)
            running[number] = with_lessons(search, lessons) if lessons else search
        for number, search in list(running.items()):
            try:
                pending[number] = search.send(answers.get(number))
            except StopIteration as end:
                trees[number] = end.value
                del running[number]
                pending.pop(number, None)
        numbers = list(running)
        answers = dict(zip(numbers, guide.answers([pending[n] for n in numbers], world), strict=True))
    return [trees[number] for number in range(len(tasks))]


def new_llama(seed: int) -> LlamaForCausalLM:
    """Return a random Llama of two layers over rules and sequents."""
    torch.manual_seed(seed)
    hidden = 48
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MOST_TOKENS + 4,
        initializer_range=hidden**-0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def rows_of(tree: Tree, choice: SearchChoice, size: int = 16) -> list[SearchRow]:
    """Return the rows that a solved tree teaches: moves of its proof, and values of its states."""
    if tree.end is None:
        return []
    return [row for row in select_training_rows(tree, PROVED, choice, size) if row.move and row.text is None]


class TreeLearner:
    """Train a Llama by expert iteration on the rows of trees."""

    def __init__(self, model: LlamaForCausalLM, seed: int, lr: float = 3e-3) -> None:
        self.trainee = Trainee(model, build("expert_iteration", {}, horizon=1), lr)
        self.draw = torch.Generator().manual_seed(seed)
        self.rows: list[Any] = []

    @property
    def model(self) -> LlamaForCausalLM:
        return self.trainee.model

    def add(self, rows: Sequence[SearchRow]) -> None:
        """Keep the rows, for this and later training."""
        for lesson in rows:
            assert lesson.move
            ask = [VOCABULARY["ask"]] if lesson.asks_value else []
            tokens = [*spelt(lesson.state.env_state), *ask, *lesson.move.tokens]
            self.rows.append(row(tokens, [False] * (len(tokens) - 1) + [True], 1.0))

    def train(self, steps: int, size: int = 32, fresh: int = 0) -> None:
        """Make steps on rows of about the same length; every other step on the `fresh` newest, if any."""
        parts = [self._batch(self.rows)]
        if fresh:
            parts.append(self._batch(self.rows[-fresh:]))
        for number in range(steps if self.rows else 0):
            batch = parts[number % len(parts)]
            start = int(torch.randint(max(len(batch) - size, 0) + 1, (), generator=self.draw))
            rows = batch.rows(torch.arange(start, min(start + size, len(batch))))
            self.trainee.step(cut(rows, int(rows.length.max())))

    def _batch(self, rows: Sequence[Any]) -> Batch:
        """Return the rows as a prepared batch, the shortest first."""
        rows = sorted(rows, key=lambda row: len(row.tokens))
        return self.trainee.method.prepare(Batch.of(rows, list(range(len(rows)))))


def cut(batch: Batch, length: int) -> Batch:
    """Return a batch without the padding behind this length."""
    parts = {f.name: getattr(batch, f.name) for f in fields(batch)}
    columns: dict[str, Any] = {
        n: x[:, :length] for n, x in parts.items() if torch.is_tensor(x) and x.dim() == 2
    }
    return replace(batch, **columns)
