"""The rotary embedding's keys in `config.json`, read in transformers' order of precedence, and written."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import numpy as np

from lockstep.errors import UserError
from lockstep.model.config import ModelConfig, RopeScaling, Yarn
from lockstep.model.families.reading import number
from lockstep.model.rotary import rotary_frequencies, softmax_scale, table_factor

WIDEST_HEAD = 2**16
TOP_LEVEL = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
"""Keys of `config.json` for the rotary embedding."""
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Numbers of YaRN for which 0 means the default."""
_OTHERS = ("attn_factor", "extrapolation_factor")
"""Factors of YaRN that other engines apply, but transformers does not."""
_INSIDE = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "attention_factor",
    "truncate", "finetuned", *_LLAMA3, *_YARN, *_OTHERS,
}  # fmt: skip
"""Keys of the table, by rope type. No type reads `finetuned`."""


def read_rope(values: dict[str, Any], where: str) -> tuple[float, RopeScaling | Yarn | None]:
    """The base of the frequencies, and their scaling. Raises UserError.

    transformers 5 writes the table `rope_parameters`, earlier versions `rope_scaling` and a top-level `rope_theta`. A
    non-empty `rope_scaling` replaces `rope_parameters` as a whole, and top-level keys replace those missing in the
    table: with `rope_scaling`, a `rope_theta` inside `rope_parameters` is ignored.
    """
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    table = values.get(name) or {}
    where = f"{where}: {name}"
    if not isinstance(table, dict):
        raise UserError(f"{where} is {table!r:.100}; it must be a table")
    if unknown := sorted(key for key, value in table.items() if key not in _INSIDE and value is not None):
        raise UserError(
            f"{where}: key {unknown[0]} is not known{', and there are more' * (len(unknown) > 1)}; remove it if it has "
            "no effect (one table for all layers is read)"
        )
    if others := [key for key in _OTHERS if table.get(key) is not None]:
        warnings.warn(
            f"{where}: {' and '.join(others)} is ignored, as in transformers, which only reads attention_factor "
            f"({table.get('attention_factor', 'not given')!s:.40}); write that, or remove the key to silence this",
            stacklevel=2,
        )
    theta = float(number(table.get("rope_theta", values.get("rope_theta")), f"{where}: rope_theta"))
    other = values.get("rope_parameters")
    if name == "rope_scaling" and isinstance(other, dict) and other.get("rope_theta", theta) != theta:
        warnings.warn(
            f"{where} replaces rope_parameters as a whole, and its rope_theta of {other['rope_theta']!r:.40}: as in "
            f"transformers it is {theta} now; write the right one into rope_scaling",
            stacklevel=2,
        )
    partial = table.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial is not None and partial != 1:
        raise UserError(f"{where}: partial_rotary_factor is {partial!r:.100}; only 1.0 is supported")
    kind = table.get("rope_type", table.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "yarn":
        return theta, _yarn(table, values, where)
    if kind == "llama3":
        return theta, _llama3(table, values, where)
    raise UserError(
        f'{where}: rope type "{kind}" is not supported (rope_type); only "default", "llama3" and "yarn" are'
    )


def _llama3(table: dict[str, Any], values: dict[str, Any], where: str) -> RopeScaling:
    if missing := [key for key in _LLAMA3 if key not in table]:
        raise UserError(f"{where}: rope type llama3 needs {', '.join(missing)}")
    factor, low, high = (number(table[key], f"{where}: {key}") for key in _LLAMA3)
    if not low < high:
        raise UserError(f"{where}: low_freq_factor is {low} and high_freq_factor {high}; the first must be smaller")
    if table.get("mscale_all_dim"):  # transformers would scale latent attention's scores with it
        raise UserError(f"{where}: mscale_all_dim is of rope type yarn; remove it")
    return RopeScaling(factor, low, high, _original_positions(table, values, where))


def _yarn(table: dict[str, Any], values: dict[str, Any], where: str) -> Yarn:
    if "factor" not in table:
        raise UserError(f"{where}: rope type yarn needs factor")
    original, factor = _original_positions(table, values, where), table["factor"]
    if factor is None:
        factor = number(values["max_position_embeddings"], f"{where}: max_position_embeddings") / original
    truncate = table.get("truncate", True)
    if not isinstance(truncate, bool):
        raise UserError(f"{where}: truncate is {truncate!r:.100}; it must be true or false")
    given = {key: number(table[key], f"{where}: {key}") for key in _YARN if table.get(key)}
    if table.get("attention_factor") is not None:
        given["attention_factor"] = number(table["attention_factor"], f"{where}: attention_factor")
    return Yarn(number(factor, f"{where}: factor"), original, truncate=truncate, **given)


def _original_positions(table: dict[str, Any], values: dict[str, Any], where: str) -> Any:
    """Positions before the scaling. Unlike for other numbers, a top-level key takes precedence over the table's."""
    key, longest = "original_max_position_embeddings", values["max_position_embeddings"]
    return number(values[key] if key in values else table.get(key, longest), f"{where}: {key}")


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json`, for old and new transformers."""
    scaling = config.rope_scaling
    table: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        numbers = {key: value for key, value in dataclasses.asdict(scaling).items() if value is not None}
        numbers["original_max_position_embeddings"] = numbers.pop("original_max_positions")
        table = {"rope_type": "yarn" if isinstance(scaling, Yarn) else "llama3", **numbers}
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": table if scaling is not None else None,
        "rope_parameters": {"rope_theta": config.rope_theta, **table},
    }


def refuse_infinite_rotation(config: ModelConfig, where: str) -> None:
    """Raises UserError if the rotary embedding's settings do not give finite angles."""
    if config.head_dim > WIDEST_HEAD:
        shown = str(config.head_dim) if config.head_dim < 10**20 else "a number of more than 20 digits"
        raise UserError(f"{where}: head_dim is {shown}; it can be up to {WIDEST_HEAD}")
    try:
        with np.errstate(all="ignore"):
            factors = [*rotary_frequencies(config).tolist(), table_factor(config)]
            factors += [softmax_scale(config)] if config.latent is not None else []
    except (ArithmeticError, ValueError):
        factors = [math.inf]
    if not all(map(math.isfinite, factors)):
        raise UserError(f"{where}: rope_theta and the rotary scaling give angles that are not finite; check them")
