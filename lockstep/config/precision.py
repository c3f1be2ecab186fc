"""What the linear layers compute in, and what the cache stores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lockstep.errors import UserError
from lockstep.precision import FLOAT8, KEEP, MODELS_DTYPE, Precision


@dataclass
class PrecisionConfig:
    """The number formats of the linear layers' factors and of the cache, for trainer and generator alike."""

    linear: Literal[
        "auto", "none", "int8", "int4", "int4_128",
        "float8", "float8_rowwise", "float8_rowwise_gw_hp", "mxfp8", "mxfp8_floor",
    ] = "auto"  # fmt: skip
    """`int8`; 4-bit weights in groups of 32 (`int4`) or 128 numbers with a common scale; `mxfp8`: float8 in blocks of
    32; float8 with a scale per row, or per tensor (`float8`: pretrain and sft only). Weights are quantized whenever
    they change. `none`: the model's dtype; auto: as the model was trained."""
    keep: tuple[str, ...] = KEEP
    """Patterns of the names of layers that compute in the model's dtype; `layers.first.*` and `layers.last.*` are those
    of the first and the last layer."""
    cache: Literal["auto", "none", "int8"] = "auto"
    """What keys and values are rounded to, and the generator's cache stores: `int8`, with a power of two as the scale
    per token and head; `none`: the model's dtype; auto: as the model was trained."""

    def of_model(self, trained: Precision, compared: bool) -> Precision:
        """The precision of a model that was trained in `trained`.

        compared: log-probabilities of rows are compared with those of other batches, as in reinforcement. Raises
        UserError if they would differ, and for layers to keep from no precision.
        """
        if self.linear == "auto" and tuple(self.keep) != KEEP:
            raise UserError(
                "precision.keep lists layers that precision.linear leaves in the model's dtype; give precision.linear "
                "too"
            )
        if self.linear == FLOAT8 and compared:
            raise UserError(
                "precision.linear float8 has one scale for all rows of a micro-batch, so log-probabilities would "
                "depend on it; it is for pretrain and sft: use float8_rowwise or mxfp8"
            )
        if self.linear != "auto":
            chosen = Precision(self.linear, tuple(self.keep))
        else:
            chosen = MODELS_DTYPE if trained.linear == FLOAT8 and compared else trained
        return replace(chosen, cache=trained.cache if self.cache == "auto" else self.cache)
