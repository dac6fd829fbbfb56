"""The model in the engine: a pass over prompts, and a pass over one new token a row."""

from collections.abc import Mapping
from itertools import accumulate
from types import MappingProxyType

import torch
from jaxtyping import Float, Int
from torch import nn
from transformers import PreTrainedModel

from posttrain.engines.native.cache import Cache, Layers, Prompt, PromptLayout, TokenLayout
from posttrain.engines.native.compiled_step import compiled_step
from posttrain.engines.native.cuda_graphs import CapturedStep, CudaGraphs
from posttrain.engines.native.decode_kernel import Kernels, load, packed_matrix
from posttrain.engines.native.draw import CapturedDraws
from posttrain.models.attention import WORTH, common, hidden_states, output_head, use_layouts
from posttrain.models.experts import Routers
from posttrain.models.fingerprint import NamedTensors, checked, combined, fingerprint, location
from posttrain.models.loading import on_device
from posttrain.models.recurrent import layers_with_state

PASS = 8192
"""Prompt tokens that run together: enough to use a GPU fully, while activations stay small."""
SHORT = 256
"""Longest prompt, in tokens, that decode.cpp reads: PyTorch's attention is faster for longer ones."""


class PackedLinear(nn.Module):
    """A linear layer whose weight is stored in the order in which it is multiplied. CPU only.

    For the few rows of a decoding step an ordinary matrix product spends as long on rearranging the weight as
    on the product; here it is rearranged once for each weight sync.
    """

    def __init__(self, linear: nn.Linear, rows: int, kernels: Kernels | None) -> None:
        """rows: number that must be fast; kernels: used if they can multiply this weight, else oneDNN is."""
        super().__init__()
        self.rows, self.bias = rows, linear.bias
        self.kernels = kernels if kernels and kernels.multiplies(linear.weight) else None
        self.weight_packed: torch.Tensor | None = None
        self.pack(linear.weight)

    def pack(self, weight: torch.Tensor) -> None:
        """Replace the weight, [out, in]."""
        if self.kernels:
            self.weight_packed = self.kernels.pack(weight.detach(), self.weight_packed)
            self.matrix = packed_matrix(self.weight_packed, weight, self.bias)
        else:
            self.weight_packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), self.rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kernels:
            return self.kernels.linear(x, self.matrix)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight_packed, self.bias, "none", [], ""
        )
        return out


class ModelRunner:
    """A model, with the cache that its passes read and write."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        rows: int,
        cache_tokens: int,
        recorded: bool = True,
        compiled: bool = True,
        lent: Mapping[str, torch.Tensor] = MappingProxyType({}),
        routes: bool = False,
    ) -> None:
        """recorded: capture decoding steps as CUDA graphs on a GPU; compiled: use decode.cpp on a CPU.

        lent, routes: see NativeEngine.
        """
        use_layouts(model)
        self.model = model.eval().requires_grad_(False)
        self.cache = Cache(rows, cache_tokens)
        self.device = next(model.parameters()).device
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        self._packed: dict[str, list[PackedLinear]] = {}
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._compiled = compiled
        self.kernels = load(self.dtype, 64, 1) if compiled and self.device.type == "cpu" else None
        """Kernels that multiply packed weights and draw tokens, where available."""
        if _can_pack(self.device, self.dtype):
            self._pack(rows)
        self._parameters, self._lent = dict(model.named_parameters()), lent
        self._head = output_head(model)
        self._has_states = bool(layers_with_state(model))
        self.routers = Routers(model, notes=True) if routes else None
        self.compiled_step = compiled_step(model) if compiled and self._packed else None
        """A pass through all layers in one call, where the architecture allows it."""
        self.draws: CapturedDraws | None = None
        """Draws that are recorded too, on a GPU."""
        if recorded and self.device.type == "cuda":
            most = min(self.cache.max_rows, self.cache.tokens)
            self.draws = CapturedDraws(most, self.device, CudaGraphs(self.device))
        self._recorded: CapturedStep | None = None
        # A recording runs a step several times, which would move states on.
        if recorded and self.device.type == "cuda" and not self._has_states:
            self._recorded = CapturedStep(
                self._step, self.cache, self.device, lambda: CudaGraphs(self.device)
            )

    def _pack(self, rows: int) -> None:
        """Replace every linear layer; a weight shared with an embedding stays for look-ups."""
        name_of = {id(p): name for name, p in self.model.named_parameters()}
        for path, module in list(self.model.named_modules()):
            if type(module) is nn.Linear:
                packed = PackedLinear(module, rows, self.kernels)
                owner, _, attribute = path.rpartition(".")
                setattr(self.model.get_submodule(owner), attribute, packed)
                self._packed.setdefault(name_of[id(module.weight)], []).append(packed)

    @torch.no_grad()
    def load(self, weights: NamedTensors) -> str:
        """Copy these weights into the model and return their digest as received, in the model's type.

        Lent weights are not copied, and the digest has the places where the model reads them. Packed copies
        are made again of all. Raise KeyError for an unknown, repeated or missing weight, ValueError for a
        wrong shape or for a lent weight in another place.
        """
        self.forget()
        prints = []
        for name, value in checked(weights, self._shapes, self.dtype, self.device):
            parameter = self._parameters.get(name)
            if name in self._lent:
                place = location(name, self._lent[name] if parameter is None else parameter)
                if place != location(name, value):
                    raise ValueError(f"{name} is not the learner's tensor that this engine reads")
                prints.append(place)
            else:
                if parameter is not None:
                    parameter.copy_(value)
                prints.append(fingerprint(name, value))
            for packed in self._packed.get(name, []):
                packed.pack(value)
        return combined(prints)

    @torch.no_grad()
    def prefill(
        self, prompts: list[Prompt], turns: Mapping[Prompt, str] = MappingProxyType({})
    ) -> Float[torch.Tensor, "P V"]:
        """Logits of the token after each prompt; the prompts' keys and values are then in the cache.

        turns: episodes of prompts that may be later turns, whose earlier turns the cache may hold.
        """
        computed = {
            prompt: (len(tokens), layers)
            for prompt, episode in turns.items()
            for tokens, layers in [self.cache.turns.pop(episode, ((), {}))]
            if 0 < len(tokens) < len(prompt) and prompt[: len(tokens)] == tokens
        }
        logits: dict[Prompt, torch.Tensor] = {}
        for part in [
            *_passes([p for p in prompts if p in computed]),
            *_passes([p for p in prompts if p not in computed]),
        ]:
            prefix = (0, [computed[p] for p in part]) if part[0] in computed else self._shared_prefix(part)
            layout = PromptLayout(self.cache, part, *prefix)
            ends = list(accumulate(map(len, layout.parts)))[-len(part) :]
            hidden = self._read(layout, on_device([end - 1 for end in ends], self.device))
            logits.update(zip(part, self._head(hidden), strict=True))
            self.cache.latest = (part[-1], self.cache.unshare(part[-1]))
        return torch.stack([logits[p] for p in prompts])

    def forget(self) -> None:
        """Make the next prompts share nothing with earlier ones."""
        self.cache.latest = ((), {})

    def _shared_prefix(self, prompts: list[Prompt]) -> tuple[int, list[tuple[int, Layers]] | None]:
        """Return the length of a prefix to run once for all, or what the latest prompt shares with each."""
        if self._has_states:  # of a prompt's beginning, the state after it is gone
            return 0, None
        latest, layers = self.cache.latest
        # The last token of a prompt always runs: the first answer token is read off it.
        most = min(map(len, prompts)) - 1
        stored, new = min(common([latest, *prompts]), most), min(common(prompts), most)
        saved = max(stored * len(prompts), new * (len(prompts) - 1))
        if not saved or saved * WORTH < sum(map(len, prompts)):
            return 0, None
        return (0, [(stored, layers)] * len(prompts)) if saved == stored * len(prompts) else (new, None)

    def next_logits(self, prompts: list[Prompt]) -> Float[torch.Tensor, "P V"]:
        """Logits of the token after each prompt; the cache stays unchanged."""
        cache, self.cache = self.cache, Cache(0, 0)
        try:
            return self.prefill(prompts)
        finally:
            self.cache = cache

    @torch.no_grad()
    def score(self, tokens: Prompt) -> Float[torch.Tensor, "T V"]:
        """Logits at every position of a prompt; the cache stays unchanged."""
        return self._head(self._read(PromptLayout(Cache(0, 0), [tokens])))

    def _read(
        self, layout: PromptLayout, places: Int[torch.Tensor, "N"] | None = None
    ) -> Float[torch.Tensor, "N D"]:
        """Hidden states of the tokens that are run, or of those at `places`."""
        if self.compiled_step is not None and max(map(len, layout.prompts)) <= SHORT:
            return self.compiled_step.read(layout, places)
        tokens, positions = layout.inputs(self.device)[:, None]
        hidden = hidden_states(self.model, tokens, positions, layout)[0]
        if self.routers:
            layout.keep_routes(self.routers.taken())
        return hidden if places is None else hidden[places]

    @torch.no_grad()
    def decode(self, tokens: list[int], lengths: list[int]) -> Float[torch.Tensor, "B V"]:
        """Logits of the token after each row's newest one, which is written to the cache at its length."""
        if self._recorded is not None:
            return self._recorded(tokens, lengths)
        newest, position = on_device([tokens, lengths], self.device)
        return self._step(newest, position, max(lengths) + 1)

    def _step(
        self, tokens: Int[torch.Tensor, "B"], lengths: Int[torch.Tensor, "B"], columns: int
    ) -> Float[torch.Tensor, "B V"]:
        if self.compiled_step is not None:
            return self._head(self.compiled_step(tokens, lengths, self.cache))
        layout = TokenLayout(self.cache, lengths, columns, compiled=self._compiled)
        hidden = hidden_states(self.model, tokens[:, None], lengths[:, None], layout)[:, 0]
        if self.routers:
            layout.keep_routes(self.routers.taken())
        return self._head(hidden)


def _passes(prompts: list[Prompt]) -> list[list[Prompt]]:
    """Split the prompts into runs of at most PASS tokens, or of one prompt."""
    passes: list[list[Prompt]] = []
    room = 0
    for prompt in prompts:
        if not passes or len(prompt) > room:
            passes.append([])
            room = PASS
        passes[-1].append(prompt)
        room -= len(prompt)
    return passes


def _can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
