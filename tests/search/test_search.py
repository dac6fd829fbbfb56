"""Searches on finite worlds: what they expand, what they find, and that they find it exactly where it is."""

import random
from dataclasses import dataclass, field
from functools import partial
from math import exp, log

import pytest

from posttrain.search.best_first import beam, best_first, best_of_n
from posttrain.search.protocol import Apply, Budget, Move, Propose, Refused, State, Value
from posttrain.search.puct import puct, rmax
from posttrain.search.tree import Tree
from posttrain.types import Task

TASK = Task(id="toy", messages=({"role": "user", "content": "toy"},))


@dataclass
class Toy:
    """Nodes 0 ... n - 1 with moves between them; each move has a probability, and node `goal` is the end.

    A move that leads to None is refused.
    """

    moves: dict[int, dict[str, tuple[float, int | None]]]
    goal: int
    values: dict[int, float] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Moves in the order in which they were followed."""

    def state(self, number: int, moves: tuple[str, ...] = ()) -> State:
        return State(task=TASK, moves=moves, key=str(number), done=number == self.goal)

    def begin(self, tasks):
        return [self.state(0) for _ in tasks]

    def apply(self, asked):
        out = []
        for state, move in asked:
            self.asked.append(move)
            to = self.moves[int(state.key)][move][1]
            out.append(Refused("error") if to is None else self.state(to, (*state.moves, move)))
        return out

    def close(self):
        pass

    def says(self, state: State, first: int, count: int) -> list[Move]:
        """The moves of a state, the likeliest first, each once."""
        known = sorted(self.moves.get(int(state.key), {}).items(), key=lambda each: -each[1][0])
        return [Move(text, log(p)) for text, (p, _) in known[first : first + count]]

    def value(self, states):
        return [self.values.get(int(state.key), 0.0) for state in states]


def solved(search, toy: Toy) -> Tree:
    """The tree of a search that is answered by a toy world."""
    try:
        questions = next(search)
        while True:
            answers = []
            for q in questions:
                if isinstance(q, Propose):
                    answers.append(toy.says(q.state, q.first, q.count))
                elif isinstance(q, Apply):
                    answers.append(toy.apply(q.asked))
                else:
                    assert isinstance(q, Value)
                    answers.append(toy.value(q.states))
            questions = search.send(answers)
    except StopIteration as end:
        return end.value


def random_toy(seed: int, size: int = 12) -> Toy:
    """A graph with circles, dead ends and refused moves; the goal may or may not be reachable."""
    dice = random.Random(seed)
    moves = {}
    for node in range(size - 1):
        count = dice.randint(1, 4)
        weights = [dice.random() + 0.05 for _ in range(count)]
        moves[node] = {
            f"{node}-{k}": (w / sum(weights) * 0.999, dice.choice([None, *range(size)]))
            for k, w in enumerate(weights)
        }
    return Toy(moves, goal=size - 1)


def reachable(toy: Toy) -> bool:
    """Whether the goal can be reached, by going everywhere."""
    ahead, seen = [0], {0}
    while ahead:
        for _, to in toy.moves.get(ahead.pop(), {}).values():
            if to is not None and to not in seen:
                seen.add(to)
                ahead.append(to)
    return toy.goal in seen


UNBOUNDED = Budget(moves=100_000, depth=1000)


COMPLETE = {
    "best_first": best_first,
    "narrow": partial(best_first, width=1),
    "puct": puct,
    "puct without values": partial(puct, values=False),
    "rmax": rmax,
}


@pytest.mark.parametrize("name", COMPLETE)
def test_without_a_budget_a_search_solves_exactly_what_can_be_solved(name):
    found = 0
    for seed in range(200):
        toy = random_toy(seed)
        tree = solved(COMPLETE[name](toy.state(0), UNBOUNDED), toy)
        assert (tree.solved is not None) == reachable(toy), f"seed {seed}"
        if tree.solved:
            found += 1
            at = 0  # the way is one
            for edge in tree.path(tree.solved):
                at = toy.moves[at][edge.move.text][1]
            assert at == toy.goal
        assert len({node.state.key for node in tree.nodes}) == len(tree.nodes), "equal keys are one node"
    assert 40 < found < 160


def paths(toy: Toy, depth: int) -> list[tuple[float, list[str]]]:
    """All ways of at most so many moves, with their Σ log π."""
    found, ahead = [], [(0.0, [], 0)]
    while ahead:
        logp, way, node = ahead.pop()
        for text, (p, to) in toy.moves.get(node, {}).items():
            found.append((logp + log(p), [*way, text]))
            if to is not None and len(way) + 1 < depth:
                ahead.append((logp + log(p), [*way, text], to))
    return found


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_best_first_asks_states_in_the_exact_order_of_their_scores(alpha):
    """On a tree that says everything at once: each state asked is the best of those that could be."""
    moves, count = {}, 1
    for node in range(13):
        moves[node] = {f"m{count + k}": ((0.5, 0.3, 0.2)[k], count + k) for k in range(3)}
        count += 3
    toy = Toy(moves, goal=-1)
    solved(best_first(toy.state(0), UNBOUNDED, width=3, alpha=alpha), toy)
    ways = {
        toy.moves[0][way[0]][1] if len(way) == 1 else int(way[-1][1:]): (logp, way)
        for logp, way in paths(toy, 99)
    }
    score = {node: logp / (len(way) + 1) ** alpha for node, (logp, way) in ways.items()} | {0: 0.0}
    asked = [int(moves[0][1:]) // 3 for moves in zip(*[iter(toy.asked)] * 3, strict=True)]
    assert sorted(asked) == list(range(13))
    open_ = {0}
    for node in asked:
        assert score[node] == pytest.approx(max(score[each] for each in open_))
        open_ = (open_ - {node}) | {to for _, to in moves_of(toy, node)}


def moves_of(toy: Toy, node: int) -> list[tuple[str, int]]:
    return [(text, to) for text, (_, to) in toy.moves[node].items() if to is not None and to in toy.moves]


def test_what_a_state_has_not_said_waits_under_the_probability_that_is_left():
    """A move of 1 % is found, behind all that is likelier than that, and not cut off by the width."""
    likely = {f"a{k}": (0.33, None) for k in range(3)}
    toy = Toy({0: likely | {"rare": (0.00999, 1)}}, goal=1)
    tree = solved(best_first(toy.state(0), UNBOUNDED, width=2), toy)
    assert tree.solved
    assert toy.asked == ["a0", "a1", "a2", "rare"]
    assert tree.drawn == 4
    [edge] = tree.path(tree.solved)
    assert tree.nodes[0].unsaid == pytest.approx(1 - 0.99 - 0.00999)
    assert exp(edge.move.logp) == pytest.approx(0.00999)


def test_puct_goes_where_values_are_best():
    """Exact values and a prior that is against it: most visits go to the better arm, as in a bandit."""
    chain = {n: {f"m{n}": (0.99999, n + 1)} for n in range(2, 40)}
    toy = Toy({0: {"worse": (0.8, 100), "better": (0.19999, 2)}, **chain}, goal=-1)
    toy.moves |= {n: {f"w{n}": (0.99999, n + 1)} for n in range(100, 140)}
    toy.values = dict.fromkeys(range(2, 42), 0.9) | dict.fromkeys(range(100, 142), 0.1)
    tree = solved(puct(toy.state(0), Budget(moves=30, depth=1000), width=2), toy)
    visits = {text: edge.visits for text, edge in tree.nodes[0].edges.items()}
    assert visits["better"] > 2 * visits["worse"]


def test_rmax_is_paid_for_new_states_only():
    """One arm leads in a circle of states that are known, the other to new ones: it leaves the circle."""
    ring = {1: {"ab": (0.99999, 2)}, 2: {"ba": (0.99999, 1)}}
    line = {n: {f"l{n}": (0.99999, n + 1)} for n in range(10, 40)}
    toy = Toy({0: {"ring": (0.9, 1), "line": (0.09999, 10)}, **ring, **line}, goal=-1)
    tree = solved(rmax(toy.state(0), Budget(moves=25, depth=1000), width=2), toy)
    assert {node.state.key for node in tree.nodes} >= {str(n) for n in range(10, 25)}


@pytest.mark.parametrize("name", ["best_first", "puct", "rmax", "beam", "best_of_n"])
def test_no_search_draws_more_than_its_budget(name):
    searches = COMPLETE | {"beam": beam, "best_of_n": best_of_n}
    for seed in range(60):
        toy = random_toy(seed, size=30)
        for moves, depth in ((1, 3), (7, 2), (20, 30)):
            tree = solved(searches[name](toy.state(0), Budget(moves=moves, depth=depth)), toy)
            assert tree.drawn <= moves
            assert tree.depth <= depth
            assert tree.drawn == sum(each.said for node in tree.nodes for each in node.edges.values())
            assert tree.applied == len(toy.asked)
            toy.asked.clear()


def test_a_beam_that_keeps_everything_reaches_every_state_of_its_depth():
    for seed in range(60):
        toy = random_toy(seed)
        tree = solved(beam(toy.state(0), UNBOUNDED, width=10, keep=100), toy)
        assert (tree.solved is not None) == reachable(toy), f"seed {seed}"


def test_a_move_back_to_where_one_came_from_leads_nowhere():
    toy = Toy(
        {0: {"on": (0.99999, 1)}, 1: {"back": (0.6, 0), "on2": (0.39999, 2)}, 2: {"up": (0.99999, 1)}}, 9
    )
    tree = solved(best_first(toy.state(0), UNBOUNDED), toy)
    assert dict(tree.refused) == {"repeated": 2}
    assert [node.state.key for node in tree.nodes] == ["0", "1", "2"]
