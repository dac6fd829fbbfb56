"""Tokens in, tokens out: what was sampled is what is trained, over turns and updates."""

import json
from pathlib import Path

import pytest

from posttrain.engines.native.engine import NativeEngine
from posttrain.runtime.online import OnlineRun
from posttrain.runtime.rollout import Rollouts

GAMES = {
    "guess": {"guess": {"high": 9, "max_turns": 3, "shaping": 0.5}},
    "maze": {"maze": {"max_turns": 3}, "maze_size": 3},
}


def samples(run: Path) -> list[dict]:
    files = sorted((run / "samples").glob("0*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.parametrize("game", GAMES)
def test_each_turn_appends_to_the_tokens_before_it_and_samples_are_the_engines_own(
    run_cli, write, online, able, tmp_path, game, monkeypatch
):
    asked, answered, episodes = {}, {}, []
    submit, step, closed = NativeEngine.submit, NativeEngine.step, Rollouts._complete

    def spied_submit(self, request):
        ticket = submit(self, request)
        asked[ticket] = request
        return ticket

    def spied_step(self):
        done = step(self)
        answered.update(done)
        return done

    def spied_complete(self, group):
        out = closed(self, group)
        episodes.extend(out)
        return out

    monkeypatch.setattr(NativeEngine, "submit", spied_submit)
    monkeypatch.setattr(NativeEngine, "step", spied_step)
    monkeypatch.setattr(Rollouts, "_complete", spied_complete)
    over = {
        "model": {"path": str(able)},
        "task": {"arithmetic": None, **GAMES[game], "games": {"train": 6, "held_out": 3}},
        "verifier": None,
        "sampling": {"max_new_tokens": 4, "temperature": 1.5},
        "rollout": {"max_error_rate": 1.0},
        "run": {"updates": 2},
        "eval": {"limit": 0},
    }
    said = run_cli("train", write(online, over), "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 0, said.err
    turns: dict[tuple[str, int], list[int]] = {}
    for ticket, request in asked.items():
        turns.setdefault((request.task, request.sample), []).append(ticket)
    assert len(episodes) == len(turns) == 2 * 3 * 4
    assert max(len(tickets) for tickets in turns.values()) == 3, "the test needs episodes of several turns"
    of = {}
    for tickets in turns.values():
        tokens: tuple[int, ...] = ()
        sampled, gen = [], []
        for ticket in tickets:
            request, answer = asked[ticket], answered[ticket]
            assert request.prompt[: len(tokens)] == tokens, "a prompt only ever appends"
            assert request.position == len(sampled)
            tokens = (*request.prompt, *answer.tokens)
            sampled += answer.tokens
            gen += answer.logp_gen
        of[tokens] = (sampled, gen)
    for episode in episodes:
        t = episode.trajectory
        sampled, gen = of[tuple(t.tokens)]
        assert [x for x, s in zip(t.tokens, t.sampled, strict=True) if s] == sampled
        assert [x for x, s in zip(t.logp_gen, t.sampled, strict=True) if s] == gen
        assert not any(x for x, s in zip(t.logp_gen, t.sampled, strict=True) if not s)
        rewarded = [s for s, r in zip(t.sampled, t.reward, strict=True) if r]
        assert all(rewarded), "a reward arrives with a token that the policy chose"
    assert len({tuple(e.trajectory.tokens) for e in episodes}) > 12


@pytest.mark.parametrize("steps", [{}, {"epochs": 2, "minibatches": 2}])
def test_every_trained_token_was_drawn_by_the_version_that_is_trained(
    run_cli, write, online, able, tmp_path, steps
):
    over = {"model": {"path": str(able)}, "steps": steps}
    assert run_cli("train", write(online, over), "--run-dir", tmp_path / "run", "--quiet").code == 0
    rows = samples(tmp_path / "run")
    assert {row["update"] for row in rows} == {1, 2, 3, 4}
    for row in rows:
        versions = {v for v, s in zip(row["version"], row["sampled"], strict=True) if s}
        assert versions == {row["update"] - 1}
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["version"] for line in lines] == [0, 1, 2, 3, 4]
    assert all(line["lag/max"] == 0 for line in lines[1:])


def test_the_log_probabilities_written_down_are_the_policys_own(run_cli, write, online, able, tmp_path):
    over = {"model": {"path": str(able)}, "sampling": {"top_k": 5, "temperature": 0.8}}
    assert run_cli("train", write(online, over), "--run-dir", tmp_path / "run", "--quiet").code == 0
    rows = samples(tmp_path / "run")
    trained = [row for row in rows if "logp" in row]
    assert len(trained) >= 4
    for row in rows:
        for policy, gen in zip(row["logp_policy"], row["logp_gen"], strict=True):
            assert gen >= policy - 1e-4, "fewer tokens to draw from make each of them likelier"
    for row in trained:
        assert row["logp"] == pytest.approx(row["logp_policy"], abs=1e-4), (
            "the trainer sees what the sampler saw"
        )
    assert any(r["logp_gen"][0] > r["logp_policy"][0] + 1e-4 for r in rows)


def test_a_task_that_comes_twice_in_an_update_is_two_groups(
    run_cli, write, online, able, tmp_path, monkeypatch
):
    seen = []
    kept = OnlineRun._collect

    def spied(self):
        out = kept(self)
        seen.append(out[0])
        return out

    monkeypatch.setattr(OnlineRun, "_collect", spied)
    over = {
        "model": {"path": str(able)},
        "task": {"arithmetic": {"low": 2, "high": 3, "held_out": 2}},
        "rollout": {"groups": 8, "group_size": 2},
        "run": {"updates": 1},
        "sampling": {"temperature": 2.0},
    }
    assert run_cli("train", write(online, over), "--run-dir", tmp_path / "run", "--quiet").code == 0
    [groups] = seen
    names = [g[0].task.id for g in groups]
    assert len(set(names)) < len(names), "there are fewer tasks than groups"
    rows = samples(tmp_path / "run")
    assert sorted({r["group"] for r in rows}) == list(range(8))
    # The second time round the draws are other ones.
    texts = {n: [e.response for e in g] for n, g in enumerate(groups)}
    twice = [n for n, name in enumerate(names) if names.count(name) > 1]
    assert any(texts[a] != texts[b] for a in twice for b in twice if names[a] == names[b] and a < b)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    spread = [abs(g[0].trajectory.total_reward - g[1].trajectory.total_reward) / 2 for g in groups]
    assert line["reward/group_std"] == pytest.approx(sum(spread) / 8)


def test_an_episode_that_outgrows_the_context_is_masked_and_counted(
    run_cli, write, online, make_model, tmp_path
):
    strict = ("--set", "rollout.max_error_rate=0.1", "--set", "rollout.groups=8")
    # The rules of the game take some 230 tokens, so there is room for a turn or two.
    over = {
        "model": {"path": str(make_model(max_position_embeddings=256))},
        "task": {"arithmetic": None, "guess": {"high": 9, "max_turns": 9}, "games": {"train": 6}},
        "verifier": None,
        "rollout": {"max_error_rate": 1.0},
        "run": {"updates": 1},
        "eval": {"limit": 0},
    }
    said = run_cli("train", write(online, over), "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 0, said.err
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert line["verdict/context"] > 0.5
    assert line["select/dropped"] >= 1
    stopped = run_cli("train", write(online, over), "--run-dir", tmp_path / "strict", *strict)
    assert stopped.code == 1
    assert "first cause: context: the conversation outgrew the context of 256 tokens" in stopped.err


def test_a_conversation_keeps_within_the_samplers_cache_too(run_cli, write, online, able, tmp_path):
    over = {
        "model": {"path": str(able)},
        "task": {"arithmetic": None, "guess": {"high": 9, "max_turns": 9}, "games": {"train": 6}},
        "verifier": None,
        "engine": {"cache_tokens": 300},
        "rollout": {"max_error_rate": 1.0},
        "run": {"updates": 1},
        "eval": {"limit": 0},
    }
    said = run_cli("train", write(online, over), "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 0, said.err
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["verdict/context"] > 0
