"""Quantized folders that are damaged, or in forms that are not read: refused by name."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lockstep import load_model
from lockstep.errors import UserError
from tests.model.quantized_folders import FP8, TORCHAO, compressed, fp8, quantize, settings_of, torchao
from tests.model.test_families import change


@pytest.fixture(scope="module")
def float8_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("float8")
    quantize(folder, "qwen3:micro", FP8, fp8((32, 48)))
    return folder


@pytest.fixture(scope="module")
def int4_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("int4")
    quantize(folder, "qwen3:micro", INT4, compressed("pack-quantized", 4, (1, 32), False))
    return folder


@pytest.mark.parametrize(
    ("kind", "edit", "message"),
    [
        (
            "Int4Tensor",
            {},
            "down_proj.weight is torchao's Int4Tensor in I8; .* only Int8Tensor, .*dequantize",
        ),
        (
            "Float8Tensor",
            {"_weight_qdata": torch.zeros(384, 128)},
            "is torchao's Float8Tensor in F32; of its classes",
        ),
        ("Int8Tensor", {"_weight_scale": None}, r"mlp\.up_proj\._weight_scale is missing"),
        ("Int8Tensor", {"_weight_act_pre_scale": torch.ones(128)}, "_weight_act_pre_scale is not part of this model"),
        (None, {}, "down_proj.weight is not described in the file's metadata as torchao does"),
    ],
)
def test_what_is_wrong_with_a_folder_of_torchao_is_named(tmp_path, kind, edit, message):
    parts, describe = torchao(kind, (1, 0))
    quantize(tmp_path, "qwen3:micro", TORCHAO, parts, describe=describe if kind else lambda shape: '{"_type": 1}')
    described = safe_open(tmp_path / "model.safetensors", "pt").metadata()
    changed = {NAME.replace(".weight", f".{part}"): tensor for part, tensor in edit.items()}
    tensors = load_file(tmp_path / "model.safetensors") | changed
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, tmp_path / "model.safetensors", metadata=described)
    with pytest.raises(UserError, match=message):
        load_model(tmp_path)


def assert_refused(folder, source, settings, edit, message):
    tensors = load_file(source / "model.safetensors") | edit
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    change(folder, quantization_config=settings)
    with pytest.raises(UserError, match=message):
        load_model(folder)


NAME = "model.layers.0.mlp.up_proj.weight"
INT4 = settings_of("pack-quantized", 4, (1, 32), False)
SPARSE = {"format": "sparse-24-bitmask"}


@pytest.mark.parametrize(
    ("settings", "edit", "message"),
    [
        (FP8, {f"{NAME}_scale_inv": None}, f"{NAME} is F8_E4M3, but {NAME}_scale_inv is missing"),
        (FP8, {f"{NAME}_scale_inv": torch.ones(2, 3)}, r"up_proj.weight has .* need \[12, 3\]"),
        (FP8 | {"weight_block_size": [0, 32]}, {}, r"weight_block_size is \[0, 32\]"),
        (FP8 | {"fmt": "e5m2"}, {}, "quantization_config: fmt is 'e5m2'; only 'e4m3' is supported"),
        (FP8 | {"expert_dtype": "fp4"}, {}, "expert_dtype is 'fp4'"),
        (FP8, {NAME: torch.ones(3).to(torch.float8_e4m3fn)}, "only matrices can be quantized"),
        (
            {"quant_method": "gptq"},
            {},
            r"'gptq'\), .*\(supported: fp8, compressed-tensors, torchao, unq.*dequantize=True",
        ),
        ({"quant_method": "mxfp4"}, {}, r"\('mxfp4'\), which is not supported"),
        (None, {}, "scale_inv is part of a quantized weight, but config.json does not say how"),
    ],
)
def test_what_is_wrong_with_a_float8_folder_is_named(tmp_path, float8_folder, settings, edit, message):
    assert_refused(tmp_path, float8_folder, settings, edit, message)


def _with(**weights):
    group = INT4["config_groups"]["group_0"]
    return INT4 | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


@pytest.mark.parametrize(
    ("settings", "edit", "message"),
    [
        (INT4 | {"format": "nvfp4-pack-quantized"}, {}, "format is 'nvfp4-pack-quantized'; only pack-quantized, int-q"),
        (INT4 | {"sparsity_config": SPARSE}, {}, "sparsity_config is not supported"),
        (INT4 | {"transform_config": {"config_groups": {"R1": {}}}}, {}, "transform_config is not supported"),
        (INT4 | {"config_groups": ["Linear"]}, {}, "config_groups is .*it must be a table"),
        (_with(num_bits=3), {}, "group_0: weights are int3 with .* in pack-quantized only int4, int8"),
        (_with(strategy="tensor_group"), {}, "int4 with a scale per tensor_group"),
        (_with(group_size=-2), {}, "group_size is .1, -2."),
        (_with(type=[], strategy={"a": 1}, num_bits={}), {}, r"weights are \[\]\{\} with a scale per"),
        (INT4 | {"format": ["pack-quantized"]}, {}, r"format is \['pack-quantized'\]"),
        (
            _with(group_size=64),
            {},
            r"is I32 \[128, 48\] with scales \[128, 12\] and zero points \[16, 12\]",
        ),
        (INT4, {f"{NAME}_zero_point": None}, r"up_proj.weight is I32 .*\] and no zero points, which fits none of"),
        (INT4, {f"{NAME}_zero_point": torch.ones(1, 4).int()}, r"zero points \[1, 4\], which fits none of"),
        (INT4, {f"{NAME}_packed": None}, f"{NAME}_packed is missing, but {NAME}_scale is there"),
        (INT4, {f"{NAME}_shape": torch.tensor([7, 128])}, "up_proj.weight is I32 .* which fits none of config_groups"),
        (INT4, {f"{NAME}_shape": torch.tensor(7)}, "up_proj.weight has shape 7; only matrices"),
        (INT4, {f"{NAME}_shape": torch.ones(2, 2)}, r"up_proj.weight has shape \[\[1.0, 1.0\], .* only matrices"),
        (INT4, {f"{NAME}_g_idx": torch.zeros(128)}, r"groups ordered by activation \(actorder\) are not supported"),
    ],
)
def test_what_is_wrong_with_a_folder_of_compressed_tensors_is_named(tmp_path, int4_folder, settings, edit, message):
    assert_refused(tmp_path, int4_folder, settings, edit, message)
