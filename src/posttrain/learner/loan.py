"""Weights that a sampler in the learner's thread reads where the learner keeps them, in place of a copy.

Two modules, one set of tensors: the learner's model is prepared for packed rows, recomputation and adapters,
the sampler's is not. Steps write weights in place, so addresses that an engine has captured stay valid.
"""

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import nn
from transformers import PreTrainedModel

from posttrain.learner.lora import unmerged


class WeightLoan:
    """A second model for a sampler, with the tensors of the learner's.

    Answers that are pending when the learner moves its weights continue under the present ones: the learner
    then moves on to a copy, and the sampler has these tensors for itself.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """model: the learner's, before it is prepared for training."""
        parameters = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
        self._model = deepcopy(model, parameters)
        self._moving: dict[str, nn.Parameter] = {}
        """The learner's trained parameters among those that are lent."""
        self.tensors: dict[str, torch.Tensor] = {}
        """By name, the weights that both sides have in common; empty before `lend`."""
        self.has_pending: Callable[[], bool] = lambda: False
        """Returns True while the sampler has answers to finish under the present weights."""

    @property
    def moves(self) -> bool:
        """True if the sampler's weights move with the learner's steps, before they are published."""
        return bool(self._moving)

    def lend(self, model: nn.Module) -> PreTrainedModel:
        """Return the sampler's model; model: the learner's, ready for training.

        Weights that an adapter changes, and those in another dtype than the model computes in, are copies.
        """
        lenders, dtype = dict(unmerged(model)), self._model.get_input_embeddings().weight.dtype
        for name, parameter in self._model.named_parameters():
            lender = lenders.get(name)
            if lender is None or lender.dtype != dtype:
                parameter.data = parameter.data.clone()
                continue
            parameter.data = self.tensors[name] = lender.detach()
            if lender.requires_grad:
                self._moving[name] = lender
        return self._model

    def before_step(self) -> None:
        """Leave the present numbers to a sampler that has answers to finish under them."""
        if self._moving and self.has_pending():
            for name, parameter in self._moving.items():
                parameter.data = parameter.detach().clone()
                del self.tensors[name]
            self._moving.clear()
