"""Other models that score rollouts: the reference of the KL divergence, and a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lockstep.config import RLConfig
from lockstep.data import Tokenizer
from lockstep.model import Decoder, adapter_off
from lockstep.parallel import World
from lockstep.rl.generators.models import frozen_model
from lockstep.rl.rollouts.records import Rollout
from lockstep.rl.scoring.forward import ForwardPasses
from lockstep.rl.weights.transfer import WeightTransfer
from lockstep.train import Trainer
from lockstep.train.packing import PackedRow, target_log_probs
from lockstep.train.refusals import refuse_other_vocabulary

START, AVERAGE = "start", "average"
"""Values of `RLConfig.kl_reference`; anything else is a folder."""


def reference_is_base(config: RLConfig) -> bool:
    """Whether the reference is the policy itself with its adapter switched off."""
    return bool(config.kl_coefficient and config.lora.rank and config.kl_reference == START)


def load_reference(config: RLConfig, world: World, tokenizer: Tokenizer) -> Decoder | None:
    """The reference model of the KL divergence; None if that has no weight, or it is the policy without its adapter.

    Raises UserError for a folder whose model has another vocabulary.
    """
    if config.kl_coefficient == 0 or reference_is_base(config):
        return None
    if config.kl_reference in (START, AVERAGE):
        return frozen_model(config.model, world, config.dtype, config.parallel)
    return load_with_vocabulary(config.kl_reference, "kl_reference", config, world, tokenizer)


def load_teacher(config: RLConfig, world: World, tokenizer: Tokenizer) -> Decoder | None:
    """The model to distill from; None if there is none. Raises UserError as `load_reference` does."""
    return load_with_vocabulary(config.teacher, "teacher", config, world, tokenizer) if config.teacher else None


def load_with_vocabulary(folder: str, setting: str, config: RLConfig, world: World, tokenizer: Tokenizer) -> Decoder:
    """A model with the policy's vocabulary, without gradient. Raises UserError, naming `setting`, for any other."""
    refuse_other_vocabulary(folder, setting, config.model, tokenizer)
    return frozen_model(folder, world, config.dtype, config.parallel)


@dataclass(frozen=True)
class LogProbScorer:
    """Scores rollouts with another model, whose log-probability of each sampled token it assigns."""

    model: Decoder
    temperature: float
    """Of sampling."""
    forward: ForwardPasses
    column: Literal["reference_logprobs", "teacher_logprobs"]
    is_base: bool = False
    """Whether the model is the policy, to be used with its adapter switched off: the model that the run started from,
    without a second copy."""

    def score(self, rollouts: Sequence[Rollout]) -> None:
        with adapter_off(self.model) if self.is_base else nullcontext():
            scored = token_log_probs(self.model, rollouts, self.temperature, self.forward)
        for rollout, log_probs in zip(rollouts, scored):
            setattr(rollout.scores, self.column, log_probs)


def token_log_probs(
    model: Decoder, rollouts: Sequence[Rollout], temperature: float, forward: ForwardPasses
) -> list[list[float]]:
    """The model's log-probability of each sampled token of each rollout, at the temperature of sampling."""

    def log_probs(row: PackedRow) -> Tensor:
        return target_log_probs(model, row, temperature)[0]

    return forward.per_token(rollouts, model.device, log_probs)


def moving_average(config: RLConfig, reference: Decoder | None, trainer: Trainer) -> MovingAverage | None:
    """The object that makes `reference` follow the policy, if the run's settings ask for it."""
    if reference is None or config.kl_reference != AVERAGE:
        return None
    return MovingAverage(reference, trainer, config.kl_average_decay)


class MovingAverage:
    """A reference whose weights are the moving average of the policy's: a ← decay · a + (1 − decay) · θ.

    Averaged in float32 from the trainer's masters, and saved with them (`MasterOptimizer.averages`).
    """

    def __init__(self, reference: Decoder, trainer: Trainer, decay: float):
        self.reference, self.decay = reference, decay
        # Without those of a value head.
        extra_parameters = trainer.extra_parameters.parameters
        self.masters = {name: m for name, m in trainer.optimizer.masters.items() if name not in extra_parameters}
        self.averages = trainer.optimizer.averages
        for name, master in self.masters.items():
            self.averages[name] = master.detach().clone()
        self._transfer: WeightTransfer | None = None
        if trainer.world.mesh is not None:
            # Frozen tensors are unchanged in the policy, and so in the reference.
            frozen = {n: p.detach() for n, p in trainer.model.named_parameters() if n not in self.averages}
            self._transfer = WeightTransfer(frozen | self.averages, reference, trainer.world)

    @torch.no_grad()
    def update(self) -> None:
        """Called after a step's last update."""
        for name, master in self.masters.items():
            # Two roundings: a fused multiply-add would have one, and only on some processors.
            self.averages[name].mul_(self.decay).add_(master * (1 - self.decay))
        self.write()

    @torch.no_grad()
    def write(self) -> None:
        """Rounds the averages into the reference's weights; also called after they are read from a checkpoint."""
        if self._transfer is not None:
            self._transfer(0)
            return
        for name, parameter in self.reference.named_parameters():
            if name in self.averages:
                parameter.copy_(self.averages[name])
