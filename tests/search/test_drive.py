"""Searches over a real engine: what a tree hangs on, and runs of the command line that learn from trees."""

import json
from pathlib import Path

import pytest

from posttrain import config
from posttrain.learner.pretrained import silent
from posttrain.runtime.policy import surroundings
from posttrain.runtime.sampling import engine_of
from posttrain.search.best_first import best_first
from posttrain.search.drive import Searches
from posttrain.search.protocol import Budget, Refused, State
from posttrain.search.puct import puct
from posttrain.search.tree import Tree
from posttrain.types import Sampling, Task

SEARCH = {
    "method": {"name": "expert_iteration"},
    "search": {"moves": 6, "width": 3},
    "rollout": {"groups": 4, "group_size": 2, "select": "accepted", "max_rounds": 1},
    "eval": {"limit": 4},
    "record": {"tokens": 0},
}


class Numbers:
    """States are numbers below 40; a move's characters lead on, some nowhere, and to 7 is the end."""

    stop = ()

    def begin(self, tasks):
        return [self.state(task, int(task.id) * 11 % 40, ()) for task in tasks]

    def state(self, task, number, moves):
        shown = ({"role": "user", "content": f"{number}?"},)
        return State(task=task, moves=moves, shown=shown, key=str(number), done=number == 7)

    def apply(self, asked):
        out = []
        for state, move in asked:
            number = (int(state.key) * 31 + sum(map(ord, move))) % 40
            led = self.state(state.task, number, (*state.moves, move))
            out.append(Refused("error") if number % 5 == 1 else led)
        return out

    def close(self):
        pass


@pytest.fixture
def asked(online, write):
    return surroundings(config.read(write(online)).recipe, silent), config.read(write(online)).recipe


def tasks(count: int) -> list[Task]:
    return [Task(id=str(n), messages=({"role": "user", "content": str(n)},)) for n in range(1, count + 1)]


def shape(tree: Tree | Refused) -> list[tuple]:
    """All that a tree is."""
    assert isinstance(tree, Tree)
    edges = [
        (node.number, text, edge.said, edge.visits, edge.target and edge.target.number, edge.refused)
        for node in tree.nodes
        for text, edge in node.edges.items()
    ]
    return [tree.drawn, tree.applied, tree.merged, [node.state.key for node in tree.nodes], *edges]


def grown(asked, which, strategy=best_first, *, parks: bool = False) -> dict[str, list]:
    """The trees of these tasks, searched side by side."""
    policy, recipe = asked
    searches = Searches(engine_of(recipe, policy), policy.chat, Numbers(), context=64, seed=3)
    budget, sampling = Budget(moves=40, depth=12), Sampling(max_new_tokens=2)
    numbers = {searches.begin(each, strategy, budget, sampling): each.id for each in which}
    found, steps = {}, 0
    while searches.busy:
        for number, tree in searches.step():
            found[numbers[number]] = shape(tree)
        steps += 1
        if parks and steps % 3 == 0:
            searches.park()
            assert not searches.engine.busy
            searches.unpark()
    return found


@pytest.mark.parametrize("strategy", [best_first, puct])
def test_a_tree_hangs_on_its_task_alone(asked, strategy):
    """Not on what is searched beside it, nor on when it was put aside."""
    together = grown(asked, tasks(12), strategy)
    assert {n: tree for n, tree in together.items() if n in "357"} == {
        each.id: grown(asked, [each], strategy)[each.id] for each in tasks(12) if each.id in "357"
    }
    assert grown(asked, tasks(12)[::-1], strategy) == together
    assert grown(asked, tasks(12), strategy, parks=True) == together
    assert len({str(tree) for tree in together.values()}) == 12


def rows(run: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run / "samples" / f"{name}.jsonl").read_text().splitlines()]


def weights(run: Path) -> bytes:
    newest = max((run / "checkpoints").glob("step_*"))
    return (newest / "model" / "model.safetensors").read_bytes()


@pytest.fixture
def sums(able, online):
    arithmetic = online["task"]["arithmetic"] | {"low": 2, "high": 4, "held_out": 4}
    return online | {"model": online["model"] | {"path": str(able)}, "task": {"arithmetic": arithmetic}}


def test_a_run_learns_from_trees_and_goes_on_where_it_was(sums, write, run_cli, tmp_path):
    path = write(sums, SEARCH)
    whole, parts, away = (tmp_path / name for name in ("whole", "parts", "away"))
    assert run_cli("train", path, "--run-dir", whole, "--quiet").code == 0
    metrics = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("select/kept", 0) > 0 for line in metrics)
    trained = [
        row
        for n in range(1, 5)
        if (whole / f"samples/{n:06d}.jsonl").exists()
        for row in rows(whole, f"{n:06d}")
    ]
    assert trained
    assert {row["label"] for row in trained} == {"right"}
    assert all("moves drawn" in row["reason"] for row in trained)

    assert run_cli("train", path, "--run-dir", parts, "--quiet", "--set", "run.updates=2").code == 0
    assert run_cli("train", path, "--run-dir", parts, "--quiet", "--resume").code == 0
    assert weights(parts) == weights(whole)
    done = run_cli("train", path, "--run-dir", away, "--quiet", "--set", "async.place=process")
    assert done.code == 0, done.err
    assert weights(away) == weights(whole)


@pytest.mark.parametrize("strategy", ["best_first", "beam", "best_of_n", "puct", "rmax"])
def test_eval_compares_strategies_at_one_budget(strategy, sums, write, run_cli):
    path = write(sums, SEARCH)
    done = run_cli("eval", path, "--set", f"search.strategy={strategy}", "--json")
    assert done.code == 0, done.err
    assert 0 <= json.loads(done.out)["eval/accuracy"] <= 1


def test_a_search_that_nobody_could_judge_is_refused(sums, write, run_cli):
    over = SEARCH | {"task": {"arithmetic": None, "guess": {}}, "verifier": None}
    done = run_cli("validate", write(sums, over))
    assert done.code == 2
    assert "search: a search is judged at its end" in done.err.replace("\n", " ")
    done = run_cli("validate", write(sums, SEARCH | {"method": {"name": "grpo"}}))
    assert done.code == 2
    assert "search: grpo compares answers to one task" in done.err.replace("\n", " ")
