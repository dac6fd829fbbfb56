"""Records as rows: what is shared, what is trained, what is read, and what a bound leaves of them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers
from transformers import AutoTokenizer

from posttrain.base import plain_template
from posttrain.base.chat import Chat
from posttrain.data import Ranking, SteppedSolution
from posttrain.data.load import Conversation
from posttrain.learner.pack import pack
from posttrain.plan.dataset_rows import UNREAD, Group, Shaper, Singles, marked, numbered, row, with_probes
from posttrain.types import PROBE, Batch, Message, UserError

QUESTION: tuple[Message, ...] = ({"role": "user", "content": "2+3?"},)
TURNS: tuple[Message, ...] = (
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 2+3?"},
)
Shape = Callable[..., Shaper]

ALTERNATE = (
    "{% for m in messages %}{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def ranking(
    *answers: str, scores: tuple[float, ...] = (), messages: Any = QUESTION, name: str = "r"
) -> Ranking:
    given = scores or tuple(float(-n) for n in range(len(answers)))
    return Ranking(id=name, messages=messages, answers=answers, scores=given, source=f"pairs.jsonl:{name}")


def quiet(line: str) -> None:
    raise AssertionError(f"nothing was to be said: {line}")


@pytest.fixture(scope="session")
def words(tiny: Path) -> Any:
    """The tiny model's tokenizer: a token a character."""
    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture
def shaper(words: Any) -> Shape:
    """shaper(template=..., bound=..., marks=...) -> what makes rows of the tiny model's tokens."""

    def make(template: str | None = None, bound: int = 200, marks: bool = False, **more: Any) -> Shaper:
        return Shaper(Chat(words, template=template), bound, marks, **more)

    return make


def trained_text(words: Any, group: Group) -> list[str]:
    return [words.decode([t for t, own in zip(r.tokens, r.sampled, strict=True) if own]) for r in group]


# ---------------------------------------------------------------- pairs


@pytest.mark.parametrize("messages", [QUESTION, TURNS], ids=["one turn", "several turns"])
@pytest.mark.parametrize("template", [None, "none"], ids=["chat", "none"])
def test_the_rows_of_a_pair_share_their_question_and_train_their_last_answer(
    shaper: Shape, words: Any, template: str | None, messages: Any
) -> None:
    shape = shaper(template)
    [pair] = shape.groups(
        [ranking("five", "no idea", scores=(2.5, -1.0), messages=messages)], "rankings", quiet
    )
    question = shape.chat.render(messages)
    assert [r.tokens[: r.prompt_length] for r in pair] == [question, question]
    assert trained_text(words, pair) == ["five<|im_end|>", "no idea<|im_end|>"]
    for r in pair:
        own = [t for t, trained in enumerate(r.sampled) if trained]
        assert own == list(range(own[0], own[-1] + 1)), "what earlier turns said is not trained"
    assert [r.total_reward for r in pair] == [2.5, -1.0]
    if template is None:
        assert (
            pair[0].tokens
            == shape.chat.render_supervised([*messages, {"role": "assistant", "content": "five"}])[0]
        )


def test_a_pair_is_computed_as_its_question_once_and_both_answers(shaper: Shape) -> None:
    shape = shaper()
    answers = ("five", "no idea", "7")
    groups = shape.groups([ranking(*answers), ranking("a", "b", name="s")], "rankings", quiet)
    packs = [pack(Batch.of(*numbered([group]))) for group in groups]
    P = len(shape.chat.render(QUESTION))
    # An answer's end token is predicted and never fed.
    assert [len(p.tokens) for p in packs] == [P + sum(map(len, answers)), P + 2]
    assert [(f.prefix, f.branches) for p in packs for f in p.prompt_groups] == [(P, (4, 7, 1)), (P, (1, 1))]
    assert [len(p.target) for p in packs] == [sum(len(a) + 1 for a in answers), 4]


def test_labels_are_answers_of_their_own(shaper: Shape, words: Any) -> None:
    made = shaper().groups([ranking("five", scores=(0.25,)), ranking("six", scores=(0.0,))], "labels", quiet)
    assert [[r.total_reward for r in group] for group in made] == [[0.25], [0.0]]
    assert [trained_text(words, group) for group in made] == [["five<|im_end|>"], ["six<|im_end|>"]]


def test_conversations_train_every_turn_of_the_assistant(shaper: Shape, words: Any) -> None:
    said = Conversation(id="c", messages=(*TURNS, {"role": "assistant", "content": "5"}), reward=3)
    [group] = shaper().groups([said], "answers", quiet)
    assert trained_text(words, group) == ["2<|im_end|>5<|im_end|>"]
    assert group[0].total_reward == 3.0


@pytest.mark.parametrize("reward", ["good", [0.3], {"a": 1}, True, "0.5"], ids=str)
def test_a_reward_that_is_no_number_is_nothing_to_who_does_not_read_it(shaper: Shape, reward: Any) -> None:
    said = Conversation(id="c", messages=(*TURNS, {"role": "assistant", "content": "5"}), reward=reward)
    [[row]] = shaper().groups([said], "answers", quiet)
    assert row.total_reward == 0.0


def test_a_message_of_weight_0_is_shown_and_not_trained(shaper: Shape, words: Any) -> None:
    last: Message = {"role": "assistant", "content": "5"}
    every = Conversation(id="c", messages=(*TURNS, last), reward=3)
    some = Conversation(id="c", messages=(*TURNS[:2], {**TURNS[2], "weight": 0}, TURNS[3], last), reward=3)
    [[whole]], [[part]] = (shaper().groups([each], "answers", quiet) for each in (every, some))
    assert part.tokens == whole.tokens
    assert trained_text(words, (part,)) == ["5<|im_end|>"]
    lines: list[str] = []
    none = Conversation(id="n", messages=(*QUESTION, {**last, "weight": 0}))
    assert len(shaper().groups([some, none], "answers", lines.append)) == 1
    assert lines == ["1 of 2 conversations have no message that is to be trained and are left out"]
    with pytest.raises(UserError, match=r"^d:1: none of 1 conversations has a message"):
        shaper().groups([replace(none, source="d:1")], "answers", lines.append)


@pytest.mark.parametrize("template", [None, "none"], ids=["chat", "none"])
def test_a_side_of_several_turns_trains_what_the_assistant_says(
    shaper: Shape, words: Any, template: str | None
) -> None:
    side: tuple[Message, ...] = (
        {"role": "assistant", "content": "2"},
        TURNS[3],
        {"role": "assistant", "content": "5"},
    )
    pair = Ranking(id="r", messages=TURNS[:2], answers=(side, "6"), scores=(1.0, 0.0))
    [(chosen, rejected)] = shaper(template).groups([pair], "rankings", quiet)
    learnt = Conversation(id="c", messages=(*TURNS[:2], *side))
    [[whole]] = shaper(template).groups([learnt], "answers", quiet)
    assert (chosen.tokens, chosen.sampled) == (whole.tokens, whole.sampled)
    assert chosen.tokens[: chosen.prompt_length] == rejected.tokens[: rejected.prompt_length]
    alone = ranking("6", scores=(1.0,), messages=TURNS[:2])
    assert shaper(template).groups([alone], "labels", quiet)[0][0].tokens == rejected.tokens
    [(judged, _)] = shaper(template, marks=True).groups([pair], "rankings", quiet)
    plain = ranking("5", "6", messages=(*TURNS[:2], *side[:2]), scores=(1.0, 0.0))
    assert judged == shaper(template, marks=True).groups([plain], "rankings", quiet)[0][0]


REASONS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_reasoning_is_trained_where_the_template_shows_it(shaper: Shape, words: Any) -> None:
    thought: Message = {"role": "assistant", "content": "5", "reasoning_content": "2 and 3"}
    record = Conversation(id="c", messages=(*QUESTION, thought), source="d.jsonl:1")
    [group] = shaper(REASONS).groups([record], "answers", quiet)
    assert trained_text(words, group) == ["<think>\n2 and 3\n</think>\n5<|im_end|>"]
    opened = REASONS.replace("assistant\n'", "assistant\n<think>\n'")
    [group] = shaper(opened).groups([record], "answers", quiet)
    assert trained_text(words, group) == ["2 and 3\n</think>\n5<|im_end|>"]
    pair = Ranking(
        id="r", messages=QUESTION, answers=((thought,), "6"), scores=(1.0, 0.0), source="d.jsonl:1"
    )
    [(chosen, _)] = shaper(REASONS).groups([pair], "rankings", quiet)
    assert trained_text(words, (chosen,)) == ["<think>\n2 and 3\n</think>\n5<|im_end|>"]
    without_tags = REASONS.replace("think>", "thought>").replace("m.reasoning_content +", "'hm' +")
    for template in (None, "none", without_tags):
        with pytest.raises(UserError, match=r"^d\.jsonl:1: "):
            shaper(template).groups([record], "answers", quiet)
    with pytest.raises(UserError, match=r"^d\.jsonl:1: "):
        shaper(REASONS, marks=True).groups([pair], "rankings", quiet)


# ---------------------------------------------------------------- marks


@pytest.mark.parametrize("messages", [QUESTION, TURNS], ids=["one turn", "several turns"])
@pytest.mark.parametrize("template", [None, "none"], ids=["chat", "none"])
def test_a_head_is_read_behind_the_last_token_of_the_conversation(
    shaper: Shape, words: Any, template: str | None, messages: Any
) -> None:
    [pair] = shaper(template, marks=True).groups([ranking("five", "6", messages=messages)], "rankings", quiet)
    for r, answer in zip(pair, ("five", "6"), strict=True):
        said = [*messages, {"role": "assistant", "content": answer}]
        if template is None:
            whole = words.apply_chat_template(said, return_dict=True)["input_ids"]
        else:
            text = words.apply_chat_template(messages, chat_template=plain_template.TEMPLATE, tokenize=False)
            before = words(text)["input_ids"]
            whole = [*before, *words(answer)["input_ids"], words.eos_token_id]
        assert r.tokens == [*whole, UNREAD]
        assert r.sampled == [False] * len(whole) + [True]
    assert [r.reward[-1] for r in pair] == [0.0, -1.0]
    packed = pack(Batch.of(*numbered([pair])))
    # All that is in a row is fed but the token that is nobody's, and what is the same in both rows once.
    assert int(packed.tokens.numel()) == sum(len(r.tokens) - 1 for r in pair) - packed.prompt_groups[0].prefix
    assert packed.tokens[packed.source].tolist() == [r.tokens[-2] for r in pair]


def test_an_answer_that_spells_the_end_of_a_turn_has_only_spelt_it(shaper: Shape, words: Any) -> None:
    [[one]] = shaper(marks=True).groups([ranking("a<|im_end|>b", scores=(1.0,))], "labels", quiet)
    assert one.tokens.count(words.eos_token_id) == 2, "the question's and the answer's own"
    assert words.decode(one.tokens[:-1]).endswith("assistant\na<|im_end|>b<|im_end|>\n")


def solution(*steps: tuple[str, float | None], name: str = "s") -> SteppedSolution:
    texts, labels = zip(*steps, strict=True)
    return SteppedSolution(
        id=name, messages=QUESTION, steps=texts, labels=labels, source=f"steps.jsonl:{name}"
    )


def test_each_judged_step_is_marked_behind_its_separator(shaper: Shape, words: Any) -> None:
    shape = shaper(marks=True, separator="\n\n")
    [[one]] = shape.groups([solution(("2+2", 1.0), ("=", None), ("=5", 0.0))], "steps", quiet)
    question = shape.chat.render(QUESTION)
    assert words.decode(one.tokens[len(question) : -1]) == "2+2\n\n=\n\n=5\n\n"
    marks = [t - len(question) for t, read in enumerate(one.sampled) if read]
    assert marks == [5, 12], "the step that nobody judged is not marked"
    assert [one.reward[len(question) + t] for t in marks] == [1.0, 0.0]
    assert one.tokens[-1] == UNREAD


def test_a_separator_within_a_step_parts_it_as_a_verifier_would(shaper: Shape, words: Any) -> None:
    shape = shaper(marks=True, separator="\n\n")
    [[one]] = shape.groups([solution(("a\n\n\n\nb\n\n", 1.0), ("c", 0.5))], "steps", quiet)
    [[plain]] = shape.groups([solution(("a", None), ("b", 1.0), ("c", 0.5))], "steps", quiet)
    assert one == plain


def test_steps_beyond_the_bound_are_lost_and_nothing_is_fed_beyond_it(shaper: Shape) -> None:
    question = len(shaper().chat.render(QUESTION))
    said: list[str] = []
    shape = shaper(marks=True, bound=question + 7, separator="\n\n")
    records = [
        solution(("a", 1.0), ("bb", 0.0)),
        solution(("a", 1.0), ("bbb", 0.0)),
        solution(("a" * 9, 1.0)),
    ]
    groups = shape.groups(records, "steps", said.append)
    assert [[sum(r.sampled) for r in g] for g in groups] == [[2], [1]]
    assert [len(r.tokens) - 1 - question for [r] in groups] == [7, 3]
    bound = question + 7
    assert said == [
        f"2 of 3 answers are longer than {bound} tokens and lose the steps beyond",
        f"1 of 3 answers have no labelled step within {bound} tokens and are left out",
    ]


def test_a_separator_without_a_token_is_the_recipes_fault_and_not_a_records(tiny: Path) -> None:
    words = AutoTokenizer.from_pretrained(tiny)
    words.backend_tokenizer.normalizer = normalizers.Strip()
    shape = Shaper(Chat(words), 200, True, "\n\n")
    with pytest.raises(UserError, match=r"^batch\.separator: "):
        shape.groups([solution(("a", 1.0))], "steps", quiet)


# ---------------------------------------------------------------- bounds


def test_what_the_bound_leaves_is_counted_and_no_pair_is_left_with_nothing_trained(
    shaper: Shape, words: Any
) -> None:
    P = len(shaper().chat.render(QUESTION))
    records = [
        ranking("12", "13", name="fits"),
        ranking("1234", "9", name="is cut"),
        ranking("12345", "12346", name="no longer differs"),
        ranking("1", "2", messages=({"role": "user", "content": "2+3?" * 9},), name="question too long"),
    ]
    said: list[str] = []
    groups = shaper(bound=P + 3).groups(records, "rankings", said.append)
    assert [trained_text(words, g) for g in groups] == [
        ["12<|im_end|>", "13<|im_end|>"],
        ["123", "9<|im_end|>"],
    ]
    assert sorted(said) == [
        "1 of 4 rankings had an answer with nothing left to train on and are left out",
        "1 of 4 rankings have answers that no longer differ once they are cut and are left out",
        f"3 of 4 rankings are longer than {P + 3} tokens and were cut there",
    ]
    assert all(any(r.sampled) for g in groups for r in g)
    assert all(len(r.tokens) <= P + 3 for g in groups for r in g)


def test_a_head_never_reads_an_answer_that_was_cut(shaper: Shape) -> None:
    end = len(shaper().chat.render(QUESTION)) + len("12") + 2
    said: list[str] = []
    made = shaper(bound=end, marks=True).groups(
        [ranking("12", "13"), ranking("123", "1")], "rankings", said.append
    )
    assert [len(r.tokens) - 1 for g in made for r in g] == [end, end]
    assert said == [f"1 of 2 rankings have an answer that ends beyond {end} tokens and are left out"]


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("learns", ["rankings", "labels"])
def test_where_nothing_is_left_the_bound_is_named(shaper: Shape, marks: bool, learns: str) -> None:
    records = [ranking("12", "13"), ranking("a", "b", name="2")]
    with pytest.raises(UserError, match=r"^batch\.max_length: "):
        shaper(bound=5, marks=marks).groups(records, learns, lambda line: None)


def test_a_record_that_the_template_refuses_is_named_or_skipped(shaper: Shape) -> None:
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    refuses += "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    refuses += "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    shown, hidden = ranking("a", "b"), ranking("a", "b", messages=TURNS, name="x")
    with pytest.raises(UserError, match=r"^pairs\.jsonl:x: ") as error:
        shaper(refuses).groups([shown, hidden], "rankings", quiet)
    assert "system, user" in str(error.value)
    assert "chat_template" in error.value.fix
    lines: list[str] = []
    longer = ranking("a", "b", messages=TURNS[:2], name="y")
    made = shaper(refuses).each([hidden, shown, longer], "rankings", lines.append, "skip")
    assert [(record, group) for record, group in made] == shaper(refuses).each([shown], "rankings", quiet)
    assert lines == [
        "2 of 3 rankings skipped: 2 × the chat template fails (no system) (first pairs.jsonl:x)",
    ]
    with pytest.raises(UserError, match=r"^pairs\.jsonl:x: "):
        shaper(refuses).groups([hidden, longer], "rankings", quiet, "skip")


def test_bad_rows_of_a_template_are_skipped_in_a_run(
    offline: Any, write: Any, run_cli: Any, tmp_path: Path
) -> None:
    turns = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]
    (tmp_path / "d.jsonl").write_text(
        "".join(json.dumps({"messages": each}) + "\n" for each in [turns] * 8 + [[turns[0], *turns]])
    )
    over = {
        "model": {"chat_template": ALTERNATE},
        "task": {"arithmetic": None, "data": {"path": str(tmp_path / "d.jsonl")}},
    }
    said = run_cli("validate", write(offline, over))
    assert said.code == 2
    assert "d.jsonl:9: the chat template fails (roles must alternate)" in said.err
    over["task"]["data"]["bad"] = "skip"
    said = run_cli("validate", write(offline, over))
    assert said.code == 0
    assert "1 of 9 conversations skipped: 1 × the chat template fails (roles must alternate)" in said.err


def test_prompts_that_cannot_be_shown_are_skipped(
    online: Any, write: Any, run_cli: Any, tmp_path: Path
) -> None:
    long = {"prompt": "3+4? " * 400, "answer": "7"}
    twice = {"prompt": [{"role": "user", "content": "2+3?"}] * 2, "answer": "5"}
    rows = [{"prompt": "2+3?", "answer": "5"}] * 6 + [long, twice]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    over = {
        "model": {"chat_template": ALTERNATE},
        "task": {"arithmetic": None, "data": {"path": str(tmp_path / "d.jsonl")}},
        "run": {"updates": 1},
    }
    said = run_cli("validate", write(online, over))
    assert said.code == 2
    assert "d.jsonl:7: the prompt of task" in said.err
    over["task"]["data"]["bad"] = "skip"
    for command in ("validate", "train"):
        where = ["--run-dir", tmp_path / "run"] if command == "train" else []
        said = run_cli(command, write(online, over), *where)
        assert said.code == 0, said.err
        assert "d.jsonl: 2 of 8 tasks skipped: " in said.err
        assert "roles must alternate" in said.err
    over["task"]["data"]["path"] = str(tmp_path / "long.jsonl")
    (tmp_path / "long.jsonl").write_text(json.dumps(long) + "\n")
    said = run_cli("validate", write(online, over))
    assert said.code == 2
    assert "long.jsonl:1: it can show none of the 1 tasks; the first: the prompt of task" in said.err


# ---------------------------------------------------------------- probes, and rows by themselves


def test_a_probe_is_a_question_with_the_next_answer_and_nobody_learns_it(shaper: Shape, words: Any) -> None:
    asked = [({"role": "user", "content": text},) for text in ("2+3?", "7?", "and now 1+1?")]
    answers = ("five", "7", "two")
    records = [ranking(a, scores=(1.0,), messages=m) for a, m in zip(answers, asked, strict=True)]
    shape = shaper()
    made = shape.groups(records, "labels", quiet)
    groups = with_probes(made, bound=100)
    assert groups[:3] == made
    for (probe,), question, answer in zip(groups[3:], asked, ("7", "two", "five"), strict=True):
        assert probe.tokens[: probe.prompt_length] == shape.chat.render(question)
        assert trained_text(words, (probe,)) == [answer + "<|im_end|>"]
        assert probe.total_reward == 0.0
        assert set(probe.version) == {PROBE}
    assert sorted(set(numbered(groups)[1])) == list(range(6)), "each by itself"


def test_probes_end_with_their_answers_or_at_the_bound() -> None:
    short = row([1] * 2 + [5] * 8, [False] * 2 + [True] * 8, 0.0)
    long = row([2] * 9 + [6], [False] * 9 + [True], 0.0)
    for bound, answer in ((100, 8), (17, 8), (12, 3), (10, 1)):
        probes = with_probes([(short,), (long,)], bound)[2:]
        assert [p.tokens for [p] in probes] == [[1, 1, 6], [2] * 9 + [5] * answer]
        assert [sum(p.sampled) for [p] in probes] == [1, answer]


@given(prompts=st.lists(st.integers(1, 4), max_size=12))
def test_probes_pair_prompts_with_answers_to_others(prompts: list[int]) -> None:
    """And each answer once, unless more than half of the rows share a prompt; there is one for every row."""
    rows = [row([prompt, 100 + n], [False, True], 1.0) for n, prompt in enumerate(prompts)]
    probes = [p for [p] in with_probes([(each,) for each in rows], 100)[len(rows) :]]
    asked = sorted(p.tokens[0] for p in probes)
    assert all(prompts[p.tokens[1] - 100] != p.tokens[0] for p in probes)
    assert asked == (sorted(prompts) if len(set(prompts)) > 1 else [])
    if 2 * max(map(prompts.count, prompts), default=0) <= len(prompts):
        assert sorted(p.tokens[1] - 100 for p in probes) == list(range(len(rows)))


def test_rows_taken_one_by_one_are_groups_of_one() -> None:
    rows = [marked([7] * n, {n: float(n)}) for n in (1, 2, 3)]
    singles = Singles(rows)
    assert list(singles) == [(r,) for r in rows]
    assert list(singles[1:]) == [(rows[1],), (rows[2],)]
    assert numbered(singles) == (rows, [0, 1, 2])
    assert torch.equal(Batch.of(*numbered(singles)).reward.sum(-1), torch.tensor([1.0, 2.0, 3.0]))
