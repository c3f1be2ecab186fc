"""The kernel of a grouped product on CPU tensors under Triton's interpreter.

`test_cuda_kernels.py` runs this file, and what `cuda_kernels.py` says of the interpreter holds here, too.
"""

import importlib
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lockstep import ops
from lockstep.ops.cuda import experts as summed
from lockstep.ops.cuda import grouped_linear as grouped
from lockstep.ops.cuda import linear
from lockstep.ops.cuda.kernel import launch
from tests.ops.cuda_kernels import DTYPES, compare, dots_of_fixed_order, form, kernels  # noqa: F401
from tests.ops.test_experts import starts_of
from tests.ops.test_linear import cancelling

# A step along K is the same everywhere: the interpreter adds up each by itself, which a device does not.
TILES = [
    linear.Tile(16, 16, 32, 4, 2, False),
    linear.Tile(32, 16, 32, 4, 2, False),
    linear.Tile(16, 64, 32, 8, 3, False),
]
DENSE = linear.Tile(32, 32, 32, 4, 2, True)


def _factors(seed: int, counts: list[int], depth: int, outputs: int, dtype: torch.dtype):
    """Rows and the groups' weights, whose products cancel."""
    x, w = cancelling(seed, sum(counts), depth, len(counts) * outputs, dtype)
    return x, w.view(len(counts), outputs, depth)


def _row_by_row(x, w, counts):
    """Each row's dense product, with K in one piece."""
    groups = [group for group, count in enumerate(counts) for _ in range(count)]
    rows = [linear.product_with(DENSE, row[None], w[group], 1) for row, group in zip(x, groups, strict=True)]
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("tile", "sizes"),
    # A dense product cuts the last into two pieces.
    [(TILES[2], (65, 21)), pytest.param(TILES[1], (65, 21), marks=pytest.mark.slow), (TILES[0], (513, 5))],
)
@settings(max_examples=1, phases=[Phase.generate])  # to shrink takes the interpreter minutes
@given(
    counts=st.lists(st.sampled_from([0, 1, 2, 3, 17]), min_size=3, max_size=5).filter(any),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_a_row_of_a_grouped_product_is_that_row_of_its_groups_dense_product(tile, sizes, counts, dtype, seed):
    x, w = _factors(seed, counts, *sizes, dtype)
    got = grouped.product_with(tile, x, w, starts_of(counts))
    assert torch.equal(got, _row_by_row(x, w, counts))


@pytest.mark.parametrize(
    ("dtype", "sizes", "counts"),
    [
        (torch.float32, (72, 21), [3, 0, 17, 1, 0]),
        (torch.float16, (72, 24), [0, 0, 40]),
        pytest.param(torch.float16, (512, 40), [3, 0, 17, 1, 0], marks=pytest.mark.slow),
    ],
)
def test_described_tiles_of_groups_have_the_bits_of_others(monkeypatch, dtype, sizes, counts):
    (x, w), starts = _factors(1, counts, *sizes, dtype), starts_of(counts)
    expected, used = grouped.product_with(TILES[1], x, w, starts), []
    monkeypatch.setattr(
        grouped, "launch", lambda kernel, *given, **sizes: used.append(kernel) or launch(kernel, *given, **sizes)
    )
    monkeypatch.setattr(linear, "has_copy_engine", lambda x: True)
    monkeypatch.setattr(grouped, "DECODE_ROWS", 16)
    # A group's last tile reads the next group's first row and, of as many columns as fit no tile, its first weights.
    got = grouped.product_with(TILES[1], x, w, starts)
    assert torch.equal(got, expected)
    # Strides other than a matrix's cannot be described.
    assert torch.equal(grouped.product_with(TILES[1], x, w.mT.contiguous().mT, starts), expected)
    assert used == [grouped._described_kernel, grouped._grouped_kernel]


def test_a_grouped_tile_is_compared_with_the_dense_product(monkeypatch):
    exact, (small, large) = grouped.product_with, linear.FLOAT_TILES
    own, given = replace(large, split=False), (torch.float32, torch.device("cpu"), 40, 24)
    forms = grouped._in_groups, grouped._in_strided_groups
    contiguous = []

    def noted(tile, x, weight, starts):
        contiguous.append(weight.is_contiguous())
        return exact(tile, x, weight, starts)

    monkeypatch.setattr(grouped, "product_with", noted)
    assert all(compare(own, small, *given, multiply=multiply) for multiply in forms)
    assert contiguous == [True, False]
    monkeypatch.setattr(grouped, "product_with", lambda *given: exact(*given) + 1e-3)
    assert not any(compare(own, small, *given, multiply=multiply) for multiply in forms)


def test_gradients_of_a_grouped_product_are_its_own_with_transposed_weights_and_the_librarys(kernels):  # noqa: F811
    counts = [3, 0, 1, 17]
    x, w = _factors(5, counts, 34, 41, torch.float16)
    grad, _ = cancelling(6, sum(counts), 41, 1, torch.float16)
    leaves = x.requires_grad_(), w.requires_grad_()
    of_x, of_weight = torch.autograd.grad(ops.grouped_linear(*leaves, starts_of(counts)), leaves, grad)
    assert torch.equal(of_x, _row_by_row(grad, w.detach().mT, counts))
    for rows, grads, own in zip(x.detach().split(counts), grad.split(counts), of_weight, strict=True):
        assert torch.equal(own, grads.T @ rows)


@pytest.mark.parametrize(("dtype", "weighted"), [(torch.float32, True), (torch.float16, False)])
def test_a_tokens_rows_are_summed_with_the_bits_of_pytorch_and_so_are_their_gradients(dtype, weighted):
    combine = importlib.import_module("lockstep.ops.experts")
    tokens, active, dim = 7, 3, 40
    rows, _ = cancelling(2, tokens * active, dim, 1, dtype)
    generator = torch.Generator().manual_seed(4)
    places = torch.randperm(tokens * active, generator=generator)
    weights = torch.rand(tokens, active, generator=generator)
    grad = torch.randn(tokens, dim, generator=generator).to(dtype)
    expected = combine._combine(rows, weights if weighted else None, places, tokens)
    out = torch.full_like(expected, torch.nan)
    summed.combine(rows, weights if weighted else None, places, out)
    assert torch.equal(out, expected)
    of_rows, of_weights = combine._combine_gradients(grad, rows, weights, places)
    mine = torch.full_like(of_rows, torch.nan), torch.full_like(of_weights, torch.nan)
    summed.combine_backward(grad, rows, weights, places, *mine)
    assert torch.equal(mine[0], of_rows)
    torch.testing.assert_close(mine[1], of_weights, rtol=1e-5, atol=1e-4)  # the sum of 40 products in another order


@pytest.mark.parametrize(("group", "depth"), [(0, 1100), (32, 64)])
def test_grouped_integers_have_exact_sums_without_reading_where_groups_start(kernels, monkeypatch, group, depth):  # noqa: F811
    integers, whole = (importlib.import_module(f"lockstep.ops.integer_{name}") for name in ("grouped", "linear"))
    counts = [2, 0, 1]
    x, w = torch.full((3, depth), 127.0), torch.full((3, 5, depth), -1.0)  # the largest sums
    x[1], w[0, 1:3] = torch.arange(depth) % 251 - 125.0, torch.arange(depth) % 17 - 8.0
    x[2, 3] = torch.nan
    plain = (lambda *each: whole._plain_int4(*each, group)) if group else whole._plain_int8
    expected = torch.cat([plain(rows, matrix) for rows, matrix in zip(x.split(counts), w)])
    monkeypatch.setattr(integers, "by_group", None)
    got = integers.integer_grouped_linear(x, w, starts_of(counts), group)
    assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
