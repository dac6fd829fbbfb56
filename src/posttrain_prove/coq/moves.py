"""Tactics of Coq as moves of a search: goals as Coq prints them, and the state after each tactic.

    State.moves   the tactics up to the state; the task's field `opening`, such as "intros.", is not a move
    State.shown   the first goal (its hypotheses but for propositions and types, a line, its conclusion), then
                  the conclusions of the other goals
    State.key     all goals with all their hypotheses
    State.parts   each goal alone, between braces; empty where a goal has an existential variable, which a
                  tactic for another goal may fill. In a part `2: ` means the second of its own goals

A session of `coqtop` serves one theorem after the other. It goes back to the nearest common state and sends
the remaining tactics again, as Coq forgets the states that it leaves. A complete proof is a candidate: what
`coqtop` accepts need not compile, so the verifier `coq` judges the text.
"""

import hashlib
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from posttrain.search.protocol import Refused, State, Transitions
from posttrain.types import Message, RunError, Task, UserError
from posttrain.verifiers.sandbox import Box, Level, Limits
from posttrain_prove.coq import check
from posttrain_prove.coq.check import CoqProblem, find_error
from posttrain_prove.coq.one_move import CoqMove, parse_move, parse_proof, parse_sketch, remove_lemma
from posttrain_prove.coq.script import split_sentences
from posttrain_prove.coq.session import CoqSession, EndedError, Opening
from posttrain_prove.coq.task import problem_of
from posttrain_prove.coq.verifier import Coq

_SORT = re.compile(r"^[\w', ]+ : (?:Prop|Set|Type)$")
_GOAL = re.compile(
    r"^(?:\d+ (?:focused )?goals?|goal \d+)(?: \(shelved: \d+\))?(?: \(ID \d+\))?(?: is:)?\n", re.MULTILINE
)
_LINE = "============================\n"
_PROVED = "No more goals."
_PART_PROVED = "This subproof is complete"
_SHELVED = re.compile(r"\(shelved: \d+\)")
_HAS = "match goal with |- ?a => has_evar a | _ : ?a |- _ => has_evar a | _ := ?a |- _ => has_evar a end"
_CLOSED = f"all: assert_fails (idtac; {_HAS})."
"""Accepted if no goal has an existential variable. Printed goals do not show all: some are implicit."""
_LOAD_S = 60.0
_SLACK_S = 5.0
_SESSION_S = 3600.0
_MOST_SENTENCES = 40_000
"""Sentences after which a session is restarted: Coq's memory grows with them."""
_MOST_SESSIONS = 4
"""Number of headers with a session; the least recently used is closed."""
_MOST_GOALS = 32
_MOST_CHARACTERS = 20_000
"""Length of a state's goals; a longer state is refused, as no policy could read it."""
_SET = (
    "Set Silent.",
    "Set Printing Width 1000.",
    "Set Printing Depth 1000.",
    "Unset Printing Compact Contexts.",
)


@dataclass
class _ProofPlace:
    """The position of a session in a theorem."""

    theorem: tuple[str, ...] = ()
    """The statement and the opening sentences."""
    base: int = 0
    """The state before the theorem."""
    states: list[int] = field(default_factory=list)
    """Numbers of the states after the opening and after each of the moves."""
    moves: list[str] = field(default_factory=list)
    sent: int = 0
    """Number of sentences sent since the session began."""


_Key = tuple[str, str]
"""The header and the definitions of a problem."""


class CoqTransitions(Transitions):
    """Apply tactics in Coq. A session is started for each header, and again when one ends.

    sketches: a move may be several tactics, with holes. timeout_s: limit of one tactic, which Coq itself
    enforces; a session that takes longer is ended. When a session ends, only the pending move is refused,
    with the cause as its label (timeout, output, died).
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
        self._last_task: tuple[Task, CoqProblem, tuple[str, ...]] | None = None
        """The task of the last request with its problem: parsing it takes longer than a tactic."""

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
        """Return the first state of each task. Raises UserError for a task that is not Coq."""
        return [self._begin(task) for task in tasks]

    def apply(self, requests: Sequence[tuple[State, str]]) -> list[State | Refused]:
        """Return the state after each move. Moves are sorted so that neighbours share tactics."""
        keys = [(state.task.id, state.moves, move) for state, move in requests]
        states: dict[int, State | Refused] = {}
        for n in sorted(range(len(keys)), key=keys.__getitem__):
            states[n] = self._apply(*requests[n])
        return [states[n] for n in range(len(requests))]

    def lemma(self, state: State) -> Task | None:
        """Return a state of one goal as a theorem of its own."""
        return make_theorem(state)

    def close(self) -> None:
        while self._sessions:
            self._sessions.popitem()[1][0].close()

    # ------------------------------------------------------------------ one move

    def _begin(self, task: Task) -> State | Refused:
        return self._retry(State(task=task), None, "Coq fails at the statement")

    def _apply(self, state: State, text: str) -> State | Refused:
        move = parse_sketch(text) if self.sketches else parse_move(text)
        if isinstance(move, Refused):
            return move
        return self._retry(state, move, "Coq ended during the move")

    def _retry(self, state: State, move: CoqMove | None, reason: str) -> State | Refused:
        """Return the state after a move; try twice if Coq died: another process may have taken its memory."""
        for is_retry in (False, True):
            try:
                return self._run(state, move)
            except EndedError as end:
                if is_retry or end.why != "died":
                    return Refused(end.why, reason)
        raise AssertionError

    def _run(self, state: State, move: CoqMove | None) -> State | Refused:
        """Return the state after a move, or the state itself without a move."""
        problem, theorem = self._parse_task(state.task)
        tactics = move.sentences if move else ()
        key = (problem.header, problem.definitions)
        session, place = self._session_for(key, problem)
        try:
            session.allow(_SLACK_S + 2 * self.timeout_s * (len(state.moves) + len(tactics) + 2))
            if place.theorem != theorem:
                self._open(session, place, theorem, state.task)
            shared = _count_shared(place.moves, state.moves)
            replay = [f"Timeout {2 * self.timeout_s} {tactic}" for tactic in state.moves[shared:]]
            commands = [f"Timeout {self.timeout_s} {tactic}" for tactic in tactics]
            answers = session.say_all([f"BackTo {place.states[shared]}.", *replay, *commands, "Show."])
            place.sent += len(answers)
            replayed = answers[1 : 1 + len(replay)]
            place.states[shared + 1 :] = [reply.state for reply in replayed]
            place.moves[shared:] = state.moves[shared:]
            if not all(reply.accepted for reply in replayed):
                raise EndedError("died")  # it refuses a move that it accepted before: try another session
            replies = answers[1 + len(replay) : -1]
            for reply in replies:
                if not reply.accepted:
                    return Refused(*_classify_error(reply.output))
            place.moves += tactics
            place.states += [reply.state for reply in replies]
            return self._read(session, state, move, answers[-1].output)
        except BaseException:
            self._end_session(key)
            raise

    def _read(self, session: CoqSession, state: State, move: CoqMove | None, show: str) -> State | Refused:
        """Read the state that Coq shows after the move."""
        moves = (*state.moves, *move.sentences) if move else state.moves
        text = "\n".join([*self._parse_task(state.task)[1][1:], *moves])
        shelved = _SHELVED.search(show) is not None
        in_braces = any(tactic.endswith("{") for tactic in moves)
        if show.strip() == _PROVED or (in_braces and _PART_PROVED in show and not shelved):
            template = move.template if move else ""
            if move and move.holes:
                return Refused("form", "its holes are proved by the tactics after them")
            return State(task=state.task, moves=moves, key=_PROVED, done=True, taken=template, text=text)
        goals = [] if in_braces and _PART_PROVED in show else _parse_goals(show)
        if not goals or "remaining goals are on the shelf" in show:
            return Refused("shelved", "no goal is visible, and not all are proved")
        if len(goals) > _MOST_GOALS:
            return Refused("goals", f"it leaves {len(goals)} goals")
        are_independent = False
        if len(goals) > 1:
            queries = [f"Show {n}." for n in range(2, len(goals) + 1)]
            *others, closed = session.say_all([*queries, f"Timeout {self.timeout_s} {_CLOSED}"])
            goals = [goals[0], *(goal for reply in others for goal in _parse_goals(reply.output))]
            are_independent = closed.accepted and not shelved
        if move and move.holes and (len(goals) < move.holes or not (are_independent or len(goals) == 1)):
            return Refused("form", "its holes depend on one another")
        key = "\n\n".join(goals)
        if len(key) > _MOST_CHARACTERS:
            return Refused("output", f"its goals take {len(key):,} characters")
        parts = [
            State(
                task=state.task,
                moves=(*moves, f"{n}: {{"),
                shown=_show_goals([goal]),
                key=goal,
                around=("{", "}"),
            )
            for n, goal in enumerate(goals if are_independent else (), start=1)
        ]
        return State(
            task=state.task,
            moves=moves,
            shown=_show_goals(goals),
            key=key,
            parts=tuple(parts),
            around=("{", "}"),
            taken=move.template if move else "",
            text=text,
        )

    def trim(self, end: State) -> State:
        """Remove each lemma (`assert`) without which Coq still accepts the proof."""
        opening = "\n".join(self._parse_task(end.task)[1][1:])
        proof = end.text.removeprefix(opening).lstrip("\n")
        text, at = proof, 0 if self.sketches else len(proof)
        while (shorter := remove_lemma(text, at)) is not None:
            result = self._retry(State(task=end.task), CoqMove(tuple(parse_proof(shorter))), "")
            is_needed = isinstance(result, Refused) or not result.done
            text, at = (text, at + 1) if is_needed else (shorter, at)
        return end if text == proof else replace(end, text="\n".join(filter(None, [opening, text])))

    def _parse_task(self, task: Task) -> tuple[CoqProblem, tuple[str, ...]]:
        """Return a task's problem, and its statement with the opening sentences."""
        if self._last_task is None or self._last_task[0] is not task:
            problem = problem_of(task)
            self._last_task = (task, problem, (problem.statement, *_parse_opening(task)))
        return self._last_task[1:]

    # ------------------------------------------------------------------ sessions

    def _open(self, session: CoqSession, place: _ProofPlace, theorem: tuple[str, ...], task: Task) -> None:
        """Begin the task's theorem, and abandon the previous one."""
        statement, *opening = theorem
        back = [f"BackTo {place.base}."] if place.theorem else []
        answers = session.say_all([*back, f"Theorem t{session.secret} : {statement}.", *opening])[len(back) :]
        failure = next((n for n, answer in enumerate(answers) if not answer.accepted), None)
        if failure is not None or not answers[-1].proving:
            error = find_error(answers[failure or 0].output) or "no proof begins with it"
            raise UserError(
                task.source,
                f"task {task.id!r} does not begin in Coq: {error}",
                "correct its statement, header or opening",
            )
        place.theorem, place.states, place.moves = theorem, [answers[-1].state], []

    def _session_for(self, key: _Key, problem: CoqProblem) -> tuple[CoqSession, _ProofPlace]:
        if key in self._sessions and self._sessions[key][1].sent > _MOST_SENTENCES:
            self._end_session(key)
        if key not in self._sessions:
            session = self._make_opening(problem).start()
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

    def _end_session(self, key: _Key) -> None:
        if entry := self._sessions.pop(key, None):
            self.restarts += 1
            entry[0].close()

    def _make_opening(self, problem: CoqProblem) -> Opening:
        programs = check.find_programs()
        limits = Limits(wall_s=_SESSION_S, memory_mb=self.memory_mb)
        box = Box(level=self.level, limits=limits, readable=programs.readable)
        files = check.compile_definitions(box, problem)
        command = tuple(check.command_line(programs.coqtop, "-emacs"))
        return Opening(box, command, tuple(sorted(files.items())), problem.preamble)


def _count_shared(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the number of first moves that two sequences share."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _classify_error(output: str) -> tuple[str, str]:
    """Return the label of what Coq does not accept, and its error."""
    error = find_error(output)
    return ("timeout", "it takes too long") if error.startswith("Timeout") else ("error", error or "refused")


def _parse_opening(task: Task) -> list[str]:
    """Return the sentences that are sent before a search begins."""
    opening = task.fields.get("opening", "")
    text = opening if isinstance(opening, str) else "\n".join(map(str, opening))
    parts, error = split_sentences(text)
    if error:
        raise UserError(task.source, f"the opening of task {task.id!r} is not Coq: {error}")
    return [sentence.text for sentence in parts]


def _show_goals(goals: Sequence[str]) -> tuple[Message, ...]:
    """Return a message with the first goal in full and the conclusions of the others."""
    waiting = [f"then: {goal.rpartition(_LINE)[2].strip()}" for goal in goals[1:]]
    return ({"role": "user", "content": "\n".join([_shorten_goal(goals[0]), *waiting])},)


def _shorten_goal(goal: str) -> str:
    """Remove the lines that only declare a proposition or a type."""
    lines = goal.replace(_LINE, "======\n").splitlines()
    return "\n".join(line for line in lines if not _SORT.search(line))


def _parse_goals(output: str) -> list[str]:
    """Parse the goals that `Show` prints, without their numbers; all but the first have a conclusion alone.

    >>> _parse_goals("1 goal (ID 4)\\n  \\n  A : Prop\\n  h : A\\n  ============================\\n  A\\n\\n")
    ['A : Prop\\nh : A\\n============================\\nA']
    """
    parts = _GOAL.split(output)[1:]
    return ["\n".join(line.strip() for line in part.splitlines() if line.strip()) for part in parts]


def make_theorem(state: State) -> Task | None:
    """Return a state of one goal as a theorem with quantified hypotheses; None if one has a body.

    >>> task = Task(id="t", messages=(), fields={"name": "goal", "header": "Require Import Arith."})
    >>> theorem = make_theorem(State(task=task, key=f"a, b : nat\\nh : a = b\\n{_LINE}b = a"))
    >>> theorem.fields["statement"], theorem.fields["opening"], theorem.fields["header"]
    ('forall (a b : nat) (h : a = b), b = a', 'intros a b h.', 'Require Import Arith.')
    """
    hypotheses, _, goal = state.key.rpartition(_LINE)
    lines = [line.partition(" : ") for line in hypotheses.splitlines()]
    if any(":=" in name for name, _, _ in lines) or not goal or _LINE in hypotheses:
        return None
    names = [name.replace(",", "") for name, _, _ in lines]
    binders = " ".join(f"({name} : {kind})" for name, (_, _, kind) in zip(names, lines, strict=True))
    fields = {k: state.task.fields[k] for k in ("name", "header", "definitions") if k in state.task.fields}
    fields["statement"] = f"forall {binders}, {goal}" if lines else goal
    fields["opening"] = f"intros {' '.join(names)}." if lines else ""
    digest = hashlib.blake2b(fields["statement"].encode(), digest_size=8).hexdigest()
    return Task(id=f"goal-{digest}", messages=state.shown, fields=fields, source=state.task.source)
