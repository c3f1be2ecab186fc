"""A step's micro-batches over the ranks that train: how large they are, and which of them each rank computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lockstep.errors import UserError
from lockstep.model import ModelConfig, TrainableModel
from lockstep.observe import training_flops
from lockstep.parallel import Pipeline, World
from lockstep.rl.rollouts.packing import Packing, PolicyBatch, microbatches
from lockstep.rl.rollouts.records import Rollout
from lockstep.train.context import shard_row
from lockstep.train.packing import PackedRow


def token_budget(rollouts: Sequence[Rollout], packing: Packing, world: World) -> int:
    """Tokens per micro-batch: the fewest that do not add a turn, in which every data-parallel rank computes one.

    Micro-batches are then about equal, and as many as the turns have room for, if completions can be divided so: the
    search is MULTIFIT (Coffman, Garey and Johnson, 1978). With a deterministic layout, as configured.
    """
    most = packing.tokens_per_microbatch
    if packing.deterministic_layout or world.data_size == 1:
        return most
    packed = microbatches(rollouts, most, packing.share_prompts)
    room = math.ceil(len(packed) / world.data_size) * world.data_size
    too_few = max(0, sum(plan.rows for plan in packed) // room - 1)
    # To a hundredth: each try packs all rollouts.
    while most - too_few > max(1, most // 100):
        tried = (most + too_few) // 2
        if len(microbatches(rollouts, tried, packing.share_prompts)) <= room:
            most = tried
        else:
            too_few = tried
    return most


def batches_of_rank(
    batches: Sequence[PolicyBatch], packing: Packing, world: World, model: TrainableModel
) -> list[PolicyBatch]:
    """This rank's micro-batches, with rows sharded by its layout; equally many on every rank, so some may be padding.

    With a deterministic layout data-parallel rank r of n has the micro-batches r, n + r and so on; without it, those
    that `spread` assigns.
    """
    count = math.ceil(len(batches) / world.data_size)
    if isinstance(model, Pipeline):
        count = _count_for_pipeline(model, count)
    if packing.deterministic_layout or world.data_size == 1:
        share = list(batches[world.data_rank :: world.data_size])
    else:
        costs = [cost(batch.row, model.config) for batch in batches]
        share = [batches[index] for index in spread(costs, world.data_size)[world.data_rank]]
    shortest = min(batches, key=lambda batch: len(batch.row.tokens))
    share += [replace(shortest, idle=True, row=shortest.row.idle())] * (count - len(share))
    return [replace(batch, row=shard_row(batch.row, world)) for batch in share]


def cost(row: PackedRow, shape: ModelConfig) -> int:
    """FLOPs to train on a row: linear in its length, plus attention's, which are quadratic."""
    return training_flops(shape, row.lengths) - training_flops(shape, row.left_out or ())


def spread(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """For each rank, the micro-batches that it computes, turn by turn.

    FSDP's ranks wait for each other in every turn, so the micro-batches of a turn cost about the same: the costliest
    come first. In each turn the rank with the least so far takes the costliest, so that the totals are even too.
    """
    order = sorted(range(len(costs)), key=lambda index: -costs[index])
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for start in range(0, len(order), ranks):
        turn = order[start : start + ranks]
        for share, index in zip(sorted(shares, key=lambda share: sum(costs[number] for number in share)), turn):
            share.append(index)
    return shares


def _count_for_pipeline(model: Pipeline, count: int) -> int:
    """The next number of micro-batches that the pipeline schedule can run. Raises UserError if there is none."""
    for more in range(count, 2 * max(count, model.plan.stages) + 1):
        try:
            model.plan.check_microbatches(more)
        except UserError:
            continue
        return more
    model.plan.check_microbatches(count)
    return count
