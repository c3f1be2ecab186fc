"""What each linear layer of a model computes in: a number format for its factors, chosen by the layer's name; and what
the cache stores keys and values in.

A quantized product is an operator like any other, and part of the one forward: trainer and generator quantize the same
weights in the same way, so their bits agree. Likewise, both attend to the keys and values that the cache can store.
"""

from __future__ import annotations

from collections.abc import Mapping
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
CACHES = (NONE, "int8")
"""What the cache can store keys and values in."""
HEAD = "lm_head"
EXPERTS = ".experts."
"""In the names of the stacked weights of a mixture's experts."""
KEEP = ("layers.first.*", "layers.last.*", HEAD)


@dataclass(frozen=True)
class Precision:
    """The formats of a model's linear layers and of its cache."""

    linear: str = NONE
    """A key of `MULTIPLES`."""
    keep: tuple[str, ...] = KEEP
    """Patterns of the names of layers that compute in the model's dtype; the numbers of the first and the last layer
    are also `first` and `last`."""
    cache: str = NONE
    """What keys and values are rounded to: one of `CACHES`."""

    def __post_init__(self) -> None:
        if self.cache not in CACHES:
            raise UserError(
                f'precision.cache "{self.cache}" is unknown.{closest(self.cache, CACHES)} Known: {", ".join(CACHES)}'
            )
        if self.linear not in MULTIPLES:
            raise UserError(
                f'precision "{self.linear}" is unknown.{closest(self.linear, MULTIPLES)} Known: {", ".join(MULTIPLES)}'
            )

    def table(self, widths: Mapping[str, int], num_layers: int) -> dict[str, str]:
        """The format of each layer, by name. widths: of the rows that each layer multiplies.

        Raises UserError for a layer that cannot have the format, for a pattern of `keep` that matches none, and if no
        layer has the format.
        """
        names = {name: _names(name, num_layers) for name in widths}
        for pattern in self.keep:
            if pattern not in (*KEEP, NONE) and not any(_match(of_layer, pattern) for of_layer in names.values()):
                raise UserError(
                    f'precision.keep: no layer matches "{pattern}".{_likely(pattern, widths)} Layers are named like '
                    f"{next(iter(widths))}"
                )
        table = {
            name: NONE if any(_match(names[name], pattern) for pattern in self.keep) else self._of(name, width)
            for name, width in widths.items()
        }
        if self.linear != NONE and {*table.values()} == {NONE}:
            raise UserError(
                f"precision.keep {' '.join(self.keep)} keeps all layers of this model, so none is in {self.linear}; "
                f"keep fewer, such as {HEAD} alone, or use precision.linear {NONE}"
            )
        return table

    def _of(self, name: str, width: int) -> str:
        if self.linear == FLOAT8 and EXPERTS in name:  # as in torchao, which has no such grouped product
            return NONE
        if width % (group := MULTIPLES[self.linear]):
            raise UserError(
                f"precision {self.linear} needs layers whose width is a multiple of {group}, but that of {name} is "
                f"{width}; add it to precision.keep, or choose int8"
            )
        if name == HEAD and not self.linear.startswith(("int", NONE)):
            raise UserError(f"precision {self.linear} has no form for the head; add {HEAD} to precision.keep")
        return self.linear


MODELS_DTYPE = Precision()


def _names(name: str, num_layers: int) -> set[str]:
    """A layer's name, and those by which it is the first or the last one's."""
    last = f"layers.{num_layers - 1}."
    return {name, name.replace("layers.0.", "layers.first."), name.replace(last, "layers.last.")}


def _likely(pattern: str, names: Mapping[str, int]) -> str:
    """What a pattern that matches no layer probably means: a name's end, a name in the folder, or several patterns."""
    if any(fnmatchcase(name, each) for each in pattern.split(",") for name in names) and "," in pattern:
        return " Separate patterns by spaces."
    for likely in (f"*.{pattern}", pattern.removeprefix("model.")):
        if any(fnmatchcase(name, likely) for name in names):
            return f' Did you mean "{likely}"?'
    return closest(pattern, names)


def _match(names: set[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def read_precision(value: Any, where: str) -> Precision:
    """What a model was trained in; `where` begins errors, which are UserErrors."""
    if value is None:
        return MODELS_DTYPE
    required, keys = {"linear", "keep"}, value.keys() if isinstance(value, dict) else set()
    if not required <= keys <= required | {"cache"} or not isinstance(value["keep"], list):
        raise UserError(
            f"{where}: precision is {value!r:.100}; it must have the keys linear and keep, a list of names, and can "
            "have the key cache"
        )
    return Precision(value["linear"], tuple(value["keep"]), value.get("cache", NONE))
