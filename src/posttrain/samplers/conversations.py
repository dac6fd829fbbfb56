"""The conversations of an episode that a program plays: which token is whose, whatever the program sends.

A request goes on with the conversation that it begins with, if that ends in an answer of the policy: its
tokens are kept as they were drawn. Where it continues differently from an earlier request, it is a branch.
What a branch begins with is context there: every token that was drawn is trained once, where it was drawn.
What an assistant says that the policy never said is context as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from posttrain.envs.tools.call import Tool
from posttrain.samplers.live_episode import RunningEpisode
from posttrain.serving.speech import Speech
from posttrain.serving.wire import ChatMessage, room_behind
from posttrain.types import Completion, Trajectory


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer of the policy, by how far its conversation reaches with it."""

    messages: int
    tokens: int


@dataclass(eq=False)
class Conversation:
    """One conversation, message for message and token for token."""

    live: RunningEpisode
    tools: tuple[Tool, ...] = ()
    messages: list[ChatMessage] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    number: int = 0
    asked: bool = False
    """Whether an answer is running."""

    def answer(self, completion: Completion, said: ChatMessage) -> None:
        """Takes an answer, which the program is told as this message."""
        self.live.chose(completion)
        self.messages.append(said)
        self.turns.append(Turn(len(self.messages), len(self.live.tokens)))
        self.asked = False

    def take_back(self) -> None:
        """Forgets what has come since the last answer: a request that nobody waits for any more."""
        last = self.turns[-1] if self.turns else Turn(0, 0)
        del self.messages[last.messages :]
        self.live.truncate(last.tokens)
        self.asked = False


class Conversations:
    """All conversations of one episode."""

    def __init__(self, speech: Speech, start: Callable[[Sequence[int]], RunningEpisode]) -> None:
        """start: a new row that begins with these tokens."""
        self.speech, self.start = speech, start
        self.all: list[Conversation] = []

    def ask(self, messages: Sequence[ChatMessage], tools: tuple[Tool, ...], context: int) -> Conversation:
        """The conversation that these messages are, ready for its answer.

        RefusedError for one that leaves no room in the context, UserError for one that cannot be shown.
        """
        known, turn = self._longest(messages, tools)
        first = turn.messages
        if known is None:
            tokens, added = self.speech.prompt(messages, tools), list[int]()
        else:
            tokens = known.live.tokens[: turn.tokens]
            added = self.speech.added(tokens, messages, first, tools)
        room_behind([*tokens, *added], context)
        if known is None or known.asked or turn is not known.turns[-1]:
            known = Conversation(self.start(tokens), tools, list(messages[:first]), number=len(self.all))
            if first:  # what is begun with ends in an answer, which is trained elsewhere
                known.turns.append(turn)
            self.all.append(known)
        known.live.append(added)
        known.messages += messages[first:]
        known.asked = True
        return known

    def _longest(
        self, messages: Sequence[ChatMessage], tools: tuple[Tool, ...]
    ) -> tuple[Conversation | None, Turn]:
        """The conversation with whose answer these messages go on, and which answer that is."""
        found, most = None, Turn(0, 0)
        for each in self.all:
            for turn in reversed(each.turns):
                n = turn.messages
                if n <= most.messages:
                    break
                if n < len(messages) and each.tools == tools and each.messages[:n] == list(messages[:n]):
                    found, most = each, turn
                    break
        return found, most

    def rows(self, score: float) -> tuple[Trajectory, ...]:
        """The rows that are trained, each paid the score of the episode with its last token."""
        rows = []
        for each in self.all:
            if each.asked:
                each.take_back()
            if any(each.live.sampled):
                each.live.pay(score)
                rows.append(each.live.trajectory())
        return tuple(rows)
