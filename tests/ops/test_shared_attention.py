"""Sequences that begin alike, where what they have in common is computed once: the same bits, one sum of gradients."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import ops

DTYPES = [torch.float32, torch.bfloat16]
ROWS_OF_PADDING = 3
Groups = list[tuple[int, list[int]]]
"""Tokens that all sequences of a group share, and how many more each has."""


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


def _drawn(rows: int, heads: int, head_dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows and padding; large numbers of both signs, so that sums cancel and another order shows."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows + ROWS_OF_PADDING, heads, head_dim, generator=draw)
    return (x * 10.0 ** torch.randint(-1, 2, (1, heads, head_dim), generator=draw)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 150), st.lists(st.integers(1, 90), min_size=1, max_size=4)), min_size=1, max_size=3
    ),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    head_dim=st.sampled_from([32, 64, 40]),
)
def test_a_row_has_the_bits_of_its_whole_sequence(dtype, groups, heads, head_dim):
    lengths, left_out, rows = _layout(groups)
    count = int(rows.max()) + 1
    q = _drawn(count, heads[0], head_dim, dtype, 0)
    k, v = (_drawn(count, heads[1], head_dim, dtype, seed) for seed in (1, 2))
    out = ops.SharedPrefixAttention(lengths, left_out)(0, q, k, v)
    whole = ops.PackedAttention(lengths)(0, q[rows], k[rows], v[rows])
    assert torch.equal(out[rows], whole) and not out[count:].any()


GROUPS: Groups = [(70, [5, 40, 1]), (1, [9, 9]), (3, [20]), (130, [33, 64, 64, 2])]


@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
@pytest.mark.parametrize("head_dim", [32, 40])
def test_gradients_are_those_of_float64(heads, head_dim):
    lengths, left_out, rows = _layout(GROUPS)
    count = int(rows.max()) + 1
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(count + ROWS_OF_PADDING, n, head_dim, generator=draw).requires_grad_()
        for n in (heads[0], heads[1], heads[1])
    )
    grad = torch.randn(q.shape, generator=draw)
    out = ops.SharedPrefixAttention(lengths, left_out)(0, q, k, v)
    ours = torch.autograd.grad(out, (q, k, v), grad)

    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = torch.zeros_like(exact[0])
    for own in rows.split(lengths):
        qkv = [x[own].transpose(0, 1)[None] for x in exact]
        attended = F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        expected = expected.index_copy(0, own, attended)  # a shared row again and again, the same
    theirs = torch.autograd.grad(expected, exact, grad.double())
    for mine, reference in zip(ours, theirs):
        # Sums of up to 400 float32 products, each rounded by up to 6e-8 of a term.
        assert (mine.double() - reference).norm() < 1e-6 * reference.norm()
        assert not mine[count:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shared_keys_gradient_is_summed_in_the_order_of_the_sequences_and_rounded_once(dtype):
    lengths, left_out, rows = _layout(GROUPS)
    count = int(rows.max()) + 1
    q = _drawn(count, 4, 32, dtype, 0)
    k, v = (_drawn(count, 2, 32, dtype, seed).requires_grad_() for seed in (1, 2))
    grad = _drawn(count, 4, 32, dtype, 3)
    grad[count:] = 0
    ours = torch.autograd.grad(ops.SharedPrefixAttention(lengths, left_out)(0, q, k, v), (k, v), grad)

    sums = [torch.zeros(x.shape) for x in (k, v)]
    first = 0
    for own, shared in zip(rows.split(lengths), left_out):
        # What this sequence adds: as a piece of one sequence, whose first rows are no queries if another has them.
        piece = ops.PieceAttention([len(own)], [(0, shared, len(own))])
        mine, parts = own[shared:], [x.detach()[own] for x in (k, v)]
        with torch.no_grad():
            out, log_sums = piece.forward(q[mine], *parts)
            added = piece.backward(grad[mine], q[mine], *parts, out, log_sums)[1:]
        for total, part in zip(sums, added):
            total[own] += part
        first += len(own)
    for mine, total in zip(ours, sums):
        assert torch.equal(mine, total.to(dtype))


@pytest.mark.parametrize(("lengths", "left_out"), [([5, 5], [1, 0]), ([5, 5], [0, 5]), ([5, 9], [0, 6])])
def test_more_than_another_sequence_has_cannot_be_left_out(lengths, left_out):
    with pytest.raises(ValueError, match="omits"):
        ops.SharedPrefixAttention(lengths, left_out)
