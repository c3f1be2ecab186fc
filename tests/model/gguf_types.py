"""The blocks of bytes of GGUF's types, as llama.cpp's quantization writes them."""

import torch

NUMBER = {"F32": 0, "F16": 1, "BF16": 30, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q6_K": 14, "Q4_K": 12}
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34), "Q6_K": (256, 210)}


def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8)


def encode(kind, values):
    """The bytes of a tensor: its values in a plain type, or rounded to a quantized one; of other types, anything."""
    if kind not in BLOCK:
        return bytes_of(values.to(PLAIN.get(kind, torch.float32))).numpy().tobytes()
    blocks = values.float().unflatten(-1, (-1, BLOCK[kind][0]))
    if kind == "Q8_0":
        scales = blocks.abs().amax(-1, keepdim=True) / 127
        codes = torch.where(scales > 0, blocks / scales, 0).round().to(torch.int8)
        return torch.cat((bytes_of(scales.half()), bytes_of(codes)), -1).numpy().tobytes()
    assert kind == "Q4_0"
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scales = largest / -8
    codes = (torch.where(scales != 0, blocks / scales, 0) + 8.5).floor().clamp(0, 15).to(torch.uint8)
    return torch.cat((bytes_of(scales.half()), codes[..., :16] | (codes[..., 16:] << 4)), -1).numpy().tobytes()
