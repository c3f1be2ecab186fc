"""One rank of a pipeline running its part of a step alone, on tensors without values, in its schedule's order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lockstep.config import ParallelConfig
from lockstep.model import ScoringModel
from lockstep.observe.collectives import CollectiveLog
from lockstep.parallel import Pipeline, World
from lockstep.parallel.pipeline_schedule import Action
from lockstep.parallel.pipeline_stage import Computed, Stage
from lockstep.train.packing import PackedRow


def simulated_ranks(world: World, parallel: ParallelConfig) -> list[World]:
    """`world` as seen by the ranks of its pipeline that may need the most memory.

    The first has the embedding, and the most micro-batches in flight; the last has the head; the second may have more
    layers than the first.
    """
    if world.mesh is None:
        return [world]
    places = range(parallel.pipeline)
    return [replace(world, simulated_stage=place) for place in sorted({*places[:2], places[-1]})]


class PipelineStep:
    """The work of a rank's stages for `microbatches` micro-batches like `row`, out of `share` in the step."""

    def __init__(
        self,
        model: Pipeline,
        row: PackedRow,
        microbatches: int,
        share: int,
        loss: Callable[[ScoringModel, PackedRow], Tensor],
        log: CollectiveLog,
    ):
        self.stages = {stage.index: stage for stage in model.stages}
        self.row, self.loss, self.log = row, loss, log
        self.work = model.order(microbatches, len(row.tokens))
        shape, dtype = (len(row.tokens), model.config.dim), model.compute_dtype
        self.message = math.prod(shape) * dtype.itemsize

        self.arriving = partial(torch.empty, shape, dtype=dtype)
        # What is in flight, by stage and micro-batch.
        self.hidden: dict[tuple[int, int], Tensor] = {}
        self.gradients: dict[tuple[int, int], Tensor] = {}
        others = set(range(model.plan.stages)) - self.stages.keys()
        # For each stage, the stages on other ranks that it receives from and sends to.
        self.links = {index: others & {index - 1, index + 1} for index in self.stages}
        # A rank with several stages waits for all their sends when the step ends, and keeps the tensors until then.
        self.keeps_sent = model.plan.keeps_sent
        sent = sum(map(len, self.links.values())) if self.keeps_sent else 0
        self.sent = [self.arriving() for _ in range((share - microbatches) * sent)]
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.halves: dict[tuple[int, int], Any] = {}

    def run(self) -> None:
        """Runs all actions in the schedule's order."""
        ends = {action.stage: at for at, action in enumerate(self.work) if action.kind in "BW"}
        for at, action in enumerate(self.work):
            stage = self.stages[action.stage]
            if isinstance(stage, FSDPModule) and action.kind != "F":
                # As in torch's schedules: gradients are summed, and weights freed, after the very last one.
                stage.set_requires_gradient_sync(at == ends[action.stage])
                stage.set_requires_all_reduce(at == ends[action.stage])
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
        name = action.stage, action.microbatch
        if not stage.is_first:
            self.hidden[name] = self.arriving(requires_grad=True)
        hidden = self.row.tokens if stage.is_first else self.hidden[name]
        out = stage(hidden, self.row.positions, self.row.attention or self.row.attend())
        self.outputs[name] = self.loss(Computed(stage, out), self.row) if stage.is_last else out
        self._send(stage, stage.index + 1, out)

    def _backward(self, stage: Stage, action: Action) -> None:
        name = action.stage, action.microbatch
        torch.autograd.backward(self.outputs.pop(name), self._gradient(stage, name))
        self._send(stage, stage.index - 1, self.hidden[name].grad if name in self.hidden else None)
        self._end(name)

    def _for_inputs(self, stage: Stage, action: Action) -> None:
        from torch.distributed.pipelining._backward import stage_backward_input

        name = action.stage, action.microbatch
        gradient = self._gradient(stage, name)
        if stage.is_first:
            self._send(stage, -1, None)
            return
        gradients, inputs = None if gradient is None else [gradient], [self.hidden[name]]
        _, self.halves[name] = stage_backward_input([self.outputs[name]], gradients, inputs, stage.parameters())
        self._send(stage, stage.index - 1, self.hidden[name].grad)
        self.hidden[name].grad = None

    def _for_weights(self, stage: Stage, action: Action) -> None:
        from torch.distributed.pipelining._backward import stage_backward_weight

        name = action.stage, action.microbatch
        if stage.is_first:  # as in torch: without inputs there are no halves
            torch.autograd.backward(self.outputs.pop(name), self._gradient(stage, name))
        else:
            stage_backward_weight(stage.parameters(), self.halves.pop(name))
            del self.outputs[name]
        self._end(name)

    def _gradient(self, stage: Stage, name: tuple[int, int]) -> Tensor | None:
        if stage.is_last:
            return None
        if name not in self.gradients:
            self.gradients[name] = self.arriving()
        return self.gradients[name]

    def _send(self, stage: Stage, to: int, sent: Tensor | None) -> None:
        """Counts what a forward or backward receives and sends; keeps the sent tensor alive if torch does."""
        messages, links = self.log.traffic["pipeline", "send, receive"], self.links[stage.index]
        messages.calls += len(links)
        messages.bytes += len(links) * self.message
        if self.keeps_sent and sent is not None and to in links:
            self.sent.append(sent.detach())

    def _end(self, name: tuple[int, int]) -> None:
        self.hidden.pop(name, None)
        self.gradients.pop(name, None)
