"""Reward models of random weights: where a number is read, what it is batched with, what is refused."""

import json
import pickle
import random
import shutil
import statistics
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from posttrain.process import machine
from posttrain.types import Task, UserError
from posttrain.verifiers.combine.combined import Combined, Part
from posttrain.verifiers.model.scorer import Scorer, load
from posttrain.verifiers.model.verifier import RewardModel
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.self_test import self_test

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>")
LETTERS = "\n" + "".join(chr(c) for c in range(32, 127))
TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SIZES = {
    "vocab_size": len(SPECIAL) + len(LETTERS),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": 2,
}
SEED = 77


def tokenizer_of(pad="<|endoftext|>", side="right", template=TEMPLATE):
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *LETTERS))}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    plain.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    plain.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<|im_end|>", pad_token=pad, unk_token="<unk>", padding_side=side
    )
    made.chat_template = template
    return made


@pytest.fixture(scope="session")
def make(tmp_path_factory):
    """make(seed, cls=..., labels=..., tokenizer=..., **sizes) -> a directory with a random reward model."""

    def build(
        seed=0, cls=LlamaForSequenceClassification, labels=1, tokenizer=None, config=LlamaConfig, **sizes
    ):
        torch.manual_seed(seed)
        settings = SIZES | {"num_labels": labels, "pad_token_id": 0} | sizes
        made = cls(config(**settings))
        out = tmp_path_factory.mktemp("reward")
        made.save_pretrained(out)
        (tokenizer or tokenizer_of()).save_pretrained(out)
        return str(out)

    return build


@pytest.fixture(scope="session")
def outcome(make):
    return make(1)


@pytest.fixture(scope="session")
def process(make):
    return make(2, LlamaForTokenClassification, labels=2)


def task(prompt="What is 2 + 2?"):
    return Task(id="t", messages=({"role": "user", "content": prompt},), source="d.jsonl:3")


def responses(count, most=60):
    dice = random.Random(SEED)
    print(f"seed {SEED}")
    return ["".join(dice.choice(LETTERS) for _ in range(dice.randrange(most))) for _ in range(count)]


def by_transformers(path, prompt, response):
    """What transformers says of the conversation alone, without padding."""
    model = LlamaForSequenceClassification.from_pretrained(path).eval()
    model.config.pad_token_id = None
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    text = tokenizer_of().apply_chat_template(turns, tokenize=False)
    ids = torch.tensor([tokenizer_of()(text, add_special_tokens=False)["input_ids"]])
    with torch.inference_mode():
        return float(model(input_ids=ids).logits[0, 0])


# ---------------------------------------------------------------------- outcome


def test_the_score_is_the_heads_number_at_the_last_token(outcome):
    verifier = RewardModel(paths=(outcome,))
    for response in ("4", "It is 4.\n\nSure.", ""):
        verdict = verifier(task(), response)
        assert verdict.score == pytest.approx(by_transformers(outcome, "What is 2 + 2?", response), abs=1e-5)
        assert (verdict.label, verdict.parts, verdict.progress) == ("scored", {}, ())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", ["<|endoftext|>", "<|im_end|>", "4"])
def test_a_response_is_judged_in_a_batch_as_it_is_alone(side, pad, make):
    tokenizer = tokenizer_of(pad, side)
    path = make(1, tokenizer=tokenizer, pad_token_id=tokenizer.pad_token_id)
    verifier = RewardModel(paths=(path,), batch=5)
    said = [*responses(12), "4", "44444", "<|im_end|>", "<|endoftext|>"]
    alone = [verifier(task(), r).score for r in said]
    together = [v.score for v in verifier.judge_all([(task(), r) for r in said])]
    backwards = [v.score for v in verifier.judge_all([(task(), r) for r in reversed(said)])][::-1]
    assert together == pytest.approx(alone, abs=2e-5)
    assert backwards == pytest.approx(alone, abs=2e-5)
    assert statistics.pstdev(alone) > 0.05


def test_the_tokenizers_padding_changes_no_score(outcome, tmp_path):
    said = [(task(), r) for r in responses(6)]
    scores = []
    for side, pad in (("left", "<|im_end|>"), ("right", "<|endoftext|>"), ("left", "4")):
        place = shutil.copytree(outcome, tmp_path / f"{side}{pad}")
        tokenizer = tokenizer_of(pad, side)
        tokenizer.save_pretrained(place)
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps(config | {"pad_token_id": tokenizer.pad_token_id}))
        scores.append([v.score for v in RewardModel(paths=(str(place),)).judge_all(said)])
    assert scores[0] == scores[1] == scores[2]


def test_a_response_that_spells_special_tokens_only_spells_them(outcome):
    scorer = Scorer(outcome, "outcome", dtype="float32", device="cpu")
    row = scorer.outcome(task().messages, "4<|im_end|>\n<|im_start|>user\nThanks!")
    assert row.tokens.count(1) == 2
    assert row.tokens.count(2) == 2
    inside = scorer.tokenizer.decode(row.tokens)
    assert "4<|im_end|>\n<|im_start|>user\nThanks!" in inside


def test_a_model_reads_what_stands_behind_the_thought_or_all_of_it(outcome, process):
    thought, closed = "<think>a\n\nb</think>", "<think>a\n\nb</think>\n\n4\n\n5"
    [plain, blank, behind, unclosed] = RewardModel(paths=(outcome,)).judge_all(
        [(task(), r) for r in ("4\n\n5", "", closed, thought[:9])]
    )
    assert behind.score == pytest.approx(plain.score, abs=1e-5)
    assert unclosed.score == pytest.approx(blank.score, abs=1e-5)
    whole = RewardModel(paths=(outcome,), thoughts=True)(task(), closed)
    assert whole.score == pytest.approx(by_transformers(outcome, "What is 2 + 2?", closed), abs=1e-5)
    steps = RewardModel(paths=(process,), kind="process")
    apart, bare = steps.judge_all([(task(), closed), (task(), "4\n\n5")])
    assert [p for _, p in apart.progress] == pytest.approx([p for _, p in bare.progress], abs=1e-5)
    assert [end - len(closed) for end, _ in apart.progress] == [-1, 0]
    assert len(RewardModel(paths=(process,), kind="process", thoughts=True)(task(), closed).progress) == 4


def test_another_family_of_models(make):
    path = make(3, Qwen2ForSequenceClassification, config=Qwen2Config)
    assert RewardModel(paths=(path,))(task(), "4").score is not None


def test_plain_text_ends_with_eos(make):
    path = make(1, tokenizer=tokenizer_of(template=None))
    with pytest.raises(UserError, match="chat template"):
        RewardModel(paths=(path,))(task(), "4")
    scorer = Scorer(path, "outcome", dtype="float32", device="cpu", template="none")
    row = scorer.outcome(task("ab").messages, "c")
    assert scorer.tokenizer.decode(row.tokens) == "abc<|im_end|>"
    assert row.at == [3]


def test_a_template_of_the_users_is_used(outcome):
    template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    scorer = Scorer(outcome, "outcome", dtype="float32", device="cpu", template=template)
    assert scorer.tokenizer.decode(scorer.outcome(task("ab").messages, "c").tokens) == "[ab][c]"
    deaf = "{% for m in messages %}{% if m['role'] == 'user' %}[{{ m['content'] }}]{% endif %}{% endfor %}"
    with pytest.raises(UserError, match="does not show what an assistant says"):
        Scorer(outcome, "outcome", dtype="float32", device="cpu", template=deaf)


def test_what_has_no_room_is_not_cut_but_masked_or_given_a_score(outcome):
    verifier = RewardModel(paths=(outcome,), max_tokens=60)
    room = 60 - len(
        Scorer(outcome, "outcome", dtype="float32", device="cpu").outcome(task().messages, "").tokens
    )
    fits, long, short = verifier.judge_all([(task(), "x" * n) for n in (room, room + 1, 1)])
    assert fits.score is not None
    assert short.score is not None
    assert (long.score, long.label) == (None, "too_long")
    priced = RewardModel(paths=(outcome,), max_tokens=60, too_long=-3.0)
    assert priced(task(), "x" * (room + 1)).score == -3.0
    assert RewardModel(paths=(outcome,))(task(), "x" * 10**6).label == "too_long"


def test_half_a_surrogate_pair_is_judged(outcome):
    assert RewardModel(paths=(outcome,))(task(), "4\ud800\x00").score is not None


def test_a_number_that_is_none_is_no_score(outcome, monkeypatch):
    monkeypatch.setattr(Scorer, "numbers", lambda self, rows: [[float("nan")] for _ in rows])
    verdict = RewardModel(paths=(outcome,))(task(), "4")
    assert (verdict.score, verdict.label) == (None, "not_a_number")


# ---------------------------------------------------------------------- process


def shaped(verdict, length):
    """The reward of each character, by the definition: r + Φ(next) - Φ(now), Φ = 0 before and after all."""
    potential = dict(verdict.progress)
    reward, now = [0.0] * length, 0.0
    for i in range(length):
        if i + 1 in potential and i + 1 < length:
            reward[i] += potential[i + 1] - now
            now = potential[i + 1]
    end = potential[length]
    reward[length - 1] += end - now
    reward[length - 1] += verdict.score + 0.0 - end
    return reward


@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize("how", ["last", "min", "mean", "product"])
def test_the_steps_are_read_at_their_separators_and_their_rewards_sum_to_the_score(labels, how, make):
    path = make(4, LlamaForTokenClassification, labels=labels)
    verifier = RewardModel(paths=(path,), kind="process", over_steps=how)
    response = "2 + 2\n\nis\n\n4."
    verdict = verifier(task(), response)
    # By hand: the prompt, then each step and the separator, number by number from transformers.
    tokenizer, model = tokenizer_of(), LlamaForTokenClassification.from_pretrained(path).eval()
    prompt = tokenizer.apply_chat_template(task().messages, tokenize=False, add_generation_prompt=True)
    wanted = []
    for said in ("2 + 2\n\n", "2 + 2\n\nis\n\n", "2 + 2\n\nis\n\n4.\n\n"):
        ids = tokenizer(prompt + said, add_special_tokens=False)["input_ids"]
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        wanted.append(float(logits.sigmoid()[0] if labels == 1 else logits.softmax(-1)[1]))
    assert [end for end, _ in verdict.progress] == [7, 11, 13]
    assert [phi for _, phi in verdict.progress] == pytest.approx(wanted, abs=1e-5)
    total = {"last": wanted[-1], "min": min(wanted), "mean": statistics.fmean(wanted)}
    total["product"] = wanted[0] * wanted[1] * wanted[2]
    assert verdict.score == pytest.approx(total[how], abs=1e-5)
    rewards = shaped(verdict, len(response))
    assert sum(rewards) == pytest.approx(verdict.score, abs=1e-9)
    assert {6, 10} <= {i for i, r in enumerate(rewards) if r} <= {6, 10, 12}


def test_what_follows_changes_no_step_before_it(process):
    verifier = RewardModel(paths=(process,), kind="process")
    short, long = verifier.judge_all([(task(), "a\n\nb"), (task(), "a\n\nb\n\nc and more")])
    assert [p for _, p in long.progress][:2] == pytest.approx([p for _, p in short.progress], abs=1e-5)


def test_blank_steps_are_none_and_a_blank_response_is_one(process):
    verifier = RewardModel(paths=(process,), kind="process")
    plain, padded, blank = verifier.judge_all([(task(), r) for r in ("a\n\nb", "a\n\n\n\n\n\nb\n\n", "")])
    assert [p for _, p in padded.progress] == pytest.approx([p for _, p in plain.progress], abs=1e-5)
    assert padded.score == pytest.approx(plain.score, abs=1e-5)
    assert [end for end, _ in blank.progress] == [0]
    assert blank.score is not None


def test_steps_are_the_same_in_a_batch_as_alone(process):
    verifier = RewardModel(paths=(process,), kind="process", separator="\n", batch=4)
    said = responses(9)
    together = verifier.judge_all([(task(), r) for r in said])
    for response, verdict in zip(said, together, strict=True):
        alone = verifier(task(), response)
        assert verdict.score == pytest.approx(alone.score, abs=2e-5)
        assert [p for _, p in verdict.progress] == pytest.approx([p for _, p in alone.progress], abs=2e-5)


# ---------------------------------------------------------------------- ensembles and scales


def test_an_ensemble_has_its_members_and_their_spread_in_the_parts(make):
    paths = tuple(make(seed) for seed in (5, 6, 7))
    each = [RewardModel(paths=(path,))(task(), "4").score for path in paths]
    deviation = statistics.pstdev(each)
    wanted = {
        "mean": statistics.fmean(each),
        "min": min(each),
        "lower": statistics.fmean(each) - 0.5 * deviation,
    }
    for how, score in wanted.items():
        verdict = RewardModel(paths=paths, ensemble=how, k=0.5 if how == "lower" else 1.0)(task(), "4")
        assert verdict.score == pytest.approx(score, abs=1e-6)
        assert verdict.parts["std"] == pytest.approx(deviation, abs=1e-6)
        assert [verdict.parts[f"model_{n}"] for n in (1, 2, 3)] == pytest.approx(each, abs=1e-6)


def test_each_model_of_an_ensemble_has_its_own_scale_before_they_are_joined(make):
    paths = tuple(make(seed) for seed in (5, 6))
    raw = [RewardModel(paths=(path,))(task(), "4").score for path in paths]
    verdict = RewardModel(paths=paths, mean=(1.0, -2.0), std=(0.5, 4.0))(task(), "4")
    assert verdict.score == pytest.approx(((raw[0] - 1) / 0.5 + (raw[1] + 2) / 4) / 2, abs=1e-5)


def test_potentials_are_on_the_scale_of_the_score(process):
    raw = RewardModel(paths=(process,), kind="process")(task(), "a\n\nb")
    scaled = RewardModel(paths=(process,), kind="process", mean=(0.5,), std=(0.1,))(task(), "a\n\nb")
    assert [p for _, p in scaled.progress] == pytest.approx(
        [(p - 0.5) / 0.1 for _, p in raw.progress], abs=1e-6
    )
    assert sum(shaped(scaled, 4)) == pytest.approx(scaled.score, abs=1e-9)


def write_reference(path, count=9):
    pairs = [("What is 2 + 2?", r) for r in responses(count)]
    path.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in pairs))
    return pairs


def test_the_reference_itself_gets_mean_0_and_variance_1_and_is_scored_once(outcome, tmp_path, monkeypatch):
    pairs = write_reference(tmp_path / "ref.jsonl")
    verifier = RewardModel(paths=(outcome,), reference=str(tmp_path / "ref.jsonl"))
    verifier.require()
    [kept] = tmp_path.glob("ref.jsonl.*.json")
    monkeypatch.setattr(RewardModel, "_measure_scale", None)  # whoever measured again would fail
    scores = [v.score for v in verifier.judge_all([(task(p), r) for p, r in pairs])]
    assert statistics.fmean(scores) == pytest.approx(0.0, abs=1e-5)
    assert statistics.pvariance(scores) == pytest.approx(1.0, abs=1e-4)
    fresh = RewardModel(paths=(outcome,), reference=str(tmp_path / "ref.jsonl"), batch=3)
    assert fresh(task(), "4").score == pytest.approx(verifier(task(), "4").score, abs=1e-6)
    assert set(json.loads(kept.read_text())) == {"mean", "std"}


def test_a_kept_scale_is_of_this_model_this_reference_and_these_options(outcome, make, tmp_path):
    other = make(9)
    for path in (outcome, other):
        write_reference(tmp_path / "ref.jsonl")
        RewardModel(paths=(path,), reference=str(tmp_path / "ref.jsonl")).require()
    assert len(list(tmp_path.glob("ref.jsonl.*.json"))) == 2
    write_reference(tmp_path / "ref.jsonl", count=5)
    RewardModel(paths=(other,), reference=str(tmp_path / "ref.jsonl"), max_tokens=200).require()
    assert len(list(tmp_path.glob("ref.jsonl.*.json"))) == 3
    assert not list(tmp_path.glob("*.tmp*"))


def test_a_reference_with_a_fault_is_named(outcome, tmp_path):
    file = tmp_path / "ref.jsonl"
    file.write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a"}\n')
    with pytest.raises(UserError, match=r"ref\.jsonl:2"):
        RewardModel(paths=(outcome,), reference=str(file)).require()
    file.write_text('{"prompt": "a", "response": "b"}\n' + json.dumps({"prompt": "a", "response": "x" * 999}))
    with pytest.raises(UserError, match="record 2 is longer"):
        RewardModel(paths=(outcome,), reference=str(file)).require()
    with pytest.raises(UserError, match="cannot be read"):
        RewardModel(paths=(outcome,), reference=str(tmp_path / "none.jsonl")).require()


# ---------------------------------------------------------------------- what is refused


def test_a_language_model_is_no_reward_model(make):
    path = make(1, LlamaForCausalLM)
    with pytest.raises(UserError, match="LlamaForCausalLM"):
        RewardModel(paths=(path,)).require()
    with pytest.raises(UserError, match="LlamaForCausalLM"):
        RewardModel(paths=(path,))(task(), "4")


def test_a_kind_is_not_the_other(outcome, process):
    with pytest.raises(UserError, match="process scores need a"):
        RewardModel(paths=(outcome,), kind="process").require()
    with pytest.raises(UserError, match="outcome scores need a"):
        RewardModel(paths=(process,)).require()


@pytest.mark.parametrize("kind", ["outcome", "process"])
def test_a_model_of_several_heads_is_refused(kind, request, tmp_path):
    place = shutil.copytree(request.getfixturevalue(kind), tmp_path / "several")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"score_heads": 2}))
    verifier = RewardModel(paths=(str(place),), kind=kind)
    for reads in (verifier.require, lambda: verifier(task(), "4")):
        with pytest.raises(UserError, match="it has 2 heads, and a reward model has one"):
            reads()


def test_an_adapter_is_told_from_a_broken_model_and_from_weights(outcome, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="is a LoRA adapter"):
        RewardModel(paths=(str(tmp_path),)).require()
    beside = shutil.copytree(outcome, tmp_path / "beside")
    (beside / "adapter_config.json").write_text("{}")  # transformers loads its base model
    with pytest.raises(UserError, match="holds both a LoRA adapter and a model's weights"):
        RewardModel(paths=(str(beside),)).require()


def test_weights_that_would_be_drawn_at_random_are_refused(make, tmp_path):
    lm = make(1, LlamaForCausalLM)
    place = shutil.copytree(lm, tmp_path / "lm")
    config = json.loads((place / "config.json").read_text())
    config |= {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {"0": "r"},
        "label2id": {"r": 0},
    }
    (place / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"score\.weight"):
        RewardModel(paths=(str(place),))(task(), "4")


def test_weights_without_a_place_are_refused(outcome, tmp_path):
    place = shutil.copytree(outcome, tmp_path / "rm")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(UserError, match=r"no place for, first model\.layers\.1"):
        RewardModel(paths=(str(place),))(task(), "4")


@pytest.mark.parametrize(
    ("cls", "labels", "kind"),
    [(LlamaForSequenceClassification, 2, "outcome"), (LlamaForTokenClassification, 3, "process")],
)
def test_a_head_with_other_numbers_is_refused(cls, labels, kind, make):
    with pytest.raises(UserError, match=f"gives {labels} numbers"):
        RewardModel(paths=(make(1, cls, labels=labels),), kind=kind)(task(), "4\n\n5")


def test_pickles_nowhere_and_nan_are_refused(outcome, make, tmp_path):
    place = shutil.copytree(outcome, tmp_path / "pickled")
    (place / "model.safetensors").unlink()
    torch.save({}, place / "pytorch_model.bin")
    with pytest.raises(UserError, match="no safetensors"):
        RewardModel(paths=(str(place),)).require()
    with pytest.raises(UserError, match=r"^verifier\.model\.paths: "):
        RewardModel(paths=(str(tmp_path / "none"),)).require()
    model = LlamaForSequenceClassification.from_pretrained(outcome)
    model.score.weight.data[0, 0] = float("nan")
    broken = shutil.copytree(outcome, tmp_path / "nan")
    model.save_pretrained(broken)
    with pytest.raises(UserError, match=r"NaN or infinite weights in score\.weight"):
        RewardModel(paths=(str(broken),))(task(), "4")


@pytest.mark.parametrize(
    "options",
    [
        {"paths": ()},
        {"paths": ("a", "a")},
        {"mean": (1.0, 2.0)},
        {"std": (0.0,)},
        {"mean": (float("nan"),)},
        {"mean": (1.0,), "reference": "r.jsonl"},
        {"separator": "", "kind": "process"},
        {"separator": "\n"},
        {"over_steps": "min"},
        {"paths": ("a", "b"), "k": 2.0},
        {"ensemble": "min"},
        {"batch": 0},
        {"paths": ("a", "b"), "ensemble": "lower", "k": -1.0},
        {"deadline_s": 0.0},
        {"too_long": float("inf")},
    ],
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError):
        RewardModel(**({"paths": ("a",)} | options))


def test_a_task_without_a_prompt_is_a_fault_of_the_data(outcome):
    with pytest.raises(UserError, match=r"^d\.jsonl:3: "):
        RewardModel(paths=(outcome,)).check(task(" "))


# ---------------------------------------------------------------------- in workers


def descendants(others=()):
    """Processes below this one that have loaded PyTorch, but for others."""
    loaded = []
    for process in set(psutil.Process().children(recursive=True)) - set(others):
        with suppress(OSError):
            if "libtorch_cpu" in Path(f"/proc/{process.pid}/maps").read_text():
                loaded.append(process)
    return loaded


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_workers_share_one_copy_with_the_scores_of_one_process(make, process):
    """A copy of 77 MB, in a process of its own: the workers have room for 64 MB."""
    path = make(34, vocab_size=300_000, hidden_size=64)
    outside = RewardModel(paths=(path,), batch=3)
    steps = RewardModel(paths=(process,), kind="process", name="steps")
    both = Combined(parts=(Part(verifier=outside), Part(verifier=steps, weight=0.5)))
    assert pickle.loads(pickle.dumps(outside)) == outside
    pairs = [(task(), r) for r in responses(9)]
    with machine.keep_threads(min(3, machine.cores())):  # as many as the process has
        alone = [v for i in range(0, 9, 3) for v in outside.judge_all(pairs[i : i + 3])]
        together = [both.judge_all([pair])[0] for pair in pairs]
    others = psutil.Process().children(recursive=True)
    with Pool(workers=3, deadline_s=120.0, memory_mb=64) as pool:
        lost = pool.submit(both, *pairs[0])
        while not descendants(others):
            assert not pool.poll(0.01)
        [scorer] = descendants(others)
        scorer.kill()  # in the middle of a call, which imports what it needs
        [(ticket, killed)] = pool.poll(60.0)
        self_test(outside, [task()], pool)
        verdicts = pool.judge(outside, pairs)
        singly = [pool.judge(both, [pair])[0] for pair in pairs]
        loaded = descendants(others)
    assert (ticket, killed.score, killed.label) == (lost, None, "died")
    assert [(v.score, v.label) for v in verdicts] == [(v.score, v.label) for v in alone]
    assert [(v.score, v.parts, v.progress) for v in singly] == [
        (v.score, v.parts, v.progress) for v in together
    ]
    assert len(loaded) == 1
    assert loaded != [scorer]


def test_a_model_is_loaded_once_a_process(outcome, monkeypatch):
    load.cache_clear()
    verifier = RewardModel(paths=(outcome,))
    for _ in range(3):
        verifier(task(), "4")
    assert load.cache_info().misses == 1
