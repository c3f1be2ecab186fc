"""Grouped products of integers: a group's are those of `int8_linear` or `int4_linear` of its weight alone."""

import hashlib
import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import ops
from lockstep.ops.integer_grouped import integer_grouped_linear
from tests.ops.test_experts import starts_of
from tests.ops.test_integer_linear import DTYPES, KINDS, difficult
from tests.ops.test_linear import cancelling

module = importlib.import_module("lockstep.ops.integer_grouped")


def by_group(x, weight, counts, group):
    """The definition."""
    return torch.cat([KINDS[group](rows, matrix) for rows, matrix in zip(x.split(counts), weight)])


def factors(seed, counts, depth, outputs, dtype):
    """Rows and the groups' weights, whose products cancel."""
    x, w = cancelling(seed, sum(counts), depth, len(counts) * outputs, dtype)
    return x, w.view(len(counts), outputs, depth)


@settings(max_examples=12)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), group=st.sampled_from([*KINDS]))
def test_a_groups_product_is_that_of_its_weight_alone(form, data, dtype, group):
    counts = data.draw(st.lists(st.sampled_from([0, 0, 1, 2, 3, 9, 21]), min_size=1, max_size=5))
    outputs = data.draw(st.sampled_from([5, 32, 64, 70]))
    depth = data.draw(st.integers(1, 3)) * group if group else data.draw(st.integers(1, 200))
    x, weight = (difficult(data.draw(st.integers(0, 99)), rows, depth, dtype) for rows in (99, len(counts) * outputs))
    x, weight, starts = x[: sum(counts)], weight.view(len(counts), outputs, depth), starts_of(counts)
    expected = by_group(x, weight, counts, group).nan_to_num(7.0)
    weights = [weight] if form == "pytorch" else [weight, ops.PackedWeight.of(weight, module.layout_of(group))]
    for each in weights:
        assert torch.equal(integer_grouped_linear(x, each, starts, group).nan_to_num(7.0), expected)
    with ops.PackedWeights().in_use():
        assert torch.equal(integer_grouped_linear(x, weight, starts, group).nan_to_num(7.0), expected)
    assert torch.equal(module._plain(x, weight, starts, group).nan_to_num(7.0), expected)


@pytest.mark.parametrize("group", KINDS)
@pytest.mark.parametrize("counts", [[40, 0, 60, 1], [9] * 12], ids=["each split", "split among threads"])
def test_threads_share_groups_or_their_outputs(counts, group, threads):
    x, weight = factors(1, counts, 256, 90, torch.float32)
    results = []
    for count in (1, 2, 5):
        threads(count)
        results.append(integer_grouped_linear(x, weight, starts_of(counts), group))
    assert torch.equal(results[0], by_group(x, weight, counts, group))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_every_processor_has_the_same_result(form):
    generator, counts = torch.Generator().manual_seed(3), [5, 0, 28]
    x, weight = (torch.randint(-999, 1000, size, generator=generator) / 64 for size in ((33, 640), (3, 70, 640)))
    of_all = torch.cat([integer_grouped_linear(x, weight, starts_of(counts), group) for group in KINDS])
    assert hashlib.sha256(of_all.numpy().tobytes()).hexdigest()[:16] == "3a2dd901f8044082"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", KINDS)
def test_gradients_are_those_of_each_groups_product(form, dtype, group):
    counts = [3, 0, 1, 130]
    x, weight = factors(5, counts, 128, 40, dtype)
    grad = torch.randn(sum(counts), 40, generator=torch.Generator().manual_seed(2)).to(dtype)
    got = _gradients(lambda x, w: integer_grouped_linear(x, w, starts_of(counts), group), x, weight, grad)
    rows = zip(x.split(counts), weight, grad.split(counts))
    alone = [_gradients(KINDS[group], *each) for each in rows]
    assert torch.equal(got[0], torch.cat([of_x for of_x, _ in alone]))
    assert torch.equal(got[1], torch.stack([of_weight for _, of_weight in alone]))
    if form != "pytorch":
        packed = ops.PackedWeight.of(weight, module.layout_of(group))
        leaf = x.clone().requires_grad_()
        integer_grouped_linear(leaf, packed, starts_of(counts), group).backward(grad)
        assert torch.equal(leaf.grad, got[0])
        assert packed.panels.numel() * 4 == packed.nbytes < 0.9 * weight.nbytes


def _gradients(product, x, weight, grad):
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    product(*leaves).backward(grad)
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("group", KINDS)
def test_compiled_code_calls_the_same_operator(form, group):
    counts = [2, 0, 5]
    x, weight = factors(2, counts, 128, 33, torch.float32)
    grad, starts = torch.ones(7, 33), starts_of(counts)
    compiled = torch.compile(integer_grouped_linear, backend="aot_eager", fullgraph=True)
    expected = _gradients(lambda x, w: integer_grouped_linear(x, w, starts, group), x, weight, grad)
    got = _gradients(lambda x, w: compiled(x, w, starts, group), x, weight, grad)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("group", KINDS)
def test_a_step_graph_replays_new_rows_of_other_groups(form, group):
    if form == "pytorch":
        pytest.skip("step graphs record compiled kernels")
    x, weight = factors(4, [3, 3, 3], 128, 45, torch.bfloat16)
    rows, starts = x.clone(), starts_of([3, 0, 6])
    graph = ops.StepGraph(lambda: (integer_grouped_linear(rows, weight, starts, group),), ops.Arena())
    rows.copy_(x.flip(0) * 3)
    starts.copy_(starts_of([0, 8, 1]))
    assert torch.equal(graph.replay()[0], by_group(x.flip(0) * 3, weight, [0, 8, 1], group))


def test_what_does_not_match_is_refused():
    x, weight = torch.zeros(4, 64), torch.zeros(3, 8, 64)
    with pytest.raises(ValueError, match="starts must be ascending"):
        integer_grouped_linear(x, weight, torch.tensor([0, 2, 1, 4]))
    with pytest.raises(ValueError, match="a grouped product needs rows with the weights' width and dtype"):
        integer_grouped_linear(x, weight.bfloat16(), torch.tensor([0, 1, 2, 4]))
    with pytest.raises(ValueError, match="groups of 48 must .* divide the 64 features"):
        integer_grouped_linear(x, weight, torch.tensor([0, 1, 2, 4]), 48)
