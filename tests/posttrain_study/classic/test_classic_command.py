"""python -m posttrain_study.classic: every example agrees with the optimum, and mistakes are one line."""

import sys
from importlib.abc import MetaPathFinder

import pytest

from posttrain_study.classic import examples
from posttrain_study.classic.__main__ import NAMES, main


@pytest.mark.full
def test_every_example_runs_prints_its_table_and_is_drawn(tmp_path, capsys):
    picture = tmp_path / "all.png"
    assert main(["all", "--plot", str(picture)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.count("\n\n") == 2 * len(NAMES)
    assert "exact: J*            8.1000" in said.out
    assert "walked in Gymnasium   8.1000" in said.out
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert tuple(examples.EXAMPLES) == NAMES


def test_an_example_repeats_by_its_seed(capsys):
    printed = []
    for seed in ("0", "0", "1"):
        assert main(["mdp", "--seed", seed]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "required: NAME"),
        (["bandit"], "invalid choice: 'bandit'"),
        (["mdp", "--seed", "x"], "--seed"),
        (["mdp", "--seed", "-1"], "'-1' is not an integer from 0 on"),
        (["mdp", "--plot", "out.pdf"], "does not end in .png"),
        (["mdp", "--plot", "nowhere/out.png"], "no folder 'nowhere'"),
        (["mdp", "--colour"], "--colour"),
    ],
)
def test_a_mistake_is_one_line(words, says, capsys):
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert said.err.count("\n") == 1


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path, capsys):
    place = tmp_path / "taken.png"
    place.mkdir()
    assert main(["mdp", "--plot", str(place)]) == 2
    said = capsys.readouterr().err
    assert "cannot write" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("library", "words"),
    [("gymnasium", ["maze"]), ("matplotlib", ["mdp", "--plot", "out.png"])],
)
def test_a_missing_library_is_named_with_its_extra(library, words, monkeypatch, capsys):
    class Gone(MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name == library:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return

    for name in list(sys.modules):
        if name.partition(".")[0] == library or (
            name.startswith("posttrain_study.classic.") and "main" not in name
        ):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Gone(), *sys.meta_path])
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said == f"posttrain classic: {library} is not installed; pip install 'posttrain[classic]'\n"
