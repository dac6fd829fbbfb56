"""engines/native/compiled_step.py: a decoding step in one call, against transformers' layers one by one."""

import copy

import pytest
import torch

from posttrain.engines.native import compiled_step as module
from posttrain.engines.native.compiled_step import compiled_step
from posttrain.engines.native.decode_kernel import load
from posttrain.engines.native.runner import ModelRunner

DTYPES = (torch.float32, torch.bfloat16)
if load(torch.float32, 8, 2) is None:
    pytest.skip("NOT RUN: no kernel is compiled here, which wants Linux and g++", allow_module_level=True)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def runner_of(model, compiled=True):
    return ModelRunner(copy.deepcopy(model), rows=11, cache_tokens=11 * 64, compiled=compiled)


def begun(runner, lab, rows=range(11)):
    """The runner with a prompt in each row; the prompts."""
    prompts = [lab.prompt_of(1 + 3 * n, seed=n) for n in rows]
    for row, prompt in enumerate(prompts):
        runner.cache.reserve(len(prompts), 48)
        runner.prefill([prompt])
        runner.cache.place([prompt], row)
    return [len(p) for p in prompts]


def logits(runner, lab, rows=range(11), steps=6, threads=1):
    """[steps, rows, V]: of tokens that are given, by so many threads after the prompts."""
    lengths = begun(runner, lab, rows)
    torch.set_num_threads(threads)
    return torch.stack(
        [
            runner.decode([(7 * n + 13 * t) % 300 for n in rows], [length + t for length in lengths])
            for t in range(steps)
        ]
    )


@pytest.mark.parametrize("family", ["llama", "smollm", "qwen2", "qwen3", "mistral"])
def test_a_step_says_what_the_layers_of_transformers_say(lab, family):
    ours, theirs = (runner_of(lab.tiny(family), compiled) for compiled in (True, False))
    assert ours.compiled_step is not None
    assert theirs.compiled_step is None
    torch.testing.assert_close(logits(ours, lab), logits(theirs, lab), rtol=1e-4, atol=1e-4)
    for mine, other in ((ours.cache.keys, theirs.cache.keys), (ours.cache.values, theirs.cache.values)):
        assert mine.keys() == other.keys()
        for layer in mine:
            torch.testing.assert_close(mine[layer], other[layer], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "smollm", "qwen2", "qwen3", "mistral"])
@pytest.mark.sample(every=2)
def test_in_bfloat16_it_errs_no_more_than_transformers_does(lab, family):
    """Against the same weights in float32, by the mean distance of log-probabilities."""
    if not load(torch.bfloat16, 8, 2).multiplies(torch.zeros(8, 8)):
        pytest.skip("NOT RUN: this processor has no products of bfloat16")
    half = lab.tiny(family, torch.bfloat16)
    ours, theirs, truth = (
        logits(runner_of(model, compiled), lab).float().log_softmax(-1)
        for model, compiled in ((half, True), (half, False), (copy.deepcopy(half).float(), False))
    )
    assert runner_of(half).compiled_step is not None
    # Two sums of the same numbers in different orders: neither is the better one but by chance.
    assert (ours - truth).abs().mean() < 1.5 * (theirs - truth).abs().mean()


def prefilled(runner, lab, how):
    """Logits after prompts that run in this way, and what is kept of the prompts."""
    begin = lab.prompt_of(40, seed=7)
    prompts = [begin + lab.prompt_of(1 + 5 * n, seed=n) for n in range(4)]
    if how == "alone":
        logits = torch.cat([(runner.forget(), runner.prefill([p]))[1] for p in prompts])
    elif how == "held":  # of what ran before them
        runner.prefill([begin + lab.prompt_of(3, seed=9)])
        logits = runner.prefill(prompts)
    elif how == "turns":  # of what each of them was before
        turns = {prompt: f"episode {n}" for n, prompt in enumerate(prompts)}
        for n, prompt in enumerate(prompts):
            runner.prefill([earlier := prompt[: 37 + n]])
            runner.cache.turns[f"episode {n}"] = earlier, runner.cache.prompts[earlier]
        runner.forget()
        logits = runner.prefill(prompts, turns)
        assert not runner.cache.turns
    else:  # one beginning for all
        logits = runner.prefill(prompts)
    return logits, [runner.cache.prompts[p] for p in prompts]


@pytest.mark.parametrize("how", ["alone", "together", "held", "turns"])
@pytest.mark.parametrize("family", ["llama", "smollm", "qwen2", "qwen3", "mistral"])
@pytest.mark.sample("llama-*", "*-turns")
def test_prompts_say_what_the_layers_of_transformers_say(lab, family, how):
    mine, other = (prefilled(runner_of(lab.tiny(family), compiled), lab, how) for compiled in (True, False))
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["together", "held", "turns"])
def test_a_prompt_is_the_same_bits_whatever_of_it_ran_before(lab, dtype, how):
    if not load(dtype, 8, 2).multiplies(torch.zeros(8, 8)):
        pytest.skip("NOT RUN: this processor has no products of bfloat16")
    model = lab.tiny("mistral", dtype)  # which has a window
    torch.testing.assert_close(
        prefilled(runner_of(model), lab, how), prefilled(runner_of(model), lab, "alone"), rtol=0, atol=0
    )


def test_a_prompt_is_scored_by_what_draws_and_a_long_one_by_transformers(lab, monkeypatch):
    ours, theirs = (runner_of(lab.tiny("llama"), compiled) for compiled in (True, False))
    prompt = lab.prompt_of(30, seed=3)
    assert torch.equal(ours.score(prompt)[-1:], ours.prefill([prompt]))
    read = []
    monkeypatch.setattr(type(ours.compiled_step), "read", lambda *given: read.append(given))
    monkeypatch.setattr("posttrain.engines.native.runner.SHORT", 29)
    torch.testing.assert_close(ours.score(prompt), theirs.score(prompt), rtol=1e-4, atol=1e-4)
    assert not read


def test_what_is_kept_of_a_prompt_is_no_view_of_others(lab):
    runner = runner_of(lab.tiny("llama"))
    _, layers = prefilled(runner, lab, "together")
    assert all(x.untyped_storage().nbytes() > x.nbytes for layer in layers[:-1] for x in layer[0])
    for prompt in runner.cache.prompts:
        before = runner.cache.prompts[prompt][1]
        now = runner.cache.unshare(prompt)[1]
        for x, y in zip(before, now, strict=True):
            assert torch.equal(x, y)
            assert y.untyped_storage().nbytes() == y.nbytes
    assert runner.cache.latest[1][0][0].untyped_storage().nbytes() == runner.cache.latest[1][0][0].nbytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_row_is_the_same_bits_whatever_stands_beside_it(lab, family, dtype):
    if not load(dtype, 8, 2).multiplies(torch.zeros(8, 8)):
        pytest.skip("NOT RUN: this processor has no products of bfloat16")
    model = lab.tiny(family, dtype)
    together = logits(runner_of(model), lab)
    for rows in ([4], [9, 3], [0, 1, 2, 3, 5, 6, 7, 8, 10]):
        assert torch.equal(logits(runner_of(model), lab, rows), together[:, rows])


@pytest.mark.parametrize("threads", [2, 3])
def test_it_is_the_same_bits_with_any_number_of_threads(lab, threads):
    alone, together = (logits(runner_of(lab.tiny("llama")), lab, threads=n) for n in (1, threads))
    assert torch.equal(alone, together)


def test_weights_that_arrive_are_those_of_the_next_step(lab):
    runner, other = runner_of(lab.tiny("qwen2")), lab.tiny("qwen2", seed=1)
    logits(runner, lab)
    runner.load([(name, p) for name, p in other.named_parameters()])
    runner.cache.prompts.clear()
    assert torch.equal(logits(runner, lab), logits(runner_of(other), lab))


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_layers_of_another_kind_are_left_to_transformers(lab, family):
    assert runner_of(lab.tiny(family)).compiled_step is None


def scaled(layer, given, found):
    return 1.1 * found


@pytest.mark.parametrize("which", ["mlp", "self_attn.q_proj", "input_layernorm", ""])
def test_a_layer_that_looks_alike_and_says_something_else_is_left_to_transformers(lab, which):
    """The third layer alone is another, by a hook that no structure shows."""
    runner = runner_of(lab.tiny("llama"))
    assert compiled_step(runner.model) is not None
    runner.model.model.layers[2].get_submodule(which).register_forward_hook(scaled)
    assert compiled_step(runner.model) is None


def test_what_hangs_on_a_far_position_shows(lab):
    """As in models whose queries grow with the position, from some thousand tokens on."""
    runner = runner_of(lab.tiny("llama"))
    attention = runner.model.model.layers[0].self_attn
    inner = attention.forward

    def forward(hidden, **given):
        scale = 1 + 0.5 * (given["position_ids"] > 400).to(hidden)[..., None]
        return inner(hidden * scale, **given)

    attention.forward = forward
    assert compiled_step(runner.model) is None


@pytest.mark.parametrize("where", ["embed_tokens", "norm"])
def test_what_is_done_beside_the_layers_shows(lab, where, monkeypatch):
    """A factor on the embedding, as Granite has, or behind the last norm."""
    runner = runner_of(lab.tiny("llama"))
    decoder = runner.model.model
    inner, part = decoder.forward, getattr(decoder, where)

    def forward(**given):
        hook = part.register_forward_hook(scaled)
        try:
            return inner(**given)
        finally:
            hook.remove()

    monkeypatch.setattr(decoder, "forward", forward)
    assert compiled_step(runner.model) is None


def test_without_a_kernel_there_is_no_step(lab, monkeypatch):
    monkeypatch.setattr(module, "load", lambda *_: None)
    assert compiled_step(runner_of(lab.tiny("llama")).model) is None


def test_a_model_whose_layers_differ_in_size_is_left_to_transformers(lab):
    """Room is made once, for the first layer's vectors; each layer by itself would agree."""
    model = copy.deepcopy(lab.tiny("llama"))
    mlp = model.model.layers[-1].mlp
    for name in ("gate_proj", "up_proj", "down_proj"):
        old = getattr(mlp, name)
        wide = [
            n * (2 if n == model.config.intermediate_size else 1) for n in (old.in_features, old.out_features)
        ]
        setattr(mlp, name, torch.nn.Linear(*wide, bias=False))
    assert runner_of(lab.tiny("llama")).compiled_step is not None
    assert runner_of(model).compiled_step is None
