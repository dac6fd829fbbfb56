"""A stop string is found in the end of an answer exactly when it is found in all of it, at a fixed price."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from posttrain.engines.sequence import tail

WORDS = [
    "stop",
    " stop",
    "S",
    "TO",
    "P",
    "\n",
    "\n\n",
    " ",
    "  ",
    "Observation",
    ":",
    ".",
    "é",
    "好",
    "🙂",
    "a" * 40,
]


def decoder_of(core: Tokenizer) -> Callable[[list[int]], str]:
    return lambda tokens: core.decode(tokens, skip_special_tokens=False)


def byte_level() -> Tokenizer:
    """The tokens of WORDS, and one for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelt = [
        "".join(piece for piece, _ in pre_tokenizers.ByteLevel(False).pre_tokenize_str(w)) for w in WORDS
    ]
    made = Tokenizer(
        models.BPE(vocab={t: n for n, t in enumerate(dict.fromkeys([*letters, *spelt]))}, merges=[])
    )
    made.decoder = decoders.ByteLevel()
    return made


def sentencepiece(vocabulary: Sequence[str], decoder: Any) -> Tokenizer:
    words = [word.replace(" ", "▁") for word in WORDS]
    vocab = {t: n for n, t in enumerate(dict.fromkeys([*vocabulary, "▁", *words]))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.decoder = decoder
    return made


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
DECODERS = {
    "byte-level": decoder_of(byte_level()),
    "metaspace": decoder_of(sentencepiece([], decoders.Metaspace())),
    "byte fallback": decoder_of(
        sentencepiece(
            BYTES,
            decoders.Sequence(
                [
                    decoders.Replace("▁", " "),
                    decoders.ByteFallback(),
                    decoders.Fuse(),
                    decoders.Strip(" ", 1, 0),
                ]
            ),
        )
    ),
    "empty tokens": lambda tokens: "".join("ab "[t % 3] * (t % 5) for t in tokens),
}
SIZES = {"byte-level": 256, "metaspace": 1, "byte fallback": 256, "empty tokens": 0}


@st.composite
def drawn(draw: Any, kind: str) -> list[int]:
    """Words, characters byte by byte, and bytes that are no characters."""
    first = SIZES[kind]
    word = st.integers(first, first + len(WORDS) - 1).map(lambda t: [t])
    whole = word
    if kind == "byte fallback":
        whole = st.one_of(word, st.sampled_from(["é", "好", "🙂"]).map(lambda c: list(c.encode())))
    if first:
        whole = st.one_of(whole, st.integers(0, first - 1).map(lambda t: [t]))
    return [t for part in draw(st.lists(whole, max_size=60)) for t in part]


@pytest.mark.parametrize("kind", DECODERS)
@given(data=st.data())
def test_it_is_found_at_the_token_that_completes_it(kind, data):
    decode, tokens = DECODERS[kind], data.draw(drawn(kind))
    text = decode(tokens)
    assume(text)
    begins = data.draw(st.lists(st.integers(0, len(text) - 1), min_size=1, max_size=3))
    stops = {text[a : a + data.draw(st.integers(1, 12))] for a in begins} | {"never said"}
    assume(not any("\ufffd" in stop for stop in stops))
    longest = max(map(len, stops))

    def ends(found: Callable[[list[int]], str]) -> list[int]:
        return [n for n in range(1, len(tokens) + 1) if any(stop in found(tokens[:n]) for stop in stops)]

    everywhere = ends(decode)
    in_tails = [n for n in ends(lambda some: tail(decode, some, longest)) if n in everywhere]
    assert in_tails[:1] == everywhere[:1]


def test_a_character_of_several_tokens_does_not_hide_what_follows():
    decode = DECODERS["byte fallback"]
    tokens = [*("好" * 200).encode(), *"好🙂".encode()]
    for more in range(4):
        assert tail(decode, [5] * more + tokens, 2).endswith("好🙂")


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "byte fallback"])
def test_the_work_for_a_token_does_not_grow_with_the_answer(kind):
    counted: list[int] = []

    def decode(tokens: list[int]) -> str:
        counted.append(len(tokens))
        return DECODERS[kind](tokens)

    prices = []
    for length in (200, 2_000, 20_000):
        counted.clear()
        tail(decode, [SIZES[kind] + 2, SIZES[kind] + 4] * (length // 2), 12)
        prices.append(sum(counted))
    assert prices[0] == prices[1] == prices[2]
    assert prices[0] < 300
