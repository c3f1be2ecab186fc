"""Routes as strings: the experts that computed a token's log-probability in all layers, or a digest of them.

A whole route has one byte per chosen expert of each mixture, or two if a mixture has more than 256 experts. A route
longer than a digest takes several times the space of the token itself (48 layers of 8 experts: 512 characters versus
30), and comparing needs only the digest. So the digest is sent and written, unless routes are to be replayed.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from lockstep.generate.sampling_params import RoutesForm
from lockstep.model import ModelConfig

DIGEST = 8
"""Bytes. A shorter route is its own digest."""
LONGEST = 16384
"""The most characters of a route that is accepted."""


def routes_of_rows(
    recorded: Sequence[Int[Tensor, "tokens active"]], rows: Int[Tensor, "rows"], tokens: int
) -> list[bytes]:
    """Whole routes of some rows, from what `ops.recorded_routes` recorded of a forward pass over `tokens` rows."""
    return routes_in(choices(recorded, rows, tokens))


def choices(
    recorded: Sequence[Int[Tensor, "recorded active"]], rows: Int[Tensor, "rows"] | slice, tokens: int
) -> Int[Tensor, "rows mixtures active"]:
    """As `routes_of_rows`, but the experts of all mixtures as one tensor."""
    # A compiled half of a layer computes a single row twice. A CUDA graph pads its rows, by fewer rows than there are
    # tokens.
    return torch.stack([chosen[:: len(chosen) // tokens][rows] for chosen in recorded], 1)


def routes_in(table: Int[Tensor, "rows mixtures active"]) -> list[bytes]:
    """The whole route of each row."""
    rows = table.flatten(1).cpu().numpy()
    content, width = rows.tobytes(), rows.shape[1] * rows.itemsize
    return [content[start : start + width] for start in range(0, len(content), width)]


def written(route: bytes, form: RoutesForm = "whole") -> str:
    """A whole route as a string; empty if not requested."""
    if not form:
        return ""
    return b64encode(route if form == "whole" or len(route) <= DIGEST else _digest(route)).decode()


def is_written(route: str) -> bool:
    """Whether a string is a possible result of `written`."""
    try:
        return len(route) <= LONGEST and len(b64decode(route, validate=True)) > 0
    except ValueError:
        return False


def shortened(route: str) -> str:
    """The digest of a route, which may already be one."""
    content = b64decode(route)
    return route if len(content) <= DIGEST else b64encode(_digest(content)).decode()


def read_route(route: str, shape: ModelConfig) -> Int[np.ndarray, "mixtures active"] | None:
    """The experts of each mixture; None if the route is a digest, or of another shape."""
    assert shape.experts is not None
    kind = np.dtype(np.uint8 if shape.experts.count <= 256 else "<i2")
    content, mixtures, active = b64decode(route), len(shape.mixtures), shape.experts.routing.active
    if len(content) != mixtures * active * kind.itemsize:
        return None
    return np.frombuffer(content, kind).reshape(mixtures, active).astype(np.int64)


def _digest(route: bytes) -> bytes:
    return blake2b(route, digest_size=DIGEST).digest()
