"""Provers that need not be installed, and leave nothing behind where they are."""

import os
import shutil
import tempfile
from collections.abc import Iterator

import psutil
import pytest

from posttrain.types import UserError
from posttrain_prove.coq.session import end_waiting
from posttrain_prove.lean.verifier import Lean


@pytest.fixture(scope="session")
def coqc() -> None:
    """Coq is installed, or the test is skipped."""
    if shutil.which("coqc") is None:
        pytest.skip("coqc is missing: apt-get install --no-install-recommends coq")


@pytest.fixture(scope="module")
def coq_host() -> Iterator[None]:
    """Nothing of Coq is left on the host after the file's tests: no process, no file."""
    here, before = set(os.listdir()), set(psutil.Process().children(recursive=True))
    with tempfile.TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        os.chmod(temporary, 0o755)
        patch.setattr(tempfile, "tempdir", temporary)
        yield
        end_waiting()
        assert not os.listdir(temporary)
    assert set(psutil.Process().children(recursive=True)) <= before
    assert set(os.listdir()) == here


@pytest.fixture(scope="session")
def lean_wheel() -> None:
    """Lean's wheel is installed, or the test is skipped."""
    try:
        Lean(toolchain="wheel").require()
    except UserError as error:
        pytest.skip(f"LEAN IS NOT TESTED HERE: {error}")
