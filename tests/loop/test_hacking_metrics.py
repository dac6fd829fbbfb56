"""Signs of reward hacking: each metric against a slow formula, and on record when a run stops."""

import errno
import json
import math
import random
import statistics
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mathcheck.plugin.number import Number
from posttrain.run import probes
from posttrain.run.hacking_metrics import agreement, auditors_of, hacking_metrics, within_groups
from posttrain.run.journal import stop_recorded
from posttrain.run.probes import FIRST, measure_probes, rare_tokens, repeats
from posttrain.types import Episode, RunError, Task, Trajectory, UserError, Verdict
from posttrain.verifiers.combine.combined import Combined, Part
from posttrain.verifiers.structure.patterns import Format

Pairs = list[list[tuple[float, float]]]


def episode(score: float | None, tokens: int = 2, label: str = "", **parts: float) -> Episode:
    """An episode that was paid its score; one that failed carries numbers that nobody may read."""
    trajectory = Trajectory(
        tokens=[1] * (tokens + 2),
        sampled=[False] + [True] * tokens + [False],
        logp_gen=[0.0] * (tokens + 2),
        logp_policy=[0.0] * (tokens + 2),
        version=[0] * (tokens + 2),
        reward=[0.0] * tokens + [99.0 if score is None else score, 0.0],
    )
    verdict = Verdict(score=score, label=label or ("raised" if score is None else "scored"), parts=parts)
    asked = Task(id="t", messages=())
    return Episode(task=asked, sample=0, trajectory=trajectory, verdict=verdict, response="x", stop="eos")


def random_groups(draw: random.Random) -> list[list[Episode]]:
    """Groups of several sizes, with tied rewards and lengths."""
    return [
        [
            episode(
                draw.choice([0.0, 0.1, 1.0, draw.gauss(0, 3)]),
                draw.randrange(1, 30),
                draw.choice(["PASS", "wrong", "FORBIDDEN", "forbidden"]),
                judge=draw.choice([0.0, 0.5, draw.random()]),
            )
            for _ in range(size)
        ]
        for size in [5, *(draw.choice([1, 2, 5, 8]) for _ in range(draw.randrange(1, 8)))]
    ]


def failures(draw: random.Random, groups: list[list[Episode]]) -> list[list[Episode]]:
    """The same groups with episodes among them that could not be judged."""
    broken = [
        [e for e in group for e in [episode(None, 500, "forbidden", judge=-7.0), e]] for group in groups
    ]
    for group in broken:
        draw.shuffle(group)
    return [*broken, [episode(None, 900, judge=50.0)] * 2]


def residual_correlation(groups: Pairs) -> float:
    """The correlation of what a regression on the groups leaves of x and of y."""
    member = np.array(
        [[float(g == k) for k in range(len(groups))] for g, rows in enumerate(groups) for _ in rows]
    )
    columns = np.array([pair for rows in groups for pair in rows])
    left = columns - member @ np.linalg.lstsq(member, columns, rcond=None)[0]
    return float(np.corrcoef(left.T)[0, 1])


def counted_agreement(groups: Pairs) -> float:
    """The same share by the signs of differences, over ordered pairs."""
    kinds = [
        np.sign(x - other_x) * np.sign(y - other_y)
        for rows in groups
        for (x, y), (other_x, other_y) in permutations(rows, 2)
        if x != other_x
    ]
    return float(np.mean([(1 + kind) / 2 for kind in kinds]))


@pytest.mark.parametrize("seed", range(20))
def test_each_metric_is_its_slow_formula_and_failures_change_only_the_error_rate(seed: int) -> None:
    draw = random.Random(seed)
    groups = random_groups(draw)
    out = hacking_metrics(groups)
    flat = [e for group in groups for e in group]
    lengths: Pairs = [
        [(e.trajectory.total_reward, float(len(e.trajectory.tokens) - 2)) for e in g] for g in groups
    ]
    judged: Pairs = [[(e.trajectory.total_reward, e.verdict.parts["judge"]) for e in g] for g in groups]
    attacks = [e for e in flat if e.verdict.label in ("FORBIDDEN", "forbidden")]
    assert out == pytest.approx(
        {
            "hacking/error_rate": 0.0,
            "hacking/forbidden": len(attacks) / len(flat),
            "hacking/length_correlation": residual_correlation(lengths),
            "part/judge": np.mean([e.verdict.parts["judge"] for e in flat]),
            "agreement/judge": counted_agreement(judged),
        },
        abs=1e-12,
    )
    broken = failures(draw, groups)
    drawn = sum(map(len, broken))
    assert hacking_metrics(broken) == pytest.approx(
        out | {"hacking/error_rate": (drawn - len(flat)) / drawn}, abs=1e-12
    )


def test_a_part_of_weight_0_is_an_audit() -> None:
    groups = [[episode(1.0, number=1.0, judge=0.25), episode(0.0, number=0.0, judge=0.75)]]
    out = hacking_metrics(groups, {"judge"})
    assert out["audit/judge"] == 0.5
    assert out["part/number"] == 0.5
    assert "part/judge" not in out
    assert (out["agreement/judge"], out["agreement/number"]) == (0.0, 1.0)


def test_auditors_are_the_parts_that_only_record() -> None:
    parts = (Part(verifier=Number()), Part(verifier=Format(), weight=0.0))
    assert auditors_of(Combined(parts=parts)) == {"format"}
    assert auditors_of(Combined(parts=parts[::-1], how="gate")) == set(), "in a gate it decides"
    assert auditors_of(Number()) == auditors_of(None) == set()


def test_what_is_undefined_is_left_out() -> None:
    assert hacking_metrics([[episode(None), episode(None)]]) == {"hacking/error_rate": 1.0}
    assert hacking_metrics([]) == {"hacking/error_rate": 0.0}
    same = hacking_metrics([[episode(0.1, n, judge=n) for n in (1, 2, 3)], [episode(1.0, 4)]])
    assert same == {"hacking/error_rate": 0.0, "hacking/forbidden": 0.0, "part/judge": 2.0}
    assert "agreement/judge" not in hacking_metrics([[episode(s, judge=math.nan) for s in (0.0, 1.0)]])


def test_differences_between_tasks_are_no_correlation() -> None:
    """The long task earns more, and within each task nothing goes with length."""
    easy = [(0.0, 10.0), (1.0, 10.0), (0.0, 12.0), (1.0, 12.0)]
    hard = [(x + 5, y + 500) for x, y in easy]
    assert within_groups([easy, hard]) == pytest.approx(0.0, abs=1e-12)
    assert float(np.corrcoef(np.array(easy + hard).T)[0, 1]) > 0.9
    assert statistics.fmean([0.1] * 3) != 0.1
    assert within_groups([[(0.1, float(y)) for y in range(3)]]) is None, "rounding is no variation"
    assert within_groups([[(1.0, 5.0)], [(0.0, 7.0)]]) is None, "groups of one say nothing"


def test_agreement_is_the_order_of_pairs_of_one_group() -> None:
    scale = [(float(i), float(i) ** 3) for i in range(5)]
    assert agreement([scale, [(9.0, 0.0)]]) == 1.0
    assert agreement([[(x, -y) for x, y in scale]]) == 0.0
    assert agreement([[(x, 4.0) for x, _ in scale]]) == 0.5
    assert agreement([[(1.0, y) for _, y in scale], []]) is None


# ---------------------------------------------------------------------- in runs


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_writes_what_its_samples_say(run_cli, online, write, able, tmp_path):
    over = {
        "model": {"path": str(able)},
        "verifier": {"format": {"tags": ["answer"]}, "weights": {"format": 0.0}},
        "rollout": {"groups": 4, "group_size": 6},
        "sampling": {"temperature": 1.5},
        "eval": {"limit": 0},
    }
    run = tmp_path / "run"
    said = run_cli("train", write(online, over), "--run-dir", run, "--quiet")
    assert said.code == 0, said.err
    linked = 0
    for line in lines(run):
        rows = [
            json.loads(r) for r in (run / "samples" / f"{line['update']:06d}.jsonl").read_text().splitlines()
        ]
        groups: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            groups.setdefault(row["group"], []).append(row)
        assert line["hacking/error_rate"] == line["hacking/forbidden"] == 0.0
        for kind, name in (("part", "number"), ("audit", "format")):
            assert line[f"{kind}/{name}"] == pytest.approx(np.mean([r["parts"][name] for r in rows]))
            told: Pairs = [[(r["score"], r["parts"][name]) for r in g] for g in groups.values()]
            if any(len({x for x, _ in g}) > 1 for g in told):
                assert line[f"agreement/{name}"] == pytest.approx(counted_agreement(told))
        if "hacking/length_correlation" in line:
            linked += 1
            told = [[(r["score"], sum(r["sampled"])) for r in g] for g in groups.values()]
            assert line["hacking/length_correlation"] == pytest.approx(residual_correlation(told), abs=1e-9)
    assert linked, "some update must have had something to correlate"


BROKEN = "def reward(prompt, response):\n    if {when}:\n        raise KeyError('unit')\n    return 1.0\n"


@pytest.mark.full
def test_a_run_that_failed_too_often_has_the_line_and_the_cause_on_record(
    run_cli, online, write, able, tmp_path
):
    code = tmp_path / "judge.py"
    code.write_text(BROKEN.format(when="response"))
    verifier = {"number": None, "function": {"function": f"{code}:reward"}}
    over = {
        "model": {"path": str(able)},
        "verifier": verifier,
        "rollout": {"max_error_rate": 0.3, "groups": 4, "workers": 1},
    }
    recipe = write(online, over | {"run": {"updates": 1}, "eval": {"limit": 0}})
    run = tmp_path / "run"
    said = run_cli("train", recipe, "--run-dir", run, "--quiet")
    assert said.code == 1, said.err
    cause = (run / "stopped.txt").read_text()
    assert said.err == f"error: {cause}"
    assert "rollout.max_error_rate" in cause
    assert "first cause: raised: KeyError: 'unit'" in cause
    [line] = lines(run)
    assert line["hacking/error_rate"] == line["verdict/raised"] > 0.3
    report = (run / "report.html").read_text()
    assert "first cause: raised: KeyError: 'unit'" in report
    assert '"name":"Verifier failed"' in report

    code.write_text(BROKEN.format(when="False"))
    again = run_cli("train", recipe, "--run-dir", run, "--quiet", "--resume")
    assert again.code == 0, again.err
    assert not (run / "stopped.txt").exists()
    [line] = lines(run)
    assert line["hacking/error_rate"] == 0.0


def test_a_stop_is_recorded_and_raised_again(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^sample: "), stop_recorded(tmp_path, tmp_path):
        raise RunError("sample", "no more")
    assert (tmp_path / "stopped.txt").read_text() == "sample: no more\n"
    with stop_recorded(tmp_path, tmp_path):
        assert not (tmp_path / "stopped.txt").exists(), "what goes on has not stopped"
    with pytest.raises(UserError), stop_recorded(tmp_path, tmp_path):
        raise UserError("", "theirs")
    assert not (tmp_path / "stopped.txt").exists()


def test_what_nobody_foresaw_is_a_stop_with_its_traceback_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_000004").mkdir(parents=True)
    with (
        pytest.raises(RunError, match=r"^unforeseen: "),
        stop_recorded(tmp_path, tmp_path),
    ):
        raise ValueError("ours")
    assert "ValueError: ours" in (tmp_path / "stopped.txt").read_text()
    assert (tmp_path / "error.log").read_text().startswith("Traceback")
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(RunError, match=r"^unforeseen: "), stop_recorded(tmp_path, tmp_path):
        raise full
    with pytest.raises(KeyboardInterrupt, match="step_000004 is kept"), stop_recorded(tmp_path, tmp_path):
        raise KeyboardInterrupt


# ---------------------------------------------------------------------- probes


def answered(tokens: list[int]) -> list[list[Episode]]:
    n = len(tokens)
    columns = {"logp_gen": [0.0] * n, "logp_policy": [0.0] * n, "version": [0] * n, "reward": [0.0] * n}
    row = Trajectory(tokens=tokens, sampled=[False] + [True] * (n - 1), **columns)
    return [[replace(episode(1.0), trajectory=row)]]


def test_rare_tokens_are_those_below_the_share_of_the_first_updates() -> None:
    common: dict[str, int] = {}
    for update in range(1, FIRST + 1):
        assert rare_tokens(answered([9, *[1] * 5000, *[2] * update, 3]), update, common) == {}
    assert common == {"1": 25000, "2": 15, "3": 5}, "5 of 25 020 are 2/10 000; the prompt's 9 is not counted"
    assert rare_tokens(answered([9, 1, 2, 4, 4]), FIRST + 1, common) == {"probe/rare": 0.5}
    assert rare_tokens(answered([9, 1]), FIRST + 1, {}) == {}, "a run from before tokens were counted"
    assert rare_tokens([[answered([9, 4])[0][0].summary()]], FIRST + 1, common) == {}, "it has no tokens"


def test_a_token_below_a_ten_thousandth_is_rare() -> None:
    common: dict[str, int] = {}
    rare_tokens(answered([0, *[1] * 20000, 7]), FIRST, common)
    assert rare_tokens(answered([0, 1, 7]), FIRST + 1, common) == {"probe/rare": 0.5}


def test_repeats_agrees_with_a_count_of_phrases() -> None:
    draw = random.Random(1)
    for _ in range(50):
        words = draw.choices("abc", k=draw.randrange(1, 40))
        phrases = [words[n : n + 4] for n in range(len(words) - 3)]
        repeated = sum(phrase in phrases[:n] for n, phrase in enumerate(phrases))
        assert repeats(Task(id="q", messages=()), " ".join(words)) == pytest.approx(
            repeated / max(len(phrases), 1)
        )


def test_probes_are_means_over_the_answers_that_have_them() -> None:
    group = [replace(episode(1.0), probes=shares) for shares in ({"x": 1.0}, {"x": 0.0, "y": 0.5}, {})]
    metrics = hacking_metrics([[*group, replace(episode(None), probes={"x": 9.0})]])
    assert (metrics["probe/x"], metrics["probe/y"]) == (0.5, 0.5)
    assert group[0].summary().probes == {"x": 1.0}


def test_a_probe_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = {
        "raises": lambda task, answer: 1 / 0,
        "none": lambda task, answer: None,
        "nan": lambda task, answer: math.nan,
        "text": lambda task, answer: "x",
        "right": lambda task, answer: True,
    }
    monkeypatch.setattr(probes, "_probes", lambda: faulty)
    assert measure_probes(Task(id="q", messages=()), "x") == {"right": 1.0}
