"""A kernel of Jupyter's own, as a notebook has it: what its cells show, and a cell that is interrupted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

BEFORE = """
import threading
from pathlib import Path
import posttrain
from posttrain.models.scratch import Size, learn_tokenizer, write_new

tokenizer = learn_tokenizer(["0 1 2 3 4 5 6 7 8 9 + ="], 264)
write_new(Path("model"), Size(layers=1, hidden=16, heads=2, context=32), tokenizer, seed=0)
sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
asked = dict(method="grpo", data=sums, rollout={"groups": 2, "group_size": 2}, sampling={"max_new_tokens": 2})

def reward(response, answer):
    return float(len(response))
"""


class Notebook:
    """Cells that a kernel runs one after the other."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self._manager, self._client = manager, client

    def run(self, cell: str, interrupt: bool = False) -> list[dict[str, Any]]:
        """What the kernel says of a cell, which can be interrupted when it draws a table again."""
        said: list[dict[str, Any]] = []

        def hear(message: dict[str, Any]) -> None:
            nonlocal interrupt
            said.append({"kind": message["msg_type"], **message["content"]})
            if interrupt and message["msg_type"] == "update_display_data":
                interrupt = False
                self._manager.interrupt_kernel()

        self._client.execute_interactive(cell, output_hook=hear, timeout=None)
        return [each for each in said if each["kind"] not in ("status", "execute_input")]


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready()
        yield Notebook(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


def failed(said: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(class, text) of what was raised."""
    return [(each["ename"], each["evalue"]) for each in said if each["kind"] == "error"]


@pytest.mark.full
def test_a_table_is_renewed_a_run_is_its_report_and_an_interrupted_cell_keeps_its_checkpoint(
    notebook: Notebook,
) -> None:
    assert not failed(notebook.run(BEFORE))

    shown = notebook.run("run = posttrain.train('model', reward=reward, updates=3, **asked)\nrun")
    assert not failed(shown)
    tables = [each for each in shown if each["kind"] in ("display_data", "update_display_data")]
    assert tables[0]["kind"] == "display_data"
    assert {each["kind"] for each in tables[1:]} <= {"update_display_data"}, "one table, drawn again"
    assert "3 of 3 updates" in tables[-1]["data"]["text/html"]
    [result] = [each for each in shown if each["kind"] == "execute_result"]
    assert result["data"]["text/html"].startswith("<iframe srcdoc=")

    cut = notebook.run(
        "threads = set(threading.enumerate())\n"  # one of Jupyter's own came with the report, which is long
        "kept = {'dir': 'long', 'checkpoint': {'every': 1}}\n"
        "posttrain.train('model', reward=reward, updates=100_000, **kept, **asked)",
        interrupt=True,
    )
    [(kind, text)] = failed(cut)
    assert kind == "KeyboardInterrupt"
    assert text.endswith("go on with dir='long', resume=True")

    # The kernel is as it was: no thread is left, and the next cell trains.
    left = notebook.run("print(set(threading.enumerate()) - threads)")
    assert [each["text"] for each in left if each["kind"] == "stream"] == ["set()\n"]
    again = notebook.run("print(len(posttrain.train('model', reward=reward, updates=2, **asked).metrics))")
    assert not failed(again)
    said = [each["text"] for each in again if each["kind"] == "stream" and "\x1b[2m" not in each["text"]]
    assert said == ["2\n"]
