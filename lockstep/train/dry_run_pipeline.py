"""A pipeline's rank through its part of a step, on tensors without values: in its schedule's order, alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lockstep.config import ParallelConfig
from lockstep.model import ScoringModel
from lockstep.observe.collectives import CollectiveLog
from lockstep.parallel import Pipeline, World
from lockstep.parallel.data import set_gradient_sums
from lockstep.parallel.pipeline_schedule import Action
from lockstep.parallel.pipeline_stage import Computed, Stage
from lockstep.train.packing import PackedRow


def imagined_ranks(world: World, parallel: ParallelConfig) -> list[World]:
    """`world` as those ranks of its pipeline see it of which one needs most.

    The first has the embedding, and the most micro-batches under way; the last has the head; the second may have more
    layers than the first. A schedule from a file may favour any.
    """
    if world.mesh is None:
        return [world]
    places = range(parallel.pipeline)
    some = places if parallel.pipeline_schedule.endswith(".csv") else sorted({*places[:2], places[-1]})
    return [replace(world, imagined_place=place) for place in some]


class PipelineStep:
    """The work of a rank's stages for `microbatches` micro-batches like `row`."""

    def __init__(
        self,
        model: Pipeline,
        row: PackedRow,
        microbatches: int,
        loss: Callable[[ScoringModel, PackedRow], Tensor],
        log: CollectiveLog,
    ):
        self.stages = {stage.index: stage for stage in model.stages}
        self.row, self.loss, self.log = row, loss, log
        self.work = model.order(microbatches, len(row.tokens))
        shape, dtype = (len(row.tokens), model.config.dim), model.compute_dtype
        self.message = math.prod(shape) * dtype.itemsize

        def arriving() -> list[Tensor]:
            return [torch.empty(shape, dtype=dtype, requires_grad=True) for _ in range(microbatches)]

        # torch makes room for what arrives of all micro-batches when a step begins.
        self.hidden = {index: [] if stage.is_first else arriving() for index, stage in self.stages.items()}
        self.gradients = {index: [] if stage.is_last else arriving() for index, stage in self.stages.items()}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.halves: dict[tuple[int, int], Any] = {}

    def run(self) -> None:
        """All of it."""
        ends = {action.stage: at for at, action in enumerate(self.work) if action.kind in "BW"}
        for at, action in enumerate(self.work):
            stage = self.stages[action.stage]
            if isinstance(stage, FSDPModule) and action.kind != "F":
                # As torch's schedules do: gradients are summed, and weights let go, after the last of all.
                set_gradient_sums(stage, False, last=at == ends[action.stage])
                stage.set_reshard_after_backward(at == ends[action.stage])
            if action.kind == "F":
                self._forward(stage, action)
            elif action.kind == "B":
                self._backward(stage, action)
            elif action.kind == "I":
                self._for_inputs(stage, action)
            else:
                self._for_weights(stage, action)

    def _forward(self, stage: Stage, action: Action) -> None:
        hidden = self.row.tokens if stage.is_first else self.hidden[stage.index][action.microbatch]
        out = stage(hidden, self.row.positions, self.row.attention or self.row.attend())
        end = self.loss(Computed(stage, out), self.row) if stage.is_last else out
        self.outputs[action.stage, action.microbatch] = end
        self._sent(stage)

    def _backward(self, stage: Stage, action: Action) -> None:
        out = self.outputs.pop((action.stage, action.microbatch))
        torch.autograd.backward(out, None if stage.is_last else self.gradients[stage.index][action.microbatch].detach())
        self._forget_gradient(stage, action)
        self._sent(stage)

    def _for_inputs(self, stage: Stage, action: Action) -> None:
        from torch.distributed.pipelining._backward import stage_backward_input

        self._sent(stage)
        if stage.is_first:
            return
        out = self.outputs[action.stage, action.microbatch]
        given = None if stage.is_last else [self.gradients[stage.index][action.microbatch].detach()]
        inputs = [self.hidden[stage.index][action.microbatch]]
        _, self.halves[action.stage, action.microbatch] = stage_backward_input([out], given, inputs, stage.parameters())
        self._forget_gradient(stage, action)

    def _for_weights(self, stage: Stage, action: Action) -> None:
        from torch.distributed.pipelining._backward import stage_backward_weight

        if stage.is_first:  # as torch has it: without inputs there are no halves
            out = self.outputs.pop((action.stage, action.microbatch))
            torch.autograd.backward(out, self.gradients[stage.index][action.microbatch].detach())
            return
        stage_backward_weight(stage.parameters(), self.halves.pop((action.stage, action.microbatch)))
        del self.outputs[action.stage, action.microbatch]

    def _forget_gradient(self, stage: Stage, action: Action) -> None:
        if not stage.is_first:
            self.hidden[stage.index][action.microbatch].grad = None

    def _sent(self, stage: Stage) -> None:
        """Notes what a forward receives and sends, and a backward the other way."""
        messages, ways = self.log.traffic["pipeline", "send, receive"], (not stage.is_first) + (not stage.is_last)
        messages.calls += ways
        messages.bytes += ways * self.message
