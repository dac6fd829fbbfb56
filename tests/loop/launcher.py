"""Runs command lines in processes of their own, forked from one that has imported everything.

Reads one JSON object a line, {"argv", "output", "die_at", "watch"}, and answers with the line
{"pid"} when the process has started and {"code"} when it has ended. With `die_at` the process
kills itself with SIGKILL at the n-th thing that it does to the files below `watch`, in the middle
of it where it has a middle: half a file written, half a directory deleted.
"""

import gc
import importlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain import cli
from posttrain.models import tensor_files

WRITES = os.O_WRONLY | os.O_RDWR


class Death:
    """Counts what is done to files, and strikes at the n-th."""

    def __init__(self, die_at: int, watch: str) -> None:
        self.left, self.watch = die_at, watch

    def passes(self, path: object, half: Callable[[], object] = lambda: None) -> None:
        """One more thing is about to be done to this path."""
        if not str(path).startswith(self.watch):
            return
        self.left -= 1
        if self.left == 0:
            half()
            os.kill(os.getpid(), signal.SIGKILL)

    def arm(self) -> None:
        """Puts itself between the run and its files."""
        write_text, replace, rename = Path.write_text, Path.replace, Path.rename
        rmtree, fsync, save_file = shutil.rmtree, os.fsync, tensor_files.save_file

        def half_text(path: Path, text: str, *rest: Any, **named: Any) -> int:
            self.passes(path, lambda: write_text(path, text[: len(text) // 2], *rest, **named))
            return write_text(path, text, *rest, **named)

        def half_tensors(tensors: Any, file: str, **named: Any) -> None:
            def half() -> None:
                save_file(tensors, file, **named)
                os.truncate(file, os.path.getsize(file) // 2)

            self.passes(file, half)
            save_file(tensors, file, **named)

        def half_deleted(path: Path, *rest: Any, **named: Any) -> None:
            files = [f for f in Path(path).rglob("*") if f.is_file()]
            self.passes(path, lambda: [f.unlink() for f in files[: (len(files) + 1) // 2]])
            rmtree(path, *rest, **named)

        def around(original: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
            def moved(path: Path, to: Path) -> Path:
                self.passes(path)
                out = original(path, to)
                self.passes(path)
                return out

            return moved

        def flushed(descriptor: int) -> None:
            self.passes(os.readlink(f"/proc/self/fd/{descriptor}"))
            fsync(descriptor)

        def opened(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES:
                self.passes(arguments[0])

        Path.write_text = half_text  # type: ignore[method-assign, assignment]
        Path.replace, Path.rename = around(replace), around(rename)  # type: ignore[method-assign, assignment]
        shutil.rmtree, os.fsync = half_deleted, flushed  # type: ignore[assignment]
        tensor_files.save_file = half_tensors  # type: ignore[attr-defined]
        sys.addaudithook(opened)


def run(order: dict[str, Any]) -> None:
    """The command line of an order, as a process that has just been started for it would run it."""
    out = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["posttrain", *order["argv"]]
    if order["die_at"]:
        Death(order["die_at"], order["watch"]).arm()
    code = cli.run(sys.argv[1:])
    sys.stdout.flush()
    # Taking down a forked interpreter costs more than a whole run of the tiny model.
    os._exit(code)


def tell(**news: int) -> None:
    """One line to who gave the order."""
    os.write(1, json.dumps(news).encode() + b"\n")


def main() -> None:
    """Serves orders until there are no more."""
    gc.disable()  # collections take a quarter of the time of imports
    # A command is imported when it is called, and a kind of model when it is loaded: that would cost
    # each process five times what it takes to train the tiny model.
    for place, _ in cli.COMMANDS.values():
        importlib.import_module(f"posttrain.{place.partition(':')[0]}")
    importlib.import_module("transformers.models.llama.modeling_llama")
    gc.freeze()
    gc.enable()
    tell(ready=1)
    while text := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            run(json.loads(text))
        tell(pid=pid)
        tell(code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    main()
