"""Folders whose weights are stored quantized are read to the values that the packages have for them."""

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from lockstep import build_model, load_model, save_model
from lockstep.checkpoint.convert import convert
from lockstep.model import folder_dtype, preset
from lockstep.model.compressed_tensors import Packed
from lockstep.model.scaled import Scaled
from tests.model.in_memory import InMemory
from tests.model.quantized_folders import (
    FP8,
    TORCHAO,
    compressed,
    each,
    fp8,
    grid,
    mxfp8,
    packed,
    quantize,
    settings_of,
    torchao,
)
from tests.model.test_families import change

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def assert_same_bits(one, other):
    """Also of zeros and NaN."""
    assert one.dtype == other.dtype and torch.equal(one.view(BITS[one.dtype]), other.view(BITS[one.dtype]))


@st.composite
def places(draw, shape):
    ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return tuple(slice(start, stop) for start, stop in ends)


@given(st.data(), st.integers(0, 2**32))
def test_any_place_of_a_weight_has_the_scales_of_its_blocks(data, seed):
    draw = torch.Generator().manual_seed(seed)
    shape = data.draw(st.tuples(st.integers(1, 20), st.integers(1, 40)))
    block = data.draw(st.tuples(st.integers(0, 9), st.integers(0, 17)))
    codes = torch.randint(-128, 128, shape, generator=draw, dtype=torch.int8)
    scales = torch.randn(grid(shape, block), generator=draw)
    zeros = torch.randint(-8, 8, scales.shape, generator=draw, dtype=torch.int8) if data.draw(st.booleans()) else None
    shifted = codes.float() - (0 if zeros is None else each(zeros, shape, block).float())
    weight = Scaled("w", InMemory(codes), InMemory(scales), block, zeros if zeros is None else InMemory(zeros))
    place = data.draw(places(shape))
    assert_same_bits(weight[place], (shifted * each(scales, shape, block))[place].contiguous())
    assert_same_bits(weight[place[:1]], (shifted * each(scales, shape, block))[place[:1]].contiguous())


@given(st.data(), st.integers(0, 2**32), st.sampled_from([4, 8]))
def test_any_place_of_packed_numbers_can_be_read(data, seed, bits):
    shape = data.draw(st.tuples(st.integers(1, 10), st.integers(1, 40)))
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), shape, generator=draw, dtype=torch.int8)
    place = data.draw(places(shape))
    assert torch.equal(Packed(InMemory(packed(numbers, bits)), bits, list(shape), -1)[place], numbers[place].int())
    across = InMemory(packed(numbers.T.contiguous(), bits).T)
    assert torch.equal(Packed(across, bits, list(shape), -2)[place], numbers[place].int())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_of_float8_at_many_scales_is_transformers(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).expand(300, 256).contiguous()
    scales = torch.randn(300, 1, generator=torch.Generator().manual_seed(0)).exp()
    scales[:4, 0] = torch.tensor([0.0, -0.0, 2.0**-140, 1e38])
    theirs = Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=dtype)
    assert_same_bits(Scaled("w", InMemory(codes), InMemory(scales), (1, 0))[()].to(dtype), theirs)
    exponents = torch.arange(255, dtype=torch.uint8)[:, None]
    theirs = Fp8Dequantize(None)._dequantize_one(codes[:255], exponents, output_dtype=dtype)
    for each_type in (exponents, exponents.view(torch.float8_e8m0fnu)):
        assert_same_bits(Scaled("w", InMemory(codes[:255]), InMemory(each_type), (1, 0))[()].to(dtype), theirs)


@pytest.mark.parametrize("block", [[32, 32], None])
def test_a_float8_folder_is_read_as_transformers_reads_it(tmp_path, block):
    save_model(build_model(preset("qwen3:micro", 100), dtype="bfloat16", seed=0), tmp_path)
    settings = SimpleNamespace(weight_block_size=block, scale_fmt="float")
    quantizer = Fp8Quantize(SimpleNamespace(quantization_config=settings))
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors |= quantizer._quantize_one(name, tensors[name])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    change(tmp_path, quantization_config=FP8 | {"weight_block_size": block})
    dequantize = FineGrainedFP8Config(weight_block_size=block, dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=dequantize)
    expected = theirs.state_dict()
    for name, parameter in load_model(tmp_path, "bfloat16").named_parameters():
        assert torch.equal(parameter, expected[f"model.{name}"]), name


def _is_quantized(name):
    return name.endswith("_proj.weight") and "o_proj" not in name


FORMS = {
    "float8 in blocks": (FP8, fp8((32, 48))),
    "float8 with one scale": (FP8 | {"weight_block_size": None}, fp8((0, 0))),
    "float8 of vLLM": ({"quant_method": "fp8"}, fp8((0, 0), torch.float32, "_scale")),
    "float8 with powers of two": (FP8 | {"scale_fmt": "ue8m0"}, fp8((32, 48), torch.uint8)),
    "mxfp8-quantized": (settings_of("mxfp8-quantized", 8, (1, 32), kind="float"), mxfp8),
    "torchao int8": (TORCHAO, *torchao("Int8Tensor", (1, 0))),
    "torchao int4": (TORCHAO, *torchao("IntxUnpackedToInt8Tensor", (1, 32), torch.bfloat16)),
    "torchao float8": (TORCHAO, *torchao("Float8Tensor", (0, 0))),
} | {
    f"{form}: {kind}{bits} in {block}{'' if symmetric else ' with zero points'}": (
        settings_of(form, bits, block, symmetric, kind),
        compressed(form, bits, block, symmetric, kind),
    )
    for form, bits, block, symmetric, kind in (
        ("pack-quantized", 4, (1, 32), True, "int"),
        ("pack-quantized", 4, (1, 32), False, "int"),
        ("pack-quantized", 4, (1, 0), False, "int"),
        ("pack-quantized", 8, (1, 16), False, "int"),
        ("pack-quantized", 8, (0, 0), True, "int"),
        ("int-quantized", 8, (1, 0), True, "int"),
        ("int-quantized", 8, (1, 0), False, "int"),
        ("naive-quantized", 8, (1, 0), True, "float"),
        ("float-quantized", 8, (0, 0), True, "float"),
        ("float-quantized", 8, (48, 64), True, "float"),
    )
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_every_form_are_read_and_converted_and_others_stay(tmp_path, form):
    settings, parts, *describe = FORMS[form]
    weights = quantize(tmp_path / "one", "qwen3:micro", settings, parts, 1, _is_quantized, *describe)
    model = load_model(tmp_path / "one")
    assert model.dtype == folder_dtype(tmp_path / "one") == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert_same_bits(parameter.detach(), weights[f"model.{name}"].bfloat16())
    convert(tmp_path / "one", tmp_path / "two")
    assert "quantization_config" not in json.loads((tmp_path / "two" / "config.json").read_text())
    for name, tensor in load_file(tmp_path / "two" / "model.safetensors").items():
        assert_same_bits(tensor, weights[name].bfloat16())


def test_weights_are_exact_in_float32(tmp_path):
    weights = quantize(tmp_path, "qwen3:micro", FP8, fp8((32, 48)))
    for name, parameter in load_model(tmp_path, "float32").named_parameters():
        assert_same_bits(parameter.detach(), weights[f"model.{name}"].float())


def test_a_weight_is_stored_as_the_group_whose_shapes_its_parts_have(tmp_path):
    four, eight = settings_of("pack-quantized", 4, (1, 32), False), settings_of("pack-quantized", 8, (1, 0))
    whole = settings_of("float-quantized", 8, (1, 0), kind="float")
    groups = [each["config_groups"]["group_0"] | {"format": each["format"]} for each in (eight, whole, four)]
    settings = four | {"format": "mixed-precision", "config_groups": dict(zip("abc", groups))}
    forms = {
        "self_attn": compressed("float-quantized", 8, (1, 0), kind="float"),
        "down_proj": compressed("pack-quantized", 8, (1, 0)),
        "_proj": compressed("pack-quantized", 4, (1, 32), False),
    }

    def parts(name, shape, draw):
        return next(form for key, form in forms.items() if key in name)(name, shape, draw)

    weights = quantize(tmp_path, "qwen3:micro", settings, parts)
    for name, parameter in load_model(tmp_path).named_parameters():
        assert_same_bits(parameter.detach(), weights[f"model.{name}"])


def test_experts_and_latent_attention_are_read_from_shards_that_part_codes_and_scales(tmp_path):
    # 96 rows of compressed keys in blocks of 64: as in DeepSeek-V3, the last block is incomplete.
    settings = FP8 | {"weight_block_size": [64, 32]}
    weights = quantize(tmp_path, "deepseek_v3:micro", settings, fp8((64, 32)), 2, lambda name: "_proj" in name)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    places = {name: "b.safetensors" if name.endswith("_scale_inv") else "a.safetensors" for name in tensors}
    tensors |= {name.replace("weight_scale_inv", "input_scale"): torch.ones(1) for name in places if "scale" in name}
    for file in ("a.safetensors", "b.safetensors"):
        save_file({n: t for n, t in tensors.items() if places.get(n, "a.safetensors") == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    save_model(load_model(tmp_path), tmp_path / "saved")
    for name, tensor in load_file(tmp_path / "saved" / "model.safetensors").items():
        expected = weights[name] if name.endswith("bias") else weights[name].bfloat16()
        assert torch.equal(tensor, expected), name
