"""evals against lm-evaluation-harness: the same prompts as strings, verdicts and likelihoods."""

import json
import math

import pytest

from posttrain.evaluation.suites.results import read_lines
from posttrain.evaluation.suites.suite import read
from posttrain.evaluation.suites.table import suite_of

harness = pytest.importorskip("lm_eval", reason="needs the extra lm-eval")
pytestmark = pytest.mark.filterwarnings("ignore")  # the harness' own, and those of what it imports

GSM8K = """task: gsm8k_here
dataset_path: json
dataset_kwargs: {{data_files: {{train: {train}, test: {test}}}}}
output_type: generate_until
training_split: train
fewshot_split: train
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_case: true
    ignore_punctuation: false
    regexes_to_ignore: [",", "\\\\$", "(?s).*#### ", "\\\\.$"]
generation_kwargs: {{until: ["Question:", "</s>", "<|im_end|>"], do_sample: false, temperature: 0.0}}
num_fewshot: 5
filter_list:
  - name: strict-match
    filter: [{{function: regex, regex_pattern: "#### (\\\\-?[0-9\\\\.\\\\,]+)"}}, {{function: take_first}}]
  - name: flexible-extract
    filter:
      - {{function: regex, group_select: -1, regex_pattern: "(-?[$0-9.,]{{2,}})|(-?[0-9]+)"}}
      - {{function: take_first}}
"""
ARC = """task: arc_here
dataset_path: json
dataset_kwargs: {{data_files: {{test: {test}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{choices.label.index(answerKey)}}}}"
doc_to_choice: "{{{{choices.text}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
LAST = """task: last_here
dataset_path: json
dataset_kwargs: {{data_files: {{test: {test}}}}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
SCHOOL = [
    {"question": f"What is {n} + {n}?", "answer": f"It is {2 * n}.\n#### {2 * n:,}"} for n in range(495, 525)
]
CHOICES = [
    {"question": f"{a}+{a}?", "answerKey": "B"}
    | {"choices": {"text": ["one", str(2 * a), "many of them", "7"], "label": list("ABCD")}}
    for a in range(2, 8)
]  # fmt: skip


@pytest.fixture
def asked(make_model, records, tmp_path, monkeypatch):
    """asked(yaml, model, **files) -> the samples of the task by the place of their documents."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from lm_eval.tasks import TaskManager

    def run(text, model, **files):
        (tmp_path / "task.yaml").write_text(text.format(**files))
        found = harness.simple_evaluate(
            model=model,
            tasks=[text.partition("\n")[0].removeprefix("task: ")],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            log_samples=True,
            bootstrap_iters=0,
        )
        [samples] = found["samples"].values()
        return samples

    return run


@pytest.fixture(scope="module")
def roomy(make_model):
    """A random model that has room for six questions in letters."""
    return make_model(max_position_embeddings=2048, seed=3)


def ours(path):
    from posttrain.evaluation.suites.harness import register

    return register()(path=str(path), dtype="float32")


def theirs(path):
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(path), dtype="float32", device="cpu", batch_size=1)


def test_gsm8k_is_asked_and_judged_as_by_the_harness(asked, roomy, records, run_cli, tmp_path):
    train, test = records(*SCHOOL[10:], name="train"), records(*SCHOOL[:10], name="test")
    samples = asked(GSM8K, ours(roomy), train=train, test=test)
    suite = suite_of("gsm8k_5shot")
    problems = read(suite, str(test), str(train), None)
    for sample in samples:
        prompt, options = sample["arguments"][0]
        assert prompt == problems[sample["doc_id"]].task.messages[0]["content"]
        assert tuple(options["until"]) == suite.sampling.stop
    files = ("--data", f"gsm8k_5shot={test}", "--data", f"gsm8k_5shot.shots={train}")
    words = ("--suite", "gsm8k_5shot", "--out", tmp_path / "out", "--dtype", "float32", "--json")
    said = run_cli("eval", roomy, *words, *files)
    assert said.code == 0, said.err
    mine = {line["id"]: line for line in read_lines(tmp_path / "out" / "gsm8k_5shot.jsonl")}
    for sample in samples:
        line = mine[str(sample["doc_id"])]
        part = "strict" if sample["filter"] == "strict-match" else "flexible"
        assert line["answer"] == sample["resps"][0][0]
        assert line["parts"][part] == sample["exact_match"]


@pytest.mark.parametrize(
    "answer",
    ["#### 1,000", "#### 1000.", "so $1000", "#### 1000.00", "#### 7 then 1000", "no number", "-1000",
     "#### 1,000 or 3.", "1000 %"],
)  # fmt: skip
def test_verdicts_agree_on_answers_that_a_model_might_give(asked, records, answer):
    class Says(harness.api.model.LM):
        def generate_until(self, requests, **_):
            return [answer] * len(requests)

        def loglikelihood(self, requests, **_):
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    train, test = records(*SCHOOL[10:], name="train"), records(SCHOOL[5], name="test")
    samples = asked(GSM8K, Says(), train=train, test=test)
    suite = suite_of("gsm8k_5shot")
    [problem] = read(suite, str(test), str(train), None)
    parts = suite.verifier(problem.task, answer).parts
    assert {s["filter"]: s["exact_match"] for s in samples} == {
        "strict-match": parts["strict"],
        "flexible-extract": parts["flexible"],
    }


def test_likelihoods_of_choices_are_those_of_transformers(asked, roomy, records, run_cli, tmp_path):
    test = records(*CHOICES, name="test")
    mine, hf = (asked(ARC, model, test=test) for model in (ours(roomy), theirs(roomy)))
    words = ("--suite", "arc_easy", "--data", test, "--out", tmp_path / "out", "--dtype", "float32")
    assert run_cli("eval", roomy, *words, "--json").code == 0
    suite = {line["id"]: line for line in read_lines(tmp_path / "out" / "arc_easy.jsonl")}
    for one, other in zip(mine, hf, strict=True):
        line = suite[str(one["doc_id"])]
        found = [[float(resp[0][0]) for resp in sample["resps"]] for sample in (one, other)]
        assert found[0] == pytest.approx(found[1], abs=1e-3)
        assert line["logps"] == pytest.approx(found[1], abs=1e-3)
        assert (one["acc"], one["acc_norm"]) == (other["acc"], other["acc_norm"])
        assert line["parts"] == {"acc": one["acc"], "acc_norm": one["acc_norm"]}


def test_whether_greedy_decoding_says_it_is_known(asked, able, records):
    rows = [{"question": f"{a}+{b}=", "answer": "x" if b == 2 else "4"} for a in (2, 3) for b in (2, 3, 4)]
    test = records(*rows, name="test")
    mine, hf = (asked(LAST, model, test=test) for model in (ours(able), theirs(able)))
    for one, other in zip(mine, hf, strict=True):
        assert one["acc"] == other["acc"]
        assert math.isclose(float(one["resps"][0][0][0]), float(other["resps"][0][0][0]), abs_tol=1e-3)


def test_the_command_line_knows_the_model(roomy, records, tmp_path, monkeypatch, capfd):
    from posttrain.evaluation.suites import harness as adapter

    test = records(*CHOICES[:2], name="test")
    (tmp_path / "task.yaml").write_text(ARC.format(test=test))
    words = ["--model", "posttrain", "--model_args", f"path={roomy}", "--tasks", "arc_here"]
    words += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out.json")]
    monkeypatch.setattr("sys.argv", ["lm_eval", *words])
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert adapter.main() == 0
    [file] = tmp_path.glob("out*.json")
    assert "acc,none" in json.loads(file.read_text())["results"]["arc_here"]
