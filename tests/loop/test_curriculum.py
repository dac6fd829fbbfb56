"""Curricula: each asks for what it says, never runs dry, and goes on exactly where it was."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.curriculum.band import Band
from posttrain.curriculum.bandit import Bandit
from posttrain.curriculum.curriculum import Supply, build_supply
from posttrain.curriculum.difficulty import difficulty, split_buckets
from posttrain.curriculum.stream import Stream
from posttrain.recipe.settings import CURRICULA, Curriculum
from posttrain.types import Task, UserError

KINDS = ("none", "order", "band", "bandit")
Rate = Callable[[Task, int], float | None]


def tasks(*values: Any, field: str = "difficulty") -> list[Task]:
    return [
        Task(id=f"t{n}", messages=(), fields={field: value}, source=f"tasks.jsonl:{n + 1}")
        for n, value in enumerate(values)
    ]


def levels(made: list[Task]) -> list[Any]:
    return [task.fields["difficulty"] for task in made]


def chance(*key: object) -> float:
    """A number in [0, 1) that depends on the key alone."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=6).digest(), "big") / 2**48


def drawn(p: float, *key: object, size: int = 8) -> float:
    """The success rate of a group of answers, each right with chance p."""
    return sum(chance(*key, n) < p for n in range(size)) / size


def updates(source: Supply, rate: Rate, groups: int) -> Iterator[list[tuple[int, Task]]]:
    """What each update takes, forever, as the online loop does it."""
    while True:
        taken = [source.take() for _ in range(groups)]
        source.observe([(task, rate(task, epoch)) for epoch, task in taken])
        yield taken


def some(source: Supply, rate: Rate, count: int, groups: int = 4) -> list[list[tuple[int, Task]]]:
    stream = updates(source, rate, groups)
    return [next(stream) for _ in range(count)]


def whatever(task: Task, epoch: int) -> float | None:
    """Rates of all kinds; now and then nobody could judge."""
    p = chance("rate", task.id, epoch)
    return None if p < 0.15 else round(p, 2)


# ---------------------------------------------------------------- every kind


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**40), cut=st.integers(0, 30), groups=st.integers(1, 9), n=st.integers(2, 12))
@settings(max_examples=25, deadline=None)
def test_what_a_killed_run_takes_is_what_one_that_was_not_takes(kind, seed, cut, groups, n):
    asked = tasks(*(place % 5 for place in range(n)))
    chosen = Curriculum(kind=kind, explore=0.3, buckets=3, share=0.01)
    whole = some(build_supply(chosen, asked, seed=seed), whatever, 40, groups)
    first = build_supply(chosen, asked, seed=seed)
    assert some(first, whatever, cut, groups) == whole[:cut]
    saved = json.loads(json.dumps({"taken": first.taken, "state": first.state()}))
    second = build_supply(chosen, asked, seed=seed)
    second.taken = saved["taken"]
    second.restore(saved["state"])
    assert some(second, whatever, 40 - cut, groups) == whole[cut:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_is_not_changed_by_later_takes(kind):
    """A checkpoint is written while the run takes its next tasks."""
    source = build_supply(Curriculum(kind=kind, buckets=2), tasks(*range(6)), seed=0)
    some(source, whatever, 3, 4)
    source.take()
    state = source.state()
    before = json.dumps(state)
    for _ in range(12):
        source.take()
    assert json.dumps(state) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_that_comes_again_has_draws_of_its_own(kind):
    source = build_supply(Curriculum(kind=kind), tasks(*range(7)), seed=3)
    keys = [(epoch, task.id) for update in some(source, whatever, 60, 10) for epoch, task in update]
    assert len(keys) == 600 == len(set(keys)) == source.taken
    for name in {name for _, name in keys}:
        times = [epoch for epoch, other in keys if other == name]
        assert times == list(range(len(times)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_changes_what_is_taken(kind):
    def names(seed: int) -> tuple[str, ...]:
        source = build_supply(Curriculum(kind=kind), tasks(*([1, 2] * 10)), seed=seed)
        return tuple(task.id for update in some(source, whatever, 10) for _, task in update)

    assert len({names(seed) for seed in range(5)}) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_no_task_is_ever_given_up_and_no_wait_is_endless(kind):
    """Whatever comes of them: nothing right, everything right, or nobody who could judge."""
    for rate in (0.0, 1.0, None):
        source = build_supply(Curriculum(kind=kind), tasks(*range(12)), seed=1)
        counts = Counter(task.id for u in some(source, lambda *_, r=rate: r, 60) for _, task in u)
        assert len(counts) == 12
        if kind != "bandit":
            assert max(counts.values()) - min(counts.values()) <= 10


def test_nothing_else_is_asked_without_a_curriculum():
    plain = Stream(tasks(*range(9)), seed=4)
    source = build_supply(Curriculum(), plain.items, seed=4)
    assert [source.take() for _ in range(30)] == [plain.take() for _ in range(30)]
    assert source.observe([]) == {}
    assert set(CURRICULA) == set(KINDS)


# ---------------------------------------------------------------- order


@given(
    values=st.lists(st.integers(-9, 9) | st.floats(-9, 9), min_size=1, max_size=20), seed=st.integers(0, 99)
)
def test_each_epoch_goes_from_the_easiest_task_to_the_hardest(values, seed):
    source = build_supply(Curriculum(kind="order", field="level"), tasks(*values, field="level"), seed=seed)
    for epoch in range(3):
        taken = [source.take() for _ in values]
        assert {e for e, _ in taken} == {epoch}
        assert [task.fields["level"] for _, task in taken] == sorted(values)
        assert len({task.id for _, task in taken}) == len(values)


def test_tasks_that_are_equally_hard_come_in_another_order_each_time():
    source = build_supply(Curriculum(kind="order"), tasks(*[1] * 10, *[2] * 10), seed=0)
    epochs = [tuple(source.take()[1].id for _ in range(20)) for _ in range(4)]
    assert len(set(epochs)) == 4


@pytest.mark.parametrize("value", ["3", True, None, float("nan"), float("inf"), -(10**400), [1]])
@pytest.mark.parametrize("kind", ["order", "bandit"])
def test_a_difficulty_that_is_no_number_is_an_error_at_the_tasks_source(kind, value):
    with pytest.raises(UserError) as caught:
        build_supply(Curriculum(kind=kind), tasks(1, value, 2), seed=0)
    assert str(caught.value).startswith(f"tasks.jsonl:2: field 'difficulty' of task 't1' is {value!r}; ")


@pytest.mark.parametrize("kind", ["order", "bandit"])
def test_a_task_without_the_field_is_an_error_at_its_source(kind):
    made = [
        *tasks(1, 2),
        Task(id="odd", messages=(), fields={"level": 1, "kind": ""}, source="tasks.jsonl:3"),
    ]
    with pytest.raises(UserError) as caught:
        build_supply(Curriculum(kind=kind), made, seed=0)
    said = "tasks.jsonl:3: task 'odd' has no field 'difficulty'; set curriculum.field to one of kind, level"
    assert str(caught.value) == said
    with pytest.raises(UserError, match=r"^curriculum\.field: "):
        difficulty(Task(id="bare", messages=()), "difficulty")


# ---------------------------------------------------------------- band


def of_rate(task: Task, epoch: int) -> float:
    """A task whose difficulty is the chance that an answer is wrong."""
    return drawn(1 - task.fields["difficulty"], task.id, epoch)


def test_after_the_first_pass_the_band_asks_for_what_is_neither_easy_nor_hard():
    made = tasks(*[0.0] * 20, *[0.5] * 8, *[1.0] * 20)
    taken = [t for u in some(Band(made, seed=0, explore=0.1), of_rate, 200) for _, t in u]
    assert sorted(task.id for task in taken[:48]) == sorted(task.id for task in made)
    counts = Counter(levels(taken[48:]))
    assert counts[0.5] / len(taken[48:]) > 0.75
    assert counts[0.0] > 0 < counts[1.0], "the others are explored"
    each = Counter(task.id for task in taken[48:] if task.fields["difficulty"] == 0.5)
    assert len(each) == 8


def test_without_a_sweep_what_is_hard_comes_again_among_new_tasks_in_their_order():
    """Of a data set larger than the run: with a sweep no task would be asked twice in these updates."""
    made = tasks(*[0.0] * 200, *[0.5] * 200)
    swept, mixed = Band(made, seed=0), Band(made, seed=0, low=0.1, high=0.9, explore=0.5, sweep=False)
    first = [task.id for update in some(swept, of_rate, 40) for _, task in update]
    taken = [task for update in some(mixed, of_rate, 40) for _, task in update]
    names = [task.id for task in taken]
    assert len(set(first)) == len(first)
    new = list(dict.fromkeys(names))
    assert new == first[: len(new)], "new ones are those of a sweep, in its order"
    again = [task for n, task in enumerate(taken) if task.id in names[:n]]
    assert levels(again).count(0.5) == len(again), "what every answer solved is not asked again"
    assert len(again) / len(taken) == pytest.approx(0.5, abs=0.15)


def test_no_task_is_asked_twice_in_an_update_while_there_are_others():
    made = tasks(*[0.5] * 2, *[1.0] * 10)
    for update in some(Band(made, seed=0), of_rate, 50, groups=8):
        assert len({task.id for _, task in update}) == 8
    for update in some(Band(made, seed=0), of_rate, 50, groups=30):
        assert max(Counter(task.id for _, task in update).values()) <= 30


def test_without_a_band_each_task_has_its_turn_whether_it_was_too_easy_or_too_hard():
    """Neither end is preferred: not even by the rounding of how far it is from the band."""
    rates = {1: 0.0, 2: 1.0, 3: None, 4: 0.99}
    source = Band(tasks(1, 2, 3, 4), seed=0, low=0.2, high=0.8, explore=0.0)
    taken = [task for [(_, task)] in some(source, lambda t, _: rates[t.fields["difficulty"]], 12, groups=1)]
    assert levels(taken[4:8]) == levels(taken[8:]) == levels(taken[:4])


def test_what_was_too_hard_is_tried_again_and_found_when_it_is_not():
    """A policy that has learnt since: without exploring it would never be asked."""

    def learning(task: Task, epoch: int) -> float:
        hard = task.fields["difficulty"] == 2 and epoch == 0
        return 0.0 if hard else 0.5

    made = tasks(*[1] * 6, *[2] * 6)
    for explore, found in ((0.0, False), (0.2, True)):
        source = Band(made, seed=0, explore=explore)
        late = [task for u in some(source, learning, 100)[50:] for _, task in u]
        assert (2 in levels(late)) == found
    shares = Counter(levels(late))
    assert shares[2] / len(late) == pytest.approx(0.5, abs=0.1)


def test_every_task_has_its_turn_however_wide_the_band_is():
    made = tasks(*[0.0] * 5, *[0.5] * 40, *[1.0] * 5)
    taken = [task.id for u in some(Band(made, seed=0, explore=0.25), of_rate, 400) for _, task in u]
    for name in {task.id for task in made}:
        places = [n for n, other in enumerate(taken) if other == name]
        assert max(b - a for a, b in pairwise([*places, len(taken)])) < 2 * 50 / 0.25


def test_a_rate_is_a_running_one_and_failures_do_not_move_it():
    [task] = made = tasks(1)
    source = Band(made, seed=0, keep=0.75)
    assert source.observe([(task, None)]) == {}
    assert source.observe([(task, 0.8)]) == {"curriculum/success": 0.8, "curriculum/in_band": 1.0}
    assert source.observe([(task, 0.0)])["curriculum/success"] == pytest.approx(0.6)
    assert source.observe([(task, None)])["curriculum/success"] == pytest.approx(0.6)
    assert source.observe([(task, 0.0)] * 9)["curriculum/in_band"] == 0.0


# ---------------------------------------------------------------- bandit


def test_the_weights_move_as_the_formula_says():
    made = tasks(1, 2, 3)
    source = Bandit([[t] for t in made], seed=0, explore=0.3, share=0.05)
    w, e = [1 / 3] * 3, 2.718281828459045
    pi = [0.7 * x / sum(w) + 0.3 / 3 for x in w]
    told = [(made[1], 0.5), (made[0], 0.25), (made[1], None), (made[2], 1.0), (made[1], 0.5)]
    said = source.observe(told)
    for task, p in told:
        if p is not None:
            i, r, total = made.index(task), 4 * p * (1 - p), sum(w)
            w = [x * e ** (0.3 * r / pi[i] / 3) if j == i else x for j, x in enumerate(w)]
            w = [x + e * 0.05 / 3 * total for x in w]
    wanted = [0.7 * x / sum(w) + 0.1 for x in w]
    assert list(said) == [f"curriculum/bucket_{n}" for n in range(3)]
    assert list(said.values()) == pytest.approx(wanted)
    assert sum(said.values()) == pytest.approx(1.0)


def test_a_bandit_finds_the_bucket_that_can_be_learnt_from():
    made = tasks(*[0.0] * 10, *[0.4] * 10, *[0.98] * 10, *[1.0] * 10)
    for seed in range(5):
        source = build_supply(Curriculum(kind="bandit"), made, seed=seed)
        late = [task for u in some(source, of_rate, 200, groups=8)[100:] for _, task in u]
        shares = Counter(levels(late))
        print(seed, shares)
        assert shares[0.4] / len(late) > 0.6
        assert len(shares) == 4
        assert min(shares.values()) / len(late) > 0.03, "none is given up"


def test_each_task_of_a_bucket_comes_once_before_any_comes_again():
    source = Bandit([tasks(*[1] * 7)], seed=0)
    for epoch in range(3):
        taken = [source.take() for _ in range(7)]
        assert {e for e, _ in taken} == {epoch}
        assert len({task.id for _, task in taken}) == 7


def practice(kind: str, seed: int) -> int:
    """Updates until a learner that takes one level after the other knows them all.

    A level can be learnt once the one below it is half known; a group is worth as much as it is undecided.
    """
    made = tasks(*(level for level in range(4) for _ in range(10)))
    known = [0.3, 0.02, 0.02, 0.02]

    def rate(task: Task, epoch: int) -> float:
        level = task.fields["difficulty"]
        p = drawn(known[level], seed, task.id, epoch)
        if level == 0 or known[level - 1] > 0.5:
            known[level] = min(0.98, known[level] + 0.05 * p * (1 - p))
        return p

    stream = updates(build_supply(Curriculum(kind=kind), made, seed=seed), rate, 8)
    for count in range(2000):
        if min(known) > 0.9:
            return count
        next(stream)
    return 2000


def test_a_learner_of_one_level_after_the_other_is_sooner_done_with_a_band_or_a_bandit():
    spent = {kind: [practice(kind, seed) for seed in range(5)] for kind in ("none", "band", "bandit")}
    print(spent)
    mean = {kind: sum(found) / 5 for kind, found in spent.items()}
    assert mean["band"] < 0.85 * mean["none"]
    assert mean["bandit"] < 0.95 * mean["none"]


# ---------------------------------------------------------------- buckets


@given(values=st.lists(st.integers(0, 12), min_size=2, max_size=60), count=st.integers(2, 6))
def test_buckets_are_a_partition_in_rising_order_that_parts_no_equals(values, count):
    made = tasks(*values)
    if len(set(values)) == 1:
        with pytest.raises(UserError, match=r"^curriculum\.field: "):
            split_buckets(made, "difficulty", count)
        return
    buckets = split_buckets(made, "difficulty", count)
    assert sorted(task.id for bucket in buckets for task in bucket) == sorted(task.id for task in made)
    spans = [(min(levels(b)), max(levels(b))) for b in buckets]
    assert all(one[1] < other[0] for one, other in pairwise(spans))
    assert 2 <= len(buckets) <= count
    if len(set(values)) <= count:
        assert len(buckets) == len(set(values))


@given(n=st.integers(2, 60), count=st.integers(2, 6))
def test_buckets_of_different_values_are_about_as_large(n, count):
    sizes = [len(bucket) for bucket in split_buckets(tasks(*range(n)), "difficulty", count)]
    assert len(sizes) == min(n, count)
    assert max(sizes) - min(sizes) <= 1


def test_a_value_that_most_tasks_share_does_not_swallow_the_others():
    buckets = split_buckets(tasks(*[1] * 90, *range(2, 12)), "difficulty", 4)
    assert [len(bucket) for bucket in buckets] == [90, 3, 4, 3]


def test_texts_make_buckets_as_long_as_they_are_few():
    made = tasks("algebra", "logic", "algebra", "sets", field="topic")
    buckets = split_buckets(made, "topic", 3)
    assert [[task.fields["topic"] for task in b] for b in buckets] == [
        ["algebra", "algebra"],
        ["logic"],
        ["sets"],
    ]
    with pytest.raises(UserError, match=r"^curriculum\.buckets: "):
        split_buckets(made, "topic", 2)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"low": 0.9}, "low and high must lie in"),
        ({"high": 1.1}, "low and high must lie in"),
        ({"keep": 1.0}, "keep must lie in"),
        ({"explore": -0.1}, "explore must lie in"),
        ({"kind": "bandit", "explore": 0.0}, "would never learn"),
        ({"buckets": 1}, "buckets must be 2 or more"),
        ({"share": 0.5}, "share must lie in"),
    ],
)
def test_numbers_out_of_range_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Curriculum(**given)


@pytest.mark.parametrize("kind", ["band", "bandit"])
def test_a_checkpoint_of_other_tasks_is_refused(kind):
    source = build_supply(Curriculum(kind=kind), tasks(1, 2, 3), seed=0)
    other = build_supply(Curriculum(kind=kind), tasks(1, 2), seed=0)
    with pytest.raises(UserError, match=r"^curriculum: "):
        other.restore(source.state())


# ---------------------------------------------------------------- in a run

SUMS = {"task": {"arithmetic": {"low": 2, "high": 12}}, "eval": {"limit": 0}}


def test_a_run_asks_easiest_first(run_cli, online, write, tmp_path):
    recipe = write(online, SUMS | {"curriculum": {"kind": "order"}, "run": {"updates": 5}})
    said = run_cli("train", recipe, "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 0, said.err
    asked = []
    for file in sorted((tmp_path / "run" / "samples").glob("0*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        asked += [row["task"] for row in rows if row["sample"] == 0]
    assert len(asked) == 15 == len(set(asked))
    assert {sum(c.isdigit() for c in name) for name in asked} == {2}
    assert {len(str(n)) for n in range(2, 13)} == {1, 2}, "there are harder ones"


def test_a_checkpoint_holds_the_rates_of_every_group_that_was_sampled(run_cli, online, write, tmp_path):
    """Those too that selection dropped."""
    over = SUMS | {"curriculum": {"kind": "band"}, "rollout": {"select": "varied"}, "run": {"updates": 2}}
    said = run_cli("train", write(online, over), "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 0, said.err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    [file] = (tmp_path / "run" / "checkpoints").glob("step_*2/state.json")
    state = json.loads(file.read_text())
    sampled = sum(line["select/kept"] + line["select/dropped"] for line in lines)
    assert sum(state["curriculum"]["times"]) == state["progress"]["taken"] == sampled > 6
    known = [rate for rate in state["curriculum"]["rate"] if rate is not None]
    assert len(known) == sampled
    assert lines[-1]["curriculum/success"] == pytest.approx(sum(known) / len(known))


def test_a_field_that_a_record_lacks_is_said_with_its_line_before_a_model_is_read(
    run_cli, online, write, tmp_path
):
    rows = [{"prompt": "1 + 1?", "answer": "2", "level": 1}, {"prompt": "2 + 2?", "answer": "4"}]
    (tmp_path / "ask.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    over = {
        "model": {"path": str(tmp_path / "nowhere")},
        "task": {"arithmetic": None, "data": {"path": str(tmp_path / "ask.jsonl")}},
        "curriculum": {"kind": "order", "field": "level"},
    }
    said = run_cli("validate", write(online, over))
    assert said.code == 2
    assert "ask.jsonl:2: task " in said.err
    assert "has no field 'level'" in said.err


def test_a_key_that_the_kind_does_not_read_is_refused(run_cli, online, write):
    for kind, read in {
        "none": (),
        "order": ("field",),
        "band": ("low", "keep"),
        "bandit": ("field", "buckets", "share"),
    }.items():
        for key, value in {
            "field": "difficulty",
            "low": 0.3,
            "keep": 0.1,
            "buckets": 3,
            "share": 0.01,
        }.items():
            said = run_cli("validate", write(online, SUMS | {"curriculum": {"kind": kind, key: value}}))
            assert said.code == (0 if key in read else 2), said.err
            if said.code:
                assert f"curriculum.{key}: is never read: curriculum.kind is '{kind}'" in said.err
