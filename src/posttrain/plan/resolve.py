"""Resolve a recipe without a model: build its method, load its tasks, and check its verifier."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from posttrain.base.name_hints import did_you_mean
from posttrain.curriculum.curriculum import build_supply
from posttrain.curriculum.select import selection
from posttrain.data import Data, Ranking, load_conversations, load_labelled, load_rankings, load_steps
from posttrain.data.gather import summary
from posttrain.envs.protocol import Env, Player
from posttrain.methods.build import build
from posttrain.methods.policy_gradient import RewardPart
from posttrain.methods.table import Line, line
from posttrain.plan.hints import OF_THE_ANSWER, check_hint
from posttrain.recipe.config import in_source
from posttrain.recipe.recipe import Recipe
from posttrain.recipe.rule import Context
from posttrain.recipe.rules import check
from posttrain.recipe.settings import Evaluation
from posttrain.recipe.tasks import TaskChoice, make_evaluation_tasks, make_tasks
from posttrain.report.glossary import source_in, unknown_metric, words
from posttrain.report.headline import direction
from posttrain.types import Method, Task, UserError
from posttrain.verifiers.combine.combined import Combined
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import Unjudged, Verifier
from posttrain.verifiers.self_test import self_test


@dataclass(frozen=True)
class Resolved:
    """A recipe with its method, its tasks and their verifier or environment."""

    recipe: Recipe
    line: Line
    method: Method
    train: Sequence[Any]
    """Tasks, or the records of an offline method: conversations, rankings, labelled answers or steps."""
    held_out: Sequence[Any]
    verifier: Verifier | None
    """None for a mixture, whose sources have their own."""
    env: Env | None
    sources: tuple["Resolved", ...] = ()
    """Of a mixture: each source of tasks, as the recipe of a run on it alone."""
    evaluated: tuple["Resolved", ...] = ()
    """The sources of [[eval.task]], as online recipes without tasks to train on."""

    @property
    def parts(self) -> tuple["Resolved", ...]:
        """Return the sources of a mixture, or else this recipe as the only one."""
        return self.sources or (self,)

    @property
    def name(self) -> str:
        """Return the name of the only source, or ""."""
        return self.recipe.source.name

    def with_parts(self, parts: Sequence["Resolved"]) -> "Resolved":
        """Return the recipe with these in place of `parts`, joined if there are several."""
        return replace(join(self.recipe, parts), evaluated=self.evaluated) if self.sources else parts[0]

    @property
    def asked(self) -> tuple["Resolved", ...]:
        """Return the sources whose tasks are answered: those of an online method, and of [[eval.task]]."""
        return (*(self.parts if self.online else ()), *self.evaluated)

    @property
    def players(self) -> dict[str, Player]:
        """Return by the name of its source what judges or plays a task."""
        return {part.name: Player(part.verifier, part.env) for part in self.asked}

    @property
    def online(self) -> bool:
        """True if the policy is sampled."""
        return self.line.loop == "online"


def join(recipe: Recipe, sources: Sequence[Resolved]) -> Resolved:
    """Return a mixture of these sources; the tasks of one with weight 0 are held out alone.

    Raises UserError if an option of the method means different things for games and for answers.
    """
    longest = max(source.recipe.sampling.max_new_tokens for source in sources)
    horizon = max(_horizon(source.recipe, source.env) for source in sources)
    scored = [_is_scored(source.recipe, source.env) for source in sources]
    parts = {source.name: getattr(source.method, "reward_parts", ()) for source in sources}
    if any(parts.values()):  # the only part of another source's reward is the whole
        parts = {name: columns or (RewardPart(name, "", 1.0),) for name, columns in parts.items()}
    method = _build_method(recipe, horizon, scored=all(scored), parts=tuple(chain(*parts.values())))
    others = _build_method(recipe, horizon, scored=any(scored))
    mixes = any(scored) and not all(scored)
    if mixes and getattr(method, "shaped", None) != getattr(others, "shaped", None):
        problem = "rewards are discounted otherwise in games than in answers, and the sources have both"
        raise UserError("method.gamma", problem, "leave it out, or train on one kind")
    return Resolved(
        recipe=replace(recipe, sampling=replace(recipe.sampling, max_new_tokens=longest)),
        line=sources[0].line,
        method=method,
        train=[task for source in sources for task in source.train],
        held_out=[task for source in sources for task in source.held_out],
        verifier=None,
        env=None,
        sources=tuple(sources),
    )


def _horizon(recipe: Recipe, env: Env | None) -> int:
    """Return the most tokens that the policy samples in an episode."""
    agent = recipe.source.agent
    return recipe.sampling.max_new_tokens * (agent.max_calls if agent else getattr(env, "max_turns", 1))


def _is_scored(recipe: Recipe, env: Env | None) -> bool:
    """Return whether a step's reward is an advance on the score; those of a game are discounted unchanged."""
    return not (env or recipe.source.agent)


def _build_method(
    recipe: Recipe, horizon: int, *, scored: bool, parts: tuple[RewardPart, ...] = ()
) -> Method:
    options = dict(recipe.method)
    return build(options.pop("name"), options, horizon=horizon, potentials=scored, parts=parts)


def _reward_parts(task: TaskChoice, verifier: Verifier | None, env: Env | None) -> tuple[RewardPart, ...]:
    """Return the parts of the reward of this source's answers; empty if it has no parts."""
    judge = getattr(env, "judge", None) if task.tools or task.repair else verifier
    addends = judge.addends if isinstance(judge, Combined) else {}
    return tuple(RewardPart(task.name, name, weight) for name, weight in addends.items())


def build_players(recipe: Recipe) -> dict[str, Player]:
    """Return by the name of its source what judges or plays a task of the recipe."""
    contexts = [build_context(source) for source in recipe.split()]
    return {context.task.name: Player(context.verifier, context.env) for context in contexts}


def build_context(recipe: Recipe, ranks: int = 1) -> Context:
    """Build the method and the verifier or environment of a recipe with one source, for its rules.

    Raises UserError if one cannot be built.
    """
    table_line = line(recipe.method.get("name", ""))
    task, online = recipe.source, table_line.loop == "online"
    verifier, env = recipe.build_verifier_and_env() if online else (None, None)
    scored, parts = online and _is_scored(recipe, env), _reward_parts(task, verifier, env)
    method = _build_method(recipe, _horizon(recipe, env), scored=scored, parts=parts)
    if "teacher" in method.asks and not (verifier or env or task.agent or task.tools or task.repair):
        verifier = Unjudged()  # the teacher trains; a verifier would only measure
    return Context(recipe, table_line, built=method, verifier=verifier, env=env, ranks=ranks)


def resolve_recipe(
    recipe: Recipe, say: Callable[[str], None] = lambda text: None, *, ranks: int = 1
) -> Resolved:
    """Build the method, tasks and verifier of a recipe, and check them as far as possible without a model.

    `say` receives the recognised format of records. ranks: number of learner ranks.

    Raises UserError for an impossible combination, and for the first fault of the data.
    """
    names = {source.name for source in (*recipe.task, *recipe.eval.task)} - {""}
    if (condition := recipe.run.condition) and condition.metric != "update":
        _check_metric("run.stop_when", condition.metric, names)
    best, _ = direction(recipe.checkpoint.best_metric)
    if best:
        _check_metric("checkpoint.best", best, names)
        if not best.startswith("eval/"):
            fix = f"did you mean 'eval/{best}'?" if words([f"eval/{best}"]) else "take one of eval/"
            raise UserError("checkpoint.best", f"{best!r} is not measured by evaluations", fix)
    sources, several = [], len(recipe.task) > 1
    for number, choice in enumerate(recipe.task):
        prefixed = partial(_say_of, choice.name, say) if several else say
        with in_source(number, len(recipe.task)):
            source = recipe.take_source(number)
            sources.append(_resolve_source(source, recipe.task, prefixed, ranks))
    resolved = join(recipe, _with_unique_ids(sources)) if several else sources[0]
    return replace(resolved, evaluated=tuple(_resolve_evaluation(recipe, say)))


def _resolve_evaluation(recipe: Recipe, say: Callable[[str], None]) -> Iterator[Resolved]:
    """Yield the sources of [[eval.task]]."""
    for number, choice in enumerate(recipe.eval.task if recipe.eval.limit else ()):
        with in_source(number, len(recipe.eval.task), "eval.task"):
            source = recipe.take_evaluation(number)
            context = build_context(source)
            check(context)
            judge = source.build_verifier()
            if judge:
                judge.require()
            if choice.data is not None and choice.held_out is None:  # its prompts are those of held-out tasks
                choice = replace(choice, held_out=choice.data)
                source = replace(source, task=(choice,))
            tasks = make_evaluation_tasks(
                choice, recipe.eval.limit, recipe.run.seed, partial(_say_of, choice.name, say)
            )
            if judge:
                tasks = _skip_unjudgeable(judge, choice.held_out, tasks, say)
                _test_judge(source, judge, tasks, partial(_say_of, choice.name, say))
            yield Resolved(source, context.line, context.method, [], tasks, context.verifier, context.env)


def _test_judge(recipe: Recipe, judge: Verifier, tasks: Sequence[Task], say: Callable[[str], None]) -> None:
    """Raise UserError if a verifier misjudges known answers to these tasks (verifiers/self_test.py)."""
    r = recipe.rollout
    if not judge.trusted:  # a prover takes seconds
        say(f"testing the verifier {judge.name} on known answers")
    with Pool(workers=r.workers, deadline_s=r.deadline_s, memory_mb=r.memory_mb) as pool:
        self_test(judge, tasks, pool)


def _say_of(name: str, say: Callable[[str], None], text: str) -> None:
    say(f"{name}: {text}")


def _with_unique_ids(sources: Sequence[Resolved]) -> list[Resolved]:
    """Return sources in which no two tasks share an id: if two do, all ids get the name of their source."""
    counts = Counter(task.id for source in sources for task in source.train if isinstance(task, Task))
    held_out = Counter(task.id for source in sources for task in source.held_out if isinstance(task, Task))
    if max((*counts.values(), *held_out.values()), default=0) <= 1:
        return list(sources)

    def prefixed(tasks: Sequence[Any], name: str) -> list[Any]:
        return [replace(task, id=f"{name}/{task.id}") for task in tasks]

    return [
        replace(s, train=prefixed(s.train, s.name), held_out=prefixed(s.held_out, s.name)) for s in sources
    ]


def _resolve_source(
    recipe: Recipe, sources: Sequence[TaskChoice], say: Callable[[str], None], ranks: int
) -> Resolved:
    """Resolve a recipe with one source of tasks, which is one of `sources`."""
    context = replace(build_context(recipe, ranks), sources=sources)
    check(context)
    method, name, task = context.method, context.name, recipe.source
    if context.online:
        selection(recipe.rollout.select, 0.0)  # raises UserError
        if judge := recipe.build_verifier():
            judge.require()  # before tasks are made, which may take minutes
        train, held_out = make_tasks(task, recipe.eval.limit, recipe.run.seed, say)
        if not train and task.weight:
            raise UserError(
                "task", "there are no tasks to train on", "give others, or evaluate in [[eval.task]]"
            )
        train = train if task.weight else []
        if recipe.reference.hint and train:
            check_hint(recipe.reference.hint_fields, train)
            _check_hint_of_answers(recipe, judge)
        if judge:
            train = _skip_unjudgeable(judge, task.data, train, say)
            held_out = _skip_unjudgeable(judge, task.held_out, held_out, say)
        if train:
            build_supply(recipe.curriculum, train, seed=recipe.run.seed)  # raises UserError
        if task.tools:
            task.tools.require()
        if task.agent:
            task.agent.check()
        for part in recipe.verifier.build_parts():
            part.check_all(train)
        if judge:
            _test_judge(recipe, judge, [*train, *held_out], say)
        return Resolved(recipe, context.line, method, train, held_out, context.verifier, context.env)
    records, held_out_records = _load_records(recipe, context.line, say)
    records = records if task.weight else []
    if "value" in method.needs:
        _check_rewards(name, records)
    if context.line.learns == "labels":
        _check_labels(name, method, (*records, *held_out_records))
    if "margins" in method.asks:
        _check_margins(name, (*records, *held_out_records))
    return Resolved(recipe, context.line, method, records, held_out_records, None, None)


def resolve_given(recipe: Recipe, say: Callable[[str], None]) -> Resolved:
    """Resolve the conversations of the data that an online method trains on too (`rollout.given_answers`).

    Raises UserError for a task without an answer.
    """
    sources, conversations = list[Resolved](), line("kd")
    for number, choice in enumerate(recipe.task):
        with in_source(number, len(recipe.task)):
            source = recipe.take_source(number)
            source = replace(source, task=(replace(choice, held_out=None),), eval=Evaluation(limit=0))
            records = _load_records(source, conversations, say)[0] if choice.weight else []
            method = _build_method(source, _horizon(source, None), scored=False)
            sources.append(Resolved(source, conversations, method, records, [], None, None))
    return join(recipe, sources) if len(sources) > 1 else sources[0]


def _check_hint_of_answers(recipe: Recipe, judge: Verifier | None) -> None:
    """Raise UserError if a hint names what no answer of the run will have."""
    names = recipe.reference.hint_fields & set(OF_THE_ANSWER)
    if names and judge is None:
        problem = f"{{{min(names)}}} is a verifier's, and no verifier is given"
        raise UserError("reference.hint", problem, "give a [verifier], or take a field of the task")
    if "sibling" in names and recipe.rollout.group_size < 2:
        problem = "{sibling} is another answer to the task, and rollout.group_size is 1"
        raise UserError("reference.hint", problem, "set rollout.group_size to 2 or more")


def _skip_unjudgeable(
    judge: Verifier, data: Data | None, tasks: list[Task], say: Callable[[str], None]
) -> list[Task]:
    """Leave out tasks that the verifier cannot judge, and report why, if the data has bad = "skip"."""
    if data is None or data.bad != "skip":
        return tasks
    faults: dict[int, UserError] = {}
    for n, task in enumerate(tasks):
        try:
            judge.check(task)
        except UserError as fault:
            faults[n] = fault
    return skip_tasks(tasks, faults, f"{judge.name} can judge", say)


def skip_tasks(
    tasks: Sequence[Task], faults: Mapping[int, UserError], able: str, say: Callable[[str], None]
) -> list[Task]:
    """Leave out the tasks at these places and report why; raise UserError ("{able} none") if none remains."""
    usable = [task for n, task in enumerate(tasks) if n not in faults]
    if not faults:
        return usable
    if not usable:
        first = next(iter(faults.values()))
        problem = f"{able} none of the {len(tasks)} tasks; the first: {first.problem}"
        raise UserError(first.key, problem, first.fix)
    file, reasons = tasks[0].source.rpartition(":")[0], summary(list(faults.values()), reasons=True)
    say(f"{file}: {len(faults)} of {len(tasks)} tasks skipped: {reasons}")
    return usable


def _check_rewards(name: str, conversations: Sequence[Any]) -> None:
    """Raise UserError for the first answer without a finite reward."""
    for record in conversations:
        reward = getattr(record, "reward", None)
        if reward is None:
            raise UserError(
                record.source,
                f"{name} learns from rewards, and the answer of {record.id!r} has none",
                'give each record a field "reward"',
            )
        number = isinstance(reward, (int, float)) and not isinstance(reward, bool)
        if not (number and math.isfinite(reward)):
            raise UserError(record.source, f"the reward is {reward!r}", "a finite number")


def _check_margins(name: str, rankings: Sequence[Ranking]) -> None:
    """Raise UserError for the first ranking without scores, whose answers have no margin."""
    for ranking in (r for r in rankings if not r.scored):
        problem = f"{name} learns by how much an answer is better, "
        problem += f"and of {ranking.id!r} only the order is known"
        fix = "give each record scores or a margin, or take method.name = 'reward' without method.margin"
        raise UserError(ranking.source, problem, fix)


def _check_labels(name: str, method: Method, answers: Sequence[Ranking]) -> None:
    """Raise UserError for a label that is not a probability, and if all labels have the same sign."""
    if "probabilities" in method.asks:
        for answer in answers:
            if not 0 <= answer.scores[0] <= 1:
                raise UserError(
                    answer.source,
                    f"{name} learns right and wrong, and the label of {answer.id!r} is {answer.scores[0]:g}",
                    "give a label from 0 to 1, or take method.name = 'reward_regression'",
                )
    signs = {answer.scores[0] > 0 for answer in answers}
    if "both signs" in method.asks and len(signs) == 1:
        labels = "above 0, so all are wanted" if True in signs else "0 or less, so none is wanted"
        raise UserError(
            "task.data",
            f"{name} tells good answers from bad ones, and all labels are {labels}",
            "give true or false, or numbers on both sides of 0",
        )


def _check_metric(key: str, metric: str, names: Collection[str]) -> None:
    """Raise UserError at `key` for a metric that does not exist, or of a source with another name."""
    if not words([metric]):
        raise unknown_metric(key, metric)
    if (source := source_in(metric)) and source not in names:
        fix = did_you_mean(source, names) or f"the sources are {', '.join(sorted(names)) or 'not named'}"
        raise UserError(key, f"{metric!r} is of no source of tasks", fix)


def _load_records(
    recipe: Recipe, table_line: Line, say: Callable[[str], None]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the training records and the held-out records of an offline method."""
    choice = recipe.source
    if choice.text is not None:
        return [choice.text], [choice.held_out_text] if choice.held_out_text and recipe.eval.limit else []
    if choice.data is None:
        train, held_out = make_tasks(choice, recipe.eval.limit, recipe.run.seed, say)
        return [_with_answer(t) for t in train], [_with_answer(t) for t in held_out]
    loaders: Mapping[str, Callable[..., Sequence[Any]]] = {
        "answers": load_conversations,
        "rankings": load_rankings,
        "labels": load_labelled,
        "steps": load_steps,
    }
    load = loaders[table_line.learns]
    held_out_records = load(choice.held_out, say=say)[: recipe.eval.limit] if choice.held_out else []
    return load(choice.data, say=say), held_out_records


def _with_answer(task: Task) -> Task:
    """Add the answer, or the proof, as the assistant's turn, for supervised fine-tuning."""
    answer = task.answer or task.fields.get("gold")
    if not answer:
        raise UserError(task.source, f"task {task.id!r} has no answer that could be imitated")
    return Task(
        id=task.id,
        messages=(*task.messages, {"role": "assistant", "content": answer}),
        source=task.source,
    )
