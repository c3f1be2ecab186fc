"""Splits the layers into pipeline stages."""

from __future__ import annotations

from itertools import pairwise

from lockstep.config import ParallelConfig
from lockstep.errors import UserError


def split_layers(num_layers: int, stages: int, config: ParallelConfig) -> list[range]:
    """Consecutive layers for each stage: from `pipeline_split`, otherwise of about equal work.

    Raises UserError if there are fewer layers than stages, or if `pipeline_split` names layers that cannot begin a
    stage.
    """
    if num_layers < stages:
        raise UserError(
            f"a pipeline of {stages} stages needs at least as many layers, but the model has {num_layers}; lower "
            "parallel.pipeline, or use a schedule with fewer stages per rank"
        )
    starts = _named(config.pipeline_split, num_layers, stages) if config.pipeline_split else None
    if starts is None:
        sizes = _balanced(num_layers, stages, config.pipeline_embedding_layers, config.pipeline_head_layers)
        starts = [sum(sizes[:stage]) for stage in range(stages)]
    return [range(*ends) for ends in pairwise([*starts, num_layers])]


def stage_work(layers: list[range], config: ParallelConfig) -> list[float]:
    """The work of each stage, in layers; the config has the weights of embedding and head."""
    work = [float(len(stage)) for stage in layers]
    work[0] += config.pipeline_embedding_layers
    work[-1] += config.pipeline_head_layers
    return work


def _balanced(num_layers: int, stages: int, embedding: float, head: float) -> list[int]:
    sizes = [1] * stages
    work = [1.0] * stages
    work[0] += embedding
    work[-1] += head
    # Each layer goes to the stage with the least work, which minimizes the work of the heaviest stage. Ties go to the
    # last stage, which has fewer micro-batches in flight.
    for _ in range(num_layers - stages):
        least = max(stage for stage in range(stages) if work[stage] == min(work))
        sizes[least] += 1
        work[least] += 1
    return sizes


def _named(split: str, num_layers: int, stages: int) -> list[int]:
    names = [name.strip() for name in split.split(",")]
    starts_by_name = {f"layers.{index}": index for index in range(1, num_layers)}
    for name in names:
        if name not in starts_by_name:
            raise UserError(
                f'parallel.pipeline_split: no stage can begin with "{name}"; name layers.1 to layers.{num_layers - 1}'
            )
    starts = [0, *(starts_by_name[name] for name in names)]
    if len(starts) != stages or any(a >= b for a, b in pairwise(starts)):
        raise UserError(
            f'parallel.pipeline_split = "{split}" does not make {stages} stages; name the {stages - 1} layers that '
            "begin the later stages, in ascending order"
        )
    return starts
