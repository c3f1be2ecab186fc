"""How a step's tensors go through the model."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from lockstep import ops
from lockstep.generate.batch import StepBatch
from lockstep.model import Decoder


class Decoded(NamedTuple):
    """A decode step's results, one row a sequence. They hold until the next step."""

    logits: Float[Tensor, "sequences vocab"]
    tokens: Int[Tensor, "sequences"]
    """Drawn without top-k, top-p and min-p."""
    log_probs: Float[Tensor, "sequences"]


class Runner:
    """Calls the model directly. `GraphRunner` replays what was recorded where it can."""

    def __init__(self, model: Decoder, cache: ops.KVCache):
        self.model = model
        self.cache = cache

    def decode(self, batch: StepBatch) -> Decoded | None:
        """The whole step down to the draw, where that is one replay; `batch` is on the CPU."""
        return None

    def hidden(self, batch: StepBatch) -> Float[Tensor, "rows dim"]:
        """The hidden state of every row; `batch` is on the model's device."""
        attention = ops.PagedAttention(self.cache, batch.block_table, batch.query_lengths, batch.context_lengths)
        return self.model(batch.tokens, batch.positions, attention)
