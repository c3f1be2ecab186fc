"""Writes an adapter folder, in the layout that `adapter_folder` describes."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from lockstep.errors import UserError
from lockstep.hub import hub_name
from lockstep.model.adapter_folder import LOCKSTEP_SETTINGS, SETTINGS, TENSORS
from lockstep.model.config import ModelConfig
from lockstep.model.decoder import Decoder
from lockstep.model.folder import digest
from lockstep.model.layers import adaptable
from lockstep.model.protocols import TrainableModel
from lockstep.model.stored import adapter_name, is_saved_with_adapter, layer_in_file


def save_adapter(model: TrainableModel, path: str | Path, base: str | Path) -> None:
    """Writes a model's adapter, or an `Adapter`, to a folder that `peft` loads; `base` is the folder with the model's
    other weights.

    Raises UserError for a model without an adapter.
    """
    if model.config.lora is None:
        raise UserError("the model has no adapter; save it with lockstep.save_model")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    named = {
        adapter_name(name, model.config): parameter.detach().contiguous()
        for name, parameter in model.named_parameters()
        if is_saved_with_adapter(name)
    }
    partial = folder / (TENSORS + ".partial")
    save_file(named, partial, metadata={"format": "pt"})
    partial.replace(folder / TENSORS)
    write_adapter_description(folder, model.config, Path(base), digest(Path(base)))


def write_adapter_description(folder: Path, config: ModelConfig, base: Path, base_digest: str) -> None:
    """Writes everything but the tensors: `peft`'s settings, and Lockstep's. `config.lora` must be set."""
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
    ours = {
        **({} if revision else {"base": os.path.relpath(base, folder.resolve())}),
        "base_digest": base_digest,
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": list(config.eos_token_ids),
        "reduction_chunks": config.reduction_chunks,
        "precision": dataclasses.asdict(config.precision),
    }
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
    (folder / LOCKSTEP_SETTINGS).write_text(json.dumps(ours, indent=2) + "\n")


def _short_names(config: ModelConfig) -> list[str]:
    """`target_modules` as people write them: last names if all layers with that name are adapted, else full names."""
    assert config.lora is not None
    everything: dict[str, list[str]] = defaultdict(list)
    for layer, _ in adaptable(Decoder(config, torch.float32, "meta")):
        name = layer_in_file(layer, config)
        everything[name.rpartition(".")[2]].append(name)
    adapted = {layer_in_file(layer, config) for layer in config.lora.modules}
    names = []
    for last, layers in everything.items():
        # peft applies a last name to every layer whose name ends with it, including those of experts.
        all_adapted = adapted.issuperset(layers) and config.experts is None
        names += [last] if all_adapted else [name for name in layers if name in adapted]
    return names
