"""The operators' Triton forms for NVIDIA GPUs. Modules are imported on use, so triton is only needed then."""

from lockstep.ops.cuda.available import usable

__all__ = ["usable"]
