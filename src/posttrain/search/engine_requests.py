"""The requests to an engine for each question of a search, and the meaning of its completions.

Propose       the messages of the state, after which the policy writes a move, or a sketch
StateValue    the messages and ASK, after which each of two answers is forced
ValueTarget   likewise, with the correct answer
Apply         none: Transitions answer it
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from posttrain.base.chat import Chat
from posttrain.search.protocol import Move, Propose, Question, State, StateValue, ValueTarget
from posttrain.search.values import ANSWERS, value_of, value_prompt, with_question
from posttrain.types import Completion, Request, Sampling, UserError

SKETCH = "Sketch a proof: lemmas by assert, and hole. for what is left out"


@dataclass(frozen=True)
class EngineQuestions:
    """Make requests of questions. The draws in a state depend on seed, task and state alone."""

    chat: Chat
    context: int
    """Largest number of tokens of a prompt with its move."""
    seed: int
    sketch_tokens: int
    """Largest number of tokens of a sketch; for other moves the sampling decides."""
    by_policy: bool
    """Whether the policy predicts values."""

    def requests(self, key: str, sampling: Sampling, question: Question) -> list[Request | None]:
        """Return the requests of a question, None for a state that leaves no room. key: of the draws."""
        if isinstance(question, Propose):
            return list(self._moves(key, sampling, question))
        if isinstance(question, ValueTarget):
            pairs = zip(question.states, question.ends, strict=True)
            return [self._value(sampling, state, ANSWERS[ends]) for state, ends in pairs]
        if isinstance(question, StateValue) and self.by_policy:
            return [self._value(sampling, state, answer) for state in question.states for answer in ANSWERS]
        return []

    def _value(self, sampling: Sampling, state: State, text: str) -> Request | None:
        """Return the request for the policy's probability of this answer, which is forced."""
        try:
            prompt = tuple(value_prompt(self.chat, state))
        except UserError:
            return None
        forced = tuple(self.chat.spell(text))
        if len(prompt) + len(forced) > self.context:
            return None
        sampling = replace(sampling, max_new_tokens=len(forced))
        return Request(prompt=prompt, sampling=sampling, forced=forced, sample=ANSWERS.index(text))

    def _moves(self, key: str, sampling: Sampling, question: Propose) -> list[Request]:
        """Return the requests for moves; none if the state leaves no room for one."""
        try:
            prompt = tuple(prompt_of(self.chat, question.state, question.sketch))
        except UserError:
            return []
        limit = self.sketch_tokens if question.sketch else sampling.max_new_tokens
        room = min(limit, self.context - len(prompt))
        if room < 1:
            return []
        excluded = tuple((move.tokens, move.logp_policy) for move in question.previous)
        state = hashlib.blake2b(question.state.key.encode(), digest_size=12).hexdigest()
        return [
            Request(
                prompt=prompt,
                sampling=replace(sampling, max_new_tokens=room),
                seed=self.seed,
                task=f"{key}:{state}" + (":sketch" if question.sketch else ""),
                sample=sample,
                excluded=excluded,
                again=True,
            )
            for sample in range(question.first, question.first + question.count)
        ]


def prompt_of(chat: Chat, state: State, sketch: bool = False) -> list[int]:
    """Return the prompt for the next move, or for a sketch. Raise UserError if the state cannot be shown."""
    if sketch:
        return chat.render(with_question(state, SKETCH))
    return [*chat.render(state.shown, state.tools), *(chat.spell(state.answer) if state.answer else [])]


def as_move(answer: Completion, question: Question) -> Move:
    """Return a completion as a move."""
    return Move(
        text=answer.text,
        logp=sum(answer.logp_policy),
        tokens=tuple(answer.tokens),
        logp_gen=tuple(answer.logp_gen),
        logp_policy=tuple(answer.logp_policy),
        version=tuple(answer.version),
        complete=answer.stop != "length",
        sketch=isinstance(question, Propose) and question.sketch,
    )


def values_of(answers: Sequence[Move | None]) -> list[float]:
    """Return the values of states from the two answers for each; 0.5 where there was no room to ask."""
    pairs = zip(answers[::2], answers[1::2], strict=True)
    return [value_of(no.logp, yes.logp) if no and yes else 0.5 for no, yes in pairs]
