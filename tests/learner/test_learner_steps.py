"""Epochs, minibatches, anchors, and a learner that is put back and goes on bit for bit."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.learner import forward as passing
from posttrain.learner import learner as learners
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.lora import Lora
from posttrain.learner.optim import Optim
from posttrain.methods.table import GRPO, RLOO, SFT
from posttrain.models.tensor_files import read_tensors, write_tensors
from posttrain.types import Batch

Make = Callable[..., Any]


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in learner.model.parameters()])


def dealt(learner: Learner, batch: Batch, epoch: int = 0) -> list[list[int]]:
    learner.steps = replace(learner.steps, epochs=epoch + 1)
    return [part.tolist() for number, part in learner._minibatches(batch) if number == epoch]


def test_every_group_is_in_one_minibatch_of_an_epoch(llama: Make, rows_of: Make) -> None:
    batch = rows_of(seed=0, groups=7, K=3, idle=False)
    learner = Learner(llama(0), GRPO, steps=Steps(minibatches=3))
    parts = dealt(learner, batch)
    assert sorted(i for part in parts for i in part) == list(range(21))
    groups = [set(batch.group[part].tolist()) for part in parts]
    assert [len(g) for g in groups] == [3, 2, 2]
    assert sum(len(g) for g in groups) == len(set().union(*groups))


def test_the_deal_is_of_the_seed_the_update_and_the_epoch(llama: Make, rows_of: Make) -> None:
    batch = rows_of(seed=0, groups=12, K=2)

    def learner(seed: int, updates: int = 0) -> Learner:
        made = Learner(llama(0), GRPO, steps=Steps(minibatches=4), seed=seed)
        made.update_count = updates
        return made

    first = dealt(learner(0), batch)
    torch.manual_seed(99)  # nothing global enters
    assert dealt(learner(0), batch) == first
    others = [dealt(learner(1), batch), dealt(learner(0, 1), batch), dealt(learner(0), batch, epoch=1)]
    assert all(other != first for other in others)
    assert others[0] != others[1] != others[2]


@pytest.mark.full
def test_another_process_deals_the_same() -> None:
    """Python's hash of a string differs from process to process; nothing of the deal may."""
    code = """
import torch
from types import SimpleNamespace
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.ranks import ALONE
mask = torch.ones(24, 3, dtype=torch.bool)
batch = SimpleNamespace(group=torch.arange(24) // 2, mask=mask, version=torch.zeros(24, 3))
steps = Steps(epochs=4, minibatches=5)
learner = SimpleNamespace(ranks=ALONE, steps=steps, seed=1234567890123, update_count=41)
parts = [part.tolist() for epoch, part in Learner._minibatches(learner, batch) if epoch == 3]
"""
    here: dict[str, Any] = {}
    exec(code, here)
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", code + "print(parts)"]
    there = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout
    assert there.strip() == str(here["parts"])
    assert len(here["parts"]) == 5


def test_a_group_that_trains_nothing_is_no_minibatch(llama: Make, rows_of: Make) -> None:
    """Dealt alone, it would be a step without a trained token: an error half way through an update."""
    batch = rows_of(seed=0, groups=3, K=2, idle=False)
    failed = batch.group == batch.group[0]
    batch = replace(batch, mask=batch.mask & ~failed[:, None])
    learner = Learner(llama(0), GRPO, optim=Optim(lr=0.01), steps=Steps(minibatches=3))
    assert len(dealt(learner, batch)) == 2
    done = learner.update(batch)
    assert learner.step_count == 2
    assert not done.computed[failed].any()


def test_epochs_are_steps_on_one_anchor(llama: Make, rows_of: Make) -> None:
    """By hand: score, prepare, and two steps on the same columns."""
    batch = rows_of(seed=1, dtype=torch.float32)
    one, two = (
        Learner(llama(0), GRPO, optim=Optim(lr=0.02), steps=Steps(epochs=2), total_steps=2) for _ in range(2)
    )
    done = one.update(batch)
    anchored = replace(batch, logp_old=two.score(batch).logp)
    prepared = GRPO.prepare(anchored)
    _, _, first = two.step(prepared)
    _, _, second = two.step(prepared)
    assert torch.equal(weights(one), weights(two))
    assert one.step_count == 2
    assert done.batch.logp_old is not None
    assert torch.equal(done.batch.logp_old, anchored.logp_old)
    assert first["kl/old"] == pytest.approx(0, abs=1e-9)
    assert second["kl/old"] > 1e-3
    assert done.metrics["kl/old"] == pytest.approx((first["kl/old"] + second["kl/old"]) / 2)
    # what is shown is what the model said at first sight
    torch.testing.assert_close(
        done.logp[done.computed], anchored.logp_old[done.computed], rtol=1e-5, atol=1e-5
    )


def test_a_first_and_only_pass_needs_no_second_forward(llama: Make, rows_of: Make) -> None:
    batch = rows_of(seed=1, dtype=torch.float32)
    learner = Learner(llama(0), GRPO, optim=Optim(lr=0.02))
    learner.score = None  # it is not asked
    done = learner.update(batch)
    assert done.batch.logp_old is None
    assert done.metrics["kl/old"] == 0


def test_sampler_and_trainer_are_compared_on_the_weights_that_drew(llama: Make, rows_of: Make) -> None:
    """Steps of one update move the weights; that a later one sees others is no disagreement."""
    batch = rows_of(seed=0, groups=6, K=3, idle=False)
    learner = Learner(llama(0), GRPO, optim=Optim(lr=0.05), steps=Steps(minibatches=3, epochs=2))
    logp = learner.score(batch).logp
    drawn = replace(batch, logp_policy=logp, logp_gen=logp, version=torch.zeros_like(batch.version))
    assert learner.update(drawn).metrics["kl/mismatch"] < 1e-9
    learner = Learner(llama(0), GRPO, optim=Optim(lr=0.05), steps=Steps(minibatches=3))
    wrong = replace(drawn, logp_policy=logp - 0.5)
    assert learner.update(wrong).metrics["kl/mismatch"] > 0.01


def test_a_step_without_a_weight_leaves_the_weights_alone(llama: Make, rows_of: Make) -> None:
    """Every answer of every group got the same reward."""
    batch = rows_of(seed=1, dtype=torch.float32)
    alike = torch.zeros_like(batch.reward)
    alike[torch.arange(len(batch)), batch.mask.int().argmax(-1)] = 1.0
    learner = Learner(llama(0), RLOO, optim=Optim(lr=0.1, weight_decay=0.1))
    before = weights(learner)
    done = learner.update(replace(batch, reward=alike))
    assert torch.equal(weights(learner), before)
    assert not done.computed.any()
    assert done.metrics["grad_norm"] == 0


def test_scores_are_those_of_transformers_and_nothing_else_is_filled(
    llama: Make, rows_of: Make, by_hand: Make
) -> None:
    batch = rows_of(seed=3, dtype=torch.float32)
    plain = llama(0).eval()
    with torch.no_grad():
        logp, entropy = by_hand(plain, batch, 0.6)
        alone = plain(input_ids=batch.tokens[:1, :5]).logits[0].log_softmax(-1)
    learner = Learner(llama(0), GRPO, temperature=0.6, microbatch_tokens=9)
    said = learner.score(batch)
    torch.testing.assert_close(said.logp, logp, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(said.entropy, entropy, rtol=1e-4, atol=1e-4)
    row = batch.tokens[0, :5].tolist()
    wanted = [float(alone[t - 1, row[t]]) for t in range(1, 5)]
    assert learner.canary(row) == pytest.approx(wanted, abs=1e-4)  # at temperature 1


def test_dropout_in_the_model_is_never_on(llama: Make, rows_of: Make) -> None:
    batch = rows_of(seed=3, dtype=torch.float32)
    for again in (False, True):
        steps = Steps(gradient_checkpointing=again)
        wet, dry = (
            Learner(llama(0, attention_dropout=p), SFT, optim=Optim(lr=0.01), steps=steps) for p in (0.5, 0.0)
        )
        for learner in (wet, dry):
            learner.update(batch)
        assert torch.equal(weights(wet), weights(dry))


KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {},
    "lora": {"lora": Lora(rank=3)},
    "dora in bfloat16": {"lora": Lora(rank=3, dora=True)},
    "muon in bfloat16": {},
    "muon of a lora": {"lora": Lora(rank=3)},
    "8 bits in bfloat16": {},
}


def make(llama: Make, kind: str) -> Learner:
    model = llama(0, **({"hidden_size": 64} if "8 bits" in kind else {}))
    model = model.bfloat16() if "bfloat16" in kind else model
    name: Any = "muon" if "muon" in kind else "adamw_8bit" if "8 bits" in kind else "adamw"
    optim = Optim(name=name, lr=0.01, schedule="cosine", warmup_steps=2, weight_decay=0.01)
    steps = Steps(epochs=2, minibatches=2, microbatch_tokens=15)
    return Learner(model, GRPO, optim=optim, steps=steps, total_steps=16, seed=5, **KINDS[kind])


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.sample("float32", "bfloat16", "lora", "dora*", "muon in*", "8 bits*")
def test_a_learner_put_back_goes_on_bit_for_bit(
    kind: str, llama: Make, rows_of: Make, tmp_path: Path
) -> None:
    """Through files; the one that is put back had gone its own way first."""
    batches = [rows_of(seed, dtype=torch.float32) for seed in range(3)]
    straight = make(llama, kind)
    halves = [make(llama, kind), make(llama, kind)]
    for batch in batches[:2]:
        straight.update(batch)
    halves[0].update(batches[0])
    for name, tensors in halves[0].tensors().items():
        write_tensors(tmp_path / f"{name}.safetensors", tensors)
    halves[1].update(batches[2])
    held = {name: read_tensors(tmp_path / f"{name}.safetensors") for name in ("trained", "optimizer")}
    halves[1].restore(held, halves[0].state())
    assert torch.equal(weights(halves[1]), weights(halves[0]))
    last = halves[1].update(batches[1])
    assert torch.equal(weights(halves[1]), weights(straight))
    for part, tensors in straight.tensors().items():
        again = halves[1].tensors()[part]
        assert tensors.keys() == again.keys()
        assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    assert halves[1].state() == straight.state() == {"step": 8, "critic_steps": 0, "update": 2, "method": {}}
    assert last.metrics["lr"] > 0


def test_a_checkpoint_from_before_the_first_step_clears_the_moments(llama: Make, rows_of: Make) -> None:
    batch = rows_of(seed=0, dtype=torch.float32)
    fresh, used = make(llama, "float32"), make(llama, "float32")
    start = {part: {k: v.clone() for k, v in held.items()} for part, held in fresh.tensors().items()}
    used.update(batch)
    used.restore(start, fresh.state())
    fresh.update(batch)
    used.update(batch)
    assert torch.equal(weights(fresh), weights(used))


def test_tensors_of_another_model_are_refused(llama: Make, rows_of: Make) -> None:
    deep, shallow = (Learner(llama(0, num_hidden_layers=n), SFT) for n in (3, 2))
    for learner in (deep, shallow):
        learner.update(rows_of(seed=0, dtype=torch.float32))
    with pytest.raises(KeyError):
        deep.restore(shallow.tensors(), shallow.state())
    with pytest.raises(KeyError, match="unknown parameter"):
        shallow.restore(deep.tensors(), deep.state())
    with pytest.raises(RuntimeError):
        Learner(llama(0, hidden_size=32), SFT).restore(shallow.tensors(), shallow.state())


@pytest.mark.parametrize("bad", [{"epochs": 0}, {"minibatches": 0}, {"microbatch_tokens": -1}])
def test_steps_that_cannot_be_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Steps(**bad)


@pytest.mark.parametrize(("what", "times"), [(False, 0), (True, 6)])
def test_memory_goes_back_around_each_forward_pass_where_it_counts(
    what: bool, times: int, llama: Make, rows_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[torch.device] = []
    monkeypatch.setattr(learners, "give_back", given.append)
    monkeypatch.setattr(passing, "microbatches", lambda batch, *_, **__: [[0], [1], [2]])
    made = Learner(llama(0), SFT, steps=Steps(gradient_checkpointing=what))
    made.update(rows_of(seed=3, dtype=torch.float32))
    assert given == [torch.device("cpu")] * times


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """How often each operation ran."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.by_name[op.overloadpacket.__name__] += 1
        return op(*args, **(kwargs or {}))


@pytest.mark.usefixtures("without_kernels")
def test_checkpointing_runs_products_again_and_no_more_gates(llama: Make, rows_of: Make) -> None:
    """How many products of matrices and how many gates run in a step."""
    counts = {}
    for what in (False, True):
        learner = Learner(llama(0), SFT, steps=Steps(gradient_checkpointing=what))
        with Counted() as seen:
            learner.update(rows_of(seed=3, dtype=torch.float32))
        counts[what] = (seen.by_name["mm"], seen.by_name["silu"])
    layers = len(llama(0).model.layers)
    products, gates = counts[False]
    assert gates == 2 * layers, "a gate is made again, for less is kept of it"
    assert products > 3 * 7 * layers
    # Nobody needs what a layer's last product gave, so it is not computed again.
    assert counts[True] == (products + 6 * layers, gates)
