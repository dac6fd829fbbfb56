"""Play groups with tree search: one tree for each task, from which the episodes of its group are selected.

The episodes of a group of more than one are training rows: states with the moves sampled in them, selected as
search.learn says (search/training_rows.py). The episode of a group of one, as in an evaluation, is the whole
solution: its response is the proof, or the answer. The task's verifier judges each solution, so one that the
prover of the search accepts wrongly is not trained on.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from posttrain.base.chat import Chat
from posttrain.engines.protocol import Engine
from posttrain.rollout.episode_runner import EpisodeRunner
from posttrain.rollout.live_episode import PartialEpisode
from posttrain.rollout.protocol import GroupRequest
from posttrain.search.choice import SearchChoice
from posttrain.search.driver import SearchDriver
from posttrain.search.engine_requests import prompt_of
from posttrain.search.protocol import Move, Refused, State, Transitions
from posttrain.search.record import record
from posttrain.search.strategies.hypertree import left_out
from posttrain.search.training_rows import select_training_rows
from posttrain.search.tree import Tree
from posttrain.search.values import value_prompt
from posttrain.types import Completion, Episode, Sampling, Task, Trajectory, UserError, Verdict
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import Verifier

_POLL_S = 0.05


class SearchRunner(EpisodeRunner):
    """Play groups as tree searches, concurrently.

    sampling: its temperature replaces that of a greedy request: a greedy policy has one move in each state.
    """

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        world: Transitions,
        choice: SearchChoice,
        sampling: Sampling,
        *,
        verifier: Verifier | None,
        workers: int = 2,
        deadline_s: float = 10.0,
        memory_mb: int = 4096,
        context: int,
        seed: int = 0,
    ) -> None:
        self.engine, self.chat, self.choice, self.sampling = engine, chat, choice, sampling
        self.verifier = verifier
        score = choice.state_scorer(world.judges)
        options = {"context": context, "seed": seed, "sketch_tokens": choice.sketch_tokens}
        self.searches = SearchDriver(engine, chat, world, score=score, **options)
        self.pool = Pool(workers=workers, deadline_s=deadline_s, memory_mb=memory_mb)
        self._groups: dict[int, tuple[Task, int]] = {}
        self._judging: dict[int, tuple[int, Tree]] = {}
        self._finished: list[tuple[int, list[Episode]]] = []

    @property
    def steps(self) -> int:  # type: ignore[override]
        return self.searches.steps

    @property
    def busy(self) -> bool:
        return bool(self._groups or self._finished)

    def open(self, request: GroupRequest) -> int:
        """Start a search and return its number; `request.begun` is ignored: it draws the same again."""
        task, size, sampling = request.task, request.size, request.sampling
        if sampling.greedy:
            sampling = replace(sampling, temperature=self.sampling.temperature)
        sampling = replace(sampling, stop=(*sampling.stop, *self.searches.transitions.stop))
        choice = self.choice
        start_search = choice.make(size if size > 1 else 0, self.searches.transitions.judges)
        number = self.searches.begin(task, start_search, choice.budget, sampling, request.key)
        self._groups[number] = (task, size)
        return number

    def step(self) -> list[tuple[int, list[Episode]]]:
        for number, tree in self.searches.step():
            task, _ = self._groups[number]
            self.judged_s += tree.prover_s if isinstance(tree, Tree) else 0.0
            end = tree.end if isinstance(tree, Tree) else None
            if isinstance(tree, Tree) and end and end.verdict is None:
                assert self.verifier is not None
                self._judging[self.pool.submit(self.verifier, task, end.text)] = (number, tree)
            else:
                self._finish_search(number, tree, end.verdict if end else None)
        idle = not self.engine.busy and not self._finished
        begin = time.monotonic()
        verdicts = self.pool.poll(_POLL_S if idle else 0.0)
        self.judged_s += time.monotonic() - begin
        for ticket, verdict in verdicts:
            number, tree = self._judging.pop(ticket)
            self._finish_search(number, tree, verdict)
        complete, self._finished = self._finished, []
        return complete

    def receive(self, answers: Sequence[tuple[int, Completion]]) -> None:
        """Pass completions of the engine to the searches, as moves."""
        self.searches.receive(answers)

    def pause(self) -> None:
        self.searches.pause()

    def unpause(self) -> None:
        self.searches.unpause()

    def run_only(self, groups: set[int]) -> None:
        """Do nothing: a search whose requests are withdrawn makes no other."""

    def run_all(self) -> None: ...

    def parts(self) -> dict[int, tuple[PartialEpisode, ...]]:
        """Return no episodes: a search starts again with a new tree."""
        return dict.fromkeys(self._groups, ())

    def close(self) -> None:
        """End the engine, the verifiers and the provers."""
        self.engine.close()
        self.pool.close()
        self.searches.transitions.close()

    # ------------------------------------------------------------------ from trees to episodes

    def _finish_search(self, number: int, tree: Tree | Refused, verdict: Verdict | None) -> None:
        task, size = self._groups.pop(number)
        first, *others = self._episodes(task, size, tree, verdict)
        search_record = record(task, tree, self.choice)
        if self.choice.asks_sketches and isinstance(tree, Tree):
            goals = [goal for node in left_out(tree) if (goal := self.searches.transitions.lemma(node.state))]
            search_record["goals"] = [{"prompt": g.messages[-1]["content"], **g.fields} for g in goals]
        first = replace(first, search=search_record)
        self._finished.append((number, [first, *others]))

    def _episodes(
        self, task: Task, size: int, tree: Tree | Refused, verdict: Verdict | None
    ) -> list[Episode]:
        """Return the episodes of a task: at most `size` rows, or one that says what failed."""
        root = State(task=task, shown=task.messages)
        if isinstance(tree, Refused):
            failed = Verdict(score=None, label=tree.label, reason=tree.reason)
            return [self._episode(root, None, failed)]
        if not tree.drawn:
            fault = "bad_task" if tree.solved else "context"
            reason = "nothing is left to say" if tree.solved else "there is no room for a move"
            return [self._episode(root, None, Verdict(score=None, label=fault, reason=reason))]
        rows = []
        for n, row in enumerate(select_training_rows(tree, verdict, self.choice, size)):
            render = value_prompt if row.asks_value else None
            episode = self._episode(row.state, row.move, row.verdict, render, row.text)
            rows.append(replace(episode, sample=n))
        return rows

    def _episode(
        self,
        state: State,
        move: Move | None,
        verdict: Verdict,
        render: Callable[[Chat, State], list[int]] | None = None,
        text: str | None = None,
    ) -> Episode:
        """Return an episode whose prompt is a state and whose answer is a move, with the verdict's score.

        render: makes the prompt, in place of that of a move. text: response, in place of the move's text.
        """
        try:
            render = render or partial(prompt_of, sketch=bool(move and move.sketch))
            prompt = render(self.chat, state)
        except UserError:  # the chat template cannot render the task: the verdict says so
            prompt = []
        tokens, zeros = list(move.tokens) if move else [], [0.0] * len(prompt)
        score = [0.0] * len(tokens)
        if score:
            score[-1] = verdict.score or 0.0
        return Episode(
            task=state.task,
            sample=0,
            trajectory=Trajectory(
                tokens=prompt + tokens,
                sampled=[False] * len(prompt) + [True] * len(tokens),
                logp_gen=zeros + list(move.logp_gen if move else ()),
                logp_policy=zeros + list(move.logp_policy if move else ()),
                version=[0] * len(prompt) + list(move.version if move else ()),
                reward=zeros + score,
            ),
            verdict=verdict,
            response=(move.text if move else "") if text is None else text,
            stop="eos" if move is None or move.complete else "length",
        )
