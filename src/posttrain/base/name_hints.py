"""Hints for unknown names: the nearest known name, or what a name of another trainer is called here."""

import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Any, Literal

from posttrain.errors import spell_key


@cache
def names_of_other_trainers(table: Literal["here", "nowhere", "methods", "other_methods"]) -> dict[str, str]:
    """Return the names of other trainers in a table of other_trainers.toml, with their translations.

    here: to the key of a recipe. nowhere: to what to do instead. methods: to the method in methods/table.py.
    other_methods: to the nearest method, for methods that posttrain does not have.
    """
    text = resources.files(__package__).joinpath("other_trainers.toml").read_text(encoding="utf-8")
    return {name: hint for hint, names in tomllib.loads(text)[table].items() for name in names.split()}


def translate_name(name: str, candidates: Container[str] = (), table: str = "") -> str:
    """Return a hint for a name of another trainer, or "" for any other name.

    The hint names one of `candidates`, else a key of a recipe, or what to do instead. Of a dotted name the
    longest translated end counts. table: that of the candidates, if the name lies deeper.

    >>> translate_name("num_generations"), translate_name("learning_rate", ["lr"]), translate_name("colour")
    ('it is rollout.group_size here', "did you mean 'lr'?", '')
    >>> translate_name("task.sampling.stop", ["stop"], "task")
    'it is task.stop here'
    """
    here, nowhere = names_of_other_trainers("here"), names_of_other_trainers("nowhere")
    ends = [name.split(".", n)[-1] for n in range(name.count(".") + 1)]
    end = next((end for end in ends if end in here or end in nowhere), "")
    if end in nowhere:
        return nowhere[end]
    key = here.get(end, "")
    last_part = key.rpartition(".")[2]
    if last_part in candidates and table:
        return f"it is {table}.{last_part} here"
    if last_part in candidates:
        return f"did you mean {last_part!r}?"
    return f"it is {spell_key(key)} here" if key else ""


def dotted_names(name: str, value: Any) -> Iterator[str]:
    """Yield the dotted names of the values in a table, as verl has them; of a plain value `name` itself.

    >>> list(dotted_names("actor", {"optim": {"lr": 1e-6, "eps": 1e-8}, "shuffle": False}))
    ['actor.optim.lr', 'actor.optim.eps', 'actor.shuffle']
    """
    if not isinstance(value, Mapping) or not value:
        yield name
        return
    for key, inner in value.items():
        yield from dotted_names(f"{name}.{key}", inner)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return a question with the nearest candidate, or "" if none is near.

    >>> did_you_mean("anwser", ["question", "answer"])
    "did you mean 'answer'?"
    >>> did_you_mean("x", ["question", "answer"])
    ''
    """
    name_meant = nearest(name, candidates)
    return f"did you mean {name_meant!r}?" if name_meant else ""


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return the nearest candidate, ignoring case, or "" if none is near."""
    lower = {k.lower(): k for k in candidates}
    # Of matches of one distance, letters in another order are the likelier mistake: gpro is grpo, not gspo.
    matches = get_close_matches(name.lower(), lower, n=3, cutoff=0.7)
    swapped = [match for match in matches if sorted(match) == sorted(name.lower())]
    return lower[[*swapped, *matches][0]] if matches else ""
