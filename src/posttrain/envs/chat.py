"""Conversations as tokens, exact over turns: what was sampled is never tokenised again.

A chat template turns messages into text. It is asked for three texts only:

- the first prompt, up to where the policy begins to speak (`render`);
- what follows a policy's turn, up to where it speaks again (`extend`), found by rendering an
  answer that is a placeholder and taking what comes behind it. So a conversation only ever
  grows, and a template that rewrites earlier turns (dropping their reasoning) changes nothing;
- in training data, one answer behind its prompt (`render_supervised`), found by rendering the
  conversation with and without it.

Only new text is tokenised, and each piece by itself: a supervised conversation and a sampled one
with the same words have the same boundaries between turns.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from posttrain import plain
from posttrain.types import Message, UserError

_ANSWER = "posttrainplaceholder"
REPLACEMENT = "\ufffd"
"""What bytes that are no character yet are decoded to."""
_SUGGESTION = "set [model] chat_template to a Jinja template, or to 'none' for plain text"


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    chat_template: Any
    eos_token_id: int | None
    all_special_ids: list[int]

    def __call__(self, text: str, *, add_special_tokens: bool, split_special_tokens: bool = False) -> Any:
        """Tokens of a text, under "input_ids"."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        """The conversation as text."""
        ...

    def decode(self, token_ids: list[int], *, clean_up_tokenization_spaces: bool = ...) -> str:
        """The tokens as text."""
        ...

    def get_added_vocab(self) -> dict[str, int]:
        """The added tokens, special ones among them."""
        ...


@dataclass(frozen=True, eq=False)
class Chat:
    """Tokens of conversations under one tokenizer and one template.

    `template` is None for the tokenizer's own, "none" for plain text (posttrain.plain), or a Jinja template.
    `ends` are further tokens, besides the tokenizer's eos, at which the policy stops speaking.

    Raises UserError if there is no template, or if it does not show what an assistant says.
    """

    tokenizer: Tokenizer
    template: str | None = None
    ends: frozenset[int] = frozenset()
    _close: str = field(init=False, repr=False)
    """The text that closes an assistant's turn."""
    _end: int | None = field(init=False, repr=False)
    """The token that it begins with, if that stands for no words: the end of a turn."""

    def __post_init__(self) -> None:
        if self.template is None and not self.tokenizer.chat_template:
            raise UserError("the tokenizer has no chat template", mend=_SUGGESTION)
        if self.template is not None and not self.template.strip():
            raise UserError("the chat template is empty", where="[model] chat_template", mend=_SUGGESTION)
        marks = {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}
        close = self._after(())
        first = self._tokens(close)[:1]
        object.__setattr__(self, "_close", close)
        object.__setattr__(self, "_end", first[0] if marks.intersection(first) else None)

    @property
    def stops(self) -> frozenset[int]:
        """Tokens at which the policy stops speaking: eos, the template's end of a turn, and `ends`."""
        return self.ends | {end for end in (self.tokenizer.eos_token_id, self._end) if end is not None}

    @property
    def plain(self) -> bool:
        """Whether messages are shown as they are."""
        return self.template == plain.NAME

    def render(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of the first prompt, up to where the policy begins to speak.

        Raises UserError if there is nothing in it, or if the template refuses the messages.
        """
        if not messages or not any(message["content"].strip() for message in messages):
            raise UserError("the prompt is empty")
        text = self._text(messages, prompt=True)
        return plain.begun(self.tokenizer, text) if self.plain else self._tokens(text)

    def extend(self, tokens: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """The tokens to append to a conversation that ends in what the policy said.

        They close its turn, unless the policy did so itself with an end token, show the messages, and
        open its next turn. An answer that was cut off is closed too; none of these tokens was sampled.
        """
        if not messages:
            raise UserError("there are no messages for the policy to answer")
        added = self._tokens(self._after(messages))
        ended = bool(tokens) and tokens[-1] in self.stops
        return added[1:] if ended and added[:1] == [self._end] else added

    def render_supervised(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """The tokens of a conversation, and whether each is trained: what assistants say, and its end.

        The end is the template's end-of-turn token, or eos if it has none. What follows it, as the
        newline in many templates, is not trained, as no policy samples it.

        Raises UserError if no assistant speaks, if one speaks first, or if the template cannot be cut.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise UserError("no assistant speaks in the conversation")
        if turns[0] == 0:
            raise UserError("the conversation begins with the assistant")
        tokens = self.render(messages[: turns[0]])
        trained = [False] * len(tokens)
        for turn, following in zip(turns, [*turns[1:], None], strict=True):
            said = self._tokens(self._said(messages, turn))
            between = messages[turn + 1 : following]
            if following is None and between:
                raise UserError("the conversation does not end with the assistant")
            after = self._tokens(self._after(between, speaks_again=following is not None))
            if after[:1] != [self._end]:
                after = [self._eos(), *after]
            tokens += said + after
            trained += [True] * (len(said) + 1) + [False] * (len(after) - 1)
        return tokens, trained

    def close(self) -> list[int]:
        """The tokens behind the last answer of a whole conversation."""
        return self._tokens(self._close)

    def spell(self, text: str) -> list[int]:
        """The tokens of a text in which nothing is taken for a special token."""
        if not text:
            return []
        return list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """What each token adds to the text: of a character that takes several, the last one adds it all."""
        out: list[str] = []
        # What a token looks like hangs on the one before it (a blank in front), so that one is decoded too.
        before = complete = 0
        for end in range(1, len(tokens) + 1):
            known = self._decoded(tokens[before:complete])
            text = self._decoded(tokens[before:end])
            whole = not text.endswith(REPLACEMENT) or end == len(tokens)
            out.append(text[len(known) :] if whole else "")
            if whole:
                before, complete = complete, end
        return out

    def _decoded(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)

    def _eos(self) -> int:
        if self.tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no eos token, and the template does not end a turn")
        return self.tokenizer.eos_token_id

    def _said(self, messages: Sequence[Message], turn: int) -> str:
        """The text of one assistant turn, between what opens it and what closes it."""
        before = self._text(messages[:turn], prompt=True)
        whole = self._text(messages[: turn + 1], prompt=False)
        close = self._close
        if not whole.startswith(before) or not whole.endswith(close) or len(whole) < len(before) + len(close):
            raise UserError(
                f"the chat template opens a turn with {before[-40:]!r} and closes it with {close!r}, "
                "but does not show an answer between the two",
                mend=_SUGGESTION,
            )
        return whole[len(before) : len(whole) - len(close)]

    def _after(self, messages: Iterable[Message], speaks_again: bool = False) -> str:
        """The text behind an assistant's turn: its end, the messages, and the opening of its next turn."""
        shown = list(messages)
        question = {"role": "user", "content": "question"}
        answer = {"role": "assistant", "content": _ANSWER}
        text = self._text([question, answer, *shown], prompt=bool(shown) or speaks_again)
        before, found, after = text.partition(_ANSWER)
        if not found or not before:
            raise UserError("the chat template does not show what an assistant says", mend=_SUGGESTION)
        return after

    def _text(self, messages: Sequence[Message], *, prompt: bool) -> str:
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": prompt}
        if self.template is not None:
            options["chat_template"] = plain.TEMPLATE if self.plain else self.template
        try:
            text: str = self.tokenizer.apply_chat_template([dict(m) for m in messages], **options)
        except Exception as error:  # a template may do anything, as divide by 0
            roles = ", ".join(message["role"] for message in messages)
            what = f"the chat template fails on the roles {roles}: {error}"
            raise UserError(what, mend=_SUGGESTION) from None
        return text

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
