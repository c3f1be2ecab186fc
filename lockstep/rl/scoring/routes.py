"""Routes of a step's tokens: those that the trainer chooses, and the generator's, replayed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lockstep import ops
from lockstep.config import RLConfig
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


def refuse_replay_without_experts(config: RLConfig, shape: ModelConfig) -> None:
    """Raises UserError if `rl.router_replay` has nothing to replay."""
    if config.router_replay and not shape.mixtures:
        raise UserError(f"router_replay is set, but {config.model} has no experts and hence no routes; remove it")


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


@dataclass
class RouteReplayStatistics:
    """The effect of replaying routes so far."""

    routes: int = 0
    """One per token and mixture."""
    different: int = 0
    """Those that the trainer's router would have chosen differently, with the layers before it replayed."""
    tokens: int = 0
    squares: float = 0.0
    """Sum over `tokens` of (ratio − 1)², p of the trainer over p of the generator."""
    squares_without: float = 0.0
    """The same without replay."""

    def count(self, different: Bool[Tensor, "targets mixtures"], comparable: Bool[Tensor, "targets"] | None) -> None:
        """Adds a micro-batch's routes."""
        different = different if comparable is None else different[comparable]
        self.routes += different.numel()
        self.different += int(different.sum())

    def measure(
        self,
        generator: Float[Tensor, "targets"],
        trainer: Float[Tensor, "targets"],
        without: Float[Tensor, "targets"],
        comparable: Bool[Tensor, "targets"] | None,
    ) -> None:
        """Adds a micro-batch's log-probabilities; without: the trainer's without replay."""
        compared = torch.ones_like(generator, dtype=torch.bool) if comparable is None else comparable
        self.tokens += int(compared.sum())
        self.squares += _squares(trainer.detach() - generator, compared)
        self.squares_without += _squares(without - generator, compared)

    def plain(self) -> dict[str, Any]:
        """JSON-able, for `combine`."""
        return dataclasses.asdict(self)

    def combine(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Takes the combined result of several ranks. The ratio is the first rank's, which has the step's first
        micro-batch: what it is measured on must not depend on the number of ranks."""
        for name in ("routes", "different"):
            setattr(self, name, sum(part[name] for part in parts))
        for name in ("tokens", "squares", "squares_without"):
            setattr(self, name, parts[0][name])

    def metrics(self) -> dict[str, float]:
        """The fraction of routes that differ, and the ratio's RMS distance from 1; empty without replay."""
        if not self.routes:
            return {}
        tokens = max(self.tokens, 1)
        return {
            "routes/different": self.different / self.routes,
            "routes/ratio_rms": math.sqrt(self.squares / tokens),
            "routes/ratio_rms_without": math.sqrt(self.squares_without / tokens),
        }


def _squares(log_ratios: Tensor, compared: Tensor) -> float:
    return float((log_ratios.double()[compared].exp() - 1).square().sum())
