"""The run directory: the one place that a run writes to. Its layout is a public API.

config.toml    the resolved recipe           metrics.jsonl     a line an update
code.txt       versions that ran it          samples/          rollouts, a file an update
plan.json      method, batch plan, memory    checkpoints/      step_000040/ ...
stopped.txt    why, if it ended itself       trees/            searches, a file an update
report.html
ranks/1/       samples and logs of another rank
code/          copies of the user's files that the training runs: a method, tasks
"""

import contextlib
import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from posttrain.base.atomic_files import replace_atomically
from posttrain.base.kinds import GROUPS, kinds
from posttrain.base.usercode import imported_files
from posttrain.errors import RESUME, RUN_DIR, RunError, UserError, how_to_resume
from posttrain.models import checkpoint

LOCK = ".lock"
CODE = "code"
DESCRIPTION = ("config.toml", "code.txt", "plan.json")


class RunDir:
    """A run directory that this process alone writes to, until it is closed.

    If several ranks share it, rank 0 owns it, and each other rank has a folder in it, ranks/1 ...
    """

    def __init__(self, path: Path, *, resume: bool, rank: int = 0) -> None:
        """Open the directory; raise UserError if it is in use, or does not fit `resume`."""
        self.path, self.rank = path, rank
        self.own = path / "ranks" / str(rank) if rank else path
        """The folder of this rank, for samples and logs."""
        self._written: Future[None] | None = None
        if rank:
            return
        if path.exists() and not path.is_dir():
            raise UserError(str(path), "is a file", f"give another {RUN_DIR}")
        if resume and not (path / "config.toml").exists():
            raise UserError(str(path), "there is no run to resume here", f"leave {RESUME} out to start one")
        self._lock = claim(path, f"wait until it ends, or give another {RUN_DIR}")
        try:
            # Hidden files are the lock, and partial files that a kill left.
            empty = resume or all(p.name.startswith(".") for p in path.iterdir())
        except KeyboardInterrupt:
            (path / LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it is not empty
                path.rmdir()
            self.close()
            raise
        if not empty:
            self.close()
            if (path / "config.toml").exists():
                fix = f"go on with {RESUME}, or give another {RUN_DIR}"
                raise UserError(str(path), "already holds a run", fix)
            problem = "is not empty, and what it holds is no run"
            raise UserError(str(path), problem, f"give another {RUN_DIR}")

    def close(self) -> None:
        """Release the lock, so that others may write to the directory."""
        if not self.rank:
            os.close(self._lock)

    def keep(self, files: Iterable[Path]) -> None:
        """Copy the user's files, and the files next to them that they import, into code/.

        Raises UserError for two files of one name, and RunError if they cannot be written.
        """
        # A missing file is refused where it is read.
        sources = (file.resolve() for file in files if file.is_file())
        for file in dict.fromkeys(f for source in sources for f in imported_files(source)):
            copy = self.path / CODE / file.name
            if copy.exists() and copy.read_bytes() != file.read_bytes():
                problem = f"two files are called {file.name}, and the run keeps one of each name"
                raise UserError(str(file), problem, "give one of them another name")
            copy.parent.mkdir(exist_ok=True)
            try:
                shutil.copyfile(file, copy)  # unchanged, since a resumed run compares its bytes
            except OSError as error:
                raise RunError(
                    "copy code", f"{copy} cannot be written: {error.strerror}", kept(self.path)
                ) from error

    def keep_source(self, name: str, text: str) -> bool:
        """Write a function's source into code/, once; return True if the file has this text."""
        file = self.path / CODE / f"{name}.held.py"
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            self._write(f"{CODE}/{file.name}", [text])
        return file.read_text(encoding="utf-8") == text

    def discard(self) -> None:
        """Delete the files of a run that was refused before its first line; keep all others."""
        metrics = self.path / "metrics.jsonl"
        if self.rank or (metrics.exists() and metrics.stat().st_size):
            return
        for name in (*DESCRIPTION, ".prompts.json", "metrics.jsonl", "report.html", LOCK):
            (self.path / name).unlink(missing_ok=True)
        for folder in (self.path / CODE, self.start):
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # it holds files of the user
            self.path.rmdir()

    @property
    def start(self) -> Path:
        """Folder of a model that a program passed as an object."""
        return self.path / "start"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def describe(self, config: str, title: str, sections: Mapping[str, Mapping[str, Any]]) -> None:
        """Write config.toml, code.txt and plan.json."""
        if self.rank:
            self.own.mkdir(parents=True, exist_ok=True)
            return
        plan = {
            "title": title,
            "sections": [
                {"title": name, "rows": [[k, str(v)] for k, v in rows.items()]}
                for name, rows in sections.items()
            ],
        }
        self._write("config.toml", [config])  # first: a run with it can be resumed
        self._write("code.txt", [code_versions()])
        self._write("plan.json", [json.dumps(plan, indent=1)])

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run the thread that writes samples; at the end, or after an error, wait until all are written."""
        with ThreadPoolExecutor(1, "samples") as self._writer:
            yield
            self.wait()

    def samples(self, name: str, rows: Iterable[Mapping[str, Any]], folder: str = "samples") -> None:
        """Start to write FOLDER/NAME.jsonl, whole or not at all, after the file before it.

        Raises RunError if that one could not be written.
        """
        self.wait()
        self._written = self._writer.submit(self._write_samples, f"{folder}/{name}.jsonl", rows)

    def wait(self) -> None:
        """Wait until the last samples are written; raise RunError if they cannot be."""
        if self._written is not None:
            written, self._written = self._written, None
            try:
                written.result()
            except OSError as error:
                raise RunError(
                    "write rollouts", f"{self.path / 'samples'}: cannot be written: {error.strerror}"
                ) from error

    def _write_samples(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        (self.own / name).parent.mkdir(exist_ok=True)
        self._write(name, (json.dumps(row, allow_nan=False) + "\n" for row in rows))

    def _write(self, name: str, texts: Iterable[str]) -> None:
        """Write texts to a file, whole or not at all: a kill leaves the old file."""
        file = self.own / name
        try:
            with (
                replace_atomically(file) as working,
                working.open("w", encoding="utf-8", newline="") as stream,
            ):
                stream.writelines(texts)
        except OSError as error:
            raise RunError(
                "write rollouts", f"{file} cannot be written: {error.strerror}", kept(self.path)
            ) from error

    def forget_after(self, update: int, ranks: int = 1) -> None:
        """Delete samples of later updates, which a run resumed on `ranks` ranks makes again."""
        folders = () if self.rank else (self.path / "ranks").glob("*")
        unused = [p for p in folders if p.name.isdecimal() and int(p.name) >= ranks]
        for folder in (self.own, *unused):
            for file in (*(folder / "samples").glob("*.jsonl"), *(folder / "trees").glob("*.jsonl")):
                number = file.stem.removeprefix("eval_")
                if number.isdigit() and int(number) > update:
                    file.unlink()
        for folder in unused:
            for name in ("stopped.txt", "error.log"):
                (folder / name).unlink(missing_ok=True)


def claim(path: Path, fix: str, kind: str = "run") -> int:
    """Lock the directory against all other processes until the returned file descriptor is closed.

    Raises UserError if another process has locked it, or if it cannot be written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(str(path), f"cannot be written to: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        process = os.read(lock, 20).decode(errors="replace")
        os.close(lock)
        suffix = f", process {process}" if process.isdigit() else ""
        problem = f"another {kind} is using this directory{suffix}"
        if process == str(os.getpid()):
            problem = "a session of this program is using this directory"
            fix = "close it first: session.close()"
        raise UserError(str(path), problem, fix) from None
    except OSError as error:
        os.close(lock)
        problem = f"its file system has no locks ({error.strerror}), which keep two runs apart"
        raise UserError(str(path), problem, f"give another {RUN_DIR}") from None
    with contextlib.suppress(OSError):  # a full disk: the lock works without the number
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock


def in_use(path: Path) -> bool:
    """Return True if a run or a pipeline has locked this directory; write nothing."""
    try:
        lock = os.open(path / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # freed at once by the close below
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(lock)
    return False


def kept(run_dir: Path) -> str:
    """Return, for a person, the last checkpoint of an interrupted run and how to resume it."""
    steps = [path for _, path in checkpoint.numbered(run_dir / "checkpoints")]
    if not steps:
        return f"no checkpoint was written yet, what there is lies in {run_dir}"
    return f"{steps[-1].name} is kept, go on with {how_to_resume(run_dir)}"


@cache
def code_versions() -> str:
    """Return the versions of posttrain, Python, the machine and the libraries that numbers depend on."""
    lines = [f"posttrain {_version('posttrain')}"]
    here = Path(__file__).resolve().parent
    git = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(git, capture_output=True, text=True, timeout=10, check=False)
        if result.returncode == 0:
            lines.append(f"commit {result.stdout.strip()}")
    except (OSError, subprocess.TimeoutExpired):
        pass  # no git, or not a checkout: the version must do
    lines.append(f"python {sys.version.split()[0]} on {platform.platform()}")
    lines += [f"{name} {_version(name)}" for name in ("torch", "transformers", "peft", "numpy", "tokenizers")]
    plugins = {kind.origin for group in GROUPS for kind in kinds(group).values() if not kind.ours}
    lines += [f"plugin {origin}" for origin in sorted(plugins)]
    return "\n".join(lines) + "\n"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
