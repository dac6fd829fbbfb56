"""posttrain: reinforcement-learning post-training of language models (docs/python.md)."""

import importlib
import os
import random
from typing import Any

__version__ = "0.1.0"

# PyTorch's threads wait for one another by spinning, for milliseconds. Beside any other process, or within a
# quota, they then spin while the one they wait for has no processor, and everything takes ten times as long.
# Where waiting ends in sleep at once, a virtual machine spends as much on waking up. So they spin briefly.
# OpenMP reads this when PyTorch is loaded: import posttrain before torch.
if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}:
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
if "RANK" in os.environ:
    # PyTorch warns of a rank that is gone with pages of C++ frames, before we say which it was.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

_WHERE = {
    "posttrain.api.session": ("Session", "evaluate", "train"),
    "posttrain.api.run": ("Run", "load"),
    "posttrain.api.recipe": ("Recipe",),
    "posttrain.loop.loop": ("Callback",),
    "posttrain.run.tables": ("Groups", "Metrics"),
    "posttrain.errors": ("RunError", "UserError"),
    "posttrain.types": ("Episode", "Sampling", "Task", "Trajectory", "Verdict"),
    "posttrain.batch": ("Batch", "Method", "Outputs"),
    "posttrain.math.choice": ("AtLeast", "Between", "choice"),
    "posttrain.methods.build": ("method",),
    "posttrain.methods.table": ("Line",),
    "posttrain.envs.protocol": ("Env", "Start", "Turn"),
    "posttrain.data.protocol": ("Games", "Tasks"),
    "posttrain.verifiers.protocol": ("Verifier",),
    "posttrain.learner.learner": ("Learner", "Losses", "Update"),
    "posttrain.engines.native.engine": ("NativeEngine",),
    "posttrain.rollout.rollouts": ("Rollouts",),
}
"""Where each public name is; a module is loaded when a name of it is first asked for."""

__all__ = sorted(name for names in _WHERE.values() for name in names)


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module("posttrain.testing")
    for module, names in _WHERE.items():
        if name in names:
            importlib.import_module("posttrain.errors").refuse_windows()
            drawn = random.getstate()  # rich draws as it is imported
            found = getattr(importlib.import_module(module), name)
            random.setstate(drawn)
            return found
    raise AttributeError(f"module 'posttrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
