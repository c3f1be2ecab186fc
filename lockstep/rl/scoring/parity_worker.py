"""One rank's share of `lockstep parity --matrix`: engines that sample, and training layouts that score the samples.

Each process works through the jobs for its number of ranks, and returns log-probabilities as their 32 bits.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing import start_processes

from lockstep.config import CompileConfig, EngineConfig, ParallelConfig, RecomputeConfig, TrainConfig
from lockstep.generate import Engine
from lockstep.model import ScoringModel, initialize, resolve_dtype
from lockstep.parallel import World, apply_compile, close_world, generator_model, open_world, parallel_model
from lockstep.parallel.world import AXES
from lockstep.rl.scoring.parity_check import mixed_load
from lockstep.rl.scoring.parity_matrix import CHUNKS, MODELS, Generating, Job, Results, Scoring
from lockstep.train import Trainer, pack, target_log_probs
from lockstep.train.context import shard_row
from lockstep.train.packing import PackedRow
from lockstep.workers.processes import die_with_parent

SEED = 3
REQUESTS = 8
PACKED = 2
"""Requests in a micro-batch; they have one temperature. Four micro-batches suit all layouts."""


def run_ranks(ranks: int, jobs: Sequence[Job], results: Results) -> Iterator[tuple[Job, int, Any]]:
    """Each job's result on each of this many processes, as they come; results: of jobs on fewer ranks.

    Raises torch.multiprocessing.spawn.ProcessException with the traceback of a rank that fails, and kills the others.
    """
    # Forked from a server that has imported what they need.
    context = multiprocessing.get_context("forkserver")
    compiled = any(job.backend != "none" for job in jobs)
    context.set_forkserver_preload([__name__, *(["torch._inductor.compile_fx"] if compiled else [])])
    sampled = {key: result for key, result in results.items() if isinstance(key[0], Generating)}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    queue = context.SimpleQueue()
    arguments = ranks, port, jobs, sampled, queue
    started = start_processes(_be_rank, arguments, ranks, join=False, daemon=True, start_method="forkserver")
    ended = False
    while not ended:
        ended = started.join(0.1)
        while not queue.empty():
            yield queue.get()


def _be_rank(rank: int, ranks: int, port: int, jobs: Sequence[Job], results: Results, queue: Any) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"})
    silence = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(silence, output)
    if any(job.backend != "none" for job in jobs):
        from torch import _dynamo

        # A process of a normal run compiles one model; this one compiles every shape, dtype and layout.
        _dynamo.config.recompile_limit = _dynamo.config.accumulated_recompile_limit = 4096
    results = dict(results)
    everyone = open_world(ParallelConfig(), "cpu")  # the layouts' meshes are created on its process group
    for job in jobs:
        result = sample(job) if isinstance(job, Generating) else score(job, results[job.sampled_by(1), 0])
        results[job, rank] = result
        queue.put((job, rank, result))
    close_world(everyone)


_worlds: dict[tuple[int, ...], World] = {}


def world_of(parallel: ParallelConfig) -> World:
    """The world of a layout, created once: each has a dozen process groups, whose threads would dominate the time."""
    degrees = tuple(getattr(parallel, axis) for axis in (*AXES, "expert"))
    if degrees not in _worlds:
        _worlds[degrees] = open_world(parallel, "cpu")
    return _worlds[degrees]


def sample(job: Generating) -> Any:
    """Requests and their samples: `[{prompt, temperature, completions: [{tokens, bits}]}]`."""
    parallel = ParallelConfig(tensor=job.ranks, reduction_chunks=CHUNKS)
    world = world_of(parallel)
    shape = MODELS[job.shape]
    model = generator_model(shape, resolve_dtype(job.dtype), world, parallel, partial(initialize, seed=SEED))
    apply_compile(model, CompileConfig(job.backend), trains=False)
    # A budget that splits prompts into chunks, and a cache too small for all sequences at once.
    engine = Engine(model, EngineConfig(max_tokens_per_step=48, max_sequences=16, cache_tokens=192))
    prompts, params = mixed_load(random.Random(0), shape, REQUESTS, longest=48)
    params = [replace(own, temperature=params[i - i % PACKED].temperature) for i, own in enumerate(params)]
    groups = engine.generate(prompts, params)
    assert engine.statistics.preemptions and engine.statistics.prompt_tokens_reused, "the load was not mixed"
    return [
        {
            "prompt": prompt,
            "temperature": param.temperature,
            "completions": [{"tokens": c.token_ids, "bits": bits_of(torch.tensor(c.logprobs))} for c in group],
        }
        for prompt, param, group in zip(prompts, params, groups)
    ]


def score(job: Scoring, requests: Sequence[Any]) -> Any:
    """What this rank computes for the sampled tokens in a training step: their indices, and log-probabilities' bits;
    and the norms of the step's gradient. requests: as `sample` returns them."""
    parallel = replace(job.layout.parallel, reduction_chunks=CHUNKS)
    world = world_of(parallel)
    fill = partial(initialize, seed=SEED)
    shape, dtype = MODELS[job.shape], resolve_dtype(job.dtype)
    recompute = RecomputeConfig(job.recompute)
    model = parallel_model(shape, dtype, world, parallel, CompileConfig(job.backend), fill, recompute)
    replays = Replays(model)
    trainer = Trainer(model, TrainConfig(learning_rate=0.0), 1, world)
    scored = Scored(world, requests)
    metrics = trainer.step(scored.rows, scored.loss)
    return {
        "tokens": scored.numbers,
        "bits": scored.bits,
        "replays_different": replays.different(len(scored.rows)),
        "gradient_norms": {name: value for name, value in metrics.items() if name.startswith("grad_norm")},
    }


class Scored:
    """This rank's micro-batches, and the log-probabilities that a step computes for them."""

    def __init__(self, world: World, requests: Sequence[Any]):
        self.numbers: list[int] = []
        self.bits: list[int] = []
        self.rows: list[PackedRow] = []
        self._of: dict[int, tuple[float, list[int]]] = {}
        microbatches = [requests[i : i + PACKED] for i in range(0, len(requests), PACKED)]
        share = len(microbatches) // world.data_size
        first = 0
        for index, packed in enumerate(microbatches):
            samples = [(request["prompt"], c["tokens"]) for request in packed for c in request["completions"]]
            row = pack([prompt + tokens for prompt, tokens in samples], [len(prompt) for prompt, _ in samples])
            if index // share == world.data_rank:
                numbers = torch.arange(first, first + len(row.targets))
                own = shard_row(row, world)
                # Sharded like the targets, the tokens' indices show which of them this rank has.
                held = shard_row(replace(row, targets=numbers), world).targets
                self.rows.append(own)
                self._of[id(own.targets)] = packed[0]["temperature"], held.tolist()
            first += len(row.targets)

    def loss(self, model: ScoringModel, row: PackedRow) -> Tensor:
        temperature, numbers = self._of[id(row.targets)]
        log_probs, _ = target_log_probs(model, row, temperature)
        self.numbers += numbers
        self.bits += bits_of(log_probs.detach())
        return log_probs.sum() / 1000


class Replays:
    """The inputs of the feed-forwards, in the forward pass and its recomputation: the same bits, if it is correct."""

    def __init__(self, model: nn.Module):
        self._seen: dict[str, set[bytes]] = defaultdict(set)
        self._calls = 0
        for name, module in model.named_modules():
            if name.endswith(".mlp"):
                module.register_forward_pre_hook(partial(self._see, name))

    def _see(self, name: str, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self._calls += 1
        self._seen[name].add(arguments[0].detach().view(torch.uint8).numpy().tobytes())

    def different(self, microbatches: int) -> int:
        """Number of layer inputs in recomputation that differ from those in the forward pass."""
        return sum(len(seen) - microbatches for seen in self._seen.values())


def bits_of(log_probs: Tensor) -> list[int]:
    bits: list[int] = log_probs.float().view(torch.int32).tolist()
    return bits
