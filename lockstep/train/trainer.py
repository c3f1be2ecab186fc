"""One optimizer step: forward and backward over micro-batches, then clip and update."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lockstep.config import TrainConfig
from lockstep.host_memory import keep_freed_memory
from lockstep.model import ScoringModel, TrainableModel
from lockstep.model.shard import is_fsdp
from lockstep.observe.timeline import Timeline
from lockstep.ops.one_order import one_order, share
from lockstep.parallel import Pipeline, World
from lockstep.parallel.exchange import is_no_subtree
from lockstep.parallel.expert_traffic import TRAFFIC
from lockstep.train.expert_balance import ExpertBalance
from lockstep.train.gradients import ExtraParameters
from lockstep.train.graphs import GraphedModel, can_graph
from lockstep.train.optimizer import MasterOptimizer
from lockstep.train.schedule import make_schedule

MicroBatch = TypeVar("MicroBatch")
PIPELINED = 16
"""Micro-batches that an evaluation sends through a pipeline at a time."""
_COUNTS = ("updates", "skipped_steps", "skipped_in_a_row")


class Trainer:
    """The model, its optimizer and the number of updates. Without a `world`, it trains in this process alone.

    `extra_parameters`: parameters besides the model's that a loss uses, such as a value head's, by name; trained and
    saved with the model's. Every rank has them unsharded, and all ranks see different data.
    """

    def __init__(
        self,
        model: TrainableModel,
        config: TrainConfig,
        total_updates: int,
        world: World | None = None,
        extra_parameters: Mapping[str, nn.Parameter] | None = None,
    ):
        if config.keep_freed_memory and model.device.type == "cpu":
            keep_freed_memory()
        self.model = model
        self.world = world or World(model.device)
        self.config = config
        if config.deterministic_layout:
            _share_rows(model)
        self.total_updates = total_updates
        self.schedule = make_schedule(config, total_updates)
        self.extra_parameters = ExtraParameters(extra_parameters or {}, self.world)
        if isinstance(model, Pipeline):
            model.put_extra_parameters(self.extra_parameters.parameters)
        self.optimizer = MasterOptimizer(model, config, extra_parameters)
        self.sums_every_microbatch = config.deterministic_layout or self.world.sums_every_microbatch(
            model.config.num_parameters
        )
        self._sums_come_last = config.deterministic_layout and is_no_subtree(self.world.data_size)
        self.balance = ExpertBalance(model, config, self.world)
        self._graphed = GraphedModel(model) if can_graph(model, config) else None
        self.updates = 0
        self.skipped_steps = 0
        """Steps whose loss or gradient was not finite, which left the weights unchanged."""
        self.skipped_in_a_row = 0
        self.timeline = Timeline()
        self.poll: Callable[[], None] = lambda: None
        """Called between an evaluation's micro-batches, equally often on all ranks; may raise."""
        shared = self.world.expert * self.world.degrees["tensor"] > 1
        self._shares_experts = model.config.experts is not None and shared

    def step(
        self, microbatches: Iterable[MicroBatch], loss_of: Callable[[ScoringModel, MicroBatch], Tensor]
    ) -> dict[str, float]:
        """Accumulates the gradient of the summed losses, then updates the weights once.

        `loss_of` returns a micro-batch's share of the step's loss: a sum whose weights add up to 1 over the whole step
        and all ranks, so that the split into micro-batches does not matter. Every rank passes the same number of
        micro-batches. A step whose loss or gradient is not finite leaves weights and optimizer unchanged on all ranks,
        and counts as skipped. Raises RunStopped if only the gradient is not finite and updates in the backward have
        already changed weights.
        """
        learning_rate = self.schedule(self.updates)
        microbatches = list(microbatches)
        self.optimizer.begin(learning_rate, len(microbatches))
        self.balance.begin_step(microbatches)
        TRAFFIC.clear()
        with self._order(len(microbatches)):
            loss = self._sum(self.accumulate(microbatches, loss_of))
        with self.timeline.span("optimizer"):
            norms = self.optimizer.gradient_norms(self.world.stage_groups)
            # Both are sums over all ranks, so that every rank decides the same.
            if math.isfinite(loss) and math.isfinite(norms["grad_norm"]):
                self.optimizer.update(learning_rate, norms["grad_norm"])
                self.updates += 1
                self.skipped_in_a_row = 0
            else:
                self.optimizer.skip()
                self.skipped_steps += 1
                self.skipped_in_a_row += 1
        return {
            "loss": loss,
            **norms,
            "learning_rate": learning_rate,
            "skipped_steps": float(self.skipped_steps),
            **self.balance.end_step(updated=self.skipped_in_a_row == 0),
            **(TRAFFIC.take(self.world.gather) if self._shares_experts else {}),
            **({"pipeline/bubble": self.model.bubble} if isinstance(self.model, Pipeline) else {}),
        }

    def accumulate(
        self, microbatches: Sequence[MicroBatch], loss_of: Callable[[ScoringModel, MicroBatch], Tensor]
    ) -> list[float]:
        """Accumulates the gradients of all micro-batches; returns the losses that this rank computed."""
        if isinstance(self.model, Pipeline):
            with self.timeline.span("forward and backward"):
                return self._through_stages(self.model, microbatches, loss_of)
        losses: list[float] = []
        extra_parameters = []
        for index, microbatch in enumerate(microbatches):
            if is_fsdp(self.model):
                last = self.config.deterministic_layout or index == len(microbatches) - 1
                self.model.set_requires_gradient_sync(self.sums_every_microbatch or last)
                self.model.set_requires_all_reduce(last)  # over replicas of the shards: once per step
            with self.timeline.span("forward"):
                share = loss_of(self._graphed or self._scoring_model(), microbatch)
            losses.append(share.item())
            # The backward changes weights: all ranks decide before it whether the step counts.
            if self.config.optimizer_in_backward and not math.isfinite(self._sum(losses)):
                self._reshard()
                return losses
            with self.timeline.span("backward"):
                share.backward()
                # Its graph must end before another is recorded: CUDA would wait for it.
                del share
                if self.config.deterministic_layout:
                    extra_parameters.append(self.extra_parameters.take())
                elif index == len(microbatches) - 1:
                    self.extra_parameters.sum_over_ranks()
                self._end_microbatch(self.optimizer.gradients.parameters, index == len(microbatches) - 1)
        self._add_extra_parameters(extra_parameters)
        return losses

    def _through_stages(
        self,
        model: Pipeline,
        microbatches: Sequence[MicroBatch],
        loss_of: Callable[[ScoringModel, MicroBatch], Tensor],
    ) -> list[float]:
        """`accumulate` for a pipeline. The gradients of the extra parameters, which only the last stage's ranks have,
        are summed over all ranks once the stages have ended."""
        if not self.config.deterministic_layout:
            losses = model.accumulate(microbatches, loss_of)
            self.extra_parameters.sum_over_ranks()
            return losses
        extra_parameters = []
        ended: Counter[tuple[str, ...]] = Counter()

        def end(names: Iterable[str]) -> None:
            names = tuple(names)
            if not self.extra_parameters.parameters.keys().isdisjoint(names):
                extra_parameters.append(self.extra_parameters.take())
            ended[names] += 1
            of_model = [name for name in names if name not in self.extra_parameters.parameters]
            self._end_microbatch(of_model, ended[names] == len(microbatches))

        losses = model.accumulate(microbatches, loss_of, end)
        self._add_extra_parameters(extra_parameters or [self.extra_parameters.take() for _ in microbatches])
        return losses

    def _end_microbatch(self, names: Collection[str], last: bool) -> None:
        """Passes the gradients of these parameters of the model to the optimizer."""
        if self._sums_come_last and not last:  # these are zero, and would be added to the tree
            for name in self.optimizer.gradients.parameters.keys() & names:
                self.optimizer.gradients.parameters[name].grad = None
        self.optimizer.gradients.end_microbatch(names)

    def _add_extra_parameters(self, of_microbatches: Sequence[dict[str, Tensor]]) -> None:
        """Adds up the extra parameters' gradients of a step's micro-batches."""
        if self.extra_parameters.parameters:
            for _ in self.extra_parameters.in_one_order(of_microbatches):
                self.optimizer.gradients.end_microbatch(self.extra_parameters.parameters)

    def _order(self, microbatches: int = 1) -> AbstractContextManager[None]:
        """The order in which gradients and losses are summed."""
        if not self.config.deterministic_layout:
            return nullcontext()
        return one_order(max(self.model.config.reduction_chunks, 1), microbatches)

    def _sum(self, losses: list[float]) -> float:
        """The sum of all ranks' losses."""
        if not self.config.deterministic_layout:
            return self.world.sum([sum(losses)])[0]
        # Ranks that share a micro-batch all have its loss.
        shared = self.world.coordinate("tensor") or self.world.coordinate("context")
        all_losses = [loss for of_rank in self.world.gather([] if shared else losses) for loss in of_rank]
        # Rounded once, so independent of the order; fsum raises for values that are not finite.
        return math.fsum(all_losses) if all(map(math.isfinite, all_losses)) else math.nan

    def _scoring_model(self) -> ScoringModel:
        """The model, for losses to call; not for pipelines, which call the loss."""
        assert isinstance(self.model, ScoringModel)
        return self.model

    @torch.no_grad()
    def evaluate(
        self, microbatches: Iterable[MicroBatch], loss_of: Callable[[ScoringModel, MicroBatch], Tensor]
    ) -> float:
        """The summed losses without gradients; as in `step`, over all ranks, with equally many on each.

        Calls `poll` before each micro-batch (of a pipeline, each PIPELINED), which may raise Interrupted.
        """
        losses: list[float] = []
        with self.timeline.span("validation"), self._order():
            if isinstance(self.model, Pipeline):
                every = iter(microbatches)
                while part := list(islice(every, PIPELINED)):
                    self.poll()
                    losses += self.model.evaluate(part, loss_of)
                return self._sum(losses)
            try:
                for microbatch in microbatches:
                    self.poll()
                    with self.timeline.span("forward"):
                        losses.append(loss_of(self._scoring_model(), microbatch).item())
            finally:
                self._reshard()
        return self._sum(losses)

    @contextmanager
    def evaluating(self, model: TrainableModel) -> Iterator[None]:
        """Within this context, `evaluate` uses another model, with the same layout as the trainer's."""
        trained, self.model = self.model, model
        try:
            yield
        finally:
            self.model = trained

    def _reshard(self) -> None:
        """Frees gathered weights after a forward without a backward."""
        for module in self.model.modules():
            if is_fsdp(module):
                module.reshard()

    @property
    def recorded_sizes(self) -> int:
        """The number of micro-batch sizes that are replayed from CUDA graphs."""
        return len(self._graphed.recorded) if self._graphed else 0

    def counts(self) -> dict[str, Any]:
        """What a checkpoint includes besides the tensors; JSON-serializable."""
        return {name: getattr(self, name) for name in _COUNTS} | self.balance.state()

    def load_counts(self, counts: Mapping[str, Any]) -> None:
        """The inverse of `counts`. Raises, changing nothing, if one is missing or not a number."""
        values = {name: int(counts[name]) for name in _COUNTS}
        self.balance.restore(counts)
        for name, count in values.items():
            setattr(self, name, count)


def _share_rows(model: TrainableModel) -> None:
    """Makes every forward of `model` record, for the gradient sums, which ranks have the rest of its tokens and
    targets."""

    if isinstance(model, Pipeline):
        return  # its ranks share no tokens: `config.validation` refuses pipelines with context parallelism

    def record(model: nn.Module, arguments: tuple[Any, ...]) -> None:
        attention = arguments[2]
        share(*(getattr(attention, name, None) for name in ("shared_tokens", "shared_targets")))

    assert isinstance(model, nn.Module)
    model.register_forward_pre_hook(record)
