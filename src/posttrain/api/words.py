"""What is said to who types commands, as it is said to who writes Python."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from posttrain.types import RunError, UserError

PAIRS = (
    (r"--resume --run-dir (\S+)", r"dir='\1', resume=True"),
    (r"is verifier\.function \(reward= from Python\) here", "is reward= here"),
    (r"is optim\.lr here", "is lr= here"),
    (r"is run\.updates here", "is updates= here"),
    (r"the option --run-dir", "dir="),
    (r"the option --resume", "resume=True"),
    (
        r"say in \[task\.data\.columns\] which column is the (\w+)",
        r"say which column is the \1: task={'data': {'columns': {'\1': NAME}}}",
    ),
    (r"another --run-dir", "another dir"),
    (r"in --run-dir", "in dir"),
    (r"--run-dir", "dir"),
    (r"leave --resume out", "leave resume out"),
    (r"--resume", "resume=True"),
    (r"--set ", ""),
    (r"--model \S+", "the model"),
    (r"with --model", "with the model"),
    (r"add for example \[verifier\.number\]", "give reward=, as a function or 'number'"),
    (r"leave \[verifier\] out", "leave reward out"),
    (r"\[verifier\] is never read", "reward= is never read"),
    (r"give task\.data", "give data="),
    (r"give exactly one of (.*), not none", r"give data=, or in task={...} exactly one of \1"),
    (r"give task\.held_out", "give held_out="),
)


def in_python(text: str) -> str:
    """The text with keywords in place of options.

    >>> in_python("step_000002 is kept, go on with --resume --run-dir runs/a")
    "step_000002 is kept, go on with dir='runs/a', resume=True"
    """
    for pattern, keyword in PAIRS:
        text = re.sub(pattern, keyword, text)
    return text


@contextmanager
def python_words() -> Iterator[None]:
    """Within it what is raised speaks of keywords."""
    try:
        yield
    except UserError as error:
        where, mend = in_python(error.where), in_python(error.mend)
        told: BaseException = UserError(in_python(error.what), where=where, mend=mend)
        raise _as(told, error) from error.__cause__
    except RunError as error:
        raise _as(RunError(in_python(str(error))), error) from error.__cause__
    except KeyboardInterrupt as error:
        raise _as(KeyboardInterrupt(in_python(str(error))), error) from None


def _as(told: BaseException, error: BaseException) -> BaseException:
    """What is told in place of an error, with its notes: they say what is saved."""
    for note in getattr(error, "__notes__", ()):
        told.add_note(in_python(note))
    return told
