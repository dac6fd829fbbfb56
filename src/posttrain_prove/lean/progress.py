"""Measure how far scripts come: the tactic that fails, the goals left, and the potential of each state.

As for Coq, the potential of a state falls with its rank: 0 if no goal is open, else the first of RUNGS that
closes all of its goals. It depends on the state alone (coq/progress.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.search.protocol import Refused
from posttrain_prove.coq.progress import WORST, potential
from posttrain_prove.lean.judge import BoxedLean
from posttrain_prove.lean.source import Header
from posttrain_prove.lean.trials import Goals, Trial, run_trials

_HAND = "rfl | trivial | assumption | contradiction"
_SEARCH = f"{_HAND} | decide | omega | simp_all"
_RUNGS = (_HAND, _SEARCH, f"{_SEARCH} | aesop | linarith | ring | norm_num")
_CLOSING = tuple(f"all_goals (intros; first | {tactics})" for tactics in _RUNGS)
RUNGS = tuple(f"set_option maxHeartbeats 40000 in {tactic}" for tactic in _CLOSING)
"""Tactics that close all goals of a state of rank 1, 2 and 3; Lean without Mathlib knows the first two."""
_HEARTBEATS = 20_000
_MOST_TRIALS = 512


@dataclass(frozen=True)
class ScriptProgress:
    """The progress of a script: values after the statement, and after each tactic that succeeded."""

    goals: tuple[int, ...]
    """Numbers of open goals at each point."""
    potentials: tuple[float, ...]
    error: str = ""
    """Why the next tactic failed; "" if none did."""
    finish: str = ""
    """A tactic that closes the open goals; "" if none is known."""

    @property
    def failing(self) -> int | None:
        """The index of the first tactic that fails, from 0; None if none does."""
        return len(self.goals) - 1 if self.error else None


def measure_progress(
    lean: BoxedLean, axioms: tuple[str, ...], header: Header, scripts: Sequence[tuple[str, Sequence[str]]]
) -> list[ScriptProgress | None]:
    """Return the progress of each (form, tactics) on our prelude, None if the statement opens no proof.

    Every state, and the goals that each rung leaves, are a theorem of one file.
    """
    trials = [Trial(form, tuple(tactics[:k])) for form, tactics in scripts for k in range(len(tactics) + 1)]
    trials = list(dict.fromkeys(trials))
    states = dict(zip(trials, _run(lean, axioms, header, trials), strict=True))
    open_states = [trial for trial, state in states.items() if isinstance(state, Goals) and state.keys]
    rungs = _CLOSING[:2]  # the third needs Mathlib
    closing = [Trial(trial.form, (*trial.moves, rung)) for trial in open_states for rung in rungs]
    closed = dict(zip(closing, _run(lean, axioms, header, closing), strict=True))

    def rank(trial: Trial) -> tuple[int, str]:
        state = states[trial]
        if isinstance(state, Goals) and not state.keys:
            return 0, ""
        for number, rung in enumerate(rungs, 1):
            result = closed[Trial(trial.form, (*trial.moves, rung))]
            if isinstance(result, Goals) and not result.keys:
                return number, rung
        return WORST, ""

    def follow(form: str, tactics: Sequence[str]) -> ScriptProgress | None:
        goals, potentials, error, finish = [], [], "", ""
        first = WORST
        for k in range(len(tactics) + 1):
            trial = Trial(form, tuple(tactics[:k]))
            state = states[trial]
            if isinstance(state, Refused):
                error = state.reason
                break
            number, finish = rank(trial)
            first = first if k else number
            goals.append(len(state.keys))
            potentials.append(potential(number, first))
        return ScriptProgress(tuple(goals), tuple(potentials), error, finish) if goals else None

    return [follow(form, tactics) for form, tactics in scripts]


def _run(
    lean: BoxedLean, axioms: tuple[str, ...], header: Header, trials: Sequence[Trial]
) -> list[Goals | Refused]:
    return run_trials(lean, axioms, header, trials, lean.budget, _HEARTBEATS, _MOST_TRIALS)
