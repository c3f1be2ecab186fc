"""Preference optimization: a fine-tuning run whose rows contain pairs of answers, or labeled answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep import ops
from lockstep.config import DPOConfig, validate_run
from lockstep.data import RowLoader, Rows, StepRows, TokenizedCorpus
from lockstep.data.preferences import Example, number_of
from lockstep.hub import named_path
from lockstep.model import ScoringModel, TrainableModel, load_weights, read_config, refuse_score_head, resolve_dtype
from lockstep.observe import OnMetrics
from lockstep.parallel import World, parallel_model
from lockstep.progress import Progress
from lockstep.train.preference_losses import AnswerLogProbs, dpo_loss, ipo_loss, kto_divergence, kto_loss, simpo_loss
from lockstep.train.preferences import (
    Means,
    PreferenceBatch,
    Which,
    answer_log_probs,
    example_share,
    examples_of,
    open_preferences,
    preference_batch,
    shares_prompts,
)
from lockstep.train.reference_scores import assign_reference
from lockstep.train.refusals import refuse_long_rows, refuse_other_vocabulary
from lockstep.train.rows_task import RowsRun, train_rows
from lockstep.train.setup import make_model, training_world, with_precision
from lockstep.train.trainer import Trainer


def prefer(config: DPOConfig, progress: Progress | None = None, on_metrics: OnMetrics | None = None) -> Path:
    """Trains the model in `config.model` on the preferences in `config.data`; returns the run's folder.

    Under torchrun all ranks call it and rank 0 writes; it calls `on_metrics(step, metrics)` after every step. Raises
    UserError for bad input.
    """
    validate_run(config, DPOConfig)
    with training_world(config) as (config, world):
        config, tokenizer, template, loader, held_out = open_preferences(config, world, paired=config.loss != "kto")
        if config.reference:
            refuse_other_vocabulary(config.reference, "reference", config.model, tokenizer)
        model = make_model(config, tokenizer, world, template)
        parts = RowsRun(tokenizer, model, loader, held_out, "dpo", PreferenceObjective(config))
        return train_rows(config, world, parts, progress, on_metrics)


def reference_model(config: DPOConfig, trainer: Trainer) -> TrainableModel:
    """The trainer's model, or the one in `config.reference`, which is needed only to score the examples."""
    if not config.reference:
        return trainer.model
    shape = with_precision(read_config(named_path(config.reference)), config)
    refuse_score_head(shape, config.reference)
    refuse_long_rows(replace(config, model=config.reference), shape)
    fill = partial(load_weights, path=config.reference)
    kind = resolve_dtype(config.dtype)
    return parallel_model(shape, kind, trainer.world, config.parallel, config.compile, fill, config.recompute)


class PreferenceObjective:
    """The objective of `lockstep dpo` for `train_rows`."""

    def __init__(self, config: DPOConfig):
        self.config = config
        self._share = shares_prompts(config)
        self._held_out: list[list[Example]] = []

    def prepare(self, trainer: Trainer, loader: RowLoader, held_out: StepRows | None) -> None:
        """Scores the run's examples with the reference; by default, this is the model before its first step."""
        if held_out is not None:
            self._held_out = examples_of(held_out)
        if self.config.loss == "simpo":
            return
        with trainer.evaluating(reference_model(self.config, trainer)):
            self._score(trainer, loader)

    def _score(self, trainer: Trainer, loader: RowLoader) -> None:
        assign_reference(self._seen(loader), self.config, trainer)
        scored: list[list[Example]] = []

        def record(model: ScoringModel, batch: PreferenceBatch) -> Tensor:
            pairs = answer_log_probs(model, batch)[0].view(-1, 2).tolist()
            scored.append([replace(e, reference=tuple(pair)) for e, pair in zip(batch.examples, pairs)])
            return torch.zeros(())

        # This rank's examples, few enough to be scored at every start.
        trainer.evaluate(self._batches(self._held_out, trainer.world, "both"), record)
        self._held_out = scored

    def _seen(self, loader: RowLoader) -> Iterator[tuple[TokenizedCorpus, int]]:
        """The examples of all steps."""
        before = loader.state()
        for _ in range(self.config.steps * loader.rows_per_step):
            if loader.ended or (isinstance(loader.rows, Rows) and loader.epoch >= 1):
                break
            for piece in loader.rows.plan():
                yield piece.corpus, number_of(piece)
        loader.restore(before)

    def step(self, trainer: Trainer, batch: StepRows) -> dict[str, float]:
        """One update; the metrics are means over the step's examples."""
        examples = examples_of(batch)
        divergence = self._divergence(trainer, examples, batch.targets)
        means = Means(self._names)
        with trainer.timeline.span("data"):
            batches = list(self._batches(examples, trainer.world, self._trained))
        metrics = trainer.step(batches, self._loss_of(batch.targets, divergence, means))
        return metrics | self._named(means.over(trainer.world), divergence, batch.targets)

    def validate(self, trainer: Trainer, held_out: StepRows) -> dict[str, float]:
        """The same metrics on the held-out examples."""
        divergence = self._divergence(trainer, self._held_out, held_out.targets)
        means = Means(self._names)
        batches = self._batches(self._held_out, trainer.world, self._trained)
        loss = trainer.evaluate(batches, self._loss_of(held_out.targets, divergence, means))
        named = self._named(means.over(trainer.world), divergence, held_out.targets)
        return {f"validation/{name}": value for name, value in {"loss": loss, **named}.items()}

    @property
    def _trained(self) -> Which:
        return "first" if self.config.loss == "kto" else "both"

    def _batches(self, examples: list[list[Example]], world: World, which: Which) -> Iterator[PreferenceBatch]:
        return (preference_batch(part, world, self._share, which) for part in examples)

    @property
    def _names(self) -> tuple[str, ...]:
        return LABELLED if self.config.loss == "kto" else PAIRED

    def _named(self, means: dict[str, float], divergence: float, examples: int) -> dict[str, float]:
        return means | {"examples": examples} | ({"kl": divergence} if self.config.loss == "kto" else {})

    def _divergence(self, trainer: Trainer, examples: list[list[Example]], count: int) -> float:
        """z of the KTO loss, over the whole step and all ranks; 0 for the other losses."""
        if self.config.loss != "kto":
            return 0.0

        def log_ratios(model: ScoringModel, batch: PreferenceBatch) -> Tensor:
            log_probs, counts = answer_log_probs(model, batch)
            reference = log_probs.new_tensor([example.reference[1] for example in batch.examples])
            return ops.total(log_probs - reference) * counts

        return kto_divergence(trainer.evaluate(self._batches(examples, trainer.world, "second"), log_ratios), count)

    def _loss_of(
        self, count: int, divergence: float, means: Means
    ) -> Callable[[ScoringModel, PreferenceBatch], Tensor]:
        def loss_of(model: ScoringModel, batch: PreferenceBatch) -> Tensor:
            log_probs, counts = answer_log_probs(model, batch)
            losses = preference_losses(self.config, log_probs, batch, divergence)
            if counts:
                self._measure(log_probs.detach(), batch, means)
            return example_share(losses, count, counts)

        return loss_of

    def _measure(self, log_probs: Float[Tensor, "sequences"], batch: PreferenceBatch, means: Means) -> None:
        """Adds one micro-batch's log-probabilities and implicit rewards."""
        values, lengths = iter(log_probs.double().tolist()), iter(batch.lengths)
        for example in batch.examples:
            if self.config.loss == "kto":
                kinds = ["chosen" if example.desirable else "rejected"]
            else:
                kinds = ["chosen", "rejected"]
            rewards = []
            for kind, reference in zip(kinds, example.reference):
                log_prob = next(values)
                rewards.append(self._reward(log_prob, reference, next(lengths)))
                means.add(f"rewards/{kind}", rewards[-1])
                means.add(f"log_probs/{kind}", log_prob)
            if len(rewards) == 2:
                means.add("rewards/margin", rewards[0] - rewards[1])
                means.add("rewards/accuracy", rewards[0] > rewards[1])

    def _reward(self, log_prob: float, reference: float, length: int) -> float:
        """The implicit reward: beta times the log-ratio, or for simpo the mean log-probability."""
        return self.config.beta * (log_prob / length if self.config.loss == "simpo" else log_prob - reference)


def preference_losses(
    config: DPOConfig, log_probs: Float[Tensor, "sequences"], batch: PreferenceBatch, divergence: float = 0.0
) -> Float[Tensor, "examples"]:
    """The run's loss for each example of a batch, given its answers' log-probabilities from `answer_log_probs`."""
    of_example = 1 if config.loss == "kto" else 2
    lengths = torch.tensor(batch.lengths, dtype=torch.int64, device=log_probs.device).view(-1, of_example)
    reference = log_probs.new_tensor([example.reference[:of_example] for example in batch.examples])
    answers = [
        AnswerLogProbs(*columns)
        for columns in zip(log_probs.view(-1, of_example).T, reference.view(-1, of_example).T, lengths.T, strict=True)
    ]
    if config.loss == "kto":
        desirable = torch.tensor(
            [example.desirable for example in batch.examples], dtype=torch.bool, device=log_probs.device
        )
        return kto_loss(
            answers[0], desirable, divergence, config.beta, config.desirable_weight, config.undesirable_weight
        )
    chosen, rejected = answers
    if config.loss == "ipo":
        return ipo_loss(chosen, rejected, config.beta)
    if config.loss == "simpo":
        return simpo_loss(chosen, rejected, config.beta, config.simpo_margin, config.label_smoothing)
    return dpo_loss(chosen, rejected, config.beta, config.label_smoothing)


LABELLED = ("rewards/chosen", "rewards/rejected", "log_probs/chosen", "log_probs/rejected")
PAIRED = (*LABELLED, "rewards/margin", "rewards/accuracy")
