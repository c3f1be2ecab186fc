"""Sliding windows: the keys `layer_types` and `sliding_window` of `config.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.errors import UserError
from lockstep.model.config import ModelConfig
from lockstep.model.families.reading import layer_kinds, whole_number
from lockstep.model.families.rope import FULL, SLIDING

KINDS = (SLIDING, FULL)


def read_windows(values: dict[str, Any], where: str, kinds: Sequence[str]) -> dict[str, Any]:
    """The field `windows` of ModelConfig; `kinds` are the layers' if the keys have none. Raises UserError."""
    count = whole_number(values, "num_hidden_layers", where)
    kinds = layer_kinds(values, KINDS, where, count) or kinds
    if SLIDING not in kinds:
        return {}
    width = whole_number(values, "sliding_window", where, least=1)
    return {"windows": shortest_pattern([width if kind == SLIDING else 0 for kind in kinds])}


def windows_if_used(values: dict[str, Any], where: str) -> dict[str, Any]:
    """`read_windows` for families with `use_sliding_window`, whose layers from `max_window_layers` on have one."""
    count, used = whole_number(values, "num_hidden_layers", where), values.get("use_sliding_window")
    used = bool(used) and values.get("sliding_window") is not None
    first = whole_number(values, "max_window_layers", where) if used else count
    kinds = layer_kinds(values, KINDS, where, count)
    if kinds is not None and SLIDING in kinds and not used:
        raise UserError(f"{where}: layer_types has {SLIDING}, which needs use_sliding_window and sliding_window")
    return read_windows(values, where, [SLIDING if layer >= first else FULL for layer in range(count)])


def write_windows_if_used(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `windows_if_used`."""
    return write_windows(config) | {"use_sliding_window": bool(config.windows)}


def same_window(values: dict[str, Any], where: str) -> dict[str, Any]:
    """`read_windows` for families all of whose layers have the same window, or none. transformers ignores their
    `layer_types`, which must say the same. Raises UserError."""
    count = whole_number(values, "num_hidden_layers", where)
    kind = FULL if values.get("sliding_window") is None else SLIDING
    kinds = layer_kinds(values, KINDS, where, count)
    if kinds is not None and set(kinds) != {kind}:
        raise UserError(
            f"{where}: layer_types differ from {kind} in all layers, which is what sliding_window means here; "
            "transformers ignores layer_types for this model_type"
        )
    return read_windows(values, where, [kind] * count)


def shortest_pattern(values: Sequence[Any]) -> tuple[Any, ...]:
    """The shortest list whose repetition gives all values."""
    turns = (tuple(values[:length]) for length in range(1, len(values) + 1))
    return next(turn for turn in turns if all(turn[n % len(turn)] == value for n, value in enumerate(values)))


def write_windows(config: ModelConfig, otherwise: int | None = None) -> dict[str, Any]:
    """The inverse of `read_windows`; `otherwise` is the width if no layer has a window. Raises UserError for several
    widths, which the keys cannot express."""
    windows = [config.window(layer) for layer in range(config.num_layers)]
    widths = {window for window in windows if window}
    if len(widths) > 1:
        raise UserError(f"model: windows of {sorted(widths)} tokens; {config.family} has windows of one width only")
    return {
        "layer_types": [SLIDING if window else FULL for window in windows],
        "sliding_window": widths.pop() if widths else otherwise,
    }


def write_same_window(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `same_window`. Raises UserError for windows that differ."""
    keys = write_windows(config)
    if len(set(keys.pop("layer_types"))) > 1:
        raise UserError(f"model: windows in some layers; {config.family} has the same window in all of them")
    return keys
