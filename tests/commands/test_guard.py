"""The way in: whatever happens is one line and an exit code, from the first moment on."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from posttrain import cli
from posttrain.cli import COMMANDS
from posttrain.commands import doctor
from posttrain.errors import interrupts
from posttrain.plan import disk
from posttrain.plan.disk import Disk
from posttrain.run import rundir
from posttrain.types import UserError

HANGS_S = 600


def one_line(err: str) -> str:
    [line] = err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_begins_as_the_list_says(name: str) -> None:
    loaded = cli.Command(name, help="").load()
    assert loaded.name == name.split()[-1]
    assert (loaded.help or "").splitlines()[0] == COMMANDS[name][1]


def test_groups_have_a_sentence_and_the_version_is_the_packages(run_cli) -> None:
    assert {words.split()[0] for words in COMMANDS if " " in words} == set(cli.GROUPS)
    said = run_cli("--version")
    assert (said.code, said.out) == (0, f"posttrain {version('posttrain')}\n")


def test_the_list_of_commands_and_a_wrong_name_import_nothing_heavy() -> None:
    program = (
        "import sys; from posttrain import cli; codes = [cli.run(['--help']), cli.run(['trian'])];"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules);"
        "sys.exit(f'{codes} {heavy}')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANGS_S, check=False
    )
    assert done.stderr.splitlines()[-1] == "[0, 2] set()"
    assert "Did you mean 'train'?" in done.stderr


def test_commands_without_a_model_import_no_torch(tmp_path: Path) -> None:
    run, reward = tmp_path / "runs" / "one", tmp_path / "reward.py"
    run.mkdir(parents=True)
    (run / "config.toml").write_text('[method]\nname = "grpo"\n[model]\npath = "m"\n')
    (run / "metrics.jsonl").write_text('{"update": 1, "eval/accuracy": 0.5}\n')
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "answer": "4"}\n')
    (tmp_path / "responses.jsonl").write_text('{"id": "a", "response": "It is 4"}\n')
    reward.write_text("import sys\ndef light(response, **_):\n    return 'torch' not in sys.modules\n")
    commands = [
        ["run", "list", "runs"],
        ["report", "runs/one"],
        ["run", "clean", "runs", "--dry-run"],
        ["verify", "math", "tasks.jsonl", "responses.jsonl", "--json"],
        ["verify", f"{reward}:light", "tasks.jsonl", "responses.jsonl", "--json"],  # in a worker process
    ]
    program = (
        "import json, sys; from posttrain import cli\n"
        "heavy = lambda: sorted({'torch', 'transformers', 'datasets'} & set(sys.modules))\n"
        "codes = [cli.run(words) for words in json.loads(sys.argv[1])]\n"
        "for words in ('run compare', 'run watch', 'data prefer', 'data revise'):\n"
        "    cli.Command(words, help='').load()\n"
        "light = heavy()\n"
        "cli.Command('methods', help='').load()\n"
        "print(codes, light, heavy())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(commands)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    *_, judged, last = done.stdout.splitlines()
    assert last == "[0, 0, 0, 0, 0] [] ['torch']", done.stderr
    assert json.loads(judged)["score"] == 1


def test_garbage_is_collected_once_a_command_is_imported(tmp_path: Path) -> None:
    program = (
        "import gc, sys; from posttrain import __main__, cli\n"
        "load = cli.Command.load\n"
        "cli.Command.load = lambda self: (print(gc.isenabled()), load(self))[1]\n"
        "sys.argv = ['posttrain', 'run', 'list', '.']\n"
        "try: __main__.main()\n"
        "finally: print(gc.isenabled(), gc.get_freeze_count() > 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    first, *_, last = done.stdout.splitlines()
    assert (first, last) == ("False", "True True"), done.stderr


def test_interrupt_while_a_class_is_made_is_an_interrupt() -> None:
    class Interrupted:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), interrupts():
        type("Made", (), {"field": Interrupted()})


def test_an_exception_that_nobody_foresaw_is_one_line_and_its_traceback_a_file(
    run_cli, monkeypatch, tmp_path
) -> None:
    def broken(recipe: Path) -> None:
        raise KeyError("first\nsecond")

    monkeypatch.setattr("posttrain.commands.runs.report", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said = run_cli("report", "somewhere")
    [log] = tmp_path.glob("posttrain-*.log")
    assert said.code == 1
    assert one_line(said.err) == f"error: KeyError: 'first\\nsecond'; the traceback is in {log}"
    assert log.read_text().startswith("Traceback")


def test_who_gives_a_key_as_in_other_trainers_is_told_how(run_cli) -> None:
    said = run_cli("train", "recipe.toml", "run.updates=5")
    assert said.code == 2
    assert one_line(said.err).endswith("(run.updates=5); give keys of the recipe as --set A.B=C")


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_who_runs_out_of_memory_is_told_what_to_lower(run_cli, monkeypatch, where: str) -> None:
    def large(recipe: Path) -> None:
        if where == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        torch.empty(1 << 60, dtype=torch.uint8)

    monkeypatch.setattr("posttrain.commands.runs.report", large)
    said = run_cli("report", "somewhere")
    assert said.code == 1
    line = one_line(said.err)
    assert line.startswith("error: out of memory: ")
    assert "steps.microbatch_tokens" in line


def test_an_interruption_says_what_is_kept(run_cli, monkeypatch) -> None:
    def interrupted(recipe: Path) -> None:
        raise KeyboardInterrupt("step_000004 is kept")

    monkeypatch.setattr("posttrain.commands.runs.report", interrupted)
    said = run_cli("report", "somewhere")
    assert said.code == 130
    assert one_line(said.err) == "error: interrupted; step_000004 is kept"


def interrupt_once(words: list[object], begun: Path) -> "tuple[int, str]":
    """Exit code and stderr of a command that gets Ctrl-C as soon as a path is there and not empty."""
    process = subprocess.Popen(
        [sys.executable, "-m", "posttrain", *map(str, words)], stderr=subprocess.PIPE, text=True
    )
    while not (begun.exists() and begun.stat().st_size):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANGS_S)
    # Python ends itself by the signal if that came while a library ran code from C, caught later or not;
    # a shell says 130 of both.
    return 130 if process.returncode == -signal.SIGINT else process.returncode, err


def test_an_interruption_before_the_first_update_leaves_no_directory(online, write, tmp_path) -> None:
    run = tmp_path / "run"
    code, err = interrupt_once(["train", write(online), "--run-dir", run, "-q"], run / ".lock")
    assert (code, one_line(err)) == (130, "error: interrupted; nothing was trained yet")
    assert not run.exists()


def test_an_interruption_while_libraries_are_imported_is_one_line(tmp_path: Path) -> None:
    """A library takes its time, and makes an error of its own of any exception."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "import time, pathlib\n"
        f"pathlib.Path({str(tmp_path / 'begun')!r}).touch()\n"
        "try:\n    time.sleep(120)\n"
        "except BaseException:\n    raise ImportError('half a library')\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(cli.__file__).parent.parent}"}
    process = subprocess.Popen(
        [sys.executable, "-m", "posttrain", "doctor"], env=environment, stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANGS_S)
    assert process.returncode == 130
    assert one_line(err) == "error: interrupted before anything was begun"


def test_standard_output_that_is_closed_full_or_no_longer_read() -> None:
    def shell(line: str) -> "subprocess.CompletedProcess[str]":
        command = ["bash", "-c", f"{sys.executable} -m posttrain {line}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False)

    closed, full, head = shell("methods >&-"), shell("--help > /dev/full"), shell("methods | head -1")
    assert closed.returncode == 1
    assert "standard output is closed" in one_line(closed.stderr)
    assert full.returncode == 1
    assert "No space left on device" in one_line(full.stderr)
    assert head.stderr == ""
    assert len(head.stdout.splitlines()) == 1


@pytest.mark.full
def test_few_files_that_may_be_open_are_one_line(online, write, tmp_path) -> None:
    code = tmp_path / "rewards.py"
    code.write_text("def reward(response, **fields):\n    return 1.0\n")
    over = {"verifier": {"number": None, "function": {"function": f"{code}:reward"}}}
    words = f"-m posttrain train {write(online, over)} --run-dir {tmp_path / 'run'} -q"
    command = ["bash", "-c", f"ulimit -n 8; {sys.executable} {words}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 1
    assert "Too many open files" in one_line(done.stderr)


def test_text_in_brackets_is_printed_as_it_stands(run_cli, online, write, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = run_cli("doctor")
    assert said.code == 0
    assert "pip install 'posttrain[trackio]'" in said.out

    place = tmp_path / "a [/x] :smile: [bold]"
    place.mkdir(parents=True)
    recipe = place / "recipe.toml"
    write(online, {"run": {"updates": 1}}).rename(recipe)
    assert run_cli("validate", recipe).out.strip() == f"{recipe}: valid"
    trained = run_cli("train", recipe, "--run-dir", place / "run")
    assert trained.code == 0, trained.err
    assert f"run directory: {place / 'run'}" in trained.err
    assert trained.out.strip().endswith(f"report {place / 'run' / 'report.html'}")
    assert str(place / "nowhere") in run_cli("run", "inspect", place / "nowhere").err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_what_is_said_and_leaves_no_half_of_a_report(
    run_cli, online, write, small_disk, monkeypatch
) -> None:
    # Others may fill a disk on which there was room enough when the run began.
    monkeypatch.setattr(Disk, "check", lambda self, path: None)
    said = run_cli("train", write(online), "--run-dir", small_disk / "run", "-q")
    assert said.code == 1
    assert "No space left on device" in one_line(said.err)
    assert "report" not in said.err
    assert not list((small_disk / "run").glob("*report*"))


TOO_MUCH = {
    "group_size": ({"rollout": {"group_size": 10**9}}, ("rollout.group_size", "are free")),
    "groups": ({"rollout": {"groups": 10**9}}, ("rollout.groups", "are free")),
    "workers": ({"rollout": {"workers": 10**5}}, ("rollout.workers", "this machine has room for")),
    "threads": ({"run": {"threads": 10**9}}, ("threads must be 1024 or fewer",)),
    "rows": ({"engine": {"rows": 10**12}}, ("rows must be 131072 or fewer",)),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_no_machine_holds_is_refused_before_anything_is_done(run_cli, online, write, name) -> None:
    over, fragments = TOO_MUCH[name]
    said = run_cli("validate", write(online, over))
    assert said.code == 2
    for fragment in ("recipe.toml", *fragments):
        assert fragment in one_line(said.err)


def test_options_that_no_machine_holds_are_refused(run_cli, able, tmp_path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three\n")
    for words, fragment in (
        (("sample", able, "2+2=", "-n", 10**11), "-n: 100,000,000,000 of up to"),
        (("model", "new", tmp_path / "a", "--text", text, "--vocab", 10**12), "are free"),
        (
            ("model", "new", tmp_path / "b", "--text", text, "--vocab", 2 << 20, "--hidden", 8),
            "at most 1048576",
        ),
        (("model", "new", tmp_path / "c", "--text", text, "--hidden", 10**12), "are free"),
    ):
        said = run_cli(*words)
        assert said.code == 2
        assert fragment in one_line(said.err)


def test_prompts_and_names_that_are_none(run_cli, able) -> None:
    assert "PROMPT: is not UTF-8" in one_line(run_cli("sample", able, "\udcff").err)
    for words in (("train",), ("report",), ("run", "inspect"), ("eval",)):
        said = run_cli(*words, "n" * 5000)
        assert said.code == 2
        one_line(said.err)


def test_pipes_and_devices_are_not_read(run_cli, online, write, tmp_path) -> None:
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    data = {"task": {"arithmetic": None, "data": {"path": "/dev/zero"}}}
    for words in (("train", pipe), ("verify", "number", pipe, pipe), ("validate", write(online, data))):
        said = run_cli(*words)
        assert said.code == 2
        assert "is a pipe or a device" in one_line(said.err)


def test_numbers_of_thousands_of_digits(run_cli, online, write, tmp_path) -> None:
    digits = "1" * 5000
    recipe = write(online)
    said = run_cli("validate", recipe, "--set", f"optim.lr={digits}")
    assert "a number of thousands of digits" in one_line(said.err)
    recipe.write_text(recipe.read_text().replace("lr = 0.003", f"lr = {digits}"))
    assert "a number of thousands of digits" in one_line(run_cli("validate", recipe).err)


def test_a_template_that_divides_by_zero(run_cli, online, write) -> None:
    said = run_cli("validate", write(online, {"model": {"chat_template": "{{ 1/0 }}"}}))
    assert said.code == 2
    assert "ZeroDivisionError" in one_line(said.err) or "division by zero" in said.err


def test_paths_that_cannot_be_used(run_cli, online, write, tmp_path, able) -> None:
    (tmp_path / "file").write_text("")
    recipe, below = write(online), tmp_path / "file" / "x"
    for words in (
        ("train", recipe, "--run-dir", below),
        ("eval", recipe, "--suite", "gsm8k", "--data", able, "--out", below),
        ("train", below / "recipe.toml"),
    ):
        said = run_cli(*words)
        assert said.code == 2, (words, said.err)
        one_line(said.err)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOTDIR, errno.EROFS])
def test_a_path_that_the_system_refuses_is_named(number, capsys, monkeypatch) -> None:
    monkeypatch.setattr(cli, "traceback", None)  # none is written
    assert cli._report(OSError(number, os.strerror(number), "/some/where")) == 2
    assert capsys.readouterr().err == f"error: /some/where: {os.strerror(number)}\n"


def test_a_file_system_without_locks_is_said_and_runs_on_it_are_not_at_work(monkeypatch, tmp_path) -> None:
    (tmp_path / rundir.LOCK).write_text("")

    def none(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(rundir.fcntl, "flock", none)
    with pytest.raises(UserError, match="its file system has no locks"):
        rundir.claim(tmp_path / "run", "wait")
    assert not rundir.in_use(tmp_path)


def test_what_is_kept_is_whole_checkpoints(tmp_path) -> None:
    for name in ("step_000050", "step_000100.tmp-4242"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert "step_000050 is kept" in rundir.kept(tmp_path)
    (tmp_path / "checkpoints" / "step_000050").rmdir()
    assert "no checkpoint was written yet" in rundir.kept(tmp_path)


def test_a_machine_that_does_not_say_which_cores_are_ours_is_examined(monkeypatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert any(fact.name == "cores" for fact in doctor.examine())


def test_what_earlier_runs_took_of_the_disk_is_not_free(
    run_cli, online, write, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "other").mkdir(parents=True)
    (tmp_path / "runs" / "other" / "large").write_bytes(b"0" * (64 << 20))
    asked = []
    room = disk.room
    monkeypatch.setattr(disk, "room", lambda path: asked.append(path) or room(path))
    assert run_cli("validate", write(online)).code == 0
    assert [path for path in asked if path.exists()] == []
