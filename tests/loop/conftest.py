"""Runs of the command line in real processes, which may be killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from posttrain.learner.learner import Learner
from posttrain.types import Batch

PATIENCE_S = 180.0


class Started:
    """A process that runs the command line."""

    def __init__(self, launcher: "Launcher", pid: int, output: Path) -> None:
        self.launcher, self.pid, self.output = launcher, pid, output
        self._code: int | None = None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends the signal, if there is still somebody to take it."""
        if not os.path.exists(f"/proc/{self.pid}"):
            return
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code; -9 if it was killed."""
        if self._code is None:
            self._code = self.launcher.hear()["code"]
        return self._code

    def until(self, happened: Callable[[], bool]) -> None:
        """Waits for something that the process does."""
        end = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < end, f"it never happened: {self.output.read_text()}"
            time.sleep(0.002)


class Launcher:
    """Starts processes one after the other, each within milliseconds."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("launcher.py")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.hear() == {"ready": 1}

    def hear(self) -> dict[str, int]:
        """The launcher's next line."""
        assert self.process.stdout is not None
        heard: dict[str, int] = json.loads(self.process.stdout.readline())
        return heard

    def start(self, *words: object, output: Path, die_at: int = 0, watch: Path = Path("/")) -> Started:
        """A process that runs these words; the last one must have been waited for."""
        assert self.process.stdin is not None
        order = {
            "argv": [str(w) for w in words],
            "output": str(output),
            "die_at": die_at,
            "watch": str(watch),
        }
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return Started(self, self.hear()["pid"], output)

    def run(self, *words: object, output: Path, die_at: int = 0, watch: Path = Path("/")) -> int:
        """Its exit code."""
        return self.start(*words, output=output, die_at=die_at, watch=watch).wait()


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Starts command lines in processes of their own."""
    made = Launcher()
    yield made
    assert made.process.stdin is not None
    made.process.stdin.close()
    made.process.wait(PATIENCE_S)
    assert made.process.stdout is not None
    made.process.stdout.close()


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether every test runs; `make test` tries fewer of the moments that are drawn by chance."""
    return "not full" not in request.config.getoption("markexpr")


@pytest.fixture(scope="session")
def shallow(make_model: Callable[..., Path]) -> Path:
    """A model of one layer, which suffices where something simple is to be learnt."""
    return make_model(num_hidden_layers=1)


@pytest.fixture
def ahead(online: dict[str, Any], able: Path) -> dict[str, Any]:
    """Sums of one digit by a model that says many things: six updates of 3 × 4 answers of up to 12 tokens."""
    return online | {
        "model": {"path": str(able), "dtype": "float32", "device": "cpu"},
        "method": {"name": "grpo", "correction": "token_truncated"},
        "task": {"arithmetic": {"low": 2, "high": 4, "held_out": 3, "template": "{a}+{b}="}},
        "sampling": {"max_new_tokens": 12, "temperature": 2.0},
        "run": {"updates": 6, "threads": 1},
        "checkpoint": {"every": 0},
    }


@pytest.fixture
def trained(run_cli, write, tmp_path):
    """trained(tables, **async) -> the weights that a run ends with, and its directory."""

    def train(tables: dict[str, Any], name: str = "run", **how: Any) -> tuple[dict[str, Any], Path]:
        run = tmp_path / name
        over = {"async": how} if how else {}
        said = run_cli("train", write(tables, over, name), "--run-dir", run, "--quiet")
        assert said.code == 0, said.err
        [last] = (run / "checkpoints").glob(f"step_{tables['run']['updates']:06d}")
        return load_file(last / "model" / "model.safetensors"), run

    return train


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Batch, float]]:
    """The batch and the gradient's norm of each update in this process."""
    batches: list[tuple[Batch, float]] = []
    update = Learner.update

    def recorded(learner: Learner, batch: Batch) -> Any:
        result = update(learner, batch)
        batches.append((batch, result.metrics["grad_norm"]))
        return result

    monkeypatch.setattr(Learner, "update", recorded)
    return batches
