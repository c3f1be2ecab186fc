"""The line that a command prints before it starts: model, device, arithmetic and amount of work."""

from __future__ import annotations

import os
import sys

import torch

from lockstep.model import ModelConfig, arithmetic_of, instruction_set, name_of


def start_line(
    model: str, shape: ModelConfig, device: torch.device, dtype: torch.dtype, work: str, ranks: int = 1, ends: str = ""
) -> str:
    """One line for the terminal or a log. work: the amount of work; ends: the tokens at which samples end."""
    parameters = f"{in_short(shape.num_parameters)} parameters"
    if shape.mixtures:
        parameters += f" ({in_short(shape.num_active_parameters)} active)"
    if device.type == "cuda":
        where = f"{device} ({torch.cuda.get_device_name(device)})"
    else:
        where = f"{device} ({instruction_set()})"
    threads = torch.get_num_threads()
    where += f", {threads} thread{'s' * (threads > 1)}" + (f", {ranks} ranks" if ranks > 1 else "")
    arithmetic = f"{name_of(dtype)}, {arithmetic_of(device)} arithmetic"
    what = ", ".join(filter(None, [model, parameters, ends]))
    return " | ".join([what, where, arithmetic, work])


def announce(text: str) -> None:
    """Prints to stderr, since stdout is for results, on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)


def in_short(count: int) -> str:
    """A count with three significant digits: 1.05M, 8.03B."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)
