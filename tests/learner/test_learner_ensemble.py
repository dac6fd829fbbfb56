"""Several heads on one backbone: each learns from a bootstrap of its own, and all are there to be read."""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from posttrain.base.chat import Chat
from posttrain.data import Ranking, Stepped
from posttrain.learner.critic import CriticModel
from posttrain.learner.ensemble import bootstraps
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.optim import Optim
from posttrain.methods.build import build
from posttrain.methods.table import METHODS
from posttrain.models import heads
from posttrain.models.loading import quiet
from posttrain.models.pretrained import load_config, load_model
from posttrain.recipe.recipe import Checkpoints
from posttrain.runtime.dataset_rows import Shaper, numbered
from posttrain.runtime.record import saving
from posttrain.types import Batch, Task, Trajectory, UserError
from posttrain.verifiers.model.verifier import RewardModel

H, SEED = 3, 5
Make = Callable[..., Any]
READS_HEAD = [name for name, found in METHODS.items() if "head" in found.method.needs]


def build_learner(llama: Make, name: str, count: int, budget: int = 4096) -> Learner:
    """A learner whose heads differ, in float64."""
    policy = llama(0).double()
    critic = CriticModel(policy, heads=count)
    with torch.no_grad():
        for k, row in enumerate(critic.head.weight):
            row.copy_(torch.linspace(-1, 1 + k, len(row)))
    method, steps = build(name, {}, horizon=16), Steps(microbatch_tokens=budget)
    return Learner(policy, method, critic=critic, steps=steps, seed=SEED)


def gradients(learner: Learner, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of the backbone, and of the heads' weights, summed over a step that is not taken."""
    learner._run_microbatches(batch, learner.method.weight(batch), learns=True)
    found = [p.grad for p in learner.model.parameters() if p.grad is not None]
    head = learner.critic.head.weight.grad
    assert head is not None
    return torch.cat([g.flatten() for g in found]), head


def dealt(batch: Batch, times: list[int]) -> tuple[Batch, list[int]]:
    """The batch with row i as often as `times` says, each time in another group; and where each row was."""
    index = [i for i, count in enumerate(times) for _ in range(count)]
    turn = [copy for count in times for copy in range(count)]
    again = batch.rows(torch.tensor(index))
    return replace(again, group=again.group * 100 + torch.tensor(turn)), index


# ---------------------------------------------------------------- how each head learns


@pytest.mark.parametrize("name", READS_HEAD)
@pytest.mark.usefixtures("float64")
def test_each_head_learns_as_one_alone_would_from_its_bootstrap(
    name: str, llama: Make, rows_of: Make
) -> None:
    """Records drawn c times count c times; losses are means over the records that there are."""
    batch = rows_of(K=2, groups=8, seed=3, idle=False)
    if "classification" in name or name == "process_reward":
        batch = replace(batch, reward=(batch.reward > 0).to(batch.reward))
    several = build_learner(llama, name, H)
    backbone, head = gradients(several, batch)
    counts = bootstraps(batch, H, SEED, whole=several.method.unit == "group")
    assert len({tuple(row) for row in counts.tolist()}) == H
    wanted = torch.zeros_like(backbone)
    for k in range(H):
        alone = build_learner(llama, name, 1)
        with torch.no_grad():
            alone.critic.head.weight.copy_(several.critic.head.weight[k : k + 1])
        drawn, index = dealt(batch, counts[k].int().tolist())
        below, one = gradients(alone, drawn)
        # A mean over what was drawn becomes one over what there is.
        weight, before = alone.method.weight(drawn), alone.method.weight(batch)[index]
        shares = before[weight > 0] / weight[weight > 0]
        share = float(shares[0])
        torch.testing.assert_close(shares, torch.full_like(shares, share))
        torch.testing.assert_close(head[k : k + 1], one * share / H, rtol=1e-9, atol=1e-12)
        wanted += below * share / H
    torch.testing.assert_close(backbone, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", READS_HEAD)
@pytest.mark.usefixtures("float64")
def test_no_cut_of_a_step_and_no_order_of_its_rows_matters(name: str, llama: Make, rows_of: Make) -> None:
    batch = rows_of(K=4, seed=8)
    whole = gradients(build_learner(llama, name, H), batch)
    for budget, order in ((1, torch.arange(len(batch))), (20, torch.arange(len(batch)).flip(0))):
        for one, other in zip(
            gradients(build_learner(llama, name, H, budget), batch.rows(order)), whole, strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_counts_are_poissons_and_independent_of_one_another() -> None:
    """10,000 records, two heads: shares within five standard errors of their chances and of the product."""
    n = 10_000
    rows = [
        Trajectory(
            tokens=[i, 1],
            sampled=[False, True],
            logp_gen=[0, 0],
            logp_policy=[0, 0],
            version=[0, 0],
            reward=[0, 0],
        )
        for i in range(n)
    ]
    one, other = bootstraps(Batch.of(rows, list(range(n))), 2, SEED, whole=True).int().tolist()
    chance = [math.exp(-1) / math.factorial(k) for k in range(6)]
    pairs = Counter(zip(one, other, strict=True))
    for k, p in enumerate(chance):
        assert abs(one.count(k) / n - p) < 5 * math.sqrt(p / n)
        for j, q in enumerate(chance[:3]):
            assert abs(pairs[k, j] / n - p * q) < 5 * math.sqrt(p * q / n)


def test_a_groups_count_hangs_on_what_is_in_it_and_on_nothing_else(rows_of: Make) -> None:
    batch = rows_of(K=3, seed=2)
    counts = bootstraps(batch, 8, SEED, whole=True)
    for group in batch.group.unique():
        rows = (batch.group == group).nonzero().flatten()
        assert (counts[:, rows] == counts[:, rows[:1]]).all()
        alone = replace(batch.rows(rows.flip(0)), group=torch.full((len(rows),), 77))
        assert torch.equal(bootstraps(alone, 8, SEED, whole=True), counts[:, rows])
    assert not torch.equal(bootstraps(batch, 8, SEED + 1, whole=True), counts)
    assert not torch.equal(bootstraps(batch, 8, SEED, whole=False), counts)


# ---------------------------------------------------------------- whoever reads them


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


RANKINGS = [
    Ranking(
        id=str(n), messages=(asked(f"{n}+1?"),), answers=(f"it is {n + 1}", f"no, {n}"), scores=(1.0, 0.0)
    )
    for n in range(6)
]
SOLVED = [
    Stepped(id=str(n), messages=(asked(f"{n}?"),), steps=(f"{n}", "so 4"), labels=(1.0, n % 2))
    for n in range(6)
]


@pytest.fixture
def saved(tiny: Path, tmp_path: Path) -> Make:
    """saved(method, count) -> (the learner after three steps, its rows, the model's directory)."""

    def make(name: str, count: int) -> tuple[Learner, Batch, Path]:
        model, words = load_model(tiny, dtype=torch.float32), AutoTokenizer.from_pretrained(tiny)
        steps = name == "process_reward"
        shaper = Shaper(Chat(words), 200, True)
        groups = shaper.groups(SOLVED if steps else RANKINGS, "steps" if steps else "rankings", print)
        learner = Learner(
            model,
            build(name, {}, horizon=16),
            critic=CriticModel(model, bias=steps, heads=count),
            optim=Optim(lr=0.01),
            critic_optim=Optim(lr=0.1),
        )
        batch = Batch.of(*numbered(groups))
        for _ in range(3):
            metrics = learner.update(batch).metrics
        assert ("score/std" in metrics) == (count > 1)
        head = heads.head_class(load_config(tiny), per_token=steps)
        place = tmp_path / f"{name}-{count}"
        state = {"progress": {"update": 3}}
        return (
            learner,
            batch,
            saving.save(place, learner, words, Checkpoints(keep=1), state, {}, head=head, replay=None)
            / "model",
        )

    return make


def verdicts(path: Path, **options: Any) -> list[Any]:
    verifier = RewardModel(paths=(str(path),), **options)
    verifier.require()
    return verifier.judge_all([(Task(id="t", messages=r.messages), a) for r in RANKINGS for a in r.answers])


def test_an_ensembles_scores_are_the_same_to_its_trainer_to_transformers_and_to_a_verifier(
    saved: Make, tmp_path: Path
) -> None:
    learner, batch, path = saved("reward", H)
    mean = learner.read(batch)[batch.mask]
    said = verdicts(path)
    each = torch.tensor([[v.parts[f"model_{k}"] for k in range(1, H + 1)] for v in said])
    torch.testing.assert_close(each.mean(1), mean, rtol=1e-4, atol=2e-5)
    assert float(each.std(1).min()) > 1e-4, "the heads have learnt different things"
    with quiet():
        model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    rows = [batch.tokens[i, : int(n) - 1][None] for i, n in enumerate(batch.length)]
    with torch.no_grad():
        theirs = torch.cat([model(row).logits for row in rows])
    torch.testing.assert_close(theirs, each, rtol=1e-4, atol=2e-5)
    for how, wanted in (("min", each.amin(1)), ("lower", each.mean(1) - 0.5 * each.std(1, correction=0))):
        careful = verdicts(path, ensemble=how, **({"k": 0.5} if how == "lower" else {}))
        found = torch.tensor([v.score for v in careful])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5)
    text = "".join(
        json.dumps({"prompt": r.messages[0]["content"], "response": r.answers[0]}) + "\n" for r in RANKINGS
    )
    (tmp_path / "before.jsonl").write_text(text)
    scaled = verdicts(path, reference=str(tmp_path / "before.jsonl"))[::2]
    for k in range(1, H + 1):
        head = torch.tensor([v.parts[f"model_{k}"] for v in scaled])
        assert (float(head.mean()), float(head.var(correction=0))) == pytest.approx((0.0, 1.0), abs=1e-3)


def test_steps_are_judged_by_every_head(saved: Make) -> None:
    learner, batch, path = saved("process_reward", 2)
    out = learner.read(batch)
    verifier = RewardModel(paths=(str(path),), kind="process", ensemble="min")
    verifier.require()
    for n, record in enumerate(SOLVED):
        said = verifier(Task(id="t", messages=record.messages), "\n\n".join(record.steps))
        assert len(said.progress) == 2
        assert {"model_1", "model_2", "std"} == said.parts.keys()
        # The least of two is below what both come to together.
        below = torch.tensor([p for _, p in said.progress])
        assert (below <= out[n, batch.mask[n]].sigmoid() + 1e-5).all()


def test_heads_that_are_there_go_on_and_others_begin_where_one_is(saved: Make, tiny: Path) -> None:
    _, _, path = saved("reward", H)
    weight = load_file(path / "model.safetensors")["score.weight"]
    assert torch.equal(heads.saved_head(path, H)["score.weight"], weight)
    torch.testing.assert_close(heads.saved_head(path)["score.weight"], weight.mean(0, keepdim=True))
    with pytest.raises(UserError, match=r"its head gives 3 numbers, and 2 are wanted"):
        heads.saved_head(path, 2)
    config = load_config(path, scores=True)
    alone = heads.head_config(config, heads.head_class(config, per_token=False), 0)
    assert (alone.score_heads, alone.num_labels) == (1, 1), "what goes on as one head is saved as one"
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"score_heads": 1}))
    with pytest.raises(UserError, match=r"its head gives 3 numbers, and 3 are wanted"):
        heads.saved_head(path, 3)  # classes of somebody else's
    _, _, single = saved("reward", 1)
    critic = CriticModel(load_model(tiny, dtype=torch.float32), bias=False, heads=H)
    critic.start_from(heads.saved_head(single, H))
    one = load_file(single / "model.safetensors")["score.weight"]
    assert torch.equal(critic.head.weight, one.expand(H, -1))
