"""A pass of a Llama-like model over new tokens on a CPU, all of its layers in one call.

A step of few rows is hundreds of small operations, each called from Python; of a pass over prompts a third of
the time is spent between the matrix products. Where the layers are those of Llama, Mistral, Qwen 2 or Qwen 3
(RMSNorm, rotary attention with shared key heads, an MLP gated by SiLU), decode.cpp computes them one after
another in one parallel region. The name of a model does not decide this: each layer is compared with
transformers' code on an example, and if one differs, transformers runs the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import nn
from transformers import PreTrainedModel

from posttrain.engines.native.cache import Cache, PromptLayout, TokenLayout
from posttrain.engines.native.decode_kernel import Kernels, Layer, Norm, load
from posttrain.models.attention import Heads, context_of, hidden_states, is_fusible

TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
"""Largest relative difference from what transformers' layer adds. Sums in another order differ by a few
roundings, in bfloat16 by half a percent together; another function differs by tens of percents."""
PRODUCTS = ("query", "key", "value", "output", "gate", "up", "down")
Asked = tuple[float, int | None, bool]
"""Of an attention call: the scale, the window, and whether it is fusible (attention.is_fusible)."""
ROWS, COLUMNS = 3, 48
"""Size of the example in the cache."""


class CompiledStep:
    """The layers of a model that decode.cpp computes."""

    def __init__(self, decoder: Any, kernels: Kernels, layers: Sequence[Layer], size: int) -> None:
        self.decoder, self.kernels = decoder, kernels
        self.layers = (Layer * len(layers))(*layers)
        self.heads = layers[0].key.rows // size, size
        """Number of key heads, and their size."""

    def __call__(
        self,
        tokens: Int[torch.Tensor, "B"],
        lengths: Int[torch.Tensor, "B"],
        cache: Cache,
        owners: Int[torch.Tensor, "B 2"] | None = None,
        places: Int[torch.Tensor, "N"] | None = None,
    ) -> Float[torch.Tensor, "N D"]:
        """Normed hidden states of new tokens, whose keys and values are written to the cache.

        owners: rows that they are written to (see Kernels.layers); places: tokens to return; None: all.
        """
        hidden = self.decoder.embed_tokens(tokens)
        for number, layer in enumerate(self.layers):
            layer.keys, layer.values = cache.keys[number].data_ptr(), cache.values[number].data_ptr()
        rotation = _rotation(self.decoder, hidden, lengths)
        shape = cache.keys[0].shape
        self.kernels.layers(self.layers, hidden, rotation, lengths, shape, owners)
        normed: torch.Tensor = self.decoder.norm(hidden if places is None else hidden[places])
        return normed

    def read(
        self, layout: PromptLayout, places: Int[torch.Tensor, "N"] | None = None
    ) -> Float[torch.Tensor, "N D"]:
        """Normed hidden states of prompts' tokens; their keys and values go where the layout puts them."""
        rows, owners = layout.rows(len(self.layers), self.decoder.embed_tokens.weight, *self.heads)
        tokens, positions = layout.inputs(owners.device)
        return self(tokens, positions, rows, owners, places)


@torch.no_grad()
def compiled_step(model: PreTrainedModel) -> CompiledStep | None:
    """Return the step of this model, whose linear layers are packed; None if transformers must run it."""
    try:
        return _checked_step(model)
    except (AttributeError, TypeError, ValueError, RuntimeError):  # another architecture
        return None


def _checked_step(model: PreTrainedModel) -> CompiledStep | None:
    decoder: Any = model.get_decoder()
    layers = [_layer(module) for module in decoder.layers]
    flow = _flow(model, decoder)
    if flow is None or len(flow.attentions) != len(layers):
        return None
    sizes = {(layer.query.rows, layer.query.columns, layer.key.rows, layer.gate.rows) for layer in layers}
    if len(sizes) > 1:  # buffers have the sizes of the first layer
        return None
    for module, layer, (scale, window, fusible) in zip(decoder.layers, layers, flow.attentions, strict=True):
        layer.scale, layer.window = scale, window or 0
        if not fusible or not _agrees(module, layer, flow):
            return None
    return CompiledStep(decoder, flow.kernels, layers, flow.rotation[0].shape[1])


class _Example(TokenLayout):
    """Rows of an example with random keys and values, which record the arguments of every attention call."""

    def __init__(self) -> None:
        super().__init__(Cache(ROWS, ROWS * COLUMNS), torch.tensor([1, COLUMNS // 2, COLUMNS - 1]), COLUMNS)
        self.attentions: list[Asked] = []
        self.before: tuple[torch.Tensor, ...] = ()
        """Keys and values before the latest attention."""

    def attend(self, query: Heads, key: Heads, value: Heads, **arguments: Any) -> Heads:
        g = torch.Generator().manual_seed(1)
        noise = (torch.randn(ROWS, *x.shape[1:2], COLUMNS, x.shape[3], generator=g) for x in (key, value))
        self.before = tuple(x.to(key.dtype) for x in noise)
        number, self.queries = len(self.attentions), query.shape[1]
        self.cache.keys[number], self.cache.values[number] = (x.clone() for x in self.before)
        fusible = is_fusible(arguments["softcap"], arguments["sinks"])
        self.attentions.append((arguments["scale"], arguments["window"], fusible))
        return super().attend(query, key, value, **arguments)


@dataclass(frozen=True)
class _Flow:
    """The way of the example through the model: its kernels, and the arguments of every attention."""

    kernels: Kernels
    attentions: list[Asked]
    positions: torch.Tensor
    rotation: tuple[torch.Tensor, torch.Tensor]


def _flow(model: PreTrainedModel, decoder: Any) -> _Flow | None:
    """Run the example. Return None if anything happens between embedding, layers and last norm."""
    layout, through = _Example(), []
    # Distant positions: a dependence on the position must show, as of scales that grow with it.
    positions = torch.tensor([1, context_of(model.config) // 2, context_of(model.config) - 1])
    hooks = [
        layer.register_forward_hook(lambda _, args, output: through.append((args[0], output)))
        for layer in decoder.layers
    ]
    try:
        final = hidden_states(model, torch.arange(ROWS)[:, None], positions[:, None], layout)
    finally:
        for hook in hooks:
            hook.remove()
    outputs = [decoder.embed_tokens(torch.arange(ROWS)[:, None]), *(output for _, output in through)]
    inputs = [*(entry for entry, _ in through), final]
    outputs[-1] = decoder.norm(outputs[-1])
    if len(outputs) != len(inputs) or not all(map(torch.equal, outputs, inputs)):
        return None
    rotation = _rotation(decoder, final, positions)
    heads, size = layout.before[0].shape[1::2]
    kernels = load(final.dtype, size, layout.queries // heads) if size % 8 == 0 else None
    if kernels is None or any(part.shape != (ROWS, size) for part in rotation):
        return None
    return _Flow(kernels, layout.attentions, positions, rotation)


def _agrees(module: nn.Module, layer: Layer, flow: _Flow) -> bool:
    """Return True if this layer adds to small hidden states what transformers' does, up to rounding."""
    layout, dtype = _Example(), flow.rotation[0].dtype
    # Small, so that what is added exceeds the rounding of the input.
    noise = torch.randn(ROWS, layer.query.columns, generator=torch.Generator().manual_seed(0))
    before = (0.01 * noise).to(dtype)
    expected = module(
        before[:, None],
        attention_mask=None,
        position_ids=flow.positions[:, None],
        position_embeddings=tuple(part[:, None] for part in flow.rotation),
        use_cache=False,
        layout=layout,
    )[:, 0]
    hidden, (keys, values) = before.clone(), (x.clone() for x in layout.before)
    layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
    flow.kernels.layers((Layer * 1)(layer), hidden, flow.rotation, layout.lengths, keys.shape)
    results = (hidden, keys, values)
    references = (expected, layout.cache.keys[0], layout.cache.values[0])
    return all(
        float((x - y).float().norm()) <= TOLERANCE[dtype] * float((y - base).float().norm())
        for x, y, base in zip(results, references, (before, *layout.before), strict=True)
    )


def _rotation(decoder: Any, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of these positions, [B, D]."""
    cosine, sine = decoder.rotary_emb(like, position_ids=positions[:, None])
    return cosine[:, 0].contiguous(), sine[:, 0].contiguous()


def _layer(module: Any) -> Layer:
    """Return the struct of a layer for decode.cpp. Raise AttributeError if it does not have these parts."""
    attention, mlp = module.self_attn, module.mlp
    return Layer(
        before_attention=_norm(module.input_layernorm),
        query_norm=_norm(getattr(attention, "q_norm", None)),
        key_norm=_norm(getattr(attention, "k_norm", None)),
        before_mlp=_norm(module.post_attention_layernorm),
        **{name: getattr(attention, f"{name[0]}_proj").matrix for name in PRODUCTS[:4]},
        **{name: getattr(mlp, f"{name}_proj").matrix for name in PRODUCTS[4:]},
    )


def _norm(module: Any) -> Norm:
    if module is None:
        return Norm(None, 0.0)
    return Norm(module.weight.data_ptr(), module.variance_epsilon)
