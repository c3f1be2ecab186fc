"""Products in every number format whose factors are cut over ranks, against one process, on data that cancels."""

import pytest
import torch

from lockstep.config import ParallelConfig
from lockstep.ops import FORMATS, one_order
from lockstep.ops.packed_weights import PackedWeights
from lockstep.parallel import close_world, open_world
from lockstep.parallel.exchange import local_rows, whole_rows
from lockstep.parallel.one_order import column_product
from lockstep.parallel.row_product import row_product
from tests.ops.test_linear import cancelling
from tests.parallel.launch import launch

SHARED = [name for name in FORMATS if name != "float8"]
"""float8 has one scale for all rows, which parts of a product cannot have."""
ROWS, DEPTH, OUTPUTS, CHUNKS = 24, 512, 80, 4


def factors(dtype, special=False):
    """The largest number of a row, or of an output, is on one rank. special: so are numbers that are not finite."""
    x, w = cancelling(1, ROWS, DEPTH, OUTPUTS, dtype)
    x[::2, 3] *= 40
    w[::3, -5] *= 40
    x[1] = 0
    if special:
        x[4, -1], w[7, 0] = torch.nan, -torch.inf
    return x, w


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_products_over_ranks_have_the_bits_of_one_process(ranks):
    launch(ranks, compare_products, ranks, seconds=300)


def compare_products(ranks):
    world = open_world(ParallelConfig(tensor=ranks), "cpu")
    group = world.mesh.get_group("tensor")
    for format in SHARED:
        for dtype in (torch.float32, torch.bfloat16):
            for special in (False, True):
                compare_forward(format, *factors(dtype, special), group)
        compare_gradients(format, *factors(torch.float32), group)
    close_world(world)


def part(x, group, dim):
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


def equal(found, expected):
    """With NaN in the same places."""
    return torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def compare_forward(format, x, w, group):
    expected = FORMATS[format].linear(x, w, CHUNKS)
    cut = part(x, group, 1), part(w, group, 1)
    assert equal(row_product(*cut, format, CHUNKS, group), local_rows(expected, group)), format
    weights = PackedWeights()
    with torch.no_grad(), whole_rows(), weights.in_use():
        for _ in range(2):  # packs the weight, and reads what was packed
            assert equal(row_product(*cut, format, CHUNKS, group), expected), format
        if group.rank() == 0:
            weights.release()  # as on a rank with less memory
        few = row_product(cut[0][:3], cut[1], format, CHUNKS, group)
        assert equal(few, expected[:3]), format
    columns = column_product(x, part(w, group, 0), format, group.group_name)
    assert equal(columns, part(FORMATS[format].linear(x, w, 1), group, 1)), format


def gradients(product, grad, *factors):
    factors = [t.detach().clone().requires_grad_() for t in factors]
    return torch.autograd.grad(product(*factors), factors, grad)


def compare_gradients(format, x, w, group):
    draw = torch.Generator().manual_seed(2)
    grad = torch.randn(ROWS, OUTPUTS, generator=draw)
    of_x, of_w = gradients(lambda x, w: FORMATS[format].linear(x, w, CHUNKS), grad, x, w)
    cut = part(x, group, 1), part(w, group, 1)
    found = gradients(lambda x, w: row_product(x, w, format, CHUNKS, group), local_rows(grad, group), *cut)
    assert torch.equal(found[1], part(of_w, group, 1)), format
    if format != "float8_rowwise_gw_hp":  # which has one scale for a weight
        assert torch.equal(found[0], part(of_x, group, 1)), format
    with one_order.one_order(CHUNKS):
        of_x, of_w = gradients(lambda x, w: FORMATS[format].linear(x, w, 1), grad, x, w)
        found = gradients(
            lambda x, w: column_product(x, w, format, group.group_name), part(grad, group, 1), x, part(w, group, 0)
        )
    assert torch.equal(found[1], part(of_w, group, 0)), format
    if FORMATS[format].gradients is None:
        assert torch.equal(local_rows(found[0], group), local_rows(of_x, group)), format
