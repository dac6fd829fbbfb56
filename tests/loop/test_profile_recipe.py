"""benchmarks/profile_recipe.py: parts that add up, and a recipe that is profiled."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "profile_recipe.py"


def event(name: str, start: float, end: float, flops: float = 0, device: Any = DeviceType.CPU) -> Any:
    time_range = SimpleNamespace(start=start * 1e6, end=end * 1e6)
    return SimpleNamespace(name=name, time_range=time_range, device_type=device, flops=flops)


def test_each_moment_and_product_counts_for_the_innermost_part(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    script = importlib.import_module("profile_recipe")
    events = [
        event("aten::mm", 2, 3, flops=5),
        event("forward", 1, 4),
        event("training", 1, 9),
        event("an update", 0, 10),
        event("aten::mm", 9, 10, flops=7),
        event("backward", 4, 6),
        event("backward", 5, 6),
        event("forward", 1, 9, device=DeviceType.CUDA),
        event("aten::mm", 20, 21, flops=1),
    ]
    assert script.costs_of_parts(events) == {
        "an update": script.Cost(2.0, 1, 7),
        "training": script.Cost(3.0, 1, 0),
        "training / forward": script.Cost(3.0, 1, 5),
        "training / backward": script.Cost(2.0, 2, 0),
    }


@pytest.mark.full
def test_a_recipe_is_profiled(online, write, able):
    words = [sys.executable, SCRIPT, write(online, {"model": {"path": str(able)}}), "--updates", "3"]
    said = subprocess.run(words, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    tables = [table.splitlines() for table in said.stdout.split("\n\n")[1:]]
    parts, operators = ({line[:44].strip(): line[44:].split() for line in table[1:]} for table in tables)
    phases = {"an update", "sampling", "training", "weight sync"}
    assert phases | {"sampling / prefill", "training / forward", "training / backward"} <= parts.keys()
    shares = [float(cells[1].removesuffix("%")) for cells in parts.values()]
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))
    assert 0 < float(parts["training / backward"][4].removesuffix("%")) < 100
    assert any(name.startswith("aten::") for name in operators)
    assert not operators.keys() & parts.keys()
