"""Words for metrics: every one has some, and an anchor of its own on the page that the tables are made of."""

import re
from pathlib import Path

from posttrain.report import glossary

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_every_entry_says_something_and_has_an_anchor_of_its_own_on_the_page() -> None:
    entries = [entry for section in glossary.sections().values() for entry in section.items()]
    anchors = [glossary.anchor(names.split(", ")[0]) for names, _ in entries]
    assert len(anchors) == len(set(anchors))
    for names, told in entries:
        assert len(told) == 3, names
        assert told[0], names
        assert told[1] or told[2], names
    page = PAGE.read_text(encoding="utf-8")
    assert re.findall(r'<a id="([^"]+)"></a> \|', page) == anchors


def test_a_name_is_found_by_what_may_stand_in_it_and_no_further() -> None:
    found = glossary.words(
        ["pass@16", "verdict/a b", "eval/rewards/margin", "eval/audit/a", "eval/accuracy", "ranks/rows_bytes"]
    )
    anchors = {name: told[3] for name, told in found.items()}
    assert anchors == {
        "pass@16": "pass-k",
        "verdict/a b": "verdict-label",
        "eval/rewards/margin": "rewards-margin",
        "eval/audit/a": "audit-name",
        "eval/accuracy": "eval-accuracy",
        "ranks/rows_bytes": "ranks-gradients-bytes",
    }
    assert glossary.words(["mine", "accuracy2", "pass@"]) == {}
    assert "`" not in " ".join(text for told in found.values() for text in told)
