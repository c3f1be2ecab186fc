"""gpt-oss: the logits of transformers, its folders in and out, MXFP4 experts, and the same bits in the engine."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lockstep import build_model, load_model, save_model
from lockstep.checkpoint.convert import convert
from lockstep.errors import UserError
from lockstep.model import preset, read_config
from lockstep.model.families.gpt_oss import shortest_pattern
from lockstep.model.mxfp4 import Mxfp4, dequantized
from tests.model.mixture_checks import change, check_engine, check_folder

SIZES = dict(
    vocab_size=101,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_local_experts=6,
    num_experts_per_tok=2,
    sliding_window=20,
    max_position_embeddings=512,
    pad_token_id=0,
    eos_token_id=7,
)
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 150000.0}


def theirs(folder, **settings):
    torch.manual_seed(0)
    config = GptOssConfig(**{**SIZES, **settings})
    model = GptOssForCausalLM._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Sinks and gates of some size: what is clamped, and what they take, must show.
            spread = 2.0 if "sinks" in name else 0.5 if "router" in name or "gate_up" in name else 0.15
            parameter.normal_(1.0 if "norm" in name else 0.0, spread)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(rope_parameters=DEFAULT_ROPE, sliding_window=1),
        dict(rope_parameters=DEFAULT_ROPE, num_local_experts=9, num_experts_per_tok=4, intermediate_size=36),
        dict(layer_types=["full_attention", "sliding_attention", "sliding_attention"], sliding_window=64),
        dict(num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, num_experts_per_tok=1),
        dict(num_attention_heads=8, num_key_value_heads=8, head_dim=64, num_local_experts=4, num_experts_per_tok=4),
    ],
)
def test_a_folder_of_transformers_gives_its_logits_and_comes_back_tensor_by_tensor(tmp_path, settings):
    model = theirs(tmp_path / "theirs", **settings)
    ours, again = check_folder(model, tmp_path, 90, settings.get("tie_word_embeddings"))
    for key in ("layer_types", "sliding_window", "rope_parameters", "num_local_experts", "num_experts_per_tok"):
        kept = {k: v for k, v in (theirs_of(again, key)).items() if theirs_of(model, key).get(k, v) != v}
        assert not kept, key
    assert load_model(tmp_path / "ours").config == ours.config


@pytest.mark.parametrize(
    "changes",
    [
        *({key: None} for key in ("rms_norm_eps", "rope_parameters", "head_dim", "num_key_value_heads")),
        {"max_position_embeddings": None},
        {"rope_parameters": None, "rope_theta": 5000.0},
        {"rope_parameters": None, "rope_theta": 5000.0, "rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}},
    ],
    ids=str,
)
def test_what_a_configuration_lacks_is_as_in_transformers(tmp_path, changes):
    theirs(tmp_path, head_dim=64, num_attention_heads=16, num_key_value_heads=8)
    values = json.loads((tmp_path / "config.json").read_text())
    values.pop("rope_theta", None)
    values = {k: v for k, v in (values | changes).items() if v is not None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    ours, known = read_config(tmp_path), GptOssConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values | {k: v for k, v in changes.items() if v is None}))
    heads = {"num_kv_heads": 16} if "num_key_value_heads" in changes else {}
    assert read_config(tmp_path) == replace(ours, **heads)
    rope = known.rope_parameters
    assert (ours.norm_eps, ours.head_dim, ours.num_kv_heads, ours.max_positions, ours.rope_theta) == (
        known.rms_norm_eps, known.head_dim, known.num_key_value_heads, known.max_position_embeddings, rope["rope_theta"]
    )  # fmt: skip
    if rope["rope_type"] == "default":
        assert ours.rope_scaling is None
    else:
        scaling = ours.rope_scaling
        assert (scaling.factor, scaling.original_max_positions, scaling.truncate) == (
            rope["factor"], rope["original_max_position_embeddings"], rope.get("truncate", True)
        )  # fmt: skip


def theirs_of(model, key):
    value = getattr(model.config, key)
    return value if isinstance(value, dict) else {key: value}


def quantized(folder, **settings):
    """A folder whose experts are MXFP4, and the tensors that they stand for."""
    theirs(folder, hidden_size=64, intermediate_size=96, **settings)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    draw, plain = torch.Generator().manual_seed(1), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(118, 125, blocks.shape[:3], generator=draw, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).contiguous()
    save_file(tensors, folder / "model.safetensors")
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    change(folder, dtype="bfloat16", quantization_config=method)
    return tensors, plain


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_mxfp4_experts_are_read_as_transformers_reads_them_and_saved_unquantised(tmp_path, dtype):
    held, plain = quantized(tmp_path / "theirs")
    model = load_model(tmp_path / "theirs", dtype=dtype)
    assert model.dtype == (torch.bfloat16 if dtype is None else torch.float32)
    save_model(model, tmp_path / "ours")
    convert(tmp_path / "theirs", tmp_path / "converted", dtype=dtype or "auto")
    expected = {name: tensor for name, tensor in held.items() if not name.endswith(("_blocks", "_scales"))} | plain
    for folder in ("ours", "converted"):
        found = load_file(tmp_path / folder / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor.to(model.dtype)) for name, tensor in expected.items()), folder
        assert "quantization_config" not in json.loads((tmp_path / folder / "config.json").read_text())


def test_every_number_of_mxfp4_at_every_scale():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 256, 16, 16).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(1, 256, 16).contiguous()
    found = dequantized(blocks, scales)[0]
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    values = torch.cat((values, -values))
    row = torch.stack([values[[byte & 15, byte >> 4]] for byte in range(256)]).flatten()
    expected = row * torch.exp2(torch.arange(256, dtype=torch.float64) - 127)[:, None]
    assert torch.equal(found[:255].double(), expected[:255].bfloat16().double())
    assert found[255].isnan().all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_gives_the_trainers_bits(tmp_path, dtype):
    theirs(tmp_path)
    check_engine(load_model(tmp_path, dtype=dtype), 80, 25)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(attention_bias=False), "attention_bias is False; only True is supported"),
        (dict(swiglu_limit=5.0), "swiglu_limit is 5.0; only 7.0 is supported"),
        (dict(swiglu_alpha=1.0), "swiglu_alpha is 1.0; only 1.702 is supported"),
        (dict(layer_types=["full_attention"]), "layer_types is .* for each layer"),
        (dict(layer_types=["full_attention", "chunked_attention", "full_attention"]), "layer_types is .*chunked"),
        (dict(sliding_window=-1), "sliding_window is -1"),
        (dict(num_experts_per_tok=7), "7 experts per token of 6"),
        (
            dict(quantization_config={"quant_method": "gptq"}),
            r"'gptq'\), which is not supported \(supported: mxfp4, .*dequantize",
        ),
        (dict(quantization_config="fp8"), r"'fp8'\), which is not supported.*float8_e4m3.*fp8_cast_bf16.py"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_name(tmp_path, values, message):
    theirs(tmp_path)
    change(tmp_path, **values)
    with pytest.raises(UserError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("no_scales", r"gate_up_proj_scales is missing"),
        ("floats", r"down_proj_blocks is F32; only U8 are read"),
        ("nan", r"layers.1.mlp.experts.down_proj_scales has a scale byte of 255 for expert 2"),
        ("shape", r"down_proj_scales has shape \[6, 64, 2\], but config.json requires \[6, 64, 3\]"),
    ],
)
def test_damaged_mxfp4_is_named(tmp_path, damage, message):
    tensors, _ = quantized(tmp_path)
    path = "model.layers.1.mlp.experts."
    if damage == "no_scales":
        del tensors[path + "gate_up_proj_scales"]
    elif damage == "floats":
        tensors[path + "down_proj_blocks"] = tensors[path + "down_proj_blocks"].float()
    elif damage == "nan":
        tensors[path + "down_proj_scales"][2, 3, 1] = 255
    else:
        tensors[path + "down_proj_scales"] = tensors[path + "down_proj_scales"][..., :2].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load_model(tmp_path)


def test_presets_have_the_published_sizes():
    for size, total, active in (("20b", 20_914_757_184, 3.61e9), ("120b", 116_829_156_672, 5.13e9)):
        config = preset(f"gpt_oss:{size}")
        assert config.num_parameters == total
        # Published without the embedding, to three digits.
        assert config.num_active_parameters - config.vocab_size * config.dim == pytest.approx(active, rel=2e-3)
    micro = build_model(preset("gpt_oss:micro"), "float32", seed=0)
    assert sum(p.numel() for p in micro.parameters()) == micro.config.num_parameters
    for name, parameter in micro.named_parameters():
        assert parameter.any() != name.endswith(("bias", "sinks")), name


def test_layers_take_windows_in_turn():
    assert shortest_pattern([20, 0, 20, 0, 20]) == (20, 0) and shortest_pattern([0, 0]) == (0,)
    assert shortest_pattern([5, 0, 0, 5, 0, 0, 0]) == (5, 0, 0, 5, 0, 0, 0)
    config = preset("gpt_oss:micro")
    assert [config.window(layer) for layer in range(5)] == [20, 0, 20, 0, 20]
    assert build_model(replace(config, num_layers=1), "float32").layers[0].self_attn.window == 20


def test_any_place_of_an_mxfp4_tensor_can_be_read():
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 10, 4, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(120, 130, (3, 10, 4), generator=draw, dtype=torch.uint8)
    whole = dequantized(blocks, scales).mT
    tensor = Mxfp4("down_proj", blocks, scales)
    for experts, inputs, outputs in [
        ((0, 3), (0, 128), (0, 10)),
        ((1, 2), (31, 33), (3, 4)),
        ((0, 2), (70, 128), (9, 10)),
    ]:
        place = slice(*experts), slice(*inputs), slice(*outputs)
        assert torch.equal(tensor[place], whole[place])
