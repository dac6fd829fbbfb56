"""Repair: what is said of a wrong answer, what an episode is worth, and that Coq's own words come through."""

import json
import shutil

import pytest

from mathcheck.plugin.number import Number
from posttrain.envs.repair import Attempt, Repair, Repairing
from posttrain.search.moves.turns import EnvTransitions
from posttrain.search.protocol import Refused
from posttrain.types import Task, UserError, Verdict
from posttrain_prove.coq.verifier import Coq
from posttrain_prove.tasks.coq_exercises import CoqExercises, coq_exercises

TASK = Task(id="sum", messages=({"role": "user", "content": "3 + 4?"},), answer="7")


class Scored:
    """Worth as many tenths as the answer has letters; of no letters it cannot judge."""

    trusted = True

    def __call__(self, task, response):
        score = len(response) / 10 if response else None
        return Verdict(
            score=score, label="scored" if response else "raised", reason=f"{len(response)} letters"
        )


def played(env, *answers):
    """What is said after each answer, and the last turn."""
    state, said = env.start(TASK).state, []
    for answer in answers:
        turn = env.reply(state, answer)
        state = turn.state
        said += [message["content"] for message in turn.messages]
    return said, turn


def test_the_last_answer_is_what_an_episode_is_worth():
    env = Repairing(judge=Scored(), settings=Repair(turns=3, says="{label}, {reason}!"), right=0.9)
    said, turn = played(env, "four", "five!")
    assert said == ["scored, 4 letters!", "scored, 5 letters!"]
    assert (turn.reward, turn.done, turn.verdict) == (None, False, None)
    said, turn = played(env, "four", "five!", "eleven")
    assert (turn.done, turn.reward, turn.verdict.score) == (True, 0.6, 0.6)
    assert turn.verdict.reason == "6 letters; attempt 3 of 3"
    said, turn = played(env, "four", "nine chars")
    assert (turn.done, turn.reward) == (True, 1.0), "what is right is not mended"
    _, turn = played(env, "four", "")
    assert turn.done
    assert turn.verdict.failed, "what nobody could judge is no reason to mend it"
    assert turn.reward is None


def test_the_right_answer_is_not_told():
    env = Repairing(judge=Number())
    assert "7" in Number()(TASK, "It is 5.").reason
    said, turn = played(env, "It is 5.", "no idea", "7")
    assert said[0] == "wrong: not so\nGive the whole answer again."
    assert said[1].startswith("no_answer: ")
    assert not any("7" in each for each in said)
    assert turn.verdict.label == "right"
    assert turn.reward == 1.0


def test_a_long_reason_is_told_by_its_ends():
    verdict = Verdict(score=0.0, label="error", reason="a" * 50 + "b" * 50)
    told = Repair(characters=20, says="{reason}").about(verdict, None)
    assert told == "a" * 10 + " … " + "b" * 10


@pytest.mark.skipif(shutil.which("coqc") is None, reason="coqc is missing: apt-get install coq")
def test_what_coq_says_is_what_the_policy_reads():
    task = coq_exercises("train", CoqExercises(low=1, high=1, held_out=0))[0]
    gold = task.fields["gold"]
    env = Repairing(judge=Coq(), settings=Repair(turns=2))
    world = EnvTransitions(env, lambda verdict: verdict.label == "proved", deadline_s=120.0)
    try:
        [root] = world.begin([task])
        assert root.shown == task.messages
        wrong, other, end = world.apply([(root, "intros. foo."), (root, "idtac."), (root, gold)])
        assert end.done
        assert end.verdict.score == 1.0
        assert end.verdict.reason.endswith("; attempt 1 of 2")
        told = wrong.shown[-1]["content"]
        assert told.startswith("error: sentence 2, ")
        assert "foo" in told
        assert other.shown[-1]["content"].startswith("incomplete: ")
        assert wrong.key != other.key, "what was said of them is not the same"
        assert wrong.env_state == Attempt(task, 1, told)
        mended, failed = world.apply([(wrong, gold), (wrong, "idtac.")])
        assert mended.verdict.label == "proved"
        assert mended.text == f"intros. foo.\n{gold}"
        assert isinstance(failed, Refused)
        assert failed.label == "incomplete"
        assert failed.reason.endswith("; attempt 2 of 2")
    finally:
        world.close()


def test_episodes_of_repair_are_trained_on(able, online, write, run_cli, tmp_path):
    arithmetic = online["task"]["arithmetic"] | {"low": 2, "high": 4, "held_out": 4}
    base = online | {"model": online["model"] | {"path": str(able)}}
    over = {"task": {"arithmetic": arithmetic, "repair": {"turns": 2, "says": "{reason}"}}}
    path = write(base, over | {"run": {"updates": 1}, "record": {"tokens": 0}})
    done = run_cli("train", path, "--run-dir", tmp_path / "run", "--quiet")
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in (tmp_path / "run/samples/000001.jsonl").read_text().splitlines()]
    assert {row["turns"] for row in rows} == {1, 2}
    for row in rows:
        assert row["reason"].endswith(f"; attempt {row['turns']} of 2")
        assert row["label"] == "right" or row["turns"] == 2
        said = "".join(p for p, s in zip(row["pieces"], row["sampled"], strict=True) if not s)
        assert ("not so" in said or "number" in said) == (row["turns"] == 2)
        last = len(row["sampled"]) - 1 - row["sampled"][::-1].index(True)
        assert [n for n, reward in enumerate(row["reward"]) if reward] == [last] * (row["label"] == "right")


def test_repair_wants_a_verifier_that_says_why(online, write, run_cli):
    game = {"task": {"arithmetic": None, "guess": {}, "repair": {}}, "verifier": None}
    done = run_cli("validate", write(online, game))
    assert done.code == 2
    assert "repair asks again where a verifier judges" in done.err.replace("\n", " ")
    done = run_cli("validate", write(online, {"task": {"repair": {"turns": 0}}}))
    assert done.code == 2
    assert "turns and characters must be 1 or more" in done.err.replace("\n", " ")
    with pytest.raises(UserError, match="asks nothing"):
        Repairing(judge=Number()).start(Task(id="none", messages=()))
