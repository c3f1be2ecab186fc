"""The states of a process's random generators, as tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_generators(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators, for user code that draws from them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Tensor]:
    """The states of Python, NumPy, torch and, if there is one, this process's GPU."""
    version, words, gauss = random.getstate()
    assert version == 3
    numpy: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = numpy
    assert name == "MT19937"
    state = {
        "python": torch.from_numpy(np.array(words, np.int64)),
        # NaN stands for None: no cached second value of a normal pair.
        "python_gauss": torch.tensor(float("nan") if gauss is None else gauss, dtype=torch.float64),
        "numpy": torch.from_numpy(np.append(keys.astype(np.int64), [position, has_gauss])),
        "numpy_gauss": torch.tensor(cached, dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """Restores a `random_state`; ignores a GPU's state if there is no GPU."""
    gauss = float(state["python_gauss"])
    random.setstate((3, tuple(state["python"].tolist()), None if gauss != gauss else gauss))
    *keys, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, float(state["numpy_gauss"])))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
