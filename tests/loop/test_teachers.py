"""A teacher in place of rewards: another model, or the policy itself, which is told more."""

import json
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import posttrain
from posttrain.api.answering import load_policy
from posttrain.base.chat import Chat
from posttrain.errors import UserError
from posttrain.learner.learner import Learner
from posttrain.learner.reference import Reference
from posttrain.loop.teacher_prompts import TeacherPrompts
from posttrain.methods.build import build
from posttrain.methods.table import KD
from posttrain.models import checkpoint, pretrained
from posttrain.models.pretrained import silent
from posttrain.plan.hints import check_hint
from posttrain.plan.model_info import NO_TASK
from posttrain.plan.plan import plan_run
from posttrain.plan.teacher_server import TeacherServer
from posttrain.recipe import config
from posttrain.recipe.recipe import Model, Recipe
from posttrain.serving.server import ChatServer, ModelDesk, ModelsDesk
from posttrain.types import GIVEN, Batch, Episode, Task, Trajectory, Verdict
from posttrain.verifiers.judge import connection

from ..conftest import merged, tiny_tokenizer

HINT = {"method": {"name": "gkd"}, "reference": {"hint": "The answer is {answer}."}}


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def teacher(able, tmp_path):
    """A model whose vocabulary has rows that no token has, as models of one family differ in."""
    model = AutoModelForCausalLM.from_pretrained(able)
    model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
    model.save_pretrained(tmp_path / "teacher")
    AutoTokenizer.from_pretrained(able).save_pretrained(tmp_path / "teacher")
    return tmp_path / "teacher"


def test_plan_counts_the_states_that_a_context_compares(write, offline, teacher) -> None:
    over = {"method": {"name": "kd"}, "reference": {"path": str(teacher)}}
    over |= {"train": {"context": 2}, "steps": {"microbatch_tokens": 512}}
    recipe = config.read(write(offline, over)).recipe
    alone, two = (plan_run(recipe, silent, ranks=n).memory.parts["activations"] for n in (1, 2))
    hidden = pretrained.load_config(teacher).hidden_size
    assert two - alone == 512 * hidden * 4


@pytest.mark.parametrize("method", ["distill", "gkd"])
@pytest.mark.sample("distill")
def test_a_student_learns_of_its_teacher_what_nobody_verifies(
    run_cli, online, write, teacher, tmp_path, method
):
    over = {
        "method": {"name": method},
        "reference": {"path": str(teacher)},
        "verifier": None,
        "rollout": {"groups": 32, "group_size": 1},
        "optim": {"lr": 0.01},
        "run": {"updates": 25},
        "checkpoint": {"every": 0},
    }
    said = run_cli("train", write(online, over), "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 0, said.err
    first, *out = lines(tmp_path / "run")
    far = [line["kl/ref" if method == "distill" else "loss"] for line in out]
    print([round(x, 2) for x in far])
    assert sum(far[-5:]) < sum(far[:5]) / 2
    judged = ("accuracy", "reward/", "pass@", "eval/accuracy", "eval/reward")
    assert not [key for line in (first, *out) for key in line if key.startswith(judged)]
    assert out[0]["verdict/unjudged"] == 1.0

    refused = run_cli("train", write(online, over | {"reference": None}), "--run-dir", tmp_path / "no")
    assert refused.code == 2
    assert f"reference.path: {method} learns from a teacher alone" in refused.err


def test_given_answers_are_learnt_with_the_teachers_doubts(run_cli, offline, write, teacher, tmp_path):
    """Offline too the teacher is read in each step, as its distributions are too large to be kept."""
    over = {"method": {"name": "kd"}, "reference": {"path": str(teacher)}, "run": {"updates": 30}}
    over |= {"optim": {"lr": 0.01}, "checkpoint": {"every": 0}}
    said = run_cli("train", write(offline, over), "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 0, said.err
    losses = [line["loss"] for line in lines(tmp_path / "run")[1:]]
    assert sum(losses[-5:]) < sum(losses[:5]) / 2
    assert not (tmp_path / "run" / "reference.safetensors").exists()


def test_a_policy_learns_from_itself_told_the_answer_and_a_resumed_run_is_the_same(
    run_cli, online, write, tmp_path
):
    """The reference follows the policy, so that it too has to be restored."""
    over = HINT | {"reference": {**HINT["reference"], "refresh_every": 1, "keep": 0.5}}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run_cli("train", write(online, over), "--run-dir", whole, "-q").code == 0
    assert run_cli("train", write(online, over | {"run": {"updates": 2}}), "--run-dir", cut, "-q").code == 0
    said = run_cli("train", write(online, over | {"run": {"updates": 4}}), "--run-dir", cut, "-q", "--resume")
    assert said.code == 0, said.err
    weights = [
        (checkpoint.newest(run / "checkpoints")[0] / "model" / "model.safetensors").read_bytes()
        for run in (whole, cut)
    ]
    assert weights[0] == weights[1]
    assert lines(whole)[1]["loss"] > 0
    assert (
        tomllib.loads((whole / "config.toml").read_text())["reference"]["hint"] == "The answer is {answer}."
    )


def test_a_hint_that_names_what_no_task_has_is_refused(run_cli, online, write):
    for hint, problem in (
        ("It is {solution}.", "reference.hint: no task has a field 'solution'"),
        ("It is {answer", "reference: hint: expected '}'"),
        ("It is {}", "a field is a name in braces"),
    ):
        said = run_cli("validate", write(online, HINT | {"reference": {"hint": hint}}))
        assert said.code == 2
        assert problem in said.err
    with pytest.raises(UserError, match="one of answer, level, reason, sibling"):
        check_hint({"solution"}, [Task(id="q", messages=(), answer="7", fields={"level": 3})])


# ---------------------------------------------------------------------- given answers


def batches(recipe: Path, run: Path, updates: int) -> list[Batch]:
    """The batches of the first updates, before any is trained on; the last one is trained on."""
    with posttrain.Session(str(recipe), dir=run, show="none") as session:
        out = []
        for n in range(updates):
            out.append(session.batch(session.sample()))
            if n < updates - 1:
                session.update(out[-1])
                session.publish()
        return out


@pytest.fixture
def mixed(teacher: Path) -> dict[str, Any]:
    """Tables of gkd with two own answers and five given ones an update."""
    return {
        "method": {"name": "gkd", "token_divergence": "forward_kl"},
        "reference": {"path": str(teacher)},
        "verifier": None,
        "rollout": {"groups": 2, "group_size": 1, "given_answers": 5},
    }


def test_given_answers_are_those_of_kd_in_its_order(online, offline, write, mixed, teacher, tmp_path):
    kd = {"method": {"name": "kd"}, "reference": {"path": str(teacher)}, "batch": {"batch_size": 5}}
    both = batches(write(online, mixed), tmp_path / "gkd", 2)
    given = batches(write(offline, kd, name="kd"), tmp_path / "kd", 2)
    model, reference = (AutoModelForCausalLM.from_pretrained(p) for p in (online["model"]["path"], teacher))
    forward = build("gkd", {"token_divergence": "forward_kl"}, horizon=3)
    learners = [Learner(model, method, reference=reference) for method in (KD, forward)]
    for mine, theirs in zip(both, given, strict=True):
        assert (mine.version == GIVEN).any(-1).tolist() == [False] * 2 + [True] * 5
        assert sorted(set(mine.group.tolist())) == list(range(7))
        rows = mine.rows(torch.arange(2, 7))
        width = theirs.tokens.shape[1]
        for name in ("tokens", "mask"):
            assert torch.equal(getattr(rows, name)[:, :width], getattr(theirs, name))
        assert learners[0].assess(theirs)["loss"] == learners[1].assess(rows)["loss"]


@pytest.mark.full
def test_given_answers_leave_what_is_measured_of_own_ones(run_cli, online, write, mixed, tmp_path):
    """Nobody sampled them: they are in no length, no age and no comparison of sampler and trainer."""
    said = run_cli(
        "train",
        write(online, mixed | {"rollout": {**mixed["rollout"], "replay": 1}}),
        "--run-dir",
        tmp_path / "run",
        "--quiet",
    )
    assert said.code == 0, said.err
    for line in lines(tmp_path / "run")[1:]:
        assert line["length/mean"] <= 3
        assert line["lag/max"] <= 4
        assert abs(line["kl/mismatch"]) < 1e-6
        assert line["ess"] == pytest.approx(1.0, abs=1e-5)
    assert "5 an update of " in (tmp_path / "run" / "plan.json").read_text()


@pytest.mark.full
def test_a_run_with_given_answers_resumes_exactly(run_cli, online, write, mixed, tmp_path):
    sums = online["task"]["arithmetic"]
    other = {**sums, "operators": ["-"], "template": "{a}-{b}="}
    sources = [
        {"arithmetic": sums, "name": "plus", "weight": 3.0},
        {"arithmetic": other, "name": "minus"},
    ]
    over = mixed | {"run": {"updates": 4}}
    tables = {k: v for k, v in online.items() if k != "task"} | {"task": sources}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run_cli("train", write(tables, over), "--run-dir", whole, "-q").code == 0
    assert run_cli("train", write(tables, over | {"run": {"updates": 2}}), "--run-dir", cut, "-q").code == 0
    said = run_cli("train", write(tables, over), "--run-dir", cut, "-q", "--resume")
    assert said.code == 0, said.err
    ends = [checkpoint.newest(run / "checkpoints")[0] / "model" / "model.safetensors" for run in (whole, cut)]
    assert ends[0].read_bytes() == ends[1].read_bytes()


def test_a_run_is_not_resumed_on_other_given_answers(run_cli, online, write, mixed, tmp_path):
    """The tasks are the same: their gold answers are in a column of their own."""
    data, run = tmp_path / "chats.jsonl", tmp_path / "run"

    def train(updates: int, answer: str, *words: str) -> tuple[int, str]:
        reply = {"role": "assistant", "content": answer}
        chats = [[{"role": "user", "content": f"{n}+1="}, reply] for n in "123"]
        data.write_text("".join(json.dumps({"messages": chat, "answer": "4"}) + "\n" for chat in chats))
        tables = {**online, "task": {"data": {"path": str(data)}}}
        recipe = write(tables, mixed | {"run": {"updates": updates}})
        ended = run_cli("train", recipe, "--run-dir", run, "-q", *words)
        return ended.code, ended.err

    assert train(1, "2") == (0, "")
    code, error = train(2, "3", "--resume")
    assert code == 2
    assert "the data differ from those that the run began with" in error


# ---------------------------------------------------------------------- a teacher by task


@pytest.fixture
def two(online: dict[str, Any], teacher: Path, able: Path) -> dict[str, Any]:
    """Tables of gkd on two sources, of which the second has a teacher of its own."""
    sums = online["task"]["arithmetic"]
    minus = {**sums, "operators": ["-"], "template": "{a}-{b}="}
    sources = [
        {"arithmetic": sums, "name": "plus"},
        {"arithmetic": minus, "name": "minus", "reference_path": str(able)},
    ]
    over = {"method": {"name": "gkd"}, "reference": {"path": str(teacher)}, "verifier": None, "task": None}
    over |= {"rollout": {"groups": 4, "group_size": 2, "given_answers": 4}}
    return merged(online, over) | {"task": sources}


def test_each_source_is_compared_with_its_own_teacher(write, two, tmp_path):
    [batch] = batches(write(two), tmp_path / "run", 1)
    assert batch.teacher is not None
    tokenizer = pretrained.load_tokenizer(Path(two["model"]["path"]))
    for row, teacher in zip(batch.tokens, batch.teacher.tolist(), strict=True):
        prompt = tokenizer.decode(row).partition("assistant")[0]
        assert teacher == ("-" in prompt)
    given = (batch.version == GIVEN).any(-1)
    assert batch.teacher[given].tolist().count(1) == batch.teacher[~given].tolist().count(1) / 2 == 2
    size = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(two["model"]["path"]).parameters())
    parts = plan_run(config.read(write(two)).recipe, silent, tmp_path).memory.parts
    assert parts["reference policy"] == 4 * (2 * size + 2 * 8 * 32)


@pytest.mark.full
@pytest.mark.parametrize("method", ["gkd", "distill"])
def test_replayed_rows_keep_their_teacher_and_a_run_resumes_exactly(run_cli, write, two, tmp_path, method):
    two = merged(two, {"method": {"name": method}, "rollout": {"replay": 2}, "run": {"updates": 4}})
    if method == "distill":
        two = merged(two, {"method": {"correction": "token_truncated"}, "rollout": {"given_answers": None}})
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run_cli("train", write(two), "--run-dir", whole, "-q").code == 0
    assert run_cli("train", write(two, {"run": {"updates": 2}}), "--run-dir", cut, "-q").code == 0
    said = run_cli("train", write(two), "--run-dir", cut, "-q", "--resume")
    assert said.code == 0, said.err
    ends = [checkpoint.newest(run / "checkpoints")[0] / "model" / "model.safetensors" for run in (whole, cut)]
    assert ends[0].read_bytes() == ends[1].read_bytes()


@pytest.mark.full
def test_given_rows_of_an_offline_run_have_the_teacher_of_their_source(offline, write, two, tmp_path):
    tables = {key: two[key] for key in ("reference", "task")} | {"method": {"name": "kd"}}
    [batch] = batches(write(offline | tables), tmp_path / "run", 1)
    assert batch.teacher is not None
    assert sorted(batch.teacher.tolist()) == [0] * 4 + [1] * 4


def test_a_teacher_of_a_task_with_another_vocabulary_is_refused(run_cli, write, two, make_model):
    distill = {"method": {"name": "distill"}, "rollout": {"given_answers": None}}
    assert run_cli("validate", write(merged(two, distill))).code == 0, "whose γ is 0, in both sources"
    two["task"][1]["reference_path"] = str(make_model(vocab_size=90))
    said = run_cli("validate", write(two))
    assert said.code == 2
    assert "task.1.reference_path: the reference's model has a smaller vocabulary" in said.err


# ---------------------------------------------------------------------- a teacher behind a server


@contextmanager
def serving(path: Path, **fields: Any) -> Iterator[str]:
    """The address of a server with this model, as `posttrain serve` starts it."""
    model = Model(path=str(path), dtype="float32", device="cpu")
    policy, engine = load_policy(Recipe(model=model, method={"name": "grpo"}, task=NO_TASK), None, silent)
    desk = ModelsDesk([ModelDesk(engine, policy.chat, name="able", **{"context": policy.context} | fields)])
    with closing(ChatServer(desk)) as server, closing(desk):
        yield server.address


@pytest.fixture(scope="module")
def address(able: Path) -> Iterator[str]:
    with serving(able) as url:
        yield url


def end_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.newest(run / "checkpoints")[0] / "model" / "model.safetensors")


@pytest.mark.parametrize("method", ["gkd", pytest.param("kd", marks=pytest.mark.full)])
def test_a_served_teacher_trains_like_one_that_is_loaded(
    run_cli, online, offline, write, able, address, tmp_path, method
):
    """Over its 5 likeliest tokens and the rest: the same losses and weights, but for rounding."""
    over = {"method": {"name": method}, "optim": {"eps": 1e-4}, "run": {"updates": 2}, "verifier": None}
    tables = merged(online if method == "gkd" else offline, over)
    if method == "gkd":
        tables = merged(tables, {"rollout": {"given_answers": 4}, "steps": {"epochs": 2}})
    runs = {}
    for name, reference in (("local", {"path": str(able)}), ("served", {"url": address, "path": "able"})):
        runs[name] = tmp_path / name
        recipe = write(tables, {"reference": {**reference, "top_k": 5}}, name=name)
        said = run_cli("train", recipe, "--run-dir", runs[name], "--quiet")
        assert said.code == 0, said.err
    local, served = (lines(run)[1:] for run in runs.values())
    assert [x["loss"] for x in served] == pytest.approx([x["loss"] for x in local], rel=1e-4)
    assert local[0]["loss"] > 0.01
    ends = [end_of(run) for run in runs.values()]
    start = load_file(Path(online["model"]["path"]) / "model.safetensors")
    moved = max(float((ends[0][name] - start[name]).abs().max()) for name in start)
    apart = max(float((ends[0][name] - ends[1][name]).abs().max()) for name in start)
    assert apart < moved / 20
    assert all(line["time/reference"] > 0 for line in served)


@pytest.mark.full
def test_a_batch_has_the_likeliest_tokens_of_every_trained_one(online, write, able, address, tmp_path):
    over = {"method": {"name": "gkd"}, "reference": {"url": address, "top_k": 7}, "verifier": None}
    [batch] = batches(write(online, over), tmp_path / "run", 1)
    model = AutoModelForCausalLM.from_pretrained(able)
    assert batch.teacher_top is not None
    assert batch.teacher_logp is not None
    for n, length in enumerate(batch.length.tolist()):
        logp = model(batch.tokens[n : n + 1, :length]).logits[0].detach().log_softmax(-1)
        for t in batch.mask[n].nonzero().flatten().tolist():
            values, tokens = logp[t - 1].topk(7)
            torch.testing.assert_close(batch.teacher_logp[n, t], values, rtol=0, atol=1e-4)
            assert set(batch.teacher_top[n, t].tolist()) == set(tokens.tolist())


def test_a_server_that_cannot_teach_is_refused_before_weights_are_read(
    run_cli, online, write, tiny, tmp_path, monkeypatch
):
    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.resize_token_embeddings(101, mean_resizing=False)
    model.save_pretrained(other)
    spelled = tiny_tokenizer()
    spelled.add_tokens(["The "])
    spelled.save_pretrained(other)
    gkd = {"method": {"name": "gkd"}, "verifier": None}

    def problem(url: str, **keys: Any) -> str:
        said = run_cli("validate", write(online, gkd | {"reference": {"url": url, "top_k": 4} | keys}))
        assert said.code == 2
        return str(said.err)

    with serving(tiny, context=20) as address:
        assert "reads up to 20 tokens, and a row has up to" in problem(address)
    with serving(tiny) as address:
        assert "/tokenize: status 404 (there is no model 'unknown' here" in problem(address, path="unknown")
        assert "prompt_logprobs: Input should be less than or equal to 20" in problem(address, top_k=21)
        missing = problem(address, api_key_env="NO_SUCH_KEY")
        assert "reference.api_key_env: the environment variable NO_SUCH_KEY is not set" in missing
    assert "/tokenize" in problem(address), "it has ended"
    with serving(other) as address:
        assert "has another tokenizer: token 0 of a text is 100 there, and" in problem(address)


@pytest.mark.full
def test_a_teacher_that_goes_away_ends_a_run_that_can_be_resumed(
    run_cli, online, write, able, tmp_path, monkeypatch
):
    """As soon as its tries are used up; what was trained is saved."""
    asked = TeacherServer.add
    monkeypatch.setattr(connection.time, "sleep", lambda seconds: None)
    over = {"method": {"name": "gkd"}, "verifier": None, "run": {"updates": 3}}
    with serving(able) as address, ExitStack() as stack:
        down = stack.enter_context(serving(able))
        recipe = write(online, over | {"reference": {"url": down, "top_k": 4}})

        def counted(self: TeacherServer, batch: Batch) -> Batch:
            if len(lines(tmp_path / "run")) == 2:
                stack.close()
            return asked(self, batch)

        monkeypatch.setattr(TeacherServer, "add", counted)
        said = run_cli("train", recipe, "--run-dir", tmp_path / "run", "--quiet")
        assert said.code == 1
        assert "the teacher at" in said.err
        assert "(7 tries)" in said.err
        assert "continue with --resume" in said.err
        words = ["--set", f"reference.url={address}", "--resume"]
        said = run_cli("train", recipe, "--run-dir", tmp_path / "run", "--quiet", *words)
        assert said.code == 0, said.err


def test_a_task_without_an_answer_gives_none(run_cli, online, write, mixed, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "2+3="}\n')
    over = mixed | {"task": {"arithmetic": None, "data": {"path": str(tmp_path / "data.jsonl")}}}
    said = run_cli("validate", write(online, over))
    assert said.code == 2
    assert "data.jsonl:1: there is no answer to learn" in said.err


# ---------------------------------------------------------------------- the prompts


def episode(number: int, response: str, score: float | None, **task: Any) -> Episode:
    asked = Task(id="q", messages=({"role": "user", "content": "3+4="},), **{"answer": "7", **task})
    return Episode(
        task=asked,
        sample=number,
        trajectory=Trajectory.given([1, 2, 3], 1, reward=[0.0, 0.0, score or 0.0]),
        verdict=Verdict(score=score, label="x", reason=f"said {response}"),
        response=response,
        stop="eos",
    )


def prompts_of(hint: str, episodes: list[Episode], tiny: Path, context: int = 99) -> list[str]:
    """What the teacher reads before each answer, as text."""
    tokenizer = pretrained.load_tokenizer(tiny)
    fields = frozenset(Reference(hint=hint).hint_fields)
    made = TeacherPrompts(hint, fields, Chat(tokenizer).render, right=1.0, context=context)
    rows = [(0, each) for each in episodes]
    batch = made.add(Batch.of([e.trajectory for e in episodes], [0] * len(episodes)), rows)
    assert batch.teacher_prompt is not None
    assert batch.teacher_prompt_length is not None
    assert batch.tokens.tolist() == [[1, 2, 3]] * len(episodes), "the policy's rows are as they were"
    return [
        tokenizer.decode(prompt[:length])
        for prompt, length in zip(batch.teacher_prompt, batch.teacher_prompt_length, strict=True)
    ]


def test_the_hint_stands_after_the_question_and_only_there(tiny):
    [told] = prompts_of("It is {answer}.", [episode(0, "6", 0.0)], tiny)
    assert "3+4=\n\nIt is 7." in told


def test_a_sibling_is_the_best_right_answer_of_the_others(tiny):
    group = [episode(0, "seven", 1.0), episode(1, "six", 0.0), episode(2, "7!", 2.0), episode(3, "-", None)]
    told = prompts_of("Like: {sibling}", group, tiny)
    assert ["Like: 7!" in told[n] for n in (0, 1, 3)] == [True] * 3
    assert "Like: seven" in told[2]
    assert prompts_of("Like: {sibling}", group[:1], tiny) == [""], "nobody else was right"


def test_what_the_verifier_said_and_fields_of_the_record_can_be_told(tiny):
    told = prompts_of("{reason}, {level}", [episode(0, "6", 0.0, fields={"level": "easy"})], tiny)
    assert "said 6, easy" in told[0]
    assert prompts_of("{level}", [episode(0, "6", 0.0, fields={"level": ""})], tiny) == [""]


def test_a_prompt_that_leaves_no_room_for_the_answer_is_left_out(tiny):
    long = "It is " + "surely " * 40 + "{answer}."
    assert prompts_of(long, [episode(0, "6", 0.0)], tiny) == [""]
    assert prompts_of(long, [episode(0, "6", 0.0)], tiny, context=999) != [""]


@pytest.mark.parametrize(
    ("over", "problem"),
    [
        ({"verifier": None, "reference": {"hint": "{reason}"}}, "is a verifier's, and no verifier is given"),
        ({"rollout": {"group_size": 1}, "reference": {"hint": "{sibling}"}}, "another answer to the task"),
    ],
)
def test_a_hint_that_no_answer_can_fill_is_refused(run_cli, online, write, over, problem):
    said = run_cli("validate", write(online, {"method": {"name": "gkd"}} | over))
    assert said.code == 2
    assert problem in said.err
