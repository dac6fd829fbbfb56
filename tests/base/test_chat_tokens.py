"""Conversations as tokens: only ever extended, and exact at every boundary, under any template."""

import copy
import random
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from posttrain.base import plain_template
from posttrain.base.chat import Chat
from posttrain.types import UserError

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETFUL = CHATML.replace(
    "message['content'] + '<|im_end|>'",
    "(message['content'].split('</think>')[-1] if message['role'] == 'assistant' and not loop.last "
    "else message['content']) + '<|im_end|>'",
)
"""As many reasoning models do, it drops the reasoning of every turn but the last."""
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
BARE = (
    "{% for m in messages %}{{ '### ' + m['role'] + '\n' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant\n' }}{% endif %}"
)
"""No token ends a turn."""
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)
"""A token begins a turn, and none ends it."""

USER = [{"role": "user", "content": text} for text in ("What is 3 + 4?", "And twice that?\n", " ok ")]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, with merges that reach over spaces and newlines, so that boundaries matter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("Ġ", "1"), ("1", "4"), ("Ġ", "Ġ"), ("i", "s"), ("Ġ", "is"), (".", "Ċ")]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Split(pattern="\x00", behavior="isolated")
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|pad|>", bos_token="<|bos|>"
    )
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|stop|>"]})
    made.chat_template = CHATML
    return made


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_a_template_that_asks_for_the_date_is_told_the_one_given(tokenizer: PreTrainedTokenizerFast) -> None:
    dated = "{{ 'Today is ' + strftime_now('%d %B %Y') }}" + CHATML
    chat = Chat(tokenizer, dated, today=datetime(2024, 2, 29))
    assert "Today is 29 February 2024" in tokenizer.decode(chat.render(USER[:1]))


def test_the_first_prompt_is_the_template_up_to_where_the_policy_speaks(tokenizer):
    tokens = Chat(tokenizer).render(USER[:1])
    assert tokenizer.decode(tokens) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("template", [CHATML, BRACKETS, "none"])
def test_the_longest_of_many_prompts_is_that_of_each_by_itself(tokenizer, template):
    chat, draw = Chat(tokenizer, template), random.Random(7)
    parts = ["1", "14", "<|im_end|>", " is", "\n\n", "日本", "\ufdd0", ".\n"]
    for _ in range(30):
        texts = ["x" + "".join(draw.choices(parts, k=draw.randrange(9))) for _ in range(draw.randrange(1, 6))]
        prompts = [[{"role": "user", "content": text}] for text in texts]
        assert chat.longest(prompts) == max(len(chat.render(prompt)) for prompt in prompts), texts
    with pytest.raises(UserError, match="prompt is empty"):
        chat.longest([USER[:1], [{"role": "user", "content": " "}]])


def test_a_turn_that_the_policy_ended_is_not_ended_twice(tokenizer):
    chat, end = Chat(tokenizer), tokenizer.eos_token_id
    prompt = chat.render(USER[:1])
    said = ids(tokenizer, "It is 14.")
    cut = chat.extend(prompt + said, USER[1:2])
    ended = chat.extend([*prompt, *said, end], USER[1:2])
    assert cut == [end, *ended]
    assert (
        tokenizer.decode(ended) == "\n<|im_start|>user\nAnd twice that?\n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_another_end_token_of_the_model_stands_for_the_end_of_the_turn(tokenizer):
    stop = tokenizer.convert_tokens_to_ids("<|stop|>")
    chat = Chat(tokenizer, ends=frozenset({stop}))
    prompt = chat.render(USER[:1])
    assert chat.extend([*prompt, 65, stop], USER[1:2]) == chat.extend(
        [*prompt, 65, tokenizer.eos_token_id], USER[1:2]
    )
    assert chat.stops == {stop, tokenizer.eos_token_id}
    assert len(Chat(tokenizer).extend([*prompt, 65, stop], USER[1:2])) == 1 + len(
        chat.extend([*prompt, 65, stop], USER[1:2])
    )


@pytest.mark.parametrize("template", [CHATML, FORGETFUL, BRACKETS, BARE, MARKED, "none"])
def test_whatever_is_sampled_a_conversation_only_grows(tokenizer, template):
    """Sampled tokens need not be what the tokenizer makes of their text: they stay as they are."""
    chat, draw = Chat(tokenizer, template), random.Random(0)
    end = tokenizer.eos_token_id
    for _ in range(50):
        tokens = chat.render(USER[:1])
        for turn in range(3):
            # "1" and "4" apart, where the tokenizer would write "14"; half a character; nothing at all.
            pieces = [
                *ids(tokenizer, "1"),
                *ids(tokenizer, "4"),
                *ids(tokenizer, "é")[:1],
                *ids(tokenizer, "\n"),
            ]
            said = [draw.choice(pieces) for _ in range(draw.randrange(5))] + [end] * draw.randrange(2)
            before = tokens + said
            added = chat.extend(before, USER[turn : turn + 1])
            assert added
            assert tokenizer.decode(added).count(USER[turn]["content"]) == 1
            if chat.extend([*before, 65], USER[turn : turn + 1])[:1] == [end]:  # the template ends turns
                assert (before + added)[len(tokens) :].count(end) == max(1, said.count(end)) + (
                    1 if template in (CHATML, FORGETFUL) else 0
                )
            tokens = before + added


@pytest.mark.parametrize("template", [CHATML, BRACKETS])
def test_extending_says_what_the_template_says(tokenizer, template):
    chat = Chat(tokenizer, template)
    tokens = chat.render(USER[:1])
    messages = list(USER[:1])
    for turn, answer in enumerate(("14", "It is.\n\n"), start=1):
        space = " " if template == BRACKETS else ""
        tokens += [*ids(tokenizer, space + answer), tokenizer.eos_token_id]
        tokens += chat.extend(tokens, USER[turn : turn + 1])
        messages += [{"role": "assistant", "content": answer}, USER[turn]]
    whole = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(tokens) == whole


def test_reasoning_of_earlier_turns_stays_where_the_policy_said_it(tokenizer):
    chat = Chat(tokenizer, FORGETFUL)
    tokens = [*chat.render(USER[:1]), *ids(tokenizer, "<think>3+4</think>7"), tokenizer.eos_token_id]
    longer = tokens + chat.extend(tokens, USER[1:2])
    assert longer[: len(tokens)] == tokens
    assert "<think>3+4</think>7" in tokenizer.decode(longer)


def test_a_mark_that_opens_a_turn_is_not_taken_for_one_that_ends_it(tokenizer):
    chat = Chat(tokenizer, MARKED)
    added = chat.extend([*chat.render(USER[:1]), 65, tokenizer.eos_token_id], USER[1:2])
    assert tokenizer.decode(added).startswith("<|im_start|>user ")


def test_a_message_may_say_what_the_placeholder_says(tokenizer):
    chat = Chat(tokenizer)
    message = {"role": "user", "content": "posttrainplaceholder question"}
    added = tokenizer.decode(chat.extend(chat.render(USER[:1]), [message]))
    assert added == f"<|im_end|>\n<|im_start|>user\n{message['content']}<|im_end|>\n<|im_start|>assistant\n"


SPOKEN = [
    {"role": "system", "content": "Sum."},
    USER[0],
    {"role": "assistant", "content": "14 is 14."},
    USER[1],
    {"role": "assistant", "content": "28"},
]


def trained_text(tokenizer, tokens: list[int], trained: list[bool]) -> str:
    return tokenizer.decode([t for t, is_trained in zip(tokens, trained, strict=True) if is_trained])


def test_supervised_trains_what_assistants_say_and_the_end_of_their_turns(tokenizer):
    tokens, trained = Chat(tokenizer).render_supervised(SPOKEN)
    assert tokenizer.decode(tokens) == tokenizer.apply_chat_template(SPOKEN, tokenize=False)
    assert trained_text(tokenizer, tokens, trained) == "14 is 14.<|im_end|>28<|im_end|>"


def test_supervised_has_the_boundaries_of_a_sampled_conversation(tokenizer):
    for template in (CHATML, FORGETFUL, BARE, MARKED, "none"):
        chat = Chat(tokenizer, template)
        tokens, trained = chat.render_supervised(SPOKEN)
        sampled = chat.render(SPOKEN[:2])
        assert not any(trained[: len(sampled)])
        sampled += [*ids(tokenizer, "14 is 14."), tokenizer.eos_token_id]
        sampled += chat.extend(sampled, SPOKEN[3:4])
        sampled += [*ids(tokenizer, "28"), tokenizer.eos_token_id]
        assert tokens[: len(sampled)] == sampled, template
        assert sum(trained) == len(ids(tokenizer, "14 is 14.")) + len(ids(tokenizer, "28")) + 2


def test_supervised_is_not_found_by_looking_for_words(tokenizer):
    """The question holds the answer, and the answer holds the question's words."""
    messages = [{"role": "user", "content": "Say 7: 7"}, {"role": "assistant", "content": "7"}]
    tokens, trained = Chat(tokenizer).render_supervised(messages)
    assert trained_text(tokenizer, tokens, trained) == "7<|im_end|>"
    assert trained.index(True) == len(Chat(tokenizer).render(messages[:1]))


def test_supervised_keeps_reasoning_in_every_turn(tokenizer):
    said = [dict(message) for message in SPOKEN]
    said[2]["content"] = "<think>7+7</think>14"
    tokens, trained = Chat(tokenizer, FORGETFUL).render_supervised(said)
    assert trained_text(tokenizer, tokens, trained) == "<think>7+7</think>14<|im_end|>28<|im_end|>"


@pytest.mark.parametrize("opening", ["", "<think>\n"])
def test_a_thought_that_a_template_cuts_out_of_every_answer_is_learnt(tokenizer, opening):
    """As DeepSeek-R1's does, in its older form and in the one whose prompts open a thought."""
    prompt = "'<|im_start|>assistant\n'"
    template = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
    template = template.replace(prompt, prompt[:-1] + opening + "'")
    chat, said = Chat(tokenizer, template), [dict(message) for message in SPOKEN]
    said[2]["content"] = said[4]["content"] = "<think>\n7+7\n</think>\n14"
    learnt = "<think>\n7+7\n</think>\n14<|im_end|>".removeprefix(opening)
    tokens, trained = chat.render_supervised(said)
    assert trained_text(tokenizer, tokens, trained) == learnt * 2
    first = chat.render(said[:2])
    assert tokens[: len(first)] == first
    [(tokens, trained)] = chat.render_answers(said[:2], [said[2]["content"]])
    assert trained_text(tokenizer, tokens, trained) == learnt
    assert tokens[: len(first)] == first


def test_words_of_an_answer_that_a_template_loses_are_told(tokenizer):
    """As Qwen 3's loses a part of an answer with two ends of a thought."""
    shown = "'<think>' + message['content'].split('</think>')[0] + message['content'].split('</think>')[-1]"
    chat = Chat(tokenizer, CHATML.replace("message['content']", shown))
    chat.render_answers(USER[:1], ["14"])
    with pytest.raises(UserError, match="the chat template leaves out what an assistant says"):
        chat.render_answers(USER[:1], ["7</think>or</think>14"])


def test_a_mark_that_opens_the_next_turn_may_end_this_one(tokenizer):
    """As in GLM 4's, where nothing else ends a turn: the mark is not there twice."""
    stop = tokenizer.convert_tokens_to_ids("<|stop|>")
    opens = "{% for m in messages %}{{ '<|stop|>' + m['role'] + m['content'] }}{% endfor %}"
    chat = Chat(
        tokenizer, opens + "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}", frozenset({stop})
    )
    said = [*chat.render(USER[:1]), 65]
    ended, cut = chat.extend([*said, stop], USER[1:2]), chat.extend(said, USER[1:2])
    assert cut == [tokenizer.eos_token_id, stop, *ended]


def test_plain_text_is_as_it_stands(tokenizer):
    chat = Chat(tokenizer, "none")
    assert chat.render([{"role": "user", "content": "3 + 4 ="}]) == ids(tokenizer, "3 + 4 =")
    tokens, trained = chat.render_supervised(
        [{"role": "user", "content": "3 + 4 ="}, {"role": "assistant", "content": " 7"}]
    )
    assert tokenizer.decode(tokens) == "3 + 4 = 7<|im_end|>"
    assert trained == [False] * 7 + [True] * 3
    assert tokenizer.decode(chat.extend(tokens, [{"role": "user", "content": "higher"}])) == "\nhigher"


def test_plain_text_of_several_turns_is_one_text_however_it_comes_about(tokenizer):
    chat = Chat(tokenizer, "none")
    said = [
        {"role": "system", "content": "Guess."},
        {"role": "user", "content": "Begin: "},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "higher"},
        {"role": "user", "content": "much: "},
        {"role": "assistant", "content": "8"},
    ]
    text = "Guess.\nBegin: 3<|im_end|>\nhigher\nmuch: 8<|im_end|>"
    learnt, trained = chat.render_supervised(said)
    assert tokenizer.decode(learnt) == text
    assert trained_text(tokenizer, learnt, trained) == "3<|im_end|>8<|im_end|>"
    played = chat.render(said[:2]) + chat.spell("3") + [tokenizer.eos_token_id]
    played = chat.extend(played, said[3:5])
    assert played == learnt[len(chat.render(said[:2])) + 2 : -2]
    assert [tokenizer.decode(tokens) for tokens in chat.render_for_judge(said[:5], ["8"])] == [text]
    assert tokenizer.apply_chat_template(said, chat_template=plain_template.TEMPLATE, tokenize=False) == text


def test_a_plain_answer_that_was_cut_off_is_ended(tokenizer):
    chat = Chat(tokenizer, "none")
    cut = [*chat.render([{"role": "user", "content": "Begin: "}]), *chat.spell("3")]
    assert tokenizer.decode(chat.extend(cut, [{"role": "user", "content": "higher"}])) == "<|im_end|>\nhigher"


def test_a_tokenizer_without_a_template_can_do_plain_text_only(tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(UserError, match=r"no chat template; set \[model\] chat_template"):
        Chat(bare)
    assert Chat(bare, "none").render(USER[:1]) == ids(tokenizer, "What is 3 + 4?")
    assert Chat(bare, CHATML).render(USER[:1]) == Chat(tokenizer).render(USER[:1])
    with pytest.raises(UserError, match="no eos token"):
        Chat(bare, "none").render_supervised(SPOKEN)


@pytest.mark.parametrize(
    "template",
    [
        " ",
        "{{",
        "{% for m in messages %}",
        "constant",
        "{{ messages[0].content }}",
        "{{ nothing.at.all }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_that_cannot_work_is_refused_when_it_is_chosen(tokenizer, template):
    with pytest.raises(UserError, match="chat_template"):
        Chat(tokenizer, template)


@pytest.mark.parametrize(
    "messages", [[], [{"role": "user", "content": ""}], [{"role": "user", "content": " \n"}]]
)
@pytest.mark.parametrize("template", [None, "none"])
def test_an_empty_prompt_is_refused(tokenizer, template, messages):
    with pytest.raises(UserError, match="the prompt is empty"):
        Chat(tokenizer, template).render(messages)


def test_messages_that_the_template_refuses_are_named(tokenizer):
    with pytest.raises(UserError, match=r"fails \(only user and assistant.*\): the roles are system, user"):
        Chat(tokenizer, BRACKETS).render(SPOKEN[:2])


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (USER[:1], "no assistant speaks"),
        ([SPOKEN[2]], "begins with the assistant"),
        (SPOKEN[:4], "does not end with the assistant"),
    ],
)
def test_conversations_that_teach_nothing_are_refused(tokenizer, messages, says):
    with pytest.raises(UserError, match=says):
        Chat(tokenizer).render_supervised(messages)


def test_a_template_whose_answers_cannot_be_cut_out_is_refused(tokenizer):
    """Its prompt opens reasoning that its answers do not show."""
    opening = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
    with pytest.raises(UserError, match=r"writes '<think>\\n' where an answer is asked for"):
        Chat(tokenizer, opening).render_supervised(SPOKEN)


def test_nothing_cannot_be_appended(tokenizer):
    with pytest.raises(UserError, match="no messages"):
        Chat(tokenizer).extend([1, 2], [])


# ---------------------------------------------------------------------- tokens as text


@pytest.fixture(scope="module")
def of_bytes():
    """A tokenizer with a token a byte, as those that learn pairs of bytes begin."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def test_the_last_token_of_a_character_adds_it_all(of_bytes):
    pieces = Chat(of_bytes, "none").pieces(of_bytes("aé🙂!").input_ids)
    assert pieces == ["a", "", "é", "", "", "", "🙂", "!"]


@given(st.text(max_size=20), st.lists(st.integers(0, 255), max_size=8))
def test_pieces_add_up_to_the_text_whatever_the_bytes(of_bytes, text, junk):
    tokens = of_bytes(text).input_ids + junk
    pieces = Chat(of_bytes, "none").pieces(tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == of_bytes.decode(tokens, clean_up_tokenization_spaces=False)


# ---------------------------------------------------------------------- how often the template is asked


@pytest.fixture
def texts(tokenizer, monkeypatch):
    """The conversations that a template was given."""
    given_: list[list] = []
    apply = PreTrainedTokenizerFast.apply_chat_template

    def spied(self, conversation, **options):
        given_.append(conversation)
        return apply(self, conversation, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", spied)
    return given_


@pytest.mark.parametrize("template", [CHATML, BRACKETS, BARE, MARKED, "none"])
def test_a_conversation_takes_one_text_a_turn_and_one_for_its_beginning(tokenizer, texts, template):
    chat = Chat(tokenizer, template)
    said = [message for n in range(4) for message in (USER[n % 3], {"role": "assistant", "content": f"{n}."})]
    texts.clear()
    chat.render_supervised(said)
    assert len(texts) == 1 + 4
    assert max(map(len, texts)) == 3, "no text but the prompt's grows with the conversation"
    texts.clear()
    chat.render_answers(said[:-1], ["a", "b", "c"])
    assert len(texts) == 1 + 3
    texts.clear()
    chat.render_for_judge(said[:-1], ["a", "b", "c"])
    assert len(texts) == 1


def test_a_message_that_the_template_leaves_out_is_never_lost(tokenizer):
    shown = "('' if message['role'] == 'tool' else message['content'])"
    deaf = CHATML.replace("message['content']", shown)
    chat = Chat(tokenizer, deaf)
    tool = {"role": "tool", "content": "5"}
    for call in (
        lambda: chat.render([*USER[:1], tool]),
        lambda: chat.extend([], [tool]),
        lambda: chat.render_supervised([USER[0], SPOKEN[2], tool, SPOKEN[4]]),
        lambda: chat.render_for_judge([USER[0], tool], ["a"]),
    ):
        with pytest.raises(UserError, match="leaves out or alters what the tool says"):
            call()


def test_a_token_that_the_model_does_not_know_is_refused_where_it_is_said(tokenizer):
    known = Chat(tokenizer, CHATML, embedded=len(tokenizer))
    assert known.render(USER[:1]) == Chat(tokenizer, CHATML).render(USER[:1])
    last = max(tokenizer.get_vocab().values())
    assert tokenizer.convert_ids_to_tokens(last) == "<|stop|>"
    asked = [{"role": "user", "content": "<|stop|>"}]
    Chat(tokenizer, CHATML, embedded=last).render(asked)
    with pytest.raises(UserError, match="no embedding"):
        Chat(tokenizer, CHATML, embedded=last, parse_special=True).render(asked)


TOOL_USE = (
    "{% if tools %}tools:{% for t in tools %}{{ t['function']['name'] }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
SEARCH = {"type": "function", "function": {"name": "search", "description": "", "parameters": {}}}


@pytest.fixture
def with_several(tokenizer):
    """A tokenizer with the templates "default", "tool_use" and "rag"."""
    several = copy.deepcopy(tokenizer)
    several.chat_template = {"default": CHATML, "tool_use": TOOL_USE, "rag": BRACKETS}
    return several


def test_tool_template_is_used_in_every_turn_with_tools(tokenizer, with_several):
    chat, one, question = Chat(with_several), Chat(tokenizer, TOOL_USE), [{"role": "user", "content": "hi"}]
    assert chat.render(question) == Chat(tokenizer, CHATML).render(question)
    assert chat.render(question, [SEARCH]) == one.render(question, [SEARCH])
    found = [{"role": "tool", "content": "42"}]
    said = [*chat.render(question, [SEARCH]), *ids(tokenizer, "call")]
    assert chat.extend(said, found, [SEARCH]) == one.extend(said, found)
    assert chat.extend(said, found) == Chat(tokenizer, CHATML).extend(said, found)
    call, answer = ({"role": "assistant", "content": text} for text in ("call", "x"))
    taught = [*question, call, *found, answer]
    assert chat.render_supervised(taught, [SEARCH]) == one.render_supervised(taught, [SEARCH])


def test_template_is_chosen_by_its_name(tokenizer, with_several):
    question = [{"role": "user", "content": "hi"}]
    assert Chat(with_several, "rag").render(question) == Chat(tokenizer, BRACKETS).render(question)
    assert Chat(with_several, CHATML).render(question) == Chat(tokenizer, CHATML).render(question)
    assert Chat(with_several, "none").render(question) == Chat(tokenizer, "none").render(question)
    del with_several.chat_template["default"]
    with pytest.raises(UserError, match=r"^model\.chat_template: ") as caught:
        Chat(with_several)
    assert caught.value.key == "model.chat_template"
