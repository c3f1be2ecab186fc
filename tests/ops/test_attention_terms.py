"""Attention with another scale, a window of keys, and sinks: values, gradients, and a row's bits in any company."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import ops
from lockstep.ops.attention_reference import PLAIN
from lockstep.ops.sinks import sink_gradient
from tests.ops.paging import assert_only_those_who_see_it_break, assert_pieces_agree
from tests.ops.pieces import assert_pieces_add_up

# One rounding of the result to its dtype, plus sums of up to 150 products that float32 rounds one by one.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)
# Within a page, a block and its neighbours, and more than any sequence has.
WINDOWS = [0, 1, 5, 63, 64, 65, 100, 1000]


def cancelling(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Each second half takes the first one back: what a sum rounds is what is left of it."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=draw) * torch.exp2(torch.randint(-3, 4, shape, generator=draw).float())
    half = shape[-1] // 2
    x[..., half : 2 * half] = -x[..., :half] + 1e-3 * x[..., half : 2 * half]
    return x.to(dtype)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (3, 1, 40), (2, 2, 48)])
@pytest.mark.parametrize("window", [0, 5, 64, 100])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_values_and_gradients_are_those_of_float64(dtype, heads, kv_heads, head_dim, window, with_sinks):
    lengths, scale = [5, 130, 64, 1], 0.07
    draw = torch.Generator().manual_seed(0)
    shapes = [(200, heads, head_dim), *[(200, kv_heads, head_dim)] * 2, (heads,)]
    leaves = [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in shapes[: 3 + with_sinks]]
    grad = torch.randn(shapes[0], generator=draw).to(dtype)
    sinks = leaves[3] if with_sinks else None
    out = ops.PackedAttention(lengths)(0, *leaves[:3], ops.Terms(scale, window, sinks))
    ours = [out, *torch.autograd.grad(out, leaves, grad)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = in_float64(*exact[:3], lengths, scale, window, exact[3] if with_sinks else None)
    theirs = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    for mine, reference in zip(ours, theirs):
        # Of one key alone the gradient of a query is nothing but rounding.
        largest = max(1.0, float(reference.detach().abs().max()))
        assert (mine.double() - reference).abs().max() < TOLERANCE[dtype] * largest


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 33, 40])
def test_a_head_of_any_width_has_the_bits_of_one_with_zeros_behind_it(form, dtype, head_dim):
    if form == "pytorch":
        pytest.skip("the library's products, whose bits depend on the width")
    draw = torch.Generator().manual_seed(0)
    narrow = [torch.randn(150, heads, head_dim, generator=draw).to(dtype) for heads in (4, 2, 2, 4)]
    wide = [torch.nn.functional.pad(x, (0, -head_dim % 16)) for x in narrow]
    both = []
    for *leaves, grad in (narrow, wide):
        leaves = [*(x.requires_grad_() for x in leaves), torch.tensor([0.5, -2.0, 3.0, 0.0]).requires_grad_()]
        out = ops.PackedAttention([110, 40])(0, *leaves[:3], ops.Terms(0.07, 70, leaves[3]))
        both.append([out, *torch.autograd.grad(out, leaves, grad)])
    for name, own, other in zip(("values", "q", "k", "v", "sinks"), *both):
        assert torch.equal(own, other[..., : own.shape[-1]]), name
        assert not other[..., own.shape[-1] :].any(), name


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    heads=st.sampled_from([(2, 2), (4, 2), (4, 1)]),
    head_dim=st.sampled_from([16, 24, 32, 48, 64]),
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 40, 64, 90])
def test_pieces_of_sequences_attend_as_the_whole_and_their_gradients_add_up_to_its(dtype, window):
    sinks = torch.tensor([0.5, -2.0, 3.0, 0.0]).to(dtype)
    assert_pieces_add_up(dtype, 4, 2, 32, TOLERANCE[dtype], terms=ops.Terms(0.2, window, sinks))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 40, 64, 90])
def test_sequences_that_share_their_beginning_have_the_bits_of_whole_ones_and_the_sum_of_their_gradients(dtype, window):
    lengths, left_out = [100, 140, 75], [0, 70, 70]
    rows = torch.cat([torch.arange(100), *(torch.cat((torch.arange(70), f + torch.arange(n))) for f, n in OWN)])
    q, k, v = qkv(178, 4, 2, 32, dtype)  # three rows of padding
    sinks = torch.tensor([0.5, -2.0, 3.0, 0.0]).to(dtype)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    terms = ops.Terms(window=window, sinks=sinks)
    out = ops.SharedPrefixAttention(lengths, left_out)(0, q, k, v, terms)
    whole = ops.PackedAttention(lengths)(0, q[rows], k[rows], v[rows], terms)
    assert torch.equal(out[rows], whole) and not out[175:].any()
    # Of the whole sequences only those rows get a gradient that the shared layout has.
    grad = cancelling(4, 178, 4, 32, dtype=dtype)
    first = torch.ones(len(rows), dtype=torch.bool)
    first[100:170] = first[240:310] = False
    ours = torch.autograd.grad(out, leaves, grad)
    theirs = torch.autograd.grad(whole, leaves, grad[rows] * first[:, None, None])
    for mine, reference in zip(ours, theirs):
        scale = max(1.0, float(reference.float().abs().max()))
        assert (mine.float() - reference.float()).abs().max() < TOLERANCE[dtype] * scale


OWN = [(100, 70), (170, 5)]
"""First row, and rows, of what the second and the third sequence have of their own."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("window", [10, 40])
def test_a_broken_token_breaks_no_row_whose_window_begins_behind_it(dtype, part, window):
    assert_only_those_who_see_it_break(dtype, part, torch.nan, window)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_asks_for_nothing_changes_no_bit(dtype):
    lengths = [70, 130]
    leaves = [x.requires_grad_() for x in qkv(200, 4, 2, 32, dtype)]
    grad = cancelling(4, 200, 4, 32, dtype=dtype)

    def bits(terms):
        out = ops.PackedAttention(lengths)(0, *leaves, terms)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    expected = bits(PLAIN)
    unreached = torch.full((4,), -torch.inf, dtype=dtype)
    for terms in (ops.Terms(scale=32**-0.5), ops.Terms(window=130), ops.Terms(sinks=unreached)):
        assert all(map(torch.equal, bits(terms), expected)), terms
    assert not torch.equal(bits(ops.Terms(window=129))[0], expected[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_sinks_is_summed_in_slabs_whatever_the_number_of_threads(form, dtype):
    if form == "pytorch":
        pytest.skip("a library's sums")
    grad, out = (cancelling(i, 300, 3, 32, dtype=dtype) for i in range(2))
    sinks, log_sums = torch.tensor([0.5, 1.0, -0.5]), torch.randn(300, 3, generator=torch.Generator().manual_seed(2))
    whole = sink_gradient(grad, out, log_sums, sinks, 300)
    slabs = [
        sink_gradient(*(x[i:stop] for x in (grad, out, log_sums)), sinks, stop - i)
        for i, stop in zip(range(0, 300, 64), (64, 128, 192, 256, 300))
    ]
    expected = torch.zeros(3)
    for slab in slabs:
        expected += slab
    assert torch.equal(whole, expected)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(sink_gradient(grad, out, log_sums, sinks, 300), whole)
    finally:
        torch.set_num_threads(before)
