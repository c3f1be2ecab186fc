"""Float8 products by `torch._scaled_mm`, on CPU tensors: their codes, scales, layouts and batches.

The CPU's operator has no block scales: a stand-in reads them as the GPU's does, by the formula in cuBLAS's
documentation.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lockstep.ops import float8_products
from lockstep.ops.cuda import scaled_products
from tests.ops.test_linear import cancelling

pytest.importorskip("triton", reason="triton is published for Linux on x86-64 alone")

KINDS = [*float8_products.RECIPES]
library = torch._scaled_mm


@pytest.fixture(scope="module", autouse=True)
def form():
    """The operator has one form: the folder's own fixture would run everything several times."""


def unblocked(scales, rows, blocks):
    """Scales `[rows, blocks]` of the GPU's layout: cuBLAS, "1D block scaling factors layout"."""
    row, block = torch.arange(rows)[:, None], torch.arange(blocks)
    tile = 512 * (row // 128 * -(-blocks // 4) + block // 4)
    return scales.view(torch.uint8)[tile + row % 32 * 16 + row % 128 // 32 * 4 + block % 4].view(scales.dtype).float()


def scaled_mm(calls, left, right, of_left, of_right, **options):
    """`torch._scaled_mm` of a GPU."""
    assert left.is_contiguous() and right.T.is_contiguous() and options["use_fast_accum"] is False
    assert left.shape[1] % 16 == 0 and right.shape[1] % 16 == 0
    assert not left.dtype == right.dtype == torch.float8_e5m2
    calls.append((left, right))
    if of_left.dtype != torch.float8_e8m0fnu:
        return library(left, right, of_left, of_right, **options)
    assert of_left.is_contiguous() and of_right.is_contiguous()
    sizes = (left.shape[0], left.shape[1] // 32), (right.shape[1], left.shape[1] // 32)
    for scales, (rows, blocks) in zip((of_left, of_right), sizes):
        assert scales.numel() == -(-rows // 128) * 128 * -(-blocks // 4) * 4
    scales = [unblocked(each, *size).repeat_interleave(32, 1) for each, size in zip((of_left, of_right), sizes)]
    return ((left.float() * scales[0]) @ (right.T.float() * scales[1]).T).to(options["out_dtype"])


@pytest.fixture
def calls(monkeypatch):
    """What the library multiplied."""
    found = []
    monkeypatch.setattr(scaled_products, "cuda", SimpleNamespace(usable=lambda x: True))  # not the Triton kernels
    monkeypatch.setattr(scaled_products, "capability", lambda device: (10, 0))
    monkeypatch.setattr(scaled_products, "BATCHES", (8, 16, 64))
    monkeypatch.setattr(torch, "_scaled_mm", partial(scaled_mm, found))
    scaled_products.batches.cache_clear()
    yield found
    scaled_products.batches.cache_clear()


def computed(x, w, grad, kind):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    out = float8_products.float8_linear(x, w, kind)
    out.backward(grad)
    return out.detach(), x.grad, w.grad


def assert_close(ours, expected, x, w, grad):
    """One rounding to bfloat16 each, of float32 sums in two orders: they differ by a step of bfloat16 or, where terms
    cancel, by a small share of the terms."""
    x, w, grad = (t.float().abs() for t in (x, w, grad))
    for mine, theirs, terms in zip(ours, expected, (x @ w.T, grad @ w, grad.T @ x), strict=True):
        assert ((mine.float() - theirs.float()).abs() <= 2.0**-7 * theirs.float().abs() + 2.0**-18 * terms).all()


def factors(rows, depth, outputs):
    generator = torch.Generator().manual_seed(rows)
    x, w, grad = (torch.randn(*s, generator=generator) for s in ((rows, depth), (outputs, depth), (rows, outputs)))
    # Rows, columns and blocks of many magnitudes: scales at wrong places would show.
    x *= torch.exp2(torch.arange(rows) % 5 - 2.0)[:, None] * torch.exp2(torch.arange(depth) // 32 % 4 - 2.0)
    w *= torch.exp2(torch.arange(outputs) % 7 - 3.0)[:, None] * torch.exp2(torch.arange(depth) // 32 % 3 - 1.0)
    grad *= torch.exp2(torch.arange(outputs) % 7 - 3.0) * torch.exp2(torch.arange(rows) % 4 - 2.0)[:, None]
    return x.bfloat16(), w.bfloat16(), grad.bfloat16()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "batches"), [(1, [8]), (40, [64]), (150, [64] * 3)])
def test_products_and_gradients_are_those_of_the_emulation(kind, rows, batches, request):
    x, w, grad = factors(rows, 160, 176)
    expected = computed(x, w, grad, kind)
    calls = request.getfixturevalue("calls")
    float8_products.float8_linear(x[:1], w, kind)  # compares batches
    calls.clear()
    assert_close(computed(x, w, grad, kind), expected, x, w, grad)
    high_precision = kind == "rowwise_high_precision_weight_gradient"
    forward, gradients = calls[: len(batches)], calls[len(batches) :]
    assert [len(left) for left, _ in forward] == batches and len(gradients) == 2 - high_precision
    of_gradient = torch.float8_e5m2 if kind == "tensorwise" else torch.float8_e4m3fn
    assert all(left.dtype == of_gradient for left, _ in gradients)
    assert {each.dtype for each in (*sum(forward, ()), *(right for _, right in gradients))} == {torch.float8_e4m3fn}


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_row_has_the_same_bits_in_every_batch(kind, calls):
    x, w = cancelling(0, 150, 160, 176, torch.bfloat16)
    whole = float8_products.float8_linear(x, w, kind)
    for rows in (slice(0, 1), slice(3, 12), slice(140, 150), slice(64, 150)):
        assert torch.equal(float8_products.float8_linear(x[rows], w, kind), whole[rows])


def _differs(sizes, call):
    """The library with another kernel for these numbers of rows: what one adds up last differs."""

    def run(left, right, *scales, **options):
        out = call(left, right, *scales, **options)
        return out + (left.float()[:, :1] != 0) * 2.0**-20 if len(left) in sizes else out

    return run


def test_batches_whose_bits_differ_are_not_used(calls, monkeypatch):
    x, w, _ = factors(5, 64, 48)
    monkeypatch.setattr(torch, "_scaled_mm", _differs({8}, torch._scaled_mm))
    float8_products.float8_linear(x, w, "rowwise")
    assert scaled_products.batches("rowwise", x.device, 48, 64) == (16, 64) and len(calls[-1][0]) == 16


def refuse(*arguments, **options):
    raise RuntimeError("not on this GPU")


def place_matters(call):
    def run(left, *others, **options):
        out = call(left, *others, **options)
        out[len(left) - 1 :] += 2.0**-20
        return out

    return run


@pytest.mark.parametrize("broken", [lambda call: refuse, place_matters])
def test_without_such_batches_the_product_and_its_gradients_are_the_emulations(broken, request, monkeypatch):
    x, w, grad = factors(5, 64, 48)
    expected = computed(x, w, grad, "rowwise")
    calls = request.getfixturevalue("calls")
    monkeypatch.setattr(torch, "_scaled_mm", broken(torch._scaled_mm))
    for _ in range(2):
        assert all(map(torch.equal, computed(x, w, grad, "rowwise"), expected))
        assert not [left for left, _ in calls if len(left) == 5] and len(calls) in (0, 3), "compared once"


def test_what_the_library_cannot_multiply_is_emulated(calls, monkeypatch):
    x, w, _ = factors(5, 64, 48)
    usable = scaled_products.usable
    assert usable(x, w, "mxfp8_rceil", 1)
    assert not usable(x, w, "rowwise", 2), "ranks join chunks"
    assert not usable(x[:0], w, "rowwise", 1) and not usable(x.float(), w.float(), "rowwise", 1)
    assert not usable(x, w[:40], "rowwise", 1) and not usable(x[:, :40], w[:, :40], "rowwise", 1)
    monkeypatch.setattr(scaled_products, "capability", lambda device: (9, 0))
    assert usable(x, w, "rowwise", 1) and not usable(x, w, "mxfp8_rceil", 1)
    monkeypatch.setattr(scaled_products, "capability", lambda device: (8, 6))
    assert not usable(x, w, "rowwise", 1)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_is_not_finite_shows_in_its_row_and_in_no_other(kind, bad, calls):
    x, w, grad = factors(9, 64, 48)
    good = computed(x, w, grad, kind)
    assert all(part.isfinite().all() for part in good)
    x[2, 3] = bad
    out, _, of_weight = computed(x, w, grad, kind)
    others = torch.arange(9) != 2
    assert out[2].isnan().all() and not of_weight.isfinite().all()
    assert out.isnan().all() if kind == "tensorwise" else torch.equal(out[others], good[0][others])


def test_numbers_that_are_compared_are_exact_in_codes():
    x = scaled_products._exact(cancelling(0, 64, 256, 8, torch.float32)[0])
    for kind in KINDS[1:]:
        assert torch.equal(float8_products.RECIPES[kind].operand(x, -1).values, x) and x.unique().numel() > 100
