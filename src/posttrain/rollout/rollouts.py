"""Play groups with a verifier or an environment: tasks in, trajectories with verdicts out.

    step   consumes       completions that the engine has finished
           waits for      replies of environments that are due; verdicts only with `waits`
           unblocked by   worker processes; while they judge or reply, the engine samples other episodes

A trajectory only grows: sampled tokens are kept as they were sampled, and the prompt of a later turn is all
tokens before it plus new ones. An error of an environment or a verifier ends that one episode, with a verdict
without a score.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import compress

from posttrain.base.chat import Chat
from posttrain.engines.protocol import Engine
from posttrain.envs import protocol
from posttrain.envs.protocol import Env, Player, Start, Turn, broken_turn, guarded_reply, guarded_start
from posttrain.envs.tools.call import GREEDY
from posttrain.process.workers import Failed, Returned, Workers
from posttrain.rollout.episode_runner import EpisodeRunner
from posttrain.rollout.live_episode import EpisodeLimits, PartialEpisode, RunningEpisode
from posttrain.rollout.protocol import GroupRequest
from posttrain.types import Completion, Episode, Request, UserError, Verdict
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import Group, TrainerState, Verifier

_POLL_S = 0.05
REPLY_STEPS = 16
"""Engine steps between an answer and the reply to it, with `exact`: a reply that takes 1 s costs no time if a
step takes 1/16 s."""
_GREEDY_SAMPLE = -1
"""Number of a group's greedy answer, or game, among its samples; all seats of such a game are below 0."""
PendingKey = int | tuple[int, int]
"""Ticket of the engine, the pool or the workers; (group, sample) in phases that have none."""


class EpisodePhase(Enum):
    """The event that a running episode waits for. `parts` lists a group's episodes in the order of phases."""

    STARTING = auto()
    """First messages of the environment, from a worker process."""
    WAITING = auto()
    """The turn of its seat; another seat of its game is playing."""
    ANSWERING = auto()
    """A completion of the engine."""
    PARKED = auto()
    """`unpause`, which submits its request to the engine again."""
    JUDGING = auto()
    """A verdict of the pool of verifiers."""
    ANSWERED = auto()
    """The other answers of its group, which are judged together."""
    REPLYING = auto()
    """Reply of the environment, from a worker process."""


@dataclass(eq=False)
class PendingEpisode:
    """A running episode of this process and the state of its wait."""

    group: "RunningGroup"
    live: RunningEpisode
    phase: EpisodePhase = EpisodePhase.STARTING
    key: PendingKey = -1
    due: int = 0
    """STARTING, REPLYING: number of the engine step at which the reply is applied."""
    reply: Returned | Failed | None = None
    """STARTING, REPLYING: a reply that has arrived before it is due."""
    request: Request | None = None
    """PARKED, and ANSWERING since the last `parts`: the request with the tokens sampled so far."""
    began: float | None = None
    """Time of its first request to the engine in this process, on the monotonic clock."""

    @property
    def place(self) -> tuple[int, int]:
        return self.group.number, self.live.sample


@dataclass(eq=False)
class RunningGroup:
    """Episodes of a group by sample; it is complete once none is running."""

    number: int
    state: TrainerState
    running: dict[int, PendingEpisode] = field(default_factory=dict)
    finished: dict[int, Episode] = field(default_factory=dict)


class Rollouts(EpisodeRunner):
    """Play the episodes of groups concurrently.

    An episode is one answer that `verifier` judges, or turns in `env` until that ends it. The code of both
    runs in worker processes unless it is trusted. A verifier that compares answers judges a group once all
    its episodes are answered.

    players: in place of `verifier` and `env`, those of several sources of tasks, by `Task.dataset`.
    workers, deadline_s, memory_mb: number and limits of the worker processes.
    context: most tokens of a conversation. episode_tokens, episode_s: most sampled tokens and seconds of an
    episode; 0: unbounded.
    exact: apply a reply of `env` REPLY_STEPS engine steps after the answer, so which requests share a batch,
    and so the last bits of a probability, does not depend on the time that `env` takes. If False, apply it
    when it arrives.
    waits: wait for each verdict in the step that asks for it, for the same reason.
    keyed: record the key of the state that each turn begins in (`Trajectory.turn_state`).
    """

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        *,
        verifier: Verifier | None = None,
        env: Env | None = None,
        players: Mapping[str, Player] | None = None,
        workers: int = 2,
        deadline_s: float = 10.0,
        memory_mb: int = 4096,
        context: int,
        episode_tokens: int = 0,
        episode_s: float = 0.0,
        seed: int = 0,
        exact: bool = True,
        waits: bool = False,
        keyed: bool = False,
    ) -> None:
        players = {"": Player(verifier, env)} if players is None else players
        if any((player.verifier is None) == (player.env is None) for player in players.values()):
            raise ValueError("a rollout has a verifier or an environment, and not both")
        self.engine, self.chat = engine, chat
        self.players = {
            name: replace(player, env=protocol.for_template(player.env, chat))
            for name, player in players.items()
        }
        self.seed, self.exact, self.waits, self.keyed = seed, exact, waits, keyed
        self.limits = EpisodeLimits(context, episode_tokens, episode_s)
        self.pool = Pool(workers=workers, deadline_s=deadline_s, memory_mb=memory_mb)
        envs = [player.env for player in players.values() if player.env is not None]
        self.reply_s = deadline_s + max((getattr(env, "reply_s", 0.0) for env in envs), default=0.0)
        guarded = any(not env.trusted for env in envs)
        self.workers = Workers(workers, deadline_s=self.reply_s, memory_mb=memory_mb) if guarded else None
        self._groups: dict[int, RunningGroup] = {}
        self._pending: dict[EpisodePhase, dict[PendingKey, PendingEpisode]] = {p: {} for p in EpisodePhase}
        """Running episodes by phase and key. Those that start with one ticket share an entry."""
        self._finished: list[int] = []
        """Complete groups, which the next step returns."""
        self._opened = 0
        self._only: set[int] | None = None
        """The groups of `run_only`, None while all may play."""
        self._only_since = 0
        """Engine step at which `run_only` was called."""
        self.steps = 0

    def close(self) -> None:
        """End the engine and the worker processes."""
        self.engine.close()
        self.pool.close()
        if self.workers:
            self.workers.close()

    @property
    def busy(self) -> bool:
        return bool(self._groups)

    def open(self, request: GroupRequest) -> int:
        """Start a group and return its number.

        Episodes of `request.begun` continue where they stopped, after the next `unpause`.
        """
        task, number = request.task, self._opened
        self._opened += 1
        seats = max((part.live.seats for part in request.begun if part.live), default=1)
        group = self._groups[number] = RunningGroup(number, request.state)
        resumed = {part.sample // seats for part in request.begun}
        samples = [*range(request.size), *[_GREEDY_SAMPLE] * request.greedy]
        new = [n for n in samples if n not in resumed]
        greedy = replace(request.sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
        samplings = {n: greedy if n == _GREEDY_SAMPLE else request.sampling for n in new}
        lives = [part.live for part in request.begun if part.live]
        lives += [RunningEpisode(task, n, request.key, samplings[n], []) for n in new]
        group.running = {live.sample: PendingEpisode(group, live) for live in lives}
        group.finished = {part.sample: part.episode for part in request.begun if part.episode}
        if not group.running:
            self._finished.append(number)
        for part in request.begun:
            if part.live:
                self._resume_episode(group.running[part.sample], part)
        games = [group.running[n] for n in new]
        if not games:
            return number
        env = self.players[task.dataset].env
        if env is None:
            self._start(games, Start(state=None, messages=task.messages))
        elif self.workers is None or env.trusted:
            self._start(games, guarded_start(env, task, self.keyed))
        else:
            ticket = self.workers.submit(guarded_start, env, task, self.keyed)
            for game in games:
                self._set_phase(game, EpisodePhase.STARTING, ticket, due=self.steps)
        return number

    def step(self) -> list[tuple[int, list[Episode]]]:
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
        complete, self._finished = self._finished, []
        return [(group, self._complete(group)) for group in complete]

    def receive(self, answers: Sequence[tuple[int, Completion]]) -> None:
        """Append completions of the engine to their episodes, and have each judged or replied to."""
        for ticket, answer in answers:
            episode = self._pending[EpisodePhase.ANSWERING][ticket]
            episode.live.append_answer(answer)
            self._respond(episode)

    def pause(self) -> None:
        for ticket, request in self.engine.withdraw():
            episode = self._pending[EpisodePhase.ANSWERING][ticket]
            self._set_phase(episode, EpisodePhase.PARKED, request=request)

    def unpause(self) -> None:
        """Submit the withdrawn requests again, in the order of groups and samples."""
        for episode in sorted(self._pending[EpisodePhase.PARKED].values(), key=lambda parked: parked.place):
            assert episode.request is not None
            self._set_phase(episode, EpisodePhase.ANSWERING, self.engine.submit(episode.request))

    def run_only(self, groups: set[int]) -> None:
        self._only, self._only_since = groups, self.steps

    def run_all(self) -> None:
        """Continue the groups that `run_only` has left out; their replies are due that many steps later."""
        if self._only is None:
            return
        for episode in self._replying:
            episode.due += self.steps - self._only_since
        self._only = None

    def parts(self) -> dict[int, tuple[PartialEpisode, ...]]:
        """Return the state of each group's episodes; those that are STARTING are left out."""
        for ticket, request in self.engine.unanswered():
            self._pending[EpisodePhase.ANSWERING][ticket].request = request
        now = self.steps if self._only is None else self._only_since
        parts = {
            number: [PartialEpisode(sample=n, episode=episode) for n, episode in group.finished.items()]
            for number, group in self._groups.items()
        }
        for phase in EpisodePhase:
            if phase is EpisodePhase.STARTING:
                continue
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
        return {number: tuple(states) for number, states in parts.items()}

    # ------------------------------------------------------------------ one episode

    def _set_phase(
        self,
        episode: PendingEpisode,
        phase: EpisodePhase,
        ticket: int | None = None,
        *,
        due: int = 0,
        request: Request | None = None,
    ) -> None:
        """Move an episode to another phase; ticket: of the engine, the pool or the workers."""
        self._pending[episode.phase].pop(episode.key, None)
        episode.phase, episode.key = phase, episode.place if ticket is None else ticket
        episode.due, episode.reply, episode.request = due, None, request
        self._pending[phase][episode.key] = episode

    @property
    def _replying(self) -> list[PendingEpisode]:
        """Episodes that wait for a reply from a worker process; only one of a group that is STARTING."""
        phases = EpisodePhase.STARTING, EpisodePhase.REPLYING
        return [episode for phase in phases for episode in self._pending[phase].values()]

    def _start(self, games: Sequence[PendingEpisode], start: Start | Verdict) -> None:
        """Render the first messages and request the first answer of these episodes, or end them all."""
        prompt: list[int] = []
        if isinstance(start, Start):
            try:
                prompt = self.chat.render(start.messages, start.tools)
            except UserError as error:
                start = Verdict(score=None, label="bad_turn", reason=str(error))
        if isinstance(start, Start) and start.seats > 1:
            games = self._open_seats(games, start)
        for episode in games:
            live = episode.live
            live.append(prompt)
            if isinstance(start, Verdict):
                self._close(episode, start)
            else:
                live.state, live.tools = start.state, start.tools
                self._request_answer(episode, (), start.key)

    def _open_seats(self, games: Sequence[PendingEpisode], start: Start) -> list[PendingEpisode]:
        """Replace each game by an episode for each seat, and return those whose seat moves first."""
        first = []
        for game in games:
            self._forget(game)
        for game in games:
            live, group = game.live, game.group
            for seat in range(start.seats):
                sample = live.sample * start.seats + seat
                row = RunningEpisode(live.task, sample, live.key, live.sampling, [], seats=start.seats)
                episode = group.running[sample] = PendingEpisode(group, row)
                if seat == start.seat:
                    first.append(episode)
                else:
                    self._set_phase(episode, EpisodePhase.WAITING)
        return first

    def _resume_episode(self, episode: PendingEpisode, part: PartialEpisode) -> None:
        """Put an episode into the phase in which it was saved."""
        if part.waits:
            self._set_phase(episode, EpisodePhase.WAITING)
        elif part.answered:
            self._respond(episode, REPLY_STEPS if part.due is None else part.due)
        else:
            self._set_phase(episode, EpisodePhase.PARKED, request=self._request(episode, part.drawn))

    def _request_answer(self, episode: PendingEpisode, added: Sequence[int], key: int) -> None:
        """Append tokens and request the next answer, or end an episode that has no room or time for one.

        One that ends so keeps its rewards and has score 0, as nothing failed; one without any answer has no
        score. key: of the state; 0 if that is the conversation.
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
        if self.keyed:
            live.begin_turn(key)
        self._set_phase(episode, EpisodePhase.ANSWERING, self.engine.submit(self._request(episode)))

    def _request(self, episode: PendingEpisode, partial: Completion | None = None) -> Request:
        """Return the request for the next answer; partial: its tokens that are sampled already."""
        group, sample = episode.place
        live, room = episode.live, self.limits.room(episode.live)
        return Request(
            prompt=tuple(live.tokens),
            sampling=replace(live.sampling, max_new_tokens=min(live.sampling.max_new_tokens, room)),
            seed=self.seed,
            task=live.key,
            sample=sample,
            position=sum(live.sampled),
            episode=f"{group}/{sample}" if self.players[live.task.dataset].env else "",
            begun=partial,
        )

    def _respond(self, episode: PendingEpisode, steps: int = REPLY_STEPS) -> None:
        """Have the last answer judged or replied to; steps: engine steps until the reply is applied."""
        live = episode.live
        player = self.players[live.task.dataset]
        if player.env is None:
            self._judge(episode, player.verifier)
        elif self.workers is None or player.env.trusted:
            self._apply_turn(episode, guarded_reply(player.env, live.state, live.said[-1], self.keyed))
        else:
            budget_s = getattr(player.env, "budget_s", lambda task: None)(live.task)
            deadline_s = None if budget_s is None else max(budget_s, self.reply_s)
            ticket = self.workers.submit(
                guarded_reply, player.env, live.state, live.said[-1], self.keyed, deadline_s=deadline_s
            )
            self._set_phase(episode, EpisodePhase.REPLYING, ticket, due=self.steps + steps)

    def _judge(self, episode: PendingEpisode, verifier: Verifier | None) -> None:
        assert verifier is not None
        live, group = episode.live, episode.group
        if not verifier.grouped:
            ticket = self.pool.submit(verifier, live.task, live.said[-1])
            self._set_phase(episode, EpisodePhase.JUDGING, ticket)
            return
        self._set_phase(episode, EpisodePhase.ANSWERED)
        if any(other.phase is not EpisodePhase.ANSWERED for other in group.running.values()):
            return
        episodes = sorted(group.running.values(), key=lambda answered: answered.place)
        lives = [answered.live for answered in episodes]
        tickets = self.pool.submit_group(
            verifier,
            Group(
                task=live.task,
                responses=tuple(row.said[-1] for row in lives),
                tokens=tuple(tuple(compress(row.tokens, row.sampled)) for row in lives),
                state=group.state,
                key=live.key,
            ),
        )
        for answered, ticket in zip(episodes, tickets, strict=True):
            self._set_phase(answered, EpisodePhase.JUDGING, ticket)

    def _take_replies(self) -> None:
        """Apply replies of environments.

        With `exact` wait for and apply all that are due, or all if the engine has nothing to do; else apply
        those that have arrived.
        """
        if self.workers is None or not (replying := self._replying):
            return
        idle = not self.engine.busy
        playing = [e for e in replying if self._only is None or e.group.number in self._only]
        playing.sort(key=lambda episode: (episode.due, episode.place))
        due = [e for e in playing if idle or e.due <= self.steps] if self.exact else []
        self._receive_replies(_POLL_S if idle else 0.0)
        while any(episode.reply is None for episode in due):
            self._receive_replies(_POLL_S)
        for episode in due if self.exact else playing:
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
                self._start([other for other in group if other.phase is EpisodePhase.STARTING], value)
            else:
                self._apply_turn(episode, value)

    def _receive_replies(self, timeout_s: float) -> None:
        """Store replies of worker processes in `PendingEpisode.reply` until they are due."""
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

    def _apply_turn(self, episode: PendingEpisode, turn: Turn) -> None:
        """Apply a reply of the environment: request the next answer, or end the game."""
        live = episode.live
        if problem := protocol.seat_fault(turn, live.seats):
            turn = broken_turn(live.state, "bad_turn", problem)
        if turn.reward is not None:
            live.pay(turn.reward)
        if turn.verdict is not None:
            self._end(episode, *turn.verdicts, earns=turn.reward is None)
            return
        if turn.seat != live.seat:
            self._set_phase(episode, EpisodePhase.WAITING)
            episode = episode.group.running[live.sample - live.seat + turn.seat]
            live = episode.live
        live.state = turn.state
        try:
            if live.said:
                added = self.chat.extend(live.tokens, turn.messages, live.tools)
            else:
                added = self.chat.render(turn.messages)
        except UserError as error:
            self._end(episode, Verdict(score=None, label="bad_turn", reason=str(error)))
        else:
            self._request_answer(episode, added, turn.key)

    def _end(self, episode: PendingEpisode, *verdicts: Verdict, earns: bool = False) -> None:
        """End a game at all its seats, with a verdict for each or one for all.

        Seats without an answer are left out of the group. earns: add the scores as rewards; if False, the
        turns have paid the rewards.
        """
        first = episode.live.sample - episode.live.seat
        samples = range(first, first + episode.live.seats)
        others = [episode.group.running[n] for n in samples if n != episode.live.sample]
        played = [seat for seat in (episode, *others) if seat.live.said] or [episode]
        for seat in (episode, *others):
            if seat not in played:
                self._forget(seat)
        for seat in played:
            verdict = verdicts[seat.live.seat % len(verdicts)]
            if earns and verdict.score is not None:
                seat.live.pay(verdict.score)
            self._close(seat, verdict)

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
        group = self._groups.pop(number)
        episodes = [group.finished[sample] for sample in sorted(group.finished)]
        greedy = {e.seat: e for e in episodes if e.sample < 0}
        return [_with_greedy(e, greedy.get(e.seat)) for e in episodes if e.sample >= 0]


def _with_greedy(episode: Episode, greedy: Episode | None) -> Episode:
    """Return an episode whose verdict says how the greedy answer ended, unless that has no verdict."""
    if greedy is None or greedy.verdict.failed:
        return episode
    facts = {f"{GREEDY}reward": greedy.reward, f"{GREEDY}tokens": float(greedy.length)}
    return replace(episode, verdict=replace(episode.verdict, parts={**episode.verdict.parts, **facts}))
