"""claims: cards are complete, verdicts follow from figures, and an experiment runs to its verdict."""

import datetime
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from posttrain.cli import run
from posttrain.errors import UserError
from posttrain.models import pretrained
from posttrain.models.fingerprint import digest
from posttrain.process import machine
from posttrain.types import Trajectory
from posttrain.verifiers.structure.patterns import Regex
from posttrain_study.claims import cards as evidence
from posttrain_study.claims import digit_sums, interruption, lag, online, r1
from posttrain_study.claims.experiment import (
    Experiment,
    Results,
    VerdictRule,
    find_experiment,
    load,
    save_picture,
)
from posttrain_study.claims.tiny import QUESTIONS

ROOT = Path(__file__).resolve().parents[3]
CARDS = evidence.cards()
PAGES = ROOT / "docs" / "claims"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
each_card = pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)


# ---------------------------------------------------------------------- the cards


@each_card
def test_a_card_has_an_experiment_with_its_rule_and_its_picture(card: evidence.Card) -> None:
    page = card.file.read_text(encoding="utf-8")
    assert len(card.claim) < 160
    assert card.date <= datetime.date.today()
    assert f"<!-- generated: card {card.name} -->" in page
    assert "**Answer.**" in page
    if card.experiment:
        experiment = find_experiment(card)
        assert isinstance(experiment, Experiment)
        assert (PAGES / f"{card.experiment}.svg").exists()
        assert f"]({card.experiment}.svg)" in page
    else:
        assert (ROOT / "recipes" / f"{card.recipe}.toml").exists()


@each_card
def test_the_verdict_of_a_card_follows_from_its_values(card: evidence.Card) -> None:
    if card.values:
        assert find_experiment(card).rules[card.name].decide(card.values).verdict == card.verdict
    else:
        assert not card.experiment, "posttrain claims NAME --run prints the values"


def test_every_rule_has_a_card_and_every_experiment_is_named() -> None:
    experiments = {card.experiment for card in CARDS.values() if card.experiment}
    ours = Path(evidence.__file__).parent
    assert experiments == {
        p.stem for p in ours.glob("*.py") if "\nEXPERIMENT = " in p.read_text(encoding="utf-8")
    }
    for name in experiments:
        shared = {card.name: card for card in CARDS.values() if card.experiment == name}
        assert find_experiment(next(iter(shared.values()))).rules.keys() == shared.keys()
    assert {p.stem for p in PAGES.glob("*.svg")} <= experiments | CARDS.keys()


HEAD = """---
claim: A is better than B
source: course notes A, section 1
experiment: label_noise
minutes: 1
seeds: 3
date: 2026-01-31
verdict: undecided
values: [1, -1, 0.5]
changes: more seeds
---
# A and B
"""


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("claim: A is better than B\n", "", "claim"),
        ("undecided", "true", "verdict"),
        ("undecided", "proven", "verdict"),
        ("values: [1, -1, 0.5]", "values: [1]", "values"),
        ("experiment: label_noise\n", "", ""),
        ("minutes: 1", "minuten: 1", "minuten"),
        ("date: 2026-01-31", "date: in January", "date"),
        ("A is better than B", "better: A", ""),
        ("---\nclaim", "claim", ""),
    ],
)
def test_a_wrong_head_is_refused_with_its_place(old: str, new: str, key: str, tmp_path: Path) -> None:
    file = tmp_path / "card.md"
    file.write_text(HEAD)
    assert evidence.read(file).values == (1.0, -1.0, 0.5)
    file.write_text(HEAD.replace(old, new, 1))
    with pytest.raises(UserError) as refused:
        evidence.read(file)
    assert refused.value.key == (f"{file}: {key}" if key else str(file))


# ---------------------------------------------------------------------- rules


def rule(margin: float = 0.0, *, equal: bool = False, exact: bool = False) -> VerdictRule:
    return VerdictRule("x", lambda figures: float(figures["x"]), margin, equal, exact)


@pytest.mark.parametrize(
    ("made", "values", "verdict"),
    [
        (rule(), [1.0, 1.1, 0.9], evidence.HOLDS),
        (rule(), [-1.0, -1.1, -0.9], evidence.FAILS),
        (rule(), [1.0, -1.1, 0.9], evidence.UNDECIDED),
        (rule(), [1.0, 1.1], evidence.UNDECIDED),
        (rule(), [1.0], evidence.UNDECIDED),
        (rule(2.0), [1.0, 1.1, 0.9], evidence.FAILS),  # above 0, but too little to matter
        (rule(1.0), [1.0, 1.1, 0.9], evidence.HOLDS),
        (rule(1.0), [-0.5, 2.0, 0.9], evidence.UNDECIDED),
        (rule(1.0, equal=True), [0.1, -0.1, 0.2], evidence.HOLDS),
        (rule(0.1, equal=True), [1.0, 1.1, 0.9], evidence.FAILS),
        (rule(0.1, equal=True), [-1.0, -1.1, -0.9], evidence.FAILS),
        (rule(0.1, equal=True), [0.1, -0.1, 0.2], evidence.UNDECIDED),
        (rule(1e-9, exact=True), [0.2], evidence.HOLDS),
        (rule(1e-9, exact=True), [1e-12], evidence.FAILS),
        (rule(1e-9, equal=True, exact=True), [1e-12], evidence.HOLDS),
    ],
)
def test_a_rule_decides_by_its_interval(made: VerdictRule, values: list[float], verdict: str) -> None:
    assert made.decide(values).verdict == verdict


def test_the_interval_is_that_of_students_t() -> None:
    decision = rule().decide([1.0, 2.0, 6.0])
    half = 4.302653 * math.sqrt(7 / 3)  # the variance of 1, 2, 6 is 7, and t of two degrees of freedom
    assert (decision.mean, decision.low, decision.high) == pytest.approx(
        (3.0, 3.0 - half, 3.0 + half), rel=1e-5
    )


@pytest.mark.parametrize("options", [{"equal": True}, {"exact": True}, {"margin": -0.1}])
def test_a_rule_without_a_sensible_margin_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="margin"):
        VerdictRule("x", lambda figures: 0.0, **options)  # type: ignore[arg-type]


def test_a_value_that_is_no_number_is_refused() -> None:
    with pytest.raises(UserError, match="finite"):
        rule().decide([1.0, math.nan, 2.0])


# ---------------------------------------------------------------------- an experiment


def coin(calls: list[int]) -> Experiment:
    """An experiment that measures its seed."""

    def measure(seed: int, out: Path, report: Callable[[str], None]) -> dict[str, object]:
        calls.append(seed)
        report("coin")
        return {"x": float(seed), "pairs": ((1, 2),)}

    return Experiment(
        measure,
        table=lambda results: f"{len(results.runs)} coins",
        draw=lambda results, figure: figure.subplots().plot([run["x"] for run in results.runs]),
        rules={"coin": rule()},
        first_seed=1,
    )


def test_seeds_that_were_measured_are_not_run_again(tmp_path: Path) -> None:
    calls: list[int] = []
    first = coin(calls).run([1, 2], tmp_path)
    again = coin(calls).run([1, 2, 3], tmp_path)
    assert calls == [1, 2, 3]
    assert first.runs == again.runs[:2] == [{"x": float(n), "pairs": [[1, 2]]} for n in (1, 2)]
    assert load(tmp_path / "results.json", "test_claims").figures == again.figures
    assert coin(calls).values("coin", again) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("text", ["[1, 2]", "{", '{"experiment": "goodhart", "figures": {}, "seconds": {}}'])
def test_a_file_without_its_results_is_refused_and_kept(text: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(text)
    with pytest.raises(UserError, match="no results"):
        coin([]).run([1], tmp_path)
    assert file.read_text() == text


def test_a_picture_is_the_same_for_the_same_figures(tmp_path: Path) -> None:
    results = Results({1: {"x": 1.0}, 2: {"x": 3.0}}, {1: 0.1, 2: 0.1})
    texts = []
    for name in ("a.svg", "b.svg"):
        save_picture(coin([]), results, tmp_path / name)
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]
    assert "<svg" in texts[0]


# ---------------------------------------------------------------------- the command


def test_the_command_lists_the_claims(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["claims", "--json"]) == 0
    heads = json.loads(capsys.readouterr().out)
    assert [head["name"] for head in heads] == list(CARDS)
    assert {"claim", "verdict", "minutes"} <= heads[0].keys()
    assert run(["claims"]) == 0
    assert all(name in capsys.readouterr().out for name in list(CARDS)[:1])


def test_the_command_prints_a_claim_with_its_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["claims", "ipo_noise"]) == 0
    text = capsys.readouterr().out
    assert CARDS["ipo_noise"].claim in text
    assert "**Answer.**" in text
    assert "## Setting" not in text
    assert "<!--" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ipo_noize"], "ipo_noise"),
        (["--run"], "which claim"),
        (["ipo_noise", "--seeds", "2"], "add --run"),
        (["ipo_noise", "--first-seed", "2"], "add --run"),
        (["../claims"], "no claim"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["claims", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("head", "words", "first"),
    [("", [], 1), ("first_seed: 1000\n", [], 1000), ("first_seed: 1000\n", ["--first-seed", "7"], 7)],
)
def test_the_first_seed_is_the_users_the_cards_or_the_experiments(
    head: str,
    words: list[str],
    first: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "coin.md").write_text(HEAD.replace("seeds: 3\n", f"seeds: 3\n{head}"))
    calls: list[int] = []
    monkeypatch.setattr(evidence, "cards_dir", lambda: tmp_path)
    monkeypatch.setattr("posttrain_study.claims.experiment.find_experiment", lambda card: coin(calls))
    assert run(["claims", "coin", "--run", "--out", str(tmp_path / "out"), *words]) == 0
    assert calls == [first, first + 1, first + 2]
    lines = capsys.readouterr().out.partition("The head of its card:\n")[2].splitlines()
    assert (f"first_seed: {first}" in lines) == (first != 1)


@pytest.mark.full
def test_an_experiment_runs_to_its_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain_study.claims import label_noise

    monkeypatch.setattr(label_noise, "EPOCHS", 2)
    monkeypatch.setattr(label_noise, "EVALUATED", (0, 1, 2))
    words = ["claims", "ipo_noise", "--run", "--seeds", "3", "--out", str(tmp_path)]
    assert run(words) == 0
    text = capsys.readouterr().out
    results = load(tmp_path / "results.json", "label_noise")
    experiment = label_noise.EXPERIMENT
    values = experiment.values("ipo_noise", results)
    assert len(values) == 3
    verdict = experiment.rules["ipo_noise"].decide(values).verdict
    assert f"\nverdict: {verdict}\n" in text
    assert experiment.table(results) in text
    assert (tmp_path / "label_noise.svg").exists()
    file = tmp_path / "card.md"
    lines = text.partition("The head of its card:\n")[2].partition("\n\n")[0]
    file.write_text(f"---\nclaim: c\nsource: s\nexperiment: label_noise\nchanges: x\n{lines}\n---\n")
    assert list(evidence.read(file).values) == values


# ---------------------------------------------------------------------- the start of runs


@pytest.mark.full
@pytest.mark.parametrize("threads", [1, 2])
def test_the_start_has_the_same_bits_in_any_process(threads: int, tmp_path: Path) -> None:
    program = "import sys, pathlib; from posttrain_study.claims import digit_sums as d; print(d.start("
    words = [sys.executable, "-c", f"{program}pathlib.Path(sys.argv[1]), {threads})[1])", str(tmp_path)]
    made = subprocess.run(words, check=True, capture_output=True, text=True, env=ENVIRONMENT)
    assert made.stdout.split()[-1] == digit_sums.DIGEST
    measured = digit_sums.quality(tmp_path / "start")
    assert measured.right == pytest.approx(measured.any_of(1)) == pytest.approx(0.3524487732, abs=1e-9)
    assert measured.greedy == 0.749


def test_rounding_forgets_the_last_bits_of_a_weight() -> None:
    weight = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rounded = digit_sums.on_grid(weight)
    assert (rounded - weight).abs().max() <= 0.5 / digit_sums.GRID
    assert torch.equal(digit_sums.on_grid(weight + 1e-10), rounded)
    assert not torch.signbit(digit_sums.on_grid(torch.tensor([-1e-9])))


def test_the_chance_of_an_answer_is_the_product_of_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digit_sums, "HELD_OUT", 2)
    tokenizer = digit_sums.new_tokenizer()
    model = digit_sums.untaught_model(tokenizer)
    pretrained.save_pretrained(model, tokenizer, tmp_path / "model")
    chances = digit_sums.quality(tmp_path / "model").chances.tolist()
    for question, chance in zip(digit_sums.questions()[:2], chances, strict=True):
        tokens, expected = tokenizer(question)["input_ids"], 1.0
        for token in tokenizer(digit_sums.answer_of(question) + "<|im_end|>")["input_ids"]:
            logits = model(input_ids=torch.tensor([tokens])).logits[0, -1].detach()
            expected *= float(logits.softmax(-1)[token])
            tokens.append(token)
        assert chance == pytest.approx(expected, rel=1e-9)


# ---------------------------------------------------------------------- answers of older policies


def test_a_lag_grows_by_two_in_three_updates_to_its_bound() -> None:
    lags = {bound: [n - lag.version(n, bound) for n in range(9)] for bound in (0, 2, lag.UNBOUNDED)}
    assert lags == {
        0: [0] * 9,
        2: [0, 1, *[2] * 7],
        lag.UNBOUNDED: [0, 1, 2, 2, 3, 4, 4, 5, 6],
    }


def test_without_lag_naive_clipping_and_corrections_are_grpo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag, "UPDATES", 3)
    naive, *others = (lag.train(arm, 0, 0.01, 100)["gold"] for arm in (lag.NAIVE, lag.TRUNCATED, lag.MASKED))
    assert naive[-1] > naive[0]
    for path in others:
        assert path == pytest.approx(naive, abs=1e-5)


def test_tokens_have_the_chances_of_the_policy_that_sampled_them() -> None:
    draw = torch.Generator().manual_seed(0)
    table = torch.randn(QUESTIONS, 364, 4, dtype=torch.float64, generator=draw).log_softmax(-1)
    logp = online.of_answers(table)
    assert logp.exp().sum(1).tolist() == pytest.approx([1.0] * QUESTIONS)
    batch = lag.drawn_by(table, online.sample(logp, logp, online.Routine(1), draw))
    # The rewards are the log-probabilities of the answers.
    assert batch.logp_gen.sum(1).tolist() == pytest.approx(batch.reward.sum(1).tolist(), abs=1e-5)


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.full)])
def test_the_starts_of_the_lags_have_the_same_bits(threads: int) -> None:
    online.reference.cache_clear()
    with machine.configured(threads):
        assert digest(sorted(lag.start(0).state_dict().items())) == "e29fd2fd961ae9be"


def test_updates_are_counted_to_a_share_of_the_gain_without_lag() -> None:
    path = [n / lag.UPDATES for n in range(lag.UPDATES + 1)]
    figures = {lag.key(lag.NAIVE, 0): {"gold": path}, lag.key(lag.TRUNCATED, 8): {"gold": path}}
    gain = lag.gain(figures, lag.NAIVE, 0)
    assert gain == pytest.approx(1 - (lag.LATE - 1) / 2 / lag.UPDATES)
    reached = lag.updates_to(figures, lag.TRUNCATED, 8)
    assert path[reached - 1] < lag.SHARE * gain <= path[reached]
    figures[lag.key(lag.TRUNCATED, 8)] = {"gold": [0.0] * len(path)}
    assert lag.updates_to(figures, lag.TRUNCATED, 8) == lag.UPDATES


def test_r1_reads_only_what_the_policy_sampled(tmp_path: Path) -> None:
    answers = [" 77455531 ####1", " 7h4ff5db ####1", " 77455531 ####1?", " ####1"]
    samples = [
        {
            "task": "8-1",
            "pieces": [" 70390042 ####3", answer, "<eos>"],
            "sampled": [False, True, True],
            "stop": "eos",
            "parts": {"number": 1.0},
        }
        for answer in answers
    ]
    form = Regex(pattern=r"\A \d{8} ####\d\Z")
    measured = [r1.describe(sample, form) for sample in samples]
    assert [m["readable"] for m in measured] == [1.0, 0.0, 0.0, 0.0]
    assert [m["steps"] for m in measured] == [1.0, 1.0, 1.0, 0.0]
    assert [m["doubt"] for m in measured] == [0.0, 0.0, 1.0, 0.0]
    assert [m["tokens"] for m in measured] == [2.0] * 4


def test_an_answer_of_several_policies_counts_what_it_costs() -> None:
    tokens = interruption.Tokens()
    sampled, version = [False, False, True, True, True, True], [0, 0, 3, 3, 4, 6]
    zeros = [0.0] * 6
    row = Trajectory(
        tokens=[1] * 6, sampled=sampled, logp_gen=zeros, logp_policy=zeros, version=version, reward=zeros
    )
    tokens.add(row, 6)
    # Newer weights sampled the last two tokens, and computed 4 and 5 tokens before them again.
    assert tokens == interruption.Tokens([4], mixed=1, again=9, age=3 + 3 + 2 + 0, oldest=3)


def test_the_right_answer_to_a_letter_is_the_rest_of_its_order() -> None:
    dice = random.Random(0)
    for question in interruption.questions(50, dice):
        order, answer = interruption.order_of(int(question[0])), interruption.answer_of(question)
        assert order.endswith(question[1] + answer)
        assert 1 <= len(answer) <= 25
        assert len(interruption.walk(question, dice)) <= interruption.LONGEST
