"""How documents become rows, and where they are kept once tokenised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class DataConfig:
    """The loader's settings."""

    packing: Literal["cut", "whole"] = "cut"
    """Documents one after the other, cut where a row ends; or whole, in rows filled up with padding."""
    separate_documents: bool = True
    """Attention and positions stay within a document; off: a row is one sequence."""
    repeat: bool = True
    """Begin again, in another order, where the data ends; off: the run stops there."""
