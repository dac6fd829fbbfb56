"""What a run will need, worked out before it starts: the batch arithmetic and the memory."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain.learner.prompt_group import WHOLE_PROMPT_GROUP
from posttrain.learner.ranks import told_number
from posttrain.math.tokens import chunk_bytes
from posttrain.models.loading import usable_device
from posttrain.models.masks import BLOCK
from posttrain.process.machine import memory_left
from posttrain.recipe.asynchrony import Asynchrony
from posttrain.types import UserError

GIB = 1 << 30

SHARE = 0.8
"""Of the memory that is free, how much a run may plan to use."""

MOST_MICROBATCH = {"cpu": 2048}
"""By kind of device, packed tokens beyond which a larger microbatch gains less than 2 %: what it saves there
is one addition of all gradients to their float32 sums. steps.microbatch_tokens sets another."""
MOST_ELSEWHERE = 1 << 14
"""The same where nothing was measured."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a decoder-only model that its memory follows from."""

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
    """Kinds of layers that differ in how far a token sees."""
    softcap: bool = False
    """Whether scores of attention are capped, which no fused kernel does: the backward pass keeps them."""

    @property
    def layer(self) -> int:
        """Weights that are gathered at once where layers are one by one: of one, and of the embedding."""
        return self.parameters // self.layers + self.vocabulary * self.hidden

    @staticmethod
    def of(config: Any, parameters: int, trained: int) -> "Shape":
        """Read off a transformers configuration."""
        text = config.get_text_config()
        heads = text.num_attention_heads
        return Shape(
            parameters=parameters,
            trained=trained,
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            heads=heads,
            key_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
            vocabulary=text.vocab_size,
            windows=len(set(getattr(text, "layer_types", None) or [""])),
            softcap=getattr(text, "attn_logit_softcapping", None) is not None,
        )


@dataclass(frozen=True)
class Memory:
    """Bytes that a run needs, by what needs them."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        """The sum; the peak when a microbatch is at its largest."""
        return sum(self.parts.values())

    def rows(self) -> dict[str, str]:
        """As lines for a person."""
        return {k: gib(v) for k, v in self.parts.items()} | {"in all": gib(self.total)}


def estimate(
    shape: Shape,
    *,
    dtype: torch.dtype,
    microbatch_tokens: int,
    checkpointing: bool = False,
    sampler_tokens: int = 0,
    samplers: int = 1,
    published: int = 0,
    reference: int = 0,
    reference_follows: bool = False,
    critic: Shape | None = None,
    natural: bool = False,
    longest: int = 0,
    device: str = "cpu",
    shares: int = 1,
    resharded: bool = False,
) -> Memory:
    """The memory of a run on this kind of device, in bytes.

    Weights count in the compute type; summed gradients and AdamW's two moments in float32 for each trained
    weight, and of masters what they have beyond their weights; shares are masters. `reference` is the number
    of weights of a frozen policy that is held. Activations are those that the backward pass of one microbatch
    reads, whose longest row has `longest` tokens. `sampler_tokens` is the number of tokens whose keys and
    values a sampler holds, and `published` that of versions which lie ready for samplers. With `shares` ranks
    hold the weights together, and gather them for a step, or layer by layer if they are `resharded`.
    """
    size = dtype.itemsize
    weights = shape.parameters * size
    trained = shape.trained if shape.trained < shape.parameters else -(-shape.trained // shares)
    parts = {"weights": weights}
    if shares > 1:
        parts = {"shares of frozen weights": size * (shape.parameters - shape.trained) // shares}
        parts["gathered weights"] = min(weights, shape.layer * size) if resharded else weights
    if size < 4 or shares > 1:
        parts["masters beside weights"] = (4 if shares > 1 else 2) * trained
    parts["gradients"] = 4 * (trained if resharded else shape.trained)
    if natural:
        # Gradient, direction, residual, search, image, their products and the weights ahead.
        parts["natural step"] = 32 * shape.trained
    else:
        parts["AdamW moments"] = 8 * trained
    activations = token_bytes(
        shape, size, checkpointing=checkpointing, critic=critic, natural=natural, longest=longest
    )
    parts["activations"] = microbatch_tokens * activations
    parts["one chunk of logits"] = (3 if device == "cpu" else 5) * chunk_bytes(device)
    if sampler_tokens and samplers:
        # A tied output head is kept twice: packed for products, plain for look-ups.
        parts["sampler's weights"] = samplers * (weights + shape.vocabulary * shape.hidden * size)
        cached = 2 * shape.layers * shape.key_heads * shape.head_size * size
        parts["key-value cache"] = samplers * sampler_tokens * cached
    if published:
        parts["published weights"] = published * weights
    if reference:
        parts["reference policy"] = (size + (4 if reference_follows else 0)) * reference // shares
    if critic:
        # A model of its own, trained whole: weights, masters where they differ, gradients and moments.
        parts["critic"] = (18 if size < 4 and shares > 1 else 16) * critic.parameters // shares
    return Memory(parts)


HELD_BYTES = 120
"""That one token of an episode or a row takes before it is in a batch: six lists of Python's numbers."""


def check_held(count: int, tokens: int, free: int, *, where: str) -> None:
    """UserError if this many episodes or rows of so many tokens each cannot be held beside one another."""
    if count * tokens * HELD_BYTES > free:
        size = f"{gib(count * tokens * HELD_BYTES)} beside the model, and {gib(free)} are free"
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
    """Bytes that one packed token of a microbatch costs, in the policy and in a critic of its own.

    A natural step computes with pairs of numbers, and holds about eight rows of logits for each token.
    """

    def of(each: Shape) -> int:
        scores = score_bytes(each, size, checkpointing, longest)
        return activation_bytes(each, size, checkpointing) + mask_bytes(each, size) + scores

    own, judged = of(shape), of(critic) if critic else 0
    return own + judged + (own + 32 * shape.vocabulary if natural else 0)


def activation_bytes(shape: Shape, size: int, checkpointing: bool) -> int:
    """Bytes that the backward pass keeps for one token, as measured on Llama-shaped models.

    A layer keeps what its norms are given and give, 4 vectors of the hidden size (in float32 6), the
    rotated queries and the output of attention, keys and values, and 2 of the feed-forward size. For
    SmolLM2-135M in bfloat16 that is 0.41 MB a token. (Where norms are compiled it is two vectors less,
    which is not counted.) With checkpointing a layer keeps its input alone, and one at a time is computed
    again.
    """
    attention = (2 * shape.heads + 2 * shape.key_heads) * shape.head_size
    layer = size * ((6 if size == 4 else 4) * shape.hidden + attention + 2 * shape.intermediate)
    return shape.layers * shape.hidden * size + layer if checkpointing else shape.layers * layer


def mask_bytes(shape: Shape, size: int) -> int:
    """Bytes of attention masks for one token, at most: its row in a family's mask, and its column in a band.

    They are made once a pass, for each kind of layer, in the compute type.
    """
    return shape.windows * size * (WHOLE_PROMPT_GROUP + BLOCK)


def score_bytes(shape: Shape, size: int, checkpointing: bool, longest: int) -> int:
    """Bytes of attention's scores for one token, at most, where they are kept: of a whole row, by each head.

    What tanh and softmax gave, the latter in float32, and that again in the compute type where it is smaller.
    With checkpointing those of one layer at a time.
    """
    if not shape.softcap:
        return 0
    scores = shape.heads * max(longest, WHOLE_PROMPT_GROUP)
    layer = scores * (size + (4 + size if size < 4 else size))
    return layer if checkpointing else shape.layers * layer


def microbatch(shape: Shape, *, free: int, device: str = "cpu", **needs: Any) -> int:
    """The most packed tokens whose activations fit, from 256 to as many as the device is quicker with."""
    fixed, one = (estimate(shape, microbatch_tokens=n, device=device, **needs).total for n in (0, 1))
    most = MOST_MICROBATCH.get(device, MOST_ELSEWHERE)
    return int(max(256, min(most, (SHARE * free - fixed) // (one - fixed))))


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had: on a GPU by its driver and of what PyTorch keeps unused, on a CPU by the
    kernel and the control group.

    What a processor has, the ranks of torchrun on this machine share.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    return int(min(available, memory_left())) // max(1, told_number("LOCAL_WORLD_SIZE"))


def gib(size: float) -> str:
    """Bytes for a person.

    >>> gib(1536 << 20), gib(10 << 20)
    ('1.5 GiB', '10 MiB')
    >>> gib(300_000), gib(0)
    ('0.3 MiB', '0 MiB')
    """
    mib = size / (1 << 20)
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{mib:.1f} MiB" if 0 < mib < 2 else f"{mib:.0f} MiB"


def samplers_on(device: torch.device, ahead: Asynchrony) -> int:
    """How many samplers compute on this device."""
    if ahead.where == "ray" and ahead.gpus:
        return 0
    devices = [usable_device(each, "async.devices") for each in ahead.devices] or [device]
    dealt = (devices[number % len(devices)] for number in range(ahead.samplers))
    return sum(each.type == device.type and (each.index or 0) == (device.index or 0) for each in dealt)
