"""How a model is distributed over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from lockstep.config.bounds import AtLeast
from lockstep.errors import closest

MAX_TENSOR = 8
"""Maximum tensor degree, a power of two: the vocabulary is summed in pieces that so many ranks can share."""
ROW_MULTIPLE = MAX_TENSOR
"""The tokens of a micro-batch are padded to a multiple of this, so that any tensor degree can share them."""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv", "dualpipev")


def tensor_problems(tensor: int, chunks: int) -> Iterator[str]:
    """A message for a tensor degree, or a number of `reduction_chunks` (`chunks`), that cannot work."""
    if tensor not in (1, 2, 4, MAX_TENSOR):
        yield f"parallel.tensor is {tensor}; give 1, 2, 4 or {MAX_TENSOR}"
    if chunks & (chunks - 1) or 0 < chunks < tensor:
        yield (
            f"parallel.reduction_chunks is {chunks}; it must be a power of two, and at least parallel.tensor "
            f"({tensor}): leave it at 0 (a resumed run has its recorded value; --parallel.reduction-chunks 0 changes "
            "it, and the bits from that step on)"
        )


@dataclass
class ParallelConfig:
    """The degree of each kind of parallelism; their product, without `expert`, is the number of ranks."""

    data_replicate: int = 1
    """Copies of the model, each of which sees different data (DDP; with data_shard: HSDP)."""
    data_shard: int = -1
    """Ranks that shard one copy's weights, gradients and optimizer state (FSDP); -1: all remaining ranks."""
    context: int = 1
    """Ranks that share each sequence."""
    tensor: int = 1
    """Ranks that share each layer's matrices, and the vocabulary of the head: 1, 2, 4 or 8."""
    expert: Annotated[int, AtLeast(1)] = 1
    """How many of the ranks with different tokens (data_shard x context) share each mixture's experts, on top of the
    tensor ranks: tokens are sent to them. FSDP shards the experts over the remaining ranks."""
    expert_dispatcher: Literal["all_to_all", "deep_ep"] = "all_to_all"
    """How tokens are sent to experts on other ranks: `deep_ep` is DeepEP on the GPUs of one host, with the same bits.
    Not measured yet."""
    reduction_chunks: Annotated[int, AtLeast(0)] = 0
    """Number of parts that sums over tensor-parallel ranks are made of, a power of two: a different number changes the
    bits, a different tensor degree up to it does not. 0: `tensor`, or the model's number in training if larger."""
    pipeline: int = 1
    """Ranks that the layers are divided among, in stages."""
    pipeline_schedule: str = "1f1b"
    """Pipeline schedule: `gpipe`, `1f1b`, `interleaved`, `zbv` or `dualpipev`."""
    pipeline_stages_per_rank: Annotated[int, AtLeast(1)] = 2
    """Stages per rank in an interleaved schedule; the other schedules determine theirs."""
    pipeline_split: str = ""
    """Layers that begin a new stage, such as `layers.2,layers.5`; empty: stages of about equal work."""
    pipeline_embedding_layers: Annotated[float, AtLeast(0)] = 0.0
    """The embedding's work in layers, for balancing stages."""
    pipeline_head_layers: Annotated[float, AtLeast(0)] = 1.0
    """The work of the head and its loss in layers, for balancing stages."""
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    """When gathered weights are freed after a layer's forward; default: always, but never within a pipeline."""
    bucket_mib: Annotated[float, AtLeast(0)] = 32.0
    """Consecutive layers whose gathered weights fit into so many MiB share the messages that gather these and sum their
    gradients. 0: each layer by itself."""
    reduce_gradients: Literal["auto", "step", "microbatch"] = "auto"
    """When ranks sum the gradients of sharded weights: once per step, until which each rank holds the full gradient, or
    with every micro-batch; auto: once per step if the full gradient fits in a quarter of a rank's memory."""
    full_dtensor: bool = False
    """Make every parameter a DTensor on one mesh of all axes, without FSDP's hooks; for study and debugging: weights
    are gathered for each product and kept until its backward."""
    cpu_offload: bool = False
    """Keep sharded weights, gradients and optimizer state in CPU memory (CUDA only)."""


def parallel_problems(parallel: ParallelConfig) -> Iterator[str]:
    """A message for each combination that works with no model and no number of ranks."""
    yield from tensor_problems(parallel.tensor, parallel.reduction_chunks)
    if parallel.expert_dispatcher == "deep_ep" and parallel.expert * parallel.tensor == 1:
        yield (
            'parallel.expert_dispatcher "deep_ep" needs parallel.expert or parallel.tensor above 1, where experts are '
            "on other ranks; leave it out"
        )
    schedule = parallel.pipeline_schedule
    if schedule not in SCHEDULES:
        yield (
            f'parallel.pipeline_schedule "{schedule}" is unknown.{closest(schedule, SCHEDULES)} Known: '
            f"{', '.join(SCHEDULES)}"
        )
    if schedule == "interleaved" and parallel.pipeline > 1 and parallel.pipeline_stages_per_rank < 2:
        yield (
            f"parallel.pipeline_stages_per_rank is {parallel.pipeline_stages_per_rank}; an interleaved schedule needs "
            '2 or more; for 1, use pipeline_schedule "1f1b"'
        )
    if parallel.reduce_gradients == "microbatch" and parallel.pipeline > 1:
        yield (
            'parallel.reduce_gradients "microbatch" does not work with parallel.pipeline, whose schedules sum '
            'gradients once per step; leave it at "auto"'
        )
    if parallel.full_dtensor and parallel.pipeline > 1:
        yield f"parallel.full_dtensor has no stages, but parallel.pipeline is {parallel.pipeline}; set it to 1"
    if parallel.full_dtensor and parallel.cpu_offload:
        yield "parallel.cpu_offload needs FSDP, which parallel.full_dtensor does not use; remove one of them"
    if parallel.full_dtensor and parallel.expert > 1:
        yield "parallel.full_dtensor does not work with parallel.expert, whose experts are on a separate mesh"
