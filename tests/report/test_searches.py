"""Searches in the page: what each came to, and trees that open, in data and in a real browser."""

import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from posttrain.report import write
from posttrain.report.record import read
from posttrain.report.searches import SET_BYTES, TREE_BYTES, searches

GOAL = "h1 : A\nh2 : A -> B\nh3 : B -> C\nh4 : C -> B\nh5 : D\n======\n"


def state(number: int, shown: str, *moves: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"number": number, "shown": shown, "moves": list(moves), "depth": number, "value": 0.0} | more


def move(text: str, logp: float, **more: Any) -> dict[str, Any]:
    return {"text": text, "logp": logp, "said": 1} | more


def proof(task: str, moves: int, **more: Any) -> dict[str, Any]:
    """A search that proves C by B by A; B is reached again behind C, and from the second move of the root."""
    states = [
        state(
            0,
            GOAL + "C",
            move("apply h9.", -3.0, refused="error", reason="no such hypothesis </script>"),
            move("cut.", -0.1, refused="cut", reason="it was cut off"),
            move("apply h3.", -1.0, to=1, found=True),
            move("exact h3.", -2.0, to=3),
        ),
        state(1, GOAL + "B", move("apply h2.", -1.0, to=2, found=True), visits=3, value=0.5),
        state(2, GOAL + "A", move("apply h1.", -0.5, to=4, found=True)),
        state(3, "other", move("apply h4.", -0.7, to=1), move("idle.", -4.0)),
        state(4, "", done=True),
    ]
    counts = {"moves": moves, "followed": 6, "merged": 1, "refusals": 2, "refused": {"error": 1, "cut": 1}}
    told = {"task": task, "label": "proved", "score": 1.0, "reason": "it is proved", "solved": True}
    told |= {"answer": "apply h3.\napply h2.\napply h1.", "strategy": "best_first", "budget": 16}
    told |= {"model_s": 3.0, "prover_s": 1.0, "fields": {"depth": 2}, "asked": [0, 3, 1, 2], "states": states}
    return told | counts | more


def failure(task: str, depth: int) -> dict[str, Any]:
    """A search of 16 moves that found nothing; only its counts are kept."""
    open_ = {key: x for key, x in proof(task, 16).items() if key != "states"}
    return open_ | {"solved": False, "label": "unsolved", "answer": "", "fields": {"depth": depth}}


def write_sets(run: Path, **sets: list[dict[str, Any]]) -> Path:
    (run / "trees").mkdir(parents=True, exist_ok=True)
    (run / "config.toml").write_text('[search]\nstrategy = "best_first"\n')
    (run / "plan.json").write_text(json.dumps({"title": "prove: side by side", "sections": []}))
    for name, lines in sets.items():
        (run / "trees" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """What two strategies found of three tasks."""
    first = [proof("one", 4), proof("two", 12), failure("three", 3)]
    other = [proof("one", 9, strategy="best_of_n"), failure("two", 2), failure("three", 3)]
    return write_sets(tmp_path / "beside", best_first=first, best_of_n=other)


def embedded(page: Path, name: str) -> Any:
    text = page.read_text(encoding="utf-8")
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', text, re.DOTALL)
    assert found, name
    return json.loads(found[1])


def test_the_page_holds_what_searches_came_to(beside: Path) -> None:
    page = write(beside)
    run = embedded(page, "run")
    assert run["notes"] == ["code.txt is not there."]
    assert run["headline"]["after"] == "2 of 3"
    assert run["headline"]["tiles"][0] == ["best_of_n", "1 of 3", "solved"]
    first, other = run["searches"]
    assert (first["kind"], first["name"], first["budget"]) == ("strategy", "best_first", 16)
    assert [row["moves"] for row in first["rows"] if row["solved"]] == [4, 12]
    assert [row["fields"]["depth"] for row in other["rows"]] == [2, 2, 3]
    assert "<" not in re.sub(
        r"<[^>]*>", "", page.read_text().split('id="trees-best-first">')[1].split("</")[0]
    )
    tree = embedded(page, "trees-best-first")["0"]
    assert [s["number"] for s in tree["states"]] == [0, 1, 2, 3, 4]
    assert list(embedded(page, "trees-best-of-n")) == ["0"], "only one whole tree was kept"


def test_files_that_are_broken_are_told_and_hold_nobody_up(beside: Path) -> None:
    odd = {
        "task": 7,
        "moves": "many",
        "states": [3, {"moves": [None, {"text": None}], "number": -1}],
        "asked": 5,
    }
    (beside / "trees" / "puct.jsonl").write_text(json.dumps(odd) + '\n[1]\n{"task": "cut sho')
    (beside / "trees" / "notes.txt").write_text("mine")
    run = embedded(write(beside), "run")
    assert "The last line of puct.jsonl is cut short, so it was left out." in run["notes"]
    rows = next(s["rows"] for s in run["searches"] if s["id"] == "trees-puct")
    assert [(row["task"], row["moves"], row["solved"]) for row in rows] == [("7", 0, False)]


def test_a_page_of_many_trees_stays_small(tmp_path: Path) -> None:
    long = proof("one", 4)
    long["states"][0]["shown"] = "h : A\n" * 600
    run = write_sets(tmp_path, **{f"{n:06d}": [long] * 60 for n in range(40)})
    found, notes = searches(read(run).trees)
    assert sum(len(each.trees) for each in found) <= TREE_BYTES + 40 * 4000
    assert all(len(each.rows) == 60 for each in found)
    assert all(1 <= len(json.loads(each.trees)) < 60 for each in found)
    assert len(found[0].trees) <= SET_BYTES + 4000
    assert [each.update for each in found][:: len(found) - 1] == [0, 39], "first and last stay"
    assert notes == ([] if len(found) == 40 else [notes[0]])


ASKING = """<script>
const all = (selector) => [...document.querySelectorAll(selector)];
const texts = (selector) => all(selector).map((node) => node.textContent);
document.documentElement.dataset.answer = JSON.stringify((() => { %s })());
</script></body>"""


@pytest.fixture
def answer(dom: Callable[[str], str]) -> Callable[[Path, str], Any]:
    """answer(page, script) -> what the script returns at the end of the page."""

    def ask(page: Path, script: str) -> Any:
        content = page.read_text(encoding="utf-8")
        opened = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", content)
        asked = page.with_name("asked.html")
        asked.write_text(opened.replace("</body>", ASKING % script), encoding="utf-8")
        root = re.search(r"<html[^>]*>", dom(asked.as_uri()))
        assert root
        said = dict(re.findall(r'data-([\w-]+)="([^"]*)"', root[0]))
        assert "error" not in said, said["error"]
        return json.loads(unescape(said["answer"]))

    return ask


def test_a_found_proof_is_walked_goal_by_goal(beside: Path, answer: Callable[[Path, str], Any]) -> None:
    found = answer(
        write(beside),
        """
        const before = texts('.tree > .state > .goal');
        const spine = texts('.tree > .state > .about b');
        const marked = texts('.tree .move.found code');
        const again = all('.tree details.move').length;
        all('.tree details.move')[0].open = true;
        all('.tree details.move')[0].dispatchEvent(new Event('toggle'));
        const inside = texts('.tree details.move .state code');
        all('.tree details.move button')[0].click();
        return {
          before, spine, marked, again, inside,
          focus: document.activeElement.querySelector('.about b').textContent,
          refused: texts('.tree > .state:first-child .refusals > summary'),
          labels: all('#searches svg').map((node) => node.getAttribute('aria-label')),
          sections: all('main > section').map((node) => node.id),
          wide: document.documentElement.scrollWidth <= innerWidth,
        };""",
    )
    assert found["spine"] == ["state 0", "state 1", "state 2", "the end"]
    assert found["marked"] == ["apply h3.", "apply h2.", "apply h1."]
    assert found["before"][1] == "6 lines as before" + "\n".join(GOAL.splitlines()) + "B"
    assert found["refused"] == ["2 refused: cut 1, error 1"]
    assert found["again"] == 1
    assert found["inside"] == ["apply h4.", "idle."]
    assert found["focus"] == "state 1", "what was reached before is shown where it is"
    budget, depth = found["labels"]
    assert "best_first: 0% at 0, 33.3% at 4, 66.7% at 12, 66.7% at 16" in budget
    assert "best_of_n: 0% at 0, 33.3% at 9, 33.3% at 16" in budget
    assert "best_of_n: 50% at 2, 0% at 3" in depth
    assert found["sections"] == ["searches", "plan", "files"]
    assert found["wide"]


def test_goals_that_are_proved_apart_open_below_the_state_that_has_them(
    tmp_path: Path, answer: Callable[[Path, str], Any]
) -> None:
    """1 has the parts 2 and 3, of which 2 is proved by 3; 4 has 2 as a part again. Each is drawn once."""
    states = [
        state(0, "A /\\ B", move("split.", -1.0, to=1, found=True), move("cut.", -2.0, to=4)),
        state(1, "A\nthen: B", parts=[2, 3]),
        state(2, "A", move("apply h.", -1.0, to=3, found=True)),
        state(
            3,
            "B",
            move("exact b.", -1.0, to=5, found=True),
            move("left.", -2.0, refused="error", reason="no"),
        ),
        state(4, "C", parts=[6, 2]),
        state(5, "", done=True),
        state(6, "C alone"),
    ]
    run = write_sets(tmp_path, hypertree=[proof("one", 4, states=states, asked=[0, 2, 3])])
    found = answer(
        write(run),
        """
        const spine = texts('.tree > .state > .about b');
        const goals = texts('.tree > .state > .moves details.move[open] > summary > b');
        const marked = texts('.tree .move.found code');
        const facts = texts('.tree > .state:nth-child(2) > .about')[0];
        const below = all('.tree details.move').filter((node) => !node.open)[0];
        below.open = true;
        below.dispatchEvent(new Event('toggle'));
        const buttons = [...below.querySelectorAll('button')];
        const again = buttons.map((node) => node.textContent);
        buttons.at(-1).click();
        const focus = document.activeElement.querySelector('.about b').textContent;
        return { spine, goals, marked, facts, again, focus };""",
    )
    assert found["spine"] == ["state 0", "state 1"]
    assert found["goals"] == ["goal 1", "goal 2"]
    assert found["marked"] == ["split.", "apply h.", "exact b."]
    assert "2 goals, each proved separately" in found["facts"]
    assert "state 2 again" in found["again"]
    assert found["focus"] == "state 2"


def test_a_run_shows_its_first_and_last_evaluation(short: Path, answer: Callable[[Path, str], Any]) -> None:
    sets = {f"eval_{n:06d}": [proof("one", 16 - n), failure("two", 1)] for n in (0, 3, 6)}
    write_sets(short, **{"000001": [proof("three", 5)]}, **sets)
    found = answer(
        write(short),
        """return {
          sections: all('main > section').map((node) => node.id),
          legend: texts('#searches .charts figure:first-child .legend span'),
          sets: texts('#searches select option'),
          marked: texts('.tree .move.found code'),
        }""",
    )
    assert found["legend"] == ["evaluation at update 0", "evaluation at update 6"]
    assert found["sets"] == [
        *("evaluation at update 0", "update 1", "evaluation at update 3", "evaluation at update 6"),
    ]
    assert found["marked"] == ["apply h3.", "apply h2.", "apply h1."]
    assert set(found["sections"]) >= {"alarms", "curves", "searches", "rollouts"}


def test_a_page_without_searches_has_no_such_section(short: Path, answer: Callable[[Path, str], Any]) -> None:
    assert "searches" not in answer(write(short), "return all('main > section').map((node) => node.id)")
