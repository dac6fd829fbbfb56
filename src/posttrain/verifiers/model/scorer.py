"""Load a reward model, and return the outputs of its head at some tokens of a conversation.

A conversation is tokenised as a whole, as in training. Text in messages is never parsed as special tokens, so
a response that spells an end-of-turn token does not end its turn. Outputs are read at computed positions and
not found by looking for padding, so a pad token that also ends turns changes nothing.
"""

import json
import tomllib
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
from posttrain.models.checkpoint import split_run
from posttrain.models.fingerprint import finite
from posttrain.models.loading import dtype_of, quiet, usable_device
from posttrain.models.pretrained import fetch, from_run, refuse_adapter, without_strays
from posttrain.types import Dtype, Message, UserError
from posttrain.verifiers.model.scores import Kind, ResponseStep


@dataclass(frozen=True, slots=True)
class ScorerRow:
    """Tokens of a conversation, and the positions at which the head is read."""

    tokens: list[int]
    at: list[int]


def directory(path: str) -> Path:
    """Return the directory of a reward model, given as a directory, a run, RUN@best or a Hub id.

    Raises UserError if it does not exist, or if its weights are not safetensors.
    """
    local, which = split_run(path)
    if not local.is_dir():
        if path.count("/") != 1 or local.is_absolute() or local.parent.is_dir():
            raise UserError(
                "verifier.model.paths", f"there is no directory {path!r}", "give a directory or org/name"
            )
        try:
            local = fetch(path)
        except Exception as error:  # any, from the HTTP stack
            raise UserError(
                "verifier.model.paths",
                f"no directory is called {path!r}, nor can it be fetched from the Hub: {cause(error)}",
            ) from None
    local = from_run(local, which) if (local / "config.toml").is_file() else without_strays(local)
    if not any(local.glob("*.safetensors")):
        raise UserError(path, "has no safetensors weights", "save it with save_pretrained")
    return local


def check_config(local: Path, kind: Kind) -> None:
    """Raise UserError if this is an adapter, or by its config.json not a reward model of that kind."""
    refuse_adapter(local)
    file = local / "config.json"
    try:
        raw = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(str(file), f"cannot be read: {cause(error)}") from None
    suffix = "ForSequenceClassification" if kind == "outcome" else "ForTokenClassification"
    names = raw.get("architectures") or []
    if not any(str(name).endswith(suffix) for name in names):
        architecture = names[0] if names else "nothing"
        raise UserError(
            str(file),
            f"its architecture is {architecture}, and {kind} scores need a ...{suffix}",
            "a language model has no head for scores: train one, or choose kind",
        )
    if (heads := raw.get("score_heads", 1)) != 1:
        fix = "train one model for each, and name them all in paths"
        raise UserError(str(file), f"it has {heads} heads, and a reward model has one", fix)


class Scorer:
    """A model in evaluation mode with its tokenizer. Raises UserError if it cannot score.

    template: a Jinja template in place of the tokenizer's; "none" for plain text; "" for the tokenizer's.
    max_tokens: the longest conversation; 0 for the model's context length.
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
        args = {} if template else _template_args(path)
        try:
            self.chat = Chat(self.tokenizer, template or None, template_args=args)
        except UserError as error:
            raise UserError(path, error.problem, "give another chat_template") from None
        numbers = getattr(torch, dtype_of(dtype, device))
        self.model = _model(local, kind, numbers).to(self.device)
        self.head = self.model.score
        self.backbone = getattr(self.model, self.model.base_model_prefix)
        context = context_of(self.model.config)
        self.most = min(max_tokens or context, context)

    def outcome(self, messages: Sequence[Message], response: str) -> ScorerRow:
        """Return the conversation, to be read at its last token."""
        [tokens] = self.chat.render_for_judge(messages, [response])
        return ScorerRow(tokens, [len(tokens) - 1])

    def process(
        self, messages: Sequence[Message], steps: Sequence[ResponseStep], separator: str
    ) -> ScorerRow:
        """Return the conversation, to be read at the end of the separator after each step, even the last."""
        tokens, ends = self.chat.render_steps(messages, (step.text for step in steps), separator)
        return ScorerRow(tokens, [end - 1 for end in ends])

    @torch.inference_mode()
    def numbers(self, rows: Sequence[ScorerRow]) -> list[list[float]]:
        """Return the output at each position of the rows: a score, or the probability of a good step."""
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
"""Load a scorer, once in each process."""


def _template_args(path: str) -> dict[str, Any]:
    """Return the variables of the chat template under which a run was trained; none for other paths."""
    run, _ = split_run(path)
    recipe = run / "config.toml"
    if not recipe.is_file():
        return {}
    try:
        model = tomllib.loads(recipe.read_text(encoding="utf-8"))["model"]
        args: dict[str, Any] = model.get("template_args", {})
    except (OSError, ValueError, LookupError) as error:
        raise UserError(str(recipe), f"cannot be read: {cause(error)}") from None
    return args


def _tokenizer(local: Path) -> Any:
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(local, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged file fails with anything
        raise UserError(str(local), f"its tokenizer cannot be read: {cause(error)}") from None


def _model(local: Path, kind: Kind, dtype: torch.dtype) -> Any:
    """Load the model. Raises UserError if its files lack a weight, or hold one that it does not use."""
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
    # some files keep the language model's head from before training
    if unused := set(info["unexpected_keys"]) - {"lm_head.weight"}:
        problem = f"stores {len(unused)} tensors that config.json has no place for, first {min(unused)}"
        raise UserError(str(local), problem, "does config.json belong to these weights?")
    if not hasattr(model, "score"):
        raise UserError(str(local), "is no decoder with a head called 'score'")
    labels = model.score.weight.shape[0]
    if labels != 1 and (kind == "outcome" or labels != 2):
        expected = "one number" if kind == "outcome" else "one number, or bad and good"
        raise UserError(str(local), f"its head gives {labels} numbers, not {expected}", "see num_labels")
    for name, parameter in model.named_parameters():
        if not finite(parameter):
            raise UserError(str(local), f"has NaN or infinite weights in {name}")
    return model.eval().requires_grad_(False)
