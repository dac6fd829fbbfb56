"""Adapters: a start that changes nothing, a merge that changes nothing, files that peft reads."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import Linear
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from posttrain.learner.forward import Net, forward
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.lora import (
    Factors,
    Lora,
    add_adapter,
    base,
    merged,
    parameters,
    save_adapter,
    saved_factors,
    with_saved_adapter,
)
from posttrain.learner.optim import Optim
from posttrain.methods.build import build
from posttrain.methods.table import GRPO, SFT
from posttrain.models.attention import use_layouts
from posttrain.types import Batch, Method, UserError

Make = Callable[..., Any]
KINDS = {
    "lora": Lora(rank=4, alpha=8),
    "rslora": Lora(rank=4, alpha=8, rslora=True),
    "dora": Lora(rank=4, alpha=8, dora=True),
    "two matrices": Lora(rank=2, targets=("q_proj", "down_proj")),
}
every_kind = pytest.mark.parametrize("kind", list(KINDS))


def taught(llama: Make, rows_of: Make, lora: Lora, updates: int = 4, **shape: Any) -> Learner:
    """A learner whose adapter has moved far."""
    learner = Learner(llama(0, **shape), SFT, optim=Optim(lr=0.05), lora=lora)
    for seed in range(updates):
        learner.update(rows_of(seed, dtype=torch.float32))
    return learner


def said(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    use_layouts(model)
    with torch.no_grad():
        return forward(Net(model.eval()), batch, 1.0).logp


@pytest.mark.parametrize("kind", ["lora", "rslora", "two matrices"])
def test_at_the_start_it_is_the_model_bit_for_bit(kind: str, llama: Make, rows_of: Make) -> None:
    batch = rows_of(seed=1, dtype=torch.float32)
    plain, adapted = Learner(llama(0), SFT), Learner(llama(0), SFT, lora=KINDS[kind])
    assert torch.equal(plain.score(batch).logp, adapted.score(batch).logp)
    assert torch.equal(plain.score(batch).entropy, adapted.score(batch).entropy)
    before = dict(plain.weights())
    assert all(torch.equal(before[name], tensor) for name, tensor in adapted.weights())


@every_kind
def test_the_first_step_moves_b_alone_and_no_step_moves_the_model(
    kind: str, llama: Make, rows_of: Make
) -> None:
    learner = Learner(llama(0), SFT, optim=Optim(lr=0.05), lora=KINDS[kind])
    before = {n: p.detach().clone() for n, p in learner.model.named_parameters()}

    def moved() -> set[str]:
        return {n for n, p in learner.model.named_parameters() if not torch.equal(p, before[n])}

    learner.update(rows_of(seed=0, dtype=torch.float32))
    b = {n for n in before if ".lora_B." in n}
    magnitudes = {n for n in before if "lora_magnitude_vector" in n}
    assert len(b) == {"two matrices": 4}.get(kind, 14)
    assert moved() == b | magnitudes
    learner.update(rows_of(seed=1, dtype=torch.float32))
    assert moved() == b | magnitudes | {n for n in before if ".lora_A." in n}


@every_kind
@pytest.mark.parametrize("tied", [False, True])
def test_the_merged_weights_are_a_plain_model_that_says_the_same(
    kind: str, tied: bool, llama: Make, rows_of: Make
) -> None:
    learner = taught(llama, rows_of, KINDS[kind], tie_word_embeddings=tied)
    batch = rows_of(seed=9, dtype=torch.float32)
    plain = llama(1, tie_word_embeddings=tied)
    names = {n: p.shape for n, p in plain.named_parameters()}
    merged = dict(learner.weights())
    assert {n: t.shape for n, t in merged.items()} == names
    with torch.no_grad():
        for name, p in plain.named_parameters():
            p.copy_(merged[name])
    now = learner.score(batch).logp
    assert float((now - said(llama(0, tie_word_embeddings=tied), batch)).abs().max()) > 0.5
    torch.testing.assert_close(said(plain, batch), now, rtol=1e-4, atol=1e-4)


@every_kind
def test_what_is_saved_is_an_ordinary_adapter(kind: str, llama: Make, rows_of: Make, tmp_path: Path) -> None:
    learner = taught(llama, rows_of, KINDS[kind])
    batch = rows_of(seed=9, dtype=torch.float32)
    save_adapter(learner.model, tmp_path)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {p.name for p in tmp_path.iterdir()}
    loaded = PeftModel.from_pretrained(llama(0), str(tmp_path))
    torch.testing.assert_close(
        said(loaded.get_base_model(), batch), learner.score(batch).logp, rtol=1e-5, atol=1e-5
    )
    merged = with_saved_adapter(llama(0), tmp_path)
    assert not [n for n, _ in merged.named_parameters() if "lora" in n]
    torch.testing.assert_close(said(merged, batch), learner.score(batch).logp, rtol=1e-4, atol=1e-4)


def test_a_target_that_names_nothing_is_refused(llama: Make) -> None:
    with pytest.raises(ValueError, match="nothing_proj"):
        Learner(llama(0), SFT, lora=Lora(rank=2, targets=("nothing_proj",)))
    with pytest.raises(ValueError, match="rank"):
        Lora(rank=-1)
    with pytest.raises(ValueError, match="alpha"):
        Lora(rank=1, alpha=0)


@every_kind
def test_its_size_is_known_without_building_it(kind: str, llama: Make) -> None:
    model = llama(0)
    adapted = Learner(model, SFT, lora=KINDS[kind]).model
    count = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert parameters(llama(0).config, KINDS[kind]) == count


def test_nothing_of_it_is_random_but_the_start_which_the_seed_draws(llama: Make, rows_of: Make) -> None:
    model, state = llama(0), torch.get_rng_state()

    def start(seed: int) -> Learner:
        return Learner(copy.deepcopy(model), SFT, lora=KINDS["lora"], optim=Optim(lr=0.1), seed=seed)

    def trained(learner: Learner) -> torch.Tensor:
        return torch.cat([t.flatten() for t in learner.tensors()["trained"].values()])

    a, b, c = start(3), start(3), start(4)
    assert torch.equal(trained(a), trained(b))
    assert not torch.equal(trained(a), trained(c))
    for learner in (a, b):
        learner.update(rows_of(seed=0, dtype=torch.float32))
        learner.update(rows_of(seed=1, dtype=torch.float32))
    assert torch.equal(trained(a), trained(b))
    assert torch.equal(torch.get_rng_state(), state)
    assert not [m for m in a.model.modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]


@pytest.mark.parametrize("lora", [Lora(), KINDS["lora"], KINDS["dora"]], ids=["copy", "lora", "dora"])
def test_the_reference_is_the_policy_as_it_began(lora: Lora, llama: Make, rows_of: Make) -> None:
    """A frozen copy, or the model without its adapter; and the policy has left it."""
    method: Method = build("grpo", {"kl_in_loss": 0.1}, horizon=8)
    reference = None if lora.rank else llama(0)
    learner = Learner(llama(0), method, optim=Optim(lr=0.05), lora=lora, reference=reference)
    batch = rows_of(seed=2, dtype=torch.float32)
    first = said(llama(0), batch)
    learner.update(batch)
    done = learner.update(batch)
    assert done.batch.logp_ref is not None
    torch.testing.assert_close(done.batch.logp_ref, first, rtol=0, atol=1e-5)
    torch.testing.assert_close(learner.score_reference(batch).logp, first, rtol=0, atol=1e-5)
    assert float((learner.score(batch).logp - first).abs().max()) > 0.1
    assert done.metrics["kl/ref"] > 1e-3
    assert base(learner.model).get_input_embeddings().weight.grad is None


def test_a_method_that_needs_a_reference_is_refused_without_one(llama: Make, rows_of: Make) -> None:
    with pytest.raises(ValueError, match="reference"):
        Learner(llama(0), build("grpo", {"kl_in_loss": 0.1}, horizon=8))
    with pytest.raises(ValueError, match="no adapter"):
        Learner(llama(0), GRPO).score_reference(rows_of(seed=0, dtype=torch.float32))


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.usefixtures("without_kernels")
def test_recomputed_activations_give_the_same_adapter(kind: str, llama: Make, rows_of: Make) -> None:
    ends = []
    for again in (False, True):
        steps = Steps(gradient_checkpointing=again)
        learner = Learner(llama(0), SFT, optim=Optim(lr=0.05), lora=KINDS[kind], steps=steps)
        for seed in range(2):
            learner.update(rows_of(seed, dtype=torch.float32))
        ends.append(learner.tensors()["trained"])
    assert all(torch.equal(ends[0][name], other[name]) for other in ends[1:] for name in ends[0])


# ---------------------------------------------------------------------- the formula


def test_b_is_0_at_the_start_and_only_its_gradient_is_not(llama: Make, rows_of: Make) -> None:
    """∇A = s Bᵀ ∇h xᵀ is exactly 0 where B is, and ∇B = s ∇h (A x)ᵀ is not."""
    for init in ("kaiming", "gaussian"):
        model = llama(0)
        use_layouts(model)
        adapted = add_adapter(model, Lora(rank=4, alpha=8, init=init), seed=1)  # type: ignore[arg-type]
        forward(Net(base(adapted)), rows_of(seed=0, dtype=torch.float32), 1.0).logp.sum().backward()  # type: ignore[no-untyped-call]
        trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
        assert all(p.grad is None for n, p in adapted.named_parameters() if n not in trained)
        for name, p in trained.items():
            assert p.grad is not None
            b = ".lora_B." in name
            assert bool(p.any()) != b
            assert bool(p.grad.any()) == b


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_an_adapted_layer_is_the_formula(kind: str, llama: Make, rows_of: Make) -> None:
    """W x + (α/r) B A x; rsLoRA α/√r; DoRA scales each row of W + (α/r) B A to its magnitude."""
    learner = taught(llama, rows_of, KINDS[kind])
    layer = base(learner.model).model.layers[1].mlp.down_proj
    w, a, b = layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x = torch.randn(5, w.shape[1], generator=torch.Generator().manual_seed(0))
    whole = w + (8 / 4**0.5 if kind == "rslora" else 8 / 4) * b @ a
    if kind == "dora":
        m = layer.lora_magnitude_vector["default"].weight
        whole = m[:, None] * whole / whole.norm(dim=1, keepdim=True)
    assert float((whole - w).detach().norm()) > 0.1
    torch.testing.assert_close(layer(x), x @ whole.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_adapted_layer_computes_as_peft_s_own_and_keeps_its_input_once(
    dtype: torch.dtype, llama: Make, rows_of: Make
) -> None:
    learner = taught(llama, rows_of, KINDS["lora"])
    layer = base(learner.model).model.layers[0].mlp.gate_proj.to(dtype)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, layer.in_features, generator=g).to(dtype).requires_grad_(True)
    d = torch.randn(2, 7, layer.out_features, generator=g).to(dtype)
    wanted = [x, layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    kept: dict[int, torch.Tensor] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = layer(x)
    found = [out, *torch.autograd.grad(out, wanted, d)]
    slow = Linear.forward(layer, x)
    same = [slow, *torch.autograd.grad(slow, wanted, d)]
    rough = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}
    for a, b in zip(found, same, strict=True):
        torch.testing.assert_close(a, b, **rough)
    of_input = [t for t in kept.values() if t.shape[-1] == layer.in_features and t.numel() == x.numel()]
    assert [t.data_ptr() for t in of_input] == [x.data_ptr()]


@every_kind
def test_what_trains_is_r_times_rows_and_columns(kind: str, llama: Make) -> None:
    lora = KINDS[kind]
    matrices = {
        n: m
        for n, m in llama(0).named_modules()
        if isinstance(m, torch.nn.Linear)
        and n != "lm_head"
        and (not lora.targets or n.endswith(lora.targets))
    }
    size = sum(lora.rank * (m.in_features + m.out_features) for m in matrices.values())
    magnitudes = sum(m.out_features for m in matrices.values()) if lora.dora else 0
    assert parameters(llama(0).config, lora) == size + magnitudes


@pytest.mark.usefixtures("float64")
@every_kind
def test_merging_rounds_and_does_nothing_else(kind: str, llama: Make, rows_of: Make) -> None:
    """In float64 the merged model says what the adapted one says, to 1e-9; float32 rounds both to 1e-5."""
    lora, batch = KINDS[kind], rows_of(seed=9)
    model = llama(0).double()
    use_layouts(model)
    adapted = add_adapter(model.eval(), lora, seed=0)
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if p.requires_grad and ".lora_A." not in name:
                p += 0.5 * torch.randn(p.shape, generator=g, dtype=p.dtype)
    plain = llama(1).double()
    with torch.no_grad():
        for name, weight in merged(adapted):
            assert weight.dtype == torch.float64
            plain.get_parameter(name).copy_(weight)
    now, start = said(base(adapted), batch), said(llama(0).double(), batch)
    assert float((now - start).abs().max()) > 0.5
    torch.testing.assert_close(said(plain, batch), now, rtol=1e-9, atol=1e-9)


def test_dora_starts_at_the_model_up_to_rounding(llama: Make, rows_of: Make) -> None:
    """Its magnitudes are the lengths of W's rows, so each row is divided and multiplied by one number."""
    batch = rows_of(seed=1, dtype=torch.float32)
    learner = Learner(llama(0), SFT, lora=KINDS["dora"])
    torch.testing.assert_close(learner.score(batch).logp, said(llama(0), batch), rtol=1e-5, atol=1e-5)
    start = dict(llama(0).named_parameters())
    for name, weight in learner.weights():
        torch.testing.assert_close(weight, start[name], rtol=3e-7, atol=0)


def test_at_full_rank_it_can_be_any_update() -> None:
    """B = UΣ and A = Vᵀ of any ΔW."""
    g = torch.Generator().manual_seed(0)
    weight, update = torch.randn(6, 9, generator=g), torch.randn(6, 9, generator=g)
    u, s, v = torch.linalg.svd(update, full_matrices=False)
    factors = Factors(a=v, b=u * s, scale=1.0)
    torch.testing.assert_close(factors.adapted(weight), weight + update, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(factors.singular_values(), s.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("r", [1, 4, 16])
def test_the_size_of_an_update_grows_with_the_root_of_the_rank_unless_scaled_so(r: int) -> None:
    """E‖BA‖² = d_out d_in r for factors of variance 1: LoRA's α/r leaves α²/r of it a number, rsLoRA's α²."""
    out, into, alpha = 40, 60, 3.0
    g = torch.Generator().manual_seed(r)
    drawn = [(torch.randn(r, into, generator=g), torch.randn(out, r, generator=g)) for _ in range(200)]
    for scale, wanted in ((alpha / r, alpha**2 / r), (alpha / r**0.5, alpha**2)):
        squares = torch.stack(
            [Factors(a=a, b=b, scale=scale).singular_values().square().sum() for a, b in drawn]
        )
        mean, error = float(squares.mean()), float(squares.std()) / len(drawn) ** 0.5
        assert abs(mean - out * into * wanted) < 4 * error
        assert error < 0.05 * mean


def test_a_s_start_has_the_spread_that_is_asked_for(llama: Make) -> None:
    """Kaiming's uniform numbers lie within 1/√columns and fill it; gaussian ones have deviation 1/rank."""
    for init in ("kaiming", "gaussian"):
        adapted = add_adapter(llama(0, hidden_size=64), Lora(rank=8, init=init), seed=0)  # type: ignore[arg-type]
        a = [p for n, p in adapted.named_parameters() if ".lora_A." in n]
        unit = torch.cat(
            [(p * (p.shape[1] ** 0.5 if init == "kaiming" else 8)).flatten() for p in a]
        ).detach()
        n = len(unit)
        assert abs(float(unit.mean())) < 5 / n**0.5
        assert float(unit.std()) == pytest.approx(3**-0.5 if init == "kaiming" else 1, abs=5 / n**0.5)
        assert (float(unit.abs().max()) <= 1) == (init == "kaiming")


# ---------------------------------------------------------------------- keeping and changing


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_adapter_is_merged_bit_for_bit_as_the_sampler_had_it(
    dtype: torch.dtype, kind: str, llama: Make, rows_of: Make, tmp_path: Path
) -> None:
    learner = Learner(llama(0).to(dtype), SFT, optim=Optim(lr=0.05), lora=KINDS[kind])
    for seed in range(2):
        learner.update(rows_of(seed, dtype=torch.float32))
    save_adapter(learner.model, tmp_path)
    again = dict(with_saved_adapter(llama(0).to(dtype), tmp_path).named_parameters())
    wide = dict(with_saved_adapter(llama(0).to(dtype), tmp_path, wide=True).named_parameters())
    sampled = dict(learner.weights())
    assert again.keys() == sampled.keys() == wide.keys()
    for name, weight in sampled.items():
        assert weight.dtype == again[name].dtype == dtype
        assert torch.equal(weight, again[name]), name
        assert wide[name].dtype == torch.float32
        assert torch.equal(weight, wide[name].to(dtype)), name
    changed = {n for n, p in llama(0).to(dtype).named_parameters() if not torch.equal(p, sampled[n])}
    assert changed == saved_factors(tmp_path).keys()


@pytest.mark.usefixtures("without_kernels")
def test_adapters_change_places_on_one_model(llama: Make, rows_of: Make, tmp_path: Path) -> None:
    """Each says what it said when it was trained, in any order, and without them the model is what it was."""
    batch = rows_of(seed=9, dtype=torch.float32)
    wanted = {}
    for number, kind in enumerate(("lora", "rslora", "dora")):
        learner = Learner(llama(0), SFT, optim=Optim(lr=0.05), lora=KINDS[kind], seed=number)
        learner.update(rows_of(number, dtype=torch.float32))
        learner.update(rows_of(number + 5, dtype=torch.float32))
        save_adapter(learner.model, tmp_path / kind)
        wanted[kind] = learner.score(batch).logp
    start = said(llama(0), batch)
    host = PeftModel.from_pretrained(llama(0), str(tmp_path / "lora"), adapter_name="lora")
    for kind in ("rslora", "dora"):
        host.load_adapter(str(tmp_path / kind), adapter_name=kind)
    before = {n: p.detach().clone() for n, p in host.named_parameters() if ".base_layer." in n}
    for kind in ("dora", "lora", "rslora", "lora", "dora"):
        host.set_adapter(kind)
        assert torch.equal(said(base(host), batch), wanted[kind])
        assert min(float((wanted[kind] - v).abs().max()) for k, v in wanted.items() if k != kind) > 0.1
        with host.disable_adapter():
            assert torch.equal(said(base(host), batch), start)
    assert all(torch.equal(p, before[n]) for n, p in host.named_parameters() if n in before)


def test_an_adapter_of_another_model_is_not_merged(llama: Make, tmp_path: Path) -> None:
    save_adapter(add_adapter(llama(0), Lora(rank=2), seed=0), tmp_path)
    for other in (llama(0, num_hidden_layers=1), llama(0, intermediate_size=20)):
        with pytest.raises(UserError, match="another model"):
            with_saved_adapter(other, tmp_path)
    save_adapter(add_adapter(llama(0), Lora(rank=2, targets=("q_proj",)), seed=0), tmp_path)
    with pytest.raises(UserError, match=r"lacks \d matrices, first model.layers.\d.self_attn.q_proj"):
        with_saved_adapter(llama(0, num_hidden_layers=9), tmp_path)


def test_adapter_tensors_that_no_merge_would_read_are_refused(llama: Make, tmp_path: Path) -> None:
    save_adapter(add_adapter(llama(0), Lora(rank=2), seed=0), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    head = {"base_model.model.lm_head.weight": torch.zeros(2, 2)}
    save_file(tensors | head, file)
    with pytest.raises(UserError, match=r"1 tensors .* first base_model.model.lm_head"):
        with_saved_adapter(llama(0), tmp_path)
    lost = next(name for name in tensors if name.endswith("lora_B.weight"))
    save_file({name: t for name, t in tensors.items() if name != lost}, file)
    with pytest.raises(UserError, match=f"lacks {lost}"):
        with_saved_adapter(llama(0), tmp_path)


def test_all_linear_is_what_no_target_is(llama: Make) -> None:
    """As peft, TRL and verl call every linear layer but the head."""
    named = add_adapter(llama(0), Lora(rank=2, targets="all-linear"), seed=0).state_dict()
    plain = add_adapter(llama(0), Lora(rank=2), seed=0).state_dict()
    assert named.keys() == plain.keys()
    assert all(torch.equal(named[n], plain[n]) for n in named)


# ---------------------------------------------------------------------- what takes no adapter


def test_a_target_that_names_nothing_beside_one_that_does_is_refused(llama: Make) -> None:
    """peft adapts q_proj and says nothing of the other."""
    with pytest.raises(ValueError, match="no matrix 'v_prj'; did you mean 'v_proj'"):
        add_adapter(llama(0), Lora(rank=2, targets=("q_proj", "v_prj")), seed=0)


@pytest.mark.parametrize("targets", [(), ("c_attn",)])
def test_weights_that_lie_transposed_take_no_adapter(targets: tuple[str, ...]) -> None:
    """GPT-2's Conv1D: DoRA's rows would be columns."""
    sizes = {"vocab_size": 23, "n_embd": 16, "n_layer": 1, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    with pytest.raises(ValueError, match="Conv1D"):
        add_adapter(GPT2LMHeadModel(GPT2Config(**sizes)), Lora(rank=2, targets=targets), seed=0)


def test_stacked_experts_take_no_adapter_but_the_matrices_beside_them_do() -> None:
    sizes = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None))
    for targets in ((), ("experts",), ("gate",)):
        with pytest.raises(ValueError, match=r"experts|gate"):
            add_adapter(model, Lora(rank=2, targets=targets), seed=0)
    adapted = add_adapter(model, Lora(rank=2, targets=("q_proj", "v_proj")), seed=0)
    names = {n for n, _ in merged(adapted)}
    fresh = MixtralForCausalLM(model.config)
    assert names == {n for n, _ in fresh.named_parameters()}


def test_a_target_that_peft_takes_for_experts_is_refused() -> None:
    """It would adapt the experts instead of the matrices of that name, and nothing would merge that."""
    sizes = {"vocab_size": 23, "hidden_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 2}
    experts = {"first_k_dense_replace": 1, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 8, "topk_group": 1}
    config = DeepseekV3Config(**sizes, **experts, **heads, intermediate_size=24, pad_token_id=0)
    with pytest.raises(ValueError, match=r"peft also adapts model\.layers\.1\.mlp\.experts"):
        add_adapter(DeepseekV3ForCausalLM(config), Lora(rank=2, targets=("down_proj",)), seed=0)
    add_adapter(DeepseekV3ForCausalLM(config), Lora(rank=2, targets=("o_proj",)), seed=0)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_embedding_that_is_the_output_head_too_takes_no_adapter(target: str, llama: Make) -> None:
    """Its adapter would move one of the two, and merging it the other as well."""
    with pytest.raises(ValueError, match=target):
        add_adapter(llama(0, tie_word_embeddings=True), Lora(rank=2, targets=(target,)), seed=0)


def test_an_output_head_of_its_own_takes_one(llama: Make, rows_of: Make) -> None:
    batch = rows_of(seed=9, dtype=torch.float32)
    learner = taught(llama, rows_of, Lora(rank=2, targets=("lm_head",)), updates=2)
    plain = llama(0)
    changed = {n for n, w in learner.weights() if not torch.equal(w, plain.get_parameter(n))}
    assert changed == {"lm_head.weight"}
    with torch.no_grad():
        plain.lm_head.weight.copy_(dict(learner.weights())["lm_head.weight"])
    torch.testing.assert_close(said(plain, batch), learner.score(batch).logp, rtol=1e-5, atol=1e-5)


def test_quantised_weights_take_no_adapter(llama: Make) -> None:
    model = llama(0)
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"q_proj .* floating point"):
        add_adapter(model, Lora(rank=2), seed=0)
