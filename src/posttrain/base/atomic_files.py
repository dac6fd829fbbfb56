"""Write files atomically: a file has its old content or its new one, never a part of either."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replace_atomically(file: Path) -> Iterator[Path]:
    """Yield a path to write to, and replace `file` by that file at the end.

    After a kill or an error `file` has its old content. An error also removes the new file.
    """
    working = file.with_name(f".{file.name}.tmp")
    try:
        yield working
        working.replace(file)
    except BaseException:
        with suppress(OSError):
            working.unlink(missing_ok=True)
        raise


def put(file: Path, text: str) -> None:
    """Write a text to a file, atomically."""
    with replace_atomically(file) as working:
        working.write_text(text, encoding="utf-8")
