"""Drawing tokens where each rank holds a part of the vocabulary: all ranks draw what one process would."""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from lockstep import ops
from lockstep.ops import native
from lockstep.ops.logprobs import join_masses, masses
from lockstep.ops.temperature import inverse_temperature
from lockstep.parallel.vocabulary import Part


class ShardedSampler:
    """`ops.sample` and `ops.top_log_probs` over `group`. `logits` are those of this rank's part of the vocabulary.

    Without cuts no logits travel: of each row the ranks exchange the masses of the vocabulary's pieces, and the token
    that the holder of the chosen piece has drawn. For top-k, top-p, min-p and the likeliest tokens they are gathered.
    """

    def __init__(self, vocab: int, group: dist.ProcessGroup):
        self.part, self.group = Part(vocab, group), group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def sample(
        self, logits: Float[Tensor, "rows part"], temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
        uniform: Tensor,
    ) -> tuple[Int[Tensor, "rows"], Float[Tensor, "rows"]]:  # fmt: skip
        """As `ops.sample`: a token of the whole vocabulary and its log-probability for each row."""
        cuts = (top_k > 0) | (top_p < 1) | (min_p > 0)
        if not native.usable(logits) or (cuts & (temperature != 0)).any():
            return ops.sample(self._gathered(logits), temperature, top_k, top_p, min_p, uniform)
        inverse = inverse_temperature(temperature)
        uniform = torch.where(temperature == 0, -1.0, uniform.double())
        logits = logits.contiguous()
        pieces = self.part.gather_masses(masses(logits, inverse, self.part.pieces(self.rank, logits.device)))
        rows, count = pieces.shape[:2]
        chosen, tokens = torch.empty(2, rows, dtype=torch.int64).unbind()
        highest, remaining = torch.empty(rows, dtype=torch.float32), torch.empty(rows, dtype=torch.float64)
        native.call("choose_pieces", torch.float32, pieces, uniform, chosen, highest, remaining, rows, count)
        bounds = self.part.bounds()
        firsts, stops = (bounds[chosen + end].clamp(self.part.first, self.part.stop) for end in (0, 1))
        within = (firsts - self.part.first, stops - self.part.first, highest, remaining)
        native.call("draw_within", logits.dtype, logits, inverse, uniform, *within, tokens, *logits.shape)
        # An empty stretch may lie behind this part's last token: then the token is another rank's.
        scaled = logits.gather(1, tokens[:, None].clamp(max=logits.shape[1] - 1))[:, 0].float() * inverse
        own = torch.stack((tokens.double() + self.part.first, scaled.double()), 1)  # exact in both
        drawn, scaled = self.part.of_holders(own, bounds[chosen]).unbind(1)
        return drawn.long(), join_masses(pieces, scaled.float())[0]

    def top_log_probs(
        self, logits: Float[Tensor, "rows part"], temperature: Tensor, counts: list[int]
    ) -> list[list[tuple[int, float]]]:
        """As `ops.top_log_probs`."""
        return ops.top_log_probs(self._gathered(logits), temperature, counts)

    def _gathered(self, logits: Tensor) -> Float[Tensor, "rows vocab"]:
        padded = torch.nn.functional.pad(logits, (0, self.part.length - logits.shape[1]))
        parts = padded.new_empty(self.ranks, *padded.shape)
        dist.all_gather(list(parts.unbind()), padded, group=self.group)
        return torch.cat(parts.unbind(), 1)[:, : self.part.vocab]
