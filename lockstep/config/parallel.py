"""How a model is spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from lockstep.config.bounds import AtLeast

MOST_TENSOR = 8
"""Ranks along the tensor axis, a power of two: the vocabulary is summed in pieces that so many can hold."""
ROW_MULTIPLE = MOST_TENSOR
"""The tokens of a micro-batch are padded to a multiple of this, so that any tensor degree shares them."""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv", "dualpipev")


def tensor_problems(tensor: int, chunks: int) -> Iterator[str]:
    """What is wrong with a tensor degree and the number of `reduction_chunks`."""
    if tensor not in (1, 2, 4, MOST_TENSOR):
        yield f"parallel.tensor is {tensor}; give 1, 2, 4 or {MOST_TENSOR}"
    if chunks & (chunks - 1) or 0 < chunks < tensor:
        yield (
            f"parallel.reduction_chunks is {chunks}; it must be a power of two, and no less than parallel.tensor "
            f"({tensor}): leave it at 0 (a resumed run keeps its own: --parallel.reduction-chunks 0 changes it, and "
            "with it the bits from there on)"
        )


@dataclass
class ParallelConfig:
    """The degrees of every kind of parallelism; their product, but for `expert`, is the number of ranks."""

    data_replicate: int = 1
    """Copies of the model, each of which sees different data (DDP; with data_shard: HSDP)."""
    data_shard: int = -1
    """Ranks that shard one copy's weights, gradients and optimizer state (FSDP); -1: all remaining ranks."""
    context: int = 1
    """Ranks that share each sequence."""
    tensor: int = 1
    """Ranks that share each layer's matrices, and the vocabulary of the head: 1, 2, 4 or 8."""
    expert: Annotated[int, AtLeast(1)] = 1
    """Of the ranks that see different tokens (data_shard x context), how many share each mixture's experts, on top of
    the tensor ranks: tokens travel to them. FSDP shards the experts over what is left."""
    expert_dispatcher: Literal["all_to_all", "deep_ep"] = "all_to_all"
    """What carries tokens to the experts on other ranks: `deep_ep` is DeepEP on GPUs of one host, with the same bits,
    and where it fails a warning and the all-to-all; unmeasured so far."""
    reduction_chunks: Annotated[int, AtLeast(0)] = 0
    """Parts that sums over tensor-parallel ranks are made of, a power of two: another number gives other bits, another
    tensor degree up to it does not. 0: `tensor`, or what the model was trained with if that is more."""
    asynchronous_tensor: bool = False
    """Sums of tensor parallelism travel in chunks beside the products; the same bits, not measured on GPUs yet."""
    pipeline: int = 1
    """Ranks that the layers are divided among, in stages."""
    pipeline_schedule: str = "1f1b"
    """Order of the stages' work: `gpipe`, `1f1b`, `interleaved`, `zbv`, `dualpipev`, or FILE.csv, a line per rank."""
    pipeline_stages_per_rank: Annotated[int, AtLeast(1)] = 2
    """Stages of each rank in an interleaved schedule; the others fix theirs."""
    pipeline_split: str = ""
    """Layers that begin a new stage, as `layers.2,layers.5`; empty: stages of about equal work."""
    pipeline_embedding_layers: Annotated[float, AtLeast(0)] = 0.0
    """The embedding's work in layers, for balancing stages."""
    pipeline_head_layers: Annotated[float, AtLeast(0)] = 1.0
    """The work of the head and its loss in layers, for balancing stages."""
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    """When gathered weights are freed after a layer's forward; default: always, but never within a pipeline."""
    reduce_gradients: Literal["auto", "step", "microbatch"] = "auto"
    """When ranks sum sharded weights' gradients: once a step, until when each rank holds the gradient of the whole
    weights, or with every micro-batch; auto: once a step where that gradient fits a quarter of a rank's memory."""
    full_dtensor: bool = False
    """Every parameter a DTensor on one mesh of all axes, without FSDP's hooks; for study and debugging:
    weights are gathered anew for every product and kept until its backward."""
    cpu_offload: bool = False
    """Keep sharded weights, gradients and optimizer state in the CPU's memory (CUDA only)."""
