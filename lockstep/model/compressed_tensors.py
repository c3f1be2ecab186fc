"""Folders of the package compressed-tensors, as llm-compressor writes them: int4 and int8, packed or not, and float8.

Follows version 0.20 of the package, and has its values in bfloat16, except for scales in float16: there the package
rounds products to float16 first. Settings of activations and key-value caches have no effect: products are computed
with the weights' values. The group of a weight in the settings follows from the shapes of its parts; the patterns in
`targets` and `ignore` are not evaluated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.model.fp8 import ACTIVATIONS, WHOLE, block_size
from lockstep.model.scaled import Scaled, is_one_number, scale_grid
from lockstep.model.stored_tensor import StoredTensor, whole_place

PACKED, SCALE, ZERO_POINT, SHAPE, GROUP_INDEX = "_packed", "_scale", "_zero_point", "_shape", "_g_idx"
"""Suffixes of the parts' names after the weight's. Codes that are not packed have the weight's name."""
WORD = 32
"""Bits of the numbers into which codes are packed, the first code in the lowest bits."""
NUMBERS = {
    "pack-quantized": {"int4": "I32", "int8": "I32"},
    "int-quantized": {"int8": "I8"},
    "float-quantized": {"float8": "F8_E4M3"},
    "mxfp8-quantized": {"float8": "F8_E4M3"},
    "naive-quantized": {"int8": "I8", "float8": "F8_E4M3"},
}
"""By format, the numbers that are read, and the type that a file has for them."""
STRATEGIES = {"tensor": WHOLE, "channel": (1, 0), "group": WHOLE, "block": WHOLE}
"""What has a scale, and its rows and columns (0: all); those of groups and blocks are in the settings."""


class CompressedTensors:
    """Raises UserError, naming the key after `where`, for settings that are not supported."""

    def __init__(self, settings: dict[str, Any], where: str):
        for key in ("sparsity_config", "transform_config"):
            table = settings.get(key) or {}
            if not isinstance(table, dict) or table.get("format", "dense") != "dense" or table.get("config_groups"):
                raise UserError(f"{where}: {key} is not supported; decompress the folder with compressed-tensors")
        groups = settings.get("config_groups")
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            raise UserError(f"{where}: config_groups is {groups!r:.100}; it must be a table of groups")
        self._where = where
        self._layouts = [
            Layout.read(group["weights"], group.get("format") or settings.get("format"), f"{where}: {name}")
            for name, group in groups.items()
            if group.get("weights") is not None
        ]

    def __call__(self, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """The folder's tensors, with weights in place of their parts. Raises UserError for parts that do not fit."""
        weights = {name: tensor for name, tensor in stored.items() if not ACTIVATIONS.search(name)}
        for name in [name.removesuffix(SCALE) for name in weights if name.endswith(SCALE)]:
            parts = Parts.take(name, weights)
            layout = next((layout for layout in self._layouts if layout.fits(parts)), None)
            if layout is None:
                raise UserError(
                    f"{parts.codes.file}: tensor {name} is {parts.described()}, which fits none of config_groups in "
                    f"{self._where}; the file is damaged, or they are those of another"
                )
            weights[name] = layout.open(name, parts)
        return weights


class Parts(NamedTuple):
    """The tensors as which a weight is stored."""

    codes: StoredTensor
    shape: list[int]
    """The weight's."""
    scales: StoredTensor
    zero_points: StoredTensor | None

    @classmethod
    def take(cls, name: str, tensors: dict[str, StoredTensor]) -> Parts:
        """Removes them from `tensors`. Raises UserError if one is missing."""
        ends = ("", PACKED, SHAPE, SCALE, ZERO_POINT, GROUP_INDEX)
        parts = {end: tensors.pop(name + end) for end in ends if name + end in tensors}
        file = parts[SCALE].file
        if GROUP_INDEX in parts:
            raise UserError(f"{file}: {name}{GROUP_INDEX}: groups ordered by activation (actorder) are not supported")
        for end in (PACKED, SHAPE):
            if "" not in parts and end not in parts:
                raise UserError(f"{file}: tensor {name}{end} is missing, but {name}{SCALE} is there")
        codes = parts[PACKED if PACKED in parts else ""]
        shape = parts[SHAPE][()].tolist() if PACKED in parts else codes.get_shape()
        sizes = shape if isinstance(shape, list) else []
        if len(sizes) < 2 or not all(type(size) is int and size > 0 for size in sizes):
            raise UserError(f"{file}: tensor {name} has shape {shape}; only matrices can be quantized")
        return cls(codes, sizes, parts[SCALE], parts.get(ZERO_POINT))

    def described(self) -> str:
        """For an error message."""
        zero_points = "no zero points" if self.zero_points is None else f"zero points {self.zero_points.get_shape()}"
        scales = f"scales {self.scales.get_shape()}"
        return f"{self.codes.get_dtype()} {self.codes.get_shape()} with {scales} and {zero_points}"


class Layout(NamedTuple):
    """How the weights of a group are stored."""

    codes: str
    """The type of the codes in the file."""
    bits: int
    block: tuple[int, int]
    """Rows and columns per scale; 0: all."""
    zero_points: bool

    @classmethod
    def read(cls, weights: Any, form: Any, where: str) -> Layout:
        """From a group's `weights` and format. Raises UserError."""
        if str(form) not in NUMBERS:
            raise UserError(f"{where}: format is {form!r:.100}; only {', '.join(NUMBERS)} are read")
        settings = weights if isinstance(weights, dict) else {}
        number, size = f"{settings.get('type', 'int')}{settings.get('num_bits', 8)}", settings.get("group_size")
        inferred = "tensor" if size is None else "channel" if size == -1 else "group"
        strategy = str(settings.get("strategy") or inferred)
        if number not in NUMBERS[form] or strategy not in STRATEGIES:
            raise UserError(
                f"{where}: weights are {number:.40} with a scale per {strategy:.40}; in {form} only "
                f"{', '.join(NUMBERS[form])} are supported, with a scale per {', '.join(STRATEGIES)}"
            )
        block = STRATEGIES[strategy]
        if strategy == "group":
            block = block_size([1, size], f"{where}: group_size")
        if strategy == "block":
            block = block_size(settings.get("block_structure"), f"{where}: block_structure")
        bits = 4 if number == "int4" else 8
        return cls(NUMBERS[form][number], bits, block, not settings.get("symmetric", True))

    def fits(self, parts: Parts) -> bool:
        """Whether a weight with these parts is stored so."""
        scales = parts.scales.get_shape()
        return (
            parts.codes.get_dtype() == self.codes
            and parts.codes.get_shape() == self._stored_shape(parts.shape)
            and (scales == scale_grid(parts.shape, self.block) or (self.block == WHOLE and is_one_number(parts.scales)))
            and self._zero_points_fit(parts)
        )

    def _zero_points_fit(self, parts: Parts) -> bool:
        if parts.zero_points is None:
            return not self.zero_points
        *outer, rows, columns = scale_grid(parts.shape, self.block)
        if parts.zero_points.get_dtype() == "I32":
            rows = -(-rows * self.bits // WORD)
        return parts.zero_points.get_shape() == [*outer, rows, columns] or is_one_number(parts.zero_points)

    def open(self, name: str, parts: Parts) -> Scaled:
        """The weight."""
        codes, zero_points = parts.codes, parts.zero_points
        if self.codes == "I32":
            codes = Packed(codes, self.bits, parts.shape, dim=-1)
        if zero_points is not None and zero_points.get_dtype() == "I32":
            zero_points = Packed(zero_points, self.bits, scale_grid(parts.shape, self.block), dim=-2)
        return Scaled(name, codes, parts.scales, self.block, zero_points)

    def _stored_shape(self, shape: list[int]) -> list[int]:
        return [*shape[:-1], -(-shape[-1] * self.bits // WORD)] if self.codes == "I32" else shape


class Packed:
    """Signed numbers of `bits` bits, packed into words along `dim`, -1 or -2. Half of their range is added to each."""

    def __init__(self, words: StoredTensor, bits: int, shape: list[int], dim: int):
        self.file, self._words, self._bits, self._shape, self._dim = words.file, words, bits, shape, dim

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return "I8"

    def __getitem__(self, place: Any) -> Tensor:
        whole = list(whole_place(place, self._shape))
        per_word, of = WORD // self._bits, whole[self._dim]
        first = of.start // per_word
        whole[self._dim] = slice(first, -(-of.stop // per_word))
        words = self._words[tuple(whole)].movedim(self._dim, -1)
        shifts = torch.arange(0, WORD, self._bits, dtype=torch.int32)
        numbers = ((words[..., None] >> shifts) & (1 << self._bits) - 1).flatten(-2) - (1 << self._bits - 1)
        return numbers.narrow(-1, of.start - first * per_word, of.stop - of.start).movedim(-1, self._dim)
