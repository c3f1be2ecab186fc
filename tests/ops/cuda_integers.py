"""The GPU's products of integers on CPU tensors under Triton's interpreter; `test_cuda_kernels.py` runs this file.

Their definition is in plain PyTorch (`integer_linear`), which the CPU's kernels are compared with elsewhere. The
interpreter rounds to bfloat16 in its own way, so float16 stands for it.
"""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lockstep import Engine, EngineConfig, SamplingParams, build_model, ops, score
from lockstep.generate.graphs import GraphRunner
from lockstep.model import ModelConfig
from lockstep.model.rotary import RotaryTables
from lockstep.ops import packed_weights
from lockstep.ops.cuda import integer_linear
from lockstep.precision import Precision
from tests.ops.cuda_kernels import DTYPES, dots_of_fixed_order, form, in_kernels, kernels  # noqa: F401
from tests.ops.test_integer_linear import KINDS, PLAIN, difficult, module
from tests.ops.test_linear import cancelling
from tests.train.cuda_graphs import Capture


@settings(max_examples=10, phases=[Phase.generate])  # to shrink takes the interpreter minutes
@given(data=st.data(), dtype=st.sampled_from(DTYPES), group=st.sampled_from([0, 32, 128]))
def test_products_are_those_of_their_definition(data, dtype, group):
    rows, outputs = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 150))
    depth = data.draw(st.integers(1, 3)) * group if group else data.draw(st.integers(1, 200))
    x, w = (difficult(data.draw(st.integers(0, 99)), count, depth, dtype) for count in (rows, outputs))
    with in_kernels():
        out = KINDS[group](x, w)
    assert torch.equal(out.nan_to_num(7.0), PLAIN[group](x, w).to(dtype).nan_to_num(7.0))
    assert out[~x.isfinite().all(1)].isnan().all() and out[:, ~w.isfinite().all(1)].isnan().all()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("group", KINDS)
def test_a_row_is_the_same_in_tiles_of_every_size(group):
    x, w = cancelling(0, 130, 256, 45, torch.float32)
    whole = KINDS[group](x, w)
    assert torch.equal(whole, PLAIN[group](x, w))
    for rows in (slice(0, 1), slice(100, 116), slice(64, 129)):
        assert torch.equal(KINDS[group](x[rows], w), whole[rows])
    wider = torch.cat([x, x], 1)[:, 256:]
    assert wider.stride(0) == 512 and torch.equal(KINDS[group](wider, w), whole)
    assert torch.equal(KINDS[group](x.T.contiguous().T, w.T.contiguous().T), whole)


@pytest.mark.usefixtures("kernels")
def test_groups_that_no_format_has_are_computed_without_kernels():
    x, w = cancelling(0, 5, 192, 7, torch.float32)
    for group in (16, 48, 64):
        assert torch.equal(ops.int4_linear(x, w, group=group), module._plain_int4(x, w, group))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("group", KINDS)
def test_gradients_are_those_of_the_rounded_factors(group):
    x, w = (t.requires_grad_() for t in cancelling(1, 9, 128, 20, torch.float32))
    grad = torch.randn(9, 20, generator=torch.Generator().manual_seed(2))
    KINDS[group](x, w).backward(grad)
    rounded = [t.detach().requires_grad_() for t in (module.rounded_rows(x, group), module.rounded_weight(w, group))]
    ops.linear(*rounded).backward(grad)
    assert torch.equal(x.grad, rounded[0].grad) and torch.equal(w.grad, rounded[1].grad)


@pytest.mark.usefixtures("kernels")
def test_packed_integers_follow_their_weight(monkeypatch):
    x, w = torch.randn(3, 128), torch.randn(40, 128)
    weights, products, packed = ops.PackedWeights(), [*KINDS.values()], []
    pack = integer_linear.pack
    monkeypatch.setattr(integer_linear, "pack", lambda weight, *a: (packed.append(weight), pack(weight, *a)))

    def results():
        return [product(x, w) for product in products]

    expected = results()
    packed.clear()
    with weights.in_use():
        for _ in range(2):
            assert all(map(torch.equal, results(), expected))
        assert len(packed) == len(products) == len(weights._panels)
        w.mul_(-2)
        assert all(map(torch.equal, results(), [old * -2 for old in expected]))
        w.numpy()[:] *= 2  # does not change the version
        weights.forget()
        assert all(map(torch.equal, results(), [old * -4 for old in expected]))
    monkeypatch.setattr(packed_weights, "free_memory", lambda: 0)
    with ops.PackedWeights().in_use():
        assert all(map(torch.equal, results(), [old * -4 for old in expected]))


@pytest.mark.usefixtures("kernels")
def test_the_codes_of_two_weights_are_in_a_byte():
    w = difficult(3, 9, 256, torch.float32)[:3]
    panels = torch.empty(integer_linear.words(3, 256, 32), dtype=torch.int32)
    assert 4 * panels.numel() == 3 * 256 // 2 + 3 * 8 * 2
    integer_linear.pack(w, panels, 32)
    pairs, scales = integer_linear._parts(panels, 3, 256, 32)
    codes = torch.stack([(pairs << 4) >> 4, pairs >> 4], -1).flatten(2).transpose(0, 1)
    expected = module.quantized_weight(w, 32)
    assert torch.equal(codes.float(), expected[0]) and torch.equal(scales.float().T, expected[1][..., 0])
    assert codes.min() == -8 and codes.max() == 7


SHAPE = ModelConfig(
    family="qwen3", vocab_size=40, dim=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32,
    qk_norm="head", max_positions=128,
)  # fmt: skip


def _captured(function):
    capture = Capture()
    capture.warm_up(function)
    return capture.record(function)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_replayed_steps_read_the_integers_of_new_weights(precision, monkeypatch):
    model = build_model(SHAPE, "float32", seed=1)
    model.set_precision(Precision(precision, keep=()))
    config = EngineConfig(max_sequences=2, cache_tokens=128, draft="none")
    engine, packed = Engine(model, config), []

    # On a CPU they read the largest position.
    def rows(tables, at):
        return [(cos[at], sin[at]) for cos, sin in tables.reserve(0, at.device)]

    monkeypatch.setattr(RotaryTables, "__call__", rows)
    engine.runner = GraphRunner(model, engine.cache, config, engine._weights, _captured)
    for step in range(3):
        completion = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, seed=step, ignore_eos=True))[0][0]
        assert torch.equal(torch.tensor(completion.logprobs), score(model, [[1, 2, 3, *completion.token_ids]])[0][2:])
        assert len(engine.runner._whole) == 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.flip(0))
        engine.weights_changed(step + 1)
    pack = integer_linear.pack
    monkeypatch.setattr(integer_linear, "pack", lambda weight, *a: (packed.append(weight), pack(weight, *a)))
    engine.runner._drop_if_moved()
    assert len(packed) == 8 and len(engine.runner._whole) == 1, "all but norms, before the step"
