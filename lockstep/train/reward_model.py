"""Reward models: a decoder whose head scores a text, trained on pairs of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from lockstep.config import RewardModelConfig, validate_run
from lockstep.data import RowLoader, StepRows
from lockstep.data.preferences import Example
from lockstep.data.tokenizer import Tokenizer
from lockstep.errors import UserError
from lockstep.model import ScoringModel, TrainableModel, begin_adapter, begin_score_head, load_weights
from lockstep.observe import OnMetrics
from lockstep.parallel import World
from lockstep.progress import Progress
from lockstep.train.preference_losses import bradley_terry_loss
from lockstep.train.preferences import (
    Means,
    PreferenceBatch,
    end_scores,
    example_share,
    examples_of,
    open_preferences,
    preference_batch,
    shares_prompts,
    with_end_target,
)
from lockstep.train.rows_task import RowsRun, train_rows
from lockstep.train.setup import adapted, model_shape, trained_model, training_world
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
    with training_world(config) as (config, world):
        config, tokenizer, _, loader, held_out = open_preferences(config, world, paired=True)
        model = make_reward_model(config, tokenizer, world)
        parts = RowsRun(tokenizer, model, loader, held_out, "reward-model", RewardObjective(config))
        return train_rows(config, world, parts, progress, on_metrics)


def make_reward_model(config: RewardModelConfig, tokenizer: Tokenizer, world: World) -> TrainableModel:
    """This rank's part of the model in the folder `config.model`, with a score head. Raises UserError if it cannot have
    one."""
    shape = model_shape(config, tokenizer)
    if shape.lora is not None and not shape.score_head:
        raise UserError(f"{config.model}: is a language model's adapter; merge it first: lockstep convert --merge")
    fill: Callable[[TrainableModel], None] = partial(load_weights, path=config.model)
    if config.lora.rank:
        fill = partial(begin_adapter, path=config.model, seed=config.seed)
    if not shape.score_head:
        fill = partial(begin_score_head, path=config.model, seed=config.seed)
        shape = replace(shape, score_head=True, tie_embeddings=False)
    if config.lora.rank:  # whose layers are those of a model with a score head
        shape = adapted(shape, config.lora, config.model)
    return trained_model(config, shape, world, fill)


class RewardObjective:
    """The objective of `lockstep reward-model` for `train_rows`."""

    def __init__(self, config: RewardModelConfig):
        self.config = config
        self._share = shares_prompts(config)

    def prepare(self, trainer: Trainer, loader: RowLoader, held_out: StepRows | None) -> None:
        pass

    def step(self, trainer: Trainer, batch: StepRows) -> dict[str, float]:
        """One update; the metrics are means over the step's pairs."""
        means = Means(NAMES)
        with trainer.timeline.span("data"):
            batches = list(self._batches(examples_of(batch), trainer.world))
        metrics = trainer.step(batches, self._loss_of(batch.targets, means))
        return metrics | means.over(trainer.world) | {"examples": batch.targets}

    def validate(self, trainer: Trainer, held_out: StepRows) -> dict[str, float]:
        """The same metrics on the held-out pairs."""
        means = Means(NAMES)
        batches = self._batches(examples_of(held_out), trainer.world)
        loss = trainer.evaluate(batches, self._loss_of(held_out.targets, means))
        named = {"loss": loss, **means.over(trainer.world), "examples": held_out.targets}
        return {f"validation/{name}": value for name, value in named.items()}

    def _batches(self, examples: list[list[Example]], world: World) -> Iterator[PreferenceBatch]:
        return (preference_batch([with_end_target(e) for e in part], world, self._share) for part in examples)

    def _loss_of(self, count: int, means: Means) -> Callable[[ScoringModel, PreferenceBatch], Tensor]:
        def loss_of(model: ScoringModel, batch: PreferenceBatch) -> Tensor:
            scores, counts = end_scores(model, batch)
            chosen, rejected = scores.view(-1, 2).T
            losses = bradley_terry_loss(chosen, rejected)
            if self.config.centering:
                losses = losses + self.config.centering * (chosen + rejected).square()
            if counts:
                for name, values in zip(NAMES, (chosen, rejected, chosen - rejected, chosen > rejected)):
                    means.add(name, float(values.detach().double().sum()), len(values))
            return example_share(losses, count, counts)

        return loss_of


NAMES = ("scores/chosen", "scores/rejected", "scores/margin", "scores/accuracy")
