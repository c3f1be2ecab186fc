"""How much memory the tensors of this process take at once."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class PeakMemory(TorchDispatchMode):
    """The largest sum of live tensor storages after any operator within the context, of tensors made in it.

    Not the process's resident memory, of which a small run's tensors are a part too small to see.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self._storages = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # what it does on this rank's own tensors comes by again
        out = func(*args, **(kwargs or {}))
        storages = [leaf.untyped_storage() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        # Only one that is new or has grown can make the sum the largest; counting takes as long as most operators.
        if changed := [s for s in storages if s.device.type == "cpu" and self._storages.get(s) != s.nbytes()]:
            for storage in changed:
                self._storages[storage] = storage.nbytes()
            # A tape's tensors are several over the same memory.
            sizes = {_place(storage): storage.nbytes() for storage in self._storages}
            self.nbytes = max(self.nbytes, sum(sizes.values()))
        return out


def _place(storage: torch.UntypedStorage) -> int:
    try:
        return storage.data_ptr()
    except RuntimeError:  # of a tensor without memory
        return -id(storage)
