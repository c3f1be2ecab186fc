"""Whatever PyTorch computes itself in a forward pass is on a list: an operator that is not invariant is named here."""

from dataclasses import replace

import pytest
import torch

from lockstep import Engine, EngineConfig, SamplingParams, build_model, ops
from lockstep.errors import UserError
from lockstep.model import preset
from lockstep.model.known_operators import refuse_unknown_operators, unknown_operators
from lockstep.ops import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="the plain forms are PyTorch's own operators")


def unknown_in(family, dtype, **shape):
    model = build_model(replace(preset(f"{family}:micro", 259), **shape), dtype, seed=1)
    tokens = torch.arange(40)

    def use():
        for with_gradient in (False, True):
            with torch.set_grad_enabled(with_gradient):
                hidden = model(tokens, tokens, ops.PackedAttention([40]))
                ops.token_log_probs(hidden, model.head_weight, tokens, 0.7)
        params = SamplingParams(max_tokens=3, seed=1, ignore_eos=True, top_p=0.9, top_k=9)
        Engine(model, EngineConfig(cache_tokens=256)).generate([[1, 2, 3]], params)

    return unknown_operators(use)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama3", "float32"), ("qwen3", "bfloat16"), ("qwen3_moe", "float32"), ("gpt_oss", "bfloat16"),
        ("deepseek_v3", "float32"), ("gemma3", "float32"), ("olmo2", "bfloat16"), ("phi3", "float32"),
        ("glm4", "bfloat16"), ("ministral3", "float32"), ("granite", "bfloat16"), ("smollm3", "float32"),
        ("nanochat", "bfloat16"),
    ],
)  # fmt: skip
def test_pytorch_computes_nothing_that_is_not_on_the_list(family, dtype):
    # Llama's heads are padded.
    assert not unknown_in(family, dtype, num_layers=2, **({"head_dim": 20} if family == "llama3" else {}))


def test_a_product_and_a_softmax_of_the_library_would_be_named(monkeypatch):
    monkeypatch.setattr(ops, "linear", lambda x, weight, chunks=1: torch.nn.functional.linear(x, weight))
    monkeypatch.setattr(ops, "rms_norm", lambda x, weight, eps, offset: x.softmax(-1) * weight)
    assert {"mm", "_softmax"} <= unknown_in("qwen3", "float32", num_layers=1)


def test_a_model_with_an_operator_that_nobody_vouches_for_is_refused_by_name(monkeypatch):
    model = build_model(preset("qwen3:micro", 259), "float32", seed=1)
    refuse_unknown_operators(model)
    monkeypatch.setattr(type(model.layers[0].mlp), "forward", lambda self, x: x.mean(0, keepdim=True).expand_as(x))
    with pytest.raises(UserError, match=r"forward uses PyTorch's mean.*known_operators"):
        refuse_unknown_operators(model)
