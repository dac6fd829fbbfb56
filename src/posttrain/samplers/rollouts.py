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
from dataclasses import replace
from itertools import compress
from typing import Any

from posttrain.base.chat import Chat
from posttrain.engines.protocol import Engine
from posttrain.envs.protocol import Env, Start, Turn, broken_turn, guarded_reply, guarded_start, suited, unfit
from posttrain.process.workers import Failed, Workers
from posttrain.samplers.episode_runner import EpisodeRunner
from posttrain.samplers.live_episode import Limits, PartialEpisode, RunningEpisode
from posttrain.samplers.protocol import GroupRequest
from posttrain.types import Completion, Episode, Request, UserError, Verdict
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import Group, TrainerState, Verifier

_POLL_S = 0.05
REPLY_STEPS = 16
"""Steps of the engine after which a reply is taken, if what is computed together must not hang on how long it
took: replies of a second are hidden behind steps of a sixteenth."""


class Rollouts(EpisodeRunner):
    """Runs the episodes of groups side by side.

    A task is judged by `verifier` after one answer, or played in `env` until that ends it. Both
    are guarded: their code runs in worker processes unless it is known to be harmless. A verifier that
    compares answers is asked when all of a group have been given.

    exact: what the engine computes together, and so its last bits, does not hang on how long an environment
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
        self._began: dict[tuple[int, int], float] = {}
        self.pool = Pool(workers=workers, deadline_s=deadline_s, memory_mb=memory_mb)
        self.reply_s = deadline_s + getattr(env, "reply_s", 0.0)
        guarded = env is not None and not env.trusted
        self.workers = Workers(workers, deadline_s=self.reply_s, memory_mb=memory_mb) if guarded else None
        self._groups: dict[int, dict[int, Episode | None]] = {}
        """The episodes of each group by sample, None of one that goes on."""
        self._states: dict[int, TrainerState] = {}
        self._answered: dict[int, list[RunningEpisode]] = {}
        """Those of each group whose answers wait to be judged together."""
        self._opened = self._apart_at = 0
        self._waiting: dict[tuple[int, int], RunningEpisode] = {}
        """By group and sample, the seats of games in which it is another's turn."""
        self._answering: dict[int, tuple[int, RunningEpisode]] = {}
        self._parked: list[tuple[int, RunningEpisode, Request]] = []
        self._judging: dict[int, tuple[int, RunningEpisode]] = {}
        self._starting: dict[int, tuple[int, list[RunningEpisode]]] = {}
        self._replying: dict[int, tuple[int, RunningEpisode]] = {}
        self._due: dict[int, int] = {}
        """The step at which what a worker process was asked is taken."""
        self._returned: dict[int, Any] = {}
        self._finished: list[int] = []
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
        return bool(self._answering or self._parked or self._judging or self._due or self._finished)

    def open(self, request: GroupRequest) -> int:
        """The number of a new group.

        Episodes that have begun elsewhere go on from there, once `unpause` is called.
        """
        group, self._opened = self._opened, self._opened + 1
        task, begun = request.task, request.begun
        seats = max((part.live.seats for part in begun if part.live), default=1)
        there = {part.sample // seats for part in begun}
        fresh = [n for n in range(request.size) if n not in there]
        self._groups[group] = dict.fromkeys([*(part.sample for part in begun), *fresh])
        self._states[group] = request.state
        for part in sorted(begun, key=lambda part: part.episode is None):
            self._go_on(group, part)
        lives = [RunningEpisode(task, sample, request.key, request.sampling, []) for sample in fresh]
        if not lives:
            return group
        if self.env is None:
            self._start(group, lives, Start(state=None, messages=task.messages))
        elif self.workers is None:
            self._start(group, lives, guarded_start(self.env, task))
        else:
            ticket = self.workers.submit(guarded_start, self.env, task)
            self._starting[ticket], self._due[ticket] = (group, lives), self.steps
        return group

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
        idle = not self.engine.busy and not self._due and not self._finished
        self._take_verdicts(_POLL_S if idle else 0.0)
        while self.waits and self._judging:
            self._take_verdicts(_POLL_S)
        self.judged_s += time.monotonic() - begin
        done, self._finished = self._finished, []
        return [(group, self._complete(group)) for group in done]

    def receive(self, answers: Sequence[tuple[int, Completion]]) -> None:
        """Takes answers of the engine."""
        for ticket, answer in answers:
            group, live = self._answering.pop(ticket)
            live.chose(answer)
            self._respond(group, live)

    def pause(self) -> None:
        """Takes back from the engine all that it has not answered, as far as it has come."""
        for ticket, request in self.engine.withdraw():
            group, live = self._answering.pop(ticket)
            self._parked.append((group, live, request))

    def unpause(self) -> None:
        """Asks the engine to go on with what was taken back, in the order of groups and samples."""
        parked, self._parked = self._parked, []
        for group, live, request in sorted(parked, key=lambda each: (each[0], each[1].sample)):
            self._answering[self.engine.submit(request)] = (group, live)

    def run_only(self, groups: set[int]) -> None:
        """Goes on with these groups alone, for which all others have been parked."""
        self._apart, self._apart_at = groups, self.steps

    def run_all(self) -> None:
        """Goes on with all others where they were left."""
        if self._apart is None:
            return
        for ticket in self._due:
            self._due[ticket] += self.steps - self._apart_at
        self._apart = None

    def parts(self) -> dict[int, tuple[PartialEpisode, ...]]:
        """How far the episodes of each group are; those of a group that has not started are not there."""
        found: dict[int, list[PartialEpisode]] = {
            group: [PartialEpisode(sample=e.sample, episode=e) for e in episodes.values() if e is not None]
            for group, episodes in self._groups.items()
        }
        for (group, sample), live in self._waiting.items():
            found[group].append(PartialEpisode(sample=sample, live=live, waits=True))
        running = [(*self._answering[ticket], request) for ticket, request in self.engine.unanswered()]
        for group, live, request in (*running, *self._parked):
            found[group].append(PartialEpisode(sample=live.sample, live=live, drawn=request.begun))
        answered = [(group, live) for group, lives in self._answered.items() for live in lives]
        for group, live in (*self._judging.values(), *answered):
            found[group].append(PartialEpisode(sample=live.sample, live=live, answered=True))
        for ticket, (group, live) in self._replying.items():
            due = self._due[ticket] - (self.steps if self._apart is None else self._apart_at)
            found[group].append(PartialEpisode(sample=live.sample, live=live, answered=True, due=due))
        return {group: tuple(parts) for group, parts in found.items()}

    # ------------------------------------------------------------------ one episode

    def _start(self, group: int, lives: Sequence[RunningEpisode], start: Start | Verdict) -> None:
        """Shows each of these episodes the first messages, or ends it."""
        prompt: list[int] = []
        if isinstance(start, Start):
            try:
                prompt = self.chat.render(start.messages, start.tools)
            except UserError as error:
                start = Verdict(score=None, label="bad_turn", reason=str(error))
        if isinstance(start, Start) and start.seats > 1:
            lives = self._seated(group, lives, start)
        for live in lives:
            live.append(prompt)
            if isinstance(start, Verdict):
                self._close(group, live, start)
            else:
                live.state, live.tools = start.state, start.tools
                self._ask(group, live, ())

    def _seated(self, group: int, lives: Sequence[RunningEpisode], start: Start) -> list[RunningEpisode]:
        """Those who begin the games that these were to be; at the other seats one waits for its turn."""
        episodes, begin = self._groups[group], []
        for game in lives:
            del episodes[game.sample]
        for game in lives:
            for seat in range(start.seats):
                sample = game.sample * start.seats + seat
                live = RunningEpisode(game.task, sample, game.key, game.sampling, [], seats=start.seats)
                episodes[sample] = None
                if seat == start.seat:
                    begin.append(live)
                else:
                    self._waiting[group, sample] = live
        return begin

    def _go_on(self, group: int, part: PartialEpisode) -> None:
        """Puts back an episode that has begun."""
        if part.episode is not None:
            self._over(group, part.episode)
        elif part.waits and part.live:
            self._waiting[group, part.sample] = part.live
        elif part.answered and part.live:
            self._respond(group, part.live, part.due)
        elif part.live:
            self._parked.append((group, part.live, self._request(group, part.live, part.drawn)))

    def _ask(self, group: int, live: RunningEpisode, added: Sequence[int]) -> None:
        """Asks for the next answer, behind these tokens; ends an episode that has no room or time for one.

        What it has earned until then is what it is worth: it was long, and nothing broke. Without any
        answer it is worth nothing that could be known.
        """
        began = self._began.setdefault((group, live.sample), time.monotonic())
        label, reason = self.limits.exceeded(live, len(added), time.monotonic() - began)
        if label:
            live.stop = "context"
            self._end(group, live, Verdict(score=0.0 if live.said else None, label=label, reason=reason))
            return
        live.append(added)
        self._answering[self.engine.submit(self._request(group, live))] = (group, live)

    def _request(self, group: int, live: RunningEpisode, begun: Completion | None = None) -> Request:
        room = self.limits.room(live)
        return Request(
            prompt=tuple(live.tokens),
            sampling=replace(live.sampling, max_new_tokens=min(live.sampling.max_new_tokens, room)),
            seed=self.seed,
            task=live.key,
            sample=live.sample,
            position=sum(live.sampled),
            episode=f"{group}/{live.sample}" if self.env else "",
            begun=begun,
        )

    def _respond(self, group: int, live: RunningEpisode, due: int | None = None) -> None:
        """Has the newest answer judged, or replied to; due: the steps after which the reply is taken."""
        if self.env is None:
            self._judge(group, live)
        elif self.workers is None:
            self._turn(group, live, guarded_reply(self.env, live.state, live.said[-1]))
        else:
            asked = getattr(self.env, "budget_s", lambda task: None)(live.task)
            most = None if asked is None else max(asked, self.reply_s)
            ticket = self.workers.submit(guarded_reply, self.env, live.state, live.said[-1], deadline_s=most)
            self._replying[ticket], self._due[ticket] = (
                (group, live),
                self.steps + (REPLY_STEPS if due is None else due),
            )

    def _judge(self, group: int, live: RunningEpisode) -> None:
        assert self.verifier is not None
        if not self.verifier.grouped:
            self._judging[self.pool.submit(self.verifier, live.task, live.said[-1])] = (group, live)
            return
        waiting = self._answered.setdefault(group, [])
        waiting.append(live)
        if len(waiting) < sum(episode is None for episode in self._groups[group].values()):
            return
        lives = sorted(self._answered.pop(group), key=lambda each: each.sample)
        tickets = self.pool.submit_group(
            self.verifier,
            Group(
                task=live.task,
                responses=tuple(each.said[-1] for each in lives),
                tokens=tuple(tuple(compress(each.tokens, each.sampled)) for each in lives),
                state=self._states[group],
            ),
        )
        self._judging.update(zip(tickets, ((group, each) for each in lives), strict=True))

    def _take_replies(self) -> None:
        """Takes what environments have said: all that is due, or all where the engine has nothing left."""
        if self.workers is None or not self._due:
            return
        idle = not self.engine.busy
        asked = [t for t in self._due if self._apart is None or self._place(t)[0] in self._apart]
        asked.sort(key=lambda t: (self._due[t], self._place(t)))
        wanted = [t for t in asked if idle or self._due[t] <= self.steps] if self.exact else []
        self._returned.update(self.workers.poll(_POLL_S if idle else 0.0))
        while any(ticket not in self._returned for ticket in wanted):
            self._returned.update(self.workers.poll(_POLL_S))
        for ticket in wanted if self.exact else [t for t in asked if t in self._returned]:
            outcome, _ = self._returned.pop(ticket), self._due.pop(ticket)
            failed = outcome if isinstance(outcome, Failed) else None
            if ticket in self._starting:
                begin = Verdict(score=None, label=failed.label, reason=failed.reason) if failed else None
                self._start(*self._starting.pop(ticket), begin or outcome.value)
            else:
                group, live = self._replying.pop(ticket)
                turn = broken_turn(live.state, failed.label, failed.reason) if failed else outcome.value
                self._turn(group, live, turn)

    def _place(self, ticket: int) -> tuple[int, int]:
        """Group and sample that a worker process was asked about; a start is about a whole group."""
        if ticket in self._starting:
            return self._starting[ticket][0], -1
        group, live = self._replying[ticket]
        return group, live.sample

    def _take_verdicts(self, timeout_s: float) -> None:
        for ticket, verdict in self.pool.poll(timeout_s):
            group, live = self._judging.pop(ticket)
            if verdict.score is not None:
                live.pay_score(verdict.score, verdict.progress, self.chat)
            self._close(group, live, verdict)

    def _turn(self, group: int, live: RunningEpisode, turn: Turn) -> None:
        """Takes an environment's reply: the next turn, or the end."""
        if wrong := unfit(turn, live.seats):
            turn = broken_turn(live.state, "bad_turn", wrong)
        if turn.reward is not None:
            live.pay(turn.reward)
        if turn.verdict is not None:
            self._end(group, live, *turn.verdicts, earns=turn.reward is None)
            return
        if turn.seat != live.seat:
            self._waiting[group, live.sample] = live
            live = self._waiting.pop((group, live.sample - live.seat + turn.seat))
        live.state = turn.state
        try:
            if live.said:
                shown = self.chat.extend(live.tokens, turn.messages, live.tools)
            else:
                shown = self.chat.render(turn.messages)
        except UserError as error:
            self._end(group, live, Verdict(score=None, label="bad_turn", reason=str(error)))
        else:
            self._ask(group, live, shown)

    def _end(self, group: int, live: RunningEpisode, *verdicts: Verdict, earns: bool = False) -> None:
        """Ends a game at all its seats, with a verdict for each or one for all.

        A seat that has said nothing is left out. earns: whether the scores are what is earned, which else was
        paid by turns.
        """
        first = live.sample - live.seat
        others = {
            n: self._waiting.pop((group, n)) for n in range(first, first + live.seats) if n != live.sample
        }
        seated = {live.sample: live} | others
        played = [each for each in seated.values() if each.said] or [live]
        for sample in seated.keys() - {each.sample for each in played}:
            del self._groups[group][sample]
        for each in played:
            verdict = verdicts[each.seat % len(verdicts)]
            if earns and verdict.score is not None:
                each.pay(verdict.score)
            self._close(group, each, verdict)

    def _close(self, group: int, live: RunningEpisode, verdict: Verdict) -> None:
        self._began.pop((group, live.sample), None)
        self.engine.release(f"{group}/{live.sample}")
        self._over(group, live.episode(verdict))

    def _over(self, group: int, episode: Episode) -> None:
        episodes = self._groups[group]
        episodes[episode.sample] = episode
        if all(e is not None for e in episodes.values()):
            self._finished.append(group)

    def _complete(self, group: int) -> list[Episode]:
        del self._states[group]
        episodes = self._groups.pop(group)
        return [e for sample in sorted(episodes) if (e := episodes[sample]) is not None]
