"""Estimate the memory of a run before it starts, and size its microbatches."""

import os
from bisect import bisect_right
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from posttrain.learner.prompt_group import WHOLE_PROMPT_GROUP
from posttrain.learner.ranks import environment_number
from posttrain.learner.varlen import MOST_KEYS
from posttrain.math.tokens import chunk_bytes
from posttrain.models import nf4
from posttrain.models.attention import RECURRENT, key_heads_of
from posttrain.models.experts import expert_count, experts_weights
from posttrain.models.loading import usable_device
from posttrain.models.masks import BLOCK
from posttrain.process.machine import memory_left
from posttrain.recipe.asynchrony import Asynchrony
from posttrain.types import UserError

GIB = 1 << 30

SHARE = 0.8
"""The share of free memory that a run may plan to use."""

MOST_MICROBATCH = {"cpu": 2048}
"""By kind of device, packed tokens beyond which a larger microbatch gains less than 2 %: it then saves one
addition of all gradients to their float32 sums. steps.microbatch_tokens overrides it."""
MOST_ELSEWHERE = 1 << 14
"""The same for kinds of device that were not measured."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder-only model's sizes, from which its memory follows."""

    parameters: int
    trained: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int
    windows: int = 1
    """Number of kinds of layers that differ in how far a token sees."""
    matrices: int = 0
    """Number of the trained weights that Muon moves."""
    moment_bytes: int = 0
    """Bytes of the moments of trained weights, if AdamW stores them in 8 bits."""
    caching: int = 0
    """Number of layers whose keys and values a sampler caches."""
    states: int = 0
    """Bytes of the states of one row, of all layers that have one (models/recurrent.py)."""
    linear: int = 0
    """Number of weights in linear layers other than the output head."""
    largest: int = 0
    """Number of weights in the largest linear layer other than the output head."""
    experts: int = 0
    """Number of weights in stacks of experts, which ranks may divide among them (learner/experts.py)."""
    expert_count: int = 0
    """Number of experts of a layer in those; the greatest common divisor if layers differ."""
    packed: bool = False
    """True if the learner stores those in 4 bits."""
    keeps_scores: bool = False
    """True if attention has a soft cap or sinks: no fused kernel does, so the backward pass keeps scores."""
    context: int = 1
    """Number of ranks that compute a microbatch together (learner/context.py)."""
    compared: int = 0
    """Numbers of a reference's state at a trained token, if the method compares it with the policy's."""

    @property
    def attended(self) -> int:
        """Number of key heads that the ranks of a context attend with; one for each query head if the ranks
        do not divide them."""
        return self.heads if self.key_heads % self.context else self.key_heads

    @property
    def layer(self) -> int:
        """Weights gathered at once if layers are gathered one by one: a layer and the embedding."""
        return self.parameters // self.layers + self.vocabulary * self.hidden

    def with_experts_of(self, ranks: int) -> "Shape":
        """Return the shape of what each rank gathers if this many divide the experts among them."""
        elsewhere = self.experts - self.experts // ranks
        trained = self.trained - (elsewhere if self.trained == self.parameters else 0)
        return replace(self, parameters=self.parameters - elsewhere, trained=trained)

    @staticmethod
    def of(
        model: Any,
        trained: int | None = None,
        **settings: Any,
    ) -> "Shape":
        """Read the sizes of a model, which may lie on the device "meta".

        trained: number of trained weights, by default of all; settings: fields that a recipe decides.
        """
        text, parameters = model.config.get_text_config(), sum(p.numel() for p in model.parameters())
        sizes = [module.weight.numel() for module in nf4.layers(model).values()]
        key_heads, head_sizes = zip(*map(key_heads_of, text.per_layer_config), strict=True)
        recurrent = list(getattr(text, "layer_types", None) or ()).count(RECURRENT)
        return Shape(
            parameters=parameters,
            trained=parameters if trained is None else trained,
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            heads=text.num_attention_heads,
            key_heads=max(key_heads),
            head_size=max(head_sizes),
            vocabulary=text.vocab_size,
            caching=text.num_hidden_layers - recurrent,
            states=recurrent * _state_bytes(text) if recurrent else 0,
            windows=len(set(getattr(text, "layer_types", None) or [""])),
            keeps_scores=getattr(text, "attn_logit_softcapping", None) is not None
            or any(name.endswith(".sinks") for name, _ in model.named_parameters()),
            linear=sum(sizes),
            largest=max(sizes, default=0),
            experts=experts_weights(model),
            expert_count=expert_count(model),
            **settings,
        )


def _state_bytes(text: Any) -> int:
    """Return the bytes of a row's state in a gated delta net, in float32."""
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    inputs = (2 * keys + values) * text.linear_conv_kernel_dim
    return 4 * int(values * text.linear_key_head_dim + inputs)


@dataclass(frozen=True)
class Memory:
    """Bytes that a run needs, by purpose."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Their sum: the peak, at the largest microbatch."""
        return sum(self.parts.values())

    def rows(self) -> dict[str, str]:
        """Return lines for a person."""
        return {k: gib(v) for k, v in self.parts.items()} | {"in all": gib(self.total)}


def estimate(
    shape: Shape,
    *,
    dtype: torch.dtype,
    microbatch_tokens: int,
    checkpointing: bool = False,
    sampler_tokens: int = 0,
    samplers: int = 1,
    sampler_rows: int = 0,
    published: float = 0,
    reference: int = 0,
    reference_follows: bool = False,
    critic: Shape | None = None,
    natural: bool = False,
    perturbed: bool = False,
    longest: int = 0,
    device: str = "cpu",
    shares: int = 1,
    experts: int = 1,
    resharded: bool = False,
    offloaded: bool = False,
    read_whole: bool = False,
    sleeps: bool = False,
    lends: bool = False,
    copied: int = 0,
) -> Memory:
    """Estimate the memory of a run on this kind of device, in bytes.

    Weights are counted in the compute dtype; summed gradients and AdamW's two moments (Muon's one) in at
    least float32 for each trained weight, unless moments are in 8 bits; masters only beyond their weights,
    unless they are sharded.
    `reference`: weights of a frozen reference policy. Activations are those that the backward pass of one
    microbatch reads; its longest row has `longest` tokens. `sampler_tokens`: tokens in a sampler's KV cache,
    `sampler_rows` its rows. `published`: weight versions that wait for samplers, of which the ranks of a
    machine share one. With `shares`, that many ranks shard the weights, and gather them for each step, or
    layer by layer if they are `resharded`, but of experts only their own if `experts` ranks divide them;
    `offloaded` shares are not on this device. `read_whole`: a rank has all weights before they are sharded.
    `perturbed`: weights move along noise, without gradients. A sampler that `sleeps` has no memory while
    microbatches have theirs. A learner that `lends` its weights leaves the sampler copies of those that
    an adapter changes, and on a CPU of those that it packs. `copied`: bytes of a checkpoint.
    """
    size, wide = dtype.itemsize, max(4, dtype.itemsize)
    weights, here = shape.parameters * size, shape.with_experts_of(experts if shares > 1 else 1)
    trained, matrices, moment_bytes = (
        n if shape.trained < shape.parameters else -(-n // shares)
        for n in (shape.trained, shape.matrices, shape.moment_bytes)
    )
    parts = {"weights": weights}
    if shape.packed:
        parts["weights"] += int(shape.linear * (nf4.BITS / 8 - size))
        # Its values in float32 and indices in int32, then the same in dtype.
        parts["one dequantised matrix"] = (6 + size) * shape.largest
    if shares > 1:
        frozen = 0 if offloaded else shape.parameters - shape.trained
        gathered = min(here.parameters, here.layer) if resharded else here.parameters
        parts = {"shares of frozen weights": size * frozen // shares, "gathered weights": size * gathered}
    if size < 4 or shares > 1:
        parts["masters beside weights"] = (4 if shares > 1 else 2) * trained
    if perturbed:  # it passes a few tokens at a time, the canary
        parts["weights before a perturbation"] = size * trained
        # The noise, the sum and the numbers of one parameter, the embedding.
        parts["noise of one weight matrix"] = 3 * wide * min(trained, shape.vocabulary * shape.hidden)
    else:
        parts["gradients"] = wide * (trained if resharded else here.trained)
        if natural:  # gradient, direction, residual, search, image, their products and the next weights
            parts["natural step"] = 8 * wide * shape.trained
        else:
            parts["AdamW moments"] = moment_bytes or 2 * wide * (trained - matrices)
            parts |= {"Muon momentum": wide * matrices} if matrices else {}
        parts["activations"] = microbatch_tokens * token_bytes(
            shape, size, checkpointing=checkpointing, critic=critic, natural=natural, longest=longest
        )
        if device != "cpu" and size == 2:
            parts["gathered keys and values"] = microbatch_tokens * gathered_bytes(shape)
        if device != "cpu" and size < 4 and shape.trained == shape.parameters:
            # Its sum in float32, and the term of a chunk.
            parts["gradient of the output head"] = (4 + size) * shape.vocabulary * shape.hidden
    parts["one chunk of logits"] = (3 if device == "cpu" else 5) * chunk_bytes(device)
    if sampler_tokens and samplers:
        parts |= _sampler_parts(shape, size, samplers, tokens=sampler_tokens, rows=sampler_rows)
        if lends and shares == 1 and not shape.packed:
            parts["sampler's weights"] = size * _copied_weights(shape, device)
        if sleeps:
            _put_to_sleep(parts)
    host = {"published weights": int(published * weights), "copy of a checkpoint": copied}
    parts |= {name: count for name, count in host.items() if count}
    if reference:
        parts["reference policy"] = (size + (4 if reference_follows else 0)) * reference // shares
    if critic:
        parts["critic"] = _critic_bytes(critic, size, shares)
    if offloaded and shape.trained == shape.parameters:  # an adapter is not sharded
        if resharded:
            parts["gradients"] = wide * min(here.trained, here.layer)
        for name in ("masters beside weights", "AdamW moments", "Muon momentum", "critic"):
            parts.pop(name, None)
    if shares > 1 and read_whole and (more := weights - sum(parts.values())) > 0:
        parts["weights before they are sharded"] = more
    if shape.packed and device == "cpu":  # there the weights are read before they are packed
        parts["weights before they are packed"] = max(0, weights - sum(parts.values()))
    return Memory(parts)


_SAMPLER = ("sampler's weights", "key-value cache", "states of rows")
_MICROBATCH = ("activations", "gradient of the output head", "one chunk of logits")


def _put_to_sleep(parts: dict[str, int]) -> None:
    """Replace the parts of a sampler by what they exceed those of a microbatch, which has their memory."""
    sampler = sum(parts.pop(name, 0) for name in _SAMPLER)
    microbatch = sum(parts.get(name, 0) for name in _MICROBATCH)
    parts["sampler, beyond a microbatch's memory"] = max(0, sampler - microbatch)


def _sampler_parts(shape: Shape, size: int, samplers: int, *, tokens: int, rows: int) -> dict[str, int]:
    """Return the bytes of samplers on a device, whose weights and caches have numbers of `size` bytes."""
    # A tied output head is stored twice: packed for products, plain for look-ups.
    parts = {"sampler's weights": samplers * size * (shape.parameters + shape.vocabulary * shape.hidden)}
    cached = 2 * (shape.caching or shape.layers) * shape.key_heads * shape.head_size * size
    parts["key-value cache"] = samplers * tokens * cached
    if shape.states:  # of each row, and of the prompt that it begins with
        parts["states of rows"] = 2 * samplers * rows * shape.states
    return parts


def _copied_weights(shape: Shape, device: str) -> int:
    """Return how many weights a sampler copies that reads the learner's: adapted, or packed on a CPU."""
    if device == "cpu":
        return shape.linear + shape.vocabulary * shape.hidden
    return shape.linear if shape.trained < shape.parameters else 0


def _critic_bytes(critic: Shape, size: int, shares: int) -> int:
    """Return a rank's bytes of a critic: weights, masters if they differ, gradients and moments."""
    moments_size = critic.moment_bytes or 8 * critic.parameters - 4 * critic.matrices
    return ((10 if size < 4 and shares > 1 else 8) * critic.parameters + moments_size) // shares


ROW_TOKEN_BYTES = 120
"""Bytes of one token of an episode or row outside a batch: six lists of Python numbers."""


def check_rows_fit(count: int, tokens: int, free: int, *, where: str, more: int = 0) -> None:
    """Raise UserError if `count` episodes or rows of `tokens` tokens each do not fit into `free` bytes.

    more: bytes of a token besides.
    """
    if (needed := count * tokens * (ROW_TOKEN_BYTES + more)) > free:
        size = f"{gib(needed)} next to the model, and {gib(free)} are free"
        problem = f"{count:,} of up to {tokens:,} tokens each take {size}"
        raise UserError(where, problem, "lower it")


def token_bytes(
    shape: Shape,
    size: int,
    *,
    checkpointing: bool,
    critic: Shape | None,
    natural: bool,
    longest: int = 0,
) -> int:
    """Return the bytes of one packed token of a microbatch, in the policy and in a critic of its own.

    A natural step computes with pairs of numbers, and keeps about eight rows of logits per token.
    """

    def bytes_of(model: Shape) -> int:
        scores = score_bytes(model, size, checkpointing, longest)
        return activation_bytes(model, size, checkpointing) + mask_bytes(model, size) + scores

    policy = bytes_of(shape) + shape.context * shape.compared * size  # states are whole on each rank
    natural_step = policy + 32 * shape.vocabulary if natural else 0
    return policy + natural_step + (bytes_of(critic) if critic else 0)


def activation_bytes(shape: Shape, size: int, checkpointing: bool) -> int:
    """Return the bytes that the backward pass keeps for one token, as measured on Llama-shaped models.

    A layer keeps the inputs and outputs of its norms, 4 vectors of the hidden size (6 in float32), the
    rotated queries and the output of attention, keys and values, and 2 vectors of the feed-forward size. For
    SmolLM2-135M in bfloat16 that is 0.41 MB a token. (Compiled norms keep two vectors less, which is not
    counted.) With checkpointing a layer keeps its input alone, and one layer at a time is recomputed.
    """
    attention = (2 * shape.heads + 2 * shape.attended) * shape.head_size
    layer = size * ((6 if size == 4 else 4) * shape.hidden + attention + 2 * shape.intermediate)
    return shape.layers * shape.hidden * size + layer if checkpointing else shape.layers * layer


def mask_bytes(shape: Shape, size: int) -> int:
    """Return the most bytes of attention masks per token: a row in a family's mask, a column in a band.

    Masks are made once a pass, for each kind of layer, in the compute dtype.
    """
    return shape.windows * size * (WHOLE_PROMPT_GROUP + BLOCK)


def gathered_bytes(shape: Shape) -> int:
    """Return the most bytes for one token of a layer's gathered keys and values (learner/varlen.py).

    Both and their gradients in 16 bits, and one of the gradients in float32.
    """
    return MOST_KEYS * shape.attended * shape.head_size * (4 * 2 + 4)


def score_bytes(shape: Shape, size: int, checkpointing: bool, longest: int) -> int:
    """Return the most bytes of attention scores per token if they are kept: a whole row for each head.

    The outputs of tanh and softmax are kept, the latter in float32, and again in the compute dtype if that is
    smaller; with checkpointing for one layer at a time.
    """
    if not shape.keeps_scores:
        return 0
    scores = shape.heads * max(longest, WHOLE_PROMPT_GROUP)
    layer = scores * (size + (4 + size if size < 4 else size))
    return layer if checkpointing else shape.layers * layer


def microbatch(shape: Shape, *, free: int, device: str = "cpu", **needs: Any) -> int:
    """Return the most packed tokens whose activations fit, from 256 to the limit of the device.

    256 for perturbed weights, of which no activations are kept.
    """
    if needs.get("perturbed"):
        return 256
    if needs.get("sleeps"):
        needs["samplers"] = 0

    def total(tokens: int) -> int:
        return estimate(shape, microbatch_tokens=tokens, device=device, **needs).total

    sizes = range(257, MOST_MICROBATCH.get(device, MOST_ELSEWHERE) + 1)
    return 256 + bisect_right(sizes, SHARE * free, key=total)


def free_memory(device: torch.device) -> int:
    """Return the bytes that are still available on a device.

    On a GPU: what the driver reports, and what PyTorch has reserved and does not use. On a CPU: what the
    kernel and the control group leave, divided among the ranks of torchrun on this machine; half of all
    memory on systems that do not report what is free (macOS).
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    reports_free = "SC_AVPHYS_PAGES" in os.sysconf_names
    pages = os.sysconf("SC_AVPHYS_PAGES") if reports_free else os.sysconf("SC_PHYS_PAGES") // 2
    available = pages * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    return int(min(available, memory_left())) // local_ranks()


def local_ranks() -> int:
    """Return how many ranks torchrun or Ray has started on this machine, this one included."""
    return max(1, environment_number("LOCAL_WORLD_SIZE"))


def check_host(published: int, offloaded: int, free: int, *, copied: int = 0) -> None:
    """Raise UserError if a machine's memory cannot hold what its ranks keep there next to their GPUs.

    published: bytes of the versions that wait for samplers; offloaded: of shares with their moments; copied:
    of a checkpoint that is written while training continues; free: of the machine.
    """
    if published + offloaded + copied > free:
        parts = {
            "async.place": ("weights for samplers take", published),
            "train.cpu_offload": ("offloaded shares take", offloaded),
            "checkpoint.async_save": ("the copy of a checkpoint takes", copied),
        }
        sizes = " and ".join(f"{name} {gib(size)}" for name, size in parts.values() if size)
        fix = "add memory, take a smaller model, or leave it out"
        key = max(parts, key=lambda name: parts[name][1])
        raise UserError(key, f"{sizes} of this machine's memory, and {gib(free)} are free", fix)


def gib(size: float) -> str:
    """Format bytes for a person.

    >>> gib(1536 << 20), gib(10 << 20)
    ('1.5 GiB', '10 MiB')
    >>> gib(300_000), gib(0)
    ('0.3 MiB', '0 MiB')
    """
    mib = size / (1 << 20)
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{mib:.1f} MiB" if 0 < mib < 2 else f"{mib:.0f} MiB"


def samplers_on(device: torch.device, ahead: Asynchrony) -> int:
    """Return how many samplers compute on this device."""
    if ahead.where == "ray" and ahead.gpus:
        return 0
    devices = [usable_device(name, "async.devices") for name in ahead.devices] or [device]
    used = (devices[number % len(devices)] for number in range(ahead.samplers))
    return sum(d.type == device.type and (d.index or 0) == (device.index or 0) for d in used)
