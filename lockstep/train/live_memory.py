"""Peak memory of this process's tensors, including fake ones."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Within its context, tracks the storages of `existing` and of what operators create on the CPU.

    Unlike torch's MemTracker, it puts no hooks into a graph, so that a backward in two halves, which frees parts of its
    graph in between, is counted correctly.
    """

    def __init__(self, existing: Iterable[Tensor] = ()):
        super().__init__()
        self.nbytes = self.peak = 0
        self._sizes: dict[int, int] = {}
        for tensor in existing:
            self._note(tensor.untyped_storage())

    def __enter__(self) -> LiveMemory:
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            self._note(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]  # FSDP frees with this
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on local tensors are dispatched again
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                self._note(leaf.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self._sizes:
            weakref.finalize(storage, self._freed, id(storage))
            self._sizes[id(storage)] = 0
        self.nbytes += storage.nbytes() - self._sizes[id(storage)]
        self._sizes[id(storage)] = storage.nbytes()
        self.peak = max(self.peak, self.nbytes)

    def _freed(self, name: int) -> None:
        self.nbytes -= self._sizes.pop(name)
