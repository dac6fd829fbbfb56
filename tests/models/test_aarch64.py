"""The kernels on another processor: built for aarch64 too, run under qemu, compared with this machine's."""

import shutil
import subprocess
from pathlib import Path

import pytest

from posttrain.engines.native import decode_kernel
from posttrain.learner import kernels
from posttrain.models import compiled

MAIN = Path(__file__).with_name("kernels_main.cpp")
TOOLS = ("aarch64-linux-gnu-g++", "qemu-aarch64", "g++")
EXACT = {"token", "weight", "rest", "joined"}
NEEDS_BF16 = {"linear_1", "linear_7", "linear_40", "layers"}
"""Results that a processor without products of bfloat16 leaves to PyTorch."""
TOLERANCE = {0: 1e-4, 1: 2**-7}
"""By HALF, of max(1, |x|): float32 sums in another order, and one unit in the last place of bfloat16."""

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason="make test-aarch64 installs the tools"),
]


def build(compiler: str, source: Path, half: int, out: Path, *flags: str) -> Path:
    common = [flag for flag in compiled._FLAGS if flag not in ("-march=native", "-fPIC")]
    macros = {
        "HALF": half,
        "SIZE": 64,
        "QUERIES": 3,
        "DECODE": int(source.stem == "decode"),
        "SOURCE": f'"{source}"',
    }
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    subprocess.run([compiler, *common, *flags, *defines, MAIN, "-o", out], check=True, timeout=300)
    return out


def results(*command: str | Path) -> dict[str, list[float]]:
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    return {name: [float(x) for x in numbers] for name, *numbers in map(str.split, printed.splitlines())}


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("source", [decode_kernel._SOURCE, kernels._SOURCE], ids=lambda source: source.stem)
def test_kernels_agree_on_aarch64(source, half, tmp_path):
    arm = build("aarch64-linux-gnu-g++", source, half, tmp_path / "arm", "-static")
    there = results("qemu-aarch64", "-cpu", "max", arm)
    for flags in (["-march=native"], []):  # this machine's widest vectors, and the narrowest of its kind
        here = results(build("g++", source, half, tmp_path / "here", *flags))
        missing = here.keys() - there.keys()
        assert missing <= (NEEDS_BF16 if half else set())
        assert there.keys() <= here.keys()
        for name, expected in there.items():
            assert len(expected) == len(here[name]) > 0
            allowed = 0.0 if name in EXACT else TOLERANCE[half]
            worst = max(abs(x - y) / max(1.0, abs(y)) for x, y in zip(here[name], expected, strict=True))
            assert worst <= allowed, (name, worst)
