"""Functions of the user's."""

import pytest


@pytest.fixture
def user(tmp_path):
    """Writes a module of the user's and names its function f."""

    def write(text: str, name: str = "f") -> str:
        file = tmp_path / f"module_{len(list(tmp_path.iterdir()))}.py"
        file.write_text(text)
        return f"{file}:{name}"

    return write
