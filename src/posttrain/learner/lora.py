"""Low-rank adapters through peft: h = W x + (α/r) B A x, with B = 0 at the start.

The only file that imports peft. The sampler gets the merged weights; a checkpoint holds an
ordinary peft adapter.

Source: LoRA, Hu et al. 2021, arXiv:2106.09685, eq. 3. rsLoRA (α/√r for α/r), Kalajdzievski 2023,
arXiv:2312.03732. DoRA, Liu et al. 2024, arXiv:2402.09353, eq. 5.
"""

import math
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear, LoraLayer
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import load_peft_weights
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from posttrain.base.name_hints import did_you_mean
from posttrain.learner.shards import whole
from posttrain.models.nf4 import NF4Linear, named_weights
from posttrain.models.pretrained import skeleton
from posttrain.models.rounding import dither
from posttrain.types import UserError

ADAPTER = "default"


@dataclass(frozen=True, kw_only=True)
class Lora:
    """A low-rank adapter, with peft's names for its numbers."""

    rank: int = 0
    """r; 0 trains all weights and no adapter."""
    alpha: float = 32.0
    """The update is scaled by alpha / rank (rslora: alpha / √rank)."""
    targets: tuple[str, ...] | Literal["all-linear"] = ()
    """Names of the matrices to adapt (q_proj, v_proj ...); empty or "all-linear": every linear layer but the
    output head."""
    rslora: bool = False
    dora: bool = False
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """Distribution of A: uniform within ±1/√(columns), or a normal with deviation 1/rank. B is 0."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"rank must be 0 (off) or more, not {self.rank}")
        if self.alpha <= 0:
            raise ValueError(f"alpha must be above 0, not {self.alpha}")


@dataclass(frozen=True)
class Factors:
    """The adapter of one matrix.

    >>> f = Factors(a=torch.tensor([[1.0, 0.0]]), b=torch.tensor([[0.0], [2.0]]), scale=0.5)
    >>> f.adapted(torch.eye(2))
    tensor([[1., 0.],
            [1., 1.]])
    """

    a: Float[torch.Tensor, "r n"]
    b: Float[torch.Tensor, "m r"]
    scale: float
    """α/r, or α/√r with rsLoRA."""
    magnitude: Float[torch.Tensor, "m"] | None = None
    """DoRA's length of each row."""

    def adapted(self, weight: Float[torch.Tensor, "m n"]) -> Float[torch.Tensor, "m n"]:
        """W + s B A, with each row scaled to the length m if there is a magnitude m. In float32 at least."""
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        out = wide + (self.b @ self.a * self.scale).to(wide)
        if self.magnitude is not None:
            out = out * (self.magnitude.to(wide) / out.norm(dim=1))[:, None]
        return out

    def singular_values(self) -> Float[torch.Tensor, "r"]:
        """The singular values of s B A, in descending order, in float64.

        With B = Q R and Aᵀ = P S they are those of s R Sᵀ, which is r × r, so B A is never computed.

        >>> Factors(a=torch.tensor([[3.0, 4.0]]), b=torch.tensor([[0.0], [2.0]]), scale=0.5).singular_values()
        tensor([5.], dtype=torch.float64)
        """
        r = torch.linalg.qr(self.b.double()).R
        s = torch.linalg.qr(self.a.double().T).R
        values: torch.Tensor = torch.linalg.svdvals(r @ s.T) * self.scale
        return values


def add_adapter(model: PreTrainedModel, config: Lora, seed: int) -> PeftModel:
    """Return the model with a fresh adapter as its only trainable weights.

    Raises ValueError if a target is not a matrix of the model, and for matrices whose adapter could
    not be merged: the sampler would not have it.
    """
    targets = () if config.targets == "all-linear" else config.targets
    _check_targets(model, targets)
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,  # with dropout the trained policy would differ from the sampled one
        target_modules=list(targets) or "all-linear",
        use_rslora=config.rslora,
        use_dora=config.dora,
        init_lora_weights="gaussian" if config.init == "gaussian" else True,
        task_type="CAUSAL_LM",
    )
    # peft draws A from the global generator, which is seeded here and restored afterwards.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, lora)
    for name, module in base(adapted).named_modules():
        if isinstance(module, LoraLayer) and type(module) is not Linear:
            raise ValueError(f"with these targets peft also adapts {name}, which is a stack of experts")
        if type(module) is Linear and not config.dora:
            module.__class__ = _Adapted
    return adapted


class _Adapted(Linear):  # type: ignore[misc]
    """peft's layer, which adds its update to W x in place, in the layer's own dtype.

    peft makes three more tensors of the output's size for each layer, and a float32 copy of its input that
    the backward pass keeps: half of the memory of a microbatch, measured on SmolLM2-135M.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """W x + s B (A x)."""
        if self.disable_adapters or self.merged:
            plain: torch.Tensor = super().forward(x, *args, **kwargs)
            return plain
        a, b = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
        out: torch.Tensor = self.base_layer(x)
        low = nn.functional.linear(x, a.to(x.dtype)).flatten(0, -2)
        out.view(-1, out.shape[-1]).addmm_(low, b.to(x.dtype).T, alpha=self.scaling[ADAPTER])
        return out


def _check_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    """Raise ValueError for a target that does not exist, and for a matrix whose adapter could not be merged.

    peft adapts the targets that it finds, and is silent about missing targets, transposed weights,
    experts in one tensor, and an output head that is tied to the embedding.
    """
    modules = dict(model.named_modules())
    adapted: dict[str, nn.Module] = {}
    for target in targets:
        matches = {n: m for n, m in modules.items() if n == target or n.endswith(f".{target}")}
        if not matches:
            near = did_you_mean(target, {n.rpartition(".")[2] for n, m in modules.items() if _adaptable(m)})
            raise ValueError(f"the model has no matrix {target!r}" + (f"; {near}" if near else ""))
        adapted |= matches
    if not targets:
        adapted = {n: m for n, m in modules.items() if isinstance(m, nn.Linear | Conv1D)}
        for name, parameter in model.named_parameters():
            convolves = isinstance(modules[name.rpartition(".")[0]], nn.Conv1d)  # of a gated delta net
            if parameter.ndim > 2 and not convolves:
                raise ValueError(f"{name} is not a matrix but a stack of matrices; name the other targets")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    for name, module in adapted.items():
        if not _adaptable(module):
            kind = type(module).__name__
            raise ValueError(f"{name} ({kind}) is not a linear layer in floating point and takes no adapter")
        if targets and module is head and head.weight is embedding.weight:
            raise ValueError(f"{name} is the embedding too, which its adapter would not reach")


def _adaptable(module: nn.Module) -> bool:
    return isinstance(module, NF4Linear) or (
        isinstance(module, nn.Linear) and module.weight.is_floating_point()
    )


def parameters(config: Any, lora: Lora) -> int:
    """Return the number of weights that the adapter adds to a model of this configuration.

    The model is built without memory for its weights.
    """
    with torch.device("meta"):
        adapted = add_adapter(skeleton(config), lora, seed=0)
    return sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def unmerged(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) of the weights that `merged` yields as they are, outside of adapted layers."""
    owners = tuple(f"{name}." for name in _adapted_layers(model))
    for name, parameter in base(model).named_parameters():
        if not name.startswith(owners):
            yield name, parameter


@torch.no_grad()
def merged(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, weight) as without an adapter, with the adapter's update added.

    Without an adapter these are the parameters themselves. Sharded weights are gathered one at a time, so all
    ranks must iterate together.
    """
    for name, weight, layer in _weights(model):
        yield name, weight if layer is None else _into(name, weight, _factors(layer)).to(weight.dtype)


@torch.no_grad()
def frozen(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same weights as `merged`, without the adapter's update."""
    yield from ((name, weight) for name, weight, _ in _weights(model))


def _weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, LoraLayer | None]]:
    """Yield the name of each weight as without an adapter, the weight, and the layer that adapts it."""
    if not isinstance(model, PeftModel):
        yield from ((name, whole(p), None) for name, p in model.named_parameters())
        return
    adapted = _adapted_layers(model)
    for name, parameter in named_weights(model.get_base_model()):
        owner, _, kind = name.rpartition(".base_layer.")
        if owner in adapted:
            yield f"{owner}.{kind}", whole(parameter), adapted[owner] if kind == "weight" else None
        elif name.partition(".lora_")[0] not in adapted:
            yield name, whole(parameter), None


@torch.no_grad()
def adapter_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the factors of each adapted matrix under the names of peft's files; all ranks must iterate."""
    for name, layer in _adapted_layers(model).items():
        for part in ("lora_A", "lora_B"):
            yield f"base_model.model.{name}.{part}.weight", whole(getattr(layer, part)[ADAPTER].weight)


def adapter_config(model: PeftModel) -> str:
    """Return the content of the adapter_config.json that `save_adapter` writes."""
    with tempfile.TemporaryDirectory() as folder:
        model.peft_config[ADAPTER].save_pretrained(folder)
        return (Path(folder) / "adapter_config.json").read_text()


def adapts_head(model: nn.Module) -> bool:
    """Return True if the adapter changes the output head."""
    return any(layer is base(model).get_output_embeddings() for layer in _adapted_layers(model).values())


def _adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Return the layers with an adapter by their names in the model without one."""
    if not isinstance(model, PeftModel):
        return {}
    return {name: m for name, m in model.get_base_model().named_modules() if isinstance(m, LoraLayer)}


def _into(name: str, weight: torch.Tensor, factors: Factors) -> torch.Tensor:
    """Return a weight with the adapter's update, in float32.

    The update is added to dithered float32 numbers behind a bfloat16 weight: added to the weight itself, most
    of a small update would be rounded away (models/rounding.py).
    """
    adapted = factors.adapted(weight)
    return adapted if weight.dtype != torch.bfloat16 else dither(name, weight) + (adapted - weight.float())


def _factors(layer: LoraLayer) -> Factors:
    magnitudes = layer.lora_magnitude_vector
    return Factors(
        a=layer.lora_A[ADAPTER].weight,
        b=layer.lora_B[ADAPTER].weight,
        scale=layer.scaling[ADAPTER],
        magnitude=magnitudes[ADAPTER].weight if ADAPTER in magnitudes else None,
    )


def save_adapter(model: PeftModel, out: Path) -> None:
    """Write the adapter as peft's own files, loadable with PeftModel.from_pretrained."""
    model.save_pretrained(str(out), safe_serialization=True)


def saved_factors(folder: Path, device: torch.device | str = "cpu") -> dict[str, Factors]:
    """Return the factors that save_adapter wrote, by the name of the weight that they change.

    Raises UserError if a factor is missing, and for tensors that are not a factor of a matrix.
    """
    config = LoraConfig.from_pretrained(str(folder))
    tensors = load_peft_weights(str(folder), device=str(device))
    over = math.sqrt(config.r) if config.use_rslora else config.r
    out = {}
    for owner in [k.removesuffix(".lora_A.weight") for k in tensors if k.endswith(".lora_A.weight")]:
        a, b = tensors.pop(f"{owner}.lora_A.weight"), tensors.pop(f"{owner}.lora_B.weight", None)
        if b is None:
            raise UserError(str(folder), f"lacks {owner}.lora_B.weight", "save the adapter again")
        out[f"{owner.removeprefix('base_model.model.')}.weight"] = Factors(
            a=a,
            b=b,
            scale=config.lora_alpha / over,
            magnitude=tensors.pop(f"{owner}.lora_magnitude_vector", None),
        )
    if tensors:
        problem = f"holds {len(tensors)} tensors that are not factors of a matrix, first {min(tensors)}"
        raise UserError(str(folder), problem, "merge it with peft's merge_and_unload()")
    return out


@torch.no_grad()
def with_saved_adapter(model: PreTrainedModel, folder: Path, *, wide: bool = False) -> PreTrainedModel:
    """Return the model with a saved adapter merged into its weights, bit for bit as by `merged`.

    wide: return float32 weights, before rounding to the model's dtype.

    Raises UserError if the adapter is of another model.
    """
    weights, saved = dict(model.named_parameters()), saved_factors(folder, model.device)
    config = LoraConfig.from_pretrained(str(folder))
    linear = (name for name, module in model.named_modules() if _adaptable(module))
    targets = {f"{name}.weight" for name in linear if check_target_module_exists(config, name)}
    if lacking := targets - saved.keys():
        problem = f"this adapter is of another model: it lacks {len(lacking)} matrices, first {min(lacking)}"
        raise UserError(str(folder), problem, "take the model that it was trained on")
    for name, factors in saved.items():
        fits = name in weights and weights[name].shape == (len(factors.b), factors.a.shape[1])
        if not fits:
            raise UserError(
                str(folder),
                f"this adapter is of another model: it changes {name}, which this one lacks or has otherwise",
                "take the model that it was trained on",
            )
        adapted = _into(name, weights[name], factors)
        weights[name].data = adapted if wide else adapted.to(weights[name].dtype)
    return model.float() if wide else model


def base(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model under an adapter, or the model itself."""
    plain: PreTrainedModel = model.get_base_model() if isinstance(model, PeftModel) else model
    return plain


def without_adapter(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the model computes without its adapter; ValueError if it has none."""
    if not isinstance(model, PeftModel):
        raise ValueError("the model has no adapter to leave out")
    context: AbstractContextManager[None] = model.disable_adapter()
    return context
