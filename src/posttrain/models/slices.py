"""Models that are sharded before their weights are read: each rank reads its own rows of every tensor.

`load_model` returns a model with stand-ins for its weights: numbers of the right dtype, shape and device
whose rows share memory. Tests of its architecture (layouts, fused norms) and adapters work on them.
`take_rows` replaces them by parameters without memory, for FSDP2 to shard, and returns what reads them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from posttrain.models import pretrained
from posttrain.models.file_names import FromFiles
from posttrain.models.fingerprint import finite
from posttrain.models.loading import quiet
from posttrain.types import UserError

Rows = Callable[[int, int], torch.Tensor]
"""Reads rows [first, last) of a weight from its model's files, in the model's dtype and finite."""

_ROWS = "rows_in_files"
"""Attribute of a stand-in with its Rows."""
_STEP = 16
"""Numbers between the starts of two rows of a stand-in for a matrix: 32 bytes, as matrix products ask for."""
_PERIOD = (1 << 20) - 3
"""Numbers after which those of a stand-in repeat, which no size of a matrix divides."""
_SIZE = 0.05
"""Deviation of a stand-in's numbers, about that of a trained model's."""


def load_model(
    path: Path, *, dtype: torch.dtype, device: torch.device, scores: bool = False
) -> PreTrainedModel:
    """Return the model of `pretrained.load_model` with unread weights, or with read ones if it must be.

    They are read of a model that stores tied weights twice, and of a reward model without an output head.
    Raises the errors of `pretrained.load_model`; that for NaN or infinite weights when rows are read.
    """
    config = pretrained.load_config(path, scores=scores)
    files = _Files(pretrained.check_weights(path))
    model = _without_weights(path, config, files, dtype=dtype, scores=scores)
    rows = None if model is None else _rows_of(model, path, files)
    if model is None or rows is None:
        return pretrained.load_model(path, dtype=dtype, device=device, scores=scores)
    _fill_buffers(model, files, dtype)
    numbers: dict[torch.dtype, torch.Tensor] = {}
    for parameter, new in _replace(model, lambda p: _stand_in(p, device, numbers)):
        setattr(new, _ROWS, rows[parameter])
    return model.to(device)


def take_rows(net: nn.Module) -> dict[str, Rows]:
    """Replace stand-ins by parameters on the device "meta"; return what reads each, by its name."""
    rows = {name: getattr(p, _ROWS) for name, p in net.named_parameters() if hasattr(p, _ROWS)}
    for _ in _replace(net, lambda p: torch.empty_like(p, device="meta") if hasattr(p, _ROWS) else None):
        pass
    return rows


class _Files(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files, each read when it is accessed, and by rows."""

    def __init__(self, files: list[Path]) -> None:
        # Mapped files would count as memory of the process.
        opened: list[Any] = [safe_open(str(file), framework="pt", backend="pread") for file in files]
        self._file = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file[name].get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._file

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._file[name].get_slice(name).get_shape())

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Return rows [first, last) of a tensor, and read no others."""
        tensor: torch.Tensor = self._file[name].get_slice(name)[first:last]
        return tensor

    def empty(self) -> dict[str, torch.Tensor]:
        """Return tensors of these names, shapes and dtypes on the device "meta"."""
        shapes = {name: self.shape(name) for name in self}
        kinds = {name: self.rows(name, 0, 0) if shape else self[name] for name, shape in shapes.items()}
        return {name: kinds[name].new_empty(shapes[name], device="meta") for name in self}


def _without_weights(
    path: Path, config: PretrainedConfig, files: _Files, *, dtype: torch.dtype, scores: bool
) -> PreTrainedModel | None:
    """Return the model with every tensor on the device "meta"; None if transformers cannot make it so."""
    kind = type(pretrained.skeleton(config))
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            model, info = kind.from_pretrained(
                None,
                config=config,
                state_dict=files.empty(),
                device_map={"": "meta"},
                dtype=dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (RuntimeError, ValueError, KeyError):  # a conversion may read numbers
        return None
    pretrained.check_read(path, info, scores=scores)
    # On "meta" transformers cannot see that two tensors are equal, and so does not tie them.
    pairs = model.all_tied_weights_keys.items()
    untied = any(model.get_parameter(a) is not model.get_parameter(b) for a, b in pairs)
    if info["missing_keys"] or untied:
        return None
    for part in (model.config, *(m for m in model.modules() if isinstance(m, PreTrainedModel))):
        part.name_or_path = str(path)
    model.adjust_generation_fn(
        generation_config=None,
        from_auto_class=True,
        from_pipeline=None,
        pretrained_model_name_or_path=path,
        cache_dir=None,
        force_download=False,
        proxies=None,
        local_files_only=True,
        token=None,
        revision="main",
        subfolder="",
        trust_remote_code=False,
    )
    model.generation_config = pretrained.saveable(model.generation_config)
    return model.eval()


def _rows_of(model: PreTrainedModel, path: Path, files: _Files) -> dict[nn.Parameter, Rows] | None:
    """Return what reads each parameter of the model; None if the files lack one."""
    tensors = FromFiles(model, files)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    rows: dict[nn.Parameter, Rows] = {}
    for parameter, tied in names.items():
        name = next((name for name in tied if name in tensors), "")
        source = tensors.source(name) if name else None
        if not name or (source and files.shape(source) != parameter.shape):
            return None
        rows[parameter] = partial(_read, path, name, tensors, files, source, parameter.dtype)
    return rows


def _read(
    path: Path,
    name: str,
    tensors: FromFiles,
    files: _Files,
    source: str | None,
    dtype: torch.dtype,
    first: int,
    last: int,
) -> torch.Tensor:
    """Return rows of a weight; `source`: the tensor of the files that has them, None if several make it."""
    rows = (files.rows(source, first, last) if source else tensors.rows(name, first, last)).to(dtype)
    if not finite(rows):
        raise UserError(str(path), f"has NaN or infinite weights in {name} as {dtype}")
    return rows


def _fill_buffers(model: PreTrainedModel, files: _Files, dtype: torch.dtype) -> None:
    """Set the model's buffers: stored ones from the files, and others as its class computes them."""
    with quiet(), torch.random.fork_rng(devices=[]), _parameters_on_meta():
        computed = AutoModelForCausalLM.from_config(deepcopy(model.config), dtype=dtype)
    buffers, tensors, stored = dict(computed.named_buffers()), FromFiles(model, files), model.state_dict()
    for name, buffer in list(model.named_buffers()):
        owner, _, key = name.rpartition(".")
        numbers = tensors[name].to(buffer.dtype) if name in stored else buffers[name]
        model.get_submodule(owner)._buffers[key] = numbers


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Return a context in which modules keep their parameters, but no buffers, on the device "meta"."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        on_meta = None if param is None else nn.Parameter(param.to("meta"), param.requires_grad)
        register(self, name, on_meta)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _stand_in(
    parameter: nn.Parameter, device: torch.device, numbers: dict[torch.dtype, torch.Tensor]
) -> torch.Tensor:
    """Return random numbers of the parameter's shape and dtype, in little memory.

    Rows of a matrix overlap; those of a stack do not, as products of stacks refuse that. numbers: what all
    stand-ins of a dtype share.
    """
    shape, dtype, generator = parameter.shape, parameter.dtype, torch.Generator().manual_seed(0)
    if parameter.ndim < 2:  # of norms, near 1
        return torch.rand(shape, generator=generator).add(0.5).to(device, dtype)
    is_matrix = parameter.ndim == 2
    count = (shape[0] - 1) * _STEP + shape[1] if is_matrix else shape.numel()
    if dtype not in numbers or len(numbers[dtype]) < count:
        some = torch.randn(min(count, _PERIOD), generator=generator).mul(_SIZE).to(device, dtype)
        numbers[dtype] = some.repeat(-(-count // len(some)))
    return numbers[dtype].as_strided(shape, (_STEP, 1)) if is_matrix else numbers[dtype][:count].view(shape)


def _replace(
    net: nn.Module, new: Callable[[nn.Parameter], torch.Tensor | None]
) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Replace parameters by what `new` returns, unless None; yield (old, new) of each, tied ones once."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in net.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((module, name))
    for parameter, owners in places.items():
        tensor = new(parameter)
        if tensor is None:
            continue
        replacement = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        for module, name in owners:
            setattr(module, name, replacement)
        yield parameter, replacement
