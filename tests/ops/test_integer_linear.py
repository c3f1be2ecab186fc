"""Products of 8- and 4-bit integers: exact sums, so one result on every processor, for a row in any batch."""

import hashlib
import importlib
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import ops
from lockstep.ops import packed_weights
from lockstep.ops.linear import tree_sum
from tests.ops.test_linear import assert_rows_agree, cancelling

module = importlib.import_module("lockstep.ops.integer_linear")
DTYPES = [torch.float32, torch.bfloat16]
KINDS = {0: ops.int8_linear, 32: partial(ops.int4_linear, group=32), 128: partial(ops.int4_linear, group=128)}
PLAIN = {0: module._plain_int8, 32: partial(module._plain_int4, group=32), 128: partial(module._plain_int4, group=128)}


def difficult(seed, rows, depth, dtype):
    """Rows of many magnitudes; ties, zeros, denormals, and numbers that are not finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, depth, generator=generator) * torch.exp2(torch.randint(-30, 30, (rows, 1)).float())
    x[0] = 0
    x[1 % rows] = torch.arange(depth) % 255 - 127.0
    x[2 % rows] = (torch.arange(depth) % 254 - 126.5) / 2  # ties
    x[3 % rows] = torch.randint(-200, 200, (depth,), generator=generator) * 2.0**-149
    for row, value in ((4, torch.inf), (5, -torch.inf), (6, torch.nan)):
        if row < rows:
            x[row, row % depth] = value
    return x.to(dtype)


@settings(max_examples=12)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), group=st.sampled_from([0, 32, 128]))
def test_products_are_those_of_their_definition(form, data, dtype, group):
    rows, outputs = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 70))
    depth = data.draw(st.integers(1, 3)) * group if group else data.draw(st.integers(1, 200))
    x, w = (difficult(data.draw(st.integers(0, 99)), count, depth, dtype) for count in (rows, outputs))
    assert torch.equal(KINDS[group](x, w).nan_to_num(7.0), PLAIN[group](x, w).to(dtype).nan_to_num(7.0))
    of_x, of_w = x.isfinite().all(1), w.isfinite().all(1)
    assert KINDS[group](x, w)[~of_x].isnan().all() and KINDS[group](x, w)[:, ~of_w].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", KINDS)
def test_every_number_of_rows_gives_a_row_the_same_bits(form, dtype, group):
    x, w = cancelling(0, 130, 256, 45, dtype)
    counts = [1, 3, 64] if form in ("pytorch", "plain") else [*range(1, 20), 47, 63, 64, 97, 128]
    assert_rows_agree(KINDS[group], x, w, counts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_chunks_of_groups_are_chains_joined_in_a_tree(form, dtype, group, chunks):
    x, w = cancelling(3, 21, 24 * group, 45, dtype)
    parts = zip(x.chunk(chunks, 1), w.chunk(chunks, 1))
    sums = [module.int4_sums(*part, group=group) for part in parts]
    assert not torch.equal(tree_sum(sums), module.int4_sums(x, w, group=group)), "the data cancels"
    assert torch.equal(module.int4_sums(x, w, chunks, group=group), tree_sum(sums))
    assert torch.equal(KINDS[group](x, w, chunks), tree_sum(sums).to(dtype))
    # Of 24 groups, at most 8 chunks have equally many.
    assert torch.equal(KINDS[group](x, w, 16), KINDS[group](x, w, 8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_rows_with_the_scales_of_the_whole_have_its_sums(form, dtype):
    x, w = difficult(2, 21, 320, dtype), difficult(4, 45, 320, dtype)
    cuts = [(x[:, part], w[:, part]) for part in (slice(0, 96), slice(96, 97), slice(97, 320))]
    scales = [torch.stack(of).amax(0) for of in zip(*([module.row_scales(t) for t in cut] for cut in cuts))]
    for whole, of_whole in zip((x, w), scales):
        assert torch.equal(of_whole.nan_to_num(7.0), module.quantized_rows(whole)[1].flatten().nan_to_num(7.0))
    total = sum(module.int8_sums(*cut, *scales) for cut in cuts)
    assert total.dtype == torch.int32
    found = module.scaled_sums(total, *scales).to(dtype)
    assert torch.equal(found.nan_to_num(7.0), ops.int8_linear(x, w).nan_to_num(7.0))
    for whole, parts, of_whole in zip((x, w), zip(*cuts), scales):
        rounded = torch.cat([module.rounded_rows(part, scales=of_whole) for part in parts], 1)
        assert torch.equal(rounded.nan_to_num(7.0), module.rounded_rows(whole).nan_to_num(7.0))


def test_every_processor_has_the_same_result(form):
    generator = torch.Generator().manual_seed(3)  # integers: normal numbers depend on the processor
    x, w = (torch.randint(-999, 1000, (rows, 640), generator=generator) / 64 for rows in (33, 70))
    of_all = torch.cat([linear(x, w) for linear in KINDS.values()])
    assert hashlib.sha256(of_all.numpy().tobytes()).hexdigest()[:16] == "f74048636da3492e"


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_the_nearest_ones(dtype):
    """Number by number, in NumPy's arithmetic."""
    x = difficult(5, 4, 256, dtype)
    for row, codes, scale in zip(x.float().numpy(), *(part[:, 0].numpy() for part in module.quantized_rows(x))):
        divisor = np.float32(max(abs(value) for value in row)) / np.float32(127)
        assert scale[0] == divisor
        assert [*codes] == [max(-127, min(127, np.rint(value / divisor))) if divisor else 0 for value in row]
    weight, (codes, scales) = x.unflatten(1, (-1, 32)), module.quantized_weight(x, 32)
    for group, of_group, scale in zip(weight.flatten(0, 1).float(), codes.flatten(0, 1), scales.flatten()):
        most = max(group.tolist(), key=lambda value: (abs(value), -value))
        assert scale == (torch.tensor(most) / -8).bfloat16()
        assert of_group.tolist() == [
            max(-8, min(7, np.rint(np.float32(v) / scale.numpy()))) if scale else 0 for v in group
        ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_numbers_are_the_codes_times_the_scales(form, dtype):
    x = difficult(7, 9, 256, dtype)
    for group in KINDS:
        codes, scales = module.quantized_rows(x, group)
        assert torch.equal(
            module.rounded_rows(x, group).nan_to_num(7), (codes * scales).to(dtype).flatten(1).nan_to_num(7)
        )
        if group:
            codes, scales = module.quantized_weight(x, group)
        rounded = module.rounded_weight(x, group)
        assert torch.equal(rounded.nan_to_num(7), (codes * scales).to(dtype).flatten(1).nan_to_num(7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", KINDS)
def test_gradients_are_those_of_the_rounded_factors(form, dtype, group):
    x, w = (t.requires_grad_() for t in cancelling(1, 20, 256, 30, dtype))
    out = KINDS[group](x, w)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    out.backward(grad)
    rounded = [t.detach().requires_grad_() for t in (module.rounded_rows(x, group), module.rounded_weight(w, group))]
    ops.linear(*rounded).backward(grad)
    assert torch.equal(x.grad, rounded[0].grad) and torch.equal(w.grad, rounded[1].grad)
    # What is multiplied is what is differentiated.
    assert (out - ops.linear(*rounded)).abs().max() <= (0.02 if dtype == torch.bfloat16 else 1e-5) * 4096


def test_packed_integers_follow_their_weight(form, monkeypatch):
    x, w = torch.randn(3, 128), torch.randn(40, 128)
    weights, products = ops.PackedWeights(), [ops.linear, *KINDS.values()]

    def results():
        return [product(x, w) for product in products]

    expected = results()
    with weights.in_use():
        for _ in range(2):
            assert all(map(torch.equal, results(), expected))
        assert len(weights._panels) == (0 if form == "pytorch" else len(products))
        w.mul_(-2)
        assert all(map(torch.equal, results(), [old * -2 for old in expected]))
        w.numpy()[:] *= 2  # does not change the version
        weights.forget()
        assert all(map(torch.equal, results(), [old * -4 for old in expected]))
    monkeypatch.setattr(packed_weights, "free_memory", lambda: 0)
    with ops.PackedWeights().in_use():
        assert all(map(torch.equal, results(), [old * -4 for old in expected]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", KINDS)
def test_a_packed_weight_is_as_good_as_its_numbers(form, dtype, group):
    if form == "pytorch":
        pytest.skip("nothing is packed without kernels")
    x, w = cancelling(4, 21, 256, 45, dtype)
    packed = ops.PackedWeight.of(w, module.layout_of(group))
    assert packed.shape == w.shape and packed.dtype == dtype and packed.panels.nbytes < 0.9 * w.nbytes
    assert torch.equal(module.rounded_weight(packed, group), module.rounded_weight(w, group))
    results = []
    for weight in (w, packed):
        own = x.clone().requires_grad_()
        out = KINDS[group](own, weight)
        out.backward(torch.ones_like(out))
        results.append((out.detach(), own.grad))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("shapes", "group", "said"),
    [
        (((3, 64), (5, 32)), 0, "needs factors of one width"),
        (((3, 64), (5, 64)), 48, "groups of 48 must .* divide the 64 features"),
        (((3, 64), (5, 64)), 8, "groups of 8 must be a multiple of 16"),
    ],
)
def test_factors_that_do_not_match_are_refused(shapes, group, said):
    x, w = map(torch.zeros, shapes)
    with pytest.raises(ValueError, match=said):
        module._linear(x, w, 1, group)
