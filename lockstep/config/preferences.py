"""Runs that learn from preferences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from lockstep.config.bounds import Above, AtLeast, Below
from lockstep.config.runs import SFTConfig
from lockstep.config.train import TrainConfig


@dataclass
class PreferenceConfig(SFTConfig):
    """Pairs of answers, one of them preferred; everything else as in fine-tuning."""

    data: str = ""
    """JSONL, JSON, Parquet or hf:… with `prompt`, `chosen` and `rejected`, as texts or messages; without a `prompt`
    column it is in both answers; several as a.jsonl=0.7,b.jsonl=0.3."""
    sequence_length: Annotated[int, Above(0)] = 2048
    """Tokens per row, which holds both sequences of its pairs with their prompts. Longer pairs are dropped."""


@dataclass
class DPOConfig(PreferenceConfig):
    """Preference optimization: raise the likelihood of chosen answers over that of rejected ones."""

    loss: Literal["dpo", "ipo", "simpo", "kto"] = "dpo"
    """`dpo`: the logistic loss of the difference of log-ratios to the reference; `ipo`: its squared distance from
    1 / (2 beta), per token; `simpo`: mean log-probabilities, without a reference; `kto`: single answers, `completion`
    with a `label`."""
    beta: Annotated[float, Above(0)] = 0.1
    """How strongly the policy is kept close to the reference; simpo: the scale of its rewards, usually 2 to 10."""
    reference: str = ""
    """Folder of the reference model for log-ratios, with the same vocabulary; empty: the weights that the run starts
    with."""
    simpo_margin: Annotated[float, AtLeast(0)] = 0.5
    """simpo: by how much a chosen answer's reward should exceed the rejected one's (γ)."""
    label_smoothing: Annotated[float, AtLeast(0), Below(0.5)] = 0.0
    """dpo, simpo: the fraction of pairs assumed to be labeled the wrong way round."""
    desirable_weight: Annotated[float, AtLeast(0)] = 1.0
    """kto: weight of the loss of answers whose label is true."""
    undesirable_weight: Annotated[float, AtLeast(0)] = 1.0
    """kto: weight of the loss of answers whose label is false."""
    train: TrainConfig = field(default_factory=lambda: TrainConfig(learning_rate=1e-6))


@dataclass
class RewardModelConfig(PreferenceConfig):
    """A model that scores texts, so that chosen answers have higher scores than rejected ones."""

    centering: Annotated[float, AtLeast(0)] = 0.0
    """Weight, such as 0.01, of (score of chosen + score of rejected)², which keeps the mean score near 0; 0: off."""
    train: TrainConfig = field(default_factory=lambda: TrainConfig(learning_rate=1e-5))


def preference_problems(config: PreferenceConfig) -> Iterator[str]:
    """A message for each combination that cannot work."""
    if config.loader.packing != "whole" or not config.loader.separate_documents:
        yield 'preferences need loader.packing = "whole" and loader.separate_documents; leave both at their defaults'
    if config.turns != "apart":
        yield f"turns is {config.turns}, but preferences have one answer to each prompt; leave it out"
    if isinstance(config, DPOConfig) and config.reference and config.loss == "simpo":
        yield f"reference is {config.reference}, but loss simpo has none; leave it out"
    if isinstance(config, DPOConfig) and config.reference and config.parallel.pipeline > 1:
        yield "reference does not work with parallel.pipeline yet; use another layout, or leave it out"
    if isinstance(config, DPOConfig) and config.label_smoothing and config.loss not in ("dpo", "simpo"):
        yield f"label_smoothing is for dpo and simpo, but loss is {config.loss}; leave it out"
