"""The loaded model of a `writers.py: NativeWriter`: its chat template and its native engine."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from posttrain.base.chat import Chat
from posttrain.engines.native.engine import NativeConfig, NativeEngine
from posttrain.models import pretrained
from posttrain.models.attention import context_of, mask_tokens, use_layouts
from posttrain.models.loading import dtype_of, usable_device
from posttrain.recipe.writers import NativeWriter
from posttrain.types import Message, Request, Sampling, UserError
from posttrain.verifiers.judge.writer import Conversation, Written


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine that answers conversations and compares options."""

    chat: Chat
    engine: NativeEngine
    rows: int
    """Number of answers that are generated at the same time."""

    @cached_property
    def spellings(self) -> dict[str, list[int]]:
        """Return by character the tokens that spell it, with or without white space around it."""
        tokens: dict[str, list[int]] = {}
        for token in range(self.engine.runner.vocabulary):
            text = self.engine.decode([token]).strip()
            if len(text) == 1:
                tokens.setdefault(text, []).append(token)
        return tokens

    def prompt(self, conversation: Sequence[Message]) -> tuple[int, ...]:
        """Tokenize a conversation up to the answer, with no special tokens from the text of its messages.

        Raises UserError if the prompt leaves no room for an answer, or cannot be rendered.
        """
        prompt = tuple(self.chat.render(conversation))
        if len(prompt) >= self.engine.context:
            raise UserError(
                "", f"a prompt of {len(prompt)} tokens exceeds the {self.engine.context} that fit"
            )
        return prompt

    def write(
        self, conversations: Sequence[Conversation], *, max_tokens: int, temperature: float, seed: int
    ) -> list[Written]:
        """Generate an answer to each conversation, which depends on that conversation and the seed alone."""
        sampling = Sampling(temperature=temperature, max_new_tokens=max_tokens)
        results: list[Written] = [Written(error="never written")] * len(conversations)
        pending: dict[int, tuple[int, int]] = {}  # by ticket: index and prompt length
        for i, conversation in enumerate(conversations):
            try:
                prompt = self.prompt(conversation)
                text = json.dumps([dict(message) for message in conversation])
                key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
                request = Request(prompt=prompt, sampling=sampling, seed=seed, task=key)
                pending[self.engine.submit(request)] = (i, len(prompt))
            except (UserError, ValueError) as error:
                results[i] = Written(error=str(error))
        while pending:
            for ticket, answer in self.engine.poll():
                if ticket not in pending:  # submitted by an earlier call that was interrupted
                    continue
                i, length = pending.pop(ticket)
                results[i] = Written(
                    text=answer.text,
                    prompt_tokens=length,
                    completion_tokens=len(answer.tokens),
                    cut=answer.stop == "length",
                )
        return results

    def choose(self, conversations: Sequence[Conversation], options: Sequence[str]) -> list[Written]:
        """Return for each conversation the probability of each option as the answer's first token.

        options: single characters. Tokens that differ from one in white space alone count as it.
        """
        results: list[Written] = [Written(error="never asked")] * len(conversations)
        prompts: dict[int, tuple[int, ...]] = {}
        for i, conversation in enumerate(conversations):
            try:
                prompts[i] = self.prompt(conversation)
            except UserError as error:
                results[i] = Written(error=str(error))
        tokens = [self.spellings.get(option, []) for option in options]
        for start in range(0, len(prompts), self.rows):
            indices = list(prompts)[start : start + self.rows]
            logps = self.engine.first([prompts[i] for i in indices]).double()
            for i, logp in zip(indices, logps, strict=True):
                chances = tuple(float(logp[ids].exp().sum()) for ids in tokens)
                results[i] = Written(chances=chances, prompt_tokens=len(prompts[i]), completion_tokens=1)
        return results


@lru_cache(maxsize=4)
def load(writer: NativeWriter) -> LocalModel:
    """Load the writer's model and engine, once in each process."""
    path = pretrained.resolve(writer.path)
    tokenizer = pretrained.load_tokenizer(path, require_chat_template=writer.chat_template is None)
    chat = Chat(
        tokenizer, template=writer.chat_template, ends=frozenset(pretrained.stop_ids(path, tokenizer))
    )
    dtype = getattr(torch, dtype_of(writer.dtype, writer.device))
    model = pretrained.load_model(path, dtype=dtype, device=usable_device(writer.device))
    try:
        use_layouts(model)
    except ValueError as error:
        raise UserError(writer.path, str(error), "take a Llama, Qwen, Gemma or Mistral") from None
    mask_tokens(model, {*pretrained.token_ids(tokenizer), *chat.stops})
    engine = NativeEngine(
        model,
        decode=lambda tokens: str(tokenizer.decode(tokens)),
        stop_tokens=sorted(chat.stops),
        config=NativeConfig(rows=writer.rows),
        context=context_of(model.config),
    )
    return LocalModel(chat, engine, writer.rows)


def require(writer: NativeWriter) -> None:
    """Download and convert the writer's model. Raises UserError if it cannot answer conversations."""
    path = pretrained.resolve(writer.path)
    pretrained.load_config(path)
    pretrained.check_weights(path)
    pretrained.load_tokenizer(path, require_chat_template=writer.chat_template is None)
    usable_device(writer.device)
