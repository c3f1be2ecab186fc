"""Where bits differ, the operator that makes them differ is named: a difference planted in each of them in turn."""

import pytest
import torch

from lockstep import build_model, ops
from lockstep.errors import UserError
from lockstep.model import preset
from lockstep.rl.explain import CHUNK, first_difference, in_words

TOKENS, PROMPT = [*range(5, 45)], 21


@pytest.fixture(params=["qwen3:micro", "llama3:micro"])
def model(request):
    return build_model(preset(request.param, 259), "bfloat16", seed=1)


def test_paths_that_agree_are_said_to_agree(model):
    assert first_difference(model, TOKENS, PROMPT) is None
    assert in_words(model, (TOKENS, PROMPT)).startswith("Every operator agrees")
    assert in_words(model, None).startswith("No sequence")


def in_the_last_place(x, element):
    """`x`, of one element the lowest bit flipped."""
    x = x.clone()
    x.view(-1)[element : element + 1].view(torch.int16).bitwise_xor_(1)
    return x


def plant(monkeypatch, model, kind, number):
    """The `number`-th call of an operator in a forward pass differs where it has a single row: in decoding."""
    exact, calls = getattr(ops, kind), [0]

    def different(*arguments):
        out = exact(*arguments)
        calls[0] += 1
        return in_the_last_place(out, 3) if out.shape[0] == 1 and calls[0] == number else out

    monkeypatch.setattr(ops, kind, different)
    forward = model.forward

    def counted(*arguments):
        calls[0] = 0
        return forward(*arguments)

    monkeypatch.setattr(model, "forward", counted)


@pytest.mark.parametrize(
    ("kind", "number", "name"),
    [
        ("embedding", 1, "embed_tokens"),
        ("rms_norm", 1, "layer 0, input_layernorm"),
        ("linear", 1, "layer 0, q_proj"),
        ("linear", 2, "layer 0, k_proj"),
        ("linear", 3, "layer 0, v_proj"),
        ("rotary", 1, "layer 0, rotary of queries"),
        ("rotary", 2, "layer 0, rotary of keys"),
        ("linear", 4, "layer 0, o_proj"),
        ("linear", 5, "layer 0, gate_proj"),
        ("silu_mul", 1, "layer 0, silu_mul"),
        ("linear", 7, "layer 0, down_proj"),
        ("linear", 11, "layer 1, o_proj"),
        ("linear", 14, "layer 1, down_proj"),
    ],
)
def test_the_operator_that_differs_is_named(monkeypatch, model, kind, number, name):
    plant(monkeypatch, model, kind, number)
    found = first_difference(model, TOKENS, PROMPT)
    assert (found.operator, found.position, found.different) == (name, PROMPT, 1)
    assert str(found).startswith(f"{name}: 1 of {found.elements} elements, largest difference ")
    assert in_words(model, (TOKENS, PROMPT)).startswith(f"The first operator that differs is {name}: 1 of ")


@pytest.mark.parametrize(
    ("kind", "number", "name"),
    [
        ("add_bias", 1, "layer 0, q_proj.bias"),
        ("add_bias", 4, "layer 0, o_proj.bias"),
        ("linear", 4, "layer 0, o_proj"),
    ],
)
def test_of_a_projection_with_a_bias_product_and_sum_are_named(monkeypatch, kind, number, name):
    model = build_model(preset("gpt_oss:micro", 259), "float32", seed=1)
    plant(monkeypatch, model, kind, number)
    assert first_difference(model, TOKENS, PROMPT).operator == name


def test_attention_the_last_norm_and_the_head_are_named_too(monkeypatch, model):
    layers = model.config.num_layers
    exact = ops.PagedAttention.__call__

    def attend(self, layer, q, k, v, terms):
        out = exact(self, layer, q, k, v, terms)
        return in_the_last_place(out, 3) if layer == 1 and len(q) == 1 else out

    with monkeypatch.context() as patch:
        patch.setattr(ops.PagedAttention, "__call__", attend)
        assert first_difference(model, TOKENS, PROMPT).operator == "layer 1, attention"
    with monkeypatch.context() as patch:
        plant(patch, model, "linear", 7 * layers + 1)
        assert first_difference(model, TOKENS, PROMPT).operator == "lm_head"
    with monkeypatch.context() as patch:
        norms = (4 if model.config.qk_norm else 2) * layers + 1
        plant(patch, model, "rms_norm", norms)
        assert first_difference(model, TOKENS, PROMPT).operator == "norm"


def test_the_first_token_that_differs_decides_and_not_the_first_operator(monkeypatch, model):
    exact = ops.linear

    def linear(x, weight, chunks=1):
        out = exact(x, weight, chunks)
        if x.shape[0] == CHUNK:  # the generator's first chunk of the prompt
            late = weight is model.layers[1].mlp.down_proj.weight
            if late or weight is model.layers[0].self_attn.v_proj.weight:
                out = in_the_last_place(out, (2 if late else CHUNK - 1) * out.shape[1])
        return out

    monkeypatch.setattr(ops, "linear", linear)
    found = first_difference(model, TOKENS, PROMPT)
    assert (found.operator, found.position) == ("layer 1, down_proj", 2) and found.different == 1


def test_not_a_number_and_a_zeros_sign_are_differences(monkeypatch, model):
    exact = ops.silu_mul
    for planted, largest in ((float("nan"), float("inf")), (-0.0, 0.0)):

        def silu_mul(gate, up, planted=planted):
            out = exact(gate, up).clone()
            out[..., 0] = planted if out.shape[0] == 1 else 0.0
            return out

        monkeypatch.setattr(ops, "silu_mul", silu_mul)
        found = first_difference(model, TOKENS, PROMPT)
        assert (found.operator, found.different, found.largest) == ("layer 0, silu_mul", 1, largest)


def test_another_number_of_chunks_is_named_at_its_first_product(monkeypatch):
    # Rounded to bfloat16 the two sums hardly ever differ.
    model = build_model(preset("qwen3:micro", 259), "float32", seed=1)
    exact = ops.linear

    def linear(x, weight, chunks=1):
        chunked = any(weight is p for n, p in model.named_parameters() if "o_proj" in n)
        return exact(x, weight, 4 if chunked and x.shape[0] == 1 else chunks)

    monkeypatch.setattr(ops, "linear", linear)
    found = first_difference(model, TOKENS, PROMPT)
    assert found.operator.endswith("o_proj") and found.position >= PROMPT


def test_a_compiled_model_is_refused(model):
    model.halves = object()
    with pytest.raises(UserError, match="operators are explained in one process without compilation"):
        first_difference(model, TOKENS, PROMPT)
    assert in_words(model, (TOKENS, PROMPT)).startswith("It is not explained: operators are")
