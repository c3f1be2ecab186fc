"""The GPU's float8 codes on CPU tensors under Triton's interpreter; `test_cuda_kernels.py` runs this file.

Their definition is in plain PyTorch (`ops/float8`). Inputs in bfloat16 are exact in the interpreter, too.
"""

from functools import partial

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lockstep.ops import float8
from tests.ops.cuda_kernels import form, in_kernels  # noqa: F401

CODES = {
    "rows": float8.row_codes,
    "matrix": partial(float8.row_codes, dim=(-2, -1)),
    "e4m3": float8.tensor_codes,
    "e5m2": partial(float8.tensor_codes, dtype=torch.float8_e5m2),
    "floor": partial(float8.block_codes, scaling="floor"),
    "rceil": partial(float8.block_codes, scaling="rceil"),
}


def matrix(seed: int, rows: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of every magnitude, with ties of float8, zeros, and numbers that are subnormal in it or in float32."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, depth, generator=generator) * 2.0 ** torch.randint(-100, 100, (rows, 1), generator=generator)
    x *= 2.0 ** torch.randint(-18, 1, (rows, depth), generator=generator)
    x[0] = torch.randint(-480, 481, (depth,), generator=generator) / 16
    x[1 % rows] = (torch.arange(depth) % 64 - 31.5) * 2.0**-10
    x[1 % rows, 0] = 448
    x[2 % rows, ::3] = 0
    x[3 % rows] = torch.randint(-200, 200, (depth,), generator=generator) * 2.0**-149
    return x.to(dtype)


def assert_same(ours, theirs) -> None:
    assert [t.dtype for t in ours] == [t.dtype for t in theirs] and [t.shape for t in ours] == [t.shape for t in theirs]
    for one, other in zip(ours, theirs):
        assert torch.equal(one.float().nan_to_num(500.0), other.float().nan_to_num(500.0))


@pytest.mark.parametrize("kind", CODES)
@settings(max_examples=4, phases=[Phase.generate])  # to shrink takes the interpreter minutes
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_codes_are_those_of_their_definition(kind, data, dtype):
    rows, blocks = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 40))
    x = matrix(data.draw(st.integers(0, 99)), rows, 32 * blocks, dtype)
    if data.draw(st.booleans()):
        x[rows // 2, 5] = data.draw(st.sampled_from([torch.inf, torch.nan]))
    if data.draw(st.booleans()):
        x = x.T.contiguous().T
    expected = CODES[kind](x)
    with in_kernels():
        assert_same(CODES[kind](x), expected)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_code_and_every_tie_between_two_is_encoded(kind):
    codes = torch.arange(128, dtype=torch.uint8).view(kind).float()
    codes = codes[codes.isfinite()]
    x = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, codes.nextafter(torch.tensor(0.0))])
    x = torch.cat([x, -x])[None]
    with in_kernels():
        ours = float8._codes(x, torch.ones(()), float8.TYPES[kind])
    assert torch.equal(ours.view(torch.uint8), float8.float8_values(x, kind).to(kind).view(torch.uint8))
