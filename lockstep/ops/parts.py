"""The part of the vocabulary's logits that a process has, and the exchange with processes that have other parts."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lockstep.ops.vocabulary_pieces import piece_bounds


@runtime_checkable
class VocabularyPart(Protocol):
    """Tokens `first` to `stop` of `vocab`: part number `rank` of ascending parts on several processes."""

    vocab: int
    first: int
    stop: int
    rank: int

    def gather(self, local: Tensor) -> Tensor:
        """The tensors of all processes, by rank: `[parts, *shape]`."""

    def gather_masses(self, local: Tensor) -> Tensor:
        """The masses `[rows, pieces, 3]` of the whole vocabulary, gathered from all parts."""

    def drawn(self, tokens: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor]:
        """For each row, the token id and its logit, from the one process whose token is not negative."""


class Whole:
    """The whole vocabulary, in one process."""

    first, rank = 0, 0

    def __init__(self, vocab: int):
        self.vocab = self.stop = vocab

    def gather(self, local: Tensor) -> Tensor:
        return local[None]

    def gather_masses(self, local: Tensor) -> Tensor:
        return local

    def drawn(self, tokens: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor]:
        return tokens, scaled


def local_piece_bounds(part: VocabularyPart, device: torch.device) -> Tensor:
    """The bounds of the vocabulary's pieces in this part."""
    return piece_bounds(part.vocab, device, part.first, part.stop)
