"""Interfaces of a model: for losses, which score with it, and for trainers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lockstep import ops
from lockstep.model.config import ModelConfig


@runtime_checkable
class ScoringModel(Protocol):
    """For losses: hidden states of packed tokens, `[tokens, dim]`, and the head that reads them.

    Implemented by `Decoder`, and in a pipeline by the last stage, whose hidden states exist before the loss is called.
    """

    @property
    def head_weight(self) -> Tensor: ...
    @property
    def head_terms(self) -> ops.HeadTerms: ...
    def reserve_positions(self, length: int) -> None: ...
    def __call__(self, tokens: Tensor, positions: Tensor, attention: ops.Attention) -> Any: ...


@runtime_checkable
class TrainableModel(Protocol):
    """For trainer, optimizer and checkpoints: the whole model's shape, and this rank's parameters, with the names that
    they have in the whole model.

    Implemented by `Decoder`, and by a rank's stages of a pipeline.
    """

    config: ModelConfig

    @property
    def device(self) -> torch.device: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def modules(self) -> Iterator[nn.Module]: ...
