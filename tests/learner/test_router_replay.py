"""Router replay: a sampler notes which experts each token was sent to, and the learner sends it there too."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from posttrain.curriculum.replay_buffer import ReplayBuffer
from posttrain.engines.native.cache import Cache, PromptLayout
from posttrain.engines.native.engine import NativeConfig, NativeEngine
from posttrain.learner.critic import CriticModel
from posttrain.learner.forward import Net, forward
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.pack import pack
from posttrain.learner.recompute import compute_again
from posttrain.methods.build import build
from posttrain.models.attention import hidden_states, use_layouts
from posttrain.models.experts import Routers, replay, router_choices
from posttrain.rollout.live_episode import RunningEpisode
from posttrain.types import Batch, Completion, Request, Sampling, Task, Trajectory

Moe = Callable[..., PreTrainedModel]
ROWS = {"groups": 3, "K": 3, "turns": 2, "system": 9}


@contextmanager
def forced(model: PreTrainedModel, routes: torch.Tensor) -> Iterator[None]:
    """Softmax routers that score the experts of one row [T, L, k] by a formula of their own."""
    gates = [m.gate for m in model.modules() if hasattr(m, "gate") and hasattr(m, "experts")]

    def gate(module: nn.Module, given: torch.Tensor) -> Callable[..., Any]:
        def run(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ module.weight.T
            p = logits.double().exp() / logits.double().exp().sum(-1, keepdim=True)
            own = p.argsort(-1, descending=True)[:, :2]
            chosen = given[: len(p)].long()
            chosen = torch.where(chosen < 0, own, chosen)
            scores = torch.stack([p[t][chosen[t]] for t in range(len(p))])
            if getattr(module, "norm_topk_prob", True):
                scores = scores / scores.sum(-1, keepdim=True)
            return logits, scores.to(hidden.dtype), chosen

        return run

    for layer, module in enumerate(gates):
        module.forward = gate(module, routes[:, layer])
    try:
        yield
    finally:
        for module in gates:
            del module.forward


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("family", "shape"),
    [("qwen3_moe", {}), ("qwen3_moe", {"norm_topk_prob": True, "num_hidden_layers": 3}), ("mixtral", {})],
)
def test_the_gradient_is_that_of_experts_that_were_forced(
    family: str, shape: dict[str, Any], moe: Moe, rows_of, routes_of, flat_gradient
) -> None:
    """Of packed rows that share prompts, against each row by itself."""
    model = moe(family, **shape).double()
    batch: Batch = rows_of(seed=4, **ROWS)
    layers = len(Routers(model))
    routes = routes_of(batch, layers=layers)
    weight = torch.linspace(-1, 1, batch.mask.numel()).view(batch.mask.shape).double()
    found = {}
    for i in range(len(batch)):
        n = int(batch.length[i])
        with forced(model, routes[i]):
            logits = model(input_ids=batch.tokens[i : i + 1, :n], use_cache=False).logits[0, :-1]
        logp = logits.log_softmax(-1).gather(-1, batch.tokens[i, 1:n, None])[:, 0]
        trained = batch.mask[i, 1:n]
        found[i] = logp[trained].detach()
        (logp * trained * weight[i, 1:n]).sum().backward()
    slow = flat_gradient(model)

    use_layouts(model)
    net = Net(model)
    out = forward(net, replace(batch, routes=routes), 1.0)
    for i, expected in found.items():
        torch.testing.assert_close(out.logp[i, batch.mask[i]], expected, rtol=0, atol=1e-12)
    (out.logp * weight).sum().backward()
    torch.testing.assert_close(flat_gradient(model), slow, rtol=1e-10, atol=1e-12)
    own = forward(net, batch, 1.0).logp
    assert not torch.allclose(own, out.logp, atol=1e-3), "the routers choose by themselves again"


def test_what_is_computed_again_goes_to_the_same_experts(moe: Moe, rows_of, routes_of, flat_gradient) -> None:
    """Outside of float64: recomputed passes round norms and routers to float32."""
    batch, found = rows_of(seed=4, **ROWS), []
    for checkpointing in (False, True):
        model = moe("mixtral").double()
        use_layouts(model)
        if checkpointing:
            compute_again(model)
        forward(Net(model), replace(batch, routes=routes_of(batch, layers=2)), 1.0).logp.sum().backward()
        found.append(flat_gradient(model))
    assert torch.equal(*found)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_policys_own_choices_change_no_bit(family: str, moe: Moe, rows_of) -> None:
    batch = rows_of(seed=2, dtype=torch.float32, **ROWS)
    found = []
    for notes in (False, True):
        learner = Learner(moe(family), build("grpo", {}, horizon=16), steps=Steps(microbatch_tokens=30))
        if notes:
            alone = moe(family)
            use_layouts(alone)
            routers, rows = Routers(alone, notes=True), []
            for tokens, length in zip(batch.tokens, batch.length.tolist(), strict=True):
                layout = PromptLayout(Cache(0, 0), [tuple(tokens[:length].tolist())])
                hidden_states(alone, *layout.inputs(torch.device("cpu"))[:, None], layout)
                rows.append(nn.functional.pad(routers.taken(), (0, 0, 0, len(tokens) - length)))
            batch = replace(batch, routes=torch.stack(rows).transpose(1, 2))
        update = learner.update(batch)
        found.append((update.metrics, update.logp, [p.clone() for p in learner.model.parameters()]))
    (metrics, logp, weights), (metrics2, logp2, weights2) = found
    assert metrics == metrics2
    assert torch.equal(logp, logp2)
    assert all(map(torch.equal, weights, weights2))


def test_a_reference_and_a_critic_of_its_own_choose_by_themselves(moe: Moe, rows_of, routes_of) -> None:
    batch = rows_of(seed=3, dtype=torch.float32, **ROWS)
    routed = replace(batch, routes=routes_of(batch, layers=2))
    policy = moe("mixtral")
    critic = CriticModel(policy, moe("mixtral", 2))
    nn.init.ones_(critic.head.weight)
    learner = Learner(policy, build("ppo", {}, horizon=16), critic=critic, reference=moe("mixtral", 1))
    assert torch.equal(*(learner.passes.score_references(rows).logp for rows in (batch, routed)))
    plain, other = (forward(learner.passes.net, rows, 1.0) for rows in (batch, routed))
    assert torch.equal(plain.value, other.value)
    assert not torch.equal(plain.logp, other.logp)


def test_tokens_that_rows_share_have_the_experts_of_a_row_that_knows(moe: Moe) -> None:
    """An answer of the data stands before those of the sampler, with the same prompt."""
    routes = numpy.arange(16, dtype=numpy.int16).reshape(4, 2, 2) % 6
    given, drawn = Trajectory.given([7, 8, 9, 4, 2], start=3), Trajectory.given([7, 8, 9, 5, 2], start=3)
    for rows in ([given, replace(drawn, routes=routes)], [replace(drawn, routes=routes), given]):
        packed = pack(Batch.of(rows, group=[0, 0]))
        assert packed.routes[:, :3].transpose(0, 1).tolist() == routes[:3].tolist()
        by_token = dict(zip(packed.tokens.tolist(), packed.routes.transpose(0, 1).tolist(), strict=True))
        assert by_token[5] == routes[3].tolist()
        assert by_token[4] == [[-1, -1], [-1, -1]]


def test_conversations_of_an_episode_are_compared_without_their_experts(moe: Moe, rows_of, routes_of) -> None:
    batch = rows_of(seed=3, dtype=torch.float32, **ROWS)
    episode = torch.arange(len(batch))
    episode[1] = episode[0] if batch.group[1] == batch.group[0] else 1
    found = []
    for routes in (None, routes_of(batch, layers=2)):
        learner = Learner(moe("mixtral"), build("online_dpo", {}, horizon=16), reference=moe("mixtral", 1))
        update = learner.update(replace(batch, episode=episode, routes=routes))
        found.append(update.metrics["grad_norm"])
    assert found[0] != found[1]


def test_routers_that_score_the_best_groups_alone_are_refused(moe: Moe) -> None:
    """An expert of another group would be weighed by 0; DeepSeek-V3 gathers the scores of all."""
    shape = {"n_group": 3, "topk_group": 1, "num_key_value_heads": 4, "qk_nope_head_dim": 4}
    shape |= {"qk_rope_head_dim": 4, "v_head_dim": 4, "kv_lora_rank": 8, "q_lora_rank": 8}
    for method, choices in (("greedy", 2), ("group_limited_greedy", 0)):
        assert router_choices(moe("deepseek_v2", topk_method=method, **shape)) == choices


def test_a_model_without_routers_has_none_to_note(llama) -> None:
    assert router_choices(llama(0)) == 0
    replay(llama(0), None)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no routers whose choices"):
        Routers(llama(0))


def engine_of(model: PreTrainedModel, **config: Any) -> NativeEngine:
    return NativeEngine(
        model,
        decode=lambda tokens: " ".join(map(str, tokens)),
        stop_tokens=[],
        config=NativeConfig(**config),
        routes=True,
    )


@pytest.fixture
def chosen(moe: Moe) -> Callable[[list[int]], numpy.ndarray]:
    """chosen(tokens) -> the experts of all tokens but the last, in one pass."""
    model = moe("mixtral", max_position_embeddings=256).double()
    use_layouts(model)
    routers = Routers(model, notes=True)

    @torch.no_grad()
    def run(tokens: list[int]) -> numpy.ndarray:
        layout = PromptLayout(Cache(0, 0), [tuple(tokens)])
        hidden_states(model, *layout.inputs(torch.device("cpu"))[:, None], layout)
        return routers.taken().transpose(0, 1)[:-1].numpy()

    return run


@pytest.mark.parametrize(
    ("tokens", "longest"),
    [pytest.param(4096, 12, id="roomy"), pytest.param(260, 126, id="withdrawing", marks=pytest.mark.full)],
)
def test_the_engine_says_which_experts_each_token_was_sent_to(
    tokens: int, longest: int, moe: Moe, chosen
) -> None:
    """Samples that share a row, prompts that begin alike, answers that are withdrawn and go on."""
    model = moe("mixtral", max_position_embeddings=256).double()
    engine = engine_of(model, rows=8, cache_tokens=tokens)
    sampling = Sampling(max_new_tokens=longest)
    asked, count, withdrawn = {}, 0, 0
    for n in range(2):
        prompt = (5, 6, 7, 1, 2, *range(8, 8 + 3 * n))
        for sample in range(2):
            request = Request(prompt=prompt, sampling=sampling, seed=1, task=str(n), sample=sample)
            asked[engine.submit(request)] = prompt
    for step in range(1000):
        if step == 6:
            pending = engine.withdraw()
            withdrawn = sum(request.begun is not None for _, request in pending)
            asked |= {engine.submit(request): request.prompt for _, request in pending}
        for ticket, completion in engine.poll():
            count += 1
            expected = chosen([*asked[ticket], *completion.tokens])
            assert completion.routes.dtype == numpy.int16
            numpy.testing.assert_array_equal(completion.routes, expected)
        if not engine.busy:
            break
    assert count == 4
    assert withdrawn
    assert bool(engine.withdrawals) == (tokens == 260)


def test_turns_of_an_episode_are_joined_as_one_row(moe: Moe, chosen) -> None:
    """The engine reuses the first turn's cache; the answer's last token runs with the second turn."""
    engine = engine_of(moe("mixtral").double(), rows=2, cache_tokens=512)
    live = RunningEpisode(Task(id="t", messages=()), 0, "t", Sampling(), [5, 6, 7])
    for said in ([], [8, 9]):
        live.append(said)
        sampling = Sampling(max_new_tokens=4)
        engine.submit(Request(prompt=tuple(live.tokens), sampling=sampling, task="t", episode="e"))
        [(_, answer)] = [done for _ in range(6) for done in engine.poll()]
        live.append_answer(answer)
    live.append([4])
    row = live.trajectory()
    assert sum(row.sampled) > 2
    numpy.testing.assert_array_equal(row.routes, chosen(row.tokens[:-1]))
    batch = Batch.of([row, Trajectory.given([1, 2, 3])], group=[0, 1])
    assert batch.routes[0, len(row.routes) :].unique().tolist() == batch.routes[1].unique().tolist() == [-1]


def test_what_older_weights_chose_stays_with_the_tokens_that_they_drew(moe: Moe) -> None:
    model = moe("mixtral")
    engine = engine_of(model, rows=2, cache_tokens=512)
    engine.submit(Request(prompt=(5, 6, 7), sampling=Sampling(max_new_tokens=12), task="t"))
    for _ in range(5):
        assert not engine.poll()
    [(_, request)] = engine.unanswered()
    earlier = request.begun.routes.copy()
    assert not engine.poll()
    [(_, request)] = engine.withdraw()
    before = request.begun.routes
    numpy.testing.assert_array_equal(before[: len(earlier)], earlier)
    assert len(before) == len(earlier) + 1
    assert len(before) == 3 + len(request.begun.tokens) - 1
    engine.load(moe("mixtral", 1).named_parameters(), 1)
    engine.submit(request)
    [(_, answer)] = [done for _ in range(12) for done in engine.poll()]
    numpy.testing.assert_array_equal(answer.routes[: len(before)], before)
    assert set(answer.version) == {0, 1}


def test_rows_keep_their_experts_where_they_are_stored() -> None:
    routes = numpy.arange(12, dtype=numpy.int16).reshape(3, 2, 2)
    row = replace(Trajectory.given([7, 8, 9, 4], start=2), routes=routes)
    other = Trajectory.given([1, 2])
    numpy.testing.assert_array_equal(pickle.loads(pickle.dumps(row)).routes, routes)
    buffer, copy = (ReplayBuffer(max_lag=3, seed=0) for _ in range(2))
    buffer.add(1, [[(row, ()), (other, ())], [(row, ())]])
    copy.restore(buffer.tensors())
    first, second = copy.draw(2, update=2)
    numpy.testing.assert_array_equal(first[0][0].routes, routes)
    assert first[1][0].routes is None
    numpy.testing.assert_array_equal(second[0][0].routes, routes)
    assert (
        Completion(tokens=[1], logp_gen=[0], logp_policy=[0], version=[0], text="", stop="eos").routes is None
    )
