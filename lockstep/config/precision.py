"""What the linear layers compute in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.precision import KEEP, Precision


@dataclass
class PrecisionConfig:
    """The number format of the linear layers' factors, for trainer and generator alike."""

    linear: Literal["auto", "none", "int8", "int4", "int4_128"] = "auto"
    """`int8`, or 4-bit weights in groups of 32 (`int4`) or 128 numbers with a common scale; weights are quantized
    whenever they change. `none`: the model's dtype; auto: as the model was trained."""
    keep: tuple[str, ...] = KEEP
    """Patterns of the names of layers that compute in the model's dtype; `layers.first.*` and `layers.last.*` are those
    of the first and the last layer."""

    def of_model(self, trained: Precision) -> Precision:
        """The precision of a model that was trained in `trained`."""
        return trained if self.linear == "auto" else Precision(self.linear, tuple(self.keep))
