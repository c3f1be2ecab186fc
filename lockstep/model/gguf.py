"""Models in a GGUF file: the contents of a `config.json` from its metadata, and tensors by Hugging Face's names.

After llama.cpp's conversion/*.py, which is undone here: names, the order of rows in Llama's queries and keys, and
Llama 3's scaling of the rotary frequencies, which is stored as a tensor.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import UserError, closest
from lockstep.model.gguf_file import DAMAGED, GgufFile, GgufTensor, open_gguf
from lockstep.model.stored_tensor import StoredTensor, whole_place

SUFFIX = ".gguf"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM"}
"""Model classes by `general.architecture`."""
MIXTURE = "qwen3moe"
KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Keys of the metadata after the architecture's name, and of `config.json`."""
ROPE_SCALING = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
SOFTMAX = 1
"""llama.cpp's number of the router's function."""
ONLY = {
    "expert_weights_norm": True,
    "expert_gating_func": SOFTMAX,
    "expert_shared_count": 0,
    "leading_dense_block_count": 0,
}
"""Settings with one supported value."""
OTHERS = {"vocab_size", "attention.value_length", "rope.dimension_count", "rope.scaling.finetuned", "pooling_type"}
"""Other keys that are known: without effect, or the same as another one."""
REQUIRED = (
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)  # fmt: skip
EXPERTS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Settings of Llama 3's scaling that all its sizes have; their factors differ."""

ROPE_FREQS, EMBEDDING, HEAD = "rope_freqs.weight", "token_embd.weight", "output.weight"
WHOLE = {EMBEDDING: "model.embed_tokens.weight", HEAD: "lm_head.weight", "output_norm.weight": "model.norm.weight"}
IN_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_exps.weight": "mlp.experts.gate_proj",
    "ffn_up_exps.weight": "mlp.experts.up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
}


def gguf_file(folder: Path) -> Path | None:
    """The GGUF file that is given as a model, or the only one in a folder without safetensors; None for other folders.

    Raises UserError for a folder with several.
    """
    if folder.is_file():
        return folder if folder.suffix == SUFFIX else None
    if any(folder.glob("*.safetensors")):
        return None
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        raise UserError(f"{folder}: has {len(files)} GGUF files; give one of them, such as {files[0]}")
    return files[0] if files else None


def opened(path: Path) -> GgufFile:
    """Raises UserError for a file that cannot be read, and for one of another architecture."""
    file = open_gguf(path, path.stat().st_mtime_ns)
    architecture = file.metadata.get("general.architecture")
    if str(architecture) not in ARCHITECTURES:
        raise UserError(
            f"{path}: architecture {architecture!r:.100} is not supported in GGUF files."
            f"{closest(str(architecture), ARCHITECTURES)} Supported: {', '.join(ARCHITECTURES)}; give the model's "
            "folder with safetensors for others"
        )
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise UserError(f"{path}: is one part of several; join them with llama.cpp: llama-gguf-split --merge")
    return file


def gguf_config(path: Path) -> dict[str, Any]:
    """What a `config.json` would contain. Raises UserError, naming the key, for settings that are not supported."""
    file = opened(path)
    if EMBEDDING not in file.tensors:
        raise UserError(f"{path}: tensor {EMBEDDING} is missing; only language models are read")
    architecture = file.metadata["general.architecture"]
    mixture = architecture == MIXTURE
    settings = _settings(path, file, architecture)
    values = {
        name: _shortest(settings[key])
        for key, name in KEYS.items()
        if key in settings and (mixture or key not in EXPERTS)
    }
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    values.setdefault("head_dim", values["hidden_size"] // max(1, values["num_attention_heads"]))
    values.setdefault("rope_theta", 10000.0)
    only = dict.fromkeys(("attention.value_length", "rope.dimension_count"), values["head_dim"])
    _refuse_others(path, architecture, settings, only)
    ends = [file.metadata.get(f"tokenizer.ggml.{key}") for key in ENDS]
    return values | {
        "architectures": [ARCHITECTURES[architecture]],
        "vocab_size": file.tensors[EMBEDDING].get_shape()[0],
        "tie_word_embeddings": HEAD not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(token for token in ends if token is not None)),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
        "rope_scaling": _rope_scaling(path, file, settings, values),
        # llama.cpp always computes it so.
        **({"norm_topk_prob": True} if mixture else {}),
    }


def _shortest(value: Any) -> Any:
    """A float32 as the shortest decimal that represents it, as in the `config.json` that it is from."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _settings(path: Path, file: GgufFile, architecture: str) -> dict[str, Any]:
    """The metadata whose keys begin with the architecture's name, without it. Raises UserError for keys that are
    missing, not known, or not supported."""
    start = f"{architecture}."
    settings = {key.removeprefix(start): value for key, value in file.metadata.items() if key.startswith(start)}
    if unknown := sorted(settings.keys() - KEYS.keys() - ROPE_SCALING.keys() - ONLY.keys() - OTHERS):
        raise UserError(f"{path}: key {start}{unknown[0]} is not known; it could change what the model computes")
    required = (*REQUIRED, *EXPERTS) if architecture == MIXTURE else REQUIRED
    if missing := [key for key in required if key not in settings]:
        raise UserError(f"{path}: key {start}{missing[0]} is missing; {DAMAGED}")
    for key in settings.keys() & KEYS.keys():
        if not isinstance(settings[key], (int, float)):
            raise UserError(f"{path}: {start}{key} is {settings[key]!r:.100}; only one number for all layers is read")
    _refuse_others(path, architecture, settings, ONLY if architecture == MIXTURE else ONLY | {"expert_count": 0})
    return settings


def _refuse_others(path: Path, architecture: str, settings: dict[str, Any], only: dict[str, Any]) -> None:
    """Raises UserError for settings that are there with another value than the `only` one."""
    for key, value in only.items():
        if settings.get(key, value) != value:
            raise UserError(f"{path}: {architecture}.{key} is {settings[key]!r:.100}; only {value!r} is supported")


def _rope_scaling(
    path: Path, file: GgufFile, settings: dict[str, Any], values: dict[str, Any]
) -> dict[str, Any] | None:
    table = {name: _shortest(settings[key]) for key, name in ROPE_SCALING.items() if key in settings}
    if table.get("rope_type") in (None, "none"):
        table = {}
    if ROPE_FREQS not in file.tensors:
        return table or None
    divisors = file.tensors[ROPE_FREQS][()].double()
    factor = max(divisors.flatten().tolist(), default=0.0)
    fits = not table and list(divisors.shape) == [values["head_dim"] // 2]
    # Stored in float32.
    if not fits or not torch.allclose(divisors, _llama3_divisors(values, factor), rtol=1e-5, atol=0):
        raise UserError(f"{path}: {ROPE_FREQS} are not the divisors of Llama 3's scaling, the only one that is read so")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _llama3_divisors(values: dict[str, Any], factor: float) -> Tensor:
    """By what Llama 3 divides the frequencies of the rotary embedding: 1 for short wavelengths, `factor` for long ones,
    and in between, the inverse of a blend."""
    low, high, positions = LLAMA3.values()
    powers = torch.arange(0, values["head_dim"], 2, dtype=torch.float64) / values["head_dim"]
    wavelengths = 2 * math.pi * values["rope_theta"] ** powers
    blend = ((positions / wavelengths - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - blend) / factor + blend)


def gguf_tensors(path: Path) -> dict[str, StoredTensor]:
    """All tensors of the model by Hugging Face's names; those with other names keep them. Raises UserError."""
    file = opened(path)
    heads = _permuted_heads(path, file)
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in file.tensors.items():
        if name == ROPE_FREQS:
            continue
        layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        inner = IN_LAYER.get(layer[2], "") if layer else ""
        full = f"model.layers.{layer[1]}.{inner}" if layer and inner else WHOLE.get(name, name)
        permuted = heads.get(inner, 0)
        tensors[full] = Permuted(tensor, name, permuted) if permuted else tensor
    return tensors


def _permuted_heads(path: Path, file: GgufFile) -> dict[str, int]:
    """Heads in the projections whose rows are in another order: those of the architecture llama."""
    if file.metadata["general.architecture"] != "llama":
        return {}
    values = gguf_config(path)
    return {
        "self_attn.q_proj.weight": values["num_attention_heads"],
        "self_attn.k_proj.weight": values["num_key_value_heads"],
    }


class Permuted:
    """A projection to `heads` heads, in whose rows llama.cpp interleaves the halves of each head.

    Row `2 i + j` of a head is row `i` of its half `j`. Raises UserError, with `name`, if the rows do not fit.
    """

    def __init__(self, tensor: GgufTensor, name: str, heads: int):
        self.file, self._tensor, self._shape = tensor.file, tensor, tensor.get_shape()
        if heads < 1 or self._shape[0] % (2 * heads):
            raise UserError(f"{tensor.file}: tensor {name} has shape {self._shape}, which is not that of {heads} heads")
        self._rows = self._shape[0] // heads

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return self._tensor.get_dtype()

    def __getitem__(self, place: Any) -> Tensor:
        rows, *rest = whole_place(place, self._shape)
        first, stop = rows.start // self._rows, -(-rows.stop // self._rows)
        stored = self._tensor[(slice(first * self._rows, stop * self._rows), *rest)]
        ordered = stored.unflatten(0, (-1, self._rows // 2, 2)).transpose(1, 2).flatten(0, 2)
        return ordered.narrow(0, rows.start - first * self._rows, rows.stop - rows.start)
