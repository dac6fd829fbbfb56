"""Searches over a real engine: what a tree depends on, and runs of the command line that learn from trees."""

import json
import math
import re
import string
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForTokenClassification

from posttrain.commands.prove import write_values
from posttrain.data import Data, load_steps
from posttrain.loop.sampling import build_native_engine
from posttrain.models.pretrained import silent
from posttrain.plan.model_info import read_model_info
from posttrain.plan.resolve import resolve_recipe
from posttrain.recipe import config
from posttrain.rollout.search_runner import SearchRunner
from posttrain.search.choice import SearchChoice
from posttrain.search.driver import SearchDriver
from posttrain.search.engine_requests import prompt_of
from posttrain.search.protocol import Budget, Refused, State
from posttrain.search.record import record
from posttrain.search.strategies.best_first import best_first, best_of_n
from posttrain.search.strategies.hypertree import hypertree
from posttrain.search.strategies.puct import puct
from posttrain.search.training_rows import select_training_rows
from posttrain.search.tree import Tree
from posttrain.search.values import ANSWERS, value_prompt, values_to_learn, with_lessons
from posttrain.types import Sampling, Task, Verdict
from posttrain.verifiers.model.verifier import RewardModel

SEARCH = {
    "method": {"name": "expert_iteration"},
    "search": {"moves": 6, "width": 3},
    "rollout": {"groups": 4, "group_size": 2, "select": "accepted", "max_rounds": 1},
    "eval": {"limit": 4},
    "record": {"tokens": 0},
}
GAMES = {
    "task": {
        "arithmetic": None,
        "guess": {"high": 9, "max_turns": 3},
        "games": {"train": 40, "held_out": 4},
    },
    "verifier": None,
}


class Numbers:
    """States are numbers below 40; a move's characters lead on, some nowhere, and to 7 is the end.

    Some have the next two as parts.
    """

    stop = ()
    judges = True

    def begin(self, tasks):
        return [self.state(task, int(task.id) * 11 % 40, ()) for task in tasks]

    def state(self, task, number, moves):
        shown = ({"role": "user", "content": f"{number}?"},)
        alone = [number + 1, number + 2] if number % 8 == 3 and number < 35 else []
        return State(
            task=task,
            moves=moves,
            shown=shown,
            key=str(number),
            done=number == 7,
            parts=tuple(self.state(task, each, (*moves, "(")) for each in alone),
        )

    def apply(self, asked):
        out = []
        for state, move in asked:
            number = (int(state.key) * 31 + sum(map(ord, move))) % 40
            led = self.state(state.task, number, (*state.moves, move))
            out.append(Refused("error") if number % 5 == 1 else led)
        return out

    def trim(self, end):
        return end

    def close(self):
        pass


@pytest.fixture
def asked(online, write):
    return read_model_info(config.read(write(online)).recipe, silent), config.read(write(online)).recipe


def tasks(count: int) -> list[Task]:
    return [Task(id=str(n), messages=({"role": "user", "content": str(n)},)) for n in range(1, count + 1)]


def shape(tree: Tree | Refused) -> list[tuple]:
    """All that a tree is."""
    assert isinstance(tree, Tree)
    edges = [
        (node.number, text, edge.draws, edge.visits, edge.target and edge.target.number, edge.refused)
        for node in tree.nodes
        for text, edge in node.edges.items()
    ]
    return [tree.drawn, tree.applied, tree.merged, [node.state.key for node in tree.nodes], *edges]


def grown(asked, which, strategy=best_first, *, parks: bool = False) -> dict[str, list]:
    """The trees of these tasks, searched side by side."""
    policy, recipe = asked
    searches = SearchDriver(build_native_engine(recipe, policy), policy.chat, Numbers(), context=64, seed=3)
    budget, sampling = Budget(moves=40, depth=12), Sampling(max_new_tokens=2)
    numbers = {searches.begin(each, strategy, budget, sampling): each.id for each in which}
    found, steps = {}, 0
    while searches.busy:
        for number, tree in searches.step():
            found[numbers[number]] = shape(tree)
        steps += 1
        if parks and steps % 3 == 0:
            searches.pause()
            assert not searches.engine.busy
            searches.unpause()
    return found


@pytest.mark.parametrize("name", ["best_first", "puct", "hypertree"])
def test_a_tree_hangs_on_its_task_alone(asked, name):
    """Not on what is searched beside it, nor on when it was put aside."""
    strategy = {
        "best_first": best_first,
        "puct": puct,
        "hypertree": partial(hypertree, values=True),
    }[name]
    together = grown(asked, tasks(8), strategy)
    assert {n: tree for n, tree in together.items() if n in "357"} == {
        each.id: grown(asked, [each], strategy)[each.id] for each in tasks(8) if each.id in "357"
    }
    assert grown(asked, tasks(8)[::-1], strategy) == together
    assert grown(asked, tasks(8), strategy, parks=True) == together
    assert len({str(tree) for tree in together.values()}) == 8


def rows(run: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run / "samples" / f"{name}.jsonl").read_text().splitlines()]


def weights(run: Path) -> bytes:
    newest = max((run / "checkpoints").glob("step_*"))
    return (newest / "model" / "model.safetensors").read_bytes()


@pytest.fixture
def sums(able, online):
    arithmetic = online["task"]["arithmetic"] | {"low": 2, "high": 4, "held_out": 4}
    return online | {"model": online["model"] | {"path": str(able)}, "task": {"arithmetic": arithmetic}}


def trees_of(run: Path) -> dict[str, list[dict]]:
    """The lines of trees/ without what depends on the clock."""
    read = {f.stem: [json.loads(x) for x in f.read_text().splitlines()] for f in (run / "trees").iterdir()}
    clock = ("model_s", "prover_s")
    return {n: [{k: v for k, v in line.items() if k not in clock} for line in x] for n, x in read.items()}


def check_tree(line: dict) -> None:
    """What is written of a search agrees with itself."""
    states = {state["number"]: state for state in line["states"]}
    moves = [move for state in states.values() for move in state["moves"]]
    assert len({state["key"] for state in states.values()}) == len(states)
    assert sum(move["said"] for move in moves) == line["moves"] <= line["budget"]
    led = [move["to"] for move in moves if "to" in move]
    assert len(led) - (len(states) - 1) == line["merged"]
    assert sum("refused" in move for move in moves) == line["refusals"] == sum(line["refused"].values())
    assert {n for n in states if states[n]["moves"]} == set(line["asked"])
    at, way = 0, []
    while step := next((move for move in states[at]["moves"] if move.get("found")), None):
        way.append(step)
        at = step["to"]
        assert states[at]["logp"] == pytest.approx(sum(each["logp"] for each in way))
    assert states[at]["done"] == bool(way)
    assert not line["solved"] or line["answer"] == "".join(each["text"] for each in way)


@pytest.mark.full
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
    # A run of two updates is evaluated after the second.
    parted = {name: x for name, x in trees_of(parts).items() if name != "eval_000002"}
    assert trees_of(whole) == parted == trees_of(away)


def test_what_is_written_of_searches_is_what_they_were(sums, write, run_cli, tmp_path):
    run, kept = tmp_path / "run", {"record": {"trees": 1, "tokens": 0}}
    path = write(sums, SEARCH | kept | {"run": {"updates": 2}})
    assert run_cli("train", path, "--run-dir", run, "--quiet").code == 0
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for update, lines in {int(n): x for n, x in trees_of(run).items() if n[0] != "e"}.items():
        assert len(lines) == 4
        assert sum("states" in line for line in lines) == 1
        assert metrics[update]["search/solved"] == sum(line["solved"] for line in lines) / 4
        assert metrics[update]["search/moves"] == sum(line["moves"] for line in lines) / 4
    evaluated = trees_of(run)["eval_000000"]
    assert len(evaluated) == 4
    page = (Path(__file__).parents[2] / "docs/reports.md").read_text().split("## A line of trees")[1]
    documented = {
        name for row in re.findall(r"^\| (`.*?) \|", page, re.M) for name in re.findall(r"`(\w+)`", row)
    }
    for line in evaluated:
        check_tree(line)
        assert set(line) - documented == set()
    assert metrics[0]["eval/accuracy"] == sum(line["solved"] for line in evaluated) / 4

    done = run_cli("search", path, "--json", "--limit", "4")
    assert done.code == 0, done.err
    found = [json.loads(line) for line in done.out.splitlines()]
    assert all(line["model_s"] > 0 for line in found)
    told = [{k: v for k, v in line.items() if k not in ("model_s", "prover_s")} for line in found]
    assert told == evaluated, "the first evaluation is the same searches"


def test_strategies_stand_side_by_side_at_one_budget(sums, write, run_cli, tmp_path):
    path, two = write(sums, SEARCH), ("--strategy", "best_first,best_of_n", "--budget", "4")
    done = run_cli("search", path, *two, "--out", tmp_path / "found", "--json")
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in done.out.splitlines()]
    found = {
        each: [json.loads(x) for x in (tmp_path / f"found/trees/{each}.jsonl").read_text().splitlines()]
        for each in ("best_first", "best_of_n")
    }
    assert [*found["best_first"], *found["best_of_n"]] == lines
    assert [line["task"] for line in found["best_first"]] == [line["task"] for line in found["best_of_n"]]
    assert all(line["budget"] == 4 >= line["moves"] for line in lines)
    assert "best_first, best_of_n" in (tmp_path / "found/report.html").read_text()

    done = run_cli("search", path, *two)
    solved = [sum(line["solved"] for line in found[each]) for each in found]
    told = [line.split() for line in done.out.splitlines()[-2:]]
    assert [(row[0], int(row[3])) for row in told] == list(zip(found, solved, strict=True))

    done = run_cli("search", path, *two, "--out", tmp_path / "found")
    assert done.code == 2, "nothing that was found is written over"
    done = run_cli("search", path, "--strategy", "best_first,worst_first")
    assert done.code == 2
    assert "there is no strategy 'worst_first'" in done.err
    done = run_cli("search", path, "--strategy", "best_first,hypertree")
    assert done.code == 2
    assert "search.strategy: a hypertree takes goals of a proof apart" in done.err.replace("\n", " ")


@pytest.mark.parametrize("strategy", ["best_first", "beam", "best_of_n", "puct", "rmax"])
def test_eval_compares_strategies_at_one_budget(strategy, sums, write, run_cli):
    path = write(sums, SEARCH)
    done = run_cli("eval", path, "--set", f"search.strategy={strategy}", "--json")
    assert done.code == 0, done.err
    assert 0 <= json.loads(done.out)["eval/accuracy"] <= 1


def test_a_filter_goes_with_searches_that_leave_no_move_out(sums, write, run_cli):
    cut = SEARCH | {"sampling": {"max_new_tokens": 3, "top_p": 0.9}}
    for strategy, code in (("best_first", 2), ("beam", 0)):
        done = run_cli("validate", write(sums, cut | {"search": {"strategy": strategy}}))
        assert (done.code, "which a filter changes" in done.err) == (code, code == 2), done.err


def test_what_compares_the_answers_to_a_task_learns_from_no_tree(sums, write, run_cli):
    done = run_cli("validate", write(sums, SEARCH | {"method": {"name": "grpo"}}))
    assert done.code == 2
    assert "search: grpo compares answers to one task" in done.err.replace("\n", " ")


@pytest.mark.full
def test_games_are_searched_by_their_turns_and_learnt_from(sums, write, run_cli, tmp_path):
    path = write(sums, SEARCH | GAMES | {"search": {"moves": 24, "width": 4}, "run": {"updates": 2}})
    runs = [tmp_path / name for name in ("here", "away")]
    for run, place in zip(runs, ("none", "process"), strict=True):
        over = ("--set", "async.place=process") if place == "process" else ()
        done = run_cli("train", path, "--run-dir", run, "--quiet", *over)
        assert done.code == 0, done.err
    assert trees_of(runs[0]) == trees_of(runs[1])
    assert weights(runs[0]) == weights(runs[1])
    lines = [line for x in trees_of(runs[0]).values() for line in x]
    assert any(line["solved"] for line in lines)
    assert all(line["label"] == ("right" if line["solved"] else "unsolved") for line in lines)
    assert all(line["refused"].keys() <= {"wrong", "no_answer", "cut"} for line in lines)
    for line in lines:
        if "states" in line and line["solved"] and "\n" not in line["answer"]:
            assert [move["text"] for move in line["states"][0]["moves"] if move.get("found")] == [
                line["answer"]
            ]


def test_seconds_end_a_search_and_its_tree_is_kept(process_model, online, write, run_cli):
    model = {"value_model": {"paths": [str(process_model)], "kind": "process"}}
    search = {"moves": 100_000, "width": 4, "seconds": 0.5, "separator": "e"} | model
    path = write(online, SEARCH | {"search": search, "sampling": {"max_new_tokens": 8}})
    done = run_cli("search", path, "--json", "--limit", "2")
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert len(lines) == 2
    assert all(0 < line["moves"] < 100_000 and line["states"] for line in lines)


def searched(asked, make, count: int = 6, score=None):
    """The trees of so many tasks, searched side by side with a real engine, and that engine."""
    policy, recipe = asked
    engine = build_native_engine(recipe, policy)
    searches = SearchDriver(engine, policy.chat, Numbers(), context=64, seed=3, score=score)
    budget, sampling = (
        Budget(moves=40, depth=12),
        Sampling(max_new_tokens=2, temperature=0.7, stop=tuple(string.printable)),
    )
    for task in tasks(count):
        searches.begin(task, make, budget, sampling)
    trees = []
    while searches.busy:
        trees += [tree for _, tree in searches.step()]
    return trees, searches.engine, policy.chat


def test_a_value_is_what_the_policy_says_when_it_is_asked(asked):
    trees, engine, chat = searched(asked, puct)
    nodes = [node for tree in trees for node in tree.nodes if not node.state.done]
    assert len({node.value for node in nodes}) > 5
    for node in nodes[:20]:
        prompt = value_prompt(chat, node.state)
        no, yes = (sharp(engine, prompt, chat.spell(said)) for said in ANSWERS)
        assert node.value == pytest.approx(math.exp(yes) / (math.exp(no) + math.exp(yes)), rel=1e-5)


def sharp(engine, prompt: list[int], answer: list[int]) -> float:
    """log π of an answer at the temperature of the searches."""
    assert len(answer) == 1
    logps = engine.first([tuple(prompt)])[0]
    return float((logps / 0.7).log_softmax(-1)[answer[0]])


def test_a_tree_teaches_what_it_found_out_half_of_either_kind(asked):
    trees, engine, chat = searched(
        asked, lambda root, budget: with_lessons(best_of_n(root, budget, width=2), 5)
    )
    taught_ = [tree for tree in trees if tree.lessons]
    assert taught_
    for tree in trees:
        assert tree.solved or not tree.lessons
        told = [ANSWERS.index(move.text) for _, move in tree.lessons]
        assert told == [1, 0] * (len(told) // 2)
        assert len(told) <= 4
        for node, move in tree.lessons:
            assert move.logp == pytest.approx(
                sharp(engine, value_prompt(chat, node.state), list(move.tokens)), rel=1e-5
            )


def test_the_moves_of_the_state_that_tells_most_are_compared(asked):
    """Group by group against a slow reading of the same tree: who leads on, and where that differs most."""
    trees, engine, chat = searched(asked, lambda root, budget: best_of_n(root, budget, width=4), count=20)
    plays = SearchRunner(
        engine, chat, Numbers(), SearchChoice(learn="moves", width=4), Sampling(), verifier=None, context=64
    )
    right = Verdict(score=1.0, label="right")
    mixed = 0
    try:
        for tree in trees:
            group = plays._episodes(tree.root.task, 4, tree, right if tree.solved else None)
            worth = [episode.reward for episode in group]
            assert worth == sorted(worth, reverse=True)
            assert len({tuple(e.trajectory.tokens[: e.trajectory.prompt_length]) for e in group}) == 1
            if not tree.solved:
                assert set(worth) == {0.0}
                continue
            splits = []
            for node in tree.nodes:
                led = [
                    node.edges[m.text].target and tree_leads(tree, node.edges[m.text].target)
                    for m in node.independent[:4]
                ]
                if any(led):
                    splits.append(sum(map(bool, led)) / len(led))
            best = max((p * (1 - p) for p in splits), default=0.0)
            p = sum(worth) / len(worth)
            assert p * (1 - p) == pytest.approx(best)
            mixed += 0 < p < 1
    finally:
        plays.close()
    assert mixed, "no state had moves of both kinds: nothing was tested"


def test_shares_of_visits_are_those_of_the_walks(asked):
    """Counted again from the record of each tree: whole states, those visited most first, shares of 1."""
    trees, _, _ = searched(asked, partial(puct, width=4), count=20)
    choice = SearchChoice(strategy="puct", learn="visits", width=4)
    right, told = Verdict(score=1.0, label="right"), 0
    for tree in trees:
        assert [row.verdict.score for row in select_training_rows(tree, None, choice, 12)] == [0.0]
        rows = select_training_rows(tree, right, choice, 12)
        shares: dict[str, dict[str, float]] = {}
        for row in rows:
            if row.verdict.label == "visits":
                shares.setdefault(row.state.key, {})[row.move.text] = row.verdict.score
        assert sum(map(len, shares.values())) <= 12
        seen = []
        for node, state in zip(tree.nodes, record(tree.root.task, tree, choice)["states"], strict=True):
            came = {move["text"]: move["visits"] for move in state["moves"] if move.get("visits")}
            if node.state.key in shares:
                whole = sum(came.values())
                assert shares[node.state.key] == pytest.approx({m: n / whole for m, n in came.items()})
                seen.append(whole)
        told += len(shares) > 1
        assert max(seen, default=0) == max((n.visits for n in tree.nodes if 1 < branches(n) <= 12), default=0)
    assert told, "no tree had two states with a choice: nothing was tested"


def branches(node) -> int:
    return sum(edge.visits > 0 for edge in node.edges.values())


def test_what_was_found_of_parts_is_learnt_move_by_move(asked):
    """Of a proof by parts each row is a state alone and what was said in it; its answer is all of them."""
    trees, engine, chat = searched(asked, partial(hypertree, width=4), count=20)
    right, parted = Verdict(score=1.0, label="right"), 0
    choices = [SearchChoice(strategy="hypertree", learn=learn, width=4) for learn in ("proof", "moves")]
    for choice in choices:
        plays = SearchRunner(engine, chat, Numbers(), choice, Sampling(), verifier=None, context=64)
        for tree in trees:
            verdict = right if tree.end else None
            [whole] = plays._episodes(tree.root.task, 1, tree, verdict)
            rows = [each.trajectory.tokens for each in plays._episodes(tree.root.task, 64, tree, verdict)]
            ending = tree.ending()
            if tree.end:
                assert whole.response == tree.end.text
                assert 0 in ending
            if tree.end and choice.learn == "proof":
                said = [prompt_of(chat, e.source.state) + list(e.move.tokens) for e in tree.found]
                assert rows == said
                assert all(e.source.number in ending and not e.source.parts for e in tree.found)
                parted += any(node.parts for node in tree.nodes if node.number in ending)
            told = json.loads(json.dumps(record(tree.root.task, tree, choice)))
            for node, state in zip(tree.nodes, told["states"], strict=True):
                assert state.get("parts", []) == [part.number for part in node.parts]
                assert not (node.parts and state["moves"])
        plays.close()
    assert parted, "nothing was proved by parts: nothing was tested"


def tree_leads(tree, node) -> bool:
    """Whether the end can be reached from a node, by trying every way."""
    on = [edge.target for edge in node.edges.values() if edge.target]
    return node.state.done or any(tree_leads(tree, each) for each in on)


@pytest.mark.parametrize("method", ["grpo", "online_dpo"])
@pytest.mark.sample("grpo")
def test_methods_that_compare_learn_from_the_moves_of_a_state(method, sums, write, run_cli, tmp_path):
    learn = {"search": {"moves": 24, "width": 6, "learn": "moves"}, "method": {"name": method}}
    rollout = {"rollout": SEARCH["rollout"] | {"group_size": 6, "select": "varied"}}
    path = write(sums, SEARCH | GAMES | learn | rollout)
    run = tmp_path / "run"
    done = run_cli("train", path, "--run-dir", run, "--quiet")
    assert done.code == 0, done.err
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    learnt = [line for line in metrics if line.get("grad_norm")]
    assert learnt, "no update learnt anything"
    assert max(abs(line.get("kl/mismatch", 0.0)) for line in metrics) < 1e-3


def test_a_run_learns_what_its_walks_came_to(sums, write, run_cli, tmp_path):
    """REINFORCE on shares; methods and strategies for which they are nothing are refused."""
    search = {"search": {"moves": 24, "width": 6, "strategy": "puct", "learn": "visits"}}
    rollout = {"rollout": SEARCH["rollout"] | {"group_size": 12, "select": "varied"}}
    recipe = SEARCH | GAMES | search | rollout | {"method": {"name": "reinforce"}}
    run = tmp_path / "run"
    done = run_cli("train", write(sums, recipe), "--run-dir", run, "--quiet")
    assert done.code == 0, done.err
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("grad_norm") for line in metrics), "no update learnt anything"
    for change, said in (
        ({"method": {"name": "rloo"}}, "method.name = 'reinforce'"),
        ({"search": search["search"] | {"strategy": "best_first"}}, "'visits' needs puct"),
        ({"method": {"name": "reinforce", "correction": "token_truncated"}}, "older moves need none here"),
    ):
        done = run_cli("validate", write(sums, recipe | change))
        assert (done.code, said in done.err) == (2, True), done.err
    done = run_cli("validate", write(sums, recipe | {"async": {"max_lag": 1}}))
    assert done.code == 0, done.err


def test_a_run_learns_values_and_asks_them(sums, write, run_cli, tmp_path):
    search = {"search": {"moves": 24, "width": 4, "values": True, "strategy": "puct"}}
    rollout = {"rollout": SEARCH["rollout"] | {"group_size": 6}}
    run = tmp_path / "run"
    done = run_cli("train", write(sums, SEARCH | GAMES | search | rollout), "--run-dir", run, "--quiet")
    assert done.code == 0, done.err
    asked_for = [row for f in sorted((run / "samples").glob("0*.jsonl")) for row in rows(run, f.stem)]
    lessons = [row for row in asked_for if "Can this be done?" in json.dumps(row)]
    assert {row["pieces"][0] for row in lessons} == set(ANSWERS)
    assert {(row["label"], row["score"], row["stop"]) for row in lessons} == {("value", 1.0, "eos")}
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(abs(line.get("kl/mismatch", 0.0)) for line in metrics) < 1e-3


@pytest.fixture
def process_model(tiny, tmp_path):
    """A process reward model of random weights, whose scores are far apart."""
    torch.manual_seed(5)
    model = LlamaForTokenClassification.from_pretrained(tiny, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=3.0)
    place = tmp_path / "process_model"
    model.save_pretrained(place)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(place)
    return place


@pytest.mark.parametrize("strategy", ["best_of_n", "beam", "best_first", "puct"])
def test_the_answer_is_the_end_that_the_reward_model_finds_best(
    strategy, process_model, online, write, run_cli
):
    """Each end's value is the verifier's own score of it, and no other end has a greater one."""
    search = {
        "strategy": strategy,
        "moves": 24,
        "width": 4,
        "separator": "e",
        "value_model": {"paths": [str(process_model)], "kind": "process", "over_steps": "min"},
    }
    path = write(online, SEARCH | {"search": search, "sampling": {"max_new_tokens": 8}})
    done = run_cli("search", path, "--json", "--limit", "3")
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in done.out.splitlines()]
    judge = RewardModel(paths=(str(process_model),), kind="process", over_steps="min", separator="e")
    tasks = {task.id: task for task in resolve_recipe(config.read(path).recipe).held_out}
    compared = 0
    for line in lines:
        spent = line["moves"] == 24 or strategy == "beam"  # which ends with its last state
        assert spent, "an end does not end the search"
        ends = {state["shown"]: state["value"] for state in line["states"] if state["done"]}
        assert len(ends) == line["ends"]
        for said, value in ends.items():
            assert value == pytest.approx(judge(tasks[line["task"]], said).score, abs=1e-5)
        if ends:
            assert ends[line["answer"]] == max(ends.values())
            compared += len(ends) > 1
    assert compared


@pytest.mark.parametrize("strategy", ["puct", "hypertree"])
def test_a_value_model_scores_the_goals_of_a_proof(strategy, process_model, asked):
    """The value is the model's own score of task and goals, and the first end is the solution."""
    judge = RewardModel(paths=(str(process_model),), kind="process")
    choice = SearchChoice(strategy=strategy, value_model=judge, width=4)
    trees, *_ = searched(asked, choice.make(), 4, choice.state_scorer())
    assert any(tree.solved for tree in trees)
    assert not any(tree.compares for tree in trees)
    nodes = [node for tree in trees for node in tree.nodes if not (node.state.done or node.parts)]
    assert len({node.value for node in nodes}) > 5
    for node in nodes:
        goals = node.state.shown[-1]["content"]
        assert node.value == pytest.approx(judge(node.state.task, goals).score, abs=1e-5)


def test_values_of_states_are_written_as_process_reward_reads_them(asked, tmp_path):
    file, every = tmp_path / "values.jsonl", tasks(6)
    trees = {int(tree.root.task.id): tree for tree in searched(asked, partial(best_of_n, width=2))[0]}
    lines = [
        {"task": task.id, **record(task, trees[int(task.id)], SearchChoice(strategy="best_of_n"))}
        for task in every
    ]
    write_values(file, {"best_of_n": lines}, every)
    solutions = load_steps(Data(path=str(file)))
    expected = {
        (task.id, node.state.shown[-1]["content"], float(ends))
        for task in every
        for node, ends in values_to_learn(trees[int(task.id)], 40)
        if node.number
    }
    assert {label for *_, label in expected} == {0.0, 1.0}
    assert expected == {(s.messages[0]["content"], s.steps[0], s.labels[0]) for s in solutions}


def test_what_no_reward_model_can_guide_is_said(process_model, sums, write, run_cli, tmp_path):
    model = {"value_model": {"paths": [str(process_model)], "kind": "process"}}
    for over, said in (
        (
            {"search": SEARCH["search"] | model | {"values": True}},
            "a value_model cannot be combined with values = true",
        ),
        (
            {"search": SEARCH["search"] | model | {"strategy": "rmax"}},
            "cannot be combined with strategy = 'rmax'",
        ),
        ({"search": SEARCH["search"] | model, **GAMES}, "a value_model reads the steps of an answer"),
        ({"search": SEARCH["search"] | {"value_model": {"paths": [str(tmp_path / "none")]}}}, "none"),
    ):
        done = run_cli("validate", write(sums, SEARCH | over))
        assert done.code == 2
        assert said in done.err.replace("\n", " ")
