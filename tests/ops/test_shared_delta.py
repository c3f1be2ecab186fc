"""The delta rule over sequences that omit a shared prefix: whole sequences' bits, and gradients in one order."""

import pytest
import torch

from lockstep import ops
from lockstep.ops import shared_attention
from lockstep.ops.delta import delta
from lockstep.ops.packed_attention import PackedAttention
from tests.ops.attention_checks import cancelling

LENGTHS, LEFT_OUT = [90, 100, 75, 80, 70, 66], [0, 70, 66, 64, 0, 40]
"""Prefixes that end before, at and after a boundary of chunks."""
PADDING = 3


def operands(dtype, requires_grad=False):
    """Packed rows of `LENGTHS`, and what one row of each key's sequence reads."""
    rows = sum(LENGTHS) - sum(LEFT_OUT) + PADDING
    mixed, b, a = (cancelling(seed, rows, width, dtype=dtype) for seed, width in enumerate((2 * 2 * 8 + 4 * 6, 4, 4)))
    draw = torch.Generator().manual_seed(5)
    conv = torch.randn(mixed.shape[1], 4, generator=draw)
    # Slow decay: what a sequence adds to a shared row's gradient comes from after the prefix.
    rates, bias = torch.randn(4, generator=draw) - 5, torch.randn(4, generator=draw)
    terms = ops.DeltaTerms(conv.to(dtype), rates.to(dtype), bias.to(dtype), 2, 8)
    return [x.requires_grad_(requires_grad) for x in (mixed, b, a)], terms


def rows_of_keys():
    """For every key of every sequence, the packed row that computes it; and for every row its key."""
    of_keys, packed, row, lead = [], [], 0, 0
    for length, shared in zip(LENGTHS, LEFT_OUT):
        lead = lead if shared else row
        of_keys += [*range(lead, lead + shared), *range(row, row + length - shared)]
        packed += range(len(of_keys) - (length - shared), len(of_keys))
        row += length - shared
    return torch.tensor(of_keys), torch.tensor(packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_bits_of_whole_sequences_and_padding_is_zero(dtype):
    rows, terms = operands(dtype)
    keys, packed = rows_of_keys()
    expected = PackedAttention(LENGTHS).delta(0, *(x[keys] for x in rows), terms)[packed]
    out = ops.SharedPrefixAttention(LENGTHS, LEFT_OUT).delta(0, *rows, terms)
    assert len(out) == len(rows[0])
    assert torch.equal(out[:-PADDING], expected) and not out[-PADDING:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shared_rows_gradient_is_that_of_its_sequence_and_then_of_each_that_omits_it(dtype):
    rows, terms = operands(dtype, requires_grad=True)
    keys, packed = rows_of_keys()
    grad = cancelling(9, len(rows[0]), 4, 6, dtype=dtype)
    ours = torch.autograd.grad(ops.SharedPrefixAttention(LENGTHS, LEFT_OUT).delta(0, *rows, terms), rows, grad)
    whole = [x.detach()[keys].requires_grad_() for x in rows]
    starts = PackedAttention(LENGTHS).starts
    of_keys = torch.autograd.grad(delta(*whole, terms, starts)[packed], whole, grad[:-PADDING])
    for found, each in zip(ours, of_keys):
        sums = torch.zeros(len(found), each.shape[1])
        is_home = torch.zeros(len(keys), dtype=torch.bool).index_fill(0, packed, True)
        for copies in (is_home, ~is_home):  # a row's own sequence first
            for key in copies.nonzero()[:, 0].tolist():
                sums[keys[key]] += each[key].float()
        assert torch.equal(found, sums.to(dtype))
        assert not found[-PADDING:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plan_on_the_device_gives_the_same_rows(dtype, monkeypatch):
    rows, terms = operands(dtype)
    expected = ops.SharedPrefixAttention(LENGTHS, LEFT_OUT).delta(0, *rows, terms)
    monkeypatch.setattr(shared_attention, "in_triton", lambda *_: True)
    contexts, left_out = (torch.tensor([*each, 0, 0], dtype=torch.int32) for each in (LENGTHS, LEFT_OUT))
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 7), value=torch.nan) for x in rows]
    for keys in (sum(LENGTHS), sum(LENGTHS) + 9):
        attention = ops.SharedPrefixAttention.of_contexts(contexts, left_out, len(padded[0]), keys, 128)
        assert "_host" not in vars(attention)
        out = attention.delta(0, *padded, terms)
        assert torch.equal(out[: len(expected)], expected) and not out[len(expected) :].any()
