"""The norm over all heads together, of which each rank has some, against one process."""

from contextlib import nullcontext

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

import lockstep.parallel.tensor  # noqa: F401  # registers the operators on DTensors
from lockstep import ops
from lockstep.config import ParallelConfig
from lockstep.ops import one_order
from lockstep.parallel import close_world, open_world
from lockstep.parallel.exchange import whole_rows
from lockstep.parallel.placements import COPY, ROWS
from tests.parallel.launch import launch

TOKENS, DIM, HEADS, HEAD_DIM, EPS = 24, 32, 8, 16, 1e-5


def cancelling(seed, *shape):
    """Another order of a row's sum, or of the rows', shows."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=draw) * torch.exp2(torch.randint(-4, 5, shape, generator=draw).float())
    x[: len(x) // 2] = -x[len(x) // 2 :] * 1.0078125
    return x


def projected(x, before, weight, norm):
    """Queries or keys `[tokens, heads, head_dim]`, normed as OLMo 2 does."""
    return ops.heads_norm(ops.linear(ops.rms_norm(x, before, EPS), weight).unflatten(1, (-1, HEAD_DIM)), norm, EPS)


def with_gradients(function, leaves, weights):
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad((out.float() * weights).sum(), leaves)]


def drawn(heads, dtype):
    """A residual stream, a norm before the projection, its weight, and that of the norm after it."""
    features = heads * HEAD_DIM
    shapes = [(TOKENS, DIM), (DIM,), (features, DIM), (features,)]
    tensors = [cancelling(seed, *shape).to(dtype) for seed, shape in enumerate(shapes)]
    tensors[2] /= 8
    return tensors, cancelling(9, TOKENS, heads, HEAD_DIM)


def whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def compare(ranks, dtype, in_order, full_dtensor):
    axes = {"tensor": ranks // 2, "context": 2} if full_dtensor else {"tensor": ranks}
    world = open_world(ParallelConfig(**axes, full_dtensor=full_dtensor), "cpu")
    group, mesh = world.mesh.get_group("tensor"), world.mesh["tensor"]
    places = lambda place: [place]  # noqa: E731
    if full_dtensor:  # tokens are the same on both context ranks, whose gradients are added
        mesh, places = world.mesh[("context", "tensor")], lambda place: [COPY, place]
    rank, count = group.rank(), group.size()
    (x, *parameters), weights = drawn(HEADS, dtype)
    order = one_order.one_order(count) if in_order else nullcontext()
    with order:
        leaves = [each.clone().requires_grad_() for each in (x, *parameters)]
        expected = with_gradients(projected, leaves, weights)
        local = [x.chunk(count)[rank].clone().requires_grad_()] + [
            distribute_tensor(each, mesh, places(place), src_data_rank=None).requires_grad_()
            for each, place in zip(parameters, (COPY, ROWS, COPY))
        ]
        found = with_gradients(projected, local, weights.chunk(count, 1)[rank])
    assert torch.equal(found[0], expected[0].chunk(count, 1)[rank])
    theirs = [expected[1].chunk(count)[rank], *(each * (2 if full_dtensor else 1) for each in expected[2:])]
    for own, other in zip(map(whole, found[1:]), theirs, strict=True):
        if in_order:
            assert torch.equal(own, other)
        # In the layout's order, the input's gradient is a sum over ranks, of what each has rounded.
        error = (own.double() - other.double()).abs().max() / other.double().abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 2e-2)
    assert all(torch.equal(own, other) for own, other in zip(map(whole, found[3:]), theirs[2:])), "of whole rows"
    with torch.no_grad(), whole_rows():
        assert torch.equal(projected(x[:5], *local[1:]), expected[0][:5].chunk(count, 1)[rank]), "as a generator does"
    close_world(world)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("ranks", "in_order", "full_dtensor"),
    [(2, False, False), (2, True, False), (4, False, False), (4, True, False), (4, False, True)],
)
def test_values_and_gradients_of_split_heads_are_those_of_one_process(ranks, dtype, in_order, full_dtensor):
    launch(ranks, compare, ranks, dtype, in_order, full_dtensor)


def compare_few_keys():
    """Two key heads on four ranks: every rank has both, and a gradient of the one that it attends with."""
    world = open_world(ParallelConfig(tensor=4), "cpu")
    mesh, head = world.mesh["tensor"], slice(world.rank // 2, world.rank // 2 + 1)
    (x, *parameters), weights = drawn(2, torch.float32)
    leaves = [each.clone().requires_grad_() for each in (x, *parameters)]
    expected = with_gradients(projected, leaves, 2 * weights)  # two ranks attend with each
    local = [x.chunk(4)[world.rank].clone().requires_grad_()] + [
        distribute_tensor(each, mesh, [COPY], src_data_rank=None).requires_grad_() for each in parameters
    ]
    found = with_gradients(lambda *leaves: projected(*leaves)[:, head].contiguous(), local, weights[:, head])
    assert torch.equal(found[0], expected[0][:, head])
    for own, other in zip(map(whole, found[1:]), [expected[1].chunk(4)[world.rank], *expected[2:]], strict=True):
        # Ranks add their parts of the gradients in another order than one process, in float32.
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
    close_world(world)


def test_gradients_of_fewer_key_heads_than_ranks_are_counted_once_for_each_rank_that_attends():
    launch(4, compare_few_keys)


def compare_compiled():
    world = open_world(ParallelConfig(tensor=2), "cpu")
    (_, _, _, norm), weights = drawn(HEADS, torch.bfloat16)
    heads = cancelling(3, TOKENS, HEADS, HEAD_DIM).bfloat16().chunk(2, 1)[world.rank].clone().requires_grad_()
    weight = distribute_tensor(norm, world.mesh["tensor"], [COPY], src_data_rank=None).requires_grad_()
    function = lambda x, weight: ops.heads_norm(x, weight, EPS)  # noqa: E731
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    ours, theirs = (
        with_gradients(each, [heads, weight], weights.chunk(2, 1)[world.rank]) for each in (compiled, function)
    )
    assert all(torch.equal(whole(own), whole(other)) for own, other in zip(ours, theirs, strict=True))
    close_world(world)


def test_a_compiled_graph_has_the_bits_of_eager_calls():
    launch(2, compare_compiled)
