"""The way in, of the command posttrain and of python -m posttrain: guarded before anything is imported."""

import gc
import io
import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Runs the command line; whatever happens is one line and an exit code."""
    gc.disable()  # until `imported`
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # elsewhere it is ignored, as by nohup
        signal.signal(signal.SIGINT, leave)
    # Where one is closed, the next file to be opened would take its place.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        os.write(2, b"error: standard output is closed; send it to /dev/null\n")
        sys.exit(1)
    for stream in (sys.stdout, sys.stderr):
        # What no character set has, or half a surrogate pair, is shown by its number.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        from posttrain import cli
    except Exception as error:  # a broken installation, or no file may be opened
        os.write(2, f"error: posttrain cannot be loaded: {type(error).__name__}: {error}\n".encode())
        sys.exit(1)
    code = cli.run(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is left of the process has nothing to say
    sys.exit(code)


def imported() -> None:
    """End what holds while nothing but imports has happened: no garbage collection, and `leave` at Ctrl-C.

    Hundreds of thousands of objects of PyTorch and transformers live as long as the process. To look for
    garbage among them again and again takes a quarter of the imports' time, so they are frozen.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave(number: int, frame: FrameType | None) -> None:
    """Ends the process at Ctrl-C, while nothing but imports has happened.

    An exception would not do: it may come in the middle of a library's import, which makes another of it.
    """
    os.write(2, b"error: interrupted before anything was begun\n")
    os._exit(130)


if __name__ == "__main__":
    from posttrain.__main__ import main as start  # under its own name, by which the command line knows it

    start()
