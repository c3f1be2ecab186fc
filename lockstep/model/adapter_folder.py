"""A folder with an adapter in `peft`'s layout: `adapter_config.json`, `adapter_model.safetensors`, and no base.

The base is the model folder that `adapter_config.json` names. What `peft` cannot express is in `lockstep.json`:
the base's place relative to the adapter (so that both can move together), a digest of its weights, and settings of the
run that trained the adapter that differ from its base's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lockstep.errors import UserError
from lockstep.hub import hub_name, local_folder
from lockstep.model.adapter_settings import MERGE, refuse_layers_not_meant, refuse_settings
from lockstep.model.config import Lora, ModelConfig
from lockstep.model.decoder import Decoder
from lockstep.model.json_file import read_json
from lockstep.model.lora import projections
from lockstep.model.stored import PEFT_PREFIX, PEFT_ROOT, SCORE, adapter_name, is_beside_base

SETTINGS, TENSORS, OWN = "adapter_config.json", "adapter_model.safetensors", "lockstep.json"
BASE = "LOCKSTEP_BASE"
"""Environment variable, which `--base` sets: the folder of the adapters' base, wherever their own files place it."""
SCORE_TENSOR = adapter_name(SCORE)
"""The head of a reward model with an adapter; it is trained in full."""


def is_adapter_folder(folder: Path) -> bool:
    """Whether it contains an adapter, and not a full model."""
    return (folder / SETTINGS).is_file() and not (folder / "config.json").is_file()


def base_folder(folder: Path) -> Path:
    """The folder of the model that an adapter is for; for any other folder, the folder itself.

    It is where `BASE` says, else where it was relative to the adapter, else where `adapter_config.json` says. Raises
    UserError if there is no base.
    """
    if not is_adapter_folder(folder):
        return folder
    name = os.environ.get(BASE) or _moved_base(folder) or _named_base(folder)
    try:
        found = local_folder(name)
    except UserError as error:
        raise UserError(f"{folder}: its base was not found ({error}); say where it is with --base DIR") from error
    if is_adapter_folder(found):
        raise UserError(f"{folder}: its base {name} is an adapter too; merge that first: lockstep convert --merge")
    if not (found / "config.json").is_file():
        raise UserError(
            f"{folder}: its base was not found ({name} has no config.json; for a run, name one of the folders in "
            "checkpoints/); say where it is with --base DIR"
        )
    return found


def _moved_base(folder: Path) -> str:
    """Where the base is if it has moved along with the adapter; empty if it has not."""
    place = _own(folder).get("base")
    base = folder / place if isinstance(place, str) and place else None
    return str(base.resolve()) if base is not None and (base / "config.json").is_file() else ""


def _named_base(folder: Path) -> str:
    settings = _settings(folder)
    base, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(base, str) or not base:
        raise UserError(f"{folder / SETTINGS}: base_model_name_or_path is missing; name the base with --base DIR")
    return f"{base}@{revision}" if isinstance(revision, str) and revision and not Path(base).is_dir() else base


def with_adapter(folder: Path, base: ModelConfig) -> ModelConfig:
    """The base's shape with the folder's adapter. Raises UserError for one of another kind or for another base."""
    settings = _settings(folder)
    shapes = _shapes(folder)
    scores = SCORE_TENSOR in shapes
    refuse_settings(settings, folder / SETTINGS, scores)
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1 or not 0 < alpha < math.inf:
        raise UserError(
            f"{folder / SETTINGS}: r is {rank!r:.40} and lora_alpha {alpha!r:.40}; both must be numbers above 0"
        )
    modules = _modules(folder, shapes)
    lora = Lora(rank, float(alpha), modules)
    head: dict[str, Any] = {"score_head": True, "tie_embeddings": False} if scores else {}
    config = _with_own(folder, dataclasses.replace(base, lora=lora, **head))
    _refuse_other_shapes(folder, config, shapes)
    layers = [f"{PEFT_PREFIX}{module}".removeprefix(PEFT_ROOT) for module in modules]
    refuse_layers_not_meant(settings, layers, folder / SETTINGS)
    return config


def adapter_files(folder: Path) -> dict[str, Path]:
    """The file of every tensor of the adapter."""
    return dict.fromkeys(_shapes(folder), folder / TENSORS)


def refuse_other_base(folder: Path, base: Path | None = None) -> None:
    """Raises UserError if the weights in `base`, by default the folder's own, are not those of the adapter's run.

    An adapter that does not say, such as one from `peft`, works with any base of its shapes.
    """
    base = base_folder(folder) if base is None else base
    recorded = _own(folder).get("base_digest")
    if recorded and (found := digest(base)) != recorded:
        raise UserError(
            f"{folder}: is an adapter for other weights than those in {base}: their digest is {found}, but that of the "
            f"adapter's base is {recorded}; give its own base with --base DIR, or delete "
            f"{OWN} there to use it with this one anyway"
        )


def refuse_other_adapter(folder: Path, lora: Lora) -> None:
    """Raises UserError if the folder's adapter does not match `lora`: a run cannot continue with a different one."""
    settings = _settings(folder)
    names = {"lora.rank": lora.rank, "lora.alpha": lora.alpha, "lora.targets": sorted(lora.modules)}
    found = settings.get("r"), settings.get("lora_alpha"), sorted(_modules(folder, _shapes(folder)))
    for (name, own), theirs in zip(names.items(), found):
        if own != theirs:
            raise UserError(
                f"{folder}: was trained with {name} {theirs!s:.200}, not {own!s:.200}; resume with the same adapter, "
                "or start a new run"
            )


def digest(folder: Path) -> str:
    """Digest of all tensors in a model folder, in whichever files: their names, dtypes, shapes and checksums."""
    # Imported here because that module, which knows a folder's files, imports this one.
    from lockstep.model.folder import open_tensors, tensor_files

    by_file: dict[Path, list[str]] = defaultdict(list)
    for name, path in tensor_files(folder).items():
        by_file[path].append(name)
    lines = []
    for path, names in by_file.items():
        file = open_tensors(path)
        for name in names:
            tensor = file.get_tensor(name)
            values = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            lines.append(f"{name} {tensor.dtype} {list(tensor.shape)} {zlib.crc32(values):08x}")
    return hashlib.blake2b("\n".join(sorted(lines)).encode(), digest_size=16).hexdigest()


def save_adapter(model: Decoder, path: str | Path, base: str | Path) -> None:
    """Writes the model's adapter to a folder that `peft` loads; `base` is the folder with its other weights.

    Raises UserError for a model without an adapter.
    """
    if model.config.lora is None:
        raise UserError("the model has no adapter; save it with lockstep.save_model")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    named = {adapter_name(n): p.detach().contiguous() for n, p in model.named_parameters() if is_beside_base(n)}
    partial = folder / (TENSORS + ".partial")
    save_file(named, partial, metadata={"format": "pt"})
    partial.replace(folder / TENSORS)
    write_adapter_description(folder, model.config, Path(base), digest(Path(base)))


def write_adapter_description(folder: Path, config: ModelConfig, base: Path, base_digest: str) -> None:
    """Writes the files that go with an adapter's tensors: `peft`'s settings, and ours. `config.lora` is set."""
    assert config.lora is not None
    base = base.resolve()
    name, revision = hub_name(base) or (str(base), None)
    settings = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if config.score_head else "CAUSAL_LM",
        **({"modules_to_save": ["score"]} if config.score_head else {}),
        "base_model_name_or_path": name,
        **({"revision": revision} if revision else {}),
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": _short_names(config),
        "bias": "none",
        "inference_mode": True,
    }
    own = {
        **({} if revision else {"base": os.path.relpath(base, folder.resolve())}),
        "base_digest": base_digest,
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": list(config.eos_token_ids),
        "reduction_chunks": config.reduction_chunks,
    }
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
    (folder / OWN).write_text(json.dumps(own, indent=2) + "\n")


def _short_names(config: ModelConfig) -> list[str]:
    """`target_modules` as people write them: last names if those of all layers are meant, else full names."""
    assert config.lora is not None
    everything: dict[str, list[str]] = defaultdict(list)
    for name, _ in projections(Decoder(config, torch.float32, "meta")):
        everything[name.rpartition(".")[2]].append(name)
    adapted = set(config.lora.modules)
    names = []
    for last, layers in everything.items():
        # peft applies a last name to every layer that ends with it, including an expert's.
        whole = adapted.issuperset(layers) and config.experts is None
        names += [last] if whole else [name for name in layers if name in adapted]
    return names


def _modules(folder: Path, shapes: Mapping[str, list[int]]) -> tuple[str, ...]:
    """The layers that the adapter's tensors are for."""
    modules = dict[str, None]()
    for name in (name for name in shapes if name != SCORE_TENSOR):
        stem, found, _ = name.partition(".lora_")
        if not found or not name.startswith(f"{PEFT_PREFIX}") or name[len(stem) :] not in _ENDINGS:
            raise UserError(
                f"{folder / TENSORS}: tensor {name} is not the LoRA matrix of a layer that can have an adapter here "
                f"({PEFT_PREFIX}….lora_A.weight or B); {MERGE}"
            )
        modules[stem.removeprefix(f"{PEFT_PREFIX}")] = None
    if not modules:
        raise UserError(f"{folder / TENSORS}: contains no tensors; the adapter is empty")
    return tuple(modules)


_ENDINGS = (".lora_A.weight", ".lora_B.weight")


def _refuse_other_shapes(folder: Path, config: ModelConfig, shapes: Mapping[str, list[int]]) -> None:
    """Raises UserError naming the first tensor that does not fit the base, before anything is built from it."""
    assert config.lora is not None
    base = Decoder(dataclasses.replace(config, lora=None), torch.float32, "meta")
    layers, others = dict(projections(base)), {name.removesuffix(".weight") for name, _ in base.named_parameters()}
    rank = config.lora.rank
    for module in config.lora.modules:
        if module not in layers and re.sub(r"(?<=\.experts)\.[0-9]+", "", module) in others:
            kinds = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise UserError(f"{folder}: adapts {module}, but only {kinds} can have an adapter here; {MERGE}")
        if module not in layers:
            raise UserError(
                f"{folder}: is an adapter for another base: it adapts {module}, which {base_folder(folder)} does not "
                "have; give its own base with --base DIR"
            )
        outputs, inputs = layers[module].weight.shape
        for ending, wanted in zip(_ENDINGS, ([rank, inputs], [outputs, rank])):
            found = shapes.get(f"{PEFT_PREFIX}{module}{ending}", [])
            if found != wanted:
                raise UserError(
                    f"{folder}: is an adapter for another base: {module}{ending} has shape {found}, but rank {rank} "
                    f"beside the {outputs} x {inputs} matrix of {base_folder(folder)} requires {wanted}; give its own "
                    "base with --base DIR"
                )


def _shapes(folder: Path) -> dict[str, list[int]]:
    """The shape of every tensor in the adapter's file, by its name there."""
    path = folder / TENSORS
    if not path.is_file():
        raise UserError(f"{folder}: {TENSORS} is missing; only safetensors are read, never pickles")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({error}); copy it again") from error


def _settings(folder: Path) -> dict[str, Any]:
    return read_json(folder / SETTINGS)


def _with_own(folder: Path, config: ModelConfig) -> ModelConfig:
    """`config` with the settings in `lockstep.json`."""
    own = {key: value for key, value in _own(folder).items() if key in _OWN}
    for key, value in own.items():
        numbers = value if key == "eos_token_ids" else [] if value is None and key == "bos_token_id" else [value]
        if not isinstance(numbers, list) or {type(number) for number in numbers} - {int}:
            raise UserError(f"{folder / OWN}: {key} is {value!r:.40}; it must be {_OWN[key]}")
    if "eos_token_ids" in own:
        own["eos_token_ids"] = tuple(own["eos_token_ids"])
    try:
        return dataclasses.replace(config, **own)
    except UserError as error:
        raise UserError(f"{folder / OWN}: cannot be used ({error})") from error


_OWN = {
    "bos_token_id": "a whole number or null",
    "eos_token_ids": "a list of whole numbers",
    "reduction_chunks": "a whole number",
}


def _own(folder: Path) -> dict[str, Any]:
    return read_json(folder / OWN) if (folder / OWN).is_file() else {}
