"""How a run searches: `[search]`."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

from posttrain.base.kinds import OneOf, find_kind
from posttrain.search.driver import Make, Valued
from posttrain.search.protocol import Budget
from posttrain.search.tree import Search
from posttrain.search.values import by_model, picked, taught
from posttrain.verifiers.model.verifier import RewardModel

Strategy = str


@dataclass(frozen=True, kw_only=True)
class SearchChoice:
    """How moves are searched, of a proof, of an answer's steps: a tree for each task."""

    strategy: Annotated[Strategy, OneOf("searches")] = "best_first"
    """best_first: the likeliest move that was not followed (BFS-Prover); beam; best_of_n: plain sampling,
    move by move; puct: AlphaZero's rule, by what is likely and by values; rmax: what leads to new states;
    hypertree: goals of a proof apart (HTPS)."""
    moves: int = 128
    """Moves that a search may draw, repeated ones included."""
    tokens: int = 0
    """Tokens of these moves; what is drawn beyond them is not followed. 0: any number."""
    seconds: float = 0.0
    """That a search may take, with all that is searched beside it; 0: any. Trees then depend on the clock."""
    depth: int = 32
    """Moves from the start to a state."""
    width: int = 8
    """Moves that a state says at a time. With all but beam and best_of_n it may say more later."""
    keep: int = 8
    """States that a beam keeps at each depth."""
    alpha: float = 0.5
    """A way of L moves has the score Σ log π / L^alpha."""
    c: float = 1.25
    """How much puct, and a hypertree with values, goes by what is likely, against what it has found."""
    values: bool = False
    """The policy is asked how likely a state is to end well, which puct and hypertree go by, and learns
    it from its trees with any strategy, in the rows that a proof leaves of rollout.group_size."""
    value_model: RewardModel | None = None
    """A reward model that says what the steps of an answer so far are worth, as [search.value_model] with
    `paths` and `kind = "process"`; steps are told by search.separator. It guides the search (best_of_n it
    ranks alone); the budget is then spent whole, and the answer is the end that it finds best."""
    learn: Literal["proof", "moves", "visits"] = "proof"
    """proof: the moves of the way that was found, all worth the same. moves: those that one state said when
    it was first asked, worth the verdict if a way to the end goes on from them and 0 otherwise; methods that
    compare (GRPO, online DPO) learn from these. It is the state on the way whose moves differ most. visits:
    those of the states that puct or a hypertree with values visited most, each worth its share of the
    visits, of trees that ended well; reinforce makes of that AlphaZero's cross-entropy."""
    surest: float = 1.0
    """Moves of a proof that the policy says with more than this probability are not learnt; 1: all are.
    Learning again what is known takes from the policy what else it might say, and so from the search."""
    sketches: int = 0
    """Of hypertree in Coq: how many sketches a theorem, and what a sketch leaves out, is asked for before its
    first move: tactics with lemmas (`assert`) and `hole.` for each proof that is left out, which is searched
    apart. A sketch counts as a move."""
    sketch_tokens: int = 256
    """Tokens of a sketch."""
    nested: int = 2
    """Sketches within one another."""
    timeout_s: int = 2
    """Seconds that one tactic may take in Coq; Lean counts what it does, and goes by no clock."""
    separator: str = "\n"
    """What ends a step of an answer, where moves are such steps."""

    def __post_init__(self) -> None:
        Budget(moves=self.moves, tokens=self.tokens, depth=self.depth, seconds=self.seconds)
        if min(self.width, self.keep, self.timeout_s) < 1:
            raise ValueError("width, keep and timeout_s must be 1 or more")
        if not 0 < self.surest <= 1:
            raise ValueError("surest must lie in (0, 1]")
        if min(self.alpha, self.c) < 0:
            raise ValueError("alpha and c must be 0 or more")
        if not self.separator:
            raise ValueError("separator must not be empty")
        if min(self.sketch_tokens, self.nested) < 1 or self.sketches < 0:
            raise ValueError("sketch_tokens and nested must be 1 or more, sketches 0 or more")
        if self.value_model and (self.values or self.strategy in ("rmax", "hypertree")):
            what = "values = true" if self.values else f"strategy = {self.strategy!r}"
            raise ValueError(f"a value_model goes with no {what}")
        if self.value_model and self.value_model.separator not in ("\n\n", self.separator):
            raise ValueError("steps are told by search.separator; leave that of value_model out")
        if self.learn == "moves" and self.width < 2:
            raise ValueError(
                "learn = 'moves' compares moves that are asked for together: width must be above 1"
            )
        visiting = self.strategy == "puct" or (self.strategy == "hypertree" and self.values)
        if self.learn == "visits" and not visiting:
            raise ValueError("learn = 'visits' goes with puct, or a hypertree with values")

    @property
    def asks_sketches(self) -> bool:
        """Whether sketches are asked for."""
        return self.sketches > 0 and self.strategy == "hypertree"

    @property
    def budget(self) -> Budget:
        """What a search may spend."""
        return Budget(moves=self.moves, tokens=self.tokens, depth=self.depth, seconds=self.seconds)

    def make(self, lessons: int = 0) -> Make:
        """Begins a search from a root and a budget, which teaches the values of so many states at most."""
        width, guided = self.width, self.value_model is not None
        values = self.values or guided
        settings = {"width": width, "keep": self.keep, "alpha": self.alpha, "c": self.c, "values": values}
        settings |= {"sketches": self.sketches, "nested": self.nested}
        strategy: Callable[..., Search] = find_kind("searches", self.strategy, "search.strategy").load()
        taken = inspect.signature(strategy).parameters
        begin = partial(strategy, **{key: value for key, value in settings.items() if key in taken})
        if guided:
            return lambda root, budget: picked(begin(root, budget, compares=True))
        if not (self.values and lessons):
            return begin
        return lambda root, budget: taught(begin(root, budget), lessons)

    def valued(self) -> Valued | None:
        """What says values in the policy's place."""
        model = self.value_model
        if model and model.kind == "process":
            model = replace(model, separator=self.separator)
        return by_model(model) if model else None
