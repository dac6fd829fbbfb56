"""Read the answers that a run recorded in samples/, with their tasks and the verifiers of its sources."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.base.name_hints import did_you_mean
from posttrain.errors import counted
from posttrain.evaluation.verdicts import Judges, RecordedAnswer, Response, parse_prompt
from posttrain.methods.table import line
from posttrain.recipe import config
from posttrain.recipe.document import parse_override, read_toml
from posttrain.recipe.recipe import Recipe
from posttrain.recipe.tasks import make_evaluation_tasks, make_tasks
from posttrain.recipe.verifier import read_verifier, verifier_file
from posttrain.report.record import Samples, number, read_json_lines, samples_in
from posttrain.types import Task, UserError


@dataclass(frozen=True)
class RecordedTasks:
    """The tasks that the recipe of a run makes, to be found by the lines of its samples."""

    recipe: Recipe
    problems: list[str] = field(default_factory=list)
    """Why the tasks of a source cannot be made, a line for each such source."""
    _tasks: dict[tuple[bool, str, str], Task] = field(default_factory=dict)
    """By (whether it is evaluated on, name of its source, id): training and evaluation may share ids."""
    _stops: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The stop strings of each source, by its name."""

    def __post_init__(self) -> None:
        for part, evaluated in _sources(self.recipe):
            source, limit, seed = part.source, part.eval.limit, part.run.seed
            self._stops[source.name] = part.sampling.stop
            try:
                if evaluated:
                    of_kind = {True: make_evaluation_tasks(source, limit, seed)}
                else:
                    of_kind = dict(zip((False, True), make_tasks(source, limit, seed), strict=True))
            except UserError as error:
                name = f"of {source.name!r}" if source.name else "of its recipe"
                self.problems.append(f"the tasks {name} cannot be made: {error}")
                continue
            for is_held_out, tasks in of_kind.items():
                self._tasks.update({(is_held_out, source.name, task.id): task for task in tasks})

    @property
    def sources(self) -> list[str]:
        """Return the names of the sources; that of a single source may be empty."""
        return list(self._stops)

    def find(self, file: Samples, row: Mapping[str, Any]) -> Task | None:
        """Return the task of a line of this file; the same object for the same task."""
        dataset, task_id = _source(row), str(row.get("task"))
        # The sources of a mixture whose ids repeat have their name before each id.
        for name in (task_id, task_id.removeprefix(f"{dataset}/")):
            if task := self._tasks.get((file.kind == "eval", dataset, name)):
                return task
        return None

    def last_answer(self, row: Mapping[str, Any]) -> str:
        """Return the last answer of a line as it was judged: to the end of the first stop string.

        The token that ended it is left out.
        """
        pieces, sampled = list(row.get("pieces") or ()), list(row.get("sampled") or ())
        while sampled and not sampled[-1]:
            sampled.pop()
        first = len(sampled) - sampled[::-1].index(False) if False in sampled else 0
        last = len(sampled) - (row.get("stop") == "eos")
        text = "".join(map(str, pieces[first:last]))
        stops = self._stops.get(_source(row), ()) if row.get("stop") == "stop" else ()
        return text[: min((text.index(stop) + len(stop) for stop in stops if stop in text), default=None)]


def read_recorded(
    run: Path,
    update: int | None = None,
    source: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[RecordedAnswer]:
    """Return the answers in a run's samples/*.jsonl, in order; of episodes of several turns the last one.

    update: only the answers of this update and of the evaluation after it. source: only those to the tasks of
    this source. The tasks are those of the run's recipe. One that the recipe no longer makes, as its data is
    gone, has only the recorded prompt and answer; `say` receives a line that counts such tasks.

    Raises UserError if no answers are recorded.
    """
    files, notes = samples_in(run / "samples")
    updates = sorted({file.update for file in files})
    if not files:
        cause = notes[0] if notes else "samples/ has no file: an offline run samples no answers"
        raise UserError(str(run), f"no answers are recorded; {cause}")
    if update is not None and update not in updates:
        problem = f"no answers of update {update} are recorded"
        raise UserError("--update", problem, f"there are updates {updates[0]} to {updates[-1]}")
    tasks = RecordedTasks(config.read(run / "config.toml").recipe)
    names = [name for name in tasks.sources if name]
    if source is not None and source not in names:
        problem = f"the run has no source {source!r}; it has {', '.join(names) or 'one without a name'}"
        raise UserError("--source", problem, did_you_mean(source, names) or "name another, or leave it out")
    answers: dict[tuple[object, ...], RecordedAnswer] = {}
    unknown: dict[tuple[str, str, str], Task] = {}
    for file in files:
        if update is not None and file.update != update:
            continue
        rows, notes = read_json_lines(file.path)
        for note in notes:
            say(f"{file.path}: {note}")
        for row in rows:
            if source is not None and _source(row) != source:
                continue
            task = tasks.find(file, row)
            if task is None:
                place = (file.kind, _source(row), str(row.get("task")))
                task = unknown.setdefault(place, _recorded_task(row))
            name = file.path.stem
            key = (name, row.get("group"), row.get("sample"))
            response = Response(task, tasks.last_answer(row), group=f"{name}/{row.get('group')}")
            recorded = RecordedAnswer(
                response, name, int(row.get("sample") or 0), str(row.get("label")), number(row.get("score"))
            )
            answers.setdefault(key, recorded)  # further conversations of an agent have the same key
    if source is not None and not answers:
        raise UserError(
            "--source", f"no answers of {source!r} are recorded here", "name another, or leave it out"
        )
    if unknown:
        known_by = f"note: {counted(len(unknown), 'task')} known only by prompt and answer"
        say("; ".join([known_by, *tasks.problems]))
    return list(answers.values())


def _sources(recipe: Recipe) -> list[tuple[Recipe, bool]]:
    """Return the recipe of each source whose tasks a run answers, and whether it is one of [[eval.task]].

    An offline method answers those of [[eval.task]] alone.
    """
    is_online = line(recipe.method["name"]).loop == "online"
    trained = [recipe.take_source(n) for n in range(len(recipe.task))] if is_online else []
    evaluated = [recipe.take_evaluation(n) for n in range(len(recipe.eval.task))]
    return [*((part, False) for part in trained), *((part, True) for part in evaluated)]


def _source(row: Mapping[str, Any]) -> str:
    return str(row.get("dataset") or "")


def _recorded_task(row: Mapping[str, Any]) -> Task:
    answer = row.get("answer")
    return Task(
        id=str(row.get("task")),
        messages=parse_prompt(row.get("prompt")),
        answer=answer if isinstance(answer, str) else None,
        answer_value=answer,
        dataset=_source(row),
    )


# ---------------------------------------------------------------------- what judges them


def read_judges(name: str, overrides: Sequence[str] = ()) -> Judges:
    """Return the verifier that `read_verifier` knows by this name, or those of a recipe's or run's sources.

    overrides: "option=value" of [verifier] or of the verifier named, or "task.NAME.verifier.OPTION=value".
    """
    file = verifier_file(name)
    if file is None or "task" not in read_toml(file)[0]:
        return Judges(default=read_verifier(name, overrides))
    keys = [parse_override(assignment, f"--set {assignment}")[0] for assignment in overrides]
    assignments = [
        text if key.split(".")[0] in ("verifier", "task", "eval") else f"verifier.{text}"
        for key, text in zip(keys, overrides, strict=True)
    ]
    loaded = config.read(file, assignments)
    recipe = loaded.recipe
    with loaded.located():
        by_source = {part.source.name: part.build_verifier() for part, _ in _sources(recipe)}
        only = next(iter(by_source.values())) if len(by_source) == 1 else None
        return Judges(by_source, recipe.verifier.build() or only)
