"""A tensor's checksum is the sum of its parts', and shows what has happened to any of them."""

import pytest
import torch

from lockstep.ops import native
from lockstep.rl.weights.checksum import checksum

SHAPES = [(64, 32), (7, 13), (40,), (5, 96), (1, 8)]


def whole(tensor):
    return int(checksum(tensor, tuple((0, n) for n in tensor.shape), tensor.shape))


def bits(shape, dtype, seed=0):
    draw = torch.Generator().manual_seed(seed)
    kind = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    info = torch.iinfo(kind)
    return torch.randint(info.min, info.max, shape, generator=draw, dtype=kind).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_add_up_to_the_whole_however_it_is_cut(shape, dtype):
    tensor = bits(shape, dtype)
    for axis, size in enumerate(shape):
        # Columns are cut where tensor-parallel ranks cut them, rows anywhere.
        cuts = [0, size // 2, size] if axis and size % 8 == 0 else sorted({0, 1, size // 3, size})
        parts = []
        for start, stop in zip(cuts, cuts[1:]):
            place = tuple((start, stop) if a == axis else (0, n) for a, n in enumerate(shape))
            part = tensor[tuple(slice(*bounds) for bounds in place)]
            parts.append(int(checksum(part, place, tensor.shape)))
        assert (sum(parts) - whole(tensor)) % 2**64 == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_flipped_bit_shows(shape, dtype):
    tensor = bits(shape, dtype)
    before, raw = whole(tensor), tensor.view(torch.uint8)
    draw = torch.Generator().manual_seed(1)
    for _ in range(50):
        index = tuple(int(torch.randint(n, (1,), generator=draw)) for n in raw.shape)
        flipped = 1 << int(torch.randint(8, (1,), generator=draw))
        raw[index] ^= flipped
        assert whole(tensor) != before
        raw[index] ^= flipped
    assert whole(tensor) == before


def test_elements_and_rows_that_change_places_show():
    tensor = bits((64, 32), torch.bfloat16)
    for swapped in (tensor.flip(0), tensor.flip(1), torch.roll(tensor, 4, 1), torch.roll(tensor, 1, 0)):
        assert whole(swapped.contiguous()) != whole(tensor)
    assert whole(torch.zeros(4, 8)) == 0 != whole(torch.ones(4, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [*SHAPES, (3, 4, 24), (0, 8)])
def test_the_kernel_has_the_sums_of_the_plain_form(shape, dtype, monkeypatch):
    if native.library() is None:
        pytest.skip("no compiled kernels")
    tensor = bits(shape, dtype)
    place = ((1, 1 + shape[0]), *((0, n) for n in shape[1:]))  # of a whole that has a row more
    fast = checksum(tensor, place, torch.Size((1 + shape[0], *shape[1:])))
    monkeypatch.setattr(native, "usable", lambda x: False)
    assert fast == checksum(tensor, place, torch.Size((1 + shape[0], *shape[1:])))
