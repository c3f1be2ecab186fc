"""Low-rank adapters outside of the model: many of one base, in one forward pass or in several threads.

The base is not changed. `adapted` says which rows of a forward pass have which adapter; what a row gets are the
operators and roundings of a model with that adapter built in (`ModelConfig.lora`), so its bits are those of that model.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.model.adapter_folder import is_adapter_folder, with_adapter
from lockstep.model.checkpoint import Source, checked_tensor, copy_weights, read_config
from lockstep.model.config import Lora, ModelConfig
from lockstep.model.copied_head import refuse_other_head
from lockstep.model.decoder import Decoder
from lockstep.model.folder import refuse_other_base
from lockstep.model.initialize import initialize_some
from lockstep.model.layers import Weight, adaptable, refuse_rank
from lockstep.model.shard import local_part
from lockstep.model.stored import hugging_face_name, is_adapter
from lockstep.model.tensors import adapter_tensors


class Adapter(nn.Module):
    """The uninitialized matrices of an adapter: its parameters have the names that they have in a model with it.

    A `TrainableModel`, whose `config` is its base's with `lora`: optimizers, `save_adapter` and `initialize_some` take
    it in place of such a model.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str | torch.device = "cpu"):
        """Raises UserError for a layer that the base does not have, and for a rank larger than a layer's matrix."""
        super().__init__()
        assert config.lora is not None
        self.config, self.scaling = config, config.lora.scaling
        self.matrices: dict[str, tuple[Weight, Weight]] = {}
        """A `[rank, in]` and B `[out, rank]` of each adapted layer, by its name, in the order of the base's layers."""
        rank, layers = config.lora.rank, dict(adaptable(Decoder(_without_adapter(config), dtype, "meta")))
        if missing := [name for name in config.lora.modules if name not in layers]:
            raise UserError(f"the adapter is for a layer {missing[0]}, which this model does not have")
        for name in sorted(config.lora.modules, key=list(layers).index):
            refuse_rank(rank, name, layers[name])
            outputs, inputs = layers[name].shape
            a = Weight(rank, inputs, dtype=dtype, device=device)
            b = Weight(outputs, rank, dtype=dtype, device=device)
            self.matrices[name] = a, b
            holder = _submodule(self, name)
            holder.lora_A, holder.lora_B = a, b

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def nbytes(self) -> int:
        """Size of its matrices in bytes."""
        return sum(parameter.nbytes for parameter in self.parameters())


def _submodule(module: nn.Module, name: str) -> nn.Module:
    """The module of this dotted name, created if it does not exist."""
    for part in name.split("."):
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    return module


def _without_adapter(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, lora=None)


def build_adapter(base: Decoder, lora: Lora, seed: int = 0) -> Adapter:
    """A fresh adapter, with the values of one that is built into a model with `lora` and this seed: it adds zeros.

    Raises UserError as `Adapter` does, and for a base that cannot have adapters besides it.
    """
    refuse_adapters(base)
    adapter = Adapter(dataclasses.replace(base.config, lora=lora), base.dtype, base.device)
    initialize_some(adapter, seed, is_adapter)
    return adapter


def load_adapter(folder: Path, base: Decoder, home: Path) -> Adapter:
    """The adapter in a folder in peft's layout. `base` was loaded from `home`, wherever the adapter says its base is.

    Its end tokens are not used: texts end where the base's do. Raises UserError for a folder that is not an adapter's,
    for an unsupported adapter, and for one of another base, or of a run that computed with other settings than the
    base's own or those that it has been given.
    """
    refuse_adapters(base)
    if not is_adapter_folder(folder):
        raise UserError(f"{folder}: is not an adapter's folder: give one with adapter_config.json and no config.json")
    config = with_adapter(folder, base.config, home)
    if config.score_head:
        raise UserError(f"{folder}: is the adapter of a reward model, which predicts no next token")
    own = read_config(home)
    for name in ("reduction_chunks", "precision"):
        recorded, given = getattr(config, name), getattr(base.config, name)
        if recorded not in (given, getattr(own, name)):
            raise UserError(
                f"{folder}: was trained with {name} {recorded}, but its base has {given} here, which gives other bits; "
                "open the base with what the adapter was trained with"
            )
    refuse_other_base(folder, home)
    refuse_other_head(folder, home)
    adapter, stored = Adapter(config, base.dtype, base.device), adapter_tensors(folder)
    sources = []
    for name, parameter in adapter.named_parameters():
        tensor_name = hugging_face_name(name, config)
        tensor = checked_tensor(tensor_name, stored[tensor_name], tuple(parameter.shape), None)
        sources.append(Source(*local_part(parameter), tensor))
    copy_weights(sources)
    return adapter


def refuse_adapters(base: Decoder) -> None:
    """Raises UserError for a model that cannot have adapters besides it."""
    if base.config.lora is not None:
        raise UserError(
            "the model has an adapter built in, and can have no others; merge it first with lockstep convert --merge"
        )
