"""Messages between ranks, as JSON or raw arrays: unlike pickles, they cannot run code."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 2**26
"""Bytes of an array per message."""
HEARTBEAT_SECONDS = 60.0
"""Seconds between two heartbeats while the other ranks wait for rank 0."""


def from_rank_0(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """The `value` (JSON-serializable) of the first rank of `group` (default: all), on every rank. All call it."""
    message = _bytes_of(value)
    length = torch.tensor([message.numel()])
    dist.broadcast(length, group=group, group_src=0)
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


def wait_for_rank_0() -> Any:
    """The value that rank 0 sends by `from_rank_0` after `others_wait`; not None, which is a heartbeat."""
    while (value := from_rank_0(None)) is None:
        pass
    return value


@contextmanager
def others_wait() -> Iterator[None]:
    """Lets rank 0 work for longer than the message timeout: a thread sends heartbeats to the others."""
    done = threading.Event()

    def send_heartbeats() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            from_rank_0(None)

    thread = threading.Thread(target=send_heartbeats, name="heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def from_all(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's `value` (JSON-serializable), in rank order, on every rank of `group` (default: all). All call it."""
    message, lengths = _padded(value, group)
    received = [torch.empty_like(message) for _ in lengths]
    dist.all_gather(received, message, group=group)
    return [_value_of(values[:length]) for values, length in zip(received, lengths)]


def to_rank_0(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """As `from_all`, but only on the first rank of `group`; empty on the others. All call it."""
    message, lengths = _padded(value, group)
    received = [torch.empty_like(message) for _ in lengths] if dist.get_rank(group) == 0 else None
    dist.gather(message, received, group=group, group_dst=0)
    return [_value_of(values[:length]) for values, length in zip(received or (), lengths)]


def _padded(value: Any, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """`value` as bytes, padded to the longest of all ranks, and the unpadded length on each rank."""
    message = _bytes_of(value)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([message.numel()]), group=group)
    longest = max(int(length) for length in lengths)
    return torch.cat([message, message.new_zeros(longest - message.numel())]), [int(length) for length in lengths]


def _bytes_of(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value_of(message: Tensor) -> Any:
    return json.loads(message.numpy().tobytes())
