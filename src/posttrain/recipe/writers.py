"""Who writes for a judge, as a recipe names it: an endpoint, or a model that the native engine runs.

A judge knows only that something writes (`verifiers/judge/writer.py`). The native writer imports the engine
(`local_model.py`) and loads its model at its first request, in the process that asks, so that a recipe whose
judges need no model starts without PyTorch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from posttrain.types import Dtype, UserError
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
        return self.deadline_s

    def require(self) -> None:
        """UserError if the model is not there, is none, or has no chat template. Fetches and converts it."""
        from posttrain.recipe.local_model import require

        require(self)

    def write(
        self, conversations: Sequence[Conversation], *, max_tokens: int, temperature: float, seed: int
    ) -> list[Written]:
        """One answer for each conversation; what is drawn depends on it and on the seed alone."""
        from posttrain.recipe.local_model import load

        return load(self).write(conversations, max_tokens=max_tokens, temperature=temperature, seed=seed)

    def choose(self, conversations: Sequence[Conversation], options: Sequence[str]) -> list[Written]:
        """The chance of each option to begin each answer, summed over the tokens that are it up to blanks."""
        from posttrain.recipe.local_model import load

        return load(self).choose(conversations, options)


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
            raise UserError("verifier.judge", str(error)) from None
