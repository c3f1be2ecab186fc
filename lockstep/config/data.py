"""How documents become rows, and where tokenized files are cached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from lockstep.config.bounds import Above, AtLeast


@dataclass
class DataConfig:
    """The loader's settings."""

    packing: Literal["cut", "whole"] = "cut"
    """`cut`: concatenate documents and cut at row ends; `whole`: whole documents in padded rows."""
    separate_documents: bool = True
    """Attention and positions stay within a document; off: a row is one sequence."""
    repeat: bool = True
    """Start over, in a different order, when the data ends; off: the run stops there."""
    shuffle_window: Annotated[int, Above(0)] = 4096
    """Documents of a stream (hf:…) that are shuffled together; files are shuffled as a whole."""
    workers: Annotated[int, AtLeast(0)] = 4
    """Processes that tokenize in the background; 0: none. A few megabytes of files never need them."""
    cache: str = ""
    """Folder that keeps tokenized files for the next run. Empty: up to 256 MiB of files are tokenized in memory at
    every start; more are tokenized once, into ~/.cache/lockstep."""
