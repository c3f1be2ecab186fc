"""The one model definition, its families, and Hugging Face folders in and out."""

from lockstep.model.checkpoint import build_model, load_model, load_weights, save_model
from lockstep.model.config import ModelConfig, RopeScaling
from lockstep.model.decoder import Decoder
from lockstep.model.families import PRESETS, preset

__all__ = [
    "PRESETS",
    "Decoder",
    "ModelConfig",
    "RopeScaling",
    "build_model",
    "load_model",
    "load_weights",
    "preset",
    "save_model",
]
