"""What loading a model takes, whoever loads one: a device that is there, and a library that is quiet."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.utils import logging as transformers_logging

from posttrain.types import UserError


def usable_device(name: str, where: str = "device") -> torch.device:
    """The device of that name, auto being the GPU if there is one.

    Raises UserError, with this key, for another name and for a GPU that cannot be used here.

    >>> usable_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(name)
    except RuntimeError:
        raise UserError(f"unknown device {name!r}", where=where, mend="auto, cpu, cuda or cuda:0") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no GPU that PyTorch can use", where=where, mend="set it to auto")
    return device


@contextmanager
def quiet() -> Iterator[None]:
    """Within it transformers shows no progress bar and says nothing short of an error."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
