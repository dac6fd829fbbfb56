"""Named tensors as safetensors files."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to a safetensors file, each as a copy under its own name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    file.touch()
    mode = file.stat().st_mode
    save_file(plain, str(file), metadata={"format": "pt"})
    file.chmod(mode)  # safetensors lets the owner alone read it


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, read at once."""
    with safe_open(str(file), framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def cast_weights(path: Path, dtype: torch.dtype) -> None:
    """Round the floating-point weights of a model's directory to a dtype, in place, one file at a time.

    config.json then names this dtype, by which transformers loads the weights; a checkpoint's names the dtype
    that the run computed in.
    """
    for file in path.glob("*.safetensors"):
        tensors = read_tensors(file)
        cast = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
        if any(t.dtype != tensors[n].dtype for n, t in cast.items()):
            write_tensors(file, cast)
    config = json.loads((path / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")


class LazyTensors(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files, each read when it is accessed."""

    def __init__(self, *files: Path) -> None:
        opened: list[Any] = [safe_open(str(file), framework="pt") for file in files]
        self._file = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)
