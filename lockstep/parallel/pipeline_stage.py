"""A pipeline stage: consecutive layers, under their names in the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from lockstep import ops
from lockstep.model import Decoder, ModelConfig


class Stage(Decoder):
    """Part of a Decoder, on the meta device. Only the first stage embeds; only the last has the norm and the head.

    If embedding and head are tied, the last stage has a copy of the embedding's weight.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, index: int, layers: list[range]):
        super().__init__(config, dtype, "meta")
        self.index = index
        self.extra_parameters: Mapping[str, nn.Parameter] = {}
        """Of the last stage: parameters of the loss, by name."""
        self.routes: dict[int, list[Tensor]] | None = None
        """Unless None, a step records the experts chosen in each micro-batch here."""
        """Whether it returns its input unchanged, since the step has been interrupted."""
        self.replayed: Mapping[int, ops.ReplayedRoutes] = {}
        """The routes that a step replays in each micro-batch."""
        self.is_first, self.is_last = index == 0, index == len(layers) - 1
        for layer in range(config.num_layers):
            if layer not in layers[index]:
                # Not `del self.layers[layer]`, which would rename the remaining ones.
                delattr(self.layers, str(layer))
        if not self.is_first and not self.borrows_embedding:
            del self.embed_tokens
        if not self.is_first and config.embedding_norm:
            del self.embed_norm
        if not self.is_last:
            del self.norm
            if config.score_head:
                del self.score
            else:
                del self.lm_head

    def forward(
        self,
        tokens: Int[Tensor, "tokens"] | Float[Tensor, "tokens dim"],
        positions: Int[Tensor, "tokens"],
        attention: ops.Attention,
    ) -> Float[Tensor, "tokens dim"]:
        """The hidden states that the next stage gets as `tokens`; those of the last stage are normed."""
        hidden = self.embed(tokens) if self.is_first else tokens
        hidden = self.run_blocks(hidden, positions, attention)
        return self.final_norm(hidden) if self.is_last else hidden

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """With `extra_parameters`: with a split backward, torch computes only these parameters' gradients."""
        yield from super().parameters(recurse)
        yield from self.extra_parameters.values()

    @property
    def local_layers(self) -> list[int]:
        """The indices of its layers in the whole model."""
        return [int(name) for name, _ in self.layers.named_children()]

    @property
    def borrows_embedding(self) -> bool:
        """Whether the head is a copy of the first stage's embedding."""
        return self.is_last and self.config.tie_embeddings

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return self.runs_on or next(self.parameters()).device


class Computed:
    """A `ScoringModel` whose forward has already run: calling it returns the hidden states, and a loss uses the
    head."""

    def __init__(self, last: Stage, hidden: Shaped[Tensor, "tokens dim"]):
        self.last = last
        self.hidden = hidden

    @property
    def head_weight(self) -> Tensor:
        return self.last.head_weight

    @property
    def head_terms(self) -> ops.HeadTerms:
        return self.last.head_terms

    def reserve_positions(self, length: int) -> None:
        self.last.reserve_positions(length)

    def __call__(self, tokens: Tensor, positions: Tensor, attention: ops.Attention) -> Tensor:
        return self.hidden
