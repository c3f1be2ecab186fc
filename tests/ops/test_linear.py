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
    counts = [1, 2, 3, 5, 8, 64] if form in ("pytorch", "plain") else [*range(1, 34), 47, 48, 63, 64, 65, 127, 128, 129]
    assert_rows_agree(module.product, *cancelling(0, 130, 77, 45, dtype), counts)


@settings(max_examples=10)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
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


@pytest.mark.parametrize(
    ("dtype", "rows", "depth", "outputs", "chunks"),
    [
        (torch.float32, 3, 1601, 20, 1), (torch.bfloat16, 3, 1601, 20, 1),  # several blocks of K, and an odd end
        (torch.bfloat16, 1, 64, 40, 2), (torch.float32, 17, 96, 33, 4), (torch.bfloat16, 33, 1040, 70, 8),
    ],
)  # fmt: skip
def test_products_are_summed_by_chunks_as_their_definition_says(dtype, rows, depth, outputs, chunks):
    x, w = cancelling(rows, rows, depth, outputs, dtype)
    sums = module.product_sums(x, w, chunks)
    assert torch.equal(sums, defining_sums(x, w, chunks))
    assert torch.equal(module.product(x, w, chunks), sums.to(dtype))


@pytest.mark.parametrize(
    ("dtype", "rows", "depth", "outputs"),
    [
        (torch.float32, 700, 1000, 130), (torch.bfloat16, 300, 770, 2050), (torch.bfloat16, 33, 3072, 64),
        (torch.float32, 2, 64, 4099),
    ],
)  # fmt: skip
def test_blocks_threads_slices_and_panels_change_no_bit(form, threads, dtype, rows, depth, outputs):
    if form in ("pytorch", "plain", "plain_tiles"):
        rows, depth, outputs = min(rows, 40), depth // 16, outputs // 16
    x, w = cancelling(1, rows, depth, outputs, dtype)
    expected = module.product(x, w)
    # Rows and columns that begin at any address, with other strides.
    odd_x = torch.nn.functional.pad(x, (3, 2, 1, 0))[1:, 3:-2]
    odd_w = torch.nn.functional.pad(w, (1, 4, 2, 1))[2:-1, 1:-4]
    across = w.T.contiguous().T
    for left, right in ((odd_x, w), (x, odd_w), (odd_x, across)):
        assert torch.equal(module.product(left, right), expected)
    for count in (1, 2, 7):
        threads(count)
        assert torch.equal(module.product(x, w), expected), f"{count} threads"
    if form != "pytorch":
        with ops.PackedWeights().in_use():
            for count in (1, 2, 5, 32, min(rows, packed_weights.FEW_ROWS)):
                assert torch.equal(module.product(x[:count], w), expected[:count]), f"packed, {count} rows"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_row_changes_no_bit_of_others(dtype):
    x, w = cancelling(3, 20, 33, 40, dtype)
    expected = module.product(x, w)
    for broken in (0, 7, 19):
        damaged_x, damaged_w = x.clone(), w.clone()
        damaged_x[broken], damaged_w[broken] = torch.nan, torch.inf
        of_x, of_w = (torch.arange(count) != broken for count in (20, 40))
        assert torch.equal(module.product(damaged_x, w)[of_x], expected[of_x])
        assert torch.equal(module.product(x, damaged_w)[:, of_w], expected[:, of_w])


def by_parts(x, w, ranks, chunks):
    """A product as ranks make it: each from its part of K, which holds a share of the chunks."""
    parts = [module.product_sums(*part, chunks // ranks) for part in zip(x.chunk(ranks, 1), w.chunk(ranks, 1))]
    return module.tree_sum(parts).to(x.dtype)


@pytest.mark.parametrize(
    ("dtype", "rows", "depth", "outputs"), [(torch.float32, 1, 64, 40), (torch.bfloat16, 37, 96, 70)]
)
def test_ranks_that_hold_some_chunks_each_meet_in_the_same_bits(form, dtype, rows, depth, outputs):
    x, w = cancelling(2, rows, depth, outputs, dtype)
    for chunks in (2, 8):
        whole = module.product(x, w, chunks)
        for ranks in (2, 8):
            if ranks <= chunks:
                assert torch.equal(by_parts(x, w, ranks, chunks), whole), f"{chunks} chunks on {ranks} ranks"
        assert_rows_agree(lambda x, w, chunks=chunks: module.product(x, w, chunks), x, w, [1, rows // 2 + 1])
        with ops.PackedWeights().in_use():
            assert torch.equal(module.product(x, w, chunks), whole)
    assert not torch.equal(whole, module.product(x, w)), "the number of chunks is part of the arithmetic"


def test_factors_and_chunks_that_do_not_fit_are_refused():
    few = [(torch.float32, 96, 3), (torch.float32, 96, 0), (torch.float32, 96, -2)]
    for dtype, depth, chunks in [(torch.float32, 90, 4), (torch.bfloat16, 92, 4), *few]:
        with pytest.raises(ValueError, match=f"{chunks} chunks of a .* product must be a power of two"):
            module.product(torch.ones(2, depth, dtype=dtype), torch.ones(3, depth, dtype=dtype), chunks)
    for x, w in ((torch.ones(2, 5), torch.ones(4, 3)), (torch.ones(2, 4), torch.ones(3, 4).bfloat16())):
        # Without the type checker of the tests, which would see the widths first.
        with pytest.raises(ValueError, match="one width, dtype and device"):
            inspect.unwrap(module.product)(x, w)


def test_a_sum_of_chunks_below_the_normal_floats_is_rounded_as_it_is():
    x, w = torch.zeros(20, 64), torch.full((40, 64), 2.0**-63)
    x[:, 0], x[:, 32] = 1.5 * 2.0**-63, -(2.0**-63)
    for dtype in DTYPES:
        expected = torch.full((20, 40), 2.0**-127, dtype=dtype)
        assert torch.equal(module.product(x.to(dtype), w.to(dtype), 2), expected)


def test_a_sum_of_nothing_is_zero():
    for dtype in DTYPES:
        torch.full((64, 64), float("nan"), dtype=dtype)  # what freed memory may hold
        nothing = module.product(torch.empty(4, 0, dtype=dtype), torch.empty(8, 0, dtype=dtype))
        assert torch.equal(nothing, torch.zeros(4, 8, dtype=dtype))
    weight = torch.randn(7, 5, requires_grad=True)
    ops.linear(torch.randn(3, 5)[:0].requires_grad_(), weight).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(7, 5))


@pytest.fixture
def packs(form):
    if form == "pytorch":
        pytest.skip("the plain form packs nothing")


def test_packed_panels_are_made_anew_when_the_weight_changes(packs):
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
        square = torch.randn(64, 64)
        ops.linear(x, square)
        assert torch.equal(ops.linear(x, square.T), ops.linear(x, square.T.contiguous())), "a transpose has its own"


def test_panels_of_another_weight_at_the_same_address_do_not_serve(packs):
    x, weights = torch.randn(3, 64), ops.PackedWeights()
    weight = torch.nn.Parameter(torch.randn(48, 64))
    with torch.no_grad(), weights.in_use():
        for _ in range(10):
            assert torch.equal(ops.linear(x, weight), plain.product(x, weight.T))
            weight.data = weight.data + 1  # no new version, and the old memory is free
            assert torch.equal(ops.linear(x, torch.randn(48, 64).fill_(2)), ops.linear(x, torch.full((48, 64), 2.0)))


def test_panels_stop_where_their_share_of_memory_ends(packs, monkeypatch):
    first, second, x = torch.randn(48, 64), torch.randn(48, 64), torch.randn(3, 64)
    expected = ops.linear(x, second)
    whole = 4 * packed_weights.PLAIN.words(first) / packed_weights.MEMORY_SHARE
    for room in (0.0, 1.5):
        monkeypatch.setattr(packed_weights, "free_memory", lambda room=room: int(room * whole))
        weights = ops.PackedWeights()
        with torch.no_grad(), weights.in_use():
            ops.linear(x, first)
            assert torch.equal(ops.linear(x, second), expected)
            panels = [weights.panels_of(w) for w in (first, second)]
        assert [p is not None for p in panels] == [room > 1, False]


def test_an_instruction_set_that_is_not_there_is_refused_by_name(monkeypatch):
    from lockstep.ops.native.instruction_sets import supported

    monkeypatch.setenv("LOCKSTEP_ISA", "avx1024")
    supported.cache_clear()
    with pytest.raises(ValueError, match="LOCKSTEP_ISA is avx1024: there is no such instruction set; here it can be"):
        supported()
    monkeypatch.undo()
    supported.cache_clear()
    names = "auto, portable, bf16_pairs, bf16_tiles, pytorch"
    with pytest.raises(ValueError, match=f'arithmetic is "exact"; it can be {names}'):
        native.set_arithmetic("exact")
