"""The weights whose products have a number format: of linear layers, and of all experts of a mixture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from lockstep.model.layers import Projection, is_narrow
from lockstep.model.moe import ClampedExperts, StackedWeight


class FormattedWeight(NamedTuple):
    """A weight, and the format of its product, by their names in their modules."""

    module: nn.Module
    parameter: str
    settings: nn.Module
    setting: str

    @property
    def weight(self) -> Tensor:
        weight: Tensor = getattr(self.module, self.parameter)
        return weight

    @property
    def format(self) -> str:
        """A key of `ops.FORMATS`."""
        name: str = getattr(self.settings, self.setting)
        return name

    def set_format(self, name: str) -> None:
        setattr(self.settings, self.setting, name)

    def replace_weight(self, weight: nn.Parameter) -> None:
        setattr(self.module, self.parameter, weight)


def formatted_weights(model: nn.Module) -> Iterator[tuple[str, FormattedWeight]]:
    """Of a model's or a block's layers, by name; without narrow ones, which published quantized folders keep too."""
    for name, module in model.named_modules():
        if is_narrow(name):
            continue
        if isinstance(module, Projection | StackedWeight):
            yield name, FormattedWeight(module, "weight", module, "precision")
        elif isinstance(module, ClampedExperts):
            for part in ("gate_up", "down"):
                yield f"{name}.{part}_proj", FormattedWeight(module, f"{part}_proj", module, f"{part}_precision")
