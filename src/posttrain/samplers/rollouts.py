"""Episodes: tasks and an engine in, trajectories with verdicts out.

    step   consumes       answers that the engine has finished
           waits for      an environment's replies that are due; never for a verifier, unless it is told to
           unblocked by   nothing: while an answer is judged or replied to the engine goes on with others

A trajectory only ever grows: what the policy sampled is kept as it was sampled, and a later
turn's prompt is everything before it plus new tokens. Whatever an environment or a verifier
does wrong ends that one episode with a verdict that has no score.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import compress

from posttrain.base.chat import Chat
from posttrain.engines.protocol import Engine
from posttrain.envs.protocol import Env, Start, Turn, broken_turn, guarded_reply, guarded_start, suited, unfit
from posttrain.process.workers import Failed, Returned, Workers
from posttrain.samplers.episode_runner import EpisodeRunner
from posttrain.samplers.live_episode import Limits, PartialEpisode, RunningEpisode
from posttrain.samplers.protocol import GroupRequest
from posttrain.types import Completion, Episode, Request, UserError, Verdict
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import Group, TrainerState, Verifier

_POLL_S = 0.05
REPLY_STEPS = 16
"""Steps of the engine after which a reply is taken where batches must not depend on how long it took: replies
of a second are hidden behind steps of a sixteenth."""
Key = int | tuple[int, int]
"""A ticket, or group and sample."""


class EpisodePhase(Enum):
    """What a running episode waits for. `parts` lists a group's episodes in this order of phases."""

    STARTING = auto()
    """The environment's first messages, from a worker process."""
    WAITING = auto()
    """The turn of its seat, while another seat of its game plays."""
    ANSWERING = auto()
    """An answer of the engine."""
    PARKED = auto()
    """`unpause`, which gives its request back to the engine."""
    JUDGING = auto()
    """A verdict of the pool."""
    ANSWERED = auto()
    """The last answer of its group, whose answers are judged together."""
    REPLYING = auto()
    """The environment's reply, from a worker process."""


@dataclass(eq=False)
class PendingEpisode:
    """A running episode of this process, and what it waits for."""

    group: "RunningGroup"
    live: RunningEpisode
    phase: EpisodePhase = EpisodePhase.STARTING
    key: Key = -1
    """The ticket of the engine, the pool or the workers; in other phases its place."""
    due: int = 0
    """STARTING, REPLYING: the step of the engine at which the reply is taken."""
    reply: Returned | Failed | None = None
    """STARTING, REPLYING: a reply that is not due."""
    request: Request | None = None
    """PARKED, and ANSWERING since `parts`: the request with what the engine has drawn so far."""
    began: float | None = None
    """When its first answer was asked for in this process."""

    @property
    def place(self) -> tuple[int, int]:
        """Group and sample."""
        return self.group.number, self.live.sample


@dataclass(eq=False)
class RunningGroup:
    """The episodes of a group by sample; it is complete when none is running."""

    number: int
    state: TrainerState
    running: dict[int, PendingEpisode] = field(default_factory=dict)
    finished: dict[int, Episode] = field(default_factory=dict)


class Rollouts(EpisodeRunner):
    """Runs the episodes of groups side by side.

    A task is judged by `verifier` after one answer, or played in `env` until that ends it. Both
    are guarded: their code runs in worker processes unless it is known to be harmless. A verifier that
    compares answers is asked when all of a group have been given.

    exact: what the engine computes together, and so its last bits, does not depend on how long an environment
    takes: a reply is taken a fixed number of steps after it was asked for. Otherwise as soon as it is there.
    waits: the same for verdicts, each of which is waited for in the step that asks for it.
    """

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        *,
        verifier: Verifier | None = None,
        env: Env | None = None,
        workers: int = 2,
        deadline_s: float = 10.0,
        memory_mb: int = 4096,
        context: int,
        episode_tokens: int = 0,
        episode_s: float = 0.0,
        seed: int = 0,
        exact: bool = True,
        waits: bool = False,
    ) -> None:
        if (verifier is None) == (env is None):
            raise ValueError("a rollout has a verifier or an environment, and not both")
        self.engine, self.chat, self.verifier, self.env = engine, chat, verifier, suited(env, chat)
        self.seed, self.exact, self.waits = seed, exact, waits
        self.limits = Limits(context, episode_tokens, episode_s)
        self.pool = Pool(workers=workers, deadline_s=deadline_s, memory_mb=memory_mb)
        self.reply_s = deadline_s + getattr(env, "reply_s", 0.0)
        guarded = env is not None and not env.trusted
        self.workers = Workers(workers, deadline_s=self.reply_s, memory_mb=memory_mb) if guarded else None
        self._groups: dict[int, RunningGroup] = {}
        self._pending: dict[EpisodePhase, dict[Key, PendingEpisode]] = {phase: {} for phase in EpisodePhase}
        """The running episodes by phase and key; of those that start by the same ticket, one."""
        self._finished: list[int] = []
        """Complete groups, which the next step returns."""
        self._opened = self._apart_at = 0
        self._apart: set[int] | None = None
        self.steps = 0
        """Of the engine."""

    def close(self) -> None:
        """Ends the worker processes, and what the engine has begun."""
        self.engine.close()
        self.pool.close()
        if self.workers:
            self.workers.close()

    @property
    def busy(self) -> bool:
        """Whether an episode is going on."""
        return bool(self._groups)

    def open(self, request: GroupRequest) -> int:
        """The number of a new group.

        Episodes that have begun elsewhere go on from there, once `unpause` is called.
        """
        task, number = request.task, self._opened
        self._opened += 1
        group = self._groups[number] = RunningGroup(number, request.state)
        seats = max((part.live.seats for part in request.begun if part.live), default=1)
        there = {part.sample // seats for part in request.begun}
        lives = [part.live for part in request.begun if part.live]
        fresh = [n for n in range(request.size) if n not in there]
        lives += [RunningEpisode(task, n, request.key, request.sampling, []) for n in fresh]
        group.running = {live.sample: PendingEpisode(group, live) for live in lives}
        group.finished = {part.sample: part.episode for part in request.begun if part.episode}
        if not group.running:
            self._finished.append(number)
        for part in request.begun:
            if part.live:
                self._go_on(group.running[part.sample], part)
        games = [group.running[n] for n in fresh]
        if not games:
            return number
        if self.env is None:
            self._start(games, Start(state=None, messages=task.messages))
        elif self.workers is None:
            self._start(games, guarded_start(self.env, task))
        else:
            ticket = self.workers.submit(guarded_start, self.env, task)
            for game in games:
                self._wait(game, EpisodePhase.STARTING, ticket, due=self.steps)
        return number

    def step(self) -> list[tuple[int, list[Episode]]]:
        """The groups that are now complete, with their numbers, after one step of the engine."""
        begin = time.monotonic()
        self._take_replies()
        if self.engine.busy:
            self.steps += 1
            before = time.monotonic()
            answers = self.engine.poll()
            begin += time.monotonic() - before
            self.receive(answers)
        idle = not self.engine.busy and not self._replying and not self._finished
        self._take_verdicts(_POLL_S if idle else 0.0)
        while self.waits and self._pending[EpisodePhase.JUDGING]:
            self._take_verdicts(_POLL_S)
        self.judged_s += time.monotonic() - begin
        done, self._finished = self._finished, []
        return [(group, self._complete(group)) for group in done]

    def receive(self, answers: Sequence[tuple[int, Completion]]) -> None:
        """Takes answers of the engine."""
        for ticket, answer in answers:
            episode = self._pending[EpisodePhase.ANSWERING][ticket]
            episode.live.chose(answer)
            self._respond(episode)

    def pause(self) -> None:
        """Takes back from the engine all that it has not answered, as far as it has come."""
        for ticket, request in self.engine.withdraw():
            self._wait(self._pending[EpisodePhase.ANSWERING][ticket], EpisodePhase.PARKED, request=request)

    def unpause(self) -> None:
        """Asks the engine to go on with what was taken back, in the order of groups and samples."""
        for episode in sorted(self._pending[EpisodePhase.PARKED].values(), key=lambda each: each.place):
            assert episode.request is not None
            self._wait(episode, EpisodePhase.ANSWERING, self.engine.submit(episode.request))

    def run_only(self, groups: set[int]) -> None:
        """Goes on with these groups alone, for which all others have been parked."""
        self._apart, self._apart_at = groups, self.steps

    def run_all(self) -> None:
        """Goes on with all others where they were left."""
        if self._apart is None:
            return
        for episode in self._replying:
            episode.due += self.steps - self._apart_at
        self._apart = None

    def parts(self) -> dict[int, tuple[PartialEpisode, ...]]:
        """How far the episodes of each group are; those of a group that has not started are not there."""
        for ticket, request in self.engine.unanswered():
            self._pending[EpisodePhase.ANSWERING][ticket].request = request
        now = self.steps if self._apart is None else self._apart_at
        parts = {
            number: [PartialEpisode(sample=n, episode=episode) for n, episode in group.finished.items()]
            for number, group in self._groups.items()
        }
        for phase in (each for each in EpisodePhase if each is not EpisodePhase.STARTING):
            for episode in self._pending[phase].values():
                part = PartialEpisode(
                    sample=episode.live.sample,
                    live=episode.live,
                    drawn=episode.request.begun if episode.request else None,
                    answered=phase in (EpisodePhase.JUDGING, EpisodePhase.ANSWERED, EpisodePhase.REPLYING),
                    due=episode.due - now if phase is EpisodePhase.REPLYING else None,
                    waits=phase is EpisodePhase.WAITING,
                )
                parts[episode.group.number].append(part)
        return {number: tuple(each) for number, each in parts.items()}

    # ------------------------------------------------------------------ one episode

    def _wait(
        self,
        episode: PendingEpisode,
        phase: EpisodePhase,
        ticket: int | None = None,
        *,
        due: int = 0,
        request: Request | None = None,
    ) -> None:
        """Let an episode wait for something else; ticket: of the engine, the pool or the workers."""
        self._pending[episode.phase].pop(episode.key, None)
        episode.phase, episode.key = phase, episode.place if ticket is None else ticket
        episode.due, episode.reply, episode.request = due, None, request
        self._pending[phase][episode.key] = episode

    @property
    def _replying(self) -> list[PendingEpisode]:
        """The episodes that wait for a worker process; of a group that starts, one."""
        phases = EpisodePhase.STARTING, EpisodePhase.REPLYING
        return [episode for phase in phases for episode in self._pending[phase].values()]

    def _start(self, games: Sequence[PendingEpisode], start: Start | Verdict) -> None:
        """Shows each of these episodes the first messages, or ends it."""
        prompt: list[int] = []
        if isinstance(start, Start):
            try:
                prompt = self.chat.render(start.messages, start.tools)
            except UserError as error:
                start = Verdict(score=None, label="bad_turn", reason=str(error))
        if isinstance(start, Start) and start.seats > 1:
            games = self._seated(games, start)
        for episode in games:
            live = episode.live
            live.append(prompt)
            if isinstance(start, Verdict):
                self._close(episode, start)
            else:
                live.state, live.tools = start.state, start.tools
                self._ask(episode, ())

    def _seated(self, games: Sequence[PendingEpisode], start: Start) -> list[PendingEpisode]:
        """Those who begin the games that these were to be; at the other seats one waits for its turn."""
        begin = []
        for game in games:
            self._forget(game)
        for game in games:
            live, group = game.live, game.group
            for seat in range(start.seats):
                sample = live.sample * start.seats + seat
                own = RunningEpisode(live.task, sample, live.key, live.sampling, [], seats=start.seats)
                episode = group.running[sample] = PendingEpisode(group, own)
                if seat == start.seat:
                    begin.append(episode)
                else:
                    self._wait(episode, EpisodePhase.WAITING)
        return begin

    def _go_on(self, episode: PendingEpisode, part: PartialEpisode) -> None:
        """Puts back an episode that has begun."""
        if part.waits:
            self._wait(episode, EpisodePhase.WAITING)
        elif part.answered:
            self._respond(episode, REPLY_STEPS if part.due is None else part.due)
        else:
            self._wait(episode, EpisodePhase.PARKED, request=self._request(episode, part.drawn))

    def _ask(self, episode: PendingEpisode, added: Sequence[int]) -> None:
        """Asks for the next answer, behind these tokens; ends an episode that has no room or time for one.

        What it has earned until then is what it is worth: it was long, and nothing broke. Without any
        answer it is worth nothing that could be known.
        """
        live, now = episode.live, time.monotonic()
        if episode.began is None:
            episode.began = now
        label, reason = self.limits.exceeded(live, len(added), now - episode.began)
        if label:
            live.stop = "context"
            self._end(episode, Verdict(score=0.0 if live.said else None, label=label, reason=reason))
            return
        live.append(added)
        self._wait(episode, EpisodePhase.ANSWERING, self.engine.submit(self._request(episode)))

    def _request(self, episode: PendingEpisode, begun: Completion | None = None) -> Request:
        group, sample = episode.place
        live, room = episode.live, self.limits.room(episode.live)
        return Request(
            prompt=tuple(live.tokens),
            sampling=replace(live.sampling, max_new_tokens=min(live.sampling.max_new_tokens, room)),
            seed=self.seed,
            task=live.key,
            sample=sample,
            position=sum(live.sampled),
            episode=f"{group}/{sample}" if self.env else "",
            begun=begun,
        )

    def _respond(self, episode: PendingEpisode, steps: int = REPLY_STEPS) -> None:
        """Has the newest answer judged, or replied to; steps: after which the reply is taken."""
        live = episode.live
        if self.env is None:
            self._judge(episode)
        elif self.workers is None:
            self._turn(episode, guarded_reply(self.env, live.state, live.said[-1]))
        else:
            asked = getattr(self.env, "budget_s", lambda task: None)(live.task)
            most = None if asked is None else max(asked, self.reply_s)
            ticket = self.workers.submit(guarded_reply, self.env, live.state, live.said[-1], deadline_s=most)
            self._wait(episode, EpisodePhase.REPLYING, ticket, due=self.steps + steps)

    def _judge(self, episode: PendingEpisode) -> None:
        assert self.verifier is not None
        live, group = episode.live, episode.group
        if not self.verifier.grouped:
            ticket = self.pool.submit(self.verifier, live.task, live.said[-1])
            self._wait(episode, EpisodePhase.JUDGING, ticket)
            return
        self._wait(episode, EpisodePhase.ANSWERED)
        if any(each.phase is not EpisodePhase.ANSWERED for each in group.running.values()):
            return
        episodes = sorted(group.running.values(), key=lambda each: each.place)
        lives = [each.live for each in episodes]
        tickets = self.pool.submit_group(
            self.verifier,
            Group(
                task=live.task,
                responses=tuple(each.said[-1] for each in lives),
                tokens=tuple(tuple(compress(each.tokens, each.sampled)) for each in lives),
                state=group.state,
            ),
        )
        for each, ticket in zip(episodes, tickets, strict=True):
            self._wait(each, EpisodePhase.JUDGING, ticket)

    def _take_replies(self) -> None:
        """Takes what environments have said: all that is due, or all where the engine has nothing left."""
        if self.workers is None or not (asked := self._replying):
            return
        idle = not self.engine.busy
        mine = [each for each in asked if self._apart is None or each.group.number in self._apart]
        mine.sort(key=lambda each: (each.due, each.place))
        wanted = [each for each in mine if idle or each.due <= self.steps] if self.exact else []
        self._hear(_POLL_S if idle else 0.0)
        while any(each.reply is None for each in wanted):
            self._hear(_POLL_S)
        for episode in wanted if self.exact else mine:
            if (reply := episode.reply) is None:
                continue
            if isinstance(reply, Returned):
                value = reply.value
            elif episode.phase is EpisodePhase.STARTING:
                value = Verdict(score=None, label=reply.label, reason=reply.reason)
            else:
                value = broken_turn(episode.live.state, reply.label, reply.reason)
            if episode.phase is EpisodePhase.STARTING:
                group = episode.group.running.values()
                self._start([each for each in group if each.phase is EpisodePhase.STARTING], value)
            else:
                self._turn(episode, value)

    def _hear(self, timeout_s: float) -> None:
        """Keeps what worker processes have replied until it is due."""
        assert self.workers is not None
        for ticket, reply in self.workers.poll(timeout_s):
            starting = self._pending[EpisodePhase.STARTING].get(ticket)
            (starting or self._pending[EpisodePhase.REPLYING][ticket]).reply = reply

    def _take_verdicts(self, timeout_s: float) -> None:
        for ticket, verdict in self.pool.poll(timeout_s):
            episode = self._pending[EpisodePhase.JUDGING][ticket]
            if verdict.score is not None:
                episode.live.pay_score(verdict.score, verdict.progress, self.chat)
            self._close(episode, verdict)

    def _turn(self, episode: PendingEpisode, turn: Turn) -> None:
        """Takes an environment's reply: the next turn, or the end."""
        live = episode.live
        if wrong := unfit(turn, live.seats):
            turn = broken_turn(live.state, "bad_turn", wrong)
        if turn.reward is not None:
            live.pay(turn.reward)
        if turn.verdict is not None:
            self._end(episode, *turn.verdicts, earns=turn.reward is None)
            return
        if turn.seat != live.seat:
            self._wait(episode, EpisodePhase.WAITING)
            episode = episode.group.running[live.sample - live.seat + turn.seat]
            live = episode.live
        live.state = turn.state
        try:
            if live.said:
                shown = self.chat.extend(live.tokens, turn.messages, live.tools)
            else:
                shown = self.chat.render(turn.messages)
        except UserError as error:
            self._end(episode, Verdict(score=None, label="bad_turn", reason=str(error)))
        else:
            self._ask(episode, shown)

    def _end(self, episode: PendingEpisode, *verdicts: Verdict, earns: bool = False) -> None:
        """Ends a game at all its seats, with a verdict for each or one for all.

        A seat that has said nothing is left out. earns: whether the scores are what is earned, which else was
        paid by turns.
        """
        first = episode.live.sample - episode.live.seat
        samples = range(first, first + episode.live.seats)
        others = [episode.group.running[n] for n in samples if n != episode.live.sample]
        played = [each for each in (episode, *others) if each.live.said] or [episode]
        for each in (episode, *others):
            if each not in played:
                self._forget(each)
        for each in played:
            verdict = verdicts[each.live.seat % len(verdicts)]
            if earns and verdict.score is not None:
                each.live.pay(verdict.score)
            self._close(each, verdict)

    def _close(self, episode: PendingEpisode, verdict: Verdict) -> None:
        group, sample = episode.group, episode.live.sample
        self.engine.release(f"{group.number}/{sample}")
        self._forget(episode)
        group.finished[sample] = episode.live.episode(verdict)
        if not group.running:
            self._finished.append(group.number)

    def _forget(self, episode: PendingEpisode) -> None:
        self._pending[episode.phase].pop(episode.key, None)
        del episode.group.running[episode.live.sample]

    def _complete(self, number: int) -> list[Episode]:
        finished = self._groups.pop(number).finished
        return [finished[sample] for sample in sorted(finished)]
