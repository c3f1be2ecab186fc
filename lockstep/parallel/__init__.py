"""How a model is run, from outside of it: compilation, and later its distribution over ranks."""

from lockstep.parallel.compile import CompiledHalves, apply_compile

__all__ = ["CompiledHalves", "apply_compile"]
