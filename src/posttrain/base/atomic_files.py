"""Files that are written whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A path beside the file to write to, which takes its place at the end.

    A kill or an error leaves what was there before; after an error nothing else is left.
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
    """Writes a text, whole or not at all."""
    with replacing(file) as working:
        working.write_text(text, encoding="utf-8")
