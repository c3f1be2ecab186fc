"""The operators' Triton forms for NVIDIA GPUs. Modules are imported on use, so triton is only needed then.

Kernels, and the functions that they call, have a parameter per pointer, stride and compile-time constant.
"""

from lockstep.ops.cuda.available import usable

__all__ = ["usable"]
