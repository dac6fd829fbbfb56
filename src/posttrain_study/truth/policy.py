"""A Llama of two or three tokens in float64, as the learner runs it and as transformers does."""

import copy

import torch
from jaxtyping import Float
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.models.attention import use_layouts


class Policy:
    """A tiny Llama twice: as the learner runs it (`model`), and as transformers does (`plain`)."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.plain = model
        self.model = copy.deepcopy(model)
        use_layouts(self.model)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of the model from which the exact values are computed."""
        return list(self.plain.parameters())

    def gradient(self, value: torch.Tensor, *, keep: bool = False) -> Float[torch.Tensor, "P"]:
        """Gradient of a number made from the plain model's probabilities, over all its parameters."""
        gradients = torch.autograd.grad(value, self.parameters, retain_graph=keep)
        return torch.cat([g.flatten() for g in gradients])

    def shifted(self, direction: Float[torch.Tensor, "P"]) -> "Policy":
        """Return the policy with `direction` added to its parameters."""
        model = copy.deepcopy(self.plain)
        nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(self.parameters).detach() + direction, model.parameters()
        )
        return Policy(model)


def tiny(seed: int, *, vocabulary: int = 3, width: int = 8, layers: int = 2) -> Policy:
    """Build a random Llama in float64 throughout."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 3 // 2,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).double().eval()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "LlamaRMSNorm":  # it rounds to float32
                plain = nn.RMSNorm(width, eps=child.variance_epsilon, dtype=torch.float64)
                plain.weight.data.copy_(1 + 0.3 * torch.randn(width))
                setattr(module, name, plain)
    return Policy(model)
