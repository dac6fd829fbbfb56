"""Code of the user's: found, loaded once, and what it raises in one line."""

import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch

from posttrain.base.name_hints import did_you_mean
from posttrain.base.usercode import cause, load_named, signature
from posttrain.process import interpreter
from posttrain.process.interpreter import call_in_fresh_process
from posttrain.types import UserError


def test_a_file_is_loaded_once_and_finds_its_neighbours(tmp_path):
    (tmp_path / "beside_it.py").write_text("value = 5\n")
    file = tmp_path / "mine.py"
    file.write_text(
        "import beside_it\nloaded = [1]\ndef f(): return beside_it.value\ndef g(): loaded.append(2)\n"
    )
    assert load_named(f"{file}:f")() == 5
    load_named(f"{file}:g")()
    assert load_named(f"{file}:loaded") == [1, 2]


def test_the_users_directory_does_not_hide_what_is_installed(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise RuntimeError('not the real one')\n")
    monkeypatch.chdir(tmp_path)
    assert load_named("json:dumps")(1) == "1"
    with pytest.raises(UserError, match=r"^json_nowhere:f: "):
        load_named("json_nowhere:f")
    assert sys.path[-1] == str(tmp_path)
    sys.path.pop()


def test_a_module_whose_own_import_is_missing_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import no_such_thing_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"^needs_more:f: "):
        load_named("needs_more:f")


def test_a_file_that_failed_is_tried_again_once_it_is_mended(tmp_path):
    file = tmp_path / "flaky.py"
    file.write_text("1 / 0\n")
    with pytest.raises(UserError):
        load_named(f"{file}:f")
    file.write_text("def f(): return 1\n\n")
    assert load_named(f"{file}:f")() == 1


def test_causes_are_one_short_line():
    class SilentError(Exception):
        def __str__(self):
            raise RuntimeError

    assert cause(ValueError("a\nb")) == "ValueError: a"
    assert cause(ValueError("\n\n a")) == "ValueError: a"
    assert cause(SilentError()) == "SilentError"
    assert len(cause(ValueError("x" * 10**6))) == 300
    cause(ValueError("\ud800")).encode()


def test_the_nearest_name_is_offered_only_if_it_is_near():
    assert did_you_mean("Lerning_rate", ["learning_rate", "rate"]) == "did you mean 'learning_rate'?"
    assert did_you_mean("zzz", ["learning_rate"]) == ""
    assert did_you_mean("x", []) == ""


HARM = {
    "switches gradients off": "import torch\ntorch.set_grad_enabled(False)\n",
    "breaks the standard library": "import json\njson.dumps = json.loads = None\n",
    "prints and changes directory": "import os\nos.chdir('/')\nprint('hello')\n",
}


@pytest.mark.parametrize("harm", HARM)
def test_what_a_file_does_as_it_is_imported_is_not_done_to_us(harm, tmp_path, capfd):
    file = tmp_path / "harmful.py"
    file.write_text(HARM[harm] + "def reward(response, *, answer='7', **fields): return 1.0\n")
    place, dumps = Path.cwd(), json.dumps
    assert call_in_fresh_process(signature, f"{file}:reward", name="reward") == {
        "type": "function",
        "callable": True,
        "parameters": [
            ["response", "POSITIONAL_OR_KEYWORD", False, "response"],
            ["answer", "KEYWORD_ONLY", True, "answer='7'"],
            ["fields", "VAR_KEYWORD", False, "**fields"],
        ],
    }
    assert torch.is_grad_enabled()
    assert json.dumps is dumps
    assert Path.cwd() == place
    assert not any("harmful" in str(getattr(m, "__file__", "")) for m in list(sys.modules.values()))
    assert capfd.readouterr() == ("", "")


ENDS = {
    "import os\nos._exit(3)": "it ends the process that it is loaded in: exit status 3",
    "import os\nos.kill(os.getpid(), 9)": "it ends the process that it is loaded in: SIGKILL",
    "import sys\nsys.exit('no')": "fails while it is imported at ends.py:2: SystemExit: no",
    "1 / 0": "fails while it is imported at ends.py:1: ZeroDivisionError",
    "def other(): pass": "has no 'reward'",
    "import time\ntime.sleep(600)": "it is not loaded within 2 s; leave only definitions at the top",
}


@pytest.mark.parametrize("text", ENDS)
def test_code_that_cannot_be_loaded_is_one_line_whatever_it_does(text, tmp_path, monkeypatch):
    file = tmp_path / "ends.py"
    file.write_text(text + "\n")
    if "sleep" in text:
        monkeypatch.setattr(interpreter, "ASKED_S", 2.0)
    with pytest.raises(UserError, match=re.escape(ENDS[text])):
        call_in_fresh_process(signature, f"{file}:reward", name="reward")


def test_processes_that_code_starts_as_it_is_imported_end_with_the_question(tmp_path):
    file = tmp_path / "starts.py"
    file.write_text(
        "import pathlib, subprocess\n"
        f"child = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "def reward(response): return 1.0\n"
    )
    call_in_fresh_process(signature, f"{file}:reward", name="reward")
    state = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    until = time.monotonic() + 60  # a killed process may take a moment to go
    while state.exists() and state.read_text().split()[2] not in "ZX":
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_reward_that_harms_its_process_trains_all_the_same(run_cli, online, write, able, tmp_path):
    code = tmp_path / "harmful.py"
    code.write_text(
        "import json\nimport torch\ntorch.set_grad_enabled(False)\njson.dumps = None\n"
        "def reward(response, answer, **fields): return float(response.count(answer))\n"
    )
    over = {
        "model": {"path": str(able)},
        "verifier": {"number": None, "function": {"function": f"{code}:reward"}},
        "run": {"updates": 1},
        "rollout": {"workers": 1},
    }
    said = run_cli("train", write(online, over), "--run-dir", tmp_path / "run", "-q")
    assert said.code == 0, said.err
    [_, line] = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert line["grad_norm"] >= 0
