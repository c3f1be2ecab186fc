"""The dataclasses every run is made of, their validation, and TOML in and out.

A run is described by one flat dataclass with nested ones (`train`, `engine`, `compile`). The docstring under
a field is its help on the command line. `validate` refuses impossible combinations before any work is done.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from lockstep.errors import UserError, closest

Dtype = Literal["bfloat16", "float32"]


@dataclass
class EngineConfig:
    """How the generator uses memory and batches its work."""

    max_tokens_per_step: int = 2048
    """Token budget of one forward pass; longer prompts are computed in chunks."""
    max_sequences: int = 256
    """Sequences that run at the same time."""
    cache_tokens: int = 65536
    """Capacity of the key-value cache in tokens; when it runs out, the newest sequences are preempted."""
    prefix_cache: bool = True
    """Share full cache pages between sequences that begin alike (the n samples of a prompt, for one)."""
    cuda_graphs: Literal["none", "piecewise", "full", "full_and_piecewise"] = "none"
    """Record the generator's launches and replay them: decode steps whole, or small steps between attentions."""


@dataclass
class CompileConfig:
    """How the model is compiled, for trainer and generator alike."""

    backend: Literal["none", "inductor"] = "none"
    """`inductor` compiles each block's two halves once for all layers; the artifacts are kept in the cache folder."""


@dataclass
class TrainConfig:
    """Optimizer, schedule and batch shape."""

    learning_rate: float = 1e-3
    """Peak learning rate of AdamW."""
    warmup_steps: int = 10
    """Steps over which the learning rate rises linearly from zero."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate after warm-up."""
    final_learning_rate_ratio: float = 0.1
    """Learning rate at the last step, relative to the peak (linear and cosine)."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.95
    """AdamW's decay of the second moment."""
    epsilon: float = 1e-8
    """AdamW's denominator offset."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; vectors are never decayed."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 switches clipping off."""
    tokens_per_microbatch: int = 8192
    """Tokens of one packed forward and backward pass; a step accumulates as many as it needs."""


@dataclass
class PretrainConfig:
    """A next-token run on text."""

    output: str = "run"
    """Folder the run writes."""
    model: str = "qwen3:tiny"
    """`family:size` for fresh weights (see lockstep.model.PRESETS), or a Hugging Face folder to continue from."""
    data: str = ""
    """Text or JSONL: a file, a folder or a glob. Empty: the Python standard library's own source."""
    template: str = "{text}"
    """How a JSONL line becomes a text: keys in braces stand for their values."""
    tokenizer: str = "byte"
    """`byte`, `bpe:VOCABULARY` (trained on the data), or a folder with a tokenizer.json."""
    skip_bad_lines: bool = False
    """Count and skip malformed JSONL lines instead of stopping at the first."""
    steps: int = 200
    """Optimizer steps."""
    tokens_per_step: int = 8192
    """Tokens of one optimizer step, over all its micro-batches."""
    sequence_length: int = 256
    """Tokens of one packed sequence; documents are cut to it."""
    dtype: Dtype = "bfloat16"
    """Of the weights in the forward pass; the optimizer keeps float32 master weights."""
    seed: int = 0
    """Fixes initial weights and the order of the data."""
    train: TrainConfig = field(default_factory=TrainConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: only the last."""
    tensorboard: bool = False
    """Also write TensorBoard event files (needs the tensorboard package)."""
    resume: bool = False
    """Continue the run in `output` from its newest checkpoint."""
    overwrite: bool = False
    """Delete a run that is already in `output`."""


@dataclass
class RLConfig:
    """A GRPO run: sample groups of completions, reward them, move the policy towards the better ones."""

    output: str = "run"
    """Folder the run writes."""
    model: str = ""
    """Hugging Face folder (Llama 3 or Qwen3) to start from."""
    environment: str = "digit_sum"
    """`digit_sum`, `gsm8k`, or `FILE.py:Class` for a task of your own."""
    data: str = ""
    """Folder of the environment's data (gsm8k: train.jsonl and test.jsonl)."""
    skip_bad_lines: bool = False
    """Count and skip malformed JSONL lines instead of stopping at the first."""
    steps: int = 100
    """Reinforcement steps."""
    prompts_per_step: int = 16
    """Different prompts sampled in a step."""
    samples_per_prompt: int = 8
    """Completions of each prompt: the group that advantages are relative to."""
    max_new_tokens: int = 32
    """Completions are cut here and count as truncated."""
    temperature: float = 1.0
    """Sampling temperature; log-probabilities on both sides are taken at it."""
    top_k: int = 0
    """Sample from the k likeliest tokens only; 0: off."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this probability; 1: off."""
    min_p: float = 0.0
    """Sample from tokens at least this likely relative to the likeliest; 0: off."""
    normalize_advantages: bool = True
    """Divide a group's advantages by the standard deviation of its rewards."""
    clip_low: float = 0.2
    """The importance ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """The importance ratio is clipped above at 1 + clip_high."""
    kl_coefficient: float = 0.0
    """Weight of the KL divergence to the starting model; 0: no reference model is kept."""
    loss_average: Literal["token", "sequence"] = "token"
    """Average the loss over all tokens, or over each completion first."""
    inner_steps: int = 1
    """Optimizer steps on each batch of rollouts; from the second on, the ratio leaves 1 and clipping bites."""
    on_parity_error: Literal["stop", "warn"] = "stop"
    """What to do when a token's log-probability differs between generator and trainer."""
    dtype: Dtype = "bfloat16"
    """Of the weights in the forward pass; the optimizer keeps float32 master weights."""
    seed: int = 0
    """Fixes the order of the prompts and every draw."""
    train: TrainConfig = field(default_factory=lambda: TrainConfig(learning_rate=1e-5, schedule="constant"))
    engine: EngineConfig = field(default_factory=EngineConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    validation_every: int = 0
    """Steps between validations; 0: only before the first and after the last step."""
    validation_examples: int = 256
    """Held-out examples of a validation, one completion each, sampled as in training."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: only the last."""
    tensorboard: bool = False
    """Also write TensorBoard event files (needs the tensorboard package)."""
    resume: bool = False
    """Continue the run in `output` from its newest checkpoint."""
    overwrite: bool = False
    """Delete a run that is already in `output`."""


@dataclass
class ServeConfig:
    """An HTTP server over the engine, with OpenAI's routes."""

    model: str
    """Hugging Face folder, or a run's folder (its newest checkpoint)."""
    host: str = "127.0.0.1"
    """Address to listen on; any but a loopback address needs an API key."""
    port: int = 8000
    """Port to listen on; 0: any free one."""
    model_name: str = ""
    """Name that requests use for the model; empty: the folder's name."""
    dtype: Annotated[str, "dtype"] = ""
    """`bfloat16` or `float32`; empty: the files' own."""
    device: str = "cpu"
    """`cpu`, `cuda`, `cuda:1` …"""
    api_key: str = ""
    """Key that the /v1 routes ask for; empty: the environment's LOCKSTEP_API_KEY, and none if that is empty too."""
    admin_key: str = ""
    """Key of the /admin routes; empty: the environment's LOCKSTEP_ADMIN_KEY. Without either there are none."""
    max_body_bytes: int = 8 * 2**20
    """Bytes of a request's body."""
    max_prompt_tokens: int = 0
    """Tokens of a prompt; 0: as many as the model's context holds."""
    max_n: int = 128
    """Samples of a prompt (`n`)."""
    max_requests: int = 512
    """Requests that are answered at the same time; further ones get 429."""
    max_waiting: int = 1024
    """Sequences that wait for a place among the engine's max_sequences; requests that would add more get 429."""
    request_seconds: float = 0.0
    """Time that a request may take, reading it included; 0: as long as it needs."""
    shutdown_seconds: float = 30.0
    """Time that running requests are given after SIGTERM or SIGINT before they are aborted."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)


Config = TypeVar("Config", PretrainConfig, RLConfig)


def validate(config: PretrainConfig | RLConfig | ServeConfig) -> None:
    """Refuses impossible values, naming the field and what to change. Raises UserError."""
    problems = list(_serve_problems(config) if isinstance(config, ServeConfig) else _problems(config))
    if problems:
        raise UserError("this configuration cannot run:\n" + "\n".join(f"  - {p}" for p in problems))


def _problems(config: PretrainConfig | RLConfig) -> Iterator[str]:
    positive = ["steps", "train.learning_rate", "train.tokens_per_microbatch"]
    not_negative = ["train.warmup_steps", "train.weight_decay", "train.max_grad_norm", "checkpoint_every"]
    if isinstance(config, PretrainConfig):
        positive += ["tokens_per_step", "sequence_length"]
    else:
        positive += ["prompts_per_step", "samples_per_prompt", "max_new_tokens", "inner_steps", "temperature"]
        positive += ["engine.max_tokens_per_step", "engine.max_sequences", "engine.cache_tokens"]
        not_negative += ["kl_coefficient", "clip_low", "clip_high", "top_k", "validation_every", "validation_examples"]
    for name in positive:
        if not _value(config, name) > 0:
            yield f"{name} is {_value(config, name)}; it must be above 0"
    for name in not_negative:
        if not _value(config, name) >= 0:
            yield f"{name} is {_value(config, name)}; it must be 0 or more"
    if config.resume and config.overwrite:
        yield "resume and overwrite exclude each other; give one"
    if isinstance(config, RLConfig):
        if not config.model:
            yield "model is empty; give a Hugging Face folder with --model DIR"
        if not 0 < config.top_p <= 1:
            yield f"top_p is {config.top_p}; it must be in (0, 1]"
        if not 0 <= config.min_p < 1:
            yield f"min_p is {config.min_p}; it must be in [0, 1)"
        if not config.clip_low < 1:
            yield f"clip_low is {config.clip_low}; it must be below 1, for ratios are positive"


def _serve_problems(config: ServeConfig) -> Iterator[str]:
    positive = ["max_body_bytes", "max_n", "max_requests"]
    positive += ["engine.max_tokens_per_step", "engine.max_sequences", "engine.cache_tokens"]
    not_negative = ["max_prompt_tokens", "max_waiting", "request_seconds", "shutdown_seconds"]
    for name in positive:
        if not _value(config, name) > 0:
            yield f"{name} is {_value(config, name)}; it must be above 0"
    for name in not_negative:
        if not 0 <= _value(config, name) < float("inf"):
            yield f"{name} is {_value(config, name)}; it must be 0 or more"
    if not 0 <= config.port < 2**16:
        yield f"port is {config.port}; it must be from 0 to 65535"
    if config.dtype not in ("", "bfloat16", "float32"):
        yield f'dtype is "{config.dtype}"; give bfloat16 or float32'
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


def to_toml(config: PretrainConfig | RLConfig) -> str:
    """The resolved configuration as TOML: plain fields first, then a table for each nested one."""
    plain, tables = [], []
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, dict):
            tables += [f"\n[{name}]"] + [f"{k} = {_toml_value(v)}" for k, v in value.items()]
        else:
            plain.append(f"{name} = {_toml_value(value)}")
    return "\n".join(plain + tables) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # A JSON string is a TOML basic string.
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def from_toml(path: str | Path, base: Config) -> Config:
    """`base` with the values of a TOML file put over it.

    Raises UserError for a missing or malformed file and for keys that `base` does not have.
    """
    try:
        values = tomllib.loads(Path(path).read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: cannot be read as TOML ({error}); write `key = value` lines") from error
    return _merge(base, values, str(path))


def _merge(config: Any, values: dict[str, Any], where: str) -> Any:
    names = {f.name for f in dataclasses.fields(config)}
    for key in values:
        if key not in names:
            raise UserError(f'{where}: unknown key "{key}".{closest(key, names)}')
    changes = {
        key: _merge(getattr(config, key), value, f"{where} [{key}]") if isinstance(value, dict) else value
        for key, value in values.items()
    }
    return dataclasses.replace(config, **changes)
