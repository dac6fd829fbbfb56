"""NEFTune: the right amount of noise, the same however a step is cut, and none where nothing learns."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from posttrain.learner.lora import Lora, add_adapter, base
from posttrain.learner.neftune import Noise, drawn, noisy, of_step
from posttrain.learner.pack import Pack, microbatches, pack, trained_states
from posttrain.models.attention import use_layouts
from posttrain.types import Batch, Trajectory

Make = Callable[..., Any]


def row(tokens: list[int], prompt: int = 1) -> Trajectory:
    """A row whose tokens after the prompt are trained."""
    n = len(tokens)
    zero = [0.0] * n
    return Trajectory(
        tokens=tokens,
        sampled=[t >= prompt for t in range(n)],
        logp_gen=zero,
        logp_policy=zero,
        version=[0] * n,
        reward=zero,
    )


def of(*rows: list[int], group: list[int] | None = None) -> Batch:
    return Batch.of([row(tokens) for tokens in rows], group or list(range(len(rows))))


def noise_of(batch: Batch, alpha: float = 5.0, d: int = 16, seed: int = 0, step: int = 0) -> torch.Tensor:
    noise = of_step(batch, alpha, seed=seed, step=step)
    assert noise is not None
    return drawn(noise, pack(batch), batch, d)


def states(model: PreTrainedModel, batch: Batch, noise: Noise | None) -> tuple[Pack, torch.Tensor]:
    packed = pack(batch)
    with noisy(model, packed, batch, noise):
        return packed, trained_states(model, packed)


@pytest.fixture
def model(llama: Make) -> PreTrainedModel:
    made: PreTrainedModel = llama(0).double()
    use_layouts(made)
    return made.eval()


# ---------------------------------------------------------------------- its size


@pytest.mark.parametrize(("L", "d", "alpha"), [(101, 64, 5.0), (33, 256, 15.0), (1001, 16, 0.5)])
def test_it_is_uniform_and_the_square_of_a_row_s_noise_is_a_third_of_alpha_squared(
    L: int, d: int, alpha: float
) -> None:
    noise = noise_of(of([3] * L), alpha, d)
    assert noise.shape == (L - 1, d)  # the last token is predicted and never fed
    bound = alpha / (L * d) ** 0.5
    n = noise.numel()
    unit = noise.double() / bound
    assert float(unit.abs().max()) <= 1 + 1e-6
    assert abs(float(unit.mean())) < 5 / (3 * n) ** 0.5
    # The square of a uniform number on [-1, 1] has mean 1/3 and variance 4/45.
    assert abs(float((unit**2).mean()) - 1 / 3) < 5 * (4 / (45 * n)) ** 0.5
    ranked = unit.flatten().sort().values
    even = torch.linspace(-1, 1, n, dtype=torch.float64)
    assert float((ranked - even).abs().max()) < 4 / n**0.5  # Kolmogorov's distance, at most 2/√n of 2
    assert float(noise.double().pow(2).sum()) == pytest.approx(alpha**2 / 3 * (L - 1) / L, rel=0.05)


def test_the_length_is_that_of_the_row_and_not_of_the_padding() -> None:
    short, long = [3] * 5, [4] * 20
    together, alone = noise_of(of(short, long)), noise_of(of(short))
    assert torch.equal(together[:4], alone)


def test_a_group_takes_the_length_of_its_longest_row_in_the_step() -> None:
    batch = of([3, 4], [3] * 9, [5] * 4, group=[7, 7, 2])
    noise = of_step(batch, 5.0, seed=0, step=0)
    assert noise is not None
    assert noise.longest == {7: 9, 2: 4}


# ---------------------------------------------------------------------- what it depends on


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1])


def test_rows_steps_seeds_places_and_dimensions_have_noise_of_their_own() -> None:
    d, tokens = 64, [3] * 100
    noise = noise_of(of(tokens, tokens), d=d)
    first, second = noise[:99], noise[99:]
    bound = 5 / first.numel() ** 0.5
    others = {
        "another group": second,
        "another step": noise_of(of(tokens), d=d, step=1),
        "another seed": noise_of(of(tokens), d=d, seed=1),
        "another token at the start": noise_of(of([4, *tokens[1:]]), d=d),
    }
    for name, other in others.items():
        assert not (first == other).all(-1).any(), name
        assert abs(correlation(first, other)) < bound, name
    assert abs(correlation(first[1:], first[:-1])) < bound
    assert abs(correlation(first[:, 1:], first[:, :-1])) < bound
    places = torch.corrcoef(first.double()).fill_diagonal_(0)
    assert float(places.abs().max()) < 6 / d**0.5


def test_the_same_seed_and_step_draw_the_same_noise_and_nothing_else_is_drawn() -> None:
    state = torch.get_rng_state()
    assert torch.equal(noise_of(of([3, 4, 5]), step=4), noise_of(of([3, 4, 5]), step=4))
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_of_a_group_agree_as_far_as_they_are_the_same() -> None:
    a, b = [1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 5, 6]
    noise = noise_of(of(a, b, group=[0, 0]))
    alone = noise_of(of(b, group=[0]))
    # Packed: one shared token, then four of each rest.
    assert torch.equal(noise[0], alone[0])
    assert torch.equal(noise[1:3], noise[5:7])
    assert not (noise[3:5] == noise[7:9]).any()  # from the token that differs on


def test_it_is_splitmix64_of_a_sum_over_the_row() -> None:
    """The same arithmetic with Python's integers, which neither wrap nor copy a sign."""
    full = (1 << 64) - 1

    def mixed(x: int) -> int:
        x &= full
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & full
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & full
        return x ^ (x >> 31)

    tokens, group, alpha, d = [7, 0, 22, 5, 5], -3, 2.0, 6
    batch = of(tokens, group=[group])
    noise = of_step(batch, alpha, seed=11, step=3)
    assert noise is not None
    assert -(1 << 63) <= noise.key < 1 << 63
    wanted, total = [], 0
    for t, token in enumerate(tokens[:-1]):
        total += mixed(mixed(token + noise.key) + t)
        stream = mixed(total + mixed(noise.key + group))
        units = [(mixed(stream + (j + 1) * 0x9E3779B97F4A7C15) >> 41) * 2 + 1 - 2**23 for j in range(d)]
        wanted.append([u / 2**23 * alpha / (len(tokens) * d) ** 0.5 for u in units])
    torch.testing.assert_close(drawn(noise, pack(batch), batch, d), torch.tensor(wanted), rtol=1e-6, atol=0)


# ---------------------------------------------------------------------- however a step is cut


@pytest.mark.parametrize("seed", range(4))
def test_a_token_has_the_same_noise_in_every_pack(seed: int, rows_of: Make) -> None:
    batch = rows_of(seed)
    noise = of_step(batch, 5.0, seed=1, step=2)
    assert noise is not None
    trained = (batch.mask[:, 1:]).any(-1).nonzero().flatten()
    alone = {int(i): drawn(noise, pack(part := batch.rows(i[None])), part, 8) for i in trained}
    g = torch.Generator().manual_seed(seed)
    for size in (2, 4, len(trained)):
        for _ in range(5):
            rows = trained[torch.randperm(len(trained), generator=g)[:size]]
            part = batch.rows(rows)
            packed = pack(part)
            found = drawn(noise, packed, part, 8)
            fed = found[packed.source]
            wanted = [alone[int(rows[r])][c - 1] for r, c in zip(packed.row, packed.column, strict=True)]
            assert torch.equal(fed, torch.stack(wanted))
            for prompt_group in packed.prompt_groups:  # and the tokens that predict nothing
                own = packed.row[(packed.source >= prompt_group.start) & (packed.source < prompt_group.stop)]
                row = alone[int(rows[own[0]])]
                shared = prompt_group.prefix if prompt_group.branches else len(row)
                assert torch.equal(found[prompt_group.start : prompt_group.start + shared], row[:shared])


@pytest.mark.usefixtures("float64")
def test_a_packed_row_says_what_it_would_alone_with_its_noise_on_its_embeddings(
    rows_of: Make, model: PreTrainedModel, llama: Make
) -> None:
    """Against transformers' own forward, which is given the noisy embeddings."""
    batch = rows_of(seed=3)
    noise = of_step(batch, 40.0, seed=0, step=0)
    assert noise is not None
    packed, found = states(model, batch, noise)
    plain = llama(0).double().eval()
    without = states(model, batch, None)[1]
    assert float((found - without).detach().abs().max()) > 0.1
    for i in packed.row.unique().tolist():
        part = batch.rows(torch.tensor([i]))
        one = pack(part)
        embedded = plain.get_input_embeddings()(one.tokens) + drawn(noise, one, part, 16).double()
        hidden = plain.get_decoder()(inputs_embeds=embedded[None], use_cache=False).last_hidden_state[0]
        columns = packed.column[packed.row == i]
        torch.testing.assert_close(found[packed.row == i], hidden[columns - 1], rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("float64")
def test_the_gradient_of_a_step_is_the_same_for_every_cut_and_order(
    rows_of: Make, model: PreTrainedModel, flat_gradient: Make
) -> None:
    batch = rows_of(seed=5)
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(*batch.mask.shape, 16, generator=g, dtype=torch.float64)
    order = torch.randperm(len(batch), generator=g)
    noise = of_step(batch, 40.0, seed=0, step=7)
    shuffled = of_step(batch.rows(order), 40.0, seed=0, step=7)
    assert noise == shuffled

    def gradient(budget: int, rows: torch.Tensor, noise: Noise | None) -> torch.Tensor:
        whole, cut = batch.rows(rows), 0
        for part in microbatches(whole, budget):
            index = torch.tensor(part)
            packed, found = states(model, whole.rows(index), noise)
            (weight[rows[index]][packed.row, packed.column] * found).sum().backward()  # type: ignore[no-untyped-call]
            cut += 1
        assert (cut == 1) == (budget == 1000)
        found_gradient: torch.Tensor = flat_gradient(model)
        return found_gradient

    straight = torch.arange(len(batch))
    wanted = gradient(1000, straight, noise)
    assert float(wanted.norm()) > 1
    assert float((wanted - gradient(1000, straight, None)).norm()) > 0.1 * float(wanted.norm())
    for budget, rows in ((1, straight), (14, straight), (14, order), (1000, order)):
        torch.testing.assert_close(gradient(budget, rows, noise), wanted, rtol=1e-9, atol=1e-9)


def test_recomputed_activations_have_the_same_noise(
    rows_of: Make, model: PreTrainedModel, flat_gradient: Make
) -> None:
    """The backward pass computes them again when the noise is no longer on."""
    batch = rows_of(seed=5)
    noise = of_step(batch, 40.0, seed=0, step=7)
    states(model, batch, noise)[1].square().sum().backward()  # type: ignore[no-untyped-call]
    kept = flat_gradient(model)
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    model.train()
    states(model, batch, noise)[1].square().sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(flat_gradient(model), kept)


def test_padding_changes_no_noise(rows_of: Make) -> None:
    batch = rows_of(seed=6)
    noise = of_step(batch, 5.0, seed=0, step=0)
    garbage = replace(batch, tokens=batch.tokens.clone())
    beyond = torch.arange(batch.tokens.shape[1]) >= batch.length[:, None]
    garbage.tokens[beyond] = 999_999
    other = of_step(garbage, 5.0, seed=0, step=0)
    assert noise is not None
    assert noise == other
    assert torch.equal(drawn(noise, pack(batch), batch, 8), drawn(noise, pack(garbage), garbage, 8))


# ---------------------------------------------------------------------- off


def test_alpha_0_is_no_noise_at_all(rows_of: Make, model: PreTrainedModel) -> None:
    batch = rows_of(seed=0)
    assert of_step(batch, 0.0, seed=0, step=0) is None
    packed = pack(batch)
    with noisy(model, packed, batch, None):
        assert not model.get_input_embeddings()._forward_hooks
        inside = trained_states(model, packed)
    assert torch.equal(inside, trained_states(model, packed))


def test_outside_of_it_nothing_is_noisy(rows_of: Make, model: PreTrainedModel) -> None:
    """A score after a step, and after a step that broke, is that of a model which never had noise."""
    batch = rows_of(seed=0)
    before = trained_states(model, pack(batch))
    noise = of_step(batch, 5.0, seed=0, step=0)
    assert not torch.equal(states(model, batch, noise)[1], before)
    with pytest.raises(KeyError), noisy(model, pack(batch), batch, noise):
        raise KeyError
    assert not model.get_input_embeddings()._forward_hooks
    assert torch.equal(trained_states(model, pack(batch)), before)


def test_another_model_s_passes_within_it_have_none(rows_of: Make, model: PreTrainedModel) -> None:
    batch, other = rows_of(seed=0), copy.deepcopy(model)
    packed = pack(batch)
    plain = trained_states(model, packed)
    with noisy(model, packed, batch, of_step(batch, 5.0, seed=0, step=0)):
        assert torch.equal(trained_states(other, packed), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapted_model_has_the_noise_of_the_plain_one(
    dtype: torch.dtype, rows_of: Make, llama: Make
) -> None:
    batch = rows_of(seed=0)
    noise = of_step(batch, 40.0, seed=0, step=0)
    ends = []
    for lora in (False, True):
        made = llama(0).to(dtype)
        use_layouts(made)
        ends.append(states(base(add_adapter(made, Lora(rank=2), 0)) if lora else made, batch, noise)[1])
    assert ends[0].dtype == dtype
    assert torch.equal(ends[0], ends[1])  # B is 0
