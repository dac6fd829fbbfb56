"""The model that is evaluated."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from posttrain.base import plain_template
from posttrain.engines.protocol import Engine
from posttrain.engines.vllm.asking import check_sampling
from posttrain.evaluation.suites.run import SuiteProtocol, chat_of
from posttrain.evaluation.suites.suite import Suite, digest
from posttrain.loop.sampling import build_engine
from posttrain.models import pretrained
from posttrain.plan.model_info import NO_TASK, ModelInfo, Say, read_model_info
from posttrain.recipe.document import is_run
from posttrain.recipe.recipe import EngineChoice, Model, Recipe
from posttrain.recipe.target import target_of
from posttrain.types import Sampling, UserError

DAY = "2025-01-01"
"""What templates that show the day are told, so that what was asked on two days can be compared."""


def model_of(
    target: str,
    sets: Sequence[str],
    model: str | None,
    dtype: str | None,
    told: Say,
    engine: EngineChoice | None = None,
) -> tuple[Recipe, Path | None]:
    """A recipe that holds what is named, to be sampled from, and the adapter on top of it."""
    recipe, adapter = Recipe(model=Model(path=model or target), method={"name": "grpo"}, task=NO_TASK), None
    if target.endswith(".toml") or is_run(Path(target)):
        _, recipe, adapter = target_of(Path(target), sets, model, told)
    elif sets:
        raise UserError("--set", "a model has no keys", "name a recipe or a run")
    asked = replace(recipe.model, dtype=dtype or recipe.model.dtype, date=DAY)  # type: ignore[arg-type]
    draws = engine or EngineChoice()
    return replace(recipe, model=asked, method={"name": "grpo"}, task=NO_TASK, engine=draws), adapter


@dataclass(frozen=True)
class Evaluated:
    """The model that answers; its weights are read when a first answer is wanted."""

    recipe: Recipe
    adapter: Path | None
    seed: int
    told: Say

    @property
    def name(self) -> dict[str, Any]:
        """What a directory of results says of the model."""
        model, engine = self.recipe.model, self.recipe.engine.name
        path = str(self.adapter or model.path)
        return {
            "model": path,
            "dtype": model.dtype,
            "seed": self.seed,
            "engine": engine,
            "weights": self._weights,
        }

    @property
    def _weights(self) -> str:
        """A digest of the names, sizes and times of the files of weights; of drawn ones also of the seed."""
        model = self.recipe.model
        folders = pretrained.resolve(model.path, say=self.told), self.adapter
        files = [f for folder in folders if folder for f in sorted(folder.glob("*.safetensors"))]
        stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        return digest([stats, model.random_init and self.recipe.run.seed])

    @cached_property
    def has_template(self) -> bool:
        """Whether the model can be asked as a chat."""
        path = pretrained.resolve(self.recipe.model.path, say=self.told)
        own = pretrained.load_tokenizer(path, require_chat_template=False).chat_template
        return bool(own or self.recipe.model.chat_template)

    @cached_property
    def policy(self) -> ModelInfo:
        """What surrounds the weights."""
        template = self.recipe.model.chat_template if self.has_template else plain_template.NAME
        model = replace(self.recipe.model, chat_template=template)
        return read_model_info(replace(self.recipe, model=model), self.told)

    @cached_property
    def engine(self) -> Engine:
        """The engine, with the weights."""
        return build_engine(self.recipe, self.policy, self.adapter)

    def asking(self, suite: Suite, samples: int | None, temperature: float | None) -> SuiteProtocol:
        """How this model is asked a suite; UserError for several greedy answers, which would be the same,
        and for what vLLM cannot be asked."""
        sampling = suite.sampling
        if temperature is not None:
            sampling = replace(sampling, temperature=temperature)
        if self.recipe.engine.name == "vllm":
            _check_vllm(suite, sampling)
        count = samples or suite.samples
        if suite.verifier is not None and sampling.greedy and count > 1:
            if samples:
                raise UserError("-n", "greedy answers are all the same", "give --temperature, as 0.6")
            count = 1
        if suite.verifier is None and (samples or temperature):
            self.told(f"{suite.name} draws nothing: -n and --temperature change nothing of it")
        chat = chat_of(suite, self.policy, self.has_template)
        count = 1 if suite.verifier is None else count
        return SuiteProtocol(suite, chat, sampling, count, self.seed, self.policy.context)


def _check_vllm(suite: Suite, sampling: Sampling) -> None:
    """UserError where vLLM would not give what the suite needs."""
    problem = None
    if suite.verifier is None:
        problem = f"{suite.name} asks how likely given answers are, which vLLM is not asked here"
    else:
        try:
            check_sampling(sampling)
        except ValueError as error:
            problem = f"{suite.name} cannot be drawn: {error}"
    if problem:
        raise UserError("--engine", problem, "take native")
