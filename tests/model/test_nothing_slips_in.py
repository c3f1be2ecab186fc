"""Whatever PyTorch computes itself in a forward pass is on a list: an operator that is not invariant is named here.

The invariant operators are functions of the compiled kernels, which PyTorch does not see; everything else that makes
floating-point values passes the dispatcher.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep import Engine, EngineConfig, SamplingParams, build_model, ops
from lockstep.model import preset
from lockstep.model.families import FAMILIES
from lockstep.ops import native

MOVED = {
    "_to_copy", "cat", "copy_", "detach", "embedding", "empty", "empty_like", "expand", "full", "gather", "index",
    "index_select", "lift_fresh", "new_empty", "new_full", "new_zeros", "scalar_tensor", "select", "slice", "unbind",
    "unsqueeze", "view", "zeros",
}  # fmt: skip
"""Values are copied, or made of nothing."""
ELEMENTWISE = {"abs", "add", "ceil", "mul", "reciprocal", "sub", "where"}
"""One rounding each, which IEEE 754 defines: an element's place and neighbours do not matter."""

CHOSEN = {"amax", "sort"}
"""One of the values, whichever order they are looked at in."""


class Seen(TorchDispatchMode):
    """The names of PyTorch's operators that made floating-point values."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        parts = out if isinstance(out, (tuple, list)) else [out]
        if any(isinstance(part, torch.Tensor) and part.is_floating_point() for part in parts):
            self.names.add(func.overloadpacket.__name__)
        return out


def seen_in(family, dtype):
    size = next(iter(FAMILIES[family].PRESETS))
    model = build_model(preset(f"{family}:{size}", 259), dtype, seed=1)
    tokens = torch.arange(40)
    with Seen() as seen:
        for with_gradient in (False, True):
            with torch.set_grad_enabled(with_gradient):
                hidden = model(tokens, tokens, ops.PackedAttention([40]))
                ops.token_log_probs(hidden, model.head_weight, tokens, 0.7)
        params = SamplingParams(max_tokens=3, seed=1, ignore_eos=True, top_p=0.9, top_k=9)
        Engine(model, EngineConfig(cache_tokens=256)).generate([[1, 2, 3]], params)
    return seen.names


@pytest.mark.skipif(native.library() is None, reason="the plain forms are written in PyTorch's own operators")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_pytorch_computes_nothing_that_is_not_on_the_list(family, dtype):
    names = seen_in(family, dtype)
    assert names <= MOVED | ELEMENTWISE | CHOSEN
    assert {"embedding", "add"} <= names, "the forward pass was not seen"


@pytest.mark.skipif(native.library() is None, reason="the plain forms are written in PyTorch's own operators")
def test_a_product_and_a_softmax_of_the_library_would_be_named(monkeypatch):
    monkeypatch.setattr(ops, "linear", lambda x, weight, chunks=1: torch.nn.functional.linear(x, weight))
    monkeypatch.setattr(ops, "rms_norm", lambda x, weight, eps: x.softmax(-1) * weight)
    unexpected = seen_in("qwen3", "float32") - MOVED - ELEMENTWISE - CHOSEN
    assert {"mm", "_softmax"} <= unexpected
