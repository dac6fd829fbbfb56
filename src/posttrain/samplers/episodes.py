"""Where agents ask: an episode has a URL of its own, and each request is one of its calls.

    POST /v1/episodes/KEY/chat/completions   an answer of the policy
    POST /v1/episodes/KEY/reward             {"score": 1.0}, once

What is asked is taken in threads, under one mutex with all that an answer changes. The recipe says how
answers are drawn; of a client's own wishes only its stop strings and a smaller limit of tokens count.
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
from posttrain.samplers.conversations import Conversation, Conversations
from posttrain.serving.answers import before_stop
from posttrain.serving.server import Desk, read_body, reply
from posttrain.serving.speech import Speech
from posttrain.serving.stepper import PendingAnswers, Tell
from posttrain.serving.wire import Question, RefusedError, question, unshown
from posttrain.types import Completion, Request, Sampling, Task, UserError


@dataclass(eq=False)
class Call:
    """A request of an agent, and everybody who waits for its answer: a client that tries again joins."""

    game: "Game"
    talk: Conversation
    request: Request
    key: str
    """Of its draws: no other call of the episode has it."""
    body: bytes
    askers: list[PendingAnswers]
    answer: Completion | None = None

    @property
    def is_given_up(self) -> bool:
        """Whether nobody waits for it any more."""
        return all(asked.gone for asked in self.askers)


@dataclass(eq=False)
class Game:
    """An episode that is going on."""

    group: int
    task: Task
    sample: int
    key: str
    """Of its draws: the epoch and the task."""
    sampling: Sampling
    talks: Conversations
    calls: list[Call] = field(default_factory=list)
    score: float | None = None
    """What was posted."""
    last: str = ""
    """What the policy said last."""
    truncated: str = ""
    """Why requests are no longer answered."""


class EpisodeDesk(Desk):
    """Takes what agents ask, for whoever steps the engine."""

    base = "/v1/episodes/{key}"

    def __init__(self, speech: Speech, agent: Agent, *, context: int, seed: int) -> None:
        super().__init__(speech, "policy")
        self.agent, self.context, self.seed = agent, context, seed
        self.inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._mutex = threading.RLock()
        self._games: dict[str, Game] = {}
        self.routes = [Route(f"{self.base}/reward", self.reward, methods=["POST"])]

    def open(self, game: Game) -> str:
        """The key of an episode, under which it is asked from now on."""
        key = secrets.token_hex(16)
        with self._mutex:
            self._games[key] = game
        return key

    def end(self, key: str) -> None:
        """Answers nothing more of an episode; what is running is given up."""
        with self._mutex:
            for call in self._games.pop(key).calls:
                if call.answer is None:
                    for asked in call.askers:
                        asked.gone = True
                        asked.tell(0, RefusedError("the episode is over", status=404))

    def answer(self, call: Call, answer: Completion) -> None:
        """Tells all who wait for an answer."""
        text = before_stop(answer.text, call.askers[0].question.stop)
        with self._mutex:
            call.talk.answer(answer, self.speech.read(text, call.talk.tools))
            call.answer, call.game.last = answer, text
            for asked in call.askers:
                asked.tell(0, answer)

    def take_back(self, call: Call) -> bool:
        """Forgets a call for which nobody waits any more; asked again, it is drawn as it would have been."""
        with self._mutex:
            if not call.is_given_up:
                return False
            call.game.calls.remove(call)
            call.talk.take_back()
            return True

    # ------------------------------------------------------------------ over the wire

    def ask(self, body: bytes, tell: Tell, tries: int, **place: str) -> PendingAnswers:
        """Return an answer that will come. Raises RefusedError.

        A client that tries again gets the answer to what it asked before.
        """
        with self._mutex:
            game = self._game(place["key"])
            if tries and (call := next((c for c in game.calls if c.body == body), None)):
                again = replace(call.askers[0], tell=tell, gone=False, streamed=Counter())
                call.askers.append(again)
                if call.answer is not None:
                    tell(0, call.answer)
                return again
            return self._ask(game, body, tell)

    async def reward(self, request: HttpRequest) -> Response:
        """Take the reward of an episode."""
        body = await read_body(request)
        return await run_in_threadpool(self._rewarded, request.path_params["key"], body)

    def _rewarded(self, key: str, body: bytes) -> Response:
        with self._mutex:
            game = self._game(key)
            try:
                score = json.loads(body)["score"]
                if isinstance(score, bool) or number(score) is None:
                    raise ValueError
            except (ValueError, TypeError, KeyError, RecursionError):
                raise RefusedError('a reward is {"score": a finite number}', field="score") from None
            if game.score is not None:
                raise RefusedError("the episode has its reward", code="reward_given")
            game.score = float(score)
        return reply({"score": game.score})

    def _game(self, key: str) -> Game:
        if key not in self._games:
            raise RefusedError("there is no such episode, or it is over", status=404)
        return self._games[key]

    def _ask(self, game: Game, body: bytes, tell: Tell) -> PendingAnswers:
        asked = question(body)
        if asked.count > 1:
            raise RefusedError("an episode is asked for one answer at a time", field="n")
        if len(game.calls) >= self.agent.max_calls:
            game.truncated = f"{self.agent.max_calls} calls"
            raise RefusedError(f"an episode has {game.truncated}", status=403, code="episode_over")
        try:
            talk = game.talks.ask(asked.messages, asked.tools, self.context)
        except UserError as error:
            raise unshown(error) from None
        except RefusedError:
            game.truncated = "context"
            raise
        call = self._call(game, talk, body, asked, tell)
        game.calls.append(call)
        self.inbox.put(call)
        return call.askers[0]

    def _call(self, game: Game, talk: Conversation, body: bytes, asked: Question, tell: Tell) -> Call:
        live, wanted = talk.live, asked.sampling(self.context)
        live.sampling = replace(
            game.sampling,
            max_new_tokens=min(wanted.max_new_tokens, game.sampling.max_new_tokens),
            stop=tuple(dict.fromkeys((*game.sampling.stop, *wanted.stop))),
        )
        room = min(live.sampling.max_new_tokens, self.context - len(live.tokens))
        prompt = tuple(live.tokens)
        digest = hashlib.blake2b(repr((prompt, live.sampling.stop)).encode(), digest_size=12).hexdigest()
        taken = {call.key for call in game.calls}
        key = next(key for n in range(len(taken) + 1) if (key := f"{game.key}:{digest}:{n}") not in taken)
        request = Request(
            prompt=prompt,
            sampling=replace(live.sampling, max_new_tokens=room),
            seed=self.seed,
            task=key,
            sample=game.sample,
            episode=f"{game.group}/{game.sample}/{talk.number}",
        )
        return Call(game, talk, request, key, body, [PendingAnswers(asked, [request], tell)])
