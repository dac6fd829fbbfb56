"""docs/notebooks: each runs from top to bottom, and prints what its prose says."""

import importlib.util
import re
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def played(name: str) -> str:
    """A notebook as the site shows it, run in a thread, as Jupyter runs cells beside its own loop."""
    spec = importlib.util.spec_from_file_location("posttrain_pages", ROOT / "scripts" / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    said: list[str] = []
    thread = threading.Thread(
        target=lambda: said.append(pages.played(ROOT / "docs" / "notebooks" / f"{name}.py"))
    )
    thread.start()
    thread.join()
    assert said, "it raised"
    return said[0]


@pytest.mark.full
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_first_run_learns_and_shows_what_was_wrong() -> None:
    page = played("first_run")
    [rewards] = re.findall(r"first five updates ([\d.]+), of the last five ([\d.]+)", page)
    assert 0 < float(rewards[0]) < float(rewards[1])
    wrong = re.findall(r"^(\d) expected: (.*) with advantage", page, re.MULTILINE)
    assert wrong
    assert not [said for right, said in wrong if said == f"{right}<|im_end|>"]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.full
def test_a_session_is_stepped_and_an_own_advantage_keeps_its_promises() -> None:
    page = played("stepping")
    assert "4 groups of 8" in page
    assert "tensor([-1.,  0.,  0.,  1.])" in page
    assert re.search(r"keeps \d promises", page)
    curves = re.findall(r"reward \[([\d., ]+)\]", page)
    assert [len(curve.split(",")) for curve in curves] == [8, 8]
