"""The known name that a misspelt one, or one of another trainer, was probably meant to be."""

import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Any, Literal

from posttrain.errors import spelled


@cache
def named_elsewhere(table: Literal["here", "nowhere", "methods", "other_methods"]) -> dict[str, str]:
    """Names of other trainers: of those that have a key of a recipe that key, of the rest what to do.

    methods: of methods, what the table of methods calls them; other_methods: what is nearest to those that
    it does not have.
    """
    text = resources.files(__package__).joinpath("other_trainers.toml").read_text(encoding="utf-8")
    return {name: said for said, names in tomllib.loads(text)[table].items() for name in names.split()}


def elsewhere(name: str, known: Container[str] = ()) -> str:
    """What a name of another trainer is called in a recipe, or among these keys; empty if it is none.

    Of a dotted name the longest end that is known counts.

    >>> elsewhere("num_generations"), elsewhere("learning_rate", ["lr"]), elsewhere("colour")
    ('it is rollout.group_size here', "did you mean 'lr'?", '')
    """
    here, nowhere = named_elsewhere("here"), named_elsewhere("nowhere")
    ends = [name.split(".", n)[-1] for n in range(name.count(".") + 1)]
    end = next((end for end in ends if end in here or end in nowhere), "")
    if end in nowhere:
        return nowhere[end]
    found = here.get(end, "")
    key = found.rpartition(".")[2]
    if key in known:
        return f"did you mean {key!r}?"
    return f"it is {spelled(found)} here" if found else ""


def within(name: str, value: Any) -> Iterator[str]:
    """A name with those of the values within its tables, as verl's have it.

    >>> list(within("actor", {"optim": {"lr": 1e-6, "eps": 1e-8}, "shuffle": False}))
    ['actor.optim.lr', 'actor.optim.eps', 'actor.shuffle']
    """
    if not isinstance(value, Mapping) or not value:
        yield name
        return
    for key, inner in value.items():
        yield from within(f"{name}.{key}", inner)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the nearest known name; empty if none is near.

    >>> did_you_mean("anwser", ["question", "answer"])
    "did you mean 'answer'?"
    >>> did_you_mean("x", ["question", "answer"])
    ''
    """
    found = nearest(name, known)
    return f"did you mean {found!r}?" if found else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is nearest, in any case of letters; empty if none is near."""
    lower = {k.lower(): k for k in known}
    # As near as others, letters in another order are the likelier slip: gpro is grpo, not gspo.
    found = get_close_matches(name.lower(), lower, n=3, cutoff=0.7)
    swapped = [each for each in found if sorted(each) == sorted(name.lower())]
    return lower[[*swapped, *found][0]] if found else ""
