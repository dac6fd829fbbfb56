"""Policies compared on the same prompts: how a judge scores their answers, and how far each has moved.

    ask      every policy answers every prompt, and is told the log-probability of what it said
    judge    one verifier, the same for all, scores the answers
    score    the first policy is asked how likely it finds each answer of the others

One model is in memory at a time, besides a judge's. The KL of a policy from the first is estimated from its
own answers y: the mean of log π(y) - log π_first(y), which is unbiased for KL(π ‖ π_first) of answers of
this temperature, cut at max_new_tokens.
"""

# ruff: noqa: RUF009  every configuration is frozen, so one default can serve all comparisons

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from posttrain.base.atomic_files import put
from posttrain.data import Data
from posttrain.data.arithmetic import Arithmetic
from posttrain.engines.native.engine import NativeConfig
from posttrain.evaluation.suites.results import lines_of
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
"""Answers that are scored in one batch."""
BUDGET = 4096
"""Packed tokens in one forward pass."""


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Which policies, on which prompts, judged by whom."""

    stages: tuple[str, ...]
    """Stages whose models are compared, the first being what KL is measured from."""
    base: str = ""
    """A model before the first stage, compared too, and then the first."""
    data: Data | None = None
    """The prompts; give it or arithmetic."""
    arithmetic: Arithmetic | None = None
    """Its held-out problems are the prompts."""
    limit: int = 64
    """Prompts at most."""
    samples: int = 1
    """Answers of each policy to a prompt."""
    verifier: VerifierChoice = VerifierChoice()
    """Who judges: a verifier, a judge or a reward model."""
    sampling: Sampling = Sampling()
    """At temperature 0, or from less than the whole vocabulary, no KL is measured."""
    engine: NativeConfig = NativeConfig()
    dtype: Dtype = "float32"
    """What the policies compute in; auto: bfloat16 where the device multiplies in it."""
    device: str = "auto"
    chat_template: str | None = None
    """In place of the tokenizers' own, as in [model]."""
    seed: int = 0
    workers: int = 2
    deadline_s: float = 60.0
    memory_mb: int = 8192
    """What one process of a judge may take."""
    examples: int = 6
    """Prompts whose answers the report shows side by side."""

    def __post_init__(self) -> None:
        if (self.data is None) == (self.arithmetic is None):
            raise ValueError("give the prompts: exactly one of data and arithmetic")
        if len(set(self.stages)) != len(self.stages):
            raise ValueError("stages must be named once each")
        if len(self.stages) + bool(self.base) < 2:
            raise ValueError("stages must name two policies or more, base among them")
        for name in ("limit", "samples", "workers", "memory_mb"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if self.examples < 0 or self.deadline_s <= 0:
            raise ValueError("examples must be 0 or more, and deadline_s above 0")

    @property
    def measures_kl(self) -> bool:
        """Whether answers are drawn from the policies themselves."""
        return not (self.sampling.greedy or self.sampling.filtered)

    def recipe(self, model: str) -> Recipe:
        """A recipe whose model answers these prompts, judged as here."""
        drawn = self.sampling if not self.sampling.greedy else replace(self.sampling, temperature=1.0)
        return Recipe(
            model=Model(path=model, dtype=self.dtype, device=self.device, chat_template=self.chat_template),
            method={"name": "reinforce"},
            task=TaskChoice.of(data=self.data, arithmetic=self.arithmetic),
            verifier=self.verifier,
            sampling=drawn,
            engine=EngineChoice(**asdict(self.engine)),
            rollout=Rollout(workers=self.workers, deadline_s=self.deadline_s, memory_mb=self.memory_mb),
            eval=Evaluation(limit=self.limit),
            run=RunSettings(seed=self.seed),
        )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one policy said to one prompt."""

    task: str
    sample: int
    prompt: str
    text: str
    tokens: tuple[int, ...]
    """Prompt and answer."""
    first: int
    """Where the answer begins."""
    stop: str
    score: float | None
    """None where the judge could not judge."""
    label: str
    reason: str
    logp: float
    """Of the answer, under the policy at the sampling temperature; 0 at temperature 0."""

    @property
    def length(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.first


def answers(compare: Compare, model: str, on_progress: Callable[[int, int], None]) -> list[Answer]:
    """What the model answers to the prompts, judged; `on_progress` is told how many of how many are done.

    Raises UserError for what `posttrain validate` would refuse: a prompt too long, a judge without a model;
    and RunError if most answers could not be judged.
    """
    chosen = plan_run(compare.recipe(model), silent)
    tasks = prompts(compare, chosen.resolved)
    rollouts = build_episode_runner(
        chosen.resolved, chosen.policy, build_native_engine(chosen.resolved.recipe, chosen.policy)
    )
    try:
        groups = rollouts.run(
            tasks, compare.samples, compare.sampling, lambda done: on_progress(done, len(tasks))
        )
    finally:
        rollouts.close()
        del rollouts
        gc.collect()  # the engine's weights go before the model is loaded again
    episodes = [e for group in groups for e in group]
    broken = [e.verdict for e in episodes if e.verdict.failed]
    if 2 * len(broken) > len(episodes):
        raise RunError(
            "compare",
            f"the judge failed on {len(broken)} of {len(episodes)} answers; "
            f"first cause: {broken[0].label}: {broken[0].reason}",
        )
    rows = [e.trajectory for e in episodes]
    logp = _logp(compare, chosen.policy, model, rows) if compare.measures_kl else [0.0] * len(rows)
    return [_answer(e, chosen.policy, own) for e, own in zip(episodes, logp, strict=True)]


def prompts(compare: Compare, resolved: Resolved) -> list[Task]:
    """The tasks that are asked, of those that the recipe has read."""
    return list(resolved.held_out if compare.arithmetic is not None else resolved.train)[: compare.limit]


def likelihoods(compare: Compare, model: str, said: Sequence[Answer]) -> list[float]:
    """log π(answer) under this model, whichever with the same tokens has given it."""
    policy = read_model_info(compare.recipe(model), silent)
    rows = [Trajectory.given(list(answer.tokens), answer.first) for answer in said]
    return _logp(compare, policy, model, rows)


def same_tokens(compare: Compare, models: Sequence[str]) -> bool:
    """Whether a token means the same to all of these models."""
    first, *others = (read_model_info(compare.recipe(m), silent).tokenizer.get_vocab() for m in models)
    return all(other == first for other in others)


def asked_alike(said: Mapping[str, Sequence[Answer]]) -> bool:
    """Whether all policies were shown the same tokens, which other templates make of the same prompts.

    What a policy finds of an answer to a question that it is never asked so is no term of a KL.
    """
    first, *others = ([(a.task, a.tokens[: a.first]) for a in found] for found in said.values())
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
    """log π of what was sampled in each row, computed as the learner does, whoever sampled it."""
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


def compared(
    compare: Compare,
    models: Mapping[str, str],
    folder: Path,
    say: Say,
    on_progress: Callable[[str, int, int], None],
) -> dict[str, list[tuple[Answer, float | None]]]:
    """Of each policy its answers, and each answer's log π - log π_first; in the order of `models`.

    The answers of a policy are kept in the folder as soon as all are there, so that a comparison that was
    broken off goes on with the next one. `on_progress` is told of whom how many of how many prompts are done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    said: dict[str, list[Answer]] = {}
    for name, model in models.items():
        file = folder / f"{name}.jsonl"
        if not file.exists():
            say(f"{name} answers")
            found = answers(compare, model, partial(on_progress, name))
            put(file, "".join(json.dumps(asdict(a), allow_nan=False) + "\n" for a in found))
        said[name] = [Answer(**{**row, "tokens": tuple(row["tokens"])}) for row in lines_of(file)]
    first, *others = models
    if not (compare.measures_kl and asked_alike(said) and same_tokens(compare, list(models.values()))):
        return {name: [(a, None) for a in found] for name, found in said.items()}
    say(f"{first} is asked how likely it finds the others' answers")
    under = iter(likelihoods(compare, models[first], [a for name in others for a in said[name]]))
    out: dict[str, list[tuple[Answer, float | None]]] = {first: [(a, 0.0) for a in said[first]]}
    for name in others:
        out[name] = [(a, a.logp - next(under)) for a in said[name]]
    return out
