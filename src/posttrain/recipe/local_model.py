"""The model of a `writers.py: NativeWriter`: its files, its chat template and the native engine together."""

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
    """A chat template and the native engine of one model."""

    chat: Chat
    engine: NativeEngine
    rows: int
    """Answers that are written side by side."""

    @cached_property
    def spellings(self) -> dict[str, list[int]]:
        """The tokens that are one character, up to blanks around it, by that character."""
        out: dict[str, list[int]] = {}
        for token in range(self.engine.runner.vocabulary):
            text = self.engine.decode([token]).strip()
            if len(text) == 1:
                out.setdefault(text, []).append(token)
        return out

    def prompt(self, conversation: Sequence[Message]) -> tuple[int, ...]:
        """The tokens up to the model's answer, in which no text is a special token; UserError if none."""
        prompt = tuple(self.chat.render(conversation))
        if len(prompt) >= self.engine.context:
            raise UserError(
                "", f"a prompt of {len(prompt)} tokens exceeds the {self.engine.context} that fit"
            )
        return prompt

    def write(
        self, conversations: Sequence[Conversation], *, max_tokens: int, temperature: float, seed: int
    ) -> list[Written]:
        """One answer for each conversation; what is drawn depends on it and on the seed alone."""
        sampling = Sampling(temperature=temperature, max_new_tokens=max_tokens)
        out: list[Written] = [Written(error="never written")] * len(conversations)
        places: dict[int, tuple[int, int]] = {}
        for i, conversation in enumerate(conversations):
            try:
                prompt = self.prompt(conversation)
                said = json.dumps([dict(message) for message in conversation])
                key = hashlib.blake2b(said.encode(), digest_size=16).hexdigest()
                request = Request(prompt=prompt, sampling=sampling, seed=seed, task=key)
                places[self.engine.submit(request)] = (i, len(prompt))
            except (UserError, ValueError) as error:
                out[i] = Written(error=str(error))
        while places:
            for ticket, answer in self.engine.poll():
                if ticket not in places:  # asked by a call that was broken off
                    continue
                i, length = places.pop(ticket)
                out[i] = Written(
                    text=answer.text,
                    prompt_tokens=length,
                    completion_tokens=len(answer.tokens),
                    cut=answer.stop == "length",
                )
        return out

    def choose(self, conversations: Sequence[Conversation], options: Sequence[str]) -> list[Written]:
        """The chance of each option to begin each answer, summed over the tokens that are it up to blanks."""
        out: list[Written] = [Written(error="never asked")] * len(conversations)
        prompts: dict[int, tuple[int, ...]] = {}
        for i, conversation in enumerate(conversations):
            try:
                prompts[i] = self.prompt(conversation)
            except UserError as error:
                out[i] = Written(error=str(error))
        tokens = [self.spellings.get(option, []) for option in options]
        for start in range(0, len(prompts), self.rows):
            places = list(prompts)[start : start + self.rows]
            logps = self.engine.first([prompts[i] for i in places]).double()
            for i, logp in zip(places, logps, strict=True):
                chances = tuple(float(logp[ids].exp().sum()) for ids in tokens)
                out[i] = Written(chances=chances, prompt_tokens=len(prompts[i]), completion_tokens=1)
        return out


@lru_cache(maxsize=4)
def load(writer: NativeWriter) -> LocalModel:
    """Load the writer's model with its engine, once in each process."""
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
    """Fetch and convert the writer's model. Raises UserError if there is none, or it has no chat template."""
    path = pretrained.resolve(writer.path)
    pretrained.load_config(path)
    pretrained.check_weights(path)
    pretrained.load_tokenizer(path, require_chat_template=writer.chat_template is None)
    usable_device(writer.device)
