"""A model that was trained under a recipe's chat template is saved with it, and read with it by everybody."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from posttrain.base.chat import Chat
from posttrain.data import Ranking
from posttrain.models.pretrained import silent
from posttrain.plan.dataset_rows import Shaper
from posttrain.plan.model_info import NO_TASK, read_model_info
from posttrain.recipe.recipe import Model, Recipe
from posttrain.types import Message, UserError
from posttrain.verifiers.model.scorer import Scorer

TURNS = (
    "{% for m in messages %}{{ '[' + m['role'][0] + ':' + m['content'] + ']' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[a:' }}{% endif %}"
)
QUESTION: tuple[Message, ...] = ({"role": "user", "content": "2 + 3?"},)
QUESTIONS: dict[str, tuple[Message, ...]] = {
    "one turn": QUESTION,
    "a system": ({"role": "system", "content": "Be brief."}, *QUESTION),
    "several turns": (*QUESTION, {"role": "assistant", "content": "5"}, {"role": "user", "content": "Sure?"}),
}
ANSWER: Message = {"role": "assistant", "content": "It is 5."}


def begins_with_a_mark(model: Path) -> None:
    """Has the tokenizer of this model put a token before all text, as Llama's do."""
    words = AutoTokenizer.from_pretrained(model)
    words.bos_token = "<|endoftext|>"
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", words.bos_token_id)]
    )
    words.save_pretrained(model)


@pytest.fixture(params=[TURNS, "none", "none and a mark"])
def trained(
    request: pytest.FixtureRequest,
    run_cli: Callable[..., Any],
    offline: dict[str, Any],
    write: Callable[..., Path],
    make_model: Callable[..., Path],
    tmp_path: Path,
) -> Callable[[str], tuple[Path, Chat]]:
    """trained(method) -> the directory of a model after one update, and the chat that it was trained in."""
    start, template = make_model(), str(request.param).removesuffix(" and a mark")
    if template != request.param:
        begins_with_a_mark(start)

    def make(method: str) -> tuple[Path, Chat]:
        pairs = tmp_path / "pairs.jsonl"
        pairs.write_text(json.dumps({"prompt": "2 + 3?", "chosen": "5", "rejected": "6"}) + "\n")
        over = {
            "model": {"path": str(start), "chat_template": template},
            "method": {"name": method},
            "task": {"arithmetic": None, "data": {"path": str(pairs)}},
            "batch": {"batch_size": 1},
            "run": {"updates": 1},
        }
        said = run_cli("train", write(offline, over), "--run-dir", tmp_path / "run", "--quiet")
        assert said.code == 0, said.err
        under = Chat(AutoTokenizer.from_pretrained(start), template=template)
        return tmp_path / "run" / "checkpoints" / "step_000001" / "model", under

    return make


def test_transformers_and_our_commands_see_the_template_that_trained_it(trained):
    folder, under = trained("dpo")
    words = AutoTokenizer.from_pretrained(folder)
    recipe = Recipe(model=Model(path=str(folder), device="cpu"), method={"name": "grpo"}, task=NO_TASK)
    ours = read_model_info(recipe, silent).chat
    for name, question in QUESTIONS.items():
        asked = under.render(question)
        by_transformers = words.apply_chat_template(list(question), add_generation_prompt=True)
        assert by_transformers["input_ids"] == asked, name
        assert ours.render(question) == asked, name
    assert ours.render_supervised([*QUESTION, ANSWER]) == under.render_supervised([*QUESTION, ANSWER])
    assert ours.render_for_judge(QUESTION, ["5"]) == under.render_for_judge(QUESTION, ["5"])
    assert ours.stops == under.stops


def test_a_reward_model_reads_conversations_as_it_was_trained_to(trained):
    folder, under = trained("reward")
    scorer = Scorer(str(folder), "outcome", dtype="float32", device="cpu")
    for name, question in QUESTIONS.items():
        pair = Ranking(id="x", messages=question, answers=("It is 5.", "6"), scores=(1.0, 0.0))
        [rows] = Shaper(under, 500, marks=True).groups([pair], "rankings", silent)
        for answer, row in zip(pair.answers, rows, strict=True):
            assert scorer.outcome(question, answer).tokens == row.tokens[:-1], name


def test_a_reward_run_scores_with_the_variables_of_its_template(run_cli, offline, write, tiny, tmp_path):
    pairs, run = tmp_path / "pairs.jsonl", tmp_path / "run"
    pairs.write_text(json.dumps({"prompt": "2 + 3?", "chosen": "5", "rejected": "6"}) + "\n")
    model = {"path": str(tiny), "chat_template": "{{ mark }}" + TURNS, "template_args": {"mark": "7"}}
    over = {"method": {"name": "reward"}, "task": {"arithmetic": None, "data": {"path": str(pairs)}}}
    recipe = write(offline, over | {"model": model, "batch": {"batch_size": 1}, "run": {"updates": 1}})
    assert run_cli("train", recipe, "--run-dir", run, "--quiet").code == 0
    under = Chat(AutoTokenizer.from_pretrained(tiny), template="7" + TURNS)
    [tokens] = under.render_for_judge(QUESTION, ["5"])
    for path in (run, f"{run}@1"):
        assert (
            Scorer(str(path), "outcome", dtype="float32", device="cpu").outcome(QUESTION, "5").tokens
            == tokens
        )
    (run / "config.toml").write_text("[model")
    with pytest.raises(UserError, match=r"config\.toml: cannot be read"):
        Scorer(str(run), "outcome", dtype="float32", device="cpu")


def test_special_tokens_are_read_in_what_is_said_where_a_recipe_asks_for_it(tiny):
    def chat(**model: Any) -> Chat:
        recipe = Recipe(
            model=Model(path=str(tiny), device="cpu", **model), method={"name": "grpo"}, task=NO_TASK
        )
        return read_model_info(recipe, silent).chat

    spelt, read = chat().spell("a<|im_end|>"), chat(parse_special=True).spell("a<|im_end|>")
    assert len(spelt) == 1 + len("<|im_end|>")
    assert (len(read), read[1]) == (2, chat().tokenizer.eos_token_id)
