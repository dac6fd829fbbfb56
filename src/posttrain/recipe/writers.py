"""The table of a judge, and the language model behind it: an endpoint, or one that the native engine runs.

A judge sees the protocol `verifiers/judge/writer.py: Writer` alone. `NativeWriter` imports the engine
(`local_model.py`) and loads its model at the first request, in the process that asks, so a recipe whose
judges need no local model starts without PyTorch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from posttrain.types import Dtype, UserError
from posttrain.verifiers.judge.checklist import Checking, Checklist
from posttrain.verifiers.judge.constitution import read_constitution
from posttrain.verifiers.judge.endpoint import Endpoint
from posttrain.verifiers.judge.judge import Judge, Judging
from posttrain.verifiers.judge.listwise import Listwise
from posttrain.verifiers.judge.rubric import Verdict, read_rubric
from posttrain.verifiers.judge.writer import Conversation, Writer, Written


@dataclass(frozen=True, kw_only=True)
class NativeWriter:
    """A model that the native engine runs, in the process that judges."""

    path: str
    """As model.path: a Hub id, a directory with safetensors files, a .gguf file, or pypi:PACKAGE."""
    dtype: Dtype = "auto"
    """Numeric type of the model; auto: bfloat16 on a device that multiplies in it, else float32."""
    device: str = "cpu"
    """cpu, cuda, cuda:1; auto: a GPU if there is one. Every worker process loads a copy of the model."""
    chat_template: str | None = None
    """A Jinja template that replaces the tokenizer's; "none" for plain text."""
    rows: int = 16
    """Number of answers that are generated at the same time."""
    deadline_s: float = 600.0
    """Seconds for one answer; those of the first answer include loading the model."""

    def __post_init__(self) -> None:
        if self.rows < 1 or not 0 < self.deadline_s < 86_400:
            raise ValueError("rows must be 1 or more, and deadline_s positive and under a day")

    @property
    def budget_s(self) -> float:
        return self.deadline_s

    def require(self) -> None:
        """Download and convert the model. Raises UserError if it cannot be loaded or has no chat template."""
        from posttrain.recipe.local_model import require

        require(self)

    def write(
        self, conversations: Sequence[Conversation], *, max_tokens: int, temperature: float, seed: int
    ) -> list[Written]:
        """Generate an answer to each conversation, which depends on that conversation and the seed alone."""
        from posttrain.recipe.local_model import load

        return load(self).write(conversations, max_tokens=max_tokens, temperature=temperature, seed=seed)

    def choose(self, conversations: Sequence[Conversation], options: Sequence[str]) -> list[Written]:
        """Return for each conversation the probability of each option as the answer's first token.

        Tokens that differ from an option in white space alone count as that option.
        """
        from posttrain.recipe.local_model import load

        return load(self).choose(conversations, options)


@dataclass(frozen=True, kw_only=True)
class WriterChoice:
    """The language model that writes: exactly one of endpoint and native."""

    endpoint: Endpoint | None = None
    """A server with the OpenAI API."""
    native: NativeWriter | None = None
    """A model that the native engine runs on this machine."""

    def __post_init__(self) -> None:
        if (self.endpoint is None) == (self.native is None):
            raise ValueError("name who writes: exactly one of endpoint and native")

    def writer(self) -> Writer:
        """Return the endpoint or the native model, whichever is given."""
        writer: Writer | None = self.endpoint or self.native
        assert writer is not None
        return writer


@dataclass(frozen=True, kw_only=True)
class JudgeChoice(Judging, WriterChoice):
    """A judge: `[verifier.judge]`, with `[verifier.judge.endpoint]` or `[verifier.judge.native]`."""

    rubric: str = "pointwise"
    """pointwise, pairwise, listwise or principled (built in), or a TOML file of yours."""
    constitution: str = ""
    """The principles for a rubric with {principles}: a TOML file, or "ours" for those built in."""
    verdict: Verdict = "text"
    """text: the judge writes its reasons, and the verdict is read from its last line. logprobs: the judge
    writes one character, and the verdict is read from the probabilities of the options."""

    def __post_init__(self) -> None:
        Judging.__post_init__(self)
        WriterChoice.__post_init__(self)

    def build(self) -> Judge | Listwise:
        """Build the judge, of whole groups for a listwise rubric.

        Raises UserError if rubric or constitution cannot be read, or do not match.
        """
        constitution = None
        if self.constitution:
            constitution = read_constitution("" if self.constitution == "ours" else self.constitution)
        judging = {f.name: getattr(self, f.name) for f in fields(Judging)}
        try:
            rubric = replace(read_rubric(self.rubric), verdict=self.verdict)
            judge = Listwise if rubric.kind == "listwise" else Judge
            return judge(writer=self.writer(), rubric=rubric, constitution=constitution, **judging)
        except ValueError as error:
            raise UserError("verifier.judge", str(error)) from None


@dataclass(frozen=True, kw_only=True)
class RubricChoice(Checking, WriterChoice):
    """A rubric by task: `[verifier.rubric]`, with a table `endpoint` or `native` in it."""

    def __post_init__(self) -> None:
        Checking.__post_init__(self)
        WriterChoice.__post_init__(self)

    def build(self) -> Checklist:
        """Build the verifier with its writer."""
        return Checklist(writer=self.writer(), **{f.name: getattr(self, f.name) for f in fields(Checking)})
