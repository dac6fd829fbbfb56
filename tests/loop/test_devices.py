"""Learner and engine on a GPU, without one: tensors that say they lie there and refuse to meet others.

Their numbers lie on the processor, so everything runs to its end, and what comes out can be compared with a
plain run bit for bit. What is not tested is what only the real thing has: its kernels, its graphs, its time.
"""

import copy
import importlib
import json
import math
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import groupby, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map
from transformers import CONFIG_MAPPING, Gemma2Config, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.gemma2 import Gemma2ForCausalLM

from posttrain.engines.native.engine import NativeConfig, NativeEngine
from posttrain.engines.vllm.start import _share
from posttrain.learner import forward as forward_passes
from posttrain.learner import varlen
from posttrain.learner.critic import CriticModel
from posttrain.learner.forward import Net, forward
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.lora import Lora
from posttrain.learner.optim import Master, Optim
from posttrain.learner.reference import Reference
from posttrain.learner.shards import shard_like
from posttrain.loop.saving import _gather_shards
from posttrain.loop.weight_sync import Publisher
from posttrain.math import tokens
from posttrain.methods.table import DPO, GRPO, PPO, REWARD, SFT
from posttrain.models.attention import use_layouts
from posttrain.models.fingerprint import digest, finite
from posttrain.models.loading import hide_other_gpus
from posttrain.models.pretrained import silent, skeleton
from posttrain.plan.memory import GIB, SHARE, Shape, estimate, samplers_on
from posttrain.plan.plan import Plan, plan_run
from posttrain.plan.smaller import SERVER, smaller_settings
from posttrain.recipe import config
from posttrain.recipe.asynchrony import Asynchrony
from posttrain.rollout.snapshots import load_snapshot
from posttrain.testing import repeatable
from posttrain.types import Batch, Method, Request, Sampling, Trajectory, UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*CUDA is not available")

HERE, THERE = torch.device("cpu"), torch.device("cuda", 0)
READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim"}
"""Operations whose result, or the size of it, the processor must know before it can go on."""


class Remote(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "Remote":
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype
        )
        made.held = held
        return made

    device = property(lambda self: THERE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = op.overloadpacket.__name__
        here = [x for x in tree_flatten((args, kwargs))[0] if type(x) in (torch.Tensor, nn.Parameter)]
        if name == "copy_":
            if any(map(is_here, args[:2])):
                Gpu.waits.append(f"{name} between devices")
        elif name in ("index", "index_put", "index_put_"):
            if any(x.ndim and x is not i for x in here for i in args[1]):
                raise RuntimeError(f"{name}: tensors on two devices")
            if any(x is i for x in here for i in args[1]):
                Gpu.waits.append(f"{name} by numbers that lie here")
            if any(i is not None and i.dtype == torch.bool for i in args[1]) and name == "index":
                Gpu.waits.append(f"{name} by a mask")
        elif any(x.ndim for x in here):
            raise RuntimeError(f"{name}: expected all tensors to be on one device, found {THERE} and {HERE}")
        if name in READS or (name == "repeat_interleave" and isinstance(args[0], Remote)):
            Gpu.waits.append(name)
        if kwargs.get("device") is not None:
            kwargs["device"] = HERE
        raw = tree_map(lambda x: x.held if isinstance(x, Remote) else x, (args, kwargs))
        out = tree_map(lambda x: Remote(x) if isinstance(x, torch.Tensor) else x, op(*raw[0], **raw[1]))
        return return_and_correct_aliasing(op, args, kwargs, out)


def is_here(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not isinstance(x, Remote)


class Sent(torch.autograd.Function):
    """A tensor's numbers on the other side, gradients the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return Remote(x.detach().clone())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].held


class Fetched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> torch.Tensor:
        return x.held.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return Remote(grads[0])


class Gpu(TorchFunctionMode):
    """Within it `cuda` is a device: what is made or sent there is Remote."""

    waits: ClassVar[list[str]] = []
    """Every occasion on which the processor had to wait for it."""

    def __enter__(self) -> "Gpu":
        Gpu.waits.clear()
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if isinstance(args[0] if args else None, torch.Tensor):
            if name in ("to", "cpu", "cuda", "pin_memory"):
                return self._moved(name, *args, **kwargs)
            if name in ("tolist", "numpy") and isinstance(args[0], Remote):
                assert name == "tolist", "a GPU's tensor has no numpy array"
                Gpu.waits.append(name)
                return args[0].held.tolist()
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = HERE
            out = func(*args, **kwargs)
            if name in ("tensor", "as_tensor"):
                Gpu.waits.append(f"{name} of numbers that lie here")
            return out if isinstance(out, Remote) else Remote(out)
        return func(*args, **kwargs)

    def _moved(self, name: str, x: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "pin_memory":
            out = x.clone()
            out.pinned = True
            return out
        given = {"cpu": [HERE], "cuda": [THERE]}.get(name, [*args, *kwargs.values()])
        like = [a for a in given if isinstance(a, torch.Tensor)]
        given += [like[0].device, like[0].dtype] if like else []
        device = next((torch.device(a) for a in given if isinstance(a, (str, torch.device))), x.device)
        dtype = next((a for a in given if isinstance(a, torch.dtype)), x.dtype)
        rest = {k: v for k, v in kwargs.items() if k in ("copy", "memory_format")}
        pinned = getattr(x, "pinned", False) and kwargs.get("non_blocking", False)
        if device.type == x.device.type or device.type == "meta":
            return torch._C.TensorBase.to(x, dtype, **rest)
        x = torch._C.TensorBase.to(x, dtype)
        if not pinned:
            Gpu.waits.append("fetched" if device == HERE else "sent")
        return Fetched.apply(x) if device == HERE else Sent.apply(x)


class Graphs:
    """Records steps as a GPU does, but for being one: a replay runs the step again on the same inputs."""

    def __init__(self, device: torch.device) -> None:
        assert device == THERE

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        step()

        def replay() -> None:
            before = len(Gpu.waits)
            step()
            assert len(Gpu.waits) == before, "a recording cannot wait"

        return replay


def moved(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """What `nn.Module.to` does, for a device that is none: weights that are shared stay so."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    made: dict[int, Any] = {}
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None:
                grown = p.detach().to(device or p.device, p.dtype if dtype is None else dtype)
                made.setdefault(id(p), nn.Parameter(grown, p.requires_grad))
                part._parameters[name] = made[id(p)]
        for name, b in part._buffers.items():
            part._buffers[name] = None if b is None else b.to(device or b.device)
    return module


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Gpu]]:
    """The mode, within which cuda is a device."""
    monkeypatch.setattr(nn.Module, "to", moved)
    monkeypatch.setattr("posttrain.engines.native.runner.CudaGraphs", Graphs)
    # Key heads are repeated on a GPU alone, and a sum over others in another order has other last bits.
    monkeypatch.setattr("posttrain.models.attention._repeats", lambda query, mask: False)
    monkeypatch.setattr("posttrain.models.attention._takes_flash", lambda query, key, value: False)
    # Likewise the kernels of a training step, which are a processor's alone.
    monkeypatch.setattr("posttrain.learner.kernels.suits", lambda x: False)
    # And what fills prompt groups up there: sums over other shapes have other last bits.
    monkeypatch.setattr("posttrain.learner.prompt_group.EVEN_PROMPT_GROUP", 1)
    with Gpu():
        yield Gpu


def there(model: PreTrainedModel) -> Any:
    """A copy of this model on the device that is none."""
    model = copy.deepcopy(model).to("cuda")
    assert model.device == THERE
    return model


SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def model_of(seed: int = 0, dtype: torch.dtype = torch.float32, family: str = "llama") -> PreTrainedModel:
    torch.manual_seed(seed)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES)).to(dtype)
    windows = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, **windows)).to(dtype)


def batch_of(seed: int = 0, *, groups: int = 3, K: int = 4, long: int = 5) -> Batch:
    """Groups with a common system message and a prompt each, answers of several lengths."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(groups):
        prompt = [*range(12), *torch.randint(61, (long,), generator=g).tolist()]
        for k in range(K):
            answer = torch.randint(61, (2 + (3 * k + number) % 7,), generator=g).tolist()
            n = len(prompt) + len(answer)
            logp = [-abs(x) for x in torch.randn(n, generator=g).tolist()]
            reward = [0.0] * (n - 1) + [float((k + number) % 3)]
            sampled = [False] * len(prompt) + [True] * len(answer)
            row = Trajectory(
                tokens=prompt + answer,
                sampled=sampled,
                logp_gen=logp,
                logp_policy=logp,
                version=[0] * n,
                reward=reward,
            )
            rows.append((row, number))
    return Batch.of([r for r, _ in rows], [n for _, n in rows])


def numbers(x: Any) -> Any:
    return x.held if isinstance(x, Remote) else x


RUNS: dict[str, tuple[Method, dict[str, Any]]] = {
    "grpo": (GRPO, {}),
    "grpo in bfloat16": (GRPO, {"dtype": torch.bfloat16}),
    "grpo of gemma 2": (GRPO, {"family": "gemma2"}),
    "grpo in parts": (GRPO, {"steps": Steps(minibatches=2, epochs=2, microbatch_tokens=40)}),
    "grpo of families that are attended to by branch": (GRPO, {"long": 520, "groups": 2}),
    "entropy and a reference": (replace(GRPO, entropy_bonus=0.01, kl_in_loss=0.1), {"reference": True}),
    "a reference that follows": (replace(GRPO, kl_in_loss=0.1), {"follows": True, "dtype": torch.bfloat16}),
    "checkpointing": (GRPO, {"steps": Steps(gradient_checkpointing=True)}),
    "ppo": (PPO, {"critic": "shared"}),
    "ppo with a critic of its own": (PPO, {"critic": "own", "steps": Steps(epochs=2, minibatches=2)}),
    "sft": (SFT, {"dtype": torch.bfloat16}),
    "dpo": (DPO, {"reference": True, "K": 2}),
    "a reward model": (REWARD, {"critic": "shared", "K": 2}),
    "lora": (GRPO, {"lora": Lora(rank=4)}),
}


def build_learner(method: Method, place: Callable[[Any], Any], given: dict[str, Any]) -> Learner:
    given = dict(given)
    for name in ("long", "groups", "K"):
        given.pop(name, None)
    shape = {name: given.pop(name) for name in ("dtype", "family") if name in given}
    model = place(model_of(**shape))
    parts: dict[str, Any] = {"optim": Optim(lr=0.01, weight_decay=0.1), "seed": 5}
    if given.pop("reference", False):
        parts["reference"] = place(model_of(1, **shape)).requires_grad_(False)
    if given.pop("follows", False):
        parts["reference"] = place(model_of(**shape)).requires_grad_(False)
        parts["refresh"] = Reference(refresh_every=1, keep=0.5)
    kind = given.pop("critic", None)
    if kind is not None:
        body = place(model_of(2, **shape)) if kind == "own" else None
        critic = CriticModel(model, body)
        parts |= {"critic": critic, "critic_optim": Optim(lr=0.02)}
    return Learner(model, method, **parts, **given)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.sample("grpo", "grpo in bfloat16", "ppo with a critic of its own", "sft", "dpo", "lora")
def test_an_update_on_another_device_is_the_same_bit_for_bit(gpu, run: str) -> None:
    method, given = RUNS[run]
    batch = batch_of(**{k: given[k] for k in ("long", "groups", "K") if k in given})
    plain, remote = build_learner(method, copy.deepcopy, given), build_learner(method, there, given)
    for _ in range(2):
        wanted, got = plain.update(batch), remote.update(batch)
        assert got.metrics == wanted.metrics
        for field in fields(wanted):
            if isinstance(value := getattr(wanted, field.name), torch.Tensor):
                assert is_here(getattr(got, field.name))
                assert value.equal(getattr(got, field.name))
    kept = remote.tensors()
    for file, tensors in plain.tensors().items():
        for name, tensor in tensors.items():
            assert isinstance(kept[file][name], Remote), (file, name)
            assert tensor.equal(numbers(kept[file][name])), (file, name)
    assert remote.canary(list(range(9))) == plain.canary(list(range(9)))
    # What was saved is read back from the processor's memory.
    remote.restore(
        {f: {n: numbers(x).clone() for n, x in t.items()} for f, t in kept.items()}, remote.state()
    )
    assert remote.update(batch).metrics == plain.update(batch).metrics


def test_spans_of_a_pack_are_attended_on_the_device(
    gpu, attend_by_spans: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call meets a tensor that lies elsewhere, and the table of spans is sent once for all layers."""
    attend_by_spans()
    for name in ("flash_forward", "flash_backward"):
        kernel = getattr(varlen, name)

        def launch(*args: Any, kernel: Any = kernel) -> Any:
            tensors = [x for x in tree_flatten(args)[0] if isinstance(x, torch.Tensor)]
            assert all(isinstance(x, Remote) for x in tensors)
            return tree_map(lambda x: Remote(x), kernel(*tree_map(_here, args)))

        monkeypatch.setattr(varlen, name, launch)
    batch, gradients, waits = batch_of(), [], []
    for place in (copy.deepcopy, there):
        model = place(model_of(dtype=torch.bfloat16))
        use_layouts(model)
        if place is copy.deepcopy:
            with monkeypatch.context() as patch:
                patch.setattr(varlen, "suits", lambda *heads: False)
                forward(Net(model), batch, 1.0).logp.sum().backward()
        else:
            gpu.waits.clear()
            out = forward(Net(model), batch, 1.0).logp.sum()
            waits.append(list(gpu.waits))
            out.backward()
        gradients.append(torch.cat([numbers(p.grad).flatten() for p in model.parameters()]).float())
    # Tokens, positions, three columns of spans, sources and targets; log-probabilities and entropies.
    assert waits == [["sent"] * 7 + ["fetched"] * 2]
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 0.05


def _here(x: Any) -> Any:
    """Return a tensor's numbers, and those of a table of spans, on the processor."""
    if isinstance(x, varlen.SpanKeys):
        return varlen.SpanKeys(*(numbers(getattr(x, field.name)) for field in fields(x)))
    return numbers(x)


def test_rows_are_packed_while_the_device_computes_gradients(gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a backward pass and the packing of the next microbatch nothing waits for the device."""
    for place, name in ((torch.Tensor, "backward"), (forward_passes, "pack")):
        function = getattr(place, name)

        def log(*args: Any, function: Any = function, name: str = name, **options: Any) -> Any:
            gpu.waits.append(name)
            return function(*args, **options)

        monkeypatch.setattr(place, name, log)
    learner = build_learner(GRPO, there, {"steps": Steps(microbatch_tokens=40)})
    gpu.waits.clear()
    learner.update(batch_of())
    events = [event for event, _ in groupby(gpu.waits)]  # the mode calls backward() once more
    after = [later for event, later in pairwise(events) if event == "backward"]
    assert after[:-1] == ["pack"] * 2  # the last step moves the weights


def test_no_chunk_of_the_head_waits_for_the_device() -> None:
    """16k tokens of a large vocabulary are dozens of chunks. Fake tensors have no number to be asked for."""
    with FakeTensorMode():
        logits, targets = torch.zeros(3, 7, requires_grad=True), torch.zeros(3, dtype=torch.long)
        tokens.pick(logits, targets)[0].sum().backward()
        with pytest.raises(DataDependentOutputException):
            bool(logits.any())


def test_a_gpu_has_chunks_of_its_own_size(gpu) -> None:
    def rows(place: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
        seen: list[int] = []
        head = lambda h: (seen.append(len(h)), h)[1]  # noqa: E731
        V = 1 << 16
        hidden, targets = place(torch.zeros(200, 4)), place(torch.zeros(200, dtype=torch.long))
        tokens.pick_from_hidden(hidden, head, targets, vocabulary=V)
        return seen

    assert len(rows(lambda x: x)) == 3
    assert rows(Remote) == [200]


MIXED = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"top_k": 7},
    {"min_p": 0.05, "temperature": 1.2},
]


def test_a_gpu_sums_the_heads_gradient_in_float32(gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many chunks it is that of one chunk but for a rounding; summed in bfloat16 it is not."""
    batch = batch_of(groups=8)

    def gradient(rows: int) -> torch.Tensor:
        monkeypatch.setattr(tokens, "CHUNK_BYTES_ELSEWHERE", 61 * 4 * rows)
        model = there(model_of(dtype=torch.bfloat16))
        forward(Net(model), batch, 1.0).logp.sum().backward()
        return numbers(model.lm_head.weight.grad).double()

    whole, wide = gradient(10_000), gradient(2)
    monkeypatch.setattr("posttrain.learner.forward._narrow", lambda head, device: [])
    off = [float((x - whole).norm() / whole.norm()) for x in (wide, gradient(2))]
    assert off[0] < off[1] / 2


def requests_of(kinds: list[dict[str, Any]], n: int = 11) -> list[Request]:
    """Ragged prompts with a common beginning, three samples of each."""
    return [
        Request(
            prompt=(*range(9), *((5 * i // 3 + j) % 61 for j in range(1 + i // 3 % 4))),
            sampling=Sampling(max_new_tokens=1 + 7 * i % 11, **kinds[i % len(kinds)]),
            task=str(i // 3),
            sample=i % 3,
        )
        for i in range(n)
    ]


def build_native_engine(model: Any, **config: Any) -> NativeEngine:
    return NativeEngine(
        model,
        decode=lambda tokens: " ".join(map(str, tokens)),
        stop_tokens=[3],
        config=NativeConfig(rows=5, **config),
        context=1024,
    )


def answers(engine: NativeEngine, requests: list[Request]) -> dict[int, Any]:
    for request in requests:
        engine.submit(request)
    done: dict[int, Any] = {}
    while engine.busy:
        done.update(engine.poll())
    return done


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize(
    "kinds", [MIXED, [{}], [{"top_k": 5, "top_p": 0.7}]], ids=["mixed", "plain", "filtered"]
)
@pytest.mark.sample(every=4)
def test_an_engine_on_another_device_gives_the_same_answers(
    gpu, monkeypatch: pytest.MonkeyPatch, family: str, kinds: list[dict[str, Any]], recorded: bool
) -> None:
    monkeypatch.setattr("posttrain.engines.native.runner._can_pack", lambda device, dtype: False)
    model = model_of(family=family)
    plain, remote = (
        build_native_engine(copy.deepcopy(model)),
        build_native_engine(there(model), cuda_graphs=recorded),
    )
    assert (remote.runner._recorded is not None) is recorded
    wanted, got = answers(plain, requests_of(kinds)), answers(remote, requests_of(kinds))
    assert [a.tokens for a in got.values()] == [a.tokens for a in wanted.values()]
    for one, other in zip(got.values(), wanted.values(), strict=True):
        assert one.logp_gen == pytest.approx(other.logp_gen, abs=1e-5)
        assert one.logp_policy == pytest.approx(other.logp_policy, abs=1e-5)
    assert remote.score(list(range(9))) == pytest.approx(plain.score(list(range(9))), abs=1e-5)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(
    "kinds", [[{}], [{"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 5, "min_p": 0.1}]]
)
@pytest.mark.sample("kinds0-True", "kinds1-False")
def test_a_decoding_step_waits_for_the_device_once(gpu, kinds: list[dict[str, Any]], recorded: bool) -> None:
    engine = build_native_engine(there(model_of()), cuda_graphs=recorded)
    engine.stop_tokens = frozenset()
    for request in requests_of(kinds, 5):
        sampling = replace(request.sampling, max_new_tokens=20 + request.sampling.max_new_tokens)
        engine.submit(replace(request, sampling=sampling))
    gpu.waits.clear()
    engine.poll()
    assert gpu.waits == ["fetched"] * 2  # the tokens after the prompts, and those after them
    for _ in range(25):
        gpu.waits.clear()
        engine.poll()
        assert gpu.waits == ["fetched"]


def test_weights_are_handed_over_on_a_gpu_and_from_one_device_to_another(gpu) -> None:
    learners = {"here": build_learner(GRPO, copy.deepcopy, {}), "there": build_learner(GRPO, there, {})}
    engines = {
        "here": build_native_engine(model_of(1)),
        "there": build_native_engine(there(model_of(1)), cuda_graphs=False),
    }
    digests = set()
    for learner in learners.values():
        for engine in engines.values():
            snapshot = Publisher(learner, list(range(12))).snapshot(1)
            load_snapshot(engine, snapshot)
            digests.add(snapshot.place.digest)
    assert digests == {digest(model_of().named_parameters())}


def test_a_checkpoint_takes_no_second_model_of_a_gpu(gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters of bfloat16 weights are made one at a time, and lie on the processor afterwards."""
    learner = build_learner(GRPO, there, {"dtype": torch.bfloat16})
    learner.update(batch_of())
    alive: list[weakref.ref[Any]] = []
    most = 0
    numbers_of = Master.numbers

    def counted(master: Master) -> torch.Tensor:
        nonlocal most
        x = numbers_of(master)
        assert isinstance(x, Remote)
        alive.append(weakref.ref(x))
        most = max(most, sum(r() is not None for r in alive))
        return x

    monkeypatch.setattr(Master, "numbers", counted)
    files, model = _gather_shards(learner, head=False)
    assert len(alive) == len(files["trained"]) > 10
    assert most <= 2
    assert all(is_here(x) for tensors in (files["trained"], model) for x in tensors.values())
    masters = {m.name: numbers(numbers_of(m)) for m in learner.masters.masters}
    assert all(files["trained"][name].equal(x) for name, x in masters.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("n", [0, 1, 5, 4096, 70_001])
def test_a_fingerprint_is_the_same_on_every_device(
    gpu, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, n: int
) -> None:
    monkeypatch.setattr("posttrain.models.fingerprint._ROWS", 3)
    x = torch.randn(n, generator=torch.manual_seed(n)).to(dtype)
    assert digest([("x", Remote(x))]) == digest([("x", x)])
    assert finite(Remote(x))


RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {"method": {"name": "grpo", "kl_in_loss": 0.05}, "model": {"dtype": "bfloat16"}},
    "ppo": {"method": {"name": "ppo"}},
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.sample("grpo")
def test_a_run_on_another_device_trains_and_resumes_alike(
    gpu, monkeypatch: pytest.MonkeyPatch, online, shallow, write, run_cli, tmp_path, name: str
) -> None:
    """From the recipe to the last checkpoint: the same metrics, and the same weights bit for bit."""
    monkeypatch.setattr("posttrain.plan.model_info.usable_device", lambda device, _: torch.device(device))
    monkeypatch.setattr("posttrain.plan.plan.free_memory", lambda device: 1 << 34)
    monkeypatch.setattr("posttrain.engines.native.runner._can_pack", lambda device, dtype: False)
    found: dict[str, list[Any]] = {}
    for device in ("cpu", "cuda"):
        model = {"path": str(shallow), "device": device} | RECIPES[name].get("model", {})
        engine = {"cuda_graphs": False, "decode_kernel": False}
        over = {"model": model, "run": {"updates": 2}, "engine": engine}
        recipe = write(online, RECIPES[name] | over, name=device)
        run = tmp_path / f"run-{device}"
        last = run / "checkpoints" / "step_000002"
        for options in ([], ["--resume"]) if device == "cuda" else ([],):
            said = run_cli("train", recipe, "--run-dir", run, "--quiet", *options)
            assert said.code == 0, said.err
            kept = {f.relative_to(last): load_file(f) for f in sorted(last.rglob("*.safetensors"))}
            found.setdefault(device, []).append((repeatable(run / "metrics.jsonl"), kept))
            shutil.rmtree(last)
    assert len(found["cpu"][0][0]) >= 2
    for metrics, kept in found["cuda"]:
        assert metrics == found["cpu"][0][0]
        for file, tensors in found["cpu"][0][1].items():
            assert tensors.keys() == kept[file].keys()
            assert all(tensor.equal(kept[file][n]) for n, tensor in tensors.items())


def test_tensors_of_two_devices_do_not_meet_unseen(gpu) -> None:
    """The double itself: what a real GPU refuses or waits for is refused and counted here."""
    x = torch.ones(3, device="cuda")
    assert (x.device, (x + 1).device, x.cpu().device) == (THERE, THERE, HERE)
    for wrong in (
        lambda: x + torch.ones(3),
        lambda: torch.cat([x, torch.ones(3)]),
        lambda: torch.ones(3)[x > 0],
    ):
        with pytest.raises(RuntimeError, match="device"):
            wrong()
    assert (x + torch.tensor(1.0)).cpu().tolist() == [2, 2, 2]
    gpu.waits.clear()
    y = torch.ones(3).pin_memory().to("cuda", non_blocking=True)
    assert y.device == THERE
    assert not gpu.waits
    for wait in (
        lambda: x.sum().item(),
        lambda: x.tolist(),
        lambda: torch.ones(3).to("cuda"),
        lambda: x[x > 0],
    ):
        gpu.waits.clear()
        wait()
        assert len(gpu.waits) == 1


# ---------------------------------------------------------------------- on a GPU, where there is one

real = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@real
@pytest.mark.parametrize("run", RUNS)
def test_an_update_on_a_real_gpu_is_a_processors_to_rounding(run: str) -> None:
    method, given = RUNS[run]
    batch = batch_of(**{k: given[k] for k in ("long", "groups", "K") if k in given})
    rel = 1e-2 if given.get("dtype", torch.float32) == torch.float32 else 0.2
    wanted, got = (build_learner(method, place, given).update(batch) for place in (copy.deepcopy, there))
    for name in ("loss", "grad_norm"):
        assert got.metrics[name] == pytest.approx(wanted.metrics[name], rel=rel, abs=rel / 10), name
    torch.testing.assert_close(got.logp, wanted.logp, rtol=rel, atol=rel)


THREAD: dict[str, Any] = {
    "method": {"name": "grpo", "correction": "token_truncated"},
    "async": {"place": "thread", "max_lag": 1},
}


@real
@pytest.mark.parametrize("given", [*RECIPES.values(), THREAD], ids=[*RECIPES, "thread"])
def test_a_run_trains_and_resumes_on_a_real_gpu(online, write, run_cli, tmp_path, given: dict) -> None:
    """Each weight sync compares the sampler's log-probabilities, of recorded steps too, with ours."""
    model = {"device": "cuda"} | given.get("model", {})
    recipe, run = write(online, given | {"model": model, "run": {"updates": 2}}), tmp_path / "run"
    for options in ([], ["--resume"]):
        said = run_cli("train", recipe, "--run-dir", run, "--quiet", *options)
        assert said.code == 0, said.err
        shutil.rmtree(run / "checkpoints" / "step_000002")


STAND_INS = {"facts": "exit 1", "alike": "exec sleep 60", "attend": "read turn; echo $turn"}


def test_a_part_of_the_gpu_benchmark_that_fails_ends_no_other(monkeypatch, tmp_path) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    quarter = importlib.import_module("gpu_quarter")

    def start(options: Any, part: Callable[..., None]) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{part.__name__}.log").open("wb") as log:
            command = ["sh", "-c", f"echo ready; {STAND_INS[part.__name__]}"]
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log)

    monkeypatch.setattr(quarter, "start", start)
    monkeypatch.setattr(quarter, "LEAST_S", 0)
    monkeypatch.setitem(quarter.LIMITS_S, quarter.alike, 0.2)
    options = SimpleNamespace(out=tmp_path, budget=60.0, part="")
    quarter.run_parts(options, [quarter.facts, quarter.alike, quarter.attend])
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    statuses = {line["part"]: line["status"] for line in lines}
    assert statuses == {"facts": 1, "alike": "out of time", "attend": 0}
    assert (tmp_path / "attend.log").read_text() == "ready\ngo\n"


# ---------------------------------------------------------------------- who computes where


def test_samplers_elsewhere_take_none_of_the_learners_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.plan.memory.usable_device", lambda name, where: torch.device(name))
    first = torch.device("cuda", 0)
    for devices, count in (
        ((), 4),
        (("cuda:1", "cuda:2"), 0),
        (("cuda:0", "cuda:1"), 2),
        (("cuda", "cpu", "cpu"), 2),
    ):
        ahead = Asynchrony(max_lag=1, place="process", samplers=4, devices=devices)
        assert samplers_on(first, ahead) == count
    assert samplers_on(first, Asynchrony(max_lag=1, place="ray", samplers=4, gpus=1.0)) == 0


def test_a_run_above_a_gpus_memory_is_refused(gpu, monkeypatch, online, write, run_cli, tmp_path) -> None:
    """Whatever is free, the run fits, or is refused and fits with the settings that are named."""
    monkeypatch.setattr("posttrain.plan.model_info.usable_device", lambda device, _: torch.device(device))
    monkeypatch.setattr("posttrain.plan.memory.chunk_bytes", lambda device: 1 << 20)
    monkeypatch.setattr("posttrain.plan.plan.check_rows_fit", lambda *_, **__: None)
    table = {"model": {"device": "cuda"}, "engine": {"rows": 64}, "sampling": {"max_new_tokens": 200}}
    recipe = write(online, table)

    def plan(free: int, *sets: str) -> Plan:
        monkeypatch.setattr("posttrain.plan.plan.free_memory", lambda device: free)
        return plan_run(config.read(recipe, sets).recipe, silent)

    need, named = plan(0).memory.total, set()
    plan(need).check_memory()
    assert [bool(plan(free).smaller) for free in (need, need * 13 // 10)] == [True, False]
    for free in (need - 1, need // 2, 1000):
        planned = plan(free)
        with pytest.raises(UserError) as refused:
            planned.check_memory()
        assert refused.value.key == "steps.microbatch_tokens"
        settings = [x for x in planned.smaller.split(" and ") if x]
        assert all(x in refused.value.fix for x in settings)
        named |= {x.split(" = ")[0] for x in settings}
        if settings and SERVER not in settings:
            plan(free, *settings).check_memory()
        plan(free, "steps.microbatch_tokens=256").check_memory()
    assert "engine.cache_tokens" in named
    for command in (["validate", recipe], ["train", recipe, "--run-dir", tmp_path / "run"]):
        assert run_cli(*command).code == 2
    assert not (tmp_path / "run").exists()


def test_weights_for_samplers_are_counted_once_a_machine(gpu, monkeypatch, ahead, write) -> None:
    """On a GPU they are in the machine's memory, however many ranks it has; on CPUs ranks share them."""
    monkeypatch.setattr("posttrain.plan.model_info.usable_device", lambda device, _: torch.device(device))
    monkeypatch.setattr("posttrain.plan.plan.check_rows_fit", lambda *_, **__: None)
    recipe, shares = write(ahead, {"async": {"place": "process"}}), []
    for ranks in ("1", "4"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        shares.append(plan_run(config.read(recipe).recipe, silent).memory.parts["published weights"])
    assert shares[0] == pytest.approx(4 * shares[1], rel=1e-3)
    monkeypatch.setattr("posttrain.plan.plan.free_memory", lambda device: 1 << 40)
    elsewhere = plan_run(config.read(recipe, ["model.device=cuda"]).recipe, silent)
    assert elsewhere.published == shares[0]
    assert "published weights" not in elsewhere.memory.parts
    little = {"cuda": 1 << 40, "cpu": (shares[0] - 1) // 4}
    monkeypatch.setattr("posttrain.plan.plan.free_memory", lambda device: little[device.type])
    with pytest.raises(UserError, match=r"^async\.place: "):
        plan_run(config.read(recipe, ["model.device=cuda"]).recipe, silent)


SEVEN = Shape(
    parameters=7_615_616_512,
    trained=7_615_616_512,
    layers=28,
    hidden=3584,
    intermediate=18944,
    heads=28,
    key_heads=4,
    head_size=128,
    vocabulary=152_064,
    linear=6_525_288_448,
    largest=18944 * 3584,
)
"""Qwen2.5-7B."""


def test_ranks_that_do_not_fit_are_told_to_shard() -> None:
    needs = {
        "dtype": torch.bfloat16,
        "checkpointing": False,
        "natural": False,
        "perturbed": False,
        "sampler_tokens": 1 << 15,
        "shares": 1,
        "resharded": False,
        "longest": 2048,
    }
    asked = {"free": 79 * GIB, "longest": 2048, "tokens": 256, "device": "cuda"}
    eight = smaller_settings(SEVEN, ranks=8, needs=needs, **asked)
    assert eight == "train.shard = true and train.reshard_after_forward = true"
    assert smaller_settings(SEVEN, ranks=1, needs=needs, **asked) == "lora.rank = 32"
    sharded = {**needs, "shares": 8}
    assert smaller_settings(SEVEN, ranks=8, needs=sharded, **asked) == "train.reshard_after_forward = true"
    small = {**asked, "free": 10 * GIB}
    assert smaller_settings(SEVEN, ranks=1, needs=needs, **small) == ""
    # Of five times the weights no setting makes room for the sampler's copy.
    large = replace(
        SEVEN, parameters=5 * SEVEN.parameters, trained=5 * SEVEN.parameters, layers=5 * SEVEN.layers
    )
    apart = smaller_settings(large, ranks=8, needs={**sharded, "resharded": True, "samplers": 1}, **asked)
    assert apart.split(" and ")[-1] == SERVER
    quarter = 'lora.rank = 32 and model.quantize = "nf4"'
    data = {**needs, "samplers": 0, "sampler_tokens": 0}
    assert smaller_settings(SEVEN, ranks=1, needs=data, **small | {"free": 16 * GIB}) == quarter
    eight_bits = 'optim.name = "adamw_8bit"'
    assert smaller_settings(SEVEN, ranks=1, needs=data, **asked | {"free": 110 * GIB}) == eight_bits
    whole, packed = (
        estimate(replace(SEVEN, moment_bytes=n), dtype=torch.bfloat16, microbatch_tokens=256, device="cuda")
        for n in (0, 2 * SEVEN.trained)
    )
    assert whole.total - packed.total == 6 * SEVEN.trained


def test_packed_weights_take_four_and_a_half_bits() -> None:
    adapter = replace(SEVEN, trained=SEVEN.parameters // 100)
    options = {"dtype": torch.bfloat16, "microbatch_tokens": 256, "sampler_tokens": 1 << 15, "device": "cuda"}
    plain, packed = (estimate(shape, **options).parts for shape in (adapter, replace(adapter, packed=True)))
    assert plain["weights"] - packed["weights"] == pytest.approx((2 - 4.5 / 8) * SEVEN.linear, abs=1)
    changed = {"weights", "one dequantised matrix"}
    assert {name for name in packed if packed[name] != plain.get(name)} == changed


def test_offloaded_shares_take_no_memory_of_the_gpu() -> None:
    """What remains are the gathered weights, a layer's gradient and what a pass needs."""
    options = {"dtype": torch.bfloat16, "microbatch_tokens": 0, "shares": 8, "resharded": True}
    here, away = (estimate(SEVEN, device="cuda", offloaded=o, **options).parts for o in (False, True))
    kept = {"shares of frozen weights", "gathered weights", "gradients", "activations", "one chunk of logits"}
    kept |= {"gradient of the output head"}
    assert {name for name in away if name in here and away[name]} <= kept
    assert away["gradients"] == 4 * SEVEN.layer < here["gradients"]


def test_ranks_gather_the_experts_that_they_hold_alone() -> None:
    """Of 30 billion weights, 28 of them in experts, a rank of eight gathers 5.5; shares are as before."""
    shape = replace(SEVEN, parameters=30_000_000_000, trained=30_000_000_000, experts=28_000_000_000)
    options = {"dtype": torch.bfloat16, "microbatch_tokens": 256, "shares": 8, "device": "cuda"}
    all_of_them, own = (estimate(shape, experts=n, **options).parts for n in (1, 8))
    assert all_of_them["gathered weights"] == 60_000_000_000
    assert own["gathered weights"] == 11_000_000_000
    assert own["gradients"] == 22_000_000_000
    assert {k for k in own if own[k] != all_of_them[k]} == {"gathered weights", "gradients"}
    assert estimate(shape, experts=8, **options | {"shares": 1}) == estimate(shape, **options | {"shares": 1})


def test_experts_are_divided_where_a_run_then_fits() -> None:
    """By as many ranks as divide the experts; no setting is named twice."""
    shape = replace(SEVEN, parameters=30 * 10**9, trained=30 * 10**9, experts=28 * 10**9, expert_count=128)
    given = {"checkpointing": False, "natural": False, "perturbed": False, "dtype": torch.bfloat16}
    reshard = "train.reshard_after_forward = true"
    for ranks, shares, resharded, settings in (
        (8, 8, True, "train.experts = 8"),
        (12, 12, True, "train.experts = 4"),
        (16, 16, False, f"{reshard} and train.experts = 16"),
        (16, 1, False, f"train.shard = true and {reshard} and train.experts = 16"),
    ):
        most = {"shares": ranks, "resharded": True, "experts": math.gcd(ranks, 128)}
        need = estimate(shape, dtype=torch.bfloat16, microbatch_tokens=256, device="cuda", **most).total
        asked = {"free": math.ceil(need / SHARE), "longest": 2048, "tokens": 256, "device": "cuda"}
        needs = {**given, "shares": shares, "resharded": resharded}
        assert smaller_settings(shape, ranks=ranks, needs=needs, **asked) == settings
    model = skeleton(CONFIG_MAPPING["qwen3_moe"](**SIZES, num_experts=6, moe_intermediate_size=8))
    assert Shape.of(model).expert_count == 6
    assert Shape.of(model_of()).expert_count == 0


def test_a_context_repeats_key_heads_and_has_whole_states_of_a_reference() -> None:
    """Four key heads do not divide among seven ranks: each of the 28 query heads then has its own."""
    options = {"dtype": torch.bfloat16, "microbatch_tokens": 1000, "device": "cuda"}
    keys = "gathered keys and values"
    alone, four, seven, compares = (
        estimate(replace(SEVEN, **fields), **options).parts
        for fields in ({}, {"context": 4}, {"context": 7}, {"context": 7, "compared": 3584})
    )
    assert four == alone
    assert seven["activations"] - alone["activations"] == 1000 * 28 * 2 * 2 * (28 - 4) * 128
    assert seven[keys] == 7 * alone[keys]
    assert compares["activations"] - seven["activations"] == 1000 * 7 * 3584 * 2


def test_weights_that_are_made_before_they_are_sharded_are_counted() -> None:
    """Random ones, say, where what a rank holds later is less than all."""
    adapter = replace(SEVEN, trained=SEVEN.parameters // 1000)
    options = {"dtype": torch.bfloat16, "microbatch_tokens": 256, "shares": 64, "device": "cuda"}
    for resharded in (False, True):
        read, made = (
            estimate(adapter, resharded=resharded, read_whole=whole, **options).total
            for whole in (False, True)
        )
        assert read == made if not resharded else read < made == 2 * SEVEN.parameters


def test_a_process_that_is_to_see_one_gpu_sees_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, given, rank, seen, called in (
        ("cuda:2", None, None, "2", "cuda"),
        ("cuda:1", "4,6", None, "6", "cuda"),
        ("cuda", None, "3", "3", "cuda"),
        ("auto", "", None, "", "auto"),
        ("auto", "5", None, "5", "auto"),
        ("cpu", "5", None, "5", "cpu"),
    ):
        for key, value in {"CUDA_VISIBLE_DEVICES": given, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(key, value or "")
            if value is None:
                monkeypatch.delenv(key)
        assert hide_other_gpus(name) == called
        assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
        assert "LOCAL_RANK" not in os.environ


def test_vllm_is_told_of_no_more_memory_than_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for nine tenths of the GPU otherwise, and does not start beside a learner."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30 << 30, 80 << 30))
    assert 0.3 < _share() * 80 / 30 < 1
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 << 30, 80 << 30))
    assert _share() == 0.9


def test_a_share_stays_where_it_is_and_not_where_the_mesh_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With cpu_offload the moments of a resumed run would lie on the GPU, and its masters not."""
    with one_rank() as mesh:
        like = distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)])
        monkeypatch.setattr(
            DTensor, "from_local", lambda *_, **__: pytest.fail("it moves to the mesh's device")
        )
        given = torch.arange(6.0).view(3, 2)
        held = shard_like(given, like)
        assert held.full_tensor().equal(given)
        assert held.to_local().device == like.to_local().device


@contextmanager
def one_rank() -> Iterator[Any]:
    """A mesh of this process alone."""
    with tempfile.NamedTemporaryFile() as file:
        store = torch.distributed.FileStore(file.name, 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield init_device_mesh("cpu", (1,))
        finally:
            torch.distributed.destroy_process_group()
