"""The ranks of a run, and this process's position among them."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lockstep.config import ParallelConfig, RanksConfig
from lockstep.config.parallel import tensor_problems
from lockstep.errors import ReportedByRank0, UserError
from lockstep.model.device import open_device
from lockstep.observe.logs import log
from lockstep.observe.machine import memory_bytes
from lockstep.parallel.deep_ep import close_buffers
from lockstep.parallel.messages import arrays_from_rank_0, from_all, from_rank_0
from lockstep.parallel.shared_memory import close_memory, share_memory

AXES = ("pipeline", "data_replicate", "data_shard", "context", "tensor")
"""From the slowest link to the fastest: the ranks of one tensor group are neighbors."""


EXPERT_AXES = ("pipeline", "data_replicate", "expert_shard", "experts")
"""`expert` times `tensor` neighboring ranks share the experts; `expert_shard` shards each expert's weights."""

WHOLE_GRADIENT_SHARE = 4
"""An unsharded gradient of at most this fraction (1/N) of a rank's memory is kept until the end of a step."""

PATIENCE = timedelta(minutes=10)
"""Timeout of collectives."""

WATCH = "torchrun watch"
"""Name of the thread that looks every two seconds whether torchrun is alive."""

SIMULATED_MEMORY = 80 * 2**30
"""Bytes of memory per rank in a dry run."""


@dataclass(frozen=True)
class World:
    """Degrees and mesh of a run. A single process without a process group is a world of one, with all degrees 1."""

    device: torch.device
    degrees: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AXES, 1))
    mesh: DeviceMesh | None = None
    expert: int = 1
    """As `ParallelConfig.expert`."""
    expert_mesh: DeviceMesh | None = None
    """The ranks of `mesh`, by `EXPERT_AXES`, if more ranks than the tensor axis's share the experts."""
    reduce_gradients: str = "auto"
    """As `ParallelConfig.reduce_gradients`."""
    simulated_stage: int | None = None
    """A dry run's coordinate in the pipeline, instead of rank 0's."""
    memory: int = 0
    """Bytes of rank 0's device, or its share of the host's memory; the same number on every rank."""

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.mesh is not None else 0

    @property
    def size(self) -> int:
        return math.prod(self.degrees.values())

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, which alone writes metrics, the report and the terminal."""
        return self.rank == 0

    def coordinate(self, axis: str) -> int:
        """This rank's index along an axis."""
        if axis == "pipeline" and self.simulated_stage is not None:
            return self.simulated_stage
        return 0 if self.mesh is None else self.mesh.get_local_rank(axis)

    @property
    def data_size(self) -> int:
        """The number of ranks that see different data."""
        return self.degrees["data_replicate"] * self.degrees["data_shard"]

    @property
    def data_rank(self) -> int:
        return self.coordinate("data_replicate") * self.degrees["data_shard"] + self.coordinate("data_shard")

    @cached_property
    def _shard_mesh(self) -> DeviceMesh:
        """The ranks over which one copy of the weights is sharded, context ranks included."""
        assert self.mesh is not None
        if self.degrees["context"] == 1:
            return self.mesh["data_shard"]
        return self.mesh["data_shard", "context"]._flatten("shard")

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks with copies of this rank's shards, if their gradients are summed by `SumOverReplicas`.

        Otherwise FSDP sums them with the library's all-reduce, whose order is specified only for two ranks.
        """
        if self.mesh is None or self.degrees["data_replicate"] <= 2 or self.device.type != "cpu":
            return None
        return self.mesh.get_group("data_replicate")

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh for `fully_shard`: shards, times replicas if FSDP sums over them."""
        shard = self._shard_mesh
        if self.degrees["data_replicate"] == 1 or self.replicas is not None:
            return shard
        assert self.mesh is not None and shard.mesh_dim_names is not None
        return self.mesh["data_replicate", shard.mesh_dim_names[0]]

    @property
    def expert_fsdp_mesh(self) -> DeviceMesh:
        """The mesh for `fully_shard` of experts: replicas times the remaining shards."""
        assert self.expert_mesh is not None
        axes = ("data_replicate", "expert_shard") if self.degrees["data_replicate"] > 1 else ("expert_shard",)
        return self.expert_mesh[axes]

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the matrices; None if they are not sharded."""
        return self.mesh.get_group("tensor") if self.mesh is not None and self.degrees["tensor"] > 1 else None

    @property
    def tensor_ranks(self) -> list[int]:
        """The ranks that share the matrices with this one, including itself."""
        return [self.rank] if self.tensor_group is None else dist.get_process_group_ranks(self.tensor_group)

    @property
    def stage_groups(self) -> list[dist.ProcessGroup]:
        """Groups whose ranks have different parameters, as the stages of a pipeline do."""
        return [self.mesh.get_group("pipeline")] if self.mesh is not None and self.degrees["pipeline"] > 1 else []

    @property
    def group_names(self) -> dict[str, str]:
        """The axis of every process group of the mesh, by the group's name."""
        if self.mesh is None:
            return {}
        names: dict[str, str] = {self.mesh.get_group(axis).group_name: axis for axis in AXES}
        if self.degrees["context"] > 1:
            names[self._shard_mesh.get_group().group_name] = "data_shard, context"
        if self.expert_mesh is not None:
            for axis in EXPERT_AXES[2:]:  # both meshes have the same group of all ranks
                name = self.expert_mesh.get_group(axis).group_name
                names[name] = f"{names[name]}, {axis}" if name in names else axis
        return names

    def sums_every_microbatch(self, parameters: int) -> bool:
        """Whether ranks sum the gradients of so many parameters after every micro-batch, and each keeps only its shard.

        Otherwise they do once per step: fewer messages, but until then every rank has the unsharded float32 gradient of
        its tensor part.
        """
        if self.degrees["data_shard"] * self.degrees["context"] == 1 or self.degrees["pipeline"] > 1:
            return False  # nothing is sharded, or the pipeline's schedule sums at its end
        if self.reduce_gradients != "auto":
            return self.reduce_gradients == "microbatch"
        return 4 * parameters / self.degrees["tensor"] > self.memory / WHOLE_GRADIENT_SHARE

    def sum(self, values: Iterable[float], axes: tuple[str, ...] = AXES[:4]) -> list[float]:
        """Each value summed over the ranks of `axes`, by default all that compute different parts of a step's loss."""
        total = torch.tensor(list(values), dtype=torch.float64)
        for axis in axes:
            if self.mesh is not None and self.degrees[axis] > 1:
                total = total.to(self.device)
                dist.all_reduce(total, group=self.mesh.get_group(axis))
        return [float(v) for v in total.tolist()]

    def on_main(self, action: Callable[[], object]) -> None:
        """Rank 0 calls `action`, and the others wait without a timeout. If it fails, they raise ReportedByRank0."""
        if self.mesh is None:
            action()
        elif self.is_main:
            try:
                action()
            except Exception as error:
                from_rank_0(str(error) or repr(error))
                raise
            from_rank_0("")
        elif problem := from_rank_0(None):
            raise ReportedByRank0(problem)

    def from_main(self, choose: Callable[[], Any]) -> Any:
        """Rank 0's result of `choose` (JSON-serializable), on every rank. If it fails, others raise ReportedByRank0."""
        chosen: list[Any] = []
        self.on_main(lambda: chosen.append(choose()))
        if self.mesh is not None:
            chosen = from_rank_0(chosen)
        return chosen[0]

    def arrays_from_main(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Rank 0's `arrays` (one-dimensional, of numbers or booleans), on every rank."""
        return list(arrays) if self.mesh is None else arrays_from_rank_0(arrays)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (JSON-serializable), in rank order, on every rank."""
        return [value] if self.mesh is None else from_all(value)

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.mesh is not None:
            dist.barrier()


def open_world(config: ParallelConfig, device: str = "") -> World:
    """Joins the process group that torchrun's environment describes; a world of one without it.

    Raises UserError where the degrees do not fit the number of ranks.
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    degrees = resolve_degrees(config, size)
    chosen = open_device(device)
    if config.cpu_offload and chosen.type == "cpu":
        raise UserError("parallel.cpu_offload is for CUDA devices: a CPU has the weights in memory already; remove it")
    if size == 1:
        return World(chosen, degrees)
    _end_with_torchrun()
    if not dist.is_initialized():
        # torch's Flight Recorder stores the last collectives, which the watchdog dumps if one hangs.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=_store(), rank=int(os.environ["RANK"]), world_size=size, timeout=PATIENCE
        )
    world = _world(chosen, degrees, config)
    if world.tensor_group is not None and chosen.type == "cpu":
        share_memory(world.tensor_group, PATIENCE)
    return replace(world, memory=int(world.from_main(lambda: str(_memory(chosen)))))


def _end_with_torchrun() -> None:
    """Starts a thread that ends this process once its parent, torchrun, has died; does nothing without torchrun.

    Nothing else would end such ranks, and they occupy memory and the run's folder. Without torchrun, the parent may be
    a script that started the ranks in the background and ended.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and not any(t.name == WATCH for t in threading.enumerate()):
        threading.Thread(target=_watch, args=(os.getppid(),), name=WATCH, daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(2.0)
    try:
        log.critical("torchrun (process %d) has died, so this rank ends as well; --resume continues the run", parent)
    finally:
        os._exit(1)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return memory_bytes()[0] // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def refuse_ranks(command: str) -> None:
    """Raises UserError under torchrun, for a command that runs in one process."""
    if (size := int(os.environ.get("WORLD_SIZE", 1))) > 1:
        raise UserError(
            f"{command} runs in one process so far, but torchrun started {size}; start it without torchrun "
            "(pretrain and sft run on many ranks)"
        )


def _store() -> dist.Store:
    """The rendezvous store. After a restart by torchrun, it still has the addresses of the ranks that died."""
    store, _, _ = next(dist.rendezvous("env://", timeout=PATIENCE))
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        # With several hosts, the count may differ between them; see docs/cluster.md.
        store = dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return store


def simulated_world(config: ParallelConfig, size: int) -> World:
    """Rank 0 of `size` simulated ranks: collectives return at once, with undefined contents.

    Raises UserError where the degrees do not fit the number of ranks.
    """
    degrees = resolve_degrees(config, size, "give --dry-run {}")
    device = torch.device("cpu")
    if size == 1:
        return World(device, degrees)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    return replace(_world(device, degrees, config), memory=SIMULATED_MEMORY)


@contextmanager
def generating_world(ranks: RanksConfig, device: str = "") -> Iterator[World]:
    """The world of a command that generates; within this context, ranks other than 0 print nothing.

    Raises UserError if torchrun started another number of ranks.
    """
    if problems := list(tensor_problems(ranks.tensor, ranks.reduction_chunks)):
        raise UserError("; ".join(problems))
    if (size := int(os.environ.get("WORLD_SIZE", 1))) != ranks.tensor:
        remedy = f"give --parallel.tensor {size}, or start lockstep without torchrun"
        if size == 1:
            remedy = f"start torchrun --nproc-per-node {ranks.tensor} -m lockstep … --parallel.tensor {ranks.tensor}"
        raise UserError(f"parallel.tensor is {ranks.tensor}, but the number of ranks is {size}; {remedy}")
    world = open_world(ParallelConfig(tensor=ranks.tensor, data_shard=1), device)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(sys.stdout if world.is_main else nowhere):
            yield world
    finally:
        close_world(world)


def close_world(world: World) -> None:
    """Leaves the process group."""
    if world.mesh is not None and dist.is_initialized():
        from torch.distributed.tensor import debug

        if world.tensor_group is not None:
            close_memory(world.tensor_group)
        close_buffers()
        dist.destroy_process_group()
        # DTensor caches layouts with their meshes. Meshes of one shape are equal, also if a mesh's groups have ended.
        debug._clear_sharding_prop_cache()


def resolve_degrees(
    config: ParallelConfig, size: int, remedy: str = "start {0} with torchrun --nproc-per-node {0} -m lockstep …"
) -> dict[str, int]:
    """Every axis's degree, with `data_shard = -1` resolved.

    Raises UserError unless their product is `size` ranks; `remedy` says how to get another number.
    """
    degrees = {axis: getattr(config, axis) for axis in AXES}
    for axis, degree in degrees.items():
        if degree < 1 and (axis, degree) != ("data_shard", -1):
            raise UserError(f"parallel.{axis} is {degree}; it must be 1 or more")
    others = math.prod(d for axis, d in degrees.items() if axis != "data_shard")
    if degrees["data_shard"] == -1:
        degrees["data_shard"] = max(1, size // others)
    product = math.prod(degrees.values())
    if product != size:
        terms = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
        raise UserError(
            f"parallel: {terms} = {product} ranks, but {size} are running; {remedy.format(product)}, or change a "
            "degree (parallel.data_shard = -1 uses the remaining ranks)"
        )
    _refuse_expert_degree(config.expert, degrees)
    return degrees


def _refuse_expert_degree(expert: int, degrees: dict[str, int]) -> None:
    share = degrees["data_shard"] * degrees["context"]
    if expert < 1 or share % expert:
        fitting = [str(degree) for degree in range(1, share + 1) if share % degree == 0]
        raise UserError(
            f"parallel.expert is {expert}; it must divide the {share} ranks of data_shard {degrees['data_shard']} x "
            f"context {degrees['context']}, which share the experts: give {' or '.join(fitting)}"
        )


def _world(device: torch.device, degrees: dict[str, int], config: ParallelConfig) -> World:
    mesh = init_device_mesh(device.type, tuple(degrees.values()), mesh_dim_names=AXES)
    experts = None
    if config.expert > 1:
        share = degrees["data_shard"] * degrees["context"] // config.expert
        shape = degrees["pipeline"], degrees["data_replicate"], share, config.expert * degrees["tensor"]
        experts = init_device_mesh(device.type, shape, mesh_dim_names=EXPERT_AXES)
    return World(device, degrees, mesh, config.expert, experts, config.reduce_gradients)
