"""Text as tokens, where no text from outside becomes a mark, and every piece is spelt as it stands.

A mark is a special token: it stands for no words but for the end of a turn, its beginning, or the end of a
text. Tokenizers find marks by their spelling, so a message that holds `<|im_end|>` would end a turn. So
`guarded` puts brackets around such a spelling. They go through a chat template like other characters, and
`tokens` spells what is between them as plain text. Any other text has the tokenizer's own tokens.

A SentencePiece tokenizer puts a blank before the first word of a text, and some before the first word behind
a mark. So a piece of a text has other tokens alone than within it: `behind` a mark, and `within` text.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from posttrain.types import UserError

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Two of the characters that Unicode keeps for use inside a program; no text has them."""
REPLACEMENT = "\ufffd"
"""What stands for a character that cannot be, and what bytes that are none are decoded to."""
_ANCHORS = ("x", "\n", ".")
"""Texts that a piece is put behind, to see how it goes on; the first that it does not merge with."""


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    chat_template: Any
    eos_token_id: int | None
    unk_token_id: int | None
    all_special_ids: list[int]

    @property
    def added_tokens_decoder(self) -> Any:
        """What is known of each added token, by its id."""
        ...

    def __call__(
        self, text: str | list[str], *, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> Any:
        """Tokens of a text, or of each of several, under "input_ids"."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...

    def convert_ids_to_tokens(self, ids: int) -> Any:
        """How a token is spelt in the vocabulary."""
        ...

    def decode(self, token_ids: list[int], *, clean_up_tokenization_spaces: bool = ...) -> str: ...

    def get_added_vocab(self) -> dict[str, int]:
        """The added tokens, special ones among them."""
        ...


@dataclass(frozen=True, eq=False)
class Spelling:
    """How a tokenizer writes text. `ends` are marks besides the tokenizer's special tokens.

    `embedded` is the number of tokens that a model knows; a text with another is a UserError.
    With `parse_special` text from outside is read like a template's: the spelling of a mark is that mark.
    """

    tokenizer: Tokenizer
    ends: frozenset[int] = frozenset()
    embedded: int | None = None
    parse_special: bool = False
    _marks: frozenset[int] = field(init=False, repr=False)
    _spelt: re.Pattern[str] = field(init=False, repr=False)
    _normalized: frozenset[int] = field(init=False, repr=False)
    """The marks that are looked for in normalised text, where they may have been spelt otherwise."""

    def __post_init__(self) -> None:
        added = dict(self.tokenizer.added_tokens_decoder)
        special = {*self.tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        # A word at which a model stops is still a word.
        marks = frozenset(special | {i for i in self.ends if i in added})
        texts = {*(self.tokenizer.convert_ids_to_tokens(i) for i in marks)} - {None, ""}
        longest_first = sorted(texts, key=lambda text: (-len(text), text))
        # What stands for unknown letters is not only found where it is spelt.
        letters = {self.tokenizer.unk_token_id} - {self.tokenizer.eos_token_id, *self.ends}
        normalized = frozenset(i for i in marks & added.keys() - letters if added[i].normalized)
        object.__setattr__(self, "_marks", marks)
        object.__setattr__(self, "_spelt", re.compile("|".join(map(re.escape, longest_first)) or r"(?!)"))
        object.__setattr__(self, "_normalized", normalized)

    def guarded(self, text: str) -> str:
        """The text with brackets around what spells a mark; without what no tokenizer can read.

        A half of a surrogate pair becomes a question mark.
        """
        text = text.encode("utf-8", "replace").decode()
        text = text.replace(_OPEN, REPLACEMENT).replace(_CLOSE, REPLACEMENT)
        if self.parse_special:
            return text
        rest = self._spelt.split(text)
        if self._normalized and any(self._normalized.intersection(self._ids(part)) for part in rest):
            return f"{_OPEN}{text}{_CLOSE}"
        return text if len(rest) == 1 else self._spelt.sub(lambda found: f"{_OPEN}{found[0]}{_CLOSE}", text)

    def guarded_all(self, value: Any) -> Any:
        """The same of every text in plain data."""
        if isinstance(value, Mapping):
            return {self.guarded_all(name): self.guarded_all(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.guarded_all(each) for each in value]
        return self.guarded(value) if isinstance(value, str) else value

    def tokens(self, text: str) -> list[int]:
        """The tokens of a whole text, in which what is bracketed is plain text."""
        return self._joined(text, self._ids)

    def longest(self, texts: Sequence[str]) -> int:
        """Most tokens of one of these whole texts, which are tokenised together: on all cores, if it can."""
        alone = {text for text in texts if _OPEN in text or not text}
        together = sorted({*texts} - alone)
        found = self.tokenizer(together, add_special_tokens=False)["input_ids"] if together else []
        lengths = [*(len(self._known(each)) for each in found), *(len(self.tokens(text)) for text in alone)]
        return max(lengths, default=0)

    def within(self, text: str) -> list[int]:
        """The tokens of a text that goes on behind another, with which it merges no token."""
        return self._joined(text, self._going_on)

    def behind(self, mark: int, text: str) -> list[int]:
        """The tokens of a text as it stands behind this mark."""
        whole = self.tokens(f"{self.tokenizer.convert_ids_to_tokens(mark)}{text}")
        return whole[1:] if whole[:1] == [mark] else self.within(text)

    @cached_property
    def begun(self) -> list[int]:
        """What the tokenizer puts before a text, as a token that begins it."""
        whole, bare = list(self.tokenizer("x")["input_ids"]), self._ids("x")
        places = (n for n in range(len(whole)) if whole[n : n + len(bare)] == bare)
        return whole[: next(places, 0)]

    def _joined(self, text: str, first: Any) -> list[int]:
        head, *rest = re.split(f"[{_OPEN}{_CLOSE}]", text)
        out: list[int] = first(head)
        for n, part in enumerate(rest):
            out += self._going_on(part) if n % 2 else self._literal(part)
        return out

    def _literal(self, text: str) -> list[int]:
        """Tokens that stand for these characters and, of more than one, for no mark."""
        tokens = self._going_on(text, split_special_tokens=True)
        # A vocabulary may hold a mark as a word too, and then spells it by that.
        if len(text) < 2 or not self._marks.intersection(tokens):
            return tokens
        return self._literal(text[: len(text) // 2]) + self._literal(text[len(text) // 2 :])

    def _going_on(self, text: str, **options: bool) -> list[int]:
        for anchor in _ANCHORS if text else ():
            alone, whole = self._ids(anchor), self._ids(anchor + text, **options)
            if whole[: len(alone)] == alone and self.tokenizer.unk_token_id not in alone:
                return whole[len(alone) :]
        return self._ids(text, **options)

    def _ids(self, text: str, **options: bool) -> list[int]:
        if not text:
            return []
        return self._known(list(self.tokenizer(text, add_special_tokens=False, **options)["input_ids"]))

    def _known(self, tokens: list[int]) -> list[int]:
        """These tokens; UserError for one that the model does not know."""
        if self.embedded is not None and max(tokens, default=0) >= self.embedded:
            spelt = self.tokenizer.convert_ids_to_tokens(next(t for t in tokens if t >= self.embedded))
            raise UserError("", f"it holds {spelt!r}, for which the model has no embedding")
        return tokens


def pieces(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text: of a character that takes several, the last one adds it all."""
    out: list[str] = []

    def decoded(part: Sequence[int]) -> str:
        return tokenizer.decode(list(part), clean_up_tokenization_spaces=False)

    # What a token looks like depends on the one before it (a blank in front), so that one is decoded too.
    before = complete = 0
    for end in range(1, len(tokens) + 1):
        known, text = decoded(tokens[before:complete]), decoded(tokens[before:end])
        whole = not text.endswith(REPLACEMENT) or end == len(tokens)
        out.append(text[len(known) :] if whole else "")
        if whole:
            before, complete = complete, end
    return out
