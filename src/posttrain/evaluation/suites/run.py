"""Asks a model the problems of a suite, has its answers judged, and writes each down as soon as it is."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.base import plain_template
from posttrain.base.atomic_files import put
from posttrain.base.chat import Chat
from posttrain.engines.protocol import Engine
from posttrain.evaluation.suites.likelihood import Continuation, log_likelihoods, paired
from posttrain.evaluation.suites.results import Line, lines_of
from posttrain.evaluation.suites.suite import Suite, SuiteProblem
from posttrain.plan.model_info import ModelInfo
from posttrain.serving.answers import before_stop
from posttrain.types import Completion, Request, Sampling, UserError, Verdict
from posttrain.verifiers.pool import Pool

Seen = Callable[[int], None]
"""Told how many answers are there."""
TOGETHER = 32
"""Problems of choices that are written down together."""


@dataclass(frozen=True)
class SuiteProtocol:
    """How the problems of a suite are put to a model, and its answers judged."""

    suite: Suite
    chat: Chat
    sampling: Sampling
    samples: int
    seed: int
    context: int


def chat_of(suite: Suite, policy: ModelInfo, has_template: bool) -> Chat:
    """The template under which a suite asks; UserError where it needs one, and the model has none."""
    if not suite.chat:
        return replace(policy.chat, template=plain_template.NAME)
    if not has_template:
        texts = "gsm8k_5shot, humaneval_text and those of choices need none"
        raise UserError(f"--suite {suite.name}", "the model has no chat template", texts)
    return policy.chat


def answered(
    asking: SuiteProtocol, engine: Engine, problems: Sequence[SuiteProblem], file: Path, on_progress: Seen
) -> None:
    """Adds to the file an answer for each problem and sample that it lacks, judged.

    What could not be judged is asked again. UserError for a task that the verifier cannot judge.
    """
    verifier = asking.suite.verifier
    for problem in problems:
        if verifier is not None:
            verifier.check(problem.task)
    kept = [line for line in lines_of(file) if line["score"] is not None]
    put(file, "".join(map(_json, kept)))
    there = {(line["id"], line["sample"]) for line in kept}
    make = _score_choices if verifier is None else _sample
    count = len(there)
    on_progress(count)
    with file.open("a", encoding="utf-8") as out:
        for line in make(asking, engine, problems, there):
            out.write(_json(line))
            out.flush()
            count += 1
            on_progress(count)


def _json(line: Line) -> str:
    return json.dumps(line, allow_nan=False) + "\n"


# ---------------------------------------------------------------------- answers that are drawn


def _sample(
    asking: SuiteProtocol, engine: Engine, problems: Sequence[SuiteProblem], there: Iterable[tuple[str, int]]
) -> Iterator[Line]:
    """The answers that are not there, in the order in which they are judged."""
    there, asked, judging = set(there), {}, {}
    suite = asking.suite
    assert suite.verifier is not None
    with Pool(workers=2, deadline_s=60.0) as pool:
        for problem in problems:
            prompt = tuple(asking.chat.render(problem.task.messages))
            room = min(asking.sampling.max_new_tokens, asking.context - len(prompt))
            sampling = replace(asking.sampling, max_new_tokens=max(room, 1))
            for sample in range(asking.samples):
                if (problem.task.id, sample) in there:
                    continue
                if room < 1:
                    judged = pool.submit(suite.verifier, problem.task, "")
                    judging[judged] = (problem, sample, prompt, _NO_ROOM, "")
                    continue
                request = Request(
                    prompt=prompt, sampling=sampling, seed=asking.seed, task=problem.task.id, sample=sample
                )
                asked[engine.submit(request)] = (problem, sample, prompt)
        while asked or judging:
            for ticket, answer in engine.poll() if engine.busy else ():
                problem, sample, prompt = asked.pop(ticket)
                text = before_stop(answer.text, asking.sampling.stop)
                judged = pool.submit(suite.verifier, problem.task, text)
                judging[judged] = (problem, sample, prompt, answer, text)
            for ticket, verdict in pool.poll(0.0 if engine.busy else 0.05):
                yield _line(asking, *judging.pop(ticket), verdict)


_NO_ROOM = Completion(tokens=[], logp_gen=[], logp_policy=[], version=[], text="", stop="context")
"""Of a prompt that fills the context: it is judged as an empty answer, and counted as cut off."""


def _line(
    asking: SuiteProtocol,
    problem: SuiteProblem,
    sample: int,
    prompt: Sequence[int],
    answer: Completion,
    text: str,
    verdict: Verdict,
) -> Line:
    vote = asking.suite.verifier.vote(text) if asking.suite.verifier else None
    return {
        "id": problem.task.id,
        "sample": sample,
        "prompt": str(asking.chat.tokenizer.decode(list(prompt))),
        "answer": text,
        "stop": answer.stop,
        "tokens": len(answer.tokens),
        "score": verdict.score,
        "label": verdict.label,
        "reason": verdict.reason,
        "parts": {**problem.counts, **verdict.parts},
        **({} if vote is None else {"key": vote}),
    }


# ---------------------------------------------------------------------- choices


def _score_choices(
    asking: SuiteProtocol, engine: Engine, problems: Sequence[SuiteProblem], there: Iterable[tuple[str, int]]
) -> Iterator[Line]:
    """The choices that are not there; each context is computed once for all its choices."""
    there = set(there)
    left = [problem for problem in problems if (problem.task.id, 0) not in there]
    for start in range(0, len(left), TOGETHER):
        part = left[start : start + TOGETHER]
        found = log_likelihoods(engine, [pair for problem in part for pair in _pairs(asking, problem)])
        for problem in part:
            try:
                yield _choice(problem, [next(found) for _ in problem.choices])
            except ValueError as error:
                raise UserError(problem.task.source, str(error)) from None


def _pairs(asking: SuiteProtocol, problem: SuiteProblem) -> list[Continuation]:
    [message] = problem.task.messages

    def encode(text: str) -> list[int]:
        return asking.chat.render([{**message, "content": text}])

    return [paired(encode, message["content"], choice) for choice in problem.choices]


def _choice(problem: SuiteProblem, logps: Sequence[float]) -> Line:
    """acc takes the likeliest choice, acc_norm the likeliest by character, without the blank before it."""
    by_length = [logp / (len(c) - 1) for logp, c in zip(logps, problem.choices, strict=True)]
    taken = [max(range(len(values)), key=values.__getitem__) for values in (logps, by_length)]
    right = [float(choice == problem.gold) for choice in taken]
    return {
        "id": problem.task.id,
        "sample": 0,
        "prompt": problem.task.messages[0]["content"],
        "answer": problem.choices[taken[0]],
        "stop": "",
        "tokens": 0,
        "score": right[0],
        "label": "right" if right[0] else "wrong",
        "reason": f"number {taken[0]}, by characters {taken[1]}; {problem.gold} is right",
        "parts": dict(zip(("acc", "acc_norm"), right, strict=True)),
        "logps": list(logps),
    }
