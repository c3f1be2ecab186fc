"""Mixtures of experts on a real GPU. Run: make gpu-test PYTHON=python3."""

import dataclasses

import pytest
import torch

from lockstep import Engine, EngineConfig, SamplingParams, build_model, ops, score
from lockstep.model import preset
from lockstep.ops.cuda import linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.float32, torch.bfloat16]
# (in, out): those of Qwen3-30B-A3B's and gpt-oss's experts, one product of a single piece, and odd ones.
SHAPES = [(2048, 768), (768, 2048), (2880, 5760), (512, 4096), (201, 259)]
COUNTS = [[0, 1, 0, 0, 3, 64, 65, 129, 0, 300, 17], [1] * 11, [0] * 10 + [500], [7]]
# One rounding to bfloat16 of values up to a few units; float32 sums of up to 2,880 terms in another order.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def _randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def _cancelling(rows: int, inner: int, outputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors whose exact products are near 0: the last bits of each partial sum are what is left."""
    half = inner // 2
    scale = torch.exp2(torch.randint(-6, 7, (half,), generator=torch.Generator().manual_seed(2)).float()).cuda()
    x, w = _randn(rows, half) * scale, _randn(outputs, half, seed=1)
    order = torch.randperm(2 * half, generator=torch.Generator().manual_seed(3))
    x, w = torch.cat([x, -x], 1)[:, order], torch.cat([w, w], 1)[:, order]
    return tuple(torch.nn.functional.pad(t, (0, inner % 2)).to(dtype) for t in (x, w))  # type: ignore[return-value]


def _starts(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).cuda()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("counts", COUNTS)
def test_a_grouped_product_has_the_bits_of_each_groups_dense_one(dtype, shape, counts):
    x, w = _cancelling(sum(counts), shape[0], len(counts) * shape[1], dtype)
    w = w.view(len(counts), shape[1], shape[0])
    got = ops.grouped_linear(x, w, _starts(counts))
    for group, (rows, own) in enumerate(zip(x.split(counts), got.split(counts), strict=True)):
        assert torch.equal(own, linear.product(rows, w[group], 1, torch.float32).to(dtype))
        assert not len(rows) or torch.equal(own[-1:], linear.product(rows[-1:], w[group], 1, torch.float32).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_grouped_product_are_those_of_float64(dtype):
    counts, (inner, outer) = COUNTS[0], (768, 1024)
    x, w = _randn(sum(counts), inner, dtype=dtype), _randn(len(counts), outer, inner, dtype=dtype, seed=1)
    grad = _randn(sum(counts), outer, dtype=dtype, seed=2)
    leaves = x.requires_grad_(), w.requires_grad_()
    ours = torch.autograd.grad(ops.grouped_linear(*leaves, _starts(counts)), leaves, grad)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    out = torch.cat([rows @ own.T for rows, own in zip(wide[0].split(counts), wide[1], strict=True)])
    for mine, exact in zip(ours, torch.autograd.grad(out, wide, grad.double()), strict=True):
        assert (mine.double() - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()


def test_nothing_in_a_mixture_waits_for_the_gpu():
    x, router = _randn(9, 256, dtype=torch.bfloat16), _randn(16, 256, dtype=torch.bfloat16, seed=1)
    shapes = ((16, 128, 256), (16, 128, 256), (16, 256, 128))
    gate, up, down = (_randn(*shape, dtype=torch.bfloat16, seed=2) for shape in shapes)

    def mixture() -> torch.Tensor:
        return ops.experts(x, *ops.route(ops.router_logits(x, router), ops.Routing(4)), gate, up, down)

    def trained() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(mixture().sum(), (gate, up, down))

    expected = mixture()  # kernels are compiled, and tiles compared
    for weight in (gate, up, down):
        weight.requires_grad_()
    gradients = trained()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again, gradients_again = mixture(), trained()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again, expected)
    for one, other in zip(gradients, gradients_again, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("graphs", ["none", "full"])
def test_the_generator_of_a_mixture_reports_the_trainers_bits_and_routes(dtype, family, graphs):
    shape = dataclasses.replace(preset(f"{family}:micro", 1000), num_layers=3)
    model = build_model(shape, dtype, device="cuda", seed=2)
    prompts = [[(7 * i + j) % 1000 for j in range(3 + 17 * i)] for i in range(9)]
    params = SamplingParams(max_tokens=20, temperature=0.9, n=2, seed=5, ignore_eos=True, routes="whole")
    eager = Engine(
        model, EngineConfig(max_tokens_per_step=500, max_sequences=64, cache_tokens=8192, cuda_graphs="none")
    )
    config = EngineConfig(max_tokens_per_step=90, max_sequences=13, cache_tokens=2048, cuda_graphs=graphs)
    groups, expected = Engine(model, config).generate(prompts, params), eager.generate(prompts, params)
    for prompt, group, plain in zip(prompts, groups, expected, strict=True):
        scores = score(model, [prompt + c.token_ids for c in group], 0.9)
        for completion, other, trainer in zip(group, plain, scores, strict=True):
            assert completion.token_ids == other.token_ids and completion.routes == other.routes
            assert torch.equal(torch.tensor(completion.logprobs), trainer[len(prompt) - 1 :].cpu())
