"""The load of a mixture's experts over a step: counting, balancing and reporting it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.config import TrainConfig
from lockstep.model import ModelConfig, TrainableModel
from lockstep.model.moe import Router
from lockstep.model.shard import local_values
from lockstep.observe import append_step, log
from lockstep.parallel import World
from lockstep.parallel.world import AXES

DEAD_STEPS = 20
"""Consecutive steps without a single token after which an expert counts as dead."""


class ExpertBalance:
    """The routers of this rank's layers, and the load of all layers' experts. Does nothing in a dense model."""

    def __init__(self, model: TrainableModel, config: TrainConfig, world: World):
        self.world, self.bias_rate = world, config.router_bias_rate
        layers = {id(p): int(name.split(".")[1]) for name, p in model.named_parameters() if name.startswith("layers.")}
        self.routers = {layers[id(m.weight)]: m for m in model.modules() if isinstance(m, Router)}
        experts = model.config.experts
        self.load = torch.zeros(model.config.num_layers, experts.count if experts else 0, dtype=torch.int64)
        """How often each layer's experts were chosen in the last step, over all ranks; zeros for a dense layer."""
        self.idle_steps = torch.zeros_like(self.load)
        self.mixtures = model.config.mixtures
        for router in self.routers.values():
            router.load.auxiliary, router.load.z = config.router_auxiliary, config.router_z
            router.load.part = (world.coordinate("tensor"), world.degrees["tensor"])
        self.penalised = bool(config.router_auxiliary or config.router_z)

    def begin_step(self, microbatches: Sequence[Any]) -> None:
        """Call before a step's first forward: gives every rank the number of all micro-batches' tokens."""
        for router in self.routers.values():
            router.load.counted.zero_()  # from a backward outside of a step, such as the comparison of compiled layers
        if not self.penalised:
            return
        # The ranks of a pipeline and of a tensor axis have the same micro-batches.
        first = self.world.coordinate("pipeline") == 0
        local = sum(int(getattr(each, "row", each).counts.sum()) for each in microbatches) if first else 0
        tokens = int(self.world.sum([local])[0])
        for router in self.routers.values():
            router.load.tokens = tokens

    def end_step(self, updated: bool) -> dict[str, float]:
        """Call after a step's last backward: gives every rank the load, and changes biases if `updated`."""
        if not self.mixtures:
            return {}
        local = torch.zeros_like(self.load)
        for layer, router in self.routers.items():
            local[layer] = router.load.counted
        total = torch.tensor(self.world.sum(local.flatten().tolist(), AXES)).view_as(local).long()
        self._take(total)
        if updated and self.bias_rate:
            for layer, router in self.routers.items():
                assert router.e_score_correction_bias is not None
                bias = local_values(router.e_score_correction_bias)
                bias.add_(self.bias_rate * moved(total[layer]).to(bias))
        return self._metrics()

    def _take(self, total: Tensor) -> None:
        self.load = total
        for layer, router in self.routers.items():
            router.load.end_step(total[layer])

    def _metrics(self) -> dict[str, float]:
        """The imbalance of the most unbalanced layer, and how many experts of all layers are dead.

        Layers that no gradient reaches are not included.
        """
        counted = [layer for layer in self.mixtures if self.load[layer].any()]
        if not counted:
            return {}
        load = self.load[counted].double()
        uneven = load.amax(-1) / load.mean(-1)
        idle = torch.where(load == 0, self.idle_steps[counted] + 1, 0)
        newly = (idle == DEAD_STEPS).nonzero().tolist()
        self.idle_steps[counted] = idle
        if newly and self.world.is_main:
            layer, expert = counted[newly[0][0]], newly[0][1]
            log.warning(
                "alarm dead_experts: expert %d of layer %d (and %d others) got no token for %d steps; raise "
                "train.router_auxiliary",
                expert, layer, len(newly) - 1, DEAD_STEPS,
            )  # fmt: skip
        dead = int((idle >= DEAD_STEPS).sum())
        metrics = {"experts/load_max": float(uneven.max()), "experts/load_mean": float(uneven.mean())}
        return metrics | {"experts/dead": float(dead)} | ({"alarm/dead_experts": 1.0} if dead else {})

    def write(self, file: Path, step: int) -> None:
        """Appends the step's load, a list per layer, to `file`. Raises RunStopped if it cannot be written."""
        if self.mixtures:
            self.world.on_main(partial(append_step, file, step, {"load": self.load.tolist()}))

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, JSON-serializable; empty for a dense model."""
        return {"expert_load": self.load.tolist(), "expert_idle": self.idle_steps.tolist()} if self.mixtures else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        if self.mixtures:
            load, idle = (torch.tensor(state[name], dtype=torch.int64) for name in ("expert_load", "expert_idle"))
            if load.shape != self.load.shape or idle.shape != self.load.shape:
                raise ValueError(f"expert_load is {list(load.shape)}, but the model has {list(self.load.shape)}")
            self.idle_steps = idle
            self._take(load)


def balance_problems(config: TrainConfig, shape: ModelConfig) -> Iterator[str]:
    """A message for each setting that balances experts, or their biases, that the model does not have or train."""
    if config.router_bias_rate and not (shape.experts and shape.experts.choice_bias):
        yield (
            "train.router_bias_rate changes the routers' choice biases, which this model does not have; set "
            "train.router_auxiliary instead"
        )
    if config.router_bias_rate and shape.lora is not None:
        yield "train.router_bias_rate changes weights of the base model, which an adapter leaves unchanged; remove it"
    if (config.router_auxiliary or config.router_z) and shape.experts is None:
        yield "train.router_auxiliary and train.router_z are for mixtures of experts; the model is dense"


def moved(load: Tensor) -> Tensor:
    """+1 for an expert below the mean load, -1 for one above it (arXiv 2408.15664)."""
    return torch.sign(load.double().mean() - load)
