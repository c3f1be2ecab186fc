"""Refuses layouts that a model's shape does not allow, before any weight is created."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from lockstep.config import ParallelConfig
from lockstep.config.parallel import MAX_TENSOR
from lockstep.errors import UserError
from lockstep.model import Decoder, ModelConfig
from lockstep.model.layers import projections
from lockstep.ops import NONE
from lockstep.precision import FLOAT8, MULTIPLES

FEATURES = {"intermediate_size": "features of the feed-forward"}


def refuse_impossible(shape: ModelConfig, degrees: Mapping[str, int], parallel: ParallelConfig) -> None:
    """Raises UserError if a degree does not divide what it splits, naming the degrees that do."""
    problems = list(_tensor_problems(shape, degrees["tensor"]))
    problems += _expert_problems(shape, degrees["tensor"], parallel)
    problems += _lora_problems(shape, degrees, parallel)
    problems = problems or list(_precision_problems(shape, degrees["tensor"], "parallel.tensor"))
    if problems:
        raise UserError("this layout does not fit the model:\n" + "\n".join(f"  - {p}" for p in problems))


def _precision_problems(shape: ModelConfig, tensor: int, setting: str) -> Iterator[str]:
    """For a degree that divides the model."""
    linear = shape.precision.linear
    if tensor == 1 or linear == NONE:
        return
    # Imported here, since one process does not shard.
    from lockstep.parallel.placements import COLUMNS, parameter_placement

    if linear == FLOAT8:
        yield (
            f"precision.linear {linear} does not work with {setting} {tensor}, whose ranks would each have a scale of "
            "their own; use float8_rowwise or mxfp8"
        )
    for name, layer in projections(Decoder(shape, torch.float32, "meta")):
        multiple, width = MULTIPLES[layer.precision], layer.weight.shape[1]
        is_cut = parameter_placement(shape, f"{name}.weight", tensor) == COLUMNS
        if is_cut and width // tensor % multiple:
            yield (
                f"precision {layer.precision} needs parts of rows that are a multiple of {multiple} wide, but "
                f"{setting} {tensor} cuts the {width} features of {name} into parts of {width // tensor}; lower it, "
                "add the layer to precision.keep, or choose int8"
            )
            return


def _expert_problems(shape: ModelConfig, tensor: int, parallel: ParallelConfig) -> Iterator[str]:
    degree = parallel.expert
    if degree == 1:
        return
    if shape.experts is None:
        yield f"parallel.expert is {degree}, but the model has no experts; leave it at 1"
    elif (count := shape.experts.count) % (degree * tensor):
        fitting = [str(n) for n in range(1, count // tensor + 1) if count % (n * tensor) == 0] or ["1"]
        yield (
            f"parallel.expert {degree}{f' x parallel.tensor {tensor}' if tensor > 1 else ''} does not divide the "
            f"{count} experts; set parallel.expert to {' or '.join(fitting)}"
        )


def _lora_problems(shape: ModelConfig, degrees: Mapping[str, int], parallel: ParallelConfig) -> Iterator[str]:
    if shape.lora is None:
        return
    for axis in ("tensor", "pipeline"):
        if degrees[axis] > 1:
            yield (
                f"parallel.{axis} {degrees[axis]} does not work with a low-rank adapter yet, whose matrices are not "
                "sharded; use parallel.data_shard, or merge the adapter first: lockstep convert --merge"
            )
    if parallel.full_dtensor:
        yield "parallel.full_dtensor does not work with a low-rank adapter yet; leave it out"


def refuse_generators(shape: ModelConfig, tensor: int) -> None:
    """Raises UserError if generators of `tensor` ranks (actors.tensor) cannot share the model."""
    problems = list(_tensor_problems(shape, tensor, "actors.tensor"))
    problems = problems or list(_precision_problems(shape, tensor, "actors.tensor"))
    if shape.lora is not None and tensor > 1:
        problems.append(
            f"actors.tensor {tensor} does not work with a low-rank adapter yet, whose matrices are not sharded; leave "
            "it at 1, and give more actors.generators"
        )
    if problems:
        raise UserError("these generators do not fit the model:\n" + "\n".join(f"  - {p}" for p in problems))


def _tensor_problems(shape: ModelConfig, tensor: int, setting: str = "parallel.tensor") -> Iterator[str]:
    if shape.reduction_chunks % tensor:
        yield (
            f"parallel.reduction_chunks {shape.reduction_chunks} is too small for {setting} {tensor}, whose ranks "
            "need at least one each; leave it at 0"
        )
    # Every key-value head is on one rank, or on several if keys have a weight of their own.
    copied = tensor % shape.num_kv_heads == 0 and "qkv_proj" not in shape.fused
    divided = {
        "attention heads": shape.num_heads,
        "key-value heads": tensor if copied else shape.num_kv_heads,
        **{FEATURES.get(name, name): size for name, size in shape.dense_sizes.items()},
        **({"experts": shape.experts.count} if shape.experts is not None else {}),
        **({"key heads of linear attention": shape.delta.key_heads} if shape.delta is not None else {}),
    }
    if tensor > 1 and (("qkv_proj" in shape.fused and shape.qkv_bias) or (shape.fused and shape.mlp_bias)):
        yield f"{setting} {tensor} does not work with fused projections that have biases; leave it at 1"
    if wrong := [f"{count} {what}" for what, count in divided.items() if count % tensor]:
        common = math.gcd(*divided.values(), MAX_TENSOR)
        fitting = [str(degree) for degree in (1, 2, 4, 8) if common % degree == 0]
        yield f"{setting} {tensor} does not divide {', '.join(wrong)}; set it to {' or '.join(fitting)}"
    if -(-shape.vocab_size // tensor) * (tensor - 1) >= shape.vocab_size:
        yield f"{setting} {tensor} leaves a rank with none of the {shape.vocab_size} tokens; lower it"
