"""HTTP endpoints of the episodes that agents play; each episode has a URL of its own.

    POST /v1/episodes/KEY/chat/completions   an answer of the policy: one call of the episode
    POST /v1/episodes/KEY/reward             {"score": 1.0}, once

Server threads handle requests, and the thread that steps the engine delivers answers; one mutex guards the
state of both. The recipe decides how answers are sampled; of a client's own sampling parameters only stop
strings and a smaller token limit count.
"""

import hashlib
import json
import queue
import secrets
import threading
from collections import Counter
from dataclasses import dataclass, field, replace

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from posttrain.base.verdict import number
from posttrain.envs.agent import Agent
from posttrain.rollout.conversations import AgentConversation, Conversations
from posttrain.serving.answers import before_stop
from posttrain.serving.server import Desk, read_body, reply
from posttrain.serving.speech import Speech
from posttrain.serving.stepper import PendingAnswers, Tell
from posttrain.serving.wire import Question, RefusedError, parse_question, template_refusal
from posttrain.types import Completion, Request, Sampling, Task, UserError


@dataclass(eq=False)
class AgentRequest:
    """A request of an agent; a client that retries it joins the list of those that wait for its answer."""

    session: "AgentSession"
    conversation: AgentConversation
    request: Request
    key: str
    """Key of its random draws, unique in the episode."""
    body: bytes
    """Body of the HTTP request, by which a retry is recognised."""
    clients: list[PendingAnswers]
    answer: Completion | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether all its clients have gone."""
        return all(client.gone for client in self.clients)


@dataclass(eq=False)
class AgentSession:
    """A running episode of an agent: its conversations, calls and reward."""

    group: int
    task: Task
    sample: int
    key: str
    """Key of its random draws: epoch:task (see GroupRequest.key)."""
    sampling: Sampling
    conversations: Conversations
    calls: list[AgentRequest] = field(default_factory=list)
    score: float | None = None
    """The reward that the agent has posted."""
    last_answer: str = ""
    truncated: str = ""
    """Limit that a refused request exceeded, as "context" or "32 calls"; "" if none was."""


class EpisodeDesk(Desk):
    """Receive the requests of agents and put them in `inbox` for the thread that steps the engine."""

    base = "/v1/episodes/{key}"

    def __init__(self, speech: Speech, agent: Agent, *, context: int, seed: int, keyed: bool = False) -> None:
        """keyed: record for each answer which conversation it was given in (`Trajectory.turn_state`)."""
        super().__init__(speech, "policy")
        self.agent, self.context, self.seed, self.keyed = agent, context, seed, keyed
        self.inbox: queue.SimpleQueue[AgentRequest] = queue.SimpleQueue()
        self._mutex = threading.RLock()
        self._sessions: dict[str, AgentSession] = {}
        self.routes = [Route(f"{self.base}/reward", self.reward, methods=["POST"])]

    def open(self, session: AgentSession) -> str:
        """Register an episode and return the KEY of its URL."""
        key = secrets.token_hex(16)
        with self._mutex:
            self._sessions[key] = session
        return key

    def end(self, key: str) -> None:
        """Answer no further request of an episode, and refuse its pending ones with 404."""
        with self._mutex:
            for call in self._sessions.pop(key).calls:
                if call.answer is None:
                    for client in call.clients:
                        client.gone = True
                        client.tell(0, RefusedError("the episode is over", status=404))

    def answer(self, call: AgentRequest, answer: Completion) -> None:
        """Append an answer to its conversation and send it to all clients of the call."""
        text = before_stop(answer.text, call.clients[0].question.stop)
        with self._mutex:
            call.conversation.answer(answer, self.speech.read(text, call.conversation.tools))
            call.answer, call.session.last_answer = answer, text
            for client in call.clients:
                client.tell(0, answer)

    def take_back(self, call: AgentRequest) -> bool:
        """Forget a call if it is abandoned, and return whether it was; sent again, it draws the same."""
        with self._mutex:
            if not call.is_abandoned:
                return False
            call.session.calls.remove(call)
            call.conversation.take_back()
            return True

    # ------------------------------------------------------------------ over the wire

    def ask(self, body: bytes, tell: Tell, tries: int, **place: str) -> PendingAnswers:
        """Return a pending answer. Raises RefusedError.

        tries: how often the client has sent this request before; a retry receives the answer to the first.
        """
        with self._mutex:
            session = self._session(place["key"])
            if tries and (call := next((c for c in session.calls if c.body == body), None)):
                client = replace(call.clients[0], tell=tell, gone=False, streamed=Counter())
                call.clients.append(client)
                if call.answer is not None:
                    tell(0, call.answer)
                return client
            return self._ask(session, body, tell)

    async def reward(self, request: HttpRequest) -> Response:
        """Take the reward of an episode."""
        body = await read_body(request)
        return await run_in_threadpool(self._rewarded, request.path_params["key"], body)

    def _rewarded(self, key: str, body: bytes) -> Response:
        with self._mutex:
            session = self._session(key)
            try:
                score = json.loads(body)["score"]
                if isinstance(score, bool) or number(score) is None:
                    raise ValueError
            except (ValueError, TypeError, KeyError, RecursionError):
                raise RefusedError('a reward is {"score": a finite number}', field="score") from None
            if session.score is not None:
                raise RefusedError("the episode has its reward", code="reward_given")
            session.score = float(score)
        return reply({"score": session.score})

    def _session(self, key: str) -> AgentSession:
        if key not in self._sessions:
            raise RefusedError("there is no such episode, or it is over", status=404)
        return self._sessions[key]

    def _ask(self, session: AgentSession, body: bytes, tell: Tell) -> PendingAnswers:
        query = parse_question(body)
        if query.count > 1:
            raise RefusedError("an episode is asked for one answer at a time", field="n")
        if query.template_args or query.top_logprobs:
            name = "chat_template_kwargs" if query.template_args else "top_logprobs"
            raise RefusedError(f"{name} is not served in an episode", field=name)
        if len(session.calls) >= self.agent.max_calls:
            session.truncated = f"{self.agent.max_calls} calls"
            raise RefusedError(f"an episode has {session.truncated}", status=403, code="episode_over")
        try:
            conversation = session.conversations.ask(query.messages, query.tools, self.context)
        except UserError as error:
            raise template_refusal(error) from None
        except RefusedError:
            session.truncated = "context"
            raise
        call = self._call(session, conversation, body, query, tell)
        session.calls.append(call)
        self.inbox.put(call)
        return call.clients[0]

    def _call(
        self, session: AgentSession, conversation: AgentConversation, body: bytes, query: Question, tell: Tell
    ) -> AgentRequest:
        live, client = conversation.live, query.sampling(self.context)
        live.sampling = replace(
            session.sampling,
            max_new_tokens=min(client.max_new_tokens, session.sampling.max_new_tokens),
            stop=tuple(dict.fromkeys((*session.sampling.stop, *client.stop))),
        )
        room = min(live.sampling.max_new_tokens, self.context - len(live.tokens))
        prompt = tuple(live.tokens)
        if self.keyed:
            live.begin_turn(0)
        digest = hashlib.blake2b(repr((prompt, live.sampling.stop)).encode(), digest_size=12).hexdigest()
        used = {call.key for call in session.calls}
        # Numbers tell equal prompts of one episode apart, so that they draw differently.
        key = next(key for n in range(len(used) + 1) if (key := f"{session.key}:{digest}:{n}") not in used)
        request = Request(
            prompt=prompt,
            sampling=replace(live.sampling, max_new_tokens=room),
            seed=self.seed,
            task=key,
            sample=session.sample,
            episode=f"{session.group}/{session.sample}/{conversation.number}",
        )
        return AgentRequest(
            session, conversation, request, key, body, [PendingAnswers(query, [request], tell)]
        )
