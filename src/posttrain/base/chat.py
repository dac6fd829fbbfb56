"""Tokens of conversations, exact over turns: sampled tokens are never tokenised again.

A chat template turns messages into text. It renders three texts only:

- the first prompt, up to where the policy begins to speak (`render`);
- what follows a turn of the policy, up to where it speaks again (`extend`): the text behind a placeholder
  that is rendered as an answer. So a conversation only grows, and a template that rewrites earlier turns
  (drops their reasoning) changes nothing;
- in training data, one answer (`render_supervised`, `render_answers`), found behind a fixed question.

Tokens are those of the complete text. A prompt ends at a token boundary, though: where the tokenizer would
merge a prompt with its answer, the text is cut between the two. What follows a sampled end-of-turn token is
tokenised as the tokenizer does behind that token.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from os.path import commonprefix
from typing import Any

from posttrain.base import plain_template
from posttrain.base.spelling import Spelling, Tokenizer, pieces
from posttrain.base.template_checks import check_calls, check_shown, contains_words
from posttrain.types import Message, UserError

_ANSWER = "posttrainplaceholder"
_QUESTION = {"role": "user", "content": "question"}
_SUGGESTION = "set [model] chat_template to a Jinja template, or to 'none' for plain text"


_RENDERED = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of a chat template that a conversation sets."""


@dataclass(frozen=True, eq=False)
class Chat:
    """Tokenises conversations with one tokenizer and one template.

    `template` is None for the tokenizer's own, "none" for plain text (base/plain_template.py), a Jinja
    template, or the name of one where the tokenizer has several. Its own is then "default", with tools
    "tool_use". `ends` are tokens, in addition to the tokenizer's eos, at which the policy stops speaking.
    Messages are plain text, whatever they spell; with `parse_special` they may spell special tokens.

    Raises UserError without a template, or if it does not show what an assistant says.
    """

    tokenizer: Tokenizer
    template: str | None = None
    ends: frozenset[int] = frozenset()
    embedded: int | None = None
    """Number of tokens that the model has embeddings for; None skips the check."""
    today: datetime | None = None
    """The time for templates that show it; None takes the current one."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, such as enable_thinking."""
    parse_special: bool = False
    _tool_template: str | None = field(init=False, repr=False, default=None)
    _head: str = field(init=False, repr=False)
    """The text up to where an assistant begins to answer the fixed question."""
    _before: str = field(init=False, repr=False)
    """The same in a text that shows the answer: with an empty thought, or without the mark that opens one."""
    _close: str = field(init=False, repr=False)
    """The text that closes an assistant's turn."""
    _ending: str = field(init=False, repr=False)
    """That text up to its first mark, which ends the turn; "" if no mark does."""
    _blank: str = field(init=False, repr=False)
    """The blanks before that mark, or ""."""
    _end: int | None = field(init=False, repr=False)
    """The token that ends a turn: that mark, or else the tokenizer's eos."""
    _spelling: Spelling = field(init=False, repr=False)
    _plain_spelling: Spelling = field(init=False, repr=False)
    """Spells text that a policy may have sampled: never with special tokens."""

    def __post_init__(self) -> None:
        if self.template is None and not self.tokenizer.chat_template:
            raise UserError("", "the tokenizer has no chat template", _SUGGESTION)
        if self.template is not None and not self.template.strip():
            raise UserError("model.chat_template", "the chat template is empty", _SUGGESTION)
        if isinstance(self.tokenizer.chat_template, dict):
            template, for_tools = _choose_template(self.tokenizer.chat_template, self.template)
            object.__setattr__(self, "template", template)
            object.__setattr__(self, "_tool_template", for_tools)
        self.check_args(self.template_args, "model.template_args")
        before, close = self._text_around_answer([_QUESTION])
        marks = {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}
        end = next((t for t in Spelling(self.tokenizer).tokens(close) if t in marks), None)
        spelt = "" if end is None else str(self.tokenizer.convert_ids_to_tokens(end))
        blank, mark, _ = close.partition(spelt) if spelt else ("", "", "")
        ends = bool(mark) and not blank.strip()
        parts = {
            "_head": self.text([_QUESTION], prompt=True),
            "_before": before,
            "_close": close,
            "_blank": blank if ends else "",
            "_ending": blank + spelt if ends else "",
            "_end": end if ends else self.tokenizer.eos_token_id,
        }
        for name, value in parts.items():
            object.__setattr__(self, name, value)
        for name, parse in (("_spelling", self.parse_special), ("_plain_spelling", False)):
            object.__setattr__(self, name, Spelling(self.tokenizer, self.stops, self.embedded, parse))

    def check_args(self, args: Mapping[str, Any], key: str) -> None:
        """Raise UserError at `key` for a variable that the template does not mention: it has no effect."""
        template = f"{self.template or self.tokenizer.chat_template} {self._tool_template or ''}"
        for name in args:
            if name in _RENDERED or not re.search(rf"\b{re.escape(name)}\b", template):
                problem = f"the chat template has no variable {name[:60]!r} to set"
                raise UserError(f"{key}.{name[:60]}", problem, "leave it out")

    @cached_property
    def for_tools(self) -> "Chat":
        """The chat for conversations with tools: under the tokenizer's template for tools, if it has one."""
        return self if self._tool_template is None else replace(self, template=self._tool_template)

    @cached_property
    def _has_think_tags(self) -> bool:
        """Whether the model's family writes its reasoning between <think> and </think>."""
        template = self.template or self.tokenizer.chat_template
        return "</think>" in str(template) or "</think>" in self.tokenizer.get_added_vocab()

    @property
    def stops(self) -> frozenset[int]:
        """Tokens at which the policy stops speaking: eos, the end of a turn in the template, and `ends`."""
        return self.ends | {end for end in (self.tokenizer.eos_token_id, self._end) if end is not None}

    @property
    def plain(self) -> bool:
        """Whether the template shows messages without turns, as plain text."""
        return self.template == plain_template.NAME

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """Return the tokens of the first prompt, up to where the policy begins to speak; it may call `tools`.

        Raises UserError if the messages are empty, or if the template fails or does not show a message.
        """
        return self._first_tokens(self._prompt_text(self._guard(messages), tools))

    def longest(self, prompts: Sequence[Sequence[Message]], tools: Sequence[Any] = ()) -> int:
        """Return the most tokens that `render` makes of one of these prompts, faster; raises as it does."""
        texts = [self._prompt_text(self._guard(messages), tools) for messages in prompts]
        return len(self._spelling.prefix if self.plain else []) + self._spelling.most_tokens(texts)

    def extend(
        self, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Any] = ()
    ) -> list[int]:
        """Return the tokens to append to a conversation that ends with an answer of the policy.

        They close its turn, unless it ends with an end token, show the messages, and open its next turn. An
        answer that was cut off is closed too. None of these tokens is sampled. tools: those of the first
        prompt.
        """
        if not messages:
            raise UserError("", "there are no messages for the policy to answer")
        if tools and self.for_tools is not self:
            return self.for_tools.extend(tokens, messages, tools)
        added = self._tokens_behind_end(self._text_behind_answer(self._guard(messages)))
        if tokens and tokens[-1] in self.stops:
            # The mark that opens the next turn may be the one that ended this turn.
            return added[added[:1] == [tokens[-1]] :]
        end = [] if self._end is None else [self._end]
        return [*self._spelling.tokens_within(self._blank), *end, *added]

    def render_supervised(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), *, earlier: int = 0
    ) -> tuple[list[int], list[bool]]:
        """Return the tokens of a conversation, and for each whether it is trained: answers with their ends.

        The end is the template's end-of-turn token, or eos if it has none. What follows it, such as the
        newline in many templates, is not trained, since no policy samples it; nor is a message of weight 0.
        earlier: number of the assistant's first messages that are part of the prompt, as what precedes them.

        Raises UserError if no assistant speaks, if one speaks first, or if the template cannot be cut.
        """
        if tools and self.for_tools is not self:
            return self.for_tools.render_supervised(messages, tools, earlier=earlier)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise UserError("", "no assistant speaks in the conversation")
        if turns[0] == 0 or turns[-1] + 1 < len(messages):
            how = "begins" if turns[0] == 0 else "does not end"
            raise UserError("", f"the conversation {how} with the assistant")
        messages, start = self._guard(messages), turns[earlier]
        return self._append_turns(self._prompt_text(messages[:start], tools), messages[start:])

    def render_answers(
        self,
        messages: Sequence[Message],
        answers: Sequence[str | Sequence[Message]],
        tools: Sequence[Any] = (),
    ) -> list[tuple[list[int], list[bool]]]:
        """Return for each answer the tokens of the question with it, and a mask of those of the answer.

        The question is rendered as a prompt, and includes earlier turns of the assistant. An answer is a
        text, or messages that begin and end with the assistant's, of which those are trained.
        """
        opening = self._prompt_text(self._guard(messages), tools)
        turns = ([{"role": "assistant", "content": a}] if isinstance(a, str) else a for a in answers)
        return [self._append_turns(opening, self._guard(answer)) for answer in turns]

    def _append_turns(self, opening: str, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Return the tokens of a prompt's text and of guarded turns behind it, and which are trained."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        start, end = self._first_tokens, self.end()
        tokens, trained = list[int](), list[bool]()
        for turn, following in zip(turns, [*turns[1:], None], strict=True):
            between = messages[turn + 1 : following]
            answer_text, after = self._split_answer(messages[turn], between, again=following is not None)
            before, answer = self._split_turn(start, opening, answer_text)
            tokens += [*before, *answer, end]
            trained += [False] * len(before) + [messages[turn].get("weight") != 0] * (len(answer) + 1)
            start, opening = self._tokens_behind_end, after
        rest = self._tokens_behind_end(opening)
        return tokens + rest, trained + [False] * len(rest)

    def render_for_judge(
        self, messages: Sequence[Message], answers: Sequence[str], tools: Sequence[Any] = ()
    ) -> list[list[int]]:
        """Return the tokens of the conversation with each answer at its end, word for word, for a judge.

        Answers never spell special tokens.
        """
        before, after = self._text_around_answer(self._guard(messages), tools)
        return [self._first_tokens(before + self._plain_spelling.guard(answer) + after) for answer in answers]

    def render_steps(
        self, messages: Sequence[Message], steps: Iterable[str], separator: str
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of a question and of steps, a separator behind each, and where each step ends.

        Steps and separators are tokenised separately, so the tokens of an answer are a prefix of those of a
        longer one.
        """
        between = self.between(separator)
        tokens, ends = self._first_tokens(self._text_around_answer(self._guard(messages))[0]), []
        for step in steps:
            tokens += [*self._plain_spelling.tokens_within(self._plain_spelling.guard(step)), *between]
            ends.append(len(tokens))
        return tokens, ends

    def between(self, separator: str) -> list[int]:
        """Return the tokens of a separator of steps. Raises UserError if it has no tokens."""
        if tokens := self._spelling.tokens_within(separator):
            return tokens
        raise UserError("", f"the tokenizer has no token for the separator {separator!r}")

    def spell(self, text: str) -> list[int]:
        """Return the tokens of a text that stands alone."""
        return self._spelling.tokens(self._spelling.guard(text))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text that each token adds; a character of several tokens is added by the last one."""
        return pieces(self.tokenizer, tokens)

    # ------------------------------------------------------------------ text as tokens

    def _guard(self, messages: Sequence[Message]) -> list[Message]:
        return [{**self._spelling.guard_all(m), "role": m["role"]} for m in messages]

    def _first_tokens(self, text: str) -> list[int]:
        """Return the tokens of the beginning of a conversation."""
        return (self._spelling.prefix if self.plain else []) + self._spelling.tokens(text)

    def _tokens_behind_end(self, text: str) -> list[int]:
        """Return the tokens of a text that follows the end of a turn."""
        if self._end is None:
            return self._spelling.tokens_within(text)
        return self._spelling.tokens_behind(self._end, text)

    def _split_turn(
        self, start: Callable[[str], list[int]], opening: str, answer: str
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of the text that opens a turn, and those of the answer."""
        before, tokens = start(opening), start(opening + answer)
        if tokens[: len(before)] == before:
            return before, tokens[len(before) :]
        return before, self._spelling.tokens_within(answer)

    def end(self) -> int:
        """Return the token that ends an answer of the policy. Raises UserError without an eos token."""
        if self._end is None:
            raise UserError("", "the tokenizer has no eos token, and the template does not end a turn")
        return self._end

    # ------------------------------------------------------------------ messages as text

    def _prompt_text(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
        if not any((message["content"] or "").strip() for message in messages):
            raise UserError("", "the prompt is empty")
        return self.text(messages, prompt=True, tools=tools)

    def _split_answer(
        self, message: Message, between: Sequence[Message], again: bool = False
    ) -> tuple[str, str]:
        """Return the text of an answer up to the end of its turn, and the text that follows that end."""
        again = again or bool(between)
        text = self.text([_QUESTION, message, *between], prompt=again)
        head, before, close, calls = self._head, self._before, self._close, message.get("tool_calls")
        content, thought = message["content"] or "", message.get("reasoning_content")
        if not (calls or thought) and before.startswith(head) and text.startswith(before + content + close):
            rest = text[len(before + content) :]
            return (before + content)[len(head) :] + self._blank, rest.removeprefix(self._ending)
        full = self.text([_QUESTION, message], prompt=False) if again else text
        fits = full.startswith(head) and full.endswith(close) and len(full) >= len(head) + len(close)
        answer = full[len(head) : len(full) - len(close)] if fits else ""
        if thought and self._has_think_tags and not contains_words(answer, thought):
            return self._split_answer(_with_think_tags(message), between, again)
        hidden, mark = not contains_words(full, content), head.removeprefix(before).strip()
        prefixed = head.startswith(before) and content.startswith(mark)
        if (hidden or not fits) and prefixed and not (calls or thought):
            # The template cuts out a thought, maybe with the mark that opens it in a prompt; train on it.
            answer = content.removeprefix(mark).lstrip() if mark else content
            return answer + self._blank, self._text_behind_answer(between, again)
        only = head[len(commonprefix([head, full])) :]  # noqa: RUF071  by character
        if only and not hidden:
            problem = (
                f"the chat template writes {only!r} where an answer is asked for, and not where one is shown"
            )
            raise UserError("", problem, "let it write that before the assistant's last message too")
        if hidden or not fits:
            misplaced = f"does not show an answer between {head[-40:]!r} and {close!r}"
            fault = f"leaves out what an assistant says{' with a call' * bool(calls)}" if fits else misplaced
            raise UserError("", f"the chat template {fault}", _SUGGESTION)
        if thought and not contains_words(answer, thought):
            fix = "write it into content between the marks of the model, or take a template that shows it"
            raise UserError("", "the chat template leaves out reasoning_content", fix)
        if calls:
            check_calls(message, answer)
            if text.startswith(head + answer):  # a result may have to follow its call
                return answer + self._blank, text[len(head + answer) :].removeprefix(self._ending)
        return answer + self._blank, self._text_behind_answer(between, again)

    def _text_behind_answer(self, messages: Sequence[Message], again: bool = False) -> str:
        """Return the text behind an assistant's turn: the messages, and the opening of its next turn."""
        answer = {"role": "assistant", "content": _ANSWER}
        text = self.text([_QUESTION, answer, *messages], prompt=bool(messages) or again)
        return text.partition(_ANSWER)[2].removeprefix(self._ending)

    def _text_around_answer(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> tuple[str, str]:
        """Return the text before an answer to these messages, and the text behind it."""
        text = self.text([*messages, {"role": "assistant", "content": _ANSWER}], prompt=False, tools=tools)
        before, placeholder, after = text.rpartition(_ANSWER)
        if not placeholder or not before:
            raise UserError("", "the chat template does not show what an assistant says", _SUGGESTION)
        return before, after

    def text(self, messages: Sequence[Message], *, prompt: bool, tools: Sequence[Any] = ()) -> str:
        """Return the text that the template makes of messages, up to where the policy speaks if `prompt`.

        tools: those that the policy may call, as JSON schemas. Raises UserError if the template fails, or
        leaves out or alters a message.
        """
        if tools and self.for_tools is not self:
            return self.for_tools.text(messages, prompt=prompt, tools=tools)
        options: dict[str, Any] = {**self.template_args, "tokenize": False, "add_generation_prompt": prompt}
        if self.today is not None:
            options["strftime_now"] = self.today.strftime
        if self.template is not None:
            options["chat_template"] = plain_template.TEMPLATE if self.plain else self.template
        options |= {"tools": self._spelling.guard_all(tools)} if tools else {}
        try:
            conversation = [_for_template(message) for message in messages]
            text: str = self.tokenizer.apply_chat_template(conversation, **options)
        except Exception as error:  # a template may raise anything, such as a division by 0
            roles = ", ".join(message["role"] for message in messages)
            problem = f"the chat template fails ({error}): the roles are {roles}"
            raise UserError("", problem, _SUGGESTION) from None
        check_shown(messages, tools, text, fix=_SUGGESTION)
        return text


def _for_template(message: Message) -> dict[str, Any]:
    """Return a message with the keys that templates read; some call reasoning_content thinking."""
    thought = message.get("reasoning_content")
    keys = {key: value for key, value in message.items() if key != "weight"}
    return keys | {"thinking": thought} if thought else keys


def _with_think_tags(message: Message) -> Message:
    """Return a message with its reasoning in its content, as models write it that reason in think tags."""
    content = f"<think>\n{message['reasoning_content'].strip()}\n</think>\n\n{message['content'] or ''}"
    return {key: value for key, value in message.items() if key != "reasoning_content"} | {"content": content}


def _choose_template(by_name: Mapping[str, str], template: str | None) -> tuple[str, str | None]:
    """Return the template for conversations, and the one for conversations with tools, of several by name.

    Raises UserError if `template` is None and no template is called "default".
    """
    if template is not None:
        return by_name.get(template, template), None
    if "default" not in by_name:
        problem = f"the tokenizer has the chat templates {', '.join(sorted(by_name))}, and not a default"
        raise UserError("model.chat_template", problem, "set it to one of their names")
    return by_name["default"], by_name.get("tool_use")
