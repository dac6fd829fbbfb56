"""Sketches: what they leave out is proved apart, joined in its place, and judged; lemmas nobody needs go."""

import random
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from posttrain.base.chat import Chat
from posttrain.commands.prove import _write_goals
from posttrain.data import Data, load_tasks
from posttrain.search.choice import SearchChoice
from posttrain.search.driver import SearchDriver
from posttrain.search.engine_requests import SKETCH, prompt_of
from posttrain.search.protocol import Budget, Move, Propose, Refused, State
from posttrain.search.record import record
from posttrain.search.strategies.hypertree import hypertree, left_out
from posttrain.search.tree import Tree
from posttrain.types import Completion, Request, Sampling, Task
from posttrain_prove.coq.moves import CoqTransitions, make_theorem
from posttrain_prove.coq.verifier import Coq

ADD = "forall a b : nat, a + b = b + a"
ZERO, STEP = "forall n, n + 0 = n", "forall n m, n + S m = S (n + m)"


def task(statement: str, **fields: str) -> Task:
    given = {"name": "goal", "statement": statement, **fields}
    return Task(id="t", messages=({"role": "user", "content": statement},), fields=given)


@pytest.fixture(scope="module")
def steps():
    made = CoqTransitions(sketches=True)
    yield made
    made.close()


@pytest.fixture(scope="module")
def judge():
    return Coq()


def led(steps, state: State, *moves: str) -> State | Refused:
    for move in moves:
        assert isinstance(state, State)
        [state] = steps.apply([(state, move)])
    return state


def root(steps, given: Task) -> State:
    [state] = steps.begin([given])
    return state


def moves_of(state: State) -> list[str]:
    """A policy that knows what to try, and not what helps."""
    given, _, goal = state.key.rpartition("============================\n")
    if goal.startswith("forall"):
        return ["intros."]
    names = [name for line in given.splitlines() for name in line.partition(" : ")[0].split(", ")]
    tried = [f"induction {name}." for name in "na" if name in names and f"IH{name}" not in names]
    rewrites = [f"rewrite {name}." for name in names if name in ("IHn", "IHa", "z", "s")]
    return ["reflexivity.", *tried[:1], "simpl.", *rewrites]


def searched(steps, given: Task, sketches: list[str], moves: int = 300, silent: bool = False, **how) -> Tree:
    """The hypertree of a policy that sketches so wherever it may; a silent one begins with that alone."""

    def says(question: Propose) -> list[Move]:
        state = question.state
        said = sketches if question.sketch else moves_of(state) if state.moves or not silent else []
        known = [Move(text, -2.5, tokens=(n,), sketch=question.sketch) for n, text in enumerate(said)]
        return known[question.first : question.first + question.count]

    search = hypertree(root(steps, given), Budget(moves=moves), width=1, sketches=len(sketches), **how)
    try:
        asked = next(search)
        while True:
            asked = search.send([says(q) if isinstance(q, Propose) else steps.apply(q.asked) for q in asked])
    except StopIteration as end:
        return end.value


# ---------------------------------------------------------------------- in Coq


def test_a_sketch_leaves_a_part_for_each_hole_and_for_what_is_open(steps):
    start = root(steps, task(ADD))
    to = led(steps, start, f"assert (z : {ZERO}). {{ hole. }} intros. induction a. hole. simpl.")
    assert [part.key.rpartition("\n")[2] for part in to.parts] == [
        "S (a + b) = b + S a",
        "forall n : nat, n + 0 = n",
        "0 + b = b + 0",
    ]
    assert "z : forall n : nat, n + 0 = n" in to.parts[2].key
    assert "z :" not in to.parts[1].key
    assert led(steps, to.parts[1], "induction n. reflexivity. simpl. rewrite IHn. reflexivity.").done
    plain = led(steps, start, f"assert (z : {ZERO}).")
    assert [len(plain.parts), plain.taken] == [2, ""]


@pytest.mark.parametrize(
    ("said", "label"),
    [
        ("assert (0 = 1). { hole. } - intros.", "form"),
        ("intros. { induction a.", "form"),
        ("intros. } {", "form"),
        ("intros. all: hole.", "form"),
        ("intros. Abort.", "forbidden"),
        ("intros. { admit. }", "forbidden"),
        ("intros. nonsense x. hole.", "error"),
        ("intros. shelve.", "shelved"),
        ("", "form"),
    ],
)
def test_what_is_no_sketch_is_refused_by_its_class(steps, said, label):
    to = led(steps, root(steps, task(ADD)), said)
    assert isinstance(to, Refused)
    assert to.label == label
    assert led(steps, root(steps, task("0 = 0")), "reflexivity.").done, "the session goes on"


def test_holes_that_hang_on_one_another_are_refused(steps):
    start = root(steps, task("exists n : nat, n = 2"))
    to = led(steps, start, "unshelve eexists. hole.")
    assert isinstance(to, Refused)
    assert to.label == "form"


@pytest.mark.parametrize(
    ("statement", "sketch"),
    [
        ("exists n, n = 2 /\\ True", "unshelve eexists. hole. split. reflexivity. hole."),
        ("exists n, n = 2", "unshelve eexists. hole. reflexivity."),
    ],
)
def test_a_hole_that_is_filled_by_what_stands_behind_it_is_refused(steps, statement, sketch):
    to = led(steps, root(steps, task(statement)), sketch)
    assert isinstance(to, Refused)
    assert to.label == "form"


def test_a_sketch_without_holes_stands_whole_in_the_proof(steps, judge):
    whole = "intros. induction n. reflexivity. simpl. rewrite IHn. reflexivity."
    for sketch in (whole, f"assert (z : {ZERO}). {{ hole. }} exact z."):
        tree = searched(steps, task(ZERO), [sketch, whole], silent=True)
        assert tree.end
        assert judge(task(ZERO), tree.end.text).score == 1.0, tree.end.text
        assert "induction n." in tree.end.text


def test_without_sketches_a_move_is_one_tactic():
    plain = CoqTransitions()
    try:
        assert led(plain, root(plain, task(ADD)), "intros. induction a.").label == "form"
    finally:
        plain.close()


@pytest.mark.full
def test_holes_of_any_sketch_are_filled_in_their_places(steps, judge):
    """A known proof with holes cut into it anywhere: filled by a search, Coq accepts the whole."""
    seed = random.randrange(1000)
    print("seed", seed)
    dice = random.Random(seed)
    zero = "intros. { induction n. reflexivity. simpl. rewrite IHn. reflexivity. }"
    step = "intros. { induction n. reflexivity. simpl. rewrite IHn. reflexivity. }"
    rest = [
        "intros.",
        "induction a.",
        "{ simpl. rewrite z. reflexivity. }",
        "{ simpl. rewrite s. rewrite IHa. reflexivity. }",
    ]
    for _ in range(6):
        lemmas = [
            f"assert (z : {ZERO}). {{ {dice.choice((zero, 'hole.'))} }}",
            f"assert (s : {STEP}). {{ {dice.choice((step, 'hole.'))} }}",
        ]
        said = [*dice.sample(lemmas, 2), *rest[:2]]
        said += [dice.choice((each, "hole.", "{ hole. }")) for each in rest[2:]]
        sketch = " ".join(said[: dice.randrange(2, 7)])
        tree = searched(steps, task(ADD), [sketch], silent=True)
        assert tree.end, sketch
        end = steps.trim(tree.end)
        assert judge(task(ADD), end.text).score == 1.0, (sketch, tree.end.text)
        assert "hole" not in end.text
        assert "shelve" not in end.text


# ---------------------------------------------------------------------- searched


def test_a_theorem_that_needs_lemmas_is_proved_with_them_alone(steps, judge):
    lemmas = [f"assert (z : {ZERO}).", f"assert (s : {STEP})."]
    with_lemmas = searched(steps, task(ADD), lemmas, moves=400)
    without = searched(steps, task(ADD), [], moves=400)
    assert with_lemmas.end
    assert without.end is None
    assert judge(task(ADD), with_lemmas.end.text).score == 1.0
    assert {edge.move.text for edge in with_lemmas.found} >= set(lemmas)


def test_sketches_are_counted_asked_first_and_nested_no_deeper_than_told(steps):
    lemmas = [f"assert (z : {ZERO}).", f"assert (s : {STEP})."]
    for nested in (1, 2, 3):
        tree = searched(steps, task("forall a b : nat, a + b = b + b"), lemmas, moves=80, nested=nested)
        assert tree.drawn <= 80
        spoke = [tree.nodes[number] for number in tree.asked]
        assert [len(node.sketches) for node in spoke[:2]] == [2, 2]
        depths = [sum(edge.move.sketch for edge in tree.path(node)) for node in tree.nodes if node.sketches]
        assert max(depths) == nested - 1
        for node in tree.nodes:
            assert len(node.sketches) in (0, 2)
            assert not any(move.sketch for move in node.independent)


def test_a_lemma_that_nothing_uses_is_left_out(steps, judge):
    tree = searched(steps, task("forall a : nat, 0 + a = a"), [f"assert (z : {ZERO})."], silent=True)
    assert tree.end
    assert "assert" in tree.end.text
    tree.trim(steps.trim(tree.end))
    assert "assert" not in tree.end.text
    assert judge(task("forall a : nat, 0 + a = a"), tree.end.text).score == 1.0
    assert not any(edge.move.sketch for edge in tree.found), "it is not learnt"
    needed = searched(steps, task(ADD), [f"assert (z : {ZERO}).", f"assert (s : {STEP})."], moves=400)
    assert needed.end
    assert steps.trim(needed.end) == needed.end, "what is used stays"


def test_the_lemma_that_is_left_out_may_be_one_of_several(steps, judge):
    both = (
        f"assert (u : {STEP}). {{ hole. }} assert (z : {ZERO}). {{ hole. }} intros. rewrite z. reflexivity."
    )
    given = task("forall a : nat, a + 0 = a")
    tree = searched(steps, given, [both], silent=True)
    assert tree.end
    end = steps.trim(tree.end)
    assert [name in end.text for name in ("(u :", "(z :")] == [False, True]
    assert judge(given, end.text).score == 1.0


def test_what_a_sketch_left_to_prove_is_a_task_with_the_same_state(steps, tmp_path):
    given = task("forall a b : nat, a + b = b + S a")
    sketch = f"assert (s : {STEP}). {{ hole. }} assert (1 = 1). {{ hole. }} intros. induction a."
    tree = searched(steps, given, [sketch], moves=400)
    assert tree.end is None
    left = left_out(tree)
    assert left
    tasks = [made for node in left if (made := make_theorem(node.state))]
    assert len(tasks) == len(left)
    line = {"goals": [{"prompt": each.messages[-1]["content"], **each.fields} for each in tasks]}
    _write_goals(tmp_path / "goals.jsonl", {"hypertree": [line, line]})
    for node, made in zip(left, load_tasks(Data(path=str(tmp_path / "goals.jsonl"))), strict=True):
        again = root(steps, made)
        assert isinstance(again, State)
        assert (again.key, again.shown) == (node.state.key, node.state.shown)
    assert not any(node.state.key.endswith("1 = 1") for node in left), "it is proved"


# ---------------------------------------------------------------------- recipes


class Speaks:
    """An engine that answers each request as soon as it is asked, by what stands in its prompt."""

    def __init__(self, chat: Chat) -> None:
        self.chat, self.asked = chat, list[tuple[Request, str]]()
        self._answers = list[tuple[int, Completion]]()

    @property
    def busy(self) -> bool:
        return bool(self._answers)

    def submit(self, request: Request) -> int:
        prompt = self.chat.tokenizer.decode(list(request.prompt))
        self.asked.append((request, prompt))
        state = State(task=task(ADD), key=prompt.partition("user\n")[2].partition("<|im_end|>")[0])
        state = replace(state, key=state.key.replace("======\n", "============================\n"))
        known = [f"assert (z : {ZERO}).", f"assert (s : {STEP})."] if SKETCH in prompt else moves_of(state)
        text = known[request.sample % len(known)]
        half = [-0.5] * 3
        drawn = Completion(
            tokens=[1] * 3, logp_gen=half, logp_policy=half, version=[0] * 3, text=text, stop="eos"
        )
        self._answers.append((len(self.asked), drawn))
        return len(self.asked)

    def poll(self) -> list[tuple[int, Completion]]:
        answers, self._answers = self._answers, []
        return answers


def test_an_engine_is_asked_for_sketches_with_their_question_and_their_room(steps, tiny):
    chat = Chat(AutoTokenizer.from_pretrained(tiny))
    engine = Speaks(chat)
    choice = SearchChoice(strategy="hypertree", sketches=2, width=1, moves=60)
    searches = SearchDriver(engine, chat, steps, context=4096, seed=3, sketch_tokens=77)
    searches.begin(task(ADD), choice.make(), choice.budget, Sampling(max_new_tokens=8))
    while not (done := searches.step()):
        pass
    [(_, tree)] = done
    assert isinstance(tree, Tree)
    sketched = [request for request, prompt in engine.asked if SKETCH in prompt]
    assert [request.sample for request in sketched[:2]] == [0, 1]
    assert len(sketched[1].excluded) == 1
    for request, prompt in engine.asked:
        asks = SKETCH in prompt
        assert request.sampling.max_new_tokens == (77 if asks else 8)
        assert request.task.endswith(":sketch") == asks
    [first] = [edge for edge in tree.nodes[0].edges.values() if edge.move.text.startswith("assert (z")]
    assert first.move.sketch
    assert (first.target.logp, first.target.depth) == (-0.5, 1), "the mean of its three tokens"
    assert prompt_of(chat, first.source.state, sketch=True) == list(sketched[0].prompt)
    assert record(task(ADD), tree, choice)["states"][0]["moves"][0]["sketch"]
