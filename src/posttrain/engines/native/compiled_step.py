"""A pass of a Llama-like model over new tokens on a processor, all of its layers in one call.

A step of few rows is hundreds of small operations, and as many calls from Python; of prompts a third of the
time goes into what is between the products. Where the layers are those of Llama, Mistral, Qwen 2 or Qwen 3
(RMSNorm, rotary attention with shared key heads, an MLP gated by SiLU), decode.cpp computes them one behind
the other in one parallel region. Whether a model's layers are so is not read off its name: each is tried
against transformers' code on an example, and if one says something else, the model is left to transformers.
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
from posttrain.models.attention import Heads, context_of, hidden_states

TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
"""How far what a layer adds may be from what transformers' does, as a share of it. Sums in another order
differ by a few roundings, in bfloat16 half a percent together; another function by tens of percents."""
PRODUCTS = ("query", "key", "value", "output", "gate", "up", "down")
ROWS, COLUMNS = 3, 48
"""Of the example."""


class CompiledStep:
    """The layers of a model that were found to be what decode.cpp computes."""

    def __init__(self, decoder: Any, kernels: Kernels, layers: Sequence[Layer], size: int) -> None:
        self.decoder, self.kernels = decoder, kernels
        self.layers = (Layer * len(layers))(*layers)
        self.heads = layers[0].key.rows // size, size
        """Key heads, and their size."""

    def __call__(
        self,
        tokens: Int[torch.Tensor, "B"],
        lengths: Int[torch.Tensor, "B"],
        cache: Cache,
        owners: Int[torch.Tensor, "B 2"] | None = None,
        wanted: Int[torch.Tensor, "N"] | None = None,
    ) -> Float[torch.Tensor, "N D"]:
        """The normed hidden states of new tokens, whose keys and values are written to the cache.

        owners: the rows that they are written to (see Kernels.layers); wanted: of which tokens; None: of all.
        """
        hidden = self.decoder.embed_tokens(tokens)
        for number, layer in enumerate(self.layers):
            layer.keys, layer.values = cache.keys[number].data_ptr(), cache.values[number].data_ptr()
        rotation = _rotation(self.decoder, hidden, lengths)
        shape = cache.keys[0].shape
        self.kernels.layers(self.layers, hidden, rotation, lengths, shape, owners)
        normed: torch.Tensor = self.decoder.norm(hidden if wanted is None else hidden[wanted])
        return normed

    def read(
        self, layout: PromptLayout, wanted: Int[torch.Tensor, "N"] | None = None
    ) -> Float[torch.Tensor, "N D"]:
        """The same of prompts' tokens; the keys and values go to where the layout says."""
        rows, owners = layout.rows(len(self.layers), self.decoder.embed_tokens.weight, *self.heads)
        tokens, positions = layout.fed(owners.device)
        return self(tokens, positions, rows, owners, wanted)


@torch.no_grad()
def compiled_step(model: PreTrainedModel) -> CompiledStep | None:
    """The step of this model, whose linear layers are packed; None where transformers must do it."""
    try:
        return _tried(model)
    except (AttributeError, TypeError, ValueError, RuntimeError):  # another architecture
        return None


def _tried(model: PreTrainedModel) -> CompiledStep | None:
    decoder: Any = model.get_decoder()
    layers = [_layer(each) for each in decoder.layers]
    flow = _flow(model, decoder)
    if flow is None or len(flow.asked) != len(layers):
        return None
    sizes = {(each.query.rows, each.query.columns, each.key.rows, each.gate.rows) for each in layers}
    if len(sizes) > 1:  # room is made for the first layer's
        return None
    for module, layer, (scale, window, softcap) in zip(decoder.layers, layers, flow.asked, strict=True):
        layer.scale, layer.window = scale, window or 0
        if softcap is not None or not _agrees(module, layer, flow):
            return None
    return CompiledStep(decoder, flow.kernels, layers, flow.rotation[0].shape[1])


class _Example(TokenLayout):
    """An example's rows, whose keys and values are drawn; notes what every attention is asked."""

    def __init__(self) -> None:
        super().__init__(Cache(ROWS, ROWS * COLUMNS), torch.tensor([1, COLUMNS // 2, COLUMNS - 1]), COLUMNS)
        self.asked: list[tuple[float, int | None, float | None]] = []
        self.begun: tuple[torch.Tensor, ...] = ()
        """Keys and values before the latest attention."""

    def attend(self, query: Heads, key: Heads, value: Heads, **asked: Any) -> Heads:
        """Attention (see attention.Layout)."""
        g = torch.Generator().manual_seed(1)
        drawn = (torch.randn(ROWS, *x.shape[1:2], COLUMNS, x.shape[3], generator=g) for x in (key, value))
        self.begun = tuple(x.to(key.dtype) for x in drawn)
        number, self.queries = len(self.asked), query.shape[1]
        self.cache.keys[number], self.cache.values[number] = (x.clone() for x in self.begun)
        self.asked.append((asked["scale"], asked["window"], asked["softcap"]))
        return super().attend(query, key, value, **asked)


@dataclass(frozen=True)
class _Flow:
    """What was found of the example's way through the model."""

    kernels: Kernels
    asked: list[tuple[float, int | None, float | None]]
    positions: torch.Tensor
    rotation: tuple[torch.Tensor, torch.Tensor]


def _flow(model: PreTrainedModel, decoder: Any) -> _Flow | None:
    """None if anything is done between the embedding, the layers and the last norm."""
    layout, through = _Example(), []
    # Far out: what depends on the position must show, as scales that grow with it do.
    positions = torch.tensor([1, context_of(model.config) // 2, context_of(model.config) - 1])
    hooks = [
        each.register_forward_hook(lambda _, given, found: through.append((given[0], found)))
        for each in decoder.layers
    ]
    try:
        final = hidden_states(model, torch.arange(ROWS)[:, None], positions[:, None], layout)
    finally:
        for hook in hooks:
            hook.remove()
    left = [decoder.embed_tokens(torch.arange(ROWS)[:, None]), *(found for _, found in through)]
    entered = [*(given for given, _ in through), final]
    left[-1] = decoder.norm(left[-1])
    if len(left) != len(entered) or not all(map(torch.equal, left, entered)):
        return None
    rotation = _rotation(decoder, final, positions)
    heads, size = layout.begun[0].shape[1::2]
    kernels = load(final.dtype, size, layout.queries // heads) if size % 8 == 0 else None
    if kernels is None or any(part.shape != (ROWS, size) for part in rotation):
        return None
    return _Flow(kernels, layout.asked, positions, rotation)


def _agrees(module: nn.Module, layer: Layer, flow: _Flow) -> bool:
    """Whether this layer adds to small hidden states what transformers' does, to rounding."""
    layout, dtype = _Example(), flow.rotation[0].dtype
    # Small, so that what is added does not drown in the rounding of what was there.
    drawn = torch.randn(ROWS, layer.query.columns, generator=torch.Generator().manual_seed(0))
    before = (0.01 * drawn).to(dtype)
    wanted = module(
        before[:, None],
        attention_mask=None,
        position_ids=flow.positions[:, None],
        position_embeddings=tuple(part[:, None] for part in flow.rotation),
        use_cache=False,
        layout=layout,
    )[:, 0]
    got, (keys, values) = before.clone(), (x.clone() for x in layout.begun)
    layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
    flow.kernels.layers((Layer * 1)(layer), got, flow.rotation, layout.lengths, keys.shape)
    found = (got, keys, values)
    theirs = (wanted, layout.cache.keys[0], layout.cache.values[0])
    return all(
        float((x - y).float().norm()) <= TOLERANCE[dtype] * float((y - base).float().norm())
        for x, y, base in zip(found, theirs, (before, *layout.begun), strict=True)
    )


def _rotation(decoder: Any, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of these positions, [B, D]."""
    cosine, sine = decoder.rotary_emb(like, position_ids=positions[:, None])
    return cosine[:, 0].contiguous(), sine[:, 0].contiguous()


def _layer(module: Any) -> Layer:
    """What decode.cpp is told of a layer; AttributeError for one that has no such parts."""
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
