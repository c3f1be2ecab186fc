"""Settings that have no effect in combination with a run's other settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from operator import attrgetter
from typing import Any

from lockstep.config.algorithm import ALGORITHMS, Algorithm, algorithm_of
from lockstep.config.bounds import function_in_file
from lockstep.config.lora import LoraConfig
from lockstep.config.runs import PretrainConfig, RLConfig
from lockstep.config.toml import toml_value


def unused_setting_problems(config: PretrainConfig | RLConfig) -> Iterator[str]:
    """A message for each setting that was changed but has no effect together with the others."""
    reasons = _reasons(config) | (_reasons_of_rl(config) if isinstance(config, RLConfig) else {})
    for name, why in reasons.items():
        if isinstance(config, RLConfig) and hasattr(Algorithm, name):
            default = getattr(ALGORITHMS[config.algorithm], name)
        else:
            default = _value(type(config)(), name)
        if (value := _value(config, name)) != default:
            remedy = "leave it out" + ("" if default is None else f", or set it to {toml_value(default)}")
            yield f"{name} is {value}, but {why}: it would have no effect; {remedy}"


def _value(config: PretrainConfig | RLConfig, name: str) -> Any:
    """A setting's value; the algorithm's if it is not set."""
    if isinstance(config, RLConfig) and hasattr(Algorithm, name):
        return getattr(algorithm_of(config), name)
    value = attrgetter(name)(config)
    return tuple(value) if isinstance(value, list) else value


def _reasons(config: PretrainConfig | RLConfig) -> dict[str, str]:
    """The settings without effect, each with the reason."""
    reasons: dict[str, str] = {}
    if isinstance(config, PretrainConfig) and not (config.validation_data or config.validation_share):
        why = "validation_data is empty and validation_share 0"
        reasons |= dict.fromkeys(("validation_every", "validation_tokens"), why)
    if not config.checkpoint.every:
        reasons["checkpoint.keep_every"] = "checkpoint.every 0 does not write what it keeps"
    if config.train.schedule != "wsd":
        why = f"only the schedule wsd uses it, not {config.train.schedule}"
        reasons |= dict.fromkeys(("train.decay_share", "train.decay_shape"), why)
    if not config.lora.rank:
        of_lora = (f"lora.{field.name}" for field in fields(LoraConfig) if field.name != "rank")
        reasons |= dict.fromkeys(of_lora, "lora.rank is 0, so there is no adapter to add")
    return reasons


def _reasons_of_rl(config: RLConfig) -> dict[str, str]:
    algorithm = algorithm_of(config)
    reasons: dict[str, str] = {}
    if algorithm.advantage != "gae":
        of_values = (
            "gae_gamma",
            "gae_lambda",
            "value_coefficient",
            "value_clip",
            "value_learning_rate",
            "value_detached",
        )
        reasons |= dict.fromkeys(of_values, f'advantage "{algorithm.advantage}" has no value function')
    if algorithm.loss == "reinforce":
        reasons |= dict.fromkeys(("clip_low", "clip_high"), 'loss "reinforce" has no ratio to clip')
    if function_in_file(algorithm.loss):
        reasons |= dict.fromkeys(("clip_low", "clip_high"), f"only the function {algorithm.loss} decides what to clip")
    if function_in_file(algorithm.advantage):
        reasons["normalize_advantages"] = f"only the function {algorithm.advantage} decides what to divide by"
    if not algorithm.kl_coefficient:
        of_kl = "kl_in", "kl_estimator", "kl_reference", "kl_average_decay"
        reasons |= dict.fromkeys(of_kl, "kl_coefficient is 0")
    elif config.kl_reference != "average":
        reasons["kl_average_decay"] = f'kl_reference is "{config.kl_reference}"'
    if algorithm.off_policy == "none" and (config.off_policy or not config.actors.urls):
        reasons |= dict.fromkeys(("off_policy_level", "off_policy_low", "off_policy_high"), "off_policy is none")
    if not config.reward_model:
        reasons["reward_model_weight"] = "there is no reward_model"
    if not config.validation_examples:
        of_validations = "validation_samples", "validation_temperature", "validation_seed"
        reasons |= dict.fromkeys(of_validations, "validation_examples is 0")
    return reasons
