"""For Griffe: the examples of docstrings, which stand in them bare, as fenced blocks of the site."""

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"(?:^>>> .*\n(?:^(?!\s*$).*(?:\n|\Z))*)+", re.MULTILINE)


class Fenced(Extension):
    """Fences what begins with >>> and ends at an empty line."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrites one docstring."""
        if obj.docstring and ">>> " in obj.docstring.value:
            obj.docstring.value = EXAMPLE.sub(
                lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", obj.docstring.value + "\n"
            )
