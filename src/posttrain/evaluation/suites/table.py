"""The suites, each as a line: the source of its problems, how they are asked, and the judge."""

from dataclasses import replace
from typing import Any

from posttrain.base.kinds import find_kind
from posttrain.base.name_hints import did_you_mean
from posttrain.evaluation.suites import forms
from posttrain.evaluation.suites.harness_number import HarnessNumber
from posttrain.evaluation.suites.suite import HubSource, Metric, Shots, Suite
from posttrain.types import Sampling, UserError
from posttrain.verifiers.protocol import Verifier


def _verifier(name: str, **settings: Any) -> Verifier:
    verifier: Verifier = find_kind("verifiers", name, "verifier").load()(**settings)
    return verifier


def _greedy(tokens: int, *stop: str) -> Sampling:
    return Sampling(temperature=0.0, max_new_tokens=tokens, stop=stop)


_GSM8K = HubSource(path="openai/gsm8k", subset="main", split="test")
_MMLU = HubSource(path="cais/mmlu", subset="all", split="test")
_HUMANEVAL = HubSource(path="openai/openai_humaneval", split="test")
_SAMPLED = Sampling(temperature=0.6, top_p=0.95, max_new_tokens=8192)
_PASS = (Metric("pass@1"),)
_CHOICE = (Metric("acc_norm", "acc_norm"), Metric("acc", "acc"))
_FOLLOWED = (
    Metric("prompt_strict", "all_strict"),
    Metric("prompt_loose", "all_loose"),
    Metric("instruction_strict", "strict", "instructions"),
    Metric("instruction_loose", "loose", "instructions"),
)
_GSM8K_CHAT = Suite(
    name="gsm8k",
    about="grade-school mathematics, asked in the chat form; the last number counts",
    source=_GSM8K,
    form=forms.gsm8k,
    verifier=_verifier("number"),
)
_COMPETITION = Suite(
    name="math500",
    about="500 competition problems of MATH; the box counts",
    source=HubSource(path="HuggingFaceH4/MATH-500", split="test"),
    form=forms.boxed,
    sampling=_greedy(2048),
    verifier=_verifier("math", where="boxed"),
)
_AIME = replace(_COMPETITION, sampling=_SAMPLED, samples=16)
_FUNCTIONS = Suite(
    name="humaneval",
    about="164 Python functions to complete, asked in the chat form",
    source=_HUMANEVAL,
    form=forms.humaneval,
    sampling=_greedy(1024),
    verifier=_verifier("code"),
    metrics=_PASS,
)
_SENTENCES = replace(
    _FUNCTIONS,
    name="mbpp",
    about="500 Python functions from a sentence and three asserts",
    source=HubSource(path="google-research-datasets/mbpp", subset="full", split="test"),
    form=forms.mbpp,
)
_SCIENCE = Suite(
    name="arc_easy",
    about="school science, the easier questions; likelihood of each choice",
    source=HubSource(path="allenai/ai2_arc", subset="ARC-Easy", split="test"),
    form=forms.arc,
    chat=False,
    metrics=(Metric("acc", "acc"), Metric("acc_norm", "acc_norm")),
)
_LETTERS = replace(
    _SCIENCE,
    name="mmlu",
    about="57 subjects, four lettered choices; likelihood of each letter",
    source=_MMLU,
    form=forms.mmlu,
    metrics=(Metric("acc", "acc"),),
)

_LINES = (
    _GSM8K_CHAT,
    replace(
        _GSM8K_CHAT,
        name="gsm8k_5shot",
        about="the same behind five solved examples, as plain text: lm-evaluation-harness' gsm8k, version 3",
        form=forms.gsm8k_shots,
        chat=False,
        shots=Shots(replace(_GSM8K, split="train"), 5, seed=1234),
        sampling=_greedy(256, "Question:", "</s>", "<|im_end|>"),
        verifier=HarnessNumber(),
        metrics=(Metric("flexible", "flexible"), Metric("strict", "strict")),
    ),
    _COMPETITION,
    replace(
        _AIME,
        name="aime24",
        about="30 problems of AIME 2024, 16 answers each",
        source=HubSource(path="HuggingFaceH4/aime_2024", split="train"),
    ),
    replace(
        _AIME,
        name="aime25",
        about="30 problems of AIME 2025, 16 answers each",
        source=HubSource(path="math-ai/aime25", split="test"),
    ),
    _FUNCTIONS,
    replace(
        _FUNCTIONS,
        name="humaneval_text",
        about="the same as plain text to continue, as lm-evaluation-harness' humaneval",
        form=forms.humaneval_text,
        chat=False,
        sampling=_greedy(1024, "\nclass", "\ndef", "\n#", "\nif", "\nprint"),
    ),
    replace(
        _FUNCTIONS,
        name="humaneval_plus",
        about="the functions of humaneval under EvalPlus' many more tests",
        source=HubSource(path="evalplus/humanevalplus", split="test"),
    ),
    _SENTENCES,
    replace(
        _SENTENCES,
        name="mbpp_plus",
        about="378 of mbpp under EvalPlus' many more tests",
        source=HubSource(path="evalplus/mbppplus", split="test"),
    ),
    replace(
        _FUNCTIONS,
        name="stdio",
        about="programs that read and write, of a file in LiveCodeBench's form or with `cases`",
        source=None,
        form=forms.stdio,
        sampling=_greedy(2048),
    ),
    Suite(
        name="ifeval",
        about="541 requests with instructions that a program checks",
        source=HubSource(path="google/IFEval", split="train"),
        form=forms.ifeval,
        sampling=_greedy(1280),
        verifier=_verifier("instructions"),
        metrics=_FOLLOWED,
    ),
    _LETTERS,
    replace(
        _LETTERS,
        name="mmlu_5shot",
        about="the same behind the first five questions of its subject's dev split",
        shots=Shots(replace(_MMLU, split="dev"), 5, by="subject"),
    ),
    _SCIENCE,
    replace(
        _SCIENCE,
        name="arc_challenge",
        about="school science, the harder questions; likelihood of each choice",
        source=HubSource(path="allenai/ai2_arc", subset="ARC-Challenge", split="test"),
        metrics=_CHOICE,
    ),
    replace(
        _SCIENCE,
        name="hellaswag",
        about="endings of a scene; likelihood of each ending",
        source=HubSource(path="Rowan/hellaswag", split="validation"),
        form=forms.hellaswag,
        metrics=_CHOICE,
    ),
    Suite(
        name="own",
        about="records of yours, in any form that training reads, under the verifier that --verifier names",
        form=forms.own,
    ),
)
SUITES = {suite.name: suite for suite in _LINES}


def suite_of(name: str) -> Suite:
    """Return the suite of this name; UserError for an unknown name."""
    if name not in SUITES:
        fix = did_you_mean(name, SUITES) or f"there are {', '.join(SUITES)}"
        raise UserError("--suite", f"there is no suite {name!r}", fix)
    return SUITES[name]
