"""What an engine is asked for a question of a search, and what its answers say.

Propose   the state, as its messages show it, behind which the policy says a move, or a sketch
Value     the state and ASK, behind which each of two answers is forced
Target    likewise, with the one that should have been said
Apply     nothing: Steps answer it
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from posttrain.base.chat import Chat
from posttrain.search.protocol import Move, Propose, Question, State, StateValue, ValueTarget
from posttrain.search.values import SAID, below, value_of, value_prompt
from posttrain.types import Completion, Request, Sampling, UserError

SKETCH = "Sketch a proof: lemmas by assert, and hole. for what is left out"


@dataclass(frozen=True)
class EngineQuestions:
    """Requests of questions. What is drawn in a state depends on seed, task and state alone."""

    chat: Chat
    context: int
    """Tokens that prompt and move may have together."""
    seed: int
    sketch_tokens: int
    """That a sketch may have; a move has as many as its sampling says."""
    by_policy: bool
    """Whether the policy says values."""

    def requests(self, key: str, sampling: Sampling, question: Question) -> list[Request | None]:
        """What the engine is asked of a question; None where a state leaves no room. key: of the draws."""
        if isinstance(question, Propose):
            return list(self._moves(key, sampling, question))
        if isinstance(question, ValueTarget):
            told = zip(question.states, question.ends, strict=True)
            return [self._valued(sampling, state, SAID[ends]) for state, ends in told]
        if isinstance(question, StateValue) and self.by_policy:
            return [self._valued(sampling, state, said) for state in question.states for said in SAID]
        return []

    def _valued(self, sampling: Sampling, state: State, said: str) -> Request | None:
        """How likely the policy says just this of a state's value; it is forced, so nothing is drawn."""
        try:
            prompt = tuple(value_prompt(self.chat, state))
        except UserError:
            return None
        forced = tuple(self.chat.spell(said))
        if len(prompt) + len(forced) > self.context:
            return None
        sampling = replace(sampling, max_new_tokens=len(forced))
        return Request(prompt=prompt, sampling=sampling, forced=forced, sample=SAID.index(said))

    def _moves(self, key: str, sampling: Sampling, question: Propose) -> list[Request]:
        """What the engine is asked; nothing where the state leaves no room for a move."""
        try:
            prompt = tuple(prompt_of(self.chat, question.state, question.sketch))
        except UserError:
            return []
        most = self.sketch_tokens if question.sketch else sampling.max_new_tokens
        room = min(most, self.context - len(prompt))
        if room < 1:
            return []
        said = tuple((each.tokens, each.logp_policy) for each in question.said)
        state = hashlib.blake2b(question.state.key.encode(), digest_size=12).hexdigest()
        return [
            Request(
                prompt=prompt,
                sampling=replace(sampling, max_new_tokens=room),
                seed=self.seed,
                task=f"{key}:{state}" + (":sketch" if question.sketch else ""),
                sample=sample,
                excluded=said,
                again=True,
            )
            for sample in range(question.first, question.first + question.count)
        ]


def prompt_of(chat: Chat, state: State, sketch: bool = False) -> list[int]:
    """The tokens behind which a policy says its next move, or a sketch. UserError if it cannot be shown."""
    if sketch:
        return chat.render(below(state, SKETCH))
    return [*chat.render(state.shown, state.tools), *(chat.spell(state.said) if state.said else [])]


def move_of(answer: Completion, question: Question) -> Move:
    """What an engine has drawn, as a move."""
    return Move(
        text=answer.text,
        logp=sum(answer.logp_policy),
        tokens=tuple(answer.tokens),
        logp_gen=tuple(answer.logp_gen),
        logp_policy=tuple(answer.logp_policy),
        version=tuple(answer.version),
        ended=answer.stop != "length",
        sketch=isinstance(question, Propose) and question.sketch,
    )


def values(said: Sequence[Move | None]) -> list[float]:
    """Of states, from the two answers to each; 0.5 where there was no room to ask."""
    pairs = zip(said[::2], said[1::2], strict=True)
    return [value_of(no.logp, yes.logp) if no and yes else 0.5 for no, yes in pairs]
