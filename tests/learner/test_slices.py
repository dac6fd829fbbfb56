"""Weights that ranks read by rows, once they are sharded, are those of a whole model that is then sharded."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor.debug import _clear_sharding_prop_cache as clear_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.learner.critic import CriticModel
from posttrain.learner.learner import Learner
from posttrain.learner.lora import Lora
from posttrain.learner.ranks import Alone, Parallel, Ranks
from posttrain.learner.shards import local
from posttrain.methods.build import build
from posttrain.models import pretrained, slices
from posttrain.models.file_names import FromFiles
from posttrain.models.loading import quiet
from posttrain.types import UserError

RANKS = 3
Load = Callable[..., Any]


@contextmanager
def one_rank(rank: int, size: int = RANKS) -> Iterator[Ranks]:
    """One of several ranks whose messages go nowhere: sharding sends none."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    ranks: Any = Alone()
    ranks.rank, ranks.size = rank, size
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def written(place: Path, family: str, **sizes: Any) -> Path:
    """A random model in float32 whose tensors three ranks cannot share evenly."""
    shape: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 16,
        "intermediate_size": 20,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
        "num_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **shape | sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            if x.is_floating_point() and x.ndim == 1:
                x += 0.1 * torch.rand_like(x)
    with quiet():
        model.save_pretrained(place)
    return place


def learner(
    load: Load, path: Path, ranks: Ranks, *, dtype: torch.dtype, given: dict[str, Any], experts: int = 1
) -> Learner:
    """A learner with a reference and a critic of its own, all from these files."""
    models = [load(path, dtype=dtype, device=torch.device("cpu")) for _ in range(3)]
    critic = CriticModel(models[0], models[2])
    return Learner(
        models[0],
        build("ppo", {"kl_in_loss": 0.1}, horizon=16),
        reference=models[1],
        critic=critic,
        ranks=ranks,
        parallel=Parallel(shard=True, experts=experts),
        **given,
    )


def tensors(learner: Learner) -> dict[str, torch.Tensor]:
    """What a rank holds: shares of weights, an adapter, buffers, masters."""
    held = {}
    for number, net in enumerate((learner.net, *learner.passes.references)):
        assert net is not None
        pairs = [*net.named_parameters(), *net.named_buffers()]
        held |= {f"{number} {name}": local(x.detach()) for name, x in pairs}
    masters = learner.masters.named_masters()
    return held | {f"master {name}": local(x) for name, x in masters}


CASES: dict[str, tuple[str, dict[str, Any], torch.dtype, dict[str, Any]]] = {
    "masters, tied": ("llama", {"tie_word_embeddings": True}, torch.bfloat16, {}),
    "an adapter": ("llama", {}, torch.bfloat16, {"lora": Lora(rank=2)}),
    "experts and stored buffers": ("deepseek_v3", {"num_key_value_heads": 4}, torch.float32, {}),
    "rotations by kind of layer": ("gemma3_text", {"head_dim": 8}, torch.bfloat16, {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample("masters, tied", "an adapter", "experts and stored buffers")
def test_a_rank_reads_what_it_would_keep_of_the_whole(case: str, tmp_path: Path) -> None:
    """Bit for bit, on the second of three ranks and on the last, which has fewer rows."""
    family, sizes, dtype, given = CASES[case]
    path = written(tmp_path, family, **sizes)
    for rank in range(1, RANKS):
        with one_rank(rank) as ranks:
            whole = tensors(learner(pretrained.load_model, path, ranks, dtype=dtype, given=given))
            read = tensors(learner(slices.load_model, path, ranks, dtype=dtype, given=given))
        assert list(read) == list(whole)
        for name, x in whole.items():
            assert x.dtype == read[name].dtype, name
            assert torch.equal(x, read[name]), name


def test_a_rank_reads_the_experts_that_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit. Of four ranks as two groups the second holds two of the last three of six experts."""
    path = written(tmp_path, "deepseek_v3", num_key_value_heads=4, n_routed_experts=6)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "given": {}, "experts": 2}
    read, rows_of = list[int](), FromFiles.rows

    def rows(files: Any, name: str, first: int, last: int) -> torch.Tensor:
        read.extend(range(first, last))
        return rows_of(files, name, first, last)

    monkeypatch.setattr(FromFiles, "rows", rows)
    for rank, numbers in {1: {3, 4}, 2: {2}}.items():
        clear_cache()  # of PyTorch, which takes the meshes of two ranks for one
        with one_rank(rank, 4) as ranks:
            whole = tensors(learner(pretrained.load_model, path, ranks, **options))
            read.clear()
            by_rows = tensors(learner(slices.load_model, path, ranks, **options))
        assert set(read) == numbers
        assert list(by_rows) == list(whole)
        for name, x in whole.items():
            assert torch.equal(x, by_rows[name]), name


def test_a_model_is_not_read_before_it_is_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And then a rank reads a third of each tensor."""
    path, read = written(tmp_path, "llama"), dict[str, int]()
    rows_of = slices._Files.rows
    monkeypatch.setattr(slices._Files, "__getitem__", lambda files, name: pytest.fail(name))

    def rows(files: Any, name: str, first: int, last: int) -> torch.Tensor:
        out = rows_of(files, name, first, last)
        read[name] = read.get(name, 0) + out.numel()
        return out

    monkeypatch.setattr(slices._Files, "rows", rows)
    with one_rank(0) as ranks:
        model = slices.load_model(path, dtype=torch.bfloat16, device=torch.device("cpu"))
        assert not any(read.values())
        method = build("sft", {}, horizon=16)
        held = Learner(model, method, ranks=ranks, parallel=Parallel(shard=True))
        assert read == {name: local(p).numel() for name, p in held.model.named_parameters()}
        assert sum(read.values()) < 0.4 * sum(p.numel() for p in held.model.parameters())


def test_models_of_several_ranks_have_the_same_shares(tmp_path: Path) -> None:
    """Of two models on four ranks, a rank has half of the weights, and a norm counts them once."""
    path = written(tmp_path, "llama", vocab_size=60)
    whole = pretrained.load_model(path, dtype=torch.float32)
    # PyTorch keeps a mesh of two dimensions for equal ones, so one rank is tried alone.
    with one_rank(3, 4) as ranks:
        model = slices.load_model(path, dtype=torch.float32, device=torch.device("cpu"))
        parallel = Parallel(shard=True, replicas=2)
        held = Learner(model, build("sft", {}, horizon=16), ranks=ranks, parallel=parallel)
        for m, weight in zip(held.masters.masters, whole.parameters(), strict=True):
            assert torch.equal(local(m.numbers()), weight.chunk(2)[1]), m.name
            m.grad = torch.ones_like(m.parameter)
        ranks.sum = lambda x: 4 * x  # type: ignore[method-assign, assignment, misc]
        count = sum(weight.numel() for weight in whole.parameters())
        assert held.masters.clip(0.0) == pytest.approx(count**0.5)


def test_a_rank_reads_its_own_experts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four the second of three ranks has the last two, and of one matrix of the others nothing."""
    path, read = written(tmp_path, "qwen3_moe"), set[str]()
    get = slices._Files.__getitem__

    def tensor(files: Any, name: str) -> torch.Tensor:
        read.add(name)
        return get(files, name)

    monkeypatch.setattr(slices._Files, "__getitem__", tensor)
    model = slices.load_model(path, dtype=torch.float32, device=torch.device("cpu"))
    with one_rank(1) as ranks:
        Learner(model, build("sft", {}, horizon=16), ranks=ranks, parallel=Parallel(shard=True))
    assert {int(name.split("experts.")[1].split(".")[0]) for name in read} == {2, 3}
    assert len(read) == 2 * 3 * 2  # layers, matrices, experts


def test_the_rank_that_reads_a_nan_names_its_tensor(tmp_path: Path) -> None:
    path = written(tmp_path, "llama")
    file, name = path / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    stored = load_file(file)
    stored[name][-1, 0] = torch.nan
    save_file(stored, file, metadata={"format": "pt"})
    for rank in range(RANKS):
        with one_rank(rank) as ranks:
            model = slices.load_model(path, dtype=torch.float32, device=torch.device("cpu"))
            method, parallel = build("sft", {}, horizon=16), Parallel(shard=True)
            if rank < RANKS - 1:
                Learner(model, method, ranks=ranks, parallel=parallel)
                continue
            with pytest.raises(UserError, match=f"NaN or infinite weights in {name} as torch.float32"):
                Learner(model, method, ranks=ranks, parallel=parallel)


def test_what_does_not_fit_the_configuration_is_refused_unread(tmp_path: Path) -> None:
    path = written(tmp_path, "llama")
    file = path / "model.safetensors"
    stored = load_file(file)
    lost = stored.pop("model.norm.weight")
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks the weights of 1 tensors, first model.norm.weight"):
        slices.load_model(path, dtype=torch.float32, device=torch.device("cpu"))
    save_file(stored | {"model.norm.weight": lost[:-1].clone()}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"stores model.norm.weight as \[15\], config.json makes it \[16\]"):
        slices.load_model(path, dtype=torch.float32, device=torch.device("cpu"))


def test_tied_weights_that_are_stored_twice_are_read_whole(tmp_path: Path) -> None:
    """Whether they are equal, and so tied, is in their numbers."""
    path = written(tmp_path, "llama", tie_word_embeddings=True)
    file = path / "model.safetensors"
    stored = load_file(file)
    for twice in (stored["model.embed_tokens.weight"], torch.rand(61, 16)):
        save_file(stored | {"lm_head.weight": twice.clone()}, file, metadata={"format": "pt"})
        read = slices.load_model(path, dtype=torch.float32, device=torch.device("cpu"))
        whole = pretrained.load_model(path, dtype=torch.float32)
        tied = [m.get_output_embeddings().weight is m.get_input_embeddings().weight for m in (read, whole)]
        assert tied[0] == tied[1]
        assert torch.equal(read.get_output_embeddings().weight, twice)


PEAK = """
import json, sys
from pathlib import Path
import torch
from posttrain.learner.learner import Learner
from posttrain.learner.process_ranks import join_ranks
from posttrain.learner.ranks import Parallel
from posttrain.methods.build import build
from posttrain.models import pretrained, slices

def kib(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))

small, large, how, dtype, out = sys.argv[1:]
load = getattr(sys.modules["posttrain.models." + how], "load_model")

def learner(path):
    model = load(Path(path), dtype=getattr(torch, dtype), device=torch.device("cpu"))
    return Learner(model, build("sft", {}, horizon=16), ranks=ranks, parallel=Parallel(shard=True))

with join_ranks(Parallel(deadline_s=60)) as ranks:
    learner(small)  # imports what it needs, and makes oneDNN's kernels
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before = kib("VmRSS")
    held = learner(large)
    peaks = ranks.gather((kib("VmHWM") - before) / 1024)
    if ranks.rank == 0:
        Path(out).write_text(json.dumps(peaks))
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_never_holds_a_whole_model(dtype: str, tmp_path: Path) -> None:
    """Of two ranks and 200 MB in ten layers each holds at most half and two layers; whole, more than all."""
    sizes = {"hidden_size": 640, "intermediate_size": 1728, "num_key_value_heads": 4}
    large, small = (
        written(tmp_path / str(layers), "llama", num_hidden_layers=layers, **sizes) for layers in (10, 1)
    )
    script, out = tmp_path / "peak.py", tmp_path / "peaks.json"
    script.write_text(PEAK)
    model = (large / "model.safetensors").stat().st_size / 2**20  # in float32, as masters are
    assert 180 < model < 220
    peaks = {}
    for how in ("slices", "pretrained"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        words = [*command, str(script), str(small), str(large), how, dtype, str(out)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=280)
        assert done.returncode == 0, done.stderr[-4000:]
        peaks[how] = max(json.loads(out.read_text()))
    assert peaks["slices"] <= (1 / 2 + 2 / 10) * model
    assert peaks["pretrained"] > model
