"""The Triton kernels of the gated delta rule under the interpreter; `test_cuda_kernels.py` runs this file."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.ops.delta import delta
from lockstep.ops.delta_cache import NO_STATE, DeltaCache, DeltaSizes, DeltaStep, paged_delta
from lockstep.ops.delta_reference import CHUNK, DeltaTerms, differentiable
from tests.ops.cuda_kernels import TOLERANCE, _close, _randn, dots_of_fixed_order, form, in_kernels  # noqa: F401

WIDTH = 4
RATES = [-8.0, 0.0, 4.0]
"""Of decays near 1, and near 0."""
SMALL, UNEVEN = (1, 2, 16, 20), (1, 1, 40, 36)
"""Heads of keys and of values, and their sizes."""


def _inputs(sizes, rows: int, rate: float = 0.0, dtype=torch.float32) -> list[torch.Tensor]:
    """Neighbors have the same keys and opposite values, so that sums consist of rounding errors."""
    key_heads, heads, key_dim, value_dim = sizes
    channels = 2 * key_heads * key_dim + heads * value_dim
    mixed, conv = _randn(0, rows, channels), _randn(3, channels, WIDTH) * 0.5
    mixed[1::2] = mixed[: rows // 2 * 2 : 2]
    mixed[1::2, 2 * key_heads * key_dim :] *= -1
    conv[:, -1] += 1
    others = (_randn(1, rows, heads), _randn(2, rows, heads), conv, _randn(4, heads) + rate, _randn(5, heads))
    return [x.to(dtype) for x in (mixed, *others)]


def _terms(sizes, inputs) -> DeltaTerms:
    return DeltaTerms(*inputs[3:], sizes[0], sizes[2])


def _packed(sizes, inputs, lengths) -> torch.Tensor:
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return delta(*inputs[:3], _terms(sizes, inputs), starts)


class _Steps:
    """Steps of a cache of three sequences, as an engine takes them."""

    def __init__(self, sizes, inputs, drafts: int = 0):
        self.inputs, self.terms = inputs, _terms(sizes, inputs)
        self.cache = DeltaCache(DeltaSizes(1, *sizes[:2], *sizes[2:], WIDTH), 9, 3, inputs[0].dtype, drafts=drafts)
        for kept in self.cache.layer(0):
            kept.fill_(torch.nan)  # what nobody wrote is never used

    def __call__(self, step) -> torch.Tensor:
        """The outputs of new rows. step: for each sequence its number, first row, rows and context."""
        columns = [], [], [], [], []
        for sequence, _, count, context in step:
            former, boundary = (context - count) // CHUNK, context // CHUNK
            # An entry for each of a sequence's last three boundaries: those of drafts may be in vain.
            read, write = (3 * sequence + number % 3 if number else NO_STATE for number in (former, boundary))
            for column, value in zip(columns, (count, context, sequence, read, write), strict=True):
                column.append(value)
        counts, contexts, slots, reads, writes = (torch.tensor(column, dtype=torch.int32) for column in columns)
        rows = [i for _, first, count, _ in step for i in range(first, first + count)]
        starts = torch.cat((counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)))
        padded = (torch.cat((x[rows], x[:2])) for x in self.inputs[:3])
        out = paged_delta(*padded, self.terms, 0, DeltaStep(self.cache, slots, reads, writes), starts, contexts)
        assert not out[len(rows) :].any()
        return out[: len(rows)]


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((1, 1, 12, 20), torch.bfloat16),
        pytest.param((2, 4, 16, 32), torch.float32, marks=pytest.mark.slow),
        (UNEVEN, torch.float16),
    ],
)
def test_packed_sequences_agree_with_the_definition(sizes, dtype):
    lengths = [70, 0, 1, 64]
    for rate in RATES:
        inputs = _inputs(sizes, sum(lengths) + 3, rate, dtype)
        with in_kernels():
            out = _packed(sizes, inputs, lengths)
        _close([out], [_packed(sizes, inputs, lengths)], dtype)
        assert not out[-3:].any()


@settings(max_examples=3)
@given(
    cuts=st.lists(st.integers(1, 99), max_size=4, unique=True),
    rate=st.sampled_from(RATES),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_any_split_has_the_bits_of_the_packed_form(cuts, rate, dtype):
    inputs = _inputs(SMALL, 110, rate, dtype)
    cuts = sorted({0, 63, 64, 65, 100, *cuts})
    steps = [[(1, 10 + start, stop - start, stop)] for start, stop in zip(cuts, cuts[1:])]
    for row, step in zip(range(10), steps):
        step.insert(0, (0, row, 1, row + 1))  # another sequence, one row a step
    with in_kernels():
        whole, paged = _packed(SMALL, inputs, [10, 100]), _Steps(SMALL, inputs)
        for step in steps:
            rows = [i for _, first, count, _ in step for i in range(first, first + count)]
            assert torch.equal(paged(step), whole[rows]), step


def test_rows_that_are_not_accepted_leave_no_trace():
    inputs, drafts = _inputs(SMALL, 145), 5
    with in_kernels():
        whole, paged = _packed(SMALL, inputs, [145]), _Steps(SMALL, inputs, drafts)
        paged([(0, 0, 59, 59)])
        done = 59
        for accepted in (1, 3, 1, 2, 6, 60, 1, 2, 5):  # boundaries at 64 and 128 are crossed in vain, then for good
            count = max(accepted, drafts + 1)
            wrong = [x.clone() for x in inputs[:3]]
            for x in wrong:
                x[done + accepted :] = 7.0
            paged.inputs = wrong
            out = paged([(0, done, count, done + count)])
            assert torch.equal(out[:accepted], whole[done : done + accepted]), done
            done += accepted


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_broken_token_breaks_those_that_see_it_and_changes_no_bit_of_others(which):
    inputs, broken = _inputs(SMALL, 90), 25
    with in_kernels():
        whole = _packed(SMALL, inputs, [70, 20])
        inputs[which][broken] = torch.nan
        out = _packed(SMALL, inputs, [70, 20])
        assert torch.equal(out[:broken], whole[:broken]) and torch.equal(out[70:], whole[70:])
        assert out[broken + 1 : 70].isnan().all()
        paged = _Steps(SMALL, inputs)
        steps = [[(0, 0, 24, 24)], [(0, 24, 1, 25)], [(0, 25, 1, 26)], [(0, 26, 2, 28)]]
        for (step,) in steps[:2]:
            assert torch.equal(paged([step]), whole[step[1] : step[1] + step[2]])
        assert all(paged(step)[-1].isnan().all() for step in steps[2:])


def _exact_gradients(sizes, inputs, lengths, grad) -> tuple[torch.Tensor, ...]:
    """Of the definition's differentiable form, in float64."""
    leaves = [x.double().requires_grad_() for x in inputs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            sequences = zip(*(x[: sum(lengths)].split(lengths) for x in leaves[:3]))
            outs = [differentiable(*rows, _terms(sizes, leaves)) for rows in sequences if len(rows[0])]
            return torch.autograd.grad(torch.cat(outs), leaves, grad[: sum(lengths)].double())
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("sizes", "rate", "dtype"),
    [
        (SMALL, -4.0, torch.float32),
        pytest.param(SMALL, -8.0, torch.float32, marks=pytest.mark.slow),
        pytest.param(SMALL, 4.0, torch.float32, marks=pytest.mark.slow),
        pytest.param(UNEVEN, 0.0, torch.float16, marks=pytest.mark.slow),
    ],
)
def test_the_gradient_of_packed_sequences(sizes, rate, dtype):
    lengths, padding = [130, 0, 1, 64], 3  # a chunk between two others, whose state comes from one and goes to another
    inputs = _inputs(sizes, sum(lengths) + padding, rate, dtype)
    grad = _randn(9, sum(lengths) + padding, sizes[1], sizes[3], dtype=dtype)
    leaves = [x.clone().requires_grad_() for x in inputs]
    with in_kernels():
        ours = torch.autograd.grad(_packed(sizes, leaves, lengths), leaves, grad)
    _close(ours, _exact_gradients(sizes, inputs, lengths, grad), dtype)
    assert not any(of_rows[-padding:].any() for of_rows in ours[:3])
