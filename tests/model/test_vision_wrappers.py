"""Models with a vision tower against transformers: their language model is read, converted and merged in its place."""

import json
import re
import shutil
from dataclasses import replace

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

from lockstep import load_model, ops, save_model
from lockstep.checkpoint.convert import convert
from lockstep.config import PrecisionConfig
from lockstep.errors import UserError
from lockstep.model import Decoder, begin_adapter, lora_of, read_config, save_adapter
from lockstep.model.families import from_hugging_face
from lockstep.model.vision_wrapper import WRAPPERS as MODEL_TYPES
from tests.model.quantized_folders import FP8, compressed, each, grid, settings_of
from tests.model.test_families import change

# Both sides sum in float32, in different orders, through three layers to logits of order 1.
TOLERANCE = 1e-4
TOWER = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
PIXTRAL = dict(vision_config=TOWER | {"model_type": "pixtral", "head_dim": 8}, image_token_index=99)
QUERIES = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
SIZES = dict(
    vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, pad_token_id=0,
)  # fmt: skip
QWEN = SIZES | dict(
    pad_token_id=None, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24,
    rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]},
)  # fmt: skip
MIXTURE = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48, shared_expert_intermediate_size=40)
QWEN_TOWER = dict(
    depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=64, num_position_embeddings=16,
    patch_size=4,
)  # fmt: skip
IMAGES = dict(
    vision_config=QWEN_TOWER, image_token_id=99, video_token_id=98, vision_start_token_id=97, vision_end_token_id=100
)  # fmt: skip
WRAPPERS = {
    "qwen3_5": IMAGES | dict(text_config=QWEN, tie_word_embeddings=True),
    "qwen3_5_moe": IMAGES | dict(text_config=QWEN | MIXTURE),
    "gemma3": dict(
        text_config=SIZES | dict(model_type="gemma3_text", sliding_window=20, sliding_window_pattern=2),
        vision_config=TOWER | {"model_type": "siglip_vision_model"}, mm_tokens_per_image=4,
        image_token_index=99, boi_token_index=98, eoi_token_index=97,
    ),
    "ministral3": PIXTRAL | dict(
        text_config=SIZES | dict(model_type="ministral3", rope_parameters=QUERIES, max_position_embeddings=128),
    ),
    "mistral": PIXTRAL | dict(
        text_config=SIZES | dict(model_type="mistral", sliding_window=None), tie_word_embeddings=False
    ),
}  # fmt: skip
FORMS = {
    "old": ("language_model.model.", "language_model.lm_head.", ""),
    "new": ("model.language_model.", "lm_head.", "model."),
    "headless": ("language_model.", "lm_head.", ""),
}
"""Prefixes of the language model, its head, and the other parts: `save_pretrained`'s of older classes; those in the
model of newer transformers; `save_pretrained`'s of the class without a head."""
NAMED = [(name, form) for name in WRAPPERS for form in FORMS if form != "old" or "qwen" not in name]
TOKENS = torch.randint(97, (90,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def wrappers(tmp_path_factory):
    """A folder of each, as transformers saves it, with other files that belong to it, and its logits of `TOKENS`."""
    home = tmp_path_factory.mktemp("wrappers")
    return {name: (home / name, _save(name, home / name)) for name in WRAPPERS}


@torch.no_grad()
def _save(name, folder):
    torch.manual_seed(0)
    outer = name if name in MODEL_TYPES else "mistral3"
    config = AutoConfig.for_model(outer, **WRAPPERS[name])
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    for key, tensor in model.named_parameters():
        if not key.endswith("A_log"):
            tensor.normal_(0, 0.15) if tensor.ndim > 1 else tensor.add_(0.2 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    for file in ("preprocessor_config.json", "processor_config.json", "chat_template.jinja"):
        (folder / file).write_text("{}")
    return model(TOKENS[None]).logits[0]


def in_form(folder, target, form):
    """A copy of the folder with names in one of `FORMS`."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    saved = "new" if any(name.startswith(FORMS["new"][0]) for name in tensors) else "old"
    save_file({_renamed(name, saved, form): tensor for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def _renamed(name, saved, form):
    for old, new in zip(FORMS[saved], FORMS[form]):
        if name.startswith(old):
            return new + name.removeprefix(old)


@torch.no_grad()
def logits(folder):
    model = load_model(folder)
    return model.logits(model(TOKENS, torch.arange(len(TOKENS)), ops.PackedAttention([len(TOKENS)])))


@torch.no_grad()
def wrappers_logits(folder):
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    return model(TOKENS[None]).logits[0]


def tensors_of(folder):
    return {name: part for file in sorted(folder.glob("*.safetensors")) for name, part in load_file(file).items()}


def edit(folder, **changes):
    """Of the tensors: other values, or None for none."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors")


def edit_text(folder, **values):
    change(folder, text_config=json.loads((folder / "config.json").read_text())["text_config"] | values)


@pytest.mark.parametrize(("name", "form"), NAMED)
def test_the_language_model_has_the_logits_of_the_whole_model(tmp_path, wrappers, caplog, name, form):
    folder, expected = wrappers[name]
    there = in_form(folder, tmp_path / "there", form)
    torch.testing.assert_close(logits(there), expected, rtol=TOLERANCE, atol=TOLERANCE)
    around = [n for n in load_file(there / "model.safetensors") if re.search("vision_tower|projector|visual", n)]
    said = [line for line in caplog.text.splitlines() if "not used by this model" in line]
    assert len(said) == 1 and f"tensor {sorted(around)[0]} (and {len(around) - 1} more)" in said[0]


ALONE = {
    "gemma3": "Gemma3ForCausalLM", "ministral3": "Ministral3ForCausalLM", "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_the_language_model_is_written_alone(tmp_path, wrappers, name):
    folder, expected = wrappers[name]
    save_model(load_model(folder), tmp_path / "alone")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "alone", attn_implementation="eager").eval()
    assert type(model).__name__ == ALONE[name]
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS[None]).logits[0], expected, rtol=TOLERANCE, atol=TOLERANCE)


OUTER = [
    {"tie_word_embeddings": ...},
    {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}},
    {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}},
    {"eos_token_id": [7, 8], "bos_token_id": 5, "text_config": {"eos_token_id": 3}},
    {"text_config": {"eos_token_id": ...}},
    {"text_config": {"eos_token_id": None, "pad_token_id": 6}},
    {"pad_token_id": 4, "eos_token_id": None, "text_config": {"eos_token_id": 3}},
    {"text_config": {"model_type": ...}},
    {"text_config": {"num_attention_heads": ..., "hidden_size": ..., "rms_norm_eps": ...}},
]


@pytest.mark.parametrize("values", OUTER, ids=str)
@pytest.mark.parametrize("name", ["gemma3", "mistral", "qwen3_5"])
def test_settings_are_those_that_transformers_takes_from_either_place(tmp_path, wrappers, name, values):
    config = json.loads((wrappers[name][0] / "config.json").read_text())
    config["text_config"] |= values.get("text_config", {})
    config |= {key: value for key, value in values.items() if key != "text_config"}
    for part in (config, config["text_config"]):
        for key in [key for key, value in part.items() if value is ...]:
            del part[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours, outer = from_hugging_face(config, "config.json"), AutoConfig.from_pretrained(tmp_path)
    text, tokens = outer.text_config, GenerationConfig.from_model_config(outer)
    assert ours.family == name
    assert ours.tie_embeddings is outer.tie_word_embeddings, "which its head is tied by"
    ends = tokens.eos_token_id if isinstance(tokens.eos_token_id, list) else [tokens.eos_token_id]
    assert list(ours.eos_token_ids) == [token for token in ends if token is not None]
    assert (ours.bos_token_id, ours.pad_token_id) == (tokens.bos_token_id, tokens.pad_token_id)
    assert (ours.dim, ours.num_heads, ours.norm_eps) == (text.hidden_size, text.num_attention_heads, text.rms_norm_eps)


def test_a_head_of_its_own_counts_though_the_outer_settings_tie_it(tmp_path, wrappers):
    shutil.copytree(wrappers["gemma3"][0], there := tmp_path / "there")
    edit(there, **{"language_model.lm_head.weight": torch.randn(101, 64)})
    expected = wrappers_logits(there)
    assert (expected - wrappers["gemma3"][1]).abs().max() > 1
    torch.testing.assert_close(logits(there), expected, rtol=TOLERANCE, atol=TOLERANCE)
    convert(there, tmp_path / "converted")
    config = json.loads((tmp_path / "converted" / "config.json").read_text())
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is False
    assert torch.equal(wrappers_logits(tmp_path / "converted"), expected)


EMBEDDING, LAYER = "language_model.model.embed_tokens.weight", "language_model.model.layers.1."


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: edit(f, **{LAYER + "mlp.up_proj.weight": None}), "layers.1.mlp.up_proj.weight is missing"),
        (lambda f: edit(f, **{EMBEDDING: None}), "embed_tokens.weight is missing"),
        (lambda f: edit(f, **{LAYER + "odd.weight": torch.ones(2)}), "layers.1.odd.weight is not part of this model"),
        (lambda f: edit(f, **{"language_model.odd": torch.ones(2)}), "tensor model.odd is not part of this model"),
        # Names that transformers does not look for in a wrapper.
        (lambda f: edit(f, **{EMBEDDING: None, "model.embed_tokens.weight": torch.ones(101, 64)}), "is missing"),
        # A tensor under both names.
        (lambda f: edit(f, **{"model.language_model.norm.weight": torch.ones(64)}), "norm.weight is missing"),
        (lambda f: change(f, text_config=None), "text_config is None; it must have the settings"),
        (lambda f: change(f, text_config=[]), r"text_config is \[\]; it must have the settings"),
        (lambda f: edit_text(f, hidden_act="gelu"), "config.json: text_config: hidden_act is 'gelu'"),
        (lambda f: edit_text(f, sizes=3), "config.json: text_config: key sizes is not known for mistral"),
        (lambda f: edit_text(f, model_type="llama4_text"), 'text_config: model_type "llama4_text" is not supported'),
        (lambda f: change(f, model_type="llava"), "inside a larger one .Mistral3ForConditionalGeneration., which is"),
        (
            lambda f: change(f, architectures=["Mistral3ForSequenceClassification"]),
            "larger one .Mistral3ForSequenceClassification., which is not supported; save the language model in a sep",
        ),
        (lambda f: change(f, tie_word_embeddings="yes"), "tie_embeddings is 'yes', which is not of type bool"),
    ],
)  # fmt: skip
def test_what_cannot_be_the_language_model_is_refused_by_name(tmp_path, wrappers, damage, message):
    shutil.copytree(wrappers["mistral"][0], there := tmp_path / "there")
    damage(there)
    with pytest.raises(UserError, match=message):
        load_model(there)


@pytest.mark.parametrize("kind", ["Qwen3VL", "Llama4"])
def test_another_language_model_is_refused_by_its_own_name(tmp_path, kind):
    types = {"Qwen3VL": "qwen3_vl_text", "Llama4": "llama4_text"}
    outer = {"architectures": [f"{kind}ForConditionalGeneration"], "model_type": types[kind].removesuffix("_text")}
    inner = {"model_type": types[kind], "hidden_size": 64}
    messages = []
    for where, values in (("a: text_config", outer | {"text_config": inner}), ("a", inner)):
        with pytest.raises(UserError) as refused:
            from_hugging_face(values, "a")
        messages.append(str(refused.value).removeprefix(where))
    assert messages[0] == messages[1] and f'model_type "{types[kind]}" is not supported' in messages[0]
    with pytest.raises(UserError, match=f"inside a larger one .{kind}ForConditionalGeneration., which is not"):
        from_hugging_face(outer | {"text_config": {"hidden_size": 64}}, "a")


@pytest.mark.parametrize(("name", "form"), NAMED)
def test_a_converted_model_keeps_its_vision_tower(tmp_path, wrappers, name, form):
    folder, expected = wrappers[name]
    there = in_form(folder, tmp_path / "there", form)
    change(there, torch_dtype="float32", eos_token_id=[1, 2])
    edit(there, **{f"{FORMS[form][2]}vision_tower.half": torch.ones(3).half(), "counts": torch.tensor(3)})
    convert(there, tmp_path / "half", "bfloat16", max_file_bytes=30_000)
    convert(tmp_path / "half", tmp_path / "again", "float32")
    one, half, again = (tensors_of(tmp_path / each) for each in ("there", "half", "again"))
    assert one.keys() == half.keys() == again.keys()
    for key, tensor in one.items():
        ours = key.startswith((*FORMS[form][:2], "lm_head"))
        assert torch.equal(half[key], tensor.bfloat16() if ours else tensor), key
        assert half[key].dtype == (torch.bfloat16 if ours else tensor.dtype)
        assert again[key].dtype == tensor.dtype and torch.equal(again[key], half[key].to(tensor.dtype))

    config, changed = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("there", "half"))
    assert changed.pop("dtype") == changed.pop("torch_dtype") == "bfloat16"
    text = changed.pop("text_config")
    assert changed == {k: v for k, v in config.items() if k not in ("dtype", "torch_dtype", "text_config")}
    assert text["model_type"] == config["text_config"]["model_type"] and text["dtype"] == "bfloat16"
    assert read_config(tmp_path / "half") == read_config(there)
    for file in ("preprocessor_config.json", "processor_config.json", "chat_template.jinja"):
        assert (tmp_path / "half" / file).read_bytes() == (there / file).read_bytes()
    if form != "headless":
        convert(there, tmp_path / "same")
        assert torch.equal(wrappers_logits(tmp_path / "same"), expected)


def test_stacked_experts_are_read_and_what_only_other_parts_use_is_kept(tmp_path, wrappers):
    """As Qwen publishes them: with layers that predict further tokens, and the axes of an image in the rotation."""
    folder, expected = wrappers["qwen3_5_moe"]
    shutil.copytree(folder, there := tmp_path / "there")
    tensors = load_file(there / "model.safetensors")
    single = {name: tensors.pop(name) for name in [*tensors] if re.search(r"experts\.\d", name)}
    for layer in (f"model.language_model.layers.{n}.mlp.experts." for n in range(2)):
        gate, up, down = (
            torch.stack([single[f"{layer}{e}.{kind}_proj.weight"] for e in range(6)]) for kind in ("gate", "up", "down")
        )
        tensors |= {f"{layer}gate_up_proj": torch.cat([gate, up], 1), f"{layer}down_proj": down}
    further = {"mtp.fc.weight": torch.randn(4, 4), "mtp.norm.weight": torch.ones(4)}
    save_file(tensors | further, there / "model.safetensors")
    edit_text(there, mtp_num_hidden_layers=1)
    torch.testing.assert_close(logits(there), expected, rtol=TOLERANCE, atol=TOLERANCE)
    convert(there, tmp_path / "same")
    converted, others = tensors_of(tmp_path / "same"), {n: t for n, t in tensors.items() if "mlp.experts" not in n}
    assert converted.keys() == (others | single | further).keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in (others | single | further).items())
    assert torch.equal(wrappers_logits(tmp_path / "same"), expected)
    text = json.loads((tmp_path / "same" / "config.json").read_text())["text_config"]
    assert text["rope_parameters"]["mrope_section"] == [4, 2, 2] and text["mtp_num_hidden_layers"] == 1


def test_a_quantized_folder_with_a_vision_tower_is_not_written(tmp_path, wrappers):
    with pytest.raises(UserError, match="has a vision tower, .* write the language model alone, with lockstep.save_"):
        convert(wrappers["mistral"][0], tmp_path / "int8", "bfloat16", precision=PrecisionConfig(linear="int8"))
    convert(wrappers["mistral"][0], tmp_path / "kept", precision=PrecisionConfig(cache="int8"))
    assert read_config(tmp_path / "kept").precision.cache == "int8"


def packed_weight(name, tensor):
    """The parts of a weight in int4 with a scale per 32 numbers, by compressed-tensors."""
    return compressed("pack-quantized", 4, (1, 32))(name, tensor.shape, torch.Generator().manual_seed(1))


def float8_weight(name, tensor):
    """The parts of a weight in float8 with a scale per block."""
    block = FP8["weight_block_size"]
    scales = torch.rand(grid(tensor.shape, block)) * 0.01
    codes = (tensor / each(scales, tensor.shape, block)).to(torch.float8_e4m3fn)
    value = (codes.float() * each(scales, tensor.shape, block)).bfloat16()
    return {name: codes, f"{name}_scale_inv": scales}, value


@pytest.mark.parametrize("form", ["old", "new"])
@pytest.mark.parametrize("place", ["outer", "inner"])
@pytest.mark.parametrize(
    ("settings", "stored"), [(FP8, float8_weight), (settings_of("pack-quantized", 4, (1, 32)), packed_weight)]
)
def test_a_quantized_model_is_read_and_converted_with_its_vision_tower(
    tmp_path, wrappers, settings, stored, place, form
):
    there = in_form(wrappers["ministral3"][0], tmp_path / "there", form)
    plain = {name: tensor.bfloat16() for name, tensor in load_file(there / "model.safetensors").items()}
    parts = dict(plain)
    for name in [name for name in plain if "_proj.weight" in name and "layers" in name]:
        made, value = stored(name, parts.pop(name).float())
        parts |= made
        plain[name] = value.bfloat16()
    save_file(parts, there / "model.safetensors")
    change(there, dtype="bfloat16", **({"quantization_config": settings} if place == "outer" else {}))
    if place == "inner":
        edit_text(there, quantization_config=settings)
    convert(there, tmp_path / "plain")
    converted = tensors_of(tmp_path / "plain")
    assert any("vision_tower" in name for name in parts.keys() - plain.keys())
    assert converted.keys() == plain.keys() and all(torch.equal(converted[name], plain[name]) for name in plain)
    assert "quantization_config" not in (tmp_path / "plain" / "config.json").read_text()
    one, two = (load_model(each).state_dict() for each in (there, tmp_path / "plain"))
    assert all(torch.equal(one[name], two[name]) for name in two)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen3_5", r".*language_model.*(q_proj|in_proj_z|in_proj_b|out_proj)"),
        ("gemma3", r".*language_model.*(q_proj|down_proj)"),
        ("ministral3", ["model.language_model.layers.1.self_attn.v_proj", "model.language_model.layers.0.mlp.up_proj"]),
    ],
)
def test_an_adapter_that_peft_trained_on_the_whole_model_is_read_and_merged_into_it(tmp_path, wrappers, name, targets):
    folder = wrappers[name][0]
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets)).eval()
    with torch.no_grad():
        for key, tensor in adapted.named_parameters():
            tensor.normal_(0, 0.1) if "lora_" in key else None
        expected = adapted(TOKENS[None]).logits[0]
    adapted.save_pretrained(tmp_path / "adapter")
    assert all(".language_model." in key for key in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert (expected - wrappers[name][1]).abs().max() > 0.1
    torch.testing.assert_close(logits(tmp_path / "adapter"), expected, rtol=TOLERANCE, atol=TOLERANCE)
    convert(tmp_path / "adapter", tmp_path / "merged", merge=True)
    torch.testing.assert_close(wrappers_logits(tmp_path / "merged"), expected, rtol=TOLERANCE, atol=TOLERANCE)
    before, after = tensors_of(folder), tensors_of(tmp_path / "merged")
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert len(changed) == len(load_model(tmp_path / "adapter").config.lora.modules)
    assert all(re.search(r"language_model\.(model\.)?layers\.", key) for key in changed)
    assert (tmp_path / "merged" / "processor_config.json").is_file()


def test_an_adapter_of_the_language_model_alone_is_merged_into_the_whole_model(tmp_path, wrappers):
    folder = wrappers["ministral3"][0]
    shape = read_config(folder)
    model = Decoder(replace(shape, lora=lora_of(shape, 2, 4.0, ("*_proj",))), torch.float32)
    begin_adapter(model, folder, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(0.02) if ".lora_B." in name else None
    save_adapter(model, tmp_path / "adapter", folder)
    expected = logits(tmp_path / "adapter")
    assert (expected - wrappers["ministral3"][1]).abs().max() > 0.1
    convert(tmp_path / "adapter", tmp_path / "merged", merge=True)
    torch.testing.assert_close(wrappers_logits(tmp_path / "merged"), expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_an_adapter_of_the_vision_tower_is_refused(tmp_path, wrappers):
    model = AutoModelForImageTextToText.from_pretrained(wrappers["gemma3"][0])
    peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["q_proj"])).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="adapts vision_tower.encoder.layers.0.self_attn.q_proj, but only the lang"):
        load_model(tmp_path)
