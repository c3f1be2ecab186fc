"""A stage as torch's schedules run it, which can hand out each micro-batch's gradient by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from lockstep.errors import UserError
from lockstep.parallel.pipeline_stage import Stage
from lockstep.parallel.tied_embedding import TiedEmbedding


class TorchStage(PipelineStage):
    """After every micro-batch's backward it calls `each`, where there is one, with the names of its parameters."""

    def __init__(self, tied: TiedEmbedding, stage: Stage, *arguments: Any, **named: Any):
        super().__init__(stage, *arguments, **named)
        self.stage, self.tied = stage, tied
        self.each: Callable[[Iterable[str]], None] | None = None
        self._ended = 0

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self._ended = 0

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *arguments, **named)
        if named.get("full_backward", True):
            self._end(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, *arguments, **named)
        self._end(bwd_chunk_id)

    def _end(self, microbatch: int) -> None:
        if self.each is None:
            return
        if microbatch != self._ended:
            raise UserError(
                f"parallel.pipeline_schedule runs micro-batch {microbatch} backward through stage {self.stage.index} "
                f"before {self._ended}, but train.deterministic_layout sums gradients in the micro-batches' order; "
                "order each stage's backwards so, or switch it off"
            )
        self._ended += 1
        if isinstance(self.stage, FSDPModule):
            # First all gradients become float32, as those of a backward in two halves are not yet.
            self._reduce(sync=False)
            self._reduce(sync=True)
            self.stage.set_is_last_backward(False)
            self.stage.set_requires_gradient_sync(False)
        self.tied.join_gradient(self.stage)
        # By name, for while weights are gathered the stage shows others than the sharded parameters.
        names = [name for name, _ in self.stage.named_parameters()]
        self.each([n for n in names if not (self.stage.borrows_embedding and n == "embed_tokens.weight")])

    def _reduce(self, sync: bool) -> None:
        """What torch does after a step's last backward, but gathered weights stay: other micro-batches need them."""
        stage = self.stage
        assert isinstance(stage, FSDPModule)
        kept = ["set_reshard_after_backward"] + ([] if sync else ["set_requires_gradient_sync"])
        for setting in kept:
            setattr(stage, setting, lambda *_: None)
        try:
            self.perform_reduce_grad(1)
        finally:
            for setting in kept:
                delattr(stage, setting)
