"""AdamW's step on the CPU: torch's values, one set of bits."""

import pytest
import torch

from lockstep import ops
from lockstep.ops import optimizer

FACTORS = dict(learning_rate=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95, epsilon=1e-8)


def _tensors(count, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    master, grad, mean = (torch.randn(count, generator=draw) for _ in range(3))
    return [master, grad * 0.1, (mean * 0.01).to(dtype), (torch.rand(count, generator=draw) * 1e-3).to(dtype)]


def _stepped(count, dtype, update=ops.adamw_step, steps=3):
    tensors = _tensors(count, dtype)
    for step in range(1, steps + 1):
        update(*tensors, ops.adamw_factors(step, **FACTORS))
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 7, 64, 200_003])
def test_the_compiled_step_has_the_bits_of_the_plain_one(dtype, count):
    for ours, plain in zip(_stepped(count, dtype), _stepped(count, dtype, optimizer._reference)):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("update", [ops.adamw_step, optimizer._reference])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_scales_the_gradient_and_rounds_the_weight_as_separate_passes_do(dtype, kind, update):
    together, apart = _tensors(70_003, dtype), _tensors(70_003, dtype)
    together[0][5] = apart[0][5] = float("nan")
    weight = torch.zeros(70_003, dtype=kind)
    before = weight._version
    for step in range(1, 4):
        update(*together, ops.adamw_factors(step, **FACTORS), 0.3, weight)
        master, grad, *moments = apart
        update(master, grad * 0.3, *moments, ops.adamw_factors(step, **FACTORS))
    assert all(torch.equal(a[6:], b[6:]) for a, b in zip(together, apart))
    bits = {2: torch.int16, 4: torch.int32}[weight.element_size()]
    found, expected = weight.view(bits), apart[0].to(kind).view(bits)
    assert torch.equal(found[6:], expected[6:]) and torch.equal(found[:5], expected[:5]) and weight[5].isnan()
    assert weight._version > before


@pytest.mark.parametrize("update", [ops.adamw_step, optimizer._reference])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_narrow_gradient_counts_as_its_float32(dtype, update):
    narrow, wide = _tensors(70_003, dtype), _tensors(70_003, dtype)
    narrow[1] = narrow[1].bfloat16()
    wide[1] = narrow[1].float()
    for step in range(1, 4):
        update(*narrow, ops.adamw_factors(step, **FACTORS), 0.3)
        update(*wide, ops.adamw_factors(step, **FACTORS), 0.3)
    assert all(torch.equal(a, b) for a, b in zip(narrow[2:], wide[2:])) and torch.equal(narrow[0], wide[0])


def test_it_is_the_same_for_any_number_of_threads_and_any_cut():
    before = torch.get_num_threads()
    whole = _stepped(300_001, torch.float32)
    try:
        torch.set_num_threads(2)
        again = _stepped(300_001, torch.float32)
    finally:
        torch.set_num_threads(before)
    tensors = _tensors(300_001)
    for step in range(1, 4):
        for part in (slice(0, 13), slice(13, 200_000), slice(200_000, None)):
            ops.adamw_step(*(t[part] for t in tensors), ops.adamw_factors(step, **FACTORS))
    for a, b, c in zip(whole, again, tensors):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_it_is_torchs_adamw():
    master, grad, mean, square = _tensors(1000)
    parameter = master.clone().requires_grad_()
    theirs = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    mean.zero_()
    square.zero_()
    for step in range(1, 6):
        ops.adamw_step(master, grad, mean, square, ops.adamw_factors(step, **FACTORS))
        parameter.grad = grad.clone()
        theirs.step()
    # Rounded at other places.
    torch.testing.assert_close(master, parameter.detach(), rtol=1e-6, atol=1e-7)


def test_tensors_of_other_strides_are_updated_alike():
    master, grad, mean, square = (t.view(100, 20).T for t in _tensors(2000))
    copies = [t.contiguous() for t in (master, grad, mean, square)]
    for tensors in ((master, grad, mean, square), copies):
        ops.adamw_step(*tensors, ops.adamw_factors(1, **FACTORS))
    for strided, copy in zip((master, mean, square), (copies[0], *copies[2:])):
        assert torch.equal(strided, copy)


def test_it_tells_whoever_watches_a_weight_that_it_changed():
    tensors = _tensors(100)
    master = tensors[0].requires_grad_()
    before = [t._version for t in (master, tensors[2], tensors[3])]
    ops.adamw_step(*tensors, ops.adamw_factors(1, **FACTORS))
    assert all(t._version > old for t, old in zip((master, tensors[2], tensors[3]), before))


def test_a_gradient_of_nan_stays_seen_in_moments_of_bfloat16():
    master, grad, mean, square = _tensors(100, torch.bfloat16)
    grad[3] = float("nan")
    ops.adamw_step(master, grad, mean, square, ops.adamw_factors(1, **FACTORS))
    assert all(t.isnan().nonzero().tolist() == [[3]] for t in (master, mean, square))
