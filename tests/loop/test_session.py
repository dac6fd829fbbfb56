"""A session that a program steps makes the run of the command line, and refuses what would be wrong."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from posttrain.api.opening import prepare
from posttrain.loop import build, phases, session
from posttrain.loop.loop import Callback
from posttrain.loop.session import LoopSession, Phase
from posttrain.models.pretrained import silent
from posttrain.recipe import config
from posttrain.run.rundir import RunDir
from posttrain.testing import repeatable
from posttrain.types import Episode, RunError


def nothing(phase: str, numbers: object) -> None:
    """Shows nothing."""


def opened(recipe: Path, run: Path, *callbacks: object, resume: bool = False) -> LoopSession:
    """A session of this recipe in this directory."""
    directory = RunDir(run, resume=resume)
    found, chosen = prepare(config.read(recipe), directory, title="test", resume=resume, say=silent)
    how = {"resume": resume, "config": found.tables, "show": nothing, "say": silent}
    session = LoopSession(build.build_session_parts(chosen, directory, **how), callbacks)
    session._open_parts.closing.callback(directory.close)
    return session


def lines(run: Path) -> list[dict]:
    return repeatable(run / "metrics.jsonl")


def end_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(max((run / "checkpoints").glob("step_*")) / "model" / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    mine, theirs = end_of(one), end_of(other)
    return all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())


@pytest.fixture
def by_command(run_cli, write, tmp_path):
    """by_command(tables) -> (the recipe, the directory of the run that the command line made of it)."""

    def make(tables):
        recipe, run = write(tables), tmp_path / "command"
        said = run_cli("train", recipe, "--run-dir", run, "--quiet")
        assert said.code == 0, said.err
        return recipe, run

    return make


@pytest.mark.parametrize(
    "over",
    [{}, {"rollout": {"groups": 3, "group_size": 4, "replay": 1, "select": "varied"}}, {"lag": 1}],
    ids=["plain", "replayed and selected", "one step off"],
)
@pytest.mark.sample("plain", "one step off")
def test_the_verbs_in_their_order_are_the_command_lines_run(by_command, online, able, tmp_path, over):
    tables = online | {"model": online["model"] | {"path": str(able)}}
    if "lag" in over:
        over = {
            "async": {"max_lag": 1, "place": "thread"},
            "method": {"name": "grpo", "correction": "token_truncated"},
        }
    elif over:
        over = over | {"method": {"name": "grpo", "correction": "token_truncated"}}
    recipe, command = by_command(tables | over)
    with opened(recipe, tmp_path / "stepped") as s:
        s.evaluate()
        while not s.done:
            if groups := s.sample():
                s.update(groups)
                s.publish()
            if s.done:
                s.evaluate()
            s.save()
        rewards = s.metrics["reward/mean"]
    assert len(rewards) == 4
    assert lines(command) == lines(tmp_path / "stepped")
    assert same(command, tmp_path / "stepped")
    for file in sorted((command / "samples").glob("*.jsonl")):
        assert file.read_bytes() == (tmp_path / "stepped" / "samples" / file.name).read_bytes()


def test_offline_verbs_need_no_publishing(by_command, offline, tmp_path):
    recipe, command = by_command(offline)
    with opened(recipe, tmp_path / "stepped") as s:
        s.evaluate()
        while not s.done:
            s.update(s.sample())
            if s.done:
                s.evaluate()
        s.save()
    assert lines(command) == lines(tmp_path / "stepped")
    assert same(command, tmp_path / "stepped")


def test_the_halves_of_a_step_are_a_step_and_say_what_the_gradients_are(by_command, offline, tmp_path):
    recipe, command = by_command(offline | {"run": {"updates": 3, "threads": 1}})
    with opened(recipe, tmp_path / "stepped") as s:
        while not s.done:
            found = s.forward_backward(s.sample())
            before = s._open.journal.phases["train"]
            moved = s.optim_step()
            assert s._open.journal.phases["train"] > before > 0
            norm = sum(n**2 for n in found.norms.values()) ** 0.5
            assert norm == pytest.approx(moved["grad_norm"], rel=1e-5)
            assert found.norms.keys() == {m.name for m in s.learner.masters.masters}
        s.save()
    assert same(command, tmp_path / "stepped")


def test_gradients_add_up_and_a_loss_of_ones_own_takes_the_methods_place(write, offline, tmp_path):
    with opened(write(offline), tmp_path / "run") as s:
        groups = s.sample()
        once = s.forward_backward(groups)
        twice = s.forward_backward(groups, lambda out, batch: -out.logp)
        for name, norm in once.norms.items():
            assert twice.norms[name] == pytest.approx(2 * norm, rel=1e-4)
        with pytest.raises(RunError, match=r"^sample\(\): "):
            s.sample()
        s.optim_step()

        def broken(out, batch):
            raise ZeroDivisionError

        groups = s.sample()
        with pytest.raises(ZeroDivisionError):
            s.forward_backward(groups, broken)
        assert all(m.grad is None for m in s.learner.masters.masters)


def test_rewards_may_be_changed_and_groups_left_out(write, online, able, tmp_path):
    recipe = write(online | {"model": online["model"] | {"path": str(able)}})
    with opened(recipe, tmp_path / "run") as s:
        groups = s.sample()
        longer = groups.reward(lambda episode: float(episode.sample))
        assert longer.rewards == [[0.0, 1.0, 2.0, 3.0]] * 3
        assert groups.rewards != longer.rewards, "the ones that were sampled are left as they were"
        batch = s.batch(longer[:2])
        assert batch.reward.sum(-1).tolist() == [0.0, 1.0, 2.0, 3.0] * 2
        update = s.update(replace(batch, reward=batch.reward * 2))
        assert update.batch.reward.sum(-1).tolist() == [0.0, 2.0, 4.0, 6.0] * 2
        s.publish()
        assert s.metrics["reward/mean"] == [1.5]
        frame = longer.to_pandas()
        assert list(frame["reward"]) == [0.0, 1.0, 2.0, 3.0] * 3


def test_parts_of_rewards_reach_the_batch_from_every_source_and_again_by_replay(
    write, online, able, tmp_path
):
    """A source with one verifier has one part, its reward. Rewards that are no sum of parts are refused."""
    sums = {"low": 2, "high": 9, "held_out": 2, "template": "{a}+{b}="}
    two = {"number": {}, "regex": {"pattern": "[1-4]"}, "weights": {"regex": 0.25}}
    tables = online | {
        "model": online["model"] | {"path": str(able)},
        "method": {"name": "gdpo", "correction": "token_truncated"},
        "task": [
            {"name": "two", "arithmetic": sums, "verifier": two},
            {"name": "one", "arithmetic": {**sums, "template": "{a} {b}="}},
        ],
        "rollout": {"groups": 2, "group_size": 3, "replay": 1},
    }

    def scores(episode: Episode) -> list[float]:
        parts = episode.verdict.parts
        if episode.task.dataset == "one":
            return [math.nan, math.nan, episode.reward]
        assert episode.reward == pytest.approx(parts["number"] + 0.25 * parts["regex"])
        return [parts["number"], parts["regex"], math.nan]

    with opened(write(tables), tmp_path / "run") as s:
        groups = s.sample()
        first = s.batch(groups)
        wanted = torch.tensor([scores(e) for group in groups for e in group], dtype=torch.float64)
        torch.testing.assert_close(first.parts, wanted, rtol=0, atol=0, equal_nan=True)
        assert len(wanted[:, 1].unique()) > 1
        with pytest.raises(RunError, match=r"reward of an answer to .* is 7, and the parts of its score"):
            s.batch(groups.reward(lambda episode: 7.0))
        update = s.update(s.batch(groups))
        assert update.batch.advantage.any()
        s.publish()
        second = s.batch(s.sample())
        again = second.parts[6:]
        assert any(torch.equal(again.nan_to_num(9), first.parts[at : at + 3].nan_to_num(9)) for at in (0, 3))


def test_what_is_out_of_order_is_refused_in_words(write, online, able, tmp_path):
    recipe = write(online | {"model": online["model"] | {"path": str(able)}})
    s = opened(recipe, tmp_path / "run")
    with s:
        first = s.sample()
        with pytest.raises(RunError, match=r"^save\(\): "):
            s.save()
        second = s.sample()  # the first is given up
        assert s.update_count == 1
        assert [g[0].task.id for g in first] != [g[0].task.id for g in second]
        s.update(second)
        with pytest.raises(RunError, match=r"^sample\(\): "):
            s.sample()
        s.publish()
        while not s.done:
            s.update(s.sample())
            s.publish()
    assert [line["update"] for line in lines(tmp_path / "run")] == [1, 2, 3, 4]
    with pytest.raises(RunError, match=r"^session: "):
        s.sample()


def test_a_session_is_done_when_an_update_beyond_the_last_is_given_up(write, offline, tmp_path, monkeypatch):
    def fails(batch):
        raise ValueError

    with opened(write(offline | {"run": {"updates": 1, "threads": 1}}), tmp_path / "run") as s:
        s.update(groups := s.sample())
        monkeypatch.setattr(s.learner, "update", fails)
        with pytest.raises(ValueError):
            s.update(groups)  # which begins a second update
        for _ in range(2):
            with pytest.raises(RunError, match=r"^sample\(\): "):
                s.sample()
        assert s.done
        assert s.update_count == 1
        s.save()


def test_the_table_of_verbs_is_the_documented_one():
    always = {*Phase} - {Phase.CUT, Phase.CLOSED}
    rows = (line.split("  ") for line in str(session.__doc__).splitlines())
    texts = {row[2].strip(): row[-1].strip() for row in rows if len(row) > 2}
    for verb, rule in phases.VERBS.items():
        text = texts.get(verb, "every phase")  # step and finish call the others
        named = {phase for phase in Phase if phase.name in text}
        assert rule.phases == (always - named if text.startswith(("every", "all but")) else named)
        assert rule.otherwise or always - rule.phases <= phases.FIRST.keys()


def test_what_was_cut_in_the_middle_is_not_gone_on_with(write, online, tmp_path, monkeypatch):
    with opened(write(online), tmp_path / "run") as s:
        s.step()

        def interrupted(batch):
            raise KeyboardInterrupt

        monkeypatch.setattr(s.learner, "update", interrupted)
        groups = s.sample()
        with pytest.raises(KeyboardInterrupt):
            s.update(groups)
        monkeypatch.undo()
        with pytest.raises(RunError, match=r"^update\(\): "):
            s.update(groups)


@pytest.mark.parametrize("kind", ["online", "offline"])
@pytest.mark.sample("online")
def test_a_callback_stops_a_run_that_then_goes_on_exactly(by_command, request, tmp_path, kind):
    recipe, command = by_command(request.getfixturevalue(kind))
    run, told = tmp_path / "run", []

    def on_update(session, line):
        told.append(line["update"])
        return line["update"] < 2

    ends = Callback(on_end=lambda session, error: told.append(error))
    with opened(recipe, run, Callback(on_update=on_update), ends) as s:
        s.finish()
        assert s.stopped == "on_update of a callback stopped the run after update 2"
    assert told == [1, 2, None]
    saved = []
    with opened(recipe, run, Callback(on_save=lambda s, path: saved.append(path.name)), resume=True) as s:
        s.finish()
        assert s.stopped is None
    assert saved == ["step_000003", "step_000004"]
    assert lines(run) == lines(command)
    assert same(run, command)
