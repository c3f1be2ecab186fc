"""One client's adapter of the base, its optimizer, and its gradients between requests. Used in the engine's thread."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lockstep.config import TrainConfig
from lockstep.errors import UserError
from lockstep.model import Decoder
from lockstep.model.adapted_rows import AdaptedRows, adapted
from lockstep.model.adapters import Adapter
from lockstep.train.optimizer import MasterOptimizer
from lockstep.train_server.batches import LossOfData, MicroBatch, log_probs_of
from lockstep.train_server.protocol import AdamParams

OPTIMIZER = "optimizer.safetensors"


@dataclass
class Outputs:
    """What a request's micro-batches have computed so far."""

    log_probs: list[Tensor] = field(default_factory=list)
    """Of each datum, in the shape of its targets."""
    losses: list[float] = field(default_factory=list)
    """Of each target, or of each datum."""
    metrics: list[Mapping[str, float]] = field(default_factory=list)
    """Of each datum, if its loss has any."""


class TrainedModel:
    """An adapter that is being trained over `base`, which it shares with all others."""

    def __init__(self, base: Decoder, adapter: Adapter):
        self.base, self.adapter = base, adapter
        self.optimizer = MasterOptimizer(adapter, _settings(AdamParams()))
        self.updates = 0
        self.problem = ""
        """Why a forward_backward since the last update failed: the gradients are not those that the client means."""
        self._is_shared = False
        """Whether a snapshot is in the memory of the adapter's values."""

    def compute(self, batch: MicroBatch, loss_of: LossOfData, backward: bool, outputs: Outputs) -> None:
        """Adds a micro-batch to `outputs`, and its gradients, if `backward`, to those since the last update."""
        with torch.set_grad_enabled(backward), adapted([AdaptedRows(self.adapter)]):
            log_probs = log_probs_of(self.base, batch)
            losses, metrics = loss_of(batch.data, log_probs)
            if backward and losses.requires_grad:
                losses.sum().backward()
        sizes = [datum.targets.numel() for datum in batch.data]
        parts = log_probs.detach().split(sizes)
        outputs.log_probs += [part.view(datum.targets.shape) for datum, part in zip(batch.data, parts)]
        outputs.losses += losses.detach().flatten().tolist()
        outputs.metrics += metrics

    def spoil(self, problem: str) -> None:
        """The gradients lack something that the client has sent: the next update fails, and drops them."""
        self.problem = self.problem or problem

    def update(self, params: AdamParams) -> dict[str, float]:
        """AdamW with the gradients so far, which it clears; returns metrics.

        Raises UserError, leaving the weights unchanged, if they are not what the client means, or not finite.
        """
        problem, self.problem = self.problem, ""
        if problem:
            self.optimizer.skip()
            raise UserError(f"the weights are unchanged, because a forward_backward before this step failed: {problem}")
        if self._is_shared:
            for parameter in self.adapter.parameters():
                parameter.data = parameter.data.clone()
            self._is_shared = False
        norm = self.optimizer.gradient_norms()["grad_norm"]
        if not math.isfinite(norm):
            self.optimizer.skip()
            raise UserError("the gradient is not finite: the weights are unchanged, and the gradient is dropped")
        self.optimizer.use(_settings(params))
        self.optimizer.update(params.learning_rate, norm)
        self.updates += 1
        return {"grad_norm": norm, "learning_rate": params.learning_rate}

    def snapshot(self) -> Adapter:
        """An adapter with the present values. It has them in the same memory until the next update moves the trained
        ones, so nothing is copied."""
        self._is_shared = True
        return _in_same_memory(self.adapter)

    def save(self, folder: Path) -> None:
        """Writes the optimizer's state into a folder."""
        save_file(
            {name: tensor.contiguous() for name, tensor in self.optimizer.state_tensors().items()}, folder / OPTIMIZER
        )

    def load(self, adapter: Adapter, folder: Path | None) -> None:
        """Takes the values of an adapter of the same form, and the optimizer's state of a folder; None: a new one.

        Raises UserError for another form, changing nothing.
        """
        own, theirs = (dict(each.named_parameters()) for each in (self.adapter, adapter))
        if {n: p.shape for n, p in own.items()} != {n: p.shape for n, p in theirs.items()}:
            raise UserError(
                "the saved state is of an adapter with another rank or for other layers; create a new client"
            )
        fresh = TrainedModel(self.base, adapter)
        if folder is not None:
            fresh.optimizer.load_state_tensors(load_file(folder / OPTIMIZER))
        self.adapter, self.optimizer, self.problem, self._is_shared = adapter, fresh.optimizer, "", False

    @property
    def nbytes(self) -> int:
        """Memory of the adapter and its optimizer."""
        return self.adapter.nbytes + sum(tensor.nbytes for tensor in self.optimizer.state_tensors().values())


def _in_same_memory(adapter: Adapter) -> Adapter:
    parameters: Sequence[nn.Parameter] = list(adapter.parameters())
    memo: dict[int, object] = {id(each): nn.Parameter(each.data, requires_grad=False) for each in parameters}
    return copy.deepcopy(adapter, memo | {id(adapter.config): adapter.config})


def _settings(params: AdamParams) -> TrainConfig:
    return TrainConfig(
        beta1=params.beta1,
        beta2=params.beta2,
        epsilon=params.eps,
        weight_decay=params.weight_decay,
        max_grad_norm=max(params.grad_clip_norm, 0.0),
    )
