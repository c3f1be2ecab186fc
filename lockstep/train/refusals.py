"""What settings, the model's shape and the ranks rule out together: refused once, before weights exist.

What settings rule out alone is in `lockstep.config.validation`, and layouts that no model of a shape can have in
`lockstep.parallel.refusals`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lockstep.config import ParallelConfig, PretrainConfig, RLConfig
from lockstep.data import Tokenizer, divide_step, load_tokenizer
from lockstep.errors import UserError
from lockstep.hub import is_model, named_path
from lockstep.model import ModelConfig, read_config
from lockstep.ops import NONE
from lockstep.parallel import World, chunks_for
from lockstep.parallel.pipeline_schedule import PipelinePlan
from lockstep.precision import HEAD
from lockstep.train.expert_balance import balance_problems


def refuse_step(config: PretrainConfig, world: World) -> None:
    """Raises UserError if a step does not divide into the ranks' micro-batches, or their pipeline cannot run as many.

    Called before any data is read.
    """
    rows, rows_per_microbatch = divide_step(
        config.sequence_length,
        config.tokens_per_step,
        config.train.tokens_per_microbatch,
        world.data_size,
        config.train.deterministic_layout,
    )
    if config.parallel.pipeline > 1:
        PipelinePlan(config.parallel).check_microbatches(rows // world.data_size // rows_per_microbatch)


def refuse_shape(config: PretrainConfig | RLConfig, shape: ModelConfig, world: World) -> None:
    """Raises UserError if a model of this shape cannot be trained with these settings on these ranks."""
    if isinstance(config, PretrainConfig):
        refuse_long_rows(config, shape)
    for problem in _problems(config, shape, world):
        raise UserError(problem)


def _problems(config: PretrainConfig | RLConfig, shape: ModelConfig, world: World) -> Iterator[str]:
    yield from balance_problems(config.train, shape)
    if config.train.deterministic_layout:
        shape = replace(shape, reduction_chunks=chunks_for(shape.reduction_chunks, config.parallel))
        yield from layout_problems(shape, world, config.parallel)


def refuse_long_rows(config: PretrainConfig, shape: ModelConfig) -> None:
    """Raises UserError if a row is longer than the model's context."""
    if config.sequence_length > shape.max_positions:
        raise UserError(
            f"sequence_length is {config.sequence_length}, but {config.model} has {shape.max_positions} positions; "
            f"give at most {shape.max_positions}"
        )


def refuse_other_vocabulary(folder: str, setting: str, model: str, tokenizer: Tokenizer) -> None:
    """Raises UserError, naming `setting`, if the model in `folder` has another vocabulary than the run's `model`, whose
    tokens it is to score."""
    if not is_model(folder):
        raise UserError(f"{setting} {folder}: no such model; give a folder with one")
    sizes = [read_config(named_path(each)).vocab_size for each in (folder, model)]
    if sizes[0] != sizes[1] or load_tokenizer(folder, sizes[0]).vocabulary() != tokenizer.vocabulary():
        difference = f"{sizes[0]} tokens, not {sizes[1]}" if sizes[0] != sizes[1] else "other tokens for the same ids"
        raise UserError(
            f"{setting} {folder}: its vocabulary is not that of {model} ({difference}), so it cannot score that "
            "model's tokens; give a model with the same tokenizer"
        )


def layout_problems(shape: ModelConfig, world: World, parallel: ParallelConfig) -> Iterator[str]:
    """A message for each reason why gradients would not be summed in the order of train.deterministic_layout."""
    yield from _width_problems(shape)
    shared = [f"parallel.{axis} {world.degrees[axis]}" for axis in ("pipeline", "context", "tensor")]
    shared = [each for each in shared if not each.endswith(" 1")]
    if shared and world.device.type != "cpu":
        yield (
            f"train.deterministic_layout with {', '.join(shared)} only works on CPUs so far, not on "
            f"{world.device.type}, whose libraries sum in their own order; switch it off"
        )
    if shape.experts is not None and world.degrees["context"] > 1:
        yield (
            f"train.deterministic_layout with parallel.context {world.degrees['context']} only works for dense models "
            "so far: the gradients of a mixture's experts are summed by rank; switch it off"
        )
    if shape.lora is not None and HEAD in shape.lora.modules and world.degrees["context"] > 1:
        yield (
            f"train.deterministic_layout with parallel.context {world.degrees['context']} does not work with an "
            "adapter of the head yet, whose gradients are summed by rank; switch it off, or leave lm_head out of "
            "lora.targets"
        )
    if world.degrees["tensor"] > shape.num_kv_heads:
        yield (
            f"train.deterministic_layout with parallel.tensor {world.degrees['tensor']} does not work with fewer "
            f"key-value heads ({shape.num_kv_heads}), whose gradients are summed by rank; lower parallel.tensor, or "
            "switch it off"
        )
    if world.degrees["tensor"] > 1 and shape.fused:
        yield (
            f"train.deterministic_layout with parallel.tensor {world.degrees['tensor']} does not work with fused "
            f"projections ({', '.join(shape.fused)}), of which each rank has some rows of each part; switch one of "
            "them off"
        )
    if world.degrees["tensor"] > 1 and shape.delta is not None and not shape.delta.fused:
        yield (
            f"train.deterministic_layout with parallel.tensor {world.degrees['tensor']} does not work with this "
            "model's linear attention, whose queries, keys and values are one projection (in_proj_qkv) of which each "
            "rank has some rows of each; use parallel.context or parallel.data_shard instead, or switch it off"
        )
    if world.degrees["tensor"] > 1 and not shape.precision.linear.startswith(("int", NONE)):
        yield (
            f"train.deterministic_layout with parallel.tensor {world.degrees['tensor']} does not work with "
            f"precision.linear {shape.precision.linear}, which rounds gradients with scales of a rank's outputs; use "
            "int8 or int4, or switch it off"
        )
    if world.device.type == "cuda" and world.data_size > 2:
        yield (
            f"train.deterministic_layout works on up to 2 GPUs so far, not {world.data_size}, over which a library "
            "sums in its own order; switch it off"
        )
    if world.degrees["data_replicate"] > 1 and world.degrees["data_shard"] & (world.degrees["data_shard"] - 1):
        yield (
            "train.deterministic_layout sums in a binary tree of ranks, shards first: with parallel.data_replicate "
            f"{world.degrees['data_replicate']}, the number of shards must be a power of two and is "
            f"{world.degrees['data_shard']}; set parallel.data_replicate to 1 or {world.data_size}"
        )
    if parallel.full_dtensor and world.data_size > 1:
        yield (
            "train.deterministic_layout does not work with parallel.full_dtensor over data-parallel ranks; switch one "
            "of them off"
        )


def _width_problems(shape: ModelConfig) -> Iterator[str]:
    """Outputs of projections that cannot be divided into the parts that their input's gradient is summed in."""
    chunks, widths = shape.reduction_chunks, {}
    if shape.latent is None:
        keys = f"features of this model's keys ({shape.num_kv_heads} heads of {shape.head_dim})"
        widths[keys] = shape.num_kv_heads * shape.head_dim
    if (delta := shape.delta) is not None:
        name = "strengths and decays" if delta.fused else "value heads"
        widths[f"{name} of linear attention"] = delta.value_heads * (1 + delta.fused)
    for name, width in widths.items():
        # In bfloat16, a product reads two features at once.
        if chunks > 1 and width % (2 * chunks):
            yield (
                f"train.deterministic_layout sums gradients in parallel.reduction_chunks {chunks} parts, but twice "
                f"that number does not divide the {width} {name}; lower parallel.reduction_chunks, and parallel.tensor "
                "with it, or switch it off"
            )
