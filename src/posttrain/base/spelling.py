"""Text as tokens: text from outside never becomes a mark, and a piece of text has the same tokens everywhere.

A mark is a special token: it stands for no words but for the end of a turn, its beginning, or the end of a
text. Tokenizers find marks by their spelling, so a message that contains `<|im_end|>` would end a turn. So
`guard` puts brackets around such a spelling. They go through a chat template like other characters, and
`tokens` spells what is between them as plain text. Any other text has the tokenizer's own tokens.

A SentencePiece tokenizer puts a blank before the first word of a text, and some before the first word behind
a mark. So a piece of a text has other tokens alone than within it: `tokens_behind` a mark and `tokens_within`
text.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from posttrain.types import UserError

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Two of the characters that Unicode reserves for use inside a program; no text has them."""
REPLACEMENT = "\ufffd"
"""Stands for characters that cannot be encoded; a decoder returns it for bytes that are not a character."""
_ANCHORS = ("x", "\n", ".")
"""Texts to tokenise before a piece; the first with which the piece does not merge is used."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used."""

    chat_template: Any
    eos_token_id: int | None
    unk_token_id: int | None
    all_special_ids: list[int]

    @property
    def added_tokens_decoder(self) -> Any:
        """The added tokens with their properties, by id."""
        ...

    def __call__(
        self, text: str | list[str], *, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> Any:
        """Return the tokens of a text, or of each of several, under "input_ids"."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...

    def convert_ids_to_tokens(self, ids: int) -> Any:
        """Return the spelling of a token in the vocabulary."""
        ...

    def decode(self, token_ids: list[int], *, clean_up_tokenization_spaces: bool = ...) -> str: ...

    def get_added_vocab(self) -> dict[str, int]:
        """Return the added tokens, including special ones."""
        ...


@dataclass(frozen=True, eq=False)
class Spelling:
    """Tokenises text as one tokenizer does. `ends` are marks in addition to its special tokens.

    `embedded` is the number of tokens that the model has embeddings for; a text with another token is a
    UserError. With `parse_special` text from outside is read like that of a template: a spelling of a mark is
    that mark.
    """

    tokenizer: Tokenizer
    ends: frozenset[int] = frozenset()
    embedded: int | None = None
    parse_special: bool = False
    _marks: frozenset[int] = field(init=False, repr=False)
    _spelt: re.Pattern[str] = field(init=False, repr=False)
    _normalized: frozenset[int] = field(init=False, repr=False)
    """The marks that are searched in normalised text, where they may have another spelling."""

    def __post_init__(self) -> None:
        added = dict(self.tokenizer.added_tokens_decoder)
        special = {*self.tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        # A plain word at which a model stops is not a mark.
        marks = frozenset(special | {i for i in self.ends if i in added})
        texts = {*(self.tokenizer.convert_ids_to_tokens(i) for i in marks)} - {None, ""}
        longest_first = sorted(texts, key=lambda text: (-len(text), text))
        # The unknown token stands for any unknown letter, not only for its own spelling.
        letters = {self.tokenizer.unk_token_id} - {self.tokenizer.eos_token_id, *self.ends}
        normalized = frozenset(i for i in marks & added.keys() - letters if added[i].normalized)
        object.__setattr__(self, "_marks", marks)
        object.__setattr__(self, "_spelt", re.compile("|".join(map(re.escape, longest_first)) or r"(?!)"))
        object.__setattr__(self, "_normalized", normalized)

    def guard(self, text: str) -> str:
        """Return the text with brackets around spellings of marks, without what no tokenizer can read.

        A half of a surrogate pair becomes a question mark.
        """
        text = text.encode("utf-8", "replace").decode()
        text = text.replace(_OPEN, REPLACEMENT).replace(_CLOSE, REPLACEMENT)
        if self.parse_special:
            return text
        rest = self._spelt.split(text)
        if self._normalized and any(self._normalized.intersection(self._ids(part)) for part in rest):
            return f"{_OPEN}{text}{_CLOSE}"
        return text if len(rest) == 1 else self._spelt.sub(lambda match: f"{_OPEN}{match[0]}{_CLOSE}", text)

    def guard_all(self, value: Any) -> Any:
        """Return plain data with all its texts guarded."""
        if isinstance(value, Mapping):
            return {self.guard_all(name): self.guard_all(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.guard_all(item) for item in value]
        return self.guard(value) if isinstance(value, str) else value

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a complete text, in which bracketed parts are plain text."""
        return self._tokenize_parts(text, self._ids)

    def most_tokens(self, texts: Sequence[str]) -> int:
        """Return the largest number of tokens of these complete texts, which are tokenised as one batch."""
        alone = {text for text in texts if _OPEN in text or not text}
        together = sorted({*texts} - alone)
        rows = self.tokenizer(together, add_special_tokens=False)["input_ids"] if together else []
        lengths = [len(self._check_embedded(row)) for row in rows]
        lengths += [len(self.tokens(text)) for text in alone]
        return max(lengths, default=0)

    def tokens_within(self, text: str) -> list[int]:
        """Return the tokens of a text that follows another, of which it shares no token."""
        return self._tokenize_parts(text, self._next_tokens)

    def tokens_behind(self, mark: int, text: str) -> list[int]:
        """Return the tokens of a text that directly follows this mark."""
        tokens = self.tokens(f"{self.tokenizer.convert_ids_to_tokens(mark)}{text}")
        return tokens[1:] if tokens[:1] == [mark] else self.tokens_within(text)

    @cached_property
    def prefix(self) -> list[int]:
        """The tokens that the tokenizer puts before a text, such as one that begins it."""
        tokens, bare = list(self.tokenizer("x")["input_ids"]), self._ids("x")
        places = (n for n in range(len(tokens)) if tokens[n : n + len(bare)] == bare)
        return tokens[: next(places, 0)]

    def _tokenize_parts(self, text: str, tokenize_head: Any) -> list[int]:
        head, *rest = re.split(f"[{_OPEN}{_CLOSE}]", text)
        out: list[int] = tokenize_head(head)
        for n, part in enumerate(rest):
            out += self._next_tokens(part) if n % 2 else self._literal_tokens(part)
        return out

    def _literal_tokens(self, text: str) -> list[int]:
        """Return tokens that decode to these characters; of more than one character none is a mark."""
        tokens = self._next_tokens(text, split_special_tokens=True)
        # A vocabulary may have a mark as a word too, and then tokenises its spelling to that.
        if len(text) < 2 or not self._marks.intersection(tokens):
            return tokens
        half = len(text) // 2
        return self._literal_tokens(text[:half]) + self._literal_tokens(text[half:])

    def _next_tokens(self, text: str, **options: bool) -> list[int]:
        for anchor in _ANCHORS if text else ():
            before, tokens = self._ids(anchor), self._ids(anchor + text, **options)
            if tokens[: len(before)] == before and self.tokenizer.unk_token_id not in before:
                return tokens[len(before) :]
        return self._ids(text, **options)

    def _ids(self, text: str, **options: bool) -> list[int]:
        if not text:
            return []
        tokens = self.tokenizer(text, add_special_tokens=False, **options)["input_ids"]
        return self._check_embedded(list(tokens))

    def _check_embedded(self, tokens: list[int]) -> list[int]:
        """Return these tokens. Raises UserError for one that the model has no embedding for."""
        if self.embedded is not None and max(tokens, default=0) >= self.embedded:
            spelt = self.tokenizer.convert_ids_to_tokens(next(t for t in tokens if t >= self.embedded))
            raise UserError("", f"it holds {spelt!r}, for which the model has no embedding")
        return tokens


def pieces(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds; a character of several tokens is added by the last one."""
    out: list[str] = []

    def decode(part: Sequence[int]) -> str:
        return tokenizer.decode(list(part), clean_up_tokenization_spaces=False)

    # The text of a token depends on the one before it (a leading blank), so that one is decoded too.
    before = complete = 0
    for end in range(1, len(tokens) + 1):
        earlier, text = decode(tokens[before:complete]), decode(tokens[before:end])
        is_complete = not text.endswith(REPLACEMENT) or end == len(tokens)
        out.append(text[len(earlier) :] if is_complete else "")
        if is_complete:
            before, complete = complete, end
    return out
