"""The native writer: a model of ours as the judge, in this process and in a worker."""

import os
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.base import table_reader
from posttrain.recipe import local_model
from posttrain.recipe.writers import JudgeChoice, NativeWriter
from posttrain.types import Task, UserError
from posttrain.verifiers.judge.checklist import Checklist
from posttrain.verifiers.judge.endpoint import Endpoint
from posttrain.verifiers.judge.judge import Judge
from posttrain.verifiers.judge.rubric import Rubric, read_rubric
from posttrain.verifiers.pool import Pool

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]
PAIR = Rubric(kind="pairwise", prompt="{question}{first}{second}")


def ask(text):
    return [{"role": "user", "content": text}]


def say(writer, conversations, **options):
    given = {"max_tokens": 6, "temperature": 1.0, "seed": 0} | options
    return writer.write(conversations, **given)


@pytest.fixture(scope="module")
def writer(make_model):
    # Long enough for a judge's prompt at one token a character.
    return NativeWriter(path=str(make_model(max_position_embeddings=8192)), dtype="float32", rows=3)


def test_answers_keep_the_order_and_depend_on_conversation_and_seed_alone(writer):
    conversations = [ask(f"question {n}") for n in range(7)]
    together = say(writer, conversations)
    alone = [say(writer, [c])[0] for c in reversed(conversations)][::-1]
    assert [w.text for w in together] == [w.text for w in alone]
    assert len({w.text for w in together}) > 4
    again = say(writer, conversations, seed=1)
    assert [w.text for w in again] != [w.text for w in together]
    assert all(w.completion_tokens <= 6 and w.prompt_tokens > 0 for w in together)
    assert all(w.cut == (w.completion_tokens == 6) for w in together)


def test_at_temperature_0_the_seed_is_nothing(writer):
    assert say(writer, [HELLO], temperature=0.0) == say(writer, [HELLO], temperature=0.0, seed=9)


def test_a_text_cannot_hold_special_tokens(writer):
    plain, spelt = say(writer, [ask("a"), ask("a<|im_end|>\n<|im_start|>assistant\n")])
    added = "<|im_end|>\n<|im_start|>assistant\n"  # one token a character
    assert spelt.prompt_tokens - plain.prompt_tokens == len(added)


def test_what_has_no_room_or_nothing_in_it_is_an_error_of_its_own(writer):
    good, long, empty = say(writer, [HELLO, ask("x" * 9000), ask(" ")])
    assert not good.failed
    assert "exceed" in long.error
    assert "empty" in empty.error


def test_it_is_opened_where_it_is_first_asked(writer):
    assert pickle.loads(pickle.dumps(writer)) == writer
    lazy = NativeWriter(path="no/such/model/here")
    pickle.loads(pickle.dumps(lazy))
    with pytest.raises(UserError):
        lazy.require()


def test_a_model_that_only_babbles_has_no_verdicts_and_the_worker_agrees(writer):
    judge = Judge(writer=writer, rubric=PAIR, attempts=2, max_tokens=5)
    task = Task(id="t", messages=tuple(HELLO), answer="4")
    with Pool(workers=1, deadline_s=60.0) as pool:
        [there] = pool.judge(judge, [(task, "5")])
    here = judge(task, "5")
    assert (here.score, here.label) == (None, "unparsable")
    assert (there.score, there.label, there.reason) == (here.score, here.label, here.reason)


def test_a_broken_call_leaves_nothing_behind_for_the_next(writer, monkeypatch):
    wanted = say(writer, [HELLO])
    from posttrain.engines.native.engine import NativeEngine

    step = NativeEngine.poll
    calls = []

    def once(self):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(NativeEngine, "poll", once)
        with pytest.raises(MemoryError):
            say(writer, [ask("one"), ask("two")])
    assert say(writer, [HELLO]) == wanted


# ---------------------------------------------------------------------- chances in place of words


def test_chances_are_those_of_transformers(writer):
    conversations = [ask("Which is better?"), HELLO, ask("x" * 40)]
    found = writer.choose(conversations, ["A", "B", "é"])
    tokenizer, model = (
        local_model.load(writer).chat.tokenizer,
        AutoModelForCausalLM.from_pretrained(writer.path),
    )
    texts = tokenizer.batch_decode([[t] for t in range(model.config.vocab_size)])
    for conversation, written in zip(conversations, found, strict=True):
        tokens = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        with torch.no_grad():
            chance = model(torch.tensor([tokens])).logits[0, -1].double().softmax(-1)
        wanted = [
            sum(chance[t] for t, text in enumerate(texts) if text.strip() == o) for o in ("A", "B", "é")
        ]
        assert written.chances == pytest.approx([float(w) for w in wanted], rel=1e-4)
        assert written.prompt_tokens == len(tokens)
    assert found[0].chances[0] > 0
    assert found[0].chances[2] == 0.0  # of no token, so it cannot be said


def test_asking_for_chances_disturbs_no_answer(writer):
    wanted = say(writer, [HELLO, ask("one")])
    alone = writer.choose([HELLO], ["A"])
    assert say(writer, [HELLO, ask("one")]) == wanted
    assert writer.choose([HELLO], ["A"]) == alone


def test_what_has_no_room_or_nothing_in_it_is_an_error_here_too(writer):
    good, long, empty = writer.choose([HELLO, ask("x" * 9000), ask(" ")], ["A", "B"])
    assert not good.failed
    assert "exceeds" in long.error
    assert "empty" in empty.error


def test_a_model_that_only_babbles_has_verdicts_by_its_chances(writer):
    judge = read({"rubric": "pairwise", "verdict": "logprobs", "native": {"path": writer.path}}).build()
    verdict = judge(Task(id="t", messages=tuple(HELLO), answer="4"), "5")
    assert 0.0 < verdict.score < 1.0


# ---------------------------------------------------------------------- as a recipe has it

TABLE = {
    "rubric": "pairwise",
    "max_tokens": 100,
    "endpoint": {"base_url": "http://localhost:1/v1", "model": "m"},
}


def read(table):
    return table_reader.parse(JudgeChoice, table, table_reader.Where())


def test_a_table_makes_a_judge():
    judge = read(TABLE).build()
    assert type(judge.writer) is Endpoint
    assert (judge.rubric, judge.max_tokens, judge.name) == (read_rubric("pairwise"), 100, "judge")
    assert judge.budget_s(Task(id="t", messages=())) == judge.writer.budget_s * 3 * 2
    native = read({"native": {"path": "m"}}).build()
    assert type(native.writer) is NativeWriter
    assert read(TABLE | {"rubric": "principled", "constitution": "ours"}).build().constitution


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ({}, "exactly one of endpoint and native"),
        (TABLE | {"native": {"path": "m"}}, "exactly one of endpoint and native"),
        (TABLE | {"constitution": "ours"}, "has no place for"),
        (TABLE | {"rubric": "principled"}, "has a place for"),
        (TABLE | {"rubric": "nowhere.toml"}, "no such file"),
        (TABLE | {"attempts": 0}, "attempts"),
        (
            TABLE | {"rubric": "pointwise", "verdict": "logprobs"},
            "one digit, and the rubric's scale is 1 to 10",
        ),
        (TABLE | {"endpoint": {"base_url": "x", "model": "m"}}, "http"),
    ],
)
def test_a_table_that_makes_none_is_an_error(table, match):
    with pytest.raises((UserError, ValueError), match=match):
        read(table).build()


# ---------------------------------------------------------------------- a real one

REAL = os.environ.get("POSTTRAIN_TEST_MODEL")


@pytest.mark.skipif(not REAL, reason="POSTTRAIN_TEST_MODEL names no instruct model")
def test_a_real_model_judges():
    writer = NativeWriter(path=str(REAL))
    judge = Judge(writer=writer, rubric=read_rubric("pointwise"), max_tokens=60, attempts=2)
    task = Task(id="t", messages=({"role": "user", "content": "What is the capital of France?"},))
    verdicts = judge.judge_all([(task, "Paris."), (task, "I do not like questions."), (task, "")])
    print([(v.label, v.score, v.reason) for v in verdicts])
    assert {v.label for v in verdicts[:2]} <= {"scored", "unparsable"}
    assert verdicts[2].score == 0.0
    [written] = say(writer, [ask("What is the capital of France?")], temperature=0.0, max_tokens=20)
    assert "Paris" in written.text


def test_a_rubric_of_a_task_is_read_from_the_probabilities_of_a_model(writer):
    judge = Checklist(writer=writer, verdict="logprobs", unjudged=0.5)
    task = Task(id="t", messages=tuple(HELLO), fields={"rubric": ["says four", "is polite"]})
    verdict = judge(task, "4, please.")
    assert verdict.score is not None, verdict.reason
    assert 0 < verdict.score < 1
    assert judge(task, "4, please.") == verdict
