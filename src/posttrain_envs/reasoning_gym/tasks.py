"""Problems of reasoning-gym's generators, held out by a hash of the question.

The library draws item i under seed s from Random(s + i), so that neighbouring seeds share nearly all items,
and a small generator repeats its questions under any seed. So the hash of a question decides, for every seed
and recipe, whether it may be trained on; and a question is used once.
"""

import dataclasses
import hashlib
import importlib.metadata
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

import numpy

from posttrain.base.libraries import library, require
from posttrain.base.name_hints import did_you_mean
from posttrain.base.usercode import cause
from posttrain.data.protocol import Games
from posttrain.process.interpreter import call_in_fresh_process
from posttrain.types import Task, UserError
from posttrain.verifiers.protocol import Verifier
from posttrain_envs.reasoning_gym.rules import refusal

WHERE = "task.reasoning_gym"
EVERY = 4
"""One question in `EVERY` is held out for good."""
_CHUNK = 1000
_PATIENCE = 8
"""Items drawn at most, as a multiple of the number of problems that are needed."""


@dataclass(frozen=True, kw_only=True)
class ReasoningGym:
    """Problems of reasoning-gym's generators; a question that is held out is trained on under no seed."""

    names: tuple[str, ...]
    """Names of the generators, for example ["chain_sum", "leg_counting"]."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Relative number of tasks of each generator, by name; 1 for others."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Configuration of each generator, by name, for example {chain_sum = {max_terms = 3}}."""
    levels: tuple[int, ...] = ()
    """Levels of the library's curricula, from 0: as many tasks of each, and its level is the `difficulty` of
    a task. Empty: each generator with its own defaults, without a difficulty."""
    train: int = 1000
    """Number of problems to train on."""
    held_out: int = 200
    """Number of problems that are only evaluated on."""
    template: str = "{question}\n\nGive the answer alone between <answer> and </answer>."
    """Text of the prompt; {question} is replaced by the generator's question."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) < len(self.names):
            raise ValueError("names must name different generators, one at least")
        for key in ("weights", "options"):
            for name in sorted(set(getattr(self, key)) - set(self.names)):
                raise ValueError(f"{key} names {name!r}, which is not among names")
        if not all(0 < weight < float("inf") for weight in self.weights.values()):
            raise ValueError("weights must be above 0")
        if min(self.levels, default=0) < 0 or len(set(self.levels)) < len(self.levels):
            raise ValueError("levels must be different numbers, 0 or more")
        if self.train < 1 or self.held_out < 0:
            raise ValueError("train must be 1 or more and held_out 0 or more")
        if "{question}" not in self.template:
            raise ValueError("the template has no {question}, so every prompt would be the same")

    def make(self, limit: int, seed: int, games: Games) -> tuple[list[Task], list[Task]]:
        """Return the tasks to train on, and at most `limit` that are only evaluated on."""
        train, held_out = problems(self)
        return train, held_out[:limit]

    def scorer(self) -> Verifier:
        """Return the library's own scorers."""
        from posttrain_envs.reasoning_gym.verifier import ReasoningGymScorer  # which imports this module

        return ReasoningGymScorer()


def problems(spec: ReasoningGym) -> tuple[list[Task], list[Task]]:
    """Return the problems to train on, and those held out, each in a random order fixed by the seed.

    They are generated in a process of their own. Raises UserError if the library is missing, rejects a name
    or an option, or has too few different questions.
    """
    require("reasoning_gym", WHERE)
    options = dataclasses.asdict(spec)
    parts = call_in_fresh_process(_generate_all, options, name=WHERE, endless=True)
    version = importlib.metadata.version("reasoning-gym")  # the library's own __version__ is an older one
    tasks_of_parts = ([_task(record, spec.template, version) for record in part] for part in parts)
    first, second = (
        sorted(part, key=lambda task: _digest(f"{spec.seed}/{task.id}")) for part in tasks_of_parts
    )
    return first, second


def is_held_out(question: str) -> bool:
    """Return whether a question is never trained on; white space does not matter."""
    return int(_digest(" ".join(question.split())), 16) % EVERY == 0


def dataset(name: str, options: Mapping[str, Any], level: int | None, *, seed: int = 0, size: int = 1) -> Any:
    """Return the library's dataset of this generator, configuration and level.

    Raises UserError for an unknown name, option or level, and for values that the library rejects.
    """
    gym = library("reasoning_gym").factory
    if name not in gym.DATASETS or name == "composite":
        names = sorted(gym.DATASETS.keys() - {"composite"})
        fix = "name its parts, with weights" if name == "composite" else did_you_mean(name, names)
        raise UserError(f"{WHERE}.names", f"there is no generator {name!r}", fix)
    factory, kind = gym.DATASETS[name]
    names = [option.name for option in dataclasses.fields(kind) if option.name not in ("seed", "size")]
    if wrong := sorted(set(options) - set(names)):
        fix = did_you_mean(wrong[0], names) or f"it has {', '.join(names)}"
        raise UserError(f"{WHERE}.options.{name}", f"{name} has no option {wrong[0]!r}", fix)
    config = kind() if level is None else _at_level(gym, name, level)
    try:
        return factory(dataclasses.replace(config, **options, seed=seed, size=size))
    except Exception as error:
        raise UserError(f"{WHERE}.options.{name}", f"{name} refuses it: {cause(error)}") from None


def _at_level(gym: Any, name: str, level: int) -> Any:
    """Return the library's configuration at a level of its curriculum."""
    if name not in gym.CURRICULA:
        problem, fix = f"{name} has no curriculum", "leave levels out, or set its options"
        raise UserError(f"{WHERE}.levels", problem, fix)
    curriculum = gym.create_curriculum(name)
    highest = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
    if level > highest:
        raise UserError(f"{WHERE}.levels", f"{name} has levels 0 to {highest}, not {level}")
    curriculum.set_global_level(level)
    return curriculum.generate_configuration()


def _generate_all(options: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the fields of the problems to train on and of those held out; runs in a process of its own."""
    spec = ReasoningGym(**options)
    out: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    total = sum(spec.weights.get(name, 1.0) for name in spec.names)
    before = 0.0
    for name in spec.names:
        after = before + spec.weights.get(name, 1.0) / total
        keys: set[str] = set()
        levels = spec.levels or (None,)
        for n, level in enumerate(levels):
            low, high = (before + (after - before) * (n + k) / len(levels) for k in (0, 1))
            counts = {
                for_tests: round(high * most) - round(low * most)
                for for_tests, most in ((False, spec.train), (True, spec.held_out))
            }
            records = _generate(spec, name, level, counts, keys)
            for for_tests, fields_of_part in records.items():
                out[for_tests] += fields_of_part
        before = after
    return out[False], out[True]


def _generate(
    spec: ReasoningGym, name: str, level: int | None, counts: Mapping[bool, int], keys: set[str]
) -> dict[bool, list[dict[str, Any]]]:
    """Return the requested number of different questions. Raises UserError if there are too few."""
    records: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    least = max(counts[True] * EVERY, counts[False])
    item_count, options = 0, spec.options.get(name, {})
    for item in islice(_items(spec, name, level), _PATIENCE * least + _CHUNK):
        if all(len(records[part]) >= counts[part] for part in counts):
            break
        item_count += 1
        question, key = item["question"], _digest(" ".join(item["question"].split()))
        part = is_held_out(question)
        gold = item["answer"]
        if gold is not None and (not gold.strip() or refusal(name, gold, gold, item["metadata"])):
            continue  # "" would be right, or the library's own answer is wrong
        if key in keys or len(records[part]) >= counts[part]:
            continue
        keys.add(key)
        fields = {"generator": name, "options": options, "question": question, "metadata": item["metadata"]}
        if level is not None:
            fields["difficulty"] = level
        records[part].append({"id": f"{name}-{key[:16]}", "answer": gold, "fields": fields})
    if all(len(records[part]) >= counts[part] for part in counts):
        return records
    at = "" if level is None else f" at level {level}"
    problem = (
        f"{name}{at} has too few different questions: among {item_count} items were {len(records[False])} "
        f"to train on, of {counts[False]}, and {len(records[True])} to hold out, of {counts[True]}"
    )
    raise UserError(WHERE, problem, "ask for fewer, give it less weight, or widen it by its options")


def _items(spec: ReasoningGym, name: str, level: int | None) -> Iterator[dict[str, Any]]:
    """Yield items without end, in chunks whose seeds lie far apart."""
    for n in count():
        seed = int(_digest(f"{spec.seed}/{name}/{level}/{n}"), 16) % 2**31
        random.seed(seed)  # some generators draw from the global state
        numpy.random.seed(seed)
        chunk = dataset(name, spec.options.get(name, {}), level, seed=seed, size=_CHUNK)
        for i in range(_CHUNK):
            try:
                yield chunk[i]
            except Exception as error:
                raise UserError(WHERE, f"{name} makes no problem: {cause(error)}") from None


def _task(record: Mapping[str, Any], template: str, version: str) -> Task:
    text = template.replace("{question}", record["fields"]["question"])
    return Task(
        id=record["id"],
        messages=({"role": "user", "content": text},),
        answer=record["answer"],
        fields=record["fields"],
        source=f"reasoning_gym {version}",
    )


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
