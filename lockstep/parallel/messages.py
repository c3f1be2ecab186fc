"""Messages between ranks, as JSON or raw arrays: unlike pickles, they cannot run code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 2**26
"""Bytes of an array per message."""
PATIENCE = timedelta(days=30)
"""How long the others wait for rank 0, which may work for longer than collectives may take; if its process ends, they
get an error at once."""


def from_rank_0(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """The `value` (JSON-serializable) of the first rank of `group` (default: all), on every rank. All call it."""
    message = _bytes_of(value)
    length = torch.tensor([message.numel()])
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, PATIENCE
    (group or dist.distributed_c10d._get_default_group()).broadcast([length], options).wait(PATIENCE)
    message = message if dist.get_rank(group) == 0 else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(message, group=group, group_src=0)
    return _value_of(message)


def arrays_from_rank_0(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Rank 0's `arrays` (one-dimensional, of numbers or booleans) on every rank. All ranks call it."""
    described = from_rank_0([(array.dtype.str, len(array)) for array in arrays])
    if dist.get_rank() != 0:
        arrays = [np.empty(length, dtype) for dtype, length in described]
    for array in arrays:
        # As bytes, since gloo does not support unsigned integers of two and four bytes.
        content = torch.from_numpy(array.view(np.uint8))
        for start in range(0, len(content), CHUNK):
            dist.broadcast(content[start : start + CHUNK], src=0)
    return list(arrays)


def from_all(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's `value` (JSON-serializable), in rank order, on every rank of `group` (default: all). All call it."""
    message = _bytes_of(value)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([message.numel()]), group=group)
    longest = max(int(length) for length in lengths)
    message = torch.cat([message, message.new_zeros(longest - message.numel())])
    received = [torch.empty_like(message) for _ in lengths]
    dist.all_gather(received, message, group=group)
    return [_value_of(values[: int(length)]) for values, length in zip(received, lengths)]


def _bytes_of(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value_of(message: Tensor) -> Any:
    return json.loads(message.numpy().tobytes())
