"""The options of `lockstep convert`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from lockstep.config.precision import PrecisionConfig


@dataclass
class ConvertOptions:
    """Write a model as a Hugging Face folder."""

    source: str
    """Hugging Face folder, a run's folder (its newest checkpoint), or Meta's params.json and consolidated.*.pth."""
    target: str
    """New folder to write."""
    dtype: Annotated[str, "dtype"] = "auto"
    """`bfloat16` or `float32`; auto or empty: as in the source."""
    merge: bool = False
    """For an adapter: add its updates to its base's weights, in float32, rounded once."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Quantizes the linear layers' weights in the folder, which is opened in this precision by default. With auto they
    are not quantized."""
