"""Products: a chain of fused multiply-adds an element, on data whose sums cancel, so that a last bit shows."""

import importlib
import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import ops
from lockstep.ops import native, packed_weights, plain
from tests.ops import definitions

# `ops.linear` is the function.
module = importlib.import_module("lockstep.ops.linear")
DTYPES = [torch.float32, torch.bfloat16]


def is_slow(form: str, dtype: torch.dtype) -> bool:
    # Of emulated tiles the products in bfloat16 have code of their own, which is tested whole.
    return form in ("pytorch", "plain") or (form, dtype) == ("plain_tiles", torch.float32)


def cancelling(seed: int, rows: int, depth: int, outputs: int, dtype: torch.dtype):
    """Factors whose exact products are 0 or tiny: what comes out is what each rounding of the sum left."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randint(-6, 7, (depth // 2,), generator=generator).float())
    x = torch.randn(rows, depth // 2, generator=generator) * scale
    w = torch.randn(outputs, depth // 2, generator=generator)
    order = torch.randperm(2 * (depth // 2), generator=generator)
    x, w = torch.cat([x, -x], 1)[:, order], torch.cat([w, w], 1)[:, order]
    if depth % 2:
        x, w = (torch.cat([t, torch.full((len(t), 1), 1e-6)], 1) for t in (x, w))
    return x.to(dtype), w.to(dtype)


def assert_rows_agree(product, x, w, counts):
    """Any number of first or last rows gives the bits that these rows have among all."""
    whole = product(x, w)
    for count in counts:
        assert torch.equal(product(x[:count], w), whole[:count]), f"the first {count} rows"
        assert torch.equal(product(x[-count:], w), whole[-count:]), f"the last {count} rows"


def defining_sums(x, w, chunks=1):
    """In float32, by the definition of the arithmetic in use."""
    adds = {"bf16_pairs": definitions.add_pairs, "bf16_tiles": definitions.add_tiles}
    add = adds.get(native.arithmetic()) if x.dtype == torch.bfloat16 else None
    parts = zip(x.chunk(chunks, 1), w.chunk(chunks, 1))
    if add is None:
        return module.tree_sum([plain.product(part, other.T) for part, other in parts])
    return module.tree_sum([add(torch.zeros(len(x), len(w)), part, other) for part, other in parts])


def defining_product(x, w):
    return defining_sums(x, w).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_rows_gives_a_row_the_same_bits(form, dtype):
    counts = [1, 2, 3, 5, 8, 64] if is_slow(form, dtype) else range(1, 131)
    assert_rows_agree(module.product, *cancelling(0, 130, 77, 45, dtype), counts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_order_for_a_single_row_would_be_noticed(dtype):
    def reversed_when_alone(x, w):
        return module.product(x.flip(1), w.flip(1)) if len(x) == 1 else module.product(x, w)

    with pytest.raises(AssertionError, match="rows"):
        assert_rows_agree(reversed_when_alone, *cancelling(0, 130, 77, 45, dtype), [1, 2, 3])


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_products_are_the_chain_that_defines_them(form, dtype, data):
    rows, depth, outputs = (data.draw(st.integers(1, most)) for most in (40, 90, 70))
    x, w = cancelling(data.draw(st.integers(0, 99)), rows, depth, outputs, dtype)
    assert torch.equal(module.product(x, w), defining_product(x, w))
    # The gradients' products read both factors across.
    grad = module.product(x, w).sign() + 1
    if form != "pytorch":
        of_x, of_w = defining_product(grad, w.T), defining_product(grad.T, x.T)
        assert torch.equal(module.product(grad, w.T), of_x) and torch.equal(module.product(grad.T, x.T), of_w)
        if native.arithmetic() == "portable":
            assert torch.equal(module.input_gradient(grad, w), of_x)
            assert torch.equal(module.weight_gradient(grad, x), of_w)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "depth", "outputs"), [(700, 1000, 130), (33, 3072, 64), (300, 770, 2050), (800, 200, 1030), (2, 64, 4099)]
)
def test_blocks_threads_slices_and_panels_change_no_bit(form, dtype, rows, depth, outputs):
    if is_slow(form, dtype):
        rows, depth, outputs = min(rows, 40), depth // 16, outputs // 16
    x, w = cancelling(1, rows, depth, outputs, dtype)
    expected = module.product(x, w)
    # Rows and columns that begin at any address, with other strides.
    odd_x = torch.nn.functional.pad(x, (3, 2, 1, 0))[1:, 3:-2]
    odd_w = torch.nn.functional.pad(w, (1, 4, 2, 1))[2:-1, 1:-4]
    across = w.T.contiguous().T
    for left, right in ((odd_x, w), (x, odd_w), (odd_x, across)):
        assert torch.equal(module.product(left, right), expected)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            assert torch.equal(module.product(x, w), expected), f"{threads} threads"
    finally:
        torch.set_num_threads(before)
    if form != "pytorch":
        weights = ops.PackedWeights()
        with weights.in_use():
            for count in (1, 2, 5, 32, min(rows, packed_weights.FEW_ROWS)):
                assert torch.equal(module.product(x[:count], w), expected[:count]), f"packed, {count} rows"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [33, 64])
def test_a_broken_row_changes_no_bit_of_others(dtype, depth):
    x, w = cancelling(3, 20, depth, 40, dtype)
    expected = module.product(x, w)
    for broken in range(20):
        damaged_x, damaged_w = x.clone(), w.clone()
        damaged_x[broken], damaged_w[broken] = torch.nan, torch.inf
        of_x, of_w = (torch.arange(count) != broken for count in (20, 40))
        assert torch.equal(module.product(damaged_x, w)[of_x], expected[of_x])
        assert torch.equal(module.product(x, damaged_w)[:, of_w], expected[:, of_w])


def by_parts(x, w, ranks, chunks):
    """A product as ranks make it: each from its part of K, which holds a share of the chunks."""
    parts = [module.product_sums(*part, chunks // ranks) for part in zip(x.chunk(ranks, 1), w.chunk(ranks, 1))]
    return module.tree_sum(parts).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "depth", "outputs"), [(1, 64, 40), (37, 96, 70), (400, 3072, 130)])
def test_ranks_that_hold_some_chunks_each_meet_in_the_same_bits(form, dtype, rows, depth, outputs):
    if is_slow(form, dtype):
        rows, depth, outputs = min(rows, 20), min(depth, 96), min(outputs, 40)
    x, w = cancelling(2, rows, depth, outputs, dtype)
    for chunks in (2, 4, 8):
        whole = module.product(x, w, chunks)
        for ranks in (2, 4, 8):
            if ranks <= chunks:
                assert torch.equal(by_parts(x, w, ranks, chunks), whole), f"{chunks} chunks on {ranks} ranks"
        assert_rows_agree(lambda x, w, chunks=chunks: module.product(x, w, chunks), x, w, [1, rows // 2 + 1])
        weights = ops.PackedWeights()
        with weights.in_use():
            few = min(rows, packed_weights.FEW_ROWS)
            assert torch.equal(module.product(x[:few], w, chunks), whole[:few])
    assert not torch.equal(whole, module.product(x, w)), "the number of chunks is part of the arithmetic"


def test_a_tree_that_adds_from_left_to_right_would_be_noticed():
    def in_a_row(parts):
        first, *others = parts
        for part in others:
            first = first + part
        return first

    x, w = cancelling(2, 37, 96, 70, torch.float32)
    sums = [module.product_sums(*part, 1) for part in zip(x.chunk(4, 1), w.chunk(4, 1))]
    assert not torch.equal(in_a_row(sums), module.product(x, w, 4))


def test_chunks_that_do_not_divide_the_features_are_refused():
    few = [(torch.float32, 96, 3), (torch.float32, 96, 0), (torch.float32, 96, -2)]
    for dtype, depth, chunks in [(torch.float32, 90, 4), (torch.bfloat16, 92, 4), *few]:
        with pytest.raises(ValueError, match=f"{chunks} chunks of a .* product must be a power of two"):
            module.product(torch.ones(2, depth, dtype=dtype), torch.ones(3, depth, dtype=dtype), chunks)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_of_chunks_below_the_normal_floats_is_rounded_as_it_is(dtype):
    x, w = torch.zeros(20, 64), torch.full((40, 64), 2.0**-63)
    x[:, 0], x[:, 32] = 1.5 * 2.0**-63, -(2.0**-63)
    expected = torch.full((20, 40), 2.0**-127, dtype=dtype)
    assert torch.equal(module.product(x.to(dtype), w.to(dtype), 2), expected)


def test_packed_panels_are_made_anew_when_the_weight_changes(form):
    if form == "pytorch":
        pytest.skip("the plain form packs nothing")
    x, w = torch.randn(3, 64), torch.nn.Parameter(torch.randn(48, 64))
    weights = ops.PackedWeights()
    with torch.no_grad(), weights.in_use():
        old = ops.linear(x, w)
        w.mul_(2)
        assert torch.equal(ops.linear(x, w), old * 2)
        # A writer that leaves no trace, as a kernel called by address: forgetting is what helps.
        w.data.numpy()[:] *= 2
        weights.forget()
        assert torch.equal(ops.linear(x, w), old * 4)


def test_without_memory_for_panels_the_weight_is_read_as_it_lies(form, monkeypatch):
    monkeypatch.setattr(packed_weights, "free_memory", lambda: 1000)
    x, w = torch.randn(3, 64), torch.randn(48, 64)
    expected = ops.linear(x, w)
    weights = ops.PackedWeights()
    with weights.in_use():
        assert torch.equal(ops.linear(x, w), expected)
    assert not weights._panels


def test_an_instruction_set_that_is_not_there_is_refused_by_name(monkeypatch):
    from lockstep.ops.native.instruction_sets import supported

    monkeypatch.setenv("LOCKSTEP_ISA", "avx1024")
    supported.cache_clear()
    with pytest.raises(ValueError, match="LOCKSTEP_ISA is avx1024: there is no such instruction set; here it can be"):
        supported()
    monkeypatch.undo()
    supported.cache_clear()
    with pytest.raises(
        ValueError, match='arithmetic is "exact"; it can be auto, portable, bf16_pairs, bf16_tiles, pytorch'
    ):
        native.set_arithmetic("exact")


def test_a_sum_of_nothing_is_zero(form):
    for dtype in DTYPES:
        torch.full((64, 64), float("nan"), dtype=dtype)  # what freed memory may hold
        assert torch.equal(
            module.product(torch.empty(4, 0, dtype=dtype), torch.empty(8, 0, dtype=dtype)),
            torch.zeros(4, 8, dtype=dtype),
        )
    weight = torch.randn(7, 5, requires_grad=True)
    ops.linear(torch.randn(3, 5)[:0].requires_grad_(), weight).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(7, 5))


def test_factors_that_do_not_fit_are_refused():
    for x, w in ((torch.ones(2, 5), torch.ones(4, 3)), (torch.ones(2, 4), torch.ones(3, 4).bfloat16())):
        # Without the type checker of the tests, which would see the widths first.
        with pytest.raises(ValueError, match="one width, dtype and device"):
            inspect.unwrap(module.product)(x, w)


def test_panels_of_another_weight_at_the_same_address_do_not_serve(form):
    if form == "pytorch":
        pytest.skip("the plain form packs nothing")
    x, weights = torch.randn(3, 64), ops.PackedWeights()
    weight = torch.nn.Parameter(torch.randn(48, 64))
    with torch.no_grad(), weights.in_use():
        for _ in range(10):
            assert torch.equal(ops.linear(x, weight), plain.product(x, weight.T))
            weight.data = weight.data + 1  # no new version, and the old memory is free
            assert torch.equal(ops.linear(x, torch.randn(48, 64).fill_(2)), ops.linear(x, torch.full((48, 64), 2.0)))


def test_panels_give_their_memory_back(form):
    if form == "pytorch":
        pytest.skip("the plain form packs nothing")
    x, weight, weights = torch.randn(3, 64), torch.randn(96, 64), ops.PackedWeights()
    with weights.in_use():
        ops.linear(x, weight)
        free = weights._budget
        for _ in range(5):
            ops.linear(x, weight[:16])
            ops.linear(x, weight)
        assert weights._budget == free
        kept = weights._panels[weight.data_ptr()][1].data_ptr()
        weights.forget()
        weights.forget()
        ops.linear(x, weight)
        assert weights._panels[weight.data_ptr()][1].data_ptr() == kept, "an update and a call of generate say it twice"
        weights.forget()
        ops.linear(x, torch.randn(96, 64))
        weights.forget()
        assert len(weights._panels) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_of_several_blocks_of_k_is_the_chain_too(form, dtype):
    x, w = cancelling(2, 3, 1601, 20, dtype)  # more than two blocks of either dtype, and an odd end
    assert torch.equal(module.product(x, w), defining_product(x, w))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "depth", "outputs", "chunks"), [(1, 64, 40, 2), (17, 96, 33, 4), (33, 1040, 70, 8), (100, 3072, 65, 4)]
)
def test_products_are_summed_by_chunks_as_their_definition_says(form, dtype, rows, depth, outputs, chunks):
    if is_slow(form, dtype):
        depth = min(depth, 1040)
    x, w = cancelling(rows, rows, depth, outputs, dtype)
    sums = module.product_sums(x, w, chunks)
    assert torch.equal(sums, defining_sums(x, w, chunks))
    assert torch.equal(module.product(x, w, chunks), sums.to(dtype))


def test_a_weight_and_its_transpose_have_their_own_panels(form):
    if form == "pytorch":
        pytest.skip("the plain form packs nothing")
    x, w = torch.randn(3, 64), torch.randn(64, 64)
    with torch.no_grad(), ops.PackedWeights().in_use():
        ops.linear(x, w)
        assert torch.equal(ops.linear(x, w.T), ops.linear(x, w.T.contiguous()))


def test_panels_stop_where_their_share_of_memory_ends(form, monkeypatch):
    if form == "pytorch":
        pytest.skip("the plain form packs nothing")
    first, second = torch.randn(48, 64), torch.randn(48, 64)
    one = 4 * packed_weights.panel_words(first)
    monkeypatch.setattr(packed_weights, "free_memory", lambda: int(1.5 * one / packed_weights.MEMORY_SHARE))
    weights = ops.PackedWeights()
    with torch.no_grad(), weights.in_use():
        ops.linear(torch.randn(3, 64), first)
        ops.linear(torch.randn(3, 64), second)
    assert len(weights._panels) == 1
