"""A start that every machine makes alike: a model that answers running sums of digits, one of three rightly.

A question is four digits, the answer the last digits of their three running sums: 7039 is answered by 709. An
OPT of one layer and 26 000 weights learns it by SFT, 300 steps of 64 on 2000 answered questions, in float64.
The norms and positions of OPT compute in the dtype of its weights, those of a Llama in float32 in any case.
Kernels that add in another order change a trained weight by less than 1e-10, so that rounding to multiples of
2^-10 gives the same bits. Runs from the start are in float64 too.

The chance of the right answer to a question is computed, not sampled.
"""

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, OPTConfig, OPTForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from posttrain.api.opening import train
from posttrain.base.toml import dump
from posttrain.errors import RunError
from posttrain.models import checkpoint
from posttrain.models.fingerprint import digest
from posttrain.models.pretrained import load_model, load_tokenizer, save_pretrained
from posttrain.models.scratch import CLOSE, END, LEAST, PAD, learn_tokenizer
from posttrain.recipe import config

DIGITS, HELD_OUT, TAUGHT = 4, 1000, 2000
HIDDEN, STEPS, ROWS, RATE, GRID = 32, 300, 64, 1e-2, 2**10
DIGEST = "87e8b46c2742a327"
"""Of the start's weights, wherever it was made so far."""
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
)
Tables = dict[str, dict[str, Any]]
Rows = Sequence[Mapping[str, str]]
"""A prompt and an answer each."""
Changes = dict[str, Any]
"""Values of a recipe by their dotted keys."""


@cache
def questions() -> tuple[str, ...]:
    """Return all questions in a fixed random order; the first HELD_OUT are never trained on."""
    every = [f"{number:0{DIGITS}}" for number in range(10**DIGITS)]
    random.Random(0).shuffle(every)
    return tuple(every)


def answer_of(question: str) -> str:
    """Return the right answer to a question.

    >>> answer_of("7039"), answer_of("9999")
    ('709', '876')
    """
    digits = [int(digit) for digit in question]
    return "".join(str(sum(digits[: n + 1]) % 10) for n in range(1, len(digits)))


def start(out: Path, threads: int = 1) -> tuple[Path, str]:
    """Return the folder and the digest of the start, which is made in OUT unless it is there."""
    place = out / "start"
    if not place.exists():
        untaught, tokenizer = out / "untaught", new_tokenizer()
        shutil.rmtree(untaught, ignore_errors=True)
        save_pretrained(untaught_model(tokenizer), tokenizer, untaught)
        rows = answered(questions()[HELD_OUT:][:TAUGHT])
        teach(untaught, rows, {"run.threads": threads}, place)
    return place, digest_of(place)


def teach(model: Path, rows: Rows, changes: Changes, place: Path) -> None:
    """Train a model by SFT on these rows, and save it in PLACE with rounded weights."""
    schedule = {"optim.schedule": "cosine", "optim.warmup_steps": 10}
    ours = {"optim.lr": RATE, "run.updates": STEPS, "batch.batch_size": ROWS, **schedule}
    _, taught = run("sft", model, rows, ours | changes, place.with_name("taught"))
    round_weights(last_checkpoint(taught) / "model", place)


def round_weights(model: Path, place: Path) -> None:
    """Copy a model to PLACE with its weights rounded to the grid."""
    part = place.with_name(f"{place.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(model, part)
    for file in part.glob("*.safetensors"):
        weights = {name: on_grid(weight) for name, weight in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
    part.rename(place)


def on_grid(weight: torch.Tensor) -> torch.Tensor:
    """Return the nearest multiples of 1 / GRID."""
    return (weight * GRID).round() / GRID + 0.0  # -0.0 becomes 0.0


def digest_of(model: Path) -> str:
    """Return the digest of a model's weights."""
    return digest(sorted(load(model).state_dict().items()))


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes; a conversation is a question and its answer, without words between."""
    tokenizer = learn_tokenizer(["0123456789"], LEAST)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def untaught_model(
    tokenizer: PreTrainedTokenizerFast, *, positions: int = 32, seed: int = 0
) -> OPTForCausalLM:
    """Return the model with random weights, drawn in float64."""
    end, close, pad = (int(i) for i in tokenizer.convert_tokens_to_ids([END, CLOSE, PAD]))
    shape = OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        word_embed_proj_dim=HIDDEN,
        ffn_dim=2 * HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=positions,
        dropout=0.0,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        tie_word_embeddings=False,
    )
    model, chance = OPTForCausalLM(shape).double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=chance, dtype=torch.float64) / HIDDEN**0.5)
    model.generation_config = GenerationConfig(eos_token_id=[close, end], pad_token_id=pad)
    return model.eval()


def answered(texts: Sequence[str]) -> Rows:
    """Return questions with their right answers."""
    return [{"prompt": question, "answer": answer_of(question)} for question in texts]


def run(
    kind: str, model: Path, rows: Rows, changes: Changes, place: Path
) -> tuple[config.LoadedRecipe, Path]:
    """Train by a recipe of that kind, sft or grpo, in PLACE; a run that is there is made again."""
    loaded = recipe(kind, model, rows, changes, place)
    shutil.rmtree(place, ignore_errors=True)
    return loaded, train(loaded, place, title=place.name, resume=False, view=lambda kind, data: None)[0]


def recipe(kind: str, model: Path, rows: Rows, changes: Changes, place: Path) -> config.LoadedRecipe:
    """Return a recipe with these rows as data; it and they are written next to PLACE."""
    data, file = place.with_suffix(".jsonl"), place.with_suffix(".toml")
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tables: Tables = {
        "model": {"path": str(model), "dtype": "float64"},
        "method": {"name": kind},
        "task": {"data": {"path": str(data)}},
        "checkpoint": {"every": 0},
        "run": {"threads": 1},
    }
    if kind == "grpo":
        tables |= {
            "verifier": {"exact": {}},
            "sampling": {"max_new_tokens": DIGITS},
            "engine": {"rows": 256},
            "record": {"tokens": 1},
        }
    file.write_text(dump(tables))
    return config.read(file, [f"{key}={value}" for key, value in changes.items()])


def last_checkpoint(run_dir: Path) -> Path:
    """Return the newest checkpoint of a run."""
    newest, _ = checkpoint.newest(run_dir / "checkpoints")
    if newest is None:
        raise RunError(str(run_dir), "it has no checkpoint", "remove the folder, and run again")
    return newest


def load(path: Path) -> PreTrainedModel:
    """Return a model in float64."""
    return load_model(path, dtype=torch.float64)


@dataclass(frozen=True)
class Quality:
    """Of the answers to the held-out questions."""

    chances: torch.Tensor
    """Of the right answer to each, at temperature 1, [HELD_OUT]."""
    greedy: float
    """Share of questions whose likeliest tokens are right."""
    entropy: float
    """Nats a token, along the right answers."""

    @property
    def right(self) -> float:
        """Chance that an answer at temperature 1 is right."""
        return float(self.chances.mean())

    def any_of(self, count: int) -> float:
        """Chance that one of `count` answers is right (pass@k)."""
        return float((1 - (1 - self.chances) ** count).mean())


@torch.no_grad()
def quality(path: Path) -> Quality:
    """Measure a model on the held-out questions."""
    tokenizer, held_out = load_tokenizer(path), questions()[:HELD_OUT]
    texts = [question + answer_of(question) + CLOSE for question in held_out]
    tokens = torch.tensor([tokenizer(text)["input_ids"] for text in texts])
    logits = load(path)(input_ids=tokens, use_cache=False).logits[:, DIGITS - 1 : -1]
    logp, answers = logits.log_softmax(-1), tokens[:, DIGITS:]
    return Quality(
        chances=logp.gather(-1, answers[..., None])[..., 0].sum(1).exp(),
        greedy=float((logp.argmax(-1) == answers).all(1).double().mean()),
        entropy=float(-(logp.exp() * logp).sum(-1).mean()),
    )
