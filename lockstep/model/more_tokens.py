"""A stored embedding or head, extended to more tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.model.stored import EMBEDDING, HEAD
from lockstep.model.stored_tensor import StoredTensor

OF_TOKENS = (EMBEDDING, HEAD)
"""Tensors with a row per token."""


class MoreTokens:
    """A tensor `[tokens, dim]` in a file, followed by copies of its row `like` up to `tokens` rows.

    Copies, because a mean of rows could have different bits on other machines.
    """

    def __init__(self, stored: StoredTensor, tokens: int, like: int):
        self.file, self._stored, self._tokens, self._like = stored.file, stored, tokens, like

    def get_shape(self) -> list[int]:
        return [self._tokens, *self._stored.get_shape()[1:]]

    def get_dtype(self) -> str:
        return self._stored.get_dtype()

    def __getitem__(self, place: Any) -> Tensor:
        (start, stop, _), rest = place[0].indices(self._tokens), place[1:]
        end = min(stop, self._stored.get_shape()[0])
        parts = [self._stored[(slice(min(start, end), end), *rest)]]
        new = stop - max(start, end)
        if new > 0:
            parts.append(self._stored[(slice(self._like, self._like + 1), *rest)].expand(new, -1))
        return torch.cat(parts)
