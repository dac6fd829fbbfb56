"""Episodes: tasks and an engine in, trajectories with verdicts out.

    step   consumes       answers that the engine has finished
           waits for      an environment's replies, within its deadline; never for a verifier
           unblocked by   nothing: while an answer is being judged the engine goes on with others

A trajectory only ever grows: what the policy sampled is kept as it was sampled, and a later
turn's prompt is everything before it plus new tokens. Whatever an environment or a verifier
does wrong ends that one episode with a verdict that has no score.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

from posttrain.chat import Chat
from posttrain.engines.protocol import Engine
from posttrain.envs.protocol import Env, Start, Turn, broken_turn, guarded_reply, guarded_start
from posttrain.types import Completion, Episode, Request, Sampling, Task, Trajectory, UserError, Verdict
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import Group, TrainerState, Verifier
from posttrain.verifiers.workers import Failed, Workers

_POLL_S = 0.05
_UNKNOWN = TrainerState()


@dataclass
class _Live:
    """An episode that is still going on."""

    task: Task
    sample: int
    key: str
    """Of its random draws: the epoch and the task."""
    sampling: Sampling
    tokens: list[int]
    sampled: list[bool] = field(default_factory=list)
    logp_gen: list[float] = field(default_factory=list)
    logp_policy: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    state: Any = None
    stop: str = ""

    def __post_init__(self) -> None:
        tokens, self.tokens = self.tokens, []
        self.given(tokens)

    def given(self, tokens: Sequence[int]) -> None:
        """Appends tokens that the policy did not choose."""
        self._extend(tokens, [0.0] * len(tokens), [0.0] * len(tokens), [0] * len(tokens), False)

    def chose(self, answer: Completion) -> None:
        """Appends an answer of the policy."""
        self._extend(answer.tokens, answer.logp_gen, answer.logp_policy, answer.version, True)
        self.said.append(answer.text)
        cut = answer.stop == "length" and len(answer.tokens) < self.sampling.max_new_tokens
        self.stop = "context" if cut else answer.stop

    def _extend(
        self,
        tokens: Sequence[int],
        gen: Sequence[float],
        policy: Sequence[float],
        version: Sequence[int],
        sampled: bool,
    ) -> None:
        self.tokens += tokens
        self.logp_gen += gen
        self.logp_policy += policy
        self.version += version
        self.sampled += [sampled] * len(tokens)
        self.reward += [0.0] * len(tokens)

    def earned(self, reward: float) -> None:
        """Adds a reward that arrives with the last token the policy chose."""
        self.reward[len(self.sampled) - 1 - self.sampled[::-1].index(True)] += reward

    def judged(self, score: float, progress: Sequence[tuple[int, float]], chat: Chat) -> None:
        """Adds the score of the last answer: what each step gains to its last token, the rest at the end.

        The potentials cancel in the sum of rewards: with γ < 1 a gain counts more the earlier it comes.
        """
        first = len(self.sampled) - self.sampled[::-1].index(False)
        answer, reached = self.tokens[first:], 0.0
        for characters, potential in progress:
            place = bisect_left(
                range(len(answer) - 1), characters, key=lambda n: len(chat.tokenizer.decode(answer[: n + 1]))
            )
            self.reward[first + place] += potential - reached
            reached = potential
        self.earned(score - reached)

    def episode(self, verdict: Verdict) -> Episode:
        """The episode, once it is over and judged."""
        trajectory = Trajectory(
            tokens=self.tokens,
            sampled=self.sampled,
            logp_gen=self.logp_gen,
            logp_policy=self.logp_policy,
            version=self.version,
            reward=self.reward,
        )
        return Episode(
            task=self.task,
            sample=self.sample,
            trajectory=trajectory,
            verdict=verdict,
            response="\n".join(self.said),
            stop=self.stop,
            turns=len(self.said),
        )


class Rollouts:
    """Runs the episodes of groups side by side.

    A task is judged by `verifier` after one answer, or played in `env` until that ends it. Both
    are guarded: their code runs in worker processes unless it is known to be harmless. A verifier that
    compares answers is asked when all of a group have been given.
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
        seed: int = 0,
    ) -> None:
        if (verifier is None) == (env is None):
            raise ValueError("a rollout has a verifier or an environment, and not both")
        self.engine, self.chat, self.verifier, self.env = engine, chat, verifier, env
        self.context, self.seed = context, seed
        guards: dict[str, Any] = {"deadline_s": deadline_s, "memory_mb": memory_mb}
        self.pool = Pool(workers=workers, **guards)
        self.workers = Workers(workers, **guards) if env and not env.trusted else None
        self._groups: dict[int, list[Episode | None]] = {}
        self._states: dict[int, TrainerState] = {}
        self._answered: dict[int, list[_Live]] = {}
        """Those of each group whose answers wait to be judged together."""
        self._opened = 0
        self._answering: dict[int, tuple[int, _Live]] = {}
        self._judging: dict[int, tuple[int, _Live]] = {}
        self._finished: list[int] = []

    def close(self) -> None:
        """Ends the worker processes."""
        self.pool.close()
        if self.workers:
            self.workers.close()

    @property
    def busy(self) -> bool:
        """Whether an episode is going on."""
        return bool(self._answering or self._judging or self._finished)

    def open(
        self,
        task: Task,
        size: int,
        sampling: Sampling,
        *,
        epoch: int = 0,
        state: TrainerState = _UNKNOWN,
    ) -> int:
        """The number of a new group: `size` episodes about this task; `state` is for its verifier."""
        group, self._opened = self._opened, self._opened + 1
        self._groups[group], self._states[group] = [None] * size, state
        start, prompt = self._begin(task), list[int]()
        if isinstance(start, Start):
            try:
                prompt = self.chat.render(start.messages)
            except UserError as error:
                start = Verdict(score=None, label="bad_turn", reason=str(error))
        for sample in range(size):
            live = _Live(task, sample, f"{epoch}:{task.id}", sampling, prompt)
            if isinstance(start, Verdict):
                self._close(group, live, start)
            else:
                live.state = start.state
                self._ask(group, live, ())
        return group

    def step(self) -> list[tuple[int, list[Episode]]]:
        """The groups that are now complete, with their numbers, after one step of the engine."""
        if self.engine.busy:
            answered = [(self._answering.pop(ticket), answer) for ticket, answer in self.engine.step()]
            for (_, live), answer in answered:
                live.chose(answer)
            if self.env is None:
                for (group, live), _ in answered:
                    self._judge(group, live)
            else:
                replies = self._replies([live for (_, live), _ in answered])
                for ((group, live), _), turn in zip(answered, replies, strict=True):
                    self._turn(group, live, turn)
        for ticket, verdict in self.pool.poll(0.0 if self.engine.busy else _POLL_S):
            group, live = self._judging.pop(ticket)
            if verdict.score is not None:
                live.judged(verdict.score, verdict.progress, self.chat)
            self._close(group, live, verdict)
        done, self._finished = self._finished, []
        return [(group, self._complete(group)) for group in done]

    def run(
        self,
        tasks: Sequence[Task],
        size: int,
        sampling: Sampling,
        seen: Callable[[int], None] | None = None,
        state: TrainerState = _UNKNOWN,
    ) -> list[list[Episode]]:
        """The groups of all these tasks, in their order; `seen` is told how many are complete."""
        numbers = [self.open(task, size, sampling, state=state) for task in tasks]
        complete: dict[int, list[Episode]] = {}
        while self.busy:
            complete.update(self.step())
            if seen:
                seen(len(complete))
        return [complete[n] for n in numbers]

    # ------------------------------------------------------------------ one episode

    def _begin(self, task: Task) -> Start | Verdict:
        if self.env is None:
            return Start(state=None, messages=task.messages)
        if self.workers is None:
            return guarded_start(self.env, task)
        [outcome] = called(self.workers, [(guarded_start, self.env, task)])
        if isinstance(outcome, Failed):
            return Verdict(score=None, label=outcome.label, reason=outcome.reason)
        started: Start | Verdict = outcome
        return started

    def _ask(self, group: int, live: _Live, added: Sequence[int]) -> None:
        """Asks for the next answer, behind these tokens; ends an episode that has no room for one.

        What it has earned until then is what it is worth: it was long, and nothing broke. Without any
        answer it is worth nothing that could be known.
        """
        room = self.context - len(live.tokens) - len(added)
        if room < 1:
            live.stop = "context"
            reason = f"the conversation outgrew the context of {self.context} tokens"
            self._close(
                group, live, Verdict(score=0.0 if live.said else None, label="context", reason=reason)
            )
            return
        live.given(added)
        request = Request(
            prompt=tuple(live.tokens),
            sampling=replace(live.sampling, max_new_tokens=min(live.sampling.max_new_tokens, room)),
            seed=self.seed,
            task=live.key,
            sample=live.sample,
            position=sum(live.sampled),
            episode=f"{group}/{live.sample}" if self.env else "",
        )
        self._answering[self.engine.submit(request)] = (group, live)

    def _judge(self, group: int, live: _Live) -> None:
        assert self.verifier is not None
        if not self.verifier.grouped:
            self._judging[self.pool.submit(self.verifier, live.task, live.said[-1])] = (group, live)
            return
        waiting = self._answered.setdefault(group, [])
        waiting.append(live)
        if len(waiting) < sum(episode is None for episode in self._groups[group]):
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

    def _replies(self, lives: Sequence[_Live]) -> list[Turn]:
        assert self.env is not None
        if self.workers is None:
            return [guarded_reply(self.env, live.state, live.said[-1]) for live in lives]
        outcomes = called(
            self.workers, [(guarded_reply, self.env, live.state, live.said[-1]) for live in lives]
        )
        return [
            broken_turn(live.state, o.label, o.reason) if isinstance(o, Failed) else o
            for live, o in zip(lives, outcomes, strict=True)
        ]

    def _turn(self, group: int, live: _Live, turn: Turn) -> None:
        """Takes an environment's reply: the next turn, or the end."""
        reward = turn.reward
        if reward is None and turn.verdict is not None:
            reward = turn.verdict.score
        if reward is not None:
            live.earned(reward)
        if turn.verdict is not None:
            self._close(group, live, turn.verdict)
            return
        live.state = turn.state
        try:
            added = self.chat.extend(live.tokens, turn.messages)
        except UserError as error:
            self._close(group, live, Verdict(score=None, label="bad_turn", reason=str(error)))
        else:
            self._ask(group, live, added)

    def _close(self, group: int, live: _Live, verdict: Verdict) -> None:
        self.engine.release(f"{group}/{live.sample}")
        episodes = self._groups[group]
        episodes[live.sample] = live.episode(verdict)
        if all(e is not None for e in episodes):
            self._finished.append(group)

    def _complete(self, group: int) -> list[Episode]:
        del self._states[group]
        return [e for e in self._groups.pop(group) if e is not None]


def called(workers: Workers, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What these calls return in worker processes, in order; a Failed for each that does not."""
    tickets = [workers.submit(*call) for call in calls]
    outcomes: dict[int, Any] = {}
    while len(outcomes) < len(tickets):
        for ticket, outcome in workers.poll(_POLL_S):
            outcomes[ticket] = outcome if isinstance(outcome, Failed) else outcome.value
    return [outcomes[t] for t in tickets]
