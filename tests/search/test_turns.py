"""Turns of an environment as moves: what is found, and what is one state."""

import itertools
import random
from math import log

import pytest

from posttrain.envs.user import load_env
from posttrain.search.moves.turns import EnvTransitions, _plain
from posttrain.search.protocol import Apply, Budget, Move, Propose, Refused, State
from posttrain.search.strategies.best_first import best_first
from posttrain.search.strategies.puct import puct, rmax
from posttrain_envs.guess import Guess, guess_tasks
from posttrain_envs.maze import Maze, layout_tasks, maze_tasks

UNBOUNDED = Budget(moves=1_000_000, depth=100)


def right(verdict):
    return verdict.label == "right"


def searched(search, world, words):
    """The tree of a search where every state may say these words, each as likely."""
    moves = [Move(word, log(0.999 / len(words))) for word in words]
    try:
        questions = next(search)
        while True:
            answers = []
            for q in questions:
                if isinstance(q, Propose):
                    answers.append(moves[q.first : q.first + q.count])
                else:
                    answers.append(world.apply(q.asked) if isinstance(q, Apply) else [0.0] * len(q.states))
            questions = search.send(answers)
    except StopIteration as end:
        return end.value


def ends(env, task, words, turns):
    """Whether some of all ways to say these words ends right."""
    for way in itertools.product(words, repeat=turns):
        state = env.start(task).state
        for word in way:
            turn = env.reply(state, word)
            state = turn.state
            if turn.done:
                if right(turn.verdict):
                    return True
                break
    return False


@pytest.mark.parametrize("strategy", [best_first, puct, rmax])
def test_without_a_budget_a_search_finds_an_answer_exactly_if_there_is_one(strategy):
    found = 0
    for seed in range(60):
        dice = random.Random(seed)
        if seed % 2:
            turns = dice.randint(1, 4)
            env = Guess(high=9, max_turns=turns)
            [task] = guess_tasks(1, high=9, seed=seed)
            words = [str(n) for n in dice.sample(range(1, 10), dice.randint(1, 4))]
        else:
            turns = dice.randint(2, 6)
            env = Maze(max_turns=turns)
            cells = ["S", "G", *dice.choices(".X", (4, 1), k=4)]
            dice.shuffle(cells)
            try:
                [task] = layout_tasks(1, layout="".join(cells[:3]) + "/" + "".join(cells[3:]))
            except ValueError:
                continue  # no way past its traps
            words = dice.sample(["up", "down", "left", "right"], dice.randint(2, 4))
        world = EnvTransitions(env, right)
        [root] = world.begin([task])
        tree = searched(strategy(root, UNBOUNDED), world, words)
        assert (tree.solved is not None) == ends(env, task, words, turns), f"seed {seed}"
        if tree.solved:
            found += 1
            state = env.start(task).state
            for edge in tree.path(tree.solved):
                turn = env.reply(state, edge.move.text)
                state = turn.state
            assert turn.verdict == tree.solved.state.verdict
            assert right(turn.verdict)
    assert 10 < found < 50


def test_ways_to_one_place_in_as_many_turns_are_one_state():
    env = Maze(max_turns=8)
    [task] = layout_tasks(1, layout="S.../..../...G")
    world = EnvTransitions(env, lambda verdict: False)
    [root] = world.begin([task])
    tree = searched(best_first(root, UNBOUNDED), world, ["up", "down", "left", "right"])
    # A cell is reached after a number of turns or not at all; the goal and the last turn end it.
    places = {(0, (0, 0))}
    for turn in range(7):
        for before, (x, y) in list(places):
            if before == turn:
                moves = [(x + dx, y + dy) for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1))]
                moves = [(a, b) if 0 <= a < 4 and 0 <= b < 3 else (x, y) for a, b in moves]
                places |= {(turn + 1, cell) for cell in moves if cell != (3, 2)}
    assert len(tree.nodes) == len(places)
    assert tree.merged > 100
    assert set(tree.refused) == {"right", "wrong"}, (
        "an end that was not looked for leads nowhere, by its class"
    )


def test_equal_data_has_one_spelling_and_other_data_another():
    assert (
        _plain(frozenset("abc")) == _plain(frozenset("cba")) == ["set", sorted(_plain(frozenset("abc"))[1])]
    )
    assert _plain({"b": 1, "a": (2, None)}) == _plain({"a": (2, None), "b": 1})
    different = [1, 1.0, "1", True, [1], (1,), {1}, {1: 1}, None, Guess(high=2), Guess(high=3), Maze()]
    assert len({str(_plain(each)) for each in different}) == len(different)
    with pytest.raises(TypeError):
        _plain([b"bytes"])


ENV = '''
from posttrain.envs.protocol import Start, Turn
from posttrain.types import Verdict

class Odd:
    """Counts letters in bytes, which are no plain data; breaks where it is told to."""
    def start(self, task):
        return Start(state=b"", messages=task.messages)
    def reply(self, state, response):
        if response == "boom":
            raise ValueError("told to")
        while response == "hang":
            pass
        state += response.encode()
        if len(state) > 3:
            score = float(state == b"abcd")
            return Turn(state=state, done=True, verdict=Verdict(score=score, label="scored"))
        return Turn(state=state, messages=({"role": "user", "content": str(len(state))},))

def make():
    return Odd()
'''


def test_an_environment_of_the_users_is_asked_in_workers_and_costs_one_move(tmp_path):
    (tmp_path / "odd.py").write_text(ENV)
    env = load_env(f"{tmp_path / 'odd.py'}:make")
    world = EnvTransitions(env, lambda verdict: (verdict.score or 0) >= 1, workers=2, deadline_s=2.0)
    try:
        [root] = world.begin(maze_tasks(1))
        a, boom, hang, b = world.apply([(root, "a"), (root, "boom"), (root, "hang"), (root, "b")])
        assert isinstance(boom, Refused)
        assert isinstance(hang, Refused)
        assert (boom.label, hang.label) == ("raised", "timeout")
        assert isinstance(a, State)
        assert isinstance(b, State)
        assert a.key != b.key != root.key
        assert [message["content"] for message in a.shown[-2:]] == ["a", "1"]
        done, wrong = world.apply([(a, "bcd"), (b, "bcd")])
        assert isinstance(done, State)
        assert done.done
        assert done.text == "a\nbcd"
        assert done.verdict.score == 1.0
        assert wrong == Refused("scored", "")
    finally:
        world.close()
