"""Qwen3.5 and Qwen3-Next beside transformers and peft: what they generate, adapters, fresh weights, what is ignored."""

import json
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep import build_model, load_model, ops, save_model, score
from lockstep.checkpoint.convert import convert
from lockstep.config import LoraConfig, TrainConfig
from lockstep.errors import UserError
from lockstep.model import Decoder, begin_adapter, lora_of, preset, read_config, save_adapter
from lockstep.model.families import PRESETS, from_hugging_face, to_hugging_face
from lockstep.train.optimizer import settings_of
from tests.model.test_families import HYBRID, TOLERANCE, change, linked, theirs

TOKENS = torch.randint(101, (150,), generator=torch.Generator().manual_seed(1))
FAMILY = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe", "qwen3_next": "qwen3_next"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of each family, by name, a folder that nobody changes, and transformers' model in it."""
    homes = {family: tmp_path_factory.mktemp(family) for family in HYBRID}
    return {family: (home, theirs(family, home)) for family, home in homes.items()}


@torch.no_grad()
def logits(folder):
    model = load_model(folder)
    return model.logits(model(TOKENS, torch.arange(len(TOKENS)), ops.PackedAttention([len(TOKENS)])))


@pytest.mark.parametrize("family", HYBRID)
@torch.no_grad()
def test_what_transformers_generates_from_its_cache_has_our_scores(folders, family):
    folder, model = folders[family]
    prompt = TOKENS[None, :60]  # its next tokens cross the end of a chunk
    out = model.generate(
        prompt, max_new_tokens=12, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0
    )
    text = out.sequences[0]
    ours = score(load_model(folder), [text.tolist()])[0][len(prompt[0]) - 1 :]
    expected = torch.cat(out.logits).log_softmax(-1).gather(1, text[len(prompt[0]) :, None])[:, 0]
    torch.testing.assert_close(ours, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.partition(":")[0] in FAMILY.values()])
def test_sizes_have_the_parameters_that_they_say_and_are_hybrids(name):
    shape = preset(name)
    assert sum(p.numel() for p in Decoder(shape, torch.float32, "meta").parameters()) == shape.num_parameters
    assert shape.num_layers >= 4 and shape.num_delta == shape.num_layers * 3 // 4
    assert from_hugging_face(to_hugging_face(shape, "bfloat16"), name) == shape


def test_published_sizes_have_the_parameters_of_their_names():
    billions = {"0.8b": 0.75, "2b": 1.9, "4b": 4.2, "9b": 9.0, "27b": 26.9}
    mixtures = {"35b-a3b": (34.7, 3.5), "122b-a10b": (122.1, 9.8), "397b-a17b": (396.3, 17.3)}
    for size, total in billions.items():
        assert round(preset(f"qwen3_5:{size}").num_parameters / 1e9, 1) == pytest.approx(total, abs=0.06)
    for size, (total, active) in mixtures.items():
        shape = preset(f"qwen3_5_moe:{size}")
        assert [round(n / 1e9, 1) for n in (shape.num_parameters, shape.num_active_parameters)] == [total, active]


@pytest.mark.parametrize("family", HYBRID)
def test_layers_that_predict_further_tokens_are_left_out(tmp_path, folders, family):
    there = linked(folders[family][0], tmp_path / "there")
    tensors = load_file(there / "model.safetensors")
    (there / "model.safetensors").unlink()
    further = ("mtp.fc.weight", "mtp.layers.0.mlp.gate.weight", "mtp.norm.weight")
    save_file(tensors | {name: torch.zeros(3, 3) for name in further}, there / "model.safetensors")
    assert torch.equal(logits(there), logits(folders[family][0]))
    convert(there, tmp_path / "converted")
    assert load_file(tmp_path / "converted" / "model.safetensors").keys() == tensors.keys()


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("qwen3_5_text", dict(linear_num_value_heads=3), "3 value heads, which is not a multiple of its 2 key heads"),
        ("qwen3_5_text", dict(linear_conv_kernel_dim=1), "linear_conv_kernel_dim is 1; it must be a whole number of"),
        ("qwen3_5_text", dict(layer_types=["sliding_attention"] * 4), "it must name one of linear_attention, full_at"),
        ("qwen3_5_text", dict(layer_types=None, full_attention_interval=0), "full_attention_interval is 0; it must be"),
        ("qwen3_5_text", dict(attn_output_gate=False), "attn_output_gate is False; only True is supported"),
        ("qwen3_5_moe_text", dict(mlp_only_layers=[1]), r"mlp_only_layers is \[1\]; only \[\] is supported"),
        ("qwen3_5_moe_text", dict(norm_topk_prob=False), "norm_topk_prob is False; only True is supported"),
        ("qwen3_next", dict(shared_expert_intermediate_size=0), "shared_expert_intermediate_size is 0; it must be a"),
        ("qwen3_next", dict(linear_key_head_dim=8), r"qkvz.weight has shape \[256, 64\], but .* \[224, 64\]"),
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_is_refused_by_name(tmp_path, folders, family, values, message):
    change(linked(folders[family][0], tmp_path / "changed"), **values)
    with pytest.raises(UserError, match=message):
        load_model(tmp_path / "changed")


MIXERS = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"]
"""For Qwen3-Next, whose feed-forwards' names peft takes for those of its experts."""


def adapted(model, targets="all-linear"):
    """With peft's adapter, moved, whose rank is more than the heads of linear attention."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=6, lora_alpha=12, target_modules=targets)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in adapted.named_parameters():
            if "lora_" in name:
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return adapted


@pytest.mark.parametrize(("family", "targets"), [("qwen3_5_text", "all-linear"), ("qwen3_next", MIXERS)])
def test_pefts_adapter_of_all_linear_layers_is_ours_read_and_merged(tmp_path, folders, family, targets):
    folder, model = folders[family]
    theirs = adapted(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"), targets)
    with torch.no_grad():
        plain, expected = model(TOKENS[None]).logits[0], theirs(TOKENS[None]).logits[0]
    assert (plain - expected).abs().max() > 0.1
    theirs.save_pretrained(tmp_path / "adapter")
    lora = read_config(tmp_path / "adapter").lora
    ours = LoraConfig().targets if targets == "all-linear" else ("*_attn.*",)
    everything = lora_of(read_config(folder), 6, 12.0, ours)
    assert lora.rank == 6 and sorted(lora.modules) == sorted(everything.modules)
    torch.testing.assert_close(logits(tmp_path / "adapter"), expected, rtol=TOLERANCE, atol=TOLERANCE)
    convert(tmp_path / "adapter", tmp_path / "merged", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS[None]).logits[0], expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("family", HYBRID)
def test_peft_reads_our_adapter_of_all_layers(tmp_path, folders, family):
    folder, _ = folders[family]
    shape = read_config(folder)
    targets = ("*_attn.*",) if family == "qwen3_next" else LoraConfig().targets
    model = Decoder(replace(shape, lora=lora_of(shape, 6, 12.0, targets)), torch.float32)
    begin_adapter(model, folder, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(0.005) if ".lora_B." in name else None
    save_adapter(model, tmp_path / "adapter", folder)
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits(tmp_path / "adapter"), expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_an_adapter_of_the_shared_experts_gate_is_refused_by_name(tmp_path, folders):
    base = AutoModelForCausalLM.from_pretrained(folders["qwen3_5_moe_text"][0])
    adapted(base).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match=r"adapts layers.0.mlp.shared_expert_gate, but only .* can have an adapter"):
        load_model(tmp_path / "adapter")


@pytest.mark.parametrize("family", HYBRID)
def test_fresh_weights_are_distributed_as_those_of_transformers(family):
    wide = replace(preset(f"{FAMILY[family]}:micro"), num_layers=2, delta_layers=(True, False))
    wide = replace(wide, delta=replace(wide.delta, key_heads=256, value_heads=512, key_dim=2, value_dim=2))
    ours = dict(build_model(wide, "float32", seed=4).named_parameters())
    config = AutoConfig.for_model(**to_hugging_face(wide, "float32"))
    model = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    for name, tensor in ours.items():
        there = model.get(f"model.{name}")
        if there is None or name.endswith("conv1d.weight"):  # stacked experts; uniform, with the reason there
            continue
        if name.endswith("A_log"):
            assert ks_distance(tensor.exp(), there.exp()) < 1.63 * (2 / 512) ** 0.5  # for a chance of 1 %
            assert tensor.exp().min() > 0.0099 and tensor.exp().max() < 16
        elif tensor.ndim == 1:
            assert torch.equal(tensor, there), name
        elif "out_proj" not in name and "down_proj" not in name and "o_proj" not in name and tensor.numel() > 4096:
            assert tensor.std().item() == pytest.approx(there.std().item(), rel=0.05), name
    filters = ours["layers.0.linear_attn.conv1d.weight"]
    assert filters.abs().max() <= 0.5 and filters.std().item() == pytest.approx(3**-0.5 / 2, rel=0.03)


def ks_distance(a, b):
    """Kolmogorov's and Smirnov's: the greatest difference of two samples' distributions."""
    a, b = (np.sort(each.detach().numpy()) for each in (a, b))
    both = np.concatenate((a, b))
    return np.abs(np.searchsorted(a, both, "right") / len(a) - np.searchsorted(b, both, "right") / len(b)).max()


def test_a_folder_in_fp8_whose_narrow_layers_are_not_is_read(tmp_path, folders):
    """As Qwen publishes them: also the scales of the layers that predict further tokens are there."""
    folder = folders["qwen3_next"][0]
    save_model(load_model(folder, dtype="bfloat16"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    stored, kept = dict(weights), ("in_proj_ba.weight", "shared_expert_gate.weight", "mlp.gate.weight")
    for name, weight in weights.items():
        if weight.ndim == 2 and "layers." in name and not name.endswith(kept):
            stored |= {name: (weight * 100).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.full((1, 1), 0.25)}
            weights[name] = stored[name].bfloat16() / 4
    further = {"mtp.fc.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn), "mtp.fc.weight_scale_inv": torch.ones(1, 1)}
    save_file(stored | further, tmp_path / "model.safetensors")
    change(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [256, 256]})
    save_model(load_model(tmp_path), tmp_path / "plain")
    found = load_file(tmp_path / "plain" / "model.safetensors")
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weight) for name, weight in weights.items())
    assert "in_proj_qkvz.weight_scale_inv" in "".join(stored)


def test_filters_of_the_convolution_are_vectors_to_optimizers():
    model = Decoder(preset("qwen3_5:micro"), torch.float32, "meta")
    shapes = {name: parameter.shape for name, parameter in model.named_parameters() if "layers.0." in name}
    settings = settings_of(shapes, TrainConfig(optimizer="muon", weight_decay=0.1))
    muon = {name.removeprefix("layers.0.") for name, each in settings.items() if each.optimizer == "muon"}
    layers = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    projections = {f"linear_attn.{name}.weight" for name in layers}
    assert muon == projections | {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert settings["layers.0.linear_attn.conv1d.weight"].weight_decay == 0


def test_narrow_layers_stay_in_the_models_dtype():
    model = Decoder(preset("qwen3_5:micro"), torch.float32, "meta")
    names = {name.removeprefix("layers.1.linear_attn.") for name in model.formatted_weights() if "layers.1.l" in name}
    assert names == {"in_proj_qkv", "in_proj_z", "out_proj"}


def test_config_json_has_what_transformers_writes(folders):
    for family, (folder, _) in folders.items():
        values = json.loads((folder / "config.json").read_text())
        ours = to_hugging_face(read_config(folder), "float32")
        assert {key: ours[key] for key in values.keys() & ours.keys()} == {
            key: value for key, value in values.items() if key in ours
        }, family
