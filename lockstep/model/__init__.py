"""The one model definition, its families, and Hugging Face folders in and out."""

from lockstep.model.arithmetic import arithmetic_of, instruction_set, set_arithmetic
from lockstep.model.checkpoint import (
    folder_dtype,
    hugging_face_name,
    is_ignored,
    load_model,
    load_weights,
    read_config,
    refuse_few_bytes,
    save_model,
    tensor_files,
    write_description,
)
from lockstep.model.choose_dtype import choose_dtype, is_auto, name_of, training_seconds
from lockstep.model.config import ModelConfig, RopeScaling
from lockstep.model.decoder import Decoder
from lockstep.model.device import open_device
from lockstep.model.dtypes import resolve_dtype
from lockstep.model.families import PRESETS, preset
from lockstep.model.initialize import build_model, initialize
from lockstep.model.protocols import ScoringModel, TrainableModel
from lockstep.model.token_ids import check_token_ids

__all__ = [
    "PRESETS",
    "Decoder",
    "ModelConfig",
    "RopeScaling",
    "ScoringModel",
    "TrainableModel",
    "arithmetic_of",
    "build_model",
    "check_token_ids",
    "choose_dtype",
    "folder_dtype",
    "hugging_face_name",
    "initialize",
    "instruction_set",
    "is_auto",
    "is_ignored",
    "load_model",
    "load_weights",
    "name_of",
    "open_device",
    "preset",
    "read_config",
    "refuse_few_bytes",
    "resolve_dtype",
    "save_model",
    "set_arithmetic",
    "tensor_files",
    "training_seconds",
    "write_description",
]
