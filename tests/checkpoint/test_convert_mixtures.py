"""What cannot be loaded is not converted: each damage is named, and nothing is left behind."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep import build_model, load_model, save_model
from lockstep.checkpoint.convert import convert
from lockstep.errors import UserError
from lockstep.model import preset

EXPERTS = "model.layers.0.mlp.experts."


def folder_with(tmp_path, change=None, family="qwen3_moe", **config):
    save_model(build_model(preset(f"{family}:micro", 64), "bfloat16", seed=0), tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    if change:
        change(tensors)
        save_file(tensors, tmp_path / "model" / "model.safetensors")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return tmp_path / "model"


def stacked(rows=slice(None), experts=slice(None)):
    def change(tensors):
        parts = [tensors.pop(f"{EXPERTS}{e}.gate_proj.weight") for e in range(8)]
        tensors[f"{EXPERTS}gate_proj"] = torch.stack(parts)[experts, rows].contiguous()

    return change


def cast(name, dtype):
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen3_moe", stacked(rows=slice(64)), r"gate_proj has shape \[8, 64, 128\], but"),
        ("qwen3_moe", stacked(experts=slice(4)), r"gate_proj has shape \[4, 128, 128\], but"),
        ("qwen3_moe", cast(f"{EXPERTS}3.up_proj.weight", torch.float8_e4m3fn), "up_proj.weight is F8_E4M3; only"),
        ("qwen3_moe", cast(f"{EXPERTS}3.up_proj.weight", torch.int64), "up_proj.weight is I64; only"),
        ("deepseek_v3", cast("model.layers.1.mlp.gate.e_score_correction_bias", torch.int64), "bias is I64; only"),
    ],
)
def test_files_that_cannot_be_loaded_are_not_converted(tmp_path, family, change, message):
    folder = folder_with(tmp_path, change, family)
    with pytest.raises(UserError, match=message):
        load_model(folder)
    with pytest.raises(UserError, match=message):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("qwen3_moe", dict(num_hidden_layers=10**12), "num_hidden_layers is 1000000000000"),
        ("gpt_oss", dict(num_hidden_layers=2**31, layer_types=None), "a model has 1 to 1024 layers"),
        ("deepseek_v3", dict(num_hidden_layers=10**400), "a number of more than 20 digits"),
        ("qwen3_moe", dict(num_attention_heads=0), "at least one head"),
        ("qwen3_moe", dict(num_experts=10**9, num_local_experts=10**9), "weights, but the files have"),
        ("qwen3_moe", dict(mlp_only_layers=[True]), "must be a list of layers"),
        ("deepseek_v3", dict(routed_scaling_factor=10**400), "must be a number above 0"),
        ("deepseek_v3", dict(routed_scaling_factor=True), "must be a number above 0"),
        ("gpt_oss", dict(rope_scaling=dict(rope_type="yarn", factor=32.0, rope_theta=1)), "not finite"),
        ("gpt_oss", dict(rope_scaling=dict(rope_type="yarn", factor=1e-300)), "factor is 1e-300"),
    ],
)
def test_numbers_that_cannot_be_are_named_before_anything_is_made_of_them(tmp_path, family, config, message):
    folder = folder_with(tmp_path, None, family, **config)
    with pytest.raises(UserError, match=message):
        load_model(folder)
    with pytest.raises(UserError, match=message):
        convert(folder, tmp_path / "out")
