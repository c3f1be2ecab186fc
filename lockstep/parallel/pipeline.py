"""Pipeline parallelism: each rank has some of the layers, and micro-batches pass through all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import ops
from lockstep.config import CompileConfig, ParallelConfig
from lockstep.model import ModelConfig, ScoringModel
from lockstep.model.shard import is_fsdp
from lockstep.parallel.pipeline_schedule import (
    Action,
    PipelinePlan,
    bubble_fraction,
    passes_in_flight,
    split_layers,
    stage_work,
)
from lockstep.parallel.pipeline_stage import Computed, Stage
from lockstep.parallel.tied_embedding import TiedEmbedding
from lockstep.parallel.world import World


class Pipeline(nn.Module):
    """A `TrainableModel` of which this rank has some stages; they are created on the meta device.

    It runs whole steps, on all ranks of the pipeline together, so it has no `forward`.

    dtype: of the hidden states sent from rank to rank. Raises UserError for settings that cannot run.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        world: World,
        parallel: ParallelConfig,
        compiled: CompileConfig,
    ):
        super().__init__()
        self.config = config
        self.compute_dtype = dtype
        self.plan = PipelinePlan(parallel)
        self.plan.check_compile(compiled)
        layers = split_layers(config.num_layers, self.plan.stages, parallel)
        self.work = stage_work(layers, parallel)
        assert world.mesh is not None
        self.group = world.mesh.get_group("pipeline")
        self.world = world
        self.rank = world.coordinate("pipeline")
        indices = [index for index in range(self.plan.stages) if self.plan.rank_of(index) == self.rank]
        # A tuple, so that stages are not submodules: their modules are, under their names in the whole model.
        self.stages = tuple(Stage(config, torch.float32, index, layers) for index in indices)
        self.layers = nn.ModuleList()
        for stage in self.stages:
            for name, child in stage.named_children():
                if name != "layers" and not (name == "embed_tokens" and stage.borrows_embedding):
                    self.add_module(name, child)
            for name, block in stage.layers.named_children():
                self.layers.add_module(name, block)
        self.tied = TiedEmbedding(self.stages, self.plan.rank_of(self.plan.stages - 1), self.group, dtype)
        self.bubble = float("nan")
        """The pipeline bubble of the last step's schedule, computed from its table: the share of time that ranks
        wait."""
        self.passes_in_flight = 1
        """The most forwards of this rank's stages whose activations are alive at once in the last step's schedule."""
        self._schedules: dict[tuple[int, int], tuple[Any, list[Any], float, list[Action]]] = {}
        self._loss_of: Callable[..., Tensor] = _no_loss

    @property
    def device(self) -> torch.device:
        return self.world.device

    def put_extra_parameters(self, extra_parameters: Mapping[str, nn.Parameter]) -> None:
        """Adds parameters of the loss, by name; their gradients are computed on the last stage's rank."""
        for stage in self.stages:
            if stage.is_last:
                stage.extra_parameters = dict(extra_parameters)

    def _reserve_positions(self, length: int) -> None:
        for stage in self.stages:
            stage.reserve_positions(length)

    def accumulate(
        self,
        microbatches: Sequence[Any],
        loss_of: Callable[[ScoringModel, Any], Tensor],
        each: Callable[[Iterable[str]], None] | None = None,
    ) -> list[float]:
        """Accumulates the gradients of all micro-batches; returns their losses on the last stage's rank, elsewhere [].

        microbatches: `PackedRow`s, or objects that have one as `row`; the same on all ranks of the pipeline. `loss_of`
        runs on the last stage; it may call the model once. `each` is called after every micro-batch's backward through
        one of this rank's stages, in the order of the micro-batches, with the names of the stage's parameters,
        including the last stage's extra parameters; if it clears their gradients each time, they are that
        micro-batch's.
        """
        self.tied.lend_weight()
        rows = _equally_long([_row(microbatch) for microbatch in microbatches])
        self._reserve_positions(max((n for row in rows for n in row.lengths), default=0))
        schedule, stages, self.bubble, _ = self._schedule(len(rows), rows[0].tokens.shape[0])
        self._loss_of = loss_of
        losses: list[Tensor] = []
        for stage in stages:
            stage.has_backward = True
            stage.clear_runtime_states()
            stage.each = each
        # Not `step`, which would split one batch evenly: the micro-batches already exist, of whole documents.
        schedule._step_microbatches(
            [(row.tokens,) for row in rows],
            [{"positions": row.positions, "attention": _attention(row)} for row in rows],
            list(microbatches),
            losses,
            return_outputs=False,
        )
        if each is None:
            self.tied.collect_gradient()
        else:
            self.tied.wait()
        return [loss.item() for loss in losses]

    @torch.no_grad()
    def evaluate(
        self,
        microbatches: Iterable[Any],
        loss_of: Callable[[ScoringModel, Any], Tensor],
    ) -> list[float]:
        """As `accumulate`, without gradients: each micro-batch passes through all stages, in order."""
        self.tied.lend_weight()
        losses: list[float] = []
        for microbatch in microbatches:
            row = _row(microbatch)
            self._reserve_positions(max(row.lengths, default=0))
            hidden = row.tokens
            for stage in self.stages:
                if not stage.is_first and self.plan.rank_of(stage.index - 1) != self.rank:
                    hidden = self._hidden(row.tokens.shape[0], self.device)
                    dist.recv(hidden, group=self.group, group_src=self.plan.rank_of(stage.index - 1))
                hidden = stage(hidden, row.positions, _attention(row))
                if stage.is_last:
                    losses.append(loss_of(Computed(stage, hidden), microbatch).item())
                elif self.plan.rank_of(stage.index + 1) != self.rank:
                    dist.send(hidden, group=self.group, group_dst=self.plan.rank_of(stage.index + 1))
        for stage in self.stages:
            for module in stage.modules():
                if is_fsdp(module):
                    # No backward follows, which would free the gathered weights.
                    module.reshard()
        return losses

    def order(self, microbatches: int, tokens: int) -> list[Action]:
        """This rank's actions, in order, in a step of `microbatches` micro-batches of `tokens` tokens."""
        return self._schedule(microbatches, tokens)[3]

    def _schedule(self, count: int, tokens: int) -> tuple[Any, list[Any], float, list[Action]]:
        if (count, tokens) not in self._schedules:
            stages = [self._torch_stage(stage, tokens) for stage in self.stages]
            schedule, table = self.plan.make(stages, count, self._loss)
            self.passes_in_flight = passes_in_flight(table[self.rank])
            bubble = bubble_fraction(table, self.work)
            self._schedules = {(count, tokens): (schedule, stages, bubble, table[self.rank])}
        return self._schedules[count, tokens]

    def _torch_stage(self, stage: Stage, tokens: int) -> Any:
        from lockstep.parallel.torch_stage import TorchStage  # imports torch's compiler: most of a second

        hidden = self._hidden(tokens, "meta").requires_grad_()
        first = torch.empty(tokens, dtype=torch.int64, device="meta")
        return TorchStage(
            self.tied,
            stage,
            stage.index,
            self.plan.stages,
            self.device,
            input_args=first if stage.is_first else hidden,
            output_args=hidden,
            group=self.group,
        )

    def _hidden(self, tokens: int, device: str | torch.device) -> Tensor:
        """A buffer for hidden states."""
        return torch.empty(tokens, self.config.dim, dtype=self.compute_dtype, device=device)

    def _loss(self, hidden: Tensor, microbatch: Any) -> Tensor:
        return self._loss_of(Computed(self.stages[-1], hidden), microbatch)


def _row(microbatch: Any) -> Any:
    return getattr(microbatch, "row", microbatch)


def _equally_long(rows: Sequence[Any]) -> list[Any]:
    """Pads all rows to the same length, since hidden states are sent in buffers of one size."""
    total = max(row.tokens.shape[0] for row in rows)
    padded = []
    for row in rows:
        missing = (0, total - row.tokens.shape[0])
        longer = {name: F.pad(getattr(row, name), missing) for name in ("tokens", "positions", "counts")}
        padded.append(dataclasses.replace(row, **longer))
    return padded


def _attention(row: Any) -> ops.Attention:
    return row.attend()


def _no_loss(*inputs: Any) -> Tensor:
    raise RuntimeError("the loss of a pipeline must be passed with each step")
