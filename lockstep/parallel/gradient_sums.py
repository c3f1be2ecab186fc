"""When ranks that see different data sum their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.parallel.world import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

WHOLE_GRADIENT_SHARE = 4
"""An unsharded gradient of at most this fraction (1/N) of a rank's memory is kept until the end of a step."""


def sums_every_microbatch(parameters: int, world: World) -> bool:
    """Whether ranks sum the gradients of so many parameters after every micro-batch, and each keeps only its shard.

    Otherwise they do once per step: fewer messages, but until then every rank has the unsharded float32 gradient of its
    tensor part.
    """
    if world.degrees["data_shard"] * world.degrees["context"] == 1 or world.degrees["pipeline"] > 1:
        return False  # nothing is sharded, or the pipeline's schedule sums at its end
    if world.reduce_gradients != "auto":
        return world.reduce_gradients == "microbatch"
    return 4 * parameters / world.degrees["tensor"] > world.memory / WHOLE_GRADIENT_SHARE


def set_gradient_sums(model: FSDPModule, every: bool, last: bool) -> None:
    """Call before a micro-batch's forward: sets whether its backward sums gradients over ranks.

    They are summed if `every` is set or it is the `last` of a step. Replicas of the shards exchange sums once per step
    in any case, except more than two on CPUs, which exchange them together with the shards.
    """
    model.set_requires_gradient_sync(every or last)
    model.set_requires_all_reduce(last)
