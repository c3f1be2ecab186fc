"""The policy's current weights on one rank, or one tensor-parallel group, for sampling and scoring."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.model import Decoder, TrainableModel
from lockstep.parallel import World
from lockstep.rl.weights.transfer import WeightTransfer


class PolicyReplica:
    """A model with the policy's weights that one rank, or one tensor group, runs without the other ranks."""

    def __init__(
        self,
        model: Decoder,
        policy: TrainableModel,
        world: World,
        keep_copy: bool = True,
        moved: Callable[[], None] = lambda: None,
    ):
        """model: as made by `sampling_model`. policy: as trained. keep_copy: as `ActorsConfig`. moved: as
        `WeightTransfer`."""
        self.model = model
        tensors = dict(policy.named_parameters())
        frozen = [name for name, tensor in tensors.items() if not tensor.requires_grad]
        self._transfer = None if model is policy else WeightTransfer(tensors, model, world, moved, keep_copy, frozen)

    def load_weights(self, version: int) -> None:
        """Copies the trainer's current weights. All ranks call it. Raises RunStopped as `Generators` does."""
        if self._transfer:
            self._transfer(version)

    def pause(self, before_drop: Callable[[], None]) -> None:
        """Frees copied weights until `load_weights`, unless they are kept; calls `before_drop` first."""
        if self._transfer and not self._transfer.keep:
            before_drop()
            self._transfer.drop()

    @property
    def model_while_paused(self) -> Decoder | None:
        """As `Generators.policy_while_paused`."""
        return self.model if self._transfer is None or self._transfer.keep else None
