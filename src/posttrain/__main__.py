"""The entry point of `posttrain` and `python -m posttrain`: Ctrl-C and closed streams, before any library."""

import gc
import io
import os
import signal
import sys
from types import FrameType

from posttrain.errors import UserError, refuse_windows


def main() -> None:
    """Run the command line; a failure is one line on stderr and an exit code."""
    gc.disable()  # until `finish_imports`
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # or ignored, as under nohup
        signal.signal(signal.SIGINT, leave)
    # The next file to be opened would take the descriptor of a closed stream.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        os.write(2, b"error: standard output is closed; send it to /dev/null\n")
        sys.exit(1)
    for stream in (sys.stdout, sys.stderr):
        # Print characters that the encoding lacks, and lone surrogates, as escapes.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        refuse_windows()
        from posttrain import cli
    except UserError as error:
        os.write(2, f"error: {error}\n".encode())
        sys.exit(2)
    except Exception as error:  # a broken installation, or the limit of open files
        os.write(2, f"error: posttrain cannot be loaded: {type(error).__name__}: {error}\n".encode())
        sys.exit(1)
    code = cli.run(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to report
    sys.exit(code)


def finish_imports() -> None:
    """Turn garbage collection on, and have Ctrl-C raise KeyboardInterrupt, once the imports are done.

    Hundreds of thousands of objects of PyTorch and transformers live as long as the process. Searching them
    for garbage takes a quarter of the imports' time, so they are frozen.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave(number: int, frame: FrameType | None) -> None:
    """End the process at Ctrl-C during imports.

    An exception inside a library's import may be caught there and replaced by another one.
    """
    os.write(2, b"error: interrupted before anything was begun\n")
    os._exit(130)


if __name__ == "__main__":
    from posttrain.__main__ import main as start  # the module object that cli.py imports

    start()
