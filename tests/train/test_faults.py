"""What a run does when something goes wrong: bad numbers, spikes, signals, ranks that stop."""

from functools import partial

import pytest
import torch

from lockstep.config import CompileConfig, ParallelConfig, TrainConfig
from lockstep.model import initialize, preset
from lockstep.parallel import close_world, open_world, parallel_model
from lockstep.train import Trainer, pack
from lockstep.train.pretrain import NextTokenLoss
from tests.parallel.launch import launch


def _skip(dtype, poison, poisoned_rank):
    """A good step, a bad one, a good one; and the same without the bad one."""
    parallel = ParallelConfig()
    world = open_world(parallel, "cpu")
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    good = NextTokenLoss(20 * world.size)
    row = pack([list(range(1 + world.rank, 22 + world.rank))])

    def bad(model, row):
        loss = good(model, row)
        if world.rank != poisoned_rank:
            return loss
        # An infinite gradient under a finite loss: that of a square root at 0.
        return loss * float("nan") if poison == "loss" else loss + ((loss - loss.detach()) * 0).sqrt()

    def tensors():
        held = [*trainer.optimizer.state_tensors().values(), *trainer.model.parameters()]
        return [(t.to_local() if hasattr(t, "to_local") else t).detach().clone() for t in held]

    ends = []
    for losses in ((good, bad, good), (good, good)):
        fill = partial(initialize, seed=0)
        model = parallel_model(preset("qwen3:micro"), kind, world, parallel, CompileConfig(), fill)
        trainer = Trainer(model, TrainConfig(warmup_steps=0), 3, world)
        for loss in losses:
            before = tensors()
            metrics = trainer.step([row], loss)
            if loss is bad:
                assert metrics["skipped_steps"] == 1 and trainer.updates == 1
                assert all(torch.equal(a, b) for a, b in zip(before, tensors(), strict=True))
        ends.append((metrics, tensors()))
    close_world(world)
    return ends


@pytest.mark.parametrize("poison", ["loss", "gradient"])
@pytest.mark.parametrize("ranks, dtype", [(1, "float32"), (1, "bfloat16"), (2, "float32")])
def test_a_step_that_is_not_finite_changes_no_bit_on_any_rank(ranks, dtype, poison):
    for (skipped, after), (never, expected) in launch(ranks, _skip, dtype, poison, ranks - 1):
        assert skipped["skipped_steps"] == 1 and never["skipped_steps"] == 0
        assert skipped["loss"] == never["loss"] and skipped["grad_norm"] == never["grad_norm"]
        assert all(torch.equal(a, b) for a, b in zip(after, expected, strict=True))
