"""Sampling defaults of a model's `generation_config.json`, as vLLM reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.generate.sampling_params import SamplingParams
from lockstep.model.adapter_folder import base_folder
from lockstep.model.folder import GENERATION, files_folder
from lockstep.model.json_file import read_json

READ = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "max_new_tokens",
)  # fmt: skip


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Those of the model in `folder`, or of its base, as fields of `SamplingParams`: `max_tokens` only for chats.

    `do_sample` is not read. Raises UserError for values that cannot be used.
    """
    path = files_folder(folder) / GENERATION
    if not path.is_file():
        path = files_folder(base_folder(folder)) / GENERATION
    values = read_json(path) if path.is_file() else {}
    defaults = {name: values[name] for name in READ if values.get(name) is not None}
    if "max_new_tokens" in defaults:
        defaults["max_tokens"] = defaults.pop("max_new_tokens")
    if defaults.get("top_k") == -1:
        defaults["top_k"] = 0
    try:
        SamplingParams(**defaults)
    except UserError as error:
        raise UserError(
            f"{path}: {error}; correct it, or serve without its sampling parameters: --generation-config vllm"
        ) from error
    return defaults
