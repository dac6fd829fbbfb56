"""Show an episode before training: a script answers in place of the policy, with the real environment."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.base.chat import Chat
from posttrain.envs.protocol import for_template
from posttrain.envs.tools.tool_use import ToolUse
from posttrain.loop.sampling import build_episode_runner
from posttrain.plan.model_info import ModelInfo
from posttrain.plan.resolve import Resolved
from posttrain.report.terminal import join_pieces
from posttrain.rollout.protocol import GroupRequest
from posttrain.types import Completion, Episode, Request, Sampling, UserError, Verdict

MOST = 6
"""Answers of an episode that are played; an agent plays to its end."""


@dataclass(eq=False)
class ScriptedEngine:
    """An engine that gives these texts in order in each conversation, and then repeats the last one."""

    chat: Chat
    texts: Sequence[str]
    version: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    """Answers so far, by conversation."""
    open: dict[int, Request] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        """True if a request is pending."""
        return bool(self.open)

    def submit(self, request: Request) -> int:
        ticket = self.answers.total() + len(self.open)
        self.open[ticket] = request
        return ticket

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Completion]]:
        """Answer all pending requests."""
        return [(ticket, self._answer(self.open.pop(ticket))) for ticket in list(self.open)]

    def next_text(self, request: Request) -> str:
        """Return the next text of the request's conversation."""
        return self.texts[min(self.answers[request.episode], len(self.texts) - 1)]

    def _answer(self, request: Request) -> Completion:
        text = self.next_text(request)
        self.answers[request.episode] += 1
        tokens = [*self.chat.spell(text), self.chat.end()]
        zeros, versions = [0.0] * len(tokens), [0] * len(tokens)
        return Completion(
            tokens=tokens, logp_gen=zeros, logp_policy=zeros, version=versions, text=text, stop="eos"
        )

    def unanswered(self) -> list[tuple[int, Request]]:
        return list(self.open.items())

    def withdraw(self) -> list[tuple[int, Request]]:
        """Return the pending requests and forget them."""
        requests, self.open = self.unanswered(), {}
        return requests

    def release(self, episode: str) -> None: ...

    def sleep(self) -> None: ...

    def load(self, weights: Any, version: int, *, keep: bool = False) -> str:
        raise NotImplementedError

    def score(self, tokens: list[int]) -> list[float]:
        """Return probability 1 for every token."""
        return [0.0] * len(tokens[1:])

    def close(self) -> None: ...


def transcript(resolved: Resolved, policy: ModelInfo) -> list[tuple[str, bool]]:
    """Return the first task's episode as the model would see it: [(text, whether a run trains on it)].

    The script calls the first tool if there are tools, else says 5, and then gives the verifier's right
    answer or the task's answer. Empty without an environment or an agent.

    Raises UserError for an episode that fails.
    """
    env, recipe = for_template(resolved.env, policy.chat), resolved.recipe
    if env is None and not recipe.source.agent:
        return []
    task, judge = resolved.train[0], recipe.verifier.build()
    gold = next(iter(judge.golds(task) if judge else ()), task.answer or "5")
    first = env.example() if isinstance(env, ToolUse) else "5" if env else gold
    script = ScriptedEngine(policy.chat, [first, gold])
    alone = replace(recipe, search=None, rollout=replace(recipe.rollout, workers=1))
    with closing(build_episode_runner(replace(resolved, recipe=alone), policy, script)) as plays:
        number = plays.open(GroupRequest(number=0, task=task, size=1, sampling=Sampling()))
        finished: dict[int, list[Episode]] = {}
        while plays.busy and (recipe.source.agent or script.answers.total() < MOST):
            finished.update(plays.step())
        episodes = finished.get(number, [])
        played = [(row, e.verdict) for e in episodes for row in e.trajectories]
        parts = sorted(plays.parts().get(number, ()), key=lambda part: part.sample)
        running = [(part.live, None) for part in parts if part.live and part.live.said]
    if broken := next((e.verdict for e in episodes if e.verdict.failed), None):
        where = (
            "task.tools" if isinstance(env, ToolUse) else "task.agent" if recipe.source.agent else "task.env"
        )
        raise UserError(where, f"an episode fails: {broken.label}: {broken.reason}")
    return [piece for n, row in enumerate([*played, *running]) for piece in _pieces(policy.chat, n, *row)]


def _pieces(chat: Chat, number: int, row: Any, verdict: Verdict | None) -> Iterator[tuple[str, bool]]:
    """Yield a conversation in pieces, and its verdict."""
    if number:
        yield "\n\n", False
    pairs = zip(chat.pieces(row.tokens), row.sampled, strict=True)
    yield from join_pieces(pairs)
    reason = f": {verdict.reason}" if verdict and verdict.reason else ""
    yield f"\n{verdict.label}{reason}" if verdict else "\nand so on", False
