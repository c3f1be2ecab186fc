"""The low-rank adapter that a run trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from lockstep.config.bounds import Above, AtLeast


@dataclass
class LoraConfig:
    """A low-rank adapter for frozen weights (arXiv 2106.09685); its dropout is 0."""

    rank: Annotated[int, AtLeast(0)] = 0
    """Rank of the update of each adapted matrix; 0: no adapter, all weights are trained. 8 to 64 are usual, with a
    learning rate about ten times that of full training."""
    alpha: Annotated[float, Above(0)] = 16.0
    """The update is scaled by alpha / rank."""
    targets: tuple[str, ...] = ("*_proj*",)
    """Names of the linear layers to adapt, or patterns of them: q_proj, mlp.*, layers.3.*; lm_head is the output head,
    tied or not. Routers, stacked experts and a reward model's head have no adapters."""
