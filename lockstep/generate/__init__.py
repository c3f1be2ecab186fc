"""The generator: an engine with a paged cache that runs the trainer's own model."""

from lockstep.generate.engine import Engine
from lockstep.generate.sampling_params import Completion, SamplingParams, TokenEvent
from lockstep.generate.statistics import Statistics

__all__ = ["Completion", "Engine", "SamplingParams", "Statistics", "TokenEvent"]
