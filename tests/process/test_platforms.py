"""Systems other than Linux, simulated by the name of the system and by missing functions."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
import torch

import posttrain
from posttrain import UserError, __main__
from posttrain.errors import refuse_windows
from posttrain.models import compiled
from posttrain.plan.memory import free_memory
from posttrain.process import tree
from posttrain.rollout.snapshots import SharedMemoryStore
from posttrain.verifiers.sandbox import host

FAMILY = """
import subprocess, sys, time
inner = "import time; print('ready', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", inner], start_new_session=True)
child.wait()
"""


@pytest.fixture
def macos(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    host.available.cache_clear()
    yield
    monkeypatch.undo()
    host.available.cache_clear()


@pytest.fixture
def family():
    """A process and its child, in a session of its own."""
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        yield parent
        tree.kill_tree(parent.pid)


def test_ps_lists_the_tree_that_proc_lists(family, monkeypatch):
    by_proc, others = tree.below(family.pid), tree.below(os.getpid(), besides=[family.pid])
    monkeypatch.setattr(sys, "platform", "darwin")
    assert tree.below(family.pid) == by_proc
    assert len(by_proc) == 2
    assert tree.below(family.pid, besides=by_proc[1:]) == [family.pid]
    assert sorted(tree.below(os.getpid(), besides=[family.pid])) == sorted(others)  # ps is no child


@pytest.mark.usefixtures("macos")
def test_a_tree_is_killed_without_proc(family):
    grandchild = psutil.Process(tree.below(family.pid)[1])
    tree.kill_tree(family.pid)
    assert family.wait(60) == -9
    psutil.wait_procs([grandchild], timeout=60)
    assert not grandchild.is_running() or grandchild.status() == "zombie"


@pytest.mark.usefixtures("macos")
def test_boxes_are_refused_with_the_name_of_the_system():
    with pytest.raises(UserError, match="darwin"):
        host.require("rlimits", "verifier.code.level")


@pytest.mark.usefixtures("macos")
def test_kernels_are_left_to_pytorch():
    assert compiled.compiler() is None


def test_weights_are_shared_without_memfd(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    store = SharedMemoryStore()
    weight = torch.arange(6.0).reshape(2, 3)
    shared = store.put(0, lambda: iter([("w", weight)]))
    [(name, copy)] = list(shared.open())
    assert name == "w"
    assert torch.equal(copy, weight)
    store.close()
    assert not Path(shared.path).exists()


def test_free_memory_is_half_where_it_is_not_reported(monkeypatch):
    names = {name: value for name, value in os.sysconf_names.items() if name != "SC_AVPHYS_PAGES"}
    monkeypatch.setattr(os, "sysconf_names", names)
    monkeypatch.setattr("posttrain.plan.memory.Path", lambda _: Path("/no/such/file"))
    monkeypatch.setattr("posttrain.plan.memory.memory_left", lambda: float("inf"))
    assert free_memory(torch.device("cpu")) == pytest.approx(psutil.virtual_memory().total / 2, rel=0.01)


def test_windows_is_refused_and_wsl_named(monkeypatch, capfd):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(UserError, match="WSL"):
        _ = posttrain.Session
    with pytest.raises(SystemExit) as stop:
        __main__.main()
    assert stop.value.code == 2
    assert capfd.readouterr().err == f"error: {windows_error()}\n"


def windows_error() -> UserError:
    with pytest.raises(UserError) as caught:
        refuse_windows()
    return caught.value


@pytest.mark.parametrize(
    ("system", "machine", "good", "says"),
    [
        ("linux", "x86_64", True, "everything"),
        ("linux", "aarch64", True, "emulation"),
        ("darwin", "arm64", False, "no compiled kernels"),
    ],
)
def test_doctor_names_the_platform(system, machine, good, says, monkeypatch):
    from posttrain.commands import doctor

    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    fact = doctor._platform()
    assert (fact.good, says in fact.found) == (good, True)


@pytest.mark.full
def test_a_run_learns_without_a_compiler(tmp_path):
    """GRPO in a process of its own, with an empty cache: sampling and training run on PyTorch alone."""
    program = textwrap.dedent("""
        import json
        import posttrain
        from pathlib import Path
        from posttrain.engines.native import decode_kernel
        from posttrain.learner import kernels
        from posttrain.models.scratch import Size, learn_tokenizer, write_new
        import torch

        assert kernels.load(torch.float32) is None and decode_kernel.load(torch.float32, 16, 1) is None
        size = Size(layers=2, hidden=64, heads=4, context=64)
        write_new(Path("model"), size, learn_tokenizer(["0 1 2 3 4 5 6 7 8 9 + ="], 264), seed=0)
        rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(5)]
        digits = lambda response: sum(c.isdigit() for c in response) / max(1, len(response))
        run = posttrain.train(
            "model", method="grpo", data=rows, reward=digits, updates=8, lr=2e-2, show="none",
            rollout={"groups": 4, "group_size": 8}, sampling={"max_new_tokens": 4},
        )
        print(json.dumps(run.metrics["reward/mean"]))
    """)
    (tmp_path / "run.py").write_text(program)
    cache = tmp_path / "cache"
    env = {**os.environ, "CXX": "no-such-compiler", "POSTTRAIN_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "run.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rewards = json.loads(done.stdout.splitlines()[-1])
    assert rewards[-1] > rewards[0]
    assert not list(cache.rglob("*.so"))
