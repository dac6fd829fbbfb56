"""Models from scratch: a byte-level BPE tokenizer trained on text, and a small Llama with random weights.

The tokenizer's alphabet is the 256 bytes, so every text can be encoded and decoded. Its merges are
the most frequent neighbours within words of the text; with split digits a number is one token a
digit, which makes sums learnable.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from posttrain.models.loading import quiet
from posttrain.models.pretrained import save_pretrained

END, OPEN, CLOSE, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL = (END, OPEN, CLOSE, PAD)
"""Tokens 0 to 3: the end of a text, start and end of a turn, and padding, which posttrain does not use."""
BYTES = 256
LEAST = BYTES + len(SPECIAL)
"""Size of the smallest vocabulary, which has no merges."""
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


MOST = 1 << 20
"""Size of the largest vocabulary, four times that of the largest tokenizer in use."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The shape of a Llama.

    >>> Size(hidden=128, heads=4).keys, Size(hidden=128).wide
    (4, 352)
    """

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    key_heads: int = 0
    """Heads of keys and values, each shared by several query heads; 0: as many as heads."""
    intermediate: int = 0
    """Width of the gated layer; 0: 8/3 of hidden, rounded up to a multiple of 32."""
    context: int = 512
    """The most tokens of a sequence."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        for name in ("key_heads", "intermediate"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 (automatic) or more, not {getattr(self, name)}")
        if self.context < 2:
            raise ValueError(f"context must be 2 or more, not {self.context}")
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not divisible by {self.heads} heads")
        if self.hidden // self.heads % 2:
            size = self.hidden // self.heads
            raise ValueError(f"each head has {size} numbers, which must be even: positions rotate pairs")
        if self.heads % self.keys:
            raise ValueError(f"{self.heads} heads cannot share {self.keys} key_heads evenly")

    @property
    def keys(self) -> int:
        """Heads of keys and values, with the default resolved."""
        return self.key_heads or self.heads

    @property
    def wide(self) -> int:
        """Width of the gated layer, with the default resolved."""
        return self.intermediate or -(-8 * self.hidden // (3 * 32)) * 32


def learn_tokenizer(
    texts: Iterable[str], vocabulary: int, *, split_digits: bool = True
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of at most this many tokens, with ChatML's marks and template.

    It has fewer tokens if the text has too few different words to merge. The same texts in the same order
    give the same tokenizer. Raises ValueError for a vocabulary without room for every byte, or beyond 2^20.

    Source: Sennrich et al., arXiv:1508.07909; on bytes, with the word boundaries of GPT-2.

    >>> tokenizer = learn_tokenizer(["low lower lowest 12"], 264)
    >>> tokenizer.tokenize("low 12")
    ['low', 'Ġ', '1', '2']
    """
    if vocabulary < LEAST:
        raise ValueError(
            f"a vocabulary of {vocabulary} has no room for {BYTES} bytes and {len(SPECIAL)} marks: "
            f"it needs {LEAST} or more"
        )
    if vocabulary > MOST:
        raise ValueError(f"a vocabulary of {vocabulary} is too large: at most {MOST}")
    plain = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    plain.pre_tokenizer = pre_tokenizers.Sequence([digits, words]) if split_digits else words
    plain.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(mark, special=True) for mark in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    plain.train_from_iterator(_without_marks(texts), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def encode_text(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Return the tokens of a text; a mark in the text is encoded as ordinary characters."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def _without_marks(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts without marks, whose characters must not be merged."""
    for text in texts:
        for mark in SPECIAL:
            text = text.replace(mark, "\n")
        yield text


def new_llama(size: Size, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> LlamaForCausalLM:
    """Return a Llama with tied embeddings, drawn in float32 from the seed.

    Matrices are drawn from N(0, 1/hidden), so that a matrix times a normalised state has variance 1 at any
    width. (transformers' deviation of 0.02 fits a width of 2500, and small models learn nothing for long with
    it.) Matrices that write into the residual stream are drawn from N(0, 1/hidden²), so that a layer's output
    is as large as an embedding and the token can still be recognised after it. Otherwise only the first layer
    finds equal tokens, and looking up something in the context is learnt many times later. Because the
    output is tied to the embedding, the last norm starts at 2/√hidden, or the model would repeat its input.
    An answer ends at the end of a turn or at the end of a text.
    """
    end, close, pad = (int(i) for i in tokenizer.convert_tokens_to_ids([END, CLOSE, PAD]))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=size.wide,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.keys,
        max_position_embeddings=size.context,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        tie_word_embeddings=True,
        initializer_range=size.hidden**-0.5,
    )
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for layer in model.model.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                torch.nn.init.normal_(projection.weight, std=1 / size.hidden)
        torch.nn.init.constant_(model.model.norm.weight, min(1.0, 2 * size.hidden**-0.5))
    model.generation_config = GenerationConfig(eos_token_id=[close, end], pad_token_id=pad)
    return model.eval()


def write_new(out: Path, size: Size, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> int:
    """Write a new Llama with its tokenizer to `out`; return its number of parameters, tied ones once."""
    model = new_llama(size, tokenizer, seed=seed)
    save_pretrained(model, tokenizer, out)
    return sum(p.numel() for p in model.parameters())
