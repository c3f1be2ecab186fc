"""A step's micro-batches over the ranks that train: each computes a share, and gets the results of all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.config import RLConfig
from lockstep.errors import UserError
from lockstep.model import ModelConfig, TrainableModel
from lockstep.observe import training_flops
from lockstep.parallel import Pipeline, World
from lockstep.rl.rollouts.microbatches import microbatches, shares_prompts
from lockstep.rl.rollouts.packing import PolicyBatch, PolicyLoss
from lockstep.rl.rollouts.records import Rollout
from lockstep.rl.rollouts.replicas import Replicas
from lockstep.rl.scoring.routes import generators_choices
from lockstep.train.context import shard_row
from lockstep.train.packing import PackedRow


def token_budget(rollouts: Sequence[Rollout], config: RLConfig, world: World) -> int:
    """Tokens per micro-batch: the fewest that do not add a turn, in which every data-parallel rank computes one.

    Micro-batches are then about equal, and as many as the turns have room for, if completions can be divided so: the
    search is MULTIFIT (Coffman, Garey and Johnson, 1978). With `train.deterministic_layout`, as configured:
    micro-batches, and with them the sums over them, must not depend on the ranks.
    """
    most = config.train.tokens_per_microbatch
    if config.train.deterministic_layout or world.data_size == 1:
        return most
    packed = microbatches(rollouts, most, shares_prompts(config))
    room = math.ceil(len(packed) / world.data_size) * world.data_size
    too_few = max(0, sum(plan.rows for plan in packed) // room - 1)
    # To a hundredth: each try packs all rollouts.
    while most - too_few > max(1, most // 100):
        tried = (most + too_few) // 2
        if len(microbatches(rollouts, tried, shares_prompts(config))) <= room:
            most = tried
        else:
            too_few = tried
    return most


def own_batches(
    batches: Sequence[PolicyBatch], config: RLConfig, world: World, model: TrainableModel
) -> list[PolicyBatch]:
    """Those that this rank computes, with rows sharded by its layout; equally many on every rank, so some may be idle.

    With `train.deterministic_layout` data-parallel rank r of n has the micro-batches r, n + r and so on; without it,
    those that `spread` assigns. Raises UserError, on every rank, for routes that some rank could not replay.
    """
    if config.router_replay:
        for batch in batches:
            generators_choices(batch.rollouts, model.config)
    count = math.ceil(len(batches) / world.data_size)
    if isinstance(model, Pipeline):
        count = _fitting(model, count)
    if config.train.deterministic_layout or world.data_size == 1:
        own = list(batches[world.data_rank :: world.data_size])
    else:
        costs = [cost(batch.row, model.config) for batch in batches]
        own = [batches[index] for index in spread(costs, world.data_size)[world.data_rank]]
    shortest = min(batches, key=lambda batch: len(batch.row.tokens))
    own += [replace(shortest, idle=True, row=shortest.row.idle())] * (count - len(own))
    return [replace(batch, row=shard_row(batch.row, world)) for batch in own]


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
        for share, index in zip(sorted(shares, key=lambda share: sum(costs[own] for own in share)), turn):
            share.append(index)
    return shares


def _fitting(model: Pipeline, count: int) -> int:
    """The next number of micro-batches that the pipeline schedule can run. Raises UserError if there is none."""
    for more in range(count, 2 * max(count, model.plan.stages) + 1):
        try:
            model.plan.check_microbatches(more)
        except UserError:
            continue
        return more
    model.plan.check_microbatches(count)
    return count


def share_findings(
    loss: PolicyLoss, batches: Sequence[PolicyBatch], own: Sequence[PolicyBatch], all_of: Replicas
) -> None:
    """Merges what the ranks found for their shares into `loss` and the rollouts of `batches`, on every rank."""
    world = all_of.world
    if world.mesh is None:
        return
    speaks = not (world.coordinate("tensor") or world.coordinate("context"))
    found = [_plain(loss, batches, own)] if speaks and loss.found else []
    everyone = [of_rank for ranks in all_of.gather(found) for of_rank in ranks]
    loss.found = {name: [v for each in everyone for v in each["found"][name]] for name in everyone[0]["found"]}
    loss.weights = [weight for each in everyone for weight in each["weights"]]
    loss.parity.take([each["parity"] for each in everyone])
    loss.replay.take([each["replay"] for each in everyone])
    for each in everyone:
        for (batch, number), (entropies, log_probs) in zip(each["places"], each["notes"]):
            rollout = batches[batch].rollouts[number]
            rollout.scores.entropies, rollout.scores.trainer_logprobs = entropies, log_probs


def _plain(loss: PolicyLoss, batches: Sequence[PolicyBatch], own: Sequence[PolicyBatch]) -> dict[str, Any]:
    """JSON-able. A rollout is identified by its micro-batch and its index there."""
    places, notes = [], []
    if loss.compare:
        held = {id(rollout) for batch in own if not batch.idle for rollout in batch.rollouts}
        for index, batch in enumerate(batches):
            for number, rollout in enumerate(batch.rollouts):
                if id(rollout) in held:
                    places.append([index, number])
                    notes.append([rollout.scores.entropies, rollout.scores.trainer_logprobs])
    return {
        "found": loss.found,
        "weights": loss.weights,
        "parity": loss.parity.plain(),
        "replay": loss.replay.plain(),
        "places": places,
        "notes": notes,
    }
