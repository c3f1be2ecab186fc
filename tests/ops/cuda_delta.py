"""The Triton kernels of the gated delta rule under the interpreter; `test_cuda_kernels.py` runs this file."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.ops.delta import delta

from lockstep.ops.delta_cache import NO_STATE, DeltaCache, DeltaSizes, DeltaStep, paged_delta
from lockstep.ops.delta_reference import CHUNK, DeltaTerms, sequence_reference
from tests.ops.cuda_kernels import _close, _randn, dots_of_fixed_order, form, in_kernels, kernels  # noqa: F401

WIDTH = 4
SIZES = [(2, 4, 16, 32), (1, 1, 12, 20), (1, 3, 40, 70)]
"""Heads of keys and of values, and their sizes."""


def _inputs(sizes, rows: int, rate: float = 0.0, dtype=torch.float32):
    """Neighbors have the same keys and opposite values, so that sums consist of rounding errors."""
    key_heads, heads, key_dim, value_dim = sizes
    channels = 2 * key_heads * key_dim + heads * value_dim
    mixed = _randn(0, rows, channels)
    mixed[1::2] = mixed[: rows // 2 * 2 : 2]
    mixed[1::2, 2 * key_heads * key_dim :] *= -1
    conv = _randn(3, channels, WIDTH) * 0.5
    conv[:, -1] += 1
    terms = DeltaTerms(*(x.to(dtype) for x in (conv, _randn(4, heads) + rate, _randn(5, heads))), key_heads, key_dim)
    return mixed.to(dtype), _randn(1, rows, heads).to(dtype), _randn(2, rows, heads).to(dtype), terms


def _packed(mixed, b, a, terms, lengths):
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return delta(mixed, b, a, terms, starts)


def _paged(mixed, b, a, terms, pieces, drafts=0):
    """The outputs of one step after the other. pieces: of each step, (sequence, first row, rows, context)."""
    sizes = DeltaSizes(1, terms.key_heads, terms.value_heads, terms.key_dim, terms.value_dim, terms.conv.shape[1])
    cache = DeltaCache(sizes, 6, 3, mixed.dtype, drafts=drafts)
    for kept in cache.layer(0):
        kept.fill_(torch.nan)  # what nobody wrote is never used
    read, outs = {}, []
    for step in pieces:
        columns = [], [], [], [], []
        for sequence, _, count, context in step:
            boundary = context // CHUNK
            entry = 3 * (boundary % 2) + sequence if boundary else NO_STATE
            former = read.get(sequence, {}).get((context - count) // CHUNK, NO_STATE)
            for column, value in zip(columns, (count, context, sequence, former, entry), strict=True):
                column.append(value)
            read.setdefault(sequence, {})[boundary] = entry
        counts, contexts, slots, reads, writes = (torch.tensor(column, dtype=torch.int32) for column in columns)
        rows = [i for _, first, count, _ in step for i in range(first, first + count)]
        starts = torch.cat((counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)))
        inputs = (torch.cat((x[rows], x[:2])) for x in (mixed, b, a))  # and padding
        out = paged_delta(*inputs, terms, 0, DeltaStep(cache, slots, reads, writes), starts, contexts)
        assert not out[len(rows) :].any()
        outs.append(out[: len(rows)])
    return outs


def _whole(sizes, lengths, rate, dtype=torch.float32):
    inputs = _inputs(sizes, sum(lengths) + 3, rate, dtype)
    with in_kernels():
        return inputs, _packed(*inputs, lengths)


@pytest.mark.parametrize(("sizes", "dtype"), [(SIZES[0], torch.float32), (SIZES[1], torch.bfloat16), (SIZES[2], torch.float16)])
def test_packed_sequences_agree_with_the_definition(sizes, dtype):
    lengths = [70, 0, 1, 66]
    for rate in (-8.0, 0.0, 4.0):  # decays near 1, and near 0
        inputs, out = _whole(sizes, lengths, rate, dtype)
        _close([out], [_packed(*inputs, lengths)], dtype)
        assert not out[-3:].any()


@settings(max_examples=4, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 149), max_size=6, unique=True),
    rate=st.sampled_from([-8.0, 0.0, 4.0]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_any_split_has_the_bits_of_the_packed_form(cuts, rate, dtype):
    inputs, whole = _whole((1, 2, 16, 20), [20, 150], rate, dtype)
    cuts = sorted({0, 63, 64, 65, 150, *cuts})
    pieces = [[(1, 20 + start, stop - start, stop)] for start, stop in zip(cuts, cuts[1:])]
    # Another sequence in the same steps, one row each.
    for row, step in zip(range(20), pieces):
        step.insert(0, (0, row, 1, row + 1))
    with in_kernels():
        outs = _paged(*inputs, pieces)
    for step, out in zip(pieces, outs):
        rows = [i for _, first, count, _ in step for i in range(first, first + count)]
        assert torch.equal(out, whole[rows])
