"""Every parameter as a DTensor on one mesh: data, context and tensor parallelism by placements alone.

Weights are sharded over all axes. Operators redistribute them to be unsharded on the axes whose ranks see different
tokens: an all-gather, whose backward is a reduce-scatter of the gradients. FSDP does the same with hooks.
"""

from __future__ import annotations

from torch.distributed.tensor import Placement

from lockstep.model import Decoder
from lockstep.parallel.placements import COPY, WEIGHTS_ON_DATA
from lockstep.parallel.tensor import distribute_parameters
from lockstep.parallel.world import World

AXES = ("data_replicate", "data_shard", "context", "tensor")


def distribute_everything(model: Decoder, world: World) -> None:
    """Makes every parameter of `model`, on the meta device, a DTensor on the mesh of all axes with several ranks."""
    assert world.mesh is not None
    axes = [axis for axis in AXES if world.degrees[axis] > 1]

    def placements(on_tensor: Placement) -> list[Placement]:
        everywhere = {"data_replicate": COPY, "tensor": on_tensor}
        return [everywhere.get(axis, WEIGHTS_ON_DATA[on_tensor]) for axis in axes]

    distribute_parameters(model, world.mesh[tuple(axes)], placements)
