"""Weights in the forms of the package compressed-tensors: the codes and scales that Lockstep's products compute with.

Products quantize the weights that they are given. Those read from such a folder are the rounded ones, in bfloat16, and
get the same codes and scales again, in float8 the same values: so log-probabilities in the format have the same bits
before and after. Each weight is checked for that while it is written. In float32 it would not hold: 127 times a row's
scale may differ from the row's largest magnitude in the last bit.

Scales of 4-bit weights are negative where the number of the largest magnitude is positive, as AutoRound's are. The
package multiplies by them as they are, and vLLM does too, except with VLLM_MARLIN_INPUT_DTYPE=int8 (its issue 48905).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import BFloat16
from torch import Tensor

from lockstep.errors import UserError
from lockstep.model.compressed_tensors import PACKED, SCALE, SHAPE
from lockstep.model.families import quantized_methods
from lockstep.model.stored import EMBEDDING, EXPERTS, HEAD
from lockstep.ops.float8 import BLOCK, block_codes, block_values, row_codes, row_values
from lockstep.ops.integer_linear import quantized_rows, quantized_weight, rounded_weight

METHOD, WEIGHT = "compressed-tensors", ".weight"
ELEMENTS = 2**20
"""Elements that are quantized at a time, so that their copies in float32 stay in the processor's cache."""


class Form(NamedTuple):
    """How weights in a format are stored, in the package's terms."""

    name: str
    weights: dict[str, Any]
    activations: dict[str, Any] | None
    """What other programs quantize activations to."""
    parts: Callable[[Tensor], dict[str, Tensor]]
    """Codes and scales, by what is appended to the weight's name."""
    rounded: Callable[[Tensor], Tensor]
    """The numbers that these represent."""

    def checked_parts(self, weight: Tensor) -> dict[str, Tensor] | None:
        """None if a product with the rounded weight would not compute the same."""
        parts, values = self.parts(weight), self.rounded(weight)
        if self.weights["type"] == "float":
            return parts if torch.equal(self.rounded(values), values) else None
        again = self.parts(values)
        return parts if all(torch.equal(parts[end], again[end]) for end in parts) else None


def _int8(weight: Tensor) -> dict[str, Tensor]:
    codes, scales = quantized_rows(weight)
    return {"": codes.flatten(1).to(torch.int8), SCALE: scales.flatten(1)}


def _int4(weight: Tensor, group: int) -> dict[str, Tensor]:
    codes, scales = quantized_weight(weight, group)
    numbers = (codes.flatten(1) + 8).to(torch.uint8)
    # A word's bytes begin with the lowest, each with its first number in the low half.
    words = (numbers[:, ::2] | numbers[:, 1::2] << 4).view(torch.int32)
    return {PACKED: words, SCALE: scales.flatten(1).bfloat16()}


def _rowwise(weight: Tensor) -> dict[str, Tensor]:
    codes, scales = row_codes(weight)
    return {"": codes, SCALE: scales.bfloat16()}  # powers of two


def _blocks(weight: Tensor, scaling: str) -> dict[str, Tensor]:
    codes, scales = block_codes(weight, scaling)
    return {"": codes, SCALE: scales.view(torch.uint8)}


def _numbers(kind: str, bits: int, strategy: str, dynamic: bool = False, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic, **more}


def _in_groups(group: int) -> Form:
    numbers = _numbers("int", 4, "group", group_size=group)
    return Form("pack-quantized", numbers, None, partial(_int4, group=group), partial(rounded_weight, group=group))


def _mx(scaling: str) -> Form:
    block = {"group_size": BLOCK, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    weights, activations = (_numbers("float", 8, "group", dynamic, **block) for dynamic in (False, True))
    parts, rounded = partial(_blocks, scaling=scaling), partial(block_values, scaling=scaling)
    return Form("mxfp8-quantized", weights, activations, parts, rounded)


def _per_row(name: str, kind: str, parts: Callable[..., Any], rounded: Callable[..., Tensor]) -> Form:
    return Form(name, _numbers(kind, 8, "channel"), _numbers(kind, 8, "token", dynamic=True), parts, rounded)


_ROWWISE = _per_row("float-quantized", "float", _rowwise, row_values)
FORMS = {
    "int8": _per_row("int-quantized", "int", _int8, rounded_weight),
    "int4": _in_groups(32),
    "int4_128": _in_groups(128),
    "float8_rowwise": _ROWWISE,
    "float8_rowwise_gw_hp": _ROWWISE,
    "mxfp8": _mx("rceil"),
    "mxfp8_floor": _mx("floor"),
}
"""By the name of the format in `ops.FORMATS`."""


def form_of(format: str, family: str) -> Form:
    """Raises UserError for a format that cannot be stored, and for a family whose quantized folders are not read."""
    if format not in FORMS:
        raise UserError(f"weights in {format} cannot be stored; choose one of {', '.join(FORMS)}")
    if METHOD not in quantized_methods(family):
        raise UserError(
            f"{METHOD} is not supported for {family}, so its weights cannot be stored in {format}; leave out "
            "precision.linear here, and give it to the commands that open the folder"
        )
    return FORMS[format]


def quantized_parts(weight: BFloat16[Tensor, "out in"], form: Form, name: str) -> dict[str, Tensor]:
    """The tensors as which a weight is stored, by name; of one on the meta device, their shapes and dtypes.

    Raises UserError for a weight whose rounded numbers have other codes.
    """
    if weight.device.type == "meta":
        found = [form.parts(weight)]
    else:
        rows = weight.split(max(1, ELEMENTS // weight.shape[1]))
        found = [parts for part in rows if (parts := form.checked_parts(part)) is not None]
        if len(found) < len(rows):
            raise UserError(
                f"{name} has numbers that are not finite, or groups of such small ones (below 1e-37) that what is "
                f"stored could not have the same codes; add {_layer(name).removeprefix('model.')} to precision.keep"
            )
    parts = {name + end: torch.cat([part[end] for part in found]) for end in found[0]}
    return parts | ({name + SHAPE: torch.tensor(weight.shape)} if PACKED in found[0] else {})


def quantization_config(form: Form, shapes: Mapping[str, torch.Size], quantized: Collection[str]) -> dict[str, Any]:
    """The settings for `config.json` of a folder with these tensors, of which some are quantized."""
    others = [name for name, shape in shapes.items() if len(shape) == 2 and name not in (EMBEDDING, *quantized)]
    ignored = [_layer(name) for name in others if EXPERTS not in name]
    if len(ignored) < len(others):
        ignored.append(r"re:.*\.mlp\.experts\..*")
    if HEAD not in (*shapes, *quantized):  # tied: transformers has a layer of that name
        ignored.append(_layer(HEAD))
    group = {
        "targets": ["Linear"],
        "weights": form.weights,
        "input_activations": form.activations,
        "output_activations": None,
        "format": form.name,
    }
    return {
        "quant_method": METHOD,
        "format": form.name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def _layer(name: str) -> str:
    return name.removesuffix(WEIGHT)
