"""What others need from a model: a loss scores with it, a trainer trains it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lockstep import ops
from lockstep.model.config import ModelConfig


@runtime_checkable
class ScoringModel(Protocol):
    """What a loss needs: hidden states of packed tokens, `[tokens, dim]`, and the head that reads them.

    A `Decoder` is one. In a pipeline it is the last stage, whose hidden states are computed before the loss is called.
    """

    @property
    def head_weight(self) -> Tensor: ...
    def reserve_positions(self, length: int) -> None: ...
    def __call__(self, tokens: Tensor, positions: Tensor, attention: ops.Attention) -> Any: ...


@runtime_checkable
class TrainableModel(Protocol):
    """What trainer, optimizer and checkpoints need: the whole model's shape, and this rank's parameters.

    Those have the names of the whole model. A `Decoder` is one, and so are this rank's stages of a pipeline.
    """

    config: ModelConfig

    @property
    def device(self) -> torch.device: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def modules(self) -> Iterator[nn.Module]: ...
