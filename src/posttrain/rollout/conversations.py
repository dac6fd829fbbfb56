"""The conversations of an agent's episode: which tokens the policy sampled, whatever the agent sends.

A request continues the conversation with which it shares the longest prefix that ends in an answer of the
policy; the prefix keeps its tokens as they were sampled. A request that continues differently from an earlier
one starts a branch, in which the prefix is context: each sampled token is trained in one conversation only.
Assistant messages that the policy never wrote are context too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from posttrain.envs.tools.call import Tool
from posttrain.rollout.live_episode import RunningEpisode
from posttrain.serving.speech import Speech
from posttrain.serving.wire import ChatMessage, answer_room
from posttrain.types import Completion, Trajectory


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """Length of a conversation right after an answer of the policy, in messages and in tokens."""

    messages: int
    tokens: int


@dataclass(eq=False)
class AgentConversation:
    """One conversation, as messages and as tokens."""

    live: RunningEpisode
    tools: tuple[Tool, ...] = ()
    messages: list[ChatMessage] = field(default_factory=list)
    turns: list[TurnEnd] = field(default_factory=list)
    number: int = 0
    is_pending: bool = False
    """Whether an answer to the last message is being sampled."""

    def answer(self, completion: Completion, message: ChatMessage) -> None:
        """Append an answer; message: the form in which the agent receives it."""
        self.live.append_answer(completion)
        self.messages.append(message)
        self.turns.append(TurnEnd(len(self.messages), len(self.live.tokens)))
        self.is_pending = False

    def take_back(self) -> None:
        """Drop everything after the last answer: its client no longer waits for an answer to that."""
        last = self.turns[-1] if self.turns else TurnEnd(0, 0)
        del self.messages[last.messages :]
        self.live.truncate(last.tokens)
        self.is_pending = False


class Conversations:
    """All conversations of one episode."""

    def __init__(self, speech: Speech, start: Callable[[Sequence[int]], RunningEpisode]) -> None:
        """start: makes an episode whose context begins with these tokens."""
        self.speech, self.start = speech, start
        self.all: list[AgentConversation] = []

    def ask(
        self, messages: Sequence[ChatMessage], tools: tuple[Tool, ...], context: int
    ) -> AgentConversation:
        """Return the conversation that these messages continue or start, with them appended.

        context: the most tokens that it may have. Raises RefusedError if no room is left for an answer,
        UserError if the chat template cannot render the messages.
        """
        conversation, turn = self._longest_prefix(messages, tools)
        prefix = turn.messages
        if conversation is None:
            tokens, added = self.speech.prompt(messages, tools), list[int]()
        else:
            tokens = conversation.live.tokens[: turn.tokens]
            added = self.speech.added(tokens, messages, prefix, tools)
        answer_room([*tokens, *added], context)
        if conversation is None or conversation.is_pending or turn is not conversation.turns[-1]:
            conversation = AgentConversation(
                self.start(tokens), tools, list(messages[:prefix]), number=len(self.all)
            )
            if prefix:  # it ends in an answer, which is trained in the conversation that sampled it
                conversation.turns.append(turn)
            self.all.append(conversation)
        conversation.live.append(added)
        conversation.messages += messages[prefix:]
        conversation.is_pending = True
        return conversation

    def _longest_prefix(
        self, messages: Sequence[ChatMessage], tools: tuple[Tool, ...]
    ) -> tuple[AgentConversation | None, TurnEnd]:
        """Return the conversation, up to the end of a turn, that is the longest prefix of these messages."""
        longest, end = None, TurnEnd(0, 0)
        for conversation in self.all:
            if conversation.tools != tools:
                continue
            for turn in reversed(conversation.turns):
                n = turn.messages
                if n <= end.messages:
                    break
                if n < len(messages) and conversation.messages[:n] == list(messages[:n]):
                    longest, end = conversation, turn
                    break
        return longest, end

    def rows(self, score: float) -> tuple[Trajectory, ...]:
        """Return a trajectory of each conversation with sampled tokens, with the score at its last one."""
        rows = []
        for conversation in self.all:
            if conversation.is_pending:
                conversation.take_back()
            if any(conversation.live.sampled):
                conversation.live.pay(score)
                rows.append(conversation.live.trajectory())
        return tuple(rows)
