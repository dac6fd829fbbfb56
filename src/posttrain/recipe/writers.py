"""Who writes for a judge, as a recipe names it: an endpoint, or a model that the native engine runs.

A judge knows only that something writes (`verifiers/judge/writer.py`). The native writer puts the engine, the
chat and the model's files together; it loads the model when it is first asked, in the process that asks.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache

import torch

from posttrain.base.chat import Chat
from posttrain.engines.native.engine import NativeConfig, NativeEngine
from posttrain.models import pretrained
from posttrain.models.attention import context_of, mask_tokens, use_layouts
from posttrain.models.loading import Dtype, dtype_of, usable_device
from posttrain.types import Message, Request, Sampling, UserError
from posttrain.verifiers.judge.constitution import read_constitution
from posttrain.verifiers.judge.endpoint import Endpoint
from posttrain.verifiers.judge.judge import Judge, Judging
from posttrain.verifiers.judge.rubric import Verdict, read_rubric
from posttrain.verifiers.judge.writer import Conversation, Writer, Written


@dataclass(frozen=True, kw_only=True)
class NativeWriter:
    """A model of ours, with the native engine, in the process that judges."""

    path: str
    """As model.path: a Hub id, a directory with safetensors, a .gguf file, or pypi:PACKAGE."""
    dtype: Dtype = "auto"
    """What it computes in; auto: bfloat16 where the device multiplies in it, else float32."""
    device: str = "cpu"
    """cpu, cuda, cuda:1, or auto for the GPU if there is one. Every worker process loads its own copy."""
    chat_template: str | None = None
    """A Jinja template in place of the tokenizer's own; "none" for plain text."""
    rows: int = 16
    """Answers that are written side by side."""
    deadline_s: float = 600.0
    """For one answer, the loading of the model included when it is the first."""

    def __post_init__(self) -> None:
        if self.rows < 1 or not 0 < self.deadline_s < 86_400:
            raise ValueError("rows must be 1 or more, and deadline_s positive and under a day")

    @property
    def budget_s(self) -> float:
        """The deadline."""
        return self.deadline_s

    def require(self) -> None:
        """UserError if the model is not there, is none, or has no chat template. Fetches and converts it."""
        path = pretrained.resolve(self.path)
        pretrained.load_config(path)
        pretrained.check_weights(path)
        pretrained.load_tokenizer(path, require_chat_template=self.chat_template is None)
        usable_device(self.device)

    def write(
        self, conversations: Sequence[Conversation], *, max_tokens: int, temperature: float, seed: int
    ) -> list[Written]:
        """One answer for each conversation; what is drawn depends on it and on the seed alone."""
        opened = _load_writer(self)
        sampling = Sampling(temperature=temperature, max_new_tokens=max_tokens)
        out: list[Written] = [Written(error="never written")] * len(conversations)
        places: dict[int, tuple[int, int]] = {}
        for i, conversation in enumerate(conversations):
            try:
                prompt = opened.prompt(conversation)
                said = json.dumps([dict(message) for message in conversation])
                key = hashlib.blake2b(said.encode(), digest_size=16).hexdigest()
                request = Request(prompt=prompt, sampling=sampling, seed=seed, task=key)
                places[opened.engine.submit(request)] = (i, len(prompt))
            except (UserError, ValueError) as error:
                out[i] = Written(error=str(error))
        while places:
            for ticket, answer in opened.engine.poll():
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
        opened = _load_writer(self)
        out: list[Written] = [Written(error="never asked")] * len(conversations)
        prompts: dict[int, tuple[int, ...]] = {}
        for i, conversation in enumerate(conversations):
            try:
                prompts[i] = opened.prompt(conversation)
            except UserError as error:
                out[i] = Written(error=str(error))
        tokens = [opened.spellings.get(option, []) for option in options]
        for start in range(0, len(prompts), self.rows):
            places = list(prompts)[start : start + self.rows]
            logps = opened.engine.first([prompts[i] for i in places]).double()
            for i, logp in zip(places, logps, strict=True):
                chances = tuple(float(logp[ids].exp().sum()) for ids in tokens)
                out[i] = Written(chances=chances, prompt_tokens=len(prompts[i]), completion_tokens=1)
        return out


@dataclass(frozen=True)
class _Open:
    chat: Chat
    engine: NativeEngine

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
            raise UserError(f"a prompt of {len(prompt)} tokens exceeds the {self.engine.context} that fit")
        return prompt


@lru_cache(maxsize=4)
def _load_writer(writer: NativeWriter) -> _Open:
    """The writer's model with its engine; loaded once in each process."""
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
        raise UserError(str(error), where=writer.path, mend="take a Llama, Qwen, Gemma or Mistral") from None
    mask_tokens(model, {*pretrained.token_ids(tokenizer), *chat.stops})
    engine = NativeEngine(
        model,
        decode=lambda tokens: str(tokenizer.decode(tokens)),
        stop_tokens=sorted(chat.stops),
        config=NativeConfig(rows=writer.rows),
        context=context_of(model.config),
    )
    return _Open(chat, engine)


@dataclass(frozen=True, kw_only=True)
class WriterChoice:
    """Who writes: exactly one of endpoint and native."""

    endpoint: Endpoint | None = None
    """A server that speaks OpenAI's protocol."""
    native: NativeWriter | None = None
    """A model that the native engine runs here."""

    def __post_init__(self) -> None:
        if (self.endpoint is None) == (self.native is None):
            raise ValueError("name who writes: exactly one of endpoint and native")

    def writer(self) -> Writer:
        """The one that is named."""
        chosen: Writer | None = self.endpoint or self.native
        assert chosen is not None
        return chosen


@dataclass(frozen=True, kw_only=True)
class JudgeChoice(Judging, WriterChoice):
    """The judge as a recipe has it: `[verifier.judge]`, with `[verifier.judge.endpoint]` or `.native`."""

    rubric: str = "pointwise"
    """pointwise, pairwise or principled (ours), or a TOML file."""
    constitution: str = ""
    """A TOML file, or "ours"; for a rubric with {principles}."""
    verdict: Verdict = "text"
    """text: reasons, and a last line that is read; logprobs: one character, of which the chances are read."""

    def __post_init__(self) -> None:
        Judging.__post_init__(self)
        WriterChoice.__post_init__(self)

    def build(self) -> Judge:
        """The judge; UserError for a rubric or a constitution that cannot be read or do not go together."""
        constitution = None
        if self.constitution:
            constitution = read_constitution("" if self.constitution == "ours" else self.constitution)
        how = {f.name: getattr(self, f.name) for f in fields(Judging)}
        try:
            rubric = replace(read_rubric(self.rubric), verdict=self.verdict)
            return Judge(writer=self.writer(), rubric=rubric, constitution=constitution, **how)
        except ValueError as error:
            raise UserError(str(error), where="verifier.judge") from None
