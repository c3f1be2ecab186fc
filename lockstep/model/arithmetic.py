"""Which arithmetic the operators compute in: chosen once a process, and written beside everything that depends on it.

`portable` gives the same bits on every CPU; `bf16_pairs` and `bf16_tiles` are faster in bfloat16 where the processor
has the instructions, each with bits of its own. GPUs have theirs, which nobody chooses.

`bf16_tiles` can be asked for on any processor: where AMX is missing it is emulated, many times as slow.
"""

from __future__ import annotations

import warnings

import torch

from lockstep import ops
from lockstep.errors import UserError


def set_arithmetic(wanted: str, device: torch.device, recorded: str = "") -> str:
    """Makes the CPU's operators compute in `wanted`; returns its name, or `auto` where `device` is no CPU.

    auto: `recorded`, that of the run or the checkpoint gone on with, or where nothing is recorded the fastest of this
    processor. Warns where it is emulated. Raises UserError for one that this processor has not, naming both sides.
    """
    if device.type != "cpu":
        if wanted != "auto":
            raise UserError(f"arithmetic {wanted} is one of the CPU's, but the device is {device}; leave it out")
        return "auto"
    chosen = recorded if wanted == "auto" and recorded in ops.ARITHMETICS else wanted
    try:
        name = ops.set_arithmetic(chosen)
    except UserError:
        raise
    except ValueError as error:
        here = ops.arithmetic()
        other = here if here == "pytorch" or chosen == "portable" else "portable"
        if chosen == wanted:
            raise UserError(f"{error}; give --arithmetic {other}") from error
        raise UserError(
            f"computed so far in {recorded} arithmetic, which cannot be had here: {error}. Resume where it can, or "
            f"accept other bits from here on with --arithmetic {other}"
        ) from error
    if ops.is_emulated(name):
        warnings.warn(
            f"arithmetic {name} is emulated on this processor, with the same bits and many times as slow; --arithmetic "
            "portable is faster, with other bits",
            stacklevel=2,
        )
    return name


def arithmetic_of(device: torch.device) -> str:
    """The arithmetic in use: equal names on two machines are equal bits."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"cuda sm_{major}{minor}"
    return ops.arithmetic()


def instruction_set() -> str:
    """Of the CPU's operators, such as `avx2`; it has no say in the bits."""
    return ops.instruction_set()
