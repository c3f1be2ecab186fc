"""Refuses impossible combinations of settings before a run begins."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from lockstep.config.alarms import ALARMS, AlarmConfig
from lockstep.config.algorithm import algorithm_of
from lockstep.config.bounds import bound_problems, function_in_file
from lockstep.config.engine import CompileConfig
from lockstep.config.evaluation import EvalConfig, greedy_problems
from lockstep.config.overwritten import overwritten_problems
from lockstep.config.parallel import parallel_problems
from lockstep.config.preferences import PreferenceConfig, preference_problems
from lockstep.config.recompute import KEEPABLE, RecomputeConfig
from lockstep.config.runs import PretrainConfig, RLConfig, ServeConfig, SFTConfig
from lockstep.config.train import train_problems
from lockstep.config.train_server import TrainServerConfig
from lockstep.config.unused_settings import unused_setting_problems
from lockstep.errors import UserError, closest
from lockstep.precision import FLOAT8


def validate(config: PretrainConfig | RLConfig | ServeConfig | TrainServerConfig | EvalConfig) -> None:
    """Raises UserError for impossible values, naming each field and what to change."""
    problems = list(bound_problems(config))
    if isinstance(config, ServeConfig):
        problems += _serve_problems(config)
    elif isinstance(config, TrainServerConfig):
        problems += _address_problems(config, "TINKER_API_KEY")
    elif isinstance(config, EvalConfig):
        problems += config.problems()
    elif not problems:  # the checks below compare fields that are valid on their own
        problems += _problems(config)
        if not config.resume:  # what is changed in a recorded run may leave other settings without effect
            problems += unused_setting_problems(config)
    if problems:
        raise UserError("this configuration cannot run:\n" + "\n".join(f"  - {p}" for p in problems))


def validate_run(config: Any, kind: type[PretrainConfig | RLConfig]) -> None:
    """`validate`, and raises UserError for a config that is not a `kind` or that asks for a dry run."""
    if not isinstance(config, kind):
        raise UserError(f"this run takes a {kind.__name__}, not {config!r:.60}")
    validate(config)
    if config.dry_run:
        raise UserError(
            f"dry_run is {config.dry_run}, but this call would train; lockstep pretrain --dry-run and rl --dry-run "
            "print what a rank needs"
        )


def _problems(config: PretrainConfig | RLConfig) -> Iterator[str]:
    yield from train_problems(config.train)
    yield from _recompute_problems(config.recompute, config.compile)
    yield from parallel_problems(config.parallel)
    yield from _layout_problems(config)
    yield from _expert_problems(config)
    yield from _lora_problems(config)
    if config.resume and config.overwrite:
        yield "resume and overwrite exclude each other; give one"
    if config.overwrite:
        yield from overwritten_problems(config)
    if isinstance(config, RLConfig | SFTConfig) and not config.model:
        yield "model is empty; give a Hugging Face folder with --model DIR"
    if isinstance(config, PretrainConfig):
        yield from _pretrain_problems(config)
    if isinstance(config, SFTConfig):
        yield from _sft_problems(config)
    if isinstance(config, PreferenceConfig):
        yield from preference_problems(config)
    if isinstance(config, RLConfig):
        yield from _rl_problems(config)


def _pretrain_problems(config: PretrainConfig) -> Iterator[str]:
    if config.compile.backend != "none" and any("frozen=true" in rule for rule in config.train.rules):
        yield 'train.rules that freeze do not work with compiled layers; set compile.backend = "none"'
    if config.faults.on_spike == "rollback" and not config.checkpoint.every:
        yield (
            'faults.on_spike is "rollback" and checkpoint.every is 0, so there would be no checkpoint to go back '
            "to; give checkpoint.every"
        )
    if config.sequence_length < 2 * config.parallel.context:
        yield (
            f"sequence_length {config.sequence_length} cannot be split for parallel.context {config.parallel.context}: "
            f"each rank takes two pieces of a sequence, so give at least {2 * config.parallel.context} tokens, or a "
            "smaller degree"
        )
    if config.validation_data and config.validation_share:
        yield "validation_data and validation_share exclude each other; give one"


def _sft_problems(config: SFTConfig) -> Iterator[str]:
    if config.dry_run:
        yield "dry_run is only for pretrain and rl; lockstep pretrain --dry-run of this model and layout needs as much"
    if not config.data:
        kind = "preferences" if isinstance(config, PreferenceConfig) else "conversations"
        yield f"data is empty; give {kind} with --data FILE"


def _rl_problems(config: RLConfig) -> Iterator[str]:
    yield from _algorithm_problems(config)
    yield from _alarm_problems(config.alarms)
    temperature, samples = config.validation_temperature, config.validation_samples
    yield from greedy_problems("validation_temperature", temperature, "validation_samples", samples)
    yield from config.actors.problems(config.parallel.reduction_chunks)
    yield from _url_problems(config.actors.urls)
    if config.dry_run and config.actors.urls:
        yield (
            "a dry run cannot inspect the servers in actors.urls; remove them, and set actors.generators for training "
            "ranks that do not sample"
        )
    if config.faults.spike_deviations:
        yield "faults.spike_deviations is only for pretraining; the size of a policy's loss is not meaningful"


def _algorithm_problems(config: RLConfig) -> Iterator[str]:
    algorithm = algorithm_of(config)
    advantage = f"advantage {algorithm.advantage}" + (f" of {config.algorithm}" if not config.advantage else "")
    if algorithm.normalize_advantages and algorithm.advantage in ("leave_one_out", "best", "teacher"):
        yield f"{advantage} is not normalized; leave normalize_advantages out"
    if (algorithm.advantage == "teacher") != bool(config.teacher) and not function_in_file(algorithm.advantage):
        if config.teacher:
            yield f"teacher is set, but {advantage} does not use one; leave it out, or set algorithm = distillation"
        else:
            yield f"{advantage} needs a teacher: give the folder of a model with --teacher"
    if algorithm.loss == "reinforce" and algorithm.advantage != "best" and config.updates_per_batch > 1:
        yield (
            f"loss reinforce has no ratio, so all but the first of {config.updates_per_batch} updates would be "
            'off-policy; set updates_per_batch = 1, or loss = "clip"'
        )
    if algorithm.advantage == "teacher" and algorithm.extra_rounds:
        yield "extra_rounds drops groups with equal rewards, from which a teacher's advantages also learn; leave it out"
    if algorithm.kl_in == "reward" and algorithm.kl_coefficient > 0 and algorithm.advantage in ("best", "teacher"):
        yield f'{advantage} ignores a KL divergence in the reward; set kl_in = "loss"'
    if algorithm.loss == "clip_sequence" and algorithm.advantage == "gae":
        yield (
            f"loss clip_sequence takes one advantage per completion, but {advantage} computes one per token; set "
            'loss = "clip"'
        )
    if algorithm.loss == "clip_sequence" and algorithm.advantage == "batch" and algorithm.kl_coefficient > 0:
        yield (
            "loss clip_sequence takes one advantage per completion, but the KL divergence in the rewards of advantage "
            'batch makes them differ per token; set kl_in = "loss"'
        )


def _alarm_problems(alarms: AlarmConfig) -> Iterator[str]:
    for name in alarms.stop:
        if name not in ALARMS:
            yield f'alarms.stop: there is no alarm "{name}".{closest(name, ALARMS)} Known: {", ".join(ALARMS)}'
        elif getattr(alarms, name) == 0:
            yield f"alarms.stop names {name}, but alarms.{name} is 0, so it is never raised; give a limit"


def _url_problems(urls: tuple[str, ...]) -> Iterator[str]:
    for url in urls:
        try:
            parts = urlsplit(url)
            complete = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            parts, complete = None, False
        if not parts or not complete or parts.path.strip("/") or parts.query or parts.fragment or parts.username:
            yield f"actors.urls: {url!r} must be http://HOST:PORT or https://HOST:PORT, and nothing more; correct it"
    for url in {url for url in urls if urls.count(url) > 1}:
        yield f"actors.urls names {url} more than once; give each server once"


def _layout_problems(config: PretrainConfig | RLConfig) -> Iterator[str]:
    train, parallel = config.train, config.parallel
    if train.optimizer_in_backward and parallel.pipeline > 1:
        yield (
            "train.optimizer_in_backward does not work with parallel.pipeline, which computes a weight's gradient in "
            "several backwards; switch it off"
        )
    if train.deterministic_layout and parallel.reduce_gradients == "step":
        yield (
            "train.deterministic_layout sums gradients over ranks after every micro-batch; leave "
            'parallel.reduce_gradients at "auto"'
        )
    if train.deterministic_layout and config.precision.linear == FLOAT8:
        yield (
            "train.deterministic_layout does not work with precision.linear float8, whose scale is that of the rows "
            "that a rank has; use float8_rowwise or mxfp8"
        )
    if train.deterministic_layout and parallel.pipeline > 1 and parallel.context > 1:
        yield (
            "train.deterministic_layout works with parallel.pipeline or with parallel.context, not with both; switch "
            "it off"
        )


def _expert_problems(config: PretrainConfig | RLConfig) -> Iterator[str]:
    if config.parallel.expert == 1:
        return
    if config.recompute.mode == "budget":
        yield (
            'recompute.mode "budget" does not work with parallel.expert: ranks with different tokens would recompute '
            'different layers and hang waiting for each other; set it to "full", "every" or "selective"'
        )
    if config.compile.backend != "none":
        yield (
            "compiled layers do not work with parallel.expert yet, because FSDP gathers the experts separately; set "
            'compile.backend = "none", or share the experts with parallel.tensor alone'
        )
    if config.train.deterministic_layout:
        yield (
            "train.deterministic_layout does not work with parallel.expert yet: the gradients of experts are summed "
            "over the tokens of several ranks at once; turn one of them off"
        )


def _lora_problems(config: PretrainConfig | RLConfig) -> Iterator[str]:
    if not config.lora.rank:
        return
    if config.train.router_bias_rate:
        yield "train.router_bias_rate changes weights of the base, which lora.rank freezes; leave one of them out"
    if isinstance(config, RLConfig):
        if config.kl_reference == "average" and config.kl_coefficient:
            yield (
                'kl_reference "average" needs a second model, which lora.rank avoids; set kl_reference = "start", '
                "which is the model with its adapter turned off"
            )
        if config.actors.urls:
            yield (
                "lora.rank does not work with servers (actors.urls), which receive full weights; give "
                "actors.generators, or train without an adapter"
            )


def _recompute_problems(recompute: RecomputeConfig, compiled: CompileConfig) -> Iterator[str]:
    if (recompute.mode == "budget") != (recompute.budget_gib > 0):
        yield (
            f'recompute.mode is "{recompute.mode}" and recompute.budget_gib is {recompute.budget_gib}; '
            "budget needs a number above 0, the other modes take none"
        )
    if recompute.mode == "selective":
        for operator in recompute.keep:
            if operator not in KEEPABLE:
                yield f'recompute.keep: there is no operator "{operator}"; known: {", ".join(KEEPABLE)}'
            elif operator != "attention" and compiled.backend != "none":
                yield (
                    f"recompute.keep: {operator} cannot be kept by itself in a compiled half of a layer; "
                    'keep only attention, or set compile.backend = "none"'
                )


def _serve_problems(config: ServeConfig) -> Iterator[str]:
    if config.admin_key and config.admin_key == config.api_key:
        yield "admin_key equals api_key, so anyone who can sample could change the weights; give a different one"
    yield from _adapter_problems(config)
    yield from _address_problems(config, "LOCKSTEP_API_KEY")


def _address_problems(config: ServeConfig | TrainServerConfig, key: str) -> Iterator[str]:
    """key: the environment variable of the API key."""
    if config.dtype not in ("", "auto", "bfloat16", "float32"):
        yield f'dtype is "{config.dtype}"; give auto, bfloat16 or float32'
    if not config.api_key and not _is_loopback(config.host):
        yield (
            f"host {config.host} can be reached from other machines; set an API key ({key} or --api-key), or listen on "
            "127.0.0.1"
        )


def _adapter_problems(config: ServeConfig) -> Iterator[str]:
    names = [module.partition("=")[0] for module in config.lora_modules]
    if wrong := next((m for m in config.lora_modules if not all(m.partition("=")[::2])), None):
        yield f"lora_modules has {wrong!r}; give each adapter as NAME=FOLDER"
    elif repeated := next((name for name in names if names.count(name) > 1 or name == config.model_name), None):
        yield f"lora_modules has the name {repeated!r}, which another adapter or the model has; give each its own"
    if len(names) > config.max_loras:
        yield f"lora_modules has {len(names)} adapters, but max_loras is {config.max_loras}; raise it"
    if config.lora_folder and not config.admin_key:
        yield "lora_folder is for adapters that are loaded with an admin key, but there is none; set admin_key"
    if (config.lora_modules or config.lora_folder) and config.compile.backend != "none":
        yield "adapters do not work with compiled layers yet; leave out compile.backend, or merge the adapter"
    if (config.lora_modules or config.lora_folder) and config.parallel.tensor > 1:
        yield "adapters do not work with parallel.tensor yet; leave it out, or merge the adapter"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
