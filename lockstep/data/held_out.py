"""Splits the documents into training and validation sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lockstep.data.corpus import TokenizedCorpus
from lockstep.errors import UserError


@dataclass
class SplitSource:
    """A source of which `share` of the documents are held out for validation; the others are for training."""

    source: Any
    share: float
    _whole: TokenizedCorpus | None = field(default=None, repr=False)

    def part(self, held_out: bool, open_whole: Callable[[Any], Any]) -> TokenizedCorpus:
        """The training or the held-out documents; `open_whole` opens the corpus once for both.

        The split depends only on the number of documents and the share. Raises UserError for a source that cannot be
        split.
        """
        if self._whole is None:
            opened = open_whole(self.source)
            if not isinstance(opened, TokenizedCorpus):
                raise UserError(
                    f"{self.source.data}: validation_share needs data of known length, but this is streamed; give "
                    "--validation-data"
                )
            self._whole = opened
        count = len(self._whole.offsets) - 1
        size = max(1, round(self.share * count))
        if size >= count:
            raise UserError(
                f"{getattr(self.source, 'data', 'the data')}: has {count} document{'s' * (count != 1)}, of which "
                f"validation_share {self.share:g} leaves none to train on; give --validation-data"
            )
        order = np.random.default_rng(count).permutation(count)
        return replace(self._whole, chosen=np.sort(order[:size] if held_out else order[size:]))


@dataclass(frozen=True)
class SplitPart:
    """The training or the held-out part of a source, in a run's list of sources."""

    split: SplitSource
    held_out: bool


def divide(sources: Sequence[tuple[Any, float]], share: float) -> tuple[list[Any], list[Any]]:
    """Splits each of the weighted sources; returns those to train on and those held out."""
    divided = [(SplitSource(source, share), weight) for source, weight in sources]
    training, held_out = ([(SplitPart(each, which), weight) for each, weight in divided] for which in (False, True))
    return training, held_out
