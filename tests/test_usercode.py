"""Code of the user's: found, loaded once, and what it raises in one line."""

import sys

import pytest

from posttrain.nearest import did_you_mean
from posttrain.types import UserError
from posttrain.usercode import cause, load_named


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
    with pytest.raises(UserError, match="there is no module 'json_nowhere'"):
        load_named("json_nowhere:f")
    assert sys.path[-1] == str(tmp_path)
    sys.path.pop()


def test_a_module_whose_own_import_is_missing_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import no_such_thing_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        UserError, match=r"fails while it is imported at needs_more\.py:1: ModuleNotFoundError"
    ):
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
