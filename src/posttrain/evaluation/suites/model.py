"""The model under evaluation: its recipe, its engine, and the protocol of each suite."""

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
"""Date for templates that print the current date, so that prompts do not depend on the day."""


def resolve_target(
    target: str,
    sets: Sequence[str],
    model: str | None,
    dtype: str | None,
    say: Say,
    engine: EngineChoice | None = None,
) -> tuple[Recipe, Path | None]:
    """Return a recipe to sample from a model, a recipe or a run, and the adapter on its model or None."""
    recipe, adapter = Recipe(model=Model(path=model or target), method={"name": "grpo"}, task=NO_TASK), None
    if target.endswith(".toml") or is_run(Path(target)):
        _, recipe, adapter = target_of(Path(target), sets, model, say)
    elif sets:
        raise UserError("--set", "a model has no keys", "name a recipe or a run")
    settings = replace(recipe.model, dtype=dtype or recipe.model.dtype, date=DAY)  # type: ignore[arg-type]
    choice = engine or EngineChoice()
    return replace(recipe, model=settings, method={"name": "grpo"}, task=NO_TASK, engine=choice), adapter


@dataclass(frozen=True)
class EvaluatedModel:
    """A model under evaluation; its weights are loaded at the first use of `engine`."""

    recipe: Recipe
    adapter: Path | None
    seed: int
    told: Say

    @property
    def name(self) -> dict[str, Any]:
        """Identity of the model in a directory of results."""
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
        """Digest of the names, sizes and times of the weight files, and of the seed of random weights."""
        model = self.recipe.model
        folders = pretrained.resolve(model.path, say=self.told), self.adapter
        files = [f for folder in folders if folder for f in sorted(folder.glob("*.safetensors"))]
        stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        quantised = [model.quantize] if model.is_quantized else []
        return digest([stats, model.random_init and self.recipe.run.seed, *quantised])

    @cached_property
    def has_template(self) -> bool:
        """Whether the tokenizer or the recipe has a chat template."""
        path = pretrained.resolve(self.recipe.model.path, say=self.told)
        template = pretrained.load_tokenizer(path, require_chat_template=False).chat_template
        return bool(template or self.recipe.model.chat_template)

    @cached_property
    def policy(self) -> ModelInfo:
        template = self.recipe.model.chat_template if self.has_template else plain_template.NAME
        model = replace(self.recipe.model, chat_template=template)
        return read_model_info(replace(self.recipe, model=model), self.told)

    @cached_property
    def engine(self) -> Engine:
        return build_engine(self.recipe, self.policy, self.adapter)

    def asking(self, suite: Suite, samples: int | None, temperature: float | None) -> SuiteProtocol:
        """Return the protocol of a suite for this model.

        Raises UserError for several greedy answers, which would be equal, and for requests that vLLM does not
        support.
        """
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
            self.told(f"{suite.name} draws no answers: -n and --temperature have no effect")
        chat = chat_of(suite, self.policy, self.has_template)
        count = 1 if suite.verifier is None else count
        return SuiteProtocol(suite, chat, sampling, count, self.seed, self.policy.context)


def _check_vllm(suite: Suite, sampling: Sampling) -> None:
    """Raise UserError if vLLM does not support the requests of the suite."""
    if suite.verifier is None:
        problem = f"{suite.name} needs the likelihood of answers, which posttrain does not read from vLLM"
        raise UserError("--engine", problem, "use native")
    try:
        check_sampling(sampling)
    except ValueError as error:
        raise UserError("--engine", f"{suite.name} cannot be sampled: {error}", "use native") from None
