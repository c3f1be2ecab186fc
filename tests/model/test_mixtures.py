"""Mixtures of experts: the logits of transformers, its folders in and out, and the same bits in the engine."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from lockstep import load_model
from lockstep.checkpoint.convert import convert
from lockstep.errors import UserError
from lockstep.model import preset
from tests.model.mixture_checks import change, check_engine, check_folder

SIZES = dict(
    vocab_size=101,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    moe_intermediate_size=48,
    initializer_range=0.2,
)


def theirs(folder, **settings):
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, "num_experts": 6, "num_experts_per_tok": 2, **settings}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "experts" in name or "mlp.gate" in name:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize(
    "settings",
    [
        dict(norm_topk_prob=True),
        dict(norm_topk_prob=False),
        dict(norm_topk_prob=True, num_experts=9, num_experts_per_tok=4, moe_intermediate_size=36),
        dict(norm_topk_prob=False, num_experts=4, num_experts_per_tok=1, mlp_only_layers=[1]),
        dict(norm_topk_prob=True, decoder_sparse_step=2, tie_word_embeddings=True),
    ],
)
def test_a_folder_of_transformers_gives_its_logits_and_comes_back_tensor_by_tensor(tmp_path, settings):
    model = theirs(tmp_path / "theirs", **settings)
    check_folder(model, tmp_path, 70, settings.get("tie_word_embeddings"))


@pytest.mark.parametrize("fused", [True, False])
def test_experts_in_one_tensor_are_read(tmp_path, fused):
    theirs(tmp_path)
    expected = load_model(tmp_path)
    before = load_file(tmp_path / "model.safetensors")
    tensors = dict(before)
    for layer in range(SIZES["num_hidden_layers"]):
        path = f"model.layers.{layer}.mlp.experts."
        stacked = {
            kind: torch.stack([tensors.pop(f"{path}{e}.{kind}_proj.weight") for e in range(6)])
            for kind in ("gate", "up", "down")
        }
        if fused:
            tensors[f"{path}gate_up_proj"] = torch.cat([stacked["gate"], stacked["up"]], 1)
            tensors[f"{path}down_proj"] = stacked["down"]
        else:
            tensors |= {f"{path}{kind}_proj.weight": tensor for kind, tensor in stacked.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    got = load_model(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(got.parameters(), expected.parameters()))
    convert(tmp_path, tmp_path / "converted")
    held = load_file(tmp_path / "converted" / "model.safetensors")
    assert held.keys() == before.keys() and all(torch.equal(held[name], before[name]) for name in held)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_gives_the_trainers_bits(tmp_path, dtype):
    theirs(tmp_path)
    check_engine(load_model(tmp_path, dtype=dtype), 40, 17)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(num_experts_per_tok=7), "7 experts per token of 6"),
        (dict(num_experts_per_tok=0), "0 experts per token of 6"),
        (dict(num_experts_per_tok=None), "num_experts_per_tok is missing"),
        (dict(norm_topk_prob="yes"), "norm_topk_prob is 'yes'; it must be true or false"),
        (dict(mlp_only_layers=[3]), r"mlp_only_layers is \[3\]; it must be a list of layers from 0 to 2"),
        (dict(num_local_experts=8, num_experts=8), "experts.6.gate_proj.weight is missing"),
        (dict(moe_intermediate_size=50), r"experts.0.* has shape \[48, 64\], but config.json requires \[50, 64\]"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_name(tmp_path, values, message):
    theirs(tmp_path)
    change(tmp_path, **values)
    with pytest.raises(UserError, match=message):
        load_model(tmp_path)


def test_a_missing_expert_is_named(tmp_path):
    theirs(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"tensor model.layers.1.mlp.experts.4.up_proj.weight is missing"):
        load_model(tmp_path)


def test_a_token_meets_its_own_experts_parameters():
    config = preset("qwen3_moe:30b-a3b")
    assert config.num_parameters == 30_532_122_624  # Qwen3-30B-A3B's
    assert config.num_active_parameters == 3_353_032_704
