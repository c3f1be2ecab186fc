"""Refusal of impossible settings, in one place, before any work is done."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterator
from typing import Any

from lockstep.config.engine import CompileConfig
from lockstep.config.parallel import ROW_MULTIPLE
from lockstep.config.recompute import KEEPABLE, RecomputeConfig
from lockstep.config.runs import PretrainConfig, RLConfig, ServeConfig, SFTConfig
from lockstep.config.train import TrainConfig
from lockstep.errors import UserError

LOWEST_TEMPERATURE = 0.01
"""Of a run that is trained on its samples; below it nearly every draw is the likeliest token."""


def validate(config: PretrainConfig | RLConfig | ServeConfig) -> None:
    """Refuses impossible values, naming the field and what to change. Raises UserError."""
    problems = list(_serve_problems(config) if isinstance(config, ServeConfig) else _problems(config))
    if problems:
        raise UserError("this configuration cannot run:\n" + "\n".join(f"  - {p}" for p in problems))


def _problems(config: PretrainConfig | RLConfig) -> Iterator[str]:
    positive = ["train.learning_rate", "train.tokens_per_microbatch"]
    not_negative = ["train.warmup_steps", "train.weight_decay", "train.max_grad_norm"]
    not_negative += ["checkpoint.every", "checkpoint.keep_last", "checkpoint.keep_every"]
    positive += ["faults.stop_seconds"]
    not_negative += ["faults.max_skipped_steps", "faults.spike_deviations", "faults.watchdog_seconds"]
    not_negative += ["observe.timeline_steps", "observe.gc_every"]
    if isinstance(config, PretrainConfig):
        positive += [
            "tokens_per_step",
            "sequence_length",
            "loader.shuffle_window",
            "validation_every",
            "validation_tokens",
        ]
        not_negative += ["steps", "loader.workers"]
    else:
        positive += ["steps", "prompts_per_step", "max_new_tokens", "inner_steps", "validation_examples"]
        positive += ["engine.max_tokens_per_step", "engine.max_sequences", "engine.cache_tokens"]
        not_negative += ["kl_coefficient", "clip_low", "clip_high", "top_k", "validation_every"]
    for name in positive:
        if not _value(config, name) > 0:
            yield f"{name} is {_value(config, name)}; it must be above 0"
    for name in not_negative:
        if not _value(config, name) >= 0:
            yield f"{name} is {_value(config, name)}; it must be 0 or more"
    yield from _train_problems(config.train)
    if isinstance(config, PretrainConfig):
        yield from _recompute_problems(config.recompute, config.compile)
        if config.loader.packing not in ("cut", "whole"):
            yield f'loader.packing is "{config.loader.packing}"; give cut or whole'
        if config.compile.backend != "none" and any("frozen=true" in rule for rule in config.train.rules):
            yield 'train.rules that freeze do not go with compiled layers; set compile.backend = "none"'
    if config.resume and config.overwrite:
        yield "resume and overwrite exclude each other; give one"
    if isinstance(config, PretrainConfig) and config.parallel.tensor > 1:
        # Rows are padded to ROW_MULTIPLE, so of degrees that divide it any length will do.
        multiple = math.lcm(config.parallel.tensor, ROW_MULTIPLE)
        if ROW_MULTIPLE % config.parallel.tensor and config.sequence_length % multiple:
            yield (
                f"parallel.tensor {config.parallel.tensor} does not divide the tokens of a micro-batch, which its "
                f"ranks share, where sequence_length is {config.sequence_length}; make that a multiple of {multiple}"
            )
    if isinstance(config, PretrainConfig) and config.sequence_length < 2 * config.parallel.context:
        yield (
            f"sequence_length {config.sequence_length} cannot be cut for parallel.context {config.parallel.context}: "
            f"each rank takes two pieces of a sequence, so give at least {2 * config.parallel.context} tokens, or a "
            "smaller degree"
        )
    if isinstance(config, RLConfig | SFTConfig) and not config.model:
        yield "model is empty; give a Hugging Face folder with --model DIR"
    if isinstance(config, SFTConfig) and not config.data:
        yield "data is empty; give conversations with --data FILE"
    if isinstance(config, RLConfig):
        if config.faults.spike_deviations:
            yield "faults.spike_deviations is for pretraining; the size of a policy's loss says nothing"
        if not config.samples_per_prompt >= 2:
            yield (
                f"samples_per_prompt is {config.samples_per_prompt}; it must be 2 or more, for the advantages of a "
                "group of one are always 0"
            )
        if not config.temperature >= LOWEST_TEMPERATURE:
            yield (
                f"temperature is {config.temperature}; it must be {LOWEST_TEMPERATURE} or more, for logits are divided "
                "by it"
            )
        if not 0 < config.top_p <= 1:
            yield f"top_p is {config.top_p}; it must be in (0, 1]"
        if not 0 <= config.min_p < 1:
            yield f"min_p is {config.min_p}; it must be in [0, 1)"
        if not config.clip_low < 1:
            yield f"clip_low is {config.clip_low}; it must be below 1, for ratios are positive"


def _recompute_problems(recompute: RecomputeConfig, compiled: CompileConfig) -> Iterator[str]:
    if recompute.every < 1:
        yield f"recompute.every is {recompute.every}; it must be 1 or more"
    if (recompute.mode == "budget") != (recompute.budget_gib > 0):
        yield (
            f'recompute.mode is "{recompute.mode}" and recompute.budget_gib is {recompute.budget_gib}; '
            "budget needs a number above 0, and the other modes take none"
        )
    if recompute.mode == "selective":
        for operator in recompute.keep:
            if operator not in KEEPABLE:
                yield f'recompute.keep: there is no operator "{operator}"; known are {", ".join(KEEPABLE)}'
            elif operator != "attention" and compiled.backend != "none":
                yield (
                    f"recompute.keep: {operator} cannot be kept by itself in a compiled half of a layer; "
                    'keep attention only, or set compile.backend = "none"'
                )


def _train_problems(train: TrainConfig) -> Iterator[str]:
    for name in ("beta1", "beta2", "muon_momentum"):
        if not 0 <= getattr(train, name) < 1:
            yield f"train.{name} is {getattr(train, name)}; it must be in [0, 1)"
    if not 0 < train.decay_share <= 1:
        yield f"train.decay_share is {train.decay_share}; it must be in (0, 1]"
    if (train.schedule == "csv") != bool(train.schedule_file):
        yield (
            f'train.schedule is "{train.schedule}" and train.schedule_file is "{train.schedule_file}"; '
            "csv needs a file, and the others take none"
        )
    if train.optimizer_in_backward:
        if train.max_grad_norm > 0:
            yield (
                "train.optimizer_in_backward updates before the norm of all gradients is known, so nothing can be "
                f"clipped to train.max_grad_norm {train.max_grad_norm}; set max_grad_norm = 0"
            )
        if train.optimizer == "muon" or any("optimizer=muon" in rule for rule in train.rules):
            yield "train.optimizer_in_backward goes with adamw only: ranks gather Muon's matrices together"


def _serve_problems(config: ServeConfig) -> Iterator[str]:
    positive = ["max_body_bytes", "max_n", "max_requests", "max_connections"]
    positive += ["engine.max_tokens_per_step", "engine.max_sequences", "engine.cache_tokens"]
    not_negative = ["max_prompt_tokens", "max_waiting", "client_seconds", "request_seconds", "shutdown_seconds"]
    for name in positive:
        if not _value(config, name) > 0:
            yield f"{name} is {_value(config, name)}; it must be above 0"
    for name in not_negative:
        if not 0 <= _value(config, name) < float("inf"):
            yield f"{name} is {_value(config, name)}; it must be 0 or more"
    if not 0 <= config.port < 2**16:
        yield f"port is {config.port}; it must be from 0 to 65535"
    if config.dtype not in ("", "auto", "bfloat16", "float32"):
        yield f'dtype is "{config.dtype}"; give auto, bfloat16 or float32'
    if config.admin_key and config.admin_key == config.api_key:
        yield "admin_key equals api_key; whoever may sample could change the weights, so give another"
    if not config.api_key and not _is_loopback(config.host):
        yield (
            f"host {config.host} can be reached from other machines; set an API key (LOCKSTEP_API_KEY or --api-key), "
            "or listen on 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _value(config: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        config = getattr(config, name)
    return config
