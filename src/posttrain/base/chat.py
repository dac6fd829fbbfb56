"""Conversations as tokens, exact over turns: what was sampled is never tokenised again.

A chat template turns messages into text. It is asked for three texts only:

- the first prompt, up to where the policy begins to speak (`render`);
- what follows a policy's turn, up to where it speaks again (`extend`), found by rendering an
  answer that is a placeholder and taking what comes behind it. So a conversation only ever
  grows, and a template that rewrites earlier turns (dropping their reasoning) changes nothing;
- in training data, one answer (`render_supervised`, `render_answers`), found behind a question of ours.

Tokens are those of the whole text tokenised once. What a policy is asked ends in a token of its own,
though: where the tokenizer would merge a prompt with its answer, it is cut between the two. Behind a
sampled token that ends a turn stands what the tokenizer puts behind that mark.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from posttrain.base import plain_template
from posttrain.base.spelling import Spelling, Tokenizer, pieces
from posttrain.base.template_checks import check_calls, check_shown, holds
from posttrain.types import Message, UserError

_ANSWER = "posttrainplaceholder"
_QUESTION = {"role": "user", "content": "question"}
_SUGGESTION = "set [model] chat_template to a Jinja template, or to 'none' for plain text"


@dataclass(frozen=True, eq=False)
class Chat:
    """Tokens of conversations under one tokenizer and one template.

    `template` is None for the tokenizer's own, "none" for plain text (base/plain_template.py), a Jinja
    template, or the name of one where the tokenizer has several. Its own is then "default", with tools
    "tool_use".
    `ends` are further tokens, besides the tokenizer's eos, at which the policy stops speaking.
    What messages say is plain text, whatever it spells; with `parse_special` it may spell special tokens.

    Raises UserError if there is no template, or if it does not show what an assistant says.
    """

    tokenizer: Tokenizer
    template: str | None = None
    ends: frozenset[int] = frozenset()
    embedded: int | None = None
    """How many tokens the model has an embedding for, where that is to be checked."""
    today: datetime | None = None
    """What templates that ask for it are told is now; None for the clock's."""
    parse_special: bool = False
    _tool_template: str | None = field(init=False, repr=False, default=None)
    _head: str = field(init=False, repr=False)
    """The text up to where an assistant speaks that answers our question."""
    _before: str = field(init=False, repr=False)
    """The same where the answer is shown: with an empty thought, say, or without the mark that opens one."""
    _close: str = field(init=False, repr=False)
    """The text that closes an assistant's turn."""
    _ending: str = field(init=False, repr=False)
    """That text up to its first mark, the end of a turn; empty if no mark ends one."""
    _blank: str = field(init=False, repr=False)
    """What is there before that mark: blanks or nothing."""
    _end: int | None = field(init=False, repr=False)
    """The token that ends a turn: that mark, or else the tokenizer's eos."""
    _spelling: Spelling = field(init=False, repr=False)
    _literal: Spelling = field(init=False, repr=False)
    """Of what a policy may have said: never with special tokens."""

    def __post_init__(self) -> None:
        if self.template is None and not self.tokenizer.chat_template:
            raise UserError("", "the tokenizer has no chat template", _SUGGESTION)
        if self.template is not None and not self.template.strip():
            raise UserError("model.chat_template", "the chat template is empty", _SUGGESTION)
        if isinstance(self.tokenizer.chat_template, dict):
            template, for_tools = _choose_template(self.tokenizer.chat_template, self.template)
            object.__setattr__(self, "template", template)
            object.__setattr__(self, "_tool_template", for_tools)
        before, close = self._around([_QUESTION])
        marks = {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}
        end = next((t for t in Spelling(self.tokenizer).tokens(close) if t in marks), None)
        spelt = "" if end is None else str(self.tokenizer.convert_ids_to_tokens(end))
        blank, shown, _ = close.partition(spelt) if spelt else ("", "", "")
        ends = bool(shown) and not blank.strip()
        made = {
            "_head": self.text([_QUESTION], prompt=True),
            "_before": before,
            "_close": close,
            "_blank": blank if ends else "",
            "_ending": blank + spelt if ends else "",
            "_end": end if ends else self.tokenizer.eos_token_id,
        }
        for name, value in made.items():
            object.__setattr__(self, name, value)
        for name, parse in (("_spelling", self.parse_special), ("_literal", False)):
            object.__setattr__(self, name, Spelling(self.tokenizer, self.stops, self.embedded, parse))

    @cached_property
    def for_tools(self) -> "Chat":
        """The chat of conversations with tools: under a template of its own where the tokenizer has one."""
        return self if self._tool_template is None else replace(self, template=self._tool_template)

    @property
    def stops(self) -> frozenset[int]:
        """Tokens at which the policy stops speaking: eos, the template's end of a turn, and `ends`."""
        return self.ends | {end for end in (self.tokenizer.eos_token_id, self._end) if end is not None}

    @property
    def plain(self) -> bool:
        """Whether messages are shown as they are."""
        return self.template == plain_template.NAME

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """The tokens of the first prompt, up to where the policy begins to speak; tools: what it may call.

        Raises UserError if there is nothing in it, or if the template refuses or does not show a message.
        """
        return self._first(self._prompt(self._guarded(messages), tools))

    def longest(self, prompts: Sequence[Sequence[Message]], tools: Sequence[Any] = ()) -> int:
        """Most tokens that `render` makes of one of these prompts, each with its errors; much quicker."""
        texts = [self._prompt(self._guarded(messages), tools) for messages in prompts]
        return len(self._spelling.begun if self.plain else []) + self._spelling.longest(texts)

    def extend(
        self, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Any] = ()
    ) -> list[int]:
        """The tokens to append to a conversation that ends in what the policy said; tools: as it began.

        They close its turn, unless the policy did so itself with an end token, show the messages, and
        open its next turn. An answer that was cut off is closed too; none of these tokens was sampled.
        """
        if not messages:
            raise UserError("", "there are no messages for the policy to answer")
        if tools and self.for_tools is not self:
            return self.for_tools.extend(tokens, messages, tools)
        added = self._behind_end(self._after(self._guarded(messages)))
        if tokens and tokens[-1] in self.stops:  # the mark that opens the next turn may have ended this one
            return added[added[:1] == [tokens[-1]] :]
        return [*self._spelling.within(self._blank), *([] if self._end is None else [self._end]), *added]

    def render_supervised(
        self, messages: Sequence[Message], tools: Sequence[Any] = ()
    ) -> tuple[list[int], list[bool]]:
        """The tokens of a conversation, and whether each is trained: what assistants say, and its end.

        The end is the template's end-of-turn token, or eos if it has none. What follows it, as the
        newline in many templates, is not trained, as no policy samples it; nor is a message of weight 0.

        Raises UserError if no assistant speaks, if one speaks first, or if the template cannot be cut.
        """
        if tools and self.for_tools is not self:
            return self.for_tools.render_supervised(messages, tools)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise UserError("", "no assistant speaks in the conversation")
        if turns[0] == 0 or turns[-1] + 1 < len(messages):
            how = "begins" if turns[0] == 0 else "does not end"
            raise UserError("", f"the conversation {how} with the assistant")
        messages = self._guarded(messages)
        return self._continued(self._prompt(messages[: turns[0]], tools), messages[turns[0] :])

    def render_answers(
        self,
        messages: Sequence[Message],
        answers: Sequence[str | Sequence[Message]],
        tools: Sequence[Any] = (),
    ) -> list[tuple[list[int], list[bool]]]:
        """For each answer the tokens of the question with it, and whether each token is of the answer.

        The question is what a policy is shown that is asked it, and what earlier turns say is part of it.
        An answer is a text, or messages that begin and end with the assistant's, of which those are trained.
        """
        opening = self._prompt(self._guarded(messages), tools)
        texts = (
            [{"role": "assistant", "content": each}] if isinstance(each, str) else each for each in answers
        )
        return [self._continued(opening, self._guarded(each)) for each in texts]

    def _continued(self, opening: str, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """The tokens of a prompt's text and of the guarded turns behind it, and whether each is trained."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        start, end = self._first, self.end()
        tokens, trained = list[int](), list[bool]()
        for turn, following in zip(turns, [*turns[1:], None], strict=True):
            between = messages[turn + 1 : following]
            said, after = self._said(messages[turn], between, again=following is not None)
            before, answer = self._turn(start, opening, said)
            tokens += [*before, *answer, end]
            trained += [False] * len(before) + [messages[turn].get("weight") != 0] * (len(answer) + 1)
            start, opening = self._behind_end, after
        rest = self._behind_end(opening)
        return tokens + rest, trained + [False] * len(rest)

    def render_for_judge(
        self, messages: Sequence[Message], answers: Sequence[str], tools: Sequence[Any] = ()
    ) -> list[list[int]]:
        """The tokens of the whole conversation with each answer at its end, word for word: for a judge.

        In an answer nothing is ever taken for a special token.
        """
        before, after = self._around(self._guarded(messages), tools)
        return [self._first(before + self._literal.guarded(answer) + after) for answer in answers]

    def render_steps(
        self, messages: Sequence[Message], steps: Iterable[str], separator: str
    ) -> tuple[list[int], list[int]]:
        """The tokens of a question and the steps of an answer, a separator behind each; where each one ends.

        Steps and separators are tokenised apart, so that an answer begins like every longer one.
        """
        between = self.between(separator)
        tokens, ends = self._first(self._around(self._guarded(messages))[0]), []
        for step in steps:
            tokens += [*self._literal.within(self._literal.guarded(step)), *between]
            ends.append(len(tokens))
        return tokens, ends

    def between(self, separator: str) -> list[int]:
        """The tokens of a separator of steps; UserError if there is none."""
        if tokens := self._spelling.within(separator):
            return tokens
        raise UserError("", f"the tokenizer has no token for the separator {separator!r}")

    def spell(self, text: str) -> list[int]:
        """The tokens of a text that stands alone."""
        return self._spelling.tokens(self._spelling.guarded(text))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """What each token adds to the text: of a character that takes several, the last one adds it all."""
        return pieces(self.tokenizer, tokens)

    # ------------------------------------------------------------------ text as tokens

    def _guarded(self, messages: Sequence[Message]) -> list[Message]:
        return [{**self._spelling.guarded_all(m), "role": m["role"]} for m in messages]

    def _first(self, text: str) -> list[int]:
        """The tokens of the beginning of a conversation."""
        return (self._spelling.begun if self.plain else []) + self._spelling.tokens(text)

    def _behind_end(self, text: str) -> list[int]:
        """The tokens of what stands behind the end of a turn."""
        return self._spelling.within(text) if self._end is None else self._spelling.behind(self._end, text)

    def _turn(
        self, start: Callable[[str], list[int]], opening: str, said: str
    ) -> tuple[list[int], list[int]]:
        """The tokens of what opens a turn, and of what is said in it."""
        before, whole = start(opening), start(opening + said)
        if whole[: len(before)] == before:
            return before, whole[len(before) :]
        return before, self._spelling.within(said)

    def end(self) -> int:
        """The token that ends what the policy says; UserError if there is none."""
        if self._end is None:
            raise UserError("", "the tokenizer has no eos token, and the template does not end a turn")
        return self._end

    # ------------------------------------------------------------------ messages as text

    def _prompt(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
        if not any((message["content"] or "").strip() for message in messages):
            raise UserError("", "the prompt is empty")
        return self.text(messages, prompt=True, tools=tools)

    def _said(self, message: Message, between: Sequence[Message], again: bool = False) -> tuple[str, str]:
        """What stands between the opening of an assistant's turn and its end, and what stands behind that."""
        again = again or bool(between)
        text = self.text([_QUESTION, message, *between], prompt=again)
        head, before, close, calls = self._head, self._before, self._close, message.get("tool_calls")
        content, thought = message["content"] or "", message.get("reasoning_content")
        if not (calls or thought) and before.startswith(head) and text.startswith(before + content + close):
            rest = text[len(before + content) :]
            return (before + content)[len(head) :] + self._blank, rest.removeprefix(self._ending)
        whole = self.text([_QUESTION, message], prompt=False) if again else text
        fits = whole.startswith(head) and whole.endswith(close) and len(whole) >= len(head) + len(close)
        lost, opened = not holds(whole, content), head.removeprefix(before).strip()
        if (
            (lost or not fits)
            and not (calls or thought)
            and head.startswith(before)
            and content.startswith(opened)
        ):
            # A thought is cut out, maybe with the mark that opens it in a prompt: it is learnt nevertheless.
            said = content.removeprefix(opened).lstrip() if opened else content
            return said + self._blank, self._after(between, again)
        if lost or not fits:
            unfit = f"does not show an answer between {head[-40:]!r} and {close!r}"
            what = f"leaves out what is said{' beside a call' * bool(calls)}" if fits else unfit
            raise UserError("", f"the chat template {what}", _SUGGESTION)
        said = whole[len(head) : len(whole) - len(close)]
        if thought and not holds(said, thought):
            fix = "write it into content, as <think>...</think>, or take a template that shows it"
            raise UserError("", "the chat template leaves out reasoning_content", fix)
        if calls:
            check_calls(message, said)
            if text.startswith(head + said):  # a result may have to follow its call
                return said + self._blank, text[len(head + said) :].removeprefix(self._ending)
        return said + self._blank, self._after(between, again)

    def _after(self, messages: Sequence[Message], again: bool = False) -> str:
        """The text behind the end of an assistant's turn: the messages, and the opening of its next turn."""
        answer = {"role": "assistant", "content": _ANSWER}
        text = self.text([_QUESTION, answer, *messages], prompt=bool(messages) or again)
        return text.partition(_ANSWER)[2].removeprefix(self._ending)

    def _around(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> tuple[str, str]:
        """The text before an answer to these messages, and the text behind it."""
        text = self.text([*messages, {"role": "assistant", "content": _ANSWER}], prompt=False, tools=tools)
        before, found, after = text.rpartition(_ANSWER)
        if not found or not before:
            raise UserError("", "the chat template does not show what an assistant says", _SUGGESTION)
        return before, after

    def text(self, messages: Sequence[Message], *, prompt: bool, tools: Sequence[Any] = ()) -> str:
        """What the template makes of messages; UserError if it refuses, leaves out or alters one of them.

        prompt: up to where the policy begins to speak. tools: what it may call, as JSON schemas.
        """
        if tools and self.for_tools is not self:
            return self.for_tools.text(messages, prompt=prompt, tools=tools)
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": prompt}
        if self.today is not None:
            options["strftime_now"] = self.today.strftime
        if self.template is not None:
            options["chat_template"] = plain_template.TEMPLATE if self.plain else self.template
        options |= {"tools": self._spelling.guarded_all(tools)} if tools else {}
        try:
            shown = [{key: value for key, value in m.items() if key != "weight"} for m in messages]
            text: str = self.tokenizer.apply_chat_template(shown, **options)
        except Exception as error:  # a template may do anything, as divide by 0
            roles = ", ".join(message["role"] for message in messages)
            problem = f"the chat template fails ({error}): the roles are {roles}"
            raise UserError("", problem, _SUGGESTION) from None
        check_shown(messages, tools, text, fix=_SUGGESTION)
        return text


def _choose_template(named: Mapping[str, str], template: str | None) -> tuple[str, str | None]:
    """Return the template that is meant of several, and that of conversations with tools.

    UserError if none is named and none is called "default".
    """
    if template is not None:
        return named.get(template, template), None
    if "default" not in named:
        problem = f"the tokenizer has the chat templates {', '.join(sorted(named))}, and not a default"
        raise UserError("model.chat_template", problem, "set it to one of their names")
    return named["default"], named.get("tool_use")
