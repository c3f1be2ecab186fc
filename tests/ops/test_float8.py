"""Float8 roundings against arithmetic in float64 that decodes every code itself."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.ops import float8

DTYPES = [torch.float32, torch.bfloat16]
KINDS = [torch.float8_e4m3fn, torch.float8_e5m2]
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def decoded(kind):
    """The numbers of codes 0 to the largest finite one, ascending, by the formats' definition."""
    mantissa, bias = (3, 7) if kind == torch.float8_e4m3fn else (2, 15)
    numbers = []
    for code in range(128):
        exponent, fraction = code >> mantissa, (code & (1 << mantissa) - 1) / (1 << mantissa)
        numbers.append((fraction if exponent == 0 else 1 + fraction) * 2.0 ** (max(exponent, 1) - bias))
        if numbers[-1] == LARGEST[kind]:
            return torch.tensor(numbers, dtype=torch.float64)


def codes_of(x, kind):
    """The codes of numbers rounded to nearest, ties to even, the largest for larger ones; of float64."""
    numbers = decoded(kind)
    size = x.abs().clamp(max=LARGEST[kind]).contiguous()
    above = torch.bucketize(size, numbers).clamp(max=len(numbers) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = numbers[above] - size, size - numbers[below]
    tie_is_even = (to_above == to_below) & (above % 2 == 0)
    codes = torch.where((to_above < to_below) | tie_is_even, above, below)
    codes = torch.where(x.isnan() | x.isinf(), 127, codes)
    return codes + 128 * x.signbit()


def nearest(x, kind=torch.float8_e4m3fn):
    """Numbers of float64 rounded to those of a float8 type."""
    codes = codes_of(x, kind)
    numbers = decoded(kind)
    values = numbers[(codes % 128).clamp(max=len(numbers) - 1)].copysign(x)
    return values.masked_fill(x.isnan() | x.isinf(), torch.nan)


def around_boundaries(dtype, kind):
    """All numbers of a float8 type, all midpoints, and the two neighbors of each in `dtype`, of both signs; beyond."""
    numbers = decoded(kind)
    largest = LARGEST[kind]
    beyond = torch.tensor([largest * (1 + 2.0**-4), largest * (1 + 2.0**-3), 2 * largest, 1e30, 3.3e38])
    points = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2, beyond.double()]).to(dtype)
    up, down = (torch.nextafter(points, torch.full_like(points, to)) for to in (torch.inf, 0.0))
    tiny = torch.tensor([torch.finfo(dtype).tiny, torch.finfo(dtype).smallest_normal * 2.0**-3], dtype=dtype)
    positive = torch.cat([points, up, down, tiny])
    return torch.cat([positive, -positive])


def same_numbers(one, other):
    """Equal, with NaN equal to NaN and -0 different from 0."""
    same = (one == other) & (one.signbit() == other.signbit()) | one.isnan() & other.isnan()
    return bool(same.all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_round_to_the_nearest_float8_with_ties_to_even(dtype, kind):
    x = around_boundaries(dtype, kind)
    values = float8.float8_values(x, kind)
    assert values.dtype == dtype and same_numbers(values.double(), nearest(x.double(), kind))
    assert torch.equal(values.to(kind).view(torch.uint8).long(), codes_of(x.double(), kind))


@pytest.mark.parametrize("kind", KINDS)
def test_every_bfloat16_rounds_as_the_formats_define(kind):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert same_numbers(float8.float8_values(x, kind).double(), nearest(x.double(), kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_codes_stay_and_infinities_are_not_hidden(dtype, kind):
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(kind).to(dtype)
    values = float8.float8_values(every, kind)
    assert same_numbers(values, every.masked_fill(every.isinf(), torch.nan))
    bad = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=dtype)
    assert float8.float8_values(bad, kind).isnan().all()


def row_exponent(size):
    """Of the scale: the smallest power of two that takes 448 to at least this magnitude, and at least 2^-48."""
    return max(smallest_exponent(size), -48)


def smallest_exponent(size):
    exponent = -200
    while 448 * 2.0**exponent < size:
        exponent += 1
    return exponent


def block_exponent(size, scaling):
    floor = math.frexp(size)[1] - 1 - 8 if size else -127
    return max(floor if scaling == "floor" else smallest_exponent(size), -127)


def magnitudes(dtype):
    """0 and magnitudes around 2^e and 448 · 2^e over the whole range, and subnormal ones."""
    sizes = torch.tensor([m * 2.0**e for e in range(-140, 120) for m in (1.0, 1.5, 1.75)]).to(dtype)
    up, down = (torch.nextafter(sizes, torch.full_like(sizes, to)) for to in (torch.inf, 0.0))
    return torch.cat([torch.zeros(1, dtype=dtype), sizes, up, down])


def around(sizes, width=32):
    """Rows with these largest magnitudes, at any place and of any sign, and others down to 2^-20 of it."""
    generator = torch.Generator().manual_seed(0)
    parts = torch.rand(len(sizes), width, generator=generator) * 2.0 ** -torch.randint(
        0, 20, (len(sizes), width), generator=generator
    )
    x = (parts * sizes[:, None].double()).to(sizes.dtype)
    x[torch.arange(len(sizes)), torch.randint(0, width, (len(sizes),), generator=generator)] = sizes
    return x * (torch.randint(0, 2, x.shape, generator=generator) * 2 - 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_rounded_at_the_smallest_power_of_two_that_holds_it(dtype):
    sizes = magnitudes(dtype)
    x = around(sizes)
    powers = torch.tensor([row_exponent(size) for size in sizes.tolist()]).double()[:, None].exp2()
    expected = nearest(x.double() / powers) * powers
    assert torch.equal(float8.row_values(x).double(), expected)
    assert torch.equal(float8.row_values(x.T, 0).double(), expected.T)
    codes, scales = float8.row_codes(x)
    assert torch.equal(scales.double(), powers)
    assert torch.equal(codes.view(torch.uint8).long(), codes_of(x.double() / powers, torch.float8_e4m3fn))


@pytest.mark.parametrize("scaling", float8.SCALINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_is_rounded_by_the_exponent_of_its_largest_number(dtype, scaling):
    sizes = magnitudes(dtype)
    x = around(sizes)
    exponents = torch.tensor([block_exponent(size, scaling) for size in sizes.tolist()])
    powers = exponents.double()[:, None].exp2()
    expected = (nearest(x.double() / powers) * powers).to(dtype)  # rounded only if it is subnormal in bfloat16
    x, expected = x[: len(x) // 2 * 2].view(-1, 64), expected[: len(x) // 2 * 2].view(-1, 64)
    assert torch.equal(float8.block_values(x, scaling), expected)
    assert torch.equal(float8.block_values(x.T, scaling, 0), expected.T)
    codes, scales = float8.block_codes(x, scaling)
    assert torch.equal(scales.view(torch.uint8).flatten().long(), exponents[: 2 * len(x)] + 127)
    wanted = codes_of(x.double() / powers[: 2 * len(x)].repeat_interleave(32, 1).view(-1, 64), torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.uint8).long(), wanted)


def test_floor_and_rceil_differ_where_the_largest_number_exceeds_448():
    x = torch.zeros(5, 32)
    x[:, 7] = torch.tensor([448.0, 449.0, 480.0, 511.0, 512.0])
    floor, rceil = (float8.block_codes(x, scaling)[1].view(torch.uint8)[:, 0] - 127 for scaling in float8.SCALINGS)
    assert floor.tolist() == [0, 0, 0, 0, 1] and rceil.tolist() == [0, 1, 1, 1, 1]
    assert float8.block_values(x, "floor")[:, 7].tolist() == [448.0, 448.0, 448.0, 448.0, 512.0]
    assert float8.block_values(x, "rceil")[:, 7].tolist() == [448.0, 448.0, 480.0, 512.0, 512.0]


def test_another_scaling_is_refused():
    for function in (float8.block_values, float8.block_codes):
        with pytest.raises(ValueError, match='MX scaling is "even"; it can be floor or rceil'):
            function(torch.ones(1, 32), "even")


@pytest.mark.parametrize("count", [0, 1, 31, 33, 64])
def test_a_last_block_may_be_shorter(count):
    x = around(torch.rand(5, dtype=torch.float64).float() + 0.5, 64)[:, :count]
    padded = torch.nn.functional.pad(x, (0, 64 - count))
    for scaling in float8.SCALINGS:
        whole = float8.block_values(padded, scaling)[:, :count]
        assert torch.equal(float8.block_values(x, scaling), whole)
        assert torch.equal(float8.block_values(x.T, scaling, 0), whole.T)
    if count % 32:
        with pytest.raises(ValueError, match=f"MX codes are in blocks of 32, but the rows have {count} numbers"):
            float8.block_codes(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_is_rounded_at_the_scale_of_its_largest_number(dtype, kind):
    for size in (0.0, 1e-20, 0.3, 447.0, 1e30):
        x = around(torch.full((20,), size, dtype=dtype)) * 0.9
        factor = torch.tensor(LARGEST[kind] / max(x.double().abs().max().item(), 1e-12)).float()
        expected = nearest((x.float() * factor).double(), kind)
        values, scale = float8.tensor_values(x, kind)
        assert values.dtype == dtype and torch.equal(values.double(), expected) and scale == 1 / factor
        codes, scale = float8.tensor_codes(x, kind)
        assert torch.equal(codes.to(torch.float64), expected) and scale == 1 / factor


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_or_block_with_a_number_that_is_not_finite_is_nan_and_no_other(dtype, bad):
    x = around(torch.full((3,), 2.0, dtype=dtype), 64)
    x[1, 40] = bad
    rows = torch.tensor([[False], [True], [False]]).expand(3, 64)
    assert torch.equal(float8.row_values(x).isnan(), rows)
    blocks = rows & (torch.arange(64) >= 32)
    for scaling in float8.SCALINGS:
        assert torch.equal(float8.block_values(x, scaling).isnan(), blocks)
        codes, scales = float8.block_codes(x, scaling)
        assert torch.equal(codes.float().isnan(), blocks) and scales.view(torch.uint8)[1, 1] == 255
    for kind in KINDS:
        values, scale = float8.tensor_values(x, kind)
        assert values.isnan().all() and scale.isnan()


def test_the_largest_finite_numbers_round_without_becoming_nan():
    for dtype in DTYPES:
        x = torch.full((1, 32), torch.finfo(dtype).max, dtype=dtype)
        x[0, 0] = 240 * 2.0**120
        assert float8.row_values(x)[0].tolist() == [240 * 2.0**120, *31 * [torch.inf]]
        assert float8.block_values(x, "rceil")[0].tolist() == [240 * 2.0**120, *31 * [torch.inf]]
        assert float8.block_values(x, "floor")[0].tolist() == 32 * [448 * 2.0**119]


@settings(max_examples=25)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_rows_and_blocks_of_any_shape_are_rounded_separately(form, dtype, data):
    shape = [data.draw(st.integers(1, most)) for most in (3, 70, 140)]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    x *= torch.exp2(torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(0)).float()).to(dtype)
    if data.draw(st.booleans()):
        x = x.mT
    dim = data.draw(st.integers(-3, 2))
    ends = range(0, x.shape[dim], 32)
    for scaling in float8.SCALINGS:
        parts = [float8.block_values(x.narrow(dim, end, min(32, x.shape[dim] - end)), scaling, dim) for end in ends]
        assert torch.equal(float8.block_values(x, scaling, dim), torch.cat(parts, dim))
    rows = x.movedim(dim, -1)
    powers = torch.tensor([row_exponent(size) for size in rows.abs().amax(-1).flatten().tolist()]).double().exp2()
    powers = powers.view(*rows.shape[:-1], 1)
    assert torch.equal(float8.row_values(x, dim).movedim(dim, -1).double(), nearest(rows.double() / powers) * powers)
    matrices = torch.stack([float8.row_values(matrix.reshape(1, -1)).view(matrix.shape) for matrix in x])
    assert torch.equal(float8.row_values(x, (-2, -1)), matrices)
