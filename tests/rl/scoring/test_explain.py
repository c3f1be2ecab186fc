"""Where bits differ, the operator that makes them differ is named: a difference planted in each of them in turn."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from lockstep import build_model, ops
from lockstep.config import ParallelConfig
from lockstep.errors import UserError
from lockstep.model import initialize, preset
from lockstep.parallel import close_world, generator_model, open_world
from lockstep.rl.scoring.explain import CHUNK, first_difference, in_words
from tests.parallel.launch import launch

TOKENS, PROMPT = [*range(5, 45)], 21


@pytest.fixture(scope="module")
def model():
    return build_model(preset("qwen3:micro", 259), "bfloat16", seed=1)


def test_paths_that_agree_are_said_to_agree(model):
    assert first_difference(model, TOKENS, PROMPT) is None
    assert in_words(model, (TOKENS, PROMPT)).startswith("Every operator agrees")
    assert in_words(model, None).startswith("There is no sequence")


def in_the_last_place(x, element):
    """`x`, of one element the lowest bit flipped."""
    x = x.clone()
    whole = torch.int16 if x.element_size() == 2 else torch.int32
    x.view(-1)[element : element + 1].view(whole).bitwise_xor_(1)
    return x


def plant(monkeypatch, model, kind, number):
    """The `number`-th call of an operator in a forward pass differs where it has a single row: in decoding."""
    exact, calls = getattr(ops, kind), [0]

    def different(*arguments, **named):
        out = exact(*arguments, **named)
        calls[0] += 1
        rows = out[0] if kind == "route" else out
        if rows.shape[0] > 1 or calls[0] != number:
            return out
        return (in_the_last_place(rows, 0), out[1]) if kind == "route" else in_the_last_place(rows, 3)

    monkeypatch.setattr(ops, kind, different)
    forward = model.forward

    def counted(*arguments):
        calls[0] = 0
        return forward(*arguments)

    monkeypatch.setattr(model, "forward", counted)


@pytest.mark.parametrize(
    ("family", "kind", "number", "name"),
    [
        ("qwen3", "embedding", 1, "embed_tokens"),
        ("qwen3", "linear", 2, "layer 0, k_proj"),
        ("qwen3", "rotary", 2, "layer 0, rotary of keys"),
        ("qwen3", "silu_mul", 1, "layer 0, silu_mul"),
        ("qwen3", "rms_norm", 9, "norm"),
        ("qwen3", "linear", 15, "lm_head"),
        ("gpt_oss", "add_bias", 1, "layer 0, q_proj.bias"),
        ("gpt_oss", "clamped_experts", 2, "layer 1, experts"),
        ("qwen3_moe", "router_logits", 1, "layer 0, gate"),
        ("deepseek_v3", "route", 1, "layer 1, route"),
    ],
)
def test_the_operator_that_differs_is_named(monkeypatch, family, kind, number, name):
    model = build_model(replace(preset(f"{family}:micro", 259), num_layers=2), "float32", seed=1)
    plant(monkeypatch, model, kind, number)
    tokens, prompt = TOKENS[:6], 4
    found = first_difference(model, tokens, prompt)
    assert (found.operator, found.position, found.different) == (name, prompt, 1)
    assert str(found).startswith(f"{name}: 1 of {found.elements} elements, largest difference ")
    assert in_words(model, (tokens, prompt)).startswith(f"The first operator that differs is {name}: 1 of ")


def test_attention_is_named_too(monkeypatch, model):
    exact = ops.PagedAttention.__call__

    def attend(self, layer, q, k, v, terms):
        out = exact(self, layer, q, k, v, terms)
        return in_the_last_place(out, 3) if layer == 1 and len(q) == 1 else out

    monkeypatch.setattr(ops.PagedAttention, "__call__", attend)
    assert first_difference(model, TOKENS, PROMPT).operator == "layer 1, attention"


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


PLANTED = [
    # The weight, the rank where it differs, whether in decoding, and what is then named.
    ("layers.0.self_attn.q_proj", 1, True, "layer 0, q_proj", PROMPT, 1),
    ("layers.1.mlp.gate_proj", 0, True, "layer 1, gate_proj", PROMPT, 0),
    # A row product of the trainer's, whose rows are shared out: row 3 of the second rank's 20.
    ("layers.0.mlp.down_proj", 1, False, "layer 0, down_proj", 23, 0),
]


def explained_over_ranks(dtype):
    parallel = ParallelConfig(tensor=2, reduction_chunks=2)
    world = open_world(parallel, "cpu")
    shape = replace(preset("qwen3:micro", 259), num_layers=2)
    model = generator_model(shape, getattr(torch, dtype), world, parallel, partial(initialize, seed=1))
    found = [first_difference(model, TOKENS, PROMPT)]
    for name, rank, in_decoding, *_ in PLANTED:
        weight, exact = model.get_submodule(name).weight, ops.linear

        def different(x, own, *given, weight=weight, rank=rank, in_decoding=in_decoding, exact=exact):
            out = exact(x, own, *given)
            planted = own is weight and world.rank == rank and (x.shape[0] == 1) == in_decoding and len(x) in (1, 40)
            return in_the_last_place(out, 0 if in_decoding else 3 * out.shape[1]) if planted else out

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "linear", different)
            found.append(first_difference(model, TOKENS, PROMPT))

    close_world(world)
    return [None if f is None else (f.operator, f.position, f.rank, f.different, str(f)) for f in found]


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_over_tensor_ranks_the_operator_and_the_rank_are_named(dtype):
    ranks = launch(2, explained_over_ranks, dtype)
    assert len(ranks[0]) == 1 + len(PLANTED)
    assert ranks[0] == ranks[1] and ranks[0][0] is None
    for (operator, position, rank, different, said), (*_, name, token, first) in zip(ranks[0][1:], PLANTED):
        assert (operator, position, rank, different) == (name, token, first, 1)
        assert said.startswith(f"{name} on tensor rank {first}: 1 of ")


def test_a_compiled_model_is_refused():
    model = build_model(preset("qwen3:micro", 259), "float32")
    model.halves = object()  # as compiling does
    with pytest.raises(UserError, match="operators can be compared only without compilation"):
        first_difference(model, TOKENS, PROMPT)
    assert in_words(model, (TOKENS, PROMPT)).startswith("It cannot be explained: operators can")
