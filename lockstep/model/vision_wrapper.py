"""Models with a vision tower around a language model, of which the language model is used.

transformers builds the language model from `text_config` alone: of the other keys of `config.json`, only those that
`text_settings` takes from there change what it computes or where it ends.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lockstep.errors import UserError

TEXT, QUANTIZATION, TIED = "text_config", "quantization_config", "tie_word_embeddings"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


class Wrapper(NamedTuple):
    """A class of transformers with a vision tower."""

    name: str
    """Before `ForConditionalGeneration`, and before `Model` of the class without a head."""
    text_type: str
    """`model_type` of the language model if `text_config` has none."""
    only: bool
    """Whether it is this one whatever `text_config` says."""

    @property
    def architectures(self) -> tuple[str, str]:
        return f"{self.name}ForConditionalGeneration", f"{self.name}Model"


WRAPPERS = {
    "gemma3": Wrapper("Gemma3", "gemma3_text", only=True),
    "mistral3": Wrapper("Mistral3", "mistral", only=False),
}
"""By `model_type`."""


def is_wrapper(values: dict[str, Any]) -> bool:
    """Whether this `config.json` describes a language model inside a larger one."""
    return values.get(TEXT) is not None or str(values.get("model_type")) in WRAPPERS


def text_settings(values: dict[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """The settings of the language model, and their place for errors; of any other `config.json`, all of it.

    As in transformers: tokens in the outer settings take precedence, the outer `tie_word_embeddings` decides and is
    true if it is missing, and the outer `quantization_config` is for all weights. Raises UserError without settings of
    a language model, and for one of an unknown kind in an unknown wrapper.
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
    tied = values.get(TIED, True)
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
    """The wrapper's `config.json` with other settings of its language model, whose weights are not quantized."""
    outer = {key: value for key, value in values.items() if key != QUANTIZATION}
    outer |= {key: text[key] for key in ("dtype", "torch_dtype", TIED)}
    outer |= {key: text[key] for key in TOKENS if key in values}
    return outer | {TEXT: {key: value for key, value in text.items() if key != "architectures"}}
