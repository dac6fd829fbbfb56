"""Searches on finite worlds: what they expand, what they find, and that they find it exactly where it is."""

import random
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, log, prod

import pytest

from posttrain.search.protocol import Apply, Budget, Move, Propose, Refused, State, StateValue
from posttrain.search.strategies.best_first import beam, best_first, best_of_n
from posttrain.search.strategies.hypertree import hypertree
from posttrain.search.strategies.puct import puct, rmax
from posttrain.search.tree import Tree
from posttrain.search.values import with_best_end
from posttrain.types import Task

TASK = Task(id="toy", messages=({"role": "user", "content": "toy"},))


@dataclass
class Toy:
    """Nodes 0 ... n - 1 with moves between them; each move has a probability, and node `goal` is the end.

    A move that leads to None is refused; of several nodes all have to be ended, the first one first.
    """

    moves: dict[int, dict[str, tuple[float, int | tuple[int, ...] | None]]]
    goal: int
    values: dict[int, float] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Moves in the order in which they were followed."""

    def left(self, to: int | tuple[int, ...]) -> tuple[int, ...]:
        """The nodes that are still to be ended."""
        return tuple(n for n in ((to,) if isinstance(to, int) else to) if n != self.goal)

    def state(self, to: int | tuple[int, ...], moves: tuple[str, ...] = ()) -> State:
        left = self.left(to)
        alone = [State(task=TASK, moves=(*moves, f"({k}"), key=str(n)) for k, n in enumerate(left)]
        return State(
            task=TASK,
            moves=moves,
            key="+".join(map(str, left)) or str(self.goal),
            parts=tuple(alone) if len(left) > 1 else (),
            around=("(", ")"),
            done=not left,
        )

    def begin(self, tasks):
        return [self.state(0) for _ in tasks]

    def apply(self, asked):
        out = []
        for state, move in asked:
            self.asked.append(move)
            first, *others = nodes_of(state)
            to = self.moves[first][move][1]
            on = () if to is None else (*self.left(to), *others)
            out.append(Refused("error") if to is None else self.state(on, (*state.moves, move)))
        return out

    def close(self):
        pass

    def says(self, state: State, first: int, count: int) -> list[Move]:
        """The moves of a state, the likeliest first, each once."""
        known = sorted(self.moves.get(nodes_of(state)[0], {}).items(), key=lambda each: -each[1][0])
        return [Move(text, log(p)) for text, (p, _) in known[first : first + count]]

    def value(self, states):
        return [prod(self.values.get(n, 0.0) for n in nodes_of(state)) for state in states]


def nodes_of(state: State) -> list[int]:
    return [int(n) for n in state.key.split("+")]


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
                    assert isinstance(q, StateValue)
                    answers.append(toy.value(q.states))
            questions = search.send(answers)
    except StopIteration as end:
        return end.value


def random_toy(seed: int, size: int = 12, parts: float = 0.0) -> Toy:
    """A graph with circles, dead ends and refused moves; the goal may or may not be reachable.

    parts: the share of moves that have two nodes to be ended.
    """
    dice = random.Random(seed)
    moves = {}
    for node in range(size - 1):
        count = dice.randint(1, 4)
        weights = [dice.random() + 0.05 for _ in range(count)]
        moves[node] = {
            f"{node}-{k}": (w / sum(weights) * 0.999, dice.choice([None, *range(size)]))
            for k, w in enumerate(weights)
        }
        for text, (p, _) in list(moves[node].items()) if parts else ():
            if dice.random() < parts:
                moves[node][text] = (p, (dice.randrange(size), dice.randrange(size)))
    return Toy(moves, goal=size - 1)


def reachable(toy: Toy, start: int = 0) -> bool:
    """Whether the goal can be reached, by going everywhere."""
    ahead, seen = [start], {start}
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
    "hypertree": hypertree,
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
            for edge in tree.found:
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
    [edge] = tree.found
    assert tree.nodes[0].remaining == pytest.approx(1 - 0.99 - 0.00999)
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


def test_puct_begins_with_what_is_likely_in_whatever_order_moves_are_drawn():
    class Drawn(Toy):
        def says(self, state: State, first: int, count: int) -> list[Move]:
            return super().says(state, first, count)[::-1]

    toy = Drawn({0: {"likely": (0.9, 1), "rare": (0.09999, 2)}}, goal=-1)
    solved(puct(toy.state(0), Budget(moves=2, depth=1000), width=2), toy)
    assert toy.asked[0] == "likely"


def test_rmax_is_paid_for_new_states_only():
    """One arm leads in a circle of states that are known, the other to new ones: it leaves the circle."""
    ring = {1: {"ab": (0.99999, 2)}, 2: {"ba": (0.99999, 1)}}
    line = {n: {f"l{n}": (0.99999, n + 1)} for n in range(10, 40)}
    toy = Toy({0: {"ring": (0.9, 1), "line": (0.09999, 10)}, **ring, **line}, goal=-1)
    tree = solved(rmax(toy.state(0), Budget(moves=25, depth=1000), width=2), toy)
    assert {node.state.key for node in tree.nodes} >= {str(n) for n in range(10, 25)}


@pytest.mark.parametrize("name", ["best_first", "puct", "rmax", "beam", "best_of_n", "hypertree"])
def test_no_search_draws_more_than_its_budget(name):
    searches = COMPLETE | {"beam": beam, "best_of_n": best_of_n}
    for seed in range(60):
        toy = random_toy(seed, size=30)
        for moves, depth in ((1, 3), (7, 2), (20, 30)):
            tree = solved(searches[name](toy.state(0), Budget(moves=moves, depth=depth)), toy)
            assert tree.drawn <= moves
            assert tree.depth <= depth
            assert tree.drawn == sum(each.draws for node in tree.nodes for each in node.edges.values())
            assert tree.applied == len(toy.asked)
            toy.asked.clear()


@pytest.mark.parametrize("name", ["best_first", "puct", "rmax", "beam", "best_of_n", "hypertree"])
def test_a_search_draws_and_follows_nothing_more_once_its_time_is_over(name):
    searches = COMPLETE | {"beam": beam, "best_of_n": best_of_n}
    for seed in range(30):
        toy, asked = random_toy(seed, size=30), [0]

        def late(asked=asked) -> bool:
            asked[0] += 1
            return asked[0] > 12

        trees = []
        # Its `late` is asked between walks, or where others have had a round of moves followed.
        round_ = 1 if name in ("puct", "rmax") else 16
        slow = random_toy(seed, size=60)
        budget = replace(UNBOUNDED, late=lambda slow=slow: len(slow.asked) >= 6)
        tree = solved(searches[name](slow.state(0), budget, width=4), slow)
        assert tree.applied < 6 + round_, f"seed {seed}"
        for given in (late, None):
            budget = replace(UNBOUNDED, moves=400, late=given)
            trees.append(solved(searches[name](toy.state(0), budget, width=2), toy))
        assert trees[0].drawn <= trees[1].drawn
        assert trees[0].drawn <= 2 * 12 * 2, f"seed {seed}"


@pytest.mark.parametrize("name", [*COMPLETE, "beam", "best_of_n"])
def test_what_is_drawn_beyond_the_tokens_or_the_time_is_not_followed(name):
    searches = COMPLETE | {"beam": beam, "best_of_n": best_of_n}
    for seed in range(20):
        toy = random_toy(seed, size=30)
        says = toy.says
        toy.says = lambda *asked, says=says: [replace(move, tokens=(1, 2, 3)) for move in says(*asked)]
        for tokens in (1, 7, 20):
            toy.asked.clear()
            solved(searches[name](toy.state(0), Budget(moves=99, tokens=tokens, depth=9)), toy)
            assert len(toy.asked) <= tokens // 3, f"seed {seed}"
        spoken = []
        toy.says = lambda *asked, says=says, spoken=spoken: spoken.append(asked) or says(*asked)
        toy.asked.clear()
        budget = replace(UNBOUNDED, late=lambda spoken=spoken: bool(spoken))
        assert solved(searches[name](toy.state(0), budget), toy).drawn
        assert not toy.asked


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


# ---------------------------------------------------------------------- ends that are compared


@dataclass
class Ends(Toy):
    """A tree with several ends, each worth its value."""

    def left(self, to):
        return (to,)

    def state(self, to, moves=()):
        [node] = to if isinstance(to, tuple) else (to,)
        return State(task=TASK, moves=moves, key=str(node), done=node not in self.moves)


def random_ends(seed: int) -> Ends:
    """A random tree of at most four levels; every node has a value, an end's being what counts."""
    dice, moves, ahead, count = random.Random(seed), {}, [(0, 0)], 1
    while ahead:
        node, depth = ahead.pop()
        if depth == 4 or (depth and dice.random() < 0.2):
            continue
        weights = [dice.random() + 0.05 for _ in range(dice.randint(1, 3))]
        moves[node] = {
            f"m{count + k}": (w / sum(weights) * 0.99999, count + k) for k, w in enumerate(weights)
        }
        ahead += [(count + k, depth + 1) for k in range(len(weights))]
        count += len(weights)
    return Ends(moves, goal=-1, values={node: dice.random() for node in range(count)})


COMPARING = {
    "best_first": partial(best_first, width=2, compares=True),
    "beam": partial(beam, width=3, keep=1000, compares=True),
    "puct": partial(puct, width=2, compares=True),
}


@pytest.mark.parametrize("name", COMPARING)
def test_without_a_budget_the_best_of_all_ends_is_taken(name):
    for seed in range(60):
        toy = random_ends(seed)
        tree = solved(with_best_end(COMPARING[name](toy.state(0), UNBOUNDED)), toy)
        ends = {
            n: toy.values[n] for edges in toy.moves.values() for _, n in edges.values() if n not in toy.moves
        }
        assert tree.end, f"seed {seed}"
        assert int(tree.end.key) == max(ends, key=ends.get), f"seed {seed}"
        assert {int(node.state.key) for node in tree.ends} == set(ends), f"seed {seed}"
        assert [edge.move.text for edge in tree.found] == list(tree.end.moves)


def test_ways_that_are_sampled_are_compared_by_their_ends_and_spend_the_budget():
    class Sampled(Ends):
        def says(self, state, first, count):
            dice, known = random.Random(f"{state.key}-{first}"), self.moves[int(state.key)]
            drawn = dice.choices(list(known), [p for p, _ in known.values()], k=count)
            return [Move(text, log(known[text][0])) for text in drawn]

    many = (toy for toy in map(random_ends, range(60)) if len(toy.values) - len(toy.moves) > 8)
    toy = Sampled(**vars(next(many)))
    tree = solved(with_best_end(best_of_n(toy.state(0), Budget(moves=40), width=3, compares=True)), toy)
    assert tree.drawn == 40
    assert len(tree.ends) > 2
    assert tree.end.key == max(tree.ends, key=lambda node: toy.values[int(node.state.key)]).state.key


def test_a_guided_search_goes_where_values_are_best_and_not_where_it_is_likely():
    """Of a tree that says all at once each state asked has the greatest value of those that could be."""
    moves, count = {}, 1
    for node in range(13):
        moves[node] = {f"m{count + k}": ((0.5, 0.3, 0.2)[k], count + k) for k in range(3)}
        count += 3
    dice = random.Random(5)
    toy = Ends(moves, goal=-1, values={n: dice.random() for n in range(count)})
    solved(best_first(toy.state(0), UNBOUNDED, width=3, compares=True), toy)
    asked = [(int(first[1:]) - 1) // 3 for first, *_ in zip(*[iter(toy.asked)] * 3, strict=True)]
    open_ = {0}
    for node in asked:
        assert node == max(open_, key=lambda each: toy.values[each])
        open_ = (open_ - {node}) | {to for _, to in moves_of(toy, node)}
    assert sorted(asked) == list(range(13))

    kept = solved(beam(toy.state(0), UNBOUNDED, width=3, keep=1, compares=True), toy)
    at = 0
    while at in toy.moves:  # a beam of one is the greedy way
        at = max((to for _, to in toy.moves[at].values()), key=lambda n: toy.values[n])
        assert str(at) in {node.state.key for node in kept.nodes}
    assert len(kept.nodes) == 1 + 3 * max(node.depth for node in kept.nodes)


# ---------------------------------------------------------------------- hypertree: parts


def provable(toy: Toy) -> set[int]:
    """The nodes that can be ended: the least set that has a node where it has all that a move leads to."""
    found, grows = {toy.goal}, True
    while grows:
        grows = False
        for node, moves in toy.moves.items():
            ends = any(to is not None and set(toy.left(to)) <= found for _, to in moves.values())
            if ends and node not in found:
                found, grows = found | {node}, True
    return found


def replays(toy: Toy, text: str) -> bool:
    """Whether this ends node 0: a move is for the first node, and brackets hold what is said of one alone."""
    goals, outside = [0], []
    for line in text.split("\n"):
        if line == "(":
            outside.append(goals[1:])
            goals = goals[:1]
        elif line == ")":
            if goals:
                return False
            goals = outside.pop()
        else:
            to = toy.moves[goals[0]][line][1]
            goals = [*toy.left(to), *goals[1:]]
    return not goals and not outside


PARTED = {
    "hypertree": hypertree,
    "narrow": partial(hypertree, width=1),
    "with values": partial(hypertree, values=True, width=2),
}


@pytest.mark.parametrize("name", PARTED)
def test_without_a_budget_a_hypertree_proves_exactly_what_can_be_proved(name):
    """With circles and shared parts, and whatever its values say."""
    found, shared = 0, 0
    for seed in range(300):
        toy = random_toy(seed, parts=0.5)
        toy.values = {n: random.Random(seed + n).random() for n in range(12)}
        tree = solved(PARTED[name](toy.state(0), UNBOUNDED), toy)
        assert (tree.solved is not None) == (0 in provable(toy)), f"seed {seed}"
        assert len({node.state.key for node in tree.nodes}) == len(tree.nodes), "equal keys are one node"
        parts = [part.number for node in tree.nodes for part in node.parts]
        shared += len(parts) - len(set(parts))
        if tree.solved:
            found += 1
            assert replays(toy, tree.end.text), f"seed {seed}"
            assert tree.end.done
            assert len({id(edge) for edge in tree.found}) == len(tree.found)
            assert {edge.move.text for edge in tree.found} == set(tree.end.text.split("\n")) - {"(", ")"}
    assert 60 < found < 240
    assert shared > 100


def test_a_part_that_leads_back_proves_nothing_by_itself_and_something_by_another_way():
    """1 is ended by way of 2, which leads back to 1, or ends: a circle that has to be gone through once."""
    both = {
        0: {"both": (0.99999, (1, 2))},
        1: {"on": (0.99999, 2)},
        2: {"back": (0.9, 1), "end": (0.09999, 9)},
    }
    tree = solved(hypertree(Toy(both, 9).state(0), UNBOUNDED, width=1), Toy(both, 9))
    assert tree.end.text.split("\n") == ["both", "(", "on", "end", ")", "(", "end", ")"]
    assert [edge.move.text for edge in tree.found] == ["both", "on", "end"], "each is learnt from once"
    circle = both | {2: {"back": (0.9, 1), "apart": (0.09999, (1, 2))}}
    tree = solved(hypertree(Toy(circle, 9).state(0), UNBOUNDED), Toy(circle, 9))
    assert not tree.solved


def chances(toy: Toy, to: int | tuple[int, ...]) -> float:
    """How likely moves that are drawn one after the other end all of these: over every way, no circles."""
    first, *others = toy.left(to) or (None,)
    if first is None:
        return 1.0
    moves = toy.moves.get(first, {}).values()
    return sum(p * chances(toy, (*toy.left(to), *others)) for p, to in moves if to is not None)


def test_what_parts_are_worth_is_the_chance_that_all_of_them_end():
    """With exact values of states that are one: enumerated for all parts together, over every way."""
    checked = 0
    for seed in range(60):
        toy = random_toy(seed, size=7, parts=0.6)
        for node, moves in toy.moves.items():  # on only, so that all ways can be listed
            for text, (p, to) in moves.items():
                on = to if to is None else tuple(n for n in toy.left(to) if n > node) or toy.goal
                moves[text] = (p, on)
        toy.values = {node: chances(toy, node) for node in toy.moves}
        tree = solved(hypertree(toy.state(0), Budget(moves=60), values=True), toy)
        for node in tree.nodes:
            expected = chances(toy, tuple(nodes_of(node.state)))
            assert node.value == pytest.approx(expected, rel=1e-9, abs=1e-12), f"seed {seed}"
            checked += len(node.parts) > 1
    assert checked > 30


def arms(probabilities: list[float], length: int = 60) -> Toy:
    """Moves of these probabilities, each to a chain of its own that does not end: 100, 101, ...; 200, ..."""
    moves = {0: {f"arm{k}": (p, 100 * k) for k, p in enumerate(probabilities, start=1)}}
    for k in range(1, len(probabilities) + 1):
        moves |= {n: {f"m{n}": (0.99999, n + 1)} for n in range(100 * k, 100 * k + length)}
    return Toy(moves, goal=-1)


def test_values_of_parts_say_where_a_hypertree_goes():
    """Parts of 0.9 and 0.1 are worth less than one state of 0.5, though one of them is worth more."""
    toy = arms([0.4, 0.3, 0.29999])
    toy.moves[0] = {"parts": (0.6, (100, 200)), "one": (0.39999, 300)}
    toy.values = {100 * k + n: w for k, w in ((1, 0.9), (2, 0.1), (3, 0.5)) for n in range(61)}
    tree = solved(hypertree(toy.state(0), Budget(moves=40, depth=1000), values=True), toy)
    visits = {text: edge.visits for text, edge in tree.nodes[0].edges.items()}
    assert visits["one"] > 3 * visits["parts"]
    parts = tree.nodes[0].edges["parts"]
    assert parts.total / parts.weight == pytest.approx(0.09)


def lock(parts: int) -> Toy:
    """So many goals side by side; each ends after three moves, the least likely, and others lead deeper."""
    moves, count = {0: {"split": (0.99999, tuple(range(1, parts + 1)))}}, parts + 1
    ahead = [(n, 0, True) for n in range(1, parts + 1)]
    while ahead:
        node, depth, right = ahead.pop()
        moves[node] = {}
        for k, p in enumerate((0.4, 0.35, 0.24999)):
            ends, deeper = right and k == 2 and depth == 2, depth < 5
            moves[node][f"{node}.{k}"] = (p, 9999 if ends else count if deeper else None)
            if deeper and not ends:
                ahead.append((count, depth + 1, right and k == 2))
                count += 1
    return Toy(moves, goal=9999)


def test_parts_add_up_where_a_flat_search_multiplies():
    """A flat search follows all that is likelier than a way to the end of every goal: deep into the first."""
    spent = {}
    for parts in (1, 2, 3):
        budget = Budget(moves=1200)
        toy, trees = lock(parts), []
        for search in (hypertree, best_first):
            trees.append(solved(search(toy.state(0), budget, width=3), toy))
        assert replays(toy, trees[0].end.text)
        spent[parts] = [(tree.drawn, tree.solved is not None) for tree in trees]
    one = spent[1][0][0]
    assert spent[1] == [(one, True)] * 2
    assert spent[2][0][0] <= 2 * one
    assert spent[3][0][0] <= 3 * one
    assert spent[2][1][0] > 4 * spent[2][0][0]
    assert spent[3][1] == (1200, False)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_taught_of_an_explored_world_is_true(seed):
    """Where a search has gone through all that can be reached, a state is taught to end well if it can."""
    toy = random_toy(seed)
    tree = solved(best_first(toy.state(0), Budget(moves=10_000), width=3), toy)
    ending = tree.ending()
    for node in tree.nodes:
        if node.number in ending:
            assert reachable(toy, int(node.state.key))
    assert (0 in ending) == (tree.solved is not None)


def test_draws_behind_what_was_excluded_are_not_independent():
    toy = random_toy(3)
    tree = solved(best_first(toy.state(0), Budget(moves=60), width=2), toy)
    for node in tree.nodes:
        assert len(node.independent) <= 2
        assert list(node.moves.values())[: len(node.independent)] == node.independent
    tree = solved(best_of_n(toy.state(0), Budget(moves=60), width=2), toy)
    assert sum(len(node.independent) for node in tree.nodes) == tree.drawn
