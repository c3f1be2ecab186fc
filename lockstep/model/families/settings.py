"""Reading and writing `config.json`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from lockstep.errors import UserError
from lockstep.model.config import ModelConfig
from lockstep.model.families.keys import refuse_unknown, with_defaults
from lockstep.model.families.nearest import nearest_family
from lockstep.model.families.own import OWN
from lockstep.model.families.reading import layer_kinds, number, truth
from lockstep.model.families.registry import (
    FAMILIES,
    OTHER_MODEL_TYPES,
    family_module,
    quantized_methods,
    rope_keys,
    scoring_class,
    stem,
)
from lockstep.model.families.rope import read_rope, refuse_infinite_rotation, write_rope
from lockstep.model.quantized import dequantize_of
from lockstep.model.vision_wrapper import refuse_other_wrapper, text_settings
from lockstep.precision import MODELS_DTYPE, read_precision

# Keys of config.json and the corresponding fields.
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
    "pad_token_id": "pad_token_id",
    "reduction_chunks": "reduction_chunks",
}
ALIKE = (
    "qk_norm", "norms", "norm_offset", "plain_norms", "activation", "fused", "rope_interleaved", "qkv_bias",
    "attention_gate",
)  # fmt: skip
"""Constants of a family that hold for its folders too, not only for the sizes by name."""
MOST_LAYERS = 1024
SOFTCAP = "final_logit_softcapping"

log = logging.getLogger("lockstep")


def from_hugging_face(
    values: dict[str, Any], where: str, tensors: Callable[[], Collection[str]] = tuple
) -> ModelConfig:
    """The contents of a `config.json` as a ModelConfig, read as transformers reads them; of a model with a vision
    tower, its language model. `where` names the file in errors, which are UserErrors; `tensors` gives the names of the
    folder's, for the one about an unknown family."""
    config = _read(values, where, tensors)
    if config.family not in FAMILIES:
        refuse_lossy(config)
        _name_replaced(config.family, family_module(config.family).MODEL_TYPE)
    return config


def _read(values: dict[str, Any], where: str, tensors: Callable[[], Collection[str]] = tuple) -> ModelConfig:
    text, inside = text_settings(values, where)
    family, scoring = _family_of(text, inside, tensors)
    refuse_other_wrapper(values, where)
    values, where = text, inside
    if family == "mistral" and values.get("layer_types") is not None:
        family = "ministral"  # as in transformers' AutoConfig
    module = family_module(family)
    dequantize_of(values, where, quantized_methods(family))
    refuse_unknown(values, module, where)
    values = with_defaults(values, module)
    fields = {field: values[key] for key, field in _NAMES.items() if values.get(key) is not None}
    required = {"vocab_size", "dim", "num_layers", "num_heads", "intermediate_size"}
    missing = [key for key, field in _NAMES.items() if field in required and field not in fields]
    if missing:
        raise UserError(f"{where}: key {', '.join(missing)} is missing; this is not a complete model configuration")
    for key, name in _NAMES.items():
        kinds = {"norm_eps": (int, float), "tie_embeddings": (bool,)}.get(name, (int,))
        value = fields.get(name)
        if value is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise UserError(f"{where}: {key}: {name} is {value!r:.100}, which is not of type {kinds[-1].__name__}")
    # Checked before anything loops over them.
    if not 0 < fields["num_layers"] <= MOST_LAYERS or fields["num_heads"] < 1:
        raise UserError(
            f"{where}: num_hidden_layers is {_short(fields['num_layers'])} and num_attention_heads "
            f"{_short(fields['num_heads'])}; a model has 1 to {MOST_LAYERS} layers and at least one head"
        )
    fields["norm_eps"] = number(fields["norm_eps"], f"{where}: rms_norm_eps")
    fields.setdefault("num_kv_heads", fields["num_heads"])
    fields.setdefault("head_dim", fields["dim"] // fields["num_heads"])
    if scoring:
        _refuse_classes(values, where)
        fields |= {"score_head": True, "tie_embeddings": False}
    eos = values.get("eos_token_id")
    if not all(type(token) is int for token in (eos if isinstance(eos, list) else [0 if eos is None else eos])):
        raise UserError(f"{where}: eos_token_id is {eos!r:.100}; it must be a token id or a list of them")
    if (cap := values.get(SOFTCAP)) is not None:
        fields["logits_softcap"] = float(number(cap, f"{where}: {SOFTCAP}"))
    fields |= _read_biases(values, where) | {key: module.CONSTANTS[key] for key in ALIKE if key in module.CONSTANTS}
    if hasattr(module, "read_attention"):
        found = module.read_attention(values, where)
        if not isinstance(found, dict):
            raise UserError(f"{family}: read_attention gives {found!r:.60}; it must give fields of ModelConfig")
        fields |= found
    if not {"sliding_window", "layer_types"} & module.DEFAULTS.keys():
        layer_kinds(values, ("full_attention",), where, fields["num_layers"])
    fields = read_rope(values, fields["head_dim"], where, rope_keys(module)) | fields
    try:
        config = ModelConfig(
            family=family,
            experts=module.read_experts(values, where) if hasattr(module, "read_experts") else None,
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            precision=read_precision(values.get("precision"), where),
            **fields,
        )
    except UserError as error:
        raise UserError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from error
    refuse_infinite_rotation(config, where)
    return config


def _read_biases(values: dict[str, Any], where: str) -> dict[str, bool]:
    """The fields for biases: `attention_bias` is for all four projections, unless a family says otherwise."""
    biases = {key: key in values and truth(values, key, where) for key in ("attention_bias", "mlp_bias")}
    attention, mlp = biases.values()
    return {"qkv_bias": attention, "output_bias": attention, "mlp_bias": mlp}


def _family_of(values: dict[str, Any], where: str, tensors: Callable[[], Collection[str]]) -> tuple[str, bool]:
    """The family, and whether the head outputs a score. transformers uses `model_type` alone: `architectures` may be
    missing, and must not name another family. A user's family replaces one of the same `model_type`."""
    architectures = values.get("architectures") or [""]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise UserError(f"{where}: architectures is {architectures!r:.100}; it must be a list with one name")
    families = FAMILIES | OWN
    types = OTHER_MODEL_TYPES | {module.MODEL_TYPE: name for name, module in families.items()}
    kind = values.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise UserError(f"{where}: model_type is {kind!r:.100}; it must be a name")
    if not architectures[0] and kind is not None:
        if kind not in types:
            raise _unknown(f'model_type "{kind:.100}"', values, where, tensors)
        return types[kind], False
    known = {module.ARCHITECTURE: name for name, module in families.items()}
    scoring = {scoring_class(module): name for name, module in families.items()}
    headless = {f"{stem(module)}Model": name for name, module in families.items()}  # with a tied head
    known |= scoring | headless
    architecture = architectures[0].removeprefix("FSDP")  # which older transformers saved
    if architecture not in known:
        raise _unknown(f'architecture "{architecture:.100}"', values, where, tensors)
    family = known[architecture]
    if kind is not None and types.get(kind) != family:
        raise UserError(
            f"{where}: model_type is {kind!r:.100}, but architectures {architecture}, whose model_type is "
            f"{families[family].MODEL_TYPE!r}; correct one of them"
        )
    return family, architecture in scoring


def _unknown(what: str, values: dict[str, Any], where: str, tensors: Callable[[], Collection[str]]) -> UserError:
    nearest = nearest_family(values, where, FAMILIES, _read, tensors())
    return UserError(
        f"{where}: {what} is not supported. {nearest}. To read it as a family of your own, see docs/models.md"
    )


def _refuse_classes(values: dict[str, Any], where: str) -> None:
    """Raises UserError for a head with several outputs."""
    # transformers writes the labels' names instead of num_labels, two of them by default.
    labels = values.get("id2label", {"0": "", "1": ""})
    count = values.get("num_labels", len(labels) if isinstance(labels, dict) else labels)
    if count != 1:
        raise UserError(
            f"{where}: the head has {count!r:.40} outputs; only reward models are read, with one output (num_labels)"
        )


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**20 else "a number of more than 20 digits"


def to_hugging_face(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The `config.json` that transformers reads, old and new."""
    module = family_module(config.family)
    values = {key: getattr(config, field) for key, field in _NAMES.items()}
    if config.reduction_chunks == 1:  # as in folders of other libraries
        del values["reduction_chunks"]
    eos = list(config.eos_token_ids)
    no_end: list[int] | None = [] if "eos_token_id" in getattr(module, "NULL_IS_MISSING", ()) else None
    return {
        "architectures": [scoring_class(module) if config.score_head else module.ARCHITECTURE],
        "model_type": module.MODEL_TYPE,
        **values,
        **(module.write_experts(config) if config.experts is not None else {}),
        **(module.write_attention(config) if hasattr(module, "write_attention") else {}),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or no_end,
        **({"hidden_act": "silu"} if config.activation == "silu" else {}),
        **({"attention_bias": config.qkv_bias} if "attention_bias" in module.DEFAULTS else {}),
        **({"mlp_bias": config.mlp_bias} if "mlp_bias" in module.DEFAULTS else {}),
        **({SOFTCAP: config.logits_softcap or None} if SOFTCAP in module.DEFAULTS else {}),
        **getattr(module, "write_rope", write_rope)(config, rope_keys(module)),
        **({"precision": asdict(config.precision)} if config.precision != MODELS_DTYPE else {}),
        **({"id2label": {"0": "score"}, "label2id": {"score": 0}} if config.score_head else {}),
        "torch_dtype": dtype,
        "dtype": dtype,
    }


@lru_cache
def _name_replaced(family: str, kind: str) -> None:
    """Warns, once per process, if folders are read with a user's family that could be read with one of Lockstep's."""
    if name := next((name for name, module in FAMILIES.items() if kind == module.MODEL_TYPE), ""):
        log.warning("all folders of model_type %s are read with %s now, not as %s", kind, family, name)


def refuse_lossy(config: ModelConfig) -> None:
    """Raises UserError for a field that a user's family would not read from the `config.json` that it writes."""
    again = _read(to_hugging_face(config, "float32"), config.family)
    for field in dataclasses.fields(ModelConfig):
        value, found = getattr(config, field.name), getattr(again, field.name)
        if value != found:
            raise UserError(
                f"{config.family}: {field.name} is {value!r:.100}, but a folder's config.json gives {found!r:.80}; "
                "write it there in write_attention or write_experts, and read it in read_attention or read_experts"
            )
