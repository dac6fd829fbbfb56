"""lean: tactics, their diagnostics and the process that is kept warm, with a REPL that follows a script."""

import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from posttrain.types import Task
from posttrain.verifiers.sandbox import Box, Limits
from posttrain_prove.lean import repl
from posttrain_prove.lean.toolchain import find_toolchain
from posttrain_prove.lean.verifier import Lean

SCRIPTED = Path(__file__).with_name("lean_scripted.py")
STATEMENT = "∀ n : Nat, n = n ∧ True"
PROOF = "intro n\nconstructor\nrfl\ntrivial\n"


@pytest.fixture(scope="module")
def scripted():
    """A directory that every user can read, with a `lean` and a REPL that follow the script."""
    root = Path(tempfile.mkdtemp(dir="/var/tmp"))
    program = root / "bin" / "lean"
    program.parent.mkdir()
    shutil.copy(SCRIPTED, program)
    for path in (root, program.parent, program):
        path.chmod(stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        find_toolchain.cache_clear()
        yield f"python3 {program} repl"
    find_toolchain.cache_clear()
    repl.end_all()
    shutil.rmtree(root)


@pytest.fixture
def lean(scripted):
    return Lean(toolchain="system", repl=scripted, budget=5.0, memory_mb=512)


def task(statement=STATEMENT, header="open Nat"):
    return Task(id="t", messages=(), fields={"name": "t", "statement": statement, "header": header})


def shares(verdict):
    return [share for _, share in verdict.progress]


def test_a_proof_is_accepted_and_its_steps_are_measured(lean):
    response = f"By hand:\n```lean\n{PROOF}```\n"
    verdict = lean(task(), response)
    assert (verdict.label, verdict.score) == ("proved", 1.0), verdict
    # Nothing closes the bare statement (rank 4); both halves are closed by the first rung.
    assert shares(verdict) == [0.0, 0.0, 0.375, 0.375, 0.5]
    begin = response.index("intro")
    assert [response[begin:at] for at, _ in verdict.progress] == [
        "", "intro n", "intro n\nconstructor", "intro n\nconstructor\nrfl", PROOF.rstrip()
    ]  # fmt: skip


@pytest.mark.parametrize(
    "response",
    [
        "by\n  intro n\n  constructor\n  rfl\n  trivial",
        ":= by\n  intro n\n  constructor\n  rfl\n  trivial",
        f"theorem t : {STATEMENT} := by\n  intro n\n  constructor\n  rfl\n  trivial\n",
        "-- first sorry, then not\nintro n\nconstructor /- two\ngoals -/\nrfl\ntrivial",
        "  intro n\n  constructor\n\n  rfl\n  trivial",
    ],
)
def test_every_way_to_write_the_script_is_read_alike(lean, response):
    verdict = lean(task(), response)
    assert verdict.label == "proved", verdict
    assert shares(verdict) == [0.0, 0.0, 0.375, 0.375, 0.5]
    tactics = ["intro n", "constructor", "rfl", "trivial"]
    for (at, _), tactic in zip(verdict.progress[1:], tactics, strict=True):
        assert response[:at].endswith(tactic)


def test_the_first_failing_tactic_is_named_with_the_goals_left(lean):
    verdict = lean(task(), "intro n\nconstructor\nomega\ntrivial")
    assert (verdict.label, verdict.score) == ("error", 0.0)
    assert verdict.reason.startswith("tactic 3: Lean error: unknown tactic 'omega'")
    assert verdict.reason.endswith("2 goals are left")
    assert shares(verdict) == [0.0, 0.0, 0.375]


def test_goals_that_are_left_make_it_incomplete(lean):
    verdict = lean(task(), "intro n\nconstructor\nrfl")
    assert verdict.label == "incomplete"
    assert "1 goal is left" in verdict.reason


@pytest.mark.parametrize(
    ("nothing", "at"),
    [
        ("skip", 0),
        ("skip", 1),
        ("skip", 2),
        ("skip", 3),
        ("skip\nskip\nskip", 2),
        ("have h : True := trivial", 1),
    ],
)
def test_tactics_that_do_nothing_earn_nothing(lean, nothing, at):
    lines = ["intro n", "constructor", "rfl"]
    plain = shares(lean(task(), "\n".join(lines)))
    padded = shares(lean(task(), "\n".join([*lines[:at], nothing])))
    assert padded == plain[: at + 1] + [plain[at]] * (nothing.count("\n") + 1)


@pytest.mark.parametrize("hole", ["sorry", "admit"])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_hole_is_an_error_at_its_place(lean, hole, at):
    lines = PROOF.strip().split("\n")
    verdict = lean(task(), "\n".join([*lines[:at], hole, *lines[at + 1 :]]))
    assert (verdict.label, verdict.score) == ("incomplete", 0.0)
    assert len(verdict.progress) == at + 1


def test_a_hole_that_the_repl_puts_into_a_term_is_an_error(lean):
    verdict = lean(task(), "intro n\nexact ghost")
    assert verdict.label == "error"
    assert verdict.reason.startswith("tactic 2: Unknown identifier `ghost`")


def test_another_statement_earns_nothing_however_far_it_comes(lean):
    verdict = lean(task("hard"), f"theorem t : {STATEMENT} := by\n  intro n\n  constructor\n  rfl\n  trivial")
    assert (verdict.label, verdict.score, verdict.progress) == ("wrong_statement", 0.0, ())
    tactics = "  intro n\n  constructor\n  rfl"
    assert lean(task(), f"theorem t : {STATEMENT} := by\n{tactics}").progress[-1][1] == 0.375
    verdict = lean(task(), f"theorem t : {STATEMENT} ∧ more := by\n{tactics}")
    assert (verdict.score, verdict.progress) == (0.0, ())


def test_partial_credit_is_what_the_last_state_is_worth(lean, scripted):
    partly = Lean(toolchain="system", repl=scripted, budget=5.0, memory_mb=512, partial=True)
    assert partly(task(), "intro n\nconstructor\nrfl").score == 0.375
    assert partly(task(), "intro n\nskip").score == 0.0
    assert partly(task(), PROOF).score == 1.0
    assert lean(task(), "intro n\nconstructor\nrfl").score == 0.0


def test_partial_credit_needs_lean_to_accept_what_would_finish(scripted):
    partly = Lean(toolchain="system", repl=scripted, budget=5.0, memory_mb=512, partial=True)
    verdict = partly(task("hard"), "apply lie")
    assert (verdict.score, verdict.progress) == (0.0, ())


def test_what_one_submission_declares_is_gone_for_the_next(lean):
    """The REPL itself would know it, in the environment that came of the first."""
    made = f"theorem leaked : {STATEMENT} := by\n  intro n\n  constructor\n  rfl\n  trivial"
    lean(task(), made.replace("leaked", "t"))
    warm = next(iter(repl._warm.values()))
    known = warm.ask({"cmd": made, "env": warm.header}, 5.0)["env"]
    use = {"cmd": f"theorem u : {STATEMENT} := by\n  exact leaked"}
    assert not repl.find_complaint(warm.ask({**use, "env": known}, 5.0))
    assert repl.find_complaint(warm.ask({**use, "env": warm.header}, 5.0))
    first = lean(task(), "exact leaked")
    assert first.label == "error"
    assert next(iter(repl._warm.values())) is warm, "the process is the same"


@pytest.mark.full
def test_verdicts_do_not_depend_on_what_came_before(lean):
    responses = [PROOF, "intro n", "intro n\nhang", "exact t", "garble"]
    quick = Lean(toolchain="system", repl=lean.repl, budget=4.0, memory_mb=512)
    seen = {}
    for response in [*responses, *reversed(responses)]:
        verdict = quick(task(), response)
        facts = (verdict.label, verdict.score, verdict.progress, verdict.reason)
        assert seen.setdefault(response, facts) == facts


def test_a_tactic_without_end_is_a_timeout_and_the_process_is_replaced(lean):
    quick = Lean(toolchain="system", repl=lean.repl, budget=4.0, memory_mb=512)
    assert quick(task(), PROOF).label == "proved"
    before = next(reversed(repl._warm.values()))
    verdict = quick(task(), "intro n\nhang")
    assert (verdict.label, verdict.score) == ("timeout", 0.0)
    assert before._live.process.poll() is not None
    assert quick(task(), PROOF).label == "proved"


def test_where_only_our_own_tactics_take_too_long_nothing_is_decided(lean):
    quick = Lean(toolchain="system", repl=lean.repl, budget=4.0, memory_mb=512)
    verdict = quick(task("slow"), "close")
    assert (verdict.label, verdict.score, verdict.progress) == ("proved", 1.0, ())


@pytest.mark.parametrize("tactic", ["die", "garble"])
def test_a_repl_that_fails_decides_nothing(lean, tactic):
    verdict = lean(task(), f"intro n\n{tactic}")
    assert verdict.label == "error"
    assert "unknown tactic" in verdict.reason, "said by lean itself"
    assert lean(task(), PROOF).label == "proved"


def test_the_repl_alone_accepts_nothing(lean):
    """Of this goal it says that the script is complete."""
    repl_says = lean(task("hard"), "apply lie\nset_option maxHeartbeats 1 in omega")
    assert (repl_says.label, repl_says.score, repl_says.progress) == ("error", 0.0, ())


def test_a_header_is_loaded_once_and_few_processes_are_kept(scripted):
    command = tuple(scripted.split())
    box = Box(limits=Limits(memory_mb=512), readable=(str(Path(command[1]).parent),))
    kept = [repl.take_warm(box, command, f"open Nat{number}", 20.0) for number in (0, 1, 2, 2, 1, 3, 4)]
    assert kept[2] is kept[3]
    assert kept[1] is kept[4]
    assert len(repl._warm) == 4
    assert kept[0]._live.process.poll() is not None, "the one used longest ago made room"
    repl.end_all()
    assert all(repl._live.process.poll() is not None for repl in kept)


def test_a_header_that_does_not_compile_is_the_tasks_fault(lean):
    verdict = lean(task(header="import Nowhere"), PROOF)
    assert (verdict.score, verdict.label) == (None, "bad_task")
    assert "unknown module prefix" in verdict.reason


def test_code_that_runs_never_reaches_the_repl(lean):
    before = sum(repl.asked for repl in repl._warm.values())
    assert lean(task(), "run_tac pure ()").label == "forbidden"
    assert sum(repl.asked for repl in repl._warm.values()) == before
