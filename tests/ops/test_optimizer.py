"""AdamW's step on the CPU: torch's values, one set of bits."""

import pytest
import torch

from lockstep import ops
from lockstep.ops import optimizer

FACTORS = dict(learning_rate=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95, epsilon=1e-8)
FLOAT, HALF = torch.float32, torch.bfloat16
UPDATES = [ops.adamw_step, optimizer._reference]


def _tensors(count, dtype=FLOAT):
    draw = torch.Generator().manual_seed(0)
    master, grad, mean = (torch.randn(count, generator=draw) for _ in range(3))
    return [master, grad * 0.1, (mean * 0.01).to(dtype), (torch.rand(count, generator=draw) * 1e-3).to(dtype)]


def _stepped(count, dtype, update=ops.adamw_step):
    tensors = _tensors(count, dtype)
    for step in range(1, 4):
        update(*tensors, ops.adamw_factors(step, **FACTORS))
    return tensors


@pytest.mark.parametrize(("count", "dtype"), [(1, FLOAT), (7, HALF), (64, FLOAT), (70_003, HALF)])
def test_the_compiled_step_has_the_bits_of_the_plain_one(count, dtype):
    for ours, plain in zip(_stepped(count, dtype), _stepped(count, dtype, optimizer._reference)):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(("dtype", "kind"), [(FLOAT, HALF), (HALF, torch.float16), (HALF, FLOAT)])
def test_it_scales_the_gradient_and_rounds_the_weight_as_separate_passes_do(dtype, kind, update):
    together, apart = _tensors(7003, dtype), _tensors(7003, dtype)
    together[1] = together[1].bfloat16()  # a narrow gradient counts as its float32
    apart[1] = together[1].float()
    together[0][5] = apart[0][5] = float("nan")
    weight = torch.zeros(7003, dtype=kind)
    tensors = [weight, together[0], *together[2:]]
    before = [t._version for t in tensors]
    for step in range(1, 4):
        update(*together, ops.adamw_factors(step, **FACTORS), 0.3, weight)
        master, grad, *moments = apart
        update(master, grad * 0.3, *moments, ops.adamw_factors(step, **FACTORS))
    assert all(torch.equal(a[6:], b[6:]) for a, b in zip(together[::2], apart[::2]))
    bits = {2: torch.int16, 4: torch.int32}[weight.element_size()]
    found, expected = weight.view(bits), apart[0].to(kind).view(bits)
    assert torch.equal(found[6:], expected[6:]) and torch.equal(found[:5], expected[:5]) and weight[5].isnan()
    assert all(t._version > old for t, old in zip(tensors, before)), "whoever watches a tensor sees that it changed"


def test_it_is_the_same_for_any_number_of_threads_any_cut_and_other_strides(threads):
    whole = _stepped(100_001, FLOAT)
    threads(2)
    again, tensors = _stepped(100_001, FLOAT), _tensors(100_001)
    for step in range(1, 4):
        for part in (slice(0, 13), slice(13, 70_000), slice(70_000, None)):
            ops.adamw_step(*(t[part] for t in tensors), ops.adamw_factors(step, **FACTORS))
    for a, b, c in zip(whole, again, tensors):
        assert torch.equal(a, b) and torch.equal(a, c)
    strided = [t.view(100, 20).T for t in _tensors(2000)]
    copies = [t.contiguous() for t in strided]
    for tensors in (strided, copies):
        ops.adamw_step(*tensors, ops.adamw_factors(1, **FACTORS))
    assert all(map(torch.equal, strided, copies))


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


def test_a_gradient_of_nan_stays_seen_in_moments_of_bfloat16():
    master, grad, mean, square = _tensors(100, HALF)
    grad[3] = float("nan")
    ops.adamw_step(master, grad, mean, square, ops.adamw_factors(1, **FACTORS))
    assert all(t.isnan().nonzero().tolist() == [[3]] for t in (master, mean, square))
