"""Communication between ranks: every collective that PyTorch dispatches, by kind and mesh axis."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NO_MESSAGE = ("wait_tensor", "wrap_tensor_autograd", "barrier")


@dataclass
class Traffic:
    """The traffic of one kind of collective along one axis."""

    calls: int = 0
    bytes: int = 0
    """Of the larger side of each collective: the gathered result, or the input of a reduce-scatter."""


class CollectiveLog(TorchDispatchMode):
    """Counts collectives within its context, in `traffic` by (axis, kind). `axes`: each axis by its group's name."""

    def __init__(self, axes: dict[str, str]):
        super().__init__()
        self.traffic: dict[tuple[str, str], Traffic] = defaultdict(Traffic)
        self._axes = axes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and func._opname.strip("_") not in NO_MESSAGE:
            leaves = tree_leaves((args, kwargs, result))
            traffic = self.traffic[self._axis(leaves), func._opname.strip("_")]
            traffic.calls += 1
            traffic.bytes += max((t.nbytes for t in leaves if isinstance(t, Tensor)), default=0)
        return result

    def _axis(self, arguments: list[Any]) -> str:
        names = {a for a in arguments if isinstance(a, str)}
        for argument in arguments:
            if isinstance(argument, torch.ScriptObject):
                try:
                    names.add(dist.ProcessGroup.unbox(argument).group_name)
                except (RuntimeError, TypeError):
                    continue
        return next((self._axes[name] for name in names if name in self._axes), "all ranks")
