"""Compare policies on the same prompts: scores of their answers, and the distance of each from the first.

    answer   every policy answers every prompt and computes the log-probability of its answer
    judge    one verifier, the same for all, scores the answers
    score    the first policy computes the log-probability of each answer of the others

One model is in memory at a time, besides a judge's. The KL of a policy from the first is estimated from its
own answers y: the mean of log π(y) - log π_first(y), which is unbiased for KL(π ‖ π_first) of answers of
this temperature, cut at max_new_tokens.
"""

# ruff: noqa: RUF009  every configuration is frozen, so one default can serve all comparisons

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.base.atomic_files import put
from posttrain.data import Data
from posttrain.data.arithmetic import Arithmetic
from posttrain.engines.native.engine import NativeConfig
from posttrain.evaluation.suites.results import read_lines
from posttrain.learner.forward import Net, score_batch
from posttrain.loop.sampling import build_episode_runner, build_native_engine
from posttrain.math import masked
from posttrain.models.loading import Dtype
from posttrain.models.pretrained import silent
from posttrain.plan.model_info import ModelInfo, Say, load_weights, read_model_info
from posttrain.plan.plan import plan_run
from posttrain.plan.resolve import Resolved
from posttrain.recipe.recipe import EngineChoice, Model, Recipe
from posttrain.recipe.settings import Evaluation, Rollout, RunSettings
from posttrain.recipe.tasks import TaskChoice
from posttrain.recipe.verifier import VerifierChoice
from posttrain.types import Batch, Episode, RunError, Sampling, Task, Trajectory

AT_ONCE = 64
"""Number of answers scored in one batch."""
BUDGET = 4096
"""Packed tokens in one forward pass."""


@dataclass(frozen=True, kw_only=True)
class Compare:
    """The policies to compare, their prompts, and the judge."""

    stages: tuple[str, ...]
    """Stages whose models are compared; KL is measured from the first."""
    base: str = ""
    """A model from before the first stage, to compare too; KL is then measured from it."""
    data: Data | None = None
    """The prompts; set either data or arithmetic."""
    arithmetic: Arithmetic | None = None
    """Its held-out problems are the prompts."""
    limit: int = 64
    """Maximum number of prompts."""
    samples: int = 1
    """Number of answers of each policy to a prompt."""
    verifier: VerifierChoice = VerifierChoice()
    """The judge of all answers: a verifier, a judge or a reward model."""
    sampling: Sampling = Sampling()
    """No KL is measured at temperature 0, or with top_k, top_p or min_p."""
    engine: NativeConfig = NativeConfig()
    dtype: Dtype = "float32"
    """Type the policies compute in; auto: bfloat16 if the device multiplies in it."""
    device: str = "auto"
    chat_template: str | None = None
    """Template in place of the tokenizers', as in [model]."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, as in [model]."""
    seed: int = 0
    workers: int = 2
    deadline_s: float = 60.0
    memory_mb: int = 8192
    """Memory limit of one process of a judge."""
    examples: int = 6
    """Number of prompts whose answers the report shows side by side."""

    def __post_init__(self) -> None:
        if (self.data is None) == (self.arithmetic is None):
            raise ValueError("set exactly one of data and arithmetic, which hold the prompts")
        if len(set(self.stages)) != len(self.stages):
            raise ValueError("stages must be named once each")
        if len(self.stages) + bool(self.base) < 2:
            raise ValueError("stages must name two policies or more, counting base")
        for name in ("limit", "samples", "workers", "memory_mb"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if self.examples < 0 or self.deadline_s <= 0:
            raise ValueError("examples must be 0 or more, and deadline_s above 0")

    @property
    def measures_kl(self) -> bool:
        """Whether answers are drawn from the policies' own distributions."""
        return not (self.sampling.greedy or self.sampling.filtered)

    def recipe(self, model: str) -> Recipe:
        """Return a recipe whose model answers these prompts and whose verifier judges them."""
        sampling = self.sampling if not self.sampling.greedy else replace(self.sampling, temperature=1.0)
        return Recipe(
            model=Model(
                path=model,
                dtype=self.dtype,
                device=self.device,
                chat_template=self.chat_template,
                template_args=self.template_args,
            ),
            method={"name": "reinforce"},
            task=(TaskChoice.of(data=self.data, arithmetic=self.arithmetic),),
            verifier=self.verifier,
            sampling=sampling,
            engine=EngineChoice(**asdict(self.engine)),
            rollout=Rollout(workers=self.workers, deadline_s=self.deadline_s, memory_mb=self.memory_mb),
            eval=Evaluation(limit=self.limit),
            run=RunSettings(seed=self.seed),
        )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of a policy to a prompt, with its verdict."""

    task: str
    sample: int
    prompt: str
    text: str
    tokens: tuple[int, ...]
    """Tokens of prompt and answer."""
    first: int
    """Index of the first token of the answer."""
    stop: str
    score: float | None
    """None if the judge failed."""
    label: str
    reason: str
    logp: float
    """log π of the answer at the sampling temperature, nats; 0 if no KL is measured."""

    @property
    def length(self) -> int:
        """Number of tokens of the answer."""
        return len(self.tokens) - self.first


def answers(compare: Compare, model: str, on_progress: Callable[[int, int], None]) -> list[Answer]:
    """Return the judged answers of a model to the prompts; `on_progress` receives (prompts done, prompts).

    Raises UserError for what `posttrain validate` would refuse, such as a prompt too long or a judge without
    a model, and RunError if most answers could not be judged.
    """
    plan = plan_run(compare.recipe(model), silent)
    tasks = prompts(compare, plan.resolved)
    engine = build_native_engine(plan.resolved.recipe, plan.policy)
    rollouts = build_episode_runner(plan.resolved, plan.policy, engine)
    try:
        groups = rollouts.run(
            tasks, compare.samples, compare.sampling, lambda count: on_progress(count, len(tasks))
        )
    finally:
        rollouts.close()
        del rollouts, engine
        gc.collect()  # free the engine's weights before the model is loaded again
    episodes = [e for group in groups for e in group]
    failures = [e.verdict for e in episodes if e.verdict.failed]
    if 2 * len(failures) > len(episodes):
        raise RunError(
            "compare",
            f"the judge failed on {len(failures)} of {len(episodes)} answers; "
            f"first cause: {failures[0].label}: {failures[0].reason}",
        )
    rows = [e.trajectory for e in episodes]
    logps = _logp(compare, plan.policy, model, rows) if compare.measures_kl else [0.0] * len(rows)
    return [_answer(e, plan.policy, logp) for e, logp in zip(episodes, logps, strict=True)]


def prompts(compare: Compare, resolved: Resolved) -> list[Task]:
    """Return the tasks to answer: the first `limit` that the recipe read."""
    return list(resolved.held_out if compare.arithmetic is not None else resolved.train)[: compare.limit]


def likelihoods(compare: Compare, model: str, answers: Sequence[Answer]) -> list[float]:
    """Return log π(answer) under this model; the answers' policies must share its vocabulary."""
    policy = read_model_info(compare.recipe(model), silent)
    rows = [Trajectory.given(list(answer.tokens), answer.first) for answer in answers]
    return _logp(compare, policy, model, rows)


def share_vocabulary(compare: Compare, models: Sequence[str]) -> bool:
    """Return whether the models map tokens to the same texts."""
    first, *others = (read_model_info(compare.recipe(m), silent).tokenizer.get_vocab() for m in models)
    return all(other == first for other in others)


def share_prompts(answers: Mapping[str, Sequence[Answer]]) -> bool:
    """Return whether all policies had the same prompt tokens; with different templates they do not.

    The KL compares distributions over answers to the same prompt tokens.
    """
    first, *others = ([(a.task, a.tokens[: a.first]) for a in policy] for policy in answers.values())
    return all(other == first for other in others)


def _answer(episode: Episode, policy: ModelInfo, logp: float) -> Answer:
    row, verdict = episode.trajectory, episode.verdict
    return Answer(
        task=episode.task.id,
        sample=episode.sample,
        prompt=str(policy.tokenizer.decode(row.tokens[: row.prompt_length])),
        text=episode.response,
        tokens=tuple(row.tokens),
        first=row.prompt_length,
        stop=episode.stop,
        score=verdict.score,
        label=verdict.label,
        reason=verdict.reason,
        logp=logp,
    )


def _logp(compare: Compare, policy: ModelInfo, model: str, rows: Sequence[Trajectory]) -> list[float]:
    """Return Σ log π over the sampled tokens of each row, computed as the learner does."""
    loaded = load_weights(compare.recipe(model), policy)
    out: list[float] = []
    for start in range(0, len(rows), AT_ONCE):
        part = rows[start : start + AT_ONCE]
        batch = Batch.of(part, list(range(len(part))))
        logp = score_batch(Net(loaded), batch, compare.sampling.temperature, BUDGET).logp
        out += [float(x) for x in masked.row_sum(logp.double(), batch.mask)]
    del loaded
    gc.collect()
    return out


# ---------------------------------------------------------------------- in a directory


def compare_policies(
    compare: Compare,
    models: Mapping[str, str],
    folder: Path,
    say: Say,
    on_progress: Callable[[str, int, int], None],
) -> dict[str, list[tuple[Answer, float | None]]]:
    """Return for each policy its answers and each answer's log π - log π_first, in the order of `models`.

    Without a KL the second is None. The answers of a policy are written to the folder when all are complete,
    so that an interrupted comparison resumes with the next policy. `on_progress` receives (policy, prompts
    done, prompts).
    """
    folder.mkdir(parents=True, exist_ok=True)
    by_policy: dict[str, list[Answer]] = {}
    for name, model in models.items():
        file = folder / f"{name}.jsonl"
        if not file.exists():
            say(f"{name} answers")
            fresh = answers(compare, model, partial(on_progress, name))
            put(file, "".join(json.dumps(asdict(a), allow_nan=False) + "\n" for a in fresh))
        by_policy[name] = [Answer(**{**row, "tokens": tuple(row["tokens"])}) for row in read_lines(file)]
    first, *others = models
    names = list(models.values())
    if not (compare.measures_kl and share_prompts(by_policy) and share_vocabulary(compare, names)):
        return {name: [(a, None) for a in group] for name, group in by_policy.items()}
    say(f"{first} computes the likelihood of the others' answers")
    first_logps = iter(likelihoods(compare, models[first], [a for name in others for a in by_policy[name]]))
    out: dict[str, list[tuple[Answer, float | None]]] = {first: [(a, 0.0) for a in by_policy[first]]}
    for name in others:
        out[name] = [(a, a.logp - next(first_logps)) for a in by_policy[name]]
    return out
