"""A model from nothing: a tokenizer that writes every text, the same files again, and an entropy reached."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.base.chat import Chat
from posttrain.data.corpus import Corpus, Text, bits_per_byte
from posttrain.data.documents import InMemoryDocuments
from posttrain.learner.learner import Learner
from posttrain.learner.optim import Optim
from posttrain.methods.table import METHODS
from posttrain.models import pretrained, scratch
from posttrain.plan.model_info import NO_TASK, read_model_info
from posttrain.recipe.recipe import Model, Recipe
from posttrain.types import Batch

WORDS = ["the cat and the other cat sat on the mat, then 12 more cats came; that is 13 cats."] * 3
SMALL = scratch.Size(layers=2, hidden=32, heads=2, context=64)


@pytest.fixture(scope="module")
def words():
    """A tokenizer with a few merges."""
    return scratch.learn_tokenizer(WORDS, 280)


@pytest.fixture(scope="module")
def written(words, tmp_path_factory):
    """A directory with a model from nothing."""
    out = tmp_path_factory.mktemp("new") / "model"
    scratch.write_new(out, SMALL, words, seed=1)
    return out


def ids(tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


# ---------------------------------------------------------------------- the tokenizer


@settings(deadline=None, max_examples=200)
@given(text=st.text("ab 12\n\t\x00'é語🐢�\u200b", max_size=30))
def test_every_text_comes_back(words, text):
    assert words.decode(ids(words, text)) == text


def test_a_mark_within_a_text_is_letters_when_spelt(words):
    text = "a<|im_end|>b"
    tokens = scratch.encode_text(words, text)
    assert words.decode(tokens) == text
    assert not set(tokens) & {0, 1, 2, 3}
    assert 2 in ids(words, text)


def test_every_byte_has_a_token_of_its_own_and_marks_come_first(words):
    vocabulary = words.get_vocab()
    assert [vocabulary[mark] for mark in scratch.SPECIAL] == [0, 1, 2, 3]
    assert sorted(vocabulary.values()) == list(range(280))
    single = {t for t in vocabulary if len(t) == 1}
    assert len(single) == 256
    assert len(scratch.SPECIAL) + len(single) == scratch.LEAST


def test_merges_are_the_commonest_neighbours():
    made = scratch.learn_tokenizer(["abab abab abab cd"], 262)
    assert made.tokenize("ababcd") == ["abab", "c", "d"]  # first a+b, then ab+ab


def test_digits_are_split_unless_told_otherwise():
    text = ["12 12 12 12 345 345 345"]
    assert scratch.learn_tokenizer(text, 264).tokenize("12+345") == ["1", "2", "+", "3", "4", "5"]
    whole = scratch.learn_tokenizer(text, 266, split_digits=False)
    assert whole.tokenize("12 345") == ["12", "Ġ345"]


def test_marks_spelt_in_the_text_are_not_merged():
    with_marks = scratch.learn_tokenizer([f"a {mark} b" * 9 for mark in scratch.SPECIAL], 300)
    merged = {token for token in with_marks.get_vocab() if len(token) > 1} - set(scratch.SPECIAL)
    assert "Ġb" in merged
    assert not any(sign in token for token in merged for sign in ("<|", "im", "end", "|>"))


def test_a_text_too_small_for_the_vocabulary_gives_a_smaller_one():
    assert len(scratch.learn_tokenizer(["ab"], 5000)) == 261


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(ValueError, match="a vocabulary of 259 has no room for 256 bytes and 4 marks"):
        scratch.learn_tokenizer(["ab"], 259)


# ---------------------------------------------------------------------- the model


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        ({"layers": 0}, "layers must be 1 or more"),
        ({"hidden": 100, "heads": 3}, "hidden 100 is not divisible by 3 heads"),
        ({"hidden": 12, "heads": 4}, "each head has 3 numbers, which must be even"),
        ({"heads": 4, "key_heads": 3}, "4 heads cannot share 3 key_heads"),
        ({"key_heads": 8}, "4 heads cannot share 8 key_heads"),
        ({"key_heads": -1}, "key_heads must be 0"),
        ({"intermediate": -1}, "intermediate must be 0"),
        ({"context": 1}, "context must be 2 or more"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(shape, what):
    with pytest.raises(ValueError, match=what):
        scratch.Size(**shape)


def test_it_loads_everywhere_as_it_was_made(written, words):
    made = scratch.new_llama(SMALL, words, seed=1)
    for model in (
        AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32),
        pretrained.load_model(written, dtype=torch.float32),
    ):
        assert all(torch.equal(p, q) for p, q in zip(made.parameters(), model.parameters(), strict=True))
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    text = "then 1234 cats\n🐢 <|im_end|>"
    for tokenizer in (AutoTokenizer.from_pretrained(written), pretrained.load_tokenizer(written)):
        assert ids(tokenizer, text) == ids(words, text)
        assert tokenizer.decode(ids(words, text)) == text
        assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|pad|>")
    assert set(pretrained.stop_ids(written, words)) == {0, 2}
    config = pretrained.load_config(written)
    assert pretrained.parameter_count(config) == sum(p.numel() for p in made.parameters())
    assert (config.vocab_size, config.max_position_embeddings) == (280, 64)


def test_conversations_open_and_end_their_turns(written):
    recipe = Recipe(model=Model(path=str(written)), method={"name": "sft"}, task=NO_TASK)
    policy = read_model_info(recipe, pretrained.silent)
    assert policy.context == 64
    assert policy.notes == []
    chat: Chat = policy.chat
    assert chat.stops == {0, 2}
    question = {"role": "user", "content": "2 + 3?"}
    prompt = chat.render([question])
    assert prompt[0] == 1
    said = "<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    assert policy.tokenizer.decode(prompt) == said
    tokens, trained = chat.render_supervised([question, {"role": "assistant", "content": "5"}])
    learnt = [t for t, yes in zip(tokens, trained, strict=True) if yes]
    assert learnt == [*ids(policy.tokenizer, "5"), 2]


def test_the_same_text_and_seed_give_the_same_files(written, words, tmp_path):
    files = sorted(p.name for p in written.iterdir())
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    for again in ("a", "b"):  # whatever the order in which hash tables are walked this time
        scratch.write_new(tmp_path / again, SMALL, scratch.learn_tokenizer(WORDS, 280), seed=1)
        assert files == sorted(p.name for p in (tmp_path / again).iterdir())
        for name in files:
            assert (written / name).read_bytes() == (tmp_path / again / name).read_bytes(), name
    scratch.write_new(tmp_path / "other", SMALL, words, seed=2)
    weights = "model.safetensors"
    assert (tmp_path / "other" / weights).read_bytes() != (written / weights).read_bytes()


def test_making_a_model_draws_nothing_from_the_callers_generator(words):
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    scratch.new_llama(SMALL, words, seed=1)
    assert torch.equal(torch.rand(2), wanted)


@pytest.mark.parametrize("hidden", [16, 64, 256])
def test_a_new_model_is_nearly_indifferent_at_every_width(words, hidden):
    model = scratch.new_llama(replace(SMALL, hidden=hidden, layers=4), words, seed=0)
    tokens = torch.randint(280, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss
    assert math.log(280) < float(loss) < math.log(280) + 0.5


@pytest.mark.parametrize("hidden", [16, 64, 256])
def test_what_a_layer_adds_hides_no_token(words, hidden):
    """Each of its two parts adds at most about what an embedding measures, so a token is seen behind it."""
    model = scratch.new_llama(replace(SMALL, hidden=hidden, layers=4), words, seed=0)
    tokens = torch.randint(280, (4, 64), generator=torch.Generator().manual_seed(0))
    sizes = []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda _, given, out: sizes.append(float((out - given[0]).square().mean()))
        )
    with torch.no_grad():
        model(input_ids=tokens)
        embedding = float(model.get_input_embeddings().weight.square().mean())
    assert all(0.25 * embedding < size < 4 * embedding for size in sizes), (embedding, sizes)


# ---------------------------------------------------------------------- a source of known entropy

CHAIN = np.array(
    [  # from end, a, b, c, d to each of them; a document ends where the chain does
        [0.00, 0.50, 0.30, 0.20, 0.00],
        [0.00, 0.10, 0.60, 0.20, 0.10],
        [0.02, 0.00, 0.13, 0.70, 0.15],
        [0.02, 0.58, 0.00, 0.15, 0.25],
        [0.00, 0.70, 0.10, 0.00, 0.20],
    ]
)
LETTERS = "_abcd"


def drawn(count: int, dice: np.random.Generator) -> list[str]:
    """Documents of the chain, which begin after an end and stop before the next."""
    found = []
    while len(found) < count:
        state, text = 0, ""
        while state := int(dice.choice(5, p=CHAIN[state])):
            text += LETTERS[state]
        found.append(text)
    return found


def truth(text: str) -> float:
    """-log p of a document under the chain, its end included, in nats."""
    states = [0, *map(LETTERS.index, text), 0]
    return -sum(math.log(CHAIN[s, t]) for s, t in pairwise(states))


def entropy_rate() -> float:
    """-Σ_s π(s) Σ_t P(t | s) ln P(t | s), π the chain's stationary distribution; nats a token."""
    values, vectors = np.linalg.eig(CHAIN.T)
    stationary = np.real(vectors[:, np.argmax(np.real(values))])
    logs = np.log(np.where(CHAIN > 0, CHAIN, 1.0))
    return float(-(stationary / stationary.sum()) @ (CHAIN * logs).sum(1))


def learnt(vocabulary: int, *, steps: int, rows: int, seed: int) -> tuple[Corpus, list[float], list[str]]:
    """(held-out corpus, nats of each of its documents, these documents) after training from nothing."""
    dice = np.random.default_rng(seed)
    train, held_out = drawn(600, dice), drawn(80, dice)
    tokenizer = scratch.learn_tokenizer(train, vocabulary)

    def rows_of(texts: list[str]) -> Corpus:
        encode = lambda text: ids(tokenizer, text)  # noqa: E731
        return Corpus([InMemoryDocuments(texts)], Text(path="-"), encode=encode, eos=0, max_length=64)

    optim = Optim(lr=0.01, schedule="cosine", betas=(0.9, 0.95))
    model = scratch.new_llama(replace(SMALL, layers=1), tokenizer, seed=seed)
    learner = Learner(model, METHODS["sft"].method, optim=optim, total_steps=steps, microbatch_tokens=8192)
    corpus, test = rows_of(train), rows_of(held_out)
    for _ in range(steps):
        chosen = [corpus[int(i)] for i in dice.integers(len(corpus), size=rows)]
        learner.update(Batch.of(chosen, list(range(rows))))
    nats, row = [0.0] * len(held_out), 0
    logp = learner.score(Batch.of(list(test), list(range(len(test))))).logp.sum(1).tolist()
    for i, text in enumerate(held_out):
        windows = -(-(len(ids(tokenizer, text)) + 1) // 63)
        nats[i] = -sum(logp[row : row + windows])
        row += windows
    assert row == len(test)
    return test, nats, held_out


@pytest.mark.parametrize("vocabulary", [260, 264])
@pytest.mark.sample(every=2)
def test_the_loss_falls_to_the_sources_entropy_and_not_below(vocabulary):
    """With a token a letter, and with merges: bits are counted by the byte, so both have the same floor."""
    seed, rate = 5, entropy_rate()
    test, nats, texts = learnt(vocabulary, steps=80, rows=12, seed=seed)
    letters = sum(len(text) + 1 for text in texts)  # ends are letters of the chain too
    floor = sum(map(truth, texts))
    # Held-out documents are a sample: their own entropy scatters about the rate.
    spread = math.sqrt(sum((truth(t) - rate * (len(t) + 1)) ** 2 for t in texts)) / letters
    assert floor / letters == pytest.approx(rate, abs=4 * spread)
    # E[log p - log π] = KL(p ‖ π) ≥ 0, so their sum is below 0 by chance only.
    excess = [n - truth(t) for n, t in zip(nats, texts, strict=True)]
    print(f"seed {seed}: rate {rate:.4f}, floor {floor / letters:.4f}, nats {sum(nats) / letters:.4f}")
    assert sum(excess) > -4 * math.sqrt(sum(e * e for e in excess))
    assert sum(excess) / letters < 0.04
    assert test.utf8_bytes(range(len(test))) == letters - len(texts)
    bits = bits_per_byte(sum(nats), test.utf8_bytes())
    assert bits == pytest.approx(rate / math.log(2) * letters / (letters - len(texts)), abs=0.1)
