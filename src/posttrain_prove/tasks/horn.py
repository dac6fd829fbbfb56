"""Horn theorems to prove in Coq, whose least proof is known by construction.

Among the hypotheses, in random order, are

    facts         c0, and others that serve as second premises only
    the chain     c0 -> c1, ..., c(d-1) -> cd, where cd is the goal; some with a second premise, a fact or
                  a variable of the chain further down
    loops         cj -> ci with j > i: true, and the way back
    dead ends     u -> v where u does not follow, as it depends on variables that no fact reaches

So only the chain proves the goal in the fewest tactics, and its depth d is the difficulty. A digest of the
form up to names (chaining.py: form_digest) alone decides whether a theorem may be trained on or is held out:
no seed, size or depth moves a theorem from one split to the other.
"""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.data.protocol import Games
from posttrain.types import Task
from posttrain_prove.tasks.chaining import Clause, Theorem, form_digest, height, write_script
from posttrain_prove.tasks.drawn import Split, Theorems, collect_split, draw_in_split, pick, shuffle

OPENING = "intros."
"""The tactic before the search begins; it names the hypotheses as the statement does."""


@dataclass(frozen=True, kw_only=True)
class Horn(Theorems):
    """Size and number of the theorems.

    >>> Horn(variables=3)
    Traceback (most recent call last):
    ...
    ValueError: 3 variables and 15 hypotheses leave no room for a chain of 2, 1 facts and dead ends
    """

    variables: int = 16
    """Number of variables to draw from, at most 26: A, B, C, ..."""
    hypotheses: int = 15
    """Number of hypotheses in all."""
    facts: int = 1
    """Number of facts among the hypotheses."""
    low: int = 2
    """The least depth: implications from a fact to the goal."""
    high: int = 8
    """The greatest depth; each depth from low to high has an equal share of the theorems."""
    second: float = 0.3
    """Share of implications with a second premise, of those that can have one."""
    loops: float = 0.3
    """Share of loops among the hypotheses that do not help; the others are dead ends."""
    train: int = 4000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.variables <= 26:
            raise ValueError(f"variables must be 1 to 26, not {self.variables}")
        if self.facts < 1:
            raise ValueError(f"facts must be 1 or more, not {self.facts}")
        if not 0 <= self.second <= 1:
            raise ValueError(f"second must lie in [0, 1], not {self.second}")
        if not 0 <= self.loops < 1:
            raise ValueError(f"loops must lie in [0, 1), not {self.loops}")
        for depth in range(self.low, self.high + 1):
            others = self.hypotheses - self.facts - depth
            dead = self.variables - self.facts - depth
            # The number of clauses with one premise, so that drawing always ends.
            room = dead * (depth + 1) + (depth * (depth + 1) // 2 if self.loops or not dead else 0)
            if dead < 0 or others < 0 or others > room:
                raise ValueError(
                    f"{self.variables} variables and {self.hypotheses} hypotheses leave no room for "
                    f"a chain of {depth}, {self.facts} facts and dead ends"
                )

    def make(self, limit: int, seed: int, games: Games) -> tuple[list[Task], list[Task]]:
        """Return the tasks to train on, and at most `limit` that are only evaluated on."""
        held_out = horn("held_out", self)[:limit] if limit and self.held_out else []
        return horn("train", self), held_out


def horn(split: Split, spec: Horn, *, limit: int | None = None) -> list[Task]:
    """Return the theorems of a split, depths in turn; the first `limit` if given. No two have the same form.

    `fields` holds what the verifier `coq` needs: `gold` is a least proof, which no prompt shows, `depth` and
    `difficulty` are d, `shortest` is the number of tactics of a least proof after `opening`, the sentences
    sent first. Raises UserError if the split is empty or there are too few theorems of this size.

    >>> [task] = horn("train", Horn(variables=5, hypotheses=4, low=1, high=2), limit=1)
    >>> print(task.messages[0]["content"])
    h1 : D
    h2 : D -> A
    h3 : A -> D
    h4 : B -> D
    ======
    A
    >>> task.fields["statement"]
    'forall (A B D : Prop) (h1 : D) (h2 : D -> A) (h3 : A -> D) (h4 : B -> D), A'
    >>> task.fields["gold"], task.fields["shortest"]
    ('intros.\\napply h2.\\nexact h1.', 2)
    """
    depths = f"{spec.low} to {spec.high}"
    content = f"Horn theorems of depth {depths} for {split!r}, of {spec.hypotheses} hypotheses"
    theorems = collect_split(split, spec, limit, draw_theorem, "Horn", content)
    return [_task(theorem, spec, f"{split}-{index}") for index, theorem in theorems]


def draw_theorem(split: Split, spec: Horn, index: int) -> tuple[Theorem, str] | None:
    """Return the theorem of an index, and its form; its depth is low + index mod (high - low + 1).

    Draws until the form belongs to the split; None if no draw does, as may happen with tiny theorems. It
    takes some 200 µs for any index.
    """

    def draw(rng: random.Random) -> tuple[Theorem, str]:
        theorem = _draw(spec, spec.size(index), rng)
        return theorem, form_digest(theorem)

    return draw_in_split(split, random.Random(f"{spec.seed}/{split}/{index}"), draw)


def _draw(spec: Horn, depth: int, rng: random.Random) -> Theorem:
    """Draw a theorem of this depth."""
    names = shuffle(range(spec.variables), rng)
    chain, extra = names[: depth + 1], names[depth + 1 : depth + spec.facts]
    dead = names[depth + spec.facts :]
    clauses: set[Clause] = {((), fact) for fact in (chain[0], *extra)}
    for i in range(1, depth + 1):
        clauses.add(_draw_clause([chain[i - 1]], [*extra, *chain[: max(0, i - 1)]], chain[i], spec, rng))
    reached: list[int] = []
    """Dead variables that are premises already, from which a dead end continues."""
    while len(clauses) < spec.hypotheses:
        if not dead or rng.random() < spec.loops:
            i, j = sorted(shuffle(range(depth + 1), rng)[:2])
            clauses.add(_draw_clause([chain[j]], [*extra, *chain], chain[i], spec, rng))
        else:
            into = pick(reached if reached and rng.random() < 0.5 else chain, rng)
            premise = pick(dead, rng)
            if premise != into:
                clauses.add(_draw_clause([premise], names, into, spec, rng))
                reached.append(premise)
    return Theorem(tuple(shuffle(sorted(clauses), rng)), chain[-1])


def _draw_clause(
    premises: list[int], seconds: Sequence[int], conclusion: int, spec: Horn, rng: random.Random
) -> Clause:
    """Return a clause, by chance with one of the possible second premises."""
    others = [v for v in seconds if v not in (*premises, conclusion)]
    if others and rng.random() < spec.second:
        premises = shuffle([*premises, pick(others, rng)], rng)
    return tuple(premises), conclusion


def _task(theorem: Theorem, spec: Horn, name: str) -> Task:
    letters = string.ascii_uppercase
    lines = [
        f"h{number} : " + " -> ".join(letters[v] for v in (*premises, conclusion))
        for number, (premises, conclusion) in enumerate(theorem.clauses, 1)
    ]
    numbers = sorted({v for premises, conclusion in theorem.clauses for v in (*premises, conclusion)})
    variables = " ".join(letters[v] for v in numbers)
    goal = letters[theorem.goal]
    proof, depth = write_script(theorem), height(theorem)
    goal_text = "\n".join([*lines, "======", goal])
    return Task(
        id=f"horn-{name}",
        messages=({"role": "user", "content": spec.template.replace("{theorem}", goal_text)},),
        fields={
            "name": "goal",
            "statement": f"forall ({variables} : Prop) {' '.join(f'({line})' for line in lines)}, {goal}",
            "opening": [OPENING],
            "gold": "\n".join([OPENING, *proof]),
            "depth": depth,
            "shortest": len(proof),
            "difficulty": depth,
        },
        source="horn",
    )
