"""The families: their sizes by name, and `config.json` both ways."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

from lockstep.errors import UserError, closest
from lockstep.model.config import ModelConfig, RopeScaling
from lockstep.model.families import llama3, qwen3

FAMILIES: dict[str, ModuleType] = {"llama3": llama3, "qwen3": qwen3}
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
# Settings of these families that would change the arithmetic, and the only value that is built here.
_ONLY = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "use_sliding_window": False}


def preset(name: str, vocab_size: int | None = None, eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
    """`family:size`, such as `qwen3:tiny`, with another vocabulary where given. Raises UserError if there is none."""
    family, _, size = name.partition(":")
    if name not in PRESETS:
        raise UserError(
            f'unknown model "{name}".{closest(name, PRESETS)} There is no folder of that name, and these sizes are '
            f"known: {', '.join(PRESETS)}"
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
    if architectures[0] not in known:
        raise UserError(
            f'{where}: architecture "{architectures[0]}" is not supported.{closest(architectures[0], known)} '
            f"Supported: {', '.join(known)}"
        )
    family = known[architectures[0]]
    for key, value in _ONLY.items():
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
            raise UserError(f"{where}: {name} is {value!r:.100}, which is no {kinds[-1].__name__}")
    if "norm_eps" in fields:
        fields["norm_eps"] = _number(fields["norm_eps"], f"{where}: rms_norm_eps")
    fields.setdefault("num_kv_heads", fields["num_heads"])
    fields.setdefault("head_dim", fields["dim"] // fields["num_heads"])
    fields.setdefault("tie_embeddings", False)
    eos = values.get("eos_token_id")
    if not all(isinstance(token, int) for token in (eos if isinstance(eos, list) else [0 if eos is None else eos])):
        raise UserError(f"{where}: eos_token_id is {eos!r:.100}; it must be a token id or a list of them")
    theta, scaling = _rope(values, where)
    return ModelConfig(
        family=family,
        qk_norm=FAMILIES[family].QK_NORM,
        rope_theta=theta,
        rope_scaling=scaling,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        **fields,
    )


def _rope(values: dict[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """transformers 5 writes `rope_parameters`; earlier ones `rope_theta` and `rope_scaling`."""
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise UserError(f"{where}: rope_parameters is {parameters!r:.100}; it must be a table")
    theta = float(_number(parameters.get("rope_theta", values.get("rope_theta", 10000.0)), f"{where}: rope_theta"))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f'{where}: rope type "{kind}" is not supported; only "default" and "llama3" are')
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if missing := [key for key in keys if key not in parameters]:
        raise UserError(f"{where}: rope type llama3 needs {', '.join(missing)}")
    return theta, RopeScaling(*(_number(parameters[key], f"{where}: {key}") for key in keys))


def _number(value: Any, where: str) -> Any:
    """As it stands there. Raises UserError for what is no finite number above 0."""
    # An integer may be beyond any float, too.
    if isinstance(value, (int, float)) and 0 < value <= sys.float_info.max:
        return value
    raise UserError(f"{where} is {value!r:.100}; it must be a number above 0")


def to_hugging_face(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The `config.json` that transformers reads, old and new."""
    module = FAMILIES[config.family]
    values = {key: getattr(config, field) for key, field in _NAMES.items()}
    if config.reduction_chunks == 1:  # as in every folder of other libraries
        del values["reduction_chunks"]
    eos = list(config.eos_token_ids)
    scaling: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        numbers = dataclasses.asdict(config.rope_scaling)
        numbers["original_max_position_embeddings"] = numbers.pop("original_max_positions")
        scaling = {"rope_type": "llama3", **numbers}
    return {
        "architectures": [module.ARCHITECTURE],
        "model_type": module.MODEL_TYPE,
        **values,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling if config.rope_scaling is not None else None,
        "rope_parameters": {"rope_theta": config.rope_theta, **scaling},
        "torch_dtype": dtype,
        "dtype": dtype,
    }
