"""The cache's 8-bit codes: what rows are rounded to, and that attention to codes has the bits of attention to them."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lockstep import ops
from lockstep.ops.cache_codes import NOT_A_NUMBER, codes_of, scales_of
from tests.ops.attention_checks import assert_pieces_agree, cancelling
from tests.ops.test_attention import SINKS, WINDOWS

FLOAT, HALF = torch.float32, torch.bfloat16
LARGEST = 127 * 2.0**121


def rows_of_any_size(dtype, head_dim=40, rows=800):
    """Rows whose largest magnitudes go through all powers of two, those of denormals too."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 2, head_dim, generator=draw)
    return (x * torch.exp2(torch.randint(-150, 120, (rows, 2, 1), generator=draw).float())).to(dtype)


def bits(x):
    """Of numbers: all NaN are one."""
    return torch.where(x.isnan(), -1, x.view(torch.int32 if x.dtype == FLOAT else torch.int16))


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize("head_dim", [1, 16, 40])
def test_a_row_is_rounded_to_multiples_of_the_smallest_power_of_two_that_fits(dtype, head_dim):
    x = rows_of_any_size(dtype, head_dim)
    # Around the largest number of a scale, 127 times a power of two.
    edge = torch.tensor(127.0, dtype=dtype)
    x[:3, 0] = 0
    x[:3, 0, 0] = torch.stack((edge, edge.nextafter(edge * 2), -edge.nextafter(edge * 0)))
    x[3] = 0
    rounded = ops.cache_rounded(x)
    most = x.double().abs().amax(-1, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(most.clamp(min=2.0**-140) / 127))).clamp(min=2.0**-126)
    assert (most <= 127 * scale).all() and ((most > 127 * scale / 2) | (scale == 2.0**-126)).all()
    assert torch.equal(rounded.double(), (x.double() / scale).round() * scale)
    assert not (rounded.signbit() & (rounded == 0)).any(), "a code has no negative zero"
    assert torch.equal(bits(ops.cache_rounded(rounded)), bits(rounded)), "rounding again changes nothing"


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_codes_and_scales_represent_the_rounded_rows(dtype):
    x = rows_of_any_size(dtype)
    x[4, 0, 39], x[5, 1, 0], x[6, 0, 7], x[7, 0, 0] = torch.nan, torch.inf, -torch.inf, 3.39e38
    x[8, 0], x[8, 0, 3] = 0, LARGEST
    rounded = ops.cache_rounded(x)
    for each in (x, rounded):
        codes, exponents = codes_of(each)
        assert torch.equal(bits((codes * scales_of(exponents)).to(dtype)), bits(rounded))
        broken = exponents[..., 0] == NOT_A_NUMBER
        assert broken.nonzero().tolist() == [[4, 0], [5, 1], [6, 0], [7, 0]]
        assert rounded[broken].isnan().all() and rounded[~broken].isfinite().all()
        assert codes.min() >= -127 and codes[~broken & (exponents[..., 0] > 1)].abs().amax(-1).min() >= 64


@settings(max_examples=16, phases=[Phase.generate])  # to shrink would take minutes
@given(
    dtype=st.sampled_from([FLOAT, HALF]),
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    heads=st.sampled_from([(2, 2), (4, 2), (4, 1)]),
    head_dim=st.sampled_from([8, 16, 40, 48, 64, 96]),
    window=st.sampled_from(WINDOWS) | st.integers(1, 200),
    with_sinks=st.booleans(),
    random=st.randoms(use_true_random=False),
)
def test_a_row_that_sees_codes_has_the_bits_of_one_that_sees_their_numbers(
    dtype, lengths, heads, head_dim, window, with_sinks, random
):
    """The trainer's packed attention to rounded keys and values; the generator's cache of either format, in pieces."""
    shapes = [(sum(lengths), count, head_dim) for count in (heads[0], heads[1], heads[1])]
    q, k, v = (cancelling(i, *shape, dtype=dtype) for i, shape in enumerate(shapes))
    k, v = ops.cache_rounded(k), ops.cache_rounded(v)
    terms = ops.Terms(0.05, window, SINKS[: heads[0]].to(dtype) if with_sinks else None)
    expected = ops.PackedAttention(lengths)(0, q, k, v, terms)
    for format in ("int8", "none"):
        assert_pieces_agree(expected, q, k, v, lengths, random, [1, 1, 5, 16, 64, 150], terms, format)


@pytest.mark.parametrize(
    ("dtype", "part", "broken", "window"),
    [(FLOAT, "key", torch.nan, 0), (HALF, "value", torch.inf, 0), (HALF, "key", torch.inf, 10),
     (FLOAT, "value", torch.nan, 40)],
)  # fmt: skip
def test_a_broken_token_breaks_those_that_see_its_codes_and_changes_no_bit_of_others(dtype, part, broken, window):
    length, at = 110, 57
    q, k, v = (cancelling(i, length, heads, 32, dtype=dtype) for i, heads in enumerate((4, 2, 2)))
    table = torch.arange(7, dtype=torch.int32)[None]
    outs = []
    for number in (None, broken):
        if number is not None:
            (k if part == "key" else v)[at, 1, 5] = number
        cache = ops.KVCache(1, 7, 2, 32, dtype, format="int8")
        rows = torch.tensor([length], dtype=torch.int32)
        attention = ops.PagedAttention(cache, table, rows, rows)
        outs.append(attention(0, q, ops.cache_rounded(k), ops.cache_rounded(v), ops.Terms(window=window)))
    sees = torch.zeros(length, 4, dtype=torch.bool)
    sees[at : at + window if window else length, 2:] = True  # the second key-value head's queries
    assert torch.equal(outs[0][~sees], outs[1][~sees]) and outs[1][sees].isnan().all()


def test_the_gradient_is_that_of_the_identity_compiled_or_not():
    x = cancelling(0, 30, 2, 40, dtype=HALF).requires_grad_()
    grad = cancelling(1, 30, 2, 40, dtype=HALF)
    for function in (ops.cache_rounded, torch.compile(ops.cache_rounded, backend="aot_eager", fullgraph=True)):
        out = function(x)
        assert torch.equal(out, ops.cache_rounded(x.detach())) and not torch.equal(out, x)
        assert torch.equal(torch.autograd.grad(out, x, grad)[0], grad)


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_a_cache_of_codes_has_a_byte_per_number_and_two_per_token_and_head(dtype):
    cache, plain = (ops.KVCache(3, 8, 2, 64, dtype, format=format) for format in ("int8", "none"))
    assert plain.nbytes == 3 * 8 * ops.PAGE * 2 * 2 * 64 * dtype.itemsize
    assert cache.nbytes == 3 * 8 * ops.PAGE * 2 * (2 * 64 + 2)
