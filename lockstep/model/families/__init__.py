"""The families: their sizes by name, and `config.json` both ways."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from types import ModuleType
from typing import Any

import numpy as np

from lockstep.errors import UserError, closest
from lockstep.model.config import ModelConfig, RopeScaling, Yarn
from lockstep.model.families import deepseek_v3, gpt_oss, llama3, qwen3, qwen3_moe
from lockstep.model.rotary import rotary_frequencies, softmax_scale, table_factor
from lockstep.model.stored import HEAD

FAMILIES: dict[str, ModuleType] = {
    "llama3": llama3,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "gpt_oss": gpt_oss,
    "deepseek_v3": deepseek_v3,
}
PRESETS = [f"{family}:{size}" for family, module in FAMILIES.items() for size in module.PRESETS]

# Keys of config.json and the fields they fill.
_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_positions",
    "tie_word_embeddings": "tie_embeddings",
    "bos_token_id": "bos_token_id",
    "reduction_chunks": "reduction_chunks",
}
# Settings of these families that would change the arithmetic, and the only value that is supported.
_ONLY = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "use_sliding_window": False}


MOST_LAYERS, WIDEST_HEAD = 1024, 2**16
SMALLEST, LARGEST = 1e-30, 1e30
"""Range of a number in a configuration: float32 can represent it, and what is computed from it."""


def preset(name: str, vocab_size: int | None = None, eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
    """`family:size`, such as `qwen3:tiny`, with another vocabulary if given. Raises UserError if there is none."""
    family, _, size = name.partition(":")
    if name not in PRESETS:
        raise UserError(
            f'unknown model "{name}".{closest(name, PRESETS)} There is no folder with that name, and the known '
            f"sizes are: {', '.join(PRESETS)}"
        )
    module = FAMILIES[family]
    config: ModelConfig = module.config(vocab_size or module.VOCAB_SIZES[size], **module.PRESETS[size])
    return dataclasses.replace(config, eos_token_ids=eos_token_ids)


def from_hugging_face(values: dict[str, Any], where: str) -> ModelConfig:
    """The contents of a `config.json` as a ModelConfig. `where` names the file in errors, which are UserErrors."""
    architectures = values.get("architectures") or [""]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise UserError(f"{where}: architectures is {architectures!r:.100}; it must be a list with one name")
    known = {module.ARCHITECTURE: name for name, module in FAMILIES.items()}
    known |= {_scoring(name): family for name, family in known.items()}
    if architectures[0] not in known:
        raise UserError(
            f'{where}: architecture "{architectures[0]}" is not supported.{closest(architectures[0], known)} '
            f"Supported: {', '.join(known)}"
        )
    family = known[architectures[0]]
    module = FAMILIES[family]
    values = _with_defaults(values, getattr(module, "DEFAULTS", {}))
    _refuse_quantized(values, getattr(module, "QUANTIZED", ()), where)
    for key, value in {**_ONLY, **getattr(module, "ONLY", {})}.items():
        if values.get(key, value) != value:
            raise UserError(f"{where}: {key} is {values[key]!r}; only {value!r} is supported")
    fields = {field: values[key] for key, field in _NAMES.items() if values.get(key) is not None}
    required = {"vocab_size", "dim", "num_layers", "num_heads", "intermediate_size"}
    missing = [key for key, field in _NAMES.items() if field in required and field not in fields]
    if missing:
        raise UserError(f"{where}: key {', '.join(missing)} is missing; this is not a complete model configuration")
    for name, value in fields.items():
        kinds = {"norm_eps": (int, float), "tie_embeddings": (bool,)}.get(name, (int,))
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise UserError(f"{where}: {name} is {value!r:.100}, which is not of type {kinds[-1].__name__}")
    # Checked before anything iterates over them.
    if not 0 < fields["num_layers"] <= MOST_LAYERS or fields["num_heads"] < 1:
        raise UserError(
            f"{where}: num_hidden_layers is {_short(fields['num_layers'])} and num_attention_heads "
            f"{_short(fields['num_heads'])}; a model has 1 to {MOST_LAYERS} layers and at least one head"
        )
    if "norm_eps" in fields:
        fields["norm_eps"] = _number(fields["norm_eps"], f"{where}: rms_norm_eps")
    fields.setdefault("num_kv_heads", fields["num_heads"])
    fields.setdefault("head_dim", fields["dim"] // fields["num_heads"])
    fields.setdefault("tie_embeddings", False)
    if architectures[0] != module.ARCHITECTURE:
        _refuse_classes(values, where)
        fields |= {"score_head": True, "tie_embeddings": False}
    eos = values.get("eos_token_id")
    if not all(isinstance(token, int) for token in (eos if isinstance(eos, list) else [0 if eos is None else eos])):
        raise UserError(f"{where}: eos_token_id is {eos!r:.100}; it must be a token id or a list of them")
    theta, scaling = _rope(values, where)
    if hasattr(module, "read_attention"):
        fields |= module.read_attention(values, where)
    config = ModelConfig(
        family=family,
        experts=module.read_experts(values, where) if hasattr(module, "read_experts") else None,
        qk_norm=module.QK_NORM,
        rope_theta=theta,
        rope_scaling=scaling,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        **fields,
    )
    _refuse_endless_rotation(config, where)
    return config


def _with_defaults(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The values, with a family's own for the keys that are missing or null; without a number of key-value heads, there
    are as many as heads."""
    as_heads = {"num_key_value_heads"} & values.keys()
    return values | {key: value for key, value in defaults.items() if values.get(key) is None and key not in as_heads}


def _refuse_endless_rotation(config: ModelConfig, where: str) -> None:
    """Raises UserError if the numbers of the rotary embedding do not give finite angles."""
    if config.head_dim > WIDEST_HEAD:
        raise UserError(f"{where}: head_dim is {_short(config.head_dim)}; it can be up to {WIDEST_HEAD}")
    try:
        with np.errstate(all="ignore"):
            made = [*rotary_frequencies(config).tolist(), table_factor(config)]
            made += [softmax_scale(config)] if config.latent is not None else []
    except (ArithmeticError, ValueError):
        made = [math.inf]
    if not all(map(math.isfinite, made)):
        raise UserError(f"{where}: rope_theta and the rotary scaling give angles that are not finite; check them")


def _scoring(architecture: str) -> str:
    """The name in transformers of an architecture whose head gives scores."""
    return architecture.replace("ForCausalLM", "ForSequenceClassification")


def _refuse_classes(values: dict[str, Any], where: str) -> None:
    """Raises UserError for a head with several outputs."""
    # transformers does not write num_labels, but the labels' names, two of them by default.
    labels = values.get("id2label", {"0": "", "1": ""})
    count = values.get("num_labels", len(labels) if isinstance(labels, dict) else labels)
    if count != 1:
        raise UserError(
            f"{where}: the head has {count!r:.40} outputs; only reward models are read, with one output (num_labels)"
        )


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**20 else "a number of more than 20 digits"


_FROM_OTHERS = (
    'load it in transformers with dequantize=True in its quantization config and dtype="bfloat16", and call '
    "save_pretrained"
)
_FROM_FP8 = (
    "fp8 is float8_e4m3 with a float32 scale for each block (weight_scale_inv). DeepSeek's inference/fp8_cast_bf16.py "
    "writes the folder in bfloat16 (then remove quantization_config from its config.json); so does transformers: load "
    'it with quantization_config=FineGrainedFP8Config(dequantize=True) and dtype="bfloat16", and call save_pretrained'
)


def _refuse_quantized(values: dict[str, Any], read: Collection[str], where: str) -> None:
    quantization = values.get("quantization_config") or {}
    method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
    if quantization and method not in read:
        raise UserError(
            f"{where}: the weights are quantized ({method!r:.100}), which is not supported"
            + (f" (supported: {', '.join(read)}, unquantized floats)" if read else "; only unquantized floats are")
            + ". Convert the folder first: "
            + (_FROM_FP8 if method == "fp8" else _FROM_OTHERS)
        )


def _rope(values: dict[str, Any], where: str) -> tuple[float, RopeScaling | Yarn | None]:
    """transformers 5 writes `rope_parameters`; earlier ones `rope_theta` and `rope_scaling`."""
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise UserError(f"{where}: rope_parameters is {parameters!r:.100}; it must be a table")
    theta = float(_number(parameters.get("rope_theta", values.get("rope_theta", 10000.0)), f"{where}: rope_theta"))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "yarn":
        return theta, _yarn(parameters, values, where)
    if kind != "llama3":
        raise UserError(f'{where}: rope type "{kind}" is not supported; only "default", "llama3" and "yarn" are')
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if missing := [key for key in keys if key not in parameters]:
        raise UserError(f"{where}: rope type llama3 needs {', '.join(missing)}")
    return theta, RopeScaling(*(_number(parameters[key], f"{where}: {key}") for key in keys))


_YARN_NUMBERS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")


def _yarn(parameters: dict[str, Any], values: dict[str, Any], where: str) -> Yarn:
    """Keys that are missing, null or 0 have their defaults."""
    given = {key: _number(parameters[key], f"{where}: {key}") for key in _YARN_NUMBERS if parameters.get(key)}
    truncate = parameters.get("truncate", True)
    if not isinstance(truncate, bool):
        raise UserError(f"{where}: truncate is {truncate!r:.100}; it must be true or false")
    if "factor" not in parameters:
        raise UserError(f"{where}: rope type yarn needs factor")
    original = parameters.get("original_max_position_embeddings", values.get("max_position_embeddings"))
    return Yarn(
        factor=_number(parameters["factor"], f"{where}: factor"),
        original_max_positions=_number(original, f"{where}: original_max_position_embeddings"),
        truncate=truncate,
        **given,
    )


def _rope_parameters(scaling: RopeScaling | Yarn | None) -> dict[str, Any]:
    """Back from `_rope`: the type and its numbers."""
    if scaling is None:
        return {"rope_type": "default"}
    numbers = {key: value for key, value in dataclasses.asdict(scaling).items() if value is not None}
    numbers["original_max_position_embeddings"] = numbers.pop("original_max_positions")
    return {"rope_type": "yarn" if isinstance(scaling, Yarn) else "llama3", **numbers}


def is_copy(name: str, config: ModelConfig) -> bool:
    """Tensors in a folder that say nothing new: older folders' rotary frequencies, and a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == HEAD)


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Tensors in a folder that the model does not use: copies, and what a family or a reward model leaves out."""
    if is_copy(name, config) or (config.score_head and name == HEAD):
        return True
    module = FAMILIES[config.family]
    return hasattr(module, "is_ignored") and module.is_ignored(name, config)


def _number(value: Any, where: str) -> Any:
    """Returns it unchanged. Raises UserError for what is not a finite number above 0."""
    # An integer may also exceed any float; the model computes with float32.
    if isinstance(value, (int, float)) and not isinstance(value, bool) and SMALLEST <= value <= LARGEST:
        return value
    raise UserError(f"{where} is {value!r:.100}; it must be a number above 0 that fits in float32")


def to_hugging_face(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The `config.json` that transformers reads, old and new."""
    module = FAMILIES[config.family]
    values = {key: getattr(config, field) for key, field in _NAMES.items()}
    if config.reduction_chunks == 1:  # as in every folder of other libraries
        del values["reduction_chunks"]
    eos = list(config.eos_token_ids)
    scaling = _rope_parameters(config.rope_scaling)
    return {
        "architectures": [_scoring(module.ARCHITECTURE) if config.score_head else module.ARCHITECTURE],
        "model_type": module.MODEL_TYPE,
        **values,
        **(module.write_experts(config) if config.experts is not None else {}),
        **(module.write_attention(config) if hasattr(module, "write_attention") else {}),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling if config.rope_scaling is not None else None,
        "rope_parameters": {"rope_theta": config.rope_theta, **scaling},
        **({"id2label": {"0": "score"}, "label2id": {"score": 0}} if config.score_head else {}),
        "torch_dtype": dtype,
        "dtype": dtype,
    }
