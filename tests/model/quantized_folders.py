"""Folders in the quantized forms of other packages, from the specification of each, and the weights they stand for."""

import json
from dataclasses import replace

import torch
from safetensors.torch import load_file, save_file

from lockstep import build_model, save_model
from lockstep.model import preset

WORD = 32
TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 48], "activation_scheme": "dynamic"}


def packed(numbers, bits):
    """Numbers `[rows, columns]` of `bits` bits in words along the columns, bit by bit: number n begins at bit
    n · bits, with half of the range added."""
    rows, columns = numbers.shape
    words = torch.zeros(rows, -(-columns * bits // WORD), dtype=torch.int64)
    for column in range(columns):
        start = column * bits
        words[:, start // WORD] |= (numbers[:, column].long() + 2 ** (bits - 1)) << (start % WORD)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def each(scales, shape, block):
    """The scale of each value: every scale fills a block, and what is too much of the last blocks is cut off."""
    rows, columns = block[0] or shape[0], block[1] or shape[1]
    return scales.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


def grid(shape, block):
    return -(-shape[0] // (block[0] or shape[0])), -(-shape[1] // (block[1] or shape[1]))


def draw_scales(shape, block, draw, dtype):
    """Of all sizes, with zeros and negative ones among them."""
    scales = 0.02 * torch.randn(grid(shape, block), generator=draw)
    scales[torch.rand(scales.shape, generator=draw) < 0.1] = 0
    return scales.to(dtype)


def float8_codes(shape, draw):
    """All codes but NaN."""
    codes = torch.randint(256, shape, generator=draw, dtype=torch.uint8)
    return torch.where(codes & 127 == 127, codes & 128, codes).view(torch.float8_e4m3fn)


def is_projection(name):
    return name.endswith("_proj.weight")


def quantize(folder, family, settings, parts, layers=1, chosen=is_projection, describe=None):
    """A folder of the family whose matrices are stored as the `parts` of each, drawn by name and shape; returns the
    weights that it stands for. describe: what the file's metadata has of a weight of a shape."""
    save_model(build_model(replace(preset(family, 100), num_layers=layers), dtype="bfloat16", seed=0), folder)
    tensors, weights, metadata = {}, {}, {"format": "pt"}
    draw = torch.Generator().manual_seed(1)
    for name, tensor in load_file(folder / "model.safetensors").items():
        weights[name] = tensor
        stored = {name: tensor}
        if tensor.ndim == 2 and chosen(name):
            stored, weights[name] = parts(name, list(tensor.shape), draw)
            metadata |= {name: describe(tensor.shape)} if describe else {}
        tensors |= stored
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata=metadata)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": settings}))
    return weights


def fp8(block, dtype=torch.float32, suffix="_scale_inv"):
    """The parts of a weight in float8, as DeepSeek's: its value is the product in float32."""

    def parts(name, shape, draw):
        codes, scales = float8_codes(shape, draw), draw_scales(shape, block, draw, dtype)
        if dtype == torch.uint8:
            scales = torch.randint(110, 130, grid(shape, block), generator=draw, dtype=torch.uint8)
            numbers = torch.exp2(scales.double() - 127).float()
        else:
            numbers = scales.float()
        return {name: codes, name + suffix: scales}, codes.float() * each(numbers, shape, block)

    return parts


def compressed(form, bits, block, symmetric=True, kind="int", dtype=torch.bfloat16):
    """The parts of a weight as compressed-tensors stores it; its value is computed in the dtype of its scales, as the
    package does (`_dequantize`)."""

    def parts(name, shape, draw):
        scales = draw_scales(shape, block, draw, dtype)
        half = 2 ** (bits - 1)
        codes = torch.randint(-half, half, shape, generator=draw, dtype=torch.int8)
        codes = float8_codes(shape, draw) if kind == "float" else codes
        zeros = torch.zeros(scales.shape, dtype=torch.int8)
        stored = {name: codes, name + "_scale": scales}
        if form == "pack-quantized":
            stored[name + "_packed"] = packed(stored.pop(name), bits)
            stored[name + "_shape"] = torch.tensor(shape)
        if not symmetric:
            zeros = torch.randint(-half, half, scales.shape, generator=draw, dtype=torch.int8)
            stored[name + "_zero_point"] = packed(zeros.T, bits).T if form == "pack-quantized" else zeros
        value = (codes.to(dtype) - each(zeros, shape, block).to(dtype)) * each(scales, shape, block)
        return stored, value

    return parts


def mxfp8(name, shape, draw):
    """The parts of a weight as compressed-tensors stores MX blocks: e4m3, and an exponent of two per 32 numbers."""
    codes, exponents = float8_codes(shape, draw), torch.randint(1, 247, grid(shape, (1, 32)), generator=draw)
    scales = each(torch.exp2(exponents - 127.0), shape, (1, 32))
    return {name: codes, name + "_scale": exponents.to(torch.uint8)}, codes.float() * scales


def settings_of(form, bits, block, symmetric=True, kind="int"):
    """The settings of compressed-tensors for such weights."""
    strategy = {(0, 0): "tensor", (1, 0): "channel"}.get(block, "group" if block[0] == 1 else "block")
    weights = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy, "dynamic": False}
    weights |= {"group_size": block[1]} if strategy == "group" else {}
    weights |= {"block_structure": list(block)} if strategy == "block" else {}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def torchao(kind, block, dtype=torch.float32):
    """The parts of a weight as transformers saves torchao's `kind` of tensors, and its description in the metadata; its
    value is computed as torchao does: an exact difference, a product in the dtype of the scales."""

    def parts(name, shape, draw):
        scales = draw_scales(shape, block, draw, dtype)
        codes = torch.randint(-128, 128, shape, generator=draw, dtype=torch.int8)
        zeros = torch.randint(-8, 8, scales.shape, generator=draw, dtype=torch.int8)
        stored = {"qdata": codes, "scale": scales, "zero_point": zeros}
        if kind == "Float8Tensor":
            codes, zeros = float8_codes(shape, draw), 0 * zeros
            stored = {"qdata": codes, "scale": scales}
        value = (codes.to(dtype) - each(zeros, shape, block).to(dtype)) * each(scales, shape, block)
        return {name.replace(".weight", f"._weight_{part}"): tensor for part, tensor in stored.items()}, value

    def describe(shape):
        size = [block[0] or shape[0], block[1] or shape[1]]
        return json.dumps({"_type": kind, "_data": {"block_size": size}, "_tensor_data_names": ["qdata", "scale"]})

    return parts, describe
