"""The one model definition, its families, and reading and writing Hugging Face folders."""

from lockstep.model.adapter_folder import base_folder, is_adapter_folder
from lockstep.model.arithmetic import arithmetic_of, instruction_set, set_arithmetic
from lockstep.model.checkpoint import (
    begin_adapter,
    begin_score_head,
    begin_tokens,
    check_tensors,
    empty_model,
    load_model,
    load_weights,
    read_config,
    refuse_few_bytes,
    refuse_score_head,
    save_model,
    write_description,
)
from lockstep.model.config import ExpertsConfig, Latent, Lora, ModelConfig
from lockstep.model.decoder import Decoder
from lockstep.model.device import open_device
from lockstep.model.dtypes import is_auto, name_of, resolve_dtype
from lockstep.model.families import PRESETS, is_ignored, preset
from lockstep.model.folder_dtype import choose_dtype, folder_dtype, stored_dtype
from lockstep.model.initialize import build_model, initialize
from lockstep.model.lora import adapter_off, lora_of
from lockstep.model.protocols import ScoringModel, TrainableModel
from lockstep.model.ropes import RopeScaling, Yarn
from lockstep.model.stored import Stored, hugging_face_name, read_as, stored_as
from lockstep.model.tensors import stored_tensors
from lockstep.model.token_ids import check_token_ids
from lockstep.model.write_adapter import save_adapter, write_adapter_description

__all__ = [
    "PRESETS", "Decoder", "ExpertsConfig", "Latent", "Lora", "ModelConfig", "RopeScaling", "ScoringModel", "Stored",
    "TrainableModel", "Yarn", "adapter_off", "arithmetic_of", "base_folder", "begin_adapter", "begin_score_head",
    "begin_tokens", "build_model", "check_tensors", "check_token_ids", "choose_dtype", "empty_model", "folder_dtype",
    "hugging_face_name", "initialize", "instruction_set", "is_adapter_folder", "is_auto", "is_ignored", "load_model",
    "load_weights", "lora_of", "name_of", "open_device", "preset", "read_as", "read_config", "refuse_few_bytes",
    "refuse_score_head", "resolve_dtype", "save_adapter", "save_model", "set_arithmetic", "stored_as", "stored_dtype",
    "stored_tensors", "write_adapter_description", "write_description",
]  # fmt: skip
