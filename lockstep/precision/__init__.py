"""What each linear layer of a model computes in: a number format for its factors, chosen by the layer's name.

A quantized product is an operator like any other, and part of the one forward: trainer and generator quantize the same
weights in the same way, so their bits agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from lockstep.errors import UserError, closest

NONE = "none"
"""The model's dtype."""
MULTIPLES = {
    NONE: 1, "int8": 1, "int4": 32, "int4_128": 128,
    "float8": 1, "float8_rowwise": 1, "float8_rowwise_gw_hp": 1, "mxfp8": 32, "mxfp8_floor": 32,
}  # fmt: skip
"""The formats by their names in `ops.FORMATS`, and the number that a layer's width must be a multiple of."""
FLOAT8 = "float8"
"""With one scale for all activations of a micro-batch: a row's bits depend on the others."""
HEAD = "lm_head"
KEEP = ("layers.first.*", "layers.last.*", HEAD)


@dataclass(frozen=True)
class Precision:
    """The format of a model's linear layers."""

    linear: str = NONE
    """A key of `MULTIPLES`."""
    keep: tuple[str, ...] = KEEP
    """Patterns of the names of layers that compute in the model's dtype; the numbers of the first and the last layer
    are also `first` and `last`."""

    def __post_init__(self) -> None:
        if self.linear not in MULTIPLES:
            raise UserError(
                f'precision "{self.linear}" is unknown.{closest(self.linear, MULTIPLES)} Known: {", ".join(MULTIPLES)}'
            )

    def of(self, name: str, width: int, num_layers: int) -> str:
        """The format of the layer `name`, which multiplies rows of `width` numbers, in a model of `num_layers`.

        Raises UserError, naming the layer, if it cannot have the format.
        """
        names = {name, name.replace("layers.0.", "layers.first."), name.replace(_last(num_layers), "layers.last.")}
        if self.linear == NONE or any(fnmatchcase(each, pattern) for each in names for pattern in self.keep):
            return NONE
        if width % (group := MULTIPLES[self.linear]):
            raise UserError(
                f"precision {self.linear} needs layers whose width is a multiple of {group}, but that of {name} is "
                f"{width}; add it to precision.keep, or choose int8"
            )
        if name == HEAD and not self.linear.startswith("int"):
            raise UserError(f"precision {self.linear} has no form for the head; add {HEAD} to precision.keep")
        return self.linear


MODELS_DTYPE = Precision()


def _last(num_layers: int) -> str:
    return f"layers.{num_layers - 1}."


def read_precision(value: Any, where: str) -> Precision:
    """What the linear layers were trained in; `where` begins errors, which are UserErrors."""
    if value is None:
        return MODELS_DTYPE
    if not isinstance(value, dict) or value.keys() != {"linear", "keep"} or not isinstance(value["keep"], list):
        raise UserError(f"{where}: precision is {value!r:.100}; it must have the keys linear and keep, a list of names")
    return Precision(value["linear"], tuple(value["keep"]))
