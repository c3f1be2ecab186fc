"""Small trainers under any layout, to be saved and resumed, and what they hold, whole."""

from __future__ import annotations

import json
import resource
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.checkpoint.checkpoints import Checkpoints
from lockstep.checkpoint.manifest import MANIFEST, _with_checksum
from lockstep.config import CheckpointConfig, CompileConfig, ParallelConfig, PretrainConfig, TrainConfig
from lockstep.data import ByteTokenizer
from lockstep.model import initialize, preset, resolve_dtype
from lockstep.parallel import World, close_world, open_world, parallel_model
from lockstep.train import Trainer, pack
from lockstep.train.objective import NextTokenLoss

MODEL = "qwen3:micro"
SEQUENCE = list(range(20, 60))


def trainer_of(world: World, parallel: ParallelConfig, dtype: str, seed: int, model: str = MODEL) -> Trainer:
    fill = partial(initialize, seed=seed)
    shape = replace(preset(model, 258), num_layers=2)
    decoder = parallel_model(shape, resolve_dtype(dtype), world, parallel, CompileConfig(), fill)
    return Trainer(decoder, TrainConfig(warmup_steps=0), 10, world)


def update(trainer: Trainer) -> float:
    """One step; the same on every rank, whose gradients are added up."""
    loss = NextTokenLoss(2 * (len(SEQUENCE) - 1) * trainer.world.data_size)
    return trainer.step([pack([SEQUENCE]), pack([SEQUENCE])], loss)["loss"]


def checkpoints_of(run: Path, trainer: Trainer, dtype: str = "float32", **settings: object) -> Checkpoints:
    config = PretrainConfig(dtype=dtype, steps=10, checkpoint=CheckpointConfig(**settings))  # type: ignore[arg-type]
    return Checkpoints(run, trainer, ByteTokenizer(), config)


def whole(trainer: Trainer) -> dict[str, Tensor]:
    """Masters, moments and the model's own weights, as one process has them."""
    tensors = trainer.optimizer.state_tensors() | {f"model.{n}": p for n, p in trainer.model.named_parameters()}
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()}


def trained_and_saved(
    run: Path, parallel: ParallelConfig, dtype: str, model: str = MODEL
) -> tuple[dict[str, Tensor], list[float]]:
    """Two steps, a checkpoint, and the losses of two more: the second is what the first has learnt."""
    world = open_world(parallel, "cpu")
    trainer = trainer_of(world, parallel, dtype, 3, model)
    with checkpoints_of(run, trainer, dtype) as checkpoints:
        update(trainer), update(trainer)
        held = whole(trainer)
        checkpoints.save(2, {"loader": {"position": 7}})
        losses = [update(trainer), update(trainer)]
    close_world(world)
    return held, losses


def resumed(
    run: Path, parallel: ParallelConfig, dtype: str, model: str = MODEL
) -> tuple[dict[str, Tensor], list[float]]:
    """What a trainer of other weights holds after resuming, and the losses of its next two steps."""
    world = open_world(parallel, "cpu")
    trainer = trainer_of(world, parallel, dtype, 4, model)
    checkpoints = checkpoints_of(run, trainer, dtype)
    state = checkpoints.resume()
    assert state is not None and state["step"] == 2 and state["loader"] == {"position": 7} and trainer.updates == 2
    held = whole(trainer)
    losses = [update(trainer), update(trainer)]
    close_world(world)
    return held, losses


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses to write more bytes into a file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_disk(run: Path) -> list[str]:
    """Saves, saves on a full disk, saves again, and where no folder can be made; returns what each save said."""
    world = open_world(ParallelConfig(), "cpu")
    trainer = trainer_of(world, ParallelConfig(), "float32", seed=3)
    checkpoints = checkpoints_of(run, trainer)
    said = []
    for step, limit in ((1, resource.RLIM_INFINITY), (2, 100_000), (3, resource.RLIM_INFINITY)):
        update(trainer)
        with files_of_at_most(limit):
            checkpoints.save(step, {})
            said.append(checkpoints.wait())
    if world.is_main:
        (run / "checkpoints" / "step_00000004.partial").touch()
    world.barrier()
    checkpoints.save(4, {})
    said.append(checkpoints.wait())
    close_world(world)
    return said


def rewrite_state(folder: Path, text: bytes) -> None:
    """Gives a checkpoint another `state.json`, which its manifest vouches for."""
    files = json.loads((folder / MANIFEST).read_text())["files"]
    files["state.json"] = {"bytes": len(text), "crc32": zlib.crc32(text)}
    (folder / "state.json").write_bytes(text)
    (folder / MANIFEST).write_bytes(_with_checksum(json.dumps(files).encode()))


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)
