"""A reward model, loaded: conversations in, the numbers that its head gives at chosen tokens out.

A conversation is tokenised whole, as the model was trained on it. In what it says nothing is taken for a
special token, so a response that spells the end of a turn has only spelt it. Numbers are read at positions
that we know, never by looking for padding: a pad token that also ends a turn changes nothing.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from posttrain.base.chat import Chat
from posttrain.base.usercode import cause
from posttrain.models.attention import context_of
from posttrain.models.fingerprint import finite
from posttrain.models.loading import dtype_of, quiet, usable_device
from posttrain.models.pretrained import fetch, from_run, refuse_adapter, without_strays
from posttrain.types import Dtype, Message, UserError
from posttrain.verifiers.model.scores import Kind, Step


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens, and the positions whose numbers are wanted."""

    tokens: list[int]
    at: list[int]


def directory(path: str) -> Path:
    """Return where a reward model lies: a directory, a run's newest checkpoint, or a Hub id.

    Raises UserError if there is none, or if its weights are not safetensors.
    """
    local = Path(path).expanduser()
    if not local.is_dir():
        if path.count("/") != 1 or local.is_absolute() or local.parent.is_dir():
            raise UserError(
                "verifier.model.paths", f"there is no directory {path!r}", "give a directory or org/name"
            )
        try:
            local = fetch(path)
        except Exception as error:  # of its HTTP stack, any
            raise UserError(
                "verifier.model.paths",
                f"no directory is called {path!r}, nor can it be fetched from the Hub: {cause(error)}",
            ) from None
    local = from_run(local) if (local / "config.toml").is_file() else without_strays(local)
    if not any(local.glob("*.safetensors")):
        raise UserError(path, "has no safetensors weights", "save it with save_pretrained")
    return local


def check_config(local: Path, kind: Kind) -> None:
    """UserError if this is an adapter, or config.json says that it is no reward model of that kind."""
    refuse_adapter(local)
    file = local / "config.json"
    try:
        raw = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(str(file), f"cannot be read: {cause(error)}") from None
    wanted = "ForSequenceClassification" if kind == "outcome" else "ForTokenClassification"
    names = raw.get("architectures") or []
    if not any(str(name).endswith(wanted) for name in names):
        what = names[0] if names else "nothing"
        raise UserError(
            str(file),
            f"its architecture is {what}, and {kind} scores need a ...{wanted}",
            "a language model has no head for scores: train one, or choose kind",
        )
    if (heads := raw.get("score_heads", 1)) != 1:
        fix = "train one model for each, and name them all in paths"
        raise UserError(str(file), f"it has {heads} heads, and a reward model has one", fix)


class Scorer:
    """A model in evaluation mode with its tokenizer. Raises UserError for whatever keeps it from scoring.

    template: a Jinja template in place of the tokenizer's own; "none" for plain text; empty for its own.
    max_tokens: the longest conversation, 0 for as long as the model allows.
    """

    def __init__(
        self, path: str, kind: Kind, *, dtype: Dtype, device: str, template: str = "", max_tokens: int = 0
    ) -> None:
        local = directory(path)
        check_config(local, kind)
        self.kind = kind
        self.device = usable_device(device)
        self.tokenizer = _tokenizer(local)
        if not template and not self.tokenizer.chat_template:
            raise UserError(
                path,
                "its tokenizer has no chat template",
                "set chat_template to one, or to 'none' for plain text",
            )
        try:
            self.chat = Chat(self.tokenizer, template or None)
        except UserError as error:
            raise UserError(path, error.problem, "give another chat_template") from None
        self.model = _model(local, kind, getattr(torch, dtype_of(dtype, device))).to(self.device)
        self.head = self.model.score
        self.backbone = getattr(self.model, self.model.base_model_prefix)
        context = context_of(self.model.config)
        self.most = min(max_tokens or context, context)

    def outcome(self, messages: Sequence[Message], response: str) -> Row:
        """A conversation whose number stands at its last token."""
        [tokens] = self.chat.render_for_judge(messages, [response])
        return Row(tokens, [len(tokens) - 1])

    def process(self, messages: Sequence[Message], found: Sequence[Step], separator: str) -> Row:
        """A conversation with a number at the end of the separator after each step, the last one too."""
        tokens, ends = self.chat.render_steps(messages, (step.text for step in found), separator)
        return Row(tokens, [end - 1 for end in ends])

    @torch.inference_mode()
    def numbers(self, rows: Sequence[Row]) -> list[list[float]]:
        """The number at each position of a row: a score, or the probability that a step is good."""
        longest = max(len(row.tokens) for row in rows)
        tokens = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros(len(rows), longest, dtype=torch.long)
        for i, row in enumerate(rows):
            tokens[i, : len(row.tokens)] = torch.tensor(row.tokens)
            mask[i, : len(row.tokens)] = 1
        hidden = self.backbone(
            input_ids=tokens.to(self.device), attention_mask=mask.to(self.device), use_cache=False
        ).last_hidden_state
        return [self._read(self.head(hidden[i, row.at]).float()).tolist() for i, row in enumerate(rows)]

    def _read(self, logits: Float[torch.Tensor, "P L"]) -> Float[torch.Tensor, "P"]:
        if logits.shape[1] == 2:  # bad and good
            return logits.softmax(-1)[:, 1]
        return logits[:, 0] if self.kind == "outcome" else logits[:, 0].sigmoid()


load = lru_cache(maxsize=16)(Scorer)
"""The scorer of a model, which is loaded once in each process."""


def _tokenizer(local: Path) -> Any:
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(local, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged file fails with anything
        raise UserError(str(local), f"its tokenizer cannot be read: {cause(error)}") from None


def _model(local: Path, kind: Kind, dtype: torch.dtype) -> Any:
    """Load the model; UserError if its files lack a weight, or hold one that the model has no place for."""
    auto = AutoModelForSequenceClassification if kind == "outcome" else AutoModelForTokenClassification
    try:
        with quiet():
            model, info = auto.from_pretrained(
                local,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:  # a damaged file fails with anything
        raise UserError(str(local), f"cannot be loaded: {cause(error)}") from None
    if missing := info["missing_keys"]:
        problem = f"lacks the weights of {len(missing)} tensors, first {min(missing)}"
        raise UserError(str(local), problem)
    # some keep the head for tokens that they began with
    if unused := set(info["unexpected_keys"]) - {"lm_head.weight"}:
        problem = f"stores {len(unused)} tensors that config.json has no place for, first {min(unused)}"
        raise UserError(str(local), problem, "does config.json belong to these weights?")
    if not hasattr(model, "score"):
        raise UserError(str(local), "is no decoder with a head called 'score'")
    labels = model.score.weight.shape[0]
    if labels != 1 and (kind == "outcome" or labels != 2):
        wanted = "one number" if kind == "outcome" else "one number, or bad and good"
        raise UserError(str(local), f"its head gives {labels} numbers, not {wanted}", "see num_labels")
    for name, parameter in model.named_parameters():
        if not finite(parameter):
            raise UserError(str(local), f"has NaN or infinite weights in {name}")
    return model.eval().requires_grad_(False)
