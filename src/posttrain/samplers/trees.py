"""Groups that are searches: a tree for each task, and of a tree that came to its end the moves to there.

A group of more than one episode is what is learnt from: each episode is a state of the way that was found,
and the move that was said in it. A group of one, as in an evaluation, is the whole: its response is the
proof, or the answer. What a search takes for the end is judged by the task's verifier, as any answer is, so
a prover that accepts too much is found out, and what it accepted is not imitated.
"""

from collections.abc import Sequence
from dataclasses import replace

from posttrain.chat import Chat
from posttrain.engines.protocol import Engine
from posttrain.samplers.live import Part
from posttrain.samplers.plays import UNKNOWN, Plays
from posttrain.search.choice import SearchChoice
from posttrain.search.drive import Searches, prompt_of
from posttrain.search.protocol import Refused, State, Steps
from posttrain.search.tree import Edge, Tree
from posttrain.types import Completion, Episode, Sampling, Task, Trajectory, UserError, Verdict
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import TrainerState, Verifier

_POLL_S = 0.05


class Trees(Plays):
    """Plays groups as searches, side by side.

    sampling: of moves, where an evaluation asks for the likeliest answer: a state has but one of these.
    """

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        world: Steps,
        choice: SearchChoice,
        sampling: Sampling,
        *,
        verifier: Verifier,
        workers: int = 2,
        deadline_s: float = 10.0,
        memory_mb: int = 4096,
        context: int,
        seed: int = 0,
    ) -> None:
        self.engine, self.chat, self.choice, self.sampling = engine, chat, choice, sampling
        self.verifier = verifier
        self.searches = Searches(engine, chat, world, context=context, seed=seed)
        self.pool = Pool(workers=workers, deadline_s=deadline_s, memory_mb=memory_mb)
        self._groups: dict[int, tuple[Task, int]] = {}
        self._judging: dict[int, tuple[int, Tree]] = {}
        self._finished: list[tuple[int, list[Episode]]] = []
        self.found: dict[int, Tree | Refused] = {}
        """The trees of groups that are complete, for whoever takes them out."""
        self.keeps = False
        """Whether trees are kept there."""

    @property
    def steps(self) -> int:  # type: ignore[override]
        """Of the engine."""
        return self.searches.steps

    @property
    def busy(self) -> bool:
        """Whether a group is going on."""
        return bool(self._groups or self._finished)

    def open(
        self,
        task: Task,
        size: int,
        sampling: Sampling,
        *,
        epoch: int = 0,
        state: TrainerState = UNKNOWN,
        begun: Sequence[Part] = (),
    ) -> int:
        """The number of a new search. One that has begun elsewhere begins anew, and draws the same again."""
        if sampling.greedy:
            sampling = replace(sampling, temperature=self.sampling.temperature)
        sampling = replace(sampling, stop=(*sampling.stop, *self.searches.world.stop))
        choice = self.choice
        number = self.searches.begin(task, choice.make(), choice.budget, sampling, f"{epoch}:{task.id}")
        self._groups[number] = (task, size)
        return number

    def step(self) -> list[tuple[int, list[Episode]]]:
        """The groups that are now complete, with their numbers, after one step of the engine."""
        for number, tree in self.searches.step():
            task, _ = self._groups[number]
            if isinstance(tree, Tree) and tree.solved:
                text = tree.solved.state.text
                self._judging[self.pool.submit(self.verifier, task, text)] = (number, tree)
            else:
                self._over(number, tree, None)
        idle = not self.engine.busy and not self._finished
        for ticket, verdict in self.pool.poll(_POLL_S if idle else 0.0):
            number, tree = self._judging.pop(ticket)
            self._over(number, tree, verdict)
        done, self._finished = self._finished, []
        return done

    def answered(self, answers: Sequence[tuple[int, Completion]]) -> None:
        """Takes moves of the engine."""
        self.searches.answered(answers)

    def park(self) -> None:
        """Takes back from the engine all that it has not answered, as far as it has come."""
        self.searches.park()

    def unpark(self) -> None:
        """Asks the engine to go on with what was taken back."""
        self.searches.unpark()

    def apart(self, groups: set[int]) -> None:
        """Nothing: what is parked waits, and no search asks for anything by itself."""

    def together(self) -> None:
        """Likewise."""

    def parts(self) -> dict[int, tuple[Part, ...]]:
        """Nothing of any search: its tree is made again."""
        return dict.fromkeys(self._groups, ())

    def close(self) -> None:
        """Ends verifiers and provers."""
        self.pool.close()
        self.searches.world.close()

    # ------------------------------------------------------------------ what a tree comes to

    def _over(self, number: int, tree: Tree | Refused, verdict: Verdict | None) -> None:
        task, size = self._groups.pop(number)
        if self.keeps:
            self.found[number] = tree
        self._finished.append((number, self._episodes(task, size, tree, verdict)))

    def _episodes(
        self, task: Task, size: int, tree: Tree | Refused, verdict: Verdict | None
    ) -> list[Episode]:
        """The group of a task: one episode, or of a tree that came to its end at most `size` rows."""
        if isinstance(tree, Refused):
            failed = Verdict(score=None, label=tree.label, reason=tree.reason)
            return [self._episode(task, 0, None, failed, "")]
        if not tree.drawn:
            label = "bad_task" if tree.solved else "context"
            why = "nothing is left to say" if tree.solved else "there is no room for a move"
            return [self._episode(task, 0, None, Verdict(score=None, label=label, reason=why), "")]
        if verdict is None or tree.solved is None:
            first = next(iter(tree.nodes[0].edges.values()), None)
            unsolved = Verdict(score=0.0, label="unsolved", reason=_told(tree))
            return [self._episode(task, 0, first, unsolved, "")]
        verdict = replace(verdict, reason=f"{verdict.reason}; {_told(tree)}", progress=())
        way = tree.path(tree.solved)
        if size == 1 or verdict.failed:
            return [self._episode(task, 0, way[0], verdict, tree.solved.state.text)]
        rows = [way[n * len(way) // min(size, len(way))] for n in range(min(size, len(way)))]
        return [self._episode(task, n, edge, verdict, edge.move.text) for n, edge in enumerate(rows)]

    def _episode(self, task: Task, sample: int, edge: Edge | None, verdict: Verdict, text: str) -> Episode:
        """A state and the move that was said in it, worth what became of the tree."""
        state = edge.source.state if edge else State(task=task, shown=task.messages)
        try:
            prompt = prompt_of(self.chat, state)
        except UserError:  # of a task that nobody can be shown, which has been said
            prompt = []
        move = edge.move if edge else None
        tokens, nothing = list(move.tokens) if move else [], [0.0] * len(prompt)
        score = [0.0] * len(tokens)
        if score:
            score[-1] = verdict.score or 0.0
        return Episode(
            task=task,
            sample=sample,
            trajectory=Trajectory(
                tokens=prompt + tokens,
                sampled=[False] * len(prompt) + [True] * len(tokens),
                logp_gen=nothing + list(move.logp_gen if move else ()),
                logp_policy=nothing + list(move.logp_policy if move else ()),
                version=[0] * len(prompt) + list(move.version if move else ()),
                reward=nothing + score,
            ),
            verdict=verdict,
            response=text,
            stop="eos" if move is None or move.ended else "length",
        )


def _told(tree: Tree) -> str:
    """What a search did, in a line."""
    refused = sum(tree.refused.values())
    return (
        f"{tree.drawn} moves drawn, {tree.applied} followed, {refused} refused, {tree.merged} merged; "
        f"{len(tree.nodes)} states, at most {tree.depth} deep"
    )
