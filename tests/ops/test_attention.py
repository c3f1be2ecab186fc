"""Attention: values and gradients of float64, and a row's bits whatever comes with it, in any pieces and pages."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lockstep import ops
from lockstep.ops.attention import zeros_on_demand
from lockstep.ops.attention_gradient import Attended, sink_gradient
from tests.ops.attention_checks import (
    assert_only_those_who_see_it_break,
    assert_pieces_add_up,
    assert_pieces_agree,
    cancelling,
)
from tests.ops.test_linear import cancelling as cancelling_products

FLOAT, HALF = torch.float32, torch.bfloat16
# One rounding of the result to its dtype, plus sums of up to 150 products that float32 rounds one by one.
TOLERANCE = {FLOAT: 2e-5, HALF: 2e-2}
# Within a page, a block and its neighbours, and more than any sequence has.
WINDOWS = [0, 1, 5, 63, 64, 65, 100, 1000]
SINKS = torch.tensor([0.5, -2.0, 3.0, 0.0])


def qkv(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [cancelling(i, tokens, n, head_dim, dtype=dtype) for i, n in enumerate((heads, kv_heads, kv_heads))]


def in_float64(q, k, v, lengths, scale, window, sinks):
    """The softmax over all scores and the sink's, whose column is then left out."""
    outs = []
    for query, key, value in zip(*(x.split(lengths) for x in (q, k, v))):
        key, value = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (key, value))
        place = torch.arange(len(query))
        hidden = place > place[:, None]
        if window:
            hidden |= place <= place[:, None] - window
        scores = (torch.einsum("qhd,khd->hqk", query, key) * scale).masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(query), 1)), -1)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(query)], value))
    return torch.cat(outs)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim", "window", "with_sinks"),
    [
        (FLOAT, 4, 2, 64, 0, False), (HALF, 4, 1, 128, 0, False), (FLOAT, 3, 1, 40, 5, True),
        (HALF, 2, 2, 48, 64, True), (FLOAT, 2, 2, 16, 100, False), (HALF, 6, 2, 64, 100, True),
        (FLOAT, 4, 2, 96, 64, True), (HALF, 3, 1, 40, 0, True),
    ],
)  # fmt: skip
def test_values_and_gradients_are_those_of_float64(dtype, heads, kv_heads, head_dim, window, with_sinks):
    lengths, scale = [5, 130, 64, 1], 0.07
    draw = torch.Generator().manual_seed(0)
    shapes = [(200, heads, head_dim), *[(200, kv_heads, head_dim)] * 2, (heads,)]
    leaves = [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in shapes[: 3 + with_sinks]]
    grad = torch.randn(shapes[0], generator=draw).to(dtype)
    out = ops.PackedAttention(lengths)(0, *leaves[:3], ops.Terms(scale, window, leaves[3] if with_sinks else None))
    ours = [out, *torch.autograd.grad(out, leaves, grad)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = in_float64(*exact[:3], lengths, scale, window, exact[3] if with_sinks else None)
    theirs = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    for mine, reference in zip(ours, theirs):
        # Of one key alone the gradient of a query is nothing but rounding.
        largest = max(1.0, float(reference.detach().abs().max()))
        assert (mine.double() - reference).abs().max() < TOLERANCE[dtype] * largest


@pytest.mark.parametrize(("dtype", "head_dim"), [(FLOAT, 8), (HALF, 33)])
def test_a_head_of_any_width_has_the_bits_of_one_with_zeros_behind_it(form, dtype, head_dim):
    if form == "pytorch":
        pytest.skip("the library's products, whose bits depend on the width")
    draw = torch.Generator().manual_seed(0)
    narrow = [torch.randn(150, heads, head_dim, generator=draw).to(dtype) for heads in (4, 2, 2, 4)]
    wide = [torch.nn.functional.pad(x, (0, -head_dim % 16)) for x in narrow]
    both = []
    for *leaves, grad in (narrow, wide):
        leaves = [*(x.requires_grad_() for x in leaves), SINKS.clone().requires_grad_()]
        out = ops.PackedAttention([110, 40])(0, *leaves[:3], ops.Terms(0.07, 70, leaves[3]))
        both.append([out, *torch.autograd.grad(out, leaves, grad)])
    for name, own, other in zip(("values", "q", "k", "v", "sinks"), *both):
        assert torch.equal(own, other[..., : own.shape[-1]]), name
        assert not other[..., own.shape[-1] :].any(), name


@settings(max_examples=16, phases=[Phase.generate])  # to shrink would take minutes
@given(
    dtype=st.sampled_from([FLOAT, HALF]),
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    heads=st.sampled_from([(2, 2), (4, 2), (4, 1)]),
    head_dim=st.sampled_from([8, 16, 40, 48, 64, 96]),
    window=st.sampled_from(WINDOWS) | st.integers(1, 200),
    with_sinks=st.booleans(),
    random=st.randoms(use_true_random=False),
)
def test_a_row_has_the_same_bits_however_sequences_are_cut_ordered_and_paged(
    dtype, lengths, heads, head_dim, window, with_sinks, random
):
    q, k, v = qkv(sum(lengths), *heads, head_dim, dtype)
    sinks = cancelling(3, 1, 2 * heads[0], dtype=dtype)[0, : heads[0]] if with_sinks else None
    terms = ops.Terms(0.05, window, sinks)
    expected = ops.PackedAttention(lengths)(0, q, k, v, terms)
    assert_pieces_agree(expected, q, k, v, lengths, random, pieces=[1, 1, 5, 16, 64, 150], terms=terms)


def queries_and_latents(dtype, tokens, heads, width):
    """Each query's scores with all keys cancel."""
    q, k = cancelling_products(0, tokens * heads, width, tokens, dtype)
    return q.view(tokens, heads, width), k[:, None] / 8


@settings(max_examples=5)
@given(
    dtype=st.sampled_from([FLOAT, HALF]),
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=2),
    heads=st.sampled_from([1, 4, 50]),
    width=st.sampled_from([16, 40, 96]),
    random=st.randoms(use_true_random=False),
)
def test_keys_that_are_the_values_give_the_bits_of_a_copy_of_them(dtype, lengths, heads, width, random):
    q, k = queries_and_latents(dtype, sum(lengths), heads, width)
    terms = ops.Terms(scale=0.11)
    expected = ops.PackedAttention(lengths)(0, q, k, k.clone(), terms)
    assert torch.equal(ops.PackedAttention(lengths)(0, q, k, None, terms), expected)
    assert_pieces_agree(expected, q, k, None, lengths, random, pieces=[1, 5, 64, 150], terms=terms)


@pytest.mark.parametrize(("dtype", "shared"), [(FLOAT, False), (HALF, False), (FLOAT, True)])
def test_the_gradient_of_keys_that_are_values_is_that_of_both(dtype, shared):
    q, k = queries_and_latents(dtype, 130, 4, 48)
    attention = ops.SharedPrefixAttention([70, 100], [0, 40]) if shared else ops.PackedAttention([70, 60])
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    leaves = [x.clone().requires_grad_() for x in (q, k, k)]
    apart = torch.autograd.grad(attention(0, *leaves), leaves, grad)
    own = torch.autograd.grad(attention(0, *leaves[:2], None), leaves[:2], grad)
    assert torch.equal(own[0], apart[0])
    both = apart[1].float() + apart[2].float()
    # Of their sum in bfloat16 three roundings less.
    atol = 1e-6 if dtype == FLOAT else 2**-6
    torch.testing.assert_close(own[1].float(), both, rtol=atol, atol=atol * float(both.abs().max()))


@pytest.mark.parametrize(
    ("dtype", "part", "broken", "window"),
    [
        (FLOAT, "key", torch.nan, 0), (HALF, "value", torch.inf, 0), (HALF, "key", torch.inf, 10),
        (FLOAT, "value", torch.nan, 40),
    ],
)  # fmt: skip
def test_a_broken_token_breaks_those_that_see_it_and_changes_no_bit_of_others(dtype, part, broken, window):
    assert_only_those_who_see_it_break(dtype, part, broken, window)


@pytest.mark.parametrize(("dtype", "broken", "heads"), [(FLOAT, torch.nan, 12), (HALF, torch.inf, 1)])
def test_a_broken_latent_breaks_those_that_see_it_and_changes_no_bit_of_others(dtype, broken, heads):
    q, k = queries_and_latents(dtype, 130, heads, 48)
    expected = ops.PackedAttention([70, 60])(0, q, k, None)
    k[22, 0, 5] = broken  # between tokens whose rows share a tile with its own
    out = ops.PackedAttention([70, 60])(0, q, k, None)
    others = torch.ones(130, dtype=torch.bool)
    others[22:70] = False
    assert torch.equal(out[others], expected[others]) and out[22:70].isnan().all()


def test_what_a_broken_batch_leaves_in_memory_reaches_no_gradient_of_the_next():
    def gradients(tokens, broken=None):
        leaves = [x.requires_grad_() for x in qkv(tokens, 2, 2, 64, HALF)]
        if broken is not None:
            leaves[broken].data.fill_(torch.nan)
        return torch.autograd.grad(ops.PackedAttention([tokens])(0, *leaves).float().sum(), leaves)

    expected = gradients(21)
    for broken in range(3):
        gradients(64, broken)
        assert all(map(torch.equal, gradients(21), expected)), broken


def test_the_gradient_of_sinks_is_summed_in_slabs_whatever_the_number_of_threads(form, threads):
    if form == "pytorch":
        pytest.skip("a library's sums")
    grad, out = (cancelling(i, 300, 3, 32, dtype=HALF) for i in range(2))
    sinks, log_sums = torch.tensor([0.5, 1.0, -0.5]), torch.randn(300, 3, generator=torch.Generator().manual_seed(2))
    expected = torch.zeros(3)
    for i in range(0, 300, 64):
        part = slice(i, min(i + 64, 300))
        expected += sink_gradient(grad[part], out[part], log_sums[part], sinks, part.stop - i)
    for count in (1, 3):
        threads(count)
        assert torch.equal(sink_gradient(grad, out, log_sums, sinks, 300), expected)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim", "window"), [(FLOAT, 4, 2, 32, 0), (HALF, 4, 1, 40, 90)]
)
def test_pieces_of_sequences_attend_as_the_whole_and_their_gradients_add_up_to_its(
    dtype, heads, kv_heads, head_dim, window
):
    terms = ops.Terms(0.2, window, SINKS.to(dtype)) if window else None
    assert_pieces_add_up(dtype, heads, kv_heads, head_dim, TOLERANCE[dtype], terms=terms)


PADDING = 3
Groups = list[tuple[int, list[int]]]
"""Tokens that all sequences of a group share, and how many more each has."""
GROUPS: Groups = [(70, [5, 40, 1]), (1, [9, 9]), (3, [20]), (130, [33, 64, 64, 2])]


def _layout(groups: Groups) -> tuple[list[int], list[int], torch.Tensor]:
    """Lengths, tokens left out, and of every token of the whole sequences its row in the shared layout."""
    lengths, left_out, rows = [], [], []
    next_row = 0
    for shared, others in groups:
        first = next_row
        for index, own in enumerate(others):
            lengths.append(shared + own)
            left_out.append(shared if index else 0)
            begin = next_row if index else next_row + shared
            rows += [*range(first, first + shared), *range(begin, begin + own)]
            next_row = begin + own
    return lengths, left_out, torch.tensor(rows)


@settings(max_examples=12)
@given(
    dtype=st.sampled_from([FLOAT, HALF]),
    groups=st.lists(
        st.tuples(st.integers(1, 150), st.lists(st.integers(1, 60), min_size=1, max_size=3)), min_size=1, max_size=2
    ),
    heads=st.sampled_from([(2, 2), (4, 2), (4, 1)]),
    head_dim=st.sampled_from([32, 64, 40]),
    window=st.sampled_from(WINDOWS),
)
def test_a_sequence_whose_beginning_is_shared_has_the_bits_of_a_whole_one(dtype, groups, heads, head_dim, window):
    lengths, left_out, rows = _layout(groups)
    count = int(rows.max()) + 1
    q, k, v = qkv(count + PADDING, *heads, head_dim, dtype)
    terms = ops.Terms(window=window, sinks=SINKS[: heads[0]].to(dtype) if window else None)
    out = ops.SharedPrefixAttention(lengths, left_out)(0, q, k, v, terms)
    whole = ops.PackedAttention(lengths)(0, q[rows], k[rows], v[rows], terms)
    assert torch.equal(out[rows], whole) and not out[count:].any()


@pytest.mark.parametrize(("dtype", "window"), [(FLOAT, 0), (HALF, 64)])
def test_a_shared_keys_gradient_is_summed_in_the_order_of_the_sequences_and_rounded_once(dtype, window):
    lengths, left_out, rows = _layout(GROUPS)
    count, terms = int(rows.max()) + 1, ops.Terms(window=window)
    q, k, v = (x.requires_grad_() for x in qkv(count + PADDING, 4, 2, 32, dtype))
    grad = cancelling(3, count + PADDING, 4, 32, dtype=dtype)
    grad[count:] = 0
    ours = torch.autograd.grad(ops.SharedPrefixAttention(lengths, left_out)(0, q, k, v, terms), (k, v), grad)
    sums = [torch.zeros(x.shape) for x in (k, v)]
    for own, shared in zip(rows.split(lengths), left_out):
        # What this sequence adds: as a piece of one sequence, whose first rows are no queries if another has them.
        piece = ops.PieceAttention([len(own)], [(0, shared, len(own))])
        mine, parts = own[shared:], [x.detach()[own] for x in (k, v)]
        with torch.no_grad():
            attended = Attended(q[mine], *parts, *piece.forward(q[mine], *parts, terms))
            added = piece.backward(grad[mine], attended, terms)[1:]
        for total, part in zip(sums, added):
            total[own] += part
    for mine, total in zip(ours, sums):
        assert torch.equal(mine, total.to(dtype))


def test_more_than_another_sequence_has_cannot_be_left_out():
    for lengths, left_out in (([5, 5], [1, 0]), ([5, 5], [0, 5]), ([5, 9], [0, 6])):
        with pytest.raises(ValueError, match="omits"):
            ops.SharedPrefixAttention(lengths, left_out)


def test_a_cache_holds_what_was_written_zeros_elsewhere_and_latents_once():
    both, alone = (ops.KVCache(2, 8, 1, 48, HALF, values=values) for values in (True, False))
    assert alone.nbytes * 2 == both.nbytes and [t.shape for t in alone.tensors()] == [both.keys.shape]
    tensor = zeros_on_demand((3, 5, 7), HALF, "cpu")
    tensor[1] += 2
    assert tensor.is_contiguous() and tensor.sum() == 2 * 35 and (tensor[::2] == 0).all()
    assert zeros_on_demand((2, 3), FLOAT, "meta").is_meta and zeros_on_demand((2, 0), FLOAT, "cpu").shape == (2, 0)
