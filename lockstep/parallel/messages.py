"""Small values between ranks, as JSON: reading one runs no code, as reading a pickle may."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def from_rank_0(value: Any) -> Any:
    """Rank 0's `value` (JSON-able) on every rank. All ranks call it."""
    message = _bytes_of(value)
    length = torch.tensor([message.numel()])
    dist.broadcast(length, src=0)
    message = message if dist.get_rank() == 0 else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(message, src=0)
    return _value_of(message)


def from_all(value: Any) -> list[Any]:
    """Every rank's `value` (JSON-able), in the ranks' order, on every rank. All ranks call it."""
    message = _bytes_of(value)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([message.numel()]))
    longest = max(int(length) for length in lengths)
    padded = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
    dist.all_gather(padded, torch.cat([message, message.new_zeros(longest - message.numel())]))
    return [_value_of(received[: int(length)]) for received, length in zip(padded, lengths)]


def _bytes_of(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value_of(message: Tensor) -> Any:
    return json.loads(message.numpy().tobytes())
