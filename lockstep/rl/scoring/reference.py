"""Other models that score what the policy sampled: the reference of the KL divergence, and a teacher."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep import ops
from lockstep.config import RLConfig
from lockstep.data import Tokenizer
from lockstep.model import Decoder, ScoringModel, adapter_off
from lockstep.parallel import World
from lockstep.rl.generators.models import frozen_model
from lockstep.rl.rollouts.records import Rollout
from lockstep.rl.rollouts.replicas import Replicas
from lockstep.rl.scoring.forward import score_groups
from lockstep.rl.weights.transfer import WeightTransfer
from lockstep.train import Trainer
from lockstep.train.packing import PackedRow, target_log_probs
from lockstep.train.same_vocabulary import refuse_other_vocabulary

START, AVERAGE = "start", "average"
"""Values of `RLConfig.kl_reference`; anything else is a folder."""


class WithoutAdapter:
    """The policy with its adapter switched off: the model that the run started from, without a second copy."""

    def __init__(self, policy: ScoringModel):
        """policy: as this rank computes it alone."""
        assert isinstance(policy, Decoder)
        self.policy = policy

    @property
    def device(self) -> torch.device:
        return self.policy.device

    @property
    def head_weight(self) -> Tensor:
        return self.policy.head_weight

    def reserve_positions(self, length: int) -> None:
        self.policy.reserve_positions(length)

    def __call__(self, tokens: Tensor, positions: Tensor, attention: ops.Attention) -> Tensor:
        with adapter_off(self.policy):
            hidden: Tensor = self.policy(tokens, positions, attention)
        return hidden


def is_own_base(config: RLConfig) -> bool:
    """Whether the reference is the policy itself with its adapter switched off."""
    return bool(config.kl_coefficient and config.lora.rank and config.kl_reference == START)


def load_reference(config: RLConfig, world: World, tokenizer: Tokenizer) -> Decoder | None:
    """The reference model of the KL divergence; None if that has no weight, or it is the policy's own base.

    Raises UserError for a folder whose model has another vocabulary.
    """
    if config.kl_coefficient == 0 or is_own_base(config):
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


def assign_reference_scores(
    rollouts: Sequence[Rollout],
    reference: Decoder | WithoutAdapter,
    config: RLConfig,
    replicas: Replicas | None = None,
    moved: Callable[[], None] = lambda: None,
) -> None:
    """The reference's log-probability of each sampled token; as `score_rollouts`."""
    for rollout, scores in zip(rollouts, score_rollouts(reference, rollouts, config, replicas, moved)):
        rollout.scores.reference_logprobs = scores


def assign_teacher_scores(
    rollouts: Sequence[Rollout],
    teacher: Decoder,
    config: RLConfig,
    replicas: Replicas | None = None,
    moved: Callable[[], None] = lambda: None,
) -> None:
    """The teacher's log-probability of each sampled token; as `score_rollouts`."""
    for rollout, scores in zip(rollouts, score_rollouts(teacher, rollouts, config, replicas, moved)):
        rollout.scores.teacher_logprobs = scores


def score_rollouts(
    model: Decoder | WithoutAdapter,
    rollouts: Sequence[Rollout],
    config: RLConfig,
    replicas: Replicas | None = None,
    moved: Callable[[], None] = lambda: None,
) -> list[list[float]]:
    """The model's log-probability of each sampled token of each rollout, at the run's temperature.

    Groups are divided among `replicas`, so that a group's prompt is computed once; None: all are scored here.
    moved: called after each micro-batch.
    """

    def log_probs(row: PackedRow) -> Tensor:
        return target_log_probs(model, row, config.temperature)[0]

    return score_groups(rollouts, config, model.device, log_probs, replicas, moved)


def moving_average(config: RLConfig, reference: Decoder | None, trainer: Trainer) -> MovingAverage | None:
    """The object that makes `reference` follow the policy, if the run's settings ask for it."""
    if reference is None or config.kl_reference != AVERAGE:
        return None
    return MovingAverage(reference, trainer, config.kl_average_decay)


class MovingAverage:
    """A reference whose weights are the moving average of the policy's own: a ← decay · a + (1 − decay) · θ.

    Averaged in float32 from the trainer's masters, and saved with them (`MasterOptimizer.averages`).
    """

    def __init__(self, reference: Decoder, trainer: Trainer, decay: float):
        self.reference, self.decay = reference, decay
        # Not those of a value head beside the model.
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
