"""Run a submission inside its box. The text of this file is sent there; posttrain cannot be imported.

The submission shares this process and can read and change everything in it. That is harmless: no expected
answer is here, and the grader takes every message for the submission's own result. The grader sends
marshalled messages; this process answers in text that the grader decodes with its own parser
(`decoding.decode`).

    stdio   the program is `__main__`; its stdin is a file, and the channel is closed before it starts
    call    the program is loaded once; each call runs in a fork of that process
"""

import _sitebuiltins
import builtins
import gc
import marshal
import os
import sys
import types
from _collections_abc import Callable

from posttrain.verifiers.code.wire import channel, dump, receive, send

TYPING = ("Any", "Callable", "Deque", "Dict", "Iterable", "List", "Optional", "Set", "Tuple", "Union")
"""Names that websites with such tasks import before the submission."""


def fault(nonce: str, error: BaseException) -> None:
    """Send an exception: its class name, its text, and the builtin class that it derives from."""
    name = type(error).__name__
    builtin = next((k.__name__ for k in type(error).__mro__ if getattr(builtins, k.__name__, None) is k), "")
    try:
        text = str(error)[:300]
    except BaseException:
        text = ""
    if isinstance(error, OSError) and error.errno in (1, 13, 30):
        name = "PermissionError"
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == 12):
        name = "MemoryError"
    send(f'["raised","{nonce}",{dump(name)},{dump(text)},{dump(builtin)}]')


def compiled(sources: "list[str]", name: str) -> types.CodeType:
    """Compile the first source that is valid Python. Raises the error of the first if none is."""
    first: BaseException | None = None
    for source in sources:
        try:
            return compile(source, name, "exec", dont_inherit=True)
        except BaseException as error:
            first = first or error
    raise first or SyntaxError("there is no program")


def as_program(sources: "list[str]", text: bytes, nonce: str) -> None:
    """Run the submission as the main program; this process ends with it."""
    try:
        code = compiled(sources, "main.py")
    except BaseException as error:
        fault(nonce, error)
        os._exit(1)
    stdin = os.memfd_create("stdin")
    view = memoryview(text)
    while len(view):
        view = view[os.write(stdin, view) :]
    os.lseek(stdin, 0, 0)
    os.dup2(stdin, 0)
    os.close(stdin)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__="main.py", __builtins__=builtins)
    sys.modules["__main__"] = main
    again = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    vars(sys).update(stdin=again, __stdin__=again)
    send(f'["compiled","{nonce}"]')
    os.close(channel)
    exec(code, main.__dict__)


def as_module(sources: "list[str]", entry_point: str, nonce: str, typed: bool) -> None:
    """Load the submission, then run the calls that arrive, until the channel closes.

    With `typed` the submission may use the names in TYPING without importing them.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    if imports := [name for name in TYPING if typed and name in sources[0]]:
        import typing

        module.__dict__.update({name: getattr(typing, name) for name in imports})
    try:
        code = compiled(sources, "solution.py")
    except BaseException as error:
        send(f'["uncompiled","{nonce}",{dump(str(error)[:300])}]')
        os._exit(1)
    send(f'["ready","{nonce}"]')
    try:
        exec(code, module.__dict__)
        function = entry(module, entry_point)
    except BaseException as error:
        fault(nonce, error)
        os._exit(1)
    gc.freeze()
    send(f'["loaded","{nonce}"]')
    while True:
        call = marshal.loads(receive(channel))
        child = os.fork()
        if child:
            status = os.waitpid(child, 0)[1]
            send(f'["ended","{call["nonce"]}",{status}]')
            continue
        try:
            value = function(*call["args"], **call["kwargs"])
            send(f'["returned","{call["nonce"]}",{dump(value)}]')
        except BaseException as error:
            fault(call["nonce"], error)
        os._exit(0)


def entry(module: types.ModuleType, name: str) -> "Callable[..., object]":
    """Resolve a name such as `f` or `Solution.f` in a module; classes on the way are instantiated."""
    first, *rest = name.split(".")
    if first not in module.__dict__:
        raise NameError(f"the program does not define {first}")
    member: Callable[..., object] = module.__dict__[first]
    for part in rest:
        member = getattr(member() if isinstance(member, type) else member, part)
    return member


def main() -> None:
    """Report that the box is ready, and do the one job that arrives."""
    for name in ("exit", "quit"):  # `site`, which would define them, is not loaded
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    send('["here"]')
    job = marshal.loads(receive(channel))
    if job["kind"] == "stdio":
        as_program(job["sources"], job["stdin"], job["nonce"])
    else:
        as_module(job["sources"], job["entry_point"], job["nonce"], job["typed"])


if __name__ == "__main__":
    main()
