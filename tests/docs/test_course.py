"""The pictures of docs/course/ are those that scripts/course.py draws."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "course"
SPEC = importlib.util.spec_from_file_location("posttrain_course", ROOT / "scripts" / "course.py")
assert SPEC is not None
assert SPEC.loader is not None
COURSE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(COURSE)
QUICK = {"clip", "map"}
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def parts(picture: Path) -> tuple[list[str], list[float]]:
    """Return the text of an SVG file between its numbers, and the numbers."""
    text = re.sub(r"<metadata>.*?</metadata>", "", picture.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"[pm][0-9a-f]{10}", "id", text)  # made of coordinates to their last digit
    return NUMBER.split(text), [float(number) for number in NUMBER.findall(text)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in COURSE.PICTURES]
)
def test_picture_is_not_stale(name: str, tmp_path: Path) -> None:
    COURSE.draw(name, tmp_path)
    (text, numbers), (drawn, values) = (parts(folder / f"{name}.svg") for folder in (PAGES, tmp_path))
    assert text == drawn, "run scripts/course.py"
    assert numbers == pytest.approx(values, abs=0.02), "run scripts/course.py"


def test_each_picture_is_small_and_on_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES.glob("*.md"))
    files = {file.stem: file.stat().st_size for file in PAGES.glob("*.svg")}
    assert files.keys() == COURSE.PICTURES.keys() == set(re.findall(r"!\[[^]]+\]\((\w+)\.svg\)", pages))
    assert max(files.values()) < 60_000
