"""A step's micro-batches over the ranks that train: each computes a share, and hears what all have found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.config import RLConfig
from lockstep.errors import UserError
from lockstep.model import TrainableModel
from lockstep.parallel import Pipeline, World
from lockstep.rl.actors.replicas import Replicas
from lockstep.rl.batch import PolicyBatch, PolicyLoss
from lockstep.rl.microbatches import microbatches, shares_prompts
from lockstep.rl.rollouts import Rollout
from lockstep.train.context import shard_row


def token_budget(rollouts: Sequence[Rollout], config: RLConfig, world: World) -> int:
    """Tokens of a micro-batch: as set, or so few that every data-parallel rank gets one, where that can be had.

    With `train.deterministic_layout` as set: micro-batches, and with them the sums over them, must not depend on ranks.
    """
    budget = config.train.tokens_per_microbatch
    if config.train.deterministic_layout or world.data_size == 1:
        return budget
    packed = microbatches(rollouts, budget, shares_prompts(config))
    while len(packed) < world.data_size and budget > 1:
        # A prompt is computed once more in each micro-batch, so an even share of today's rows may not be few enough.
        rows = sum(members.rows for members in packed)
        budget = max(1, min(math.ceil(rows / world.data_size), budget - budget // 8 - 1))
        packed = microbatches(rollouts, budget, shares_prompts(config))
    return budget


def own_batches(batches: Sequence[PolicyBatch], world: World, model: TrainableModel) -> list[PolicyBatch]:
    """Those that this rank computes, cut as its layout cuts rows; as many on every rank, so some may be idle.

    Data-parallel rank r of n has the micro-batches r, n + r and so on.
    """
    count = math.ceil(len(batches) / world.data_size)
    if isinstance(model, Pipeline):
        count = _fitting(model, count)
    own = list(batches[world.data_rank :: world.data_size])
    shortest = min(batches, key=lambda batch: len(batch.row.tokens))
    own += [replace(shortest, idle=True, row=shortest.row.idle())] * (count - len(own))
    return [replace(batch, row=shard_row(batch.row, world)) for batch in own]


def _fitting(model: Pipeline, count: int) -> int:
    """The next number of micro-batches that the pipeline's schedule runs with. Raises UserError where there is none."""
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
    """Makes `loss` and the rollouts of `batches` say what the ranks have found of their shares, on every rank."""
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
            rollout.entropies, rollout.trainer_logprobs = entropies, log_probs


def _plain(loss: PolicyLoss, batches: Sequence[PolicyBatch], own: Sequence[PolicyBatch]) -> dict[str, Any]:
    """JSON-able. A rollout is named by its micro-batch and its place there."""
    places, notes = [], []
    if loss.compare:
        held = {id(rollout) for batch in own if not batch.idle for rollout in batch.rollouts}
        for index, batch in enumerate(batches):
            for number, rollout in enumerate(batch.rollouts):
                if id(rollout) in held:
                    places.append([index, number])
                    notes.append([rollout.entropies, rollout.trainer_logprobs])
    return {
        "found": loss.found,
        "weights": loss.weights,
        "parity": loss.parity.plain(),
        "replay": loss.replay.plain(),
        "places": places,
        "notes": notes,
    }
