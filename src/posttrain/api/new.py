"""`posttrain model new`: make a model with random weights, and a tokenizer learned from text."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors import SafetensorError

from posttrain.data.corpus import Text, load_corpus
from posttrain.data.documents import documents
from posttrain.models import scratch
from posttrain.plan.memory import free_memory, gib
from posttrain.report.terminal import err
from posttrain.types import UserError


def new(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the model goes; new, or empty.")],
    text: Annotated[
        list[str], typer.Option(metavar="FILE", help="Text to learn the tokenizer from; once for each file.")
    ],
    vocab: Annotated[int, typer.Option(help="Tokens at most: 256 bytes, 4 marks, the rest merges.")] = 512,
    layers: Annotated[int, typer.Option(help="Layers.")] = 4,
    hidden: Annotated[int, typer.Option(help="Width, divisible by the heads.")] = 128,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    key_heads: Annotated[int, typer.Option(help="Heads of keys and values; 0: as many as heads.")] = 0,
    intermediate: Annotated[int, typer.Option(help="Width of the gated layer; 0: 8/3 of hidden.")] = 0,
    context: Annotated[int, typer.Option(help="Length of the context, in tokens.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random weights.")] = 0,
    split_digits: Annotated[bool, typer.Option(help="A token for each digit of a number.")] = True,
) -> None:
    """Make a small Llama with random weights, and a tokenizer learned from text.

    The text is what `[task.text]` of a recipe reads. The same text and seed give the same files.

    Example: `posttrain model new models/sums --text text.txt --vocab 300 --layers 4 --hidden 128`
    """
    try:
        source = Text(path=tuple(text))
        size = scratch.Size(
            layers=layers,
            hidden=hidden,
            heads=heads,
            key_heads=key_heads,
            intermediate=intermediate,
            context=context,
        )
        _check_free(directory)
        _check_memory(size, vocab)
        tokenizer = scratch.learn_tokenizer(documents(source), vocab, split_digits=split_digits)
    except ValueError as error:
        raise UserError("posttrain model new", str(error)) from None
    if len(tokenizer) < vocab:
        err.print(f"the text supports {len(tokenizer)} tokens, not {vocab}")
    corpus = load_corpus(
        source,
        encode=lambda passage: scratch.encode_text(tokenizer, passage),
        eos=int(tokenizer.eos_token_id),
        max_length=context,
        say=lambda line: None,
    )
    try:
        parameters = scratch.write_new(directory, size, tokenizer, seed=seed)
    except (OSError, SafetensorError) as error:
        problem = f"it cannot be written: {getattr(error, 'strerror', None) or error}"
        raise UserError(str(directory), problem, "name another directory") from None
    rate = (corpus.tokens - corpus.documents) / corpus.utf8_bytes()
    summary = f"{parameters:,} parameters, {len(tokenizer):,} tokens, {rate:.3f} tokens a byte of the text"
    typer.echo(f"{directory}: {summary}")


def _check_memory(size: scratch.Size, vocab: int) -> None:
    """Raise UserError for a model whose weights do not fit in the free memory."""
    layer = 4 * size.hidden**2 + 3 * size.hidden * size.wide
    parameters = vocab * size.hidden + size.layers * layer
    if 4 * parameters > (free := free_memory(torch.device("cpu"))):
        problem = f"about {parameters:,} parameters take {gib(4 * parameters)}, and {gib(free)} are free"
        raise UserError("posttrain model new", problem, "lower --vocab, --layers or --hidden")


def _check_free(directory: Path) -> None:
    """Raise UserError unless the directory is new or empty."""
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists():
        problem = "the directory is not empty" if directory.is_dir() else "it is a file"
        raise UserError(str(directory), problem, "name another, or remove it")
