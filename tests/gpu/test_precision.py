"""Products in low precision on a real GPU. Run: make gpu-test PYTHON=python3."""

import dataclasses
from functools import partial

import pytest
import torch

from lockstep import Engine, EngineConfig, SamplingParams, build_model, ops, score
from lockstep.config import TrainConfig
from lockstep.model import preset
from lockstep.ops import float8, float8_products
from lockstep.ops.cuda import linear, scaled_products
from lockstep.precision import Precision
from lockstep.train import Trainer, pack, target_log_probs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.float32, torch.bfloat16]
INTEGERS = {
    "int8": ops.int8_linear,
    "int4": partial(ops.int4_linear, group=32),
    "int4_128": partial(ops.int4_linear, group=128),
}
# (in, out): Qwen3 0.6B's and 8B's, and one that int8 pads.
SHAPES = [(1024, 3072), (4096, 1024), (12288, 512), (640, 259)]
COUNTS = [1, 2, 7, 16, 17, 31, 64, 65, 128, 129, 300]
KINDS = ["rowwise", "rowwise_high_precision_weight_gradient", "mxfp8_floor", "mxfp8_rceil"]


def _cancelling(rows: int, inner: int, outputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    factors = linear.cancelling(torch.Generator("cuda").manual_seed(1), rows, inner, outputs)
    return factors[0].to(dtype), factors[1].to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", INTEGERS)
def test_products_of_integers_have_the_bits_of_the_cpus(name, shape, dtype):
    x, w = _cancelling(300, *shape, dtype)
    x[3] = 0
    x[5, 7] = torch.nan
    w[1, 2] = torch.inf
    out = INTEGERS[name](x, w)
    assert torch.equal(out.cpu().nan_to_num(7.0), INTEGERS[name](x.cpu(), w.cpu()).nan_to_num(7.0))
    for count in COUNTS:
        rows = slice(300 - count, 300)
        assert torch.equal(INTEGERS[name](x[rows], w).nan_to_num(7.0), out[rows].nan_to_num(7.0)), count


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_factors_of_integers_have_the_bits_of_the_cpus(dtype):
    x = _cancelling(40, 1024, 1, dtype)[0]
    for name, group in (("int8", 0), ("int4", 32), ("int4_128", 128)):
        rounded = ops.FORMATS[name].rounded_rows, ops.FORMATS[name].rounded_weight
        assert all(torch.equal(each(x).cpu(), each(x.cpu())) for each in rounded), group


@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_codes_have_the_bits_of_the_cpus(dtype):
    x = _cancelling(96, 1024, 1, dtype)[0] * torch.exp2(torch.arange(96, device="cuda") - 40.0)[:, None].to(dtype)
    codings = [float8.row_codes, partial(float8.row_codes, dim=(-2, -1)), float8.tensor_codes]
    codings += [partial(float8.tensor_codes, dtype=torch.float8_e5m2)]
    codings += [partial(float8.block_codes, scaling=scaling) for scaling in float8.SCALINGS]
    for matrix in (x, x.T):
        for coding in codings:
            for ours, theirs in zip(coding(matrix), coding(matrix.cpu()), strict=True):
                assert torch.equal(ours.cpu().float(), theirs.float())


@pytest.mark.parametrize("shape", [(1024, 3072), (4096, 1024), (4096, 4096)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_a_float8_product_is_the_same_for_every_number_of_rows(kind, shape):
    x, w = _cancelling(700, *shape, torch.bfloat16)
    expected = float8_products.float8_linear(x, w, kind)
    for count in COUNTS:
        for rows in (slice(0, count), slice(700 - count, 700)):
            assert torch.equal(float8_products.float8_linear(x[rows], w, kind), expected[rows]), count


@pytest.mark.parametrize("kind", ["tensorwise", *KINDS])
def test_the_tensor_cores_compute_what_the_emulation_does(kind, monkeypatch):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (300, 1024), (512, 1024), (300, 512)
    x, w, grad = (torch.randn(*s, generator=generator, device="cuda").bfloat16() for s in shapes)

    def computed() -> list[torch.Tensor]:
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = float8_products.float8_linear(*leaves, kind)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    if not scaled_products.usable(x, w, kind, 1):
        pytest.skip("this GPU, or its library, has no such product")
    ours = computed()
    monkeypatch.setattr(scaled_products, "usable", lambda *_: False)
    for mine, theirs in zip(ours, computed(), strict=True):
        # Tensor cores of Hopper add with some 14 bits; then one rounding to bfloat16.
        assert (mine.float() - theirs.float()).abs().max() < 1e-2 * theirs.float().abs().max()


@pytest.mark.parametrize("linear_format", ["int8", "int4", "float8_rowwise", "mxfp8"])
@pytest.mark.parametrize("graphs", ["none", "full"])
def test_training_and_sampling_agree_bit_for_bit(linear_format, graphs):
    sizes = dict(num_layers=3, num_heads=8, num_kv_heads=4, intermediate_size=512, max_positions=1024)
    model = build_model(dataclasses.replace(preset("qwen3:tiny", 1000), **sizes), "bfloat16", device="cuda", seed=2)
    model.set_precision(Precision(linear_format, keep=("lm_head",)))
    engine = Engine(model, EngineConfig(max_sequences=8, cache_tokens=2048, cuda_graphs=graphs))
    trainer = Trainer(model, TrainConfig(learning_rate=1e-3, warmup_steps=0, schedule="constant"), 20)
    sequences = [[(3 * i + j) % 50 for j in range(40 + 30 * i)] for i in range(4)]
    for step in range(3):
        metrics = trainer.step([pack(sequences, device="cuda")], lambda m, r: -target_log_probs(m, r)[0].mean())
        assert torch.isfinite(torch.tensor(metrics["loss"]))
        engine.weights_changed(step + 1)
        params = SamplingParams(max_tokens=10, seed=step, n=5, ignore_eos=True)
        (group,) = engine.generate([[1, 2, 3]], params)
        scores = score(model, [[1, 2, 3, *completion.token_ids] for completion in group])
        for completion, trainer_scores in zip(group, scores, strict=True):
            assert torch.equal(torch.tensor(completion.logprobs), trainer_scores[2:].cpu())
