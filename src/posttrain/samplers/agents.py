"""Episodes that agents play which know nothing of posttrain: each asks the model at a URL of its own.

    step   consumes       requests that agents have made, answers of the engine, and agents that have ended
           waits for      nothing but, while the engine has nothing to do, a moment for a request
           unblocked by   an agent's end: by itself, or at its deadline

A draw depends on the episode and on the prompt, not on when it is asked for; but which requests are computed
together, and so the last bits of a probability, depends on how fast the agents are.
"""

import queue
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from posttrain.base.chat import Chat
from posttrain.engines.protocol import Engine
from posttrain.envs.agent import Agent, play, record
from posttrain.envs.tools.call import AGENT
from posttrain.process.workers import Failed, Returned, Workers
from posttrain.samplers.conversations import Conversations
from posttrain.samplers.episode_runner import EpisodeRunner
from posttrain.samplers.episodes import Call, EpisodeDesk, Game
from posttrain.samplers.live_episode import PartialEpisode, RunningEpisode
from posttrain.samplers.protocol import GroupRequest
from posttrain.serving.server import ChatServer
from posttrain.serving.speech import Speech
from posttrain.serving.stepper import stream
from posttrain.types import Completion, Episode, Trajectory, Verdict
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import Verifier

_POLL_S = 0.02


class AgentRunner(EpisodeRunner):
    """Plays groups by agents, each in a worker process; a verifier judges what nobody else has scored."""

    puts_aside = False  # a program's deadline goes on

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        agent: Agent,
        *,
        verifier: Verifier | None = None,
        workers: int = 2,
        deadline_s: float = 10.0,
        memory_mb: int = 4096,
        context: int,
        seed: int = 0,
    ) -> None:
        self.desk = EpisodeDesk(Speech.of(chat, agent.format), agent, context=context, seed=seed)
        self.engine, self.agent, self.verifier, self.steps = engine, agent, verifier, 0
        self.pool = Pool(workers=workers, deadline_s=deadline_s, memory_mb=memory_mb)
        self.workers = Workers(agent.at_once, deadline_s=agent.deadline_s, memory_mb=memory_mb)
        self._playing: dict[int, tuple[str, Game]] = {}
        self._groups: dict[int, list[Episode | None]] = {}
        self._opened = 0
        self._waiting: list[Call] = []
        """Requests that the engine is not asked yet, or was taken back from."""
        self._answering: dict[int, Call] = {}
        self._judging: dict[int, tuple[Game, Counter[str]]] = {}
        self._finished: list[int] = []
        self._apart: set[int] | None = None
        self.server = ChatServer(self.desk)

    def close(self) -> None:
        """Ends the agents, the port, verifiers, and what the engine has begun."""
        self.workers.close()
        self.server.close()
        self.pool.close()
        self.engine.close()

    @property
    def busy(self) -> bool:
        """Whether an episode is going on."""
        return bool(self._playing or self._judging or self._finished)

    def open(self, request: GroupRequest) -> int:
        """The number of a new group. What an agent was doing elsewhere nobody knows: it begins again."""
        group, self._opened = self._opened, self._opened + 1
        self._groups[group] = [None] * request.size
        for part in request.begun:
            if part.episode is not None:
                self._over(group, part.episode)
        for sample in range(request.size):
            if self._groups[group][sample] is None:
                self._start(group, request, sample)
        return group

    def _start(self, group: int, request: GroupRequest, sample: int) -> None:
        task, key, sampling = request.task, request.key, request.sampling

        def row(tokens: Sequence[int]) -> RunningEpisode:
            return RunningEpisode(task, sample, key, sampling, list(tokens))

        game = Game(group, task, sample, key, sampling, Conversations(self.desk.speech, row))
        name = self.desk.open(game)
        url = f"{self.server.address}/episodes/{name}"
        ticket = self.workers.submit(play, self.agent, record(task), url, key=f"{key}:{sample}")
        self._playing[ticket] = (name, game)

    def step(self) -> list[tuple[int, list[Episode]]]:
        """The groups that are now complete, with their numbers, after one step of the engine."""
        self._take_requests(0.0 if self.engine.busy or self._finished else _POLL_S)
        self._give_up()
        if self.engine.busy:
            self.steps += 1
            self.receive(self.engine.poll())
            calls = self._answering.items()
            stream(self.engine, {ticket: [(asked, 0) for asked in call.askers] for ticket, call in calls})
        begin = time.monotonic()
        for ticket, outcome in self.workers.poll(0.0):
            self._judge_episode(*self._playing.pop(ticket), outcome)
        for ticket, verdict in self.pool.poll(0.0):
            self._close(*self._judging.pop(ticket), verdict)
        self.judged_s += time.monotonic() - begin
        done, self._finished = self._finished, []
        return [(group, [e for e in self._groups.pop(group) if e is not None]) for group in done]

    def receive(self, answers: Sequence[tuple[int, Completion]]) -> None:
        """Takes answers of the engine, and tells the agents."""
        for ticket, answer in answers:
            self.desk.answer(self._answering.pop(ticket), answer)

    # ------------------------------------------------------------------ requests and the engine

    def _take_requests(self, wait_s: float) -> None:
        """Asks the engine what may be asked now; waits so long for a request if there is none."""
        inbox = self.desk.inbox
        try:
            while True:
                self._waiting.append(inbox.get(timeout=wait_s) if wait_s else inbox.get_nowait())
                wait_s = 0.0
        except queue.Empty:
            pass
        later = []
        for call in self._waiting:
            if self._apart is None or call.game.group in self._apart:
                self._answering[self.engine.submit(call.request)] = call
            else:
                later.append(call)
        self._waiting = later

    def _give_up(self) -> None:
        """Forgets requests whose clients have gone."""
        if any(call.is_given_up for call in self._answering.values()):
            self.pause()
        self._waiting = [call for call in self._waiting if not self.desk.take_back(call)]
        self._take_requests(0.0)

    def pause(self) -> None:
        """Takes back from the engine all that it has not answered, as far as it has come."""
        for ticket, request in self.engine.withdraw():
            call = self._answering.pop(ticket)
            call.request = request
            self._waiting.append(call)

    def unpause(self) -> None:
        """Asks the engine to go on with what was taken back, in the order of groups and samples."""
        self._waiting.sort(key=lambda call: (call.game.group, call.game.sample))
        self._take_requests(0.0)

    def run_only(self, groups: set[int]) -> None:
        """Goes on with these groups alone; the agents of others wait for their answers."""
        self._apart = groups

    def run_all(self) -> None:
        """Goes on with all others where they were left."""
        self._apart = None

    def parts(self) -> dict[int, tuple[PartialEpisode, ...]]:
        """The episodes of each group that are over; the others begin again."""
        return {
            group: tuple(PartialEpisode(sample=e.sample, episode=e) for e in episodes if e is not None)
            for group, episodes in self._groups.items()
        }

    # ------------------------------------------------------------------ the end of an episode

    def _judge_episode(self, name: str, game: Game, outcome: Returned | Failed) -> None:
        """Judges an episode whose agent has ended: by what was posted or returned, or by the verifier."""
        self.desk.end(name)
        self._give_up()
        counts = Counter(calls=len(game.calls), conversations=len(game.talks.all))
        counts["truncated"] = bool(game.truncated)
        counts["tried_again"] = sum(len(call.askers) - 1 for call in game.calls)
        said = any(call.answer for call in game.calls)
        value = outcome.value if isinstance(outcome, Returned) else None
        score = game.score if game.score is not None else value if isinstance(value, float) else None
        verdict: Verdict | None = None
        if not said:
            why = outcome.reason if isinstance(outcome, Failed) else "it asked the model nothing"
            label = outcome.label if isinstance(outcome, Failed) else "no_call"
            verdict = Verdict(score=None, label=label, reason=why)
        elif score is not None:
            verdict = Verdict(score=score, label="scored")
        elif isinstance(outcome, Failed) and not game.truncated:
            verdict = Verdict(score=None, label=outcome.label, reason=outcome.reason)
        elif self.verifier is not None:
            text = value if isinstance(value, str) else game.last
            self._judging[self.pool.submit(self.verifier, game.task, text)] = (game, counts)
            return
        elif game.truncated:
            verdict = Verdict(score=0.0, label="truncated", reason=f"no reward before {game.truncated}")
        else:
            why = "nothing was posted or returned, and there is no [verifier]"
            verdict = Verdict(score=None, label="no_reward", reason=why)
        self._close(game, counts, verdict)

    def _close(self, game: Game, counts: Counter[str], verdict: Verdict) -> None:
        for talk in game.talks.all:
            self.engine.release(f"{game.group}/{game.sample}/{talk.number}")
        parts = {**verdict.parts, **{f"{AGENT}{name}": float(n) for name, n in counts.items()}}
        answers = [call.answer for call in game.calls if call.answer]
        rows = game.talks.rows(verdict.score or 0.0) or (Trajectory.given([]),)
        episode = Episode(
            task=game.task,
            sample=game.sample,
            trajectory=rows[0],
            branches=rows[1:],
            verdict=replace(verdict, parts=parts, progress=()),
            response="\n".join(answer.text for answer in answers),
            stop="context" if game.truncated else answers[-1].stop if answers else "",
            turns=len(answers),
        )
        self._over(game.group, episode)

    def _over(self, group: int, episode: Episode) -> None:
        episodes = self._groups[group]
        episodes[episode.sample] = episode
        if all(e is not None for e in episodes):
            self._finished.append(group)
