"""Ask a model the problems of a suite, judge its answers, and write each to a file at once."""

import json
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.base import plain_template
from posttrain.base.atomic_files import put
from posttrain.base.chat import Chat
from posttrain.engines.protocol import Engine
from posttrain.evaluation.suites.likelihood import Continuation, encode_pair, log_likelihoods
from posttrain.evaluation.suites.results import Line, read_lines
from posttrain.evaluation.suites.suite import Suite, SuiteProblem
from posttrain.plan.model_info import ModelInfo
from posttrain.serving.answers import before_stop
from posttrain.types import Completion, Request, Sampling, UserError, Verdict
from posttrain.verifiers.pool import Pool

OnProgress = Callable[[int], None]
"""Receives the number of answers so far."""
TOGETHER = 32
"""Number of problems of choices that are computed and written together."""


@dataclass(frozen=True)
class SuiteProtocol:
    """Settings under which a model answers a suite."""

    suite: Suite
    chat: Chat
    sampling: Sampling
    samples: int
    seed: int
    context: int


def chat_of(suite: Suite, policy: ModelInfo, has_template: bool) -> Chat:
    """Return the chat of a suite's prompts; UserError if it needs a template and the model has none."""
    if not suite.chat:
        return replace(policy.chat, template=plain_template.NAME)
    if not has_template:
        fix = "gsm8k_5shot, humaneval_text and those of choices need none"
        raise UserError(f"--suite {suite.name}", "the model has no chat template", fix)
    return policy.chat


def answer_problems(
    protocol: SuiteProtocol,
    engine: Engine,
    problems: Sequence[SuiteProblem],
    file: Path,
    on_progress: OnProgress,
) -> None:
    """Append to the file a judged answer for each problem and sample that it lacks.

    Answers that could not be judged are replaced. Raises UserError for a task that the verifier cannot judge.
    """
    verifier = protocol.suite.verifier
    for problem in problems:
        if verifier is not None:
            verifier.check(problem.task)
    lines = [line for line in read_lines(file) if line["score"] is not None]
    put(file, "".join(map(_json, lines)))
    finished = {(line["id"], line["sample"]) for line in lines}
    make = _score_choices if verifier is None else _sample
    count = len(finished)
    on_progress(count)
    with file.open("a", encoding="utf-8") as out:
        for line in make(protocol, engine, problems, finished):
            out.write(_json(line))
            out.flush()
            count += 1
            on_progress(count)


def _json(line: Line) -> str:
    return json.dumps(line, allow_nan=False) + "\n"


# ---------------------------------------------------------------------- answers that are drawn


def _sample(
    protocol: SuiteProtocol, engine: Engine, problems: Sequence[SuiteProblem], finished: Set[tuple[str, int]]
) -> Iterator[Line]:
    """Yield the answers that are not finished, in the order in which they are judged."""
    verifier, pending, judging = protocol.suite.verifier, {}, {}
    assert verifier is not None
    with Pool(workers=2, deadline_s=60.0) as pool:
        for problem in problems:
            prompt = tuple(protocol.chat.render(problem.task.messages))
            room = min(protocol.sampling.max_new_tokens, protocol.context - len(prompt))
            sampling = replace(protocol.sampling, max_new_tokens=max(room, 1))
            for sample in range(protocol.samples):
                if (problem.task.id, sample) in finished:
                    continue
                if room < 1:
                    ticket = pool.submit(verifier, problem.task, "")
                    judging[ticket] = (problem, sample, prompt, _NO_ROOM, "")
                    continue
                request = Request(
                    prompt=prompt, sampling=sampling, seed=protocol.seed, task=problem.task.id, sample=sample
                )
                pending[engine.submit(request)] = (problem, sample, prompt)
        while pending or judging:
            for ticket, answer in engine.poll() if engine.busy else ():
                problem, sample, prompt = pending.pop(ticket)
                text = before_stop(answer.text, protocol.sampling.stop)
                judging[pool.submit(verifier, problem.task, text)] = (problem, sample, prompt, answer, text)
            for ticket, verdict in pool.poll(0.0 if engine.busy else 0.05):
                yield _line(protocol, *judging.pop(ticket), verdict)


_NO_ROOM = Completion(tokens=[], logp_gen=[], logp_policy=[], version=[], text="", stop="context")
"""Completion of a prompt that fills the context: judged as an empty answer, and counted as cut off."""


def _line(
    protocol: SuiteProtocol,
    problem: SuiteProblem,
    sample: int,
    prompt: Sequence[int],
    answer: Completion,
    text: str,
    verdict: Verdict,
) -> Line:
    vote = protocol.suite.verifier.vote(text) if protocol.suite.verifier else None
    return {
        "id": problem.task.id,
        "sample": sample,
        "prompt": str(protocol.chat.tokenizer.decode(list(prompt))),
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
    protocol: SuiteProtocol, engine: Engine, problems: Sequence[SuiteProblem], finished: Set[tuple[str, int]]
) -> Iterator[Line]:
    """Yield the choices that are not finished; each context is computed once for all its choices."""
    remaining = [problem for problem in problems if (problem.task.id, 0) not in finished]
    for start in range(0, len(remaining), TOGETHER):
        part = remaining[start : start + TOGETHER]
        logps = log_likelihoods(engine, [pair for problem in part for pair in _pairs(protocol, problem)])
        for problem in part:
            try:
                yield _choice(problem, [next(logps) for _ in problem.choices])
            except ValueError as error:
                raise UserError(problem.task.source, str(error)) from None


def _pairs(protocol: SuiteProtocol, problem: SuiteProblem) -> list[Continuation]:
    [message] = problem.task.messages

    def encode(text: str) -> list[int]:
        return protocol.chat.render([{**message, "content": text}])

    return [encode_pair(encode, message["content"], choice) for choice in problem.choices]


def _choice(problem: SuiteProblem, logps: Sequence[float]) -> Line:
    """Judge the likeliest choice (acc), and the likeliest per character without its blank (acc_norm)."""
    by_length = [logp / (len(c) - 1) for logp, c in zip(logps, problem.choices, strict=True)]
    choices = [max(range(len(values)), key=values.__getitem__) for values in (logps, by_length)]
    right = [float(choice == problem.gold) for choice in choices]
    return {
        "id": problem.task.id,
        "sample": 0,
        "prompt": problem.task.messages[0]["content"],
        "answer": problem.choices[choices[0]],
        "stop": "",
        "tokens": 0,
        "score": right[0],
        "label": "right" if right[0] else "wrong",
        "reason": f"number {choices[0]}, by characters {choices[1]}; {problem.gold} is right",
        "parts": dict(zip(("acc", "acc_norm"), right, strict=True)),
        "logps": list(logps),
    }
