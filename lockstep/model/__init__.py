"""The one model definition, its families, and Hugging Face folders in and out."""

from lockstep.model.checkpoint import (
    hugging_face_name,
    is_ignored,
    load_model,
    load_weights,
    read_config,
    save_model,
    tensor_files,
    write_description,
)
from lockstep.model.config import ModelConfig, RopeScaling
from lockstep.model.decoder import Decoder
from lockstep.model.dtypes import resolve_dtype
from lockstep.model.families import PRESETS, preset
from lockstep.model.initialize import build_model, initialize

__all__ = [
    "PRESETS",
    "Decoder",
    "ModelConfig",
    "RopeScaling",
    "build_model",
    "hugging_face_name",
    "initialize",
    "is_ignored",
    "load_model",
    "load_weights",
    "preset",
    "read_config",
    "resolve_dtype",
    "save_model",
    "tensor_files",
    "write_description",
]
