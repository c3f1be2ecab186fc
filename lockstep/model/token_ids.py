"""Validation of token ids from callers."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from lockstep.errors import UserError


def check_token_ids(ids: Sequence[int], vocabulary: int, what: str) -> None:
    """Raises UserError, naming `what` and the position, unless `ids` is a list of tokens of such a vocabulary."""
    if isinstance(ids, str) or not hasattr(ids, "__len__"):
        raise UserError(f"{what} is {ids!r:.60}; it must be a list of token ids: encode text with a tokenizer")
    if not len(ids):
        raise UserError(f"{what} is empty; give at least one token")
    for position, token in enumerate(ids):
        if type(token) is not int and not isinstance(token, Integral):  # accepts NumPy integers
            as_list = "; a tensor's .tolist() is one" * hasattr(ids, "tolist")
            raise UserError(f"{what} has {token!r:.60} at position {position}; it must be a list of token ids{as_list}")
        if not 0 <= token < vocabulary:
            raise UserError(f"token {token} at position {position} of {what} is outside the vocabulary of {vocabulary}")
