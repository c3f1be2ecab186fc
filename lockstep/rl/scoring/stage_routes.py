"""Routes of a step on a pipeline, where each rank has some of the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor

from lockstep.generate.routes import routes_in
from lockstep.model import TrainableModel
from lockstep.ops.routes import route_dtype
from lockstep.parallel import Pipeline
from lockstep.parallel.pipeline_stage import Stage
from lockstep.parallel.tensor_group import tensor_group_of
from lockstep.rl.rollouts.packing import PolicyBatch
from lockstep.rl.scoring.policy_loss import PolicyLoss
from lockstep.rl.scoring.routes import different_routes, routes_to_replay, trainer_routes


@contextmanager
def routes_on_stages(loss: PolicyLoss, model: TrainableModel, share: Sequence[PolicyBatch]) -> Iterator[None]:
    """For the step of a pipeline with mixtures: replays the generator's routes, or compares them after the step."""
    if not (isinstance(model, Pipeline) and model.config.mixtures and (loss.compare or loss.replay_routes)):
        yield
        return
    rows = max(len(batch.row.tokens) for batch in share)  # a pipeline pads its micro-batches to one length
    try:
        if loss.replay_routes:
            _replay(model, share, rows)
        else:
            for stage in model.stages:
                stage.routes = {}
        yield
        if loss.compare:
            (_count if loss.replay_routes else _compare)(loss, model, share, rows)
    finally:
        for stage in model.stages:
            stage.routes, stage.replayed = None, {}


def _replay(model: Pipeline, share: Sequence[PolicyBatch], rows: int) -> None:
    for stage in model.stages:
        mixtures = [model.config.mixtures.index(layer) for layer in _mixtures(stage)]
        group = tensor_group_of(stage)
        stage.replayed = {
            number: routes_to_replay(batch.rollouts, batch.row, model.config, rows, group, mixtures)
            for number, batch in enumerate(share)
        }


def _count(loss: PolicyLoss, model: Pipeline, share: Sequence[PolicyBatch], rows: int) -> None:
    def of_stage(stage: Stage, number: int) -> Tensor:
        return different_routes(stage.replayed[number], share[number].row, rows, tensor_group_of(stage))[..., None]

    for batch, different in zip(share, _of_all_stages(model, share, 1, of_stage)):
        if loss.of_microbatches and not batch.idle:  # on the last stage's rank
            loss.count_routes(batch, different[..., 0].bool())


def _compare(loss: PolicyLoss, model: Pipeline, share: Sequence[PolicyBatch], rows: int) -> None:
    def of_stage(stage: Stage, number: int) -> Tensor:
        assert stage.routes is not None
        return trainer_routes(stage.routes[number], share[number].row, rows, tensor_group_of(stage))

    assert model.config.experts is not None
    dtype = route_dtype(model.config.experts.count)
    for batch, chosen in zip(share, _of_all_stages(model, share, model.config.experts.routing.active, of_stage)):
        if loss.of_microbatches and not batch.idle:
            loss.parity.compare_routes(batch.rollouts, routes_in(chosen.to(dtype)), model.config, batch.current)


def _of_all_stages(
    model: Pipeline, batches: Sequence[PolicyBatch], width: int, of_stage: Callable[[Stage, int], Tensor]
) -> list[Int[Tensor, "targets mixtures width"]]:
    """Each micro-batch's values for all mixtures, on every rank; of_stage: those for a stage's mixtures."""
    lengths = [batch.weights.numel() for batch in batches]
    whole = torch.zeros(sum(lengths), len(model.config.mixtures), width, dtype=torch.int32, device=model.device)
    for stage in model.stages:
        mixtures = [model.config.mixtures.index(layer) for layer in _mixtures(stage)]
        for number, of_batch in enumerate(whole.split(lengths)):
            if mixtures:
                of_batch[:, mixtures] = of_stage(stage, number).int()
    dist.all_reduce(whole, group=model.group)  # each rank has zeros for the others' layers
    return list(whole.split(lengths))


def _mixtures(stage: Stage) -> list[int]:
    """Its layers that are mixtures, by their numbers in the whole model."""
    return [layer for layer in stage.local_layers if layer in stage.config.mixtures]
