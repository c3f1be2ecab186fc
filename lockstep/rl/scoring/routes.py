"""Routes of a step's tokens: those that the trainer chooses, and the generator's, replayed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Bool, Int
from torch import Tensor

from lockstep import ops
from lockstep.errors import UserError
from lockstep.generate.routes import choices, read_route
from lockstep.generate.sampling_params import RoutesForm
from lockstep.model import ModelConfig
from lockstep.parallel.exchange import gather_rows
from lockstep.rl.rollouts.records import Rollout
from lockstep.train.context import targets_of_others
from lockstep.train.packing import PackedRow


def routes_form(replayed: bool, separate: bool) -> RoutesForm:
    """The form in which a run requests routes: whole if they are replayed, or generators are not separate processes."""
    return "whole" if replayed or not separate else "digest"


def trainer_routes(
    recorded: Sequence[Int[Tensor, "recorded active"]],
    row: PackedRow,
    rows: int,
    tensor_group: dist.ProcessGroup | None,
) -> Int[Tensor, "targets mixtures active"]:
    """The experts of all of a row's targets, those on other context ranks included.

    recorded: what a forward pass over `rows` rows chose, of which each rank of the tensor group has as many.
    """
    local = choices(recorded, slice(None), len(_rows_here(rows, tensor_group)))
    return _of_all_targets(local, row, tensor_group).to(recorded[0].dtype)


def different_routes(
    replayed: ops.ReplayedRoutes, row: PackedRow, rows: int, tensor_group: dist.ProcessGroup | None
) -> Bool[Tensor, "targets mixtures"]:
    """For which of a row's targets the router would have chosen other experts; arguments as for `trainer_routes`."""
    table = torch.zeros(len(_rows_here(rows, tensor_group)), len(replayed.different), dtype=torch.int32)
    table = table.to(row.tokens.device).index_copy(0, replayed.rows, torch.stack(replayed.different, 1).int())
    return _of_all_targets(table, row, tensor_group).bool()


def _rows_here(rows: int, tensor_group: dist.ProcessGroup | None) -> range:
    """Which of `rows` rows this tensor rank has."""
    if tensor_group is None:
        return range(rows)
    count = rows // dist.get_world_size(tensor_group)
    return range(rows)[dist.get_rank(tensor_group) * count :][:count]


def _of_all_targets(local: Tensor, row: PackedRow, tensor_group: dist.ProcessGroup | None) -> Int[Tensor, "targets *"]:
    """The values of all of a row's targets; local: one value for each of this rank's rows."""
    local = local.int()  # not every backend sends 8 or 16 bits
    table = (gather_rows(local, tensor_group) if tensor_group else local)[row.predictors]
    shared = targets_of_others(row)
    return table if shared is None else shared.gather(table)


def routes_to_replay(
    rollouts: Sequence[Rollout],
    row: PackedRow,
    shape: ModelConfig,
    rows: int,
    tensor_group: dist.ProcessGroup | None,
    mixtures: Sequence[int] | None = None,
) -> ops.ReplayedRoutes:
    """The generator's experts for the positions that predict a sampled token; prompt positions choose for themselves.

    Those that this rank of the context and tensor groups has; rows and tensor_group as for `trainer_routes`. mixtures:
    those of this rank, by their place among the model's; None: all.

    Raises UserError as `generator_experts`.
    """
    table = torch.from_numpy(generator_experts(rollouts, shape)).to(row.tokens.device)
    shared = targets_of_others(row)
    table = table if shared is None else shared.own_of(table)
    here = _rows_here(rows, tensor_group)
    is_here = (row.predictors >= here.start) & (row.predictors < here.stop)
    chosen = table[is_here].unbind(1)
    return ops.ReplayedRoutes(
        row.predictors[is_here] - here.start, chosen if mixtures is None else [chosen[number] for number in mixtures]
    )


def require_routes(rollouts: Sequence[Rollout], shape: ModelConfig) -> None:
    """Raises UserError if the routes of a rollout cannot be replayed. Ranks that train call it for all rollouts of a
    step, not only for a rank's share, so that all of them raise."""
    for rollout in rollouts:
        generator_experts([rollout], shape)


def generator_experts(rollouts: Sequence[Rollout], shape: ModelConfig) -> Int[np.ndarray, "tokens mixtures active"]:
    """The experts of all sampled tokens. Raises UserError for a rollout without routes, or with another model's."""
    tables = []
    for rollout in rollouts:
        read = [read_route(route, shape) for route in rollout.routes]
        if len(read) != rollout.num_sampled or any(table is None for table in read):
            raise UserError(
                "router_replay: a rollout lacks routes for all its tokens and layers, because its generator did not "
                "record them; remove router_replay"
            )
        tables += [table for table in read if table is not None]
    whole = np.stack(tables) if tables else np.zeros((0, len(shape.mixtures), 1), np.int64)
    assert shape.experts is not None
    if whole.max(initial=0) >= shape.experts.count or whole.min(initial=0) < 0:
        raise UserError(f"router_replay: a rollout names an expert beyond the model's {shape.experts.count}")
    if (np.diff(np.sort(whole, -1), axis=-1) == 0).any():
        raise UserError("router_replay: a rollout names an expert twice in a layer")
    return whole
