"""Files of records."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

Records = Callable[..., Path]


@pytest.fixture
def records(tmp_path: Path) -> Records:
    """records({...}, {...}, name=...) -> a file of JSON lines."""

    def make(*rows: Mapping[str, Any], name: str = "records") -> Path:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return make


SUMS = [{"id": f"{a}+{b}", "prompt": f"{a}+{b}=", "answer": str(a + b)} for a in (2, 3, 4) for b in (2, 3, 4)]
"""What the model `able` has learnt, more or less."""


@pytest.fixture
def sums(records: Records) -> Path:
    """Nine sums as a suite of one's own."""
    return records(*SUMS, name="sums")
