"""Models with a vision tower around a language model, of which the language model is used.

transformers builds the language model from `text_config` alone: of the other keys of `config.json`, only those that
`text_settings` takes from there change what it computes or where it ends.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lockstep.errors import UserError

TEXT, QUANTIZATION, TIED = "text_config", "quantization_config", "tie_word_embeddings"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
OF_OTHER_PARTS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
"""Keys of `text_config` for layers whose tensors are kept like the vision tower's."""
OF_AXES = ("mrope_section", "mrope_interleaved")
"""Keys of the rotary embedding's table that matter only for the positions of images."""


class Wrapper(NamedTuple):
    """A class of transformers with a vision tower."""

    name: str
    """Before `ForConditionalGeneration`, and before `Model` of the class without a head."""
    text_type: str
    """`model_type` of the language model if `text_config` has none."""
    only: bool
    """Whether it is this one whatever `text_config` says."""
    tied: bool = True
    """`tie_word_embeddings` if it is missing."""

    @property
    def architectures(self) -> tuple[str, str]:
        return f"{self.name}ForConditionalGeneration", f"{self.name}Model"


WRAPPERS = {
    "gemma3": Wrapper("Gemma3", "gemma3_text", only=True),
    "mistral3": Wrapper("Mistral3", "mistral", only=False),
    "qwen3_5": Wrapper("Qwen3_5", "qwen3_5_text", only=True, tied=False),
    "qwen3_5_moe": Wrapper("Qwen3_5Moe", "qwen3_5_moe_text", only=True, tied=False),
}
"""By `model_type`."""


def is_wrapper(values: dict[str, Any]) -> bool:
    """Whether this `config.json` describes a language model inside a larger one."""
    return values.get(TEXT) is not None or str(values.get("model_type")) in WRAPPERS


def text_settings(values: dict[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """The settings of the language model, and their place for errors; of any other `config.json`, all of it.

    As in transformers: tokens in the outer settings take precedence, the outer `tie_word_embeddings` decides and has
    the class's default if it is missing, and the outer `quantization_config` is for all weights. Raises UserError
    without settings of a language model, and for one of an unknown kind in an unknown wrapper.
    """
    if not is_wrapper(values):
        return values, where
    text, wrapper = values.get(TEXT), WRAPPERS.get(str(values.get("model_type")))
    if not isinstance(text, dict):
        raise UserError(f"{where}: {TEXT} is {text!r:.100}; it must have the settings of the language model")
    kind = text.get("model_type")
    if wrapper is None and kind is None:
        refuse_other_wrapper(values, where)
    if wrapper is not None and (wrapper.only or kind is None):
        kind = wrapper.text_type
    outer = {key: values[key] for key in (*TOKENS, QUANTIZATION) if values.get(key) not in (None, {})}
    tied = values.get(TIED, wrapper is None or wrapper.tied)
    decided = {"model_type": kind, "architectures": None, TIED: False if tied is None else tied}
    return text | outer | decided, f"{where}: {TEXT}"


def refuse_other_wrapper(values: dict[str, Any], where: str) -> None:
    """Raises UserError for a language model inside a model that is not known."""
    if not is_wrapper(values):
        return
    architectures = values.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    wrapper = WRAPPERS.get(str(values.get("model_type")))
    if wrapper is None or name not in (None, *wrapper.architectures):
        described = name if name is not None else values.get("model_type", "unnamed")
        raise UserError(
            f"{where}: {TEXT} describes the language model inside a larger one ({described!s:.100}), which is not "
            "supported; save the language model in a separate folder. Supported: "
            f"{', '.join(each.architectures[0] for each in WRAPPERS.values())}"
        )


def with_text_settings(values: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """The wrapper's `config.json` with other settings of its language model, whose weights are not quantized. Keys
    that only the other parts use are kept."""
    outer = {key: value for key, value in values.items() if key != QUANTIZATION}
    outer |= {key: text[key] for key in ("dtype", "torch_dtype", TIED)}
    outer |= {key: text[key] for key in TOKENS if key in values}
    before = values.get(TEXT) or {}
    kept = {key: before[key] for key in OF_OTHER_PARTS if key in before}
    if axes := {key: value for key, value in _rotation(before).items() if key in OF_AXES}:
        kept["rope_parameters"] = text["rope_parameters"] | axes
    return outer | {TEXT: {key: value for key, value in text.items() if key != "architectures"} | kept}


def _rotation(text: dict[str, Any]) -> dict[str, Any]:
    """The table of the rotary embedding, which is where transformers looks for it."""
    return text.get("rope_scaling") or text.get("rope_parameters") or {}
