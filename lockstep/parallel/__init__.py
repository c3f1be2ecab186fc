"""How a model is run, applied from outside the model: distribution over ranks, and compilation."""

from lockstep.parallel.apply import chunks_for, generator_layout, generator_model, parallel_model
from lockstep.parallel.compile import CompiledHalves, apply_compile
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.world import World, close_world, generating_world, open_world, refuse_ranks

__all__ = [
    "CompiledHalves",
    "Pipeline",
    "World",
    "apply_compile",
    "chunks_for",
    "close_world",
    "generating_world",
    "generator_layout",
    "generator_model",
    "open_world",
    "parallel_model",
    "refuse_ranks",
]
