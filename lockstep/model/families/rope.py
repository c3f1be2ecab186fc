"""The rotary embedding's keys in `config.json`, read in transformers' order of precedence, and written."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from lockstep.errors import UserError
from lockstep.model.config import ModelConfig
from lockstep.model.families.reading import number
from lockstep.model.ropes import DynamicRope, LinearRope, LongRope, Rope, RopeScale, RopeScaling, Yarn
from lockstep.model.rotary import rotary_frequencies, softmax_scale, table_factor
from lockstep.ops.elementary import logarithm

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
_LONGROPE = ("short_factor", "long_factor")
_OTHERS = ("attn_factor", "extrapolation_factor")
"""Factors of YaRN that other engines apply, but transformers does not."""
_INSIDE = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "attention_factor",
    "truncate", "finetuned", *_LLAMA3, *_YARN, *_LONGROPE, *_OTHERS,
}  # fmt: skip
"""Keys of the table, by rope type. No type reads `finetuned`."""
FULL, SLIDING = "full_attention", "sliding_attention"


class RopeKeys(NamedTuple):
    """What is particular to a family's keys."""

    partial: bool = False
    """Whether only a part of each head may be rotated."""
    by_kind: bool = False
    """Whether layers with a window have a table of their own."""
    window_theta: float = 10_000.0
    """Base for layers with a window, if the keys have none."""
    aliases: Mapping[str, str] = {}
    """Rope types by the names that older folders have for them."""
    more: tuple[str, ...] = ()
    """Further keys of the table, which the family reads itself."""


def read_rope(values: dict[str, Any], head_dim: int, where: str, keys: RopeKeys) -> dict[str, Any]:
    """The fields of ModelConfig for the rotary embedding. Raises UserError.

    transformers 5 writes the table `rope_parameters`, earlier versions `rope_scaling` and a top-level `rope_theta`. A
    non-empty `rope_scaling` replaces `rope_parameters` as a whole, and top-level keys replace those missing in the
    table: with `rope_scaling`, a `rope_theta` inside `rope_parameters` is ignored.
    """
    if keys.by_kind:
        return _read_by_kind(values, where, keys)
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    table = _table(values.get(name) or {}, f"{where}: {name}", keys)
    where = f"{where}: {name}"
    rope = _rope(table, values, values.get("rope_theta"), where, keys)
    other = values.get("rope_parameters")
    if name == "rope_scaling" and isinstance(other, dict) and other.get("rope_theta", rope.theta) != rope.theta:
        warnings.warn(
            f"{where} replaces rope_parameters as a whole, and its rope_theta of {other['rope_theta']!r:.40}: as in "
            f"transformers it is {rope.theta} now; write the right one into rope_scaling",
            stacklevel=2,
        )
    part = table.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    rotated = 0 if part is None or part == 1 else _rotated_features(part, head_dim, where, keys)
    if isinstance(rope.scaling, LongRope):
        _check_factors(rope.scaling, (rotated or head_dim) // 2, where)
    return {"rope_theta": rope.theta, "rope_scaling": rope.scaling, "rotated_features": rotated}


def _read_by_kind(values: dict[str, Any], where: str, keys: RopeKeys) -> dict[str, Any]:
    """The fields for a family whose layers with a window have a table of their own: `rope_parameters` has both, and an
    older `rope_scaling` adds to that of the others."""
    tables = values.get("rope_parameters") or {}
    if not isinstance(tables, dict) or any(tables.get(kind) is not None for kind in tables.keys() - {FULL, SLIDING}):
        raise UserError(
            f"{where}: rope_parameters is {tables!r:.100}; it must have a table for {FULL} and one for {SLIDING}"
        )
    scaling = _table(values.get("rope_scaling") or {}, f"{where}: rope_scaling", keys)
    full = _table(tables.get(FULL) or {}, f"{where}: rope_parameters: {FULL}", keys) | scaling
    sliding = _table(tables.get(SLIDING) or {}, f"{where}: rope_parameters: {SLIDING}", keys)
    for kind, table in ((FULL, full), (SLIDING, sliding)):
        if table.get("truncate") is False:  # which transformers reads beside the tables of both kinds
            raise UserError(
                f"{where}: rope_parameters: {kind}: truncate is False, which transformers ignores; remove it"
            )
        part = table.get("partial_rotary_factor", values.get("partial_rotary_factor"))
        if part not in (None, 1):
            raise UserError(f"{where}: {kind}: partial_rotary_factor is {part!r:.100}; only 1.0 is supported")
    # With a table for each kind, transformers reads the original positions inside them alone.
    values = {key: value for key, value in values.items() if key != "original_max_position_embeddings"}
    main = _rope(full, values, values.get("rope_theta"), f"{where}: rope_parameters: {FULL}", keys)
    theta = values.get("rope_local_base_freq", keys.window_theta)
    window = _rope(sliding, values, theta, f"{where}: rope_parameters: {SLIDING}", keys)
    return {"rope_theta": main.theta, "rope_scaling": main.scaling, "window_rope": window}


def _table(table: Any, where: str, keys: RopeKeys) -> dict[str, Any]:
    """Raises UserError for a key that is not known."""
    if not isinstance(table, dict):
        raise UserError(f"{where} is {table!r:.100}; it must be a table")
    known = _INSIDE | set(keys.more)
    if unknown := sorted(key for key, value in table.items() if key not in known and value is not None):
        raise UserError(
            f"{where}: key {unknown[0]} is not known{', and there are more' * (len(unknown) > 1)}; remove it if it has "
            "no effect (one table for all layers is read)"
        )
    if others := [key for key in _OTHERS if table.get(key) is not None]:
        warnings.warn(
            f"{where}: {' and '.join(others)} is ignored, as in transformers, which only reads attention_factor "
            f"({table.get('attention_factor', 'not given')!s:.40}); write that, or remove the key to silence this",
            stacklevel=3,
        )
    return table


def _rope(table: dict[str, Any], values: dict[str, Any], theta: Any, where: str, keys: RopeKeys) -> Rope:
    """The rotary embedding of a table; `theta` is the base if it has none."""
    base = float(number(table.get("rope_theta", theta), f"{where}: rope_theta"))
    kind = table.get("rope_type", table.get("type", "default"))
    kind = keys.aliases.get(kind, kind) if isinstance(kind, str) else kind
    readers: dict[str, Callable[[dict[str, Any], dict[str, Any], str], RopeScale]] = {
        "yarn": _yarn, "llama3": _llama3, "linear": _linear, "dynamic": _dynamic, "longrope": _longrope
    }  # fmt: skip
    if kind == "default":
        return Rope(base)
    if not isinstance(kind, str) or kind not in readers:
        raise UserError(
            f'{where}: rope type "{kind}" is not supported (rope_type); only default, {", ".join(readers)} are'
        )
    return Rope(base, readers[kind](table, values, where))


def _rotated_features(part: Any, head_dim: int, where: str, keys: RopeKeys) -> int:
    if not keys.partial:
        raise UserError(f"{where}: partial_rotary_factor is {part!r:.100}; only 1.0 is supported")
    if not isinstance(part, (int, float)) or not 0 < part <= 1 or int(head_dim * part) < 1 or int(head_dim * part) % 2:
        raise UserError(
            f"{where}: partial_rotary_factor is {part!r:.100}; it must be above 0 and at most 1, and rotate an even "
            f"number of the {head_dim} features of a head"
        )
    return int(head_dim * part)


def _factor(table: dict[str, Any], kind: str, where: str) -> float:
    if table.get("factor") is None:
        raise UserError(f"{where}: rope type {kind} needs factor")
    return float(number(table["factor"], f"{where}: factor"))


def _linear(table: dict[str, Any], values: dict[str, Any], where: str) -> LinearRope:
    return LinearRope(_factor(table, "linear", where))


def _dynamic(table: dict[str, Any], values: dict[str, Any], where: str) -> DynamicRope:
    return DynamicRope(_factor(table, "dynamic", where))


def _longrope(table: dict[str, Any], values: dict[str, Any], where: str) -> LongRope:
    original = _original_positions(table, values, where)
    short, long = (_divisors(table, key, where) for key in _LONGROPE)
    factor = table.get("factor")
    if factor is None:
        factor = number(values["max_position_embeddings"], f"{where}: max_position_embeddings") / original
    if original < 2:
        raise UserError(f"{where}: original_max_position_embeddings is {original}; rope type longrope needs at least 2")
    attention = table.get("attention_factor")
    if attention is None:
        grown = number(factor, f"{where}: factor")
        attention = math.sqrt(1 + _log(grown) / _log(original)) if grown > 1 else 1.0
    return LongRope(short, long, original, float(number(attention, f"{where}: attention_factor")))


def _log(x: float) -> float:
    """The same bits on every processor."""
    return float(logarithm(np.array([x], dtype=np.float64))[0])


def _divisors(table: dict[str, Any], key: str, where: str) -> tuple[float, ...]:
    values = table.get(key)
    if not isinstance(values, list) or not values:
        raise UserError(f"{where}: {key} is {values!r:.100}; rope type longrope needs a list of numbers")
    return tuple(float(number(value, f"{where}: {key}")) for value in values)


def _check_factors(scaling: LongRope, pairs: int, where: str) -> None:
    for key, factors in zip(_LONGROPE, (scaling.short_factors, scaling.long_factors)):
        if len(factors) != pairs:
            raise UserError(
                f"{where}: {key} has {len(factors)} numbers, but {pairs} pairs of a head's features are rotated"
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


def write_rope(config: ModelConfig, keys: RopeKeys) -> dict[str, Any]:
    """The keys of `config.json`, for old and new transformers."""
    main, *of_windows = (_written(rope) for rope in config.ropes)
    partial = {}
    if keys.partial:
        partial["partial_rotary_factor"] = _part(config.rotated_features or config.head_dim, config.head_dim)
    scaled: dict[str, Any] = {"rope_scaling": main if config.rope_scaling is not None else None}
    if isinstance(config.rope_scaling, LongRope):  # where transformers looks first
        scaled["original_max_position_embeddings"] = config.rope_scaling.original_max_positions
    table = {"rope_theta": config.rope_theta, **main, **partial}
    if keys.by_kind:
        assert config.window_rope is not None
        theta, (window,) = config.window_rope.theta, of_windows
        table = {FULL: table, SLIDING: {"rope_theta": theta, **window}}
    return {"rope_theta": config.rope_theta, **scaled, **partial, "rope_parameters": table}


def _written(rope: Rope) -> dict[str, Any]:
    """The table of a scaling."""
    scaling = rope.scaling
    if scaling is None:
        return {"rope_type": "default"}
    kinds = {
        RopeScaling: "llama3", Yarn: "yarn", LinearRope: "linear", DynamicRope: "dynamic", LongRope: "longrope"
    }  # fmt: skip
    renamed = {
        "original_max_positions": "original_max_position_embeddings",
        "short_factors": "short_factor",
        "long_factors": "long_factor",
    }
    numbers = {key: value for key, value in dataclasses.asdict(scaling).items() if value is not None}
    numbers = {key: list(value) if isinstance(value, tuple) else value for key, value in numbers.items()}
    return {"rope_type": kinds[type(scaling)], **{renamed.get(key, key): value for key, value in numbers.items()}}


def _part(rotated: int, head_dim: int) -> float:
    """The factor of which transformers takes `int(head_dim · factor)` features."""
    part = rotated / head_dim
    return part if int(head_dim * part) == rotated else math.nextafter(part, 1.0)


def refuse_infinite_rotation(config: ModelConfig, where: str) -> None:
    """Raises UserError if the rotary embedding's settings do not give finite angles."""
    if config.head_dim > WIDEST_HEAD:
        shown = str(config.head_dim) if config.head_dim < 10**20 else "a number of more than 20 digits"
        raise UserError(f"{where}: head_dim is {shown}; it can be up to {WIDEST_HEAD}")
    try:
        with np.errstate(all="ignore"):
            factors = [table_factor(rope.scaling) for rope in config.ropes]
            factors += [x for rope in config.ropes for x in rotary_frequencies(config, rope).tolist()]
            factors += [softmax_scale(config)] if config.latent is not None else []
    except (ArithmeticError, ValueError):
        factors = [math.inf]
    if not all(map(math.isfinite, factors)):
        raise UserError(f"{where}: rope_theta and the rotary scaling give angles that are not finite; check them")
