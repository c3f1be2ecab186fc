"""In-place writes to a model's weights, detected by PyTorch's version counters."""

from __future__ import annotations

from torch import nn


class WeightWrites:
    """Detects writes since its creation, except through `.data`, NumPy or collectives, and except replaced
    parameters."""

    def __init__(self, model: nn.Module):
        self._weights = [parameter for parameter in model.parameters() if not parameter.is_inference()]
        self._known = self._count()

    def are_new(self) -> bool:
        """Takes a tenth of a microsecond per weight."""
        return self._count() != self._known

    def _count(self) -> int:
        return sum(weight._version for weight in self._weights)
