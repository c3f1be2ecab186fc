"""What a head's logits depend on other than hidden states and the weight."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from lockstep.ops.formats import FORMATS, NONE
from lockstep.ops.low_rank import LowRank, add_low_rank
from lockstep.ops.softcap import softcap


class HeadTerms(NamedTuple):
    """A head's number format, the updates of its adapters and the cap of its logits."""

    format: str = NONE
    """Of the product's factors, a key of `FORMATS`."""
    softcap: float = 0.0
    """The logits are capped smoothly to ± this value; 0: not."""
    updates: tuple[LowRank, ...] = ()
    """Added to the product, before the cap. A row has at most one."""

    def of(self, rows: Int[Tensor, "rows"] | slice) -> HeadTerms:
        """The terms of these rows alone."""
        return self._replace(updates=tuple(update.of(rows) for update in self.updates)) if self.updates else self

    def logits(self, hidden: Float[Tensor, "rows dim"], head: Float[Tensor, "part dim"]) -> Float[Tensor, "rows part"]:
        logits = FORMATS[self.format].linear(hidden, head, 1)
        for update in self.updates:
            logits = add_low_rank(logits, hidden, *update)
        return self.capped(logits)

    def capped(self, logits: Float[Tensor, "rows part"]) -> Float[Tensor, "rows part"]:
        return softcap(logits, self.softcap) if self.softcap else logits


PLAIN_HEAD = HeadTerms()
