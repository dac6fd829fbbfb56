"""What is packed, against a slow account of every row by itself."""

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM

from posttrain.learner.pack import Pack, microbatches, pack, trained_states
from posttrain.learner.prompt_group import PromptGroup, rows_read
from posttrain.learner.varlen import SpanKeys
from posttrain.models.attention import use_layouts
from posttrain.models.pretrained import skeleton
from posttrain.plan.memory import Shape, mask_bytes, score_bytes
from posttrain.types import Batch, Trajectory


def row(tokens: list[int], sampled: list[int]) -> Trajectory:
    n = len(tokens)
    zeros = [0.0] * n
    return Trajectory(
        tokens=tokens,
        sampled=[t in sampled for t in range(n)],
        logp_gen=zeros,
        logp_policy=zeros,
        version=[0] * n,
        reward=zeros,
    )


def way_to(packed: Pack, index: int) -> list[int]:
    """The packed tokens of a tree on the way to this one, itself last."""
    [group] = [g for g in packed.prompt_groups if g.start <= index < g.stop]
    way = [index]
    while (parent := group.parents[way[0] - group.start]) >= 0:
        way.insert(0, group.start + parent)
    return [*range(packed.shared_prefix), *way]


def branch_of(packed: Pack) -> list[tuple[int, int]]:
    """For each packed token: its group, and its branch in it (-1 for the prompt); the prefix's are all -1."""
    out = [(-1, -1)] * packed.shared_prefix
    for number, prompt_group in enumerate(packed.prompt_groups):
        assert prompt_group.start == len(out)
        out += [(number, -1)] * prompt_group.prefix
        for b, length in enumerate(prompt_group.branches):
            out += [(number, b)] * length
        assert prompt_group.stop == len(out)
    return out


def context(packed: Pack, index: int) -> list[int]:
    """The tokens that a packed token sees, in the order of their positions, itself last."""
    owner = branch_of(packed)
    number, branch = owner[index]
    if number >= 0 and packed.prompt_groups[number].parents:
        seen = way_to(packed, index)
    else:
        seen = [
            j
            for j in range(index + 1)
            if owner[j] == (-1, -1) or (owner[j][0] == number and owner[j][1] in (-1, branch))
        ]
    assert [int(packed.positions[j]) for j in seen] == list(range(len(seen)))
    return [int(packed.tokens[j]) for j in seen]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Groups in any order, prompts that agree in part, and any mask that spares the first token."""
    rows, numbers = [], []
    system = draw(st.lists(st.integers(0, 2), max_size=4))
    for number in range(draw(st.integers(1, 3))):
        prompt = system + draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
        for _ in range(draw(st.integers(1, 4))):
            tokens = prompt + draw(st.lists(st.integers(0, 2), max_size=5))
            if draw(st.integers(0, 5)) == 0:
                tokens[draw(st.integers(0, len(tokens) - 1))] = 9
            free = st.lists(st.integers(1, len(tokens) - 1)) if len(tokens) > 1 else st.just([])
            answered = range(len(prompt), len(tokens))
            sampled = draw(st.one_of(st.just(list(answered)), free))
            rows.append(row(tokens, sampled))
            numbers.append(7 - number)
    order = draw(st.permutations(range(len(rows))))
    return Batch.of([rows[i] for i in order], [numbers[i] for i in order])


@given(batches(), st.booleans())
def test_a_row_that_is_read_holds_what_each_of_its_tokens_sees(batch: Batch, trees: bool) -> None:
    """From its first token on, so the state of a layer after a token is that of the token's own row."""
    if not batch.mask[:, 1:].any():
        return
    packed = pack(batch, trees=trees)
    count = len(packed.tokens) + 2
    pieces, of_token = rows_read(packed.prompt_groups, packed.shared_prefix, count)
    assert all(len(places) == 1 or places.numel() <= count for places in pieces)
    read = [row[: t + 1].tolist() for places in pieces for row in places for t in range(len(row))]
    for token in range(len(packed.tokens)):
        seen = read[int(of_token[token])]
        assert packed.tokens[seen].tolist() == context(packed, token)
        assert seen[-1] == token
    assert of_token[-2:].tolist() == [0, 0]


@given(batches(), st.booleans())
def test_the_keys_of_a_span_are_what_its_tokens_see(batch: Batch, trees: bool) -> None:
    """A query sees the keys of its span but the last ones, as many as queries of the span come after it."""
    if not batch.mask[:, 1:].any():
        return
    packed = pack(batch, trees=trees)
    N = len(packed.tokens)
    spans = SpanKeys.of(packed.prompt_groups, packed.shared_prefix, N + 2)
    keys = torch.arange(N + 2) if spans.keys is None else spans.keys
    queries, ends = (list(pairwise(x.tolist())) for x in (spans.query_ends, spans.key_ends))
    assert queries[-1] == (N, N + 2)
    assert spans.most_queries == max(stop - start for start, stop in queries)
    assert spans.most_keys == max(stop - start for start, stop in ends)
    for (start, stop), (first, last) in zip(queries[:-1], ends[:-1], strict=True):
        for token in range(start, stop):
            seen = keys[first : last - (stop - 1 - token)]
            assert packed.tokens[seen].tolist() == context(packed, token)
            assert int(seen[-1]) == token


@given(batches(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_every_trained_token_is_predicted_from_exactly_what_came_before_it(batch: Batch, trees: bool) -> None:
    where = batch.mask.nonzero().tolist()
    if not where:
        with pytest.raises(ValueError, match="nothing to train on"):
            pack(batch, trees=trees)
        return
    packed = pack(batch, trees=trees)
    got = list(zip(packed.row.tolist(), packed.column.tolist(), strict=True))
    assert sorted(got) == sorted(map(tuple, where))
    sources, targets = packed.source[packed.asks], packed.target[packed.asks]
    for source, target, i, t in zip(sources, targets, packed.row, packed.column, strict=True):
        assert int(target) == int(batch.tokens[i, t])
        assert context(packed, int(source)) == batch.tokens[i, :t].tolist()


@given(batches())
@settings(max_examples=100, deadline=None)
def test_in_trees_nothing_is_fed_or_asked_twice_in_a_group(batch: Batch) -> None:
    """As many tokens as rows of a group have different beginnings, and as many questions as there are
    different ones with a next token."""
    if not batch.mask.any():
        return
    packed, fed, asked = pack(batch, trees=True), set(), set()
    for i, t in batch.mask.nonzero().tolist():
        row, group = batch.tokens[i].tolist(), int(batch.group[i])
        fed |= {(group if n > packed.shared_prefix else -1, *row[:n]) for n in range(1, t + 1)}
        asked.add((group if t > packed.shared_prefix else -1, *row[: t + 1]))
    assert len(packed.tokens) == len(fed)
    assert len(packed.target) == len(asked)


@given(batches())
@settings(max_examples=100, deadline=None)
def test_nothing_is_fed_that_nothing_is_predicted_from(batch: Batch) -> None:
    """The shared prefix once; of each group the rest of its prompt, and of every row what lies between it and
    its last trained token."""
    if not batch.mask.any():
        return
    packed = pack(batch)
    rows = [i for i in range(len(batch)) if batch.mask[i].any()]
    fed = sum(int(batch.mask[i].nonzero().max()) for i in rows)
    prompt_groups = {int(batch.group[i]) for i in rows}
    assert len(packed.prompt_groups) == len(prompt_groups)
    saved = sum(
        (packed.shared_prefix + f.prefix) * (len(f.branches) - 1) for f in packed.prompt_groups if f.branches
    )
    saved += packed.shared_prefix * (len(prompt_groups) - 1)
    assert len(packed.tokens) == fed - saved == packed.prompt_groups[-1].stop


@given(batches(), st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_microbatches_deal_every_trained_row_once_within_the_budget(batch: Batch, budget: int) -> None:
    parts = microbatches(batch, budget)
    trained = [i for i in range(len(batch)) if batch.mask[i].any()]
    assert sorted(i for part in parts for i in part) == trained
    for part in parts:
        size = len(pack(batch.rows(torch.tensor(part))).tokens)
        assert size <= budget or len(part) == 1


def test_a_row_alone_is_plainly_causal_and_a_group_shares_its_prompt() -> None:
    alone = pack(Batch.of([row([1, 2, 3, 4], [2, 3])], [0]))
    assert alone.prompt_groups == [PromptGroup(0, 3, ())]
    both = pack(Batch.of([row([1, 2, 3, 4], [2, 3]), row([1, 2, 5, 6], [2, 3])], [0, 0]))
    assert both.prompt_groups == [PromptGroup(0, 2, (1, 1))]


def test_one_token_answers_feed_nothing_but_the_prompt() -> None:
    packed = pack(Batch.of([row([1, 2, t], [2]) for t in (3, 4, 5)], [0, 0, 0]))
    assert packed.tokens.tolist() == [1, 2]
    assert packed.prompt_groups == [PromptGroup(0, 2, (0, 0, 0))]
    assert packed.source.tolist() == [1, 1, 1]
    assert packed.target.tolist() == [3, 4, 5]


def test_a_later_turn_is_not_shared_even_where_rows_agree() -> None:
    """The prompt ends before anything sampled: two rows that drew the same token are still two rows."""
    packed = pack(Batch.of([row([1, 2, 2, 7], [1, 3]), row([1, 2, 2, 8], [1, 3])], [0, 0]))
    assert packed.prompt_groups == [PromptGroup(0, 1, (2, 2))]


def test_what_all_prompts_begin_with_is_computed_once() -> None:
    asked = [row([4] * 6 + [i, 9, 9], [7, 8]) for i in (1, 1, 2, 3)]
    packed = pack(Batch.of(asked, [0, 0, 1, 2]))
    assert packed.tokens.tolist() == [4] * 6 + [1, 9, 9] + [2, 9] + [3, 9]
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7, 6, 7, 6, 7]
    assert packed.prompt_groups == [PromptGroup(6, 1, (1, 1)), PromptGroup(9, 2, ()), PromptGroup(11, 2, ())]


def test_prompts_of_other_groups_that_are_the_very_same_feed_nothing_of_their_own() -> None:
    packed = pack(Batch.of([row([4, 4, 4, t], [3]) for t in (1, 2, 3)], [0, 1, 2]))
    assert packed.tokens.tolist() == [4, 4, 4]
    assert packed.source.tolist() == [2, 2, 2]
    assert [f.stop - f.start for f in packed.prompt_groups] == [0, 0, 0]


def test_a_beginning_that_saves_little_is_not_set_apart() -> None:
    """Documents that share the token they begin with, and nothing else, stay plainly causal."""
    packed = pack(Batch.of([row([4, i, *range(20)], list(range(1, 22))) for i in range(3)], [0, 1, 2]))
    assert packed.shared_prefix == 0


def test_long_rows_of_their_own_stay_plainly_causal() -> None:
    """A mask for each would cost more than what they share."""
    long = [row([4] * 300 + [i] * 300, list(range(300, 600))) for i in range(3)]
    assert pack(Batch.of(long, [0, 1, 2])).shared_prefix == 0
    assert pack(Batch.of(long, [0, 0, 0])).prompt_groups[0].prefix == 300


def test_rows_that_train_nothing_cost_nothing(rows_of: Callable[..., Batch]) -> None:
    batch = rows_of(seed=0)
    idle = (~batch.mask.any(-1)).nonzero().flatten()
    assert len(idle)
    kept = batch.mask.any(-1).nonzero().flatten()
    assert torch.equal(pack(batch).tokens, pack(batch.rows(kept)).tokens)
    with pytest.raises(ValueError, match="nothing to train on"):
        pack(replace(batch, mask=torch.zeros_like(batch.mask)))
    assert microbatches(replace(batch, mask=torch.zeros_like(batch.mask)), 10) == []


class Sizes(TorchFunctionMode):
    """How many tokens attend at once, of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.seen.add(args[0].shape[2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_16_bits_a_model_meets_few_sizes(
    dtype: torch.dtype,
    llama: Callable[..., Any],
    rows_of: Callable[..., Batch],
) -> None:
    """oneDNN compiles kernels for every size, and keeps them: memory would grow with every new one."""
    model, shown = llama(0).to(dtype), set[int]()
    use_layouts(model)
    model.get_input_embeddings().register_forward_hook(lambda _, __, out: shown.add(out.shape[1]))
    with Sizes() as attended, torch.no_grad():
        for seed in range(8):
            for system in (0, 9):
                trained_states(model, pack(rows_of(seed, groups=seed + 1, system=system)))
    if dtype == torch.bfloat16:
        assert {n % 64 for n in shown} == {n % 16 for n in attended.seen} == {0}
        assert len(attended.seen) <= 3
    else:
        assert len(shown) > 8 < len(attended.seen)


def test_the_last_tokens_that_fill_up_are_enough_for_every_family() -> None:
    """Also where the last prompt group is fed nothing of its own, and the one before it lacks 15."""
    none = torch.empty(0, dtype=torch.long)
    for sizes, shared_prefix, spare in (([33, 0], 0, 31), ([33, 1], 0, 30), ([64], 0, 0), ([0], 17, 47)):
        starts = [shared_prefix + sum(sizes[:i]) for i in range(len(sizes))]
        prompt_groups = [PromptGroup(start, n, ()) for start, n in zip(starts, sizes, strict=True)]
        tokens = torch.zeros(shared_prefix + sum(sizes), dtype=torch.long)
        assert Pack(tokens, tokens, prompt_groups, none, none, none, none, none, shared_prefix).spare == spare


class Backward(TorchDispatchMode):
    """The operations that were run, by name."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran = [*getattr(self, "ran", ()), op.overloadpacket.__name__]
        return op(*args, **kwargs or {})


def test_gradients_of_many_groups_are_put_together_once() -> None:
    """As many as groups, each as large as the pack, take minutes for a few hundred short rows."""
    rows = [row([n % 23, *range(5)], [3, 4, 5]) for n in range(23)]
    packed = pack(Batch.of(rows, list(range(23))))
    x = torch.randn(1, 2, len(packed.tokens), 4, requires_grad=True)
    out = packed.attend(x, x, x, scale=1.0, window=None, softcap=None)
    with Backward() as backward:
        out.sum().backward()
    assert backward.ran.count("slice_backward") <= 3 + len(packed.prompt_groups)  # of what it filled up


@pytest.mark.parametrize("lengths", [(20, 40), (600, 1200)], ids=["trees", "branches"])
def test_packing_calls_functions_for_rows_and_not_for_tokens(lengths: tuple[int, int]) -> None:
    """A GPU waits while its microbatch is packed, and Python takes microseconds for each token."""
    calls = []
    for n in lengths:
        answers = [[*range(9), *range(100 * k, 100 * k + n)] for k in range(8)]
        batch = Batch.of([row(tokens, [*range(9, 9 + n)]) for tokens in answers], [k // 4 for k in range(8)])
        events: list[str] = []
        sys.setprofile(lambda frame, event, _: events.append(event))  # noqa: B023
        try:
            pack(batch, trees=True)
        finally:
            sys.setprofile(None)
        calls.append(sum(event in ("call", "c_call") for event in events))
    assert calls[0] == calls[1] < 2000


def test_short_rows_do_not_each_keep_a_long_beginning() -> None:
    """Keys and values of all that come before them would be dozens of times their own."""
    rows = [row([*range(20)] * 10 + [n, 1, 2], [201, 202]) for n in range(20)]
    packed, held = pack(Batch.of(rows, list(range(20)))), dict[int, int]()
    x = torch.randn(1, 2, len(packed.tokens), 4, requires_grad=True)

    def keep(kept: torch.Tensor) -> torch.Tensor:
        held[kept.untyped_storage().data_ptr()] = kept.untyped_storage().nbytes()
        return kept

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        out = packed.attend(x, x, x, scale=1.0, window=None, softcap=None)
    assert packed.shared_prefix == 200
    assert sum(held.values()) < 8 * x.nbytes
    out.sum().backward()


@pytest.mark.parametrize("sizes", [[(3, 40)] * 4, [(1, 600)], [(1, 1500), (4, 300)], [(2, 700), (8, 30)]])
def test_masks_of_a_pass_are_few_and_within_what_is_planned_for(
    sizes: list[tuple[int, int]], llama: Callable[..., Any]
) -> None:
    """Groups of K answers of n tokens each; layers with a window and without."""
    model = llama(0, max_position_embeddings=2048)
    use_layouts(model)
    rows, groups = [], []
    for number, (K, n) in enumerate(sizes):
        for k in range(K):
            tokens = [number] * 20 + [(k + t) % 23 for t in range(n)]
            rows.append(row(tokens, list(range(20, 20 + n))))
            groups.append(number)
    packed = pack(Batch.of(rows, groups))
    q = torch.randn(1, 2, len(packed.tokens), 4)
    for _ in range(3):
        for window in (None, 100):
            packed.attend(q, q, q, scale=1.0, window=window, softcap=None)
    masks = [*packed._masks.values(), *(band for _, band in packed._bands._bands.values())]
    held = {m.untyped_storage().data_ptr(): m.untyped_storage().nbytes() for m in masks}
    shape = Shape.of(model)
    assert sum(held.values()) <= mask_bytes(replace(shape, windows=2), 4) * len(packed.tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[(3, 40)] * 4, [(1, 1500)], [(2, 700), (8, 30)]])
def test_capped_scores_that_a_backward_pass_keeps_are_within_what_is_planned_for(
    sizes: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    """What a pass of Gemma 2 keeps is more with the cap than without, by most of what is said of it."""
    rows, groups = [], []
    for number, (K, n) in enumerate(sizes):
        for k in range(K):
            rows.append(row([number] * 20 + [(k + t) % 23 for t in range(n)], list(range(20, 20 + n))))
            groups.append(number)
    packed, shape = pack(Batch.of(rows, groups)), {"hidden_size": 16, "intermediate_size": 32, "head_dim": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 32}

    def config(cap: float | None) -> Gemma2Config:
        return Gemma2Config(**shape, **heads, attn_logit_softcapping=cap)

    def kept(cap: float | None) -> int:
        model, held = Gemma2ForCausalLM(config(cap)).to(dtype), dict[int, int]()
        use_layouts(model)

        def keep(x: torch.Tensor) -> torch.Tensor:
            held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            assert trained_states(model, packed).requires_grad
        return sum(held.values())

    def planned(cap: float | None, checkpointing: bool = False) -> int:
        longest, size = max(20 + n for _, n in sizes), dtype.itemsize
        return score_bytes(Shape.of(skeleton(config(cap))), size, checkpointing, longest) * len(packed.tokens)

    # Answers that attend one by one behind a long prompt keep none: they are computed again.
    least = 0 if any(K > 1 and 20 + K * n > 512 for K, n in sizes) else planned(30.0) / 6
    assert least < kept(30.0) - kept(None) < planned(30.0)
    assert planned(30.0) > planned(30.0, True) > planned(None) == 0
