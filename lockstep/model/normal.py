"""Normal and uniform draws with the same bits on every processor.

Philox (Salmon et al., 2011) generates integers; the inverse of the normal distribution, PPND7 of Wichura (1988,
AS 241) in float32, maps them to draws. Its logarithm is `ops.elementary`'s, and every operation is rounded separately.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32

from lockstep.ops.elementary import logarithm, polynomial

CENTRE = (3.3871327179e00, 5.0434271938e01, 1.5929113202e02, 5.9109374720e01)
CENTRE_BELOW = (1.0, 1.7895169469e01, 7.8757757664e01, 6.7187563600e01)
TAIL = (1.4234372777e00, 2.7568153900e00, 1.3067284816e00, 1.7023821103e-01)
TAIL_BELOW = (1.0, 7.3700164250e-01, 1.2021132975e-01)


def normal(seed: int, count: int) -> Float32[np.ndarray, "count"]:
    """`count` draws of mean 0 and standard deviation 1, within ±5.3; the first draws do not depend on `count`."""
    return inverse_normal(uniform(seed, count))


def uniform(seed: int, count: int) -> Float32[np.ndarray, "count"]:
    """`count` draws strictly between -1/2 and 1/2; the first draws do not depend on `count`."""
    words = np.random.Philox(key=seed).random_raw((count + 1) // 2).astype("<u8", copy=False).view("<u4")[:count]
    # Odd 24-bit integers around zero: exact in float32, and never probability 0 or 1.
    distances = ((words >> np.uint32(8)) | np.uint32(1)).astype(np.int32) - np.int32(1 << 23)
    return distances.astype(np.float32) * np.float32(2.0**-24)


def inverse_normal(distance: Float32[np.ndarray, "count"]) -> Float32[np.ndarray, "count"]:
    """The quantile of the normal distribution at probability 1/2 + `distance`, to 7 digits."""
    r = np.float32(0.180625) - distance * distance
    values = distance * (polynomial(r, CENTRE) / polynomial(r, CENTRE_BELOW))
    (tails,) = np.nonzero(np.abs(distance) > np.float32(0.425))
    far = distance[tails]
    roots = np.sqrt(-logarithm(0.5 - np.abs(far).astype(np.float64))).astype(np.float32) - np.float32(1.6)
    values[tails] = np.copysign(polynomial(roots, TAIL) / polynomial(roots, TAIL_BELOW), far)
    return values
