"""The known name that a misspelt one, or one of another trainer, was probably meant to be."""

import tomllib
from collections.abc import Container, Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Any


@cache
def other_trainers() -> dict[str, dict[str, str]]:
    """`here`: a recipe's keys by what TRL, verl and peft call them; `nowhere`: what to do about others."""
    file = resources.files(__package__).joinpath("other_trainers.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def elsewhere(name: str, known: Container[str] = ()) -> str:
    """What a name of another trainer is called in a recipe, or among these keys; empty if it is none.

    Of a dotted name the longest end that is known counts.

    >>> elsewhere("num_generations"), elsewhere("learning_rate", ["lr"]), elsewhere("colour")
    ('it is rollout.group_size here', "did you mean 'lr'?", '')
    """
    ends = [name.split(".", n)[-1] for n in range(name.count(".") + 1)]
    here, nowhere = other_trainers()["here"], other_trainers()["nowhere"]
    if advice := next((nowhere[end] for end in ends if end in nowhere), ""):
        return advice
    found = next((here[end] for end in ends if end in here), "")
    key = found.rpartition(".")[2]
    if key in known:
        return f"did you mean {key!r}?"
    return f"it is {found} here" if found else ""


def dotted(name: str, value: Any) -> str:
    """A name with those of its first value within tables, as verl's have it.

    >>> dotted("actor", {"optim": {"lr": 1e-6}})
    'actor.optim.lr'
    """
    while isinstance(value, Mapping) and value:
        key, value = next(iter(value.items()))
        name = f"{name}.{key}"
    return name


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
