"""The operators' Triton forms for NVIDIA GPUs. Rooms are imported where they are used: only there triton must exist."""

from lockstep.ops.cuda.available import usable

__all__ = ["usable"]
