"""A reward model of ours says the same to its trainer, to transformers, to a verifier, and to a critic."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    Qwen2Config,
    Qwen2ForTokenClassification,
)

from posttrain.base.chat import Chat
from posttrain.data import Ranking, SteppedSolution
from posttrain.learner.critic import CriticModel
from posttrain.learner.learner import Learner
from posttrain.learner.lora import Lora
from posttrain.learner.optim import Optim
from posttrain.loop import saving
from posttrain.methods.table import PPO, PROCESS_REWARD, REWARD
from posttrain.models import heads
from posttrain.models.loading import quiet
from posttrain.models.pretrained import load_config, load_model
from posttrain.plan.dataset_rows import Group, Shaper, numbered
from posttrain.recipe.recipe import Checkpoints
from posttrain.types import Batch, Message, Task, UserError
from posttrain.verifiers.model.verifier import RewardModel

MICROBATCH = 40
"""Packed tokens: more than one pack, and the same ones wherever numbers are to be the same bit for bit."""
UNMARKED = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
UNMARKED += "{% if add_generation_prompt %}assistant: {% endif %}"
"""A template whose turns end in no token of their own."""
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
ONE: tuple[Message, ...] = ({"role": "user", "content": "2+3?"},)
SEVERAL: tuple[Message, ...] = (
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 2+3?"},
)
RANKINGS = [
    Ranking(id="one", messages=ONE, answers=("five", "it is 6"), scores=(1.0, 0.0)),
    Ranking(id="several", messages=SEVERAL, answers=("5", "no <|im_end|> idea", "7"), scores=(2.0, 1.0, 0.0)),
]
SOLUTIONS = [
    SteppedSolution(id="one", messages=ONE, steps=("2+2=4", "so 4+1=5"), labels=(1.0, 0.0)),
    SteppedSolution(
        id="several", messages=SEVERAL, steps=("well\n\nthen", "5", "or 6"), labels=(1.0, None, 0.0)
    ),
]
Make = Callable[..., Any]


@dataclass(frozen=True)
class Trained:
    """A reward model that has learnt for three steps, and what it was saved as."""

    learner: Learner
    groups: list[Group]
    saved: Path

    def numbers(self) -> list[list[float]]:
        """What the trainer's own head says at each row's marks."""
        batch = Batch.of(*numbered(self.groups))
        said = self.learner.read(batch)
        return [said[i, batch.mask[i]].tolist() for i in range(len(batch))]


@pytest.fixture
def trained(tiny: Path, tmp_path: Path) -> Make:
    """trained(template, steps=..., lora=..., pad=...) -> a tiny reward model after three steps."""

    def make(template: str | None, *, steps: bool = False, lora: int = 0, pad: str = "") -> Trained:
        model, words = load_model(tiny, dtype=torch.float32), AutoTokenizer.from_pretrained(tiny)
        if pad:
            words.pad_token = pad
        shaper = Shaper(Chat(words, template=template), 200, True)
        records: list[Any] = SOLUTIONS if steps else RANKINGS
        groups = shaper.groups(records, "steps" if steps else "rankings", print)
        learner = Learner(
            model,
            PROCESS_REWARD if steps else REWARD,
            critic=CriticModel(model, bias=steps),
            optim=Optim(lr=0.1 if lora else 0.01),
            critic_optim=Optim(lr=0.1),
            lora=Lora(rank=lora),
            microbatch_tokens=MICROBATCH,
        )
        for _ in range(3):
            learner.update(Batch.of(*numbered(groups)))
        head = heads.head_class(load_config(tiny), per_token=steps)
        state, beside = {"progress": {"update": 3}}, {"head": head, "replay": None}
        folder = tmp_path / "checkpoints"
        saved = saving.save(folder, learner, words, Checkpoints(keep=1), state, {}, **beside)
        return Trained(learner, groups, saved / "model")

    return make


def conversation(words: Any, template: str | None, messages: Any, answer: str) -> list[int]:
    """Its tokens as somebody would make them who has transformers and not posttrain."""
    if template != "none":
        said = [*messages, {"role": "assistant", "content": answer}]
        return list(words.apply_chat_template(said, chat_template=template, return_dict=True)["input_ids"])
    text = ""
    for message in messages:
        said = message["role"] == "assistant"
        text += f"{message['content']}{words.eos_token}" if said else "\n" * bool(text) + message["content"]
    return [*words(text + answer)["input_ids"], words.eos_token_id]


def verdicts(saved: Path, template: str | None, pairs: list[tuple[Any, str]], **options: Any) -> list[Any]:
    verifier = RewardModel(paths=(str(saved),), chat_template=template or "", **options)
    verifier.require()
    return verifier.judge_all([(Task(id="t", messages=m), answer) for m, answer in pairs])


# ---------------------------------------------------------------- one number


@pytest.mark.parametrize(
    ("template", "more"),
    [
        (None, {}),
        ("none", {}),
        (UNMARKED, {}),
        (None, {"lora": 4}),
        # The pad that transformers looks for is then the end of the last turn too.
        ("none", {"pad": "<|im_end|>"}),
    ],
    ids=["chat", "none", "unmarked", "lora", "pads with eos"],
)
def test_a_score_is_the_same_to_whoever_asks(
    trained: Make, template: str | None, more: dict[str, Any]
) -> None:
    made: Trained = trained(template, **more)
    ours = [number for [number] in made.numbers()]
    assert max(ours) - min(ours) > 0.1, "it has learnt something"
    asked = [(r.messages, answer) for r in RANKINGS for answer in r.answers]
    verified = [verdict.score for verdict in verdicts(made.saved, template, asked)]
    torch.testing.assert_close(torch.tensor(verified), torch.tensor(ours), **CLOSE)

    words = AutoTokenizer.from_pretrained(made.saved)
    with quiet():
        model = AutoModelForSequenceClassification.from_pretrained(made.saved).eval()
    assert isinstance(model, LlamaForSequenceClassification)
    # Only a text that spells no special token is the same tokens to a tokenizer that is not told of it.
    plain = [i for i, (_, answer) in enumerate(asked) if "<|" not in answer]
    rows = [conversation(words, template, *asked[i]) for i in plain]
    with torch.no_grad():
        alone = torch.stack([model(torch.tensor([row])).logits[0, 0] for row in rows])
        padded = words.pad({"input_ids": rows}, return_tensors="pt")
        together = model(**padded).logits[:, 0]
    wanted = torch.tensor([ours[i] for i in plain])
    torch.testing.assert_close(alone, wanted, **CLOSE)
    torch.testing.assert_close(together, wanted, **CLOSE)


def test_an_adapters_reward_model_is_saved_whole_beside_its_adapter(trained: Make, tiny: Path) -> None:
    made: Trained = trained(None, lora=2)
    held, before = load_file(made.saved / "model.safetensors"), load_file(tiny / "model.safetensors")
    assert held.keys() == before.keys() | {"score.weight"}
    moved = {name for name in before if not torch.equal(held[name], before[name])}
    assert moved
    assert all("_proj" in name for name in moved), "the adapter's own, merged in"
    assert (made.saved.parent / "adapter" / "adapter_config.json").exists()


def test_what_was_saved_goes_back_into_a_learner_head_and_all(trained: Make, tiny: Path) -> None:
    made: Trained = trained(None)
    model = load_model(tiny, dtype=torch.float32)
    critic = CriticModel(model, bias=False)
    other = Learner(model, REWARD, critic=critic, microbatch_tokens=MICROBATCH)
    saving.restore(made.saved.parent, other, {"learner": made.learner.state()})
    assert Trained(other, made.groups, made.saved).numbers() == made.numbers()
    assert other.tensors().keys() == made.learner.tensors().keys()


# ---------------------------------------------------------------- a number a step


@pytest.mark.parametrize("template", [None, "none"], ids=["chat", "none"])
def test_a_steps_probability_is_the_same_to_whoever_asks(trained: Make, template: str | None) -> None:
    made: Trained = trained(template, steps=True)
    ours = [torch.tensor(numbers).sigmoid() for numbers in made.numbers()]
    assert max(float(n.max() - n.min()) for n in ours) > 0.02
    answers = [("2+2=4\n\nso 4+1=5", [0, 1]), ("well\n\nthen\n\n5\n\nor 6", [1, 3])]
    asked = [(s.messages, text) for s, (text, _) in zip(SOLUTIONS, answers, strict=True)]
    with quiet():
        model = AutoModelForTokenClassification.from_pretrained(made.saved).eval()
    assert isinstance(model, LlamaForTokenClassification)
    assert bool(model.score.bias.any())
    for said, number, (_, judged) in zip(
        verdicts(made.saved, template, asked, kind="process"), ours, answers, strict=True
    ):
        potentials = torch.tensor([said.progress[i][1] for i in judged])
        torch.testing.assert_close(potentials, number, **CLOSE)
    for [r], number in zip(made.groups, ours, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([r.tokens[:-1]])).logits[0, :, 0]
        ends = [t - 1 for t, read in enumerate(r.sampled) if read]
        torch.testing.assert_close(logits[ends].sigmoid(), number, **CLOSE)


# ---------------------------------------------------------------- a critic that begins as a reward model


def test_a_critic_that_begins_as_a_reward_model_says_what_it_says(trained: Make, tiny: Path) -> None:
    made: Trained = trained(None)
    policy, body = (
        load_model(tiny, dtype=torch.float32),
        load_model(made.saved, dtype=torch.float32, scores=True),
    )
    critic = CriticModel(policy, body)
    critic.start_from(heads.saved_head(made.saved))
    learner = Learner(policy, PPO, critic=critic)
    batch = Batch.of(*numbered(made.groups))
    said = learner.score(batch).value
    assert said is not None
    asked = [(r.messages, answer) for r in RANKINGS for answer in r.answers]
    verified = torch.tensor([verdict.score for verdict in verdicts(made.saved, None, asked)])
    torch.testing.assert_close(said[batch.mask], verified, **CLOSE)
    torch.testing.assert_close(learner.read(batch), said)


@pytest.mark.parametrize("steps", [False, True], ids=["answers", "steps"])
def test_a_reward_model_goes_on_from_its_head_and_a_new_one_begins_at_0(
    trained: Make, tiny: Path, steps: bool
) -> None:
    made: Trained = trained(None, steps=steps)
    model = load_model(made.saved, dtype=torch.float32, scores=True)
    critic = CriticModel(model, bias=steps)
    critic.start_from(heads.saved_head(made.saved))
    method = PROCESS_REWARD if steps else REWARD
    learner = Learner(model, method, critic=critic, microbatch_tokens=MICROBATCH)
    again = Trained(learner, made.groups, made.saved)
    assert again.numbers() == made.numbers()
    assert heads.saved_head(tiny) == {}
    critic = CriticModel(model)
    critic.start_from({})
    assert not any(bool(p.any()) for p in critic.head.parameters())


def test_a_head_of_two_numbers_is_no_score(tmp_path: Path) -> None:
    save_file({"score.weight": torch.zeros(2, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors: its head gives 2 numbers, and a score is one"):
        heads.saved_head(tmp_path)


# ---------------------------------------------------------------- what transformers can load


def test_the_class_is_one_whose_head_is_ours() -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 12}
    assert heads.head_class(LlamaConfig(**small), per_token=False) is LlamaForSequenceClassification
    assert heads.head_class(Qwen2Config(**small), per_token=True) is Qwen2ForTokenClassification
    # The first is not there at all; the second is, with a head under another name and with dropout.
    for config in (Gemma3TextConfig(**small), GPT2Config(n_layer=1, n_embd=12)):
        with pytest.raises(UserError, match=r"^model\.path: "):
            heads.head_class(config, per_token=True)
        assert heads.head_class(config, per_token=False).__name__.endswith("ForSequenceClassification")


def test_the_saved_configuration_is_a_copy(tiny: Path) -> None:
    config = AutoConfig.from_pretrained(tiny)
    made = heads.head_config(config, LlamaForSequenceClassification, 7)
    assert (made.architectures, made.num_labels, made.pad_token_id) == (
        ["LlamaForSequenceClassification"],
        1,
        7,
    )
    assert (config.num_labels, config.pad_token_id) == (2, 0)


def test_a_pad_that_ends_a_turn_is_replaced_in_a_copy(tiny: Path) -> None:
    words = AutoTokenizer.from_pretrained(tiny)
    assert heads.padded(words, {words.eos_token_id}) is words
    words.pad_token = words.eos_token
    other = heads.padded(words, {words.eos_token_id})
    assert (words.pad_token, other.pad_token) == ("<|im_end|>", "<unk>")
    assert other("2+3?").input_ids == words("2+3?").input_ids
