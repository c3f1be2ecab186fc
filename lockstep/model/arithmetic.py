"""The operators' arithmetic: chosen once per process, and recorded with everything that depends on it.

`portable` gives the same bits on every CPU; `bf16_pairs` and `bf16_tiles` are faster in bfloat16 if the processor
has the instructions, each with different bits. A GPU's arithmetic cannot be chosen.

`bf16_tiles` can be requested on any processor: without AMX it is emulated, many times slower.
"""

from __future__ import annotations

import warnings

import torch

from lockstep import ops
from lockstep.errors import UserError


def set_arithmetic(wanted: str, device: torch.device, recorded: str = "") -> str:
    """Sets the arithmetic of the CPU's operators; returns its name, or `auto` if `device` is not a CPU.

    auto: `recorded`, the arithmetic of the run or checkpoint that is resumed, or if none is recorded the fastest on
    this processor. Warns if it is emulated. Raises UserError for one that this processor lacks, naming both.
    """
    if device.type != "cpu":
        if wanted != "auto":
            raise UserError(f"arithmetic {wanted} is for CPUs, but the device is {device}; leave it out")
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
            f"computed so far in {recorded} arithmetic, which is not available here: {error}. Resume where it is, or "
            f"accept different bits from here on with --arithmetic {other}"
        ) from error
    if ops.is_emulated(name):
        warnings.warn(
            f"arithmetic {name} is emulated on this processor, with the same bits but many times slower; --arithmetic "
            "portable is faster, with different bits",
            stacklevel=2,
        )
    return name


def arithmetic_of(device: torch.device) -> str:
    """The name of the arithmetic in use: equal names on two machines mean equal bits."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"cuda sm_{major}{minor}"
    return ops.arithmetic()


def instruction_set() -> str:
    """Instruction set of the CPU's operators, such as `avx2`; it does not affect the bits."""
    return ops.instruction_set()
