"""What the functions of recipes/prover/ make of what a search comes to."""

import subprocess
from pathlib import Path

import pytest

from posttrain.base.usercode import load_named

MOVES = Path(__file__).parents[2] / "recipes" / "prover" / "moves.py"


@pytest.mark.parametrize(
    ("code", "why"),
    [(2, "failed, as is said above"), (0, "proves none of 1 theorems")],
    ids=["failed", "none"],
)
def test_a_prover_that_proves_nothing_is_told_of_and_not_learnt_from(code, why, tmp_path, monkeypatch):
    def run(command, check, stdout):
        assert stdout == subprocess.DEVNULL, "its lines name a folder that is moved"
        trees = Path(command[command.index("--out") + 1]) / "trees"
        trees.mkdir(parents=True)
        (trees / "best_first.jsonl").write_text('{"solved": false, "states": []}\n')
        if check and code:
            raise subprocess.CalledProcessError(code, command)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ValueError, match=why):
        load_named(f"{MOVES}:harvested")(tmp_path, model="MODEL")
    assert not (tmp_path / "sft.jsonl").exists()
