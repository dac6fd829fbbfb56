"""docs/coming-from.md: its programs and recipes run, and every key that it names is one."""

import dataclasses
import json
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import posttrain
from posttrain.api.recipe import KEYWORDS
from posttrain.base.table_reader import key_of
from posttrain.base.table_reader import keys_of as fields_of
from posttrain.errors import shell
from posttrain.methods.build import CHOICES, readable
from posttrain.methods.table import METHODS
from posttrain.recipe.config import from_tables, put
from posttrain.recipe.recipe import Recipe

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
PROGRAMS = [
    block
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    if "import posttrain" in block
]


def keys_of(cls: type, path: str = "") -> Iterator[str]:
    """Every key of a configuration, dotted."""
    for name, hint in fields_of(cls):
        dotted = f"{path}.{key_of(name)}".removeprefix(".")
        yield dotted
        for inner in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(inner):
                yield from keys_of(typing.cast(type, inner), dotted)


def lines(name: str, records: list[dict[str, Any]]) -> None:
    """A file of records in the working directory."""
    Path(name).write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the page names."""
    monkeypatch.chdir(tmp_path)
    lines("sums.jsonl", SUMS)
    lines("problems.jsonl", [{"problem": r["prompt"], "answer": r["answer"]} for r in SUMS])
    lines(
        "chats.jsonl",
        [
            {
                "messages": [
                    {"role": "user", "content": r["prompt"]},
                    {"role": "assistant", "content": r["answer"]},
                ]
            }
            for r in SUMS
        ],
    )
    lines("pairs.jsonl", [{"prompt": r["prompt"], "chosen": r["answer"], "rejected": "?"} for r in SUMS])


def test_there_is_a_program_for_each_trainer() -> None:
    told = [re.findall(r"method=(?:\{\s*\"name\": )?\"(\w+)\"", block)[0] for block in PROGRAMS]
    assert told == ["grpo", "sft", "dpo", "reward", "rloo"]


@pytest.mark.full
@pytest.mark.parametrize("program", PROGRAMS, ids=["grpo", "sft", "dpo", "reward", "session"])
def test_a_program_of_the_page_runs(program: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the model and what takes long is changed."""
    small = program.replace(MODEL, str(tiny)).replace('"max_length": 1024', '"max_length": 0')
    small = re.sub(r"updates=\d+", 'updates=2, show="none"', small)
    small = re.sub(r'"max_new_tokens": \d+', '"max_new_tokens": 4', small)
    if "Session" in small:
        small = small.replace("lr=1e-4", "lr=1e-4, sampling={'max_new_tokens': 4}")
    space: dict[str, Any] = {"__name__": "page"}
    exec(compile(small, "coming-from.md", "exec"), space)
    lines_of_metrics = space["s"].metrics if "s" in space else space["run"].metrics
    assert len([line for line in lines_of_metrics if "loss" in line]) == 2


def trained(which: int, tiny: Path, reward: Any) -> posttrain.Run:
    """The page's first or second recipe, read as it stands, and run on the tiny model for an update.

    The function is called in this process; vLLM's table and that of Weights & Biases are left out.
    """
    Path("whole.toml").write_text(re.findall(r"^```toml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[which])
    tables = dict(posttrain.Recipe.read("whole.toml").tables)
    small = {"groups": 4, "group_size": 4, "select": "all"}
    task = tables.pop("task")
    tables |= {"rollout": tables["rollout"] | small, "sampling": {"max_new_tokens": 4}, "run": {"updates": 1}}
    left = {
        key: value for key, value in tables.items() if key not in ("model", "verifier", "engine", "track")
    }
    model = {"path": str(tiny), "dtype": "float32", "device": "cpu"}
    data = {"data": task["data"], "held_out": task.get("held_out")}
    return posttrain.train(model, reward=reward, dir=Path("run"), show="none", **data, **left)


def test_verl_s_recipe_reads_verl_s_parquet_files_and_its_reward(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the lines that the page puts around a compute_score."""
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": r["prompt"]}],
            "reward_model": {"style": "rule", "ground_truth": r["answer"]},
            "extra_info": {"index": i},
        }
        for i, r in enumerate(SUMS)
    ]
    Path("gsm8k").mkdir()
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(rows), f"gsm8k/{split}.parquet")
    [wrapped] = re.findall(r"^```python\n# rewards.py\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    Path("rewards.py").write_text(wrapped)
    Path("my_reward.py").write_text(
        "def compute_score(source, solution, truth, extra=None):\n"
        "    return float(2 * (source == 'sums') + len(truth) + (extra['index'] >= 0))\n"
    )
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.delitem(sys.modules, "my_reward", raising=False)
    space: dict[str, Any] = {}
    exec(compile(wrapped, "rewards.py", "exec"), space)
    run = trained(0, tiny, space["reward"])
    assert run.metrics["reward/mean"][0] >= 4, "its source, an answer of one or two digits, and its row"


def test_openrlhf_s_recipe_reads_its_lines(tiny: Path) -> None:
    def reward(completions: list[str], prompts: list[str], answer: list[str]) -> list[float]:
        return [float(len(c)) for c in completions]

    Path("reward_func.py").write_text("def reward(completions, prompts, answer):\n    return [0.0]\n")
    assert len(trained(1, tiny, reward).metrics["reward/mean"]) == 1


def here(page: str) -> Iterator[str]:
    """The code of the right-hand columns of the page's tables, but for tinker's, whose are calls."""
    for row in re.findall(r"^\| (?!-)[^|]+ \| ([^|]+) \|$", page.split("## tinker")[0], re.MULTILINE):
        yield from re.findall(r"`([^`]+)`", row)


def test_every_key_that_the_page_names_is_one_of_a_recipe() -> None:
    known = set(keys_of(Recipe)) | {"method.name", "task.held_out", "task.held_out.path"}
    known |= {f"method.{option}" for line in METHODS.values() for option in readable(line.method)}
    known |= {f"method.{choice}" for choice in CHOICES} | {"method.cap", "method.weight_cap"}
    known |= {f"method.{number}" for number in ("top_share", "cov_share", "cov_low", "cov_high")}
    told = list(here(PAGE))
    keys = [code.split(" = ")[0] for code in told if re.match(r"[a-z_]+\.[a-z_.]+(?: = |$)", code)]
    keys = [key for key in keys if not key.startswith(("data.", "actor_rollout_ref."))]
    assert len(keys) > 100
    assert not [key for key in keys if key not in known]
    tables = [code.strip("[]") for code in told if code.startswith("[")]
    assert set(tables) <= known
    names = set(METHODS) | {name for functions in CHOICES.values() for name in functions}
    words = {code for code in told if re.fullmatch(r"[a-z]\w*_\w+|[a-z]+\d?", code)}
    theirs = {"true", "gae", "mse", "kl", "low_var_kl", "reinforce_baseline", "group_norm"}
    theirs |= {"reinforce_plus_plus", "reinforce_plus_plus_baseline", "optimal_token_baseline"}
    assert words - theirs <= names | set(KEYWORDS)


def _names_there(trainer: str) -> list[tuple[str, str]]:
    """(a key of this trainer, what the page's table says of it)"""
    part = PAGE.split(f"\n## {trainer}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", part, re.MULTILINE)
    return [
        (re.split("[= ]", name.removeprefix("--"))[0], says)
        for names, says in rows
        for name in re.findall(r"`([^`]+)`", names)
    ]


def tables_with(*names: str) -> dict[str, Any]:
    """A recipe, and these keys, which it does not have."""
    made: dict[str, Any] = {
        "model": {"path": "x"},
        "method": {"name": "grpo"},
        "task": {"arithmetic": {}},
    }
    for name in names:
        put(made, name, 1, name)
    return made


@pytest.mark.parametrize("trainer", ["TRL", "verl", "OpenRLHF"])
def test_a_key_of_another_trainer_in_a_recipe_is_answered_with_its_name_here(trainer: str) -> None:
    here, names = set(keys_of(Recipe)), list(_names_there(trainer))
    assert len(names) > 20
    for name, says in names[trainer == "TRL" :]:  # `model`, the first, is a table here too
        if name in here:
            continue  # it is called so here too
        with shell(), pytest.raises(posttrain.UserError) as refused:
            from_tables(tables_with(name))
        said = str(refused.value)
        codes = [re.split(r"[ =]", code)[0].lstrip("-") for code in re.findall(r"`([^`]+)`", says)]
        assert " here" in said or "did you mean" in said or says.startswith("always"), (name, said)
        assert any(code.rpartition(".")[2] in said for code in codes) or not codes, (name, said, says)


def test_each_key_within_a_table_of_another_trainer_is_answered() -> None:
    areal = ("actor.eps_clip", "actor.optimizer.lr", "actor.ppo_n_minibatches", "gconfig.n_samples")
    prime = ("orchestrator.batch_size", "orchestrator.group_size", "ckpt.interval", "trainer.model.lora.rank")
    others = ("actor.optimizer.type", "model.name", "model.revision", "neftune_noise_alpha")
    with shell(), pytest.raises(posttrain.UserError) as refused:
        from_tables(tables_with(*areal, *prime, *others))
    said = str(refused.value)
    for name, answer in zip(
        (*areal, *prime, *others),
        (
            "it is method.clip_low and method.clip_high here",
            "it is optim.lr here",
            "it is steps.minibatches here",
            "it is rollout.group_size here",
            "it is rollout.groups (× rollout.group_size answers) here",
            "it is rollout.group_size here",
            "it is checkpoint.every here",
            "it is lora.rank here",
            "it is optim.name here",
            "did you mean 'path'?",
            "it is model.path, as ORG/NAME@REVISION here",
            "leave it out: NEFTune is not here, and embeddings have no noise",
        ),
        strict=True,
    ):
        assert f"{name}: {answer}" in said


@pytest.mark.parametrize(
    ("method", "option", "hint"),
    [
        ("grpo", "beta", "method.kl_in_loss"),
        ("dpo", "lam", "it reads"),
        ("grpo", "epsilon", "method.clip_low"),
    ],
)
def test_a_method_does_not_send_back_to_the_very_key(method: str, option: str, hint: str) -> None:
    with pytest.raises(posttrain.UserError) as refused:
        posttrain.method(method, **{option: 0.1})
    assert hint in str(refused.value)
    assert f"it is method.{option} here" not in str(refused.value)
