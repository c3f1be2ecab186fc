"""Writes GGUF files, after the specification, as llama.cpp's conversion would."""

import math
import re
import struct

import torch

from lockstep.model.gguf import IN_LAYER, WHOLE
from tests.model.gguf_types import NUMBER, encode

ALIGNMENT = 32


def string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def value(given):
    """A value of the metadata, after its type."""
    if isinstance(given, bool):
        return struct.pack("<I?", 7, given)
    if isinstance(given, str):
        return struct.pack("<I", 8) + string(given)
    if isinstance(given, int):
        return struct.pack("<II", 4, given)
    if isinstance(given, float):
        return struct.pack("<If", 6, given)
    kind, items = (8, map(string, given)) if isinstance(given[0], str) else (5, (struct.pack("<i", n) for n in given))
    return struct.pack("<IIQ", 9, kind, len(given)) + b"".join(items)


def write_gguf(path, metadata, tensors, version=3):
    """tensors: by name, the type in the file, and the values."""
    header, data = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)), b""
    header += b"".join(string(key) + value(each) for key, each in metadata.items())
    for name, (kind, values) in tensors.items():
        data += bytes(-len(data) % ALIGNMENT)
        header += string(name) + struct.pack("<I", values.ndim)
        header += struct.pack(f"<{values.ndim}Q", *reversed(values.shape)) + struct.pack("<IQ", NUMBER[kind], len(data))
        data += encode(kind, values)
    path.write_bytes(header + bytes(-len(header) % ALIGNMENT) + data)


def permuted(weight, heads):
    """Rows in llama.cpp's order: the halves of each head interleaved."""
    rows = weight.shape[0] // heads
    order = [half * (rows // 2) + row for row in range(rows // 2) for half in (0, 1)]
    return weight[[head * rows + row for head in range(heads) for row in order]]


def llama3_divisors(theta, head_dim, factor):
    """As in llama.cpp's conversion of Llama 3."""
    divisors = []
    for dimension in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (dimension / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(divisors)


def write_model(path, config, tensors, kind="F32", more=None):
    """The tensors of a folder, by Hugging Face's names, matrices in the type `kind`."""
    architecture = {"llama3": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}[config.family]
    metadata = {
        "general.architecture": architecture, "general.alignment": ALIGNMENT,
        "tokenizer.ggml.tokens": [f"t{token}" for token in range(config.vocab_size)],
    }  # fmt: skip
    settings = {
        "context_length": config.max_positions, "embedding_length": config.dim, "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope_theta,
    }  # fmt: skip
    if config.experts is not None:
        settings |= {
            "expert_count": config.experts.count, "expert_used_count": config.experts.routing.active,
            "expert_feed_forward_length": config.experts.intermediate_size,
        }  # fmt: skip
    stored = (
        {}
        if config.rope_scaling is None
        else {
            "rope_freqs.weight": (
                "F32",
                llama3_divisors(config.rope_theta, config.head_dim, config.rope_scaling.factor),
            )
        }
    )
    ends = dict(zip(("eos_token_id", "eot_token_id", "eom_token_id"), config.eos_token_ids))
    metadata |= {f"{architecture}.{key}": each for key, each in settings.items()}
    metadata |= {f"tokenizer.ggml.{key}": token for key, token in ends.items()} | (more or {})
    names = {theirs: ours for ours, theirs in (WHOLE | IN_LAYER).items()}
    for name, tensor in stacked(tensors).items():
        _, _, inside = name.partition("model.layers.")
        layer, _, inner = inside.partition(".")
        full = f"blk.{layer}.{names[inner]}" if inside else names[name]
        heads = {"attn_q.weight": config.num_heads, "attn_k.weight": config.num_kv_heads}.get(names.get(inner, ""))
        if architecture == "llama" and heads:
            tensor = permuted(tensor, heads)
        stored[full] = ("F32" if tensor.ndim == 1 or "gate_inp" in full else kind, tensor)
    write_gguf(path, metadata, stored)


def stacked(tensors):
    """The tensors, with one for the experts of a layer."""
    found, experts = {}, {}
    for name, tensor in tensors.items():
        if of_expert := re.fullmatch(r"(.+\.mlp\.experts\.)(\d+)\.(\w+)\.weight", name):
            experts.setdefault(of_expert[1] + of_expert[3], {})[int(of_expert[2])] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.stack([each[n] for n in sorted(each)]) for name, each in experts.items()}
