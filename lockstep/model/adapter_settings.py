"""The supported settings of `adapter_config.json`. An unknown key is refused by name, as it could change results."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.errors import UserError, closest

ONLY: dict[str, Any] = {
    "target_parameters": None,  # first, since peft fills the patterns if it is set
    "peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False, "fan_in_fan_out": False,
    "lora_bias": False, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
    "layer_replication": None, "trainable_token_indices": None, "alora_invocation_tokens": None, "use_qalora": False,
    "use_bdlora": None, "arrow_config": None, "kasa_config": None, "velora_config": None, "monteclora_config": None,
}  # fmt: skip
"""Settings that change the arithmetic, and the only value that is supported."""
WITHOUT_EFFECT = {
    # Its origin, and how it was trained.
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "runtime_config", "merge_weights", "unsloth_fixed",
    "ensure_weight_tying",
    # Options of settings that are refused, of initial weights, and of Megatron's layers.
    "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_config",
    "megatron_core",
}  # fmt: skip
LAYERS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
"""Settings that select the adapted layers. peft drops tensors of layers that are not selected."""
READ = {"r", "lora_alpha", "init_lora_weights", *LAYERS}
MERGE = "merge the adapter with peft's merge_and_unload and give the folder of the merged model"
NOTHING: tuple[Any, ...] = (None, False, "", [])
"""The values that peft writes for unset settings."""


def refuse_settings(settings: dict[str, Any], file: Path, scores: bool) -> None:
    """Raises UserError, naming the key, for a setting that would change results. scores: the adapter has a reward
    model's head, which peft lists in `modules_to_save`."""
    for key, value in ONLY.items():
        setting = settings.get(key, value)
        if setting != value and setting not in NOTHING and not (scores and key == "modules_to_save"):
            raise UserError(f"{file}: {key} is {setting!r:.100}; only {value!r} is supported; {MERGE}")
    known = {*ONLY, *WITHOUT_EFFECT, *READ}
    if unknown := sorted(key for key, value in settings.items() if key not in known and value not in (*NOTHING, {})):
        raise UserError(
            f"{file}: key {unknown[0]} is not known; it could change what the adapter computes."
            f"{closest(unknown[0], known)} Remove it if it has no effect; otherwise {MERGE}"
        )
    if (start := settings.get("init_lora_weights")) not in (None, True, False, "gaussian", "orthogonal", "eva"):
        raise UserError(
            f"{file}: init_lora_weights is {start!r:.100}, which changes the base's weights; convert the adapter with "
            "peft's save_pretrained(path_initial_model_for_weight_conversion=…)"
        )


def refuse_unselected_layers(settings: dict[str, Any], layers: Iterable[str], file: Path) -> None:
    """Raises UserError for a layer (`model.layers.0.self_attn.q_proj`) that has tensors but is not selected by the
    settings' lists: peft drops its tensors. Regular expressions instead of lists are not evaluated: one can run for
    hours."""
    numbers, pattern = settings.get("layers_to_transform"), settings.get("layers_pattern")
    numbers = [numbers] if type(numbers) is int else numbers or None
    parents = [pattern] if isinstance(pattern, str) else pattern or None
    for layer in layers:
        indexed = re.search(r"(?:^|\.)([^.]*)\.([0-9]+)\.", layer)
        meant = {
            "target_modules": _is_among(layer, settings.get("target_modules"), otherwise=True),
            "exclude_modules": not _is_among(layer, settings.get("exclude_modules"), otherwise=False),
            "layers_to_transform": numbers is None
            or (indexed is not None and int(indexed[2]) in numbers and (parents is None or indexed[1] in parents)),
        }
        if key := next((key for key, is_meant in meant.items() if not is_meant), None):
            raise UserError(f"{file}: {key} does not select {layer}, for which the adapter has tensors; correct it")


def _is_among(layer: str, names: Any, otherwise: bool) -> bool:
    """Whether one of the names is the layer's or its last part; `otherwise` if `names` is not a list."""
    return any(f".{layer}".endswith(f".{name}") for name in names) if isinstance(names, list) and names else otherwise
