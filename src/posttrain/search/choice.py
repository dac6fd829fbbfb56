"""The configuration of searches: `[search]` of a recipe."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

from posttrain.base.kinds import OneOf, find_kind
from posttrain.search.driver import ScoreStates, StartSearch
from posttrain.search.protocol import Budget
from posttrain.search.tree import Search
from posttrain.search.values import by_model, with_best_end, with_lessons
from posttrain.verifiers.model.verifier import RewardModel

Strategy = str


@dataclass(frozen=True, kw_only=True)
class SearchChoice:
    """How moves are searched, of a proof, of the steps of an answer, or of turns: a tree for each task."""

    strategy: Annotated[Strategy, OneOf("searches")] = "best_first"
    """best_first: the likeliest move that was not followed (BFS-Prover); beam; best_of_n: plain sampling,
    move by move; puct: AlphaZero's rule, by probabilities and values; rmax: moves that lead to new states;
    hypertree: goals of a proof separately (HTPS)."""
    moves: int = 128
    """Moves that a search may draw, repeated ones included."""
    tokens: int = 0
    """Tokens of these moves; a move beyond them is not followed. 0: any number."""
    seconds: float = 0.0
    """Seconds that a search may take, concurrent ones included; 0: any. Trees then depend on the clock."""
    depth: int = 32
    """Moves from the start to a state."""
    width: int = 8
    """Moves drawn in a state at a time. All strategies but beam and best_of_n may draw more later."""
    keep: int = 8
    """States that a beam keeps at each depth."""
    alpha: float = 0.5
    """A path of L moves has the score Σ log π / L^alpha."""
    c: float = 1.25
    """Weight of probabilities against values, in puct and in a hypertree with values."""
    values: bool = False
    """Let the policy predict how likely a state is to end well. puct and hypertree use the prediction; with
    any strategy the policy learns it from its trees, in the rows of rollout.group_size that a proof does not
    use."""
    value_model: RewardModel | None = None
    """A reward model whose score is the value of a state, as [search.value_model] with `paths` and
    `kind = "process"`. Of an answer it reads the steps so far, which search.separator separates: it guides
    the search (with best_of_n it only ranks the ends), which always spends its budget, and the answer is the
    end with the best score. Of a proof it reads the theorem and the goals, with puct and hypertree."""
    learn: Literal["proof", "moves", "visits"] = "proof"
    """proof: train on the moves of the solution, all with the same score. moves: train on the moves that one
    state drew first, with the verdict if a path to the end continues from them and 0 otherwise; methods that
    compare (GRPO, online DPO) learn from these. It is the state on the path whose moves differ most. visits:
    train on the moves of the states that puct or a hypertree with values visited most, each with its share of
    the visits, in trees that ended well; reinforce makes of this AlphaZero's cross-entropy."""
    surest: float = 1.0
    """Do not train on moves of a proof with more probability than this; 1: train on all. Training again on
    known moves lowers the probability of all others, and so narrows the search."""
    sketches: int = 0
    """For hypertree in Coq: sketches drawn for a theorem, and for each goal that a sketch leaves open, before
    its first move. A sketch consists of tactics with lemmas (`assert`), and `hole.` in place of each proof
    that is left out, which is then searched separately. A sketch counts as a move."""
    sketch_tokens: int = 256
    """Largest number of tokens of a sketch."""
    nested: int = 2
    """Largest number of sketches within one another."""
    timeout_s: int = 2
    """Seconds that one tactic may take in Coq; Lean counts its work and does not depend on a clock."""
    separator: str = "\n"
    """Text that ends a step of an answer, where moves are such steps."""

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
        if self.value_model and (self.values or self.strategy == "rmax"):
            setting = "values = true" if self.values else f"strategy = {self.strategy!r}"
            raise ValueError(f"a value_model cannot be combined with {setting}")
        if self.value_model and self.value_model.separator not in ("\n\n", self.separator):
            raise ValueError("search.separator separates the steps; leave out the separator of value_model")
        if self.learn == "moves" and self.width < 2:
            raise ValueError("learn = 'moves' compares moves that are drawn together: width must be above 1")
        if self.learn == "visits" and not self.walks:
            raise ValueError("learn = 'visits' needs puct, or a hypertree with values")

    @property
    def asks_sketches(self) -> bool:
        """Return True if sketches are drawn."""
        return self.sketches > 0 and self.strategy == "hypertree"

    @property
    def walks(self) -> bool:
        """Return True if PUCT selects states."""
        has_values = self.values or self.value_model is not None
        return self.strategy == "puct" or (self.strategy == "hypertree" and has_values)

    @property
    def budget(self) -> Budget:
        """The limits that end a search."""
        return Budget(moves=self.moves, tokens=self.tokens, depth=self.depth, seconds=self.seconds)

    def make(self, lessons: int = 0, judges: bool = True) -> StartSearch:
        """Return a function that starts a search from a root and a budget, with at most `lessons` lessons.

        judges: whether ends are known to be right (Transitions.judges); else a value model compares them.
        """
        compares = self.value_model is not None and not judges
        settings = {"width": self.width, "keep": self.keep, "alpha": self.alpha, "c": self.c}
        settings |= {"values": self.values or self.value_model is not None}
        settings |= {"sketches": self.sketches, "nested": self.nested}
        strategy: Callable[..., Search] = find_kind("searches", self.strategy, "search.strategy").load()
        parameters = inspect.signature(strategy).parameters
        begin = partial(strategy, **{key: value for key, value in settings.items() if key in parameters})
        if compares:
            return lambda root, budget: with_best_end(begin(root, budget, compares=True))
        if not (self.values and lessons):
            return begin
        return lambda root, budget: with_lessons(begin(root, budget), lessons)

    def state_scorer(self, judges: bool = True) -> ScoreStates | None:
        """Return the function that scores states in the policy's place, if any."""
        model = self.value_model
        if model and model.kind == "process" and not judges:
            model = replace(model, separator=self.separator)
        return by_model(model) if model else None
