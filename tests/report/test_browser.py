"""The page in a real browser: it draws without an error, shows the right numbers, and is no blank sheet.

Needs Chromium; without it every test here is skipped with the way to install it.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.report import curves_svg, write

Said = Callable[..., dict[str, str]]
Answer = Callable[..., Any]
Picture = Callable[..., Any]


@pytest.fixture(scope="module")
def report(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the run of 40 updates."""
    return write(finished, tmp_path_factory.mktemp("page") / "report.html")


def rows_of(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


@pytest.mark.sample("1280-light", "375-dark")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375])
def test_the_page_is_a_picture(
    report: Path, tmp_path: Path, width: int, scheme: str, picture: Picture
) -> None:
    # A window of Chromium has a least width above 400, a frame in it has none.
    frame = tmp_path / "frame.html"
    frame.write_text(
        '<body style="margin:0"><iframe style="border:0;display:block;height:100vh;'
        f'width:{width}px" src="{report.as_uri()}"></iframe>'
    )
    shot = picture(frame.as_uri(), tmp_path / "shot.png", max(width, 600), 2400, scheme)[:, :width]
    assert shot.shape == (2400, width, 3)
    brightness = float(np.median(shot))
    assert brightness > 0.9 if scheme == "light" else brightness < 0.15
    # Every tenth of the page shows something, and the curves bring colours that text has not.
    for part in np.array_split(shot[:2000], 10):
        assert float(part.std()) > 0.01
    saturation = shot.max(axis=2) - shot.min(axis=2)
    assert float((saturation > 0.4).mean()) > 0.005


def test_the_picture_of_curves_is_a_picture(
    tmp_path: Path, another: Callable[[Path, int], Path], picture: Picture
) -> None:
    runs = [another(tmp_path / str(seed), seed) for seed in range(2)]
    svg = curves_svg(runs, tmp_path / "curve.svg", "reward/mean", "Reward")
    light = picture(svg.as_uri(), tmp_path / "light.png", 760, 360, "light")
    dark = picture(svg.as_uri(), tmp_path / "dark.png", 760, 360, "dark")
    assert float(np.median(light)) > 0.9
    assert float(np.median(dark)) < 0.15
    assert float((light[:, :, 2] - light[:, :, 0] > 0.3).mean()) > 0.002, "no blue line"


CHARTS = [
    *("Reward", "Accuracy", "Spread within groups", "Groups", "Loss"),
    *("Verdicts", "Verdicts by class", "Reward with length", "Reward by length"),
    *("Tampering and failures", "Agreement with the reward", "Auditors", "Parts of the reward"),
    *("KL", "Entropy", "Response length", "Cut by the limit", "Groups that teach nothing"),
    *(
        "Clip fraction",
        "Gradient norm",
        "Learning rate",
        "Effective sample size",
        "Lag",
        "Time per update",
        "Speed",
        "Model FLOPs",
        "Memory",
        "mine/heat",
    ),
]
FOLDED = ["Tampering and failures", "Cut by the limit", "Lag"]
"""Those of them that never move in the run of 40 updates."""


def test_labels_of_axes_are_not_cut_and_what_never_moves_is_folded(
    short: Path, tmp_path: Path, answer: Answer
) -> None:
    lines = [json.loads(line) for line in (short / "metrics.jsonl").read_text().splitlines()]
    last = lines[-1]["update"]
    for line in lines:
        line |= {"lr": 1e-6, "loss": -9e-7 * line["update"] / last, "grad_norm": 1e5 * line["update"]}
        line |= {"clip/fraction": 0.0, "kl/ref": 0.0, "kl/old": 0.0, "kl/mismatch": 0.001 * line["update"]}
    (short / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = answer(
        write(short),
        """return {
          cut: all('.plot .axes text').filter((t) => t.getBBox().x < 0).map((t) => t.textContent),
          labels: texts('.plot .axes text'),
          charts: texts('#curves h4'), folded: texts('#curves .constant').join(' ')}""",
    )
    assert max(map(len, found["labels"])) >= 7, "a number with a sign and an exponent"
    assert found["cut"] == []
    assert "Learning rate 1e−6" in found["folded"]
    assert "Clip fraction 0%" in found["folded"]
    assert {"Learning rate", "Clip fraction"}.isdisjoint(found["charts"])
    assert {"KL", "Loss", "Gradient norm"} <= set(found["charts"]), "one line of it moves"


def test_every_curve_is_drawn_and_unknown_ones_stand_in_their_own_section(
    report: Path, answer: Answer
) -> None:
    found = answer(
        report,
        """return {
          ready: document.documentElement.dataset.ready,
          charts: texts('#curves h4'),
          last: text('#curves h3:last-of-type'),
          folded: texts('#curves .constant'),
          empty: all('.plot').filter((plot) => !plot.querySelector('path[d^=M]')).length,
        }""",
    )
    assert found["ready"] == "true"
    assert found["charts"] == [name for name in CHARTS if name not in FOLDED]
    assert all(name in " ".join(found["folded"]) for name in FOLDED), found["folded"]
    assert (found["last"], found["empty"]) == ("Other", 0)


def test_a_hacked_run_shows_where_and_why_it_stopped(hacked: Path, tmp_path: Path, answer: Answer) -> None:
    run = tmp_path / "hacked"
    shutil.copytree(hacked, run)
    (run / "stopped.txt").write_text("the verifier failed on 9 of 40 episodes; first cause: raised: unit")
    found = answer(
        write(run),
        """return {stopped: text('#top .note.failure'), alarms: texts('.alarms b'),
          red: all('.chart.alarmed').map((c) => c.querySelector('h4').textContent),
          classes: texts('tbody th'), legend: texts('.legend').map((t) => t.replace(/[\\d.%]+/g, ' ').trim()),
          colours: all('tbody th i').map((i) => i.style.background),
          dots: all('.still circle').length, lines: all('.still path').length, last: texts('tbody td b')}""",
    )
    assert found["stopped"] == (
        "The run stopped: the verifier failed on 9 of 40 episodes; first cause: raised: unit."
    )
    assert found["alarms"] == ["Tampering", "Auditor disagrees", "Longer pays"]
    assert found["red"] == ["Reward with length", "Tampering and failures", "Auditors"]
    assert found["classes"] == ["PASS", "WRONG", "TIMEOUT", "RUNTIME_ERROR", "FORBIDDEN"]
    assert "PASS WRONG TIMEOUT RUNTIME_ERROR FORBIDDEN" in found["legend"]
    assert found["colours"] == ["var(--c1)", "var(--c2)", "var(--c4)", "var(--c5)", "var(--attack)"]
    assert found["lines"] == 2
    assert found["dots"] >= 8
    shares = [row.get("verdict/FORBIDDEN", 0.0) for row in rows_of(run, "metrics.jsonl")[-5:]]
    assert float(found["last"][-1].rstrip("%")) == pytest.approx(100 * sum(shares) / 5, rel=5e-3)


def test_a_class_has_the_colour_of_its_name_in_every_run(short: Path, answer: Answer) -> None:
    """Whatever other classes there are, and in whichever case a verifier writes its own."""
    colour = "t.querySelector('i').style.background"
    script = f"return Object.fromEntries(all('tbody th').map((t) => [t.textContent, {colour}]))"
    lines = rows_of(short, "metrics.jsonl")
    plain = [{k: v for k, v in line.items() if not k.startswith("verdict/")} for line in lines]
    found = []
    for classes in (["odd", "right", "wrong"], ["WRONG", "blank", "odd", "PASS", "no_answer"]):
        told = [line | {f"verdict/{c}": 1 / len(classes) for c in classes} for line in plain]
        (short / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
        found.append(answer(write(short), script))
    first, second = found
    assert first["odd"] == second["odd"]
    assert (first["right"], first["wrong"]) == (second["PASS"], second["WRONG"]) == ("var(--c1)", "var(--c2)")
    assert len(set(second.values())) == 5


def test_a_pointer_over_one_chart_reads_all_charts(report: Path, finished: Path, answer: Answer) -> None:
    found = answer(
        report,
        """const plots = all('.plot');
        const box = plots[0].getBoundingClientRect();
        const clientX = box.left + 46 + (box.width - 58) * 20 / 40;
        const at = {clientX, clientY: box.top + 40, bubbles: true};
        plots[0].dispatchEvent(new PointerEvent('pointermove', at));
        const read = (k) => [...plots[k].closest('figure').querySelectorAll('b')].map((b) => b.textContent);
        return {where: text('.cursorbar .where'), reward: read(0),
          entropy: read(plots.findIndex((p) => p.closest('figure').textContent.startsWith('Entropy'))),
          lines: all('.cursor line').length, plots: plots.length};""",
    )
    line = next(row for row in rows_of(finished, "metrics.jsonl") if row["update"] == 20)
    assert found["where"].startswith("update 20")
    assert float(found["reward"][0]) == pytest.approx(line["reward/mean"], abs=5e-4)
    assert float(found["reward"][1]) == pytest.approx(line["eval/reward"], abs=5e-4)
    assert float(found["entropy"][0]) == pytest.approx(line["entropy"], abs=5e-4)
    assert found["lines"] == found["plots"]


def test_a_link_opens_one_response_and_its_tokens_hold_its_numbers(
    report: Path, finished: Path, answer: Answer
) -> None:
    found = answer(
        report,
        """const tokens = all('.linked .tok');
        tokens[1].dispatchEvent(new PointerEvent('pointerover', {bubbles: true}));
        const values = texts('#tip dd');
        return {text: tokens.map((t) => t.textContent).join(''),
          tip: Object.fromEntries(texts('#tip dt').map((n, i) => [n, values[i].replace('−', '-')])),
          tipText: text('#tip'), verdict: text('.linked .verdict'), reason: text('.linked .reason'),
          by: text('[aria-label="Colour by"] [aria-pressed=true]'),
          coloured: tokens.filter((t) => t.style.background).length};""",
        "#step=train-12&group=3&sample=5&by=log_ratio",
    )
    rows = rows_of(finished, "samples/000012.jsonl")
    row = next(r for r in rows if (r["group"], r["sample"]) == (3, 5))
    assert found["text"] == "".join(row["pieces"])
    assert (found["verdict"], found["reason"], found["by"]) == (row["label"], row["reason"], "log-ratio")
    assert found["coloured"] == len(row["pieces"])
    tip = found["tip"]
    assert float(tip["logp (training)"]) == pytest.approx(row["logp"][1], abs=1e-5)
    assert float(tip["log-ratio"]) == pytest.approx(row["logp"][1] - row["logp_policy"][1], abs=2e-5)
    assert float(tip["advantage"]) == pytest.approx(row["advantage"][1], abs=1e-5)
    assert float(tip["entropy"]) == pytest.approx(row["entropy"][1], abs=1e-5)
    assert tip["weights"] == "version 11"
    assert "null" not in found["tipText"]


def test_label_and_search_filter_the_responses(report: Path, finished: Path, answer: Answer) -> None:
    rows = rows_of(finished, "samples/000006.jsonl")
    wanted = next(r for r in rows if r["label"] == "wrong")
    found = answer(
        report,
        """return {groups: texts('.group .task'), bright: all('.group .dots i:not(.dim)').length,
          labels: texts('.response .verdict')}""",
        f"#step=train-6&label=wrong&query={wanted['task'].upper()}",
    )
    matching = [r for r in rows if r["label"] == "wrong" and r["task"] == wanted["task"]]
    assert found["groups"] == [wanted["task"]]
    assert found["bright"] == len(matching)
    assert found["labels"] == ["wrong"] * len(matching)


def test_a_run_that_samples_nothing_speaks_of_no_rollouts(
    finished: Path, tmp_path: Path, answer: Answer
) -> None:
    ask = "return {text: one('main').textContent + text('#nav'), skip: all('.skip').length};"
    for sampled in (False, True):
        run = tmp_path / f"run{sampled}"
        shutil.copytree(finished, run)
        shutil.rmtree(run / "samples")
        if not sampled:
            lines = [{"update": u, "loss": 2.0 / (1 + u), "eval/loss": 2.5} for u in range(4)]
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        found = answer(write(run), ask)
        assert ("Rollouts" in found["text"], found["skip"]) == (sampled, int(sampled))
        assert "Rollouts of this update" not in found["text"], "there are none to be shown"


def test_walking_through_the_browser_raises_no_error(report: Path, answer: Answer) -> None:
    found = answer(
        report,
        """const steps = [];
        const press = (name) => all('#rollouts button').find((b) => b.textContent === name).click();
        const where = () => one('#rollouts .where').firstChild.textContent;
        for (const name of ['log-ratio', 'entropy', 'reward', 'log-probability',
          '‹', '‹', '›', 'Evaluation', '‹', 'Training']) {
          press(name);
          steps.push(where());
        }
        const slider = one('input[type=range]');
        slider.value = 0;
        slider.dispatchEvent(new Event('input'));
        steps.push(where(), location.hash);
        const same = slider === one('input[type=range]');
        one('input[type=search]').value = 'nothing has this text';
        one('input[type=search]').dispatchEvent(new Event('input'));
        steps.push(text('.detail'));
        for (const axis of [1, 2]) all('.axis button')[axis].click();
        return {steps, same, pressed: text('.axis [aria-pressed=true]')};""",
    )
    assert found["steps"][:4] == ["update 40"] * 4
    assert found["steps"][4:11] == [
        "update 39", "update 38", "update 39",
        "evaluation at update 40", "evaluation at update 30", "update 30", "update 1",
    ]  # fmt: skip
    assert found["steps"][11].startswith("#step=train-1")
    assert found["steps"][12] == "No rollout of this step matches."
    assert (found["same"], found["pressed"]) == (True, "tokens")


HOSTILE = (
    '</script><b>bold</b><img src=x onerror="document.documentElement.dataset.owned=1">\u202e\x1b\x00 עברית'
)


def test_hostile_text_is_shown_as_text(short: Path, answer: Answer, said: Said) -> None:
    (short / "plan.json").write_text(
        json.dumps({"title": HOSTILE, "sections": [{"title": HOSTILE, "rows": [[HOSTILE, HOSTILE]]}]})
    )
    rows = rows_of(short, "samples/000006.jsonl")
    for row in rows:
        row |= dict.fromkeys(("task", "prompt", "answer", "label", "reason", "stop"), HOSTILE)
        row["pieces"][0] = HOSTILE
        row["parts"] = {HOSTILE: 1.0, "other": None}
    (short / "samples" / "000006.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"upd')
    with (short / "metrics.jsonl").open("a") as file:
        line = {
            "update": 7,
            f"verdict/{HOSTILE}": 0.5,
            HOSTILE: 1.0,
            "verdict/__proto__": 0.1,
            "grad_norm": None,
        }
        file.write(json.dumps(line) + "\n" + '{"update": 8, "rew')
    page = write(short)
    assert said(page) == {"ready": "true"}
    found = answer(
        page,
        """return {foreign: all('b b, img, h1 *').length, bold: texts('b').filter((b) => b === 'bold').length,
          title: text('h1'), owned: document.documentElement.dataset.owned ?? null,
          token: text('.tok'), alarms: text('.count'), notes: all('#top .note li').length}""",
    )
    shown = HOSTILE.replace("\u202e", "⟨U+202E⟩").replace("\x1b", "⟨U+001B⟩").replace("\x00", "⟨U+0000⟩")
    assert found == {
        "foreign": 0, "bold": 0, "title": shown, "owned": None, "token": shown, "alarms": "1", "notes": 2,
    }  # fmt: skip


@pytest.mark.parametrize("width", [1280, 375, 320])
def test_nothing_is_wider_than_the_window(
    short: Path, tmp_path: Path, width: int, said: Said, asking: Callable[..., Path]
) -> None:
    plan = {"title": "w" * 300, "sections": [{"title": "Method", "rows": [["k" * 300, "v" * 300]]}]}
    (short / "plan.json").write_text(json.dumps(plan))
    rows = rows_of(short, "samples/000006.jsonl")
    for row in rows:
        row |= dict.fromkeys(("task", "prompt", "answer", "label", "reason", "stop"), "x" * 300)
        row["pieces"][0] = "y" * 300
    (short / "samples" / "000006.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (short / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"update": 7, "verdict/" + "V" * 300: 0.5, "audit/" + "a" * 300: 1.0}) + "\n")
    (short / "stopped.txt").write_text("s" * 300)
    script = "const root = document.documentElement; return [root.scrollWidth, root.clientWidth];"
    asked = asking(write(short), script)
    frame = tmp_path / "frame.html"
    # A window of Chromium has a least width above 400, a frame in it has none.
    frame.write_text(
        "<script>onmessage = (event) => { document.documentElement.dataset.answer = event.data; };</script>"
        f'<iframe style="border:0;height:900px;width:{width}px" src="{asked.as_uri()}"></iframe>'
    )
    assert json.loads(said(frame)["answer"]) == [width, width]


def test_a_run_with_nothing_yet_and_one_of_a_single_update_draw(tmp_path: Path, said: Said) -> None:
    (tmp_path / "config.toml").write_text("[run]\n")
    assert said(write(tmp_path)) == {"ready": "true"}
    (tmp_path / "metrics.jsonl").write_text('{"update": 0, "eval/accuracy": 0.25, "odd": null}\n')
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "eval_000000.jsonl").write_text('{"update": 0}\n')
    assert said(write(tmp_path)) == {"ready": "true"}


def test_an_actor_critic_has_its_section_and_its_tokens_a_value(
    short: Path, answer: Answer, tmp_path: Path
) -> None:
    ask = """return {groups: texts('#curves h3'), says: texts('#curves .about'), titles: texts('#curves h4'),
      by: texts('#rollouts .choice button'), words: texts('.words dt code'), means: text('.words dd'),
      places: all('.words dt').map((node) => node.title)}"""
    plain = answer(write(short), ask)
    assert "Critic" not in plain["groups"]
    assert "value" not in plain["by"]
    assert plain["words"][0] == "reward/mean"
    assert plain["means"].startswith("how well the policy does while it samples")
    assert plain["places"][0] == "docs/metrics.md#reward-mean"
    lines, rows = rows_of(short, "metrics.jsonl"), rows_of(short, "samples/000006.jsonl")
    for line in lines[1:]:
        n = line["update"]
        line |= {
            "value/mean": 0.1 * n,
            "value/loss": 1 / n,
            "value/explained": 0.1 * n - 0.2,
            "pass@1": 0.01 * n,
        }
        line |= {"pass@16": 0.1 * n, "pass@2": 0.02 * n, "rewards/accuracy": 0.1 * n, "rewards/chosen": -n}
    for row in rows:
        row["value"] = [0.1 * t for t in range(len(row["pieces"]))]
    for name, each in (("metrics.jsonl", lines), ("samples/000006.jsonl", rows)):
        (short / name).write_text("".join(json.dumps(row) + "\n" for row in each))
    found = answer(write(short), ask, "#step=train-6&by=value")
    assert {"Critic", "Preferences"} <= set(found["groups"])
    assert any("A critic learns V" in says for says in found["says"])
    assert {"Explained variance", "Value loss", "Value", "Solved within k answers"} <= set(found["titles"])
    assert "value" in found["by"]
    assert "pass@1, pass@2, pass@16" in found["words"], "told once, in the order of their numbers"
    coloured = (
        "return {scale: text('.scale b'), coloured: all('.tok').filter((t) => t.style.background).length}"
    )
    seen = answer(write(short), coloured, "#step=train-6&by=value")
    assert seen["scale"] == "value"
    assert seen["coloured"] > 0


def test_a_script_that_fails_is_said_on_the_page(report: Path, tmp_path: Path, said: Said) -> None:
    text = report.read_text(encoding="utf-8")
    broken = tmp_path / "broken.html"
    broken.write_text(re.sub(r'id="run">\{', 'id="run">{{', text), encoding="utf-8")
    found = said(broken)
    assert "ready" not in found
    assert "JSON" in found["error"]


LANES = """return {
  labels: texts('.lanes tbody th'), kinds: texts('.lanes thead th').slice(1),
  cells: all('.lanes tbody tr').map((row) => [...row.querySelectorAll('td')].map((cell) => cell.textContent)),
  bars: all('.timeline path').map((path) => path.getAttribute('d').split('M').length - 1),
  others: texts('#curves h4')}"""


def timed(run: Path, samplers: int, ahead: bool) -> list[dict[str, Any]]:
    """The lines of a run whose samplers said what they did."""
    lines = rows_of(run, "metrics.jsonl")
    for line in lines:
        for n in range(samplers):
            spent = {"sample": 1.0 + n, "judge": 0.5, "weights": 0.25, "wait": 2.0}
            line |= {f"samplers/{n}/{what}": seconds for what, seconds in spent.items()}
        line |= {"samplers/busy": 0.5} if ahead else {}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def test_who_did_what_is_a_lane_for_the_learner_and_one_for_each_sampler(short: Path, answer: Answer) -> None:
    last = timed(short, 2, True)[-1]
    found = answer(write(short), LANES)
    assert found["labels"] == ["learner", "sampler 0", "sampler 1"]
    cells = [dict(zip(found["kinds"], row, strict=True)) for row in found["cells"]]
    assert (cells[1]["sampling"], cells[2]["sampling"]) == ("1 s", "2 s")
    assert (cells[2]["judging"], cells[2]["waiting"]) == ("0.5 s", "2 s")
    assert cells[0]["sampling"] == "–"
    assert float(cells[0]["waiting"].split()[0]) == pytest.approx(last["time/sample"], rel=0.06)
    assert float(cells[0]["training"].split()[0]) == pytest.approx(last["time/train"], rel=0.06)
    assert max(found["bars"]) == len(rows_of(short, "metrics.jsonl"))
    assert not [name for name in found["others"] if name.startswith("samplers/")]


def test_of_a_run_that_takes_turns_there_is_one_lane(short: Path, answer: Answer) -> None:
    last = timed(short, 1, False)[-1]
    found = answer(write(short), LANES)
    assert found["labels"] == ["the run"]
    [cells] = [dict(zip(found["kinds"], row, strict=True)) for row in found["cells"]]
    assert "waiting" not in cells
    spent = {kind: float(cell.split()[0]) for kind, cell in cells.items()}
    assert spent["judging"] == pytest.approx(spent["sampling"] / 2, rel=0.1)
    assert spent["judging"] + spent["sampling"] == pytest.approx(last["time/sample"], rel=0.06)
