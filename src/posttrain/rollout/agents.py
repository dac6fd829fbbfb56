"""Play groups with agents: programs that know nothing of posttrain and call the policy at a URL.

    step   consumes       requests of agents, completions of the engine, and agents that have ended
           waits for      a request, for _POLL_S, if the engine has nothing to do; else nothing
           unblocked by   the end of an agent, by itself or at its deadline

A random draw depends on the episode and the prompt, not on when the request arrives. Which requests share a
batch, and so the last bits of a probability, does depend on how fast agents are.
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
from posttrain.rollout.conversations import Conversations
from posttrain.rollout.episode_runner import EpisodeRunner
from posttrain.rollout.episodes import AgentRequest, AgentSession, EpisodeDesk
from posttrain.rollout.live_episode import PartialEpisode, RunningEpisode
from posttrain.rollout.protocol import GroupRequest
from posttrain.run.probes import measure_probes
from posttrain.serving.server import ChatServer
from posttrain.serving.speech import Speech
from posttrain.serving.stepper import stream
from posttrain.types import Completion, Episode, Trajectory, Verdict
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import Verifier

_POLL_S = 0.02


class AgentRunner(EpisodeRunner):
    """Play groups with agents, each in a worker process.

    An episode's score is the reward that its agent posted, else the number that it returned, else the verdict
    of `verifier` on the text that it returned, or on its last answer.
    """

    can_pause = False  # an agent's deadline runs on while its requests wait

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
        keyed: bool = False,
    ) -> None:
        """keyed: record for each answer which conversation it was given in (`Trajectory.turn_state`)."""
        speech = Speech.of(chat, agent.format)
        self.desk = EpisodeDesk(speech, agent, context=context, seed=seed, keyed=keyed)
        self.engine, self.agent, self.verifier, self.steps = engine, agent, verifier, 0
        self.pool = Pool(workers=workers, deadline_s=deadline_s, memory_mb=memory_mb)
        self.workers = Workers(agent.at_once, deadline_s=agent.deadline_s, memory_mb=memory_mb)
        self._playing: dict[int, tuple[str, AgentSession]] = {}
        """Key in the URL and session, by ticket of the agent's worker process."""
        self._groups: dict[int, list[Episode | None]] = {}
        """Episodes of each group by sample; None while one is running."""
        self._opened = 0
        self._waiting: list[AgentRequest] = []
        """Calls not yet submitted to the engine, or withdrawn from it."""
        self._answering: dict[int, AgentRequest] = {}
        """By ticket of the engine."""
        self._judging: dict[int, tuple[AgentSession, Counter[str]]] = {}
        """By ticket of the pool of verifiers."""
        self._finished: list[int] = []
        """Complete groups, which the next step returns."""
        self._only: set[int] | None = None
        self.server = ChatServer(self.desk)

    def close(self) -> None:
        """End the agents, the server, the verifiers and the engine."""
        self.workers.close()
        self.server.close()
        self.pool.close()
        self.engine.close()

    @property
    def busy(self) -> bool:
        return bool(self._playing or self._judging or self._finished)

    def open(self, request: GroupRequest) -> int:
        """Start a group and return its number.

        Unfinished episodes of `request.begun` start again, as the state of an agent cannot be saved.
        """
        group, self._opened = self._opened, self._opened + 1
        self._groups[group] = [None] * request.size
        for part in request.begun:
            if part.episode is not None:
                self._store_episode(group, part.episode)
        for sample in range(request.size):
            if self._groups[group][sample] is None:
                self._start_agent(group, request, sample)
        return group

    def _start_agent(self, group: int, request: GroupRequest, sample: int) -> None:
        task, key, sampling = request.task, request.key, request.sampling

        def row(tokens: Sequence[int]) -> RunningEpisode:
            return RunningEpisode(task, sample, key, sampling, list(tokens))

        session = AgentSession(group, task, sample, key, sampling, Conversations(self.desk.speech, row))
        name = self.desk.open(session)
        url = f"{self.server.address}/episodes/{name}"
        ticket = self.workers.submit(play, self.agent, record(task), url, key=f"{key}:{sample}")
        self._playing[ticket] = (name, session)

    def step(self) -> list[tuple[int, list[Episode]]]:
        self._submit_requests(0.0 if self.engine.busy or self._finished else _POLL_S)
        self._cancel_abandoned()
        if self.engine.busy:
            self.steps += 1
            self.receive(self.engine.poll())
            calls = self._answering.items()
            stream(self.engine, {ticket: [(client, 0) for client in call.clients] for ticket, call in calls})
        begin = time.monotonic()
        for ticket, outcome in self.workers.poll(0.0):
            self._judge_episode(*self._playing.pop(ticket), outcome)
        for ticket, verdict in self.pool.poll(0.0):
            self._finish_episode(*self._judging.pop(ticket), verdict)
        self.judged_s += time.monotonic() - begin
        complete, self._finished = self._finished, []
        return [(group, [e for e in self._groups.pop(group) if e is not None]) for group in complete]

    def receive(self, answers: Sequence[tuple[int, Completion]]) -> None:
        """Send completions of the engine to the agents."""
        for ticket, answer in answers:
            self.desk.answer(self._answering.pop(ticket), answer)

    # ------------------------------------------------------------------ requests and the engine

    def _submit_requests(self, wait_s: float) -> None:
        """Submit requests of the groups that may run; if there are none, wait up to `wait_s` for one."""
        inbox = self.desk.inbox
        try:
            while True:
                self._waiting.append(inbox.get(timeout=wait_s) if wait_s else inbox.get_nowait())
                wait_s = 0.0
        except queue.Empty:
            pass
        excluded = []
        for call in self._waiting:
            if self._only is None or call.session.group in self._only:
                self._answering[self.engine.submit(call.request)] = call
            else:
                excluded.append(call)
        self._waiting = excluded

    def _cancel_abandoned(self) -> None:
        """Forget calls whose clients have gone, and submit the others again."""
        if any(call.is_abandoned for call in self._answering.values()):
            self.pause()
        self._waiting = [call for call in self._waiting if not self.desk.take_back(call)]
        self._submit_requests(0.0)

    def pause(self) -> None:
        for ticket, request in self.engine.withdraw():
            call = self._answering.pop(ticket)
            call.request = request
            self._waiting.append(call)

    def unpause(self) -> None:
        """Submit the withdrawn requests again, in the order of groups and samples."""
        self._waiting.sort(key=lambda call: (call.session.group, call.session.sample))
        self._submit_requests(0.0)

    def run_only(self, groups: set[int]) -> None:
        """Submit requests of these groups only; the agents of others wait for their answers."""
        self._only = groups

    def run_all(self) -> None:
        """Let the requests of all groups be submitted again."""
        self._only = None

    def parts(self) -> dict[int, tuple[PartialEpisode, ...]]:
        """Return the finished episodes of each group; the others cannot be saved."""
        return {
            group: tuple(PartialEpisode(sample=e.sample, episode=e) for e in episodes if e is not None)
            for group, episodes in self._groups.items()
        }

    # ------------------------------------------------------------------ the end of an episode

    def _judge_episode(self, name: str, session: AgentSession, outcome: Returned | Failed) -> None:
        """Judge an episode whose agent has ended, or submit it to the verifier."""
        self.desk.end(name)
        self._cancel_abandoned()
        counts = Counter(calls=len(session.calls), conversations=len(session.conversations.all))
        counts["truncated"] = bool(session.truncated)
        counts["tried_again"] = sum(len(call.clients) - 1 for call in session.calls)
        answered = any(call.answer for call in session.calls)
        value = outcome.value if isinstance(outcome, Returned) else None
        score = session.score if session.score is not None else value if isinstance(value, float) else None
        verdict: Verdict | None = None
        if not answered:
            reason = outcome.reason if isinstance(outcome, Failed) else "it asked the model nothing"
            label = outcome.label if isinstance(outcome, Failed) else "no_call"
            verdict = Verdict(score=None, label=label, reason=reason)
        elif score is not None:
            verdict = Verdict(score=score, label="scored")
        elif isinstance(outcome, Failed) and not session.truncated:
            verdict = Verdict(score=None, label=outcome.label, reason=outcome.reason)
        elif self.verifier is not None:
            text = value if isinstance(value, str) else session.last_answer
            self._judging[self.pool.submit(self.verifier, session.task, text)] = (session, counts)
            return
        elif session.truncated:
            verdict = Verdict(score=0.0, label="truncated", reason=f"no reward before {session.truncated}")
        else:
            reason = "nothing was posted or returned, and there is no [verifier]"
            verdict = Verdict(score=None, label="no_reward", reason=reason)
        self._finish_episode(session, counts, verdict)

    def _finish_episode(self, session: AgentSession, counts: Counter[str], verdict: Verdict) -> None:
        for conversation in session.conversations.all:
            self.engine.release(f"{session.group}/{session.sample}/{conversation.number}")
        parts = {**verdict.parts, **{f"{AGENT}{name}": float(n) for name, n in counts.items()}}
        answers = [call.answer for call in session.calls if call.answer]
        rows = session.conversations.rows(verdict.score or 0.0) or (Trajectory.given([]),)
        response = "\n".join(answer.text for answer in answers)
        episode = Episode(
            task=session.task,
            sample=session.sample,
            trajectory=rows[0],
            branches=rows[1:],
            verdict=replace(verdict, parts=parts, progress=()),
            response=response,
            stop="context" if session.truncated else answers[-1].stop if answers else "",
            turns=len(answers),
            probes=measure_probes(session.task, response),
        )
        self._store_episode(session.group, episode)

    def _store_episode(self, group: int, episode: Episode) -> None:
        episodes = self._groups[group]
        episodes[episode.sample] = episode
        if all(e is not None for e in episodes):
            self._finished.append(group)
