"""The device of a command's model, engine and batches."""

from __future__ import annotations

import os

import torch

from lockstep.errors import UserError


def open_device(name: str = "") -> torch.device:
    """`cpu`, `cuda` or `cuda:1` …, made current for later launches; empty: the accelerator if there is one.

    Under torchrun `cuda` is this rank's device. Raises UserError, naming the available devices, for any other.
    """
    count = _cuda_devices()
    kind, colon, index = (name or ("cuda" if count else "cpu")).partition(":")
    if kind == "cpu" and not colon:
        return torch.device("cpu")
    if kind == "cuda" and (index.isdigit() or not colon) and not count:
        raise UserError(_missing(name))
    if kind != "cuda" or (colon and not (index.isdigit() and int(index) < count)):
        raise UserError(f"{_unknown(name)}. Empty: the accelerator, if any")
    number = int(index or os.environ.get("LOCAL_RANK", "0"))
    if number >= count:
        raise UserError(
            f"rank {os.environ['RANK']} is number {number} on this host, which has {count} CUDA devices; start that "
            "many ranks with --nproc-per-node, or give --device cpu"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def checked_device(name: str | torch.device) -> torch.device:
    """The device. Raises UserError if torch does not know it, or this machine lacks it."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UserError(_unknown(name)) from error
    if device.type == "cuda" and not _cuda_devices():
        raise UserError(_missing(name))
    if device.type == "cuda" and (device.index or 0) >= _cuda_devices():
        raise UserError(_unknown(name))
    return device


def _cuda_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _missing(name: object) -> str:
    return (
        f'device is "{name}", but this machine has no CUDA device that torch can use; leave --device out '
        "(lockstep doctor says what is missing)"
    )


def _unknown(name: object) -> str:
    known = ["cpu", *(f"cuda:{i}" for i in range(_cuda_devices()))]
    return f'device is "{name}"; this machine has {", ".join(known)}'
