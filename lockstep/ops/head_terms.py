"""What a head's logits depend on other than hidden states and the weight."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from lockstep.ops.formats import FORMATS, NONE
from lockstep.ops.softcap import softcap


class HeadTerms(NamedTuple):
    """A head's number format and the cap of its logits."""

    format: str = NONE
    """Of the product's factors, a key of `FORMATS`."""
    softcap: float = 0.0
    """The logits are capped smoothly to ± this value; 0: not."""

    def logits(self, hidden: Float[Tensor, "rows dim"], head: Float[Tensor, "part dim"]) -> Float[Tensor, "rows part"]:
        return self.capped(FORMATS[self.format].linear(hidden, head, 1))

    def capped(self, logits: Float[Tensor, "rows part"]) -> Float[Tensor, "rows part"]:
        return softcap(logits, self.softcap) if self.softcap else logits


PLAIN_HEAD = HeadTerms()
