"""Routes of a step's tokens: those chosen by the trainer's own forward pass, and the generator's, replayed."""

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
from lockstep.rl.rollouts import Rollout
from lockstep.train.context import targets_of_others
from lockstep.train.packing import PackedRow


def routes_form(config: RLConfig) -> RoutesForm:
    """The form in which a run requests routes: whole if they are replayed, or if they need not be sent anywhere."""
    return "whole" if config.router_replay or not config.actors.separate else "digest"


def refuse_replay_without_experts(config: RLConfig, shape: ModelConfig) -> None:
    """Raises UserError if `rl.router_replay` has nothing to replay."""
    if config.router_replay and not shape.mixtures:
        raise UserError(f"router_replay is set, but {config.model} has no experts and hence no routes; remove it")


def own_routes(
    recorded: Sequence[Int[Tensor, "recorded active"]],
    row: PackedRow,
    rows: int,
    tensor_group: dist.ProcessGroup | None,
) -> Int[Tensor, "targets mixtures active"]:
    """The experts of all of a row's targets, those on other context ranks included.

    recorded: what a forward pass over `rows` rows chose, of which each rank of the tensor group has as many.
    """
    ranks = dist.get_world_size(tensor_group) if tensor_group else 1
    # Not every backend sends 8 or 16 bits.
    own = choices(recorded, slice(None), rows // ranks).int()
    table = (gather_rows(own, tensor_group) if tensor_group else own)[row.predictors]
    shared = targets_of_others(row)
    return (table if shared is None else shared.gather(table)).to(recorded[0].dtype)


def routes_to_replay(rollouts: Sequence[Rollout], row: PackedRow, shape: ModelConfig) -> ops.ReplayedRoutes:
    """The generator's experts for the positions that predict a sampled token; prompt positions choose their own.

    Raises UserError for a rollout without routes, or with those of another model.
    """
    tables = []
    for rollout in rollouts:
        read = [read_route(route, shape) for route in rollout.routes]
        if len(read) != rollout.num_sampled or any(table is None for table in read):
            raise UserError(
                "router_replay: a rollout lacks routes for all its tokens and layers, because whoever sampled it did "
                "not record them; remove router_replay"
            )
        tables += [table for table in read if table is not None]
    whole = np.stack(tables) if tables else np.zeros((0, len(shape.mixtures), 1), np.int64)
    assert shape.experts is not None
    if whole.max(initial=0) >= shape.experts.count or whole.min(initial=0) < 0:
        raise UserError(f"router_replay: a rollout names an expert beyond the model's {shape.experts.count}")
    if (np.diff(np.sort(whole, -1), axis=-1) == 0).any():
        raise UserError("router_replay: a rollout names an expert twice in a layer")
    return ops.ReplayedRoutes(row.predictors, list(torch.from_numpy(whole).to(row.tokens.device).unbind(1)))


@dataclass
class ReplayFindings:
    """What replaying routes has changed so far."""

    routes: int = 0
    """One per token and mixture."""
    different: int = 0
    """Those that the trainer's router would have chosen differently, with the layers before it replayed."""
    tokens: int = 0
    squares: float = 0.0
    """Sum over `tokens` of (ratio − 1)², p of the trainer over p of the generator."""
    squares_without: float = 0.0
    """The same without replay."""

    def measure(
        self,
        replayed: ops.ReplayedRoutes,
        generator: Float[Tensor, "targets"],
        trainer: Float[Tensor, "targets"],
        without: Float[Tensor, "targets"] | None,
        comparable: Bool[Tensor, "targets"] | None,
    ) -> None:
        """Adds a micro-batch; without: the trainer's values without replay, if those were computed too."""
        kept = torch.ones_like(generator, dtype=torch.bool) if comparable is None else comparable
        self.routes += int(kept.sum()) * len(replayed.different)
        self.different += sum(int((different & kept).sum()) for different in replayed.different)
        if without is not None:
            self.tokens += int(kept.sum())
            self.squares += _squares(trainer.detach() - generator, kept)
            self.squares_without += _squares(without - generator, kept)

    def plain(self) -> dict[str, Any]:
        """JSON-able, for `take`."""
        return dataclasses.asdict(self)

    def take(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Takes over the combined result of several ranks."""
        for name in self.plain():
            setattr(self, name, math.fsum(part[name] for part in parts))

    def metrics(self) -> dict[str, float]:
        """The fraction of routes that differ, and the ratio's RMS distance from 1; empty without replay."""
        if not self.routes:
            return {}
        tokens = max(self.tokens, 1)
        return {
            "routes/different": self.different / self.routes,
            "routes/ratio_spread": math.sqrt(self.squares / tokens),
            "routes/ratio_spread_without": math.sqrt(self.squares_without / tokens),
        }


def _squares(log_ratios: Tensor, kept: Tensor) -> float:
    return float((log_ratios.double()[kept].exp() - 1).square().sum())
