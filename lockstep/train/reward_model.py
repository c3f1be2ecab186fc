"""Reward models: a decoder whose head scores a text, trained on pairs of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep import ops
from lockstep.config import RewardModelConfig, validate_run
from lockstep.data import RowLoader, StepRows
from lockstep.data.preferences import Example
from lockstep.data.tokenizer import Tokenizer
from lockstep.errors import UserError
from lockstep.model import ScoringModel, TrainableModel, begin_adapter, begin_score_head, load_weights, resolve_dtype
from lockstep.observe import OnMetrics
from lockstep.parallel import World, close_world, open_world, parallel_model
from lockstep.progress import Progress
from lockstep.train.adapter import adapted
from lockstep.train.dpo import examples_of, open_preferences
from lockstep.train.preference_batches import PreferenceBatch, end_scores, ending, preference_batch, shares_prompts
from lockstep.train.preference_losses import bradley_terry_loss
from lockstep.train.pretrain import check_length, model_shape
from lockstep.train.resolve_defaults import resolve_defaults
from lockstep.train.rows_task import RowsRun, train_rows
from lockstep.train.trainer import Trainer


def train_reward_model(
    config: RewardModelConfig, progress: Progress | None = None, on_metrics: OnMetrics | None = None
) -> Path:
    """Trains `config.model` with a score head on the pairs in `config.data`; returns the run's folder.

    `config.model` is a language model, whose head is replaced by a fresh one, or a reward model. Under torchrun, all
    ranks call it and rank 0 writes; it calls `on_metrics(step, metrics)` after every step. Raises UserError for bad
    input.
    """
    validate_run(config, RewardModelConfig)
    world = open_world(config.parallel, config.device)
    try:
        return _train(resolve_defaults(config, world), world, progress, on_metrics)
    finally:
        close_world(world)


def _train(config: RewardModelConfig, world: World, progress: Progress | None, on_metrics: OnMetrics | None) -> Path:
    config, tokenizer, _, loader, held_out = open_preferences(config, world, paired=True)
    model = make_reward_model(config, tokenizer, world)
    parts = RowsRun(tokenizer, model, loader, held_out, "reward-model", RewardObjective(config))
    return train_rows(config, world, parts, progress, on_metrics)


def make_reward_model(config: RewardModelConfig, tokenizer: Tokenizer, world: World) -> TrainableModel:
    """This rank's part of the model in the folder `config.model`, with a score head. Raises UserError if it cannot have
    one."""
    shape = model_shape(config, tokenizer)
    check_length(config, shape)
    if shape.lora is not None and not shape.score_head:
        raise UserError(f"{config.model}: is a language model's adapter; merge it first: lockstep convert --merge")
    fill: Callable[[TrainableModel], None] = partial(load_weights, path=config.model)
    if config.lora.rank:
        fill = partial(begin_adapter, path=config.model, seed=config.seed)
        shape = adapted(shape, config.lora, config.model)
    if not shape.score_head:
        fill = partial(begin_score_head, path=config.model, seed=config.seed)
        shape = replace(shape, score_head=True, tie_embeddings=False)
    kind = resolve_dtype(config.dtype)
    return parallel_model(shape, kind, world, config.parallel, config.compile, fill, config.recompute)


class RewardObjective:
    """The objective of `lockstep reward-model` for `train_rows`."""

    def __init__(self, config: RewardModelConfig):
        self.config = config
        self._share = shares_prompts(config)

    def prepare(self, trainer: Trainer, loader: RowLoader, held_out: StepRows | None) -> None:
        pass

    def step(self, trainer: Trainer, batch: StepRows) -> dict[str, float]:
        """One update; the metrics are means over the step's pairs."""
        found = ScoreMetrics()
        with trainer.timeline.span("data"):
            batches = list(self._batches(examples_of(batch), trainer.world))
        metrics = trainer.step(batches, self._loss_of(batch.targets, found))
        return metrics | found.means(trainer.world) | {"examples": batch.targets}

    def validate(self, trainer: Trainer, held_out: StepRows) -> dict[str, float]:
        """The same metrics on the held-out pairs."""
        found = ScoreMetrics()
        batches = self._batches(examples_of(held_out), trainer.world)
        loss = trainer.evaluate(batches, self._loss_of(held_out.targets, found))
        named = {"loss": loss, **found.means(trainer.world), "examples": held_out.targets}
        return {f"validation/{name}": value for name, value in named.items()}

    def _batches(self, examples: list[list[Example]], world: World) -> Iterator[PreferenceBatch]:
        return (preference_batch([ending(e) for e in part], world, self._share) for part in examples)

    def _loss_of(self, count: int, found: ScoreMetrics) -> Callable[[ScoringModel, PreferenceBatch], Tensor]:
        def loss_of(model: ScoringModel, batch: PreferenceBatch) -> Tensor:
            scores, counts = end_scores(model, batch)
            chosen, rejected = scores.view(-1, 2).T
            losses = bradley_terry_loss(chosen, rejected)
            if self.config.centering:
                losses = losses + self.config.centering * (chosen + rejected).square()
            if counts:
                found.add(chosen.detach(), rejected.detach())
            loss = ops.total(losses) / max(count, 1)
            # Ranks that share a row each have the whole loss, and the gradient of their own tokens: it counts once.
            return loss if counts else loss - loss.detach()

        return loss_of


class ScoreMetrics:
    """Sums of the logged values over a step's pairs."""

    def __init__(self) -> None:
        self._sums = torch.zeros(len(NAMES) + 1, dtype=torch.float64)

    def add(self, chosen: Float[Tensor, "examples"], rejected: Float[Tensor, "examples"]) -> None:
        """Adds the pairs of one micro-batch."""
        values = (chosen, rejected, chosen - rejected, chosen > rejected, torch.ones_like(chosen))
        self._sums += torch.stack([value.double().sum().cpu() for value in values])

    def means(self, world: World) -> dict[str, float]:
        """Means over all ranks' pairs."""
        *sums, count = world.sum(self._sums.tolist())
        return {name: value / max(count, 1) for name, value in zip(NAMES, sums)}


NAMES = ("scores/chosen", "scores/rejected", "scores/margin", "scores/accuracy")
