"""What separate generators must match to sample for a run, and the engine of a generator process that does."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep import ops
from lockstep.config import CONFIG, ActorsConfig, CompileConfig, EngineConfig, ParallelConfig
from lockstep.data import load_tokenizer
from lockstep.errors import UserError
from lockstep.generate import Engine, SamplingParams
from lockstep.generate.drafts import HistoryDraft, make_draft
from lockstep.generate.driver import DriverEngine
from lockstep.hub import local_folder
from lockstep.model import (
    Decoder,
    Lora,
    ModelConfig,
    arithmetic_of,
    initialize,
    read_config,
    resolve_dtype,
    set_arithmetic,
)
from lockstep.model.families.own import know_family
from lockstep.model.known_operators import refuse_unknown_operators
from lockstep.observe import announce, start_line
from lockstep.parallel import World, apply_compile, generator_model
from lockstep.precision import read_precision
from lockstep.rl.rollouts.plain import plain_shape
from lockstep.rl.rollouts.recorded import recall
from lockstep.rl.weights.reader import WeightReader


@dataclass(frozen=True)
class GeneratorSpec:
    """The policy's model and numerics, and how the run samples from it."""

    model: str
    """The folder that the run starts from."""
    shape: ModelConfig
    dtype: str
    arithmetic: str
    engine: EngineConfig
    compile: CompileConfig
    params: SamplingParams
    device: str = ""
    """As `RLConfig.device`, for the processes that the run starts."""

    @property
    def cache_tokens(self) -> int:
        """Capacity of a generator's cache: whole pages."""
        return self.engine.cache_tokens // ops.PAGE * ops.PAGE

    @property
    def context(self) -> int:
        """Most tokens of prompt and completion that the run may request."""
        return min(self.shape.max_positions, self.cache_tokens)

    def welcome(self, actors: ActorsConfig, run: Path) -> dict[str, Any]:
        """The trainer's first message to a generator process; JSON-able. run: the run's folder."""
        return {
            "model": self.model,
            "shape": plain_shape(self.shape),
            "dtype": self.dtype,
            "arithmetic": self.arithmetic,
            "reduction_chunks": self.shape.reduction_chunks,
            "engine": dataclasses.asdict(self.engine),
            "compile": dataclasses.asdict(self.compile),
            "on_update": actors.on_update,
            "silence_seconds": actors.silence_seconds,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "run": str(run.resolve()),
        }


def open_engine(welcome: dict[str, Any], key: bytes, world: World) -> tuple[WeightReader, Engine]:
    """An engine over the trainer's model, and the reader that loads its weights, which it does not have yet.

    welcome: as `GeneratorSpec.welcome`. key: the run's. Raises UserError if this host cannot match the trainer.
    """
    know_family(welcome["model"])
    folder, device = local_folder(welcome["model"]), world.device
    expected = welcome["shape"]
    ends = tuple(expected["eos_token_ids"])
    precision = read_precision(expected["precision"], "the trainer's model")
    chunks = welcome["reduction_chunks"]
    shape = dataclasses.replace(read_config(folder), reduction_chunks=chunks, eos_token_ids=ends, precision=precision)
    if shape.lora is None and (lora := expected.get("lora")):  # a new adapter that the run trains
        shape = dataclasses.replace(shape, lora=Lora(lora["rank"], lora["alpha"], tuple(lora["modules"])))
    actual = plain_shape(shape)
    if different := [name for name, value in actual.items() if value != expected.get(name)]:
        listed = ", ".join(f"{name} {actual[name]} and not {expected.get(name)}" for name in different[:3])
        raise UserError(f"{folder}: differs from the trainer's model: {listed}; copy the trainer's folder")
    _match_arithmetic(welcome["arithmetic"], device)
    model = compiled_generator(shape, welcome["dtype"], CompileConfig(**welcome["compile"]), world)
    tokenizer = load_tokenizer(folder, shape.vocab_size)
    drives = world.size > 1 and world.is_main
    config = EngineConfig(**welcome["engine"])
    draft = make_draft(config, model, _history(Path(welcome.get("run", "")), config, world))
    engine = (DriverEngine if drives else Engine)(model, config, tokenizer, draft)
    work = f"{welcome['name']} samples for process {welcome['pid']} on {welcome['host']}"
    announce("generator: " + start_line(welcome["model"], shape, device, model.dtype, work, world.size))
    return WeightReader(model, world, key), engine


def compiled_generator(shape: ModelConfig, dtype: str, compile: CompileConfig, world: World) -> Decoder:
    """The model of a separate generator, with any weights, compiled as configured."""
    parallel = ParallelConfig(tensor=world.size, data_shard=1, reduction_chunks=shape.reduction_chunks)
    model = generator_model(shape, resolve_dtype(dtype), world, parallel, partial(initialize, seed=0))
    if world.size == 1:
        refuse_unknown_operators(model)
    apply_compile(model, compile, trains=False)
    return model


def _history(run: Path, config: EngineConfig, world: World) -> HistoryDraft:
    """Seeds drafting with the run's earlier samples, if this host can read its folder.

    Not in a tensor group, whose ranks must all draft the same.
    """
    history = HistoryDraft()
    recalls = config.draft == "auto" and world.size == 1 and (run / CONFIG).is_file()
    if recalls and (count := recall(history, run)):
        announce(f"generator: drafts start from {count} completions of {run}")
    return history


def _match_arithmetic(required: str, device: torch.device) -> None:
    if device.type == "cpu":  # a GPU has only one
        with contextlib.suppress(UserError):
            set_arithmetic(required, device)
    if (actual := arithmetic_of(device)) != required:
        raise UserError(
            f"the trainer computes in {required}, but a generator on {socket.gethostname()} in {actual}; start it on a "
            "machine like the trainer's, or start the run with --arithmetic portable, which works on any CPU"
        )
