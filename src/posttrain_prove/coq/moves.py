"""Tactics of Coq as steps: goals as Coq prints them, and where each tactic leads.

    State.moves   the tactics so far; what a task opens with (its field `opening`, as "intros.") is no move
    State.shown   the goals: the hypotheses of the first but for propositions and types, a line, what is to be
                  proved; then what is to be proved in those that wait
    State.key     all goals with all their hypotheses
    State.parts   each goal alone, between braces; none where a goal has an existential variable, which a
                  tactic for another may fill. In a part `2: ` means the second of its own goals

A session of `coqtop` serves one theorem after the other. It goes back to the nearest state that both ways
share and says the rest again, as Coq forgets what was left. A proof that is found is a candidate: what a
tactic mode accepts need not compile, so the verifier `coq` judges the whole.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from posttrain.search.protocol import Refused, State, Transitions
from posttrain.types import RunError, Task, UserError
from posttrain.verifiers.sandbox import Box, Level, Limits
from posttrain_prove.coq import check
from posttrain_prove.coq.check import CoqProblem, error_in
from posttrain_prove.coq.goals import CLOSED, PART_PROVED, PROVED, SHELVED, alone, goals_of, shown
from posttrain_prove.coq.one_move import Said, allowed, parse_sketch, said_in, without_lemma
from posttrain_prove.coq.script import sentences
from posttrain_prove.coq.session import CoqSession, EndedError, Opening
from posttrain_prove.coq.task import problem_of
from posttrain_prove.coq.verifier import Coq

_LOAD_S = 60.0
_SLACK_S = 5.0
_SESSION_S = 3600.0
_MOST_SENTENCES = 40_000
"""After which a session is started again: Coq's memory grows with them."""
_MOST_SESSIONS = 4
"""Of headers; the one used longest ago makes room."""
_MOST_GOALS = 32
_MOST_CHARACTERS = 20_000
"""Of the goals of a state; more is refused, as no policy could read it."""
_SET = (
    "Set Silent.",
    "Set Printing Width 1000.",
    "Set Printing Depth 1000.",
    "Unset Printing Compact Contexts.",
)


@dataclass
class _ProofPlace:
    """Where a session stands in a theorem."""

    theorem: tuple[str, ...] = ()
    """Its statement, and what it opens with."""
    base: int = 0
    """The state before the theorem."""
    states: list[int] = field(default_factory=list)
    """After its opening, and after each of the moves."""
    moves: list[str] = field(default_factory=list)
    said: int = 0
    """Sentences, since the session began."""


_Key = tuple[str, str]
"""Header and definitions."""


class CoqTransitions(Transitions):
    """Where tactics lead in Coq. A session is started for each header, and again when one ends.

    sketches: a move may be several tactics, with holes. timeout_s: of one tactic, which Coq itself keeps; a
    session that takes longer is ended. Whatever ends it, what was being said is refused by its class
    (timeout, output, died), and nothing else.
    """

    can_sketch: ClassVar[bool] = True

    def __init__(
        self,
        *,
        level: Level = "strict",
        timeout_s: int = 2,
        memory_mb: int = 2048,
        sketches: bool = False,
    ) -> None:
        self.level, self.timeout_s, self.memory_mb, self.sketches = level, timeout_s, memory_mb, sketches
        self.restarts = 0
        self._sessions: OrderedDict[_Key, tuple[CoqSession, _ProofPlace]] = OrderedDict()
        self._read: tuple[Task, CoqProblem, tuple[str, ...]] | None = None
        """The task that was asked about last, and what it says: reading it takes longer than a tactic."""

    @classmethod
    def of_verifier(cls, verifier: Coq, search: Any) -> Self:
        """Return the moves of a search whose tasks this verifier judges; `search` is the table [search]."""
        return cls(
            level=verifier.level,
            timeout_s=search.timeout_s,
            memory_mb=verifier.memory_mb,
            sketches=search.asks_sketches,
        )

    def begin(self, tasks: Sequence[Task]) -> list[State | Refused]:
        """The state in which each task begins. UserError for a task that is not Coq."""
        return [self._begun(task) for task in tasks]

    def apply(self, asked: Sequence[tuple[State, str]]) -> list[State | Refused]:
        """Where each move leads. They are said in an order in which little is said twice."""
        order = sorted(range(len(asked)), key=lambda n: (asked[n][0].task.id, asked[n][0].moves, asked[n][1]))
        found: dict[int, State | Refused] = {}
        for n in order:
            found[n] = self._applied(*asked[n])
        return [found[n] for n in range(len(asked))]

    def lemma(self, state: State) -> Task | None:
        """Return a state of one goal as a theorem of its own."""
        return alone(state)

    def close(self) -> None:
        while self._sessions:
            self._sessions.popitem()[1][0].close()

    # ------------------------------------------------------------------ one question

    def _begun(self, task: Task) -> State | Refused:
        return self._twice(State(task=task), None, "Coq does not get through the statement")

    def _applied(self, state: State, said: str) -> State | Refused:
        move = parse_sketch(said) if self.sketches else allowed(said)
        if isinstance(move, Refused):
            return move
        return self._twice(state, move, "Coq was ended while it worked on it")

    def _twice(self, state: State, move: Said | None, failed: str) -> State | Refused:
        """What a move leads to; asked again where Coq died: it may have been killed for another's memory."""
        for again in (False, True):
            try:
                return self._at(state, move)
            except EndedError as end:
                if again or end.why != "died":
                    return Refused(end.why, failed)
        raise AssertionError

    def _at(self, state: State, move: Said | None) -> State | Refused:
        """What a move leads to, or what the state itself shows if there is none."""
        problem, theorem = self._theorem(state.task)
        now = move.sentences if move else ()
        key = (problem.header, problem.definitions)
        session, place = self._session(key, problem)
        try:
            session.allow(_SLACK_S + 2 * self.timeout_s * (len(state.moves) + len(now) + 2))
            if place.theorem != theorem:
                self._open(session, place, theorem, state.task)
            shared = _shared(place.moves, state.moves)
            again = [f"Timeout {2 * self.timeout_s} {each}" for each in state.moves[shared:]]
            new = [f"Timeout {self.timeout_s} {each}" for each in now]
            answers = session.say_all([f"BackTo {place.states[shared]}.", *again, *new, "Show."])
            place.said += len(answers)
            reached = answers[1 : 1 + len(again)]
            place.states[shared + 1 :] = [each.state for each in reached]
            place.moves[shared:] = state.moves[shared:]
            if not all(each.accepted for each in reached):
                raise EndedError("died")  # it refuses what it has accepted before: another is asked
            done = answers[1 + len(again) : -1]
            for each in done:
                if not each.accepted:
                    return Refused(*_why(each.output))
            place.moves += now
            place.states += [each.state for each in done]
            return self._state(session, state, move, answers[-1].output)
        except BaseException:
            self._end(key)
            raise

    def _state(self, session: CoqSession, state: State, move: Said | None, show: str) -> State | Refused:
        """What Coq shows after the move."""
        moves = (*state.moves, *move.sentences) if move else state.moves
        text = "\n".join([*self._theorem(state.task)[1][1:], *moves])
        shelved = SHELVED.search(show) is not None
        inside = any(each.endswith("{") for each in moves)
        if show.strip() == PROVED or (inside and PART_PROVED in show and not shelved):
            taken = move.taken if move else ""
            if move and move.holes:
                return Refused("form", "what it leaves out is proved by what stands behind it")
            return State(task=state.task, moves=moves, key=PROVED, done=True, taken=taken, text=text)
        goals = [] if inside and PART_PROVED in show else goals_of(show)
        if not goals or "remaining goals are on the shelf" in show:
            return Refused("shelved", "no goal is left in sight, and not all are proved")
        if len(goals) > _MOST_GOALS:
            return Refused("goals", f"it leaves {len(goals)} goals")
        apart = False
        if len(goals) > 1:
            asked = [f"Show {n}." for n in range(2, len(goals) + 1)]
            *others, closed = session.say_all([*asked, f"Timeout {self.timeout_s} {CLOSED}"])
            goals = [goals[0], *(goal for each in others for goal in goals_of(each.output))]
            apart = closed.accepted and not shelved
        if move and move.holes and (len(goals) < move.holes or not (apart or len(goals) == 1)):
            return Refused("form", "what it leaves out depends on one another")
        key = "\n\n".join(goals)
        if len(key) > _MOST_CHARACTERS:
            return Refused("output", f"its goals take {len(key):,} characters")
        parts = [
            State(
                task=state.task,
                moves=(*moves, f"{n}: {{"),
                shown=shown([goal]),
                key=goal,
                around=("{", "}"),
            )
            for n, goal in enumerate(goals if apart else (), start=1)
        ]
        return State(
            task=state.task,
            moves=moves,
            shown=shown(goals),
            key=key,
            parts=tuple(parts),
            around=("{", "}"),
            taken=move.taken if move else "",
            text=text,
        )

    def trim(self, end: State) -> State:
        """Without each lemma (`assert`) that Coq does not miss in the proof."""
        opening = "\n".join(self._theorem(end.task)[1][1:])
        whole = end.text.removeprefix(opening).lstrip("\n")
        text, at = whole, 0 if self.sketches else len(whole)
        while (shorter := without_lemma(text, at)) is not None:
            led = self._twice(State(task=end.task), Said(tuple(said_in(shorter))), "")
            kept = isinstance(led, Refused) or not led.done
            text, at = (text, at + 1) if kept else (shorter, at)
        return end if text == whole else replace(end, text="\n".join(filter(None, [opening, text])))

    def _theorem(self, task: Task) -> tuple[CoqProblem, tuple[str, ...]]:
        """The problem of a task; its statement, and what it opens with."""
        if self._read is None or self._read[0] is not task:
            problem = problem_of(task)
            self._read = (task, problem, (problem.statement, *_opening_of(task)))
        return self._read[1:]

    # ------------------------------------------------------------------ sessions

    def _open(self, session: CoqSession, place: _ProofPlace, theorem: tuple[str, ...], task: Task) -> None:
        """Begins the task's theorem, in the place of the one before."""
        statement, *opening = theorem
        back = [f"BackTo {place.base}."] if place.theorem else []
        answers = session.say_all([*back, f"Theorem t{session.secret} : {statement}.", *opening])[len(back) :]
        wrong = next((n for n, each in enumerate(answers) if not each.accepted), None)
        if wrong is not None or not answers[-1].proving:
            what = error_in(answers[wrong or 0].output) or "no proof begins with it"
            raise UserError(
                task.source,
                f"task {task.id!r} does not begin in Coq: {what}",
                "mend its statement, header or opening",
            )
        place.theorem, place.states, place.moves = theorem, [answers[-1].state], []

    def _session(self, key: _Key, problem: CoqProblem) -> tuple[CoqSession, _ProofPlace]:
        if key in self._sessions and self._sessions[key][1].said > _MOST_SENTENCES:
            self._end(key)
        if key not in self._sessions:
            session = self._opening(problem).start()
            try:
                session.allow(_LOAD_S)
                session.load()
                answers = session.say_all(_SET)
            except BaseException as error:
                session.close()
                if isinstance(error, EndedError):
                    raise RunError("start coqtop", error.why) from None
                raise
            self._sessions[key] = (session, _ProofPlace(base=answers[-1].state))
        self._sessions.move_to_end(key)
        while len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)[1][0].close()
        return self._sessions[key]

    def _end(self, key: _Key) -> None:
        if found := self._sessions.pop(key, None):
            self.restarts += 1
            found[0].close()

    def _opening(self, problem: CoqProblem) -> Opening:
        programs = check.programs()
        limits = Limits(wall_s=_SESSION_S, memory_mb=self.memory_mb)
        box = Box(level=self.level, limits=limits, readable=programs.readable)
        files = check.given(box, problem)
        command = tuple(check.command(programs.coqtop, "-emacs"))
        return Opening(box, command, tuple(sorted(files.items())), problem.preamble)


def _shared(a: Sequence[str], b: Sequence[str]) -> int:
    """How many moves two ways begin with alike."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _why(output: str) -> tuple[str, str]:
    """The class of what Coq does not accept, and its error."""
    said = error_in(output)
    return ("timeout", "it takes too long") if said.startswith("Timeout") else ("error", said or "refused")


def _opening_of(task: Task) -> list[str]:
    """The sentences that are said before a search begins."""
    given = task.fields.get("opening", "")
    text = given if isinstance(given, str) else "\n".join(map(str, given))
    found, wrong = sentences(text)
    if wrong:
        raise UserError(task.source, f"the opening of task {task.id!r} is not Coq: {wrong}")
    return [each.text for each in found]
