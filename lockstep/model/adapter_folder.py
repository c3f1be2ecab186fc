"""A folder with an adapter in `peft`'s layout: `adapter_config.json`, `adapter_model.safetensors`, and no base.

The base is the model folder that `adapter_config.json` names. `lockstep.json` has what `peft` cannot express: the
base's path relative to the adapter (so that both can move together), a digest of its weights, and settings of the
training run that differ from the base's.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lockstep.errors import UserError, closest
from lockstep.hub import is_local, local_folder
from lockstep.model.config import Lora, ModelConfig
from lockstep.model.config_json import config_values, holds_model
from lockstep.model.decoder import Decoder
from lockstep.model.json_file import read_json
from lockstep.model.layers import adaptable
from lockstep.model.stored import (
    PEFT_PREFIX,
    PEFT_ROOT,
    SCORE,
    hugging_face_name,
    layer_of_file,
    names_in_language_model,
)
from lockstep.model.vision_wrapper import is_wrapper
from lockstep.precision import HEAD, read_precision

SETTINGS, TENSORS, LOCKSTEP_SETTINGS = "adapter_config.json", "adapter_model.safetensors", "lockstep.json"
BASE = "LOCKSTEP_BASE"
"""Environment variable, set by `--base`: the folder of the adapters' base, overriding the adapters' files."""
SCORE_TENSOR = f"{PEFT_ROOT}{SCORE}"
"""The head of a reward model with an adapter; all of it is trained."""
HEAD_COPY = f"{PEFT_ROOT}{HEAD}.base_layer.weight"
"""The base's head, which peft saves with an adapter of the head unless told not to."""

ONLY: dict[str, Any] = {
    "target_parameters": None,  # first, since peft fills the patterns if it is set
    "peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False, "fan_in_fan_out": False,
    "lora_bias": False, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
    "layer_replication": None, "trainable_token_indices": None, "alora_invocation_tokens": None, "use_qalora": False,
    "use_bdlora": None, "arrow_config": None, "kasa_config": None, "velora_config": None, "monteclora_config": None,
}  # fmt: skip
"""Settings of `adapter_config.json` that change the arithmetic, and the only value that is supported. An unknown key is
refused by name, as it could change results."""
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


def is_adapter_folder(folder: Path) -> bool:
    """Whether the folder contains an adapter and not a full model."""
    return (folder / SETTINGS).is_file() and not (folder / "config.json").is_file()


def base_folder(folder: Path) -> Path:
    """The folder of the model that an adapter is for; for any other folder, the folder itself.

    In this order: the folder in `BASE`, the recorded path relative to the adapter, the one in `adapter_config.json`.
    Raises UserError if there is no base.
    """
    if not is_adapter_folder(folder):
        return folder
    name = os.environ.get(BASE) or _moved_base(folder) or _named_base(folder)
    try:
        base = local_folder(name)
    except UserError as error:
        raise UserError(f"{folder}: its base was not found ({error}); say where it is with --base DIR") from error
    if is_adapter_folder(base):
        raise UserError(f"{folder}: its base {name} is an adapter too; merge that first: lockstep convert --merge")
    if not holds_model(base):
        raise UserError(
            f"{folder}: its base was not found ({name} has no config.json; for a run, name one of the folders in "
            "checkpoints/); say where it is with --base DIR"
        )
    return base


def _moved_base(folder: Path) -> str:
    """The base at its recorded path relative to the adapter; empty if it is not there."""
    relative = lockstep_settings(folder).get("base")
    base = folder / relative if isinstance(relative, str) and relative else None
    return str(base.resolve()) if base is not None and holds_model(base) else ""


def _named_base(folder: Path) -> str:
    settings = _settings(folder)
    base, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(base, str) or not base:
        raise UserError(f"{folder / SETTINGS}: base_model_name_or_path is missing; name the base with --base DIR")
    return f"{base}@{revision}" if isinstance(revision, str) and revision and not is_local(base) else base


def with_adapter(folder: Path, base: ModelConfig, home: Path | None = None) -> ModelConfig:
    """The base's shape with the folder's adapter. home: the base's folder; None: where the adapter says it is.

    Raises UserError for an unsupported adapter or one for another base.
    """
    home = base_folder(folder) if home is None else home
    settings = _settings(folder)
    shapes = _shapes(folder)
    scores = SCORE_TENSOR in shapes
    _refuse_settings(settings, folder / SETTINGS, scores)
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1 or not 0 < alpha < math.inf:
        raise UserError(
            f"{folder / SETTINGS}: r is {rank!r:.40} and lora_alpha {alpha!r:.40}; both must be numbers above 0"
        )
    modules = _modules(folder, shapes)
    lora = Lora(rank, float(alpha), modules)
    head: dict[str, Any] = {"score_head": True, "tie_embeddings": False} if scores else {}
    config = _with_lockstep_settings(folder, dataclasses.replace(base, lora=lora, **head))
    _refuse_other_shapes(folder, config, shapes, home)
    # peft's own names, which may be those in a model with a vision tower.
    stored = (name.removeprefix(PEFT_ROOT) for name in _stored_shapes(folder) if name != SCORE_TENSOR)
    layers = dict.fromkeys(name.partition(".lora_")[0] for name in stored)
    _refuse_unselected_layers(settings, layers, folder / SETTINGS)
    return config


def adapter_files(folder: Path) -> dict[str, Path]:
    """The file of every tensor of the adapter."""
    return dict.fromkeys(_shapes(folder), folder / TENSORS)


def refuse_other_adapter(folder: Path, lora: Lora) -> None:
    """Raises UserError if the folder's adapter does not match `lora`: a run cannot continue with a different one."""
    settings = _settings(folder)
    names = {"lora.rank": lora.rank, "lora.alpha": lora.alpha, "lora.targets": sorted(lora.modules)}
    stored = settings.get("r"), settings.get("lora_alpha"), sorted(_modules(folder, _shapes(folder)))
    for (name, wanted), value in zip(names.items(), stored):
        if wanted != value:
            raise UserError(
                f"{folder}: was trained with {name} {value!s:.200}, not {wanted!s:.200}; resume with the same adapter, "
                "or start a new run"
            )


def _modules(folder: Path, shapes: Mapping[str, list[int]]) -> tuple[str, ...]:
    """The layers that the adapter's tensors adapt."""
    modules = dict[str, None]()
    for name in (name for name in shapes if name != SCORE_TENSOR):
        stem, separator, _ = name.partition(".lora_")
        is_layer = stem.startswith(PEFT_PREFIX) or stem == f"{PEFT_ROOT}{HEAD}"
        if not separator or not is_layer or name[len(stem) :] not in _ENDINGS:
            raise UserError(
                f"{folder / TENSORS}: tensor {name} is not the LoRA matrix of a layer that can have an adapter here "
                f"({PEFT_PREFIX}….lora_A.weight or B); {MERGE}"
            )
        modules[layer_of_file(stem.removeprefix(PEFT_PREFIX).removeprefix(PEFT_ROOT))] = None
    if not modules:
        raise UserError(f"{folder / TENSORS}: contains no tensors; the adapter is empty")
    return tuple(modules)


_ENDINGS = (".lora_A.weight", ".lora_B.weight")


def _refuse_other_shapes(folder: Path, config: ModelConfig, shapes: Mapping[str, list[int]], home: Path) -> None:
    """Raises UserError naming the first tensor that does not fit the base, before anything is built from the folder."""
    assert config.lora is not None
    base = Decoder(dataclasses.replace(config, lora=None), torch.float32, "meta")
    layers, others = dict(adaptable(base)), {name.removesuffix(".weight") for name, _ in base.named_parameters()}
    rank = config.lora.rank
    for module in config.lora.modules:
        if module not in layers and re.sub(r"(?<=\.experts)\.[0-9]+", "", module) in others:
            kinds = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise UserError(f"{folder}: adapts {module}, but only {kinds} can have an adapter here; {MERGE}")
        if module not in layers and is_wrapper(config_values(home)[0]):
            raise UserError(f"{folder}: adapts {module}, but only the language model can have an adapter here; {MERGE}")
        if module not in layers:
            raise UserError(
                f"{folder}: is an adapter for another base: it adapts {module}, which {home} does not "
                "have; give its own base with --base DIR"
            )
        outputs, inputs = layers[module].shape
        for ending, wanted in zip(_ENDINGS, ([rank, inputs], [outputs, rank])):
            shape = shapes.get(hugging_face_name(f"{module}{ending}", config), [])
            if shape != wanted:
                raise UserError(
                    f"{folder}: is an adapter for another base: {module}{ending} has shape {shape}, but rank {rank} "
                    f"with the {outputs} x {inputs} matrix of {home} requires {wanted}; give its own "
                    "base with --base DIR"
                )


def _refuse_settings(settings: dict[str, Any], file: Path, scores: bool) -> None:
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


def _refuse_unselected_layers(settings: dict[str, Any], layers: Iterable[str], file: Path) -> None:
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


def _shapes(folder: Path) -> dict[str, list[int]]:
    """The shape of every tensor in the adapter's file, by its `names_in_language_model`."""
    shapes = _stored_shapes(folder)
    return {name: shapes[stored] for name, stored in names_in_language_model(shapes).items()}


def _stored_shapes(folder: Path) -> dict[str, list[int]]:
    """The shape of every tensor in the adapter's file but a `HEAD_COPY`, by its name there."""
    path = folder / TENSORS
    if not path.is_file():
        raise UserError(f"{folder}: {TENSORS} is missing; only safetensors are read, never pickles")
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name != HEAD_COPY]  # noqa: SIM118
            return {name: list(file.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({error}); copy it again") from error


def _settings(folder: Path) -> dict[str, Any]:
    return read_json(folder / SETTINGS)


def _with_lockstep_settings(folder: Path, config: ModelConfig) -> ModelConfig:
    """`config` with the settings in `lockstep.json`."""
    settings = {key: value for key, value in lockstep_settings(folder).items() if key in _RUN_SETTINGS}
    for key, value in settings.items():
        numbers = value if key == "eos_token_ids" else [] if value is None and key == "bos_token_id" else [value]
        if not isinstance(numbers, list) or {type(number) for number in numbers} - {int}:
            raise UserError(f"{folder / LOCKSTEP_SETTINGS}: {key} is {value!r:.40}; it must be {_RUN_SETTINGS[key]}")
    if "eos_token_ids" in settings:
        settings["eos_token_ids"] = tuple(settings["eos_token_ids"])
    if (precision := lockstep_settings(folder).get("precision")) is not None:
        settings["precision"] = read_precision(precision, str(folder / LOCKSTEP_SETTINGS))
    try:
        return dataclasses.replace(config, **settings)
    except UserError as error:
        raise UserError(f"{folder / LOCKSTEP_SETTINGS}: cannot be used ({error})") from error


_RUN_SETTINGS = {
    "bos_token_id": "a whole number or null",
    "eos_token_ids": "a list of whole numbers",
    "reduction_chunks": "a whole number",
}


def lockstep_settings(folder: Path) -> dict[str, Any]:
    return read_json(folder / LOCKSTEP_SETTINGS) if (folder / LOCKSTEP_SETTINGS).is_file() else {}
